"""The JSON Schemas of results and batch reports, which the scripts `write_schema.py` write to the shipped files."""

import inspect
import re
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from graphquant.batch import types
from graphquant.visualize.json_export import RESULTS

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def field_comments(record: type) -> dict[str, str]:
    """Return the comment of each field of a class, behind it or on the lines above, as a sentence."""
    sentences: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(record).splitlines():
        code, _, comment = line.strip().partition("# ")
        if not code and comment:
            above.append(comment)
            continue
        name = re.match(r"(\w+): ", code)
        if name is not None and (comment or above):
            sentence = " ".join(above) or comment
            sentences[name[1]] = sentence[0].upper() + sentence[1:].removesuffix(".") + "."
        above = []
    return sentences


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of a report, with the descriptions of the docstrings and of the fields' comments."""
    json_schema = TypeAdapter(types.BatchReport).json_schema(mode="serialization")
    for name, node in {types.BatchReport.__name__: json_schema, **json_schema["$defs"]}.items():
        record = getattr(types, name)
        node["description"] = inspect.cleandoc(record.__doc__).partition("\n")[0]
        comments = field_comments(record)
        for key, entry in node["properties"].items():
            entry.pop("title", None)
            if key in comments:
                entry["description"] = comments[key]
        node["required"] = list(node["properties"])
    return {"$schema": DRAFT, **json_schema, "title": "graphquant batch report"}


def results_schema() -> dict[str, Any]:
    """Return the JSON Schemas of all results; `$defs` has one for each class."""
    _, schema = models_json_schema([(model, "serialization") for model in RESULTS.values()], title="graphquant results")
    for definition in schema["$defs"].values():
        definition["description"] = definition["description"].partition("\n")[0]
        for entry in definition.get("properties", {}).values():  # an enum has none
            entry.pop("title", None)
    return {"$schema": DRAFT, **schema}
