"""The table of TensorFlow's operations: kind, input roles, channel axis of the weight, attribute defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from graphquant.formats.tensorflow import opdefs
from graphquant.ir import NO_ATTRS

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class TensorFlowOpInfo:
    """Properties of an op type that the graph representation needs.

    Attributes:
        kind: The kind, which all formats share.
        roles: The role of each input slot; the last one applies to all further slots.
        channel_axis: The output channel axis of the "weight" slot, from the end if negative.
        defaults: Values of attributes that a file may omit.
    """

    kind: str
    roles: tuple[str, ...] = ("input",)
    channel_axis: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRS)


_WEIGHTED_ROLES: Final = ("input", "weight")
_CONV_DEFAULTS: Final = {"data_format": "NHWC"}
_MATMUL_DEFAULTS: Final = {"transpose_a": False, "transpose_b": False}
_BATCH_MATMUL_DEFAULTS: Final = {"adj_x": False, "adj_y": False}
_BATCHNORM: Final = TensorFlowOpInfo(
    "batchnorm",
    ("input", "scale", "offset", "mean", "variance"),
    defaults={"is_training": True, "epsilon": 1e-4, "data_format": "NHWC"},
)
_RANGE_ROLES: Final = ("input", "min", "max")
_FAKE_QUANT_DEFAULTS: Final = {"num_bits": 8, "narrow_range": False}
_QUANTIZE_DEQUANTIZE_DEFAULTS: Final = {
    "signed_input": True,
    "num_bits": 8,
    "range_given": False,
    "narrow_range": False,
    "axis": -1,
}
_REDUCE_ROLES: Final = ("input", "axis")
_GATHER_ROLES: Final = ("input", "indices", "axis")

_WEIGHTED_OPS: Final = {
    "Conv2D": TensorFlowOpInfo("conv", _WEIGHTED_ROLES, 3, _CONV_DEFAULTS),
    "Conv3D": TensorFlowOpInfo("conv", _WEIGHTED_ROLES, 4, {"data_format": "NDHWC"}),
    "DepthwiseConv2dNative": TensorFlowOpInfo("depthwise_conv", _WEIGHTED_ROLES, 2, _CONV_DEFAULTS),
    "Conv2DBackpropInput": TensorFlowOpInfo("conv_transpose", ("shape", "weight", "input"), 2, _CONV_DEFAULTS),
    "Conv3DBackpropInputV2": TensorFlowOpInfo(
        "conv_transpose", ("shape", "weight", "input"), 3, {"data_format": "NDHWC"}
    ),
    "MatMul": TensorFlowOpInfo("matmul", _WEIGHTED_ROLES, 1, _MATMUL_DEFAULTS),
    "BatchMatMul": TensorFlowOpInfo("matmul", _WEIGHTED_ROLES, -1, _BATCH_MATMUL_DEFAULTS),
    "BatchMatMulV2": TensorFlowOpInfo("matmul", _WEIGHTED_ROLES, -1, _BATCH_MATMUL_DEFAULTS),
    "BatchMatMulV3": TensorFlowOpInfo("matmul", _WEIGHTED_ROLES, -1, _BATCH_MATMUL_DEFAULTS),
    "_FusedConv2D": TensorFlowOpInfo("conv", ("input", "weight", "bias", "other"), 3, _CONV_DEFAULTS),
    "_FusedDepthwiseConv2dNative": TensorFlowOpInfo(
        "depthwise_conv", ("input", "weight", "bias", "other"), 2, _CONV_DEFAULTS
    ),
    "_FusedMatMul": TensorFlowOpInfo("matmul", ("input", "weight", "bias", "other"), 1, _MATMUL_DEFAULTS),
    "BiasAdd": TensorFlowOpInfo("bias_add", ("input", "bias"), defaults=_CONV_DEFAULTS),
    "BiasAddV1": TensorFlowOpInfo("bias_add", ("input", "bias")),
}

_NORMALIZATION_OPS: Final = {
    "FusedBatchNorm": _BATCHNORM,
    "FusedBatchNormV2": _BATCHNORM,
    "FusedBatchNormV3": _BATCHNORM,
    "LRN": TensorFlowOpInfo("lrn"),
}

_SIMPLE_OPS: Final = {
    name: TensorFlowOpInfo(kind)
    for kind, names in {
        "add": "Add AddV2 AddN",
        "sub": "Sub",
        "mul": "Mul MulNoNan",
        "div": "RealDiv Div DivNoNan",
        "pow": "Pow",
        "max": "Maximum",
        "min": "Minimum",
        "relu": "Relu",
        "relu6": "Relu6",
        "leaky_relu": "LeakyRelu",
        "elu": "Elu Selu",
        "sigmoid": "Sigmoid",
        "tanh": "Tanh",
        "softmax": "Softmax",
        "log_softmax": "LogSoftmax",
        "softplus": "Softplus",
        "erf": "Erf",
        "exp": "Exp",
        "log": "Log",
        "sqrt": "Sqrt",
        "rsqrt": "Rsqrt",
        "neg": "Neg",
        "abs": "Abs",
        "max_pool": "MaxPool MaxPool3D",
        "avg_pool": "AvgPool AvgPool3D",
        "pack": "Pack",
        "unpack": "Unpack",
        "squeeze": "Squeeze",
        "cast": "Cast",
        "shape": "Shape ShapeN Size Rank",
        "depth_to_space": "DepthToSpace",
        "space_to_depth": "SpaceToDepth",
        "einsum": "Einsum",
    }.items()
    for name in names.split()
}

_OPS_WITH_ROLES: Final = {
    "ClipByValue": TensorFlowOpInfo("clip", _RANGE_ROLES),
    "MaxPoolV2": TensorFlowOpInfo("max_pool", ("input", "shape")),
    "Mean": TensorFlowOpInfo("reduce_mean", _REDUCE_ROLES),
    "Sum": TensorFlowOpInfo("reduce_sum", _REDUCE_ROLES),
    "Max": TensorFlowOpInfo("reduce_max", _REDUCE_ROLES),
    "Min": TensorFlowOpInfo("reduce_min", _REDUCE_ROLES),
    "ArgMax": TensorFlowOpInfo("arg_max", _REDUCE_ROLES),
    "TopK": TensorFlowOpInfo("top_k"),
    "TopKV2": TensorFlowOpInfo("top_k", ("input", "shape")),
    "Concat": TensorFlowOpInfo("concat", ("axis", "input")),
    "Split": TensorFlowOpInfo("split", ("axis", "input")),
    "SplitV": TensorFlowOpInfo("split", ("input", "shape", "axis")),
    "Slice": TensorFlowOpInfo("slice", ("input", "indices")),
    "StridedSlice": TensorFlowOpInfo("slice", ("input", "indices")),
    "Gather": TensorFlowOpInfo("gather", _GATHER_ROLES),
    "GatherV2": TensorFlowOpInfo("gather", _GATHER_ROLES),
    "GatherNd": TensorFlowOpInfo("gather", _GATHER_ROLES),
    "ResourceGather": TensorFlowOpInfo("gather", ("variable", "indices")),
    "Reshape": TensorFlowOpInfo("reshape", ("input", "shape")),
    "Transpose": TensorFlowOpInfo("transpose", ("input", "axis")),
    "ExpandDims": TensorFlowOpInfo("unsqueeze", ("input", "axis")),
    "BroadcastTo": TensorFlowOpInfo("expand", ("input", "shape")),
    "Fill": TensorFlowOpInfo("expand", ("shape", "input")),
    "Tile": TensorFlowOpInfo("tile", ("input", "shape")),
    "Pad": TensorFlowOpInfo("pad", ("input", "shape")),
    "PadV2": TensorFlowOpInfo("pad", ("input", "shape", "other")),
    "MirrorPad": TensorFlowOpInfo("pad", ("input", "shape")),
    "ResizeBilinear": TensorFlowOpInfo("resize", ("input", "shape")),
    "ResizeNearestNeighbor": TensorFlowOpInfo("resize", ("input", "shape")),
    "ResizeBicubic": TensorFlowOpInfo("resize", ("input", "shape")),
    "Select": TensorFlowOpInfo("where", ("condition", "input")),
    "SelectV2": TensorFlowOpInfo("where", ("condition", "input")),
}

VARIABLE_OP_TYPES: Final = frozenset({"VarHandleOp", "VariableV2", "Variable"})

_CONTROL_OPS: Final = {
    **{
        name: TensorFlowOpInfo("identity")
        for name in ["Identity", "StopGradient", "Snapshot", "PreventGradient", "RefIdentity"]
    },
    "EnsureShape": TensorFlowOpInfo("identity"),
    **{name: TensorFlowOpInfo("switch", ("input", "condition")) for name in ("Switch", "RefSwitch")},
    **{name: TensorFlowOpInfo("merge") for name in ("Merge", "RefMerge")},
    **{name: TensorFlowOpInfo("enter") for name in ("Enter", "RefEnter")},
    **{name: TensorFlowOpInfo("exit") for name in ("Exit", "RefExit")},
    **{name: TensorFlowOpInfo("next_iteration") for name in ("NextIteration", "RefNextIteration")},
    "LoopCond": TensorFlowOpInfo("loop_cond", ("condition",)),
    "Const": TensorFlowOpInfo("constant", ()),
    **{name: TensorFlowOpInfo("variable", ()) for name in VARIABLE_OP_TYPES},
    "ReadVariableOp": TensorFlowOpInfo("read_variable", ("variable",)),
    **{name: TensorFlowOpInfo("input", ()) for name in ("Placeholder", "PlaceholderV2")},
    "PlaceholderWithDefault": TensorFlowOpInfo("input"),
    "If": TensorFlowOpInfo("if", ("condition", "input")),
    "StatelessIf": TensorFlowOpInfo("if", ("condition", "input")),
    "Case": TensorFlowOpInfo("if", ("condition", "input")),
    "StatelessCase": TensorFlowOpInfo("if", ("condition", "input")),
    "While": TensorFlowOpInfo("while"),
    "StatelessWhile": TensorFlowOpInfo("while"),
    **{name: TensorFlowOpInfo("call") for name in ("PartitionedCall", "StatefulPartitionedCall", "TPUPartitionedCall")},
    "RemoteCall": TensorFlowOpInfo("call", ("other", "input")),
    "SymbolicGradient": TensorFlowOpInfo("call"),
}

_QUANTIZATION_OPS: Final = {
    "QuantizeV2": TensorFlowOpInfo("quantize", _RANGE_ROLES),
    "Dequantize": TensorFlowOpInfo("dequantize", _RANGE_ROLES),
    "FakeQuantWithMinMaxArgs": TensorFlowOpInfo("qdq", defaults={"min": -6.0, "max": 6.0, **_FAKE_QUANT_DEFAULTS}),
    "FakeQuantWithMinMaxVars": TensorFlowOpInfo("qdq", _RANGE_ROLES, defaults=_FAKE_QUANT_DEFAULTS),
    "FakeQuantWithMinMaxVarsPerChannel": TensorFlowOpInfo("qdq", _RANGE_ROLES, defaults=_FAKE_QUANT_DEFAULTS),
    "QuantizeAndDequantize": TensorFlowOpInfo("qdq"),
    "QuantizeAndDequantizeV2": TensorFlowOpInfo(
        "qdq", _RANGE_ROLES, defaults={**_QUANTIZE_DEQUANTIZE_DEFAULTS, "round_mode": "HALF_TO_EVEN"}
    ),
    "QuantizeAndDequantizeV3": TensorFlowOpInfo(
        "qdq", (*_RANGE_ROLES, "other"), defaults={**_QUANTIZE_DEQUANTIZE_DEFAULTS, "range_given": True}
    ),
    "QuantizeAndDequantizeV4": TensorFlowOpInfo(
        "qdq", _RANGE_ROLES, defaults={**_QUANTIZE_DEQUANTIZE_DEFAULTS, "round_mode": "HALF_TO_EVEN"}
    ),
}

_OP_INFOS: Final = {
    **_WEIGHTED_OPS,
    **_NORMALIZATION_OPS,
    **_SIMPLE_OPS,
    **_OPS_WITH_ROLES,
    **_CONTROL_OPS,
    **_QUANTIZATION_OPS,
}

_RANDOM_PREFIXES: Final = (
    "Random",
    "StatelessRandom",
    "TruncatedNormal",
    "ParameterizedTruncatedNormal",
    "Multinomial",
    "StatelessTruncated",
)

FUNCTION_ATTRS: Final[dict[str, dict[str, tuple[int | None, bool]]]] = {
    **{name: {"f": (0, False)} for name in ("PartitionedCall", "StatefulPartitionedCall", "TPUPartitionedCall")},
    **{name: {"then_branch": (1, False), "else_branch": (1, False)} for name in ("If", "StatelessIf")},
    **{name: {"branches": (1, False)} for name in ("Case", "StatelessCase")},
    # The condition reads the body's results in later iterations, so its inputs match no inputs of the op: no offset.
    **{name: {"cond": (None, True), "body": (0, True)} for name in ("While", "StatelessWhile")},
    "RemoteCall": {"f": (1, False)},
}
"""Attributes with functions, by op type: (offset, loop) of the `Call`. Functions in other attributes have no offset."""


def describe_tf_op(op_type: str, attr: Mapping[str, Any], input_count: int) -> TensorFlowOpInfo:
    """Return the properties of a node of that type, with these AttrValue messages and number of data inputs."""
    op_info = _OP_INFOS.get(op_type)
    if op_info is None:
        return _describe_unlisted_op(op_type, input_count)
    if op_type == "MatMul" and _is_attr_set(attr, "transpose_b"):
        return TensorFlowOpInfo(op_info.kind, op_info.roles, 0, op_info.defaults)
    if op_info.channel_axis == -1 and _is_attr_set(attr, "adj_y"):
        return TensorFlowOpInfo(op_info.kind, op_info.roles, -2, op_info.defaults)
    return op_info


def _describe_unlisted_op(op_type: str, input_count: int) -> TensorFlowOpInfo:
    if op_type == "ConcatV2":
        return TensorFlowOpInfo("concat", (*("input",) * (input_count - 1), "axis"))
    if op_type.startswith(_RANDOM_PREFIXES):
        return TensorFlowOpInfo("random")
    return TensorFlowOpInfo("stateful" if opdefs.is_stateful_op(op_type) else "other")


def _is_attr_set(attr: Mapping[str, Any], name: str) -> bool:
    return name in attr and bool(attr[name].b)
