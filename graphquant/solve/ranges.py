"""The range that each site would have by itself: from the plan, the rule, the weight's value or the data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import DataError
from graphquant.ir import FLOAT_TYPES, Model, Parameters, readable
from graphquant.numerics import SMALLEST_SCALE, Array, QParams, Range, blocks_of, from_scale, some_in_blocks
from graphquant.sketch import EMPTY, OBSERVERS, Sketch, sketch
from graphquant.solve.draft import Draft, follows, from_zero
from graphquant.solve.ties import settle_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphquant.ir import TensorRef
    from graphquant.plans import Site

INFINITE = "it takes infinite values, as masks do, and integers stand for none"


def find_ranges(draft: Draft, sketches: Mapping[TensorRef, Sketch], unwatchable: Mapping[TensorRef, str]) -> None:
    """Gives each site that follows no other its own range, or the scale that the plan gives, or a skip.

    Raises:
        ModelError: A weight holds NaN or infinity.
    """
    for index, site in enumerate(draft.sites):
        if site.scheme.range == "dynamic":
            continue
        if site.scale is None and (follows(site) or (site.scheme.observe.name == "bias" and site.range is None)):
            continue
        try:
            if site.parameter and given(site):
                _check_finite(draft.parameters.value(site.tensor), site)
            if site.scale is not None:
                draft.params[index] = _dictated(site, site.scale)
            else:
                found = _range(draft, index, sketches)
                _check_zero(site, found)
                draft.ranges[index] = found
                if site.scheme.block_size is not None:
                    settle_blocks(draft, index)
        except DataError as error:
            draft.skip(index, unwatchable.get(site.tensor, str(error)))


def given(site: Site) -> bool:
    """Whether the plan or the rule says range or scale, so that no value is looked at for them."""
    return site.scale is not None or site.range is not None or not OBSERVERS[site.scheme.observe.name].needs_values


def _check_finite(value: Array | None, site: Site) -> None:
    """Refuses a weight that is not finite: integers, with whatever scale, would hide that."""
    if value is not None and value.dtype.name in FLOAT_TYPES:
        if np.isinf(value).any() and not np.isnan(value).any():
            raise DataError(INFINITE)
        readable(value, site.tensor)


def _check_zero(site: Site, found: Range) -> None:
    """Refuses negative values where only a zero point could hold them and the scheme asks for one."""
    if from_zero(site) and site.scheme.zero == "asymmetric" and (found.low < 0).any():
        raise DataError(
            f"it has negative values, and {site.scheme.family} has no zero point; take signed integers with"
            ' zero = "symmetric", or the family fake-quant'
        )


def _range(draft: Draft, index: int, sketches: Mapping[TensorRef, Sketch]) -> Range:
    """The range that the plan, the rule, the weight or the data gives the site: of the shape that its scales have."""
    site = draft.sites[index]
    if site.range is not None:
        found = Range(np.asarray(site.range[0]), np.asarray(site.range[1]))
    else:
        stats = _statistics(draft, index, sketches)
        if any(one.nan for one in stats):
            draft.note(index, f"{sum(one.nan for one in stats)} NaN values were left out of the range")
        found = _observed(site, stats)
    if site.axis is not None and (found.low.ndim == 0 or site.scheme.block_size is not None):
        shape = _scales(draft.model, draft.parameters, site, site.axis)
        spread = np.broadcast_to if found.low.ndim == 0 else np.reshape
        return Range(spread(found.low, shape), spread(found.high, shape))
    if site.axis is None and found.low.ndim:
        return Range(found.low.min(), found.high.max())
    return found


def _observed(site: Site, stats: Sequence[Sketch]) -> Range:
    """What the scheme's observer makes of one sketch, or of one per channel."""
    scheme = site.scheme
    pick, arguments = OBSERVERS[scheme.observe.name].pick, scheme.observe.arguments
    ranges = [pick(one, scheme.grid, arguments) for one in stats]
    if len(ranges) == 1:
        return ranges[0]
    return Range(np.array([one.low for one in ranges]), np.array([one.high for one in ranges]))


def _statistics(draft: Draft, index: int, sketches: Mapping[TensorRef, Sketch]) -> list[Sketch]:
    """The sketch of the site's values; of a parameter one per channel where the observer needs a histogram of each."""
    site = draft.sites[index]
    observer = OBSERVERS[site.scheme.observe.name]
    if not observer.needs_values:
        return [EMPTY]
    if site.parameter:
        value, bits = _weight(draft, index), observer.bits(site.scheme.type)
        if site.axis is not None and site.scheme.block_size is not None:
            return [_of_blocks(value, site.axis, site.scheme.block_size)]
        if site.axis is None or not bits:
            return [sketch(value, site.axis, bits=bits)]
        return [sketch(channel, bits=bits) for channel in np.moveaxis(value, site.axis, 0)]
    if site.tensor in sketches and sketches[site.tensor].blank and not sketches[site.tensor].count:
        raise DataError("it was empty whenever a sample of the calibration data reached it")
    if site.tensor not in sketches or not sketches[site.tensor].count:
        raise DataError("no sample of the calibration data reached it")
    if sketches[site.tensor].inf:
        raise DataError(INFINITE)
    return [sketches[site.tensor]]


def _of_blocks(value: Array, axis: int, block: int) -> Sketch:
    """The sketch of a weight with ends for each block."""
    parts = [sketch(part, 0) for part in some_in_blocks(value, axis, block)]
    low, high = (np.concatenate([getattr(part, end) for part in parts]) for end in ("low", "high"))
    count, nan, inf = (sum(getattr(part, name) for part in parts) for name in ("count", "nan", "inf"))
    return Sketch(low=low, high=high, count=count, nan=nan, inf=inf)


def _weight(draft: Draft, index: int) -> Array:
    """The value of the parameter, if one can quantize it; zeros where no kernel would tell it from them.

    Left float, denormals would get scales from the kernels themselves, denormal ones, which a bias does not fit.
    """
    site = draft.sites[index]
    value = draft.parameters.value(site.tensor)
    if value is None:
        raise DataError(
            "it has no one value in the model's files (no checkpoint, ops that are not evaluated, or calls of its"
            " function that pass different weights)"
        )
    if value.dtype.name not in FLOAT_TYPES:
        raise DataError(f"its value is of {value.dtype.name}, not of a float type")
    if value.size == 0:
        raise DataError("it has no elements")
    if site.view is not None:
        if value.size != math.prod(site.view):
            raise DataError(f"its value has the shape {value.shape}, and the plan views it as {site.view}")
        value = value.reshape(site.view)
    if site.axis is not None and site.axis >= value.ndim:
        raise DataError(f"its value has {value.ndim} axes, and none is {site.axis}")
    _check_finite(value, site)
    largest = float(max(value.max(), -value.min()))  # not of abs(value), which is as large again
    if 0 < largest < SMALLEST_SCALE:
        draft.change(index, f"its values, {largest:.3g} at most, are denormals and taken as zeros, as by kernels")
        return np.zeros_like(value)
    return value


def _scales(model: Model, parameters: Parameters, site: Site, axis: int) -> tuple[int, ...]:
    """The shape of the scales of a site with an axis: (C,), or that of its blocks."""
    shape, block = site.view or model.output(site.tensor).shape, site.scheme.block_size
    if shape is None or shape[axis] is None or (block is not None and None in shape):
        value = parameters.value(site.tensor)
        if value is None or axis >= value.ndim:
            raise DataError("the number of its channels is not known")
        shape = value.shape
    sizes = tuple(size or 0 for size in shape)
    return (sizes[axis],) if block is None else blocks_of(sizes, axis, block)


def _dictated(site: Site, given: tuple[float, ...]) -> QParams:
    """The scale and zero point that the plan gives; a symmetric scheme needs no zero point."""
    scale = np.asarray(given, np.float32)
    default = site.scheme.type.middle if site.scheme.zero == "symmetric" and not from_zero(site) else 0
    zero = np.asarray(site.zero_point if site.zero_point is not None else np.full(scale.shape, default), np.int32)
    if site.axis is None:
        scale, zero = scale.reshape(()), zero.reshape(())
    return from_scale(scale, zero, site.scheme.type, narrow=site.scheme.narrow, axis=site.axis)
