"""What is wrong with the data of a rule file, in sentences for whoever wrote it."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from graphquant.errors import did_you_mean
from graphquant.ruleset.schema import TABLES, attributes, keys
from graphquant.ruleset.syntax import ANY_PART, parse_pattern
from graphquant.ruleset.types import RuleFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from graphquant.ruleset.locate import KeyPath

OUTCOMES = ("leave", "absorbed", "same-as-input", "passed-on")
"""What a rule may say in `quantize` beside the name of a scheme."""

_MAX_SHOWN, _MAX_LISTED = 60, 500
_TOO_LARGE = 1 << 64
_HEADINGS = {
    "rule": " A rule is headed [[rule]].",
    "scheme": " A scheme is headed [scheme.NAME].",
    "pattern": " A pattern is headed [pattern.NAME].",
}
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
    "string_pattern_mismatch": "is {shown}; it must be letters, digits, '_', '-' and '.', as ops are named after it.",
}
"""What follows the key's name for each type of error of pydantic, with the words of its context."""


def parse(data: dict[str, Any]) -> tuple[RuleFile | None, list[tuple[KeyPath, str]]]:
    """The rule file that `data` describes, None if there are mistakes, and each mistake with the path of its key."""
    mistakes = list(_references(data))
    try:
        file = TypeAdapter(RuleFile).validate_python(data)
    except ValidationError as error:
        mistakes += [
            (item["loc"], _explain(item["type"], item["loc"], item["input"], item.get("ctx", {})))
            for item in error.errors(include_url=False)
        ]
        return None, mistakes
    return (None if mistakes else file), mistakes


# -- values: what pydantic says, in plain words ----------------------------------------------------


def _explain(kind: str, path: KeyPath, value: object, context: dict[str, Any]) -> str:
    """One sentence on the value at `path`, and one on what was meant."""
    match kind:
        case "unexpected_keyword_argument":
            return _unknown_key(path)
        case "missing":
            meaning = attributes(TABLES[_table(path[:-1])]).get(str(path[-1]), "")
            return f"{_where(path[:-1])} lacks the key {_name(path)}.{f' It says: {meaning}' if meaning else ''}"
        case "value_error":
            text = str(context["error"])
            return text if text.endswith((".", "?")) else f"{text}."
        case _ if kind in _SENTENCES:
            sentence = _SENTENCES[kind].format(shown=_shown(value), **context)
            words = re.findall(r"'([^']*)'", context.get("expected", ""))
            return (
                f"{_name(path)} {sentence}{did_you_mean(value[:_MAX_SHOWN], words) if isinstance(value, str) else ''}"
            )
        case _:
            heading = _HEADINGS.get(str(path[0]), "") if path and len(path) <= 2 else ""  # noqa: PLR2004  # at the header
            return f"{_name(path)} is {_shown(value)}; it must be {_TYPES.get(kind, 'something else')}.{heading}"


def _unknown_key(path: KeyPath) -> str:
    known = keys(TABLES[_table(path[:-1])])
    close = did_you_mean(str(path[-1])[:_MAX_SHOWN], known)
    return f"{_name(path)} is no key of {_where(path[:-1])}.{close or _list('Its keys are', known)}"


def _table(path: KeyPath) -> str:
    """Which table of a rule file `path` leads to, as a key of `TABLES`."""
    words = [part for part in path if isinstance(part, str)]
    if words and words[0] in {"scheme", "pattern"}:
        del words[1:2]  # its name
    return ".".join(words)


def _where(path: KeyPath) -> str:
    return {
        "": "a rule file",
        "rule": "a rule",
        "scheme": "a scheme",
        "scheme.observe": "an observer",
        "scheme.args": "the arguments of a family",
        "pattern": "a pattern",
        "rule.producer": "a producer",
        "rule.consumer": "a consumer",
    }[_table(path)]


def _name(path: KeyPath) -> str:
    words = [part for part in path if isinstance(part, str)]
    key = _shown(words[-1]) if words else "the file"
    return f"entry {path[-1] + 1} of {key}" if path and isinstance(path[-1], int) else key


def _shown(value: object) -> str:
    """A value as it may stand in a sentence: short, and on one line."""
    if isinstance(value, str):
        return repr(value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}...")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value) if abs(value) < _TOO_LARGE or isinstance(value, float) else "a very large number"
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "an array"
    return "a date or time"


def _list(sentence: str, words: Iterable[str]) -> str:
    return f" {sentence} {', '.join(words)[:_MAX_LISTED]}."


# -- references: what the values say of one another ------------------------------------------------


def _references(data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """The mistakes that no value has by itself; values of a wrong type are passed over."""
    schemes, patterns = _tables(data.get("scheme")), _tables(data.get("pattern"))
    for name, scheme in schemes.items():
        if name in OUTCOMES or not name:
            yield ("scheme", name), f"a scheme cannot be called {name!r}. Give it another name."
        if "name" in scheme:
            yield ("scheme", name, "name"), "'name' is no key of a scheme. Its header, [scheme.NAME], has it."
    for name in patterns:
        if not re.fullmatch(r"[\w-]+", name):
            yield ("pattern", name), f"a pattern cannot be called {_shown(name)}. Use letters, digits, '_' and '-'."
    rules = data.get("rule")
    rules = [rule if isinstance(rule, dict) else {} for rule in rules] if isinstance(rules, list) else []
    yield from _duplicates(rules)
    parts = {name: _part_names(pattern) for name, pattern in patterns.items()}
    yield from _besides(rules)
    for index, rule in enumerate(rules):
        scheme_name = rule.get("quantize")
        if isinstance(scheme_name, str) and scheme_name not in (*schemes, *OUTCOMES):
            close = did_you_mean(scheme_name[:_MAX_SHOWN], [*schemes, *OUTCOMES])
            known = close or _list("Known are", [*schemes, *OUTCOMES])
            yield ("rule", index, "quantize"), f"there is no scheme {_shown(scheme_name)}.{known}"
        for side in ("producer", "consumer"):
            selector = rule.get(side)
            reference = selector.get("pattern") if isinstance(selector, dict) else None
            if isinstance(reference, str) and (text := _pattern_mistake(reference, parts)):
                yield ("rule", index, side, "pattern"), text


def _besides(rules: list[dict[str, Any]]) -> Iterator[tuple[KeyPath, str]]:
    """What is wrong with the rules that consumers stand `beside`."""
    selectors = [selector if isinstance(selector := rule.get("consumer"), dict) else {} for rule in rules]
    own = {rule.get("name"): "beside" in one for rule, one in zip(rules, selectors, strict=True) if _is_named(rule)}
    for index, selector in enumerate(selectors):
        wanted, path = selector.get("beside"), ("rule", index, "consumer", "beside")
        if isinstance(wanted, str) and wanted not in own:
            close = did_you_mean(wanted[:_MAX_SHOWN], [str(name) for name in own])
            yield path, f"there is no rule {_shown(wanted)} in the file.{close}"
        elif isinstance(wanted, str) and own[wanted]:
            yield path, f"the rule {_shown(wanted)} is 'beside' another itself. Name that one."


def _is_named(rule: dict[str, Any]) -> bool:
    return isinstance(rule.get("name"), str)


def _tables(value: object) -> dict[str, dict[str, Any]]:
    """The tables by name in `value`, empty ones for what is no table."""
    if not isinstance(value, dict):
        return {}
    return {name: table if isinstance(table, dict) else {} for name, table in value.items()}


def _duplicates(rules: list[dict[str, Any]]) -> Iterator[tuple[KeyPath, str]]:
    seen: Counter[str] = Counter()
    for index, rule in enumerate(rules):
        name = rule.get("name")
        if isinstance(name, str):
            if seen[name]:
                yield ("rule", index, "name"), f"another rule above is called {_shown(name)}. Give each its own name."
            seen[name] += 1


def _part_names(pattern: dict[str, Any]) -> tuple[str, ...] | None:
    """The names of a pattern's ops, None if it has mistakes of its own."""
    lines = pattern.get("ops")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        return None
    try:
        return tuple(op.name for op in parse_pattern(lines))
    except ValueError:
        return None


def _pattern_mistake(reference: str, parts: dict[str, tuple[str, ...] | None]) -> str:
    """What is wrong with `NAME` or `NAME.op`, "" if nothing is."""
    name, dot, op = reference.partition(".")
    if name not in parts:
        known = _list("Known are", parts) if parts else " The file has none."
        return f"there is no pattern {_shown(name)}.{did_you_mean(name[:_MAX_SHOWN], parts) or known}"
    ops = parts[name]
    if not dot or ops is None or op in (*ops, ANY_PART):
        return ""
    close = did_you_mean(op[:_MAX_SHOWN], ops)
    return f"the pattern {name!r} has no op {_shown(op)}.{close or _list('Its ops are', ops)}"
