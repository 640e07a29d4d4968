"""From a file's bytes to its data, with the line of each key, or one error for all that is wrong."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Any

from graphquant.documents.locate import MAX_NESTING, KeyPath, Lines, NestingError, locate, nearest
from graphquant.errors import GraphQuantError, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from graphquant.documents.form import Form
    from graphquant.documents.mistakes import Mistake

MAX_BYTES = 1 << 20
"""Largest file; those that ship have a few thousand bytes."""

MAX_MISTAKES = 100
"""How many mistakes of one file are told at once."""


def read(path: Path, form: Form) -> bytes:
    """The bytes of the file at `path`, one more than `MAX_BYTES` of a larger one.

    Raises:
        GraphQuantError: It cannot be read; of the form's kind.
    """
    if path.is_dir():
        raise failure(path, [(1, f"this is a folder. Name a {form.noun} in it.")], form)
    if not path.is_file():
        raise failure(path, [(1, "this is no regular file. Save its text to a file first.")], form)
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise failure(
            path, [(1, f"the file cannot be read ({error.strerror}). Check its permissions.")], form
        ) from error


def parse(path: Path, content: bytes, form: Form) -> tuple[dict[str, Any], Mapping[KeyPath, int]]:
    """The data of a TOML file, and the line of each of its keys.

    Raises:
        GraphQuantError: It is none, or a very strange one; of the form's kind.
    """
    if len(content) > MAX_BYTES:
        noun = form.noun.capitalize()
        raise failure(path, [(1, f"the file has more than {MAX_BYTES} bytes. {noun}s are small; is this one?")], form)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise failure(path, [(line, "the file is not UTF-8. Save it in that encoding.")], form) from error
    if any(line.count(".") > MAX_NESTING for line in text.split("\n")):  # keys of which tomllib might never come back
        _check_nesting(path, text, form)
    data = _toml(path, text, form)
    if _is_deep(data):
        _check_nesting(path, text, form)
    return data, Lines(text)


def _check_nesting(path: Path, text: str, form: Form) -> None:
    try:
        locate(text)
    except NestingError as error:
        raise failure(path, [(error.line, f"this is {error}. No {form.noun} needs half of that.")], form) from error


def _is_deep(data: dict[str, Any]) -> bool:
    """Whether tables and arrays are nested half as deeply as they may be, or more."""
    level: list[Any] = [data]
    for _ in range(MAX_NESTING // 2):
        held = [list(one.values()) if isinstance(one, dict) else one for one in level]
        level = [one for values in held for one in values if isinstance(one, dict | list)]
    return bool(level)


def mistaken(
    path: Path, lines: Mapping[KeyPath, int], mistakes: Iterable[Mistake], form: Form, under: KeyPath = ()
) -> GraphQuantError:
    """The error that tells all `mistakes`, whose keys stand under the table `under` of the file."""
    return failure(path, [(nearest(lines, (*under, *key)), sentence) for key, sentence in mistakes], form)


def failure(path: Path, mistakes: Iterable[tuple[int, str]], form: Form) -> GraphQuantError:
    """One error for all mistakes (line, sentences) of a file, by line; each takes one line."""
    found = list(dict.fromkeys(sorted(mistakes, key=lambda mistake: mistake[0])))
    told = [f"{path}:{line}: {sentence}" for line, sentence in found[:MAX_MISTAKES]]
    if len(found) > MAX_MISTAKES:
        more = found[MAX_MISTAKES:]
        told.append(f"{path}:{more[0][0]}: from here on there are {len(more)} more mistakes. Mend the others first.")
    return form.error("\n".join(printable(line) for line in told))


def _toml(path: Path, text: str, form: Form) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib lets out int()'s ValueError on a number of 5,000 digits
        _check_nesting(path, text, form)
        message = str(error)
        at = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
        line = int(at[1]) if at and at[1] else text.count("\n") + 1 if at else 1
        column = f" at column {at[2]}" if at and at[2] else ""
        said = message[: at.start()] if at else message
        told = f"this is not TOML: {said}{column}. Strings are quoted, as in {form.example}."
        raise failure(path, [(line, told)], form) from error
