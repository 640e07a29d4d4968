"""Batch independence of ONNX models: shapes for several numbers of rows, and the row rules of ONNX ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from onnx import ModelProto

from graphquant.formats.batch_independence import (
    FIXED,
    MATRIX_RANK,
    ROW_COUNTS,
    ROWS,
    SIZE,
    GraphFacts,
    RowNode,
    RowRule,
    RowRuleTable,
    broadcast_keeps_rows,
    excludes_batch_axis,
    expand_keeps_rows,
    keeps_rows,
    matmul_keeps_rows,
    reduction_keeps_rows,
    reshape_keeps_rows,
    rows_are_independent,
    tile_keeps_rows,
    unsqueeze_keeps_rows,
)
from graphquant.formats.onnx.shape_inference import add_inferred_types, strip_weight_data
from graphquant.formats.onnx.tensors import DEFAULT_DOMAINS, type_and_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphquant.formats.onnx.emitter import Emission
    from graphquant.ir import Model, Shape, TensorRef


LAST_AXIS_SOFTMAX_OPSET: Final = 13
"""First opset whose Softmax uses the last axis by default."""

RESIZE_REGION_OPSET: Final = 11
"""First opset whose Resize has a region input between the data and the scales."""

_COORDINATE_MODE: Final = "coordinate_transformation_mode"


def _single_output_keeps_rows(node: RowNode) -> bool:
    """Accept ops like `keeps_rows`; a second output would number elements across rows, or mean training."""
    return node.only_first_has_rows() and not any(output.name for output in node.op.outputs[1:])


def _axis_op_keeps_rows(default: int, attr: str = "axis") -> Callable[[RowNode], bool]:
    """Return a rule for ops that mix elements along one axis."""

    def rule(node: RowNode) -> bool:
        return node.only_first_has_rows() and excludes_batch_axis(node, [int(node.op.numeric_attr(attr, default))])

    return rule


def _softmax_keeps_rows(node: RowNode) -> bool:
    return _axis_op_keeps_rows(-1 if node.opset >= LAST_AXIS_SOFTMAX_OPSET else 1)(node)


def _dropout_keeps_rows(node: RowNode) -> bool:
    return node.only_first_has_rows() and not node.kind(2)


def _onnx_batchnorm_keeps_rows(node: RowNode) -> bool:
    return _single_output_keeps_rows(node) and not node.op.numeric_attr("training_mode", 0)


def _onnx_concat_keeps_rows(node: RowNode) -> bool:
    return set(node.kinds) == {ROWS} and excludes_batch_axis(node, [int(node.op.numeric_attr("axis", 0))])


def _onnx_gather_keeps_rows(node: RowNode) -> bool:
    axis = int(node.op.numeric_attr("axis", 0))
    if node.kinds == [FIXED, ROWS]:  # lookup of rows of indices in a table
        return axis == 0 and node.rank(1) > 0
    return node.only_first_has_rows() and excludes_batch_axis(node, [axis])


def _onnx_slice_keeps_rows(node: RowNode) -> bool:
    return node.only_first_has_rows() and excludes_batch_axis(node, node.numbers(3, "axes"))


def _onnx_pad_keeps_rows(node: RowNode) -> bool:
    pads = node.numbers(1, "pads")
    rank = node.rank()
    if not pads or len(pads) != 2 * rank or node.kind(3):
        return False
    return node.only_first_has_rows() and pads[0] == pads[rank] == 0


def _onnx_resize_keeps_rows(node: RowNode) -> bool:
    attrs = node.op.attrs
    if {"axes", "keep_aspect_ratio_policy"} & set(attrs) or attrs.get(_COORDINATE_MODE) == "tf_crop_and_resize":
        return False
    without_region = node.op.type == "Upsample" or node.opset < RESIZE_REGION_OPSET
    scales = node.numbers(1 if without_region else 2, "scales")
    keeps_batch_size = node.kind(3) != "" and node.shapes[0] is not None and node.shapes[0][0] == node.output_shape[0]
    return node.only_first_has_rows(3) and (keeps_batch_size or (bool(scales) and (scales or [0])[0] == 1))


def _constant_of_shape_has_rows(node: RowNode) -> bool:
    return node.kinds == [SIZE]


def _flatten_keeps_rows(node: RowNode) -> bool:
    return node.only_first_has_rows() and excludes_batch_axis(node, [int(node.op.numeric_attr("axis", 1))])


def _onnx_transpose_keeps_rows(node: RowNode) -> bool:
    perm = node.op.attrs.get("perm")
    return node.only_first_has_rows() and perm is not None and list(perm)[:1] == [0]


def _onnx_squeeze_keeps_rows(node: RowNode) -> bool:
    return node.only_first_has_rows() and excludes_batch_axis(node, node.numbers(1, "axes"))


def _gemm_keeps_rows(node: RowNode) -> bool:
    if node.kinds[:2] != [ROWS, FIXED] or node.op.numeric_attr("transA", 0):
        return False
    kind = node.kind(2)
    shape = node.shapes[2] if kind else ()
    if shape is None:
        return False
    if kind == ROWS:
        return len(shape) == MATRIX_RANK and shape[0] == node.output_shape[0]
    return kind in {"", FIXED} and (len(shape) < MATRIX_RANK or shape[0] == 1)


def _qdq_keeps_rows(node: RowNode) -> bool:
    scale = node.shapes[1] if len(node.shapes) > 1 else None
    if not node.only_first_has_rows() or scale is None or len(scale) > 1:
        return False
    return scale in {(), (1,)} or excludes_batch_axis(node, [int(node.op.numeric_attr("axis", 1))])


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

_ROW_RULES: Final[Mapping[str, RowRule]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), keeps_rows),
    **dict.fromkeys(_BROADCASTING.split(), broadcast_keeps_rows),
    **dict.fromkeys((f"Reduce{name}" for name in _REDUCTIONS.split()), reduction_keeps_rows),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax_keeps_rows),
    **dict.fromkeys(("ArgMax", "ArgMin", "Split"), _axis_op_keeps_rows(0)),
    **dict.fromkeys(("TopK", "LayerNormalization", "RMSNormalization", "LpNormalization"), _axis_op_keeps_rows(-1)),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _qdq_keeps_rows),
    **dict.fromkeys(("Resize", "Upsample"), _onnx_resize_keeps_rows),
    "BatchNormalization": _onnx_batchnorm_keeps_rows,
    "Concat": _onnx_concat_keeps_rows,
    "ConstantOfShape": _constant_of_shape_has_rows,
    "Dropout": _dropout_keeps_rows,
    "Expand": expand_keeps_rows,
    "Flatten": _flatten_keeps_rows,
    "Gather": _onnx_gather_keeps_rows,
    "Gemm": _gemm_keeps_rows,
    "MatMul": matmul_keeps_rows,
    "MaxPool": _single_output_keeps_rows,
    "Pad": _onnx_pad_keeps_rows,
    "Reshape": reshape_keeps_rows,
    "Slice": _onnx_slice_keeps_rows,
    "Squeeze": _onnx_squeeze_keeps_rows,
    "Tile": tile_keeps_rows,
    "Transpose": _onnx_transpose_keeps_rows,
    "Unsqueeze": unsqueeze_keeps_rows,
}

ONNX_ROW_RULES: Final = RowRuleTable(
    rules=_ROW_RULES,
    shape_ops=frozenset({"Shape"}),
    size_ops=frozenset(
        {"Add", "Cast", "Concat", "Div", "Gather", "Identity", "Mul", "Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze"}
    ),
    fill_ops=frozenset({"ConstantOfShape", "Expand"}),
    domains=DEFAULT_DOMAINS,
)


NUMPY_BROADCAST_OPSET: Final = 7
"""First opset whose ops broadcast as numpy does, and whose BatchNormalization is in inference mode by default."""


def is_batch_independent(model: Model, emission: Emission, inputs: Sequence[str]) -> bool:
    """Return True if samples may be concatenated along axis 0 of all `inputs` without changing any sample's result."""
    input_infos = [info for info in emission.message.graph.input if info.name in set(inputs)]
    if (
        len(model.graphs) > 1
        or not input_infos
        or model.opset < NUMPY_BROADCAST_OPSET
        or not all(map(_has_open_batch_axis, input_infos))
    ):
        return False
    if len(input_infos) > 1 and (
        len(set(map(_batch_axis_name, input_infos))) > 1 or not _batch_axis_name(input_infos[0])
    ):
        return False  # the inputs may have different numbers of rows
    weightless = strip_weight_data(emission.message, model.source.folder)
    shapes = [_shapes_for_row_count(weightless, frozenset(inputs), count) for count in ROW_COUNTS]

    def shape_of(tensor: TensorRef, count_index: int) -> Shape | None:
        inferred_shape = shapes[count_index].get(emission.value_name(model, tensor))
        declared_shape: Shape | None = model.output(tensor).shape if model.op(tensor).kind == "constant" else None
        return declared_shape if inferred_shape is None else inferred_shape

    facts = GraphFacts(
        inputs=frozenset(inputs),
        shape_of=shape_of,
        value_of=lambda tensor: model.op(tensor).read_value,
        opset=model.opset,
    )
    return rows_are_independent(model.main, facts, ONNX_ROW_RULES)


def _has_open_batch_axis(info: Any) -> bool:
    """Return True if the first dimension of an input is not fixed."""
    shape = type_and_shape(info.type)[1]
    return bool(shape) and shape is not None and shape[0] is None


def _batch_axis_name(info: Any) -> str:
    """Return the name of the first dimension of an input."""
    return str(info.type.tensor_type.shape.dim[0].dim_param)


def _shapes_for_row_count(weightless: Any, inputs: frozenset[str], row_count: int) -> dict[str, Shape | None]:
    """Return static shapes by value name, for `row_count` rows in each of `inputs`; `weightless` has no weight data."""
    message = ModelProto()
    message.CopyFrom(weightless)
    del message.graph.value_info[:]
    for info in message.graph.output:
        info.type.tensor_type.ClearField("shape")
    for info in message.graph.input:
        if info.name in inputs:
            info.type.tensor_type.shape.dim[0].dim_value = row_count
    graph = add_inferred_types(message).graph
    return {info.name: type_and_shape(info.type)[1] for info in (*graph.input, *graph.value_info, *graph.output)}
