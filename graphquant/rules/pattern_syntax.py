"""The two small languages in rule files: chains of kinds, and patterns as text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from typing import Any

_KIND = r"[A-Za-z_*][\w.]*"
_ALTERNATIVES = re.compile(rf"({_KIND}(?:\|{_KIND})*)(\?)?")
_LINE = re.compile(rf"(\w+)\s*=\s*({_KIND}(?:\|{_KIND})*)\s*\(([^()]*)\)")

ANY_OPERAND = "_"  # an operand of a pattern that matches any input, a different one each time
ANY_OP = "*"  # selects any op of a pattern
MAX_CHAIN_LINKS = 16  # longest chain, in links


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One link of a chain: the kinds that it allows, and True if it may be missing."""

    kinds: frozenset[str]
    optional: bool


@dataclass(frozen=True, slots=True)
class PatternOp:
    """One line of a pattern, `name = kind(operands)`.

    `types`, if not empty, restricts the op to framework types. It is for ops without a kind of their own.
    """

    name: str
    kinds: frozenset[str]
    operands: tuple[str, ...]
    types: frozenset[str] = frozenset()


@lru_cache(maxsize=1024)
def parse_chain(text: str) -> tuple[ChainLink, ...]:
    """Parse `conv > batchnorm? > relu|relu6?` into links, producer first."""
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
    """Compile `text` as an RE2 regular expression, which never backtracks: a search takes time linear in the name."""
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except re2.error as error:
        reason = error.args[0].decode("utf-8", "replace") if error.args else "it is too large"
        raise ValueError(reason) from error


def parse_pattern(lines: Sequence[str]) -> tuple[PatternOp, ...]:
    """Parse a pattern's lines into ops. Names that no line defines are inputs of the pattern."""
    if not lines:
        raise ValueError("a pattern has at least one op")
    ops: dict[str, PatternOp] = {}
    for line in lines:
        op = _parse_pattern_op(line)
        if op.name in ops:
            raise ValueError(f"{op.name!r} is defined twice")
        ops[op.name] = op
    names = list(ops)
    for index, op in enumerate(ops.values()):
        if early := [operand for operand in op.operands if operand in names[index:]]:
            raise ValueError(f"{early[0]!r} is used before the line that defines it")
    connected = {names[-1]}
    for name in reversed(names):
        connected.update(ops[name].operands if name in connected else ())
    if unconnected := [repr(name) for name in names if name not in connected]:
        raise ValueError(f"{', '.join(unconnected)} is not connected to the last op {names[-1]!r}; remove it or use it")
    return tuple(ops.values())


def _parse_pattern_op(line: str) -> PatternOp:
    match = _LINE.fullmatch(line.strip())
    if not match:
        raise ValueError(f"{line!r} does not have the form 'name = kind(operand, ...)'")
    operands = tuple(word.strip() for word in match[3].split(",")) if match[3].strip() else ()
    if invalid := [word for word in operands if not re.fullmatch(r"\w+|-?\d+(\.\d+)?", word)]:
        raise ValueError(f"operand {invalid[0]!r} of {line!r} is not a valid name")
    if match[1] == ANY_OPERAND:
        raise ValueError(f"{ANY_OPERAND!r} in {line!r} stands for any operand; give the op another name")
    return PatternOp(match[1], frozenset(match[2].split("|")), operands)


MAX_PATTERN_VARIANTS = 64
"""Spellings of one pattern. A pattern with more is refused, because each is matched separately."""

SPELLINGS: dict[str, int | None] = {
    "square": 1,
    "rsqrt": 1,
    "squared_difference": 2,
    "divide_by_sqrt": 2,
    "join": 2,
    "product": None,
}
"""Functions that frameworks write in several ways, usable as kinds in a pattern, with their number of operands."""


@lru_cache(maxsize=1024)
def expand_spellings(ops: tuple[PatternOp, ...]) -> tuple[tuple[PatternOp, ...], ...]:
    """Return every spelling of a pattern, without the functions in `SPELLINGS`."""
    choices = [_spellings_of(op) for op in ops]
    if (count := math.prod(map(len, choices))) > MAX_PATTERN_VARIANTS:
        raise ValueError(f"the pattern has {count} spellings; the limit is {MAX_PATTERN_VARIANTS}")
    return tuple(tuple(op for part in parts for op in part) for parts in product(*choices))


def _spellings_of(op: PatternOp) -> list[list[PatternOp]]:  # noqa: PLR0911  # one case for each function
    """Return the spellings of one line. Helper ops have names with an apostrophe, which no rule can refer to."""
    name = next(iter(op.kinds)) if len(op.kinds) == 1 else ""
    if name not in SPELLINGS:
        return [[op]]
    expected, operands, helper = SPELLINGS[name], op.operands, f"{op.name}'"
    if expected is not None and len(operands) != expected:
        raise ValueError(f"{name!r} takes {expected} operands, not {len(operands)}")

    def line(kind: str, *inputs: str, to: str = op.name, types: tuple[str, ...] = ()) -> PatternOp:
        return PatternOp(to, frozenset({kind}), inputs, frozenset(types))

    match name:
        case "square":
            (x,) = operands
            return [[line("mul", x, x)], [line("pow", x, "2")], [line("*", x, types=("Square", "SQUARE"))]]
        case "rsqrt":
            (x,) = operands
            root = line("sqrt", x, to=helper)
            return [[line("rsqrt", x)], [root, line("div", "1", helper)], [line("pow", x, "-0.5")]]
        case "divide_by_sqrt":
            x, y = operands
            root = line("sqrt", y, to=helper)
            inverse = line("div", "1", helper, to=f"{helper}'")
            return [
                [root, line("div", x, helper)],
                [line("rsqrt", y, to=helper), line("mul", x, helper)],
                [root, inverse, line("mul", x, inverse.name)],
            ]
        case "join":
            return [[line("concat", *operands)], [line("concat", *operands[::-1])]]
        case "squared_difference":
            types = ("SquaredDifference", "SQUARED_DIFFERENCE")
            squares = _spellings_of(PatternOp(op.name, frozenset({"square"}), (helper,)))
            difference = line("sub", *operands, to=helper)
            return [[line("*", *operands, types=types)], *([difference, *square] for square in squares)]
        case _:
            return _products(op.name, operands)


def _products(name: str, factors: tuple[str, ...]) -> list[list[PatternOp]]:
    """Return the binary trees of mul ops over `factors`. Operands of each mul match in both orders anyway."""
    if len(factors) < 2:  # noqa: PLR2004  # a mul has two operands
        raise ValueError("'product' takes at least 2 operands")
    trees = []
    first, rest = factors[0], factors[1:]
    # The first factor stays on the left side, so that no tree occurs twice.
    for chosen in (subset for size in range(len(rest)) for subset in combinations(range(len(rest)), size)):
        left = (first, *(rest[index] for index in chosen))
        right = tuple(factor for index, factor in enumerate(rest) if index not in chosen)
        sides: list[list[tuple[list[PatternOp], str]]] = [
            [([], side[0])] if len(side) == 1 else [(tree, mark) for tree in _products(mark, side)]
            for side, mark in ((left, f"{name}'"), (right, f'{name}"'))
        ]
        trees += [[*a, *b, PatternOp(name, frozenset({"mul"}), (x, y))] for (a, x), (b, y) in product(*sides)]
    return trees
