"""The `strip` and `diff` commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphquant.cli.options import FORCE, HTML, OUTPUT, format_option
from graphquant.cli.output import print_view, write_page, write_result
from graphquant.errors import FindingsError, UsageError

if TYPE_CHECKING:
    from graphquant.analysis import Differences
    from graphquant.ir import Model
    from graphquant.quantize import Plan


@click.command("strip")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the float model to this path.")
@click.option("--all", "everything", is_flag=True, help="Also remove quantization ops of other tools.")
@click.option(
    "--check",
    "original",
    type=click.Path(path_type=Path),
    metavar="ORIGINAL",
    help="Verify that the result equals this model.",
)
@FORCE
def strip_command(model: Path, output: Path | None, everything: bool, original: Path | None, force: bool) -> None:
    """Remove the quantization that graphquant inserted into MODEL.

    The result is the source model bit for bit if insert kept its weights float. Otherwise it is the prepared model, and
    its weights keep their rounding error. With --check, the exit code is 1 if the result differs from ORIGINAL.
    """
    from graphquant import api
    from graphquant.api.models import check_model_output
    from graphquant.formats import detect_format
    from graphquant.visualize.compare_report import strip_proof_view, strip_view

    if output is None and original is None:
        raise UsageError("There is no output for the float model. Use -o OUT, or only --check ORIGINAL.")
    if output is not None:
        check_model_output(output, model, detect_format(model), force=force)
    stripped = api.strip(model, everything=everything)
    written = api.save(stripped.model, output, force=force) if output is not None else None
    print_view(strip_view(stripped, written))
    if original is not None:
        proof = api.prove_stripped(stripped, original)
        print_view(strip_proof_view(proof, str(original)))
        if not proof.holds:
            raise FindingsError(f"The model differs from {original} in more than rounded weights; see the list above.")


@click.command("diff")
@click.argument("first", metavar="A", type=click.Path(path_type=Path))
@click.argument("second", metavar="B", type=click.Path(path_type=Path))
@click.option("--stat", is_flag=True, help="Print only the number of differences.")
@click.option("--ignore", type=click.Choice(["qdq"]), help="Ignore differences in quantization.")
@format_option("json")
@HTML
@click.option("--model", type=click.Path(path_type=Path), metavar="FILE", help="With --html: the model of two plans.")
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
) -> None:
    """Show the differences between two models or plans, A and B.

    The models are not run. Ops are matched by name, or by position where names differ. Quantization ops are skipped
    during matching and reported separately. docs/diff.md explains the lines. Exit code 1 if anything differs.
    """
    from graphquant import api
    from graphquant.api.models import check_output
    from graphquant.visualize.compare_report import diff_view

    for path in filter(None, (first, second, model)):
        for output_path in filter(None, (output, html)):
            check_output(output_path, path, force=force)
    operands = [api.plan_or_none(path) or api.load(path) for path in (first, second)]
    differences = api.diff(*operands, quantization=ignore is None)
    page = _diff_page(operands, differences, model) if html is not None else ""
    if form == "json":
        write_result("diff", differences, output)
    else:
        print_view(diff_view(differences, summary_only=stat), output)
    if html is not None:
        write_page(html, page)
    if differences:
        raise click.exceptions.Exit(FindingsError.exit_code)


def _diff_page(operands: list[Model | Plan], differences: Differences, path: Path | None) -> str:
    """Return the page of a difference. A page of two plans needs their model, at `path`."""
    from graphquant import api
    from graphquant.ir import Model
    from graphquant.visualize.side_by_side import diff_page, plan_diff_page

    models = [operand for operand in operands if isinstance(operand, Model)]
    if len(models) == len(operands):
        return diff_page(models[0], models[1], differences)
    plans = [operand for operand in operands if not isinstance(operand, Model)]
    if path is None:
        raise UsageError("A and B are plans, which contain no graph to draw. Pass their model with --model FILE.")
    return plan_diff_page(api.load(path), plans[0], plans[1], differences)
