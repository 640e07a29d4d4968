"""Edits of small graphs written as text: the emitted model is valid and has only the requested changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from support.onnx_models import run_onnx
from support.shared_models import SHARED_MODELS
from support.stand_ins import ONNX_STAND_INS

from graphquant.errors import ModelError
from graphquant.formats import onnx as format_
from graphquant.formats.onnx.reader import model_from_message
from graphquant.ir import Op, Output, TensorRef, Use, check_invariants

Array = np.ndarray[Any, Any]

ROOT = Path(__file__).resolve().parents[3]
MODELS = [
    *sorted(path for path in (ROOT / "sample_models").glob("*.onnx") if ".quant" not in path.suffixes),
    *ONNX_STAND_INS,
    *sorted(SHARED_MODELS.glob("silero*.onnx")),
    *sorted(SHARED_MODELS.glob("*/*.onnx")),
]

NOT_OF_SIZE_ONE = {"occ_model0.onnx"}
"""Models that do not run with their open sizes set to 1."""

CHAIN = """<ir_version: 10, opset_import: ["" : 21]>
g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> {
    a = Add(x, w)
    b = Mul(a, a)
    y = Sub(b, w)
}"""

BRANCHES = """<ir_version: 8, opset_import: ["" : 17]>
g (float[2] x, bool c) => (float[2] y) <float[2] w = {1, 2}> {
    a = Add(x, w)
    y = If(c) <
        then_branch = t () => (float[2] p) { q = Relu(a)  p = Mul(q, w) },
        else_branch = e () => (float[2] r) { r = Neg(a) }
    >
}"""

VOICE_INPUT_SHAPES = {"input": [1, 576], "state": [2, 1, 128]}
"""Sizes of the voice detector's inputs."""

X = np.array([-3, 4], np.float32)


def node_signatures(message: Any) -> list[tuple[str, list[str], list[str]]]:
    """Return type, inputs and outputs of each node of the main graph."""
    return [(node.op_type, list(node.input), list(node.output)) for node in message.graph.node]


def test_new_node_precedes_its_first_reader(load_text: Any, identity_at: Any) -> None:
    """A new node comes right before its first reader, records its rule, and only the given use reads it."""
    model = load_text(CHAIN)
    identity_at(model, TensorRef("", "a"), [Use("", "b", 1)])
    message = format_.emit(model)
    assert node_signatures(message) == [
        ("Add", ["x", "w"], ["a"]),
        ("Identity", ["a"], ["a/quant"]),
        ("Mul", ["a", "a/quant"], ["b"]),
        ("Sub", ["b", "w"], ["y"]),
    ]
    assert [(p.key, p.value) for p in message.graph.node[1].metadata_props] == [("graphquant.rule", "test-rule")]
    assert [p.key for p in message.metadata_props] == ["graphquant.version"]
    assert [(info.name, info.type.tensor_type.elem_type) for info in message.graph.value_info] == [("a/quant", 1)]
    np.testing.assert_array_equal(run_onnx(model, {"x": X}, check=True)[0], [3, 34])


def test_no_node_metadata_before_ir_version_10(load_text: Any, identity_at: Any) -> None:
    """A model whose IR version has no node metadata gets none."""
    model = load_text(BRANCHES)
    identity_at(model, TensorRef("", "a"))
    assert all(not node.metadata_props for node in format_.emit(model).graph.node)


@pytest.mark.parametrize(("tensor", "uses"), [("x", 1), ("w", 2), ("b", 1)])
def test_input_initializer_and_shared(tensor: str, uses: int, load_text: Any, identity_at: Any) -> None:
    """All readers of an input, of a shared initializer or of an op's output read the new node."""
    model = load_text(CHAIN)
    assert len(model.main.consumers(TensorRef("", tensor))) == uses
    identity_at(model, TensorRef("", tensor))
    readers = [node for node in format_.emit(model).graph.node if f"{tensor}/quant" in node.input]
    assert len(readers) == uses
    np.testing.assert_array_equal(run_onnx(model, {"x": X}, check=True)[0], [3, 34])


def test_graph_output_keeps_its_name(load_text: Any, identity_at: Any) -> None:
    """The new tensor takes the output's name, and the float value before it gets a new one."""
    model = load_text(CHAIN)
    identity_at(model, TensorRef("", "y"))
    message = format_.emit(model)
    assert node_signatures(message)[-2:] == [("Sub", ["b", "w"], ["y/float"]), ("Identity", ["y/float"], ["y"])]
    assert [info.name for info in message.graph.output] == ["y"]
    assert [info.name for info in message.graph.value_info] == ["y/float"]
    np.testing.assert_array_equal(run_onnx(model, {"x": X}, check=True)[0], [3, 34])


def test_output_that_is_read_too(load_text: Any, identity_at: Any) -> None:
    """Other readers of a renamed value follow it, in bodies as well."""
    model = load_text("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[2] x, bool c) => (float[2] y, float[2] z) {
        y = Relu(x)
        z = If(c) <then_branch = t () => (float[2] p) { p = Neg(y) }, else_branch = e () => (float[2] q) { q = Abs(y) }>
    }""")
    identity_at(model, TensorRef("", "y"), [Use("", "@y", 0)])
    message = format_.emit(model)
    assert list(message.graph.node[1].attribute[0].g.node[0].input) == ["y/float"]
    y, z = run_onnx(model, {"x": X, "c": np.array(True)}, check=True)
    np.testing.assert_array_equal(y, [0, 4])
    np.testing.assert_array_equal(z, [0, -4])


def test_outputs_that_swap(load_text: Any) -> None:
    """Two outputs may read each other's tensors; both keep their names."""
    model = load_text("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[2] x) => (float[2] y, float[2] z) { y = Neg(x)  z = Abs(x) }""")
    model.main.set_source(Use("", "@y", 0), TensorRef("", "z"))
    model.main.set_source(Use("", "@z", 0), TensorRef("", "y"))
    assert node_signatures(format_.emit(model)) == [("Neg", ["x"], ["z"]), ("Abs", ["x"], ["y"])]
    y, z = run_onnx(model, {"x": X}, check=True)
    np.testing.assert_array_equal(y, [3, 4])
    np.testing.assert_array_equal(z, [3, -4])


@pytest.mark.parametrize("source", ["x", "w", "z"])
def test_output_that_needs_a_copy(source: str, load_text: Any) -> None:
    """An output that now reads an input, an initializer or another output's tensor gets an Identity of its name."""
    model = load_text("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[2] x) => (float[2] y, float[2] z) <float[2] w = {1, 2}> { y = Neg(x)  z = Add(x, w) }""")
    model.main.reroute(TensorRef("", "y"), [Use("", "@y", 0)], TensorRef("", source))
    assert node_signatures(format_.emit(model))[-1] == ("Identity", [source], ["y"])
    np.testing.assert_array_equal(
        run_onnx(model, {"x": X}, check=True)[0], {"x": [-3, 4], "w": [1, 2], "z": [-2, 6]}[source]
    )


def test_output_that_is_an_initializer(load_text: Any, identity_at: Any) -> None:
    """An initializer that is an output gets a new name, and the output keeps its own."""
    model = load_text("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[2] x) => (float[2] w, float[2] z) <float[2] w = {1, 2}> { z = Add(x, w) }""")
    identity_at(model, TensorRef("", "w"), [Use("", "@w", 0)])
    message = format_.emit(model)
    assert [tensor.name for tensor in message.graph.initializer] == ["w/float"]
    w, z = run_onnx(model, {"x": X}, check=True)
    np.testing.assert_array_equal(w, [1, 2])
    np.testing.assert_array_equal(z, [-2, 6])


def test_output_that_is_the_input(load_text: Any, identity_at: Any) -> None:
    """Inserting an op between an input and an output of the same name is an error."""
    model = load_text('<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] x) { y = Neg(x) }')
    identity_at(model, TensorRef("", "x"), [Use("", "@x", 0)])
    with pytest.raises(ModelError, match=r"'x' .*graph input"):
        format_.emit(model)


def test_captured_tensor_is_quantized_before_the_if(load_text: Any, identity_at: Any) -> None:
    """A tensor captured by both branches is quantized once, before the If that owns them."""
    model = load_text(BRANCHES)
    identity_at(model, TensorRef("", "a"))
    message = format_.emit(model)
    assert [node.op_type for node in message.graph.node] == ["Add", "Identity", "If"]
    branches = [attr.g for attr in message.graph.node[-1].attribute]
    assert [list(body.node[0].input) for body in branches] == [["a/quant"], ["a/quant"]]
    np.testing.assert_array_equal(run_onnx(model, {"x": X, "c": np.array(True)}, check=True)[0], [0, 12])
    np.testing.assert_array_equal(run_onnx(model, {"x": X, "c": np.array(False)}, check=True)[0], [2, -6])


@pytest.mark.parametrize("tensor", ["q", "p"])
def test_tensor_inside_a_body(tensor: str, load_text: Any, identity_at: Any) -> None:
    """A tensor of a body is quantized in the body, even if it is the body's output."""
    model = load_text(BRANCHES)
    identity_at(model, TensorRef("y/then_branch", tensor))
    body = format_.emit(model).graph.node[-1].attribute[0].g
    assert [node.op_type for node in body.node].count("Identity") == 1
    assert [info.name for info in body.output] == ["p"]
    np.testing.assert_array_equal(run_onnx(model, {"x": X, "c": np.array(True)}, check=True)[0], [0, 12])


def test_capture_quantized_in_the_body(load_text: Any, identity_at: Any) -> None:
    """A new node of a body may read an outer value."""
    model = load_text(BRANCHES)
    identity_at(model, TensorRef("", "w"), [Use("y/then_branch", "p", 1)], graph_name="y/then_branch")
    body = format_.emit(model).graph.node[-1].attribute[0].g
    assert [node.op_type for node in body.node] == ["Relu", "Identity", "Mul"]
    np.testing.assert_array_equal(run_onnx(model, {"x": X, "c": np.array(True)}, check=True)[0], [0, 12])


def test_qdq_pair_with_constants(load_text: Any) -> None:
    """Scale and zero point become initializers, and the pair rounds to its grid."""
    model = load_text(CHAIN)
    graph = model.main
    scale = graph.add_op(constant_op("s", np.array(0.5, np.float32)))
    zero = graph.add_op(constant_op("z", np.array(3, np.int8)))
    pair = TensorRef("", "a")
    for kind, type_, dtype in (("quantize", "QuantizeLinear", "int8"), ("dequantize", "DequantizeLinear", "float32")):
        op = Op(name=f"a/{kind}", kind=kind, type=type_, outputs=(Output(f"a/{kind}", dtype, (2,)),), rule="r")
        pair = graph.add_op(op, [pair, scale, zero])
    graph.reroute(TensorRef("", "a"), [Use("", "b", 0), Use("", "b", 1)], pair)
    message = format_.emit(model)
    assert [tensor.name for tensor in message.graph.initializer] == ["w", "s", "z"]
    np.testing.assert_array_equal(
        run_onnx(model, {"x": np.array([0.3, 0.8], np.float32)}, check=True)[0], [1.5**2 - 1, 3.0**2 - 2]
    )


def test_function_body(load_text: Any) -> None:
    """Inside a function, which has no initializers, a constant is a Constant node."""
    model = load_text("""<ir_version: 8, opset_import: ["" : 17, "f" : 1]>
    g (float[2] x) => (float[2] y) { y = f.twice(x) }
    <domain: "f", opset_import: ["" : 17]> twice (a) => (b) { t = Add(a, a)  b = Relu(t) }""")
    body = model.graphs["f:twice"]
    constant_ref = body.add_op(constant_op("one", np.array([10, 20], np.float32)))
    sum_ref = body.add_op(
        Op(name="plus", kind="add", type="Add", outputs=(Output("plus"),)), [TensorRef("f:twice", "t"), constant_ref]
    )
    body.reroute(TensorRef("f:twice", "t"), [Use("f:twice", "b", 0)], sum_ref)
    message = format_.emit(model)
    assert [node.op_type for node in message.functions[0].node] == ["Add", "Constant", "Add", "Relu"]
    np.testing.assert_array_equal(run_onnx(message, {"x": X}, check=True)[0], [4, 28])
    assert model.main.op("y").kind == "call"


def test_replaced_and_removed(load_text: Any) -> None:
    """A replaced initializer keeps its name, a replaced node gets new attributes, a removed op is gone."""
    model = load_text("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[2] x) => (float[2] y) <float[2] w = {1, 2}, float[2] v = {5, 5}> {
        a = LeakyRelu <alpha = 0.5> (x)
        b = Mul(a, v)
        y = Add(b, w)
    }""")
    graph = model.main
    graph.replace_op(replace(graph.op("w"), read_value=lambda: np.array([10, 20], np.float32)))
    graph.replace_op(replace(graph.op("a"), attrs={"alpha": 0.25}))
    graph.reroute(TensorRef("", "b"), [Use("", "y", 0)], TensorRef("", "a"))
    graph.remove_op("b")
    graph.remove_op("v")
    message = format_.emit(model)
    assert node_signatures(message) == [("LeakyRelu", ["x"], ["a"]), ("Add", ["a", "w"], ["y"])]
    assert [tensor.name for tensor in message.graph.initializer] == ["w"]
    np.testing.assert_array_equal(run_onnx(model, {"x": X}, check=True)[0], [9.25, 24])


def test_initializer_that_was_an_input(load_text: Any) -> None:
    """An initializer taken out of the inputs stays an initializer, and the IR version allows that."""
    text = """<ir_version: 3, opset_import: ["" : 8]>
    g (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}> { y = Add(x, w) }"""
    model = load_text(text)
    assert model.main.inputs == ["x", "w"]
    op = model.main.op("w")
    assert op.kind == "input"
    model.main.replace_op(replace(op, kind="constant"))
    model.main.inputs.remove("w")
    message = format_.emit(model)
    assert [info.name for info in message.graph.input] == ["x"]
    assert message.ir_version == 4
    np.testing.assert_array_equal(run_onnx(model, {"x": X}, check=True)[0], [-2, 6])


@pytest.mark.parametrize(
    ("dtype", "version"),
    [("int8", 8), ("int4", 10), ("uint4", 10), ("float8_e4m3fn", 9), ("float8_e5m2", 9)],
)
def test_data_types_need_ir_versions(dtype: str, version: int, load_text: Any) -> None:
    """A new constant raises the IR version to the first one that has its data type, and never lowers it."""
    for present in (8, 11):
        model = load_text(CHAIN.replace("10", str(present)))
        value = np.ones(2, getattr(ml_dtypes, dtype, dtype))
        output = Output("k", dtype, (2,))
        op = Op(name="k", kind="constant", type="Initializer", outputs=(output,), read_value=lambda value=value: value)
        model.main.add_op(op)
        model.main.add_op(
            replace(op, name="i", kind="other", type="Identity", outputs=(Output("i", dtype, (2,)),), rule="r"),
            [TensorRef("", "k")],
        )
        message = format_.emit(model)
        assert message.ir_version == max(present, version)
        # The rules of ops are in their nodes from version 10, before in one entry for all.
        rules = [entry.value for node in message.graph.node for entry in node.metadata_props]
        assert rules == (["r"] if max(present, version) >= 10 else [])


def test_new_domain_is_imported(load_text: Any) -> None:
    """The opset import of a domain is added once, with the first op of it."""
    model = load_text(CHAIN)
    for k in range(2):
        op = Op(name=f"m{k}", kind="other", type="Gelu", domain="com.microsoft", outputs=(Output(f"m{k}", "float32"),))
        model.main.add_op(op, [TensorRef("", "a")])
    imports = [(entry.domain, entry.version) for entry in format_.emit(model).opset_import]
    assert imports == [("", 21), ("com.microsoft", 1)]


def test_emit_leaves_the_source_unchanged(load_text: Any, identity_at: Any) -> None:
    """Editing a copy and emitting it leaves the source message and the other model as they were."""
    model = load_text(CHAIN)
    message = format_.emit(model)
    copy = model.copy()
    identity_at(copy, TensorRef("", "y"))
    assert format_.emit(copy) != message
    assert format_.emit(model) == message == model.source.message


def test_emit_is_linear(load_text: Any, identity_at: Any) -> None:
    """Ten thousand insertions in a chain are emitted in order, each right after its op."""
    count = 10_000
    lines = "\n".join(f"v{k + 1} = Relu(v{k})" for k in range(count))
    model = load_text(f'<ir_version: 8, opset_import: ["" : 17]> g (float[2] v0) => (float[2] v{count}) {{ {lines} }}')
    graph = model.main
    for k in range(1, count):
        op = Op(name=f"q{k}", kind="identity", type="Identity", outputs=(Output(f"q{k}", "float32", (2,)),))
        graph.reroute(
            TensorRef("", f"v{k}"), graph.consumers(TensorRef("", f"v{k}")), graph.add_op(op, [TensorRef("", f"v{k}")])
        )
    # The new op's own reading of v{k} was rerouted to none: consumers were listed before it was added.
    types = [node.op_type for node in format_.emit(model).graph.node]
    assert types == ["Relu", "Identity"] * (count - 1) + ["Relu"]


def constant_op(name: str, value: Array) -> Op:
    """Return a constant op."""
    return Op(
        name=name,
        kind="constant",
        type="Constant",
        outputs=(Output(name, str(value.dtype), value.shape),),
        read_value=lambda: value,
    )


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) if SHARED_MODELS in path.parents else path for path in MODELS],
    ids=lambda path: path.name,
)
def test_identity_behind_every_float_tensor(path: Path, identity_at: Any, stand_ins: Path) -> None:
    """Real models with an Identity after each float tensor, in bodies too, are valid and compute the same.

    A model that does not run with its open sizes set to 1 is only checked.
    """
    model, is_stand_in = format_.load(stand_ins / path), path in ONNX_STAND_INS
    runner = format_.create_runner(model)
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for spec in runner.inputs:
        declared_shape = [size or 1 for size in spec.shape or ()]
        is_voice = "silero" in path.name and not is_stand_in
        shape = VOICE_INPUT_SHAPES.get(spec.name, declared_shape) if is_voice else declared_shape
        feeds[spec.name] = (rng.standard_normal(shape) if shape else np.array(16000)).astype(spec.dtype)
    edited = model.copy()
    count = 0
    for graph in model.graphs.values():
        for op in graph.ops():
            for port, output in enumerate(op.outputs):
                tensor = TensorRef(graph.name, op.name, port)
                if output.dtype in {"float32", "float16"} and edited.graphs[graph.name].consumers(tensor):
                    identity_at(edited, tensor)
                    count += 1
    message = format_.emit(edited)
    onnx.checker.check_model(message)
    reloaded = model_from_message(message)
    check_invariants(reloaded, "emit")
    added = sum(len(graph) for graph in reloaded.graphs.values()) - sum(len(graph) for graph in model.graphs.values())
    assert added == count > (5 if is_stand_in else 30)
    try:
        expected = runner.run(feeds)
    except ModelError:
        assert path.name in NOT_OF_SIZE_ONE
        return
    actual = format_.create_runner(edited).run(feeds)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-4, atol=1e-5)
