"""From rule files to rules: where the files are, and all their mistakes at once."""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import graphquant
from graphquant.errors import RuleError, UsageError, did_you_mean, printable
from graphquant.ruleset.inline import SIGN, read_inline
from graphquant.ruleset.locate import KeyPath, NestingError, locate, nearest
from graphquant.ruleset.mistakes import parse
from graphquant.ruleset.types import NOT, BoundRule, RuleFile, RuleSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SUFFIX = ".toml"

MAX_BYTES = 1 << 20
"""Largest rule file; the shipped ones have a few thousand bytes."""

MAX_MISTAKES = 100
"""How many mistakes of one file are told at once."""


def shipped() -> dict[str, Path]:
    """The rule files that come with graphquant, by name: inside the installed package, or beside it in a checkout."""
    package = Path(graphquant.__file__).parent
    inside = package / "rules"
    folder = inside if inside.is_dir() else package.parent / "rules"
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def find(name_or_path: str) -> Path:
    """The rule file that `name_or_path` means: a shipped one by its name, any by a path that ends in `.toml`.

    Raises:
        UsageError: There is no such file.
    """
    if name_or_path.endswith(SUFFIX):
        path = Path(name_or_path)
        if "\0" not in name_or_path and path.exists():
            return path
        raise UsageError(f"There is no rule file {name_or_path!r}.{_hint(path.stem)}")
    known = shipped()
    if name_or_path in known:
        return known[name_or_path]
    raise UsageError(f"There are no rules called {name_or_path!r}.{_hint(name_or_path)}")


def load_ruleset(names: Sequence[str]) -> RuleSet:
    """The rules of all files in the order given, each a shipped name, a path, one rule in a line, or a file's text.

    A text has more than one line; messages call it by its place, `rules[0]`.

    Raises:
        UsageError: There is no such file.
        RuleError: Files have mistakes; the message has a line `path:line: what is wrong` for each of them.
    """
    paths = [None if SIGN in name or "\n" in name else find(name) for name in names]
    failures: dict[str, None] = {}
    prepare: dict[str, bool] = {}
    rules: list[BoundRule] = []
    descriptions: list[str] = []
    digest = hashlib.sha256()
    for place, (name, path) in enumerate(zip(names, paths, strict=True)):
        label = f"rules[{place}]" if "\n" in name else name
        try:
            content = name.encode(errors="replace") if path is None else _read(path)
            file, lines = _one_line(name) if path is None and label == name else _parse(path or Path(label), content)
        except RuleError as error:
            failures[str(error)] = None
            continue
        digest.update(hashlib.sha256(content).digest())
        for step in file.prepare:
            prepare.setdefault(step.removeprefix(NOT), not step.startswith(NOT))
        descriptions.append(file.description)
        rules.extend(_bind(label, file, lines))
    if failures:
        raise RuleError("\n".join(failures))
    return RuleSet(
        files=tuple(names),
        descriptions=tuple(descriptions),
        digest=digest.hexdigest(),
        prepare=tuple(name for name, wanted in prepare.items() if wanted),
        rules=tuple(rules),
    )


def _bind(name: str, file: RuleFile, lines: dict[KeyPath, int]) -> list[BoundRule]:
    schemes = {key: replace(scheme, name=key) for key, scheme in file.scheme.items()}
    return [
        BoundRule(
            rule=rule,
            file=name,
            line=nearest(lines, ("rule", index)),
            scheme=schemes.get(rule.quantize),
            patterns=file.pattern,
        )
        for index, rule in enumerate(file.rule)
    ]


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise _error(path, [(1, "this is a folder. Name a rule file in it.")])
    if not path.is_file():
        raise _error(path, [(1, "this is no regular file. Save the rules to a file first.")])
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise _error(path, [(1, f"the file cannot be read ({error.strerror}). Check its permissions.")]) from error
    return content


def _parse(path: Path, content: bytes) -> tuple[RuleFile, dict[KeyPath, int]]:
    """The file's data and the lines of its keys; a RuleError with all its mistakes."""
    if len(content) > MAX_BYTES:
        raise _error(path, [(1, f"the file has more than {MAX_BYTES} bytes. Rule files are small; is this one?")])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _error(path, [(line, "the file is not UTF-8. Save it in that encoding.")]) from error
    try:
        lines = locate(text)
    except NestingError as error:
        raise _error(path, [(error.line, f"this is {error}. Rule files need five.")]) from error
    file, mistakes = parse(_toml(path, text))
    if file is None:
        raise _error(path, [(nearest(lines, key), sentence) for key, sentence in mistakes])
    return file, lines


def _one_line(text: str) -> tuple[RuleFile, dict[KeyPath, int]]:
    """The data of a rule that was given as text; a RuleError with all its mistakes."""
    try:
        file, mistakes = parse(read_inline(text))
    except ValueError as error:
        raise _error(Path(text), [(1, str(error))]) from error
    if file is None:
        raise _error(Path(text), [(1, sentence) for _, sentence in mistakes])
    return file, {}


def _toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib lets out int()'s ValueError on a number of 5,000 digits
        message = str(error)
        at = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
        line = int(at[1]) if at and at[1] else text.count("\n") + 1 if at else 1
        column = f" at column {at[2]}" if at and at[2] else ""
        said = message[: at.start()] if at else message
        raise _error(
            path, [(line, f"this is not TOML: {said}{column}. Strings are quoted, as in kind = 'conv'.")]
        ) from error


def _error(path: Path, mistakes: Iterable[tuple[int, str]]) -> RuleError:
    """One error for all mistakes (line, sentences) of a file, by line; each takes one line."""
    found = list(dict.fromkeys(sorted(mistakes, key=lambda mistake: mistake[0])))
    told = [f"{path}:{line}: {sentence}" for line, sentence in found[:MAX_MISTAKES]]
    if len(found) > MAX_MISTAKES:
        more = found[MAX_MISTAKES:]
        told.append(f"{path}:{more[0][0]}: from here on there are {len(more)} more mistakes. Mend the others first.")
    return RuleError("\n".join(printable(line) for line in told))


def _hint(name: str) -> str:
    known = shipped()
    close = did_you_mean(name, known)
    if name and Path(f"{name}{SUFFIX}").is_file():
        close = f" Did you mean {name + SUFFIX!r}?"
    return (
        f"{close} Shipped are {', '.join(known) or 'none'}; a file of your own is named by its path, {SUFFIX} included."
    )
