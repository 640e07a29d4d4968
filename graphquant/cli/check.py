"""The `check` command."""

from __future__ import annotations

from pathlib import Path

import click

from graphquant.cli.options import FORCE, OUTPUT, format_option
from graphquant.cli.output import print_view, write_or_print
from graphquant.errors import FindingsError, UsageError


@click.command("check")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", type=click.Path(path_type=Path))
@click.option("--for", "backend", metavar="BACKEND", help="Show which ops this backend runs in int8.")
@click.option(
    "--stats",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Statistics from calibrate: report quantizations that no sample reached.",
)
@format_option("json", "sarif", "github")
@OUTPUT
@FORCE
def check_command(
    models: tuple[Path, ...], backend: str | None, stats: Path | None, form: str, output: Path | None, force: bool
) -> None:
    """Find probable mistakes in quantized MODELs. With --for, also show which ops stay float on that backend.

    docs/check.md explains the codes. Exit code 1 if there are findings.
    """
    if stats is not None and len(models) > 1:
        raise UsageError("--stats belongs to one model. Pass one model.")
    from graphquant import api
    from graphquant.api.models import check_output
    from graphquant.visualize import check_report as view

    if output is not None:
        check_output(output, models[0], force=force)
    reports = [api.check(model, backend=backend, stats=stats) for model in models]
    if form == "text":
        from rich.console import Group

        print_view(Group(*map(view.check_view, reports)), output)
    elif form == "json":
        from graphquant.visualize.json_export import CheckResult

        data = [CheckResult.model_validate(report).as_json() for report in reports]
        write_or_print(data[0] if len(data) == 1 else data, output)
    elif form == "sarif":
        write_or_print(view.check_sarif(reports), output)
    else:
        write_or_print("".join(map(view.check_annotations, reports)), output)
    if any(report.findings for report in reports):
        raise click.exceptions.Exit(FindingsError.exit_code)
