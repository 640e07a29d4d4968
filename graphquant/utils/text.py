"""Text helpers that messages and reports share."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def join_limited(items: Collection[object], limit: int = 5, *, separator: str = ", ") -> str:
    """Join the first `limit` items, and count the rest: "a, b, c and 4 more"."""
    text = separator.join(str(item) for item in islice(items, limit))
    return text + more_text(len(items) - limit)


def more_text(count: int) -> str:
    """Return " and `count` more", or "" if `count` is not positive."""
    return f" and {count:,} more" if count > 0 else ""


def format_shape(shape: Sequence[int | None] | None) -> str:
    """Format a static shape, `[1, ?, 3]`; an unknown size is "?"."""
    return "[?]" if shape is None else f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def format_range(low: float, high: float) -> str:
    """Format a range of real numbers to four digits, `-1.5 to 2.25`."""
    return f"{low:.4g} to {high:.4g}"


def percent(share: float, digits: int = 1) -> str:
    """Format a share from 0 to 1 in percent. Rounds down, so that only a share of 1 is shown as 100%."""
    factor = 10**digits
    return f"{math.floor(round(100 * factor * share, 6)) / factor:g}%"
