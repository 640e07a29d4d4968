"""`graphquant check`."""

from __future__ import annotations

from pathlib import Path

import click

from graphquant.cli.output import emit, print_view
from graphquant.errors import FindingsError, UsageError


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", type=click.Path(path_type=Path))
@click.option("--for", "backend", metavar="BACKEND", help="Tell what onnxruntime, say, runs in low precision.")
@click.option(
    "--stats",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Statistics from calibrate: tell what no sample reached.",
)
@click.option(
    "--format", "form", type=click.Choice(["text", "json", "sarif", "github"]), default="text", show_default=True
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of stdout.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def check(
    models: tuple[Path, ...], backend: str | None, stats: Path | None, form: str, output: Path | None, force: bool
) -> None:
    """Tell what is probably wrong with quantized MODELs. With --for also which ops run in float there, and why.

    docs/check.md explains the codes. Exit code 1 if there are findings.
    """
    if stats is not None and len(models) > 1:
        raise UsageError("--stats is of one model. Give one.")
    from graphquant import outputs, pipeline
    from graphquant.view import check as view

    if output is not None:
        outputs.check_output(output, models[0], force=force)
    reports = [pipeline.check(model, backend=backend, stats=stats) for model in models]
    if form == "text":
        from rich.console import Group

        print_view(Group(*map(view.report_view, reports)), output)
    elif form == "json":
        told = [view.report_json(report) for report in reports]
        emit(told[0] if len(told) == 1 else told, output)
    elif form == "sarif":
        emit(view.sarif(reports), output)
    else:
        emit("".join(map(view.github, reports)), output)
    if any(report.findings for report in reports):
        raise click.exceptions.Exit(FindingsError.exit_code)
