"""Which line of a TOML text holds which key: tomllib tells values apart, not where they stand."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

KeyPath = tuple[str | int, ...]
"""Keys and array positions from the document down, `("rule", 2, "consumer", "kind")`."""

MAX_NESTING = 16
"""Deepest nesting of keys, arrays and inline tables; no file needs half of that."""

_TOKEN = re.compile(
    r"""
      (?P<skip>[ \t\r]+|\#[^\n]*)
    | (?P<newline>\n)
    | (?P<string>
          \"\"\"(?:\\.|[^\\])*?\"\"\"\"{0,2} | '''.*?''''{0,2}
        | "(?!"")(?:\\[^\n]|[^"\\\n])*" | '(?!'')[^'\n]*'
      )
    | (?P<mark>[\[\]{}=,.])
    | (?P<word>[^\s\[\]{}=,."'\#]+)
    """,
    re.VERBOSE | re.DOTALL,
)
_END = ("newline", "")


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


class NestingError(ValueError):
    """A key, array or inline table is nested too deeply; `line` says where."""

    def __init__(self, line: int) -> None:
        super().__init__(f"nested more than {MAX_NESTING} levels deep")
        self.line = line


def locate(text: str) -> dict[KeyPath, int]:
    """The line, counted from 1, of each table, key and array element of a TOML text.

    The text need not be valid: what cannot be understood is passed over, as tomllib reports it.

    Raises:
        NestingError: The text is nested more than `MAX_NESTING` levels deep.
    """
    return _Scanner(text).scan()


class Lines(Mapping[KeyPath, int]):
    """The same, found when the first line is asked for: where nothing is wrong, nobody does."""

    def __init__(self, text: str) -> None:
        self._text = text

    @cached_property
    def _found(self) -> dict[KeyPath, int]:
        return locate(self._text)

    def __getitem__(self, path: KeyPath) -> int:
        return self._found[path]

    def __iter__(self) -> Iterator[KeyPath]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def nearest(lines: Mapping[KeyPath, int], path: KeyPath) -> int:
    """The line of `path`, or of the innermost table around it that has one."""
    for size in range(len(path), 0, -1):
        if path[:size] in lines:
            return lines[path[:size]]
    return 1


def _tokens(text: str) -> Iterator[_Token]:
    """The tokens of `text`; a string without an end stops it, so that the time stays linear."""
    line, position = 1, 0
    while found := _TOKEN.match(text, position):
        kind = found.lastgroup or ""
        if kind != "skip":
            yield _Token(kind, found[0], line)
        line += found[0].count("\n")
        position = found.end()
    yield _Token(*_END, line)


class _Scanner:
    """One pass over a text; `_next` is the token not yet used."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._next = next(self._tokens)
        self._lines: dict[KeyPath, int] = {}
        self._elements: dict[KeyPath, int] = {}

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while not self._done:
            if self._next.kind == "newline":
                self._advance()
            elif self._next.text == "[":
                table = self._header()
            else:
                self._assignment(table, depth=len(table))
                self._skip_line()
        return self._lines

    @property
    def _done(self) -> bool:
        return (self._next.kind, self._next.text) == _END

    def _advance(self) -> _Token:
        used = self._next
        self._next = next(self._tokens, used)
        return used

    def _accept(self, mark: str) -> bool:
        if self._next.kind == "mark" and self._next.text == mark:
            self._advance()
            return True
        return False

    def _skip_line(self) -> None:
        while self._next.kind != "newline":
            self._advance()

    def _header(self) -> KeyPath:
        """`[a.b]` or `[[a.b]]`, to the path of the table that it opens."""
        line = self._advance().line
        array = self._accept("[")
        keys = self._key()
        self._skip_line()
        path: KeyPath = ()
        for position, key in enumerate(keys):
            path += (key,)
            if array and position == len(keys) - 1:
                self._elements[path] = self._elements.get(path, -1) + 1
            self._lines.setdefault(path, line)
            if path in self._elements:
                path += (self._elements[path],)
                self._lines.setdefault(path, line)
        if not array:
            self._lines[path] = line  # the header itself, not the longer one before it that implied the table
        return path

    def _key(self) -> list[str]:
        """`a."b c".d` as its parts."""
        parts: list[str] = []
        while self._next.kind in {"word", "string"}:
            token = self._advance()
            parts.append(_plain(token.text) if token.kind == "string" else token.text)
            if len(parts) > MAX_NESTING:
                raise NestingError(token.line)
            if not self._accept("."):
                break
        return parts

    def _assignment(self, table: KeyPath, depth: int) -> None:
        """`key = value` inside `table`; always uses at least one token."""
        line = self._next.line
        keys = self._key()
        if not keys:
            self._advance()
            return
        path = table
        for key in keys:
            path += (key,)
            self._lines.setdefault(path, line)
        if self._accept("="):
            self._value(path, depth + len(keys))

    def _value(self, path: KeyPath, depth: int) -> None:
        if depth > 2 * MAX_NESTING:
            raise NestingError(self._next.line)
        if self._accept("["):
            self._array(path, depth)
        elif self._accept("{"):
            while not self._done and not self._accept("}"):
                if self._next.kind == "newline" or self._next.text == ",":
                    self._advance()
                else:
                    self._assignment(path, depth)
        else:
            while self._next.kind in {"word", "string"} or self._next.text == ".":
                self._advance()

    def _array(self, path: KeyPath, depth: int) -> None:
        index = 0
        while not self._done and not self._accept("]"):
            if self._next.kind == "newline":
                self._advance()
            elif self._next.kind == "mark" and self._next.text not in "[{.":
                index += self._advance().text == ","
            else:
                self._lines[(*path, index)] = self._next.line
                self._value((*path, index), depth + 1)


def _plain(quoted: str) -> str:
    """What a quoted key says."""
    try:
        return str(tomllib.loads(f"key = {quoted}")["key"])
    except tomllib.TOMLDecodeError:
        return quoted
