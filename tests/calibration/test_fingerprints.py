"""Tensor fingerprints: equal for the same computation, different for any other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper, numpy_helper

import graphquant as gq
from graphquant.api.plan import prepare_for_plan
from graphquant.calibration.targets import all_float_targets, fingerprints, preserved_fingerprints
from graphquant.errors import ModelError
from graphquant.formats.onnx.reader import model_from_message
from graphquant.ir import Call, Model, Op, Output, TensorRef
from graphquant.ir.graph import Graph
from graphquant.quantize import prepare

if TYPE_CHECKING:
    from pathlib import Path


def all_fingerprints(model: Model) -> dict[str, str]:
    """Return the fingerprint of each float activation."""
    return {str(tensor): target.fingerprint for tensor, target in all_float_targets(model).items()}


def edited_model(path: Path, change) -> Model:
    """Return the ONNX model at `path` after `change` of its message."""
    message = onnx.load(path)
    change(message.graph)
    return model_from_message(message)


def test_fingerprints_are_reproducible(samples: Path) -> None:
    """Fingerprints do not depend on the file format or the run."""
    for name in ("digits_cnn.onnx", "digits_rnn.onnx", "digits_rnn_saved_model", "digits_rnn.pb"):
        one = all_fingerprints(gq.load(samples / name))
        assert one == all_fingerprints(gq.load(samples / name))
        assert all(len(cone) == 32 for cone in one.values())
        assert len(set(one.values())) > 0.9 * len(one)
    assert all_fingerprints(gq.load(samples / "digits_cnn.pb")) == all_fingerprints(
        gq.load(samples / "digits_cnn.pbtxt")
    )


def test_changes_affect_only_descendants(samples: Path) -> None:
    """Another weight, attribute or op type changes the fingerprints of its descendants only."""
    path = samples / "digits_cnn.onnx"
    before = all_fingerprints(gq.load(path))

    def weight(graph) -> None:
        conv = next(node for node in graph.node if node.name == "residual_2/conv")
        tensor = next(one for one in graph.initializer if one.name == conv.input[1])
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.5), tensor.name))

    def attribute(graph) -> None:
        next(node for node in graph.node if node.name == "max_pool").attribute.append(
            helper.make_attribute("storage_order", 1)
        )

    def kind(graph) -> None:
        next(node for node in graph.node if node.name == "hidden/relu").op_type = "Sigmoid"

    seen = []
    for change in (weight, attribute, kind):
        after = all_fingerprints(edited_model(path, change))
        assert list(after) == list(before)
        seen.append({name for name in before if before[name] != after[name]})
    assert "residual_2/conv:0" in seen[0]
    assert not {"stem/relu:0", "max_pool:0", "residual_1/conv:0"} & seen[0]
    assert {"max_pool:0", *seen[0]} < seen[1]
    assert "stem/relu:0" not in seen[1]
    assert "hidden/relu:0" in seen[2] < seen[0]


def test_fingerprints_after_preparation(samples: Path) -> None:
    """After an opset upgrade and BatchNorm folding, every planned tensor has the fingerprint of its source value."""
    source = gq.load(samples / "digits_cnn_bn.onnx")
    before = set(all_fingerprints(source).values())
    plan = gq.plan(source)
    assert {"opset", "fold-batchnorm"} <= {step.step for step in plan.steps}
    prepared = prepare_for_plan(source, plan)
    tensors = [site.tensor for site in plan.sites if not site.parameter]
    alone = fingerprints(prepared, tensors)
    with_source = fingerprints(prepared, tensors, preserved_fingerprints(source, prepared))
    assert set(with_source.values()) <= before
    assert not set(alone.values()) <= before
    folded = [step.undo["weighted"] for step in plan.steps if step.step == "fold-batchnorm"]
    norms = [step.target for step in plan.steps if step.step == "fold-batchnorm"]
    known = all_fingerprints(source)
    for conv, norm in zip(folded, norms, strict=True):
        assert (
            fingerprints(prepared, [TensorRef("", conv)], preserved_fingerprints(source, prepared)).popitem()[1]
            == known[f"{norm}:0"]
        )


def test_folded_batchnorm_of_tensorflow() -> None:
    """The value between conv and added bias is new, and the sum has the fingerprint of the norm."""
    source = _with_batchnorm()
    prepared, _ = prepare(source, ["fold-batchnorm"])
    found = preserved_fingerprints(source, prepared)
    before = all_fingerprints(source)
    assert found == {TensorRef("", "norm/bias_add"): before["norm:0"]}
    relu = TensorRef("", "relu")
    assert fingerprints(prepared, [relu], found)[relu] == before["relu:0"] != fingerprints(prepared, [relu])[relu]


def test_batchnorm_that_stays_is_not_preserved() -> None:
    """A BatchNorm that preparation switches to other statistics computes other values."""
    source = _with_batchnorm()
    prepared = source.copy()
    prepared.main.replace_op(replace(source.main.op("norm"), attrs={"is_training": False}))
    assert preserved_fingerprints(source, prepared) == {}


FOLDED = """
<ir_version: 8, opset_import: ["" : 11]> g (float[1,1,4,4] x) => (float[1,1,4,4] y)
<float[1,1,1,1] w = {2}, float[1] s = {3}, float[1] v = {1}, float six = {6}>
{
    a = Relu (x)
    c = Conv (a, w)
    n = BatchNormalization (c, s, s, s, v)
    i = Identity (n)
    k = Clip (i, , six)
    y = Neg (k)
}
"""


def test_folded_weights_of_an_upgraded_model_are_new() -> None:
    """After an opset upgrade, the fingerprint of an op is preserved unless preparation replaced its weights."""
    source = model_from_message(onnx.parser.parse_model(FOLDED))
    prepared, _ = prepare(source, ["drop-identity", "fold-batchnorm"])
    assert preserved_fingerprints(source, prepared) == {}
    prepared.opset = 13
    before = all_fingerprints(source)
    preserved = preserved_fingerprints(source, prepared)
    assert preserved == {TensorRef("", name): before[f"{name}:0"] for name in ("a", "k", "y")}
    conv = TensorRef("", "c")
    assert fingerprints(prepared, [conv], preserved)[conv] not in before.values()


def test_upgraded_outputs_of_other_names_are_new() -> None:
    """An upgrade may use the name of an op for a part of its computation, whose output has another name."""
    source = model_from_message(onnx.parser.parse_model(FOLDED))
    upgraded = source.copy()
    upgraded.opset = 13
    upgraded.main.replace_op(replace(source.main.op("k"), outputs=(Output("k_flat", "float32"),)))
    upgraded.main.replace_op(
        replace(source.main.op("a"), outputs=(*source.main.op("a").outputs, Output("more", "bool")))
    )
    assert set(preserved_fingerprints(source, upgraded)) == {TensorRef("", name) for name in "acniy"}


def _with_batchnorm() -> Model:
    model = Model(format="tensorflow")
    graph = Graph("", model.graphs)
    model.graphs[""] = graph

    def add(name: str, kind: str, inputs=(), value=None, shape=(1, 4, 4, 2), **more) -> TensorRef:
        known = Output(name, "float32", value.shape if value is not None else shape)
        op = Op(
            name=name,
            kind=kind,
            type=kind,
            outputs=(known,),
            read_value=None if value is None else lambda: value,
            **more,
        )
        return graph.add_op(op, inputs)

    x = add("x", "input")
    w = add("w", "constant", value=np.ones((1, 1, 2, 2), np.float32))
    conv = add("conv", "conv", [x, w], roles=("input", "weight"), channel_axis=3)
    stats = [add(name, "constant", value=np.full(2, 2, np.float32)) for name in ("scale", "offset", "mean", "variance")]
    norm = add("norm", "batchnorm", [conv, *stats])
    graph.inputs = ["x"]
    relu = add("relu", "relu", [norm])
    add("@out", "output", [relu])
    graph.outputs = ["@out"]
    return model


def _looping(weight: float, start: float, *, cut: bool = False) -> Model:
    """Create a main graph that feeds `start` to a loop whose body multiplies by `weight`."""
    model = Model(format="onnx")
    main, body = Graph("", model.graphs), Graph("loop/body", model.graphs, parent=("", "loop"))
    model.graphs |= {"": main, "loop/body": body}
    known = (Output("v", "float32", (2,)),)

    def add(graph: Graph, name: str, kind: str, inputs=(), value=None, **more) -> TensorRef:
        held = None if value is None else lambda: np.float32(value)
        return graph.add_op(Op(name=name, kind=kind, type=kind, outputs=known, read_value=held, **more), inputs)

    first = add(main, "start", "constant", value=start)
    beside = add(main, "beside", "relu", [add(main, "x", "input")])
    loop = add(main, "loop", "loop", [first], calls=(Call("body", "loop/body"),))
    add(main, "out", "output", [add(main, "after", "relu", [loop])])
    carried = add(body, "carried", "input")
    product = add(body, "product", "mul", [carried, add(body, "weight", "constant", value=weight)])
    add(body, "result", "output", [add(body, "sum", "add", [product, carried if cut else beside])])
    main.inputs, main.outputs, body.inputs, body.outputs = ["x"], ["out"], ["carried"], ["result"]
    return model


def test_loop_bodies() -> None:
    """A tensor in a loop body depends on the whole body and on the inputs of the loop."""
    body_names = [TensorRef("loop/body", name) for name in ("carried", "product", "sum")]
    names = [TensorRef("", "beside"), TensorRef("", "after"), *body_names]
    before = fingerprints(_looping(2, 3), names)
    assert fingerprints(_looping(2, 3), names) == before
    for other in (_looping(5, 3), _looping(2, 4), _looping(2, 3, cut=True)):
        after = fingerprints(other, names)
        assert [after[name] == before[name] for name in names] == [True, False, False, False, False]
    assert len(set(before.values())) == 5


def _nested_calls(value: float, *, unreachable_caller: bool = False) -> Model:
    """Create a main graph that calls one graph with `value`, and that graph another one, with a constant."""
    model = Model(format="onnx")
    for name in ("", "outer", "inner", "dead"):
        model.graphs[name] = Graph(name, model.graphs)
    known = (Output("v", "float32", (2,)),)

    def add(graph: str, name: str, kind: str, inputs=(), value=None, **more) -> TensorRef:
        read_value = None if value is None else lambda: np.float32(value)
        op = Op(name=name, kind=kind, type=kind, outputs=known, read_value=read_value, **more)
        return model.graphs[graph].add_op(op, inputs)

    def call(graph: str, callee: str, inputs) -> None:
        result = add(graph, "call", "call", inputs, calls=(Call("f", callee),))
        model.graphs[graph].outputs = [add(graph, "@out", "output", [result]).op]

    call("", "outer", [add("", "value", "constant", value=value)])
    call("outer", "inner", [add("outer", "fixed", "constant", value=3)])
    product = add("inner", "product", "mul", [add("inner", "in", "input"), add("inner", "weight", "constant", value=2)])
    model.graphs["inner"].inputs = ["in"]
    model.graphs["inner"].outputs = [add("inner", "@out", "output", [product]).op]
    if unreachable_caller:
        call("dead", "inner", [add("dead", "other", "constant", value=7)])
    return model


def test_called_graphs() -> None:
    """An op of a graph depends on the inputs of all calls that lead to it, unless it is a stored value."""
    names = [TensorRef("inner", "weight"), TensorRef("inner", "in"), TensorRef("inner", "product")]
    before, after = (fingerprints(_nested_calls(value), names) for value in (1, 5))
    assert [after[name] == before[name] for name in names] == [True, False, False]
    assert fingerprints(_nested_calls(1, unreachable_caller=True), names) == before


@pytest.mark.parametrize("name", ["digits_rnn_saved_model", "digits_rnn.pb"])
def test_tensorflow_loops(samples: Path, name: str) -> None:
    """Constants in While functions and TF1 frames change the fingerprints around them."""
    model = gq.load(samples / name)
    before = all_fingerprints(model)
    copy = model.copy()
    const, graph = next(
        (op, copy.graphs[name])
        for name in copy.reachable_graphs()
        for op in copy.graphs[name].ops()
        if op.read_value is not None and "float" in (op.outputs[0].dtype or "") + str(op.read_value().dtype)
    )
    graph.replace_op(replace(const, read_value=lambda: np.float32(77)))
    after = all_fingerprints(copy)
    assert 0 < sum(before[tensor] != after[tensor] for tensor in before) <= len(before)


def test_long_chains() -> None:
    """A chain of ten thousand ops needs no recursion."""
    model = Model(format="onnx")
    graph = Graph("", model.graphs)
    model.graphs[""] = graph
    here = graph.add_op(Op(name="x", kind="input", type="input", outputs=(Output("x", "float32"),)))
    for i in range(10_000):
        here = graph.add_op(Op(name=f"r{i}", kind="relu", type="Relu", outputs=(Output(f"r{i}", "float32"),)), [here])
    found = fingerprints(model, [here, TensorRef("", "r0")])
    assert len(set(found.values())) == 2


class Message:
    """A message of protobuf, whose text form depends on the release of protobuf."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def SerializeToString(self, *, deterministic: bool) -> bytes:  # noqa: N802, method of protobuf
        """Return the bytes of the message."""
        assert deterministic
        return self._payload


def fingerprint_of_relu(attrs, *, source=None, names=("source", "relu")) -> str:
    """Return the fingerprint of a Relu with these attributes behind an input or another op."""
    model = Model(format="onnx")
    graph = model.graphs[""] = Graph("", model.graphs)
    fields = {"kind": "input", "type": "Input", **(source or {})}
    tensor = graph.add_op(Op(name=names[0], outputs=(Output("s", "float32"),), **fields))
    op = Op(name=names[1], kind="relu", type="Relu", outputs=(Output("r", "float32"),), attrs=attrs)
    relu = graph.add_op(op, [tensor])
    return fingerprints(model, [relu])[relu]


def test_fingerprints_are_those_of_saved_statistics() -> None:
    """Files of statistics hold fingerprints, so the same computation keeps its fingerprint in later releases."""
    assert (
        fingerprint_of_relu({"axes": [1], "value": np.arange(2, dtype=np.int64)}) == "4a0598261ca79378da6cacaf52e00333"
    )


def large_array(changed: float) -> np.ndarray:
    """Return an array that NumPy prints in part, with a value in the middle."""
    return np.where(np.arange(3000) == 1500, np.float32(changed), np.float32(0))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"axes": (1, 2)}, {"axes": [1, 2]}, True),
        ({"axes": (1, 2)}, {"axes": (2, 1)}, False),
        ({"value": large_array(1)}, {"value": large_array(1)}, True),
        ({"value": large_array(1)}, {"value": large_array(2)}, False),
        ({"values": [large_array(1)]}, {"values": [large_array(2)]}, False),
        ({"value": large_array(1)}, {"value": large_array(1).reshape(2, -1)}, False),
        ({"value": np.float32(0).reshape(1)}, {"value": np.int32(0).reshape(1)}, False),
        ({"message": Message(b"a")}, {"message": Message(b"a")}, True),
        ({"message": Message(b"a")}, {"message": Message(b"b")}, False),
        ({"_class": "a"}, {"_class": "b"}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
    ],
)
def test_attributes(one, other, equal: bool) -> None:
    """Fingerprints depend on the value of each attribute, but neither on its text form nor on notes for the runtime."""
    assert (fingerprint_of_relu(one) == fingerprint_of_relu(other)) == equal


def unreadable() -> np.ndarray:
    """Raise the error of weights whose file is missing."""
    raise ModelError("The file is missing.")


def test_names_matter_only_without_values() -> None:
    """Ops may have any names, while inputs and weights that cannot be read are identified by theirs."""
    constant = {"kind": "constant", "read_value": lambda: np.float32(1)}
    expected = fingerprint_of_relu({}, source=constant)
    assert fingerprint_of_relu({}, source=constant, names=("other", "rectifier")) == expected
    for source in ({}, {"kind": "constant", "read_value": unreadable}):
        expected = fingerprint_of_relu({}, source=source)
        assert fingerprint_of_relu({}, source=source, names=("source", "rectifier")) == expected
        assert fingerprint_of_relu({}, source=source, names=("other", "relu")) != expected
    assert fingerprint_of_relu({}, source={"type": "Placeholder"}) != fingerprint_of_relu({})


def test_no_tensors_read_no_weights() -> None:
    """Weights are read only if a fingerprint is requested."""
    model = Model(format="onnx")
    graph = model.graphs[""] = Graph("", model.graphs)
    graph.add_op(Op(name="w", kind="constant", type="C", outputs=(Output("w", "float32"),), read_value=pytest.fail))
    assert fingerprints(model, []) == {}
