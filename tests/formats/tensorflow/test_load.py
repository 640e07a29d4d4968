"""Loading TensorFlow models: names, kinds, shapes, parameters, functions, outputs and errors."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.shared_models import SHARED_MODELS

import graphquant as gq
from graphquant.analysis.diff import diff_models
from graphquant.errors import ModelError
from graphquant.formats.tensorflow import emit, load, proto
from graphquant.ir import Call, Model, Parameters, TensorRef, Use, check_invariants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[3]
SAMPLES = ROOT / "sample_models"
FILES = [*SAMPLES.glob("*.pb"), *SAMPLES.glob("*.pbtxt"), *SAMPLES.glob("*_saved_model")]
sample_models = pytest.mark.parametrize(
    "path", sorted(path for path in FILES if ".quant" not in path.suffixes), ids=lambda p: p.name
)

SMALL = """
node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } }
       attr { key: "shape" value { shape { dim { size: -1 } dim { size: 2 } } } } }
node { name: "w" op: "Const" attr { key: "dtype" value { type: DT_FLOAT } } attr { key: "value" value { tensor {
       dtype: DT_FLOAT tensor_shape { dim { size: 2 } dim { size: 3 } } float_val: 1 float_val: 2 } } } }
node { name: "w/read" op: "Identity" input: "w" attr { key: "T" value { type: DT_FLOAT } } }
node { name: "y" op: "MatMul" input: "x" input: "w/read" input: "^gate" attr { key: "T" value { type: DT_FLOAT } } }
node { name: "gate" op: "NoOp" }
node { name: "halves" op: "Split" input: "axis" input: "y" attr { key: "T" value { type: DT_FLOAT } }
       attr { key: "num_split" value { i: 3 } } }
node { name: "axis" op: "Const" attr { key: "dtype" value { type: DT_INT32 } } attr { key: "value" value { tensor {
       dtype: DT_INT32 tensor_shape { } int_val: 1 } } } }
node { name: "sum" op: "AddV2" input: "halves" input: "halves:2" attr { key: "T" value { type: DT_FLOAT } } }
versions { producer: 1200 }
"""


def load_text_graph(tmp_path: Path, text: str = SMALL) -> Model:
    """Load a GraphDef in text form."""
    path = tmp_path / "small.pb"
    path.write_text(text)
    return load(path)


def weighted(model: Model) -> Iterator[tuple[Use, TensorRef]]:
    """Yield the weight slots of all reachable ops, and their tensors."""
    for name in model.reachable_graphs():
        graph = model.graphs[name]
        for op in graph.ops():
            if "weight" in op.roles and op.kind != "matmul":
                slot = op.roles.index("weight")
                tensor = graph.slots(op.name)[slot]
                assert tensor is not None
                yield Use(name, op.name, slot), tensor


def test_small_graph(tmp_path: Path) -> None:
    """A GraphDef becomes ops with kinds, roles, names, dtypes, shapes and control edges, also from text."""
    model = load_text_graph(tmp_path)
    check_invariants(model, "load")
    main = model.main
    assert [op.name for op in main.ops()] == ["x", "w", "w/read", "y", "gate", "halves", "axis", "sum", "@sum"]
    assert [op.kind for op in main.ops()] == [
        *("input", "constant", "identity", "matmul", "other", "split", "constant", "add", "output"),
    ]
    assert (main.inputs, main.outputs) == (["x"], ["@sum"])
    y = main.op("y")
    assert (y.roles, y.channel_axis, y.attrs["transpose_b"]) == (("input", "weight"), 1, False)
    assert main.slots("y") == [TensorRef("", "x"), TensorRef("", "w/read")]
    assert main.control_inputs("y") == ["gate"]
    assert [output.name for output in main.op("halves").outputs] == ["halves:0", "halves:1", "halves:2"]
    assert main.slots("sum") == [TensorRef("", "halves", 0), TensorRef("", "halves", 2)]
    assert main.output(TensorRef("", "x")).shape == (None, 2)
    assert main.output(TensorRef("", "w/read")).shape == (2, 3)
    assert main.output(TensorRef("", "w/read")).dtype == "float32"


def test_last_value_repeats(tmp_path: Path) -> None:
    """A constant with fewer values than elements repeats the last one, and is a parameter through Identity."""
    parameters = Parameters(load_text_graph(tmp_path))
    assert parameters.value(TensorRef("", "w/read")).tolist() == [[1, 2, 2], [2, 2, 2]]
    assert not parameters.is_parameter(TensorRef("", "y"))


def test_transposed_weight(tmp_path: Path) -> None:
    """MatMul with transpose_b has its output channels on axis 0, ConcatV2 its axis in the last slot."""
    text = SMALL.replace('input: "^gate" attr', 'input: "^gate" attr { key: "transpose_b" value { b: true } } attr') + (
        'node { name: "join" op: "ConcatV2" input: "halves" input: "halves:1" input: "axis"'
        ' attr { key: "N" value { i: 2 } } attr { key: "T" value { type: DT_FLOAT } } }'
    )
    model = load_text_graph(tmp_path, text)
    assert model.main.op("y").channel_axis == 0
    assert model.main.op("join").roles == ("input", "input", "axis")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALL.replace('input: "halves:2"', 'input: "halves:3"'), "node 'sum' reads 'halves:3'"),
        (SMALL.replace('input: "w/read"', 'input: "gone"'), "node 'y' reads 'gone'"),
        (SMALL.replace('"^gate"', '"^gone"'), "node 'y' waits for 'gone'"),
        (SMALL.replace('"gate" op', '"x" op'), "called 'x'"),
        (SMALL.replace("num_split", "other"), "'num_split'"),
        ("what is this", "tensorflow.GraphDef in text"),
    ],
)
def test_damaged(tmp_path: Path, text: str, message: str) -> None:
    """A damaged graph is refused with file and reason."""
    with pytest.raises(ModelError) as caught:
        load_text_graph(tmp_path, text)
    assert message in str(caught.value)
    assert "small.pb" in str(caught.value)


def test_empty(tmp_path: Path) -> None:
    """An empty file and a missing one are refused."""
    path = tmp_path / "small.pb"
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="is empty"):
        load(path)
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path / "none.pb")


def test_hostile_constant(tmp_path: Path) -> None:
    """A tiny file that claims a constant of terabytes is refused when the value is read."""
    claims = SMALL.replace(
        "dim { size: 2 } dim { size: 3 } } float_val", "dim { size: 4000000 } dim { size: 900000 } } float_val"
    )
    with pytest.raises(ModelError, match="claims 3600000000000 elements"):
        Parameters(load_text_graph(tmp_path, claims)).value(TensorRef("", "w"))


def test_unknown_operation(tmp_path: Path) -> None:
    """A custom operation without a definition has the outputs that are read."""
    text = (
        'node { name: "own" op: "MyOwn" input: "y" } '
        'node { name: "z" op: "Identity" input: "own:1" attr { key: "T" value { type: DT_FLOAT } } }'
    )
    model = load_text_graph(tmp_path, SMALL + text)
    assert [output.name for output in model.main.op("own").outputs] == ["own:0", "own:1"]
    assert model.main.op("own").outputs[1].dtype is None


@sample_models
def test_samples(path: Path) -> None:
    """Every sample model loads into valid graphs, with weight values of the shapes that the ops need."""
    model = load(path)
    check_invariants(model, "load")
    parameters = Parameters(model)
    weight_uses = list(weighted(model))
    assert len(weight_uses) == (7 if "cnn" in path.name else 0)
    for use, tensor in weight_uses:
        value = parameters.value(tensor)
        assert value is not None, use
        axis = model.graphs[use.graph].op(use.op).channel_axis
        assert value.ndim == 4
        assert value.shape[axis] in {8, 16}


@sample_models
def test_same_weights(path: Path) -> None:
    """Text, binary and SavedModel hold the same weights under the same op names."""
    reference_path = SAMPLES / f"{'_'.join(path.stem.split('_')[:2])}.pb"
    values = []
    for model in (load(path), load(reference_path)):
        parameters = Parameters(model)
        values.append({use.op: parameters.value(tensor) for use, tensor in weighted(model)})
    assert values[0].keys() == values[1].keys()
    for name, value in values[0].items():
        np.testing.assert_array_equal(value, values[1][name])


def test_loop_and_branches() -> None:
    """While and If call functions; a weight passed through a loop body is a parameter, its state is not."""
    model = load(SAMPLES / "digits_rnn.pb")
    loop, branch = model.main.op("recurrence"), model.main.op("brightness")
    assert (loop.kind, branch.kind) == ("while", "if")
    body = next(call for call in loop.calls if call.attr == "body")
    assert body == Call("body", body.graph, 0, loop=True)
    assert {(call.attr, call.offset) for call in branch.calls} == {("then_branch", 1), ("else_branch", 1)}
    assert sorted(model.reachable_graphs()) == sorted(model.graphs)
    parameters = Parameters(model)
    products = [op for op in model.graphs[body.graph].ops() if op.kind == "matmul"]
    shapes = [parameters.value(model.graphs[body.graph].slots(op.name)[1]).shape for op in products]
    assert sorted(shapes) == [(8, 8), (8, 24), (24, 24), (32, 48)]
    arguments = [TensorRef(body.graph, name) for name in model.graphs[body.graph].inputs[:6]]
    # Counter, number of rounds, index, state, results, input rows: only the number of rounds is known.
    assert [parameters.is_parameter(argument) for argument in arguments] == [False, True, False, False, False, False]
    condition = next(call.graph for call in loop.calls if call.attr == "cond")
    assert not any(parameters.is_parameter(TensorRef(condition, name)) for name in model.graphs[condition].inputs)


def test_mtcnn_weights(model_folder: Path) -> None:
    """All convolution weights of a frozen TF1 net, 19 in MTCNN, are found through Identity, Enter and Switch."""
    model = load(model_folder / "mtcnn.pb")
    check_invariants(model, "load")
    parameters = Parameters(model)
    weight_uses = list(weighted(model))
    is_real = model_folder == SHARED_MODELS
    assert len(weight_uses) == (19 if is_real else 5)
    kinds = set()
    for _, tensor in weight_uses:
        assert parameters.is_parameter(tensor)
        kinds.add(model.op(tensor).kind)
        constant = model.op(parameters.root_tensor(tensor)).source.attr["value"].tensor
        shape = [dim.size for dim in constant.tensor_shape.dim]
        expected = np.frombuffer(constant.tensor_content, "<f4").reshape(shape)
        np.testing.assert_array_equal(parameters.value(tensor), expected)
        assert model.output(tensor).shape == expected.shape
    assert kinds == {"enter", "switch"}
    assert model.main.outputs == (["@prob", "@landmarks", "@box"] if is_real else ["@prob"])


def test_kws_weights(model_folder: Path) -> None:
    """The convolutions reachable from the serving signature have variables of the checkpoint as weights."""
    model, is_real = load(model_folder / "kws/saved_model"), model_folder == SHARED_MODELS
    check_invariants(model, "load")
    assert len(model.graphs) - len(model.saved_functions) == (198 if is_real else 6)
    assert model.main.outputs == ["@serving_default/dense" if is_real else "@serving_default/probabilities"]
    parameters = Parameters(model)
    checkpoint, keys = model.source.checkpoint()
    weight_uses = list(weighted(model))
    assert len(weight_uses) == (9 if is_real else 7)
    for _, tensor in weight_uses:
        handle = parameters.root_tensor(tensor)
        assert model.op(handle).type == "VarHandleOp"
        value = parameters.value(tensor)
        np.testing.assert_array_equal(value, checkpoint.read(keys[handle.op]))
        assert value.shape == model.output(handle).shape
        assert value.std() > 0.01


def test_saver_functions_are_not_live() -> None:
    """Functions that save and restore variables are in the model but are not reachable."""
    model = load(SAMPLES / "digits_rnn_saved_model")
    unreachable = sorted(set(model.graphs) - set(model.reachable_graphs()) - set(model.saved_functions))
    assert [name.rpartition("_")[0] for name in unreachable] == [
        "__inference__traced_restore",
        "__inference__traced_save",
    ]


def test_a_saver_is_an_op_of_the_main_graph(tmp_path: Path) -> None:
    """An op inside a function may have the name of the main graph's saver."""
    original = load(SAMPLES / "digits_rnn_saved_model")
    inside = next(
        (name, op.name)
        for name in original.reachable_graphs()
        for op in original.graphs[name].ops()
        if name and op.name not in original.main and op.calls
    )
    saved = proto.SavedModel.FromString((SAMPLES / "digits_rnn_saved_model" / "saved_model.pb").read_bytes())
    saved.meta_graphs[0].saver_def.save_tensor_name = f"{inside[1]}:0"
    (tmp_path / "saved_model.pb").write_bytes(saved.SerializeToString())
    model = load(tmp_path)
    assert model.graphs[inside[0]].op(inside[1]).calls == original.graphs[inside[0]].op(inside[1]).calls
    assert set(original.reachable_graphs()) <= set(model.reachable_graphs())


def test_contents_of_the_checkpoint_are_no_weight(tmp_path: Path) -> None:
    """The saver reads a description of the checkpoint, which tf_keras writes in another order each time."""
    saved = proto.SavedModel.FromString((SAMPLES / "digits_cnn_saved_model" / "saved_model.pb").read_bytes())
    shutil.copytree(SAMPLES / "digits_cnn_saved_model", tmp_path / "net")
    nodes = {node.name: node for node in saved.meta_graphs[0].graph_def.node}
    save_op = nodes[saved.meta_graphs[0].saver_def.save_tensor_name.partition(":")[0]]
    constants = [nodes[name] for name in save_op.input if name in nodes and nodes[name].op == "Const"]
    for node in constants:
        node.attr["value"].tensor.string_val[0] += b"changed"
    (tmp_path / "net" / "saved_model.pb").write_bytes(saved.SerializeToString())
    assert constants
    assert not diff_models(load(tmp_path / "net"), load(SAMPLES / "digits_cnn_saved_model"))


def test_a_name_without_a_stem_is_refused(tmp_path: Path) -> None:
    """A checkpoint that was saved under the name of a folder has files such as `.meta`."""
    (tmp_path / ".meta").write_bytes(b"x")
    with pytest.raises(ModelError, match="no name"):
        gq.load(tmp_path / ".meta")


def test_saved_model_file_or_folder() -> None:
    """A SavedModel can be given by its folder or by the file in it."""
    folder = SAMPLES / "digits_cnn_saved_model"
    assert load(folder).digest == load(folder / "saved_model.pb").digest


def corrupt(data: bytes, seed: int) -> bytes:
    """Return `data` with some bytes changed, cut or doubled."""
    chance = random.Random(seed)  # noqa: S311  # not for secrets
    mutable = bytearray(data)
    for _ in range(chance.choice([1, 1, 3, 20])):
        at = chance.randrange(len(mutable))
        action = chance.randrange(4)
        if action == 0:
            mutable[at] = chance.randrange(256)
        elif action == 1:
            del mutable[at : at + chance.randrange(1, 40)]
        elif action == 2:
            mutable[at:at] = mutable[at : at + chance.randrange(1, 40)]
        else:
            mutable[at] ^= 1 << chance.randrange(8)
        if not mutable:
            break
    return bytes(mutable[: chance.randrange(len(mutable))] if seed % 10 == 0 else mutable)


def attempt(action: Callable[[], Any]) -> str:
    """Run `action`, which may only raise ModelError; return its message, or None."""
    try:
        action()
    except ModelError as error:
        return str(error)
    return ""


def read_values(model: Model) -> None:
    """Read all lazy values of a model."""
    parameters = Parameters(model)
    for graph in model.graphs.values():
        for op in graph.ops():
            for port in range(len(op.outputs)):
                attempt(partial(parameters.value, TensorRef(graph.name, op.name, port)))
            for name in op.attrs:
                attempt(partial(op.attrs.__getitem__, name))


@pytest.mark.parametrize("name", ["digits_rnn.pb", "digits_rnn_saved_model/saved_model.pb", "small.pb", "small.pbtxt"])
def test_fuzzed(tmp_path: Path, name: str) -> None:
    """Damaged files load and are written unchanged, or are refused; a function that nothing calls when it is read."""
    if name.startswith("small"):
        data = proto.to_binary(proto.parse_text(SMALL, proto.GraphDef())) if name == "small.pb" else SMALL.encode()
    else:
        data = (SAMPLES / name).read_bytes()
    path = tmp_path / "model.pb"
    loaded = 0
    for seed in range(150):
        path.write_bytes(corrupt(data, seed))
        message = attempt(partial(load, path))
        if message:
            assert "model.pb" in message
            continue
        loaded += 1
        model = load(path)
        if attempt(partial(read_values, model)):
            assert not all(graph.is_built for graph in model.graphs.values())
            continue
        check_invariants(model, "load")
        read_values(model)
        assert proto.to_binary(emit(model)) == proto.to_binary(model.source.message)
    assert 0 < loaded < 150


CALLED = """
node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }
node { name: "w" op: "Const" attr { key: "dtype" value { type: DT_FLOAT } } attr { key: "value" value { tensor {
       dtype: DT_FLOAT tensor_shape { dim { size: 2 } dim { size: 2 } } float_val: 5 } } } }
node { name: "call" op: "layer" input: "x" input: "w" }
library {
  function { signature { name: "layer" input_arg { name: "a" type: DT_FLOAT } input_arg { name: "b" type: DT_FLOAT }
      output_arg { name: "y" type: DT_FLOAT } }
    node_def { name: "read" op: "Identity" input: "b" attr { key: "T" value { type: DT_FLOAT } } }
    node_def { name: "mm" op: "MatMul" input: "a" input: "read:output:0" attr { key: "T" value { type: DT_FLOAT } } }
    ret { key: "y" value: "mm:product:0" } }
  function { signature { name: "training"
      input_arg { name: "p" type: DT_FLOAT } output_arg { name: "q" type: DT_FLOAT } }
    node_def { name: "again" op: "layer" input: "p" input: "p" }
    ret { key: "q" value: "again:y:0" } }
}
versions { producer: 1200 }
"""


def test_function_as_operation(tmp_path: Path) -> None:
    """A node whose type is a function's name calls it; unreachable functions have no influence."""
    model = load_text_graph(tmp_path, CALLED)
    check_invariants(model, "load")
    assert model.main.op("call").kind == "call"
    assert model.main.op("call").calls == (Call("", "layer", 0),)
    assert model.reachable_graphs() == ["", "layer"]
    assert model.graphs["training"].slots("@q") == [TensorRef("training", "again")]
    value = Parameters(model).value(TensorRef("layer", "read"))
    assert value is not None
    assert value.tolist() == [[5, 5], [5, 5]]
    assert model.graphs["layer"].op("mm").outputs[0].name == "mm:product:0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CALLED.replace('"mm:product:0"', '"mm:output:0"'), "the result 'y' reads 'mm:output:0'"),
        (CALLED.replace('name: "training"', 'name: "layer"'), "Two functions "),
        (CALLED.replace('{ name: "b" type', '{ name: "a" type'), "argument 'a' twice"),
        (CALLED.replace('name: "read" op', 'name: "a" op'), "'layer', two nodes"),
        (CALLED.replace('op: "layer" input: "x"', 'op: "If" input: "x"'), "'Tout'"),
    ],
)
def test_damaged_function(tmp_path: Path, text: str, message: str) -> None:
    """A damaged function is refused with its name."""
    with pytest.raises(ModelError) as caught:
        load_text_graph(tmp_path, text)
    assert message in str(caught.value)


def test_damaged_function_that_nothing_calls(tmp_path: Path) -> None:
    """A function that nothing calls is built when its ops are read, also in a copy, and refused then."""
    model = load_text_graph(tmp_path, CALLED.replace('key: "q"', 'key: "r"'))
    copied = model.copy()
    assert [name for name, graph in copied.graphs.items() if not graph.is_built] == ["training"]
    assert Parameters(copied).is_parameter(TensorRef("layer", "read"))
    for candidate in (model, copied):
        with pytest.raises(ModelError) as caught:
            list(candidate.graphs["training"].ops())
        assert "'q'" in str(caught.value)

    path = model.path
    assert path is not None
    with pytest.raises(ModelError):
        gq.load(path)
    assert gq.plan(path).sites


def test_missing_function(tmp_path: Path) -> None:
    """A call of a missing function is refused."""
    text = CALLED.replace(
        'op: "layer" input: "x" input: "w"',
        'op: "PartitionedCall" input: "x" attr { key: "f" value { func { name: "gone" } } }'
        ' attr { key: "Tin" value { list { type: DT_FLOAT } } } attr { key: "Tout" value { list { type: DT_FLOAT } } }',
        1,
    )
    with pytest.raises(ModelError, match="calls 'gone'"):
        load_text_graph(tmp_path, text)


def test_endless_recursion(tmp_path: Path) -> None:
    """Recursive functions load; their own arguments are not parameters."""
    text = CALLED.replace(
        'op: "MatMul" input: "a" input: "read:output:0"', 'op: "layer" input: "a" input: "read:output:0"'
    )
    text = text.replace("mm:product:0", "mm:y:0")
    model = load_text_graph(tmp_path, text)
    assert model.reachable_graphs() == ["", "layer"]
    assert not Parameters(model).is_parameter(TensorRef("layer", "mm"))
