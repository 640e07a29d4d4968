"""The families of quantize-dequantize ops: each lowers `QParams` to ops of the IR, without any framework."""

from graphquant.qdq.base import Arguments, Family, Lowering, RangeFrom, Request, Round
from graphquant.qdq.fake_quant import FAKE_QUANT
from graphquant.qdq.onnx_qdq import ONNX_QDQ
from graphquant.qdq.quantize_and_dequantize import V2, V3, V4

FAMILIES: dict[str, Family] = {
    "onnx-qdq": ONNX_QDQ,
    "fake-quant": FAKE_QUANT,
    "quantize-and-dequantize-v2": V2,
    "quantize-and-dequantize-v3": V3,
    "quantize-and-dequantize-v4": V4,
}

__all__ = ["FAMILIES", "Arguments", "Family", "Lowering", "RangeFrom", "Request", "Round"]
