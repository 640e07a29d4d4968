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


GROUPED_ELEMENT_BYTES = 8
"""Bytes that an element takes while a group of tensors is observed: itself, and what its sketch is made with."""

CONCURRENT_ELEMENT_BYTES = 16
"""Bytes that an element takes where all tensors are observed at once: onnxruntime keeps them to the end of a run, some
also in the layout that its convolutions prefer."""

HISTOGRAM_BYTES = {0: 0, 7: 64 << 10, 10: 512 << 10}
"""Bytes that a histogram of so many mantissa bits usually takes, to the end of the calibration."""

ASSUMED_FREE_BYTES = 1 << 30
"""Bytes that are taken to be free where the system does not say."""

SIZE_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def parse_size(text: str) -> int:
    """`text` as bytes: "512MB", "2GB", "1.5 GiB", "300000000".

    Raises:
        UsageError: It is no such size.
    """
    matched = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([KMG]I?|)B?\s*", text, re.IGNORECASE)
    size = int(float(matched[1]) * SIZE_UNITS[matched[2].upper()]) if matched else 0
    if not size:
        raise UsageError(f"{text[:40]!r} is no amount of memory. Write it as 512MB or 2GB.")
    return size


def available_memory() -> int:
    """Bytes of memory that are free, as the system and the container that this runs in say."""
    bounds = [ASSUMED_FREE_BYTES]
    with suppress(OSError, ValueError):
        matched = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text("ascii"), re.MULTILINE)
        if matched:
            bounds = [int(matched[1]) << 10]
        elif hasattr(os, "sysconf"):
            bounds = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError):  # "max" is no number: there is no limit
        cgroup = Path("/sys/fs/cgroup")
        bounds.append(
            int(cgroup.joinpath("memory.max").read_text()) - int(cgroup.joinpath("memory.current").read_text())
        )
    return max(min(bounds), 0)


def observation_budget(budget: int | None, histogram_bits: Iterable[int]) -> int:
    """Bytes for the values of one run.

    Args:
        budget: Bytes for all, None for half of what is free.
        histogram_bits: Mantissa bits of the histograms that are to be filled.
    """
    return max(
        (available_memory() // 2 if budget is None else budget)
        - sum(HISTOGRAM_BYTES[mantissa_bits] for mantissa_bits in histogram_bits),
        1,
    )


def fits_in_budget(elements: int, budget: int) -> bool:
    """Whether so many elements can be observed at once in `budget` bytes."""
    return elements * CONCURRENT_ELEMENT_BYTES <= budget


def concurrent_run_count(elements: int, budget: int, max_runs: int) -> int:
    """How many runs of so many elements there may be at once in `budget` bytes; always one, `max_runs` at most."""
    return max(min(budget // max(elements * CONCURRENT_ELEMENT_BYTES, 1), max_runs), 1)


def group_tensors(element_counts: Mapping[TensorRef, int], budget: int) -> list[tuple[TensorRef, ...]]:
    """The tensors in groups whose values fit `budget` bytes together; one that does not fit alone is a group.

    Args:
        element_counts: Elements that each tensor has in one run.
        budget: Bytes.
    """
    total_elements = sum(element_counts.values())
    if fits_in_budget(total_elements, budget):
        return [tuple(element_counts)]
    # One is at work, in both layouts, while a group is held. Groups of about one size are no more, and peak lower.
    budget = max(budget - max(element_counts.values()) * GROUPED_ELEMENT_BYTES, 1)
    target_bytes = (
        total_elements * GROUPED_ELEMENT_BYTES / max(math.ceil(total_elements * GROUPED_ELEMENT_BYTES / budget), 2)
    )
    groups: list[list[TensorRef]] = []
    group_bytes = 0
    for tensor, element_count in element_counts.items():
        tensor_bytes = element_count * GROUPED_ELEMENT_BYTES
        if not groups or (tensor_bytes and (group_bytes >= target_bytes or group_bytes + tensor_bytes > budget)):
            groups.append([])
            group_bytes = 0
        groups[-1].append(tensor)
        group_bytes += tensor_bytes
    return [tuple(group) for group in groups]
