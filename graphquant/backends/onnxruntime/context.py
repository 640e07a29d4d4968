"""Context of an op for the selectors: quantizations around it, fused clips, and operands quantized by the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphquant.backends.findings import NOT_QUANTIZED, BrokenRule
from graphquant.backends.onnxruntime.work import FIRST_OPSET, is_dq, is_q, op_names
from graphquant.ir import FLOAT_TYPES, Op, Output, TensorRef, Use

if TYPE_CHECKING:
    from graphquant.backends.onnxruntime.work import RemovedOps, WorkingCopy
    from graphquant.ir import Graph


# -- Relu and Clip before a quantization -----------------------------------------------------------

CLIP_EPSILON = float(np.finfo(np.float32).eps)


def fuse_clips(work: WorkingCopy, graph: Graph, removed: RemovedOps) -> None:
    """Remove each Relu or Clip whose limits the following quantization has anyway."""
    for name in op_names(graph, lambda op: op.type in {"Relu", "Clip"} and not op.domain):
        use = work.only_use(graph, name)
        source = work.slot_tensor(graph, name, 0)
        if use is None or source is None or not is_q(graph.op(use.op)) or work.qdq_inputs(graph, use.op)[2] is None:
            continue
        if _is_fused_early(work, graph, name, use.op):
            removed.host_names[graph.name, name] = source.op if source.graph == graph.name else use.op
            removed.host_types[graph.name, name] = "QuantizeLinear"
            work.bypass(graph, name)


def _is_fused_early(work: WorkingCopy, graph: Graph, name: str, q: str) -> bool:
    """Return whether a Relu or Clip is removed independently of the op before it."""
    zero = work.qdq_inputs(graph, q)[2]
    if work.integer_dtype(graph, q) not in {"int8", "uint8"}:
        return False
    if graph.op(name).type == "Clip":
        return is_redundant_clip(work, graph, name, q)
    return (
        work.is_local_constant(graph, zero)
        and work.scalar_value(zero) == INTEGER_LIMITS[work.integer_dtype(graph, q)][0]
    )


INTEGER_LIMITS = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767), "uint16": (0, 65535)}


def is_redundant_clip(work: WorkingCopy, graph: Graph, name: str, q: str) -> bool:
    """Return whether the quantization `q` makes the Relu or Clip `name` redundant."""
    _, scale, zero = work.qdq_inputs(graph, q)
    step, zero_value = work.scalar_value(scale), 0.0 if zero is None else work.scalar_value(zero)
    dtype = work.integer_dtype(graph, q)
    if (
        step is None
        or zero_value is None
        or dtype not in INTEGER_LIMITS
        or not _has_no_axis(graph, scale)
        or not _has_no_axis(graph, zero)
    ):
        return False
    lowest, highest = INTEGER_LIMITS[dtype]
    if graph.op(name).type == "Relu":
        return zero_value == lowest
    low, high = ort_clip_limits(work, graph, name)
    if low is None or high is None:
        return False
    return low - (lowest - zero_value) * step <= CLIP_EPSILON and (highest - zero_value) * step - high <= CLIP_EPSILON


def _has_no_axis(graph: Graph, tensor: TensorRef | None) -> bool:
    """Return whether a number is a scalar without axes, as the fusion of a Relu or Clip requires."""
    return tensor is None or graph.output(tensor).shape == ()


def ort_clip_limits(work: WorkingCopy, graph: Graph, name: str) -> tuple[float | None, float | None]:
    """Return the limits of a Clip; None for a limit that is computed at run time."""
    op, slots = graph.op(name), [*graph.slots(name), None, None, None][:3]
    limits: list[float | None] = []
    for slot, attr, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        tensor = slots[slot]
        limits.append(
            op.numeric_attr(attr, 0) if attr in op.attrs else (default if tensor is None else work.scalar_value(tensor))
        )
    return limits[0], limits[1]


REFUSED_RULE = "refused"
"""Rule that is broken if ONNX Runtime cannot load the model."""

BYTE_DTYPES = frozenset({"int8", "uint8"})

HALF_WORD_DTYPES = frozenset({"int16", "uint16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OrtOpContext:
    """An op and the quantizations around it.

    Attributes:
        work: The working copy of the model.
        graph: Graph of the op.
        op: The op.
        dqs: DequantizeLinears that feed its inputs, in the order of the inputs.
        input_dtypes: Their integer types.
        filled_count: Number of inputs that are present.
        qs: QuantizeLinears that read the output, or the output of the following Relu or Clip.
        clip: Name of that Relu or Clip if the quantization makes it redundant.
        int8: Whether kernels accept int8 activations.
    """

    work: WorkingCopy
    graph: Graph
    op: Op
    dqs: tuple[Op, ...]
    input_dtypes: tuple[str, ...]
    filled_count: int
    qs: tuple[Op, ...]
    clip: str
    int8: bool

    @property
    def output_dtype(self) -> str:
        """Integer type of the output."""
        return self.work.integer_dtype(self.graph, self.qs[0].name)


def op_context(work: WorkingCopy, graph: Graph, op: Op, *, int8: bool) -> OrtOpContext | BrokenRule:
    """Return the context of `op`, or the rule broken by the following Relu or Clip that keeps it in float."""
    sources = [work.producer(graph, op.name, slot) for slot in range(len(graph.slots(op.name)))]
    dqs = tuple(source for source in sources if source is not None and is_dq(source))
    clip, last_name = "", op.name
    edges = work.op_uses(graph, op.name)
    if len(edges) == 1 and edges[0].graph == graph.name:
        next_op = graph.op(edges[0].op)
        if next_op.type in {"Relu", "Clip"} and len(work.op_uses(graph, next_op.name)) == 1:
            clip = "" if work.is_output(graph, next_op.name) else next_op.name
            last_name = clip or last_name
    qs = tuple(
        graph.op(use.op) for use in work.op_uses(graph, last_name) if use.graph == graph.name and is_q(graph.op(use.op))
    )
    if clip and (len(qs) != 1 or not is_redundant_clip(work, graph, clip, qs[0].name)):
        return _broken_clip_rule(work, graph, clip, qs)
    input_dtypes = tuple(work.integer_dtype(graph, dq.name) for dq in dqs)
    filled_count = sum(slot is not None for slot in graph.slots(op.name))
    return OrtOpContext(
        work=work,
        graph=graph,
        op=op,
        dqs=dqs,
        input_dtypes=input_dtypes,
        filled_count=filled_count,
        qs=qs,
        clip=clip,
        int8=int8,
    )


def _broken_clip_rule(work: WorkingCopy, graph: Graph, clip: str, qs: tuple[Op, ...]) -> BrokenRule:
    clip_type = graph.op(clip).type
    if not qs:
        return BrokenRule(
            "no-quantized-output",
            f"the output of the following {clip_type} {clip} is not quantized",
            f"quantize the output of {clip}",
        )
    _, scale, zero = work.qdq_inputs(graph, qs[0].name)
    step, zero_value = work.scalar_value(scale), 0.0 if zero is None else work.scalar_value(zero)
    if clip_type == "Relu":
        return BrokenRule(
            "relu-zero-point",
            f"the following Relu {clip} has zero point {number_text(zero_value)}, not the smallest of its type",
            f"quantize the output of {clip} asymmetrically: uint8 with zero point 0, or int8 with -128",
        )
    low, high = ort_clip_limits(work, graph, clip)
    return BrokenRule(
        "clip-range",
        f"the quantized range after the Clip {clip} (scale {number_text(step)}, zero point"
        f" {number_text(zero_value)}) is wider"
        f" than its limits [{number_text(low)}, {number_text(high)}]",
        f"use a range within its limits for the output of {clip}",
    )


def number_text(number: float | None) -> str:
    """Format a number for messages; "unknown" if it is computed at run time."""
    return "unknown" if number is None else f"{number:g}"


def broken_input_rule(context: OrtOpContext, expected: int | None = None) -> BrokenRule | None:
    """Return the broken rule unless exactly `expected` inputs, by default all, come from a DequantizeLinear."""
    if len(context.dqs) == (context.filled_count if expected is None else expected):
        return None
    if (
        not context.dqs
        and not context.qs
        and not any(is_dq(context.work.model.op(tensor_ref)) for tensor_ref in _filled_slots(context))
    ):
        return NOT_QUANTIZED
    if expected is not None and len(context.dqs) > expected:
        message = f"{len(context.dqs)} of its inputs are quantized, but only {expected} may be"
        return BrokenRule("too-many-inputs", message, "quantize only its data input")
    names = {dq.name for dq in context.dqs}
    slots = enumerate(context.graph.slots(context.op.name))
    other_inputs = [
        (slot, tensor_ref) for slot, tensor_ref in slots if tensor_ref is not None and tensor_ref.op not in names
    ]
    float_inputs = [
        slot_and_tensor
        for slot_and_tensor in other_inputs
        if context.graph.output(slot_and_tensor[1]).dtype in FLOAT_TYPES | {None}
    ]
    return _float_input_rule(context, *(float_inputs or other_inputs)[0]) if other_inputs else NOT_QUANTIZED


def _filled_slots(context: OrtOpContext) -> list[TensorRef]:
    return [tensor_ref for tensor_ref in context.graph.slots(context.op.name) if tensor_ref is not None]


def _float_input_rule(context: OrtOpContext, slot: int, tensor_ref: TensorRef) -> BrokenRule:
    role, source, tensor_label = (
        context.op.role(slot),
        context.work.model.op(tensor_ref),
        context.work.label(tensor_ref),
    )
    if role == "bias":
        message = (
            f"its bias {tensor_label} is float, and is quantized automatically only if a QuantizeLinear follows the op"
        )
        return BrokenRule("float-bias", message, "quantize its output, or the bias to int32")
    if tensor_ref.graph != context.graph.name and is_dq(source):
        message = f"its {role} {tensor_label} is dequantized in another graph"
        return BrokenRule("outer-input", message, "move the QuantizeLinear and DequantizeLinear into the subgraph")
    fix = f"insert a QuantizeLinear and a DequantizeLinear between {tensor_label.op} and this op"
    return BrokenRule("float-input", f"its {role} {tensor_label} is float", fix)


def broken_output_rule(context: OrtOpContext) -> BrokenRule | None:
    """Return the broken rule unless the output goes to a QuantizeLinear and to nothing else."""
    work, graph, name = context.work, context.graph, context.op.name
    edges = work.op_uses(graph, name)
    used_ports = {port for port, output in enumerate(context.op.outputs) if output.name or port == 0}
    if not context.qs:
        message = "its output is not quantized"
        if work.is_output(graph, name) and not edges:
            message = "its output is a float output of the graph"
        return BrokenRule("no-quantized-output", message, "quantize its output")
    if work.is_output(graph, name):
        message = "its float output is also an output of the graph"
        return BrokenRule("graph-output", message, "make the dequantized tensor the output of the graph")
    if len(edges) != len(context.qs):
        float_use = next(use for use in edges if not (use.graph == graph.name and is_q(graph.op(use.op))))
        message = f"{float_use} reads its float output in addition to the QuantizeLinear"
        return BrokenRule("float-reader", message, f"connect {float_use} to the dequantized tensor")
    if len(context.qs) != len(used_ports):
        message = f"{len(context.qs)} QuantizeLinears with different parameters read it"
        return BrokenRule("several-scales", message, "use one scale and zero point for all readers")
    return None


def broken_type_rule(context: OrtOpContext, allowed: frozenset[str] = BYTE_DTYPES) -> BrokenRule | None:
    """Return the broken rule unless inputs and output have one integer type that is allowed."""
    dtypes = list(dict.fromkeys([*context.input_dtypes, *([context.output_dtype] if context.qs else [])]))
    if len(dtypes) > 1:
        message = f"its inputs and output are {' and '.join(dtypes)}"
        return BrokenRule("mixed-types", message, "use one integer type for all of them")
    if dtypes[0] not in allowed:
        return missing_kernel_rule(context.op, dtypes[0])
    return None


def missing_kernel_rule(op: Op, dtype: str) -> BrokenRule:
    """Return the rule for an integer type without a kernel."""
    if dtype.startswith("float8"):
        message = f"ONNX Runtime fuses {op.type} on {dtype} and then cannot load the model"
        return BrokenRule(REFUSED_RULE, message, "quantize it to 8-bit integers, or keep it in float")
    message = f"ONNX Runtime has no {op.type} kernel for {dtype}"
    return BrokenRule("type", message, "use 8 bits: uint8 activations and int8 weights")


def broken_int8_rule(context: OrtOpContext) -> BrokenRule | None:
    """Return the broken rule for an int8 activation. x86 kernels need uint8, and only some int8 pairs become uint8."""
    if context.input_dtypes[0] != "int8" or (context.int8 and context.input_dtypes[1] == "int8"):
        return None
    message = (
        "its activation is int8 and cannot become uint8, because its QuantizeLinear has several readers or is missing"
    )
    if context.int8:
        message = f"its activation is int8 and its weight {context.input_dtypes[1]}"
    return BrokenRule("int8-activation", message, "quantize activations to uint8")


def broken_group_rule(context: OrtOpContext, expected: int | None = None) -> BrokenRule | None:
    """Return the broken rule unless the op has quantizations on all sides."""
    return broken_input_rule(context, expected) or broken_output_rule(context)


def unfused_clip_rule(context: OrtOpContext) -> BrokenRule | None:
    """Return the broken rule if a Relu or Clip follows an op that cannot fuse it."""
    if not context.clip:
        return None
    message = f"{context.clip} is between it and the QuantizeLinear"
    return BrokenRule("clip-behind", message, "quantize its output as well")


def old_opset_rule(context: OrtOpContext) -> BrokenRule | None:
    """Return the broken rule if ONNX Runtime has no integer kernel for the op in this opset."""
    first_opset = FIRST_OPSET.get(context.op.type, 0)
    if context.work.model.opset >= first_opset:
        return None
    message = (
        f"ONNX Runtime runs {context.op.type} on integers from opset {first_opset} on, but the model has opset"
        f" {context.work.model.opset}"
    )
    return BrokenRule("opset", message, f"upgrade the model to opset {first_opset}")


# -- float operands that the optimizer quantizes ---------------------------------------------------

PLACEHOLDER_RULE = "quantized by the optimizer"
"""Marker of quantizations that the optimizer adds to float weights and biases."""

BIAS_QUANTIZED_TYPES = {"Conv": 0, "ConvTranspose": 0, "Gemm": 1}
"""Ops whose float bias the optimizer quantizes."""


def quantize_float_bias(work: WorkingCopy, graph: Graph, _removed: RemovedOps) -> bool:
    """Quantize the float bias (to int32) and float weight (to int8) of ops between DQ and Q."""
    changed = False
    for name in op_names(graph, lambda op: op.type in BIAS_QUANTIZED_TYPES and not op.domain):
        data_dq = work.producer(graph, name, 0)
        if (
            data_dq is None
            or not is_dq(data_dq)
            or not _has_one_scale(work, graph, data_dq.name)
            or not _leads_to_q(work, graph, name)
        ):
            continue
        slots = [*graph.slots(name), None, None, None][:3]
        weight, bias = work.producer(graph, name, 1), slots[2]
        bias_shape = graph.output(bias).shape if bias is not None else None
        if bias is not None and (
            not _is_float_initializer(work, graph, bias) or bias_shape is None or len(bias_shape) != 1
        ):
            continue
        weight_is_quantized = weight is not None and is_dq(weight)
        if weight_is_quantized and weight is not None:
            if bias is None or not _is_bias_axis(work, graph, name, weight, bias_shape):
                continue
        elif slots[1] is None or not (
            _is_float_initializer(work, graph, slots[1]) and work.is_local_constant(graph, slots[1])
        ):
            continue
        else:
            _insert_placeholder_dq(work, graph, Use(graph.name, name, 1), slots[1], "int8")
        if bias is not None:
            _insert_placeholder_dq(work, graph, Use(graph.name, name, 2), bias, "int32")
        changed = True
    return changed


def _is_float_initializer(work: WorkingCopy, graph: Graph, tensor: TensorRef) -> bool:
    return graph.output(tensor).dtype == "float32" and work.is_constant(tensor)


def _has_one_scale(work: WorkingCopy, graph: Graph, name: str) -> bool:
    """Return whether a DequantizeLinear has a single scale."""
    scale = work.slot_tensor(graph, name, 1)
    return scale is not None and graph.output(scale).shape in {(), (1,)}


def _leads_to_q(work: WorkingCopy, graph: Graph, name: str) -> bool:
    current = name
    for _ in range(len(graph)):
        use = work.only_use(graph, current)
        if use is None:
            return False
        op = graph.op(use.op)
        if is_q(op):
            return True
        if op.type not in {"Relu", "Clip"}:
            return False
        current = op.name
    return False


def _is_bias_axis(work: WorkingCopy, graph: Graph, name: str, weight: Op, bias: tuple[int | None, ...] | None) -> bool:
    """Return whether the weight has one scale, or one per value of the bias."""
    scale = work.slot_tensor(graph, weight.name, 1)
    sizes = graph.output(scale).shape if scale is not None else None
    if sizes in {(), (1,)}:
        return True
    if sizes is None or bias is None or len(sizes) != 1 or sizes[0] != bias[0] or weight.numeric_attr("block_size", 0):
        return False
    data = work.slot_tensor(graph, weight.name, 0)
    shape = graph.output(data).shape if data is not None else None
    axis = int(weight.numeric_attr("axis", 1))
    axis += len(shape) if axis < 0 and shape is not None else 0
    op = graph.op(name)
    return axis == (1 - int(op.numeric_attr("transB", 0)) if op.type == "Gemm" else 0)


def _insert_placeholder_dq(work: WorkingCopy, graph: Graph, use: Use, tensor: TensorRef, dtype: str) -> None:
    """Replace the float constant `tensor` by a DequantizeLinear of a constant of type `dtype`."""
    float_output = graph.output(tensor)
    data = work.add_placeholder(graph, f"{use.op}/{dtype}", dtype, float_output)
    scale = work.add_placeholder(graph, f"{use.op}/scale", "float32", float_output, 1.0)
    zero = work.add_placeholder(graph, f"{use.op}/zero", dtype, float_output, 0)
    template = Op(
        name="",
        kind="dequantize",
        type="DequantizeLinear",
        roles=("input", "scale", "zero_point"),
        outputs=(Output("", "float32", float_output.shape),),
        rule=PLACEHOLDER_RULE,
    )
    graph.set_source(use, work.add_like(graph, template, f"{use.op}/dq", [data, scale, zero]))


def quantize_where_scalar(work: WorkingCopy, graph: Graph, _removed: RemovedOps) -> bool:
    """Quantize a scalar constant next to the quantized input of a Where whose output is quantized."""
    changed = False
    for name in op_names(graph, lambda op: op.type == "Where" and not op.domain):
        use = work.only_use(graph, name)
        if use is None or not is_q(graph.op(use.op)):
            continue
        for slot, other_slot in ((1, 2), (2, 1)):
            tensor, source = work.slot_tensor(graph, name, slot), work.producer(graph, name, other_slot)
            if tensor is None or source is None or not is_dq(source) or not _is_float_initializer(work, graph, tensor):
                continue
            dtype = work.integer_dtype(graph, source.name)
            all_local = all(
                work.is_local_constant(graph, operand) for operand in (tensor, *work.qdq_inputs(graph, source.name)[1:])
            )
            if all_local and graph.output(tensor).shape == () and dtype == work.integer_dtype(graph, use.op):
                _insert_placeholder_dq(work, graph, Use(graph.name, name, slot), tensor, dtype)
                changed = True
    return changed
