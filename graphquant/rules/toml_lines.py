"""Find the line of each key in a TOML text: tomllib returns values without positions."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

KeyPath = tuple[str | int, ...]
"""Keys and array positions from the top of the document, `("rule", 2, "consumer", "kind")`."""

MAX_NESTING = 16  # Deepest nesting of keys, arrays and inline tables. No real file needs half of that.

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
    """A key, array or inline table is nested too deeply; `line` is its line."""

    def __init__(self, line: int) -> None:
        super().__init__(f"nested more than {MAX_NESTING} levels deep")
        self.line = line


def locate_keys(text: str) -> dict[KeyPath, int]:
    """Return the line, counted from 1, of each table, key and array element of a TOML text.

    The text need not be valid. Parts that cannot be parsed are skipped, because tomllib reports them. Raises a
    NestingError if the text is nested more than `MAX_NESTING` levels deep.
    """
    return _KeyScanner(text).scan()


class KeyLines(Mapping[KeyPath, int]):
    """The result of `locate`, computed on first access: it is needed only if there is a mistake."""

    def __init__(self, text: str) -> None:
        self._text = text

    @cached_property
    def _lines(self) -> dict[KeyPath, int]:
        return locate_keys(self._text)

    def __getitem__(self, path: KeyPath) -> int:
        return self._lines[path]

    def __iter__(self) -> Iterator[KeyPath]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


def nearest_line(lines: Mapping[KeyPath, int], path: KeyPath) -> int:
    """Return the line of `path`, or of the innermost enclosing table that has one."""
    return next((lines[path[:depth]] for depth in range(len(path), 0, -1) if path[:depth] in lines), 1)


def _tokenize(text: str) -> Iterator[_Token]:
    """Yield the tokens of `text`. An unterminated string ends the scan, so that the time stays linear."""
    line, position = 1, 0
    while match := _TOKEN.match(text, position):
        kind = match.lastgroup or ""
        if kind != "skip":
            yield _Token(kind, match[0], line)
        line += match[0].count("\n")
        position = match.end()
    yield _Token(*_END, line)


class _KeyScanner:
    """Scans a text once; `_next` is the next unused token."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokenize(text)
        self._next = next(self._tokens)
        self._lines: dict[KeyPath, int] = {}
        self._elements: dict[KeyPath, int] = {}

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while not self._at_end:
            if self._next.kind == "newline":
                self._advance()
            elif self._next.text == "[":
                table = self._header()
            else:
                self._assignment(table, depth=len(table))
                self._skip_line()
        return self._lines

    @property
    def _at_end(self) -> bool:
        return (self._next.kind, self._next.text) == _END

    def _advance(self) -> _Token:
        token = self._next
        self._next = next(self._tokens, token)
        return token

    def _accept(self, mark: str) -> bool:
        if self._next.kind == "mark" and self._next.text == mark:
            self._advance()
            return True
        return False

    def _skip_line(self) -> None:
        while self._next.kind != "newline":
            self._advance()

    def _header(self) -> KeyPath:
        """Parse `[a.b]` or `[[a.b]]`; return the path of the table that it opens."""
        line = self._advance().line
        is_array = self._accept("[")
        keys = self._dotted_key()
        self._skip_line()
        path: KeyPath = ()
        for position, key in enumerate(keys):
            path += (key,)
            if is_array and position == len(keys) - 1:
                self._elements[path] = self._elements.get(path, -1) + 1
            self._lines.setdefault(path, line)
            if path in self._elements:
                path += (self._elements[path],)
                self._lines.setdefault(path, line)
        if not is_array:
            self._lines[path] = line  # the header itself, not the longer one before it that implied the table
        return path

    def _dotted_key(self) -> list[str]:
        """Parse `a."b c".d` into its parts."""
        keys: list[str] = []
        while self._next.kind in {"word", "string"}:
            token = self._advance()
            keys.append(token.text)
            if token.kind == "string":
                with suppress(tomllib.TOMLDecodeError):
                    keys[-1] = str(tomllib.loads(f"key = {token.text}")["key"])
            if len(keys) > MAX_NESTING:
                raise NestingError(token.line)
            if not self._accept("."):
                break
        return keys

    def _assignment(self, table: KeyPath, depth: int) -> None:
        """Parse `key = value` inside `table`. Consume at least one token, so that the scan always advances."""
        line = self._next.line
        keys = self._dotted_key()
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
            while not self._at_end and not self._accept("}"):
                if self._next.kind == "newline" or self._next.text == ",":
                    self._advance()
                else:
                    self._assignment(path, depth)
        else:
            while self._next.kind in {"word", "string"} or self._next.text == ".":
                self._advance()

    def _array(self, path: KeyPath, depth: int) -> None:
        index = 0
        while not self._at_end and not self._accept("]"):
            if self._next.kind == "newline":
                self._advance()
            elif self._next.kind == "mark" and self._next.text not in "[{.":
                index += self._advance().text == ","
            else:
                self._lines[(*path, index)] = self._next.line
                self._value((*path, index), depth + 1)
