"""Patterns, small graphs written as text, against the ops above each op."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from graphquant.errors import UsageError
from graphquant.ruleset import ANY_PART, PatternOp, parse_pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.ir import TensorRef
    from graphquant.match.around import Around

COMMUTATIVE = frozenset({"add", "mul", "max", "min"})
"""Kinds whose operands a pattern tries in both orders."""

MAX_STEPS = 2000
"""How many operands may be tried for one match of a pattern: commuted operands of a hostile model never end."""

parts_of = lru_cache(maxsize=1024)(parse_pattern)


def find_pattern(around: Around, name: str, parts: tuple[PatternOp, ...]) -> dict[str, set[tuple[str, str]]]:
    """For each part the ops that play it; the first match found at each op counts."""
    found: dict[str, set[tuple[str, str]]] = {part.name: set() for part in parts}
    search = _Search(around, name, parts)
    kinds = parts[-1].kinds
    any_kind = not kinds.isdisjoint(("*", "parameter"))
    for tensor, kind in around.results:
        bound = search.bind(tensor) or {} if any_kind or kind in kinds else {}
        for part in parts if bound else ():
            found[part.name].add((tensor.graph, bound[part.name].op))
    found[ANY_PART] = set().union(*found.values())
    return found


class _Search:
    """Reads the pattern `parts` into the ops above one op."""

    def __init__(self, around: Around, name: str, parts: tuple[PatternOp, ...]) -> None:
        self._around = around
        self._name = name
        self._root = parts[-1]
        self._parts = {part.name: part for part in parts}
        self._fitting: dict[tuple[str, TensorRef], bool] = {}

    def bind(self, root: TensorRef) -> dict[str, TensorRef] | None:
        """What each name of the pattern stands for if its last op is that of `root`; None if it does not match.

        Only what could fit by itself is tried, so that operands are tried again only where a name occurs twice.

        Raises:
            UsageError: There are more ways to try than `MAX_STEPS`.
        """
        stack: list[tuple[tuple[tuple[str, TensorRef], ...], dict[str, TensorRef]]] = [(((self._root.name, root),), {})]
        steps = 0
        while stack:
            goals, bound = stack.pop()
            steps += 1
            if not goals:
                return bound
            if steps > MAX_STEPS:
                raise UsageError(
                    f"The pattern {self._name!r} can be read into the ops above {root} in too many ways. Give its"
                    " operands distinct kinds, or leave out names that occur twice."
                )
            (name, tensor), rest = goals[0], goals[1:]
            if name == "_" or bound.get(name) == tensor:
                stack.append((rest, bound))
            elif name not in bound and (name not in self._parts or self._fits(name, tensor)):
                orders = self._orders(name, tensor) if name in self._parts else [()]
                stack.extend(((*order, *rest), {**bound, name: tensor}) for order in reversed(orders))
        return None

    def _fits(self, name: str, tensor: TensorRef) -> bool:
        """Whether the part could be the op of `tensor`, were all names in it distinct."""
        key = (name, tensor)
        if key not in self._fitting:
            self._fitting[key] = self._around.is_kind(self._parts[name].kinds, tensor) and any(
                all(operand not in self._parts or self._fits(operand, slot) for operand, slot in order)
                for order in self._orders(name, tensor)
            )
        return self._fitting[key]

    def _orders(self, name: str, tensor: TensorRef) -> list[tuple[tuple[str, TensorRef], ...]]:
        """The ways to give the part's operands the inputs of the op of `tensor`."""
        operands = self._parts[name].operands
        model = self._around.model
        slots = model.graphs[tensor.graph].slots(tensor.op)[: len(operands)]
        filled = [slot for slot in slots if slot is not None]
        if len(filled) < len(operands):
            return []
        ways: list[Sequence[str]] = [operands]
        if model.op(tensor).kind in COMMUTATIVE and len(operands) == 2:  # noqa: PLR2004  # two operands can be swapped
            ways.append(operands[::-1])
        return [tuple(zip(way, filled, strict=True)) for way in ways]
