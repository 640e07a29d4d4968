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
    from collections.abc import Iterable, Mapping

    from graphquant.ir import TensorRef

ELEMENT = 8
"""Bytes that an element takes while a group of tensors is observed: itself, and what its sketch is made with."""

AT_ONCE = 16
"""Bytes that an element takes where all tensors are observed at once: onnxruntime keeps them to the end of a run, some
also in the layout that its convolutions prefer."""

TABLES = {0: 0, 7: 64 << 10, 10: 512 << 10}
"""Bytes that a histogram of so many mantissa bits usually takes, to the end of the calibration."""

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


def room(budget: int | None, bits: Iterable[int]) -> int:
    """Bytes for the values of one run.

    Args:
        budget: Bytes for all, None for half of what is free.
        bits: Mantissa bits of the histograms that are to be filled.
    """
    return max((free() // 2 if budget is None else budget) - sum(TABLES[each] for each in bits), 1)


def fits(elements: int, space: int) -> bool:
    """Whether so many elements can be observed at once in `space` bytes."""
    return elements * AT_ONCE <= space


def at_once(elements: int, space: int, most: int) -> int:
    """How many runs of so many elements there may be at once in `space` bytes; always one, `most` at most."""
    return max(min(space // max(elements * AT_ONCE, 1), most), 1)


def grouped(sizes: Mapping[TensorRef, int], space: int) -> list[tuple[TensorRef, ...]]:
    """The tensors in groups whose values fit `space` bytes together; one that does not fit alone is a group.

    Args:
        sizes: Elements that each tensor has in one run.
        space: Bytes.
    """
    total = sum(sizes.values())
    if fits(total, space):
        return [tuple(sizes)]
    # One is at work, in both layouts, while a group is held. Groups of about one size are no more, and peak lower.
    space = max(space - max(sizes.values()) * ELEMENT, 1)
    fair = total * ELEMENT / max(math.ceil(total * ELEMENT / space), 2)
    groups: list[list[TensorRef]] = []
    held = 0
    for tensor, size in sizes.items():
        here = size * ELEMENT
        if not groups or (here and (held >= fair or held + here > space)):
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += here
    return [tuple(group) for group in groups]
