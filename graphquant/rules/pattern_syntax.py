"""The two small languages in rule files: chains of kinds, and patterns as text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


_KIND = r"[A-Za-z_*][\w.]*"
_ALTERNATIVES = re.compile(rf"({_KIND}(?:\|{_KIND})*)(\?)?")
_LINE = re.compile(rf"(\w+)\s*=\s*({_KIND}(?:\|{_KIND})*)\s*\(([^()]*)\)")

ANY_OPERAND = "_"
"""An operand of a pattern that matches any input, a different one each time."""

ANY_OP = "*"
"""Selects any op of a pattern."""

MAX_CHAIN_LINKS = 16
"""Longest chain, in links."""


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One link of a chain: the kinds that it allows, and True if it may be missing."""

    kinds: frozenset[str]
    optional: bool


@dataclass(frozen=True, slots=True)
class PatternOp:
    """One line of a pattern, `name = kind(operands)`."""

    name: str
    kinds: frozenset[str]
    operands: tuple[str, ...]


@lru_cache(maxsize=1024)
def parse_chain(text: str) -> tuple[ChainLink, ...]:
    """Parse `conv > batchnorm? > relu|relu6?` into links, producer first.

    Raises:
        ValueError: The text is no chain, or every link is optional.
    """
    link_texts = text.split(">")
    if len(link_texts) > MAX_CHAIN_LINKS:
        raise ValueError(f"a chain of {len(link_texts)} links is too long; the limit is {MAX_CHAIN_LINKS}")
    links = []
    for link_text in link_texts:
        match = _ALTERNATIVES.fullmatch(link_text.strip())
        if not match:
            quoted = f"{link_text.strip()!r} in {text!r}" if len(link_texts) > 1 else repr(text)
            raise ValueError(f"{quoted} is no kind; write 'conv', 'conv|matmul' or 'conv > relu?'")
        links.append(ChainLink(frozenset(match[1].split("|")), match[2] is not None))
    if all(link.optional for link in links):
        raise ValueError(f"every link of {text!r} is optional; at least one must be required")
    return tuple(links)


@lru_cache(maxsize=1024)
def compile_regex(text: str) -> Any:
    """Compile `text` as an RE2 regular expression, which never backtracks: a search takes time linear in the name.

    Raises:
        ValueError: RE2 does not support `text`; it has no look-around and no backreferences.
    """
    import re2

    options = re2.BatchOptions()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except re2.error as error:
        reason = error.args[0].decode("utf-8", "replace") if error.args else "it is too large"
        raise ValueError(reason) from error


def parse_pattern(lines: Sequence[str]) -> tuple[PatternOp, ...]:
    """Parse a pattern's lines into ops. Names that no line defines are inputs of the pattern.

    Raises:
        ValueError: There is no line, a line does not read `name = kind(operand, ...)`, a name is defined twice or used
            before its line, or an op is not connected to the last one.
    """
    if not lines:
        raise ValueError("a pattern has at least one op")
    ops: list[PatternOp] = []
    defined: set[str] = set()
    for line in lines:
        op = _parse_pattern_op(line)
        if op.name in defined:
            raise ValueError(f"{op.name!r} is defined twice")
        defined.add(op.name)
        ops.append(op)
    _check_order(ops)
    _check_connected(ops)
    return tuple(ops)


def _parse_pattern_op(line: str) -> PatternOp:
    match = _LINE.fullmatch(line.strip())
    if not match:
        raise ValueError(f"{line!r} does not have the form 'name = kind(operand, ...)'")
    operands = tuple(word.strip() for word in match[3].split(",")) if match[3].strip() else ()
    if invalid := [word for word in operands if not re.fullmatch(r"\w+", word)]:
        raise ValueError(f"operand {invalid[0]!r} of {line!r} is not a valid name")
    if match[1] == ANY_OPERAND:
        raise ValueError(f"{ANY_OPERAND!r} in {line!r} stands for any operand; give the op another name")
    return PatternOp(match[1], frozenset(match[2].split("|")), operands)


def _check_order(ops: list[PatternOp]) -> None:
    position = {op.name: index for index, op in enumerate(ops)}
    for index, op in enumerate(ops):
        for operand in op.operands:
            if position.get(operand, -1) >= index:
                raise ValueError(f"{operand!r} is used before the line that defines it")


def _check_connected(ops: list[PatternOp]) -> None:
    operands = {op.name: op.operands for op in ops}
    connected: set[str] = set()
    pending = [ops[-1].name]
    while pending:
        name = pending.pop()
        if name in operands and name not in connected:
            connected.add(name)
            pending.extend(operands[name])
    if unconnected := [repr(op.name) for op in ops if op.name not in connected]:
        raise ValueError(
            f"{', '.join(unconnected)} is not connected to the last op {ops[-1].name!r}; remove it or use it"
        )
