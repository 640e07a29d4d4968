"""Function clones: copies of a function whose ops compute the same as ops of the graphs that run.

A SavedModel contains a computation several times. Signatures call one copy of a function; Python code that loads the
model calls others. Ops that read the same variables in the same slots, with the same attributes, are clones. If there
are several candidates, their call paths (the names of the calls that lead to them, and their own name) must end
alike. From there, sources and consumers of clones are clones if type, attributes and constants agree and there is no
other candidate. Calls, branches and Identities are skipped. Functions that share no variable with the graphs that run
are not clones (docs/decisions/0026-function-clones.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.ir.kinds import BOUNDARY_KINDS, STORED_KINDS
from graphquant.ir.types import FLOAT_TYPES, MAX_HOPS, Call, Op, OpKey, TensorRef, Use, follow_to_end

if TYPE_CHECKING:
    from graphquant.ir.graph import Model
    from graphquant.ir.parameters import Parameters

MAX_PATH_CHANGES: Final = 4
"""Limit of changes to the path of a function while its callers are collected. A recursive function has no path."""

MAX_WEIGHT_DISTANCE: Final = 4  # limit of ops between a weight and the op that reads it quantized
_CALL_NAME: Final = re.compile(r"\A(Stateful)?PartitionedCall(_\d+)?\Z")
_UNMATCHED_KINDS: Final = BOUNDARY_KINDS | STORED_KINDS | {"identity", "call", "read_variable"}
"""Kinds that store or forward values. Matching skips them."""

_TRAINING_ATTRS: Final = frozenset({"is_training", "exponential_avg_factor", "seed", "seed2"})
"""Attributes in which a clone for training may differ."""

VariableReads = tuple[str, tuple[tuple[int, str], ...]]
"""Type of an op, and the variables that it reads by slot."""


class FunctionClones:
    """Matches ops in clones, which are the graphs that only saved functions reach, with ops of the graphs that run."""

    def __init__(self, model: Model, parameters: Parameters) -> None:
        """The model must not be edited while this is in use."""
        self._model = model
        self._parameters = parameters
        reachable = set(model.reachable_graphs())
        callable_graphs = model.graphs_reachable_from(model.saved_functions)
        originals = {*reachable, *model.saved_functions}
        self.clone_graphs = [name for name in callable_graphs if name not in originals]
        self._clone_graph_set = set(self.clone_graphs)
        self._input_positions: dict[str, dict[str, int]] = {}
        self._variable_reads: dict[OpKey, VariableReads] = {}
        self._originals: dict[OpKey, OpKey | None] = {}
        if self.clone_graphs:
            self._callers = model.callers(reachable.union(callable_graphs))
            self._spread_pairs([*self._pairs_by_variables(), *self._pairs_by_shared_functions()])

    def original_op(self, clone_graph: str, op_name: str) -> OpKey | None:
        """Return the running op that op `op_name` is a clone of; None if there is none, or several."""
        return self._originals.get((clone_graph, op_name))

    def may_be_same_value(self, clone_tensor: TensorRef, original_tensor: TensorRef) -> bool:
        """Return True if a tensor of a clone may have the same values as a tensor of the graphs that run.

        That is so if clones compute them, or if the caller of the clone passes the tensor, such as a layer's input.
        """
        clone_sources = self._possible_sources(clone_tensor)
        if None in clone_sources:
            return True
        original_sources = self._possible_sources(original_tensor) - {None}
        return all(self._original_tensor(source) in original_sources for source in clone_sources if source is not None)

    def _original_tensor(self, tensor: TensorRef) -> TensorRef | None:
        """Return the tensor of the graphs that run that `tensor` is a clone of, or `tensor` if it is one of them."""
        if tensor.graph not in self._clone_graph_set:
            return tensor
        original = self.original_op(tensor.graph, tensor.op)
        return None if original is None else TensorRef(*original, tensor.port)

    def _possible_sources(self, tensor: TensorRef) -> set[TensorRef | None]:
        """Return the tensors that callers may pass on as `tensor`, with None for one that no caller computes."""
        sources: set[TensorRef | None] = set()
        pending, visited = [tensor], {tensor}
        for current in pending:
            source = self._follow_forwarding(current)
            if source is None or self._model.op(source).kind != "input":
                sources.add(source)
                continue
            operands = [operand for operand in self._caller_operands(source.graph, source.op) if operand not in visited]
            pending.extend(operands)
            visited.update(operands)
            if not operands or len(pending) > MAX_HOPS:
                sources.add(None)
        return sources

    def variable_name(self, tensor: TensorRef) -> str | None:
        """Return the name of the variable whose value `tensor` is, quantized or not; None if it is not one."""

        def source(current: TensorRef) -> TensorRef | None:
            is_skipped = self._model.op(current).kind in {"qdq", "reshape"}
            return next(iter(self._model.graphs[current.graph].slots(current.op)), None) if is_skipped else None

        root = self._parameters.root_tensor(follow_to_end(tensor, source, MAX_WEIGHT_DISTANCE))
        return root.op if self._model.op(root).kind == "variable" else None

    def _pairs_by_variables(self) -> Iterator[tuple[OpKey, OpKey]]:
        """Yield pairs of clone and original that are certain because they read the same variables."""
        originals_by_reads: dict[VariableReads, list[tuple[OpKey, str | None]]] = {}
        for op_key, path in self._variable_readers(_call_paths(self._model, self._model.entry_graphs)):
            originals_by_reads.setdefault(self._variable_reads_of(op_key), []).append((op_key, path))
        paths = _call_paths(self._model, self._model.saved_functions)
        for op_key, path in self._variable_readers({name: paths[name] for name in self.clone_graphs}):
            candidates = [
                candidate
                for candidate in originals_by_reads.get(self._variable_reads_of(op_key), [])
                if self._may_be_clone(op_key, candidate[0])
            ]
            if len(candidates) > 1:
                candidates = [
                    (candidate, candidate_path)
                    for candidate, candidate_path in candidates
                    if candidate_path and path and _paths_meet(candidate_path, path)
                ]
            if len(candidates) == 1:
                yield op_key, candidates[0][0]

    def _pairs_by_shared_functions(self) -> Iterator[tuple[OpKey, OpKey]]:
        """Yield pairs of ops that read the result of a function which both a clone and a graph that runs call."""
        shared = (
            name
            for name, uses in self._callers.items()
            if name not in self._clone_graph_set and any(use.graph in self._clone_graph_set for use, _ in uses)
        )
        for graph in map(self._model.graphs.__getitem__, shared):
            for label in graph.outputs:
                source = self._computed_source(graph.source_of(Use(graph.name, label, 0)))
                if source is not None:
                    yield from (
                        pair
                        for pair in self._consumer_pairs(source, source)
                        if self._may_be_clone(*pair) and self._read_same_values(*pair)
                    )

    def _variable_readers(self, paths: dict[str, str | None]) -> Iterator[tuple[OpKey, str | None]]:
        """Yield the ops of these graphs that read variables, with their paths."""
        for name, path in paths.items():
            for op in self._model.graphs[name].ops():
                if op.kind not in _UNMATCHED_KINDS and self._variable_reads_of((name, op.name))[1]:
                    yield (name, op.name), None if path is None else _join_call_path(path, op.name)

    def _variable_reads_of(self, op_key: OpKey) -> VariableReads:
        if op_key not in self._variable_reads:
            slots = enumerate(self._model.graphs[op_key[0]].slots(op_key[1]))
            reads = ((slot, self.variable_name(tensor)) for slot, tensor in slots if tensor is not None)
            known_reads = tuple((slot, variable) for slot, variable in reads if variable is not None)
            self._variable_reads[op_key] = self._op_of(op_key).type, known_reads
        return self._variable_reads[op_key]

    def _op_of(self, op_key: OpKey) -> Op:
        return self._model.graphs[op_key[0]].op(op_key[1])

    def _spread_pairs(self, queue: list[tuple[OpKey, OpKey]]) -> None:
        """Record the pairs in `queue`, and those that follow from them. An op with two originals gets none."""
        for clone, original in queue:
            if clone in self._originals:
                if self._originals[clone] != original:
                    self._originals[clone] = None
                continue
            self._originals[clone] = original
            queue.extend(
                pair
                for pair in self._neighbor_pairs(clone, original)
                if self._may_be_clone(*pair) and self._read_same_values(*pair)
            )

    def _neighbor_pairs(self, clone: OpKey, original: OpKey) -> Iterator[tuple[OpKey, OpKey]]:
        """Yield the pairs of ops that a clone and its original read, and of ops that read these two."""
        slots = [self._model.graphs[name].slots(op) for name, op in (clone, original)]
        for clone_operand, original_operand in zip(*slots, strict=False):
            sources = self._computed_source(clone_operand), self._computed_source(original_operand)
            if sources[0] is not None and sources[1] is not None and sources[0].port == sources[1].port:
                yield (sources[0].graph, sources[0].op), (sources[1].graph, sources[1].op)
        for port in range(len(self._op_of(clone).outputs)):
            yield from self._consumer_pairs(TensorRef(*clone, port), TensorRef(*original, port))

    def _consumer_pairs(self, clone_tensor: TensorRef, original_tensor: TensorRef) -> Iterator[tuple[OpKey, OpKey]]:
        """Yield the pairs of ops in clones that read `clone_tensor` and ops that run and read `original_tensor`.

        A function that both call has consumers of both sorts. Each clone has its own counterpart of a consumer.
        """
        originals_by_kind = self._computing_consumers(original_tensor)
        for kind, consumers in self._computing_consumers(clone_tensor).items():
            originals = [op for op in originals_by_kind.get(kind, []) if op[0] not in self._clone_graph_set]
            by_graph: dict[str, list[OpKey]] = {}
            for consumer in consumers:
                if consumer[0] in self._clone_graph_set:
                    by_graph.setdefault(consumer[0], []).append(consumer)
            for clones in by_graph.values():
                yield from _pair_candidates(clones, originals)

    def _computed_source(self, tensor: TensorRef | None) -> TensorRef | None:
        """Return the tensor that Identities, calls and arguments forward as `tensor`; None if there may be several."""
        for _ in range(MAX_HOPS):
            tensor = self._follow_forwarding(tensor)
            if tensor is None or self._model.op(tensor).kind != "input":
                return tensor
            operands = self._caller_operands(tensor.graph, tensor.op)
            tensor = operands[0] if len(operands) == 1 else None
        return None

    def _follow_forwarding(self, tensor: TensorRef | None) -> TensorRef | None:
        """Return the computed tensor or argument that Identities and calls forward as `tensor`; None if unknown."""
        for _ in range(MAX_HOPS):
            if tensor is None:
                break
            graph, op = self._model.graphs[tensor.graph], self._model.op(tensor)
            if op.kind == "identity":
                tensor = next(iter(graph.slots(op.name)), None)
            elif op.kind == "call" and op.calls:
                called = self._model.graphs[op.calls[0].graph]
                output_name = called.outputs[tensor.port] if tensor.port < len(called.outputs) else None
                tensor = None if output_name is None else called.source_of(Use(called.name, output_name, 0))
            else:
                return tensor
        return None

    def _caller_operands(self, graph_name: str, argument: str) -> list[TensorRef]:
        """Return the tensors that callers pass for an argument of a function or branch; none for one of a loop.

        Clones that call a function that also runs do not count, because they may pass other values.
        """
        if graph_name not in self._input_positions:
            inputs = self._model.graphs[graph_name].inputs
            self._input_positions[graph_name] = {label: position for position, label in enumerate(inputs)}
        position = self._input_positions[graph_name].get(argument)
        callers = [] if position is None else self._callers.get(graph_name, [])
        is_clone = graph_name in self._clone_graph_set
        operands = (
            self._model.passed_operand(use, call, position or 0)
            for use, call in callers
            if not call.loop and (is_clone or use.graph not in self._clone_graph_set)
        )
        return [operand for operand in dict.fromkeys(operands) if operand is not None]

    def _computing_consumers(self, tensor: TensorRef) -> dict[tuple[str, int], list[OpKey]]:
        """Return the ops that read `tensor`, directly or through Identities, calls and results, by type and slot."""
        by_type_and_slot: dict[tuple[str, int], list[OpKey]] = {}
        pending, visited = [tensor], {tensor}
        for current in pending:
            for use in self._model.graphs[current.graph].consumers(current):
                op = self._op_of((use.graph, use.op))
                forwarded = list(self._forwarded_tensors(op, use))
                if not forwarded and op.kind not in _UNMATCHED_KINDS:
                    by_type_and_slot.setdefault((op.type, use.slot), []).append((use.graph, use.op))
                pending.extend(successor for successor in forwarded if successor not in visited)
                visited.update(forwarded)
            if len(pending) > MAX_HOPS:
                return {}
        return by_type_and_slot

    def _forwarded_tensors(self, op: Op, use: Use) -> Iterator[TensorRef]:
        """Yield the tensors to which `op` forwards its operand at `use`."""
        graph = self._model.graphs[use.graph]
        if op.kind == "identity":
            yield TensorRef(use.graph, op.name)
        elif op.kind in {"call", "if"}:
            for call in op.calls:
                inputs = self._model.graphs[call.graph].inputs
                position = -1 if call.offset is None else use.slot - call.offset
                if 0 <= position < len(inputs):
                    yield TensorRef(call.graph, inputs[position])
        elif op.kind == "output" and op.name in graph.outputs:
            port = graph.outputs.index(op.name)
            for caller, call in self._callers.get(use.graph, []):
                if not call.loop and port < len(self._op_of((caller.graph, caller.op)).outputs):
                    yield TensorRef(caller.graph, caller.op, port)

    def _may_be_clone(self, clone: OpKey, original: OpKey) -> bool:
        """Return True if a clone's op and a running op have the same type and attributes."""
        clone_op, original_op = self._op_of(clone), self._op_of(original)
        if clone_op.type != original_op.type or clone_op.kind in _UNMATCHED_KINDS or clone_op.calls:
            return False
        if clone[0] not in self._clone_graph_set or original[0] in self._clone_graph_set:
            return False
        names = {name for name in (*clone_op.attrs, *original_op.attrs) if not name.startswith("_")} - _TRAINING_ATTRS
        return all(repr(clone_op.attrs.get(name)) == repr(original_op.attrs.get(name)) for name in names)

    def _read_same_values(self, clone: OpKey, original: OpKey) -> bool:
        """Return True if two ops read the same variables and the same float constants."""
        if self._variable_reads_of(clone) != self._variable_reads_of(original):
            return False
        slots = [self._model.graphs[name].slots(op) for name, op in (clone, original)]
        return len(slots[0]) == len(slots[1]) and all(map(self._operands_equal, *slots))

    def _operands_equal(self, clone_operand: TensorRef | None, original_operand: TensorRef | None) -> bool:
        """Return True if two operands have the same value, or if neither is a float constant."""
        if clone_operand is None or original_operand is None:
            return clone_operand is original_operand
        is_float = self._model.output(clone_operand).dtype in FLOAT_TYPES
        are_parameters = [self._parameters.is_parameter(tensor) for tensor in (clone_operand, original_operand)]
        if not is_float or not any(are_parameters) or self.variable_name(clone_operand) is not None:
            return True
        if not all(are_parameters):
            return False
        clone_value, original_value = self._parameters.value(clone_operand), self._parameters.value(original_operand)
        return clone_value is not None and original_value is not None and np.array_equal(clone_value, original_value)


def _pair_candidates(clones: list[OpKey], originals: list[OpKey]) -> Iterator[tuple[OpKey, OpKey]]:
    """Pair ops of one type that read one value: if there is one of each, or by name."""
    if len(clones) == len(originals) == 1:
        yield clones[0], originals[0]
        return
    for clone in clones:
        same_name = [original for original in originals if original[1] == clone[1]]
        if len(same_name) == 1:
            yield clone, same_name[0]


def _call_paths(model: Model, starts: Iterable[str]) -> dict[str, str | None]:
    """Return the names of the calls that lead to each graph reachable from `starts`; None if callers disagree."""
    paths: dict[str, str | None] = dict.fromkeys(starts, "")
    changes: dict[str, int] = {}
    queue = list(paths)
    for name in queue:
        for op, call in model.graphs[name].calls():
            path = paths[name]
            inner = None if path is None else _join_call_path(path, _call_scope(op, call))
            outer = inner if call.graph not in paths else _longer_path(paths[call.graph], inner)
            if call.graph not in paths or outer != paths[call.graph]:
                changes[call.graph] = changes.get(call.graph, 0) + 1
                paths[call.graph] = outer if changes[call.graph] <= MAX_PATH_CHANGES else None
                queue.append(call.graph)
    return paths


def _call_scope(op: Op, call: Call) -> str:
    """Return the part that a call adds to the path of its callee.

    Names that TensorFlow generates for plain calls add nothing. Ops whose name starts with "@" are calls from Python.
    """
    segments = op.name.split("/")
    if _CALL_NAME.match(segments[-1]) or segments[0].startswith("@"):
        segments.pop()
    return "/".join(segments if call.attr == "f" else (*segments, call.attr))


def _join_call_path(path: str, name: str) -> str:
    return f"{path}/{name}" if path and name else path or name


def _longer_path(first_path: str | None, second_path: str | None) -> str | None:
    """Return the longer of two paths if it ends in the other, else None."""
    if first_path is None or second_path is None or not _paths_meet(first_path, second_path):
        return None
    return max(first_path, second_path, key=len)


def _paths_meet(first_path: str, second_path: str) -> bool:
    """Return True if one of two paths ends in the other."""
    return (
        f"/{first_path}".endswith(f"/{second_path}")
        or f"/{second_path}".endswith(f"/{first_path}")
        or not (first_path and second_path)
    )
