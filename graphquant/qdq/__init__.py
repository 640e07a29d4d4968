"""The families of quantize-dequantize ops: each lowers `QParams` to ops of the IR, without any framework."""

from graphquant.qdq.base import Family, Lowering, Request
from graphquant.qdq.fake_quant import FAKE_QUANT
from graphquant.qdq.onnx_qdq import ONNX_QDQ

FAMILIES: dict[str, Family] = {
    "onnx-qdq": ONNX_QDQ,
    "fake-quant": FAKE_QUANT,
}

__all__ = ["FAMILIES", "Family", "Lowering", "Request"]
