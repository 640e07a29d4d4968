"""Merge of two drawings into one, so that one layout serves both, and the positions of differences in it.

Matched parts occur once, and each other part is marked with its side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from graphquant.ir import Model, qualified_op_name
from graphquant.ir.op_matching import OpMatching, unclipped_source
from graphquant.visualize.compare_report import CHANGE_SIGNS
from graphquant.visualize.drawing import Box, BoxGroup, Drawing, DrawnConstant, Wire, drawn_shape

if TYPE_CHECKING:
    from graphquant.analysis.diff import Differences, ModelChange

FIRST, SECOND = 1, 2  # bits of the sides; a part on both sides has their sum
_SIDES_BY_BITS = ((), (FIRST,), (SECOND,), (FIRST, SECOND))


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedDrawing:
    """Two drawings in one."""

    drawing: Drawing  # boxes, wires and annotations of both drawings; annotations of the first come first
    titles: tuple[str, str]
    box_sides: list[int]
    wire_sides: list[int]
    constant_sides: list[int]  # sides of the constants of all boxes, in box order
    split: int  # number of annotations of the first drawing
    # box of the first drawing, by box number, where both have the box and it looks different
    first_boxes: dict[int, Box] = field(default_factory=dict)
    # annotation of the first drawing by annotation of the second at the same position
    counterparts: dict[int, int] = field(default_factory=dict)


def merge_drawings(
    first: Drawing, second: Drawing, matches: OpMatching, titles: tuple[str, str] | None = None
) -> MergedDrawing:
    """Merge two drawings into one, in linear time. The default titles of the sides are those of the drawings."""
    return _DrawingMerger(first, second, matches).merge(titles or (first.title, second.title))


class _DrawingMerger:
    def __init__(self, first: Drawing, second: Drawing, matches: OpMatching) -> None:
        self.first_drawing, self.second_drawing = first, second
        self.counterparts: dict[int, int] = {}
        self.numbered = tuple(zip((first, second), self._renumber_boxes(matches), strict=True))
        self.groups, self.first_groups = _merge_groups(first.groups, second.groups)

    def _renumber_boxes(self, matches: OpMatching) -> tuple[list[int], list[int]]:
        """Number the boxes of both drawings. One that only the first has comes directly before its successor there."""
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
        counter = count()
        for number in range(len(self.second_drawing.boxes) + 1):
            for unmatched in reversed(unmatched_before.get(number, ())):
                first[unmatched] = next(counter)
            second.append(next(counter))
        for number, partner in enumerate(matched):
            if partner >= 0:
                first[number] = second[partner]
        return first, second[:-1]

    def merge(self, titles: tuple[str, str]) -> MergedDrawing:
        first_drawing, second_drawing = self.first_drawing, self.second_drawing
        first_boxes, second_boxes = (
            dict(zip(numbers, drawing.boxes, strict=True)) for drawing, numbers in self.numbered
        )
        boxes, box_sides, constant_sides, replaced = [], [], [], {}
        for number in sorted({*first_boxes, *second_boxes}):
            first, second = first_boxes.get(number), second_boxes.get(number)
            if first is not None and second is not None and _box_appearance(first) != _box_appearance(second):
                replaced[number] = first
            merged, sides = self._merge_box(second or self._with_merged_groups(first_boxes[number]), first, second)
            boxes.append(merged)
            box_sides.append(_side_bits(first, second))
            constant_sides += sides
        wires = self._merge_wires()
        numbered = reversed(self.numbered)
        controls = [(numbers[start], numbers[end]) for side, numbers in numbered for start, end in side.controls]
        drawing = replace(
            second_drawing,
            title=f"{titles[0]} and {titles[1]}",
            boxes=boxes,
            wires=[wire for wire, _ in wires],
            annotations=[*first_drawing.annotations, *second_drawing.annotations],
            folded_ops=[*first_drawing.folded_ops, *second_drawing.folded_ops],
            groups=self.groups,
            planned=first_drawing.planned and second_drawing.planned,
            controls=list(dict.fromkeys(controls)),
        )
        return MergedDrawing(
            drawing=drawing,
            titles=titles,
            box_sides=box_sides,
            wire_sides=[bits for _, bits in wires],
            constant_sides=constant_sides,
            split=len(first_drawing.annotations),
            first_boxes=replaced,
            counterparts=self.counterparts,
        )

    def _merge_annotations(
        self, first: Box | DrawnConstant | Wire | None, second: Box | DrawnConstant | Wire | None
    ) -> tuple[int, ...]:
        """Return the annotations of one position on both sides, and note which ones correspond."""
        before = first.annotations if first is not None else ()
        split = len(self.first_drawing.annotations)
        after = tuple(split + number for number in second.annotations) if second is not None else ()
        for first_annotation, second_annotation in zip(before, after, strict=False):
            self.counterparts.setdefault(second_annotation, first_annotation)
        return (*before, *after)

    def _merge_box(self, box: Box, first: Box | None, second: Box | None) -> tuple[Box, list[int]]:
        """Merge the boxes of one op into `box`, and return the sides of its constants."""
        first_constants, second_constants = (
            {constant.slot: constant for constant in side.constants} if side is not None else {}
            for side in (first, second)
        )
        constants, sides = [], []
        for slot in sorted({*first_constants, *second_constants}):
            old, new = first_constants.get(slot), second_constants.get(slot)
            annotations = self._merge_annotations(old, new)
            constants.append(replace(new or first_constants[slot], annotations=annotations))
            sides.append(_side_bits(old, new))
        annotations = self._merge_annotations(first, second)
        return replace(box, constants=tuple(constants), annotations=annotations), sides

    def _with_merged_groups(self, box: Box) -> Box:
        """Renumber the groups of a box that only the first drawing has."""
        group = self.first_groups[box.group] if box.group >= 0 else -1
        return replace(box, group=group, calls=tuple(self.first_groups[call] for call in box.calls))

    def _merge_wires(self) -> list[tuple[Wire, int]]:
        first_wires, second_wires = (
            {(numbers[wire.source], wire.port, numbers[wire.target], wire.slot): wire for wire in drawing.wires}
            for drawing, numbers in self.numbered
        )
        wires = []
        for ends in dict.fromkeys((*second_wires, *first_wires)):
            old, new = first_wires.get(ends), second_wires.get(ends)
            annotations = self._merge_annotations(old, new)
            source, _, target, _ = ends
            wire = replace(new or first_wires[ends], source=source, target=target, annotations=annotations)
            wires.append((wire, _side_bits(old, new)))
        return sorted(wires, key=lambda pair: (pair[0].source, pair[0].port))


def _side_bits(first: object | None, second: object | None) -> int:
    return FIRST * (first is not None) + SECOND * (second is not None)


def _merge_groups(first: Sequence[BoxGroup], second: Sequence[BoxGroup]) -> tuple[list[BoxGroup], list[int]]:
    """Merge groups by path, the second drawing's first; return them and the new numbers of the first drawing's."""
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
    return box.graph, box.op.name, box.op.type, box.inputs, box.reason, tuple(map(drawn_shape, box.op.outputs[:1]))


SITE_CHANGES = frozenset({"site-added", "site-removed", "site-changed", "scale"})


def viewer_changes(
    differences: Differences, merged: MergedDrawing, models: tuple[Model, Model] | None = None
) -> list[dict[str, Any]]:
    """Return differences as viewer data, each with its boxes and annotations; `models` is None for plans."""
    index = _ChangeIndex(merged, models)
    return [
        {
            "kind": change.kind,
            "sign": CHANGE_SIGNS.get(change.kind, "~"),
            "location": change.location,
            "message": change.message,
            "ops": [] if change.kind in SITE_CHANGES else index.box_numbers(change),
            "annotations": index.annotation_numbers(change) if change.kind in SITE_CHANGES else [],
        }
        for change in differences.changes
    ]


class _ChangeIndex:
    """Box and annotation numbers by name, for each side."""

    def __init__(self, merged: MergedDrawing, models: tuple[Model, Model] | None) -> None:
        self._merged = merged
        self._ops: dict[tuple[int, str], int] = {}
        self._constants: dict[tuple[int, str], list[int]] = defaultdict(list)
        self._annotations: dict[tuple[int, str], list[int]] = defaultdict(list)
        constant_sides = iter(merged.constant_sides)
        for number, box in enumerate(merged.drawing.boxes):
            for side in _SIDES_BY_BITS[merged.box_sides[number]]:
                drawn = merged.first_boxes.get(number, box) if side == FIRST else box
                self._ops[side, qualified_op_name(drawn.graph, drawn.op.name)] = number
            for constant in box.constants:
                for side in _SIDES_BY_BITS[next(constant_sides)]:
                    self._constants[side, constant.name].append(number)
        for number, annotation in enumerate(merged.drawing.annotations):
            side = FIRST if number < merged.split else SECOND
            names = [str(annotation.tensor), annotation.name]
            if models is not None and annotation.op_key[1]:
                model = models[side - 1]
                op = model.graphs[annotation.op_key[0]].op(annotation.op_key[1])
                names = [op.anchor or str(unclipped_source(model, annotation.tensor))]
            for name in filter(None, dict.fromkeys(names)):
                self._annotations[side, name].append(number)

    def box_numbers(self, change: ModelChange) -> list[int]:
        """Return the boxes of a structural change: the op, or the readers of the constant."""
        name = change.location.rpartition("[")[0] if change.kind == "wiring" else change.location
        for side in (FIRST,) if change.kind == "op-removed" else (SECOND, FIRST):
            if (side, name) in self._ops:
                return [self._ops[side, name]]
            if (side, name) in self._constants:
                return list(dict.fromkeys(self._constants[side, name]))
        return []

    def annotation_numbers(self, change: ModelChange) -> list[int]:
        """Return the annotations of a change of the quantization."""
        counterparts = self._merged.counterparts
        added = self._annotations.get((SECOND, change.location), [])
        removed = self._annotations.get((FIRST, change.location), [])
        if change.kind == "site-added":
            return [number for number in added if number not in counterparts] or added
        if change.kind == "site-removed":
            matched = set(counterparts.values())
            return [number for number in removed if number not in matched] or removed
        return [*added, *(counterparts[number] for number in added if number in counterparts)] or removed
