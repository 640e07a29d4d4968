"""Differences of small models that are given as text: each kind with its location, message and size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from ml_dtypes import bfloat16
from onnx import numpy_helper
from support.onnx_models import load_onnx, onnx_model

import graphquant as gq
from graphquant.ir import Graph, Model, Op, Output, StoredQuantization

if TYPE_CHECKING:
    from pathlib import Path

NET = """net (float[1,4] x) => (float[1,4] y)
  <float s = {0.5}, uint8 z = {3}, float[4] b = {1, 2, 3, 4}>
{
    [q] xq = QuantizeLinear (x, s, z)
    [d] xd = DequantizeLinear (xq, s, z)
    [m] h = Mul (xd, b)
    [c] k = Constant <value = float[4] {1, 2, 3, 4}> ()
    [a] t = Add (h, k)
    [r] y = Softmax <axis = 1> (t)
}
"""
PER_CHANNEL = {
    "float s = {0.5}, uint8 z = {3}": "float[4] s = {0.5, 0.25, 2, 1}, uint8[4] z = {3, 3, 3, 3}",
    "QuantizeLinear (x": "QuantizeLinear <axis = 1> (x",
    "DequantizeLinear (xq": "DequantizeLinear <axis = 1> (xq",
}
WITHOUT_QUANTIZATION = {
    "[q] xq = QuantizeLinear (x, s, z)": "",
    "[d] xd = DequantizeLinear (xq, s, z)": "",
    "(xd, b)": "(x, b)",
}
COMPUTED_SCALE = {
    "[q]": "s2 = ReduceMax <keepdims = 0> (x) [q]",
    "(x, s, z)": "(x, s2, z)",
    "(xq, s, z)": "(xq, s2, z)",
}


def edited(replacements: dict[str, str], text: str = NET) -> str:
    """Return a text with replacements."""
    for old, new in replacements.items():
        assert old in text
        text = text.replace(old, new)
    return text


def diff_texts(folder: Path, first: str, second: str, **constants: np.ndarray) -> gq.Differences:
    """Return the differences of two texts, each with those constants that it reads."""
    models = []
    for number, text in enumerate((first, second)):
        folder.joinpath(str(number)).mkdir(parents=True)
        models.append(load_onnx(folder / str(number), text, constants))
    return gq.diff(*models)


def entries(differences: gq.Differences) -> list[tuple[Any, ...]]:
    """Return kind, location, message and size of each difference."""
    return [(change.kind, change.location, change.message, change.size) for change in differences.changes]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {"[c] k": "[constant] k"}, []),
        ({}, {"[c] k": "[constant] k2", "(h, k)": "(h, k2)"}, [("op-renamed", "constant", "was c", 0)]),
        (
            {},
            {
                "[c] k = Constant <value = float[4] {1, 2, 3, 4}> ()": "",
                "b = {1, 2, 3, 4}": "b = {1, 2, 3, 4}, float[4] k = {1, 2, 3, 4}",
            },
            [],
        ),
        ({}, {"[r]": "[other]"}, [("op-renamed", "other", "was r", 0)]),
        ({}, {"axis = 1": "axis = 0"}, [("attribute", "r", "axis: 1 became 0", 0)]),
        ({"axis = 1": "axis = 1, far = 2"}, {}, [("attribute", "r", "far: 2 became nothing", 0)]),
        (
            {"axis = 1": f'axis = 1, far = "{"ab  " * 20}c"'},
            {"axis = 1": f'axis = 1, far = "{"ab " * 19}abc"'},
            [("attribute", "r", f"far: {'ab ' * 20}... became {'ab ' * 19}abc", 0)],
        ),
        ({}, {"float[1,4] x": "float[2,4] x"}, [("op-changed", "x", "float32 [1, 4] became float32 [2, 4]", 0)]),
        ({}, {"(h, k)": "(k, h)"}, [("wiring", "a[0]", "m:0 became c:0", 0), ("wiring", "a[1]", "c:0 became m:0", 0)]),
        (
            {"Softmax <axis = 1> (t)": "Clip (t, , k)"},
            {"Softmax <axis = 1> (t)": "Clip (t, k)"},
            [("wiring", "r[1]", "nothing became c:0", 0), ("wiring", "r[2]", "c:0 became nothing", 0)],
        ),
        ({}, {"{0.5}": "{0.75}"}, [("scale", "x:0", "0.5 became 0.75 (50%)", 0.5)]),
        ({}, {"uint8 z = {3}": "uint8 z = {4}"}, [("site-changed", "x:0", "zero point 3 became 4", 0)]),
        ({}, {"uint8": "int8"}, [("site-changed", "x:0", "type uint8 became int8", 0)]),
        ({}, PER_CHANNEL, [("site-changed", "x:0", "axis None became 1, 1 scales became 4", 0)]),
        (
            PER_CHANNEL,
            PER_CHANNEL | {"2, 1}": "1, 2}", "3, 3}": "4, 2}"},
            [
                ("site-changed", "x:0", "zero point 3 became 2 to 4", 0),
                ("scale", "x:0", "0.25 to 2 became 0.25 to 2 (100%)", 1),
            ],
        ),
        (
            WITHOUT_QUANTIZATION,
            PER_CHANNEL,
            [("site-added", "x:0", "uint8, scale 0.25 to 2, zero point 3", 0)],
        ),
        ({}, WITHOUT_QUANTIZATION, [("site-removed", "x:0", "uint8, scale 0.5, zero point 3", 0)]),
        (COMPUTED_SCALE, COMPUTED_SCALE, []),
        (
            {},
            COMPUTED_SCALE,
            [
                ("op-added", "s2", "ReduceMax", 0),
                (
                    "site-changed",
                    "x:0",
                    "uint8, scale 0.5, zero point 3 became DequantizeLinear, its scale is computed",
                    0,
                ),
            ],
        ),
    ],
)
def test_differences_of_two_texts(
    tmp_path: Path, first: dict[str, str], second: dict[str, str], expected: list[tuple[Any, ...]]
) -> None:
    """Each edit of a net is reported once, and the net has no difference to itself."""
    texts = edited(first), edited(second)
    assert entries(diff_texts(tmp_path / "edit", *texts)) == expected
    assert not diff_texts(tmp_path / "same", texts[1], texts[1])


WEIGHTS = """net (float[1,4] x) => (float[1,4] y)
  <float s = {0.5}, float[4] b = {1, 2, 3, 4}, int8[4] i = {2, 4, 6, 8}, float[2,2] other = {1, 2, 3, 4}>
{
    [e] w = DequantizeLinear (i, s)
    [m] h = Mul (x, w)
    [r] t = Mul (h, s)
    [a] y = Reshape (t, b)
}
"""


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({"6, 8": "6, 12"}, [("weight", "i", "1 of 4 values differ, by up to 4", 4)]),
        (
            {"s = {0.5}": "s = {0.25}"},
            [
                ("weight", "s", "1 of 1 values differ, by up to 0.25", 0.25),
                ("scale", "i:0", "0.5 became 0.25 (50%)", 0.5),
            ],
        ),
        (
            {"[e] w = DequantizeLinear (i, s)": "", "(x, w)": "(x, b)"},
            [("site-removed", "i:0", "int8, scale 0.5, zero point 0", 0)],
        ),
        ({"(t, b)": "(t, other)"}, [("wiring", "a[1]", "b:0 became other:0", 0)]),
    ],
)
def test_constants_and_quantized_weights(
    tmp_path: Path, second: dict[str, str], expected: list[tuple[Any, ...]]
) -> None:
    """A constant is a scale only if quantization ops alone read it. Stored integers stand for a float weight."""
    assert entries(diff_texts(tmp_path, WEIGHTS, edited(second, WEIGHTS))) == expected
    reverse = diff_texts(tmp_path / "reverse", edited(second, WEIGHTS), WEIGHTS)
    assert [change.kind.replace("added", "removed") for change in reverse.changes] == [kind for kind, *_ in expected]


def test_another_opset_is_reported(tmp_path: Path) -> None:
    """Two opsets are one difference of the model, which is not a rerouted use."""
    first, second = (load_onnx(tmp_path, NET, opset=opset) for opset in (13, 14))
    differences = gq.diff(first, second, quantization=False)
    assert entries(differences) == [("model", "opset", "13 became 14", 0)]
    assert differences.rerouted == 0


def test_uses_of_removed_and_added_ops(tmp_path: Path) -> None:
    """A use is rerouted if its op is in both models, or only in the second one."""
    negated = edited({"[c]": "n = Neg (xd) [c]"})
    removed, added = diff_texts(tmp_path / "a", negated, NET), diff_texts(tmp_path / "b", NET, negated)
    assert (entries(removed), removed.rerouted) == ([("op-removed", "n", "Neg", 0)], 0)
    assert (entries(added), added.rerouted) == ([("op-added", "n", "Neg", 0)], 1)
    direct = diff_texts(tmp_path / "c", edited({"(xd, b)": "(x, b)"}, negated), negated)
    assert (entries(direct), direct.rerouted) == ([], 1)


@pytest.mark.parametrize(
    ("before", "after", "message", "size"),
    [
        ([1, 2], [1, 2.5], "1 of 2 values differ, by up to 0.5", 0.5),
        ([1, 2, 3], [1.25, 2, 2], "2 of 3 values differ, by up to 1", 1),
        ([1, -np.inf, np.nan], [1.25, -np.inf, np.nan], "1 of 3 values differ, by up to 0.25", 0.25),
        ([1, 2], [1, np.nan], "1 of 2 values differ, by up to inf", np.inf),
        ([np.nan, np.inf], [np.nan, -np.inf], "1 of 2 values differ, by up to inf", np.inf),
        (np.array([np.nan, 1], bfloat16), np.array([np.nan, 2], bfloat16), "1 of 2 values differ, by up to 1", 1),
        (np.array([3j, 1]), np.array([3j, 1 - 2j]), "1 of 2 values differ, by up to 2", 2),
        ([[1, 2]], [1, 2], "float32 [1, 2] became float32 [2]", 0),
        (np.int32([1, 2]), [1, 2], "int32 [2] became float32 [2]", 0),
        (np.array(["a", "b"]), np.array(["a", "c"]), "has different values", 0),
    ],
)
def test_changed_weights(tmp_path: Path, before: Any, after: Any, message: str, size: float) -> None:
    """A weight is reported with the values that changed; equal infinite values and NaNs did not."""
    paths = []
    for number, value in enumerate((before, after)):
        array = np.float32(value) if isinstance(value, list) else value
        net = onnx_model(
            "net (float[2] x) => (float[2] y) { y = Custom.Read (x, w) }", {"w": array}, infer_shapes=False
        )
        paths.append(tmp_path / f"{number}.onnx")
        onnx.save(net, paths[-1])
    assert entries(gq.diff(*paths)) == [("weight", "w", message, size)]
    assert not gq.diff(paths[0], paths[0])


def test_removed_default_of_an_input(tmp_path: Path) -> None:
    """An input that lost its default value is reported, because the second model cannot run without it."""
    net = onnx_model("net (float[2] x, float[2] w) => (float[2] y) { y = Add (x, w) }")
    onnx.save(net, tmp_path / "required.onnx")
    net.graph.initializer.append(numpy_helper.from_array(np.float32([1, 2]), "w"))
    onnx.save(net, tmp_path / "default.onnx")
    differences = gq.diff(tmp_path / "default.onnx", tmp_path / "required.onnx")
    assert entries(differences) == [
        ("op-changed", "w", "float32 [2] with a default value became float32 [2]", 0),
    ]


def test_added_and_removed_graphs(tmp_path: Path) -> None:
    """Branches that only one model has are reported by name."""
    branches = """[f] y = If (p) <
        then_branch = one () => (float[2] u) { u = Neg (x) }, else_branch = two () => (float[2] v) { v = Abs (x) }
    >"""
    texts = [f"net (bool p, float[2] x) => (float[2] y) {{ {body} }}" for body in ("[f] y = Relu (x)", branches)]
    graphs = {"f/then_branch", "f/else_branch"}
    for (first, second), message in ((texts, "this graph is new"), (texts[::-1], "this graph is gone")):
        differences = diff_texts(tmp_path / message, first, second)
        found = {change.location for change in differences.changes if change.message == message}
        assert (found, differences.counts["model"]) == (graphs, 2)


def stored_model(scale: Any, zero_point: Any, outputs: int = 2) -> Model:
    """Return a model of one op, with a scale and zero point that its file stores with the first output."""
    model = Model(format="tflite")
    model.graphs[""] = Graph("", model.graphs)
    stored = (
        None
        if scale is None
        else StoredQuantization(index=0, sizes=(), scale=np.float32(scale), zero_point=np.int64(zero_point))
    )
    tensors = (Output("t", "int8", None, stored), Output("u"))[:outputs]
    model.main.add_op(Op(name="op", kind="conv", type="CONV_2D", outputs=tensors))
    return model


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (([0.5], [3]), ([0.5], [3]), []),
        (([0.5, 1], [3, 3]), ([0.5, 0.25], [3, 3]), [("scale", "t", "0.5 to 1 became 0.25 to 0.5 (75%)", 0.75)]),
        (([0], [3]), ([0.5], [3]), [("scale", "t", "0 became 0.5 (50%)", 0.5)]),
        (([0.5], [3]), ([0.5], [4]), [("site-changed", "t", "other zero points, or another number of scales", 0)]),
        (([0.5], [3]), ([], []), [("site-changed", "t", "other zero points, or another number of scales", 0)]),
        (([0.5], [3]), (None, None), []),
        ((None, None), ([0.5], [3]), []),
        (([0.5], [3], 1), ([0.25], [3], 2), [("scale", "t", "0.5 became 0.25 (50%)", 0.5)]),
    ],
)
def test_stored_scales(first: tuple[Any, ...], second: tuple[Any, ...], expected: list[tuple[Any, ...]]) -> None:
    """Scales that TFLite files store with tensors are compared, with the largest relative change."""
    assert entries(gq.diff(stored_model(*first), stored_model(*second))) == expected


FAKE_QUANT = 'op: "FakeQuantWithMinMaxVars" input: "x" input: "low" input: "high"'
DYNAMIC = """op: "QuantizeAndDequantizeV4" input: "x" input: "low" input: "high"
    attr { key: "T" value { type: DT_FLOAT } } attr { key: "range_given" value { b: %s } }"""


def load_graph_def(path: Path, quantization: str, attrs: str = "") -> Model:
    """Load a TensorFlow graph whose Relu reads `x` through a quantization op."""
    constants = "".join(
        f"""node {{ name: "{name}" op: "Const" attr {{ key: "dtype" value {{ type: DT_FLOAT }} }}
        attr {{ key: "value" value {{ tensor {{ dtype: DT_FLOAT tensor_shape {{ }} float_val: {value} }} }} }} }}"""
        for name, value in (("low", -1), ("high", 1))
    )
    dtype = 'attr { key: "T" value { type: DT_FLOAT } }'
    path.write_text(f"""node {{ name: "x" op: "Placeholder" attr {{ key: "dtype" value {{ type: DT_FLOAT }} }} }}
        {constants} node {{ name: "q" {quantization} }}
        node {{ name: "y" op: "Relu" input: "q" {dtype} {attrs} }} versions {{ producer: 1200 }}""")
    return gq.load(path)


@pytest.mark.parametrize(
    ("first", "second", "messages"),
    [
        (FAKE_QUANT, FAKE_QUANT, []),
        (DYNAMIC % "false", DYNAMIC % "false", []),
        (
            FAKE_QUANT,
            DYNAMIC % "true",
            [
                "FakeQuantWithMinMaxVars became QuantizeAndDequantizeV4",
                "zero point -1 became 0",
                "0.00784314 became 0.00787402 (0.394%)",
            ],
        ),
        (
            DYNAMIC % "false",
            FAKE_QUANT,
            [
                "QuantizeAndDequantizeV4 became FakeQuantWithMinMaxVars",
                "int8, the range of each run became int8, scale 0.00784314, zero point -1",
            ],
        ),
        (
            DYNAMIC % "true",
            DYNAMIC % "false",
            ["int8, scale 0.00787402, zero point 0 became int8, the range of each run"],
        ),
    ],
)
def test_quantization_ops_of_tensorflow(tmp_path: Path, first: str, second: str, messages: list[str]) -> None:
    """Another op type is a change of the site, as is a range of each run in place of a fixed one."""
    models = [load_graph_def(tmp_path / f"{number}.pbtxt", text) for number, text in enumerate((first, second))]
    changes = gq.diff(*models).changes
    assert [change.message for change in changes] == messages
    assert {change.location for change in changes} <= {"x:0"}


def test_private_attributes_are_no_difference(tmp_path: Path) -> None:
    """Attributes whose name starts with an underscore are hints of TensorFlow."""
    attribute = 'attr { key: "%s" value { i: 1 } }'
    models = [
        load_graph_def(tmp_path / f"{name}.pbtxt", FAKE_QUANT, attribute % name) for name in ("_hint", "_other", "far")
    ]
    assert not gq.diff(*models[:2])
    assert entries(gq.diff(models[0], models[2])) == [("attribute", "y", "far: nothing became 1", 0)]


def test_weight_behind_an_identity(tmp_path: Path) -> None:
    """A frozen weight, which an Identity reads, is a weight and no scale of the quantization."""
    dtype = 'attr { key: "T" value { type: DT_FLOAT } }'
    models = []
    for value in (1, 3):
        path = tmp_path / f"{value}.pbtxt"
        path.write_text(f"""node {{ name: "x" op: "Placeholder" attr {{ key: "dtype" value {{ type: DT_FLOAT }} }} }}
            node {{ name: "w" op: "Const" attr {{ key: "dtype" value {{ type: DT_FLOAT }} }} attr {{ key: "value"
            value {{ tensor {{ dtype: DT_FLOAT tensor_shape {{ }} float_val: {value} }} }} }} }}
            node {{ name: "r" op: "Identity" input: "w" {dtype} }}
            node {{ name: "y" op: "Mul" input: "x" input: "r" {dtype} }} versions {{ producer: 1200 }}""")
        models.append(gq.load(path))
    assert entries(gq.diff(*models)) == [("weight", "w", "1 of 1 values differ, by up to 2", 2)]


def test_weights_and_variables_of_results(samples: Path, tmp_path: Path) -> None:
    """Results in memory differ in their integer weights. Variables of learned ranges are scales, not weights."""
    plan = gq.plan(samples / "digits_cnn.onnx", rules="fixed_point")
    results = [gq.insert(samples / "digits_cnn.onnx", plan=plan).model for _ in range(2)]
    assert not gq.diff(*results)
    weight = next(
        op
        for op in results[1].main.ops()
        if op.outputs and (op.kind, op.outputs[0].dtype, len(op.outputs[0].shape or ())) == ("constant", "int8", 4)
    )
    value = weight.read_value() // 2
    results[1].main.replace_op(replace(weight, read_value=lambda: value))
    assert gq.diff(*results).counts == {"weight": 1}
    rule = """[scheme.s]
        family = "fake-quant"
        range = "learned"
        observe = {{ name = "fixed", low = -8.0, high = {high} }}
        [[rule]]
        name = "r"
        consumer = {{ kind = "conv", input = "input" }}
        quantize = "s" """
    source = samples / "digits_cnn_saved_model"
    first, second = (gq.insert(source, rules=[rule.format(high=high)]) for high in (8.0, 4.0))
    assert gq.diff(first.model, second.model).counts == {"scale": len(first.inserted)}
    written = first.save(tmp_path / "written")
    for model in (first.model, written):  # a written model passes the variables to its functions
        assert gq.diff(source, model).counts == {"site-added": len(first.inserted)}
    assert gq.diff(written, second.save(tmp_path / "second")).counts == {"scale": len(first.inserted)}
