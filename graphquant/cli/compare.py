"""Commands that judge models: `check`, `compare` and `diff`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphquant.cli.options import (
    FORCE,
    HTML,
    OUTPUT,
    PATH,
    GroupedCommand,
    NameType,
    collect_options,
    example_lines,
    format_option,
    options_of,
)
from graphquant.cli.output import print_view, progress_bar, write_or_print, write_page, write_result
from graphquant.errors import FindingsError, UsageError
from graphquant.utils.options import BACKEND_NAMES, CompareBounds, CompareOptions, SignatureOptions

if TYPE_CHECKING:
    from graphquant.analysis.comparison import Comparison
    from graphquant.analysis.diff import Differences
    from graphquant.ir import Model
    from graphquant.quantize import Plan


@click.command(
    "compare",
    cls=GroupedCommand,
    epilog=example_lines(
        "compare model.onnx model.quant.onnx --data eval.npz",
        "compare model.onnx model.quant.onnx --data eval.npz --sensitivity --top 5",
        "compare model.onnx model.quant.onnx --data photos,preset=imagenet --min-agreement 99%",
    ),
)
@click.argument("float_path", metavar="FLOAT", type=PATH)
@click.argument("quantized_path", metavar="QUANT", type=PATH)
@click.option(
    "--data",
    required=True,
    type=NameType(files=True),
    metavar="SPEC",
    help="Data for both models: eval.npz, pictures/, random:8.",
)
@options_of(CompareOptions)
@click.option("--match", "pairs", multiple=True, metavar="NAME=OTHER", help="Output NAME of FLOAT is OTHER of QUANT.")
@click.option("--top", type=click.IntRange(min=0), default=10, show_default=True, help="Tensors to list; 0 for all.")
@options_of(CompareBounds)
@format_option("json")
@HTML
@OUTPUT
@FORCE
def compare_command(
    float_path: Path,
    quantized_path: Path,
    data: str,
    pairs: tuple[str, ...],
    top: int,
    form: str,
    html: Path | None,
    output: Path | None,
    force: bool,
    **values: Any,
) -> None:
    """Measure the error of QUANT against FLOAT on the same data.

    The errors are those of each output and of each quantized tensor; docs/compare.md defines the metrics. --html draws
    both models side by side, with the errors as a heat map. Exit code 1 if a bound is missed.
    """
    from graphquant.api.compare import compare, load_compared
    from graphquant.api.models import check_output
    from graphquant.visualize.compare_report import comparison_view

    settings = collect_options(CompareOptions, values, outputs=_parse_matches(pairs))
    bounds = collect_options(CompareBounds, values)
    if settings.sensitivity and not settings.sites:
        raise UsageError("--sensitivity measures quantized tensors. Remove --outputs-only.")
    if bounds.max_metric_drop is not None and settings.metric is None:
        raise UsageError("--max-metric-drop is a bound on the metric. Add --metric MODULE:FUNCTION.")
    if html is not None and not settings.sites:
        raise UsageError("--html shows the errors of quantized tensors. Remove --outputs-only.")
    models = load_compared(float_path, settings), load_compared(quantized_path, settings)
    if html is not None and not all(model.traits.rewritable for model in models):
        raise UsageError(
            "--html shows the errors of quantized tensors, but TFLite's interpreter returns only the outputs. Remove"
            " --html, or compare the models from which the file was converted."
        )
    for path in (float_path, quantized_path):
        for output_path in filter(None, (output, html)):
            check_output(output_path, path, force=force)
    with progress_bar() as progress:
        comparison = compare(*models, data, settings, progress=progress)
    if form == "json":
        write_result("compare", comparison, output)
    else:
        print_view(comparison_view(comparison, top=top or len(comparison.sites)), output)
    if html is not None:
        from graphquant.visualize.pages import comparison_page

        write_page(html, comparison_page(*models, comparison))
    _check_bounds(comparison, bounds)


def _parse_matches(pairs: tuple[str, ...]) -> dict[str, str]:
    """Return the pairs of --match."""
    matches = {}
    for pair in pairs:
        name, equals, quantized_name = pair.partition("=")
        if not (name and equals and quantized_name):
            raise UsageError(f"--match {pair[:60]!r} is not NAME=OTHER. Name an output of FLOAT and one of QUANT.")
        matches[name] = quantized_name
    return matches


def _check_bounds(comparison: Comparison, bounds: CompareBounds) -> None:
    """Fail if a bound is missed, or if it applies to no output."""
    if bounds == CompareBounds():
        return
    if comparison.all_empty:
        raise FindingsError(
            f"Nothing was compared, because every output was empty for all {comparison.samples} samples. Use samples"
            " for which the model has an output."
        )
    if bounds.min_sqnr is not None and comparison.sqnr is None:
        raise UsageError("--min-sqnr applies to float outputs, and the models have none. Remove it.")
    if bounds.min_agreement is not None and comparison.agreement is None:
        raise UsageError("--min-agreement applies to class scores and integers, which no output has. Use --min-sqnr.")
    failures, sqnr, agreement = [], comparison.sqnr, comparison.agreement
    if bounds.min_sqnr is not None and sqnr is not None and not sqnr >= bounds.min_sqnr:
        failures.append(f"the worst output has {sqnr:.2f} dB, and --min-sqnr is {bounds.min_sqnr:g} dB")
    if bounds.min_agreement is not None and agreement is not None and not agreement >= bounds.min_agreement:
        failures.append(f"{100 * agreement:.2f}% agree, and --min-agreement is {100 * bounds.min_agreement:g}%")
    metric = comparison.metric
    if bounds.max_metric_drop is not None and metric is not None and metric.drop > bounds.max_metric_drop:
        failures.append(f"the metric drops by {metric.drop:.4g}, and --max-metric-drop is {bounds.max_metric_drop:g}")
    uncomparable = [output for output in comparison.outputs if output.problem]
    if uncomparable:
        failures = [f"output {uncomparable[0].name!r} cannot be compared, because {uncomparable[0].problem}"]
    if failures:
        message = "; ".join(failures)
        raise FindingsError(f"{message[:1].upper()}{message[1:]}. The list above starts with the worst tensors.")


@click.command("check")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", type=PATH)
@click.option(
    "--for",
    "backend",
    type=NameType(BACKEND_NAMES),
    metavar="BACKEND",
    help=f"Show which ops this backend runs in int8. Names: {', '.join(BACKEND_NAMES)}.",
)
@click.option(
    "--stats", type=PATH, metavar="FILE", help="Statistics from calibrate: report quantizations that no sample reached."
)
@options_of(SignatureOptions, exclude=("signature",))
@format_option("json", "sarif", "github")
@OUTPUT
@FORCE
def check_command(
    models: tuple[Path, ...],
    backend: str | None,
    stats: Path | None,
    form: str,
    output: Path | None,
    force: bool,
    **reading: Any,
) -> None:
    """Find probable mistakes in quantized MODELs. With --for, also show which ops stay float on that backend.

    docs/check.md explains the codes. Exit code 1 if there are findings.
    """
    if stats is not None and len(models) > 1:
        raise UsageError("--stats belongs to one model. Pass one model.")
    from graphquant.api.inspect import check
    from graphquant.api.models import check_output, load
    from graphquant.visualize import check_report as view

    if output is not None:
        check_output(output, models[0], force=force)
    loaded = (load(model, **reading) for model in models)
    reports = [check(model, backend=backend, stats=stats) for model in loaded]
    if form == "text":
        from rich.console import Group

        print_view(Group(*map(view.check_view, reports)), output)
    elif form == "json":
        from graphquant.visualize.json_results import CheckResult

        data = [CheckResult.model_validate(report).as_json() for report in reports]
        write_or_print(data[0] if len(data) == 1 else data, output)
    elif form == "sarif":
        write_or_print(view.check_sarif(reports), output)
    else:
        write_or_print("".join(map(view.check_annotations, reports)), output)
    if any(report.findings for report in reports):
        raise click.exceptions.Exit(FindingsError.exit_code)


@click.command("diff")
@click.argument("first", metavar="A", type=PATH)
@click.argument("second", metavar="B", type=PATH)
@click.option("--stat", is_flag=True, help="Print only the number of differences.")
@click.option("--ignore", type=click.Choice(["qdq"]), help="Ignore differences in quantization.")
@format_option("json")
@HTML
@click.option("--model", type=PATH, metavar="FILE", help="With --html and two plans: the model to draw.")
@options_of(SignatureOptions, exclude=("signature",))
@OUTPUT
@FORCE
def diff_command(
    first: Path,
    second: Path,
    stat: bool,
    ignore: str | None,
    form: str,
    html: Path | None,
    model: Path | None,
    output: Path | None,
    force: bool,
    **reading: Any,
) -> None:
    """Show the differences between two models or plans, A and B.

    The models are not run. Ops are matched by name, or by position where names differ. Quantization ops are skipped
    during matching and reported separately. docs/diff.md explains the lines. Exit code 1 if anything differs.
    """
    from graphquant.api.compare import diff, plan_or_none
    from graphquant.api.models import check_output, load
    from graphquant.visualize.compare_report import diff_view

    operands = [plan_or_none(path) or load(path, **reading) for path in (first, second)]
    for path in filter(None, (first, second, model)):
        for output_path in filter(None, (output, html)):
            check_output(output_path, path, force=force)
    differences = diff(*operands, quantization=ignore is None)
    drawn_model = None if html is None or model is None else load(model, **reading)
    page = _diff_page(operands, differences, drawn_model) if html is not None else ""
    if form == "json":
        write_result("diff", differences, output)
    else:
        print_view(diff_view(differences, summary_only=stat), output)
    if html is not None:
        write_page(html, page)
    if differences:
        raise click.exceptions.Exit(FindingsError.exit_code)


def _diff_page(operands: list[Model | Plan], differences: Differences, model: Model | None) -> str:
    """Return the page of a difference. A page of two plans needs their model."""
    from graphquant.ir import Model
    from graphquant.visualize.pages import diff_page, plan_diff_page

    models = [operand for operand in operands if isinstance(operand, Model)]
    if len(models) == len(operands):
        return diff_page(models[0], models[1], differences)
    plans = [operand for operand in operands if not isinstance(operand, Model)]
    if model is None:
        raise UsageError("A and B are plans, which contain no graph to draw. Pass their model with --model FILE.")
    return plan_diff_page(model, plans[0], plans[1], differences)
