"""The families of quantize-dequantize ops: each lowers `QParams` to ops of the IR, without any framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.qdq.base import Arguments, Family, Lowering, RangeFrom, Request, Round
from graphquant.qdq.fake_quant import FAKE_QUANT
from graphquant.qdq.onnx_qdq import ONNX_QDQ
from graphquant.qdq.quantize_and_dequantize import V2, V3, V4

if TYPE_CHECKING:
    from graphquant.ir import Graph, Op, Parameters
    from graphquant.numerics import Dynamic, QParams

FAMILIES: dict[str, Family] = {
    "onnx-qdq": ONNX_QDQ,
    "fake-quant": FAKE_QUANT,
    "quantize-and-dequantize-v2": V2,
    "quantize-and-dequantize-v3": V3,
    "quantize-and-dequantize-v4": V4,
}


def family_of(op: Op) -> Family | None:
    """The family whose op `op` is, by its type; None if it is no quantization op that is known."""
    return next((family for family in FAMILIES.values() if op.type in family.types), None)


def params_of(graph: Graph, op: Op, parameters: Parameters) -> QParams | Dynamic | None:
    """What a quantization op of `graph` does, `Dynamic` where only a run tells; None where it is not known."""
    family = family_of(op)
    return None if family is None else family.read(graph, op, parameters)


__all__ = [
    "FAMILIES",
    "Arguments",
    "Family",
    "Lowering",
    "RangeFrom",
    "Request",
    "Round",
    "family_of",
    "params_of",
]
