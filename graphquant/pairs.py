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
    """Pairs the ops of two graphs and what they read of graphs around them, by name and type, then by place."""
    left = {op.name: op for op in other.ops() if not inserted(op)}
    done: list[tuple[Place, Place]] = []

    def link(place: Place, twin: Place) -> None:
        pairs.to[place] = twin
        pairs.back[twin] = place
        done.append((place, twin))

    for op in one.ops():
        same = left.get(op.name)
        if same is not None and not inserted(op) and _alike(op, same):
            link((one.name, op.name), (other.name, op.name))
    models = Model(format="", graphs=one.graphs), Model(format="", graphs=other.graphs)
    for place, twin in done:  # grows while ops are found
        for here, there in (*_sources(models, place, twin, pairs), *_targets(models, place, twin, pairs)):
            op, like = one.graphs[here[0]].op(here[1]), other.graphs[there[0]].op(there[1])
            free = here not in pairs.to and there not in pairs.back
            if free and _alike(op, like) and _of_one_type(op, like):
                link(here, there)


def _alike(op: Op, twin: Op) -> bool:
    """Whether the two may be the same op."""
    held = {"constant", "variable"}
    return (op.type, op.domain) == (twin.type, twin.domain) or (op.kind in held and twin.kind in held)


def _of_one_type(op: Op, twin: Op) -> bool:
    """Whether what they make may be the same: a weight and the integers that it is stored as are not."""
    return [output.dtype for output in op.outputs[:1]] == [output.dtype for output in twin.outputs[:1]]


def _sources(models: tuple[Model, Model], place: Place, twin: Place, pairs: Pairs) -> Iterator[tuple[Place, Place]]:
    """The ops that the same slots of two ops read."""
    slots = (model.graphs[graph].slots(name) for model, (graph, name) in zip(models, (place, twin), strict=True))
    for here, there in zip(*slots, strict=False):
        if here is None or there is None:
            continue
        raw, like = behind(models[0], here), behind(models[1], there)
        if raw.port == like.port and pairs.graphs.get(raw.graph) == like.graph:
            yield (raw.graph, raw.op), (like.graph, like.op)


def _targets(models: tuple[Model, Model], place: Place, twin: Place, pairs: Pairs) -> Iterator[tuple[Place, Place]]:
    """The unpaired ops of the same graphs that read the same outputs of two ops with the same slots."""
    (one, name), (other, like) = place, twin
    for port in range(len(models[0].graphs[one].op(name).outputs)):
        free = _free(models[0], TensorRef(one, name, port), pairs.to)
        there = _free(models[1], TensorRef(other, like, port), pairs.back) if free else {}
        for key, places in free.items():
            yield from zip(places, there.get(key, []), strict=False)


def _free(model: Model, tensor: TensorRef, taken: dict[Place, Place]) -> dict[tuple[int, str], list[Place]]:
    """The ops that read `tensor` in its own graph and are not `taken`, by slot and type."""
    found: dict[tuple[int, str], list[Place]] = defaultdict(list)
    for use in readers(model, tensor):
        if use.graph == tensor.graph and (use.graph, use.op) not in taken:
            found[use.slot, model.graphs[use.graph].op(use.op).type].append((use.graph, use.op))
    return found


__all__ = ["Pairs", "Place", "behind", "inserted", "pair", "readers", "unclipped"]
