"""Rerouting: who reads which of two tensors.

As in TensorFlow 1, whole ends move: for each pair of tensors the readers of one read the other. Three things
are stricter. An input slot moves by itself, so that swapping the operands of `Add(a, b)` gives `Add(b, a)`. No cycle
is ever made. Either everything is done or, where an error is raised, nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant.errors import UsageError
from graphquant.graph_editor.views import Operation, Tensor, list_of_op, list_of_t

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from graphquant.ir import Use


def reroute_ts(ts0: object, ts1: object, can_modify: object = None, cannot_modify: object = None) -> int:
    """For each pair of tensors, whatever reads the one of `ts1` reads the one of `ts0` instead.

    Readers from which the tensor of `ts0` is computed stay as they are: a quantizer that was just put behind a tensor
    goes on reading it. A graph output (`@name`) is a reader like any other. Pairs are done in order, and with the
    readers that there were at the start, so that a tensor may be in both lists.

    Args:
        ts0: A tensor or an iterable of tensors.
        ts1: As many tensors, each of the dtype and a shape that fits.
        can_modify: Ops, or a graph; only these are rerouted.
        cannot_modify: Ops, or a graph; these are not.

    Returns:
        How many inputs were rerouted.

    Raises:
        UsageError: The lists differ in length, tensors in dtype or shape, or they are of two models; a reader cannot
            see its new tensor.
    """
    return _reroute(_pairs(ts0, ts1), _permission(can_modify, cannot_modify), swap=False)


def swap_ts(ts0: object, ts1: object, can_modify: object = None, cannot_modify: object = None) -> int:
    """For each pair of tensors, their readers change places.

    Args:
        ts0: A tensor or an iterable of tensors.
        ts1: As many tensors, each of the dtype and a shape that fits.
        can_modify: Ops, or a graph; only these are rerouted.
        cannot_modify: Ops, or a graph; these are not.

    Returns:
        How many inputs were rerouted.

    Raises:
        UsageError: As for `reroute_ts`; and one of a pair is computed from the other by an op that would be rerouted,
            which would make a cycle.
    """
    return _reroute(_pairs(ts0, ts1), _permission(can_modify, cannot_modify), swap=True)


@dataclass(frozen=True, slots=True)
class _Move:
    """Readers of `old` that are to read `new`."""

    old: Tensor
    new: Tensor
    uses: list[Use]


def _pairs(ts0: object, ts1: object) -> list[tuple[Tensor, Tensor]]:
    """The pairs of two lists, all of which fit."""
    listed0, listed1 = list_of_t(ts0), list_of_t(ts1)
    if len(listed0) != len(listed1):
        raise UsageError(f"{len(listed0)} tensors cannot be paired with {len(listed1)}. Give as many of each.")
    for new, old in zip(listed0, listed1, strict=True):
        if new.graph.graphs is not old.graph.graphs:
            raise UsageError(f"{new} and {old} are of two models. A tensor is rerouted within its own.")
        new.graph.reroute(old.ref, (), new.ref)  # checks the two, and moves nothing
    return list(zip(listed0, listed1, strict=True))


def _permission(can_modify: object, cannot_modify: object) -> Callable[[Operation], bool]:
    """Whether an op may be rerouted."""
    can = None if can_modify is None else frozenset(list_of_op(can_modify))
    cannot = frozenset(() if cannot_modify is None else list_of_op(cannot_modify))
    return lambda op: (can is None or op in can) and op not in cannot


def _reroute(pairs: Iterable[tuple[Tensor, Tensor]], may: Callable[[Operation], bool], *, swap: bool) -> int:
    moves = []
    for new, old in pairs:
        if new != old:
            moves.append(_Move(old, new, _movable(old, may)))
            if swap:
                moves.append(_Move(new, old, _movable(new, may)))
    done: list[tuple[Use, Tensor]] = []
    try:
        for move in moves:
            done += _apply(move, swap=swap)
    except UsageError:
        for use, old in reversed(done):
            old.graph.graphs[use.graph].connect(use, old.ref)
        raise
    return len(done)


def _movable(tensor: Tensor, may: Callable[[Operation], bool]) -> list[Use]:
    return [use for use in tensor.uses() if may(Operation(tensor.graph.graphs[use.graph], use.op))]


def _apply(move: _Move, *, swap: bool) -> list[tuple[Use, Tensor]]:
    """Makes the uses that still read `old`, and from which `new` is not computed, read `new`; returns them."""
    graphs = move.old.graph.graphs
    reading = [use for use in move.uses if graphs[use.graph].producer(use) == move.old.ref]
    above = _above(move.new, move.old) if reading else set()
    cyclic = [use for use in reading if _stands_in(move.new, use) in above]
    if cyclic and swap:
        raise UsageError(
            f"{move.new} is computed from {move.old} by way of {cyclic[0]}, so swapping them would make a cycle. Leave"
            f" {cyclic[0].op!r} out with cannot_modify, or use reroute_ts."
        )
    left = set(cyclic)
    moved = [use for use in reading if use not in left]
    move.new.graph.reroute(move.old.ref, moved, move.new.ref)
    return [(use, move.old) for use in moved]


def _above(tensor: Tensor, stop: Tensor) -> set[str]:
    """Ops of `tensor`'s graph from which it is computed; none of them is searched for beyond the op of `stop`.

    No reader of `stop` can be above it in a graph without cycles; the way back of a TensorFlow 1 loop counts as none.
    """
    graph, end = tensor.graph, stop.ref.op if stop.graph is tensor.graph else None
    seen, queue = {tensor.ref.op}, [tensor.ref.op]
    for name in queue:
        for source in graph.nx.pred[name] if name != end else ():
            if source not in seen and graph.op(source).kind != "next_iteration":
                seen.add(source)
                queue.append(source)
    return seen


def _stands_in(tensor: Tensor, use: Use) -> str | None:
    """The op of `tensor`'s graph that is the use's own, or that owns the body which holds it."""
    graph, op = use.graph, use.op
    while graph != tensor.graph.name:
        parent = tensor.graph.graphs[graph].parent
        if parent is None:
            return None
        graph, op = parent
    return op
