"""From rule files to rules: where the files are, and all their mistakes at once."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import graphquant
from graphquant import documents
from graphquant.errors import RuleError, UsageError, did_you_mean
from graphquant.ruleset.inline import SIGN, read_inline
from graphquant.ruleset.mistakes import parse
from graphquant.ruleset.schema import FORM
from graphquant.ruleset.types import NOT, BoundRule, RuleFile, RuleSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from graphquant.documents import KeyPath

SUFFIX = ".toml"


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


def moved_rules(names: Iterable[str], folder: str) -> tuple[str, ...]:
    """`names`, of which paths are named from `folder`, with paths as they are named from the current folder."""
    return tuple(
        str(Path(folder, name)) if name.endswith(SUFFIX) and SIGN not in name and "\n" not in name else name
        for name in names
    )


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
    correct: dict[str, bool] = {}
    rules: list[BoundRule] = []
    descriptions: list[str] = []
    digest = hashlib.sha256()
    for place, (name, path) in enumerate(zip(names, paths, strict=True)):
        label = f"rules[{place}]" if "\n" in name else name
        try:
            content = name.encode(errors="replace") if path is None else documents.read(path, FORM)
            file, lines = _one_line(name) if path is None and label == name else _parse(path or Path(label), content)
        except RuleError as error:
            failures[str(error)] = None
            continue
        digest.update(hashlib.sha256(content).digest())
        for chosen, steps in ((prepare, file.prepare), (correct, file.correct)):
            for step in steps:
                chosen.setdefault(step.removeprefix(NOT), not step.startswith(NOT))
        descriptions.append(file.description)
        rules.extend(_bind(label, file, lines))
    if failures:
        raise RuleError("\n".join(failures))
    return RuleSet(
        files=tuple(names),
        descriptions=tuple(descriptions),
        digest=digest.hexdigest(),
        prepare=tuple(name for name, wanted in prepare.items() if wanted),
        correct=tuple(name for name, wanted in correct.items() if wanted),
        rules=tuple(rules),
    )


def _bind(name: str, file: RuleFile, lines: Mapping[KeyPath, int]) -> list[BoundRule]:
    schemes = {key: replace(scheme, name=key) for key, scheme in file.scheme.items()}
    return [
        BoundRule(
            rule=rule,
            file=name,
            place=partial(documents.nearest, lines, ("rule", index)),
            scheme=schemes.get(rule.quantize),
            patterns=file.pattern,
        )
        for index, rule in enumerate(file.rule)
    ]


def _parse(path: Path, content: bytes) -> tuple[RuleFile, Mapping[KeyPath, int]]:
    """The file's data and the lines of its keys; a RuleError with all its mistakes."""
    data, lines = documents.parse(path, content, FORM)
    file, mistakes = parse(data)
    if file is None:
        raise documents.mistaken(path, lines, mistakes, FORM)
    return file, lines


def _one_line(text: str) -> tuple[RuleFile, Mapping[KeyPath, int]]:
    """The data of a rule that was given as text; a RuleError with all its mistakes."""
    try:
        file, mistakes = parse(read_inline(text))
    except ValueError as error:
        raise documents.failure(Path(text), [(1, str(error))], FORM) from error
    if file is None:
        raise documents.mistaken(Path(text), {}, mistakes, FORM)
    return file, {}


def _hint(name: str) -> str:
    known = shipped()
    close = did_you_mean(name, known)
    if name and Path(f"{name}{SUFFIX}").is_file():
        close = f" Did you mean {name + SUFFIX!r}?"
    return (
        f"{close} Shipped are {', '.join(known) or 'none'}; a file of your own is named by its path, {SUFFIX} included."
    )
