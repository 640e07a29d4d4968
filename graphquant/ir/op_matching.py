"""Which op of one model is which op of another: by name, and by their place in the graph where names differ.

Quantization ops, and reshapes that were inserted beside them, are looked through: an op is the same whether it reads a
tensor or that tensor quantized and dequantized.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphquant.ir.graph import Graph, Model
from graphquant.ir.types import QUANTIZATION_KINDS, Op, TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Iterator


OpKey = tuple[str, str]
"""A graph's name and an op's."""

INSERTED_HELPER_KINDS = frozenset({"reshape", "max", "min", "clip"})
"""Kinds that are inserted with quantization ops: so that channels are one axis, and values within a narrow range."""


@dataclass(frozen=True, slots=True, eq=False)
class OpMatching:
    """Ops of one model and what they are in the other.

    Attributes:
        forward: The other's op for each op of the one, but quantization ops.
        backward: The other way round.
        graphs: The other's graph for each graph of the one.
    """

    forward: dict[OpKey, OpKey] = field(default_factory=dict)
    backward: dict[OpKey, OpKey] = field(default_factory=dict)
    graphs: dict[str, str] = field(default_factory=dict)

    def matching_tensor(self, tensor: TensorRef) -> TensorRef | None:
        """The other model's tensor for one of this, None if its op has no partner."""
        op_key = self.forward.get((tensor.graph, tensor.op))
        return None if op_key is None else TensorRef(*op_key, tensor.port)


def match_ops(first: Model, second: Model) -> OpMatching:
    """Pairs the ops of two models."""
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
            second_callees = {
                call.attr: call.graph
                for call in second.graphs[second_name].op(matching.forward[name, op.name][1]).calls
            }
            pending += [(call.graph, second_callees[call.attr]) for call in op.calls if call.attr in second_callees]
    return matching


def is_inserted(op: Op) -> bool:
    """Whether `op` is a quantization op, or was inserted beside one to be looked through."""
    return op.kind in QUANTIZATION_KINDS or (bool(op.anchor) and op.kind in INSERTED_HELPER_KINDS)


def unquantized_source(model: Model, tensor: TensorRef) -> TensorRef:
    """What `matching_tensor` is before it is quantized and dequantized; itself where nothing does that."""
    for _ in range(len(model.graphs[tensor.graph])):  # a broken model may hold a ring
        source = model.graphs[tensor.graph].source_of(Use(tensor.graph, tensor.op, 0))
        if not is_inserted(model.op(tensor)) or source is None:
            break
        tensor = source
    return tensor


def unclipped_source(model: Model, tensor: TensorRef) -> TensorRef:
    """What `matching_tensor` is before what was inserted to quantize it changes it."""
    for _ in range(len(model.graphs[tensor.graph])):
        op = model.op(tensor)
        source = model.graphs[tensor.graph].source_of(Use(tensor.graph, tensor.op, 0))
        if op.kind in QUANTIZATION_KINDS or not is_inserted(op) or source is None:
            break
        tensor = source
    return tensor


def consumers_through_qdq(model: Model, tensor: TensorRef) -> Iterator[Use]:
    """What reads `matching_tensor`, also quantized and dequantized."""
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
    """Pairs the ops of two graphs and what they read of graphs around them, by name and type, then by place."""
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
    models = Model(format="", graphs=first.graphs), Model(format="", graphs=second.graphs)
    for first_key, second_key in linked:  # grows while ops are found
        for first_neighbor, second_neighbor in (
            *_source_pairs(models, first_key, second_key, matching),
            *_consumer_pairs(models, first_key, second_key, matching),
        ):
            op, second_op = (
                first.graphs[first_neighbor[0]].op(first_neighbor[1]),
                second.graphs[second_neighbor[0]].op(second_neighbor[1]),
            )
            unmatched = first_neighbor not in matching.forward and second_neighbor not in matching.backward
            if unmatched and _may_be_same_op(op, second_op) and _same_output_dtype(op, second_op):
                link(first_neighbor, second_neighbor)


def _may_be_same_op(op: Op, candidate: Op) -> bool:
    """Whether the two may be the same op."""
    stored_kinds = {"constant", "variable"}
    return (op.type, op.domain) == (candidate.type, candidate.domain) or (
        op.kind in stored_kinds and candidate.kind in stored_kinds
    )


def _same_output_dtype(op: Op, candidate: Op) -> bool:
    """Whether what they make may be the same: a weight and the integers that it is stored as are not."""
    return [output.dtype for output in op.outputs[:1]] == [output.dtype for output in candidate.outputs[:1]]


def _source_pairs(
    models: tuple[Model, Model], first_key: OpKey, second_key: OpKey, matching: OpMatching
) -> Iterator[tuple[OpKey, OpKey]]:
    """The ops that the same slots of two ops read."""
    slots = (
        model.graphs[graph].slots(name) for model, (graph, name) in zip(models, (first_key, second_key), strict=True)
    )
    for first_operand, second_operand in zip(*slots, strict=False):
        if first_operand is None or second_operand is None:
            continue
        first_source, second_source = (
            unquantized_source(models[0], first_operand),
            unquantized_source(models[1], second_operand),
        )
        if first_source.port == second_source.port and matching.graphs.get(first_source.graph) == second_source.graph:
            yield (first_source.graph, first_source.op), (second_source.graph, second_source.op)


def _consumer_pairs(
    models: tuple[Model, Model], first_key: OpKey, second_key: OpKey, matching: OpMatching
) -> Iterator[tuple[OpKey, OpKey]]:
    """The unpaired ops of the same graphs that read the same outputs of two ops with the same slots."""
    (first_graph, first_name), (second_graph, second_name) = first_key, second_key
    for port in range(len(models[0].graphs[first_graph].op(first_name).outputs)):
        first_readers = _unmatched_readers(models[0], TensorRef(first_graph, first_name, port), matching.forward)
        second_readers = (
            _unmatched_readers(models[1], TensorRef(second_graph, second_name, port), matching.backward)
            if first_readers
            else {}
        )
        for key, op_keys in first_readers.items():
            yield from zip(op_keys, second_readers.get(key, []), strict=False)


def _unmatched_readers(
    model: Model, tensor: TensorRef, matched: dict[OpKey, OpKey]
) -> dict[tuple[int, str], list[OpKey]]:
    """The ops that read `matching_tensor` in its own graph and are not `matched`, by slot and type."""
    by_slot_and_type: dict[tuple[int, str], list[OpKey]] = defaultdict(list)
    for use in consumers_through_qdq(model, tensor):
        if use.graph == tensor.graph and (use.graph, use.op) not in matched:
            by_slot_and_type[use.slot, model.graphs[use.graph].op(use.op).type].append((use.graph, use.op))
    return by_slot_and_type
