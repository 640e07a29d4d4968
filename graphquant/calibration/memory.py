"""Memory of calibration: the free memory, the footprint of runs, and groups of tensors that fit into a budget."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from graphquant.ir import LOOP_KINDS, Graph, Model, Op, TensorRef

if TYPE_CHECKING:
    from graphquant.formats import Feeds, Runner

DEFAULT_BLOCK_SIZE = 8  # samples per block if samples are run one by one, or if the sizes of activations are unknown
MAX_BATCH_SIZE = 32  # Maximum samples per batch. Larger batches make no model faster.
MAX_BATCH_ELEMENTS = 1 << 24  # maximum elements of all activations of a batch: 64 MB of float32

GROUPED_ELEMENT_BYTES = 8
"""Bytes per element while one group of tensors is observed: the value itself and the temporaries of its sketch."""

CONCURRENT_ELEMENT_BYTES = 16
"""Bytes per element while all tensors are observed in one run. ONNX Runtime keeps them until the run ends, some also in
the blocked layout that its convolutions prefer.
"""

REPEATED_KINDS = LOOP_KINDS | {"enter"}
"""Kinds of ops whose bodies run more than once, so that static shapes do not give the number of elements."""

LARGE_PROCESS_BYTES = 1 << 27  # memory of the process from which freed memory is returned
HISTOGRAM_BYTES = {0: 0, 7: 64 << 10, 10: 512 << 10}
"""Typical bytes of a histogram by its number of mantissa bits. It stays in memory until calibration ends."""


class RunFootprint(NamedTuple):
    """Samples in a block, which may run as one batch, and elements of all float activations per sample, if known."""

    block_size: int
    elements_per_sample: int | None
    join_samples: bool = False


def estimate_footprint(model: Model, *, batch_independent: bool) -> RunFootprint:
    """Estimate the block size and memory footprint of `model`."""
    element_counts = [size for graph, op in model.reachable_ops() for size in _output_element_counts(graph, op)]
    repeated = not model.op_kinds().isdisjoint(REPEATED_KINDS)
    total_elements = None if None in element_counts or repeated else sum(size or 0 for size in element_counts)
    block_size = DEFAULT_BLOCK_SIZE
    if batch_independent and total_elements is not None:
        block_size = max(min(MAX_BATCH_SIZE, 1 << (MAX_BATCH_ELEMENTS // max(total_elements, 1)).bit_length() >> 1), 1)
    return RunFootprint(block_size=block_size, elements_per_sample=total_elements, join_samples=batch_independent)


def _output_element_counts(graph: Graph, op: Op) -> list[int | None]:
    """Return the elements per sample of the outputs that are read. A first axis of unknown size counts samples."""
    if op.kind in {"constant", "variable", "output"}:
        return []
    edges = (edge for targets in graph.successors(op.name).values() for edge in targets.values())
    read_ports = {edge["port"] for edge in edges if "port" in edge}  # those of control edges have none
    outputs = (output for port, output in enumerate(op.outputs) if port in read_ports)
    return [output.elements_per_sample if "float" in (output.dtype or "float") else 0 for output in outputs]


def available_memory() -> int:
    """Return the free memory in bytes, limited by the control group of the container."""
    bounds = [_machine_memory()]
    # That is the memory of the machine, not of the container. "max" is no number: there is no limit.
    with suppress(OSError, ValueError):
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        bounds.append(limit - used)
    return max(min(bounds), 0)


def _machine_memory() -> int:
    """Return the free memory of the machine in bytes."""
    with suppress(OSError, StopIteration, ValueError):  # Linux only, where psutil reads the same line
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10
    import psutil

    return int(psutil.virtual_memory().available)


def return_freed_memory() -> None:
    """Return freed memory to the system if the process is large.

    The allocator of glibc keeps the memory that threads have freed, which would add to the peak of the next step.
    """
    with suppress(OSError, AttributeError):  # only Linux has the file, and only glibc the function
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        if pages * os.sysconf("SC_PAGE_SIZE") > LARGE_PROCESS_BYTES:
            import ctypes

            ctypes.CDLL(None).malloc_trim(0)


def observation_budget(budget: int | None, histogram_bits: Iterable[int]) -> int:
    """Return the bytes for the observed values of one run, from those for all of calibration (None: half of the free).

    `histogram_bits` are the mantissa bits of the histograms to fill.
    """
    budget = available_memory() // 2 if budget is None else budget
    return max(budget - sum(HISTOGRAM_BYTES[mantissa_bits] for mantissa_bits in histogram_bits), 1)


def concurrent_run_count(elements: int, budget: int, max_runs: int) -> int:
    """Return the number of runs, from 1 to `max_runs`, that fit into `budget` bytes at the same time."""
    return max(min(budget // max(elements * CONCURRENT_ELEMENT_BYTES, 1), max_runs), 1)


def group_observed_tensors(
    runner: Runner, tensors: Sequence[TensorRef], feed: Feeds, max_elements: int | None, budget: int
) -> tuple[list[tuple[TensorRef, ...]], int]:
    """Return groups of tensors whose values fit into `budget` bytes, and an upper bound of the elements of all.

    The elements are counted in a run of `feed` if `max_elements` is None or too much for one group. A tensor that does
    not fit forms its own group.
    """
    if max_elements is not None and max_elements * CONCURRENT_ELEMENT_BYTES <= budget:
        return [tuple(tensors)], max_elements
    element_counts = runner.element_counts(tensors, feed)
    max_elements = sum(element_counts.values())
    if max_elements * CONCURRENT_ELEMENT_BYTES <= budget:
        return [tuple(tensors)], max_elements
    # One tensor is computed, in both layouts, while a group is in memory. Groups of similar size have the lowest peak.
    budget = max(budget - max(element_counts.values()) * GROUPED_ELEMENT_BYTES, 1)
    total_bytes = max_elements * GROUPED_ELEMENT_BYTES
    target_bytes = total_bytes / max(math.ceil(total_bytes / budget), 2)
    groups: list[list[TensorRef]] = [[]]
    group_bytes = 0
    for tensor, element_count in element_counts.items():
        tensor_bytes = element_count * GROUPED_ELEMENT_BYTES
        if groups[-1] and tensor_bytes and (group_bytes >= target_bytes or group_bytes + tensor_bytes > budget):
            groups.append([])
            group_bytes = 0
        groups[-1].append(tensor)
        group_bytes += tensor_bytes
    return [tuple(group) for group in groups], max_elements
