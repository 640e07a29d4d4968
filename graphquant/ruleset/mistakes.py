"""What is wrong with the data of a rule file, in sentences for whoever wrote it."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from graphquant.documents import check, listed, shown
from graphquant.documents.mistakes import MAX_SHOWN
from graphquant.errors import did_you_mean
from graphquant.ruleset.schema import FORM
from graphquant.ruleset.syntax import ANY_PART, parse_pattern
from graphquant.ruleset.types import RuleFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.documents import KeyPath, Mistake

OUTCOMES = ("leave", "absorbed", "same-as-input", "passed-on")
"""What a rule may say in `quantize` beside the name of a scheme."""


def parse(data: dict[str, Any]) -> tuple[RuleFile | None, list[Mistake]]:
    """The rule file that `data` describes, None if there are mistakes, and each mistake with the path of its key."""
    mistakes = list(_references(data))
    file, others = check(data, RuleFile, FORM)
    return (None if mistakes else file), [*mistakes, *others]


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
            yield ("pattern", name), f"a pattern cannot be called {shown(name)}. Use letters, digits, '_' and '-'."
    rules = data.get("rule")
    rules = [rule if isinstance(rule, dict) else {} for rule in rules] if isinstance(rules, list) else []
    yield from _duplicates(rules)
    parts = {name: _part_names(pattern) for name, pattern in patterns.items()}
    yield from _besides(rules)
    for index, rule in enumerate(rules):
        scheme_name = rule.get("quantize")
        if isinstance(scheme_name, str) and scheme_name not in (*schemes, *OUTCOMES):
            close = did_you_mean(scheme_name[:MAX_SHOWN], [*schemes, *OUTCOMES])
            known = close or listed("Known are", [*schemes, *OUTCOMES])
            yield ("rule", index, "quantize"), f"there is no scheme {shown(scheme_name)}.{known}"
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
            close = did_you_mean(wanted[:MAX_SHOWN], [str(name) for name in own])
            yield path, f"there is no rule {shown(wanted)} in the file.{close}"
        elif isinstance(wanted, str) and own[wanted]:
            yield path, f"the rule {shown(wanted)} is 'beside' another itself. Name that one."


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
                yield ("rule", index, "name"), f"another rule above is called {shown(name)}. Give each its own name."
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
        known = listed("Known are", parts) if parts else " The file has none."
        return f"there is no pattern {shown(name)}.{did_you_mean(name[:MAX_SHOWN], parts) or known}"
    ops = parts[name]
    if not dot or ops is None or op in (*ops, ANY_PART):
        return ""
    close = did_you_mean(op[:MAX_SHOWN], ops)
    return f"the pattern {name!r} has no op {shown(op)}.{close or listed('Its ops are', ops)}"
