"""Table of ONNX ops: neutral kind, roles of the inputs, and output-channel axis of the weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphquant.ir import Shape


NumberT = TypeVar("NumberT", float, float | None)

RELU6_BOUNDS = (0.0, 6.0)


class OnnxOpInfo(NamedTuple):
    """Kind, roles of the input slots (the last one repeats) and channel axis of the "weight" slot."""

    kind: str
    roles: tuple[str, ...] = ("input",)
    channel_axis: int | None = None


class NodeFacts(NamedTuple):
    """Properties of a node, other than its type, on which its kind may depend."""

    attrs: Mapping[str, Any]
    shape: Callable[[int], Shape | None]
    scalar: Callable[[int], float | None]


_WEIGHTED_ROLES = ("input", "weight", "bias")
_RECURRENT_ROLES = ("input", "weight", "recurrent_weight", "bias", "lengths", "state", "state", "peephole")
_NORM_ROLES = ("input", "scale", "offset")
_QDQ_ROLES = ("input", "scale", "zero_point")

OTHER_OP = OnnxOpInfo("other")

_SIMPLE_OPS = """
    Einsum=einsum Add=add Sum=add Sub=sub Mul=mul Div=div Pow=pow Max=max Min=min Relu=relu LeakyRelu=leaky_relu
    Elu=elu Sigmoid=sigmoid HardSigmoid=hard_sigmoid Tanh=tanh Softmax=softmax LogSoftmax=log_softmax Gelu=gelu
    HardSwish=hard_swish Softplus=softplus Erf=erf Exp=exp Log=log Sqrt=sqrt Neg=neg Abs=abs MaxPool=max_pool
    GlobalMaxPool=max_pool AveragePool=avg_pool GlobalAveragePool=global_avg_pool LRN=lrn Concat=concat
    Flatten=flatten Transpose=transpose DepthToSpace=depth_to_space SpaceToDepth=space_to_depth Cast=cast
    Shape=shape ArgMax=arg_max Scan=scan SequenceMap=loop Identity=identity RandomNormalLike=random
    RandomUniformLike=random Multinomial=random Bernoulli=random
"""
"""Ops whose inputs all have the role "input", as TYPE=KIND."""

_REDUCTIONS = ("mean", "sum", "max", "min")

DEFAULT_DOMAIN_OPS: dict[str, OnnxOpInfo] = {
    **{name: OnnxOpInfo(kind) for name, kind in (pair.split("=") for pair in _SIMPLE_OPS.split())},
    **{f"Reduce{name.title()}": OnnxOpInfo(f"reduce_{name}", ("input", "axis")) for name in _REDUCTIONS},
    **{kind.upper(): OnnxOpInfo(kind, _RECURRENT_ROLES, 1) for kind in ("lstm", "gru", "rnn")},
    **{
        f"{name}Normalization": OnnxOpInfo(f"{name.lower()}norm", _NORM_ROLES)
        for name in ("Layer", "Instance", "Group")
    },
    **dict.fromkeys(("Gather", "GatherElements", "GatherND"), OnnxOpInfo("gather", ("input", "indices"))),
    "Conv": OnnxOpInfo("conv", _WEIGHTED_ROLES, 0),
    "ConvTranspose": OnnxOpInfo("conv_transpose", _WEIGHTED_ROLES, 1),
    "MatMul": OnnxOpInfo("matmul", ("input", "weight")),
    "Gemm": OnnxOpInfo("gemm", _WEIGHTED_ROLES, 1),
    "Clip": OnnxOpInfo("clip", ("input", "min", "max")),
    "PRelu": OnnxOpInfo("prelu", ("input", "slope")),
    "BatchNormalization": OnnxOpInfo("batchnorm", (*_NORM_ROLES, "mean", "variance")),
    "Split": OnnxOpInfo("split", ("input", "sizes")),
    "Slice": OnnxOpInfo("slice", ("input", "indices", "indices", "axis", "indices")),
    "Reshape": OnnxOpInfo("reshape", ("input", "shape")),
    "Squeeze": OnnxOpInfo("squeeze", ("input", "axis")),
    "Unsqueeze": OnnxOpInfo("unsqueeze", ("input", "axis")),
    "Expand": OnnxOpInfo("expand", ("input", "shape")),
    "Tile": OnnxOpInfo("tile", ("input", "repeats")),
    "Pad": OnnxOpInfo("pad", ("input", "padding", "value", "axis")),
    "Resize": OnnxOpInfo("resize", ("input", "region", "sizes")),
    "Upsample": OnnxOpInfo("resize", ("input", "sizes")),
    "CastLike": OnnxOpInfo("cast", ("input", "like")),
    "Where": OnnxOpInfo("where", ("condition", "input")),
    "TopK": OnnxOpInfo("top_k", ("input", "sizes")),
    "If": OnnxOpInfo("if", ("condition",)),
    "Loop": OnnxOpInfo("loop", ("count", "condition", "input")),
    "Constant": OnnxOpInfo("constant", ()),
    "Dropout": OnnxOpInfo("dropout", ("input", "ratio", "training_mode")),
    "QuantizeLinear": OnnxOpInfo("quantize", _QDQ_ROLES),
    "DequantizeLinear": OnnxOpInfo("dequantize", _QDQ_ROLES),
    "RandomNormal": OnnxOpInfo("random", ()),
    "RandomUniform": OnnxOpInfo("random", ()),
}

INTEGER_OPS = (
    *("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QGemm"),
    *("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "MatMulNBits", "GatherBlockQuantized"),
    *("MatMulInteger16", "QAttention", "QOrderedMatMul", "QEmbedLayerNormalization", "MatMulBnb4"),
)
"""Ops that compute on integers themselves, in addition to those called QLinear..."""

MICROSOFT_DOMAIN_OPS = {name: DEFAULT_DOMAIN_OPS[name] for name in ("QuantizeLinear", "DequantizeLinear")}


def classify_node(op_type: str, domain: str, facts: NodeFacts) -> OnnxOpInfo:
    """Return kind, roles and channel axis of a node of type `op_type` in `domain` ("" is the default one)."""
    if domain in {"", "com.microsoft"} and (op_type.startswith("QLinear") or op_type in INTEGER_OPS):
        return OnnxOpInfo("integer")
    if domain == "com.microsoft":
        return MICROSOFT_DOMAIN_OPS.get(op_type, OTHER_OP)
    if domain:
        return OTHER_OP
    refine = _REFINEMENTS.get(op_type)
    return refine(DEFAULT_DOMAIN_OPS[op_type], facts) if refine else DEFAULT_DOMAIN_OPS.get(op_type, OTHER_OP)


def _numeric_attribute(facts: NodeFacts, name: str, default: NumberT) -> float | NumberT:
    """Return a number from the attributes, or `default`; a hostile model may store any type there."""
    value = facts.attrs.get(name)
    return value if isinstance(value, int | float) else default


def _classify_conv(info: OnnxOpInfo, facts: NodeFacts) -> OnnxOpInfo:
    weight = facts.shape(1)
    depthwise = weight is not None and len(weight) > 1 and weight[1] == 1 and _numeric_attribute(facts, "group", 1) > 1
    return info._replace(kind="depthwise_conv") if depthwise else info


def _classify_matmul(info: OnnxOpInfo, facts: NodeFacts) -> OnnxOpInfo:
    weight = facts.shape(1)
    return info._replace(channel_axis=len(weight) - 1) if weight is not None and len(weight) > 1 else info


def _classify_gemm(info: OnnxOpInfo, facts: NodeFacts) -> OnnxOpInfo:
    return info._replace(channel_axis=0 if _numeric_attribute(facts, "transB", 0) else 1)


def _classify_clip(info: OnnxOpInfo, facts: NodeFacts) -> OnnxOpInfo:
    low, high = _numeric_attribute(facts, "min", facts.scalar(1)), _numeric_attribute(facts, "max", facts.scalar(2))
    return info._replace(kind="relu6") if (low, high) == RELU6_BOUNDS else info


_REFINEMENTS: dict[str, Callable[[OnnxOpInfo, NodeFacts], OnnxOpInfo]] = {
    "Conv": _classify_conv,
    "MatMul": _classify_matmul,
    "Gemm": _classify_gemm,
    "Clip": _classify_clip,
}
