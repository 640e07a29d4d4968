"""The record of each step: with it and the prepared model the source is there again, to the bit."""

import base64
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.original_weights import decode_array, original_weights, restore_weight

import graphquant as gq
from graphquant.errors import ModelError
from graphquant.formats import onnx as onnx_format
from graphquant.numerics import dequantize
from graphquant.quantize import plan_from_json, plan_to_json, prepare
from graphquant.quantize.preparation_undo import encode_array
from graphquant.quantize.prepare import PREPARATION_STEPS

pytestmark = pytest.mark.usefixtures("rules_alone")

TEXT = """<ir_version: 8, opset_import: ["": 13, "com.microsoft": 1]>
g (float[1,6,8,8] x) => (float[1,8,8,8] y, float[1,5] z) {
    k = Constant <value = float {2.0}> ()
    i = Identity (x)
    c = Conv <group = 2, kernel_shape = [1, 1]> (i, w)
    d = Dropout (c)
    n = BatchNormalization (d, s, o, m, v)
    e = Identity (n)
    t = ConvTranspose <group = 4> (e, u, ub)
    p = BatchNormalization (t, s, o, m, v)
    q = Mul (p, k)
    y = com.microsoft.FusedConv <group = 4, activation = "Clip", activation_params = [0.0, 3.0]> (q, u, ub)
    f = GlobalAveragePool (y)
    h = Flatten (f)
    a = MatMul (h, mw)
    b = Add (a, mb)
    r = BatchNormalization (b, s5, o5, m5, v5)
    l = Sigmoid (r)
    j = Mul (l, r)
    pr = PRelu (j, o5)
    z = com.microsoft.BiasGelu (pr, mb)
}"""

SHAPES = {
    "w": (8, 3, 1, 1),
    "u": (8, 2, 1, 1),
    "ub": (8,),
    "mw": (8, 5),
    "mb": (5,),
    **dict.fromkeys("somv", (8,)),
    **dict.fromkeys(("s5", "o5", "m5", "v5"), (5,)),
}


def source(folder):
    """A net that every step changes, in its file."""
    rng = np.random.default_rng(3)
    message = onnx.parser.parse_model(TEXT)
    for name, shape in SHAPES.items():
        value = rng.normal(size=shape).astype(np.float32)
        value = np.abs(value) + np.float32(0.1) if name.startswith("v") else value
        value[..., 0] *= name != "s"  # a channel whose weight is lost by folding
        message.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    message.graph.input.append(onnx.helper.make_tensor_value_info("mw", onnx.TensorProto.FLOAT, (8, 5)))
    onnx.save(message, folder / "model.onnx")
    return folder / "model.onnx"


def decoded(kind, item):
    """The node or tensor of a record."""
    return kind.FromString(base64.b64decode(item["node"]))


class Undoing:
    """A prepared ONNX model of one graph, as what its steps can be taken back in."""

    def __init__(self, message):
        self.nodes = {node.name or node.output[0]: node for node in message.graph.node}
        self.tensors = {tensor.name: tensor for tensor in message.graph.initializer}
        self.inputs = list(message.graph.input)
        self.order = {}

    def take_back(self, step):
        """Undoes one step."""
        if "position" in step.undo:
            info = onnx.ValueInfoProto.FromString(base64.b64decode(step.undo["input"]))
            self.inputs.insert(step.undo["position"], info)
            return
        values = original_weights(step, lambda name: onnx.numpy_helper.to_array(self.tensors[name]))
        for item in step.undo["added"]:
            self.nodes.pop(item["op"], None)
            self.tensors.pop(item["op"], None)
        for item in step.undo["removed"]:
            self.put_back(item, *values.get(("", item["op"]), (None, True)))
        for item in reversed(step.undo["rewired"]):
            if item["op"] in self.nodes:
                self.rewire(self.nodes[item["op"]].input, item["slot"], item["read"])

    def put_back(self, item, value, exact):
        """Adds what a step removed."""
        assert exact
        self.order[item["op"]] = item.get("position")
        if value is not None:
            self.tensors[item["op"]] = onnx.numpy_helper.from_array(value, item["op"])
        elif item["type"] == "Initializer":
            self.tensors[item["op"]] = decoded(onnx.TensorProto, item)
        else:
            self.nodes[item["op"]] = decoded(onnx.NodeProto, item)

    def rewire(self, slots, slot, read):
        """Lets a slot read what it read before."""
        source = self.nodes.get(read["op"]) if read is not None else None
        tensor_name = source.output[read["port"]] if source is not None else read["op"] if read is not None else ""
        slots[slot] = tensor_name
        while slots and not slots[-1]:
            del slots[-1]


def test_the_source_is_there_again(tmp_path):
    """Every node and input, and every weight bit for bit, from the written prepared model and the plan's JSON."""
    path = source(tmp_path)
    model = gq.load(path)
    prepared, steps = prepare(model, tuple(PREPARATION_STEPS))
    assert {step.step for step in steps} == set(PREPARATION_STEPS) - {"inference-batchnorm", "requantize"}
    assert [step.target for step in steps if step.step == "fold-batchnorm"] == ["n", "p", "q", "r"]
    written = onnx.ModelProto.FromString(onnx_format.emit(prepared).SerializeToString())
    assert [node.op_type for node in written.graph.node] == [
        *("Conv", "ConvTranspose", "Conv", "Clip", "GlobalAveragePool", "Flatten", "MatMul", "Add"),
        *("QuickGelu", "Relu", "Min", "Mul", "Add", "Add", "Gelu"),
    ]
    plan = gq.plan(model, rules=["prepare = ['initializer-inputs']\n", "weight_only"])
    read = plan_from_json(json.loads(json.dumps(plan_to_json(replace(plan, steps=steps)))))
    undoing = Undoing(written)
    for step in reversed(read.steps):
        undoing.take_back(step)
    before = onnx.load(path).graph
    assert sorted(undoing.nodes.values(), key=str) == sorted(before.node, key=str)
    assert undoing.inputs == list(before.input)
    values = {initializer.name: onnx.numpy_helper.to_array(initializer).tobytes() for initializer in before.initializer}
    assert {name: onnx.numpy_helper.to_array(entry).tobytes() for name, entry in undoing.tensors.items()} == values
    names = [op.name for op in model.main.ops()]
    positions = {name: position for name, position in undoing.order.items() if position is not None}
    assert {name: names.index(name) for name in positions} == positions
    assert {"n", "w", "i", "d", "k", "s5"} <= set(positions)


def folding_step(steps):
    """The step that folded the first BatchNorm."""
    return next(step for step in steps if step.target == "n")


def test_weights_are_not_copied(tmp_path):
    """The record of a large weight has less than a third of its bytes, and says what it was by its digest."""
    text = """<ir_version: 8, opset_import: ["": 13]> g (float[1,256,5,5] x) => (float[1,256,3,3] y) {
        c = Conv (x, w)
        y = BatchNormalization (c, s, o, m, v)
    }"""
    message = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in {"w": (256, 256, 3, 3), **dict.fromkeys("somv", (256,))}.items():
        value = np.abs(rng.normal(size=shape)).astype(np.float32)
        message.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(message, tmp_path / "model.onnx")
    _, (step,) = prepare(gq.load(tmp_path / "model.onnx"), ("fold-batchnorm",))
    assert len(json.dumps(step.undo)) < 256 * 256 * 9 * 4 / 3
    (weight,) = [item for item in step.undo["removed"] if item["op"] == "w"]
    exact = next(initializer for initializer in message.graph.initializer if initializer.name == "w").raw_data
    assert weight["value"]["sha256"] == hashlib.sha256(exact).hexdigest()
    assert not decoded(onnx.TensorProto, weight).raw_data


def test_rounded_weights_are_restored_approximately(tmp_path):
    """From other values than those written a weight is a quotient, and that it is no more is told."""
    model = gq.load(source(tmp_path))
    step = folding_step(prepare(model, tuple(PREPARATION_STEPS))[1])
    originals_by_op = original_weights(step, lambda _: np.full((8, 3, 1, 1), 0.5, np.float32))
    weight, exact = originals_by_op["", "w"]
    assert not exact
    assert weight.shape == (8, 3, 1, 1)
    assert ("", "w") not in original_weights(step, lambda _: None)


@pytest.mark.parametrize(
    "damage", [{"factor": None}, {"shape": [7]}, {"split": [9]}, {"steps": {"dtype": "<i1", "data": "AAAA"}}]
)
def test_a_damaged_record(tmp_path, damage):
    """Unreadable undo data is an error with the step's name, and nothing larger than the weight is unpacked."""
    model = gq.load(source(tmp_path))
    prepared, steps = prepare(model, tuple(PREPARATION_STEPS))
    step = folding_step(steps)
    value = next(item["value"] for item in step.undo["removed"] if item["op"] == "w")
    value.update(damage)
    weight = prepared.main.op("c/weight_folded").read_value()
    with pytest.raises(ModelError, match=r"fold-batchnorm on n .*damaged"):
        original_weights(step, lambda _: weight)


@given(
    arrays.arrays(np.float32, 9, elements=st.floats(width=32, allow_nan=False)), st.floats(width=64, allow_nan=False)
)
def test_every_weight_is_restored(weight, factor):
    """Whatever the weight and the factor, zeros of either sign and numbers too small to be normal among them."""
    from graphquant.quantize import preparation_undo

    with np.errstate(all="ignore"):
        product = (weight.astype(np.float64) * factor).astype(np.float32)
    if not np.isfinite(product).all():
        return
    scaled = preparation_undo.ScaledWeight(
        weight=weight,
        product=product,
        factor=np.array([factor]),
        product_shape=(9,),
        factor_shape=(1,),
    )
    restored, exact = restore_weight(json.loads(json.dumps(preparation_undo._weight_reference("p", scaled))), product)
    assert exact
    assert restored.tobytes() == weight.tobytes()


def test_arrays_as_json():
    """An array comes back with its type and shape."""
    value = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert decode_array(json.loads(json.dumps(encode_array(value)))).tolist() == value.tolist()


@pytest.mark.parametrize("float_weights", [True, False])
def test_weights_are_restored_from_the_written_model(tmp_path, float_weights):
    """With float weights in the file each one is exact; with integers it is within their rounding, and said to be."""
    samples = Path(__file__).parents[2] / "sample_models"
    source = gq.load(samples / "digits_cnn_bn.onnx")
    result = gq.insert(source, data=str(samples / "digits_cnn_calib.npz"), float_weights=float_weights, validate=False)
    written = gq.load(result.save(tmp_path / "quant.onnx"))
    folded = {pair.site.tensor.op: pair.params for pair in result.inserted if pair.site.parameter}

    def read(name):
        if name in written.main:
            return written.main.op(name).read_value()
        stored_weights = written.main.op(f"{name}/quant/{folded[name].type.name}").read_value()
        return dequantize(stored_weights, folded[name])

    restored_count = 0
    for step in reversed(read_steps(result.plan)):
        for (_, name), (value, exact) in original_weights(step, read).items():
            true = source.main.op(name).read_value() if name in source.main else None  # an input of the source, too
            if true is None or true.ndim < 4:
                continue
            assert exact == float_weights
            np.testing.assert_allclose(value, true, atol=0 if exact else np.abs(true).max() / 127)
            restored_count += 1
    assert restored_count == 5


def read_steps(plan):
    """The steps as they are read from the plan's JSON."""
    return plan_from_json(json.loads(json.dumps(plan_to_json(plan)))).steps
