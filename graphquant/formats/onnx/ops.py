"""The table of ONNX ops: neutral kind, what each input is, which axis of the weight counts output channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphquant.ir import Shape

T = TypeVar("T", float, float | None)

RELU6_BOUNDS = (0.0, 6.0)


class OpInfo(NamedTuple):
    """Kind, roles of the input slots (the last stands for all that follow) and channel axis of the "weight" slot."""

    kind: str
    roles: tuple[str, ...] = ("input",)
    channel_axis: int | None = None


class Facts(NamedTuple):
    """What the kind of a node may depend on beside its type."""

    attrs: Mapping[str, Any]
    shape: Callable[[int], Shape | None]
    scalar: Callable[[int], float | None]


_WEIGHTED = ("input", "weight", "bias")
_RECURRENT = ("input", "weight", "recurrent_weight", "bias", "lengths", "state", "state", "peephole")
_NORM = ("input", "scale", "offset")
_REDUCE = ("input", "axis")
_QUANT = ("input", "scale", "zero_point")

OTHER = OpInfo("other")

DEFAULT_DOMAIN: dict[str, OpInfo] = {
    "Conv": OpInfo("conv", _WEIGHTED, 0),
    "ConvTranspose": OpInfo("conv_transpose", _WEIGHTED, 1),
    "MatMul": OpInfo("matmul", ("input", "weight")),
    "Gemm": OpInfo("gemm", _WEIGHTED, 1),
    "Einsum": OpInfo("einsum"),
    "LSTM": OpInfo("lstm", _RECURRENT, 1),
    "GRU": OpInfo("gru", _RECURRENT, 1),
    "RNN": OpInfo("rnn", _RECURRENT, 1),
    "Add": OpInfo("add"),
    "Sum": OpInfo("add"),
    "Sub": OpInfo("sub"),
    "Mul": OpInfo("mul"),
    "Div": OpInfo("div"),
    "Pow": OpInfo("pow"),
    "Max": OpInfo("max"),
    "Min": OpInfo("min"),
    "Relu": OpInfo("relu"),
    "Clip": OpInfo("clip", ("input", "min", "max")),
    "LeakyRelu": OpInfo("leaky_relu"),
    "PRelu": OpInfo("prelu", ("input", "slope")),
    "Elu": OpInfo("elu"),
    "Sigmoid": OpInfo("sigmoid"),
    "HardSigmoid": OpInfo("hard_sigmoid"),
    "Tanh": OpInfo("tanh"),
    "Softmax": OpInfo("softmax"),
    "LogSoftmax": OpInfo("log_softmax"),
    "Gelu": OpInfo("gelu"),
    "HardSwish": OpInfo("hard_swish"),
    "Softplus": OpInfo("softplus"),
    "Erf": OpInfo("erf"),
    "Exp": OpInfo("exp"),
    "Log": OpInfo("log"),
    "Sqrt": OpInfo("sqrt"),
    "Neg": OpInfo("neg"),
    "Abs": OpInfo("abs"),
    "MaxPool": OpInfo("max_pool"),
    "GlobalMaxPool": OpInfo("max_pool"),
    "AveragePool": OpInfo("avg_pool"),
    "GlobalAveragePool": OpInfo("global_avg_pool"),
    "BatchNormalization": OpInfo("batchnorm", (*_NORM, "mean", "variance")),
    "LayerNormalization": OpInfo("layernorm", _NORM),
    "InstanceNormalization": OpInfo("instancenorm", _NORM),
    "GroupNormalization": OpInfo("groupnorm", _NORM),
    "LRN": OpInfo("lrn"),
    "ReduceMean": OpInfo("reduce_mean", _REDUCE),
    "ReduceSum": OpInfo("reduce_sum", _REDUCE),
    "ReduceMax": OpInfo("reduce_max", _REDUCE),
    "ReduceMin": OpInfo("reduce_min", _REDUCE),
    "Concat": OpInfo("concat"),
    "Split": OpInfo("split", ("input", "sizes")),
    "Slice": OpInfo("slice", ("input", "indices", "indices", "axis", "indices")),
    "Gather": OpInfo("gather", ("input", "indices")),
    "GatherElements": OpInfo("gather", ("input", "indices")),
    "GatherND": OpInfo("gather", ("input", "indices")),
    "Reshape": OpInfo("reshape", ("input", "shape")),
    "Flatten": OpInfo("flatten"),
    "Transpose": OpInfo("transpose"),
    "Squeeze": OpInfo("squeeze", ("input", "axis")),
    "Unsqueeze": OpInfo("unsqueeze", ("input", "axis")),
    "Expand": OpInfo("expand", ("input", "shape")),
    "Tile": OpInfo("tile", ("input", "repeats")),
    "Pad": OpInfo("pad", ("input", "padding", "value", "axis")),
    "Resize": OpInfo("resize", ("input", "region", "sizes")),
    "Upsample": OpInfo("resize", ("input", "sizes")),
    "DepthToSpace": OpInfo("depth_to_space"),
    "SpaceToDepth": OpInfo("space_to_depth"),
    "Cast": OpInfo("cast"),
    "CastLike": OpInfo("cast", ("input", "like")),
    "Shape": OpInfo("shape"),
    "Where": OpInfo("where", ("condition", "input")),
    "ArgMax": OpInfo("arg_max"),
    "TopK": OpInfo("top_k", ("input", "sizes")),
    "If": OpInfo("if", ("condition",)),
    "Loop": OpInfo("loop", ("count", "condition", "input")),
    "Scan": OpInfo("scan"),
    "SequenceMap": OpInfo("loop"),
    "Constant": OpInfo("constant", ()),
    "Identity": OpInfo("identity"),
    "Dropout": OpInfo("dropout", ("input", "ratio", "training_mode")),
    "QuantizeLinear": OpInfo("quantize", _QUANT),
    "DequantizeLinear": OpInfo("dequantize", _QUANT),
    "RandomNormal": OpInfo("random", ()),
    "RandomUniform": OpInfo("random", ()),
    "RandomNormalLike": OpInfo("random"),
    "RandomUniformLike": OpInfo("random"),
    "Multinomial": OpInfo("random"),
    "Bernoulli": OpInfo("random"),
}

INTEGER_OPS = (
    *("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QGemm"),
    *("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "MatMulNBits", "GatherBlockQuantized"),
    *("MatMulInteger16", "QAttention", "QOrderedMatMul", "QEmbedLayerNormalization", "MatMulBnb4"),
)
"""Ops that compute on integers by themselves, beside those called QLinear..."""

MICROSOFT_DOMAIN: dict[str, OpInfo] = {
    "QuantizeLinear": OpInfo("quantize", _QUANT),
    "DequantizeLinear": OpInfo("dequantize", _QUANT),
}


def classify(op_type: str, domain: str, facts: Facts) -> OpInfo:
    """Kind, roles and channel axis of a node of type `op_type` in `domain` ("" is the default one)."""
    if domain in {"", "com.microsoft"} and (op_type.startswith("QLinear") or op_type in INTEGER_OPS):
        return OpInfo("integer")
    if domain == "com.microsoft":
        return MICROSOFT_DOMAIN.get(op_type, OTHER)
    if domain:
        return OTHER
    special = _SPECIAL.get(op_type)
    return special(DEFAULT_DOMAIN[op_type], facts) if special else DEFAULT_DOMAIN.get(op_type, OTHER)


def _number(facts: Facts, name: str, default: T) -> float | T:
    """A number among the attributes; a hostile model may hold anything there."""
    value = facts.attrs.get(name)
    return value if isinstance(value, int | float) else default


def _conv(info: OpInfo, facts: Facts) -> OpInfo:
    weight = facts.shape(1)
    depthwise = weight is not None and len(weight) > 1 and weight[1] == 1 and _number(facts, "group", 1) > 1
    return info._replace(kind="depthwise_conv") if depthwise else info


def _matmul(info: OpInfo, facts: Facts) -> OpInfo:
    weight = facts.shape(1)
    return info._replace(channel_axis=len(weight) - 1) if weight is not None and len(weight) > 1 else info


def _gemm(info: OpInfo, facts: Facts) -> OpInfo:
    return info._replace(channel_axis=0 if _number(facts, "transB", 0) else 1)


def _clip(info: OpInfo, facts: Facts) -> OpInfo:
    low, high = _number(facts, "min", facts.scalar(1)), _number(facts, "max", facts.scalar(2))
    return info._replace(kind="relu6") if (low, high) == RELU6_BOUNDS else info


_SPECIAL: dict[str, Callable[[OpInfo, Facts], OpInfo]] = {
    "Conv": _conv,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Clip": _clip,
}
