from __future__ import annotations

import base64
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import graphquant as gq
from graphquant import formats
from graphquant.analysis.model_summary import summarize_model
from graphquant.api.plan import prepare_for_plan
from graphquant.api.strip import prove_stripped

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("rules_alone")

ONNX = {"digits_cnn.onnx": "digits_cnn", "digits_cnn_bn.onnx": "digits_cnn", "digits_rnn.onnx": "digits_rnn"}
TENSORFLOW = ["digits_cnn.pb", "digits_cnn.pbtxt", "digits_rnn.pb", "digits_cnn_saved_model", "digits_rnn_saved_model"]


def insert_without_data(samples: Path, name: str, out: Path, **options: Any) -> Path:
    """The sample model, quantized without data."""
    return gq.insert(samples / name, rules=["fixed_point"], **options).save(out / name)


def emitted_message(model: Any) -> Any:
    """The message of a model, or of the one at a path."""
    loaded = model if isinstance(model, gq.Model) else gq.load(model)
    return formats.format_module(loaded.format).emit(loaded)


@pytest.mark.parametrize("name", [*ONNX, "digits_nested.onnx", *TENSORFLOW])
def test_float_weights_give_back_the_source(samples: Path, tmp_path: Path, name: str) -> None:
    """The source message comes back, with names, order, weights, opset and BatchNorms as they were."""
    stripped = gq.strip(insert_without_data(samples, name, tmp_path, float_weights=True))
    assert stripped.exact
    assert emitted_message(stripped.model) == emitted_message(samples / name)
    out = stripped.model.save(tmp_path / f"stripped_{name}")
    assert emitted_message(out) == emitted_message(samples / name)
    assert not gq.diff(out, samples / name)
    proof = prove_stripped(stripped, samples / name)
    assert proof.equal
    assert (proof.other_differences.counts, proof.other_differences.rerouted) == ({}, 0)


def test_barriers_are_removed(samples: Path, tmp_path: Path) -> None:
    """The Clips that keep ops in float are no difference, and are removed with the pairs."""
    exclude = ["pointwise/conv_weights_fused_bn", "hidden/matmul/ReadVariableOp:0"]
    data = str(samples / "digits_cnn_calib.npz")
    result = gq.insert(samples / "digits_cnn.onnx", data=data, samples=8, float_weights=True, exclude=exclude)
    out = result.save(tmp_path / "digits_cnn.onnx")
    assert sum(node.name.endswith("/barrier") for node in emitted_message(out).graph.node) == len(exclude)
    assert len(gq.diff(samples / "digits_cnn.onnx", out).changes) == len(result.inserted)
    for options, count in ({"exclude": exclude[:1]}, 1), ({}, 0):
        again = gq.insert(out, data=data, samples=8, requantize=True, **options)
        assert sum("/barrier" in op.name for op in again.model.main.ops()) == count
    stripped = gq.strip(out)
    assert stripped.exact
    assert emitted_message(stripped.model) == emitted_message(samples / "digits_cnn.onnx")


def test_barriers_are_removed_without_a_record(samples: Path, tmp_path: Path) -> None:
    """The readers of Clips that keep ops in float read the float tensor before the pair again."""
    data, exclude = str(samples / "digits_cnn_calib.npz"), ["pointwise/conv_weights_fused_bn"]
    result = gq.insert(samples / "digits_cnn.onnx", data=data, samples=8, exclude=exclude)
    assert any(op.name.endswith("/barrier") for op in result.model.main.ops())
    stripped = gq.strip(result.save(tmp_path / "digits_cnn.onnx"))
    assert not stripped.remaining
    assert {op.name for op in stripped.model.main.ops()} == {op.name for op in result.source.main.ops()}


@pytest.mark.parametrize("name", ["ultraface/version-RFB-320.onnx", "silero_vad_16k_op15.onnx"])
def test_real_models_are_restored(model_folder: Path, tmp_path: Path, name: str) -> None:
    """The same for face detectors, whose opset and BatchNorms are undone, and for sound."""
    result = gq.insert(model_folder / name, rules=["fixed_point"], float_weights=True)
    stripped = gq.strip(result.save(tmp_path / "out.onnx"))
    assert stripped.exact
    assert emitted_message(stripped.model) == emitted_message(model_folder / name)


@pytest.mark.slow
def test_keyword_spotter_is_restored(model_folder: Path, tmp_path: Path) -> None:
    """The same for a SavedModel with clones of functions."""
    source = model_folder / "kws/saved_model"
    stripped = gq.strip(gq.insert(source, rules=["fixed_point"], float_weights=True).save(tmp_path / "out"))
    assert stripped.exact
    assert emitted_message(stripped.model) == emitted_message(source)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ultraface/version-RFB-320.onnx", "silero_vad_16k_op15.onnx"])
def test_rounded_weights_of_real_models(model_folder: Path, tmp_path: Path, name: str) -> None:
    """Without float weights each is the prepared model, weight for weight within its rounding, and nothing else."""
    result = gq.insert(model_folder / name, rules=["fixed_point"])
    stripped = gq.strip(result.save(tmp_path / "out.onnx"))
    assert not stripped.exact
    assert not stripped.remaining
    proof = prove_stripped(stripped, model_folder / name)
    assert proof.holds
    assert proof.rounded_weights == len(stripped.weights) > 2


@pytest.mark.parametrize("name", ONNX)
def test_rounded_weights_are_reported(samples: Path, tmp_path: Path, name: str) -> None:
    """Without float weights it is the prepared model; weights are the integers' values under their old names."""
    path = insert_without_data(samples, name, tmp_path)
    quantized = {reading.tensor for reading in summarize_model(gq.load(path)).quantization_ops}
    stripped = gq.strip(path)
    assert not stripped.exact
    assert not stripped.remaining
    assert not summarize_model(stripped.model).quantization_ops
    plan = gq.plan(samples / name, rules=["fixed_point"])
    assert {tensor for tensor, _ in stripped.weights} == {site.tensor for site in plan.sites if site.parameter}
    assert quantized
    proof = prove_stripped(stripped, samples / name)
    assert proof.holds
    assert not proof.equal
    assert proof.rounded_weights == len(stripped.weights)
    prepared = prepare_for_plan(gq.load(samples / name), plan)
    kinds = gq.diff(prepared, stripped.model).counts
    assert kinds == {"weight": len(stripped.weights)}


def test_weights_that_calls_passed_stay_in_their_function(samples: Path, tmp_path: Path) -> None:
    """An argument that was stored as integers in its function is a constant there; all else is as it was."""
    source = samples / "digits_nested.onnx"
    stripped = gq.strip(insert_without_data(samples, "digits_nested.onnx", tmp_path))
    (note,) = stripped.notes
    assert note.endswith("sample_models:Block/matrix:0.")
    assert not summarize_model(stripped.model).quantization_ops
    proof = prove_stripped(stripped, source)
    assert proof.rounded_weights == len(stripped.weights) - 1
    assert {(first.kind, first.location) for first in proof.other_differences.changes} == {
        ("wiring", "called/once[1]"),
        ("wiring", "called/twice[1]"),
        ("op-changed", "sample_models:Block/matrix"),
        ("wiring", "sample_models:Block/call/matmul[1]"),
    }
    data = np.load(samples / "digits_nested_calib.npz")
    runners = [formats.format_module("onnx").create_runner(model) for model in (gq.load(source), stripped.model)]
    feed = {spec.name: data[spec.name][:1] for spec in runners[0].inputs}
    for first, second in zip(*(runner.run(feed).values() for runner in runners), strict=True):
        np.testing.assert_allclose(first, second, atol=0.25)


def test_output_lists_remaining_changes(samples: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """The command says that weights are rounded and how the graph stays prepared, and proves it."""
    source = samples / "digits_cnn_bn.onnx"
    data = str(samples / "digits_cnn_calib.npz")
    path = gq.insert(source, data=data, samples=4).save(tmp_path / "digits_cnn_bn.onnx")
    output = cli("strip", path, "-o", tmp_path / "back.onnx", "--check", source).stdout.replace("\n", " ")
    assert "opset (1), initializer-inputs" in output
    assert output.count("18 weights") == 2
    assert gq.load(tmp_path / "back.onnx").opset == 13
    mismatch = cli("strip", path, "--check", samples / "digits_cnn.onnx", code=1)
    assert "digits_cnn.onnx" in mismatch.stderr.replace("\n", "")


def test_the_command(samples: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """The source comes back bit for bit; a model without quantization, and no output, are refused."""
    source = samples / "digits_cnn.onnx"
    path = insert_without_data(samples, "digits_cnn.onnx", tmp_path, float_weights=True)
    output = cli("strip", path, "-o", tmp_path / "back.onnx", "--check", source).stdout.replace("\n", " ")
    assert "bit for bit" in output
    assert "Verified" in output
    assert "no quantization ops" in cli("strip", source, "-o", "x.onnx", code=2).stderr
    assert "no output" in cli("strip", path, code=2).stderr
    assert "exists already" in cli("strip", path, "-o", tmp_path / "back.onnx", code=2).stderr


@pytest.mark.parametrize("name", ["digits_cnn.pb", "digits_rnn.pb", "digits_rnn.onnx"])
def test_op_by_op(samples: Path, tmp_path: Path, name: str) -> None:
    """Without the record the ops are taken out one by one, which gives the same message where nothing was prepared."""
    rules = (samples.parent / "rules/fixed_point.toml").read_text().replace('prepare = ["', 'prepare = [] # ["')
    file = tmp_path / "rules.toml"
    file.write_text(rules)
    path = gq.insert(samples / name, rules=[file], float_weights=True).save(tmp_path / name)
    stripped = gq.strip(path, everything=True)
    assert not stripped.exact
    assert stripped.ops
    assert emitted_message(stripped.model) == emitted_message(samples / name)


def test_a_graph_that_was_changed_since(samples: Path, tmp_path: Path) -> None:
    """Changes that others made to the quantized model are kept: ops are then removed one by one, and strip says so."""
    path = insert_without_data(samples, "digits_cnn.onnx", tmp_path, float_weights=True)
    model = onnx.load(path)
    last = model.graph.output[0].name
    model.graph.node.append(helper.make_node("Neg", [last], ["negated"], name="negate"))
    model.graph.output[0].name = "negated"
    onnx.save(model, path)
    stripped = gq.strip(path)
    assert not stripped.exact
    assert "graph was changed" in stripped.notes[0]
    assert "negate" in stripped.model.main
    counts = gq.diff(samples / "digits_cnn.onnx", stripped.model).counts
    assert counts.keys().isdisjoint({"weight", "site-added", "scale", "attribute"})


def test_weights_of_removed_ops(samples: Path, tmp_path: Path) -> None:
    """A weight is no rounded weight if its op was removed with the quantization op that read the op's result."""
    path = insert_without_data(samples, "digits_cnn.onnx", tmp_path)
    message = onnx.load(path)
    dequantize = [node for node in message.graph.node if node.op_type == "DequantizeLinear"][-1]
    del dequantize.input[0]
    onnx.save(message, path)
    proof = prove_stripped(gq.strip(path), samples / "digits_cnn.onnx")
    assert not proof.holds


def test_weights_that_were_trained_since(samples: Path, tmp_path: Path) -> None:
    """New weights are kept too, and it is said that the source is not to be had."""
    path = insert_without_data(samples, "digits_cnn.onnx", tmp_path, float_weights=True)
    model = onnx.load(path)
    large = max(model.graph.initializer, key=lambda tensor: tensor.ByteSize())
    large.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(large) * np.float32(2), large.name))
    onnx.save(model, path)
    stripped = gq.strip(path)
    assert not stripped.exact
    assert re.search("float model .*missing", stripped.notes[0])
    assert gq.diff(samples / "digits_cnn.onnx", stripped.model).counts == {"weight": 1}


@pytest.mark.parametrize("damage", [b"", b"x", b"{}" * 40])
def test_a_damaged_record(samples: Path, tmp_path: Path, damage: bytes) -> None:
    """A record that says nothing sensible is no reason to fail."""
    path = insert_without_data(samples, "digits_cnn.onnx", tmp_path, float_weights=True)
    model = onnx.load(path)
    for entry in model.metadata_props:
        if entry.key == "graphquant.record":
            entry.value = base64.b64encode(damage).decode() if damage != b"x" else "no base64"
    onnx.save(model, path)
    stripped = gq.strip(path)
    assert not stripped.exact
    assert not gq.diff(samples / "digits_cnn.onnx", stripped.model)


def test_quantization_of_other_tools(samples: Path, tmp_path: Path) -> None:
    """QDQ ops of onnxruntime's own tool go with --all, and what is left computes what the float model does."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            images = np.load(samples / "digits_cnn_calib.npz")["image"][:4]
            self._feeds = iter([{"image": image[None]} for image in images])

        def get_next(self) -> Any:
            return next(self._feeds, None)

    path = tmp_path / "theirs.onnx"
    quantize_static(str(samples / "digits_cnn.onnx"), str(path), Reader())
    with pytest.raises(gq.GraphQuantError, match="everything=True"):
        gq.strip(path)
    with pytest.raises(gq.GraphQuantError, match="no Q/DQ pairs"):
        gq.strip(samples / "digits_cnn.onnx", everything=True)
    stripped = gq.strip(path, everything=True)
    assert not stripped.remaining
    assert not summarize_model(stripped.model).quantization_ops
    out = stripped.model.save(tmp_path / "floats.onnx")
    same = gq.compare(samples / "digits_cnn.onnx", out, str(samples / "digits_cnn_eval.npz"), samples=20)
    assert same.sqnr is not None
    assert same.sqnr > 35  # a Relu that a pair stood for is back


def test_ops_say_rule_and_anchor(samples: Path, tmp_path: Path) -> None:
    """Each inserted op names its rule and the tensor it is for, in its node or, in old ONNX files, in the model."""
    for name in ("digits_cnn.onnx", "digits_nested.onnx", "digits_cnn.pb", "digits_cnn_saved_model"):
        result = gq.insert(samples / name, rules=["fixed_point"])
        again = gq.load(result.save(tmp_path / name))
        inserted_sites = {(site.site.tensor, site.site.rule) for site in result.inserted}
        anchors = {str(tensor) for tensor, _ in inserted_sites}
        rules = {rule for _, rule in inserted_sites}
        quantization_ops = [
            op for graph in again.graphs.values() for op in graph.ops() if op.kind in {"dequantize", "qdq"}
        ]
        assert len(quantization_ops) >= len(result.inserted)
        assert {op.anchor for op in quantization_ops} == anchors
        assert {op.rule for op in quantization_ops} == rules


def test_provenance_metadata(samples: Path, tmp_path: Path) -> None:
    """Digests of source, rules, plan and data, the method and the version; no time and no path of this machine."""
    data = str(samples / "digits_cnn_calib.npz")
    for name in ("digits_cnn.onnx", "digits_cnn_bn.onnx"):
        source = gq.load(samples / name)
        result = gq.insert(source, data=data, samples=4)
        provenance = formats.format_module("onnx").read_metadata(gq.load(result.save(tmp_path / name)))
        assert provenance["source"] == source.digest
        assert provenance["version"] == gq.__version__
        assert result.stats is not None
        assert provenance["data"] == result.stats.runs[0].data_digest
        assert provenance["method"] == "auto"
        assert len(provenance["rules"]) == len(provenance["plan"]) == 64
        assert "record" not in provenance
        assert str(tmp_path) not in json.dumps(provenance)
        assert str(samples) not in json.dumps(provenance)
    assert provenance["steps"] == "opset (1), initializer-inputs (33), constant-nodes (2), fold-batchnorm (5)"


def test_scales_that_do_not_fit_their_integers(samples: Path, tmp_path: Path) -> None:
    """A weight whose integers were replaced by a scalar stays quantized, because its scales do not fit it."""
    path = tmp_path / "q.onnx"
    gq.insert(samples / "digits_cnn.onnx", rules="weight_only").save(path)
    message = onnx.load(path)
    node = next(node for node in message.graph.node if node.op_type == "DequantizeLinear")
    weight = next(tensor for tensor in message.graph.initializer if tensor.name == node.input[0])
    weight.CopyFrom(numpy_helper.from_array(np.array(1, np.int8), weight.name))
    onnx.save(message, path)
    stripped = gq.strip(path)
    assert [tensor.op for tensor, _ in stripped.remaining] == [node.name]
    assert not prove_stripped(stripped, samples / "digits_cnn.onnx").holds
