"""A badge in a few words: on a drawing, in a line of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphquant.view.badges import Badge


def badge_text(badge: Badge) -> str:
    """`uint8 0.0235 z128`, `int8[64]` per channel, `int8 dynamic`; the type alone where no scale is known."""
    dtype = badge.dtype or "?"
    if badge.dynamic:
        return f"{dtype} dynamic"
    if badge.numbers is None:
        return dtype
    scale, zero = badge.numbers.scale, badge.numbers.zero_point
    if scale.size != 1:
        return f"{dtype}[{scale.size}]"
    return f"{dtype} {scale.item():.3g}" + (f" z{int(zero.item())}" if zero.any() else "")
