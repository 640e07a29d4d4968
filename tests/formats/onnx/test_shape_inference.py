"""Models with nodes that crash onnx's shape inference, or make it run forever, still load."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from support.onnx_models import onnx_model

import graphquant as gq
from graphquant.formats import format_module
from graphquant.formats.onnx import shape_inference

CRASHING_MODELS = [
    "(double[6, 2] x) => (y, float z, w) { y, z, w = Split<num_outputs = 2>(x) }",
    "(float[3] x) => (y, z) { y, z = Split<num_outputs = 1>(x) }",
    """(float[4, 4] x, bool c) => (y) { y = If(c) <
      then_branch = t () => (float o) { o, p = Split<num_outputs = 3>(x) },
      else_branch = e () => (float q) { n = own.Unknown(x) q = EyeLike(n) }> }""",
    "(float[2, 3, 4] x, float[4] s) => (y) { y = LayerNormalization<axis = 2147483648>(x, s) }",
    "(float[2, 3, 4] x, float[4] s) => (y) { y = LayerNormalization<axis = -4294967296>(x, s) }",
    "(float[2, 2] x) => (float[2, 2] y) { u = own.Unknown(x) y = EyeLike(u) }",
    '(float[2, 2] x) => (y) { u = own.Unknown(x) y = RegexFullMatch<pattern = "a">(u) }',
    "(int64[4, N, 2] x, int64[0] i) => (y) { y = GatherND<batch_dims = -1>(x, i) }",
    """(float[4, 4] x, int64[2] p) => (y) {
      i = Conv(x, x) j = Cast<to = 7>(i) y = GatherND<batch_dims = -2147483649>(x, j) }""",
    "(float[1099511627776] x, int64 a) => (y) { y = Squeeze(x, a) }",
    "(uint8[4611686018427387904] x) => (y) { y = Size(x) }",
    "(float[3] x, float[4611686018427387904] i) => (y) { y = Gather<axis = -9223372036854775808>(x, i) }",
    "(float[1099511627776] x, float z) => (y) { y = Add(x, z) }",
    "(float[1, 3] x, float[4611686018427387904] s) => (y) { y = Expand(x, s) }",
    """(float[1, 3] x, float[2147483648, 2147483647] s) => (y) {
      m = Constant<value_ints = [-1]>() t = Reshape(s, m) y = Expand(x, t) }""",
    "(float16[4611686018427387904] x) => (y) { y = MeanVarianceNormalization(x) }",
    "(int64[3] x) => (y) { y = ai.onnx.ml.LabelEncoder(x) }",
]

LOAD_SCRIPT = """
import sys
from pathlib import Path
import graphquant as gq
from graphquant.errors import ModelError
for path in sorted(Path(sys.argv[1]).glob("*.onnx")):
    print(path.name, flush=True)
    try:
        gq.load(path)
    except ModelError as error:
        print(error)
"""


def write_untyped_model(text: str, path: Path) -> Path:
    """Write a model, whose values may have no types, to a file."""
    onnx.save(
        onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20, "own": 1, "ai.onnx.ml": 4]> g {text}'), path
    )
    return path


def test_crashing_nodes_do_not_end_the_process(tmp_path: Path) -> None:
    """Each model loads in a process that would crash or hang if onnx saw its node."""
    for number, text in enumerate(CRASHING_MODELS):
        write_untyped_model(text, tmp_path / f"{number:02}.onnx")
    child = subprocess.run(
        [sys.executable, "-c", LOAD_SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stdout
    assert child.stdout.count(".onnx") >= len(CRASHING_MODELS)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("(float[3, 4] x) => (y) { u = Relu(x) y = EyeLike(u) }", (3, 4)),
        ("(float[5, 3, 4] x, int64[7, 2] i) => (y) { u = Relu(x) y = GatherND(u, i) }", (7, 4)),
        ("(float[5, 3, 4] x, int64[5, 1] i) => (y) { y = GatherND<batch_dims = 1>(x, i) }", (5, 4)),
        (
            "(float[3, 1] x, int64[3] n) => (y) { s = Shape(n) e = Expand(x, n) t = Shape(e) y = Expand(x, t) }",
            (None, 3, None),
        ),
        ("(float[3, 1] x) => (y) { s = Constant<value_ints = [2, 1, 4]>() u = Expand(x, s) y = Relu(u) }", (2, 3, 4)),
        ("(float[6, 2] x) => (y, z) { y, z = Split<num_outputs = 2>(x) }", (3, 2)),
        ("(float[2, 3, 4] x, float[4] s) => (y) { y = LayerNormalization<axis = -1>(x, s) }", (2, 3, 4)),
    ],
)
def test_valid_nodes_have_types(text: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """The same ops in valid models have the types that onnx infers."""
    model = gq.load(write_untyped_model(text, tmp_path / "m.onnx"))
    output = model.main.op("y").outputs[0]
    assert (output.dtype, output.shape) == ("float32", shape)


@pytest.mark.parametrize("shape", ["4, 99", "4", "4, 16, 1"])
@pytest.mark.parametrize("declared", ["output", "value_info"])
def test_wrong_declared_shapes(shape: str, declared: str, tmp_path: Path) -> None:
    """The shape of a tensor that is read again follows from the ops, so the quantized model loads."""
    outputs, infos = (f"float[{shape}] r, y", "") if declared == "output" else ("y", f"<float[{shape}] r>")
    text = f"g (float[4, 16] x) => ({outputs}) {infos} {{ r = Relu(x) y = MatMul(r, w) }}"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(16, dtype=np.float32), "w"))
    onnx.save(model, tmp_path / "model.onnx")
    assert gq.load(tmp_path / "model.onnx").main.op("r").outputs[0].shape == (4, 16)
    assert len(gq.insert(tmp_path / "model.onnx", data="random:8").inserted) > 1


def test_many_long_vectors(tmp_path: Path) -> None:
    """Long vectors of a usual total size do not disable value propagation."""
    text = """(float[2, 12] x) => (y) {
      s = Shape(x) two = Constant<value_ints = [0]>() n = Gather(s, two)
      rest = Constant<value_ints = [3, 4]>() all = Concat<axis = 0>(n, rest) r = Reshape(x, all)
      b = Constant<value_floats = [1.0, 2.0, 3.0, 4.0]>() y = Add(r, b)
    }"""
    assert gq.load(write_untyped_model(text, tmp_path / "m.onnx")).main.op("y").outputs[0].shape == (2, 3, 4)


COMPUTED_SHAPES = """(float[N, 6, L] x) => (y, f, p, e) {
  s = Shape(x) one = Constant<value_ints = [1]>() two = Constant<value_ints = [2]>() n = Gather(s, two)
  half = Div(n, two) first = Shape<start = 0, end = 1>(x) all = Concat<axis = 0>(first, two, half, one, one)
  r = Reshape(x, all) y = Relu(r)
  end = Mod(one, two) zero = Constant<value_ints = [0]>() part = Slice(s, zero, end)
  rest = Constant<value_ints = [-1]>()
  flat = Concat<axis = 0>(part, rest) f = Reshape(x, flat)
  length = Shape(s) zeros = ConstantOfShape<value = int64[1] {0}>(length)
  pads = Concat<axis = 0>(zeros, zeros) p = Pad(x, pads)
  shape = Constant<value_ints = [1, -1, 6]>() rank = Shape(shape) ones = ConstantOfShape<value = int64[1] {1}>(rank)
  minus = Neg(ones) is_any = Equal(shape, minus) target = Where(is_any, ones, shape) e = Expand(one, target)
}"""


def test_shapes_that_exporters_compute(tmp_path: Path) -> None:
    """Sizes follow from the arithmetic on shapes if those of the inputs are known."""
    model = gq.load(write_untyped_model(COMPUTED_SHAPES, tmp_path / "m.onnx"))
    bound = format_module("onnx").bind_input_shapes(model, {"x": (3, 6, 8)})
    shapes = [bound.main.op(name).outputs[0].shape for name in "yfpe"]
    assert shapes == [(3, 2, 4, 1, 1), (3, 48), (3, 6, 8), (1, 1, 6)]


@pytest.mark.parametrize(("size", "shape"), [(1, (4,)), (2, (2, 4))])
def test_shapes_behind_branches(tmp_path: Path, size: int, shape: tuple[int, ...]) -> None:
    """The output of an If has the shape of the branch that runs if its condition follows from sizes of inputs."""
    text = """(float[N, 4] x) => (y) {
      s = Shape(x) zero = Constant<value_ints = [0]>() n = Gather(s, zero) one = Constant<value_ints = [1]>()
      is_one = Equal(n, one) z = If(is_one) <
        then_branch = t () => (o) { axes = Constant<value_ints = [0]>() o = Squeeze(x, axes) },
        else_branch = e () => (q) { q = Neg(x) }
      > y = Relu(z)
    }"""
    model = gq.load(write_untyped_model(text, tmp_path / "m.onnx"))
    bound = format_module("onnx").bind_input_shapes(model, {"x": (size, 4)})
    outputs = {op.name: op.outputs[0] for graph in bound.graphs.values() for op in graph.ops() if op.outputs}
    assert [outputs[name].shape for name in "yq"] == [shape, (size, 4)]


def test_branches_without_condition(tmp_path: Path) -> None:
    """A damaged If without a condition has the shape of both branches."""
    text = """(float[N, 4] x, bool c) => (y) {
      z = If(c) < then_branch = t () => (o) { o = Abs(x) }, else_branch = e () => (q) { q = Neg(x) } > y = Relu(z)
    }"""
    path = write_untyped_model(text, tmp_path / "m.onnx")
    message = onnx.load(path)
    del message.graph.node[0].input[:]
    onnx.save(message, path)
    bound = format_module("onnx").bind_input_shapes(gq.load(path), {"x": (1, 4)})
    assert bound.main.op("y").outputs[0].shape == (1, 4)


RUNTIME_TYPED_MODELS = [
    "(float[N, 4] x) => (float[M, K] y) { a = com.microsoft.Gelu(x) b = Relu(a) y = com.microsoft.Gelu(b) }",
    "(float[N, 4] x) => (float[M, K] y) { b = Relu(a) y = Neg(b) a = com.microsoft.Gelu(x) }",
    """(float[N, 4] x, bool c) => (float[M, K] y) { a = com.microsoft.Gelu(x) b = If(c) <
      then_branch = t () => (o) { b1 = com.microsoft.Gelu(a) o = Relu(b1) }, else_branch = e () => (q) { q = Neg(a) }>
      y = Relu(b) }""",
    """(float[N, 4] x, float[4, 4] w) => (float[M, K] y) { a = com.microsoft.FusedMatMul<transB = 1>(x, w)
      s = Shape(a) e = Expand(a, s) b = com.microsoft.Gelu(e) y = Neg(b) }""",
]


@pytest.mark.parametrize("text", RUNTIME_TYPED_MODELS)
def test_onnxruntime_infers_missing_types(text: str, tmp_path: Path) -> None:
    """Values behind ops of other domains, and of unsorted nodes, have types; sizes that vary stay unknown."""
    header = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g '
    onnx.save(onnx.parser.parse_model(header + text), tmp_path / "m.onnx")
    model = gq.load(tmp_path / "m.onnx")
    outputs = {out.name: out for graph in model.graphs.values() for op in graph.ops() for out in op.outputs}
    assert all(output.dtype is not None for output in outputs.values())
    assert (outputs["a"].shape, outputs["b"].shape) == ((None, 4), (None, 4))


def test_rejected_nodes_have_no_types(tmp_path: Path) -> None:
    """An op that onnxruntime does not know leaves its own output, and nothing else, without a type."""
    text = "(float[2, 3] x) => (float[2, 3] y) { a = own.Unknown(x) b = Relu(x) y = Add(a, b) }"
    model = gq.load(write_untyped_model(text, tmp_path / "m.onnx"))
    assert [model.main.op(name).outputs[0].shape for name in ("a", "b")] == [None, (2, 3)]


@pytest.mark.parametrize(
    ("text", "passes"),
    [("(float[N, 4] x) => (y) { y = Add(x, x) }", 1), ("(float[N, 4] x) => (y) { s = Shape(x) y = Reshape(x, s) }", 2)],
)
def test_values_are_propagated_if_nodes_compute_integers(monkeypatch, text, passes):
    """Types are inferred once more, with values, only if a node computes integers."""
    infer_shapes, calls = onnx.shape_inference.infer_shapes, []
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", lambda *a, **k: calls.append(k) or infer_shapes(*a, **k))
    message = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> m {text}')
    typed = shape_inference.infer_types(message)
    assert [value.name for value in typed.graph.output] == ["y"]
    assert len(typed.graph.output[0].type.tensor_type.shape.dim) == 2
    assert len(calls) == passes
    assert [call.get("data_prop", False) for call in calls].count(True) == passes - 1


@pytest.mark.parametrize("size", [-1, -(2**31), -(2**63)])
def test_negative_dimensions_are_unknown(tmp_path: Path, size: int) -> None:
    """A dimension of -1, which some exporters write, is unknown. It ends the process in onnx's Slice."""
    constants = {name: np.array([value]) for name, value in {"starts": 0, "ends": 1, "axes": 0}.items()}
    model = onnx_model("g (float[3, 2] x) => (float[n, 2] y) { y = Slice(x, starts, ends, axes) }", constants)
    for info in (model.graph.input[0], model.graph.output[0]):
        info.type.tensor_type.shape.dim[0].dim_value = size
    onnx.save(model, tmp_path / "model.onnx")
    loaded = gq.load(tmp_path / "model.onnx")
    assert loaded.output(gq.TensorRef("", "x")).shape == (None, 2)


@pytest.mark.parametrize("place", ["sequence", "function"])
def test_negative_dimensions_of_other_types_are_unknown(tmp_path: Path, place: str) -> None:
    """Elements of sequences and values in functions may have a dimension of -1, too."""
    constants = {name: np.array([value]) for name, value in {"starts": 0, "ends": 1, "axes": 0}.items()}
    head = "s = SequenceConstruct(x) i = Constant<value_int=0>() t = SequenceAt(s, i)"
    text = f"g (float[n, 2] x) => (float[n, 2] y) {{ {head} y = Slice(t, starts, ends, axes) }}"
    model = onnx_model(text, constants)
    if place == "sequence":
        element = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [-1, 2])
        info = onnx.helper.make_value_info("s", onnx.helper.make_sequence_type_proto(element))
        model.graph.value_info.append(info)
    else:
        names = ["x", *constants]
        nodes = onnx.parser.parse_graph("f () => () { t = Relu(x) y = Slice(t, starts, ends, axes) }").node
        function = onnx.helper.make_function("local", "f", names, ["y"], nodes, model.opset_import)
        function.value_info.append(onnx.helper.make_tensor_value_info("t", onnx.TensorProto.FLOAT, [-1, 2]))
        model.functions.append(function)
        del model.graph.node[:]
        model.graph.node.append(onnx.helper.make_node("f", names, ["y"], domain="local"))
        model.opset_import.append(onnx.helper.make_opsetid("local", 1))
    onnx.save(model, tmp_path / "model.onnx")
    loaded = gq.load(tmp_path / "model.onnx")
    assert loaded.output(gq.TensorRef("", "y")).shape is not None
