"""Tensor fingerprints: equal for the same computation, different for any other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import graphquant as gq
from graphquant import api
from graphquant.calibration import all_float_targets, preserved_fingerprints
from graphquant.calibration.fingerprints import fingerprints
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
    prepared = api.prepare_for_plan(source, plan)
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
    assert found == {TensorRef("", "norm/bias_add"): all_fingerprints(source)["norm:0"]}


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
    names = [TensorRef("", "beside"), TensorRef("", "after"), *(TensorRef("loop/body", n) for n in ("product", "sum"))]
    before = fingerprints(_looping(2, 3), names)
    assert fingerprints(_looping(2, 3), names) == before
    for other in (_looping(5, 3), _looping(2, 4), _looping(2, 3, cut=True)):
        after = fingerprints(other, names)
        assert [after[name] == before[name] for name in names] == [True, False, False, False]
    assert len(set(before.values())) == 4


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
