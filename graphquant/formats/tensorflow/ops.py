"""The table of TensorFlow's operations: kind, input roles, channel axis of the weight, attribute defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from graphquant.formats.tensorflow.opdefs import builtin_table
from graphquant.ir import OpInfo

_WEIGHTED_ROLES: Final = ("input", "weight")
_FUSED_ROLES: Final = ("input", "weight", "bias", "other")
_RANGE_ROLES: Final = ("input", "min", "max")
_NHWC: Final = {"data_format": "NHWC"}
_NDHWC: Final = {"data_format": "NDHWC"}
_MATMUL_DEFAULTS: Final = {"transpose_a": False, "transpose_b": False}
_FAKE_QUANT_DEFAULTS: Final = {"num_bits": 8, "narrow_range": False}
_QUANTIZE_DEQUANTIZE_DEFAULTS: Final = {
    "signed_input": True,
    "num_bits": 8,
    "range_given": False,
    "narrow_range": False,
    "axis": -1,
}

VARIABLE_OP_TYPES: Final = frozenset({"VarHandleOp", "VariableV2", "Variable"})
ASSIGN_TYPES: Final = frozenset(
    f"{name}{suffix}"
    for name in ("Assign", "AssignAdd", "AssignSub", "ScatterUpdate", "ScatterAdd", "ScatterSub")
    for suffix in ("", "VariableOp")
) | {f"ResourceScatter{name}" for name in ("Update", "Add", "Sub", "NdUpdate", "NdAdd")}
"""Types of ops that change the variable in their first input."""

_SAME_NAMES: Final = (
    "Sub Pow Relu Relu6 Sigmoid Tanh Softmax Softplus Erf Exp Log Sqrt Rsqrt Neg Abs LRN Pack Unpack Squeeze"
    " Cast Einsum"
)
"""Ops with inputs only, whose kind is their name in lower case."""

_KINDS_BY_ROLES: Final[Mapping[tuple[str, ...], Mapping[str, str]]] = {
    (): {"constant": "Const", "variable": " ".join(sorted(VARIABLE_OP_TYPES)), "input": "Placeholder PlaceholderV2"},
    ("input",): {
        **{name.lower(): name for name in _SAME_NAMES.split()},
        "add": "Add AddV2 AddN",
        "mul": "Mul MulNoNan",
        "div": "RealDiv Div DivNoNan",
        "max": "Maximum",
        "min": "Minimum",
        "leaky_relu": "LeakyRelu",
        "elu": "Elu Selu",
        "log_softmax": "LogSoftmax",
        "max_pool": "MaxPool MaxPool3D",
        "avg_pool": "AvgPool AvgPool3D",
        "shape": "Shape ShapeN Size Rank",
        "depth_to_space": "DepthToSpace",
        "space_to_depth": "SpaceToDepth",
        "top_k": "TopK",
        "identity": "Identity StopGradient Snapshot PreventGradient RefIdentity EnsureShape",
        "merge": "Merge RefMerge",
        "enter": "Enter RefEnter",
        "exit": "Exit RefExit",
        "next_iteration": "NextIteration RefNextIteration",
        "input": "PlaceholderWithDefault",
        "while": "While StatelessWhile",
        "call": "PartitionedCall StatefulPartitionedCall TPUPartitionedCall SymbolicGradient",
        "qdq": "QuantizeAndDequantize",
    },
    ("input", "axis"): {
        "reduce_mean": "Mean",
        "reduce_sum": "Sum",
        "reduce_max": "Max",
        "reduce_min": "Min",
        "arg_max": "ArgMax",
        "transpose": "Transpose",
        "unsqueeze": "ExpandDims",
    },
    ("input", "shape"): {
        "max_pool": "MaxPoolV2",
        "top_k": "TopKV2",
        "reshape": "Reshape",
        "expand": "BroadcastTo",
        "tile": "Tile",
        "pad": "Pad MirrorPad",
        "resize": "ResizeBilinear ResizeNearestNeighbor ResizeBicubic",
    },
    ("input", "shape", "axis"): {"split": "SplitV"},
    ("input", "shape", "other"): {"pad": "PadV2"},
    ("input", "indices"): {"slice": "Slice StridedSlice"},
    ("input", "indices", "axis"): {"gather": "Gather GatherV2 GatherNd"},
    ("input", "bias"): {"bias_add": "BiasAddV1"},
    ("input", "condition"): {"switch": "Switch RefSwitch"},
    _RANGE_ROLES: {"clip": "ClipByValue", "quantize": "QuantizeV2", "dequantize": "Dequantize"},
    ("axis", "input"): {"concat": "Concat", "split": "Split"},
    ("shape", "input"): {"expand": "Fill"},
    ("condition", "input"): {"where": "Select SelectV2", "if": "If StatelessIf Case StatelessCase"},
    ("condition",): {"loop_cond": "LoopCond"},
    ("other", "input"): {"call": "RemoteCall"},
    ("variable",): {"read_variable": "ReadVariableOp"},
    ("variable", "indices"): {"gather": "ResourceGather"},
}

_OP_INFOS: Final = {
    **{
        name: OpInfo(kind, roles)
        for roles, kinds in _KINDS_BY_ROLES.items()
        for kind, names in kinds.items()
        for name in names.split()
    },
    "Conv2D": OpInfo("conv", _WEIGHTED_ROLES, 3, _NHWC),
    "Conv3D": OpInfo("conv", _WEIGHTED_ROLES, 4, _NDHWC),
    "DepthwiseConv2dNative": OpInfo("depthwise_conv", _WEIGHTED_ROLES, 2, _NHWC),
    "Conv2DBackpropInput": OpInfo("conv_transpose", ("shape", "weight", "input"), 2, _NHWC),
    "Conv3DBackpropInputV2": OpInfo("conv_transpose", ("shape", "weight", "input"), 3, _NDHWC),
    "MatMul": OpInfo("matmul", _WEIGHTED_ROLES, 1, _MATMUL_DEFAULTS),
    **dict.fromkeys(
        ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"),
        OpInfo("matmul", _WEIGHTED_ROLES, -1, {"adj_x": False, "adj_y": False}),
    ),
    "_FusedConv2D": OpInfo("conv", _FUSED_ROLES, 3, _NHWC),
    "_FusedDepthwiseConv2dNative": OpInfo("depthwise_conv", _FUSED_ROLES, 2, _NHWC),
    "_FusedMatMul": OpInfo("matmul", _FUSED_ROLES, 1, _MATMUL_DEFAULTS),
    "BiasAdd": OpInfo("bias_add", ("input", "bias"), defaults=_NHWC),
    **dict.fromkeys(
        ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"),
        OpInfo(
            "batchnorm",
            ("input", "scale", "offset", "mean", "variance"),
            defaults={"is_training": True, "epsilon": 1e-4, **_NHWC},
        ),
    ),
    "FakeQuantWithMinMaxArgs": OpInfo("qdq", defaults={"min": -6.0, "max": 6.0, **_FAKE_QUANT_DEFAULTS}),
    "FakeQuantWithMinMaxVars": OpInfo("qdq", _RANGE_ROLES, defaults=_FAKE_QUANT_DEFAULTS),
    "FakeQuantWithMinMaxVarsPerChannel": OpInfo("qdq", _RANGE_ROLES, defaults=_FAKE_QUANT_DEFAULTS),
    **dict.fromkeys(
        ("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV4"),
        OpInfo("qdq", _RANGE_ROLES, defaults={**_QUANTIZE_DEQUANTIZE_DEFAULTS, "round_mode": "HALF_TO_EVEN"}),
    ),
    "QuantizeAndDequantizeV3": OpInfo(
        "qdq", (*_RANGE_ROLES, "other"), defaults={**_QUANTIZE_DEQUANTIZE_DEFAULTS, "range_given": True}
    ),
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


def describe_tf_op(op_type: str, attr: Mapping[str, Any], input_count: int) -> OpInfo:
    """Return the properties of a node of that type, with these AttrValue messages and number of data inputs."""
    if op_type in _OP_INFOS:
        op_info = _OP_INFOS[op_type]
        if op_type == "MatMul" and "transpose_b" in attr and attr["transpose_b"].b:
            return op_info._replace(channel_axis=0)
        if op_info.channel_axis == -1 and "adj_y" in attr and attr["adj_y"].b:
            return op_info._replace(channel_axis=-2)
        return op_info
    if op_type == "ConcatV2":
        return OpInfo("concat", (*("input",) * (input_count - 1), "axis"))
    if op_type.startswith(_RANDOM_PREFIXES):
        return OpInfo("random")
    spec = builtin_table().find_spec(op_type)
    return OpInfo("stateful" if spec is not None and spec.is_stateful else "other")
