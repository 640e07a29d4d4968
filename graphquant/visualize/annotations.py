"""What quantization is drawn on a graph: that of a quantized model, of a plan, or of what `insert` made."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.analysis.range_report import TensorRange
from graphquant.numerics import DynamicQParams, IntType, QParams
from graphquant.observers import estimate_cost
from graphquant.visualize.text import pluralize, scheme_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphquant.analysis import Comparison, OutputFigures
    from graphquant.analysis.model_summary import ModelSummary, StoredScaleTensor
    from graphquant.analysis.range_report import RangeReport
    from graphquant.api import Result
    from graphquant.ir import TensorRef, Use
    from graphquant.ir.op_matching import OpKey
    from graphquant.numerics import Array
    from graphquant.quantize import Plan, Skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnParams:
    """Scale and zero point as they are drawn.

    Attributes:
        scale: float32, one or several, real units per step.
        zero_point: Integers, steps; as many.
        axis: The channel axis, or that of the blocks, where there are several.
        block_size: How many elements along `axis` have one scale; None where there are no blocks.
        low: The smallest value that is represented, real units; one or several, none where it is not known.
        high: The largest one.
    """

    scale: Array
    zero_point: Array
    axis: int | None = None
    block_size: int | None = None
    low: Array = field(default_factory=partial(np.empty, 0))
    high: Array = field(default_factory=partial(np.empty, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """How one tensor is quantized for those that read it, or will be.

    Attributes:
        tensor: The float tensor, or the constant that is stored as integers.
        name: What else it is called: the file's own name where scales are in tensors.
        dtype: The type of the quantized values, "" where that is not known.
        params: Scale and zero point; None where they are not known, not known yet, or computed in each run.
        dynamic: Whether they are computed in each run.
        rule: The rule, "" where none is known.
        why: That rule's reason.
        scheme: The scheme in words, "" where it is not known.
        note: A word on it: with what it shares its scale, that its range is learned, how it rounds.
        tensor_range: What calibration saw of the tensor and what the range costs.
        op_key: The quantization op, as graph and name; two empty texts where none is in the model.
    """

    tensor: TensorRef
    name: str = ""
    dtype: str = ""
    params: DrawnParams | None = None
    dynamic: bool = False
    rule: str = ""
    why: str = ""
    scheme: str = ""
    note: str = ""
    tensor_range: TensorRange | None = None
    op_key: tuple[str, str] = ("", "")


@dataclass(slots=True, kw_only=True)
class AnnotationSet:
    """Badges and where they belong.

    Attributes:
        annotations: The badges.
        by_op: For quantization ops that are in the model, (graph, op), the badge.
        by_use: For uses that are not rerouted yet the badge.
        by_tensor: For tensors that keep their scale themselves the badge.
        skip_reasons: For uses that a rule asked for and that stay float the reason.
        float_reasons: For ops that multiply, (graph, op), why they stay float, "" where they do not; empty for a plan.
    """

    annotations: list[Annotation] = field(default_factory=list)
    by_op: dict[tuple[str, str], int] = field(default_factory=dict)
    by_use: dict[Use, int] = field(default_factory=dict)
    by_tensor: dict[TensorRef, int] = field(default_factory=dict)
    skip_reasons: dict[Use, str] = field(default_factory=dict)
    float_reasons: dict[tuple[str, str], str] = field(default_factory=dict)


def annotate_model(
    summary: ModelSummary, rule_reasons: Mapping[str, str], range_report: RangeReport | None = None
) -> AnnotationSet:
    """The quantization that is in a model.

    Args:
        summary: What was found in it.
        rule_reasons: The reasons of rules by their names.
        range_report: Statistics of tensors that are called the same.
    """
    annotation_set = AnnotationSet()
    ranges_by_tensor = _ranges_by_tensor(range_report)
    for reading in summary.quantization_ops:
        annotation_set.by_op[reading.graph, reading.op] = len(annotation_set.annotations)
        remarks = (
            f"rounds {reading.rounding}" if reading.rounding else "",
            "its range is learned" if reading.learned else "",
        )
        annotation = Annotation(
            tensor=reading.tensor,
            dtype=reading.params.type.name if reading.params is not None else "",
            params=_drawn_params(reading.params),
            dynamic=reading.params is None or isinstance(reading.params, DynamicQParams),
            rule=reading.rule,
            why=rule_reasons.get(reading.rule, ""),
            note="; ".join(remark for remark in remarks if remark),
            tensor_range=ranges_by_tensor.get(reading.tensor),
            op_key=(reading.graph, reading.op),
        )
        annotation_set.annotations.append(annotation)
    for stored_tensor in summary.tensors:
        if stored_tensor.stored.scale.size or stored_tensor.stored.details:
            annotation_set.by_tensor[stored_tensor.tensor] = len(annotation_set.annotations)
            annotation_set.annotations.append(_stored_annotation(stored_tensor))
    annotation_set.float_reasons = {(covered.graph, covered.op): covered.reason for covered in summary.coverage}
    return annotation_set


def annotate_plan(plan: Plan, range_report: RangeReport | None = None) -> AnnotationSet:
    """What a plan will insert."""
    annotation_set = AnnotationSet()
    ranges_by_tensor = _ranges_by_tensor(range_report)
    for site in plan.sites:
        annotation_set.by_use.update(dict.fromkeys(site.uses, len(annotation_set.annotations)))
        tensor_range = ranges_by_tensor.get(site.tensor)
        annotation = Annotation(
            tensor=site.tensor,
            dtype=site.scheme.type.name,
            params=_drawn_params(tensor_range.params) if tensor_range is not None else None,
            dynamic=site.scheme.range == "dynamic",
            rule=site.rule,
            why=site.why,
            scheme=scheme_text(site),
            tensor_range=tensor_range,
        )
        annotation_set.annotations.append(annotation)
    _add_skip_reasons(annotation_set, plan.skips)
    return annotation_set


def annotate_result(result: Result, summary: ModelSummary) -> AnnotationSet:
    """What `insert` made of a model; `summary` is the survey of the rewritten one."""
    plan = result.plan
    annotation_set = annotate_model(summary, {site.rule: site.why for site in plan.sites})
    sketches = result.stats.sketches if result.stats is not None else {}
    for insertion in result.inserted:
        number = annotation_set.by_op.get(insertion.output[:2])
        if number is None:
            continue
        site, sketch = insertion.site, sketches.get(insertion.site.tensor)
        params = insertion.params if isinstance(insertion.params, QParams) else None
        tensor_range = None
        if sketch is not None and sketch.count:
            cost = None if params is None or sketch.inf else estimate_cost(sketch, params)
            tensor_range = TensorRange(
                tensor=site.tensor, sketch=sketch, params=params, cost=cost, method=site.scheme.observe.name
            )
        remarks = [
            remark
            for remark in (result.site_notes.get(site.tensor, ""), annotation_set.annotations[number].note)
            if remark
        ]
        annotation_set.annotations[number] = replace(
            annotation_set.annotations[number],
            why=site.why,
            scheme=scheme_text(site),
            note="; ".join(remarks),
            tensor_range=tensor_range,
        )
    _add_skip_reasons(annotation_set, result.skips)
    return annotation_set


def _add_skip_reasons(annotation_set: AnnotationSet, skips: Sequence[Skip]) -> None:
    for skip in skips:
        reason = f"{skip.reason} (rule {skip.rule})" if skip.rule else skip.reason
        annotation_set.skip_reasons.update(dict.fromkeys(skip.uses, reason))


def _ranges_by_tensor(range_report: RangeReport | None) -> dict[TensorRef, TensorRange]:
    return (
        {tensor_range.tensor: tensor_range for tensor_range in range_report.tensor_ranges}
        if range_report is not None
        else {}
    )


def _drawn_params(params: QParams | DynamicQParams | None) -> DrawnParams | None:
    if not isinstance(params, QParams):
        return None
    low, high = params.range.low, params.range.high
    return DrawnParams(
        scale=params.scale, zero_point=params.zero_point, axis=params.axis, block_size=params.block, low=low, high=high
    )


def _stored_annotation(stored_tensor: StoredScaleTensor) -> Annotation:
    """The badge of a tensor that keeps its scale itself."""
    stored, dtype = stored_tensor.stored, stored_tensor.output.dtype or ""
    drawn = None
    if stored.scale.size and stored.scale.size == stored.zero_point.size:
        axis = stored.axis if stored.scale.size > 1 else None
        drawn = DrawnParams(scale=stored.scale, zero_point=stored.zero_point, axis=axis)
        with suppress(ValueError):  # an int64 bias: what it represents is of no interest
            limits = IntType.parse(dtype).limits()
            scale, zero_point = stored.scale.astype(np.float64), stored.zero_point.astype(np.float64)
            drawn = replace(drawn, low=(limits[0] - zero_point) * scale, high=(limits[1] - zero_point) * scale)
    return Annotation(
        tensor=stored_tensor.tensor, name=stored_tensor.output.name, dtype=dtype, params=drawn, note=stored.details
    )


# A badge in a few words: on a drawing, in a line of text.


def annotation_text(annotation: Annotation) -> str:
    """`uint8 0.0235 z128`, `int8[64]` per channel, `int8 dynamic`; the type alone where no scale is known."""
    dtype = annotation.dtype or "?"
    if annotation.dynamic:
        return f"{dtype} dynamic"
    if annotation.params is None:
        return dtype
    scale, zero_point = annotation.params.scale, annotation.params.zero_point
    if scale.size != 1:
        return f"{dtype}[{scale.size}]"
    return f"{dtype} {scale.item():.3g}" + (f" z{int(zero_point.item())}" if zero_point.any() else "")


# Figures of quantized tensors, to be drawn as heat: columns of numbers by quantization op.
#
# A page knows no more than this. Whoever has another figure of each site adds a column.


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatColumn:
    """One figure that each quantized tensor has.

    Attributes:
        name: What it is called, in a few words.
        description: What it is.
        hot: The figure from which on it is as bad as can be.
        cold: The one from which on it does not matter; above `hot` where more is better, else below.
        unit: Its unit.
    """

    name: str
    description: str
    hot: float
    cold: float
    unit: str = "dB"


LOCAL_ERROR = HeatColumn(
    name="its own error", description="what this quantization makes against what it gets", hot=10, cold=50
)
ACCUMULATED_ERROR = HeatColumn(
    name="error so far", description="what it makes against the same tensor of the float model", hot=10, cold=50
)
SENSITIVITY = HeatColumn(
    name="at the outputs", description="what this quantization alone makes of the worst output", hot=20, cold=60
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap:
    """Figures of the quantized tensors of a model.

    Attributes:
        columns: What the figures are; the first one is shown first.
        values: For quantization ops, by graph and name, a figure for each column: infinite where there is no error at all,
            None where it is not known.
        notes: Why a figure is not known.
        summary: Lines on the whole of it, at the top of the page.
    """

    columns: tuple[HeatColumn, ...]
    values: Mapping[OpKey, Sequence[float | None]]
    notes: Mapping[OpKey, str] = field(default_factory=dict)
    summary: tuple[str, ...] = ()


def comparison_heatmap(comparison: Comparison) -> Heatmap:
    """What `compare` found of each quantized tensor."""
    has_sensitivity = any(site.sensitivity is not None for site in comparison.sites)
    return Heatmap(
        columns=(SENSITIVITY, LOCAL_ERROR, ACCUMULATED_ERROR) if has_sensitivity else (LOCAL_ERROR, ACCUMULATED_ERROR),
        values={
            (site.graph, site.op): (*([site.sensitivity] if has_sensitivity else []), site.local, site.accumulated)
            for site in comparison.sites
        },
        notes={(site.graph, site.op): site.note for site in comparison.sites if site.note},
        summary=(f"Over {pluralize(comparison.samples, 'sample')}:", *map(_output_summary, comparison.outputs)),
    )


def heatmap_data(heatmap: Heatmap, annotations: Sequence[Annotation]) -> dict[str, Any]:
    """The figures as data of the page: those that are not known as null, no error at all as "equal"."""
    values = {
        number: heatmap.values[annotation.op_key]
        for number, annotation in enumerate(annotations)
        if annotation.op_key in heatmap.values
    }
    return {
        "columns": [
            {
                "name": column.name,
                "says": column.description,
                "hot": column.hot,
                "cold": column.cold,
                "unit": column.unit,
            }
            for column in heatmap.columns
        ],
        "of": {number: [_viewer_figure(figure) for figure in figures] for number, figures in values.items()},
        "notes": {
            number: heatmap.notes[annotation.op_key]
            for number, annotation in enumerate(annotations)
            if annotation.op_key in heatmap.notes
        },
        "says": list(heatmap.summary),
    }


def _viewer_figure(value: float | None) -> float | str | None:
    if value is None or math.isnan(value):
        return None
    return {math.inf: "equal", -math.inf: "none"}.get(value, round(value, 3) if math.isfinite(value) else None)


def _output_summary(output: OutputFigures) -> str:
    """An output's figures in a line."""
    if output.problem:
        return f"{output.name}: {output.problem}"
    phrases = [f"{output.sqnr:.2f} dB" if output.sqnr is not None and math.isfinite(output.sqnr) else ""]
    phrases.append("equal" if not output.max_error else "")
    phrases.append(f"{100 * output.agreement:.2f}% agree" if output.agreement is not None else "")
    return f"{output.name}: {', '.join(filter(None, phrases)) or 'compared'}"
