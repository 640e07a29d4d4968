"""Write cost tables of ONNX Runtime's kernels."""

from pathlib import Path

from graphquant.backends.onnxruntime_costs import CostTable


def write_cost_table(table: CostTable, path: Path) -> None:
    """Write a table as TOML."""
    lines = [
        "# Nanoseconds for each unit of work of ONNX Runtime's kernels, written by benchmarks/kernel_costs.py.",
        f'machine = "{table.machine}"',
        f'onnxruntime = "{table.onnxruntime}"',
        f"threads = {table.threads}",
    ]
    for kernel, costs in sorted(table.costs.items()):
        lines += ["", f'[costs."{kernel}"]', *(f"{name} = {value:.4g}" for name, value in sorted(costs.items()))]
    path.write_text("\n".join(lines) + "\n", "utf-8")
