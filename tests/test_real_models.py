"""Real models outside of the repository are quantized, saved, run in their framework, and inspected."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from reference import fake_quant
from support.measurements import print_measurement, sqnr_db
from support.shared_models import SHARED_MODELS
from support.stand_ins import (
    loop_detector_feeds,
    speech_detector_data,
    write_face_detector,
    write_speech_detector,
)

import graphquant as gq
from graphquant import formats
from graphquant.analysis.model_summary import summarize_model
from graphquant.ir import Parameters, TensorRef, Use, check_invariants
from graphquant.numerics import QParams, quantize, tf_ranges

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from graphquant.quantize.rewrite import InsertedPair

Array = np.ndarray[Any, Any]


def save_and_reload(result: gq.Result, path: Path) -> gq.Model:
    """Save and reload the result, and check the parameters of each site."""
    reloaded = gq.load(result.save(path))
    check_invariants(reloaded, "the test")
    params_by_op = {
        (reading.graph, reading.op): reading.params for reading in summarize_model(reloaded).quantization_ops
    }
    assert result.inserted
    for insertion in live_insertions(result):
        graph = reloaded.graphs[insertion.output.graph]
        op = insertion.output.op
        if (graph.name, op) not in params_by_op:  # a reshape behind the quantization of a depthwise kernel
            op = next(slot.op for slot in graph.slots(op) if slot is not None)
        params = params_by_op[graph.name, op]
        assert params is not None
        np.testing.assert_array_equal(params.scale, insertion.params.scale)
        np.testing.assert_array_equal(params.zero_point, insertion.params.zero_point)
    return reloaded


def live_insertions(result: gq.Result) -> list[InsertedPair]:
    """Return the insertions outside of saved functions that no run calls."""
    return [insertion for insertion in result.inserted if insertion.site.clone_of is None]


def run_model(model: gq.Model, feeds: list[dict[str, Array]]) -> dict[str, Array]:
    """Return the model's outputs in its own framework, stacked over the feeds."""
    runner = formats.format_module(model.format).create_runner(model)
    runs = [runner.run(feed) for feed in feeds]
    return {name: np.stack([run[name] for run in runs]) for name in runs[0]}


def split_samples(data: dict[str, Array]) -> list[dict[str, Array]]:
    """Return one feed for each entry of the arrays."""
    return [dict(zip(data, map(np.asarray, values), strict=True)) for values in zip(*data.values(), strict=True)]


# -- stand-ins -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("rules_alone")
@pytest.mark.parametrize("write", [write_face_detector, write_speech_detector])
def test_stand_ins_are_quantized(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Detectors with an old opset, BatchNorms, branches and an LSTM are quantized on data, outputs above 20 dB."""
    source = write(tmp_path / "detector.onnx")
    if write is write_face_detector:
        data = {"input": np.random.default_rng(0).uniform(-1, 1, (24, 3, 24, 32)).astype(np.float32)}
        feeds = [{"input": image[None]} for image in data["input"]]
    else:
        data = speech_detector_data(24)
        feeds = split_samples(data)
    np.savez(tmp_path / "data.npz", **data)
    result = gq.insert(source, data=str(tmp_path / "data.npz"), validate=False)
    before, after = run_model(result.source, feeds), run_model(save_and_reload(result, tmp_path / "out.onnx"), feeds)
    convolutions = [
        (graph.name, op.name) for graph in result.source.graphs.values() for op in graph.ops() if "conv" in op.kind
    ]
    quantized = {(use.graph, use.op) for insertion in result.inserted for use in insertion.site.uses}
    assert len(convolutions) >= 2
    assert set(convolutions) <= quantized
    for name, value in before.items():
        assert sqnr_db(value, after[name]) > 20


# -- KWS -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kws_keeps_its_accuracy(shared: Path, tmp_path: Path) -> None:
    """Int8 top-1 accuracy is at most 0.5 points below float, and 98% of the predictions agree."""
    pytest.importorskip("tensorflow")
    data = np.load(shared / "kws/eval.npz")
    result = gq.insert(shared / "kws/saved_model", data=str(shared / "kws/calib.npz"), validate=False)
    reloaded = save_and_reload(result, tmp_path / "kws")
    name = next(key for key in data if key != "label")
    probabilities = []
    for model in (result.source, reloaded):
        runner = formats.format_module(model.format).create_runner(model)
        model_outputs = runner.run({runner.inputs[0].name: data[name]})
        probabilities.append(next(iter(model_outputs.values())))
    predictions = [model_outputs.argmax(1) for model_outputs in probabilities]
    before, after = ((answer == data["label"]).mean() for answer in predictions)
    agreement = (predictions[0] == predictions[1]).mean()
    print_measurement(
        f"KWS: {len(result.inserted)} sites, float {before:.4f}, int8 {after:.4f}, agreement {agreement:.4f}"
    )
    assert 0 < np.abs(probabilities[0] - probabilities[1]).max() < 0.5  # another model, and no other answers
    assert after >= before - 0.005
    assert agreement >= 0.98
    for file_name in ("variables/variables.index", "variables/variables.data-00000-of-00001"):
        assert (tmp_path / "kws" / file_name).read_bytes() == (shared / "kws/saved_model" / file_name).read_bytes()


@pytest.mark.slow
def test_kws_without_tensorflow(model_folder: Path, tmp_path: Path) -> None:
    """A SavedModel is quantized by rules that need no data, saved, and inspected."""
    result = gq.insert(model_folder / "kws/saved_model", rules=["fixed_point"])
    save_and_reload(result, tmp_path / "kws")
    assert len(live_insertions(result)) == (20 if model_folder == SHARED_MODELS else 17)
    assert len(result.inserted) > len(live_insertions(result))
    assert {float(scale) for insertion in result.inserted for scale in np.ravel(insertion.params.scale)} == {
        2**-4,
        2**-6,
    }


# -- the face detector -----------------------------------------------------------------------------


@pytest.fixture
def photographs(model_folder: Path, tmp_path: Path) -> list[Array]:
    """Return the face detector's photographs, [1, 3, 240, 320] each, and save the first ten as `images.npz`."""
    rgb = np.load(model_folder / "ultraface/images.npz")["rgb"]
    images = ((rgb.astype(np.float32) - 127) / 128).transpose(0, 3, 1, 2)
    np.savez(tmp_path / "images.npz", input=images[:10])
    return [image[None] for image in images]


@pytest.mark.slow
def test_ultraface_of_opset_9(
    model_folder: Path, tmp_path: Path, photographs: list[Array], cli: Callable[..., Any]
) -> None:
    """The upgraded detector finds the same faces, and `inspect` shows the scale of each reported site."""
    source, out = model_folder / "ultraface/version-RFB-320.onnx", tmp_path / "out.onnx"
    cli("insert", source, "--data", tmp_path / "images.npz", "-o", out, "--report", tmp_path / "report.json")
    reported = json.loads((tmp_path / "report.json").read_text())["sites"]
    inspected = json.loads(cli("inspect", out, "--format", "json").stdout)
    scales = {entry["op"]: entry["scale"] for entry in inspected["quantization"]}
    assert {site["output"]["op"]: site["scale"] for site in reported} == scales
    assert inspected["opset"] == 13
    feeds = [{"input": image} for image in photographs[10:]]
    before, after = run_model(gq.load(source), feeds), run_model(gq.load(out), feeds)
    for name in before:
        assert np.isfinite(after[name]).all()
        print_measurement(f"ultraface {name}: {sqnr_db(before[name], after[name]):.1f} dB, {len(reported)} sites")
        assert sqnr_db(before[name], after[name]) > 20
    detections = [model_outputs["scores"][..., 1] > 0.7 for model_outputs in (before, after)]
    if model_folder != SHARED_MODELS:  # the stand-in detects nothing
        return
    in_both, in_either = (detections[0] & detections[1]).sum(), (detections[0] | detections[1]).sum()
    print_measurement(
        f"ultraface: boxes above 0.7 {detections[0].sum()} float, {detections[1].sum()} int8,"
        f" {in_both / in_either:.3f} in common"
    )
    assert in_both / in_either > 0.85


# -- MTCNN -----------------------------------------------------------------------------------------


def test_mtcnn_is_rewritten_without_data(model_folder: Path, tmp_path: Path) -> None:
    """A frozen TF1 graph with loops gets weights behind Enter and Switch, and fixed-point activations."""
    result = gq.insert(model_folder / "mtcnn.pb", rules=["fixed_point"])
    save_and_reload(result, tmp_path / "mtcnn.pb")
    print_measurement(f"mtcnn: {len(result.inserted)} sites, {len(result.skips)} skips")
    weights = [insertion for insertion in result.inserted if insertion.site.parameter]
    assert len(weights) >= (19 if model_folder == SHARED_MODELS else 4)
    assert {result.source.op(insertion.site.tensor).kind for insertion in weights} == {"enter", "switch"}


@pytest.mark.slow
@pytest.mark.parametrize("rules", ["fixed_point", "weight_only"])
def test_mtcnn_runs(model_folder: Path, tmp_path: Path, rules: str) -> None:
    """The rewritten graph runs in TensorFlow with finite outputs."""
    pytest.importorskip("tensorflow")
    reloaded = save_and_reload(gq.insert(model_folder / "mtcnn.pb", rules=[rules]), tmp_path / "mtcnn.pb")
    feeds, counts = mtcnn_feeds(model_folder), []
    for model in (gq.load(model_folder / "mtcnn.pb"), reloaded):
        model_outputs = formats.format_module("tensorflow").create_runner(model).run(feeds)
        assert all(np.isfinite(value).all() for value in model_outputs.values())
        counts.append({name: value.shape for name, value in model_outputs.items()})
    print_measurement(f"mtcnn {rules}: float {counts[0]}, int8 {counts[1]}")
    assert counts[0].keys() == counts[1].keys()


@pytest.mark.slow
def test_mtcnn_inside_frames(model_folder: Path, tmp_path: Path) -> None:
    """In every loop iteration and branch, the new op's output equals its quantized input exactly."""
    pytest.importorskip("tensorflow")
    feeds = mtcnn_feeds(model_folder)
    np.savez(tmp_path / "faces.npz", **{name: value[None] for name, value in feeds.items()})
    result = gq.insert(
        model_folder / "mtcnn.pb",
        rules=["onnxruntime"],
        data=str(tmp_path / "faces.npz"),
        method="minmax",
        validate=False,
    )
    insertions = [
        insertion for insertion in result.inserted if not insertion.site.parameter and insertion.site.axis is None
    ]
    kinds = {result.model.op(insertion.site.tensor).kind for insertion in insertions}
    assert {"max_pool", "where"} <= kinds
    assert kinds & {"conv", "bias_add"}  # the stand-in has no biases
    runner = formats.format_module("tensorflow").create_runner(result.model)
    (observed,) = runner.observe(
        list({insertion.site.tensor for insertion in insertions} | {insertion.output for insertion in insertions}),
        [feeds],
    )
    values = 0
    for insertion in insertions:
        before, after = observed[insertion.site.tensor], observed[insertion.output]
        assert len(before) == len(after)
        # Iterations of a loop run in parallel, so that a queue may receive their values in another order.
        for value, quantized in zip(sorted(before, key=np.shape), sorted(after, key=np.shape), strict=True):
            values += value.size
            written_range, narrow = tf_ranges.range_for_fake_quant(insertion.params), insertion.params.narrow
            expected = fake_quant.fake_quant_with_vars(
                value, written_range.low, written_range.high, num_bits=8, narrow_range=narrow
            )
            np.testing.assert_array_equal(quantized, expected)
    print_measurement(
        f"mtcnn: {len(insertions)} activations in {len(kinds)} kinds of ops, {values} values as predicted"
    )
    assert values > (100_000 if model_folder == SHARED_MODELS else 2000)


def mtcnn_feeds(folder: Path) -> dict[str, Array]:
    """Return feeds of MTCNN with faces, or feeds of its stand-in for three iterations."""
    if folder != SHARED_MODELS:
        return loop_detector_feeds()
    return {
        "input": np.load(folder / "ultraface/images.npz")["rgb"][3].astype(np.float32)[..., ::-1],
        "min_size": np.float32(20),
        "thresholds": np.array([0.6, 0.7, 0.7], np.float32),
        "factor": np.float32(0.709),
    }


# -- voice activity, and a model that is quantized already -----------------------------------------


@pytest.mark.slow
def test_silero_vad_with_bodies(shared: Path, tmp_path: Path) -> None:
    """A model with 24 If subgraphs is quantized, and agrees with the float model on speech."""
    source = shared / "silero_vad_16k_op15.onnx"
    data = np.load(shared / "silero_vad.npz")
    runner = formats.format_module("onnx").create_runner(gq.load(source))
    assert {spec.name for spec in runner.inputs} <= set(data)
    result = gq.insert(source, data=str(shared / "silero_vad.npz"), validate=False)
    reloaded = save_and_reload(result, tmp_path / "vad.onnx")
    feeds = _vad_feeds(data)
    before, after = run_model(result.source, feeds), run_model(reloaded, feeds)
    speech = [model_outputs["output"].ravel() > 0.5 for model_outputs in (before, after)]
    print_measurement(
        f"silero: {len(result.inserted)} sites, {sqnr_db(before['output'], after['output']):.1f} dB,"
        f" {speech[0].sum()} of {len(speech[0])} are speech, {(speech[0] == speech[1]).mean():.3f} agree"
    )
    assert np.isfinite(after["output"]).all()
    assert (speech[0] == speech[1]).mean() > 0.9
    assert sqnr_db(before["output"], after["output"]) >= 20
    assert sqnr_db(before["stateN"], after["stateN"]) >= 20
    lstms = [
        (graph.name, op.name) for graph in result.source.graphs.values() for op in graph.ops() if op.kind == "lstm"
    ]
    assert len(lstms) == 2
    for graph, name in lstms:
        skips = [skip for skip in result.skips for use in skip.uses if use == Use(graph, name, 1)]
        assert [skip.rule for skip in skips] == ["recurrent-weight"]
        assert reloaded.graphs[graph].op(name).type == "LSTM"


@pytest.mark.slow
def test_silero_vad_reports_its_limits(shared: Path, tmp_path: Path) -> None:
    """Excluding the op that the report ranks worst improves the output by more than 3 dB."""
    source, data = shared / "silero_vad_16k_op15.onnx", str(shared / "silero_vad.npz")
    result = gq.insert(source, data=data, validate=False)
    worst = result.activation_sqnr[0]
    assert worst.tensor == TensorRef("", "/model/stft/Sqrt")  # its spectrum stays float
    without = gq.insert(source, data=data, exclude=[worst.tensor.op], validate=False)
    feeds = _vad_feeds(np.load(data))
    before, *after = (run_model(model, feeds)["output"] for model in (result.source, result.model, without.model))
    quantized_db, excluded_db = (sqnr_db(before, model_outputs) for model_outputs in after)
    print_measurement(f"silero: {quantized_db:.1f} dB, {excluded_db:.1f} with {worst.tensor.op} in float")
    assert excluded_db > quantized_db + 3


def test_silero_vad_lstm_weights(model_folder: Path, tmp_path: Path) -> None:
    """A rule quantizes LSTM weights that are joined from slices of one initializer, in Silero VAD in each branch."""
    rules = """
        [scheme.weight]
        dtype = "int8"
        observe = "absmax"
        [[rule]]
        name = "lstm-weight"
        producer = { kind = "parameter" }
        consumer = { kind = "lstm", input = "weight|recurrent_weight" }
        quantize = "weight"
    """
    is_real = model_folder == SHARED_MODELS
    result = gq.insert(model_folder / "silero_vad_16k_op15.onnx", rules=[rules])
    reloaded = save_and_reload(result, tmp_path / "vad.onnx")
    assert len(result.inserted) == (4 if is_real else 2)
    parameters = Parameters(result.source)
    for insertion in result.inserted:
        (use,) = insertion.site.uses
        assert use.graph.startswith("/model/decoder/If_1/" if is_real else "")
        value = parameters.value(insertion.site.tensor)
        assert value is not None
        assert value.shape == ((1, 512, 128) if is_real else (1, 32, 8))
        producer = reloaded.graphs[use.graph].source_of(use)
        assert producer is not None
        integers = reloaded.graphs[producer.graph].source_of(Use(producer.graph, producer.op, 0))
        assert integers is not None
        stored = Parameters(reloaded).value(integers)
        assert stored is not None
        assert isinstance(insertion.params, QParams)
        assert np.array_equal(stored, quantize(value, insertion.params))
    feeds = split_samples(speech_detector_data(20))
    if is_real:
        feeds = _vad_feeds(np.load(model_folder / "silero_vad.npz"), 20)
    before, after = run_model(result.source, feeds), run_model(reloaded, feeds)
    assert sqnr_db(before["output"], after["output"]) > 30


def _vad_feeds(data: Any, count: int = 100) -> list[dict[str, Array]]:
    samples = len(data["input"])
    feeds = []
    for index in np.linspace(0, samples - 1, min(count, samples)).astype(int):
        feed = {"sr": data["sr"], "input": data["input"][index], "state": data["state"][index]}
        feeds.append(
            {"sr": feed["sr"], "input": feed["input"].reshape(1, -1), "state": feed["state"].reshape(2, 1, 128)}
        )
    return feeds


@pytest.mark.parametrize("rules", ["onnxruntime", "fixed_point", "weight_only"])
def test_quantized_model_is_not_quantized_again(model_folder: Path, tmp_path: Path, rules: str) -> None:
    """A quantized LSTM model retains its own QDQ pairs, and gets no second pair next to one."""
    model = gq.load(model_folder / "qlstm_tract.onnx")
    quantization_ops = summarize_model(model).quantization_ops
    assert quantization_ops
    result = gq.insert(model, rules=[rules], data="random:2", validate=False)
    reloaded = summarize_model(result.model)
    assert [reading.op for reading in reloaded.quantization_ops if not reading.rule] == [
        reading.op for reading in quantization_ops
    ]
    for insertion in result.inserted:
        assert result.source.op(insertion.site.tensor).kind not in {"quantize", "dequantize", "qdq"}
    gq.save(result.model, tmp_path / "out.onnx")
    print_measurement(
        f"qlstm {rules}: {len(quantization_ops)} own pairs, {len(result.inserted)} inserted, {len(result.skips)} left"
    )
