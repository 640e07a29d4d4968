"""Which ONNX ops keep the rows of their inputs apart, and under which conditions.

A rule is given a node of which at least one input has rows, and tells whether its first output has rows too. What it
need not ask is whether the output's axis 0 grows as it should: shapes are checked afterwards, for all ops alike. A size
may go only where it decides on nothing but the output's shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from graphquant.ir import Op, Shape

FIXED: Final = "fixed"
SIZE: Final = "size"
ROWS: Final = "rows"

OPSET_SOFTMAX: Final = 13
"""First opset whose Softmax is over the last axis by default."""

OPSET_REGION: Final = 11
"""First opset whose Resize takes a region between the input and the scales."""

MATRIX: Final = 2
"""Rank of a matrix."""

_MODE: Final = "coordinate_transformation_mode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a rule may ask about an op; lists have an entry for each input slot.

    Attributes:
        op: The op.
        opset: Opset of the default domain.
        kinds: FIXED, SIZE or ROWS; "" for an empty slot.
        shapes: Static shape for one row, None if unknown.
        values: Gives the value of a constant, None for all else.
        out: Static shape of the first output for one row.
    """

    op: Op
    opset: int
    kinds: Sequence[str]
    shapes: Sequence[Shape | None]
    values: Sequence[Callable[[], np.ndarray[Any, Any]] | None]
    out: Shape

    def kind(self, slot: int) -> str:
        """What input `slot` is."""
        return self.kinds[slot] if slot < len(self.kinds) else ""

    def rank(self, slot: int = 0) -> int:
        """Rank of input `slot`, 0 if it is not known."""
        shape = self.shapes[slot] if slot < len(self.shapes) else None
        return len(shape) if shape is not None else 0

    def numbers(self, slot: int, attr: str) -> list[Any] | None:
        """The numbers that a constant input or, in older opsets, an attribute gives; None if neither does."""
        if slot < len(self.kinds) and self.kinds[slot]:
            value = self.values[slot]
            found: Any = None if value is None else value().reshape(-1).tolist()
        else:
            found = self.op.attrs.get(attr)
            found = [found] if isinstance(found, int | float) else found
        return None if found is None else list(found)

    def others_fixed(self, *free: int) -> bool:
        """Whether input 0 has rows and all others are fixed, but for those in `free`, which may be sizes."""
        return self.kind(0) == ROWS and all(
            kind in {"", FIXED} or (kind == SIZE and slot in free) for slot, kind in enumerate(self.kinds) if slot
        )


def _plain(node: Node) -> bool:
    """Input 0 row by row, with fixed parameters."""
    return node.others_fixed()


def _single(node: Node) -> bool:
    """As `_plain`, with no second output: that would number elements across rows, or mean training."""
    return node.others_fixed() and not any(output.name for output in node.op.outputs[1:])


def _broadcast(node: Node) -> bool:
    """Elementwise over inputs whose axes 0 meet."""
    rank = len(node.out)
    rows = [shape for shape, kind in zip(node.shapes, node.kinds, strict=True) if kind == ROWS]
    fixed = [shape for shape, kind in zip(node.shapes, node.kinds, strict=True) if kind == FIXED]
    return (
        SIZE not in node.kinds
        and all(shape is not None and len(shape) == rank and shape[0] == node.out[0] for shape in rows)
        and all(shape is not None and (len(shape) < rank or shape[0] == 1) for shape in fixed)
    )


def _along(default: int, attr: str = "axis") -> Callable[[Node], bool]:
    """A rule for ops that mix elements along one axis."""

    def rule(node: Node) -> bool:
        return node.others_fixed() and _beside(node, [int(node.op.number(attr, default))])

    return rule


def _beside(node: Node, axes: Sequence[int] | None, rank: int = 0) -> bool:
    """Whether `axes`, which may count from the end, are known and leave out axis 0."""
    rank = rank or node.rank()
    return bool(axes) and rank > 0 and all(0 < (axis + rank if axis < 0 else axis) < rank for axis in axes or ())


def _softmax(node: Node) -> bool:
    return _along(-1 if node.opset >= OPSET_SOFTMAX else 1)(node)


def _reduce(node: Node) -> bool:
    return node.others_fixed() and _beside(node, node.numbers(1, "axes"))


def _dropout(node: Node) -> bool:
    return node.others_fixed() and not node.kind(2)


def _batchnorm(node: Node) -> bool:
    return _single(node) and not node.op.number("training_mode", 0)


def _concat(node: Node) -> bool:
    return set(node.kinds) == {ROWS} and _beside(node, [int(node.op.number("axis", 0))])


def _gather(node: Node) -> bool:
    axis = int(node.op.number("axis", 0))
    if node.kinds == [FIXED, ROWS]:  # rows of indices into a table
        return axis == 0 and node.rank(1) > 0
    return node.others_fixed() and _beside(node, [axis])


def _slice(node: Node) -> bool:
    return node.others_fixed() and _beside(node, node.numbers(3, "axes"))


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


def _tile(node: Node) -> bool:
    repeats = node.numbers(1, "repeats")
    return node.others_fixed() and bool(repeats) and (repeats or [0])[0] == 1


def _resize(node: Node) -> bool:
    attrs = node.op.attrs
    if {"axes", "keep_aspect_ratio_policy"} & set(attrs) or attrs.get(_MODE) == "tf_crop_and_resize":
        return False
    old = node.op.type == "Upsample" or node.opset < OPSET_REGION
    scales = node.numbers(1 if old else 2, "scales")
    sized = node.kind(3) != "" and node.shapes[0] is not None and node.shapes[0][0] == node.out[0]
    return node.others_fixed(3) and (sized or (bool(scales) and (scales or [0])[0] == 1))


def _expand(node: Node) -> bool:
    shape = node.shapes[0]
    if node.kind(1) == ROWS or shape is None:
        return False
    if node.kind(0) == ROWS:
        return len(shape) == len(node.out) and shape[0] == node.out[0]
    return len(shape) < len(node.out) or shape[0] == 1


def _filled(node: Node) -> bool:
    return node.kinds == [SIZE]


def _reshape(node: Node) -> bool:
    """The elements of a row stay together if axis 0 of both counts rows, which asks for all sizes to be known."""
    known = node.shapes[0] is not None and None not in (*node.shapes[0], *node.out)
    return node.others_fixed(1) and known


def _flatten(node: Node) -> bool:
    return node.others_fixed() and _beside(node, [int(node.op.number("axis", 1))])


def _transpose(node: Node) -> bool:
    perm = node.op.attrs.get("perm")
    return node.others_fixed() and perm is not None and list(perm)[:1] == [0]


def _squeeze(node: Node) -> bool:
    return node.others_fixed() and _beside(node, node.numbers(1, "axes"))


def _unsqueeze(node: Node) -> bool:
    return node.others_fixed() and _beside(node, node.numbers(1, "axes"), len(node.out))


def _matmul(node: Node) -> bool:
    """A product whose axis 0 is not summed over: rows times a matrix, or batches of matrices."""
    first, second = node.shapes
    if first is None or second is None:
        return False
    if node.kinds == [ROWS, FIXED]:
        batched = len(second) > MATRIX and len(second) == len(node.out)
        return len(first) == len(node.out) >= MATRIX and (not batched or second[0] == 1)
    batches = [len(shape) > MATRIX for shape, kind in zip((first, second), node.kinds, strict=True) if kind == ROWS]
    return all(batches) and _broadcast(node)


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
    return scale in {(), (1,)} or _beside(node, [int(node.op.number("axis", 1))])


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

RULES: Final[Mapping[str, Callable[[Node], bool]]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _plain),
    **dict.fromkeys(_BROADCASTING.split(), _broadcast),
    **dict.fromkeys((f"Reduce{name}" for name in _REDUCTIONS.split()), _reduce),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax),
    **dict.fromkeys(("ArgMax", "ArgMin", "Split"), _along(0)),
    **dict.fromkeys(("TopK", "LayerNormalization", "RMSNormalization", "LpNormalization"), _along(-1)),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantize),
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    "BatchNormalization": _batchnorm,
    "Concat": _concat,
    "ConstantOfShape": _filled,
    "Dropout": _dropout,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "MaxPool": _single,
    "Pad": _pad,
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""Rules by type of op."""

FROM_SIZES: Final = frozenset({"ConstantOfShape", "Expand"})
"""Ops that make rows, all of them alike, out of sizes and what is fixed."""

SIZES_ONLY: Final = frozenset(
    {"Add", "Cast", "Concat", "Div", "Gather", "Identity", "Mul", "Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze"}
)
"""Ops that make sizes of sizes and what is fixed."""
