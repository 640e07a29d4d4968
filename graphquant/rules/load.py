"""Load rule files: find them, parse them, and report all mistakes at once. Generate their JSON Schema."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import TypeAdapter

from graphquant.errors import RuleError, UsageError, did_you_mean
from graphquant.observers import OBSERVERS
from graphquant.qdq import FAMILIES, FamilyArguments
from graphquant.rules.pattern_syntax import ANY_OP, parse_pattern
from graphquant.rules.rule import (
    CONSUMER_CONDITIONS,
    NEGATION,
    NO_COSTS,
    BoundRule,
    Library,
    Pattern,
    Rule,
    RuleFile,
    RuleSet,
    Selector,
)
from graphquant.rules.scheme import SCHEME_DTYPES, ObserverConfig, Scheme
from graphquant.rules.toml_document import (
    MAX_VALUE_LENGTH,
    DocumentKind,
    LocateKeys,
    Mistake,
    describe_table_schema,
    document_error,
    format_value,
    mistakes_error,
    nearest_line,
    parse_document,
    read_document,
    table_keys,
    validate_document,
    words_sentence,
)

# One-line rules, `PRODUCER > CONSUMER: BITS, EXPONENT`: the fixed-point recipe in place of a file name.

INLINE_ARROW = " > "  # the separator that distinguishes such a rule from a file name

_INLINE_RULE = re.compile(
    r"\s*(?P<producer>.+?)\s+>\s+(?P<consumer>.+?)\s*:\s*(?P<bits>\d{1,3})\s*,\s*(?P<exponent>-?\d{1,4})\s*"
)

# Mistakes in the data of a rule file that concern several of its values.

BUILTIN_OUTCOMES = ("float", "fused", "same-as-input", "passthrough")
"""Values of `quantize` other than the name of a scheme."""


def parse_rule_file(data: dict[str, Any]) -> tuple[RuleFile | None, list[Mistake]]:
    """Return the rule file in `data`, None if there are mistakes, and each mistake with its key path."""
    shipped = shipped_libraries()
    used = data.get("use")
    used = used if _is_list_of_strings(used) else []
    libraries = [_read_library(shipped[name]) for name in used if name in shipped]
    library_patterns = {key: pattern for library in libraries for key, pattern in library.pattern.items()}
    mistakes: list[Mistake] = [
        (("use", index), f"there is no library {format_value(name)}.{_hint(name, shipped, 'Shipped are')}")
        for index, name in enumerate(used)
        if name not in shipped
    ]
    if isinstance(base := data.get("extends"), str) and base and base not in shipped_rule_files():
        hint = _hint(base, shipped_rule_files(), "Shipped are")
        mistakes.append((("extends",), f"there is no shipped rule file {format_value(base)}.{hint}"))
    mistakes += _reference_mistakes(data, library_patterns)
    file, validation_mistakes = validate_document(data, RuleFile, RULE_FILE_KIND)
    if file is not None:
        file = replace(file, pattern={**library_patterns, **file.pattern})
    return (None if mistakes else file), [*mistakes, *validation_mistakes]


def _hint(word: str, known: Collection[str], sentence: str) -> str:
    """Return a sentence with the closest of the `known` words, or `sentence` with as many of them as fit."""
    return did_you_mean(word[:MAX_VALUE_LENGTH], known) or words_sentence(sentence, known)


def shipped_libraries() -> dict[str, Path]:
    """Return the shipped libraries by name."""
    folder = _shipped_folder() / "patterns"
    return {path.stem: path for path in sorted(folder.glob(f"*{RULE_FILE_SUFFIX}"))}


@cache
def _read_library(path: Path) -> Library:
    """Return a shipped library, which has no mistakes."""
    return TypeAdapter(Library).validate_python(tomllib.loads(path.read_text("utf-8")))


def _is_list_of_strings(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _reference_mistakes(data: dict[str, Any], library_patterns: Mapping[str, Pattern]) -> Iterator[Mistake]:
    """Yield mistakes that concern several values. Values of a wrong type are ignored here."""
    schemes, patterns = _tables_by_name(data.get("scheme")), _tables_by_name(data.get("pattern"))
    yield from _table_name_mistakes(schemes, patterns, library_patterns)
    rules = data.get("rule")
    rules = [rule if isinstance(rule, dict) else {} for rule in rules] if isinstance(rules, list) else []
    yield from _rule_name_mistakes(rules)
    pattern_lines: dict[str, object] = {name: list(pattern.ops) for name, pattern in library_patterns.items()}
    pattern_lines |= {name: pattern.get("ops") for name, pattern in patterns.items()}
    outcomes = [*schemes, *BUILTIN_OUTCOMES]
    for index, rule in enumerate(rules):
        outcome = rule.get("quantize")
        if isinstance(outcome, str) and outcome not in outcomes:
            hint = _hint(outcome, outcomes, "Known are")
            yield ("rule", index, "quantize"), f"there is no scheme {format_value(outcome)}.{hint}"
        for side, selector in _tables_by_name({side: rule.get(side) for side in ("producer", "consumer")}).items():
            for key in ("pattern", "feeds"):
                for reference in references.split("|") if isinstance(references := selector.get(key), str) else ():
                    if text := _pattern_mistake(reference, pattern_lines):
                        yield ("rule", index, side, key), text


def _table_name_mistakes(
    schemes: Mapping[str, Mapping[str, object]], patterns: Iterable[str], library_patterns: Mapping[str, Pattern]
) -> Iterator[Mistake]:
    """Yield mistakes in the names of schemes and patterns."""
    for name in patterns:
        if name in library_patterns:
            yield ("pattern", name), f"a library in 'use' has a pattern {name!r} already. Choose another name."
        if not re.fullmatch(r"[\w-]+", name):
            sentence = f"{format_value(name)} is not a valid name for a pattern. Use letters, digits, '_' and '-'."
            yield ("pattern", name), sentence
    for name, scheme in schemes.items():
        if name in BUILTIN_OUTCOMES or not name:
            yield ("scheme", name), f"{name!r} is not a valid name for a scheme. Choose another name."
        if "name" in scheme:
            yield ("scheme", name, "name"), "'name' is not a key of a scheme. The header [scheme.NAME] names it."


def _rule_name_mistakes(rules: list[dict[str, Any]]) -> Iterator[Mistake]:
    """Yield mistakes in the names of rules, and in the `sibling_rule` conditions that refer to them."""
    selectors = list(_tables_by_name({index: rule.get("consumer") for index, rule in enumerate(rules)}).values())
    uses_sibling: dict[str, bool] = {}
    for index, (rule, selector) in enumerate(zip(rules, selectors, strict=True)):
        name = rule.get("name")
        if isinstance(name, str):
            if name in uses_sibling:
                sentence = f"a rule above has the name {format_value(name)} already. Give each rule its own name."
                yield ("rule", index, "name"), sentence
            uses_sibling[name] = "sibling_rule" in selector
    for index, selector in enumerate(selectors):
        sibling, path = selector.get("sibling_rule"), ("rule", index, "consumer", "sibling_rule")
        if isinstance(sibling, str) and sibling not in uses_sibling:
            close = did_you_mean(sibling[:MAX_VALUE_LENGTH], uses_sibling)
            yield path, f"there is no rule {format_value(sibling)} in the file.{close}"
        elif isinstance(sibling, str) and uses_sibling[sibling]:
            yield path, f"the rule {format_value(sibling)} has a 'sibling_rule' itself. Name that one."


def _tables_by_name(value: object) -> dict[Any, dict[str, Any]]:
    """Return the tables by name in `value`, an empty table for any other value."""
    tables = value if isinstance(value, dict) else {}
    return {name: table if isinstance(table, dict) else {} for name, table in tables.items()}


def _pattern_mistake(reference: str, pattern_lines: Mapping[str, object]) -> str:
    """Return the mistake in `NAME` or `NAME.op`, "" if there is none, or in the pattern itself."""
    name, dot, op = reference.partition(".")
    if name not in pattern_lines:
        no_patterns = "" if pattern_lines else " The file has none, and uses no library with patterns."
        return f"there is no pattern {format_value(name)}.{no_patterns or _hint(name, pattern_lines, 'Known are')}"
    lines = pattern_lines[name]
    if not dot or not _is_list_of_strings(lines):
        return ""
    try:
        ops = [pattern_op.name for pattern_op in parse_pattern(lines)]
    except ValueError:
        return ""
    return (
        ""
        if op in {*ops, ANY_OP}
        else f"the pattern {name!r} has no op {format_value(op)}.{_hint(op, ops, 'Its ops are')}"
    )


RULE_FILE_SUFFIX = ".toml"


def shipped_rule_files() -> dict[str, Path]:
    """Return the shipped rule files by name: in the installed package, or next to it in a checkout."""
    return {path.stem: path for path in sorted(_shipped_folder().glob(f"*{RULE_FILE_SUFFIX}"))}


def _shipped_folder() -> Path:
    installed = Path(__file__).parent
    return installed if any(installed.glob(f"*{RULE_FILE_SUFFIX}")) else installed.parents[1] / "rules"


def find_rule_file(name_or_path: str) -> Path:
    """Return the rule file for a shipped name, or for a path that ends in `.toml`."""
    shipped, path, name = shipped_rule_files(), Path(name_or_path), name_or_path
    if name.endswith(RULE_FILE_SUFFIX):
        if "\0" not in name and path.exists():
            return path
        name = path.stem
    elif name in shipped:
        return shipped[name]
    close = did_you_mean(name, shipped)
    if name and Path(f"{name}{RULE_FILE_SUFFIX}").is_file():
        close = f" Did you mean {name + RULE_FILE_SUFFIX!r}?"
    raise UsageError(
        f"There is no rule file {name_or_path!r}.{close} The shipped rule files are {', '.join(shipped) or 'missing'}."
        f" Name your own file by its path, including {RULE_FILE_SUFFIX}."
    )


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
    library_rules: dict[str, list[BoundRule]] = {}
    descriptions: list[str] = []
    targets: dict[str, None] = {}
    costs = ""
    digest = hashlib.sha256()
    sources: list[tuple[int, str, Path | None, dict[str, Scheme]]]
    sources = [(position, name, path, {}) for position, (name, path) in enumerate(zip(names, paths, strict=True))]
    for index, (position, name, path, overrides) in enumerate(sources):  # grows during the loop
        label = f"rules[{position}]" if "\n" in name else name
        try:
            content = name.encode(errors="replace") if path is None else read_document(path, RULE_FILE_KIND)
            file, locate = _parse_rules(name, label, path, content)
        except RuleError as error:
            failures[str(error)] = None
            continue
        digest.update(hashlib.sha256(content).digest())
        find_line = partial(nearest_line, locate, ("use",))
        for used in (shipped_libraries()[library] for library in file.use):
            digest.update(hashlib.sha256(used.read_bytes()).digest())
            library = _read_library(used)
            bound = [BoundRule(rule, used.stem, find_line, None, library.pattern, True) for rule in library.rule]
            library_rules.setdefault(used.stem, bound)
        for switches, steps in ((prepare, file.prepare), (algorithms, file.algorithms)):
            for step in steps:
                switches.setdefault(step.removeprefix(NEGATION), not step.startswith(NEGATION))
        descriptions.append(file.description)
        targets |= dict.fromkeys(filter(None, [file.target]))
        costs = costs or resolve_costs(file.costs, path)
        schemes = {key: replace(scheme, name=key) for key, scheme in file.scheme.items()} | overrides
        if file.extends:
            sources.insert(index + 1, (position, file.extends, shipped_rule_files()[file.extends], schemes))
        for rule_index, rule in enumerate(file.rule):
            find_line = partial(nearest_line, locate, ("rule", rule_index))
            scheme, inherited = schemes.get(rule.quantize), name != names[position]
            rules.append(BoundRule(rule, label, find_line, scheme, file.pattern, inherited))
    if failures:
        raise RuleError("\n".join(failures))
    costs = "" if costs == NO_COSTS else costs
    if costs.endswith(RULE_FILE_SUFFIX) and Path(costs).is_file():  # the shipped table is part of the program
        digest.update(Path(costs).read_bytes())
    return RuleSet(
        files=tuple(names),
        descriptions=tuple(descriptions),
        targets=tuple(targets),
        digest=digest.hexdigest(),
        prepare=tuple(name for name, enabled in prepare.items() if enabled),
        algorithms=tuple(name for name, enabled in algorithms.items() if enabled),
        costs=costs,
        rules=(*rules, *chain.from_iterable(library_rules.values())),
    )


def _parse_rules(name: str, label: str, path: Path | None, content: bytes) -> tuple[RuleFile, LocateKeys]:
    """Return a rule file and the function that returns the lines of its keys. Raises a RuleError for its mistakes."""
    locate: LocateKeys = dict  # a one-line rule has no lines
    if path is None and label == name:
        data = _parse_inline_rule(name)
    else:
        data, locate = parse_document(path or Path(label), content, RULE_FILE_KIND)
    file, mistakes = parse_rule_file(data)
    if file is None:
        raise mistakes_error(path or Path(label), locate, mistakes, RULE_FILE_KIND)
    return file, locate


def resolve_costs(name: str, rule_file: Path | None) -> str:
    """Return the name of the shipped cost table, or the path of a file next to the rule file that names it."""
    return str(Path(rule_file or "").parent / name) if name.endswith(RULE_FILE_SUFFIX) else name


def _parse_inline_rule(text: str) -> dict[str, Any]:
    """Return the data of the rule file that a one-line rule stands for."""
    if (match := _INLINE_RULE.fullmatch(text)) is None:
        sentence = (
            "this is not a one-line rule. Write 'PRODUCER > CONSUMER: BITS, EXPONENT', such as"
            " 'conv1/Relu:0 > conv2/*: 8, -4'."
        )
        raise document_error(Path(text), RULE_FILE_KIND, sentence)
    observe = {"name": "fixed-point", "exponent": int(match["exponent"])}
    sides = {side: {"name": match[side]} for side in ("producer", "consumer")}
    return {
        "scheme": {"fixed-point": {"bits": int(match["bits"]), "narrow": True, "observe": observe}},
        "rule": [{"name": "fixed-point", **sides, "quantize": "fixed-point"}],
    }


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
