"""ONNX QuantizeLinear and DequantizeLinear: https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html .

docs/decisions/0031-onnx-types.md has the types, granularities and opsets that onnxruntime was measured to run. Below
the opset that has 4 and 16 bits in the default domain, onnxruntime supports these in its own domain, in models of any
opset. Therefore only blocks and float8 require a higher opset. From the first opset whose ops onnxruntime does not
implement, all other types are in its own domain, and these two are not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from sys import intern
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from graphquant.ir import NO_ATTRS, fully_known_shape
from graphquant.numerics import (
    FLOAT4_NAME,
    MIN_BITS,
    Array,
    FloatType,
    IntType,
    QParams,
    QType,
    broadcast_to_tensor,
    numpy_dtype,
    parse_type,
    qparams_from_scale,
    quantize_to_dtype,
    split_block_scales,
)
from graphquant.qdq.family import FamilyRequest, QDQFamily, QDQSite, add_constant, new_op

if TYPE_CHECKING:
    from graphquant.ir import Graph, Op, Parameters, TensorRef

ONNX_FLOAT32 = 1  # TensorProto.FLOAT, the target type of a Cast

OPSET_PER_TENSOR, OPSET_PER_CHANNEL = 10, 13
"""Opsets of 8-bit types and of int32 biases."""

OPSET_ACTIVATIONS = 11
"""onnxruntime adds a Round to float biases if activations are quantized. Opset 10 does not have that op."""

OPSET_FLOAT8, OPSET_BLOCKS, OPSET_FLOAT4, OPSET_FLOAT8_SCALES, OPSET_2_BITS = 19, 21, 23, 24, 25
"""Opset 19 also has float16 tensors, opset 21 float16 tensors of 4 and 16 bits, opset 24 scales of float8_e8m0fnu."""

E8M0_SCALES, E4M3_SCALES = "float8_e8m0fnu", "float8_e4m3fn"
"""Types of scales of blocks: powers of two, or numbers that a DequantizeLinear multiplies by a scale of the tensor."""

FLOAT4_RUNTIMES = {"openvino": "OpenVINO 2026.4", "tensorrt": "TensorRT 10.8"}
"""Releases by target that read float4 and scales of float8_e8m0fnu and float8_e4m3fn."""

OPSET_4_AND_16_BITS = 21  # first opset with 4 and 16 bits in the default domain
OPSET_WITHOUT_KERNELS = 28  # first opset whose QuantizeLinear and DequantizeLinear no onnxruntime up to 1.32 implements

MICROSOFT_DOMAIN = "com.microsoft"
"""onnxruntime's domain, which has 4, 8 and 16 bits in models of any opset, but neither blocks nor float8."""

MICROSOFT_DOMAIN_TARGETS = frozenset({"onnxruntime", "onnxruntime-arm", "openvino"})
"""Targets that run the ops of both domains alike."""

OPSET_BROADCAST = 8  # first opset whose Max and Min broadcast, which clipping needs for widths without a container

TYPES_OF_2_BITS = frozenset({"int2", "uint2"})
TYPES_OF_4_BITS = frozenset({"int4", "uint4"})
"""Below `OPSET_4_AND_16_BITS`, initializers can have these types, but Constants cannot."""

TYPES_OF_4_AND_16_BITS = TYPES_OF_4_BITS | {"int16", "uint16"}


def _container_type(dtype: QType, *, parameter: bool, opset: int) -> str:
    """Return the container of the values: 2 bits from opset 25 on, and 8 bits for activations of up to 4 bits.

    onnxruntime's optimizer moves 4-bit activations past a MaxPool or into a convolution, whose kernels do not support
    the type, and then rejects the model. It does not move weights.
    """
    narrow = isinstance(dtype, IntType) and dtype.container in TYPES_OF_4_BITS
    if parameter and opset >= OPSET_2_BITS and dtype.name in TYPES_OF_2_BITS:
        return dtype.name
    return dtype.container.replace("4", "8") if narrow and not parameter else dtype.container


def _scale_type_reason(request: FamilyRequest) -> str:
    """Return the reason why the targets lack kernels for types that few runtimes have, or ""."""
    scale_type, is_float4 = request.args.scale_type, request.type.name == FLOAT4_NAME
    if scale_type is not None and request.block is None:
        return f"scales of {scale_type} are for blocks; set per = \"block\" and 'block_size'"
    if not request.opset or not (is_float4 or scale_type == E8M0_SCALES):
        return ""
    if request.targets and FLOAT4_RUNTIMES.keys() >= set(request.targets):
        return ""
    kind = FLOAT4_NAME if is_float4 else f"scales of {scale_type}"
    return (
        f"onnxruntime has no kernel for {kind}; {' and '.join(FLOAT4_RUNTIMES.values())} and later have one:"
        f' set target = "{next(iter(FLOAT4_RUNTIMES))}" in the rule file'
    )


def _is_single_block(params: QParams) -> bool:
    """Return True if a vector is one block. onnxruntime then requires one scale per tensor and no block size."""
    return params.block is not None and params.scale.shape == (1,)


class OnnxFamily(QDQFamily):
    """QuantizeLinear and DequantizeLinear, which store scale and zero point."""

    name = "onnx-qdq"
    format = "onnx"
    op_types = frozenset({"QuantizeLinear", "DequantizeLinear"})
    stores_integer_weights = True
    argument_names = frozenset({"scale_type"})

    def add_ops(self, graph: Graph, site: QDQSite) -> TensorRef:
        """Add QuantizeLinear and DequantizeLinear. For a weight with a value, integers replace the former."""
        params, source_output = site.static_params, graph.output(site.tensor)
        container = _container_type(params.type, parameter=site.is_parameter, opset=site.opset)
        integer_dtype = numpy_dtype(container)
        shape = () if _is_single_block(params) else params.scale.shape
        # The scale's type is the tensor's. A copy of the scales of all blocks would be a sixteenth of the model.
        scales = params.scale.reshape(shape).astype(np.dtype(source_output.dtype), copy=False)
        zero_points = params.zero_point.reshape(shape).astype(integer_dtype)  # keeps no other array
        scale_type = site.args.scale_type if shape else None
        scale = _add_scales(graph, site, scales, scale_type)
        zero_point = _add_site_constant(graph, site, "zero_point", zero_points)
        attrs = {} if _is_single_block(params) else {"axis": params.axis, "block_size": params.block}
        if scale_type == E8M0_SCALES:
            attrs["output_dtype"] = ONNX_FLOAT32  # otherwise that of the scales
        # From opset 21 on, onnxruntime 1.28 to 1.32 sets output_dtype where it moves a pair past a Transpose, keeps it
        # where it replaces int8 by uint8, and then rejects the model. Ops of its own domain have no such attribute.
        is_rejected = container == "int8" and not site.is_parameter and site.opset >= OPSET_4_AND_16_BITS
        in_microsoft_domain = (
            site.opset >= OPSET_WITHOUT_KERNELS
            or (site.opset < OPSET_4_AND_16_BITS and container in TYPES_OF_4_AND_16_BITS)
            or (is_rejected and bool(site.targets) and MICROSOFT_DOMAIN_TARGETS.issuperset(site.targets))
        )
        fields: dict[str, Any] = {
            "domain": MICROSOFT_DOMAIN if in_microsoft_domain else "",
            "roles": ("input", "scale", "zero_point"),
            "attrs": {name: value for name, value in attrs.items() if value is not None} or NO_ATTRS,
            "rule": site.rule,
        }
        dtype, tensor_shape = source_output.dtype, source_output.shape
        if site.read_value is not None:
            source = graph.add_op(_new_integer_constant(graph, site, site.read_value, integer_dtype))
        else:
            data, step = site.tensor, scale
            if dtype == "float16":  # onnxruntime before 1.30 truncates float16 tensors instead of rounding them
                cast = {"kind": "cast", "type": "Cast", "attrs": {"to": ONNX_FLOAT32}, "rule": site.rule}
                data = graph.add_op(new_op(graph, f"{site.name}/float32", "float32", tensor_shape, **cast), [data])
                step = _add_site_constant(graph, site, "scale_float32", scales.astype(np.float32))
            fields |= {"kind": "quantize", "type": "QuantizeLinear"}
            op = new_op(graph, site.name, intern(integer_dtype.name), tensor_shape, **fields)
            source = graph.add_op(op, [_add_clip(graph, site, data), step, zero_point])
        fields |= {"kind": "dequantize", "type": "DequantizeLinear"}
        op = new_op(graph, f"{site.name}/dequant", dtype, tensor_shape, **fields)
        return graph.add_op(op, [source, scale, zero_point])

    def unsupported_reason(self, request: FamilyRequest) -> str | None:  # noqa: PLR0911  # one per reason
        """Return the reason why onnxruntime does not support a request, or None."""
        if request.dtype == "float16" and not (request.is_parameter and isinstance(request.type, IntType)):
            return "onnxruntime runs ops between float16 pairs in float; convert the model to float32 first"
        if request.dtype not in {"float16", "float32"}:
            return f"QuantizeLinear with a float32 scale takes no {request.dtype} tensor"
        if request.range_source != "observed":
            return "QuantizeLinear needs a known scale; omit 'range'"
        if request.rounding_mode == "half-up":
            return "QuantizeLinear always rounds half to even; omit 'round'"
        if reason := _scale_type_reason(request):
            return reason
        if request.block is not None and not request.is_parameter:
            return (
                "only weights can have blocks, since calibration does not collect statistics for blocks of activations;"
                ' use per = "tensor" or per = "channel"'
            )
        is_only_in_default_domain = request.block is not None or isinstance(request.type, FloatType)
        if is_only_in_default_domain and request.opset >= OPSET_WITHOUT_KERNELS:
            kind, opset = "float8" if request.block is None else "blocks", OPSET_WITHOUT_KERNELS
            return f"onnxruntime runs {kind} only below opset {opset}; export the model with a lower opset"
        if request.type.name == "int32" and request.is_parameter:
            return None
        if isinstance(request.type, FloatType) or request.type.container in {"int8", "uint8", *TYPES_OF_4_AND_16_BITS}:
            return None
        return f"onnxruntime does not support {request.type.name}, which is wider than 16 bits; use 2 to 16 bits"

    def minimum_opset(self, request: FamilyRequest) -> int:  # noqa: PLR0911  # one per group of types
        """Return the lowest opset of the default domain that supports a request, with onnxruntime's ops if needed."""
        container = _container_type(request.type, parameter=request.is_parameter, opset=request.opset)
        has_4_or_16_bits = container in TYPES_OF_4_AND_16_BITS
        if request.in_function and request.is_parameter and container in TYPES_OF_4_BITS:
            return OPSET_4_AND_16_BITS
        if request.args.scale_type == E8M0_SCALES or request.type.name == FLOAT4_NAME:
            return OPSET_FLOAT8_SCALES if request.args.scale_type == E8M0_SCALES else OPSET_FLOAT4
        if request.block is not None or (request.dtype == "float16" and has_4_or_16_bits):
            return OPSET_BLOCKS
        if isinstance(request.type, FloatType) or request.dtype == "float16":
            return OPSET_FLOAT8
        if has_4_or_16_bits:
            return OPSET_BROADCAST if request.is_parameter else OPSET_ACTIVATIONS
        if request.axis is not None:
            return OPSET_PER_CHANNEL
        return OPSET_PER_TENSOR if request.is_parameter else OPSET_ACTIVATIONS

    def read_params(self, graph: Graph, op: Op, parameters: Parameters) -> QParams | None:
        """Return scale and zero point of a QuantizeLinear or DequantizeLinear of either domain; None if not constant.

        None also stands for scales whose shape fits neither the tensor, its channels nor its blocks.
        """
        data, *references = [*graph.slots(op.name), None, None, None][:3]
        scale, zero_point = (None if tensor is None else parameters.value(tensor) for tensor in references)
        if references[0] is not None and graph.graphs[references[0].graph].op(references[0].op).kind == "dequantize":
            scale = _computed_scales(graph.graphs[references[0].graph], references[0].op, parameters)
        if scale is None or scale.dtype.kind in "OSU" or (references[1] is not None and zero_point is None):
            return None
        dtype = _quantized_type(graph, op, data, zero_point)
        with np.errstate(over="ignore", under="ignore"):
            scale = scale.astype(np.float32)
        if dtype is None or scale.size == 0 or not (np.isfinite(scale).all() and (scale > 0).all()):
            return None
        zeros = np.zeros(scale.shape) if zero_point is None else zero_point.astype(np.float64)
        if zeros.size != scale.size or (isinstance(dtype, FloatType) and zeros.any()):
            return None  # ONNX defines no zero point for float8
        zeros = zeros.reshape(scale.shape).astype(np.int32)
        block = int(op.numeric_attr("block_size", 0))
        if scale.size == 1 and block <= 0:
            return qparams_from_scale(scale.reshape(()), zeros.reshape(()), dtype)
        shape = graph.output(data).shape if data is not None else None
        rank = len(shape) if shape else scale.ndim if block > 0 else 0
        axis = int(op.numeric_attr("axis", 1))
        axis = axis + rank if axis < 0 else axis
        fits = scale.ndim == 1 if block <= 0 else scale.ndim == rank and 0 <= axis < rank
        if fits and shape is not None:
            counts = [size and -(-size // block) if block > 0 and i == axis else size for i, size in enumerate(shape)]
            counts = counts if block > 0 else counts[axis : axis + 1]
            sizes_match = all(count in {None, length} for count, length in zip(counts, scale.shape, strict=False))
            fits = axis >= 0 and len(counts) == scale.ndim and sizes_match
        return qparams_from_scale(scale, zeros, dtype, axis=axis, block=block if block > 0 else None) if fits else None

    def read_restricted_params(self, graph: Graph, op: Op, parameters: Parameters) -> QParams | None:
        """Return the params with the type whose values Max and Min, or the name of stored integers, restrict them to.

        A type of 5 bits is written with the container int8, so `read_params` returns int8.
        """
        params, data = self.read_params(graph, op, parameters), next(iter(graph.slots(op.name)), None)
        if params is None or data is None or not isinstance(params.type, IntType) or params.block is not None:
            return params
        source = graph.graphs[data.graph].op(data.op)
        if source.kind == "constant" and op.kind == "dequantize":
            return _restrict_stored(params, source.name.rpartition("/")[2])
        if source.kind == "quantize":
            return self.read_restricted_params(graph.graphs[data.graph], source, parameters)
        limits = dict(zip(("max", "min"), params.type.limits(), strict=True))
        for _ in limits:
            home_graph, source = graph.graphs[data.graph], graph.graphs[data.graph].op(data.op)
            operands = [tensor for tensor in home_graph.slots(source.name) if tensor is not None]
            bound = parameters.value(operands[1]) if source.kind in limits and len(operands) == len(limits) else None
            if bound is None or bound.size not in {1, params.scale.size}:
                break
            levels = np.unique(np.rint(bound.reshape(-1) / params.scale.reshape(-1)) + params.zero_point.reshape(-1))
            limits[source.kind], data = int(levels[0]) if levels.size == 1 else limits[source.kind], operands[0]
        return _restrict(params, (limits["max"], limits["min"]))


def _restrict_stored(params: QParams, type_name: str) -> QParams:
    """Return the params of a stored weight with the type that its name ends with, if that has the same container."""
    try:
        dtype = IntType.parse(type_name)
    except ValueError:
        return params
    is_narrower = isinstance(params.type, IntType) and dtype.container == params.type.name
    return replace(params, type=dtype) if is_narrower else params


def _restrict(params: QParams, limits: tuple[int, int]) -> QParams:
    """Return the params with the integer type that has these limits, or unchanged if there is none."""
    for bits in range(MIN_BITS, params.type.bits):
        dtype = IntType(bits, signed=params.type.signed)
        for narrow in (False, True):
            if dtype.limits(narrow=narrow) == limits:
                return replace(params, type=dtype, narrow=narrow and dtype.signed)
    return params


def _add_scales(graph: Graph, site: QDQSite, scales: Array, scale_type: str | None) -> TensorRef:
    """Add the scales of a site as a constant, or as the product of numbers of few bits and a scale of the tensor."""
    if scale_type is None:
        return _add_site_constant(graph, site, "scale", scales)
    if scale_type == E8M0_SCALES:
        return _add_site_constant(graph, site, "scale", scales.astype(ml_dtypes.float8_e8m0fnu))
    numbers, tensor_scale = split_block_scales(scales.astype(np.float64))
    sources = [
        _add_site_constant(graph, site, "block_scale", numbers),
        _add_site_constant(graph, site, "tensor_scale", np.asarray(tensor_scale.astype(scales.dtype))),
    ]
    fields: dict[str, Any] = {"kind": "dequantize", "type": "DequantizeLinear", "roles": ("input", "scale")}
    op = new_op(graph, f"{site.name}/scale", str(scales.dtype), scales.shape, rule=site.rule, **fields)
    return graph.add_op(op, sources)


def _computed_scales(graph: Graph, name: str, parameters: Parameters) -> Array | None:
    """Return the scales that a DequantizeLinear without zero points and one scale computes; None for other ones."""
    operands = [None if tensor is None else parameters.value(tensor) for tensor in graph.slots(name)]
    numbers, tensor_scale = [*operands, None, None][:2]
    if numbers is None or tensor_scale is None or tensor_scale.size > 1 or len(operands) > 2:  # noqa: PLR2004
        return None
    return numbers.astype(np.float32) * tensor_scale.reshape(()).astype(np.float32)


def _add_site_constant(graph: Graph, site: QDQSite, suffix: str, value: Array) -> TensorRef:
    return add_constant(graph, f"{site.name}/{suffix}", value, op_type="Constant", rule=site.rule)


def _new_integer_constant(
    graph: Graph, site: QDQSite, read_value: Callable[[], Array], integer_dtype: np.dtype[Any]
) -> Op:
    """Return a constant whose integers are computed when they are read, unless they were computed before."""
    params = site.static_params

    def read_integers() -> Array:
        read_rows, shape = site.read_rows, fully_known_shape(site.shape)
        if read_rows is None or not shape:
            value = read_value()
            read_rows, shape = value.__getitem__, value.shape
        return quantize_to_dtype(read_rows, shape, params, integer_dtype)

    return new_op(
        graph,
        f"{site.name}/{params.type.name}",
        integer_dtype.name,
        site.shape,
        kind="constant",
        type="Constant",
        roles=(),
        read_value=read_integers if site.reuse_integers is None else partial(site.reuse_integers, read_integers),
        rule=site.rule,
    )


def _add_clip(graph: Graph, site: QDQSite, result: TensorRef) -> TensorRef:
    """Add Max and Min, which limit the values of `result` to those of the type if its container has more.

    onnxruntime's QuantizeLinear to 4 bits per channel wraps around for values of 2**31 steps. Therefore a weight that
    stays float is always limited on both sides.
    """
    params = site.static_params
    if isinstance(params.type, FloatType) or not site.needs_clip:
        return result
    output, shape = graph.output(result), tuple(size or 0 for size in site.shape or ())
    container = _container_type(params.type, parameter=site.is_parameter, opset=site.opset)
    wraps, (low, high) = container in TYPES_OF_4_BITS, params.type.limits(narrow=params.narrow)
    container_low, container_high = IntType.parse(container).limits()
    for kind, end, is_needed in (
        ("max", "low", wraps or low != container_low),
        ("min", "high", wraps or high != container_high),
    ):
        if is_needed:
            bound = broadcast_to_tensor(getattr(params.range, end).astype(np.dtype(output.dtype)), params, shape)
            operands = [result, _add_site_constant(graph, site, end, bound)]
            name, op_type = f"{site.name}/clip_{end}", kind.capitalize()
            op = new_op(graph, name, output.dtype, output.shape, kind=kind, type=op_type, rule=site.rule)
            result = graph.add_op(op, operands)
    return result


def _quantized_type(graph: Graph, op: Op, data: TensorRef | None, zero_point: Array | None) -> QType | None:
    """Return the quantized type, or None if it is unknown or not supported."""
    name = None if zero_point is None else str(zero_point.dtype)
    if name is None and op.kind == "dequantize" and data is not None:
        name = graph.output(data).dtype
    if name is None and op.kind == "quantize":
        name = op.outputs[0].dtype if op.outputs else None  # the attribute "output_dtype" can set it
    try:
        return parse_type(name or "uint8")
    except ValueError:
        return None
