"""Channels scaled so that the weights before and behind them have like ranges: cross-layer equalization.

Source: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section 4.1 and
appendix A: of two layers with ranges r1 and r2 of a channel's weights, the channel is divided by sqrt(r1 / r2). Rounds
are made over all streams until nothing moves, since a depthwise convolution belongs to two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphquant.corrections.costs import Weight
    from graphquant.corrections.streams import Stream
    from graphquant.ir import TensorRef
    from graphquant.numerics import Array

NAME: Final = "equalization"

ROUNDS: Final = 20
"""Rounds over all streams, at most."""

STILL: Final = 0.01
"""Of a factor, in powers of two, what is no movement."""

PER_CHANNEL: Final = "the weights that make it have a scale for each channel, which evens them out already"

EVEN: Final = "its weights are even already"


def equalizing(streams: Sequence[Stream], weights: Mapping[int, Sequence[Weight]]) -> dict[int, Array]:
    """What to divide the channels of each stream by, float64 (C,), by the stream's number.

    Args:
        streams: The streams to look at.
        weights: The weights beside each, those of norms and biases left out.
    """
    factors = {number: np.ones(stream.channels) for number, stream in enumerate(streams)}
    beside: dict[TensorRef, list[tuple[int, Weight]]] = {}
    for number, found in weights.items():
        for weight in found:
            beside.setdefault(weight.held.home, []).append((number, weight))
    for _ in range(ROUNDS):
        moved = 0.0
        for number, stream in enumerate(streams):
            ranges = [np.zeros(stream.channels), np.zeros(stream.channels)]
            for weight in weights[number]:
                side = int(weight.held.reads)
                here = _range(weight, beside[weight.held.home], factors, number)
                ranges[side] = np.maximum(ranges[side], here)
            by = _even(*ranges)
            moved = max(moved, float(np.abs(np.log2(by)).max(initial=0)))
            factors[number] = factors[number] * by
        if moved < STILL:
            break
    return factors


def _range(weight: Weight, others: Sequence[tuple[int, Weight]], factors: Mapping[int, Array], number: int) -> Array:
    """The range of each channel's weights as they are scaled so far, (C,)."""
    whole = weight.most
    for other, same in others:
        if same.most.shape == whole.shape:
            whole = whole * same.factor(factors[other])
    found = np.zeros(len(factors[number]))
    np.maximum.at(found, np.broadcast_to(weight.held.places, whole.shape), whole)
    return found


def _even(makes: Array, reads: Array) -> Array:
    """sqrt(r1 / r2), and 1 for channels that are not made or not read."""
    known = (makes > 0) & (reads > 0)
    return np.sqrt(np.divide(makes, reads, out=np.ones_like(makes), where=known))


__all__ = ["EVEN", "NAME", "PER_CHANNEL", "equalizing"]
