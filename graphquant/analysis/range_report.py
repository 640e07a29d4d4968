"""Range report: the range of each calibrated tensor, its observer, its cost, and the ranges of other observers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphquant.calibration.targets import CALIBRATION_METHODS, fingerprints, preserved_fingerprints, sites_needing_data
from graphquant.errors import DataError
from graphquant.numerics import QParams, QuantizationGrid, Range
from graphquant.observers import OBSERVERS, QuantizationCost, Sketch, estimate_cost, least_sqnr

if TYPE_CHECKING:
    from graphquant.analysis.model_summary import ModelSummary
    from graphquant.calibration.stats import Stats
    from graphquant.ir import Model, TensorRef
    from graphquant.quantize import Plan, Site, Solution
    from graphquant.quantize.rewrite import InsertedPair


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRange:
    """Range that an observer would choose for a tensor alone."""

    method: str
    params: QParams  # scale and zero point
    cost: QuantizationCost | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRange:
    """One tensor with its range."""

    tensor: TensorRef
    sketch: Sketch | None  # Its sketch; None if no sample reached it.
    rule: str = ""  # rule that quantizes it, "" if unknown
    method: str = ""  # observer with its arguments, "" if unknown
    auto_method: str = ""  # choice of the observer "auto": "minmax", "mse", or "mse, widened"; else ""
    params: QParams | None = None  # scale and zero point, or None
    cost: QuantizationCost | None = None  # Their cost; None if it cannot be estimated.
    alternatives: tuple[MethodRange, ...] = ()  # ranges of the other observers
    note: str = ""  # reason for a missing range, or the tensor that shares it


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeReport:
    """Statistics with the ranges derived from them."""

    stats: Stats
    path: Path | None = None  # their file, or None
    model: str = ""  # name of the model, or ""
    matched_by_name: bool = False  # True if tensors of a quantized model are matched by name alone
    tensor_ranges: tuple[TensorRange, ...]  # the tensors; with a model, by loss, the largest first


def stats_range_report(stats: Stats, path: Path | None = None) -> RangeReport:
    """Report statistics without a model, in graph order."""
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
    """Report the ranges of the sites of a plan.

    `sketches` are by the plan's tensor names. `compare_methods` computes ranges of other observers, 50 ms per tensor.
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


def sketches_of_fixed_ranges(stats: Stats, source: Model, prepared: Model, plan: Plan) -> dict[TensorRef, Sketch]:
    """Sketches of tensors whose range comes from a fixed scale."""
    calibrated_tensors = {site.tensor for site in sites_needing_data(plan)}
    live = set(prepared.reachable_graphs())
    fixed_tensors = [
        site.tensor
        for site in plan.sites
        if not site.parameter and site.tensor.graph in live and site.tensor not in calibrated_tensors
    ]
    if not fixed_tensors:
        return {}
    tensor_by_fingerprint = {
        target.fingerprint: tensor for tensor, target in stats.targets.items() if target.axis is None
    }
    fixed_fingerprints = fingerprints(prepared, fixed_tensors, preserved_fingerprints(source, prepared))
    observed_tensors = {tensor: tensor_by_fingerprint.get(fixed_fingerprints[tensor]) for tensor in fixed_tensors}
    return {
        tensor: stats.sketches[observed]
        for tensor, observed in observed_tensors.items()
        if observed is not None and observed in stats.sketches
    }


def model_range_report(
    summary: ModelSummary, stats: Stats, path: Path | None = None, *, compare_methods: bool = False
) -> RangeReport:
    """Report the quantization ops of a model for the tensors of the same name."""
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
        grid = None
        if params is not None:
            symmetric = bool((params.zero_point == params.type.symmetric_zero_point).all())
            grid = QuantizationGrid(type=params.type, symmetric=symmetric, narrow=params.narrow)
        tensor_ranges.append(_with_costs(tensor_range, grid, compare_methods=compare_methods))
    if not tensor_ranges:
        raise DataError(
            "The statistics are of another model, and this one quantizes none of their tensors. Pass the calibrated"
            " model, or a model that insert quantized from it."
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
    """Add the cost, and the ranges of other observers on `grid`."""
    if tensor_range.params is None or tensor_range.sketch is None or tensor_range.sketch.inf or grid is None:
        return tensor_range
    if (cost := estimate_cost(tensor_range.sketch, tensor_range.params)) is None:
        return tensor_range
    is_auto = tensor_range.method == "auto"
    methods = CALIBRATION_METHODS if compare_methods else ("auto", "minmax", "mse") if is_auto else ()
    ranges = {
        name: method_range
        for name in methods
        if (method_range := _range_by_method(name, tensor_range.sketch, grid)) is not None
    }
    auto_method = ""
    if is_auto and (auto := ranges.get("auto")) is not None:
        auto_method = next((name for name in ("minmax", "mse") if ranges.get(name) == auto), "mse, widened")
    alternatives = []
    for name, alternative_range in ranges.items() if compare_methods else ():
        if grid.symmetric and grid.type.symmetric_zero_point and not tensor_range.params.zero_point.any():
            # An unsigned type without zero point starts at 0.
            high = np.maximum(alternative_range.high, 0.0)
            params = replace(grid, symmetric=False).qparams(Range(np.zeros(()), high))
        else:
            params = grid.qparams(alternative_range)
        alternatives.append(MethodRange(method=name, params=params, cost=estimate_cost(tensor_range.sketch, params)))
    return replace(tensor_range, cost=cost, auto_method=auto_method, alternatives=tuple(alternatives))


def _range_by_method(method: str, sketch: Sketch, grid: QuantizationGrid) -> Range | None:
    """Range of an observer with default arguments; None if it cannot give one."""
    observer = OBSERVERS[method]
    defaults = {name: argument.default for name, argument in observer.arguments.items() if argument.default is not None}
    try:
        return observer.choose_range(sketch, grid, defaults)
    except DataError:
        return None


def _describe_method(site: Site) -> str:
    """Observer of a site with the arguments of its rule."""
    if site.has_given_range:
        return "given by the plan"
    observe = site.scheme.observe
    return " ".join([observe.name, *(f"{value:g}" for value in observe.arguments.values())])


def _nonempty_sketch(sketches: Mapping[TensorRef, Sketch], tensor: TensorRef) -> Sketch | None:
    sketch = sketches.get(tensor)
    return sketch if sketch is not None and sketch.count else None


# The next part estimates the SQNR of each quantized activation from its sketch alone.


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Quantization loss of one tensor."""

    tensor: TensorRef
    sqnr: float  # SQNR in dB over all calibration samples
    clipped: float  # share of clipped values, 0 to 1


def activation_sqnr(
    inserted: Iterable[InsertedPair], sketches: Mapping[TensorRef, Sketch], limit: float = math.inf
) -> tuple[Loss, ...]:
    """Estimate the SQNR of activations with statistics below `limit` dB, the lowest first, without shared scales.

    Weights are not covered. Later ops may amplify or attenuate the error, so the outputs can lose more or less.
    """
    measured = []
    for insertion in inserted:
        sketch = sketches.get(insertion.site.tensor)
        if sketch is None or insertion.site.tie or not isinstance(insertion.params, QParams):
            continue
        if limit < math.inf and least_sqnr(sketch, insertion.params) >= limit:  # takes a tenth of the estimate's time
            continue
        cost = estimate_cost(sketch, insertion.params)
        if cost is not None and math.isfinite(cost.sqnr) and cost.sqnr < limit:
            measured.append(Loss(tensor=insertion.site.tensor, sqnr=cost.sqnr, clipped=cost.clipped))
    return tuple(sorted(measured, key=lambda loss: loss.sqnr))
