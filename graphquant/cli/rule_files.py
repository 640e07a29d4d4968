"""`rules`: the rule files that come with graphquant, and checks of one's own."""

from __future__ import annotations

import json

import click

from graphquant.cli.output import print_view


@click.group()
def rules() -> None:
    """List, show and check rule files; print their JSON Schema."""


@rules.command("list")
def rules_list() -> None:
    """List the rule files that come with graphquant."""
    from rich.table import Table

    from graphquant.ruleset import load_ruleset, shipped

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("rules", justify="right")
    table.add_column("description")
    for name in shipped():
        found = load_ruleset([name])
        table.add_row(name, str(len(found.rules)), found.descriptions[0])
    print_view(table)


@rules.command("show")
@click.argument("name")
def rules_show(name: str) -> None:
    """Print the rule file NAME, to read or to copy."""
    from graphquant.ruleset import find

    click.echo(find(name).read_text("utf-8"), nl=False)


@rules.command("check")
@click.argument("files", nargs=-1, required=True, metavar="NAME|FILE...")
def rules_check(files: tuple[str, ...]) -> None:
    """Check rule files; every mistake is listed as file:line."""
    from graphquant.ruleset import load_ruleset

    found = load_ruleset(list(files))
    click.echo(f"{', '.join(files)}: no mistakes in {len(found.rules)} rule{'' if len(found.rules) == 1 else 's'}.")


@rules.command("schema")
def rules_schema() -> None:
    """Print the JSON Schema of rule files, for editors."""
    from graphquant.ruleset import schema

    click.echo(json.dumps(schema(), indent=2))
