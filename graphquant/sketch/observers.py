"""The observers: each turns the sketch of a tensor into a range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import DataError
from graphquant.numerics import LARGEST_VALUE, IntType, Range

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.sketch.types import Sketch


@dataclass(frozen=True, slots=True)
class Observer:
    """One way to pick a range.

    Attributes:
        explains: One sentence for people.
        arguments: The arguments a scheme must give it.
        needs_values: Whether it looks at values at all; one that does not needs no data.
        pick: (sketch, type, narrow, arguments) to the range.
    """

    explains: str
    arguments: frozenset[str]
    needs_values: bool
    pick: Callable[[Sketch, IntType, bool, dict[str, float]], Range]


def _seen(stats: Sketch) -> Range:
    if stats.empty:
        raise DataError("no finite value was ever seen")
    return Range(stats.low, stats.high)


def _minmax(stats: Sketch, _type: IntType, _narrow: bool, _args: dict[str, float]) -> Range:
    return _seen(stats)


def _absmax(stats: Sketch, _type: IntType, _narrow: bool, _args: dict[str, float]) -> Range:
    seen = _seen(stats)
    largest = np.maximum(np.abs(seen.low), np.abs(seen.high))
    return Range(-largest, largest)


def _fixed(_stats: Sketch, _type: IntType, _narrow: bool, args: dict[str, float]) -> Range:
    return Range(np.array(args["low"]), np.array(args["high"]))


def _fixed_point(_stats: Sketch, dtype: IntType, narrow: bool, args: dict[str, float]) -> Range:
    qmin, qmax = dtype.limits(narrow=narrow)
    exponent = int(args["exponent"])
    low, high = (math.ldexp(limit - dtype.middle, exponent) for limit in (qmin, qmax))
    if max(-low, high) > LARGEST_VALUE:
        raise DataError(f"{dtype.name} with a scale of 2**{exponent} goes beyond float32")
    return Range(np.array(low), np.array(high))


def _bias(_stats: Sketch, _type: IntType, _narrow: bool, _args: dict[str, float]) -> Range:
    raise DataError("a bias has the scales of its consumer's input and weight, and those are not quantized")


OBSERVERS: dict[str, Observer] = {
    "minmax": Observer("from the smallest to the largest value seen", frozenset(), True, _minmax),
    "absmax": Observer("plus and minus the largest magnitude seen", frozenset(), True, _absmax),
    "fixed": Observer("from `low` to `high`, as the rule says", frozenset({"low", "high"}), False, _fixed),
    "fixed-point": Observer(
        "all that the type can represent with a scale of exactly 2**exponent",
        frozenset({"exponent"}),
        False,
        _fixed_point,
    ),
    "bias": Observer("scale of the consumer's input times scale of its weight", frozenset(), False, _bias),
}
