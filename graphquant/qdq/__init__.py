"""Families of quantize-dequantize ops. Each adds ops for `QParams` to the IR, without importing a framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.qdq.family import FamilyArguments, FamilyRequest, FusedForm, QDQFamily, QDQSite, RoundingMode
from graphquant.qdq.onnx_fused import (
    DYNAMIC_ATTENTION,
    DYNAMIC_FORM,
    DYNAMIC_LSTM,
    DYNAMIC_PRODUCT,
    FOLDED_FORM,
    LAYER_WEIGHT_SLOTS,
    MIN_GATHER_BLOCK_SIZE,
    FusedOnnxFamily,
    PackedWeight,
    count_product_weights,
    dynamic_op_type,
    fused_op_type,
    is_matrix_transpose,
)
from graphquant.qdq.onnx_qdq import OnnxFamily
from graphquant.qdq.tensorflow_qdq import LEARNED_ATTR, FakeQuantFamily, QuantizeAndDequantizeFamily

if TYPE_CHECKING:
    from graphquant.ir import Graph, Op, Parameters
    from graphquant.numerics import DynamicQParams, QParams

FAMILIES: dict[str, QDQFamily] = {
    family.name: family
    for family in (
        OnnxFamily(),
        FusedOnnxFamily(),
        FakeQuantFamily(),
        *(QuantizeAndDequantizeFamily(version) for version in (2, 3, 4)),
    )
}


def family_of(op: Op) -> QDQFamily | None:
    """Return the family of a quantization op by its type, or None."""
    return next((family for family in FAMILIES.values() if op.type in family.op_types), None)


def read_qparams(graph: Graph, op: Op, parameters: Parameters) -> QParams | DynamicQParams | None:
    """Return the params of a quantization op of `graph`, `DynamicQParams` for a dynamic range; None if unknown."""
    family = family_of(op)
    return None if family is None else family.read_params(graph, op, parameters)
