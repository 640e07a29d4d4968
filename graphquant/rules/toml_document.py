"""Read a file's bytes into data with the line of each key, or into one error with all mistakes.

tomllib returns values without positions, so the line of each key is found in the text.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from graphquant.errors import GraphQuantError, did_you_mean, escape_unprintable

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


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


LocateKeys = Callable[[], Mapping[KeyPath, int]]
"""Function that returns the lines of the keys of a text, which are needed only if there is a mistake."""


def nearest_line(locate: LocateKeys, path: KeyPath) -> int:
    """Return the line of `path`, or of the innermost enclosing table that has one."""
    lines = locate()
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


MAX_BYTES = 1 << 20  # Largest file. Shipped files have a few thousand bytes.
MAX_MISTAKES = 100  # mistakes of one file that are listed in one error


def read_document(path: Path, kind: DocumentKind) -> bytes:
    """Return the bytes of the file at `path`, at most `MAX_BYTES` + 1 of a larger one.

    Raises:
        GraphQuantError: The file cannot be read. The exception class is that of the kind.
    """
    if path.is_dir():
        raise document_error(path, kind, f"this is a folder. Name a {kind.noun} in it.")
    if not path.is_file():
        raise document_error(path, kind, "this is not a regular file. Save its text to a file first.")
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        sentence = f"the file cannot be read ({error.strerror}). Check its permissions."
        raise document_error(path, kind, sentence) from error


def parse_document(path: Path, content: bytes, kind: DocumentKind) -> tuple[dict[str, Any], LocateKeys]:
    """Return the data of a TOML file, and a function that returns the line of each of its keys.

    Raises:
        GraphQuantError: The text is not TOML, or is nested too deeply. The exception class is that of the kind.
    """
    if len(content) > MAX_BYTES:
        raise document_error(path, kind, f"the file has more than {MAX_BYTES} bytes, too many for a {kind.noun}.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise document_error(path, kind, "the file is not UTF-8. Save it in that encoding.", line) from error
    try:
        # tomllib might never come back from keys with so many parts, so their depth is checked before.
        if any(line.count(".") > MAX_NESTING for line in text.split("\n")):
            locate_keys(text)
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # tomllib raises int()'s ValueError on a number of 5,000 digits
            locate_keys(text)
            raise _syntax_error(path, text, kind, str(error)) from error
        if _is_deep(data):
            locate_keys(text)
    except NestingError as error:
        sentence = f"this is {error}. No {kind.noun} needs half of that."
        raise document_error(path, kind, sentence, error.line) from error
    return data, cache(partial(locate_keys, text))


def _syntax_error(path: Path, text: str, kind: DocumentKind, message: str) -> GraphQuantError:
    position = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
    line = int(position[1]) if position and position[1] else text.count("\n") + 1 if position else 1
    column = f" at column {position[2]}" if position and position[2] else ""
    reason = message[: position.start()] if position else message
    sentence = f"this is not valid TOML: {reason}{column}. Strings need quotes, as in {kind.example}."
    return document_error(path, kind, sentence, line)


def _is_deep(data: dict[str, Any]) -> bool:
    """Return True if tables and arrays are nested to half of the limit or more."""
    level: list[Any] = [data]
    for _ in range(MAX_NESTING // 2):
        children = [list(node.values()) if isinstance(node, dict) else node for node in level]
        level = [node for values in children for node in values if isinstance(node, dict | list)]
    return bool(level)


def mistakes_error(
    path: Path, locate: LocateKeys, mistakes: Iterable[Mistake], kind: DocumentKind, table_path: KeyPath = ()
) -> GraphQuantError:
    """Return one error for all mistakes of a file, sorted by line, one line each.

    The key paths of the mistakes are relative to the table at `table_path`.
    """
    located = [(nearest_line(locate, (*table_path, *key)), sentence) for key, sentence in mistakes]
    unique = list(dict.fromkeys(sorted(located, key=lambda mistake: mistake[0])))
    if remaining := unique[MAX_MISTAKES:]:
        rest = f"and {len(remaining)} more mistakes from here on. Correct the others first."
        unique[MAX_MISTAKES:] = [(remaining[0][0], rest)]
    return kind.error_class("\n".join(escape_unprintable(f"{path}:{line}: {sentence}") for line, sentence in unique))


def document_error(path: Path, kind: DocumentKind, sentence: str, line: int = 1) -> GraphQuantError:
    """Return the error for one mistake of a file."""
    return kind.error_class(escape_unprintable(f"{path}:{line}: {sentence}"))


# Kinds of TOML files: their dataclasses, the docstrings as descriptions, and the nouns for messages.


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentKind:
    """A kind of file."""

    noun: str  # its noun without the article: "rule file"
    example: str  # an example line with a quoted string
    error_class: type[GraphQuantError]  # the exception for its mistakes
    tables: Mapping[str, type]  # the dataclass of each table, by its dotted path; "" is the file itself
    table_labels: Mapping[str, str]  # the noun phrase for each of these tables: "a scheme"
    # For some tables a sentence about their header, for users who wrote something else.
    headings: Mapping[str, str] = field(default_factory=dict)
    named_tables: frozenset[str] = frozenset()  # tables that occur several times, each with a name
    hidden_fields: Mapping[type, str] = field(default_factory=dict)  # fields that are no keys, by dataclass

    def table_key(self, path: KeyPath) -> str:
        """Return the key in `tables` that `path` leads to."""
        keys = [step for step in path if isinstance(step, str)]
        if keys and keys[0] in self.named_tables:
            del keys[1:2]
        return ".".join(keys)

    def keys(self, table: type) -> list[str]:
        """Return the keys of a table in the order of its fields."""
        return table_keys(table, self.hidden_fields.get(table, ""))


def table_keys(table: type, hidden: str = "") -> list[str]:
    """Return the keys of a table in the order of its fields, without `hidden`."""
    return [table_field.name for table_field in fields(table) if table_field.name != hidden]


def field_descriptions(table: type) -> dict[str, str]:
    """Return each field's description from the "Attributes:" sections of the class and its bases."""
    descriptions: dict[str, str] = {}
    for base in reversed(table.__mro__):
        _, _, section = inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")
        entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
        descriptions |= {name: " ".join(text.split()) for name, text in entries}
    return descriptions


def describe_table_schema(node: dict[str, Any], table: type, hidden: str = "") -> None:
    """Add docstring texts to a table of a JSON Schema; remove pydantic's titles and null alternatives."""
    node["description"] = inspect.cleandoc(table.__doc__ or "").partition("\n")[0]
    node["properties"] = {name: node["properties"][name] for name in table_keys(table, hidden)}
    for name, entry in node["properties"].items():
        entry.pop("title", None)
        entry.setdefault("description", field_descriptions(table).get(name, ""))
        choices = [choice for choice in entry.pop("anyOf", []) if choice != {"type": "null"}]
        if len(choices) > 1:
            entry["anyOf"] = choices
        elif choices:
            entry.update(choices[0])
        if entry.get("default", "") is None:  # a field that may be None: TOML leaves it out instead
            del entry["default"]


# Mistakes in the data of a file as sentences: pydantic's errors in plain words.

Mistake = tuple["KeyPath", str]
"""The path of a key, and the mistake there."""

T = TypeVar("T")

MAX_VALUE_LENGTH, _MAX_WORDS_LENGTH = 60, 500
_TOO_LARGE = 1 << 64
_TYPES = {
    "string_type": "a string",
    "string_unicode": "UTF-8",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "a table",
    "dataclass_type": "a table",
    **dict.fromkeys(("list_type", "tuple_type"), "an array"),
}
_SENTENCES = {
    "literal_error": "is {shown}; it must be {expected}.",
    "greater_than_equal": "is {shown}; it must be at least {ge}.",
    "greater_than": "is {shown}; it must be above {gt}.",
    "less_than_equal": "is {shown}; it must be at most {le}.",
    "string_too_short": "is empty. Remove it or fill it.",
    "too_short": "is empty. Remove it or fill it.",
    "string_too_long": "has more than {max_length} characters. Make it shorter.",
    "too_long": "has more than {max_length} entries. Make it shorter.",
    "string_pattern_mismatch": "is {shown}; it must be letters, digits, '_', '-' and '.'.",
}
"""Sentence parts after the key's name for pydantic's error types, with placeholders for their context."""


def validate_document(data: dict[str, Any], table: type[T], kind: DocumentKind) -> tuple[T | None, list[Mistake]]:
    """Return `data` as the dataclass of the file, None if there are mistakes; and the mistakes with their key paths."""
    try:
        return TypeAdapter(table).validate_python(data), []
    except ValidationError as error:
        return None, [
            (details["loc"], _mistake_sentence(kind, details))
            for details in error.errors(include_url=False)
            if not (details["type"] == "too_short" and details["input"])  # each of its entries is reported
        ]


def _mistake_sentence(kind: DocumentKind, details: ErrorDetails) -> str:
    """Return a sentence about the value that pydantic rejects, and one about the expected value."""
    path, value, context = details["loc"], details["input"], details.get("ctx", {})
    table = kind.table_key(path[:-1])
    match error_type := details["type"]:
        case "unexpected_keyword_argument":
            table_keys = kind.keys(kind.tables[table])
            close = did_you_mean(str(path[-1])[:MAX_VALUE_LENGTH], table_keys)
            hint = close or words_sentence("Its keys are", table_keys)
            return f"{_describe_key(path)} is not a key of {kind.table_labels[table]}.{hint}"
        case "missing":
            meaning = field_descriptions(kind.tables[table]).get(str(path[-1]), "")
            hint = f" Its meaning: {meaning}" if meaning else ""
            return f"{kind.table_labels[table]} lacks the key {_describe_key(path)}.{hint}"
        case "value_error":
            text = str(context["error"])
            return text if text.endswith((".", "?")) else f"{text}."
        case _ if error_type in _SENTENCES:
            sentence = _SENTENCES[error_type].format(shown=format_value(value), **context)
            words = re.findall(r"'([^']*)'", context.get("expected", ""))
            close = did_you_mean(value[:MAX_VALUE_LENGTH], words) if isinstance(value, str) else ""
            return f"{_describe_key(path)} {sentence}{close}"
        case _:
            at_header = len(path) <= 2  # noqa: PLR2004  # the table itself, or one of several
            heading = kind.headings.get(str(path[0]), "") if path and at_header else ""
            expected = _TYPES.get(error_type, "of another type")
            return f"{_describe_key(path)} is {format_value(value)}; it must be {expected}.{heading}"


def _describe_key(path: KeyPath) -> str:
    words = [step for step in path if isinstance(step, str)]
    key = format_value(words[-1]) if words else "the file"
    return f"entry {path[-1] + 1} of {key}" if path and isinstance(path[-1], int) else key


def format_value(value: object) -> str:
    """Format a value for a sentence: short, and on one line."""
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_VALUE_LENGTH else f"{value[:MAX_VALUE_LENGTH]}...")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value) if abs(value) < _TOO_LARGE or isinstance(value, float) else "a very large number"
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "an array"
    return "a date or time"


def words_sentence(sentence: str, words: Iterable[str]) -> str:
    """Return a sentence that ends with as many of `words` as fit, with a leading space."""
    return f" {sentence} {', '.join(words)[:_MAX_WORDS_LENGTH]}."
