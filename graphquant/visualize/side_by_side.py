"""Pages of two models or plans side by side: errors as a heatmap, differences in colors."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from graphquant.analysis import prepare_like
from graphquant.api import align_preparation, prepare_for_plan
from graphquant.ir import qualified_op_name
from graphquant.ir.op_matching import match_ops, unclipped_source
from graphquant.visualize.annotations import comparison_heatmap
from graphquant.visualize.compare_report import CHANGE_SIGNS, diff_summary
from graphquant.visualize.drawing import model_drawing, plan_drawing
from graphquant.visualize.merged_drawings import FIRST, SECOND, merge_drawings
from graphquant.visualize.viewer_data import viewer_data, viewer_page

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.analysis import Comparison, Differences, ModelChange
    from graphquant.ir import Model
    from graphquant.quantize import Plan
    from graphquant.visualize.merged_drawings import MergedDrawing


SITE_CHANGES = frozenset({"site-added", "site-removed", "site-changed", "scale"})


def viewer_changes(
    differences: Differences, merged: MergedDrawing, models: tuple[Model, Model] | None = None
) -> list[dict[str, Any]]:
    """Return differences as viewer data, each with its boxes and annotations.

    Args:
        differences: Differences of two models or plans.
        merged: Drawing of both.
        models: Both models; None for plans.
    """
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
            for side in _iter_sides(merged.box_sides[number]):
                drawn = merged.first_boxes.get(number, box) if side == FIRST else box
                full_name = qualified_op_name(drawn.graph, drawn.op.name)
                self._ops[side, full_name] = number
            for constant in box.constants:
                for side in _iter_sides(next(constant_sides)):
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
        name = change.location
        if change.kind == "wiring":
            name = name.rpartition("[")[0]
        for side in (FIRST,) if change.kind == "op-removed" else (SECOND, FIRST):
            if (side, name) in self._ops:
                return [self._ops[side, name]]
            if (side, name) in self._constants:
                return list(dict.fromkeys(self._constants[side, name]))
        return []

    def annotation_numbers(self, change: ModelChange) -> list[int]:
        """Return the annotations of a change of the quantization."""
        added = self._annotations.get((SECOND, change.location), [])
        removed = self._annotations.get((FIRST, change.location), [])
        if change.kind == "site-added":
            return [number for number in added if number not in self._merged.counterparts] or added
        if change.kind == "site-removed":
            matched = set(self._merged.counterparts.values())
            return [number for number in removed if number not in matched] or removed
        return [
            *added,
            *(self._merged.counterparts[number] for number in added if number in self._merged.counterparts),
        ] or removed


def _iter_sides(sides: int) -> Iterator[int]:
    return (side for side in (FIRST, SECOND) if sides & side)


RANDOM_DATA_NOTE = "The data is RANDOM: the metrics do not apply to real data."

FORMATS_DIFFER_NOTE = (
    "The models have different formats, whose inner tensors cannot be matched. Only the quantized model is drawn."
)


def comparison_page(float_model: Model, quantized: Model, comparison: Comparison) -> str:
    """Draw a float and a quantized model in one layout, with tensor errors as a heatmap.

    Raises:
        ModelError: The float model cannot be prepared like the quantized one.
    """
    notes = [RANDOM_DATA_NOTE] if comparison.random else []
    drawing, heatmap = model_drawing(quantized), comparison_heatmap(comparison)
    if float_model.format != quantized.format:
        return viewer_page(viewer_data(drawing, [*notes, FORMATS_DIFFER_NOTE], heatmap=heatmap))
    prepared = prepare_like(float_model, quantized)
    merged = merge_drawings(
        model_drawing(prepared), drawing, match_ops(prepared, quantized), _side_titles(float_model, quantized)
    )
    return viewer_page(viewer_data(merged.drawing, notes, merged=merged, heatmap=heatmap))


def diff_page(first: Model, second: Model, differences: Differences) -> str:
    """Draw two models in one layout, with added, removed and changed parts in colors.

    Raises:
        ModelError: The first model cannot be prepared like the second one.
    """
    before, after, _ = align_preparation(first, second)
    merged = merge_drawings(
        model_drawing(before), model_drawing(after), match_ops(before, after), _side_titles(first, second)
    )
    return viewer_page(
        viewer_data(
            merged.drawing,
            [diff_summary(differences)],
            merged=merged,
            changes=viewer_changes(differences, merged, (before, after)),
        )
    )


def plan_diff_page(model: Model, first: Plan, second: Plan, differences: Differences) -> str:
    """Draw two plans of `model` in one layout.

    Raises:
        UsageError: A plan belongs to another model.
    """
    before, after = prepare_for_plan(model, first), prepare_for_plan(model, second)
    sides = plan_drawing(before, first), plan_drawing(after, second)
    merged = merge_drawings(*sides, match_ops(before, after), ("plan A", "plan B"))
    return viewer_page(
        viewer_data(
            merged.drawing, [diff_summary(differences)], merged=merged, changes=viewer_changes(differences, merged)
        )
    )


def _side_titles(first: Model, second: Model) -> tuple[str, str]:
    """Return the file names; with folders if the names are equal."""
    paths = [model.path for model in (first, second)]
    names = [path.name if path is not None else "model" for path in paths]
    if names[0] == names[1]:
        names = [str(path) if path is not None else "model" for path in paths]
    return names[0], names[1]
