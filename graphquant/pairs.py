"""Which op of one model is which op of another: by name, and by their place in the graph where names differ.

Quantization ops, and reshapes that were inserted beside them, are looked through: an op is the same whether it reads a
tensor or that tensor quantized and dequantized.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphquant.ir import QUANTIZATION_KINDS, Graph, Model, Op, TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Iterator

Place = tuple[str, str]
"""A graph's name and an op's."""

BESIDE = frozenset({"reshape", "max", "min", "clip"})
"""Kinds that are inserted with quantization ops: so that channels are one axis, and values within a narrow range."""


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Ops of one model and what they are in the other.

    Attributes:
        to: The other's op for each op of the one, but quantization ops.
        back: The other way round.
        graphs: The other's graph for each graph of the one.
    """

    to: dict[Place, Place] = field(default_factory=dict)
    back: dict[Place, Place] = field(default_factory=dict)
    graphs: dict[str, str] = field(default_factory=dict)

    def tensor(self, tensor: TensorRef) -> TensorRef | None:
        """The other model's tensor for one of this, None if its op has no partner."""
        found = self.to.get((tensor.graph, tensor.op))
        return None if found is None else TensorRef(*found, tensor.port)


def pair(one: Model, other: Model) -> Pairs:
    """Pairs the ops of two models."""
    pairs = Pairs()
    todo = [("", "")]
    todo += [(name, name) for name, graph in one.graphs.items() if name and graph.parent is None]
    taken: set[str] = set()
    for name, twin in todo:
        if name in pairs.graphs or twin in taken or twin not in other.graphs:
            continue
        pairs.graphs[name] = twin
        taken.add(twin)
        _pair_graphs(one.graphs[name], other.graphs[twin], pairs)
        for op in one.graphs[name].ops():
            if not op.calls or (name, op.name) not in pairs.to:
                continue
            called = {call.attr: call.graph for call in other.graphs[twin].op(pairs.to[name, op.name][1]).calls}
            todo += [(call.graph, called[call.attr]) for call in op.calls if call.attr in called]
    return pairs


def inserted(op: Op) -> bool:
    """Whether `op` is a quantization op, or was inserted beside one to be looked through."""
    return op.kind in QUANTIZATION_KINDS or (bool(op.anchor) and op.kind in BESIDE)


def behind(model: Model, tensor: TensorRef) -> TensorRef:
    """What `tensor` is before it is quantized and dequantized; itself where nothing does that."""
    for _ in range(len(model.graphs[tensor.graph])):  # a broken model may hold a ring
        read = model.graphs[tensor.graph].producer(Use(tensor.graph, tensor.op, 0))
        if not inserted(model.op(tensor)) or read is None:
            break
        tensor = read
    return tensor


def unclipped(model: Model, tensor: TensorRef) -> TensorRef:
    """What `tensor` is before what was inserted to quantize it changes it."""
    for _ in range(len(model.graphs[tensor.graph])):
        op = model.op(tensor)
        read = model.graphs[tensor.graph].producer(Use(tensor.graph, tensor.op, 0))
        if op.kind in QUANTIZATION_KINDS or not inserted(op) or read is None:
            break
        tensor = read
    return tensor


def readers(model: Model, tensor: TensorRef) -> Iterator[Use]:
    """What reads `tensor`, also quantized and dequantized."""
    todo, seen = [tensor], {tensor}
    for here in todo:
        for use in model.graphs[here.graph].consumers(here):
            made = TensorRef(use.graph, use.op)
            if use.slot == 0 and inserted(model.graphs[use.graph].op(use.op)):
                todo += [] if made in seen else [made]
                seen.add(made)
            else:
                yield use


def _pair_graphs(one: Graph, other: Graph, pairs: Pairs) -> None:
    """Pairs the ops of two graphs: those of one name and type, then what is around them."""
    left = {op.name: op for op in other.ops() if not inserted(op)}
    done: list[tuple[str, str]] = []

    def link(name: str, twin: str) -> None:
        pairs.to[one.name, name] = (other.name, twin)
        pairs.back[other.name, twin] = (one.name, name)
        done.append((name, twin))

    for op in one.ops():
        same = left.get(op.name)
        if same is not None and not inserted(op) and _alike(op, same):
            link(op.name, op.name)
    models = Model(format="", graphs=one.graphs), Model(format="", graphs=other.graphs)
    for name, twin in done:
        for here, there in (
            *_sources(models, one, other, name, twin),
            *_targets(models, one, other, name, twin, pairs),
        ):
            free = (one.name, here) not in pairs.to and (other.name, there) not in pairs.back
            if free and _alike(one.op(here), other.op(there)) and _of_one_type(one.op(here), other.op(there)):
                link(here, there)


def _alike(op: Op, twin: Op) -> bool:
    """Whether the two may be the same op."""
    held = {"constant", "variable"}
    return (op.type, op.domain) == (twin.type, twin.domain) or (op.kind in held and twin.kind in held)


def _of_one_type(op: Op, twin: Op) -> bool:
    """Whether what they make may be the same: a weight and the integers that it is stored as are not."""
    return [output.dtype for output in op.outputs[:1]] == [output.dtype for output in twin.outputs[:1]]


def _sources(models: tuple[Model, Model], one: Graph, other: Graph, name: str, twin: str) -> Iterator[tuple[str, str]]:
    """The ops that the same slots of two ops read."""
    for here, there in zip(one.slots(name), other.slots(twin), strict=False):
        if here is None or there is None:
            continue
        raw, raw_there = behind(models[0], here), behind(models[1], there)
        if raw.port == raw_there.port and (raw.graph, raw_there.graph) == (one.name, other.name):
            yield raw.op, raw_there.op


def _targets(
    models: tuple[Model, Model], one: Graph, other: Graph, name: str, twin: str, pairs: Pairs
) -> Iterator[tuple[str, str]]:
    """The unpaired ops that read the same outputs of two ops with the same slots."""
    for port in range(min(len(one.op(name).outputs), len(other.op(twin).outputs))):
        free: dict[tuple[int, str], list[str]] = defaultdict(list)
        for use in readers(models[0], TensorRef(one.name, name, port)):
            if use.graph == one.name and (one.name, use.op) not in pairs.to:
                free[use.slot, one.op(use.op).type].append(use.op)
        if not free:
            continue
        there: dict[tuple[int, str], list[str]] = defaultdict(list)
        for use in readers(models[1], TensorRef(other.name, twin, port)):
            if use.graph == other.name and (other.name, use.op) not in pairs.back:
                there[use.slot, other.op(use.op).type].append(use.op)
        for key, names in free.items():
            yield from zip(names, there.get(key, []), strict=False)


__all__ = ["Pairs", "Place", "behind", "inserted", "pair", "readers", "unclipped"]
