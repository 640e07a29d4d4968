"""Which ONNX ops keep the rows of their inputs apart, and under which conditions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from graphquant.formats.rows import (
    FIXED,
    MATRIX,
    ROWS,
    SIZE,
    Node,
    Rule,
    Table,
    beside,
    broadcast,
    expanded,
    plain,
    product,
    reduced,
    reshaped,
    tiled,
    unsqueezed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OPSET_SOFTMAX: Final = 13
"""First opset whose Softmax is over the last axis by default."""

OPSET_REGION: Final = 11
"""First opset whose Resize takes a region between the input and the scales."""

_MODE: Final = "coordinate_transformation_mode"


def _single(node: Node) -> bool:
    """As `plain`, with no second output: that would number elements across rows, or mean training."""
    return node.others_fixed() and not any(output.name for output in node.op.outputs[1:])


def _along(default: int, attr: str = "axis") -> Callable[[Node], bool]:
    """A rule for ops that mix elements along one axis."""

    def rule(node: Node) -> bool:
        return node.others_fixed() and beside(node, [int(node.op.number(attr, default))])

    return rule


def _softmax(node: Node) -> bool:
    return _along(-1 if node.opset >= OPSET_SOFTMAX else 1)(node)


def _dropout(node: Node) -> bool:
    return node.others_fixed() and not node.kind(2)


def _batchnorm(node: Node) -> bool:
    return _single(node) and not node.op.number("training_mode", 0)


def _concat(node: Node) -> bool:
    return set(node.kinds) == {ROWS} and beside(node, [int(node.op.number("axis", 0))])


def _gather(node: Node) -> bool:
    axis = int(node.op.number("axis", 0))
    if node.kinds == [FIXED, ROWS]:  # rows of indices into a table
        return axis == 0 and node.rank(1) > 0
    return node.others_fixed() and beside(node, [axis])


def _slice(node: Node) -> bool:
    return node.others_fixed() and beside(node, node.numbers(3, "axes"))


def _pad(node: Node) -> bool:
    pads = node.numbers(1, "pads")
    rank = node.rank()
    return (
        node.others_fixed()
        and not node.kind(3)
        and pads is not None
        and len(pads) == 2 * rank > 0
        and pads[0] == pads[rank] == 0
    )


def _resize(node: Node) -> bool:
    attrs = node.op.attrs
    if {"axes", "keep_aspect_ratio_policy"} & set(attrs) or attrs.get(_MODE) == "tf_crop_and_resize":
        return False
    old = node.op.type == "Upsample" or node.opset < OPSET_REGION
    scales = node.numbers(1 if old else 2, "scales")
    sized = node.kind(3) != "" and node.shapes[0] is not None and node.shapes[0][0] == node.out[0]
    return node.others_fixed(3) and (sized or (bool(scales) and (scales or [0])[0] == 1))


def _filled(node: Node) -> bool:
    return node.kinds == [SIZE]


def _flatten(node: Node) -> bool:
    return node.others_fixed() and beside(node, [int(node.op.number("axis", 1))])


def _transpose(node: Node) -> bool:
    perm = node.op.attrs.get("perm")
    return node.others_fixed() and perm is not None and list(perm)[:1] == [0]


def _squeeze(node: Node) -> bool:
    return node.others_fixed() and beside(node, node.numbers(1, "axes"))


def _gemm(node: Node) -> bool:
    if node.kinds[:2] != [ROWS, FIXED] or node.op.number("transA", 0):
        return False
    kind = node.kind(2)
    shape = node.shapes[2] if kind else ()
    if shape is None:
        return False
    if kind == ROWS:
        return len(shape) == MATRIX and shape[0] == node.out[0]
    return kind in {"", FIXED} and (len(shape) < MATRIX or shape[0] == 1)


def _quantize(node: Node) -> bool:
    scale = node.shapes[1] if len(node.shapes) > 1 else None
    if not node.others_fixed() or scale is None or len(scale) > 1:
        return False
    return scale in {(), (1,)} or beside(node, [int(node.op.number("axis", 1))])


_ELEMENTWISE: Final = """
    Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast Ceil Celu Clip Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid
    HardSwish Identity IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh
    Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu
    Conv ConvInteger ConvTranspose QLinearConv DepthToSpace SpaceToDepth
    AveragePool GlobalAveragePool GlobalMaxPool GlobalLpPool LpPool
    GroupNormalization InstanceNormalization LRN
"""

_BROADCASTING: Final = """
    Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod
    Mul Or PRelu Pow Sub Sum Where Xor
"""

_REDUCTIONS: Final = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare"

_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), plain),
    **dict.fromkeys(_BROADCASTING.split(), broadcast),
    **dict.fromkeys((f"Reduce{name}" for name in _REDUCTIONS.split()), reduced),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax),
    **dict.fromkeys(("ArgMax", "ArgMin", "Split"), _along(0)),
    **dict.fromkeys(("TopK", "LayerNormalization", "RMSNormalization", "LpNormalization"), _along(-1)),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantize),
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    "BatchNormalization": _batchnorm,
    "Concat": _concat,
    "ConstantOfShape": _filled,
    "Dropout": _dropout,
    "Expand": expanded,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gemm": _gemm,
    "MatMul": product,
    "MaxPool": _single,
    "Pad": _pad,
    "Reshape": reshaped,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Tile": tiled,
    "Transpose": _transpose,
    "Unsqueeze": unsqueezed,
}

TABLE: Final = Table(
    rules=_RULES,
    shapes=frozenset({"Shape"}),
    sizes_only=frozenset(
        {"Add", "Cast", "Concat", "Div", "Gather", "Identity", "Mul", "Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze"}
    ),
    from_sizes=frozenset({"ConstantOfShape", "Expand"}),
    domains=frozenset({"", "ai.onnx"}),
)
