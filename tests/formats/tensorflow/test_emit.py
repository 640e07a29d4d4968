"""Unedited models are written unchanged; an edit changes exactly the nodes that it concerns."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.shared_models import SHARED_MODELS

from graphquant.formats.tensorflow import emit, encode_skeleton, load, proto
from graphquant.formats.tensorflow.source import RULE_ATTR
from graphquant.ir import Model, Op, Output, TensorRef, Use, check_invariants
from graphquant.numerics import IntType, QuantizationGrid, Range
from graphquant.qdq import FAMILIES, QDQSite

ROOT = Path(__file__).parents[3]
SAMPLES = ROOT / "sample_models"
FILES = [*SAMPLES.glob("*.pb"), *SAMPLES.glob("*.pbtxt"), *SAMPLES.glob("*_saved_model")]
ALL = sorted(path for path in FILES if ".quant" not in path.suffixes)
REAL = [path for path in (SHARED_MODELS / "mtcnn.pb", SHARED_MODELS / "kws" / "saved_model") if path.exists()]
STAND_INS = [Path("mtcnn.pb"), Path("kws/saved_model")]
all_models = pytest.mark.parametrize("path", [*ALL, *STAND_INS, *REAL], ids=lambda path: path.name)

TEXT = """
node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } device: "/cpu:0" }
node { name: "y" op: "Relu" input: "x" attr { key: "T" value { type: DT_FLOAT } } device: "/cpu:1" }
node { name: "z" op: "Add" input: "y" input: "y" input: "^x" attr { key: "T" value { type: DT_FLOAT } } }
node { name: "u" op: "Neg" input: "y" attr { key: "T" value { type: DT_FLOAT } } }
"""


def insert_fake_quant(model: Model, use: Use, name: str = "", *, in_frame: bool = False) -> TensorRef:
    """Quantize the input of `use` to 8 bits over [-1, 3] for this use only; return the quantized tensor."""
    graph = model.graphs[use.graph]
    tensor = graph.source_of(use)
    assert tensor is not None
    grid = QuantizationGrid(type=IntType(8, signed=True), symmetric=False)
    params = grid.qparams(Range(np.float64(-1), np.float64(3)))
    site = QDQSite(tensor=tensor, name=name or f"{tensor.op}/quant", params=params, rule="test", in_frame=in_frame)
    quantized = FAMILIES["fake-quant"].add_ops(graph, site)
    graph.reroute(tensor, [use], quantized)
    return quantized


def copy_of_text_graph(tmp_path: Path, text: str = TEXT) -> Model:
    """Return a loaded copy of a GraphDef in text form."""
    path = tmp_path / "small.pbtxt"
    path.write_text(text)
    return load(path).copy()


def node_of_name(message: object, name: str) -> object:
    """The node of that name."""
    return next(node for node in message.node if node.name == name)


@all_models
def test_empty_plan(path: Path, stand_ins: Path) -> None:
    """Without edits the emitted message equals the source, which is not modified."""
    model = load(stand_ins / path)  # an absolute path remains
    before = model.source.message.SerializeToString(deterministic=True)
    assert emit(model.copy()) == model.source.message
    assert model.source.message.SerializeToString(deterministic=True) == before


def test_insert(tmp_path: Path) -> None:
    """One use of a tensor is rerouted to a FakeQuant with constants, rule and device; other nodes are unchanged."""
    model = copy_of_text_graph(tmp_path)
    insert_fake_quant(model, Use("", "z", 1))
    check_invariants(model, "edit")
    message = emit(model)
    source = model.source.message
    assert [new_node.name for new_node in message.node] == ["x", "y", "z", "u", "y/quant/min", "y/quant/max", "y/quant"]
    assert [node_of_name(message, name) == node_of_name(source, name) for name in "xyzu"] == [True, True, False, True]
    assert list(node_of_name(message, "z").input) == ["y", "y/quant", "^x"]
    quant = node_of_name(message, "y/quant")
    assert list(quant.input) == ["y", "y/quant/min", "y/quant/max"]
    assert (quant.op, quant.attr["num_bits"].i, quant.attr["narrow_range"].b) == ("FakeQuantWithMinMaxVars", 8, False)
    assert quant.attr[RULE_ATTR].s == b"test"
    assert [node_of_name(message, name).device for name in ("y/quant", "y/quant/min", "y/quant/max")] == ["/cpu:1"] * 3
    (tmp_path / "again.pb").write_bytes(proto.to_binary(message))
    again = load(tmp_path / "again.pb").main
    assert [op.name for op in again.ops() if op.rule == "test"] == ["y/quant/min", "y/quant/max", "y/quant"]
    high = node_of_name(message, "y/quant/max").attr["value"].tensor
    assert high.dtype == proto.DataType["DT_FLOAT"]
    assert len(high.tensor_content) == 4
    assert np.frombuffer(high.tensor_content, "<f4")[0] == pytest.approx(3, abs=0.02)


def test_in_frame(tmp_path: Path) -> None:
    """In a frame the new constants wait for the quantized tensor."""
    model = copy_of_text_graph(tmp_path)
    insert_fake_quant(model, Use("", "z", 0), in_frame=True)
    assert list(node_of_name(emit(model), "y/quant/min").input) == ["^y"]


def test_replace_and_remove(tmp_path: Path) -> None:
    """A replaced op keeps its position; removing an op also removes its control edges."""
    model = copy_of_text_graph(tmp_path)
    graph = model.main
    graph.replace_op(replace(graph.op("u"), source=None, type="Identity", kind="identity", attrs={}))
    graph.replace_op(replace(graph.op("y"), attrs={**graph.op("y").attrs, "alpha": 0.5, "shapes": [(1, None), None]}))
    gate = graph.add_op(Op(name="gate", kind="other", type="NoOp"))
    graph.connect_inputs("u", [], control_sources=[gate.op])
    message = emit(model)
    assert [emitted_node.name for emitted_node in message.node] == ["x", "y", "z", "u", "gate"]
    assert (node_of_name(message, "u").op, list(node_of_name(message, "u").input)) == ("Identity", ["y", "^gate"])
    assert node_of_name(message, "u").attr["T"].type == proto.DataType["DT_FLOAT"]
    assert node_of_name(message, "y").attr["alpha"].f == 0.5
    shapes = node_of_name(message, "y").attr["shapes"].list.shape
    assert [dim.size for dim in shapes[0].dim] == [1, -1]
    assert shapes[1].unknown_rank
    model = copy_of_text_graph(tmp_path, TEXT + 'node { name: "late" op: "NoOp" input: "^u" }')
    model.main.remove_op("@z")
    model.main.remove_op("u")
    message = emit(model)
    assert [emitted_node.name for emitted_node in message.node] == ["x", "y", "z", "late"]
    assert list(node_of_name(message, "late").input) == []


def test_new_constant_value(tmp_path: Path) -> None:
    """A constant with a new value keeps its node and all other attributes."""
    text = (
        'node { name: "c" op: "Const" attr { key: "dtype" value { type: DT_INT32 } }'
        ' attr { key: "_class" value { s: "k" } }'
        ' attr { key: "value" value { tensor { dtype: DT_INT32 tensor_shape { } int_val: 3 } } } }'
        ' node { name: "d" op: "Neg" input: "c" attr { key: "T" value { type: DT_INT32 } } }'
    )
    model = copy_of_text_graph(tmp_path, text)
    value = np.arange(4, dtype=np.int32).reshape(2, 2)
    model.main.replace_op(replace(model.main.op("c"), read_value=lambda: value))
    constant_node = node_of_name(emit(model), "c")
    assert constant_node.attr["_class"].s == b"k"
    assert np.frombuffer(constant_node.attr["value"].tensor.tensor_content, "<i4").tolist() == [0, 1, 2, 3]


def test_function_results() -> None:
    """In a function, inputs name output arguments; rerouting a result changes `ret`."""
    model = load(SAMPLES / "digits_cnn_saved_model").copy()
    name = next(name for name in model.reachable_graphs() if "stem/batch_norm" in model.graphs[name])
    graph = model.graphs[name]
    insert_fake_quant(model, Use(name, "stem/batch_norm", 0))
    insert_fake_quant(model, Use(name, graph.outputs[0], 0), "result/quant")
    meta = emit(model).meta_graphs[0]
    function = next(function for function in meta.graph_def.library.function if function.signature.name == name)
    nodes = {function_node.name: function_node for function_node in function.node_def}
    assert nodes["stem/batch_norm"].input[0] == "stem/conv/quant:outputs:0"
    assert list(nodes["stem/conv/quant"].input) == [
        *("stem/conv:output:0", "stem/conv/quant/min:output:0", "stem/conv/quant/max:output:0"),
    ]
    assert function.ret[graph.outputs[0][1:]] == "result/quant:outputs:0"
    op_defs = {op_def.name: op_def for op_def in meta.meta_info_def.stripped_op_list.op}
    added = op_defs["FakeQuantWithMinMaxVars"]
    assert [arg.name for arg in added.input_arg] == ["inputs", "min", "max"]
    assert [(attr.name, attr.type) for attr in added.attr] == [("narrow_range", "bool"), ("num_bits", "int")]


def test_signature() -> None:
    """Rerouting a signature output changes every entry that named the tensor."""
    model = load(SAMPLES / "digits_cnn_saved_model")
    copied_signature = model.source.message.meta_graphs[0].signature_def["twin"]
    copied_signature.CopyFrom(model.source.message.meta_graphs[0].signature_def["serving_default"])
    model = model.copy()
    insert_fake_quant(model, Use("", "@serving_default/probabilities", 0))
    signatures = emit(model).meta_graphs[0].signature_def
    assert signatures["serving_default"].outputs["probabilities"].name == "StatefulPartitionedCall/quant:0"
    assert signatures["twin"].outputs["probabilities"].name == "StatefulPartitionedCall/quant:0"


def test_unread_result_name(tmp_path: Path) -> None:
    """The outputs of a function's custom operation keep their names of the file."""
    text = """
      node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }
      node { name: "call" op: "PartitionedCall" input: "x" attr { key: "f" value { func { name: "f" } } }
             attr { key: "Tin" value { list { type: DT_FLOAT } } }
             attr { key: "Tout" value { list { type: DT_FLOAT } } } }
      library { function { signature { name: "f"
        input_arg { name: "a" type: DT_FLOAT } output_arg { name: "b" type: DT_FLOAT } }
        node_def { name: "own" op: "MyOwn" input: "a" }
        node_def { name: "n" op: "Neg" input: "own:second:0" attr { key: "T" value { type: DT_FLOAT } } }
        ret { key: "b" value: "own:first:0" } } }
    """
    model = copy_of_text_graph(tmp_path, text)
    graph = model.graphs["f"]
    assert graph.op("own").outputs == (Output("own:first:0"), Output("own:second:0"))
    graph.reroute(TensorRef("f", "own", 0), [Use("f", "@b", 0)], TensorRef("f", "own", 1))
    assert emit(model).library.function[0].ret["b"] == "own:second:0"


def test_skeleton(tmp_path: Path) -> None:
    """The skeleton contains every node and no constant data."""
    model = load(SAMPLES / "digits_cnn.pb")
    text = encode_skeleton(model)
    (tmp_path / "bare.pbtxt").write_text(text)
    bare = load(tmp_path / "bare.pbtxt")
    assert [op.name for op in bare.main.ops()] == [op.name for op in model.main.ops()]
    kernel = bare.main.op("stem/conv/ReadVariableOp/resource").read_value()
    assert kernel.shape == (3, 3, 1, 8)
    assert not kernel.any()
    assert len(text) < 50_000


@pytest.mark.slow
def test_same_bytes_every_time() -> None:
    """The written bytes do not depend on the hash seed."""
    code = f"""
import hashlib, sys
from pathlib import Path
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2])]!r}
from test_emit import insert_fake_quant, load, emit, proto, Use
model = load(Path({str(SAMPLES / "digits_rnn_saved_model")!r})).copy()
for name in model.reachable_graphs():
    for op in list(model.graphs[name].ops()):
        if "weight" in op.roles:
            insert_fake_quant(model, Use(name, op.name, 0))
message = emit(model)
print(hashlib.sha256(proto.to_binary(message) + proto.to_text(message).encode()).hexdigest())
"""
    digests = set()
    for seed in ("0", "4321"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        digests.add(process.stdout)
    assert len(digests) == 1
