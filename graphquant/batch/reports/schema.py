"""The JSON Schema of a report, as report.schema.json beside this file has it."""

from __future__ import annotations

import inspect
from typing import Any

from graphquant.batch import types
from graphquant.documents import attributes


def report_schema() -> dict[str, Any]:
    """The schema, with the words of the docstrings."""
    from pydantic import TypeAdapter

    made = TypeAdapter(types.Report).json_schema(mode="serialization")
    for name, node in {types.Report.__name__: made, **made["$defs"]}.items():
        table = getattr(types, name)
        node["description"] = inspect.cleandoc(table.__doc__).partition("\n")[0]
        said = attributes(table)
        for key, entry in node["properties"].items():
            entry.pop("title", None)
            if key in said:
                entry["description"] = said[key]
        node["required"] = list(node["properties"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": "graphquant batch report"}
