"""TensorFlow 1's graph_editor on both formats: rerouting, selection, and the fixed-point recipe."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.shared_models import NO_SHARED_MODELS, SHARED_MODELS
from support.stand_ins import loop_detector_feeds
from support.tensorflow_models import read_graph_def, run_graph

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.api import graph_editor as ge
from graphquant.errors import UsageError
from graphquant.ir import Use, check_invariants


def parse_nodes(text):
    """Return a test graph's nodes: a constant vector's length (`a=2`), or an Add's operands (`c=a+b`)."""
    definitions = dict(node.split("=") for node in text.split())
    return {
        name: int(definition) if definition.isdigit() else tuple(definition.split("+"))
        for name, definition in definitions.items()
    }


PAIRS = parse_nodes("a0=2 b0=2 c0=a0+b0 a1=2 b1=2 c1=a1+b1 a2=3 b2=3 c2=a2+b2")
AMBIGUOUS = parse_nodes("a=2 b=2 c=a+b d=a+c e=2 f=2 g=e+f")
CHAIN = parse_nodes("a=2 b=2 x=a+a y=x+b z=y+x")
SCOPES = parse_nodes(
    "a=2 foo/b=2 foo/c=a+foo/b foo/d=2"
    " foo/bar/e=foo/c+foo/d foo/bar/f=foo/c+foo/d foo/bar/g=foo/c+a foo/bar/h=foo/bar/f+foo/bar/g"
)


def tf_text(graph):
    """Return a frozen graph in text form."""
    lines = ["versions { producer: 1000 }"]
    for name, definition in graph.items():
        if isinstance(definition, int):
            tensor = f"dtype: DT_FLOAT tensor_shape {{ dim {{ size: {definition} }} }} float_val: {len(lines)}"
            value = f'attr {{ key: "value" value {{ tensor {{ {tensor} }} }} }}'
            kind = 'attr { key: "dtype" value { type: DT_FLOAT } }'
            lines.append(f'node {{ name: "{name}" op: "Const" {kind} {value} }}')
        else:
            inputs = " ".join(f'input: "{input_name}"' for input_name in definition)
            kind = 'attr { key: "T" value { type: DT_FLOAT } }'
            lines.append(f'node {{ name: "{name}" op: "AddV2" {inputs} {kind} }}')
    return "\n".join(lines)


def onnx_message(graph):
    """Return a model whose outputs are all tensors without readers."""
    sums = {name: definition for name, definition in graph.items() if not isinstance(definition, int)}
    unread = [name for name in sums if not any(name in operands_of_sum for operands_of_sum in sums.values())]
    constants = [
        onnx.numpy_helper.from_array(np.full(definition, position, np.float32), name)
        for position, (name, definition) in enumerate(graph.items())
        if name not in sums
    ]
    graph_proto = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", operands, [name], name) for name, operands in sums.items()],
        "g",
        [],
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N"]) for name in unread],
        constants,
    )
    return onnx.helper.make_model(graph_proto, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)


@pytest.fixture(params=["tensorflow", "onnx"])
def build_model(request, tmp_path):
    """A function that makes a model of one format from nodes."""

    def make(graph):
        if request.param == "onnx":
            onnx.save(onnx_message(graph), tmp_path / "model.onnx")
            return gq.load(tmp_path / "model.onnx")
        tmp_path.joinpath("model.pbtxt").write_text(tf_text(graph))
        return gq.load(tmp_path / "model.pbtxt")

    return make


def ts(model, *names):
    """Tensors by name."""
    return [ge.get_tensor_by_name(model, name) for name in names]


def ops_by_name(model, *names):
    """Ops by name."""
    return [ge.Operation(model.main, name) for name in names]


def reads(model, name, graph=""):
    """Return the inputs of an op, as text."""
    return " ".join(str(slot) for slot in model.graphs[graph].slots(name)).replace(":0", "")


def tensors_in_slots(model):
    """Return the tensor in each slot of a model."""
    return {
        (name, op.name): tuple(map(str, graph.slots(op.name)))
        for name, graph in model.graphs.items()
        for op in graph.ops()
    }


# -- the cases of the old reroute_test -----------------------------------------------------------


def test_swap(build_model):
    """Two pairs are swapped."""
    model = build_model(PAIRS)
    assert ge.swap_ts(ts(model, "a0", "b0"), ts(model, "a1", "b1")) == 4
    check_invariants(model, "swap")
    assert (reads(model, "c0"), reads(model, "c1")) == ("a1 b1", "a0 b0")


def test_a_to_b_and_b_to_a(build_model):
    """Readers of the second list are rerouted to the first, and back."""
    model = build_model(PAIRS)
    first, second = ts(model, "a0", "b0"), ts(model, "a1", "b1")
    assert ge.reroute_ts(first, second) == 2
    assert (reads(model, "c0"), reads(model, "c1")) == ("a0 b0", "a0 b0")
    assert ge.get_consuming_ops(second) == []
    assert ge.reroute_ts(second, first) == 4
    assert (reads(model, "c0"), reads(model, "c1")) == ("a1 b1", "a1 b1")
    check_invariants(model, "reroute")


@pytest.mark.parametrize("verb", [ge.reroute_ts, ge.swap_ts])
def test_incompatible_shapes(build_model, verb):
    """A different shape is refused even if the first pair fits; nothing is changed."""
    model = build_model(PAIRS)
    before = tensors_in_slots(model)
    for first, second in ((["a0", "b0"], ["a2", "b2"]), (["a0", "b0"], ["a1", "b2"])):
        with pytest.raises(UsageError, match=r"has shape \(2,\) and [ab]2:0 has \(3,\)"):
            verb(ts(model, *first), ts(model, *second))
    assert tensors_in_slots(model) == before


def test_cannot_modify(build_model):
    """TF1's test of swapping the outputs of two subgraphs: their inner readers of `a` are unchanged."""
    model = build_model(AMBIGUOUS)
    assert (
        ge.swap_ts(ts(model, "a", "c"), ts(model, "e", "f"), cannot_modify=ops_by_name(model, "a", "b", "c", "e", "f"))
        == 4
    )
    assert (reads(model, "c"), reads(model, "d"), reads(model, "g")) == ("a b", "e f", "a c")
    check_invariants(model, "swap")


def test_can_modify(build_model):
    """Only listed ops are rerouted; an op, a list and a model are accepted; an empty list allows nothing."""
    model = build_model(AMBIGUOUS)
    (a, e) = ts(model, "a", "e")
    assert ge.reroute_ts(e, a, can_modify=[]) == 0
    assert ge.reroute_ts(e, a, can_modify=ops_by_name(model, "d")[0]) == 1
    assert (reads(model, "c"), reads(model, "d")) == ("a b", "e c")
    assert ge.reroute_ts(e, a, can_modify=model, cannot_modify=ops_by_name(model, "c")) == 0
    assert ge.reroute_ts([e], (a,), can_modify=model) == 1
    assert reads(model, "c") == "e b"


# -- what is stricter ----------------------------------------------------------------------------


def test_each_slot_moves_by_itself(build_model):
    """Swapping the operands of one op swaps them; a tensor read twice counts twice."""
    model = build_model(CHAIN)
    assert ge.swap_ts(*ts(model, "y", "x"), can_modify=ops_by_name(model, "z")) == 2
    assert reads(model, "z") == "x y"
    assert ge.reroute_ts(*ts(model, "b", "a")) == 2
    assert reads(model, "x") == "b b"


def test_repeated_tensors(build_model):
    """Readers are those at the start, so a tensor in both lists is not rerouted twice."""
    model = build_model(PAIRS)
    a0, a1, b0 = ts(model, "a0", "a1", "b0")
    assert ge.reroute_ts([a0, b0], [a1, a0]) == 2
    assert (reads(model, "c0"), reads(model, "c1")) == ("b0 b0", "a0 b1")
    assert ge.reroute_ts(a0, a0) == 0


def test_lists_of_different_length_and_kind(build_model, tmp_path):
    """Lists must have equal length, hold tensors, and belong to one model."""
    model, second_model = build_model(PAIRS), build_model(PAIRS)
    a0, b0 = ts(model, "a0", "b0")
    with pytest.raises(UsageError, match=r"^2 tensors .* with 1\."):
        ge.reroute_ts([a0, b0], [a0])
    with pytest.raises(UsageError, match=r"str 'a0:0' .* a tensor"):
        ge.reroute_ts("a0:0", a0)
    with pytest.raises(UsageError, match=r"Operation 'c0' .* a tensor"):
        ge.swap_ts(ops_by_name(model, "c0"), a0)
    with pytest.raises(UsageError, match=r"Tensor 'a0:0' .* an op"):
        ge.reroute_ts(a0, b0, can_modify=a0)
    with pytest.raises(UsageError, match=r"a0:0 and b0:0 .* two models"):
        ge.reroute_ts(a0, ts(second_model, "b0"))


def test_the_new_op_keeps_its_input(build_model):
    """A quantizer is never rerouted to its own output, even without `can_modify`."""
    model = build_model(CHAIN)
    (x,) = ts(model, "x")
    quantized = ge.make_quant_op(model, x, "y", ge.FixedPoint(8, -4))
    assert ge.reroute_ts(quantized, x) == 2
    check_invariants(model, "reroute")
    assert reads(model, "y") == f"{quantized.ref.op} b"
    assert reads(model, "z") == f"y {quantized.ref.op}"
    assert ge.get_consuming_ops(x) == [ge.Operation(model.main, "y/SlimQuant/quant")] or model.format == "onnx"
    assert ge.reroute_ts(x, quantized) == 2
    assert reads(model, "z") == "y x"


def test_no_cycles(build_model):
    """Ancestors of the new tensor are not rerouted; a swap along a path is refused and fully undone."""
    model = build_model(CHAIN | parse_nodes("o=2 p=2 q=o+p"))
    before = tensors_in_slots(model)
    with pytest.raises(UsageError, match=r"y:0 .* x:0 through y\[0\]"):
        ge.swap_ts(ts(model, "o", "y"), ts(model, "p", "x"))
    assert tensors_in_slots(model) == before
    check_invariants(model, "refused swap")
    assert ge.reroute_ts(*ts(model, "y", "x")) == 1
    assert (reads(model, "y"), reads(model, "z")) == ("x b", "y y")
    check_invariants(model, "reroute")


def test_graph_outputs_are_readers(build_model):
    """An output is rerouted with its tensor, unless it is excluded."""
    model = build_model(CHAIN)
    y, z = ts(model, "y", "z")
    outputs = ge.select_ops("^@", graph=model)
    assert outputs == ge.get_consuming_ops(z) == ops_by_name(model, "@z")
    assert ge.reroute_ts(y, z, cannot_modify=outputs) == 0
    assert ge.reroute_ts(y, z) == 1
    assert reads(model, "@z") == "y"


# -- selecting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "count"),
    [(("^foo/",), 7), (("^foo/bar/",), 4), (("^foo/bar/", "a"), 5), ((re.compile("^foo/b$"),), 1)],
)
def test_select_ops(build_model, patterns, count):
    """The counts of TF1's select_test, on both formats; each op occurs once."""
    selected = ge.select_ops(*patterns, graph=build_model(SCOPES))
    assert repr(selected[0]) == f"<Operation {selected[0].name!r}>"
    assert repr(selected[0].outputs) == f"[<Tensor '{selected[0].name}:0'>]"
    assert len(selected) == len(set(selected)) == count


@pytest.mark.parametrize(("pattern", "count"), [(".*:0", 8), (r".*/bar/\w+:0", 4), ("", 8)])
def test_select_ts(build_model, pattern, count):
    """The same for tensors."""
    assert len(ge.select_ts(pattern, graph=build_model(SCOPES))) == count


def test_selecting_by_object_and_filter(build_model):
    """Ops, tensors, lists and a graph are accepted; the other type is ignored; filters use kinds and types."""
    model = build_model(SCOPES)
    c, e = ops_by_name(model, "foo/c", "foo/bar/e")
    assert ge.select_ops([c, e.outputs[0]], c) == [c]
    assert ge.select_ts([c, *e.inputs]) == e.inputs == ts(model, "foo/c", "foo/d")
    assert [op.name for op in ge.select_ops(model.main, positive_filter=lambda op: op.kind == "constant")] == [
        "a",
        "foo/b",
        "foo/d",
    ]
    assert all(op.type in {"Add", "AddV2"} for op in ge.select_ops("[cefgh]$", graph=model.main))
    assert ge.select_ts(
        "foo/d",
        graph=model,
        positive_filter=lambda expected_op: expected_op.shape == (2,) and expected_op.dtype == "float32",
    )
    assert len(ge.get_name_scope_ops(model, "foo/")) == 7
    assert len(ge.get_name_scope_ops(model, "foo/bar")) == 4
    assert [op.name for op in ge.get_consuming_ops(ts(model, "foo/c", "foo/d"))] == [
        "foo/bar/e",
        "foo/bar/f",
        "foo/bar/g",
    ]
    assert ge.get_generating_ops(e.inputs) == ops_by_name(model, "foo/c", "foo/d")
    assert ge.select_ops("nothing", graph=model) == []


def test_invalid_selections_are_refused(build_model):
    """Expressions need a graph and must be valid; unknown and ambiguous names are refused."""
    model = build_model(SCOPES)
    with pytest.raises(UsageError, match="needs a graph"):
        ge.select_ops("^foo")
    with pytest.raises(UsageError, match=r"'\(' .*regular expression"):
        ge.select_ts("(", graph=model)
    with pytest.raises(UsageError, match="dict"):
        ge.select_ts("a", graph={})
    with pytest.raises(UsageError, match=r"int '7' .* an op"):
        ge.select_ops(7)
    with pytest.raises(UsageError, match=r"no tensor 'foo/bar/ee'\. Did you mean 'foo/bar/e"):
        ge.get_tensor_by_name(model, "foo/bar/ee")
    gone = ops_by_name(model, "gone")[0]
    with pytest.raises(UsageError, match="Op gone"):
        gone.inputs  # noqa: B018  # it raises


# -- nested graphs -------------------------------------------------------------------------------

BRANCH = """<ir_version: 8, opset_import: ["": 13]>
g (bool p, float[2] x) => (float[2] y)
{
    t = Identity (x)
    u = Neg (x)
    y = If (p) <
        then_branch = th () => (float[2] a) { s = Relu (t)\n a = Add (s, t) },
        else_branch = el () => (float[2] b) { b = Neg (t) }
    >
}
"""


@pytest.fixture
def branch(tmp_path):
    """An If whose branches read a tensor from outside."""
    onnx.save(onnx.parser.parse_model(BRANCH), tmp_path / "branch.onnx")
    return gq.load(tmp_path / "branch.onnx")


def test_captures_are_readers(branch):
    """Readers in bodies are rerouted too, with separate names in each graph."""
    t, u = ts(branch, "t", "u")
    assert [str(op) for op in ge.get_consuming_ops(t)] == ["y/then_branch/s", "y/then_branch/a", "y/else_branch/b"]
    assert ge.reroute_ts(u, t, cannot_modify=ge.select_ops("^y/else_branch/", graph=branch)) == 2
    assert (reads(branch, "s", "y/then_branch"), reads(branch, "b", "y/else_branch")) == ("u", "t")
    check_invariants(branch, "reroute")
    assert len(ge.select_ops("^b$", graph=branch)) == 1
    assert ge.select_ops("^b$", graph=branch.main) == []


def test_a_body_cannot_read_its_sibling(branch):
    """A reader that cannot access the new tensor is an error; no graph is changed."""
    before = tensors_in_slots(branch)
    (t,) = ts(branch, "t")
    inside = ge.get_tensor_by_name(branch, "y/then_branch/s:0")
    with pytest.raises(UsageError, match="cannot read y/then_branch/s:0"):
        ge.reroute_ts(inside, t)
    assert tensors_in_slots(branch) == before
    assert ge.reroute_ts(inside, t, can_modify=branch.graphs["y/then_branch"]) == 1
    assert reads(branch, "a", "y/then_branch") == "y/then_branch/s y/then_branch/s"
    check_invariants(branch, "reroute")


def test_no_cycle_through_a_body(branch):
    """A body that reads a tensor prevents rerouting it to a result of that body."""
    t, y = ts(branch, "t", "y")
    assert ge.reroute_ts(y, t) == 0
    with pytest.raises(UsageError, match="through y/then_branch/s"):
        ge.swap_ts(y, t)


def test_the_recipe_in_bodies(branch):
    """The op is inserted next to the producer, and the body's consumer reads it."""
    assert gq.insert_quant_op(branch, "t", "b", gq.FixedPoint(8, -1)) == 1
    check_invariants(branch, "recipe")
    assert reads(branch, "b", "y/else_branch") == "b/SlimQuant/quant/dequant"
    assert gq.insert_quant_op(branch, "y/then_branch/s:0", "a", gq.FixedPoint(8, -1)) == 1
    assert reads(branch, "a", "y/then_branch") == "y/then_branch/a/SlimQuant/quant/dequant t"
    check_invariants(branch, "recipe")


# -- the recipe ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A producer, a part of its consumers' names, and the consumers that it selects."""

    model: str
    producer: str
    name: str
    uses: tuple[str, ...]


BLOCK = "residual_1"
CASES = [
    Case("digits_cnn.pb", "max_pool:0", BLOCK, ("residual_1/conv[0]",)),
    Case("digits_cnn.pb", "residual_1/conv/ReadVariableOp:0", BLOCK, ("residual_1/conv[1]",)),
    Case("digits_cnn.pb", "residual/relu:0", "branch_", ("branch_narrow/conv[0]", "branch_wide/conv[0]")),
    Case("digits_cnn.onnx", "max_pool:0", BLOCK, ("residual_1/conv[0]",)),
    Case("digits_cnn.onnx", "residual_1/conv_weights_fused_bn", BLOCK, ("residual_1/conv[1]",)),
    Case("digits_cnn.onnx", "stem/batch_norm:0", "stem", ("stem/relu[0]",)),
    Case("digits_cnn_saved_model", "max_pool:0", BLOCK, ("__inference_serve_8881/residual_1/conv[0]",)),
    Case("stand-in/mtcnn.pb", "net/while/Select:0", "skip", ("net/while/skip/Conv2D[0]",)),
    Case("stand-in/mtcnn.pb", "net/while/conv2/Enter", "conv2", ("net/while/conv2/Conv2D[1]",)),
    Case("real/mtcnn.pb", "pnet/while/PReLU3/Select:0", "conv4-2", ("pnet/while/conv4-2/Conv2D[0]",)),
    Case("real/mtcnn.pb", "pnet/while/conv1/Conv2D/Enter", "conv1/Conv2D", ("pnet/while/conv1/Conv2D[1]",)),
]


def path_of(case, samples, stand_ins):
    """Return the model's path; real models are not part of the project."""
    folder, _, name = case.model.rpartition("/")
    path = {"": samples, "stand-in": stand_ins, "real": SHARED_MODELS}[folder] / name
    if not path.exists():
        pytest.skip(NO_SHARED_MODELS)
    return path


@pytest.mark.parametrize(("bits", "exponent"), [(8, -4), (16, -8)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}-{case.producer}")
def test_the_recipe(case, bits, exponent, samples, stand_ins, tmp_path):
    """Exactly the named consumers are rerouted, and the saved file has a scale of exactly 2**exponent."""
    path = path_of(case, samples, stand_ins)
    model = gq.load(path)
    before = tensors_in_slots(model)
    quantizer = gq.FixedPoint(bits=bits, exponent=exponent)
    assert gq.insert_quant_op(model, case.producer, case.name, quantizer) == len(case.uses)
    check_invariants(model, "recipe")
    after = tensors_in_slots(model)
    changed = {key: reading for key, reading in before.items() if after[key] != reading}
    assert moved(before, after) == set(case.uses)
    assert len(changed) == len({use.rpartition("[")[0] for use in case.uses})
    saved = gq.load(model.save(tmp_path / path.name))
    (reading,) = summarize_model(saved).quantization_ops
    assert reading.params is not None
    assert (float(reading.params.scale), int(reading.params.zero_point)) == (2.0**exponent, 0)
    assert (reading.params.type.bits, len(reading.consumers)) == (bits, len(case.uses))
    assert {op.name.startswith(f"{case.name.strip('/')}/SlimQuant/") for op in new_ops(saved, before)} == {True}


def moved(before, after):
    """Return the rerouted uses, as text."""
    return {
        str(Use(graph, op, slot))
        for (graph, op), slots in before.items()
        for slot, read in enumerate(slots)
        if after[graph, op][slot] != read
    }


def new_ops(model, before):
    """Return the new ops."""
    return [op for graph in model.graphs.values() for op in graph.ops() if (graph.name, op.name) not in before]


def test_a_layer_with_kernel_and_input(samples):
    """Both producers of one layer share its scope, with separate names."""
    model = gq.load(samples / "digits_cnn.pb")
    for producer in ("max_pool", "residual_1/conv/ReadVariableOp"):
        assert gq.insert_quant_op(model, producer, BLOCK, gq.FixedPoint(8, -4)) == 1
    assert reads(model, "residual_1/conv") == "residual_1/SlimQuant/quant residual_1/SlimQuant/quant_1"
    new_ops = [op.name for op in ge.get_name_scope_ops(model, "residual_1/SlimQuant")]
    assert sorted(new_ops) == sorted(
        f"residual_1/SlimQuant/quant{k}{end}" for k in ("", "_1") for end in ("", "/min", "/max")
    )


@pytest.mark.parametrize("file", ["digits_cnn.pb", "digits_cnn.onnx", "digits_cnn_saved_model"])
def test_names_that_match_no_consumer(file, samples):
    """The error names producer and readers; repeating the call is an error too; nothing is changed."""
    model = gq.load(samples / file)
    before = tensors_in_slots(model)
    with pytest.raises(UsageError, match=r"'residual_7' reads \S*max_pool:0\. .*'residual_1/conv'"):
        gq.insert_quant_op(model, "max_pool:0", "residual_7", gq.FixedPoint(8, -4))
    with pytest.raises(UsageError, match=r"no tensor 'max_pol:0'\. Did you mean 'max_pool:0'"):
        gq.insert_quant_op(model, "max_pol:0", BLOCK, gq.FixedPoint(8, -4))
    assert tensors_in_slots(model) == before
    gq.insert_quant_op(model, "max_pool:0", BLOCK, gq.FixedPoint(8, -4))
    with pytest.raises(UsageError, match=r"'residual_1/SlimQuant/.*' was inserted"):
        gq.insert_quant_op(model, "max_pool:0", BLOCK, gq.FixedPoint(8, -4))


def test_outputs_are_no_consumers_of_the_recipe(build_model):
    """A graph output with the word in its name is not rerouted."""
    model = build_model(CHAIN)
    with pytest.raises(UsageError, match=r"'z' reads z:0\. .* layer"):
        gq.insert_quant_op(model, "z", "z", gq.FixedPoint(8, -4))


def test_fixed_point():
    """Ranges are symmetric and narrow, so the scale is the power of two; values beyond float32 are refused."""
    for bits, exponent, top in ((8, -4, 7.9375), (16, -8, 127.99609375), (2, 0, 1.0), (16, 112, 32767 * 2.0**112)):
        quantizer = gq.FixedPoint(bits, exponent)
        assert (quantizer.min, quantizer.max, quantizer.scale) == (-top, top, 2.0**exponent)
        params = quantizer.params()
        assert (params.range.low, params.range.high, params.narrow) == (-top, top, True)
    for bits, exponent in ((1, 0), (17, 0), (8, -127), (8, 121), (16, 113), (8.0, 0), (True, 0), (8, -4.0)):
        with pytest.raises(UsageError, match="FixedPoint does not support"):
            gq.FixedPoint(bits, exponent)
    with pytest.raises(UsageError, match=r"no family 'fake-qant'\. Did you mean 'fake-quant'"):
        gq.FixedPoint(8, 0, family="fake-qant")


def test_unsupported_formats_are_refused(samples, tmp_path, branch):
    """Another format's family, integers, old opsets, invalid scopes and foreign tensors are refused."""
    model = gq.load(samples / "digits_cnn.pb")
    with pytest.raises(UsageError, match=r"'onnx-qdq' .* onnx models\. .*fake-quant"):
        gq.insert_quant_op(model, "max_pool", BLOCK, gq.FixedPoint(8, -4, family="onnx-qdq"))
    with pytest.raises(UsageError, match=r"flatten/shape:0 .* fake-quant: .*int32"):
        gq.insert_quant_op(model, "flatten/shape:0", "flatten", gq.FixedPoint(8, -4))
    for name in ("_", ""):
        with pytest.raises(UsageError, match=f"'{name}' .* valid scope"):
            gq.insert_quant_op(model, "max_pool", name, gq.FixedPoint(8, -4))
    with pytest.raises(UsageError, match=r"t:0 .* another model"):
        gq.insert_quant_op(model, ge.get_tensor_by_name(branch, "t"), "b", gq.FixedPoint(8, -4))
    with pytest.raises(UsageError, match=r"graph .* Graph, not Model"):
        gq.insert_quant_op(model.main, "max_pool", BLOCK, gq.FixedPoint(8, -4))
    old = onnx_message(CHAIN)
    old.opset_import[0].version = 9
    onnx.save(old, tmp_path / "old.onnx")
    with pytest.raises(UsageError, match=r"opset 9.* onnx-qdq needs 11"):
        gq.insert_quant_op(gq.load(tmp_path / "old.onnx"), "x", "y", gq.FixedPoint(8, -4))


def test_loops_of_tensorflow_1(model_folder):
    """A loop's back edge is not a cycle: all readers are rerouted, and the constants wait for their frame."""
    select, *products = "net/while/Select", "net/while/conv2/Conv2D", "net/while/skip/Conv2D"
    if model_folder == SHARED_MODELS:
        select, *products = (f"pnet/while/{name}" for name in ("PReLU3/Select", "conv4-1/BiasAdd", "conv4-2/BiasAdd"))
    model = gq.load(model_folder / "mtcnn.pb")
    (tensor,) = ts(model, select)
    quantized = ge.make_quant_op(model, tensor, "conv4", gq.FixedPoint(8, -4))
    assert ge.reroute_ts(quantized, tensor) == 2
    assert [str(op) for op in tensor.consumers()] == ["conv4/SlimQuant/quant"]
    assert model.main.control_inputs("conv4/SlimQuant/quant/min") == [select]
    assert ge.reroute_ts(*ts(model, *products), can_modify=[]) == 0
    check_invariants(model, "reroute")


# -- rules and the command line ------------------------------------------------------------------


@pytest.mark.parametrize("file", ["digits_cnn.pb", "digits_cnn.onnx"])
def test_rule_line_equals_the_recipe(file, samples, tmp_path, cli):
    """The one-line rule reroutes the same uses with the same scale; two of them can be combined."""
    model = gq.load(samples / file)
    before = tensors_in_slots(model)
    gq.insert_quant_op(model, "max_pool:0", BLOCK, gq.FixedPoint(8, -4))
    lines = ["--rules", "max_pool:0 > *residual_1*: 8, -4", "--rules", "stem/relu:0 > *depthwise*:7,-3"]
    cli("insert", samples / file, *lines, "-o", tmp_path / file)
    by_line = gq.load(tmp_path / file)
    readings = [
        (len(reading.consumers), float(reading.params.scale)) for reading in summarize_model(by_line).quantization_ops
    ]
    assert sorted(readings) == [(1, 2.0**-4), (1, 2.0**-3)]
    assert moved(before, tensors_in_slots(by_line)) == moved(before, tensors_in_slots(model)) | {"depthwise/conv[0]"}


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("max_pool > residual_2/*: 8, -4", ["no op called 'residual_2/*'", "'max_pool'"]),
        ("max_pol > residual_1/*: 8, -4", ["producer name 'max_pol'"]),
        ("max_pool > residual_7/*: 8, -4", ["consumer name 'residual_7/*'"]),
        ("max_pool > residual_1/*: 8", ["'PRODUCER > CONSUMER: BITS, EXPONENT'"]),
        ("max_pool > residual_1/*: 80, -4", ["'bits' is 80;", " 32."]),
        ("max_pool > residual_1/*: 8, -400", ["'exponent' is -400;", " -126."]),
        ("max_pool > /(/: 8, -4", ["regular expression"]),
    ],
)
def test_mistakes_in_a_rule_line(line, values, samples, cli):
    """An empty line or one with unknown names gives the error of a rule file."""
    error_text = cli("plan", samples / "digits_cnn.pb", "--rules", line, code=2).stderr
    assert [value for value in values if value not in error_text] == []
    assert error_text.startswith(f"error: {line}:1:")


# -- properties ----------------------------------------------------------------------------------


@st.composite
def cases(draw):
    """A random graph of Adds, two lists of its tensors, and ops or None."""
    graph = {"k0": 2, "k1": 2}
    for index in range(draw(st.integers(1, 8))):
        graph[f"n{index}"] = (draw(st.sampled_from(list(graph))), draw(st.sampled_from(list(graph))))
    chosen = draw(st.lists(st.sampled_from(list(graph)), unique=True, min_size=2, max_size=6))
    half = len(chosen) // 2
    can = draw(st.none() | st.lists(st.sampled_from(list(graph)), unique=True))
    return graph, chosen[:half], chosen[half : 2 * half], can


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(cases())
def test_swapping_twice_restores_the_graph(build_model, case):
    """Swapping twice restores the graph; a refused swap changes nothing."""
    graph, first, second, can = case
    model = build_model(graph)
    allowed = None if can is None else ops_by_name(model, *can)
    before = tensors_in_slots(model)
    try:
        count = ge.swap_ts(ts(model, *first), ts(model, *second), can_modify=allowed)
    except UsageError:
        assert tensors_in_slots(model) == before
        assume(False)
    check_invariants(model, "swap")
    assert count == len(moved(before, tensors_in_slots(model)))
    assert ge.swap_ts(ts(model, *reversed(first)), ts(model, *reversed(second)), can_modify=allowed) == count
    check_invariants(model, "swap")
    assert tensors_in_slots(model) == before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(cases())
def test_rerouting_never_makes_a_cycle(build_model, case):
    """The graph is valid, and only allowed readers changed, as many as reported."""
    graph, first, second, can = case
    model = build_model(graph)
    before = tensors_in_slots(model)
    count = ge.reroute_ts(
        ts(model, *first), ts(model, *second), can_modify=None if can is None else ops_by_name(model, *can)
    )
    check_invariants(model, "reroute")
    assert nx.is_directed_acyclic_graph(model.main.nx)
    after = tensors_in_slots(model)
    pairs = {f"{old}:0": f"{new}:0" for new, old in zip(first, second, strict=True)}
    changed = [
        (op, read, after["", op][slot])
        for (_, op), slots in before.items()
        for slot, read in enumerate(slots)
        if after["", op][slot] != read
    ]
    assert len(changed) == count
    assert all(pairs[read] == now and (can is None or op in can) for op, read, now in changed)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(cases(), st.integers(5, 8), st.integers(-20, 20))
def test_rerouting_to_a_quantizer_and_back(build_model, case, bits, exponent):
    """Every reader but the quantizer is rerouted to it, and back."""
    graph, (name, *_), _, _ = case
    model = build_model(graph)
    before = tensors_in_slots(model)
    (tensor,) = ts(model, name)
    readers = len(tensor.uses())
    quantized = ge.make_quant_op(model, tensor, name, gq.FixedPoint(bits, exponent))
    assert ge.reroute_ts(quantized, tensor) == readers == ge.reroute_ts(tensor, quantized)
    check_invariants(model, "reroute")
    assert tensors_in_slots(model).items() >= before.items()


# -- what the runtimes make of it ----------------------------------------------------------------


def steps(values, bits, exponent):
    """Compute fixed point by hand, in FakeQuant's float32 steps: counted from the lower end, half a step rounds up."""
    scale = np.float32(2.0**exponent)
    high = np.float32((2 ** (bits - 1) - 1) * scale)
    return np.floor((np.clip(values, -high, high) + high) / scale + np.float32(0.5)) * scale - high


@pytest.mark.parametrize("opset", [11, 13, 21])
@pytest.mark.parametrize(("bits", "exponent"), [(8, -4), (16, -8), (16, -12), (12, -5), (5, -2), (4, 0)])
def test_onnxruntime_sees_it(bits, exponent, opset, tmp_path):
    """The rerouted consumer reads the quantized tensor, the other reader the float one, bit for bit."""
    import onnxruntime

    text = f"""<ir_version: 8, opset_import: ["": {opset}]>
    g (float[N] x) => (float[N] y, float[N] z) {{ t = Identity(x)\n y = Neg(t)\n z = Abs(t) }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    model = gq.load(tmp_path / "model.onnx")
    assert gq.insert_quant_op(model, "t", "y", gq.FixedPoint(bits, exponent)) == 1
    session = onnxruntime.InferenceSession(model.save(tmp_path / "made.onnx"), providers=["CPUExecutionProvider"])
    values = np.random.default_rng(5).normal(scale=6, size=1000).astype(np.float32)
    y, z = session.run(None, {"x": values})
    top = 2 ** (bits - 1) - 1
    assert np.array_equal(y, -np.clip(np.rint(values / 2.0**exponent), -top, top) * 2.0**exponent)
    assert np.array_equal(z, np.abs(values))


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "exponent"), [(8, -4), (16, -8), (5, -2)])
def test_tensorflow_equals_a_graph_made_by_hand(bits, exponent, samples, tmp_path):
    """The edited graph equals the original with the input quantized in numpy, bit for bit."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    v1 = pytest.importorskip("tensorflow").compat.v1
    model = gq.load(samples / "digits_cnn.pb")
    gq.insert_quant_op(model, "max_pool:0", BLOCK, gq.FixedPoint(bits, exponent))
    gq.insert_quant_op(model, "residual_1/conv/ReadVariableOp", BLOCK, gq.FixedPoint(bits, exponent))
    image = np.load(samples / "digits_cnn_eval.npz")["image"][:32].astype(np.float32).reshape(-1, 8, 8, 1)
    original = read_graph_def(samples / "digits_cnn.pb")
    pooled, kernel = run_graph(original, ["max_pool:0", "residual_1/conv/ReadVariableOp:0"], {"image:0": image})
    by_hand = v1.GraphDef()
    by_hand.CopyFrom(original)
    for name in ("by_hand", "kernel_by_hand"):
        by_hand.node.add(name=name, op="Placeholder").attr["dtype"].type = 1
    (conv,) = [node for node in by_hand.node if node.name == "residual_1/conv"]
    del conv.input[:]
    conv.input.extend(["by_hand", "kernel_by_hand"])
    feeds = {
        "image:0": image,
        "by_hand:0": steps(pooled, bits, exponent),
        "kernel_by_hand:0": steps(kernel, bits, exponent),
    }
    (expected,) = run_graph(by_hand, ["probabilities:0"], feeds)
    written_graph = read_graph_def(Path(model.save(tmp_path / "made.pb")))
    (given_back,) = run_graph(written_graph, ["probabilities:0"], {"image:0": image})
    assert np.array_equal(given_back, expected)
    (float_result,) = run_graph(original, ["probabilities:0"], {"image:0": image})
    assert not np.array_equal(given_back, float_result)


MTCNN_EDITS = (
    ("pnet/while/pool1/MaxPool", "pnet/while/conv2/Conv2D", 0),
    ("pnet/while/conv2/Conv2D/Enter", "pnet/while/conv2/Conv2D", 1),
    ("rnet/cond/pool1/MaxPool", "rnet/cond/conv2/Conv2D", 0),
)
LOOP_DETECTOR_EDITS = (
    ("net/while/pool1/MaxPool", "net/while/conv2/Conv2D", 0),
    ("net/while/conv2/Enter", "net/while/conv2/Conv2D", 1),
    ("head/cond/pool3/MaxPool", "head/cond/conv3/Conv2D", 0),
)
"""Producer, consumer and slot of edits in a loop and in a branch."""


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "exponent"), [(8, -4), (16, -8)])
def test_a_loop_of_tensorflow_1_equals_one_made_by_hand(bits, exponent, model_folder, tmp_path):
    """In the loop and branches of mtcnn and its stand-in, the edited graph equals one with hand-written ops."""
    pytest.importorskip("tensorflow")
    quantizer = gq.FixedPoint(bits, exponent)
    model = gq.load(model_folder / "mtcnn.pb")
    by_hand = read_graph_def(model_folder / "mtcnn.pb")
    nodes = {node.name: node for node in by_hand.node}
    if model_folder == SHARED_MODELS:
        outputs, edits = ["box:0", "prob:0", "landmarks:0"], MTCNN_EDITS
        picture = np.load(model_folder / "ultraface/images.npz")["rgb"][3].astype(np.float32)[..., ::-1]
        feeds = {"input:0": picture, "min_size:0": 20.0, "thresholds:0": [0.6, 0.7, 0.7], "factor:0": 0.709}
    else:
        outputs, edits = ["prob:0"], LOOP_DETECTOR_EDITS
        feeds = {f"{name}:0": value for name, value in loop_detector_feeds().items()}
    for producer, consumer, slot in edits:
        assert gq.insert_quant_op(model, producer, consumer, quantizer) == 1
        fake_quant_node = by_hand.node.add(name=f"{producer}/by_hand", op="FakeQuantWithMinMaxArgs", input=[producer])
        fake_quant_node.attr["min"].f, fake_quant_node.attr["max"].f = quantizer.min, quantizer.max
        fake_quant_node.attr["num_bits"].i, fake_quant_node.attr["narrow_range"].b = bits, True
        nodes[consumer].input[slot] = fake_quant_node.name
    edited = read_graph_def(Path(model.save(tmp_path / "mtcnn.pb")))
    results = [run_graph(message, outputs, feeds) for message in (edited, by_hand)]
    assert len(results[0][0]) > 0
    assert all(np.array_equal(actual, reference) for actual, reference in zip(*results, strict=True))


@pytest.mark.slow
def test_a_saved_model_equals_the_frozen_graph(samples, tmp_path):
    """The recipe in a function gives the results of the frozen graph of the same network."""
    tensorflow = pytest.importorskip("tensorflow")
    model, frozen = gq.load(samples / "digits_cnn_saved_model"), gq.load(samples / "digits_cnn.pb")
    for edited_model in (model, frozen):
        assert gq.insert_quant_op(edited_model, "max_pool:0", BLOCK, gq.FixedPoint(8, -4)) == 1
    image = np.load(samples / "digits_cnn_eval.npz")["image"][:32].astype(np.float32).reshape(-1, 8, 8, 1)
    loaded = tensorflow.saved_model.load(str(model.save(tmp_path / "made")))
    (output,) = loaded.signatures["serving_default"](tensorflow.constant(image)).values()
    message = read_graph_def(Path(frozen.save(tmp_path / "made.pb")))
    (expected,) = run_graph(message, ["probabilities:0"], {"image:0": image})
    assert np.allclose(output.numpy(), expected, rtol=0, atol=1e-6)
