"""What is told of weights that do not fit into the range that a rule or the plan gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphquant.ir import FLOAT_TYPES
from graphquant.numerics import along
from graphquant.solve.ranges import given
from graphquant.solve.words import spelled

if TYPE_CHECKING:
    from graphquant.numerics import Array, QParams
    from graphquant.solve.draft import Draft


def tell_clipped(draft: Draft) -> None:
    """Says of each weight whose range or scale is given how many of its values lie outside: what no rounding explains.

    It comes after all that may still widen a range. One weight is held at a time.
    """
    for index, params in draft.params.items():
        site = draft.sites[index]
        own = site.scale is not None or site.range is not None
        if not site.parameter or not given(site) or (site.scheme.observe.name == "bias" and not own):
            continue
        value = draft.parameters.value(site.tensor)
        if value is None or value.dtype.name not in FLOAT_TYPES:
            continue
        outside = _outside(value if site.view is None else value.reshape(site.view), params)
        if outside:
            by = f"rule {site.rule!r} fixes" if site.rule and not own else "the plan gives"
            lie = "lies" if outside == 1 else "lie"
            said = f"{outside} of {value.size} values {lie} outside {spelled(params.range)}, the range that {by}"
            channels = " (of all channels; each has its own)" if params.scale.size > 1 and own else ""
            draft.change(index, f"{said}{channels}, and {'is' if outside == 1 else 'are'} clipped")


def _outside(value: Array, params: QParams) -> int:
    """How many values are farther than half a step, by which any value may be rounded, from what stands for them."""
    ends = params.range
    low, high = ends.low - params.scale / 2, ends.high + params.scale / 2
    if params.block is not None:  # given ranges are one for all blocks
        low, high = low.min(), high.max()
    low, high = (along(np.asarray(end), params.axis, value.ndim) for end in (low, high))
    return int(np.count_nonzero((value < low) | (value > high)))
