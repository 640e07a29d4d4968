"""What is wrong with the data of a file, in sentences for whoever wrote it: pydantic's findings in plain words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from graphquant.documents.form import attributes
from graphquant.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphquant.documents.form import Form
    from graphquant.documents.locate import KeyPath

Mistake = tuple["KeyPath", str]
"""The path of a key, and what is wrong there."""

T = TypeVar("T")

MAX_SHOWN, _MAX_LISTED = 60, 500
_TOO_LARGE = 1 << 64
_TYPES = {
    "string_type": "a string",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "a table",
    "dataclass_type": "a table",
    "list_type": "an array",
    "tuple_type": "an array",
}
_SENTENCES = {
    "literal_error": "is {shown}; it must be {expected}.",
    "greater_than_equal": "is {shown}; it must be at least {ge}.",
    "greater_than": "is {shown}; it must be above {gt}.",
    "less_than_equal": "is {shown}; it must be at most {le}.",
    "string_too_short": "is empty. Leave it out or fill it.",
    "too_short": "is empty. Leave it out or fill it.",
    "string_too_long": "has more than {max_length} characters. Make it shorter.",
    "too_long": "has more than {max_length} entries. Make it shorter.",
    "string_pattern_mismatch": "is {shown}; it must be letters, digits, '_', '-' and '.'.",
}
"""What follows the key's name for each type of error of pydantic, with the words of its context."""


def check(data: dict[str, Any], table: type[T], form: Form) -> tuple[T | None, list[Mistake]]:
    """What `data` says as the dataclass of the file, None if there are mistakes; and these, with the paths of keys."""
    try:
        return TypeAdapter(table).validate_python(data), []
    except ValidationError as error:
        return None, [
            (item["loc"], _explain(form, item["type"], item["loc"], item["input"], item.get("ctx", {})))
            for item in error.errors(include_url=False)
            if not (
                item["type"] == "too_short" and item["input"]
            )  # for all of its entries are wrong, which is told too
        ]


def _explain(form: Form, kind: str, path: KeyPath, value: object, context: dict[str, Any]) -> str:
    """One sentence on the value at `path`, and one on what was meant."""
    table = form.table(path[:-1])
    match kind:
        case "unexpected_keyword_argument":
            known = form.keys(form.tables[table])
            close = did_you_mean(str(path[-1])[:MAX_SHOWN], known)
            return f"{_name(path)} is no key of {form.names[table]}.{close or listed('Its keys are', known)}"
        case "missing":
            meaning = attributes(form.tables[table]).get(str(path[-1]), "")
            return f"{form.names[table]} lacks the key {_name(path)}.{f' It says: {meaning}' if meaning else ''}"
        case "value_error":
            text = str(context["error"])
            return text if text.endswith((".", "?")) else f"{text}."
        case _ if kind in _SENTENCES:
            sentence = _SENTENCES[kind].format(shown=shown(value), **context)
            words = re.findall(r"'([^']*)'", context.get("expected", ""))
            close = did_you_mean(value[:MAX_SHOWN], words) if isinstance(value, str) else ""
            return f"{_name(path)} {sentence}{close}"
        case _:
            at_header = len(path) <= 2  # noqa: PLR2004  # the table itself, or one of several
            heading = form.headings.get(str(path[0]), "") if path and at_header else ""
            return f"{_name(path)} is {shown(value)}; it must be {_TYPES.get(kind, 'something else')}.{heading}"


def _name(path: KeyPath) -> str:
    words = [part for part in path if isinstance(part, str)]
    key = shown(words[-1]) if words else "the file"
    return f"entry {path[-1] + 1} of {key}" if path and isinstance(path[-1], int) else key


def shown(value: object) -> str:
    """A value as it may stand in a sentence: short, and on one line."""
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}...")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value) if abs(value) < _TOO_LARGE or isinstance(value, float) else "a very large number"
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "an array"
    return "a date or time"


def listed(sentence: str, words: Iterable[str]) -> str:
    """A sentence that ends with `words`, as many as may stand there, with a leading space."""
    return f" {sentence} {', '.join(words)[:_MAX_LISTED]}."
