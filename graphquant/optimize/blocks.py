"""Blocks of a model: runs of ops between narrow cuts, such as a stem with its activation or a residual block."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from graphquant.ir import MAC_KINDS, Graph, Model, OpKey, Parameters, TensorRef, reachable

if TYPE_CHECKING:
    from graphquant.quantize import Plan

MAX_BLOCK_OPS = 8
"""Number of weighted ops above which a block is split although its inner cuts are wider than its ends. An attention
block has six. A U-Net has no narrow cut between its first and its last level, so it is split at wider ones."""


class Block(NamedTuple):
    """A run of ops, with the sites of a plan whose tensors it computes or, for parameters, reads."""

    sites: tuple[int, ...]  # indices of the sites in the plan
    ops: frozenset[OpKey]  # weighted ops
    name: str  # its first and its last weighted op


def find_blocks(model: Model, plan: Plan, site_indices: Collection[int]) -> tuple[Block, ...]:
    """Assign each of the sites `site_indices` to a block. The blocks are in graph order, those without sites omitted.

    A cut is narrow if few tensors cross it. The ops between two cuts belong together if each cut between them is wider
    than both. Ops after the last weighted op of a block, such as its activation, belong to the block.
    """
    parameters = Parameters(model)
    blocks: list[Block] = []
    for name in model.reachable_graphs():
        graph = model.graphs[name]
        order = _computed_ops(graph, parameters)
        positions = {op: position for position, op in enumerate(order)}
        own_sites = [
            (_site_position(plan, index, positions), index) for index in site_indices if _graph_of(plan, index) == name
        ]
        for start, stop in _split_into_runs(graph, order):
            weighted = [op for op in order[start:stop] if graph.op(op).kind in MAC_KINDS]
            sites = tuple(index for position, index in own_sites if start <= position < stop)
            ends = dict.fromkeys((weighted or order[start:stop])[index] for index in (0, -1))
            if sites:
                ops = frozenset((name, op) for op in weighted)
                blocks.append(Block(sites=sites, ops=ops, name=" to ".join(ends)))
    return tuple(blocks)


def find_selecting_sites(model: Model, plan: Plan) -> frozenset[int]:
    """Return the sites on which computed indices depend, such as those of the rows that a TopK selects.

    Their smallest error may exchange two rows, and adds an error as large as the rows.
    """

    def sources(key: OpKey) -> list[OpKey]:
        graph = model.graphs[key[0]]
        slots = graph.slots(key[1]) if graph.op(key[1]).kind != "shape" else []
        return [tensor[:2] for tensor in slots if tensor is not None]

    indices = (
        tensor[:2]
        for graph, op in model.reachable_ops()
        for slot, tensor in enumerate(graph.slots(op.name))
        if tensor is not None and op.role(slot) == "indices"
    )
    ops = {*reachable(indices, sources)}
    return frozenset(
        index
        for index, site in enumerate(plan.sites)
        if (any(use[:2] in ops for use in site.uses) if site.parameter else site.tensor[:2] in ops)
    )


def _graph_of(plan: Plan, index: int) -> str:
    """Return the graph of the op that computes the tensor of a site, or that reads it if it is a parameter."""
    site = plan.sites[index]
    return site.uses[0].graph if site.parameter and site.uses else site.tensor.graph


def _site_position(plan: Plan, index: int, positions: dict[str, int]) -> int:
    """Return the position of the op that computes the tensor of a site. A parameter belongs to its first reader."""
    site = plan.sites[index]
    if not site.parameter and site.tensor.op in positions:
        return positions[site.tensor.op]
    return min((positions[use.op] for use in site.uses if use.op in positions), default=0)


def _computed_ops(graph: Graph, parameters: Parameters) -> list[str]:
    """Return the ops whose values depend on the inputs, each after its sources and near its first reader.

    Sources are visited depth first from the outputs, so that a branch is not interleaved with its neighbors.
    """

    def is_computed(name: str) -> bool:
        op = graph.op(name)
        known = op.outputs and all(
            parameters.is_parameter(TensorRef(graph.name, name, port)) for port in range(len(op.outputs))
        )
        return op.kind not in {"input", "output", "constant", "variable"} and not known

    order: dict[str, None] = {}
    entered: set[str] = set()
    # Ops that no output depends on come last.
    for end in (*graph.outputs, *(op.name for op in graph.ops())):
        pending = [(end, False)]
        while pending:
            name, is_left = pending.pop()
            if is_left:
                order[name] = None
            elif name not in entered:
                entered.add(name)
                sources = [
                    tensor.op for tensor in graph.slots(name) if tensor is not None and tensor.graph == graph.name
                ]
                pending += [(name, True), *((source, False) for source in reversed(sources))]
    return [name for name in order if is_computed(name)]


def _split_into_runs(graph: Graph, order: Sequence[str]) -> list[tuple[int, int]]:
    """Split the ops into runs [start, stop) that contain a weighted op each, unless there is none at all."""
    if not order:
        return []
    is_weighted = [graph.op(name).kind in MAC_KINDS for name in order]
    cuts = sorted({0, len(order), *_find_cuts(_cut_widths(graph, order), is_weighted)})
    runs: list[tuple[int, int]] = []
    for start, stop in pairwise(cuts):
        # A run without weighted op is the end of the previous block, or the start of the first.
        if runs and not (any(is_weighted[start:stop]) and any(is_weighted[: runs[-1][1]])):
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return runs


def _cut_widths(graph: Graph, order: Sequence[str]) -> list[int]:
    """Count the tensors that cross each cut; cut i is before op i."""
    positions = {name: position for position, name in enumerate(order)}
    changes = [0] * (len(order) + 1)
    for position, name in enumerate(order):
        for uses in graph.consumers_by_port(name).values():
            last = max((positions.get(use.op, position) for use in uses if use.graph == graph.name), default=position)
            if last > position:
                changes[position + 1] += 1
                changes[last + 1] -= 1
    widths, width = [], 0
    for change in changes:
        width += change
        widths.append(width)
    return widths


def _find_cuts(widths: Sequence[int], is_weighted: Sequence[bool]) -> Iterator[int]:
    """Yield the cuts between runs: inner cuts of least width that are no wider than an end of their run."""
    pending = [(0, len(is_weighted))]
    while pending:
        start, stop = pending.pop()
        if stop - start < 2:  # noqa: PLR2004  # a single op has no inner cut
            continue
        narrowest = min(widths[start + 1 : stop])
        is_whole = (start, stop) == (0, len(is_weighted))
        is_large = sum(is_weighted[start:stop]) > MAX_BLOCK_OPS
        if not (is_whole or is_large or narrowest <= max(widths[start], widths[stop])):
            continue
        inner = [cut for cut in range(start + 1, stop) if widths[cut] == narrowest]
        yield from inner
        pending += pairwise([start, *inner, stop])
