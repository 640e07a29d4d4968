"""Reroute the readers of tensors.

As in TensorFlow 1, all readers of a tensor are rerouted to the other tensor of its pair. Three things are stricter.
Each input slot is rerouted individually, so that swapping the operands of `Add(a, b)` gives `Add(b, a)`. No cycle is
ever created. If an error is raised, nothing is changed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from graphquant.api.graph_editor.views import (
    Operation,
    Tensor,
    all_operations,
    all_tensors,
    as_operations,
    as_tensors,
    searched_graphs,
)
from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import Graph, Model, TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from graphquant.ir import Use


def reroute_ts(ts0: object, ts1: object, can_modify: object = None, cannot_modify: object = None) -> int:
    """Reroute the readers of each tensor of `ts1` to the matching tensor of `ts0`.

    Readers that are ancestors of the tensor of `ts0` are not rerouted: a quantizer that was just added after a tensor
    still reads it. A graph output (`@name`) is a reader like any other. Pairs are processed in order, with the readers
    at the time of the call, so that a tensor may be in both lists.

    Args:
        ts0: A tensor or an iterable of tensors.
        ts1: As many tensors, each of the same dtype and a compatible shape.
        can_modify: Ops, or a graph; only these are rerouted.
        cannot_modify: Ops, or a graph; these are not rerouted.

    Returns:
        The number of rerouted inputs.

    Raises:
        UsageError: The lists differ in length, tensors differ in dtype or shape or belong to two models, or a reader
            cannot access its new tensor.
    """
    return _reroute_pairs(_matched_pairs(ts0, ts1), _modification_filter(can_modify, cannot_modify), swap=False)


def swap_ts(ts0: object, ts1: object, can_modify: object = None, cannot_modify: object = None) -> int:
    """Swap the readers of each pair of tensors.

    Args:
        ts0: A tensor or an iterable of tensors.
        ts1: As many tensors, each of the same dtype and a compatible shape.
        can_modify: Ops, or a graph; only these are rerouted.
        cannot_modify: Ops, or a graph; these are not rerouted.

    Returns:
        The number of rerouted inputs.

    Raises:
        UsageError: As for `reroute_ts`; or an op to reroute lies between the two tensors of a pair, so that the swap
            would create a cycle.
    """
    return _reroute_pairs(_matched_pairs(ts0, ts1), _modification_filter(can_modify, cannot_modify), swap=True)


@dataclass(frozen=True, slots=True)
class _Move:
    """Readers of `old_tensor` to reroute to `new_tensor`."""

    old_tensor: Tensor
    new_tensor: Tensor
    uses: list[Use]


def _matched_pairs(ts0: object, ts1: object) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs of two lists, after checking that all of them match."""
    new_tensors, old_tensors = as_tensors(ts0), as_tensors(ts1)
    if len(new_tensors) != len(old_tensors):
        raise UsageError(f"{len(new_tensors)} tensors cannot be paired with {len(old_tensors)}. Give as many of each.")
    for new, old in zip(new_tensors, old_tensors, strict=True):
        if new.graph.graphs is not old.graph.graphs:
            raise UsageError(f"{new} and {old} belong to two models. Tensors are rerouted only within one model.")
        new.graph.reroute(old.ref, (), new.ref)  # validates the pair; an empty list of uses changes nothing
    return list(zip(new_tensors, old_tensors, strict=True))


def _modification_filter(can_modify: object, cannot_modify: object) -> Callable[[Operation], bool]:
    """Return a predicate of the ops that may be rerouted."""
    allowed = None if can_modify is None else frozenset(as_operations(can_modify))
    forbidden = frozenset(() if cannot_modify is None else as_operations(cannot_modify))
    return lambda op: (allowed is None or op in allowed) and op not in forbidden


def _reroute_pairs(
    pairs: Iterable[tuple[Tensor, Tensor]], may_modify: Callable[[Operation], bool], *, swap: bool
) -> int:
    moves = []
    for new, old in pairs:
        if new != old:
            moves.append(_Move(old, new, _modifiable_uses(old, may_modify)))
            if swap:
                moves.append(_Move(new, old, _modifiable_uses(new, may_modify)))
    rerouted: list[tuple[Use, Tensor]] = []
    try:
        for move in moves:
            rerouted += _apply_move(move, swap=swap)
    except UsageError:
        for use, old in reversed(rerouted):
            old.graph.graphs[use.graph].set_source(use, old.ref)
        raise
    return len(rerouted)


def _modifiable_uses(tensor: Tensor, may_modify: Callable[[Operation], bool]) -> list[Use]:
    return [use for use in tensor.uses() if may_modify(Operation(tensor.graph.graphs[use.graph], use.op))]


def _apply_move(move: _Move, *, swap: bool) -> list[tuple[Use, Tensor]]:
    """Reroute the uses that still read `old_tensor`, except ancestors of `new_tensor`; return the rerouted ones."""
    graphs = move.old_tensor.graph.graphs
    current_uses = [use for use in move.uses if graphs[use.graph].source_of(use) == move.old_tensor.ref]
    ancestors = _ancestors(move.new_tensor, move.old_tensor) if current_uses else set()
    cycle_uses = [use for use in current_uses if _enclosing_op(move.new_tensor, use) in ancestors]
    if cycle_uses and swap:
        raise UsageError(
            f"{move.new_tensor} is computed from {move.old_tensor} through {cycle_uses[0]}, so swapping them would"
            f" create a cycle. Exclude {cycle_uses[0].op!r} with cannot_modify, or use reroute_ts."
        )
    cyclic_uses = set(cycle_uses)
    moved = [use for use in current_uses if use not in cyclic_uses]
    move.new_tensor.graph.reroute(move.old_tensor.ref, moved, move.new_tensor.ref)
    return [(use, move.old_tensor) for use in moved]


def _ancestors(tensor: Tensor, stop: Tensor) -> set[str]:
    """Return the ancestors of `tensor` in its graph; the search does not go beyond the op of `stop`.

    In a graph without cycles no reader of `stop` is an ancestor of it. The back edge of a TensorFlow 1 loop is ignored.
    """
    graph, stop_op = tensor.graph, stop.ref.op if stop.graph is tensor.graph else None
    visited, queue = {tensor.ref.op}, [tensor.ref.op]
    for name in queue:
        for source in graph.nx.pred[name] if name != stop_op else ():
            if source not in visited and graph.op(source).kind != "next_iteration":
                visited.add(source)
                queue.append(source)
    return visited


def _enclosing_op(tensor: Tensor, use: Use) -> str | None:
    """Return the op of `tensor`'s graph that the use belongs to, directly or through nested bodies."""
    graph, op = use.graph, use.op
    while graph != tensor.graph.name:
        parent = tensor.graph.graphs[graph].parent
        if parent is None:
            return None
        graph, op = parent
    return op


# Select ops and tensors by regular expression, by scope, and by producer or reader.

T = TypeVar("T", Operation, Tensor)


def select_ops(
    *args: object, graph: Graph | Model | None = None, positive_filter: Callable[[Operation], bool] | None = None
) -> list[Operation]:
    r"""Return the ops that any of `args` selects, each once.

    Args:
        args: Regular expressions, searched anywhere in an op's name (`"^block1/"` matches that scope), or ops,
            iterables of ops, a graph. Tensors are ignored. A graph output matches only an expression that contains `@`,
            with which its name starts.
        graph: The graph to search, or a model with all graphs that run. An op of a nested graph matches by its own name
            and by `graph/op`.
        positive_filter: Predicate; only ops for which it is true are returned.

    Raises:
        UsageError: An expression is given without `graph`, it is not a regular expression, or an argument is not an op.
    """
    selected: dict[Operation, None] = {}
    for arg in args:
        if isinstance(arg, str | re.Pattern):
            pattern, searched = _compile_pattern(arg), _require_graph(graph)
            ops = (op for op in all_operations(searched) if op.kind != "output" or "@" in pattern.pattern)
            selected.update((op, None) for op in ops if pattern.search(op.name) or pattern.search(str(op)))
        else:
            selected.update(dict.fromkeys(as_operations(arg, ignore_ts=True)))
    return _apply_filter(selected, positive_filter)


def select_ts(
    *args: object, graph: Graph | Model | None = None, positive_filter: Callable[[Tensor], bool] | None = None
) -> list[Tensor]:
    r"""Return the tensors that any of `args` selects, each once.

    Args:
        args: Regular expressions, searched anywhere in a tensor's name (`r"^block1/.*:0$"`), or tensors, iterables of
            tensors, a graph. Ops are ignored.
        graph: The graph to search, or a model with all graphs that run. A tensor matches by `op:port`, by
            `graph/op:port`, and by its name in the file.
        positive_filter: Predicate; only tensors for which it is true are returned.

    Raises:
        UsageError: An expression is given without `graph`, it is not a regular expression, or an argument is not a
            tensor.
    """
    selected: dict[Tensor, None] = {}
    for arg in args:
        if isinstance(arg, str | re.Pattern):
            pattern, searched = _compile_pattern(arg), _require_graph(graph)
            selected.update(
                (tensor, None)
                for tensor in all_tensors(searched)
                if any(map(pattern.search, _searchable_names(tensor)))
            )
        else:
            selected.update(dict.fromkeys(as_tensors(arg, ignore_ops=True)))
    return _apply_filter(selected, positive_filter)


def get_name_scope_ops(ops: object, scope: str) -> list[Operation]:
    """Return those of `ops` (ops, a graph or a model) that are named `scope` or are in that scope."""
    prefix = scope.rstrip("/")
    return [op for op in as_operations(ops) if op.name == prefix or op.name.startswith(f"{prefix}/")]


def get_generating_ops(ts: object) -> list[Operation]:
    """Return the producer of each tensor of `ts`, in that order."""
    return [tensor.op for tensor in as_tensors(ts)]


def get_consuming_ops(ts: object) -> list[Operation]:
    """Return the ops that read a tensor of `ts`, each once, graph outputs (`@name`) included."""
    return list(dict.fromkeys(op for tensor in as_tensors(ts) for op in tensor.consumers()))


def get_tensor_by_name(graph: Graph | Model, name: str) -> Tensor:
    """Return the tensor called `name`: its name in the file, `op:port`, `graph/op:port`, or `op` for port 0.

    Raises:
        UsageError: There is no such tensor, or there are several.
    """
    matches = find_tensors(graph, name)
    if len(matches) > 1:
        listed = ", ".join(repr(str(tensor)) for tensor in matches[:5])
        raise UsageError(f"{len(matches)} tensors are called {name!r}. Give the full name of one: {listed}.")
    return matches[0]


def find_tensors(graph: Graph | Model, name: str) -> list[Tensor]:
    """Return every tensor called `name`; function clones hold one each.

    A name in the file takes precedence over `op:port`, which takes precedence over the name of an op.

    Raises:
        UsageError: There is no such tensor; the error lists the closest names.
    """
    by_file, by_port, by_op = list[Tensor](), list[Tensor](), list[Tensor]()
    for searched_graph in searched_graphs(graph):
        for op in searched_graph.ops():
            ports = (port for port, output in enumerate(op.outputs) if output.name == name)
            by_file += [Tensor(searched_graph, TensorRef(searched_graph.name, op.name, port)) for port in ports]
        for label in dict.fromkeys((name, name.removeprefix(f"{searched_graph.name}/"))):
            op_name, _, port_text = label.rpartition(":")
            outputs = searched_graph.op(op_name).outputs if op_name in searched_graph else ()
            by_port += [
                Tensor(searched_graph, TensorRef(searched_graph.name, op_name, port))
                for port in range(len(outputs))
                if str(port) == port_text
            ]
            if label in searched_graph and searched_graph.op(label).outputs:
                by_op.append(Tensor(searched_graph, TensorRef(searched_graph.name, label)))
    matches = by_file or by_port or by_op
    if not matches:
        candidates = dict.fromkeys(label for tensor in all_tensors(graph) for label in _searchable_names(tensor))
        suggestion = did_you_mean(name, candidates) or " graph_editor.select_ts('', graph=model) lists them all."
        raise UsageError(f"The model has no tensor {name!r}.{suggestion}")
    return matches


def _searchable_names(tensor: Tensor) -> tuple[str, ...]:
    return (tensor.name, str(tensor), tensor.op.node.outputs[tensor.ref.port].name)


def _apply_filter(selected: Iterable[T], positive_filter: Callable[[T], bool] | None) -> list[T]:
    return [candidate for candidate in selected if positive_filter is None or positive_filter(candidate)]


def _require_graph(graph: Graph | Model | None) -> Graph | Model:
    if graph is None:
        raise UsageError("A regular expression needs a graph to search. Give graph=model.")
    return graph


def _compile_pattern(expression: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise UsageError(f"{expression!r} is not a regular expression: {error}. Escape literal characters.") from error
