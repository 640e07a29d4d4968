"""Hooks of mkdocs: pages under reference/ from the code, and links to files outside of the documentation."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import graphquant as gq
from graphquant import visualize
from graphquant.backends.lint import LINT_CODES
from graphquant.batch.manifest_schema import manifest_schema
from graphquant.batch.reports.text import BATCH_CODES
from graphquant.cli import main
from graphquant.rules import rule_file_schema

WIDTH = 100  # columns of the help texts
SECTION = re.compile(r"(Args|Options|Attributes|Raises|Returns|Yields):")


def command_page() -> str:
    """Return the help of each command."""
    lines = ["# Command line", "", "The text of `graphquant COMMAND --help`.", ""]
    for path, command in _commands(main, ("graphquant",)):
        context = click.Context(command, info_name=" ".join(path), max_content_width=WIDTH, terminal_width=WIDTH)
        lines += [f"## {' '.join(path)}", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(lines)


def _commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            subcommand = command.get_command(click.Context(command), name)
            if subcommand is not None and not subcommand.hidden:
                yield from _commands(subcommand, (*path, name))


def python_page() -> str:
    """Return signature and documentation of each public name."""
    lines = [
        "# Python",
        "",
        "`import graphquant as gq`. All errors are subclasses of `gq.GraphQuantError`.",
        "",
    ]
    for name in sorted(name for name in gq.__all__ if name != "__version__"):
        value = getattr(gq, name)
        if inspect.ismodule(value):
            continue
        lines += [f"## gq.{name}", ""]
        if inspect.isfunction(value):
            lines += ["```python", _signature(name, value), "```", ""]
        lines += [*_documentation(inspect.getdoc(value) or ""), ""]
    return "\n".join(lines)


def _signature(name: str, function: Any) -> str:
    """Return the signature with one parameter on each line if it is long."""
    signature = inspect.signature(function)
    text = f"{name}{signature.replace(return_annotation=inspect.Signature.empty)}".replace("'", "")
    if len(text) <= WIDTH:
        return text
    parameters, separated = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not separated:
            parameters.append("*")
            separated = True
        shown = parameter.replace(annotation=parameter.empty)
        parameters.append(str(shown))
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.name == "options":
            parameters.append("/")
    return "\n".join([f"{name}(", *(f"    {parameter}," for parameter in parameters), ")"])


def _documentation(text: str) -> Iterator[str]:
    """Yield a docstring in Google's style as Markdown."""
    in_section = False
    for line in text.splitlines():
        if SECTION.fullmatch(line):
            in_section = True
            yield f"**{line.removesuffix(':')}**\n"
        elif in_section and (entry := re.fullmatch(r" {4}(\w+): (.*)", line)):
            yield f"* `{entry[1]}`: {_escaped(entry[2])}"
        else:
            in_section = in_section and (not line or line.startswith(" "))
            yield _escaped(f"  {line.strip()}" if in_section and line else line)


def _escaped(text: str) -> str:
    return re.sub(r"<(?=\w)", "&lt;", text)


def rules_page() -> str:
    """Return the keys of rule files, from their JSON Schema."""
    return _schema_page("Keys of rule files", "[Rule files](../rules.md) explains them.", rule_file_schema())


def manifest_page() -> str:
    """Return the keys of manifests, from their JSON Schema."""
    return _schema_page("Keys of manifests", "[Batches](../batch.md) explains them.", manifest_schema())


def json_page() -> str:
    """Return the keys of JSON results, from their JSON Schema."""
    schema = json.loads(Path(visualize.__file__).with_name("results.schema.json").read_text("utf-8"))
    return _schema_page("Keys of JSON results", "[JSON](../json.md) explains them.", schema)


def findings_page() -> str:
    """Return the codes of findings of `check` and of batches."""
    lines = ["# Codes of findings", ""]
    for title, page, codes in (("Models", "check", LINT_CODES), ("Batches", "ci", BATCH_CODES)):
        lines += [f"## {title}", "", f"[{title}](../{page}.md) has an example of each, and what to do.", ""]
        lines += ["| code | level | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{code}` | {entry.level} | {_escaped(entry.description)} |" for code, entry in codes.items()]
        lines.append("")
    return "\n".join(lines)


def _schema_page(heading: str, introduction: str, schema: Any) -> str:
    """Return a table of the keys of each object of a JSON Schema."""
    lines = [f"# {heading}", "", introduction, ""]
    for title, table in {"Top level": schema, **schema["$defs"]}.items():
        if "enum" in table:
            lines += [f"## {title}", "", _escaped(table.get("description", "")), "", f"Values: {_values(table)}.", ""]
        if "properties" not in table:
            continue
        lines += [f"## {title}", "", _escaped(table.get("description", "")), ""]
        lines += ["| key | values | meaning |", "| --- | --- | --- |"]
        for key, entry in table["properties"].items():
            required = " (required)" if key in table.get("required", ()) else ""
            cells = (f"`{key}`{required}", _values(entry), _escaped(entry.get("description", "")))
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def _values(entry: Any) -> str:
    """Return the values that a schema accepts."""
    if "enum" in entry:
        return ", ".join(f"`{value}`" for value in entry["enum"] if value)
    if "$ref" in entry:
        name = entry["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    options = [_values(option) for option in entry.get("anyOf", entry.get("oneOf", ()))]
    if options:
        return " or ".join(dict.fromkeys(filter(None, options)))
    kind = entry.get("type", "")
    element = entry.get("items" if kind == "array" else "additionalProperties")
    if isinstance(element, dict):
        return f"{'list' if kind == 'array' else 'table'} of {_values(element) or 'values'}"
    if "maximum" in entry and "minimum" in entry:
        kind += f" {entry['minimum']} to {entry['maximum']}"
    return str(kind)


PAGES = {
    "reference/cli.md": command_page,
    "reference/python.md": python_page,
    "reference/rules.md": rules_page,
    "reference/manifest.md": manifest_page,
    "reference/json.md": json_page,
    "reference/findings.md": findings_page,
}
OUTSIDE_LINK = re.compile(r"\[([^\]]*)\]\(\.\./[^)]*\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, create_page in PAGES.items():
        if (placeholder := files.get_file_from_path(path)) is not None:  # what a checkout has in its place
            files.remove(placeholder)
        files.append(File.generated(config, path, content=create_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files of the repository by their text; pages in subfolders have links to other pages."""
    return markdown if "/" in page.file.src_uri else OUTSIDE_LINK.sub(r"\1", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load the script of the search from the site instead of the network, which a page opened from disk may lack."""
    from mkdocs.utils import get_relative_url

    return output.replace("https://unpkg.com/iframe-worker/shim", get_relative_url("search_worker.js", page.url))
