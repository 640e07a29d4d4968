"""Quantization annotations of a drawing, their labels, and heatmaps over them.

Annotations come from a quantized model, from a plan, or from a result of `insert`. A heatmap adds metrics to each of
them: a page knows only its columns, so a new metric of a site is one more column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.analysis.range_report import RangeReport, TensorRange
from graphquant.numerics import Array, DynamicQParams, IntType, QParams
from graphquant.observers import estimate_cost
from graphquant.visualize.tables import pluralize
from graphquant.visualize.text import scheme_text

if TYPE_CHECKING:
    from graphquant.analysis.comparison import Comparison, OutputFigures
    from graphquant.analysis.model_summary import ModelSummary, StoredScaleTensor
    from graphquant.api.result import Result
    from graphquant.ir import OpKey, TensorRef, Use
    from graphquant.quantize import Plan, Skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnParams:
    """Scale and zero point as they are drawn."""

    scale: Array  # float32, one or several, real units per step
    zero_point: Array  # integers in steps, as many as scales
    axis: int | None = None  # channel or block axis, if there are several scales
    block_size: int | None = None  # number of elements along `axis` that share a scale; None without blocks
    # smallest representable value in real units, one or several; empty if unknown
    low: Array = field(default_factory=partial(np.empty, 0))
    high: Array = field(default_factory=partial(np.empty, 0))  # largest representable value, likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """Quantization of one tensor for its readers, present in the model or planned."""

    tensor: TensorRef  # the float tensor, or the constant that is stored as integers
    name: str = ""  # the file's own name of the tensor, if scales are stored in tensors
    dtype: str = ""  # type of the quantized values, "" if unknown
    # scale and zero point; None if unknown, not calibrated yet, or computed in each run
    params: DrawnParams | None = None
    dynamic: bool = False  # True if scale and zero point are computed in each run
    rule: str = ""  # name of the rule, "" if unknown
    why: str = ""  # reason that the rule states
    scheme: str = ""  # text of the scheme, "" if unknown
    note: str = ""  # remark, for example a shared scale, a learned range or a rounding mode
    tensor_range: TensorRange | None = None  # calibration statistics and the cost of the range
    op_key: tuple[str, str] = ("", "")  # graph and name of the quantization op; two empty strings if the model has none


@dataclass(slots=True, kw_only=True)
class AnnotationSet:
    """Annotations and their positions in a model."""

    # the dictionaries below hold indexes into this list
    annotations: list[Annotation] = field(default_factory=list)
    # index by (graph, op) of quantization ops in the model
    by_op: dict[tuple[str, str], int] = field(default_factory=dict)
    by_use: dict[Use, int] = field(default_factory=dict)  # index by use that is not rerouted yet
    by_tensor: dict[TensorRef, int] = field(default_factory=dict)  # index by tensor that stores its own scale
    skip_reasons: dict[Use, str] = field(default_factory=dict)  # reason by use that a rule matched and that stays float
    # reason by (graph, op) of weighted ops that stay float, "" if quantized; empty for a plan
    float_reasons: dict[tuple[str, str], str] = field(default_factory=dict)


def annotate_model(
    summary: ModelSummary, rule_reasons: Mapping[str, str], range_report: RangeReport | None = None
) -> AnnotationSet:
    """Annotate the quantization in a model, with reasons by rule name, and statistics matched to tensors by name."""
    annotation_set = AnnotationSet()
    ranges_by_tensor = _ranges_by_tensor(range_report)
    for reading in summary.quantization_ops:
        annotation_set.by_op[reading.graph, reading.op] = len(annotation_set.annotations)
        remarks = [f"rounds {reading.rounding}"] if reading.rounding else []
        remarks += ["its range is learned"] if reading.learned else []
        annotation = Annotation(
            tensor=reading.tensor,
            dtype=reading.params.type.name if reading.params is not None else "",
            params=_drawn_params(reading.params),
            dynamic=reading.params is None or isinstance(reading.params, DynamicQParams),
            rule=reading.rule,
            why=rule_reasons.get(reading.rule, ""),
            note="; ".join(remarks),
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
    """Annotate the quantization that a plan inserts."""
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
    """Annotate the result of `insert`, given the summary of the rewritten model."""
    annotation_set = annotate_model(summary, {site.rule: site.why for site in result.plan.sites})
    sketches = result.stats.sketches if result.stats is not None else {}
    for insertion in result.inserted:
        if (number := annotation_set.by_op.get(insertion.output[:2])) is None:
            continue
        site, sketch = insertion.site, sketches.get(insertion.site.tensor)
        params = insertion.params if isinstance(insertion.params, QParams) else None
        tensor_range = None
        if sketch is not None and sketch.count:
            cost = None if params is None or sketch.inf else estimate_cost(sketch, params)
            tensor_range = TensorRange(
                tensor=site.tensor, sketch=sketch, params=params, cost=cost, method=site.scheme.observe.name
            )
        remarks = filter(None, (result.site_notes.get(site.tensor, ""), annotation_set.annotations[number].note))
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
    return {} if range_report is None else {entry.tensor: entry for entry in range_report.tensor_ranges}


def _drawn_params(params: QParams | DynamicQParams | None) -> DrawnParams | None:
    if not isinstance(params, QParams):
        return None
    low, high = params.range.low, params.range.high
    return DrawnParams(
        scale=params.scale, zero_point=params.zero_point, axis=params.axis, block_size=params.block, low=low, high=high
    )


def _stored_annotation(stored_tensor: StoredScaleTensor) -> Annotation:
    stored, dtype = stored_tensor.stored, stored_tensor.output.dtype or ""
    drawn = None
    if stored.scale.size and stored.scale.size == stored.zero_point.size:
        axis = stored.axis if stored.scale.size > 1 else None
        block = stored.block or None
        drawn = DrawnParams(scale=stored.scale, zero_point=stored.zero_point, axis=axis, block_size=block)
        with suppress(ValueError):  # an int64 bias: its range is of no interest
            limits = IntType.parse(dtype).limits()
            scale, zero_point = stored.scale.astype(np.float64), stored.zero_point.astype(np.float64)
            drawn = replace(drawn, low=(limits[0] - zero_point) * scale, high=(limits[1] - zero_point) * scale)
    return Annotation(
        tensor=stored_tensor.tensor, name=stored_tensor.output.name, dtype=dtype, params=drawn, note=stored.details
    )


def annotation_text(annotation: Annotation) -> str:
    """Return the label of an annotation, for example `uint8 0.0235 z128`, `int8[64]` per channel, or `int8 dynamic`."""
    dtype = annotation.dtype or "?"
    if annotation.dynamic:
        return f"{dtype} dynamic"
    if annotation.params is None:
        return dtype
    scale, zero_point = annotation.params.scale, annotation.params.zero_point
    if scale.size != 1:
        return f"{dtype}[{scale.size}]"
    return f"{dtype} {scale.item():.4g}" + (f" z{int(zero_point.item())}" if zero_point.any() else "")


@dataclass(frozen=True, slots=True)
class HeatColumn:
    """A metric of each quantized tensor: as bad as possible from `hot` on, and harmless from `cold` on."""

    name: str
    description: str
    hot: float
    cold: float
    unit: str = "dB"


LOCAL_ERROR = HeatColumn("its own error", "error of this quantization alone, against its input", hot=10, cold=50)
ACCUMULATED_ERROR = HeatColumn("error so far", "error against the same tensor of the float model", hot=10, cold=50)
SENSITIVITY = HeatColumn("at the outputs", "SQNR of the worst output with only this quantization", hot=20, cold=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap:
    """Metrics of the quantized tensors of a model."""

    columns: tuple[HeatColumn, ...]  # the metrics; the first one is shown first
    # one value per column, by (graph, op) of the quantization op: infinite if exact, None if unknown
    values: Mapping[OpKey, Sequence[float | None]]
    notes: Mapping[OpKey, str] = field(default_factory=dict)  # reason for an unknown value
    summary: tuple[str, ...] = ()  # lines for the top of the page


def comparison_heatmap(comparison: Comparison) -> Heatmap:
    """Return the heatmap of a comparison."""
    has_sensitivity = any(site.sensitivity is not None for site in comparison.sites)
    first = 0 if has_sensitivity else 1
    return Heatmap(
        columns=(SENSITIVITY, LOCAL_ERROR, ACCUMULATED_ERROR)[first:],
        values={
            (site.graph, site.op): (site.sensitivity, site.local, site.accumulated)[first:] for site in comparison.sites
        },
        notes={(site.graph, site.op): site.note for site in comparison.sites if site.note},
        summary=(f"Over {pluralize(comparison.samples, 'sample')}:", *map(_output_summary, comparison.outputs)),
    )


def heatmap_data(heatmap: Heatmap, annotations: Sequence[Annotation]) -> dict[str, Any]:
    """Return a heatmap as viewer data: null for unknown values, "equal" for exact ones."""
    keys = [(number, annotation.op_key) for number, annotation in enumerate(annotations)]
    values = {number: heatmap.values[key] for number, key in keys if key in heatmap.values}
    return {
        "columns": [asdict(column) for column in heatmap.columns],
        "values": {number: list(map(_viewer_figure, metrics)) for number, metrics in values.items()},
        "notes": {number: heatmap.notes[key] for number, key in keys if key in heatmap.notes},
        "summary": list(heatmap.summary),
    }


def _viewer_figure(value: float | None) -> float | str | None:
    if value is None or math.isnan(value):
        return None
    return {math.inf: "equal", -math.inf: "none"}.get(value, round(value, 3) if math.isfinite(value) else None)


def _output_summary(output: OutputFigures) -> str:
    if output.problem:
        return f"{output.name}: {output.problem}"
    phrases = [f"{output.sqnr:.2f} dB"] if output.sqnr is not None and math.isfinite(output.sqnr) else []
    phrases += [] if output.max_error else ["equal"]
    phrases += [] if output.agreement is None else [f"{100 * output.agreement:.2f}% agree"]
    return f"{output.name}: {', '.join(phrases) or 'compared'}"
