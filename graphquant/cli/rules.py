"""The `rules` commands: the shipped rule files, and checks of other files."""

from __future__ import annotations

import json

import click

from graphquant.cli.output import print_view


@click.group("rules")
def rules_group() -> None:
    """List, show and check rule files; print their JSON Schema."""


@rules_group.command("list")
def rules_list_command() -> None:
    """List the shipped rule files."""
    from rich.table import Table

    from graphquant.rules import load_ruleset, shipped_rule_files

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("rules", justify="right")
    table.add_column("description")
    for name in shipped_rule_files():
        ruleset = load_ruleset([name])
        table.add_row(name, str(len(ruleset.rules)), ruleset.descriptions[0])
    print_view(table)


@rules_group.command("show")
@click.argument("name")
def rules_show_command(name: str) -> None:
    """Print the rule file NAME."""
    from graphquant.rules import find_rule_file

    click.echo(find_rule_file(name).read_text("utf-8"), nl=False)


@rules_group.command("check")
@click.argument("files", nargs=-1, required=True, metavar="NAME|FILE...")
def rules_check_command(files: tuple[str, ...]) -> None:
    """Check rule files and list each mistake as file:line."""
    from graphquant.rules import load_ruleset

    count = len(load_ruleset(list(files)).rules)
    click.echo(f"{', '.join(files)}: no mistakes in {count} rule{'' if count == 1 else 's'}.")


@rules_group.command("schema")
def rules_schema_command() -> None:
    """Print the JSON Schema of rule files, for editors."""
    from graphquant.rules import rule_file_schema

    click.echo(json.dumps(rule_file_schema(), indent=2))
