"""The proof of a converted model: each planned scale and zero point against the runtime's, and what stayed float."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphquant.ir import Call, Graph, Model, Op, Output, TensorRef, Use
from graphquant.numerics import Dynamic
from graphquant.ranges import places, same

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from graphquant.formats.tensorflow.convert import Detail
    from graphquant.numerics import Array
    from graphquant.rewrite import Inserted

TOLERANCE = 1e-6
"""By how much, relatively, a scale that is no power of two may differ: it went through a float32 range."""

NOT_COMPUTED = frozenset({"input", "output", "constant", "variable", "quantize", "dequantize"})
"""Kinds that are no computation of the model's."""


RESHAPING = frozenset({"reshape", "squeeze", "unsqueeze", "transpose"})
"""Kinds of which several on one tensor are often the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A planned tensor and what became of it.

    Attributes:
        tensor: The tensor in the model.
        name: Its name in the converted model, "" if it is not there.
        index: Its position there, None if it is not there.
        planned: Scale and zero point of the plan, None where the range is found at each run.
        found: Those of the runtime, None if it has none.
        problem: What is wrong, "" if nothing is.
    """

    tensor: TensorRef
    name: str
    index: int | None
    planned: tuple[Array, Array] | None
    found: tuple[Array, Array] | None
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatOp:
    """An op of the converted model that computes in float, with the reason."""

    op: str
    type: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What `prove` found.

    Attributes:
        lines: One for each planned tensor.
        floats: The ops that stayed float.
        ops: How many ops compute something.
    """

    lines: tuple[Line, ...]
    floats: tuple[FloatOp, ...]
    ops: int

    @property
    def agrees(self) -> bool:
        """Whether every planned tensor has its scale and zero point."""
        return not any(line.problem for line in self.lines)


def prove(model: Model, inserted: Sequence[Inserted], converted: Model, runtime: Sequence[Detail]) -> Receipt:
    """Compares what was planned with what the runtime has.

    Args:
        model: The rewritten model, as it was converted.
        inserted: What was inserted into it.
        converted: The converted model.
        runtime: What the runtime tells of each of its tensors.
    """
    told = {one.index: one for one in runtime}
    names = {one.name for one in runtime}
    activations: dict[str, Output] = {}
    constants: dict[str, tuple[Output, int | None]] = {}
    for op in converted.main.ops():
        for port, output in enumerate(op.outputs):
            if output.stored is None:
                continue
            if op.kind in {"constant", "variable"}:
                axis = _channel_axis(converted.main, TensorRef("", op.name, port))
                constants.update((part, (output, axis)) for part in output.name.split(";") if part.endswith("quant"))
            elif output.stored.scale.size:
                activations[output.name] = output
    known = places(model, activations, names)
    callers = model.callers()
    lines = []
    for done in inserted:
        if done.site.parameter:
            found, axis = _constant(model, done.output, constants)
        else:
            name = next((known[ref] for ref in _alike(model, callers, done.site.tensor) if ref in known), None)
            found, axis = None if name is None else activations[name], None
        lines.append(_line(done, found, axis, told))
    computed = [op for graph in converted.graphs.values() for op in graph.ops() if op.kind not in NOT_COMPUTED]
    floats = tuple(one for graph in converted.graphs.values() for one in _floats(graph))
    return Receipt(lines=tuple(lines), floats=floats, ops=len(computed))


def _alike(model: Model, callers: Mapping[str, list[tuple[Use, Call]]], tensor: TensorRef) -> Iterator[TensorRef]:
    """The tensor, those that are handed on to it, and what twins of its op make, which the converter keeps one of."""
    yield from same(model, callers, tensor)
    graph, op = model.graphs[tensor.graph], model.op(tensor)
    read = graph.producer(Use(tensor.graph, tensor.op, 0))
    for use in graph.consumers(read) if read is not None and op.kind in RESHAPING else ():
        if use.slot == 0 and graph.op(use.op).type == op.type:
            yield TensorRef(tensor.graph, use.op, tensor.port)


def _channel_axis(graph: Graph, tensor: TensorRef) -> int | None:
    """The channel axis that the first op which reads a constant as its weight has for it."""
    for use in graph.consumers(tensor):
        op = graph.op(use.op)
        if op.role(use.slot) == "weight":
            return op.channel_axis
    return None


def _constant(
    model: Model, output: TensorRef, constants: Mapping[str, tuple[Output, int | None]]
) -> tuple[Output | None, int | None]:
    """The constant that a quantized weight became, named after the last op that was inserted or the one before."""
    graph = model.graphs[output.graph]
    names = [output.op, *(slot.op for slot in graph.slots(output.op) if slot is not None)]
    return next((constants[name] for name in names if name in constants), (None, None))


def _line(done: Inserted, found: Output | None, axis: int | None, told: Mapping[int, Detail]) -> Line:
    params, site = done.params, done.site
    if isinstance(params, Dynamic):
        problem = "its range is found anew at each run, which the converter cannot express"
        return Line(tensor=site.tensor, name="", index=None, planned=None, found=None, problem=problem)
    planned = np.atleast_1d(params.scale), np.atleast_1d(params.zero_point)
    stored = None if found is None else found.stored
    if found is None or stored is None or stored.index not in told:
        problem = "no quantized tensor of the converted model has this name"
        return Line(tensor=site.tensor, name="", index=None, planned=planned, found=None, problem=problem)
    runtime = told[stored.index]
    problem = _difference(planned, runtime, axis if params.axis is not None else None)
    return Line(
        tensor=site.tensor,
        name=found.name,
        index=stored.index,
        planned=planned,
        found=(runtime.scales, runtime.zero_points) if runtime.scales.size else None,
        problem=problem,
    )


def _difference(planned: tuple[Array, Array], runtime: Detail, axis: int | None) -> str:
    """What is wrong with the runtime's numbers, "" if nothing is."""
    count = runtime.scales.size
    if not count:
        return "it has no scale: it stayed float"
    if count % planned[0].size:  # a depthwise kernel's multiplier repeats each channel's
        return f"it has {count} scales and not {planned[0].size}"
    scale, zero = (np.repeat(values, count // values.size) for values in planned)
    exact = np.frexp(scale)[0] == 0.5  # noqa: PLR2004  # a power of two
    near = np.abs(runtime.scales.astype(np.float64) - scale) <= TOLERANCE * scale
    if not np.where(exact, runtime.scales == scale, near).all():
        return "its scale differs"
    if not np.array_equal(runtime.zero_points, zero):
        return "its zero point differs"
    if axis is not None and count > 1 and runtime.axis != axis:
        return f"its axis is {runtime.axis} and not {axis}"
    return ""


def _floats(graph: Graph) -> Iterator[FloatOp]:
    for op in graph.ops():
        if op.kind in NOT_COMPUTED or op.calls:
            continue
        reasons = list(_lacking(graph, op))
        if reasons:
            yield FloatOp(
                op=op.name.partition(";")[0], type=op.type, reason=reasons[0] or "TFLite has no int8 kernel here"
            )


def _lacking(graph: Graph, op: Op) -> Iterator[str]:
    """For each float operand and result why it is float: it has no range, or "" if it has one; those without first."""
    found: list[str] = []
    for slot, tensor in enumerate(graph.slots(op.name)):
        if tensor is None or graph.output(tensor).dtype != "float32":
            continue
        source = graph.op(tensor.op)
        bare = source.kind != "dequantize" and op.role(slot) != "bias"
        found.append(f"its {op.role(slot)} {_short(source)} has no range" if bare else "")
    for port, output in enumerate(op.outputs):
        if output.dtype == "float32":
            readers = graph.consumers(TensorRef(graph.name, op.name, port))
            ranged = bool(readers) and all(graph.op(use.op).kind == "quantize" for use in readers)
            found.append("" if ranged else "its output has no range")
    yield from sorted(found, key=lambda reason: not reason)


def _short(op: Op) -> str:
    return op.name.partition(";")[0]
