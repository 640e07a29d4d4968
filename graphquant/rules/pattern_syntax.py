"""The two small languages in rule files: chains of kinds, and patterns as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

_KIND = r"[A-Za-z_*][\w.]*"
_ALTERNATIVES = re.compile(rf"({_KIND}(?:\|{_KIND})*)(\?)?")
_LINE = re.compile(rf"(\w+)\s*=\s*({_KIND}(?:\|{_KIND})*)(\?)?\s*\(([^()]*)\)")

ANY_OPERAND = "_"  # an operand of a pattern that matches any input, a different one each time
ANY_OP = "*"  # selects any op of a pattern
MAX_CHAIN_LINKS = 16  # longest chain, in links
MAX_FACTORS = 5  # most operands of a product in a pattern, as each doubles its spellings


class ChainLink(NamedTuple):
    """One link of a chain: the kinds that it allows, and True if it may be missing."""

    kinds: frozenset[str]
    optional: bool


class PatternOp(NamedTuple):
    """One line of a pattern, `name = kind|Type(operands)`: the op has one of the kinds or one of the framework types.

    If an `optional` op is missing, its first operand takes its place.
    """

    name: str
    kinds: frozenset[str]
    operands: tuple[str, ...]
    types: frozenset[str] = frozenset()
    optional: bool = False

    @property
    def is_alias(self) -> bool:
        """True for an op without kinds and types, in whose place its operand is matched."""
        return not self.kinds and not self.types


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
    if ops[names[-1]].optional:
        raise ValueError(f"the last op {names[-1]!r} is optional; remove its '?'")
    connected = {names[-1]}
    for name in reversed(names):
        connected.update(ops[name].operands if name in connected else ())
    if unconnected := [repr(name) for name in names if name not in connected]:
        raise ValueError(f"{', '.join(unconnected)} is not connected to the last op {names[-1]!r}; remove it or use it")
    return tuple(ops.values())


@lru_cache(maxsize=1024)
def _parse_pattern_op(line: str) -> PatternOp:
    match = _LINE.fullmatch(line.strip())
    if not match:
        raise ValueError(f"{line!r} does not have the form 'name = kind(operand, ...)'")
    operands = tuple(word.strip() for word in match[4].split(",")) if match[4].strip() else ()
    if invalid := [word for word in operands if not re.fullmatch(r"\w+|-?\d+(\.\d+)?", word)]:
        raise ValueError(f"operand {invalid[0]!r} of {line!r} is not a valid name")
    if match[1] == ANY_OPERAND:
        raise ValueError(f"{ANY_OPERAND!r} in {line!r} stands for any operand; give the op another name")
    if match[3] and not operands:
        raise ValueError(f"{match[1]!r} is optional, but has no operand that could take its place")
    words = frozenset(match[2].split("|"))
    types = frozenset(word for word in words if word[0].isupper())
    return PatternOp(match[1], words - types, operands, types, match[3] is not None)


FUNCTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("square", "cube", "root", "reciprocal", "rsqrt", "softplus", "projection"), ("a",)),
    **dict.fromkeys(("gate", "hard_gate", "gated"), ("a",)),
    **dict.fromkeys(("squared_difference", "divide_by_sqrt", "join"), ("a", "b")),
    "product": (),
}
"""Functions that frameworks write in several ways, usable as kinds in a pattern, with their operands.

A product has any number of them.
"""

SPELLINGS: dict[str, tuple[str, ...]] = {
    "square": ("y = mul(a, a)", "y = pow(a, 2)", "y = Square|SQUARE(a)"),
    "cube": ("y = pow(a, 3)", "s = square(a); y = mul(s, a)"),
    "squared_difference": ("y = SquaredDifference|SQUARED_DIFFERENCE(a, b)", "d = sub(a, b); y = square(d)"),
    "root": ("y = sqrt(a)", "y = pow(a, 0.5)"),
    "reciprocal": ("y = div(1, a)", "y = Reciprocal|Inv(a)", "y = pow(a, -1)"),
    "rsqrt": ("y = Rsqrt|RSQRT(a)", "y = pow(a, -0.5)", "r = root(a); y = reciprocal(r)"),
    "divide_by_sqrt": ("r = root(b); y = div(a, r)", "r = rsqrt(b); y = mul(a, r)"),
    "softplus": ("y = Softplus(a)", "e = exp(a); s = add(e, 1); y = log(s)", "e = exp(a); y = Log1p(e)"),
    "projection": ("y = matmul|gemm|conv(a)", "y = matmul(_, a)"),
    "join": ("y = concat(a, b)", "y = concat(b, a)"),
    "hard_gate": (
        "y = hard_sigmoid(a)",
        "b = add(a, 3); r = relu6|clip(b); y = mul|div(r, _)",
        "b = add(a, 3); m = max|min(b, _); r = max|min(m, _); y = mul|div(r, _)",
        "m = mul|div(a, _); b = add(m, 0.5); y = clip(b)",
        "m = mul|div(a, _); b = add(m, 0.5); l = max|min(b, _); y = max|min(l, _)",
    ),
    "gate": ("y = sigmoid|hard_gate(a)", "p = softplus(a); y = tanh(p)"),
    "gated": (
        "y = hard_swish|gelu|silu|Mish(a)",
        "g = gate(a); y = mul(a, g)",
        "k = mul(a, _); g = gate(k); y = mul(a, g)",
        "b = add(a, 3); r = relu6|clip(b); p = mul(a, r); y = mul|div(p, _)",
        "b = add(a, 3); m = max|min(b, _); r = max|min(m, _); p = mul(a, r); y = mul|div(p, _)",
        "p = mul|div(a, _); b = add(a, 3); r = relu6|clip(b); y = mul(p, r)",
        "d = div|mul(a, _); e = erf(d); f = add(e, _); y = product(a, f, _)",
    ),
}
"""The spellings of each function, as lines of which the last one is the result."""


@lru_cache(maxsize=1024)
def pattern_definitions(ops: tuple[PatternOp, ...]) -> dict[str, tuple[PatternOp, ...]]:
    """Return the ops that each name of a pattern may stand for, without functions.

    The last alternative of an optional op is an alias of the operand that takes its place. Helper ops have names with
    an apostrophe, which no rule can refer to.
    """
    definitions: dict[str, tuple[PatternOp, ...]] = {}
    pending = list(ops)
    for op in pending:
        plain = op.kinds - FUNCTIONS.keys()
        alternatives = [op._replace(kinds=plain, optional=False)] if plain or op.types else []
        functions = sorted(op.kinds & FUNCTIONS.keys())
        spellings = [(name, spelling) for name in functions for spelling in _spellings_of(name, op.operands)]
        for number, (function, (*helpers, result)) in enumerate(spellings):
            names = {
                # `_` is any input, but the same one wherever the spelling repeats the operand.
                parameter: f"{op.name}'{number}{parameter}" if operand == ANY_OPERAND else operand
                for parameter, operand in zip(FUNCTIONS[function], op.operands, strict=False)
            }
            names.update((helper.name, f"{op.name}'{number}{helper.name}") for helper in helpers)
            if not FUNCTIONS.keys().isdisjoint(result.kinds):
                names[result.name] = f"{op.name}'{number}"
                helpers.append(result)
                result = PatternOp(op.name, frozenset(), (result.name,))  # noqa: PLW2901  # it stands for the helper
            for part in (*helpers, result):
                operands = tuple(names.get(operand, operand) for operand in part.operands)
                renamed = part._replace(name=names.get(part.name, op.name), operands=operands)
                (alternatives if part is result else pending).append(renamed)
        if op.optional:
            alternatives.append(PatternOp(op.name, frozenset(), op.operands[:1]))
        definitions[op.name] = tuple(alternatives)
    return definitions


def _spellings_of(function: str, operands: tuple[str, ...]) -> list[list[PatternOp]]:
    """Return the spellings of a function, each as ops of which the last one is the result."""
    if function == "product":
        return _products(operands)
    if len(operands) != len(FUNCTIONS[function]):
        raise ValueError(f"{function!r} takes {len(FUNCTIONS[function])} operands, not {len(operands)}")
    return [[_parse_pattern_op(line) for line in spelling.split(";")] for spelling in SPELLINGS[function]]


def _products(factors: tuple[str, ...]) -> list[list[PatternOp]]:
    """Return the products of two parts of `factors`. Operands of each mul match in both orders anyway."""
    if not 2 <= len(factors) <= MAX_FACTORS:  # noqa: PLR2004  # a mul has two operands
        raise ValueError(f"'product' takes 2 to {MAX_FACTORS} operands")
    spellings = []
    first, rest = factors[0], range(1, len(factors))
    # The first factor stays in the left part, so that no product occurs twice.
    for chosen in (subset for size in range(len(rest)) for subset in combinations(rest, size)):
        left = (first, *(factors[index] for index in chosen))
        right = tuple(factors[index] for index in rest if index not in chosen)
        sides = {"'l": left, "'r": right}
        parts = [PatternOp(name, frozenset({"product"}), side) for name, side in sides.items() if len(side) > 1]
        operands = tuple(side[0] if len(side) == 1 else name for name, side in sides.items())
        spellings.append([*parts, PatternOp("'y", frozenset({"mul"}), operands)])
    return spellings
