"""The `compare` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphquant.cli.options import FORCE, HTML, OUTPUT, collect_options, format_option, options_of
from graphquant.cli.output import print_view, progress_bar, write_page, write_result
from graphquant.errors import FindingsError, UsageError
from graphquant.utils.options import CompareBounds, CompareOptions

if TYPE_CHECKING:
    from graphquant.analysis import Comparison


@click.command("compare")
@click.argument("float_path", metavar="FLOAT", type=click.Path(path_type=Path))
@click.argument("quantized_path", metavar="QUANT", type=click.Path(path_type=Path))
@click.option("--data", required=True, metavar="SPEC", help="Data for both models: eval.npz, pictures/, random:8.")
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
    from graphquant import api
    from graphquant.api.models import check_output
    from graphquant.visualize.compare_report import comparison_view

    settings = collect_options(CompareOptions, values, outputs=_parse_matches(pairs))
    bounds = collect_options(CompareBounds, values)
    for path in (float_path, quantized_path):
        for output_path in filter(None, (output, html)):
            check_output(output_path, path, force=force)
    if settings.sensitivity and not settings.sites:
        raise UsageError("--sensitivity measures quantized tensors. Remove --outputs-only.")
    if html is not None and not settings.sites:
        raise UsageError("--html shows the errors of quantized tensors. Remove --outputs-only.")
    models = api.load(float_path), api.load(quantized_path)
    with progress_bar() as progress:
        comparison = api.compare(*models, data, settings, progress=progress)
    if form == "json":
        write_result("compare", comparison, output)
    else:
        print_view(comparison_view(comparison, top=top or len(comparison.sites)), output)
    if html is not None:
        from graphquant.visualize.side_by_side import comparison_page

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
    if bounds.min_sqnr is None and bounds.min_agreement is None:
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
    failures = []
    if bounds.min_sqnr is not None and comparison.sqnr is not None and not comparison.sqnr >= bounds.min_sqnr:
        failures.append(f"the worst output has {comparison.sqnr:.2f} dB, and --min-sqnr is {bounds.min_sqnr:g} dB")
    agreement = comparison.agreement
    if bounds.min_agreement is not None and agreement is not None and not agreement >= bounds.min_agreement:
        failures.append(f"{100 * agreement:.2f}% agree, and --min-agreement is {100 * bounds.min_agreement:g}%")
    uncomparable = [output for output in comparison.outputs if output.problem]
    if uncomparable:
        failures = [f"output {uncomparable[0].name!r} cannot be compared, because {uncomparable[0].problem}"]
    if failures:
        message = "; ".join(failures)
        raise FindingsError(f"{message[:1].upper()}{message[1:]}. The list above starts with the worst tensors.")
