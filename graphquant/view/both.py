"""Two drawings as one: what both have is there once, the rest beside it, so that one layout is that of both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from graphquant.view.drawing import shape_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphquant.pairs import Pairs
    from graphquant.view.drawing import Box, Constant, Drawing, Group, Wire

FIRST, SECOND = 1, 2
"""The sides; what is on both is their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """Two drawings as one.

    Attributes:
        drawing: All boxes, wires and badges of both; the first's badges come first.
        titles: What each side is called.
        boxes: The sides that each box is on.
        wires: Likewise of wires.
        constants: Likewise of the constants of all boxes, in their order.
        split: How many badges are the first's.
        was: For boxes of both that look otherwise on the first side how they look there.
        twins: For badges of the second the first's badge in the same place.
    """

    drawing: Drawing
    titles: tuple[str, str]
    boxes: list[int]
    wires: list[int]
    constants: list[int]
    split: int
    was: dict[int, Box] = field(default_factory=dict)
    twins: dict[int, int] = field(default_factory=dict)


def unite(one: Drawing, other: Drawing, pairs: Pairs, titles: tuple[str, str] | None = None) -> Both:
    """Two drawings as one, in time in proportion to both.

    Args:
        one: The first.
        other: The second.
        pairs: Which op of the first is which of the second.
        titles: What each side is called; by default as the drawings are.
    """
    return _Union(one, other, pairs).both(titles or (one.title, other.title))


class _Union:
    """Makes one drawing of two."""

    def __init__(self, one: Drawing, other: Drawing, pairs: Pairs) -> None:
        self.one, self.other = one, other
        self.split = len(one.badges)
        self.twins: dict[int, int] = {}
        self.first, self.second = self._numbers(pairs)
        self.groups, self.group_of = _merged(one.groups, other.groups)

    def _numbers(self, pairs: Pairs) -> tuple[list[int], list[int]]:
        """The new number of each box of either; what the first alone has stands before what follows it there."""
        places = {(box.graph, box.op.name): number for number, box in enumerate(self.other.boxes)}
        twins = [places.get(pairs.to.get((box.graph, box.op.name), ("", "")), -1) for box in self.one.boxes]
        before: dict[int, list[int]] = {}
        following = len(self.other.boxes)
        for number in range(len(twins) - 1, -1, -1):
            if twins[number] >= 0:
                following = twins[number]
            else:
                before.setdefault(following, []).append(number)
        first, second = [-1] * len(twins), []
        count = 0
        for number in range(len(self.other.boxes) + 1):
            for alone in reversed(before.get(number, ())):
                first[alone] = count
                count += 1
            second.append(count)
            count += 1
        for number, twin in enumerate(twins):
            if twin >= 0:
                first[number] = second[twin]
        return first, second[:-1]

    def both(self, titles: tuple[str, str]) -> Both:
        mine = dict(zip(self.first, self.one.boxes, strict=True))
        its = dict(zip(self.second, self.other.boxes, strict=True))
        boxes, sides, constants, was = [], [], [], {}
        for number in sorted({*mine, *its}):
            a, b = mine.get(number), its.get(number)
            box, held = self._box(its[number] if b is not None else mine[number], a, b)
            if a is not None and b is not None and _look(a) != _look(b):
                was[number] = a
            boxes.append(box)
            sides.append(FIRST * (a is not None) + SECOND * (b is not None))
            constants += held
        wires, wire_sides = self._wires()
        drawing = replace(
            self.other,
            title=f"{titles[0]} and {titles[1]}",
            boxes=boxes,
            wires=wires,
            badges=[*self.one.badges, *self.other.badges],
            folded=[*self.one.folded, *self.other.folded],
            groups=self.groups,
            planned=self.one.planned and self.other.planned,
            controls=self._controls(),
        )
        return Both(
            drawing=drawing,
            titles=titles,
            boxes=sides,
            wires=wire_sides,
            constants=constants,
            split=self.split,
            was=was,
            twins=self.twins,
        )

    def _marks(self, first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
        """The badges of one place on both sides; those that stand for each other are noted."""
        after = tuple(self.split + badge for badge in second)
        for a, b in zip(first, after, strict=False):
            self.twins.setdefault(b, a)
        return (*first, *after)

    def _box(self, box: Box, a: Box | None, b: Box | None) -> tuple[Box, list[int]]:
        """The box of an op, which is `a` in the first and `b` in the second, and the sides of its constants."""
        mine, its = ({one.slot: one for one in side.constants} if side is not None else {} for side in (a, b))
        constants, sides = [], []
        for slot in sorted({*mine, *its}):
            old, new = mine.get(slot), its.get(slot)
            marks = self._marks(old.badges if old is not None else (), new.badges if new is not None else ())
            shown: Constant = new if new is not None else mine[slot]
            constants.append(replace(shown, badges=marks))
            sides.append(FIRST * (old is not None) + SECOND * (new is not None))
        own = self._marks(a.badges if a is not None else (), b.badges if b is not None else ())
        calls = tuple(self.group_of[call] for call in box.calls) if b is None else box.calls
        group = box.group if b is not None or box.group < 0 else self.group_of[box.group]
        return replace(box, group=group, constants=tuple(constants), badges=own, calls=calls), sides

    def _wires(self) -> tuple[list[Wire], list[int]]:
        """The wires of both, and their sides."""
        mine = _by_ends(self.one.wires, self.first)
        its = _by_ends(self.other.wires, self.second)
        wires = []
        for ends in dict.fromkeys((*its, *mine)):
            old, new = mine.get(ends), its.get(ends)
            marks = self._marks(old.badges if old is not None else (), new.badges if new is not None else ())
            shown: Wire = new if new is not None else mine[ends]
            source, port, target, _ = ends
            side = FIRST * (old is not None) + SECOND * (new is not None)
            wires.append((replace(shown, source=source, port=port, target=target, badges=marks), side))
        wires.sort(key=lambda one: (one[0].source, one[0].port))
        return [wire for wire, _ in wires], [side for _, side in wires]

    def _controls(self) -> list[tuple[int, int]]:
        """The control edges of both."""
        mine = [(self.first[source], self.first[target]) for source, target in self.one.controls]
        its = [(self.second[source], self.second[target]) for source, target in self.other.controls]
        return list(dict.fromkeys((*its, *mine)))


def _by_ends(wires: Sequence[Wire], numbers: Sequence[int]) -> Mapping[tuple[int, int, int, int], Wire]:
    return {(numbers[wire.source], wire.port, numbers[wire.target], wire.slot): wire for wire in wires}


def _merged(one: Sequence[Group], other: Sequence[Group]) -> tuple[list[Group], list[int]]:
    """The groups of both, the second's first, and what each of the first is among them: those of one path are one."""
    groups = list(other)
    known = {(group.parent, group.label, group.graph): number for number, group in enumerate(groups)}
    found: list[int] = []
    for group in one:
        parent = found[group.parent] if group.parent >= 0 else -1
        key = parent, group.label, group.graph
        if key not in known:
            known[key] = len(groups)
            groups.append(replace(group, parent=parent))
        found.append(known[key])
    return groups, found


def _look(box: Box) -> tuple[object, ...]:
    """What of a box is seen on the drawing."""
    return box.graph, box.op.name, box.op.type, box.inputs, box.reason, tuple(map(shape_text, box.op.outputs[:1]))


__all__ = ["FIRST", "SECOND", "Both", "unite"]
