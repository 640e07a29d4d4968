"""The table of TensorFlow's operations: neutral kind, input roles, channel axis of the weight, defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from graphquant.formats.tensorflow import opdefs
from graphquant.ir import NO_ATTRS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CALLS", "OpInfo", "describe"]


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What an op type is.

    Attributes:
        kind: The neutral kind.
        roles: The role of each input slot; the last one stands for all that follow.
        axis: The output channel axis of the "weight" slot, from the end if negative.
        defaults: Attributes that a file may leave out.
    """

    kind: str
    roles: tuple[str, ...] = ("input",)
    axis: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRS)


_WEIGHTED: Final = ("input", "weight")
_CONV: Final = {"data_format": "NHWC"}
_PRODUCT: Final = {"transpose_a": False, "transpose_b": False}
_BATCHED: Final = {"adj_x": False, "adj_y": False}
_NORM: Final = OpInfo(
    "batchnorm",
    ("input", "scale", "offset", "mean", "variance"),
    defaults={"is_training": True, "epsilon": 1e-4, "data_format": "NHWC"},
)
_RANGE: Final = ("input", "min", "max")
_FAKE: Final = {"num_bits": 8, "narrow_range": False}
_REAL_QUANT: Final = {"signed_input": True, "num_bits": 8, "range_given": False, "narrow_range": False, "axis": -1}
_REDUCE: Final = ("input", "axis")
_GATHER: Final = ("input", "indices", "axis")

_WEIGHTED_OPS: Final = {
    "Conv2D": OpInfo("conv", _WEIGHTED, 3, _CONV),
    "Conv3D": OpInfo("conv", _WEIGHTED, 4, {"data_format": "NDHWC"}),
    "DepthwiseConv2dNative": OpInfo("depthwise_conv", _WEIGHTED, 2, _CONV),
    "Conv2DBackpropInput": OpInfo("conv_transpose", ("shape", "weight", "input"), 2, _CONV),
    "Conv3DBackpropInputV2": OpInfo("conv_transpose", ("shape", "weight", "input"), 3, {"data_format": "NDHWC"}),
    "MatMul": OpInfo("matmul", _WEIGHTED, 1, _PRODUCT),
    "BatchMatMul": OpInfo("matmul", _WEIGHTED, -1, _BATCHED),
    "BatchMatMulV2": OpInfo("matmul", _WEIGHTED, -1, _BATCHED),
    "BatchMatMulV3": OpInfo("matmul", _WEIGHTED, -1, _BATCHED),
    "_FusedConv2D": OpInfo("conv", ("input", "weight", "bias", "other"), 3, _CONV),
    "_FusedDepthwiseConv2dNative": OpInfo("depthwise_conv", ("input", "weight", "bias", "other"), 2, _CONV),
    "_FusedMatMul": OpInfo("matmul", ("input", "weight", "bias", "other"), 1, _PRODUCT),
    "BiasAdd": OpInfo("bias_add", ("input", "bias"), defaults=_CONV),
    "BiasAddV1": OpInfo("bias_add", ("input", "bias")),
}

_NORMALISATIONS: Final = {
    "FusedBatchNorm": _NORM,
    "FusedBatchNormV2": _NORM,
    "FusedBatchNormV3": _NORM,
    "LRN": OpInfo("lrn"),
}

_ELEMENTWISE: Final = {
    name: OpInfo(kind)
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

_SHAPED: Final = {
    "ClipByValue": OpInfo("clip", _RANGE),
    "MaxPoolV2": OpInfo("max_pool", ("input", "shape")),
    "Mean": OpInfo("reduce_mean", _REDUCE),
    "Sum": OpInfo("reduce_sum", _REDUCE),
    "Max": OpInfo("reduce_max", _REDUCE),
    "Min": OpInfo("reduce_min", _REDUCE),
    "ArgMax": OpInfo("arg_max", _REDUCE),
    "TopK": OpInfo("top_k"),
    "TopKV2": OpInfo("top_k", ("input", "shape")),
    "Concat": OpInfo("concat", ("axis", "input")),
    "Split": OpInfo("split", ("axis", "input")),
    "SplitV": OpInfo("split", ("input", "shape", "axis")),
    "Slice": OpInfo("slice", ("input", "indices")),
    "StridedSlice": OpInfo("slice", ("input", "indices")),
    "Gather": OpInfo("gather", _GATHER),
    "GatherV2": OpInfo("gather", _GATHER),
    "GatherNd": OpInfo("gather", _GATHER),
    "ResourceGather": OpInfo("gather", ("variable", "indices")),
    "Reshape": OpInfo("reshape", ("input", "shape")),
    "Transpose": OpInfo("transpose", ("input", "axis")),
    "ExpandDims": OpInfo("unsqueeze", ("input", "axis")),
    "BroadcastTo": OpInfo("expand", ("input", "shape")),
    "Fill": OpInfo("expand", ("shape", "input")),
    "Tile": OpInfo("tile", ("input", "shape")),
    "Pad": OpInfo("pad", ("input", "shape")),
    "PadV2": OpInfo("pad", ("input", "shape", "other")),
    "MirrorPad": OpInfo("pad", ("input", "shape")),
    "ResizeBilinear": OpInfo("resize", ("input", "shape")),
    "ResizeNearestNeighbor": OpInfo("resize", ("input", "shape")),
    "ResizeBicubic": OpInfo("resize", ("input", "shape")),
    "Select": OpInfo("where", ("condition", "input")),
    "SelectV2": OpInfo("where", ("condition", "input")),
}

_PLUMBING: Final = {
    **{name: OpInfo("identity") for name in ["Identity", "StopGradient", "Snapshot", "PreventGradient", "RefIdentity"]},
    "EnsureShape": OpInfo("identity"),
    **{name: OpInfo("switch", ("input", "condition")) for name in ("Switch", "RefSwitch")},
    **{name: OpInfo("merge") for name in ("Merge", "RefMerge")},
    **{name: OpInfo("enter") for name in ("Enter", "RefEnter")},
    **{name: OpInfo("exit") for name in ("Exit", "RefExit")},
    **{name: OpInfo("next_iteration") for name in ("NextIteration", "RefNextIteration")},
    "LoopCond": OpInfo("loop_cond", ("condition",)),
    "Const": OpInfo("constant", ()),
    **{name: OpInfo("variable", ()) for name in ("VarHandleOp", "VariableV2", "Variable")},
    "ReadVariableOp": OpInfo("read_variable", ("variable",)),
    **{name: OpInfo("input", ()) for name in ("Placeholder", "PlaceholderV2")},
    "PlaceholderWithDefault": OpInfo("input"),
    "If": OpInfo("if", ("condition", "input")),
    "StatelessIf": OpInfo("if", ("condition", "input")),
    "Case": OpInfo("if", ("condition", "input")),
    "StatelessCase": OpInfo("if", ("condition", "input")),
    "While": OpInfo("while"),
    "StatelessWhile": OpInfo("while"),
    **{name: OpInfo("call") for name in ("PartitionedCall", "StatefulPartitionedCall", "TPUPartitionedCall")},
    "RemoteCall": OpInfo("call", ("other", "input")),
    "SymbolicGradient": OpInfo("call"),
}

_QUANTIZATION: Final = {
    "QuantizeV2": OpInfo("quantize", _RANGE),
    "Dequantize": OpInfo("dequantize", _RANGE),
    "FakeQuantWithMinMaxArgs": OpInfo("qdq", defaults={"min": -6.0, "max": 6.0, **_FAKE}),
    "FakeQuantWithMinMaxVars": OpInfo("qdq", _RANGE, defaults=_FAKE),
    "FakeQuantWithMinMaxVarsPerChannel": OpInfo("qdq", _RANGE, defaults=_FAKE),
    "QuantizeAndDequantize": OpInfo("qdq"),
    "QuantizeAndDequantizeV2": OpInfo("qdq", _RANGE, defaults={**_REAL_QUANT, "round_mode": "HALF_TO_EVEN"}),
    "QuantizeAndDequantizeV3": OpInfo("qdq", (*_RANGE, "other"), defaults={**_REAL_QUANT, "range_given": True}),
    "QuantizeAndDequantizeV4": OpInfo("qdq", _RANGE, defaults={**_REAL_QUANT, "round_mode": "HALF_TO_EVEN"}),
}

_TABLE: Final = {**_WEIGHTED_OPS, **_NORMALISATIONS, **_ELEMENTWISE, **_SHAPED, **_PLUMBING, **_QUANTIZATION}

_RANDOM: Final = (
    "Random",
    "StatelessRandom",
    "TruncatedNormal",
    "ParameterizedTruncatedNormal",
    "Multinomial",
    "StatelessTruncated",
)

CALLS: Final[dict[str, dict[str, tuple[int | None, bool]]]] = {
    **{name: {"f": (0, False)} for name in ("PartitionedCall", "StatefulPartitionedCall", "TPUPartitionedCall")},
    **{name: {"then_branch": (1, False), "else_branch": (1, False)} for name in ("If", "StatelessIf")},
    **{name: {"branches": (1, False)} for name in ("Case", "StatelessCase")},
    # The condition sees what the body makes of its inputs, so none of its inputs is known beforehand: no offset.
    **{name: {"cond": (None, True), "body": (0, True)} for name in ("While", "StatelessWhile")},
    "RemoteCall": {"f": (1, False)},
}
"""Op type to attribute to (offset, loop) of the `Call`; functions in other attributes have no offset."""


def describe(op_type: str, attr: Mapping[str, Any], inputs: int) -> OpInfo:
    """What a node is, from its type, its attributes (AttrValue messages by name) and its number of data inputs."""
    info = _TABLE.get(op_type)
    if info is None:
        return _unlisted(op_type, inputs)
    if op_type == "MatMul" and _true(attr, "transpose_b"):
        return OpInfo(info.kind, info.roles, 0, info.defaults)
    if info.axis == -1 and _true(attr, "adj_y"):
        return OpInfo(info.kind, info.roles, -2, info.defaults)
    return info


def _unlisted(op_type: str, inputs: int) -> OpInfo:
    if op_type == "ConcatV2":
        return OpInfo("concat", (*("input",) * (inputs - 1), "axis"))
    if op_type.startswith(_RANDOM):
        return OpInfo("random")
    return OpInfo("stateful" if opdefs.is_stateful(op_type) else "other")


def _true(attr: Mapping[str, Any], name: str) -> bool:
    return name in attr and bool(attr[name].b)
