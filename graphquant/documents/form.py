"""What a kind of file may say, as dataclasses and their docstrings, and what messages call its parts."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphquant.documents.locate import KeyPath
    from graphquant.errors import GraphQuantError


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A kind of file.

    Attributes:
        noun: What one is, without the article: "rule file".
        example: A line of one, with a quoted string.
        error: What its mistakes are raised as.
        tables: The dataclass behind each table, by its keys from the file down, joined by dots; that of "" is the file.
        names: What a sentence calls each of these tables: "a scheme".
        headings: For some tables the sentence on how they are headed, for whoever wrote something else.
        named: Tables of which there are several, each under a name of its own.
        hidden: Fields that are no keys, by their dataclass.
    """

    noun: str
    example: str
    error: type[GraphQuantError]
    tables: Mapping[str, type]
    names: Mapping[str, str]
    headings: Mapping[str, str] = field(default_factory=dict)
    named: frozenset[str] = frozenset()
    hidden: Mapping[type, str] = field(default_factory=dict)

    def table(self, path: KeyPath) -> str:
        """Which table `path` leads to, as a key of `tables`."""
        words = [part for part in path if isinstance(part, str)]
        if words and words[0] in self.named:
            del words[1:2]
        return ".".join(words)

    def keys(self, table: type) -> list[str]:
        """The keys that a table may have, in the order of its fields."""
        return keys(table, self.hidden.get(table, ""))


def keys(table: type, hidden: str = "") -> list[str]:
    """The keys that a table may have, in the order of its fields, `hidden` not being one."""
    return [item.name for item in fields(table) if item.name != hidden]


def attributes(table: type) -> dict[str, str]:
    """What the docstring's "Attributes:" section, and those of the classes it is made of, say of each field."""
    found: dict[str, str] = {}
    for each in reversed(table.__mro__):
        _, _, section = inspect.cleandoc(each.__doc__ or "").partition("\nAttributes:\n")
        entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
        found |= {name: " ".join(text.split()) for name, text in entries}
    return found


def describe(node: dict[str, Any], table: type, hidden: str = "") -> None:
    """Puts the docstring's words on a table of a JSON Schema; drops pydantic's titles and the choice of None."""
    node["description"] = inspect.cleandoc(table.__doc__ or "").partition("\n")[0]
    node["properties"] = {name: node["properties"][name] for name in keys(table, hidden)}
    for name, entry in node["properties"].items():
        entry.pop("title", None)
        entry.setdefault("description", attributes(table).get(name, ""))
        choices = [choice for choice in entry.pop("anyOf", []) if choice != {"type": "null"}]
        if len(choices) > 1:
            entry["anyOf"] = choices
        elif choices:
            entry.update(choices[0])
        if entry.get("default", "") is None:  # a field that may be None: TOML leaves it out instead
            del entry["default"]
