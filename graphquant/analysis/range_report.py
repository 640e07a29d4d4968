"""Which range each tensor of some statistics was given, by which method, what it costs, and what others would pick."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.calibration import CALIBRATION_METHODS, sites_needing_data
from graphquant.calibration.fingerprints import fingerprints
from graphquant.errors import DataError
from graphquant.numerics import QParams, QuantizationGrid, Range
from graphquant.observers import OBSERVERS, QuantizationCost, Sketch, estimate_cost

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from graphquant.analysis.model_summary import ModelSummary
    from graphquant.calibration import Stats
    from graphquant.ir import Model, TensorRef
    from graphquant.quantize import Plan, Site, Solution
    from graphquant.quantize.rewrite import InsertedPair


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRange:
    """What a method would pick for a tensor by itself.

    Attributes:
        method: The observer.
        params: Scale and zero point.
        cost: What they cost.
    """

    method: str
    params: QParams
    cost: QuantizationCost | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRange:
    """One tensor, and the range that it was given.

    Attributes:
        tensor: The tensor.
        sketch: What calibration saw of it; None where no sample gave it a value.
        rule: The rule that quantizes it, "" for none that is known.
        method: The observer that picked the range, with its arguments; "" where that is not known.
        auto_method: For "auto" what it came to: "minmax", "mse", or "mse, widened"; else "".
        params: Scale and zero point; None where there are none.
        cost: What they cost, None where it cannot be estimated.
        alternatives: What each method would pick.
        note: A word on it: why it has no range, or with what it shares one.
    """

    tensor: TensorRef
    sketch: Sketch | None
    rule: str = ""
    method: str = ""
    auto_method: str = ""
    params: QParams | None = None
    cost: QuantizationCost | None = None
    alternatives: tuple[MethodRange, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeReport:
    """Statistics, and what was made of them.

    Attributes:
        stats: The statistics, as they are in their file.
        path: That file, None if there is none.
        model: What the model is called beside which they are shown, "" if there is none.
        matched_by_name: Whether the model says itself how tensors are quantized, so that only their names tell which is which.
        tensor_ranges: The tensors; with a model, that which loses most comes first.
    """

    stats: Stats
    path: Path | None = None
    model: str = ""
    matched_by_name: bool = False
    tensor_ranges: tuple[TensorRange, ...]


def stats_range_report(stats: Stats, path: Path | None = None) -> RangeReport:
    """Statistics by themselves, in the order of the model."""
    tensor_ranges = tuple(
        TensorRange(tensor=tensor, sketch=_nonempty_sketch(stats.sketches, tensor), note=stats.missing_reason(tensor))
        for tensor in stats.targets
    )
    return RangeReport(stats=stats, path=path, tensor_ranges=tensor_ranges)


def plan_range_report(
    plan: Plan,
    solution: Solution,
    sketches: Mapping[TensorRef, Sketch],
    stats: Stats,
    path: Path | None = None,
    model: str = "",
    *,
    compare_methods: bool = False,
) -> RangeReport:
    """What a plan gives each of its sites that statistics tell about.

    Args:
        plan: The plan.
        solution: The scales that were found for it.
        sketches: What the statistics have of its tensors, under the plan's names.
        stats: The statistics.
        path: Their file.
        model: What the plan's model is called.
        compare_methods: Whether to find out what other methods would pick, which takes some 50 ms a tensor.
    """
    unranged_sites = set(map(id, sites_needing_data(plan)))
    tensor_ranges = []
    for index, site in enumerate(plan.sites):
        if site.parameter or (site.tensor not in sketches and id(site) not in unranged_sites):
            continue
        params, skip = solution.params.get(index), solution.skips.get(index)
        tensor_range = TensorRange(
            tensor=site.tensor,
            sketch=_nonempty_sketch(sketches, site.tensor),
            rule=site.rule,
            method=_describe_method(site),
            params=params if isinstance(params, QParams) else None,
            note=skip.reason if skip else "; ".join(solution.notes.get(index, ())),
        )
        tensor_ranges.append(_with_costs(tensor_range, site.scheme.grid, compare_methods=compare_methods))
    return RangeReport(stats=stats, path=path, model=model, tensor_ranges=_worst_first(tensor_ranges))


def sketches_of_fixed_ranges(
    stats: Stats, prepared: Model, plan: Plan, known_fingerprints: Mapping[TensorRef, str]
) -> dict[TensorRef, Sketch]:
    """The statistics, as far as there are any, of tensors that get their range from elsewhere: from a fixed scale.

    Args:
        stats: The statistics.
        prepared: The model that the plan names.
        plan: The plan.
        known_fingerprints: Cones that are known otherwise; see `graphquant.calibration.kept`.
    """
    calibrated_tensors = {site.tensor for site in sites_needing_data(plan)}
    live = set(prepared.reachable_graphs())
    fixed_tensors = [
        planned_site.tensor
        for planned_site in plan.sites
        if not planned_site.parameter
        and planned_site.tensor.graph in live
        and planned_site.tensor not in calibrated_tensors
    ]
    if not fixed_tensors:
        return {}
    tensor_by_fingerprint = {
        target.fingerprint: tensor for tensor, target in stats.targets.items() if target.axis is None
    }
    fixed_fingerprints = fingerprints(prepared, fixed_tensors, known_fingerprints)
    stats_tensors = {
        tensor: tensor_by_fingerprint[fixed_fingerprints[tensor]]
        for tensor in fixed_tensors
        if fixed_fingerprints[tensor] in tensor_by_fingerprint
    }
    return {
        tensor: stats.sketches[stats_tensor]
        for tensor, stats_tensor in stats_tensors.items()
        if stats_tensor in stats.sketches
    }


def model_range_report(
    summary: ModelSummary, stats: Stats, path: Path | None = None, *, compare_methods: bool = False
) -> RangeReport:
    """What the quantization ops of a model do to the tensors of statistics that are called the same.

    Raises:
        DataError: None is called the same.
    """
    tensor_ranges = []
    for quantization_op in summary.quantization_ops:
        if quantization_op.tensor not in stats.targets:
            continue
        params = quantization_op.params if isinstance(quantization_op.params, QParams) else None
        tensor_range = TensorRange(
            tensor=quantization_op.tensor,
            sketch=_nonempty_sketch(stats.sketches, quantization_op.tensor),
            rule=quantization_op.rule,
            params=params,
            note=stats.missing_reason(quantization_op.tensor) or ("" if params else "its range is that of each run"),
        )
        tensor_ranges.append(
            _with_costs(tensor_range, _grid_of_params(params) if params else None, compare_methods=compare_methods)
        )
    if not tensor_ranges:
        raise DataError(
            "The statistics are of another model, and this one quantizes none of their tensors. Give the model that"
            " they were made of, or one that insert made from it."
        )
    model_name = str(summary.model.path or "the model")
    return RangeReport(
        stats=stats, path=path, model=model_name, matched_by_name=True, tensor_ranges=_worst_first(tensor_ranges)
    )


def _worst_first(tensor_ranges: Iterable[TensorRange]) -> tuple[TensorRange, ...]:
    return tuple(
        sorted(
            tensor_ranges,
            key=lambda tensor_range: (tensor_range.cost is None, tensor_range.cost.sqnr if tensor_range.cost else 0.0),
        )
    )


def _with_costs(tensor_range: TensorRange, grid: QuantizationGrid | None, *, compare_methods: bool) -> TensorRange:
    """The pick with what it costs, and beside what other methods would pick on `grid` for the tensor by itself."""
    if tensor_range.params is None or tensor_range.sketch is None or tensor_range.sketch.inf or grid is None:
        return tensor_range
    cost = estimate_cost(tensor_range.sketch, tensor_range.params)
    if cost is None:
        return tensor_range
    methods = (
        CALIBRATION_METHODS if compare_methods else ("auto", "minmax", "mse") if tensor_range.method == "auto" else ()
    )
    ranges = {
        name: method_range
        for name in methods
        if (method_range := _range_by_method(name, tensor_range.sketch, grid)) is not None
    }
    auto_method = _resolve_auto_method(ranges) if tensor_range.method == "auto" else ""
    if not compare_methods:
        return replace(tensor_range, cost=cost, auto_method=auto_method)
    alternatives = []
    for name, alternative_range in ranges.items():
        params = _params_for_range(alternative_range, tensor_range.params, grid)
        alternatives.append(MethodRange(method=name, params=params, cost=estimate_cost(tensor_range.sketch, params)))
    return replace(tensor_range, cost=cost, auto_method=auto_method, alternatives=tuple(alternatives))


def _range_by_method(method: str, sketch: Sketch, grid: QuantizationGrid) -> Range | None:
    """What an observer picks with the arguments that it has by default; None where it cannot."""
    observer = OBSERVERS[method]
    defaults = {name: argument.default for name, argument in observer.arguments.items()}
    try:
        return observer.choose_range(
            sketch, grid, {name: value for name, value in defaults.items() if value is not None}
        )
    except DataError:
        return None


def _params_for_range(method_range: Range, chosen: QParams, grid: QuantizationGrid) -> QParams:
    """Scale and zero point for a range; unsigned ones that were chosen with no zero point count from 0.0."""
    if grid.symmetric and grid.type.symmetric_zero_point and not chosen.zero_point.any():
        return replace(grid, symmetric=False).qparams(Range(np.zeros(()), np.maximum(method_range.high, 0.0)))
    return grid.qparams(method_range)


def _grid_of_params(params: QParams) -> QuantizationGrid:
    """What scale and zero point tell of their scheme."""
    symmetric = bool((params.zero_point == params.type.symmetric_zero_point).all())
    return QuantizationGrid(type=params.type, symmetric=symmetric, narrow=params.narrow)


def _resolve_auto_method(ranges: Mapping[str, Range]) -> str:
    """What the range of `auto` came to."""
    auto = ranges.get("auto")
    if auto is None:
        return ""
    return next((name for name in ("minmax", "mse") if ranges.get(name) == auto), "mse, widened")


def _describe_method(site: Site) -> str:
    """The observer of a site, with the arguments that its rule gives."""
    if site.scale is not None or site.range is not None:
        return "given by the plan"
    observe = site.scheme.observe
    return " ".join([observe.name, *(f"{value:g}" for value in observe.arguments.values())])


def _nonempty_sketch(sketches: Mapping[TensorRef, Sketch], tensor: TensorRef) -> Sketch | None:
    sketch = sketches.get(tensor)
    return sketch if sketch is not None and sketch.count else None


# What rounding and clipping cost each quantized activation by itself, estimated from its statistics.

LOW_SQNR = 30.0
"""Signal to noise in decibels below which a tensor is worth a word; 8 bits mostly leave 35 to 50."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What one tensor loses.

    Attributes:
        tensor: The tensor.
        sqnr: Its signal to quantization noise in decibels, over all calibration samples.
        clipped: Share of its values, 0 to 1, that is cut off.
    """

    tensor: TensorRef
    sqnr: float
    clipped: float


def activation_sqnr(inserted: Iterable[InsertedPair], sketches: Mapping[TensorRef, Sketch]) -> tuple[Loss, ...]:
    """The activations with statistics, that which loses most first; those that share another's scale are left out.

    It says nothing of weights, nor of what a loss does to the model's outputs: ops behind it make more or less of it.
    """
    measured = []
    for insertion in inserted:
        sketch = sketches.get(insertion.site.tensor)
        if sketch is None or insertion.site.tie or not isinstance(insertion.params, QParams):
            continue
        cost = estimate_cost(sketch, insertion.params)
        if cost is not None and math.isfinite(cost.sqnr):
            measured.append(Loss(tensor=insertion.site.tensor, sqnr=cost.sqnr, clipped=cost.clipped))
    return tuple(sorted(measured, key=lambda loss: loss.sqnr))
