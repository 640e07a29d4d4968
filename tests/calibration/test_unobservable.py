"""Tensors that cannot be observed."""

import numpy as np
import onnx
from onnx import parser

import graphquant as gq
from graphquant.formats.onnx.reader import model_from_message
from graphquant.formats.onnx.runner import create_runner
from graphquant.ir import TensorRef
from graphquant.quantize import SkipCode

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
main (float[3,4] x, bool c) => (float[4,3] y) <float[4,4] w = {1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8}>
{
    y = Scan <num_scan_inputs = 1, scan_output_axes = [1], body = body (float[4] e) => (float[] f) {
        f = If (c) <
            then_branch = yes () => (float[4] o) { t = Tanh (e) o = MatMul (t, w) },
            else_branch = no () => (float[4] p) { p = Identity (e) }
        >
    }> (x)
}
"""


def test_unobservable_tensor_is_skipped(tmp_path):
    """A tensor in an If inside a Scan of unknown layout is skipped with a reason; the rest is quantized."""
    onnx.save(parser.parse_model(MODEL), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((3, 3, 4), np.float32), c=np.array(True))
    result = gq.insert(tmp_path / "m.onnx", data=str(tmp_path / "d.npz"))
    assert [str(done.site.tensor) for done in result.inserted] == ["w:0"]
    (skip,) = [skip for skip in result.skips if skip.rule == "weighted-input"]
    assert str(skip.tensor) == "y/body/f/then_branch/t:0"
    assert skip.code is SkipCode.RANGE
    assert "Scan" in skip.reason


FUNCTION = """
<ir_version: 8, opset_import: ["" : 17, "d" : 1]> main (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1,2,3,4}>
{ y = d.f (x, w) }
<domain: "d", opset_import: ["" : 16]> f (a, v) => (b) { c = Relu (a)  b = MatMul (c, v) }
"""


def test_tensors_in_functions_of_another_opset_are_rejected():
    """A function of another opset is not inlined, so that its tensors cannot be observed; the others can."""
    runner = create_runner(model_from_message(parser.parse_model(FUNCTION)))
    tensors = [TensorRef("", "x"), TensorRef("d:f", "c")]
    assert list(runner.unobservable(tensors)) == tensors[1:]
