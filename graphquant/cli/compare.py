"""`graphquant compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphquant.cli.options import SHARE, require_finite
from graphquant.cli.output import print_view, progress_bar, write_or_print, write_text_or_json
from graphquant.errors import FindingsError, UsageError, escape_unprintable

if TYPE_CHECKING:
    from graphquant.analysis import Comparison


@click.command()
@click.argument("plain", metavar="FLOAT", type=click.Path(path_type=Path))
@click.argument("quant", metavar="QUANT", type=click.Path(path_type=Path))
@click.option("--data", required=True, metavar="SPEC", help="Data to run both on: eval.npz, pictures/, random:8.")
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Use the first N samples only.")
@click.option("--match", "pairs", multiple=True, metavar="NAME=OTHER", help="FLOAT's output NAME is QUANT's OTHER.")
@click.option("--outputs-only", is_flag=True, help="Leave out the quantized tensors, which takes less time.")
@click.option("--blame", is_flag=True, help="Also tell what each alone does to the outputs; takes longer.")
@click.option("--top", type=click.IntRange(min=0), default=10, show_default=True, help="Tensors to list; 0 for all.")
@click.option(
    "--min-sqnr", type=float, callback=require_finite, metavar="DB", help="Exit code 1 if an output has less."
)
@click.option(
    "--min-agreement",
    type=SHARE,
    callback=require_finite,
    metavar="SHARE",
    help="Likewise, of top-1 agreement: 0.99, or 99 for percent.",
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Draw both as a page too, with heat.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of stdout.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def compare_command(
    plain: Path,
    quant: Path,
    data: str,
    samples: int | None,
    pairs: tuple[str, ...],
    outputs_only: bool,
    blame: bool,
    top: int,
    min_sqnr: float | None,
    min_agreement: float | None,
    form: str,
    html: Path | None,
    output: Path | None,
    force: bool,
) -> None:
    """Run FLOAT and QUANT on the same data and tell how they differ.

    That is how far they are apart, and which quantized tensors cost most. docs/compare.md explains the
    figures. --html draws both beside each other, with the errors as heat. Exit code 1 if a bound is missed.
    """
    from graphquant import api
    from graphquant.api import models as outputs
    from graphquant.visualize.compare_report import comparison_json, comparison_view

    for path in (plain, quant):
        for output_path in filter(None, (output, html)):
            outputs.check_output(output_path, path, force=force)
    if blame and outputs_only:
        raise UsageError("--blame is of quantized tensors. Leave --outputs-only out.")
    if html is not None and outputs_only:
        raise UsageError("--html shows the figures of quantized tensors. Leave --outputs-only out.")
    matched_outputs = _parse_matches(pairs)
    models = api.load(plain), api.load(quant)
    with progress_bar() as progress:
        comparison = api.compare(
            *models,
            data,
            samples=samples,
            outputs=matched_outputs,
            sites=not outputs_only,
            sensitivity=blame,
            progress=progress,
        )
    if form == "json":
        write_or_print(comparison_json(comparison), output)
    else:
        print_view(comparison_view(comparison, top=top or len(comparison.sites)), output)
    if html is not None:
        from graphquant.visualize.side_by_side import comparison_page

        write_text_or_json(html, comparison_page(*models, comparison))
        click.echo(f"Written to {escape_unprintable(str(html))}", err=True)
    _check_bounds(comparison, min_sqnr, min_agreement)


def _parse_matches(pairs: tuple[str, ...]) -> dict[str, str]:
    """What --match says."""
    matches = {}
    for pair in pairs:
        name, equals, quantized_name = pair.partition("=")
        if not (name and equals and quantized_name):
            raise UsageError(f"--match {pair[:60]!r} is no NAME=OTHER. Name an output of FLOAT and one of QUANT.")
        matches[name] = quantized_name
    return matches


def _check_bounds(comparison: Comparison, min_sqnr: float | None, min_agreement: float | None) -> None:
    """Ends with an error where a bound is missed, or cannot be held against anything."""
    if comparison.all_empty and (min_sqnr is not None or min_agreement is not None):
        raise FindingsError(
            f"Nothing was compared, since every output was empty for all {comparison.samples} samples. Give samples for"
            " which there is something in them."
        )
    if min_sqnr is not None and comparison.sqnr is None:
        raise UsageError("--min-sqnr is of outputs that hold floats, and the models have none. Leave it out.")
    if min_agreement is not None and comparison.agreement is None:
        raise UsageError("--min-agreement is of class scores and integers, and no output holds such. Take --min-sqnr.")
    failures = []
    if min_sqnr is not None and comparison.sqnr is not None and not comparison.sqnr >= min_sqnr:
        failures.append(f"the worst output has {comparison.sqnr:.2f} dB and --min-sqnr wants {min_sqnr:g}")
    if min_agreement is not None and comparison.agreement is not None and not comparison.agreement >= min_agreement:
        failures.append(f"{100 * comparison.agreement:.2f}% agree and --min-agreement wants {100 * min_agreement:g}%")
    uncomparable = [output for output in comparison.outputs if output.problem]
    if uncomparable and (min_sqnr is not None or min_agreement is not None):
        failures = [f"output {uncomparable[0].name!r} cannot be compared, because {uncomparable[0].problem}"]
    if failures:
        message = "; ".join(failures)
        raise FindingsError(f"{message[:1].upper()}{message[1:]}. The list above has the worst.")
