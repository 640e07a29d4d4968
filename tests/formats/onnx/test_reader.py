"""Loaded models: names, kinds, roles, types, bodies, constants, and errors for invalid files."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphquant.api.models import model_files
from graphquant.errors import ModelError, UsageError
from graphquant.formats import onnx as format_
from graphquant.formats.onnx import tensors
from graphquant.formats.onnx.reader import model_from_message
from graphquant.ir import Output, Parameters, TensorRef, Use

SAMPLES = Path(__file__).parents[3] / "sample_models"
HEAD = '<ir_version: 8, opset_import: ["" : 17]> '


def test_import_is_cheap() -> None:
    """Importing the package imports neither onnx nor onnxruntime."""
    code = "import sys, graphquant.formats.onnx; sys.exit('onnx' in sys.modules or 'onnxruntime' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names(load_text: Any) -> None:
    """Unnamed nodes get the name of their first output; duplicate names get that, then a suffix `_k`."""
    model = model_from_message(
        helper.make_model(
            helper.make_graph(
                [
                    helper.make_node("Neg", ["x"], ["a"], name="n"),
                    helper.make_node("Neg", ["a"], ["b"], name="n"),
                    helper.make_node("Neg", ["b"], ["y"], name="b"),
                    helper.make_node("Split", ["y"], ["", "z"], num_outputs=2),
                    helper.make_node("Neg", ["z"], ["x2"], name="x"),
                ],
                "g",
                [helper.make_tensor_value_info("x", 1, [2])],
                [helper.make_tensor_value_info("y", 1, [2])],
            ),
            opset_imports=[helper.make_opsetid("", 18)],
        )
    )
    assert list(model.main.nx) == ["x", "n", "b", "y", "z", "x2", "@y"]
    assert [out.name for out in model.main.op("z").outputs] == ["", "z"]
    assert model.main.slots("x2") == [TensorRef("", "z", 1)]
    assert model.opset == 18


KINDS = (
    HEAD
    + """g (float[1,4,8,8] x, float[N,3] m, float[8,4,3,3] w, float[4,1,3,3] d, float[3,5] k, float[5,3] t)
=> (float[N,5] y) <float zero = {0}, float six = {6}> {
    conv = Conv(x, w)
    depth = Conv <group = 4> (x, d)
    six6 = Clip(conv, zero, six)
    half = Clip(conv, zero)
    mm = MatMul(m, k)
    ga = Gemm(m, k)
    gb = Gemm <transB = 1> (m, t)
    own = com.microsoft.QuantizeLinear(mm, six, zero)
    foreign = custom.Conv(x, w)
    y = Identity(mm)
}"""
)


def test_kinds_roles_axes(load_text: Any) -> None:
    """Kind and channel axis follow from type, attributes and the shapes of weights."""
    main = load_text(KINDS.replace('["" : 17]', '["" : 17, "custom" : 1, "com.microsoft" : 1]')).main
    ops = {op.name: (op.kind, op.channel_axis) for op in main.ops() if op.source is not None and main.slots(op.name)}
    assert ops == {
        "conv": ("conv", 0),
        "depth": ("depthwise_conv", 0),
        "six6": ("relu6", None),
        "half": ("clip", None),
        "mm": ("matmul", 1),
        "ga": ("gemm", 1),
        "gb": ("gemm", 0),
        "own": ("quantize", None),
        "foreign": ("other", None),
        "y": ("identity", None),
        "@y": ("output", None),
    }
    assert main.op("conv").roles == ("input", "weight", "bias")
    assert main.op("conv").outputs == (Output("conv", "float32", (1, 8, 6, 6)),)
    assert main.op("mm").outputs == (Output("mm", "float32", (None, 5)),)


def test_attrs_are_decoded_when_read(load_text: Any) -> None:
    """Attributes come as numbers, text, lists and arrays; bodies do not."""
    main = load_text(
        HEAD + "g (float[1,4,8,8] x) => (float[1,4,7,7] y)"
        ' { y = MaxPool <kernel_shape = [2, 2], auto_pad = "VALID", storage_order = 0> (x) }'
    ).main
    assert dict(main.op("y").attrs) == {"kernel_shape": [2, 2], "auto_pad": "VALID", "storage_order": 0}


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("value = float[2] {1, 2}", np.array([1, 2], np.float32)),
        ("value_float = 1.5", np.array(1.5, np.float32)),
        ("value_floats = [1.0, 2.5]", np.array([1, 2.5], np.float32)),
        ("value_int = 3", np.array(3, np.int64)),
        ("value_ints = [3, 4]", np.array([3, 4], np.int64)),
        ('value_string = "a"', np.array("a", object)),
        ('value_strings = ["a", "b"]', np.array(["a", "b"], object)),
    ],
)
def test_constant_nodes(attribute: str, value: np.ndarray[Any, Any], load_text: Any) -> None:
    """Each form of a Constant node has its value."""
    main = load_text(HEAD + f"g (float[2] x) => (float[2] x2) {{ c = Constant <{attribute}> ()  x2 = Neg(x) }}").main
    op = main.op("c")
    assert op.kind == "constant"
    decoded = op.read_value()
    assert (decoded.dtype, decoded.tolist()) == (value.dtype, value.tolist())


def test_sparse_initializer() -> None:
    """A sparse initializer is a constant that is made dense when it is read, with flat or full indices."""
    for indices in (np.array([1, 3]), np.array([[0, 1], [1, 1]])):
        values = numpy_helper.from_array(np.array([5, 7], np.float32), "s")
        sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(indices.astype(np.int64), "i"), [2, 2])
        graph = helper.make_graph(
            [helper.make_node("Add", ["x", "s"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", 1, [2, 2])],
            [helper.make_tensor_value_info("y", 1, [2, 2])],
            sparse_initializer=[sparse],
        )
        op = model_from_message(helper.make_model(graph)).main.op("s")
        assert (op.kind, op.outputs) == ("constant", (Output("s", "float32", (2, 2)),))
        np.testing.assert_array_equal(op.read_value(), [[0, 5], [0, 7]])


def test_bodies_and_captures(load_text: Any) -> None:
    """Bodies are graphs named after their op, outer values are captures, and names of nested bodies nest."""
    model = load_text(
        HEAD
        + """g (float[2] x, bool c) => (float[2] y) <float[2] w = {1, 2}> {
        y = If(c) <
            then_branch = t () => (float[2] p) {
                p = If(c) <then_branch = u () => (float[2] s) { s = Add(x, w) },
                    else_branch = v () => (float[2] r) { r = Neg(x) }>
            },
            else_branch = e () => (float[2] q) { q = Abs(x) }
        >
    }"""
    )
    assert list(model.graphs) == [
        "",
        "y/then_branch",
        "y/else_branch",
        "y/then_branch/p/then_branch",
        "y/then_branch/p/else_branch",
    ]
    assert model.main.consumers(TensorRef("", "w")) == [Use("y/then_branch/p/then_branch", "s", 1)]
    assert [(c.attr, c.graph, c.offset) for c in model.main.op("y").calls] == [
        ("then_branch", "y/then_branch", None),
        ("else_branch", "y/else_branch", None),
    ]
    assert model.graphs["y/then_branch/p/then_branch"].op("s").outputs[0] == Output("s", "float32", (2,))


def test_loop_carried_values_are_no_parameters(load_text: Any) -> None:
    """A weight that a loop carries may change, so the body's input is no parameter; a captured one is."""
    model = load_text(
        HEAD
        + """g (int64 n, bool c, float[2] x) => (float[2] y) <float[2] w = {1, 2}> {
        y, z = Loop(n, c, x, w) <body = b (int64 i, bool k, float[2] s, float[2] v)
                => (bool k2, float[2] s2, float[2] v2) {
            k2 = Identity(k)
            s2 = Add(s, w)
            v2 = Add(v, s2)
        }>
    }"""
    )
    parameters = Parameters(model)
    assert not parameters.is_parameter(TensorRef("y/body", "v"))
    assert model.graphs["y/body"].source_of(Use("y/body", "s2", 1)) == TensorRef("", "w")


def test_function_calls_pass_parameters(load_text: Any) -> None:
    """A function is a graph, and its argument is a parameter if its callers pass one."""
    model = load_text("""<ir_version: 8, opset_import: ["" : 17, "f" : 1]>
    g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = f.fn(x, w) }
    <domain: "f", opset_import: ["" : 17]> fn (a, b) => (c) { c = Mul(a, b) }""")
    assert (model.main.op("y").kind, model.main.op("y").calls[0].graph) == ("call", "f:fn")
    parameters = Parameters(model)
    assert not parameters.is_parameter(TensorRef("f:fn", "a"))
    np.testing.assert_array_equal(parameters.value(TensorRef("f:fn", "b")), [1, 2])


CALLED_FUNCTION = """<ir_version: 8, opset_import: ["" : 17, "f" : 1]>
g (bool p, float[2,3] x, float[OTHER] z) => (float[] y, float[] v) <float[3,4] w = {1,2,3,4,5,6,7,8,9,10,11,12}> {
    y = f.fn(p, x, w)
    v = f.fn(p, z, w)
}
<domain: "f", opset_import: ["" : 17]> fn (q, a, b) => (c) {
    m = MatMul(a, b)
    c = If (q) <then_branch = th () => (d) { d = Relu (m) }, else_branch = el () => (e) { e = MatMul (a, b) }>
}"""


@pytest.mark.parametrize(("other", "rows"), [("2,3", 2), ("5,3", None), ("7,2,3", "all")])
def test_function_values_have_the_types_of_their_calls(load_text: Any, other: str, rows: Any) -> None:
    """A function and its bodies have the types and sizes on which all calls agree."""
    model = load_text(CALLED_FUNCTION.replace("OTHER", other))
    shapes = {name: None if rows == "all" else (rows, columns) for name, columns in (("a", 3), ("m", 4))}
    for name, shape in {**shapes, "b": (3, 4)}.items():
        output = model.graphs["f:fn"].op(name).outputs[0]
        assert (output.dtype, output.shape) == ("float32", shape), name
    assert model.graphs["f:fn"].op("q").outputs[0].dtype == "bool"
    for branch, name in (("then_branch", "d"), ("else_branch", "e")):
        output = model.graphs[f"f:fn/c/{branch}"].op(name).outputs[0]
        assert (output.dtype, output.shape) == ("float32", shapes["m"])


def test_calls_with_other_types(load_text: Any) -> None:
    """A value that is float in one call and integer in another has no type."""
    model = load_text("""<ir_version: 8, opset_import: ["" : 17, "f" : 1]>
    g (float[2] x, int64[2] i) => (float[2] y, int64[2] j) { y = f.fn(x) j = f.fn(i) }
    <domain: "f", opset_import: ["" : 17]> fn (a) => (c) { c = Add(a, a) }""")
    assert [model.graphs["f:fn"].op(name).outputs[0].dtype for name in "ac"] == [None, None]


def test_chain_of_constants_is_evaluated(load_text: Any) -> None:
    """A weight that passes through Slice, Transpose and Squeeze has a value."""
    model = load_text(
        HEAD
        + """g (float[2] x) => (float[2] y)
    <float[1,2,3] w = {1, 2, 3, 4, 5, 6}, int64[1] a = {1}, int64[1] b = {2}, int64[1] zero = {0}> {
        s = Slice(w, a, b, b)
        t = Transpose <perm = [0, 2, 1]> (s)
        v = Squeeze(t, zero)
        u = Squeeze(v, zero)
        y = Add(x, u)
    }"""
    )
    np.testing.assert_array_equal(Parameters(model).value(TensorRef("", "u")), [2, 5])


def test_bomb_of_constants_is_refused(load_text: Any) -> None:
    """A small constant that expands beyond memory has no value."""
    model = load_text(
        HEAD
        + """g (float[2] x) => (float[2] y)
    <float[1] w = {1}, int64[2] big = {1000000, 1000000}> { e = Expand(w, big)  y = Neg(x) }"""
    )
    inputs = [np.ones(1, np.float32), np.array([1_000_000, 1_000_000])]
    assert model.source.evaluate_op(model.main.op("e"), inputs) is None
    assert Parameters(model).value(TensorRef("", "e")) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("g (float[2] x) => (float[2] y) { y = Neg(nothing) }", "'y' reads 'nothing'"),
        ("g (float[2] x) => (float[2] y) { y = Neg(x)  y = Abs(x) }", "Several ops .* 'y'"),
        ("g (float[2] x) => (float[2] y) { x = Neg(x)  y = Abs(x) }", "Several ops .* 'x'"),
        ("g (float[2] x) => (float[2] y) { a = Neg(y)  y = Abs(a) }", "cycle"),
        ("g (float[2] x) => (float[2] z) { y = Abs(x) }", "reads 'z'"),
    ],
)
def test_inconsistent_models_are_rejected(text: str, message: str) -> None:
    """Duplicate producers, missing producers and cycles are errors that name the value."""
    with pytest.raises(ModelError, match=message):
        model_from_message(onnx.parser.parse_model(HEAD + text))


def test_unsorted_nodes_are_read(load_text: Any) -> None:
    """Nodes out of order are no error, as onnxruntime takes them too."""
    model = load_text(HEAD + "g (float[2] x) => (float[2] y) { y = Neg(a)  a = Abs(x) }")
    assert model.main.slots("y") == [TensorRef("", "a")]
    assert format_.emit(model) == model.source.message


def model_with_raw_initializer(shape: list[int], raw: bytes) -> onnx.ModelProto:
    """Return a model with an initializer of given shape and bytes."""
    tensor = TensorProto(name="w", data_type=1, dims=shape, raw_data=raw)
    graph = helper.make_graph(
        [helper.make_node("Neg", ["w"], ["y"])], "g", [], [helper.make_tensor_value_info("y", 1, None)], [tensor]
    )
    return helper.make_model(graph)


def test_negative_size() -> None:
    """A negative size is an error at load."""
    with pytest.raises(ModelError, match=r"'w' has the shape \[-1\]"):
        model_from_message(model_with_raw_initializer([-1], b""))


@pytest.mark.parametrize("shape", [[3], [1 << 40, 1 << 40]])
def test_wrong_length_when_read(shape: list[int]) -> None:
    """Data of the wrong length is an error when it is read, not before."""
    model = model_from_message(model_with_raw_initializer(shape, struct.pack("<f", 1)))
    with pytest.raises(ModelError, match=r"data .*'w' .*fit its shape"):
        model.main.op("w").read_value()


def test_unknown_element_type(tmp_path: Path) -> None:
    """The size of external data of an unknown type is an error when a session is opened."""
    message = model_with_raw_initializer([2], b"")
    message.graph.initializer[0].CopyFrom(TensorProto(name="w", data_type=99, dims=[2], data_location="EXTERNAL"))
    message.graph.initializer[0].external_data.add(key="location", value="weights.bin")
    (tmp_path / "weights.bin").write_bytes(bytes(8))
    onnx.save(message, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"'w' .*type 99"):
        format_.create_runner(format_.load(tmp_path / "m.onnx")).run({})


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """A name that is not UTF-8 is an error anywhere in the model."""
    graph = helper.make_graph(
        [helper.make_node("NNNN", ["IIII"], ["OOOO"], name="MMMM", domain="DDDD")],
        "GGGG",
        [helper.make_tensor_value_info("IIII", 1, [2])],
        [helper.make_tensor_value_info("OOOO", 1, [2])],
    )
    message = helper.make_model(graph, producer_name="PPPP", doc_string="TTTT")
    helper.set_model_props(message, {"KKKK": "VVVV"})
    message.opset_import.add(domain="SSSS", version=1)
    message.graph.node[0].attribute.add(name="AAAA", type=onnx.AttributeProto.FLOAT, doc_string="WWWW")
    message.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "LLLL"
    message.graph.initializer.add(name="EEEE", data_type=1, dims=[1]).external_data.add(key="HHHH", value="JJJJ")
    data = message.SerializeToString()
    for letter in "NIOMDGPTKVSAWLEHJ":
        assert letter.encode() * 4 in data
        (tmp_path / "m.onnx").write_bytes(data.replace(letter.encode() * 4, b"ab\xff\xfe"))
        with pytest.raises(ModelError, match="not valid UTF-8"):
            format_.load(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("empty.onnx", b""),
        ("garbage.onnx", b"\xff" * 100),
        ("text.onnx", b"this is no model"),
        ("nograph.onnx", b"\x08\x07"),
        ("garbage.json", b"{"),
        ("deep.json", b'{"graph":' * 5000),
        ("latin.textproto", b"\xe9"),
        ("garbage.textproto", b"graph {"),
        ("garbage.onnxtxt", b"<"),
        ("integer.onnxtxt", b"<ir_version: 99999999999999999999> g () => () {}"),
        ("deep.onnxtxt", b"<ir_version: 8> g () => () {" + b"y = If(c)<t = g () => () {" * 100_000),
        ("deep.textproto", b"graph { node { attribute { g { " * 20_000),
    ],
)
def test_hostile_files(name: str, data: bytes, tmp_path: Path) -> None:
    """An invalid model is an error that names the file."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelError, match=name):
        format_.load(tmp_path / name)


def test_malformed_float(tmp_path: Path) -> None:
    """A float without the digits of its exponent is an error that names the file, if onnx does not accept it."""
    path = tmp_path / "float.onnxtxt"
    path.write_text('<ir_version: 8, opset_import: ["" : 13]> g () => () <float[1] w = {0.07e}> {}', "utf-8")
    try:
        onnx.parser.parse_model(path.read_text("utf-8"))
    except RuntimeError:
        with pytest.raises(ModelError, match=path.name):
            format_.load(path)
    else:
        assert format_.load(path).main.op("w").read_value() == np.float32(0.07)


def test_truncated_file_and_missing_file(tmp_path: Path) -> None:
    """A truncated file and a missing file are errors that name the file."""
    data = model_with_raw_initializer([1], struct.pack("<f", 1)).SerializeToString()
    refused = 0
    for length in range(len(data)):
        (tmp_path / "cut.onnx").write_bytes(data[:length])
        try:
            format_.load(tmp_path / "cut.onnx")
        except ModelError as error:
            assert "cut.onnx" in str(error)  # noqa: PT017 - whole fields may be missing without a trace
            refused += 1
    assert refused > len(data) - 10
    with pytest.raises(ModelError, match=r"none\.onnx cannot be read"):
        format_.load(tmp_path / "none.onnx")


def test_deep_nesting_is_refused() -> None:
    """Bodies nested beyond what the binary form holds are an error."""
    inner = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])], "g", [], [helper.make_empty_tensor_value_info("y")]
    )
    for _ in range(32):
        node = helper.make_node("If", ["c"], ["y"], then_branch=inner)
        inner = helper.make_graph([node], "g", [], [helper.make_empty_tensor_value_info("y")])
    graph = helper.make_graph(
        list(inner.node),
        "g",
        [helper.make_tensor_value_info("x", 1, [2]), helper.make_tensor_value_info("c", 9, [])],
        list(inner.output),
    )
    with pytest.raises(ModelError, match="deep"):
        model_from_message(helper.make_model(graph))


# -- external data -------------------------------------------------------------------------------


def write_external_model(folder: Path, location: str, **entries: str) -> Path:
    """Write a model whose weight, two floats, is in another file."""
    tensor = TensorProto(name="w", data_type=1, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 1, [2])],
        [helper.make_tensor_value_info("y", 1, [2])],
        [tensor],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
    folder.mkdir(exist_ok=True)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


@pytest.fixture
def folder_of_floats(tmp_path: Path) -> Path:
    """Return a folder with a file of four floats in it and another outside."""
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    (home / "data/w.bin").write_bytes(struct.pack("<4f", 1, 2, 3, 4))
    (tmp_path / "secret.bin").write_bytes(struct.pack("<4f", 1, 2, 3, 4))
    (home / "link.bin").symlink_to(tmp_path / "secret.bin")
    return home


def test_external_data_that_is_truncated_while_it_is_read(
    folder_of_floats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that were read stay valid when the file is truncated, and later reads are errors, at any moment."""
    model = format_.load(write_external_model(folder_of_floats, "data/w.bin", offset="8", length="8"))
    value, weights = model.main.op("w").read_value(), folder_of_floats / "data/w.bin"

    def truncate_first(path: Path, *arguments: Any, read: Any = np.fromfile, **options: Any) -> Any:
        weights.write_bytes(b"")
        return read(path, *arguments, **options)

    monkeypatch.setattr("graphquant.formats.onnx.tensors.np.fromfile", truncate_first)
    for _ in range(2):  # between the check of the size and the read, and before the check
        with pytest.raises(ModelError, match=r"w\.bin"):
            model.main.op("w").read_value()
    np.testing.assert_array_equal(value, [3, 4])


def test_external_data_is_read_and_run(folder_of_floats: Path) -> None:
    """External data is read when needed; sessions, upgrades and copies of the model in other folders find it."""
    model = format_.load(write_external_model(folder_of_floats, "data/w.bin", offset="8", length="8"))
    value = model.main.op("w").read_value()
    assert isinstance(value, np.memmap)
    np.testing.assert_array_equal(value, [3, 4])
    x = {"x": np.array([1, 1], np.float32)}
    np.testing.assert_array_equal(format_.create_runner(model).run(x)["y"], [4, 5])
    np.testing.assert_array_equal(format_.create_runner(format_.upgrade_opset(model, 13)).run(x)["y"], [4, 5])
    output_folder = folder_of_floats.parent / "other"
    output_folder.mkdir()
    format_.save(model, output_folder / "n.onnx")
    assert sorted(path.name for path in output_folder.rglob("*")) == ["data", "n.onnx", "w.bin"]
    np.testing.assert_array_equal(format_.load(output_folder / "n.onnx").main.op("w").read_value(), [3, 4])
    format_.save(model, output_folder / "n.onnx")


@pytest.mark.parametrize("name", ["digits_cnn", "digits_rnn"])
def test_external_shapes_are_known_to_inference(name: str, tmp_path: Path) -> None:
    """A model has the same types with its constants inline and in an external file."""
    inline_model = format_.load(SAMPLES / f"{name}.onnx")
    message = onnx.load(SAMPLES / f"{name}.onnx")
    options = {"save_as_external_data": True, "location": "data.bin", "size_threshold": 0}
    onnx.save(message, tmp_path / "model.onnx", convert_attribute=True, **options)
    external_model = format_.load(tmp_path / "model.onnx")
    assert list(external_model.graphs) == list(inline_model.graphs)
    for graph in inline_model.graphs.values():
        for op in graph.ops():
            external_op = external_model.graphs[graph.name].op(op.name)
            assert [(out.dtype, out.shape) for out in external_op.outputs] == [
                (out.dtype, out.shape) for out in op.outputs
            ]


def test_missing_external_shapes_are_left_out(folder_of_floats: Path) -> None:
    """A shape whose file is missing or elsewhere is unknown, and the model loads."""
    text = HEAD + """g (float[4] x) => (float[2,2] y) <int64[2] s = {2, 2}> { y = Reshape(x, s) }"""
    for location in ("none.bin", "../secret.bin"):
        message = onnx.parser.parse_model(text.replace("float[2,2] y", "float[N,M] y"))
        (shape,) = message.graph.initializer
        shape.ClearField("int64_data")
        shape.data_location = onnx.TensorProto.EXTERNAL
        shape.external_data.add(key="location", value=location)
        (folder_of_floats / "n.onnx").write_bytes(message.SerializeToString())
        assert format_.load(folder_of_floats / "n.onnx").main.op("y").outputs[0].shape == (None, None)


def test_external_data_is_not_overwritten(folder_of_floats: Path) -> None:
    """A file with other data at the location of the link is an error, and nothing is written."""
    model = format_.load(write_external_model(folder_of_floats, "data/w.bin"))
    (folder_of_floats.parent / "other/data").mkdir(parents=True)
    (folder_of_floats.parent / "other/data/w.bin").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"w\.bin already exists"):
        format_.save(model, folder_of_floats.parent / "other/n.onnx")
    assert (folder_of_floats.parent / "other/data/w.bin").read_bytes() == b"mine"
    assert not (folder_of_floats.parent / "other/n.onnx").exists()


@pytest.mark.parametrize(
    ("location", "entries", "message"),
    [
        ("../secret.bin", {}, "outside .*Move"),
        ("/etc/hostname", {}, "outside .*Move"),
        ("link.bin", {}, "link to .*outside"),
        ("", {}, "outside .*Move"),
        ("C:\\w.bin", {}, "outside .*Move"),
        ("data\0/w.bin", {}, "outside .*Move"),
        ("data", {}, "no such file"),
        ("data/none.bin", {}, "no such file"),
        ("data/w.bin", {"offset": "12"}, "truncated"),
        ("data/w.bin", {"offset": "-4"}, "truncated"),
        ("data/w.bin", {"length": "16"}, "truncated"),
        ("data/w.bin", {"offset": "x"}, "not a number"),
    ],
)
def test_unsuitable_external_data(location: str, entries: dict[str, str], message: str, folder_of_floats: Path) -> None:
    """External data that is outside the folder, missing, or of another length is an error that names the tensor."""
    model = format_.load(write_external_model(folder_of_floats, location, **entries))
    with pytest.raises(ModelError, match=message) as caught:
        model.main.op("w").read_value()
    assert "'w'" in str(caught.value)


def test_links_out_of_the_folder_need_the_option(tmp_path: Path) -> None:
    """In the layout of the Hugging Face cache, model and data are links: read, run and written with the option."""
    snapshot, blobs = tmp_path / "snapshots/a", tmp_path / "blobs"
    blobs.mkdir()
    write_external_model(blobs, "w.bin", offset="8", length="8").rename(blobs / "x")
    (blobs / "y").write_bytes(struct.pack("<4f", 1, 2, 3, 4))
    snapshot.mkdir(parents=True)
    (snapshot / "m.onnx").symlink_to("../../blobs/x")
    (snapshot / "w.bin").symlink_to("../../blobs/y")
    path = snapshot / "m.onnx"
    with pytest.raises(ModelError, match="--allow-links"):
        format_.load(path).main.op("w").read_value()
    with pytest.raises(ModelError, match="--allow-links"):
        model_files(path)
    assert model_files(path, allow_links=True) == (path, snapshot / "w.bin")
    model = format_.load(path, allow_links=True)
    np.testing.assert_array_equal(model.main.op("w").read_value(), [3, 4])
    x = {"x": np.array([1, 1], np.float32)}
    np.testing.assert_array_equal(format_.create_runner(model).run(x)["y"], [4, 5])
    (tmp_path / "out").mkdir()
    format_.save(model, tmp_path / "out/n.onnx")
    shutil.rmtree(blobs)
    np.testing.assert_array_equal(format_.create_runner(format_.load(tmp_path / "out/n.onnx")).run(x)["y"], [4, 5])


def test_save_leaves_nothing_behind_when_it_fails(tmp_path: Path, load_text: Any) -> None:
    """A folder that is a file is an error that names the path, and no file remains."""
    model = load_text(HEAD + "g (float[2] x) => (float[2] y) { y = Neg(x) }")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=rf"file/m\.onnx .*: {os.strerror(errno.EEXIST)}"):
        format_.save(model, tmp_path / "file/m.onnx")
    (tmp_path / "file").unlink()
    (tmp_path / "m.onnx").mkdir()
    with pytest.raises(UsageError, match=r"m.onnx cannot be written"):
        format_.save(model, tmp_path / "m.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def make_function(name: str, *calls: str) -> Any:
    """Return a function of one input and output that calls others in sequence."""
    names = ["a", *(f"t{index}" for index in range(len(calls) - 1)), "b"]
    nodes = [
        helper.make_node(call, [names[index]], [names[index + 1]], domain="" if call == "Relu" else "d")
        for index, call in enumerate(calls)
    ]
    return helper.make_function("d", name, ["a"], ["b"], nodes, [helper.make_opsetid("", 17)])


def model_with_functions(*functions: Any) -> Any:
    """Return a ModelProto that calls F0."""
    interface = [[helper.make_tensor_value_info(name, 1, [2])] for name in "xy"]
    graph = helper.make_graph([helper.make_node("F0", ["x"], ["y"], domain="d")], "g", *interface)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
    return helper.make_model(graph, functions=functions, opset_imports=imports)


def test_recursive_or_exponential_functions_are_rejected() -> None:
    """Recursive functions, and functions that would be inlined 2**40 times, are rejected before onnx inlines them."""
    with pytest.raises(ModelError, match="calls itself"):
        model_from_message(model_with_functions(make_function("F0", "F0")))
    with pytest.raises(ModelError, match="calls itself"):
        model_from_message(model_with_functions(make_function("F0", "F1"), make_function("F1", "F0")))
    towers = [make_function(f"F{level}", *[f"F{level + 1}"] * 2) for level in range(40)]
    with pytest.raises(ModelError, match="1099511627776 nodes"):
        model_from_message(model_with_functions(*towers, make_function("F40", "Relu")))
    model = model_from_message(model_with_functions(*towers[:8], make_function("F8", "Relu")))
    assert len(model.graphs) == 10


@pytest.mark.parametrize(
    "nodes",
    [
        ["w = Range(zero, n, one)", "y = Cast <to = 1> (w)"],
        ["s = Shape(x)", "k = Slice(s, zero1, one1)", "t = Tile(k, n1)", "y = Cast <to = 1> (t)"],
        ["a = Concat <axis = 0> (many, many)", *(["a = Concat <axis = 0> (a, a)"] * 14), "y = Cast <to = 1> (a)"],
        ["y = Cast <to = 1> (i)"],
    ],
)
def test_long_vectors_are_not_computed(nodes: list[str]) -> None:
    """Shape inference does not allocate vectors of 2**26 integers that a small file requests."""
    lines = []
    for number, line in enumerate(nodes):  # each value of one name is another
        lines.append(line.replace("(a, a)", f"(a{number - 1}, a{number - 1})").replace("a =", f"a{number} =", 1))
    lines[-1] = lines[-1].replace("(a)", f"(a{len(nodes) - 2})")
    text = (
        HEAD
        + "g (float[67108864,3] x, int64[67108864] i) => (float[] y) <int64 zero = {0}, int64 one = {1}, int64 n = "
        + "{67108864}, int64[1] zero1 = {0}, int64[1] one1 = {1}, int64[1] n1 = {67108864}, int64[1000] many = {"
        + ", ".join(["1"] * 1000)
        + "}> { "
        + " ".join(f"{line};" for line in lines).replace(";", "").replace(") ", ")\n")
        + " }"
    )
    code = f"""
import resource, onnx
from graphquant.formats.onnx import tensors
from graphquant.formats.onnx.reader import model_from_message
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model_from_message(onnx.parser.parse_model({text!r}))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    completed = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 0, completed.stderr
    assert int(completed.stdout) < 200_000


def test_values_of_a_shape_are_still_found(load_text: Any) -> None:
    """A Reshape to a shape that ops compute keeps its static sizes."""
    model = load_text(
        HEAD
        + "g (float[2,3,4] x) => (float[?,?] y) <int64 zero = {0}, int64[1] rest = {-1}, int64[1] ax = {0}> {"
        + " s = Shape(x)\n b = Gather(s, zero)\n u = Unsqueeze(b, ax)\n c = Concat <axis = 0> (u, rest)\n"
        + " r = Reshape(x, c)\n y = Relu(r) }"
    )
    assert model.main.op("r").outputs[0].shape == (2, 12)


def test_sparse_values_are_written_out_in_bounds() -> None:
    """A sparse tensor of 2**28 elements that stores one value is rejected."""
    sparse = onnx.SparseTensorProto(dims=[1 << 14, 1 << 14])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "w"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.zeros(1, np.int64), "i"))
    interface = [[helper.make_tensor_value_info(name, 1, [1 << 14, 1 << 14])] for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], "g", *interface, sparse_initializer=[sparse]
    )
    value = model_from_message(helper.make_model(graph)).main.op("w").read_value
    assert value is not None
    with pytest.raises(ModelError, match="At most 16777216 elements"):
        value()


@pytest.mark.parametrize("location", ["loop", "n" * 300, "n" * 100_000])
def test_external_data_at_no_path(tmp_path: Path, location: str) -> None:
    """A link to itself and names too long for the file system are rejected like missing files."""
    (tmp_path / "loop").symlink_to("loop")
    tensor = TensorProto(name="w", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    with pytest.raises(ModelError, match=r"external data .*'w'"):
        tensors.tensor_value(tensor, tmp_path)


@pytest.mark.parametrize("opset", [-(1 << 63), -1, 1 << 31])
def test_opsets_that_do_not_exist(opset: int) -> None:
    """A damaged opset number is an error of the model."""
    message = onnx.parser.parse_model(f"{HEAD}g (float[1] x) => (float[1] y) {{ y = Relu(x) }}")
    message.opset_import[0].version = opset
    with pytest.raises(ModelError, match=str(opset)):
        model_from_message(message)
