"""TensorFlow's FakeQuant and QuantizeAndDequantize ops, with the constants, variables and reshapes that they need.

https://www.tensorflow.org/api_docs/python/tf/quantization/fake_quant_with_min_max_vars : affine, with a zero point that
is nudged to an integer. The range that is written here already has an integer zero point, so nothing is nudged.

https://www.tensorflow.org/api_docs/python/tf/quantization/quantize_and_dequantize_v2 : values are only scaled, so there
is no zero point. V2 and V3 pass gradients on as they come, V4 those inside the given range. V3's bits are a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from graphquant.errors import InternalError, UsageError
from graphquant.ir import DataType, Graph, Op, Parameters, TensorRef, fully_known_shape
from graphquant.numerics import Array, DynamicQParams, IntType, QParams, Range, tf_ranges
from graphquant.qdq.family import FamilyRequest, QDQFamily, QDQSite, RoundingMode, add_constant, new_op

HALF_TYPES = frozenset({"float16", "bfloat16"})  # types without a kernel: tensors are cast to float32 and back
LEARNED_ATTR = "_graphquant_learned"  # attribute of the variables of learned ranges; True if gradients reach them


def _control_sources(graph: Graph, site: QDQSite) -> tuple[str, ...]:
    """Return the control inputs of new constants: the tensor's producer, so that they run inside its frame."""
    return (site.tensor.op,) if site.in_frame and site.tensor.graph == graph.name else ()


def _add_site_constant(graph: Graph, site: QDQSite, suffix: str, value: Array) -> TensorRef:
    name, sources = f"{site.name}/{suffix}", _control_sources(graph, site)
    return add_constant(graph, name, value, op_type="Const", rule=site.rule, control_sources=sources)


def _add_variable(graph: Graph, site: QDQSite, suffix: str, value: Array, *, trainable: bool) -> TensorRef:
    """Add a variable and the op that reads it. The format writes the initial value."""
    dtype = DataType(str(value.dtype))
    handle = new_op(
        graph,
        f"{site.name}/{suffix}",
        "resource",
        (),
        kind="variable",
        type="VarHandleOp",
        roles=(),
        attrs={
            "dtype": dtype,
            "shape": value.shape,
            "shared_name": f"{site.variable_prefix}/{suffix}",  # function clones share the variable by this name
            LEARNED_ATTR: trainable,
        },
        read_value=lambda: value,
        rule=site.rule,
    )
    read_op = new_op(
        graph,
        f"{handle.name}/Read/ReadVariableOp",  # TensorFlow's freezing expects this name
        str(dtype),
        value.shape,
        kind="read_variable",
        type="ReadVariableOp",
        attrs={"dtype": dtype},
        rule=site.rule,
    )
    return graph.add_op(read_op, [graph.add_op(handle, control_sources=_control_sources(graph, site))])


def _add_reshape(graph: Graph, site: QDQSite, tensor: TensorRef, shape: tuple[int, ...], suffix: str) -> TensorRef:
    dtype = graph.output(site.tensor).dtype
    sizes = _add_site_constant(graph, site, f"{suffix}/shape", np.array(shape, np.int32))
    op = new_op(
        graph,
        f"{site.name}/{suffix}",
        dtype,
        shape,
        kind="reshape",
        type="Reshape",
        roles=("input", "shape"),
        attrs={"T": DataType(dtype or "float32"), "Tshape": DataType("int32")},
        rule=site.rule,
    )
    return graph.add_op(op, [tensor, sizes])


def _add_cast(graph: Graph, site: QDQSite, tensor: TensorRef, dtype: str, suffix: str) -> TensorRef:
    source = graph.output(tensor)
    attrs = {"SrcT": DataType(source.dtype or "float32"), "DstT": DataType(dtype), "Truncate": False}
    op = new_op(
        graph, f"{site.name}/{suffix}", dtype, source.shape, kind="cast", type="Cast", attrs=attrs, rule=site.rule
    )
    return graph.add_op(op, [tensor])


class TensorFlowFamily(QDQFamily):
    """A family of TensorFlow's ops, each of which quantizes and dequantizes."""

    format = "tensorflow"

    def add_ops(self, graph: Graph, site: QDQSite) -> TensorRef:
        """Add the op with the constants of its range.

        It is between two reshapes if the site has a merged shape, and between two casts if the tensor has 16 bits.
        """
        dtype = graph.output(site.tensor).dtype or ""
        if dtype in HALF_TYPES:
            wide = _add_cast(graph, site, site.tensor, "float32", "float32")
            return _add_cast(graph, site, self.add_ops(graph, replace(site, tensor=wide)), dtype, dtype)
        if site.merged_shape is None:
            return self.add_unmerged_ops(graph, site)
        if (shape := fully_known_shape(site.shape)) is None:
            raise InternalError(f"{site.tensor} has a merged shape but no static shape. The plan must reject it.")
        reshaped = _add_reshape(graph, site, site.tensor, site.merged_shape, "flat")
        merged_site = replace(site, tensor=reshaped, shape=site.merged_shape, merged_shape=None)
        return _add_reshape(graph, site, self.add_unmerged_ops(graph, merged_site), shape, "shaped")

    def add_unmerged_ops(self, graph: Graph, site: QDQSite) -> TensorRef:
        """Add the ops of a site whose channels are on one axis."""
        raise NotImplementedError

    def add_qdq_op(
        self,
        graph: Graph,
        site: QDQSite,
        op_type: str,
        attrs: dict[str, Any],
        arguments: Mapping[str, Array],
        *,
        tensor: TensorRef | None = None,
    ) -> TensorRef:
        """Add an op that reads `tensor`, by default the site's, and `arguments`: constants or learned variables."""
        data = tensor or site.tensor
        source_output = graph.output(data)
        op = new_op(
            graph,
            site.name,
            source_output.dtype,
            source_output.shape,
            kind="qdq",
            type=op_type,
            roles=("input", *("other" if name == "num_bits" else name for name in arguments)),
            attrs=attrs,
            rule=site.rule,
        )
        operands = [
            _add_variable(graph, site, name, value, trainable=self.supports_learned_range)
            if site.variable_prefix
            else _add_site_constant(graph, site, name, value)
            for name, value in arguments.items()
        ]
        return graph.add_op(op, [data, *operands])


def _integer_only_reason(request: FamilyRequest, op_type: str) -> str | None:
    """Return the reason if a request is not for integers with scales per tensor or channel, else None."""
    if not isinstance(request.type, IntType):
        return f"{op_type} supports only integer types; {request.type.name} is for ONNX models; use int8"
    if request.block is not None:
        return f'{op_type} does not support blocks, which are for ONNX models; use per = "channel"'
    return None


def _constant_operand(graph: Graph, op: Op, slot: int, parameters: Parameters) -> Array | None:
    slots = graph.slots(op.name)
    tensor = slots[slot] if slot < len(slots) else None
    return None if tensor is None else parameters.value(tensor)


def _last_axis(graph: Graph, op: Op, parameters: Parameters) -> int:
    """Return the last axis of the tensor that an op quantizes; -1 if its rank is unknown."""
    # The op itself often has no static shape in a file. A weight that it reads has one, or a reshape has its sizes.
    shape, tensor = graph.output(TensorRef(graph.name, op.name)).shape, next(iter(graph.slots(op.name)), None)
    if shape is None and tensor is not None:
        shape, producer = parameters.shape(tensor), graph.graphs[tensor.graph].op(tensor.op)
        if shape is None and producer.kind == "reshape":
            sizes = _constant_operand(graph.graphs[tensor.graph], producer, 1, parameters)
            shape = None if sizes is None or sizes.ndim != 1 else (None,) * sizes.size
    return len(shape) - 1 if shape else -1


def _constant_limits(
    graph: Graph, op: Op, parameters: Parameters, dtypes: frozenset[str]
) -> tuple[Array, Array] | None:
    """Return the constant range that an op reads, () or (C,); None if it is not constant or is damaged."""
    low, high = (_constant_operand(graph, op, slot, parameters) for slot in (1, 2))
    if low is None or high is None or low.dtype.name not in dtypes or low.dtype != high.dtype:
        return None
    return (low, high) if low.shape == high.shape and low.ndim <= 1 else None


class FakeQuantFamily(TensorFlowFamily):
    """FakeQuantWithMinMaxArgs, FakeQuantWithMinMaxVars and FakeQuantWithMinMaxVarsPerChannel."""

    name = "fake-quant"
    op_types = frozenset({"FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel"})
    argument_names = frozenset({"form"})
    forms = ("vars", "args")
    supports_learned_range = True

    def add_unmerged_ops(self, graph: Graph, site: QDQSite) -> TensorRef:
        """Add the FakeQuant op. Channels on an inner axis need a reshape before and after it."""
        params = site.static_params
        op_range = params.op_range or tf_ranges.range_for_fake_quant(params)
        low, high = op_range.low.astype(np.float32), op_range.high.astype(np.float32)
        attrs: dict[str, Any] = {"num_bits": params.type.bits, "narrow_range": params.narrow and params.type.signed}
        if site.args.form == "args":
            attrs |= {"min": float(low), "max": float(high)}
            return self.add_qdq_op(graph, site, "FakeQuantWithMinMaxArgs", attrs, {})
        if params.axis is None:
            return self.add_qdq_op(graph, site, "FakeQuantWithMinMaxVars", attrs, {"min": low, "max": high})
        shape, op_type = fully_known_shape(site.shape), "FakeQuantWithMinMaxVarsPerChannel"
        if shape is None:
            raise InternalError(f"{site.tensor} has no static shape. `unsupported_reason` must reject it per channel.")
        if params.axis == len(shape) - 1:
            return self.add_qdq_op(graph, site, op_type, attrs, {"min": low, "max": high})
        trailing = math.prod(shape[params.axis + 1 :])
        limits = {"min": np.repeat(low, trailing), "max": np.repeat(high, trailing)}
        flat_shape = (*shape[: params.axis], shape[params.axis] * trailing)
        flat = _add_reshape(graph, site, site.tensor, flat_shape, "flat")
        return _add_reshape(
            graph, site, self.add_qdq_op(graph, site, op_type, attrs, limits, tensor=flat), shape, "shaped"
        )

    def unsupported_reason(self, request: FamilyRequest) -> str | None:  # noqa: C901, PLR0911  # one per reason
        """Return the reason why TensorFlow does not support a request, or None."""
        if (reason := _integer_only_reason(request, "FakeQuant")) is not None:
            return reason
        if request.dtype not in {"float32", *HALF_TYPES}:
            return f"FakeQuant takes float32, and this tensor is {request.dtype}"
        min_bits, max_bits = tf_ranges.FAKE_QUANT_MIN_BITS, tf_ranges.FAKE_QUANT_MAX_BITS
        if not min_bits <= request.type.bits <= max_bits:
            return f"FakeQuant has {min_bits} to {max_bits} bits, and the scheme has {request.type.bits}"
        if request.is_dynamic:
            return "FakeQuant needs a range; for a dynamic one use the family quantize-and-dequantize-v2, -v3 or -v4"
        if request.range_source == "given" and request.symmetric:
            return 'FakeQuant chooses the zero point of a given range; use zero = "asymmetric"'
        if request.range_source == "learned" and request.args.form == "args":
            return 'FakeQuantWithMinMaxArgs has its range in attributes; use form = "vars" for a learned range'
        if request.rounding_mode == "half-even":
            return "FakeQuant always rounds half up; omit 'round', or use the family quantize-and-dequantize-v2"
        if request.axis is None:
            return None
        if request.args.form == "args":
            return 'FakeQuantWithMinMaxArgs has one range for the whole tensor; use form = "vars" per channel'
        if (shape := fully_known_shape(request.shape)) is None:
            return "FakeQuant per channel needs the tensor's static shape"
        if request.range_source == "learned" and math.prod(shape[request.axis + 1 :]) != 1:
            return (
                "FakeQuant learns ranges only along the last axis, and the channels are on another one;"
                ' use per = "tensor"'
            )
        return None

    def effective_params(self, params: QParams) -> QParams:
        """Return the params that FakeQuant computes from the float32 range of `params`."""
        op_range = params.op_range or tf_ranges.range_for_fake_quant(params)
        effective = tf_ranges.fake_quant_params(op_range, params.type, narrow=params.narrow, axis=params.axis)
        return replace(effective, op_range=params.op_range)

    def read_params(self, graph: Graph, op: Op, parameters: Parameters) -> QParams | None:
        """Return scale and zero point of a FakeQuant op, as a signed type; None if its range is not constant.

        The range is nudged as in TensorFlow: the zero point is rounded to an integer, which moves both ends.
        """
        limits: tuple[Array, Array] | None
        if op.type == "FakeQuantWithMinMaxArgs":
            limits = np.asarray(op.numeric_attr("min", -6.0)), np.asarray(op.numeric_attr("max", 6.0))
        else:
            limits = _constant_limits(graph, op, parameters, frozenset({"float32"}))
        bits, narrow = int(op.numeric_attr("num_bits", 8)), bool(op.attrs.get("narrow_range", False))
        if limits is None:
            return None
        axis = None if np.broadcast(*limits).ndim == 0 else _last_axis(graph, op, parameters)
        try:
            return tf_ranges.fake_quant_params(Range(*limits), IntType(bits, signed=True), narrow=narrow, axis=axis)
        except UsageError:  # the kernels reject the bits or the range
            return None

    def rounding_mode_of(self, _op: Op) -> RoundingMode:
        """Return "half-up", the only rounding of FakeQuant."""
        return "half-up"


TF_ROUND_MODE_NAMES: dict[RoundingMode, str] = {"half-even": "HALF_TO_EVEN", "half-up": "HALF_UP"}

KERNEL_FLOAT_TYPES = frozenset({"float32", "float64"})  # the types that have a CPU kernel of QuantizeAndDequantize
MAX_READABLE_BITS = 62


class QuantizeAndDequantizeFamily(TensorFlowFamily):
    """One version of QuantizeAndDequantize. V2 replaced the first version."""

    has_zero_points = False

    def __init__(self, version: Literal[2, 3, 4]) -> None:
        """`version` is that of the op type."""
        self.op_type = f"QuantizeAndDequantizeV{version}"
        self.name = f"quantize-and-dequantize-v{version}"
        first_version = {2: ["QuantizeAndDequantize"]}.get(version, [])
        self.op_types = frozenset({self.op_type, *first_version})
        self.is_v3, self.is_v4 = (self.op_type.endswith(suffix) for suffix in ("V3", "V4"))
        self.argument_names = frozenset({"input_min", "input_max"} if self.is_v4 else ())
        self.has_channel_ranges = self.is_v3

    def add_unmerged_ops(self, graph: Graph, site: QDQSite) -> TensorRef:
        """Add the op with the constants of its range, and of its bits for V3.

        V3's kernel refuses scalars. V2 computes the same for them, and for tensors that may be scalars.
        """
        params, dtype = site.params, graph.output(site.tensor).dtype
        op_type = "QuantizeAndDequantizeV2" if self.is_v3 and not site.shape else self.op_type
        attrs: dict[str, Any] = {
            "T": DataType(dtype or "float32"),
            "signed_input": params.type.signed,
            "range_given": not isinstance(params, DynamicQParams),
            "narrow_range": params.narrow and params.type.signed,
        }
        if params.axis is not None:
            attrs["axis"] = params.axis
        low, high = (end.astype(dtype) for end in self._range_inputs(site, dtype))
        arguments = {"min": low, "max": high}
        if op_type == "QuantizeAndDequantizeV3":
            arguments["num_bits"] = np.array(params.type.bits, np.int32)
        else:
            mode = TF_ROUND_MODE_NAMES[site.rounding_mode or "half-even"]
            attrs |= {"num_bits": params.type.bits, "round_mode": mode}
        return self.add_qdq_op(graph, site, op_type, attrs, arguments)

    def _range_inputs(self, site: QDQSite, dtype: str | None) -> tuple[Array, Array]:
        """Return `input_min` and `input_max`, () or (C,); float64, to be written in the tensor's type."""
        params = site.params
        if isinstance(params, QParams):
            exact = params.range if dtype == "float64" else tf_ranges.range_for_quantize_and_dequantize(params)
            op_range = params.op_range or exact
            return op_range.low, op_range.high
        # V4 alone looks at a range that is not given: its gradients pass inside of it.
        largest = float(np.finfo(np.float32).max) if self.is_v4 else 0.0
        low = -largest if site.args.input_min is None else site.args.input_min
        high = largest if site.args.input_max is None else site.args.input_max
        if params.axis is None:
            return np.asarray(low, np.float64), np.asarray(high, np.float64)
        channels = None if site.shape is None else site.shape[params.axis]
        if channels is None:
            raise InternalError(
                f"{site.tensor} has an unknown number of channels. `unsupported_reason` must reject it."
            )
        return np.full(channels, low, np.float64), np.full(channels, high, np.float64)

    def unsupported_reason(self, request: FamilyRequest) -> str | None:
        """Return the reason why TensorFlow does not support a request in this version, or None."""
        signed = request.type.signed
        min_bits, max_bits, signedness = (
            (2, tf_ranges.MAX_SIGNED_BITS, "signed") if signed else (1, tf_ranges.MAX_UNSIGNED_BITS, "unsigned")
        )
        if (reason := _integer_only_reason(request, self.op_type)) is not None:
            return reason
        if request.dtype not in KERNEL_FLOAT_TYPES | HALF_TYPES:
            return f"{self.op_type} has no CPU kernel for {request.dtype}; cast the tensor to float32"
        if not min_bits <= request.type.bits <= max_bits:
            return (
                f"{self.op_type} takes {min_bits} to {max_bits} {signedness} bits, and the scheme has"
                f" {request.type.bits}"
            )
        if not request.symmetric and signed:
            return 'QuantizeAndDequantize has no zero point; use zero = "symmetric", or the family fake-quant'
        if request.axis is not None and (request.shape is None or request.shape[request.axis] is None):
            return f'{self.op_type} per channel needs a known number of channels; use per = "tensor"'
        return self._version_reason(request)

    def _version_reason(self, request: FamilyRequest) -> str | None:
        """Return the reason why this version does not support a request that another version does, or None."""
        if self.is_v3:
            if request.rounding_mode == "half-up":
                return (
                    f"{self.op_type} always rounds half to even; omit 'round', or use quantize-and-dequantize-v2 or -v4"
                )
            return None
        if request.axis is not None and not request.is_dynamic:
            return (
                f'{self.op_type} has no CPU kernel for a range per channel; use per = "tensor", or the family'
                " quantize-and-dequantize-v3 or fake-quant"
            )
        if request.args.specified() and not request.is_dynamic:
            return "'input_min' and 'input_max' bound the gradients of a dynamic range; use observe = \"fixed\""
        return None

    def effective_params(self, params: QParams) -> QParams:
        """Return the params that the op computes from the float32 range of `params`."""
        op_range = params.op_range or tf_ranges.range_for_quantize_and_dequantize(params)
        effective = tf_ranges.quantize_and_dequantize_params(
            op_range, params.type, narrow=params.narrow, axis=params.axis
        )
        return replace(effective, op_range=params.op_range)

    def read_params(self, graph: Graph, op: Op, parameters: Parameters) -> QParams | DynamicQParams | None:
        """Return the params of an op of this version; None if its range or bits are not constant."""
        bits: Any = op.numeric_attr("num_bits", 8)
        if self.is_v3:
            bits = _constant_operand(graph, op, 3, parameters)
            if bits is None or bits.shape != () or bits.dtype.kind != "i":
                return None
        if not 1 <= int(bits) <= MAX_READABLE_BITS:
            return None
        dtype = IntType(int(bits), signed=bool(op.attrs.get("signed_input", True)))
        narrow = bool(op.attrs.get("narrow_range", False)) and dtype.signed
        axis = int(op.numeric_attr("axis", tf_ranges.WHOLE_TENSOR_AXIS))
        channel_axis = None if axis < 0 else axis
        if not op.attrs.get("range_given", self.is_v3):
            return DynamicQParams(type=dtype, narrow=narrow, axis=channel_axis)
        limits: tuple[Array, Array] | None
        if op.type == "QuantizeAndDequantize":
            limits = np.asarray(op.numeric_attr("input_min", 0.0)), np.asarray(op.numeric_attr("input_max", 0.0))
        else:
            limits = _constant_limits(graph, op, parameters, KERNEL_FLOAT_TYPES)
        has_axis = limits is not None and (limits[0].ndim == 0) == (channel_axis is None)
        if limits is None or not has_axis or not np.isfinite(limits).all() or (limits[0] > limits[1]).any():
            return None
        try:
            return tf_ranges.quantize_and_dequantize_params(Range(*limits), dtype, narrow=narrow, axis=channel_axis)
        except UsageError:  # there is no step in it
            return None

    def rounding_mode_of(self, op: Op) -> RoundingMode:
        """Return the op's rounding mode, half to even by default."""
        return "half-up" if op.attrs.get("round_mode") == "HALF_UP" else "half-even"
