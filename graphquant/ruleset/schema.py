"""The JSON Schema of rule files, from the dataclasses and their docstrings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from graphquant.documents import Form, describe, keys
from graphquant.errors import RuleError
from graphquant.qdq import FAMILIES, Arguments
from graphquant.ruleset.scheme import DTYPES, Observe, Scheme
from graphquant.ruleset.selector import CONSUMER_ONLY, Pattern, Selector
from graphquant.ruleset.types import Rule, RuleFile
from graphquant.sketch import OBSERVERS

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION = 1
"""Raised when a rule file that was valid no longer is."""

FORM = Form(
    noun="rule file",
    example="kind = 'conv'",
    error=RuleError,
    tables={
        "": RuleFile,
        "scheme": Scheme,
        "scheme.observe": Observe,
        "scheme.args": Arguments,
        "pattern": Pattern,
        "rule": Rule,
        "rule.producer": Selector,
        "rule.consumer": Selector,
    },
    names={
        "": "a rule file",
        "rule": "a rule",
        "scheme": "a scheme",
        "scheme.observe": "an observer",
        "scheme.args": "the arguments of a family",
        "pattern": "a pattern",
        "rule.producer": "a producer",
        "rule.consumer": "a consumer",
    },
    headings={
        "rule": " A rule is headed [[rule]].",
        "scheme": " A scheme is headed [scheme.NAME].",
        "pattern": " A pattern is headed [pattern.NAME].",
    },
    named=frozenset({"scheme", "pattern"}),
    hidden={Scheme: "name"},
)
"""What messages and the schema say of rule files."""


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that editors complete and check rule files by.

    It knows all but what the values say of one another: names of schemes and patterns, and rules called the same.
    """
    made = TypeAdapter(RuleFile).json_schema()
    for table in (Scheme, Observe, Arguments, Pattern, Rule, Selector):
        describe(made["$defs"][table.__name__], table, FORM.hidden.get(table, ""))
    describe(made, RuleFile)
    _narrow(made["$defs"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **made,
        "title": f"graphquant rule file, version {VERSION}",
    }


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
