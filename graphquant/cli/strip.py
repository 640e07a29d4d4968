"""`graphquant strip` and `graphquant diff`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphquant.cli.output import print_view, write_or_print, write_text_or_json
from graphquant.errors import FindingsError, UsageError, escape_unprintable

if TYPE_CHECKING:
    from graphquant.analysis import Differences
    from graphquant.api import StripResult
    from graphquant.ir import Model
    from graphquant.quantize import Plan


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where the float model is written.")
@click.option("--all", "everything", is_flag=True, help="Take out quantization ops of other tools too.")
@click.option("--check", "original", type=click.Path(path_type=Path), metavar="ORIGINAL", help="Prove that it is this.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def strip_command(model: Path, output: Path | None, everything: bool, original: Path | None, force: bool) -> None:
    """Take out of MODEL what graphquant inserted.

    The float model that is written is the source model bit for bit where insert kept weights float, and else the
    prepared model with the rounding that its weights have. With --check, exit code 1 if it is something else than
    ORIGINAL.
    """
    from graphquant import api
    from graphquant.api import models as outputs
    from graphquant.formats import detect_format
    from graphquant.visualize.diff_report import strip_view

    if output is None and original is None:
        raise UsageError("There is nowhere to write the float model. Give -o OUT, or --check ORIGINAL alone.")
    if output is not None:
        outputs.check_model_output(output, model, detect_format(model), force=force)
    stripped = api.strip(model, everything=everything)
    written = api.save(stripped.model, output, force=force) if output is not None else None
    print_view(strip_view(stripped, written))
    if original is not None:
        _compare_with_original(stripped, original)


def _compare_with_original(stripped: StripResult, original: Path) -> None:
    """Tells whether the model is `original`."""
    from graphquant import api
    from graphquant.visualize.diff_report import strip_proof_view

    proof = api.prove_stripped(stripped, original)
    print_view(strip_proof_view(proof, str(original)))
    if not proof.holds:
        raise FindingsError(f"The model is not {original}, nor that but for its weights' rounding; see the list above.")


@click.command()
@click.argument("one", metavar="A", type=click.Path(path_type=Path))
@click.argument("other", metavar="B", type=click.Path(path_type=Path))
@click.option("--stat", is_flag=True, help="Only count the differences.")
@click.option("--ignore", type=click.Choice(["qdq"]), help="Leave out what differs in quantization.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Draw both sides as a page too.")
@click.option("--model", type=click.Path(path_type=Path), metavar="FILE", help="With --html: what two plans are of.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of stdout.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def diff_command(
    one: Path,
    other: Path,
    stat: bool,
    ignore: str | None,
    form: str,
    html: Path | None,
    model: Path | None,
    output: Path | None,
    force: bool,
) -> None:
    """Tell what differs between two models or two plans, A and B.

    Nothing is run. Ops are matched by name, and by their place in the graph where names differ; quantization ops are
    looked through and told apart. docs/diff.md explains the lines. Exit code 1 if anything differs.
    """
    from graphquant import api
    from graphquant.api import models as outputs
    from graphquant.visualize.diff_report import diff_json, diff_view

    for path in filter(None, (one, other, model)):
        for output_path in filter(None, (output, html)):
            outputs.check_output(output_path, path, force=force)
    operands = [api.plan_or_none(path) or api.load(path) for path in (one, other)]
    differences = api.diff(*operands, quantization=ignore is None)
    page = _diff_page(operands, differences, model) if html is not None else ""
    if form == "json":
        write_or_print(diff_json(differences), output)
    else:
        print_view(diff_view(differences, summary_only=stat), output)
    if html is not None:
        write_text_or_json(html, page)
        click.echo(f"Written to {escape_unprintable(str(html))}", err=True)
    if differences:
        raise click.exceptions.Exit(FindingsError.exit_code)


def _diff_page(sides: list[Model | Plan], differences: Differences, path: Path | None) -> str:
    """The page of a difference; that of two plans wants their model, at `path`."""
    from graphquant import api
    from graphquant.ir import Model
    from graphquant.visualize.side_by_side import diff_page, plan_diff_page

    models = [side for side in sides if isinstance(side, Model)]
    if len(models) == len(sides):
        return diff_page(models[0], models[1], differences)
    plans = [side for side in sides if not isinstance(side, Model)]
    if path is None:
        raise UsageError("A and B are plans, which hold no graph to draw. Give their model with --model FILE.")
    return plan_diff_page(api.load(path), plans[0], plans[1], differences)
