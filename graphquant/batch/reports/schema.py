"""JSON Schema of a batch report, as in report.schema.json."""

from __future__ import annotations

import inspect
from typing import Any

from graphquant.batch import types
from graphquant.rules import field_descriptions


def report_schema() -> dict[str, Any]:
    """Return the schema with the descriptions of the docstrings."""
    from pydantic import TypeAdapter

    json_schema = TypeAdapter(types.BatchReport).json_schema(mode="serialization")
    for name, node in {types.BatchReport.__name__: json_schema, **json_schema["$defs"]}.items():
        table = getattr(types, name)
        node["description"] = inspect.cleandoc(table.__doc__).partition("\n")[0]
        descriptions = field_descriptions(table)
        for key, entry in node["properties"].items():
            entry.pop("title", None)
            if key in descriptions:
                entry["description"] = descriptions[key]
        node["required"] = list(node["properties"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **json_schema,
        "title": "graphquant batch report",
    }
