"""The JSON Schema of rule files, generated from the dataclasses and their docstrings."""

from __future__ import annotations

import re
from typing import Any

from pydantic import TypeAdapter

from graphquant.errors import RuleError
from graphquant.observers import OBSERVERS
from graphquant.qdq import FAMILIES, FamilyArguments
from graphquant.rules.rule import CONSUMER_CONDITIONS, Pattern, Rule, RuleFile, Selector
from graphquant.rules.scheme import SCHEME_DTYPES, ObserverConfig, Scheme
from graphquant.rules.toml_document import DocumentKind, describe_table_schema, table_keys

RULE_FILE_VERSION = 2  # Version of the rule file format. It increases when a valid rule file becomes invalid.

RULE_FILE_KIND = DocumentKind(
    noun="rule file",
    example="kind = 'conv'",
    error_class=RuleError,
    tables={
        "": RuleFile,
        "scheme": Scheme,
        "scheme.observe": ObserverConfig,
        "scheme.args": FamilyArguments,
        "pattern": Pattern,
        "rule": Rule,
        "rule.producer": Selector,
        "rule.consumer": Selector,
    },
    table_labels={
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
        "rule": " The header of a rule is [[rule]].",
        "scheme": " The header of a scheme is [scheme.NAME].",
        "pattern": " The header of a pattern is [pattern.NAME].",
    },
    named_tables=frozenset({"scheme", "pattern"}),
    hidden_fields={Scheme: "name"},
)
"""Nouns, tables and headings of rule files, for messages and the schema."""


def rule_file_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) with which editors complete and validate rule files.

    The schema does not cover references between values, such as names of schemes and patterns, and duplicate names.
    """
    generated = TypeAdapter(RuleFile).json_schema()
    for table in (Scheme, ObserverConfig, FamilyArguments, Pattern, Rule, Selector):
        describe_table_schema(generated["$defs"][table.__name__], table, RULE_FILE_KIND.hidden_fields.get(table, ""))
    describe_table_schema(generated, RuleFile)
    _add_constraints(generated["$defs"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **generated,
        "title": f"graphquant rule file, version {RULE_FILE_VERSION}",
    }


def _add_constraints(tables: dict[str, Any]) -> None:
    """Add the conditions that validators check and that pydantic's schema omits."""
    from graphquant.ir.kinds import KINDS, ROLES

    scheme, observe = tables["Scheme"], tables["Observe"]
    scheme["properties"]["dtype"] = {
        "description": scheme["properties"]["dtype"]["description"],
        "enum": list(SCHEME_DTYPES),
    }
    scheme["properties"]["family"]["enum"] = sorted(FAMILIES)
    scheme["not"] = {"anyOf": [{"required": ["dtype", conflicting]} for conflicting in ("bits", "signed")]}
    blocked = {"properties": {"per": {"const": "block"}}, "required": ["per"]}
    scheme["oneOf"] = [
        {**blocked, "required": ["per", "block_size"]},
        {"not": blocked, "properties": {"block_size": False}},
    ]
    names_without_arguments = [name for name, observer in OBSERVERS.items() if not observer.required_arguments]
    observe_schema = scheme["properties"]["observe"]
    scheme["properties"]["observe"] = {
        "description": observe_schema["description"],
        "anyOf": [{"enum": names_without_arguments}, {"$ref": observe_schema["$ref"]}],
    }
    observe["properties"]["name"]["enum"] = list(OBSERVERS)
    argument_names = [name for name in table_keys(ObserverConfig) if name != "name"]
    observe["oneOf"] = [
        {
            "properties": {
                "name": {"const": name},
                **{argument: False for argument in argument_names if argument not in observer.arguments},
            },
            "required": list(observer.required_arguments),
        }
        for name, observer in OBSERVERS.items()
    ]
    selector = tables["Selector"]["properties"]
    kind_pattern = "|".join(re.escape(kind) for kind in KINDS)
    link_pattern = rf"\s*({kind_pattern})(\|({kind_pattern}))*\??\s*"
    selector["kind"]["anyOf"] = [{"enum": list(KINDS)}, {"pattern": f"^{link_pattern}(>{link_pattern})*$"}]
    role_pattern = "|".join(ROLES)
    selector["input"]["anyOf"] = [{"enum": list(ROLES)}, {"pattern": rf"^({role_pattern})(\|({role_pattern}))*$"}]
    scalar = {"type": ["string", "number", "boolean"]}
    one_of = {"type": "array", "items": {"anyOf": [scalar, {"type": "array", "items": scalar}]}}
    selector["attr"]["additionalProperties"] = {"anyOf": [scalar, one_of]}
    tables["Rule"]["anyOf"] = [
        {"required": [side], "properties": {side: {"minProperties": 1}}} for side in ("producer", "consumer")
    ]
    sides = tables["Rule"]["properties"]
    sides["producer"]["properties"] = dict.fromkeys(CONSUMER_CONDITIONS, False)
    sides["consumer"]["properties"] = {"readers": False}
