"""Comparisons of two models as tables and JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from graphquant.visualize.json_export import JSON_SCHEMA_VERSION
from graphquant.visualize.tables import NameTable
from graphquant.visualize.text import plain_line, pluralize

if TYPE_CHECKING:
    from graphquant.analysis import Comparison, OutputFigures, SiteFigures


def comparison_view(comparison: Comparison, *, top: int) -> RenderableType:
    """Render the output metrics and the `top` quantized tensors with the largest errors of their own."""
    sections: list[RenderableType] = [_output_table(comparison)]
    sections += [
        plain_line(f"{output.name}: {output.problem}", "bold red") for output in comparison.outputs if output.problem
    ]
    reason = f"nothing to compare: it was empty for all {pluralize(comparison.samples, 'sample')}"
    sections += [plain_line(f"{output.name}: {reason}", "yellow") for output in comparison.outputs if output.empty]
    if comparison.sites:
        sections += ["", _site_table(comparison.sites[:top])]
        omitted_count = len(comparison.sites) - top
        sections += (
            [Text(f"{omitted_count} more with smaller errors; --top 0 shows all.", style="dim")]
            if omitted_count > 0
            else []
        )
    if comparison.random:
        sections.append(Text("The data is RANDOM: the metrics do not apply to real data.", style="bold red"))
    worst = (
        "the worst output has no SQNR"
        if comparison.sqnr == -math.inf
        else f"worst output {_decibel_text(comparison.sqnr)} dB"
    )
    summary = [worst if comparison.sqnr is not None else ""]
    summary.append(f"{_percent_text(comparison.agreement)} agree" if comparison.agreement is not None else "")
    figures = ", ".join(filter(None, summary)) or ("Nothing compared" if comparison.all_empty else "Compared")
    sections.append(plain_line(f"{figures}, over {pluralize(comparison.samples, 'sample')}.", "bold"))
    return Group(*sections)


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON data; decibels are null if exact or not measured."""
    return {
        "schema": JSON_SCHEMA_VERSION,
        "samples": comparison.samples,
        "random": comparison.random,
        "labels": comparison.labels or None,
        "sqnr": _rounded_or_none(comparison.sqnr),
        "agreement": comparison.agreement,
        "outputs": [_output_figures_json(output) for output in comparison.outputs],
        "sites": [_site_figures_json(site) for site in comparison.sites],
    }


def _output_figures_json(output: OutputFigures) -> dict[str, Any]:
    return {
        "name": output.name,
        "other": output.quantized_name,
        "equal": not output.problem and not output.empty and output.max_error == 0,
        "sqnr": _rounded_or_none(output.sqnr),
        "cosine": _rounded_or_none(output.cosine),
        "largest_difference": _rounded_or_none(output.max_error),
        "agreement": output.agreement,
        "rows": output.rows,
        "values": output.values,
        "accuracy": None if output.accuracy is None else {"float": output.accuracy[0], "quantized": output.accuracy[1]},
        "problem": output.problem or None,
    }


def _site_figures_json(site: SiteFigures) -> dict[str, Any]:
    return {
        "graph": site.graph,
        "op": site.op,
        "tensor": site.tensor,
        "rule": site.rule or None,
        "parameter": site.parameter,
        "local": _rounded_or_none(site.local),
        "accumulated": _rounded_or_none(site.accumulated),
        "sensitivity_db": _rounded_or_none(site.sensitivity),
        "exact": site.local == math.inf,
        "note": site.note or None,
    }


def _output_table(comparison: Comparison) -> NameTable:
    with_accuracy = any(output.accuracy for output in comparison.outputs)
    columns = ["output", "SQNR dB", "cosine", "max diff", "agree", *(["accuracy"] if with_accuracy else [])]
    table = NameTable(*columns, right=columns)
    for output in comparison.outputs:
        name = output.name if output.name == output.quantized_name else f"{output.name} = {output.quantized_name}"
        cells = [name, _decibel_text(output.sqnr), "" if output.cosine is None else f"{output.cosine:.6f}"]
        cells.append("" if output.empty else f"{output.max_error:.4g}")
        cells.append("" if output.agreement is None else _percent_text(output.agreement))
        if with_accuracy:
            cells.append("" if output.accuracy is None else " to ".join(map(_percent_text, output.accuracy)))
        table.add_row(*cells)
    return table


def _site_table(sites: tuple[SiteFigures, ...]) -> NameTable:
    has_sensitivity = any(site.sensitivity is not None for site in sites)
    columns = ["its own dB", "so far dB", *(["at outputs dB"] if has_sensitivity else [])]
    table = NameTable("quantized tensor", "rule", *columns, right=columns)
    for site in sites:
        cells = [
            site.tensor,
            site.rule,
            _decibel_text(site.local),
            _decibel_text(site.accumulated),
            *([_decibel_text(site.sensitivity)] if has_sensitivity else []),
        ]
        table.add_row(*cells, note=site.note)
    return table


def _decibel_text(value: float | None) -> str:
    if value is None:
        return ""
    return {math.inf: "equal", -math.inf: "none"}.get(value, f"{value:.2f}")


def _percent_text(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}%"


def _rounded_or_none(value: float | None) -> float | None:
    """Round a metric to six digits, because TensorFlow runs differ in the ninth."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
