"""Conditions of ONNX Runtime's integer kernels, which tell why an op of its optimized model stayed in float."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from graphquant.backends.findings import NOT_QUANTIZED, BrokenRule
from graphquant.backends.requirements import QuantizationReader, same_quantization
from graphquant.ir import FLOAT_TYPES, Graph, Model, Op, Shape, TensorRef, Use
from graphquant.ir.op_matching import is_barrier
from graphquant.quantize import clip_limits, saturates_like_clip

if TYPE_CHECKING:
    from graphquant.formats.onnx import OptimizedModel
    from graphquant.numerics import QParams

Condition = Callable[["FloatOp"], BrokenRule | None]

FLOAT_RESULT_TYPES = frozenset({"DequantizeLinear", "MatMulIntegerToFloat", "MatMulNBits", "DynamicQuantizeMatMul"})
"""Op types of com.microsoft that read integers and return floats."""

OUTPUT_ZERO_POINT_SLOTS = {
    "QuantizeLinear": 2,
    "QLinearConcat": 1,
    **dict.fromkeys(("QGemm", "QLinearWhere"), 8),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QLinearAdd", "QLinearMul"), 7),
}
"""Slot of the zero point of the output, whose type the output has; 4 for the other QLinear types."""

MAX_MOVEMENTS = 64  # maximum number of ops to look through for the type of a tensor

_UNKNOWN_MESSAGE = "ONNX Runtime keeps it in float, and none of the known rules explains it"
UNKNOWN_REASON = BrokenRule("unknown", _UNKNOWN_MESSAGE, "compare it with an op of this type that runs on integers")
"""Rule of ops that stay float although they meet all known conditions."""

BYTE_DTYPES = frozenset({"int8", "uint8"})
HALF_WORD_DTYPES = frozenset({"int16", "uint16"})
NARROW_WEIGHT_DTYPES = frozenset({"int2", "uint2", "int4", "uint4", "int8", "uint8"})

MIN_BLOCK_SIZE = 16  # minimum number of values that share a scale in a weight of MatMulNBits; a power of two
FIRST_OPSET = {"MaxPool": 12}  # lowest opset with an integer kernel for an op

BIAS_ABSOLUTE_TOLERANCE, BIAS_RELATIVE_TOLERANCE = 1e-6, 1e-2
"""Allowed error of the scale of a bias: absolute, and relative to input times weight."""

FUSED_TYPES = {"FusedConv": "Conv", "FusedMatMul": "MatMul", "FusedGemm": "Gemm"}

_WEIGHTED_ROLES = ("input", "weight", "bias")


def element_type(model: Model, tensor: TensorRef | None) -> str | None:
    """Return the type of a tensor; that of an op of com.microsoft follows from its inputs."""
    for _ in range(MAX_MOVEMENTS):
        if tensor is None:
            return None
        op, dtype = model.op(tensor), model.output(tensor).dtype
        if dtype is not None or op.type in FLOAT_RESULT_TYPES:
            return dtype  # type: ignore[no-any-return]  # an Output's
        slot = OUTPUT_ZERO_POINT_SLOTS.get(op.type, 4 if op.type.startswith("QLinear") else 0)
        tensor = model.graphs[tensor.graph].source_of(Use(tensor.graph, tensor.op, slot))
    return None


@dataclass(frozen=True, kw_only=True)
class FloatOp:
    """A float op of the optimized model, with the quantizations around it."""

    optimized: OptimizedModel
    quantizations: QuantizationReader  # of the optimized model
    opset: int  # of the given model
    graph: Graph
    op: Op
    type: str  # its type before a fusion with an activation

    def user_tensor(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor of the given model that a tensor of the optimized model computes, for messages."""
        for _ in range(MAX_MOVEMENTS):
            if tensor in self.optimized.tensors:
                return self.optimized.tensors[tensor]
            if (tensor.graph, tensor.op) in self.optimized.origins:
                return TensorRef(*self.optimized.origins[tensor.graph, tensor.op], tensor.port)
            source = next(iter(self.optimized.model.graphs[tensor.graph].slots(tensor.op)), None)
            if source is None:
                break
            tensor = source
        return tensor

    def user_op(self, graph: str, name: str) -> str:
        """Return the name of the op of the given model after which an op of the optimized model is named."""
        return self.optimized.origins.get((graph, name), (graph, name))[1]

    @cached_property
    def slots(self) -> list[tuple[int, TensorRef]]:
        """The inputs that are present."""
        return [(slot, tensor) for slot, tensor in enumerate(self.graph.slots(self.op.name)) if tensor is not None]

    @cached_property
    def dqs(self) -> dict[int, Op]:
        """DequantizeLinears of the same graph that feed its inputs, by slot."""
        return {
            slot: source
            for slot, tensor in self.slots
            if tensor.graph == self.graph.name and (source := self.producer(tensor)).kind == "dequantize"
        }

    def producer(self, tensor: TensorRef) -> Op:
        """Return the op that computes a tensor of this graph, or the op before it if it is a barrier."""
        op, model = self.graph.op(tensor.op), self.optimized.model
        source = self.graph.slots(op.name)[0] if is_barrier(self.graph, op) else None
        return op if source is None else model.op(source)

    @cached_property
    def dtypes(self) -> list[str]:
        """Integer types of the quantized inputs."""
        return [self.dtype(dq) for dq in self.dqs.values()]

    @cached_property
    def clip(self) -> Op | None:
        """The Relu or Clip that alone reads the output, or that ONNX Runtime fused with the op."""
        if self.op.type in FUSED_TYPES:
            return self.op
        uses = self.uses(self.op.name)
        reader = self.graph.op(uses[0].op) if len(uses) == 1 and uses[0].graph == self.graph.name else None
        is_clip = reader is not None and reader.type in {"Relu", "Clip"} and len(self.uses(reader.name)) == 1
        return reader if reader is not None and is_clip and not self.is_output(reader.name) else None

    @cached_property
    def qs(self) -> list[Op]:
        """QuantizeLinears that read the output, or the output of `clip`."""
        uses = self.uses(self.op.name if self.clip is None else self.clip.name)
        readers = (self.graph.op(use.op) for use in uses if use.graph == self.graph.name)
        return [reader for reader in readers if reader.kind == "quantize"]

    def uses(self, name: str) -> list[Use]:
        """Return the uses of the outputs of an op by other ops."""
        uses = [use for uses in self.graph.consumers_by_port(name).values() for use in uses]
        return [use for use in uses if self.graph.graphs[use.graph].op(use.op).kind != "output"]

    def is_output(self, name: str) -> bool:
        """Return whether an output of an op is an output of the graph."""
        return sum(map(len, self.graph.consumers_by_port(name).values())) > len(self.uses(name))

    def dtype(self, quantization: Op) -> str:
        """Return the integer type of a QuantizeLinear or DequantizeLinear."""
        tensors = [*self.graph.slots(quantization.name), None, None][:3]
        stored = quantization.outputs[0].dtype if quantization.kind == "quantize" else None
        data_type = element_type(self.optimized.model, tensors[0]) if quantization.kind == "dequantize" else None
        return stored or data_type or element_type(self.optimized.model, tensors[2]) or "uint8"

    def params(self, quantization: Op) -> QParams | None:
        """Return scale and zero point of a QuantizeLinear or DequantizeLinear; None if they are not constant."""
        return self.quantizations.params(self.graph.name, quantization.name)

    def scalar_params(self, quantization: Op) -> QParams | None:
        """Return a constant scale and an explicit zero point for the whole tensor, otherwise None."""
        params, slots = self.params(quantization), self.graph.slots(quantization.name)
        return params if params is not None and params.scale.ndim == 0 and None not in [*slots, None][2:3] else None


def _require_fusable_clip(context: FloatOp) -> BrokenRule | None:
    """Require that the quantization after a Relu or Clip has the limits of the Relu or Clip."""
    clip, qs = context.clip, context.qs
    if clip is None:
        return None
    is_fused = clip is context.op
    activation = clip.attrs.get("activation", "") if is_fused else clip.type
    name = context.user_tensor(TensorRef(context.graph.name, clip.name)).op
    if not qs:
        message = f"the output of the following {activation} {name} is not quantized"
        return BrokenRule("no-quantized-output", message, f"quantize the output of {name}")
    params, limits = context.params(qs[0]), _clip_limits(context, clip)
    is_scalar = len(qs) == 1 and params is not None and params.scale.ndim == 0
    if is_scalar and params is not None and limits and saturates_like_clip(params, limits):
        return None
    scale, zero = ("unknown",) * 2 if params is None else (f"{params.scale.max():g}", f"{params.zero_point.max()}")
    if activation == "Relu":
        message = f"the following Relu {name} has zero point {zero}, not the smallest of its type"
        fix = f"quantize the output of {name} asymmetrically: uint8 with zero point 0, or int8 with -128"
        return BrokenRule("relu-zero-point", message, fix)
    low, high = ("unknown",) * 2 if limits is None else (f"{limits[0]:g}", f"{limits[1]:g}")
    message = f"the quantized range after the Clip {name} (scale {scale}, zero point {zero}) is wider than its limits"
    return BrokenRule(
        "clip-range", f"{message} [{low}, {high}]", f"use a range within its limits for the output of {name}"
    )


def _clip_limits(context: FloatOp, clip: Op) -> tuple[float, float] | None:
    if clip is not context.op:
        reader = context.quantizations
        return clip_limits(reader.model, reader.parameters, TensorRef(context.graph.name, clip.name))
    if clip.attrs.get("activation") == "Relu":
        return 0.0, np.inf
    values = clip.attrs.get("activation_params")
    return (float(values[0]), float(values[1])) if values is not None and len(values) > 1 else None


def _require_inputs(context: FloatOp, expected: int | None = None) -> BrokenRule | None:
    """Require that exactly `expected` inputs, by default all, come from a DequantizeLinear of the same graph."""
    dqs = context.dqs
    if len(dqs) == (len(context.slots) if expected is None else expected):
        return None
    outer_dqs = [tensor for _, tensor in context.slots if context.optimized.model.op(tensor).kind == "dequantize"]
    if not dqs and not context.qs and not outer_dqs:
        return NOT_QUANTIZED
    if expected is not None and len(dqs) > expected:
        message = f"{len(dqs)} of its inputs are quantized, but only {expected} may be"
        return BrokenRule("too-many-inputs", message, "quantize only its data input")
    others = [(slot, tensor) for slot, tensor in context.slots if slot not in dqs]
    floats = [(slot, tensor) for slot, tensor in others if context.graph.output(tensor).dtype in FLOAT_TYPES | {None}]
    slot, tensor = (floats or others)[0]
    role = _WEIGHTED_ROLES[min(slot, 2)] if context.type in {"Conv", "Gemm"} else context.op.role(slot)
    source = context.user_tensor(tensor)
    if role == "bias":
        message = f"its bias {source} is float, and is quantized automatically only if a QuantizeLinear follows the op"
        return BrokenRule("float-bias", message, "quantize its output, or the bias to int32")
    if tensor in outer_dqs:
        message = f"its {role} {source} is dequantized in another graph"
        return BrokenRule("outer-input", message, "move the QuantizeLinear and DequantizeLinear into the subgraph")
    fix = f"insert a QuantizeLinear and a DequantizeLinear between {source.op} and this op"
    return BrokenRule("float-input", f"its {role} {source} is float", fix)


def _require_output(context: FloatOp) -> BrokenRule | None:
    """Require that the output goes to a QuantizeLinear and to nothing else."""
    uses, qs = context.uses(context.op.name), context.qs
    is_output = context.is_output(context.op.name)
    if not qs:
        problem = "a float output of the graph" if is_output and not uses else "not quantized"
        return BrokenRule("no-quantized-output", f"its output is {problem}", "quantize its output")
    if is_output:
        message = "its float output is also an output of the graph"
        return BrokenRule("graph-output", message, "make the dequantized tensor the output of the graph")
    if len(uses) != len(qs):
        names = {q.name for q in qs}
        use = next(use for use in uses if use.graph != context.graph.name or use.op not in names)
        reader = Use(use.graph, context.user_op(use.graph, use.op), use.slot)
        message = f"{reader} reads its float output in addition to the QuantizeLinear"
        return BrokenRule("float-reader", message, f"connect {reader} to the dequantized tensor")
    if len(qs) != sum(bool(output.name) or not port for port, output in enumerate(context.op.outputs)):
        message = f"{len(qs)} QuantizeLinears with different parameters read it"
        return BrokenRule("several-scales", message, "use one scale and zero point for all readers")
    return None


def _require_output_if_quantized(context: FloatOp) -> BrokenRule | None:
    return _require_output(context) if context.qs or context.clip else None


def _require_one_type(context: FloatOp, allowed: frozenset[str] = BYTE_DTYPES) -> BrokenRule | None:
    """Require one integer type that is allowed for inputs and output."""
    dtypes = list(dict.fromkeys([*context.dtypes, *(context.dtype(q) for q in context.qs[:1])]))
    if len(dtypes) > 1:
        message = f"its inputs and output are {' and '.join(dtypes)}"
        return BrokenRule("mixed-types", message, "use one integer type for all of them")
    return _missing_kernel(context, dtypes[0]) if dtypes[0] not in allowed else None


def _missing_kernel(context: FloatOp, dtype: str) -> BrokenRule:
    message = f"ONNX Runtime has no {context.type} kernel for {dtype}"
    return BrokenRule("type", message, "use 8 bits: uint8 activations and int8 weights")


def _require_uint8_activation(context: FloatOp) -> BrokenRule | None:
    """Require an activation that is uint8. Only some int8 pairs become uint8 on x86."""
    if context.dtypes[0] != "int8":
        return None
    problem = "cannot become uint8, because its QuantizeLinear has several readers or is missing"
    if context.dtypes[1] != "int8":
        problem = f"its weight {context.dtypes[1]}"
    return BrokenRule("int8-activation", f"its activation is int8 and {problem}", "quantize activations to uint8")


def _require_equal_types(context: FloatOp) -> BrokenRule | None:
    """Require the type of the input for the output."""
    if not context.qs or context.dtypes[0] == context.dtype(context.qs[0]):
        return None
    message = f"its input is {context.dtypes[0]} and its output {context.dtype(context.qs[0])}"
    return BrokenRule("mixed-types", message, "use one integer type for both")


def _require_bytes(context: FloatOp) -> BrokenRule | None:
    """Require 8-bit types of activation and weight."""
    unsupported = next((dtype for dtype in context.dtypes[:2] if dtype not in BYTE_DTYPES), "")
    return _missing_kernel(context, unsupported) if unsupported else None


def _require_int32_bias(context: FloatOp) -> BrokenRule | None:
    if len(context.dtypes) < 3 or context.dtypes[2] == "int32":  # noqa: PLR2004  # the slot of the bias
        return None
    message = f"its bias is {context.dtypes[2]}"
    return BrokenRule("bias-type", message, "quantize the bias to int32, scale input times weight")


def _require_product_scale(context: FloatOp) -> BrokenRule | None:
    """Require that the scale of the bias is input times weight within the tolerance of ONNX Runtime."""
    data, weight, bias = [*map(context.params, context.dqs.values()), None, None, None][:3]
    if data is None or weight is None or bias is None:
        return None
    scales = [params.scale.astype(np.float64).reshape(-1) for params in (data, weight, bias)]
    if len({1, *(scale.size for scale in scales)}) <= 2 and not bias.zero_point.any():  # noqa: PLR2004  # broadcastable
        product = scales[0] * scales[1]
        tolerance = BIAS_ABSOLUTE_TOLERANCE + BIAS_RELATIVE_TOLERANCE * product
        if (np.abs(scales[2] - product) <= tolerance).all():
            return None
    message = "the scale of its bias is not input times weight, or its zero point is not 0"
    return BrokenRule("bias-scale", message, "requantize the bias with this scale, or keep it in float")


def _require_beta_of_1(context: FloatOp) -> BrokenRule | None:
    if len(context.dtypes) < 3 or context.op.numeric_attr("beta", 1.0) == 1.0:  # noqa: PLR2004  # the slot of the bias
        return None
    return BrokenRule("beta", "its beta is not 1", "multiply the bias by beta and set beta to 1")


def _require_low_bit_weight(context: FloatOp) -> BrokenRule | None:
    """Require a weight that MatMulNBits accepts if only the weight is quantized."""
    attrs = context.op.attrs
    is_plain_product = all(attrs.get(name, 1) == 1 for name in ("alpha", "beta"))
    is_plain_product = is_plain_product and not any(attrs.get(name) for name in ("transA", "transB"))
    if list(context.dqs) != [1] or context.qs or context.clip or not is_plain_product:
        return None
    source, parameters = context.dqs[1], context.quantizations.parameters
    tensors = [tensor for tensor in context.graph.slots(source.name) if tensor is not None]
    if context.dtypes[0] not in NARROW_WEIGHT_DTYPES or not all(map(parameters.is_parameter, tensors[:2])):
        return None
    all_tensors = (TensorRef(context.graph.name, source.name), *tensors)
    if any(len(context.graph.consumers(tensor)) > 1 for tensor in all_tensors):
        message = "its weight, or an equal constant of up to 8 scales, has other readers"
        return BrokenRule("shared-weight", message, "duplicate its weight and scales")
    shape, sizes, *zero_sizes = (context.graph.output(tensor).shape for tensor in tensors)
    if shape is None or len(shape) != 2 or any(size != sizes for size in zero_sizes):  # noqa: PLR2004  # a matrix
        message = "its quantized weight is not a matrix, or scales and zero points differ in shape"
        return BrokenRule("weight-shape", message, "use a weight with two axes, or quantize the activation as well")
    return _misplaced_scales(source, shape, sizes)


def _misplaced_scales(dq: Op, shape: Shape, sizes: Shape | None) -> BrokenRule | None:
    """Return the rule that the scales of a low-bit weight break, from the shapes of weight and scales."""
    block, axis = int(dq.numeric_attr("block_size", 0)), int(dq.numeric_attr("axis", 1))
    if not block and (sizes != () and (sizes != (shape[1],) or axis != 1)):
        message = "its weight has neither one scale, nor one per column, nor one per block of rows"
        return BrokenRule("weight-axis", message, "use one scale per column, axis 1")
    if block and axis != 0:
        message = f"the blocks of its weight are along axis {axis}"
        return BrokenRule("weight-axis", message, "use blocks along axis 0, the summed axis")
    if block and (block < MIN_BLOCK_SIZE or block & (block - 1)):
        message = f"the blocks of its weight have {block} values"
        return BrokenRule("block-size", message, "use blocks of 16, 32, 64 or another power of two")
    return None


def _require_no_clip(context: FloatOp) -> BrokenRule | None:
    if context.clip is None:
        return None
    name = context.user_op(context.graph.name, context.clip.name)
    return BrokenRule("clip-behind", f"{name} is between it and the QuantizeLinear", "quantize its output as well")


def _require_opset(context: FloatOp) -> BrokenRule | None:
    opset, first_opset = context.opset, FIRST_OPSET.get(context.type, 0)
    if opset >= first_opset:
        return None
    message = f"ONNX Runtime runs {context.type} on integers from opset {first_opset} on, but the model has opset"
    return BrokenRule("opset", f"{message} {opset}", f"upgrade the model to opset {first_opset}")


def _require_one_scale(context: FloatOp) -> BrokenRule | None:
    """Require one scale and explicit zero point for input and output."""
    dq = context.dqs[min(context.dqs)]
    for q in context.qs:
        first, second = context.scalar_params(dq), context.scalar_params(q)
        if not same_quantization(first, second):
            message = f"its input has {_params_text(context, dq)} and its output {_params_text(context, q)}"
            return BrokenRule("tie", message, "use one scale and one explicit zero point for input and output")
    return None


def _params_text(context: FloatOp, quantization: Op) -> str:
    params = context.params(quantization)
    if params is None or params.scale.ndim:
        return "scale unknown, zero point unknown" if params is None else f"{params.scale.size} scales"
    zero = "missing" if context.scalar_params(quantization) is None else f"{params.zero_point:g}"
    return f"scale {params.scale:g}, zero point {zero}"


def _require_scalar_input(context: FloatOp) -> BrokenRule | None:
    if context.scalar_params(context.dqs[min(context.dqs)]) is not None:
        return None
    message = "the scale or zero point of its input is not a single explicit constant"
    return BrokenRule("scale", message, "quantize per tensor, with a zero point")


def _require_copying(context: FloatOp) -> BrokenRule | None:
    """Require a Resize that copies values. Before 1.28, ONNX Runtime also interpolates integers."""
    mode = context.op.attrs.get("mode", "nearest")
    is_nearest = mode in {"nearest", b"nearest"}
    return None if is_nearest else BrokenRule("mode", f"its mode is {mode!r}", "keep it in float, or copy: nearest")


def _movement_conditions(allowed: frozenset[str]) -> tuple[Condition, ...]:
    """Return the conditions of ops that move or compare values."""
    one_type = partial(_require_one_type, allowed=allowed)
    return (_require_opset, _require_no_clip, _ONE_INPUT, _require_output, one_type, _require_one_scale)


_ONE_INPUT = partial(_require_inputs, expected=1)
_UNARY = (_require_fusable_clip, _ONE_INPUT, _require_output, _require_one_type)
_JOINT = (_require_fusable_clip, _require_inputs, _require_output, _require_one_type)

CONDITIONS: dict[str, tuple[Condition, ...]] = {
    "Conv": (
        *(_require_fusable_clip, _require_inputs, _require_output, _require_uint8_activation, _require_equal_types),
        *(_require_bytes, _require_int32_bias, _require_product_scale),
    ),
    "MatMul": (
        *(_require_fusable_clip, _require_low_bit_weight, _require_inputs, _require_uint8_activation, _require_bytes),
        *(_require_output_if_quantized, _require_equal_types),
    ),
    "Gemm": (
        *(_require_fusable_clip, _require_low_bit_weight, _require_inputs, _require_output_if_quantized),
        *(_require_uint8_activation, _require_equal_types, _require_bytes, _require_beta_of_1, _require_int32_bias),
    ),
    **dict.fromkeys(("Add", "Mul", "Concat"), _JOINT),
    "Where": (_require_fusable_clip, partial(_require_inputs, expected=2), _require_output, _require_one_type),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid", "Softmax"), _UNARY),
    "Resize": (*_movement_conditions(BYTE_DTYPES), _require_copying),
    **dict.fromkeys(("ReduceMax", "ReduceMin"), _movement_conditions(BYTE_DTYPES)),
    "MaxPool": _movement_conditions(BYTE_DTYPES | {"int4", "uint4"}),
    "ArgMax": (_ONE_INPUT, _require_no_clip, _require_bytes, _require_scalar_input),
    **dict.fromkeys(
        (
            *("Split", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "Reshape", "Slice", "Squeeze"),
            *("Tile", "Transpose", "Unsqueeze"),
        ),
        _movement_conditions(BYTE_DTYPES | HALF_WORD_DTYPES),
    ),
}
"""Conditions of an integer kernel by op type, in the order in which they are checked. Other types stay float."""
