"""Numbers in the sentences of the solver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from graphquant.numerics import Array, Range


def shown(values: Array) -> str:
    """A number, or the smallest and the largest of several."""
    low, high = float(np.min(values)), float(np.max(values))
    return f"{low:.6g}" if low == high else f"{low:.4g}..{high:.4g}"


def spelled(found: Range) -> str:
    """A range; of several the one that holds them."""
    return f"[{float(np.min(found.low)):.6g}, {float(np.max(found.high)):.6g}]"
