"""Streams of channels: which tensors belong together, that scaling them changes no output bit, and what blocks them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import graphquant as gq
from graphquant import formats
from graphquant.optimize.channel_groups import find_channel_groups, nearest_powers_of_two, rescale_group
from graphquant.quantize import prepare

ROOT = Path(__file__).parents[2]
HEAD = '<ir_version: 8, opset_import: ["": 13]>\n'
PREPARED = ("initializer-inputs", "constant-nodes", "drop-identity", "drop-dropout", "fold-batchnorm")
CONV = {"w": (6, 3, 3, 3), "b": (6,)}
NETS = {
    "relu": ("a = Conv (x, w, b)\n r = Relu (a)\n y = Conv (r, v)", {**CONV, "v": (4, 6, 1, 1)}, ["r"]),
    "depthwise": (
        (
            "a = Conv (x, w, b)\n r = Relu (a)\n d = Conv <group = 6, pads = [1, 1, 1, 1]> (r, k, e)\n"
            " s = LeakyRelu (d)\n y = Conv (s, v)"
        ),
        {**CONV, "k": (12, 1, 3, 3), "e": (12,), "v": (4, 12, 1, 1)},
        ["r", "s"],
    ),
    "grouped": (
        "a = Conv (x, w, b)\n p = MaxPool <kernel_shape = [2, 2]> (a)\n y = Conv <group = 2> (p, v)",
        {**CONV, "v": (4, 3, 1, 1)},
        ["p"],
    ),
    "residual": (
        "a = Conv (x, w, b)\n c = Conv (a, t)\n s = Add (a, c)\n y = Conv (s, v)",
        {**CONV, "t": (6, 6, 1, 1), "v": (4, 6, 1, 1)},
        ["a"],
    ),
    "flatten": (
        "a = Conv (x, w, b)\n r = Relu (a)\n f = Flatten (r)\n y = Gemm <transB = 1> (f, v)",
        {**CONV, "v": (4, 216)},
        ["f"],
    ),
    "pooled": (
        "a = Conv (x, w, b)\n r = Relu (a)\n m = ReduceMean <axes = [2, 3], keepdims = 0> (r)\n y = MatMul (m, v)",
        {**CONV, "v": (6, 4)},
        ["m"],
    ),
    "turned": (
        "a = Conv (x, w, b)\n p = Pad (a, ends)\n t = Transpose <perm = [0, 2, 3, 1]> (p)\n y = MatMul (t, v)",
        {**CONV, "v": (6, 4)},
        ["t"],
    ),
    "norm": (
        "l = LayerNormalization <axis = -1> (x, g, o)\n a = MatMul (l, v)\n c = MatMul (l, u)\n y = Add (a, c)",
        {"g": (8,), "o": (8,), "v": (8, 4), "u": (8, 4)},
        ["l"],
    ),
    "norm of single ops": (
        (
            "m = ReduceMean <axes = [-1]> (x)\n d = Sub (x, m)\n q = Mul (d, d)\n e = ReduceMean <axes = [-1]> (q)\n"
            " f = Sqrt (e)\n n = Div (d, f)\n h = Mul (n, g)\n l = Add (h, o)\n a = MatMul (l, v)\n y = Add (a, c)"
        ),
        {"g": (8,), "o": (8,), "v": (8, 4), "c": (4,)},
        ["l"],
    ),
    "transposed": (
        "a = Conv (x, w, b)\n r = Clip (a, z)\n y = ConvTranspose (r, v)",
        {**CONV, "v": (6, 4, 2, 2)},
        [],
    ),
}


def image_model_opset_17(tmp_path, body, shapes):
    """A model of one input of images, its initializers drawn from a fixed seed."""
    rng = np.random.default_rng(3)
    head = HEAD.replace("13", "17")
    message = onnx.parser.parse_model(f"{head} g (float[N,3,8,8] x) => (float y) {{\n {body}\n}}")
    message.graph.output[0].type.tensor_type.ClearField("shape")
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    values |= {"ends": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "z": np.float32(0)}
    for name, value in values.items():
        if any(name in node.input for node in message.graph.node):
            message.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    onnx.save(onnx.shape_inference.infer_shapes(message), tmp_path / "model.onnx")
    return gq.load(tmp_path / "model.onnx")


def scale_all_groups(source, seed=5):
    """The model with each of its free streams scaled by powers of two drawn from a seed, and how many there were."""
    rng, changed, count = np.random.default_rng(seed), source.copy(), 0
    for stream in find_channel_groups(source):
        if not stream.obstacle:
            assert rescale_group(changed, stream, nearest_powers_of_two(np.exp(rng.normal(0, 2, stream.channels))))
            count += 1
    return changed, count


def have_same_outputs(model, changed, feeds):
    """Return True if two models have outputs, with equal bits."""
    runners = [formats.format_module(model.format).create_runner(candidate) for candidate in (model, changed)]
    first, second = (runner.run(feeds) for runner in runners)
    assert first
    return all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("net", NETS)
def test_outputs_keep_their_bits(net, tmp_path):
    """The stream is found, its channels are scaled, other weights stand beside it, and the output is the same."""
    body, shapes, expected = NETS[net]
    source = image_model_opset_17(tmp_path, body, shapes)
    assert [stream.start.op for stream in find_channel_groups(source) if not stream.obstacle] == expected
    changed, count = scale_all_groups(source)
    assert count == len(expected)
    weights = [
        not np.array_equal(source.main.op(name).read_value(), changed.main.op(name).read_value())
        for name in shapes
        if source.main.op(name).kind == "constant"
    ]
    assert sum(weights) >= 2 * count
    x = np.random.default_rng(2).normal(size=(2, 3, 8, 8)).astype(np.float32)
    assert have_same_outputs(source, changed, {"x": x})


def test_initializers_that_were_inputs_are_scaled(tmp_path):
    """A weight of a model of IR version 3, which is also an input, is a constant like others once it is prepared."""
    body, shapes, expected = NETS["depthwise"]
    image_model_opset_17(tmp_path, body, shapes)
    message = onnx.load(tmp_path / "model.onnx")
    for tensor in message.graph.initializer:
        info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        message.graph.input.append(info)
    onnx.save(message, tmp_path / "model.onnx")
    source = prepare(gq.load(tmp_path / "model.onnx"), PREPARED)[0]
    assert [group.start.op for group in find_channel_groups(source) if not group.obstacle] == expected
    changed, _ = scale_all_groups(source)
    x = np.random.default_rng(2).normal(size=(2, 3, 8, 8)).astype(np.float32)
    assert have_same_outputs(source, changed, {"x": x})


@pytest.mark.parametrize(("name", "count"), [("digits_cnn.onnx", 4), ("digits_cnn_bn.onnx", 4), ("digits_rnn.onnx", 1)])
def test_sample_models_keep_their_bits(name, count):
    """Trained models with residual blocks give the same bits with each free stream scaled."""
    source = prepare(gq.load(ROOT / "sample_models" / name), PREPARED)[0]
    changed, group_count = scale_all_groups(source)
    assert group_count == count
    with np.load(ROOT / "sample_models" / f"{name.removesuffix('.onnx').removesuffix('_bn')}_calib.npz") as arrays:
        feeds = {entry.name: arrays[entry.name][:8] for entry in formats.format_module("onnx").input_specs(source)}
    assert have_same_outputs(source, changed, feeds)


@pytest.mark.slow
def test_frozen_tensorflow_keeps_its_bits():
    """A frozen TensorFlow net gives the same bits with each free stream scaled."""
    pytest.importorskip("tensorflow")
    source = prepare(gq.load(ROOT / "sample_models" / "digits_cnn.pb"), ("fold-batchnorm",))[0]
    changed, group_count = scale_all_groups(source)
    assert group_count == 4
    with np.load(ROOT / "sample_models" / "digits_cnn_calib.npz") as arrays:
        feeds = {"image": arrays["image"][:8]}
    assert have_same_outputs(source, changed, feeds)


@pytest.mark.parametrize(
    ("body", "shapes", "reason"),
    [
        ("a = Conv (x, w, b)\n r = Sigmoid (a)\n y = Conv (r, v)", CONV, "Sigmoid"),
        ("a = Conv (x, w, b)\n r = Clip (a, z, i)\n y = Conv (r, v)", {**CONV, "i": ()}, "Clip"),
        ("y = Conv (x, u)", {"u": (6, 3, 3, 3)}, "input"),
        ("a = Conv (x, w, b)\n c = Conv (a, v)\n d = Add (a, e)\n y = Concat <axis = 1> (c, d)", CONV, "Concat"),
        ("a = Conv (x, w, b)\n c = Conv (a, v)\n d = Conv (x, v)\n y = Add (c, d)", {**CONV}, "variable"),
        ("a = Conv (x, w, b)\n s = Mul (a, a)\n y = Conv (s, v)", CONV, "another tensor"),
        ("a = Conv (x, w, b)\n s = Add (a, o)\n y = Conv (s, v)", {**CONV, "o": (6, 6)}, "one number per channel"),
    ],
)
def test_what_blocks(body, shapes, reason, tmp_path):
    """A stream that goes through something else, or whose weights others read, says why it is left."""
    shapes = {**shapes, **({"v": (4, 6, 1, 1) if "Conv (x, v)" not in body else (4, 3, 1, 1)} if "v)" in body else {})}
    shapes |= {"e": (6, 1, 1)} if ", e)" in body else {}
    if reason == "variable":
        shapes |= {"w": (3, 3, 3, 3), "b": (3,)}
    source = image_model_opset_17(tmp_path, body, shapes)
    blocked = [stream.obstacle for stream in find_channel_groups(source)]
    assert any(reason in entry for entry in blocked), blocked
    if reason != "Concat":
        assert all(blocked)


def test_factors_that_are_not_exact_are_refused(tmp_path):
    """Weights that would be no normal float32 any more stay, all of them."""
    source = image_model_opset_17(tmp_path, *NETS["relu"][:2])
    tiny = source.copy()
    tiny.main.replace_op(replace(source.main.op("w"), read_value=lambda: np.full((6, 3, 3, 3), 2e-38, np.float32)))
    (stream,) = (entry for entry in find_channel_groups(tiny) if not entry.obstacle)
    assert not rescale_group(tiny, stream, np.full(6, 4.0))
    assert np.array_equal(tiny.main.op("v").read_value(), source.main.op("v").read_value())
