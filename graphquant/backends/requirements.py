"""Requirement tables: the requirements of a backend for each kind of op, and predictions from such a table.

A backend that is known from its documentation is a table from kinds to requirements. A requirement is a function that
gets an op with the quantizations around it and returns the rule that the op breaks. Identity and Dropout are looked
through, as every backend does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from graphquant.backends.findings import NOT_QUANTIZED, UNJUDGED_KINDS, BrokenRule, Verdict, make_verdict
from graphquant.ir import FLOAT_TYPES, TRANSPARENT_KINDS, Graph, Model, Op, Parameters, TensorRef, Use
from graphquant.ir.op_matching import is_barrier
from graphquant.numerics import IntType, QParams
from graphquant.qdq import read_qparams

MAX_TRANSPARENT_OPS = 20  # maximum number of consecutive Identity and Dropout ops to look through
QUANTIZABLE_ROLES = frozenset({"input", "weight", "bias", "recurrent_weight"})  # roles of inputs that may be quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedInput:
    """One input of an op."""

    slot: int
    role: str
    tensor: TensorRef  # the tensor that is read, past Identity and Dropout
    dequantize_op: str  # the op that dequantizes it, "" if it is float
    params: QParams | None  # scale and zero point; None if it is float, or if they are computed at run time
    source: TensorRef  # the tensor before quantization, or the stored integers if the model has only those
    parameter: bool  # whether it is a weight with a known value


class QuantizationReader:
    """Reader of the quantizations of `model`, which must not be modified meanwhile."""

    def __init__(self, model: Model) -> None:
        """Create a reader; quantizations are read on demand."""
        self.model, self.parameters = model, Parameters(model)
        self._params: dict[tuple[str, str], QParams | None] = {}

    def inputs(self, graph: Graph, op: Op) -> list[QuantizedInput]:
        """Return the float data inputs of an op."""
        quantized_inputs = []
        for slot, slot_tensor in enumerate(graph.slots(op.name)):
            if slot_tensor is None or op.role(slot) not in QUANTIZABLE_ROLES:
                continue
            if graph.output(slot_tensor).dtype not in FLOAT_TYPES | {None}:
                continue
            tensor = self.look_through(slot_tensor)
            producer = self.model.op(tensor)
            quantized = producer.kind in {"dequantize", "qdq"}
            source = self.quantized_source(tensor) if quantized else tensor
            quantized_input = QuantizedInput(
                slot=slot,
                role=op.role(slot),
                tensor=tensor,
                dequantize_op=producer.name if quantized else "",
                params=self.params(tensor.graph, producer.name) if quantized else None,
                source=source,
                parameter=self.model.op(source).kind != "input" and self.parameters.is_parameter(source),
            )
            quantized_inputs.append(quantized_input)
        return quantized_inputs

    def look_through(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor that `tensor` is a copy of by Identity and Dropout, or `tensor` itself."""
        for _ in range(MAX_TRANSPARENT_OPS):
            graph = self.model.graphs[tensor.graph]
            input_tensor = graph.source_of(Use(tensor.graph, tensor.op, 0))
            if input_tensor is None or not is_transparent(graph, graph.op(tensor.op)):
                break
            tensor = input_tensor
        return tensor

    def quantized_source(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor that was quantized if `tensor` is its dequantized value."""
        graph = self.model.graphs[tensor.graph]
        input_tensor = graph.source_of(Use(tensor.graph, tensor.op, 0))
        is_dequantized = input_tensor is not None and graph.op(tensor.op).kind == "dequantize"
        if input_tensor is not None and is_dequantized and self.model.op(input_tensor).kind == "quantize":
            input_tensor = self.model.graphs[input_tensor.graph].source_of(Use(input_tensor.graph, input_tensor.op, 0))
        return tensor if input_tensor is None else self.look_through(input_tensor)

    def readers(self, graph: Graph, op: Op, port: int = 0) -> Iterator[tuple[Use, Op]]:
        """Yield the ops that read an output, past Identity and Dropout. Graph outputs are ops too."""
        pending = list(graph.consumers(TensorRef(graph.name, op.name, port)))
        for _ in range(MAX_TRANSPARENT_OPS):
            next_uses = []
            for use in pending:
                reader = self.model.graphs[use.graph].op(use.op)
                if is_transparent(self.model.graphs[use.graph], reader):
                    next_uses += self.model.graphs[use.graph].consumers(TensorRef(use.graph, use.op))
                else:
                    yield use, reader
            pending = next_uses

    def outputs(self, graph: Graph, op: Op) -> tuple[list[tuple[Op, QParams | None]], list[Use]]:
        """Return the quantizations that read the outputs of an op, and the other uses of the outputs."""
        quantizations: list[tuple[Op, QParams | None]] = []
        other_uses = []
        for port in range(len(op.outputs)):
            for use, reader in self.readers(graph, op, port):
                if reader.kind in {"quantize", "qdq"} and use.slot == 0:
                    quantizations.append((reader, self.params(use.graph, reader.name)))
                else:
                    other_uses.append(use)
        return quantizations, other_uses

    def params(self, graph: str, name: str) -> QParams | None:
        """Return scale and zero point of a quantization op; None if they are computed at run time or invalid."""
        key = graph, name
        if key not in self._params:
            home_graph = self.model.graphs[graph]
            op_params = read_qparams(home_graph, home_graph.op(name), self.parameters)
            self._params[key] = op_params if isinstance(op_params, QParams) else None
        return self._params[key]


def is_transparent(graph: Graph, op: Op) -> bool:
    """Return whether an op copies its input, as Identity, Dropout and a barrier do."""
    return op.kind in TRANSPARENT_KINDS or is_barrier(graph, op)


def same_quantization(first: QParams | None, second: QParams | None) -> bool:
    """Return whether two quantizations map integers to the same values."""
    if first is None or second is None:
        return False
    comparable = first.type == second.type and first.axis == second.axis
    equal_scales = np.array_equal(first.scale, second.scale)
    return comparable and equal_scales and bool((first.zero_point == second.zero_point).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class OpContext:
    """An op with the quantizations around it."""

    op: Op
    graph: Graph
    quantizations: QuantizationReader  # reader of weights and quantizations
    # its float data inputs; `dequantize_op` and `params` are those before passthrough ops, if there are any
    inputs: tuple[QuantizedInput, ...]
    # scale and zero point of the quantizations of its output, or of the output of the fused activation
    output_params: tuple[QParams | None, ...]
    float_readers: tuple[Use, ...]  # other uses of the output

    def input_by_role(self, role: str) -> QuantizedInput | None:
        """Return the first input with a role."""
        return next((side for side in self.inputs if side.role == role), None)

    @property
    def activations(self) -> list[QuantizedInput]:
        """Inputs that are not parameters, or that are used like activations."""
        return [side for side in self.inputs if side.role == "input"]

    @property
    def named_params(self) -> list[tuple[str, QParams]]:
        """Known scales and zero points of inputs and output, each with its name for messages."""
        named_params = [(f"its {side.role} {side.source}", side.params) for side in self.inputs]
        named_params += [("its output", params) for params in self.output_params]
        return [(name, params) for name, params in named_params if params is not None]


Requirement = Callable[[OpContext], BrokenRule | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequirementTable:
    """Requirement table of a backend."""

    name: str  # name of the backend in messages
    # requirements by kind, in the order in which they are checked; ops of other kinds stay float
    rows: Mapping[str, tuple[Requirement, ...]]
    # for each kind, the kinds of following ops that are fused with it
    fuses: Mapping[str, frozenset[str]] = field(default_factory=dict)
    # kinds that pass the scale of their input through, so that their readers read integers
    passthrough_kinds: frozenset[str] = frozenset()
    # kinds of which only some ops do, with a predicate
    passthrough_if: Mapping[str, Callable[[Op], bool]] = field(default_factory=dict)
    # kinds of sums that a weighted op fuses if all other branches are quantized
    absorbable_sums: frozenset[str] = frozenset()
    # for some kinds, the reason why low precision does not pay for an op that meets the requirements
    notes: Mapping[str, Callable[[OpContext], str]] = field(default_factory=dict)


def judge_from_table(model: Model, table: RequirementTable) -> tuple[Verdict, ...]:
    """Return the verdicts on the ops of a model."""
    return _TablePredictor(model, table).verdicts()


class _TablePredictor:
    def __init__(self, model: Model, table: RequirementTable) -> None:
        self.model, self.table, self.quantizations = model, table, QuantizationReader(model)
        self.fused_into: dict[tuple[str, str], str] = {}
        self.passthrough_inputs: dict[TensorRef, QuantizedInput | None] = {}

    def verdicts(self) -> tuple[Verdict, ...]:
        ops = [(graph, op) for graph, op in self.model.reachable_ops() if self._needs_verdict(graph, op)]
        tails = {(graph.name, op.name): self._fused_tail(graph, op) for graph, op in ops}
        by_op: dict[tuple[str, str], Verdict] = {}
        for graph, op in ops:
            if (graph.name, op.name) not in self.fused_into:
                by_op[graph.name, op.name] = self._judge_op(graph, op, tails[graph.name, op.name])
        return tuple(self._final_verdict(by_op, graph, op) for graph, op in ops)

    def _needs_verdict(self, graph: Graph, op: Op) -> bool:
        tensors = [tensor for tensor in graph.slots(op.name) if tensor is not None]
        dtypes = {output.dtype for output in (*map(graph.output, tensors), *op.outputs)}
        all_parameters = bool(tensors) and all(map(self.quantizations.parameters.is_parameter, tensors))
        is_unjudged = op.kind in UNJUDGED_KINDS or is_barrier(graph, op) or all_parameters
        return not is_unjudged and not dtypes.isdisjoint(FLOAT_TYPES)

    def _fused_tail(self, graph: Graph, op: Op) -> Op:
        """Return the last of the ops that are fused with `op`."""
        fusable_kinds = self.table.fuses.get(op.kind)
        tail = op
        while fusable_kinds is not None:
            readers = list(self.quantizations.readers(graph, tail))
            if len(readers) != 1 or readers[0][0].graph != graph.name or readers[0][1].kind not in fusable_kinds:
                break
            if readers[0][0].slot != 0 or (graph.name, readers[0][1].name) in self.fused_into:
                break
            tail = readers[0][1]
            self.fused_into[graph.name, tail.name] = op.name
        return tail

    def _judge_op(self, graph: Graph, op: Op, tail: Op) -> Verdict:
        if (requirements := self.table.rows.get(op.kind)) is None:
            message = f"{self.table.name} has no integer kernel for {op.type}"
            no_kernel_rule = BrokenRule("no-kernel", message, "keep it in float, and quantize only the ops around it")
            return make_verdict(graph, op, "float", op.type, broken_rule=no_kernel_rule)
        quantize_ops, float_uses = self.quantizations.outputs(graph, tail)
        context = OpContext(
            op=op,
            graph=graph,
            quantizations=self.quantizations,
            inputs=tuple(self._input_before_passthrough(side) for side in self.quantizations.inputs(graph, op)),
            output_params=tuple(params for _, params in quantize_ops),
            float_readers=tuple(float_uses),
        )
        broken_rule = next(filter(None, (require(context) for require in requirements)), None)
        may_absorb = broken_rule is not None and op.kind in self.table.absorbable_sums
        if may_absorb and (branch := self._summing_branch(graph, context)):
            self.fused_into[graph.name, op.name] = branch
            return make_verdict(graph, op, "int8", f"{op.type} on integers")
        if broken_rule is not None:
            return make_verdict(graph, op, "float", op.type, broken_rule=broken_rule)
        note = self.table.notes[op.kind](context) if op.kind in self.table.notes else ""
        return make_verdict(graph, op, "int8", f"{op.type} on integers", note=note)

    def _summing_branch(self, graph: Graph, context: OpContext) -> str:
        """Return the weighted op that fuses a sum: the producer of the only float input, if only the sum reads it."""
        float_inputs = [side for side in context.inputs if not side.dequantize_op]
        if len(float_inputs) != 1 or len(context.inputs) < 2 or float_inputs[0].tensor.graph != graph.name:  # noqa: PLR2004  # a sum
            return ""
        name = float_inputs[0].tensor.op
        name = self.fused_into.get((graph.name, name), name)
        has_one_reader = len(list(self.quantizations.readers(graph, graph.op(float_inputs[0].tensor.op)))) == 1
        return name if has_one_reader and graph.op(name).kind in self.table.fuses else ""

    def _input_before_passthrough(self, side: QuantizedInput) -> QuantizedInput:
        """Return `side` with the Q/DQ pair before the passthrough ops in between."""
        current, path = side, []
        while not current.dequantize_op and current.tensor not in self.passthrough_inputs:
            path.append(current.tensor)
            producer = self.model.op(current.tensor)
            graph = self.model.graphs[current.tensor.graph]
            producer_inputs = self.quantizations.inputs(graph, producer)[:1] if self._is_passthrough(producer) else []
            if not producer_inputs:
                break
            current = producer_inputs[0]
        quantized_input = self.passthrough_inputs.get(current.tensor) if not current.dequantize_op else current
        self.passthrough_inputs.update(dict.fromkeys(path, quantized_input))
        if quantized_input is None or quantized_input is side:
            return side
        return replace(quantized_input, slot=side.slot, role=side.role, tensor=side.tensor)

    def _is_passthrough(self, op: Op) -> bool:
        predicate = self.table.passthrough_if.get(op.kind)
        return op.kind in self.table.passthrough_kinds or (predicate is not None and predicate(op))

    def _final_verdict(self, by_op: Mapping[tuple[str, str], Verdict], graph: Graph, op: Op) -> Verdict:
        """Return the verdict of an op, or the verdict of the op that it is fused with."""
        if (host_name := self.fused_into.get((graph.name, op.name))) is None:
            return by_op[graph.name, op.name]
        host_verdict = by_op[graph.name, host_name]
        if host_verdict.status == "int8":
            return make_verdict(graph, op, "fused", host_verdict.runs_as)
        return make_verdict(graph, op, "float", op.type, broken_rule=host_verdict.broken_rule)


def require_quantized_inputs(context: OpContext) -> BrokenRule | None:
    """Require that every input except a bias is quantized."""
    if not context.output_params and not any(side.dequantize_op for side in context.inputs):
        return NOT_QUANTIZED
    for side in context.inputs:
        if not side.dequantize_op and side.role != "bias":
            label = "input" if side.role == "input" else side.role
            fix = f"insert a QuantizeLinear and a DequantizeLinear between {side.source.op} and this op"
            return BrokenRule("float-input", f"its {label} {side.source} is float", fix)
    return None


def require_quantized_output(context: OpContext) -> BrokenRule | None:
    """Require that only quantizations read the output."""
    if not context.output_params:
        return BrokenRule("no-quantized-output", "its output is not quantized", "quantize its output")
    if context.float_readers:
        message = f"{context.float_readers[0]} reads its float output in addition to the quantization"
        return BrokenRule("float-reader", message, f"connect {context.float_readers[0].op} to the dequantized tensor")
    return None


def require_one_scale(context: OpContext) -> BrokenRule | None:
    """Require one scale and zero point for all quantized inputs and the output."""
    all_params = [side.params for side in context.inputs] + list(context.output_params)
    if len(all_params) > 1 and not all(same_quantization(all_params[0], side_params) for side_params in all_params[1:]):
        message = "its inputs and output have different scales or zero points"
        return BrokenRule("tie", message, "use one scale and zero point for all of them")
    return None


def require_symmetric(context: OpContext) -> BrokenRule | None:
    """Require zero points of 0, or of the middle of an unsigned type."""
    for name, params in context.named_params:
        if isinstance(params.type, IntType) and np.any(params.zero_point != params.type.symmetric_zero_point):
            message = f"{name} has the zero point {int(np.ravel(params.zero_point)[0])}"
            return BrokenRule("zero-point", message, "quantize it symmetrically")
    return None


def require_types(activations: frozenset[str], weights: frozenset[str]) -> Requirement:
    """Return a requirement on the integer types of activations and weights."""

    def require(context: OpContext) -> BrokenRule | None:
        typed_params = [(f"its input {side.source}", side.params, activations) for side in context.activations]
        typed_params += [("its output", params, activations) for params in context.output_params]
        typed_params += [
            (f"its weight {side.source}", side.params, weights if side.parameter else activations)
            for side in context.inputs
            if side.role in {"weight", "recurrent_weight"}
        ]
        for name, params, allowed in typed_params:
            if params is not None and params.type.name not in allowed:
                message = f"{name} is {params.type.name}"
                return BrokenRule("type", message, f"quantize it to {' or '.join(sorted(allowed))}")
        return None

    return require


def require_per_tensor_activations(context: OpContext) -> BrokenRule | None:
    """Require that only weights have several scales."""
    for side in context.inputs:
        if side.params is not None and side.params.scale.size > 1 and not side.parameter:
            message = f"its {side.role} {side.source} has {side.params.scale.size} scales"
            return BrokenRule("per-tensor", message, "quantize activations per tensor")
    return None


def require_weight_axis(allowed_axis: Callable[[Op], int | None]) -> Requirement:
    """Return a requirement that a weight has one scale, or several along the axis allowed for the op."""

    def require(context: OpContext) -> BrokenRule | None:
        side, axis = context.input_by_role("weight"), allowed_axis(context.op)
        params = None if side is None or not side.parameter else side.params
        if params is None or params.axis is None or params.block is not None or params.axis == axis:
            return None
        message = f"its weight has scales along axis {params.axis}"
        fix = "quantize it per tensor" if axis is None else f"use one scale, or scales along axis {axis}"
        return BrokenRule("weight-axis", message, fix)

    return require


def require_float_bias(context: OpContext) -> BrokenRule | None:
    """Require that a bias is not quantized."""
    side = context.input_by_role("bias")
    if side is None or not side.dequantize_op:
        return None
    return BrokenRule("bias", f"its bias {side.source} is quantized", "keep biases in float")


def require_fixed_range(scale: float, zero_point: int) -> Requirement:
    """Return a requirement that a 16-bit output has exactly this scale and zero point."""

    def require(context: OpContext) -> BrokenRule | None:
        for params in context.output_params:
            if params is None or params.type.name not in {"int16", "uint16"}:
                continue
            scale_matches = abs(float(np.max(params.scale)) / scale - 1) < 1e-6  # noqa: PLR2004  # precision of float32
            if not scale_matches or int(np.max(params.zero_point)) != zero_point:
                message = f"its 16-bit output has the scale {float(np.max(params.scale)):g}"
                return BrokenRule("fixed-range", message, f"use scale {scale:g} and zero point {zero_point}")
        return None

    return require
