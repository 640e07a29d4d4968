"""The JSON Schema of rule files, from the dataclasses and their docstrings."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from graphquant.qdq import FAMILIES, Arguments
from graphquant.ruleset.types import CONSUMER_ONLY, DTYPES, Observe, Pattern, Rule, RuleFile, Scheme, Selector
from graphquant.sketch import OBSERVERS

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION = 1
"""Raised when a rule file that was valid no longer is."""

TABLES: dict[str, type] = {
    "": RuleFile,
    "scheme": Scheme,
    "scheme.observe": Observe,
    "scheme.args": Arguments,
    "pattern": Pattern,
    "rule": Rule,
    "rule.producer": Selector,
    "rule.consumer": Selector,
}
"""The dataclass behind each table of a rule file."""


def keys(table: type) -> list[str]:
    """The keys a table may have, in the order of its fields."""
    return [item.name for item in fields(table) if not (table is Scheme and item.name == "name")]


def attributes(table: type) -> dict[str, str]:
    """What the docstring's "Attributes:" section says of each field."""
    _, _, section = inspect.cleandoc(table.__doc__ or "").partition("\nAttributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that editors complete and check rule files by.

    It knows all but what the values say of one another: names of schemes and patterns, and rules called the same.
    """
    made = TypeAdapter(RuleFile).json_schema()
    for table in (Scheme, Observe, Arguments, Pattern, Rule, Selector):
        _describe(made["$defs"][table.__name__], table)
    _describe(made, RuleFile)
    _narrow(made["$defs"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **made,
        "title": f"graphquant rule file, version {VERSION}",
    }


def _describe(node: dict[str, Any], table: type) -> None:
    """Puts the docstring's words on the table and its fields; drops pydantic's titles and the choice of None."""
    node["description"] = inspect.cleandoc(table.__doc__ or "").partition("\n")[0]
    node["properties"] = {name: node["properties"][name] for name in keys(table)}
    for name, field in node["properties"].items():
        field.pop("title", None)
        field.setdefault("description", attributes(table).get(name, ""))
        choices = [choice for choice in field.pop("anyOf", []) if choice != {"type": "null"}]
        if choices:  # a field that may be None: TOML leaves it out instead
            del field["default"]
            field.update(choices[0])


def _narrow(tables: dict[str, Any]) -> None:
    """Adds what the validators check and pydantic's schema does not say."""
    from graphquant.ir.kinds import KINDS, ROLES

    scheme, observe = tables["Scheme"], tables["Observe"]
    scheme["properties"]["dtype"] = {
        "description": scheme["properties"]["dtype"]["description"],
        "enum": list(DTYPES),
    }
    scheme["properties"]["family"]["enum"] = sorted(FAMILIES)
    scheme["not"] = {"anyOf": [{"required": ["dtype", other]} for other in ("bits", "signed")]}
    blocked = {"properties": {"per": {"const": "block"}}, "required": ["per"]}
    scheme["oneOf"] = [
        {**blocked, "required": ["per", "block_size"]},
        {"not": blocked, "properties": {"block_size": False}},
    ]
    alone = [name for name, observer in OBSERVERS.items() if not observer.required]
    full = scheme["properties"]["observe"]
    scheme["properties"]["observe"] = {
        "description": full["description"],
        "anyOf": [{"enum": alone}, {"$ref": full["$ref"]}],
    }
    observe["properties"]["name"]["enum"] = list(OBSERVERS)
    observe["oneOf"] = [
        {
            "properties": {"name": {"const": name}, **dict.fromkeys(_others(observer.arguments), False)},
            "required": list(observer.required),
        }
        for name, observer in OBSERVERS.items()
    ]
    selector = tables["Selector"]["properties"]
    word = "|".join(re.escape(kind) for kind in KINDS)
    link = rf"\s*({word})(\|({word}))*\??\s*"
    selector["kind"]["anyOf"] = [{"enum": list(KINDS)}, {"pattern": f"^{link}(>{link})*$"}]
    role = "|".join(ROLES)
    selector["input"]["anyOf"] = [{"enum": list(ROLES)}, {"pattern": rf"^({role})(\|({role}))*$"}]
    plain = {"type": ["string", "number", "boolean"]}
    one_of = {"type": "array", "items": {"anyOf": [plain, {"type": "array", "items": plain}]}}
    selector["attr"]["additionalProperties"] = {"anyOf": [plain, one_of]}
    tables["Rule"]["anyOf"] = [
        {"required": [side], "properties": {side: {"minProperties": 1}}} for side in ("producer", "consumer")
    ]
    sides = tables["Rule"]["properties"]
    sides["producer"]["properties"] = dict.fromkeys(CONSUMER_ONLY, False)
    sides["consumer"]["properties"] = {"readers": False}


def _others(arguments: Iterable[str]) -> list[str]:
    return [name for name in keys(Observe) if name != "name" and name not in arguments]
