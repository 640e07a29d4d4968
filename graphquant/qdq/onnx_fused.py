"""Weights that onnxruntime reads in packed blocks: the ops of com.microsoft that take them, and the family for them.

In the intermediate representation such a weight is a constant with a DequantizeLinear, like any other. Its op has
`Op.fused_attrs`, and `graphquant.formats.onnx.fused_ops` writes it and its reader as one op, and reads that op as two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphquant.numerics import IntType, QType
from graphquant.qdq.onnx_qdq import OnnxFamily

if TYPE_CHECKING:
    from graphquant.ir import Graph, Op, Shape, TensorRef, Use
    from graphquant.qdq.family import FamilyRequest, QDQSite

MATMUL_BLOCK_SIZES = frozenset({16, 32, 64, 128, 256})  # those that all releases from 1.22 on accept
MIN_GATHER_BLOCK_SIZE = 16  # of GatherBlockQuantized, which requires a power of two

DEFAULT_ACCURACY_LEVEL = 4
"""Type in which MatMulNBits multiplies: 4 rounds the activations to int8, 0 computes in their own type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A constant weight in blocks, as far as the choice of the op that reads it depends on it."""

    type: QType  # the type of the quantized values
    axis: int | None  # the axis of the blocks
    block: int | None  # number of elements along the axis that share one scale
    shape: Shape | None  # the static shape

    @property
    def bits(self) -> int:
        """Bits of an element in the packed weight: 2, 4 or 8; 0 if the type is not packed."""
        container = self.type.container if isinstance(self.type, IntType) else ""
        if container in {"int4", "uint4"}:
            return 2 if self.type.bits == 2 else 4  # noqa: PLR2004  # the width
        return 8 if container in {"int8", "uint8"} else 0


def fused_op_type(graph: Graph, consumer: Op, slot: int, weight: PackedWeight) -> str:
    """Return the op type that replaces the DequantizeLinear of a weight and its consumer, or ""."""
    shape, block = weight.shape, weight.block
    if consumer.domain or shape is None or None in shape or block is None or not weight.bits:
        return ""
    if consumer.type in {"MatMul", "Gemm"}:
        is_matrix = slot == 1 and len(shape) == 2 and block in MATMUL_BLOCK_SIZES  # noqa: PLR2004  # rows and columns
        return "MatMulNBits" if is_matrix and weight.axis == _summed_axis(graph, consumer, shape) else ""
    is_table = consumer.type == "Gather" and slot == 0 and len(shape) > 1 and weight.axis == len(shape) - 1
    is_supported_block = block >= MIN_GATHER_BLOCK_SIZE and block & (block - 1) == 0
    reads_rows = is_table and consumer.numeric_attr("axis", 0) == 0
    return "GatherBlockQuantized" if reads_rows and is_supported_block and weight.bits == 4 else ""  # noqa: PLR2004


def _summed_axis(graph: Graph, consumer: Op, shape: Shape) -> int | None:
    """Return the weight's axis that a MatMul or Gemm sums over; None if MatMulNBits does not compute such a Gemm."""
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


class FusedOnnxFamily(OnnxFamily):
    """Weights in blocks as MatMulNBits and GatherBlockQuantized of com.microsoft, which only onnxruntime implements."""

    name = "onnx-fused"
    variant_of = OnnxFamily.name
    op_types = frozenset()  # its ops are read as pairs
    argument_names = frozenset({"accuracy_level"})

    def fused_op(self, graph: Graph, use: Use, request: FamilyRequest) -> tuple[str, int]:
        """Return MatMulNBits, GatherBlockQuantized or "", and the bits of the weight."""
        weight = PackedWeight(type=request.type, axis=request.axis, block=request.block, shape=request.shape)
        return fused_op_type(graph, graph.op(use.op), use.slot, weight), weight.bits

    def add_ops(self, graph: Graph, site: QDQSite) -> TensorRef:
        """Add the ops of the standard form, and mark them for the fused form if the weight is stored as integers."""
        output = super().add_ops(graph, site)
        if site.read_value is not None:
            level = site.args.accuracy_level
            weight = PackedWeight(type=site.params.type, axis=None, block=None, shape=None)
            attrs = {"accuracy_level": DEFAULT_ACCURACY_LEVEL if level is None else level, "bits": weight.bits}
            graph.replace_op(replace(graph.op(output.op), fused_attrs=attrs))
        return output
