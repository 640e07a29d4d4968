"""Text helpers that messages, reports and options share."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from itertools import islice

from graphquant.errors import UsageError

SIZE_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def decode_bytes(data: bytes) -> str | bytes:
    """Return UTF-8 text as a string, and other data unchanged."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def join_limited(items: Collection[object], limit: int = 5) -> str:
    """Join the first `limit` items, and count the rest: "a, b, c and 4 more"."""
    return ", ".join(str(item) for item in islice(items, limit)) + more_text(len(items) - limit)


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


def format_distinct(value: float, bound: float, *, unit: str = "%") -> tuple[str, str]:
    """Format a value and the bound that it misses with as many decimals as it takes to tell them apart.

    `unit` is "%" for shares of 1, or the unit that follows the number.
    """
    scale, suffix = (100, "%") if unit == "%" else (1, f" {unit}")
    for digits in range(2, 16):
        texts = f"{scale * value:.{digits}f}{suffix}", f"{scale * bound:.{digits}f}{suffix}"
        if texts[0] != texts[1]:
            break
    return texts[0], f"{scale * bound:.12g}{suffix}"


def quantized_share_failure(share: float | None, minimum: float) -> str:
    """Return a message if too few multiply-adds have quantized inputs, or an unknown `share` of them, else ""."""
    if share is not None and share >= minimum:
        return ""
    reached, bound = ("an unknown share", percent(minimum, 12)) if share is None else format_distinct(share, minimum)
    return f"{reached} of the multiply-adds have quantized inputs, and the bound is {bound}"


def parse_size(text: str) -> int:
    """Parse a size into bytes: "512MB", "2GB", "1.5 GiB", "300000000"."""
    matched = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([KMG]I?|)B?\s*", text, re.IGNORECASE)
    size = int(float(matched[1]) * SIZE_UNITS[matched[2].upper()]) if matched else 0
    if not size:
        raise UsageError(f"{text[:40]!r} is not a size. Write it as 512MB or 2GB.")
    return size
