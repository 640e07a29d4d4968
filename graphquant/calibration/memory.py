"""Memory budget of calibration, and the memory that the observed values of one run need."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from graphquant.ir import TensorRef


GROUPED_ELEMENT_BYTES = 8
"""Bytes per element while one group of tensors is observed: the value itself and the temporaries of its sketch."""

CONCURRENT_ELEMENT_BYTES = 16
"""Bytes per element while all tensors are observed in one run. ONNX Runtime keeps them until the run ends, some also in
the blocked layout that its convolutions prefer.
"""

HISTOGRAM_BYTES = {0: 0, 7: 64 << 10, 10: 512 << 10}
"""Typical bytes of a histogram by its number of mantissa bits. It stays in memory until calibration ends."""


def available_memory() -> int:
    """Return the free memory in bytes, limited by the control group of the container."""
    import psutil

    bounds = [psutil.virtual_memory().available]
    # psutil reports the memory of the machine, not of the container. "max" is no number: there is no limit.
    with suppress(OSError, ValueError):
        cgroup = Path("/sys/fs/cgroup")
        bounds.append(
            int(cgroup.joinpath("memory.max").read_text()) - int(cgroup.joinpath("memory.current").read_text())
        )
    return max(min(bounds), 0)


def observation_budget(budget: int | None, histogram_bits: Iterable[int]) -> int:
    """Return the bytes available for the observed values of one run.

    Args:
        budget: Bytes for all of calibration. None means half of the free memory.
        histogram_bits: Mantissa bits of the histograms to fill.
    """
    return max(
        (available_memory() // 2 if budget is None else budget)
        - sum(HISTOGRAM_BYTES[mantissa_bits] for mantissa_bits in histogram_bits),
        1,
    )


def fits_in_budget(elements: int, budget: int) -> bool:
    """Return whether this many elements can be observed in one run within `budget` bytes."""
    return elements * CONCURRENT_ELEMENT_BYTES <= budget


def concurrent_run_count(elements: int, budget: int, max_runs: int) -> int:
    """Return the number of runs, from 1 to `max_runs`, that fit into `budget` bytes at the same time."""
    return max(min(budget // max(elements * CONCURRENT_ELEMENT_BYTES, 1), max_runs), 1)


def group_tensors(element_counts: Mapping[TensorRef, int], budget: int) -> list[tuple[TensorRef, ...]]:
    """Split tensors into groups whose values fit into `budget` bytes. A larger tensor forms its own group.

    Args:
        element_counts: Number of elements of each tensor in one run.
        budget: Bytes.
    """
    total_elements = sum(element_counts.values())
    if fits_in_budget(total_elements, budget):
        return [tuple(element_counts)]
    # One tensor is computed, in both layouts, while a group is in memory. Groups of similar size have the lowest peak.
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
