"""The range of a tensor that costs the least, for the observers that clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphquant.numerics import Range, from_scale

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics import Array, Grid, QParams
    from graphquant.sketch.distribution import Distribution

    Cost = Callable[[QParams], Array]

COARSE = 2.0 ** -np.concatenate([np.arange(0, 4, 0.5), np.arange(4, 17)])
"""Shares of an end that are tried first: half octaves, then octaves down to a 65,536th."""

REFINEMENTS = tuple(2.0 ** (reach * np.linspace(-1, 1, 17)) for reach in (2**-1, 2**-4, 2**-7, 2**-10))
"""By what the best so far is then multiplied, one after the other: the last steps are a ten-thousandth. Errors are flat
there, except for tensors whose values are nearly the same."""

FLAT = 1e-2
"""Where costs around the best differ by less than that share, no finer steps, an eighth as far, are tried."""

SMALLEST = 1e-300
"""Instead of zero, to divide by."""

OCTAVES, PLACES = 12, 33
"""How many powers of two are tried, from that which holds all values down, and in how many places each."""

WITHIN = 1 - 2.0**-20
"""By how much such a range is narrower than its scale allows, so that rounding does not make it the next one's."""

SUBDIVISIONS = 8
"""Into how many parts `information_lost` divides a step."""


def cheapest(seen: Range, cost: Cost, grid: Grid, *, together: bool = False, floor: Cost | None = None) -> Range:
    """The range within `seen` and around 0 whose scale and zero point have the least `cost`; of equal ones the widest.

    Both ends are drawn in together, then each by itself, from coarse steps to fine ones. Where scales are powers of
    two, so are those of all candidates, and what each of them can hold is tried in many places before.

    Args:
        seen: The smallest and the largest value.
        cost: Of scale and zero point of candidates, (C,), gives a number for each.
        grid: What the scheme can represent.
        together: Whether both ends are cut at the same magnitude, instead of each by itself.
        floor: What no cost is below, sooner found: candidates of which it is not below the least cost are left out.
    """
    ends = np.array([min(float(seen.low), 0.0), max(float(seen.high), 0.0)])
    together = together or grid.symmetric or not ends.all()
    reach = np.abs(ends).max() * np.array([-1.0, 1.0]) if together else ends
    best, least = np.ones(2), np.inf

    def candidates(shares: Array) -> QParams:
        low, high = np.clip(shares * reach, *ends).T
        return grid.choose(Range(low, high), axis=0)

    def improve(shares: Array, *, floor: Cost | None = None) -> float:
        """Takes the best of the candidates if it is better; by what share of the least cost theirs differ."""
        nonlocal best, least
        shares = np.minimum(shares, 1.0)
        tried = candidates(shares)
        if floor is not None:
            promising = floor(tried) < least
            if not promising.any():
                return 0.0
            shares, tried = shares[promising], _those(tried, promising)
        costs = cost(tried)
        found, most = int(costs.argmin()), costs.max()
        if costs[found] < least:
            best, least = shares[found], costs[found]
        with np.errstate(over="ignore"):  # next to nothing at least is also far apart
            return float((most - least) / max(least, SMALLEST))

    moves = [np.array([True, True])] if together else [np.array([True, False]), np.array([False, True])]
    improve(np.ones((1, 2)))
    improve(np.stack([COARSE, COARSE], axis=1)[1:], floor=floor)
    for moved in moves if len(moves) > 1 else ():
        improve(np.where(moved, COARSE[:, None], best), floor=floor)
    if grid.power_of_two and not together:
        improve(_windows(ends, grid) / ends)
    for steps in REFINEMENTS:
        if max([improve(np.where(moved, best * steps[:, None], best)) for moved in moves]) < FLAT:
            break
    return Range(*np.clip(best * reach, *ends))


def _those(params: QParams, which: Array) -> QParams:
    """Those of the candidates that are wanted; `which` is bool, (C,)."""
    return from_scale(params.scale[which], params.zero_point[which], params.type, narrow=params.narrow, axis=0)


def _windows(ends: Array, grid: Grid) -> Array:
    """Ranges around 0 and within `ends`, (C, 2), as wide as a scale that is a power of two can hold."""
    low, high = grid.type.limits(narrow=grid.narrow)
    steps = high - low
    top = np.ceil(np.log2(ends[1] / steps - ends[0] / steps))
    bottoms, scales = np.meshgrid(ends[0] * np.linspace(0, 1, PLACES), 2.0 ** (top - np.arange(OCTAVES)))
    tops = np.clip(bottoms + scales * steps * WITHIN, 0, ends[1])
    return np.stack([bottoms.ravel(), tops.ravel()], axis=1)


def information_lost(known: Distribution, params: QParams) -> Array:
    """The Kullback-Leibler divergence between the values and their quantized form, float64 (C,), in nats.

    Each step is divided into `SUBDIVISIONS` parts. P is the share of values in each part, those beyond the range in the
    outermost ones. Q knows only how many values of the range each step has, and spreads them evenly over those of its
    parts that hold any. So TensorRT compares a histogram of 2048 bins with its 128 quantized levels (S. Migacz, "8-bit
    Inference with TensorRT", GTC 2017); but there the bins are parts of the largest value, so that one outlier makes
    them coarse and each smaller range has fewer bins to lose, and here they are parts of the candidate's own step.

    Args:
        known: The values.
        params: Scale and zero point of each candidate, (C,).
    """
    low, high = params.type.limits(narrow=params.narrow)
    borders = np.arange((high - low + 1) * SUBDIVISIONS + 1) / SUBDIVISIONS + low - 0.5
    scale, zero = params.scale.astype(np.float64)[:, None], params.zero_point[:, None]
    below = known.below((borders - zero) * scale)
    within = np.diff(below, axis=1).reshape(scale.size, -1, SUBDIVISIONS)
    given = within.copy()
    given[:, 0, 0] += below[:, 0]
    given[:, -1, -1] += known.count - below[:, -1]
    parts = np.count_nonzero(given, axis=2)
    spread = within.sum(2) / np.maximum(parts, 1) / np.maximum(within.sum((1, 2)), 1e-300)[:, None]
    given /= known.count
    with np.errstate(divide="ignore", invalid="ignore"):  # where only clipped values came to, Q is infinitely far off
        ratio = np.where(given > 0, given / spread[:, :, None], 1.0)
        return np.asarray((given * np.log(ratio)).sum((1, 2)))
