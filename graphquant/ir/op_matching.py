"""Match the ops of two models: by name, and by position in the graph if names differ.

Matching looks through Q/DQ ops, and through reshapes and clamps that were inserted with them: an op is the same
whether it reads a tensor or that tensor quantized and dequantized.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from graphquant.ir.graph import Graph, Model
from graphquant.ir.kinds import QUANTIZATION_KINDS, STORED_KINDS
from graphquant.ir.types import Op, OpKey, TensorRef, Use, follow_to_end

_STATE_PREFIX = re.compile("^State(ful|less)")
INSERTED_HELPER_KINDS = frozenset({"cast", "reshape", "max", "min", "clip"})
"""Kinds that are inserted with Q/DQ ops: to widen float16, merge channel axes, and limit values to a narrow range."""


@dataclass(frozen=True, slots=True, eq=False)
class OpMatching:
    """Matched ops of a first and a second model."""

    # Ops of the second model by those of the first. Q/DQ ops are not matched.
    forward: dict[OpKey, OpKey] = field(default_factory=dict)
    backward: dict[OpKey, OpKey] = field(default_factory=dict)  # ops of the first model by those of the second
    graphs: dict[str, str] = field(default_factory=dict)  # graphs of the second model by those of the first

    def matching_tensor(self, tensor: TensorRef) -> TensorRef | None:
        """Return the tensor of the second model for one of the first, or None if its op has no match."""
        op_key = self.forward.get((tensor.graph, tensor.op))
        return None if op_key is None else TensorRef(*op_key, tensor.port)


def match_ops(first: Model, second: Model) -> OpMatching:
    """Match the ops of two models."""
    matching = OpMatching()
    pending = [("", "")]
    pending += [(name, name) for name, graph in first.graphs.items() if name and graph.parent is None]
    matched_graphs: set[str] = set()
    for name, second_name in pending:
        if name in matching.graphs or second_name in matched_graphs or second_name not in second.graphs:
            continue
        matching.graphs[name] = second_name
        matched_graphs.add(second_name)
        _match_graphs(first.graphs[name], second.graphs[second_name], matching)
        for op in first.graphs[name].ops():
            if not op.calls or (name, op.name) not in matching.forward:
                continue
            second_op = second.graphs[second_name].op(matching.forward[name, op.name][1])
            second_callees = {call.attr: call.graph for call in second_op.calls}
            pending += [(call.graph, second_callees[call.attr]) for call in op.calls if call.attr in second_callees]
    return matching


def is_inserted(op: Op) -> bool:
    """Return True for a Q/DQ op, or an op that was inserted with one."""
    return op.kind in QUANTIZATION_KINDS or (bool(op.anchor) and op.kind in INSERTED_HELPER_KINDS)


def is_barrier(graph: Graph, op: Op) -> bool:
    """Return True for a Clip without limits or an added Reshape, which keep optimizations away from a float op."""
    if op.type != "Clip":
        return op.type == "Reshape" and is_inserted(op)
    operands = [tensor for tensor in graph.slots(op.name) if tensor is not None]
    return len(operands) == 1 and op.attrs.keys().isdisjoint({"min", "max"})


def unquantized_source(model: Model, tensor: TensorRef, *, only_helpers: bool = False) -> TensorRef:
    """Return `tensor` before it is quantized and dequantized, or `tensor` itself if it is not.

    With `only_helpers`, return `tensor` before the reshapes and clamps that were inserted to quantize it.
    """

    def source(current: TensorRef) -> TensorRef | None:
        op = model.op(current)
        skipped = is_inserted(op) and not (only_helpers and op.kind in QUANTIZATION_KINDS)
        return model.graphs[current.graph].source_of(Use(current.graph, current.op, 0)) if skipped else None

    return follow_to_end(tensor, source, len(model.graphs[tensor.graph]))


def unclipped_source(model: Model, tensor: TensorRef) -> TensorRef:
    """Return `tensor` before the reshapes and clamps that were inserted to quantize it."""
    return unquantized_source(model, tensor, only_helpers=True)


def consumers_through_qdq(model: Model, tensor: TensorRef) -> Iterator[Use]:
    """Yield the uses of `tensor`, and of `tensor` quantized and dequantized."""
    pending, visited = [tensor], {tensor}
    for current in pending:
        for use in model.graphs[current.graph].consumers(current):
            result = TensorRef(use.graph, use.op)
            if use.slot == 0 and is_inserted(model.graphs[use.graph].op(use.op)):
                pending += [] if result in visited else [result]
                visited.add(result)
            else:
                yield use


def _match_graphs(first: Graph, second: Graph, matching: OpMatching) -> None:
    """Match the ops of two graphs, and of enclosing graphs that they read: by name and type, then by position."""
    second_ops = {op.name: op for op in second.ops() if not is_inserted(op)}
    linked: list[tuple[OpKey, OpKey]] = []

    def link(first_key: OpKey, second_key: OpKey) -> None:
        matching.forward[first_key] = second_key
        matching.backward[second_key] = first_key
        linked.append((first_key, second_key))

    for op in first.ops():
        same_name = second_ops.get(op.name)
        if same_name is not None and not is_inserted(op) and _may_be_same_op(op, same_name):
            link((first.name, op.name), (second.name, op.name))
    if first.parent is not None and len(first.outputs) == len(second.outputs):  # their positions count, not their names
        for names in zip(first.outputs, second.outputs, strict=True):
            first_key, second_key = (first.name, names[0]), (second.name, names[1])
            if first_key not in matching.forward and second_key not in matching.backward:
                link(first_key, second_key)
    models = Model(format="", graphs=first.graphs), Model(format="", graphs=second.graphs)
    for first_key, second_key in linked:  # grows while matches are added
        for first_neighbor, second_neighbor in (
            *_source_pairs(models, first_key, second_key, matching),
            *_consumer_pairs(models, first_key, second_key, matching),
        ):
            op = first.graphs[first_neighbor[0]].op(first_neighbor[1])
            second_op = second.graphs[second_neighbor[0]].op(second_neighbor[1])
            unmatched = first_neighbor not in matching.forward and second_neighbor not in matching.backward
            # A float weight does not match the integers in which it is stored.
            dtypes = [[output.dtype for output in matched.outputs[:1]] for matched in (op, second_op)]
            if unmatched and _may_be_same_op(op, second_op) and dtypes[0] == dtypes[1]:
                link(first_neighbor, second_neighbor)


def _may_be_same_op(op: Op, candidate: Op) -> bool:
    if (op.type, op.domain) == (candidate.type, candidate.domain):
        return True
    if op.calls and candidate.calls and not op.domain:  # calls become stateful when their functions read variables
        return op.kind == candidate.kind and _STATE_PREFIX.sub("", op.type) == _STATE_PREFIX.sub("", candidate.type)
    return op.kind in STORED_KINDS and candidate.kind in STORED_KINDS


def _source_pairs(
    models: tuple[Model, Model], first_key: OpKey, second_key: OpKey, matching: OpMatching
) -> Iterator[tuple[OpKey, OpKey]]:
    """Yield the ops that the same slots of two matched ops read."""
    slots = [model.graphs[graph].slots(op) for model, (graph, op) in zip(models, (first_key, second_key), strict=True)]
    for operands in zip(*slots, strict=False):
        if None not in operands:
            first, second = (unquantized_source(*pair) for pair in zip(models, operands, strict=True))
            if first.port == second.port and matching.graphs.get(first.graph) == second.graph:
                yield (first.graph, first.op), (second.graph, second.op)


def _consumer_pairs(
    models: tuple[Model, Model], first_key: OpKey, second_key: OpKey, matching: OpMatching
) -> Iterator[tuple[OpKey, OpKey]]:
    """Yield the unmatched ops of the same graphs that read the same outputs of two matched ops with the same slots."""

    def unmatched_readers(
        model: Model, tensor: TensorRef, matched: dict[OpKey, OpKey]
    ) -> dict[tuple[int, str], list[OpKey]]:
        by_slot_and_type = defaultdict(list)
        for use in consumers_through_qdq(model, tensor):
            if use.graph == tensor.graph and (use.graph, use.op) not in matched:
                by_slot_and_type[use.slot, model.graphs[use.graph].op(use.op).type].append((use.graph, use.op))
        return by_slot_and_type

    for port in range(len(models[0].graphs[first_key[0]].op(first_key[1]).outputs)):
        first_readers = unmatched_readers(models[0], TensorRef(*first_key, port), matching.forward)
        if first_readers:
            second_readers = unmatched_readers(models[1], TensorRef(*second_key, port), matching.backward)
            for key, op_keys in first_readers.items():
                yield from zip(op_keys, second_readers.get(key, []), strict=False)
