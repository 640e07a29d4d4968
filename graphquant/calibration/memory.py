"""How much memory calibration may take, and how much the values of one run do."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphquant.ir import TensorRef

ELEMENT = 8
"""Bytes that an observed element takes: itself, and what is made of it on the way into its sketch."""

UNKNOWN = 1 << 30
"""Bytes that are taken to be free where the system does not say."""

UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def parse_size(text: str) -> int:
    """`text` as bytes: "512MB", "2GB", "1.5 GiB", "300000000".

    Raises:
        UsageError: It is no such size.
    """
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([KMG]I?|)B?\s*", text, re.IGNORECASE)
    size = int(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    if not size:
        raise UsageError(f"{text[:40]!r} is no amount of memory. Write it as 512MB or 2GB.")
    return size


def free() -> int:
    """Bytes of memory that are free, as the system and the container that this runs in say."""
    known = [UNKNOWN]
    with suppress(OSError, ValueError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text("ascii"), re.MULTILINE)
        if found:
            known = [int(found[1]) << 10]
        elif hasattr(os, "sysconf"):
            known = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError):  # "max" is no number: there is no limit
        group = Path("/sys/fs/cgroup")
        known.append(int(group.joinpath("memory.max").read_text()) - int(group.joinpath("memory.current").read_text()))
    return max(min(known), 0)


def grouped(sizes: Mapping[TensorRef, int], budget: int) -> list[tuple[TensorRef, ...]]:
    """The tensors in groups whose values fit `budget` bytes together; one that does not fit alone is a group.

    Args:
        sizes: Elements that each tensor has in one run.
        budget: Bytes.
    """
    room = max(budget, 1)
    needed = math.ceil(sum(sizes.values()) * ELEMENT / room)
    fair = sum(sizes.values()) * ELEMENT / max(needed, 1)  # groups of about one size are no more, and peak lower
    groups: list[list[TensorRef]] = []
    held = 0
    for tensor, size in sizes.items():
        here = size * ELEMENT
        if not groups or (here and held >= fair) or held + here > room:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += here
    return [tuple(group) for group in groups]
