"""Load rule files: find them, parse them, and report all mistakes at once."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from pydantic import TypeAdapter

from graphquant.errors import RuleError, UsageError, did_you_mean
from graphquant.rules.json_schema import RULE_FILE_KIND
from graphquant.rules.pattern_syntax import ANY_OP, parse_pattern
from graphquant.rules.rule import NEGATION, BoundRule, Pattern, PatternLibrary, RuleFile, RuleSet
from graphquant.rules.toml_document import (
    MAX_VALUE_LENGTH,
    document_error,
    format_value,
    mistakes_error,
    parse_document,
    read_document,
    validate_document,
    words_sentence,
)
from graphquant.rules.toml_lines import nearest_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from graphquant.rules.toml_document import Mistake
    from graphquant.rules.toml_lines import KeyPath


# One-line rules, `PRODUCER > CONSUMER: BITS, EXPONENT`: the fixed-point recipe in place of a file name.

INLINE_ARROW = " > "
"""The separator that distinguishes such a rule from a file name."""

_INLINE_RULE = re.compile(
    r"\s*(?P<producer>.+?)\s+>\s+(?P<consumer>.+?)\s*:\s*(?P<bits>\d{1,3})\s*,\s*(?P<exponent>-?\d{1,4})\s*"
)


# Mistakes in the data of a rule file that concern several of its values.

BUILTIN_OUTCOMES = ("float", "fused", "same-as-input", "passthrough")
"""Values of `quantize` other than the name of a scheme."""


def parse_rule_file(data: dict[str, Any]) -> tuple[RuleFile | None, list[Mistake]]:
    """Return the rule file in `data`, None if there are mistakes, and each mistake with its key path."""
    shipped = shipped_pattern_libraries()
    used = data.get("use")
    libraries = [name for name in used if name in shipped] if _is_list_of_strings(used) else []
    library_patterns = {key: pattern for name in libraries for key, pattern in _read_library(shipped[name]).items()}
    mistakes = list(_reference_mistakes(data, library_patterns))
    file, validation_mistakes = validate_document(data, RuleFile, RULE_FILE_KIND)
    if file is not None:
        file = replace(file, pattern={**library_patterns, **file.pattern})
    return (None if mistakes else file), [*mistakes, *validation_mistakes]


def shipped_pattern_libraries() -> dict[str, Path]:
    """Return the shipped pattern libraries by name."""
    folder = _shipped_folder() / "patterns"
    return {path.stem: path for path in sorted(folder.glob(f"*{RULE_FILE_SUFFIX}"))}


@cache
def _read_library(path: Path) -> dict[str, Pattern]:
    """Return the patterns of a shipped library, which has no mistakes."""
    return TypeAdapter(PatternLibrary).validate_python(tomllib.loads(path.read_text("utf-8"))).pattern


def _is_list_of_strings(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _reference_mistakes(data: dict[str, Any], library_patterns: Mapping[str, Pattern]) -> Iterator[tuple[KeyPath, str]]:
    """Yield mistakes that concern several values. Values of a wrong type are ignored here."""
    schemes, patterns = _tables_by_name(data.get("scheme")), _tables_by_name(data.get("pattern"))
    yield from _library_mistakes(data.get("use"), patterns, library_patterns)
    for name, scheme in schemes.items():
        if name in BUILTIN_OUTCOMES or not name:
            yield ("scheme", name), f"{name!r} is not a valid name for a scheme. Choose another name."
        if "name" in scheme:
            yield ("scheme", name, "name"), "'name' is not a key of a scheme. The header [scheme.NAME] names it."
    for name in patterns:
        if not re.fullmatch(r"[\w-]+", name):
            yield (
                ("pattern", name),
                f"{format_value(name)} is not a valid name for a pattern. Use letters, digits, '_' and '-'.",
            )
    rules = data.get("rule")
    rules = [rule if isinstance(rule, dict) else {} for rule in rules] if isinstance(rules, list) else []
    yield from _duplicate_name_mistakes(rules)
    pattern_ops = {name: _pattern_op_names({"ops": list(pattern.ops)}) for name, pattern in library_patterns.items()}
    pattern_ops |= {name: _pattern_op_names(pattern) for name, pattern in patterns.items()}
    yield from _sibling_mistakes(rules)
    for index, rule in enumerate(rules):
        scheme_name = rule.get("quantize")
        if isinstance(scheme_name, str) and scheme_name not in (*schemes, *BUILTIN_OUTCOMES):
            close = did_you_mean(scheme_name[:MAX_VALUE_LENGTH], [*schemes, *BUILTIN_OUTCOMES])
            suggestion = close or words_sentence("Known are", [*schemes, *BUILTIN_OUTCOMES])
            yield ("rule", index, "quantize"), f"there is no scheme {format_value(scheme_name)}.{suggestion}"
        for side in ("producer", "consumer"):
            selector = rule.get(side)
            reference = selector.get("pattern") if isinstance(selector, dict) else None
            if isinstance(reference, str) and (text := _pattern_mistake(reference, pattern_ops)):
                yield ("rule", index, side, "pattern"), text


def _library_mistakes(
    used: object, patterns: Mapping[str, object], library_patterns: Mapping[str, object]
) -> Iterator[tuple[KeyPath, str]]:
    """Yield unknown pattern libraries, and patterns of the file whose name a library has already."""
    shipped = shipped_pattern_libraries()
    for index, name in enumerate(used if _is_list_of_strings(used) else ()):
        if name not in shipped:
            hint = did_you_mean(name[:MAX_VALUE_LENGTH], shipped) or words_sentence("Shipped are", shipped)
            yield ("use", index), f"there is no pattern library {format_value(name)}.{hint}"
    for name in patterns:
        if name in library_patterns:
            yield ("pattern", name), f"a library in 'use' has a pattern {name!r} already. Choose another name."


def _sibling_mistakes(rules: list[dict[str, Any]]) -> Iterator[tuple[KeyPath, str]]:
    """Yield mistakes in the `sibling_rule` conditions of consumers."""
    selectors = [selector if isinstance(selector := rule.get("consumer"), dict) else {} for rule in rules]
    uses_sibling = {
        rule.get("name"): "sibling_rule" in selector
        for rule, selector in zip(rules, selectors, strict=True)
        if isinstance(rule.get("name"), str)
    }
    for index, selector in enumerate(selectors):
        sibling, path = selector.get("sibling_rule"), ("rule", index, "consumer", "sibling_rule")
        if isinstance(sibling, str) and sibling not in uses_sibling:
            close = did_you_mean(sibling[:MAX_VALUE_LENGTH], [str(name) for name in uses_sibling])
            yield path, f"there is no rule {format_value(sibling)} in the file.{close}"
        elif isinstance(sibling, str) and uses_sibling[sibling]:
            yield path, f"the rule {format_value(sibling)} has a 'sibling_rule' itself. Name that one."


def _tables_by_name(value: object) -> dict[str, dict[str, Any]]:
    """Return the tables by name in `value`, an empty table for any other value."""
    if not isinstance(value, dict):
        return {}
    return {name: table if isinstance(table, dict) else {} for name, table in value.items()}


def _duplicate_name_mistakes(rules: list[dict[str, Any]]) -> Iterator[tuple[KeyPath, str]]:
    occurrences: Counter[str] = Counter()
    for index, rule in enumerate(rules):
        name = rule.get("name")
        if isinstance(name, str):
            if occurrences[name]:
                yield (
                    ("rule", index, "name"),
                    f"a rule above has the name {format_value(name)} already. Give each rule its own name.",
                )
            occurrences[name] += 1


def _pattern_op_names(pattern: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the names of a pattern's ops, None if the pattern itself has mistakes."""
    lines = pattern.get("ops")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        return None
    try:
        return tuple(op.name for op in parse_pattern(lines))
    except ValueError:
        return None


def _pattern_mistake(reference: str, pattern_ops: dict[str, tuple[str, ...] | None]) -> str:
    """Return the mistake in `NAME` or `NAME.op`, "" if there is none."""
    name, dot, op = reference.partition(".")
    if name not in pattern_ops:
        suggestion = (
            words_sentence("Known are", pattern_ops)
            if pattern_ops
            else " The file has none, and uses no library with patterns."
        )
        close = did_you_mean(name[:MAX_VALUE_LENGTH], pattern_ops)
        return f"there is no pattern {format_value(name)}.{close or suggestion}"
    ops = pattern_ops[name]
    if not dot or ops is None or op in (*ops, ANY_OP):
        return ""
    close = did_you_mean(op[:MAX_VALUE_LENGTH], ops)
    return f"the pattern {name!r} has no op {format_value(op)}.{close or words_sentence('Its ops are', ops)}"


RULE_FILE_SUFFIX = ".toml"


def shipped_rule_files() -> dict[str, Path]:
    """Return the shipped rule files by name: in the installed package, or next to it in a checkout."""
    return {path.stem: path for path in sorted(_shipped_folder().glob(f"*{RULE_FILE_SUFFIX}"))}


def _shipped_folder() -> Path:
    installed = Path(__file__).parent
    return installed if any(installed.glob(f"*{RULE_FILE_SUFFIX}")) else installed.parents[1] / "rules"


def find_rule_file(name_or_path: str) -> Path:
    """Return the rule file for a shipped name, or for a path that ends in `.toml`.

    Raises:
        UsageError: There is no such file.
    """
    if name_or_path.endswith(RULE_FILE_SUFFIX):
        path = Path(name_or_path)
        if "\0" not in name_or_path and path.exists():
            return path
        raise UsageError(f"There is no rule file {name_or_path!r}.{_rule_file_hint(path.stem)}")
    shipped = shipped_rule_files()
    if name_or_path in shipped:
        return shipped[name_or_path]
    raise UsageError(f"There is no rule file {name_or_path!r}.{_rule_file_hint(name_or_path)}")


def rebase_rule_paths(names: Iterable[str], folder: str) -> tuple[str, ...]:
    """Return `names` with paths that are relative to `folder` made relative to the current folder."""
    return tuple(
        str(Path(folder, name))
        if name.endswith(RULE_FILE_SUFFIX) and INLINE_ARROW not in name and "\n" not in name
        else name
        for name in names
    )


def load_ruleset(names: Sequence[str]) -> RuleSet:
    """Load the rules of all files in the given order.

    Each is a shipped name, a path, a one-line rule, or a file's text.

    A text has more than one line; messages refer to it by its position, `rules[0]`.

    Raises:
        UsageError: There is no such file.
        RuleError: Files have mistakes. The message has a line `path:line: mistake` for each of them.
    """
    paths = [None if INLINE_ARROW in name or "\n" in name else find_rule_file(name) for name in names]
    failures: dict[str, None] = {}
    prepare: dict[str, bool] = {}
    algorithms: dict[str, bool] = {}
    rules: list[BoundRule] = []
    descriptions: list[str] = []
    digest = hashlib.sha256()
    for position, (name, path) in enumerate(zip(names, paths, strict=True)):
        label = f"rules[{position}]" if "\n" in name else name
        try:
            content = name.encode(errors="replace") if path is None else read_document(path, RULE_FILE_KIND)
            file, lines = (
                _parse_inline_rule(name)
                if path is None and label == name
                else _parse_rule_content(path or Path(label), content)
            )
        except RuleError as error:
            failures[str(error)] = None
            continue
        digest.update(hashlib.sha256(content).digest())
        for library in file.use:
            digest.update(hashlib.sha256(shipped_pattern_libraries()[library].read_bytes()).digest())
        for switches, steps in ((prepare, file.prepare), (algorithms, file.algorithms)):
            for step in steps:
                switches.setdefault(step.removeprefix(NEGATION), not step.startswith(NEGATION))
        descriptions.append(file.description)
        rules.extend(_bind_rules(label, file, lines))
    if failures:
        raise RuleError("\n".join(failures))
    return RuleSet(
        files=tuple(names),
        descriptions=tuple(descriptions),
        digest=digest.hexdigest(),
        prepare=tuple(name for name, enabled in prepare.items() if enabled),
        algorithms=tuple(name for name, enabled in algorithms.items() if enabled),
        rules=tuple(rules),
    )


def _bind_rules(name: str, file: RuleFile, lines: Mapping[KeyPath, int]) -> list[BoundRule]:
    schemes = {key: replace(scheme, name=key) for key, scheme in file.scheme.items()}
    return [
        BoundRule(
            rule=rule,
            file=name,
            find_line=partial(nearest_line, lines, ("rule", index)),
            scheme=schemes.get(rule.quantize),
            patterns=file.pattern,
        )
        for index, rule in enumerate(file.rule)
    ]


def _parse_rule_content(path: Path, content: bytes) -> tuple[RuleFile, Mapping[KeyPath, int]]:
    """Return the file's data and the lines of its keys. Raise a RuleError with all mistakes."""
    data, lines = parse_document(path, content, RULE_FILE_KIND)
    file, mistakes = parse_rule_file(data)
    if file is None:
        raise mistakes_error(path, lines, mistakes, RULE_FILE_KIND)
    return file, lines


def _parse_inline_rule(text: str) -> tuple[RuleFile, Mapping[KeyPath, int]]:
    """Return the data of a one-line rule. Raise a RuleError with all mistakes."""
    match = _INLINE_RULE.fullmatch(text)
    if match is None:
        sentence = (
            "this is not a one-line rule. Write 'PRODUCER > CONSUMER: BITS, EXPONENT', such as"
            " 'conv1/Relu:0 > conv2/*: 8, -4'."
        )
        raise document_error(Path(text), [(1, sentence)], RULE_FILE_KIND)
    observe = {"name": "fixed-point", "exponent": int(match["exponent"])}
    sides = {side: {"name": match[side]} for side in ("producer", "consumer")}
    file, mistakes = parse_rule_file(
        {
            "scheme": {"fixed-point": {"bits": int(match["bits"]), "narrow": True, "observe": observe}},
            "rule": [{"name": "fixed-point", **sides, "quantize": "fixed-point"}],
        }
    )
    if file is None:
        raise mistakes_error(Path(text), {}, mistakes, RULE_FILE_KIND)
    return file, {}


def _rule_file_hint(name: str) -> str:
    shipped = shipped_rule_files()
    close = did_you_mean(name, shipped)
    if name and Path(f"{name}{RULE_FILE_SUFFIX}").is_file():
        close = f" Did you mean {name + RULE_FILE_SUFFIX!r}?"
    names = ", ".join(shipped) or "missing"
    return f"{close} The shipped rule files are {names}. Name your own file by its path, including {RULE_FILE_SUFFIX}."
