"""Commands that show and change nothing: `plan`, `explain`, `inspect`, `data check`."""

from __future__ import annotations

from pathlib import Path

import click

from graphquant.cli.options import selection
from graphquant.cli.output import emit, print_view
from graphquant.errors import FindingsError


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@selection
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of stdout.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def plan(
    model: Path,
    rules: tuple[str, ...],
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    family: str | None,
    form: str,
    output: Path | None,
    force: bool,
) -> None:
    """Show what insert would do to MODEL. --format json gives a plan that insert --plan applies."""
    from graphquant import pipeline

    if output is not None:
        pipeline.check_output(output, model, force=force)
    made = pipeline.plan(model, rules=rules, include=include, exclude=exclude, family=family)
    if form == "json":
        from graphquant.plans import to_json

        emit(to_json(made), output)
    else:
        from graphquant.view import text

        print_view(text.plan_view(made), output)


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("what", metavar="TENSOR|OP")
@click.option("--rules", multiple=True, metavar="NAME|FILE", help="Rule file; repeat it to stack, first match wins.")
def explain(model: Path, what: str, rules: tuple[str, ...]) -> None:
    """Tell which rule took each use of TENSOR, or around OP. For the other rules it says why they did not."""
    from graphquant import pipeline
    from graphquant.view import text

    text.console().print(text.explain_view(pipeline.explain(pipeline.load(model), what, rules=rules)))


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["text", "json", "dot"]), default="text", show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of stdout.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def inspect(model: Path, form: str, output: Path | None, force: bool) -> None:
    """Show MODEL's quantization ops, and what stays float. Each with its dtype, scale, zero point and range."""
    from graphquant import pipeline
    from graphquant.survey import survey

    if output is not None:
        pipeline.check_output(output, model, force=force)
    loaded = pipeline.load(model)
    if form == "dot":
        from graphquant.view.dot import dot

        emit(dot(loaded), output)
    elif form == "json":
        from graphquant.view.data import survey_json

        emit(survey_json(survey(loaded)), output)
    else:
        from graphquant.view import text

        print_view(text.survey_view(survey(loaded)), output)


@click.group()
def data() -> None:
    """Look at calibration data."""


@data.command("check")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("spec")
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Look at the first N samples only.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def data_check(model: Path, spec: str, samples: int | None, form: str) -> None:
    """Show what SPEC feeds each input of MODEL, and what is probably wrong with it. Exit code 1 if anything is."""
    from graphquant import pipeline
    from graphquant.view import data_check as view
    from graphquant.view import text

    report = pipeline.check_data(model, spec, samples=samples)
    if form == "json":
        emit(view.report_json(report), None)
    else:
        text.console().print(view.report_view(report))
    if report.findings:
        raise click.exceptions.Exit(FindingsError.exit_code)
