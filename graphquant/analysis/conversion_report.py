"""Compare a converted model with its plan: each planned scale and zero point, and the ops that stayed float."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.ir import NON_COMPUTE_KINDS, RESHAPING_KINDS, Call, Graph, Model, Op, Output, TensorRef, Use
from graphquant.numerics import Array, DynamicQParams
from graphquant.quantize import iterate_equivalent_tensors, match_tensor_names
from graphquant.utils import HtmlRepresentation

if TYPE_CHECKING:
    from graphquant.formats.tensorflow.tflite_converter import RuntimeTensor
    from graphquant.quantize.rewrite import InsertedPair

SCALE_TOLERANCE = 1e-6  # relative tolerance for scales that are not powers of two: the range passed through float32


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedTensor:
    """A planned tensor and its counterpart in the converted model."""

    tensor: TensorRef  # the tensor in the model
    name: str  # its name in the converted model, "" if it is absent
    index: int | None  # its index in the converted model, None if it is absent
    planned: tuple[Array, Array] | None  # scale and zero point of the plan, None if the range is computed at each run
    runtime: tuple[Array, Array] | None  # scale and zero point of the runtime, None if it has none
    problem: str  # the difference, "" if there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatOp:
    """A float op of the converted model, with the reason."""

    op: str
    type: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConversionReport(HtmlRepresentation):
    """The result of comparing a converted model with its plan."""

    tensors: tuple[ConvertedTensor, ...]  # one entry for each planned tensor
    float_ops: tuple[FloatOp, ...]  # the ops that stayed float
    op_count: int  # the number of ops that compute something

    @property
    def agrees(self) -> bool:
        """True if every planned tensor has its scale and zero point."""
        return not any(line.problem for line in self.tensors)


def compare_conversion(
    model: Model, inserted: Sequence[InsertedPair], converted: Model, runtime: Sequence[RuntimeTensor]
) -> ConversionReport:
    """Compare the plan of the rewritten `model` with the runtime's report of each tensor of the converted model."""
    runtime_by_index = {tensor.index: tensor for tensor in runtime}
    names = {tensor.name for tensor in runtime}
    activations: dict[str, Output] = {}
    constants: dict[str, tuple[Output, int | None]] = {}
    for op in converted.main.ops():
        for port, output in enumerate(op.outputs):
            if output.quantization is None:
                continue
            if op.kind in {"constant", "variable"}:
                axis = _weight_channel_axis(converted.main, TensorRef("", op.name, port))
                names_of_output = output.name.split(";")  # the converter joins the names of merged tensors
                constants.update((name, (output, axis)) for name in names_of_output if name.endswith("quant"))
            # Only inputs and outputs of the file are uint8, and the int8 tensors beside them have the planned scales.
            elif output.quantization.scale.size and output.dtype != "uint8":
                activations[output.name] = output
    names_by_tensor = match_tensor_names(model, activations, names)
    callers = model.callers()
    tensors = []
    for insertion in inserted:
        if insertion.site.parameter:
            # The constant is named after the last inserted op, or the one before it.
            graph, output_op = model.graphs[insertion.output.graph], insertion.output.op
            ops = [output_op, *(slot.op for slot in graph.slots(output_op) if slot is not None)]
            converted_output, axis = next((constants[op] for op in ops if op in constants), (None, None))
        else:
            equivalents = _equivalent_tensors(model, callers, insertion.site.tensor)
            name = next((names_by_tensor[ref] for ref in equivalents if ref in names_by_tensor), None)
            converted_output, axis = None if name is None else activations[name], None
        tensors.append(_compare_tensor(insertion, converted_output, axis, runtime_by_index))
    graphs = converted.graphs.values()
    op_count = sum(op.kind not in NON_COMPUTE_KINDS for graph in graphs for op in graph.ops())
    float_ops = tuple(float_op for graph in graphs for float_op in _find_float_ops(graph))
    return ConversionReport(tensors=tuple(tensors), float_ops=float_ops, op_count=op_count)


def _equivalent_tensors(
    model: Model, callers: Mapping[str, list[tuple[Use, Call]]], tensor: TensorRef
) -> Iterator[TensorRef]:
    """Yield the tensor, tensors passed through to it, and outputs of identical ops, which the converter merges."""
    yield from iterate_equivalent_tensors(model, callers, tensor)
    graph, op = model.graphs[tensor.graph], model.op(tensor)
    source_tensor = graph.source_of(Use(tensor.graph, tensor.op, 0))
    for use in graph.consumers(source_tensor) if source_tensor is not None and op.kind in RESHAPING_KINDS else ():
        if use.slot == 0 and graph.op(use.op).type == op.type:
            yield TensorRef(tensor.graph, use.op, tensor.port)


def _weight_channel_axis(graph: Graph, tensor: TensorRef) -> int | None:
    """Return the channel axis of the first op that reads a constant as its weight."""
    for use in graph.consumers(tensor):
        op = graph.op(use.op)
        if op.role(use.slot) == "weight":
            return op.channel_axis
    return None


def _compare_tensor(
    insertion: InsertedPair, output: Output | None, axis: int | None, runtime_by_index: Mapping[int, RuntimeTensor]
) -> ConvertedTensor:
    params, tensor = insertion.params, insertion.site.tensor
    absent = ConvertedTensor(tensor=tensor, name="", index=None, planned=None, runtime=None, problem="")
    if isinstance(params, DynamicQParams):
        return replace(absent, problem="its range is computed at each run, which the converter cannot express")
    planned = np.atleast_1d(params.scale), np.atleast_1d(params.zero_point)
    stored = None if output is None else output.quantization
    if output is None or stored is None or stored.index not in runtime_by_index:
        problem = "no quantized tensor of the converted model has this name"
        return replace(absent, planned=planned, problem=problem)
    runtime_tensor = runtime_by_index[stored.index]
    problem = _describe_difference(planned, runtime_tensor, axis if params.axis is not None else None)
    return ConvertedTensor(
        tensor=tensor,
        name=output.name,
        index=stored.index,
        planned=planned,
        runtime=(runtime_tensor.scales, runtime_tensor.zero_points) if runtime_tensor.scales.size else None,
        problem=problem,
    )


def _describe_difference(planned: tuple[Array, Array], runtime: RuntimeTensor, axis: int | None) -> str:
    """Describe the difference of the runtime's numbers, "" if there is none."""
    count = runtime.scales.size
    if not count:
        return "it has no scale: it stayed float"
    if count % planned[0].size:  # a depthwise multiplier repeats the scale of each channel
        return f"it has {count} scales and not {planned[0].size}"
    scale, zero_point = (np.repeat(values, count // values.size) for values in planned)
    power_of_two = np.frexp(scale)[0] == 0.5  # noqa: PLR2004  # a power of two
    close_scales = np.abs(runtime.scales.astype(np.float64) - scale) <= SCALE_TOLERANCE * scale
    if not np.where(power_of_two, runtime.scales == scale, close_scales).all():
        return "its scale differs"
    if not np.array_equal(runtime.zero_points, zero_point):
        return "its zero point differs"
    if axis is not None and count > 1 and runtime.axis != axis:
        return f"its axis is {runtime.axis} and not {axis}"
    return ""


def _find_float_ops(graph: Graph) -> Iterator[FloatOp]:
    for op in graph.ops():
        if op.kind in NON_COMPUTE_KINDS or op.calls:
            continue
        reasons = list(_missing_ranges(graph, op))
        if reasons:
            reason = reasons[0] or "TFLite has no int8 kernel here"
            yield FloatOp(op=_short_op_name(op), type=op.type, reason=reason)


def _missing_ranges(graph: Graph, op: Op) -> Iterator[str]:
    """Yield the reason for each float operand and result: no range, or "" if it has one; those without range first."""
    reasons: list[str] = []
    for slot, tensor in enumerate(graph.slots(op.name)):
        if tensor is None or graph.output(tensor).dtype != "float32":
            continue
        source = graph.op(tensor.op)
        lacks_range = source.kind != "dequantize" and op.role(slot) != "bias"
        reasons.append(f"its {op.role(slot)} {_short_op_name(source)} has no range" if lacks_range else "")
    for port, output in enumerate(op.outputs):
        if output.dtype == "float32":
            readers = graph.consumers(TensorRef(graph.name, op.name, port))
            has_range = bool(readers) and all(graph.op(use.op).kind == "quantize" for use in readers)
            reasons.append("" if has_range else "its output has no range")
    yield from sorted(reasons, key=lambda reason: not reason)


def _short_op_name(op: Op) -> str:
    return op.name.partition(";")[0]
