"""What rounding and clipping cost each quantized activation by itself, estimated from its statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant.numerics import QParams
from graphquant.sketch import estimate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from graphquant.ir import TensorRef
    from graphquant.rewrite import Inserted
    from graphquant.sketch import Sketch

LOW = 30.0
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


def losses(inserted: Iterable[Inserted], sketches: Mapping[TensorRef, Sketch]) -> tuple[Loss, ...]:
    """The activations with statistics, that which loses most first; those that share another's scale are left out.

    It says nothing of weights, nor of what a loss does to the model's outputs: ops behind it make more or less of it.
    """
    found = []
    for done in inserted:
        known = sketches.get(done.site.tensor)
        if known is None or done.site.tie or not isinstance(done.params, QParams):
            continue
        cost = estimate(known, done.params)
        if cost is not None and math.isfinite(cost.sqnr):
            found.append(Loss(tensor=done.site.tensor, sqnr=cost.sqnr, clipped=cost.clipped))
    return tuple(sorted(found, key=lambda one: one.sqnr))
