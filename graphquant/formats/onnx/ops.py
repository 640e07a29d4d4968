"""Table of ONNX ops: neutral kind, roles of the inputs, and output-channel axis of the weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from graphquant.ir import FUSED_PREFIX, RELU6_BOUNDS, OpInfo, Shape

NumberT = TypeVar("NumberT", float, float | None)


class NodeFacts(NamedTuple):
    """Properties of a node, other than its type, on which its kind may depend."""

    attrs: Mapping[str, Any]
    shape: Callable[[int], Shape | None]
    scalar: Callable[[int], float | None]


_WEIGHTED_ROLES = ("input", "weight", "bias")
_RECURRENT_ROLES = ("input", "weight", "recurrent_weight", "bias", "lengths", "state", "state", "peephole")
_NORM_ROLES = ("input", "scale", "offset")
_QDQ_ROLES = ("input", "scale", "zero_point")

OTHER_OP = OpInfo("other")

_SIMPLE_OPS = """
    Einsum=einsum Add=add Sum=add Sub=sub Mul=mul Div=div Pow=pow Max=max Min=min Relu=relu LeakyRelu=leaky_relu
    Elu=elu Sigmoid=sigmoid HardSigmoid=hard_sigmoid Tanh=tanh Softmax=softmax LogSoftmax=log_softmax Gelu=gelu
    Swish=silu HardSwish=hard_swish Softplus=softplus Erf=erf Exp=exp Log=log Sqrt=sqrt Neg=neg Abs=abs MaxPool=max_pool
    GlobalMaxPool=max_pool AveragePool=avg_pool GlobalAveragePool=global_avg_pool LRN=lrn Concat=concat
    Flatten=flatten Transpose=transpose DepthToSpace=depth_to_space SpaceToDepth=space_to_depth Cast=cast
    Shape=shape ArgMax=arg_max Scan=scan SequenceMap=loop Identity=identity RandomNormalLike=random
    RandomUniformLike=random Multinomial=random Bernoulli=random
"""
"""Ops whose inputs all have the role "input", as TYPE=KIND."""

_REDUCTIONS = ("mean", "sum", "max", "min")

DEFAULT_DOMAIN_OPS: dict[str, OpInfo] = {
    **{name: OpInfo(kind) for name, kind in (pair.split("=") for pair in _SIMPLE_OPS.split())},
    **{f"Reduce{name.title()}": OpInfo(f"reduce_{name}", ("input", "axis")) for name in _REDUCTIONS},
    **{kind.upper(): OpInfo(kind, _RECURRENT_ROLES, 1) for kind in ("lstm", "gru", "rnn")},
    **{f"{name}Normalization": OpInfo(f"{name.lower()}norm", _NORM_ROLES) for name in ("Layer", "Instance", "Group")},
    **dict.fromkeys(("RMSNormalization", "SimplifiedLayerNormalization"), OpInfo("rmsnorm", _NORM_ROLES[:2])),
    "Attention": OpInfo("attention", (*["input"] * 3, "other", "state", "state", "other")),
    **dict.fromkeys(("Gather", "GatherElements", "GatherND"), OpInfo("gather", ("input", "indices"))),
    "Conv": OpInfo("conv", _WEIGHTED_ROLES, 0),
    "ConvTranspose": OpInfo("conv_transpose", _WEIGHTED_ROLES, 1),
    "MatMul": OpInfo("matmul", ("input", "weight")),
    "Gemm": OpInfo("gemm", _WEIGHTED_ROLES, 1),
    "Clip": OpInfo("clip", ("input", "min", "max")),
    "PRelu": OpInfo("prelu", ("input", "slope")),
    "BatchNormalization": OpInfo("batchnorm", (*_NORM_ROLES, "mean", "variance")),
    "Split": OpInfo("split", ("input", "sizes")),
    "Slice": OpInfo("slice", ("input", "indices", "indices", "axis", "indices")),
    "Reshape": OpInfo("reshape", ("input", "shape")),
    "Squeeze": OpInfo("squeeze", ("input", "axis")),
    "Unsqueeze": OpInfo("unsqueeze", ("input", "axis")),
    "Expand": OpInfo("expand", ("input", "shape")),
    "Tile": OpInfo("tile", ("input", "repeats")),
    "Pad": OpInfo("pad", ("input", "padding", "value", "axis")),
    "Resize": OpInfo("resize", ("input", "region", "sizes")),
    "Upsample": OpInfo("resize", ("input", "sizes")),
    "CastLike": OpInfo("cast", ("input", "like")),
    "Where": OpInfo("where", ("condition", "input")),
    "TopK": OpInfo("top_k", ("input", "sizes")),
    "If": OpInfo("if", ("condition",)),
    "Loop": OpInfo("loop", ("count", "condition", "input")),
    "Constant": OpInfo("constant", ()),
    "Dropout": OpInfo("dropout", ("input", "ratio", "training_mode")),
    "QuantizeLinear": OpInfo("quantize", _QDQ_ROLES),
    "DequantizeLinear": OpInfo("dequantize", _QDQ_ROLES),
    "RandomNormal": OpInfo("random", ()),
    "RandomUniform": OpInfo("random", ()),
}

INTEGER_OPS = (
    *("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QGemm"),
    *("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "MatMulNBits", "GatherBlockQuantized"),
    *("MatMulInteger16", "QAttention", "QOrderedMatMul", "QEmbedLayerNormalization", "MatMulBnb4"),
)
"""Ops that compute on integers themselves, in addition to those called QLinear..."""

FUSED_OPS = {"com.microsoft": ("FusedConv", "FusedMatMul", "FusedGemm"), "com.microsoft.nchwc": ("Conv",)}
"""Ops by domain whose type without "Fused" is that of the product in them."""

MICROSOFT_DOMAIN_OPS = {
    "Gelu": OpInfo("gelu"),
    "QuickGelu": OpInfo("silu"),
    **{name: DEFAULT_DOMAIN_OPS[name] for name in ("QuantizeLinear", "DequantizeLinear")},
    "SkipLayerNormalization": OpInfo("layernorm", ("input", *_NORM_ROLES, "bias")),
    "SkipSimplifiedLayerNormalization": OpInfo("rmsnorm", ("input", *_NORM_ROLES[:2], "bias")),
    "GroupQueryAttention": OpInfo("attention", (*["input"] * 3, "state", "state", "other")),
    "MultiHeadAttention": OpInfo("attention", (*["input"] * 3, "bias", "other", "other", "state", "state", "other")),
    "Attention": OpInfo("attention", ("input", "weight", "bias", "other", "state", "other"), 1),
    "EmbedLayerNormalization": OpInfo(
        "embedding", ("indices", "indices", *["weight"] * 3, *_NORM_ROLES[1:], "other", "indices"), 0
    ),
    "CausalConvWithState": OpInfo("other", (*["input"] * 3, "state")),
    "LinearAttention": OpInfo("other", (*["input"] * 3, "state", "other")),
    "MoE": OpInfo("moe", ("input", "routing", *("weight", "bias") * 3), 1),
}


def classify_node(op_type: str, domain: str, facts: NodeFacts) -> OpInfo:
    """Return kind, roles and channel axis of a node of type `op_type` in `domain` ("" is the default one)."""
    if domain in {"", "com.microsoft"} and (op_type.startswith("QLinear") or op_type in INTEGER_OPS):
        return OpInfo("integer")
    if op_type in FUSED_OPS.get(domain, ()):
        info = classify_node(op_type.removeprefix("Fused"), "", facts)
        return info._replace(kind=f"{FUSED_PREFIX}{info.kind}", roles=(*info.roles, "input"))
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


def _classify_conv(info: OpInfo, facts: NodeFacts) -> OpInfo:
    weight = facts.shape(1)
    depthwise = weight is not None and len(weight) > 1 and weight[1] == 1 and _numeric_attribute(facts, "group", 1) > 1
    return info._replace(kind="depthwise_conv") if depthwise else info


def _classify_matmul(info: OpInfo, facts: NodeFacts) -> OpInfo:
    weight = facts.shape(1)
    return info._replace(channel_axis=len(weight) - 1) if weight is not None and len(weight) > 1 else info


def _classify_clip(info: OpInfo, facts: NodeFacts) -> OpInfo:
    low, high = _numeric_attribute(facts, "min", facts.scalar(1)), _numeric_attribute(facts, "max", facts.scalar(2))
    return info._replace(kind="relu6") if (low, high) == RELU6_BOUNDS else info


_REFINEMENTS: dict[str, Callable[[OpInfo, NodeFacts], OpInfo]] = {
    "Conv": _classify_conv,
    "MatMul": _classify_matmul,
    "Gemm": lambda info, facts: info._replace(channel_axis=0 if _numeric_attribute(facts, "transB", 0) else 1),
    "Clip": _classify_clip,
}
