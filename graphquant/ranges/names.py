"""Which tensor of a model a name in a TFLite file stands for.

The converter names a tensor after all ops that it fused into one, in no fixed order, and after some that merely shared
a constant: `relu;batch_norm;other/conv;conv` is what the last of the connected ones makes. An op that several tensors
are named after belongs to none. Constants have such names too, and are no match: a kernel called `conv` is not what the
op `conv` makes.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from graphquant.ir import CONTROL, FORWARDING, WEIGHTED_KINDS, Model, Output, Shape, Stored, TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from graphquant.ir import Call, Graph

PREFIXES = ("StatefulPartitionedCall/", "PartitionedCall/", "serving_default_")
"""What the converter puts before the names inside a SavedModel's functions and before its inputs."""

MAX_STEPS = 64
"""Ops that only hand a tensor on, through which it is followed."""


def places(model: Model, activations: Mapping[str, Output], names: Collection[str]) -> dict[TensorRef, str]:
    """For the tensors of `model` that a TFLite file knows, their names there; those that two names claim are out.

    Args:
        model: The model.
        activations: The file's tensors that may be meant, by name.
        names: The names of all of the file's tensors.
    """
    known: dict[str, list[TensorRef]] = {}
    ranks: dict[TensorRef, int] = {}
    for name in model.live():
        graph = model.graphs[name]
        for rank, op in enumerate(_ordered(graph)):
            for port, output in enumerate(graph.op(op).outputs):
                ref = TensorRef(name, op, port)
                ranks[ref] = rank
                spellings = {f"{op}:{port}": 0, output.name: 0, **({op: 0} if not port else {})}
                for spelling in spellings:
                    known.setdefault(spelling, []).append(ref)
    claims: dict[TensorRef, list[str]] = {}
    plain = {name: name if name in known else _without_count(name, names) for name in activations}
    listed = Counter(part for name in set(plain.values()) for part in set(name.split(";")))
    for name, spelled in plain.items():
        parts = {part: listed[part] == 1 for part in spelled.split(";")}
        for found in known.get(spelled) or _find(model, known, ranks, parts):
            ref = _inner(model, found)
            if _as_large(model.output(ref).shape, activations[name].shape):
                claims.setdefault(ref, []).append(name)
    return {ref: same[0] for ref, same in claims.items() if _agree([activations[name] for name in same])}


def _without_count(name: str, names: Collection[str]) -> str:
    """`name` without the number that the converter puts behind it where another tensor has that name already."""
    digits = len(name) - len(name.rstrip("0123456789"))
    return next((name[:-cut] for cut in range(1, digits + 1) if name[:-cut] in names), name)


def _as_large(one: Shape | None, other: Shape | None) -> bool:
    """Whether two tensors may have the same number of elements a sample; layouts may differ."""
    sides = [None if shape is None or None in shape[1:] else shape[1:] for shape in (one, other)]
    products = [None if side is None else math.prod(size or 0 for size in side) for side in sides]
    return None in products or products[0] == products[1]


def _ordered(graph: Graph) -> Iterator[str]:
    """The ops of a graph, each behind what it reads; those in or behind loops are left out."""
    waiting = {name: sum(key != CONTROL for _, _, key in graph.nx.in_edges(name, keys=True)) for name in graph.nx}
    ready = [name for name, count in waiting.items() if not count]
    for name in ready:
        yield name
        for _, target, key in graph.nx.out_edges(name, keys=True):
            if key != CONTROL:
                waiting[target] -= 1
                if not waiting[target]:
                    ready.append(target)


def _find(
    model: Model, known: Mapping[str, list[TensorRef]], ranks: Mapping[TensorRef, int], parts: Mapping[str, bool]
) -> list[TensorRef]:
    """In each graph the tensor that the ops of a fused name make together; `parts` tells which no other name has."""
    named: dict[str, tuple[list[TensorRef], list[TensorRef]]] = {}
    for part, alone in parts.items():
        bare = _bare(part)
        for ref in known.get(bare, known.get(bare.removesuffix("/quant"), [])):  # what this program inserted
            named.setdefault(ref.graph, ([], []))[not alone].append(ref)
    found = (
        _last(model.graphs[graph], own or shared, shared if own else [], ranks)
        for graph, (own, shared) in named.items()
    )
    return [ref for ref in found if ref is not None]


def _last(
    graph: Graph, refs: list[TensorRef], shared: list[TensorRef], ranks: Mapping[TensorRef, int]
) -> TensorRef | None:
    """The last tensor of the largest group of neighbours among `refs`.

    None where two groups are equally large, or where one of `shared`, which other names have too, may come behind it.
    """
    group = {ref.op: ref.op for ref in refs}

    def find(name: str) -> str:
        while group[name] != name:
            group[name] = group[group[name]]
            name = group[name]
        return name

    for name in group:
        for source in _behind(graph, name):
            if source in group:
                group[find(source)] = find(name)
    sizes = Counter(find(name) for name in group)
    (first, size), *others = sizes.most_common(2)
    if others and others[0][1] == size:
        return None
    for other in shared:
        behind = any(source in group and find(source) == first for source in _behind(graph, other.op))
        if behind and graph.op(other.op).kind not in WEIGHTED_KINDS:
            return None
    return max((ref for ref in refs if find(ref.op) == first), key=ranks.__getitem__)


def _behind(graph: Graph, name: str) -> Iterator[str]:
    """The ops that an op reads, and those behind ops that this program made, which the file knows nothing of."""
    for source in graph.nx.pred[name]:
        yield source
        here: str | None = source
        for _ in range(MAX_STEPS):
            if here is None or not graph.op(here).rule:
                break
            read = graph.producer(Use(graph.name, here, 0)) if graph.slots(here) else None
            here = read.op if read is not None and read.graph == graph.name else None
            if here is not None:
                yield here


def _bare(name: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    while prefix:
        name = name.removeprefix(prefix)
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    return name


def stored(output: Output) -> Stored:
    """What the file says of a tensor, which may be nothing."""
    return output.stored or Stored(index=0, sizes=())


def _agree(outputs: list[Output]) -> bool:
    """Whether several tensors of the file say the same of one of the model."""
    first = stored(outputs[0])
    return all(
        outputs[0].dtype == output.dtype
        and np.array_equal(first.scale, stored(output).scale)
        and np.array_equal(first.zero_point, stored(output).zero_point)
        and np.array_equal(first.low, stored(output).low)
        for output in outputs[1:]
    )


def _inner(model: Model, ref: TensorRef) -> TensorRef:
    """What makes the tensor: for a function's result the op inside, for an identity what it hands on."""
    for _ in range(MAX_STEPS):
        op, graph = model.op(ref), model.graphs[ref.graph]
        source = None
        if op.kind == "call" and op.calls and ref.port < len(model.graphs[op.calls[0].graph].outputs):
            body = model.graphs[op.calls[0].graph]
            source = body.producer(Use(body.name, body.outputs[ref.port], 0))
        elif op.kind in FORWARDING | {"qdq"}:
            source = graph.producer(Use(ref.graph, ref.op, 0))
        if source is None:
            break
        ref = source
    return ref


def same(model: Model, callers: Mapping[str, list[tuple[Use, Call]]], tensor: TensorRef) -> Iterator[TensorRef]:
    """The tensor, and those that are handed on to it, quantized on the way or not, out of its function too."""
    for _ in range(MAX_STEPS):
        yield tensor
        op, graph = model.op(tensor), model.graphs[tensor.graph]
        source = None
        if op.kind in FORWARDING | {"qdq"}:
            source = graph.producer(Use(tensor.graph, tensor.op, 0))
        elif op.kind == "input" and len(callers.get(tensor.graph, ())) == 1:
            use, call = callers[tensor.graph][0]
            if call.offset is not None and not call.loop:
                slot = graph.inputs.index(tensor.op) + call.offset
                source = model.graphs[use.graph].producer(Use(use.graph, use.op, slot))
        if source is None:
            return
        tensor = source
