"""The range of each site by itself: from the plan, the rule, the weight's value or the calibration data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import DataError
from graphquant.ir import FLOAT_TYPES, Model, Parameters, require_finite_weight
from graphquant.numerics import (
    SMALLEST_SCALE,
    Array,
    QParams,
    Range,
    block_scale_shape,
    iter_blocks,
    qparams_from_scale,
)
from graphquant.observers import EMPTY_SKETCH, OBSERVERS, Sketch, sketch_values
from graphquant.quantize.plan import SkipCode
from graphquant.quantize.solver_state import SolverState, starts_at_zero, takes_original_scale
from graphquant.quantize.ties import solve_block_scales

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphquant.ir import TensorRef
    from graphquant.quantize.plan import Site


TAKES_INFINITE_VALUES = "it has infinite values, as masks do, which integers cannot represent"


def find_site_ranges(
    state: SolverState, sketches: Mapping[TensorRef, Sketch], unobservable: Mapping[TensorRef, str]
) -> None:
    """Give each site that follows no other one its own range, the scale from the plan, or a skip.

    Raises:
        ModelError: A weight holds NaN or infinity.
    """
    for index, site in enumerate(state.sites):
        if site.scheme.range == "dynamic":
            continue
        if site.scale is None and (
            takes_original_scale(site) or (site.scheme.observe.name == "bias" and site.range is None)
        ):
            continue
        try:
            if site.parameter and has_explicit_range(site):
                _check_weight_is_finite(state.parameters.value(site.tensor), site)
            if site.scale is not None:
                state.params[index] = _params_given_by_plan(site, site.scale)
            else:
                value_range = _find_site_range(state, index, sketches)
                _check_zero_point_available(site, value_range)
                state.ranges[index] = value_range
                if site.scheme.block_size is not None:
                    solve_block_scales(state, index)
        except DataError as error:
            state.skip_site(index, SkipCode.RANGE, unobservable.get(site.tensor, str(error)))


def has_explicit_range(site: Site) -> bool:
    """Return True if the plan or the rule gives range or scale, so that no value is needed for it."""
    return site.scale is not None or site.range is not None or not OBSERVERS[site.scheme.observe.name].needs_values


def _check_weight_is_finite(value: Array | None, site: Site) -> None:
    """Refuse a weight that is not finite: quantizing it with any scale would hide that."""
    if value is not None and value.dtype.name in FLOAT_TYPES:
        if np.isinf(value).any() and not np.isnan(value).any():
            raise DataError(TAKES_INFINITE_VALUES)
        require_finite_weight(value, site.tensor)


def _check_zero_point_available(site: Site, value_range: Range) -> None:
    """Refuse negative values if the scheme asks for a zero point and the family has none."""
    if starts_at_zero(site) and site.scheme.zero == "asymmetric" and (value_range.low < 0).any():
        raise DataError(
            f"it has negative values, but {site.scheme.family} has no zero point; use signed integers with"
            ' zero = "symmetric", or the family fake-quant'
        )


def _find_site_range(state: SolverState, index: int, sketches: Mapping[TensorRef, Sketch]) -> Range:
    """Return the range of the site, from the plan, the rule, the weight or the data, in the shape of its scales."""
    site = state.sites[index]
    if site.range is not None:
        value_range = Range(np.asarray(site.range[0]), np.asarray(site.range[1]))
    else:
        sketches_of_site = _sketches_of_site(state, index, sketches)
        if any(site_sketch.nan for site_sketch in sketches_of_site):
            state.add_note(
                index,
                f"{sum(site_sketch.nan for site_sketch in sketches_of_site)} NaN values were ignored",
            )
        value_range = _apply_observer(site, sketches_of_site)
    if site.axis is not None and (value_range.low.ndim == 0 or site.scheme.block_size is not None):
        shape = _scale_shape(state.model, state.parameters, site, site.axis)
        expand = np.broadcast_to if value_range.low.ndim == 0 else np.reshape
        return Range(expand(value_range.low, shape), expand(value_range.high, shape))
    if site.axis is None and value_range.low.ndim:
        return Range(value_range.low.min(), value_range.high.max())
    return value_range


def _apply_observer(site: Site, sketches_of_site: Sequence[Sketch]) -> Range:
    """Apply the scheme's observer to one sketch, or to one per channel."""
    scheme = site.scheme
    pick, arguments = OBSERVERS[scheme.observe.name].choose_range, scheme.observe.arguments
    ranges = [pick(site_sketch, scheme.grid, arguments) for site_sketch in sketches_of_site]
    if len(ranges) == 1:
        return ranges[0]
    return Range(
        np.array([channel_range.low for channel_range in ranges]),
        np.array([channel_range.high for channel_range in ranges]),
    )


def _sketches_of_site(state: SolverState, index: int, sketches: Mapping[TensorRef, Sketch]) -> list[Sketch]:
    """Return the sketch of the site's values, or one per channel if the observer needs histograms."""
    site = state.sites[index]
    observer = OBSERVERS[site.scheme.observe.name]
    if not observer.needs_values:
        return [EMPTY_SKETCH]
    if site.parameter:
        value, bits = _read_quantizable_weight(state, index), observer.required_bits(site.scheme.type)
        if site.axis is not None and site.scheme.block_size is not None:
            return [_sketch_blocks(value, site.axis, site.scheme.block_size)]
        if site.axis is None or not bits:
            return [sketch_values(value, site.axis, bits=bits)]
        return [sketch_values(channel, bits=bits) for channel in np.moveaxis(value, site.axis, 0)]
    if site.tensor in sketches and sketches[site.tensor].empty_arrays and not sketches[site.tensor].count:
        raise DataError("it was empty for every calibration sample that reached it")
    if site.tensor not in sketches or not sketches[site.tensor].count:
        raise DataError("no calibration sample reached it")
    if sketches[site.tensor].inf:
        raise DataError(TAKES_INFINITE_VALUES)
    return [sketches[site.tensor]]


def _sketch_blocks(value: Array, axis: int, block: int) -> Sketch:
    """Return the sketch of a weight with limits per block."""
    block_sketches = [sketch_values(chunk, 0) for chunk in iter_blocks(value, axis, block)]
    low, high = (
        np.concatenate([getattr(block_sketch, end) for block_sketch in block_sketches]) for end in ("low", "high")
    )
    count, nan, inf = (
        sum(getattr(block_sketch, name) for block_sketch in block_sketches) for name in ("count", "nan", "inf")
    )
    return Sketch(low=low, high=high, count=count, nan=nan, inf=inf)


def _read_quantizable_weight(state: SolverState, index: int) -> Array:
    """Return the value of the parameter if it can be quantized, zeros if all of it is denormal.

    Denormal weights would get denormal scales from the kernels, and a bias would not fit those.
    """
    site = state.sites[index]
    value = state.parameters.value(site.tensor)
    if value is None:
        raise DataError(
            "it has no single value in the model's files (no checkpoint, ops that cannot be evaluated, or calls that"
            " pass different weights)"
        )
    if value.dtype.name not in FLOAT_TYPES:
        raise DataError(f"its value has type {value.dtype.name}, which is not a float type")
    if value.size == 0:
        raise DataError("it has no elements")
    if site.view is not None:
        if value.size != math.prod(site.view):
            raise DataError(f"its value has shape {value.shape}, but the plan views it as {site.view}")
        value = value.reshape(site.view)
    if site.axis is not None and site.axis >= value.ndim:
        raise DataError(f"its value has {value.ndim} axes, but the plan names axis {site.axis}")
    _check_weight_is_finite(value, site)
    largest = float(max(value.max(), -value.min()))  # not of abs(value), which is as large again
    if 0 < largest < SMALLEST_SCALE:
        state.record_change(
            index, f"its values, at most {largest:.3g}, are denormal and treated as zeros, as kernels do"
        )
        return np.zeros_like(value)
    return value


def _scale_shape(model: Model, parameters: Parameters, site: Site, axis: int) -> tuple[int, ...]:
    """Return the shape of the scales of a site with an axis: (C,), or that of its blocks."""
    shape, block = site.view or model.output(site.tensor).shape, site.scheme.block_size
    if shape is None or shape[axis] is None or (block is not None and None in shape):
        value = parameters.value(site.tensor)
        if value is None or axis >= value.ndim:
            raise DataError("the number of its channels is unknown")
        shape = value.shape
    sizes = tuple(size or 0 for size in shape)
    return (sizes[axis],) if block is None else block_scale_shape(sizes, axis, block)


def _params_given_by_plan(site: Site, scales: tuple[float, ...]) -> QParams:
    """Return scale and zero point from the plan. A symmetric scheme needs no zero point."""
    scale = np.asarray(scales, np.float32)
    default = (
        site.scheme.type.symmetric_zero_point if site.scheme.zero == "symmetric" and not starts_at_zero(site) else 0
    )
    zero_points = np.asarray(
        site.zero_point if site.zero_point is not None else np.full(scale.shape, default), np.int32
    )
    if site.axis is None:
        scale, zero_points = scale.reshape(()), zero_points.reshape(())
    return qparams_from_scale(scale, zero_points, site.scheme.type, narrow=site.scheme.narrow, axis=site.axis)
