"""What is in a model: its quantization ops with scale and zero point, and what stays float, with the reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant.ir import (
    FLOAT_TYPES,
    QUANTIZATION_KINDS,
    WEIGHTED_KINDS,
    Graph,
    Model,
    Op,
    Output,
    Parameters,
    Stored,
    TensorRef,
    Twins,
    Use,
)
from graphquant.qdq import family_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.numerics import Dynamic, QParams

WEIGHTED = WEIGHTED_KINDS | {"lstm", "gru", "rnn", "einsum"}
"""Kinds in which a model spends its multiplications."""

HANDED_ON = frozenset(
    {
        *("reshape", "identity", "transpose", "squeeze", "unsqueeze", "flatten", "split", "slice", "gather", "tile"),
        *("expand", "pad", "dropout", "max_pool", "reduce_max", "depth_to_space", "space_to_depth"),
    }
)
"""Kinds whose results are values that they read: quantized where these are, without a pair of their own."""

MAX_LOOK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One quantization op of a model.

    Attributes:
        graph: Its graph, "" for the main one.
        op: Its name.
        type: Its type.
        tensor: The float tensor or integer constant that it stands for.
        consumers: How many uses read the result.
        params: Scale and zero point; None where they are computed at run time.
        learned: Whether these are of variables, which training may have changed or may change.
        rule: The rule that inserted it, "" if graphquant did not.
        round: How it rounds, "" if that is not known.
    """

    graph: str
    op: str
    type: str
    tensor: TensorRef
    consumers: int
    params: QParams | Dynamic | None
    rule: str
    round: str = ""
    learned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a format that keeps scales in its tensors.

    Attributes:
        tensor: The tensor.
        kind: The kind of the op that makes it.
        output: Its name, dtype and shape.
        stored: Its place in the file, its scale and zero point.
    """

    tensor: TensorRef
    kind: str
    output: Output
    stored: Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """One op that multiplies, and whether its float inputs are all quantized."""

    graph: str
    op: str
    kind: str
    quantized: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What `inspect` shows.

    Attributes:
        model: The model.
        kinds: Number of ops per op type, most frequent first.
        readings: The quantization ops, in the order of the model.
        coverage: The ops that multiply.
        tensors: Every tensor, by its place in the file, where scales are in tensors (TFLite); else empty.
        idle: Functions that nothing reaches from the main graph.
        copies: Ops that multiply in saved functions and are left alone: rules see only what runs, and copies of that.
    """

    model: Model
    kinds: dict[str, int]
    readings: tuple[Reading, ...]
    coverage: tuple[Coverage, ...]
    tensors: tuple[StoredTensor, ...]
    idle: tuple[str, ...]
    copies: tuple[Coverage, ...]


def survey(model: Model) -> Survey:
    """Everything about `model` that bears on quantization; graphs that nothing reaches are only counted."""
    parameters = Parameters(model)
    live = model.live()
    types: Counter[str] = Counter()
    readings, coverage, tensors = [], [], []
    for name in live:
        graph = model.graphs[name]
        for op in graph.ops():
            if op.kind not in {"input", "output", "constant"}:
                types[op.type] += 1
            stored = _stored(graph, op)
            tensors += stored
            if op.kind in QUANTIZATION_KINDS and not stored and not _half(graph, op):
                readings.append(_reading(graph, op, parameters))
            if op.kind in WEIGHTED:
                reason = _float_input(graph, op)
                coverage.append(Coverage(graph=name, op=op.name, kind=op.kind, quantized=not reason, reason=reason))
    ordered = dict(sorted(types.items(), key=lambda item: (-item[1], item[0])))
    reached = set(live)
    idle = tuple(name for name in model.graphs if name not in reached and name not in model.saved)
    done = {(one.graph, one.op) for one in coverage if one.quantized}
    place = {name: number for number, name in enumerate(live)}
    tensors.sort(key=lambda one: (place[one.tensor.graph], one.stored.index))
    return Survey(
        model=model,
        kinds=ordered,
        readings=tuple(readings),
        coverage=tuple(coverage),
        tensors=tuple(tensors),
        idle=idle,
        copies=tuple(_left_alone(model, parameters, done)),
    )


def _left_alone(model: Model, parameters: Parameters, done: set[tuple[str, str]]) -> Iterator[Coverage]:
    """The ops in copies that no scale is known for, or that are float where their twin is not."""
    twins = Twins(model, parameters)
    for name in twins.copies:
        graph = model.graphs[name]
        for op in graph.ops():
            if op.kind not in WEIGHTED:
                continue
            twin, reason = twins.of(name, op.name), _float_input(graph, op)
            if twin is None:
                reason = "no op that runs computes the same on the same variables" if reason else ""
            elif twin not in done:
                reason = ""
            if reason:
                yield Coverage(graph=name, op=op.name, kind=op.kind, quantized=False, reason=reason)


def _stored(graph: Graph, op: Op) -> list[StoredTensor]:
    """The outputs of `op` that keep their scales themselves."""
    return [
        StoredTensor(tensor=TensorRef(graph.name, op.name, port), kind=op.kind, output=output, stored=output.stored)
        for port, output in enumerate(op.outputs)
        if output.stored is not None
    ]


def _half(graph: Graph, op: Op) -> bool:
    """Whether `op` is a quantize whose dequantize tells the same."""
    readers = graph.consumers(TensorRef(graph.name, op.name))
    return (
        op.kind == "quantize"
        and bool(readers)
        and all(graph.graphs[use.graph].op(use.op).kind == "dequantize" for use in readers)
    )


def _reading(graph: Graph, op: Op, parameters: Parameters) -> Reading:
    family = family_of(op)
    tensor = graph.producer(Use(graph.name, op.name, 0)) or TensorRef(graph.name, op.name)
    if op.kind == "dequantize" and graph.graphs[tensor.graph].op(tensor.op).kind == "quantize":
        tensor = graph.graphs[tensor.graph].producer(Use(tensor.graph, tensor.op, 0)) or tensor
    return Reading(
        graph=graph.name,
        op=op.name,
        type=op.type,
        tensor=tensor,
        consumers=len(graph.consumers(TensorRef(graph.name, op.name))),
        params=None if family is None else family.read(graph, op, parameters),
        rule=op.rule,
        round="" if family is None else family.rounding(op),
        learned=_learned(graph, op, parameters),
    )


def _learned(graph: Graph, op: Op, parameters: Parameters) -> bool:
    """Whether the range of the op is in variables."""
    ends = [slot for slot in graph.slots(op.name)[1:] if slot is not None and parameters.is_parameter(slot)]
    return any(graph.graphs[source.graph].op(source.op).kind == "variable" for source in map(parameters.origin, ends))


def _float_input(graph: Graph, op: Op) -> str:
    """Why the op computes in float: the first data input that comes from no quantization op; "" if there is none."""
    for slot, tensor in enumerate(graph.slots(op.name)):
        if tensor is None or op.role(slot) not in {"input", "weight", "recurrent_weight"}:
            continue
        if graph.output(tensor).dtype not in FLOAT_TYPES | {None}:
            continue
        source = _behind(graph, tensor)
        if source.kind not in QUANTIZATION_KINDS:
            return f"its {op.role(slot)} {tensor} is float"
    return ""


def _behind(graph: Graph, tensor: TensorRef) -> Op:
    """The op that makes `tensor`, or whose output it is but for a few ops that hand values on."""
    for _ in range(MAX_LOOK):
        home = graph.graphs[tensor.graph]
        op = home.op(tensor.op)
        read = home.producer(Use(tensor.graph, tensor.op, op.main))
        if op.kind not in HANDED_ON or read is None:
            break
        tensor = read
    return graph.graphs[tensor.graph].op(tensor.op)
