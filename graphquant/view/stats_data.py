"""Statistics as JSON data: what `inspect --stats --format json` writes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.sketch import distribution
from graphquant.view.data import SCHEMA, params_json, tensor_json
from graphquant.view.histogram import axis_of, bars

if TYPE_CHECKING:
    from graphquant.numerics import QParams
    from graphquant.picked import Pick, Picks
    from graphquant.sketch import Cost, Sketch

BARS = 64
"""Bars of a histogram. Their edges are those of the drawing, so they are closer where the range is."""


def picks_json(picks: Picks) -> dict[str, Any]:
    """The statistics and the ranges that were picked from them."""
    stats = picks.stats
    return {
        "schema": SCHEMA,
        "stats": str(picks.path) if picks.path else None,
        "model": picks.model or None,
        "digest": stats.model,
        "by_name": picks.by_name,
        "samples": stats.samples,
        "blocks": stats.blocks,
        "complete": stats.complete,
        "random": stats.random,
        "data": [run.data for run in stats.runs],
        "tensors": [_pick(one) for one in picks.picks],
    }


def _pick(one: Pick) -> dict[str, Any]:
    return {
        "tensor": tensor_json(one.tensor),
        "note": one.note,
        "seen": None if one.sketch is None else _sketch(one.sketch, one.params),
        "rule": one.rule,
        "method": one.method,
        "like": one.like,
        "params": None if one.params is None else params_json(one.params),
        "cost": _cost(one.cost),
        "others": [
            {"method": other.method, "params": params_json(other.params), "cost": _cost(other.cost)}
            for other in one.others
        ],
    }


def _sketch(found: Sketch, params: QParams | None) -> dict[str, Any]:
    histogram = None
    if found.counts.size:
        axis = axis_of(found, params)
        edges = axis.value(np.linspace(0, 1, BARS + 1))
        histogram = {"edges": edges.tolist(), "counts": bars(distribution(found), axis, BARS).tolist()}
    return {
        "low": _finite(found.low),
        "high": _finite(found.high),
        "count": found.count,
        "nan": found.nan,
        "inf": found.inf,
        "blank": found.blank,
        "histogram": histogram,
    }


def _finite(end: Any) -> Any:
    """The ends of a tensor or of its channels; null where no finite value was seen."""
    values = [value if math.isfinite(value) else None for value in end.reshape(-1).tolist()]
    return values if end.ndim else values[0]


def _cost(cost: Cost | None) -> dict[str, Any] | None:
    """`sqnr` is null where there is no error at all, or no signal."""
    if cost is None:
        return None
    return {
        "below": cost.below,
        "above": cost.above,
        "squared_error": cost.squared_error,
        "sqnr": cost.sqnr if math.isfinite(cost.sqnr) else None,
    }
