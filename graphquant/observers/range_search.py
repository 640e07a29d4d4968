"""Search the range with the least cost, for observers that clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphquant.numerics import Range, qparams_from_scale

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics import Array, QParams, QuantizationGrid
    from graphquant.observers.distribution import Distribution

    CandidateCost = Callable[[QParams], Array]


COARSE_SHARES = 2.0 ** -np.concatenate([np.arange(0, 4, 0.5), np.arange(4, 17)])
"""Shares of an end that are tried first: half octaves, then octaves down to 1/65,536."""

REFINEMENTS = tuple(2.0 ** (reach * np.linspace(-1, 1, 17)) for reach in (2**-1, 2**-4, 2**-7, 2**-10))
"""Factors by which the best shares are then multiplied, one row after the other. The last factors differ by 1/10,000.
Errors are flat there, except for tensors whose values are nearly equal."""

FLAT_COST_SHARE = 1e-2
"""If the costs of a row differ by less than this share, finer rows are not tried."""

SMALLEST_DIVISOR = 1e-300
"""Divisor in place of zero."""

WINDOW_OCTAVES, WINDOW_POSITIONS = 12, 33
"""Number of power-of-two scales that are tried, from the one that covers all values down, and of positions for each."""

WINDOW_MARGIN = 1 - 2.0**-20
"""Factor that makes a window narrower than its scale allows, so that rounding does not select the next scale."""

STEP_SUBDIVISIONS = 8
"""Number of parts into which `kl_divergence` divides a step."""


def cheapest_range(
    observed: Range,
    cost: CandidateCost,
    grid: QuantizationGrid,
    *,
    same_magnitude: bool = False,
    floor: CandidateCost | None = None,
) -> Range:
    """Return the range within `observed` and around 0 with the least `cost`; of equal ones the widest.

    Both ends move together first, then each one separately, in coarse to fine steps. If scales are powers of two, so
    are those of all candidates, and windows of such a scale are tried at many positions.

    Args:
        observed: The smallest and the largest value.
        cost: Returns the cost of each candidate, (C,), from their scales and zero points.
        grid: The values that the scheme can represent.
        same_magnitude: Clips both ends at the same magnitude.
        floor: A lower bound of `cost` that is faster to compute. Candidates whose bound is not below the least cost are
            skipped.
    """
    limits = np.array([min(float(observed.low), 0.0), max(float(observed.high), 0.0)])
    same_magnitude = same_magnitude or grid.symmetric or not limits.all()
    scaled_limits = np.abs(limits).max() * np.array([-1.0, 1.0]) if same_magnitude else limits
    best_shares, least_cost = np.ones(2), np.inf

    def candidates(shares: Array) -> QParams:
        low, high = np.clip(shares * scaled_limits, *limits).T
        return grid.qparams(Range(low, high), axis=0)

    def improve(shares: Array, *, floor: CandidateCost | None = None) -> float:
        """Update the best candidate. Returns the share of the least cost by which costs differ."""
        nonlocal best_shares, least_cost
        shares = np.minimum(shares, 1.0)
        candidate_params = candidates(shares)
        if floor is not None:
            promising = floor(candidate_params) < least_cost
            if not promising.any():
                return 0.0
            shares, candidate_params = shares[promising], _select_candidates(candidate_params, promising)
        costs = cost(candidate_params)
        best_index, highest = int(costs.argmin()), costs.max()
        if costs[best_index] < least_cost:
            best_shares, least_cost = shares[best_index], costs[best_index]
        with np.errstate(over="ignore"):  # the least cost can be nearly zero
            return float((highest - least_cost) / max(least_cost, SMALLEST_DIVISOR))

    movable_ends = [np.array([True, True])] if same_magnitude else [np.array([True, False]), np.array([False, True])]
    improve(np.ones((1, 2)))
    improve(np.stack([COARSE_SHARES, COARSE_SHARES], axis=1)[1:], floor=floor)
    for movable in movable_ends if len(movable_ends) > 1 else ():
        improve(np.where(movable, COARSE_SHARES[:, None], best_shares), floor=floor)
    if grid.power_of_two and not same_magnitude:
        improve(_power_of_two_windows(limits, grid) / limits)
    for steps in REFINEMENTS:
        if (
            max([improve(np.where(movable, best_shares * steps[:, None], best_shares)) for movable in movable_ends])
            < FLAT_COST_SHARE
        ):
            break
    return Range(*np.clip(best_shares * scaled_limits, *limits))


def _select_candidates(params: QParams, selected: Array) -> QParams:
    """Return the candidates for which `selected`, bool (C,), is True."""
    return qparams_from_scale(
        params.scale[selected], params.zero_point[selected], params.type, narrow=params.narrow, axis=0
    )


def _power_of_two_windows(limits: Array, grid: QuantizationGrid) -> Array:
    """Return ranges around 0 and within `limits`, (C, 2), as wide as a power-of-two scale can represent."""
    low, high = grid.type.limits(narrow=grid.narrow)
    steps = high - low
    top = np.ceil(np.log2(limits[1] / steps - limits[0] / steps))
    bottoms, scales = np.meshgrid(
        limits[0] * np.linspace(0, 1, WINDOW_POSITIONS), 2.0 ** (top - np.arange(WINDOW_OCTAVES))
    )
    tops = np.clip(bottoms + scales * steps * WINDOW_MARGIN, 0, limits[1])
    return np.stack([bottoms.ravel(), tops.ravel()], axis=1)


def kl_divergence(values: Distribution, params: QParams) -> Array:
    """Return the Kullback-Leibler divergence of the quantized values from the values, float64 (C,), in nats.

    Each step is divided into `STEP_SUBDIVISIONS` parts. P is the share of values in each part, those beyond the range
    in the outermost ones. Q has only the number of values in each step, distributed evenly over those of its parts that
    have values. TensorRT does the same with a histogram of 2048 bins and 128 quantized levels (S. Migacz, "8-bit
    Inference with TensorRT", GTC 2017). Its bins are fractions of the largest value, so one outlier makes them coarse
    and smaller ranges have fewer bins. Here they are fractions of the candidate's own step.

    Args:
        values: The values.
        params: Scale and zero point of each candidate, (C,).
    """
    low, high = params.type.limits(narrow=params.narrow)
    borders = np.arange((high - low + 1) * STEP_SUBDIVISIONS + 1) / STEP_SUBDIVISIONS + low - 0.5
    scale, zero = params.scale.astype(np.float64)[:, None], params.zero_point[:, None]
    counts_below = values.count_below((borders - zero) * scale)
    step_counts = np.diff(counts_below, axis=1).reshape(scale.size, -1, STEP_SUBDIVISIONS)
    part_counts = step_counts.copy()
    part_counts[:, 0, 0] += counts_below[:, 0]
    part_counts[:, -1, -1] += values.count - counts_below[:, -1]
    occupied_parts = np.count_nonzero(part_counts, axis=2)
    spread = step_counts.sum(2) / np.maximum(occupied_parts, 1) / np.maximum(step_counts.sum((1, 2)), 1e-300)[:, None]
    part_counts /= values.count
    with np.errstate(divide="ignore", invalid="ignore"):  # a part with only clipped values has an infinite divergence
        ratio = np.where(part_counts > 0, part_counts / spread[:, :, None], 1.0)
        return np.asarray((part_counts * np.log(ratio)).sum((1, 2)))
