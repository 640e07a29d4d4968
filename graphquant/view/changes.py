"""Where on the drawing of two models each of their differences is."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from graphquant.ir import named
from graphquant.pairs import unclipped
from graphquant.view.both import FIRST, SECOND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.differences import Change, Differences
    from graphquant.ir import Model
    from graphquant.view.both import Both

SIGNS = {"op-added": "+", "site-added": "+", "op-removed": "-", "site-removed": "-"}
"""What a change is marked with; the others are `~`."""

OF_SITES = frozenset({"site-added", "site-removed", "site-changed", "scale"})


def changes_data(found: Differences, both: Both, models: tuple[Model, Model] | None = None) -> list[dict[str, Any]]:
    """The differences as data of the page: each with the boxes and badges that it is about.

    Args:
        found: The differences.
        both: The drawing of both sides.
        models: Both models, None for plans.
    """
    names = _Names(both, models)
    return [
        {
            "kind": change.kind,
            "sign": SIGNS.get(change.kind, "~"),
            "where": change.where,
            "says": change.says,
            "ops": [] if change.kind in OF_SITES else names.ops(change),
            "badges": names.badges(change) if change.kind in OF_SITES else [],
        }
        for change in found.changes
    ]


class _Names:
    """What ops and quantized tensors are called on either side."""

    def __init__(self, both: Both, models: tuple[Model, Model] | None) -> None:
        self._both = both
        self._ops: dict[tuple[int, str], int] = {}
        self._constants: dict[tuple[int, str], list[int]] = defaultdict(list)
        self._badges: dict[tuple[int, str], list[int]] = defaultdict(list)
        sides = iter(both.constants)
        for number, box in enumerate(both.drawing.boxes):
            for side in _each(both.boxes[number]):
                shown = both.was.get(number, box) if side == FIRST else box
                full = named(shown.graph, shown.op.name)
                self._ops[side, full] = number
            for one in box.constants:
                for side in _each(next(sides)):
                    self._constants[side, one.name].append(number)
        for number, badge in enumerate(both.drawing.badges):
            side = FIRST if number < both.split else SECOND
            called = [str(badge.tensor), badge.name]
            if models is not None and badge.place[1]:
                model = models[side - 1]
                op = model.graphs[badge.place[0]].op(badge.place[1])
                called = [op.anchor or str(unclipped(model, badge.tensor))]
            for name in filter(None, dict.fromkeys(called)):
                self._badges[side, name].append(number)

    def ops(self, change: Change) -> list[int]:
        """The boxes that a change of the structure is about: the op, or those that read the constant."""
        where = change.where
        if change.kind == "wiring":
            where = where.rpartition("[")[0]
        for side in (FIRST,) if change.kind == "op-removed" else (SECOND, FIRST):
            if (side, where) in self._ops:
                return [self._ops[side, where]]
            if (side, where) in self._constants:
                return list(dict.fromkeys(self._constants[side, where]))
        return []

    def badges(self, change: Change) -> list[int]:
        """The badges that a change of the quantization is about."""
        added = self._badges.get((SECOND, change.where), [])
        removed = self._badges.get((FIRST, change.where), [])
        if change.kind == "site-added":
            return [one for one in added if one not in self._both.twins] or added
        if change.kind == "site-removed":
            twinned = set(self._both.twins.values())
            return [one for one in removed if one not in twinned] or removed
        return [*added, *(self._both.twins[one] for one in added if one in self._both.twins)] or removed


def _each(sides: int) -> Iterator[int]:
    return (side for side in (FIRST, SECOND) if sides & side)


__all__ = ["changes_data"]
