"""`graphquant compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphquant.cli.options import SHARE, finite
from graphquant.cli.output import emit, print_view, progress_bar, write
from graphquant.errors import FindingsError, UsageError, printable

if TYPE_CHECKING:
    from graphquant.comparison import Comparison


@click.command()
@click.argument("plain", metavar="FLOAT", type=click.Path(path_type=Path))
@click.argument("quant", metavar="QUANT", type=click.Path(path_type=Path))
@click.option("--data", required=True, metavar="SPEC", help="Data to run both on: eval.npz, pictures/, random:8.")
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Use the first N samples only.")
@click.option("--match", "pairs", multiple=True, metavar="NAME=OTHER", help="FLOAT's output NAME is QUANT's OTHER.")
@click.option("--outputs-only", is_flag=True, help="Leave out the quantized tensors, which takes less time.")
@click.option("--blame", is_flag=True, help="Also tell what each alone does to the outputs; takes longer.")
@click.option("--top", type=click.IntRange(min=0), default=10, show_default=True, help="Tensors to list; 0 for all.")
@click.option("--min-sqnr", type=float, callback=finite, metavar="DB", help="Exit code 1 if an output has less.")
@click.option(
    "--min-agreement",
    type=SHARE,
    callback=finite,
    metavar="SHARE",
    help="Likewise, of top-1 agreement: 0.99, or 99 for percent.",
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Draw both as a page too, with heat.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of stdout.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def compare(
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
    from graphquant import outputs, pipeline
    from graphquant.view.compare_text import comparison_json, comparison_view

    for path in (plain, quant):
        for written in filter(None, (output, html)):
            outputs.check_output(written, path, force=force)
    if blame and outputs_only:
        raise UsageError("--blame is of quantized tensors. Leave --outputs-only out.")
    if html is not None and outputs_only:
        raise UsageError("--html shows the figures of quantized tensors. Leave --outputs-only out.")
    named = _named(pairs)
    models = pipeline.load(plain), pipeline.load(quant)
    with progress_bar() as progress:
        found = pipeline.compare(
            *models, data, samples=samples, outputs=named, sites=not outputs_only, blame=blame, progress=progress
        )
    if form == "json":
        emit(comparison_json(found), output)
    else:
        print_view(comparison_view(found, top=top or len(found.sites)), output)
    if html is not None:
        from graphquant.view.two import comparison_page

        write(html, comparison_page(*models, found))
        click.echo(f"Written to {printable(str(html))}", err=True)
    _gate(found, min_sqnr, min_agreement)


def _named(pairs: tuple[str, ...]) -> dict[str, str]:
    """What --match says."""
    named = {}
    for said in pairs:
        name, equals, other = said.partition("=")
        if not (name and equals and other):
            raise UsageError(f"--match {said[:60]!r} is no NAME=OTHER. Name an output of FLOAT and one of QUANT.")
        named[name] = other
    return named


def _gate(found: Comparison, min_sqnr: float | None, min_agreement: float | None) -> None:
    """Ends with an error where a bound is missed, or cannot be held against anything."""
    if found.nothing and (min_sqnr is not None or min_agreement is not None):
        raise FindingsError(
            f"Nothing was compared, since every output was empty for all {found.samples} samples. Give samples for"
            " which there is something in them."
        )
    if min_sqnr is not None and found.sqnr is None:
        raise UsageError("--min-sqnr is of outputs that hold floats, and the models have none. Leave it out.")
    if min_agreement is not None and found.agreement is None:
        raise UsageError("--min-agreement is of class scores and integers, and no output holds such. Take --min-sqnr.")
    missed = []
    if min_sqnr is not None and found.sqnr is not None and not found.sqnr >= min_sqnr:
        missed.append(f"the worst output has {found.sqnr:.2f} dB and --min-sqnr wants {min_sqnr:g}")
    if min_agreement is not None and found.agreement is not None and not found.agreement >= min_agreement:
        missed.append(f"{100 * found.agreement:.2f}% agree and --min-agreement wants {100 * min_agreement:g}%")
    problems = [one for one in found.outputs if one.problem]
    if problems and (min_sqnr is not None or min_agreement is not None):
        missed = [f"output {problems[0].name!r} cannot be compared, because {problems[0].problem}"]
    if missed:
        said = "; ".join(missed)
        raise FindingsError(f"{said[:1].upper()}{said[1:]}. The list above has the worst.")
