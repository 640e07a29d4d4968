from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import graphquant as gq
from graphquant.errors import UsageError
from graphquant.quantize import plan_to_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODELS = {"digits_cnn": "digits_cnn", "digits_cnn_bn": "digits_cnn", "digits_rnn": "digits_rnn"}


def write_quantized(samples: Path, name: str, tmp_path: Path) -> Path:
    """The sample model, quantized without data."""
    return gq.insert(samples / f"{name}.onnx", rules=["fixed_point"]).save(tmp_path / f"{name}.onnx")


def write_edited_copy(path: Path, edit: Callable[[Any], None]) -> Path:
    """A copy of an ONNX model with a change."""
    message = onnx.load(path)
    edit(message)
    changed_path = path.with_name("changed.onnx")
    onnx.save(message, changed_path)
    return changed_path


def only(first: Any, second: Any) -> Any:
    """The one difference of two models."""
    differences = gq.diff(first, second)
    assert len(differences.changes) == 1, differences
    return differences.changes[0]


@pytest.mark.parametrize("name", MODELS)
def test_nothing(samples: Path, tmp_path: Path, name: str) -> None:
    """A model and itself do not differ, quantized or not."""
    path = write_quantized(samples, name, tmp_path)
    assert not gq.diff(path, path)
    assert not gq.diff(samples / f"{name}.onnx", samples / f"{name}.onnx")


@pytest.mark.parametrize("name", MODELS)
def test_a_scale(samples: Path, tmp_path: Path, name: str) -> None:
    """A changed scale is reported with its relative change."""
    path = write_quantized(samples, name, tmp_path)
    scale = next(t.name for t in onnx.load(path).graph.initializer if t.name.endswith("/scale"))

    def edit(message: Any) -> None:
        for tensor in message.graph.initializer:
            if tensor.name == scale:
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.5), scale))

    change = only(path, write_edited_copy(path, edit))
    assert (change.kind, change.size) == ("scale", pytest.approx(0.5))
    assert change.location.rpartition(":")[0] == scale.removesuffix("/quant/scale")


@pytest.mark.parametrize("name", MODELS)
def test_an_added_site(samples: Path, tmp_path: Path, name: str) -> None:
    """An added site is reported with its scale, and its uses are counted."""
    source = samples / f"{name}.onnx"
    plan = gq.plan(source, rules=["fixed_point"])
    index = next(index for index, site in enumerate(plan.sites) if not site.parameter and not site.tensor.graph)
    fewer = replace(plan, sites=plan.sites[:index] + plan.sites[index + 1 :])
    first, second = (
        gq.insert(source, plan=planned).save(tmp_path / n) for planned, n in ((fewer, "a.onnx"), (plan, "b.onnx"))
    )
    change = only(first, second)
    site = plan.sites[index]
    assert change.kind == "site-added"
    assert change.location == str(site.tensor)
    assert gq.diff(first, second).rerouted == len(site.uses)
    assert only(second, first).kind == "site-removed"
    assert not gq.diff(first, second, quantization=False)


@pytest.mark.parametrize("name", MODELS)
def test_a_renamed_op(samples: Path, tmp_path: Path, name: str) -> None:
    """An op with another name is the same op, also where its output is renamed with it."""
    source = samples / f"{name}.onnx"
    node = next(node for node in onnx.load(source).graph.node if node.op_type in {"Relu", "Tanh", "Add"})

    def edit(message: Any) -> None:
        for graph_node in message.graph.node:
            graph_node.input[:] = ["renamed_value" if name == node.output[0] else name for name in graph_node.input]
            if graph_node.name == node.name:
                graph_node.name, graph_node.output[0] = "renamed", "renamed_value"
        remaining = [value_info for value_info in message.graph.value_info if value_info.name != node.output[0]]
        copies = [type(value_info).FromString(value_info.SerializeToString()) for value_info in remaining]
        del message.graph.value_info[:]
        message.graph.value_info.extend(copies)

    path = tmp_path / "source.onnx"
    path.write_bytes(source.read_bytes())
    change = only(path, write_edited_copy(path, edit))
    assert (change.kind, change.location) == ("op-renamed", "renamed")
    assert change.message == f"was {node.name}"


@pytest.mark.parametrize("name", MODELS)
def test_an_attribute(samples: Path, tmp_path: Path, name: str) -> None:
    """A changed attribute is reported with both values."""
    path = write_quantized(samples, name, tmp_path)

    def edit(message: Any) -> None:
        node = next(node for node in message.graph.node if node.op_type == "Softmax")
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("axis", 0))

    before = next(
        (attr.i for node in onnx.load(path).graph.node if node.op_type == "Softmax" for attr in node.attribute),
        "nothing",
    )
    change = only(path, write_edited_copy(path, edit))
    assert (change.kind, change.message) == ("attribute", f"axis: {before} became 0")


@pytest.mark.parametrize("name", MODELS)
def test_a_weight(samples: Path, tmp_path: Path, name: str) -> None:
    """A changed weight is reported with the number of values and the largest difference."""
    source = samples / f"{name}.onnx"
    path = tmp_path / "source.onnx"
    path.write_bytes(source.read_bytes())
    large = max(onnx.load(path).graph.initializer, key=lambda tensor: tensor.ByteSize())

    def edit(message: Any) -> None:
        for tensor in message.graph.initializer:
            if tensor.name == large.name:
                value = numpy_helper.to_array(tensor).copy()
                value.reshape(-1)[3] += np.float32(0.25)
                tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))

    change = only(path, write_edited_copy(path, edit))
    assert (change.kind, change.location) == ("weight", large.name)
    assert change.size == pytest.approx(0.25, abs=1e-6)
    assert re.findall(r"[\d.]+\d|\d", change.message)[:3] == ["1", str(numpy_helper.to_array(large).size), "0.25"]


def test_quantization_is_reported_as_sites(samples: Path, tmp_path: Path) -> None:
    """A float model and its quantized form differ only in sites and uses."""
    source = samples / "digits_rnn.onnx"
    result = gq.insert(source, rules=["fixed_point"])
    path = result.save(tmp_path / "out.onnx")
    differences = gq.diff(source, path)
    assert differences.counts == {"site-added": len(result.inserted)}
    assert differences.rerouted == sum(len(insertion.site.uses) for insertion in result.inserted)
    assert not gq.diff(source, path, quantization=False)


def test_tensorflow(samples: Path, tmp_path: Path) -> None:
    """The same of a TensorFlow graph with loops, and of saved functions."""
    for name in ("digits_rnn.pb", "digits_rnn_saved_model"):
        result = gq.insert(samples / name, rules=["fixed_point"])
        path = result.save(tmp_path / name)
        differences = gq.diff(samples / name, path)
        assert differences.counts == {"site-added": len(result.inserted)}
        assert not gq.diff(path, path)


def test_model_against_its_prepared_form(samples: Path, tmp_path: Path) -> None:
    """A model with folded BatchNorms and another opset is compared with its prepared source."""
    source = samples / "digits_cnn_bn.onnx"
    result = gq.insert(source, data=str(samples / "digits_cnn_calib.npz"), samples=2)
    first, *rest = gq.diff(source, result.save(tmp_path / "out.onnx")).changes
    assert (first.kind, first.location) == ("model", "preparation")
    assert "opset (1)" in first.message
    assert "fold-batchnorm (5)" in first.message
    assert {change.kind for change in rest} == {"site-added"}
    assert len(rest) == len(result.inserted)


def test_nested_graphs(samples: Path, tmp_path: Path) -> None:
    """Ops in bodies are matched, with their reads of the outer graph; a renamed op there is reported."""
    source = samples / "digits_rnn.onnx"
    path = tmp_path / "source.onnx"
    path.write_bytes(source.read_bytes())

    def edit(message: Any) -> None:
        loop = next(node for node in message.graph.node if node.op_type == "Loop")
        body = next(attr.g for attr in loop.attribute if attr.name == "body")
        next(node for node in body.node if node.op_type == "MatMul").name = "renamed"

    change = only(path, write_edited_copy(path, edit))
    assert (change.kind, change.location.rpartition("/")[2]) == ("op-renamed", "renamed")


def test_ops_and_wiring(samples: Path, tmp_path: Path) -> None:
    """An added op is reported, and the changed input of its consumer."""
    source = samples / "digits_cnn.onnx"
    path = tmp_path / "source.onnx"
    path.write_bytes(source.read_bytes())

    def edit(message: Any) -> None:
        node = next(node for node in message.graph.node if node.op_type == "Softmax")
        index = list(message.graph.node).index(node)
        message.graph.node.insert(index, helper.make_node("Neg", [node.input[0]], ["negated"], name="negate"))
        message.graph.node[index + 1].input[0] = "negated"

    differences = gq.diff(path, write_edited_copy(path, edit))
    assert differences.counts == {"op-added": 1, "wiring": 1}
    reverse = gq.diff(path.with_name("changed.onnx"), path)
    assert reverse.counts == {"op-removed": 1, "wiring": 1}


def test_plans(samples: Path, tmp_path: Path) -> None:
    """Plans of two rule files differ in sites and schemes; one site less is exactly that."""
    plan = gq.plan(samples / "digits_cnn.onnx")
    assert not gq.diff(plan, plan)
    differences = gq.diff(replace(plan, sites=plan.sites[1:]), plan)
    (change,) = differences.changes
    assert (change.kind, change.location) == ("site-added", str(plan.sites[0].tensor))
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, sites in zip(
        paths, (plan.sites, (replace(plan.sites[0], range=(0.0, 1.0)), *plan.sites[1:])), strict=True
    ):
        path.write_text(json.dumps(plan_to_json(replace(plan, sites=sites))))
    (change,) = gq.diff(*paths).changes
    assert change.message == "range: None became (0.0, 1.0)"
    with pytest.raises(UsageError, match=r"two models.* two plans"):
        gq.diff(plan, samples / "digits_cnn.onnx")


def test_the_command(samples: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """Exit code 1 where anything differs; counts alone, JSON, and lines of 80 columns."""
    source, path = samples / "digits_cnn.onnx", write_quantized(samples, "digits_cnn", tmp_path)
    assert cli("diff", source, source).stdout == "No difference.\n"
    output = cli("diff", source, path, "--stat", code=1).stdout
    assert output == "17 sites added, 18 uses rerouted.\n"
    assert cli("diff", source, path, "--ignore", "qdq").stdout == "No difference.\n"
    data = json.loads(cli("diff", source, path, "--format", "json", code=1).stdout)
    assert (data["schema"], data["rerouted"], set(data["counts"])) == (2, 18, {"site-added"})
    assert data["changes"][0].keys() == {"kind", "location", "message", "size"}
    lines = cli("diff", source, path, code=1).stdout.splitlines()
    assert all(line.startswith("+ site-added ") for line in lines[:3])
    pb = samples / "digits_cnn.pb"
    assert cli("diff", source, pb, code=2).stderr.startswith("error: ")


def test_algorithms_of_plans(samples: Path) -> None:
    """An algorithm that only one of two plans has is one change."""
    plan = replace(gq.plan(samples / "digits_cnn.onnx"), algorithms=("bias-correction",))
    change = only(plan, replace(plan, algorithms=("gptq", "bias-correction")))
    assert (change.kind, change.location, change.message) == ("plan", "algorithm gptq", "is added")
    change = only(plan, replace(plan, algorithms=()))
    assert (change.location, change.message) == ("algorithm bias-correction", "is removed")
