"""The two small languages inside rule files: chains of kinds, and patterns written as text."""

from __future__ import annotations

import re
from dataclasses import dataclass

_KIND = r"[A-Za-z_*][\w.]*"
_ALTERNATIVES = re.compile(rf"({_KIND}(?:\|{_KIND})*)(\?)?")
_LINE = re.compile(rf"(\w+)\s*=\s*({_KIND}(?:\|{_KIND})*)\s*\(([^()]*)\)")


@dataclass(frozen=True, slots=True)
class Link:
    """One step of a chain: the kinds it allows, and whether it may be missing."""

    kinds: frozenset[str]
    optional: bool


@dataclass(frozen=True, slots=True)
class PatternOp:
    """One line of a pattern, `name = kind(operands)`."""

    name: str
    kinds: frozenset[str]
    operands: tuple[str, ...]


def parse_chain(text: str) -> tuple[Link, ...]:
    """`conv > batchnorm? > relu|relu6?` as links, producer first.

    Raises:
        ValueError: The text is no chain, or every link is optional.
    """
    links = []
    for part in text.split(">"):
        found = _ALTERNATIVES.fullmatch(part.strip())
        if not found:
            raise ValueError(f"{part.strip()!r} in {text!r} is no kind; write kinds as 'conv', 'conv|matmul' or 'conv > relu?'")
        links.append(Link(frozenset(found[1].split("|")), found[2] is not None))
    if all(link.optional for link in links):
        raise ValueError(f"every link of {text!r} is optional; at least one must be required")
    return tuple(links)


def parse_pattern(lines: list[str]) -> tuple[PatternOp, ...]:
    """A pattern's lines as ops in order; names that no line defines are its inputs.

    Raises:
        ValueError: A line does not read `name = kind(operand, ...)`, a name is defined twice or used before its line,
            or an op is not connected to the last one.
    """
    ops: list[PatternOp] = []
    defined: dict[str, int] = {}
    for line in lines:
        found = _LINE.fullmatch(line.strip())
        if not found:
            raise ValueError(f"{line!r} does not read 'name = kind(operand, ...)'")
        operands = tuple(word.strip() for word in found[3].split(",")) if found[3].strip() else ()
        if bad := next((word for word in operands if not re.fullmatch(r"\w+", word)), None):
            raise ValueError(f"operand {bad!r} of {line!r} is no name")
        if found[1] in defined:
            raise ValueError(f"{found[1]!r} is defined twice")
        defined[found[1]] = len(ops)
        ops.append(PatternOp(found[1], frozenset(found[2].split("|")), operands))
    for index, op in enumerate(ops):
        for operand in op.operands:
            if defined.get(operand, -1) >= index:
                raise ValueError(f"{operand!r} is used before the line that defines it")
    reached, todo = set(), [ops[-1].name]
    while todo:
        name = todo.pop()
        if name in defined and name not in reached:
            reached.add(name)
            todo.extend(ops[defined[name]].operands)
    if lost := sorted(set(defined) - reached):
        raise ValueError(f"{', '.join(lost)} does not lead to the last op {ops[-1].name!r}")
    return tuple(ops)
