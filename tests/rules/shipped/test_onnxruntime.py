"""ONNX Runtime's execution of models that its own rule file quantized."""

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from support.onnx_models import load_onnx

import graphquant as gq


@pytest.mark.parametrize("shape", [(2, 4, 3), (1, 4, 3), (2, 3, 4, 3)])
def test_stacked_weights_run(tmp_path, shape):
    """A matrix product with a stack of weights gets one scale, without which onnxruntime's int8 kernels fail."""
    lead = ",".join(map(str, shape[:-2]))
    text = f'<ir_version: 8, opset_import: ["": 13]> g (float[{lead},5,4] x) => (float y) {{ y = MatMul(x, w) }}'
    message = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(shape).astype(np.float32)
    message.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    message.graph.output[0].type.tensor_type.shape.dim.extend([onnx.TensorShapeProto.Dimension() for _ in shape])
    onnx.save(message, tmp_path / "model.onnx")
    x = rng.standard_normal((4, *shape[:-2], 5, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    result = gq.insert(tmp_path / "model.onnx", data=str(tmp_path / "data.npz"))
    result.save(tmp_path / "quant.onnx")
    scales = {done.site.tensor.op: done.params.scale for done in result.inserted}
    assert scales["w"] == np.float32(np.abs(weight).max() / 127)
    session = onnxruntime.InferenceSession(tmp_path / "quant.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x[0]})[0], x[0] @ weight, atol=0.1)


@pytest.mark.parametrize(
    ("channels", "groups", "outputs", "is_float"),
    [
        (8, 1, 8, False),
        (8, 8, 8, False),  # depthwise
        (8, 8, 16, True),  # depthwise with a multiplier
        (16, 8, 16, True),
        (28, 4, 28, True),
        (32, 4, 32, False),
    ],
)
def test_narrow_groups_stay_float(tmp_path, channels, groups, outputs, is_float):
    """A convolution with narrow groups stays float, since its int8 kernel is slow, and those around it do not."""
    grouped = f"g = Conv<group = {groups}, pads = [1, 1, 1, 1]>(a, w)"
    text = f"g (float[N, 3, 8, 8] x) => (float[N, 5, 8, 8] y) {{ a = Conv(x, v) {grouped} y = Conv(g, u) }}"
    shapes = {"v": (channels, 3, 1, 1), "w": (outputs, channels // groups, 3, 3), "u": (5, outputs, 1, 1)}
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    model = load_onnx(tmp_path, text, weights)
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((8, 3, 8, 8)).astype(np.float32))
    result = gq.insert(model, data=str(tmp_path / "data.npz"))
    float_ops = {verdict.op for verdict in result.verdicts if verdict.status == "float"}
    assert float_ops == ({"g"} if is_float else set())
    assert {verdict.op for verdict in result.verdicts} >= {"a", "g", "y"}
