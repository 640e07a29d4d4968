"""Tables of what backends want around each kind of op, and verdicts from such a table.

A backend that is told by documents, not by an optimizer's steps, is a table from kinds to rows. A row lists
requirements: functions that get an op with what stands around it and tell which rule it breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from graphquant.backends.sides import Side, Sides, same
from graphquant.backends.types import NOT_QUANTIZED, Broken, Verdict
from graphquant.ir import FLOAT_TYPES, QUANTIZATION_KINDS
from graphquant.numerics import IntType, QParams

if TYPE_CHECKING:
    from graphquant.backends.types import Status
    from graphquant.ir import Graph, Model, Op, TensorRef, Use

SILENT = QUANTIZATION_KINDS | {
    *("input", "output", "constant", "variable", "shape", "if", "loop", "scan", "call", "identity", "dropout", "cast")
}
"""Kinds that compute nothing on floats, or whose bodies have verdicts of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An op with what stands around it.

    Attributes:
        op: The op.
        graph: Its graph.
        sides: Reads weights.
        inputs: Its float data inputs; `pair` and `params` are those before ops that move values, if there are any.
        pairs: Scale and zero point of the quantizations behind it, or behind what is fused with it.
        readers: What else reads it.
    """

    op: Op
    graph: Graph
    sides: Sides
    inputs: tuple[Side, ...]
    pairs: tuple[QParams | None, ...]
    readers: tuple[Use, ...]

    def by_role(self, role: str) -> Side | None:
        """The first input of a role."""
        return next((side for side in self.inputs if side.role == role), None)

    @property
    def activations(self) -> list[Side]:
        """The inputs that are no parameters, or that are computed on like such."""
        return [side for side in self.inputs if side.role == "input"]


Requirement = Callable[[Seen], Broken | None]

Note = Callable[[Seen], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a backend wants of ops of some kinds.

    Attributes:
        requires: The rules, in the order in which they are tried.
        notes: Why low precision does not pay for an op that meets them.
    """

    requires: tuple[Requirement, ...]
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A backend's rows.

    Attributes:
        name: The backend, for people.
        rows: By kind; ops of other kinds stay float.
        fuses: For each kind the kinds that are fused behind it.
        moves: Kinds that hand the scale of their input on, so that what reads them reads integers.
        moves_if: Kinds of which only some ops do, and whether an op does.
        joins: The kinds of sums that a weighted op takes up where all but that op's branch is quantized.
    """

    name: str
    rows: Mapping[str, Row]
    fuses: Mapping[str, frozenset[str]] = field(default_factory=dict)
    moves: frozenset[str] = frozenset()
    moves_if: Mapping[str, Callable[[Op], bool]] = field(default_factory=dict)
    joins: frozenset[str] = frozenset()


def judge(model: Model, table: Table) -> tuple[Verdict, ...]:
    """The verdicts on a model's ops."""
    return _Judge(model, table).verdicts()


class _Judge:
    def __init__(self, model: Model, table: Table) -> None:
        self.model, self.table, self.sides = model, table, Sides(model)
        self.into: dict[tuple[str, str], str] = {}
        self.moved: dict[TensorRef, Side | None] = {}

    def verdicts(self) -> tuple[Verdict, ...]:
        ops = [(self.model.graphs[name], op) for name in self.model.live() for op in self.model.graphs[name].ops()]
        ops = [(graph, op) for graph, op in ops if self._asked(graph, op)]
        tails = {(graph.name, op.name): self._tail(graph, op) for graph, op in ops}
        told: dict[tuple[str, str], Verdict] = {}
        for graph, op in ops:
            if (graph.name, op.name) not in self.into:
                told[graph.name, op.name] = self._judged(graph, op, tails[graph.name, op.name])
        return tuple(self._final(told, graph, op) for graph, op in ops)

    def _asked(self, graph: Graph, op: Op) -> bool:
        tensors = [tensor for tensor in graph.slots(op.name) if tensor is not None]
        floats = any(graph.output(tensor).dtype in FLOAT_TYPES for tensor in tensors)
        floats = floats or any(output.dtype in FLOAT_TYPES for output in op.outputs)
        known = bool(tensors) and all(self.sides.parameters.is_parameter(tensor) for tensor in tensors)
        return op.kind not in SILENT and floats and not known

    def _tail(self, graph: Graph, op: Op) -> Op:
        """The last of the ops that are fused behind `op`."""
        fused = self.table.fuses.get(op.kind)
        tail = op
        while fused is not None:
            readers = list(self.sides.readers(graph, tail))
            if len(readers) != 1 or readers[0][0].graph != graph.name or readers[0][1].kind not in fused:
                break
            if readers[0][0].slot != 0 or (graph.name, readers[0][1].name) in self.into:
                break
            tail = readers[0][1]
            self.into[graph.name, tail.name] = op.name
        return tail

    def _judged(self, graph: Graph, op: Op, tail: Op) -> Verdict:
        row = self.table.rows.get(op.kind)
        if row is None:
            says = f"{self.table.name} has no {op.type} on integers"
            broken = Broken(rule="no-kernel", says=says, fix="leave it float, or quantize what is around it only")
            return self._made(graph, op, broken)
        pairs, others = self.sides.outputs(graph, tail)
        seen = Seen(
            op=op,
            graph=graph,
            sides=self.sides,
            inputs=tuple(self._moved(side) for side in self.sides.inputs(graph, op)),
            pairs=tuple(params for _, params in pairs),
            readers=tuple(others),
        )
        found = next(filter(None, (require(seen) for require in row.requires)), None)
        if found is not None and op.kind in self.table.joins and (branch := self._branch(graph, seen)):
            self.into[graph.name, op.name] = branch
            return self._made(graph, op, None)
        note = "" if found else "; ".join(filter(None, (tell(seen) for tell in row.notes)))
        return self._made(graph, op, found, note)

    def _branch(self, graph: Graph, seen: Seen) -> str:
        """The weighted op that takes a sum up: it makes the one input that is float, and nothing else reads it."""
        floats = [side for side in seen.inputs if not side.pair]
        if len(floats) != 1 or len(seen.inputs) < 2 or floats[0].tensor.graph != graph.name:  # noqa: PLR2004  # a sum
            return ""
        name = floats[0].tensor.op
        name = self.into.get((graph.name, name), name)
        alone = len(list(self.sides.readers(graph, graph.op(floats[0].tensor.op)))) == 1
        return name if alone and graph.op(name).kind in self.table.fuses else ""

    def _moved(self, side: Side) -> Side:
        """`side` with the pair that stands before the ops between that only move values."""
        here, path = side, []
        while not here.pair and here.tensor not in self.moved:
            path.append(here.tensor)
            maker = self.model.op(here.tensor)
            graph = self.model.graphs[here.tensor.graph]
            read = self.sides.inputs(graph, maker)[:1] if self._moves(maker) else []
            if not read:
                break
            here = read[0]
        found = self.moved.get(here.tensor) if not here.pair else here
        self.moved.update(dict.fromkeys(path, found))
        if found is None or found is side:
            return side
        return Side(
            slot=side.slot,
            role=side.role,
            tensor=side.tensor,
            pair=found.pair,
            params=found.params,
            source=found.source,
            parameter=found.parameter,
        )

    def _moves(self, op: Op) -> bool:
        return op.kind in self.table.moves or (op.kind in self.table.moves_if and self.table.moves_if[op.kind](op))

    def _made(self, graph: Graph, op: Op, broken: Broken | None, note: str = "") -> Verdict:
        status: Status = "low" if broken is None else "float"
        runs_as = op.type if broken is not None else f"{op.type} on integers"
        return Verdict(
            graph=graph.name, op=op.name, type=op.type, status=status, runs_as=runs_as, broken=broken, note=note
        )

    def _final(self, told: Mapping[tuple[str, str], Verdict], graph: Graph, op: Op) -> Verdict:
        """The verdict, or that of the op that does the work."""
        into = self.into.get((graph.name, op.name))
        if into is None:
            return told[graph.name, op.name]
        main = told[graph.name, into]
        if main.status == "low":
            return Verdict(graph=graph.name, op=op.name, type=op.type, status="absorbed", runs_as=main.runs_as)
        return Verdict(graph=graph.name, op=op.name, type=op.type, status="float", runs_as=op.type, broken=main.broken)


# -- requirements ----------------------------------------------------------------------------------


def inputs_quantized(seen: Seen) -> Broken | None:
    """Every input but a bias comes from a quantization."""
    if not seen.pairs and not any(side.pair for side in seen.inputs):
        return NOT_QUANTIZED
    for side in seen.inputs:
        if not side.pair and side.role != "bias":
            label = "input" if side.role == "input" else side.role
            fix = f"insert QuantizeLinear and DequantizeLinear between {side.source.op} and this op"
            return Broken(rule="float-input", says=f"its {label} {side.source} is float", fix=fix)
    return None


def output_quantized(seen: Seen) -> Broken | None:
    """Every reader of the output is a quantization."""
    if not seen.pairs:
        return Broken(rule="no-quantized-output", says="nothing quantizes its output", fix="quantize its output")
    if seen.readers:
        says = f"{seen.readers[0]} reads its float output beside the quantization"
        return Broken(rule="float-reader", says=says, fix=f"let {seen.readers[0].op} read the dequantized tensor")
    return None


def tied(seen: Seen) -> Broken | None:
    """All quantized inputs and the output have one scale and zero point."""
    params = [side.params for side in seen.inputs] + list(seen.pairs)
    if len(params) > 1 and not all(same(params[0], other) for other in params[1:]):
        says = "its inputs and its output have different scales or zero points"
        return Broken(rule="tie", says=says, fix="give all of them one scale and zero point")
    return None


def symmetric(seen: Seen) -> Broken | None:
    """Zero points are 0, or the middle of an unsigned type."""
    for name, params in _all_params(seen):
        if isinstance(params.type, IntType) and np.any(params.zero_point != params.type.middle):
            says = f"{name} has the zero point {int(np.ravel(params.zero_point)[0])}"
            return Broken(rule="zero-point", says=says, fix="quantize it symmetrically")
    return None


def _all_params(seen: Seen) -> list[tuple[str, QParams]]:
    named = [(f"its {side.role} {side.source}", side.params) for side in seen.inputs]
    named += [("its output", params) for params in seen.pairs]
    return [(name, params) for name, params in named if params is not None]


def types(activations: frozenset[str], weights: frozenset[str]) -> Requirement:
    """Activations and weights have one of these integer types."""

    def require(seen: Seen) -> Broken | None:
        given = [(f"its input {side.source}", side.params, activations) for side in seen.activations]
        given += [("its output", params, activations) for params in seen.pairs]
        given += [
            (f"its weight {side.source}", side.params, weights if side.parameter else activations)
            for side in seen.inputs
            if side.role in {"weight", "recurrent_weight"}
        ]
        for name, params, allowed in given:
            if params is not None and params.type.name not in allowed:
                says = f"{name} is {params.type.name}"
                return Broken(rule="type", says=says, fix=f"quantize it to {' or '.join(sorted(allowed))}")
        return None

    return require


def activations_per_tensor(seen: Seen) -> Broken | None:
    """Only weights have several scales."""
    for side in seen.inputs:
        if side.params is not None and side.params.scale.size > 1 and not side.parameter:
            says = f"its {side.role} {side.source} has {side.params.scale.size} scales"
            return Broken(rule="per-tensor", says=says, fix="quantize activations per tensor")
    return None


def weight_axis(allowed: Callable[[Op], int | None]) -> Requirement:
    """A weight has one scale, or several along the axis that is allowed for this op."""

    def require(seen: Seen) -> Broken | None:
        side, axis = seen.by_role("weight"), allowed(seen.op)
        params = None if side is None or not side.parameter else side.params
        if params is None or params.axis is None or params.block is not None or params.axis == axis:
            return None
        says = f"its weight has scales along axis {params.axis}"
        fix = "quantize it per tensor" if axis is None else f"use one scale, or scales along axis {axis}"
        return Broken(rule="weight-axis", says=says, fix=fix)

    return require


def bias_float(seen: Seen) -> Broken | None:
    """A bias is not quantized."""
    side = seen.by_role("bias")
    if side is None or not side.pair:
        return None
    return Broken(rule="bias", says=f"its bias {side.source} is quantized", fix="leave biases float")


def fixed_range(scale: float, zero_point: int) -> Requirement:
    """A 16-bit output has just this scale and zero point."""

    def require(seen: Seen) -> Broken | None:
        for params in seen.pairs:
            if params is None or params.type.name not in {"int16", "uint16"}:
                continue
            near = abs(float(np.max(params.scale)) / scale - 1) < 1e-6  # noqa: PLR2004  # float32's own precision
            if not near or int(np.max(params.zero_point)) != zero_point:
                says = f"its 16-bit output has the scale {float(np.max(params.scale)):g}"
                return Broken(rule="fixed-range", says=says, fix=f"give it scale {scale:g} and zero point {zero_point}")
        return None

    return require
