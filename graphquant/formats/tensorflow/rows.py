"""Which TensorFlow ops keep the rows of their inputs apart, and under which conditions."""

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

__all__ = ["TABLE"]


def _last(node: Node) -> bool:
    return node.others_fixed() and beside(node, [-1])


def _batchnorm(node: Node) -> bool:
    return node.others_fixed() and not node.op.attrs.get("is_training", True)


def _range_given(node: Node) -> bool:
    """Without a given range it is taken from all rows."""
    return node.others_fixed() and bool(node.op.attrs.get("range_given", node.op.type.endswith("V3")))


def _concat(axis: int) -> Callable[[Node], bool]:
    """A rule for ops that join rows along an axis, which is that input."""

    def rule(node: Node) -> bool:
        place = axis % len(node.kinds)
        joined = [kind for slot, kind in enumerate(node.kinds) if slot != place]
        return set(joined) == {ROWS} and beside(node, node.numbers(place, ""), len(node.out))

    return rule


def _pack(node: Node) -> bool:
    return set(node.kinds) == {ROWS} and beside(node, [int(node.op.number("axis", 0))], len(node.out))


def _unpack(node: Node) -> bool:
    return node.others_fixed() and beside(node, [int(node.op.number("axis", 0))])


def _split(node: Node) -> bool:
    return node.kinds == [FIXED, ROWS] and beside(node, node.numbers(0, ""), node.rank(1))


def _split_by_sizes(node: Node) -> bool:
    return node.others_fixed() and beside(node, node.numbers(2, ""))


def _slice(node: Node) -> bool:
    begin, size = node.numbers(1, ""), node.numbers(2, "")
    return node.others_fixed() and bool(begin) and bool(size) and (begin or [1])[0] == 0 and (size or [0])[0] == -1


def _strided_slice(node: Node) -> bool:
    """Axis 0 is taken whole, as a range without ends or under an ellipsis in front."""
    masks = {name: int(node.op.number(f"{name}_mask", 0)) for name in ("begin", "end", "ellipsis", "new_axis")}
    strides = node.numbers(3, "")
    if not node.others_fixed() or not strides or masks["new_axis"]:
        return False
    if masks["ellipsis"] & 1:
        return len(strides) - 1 < node.rank()
    dropped = int(node.op.number("shrink_axis_mask", 0)) & 1
    return bool(masks["begin"] & masks["end"] & 1) and not dropped and strides[0] == 1


def _gather(node: Node) -> bool:
    axes = node.numbers(2, "") if len(node.kinds) > MATRIX else [0]
    if node.op.number("batch_dims", 0) or not axes:
        return False
    if node.kinds[:2] == [FIXED, ROWS]:  # rows of indices into a table
        return axes[0] == 0 and node.rank(1) > 0
    return node.others_fixed() and beside(node, axes)


def _squeeze(node: Node) -> bool:
    axes = node.op.attrs.get("squeeze_dims")
    return node.others_fixed() and isinstance(axes, list | tuple) and beside(node, [int(axis) for axis in axes])


def _transpose(node: Node) -> bool:
    return node.others_fixed() and (node.numbers(1, "") or [])[:1] == [0]


def _pad(node: Node) -> bool:
    return node.others_fixed() and (node.numbers(1, "") or [])[:2] == [0, 0]


def _matmul(node: Node) -> bool:
    return node.kinds == [ROWS, FIXED] and not node.op.attrs.get("transpose_a", False)


def _batch_matmul(node: Node) -> bool:
    turned = [slot for slot, name in enumerate(("adj_x", "adj_y")) if node.op.attrs.get(name, False)]
    flat = any(node.kind(slot) == ROWS and node.rank(slot) <= MATRIX for slot in turned)
    return not flat and product(node)


def _conv_transpose(node: Node) -> bool:
    return node.kind(0) in {FIXED, SIZE} and node.kinds[1:] == [FIXED, ROWS]


def _resize(node: Node) -> bool:
    return node.others_fixed(1)


def _fill(node: Node) -> bool:
    return node.kinds == [SIZE, FIXED]


_PLAIN: Final = """
    Abs Acos Acosh Asin Asinh Atan Atanh Cast Ceil CheckNumerics ClipByValue Cos Cosh Elu Erf Erfc Exp Expm1 Floor
    Identity Inv IsFinite IsInf IsNan LeakyRelu Log Log1p LogicalNot Neg OnesLike PreventGradient Reciprocal Relu Relu6
    Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Sqrt Square StopGradient Tan Tanh ZerosLike
    AvgPool AvgPool3D BiasAdd BiasAddV1 Conv2D Conv3D DepthToSpace DepthwiseConv2dNative LRN MaxPool MaxPool3D
    MaxPoolV2 SpaceToDepth
    FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel
"""

_BROADCASTING: Final = """
    Add AddN AddV2 Atan2 Div DivNoNan Equal FloorDiv FloorMod Greater GreaterEqual Less LessEqual LogicalAnd LogicalOr
    Maximum Minimum Mod Mul MulNoNan NotEqual Pow RealDiv SelectV2 SquaredDifference Sub Xdivy Xlogy
"""

_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(_PLAIN.split(), plain),
    **dict.fromkeys(_BROADCASTING.split(), broadcast),
    **dict.fromkeys(("All", "Any", "ArgMax", "ArgMin", "Cumsum", "Max", "Mean", "Min", "Prod", "Sum"), reduced),
    **dict.fromkeys(("LogSoftmax", "Softmax", "TopK", "TopKV2"), _last),
    **dict.fromkeys(("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"), _batchnorm),
    **dict.fromkeys((f"QuantizeAndDequantizeV{version}" for version in (2, 3, 4)), _range_given),
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _batch_matmul),
    **dict.fromkeys(("Gather", "GatherV2", "ResourceGather"), _gather),
    **dict.fromkeys(("MirrorPad", "Pad", "PadV2"), _pad),
    **dict.fromkeys(("ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor"), _resize),
    "BroadcastTo": expanded,
    "Concat": _concat(0),
    "ConcatV2": _concat(-1),
    "Conv2DBackpropInput": _conv_transpose,
    "ExpandDims": unsqueezed,
    "Fill": _fill,
    "MatMul": _matmul,
    "Pack": _pack,
    "Reshape": reshaped,
    "Slice": _slice,
    "Split": _split,
    "SplitV": _split_by_sizes,
    "Squeeze": _squeeze,
    "StridedSlice": _strided_slice,
    "Tile": tiled,
    "Transpose": _transpose,
    "Unpack": _unpack,
}

_SIZES_ONLY: Final = """
    Add AddV2 Cast ConcatV2 ExpandDims FloorDiv GatherV2 Identity Maximum Minimum Mul Pack Prod Reshape Slice Squeeze
    StridedSlice Sub
"""

TABLE: Final = Table(
    rules=_RULES,
    shapes=frozenset({"Shape", "Size"}),
    sizes_only=frozenset(_SIZES_ONLY.split()),
    from_sizes=frozenset({"BroadcastTo", "Fill"}),
)
