"""Sizes in bytes, as users write them."""

from __future__ import annotations

import re

from graphquant.errors import UsageError

SIZE_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def parse_size(text: str) -> int:
    """Parse a size into bytes: "512MB", "2GB", "1.5 GiB", "300000000".

    Raises:
        UsageError: `text` is not a size.
    """
    matched = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([KMG]I?|)B?\s*", text, re.IGNORECASE)
    size = int(float(matched[1]) * SIZE_UNITS[matched[2].upper()]) if matched else 0
    if not size:
        raise UsageError(f"{text[:40]!r} is not a size. Write it as 512MB or 2GB.")
    return size
