"""Quantized weights in the forms that onnxruntime computes with fastest, and the family that writes them.

In the intermediate representation such a weight is a constant with a DequantizeLinear, like any other. Its op has
`Op.fused_attrs`. `fused_ops_writer` in `formats/onnx` writes it in one of three forms, and `fused_ops` reads these as a
pair:

* Packed: one op of com.microsoft, MatMulNBits, GatherBlockQuantized or QMoE, in place of the DequantizeLinear and its
  reader.
* Dynamic: a DynamicQuantizeMatMul, DynamicQuantizeLSTM or QAttention of com.microsoft. Its other inputs are quantized
  in each run, to uint8 with one range for all their values.
* Folded: Cast, Sub and Mul. onnxruntime computes them when it loads the model, but a DequantizeLinear in each run.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from graphquant.ir import MATRIX_PRODUCT_KINDS
from graphquant.numerics import IntType, QType
from graphquant.qdq.family import FusedForm
from graphquant.qdq.onnx_qdq import MICROSOFT_DOMAIN, OPSET_4_AND_16_BITS, TYPES_OF_4_BITS, OnnxFamily

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphquant.ir import Graph, Op, Shape, TensorRef, Use
    from graphquant.qdq.family import FamilyRequest, QDQSite

FOLDED_FORM: Literal["folded"] = "folded"
DYNAMIC_FORM: Literal["dynamic"] = "dynamic"
DYNAMIC_PRODUCT = "DynamicQuantizeMatMul"
DYNAMIC_LSTM = "DynamicQuantizeLSTM"
DYNAMIC_ATTENTION = "QAttention"
DYNAMIC_ATTENTION_ATTRS = frozenset({"num_heads", "unidirectional", "mask_filter_value", "scale"})
"""Attributes of an Attention of com.microsoft that a QAttention has too."""

BITS_OF_BYTES = 8

LAYER_WEIGHT_SLOTS = {"LSTM": (1, 2), "MoE": (2, 4, 6)}
"""Inputs with the weights of ops whose fused form has all of them quantized: matrices of gates or of experts."""

MATMUL_BLOCK_SIZES = frozenset({16, 32, 64, 128, 256})  # those that all releases from 1.22 on accept
MIN_GATHER_BLOCK_SIZE = 16  # of GatherBlockQuantized, which requires a power of two

# docs/decisions/0076-fused-ops.md has the measurements.
MAX_CACHED_ELEMENTS, MAX_CACHED_INT8_ELEMENTS = 1 << 20, 1 << 19
"""Largest sum of all matrices of products for which float is as fast with one row, because they stay in the processor's
cache; the smaller one is for level 4."""
MIN_MATRIX_ELEMENTS, MIN_MANY_ROWS_ELEMENTS = 1 << 15, 1 << 17
"""Smallest matrix that products read faster packed than as float, with one row, and at level 4 with any number."""

FLOAT_LEVEL_BITS = 4  # width of weights that products in float read fast; others take ten times as long
MIN_BYTE_BLOCK_SIZE = 64  # smallest blocks of bytes with which products of 128 rows are faster than in float

FLOAT_LEVEL: Literal[0] = 0
INT8_LEVEL: Literal[4] = 4
"""Values of `accuracy_level`: MatMulNBits computes in the type of its activations, or rounds them to int8."""


class PackedWeight(NamedTuple):
    """A constant weight in blocks, as far as the choice of the op that reads it depends on it."""

    type: QType  # the type of the quantized values
    axis: int | None  # the axis of the channels or blocks
    block: int | None  # number of elements along the axis that share one scale
    shape: Shape | None  # the static shape

    @property
    def bits(self) -> int:
        """Bits of an element in the packed weight: 2, 4 or 8; 0 if the type is not packed."""
        container = self.type.container if isinstance(self.type, IntType) else ""
        if container in {"int4", "uint4"}:
            return 2 if self.type.bits == 2 else 4  # noqa: PLR2004  # the width
        return BITS_OF_BYTES if container in {"int8", "uint8"} else 0


def fused_op_type(graph: Graph, consumer: Op, slot: int, weight: PackedWeight) -> str:
    """Return the op type that replaces the DequantizeLinear of a weight and its consumer, or ""."""
    shape, block = weight.shape, weight.block
    if consumer.kind == "moe":
        weights = {each: graph.slots(consumer.name)[each:][:1] for each in LAYER_WEIGHT_SLOTS[consumer.type]}
        shapes = [
            graph.output(tensor).shape for tensors in weights.values() for tensor in tensors if tensor is not None
        ]
        is_packed = all(_has_expert_blocks(weight._replace(shape=each)) for each in shapes)
        # QMoE always divides the weights of the experts by the sum of the chosen ones.
        is_normalized = consumer.numeric_attr("normalize_routing_weights", 0)
        has_fused_routing = is_normalized and not consumer.numeric_attr("use_sparse_mixer", 0)
        return "QMoE" if is_packed and slot in weights and has_fused_routing else ""
    if consumer.domain or shape is None or None in shape or not weight.bits:
        return ""
    if consumer.type == "Gather" and slot == 0 and consumer.numeric_attr("axis", 0) == 0:
        return "GatherBlockQuantized" if _has_row_blocks(weight, shape) else ""
    is_matrix = consumer.type in {"MatMul", "Gemm"} and slot == 1 and len(shape) == 2 and block in MATMUL_BLOCK_SIZES  # noqa: PLR2004  # rows and columns
    return "MatMulNBits" if is_matrix and weight.axis == _summed_axis(graph, consumer, shape) else ""


def _has_row_blocks(weight: PackedWeight, shape: Shape) -> bool:
    """Return True if GatherBlockQuantized reads a table: blocks along its last axis, or bytes with a scale per row."""
    if (block := weight.block) is None:
        return weight.axis == 0 and len(shape) == 2 and weight.bits == BITS_OF_BYTES  # noqa: PLR2004  # rows and columns
    is_block = block >= MIN_GATHER_BLOCK_SIZE and block & (block - 1) == 0 and weight.axis == len(shape) - 1
    return is_block and len(shape) > 1 and (weight.bits == 4 or (weight.bits == BITS_OF_BYTES and len(shape) == 2))  # noqa: PLR2004


def _has_expert_blocks(weight: PackedWeight) -> bool:
    """Return True if QMoE reads a weight (experts, rows, columns), which has whole blocks of columns."""
    shape, block = weight.shape or (), weight.block or 0
    is_split = len(shape) == 3 and None not in shape and weight.axis == 2  # noqa: PLR2004  # experts, rows and columns
    is_block = block >= MIN_GATHER_BLOCK_SIZE and block & (block - 1) == 0
    return is_split and is_block and (shape[2] or 0) % block == 0 and weight.bits in {FLOAT_LEVEL_BITS, BITS_OF_BYTES}


def is_matrix_transpose(op: Op) -> bool:
    """Return True if an op of an ONNX model transposes a matrix."""
    return op.kind == "transpose" and [*op.attrs.get("perm", (1, 0))] == [1, 0]


def dynamic_op_type(graph: Graph, consumer: Op, slot: int, weight: PackedWeight) -> str:
    """Return the op type that replaces the DequantizeLinear of bytes and its consumer, and rounds its input, or ""."""
    key, shape, axis = (consumer.domain, consumer.type), weight.shape or (None,), weight.axis
    if weight.bits != BITS_OF_BYTES or None in shape or slot not in LAYER_WEIGHT_SLOTS.get(consumer.type, (1,)):
        return ""
    if key == ("", "LSTM"):  # a weight (directions, gates, columns)
        has_scales = axis in {None, 1} if weight.block is None else (axis, (weight.block,)) == (2, shape[2:])
        return DYNAMIC_LSTM if len(shape) == 3 and has_scales and not consumer.numeric_attr("layout", 0) else ""  # noqa: PLR2004  # axes
    if weight.block is not None or len(shape) != 2:  # noqa: PLR2004  # rows and columns
        return ""
    if key == (MICROSOFT_DOMAIN, "Attention"):
        slots = graph.slots(consumer.name)
        is_plain = consumer.attrs.keys() <= DYNAMIC_ATTENTION_ATTRS and not any(slots[5:])  # summands of the scores
        return DYNAMIC_ATTENTION if is_plain and any(slots[2:3]) and axis in {None, 1} else ""  # with a bias
    summed_axis = _summed_axis(graph, consumer, shape) if key in {("", "MatMul"), ("", "Gemm")} else None
    return DYNAMIC_PRODUCT if summed_axis is not None and axis in {None, 1 - summed_axis} else ""


def _summed_axis(graph: Graph, consumer: Op, shape: Shape) -> int | None:
    """Return the weight's axis that a MatMul or Gemm sums over; None if no fused op computes such a Gemm."""
    if consumer.type == "MatMul":
        return 0
    is_transposed = bool(consumer.numeric_attr("transB", 0))
    bias = next(iter(graph.slots(consumer.name)[2:]), None)
    is_plain = (
        consumer.numeric_attr("alpha", 1) == consumer.numeric_attr("beta", 1) == 1
        and not consumer.numeric_attr("transA", 0)
        and (bias is None or graph.output(bias).shape == (shape[0 if is_transposed else 1],))
    )
    return int(is_transposed) if is_plain else None


def count_product_weights(graphs: Mapping[str, Graph]) -> int:
    """Return the number of elements of all constants that matrix products read as weights, also through a Transpose."""
    weights: dict[TensorRef, Shape | None] = {}
    for graph in graphs.values():
        for op in graph.ops():
            slots = graph.slots(op.name) if op.kind in MATRIX_PRODUCT_KINDS | {"moe"} else ()
            for tensor in [tensor for slot, tensor in enumerate(slots) if tensor and op.role(slot) == "weight"]:
                home = graphs[tensor.graph]
                source = home.slots(tensor.op)[0] if is_matrix_transpose(home.op(tensor.op)) else tensor
                if source is not None and graphs[source.graph].op(source.op).kind == "constant":
                    weights[source] = graphs[source.graph].output(source).shape
    return sum(math.prod(size or 0 for size in shape) for shape in weights.values() if shape)


class FusedOnnxFamily(OnnxFamily):
    """Weights of models for onnxruntime: packed for large matrices and for tables, folded elsewhere."""

    name = "onnx-fused"
    variant_of = OnnxFamily.name
    op_types = frozenset()  # its ops are read as pairs
    argument_names = frozenset({"form", "accuracy_level"})
    forms = ("packed", FOLDED_FORM, DYNAMIC_FORM)

    def add_ops(self, graph: Graph, site: QDQSite) -> TensorRef:
        """Add the ops of the standard form, and mark them for the form of the site if integers store the weight."""
        output = super().add_ops(graph, site)
        if site.read_value is not None:
            weight = PackedWeight(type=site.params.type, axis=None, block=None, shape=None)
            level = site.args.accuracy_level or FLOAT_LEVEL
            attrs = {"form": site.args.form, "accuracy_level": level, "bits": weight.bits}
            graph.replace_op(replace(graph.op(output.op), fused_attrs=attrs))
        return output

    def minimum_opset(self, request: FamilyRequest) -> int:
        """Return the lowest opset that supports a request; a folded weight of 4 bits needs a Cast of these."""
        is_cast = request.args.form == FOLDED_FORM and request.type.container in TYPES_OF_4_BITS
        return max(super().minimum_opset(request), OPSET_4_AND_16_BITS if is_cast else 0)

    def fused_forms(
        self, graph: Graph, use: Use, request: FamilyRequest, model_weights: int | None = None
    ) -> list[FusedForm]:
        """Return the forms of a constant weight for a use, the preferred one first."""
        if model_weights is None:
            model_weights = count_product_weights(graph.graphs)
        weight = PackedWeight(type=request.type, axis=request.axis, block=request.block, shape=request.shape)
        op_type = fused_op_type(graph, graph.op(use.op), use.slot, weight)
        is_table, args = op_type == "GatherBlockQuantized", request.args
        default_level = INT8_LEVEL if weight.bits != FLOAT_LEVEL_BITS and request.symmetric else FLOAT_LEVEL
        level = default_level if args.accuracy_level is None else args.accuracy_level
        if op_type == "QMoE" and not request.symmetric:
            level = FLOAT_LEVEL
        is_fast = weight.bits == FLOAT_LEVEL_BITS or (
            weight.bits == BITS_OF_BYTES and level == INT8_LEVEL and (request.block or 0) >= MIN_BYTE_BLOCK_SIZE
        )
        elements = math.prod(size or 0 for size in request.shape or ())
        # At level 0 two rows or more take longer packed than as float. Unknown sizes may be 1.
        source = graph.slots(use.op)[0] if op_type == "MatMulNBits" else None
        rows = math.prod(size or 1 for size in (graph.output(source).shape or ())[:-1]) if source is not None else 1
        max_cached, min_for_rows = MAX_CACHED_ELEMENTS, math.inf
        if level == INT8_LEVEL:
            max_cached, min_for_rows = MAX_CACHED_INT8_ELEMENTS, MIN_MANY_ROWS_ELEMENTS
        is_large = model_weights > max_cached and elements >= (MIN_MATRIX_ELEMENTS if rows == 1 else min_for_rows)
        is_faster = is_fast and is_large  # beside large products, the time of a table is small
        # Some releases compute level 4 wrong with zero points (https://github.com/microsoft/onnxruntime/issues/29853).
        levels = [None] if is_table else [level, FLOAT_LEVEL][: 1 + (is_fast and not request.symmetric)]
        form = FusedForm(op_type=op_type, bits=weight.bits, args=args, has_zero_points=not request.symmetric)
        packed = [form._replace(args=replace(args, form="packed", accuracy_level=each)) for each in levels if op_type]
        dynamic_args = replace(args, form=DYNAMIC_FORM, accuracy_level=None)
        dynamic_type = dynamic_op_type(graph, graph.op(use.op), use.slot, weight)
        if not request.symmetric and dynamic_type == DYNAMIC_LSTM:  # it has no zero points
            dynamic_type = ""
        dynamic = [FusedForm(op_type=dynamic_type, bits=weight.bits, args=dynamic_args)]
        dynamic = dynamic if dynamic_type and request.dtype == "float32" else []
        # onnxruntime has no kernels for float16 that would compute the weight when it loads the model.
        is_foldable = request.is_parameter and request.dtype == "float32" and None not in (request.shape or (None,))
        folded_args = replace(args, form=FOLDED_FORM, accuracy_level=None)
        folded = [FusedForm(op_type="", bits=weight.bits, args=folded_args)] if is_foldable and weight.bits else []
        if args.form is not None:
            return {"packed": packed, DYNAMIC_FORM: [*dynamic, *folded], FOLDED_FORM: folded}[args.form]
        return [*packed, *folded] if is_faster else [*folded, *packed]
