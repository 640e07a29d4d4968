"""Merge of two drawings into one, so that one layout serves both.

Matched parts occur once, and each other part is marked with its side.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from graphquant.visualize.drawing import drawn_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphquant.ir.op_matching import OpMatching
    from graphquant.visualize.drawing import Box, BoxGroup, Drawing, DrawnConstant, Wire


FIRST, SECOND = 1, 2
"""Bits of the sides; a part on both sides has their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedDrawing:
    """Two drawings in one.

    Attributes:
        drawing: Boxes, wires and annotations of both drawings; annotations of the first come first.
        titles: Titles of the sides.
        box_sides: Sides of each box.
        wire_sides: Sides of each wire.
        constant_sides: Sides of the constants of all boxes, in box order.
        split: Number of annotations of the first drawing.
        first_boxes: Box of the first drawing, by box number, where both have the box and it looks different.
        counterparts: Annotation of the first drawing by annotation of the second at the same position.
    """

    drawing: Drawing
    titles: tuple[str, str]
    box_sides: list[int]
    wire_sides: list[int]
    constant_sides: list[int]
    split: int
    first_boxes: dict[int, Box] = field(default_factory=dict)
    counterparts: dict[int, int] = field(default_factory=dict)


def merge_drawings(
    first: Drawing, second: Drawing, matches: OpMatching, titles: tuple[str, str] | None = None
) -> MergedDrawing:
    """Merge two drawings into one, in linear time.

    Args:
        first: First drawing.
        second: Second drawing.
        matches: Matched ops of the two models.
        titles: Titles of the sides; by default those of the drawings.
    """
    return _DrawingMerger(first, second, matches).merge(titles or (first.title, second.title))


class _DrawingMerger:
    """Builder of one merged drawing."""

    def __init__(self, first: Drawing, second: Drawing, matches: OpMatching) -> None:
        self.first_drawing, self.second_drawing = first, second
        self.split = len(first.annotations)
        self.counterparts: dict[int, int] = {}
        self.first_numbers, self.second_numbers = self._renumber_boxes(matches)
        self.groups, self.first_groups = _merge_groups(first.groups, second.groups)

    def _renumber_boxes(self, matches: OpMatching) -> tuple[list[int], list[int]]:
        """Return the new number of each box of both drawings.

        A box that only the first drawing has comes directly before its successor there.
        """
        number_by_op = {(box.graph, box.op.name): number for number, box in enumerate(self.second_drawing.boxes)}
        matched = [
            number_by_op.get(matches.forward.get((box.graph, box.op.name), ("", "")), -1)
            for box in self.first_drawing.boxes
        ]
        unmatched_before: dict[int, list[int]] = {}
        following = len(self.second_drawing.boxes)
        for number in range(len(matched) - 1, -1, -1):
            if matched[number] >= 0:
                following = matched[number]
            else:
                unmatched_before.setdefault(following, []).append(number)
        first, second = [-1] * len(matched), []
        count = 0
        for number in range(len(self.second_drawing.boxes) + 1):
            for unmatched in reversed(unmatched_before.get(number, ())):
                first[unmatched] = count
                count += 1
            second.append(count)
            count += 1
        for number, partner in enumerate(matched):
            if partner >= 0:
                first[number] = second[partner]
        return first, second[:-1]

    def merge(self, titles: tuple[str, str]) -> MergedDrawing:
        first_boxes = dict(zip(self.first_numbers, self.first_drawing.boxes, strict=True))
        second_boxes = dict(zip(self.second_numbers, self.second_drawing.boxes, strict=True))
        boxes, sides, constants, replaced = [], [], [], {}
        for number in sorted({*first_boxes, *second_boxes}):
            first, second = first_boxes.get(number), second_boxes.get(number)
            box, box_constants = self._merge_box(
                second_boxes[number] if second is not None else first_boxes[number], first, second
            )
            if first is not None and second is not None and _box_appearance(first) != _box_appearance(second):
                replaced[number] = first
            boxes.append(box)
            sides.append(FIRST * (first is not None) + SECOND * (second is not None))
            constants += box_constants
        wires, wire_sides = self._merge_wires()
        drawing = replace(
            self.second_drawing,
            title=f"{titles[0]} and {titles[1]}",
            boxes=boxes,
            wires=wires,
            annotations=[*self.first_drawing.annotations, *self.second_drawing.annotations],
            folded_ops=[*self.first_drawing.folded_ops, *self.second_drawing.folded_ops],
            groups=self.groups,
            planned=self.first_drawing.planned and self.second_drawing.planned,
            controls=self._merge_controls(),
        )
        return MergedDrawing(
            drawing=drawing,
            titles=titles,
            box_sides=sides,
            wire_sides=wire_sides,
            constant_sides=constants,
            split=self.split,
            first_boxes=replaced,
            counterparts=self.counterparts,
        )

    def _merge_annotations(self, first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
        """Return the annotations of one position on both sides, and note which ones correspond."""
        renumbered = tuple(self.split + annotation for annotation in second)
        for first_annotation, second_annotation in zip(first, renumbered, strict=False):
            self.counterparts.setdefault(second_annotation, first_annotation)
        return (*first, *renumbered)

    def _merge_box(self, box: Box, first: Box | None, second: Box | None) -> tuple[Box, list[int]]:
        """Merge the boxes of one op, and return the sides of its constants."""
        first_constants, second_constants = (
            {constant.slot: constant for constant in side.constants} if side is not None else {}
            for side in (first, second)
        )
        constants, sides = [], []
        for slot in sorted({*first_constants, *second_constants}):
            old, new = first_constants.get(slot), second_constants.get(slot)
            annotations = self._merge_annotations(
                old.annotations if old is not None else (), new.annotations if new is not None else ()
            )
            drawn: DrawnConstant = new if new is not None else first_constants[slot]
            constants.append(replace(drawn, annotations=annotations))
            sides.append(FIRST * (old is not None) + SECOND * (new is not None))
        box_annotations = self._merge_annotations(
            first.annotations if first is not None else (), second.annotations if second is not None else ()
        )
        calls = tuple(self.first_groups[call] for call in box.calls) if second is None else box.calls
        group = box.group if second is not None or box.group < 0 else self.first_groups[box.group]
        return replace(box, group=group, constants=tuple(constants), annotations=box_annotations, calls=calls), sides

    def _merge_wires(self) -> tuple[list[Wire], list[int]]:
        """Return the wires of both drawings, and their sides."""
        first_wires = _wires_by_ends(self.first_drawing.wires, self.first_numbers)
        second_wires = _wires_by_ends(self.second_drawing.wires, self.second_numbers)
        wires = []
        for ends in dict.fromkeys((*second_wires, *first_wires)):
            old, new = first_wires.get(ends), second_wires.get(ends)
            annotations = self._merge_annotations(
                old.annotations if old is not None else (), new.annotations if new is not None else ()
            )
            drawn: Wire = new if new is not None else first_wires[ends]
            source, port, target, _ = ends
            side = FIRST * (old is not None) + SECOND * (new is not None)
            wires.append((replace(drawn, source=source, port=port, target=target, annotations=annotations), side))
        wires.sort(key=lambda pair: (pair[0].source, pair[0].port))
        return [wire for wire, _ in wires], [side for _, side in wires]

    def _merge_controls(self) -> list[tuple[int, int]]:
        """Return the control edges of both drawings."""
        first_controls = [
            (self.first_numbers[source], self.first_numbers[target]) for source, target in self.first_drawing.controls
        ]
        second_controls = [
            (self.second_numbers[source], self.second_numbers[target])
            for source, target in self.second_drawing.controls
        ]
        return list(dict.fromkeys((*second_controls, *first_controls)))


def _wires_by_ends(wires: Sequence[Wire], numbers: Sequence[int]) -> Mapping[tuple[int, int, int, int], Wire]:
    return {(numbers[wire.source], wire.port, numbers[wire.target], wire.slot): wire for wire in wires}


def _merge_groups(first: Sequence[BoxGroup], second: Sequence[BoxGroup]) -> tuple[list[BoxGroup], list[int]]:
    """Merge groups by path. The second drawing's come first.

    Returns:
        All groups, and the new number of each group of the first drawing.
    """
    groups = list(second)
    numbers = {(group.parent, group.label, group.graph): number for number, group in enumerate(groups)}
    merged_numbers: list[int] = []
    for group in first:
        parent = merged_numbers[group.parent] if group.parent >= 0 else -1
        key = parent, group.label, group.graph
        if key not in numbers:
            numbers[key] = len(groups)
            groups.append(replace(group, parent=parent))
        merged_numbers.append(numbers[key])
    return groups, merged_numbers


def _box_appearance(box: Box) -> tuple[object, ...]:
    """Return the visible properties of a box."""
    return box.graph, box.op.name, box.op.type, box.inputs, box.reason, tuple(map(drawn_shape, box.op.outputs[:1]))
