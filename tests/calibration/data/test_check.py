"""`graphquant data check`: output and findings."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.data_files import write_wav
from support.onnx_models import load_onnx, onnx_model

import graphquant as gq
from graphquant.batch.reports.text import report_notices
from graphquant.batch.types import BatchReport, Entry
from graphquant.batch.work import quantize_entry
from graphquant.calibration.data import Dataset, as_data_spec, open_data
from graphquant.calibration.data.check import SampleCheck, _ModelResponse, check_dataset
from graphquant.errors import DataError
from graphquant.formats import InputSpec, format_module


@pytest.fixture
def check_arrays(tmp_path):
    """Check arrays against an input."""

    def do(values, *shape, dtype: str = "float32", **others):
        takers = [InputSpec(name="x", dtype=dtype, shape=shape or None)]
        np.savez(tmp_path / "data.npz", x=values, **others)
        return check_dataset(open_data(str(tmp_path / "data.npz"), takers, require_finite=False), takers)

    return do


def kinds(found) -> list[str]:
    """Return the kinds of the findings."""
    return [one.kind for one in found.findings]


NOISE = np.random.default_rng(0).standard_normal((40, 5)).astype(np.float32)


def test_statistics_of_inputs(check_arrays) -> None:
    """Minimum, maximum and mean cover finite values. NaN and infinity are counted."""
    values = NOISE.copy()
    values[3, 1], values[4, 0], values[5, 2] = np.nan, np.inf, -np.inf
    found = check_arrays(values, None, 5, labels=np.zeros(40))
    (one,) = found.inputs
    finite = values[np.isfinite(values)].astype(np.float64)
    assert (one.name, one.dtype, one.shape, one.data_shape) == ("x", "float32", (None, 5), (1, 5))
    assert (one.low, one.high, one.nan, one.inf) == (float(finite.min()), float(finite.max()), 1, 2)
    assert one.mean == pytest.approx(finite.mean())
    assert (found.samples, found.ignored, kinds(found)) == (40, ("labels",), ["not-finite"])
    assert "receives 1 NaN and 2 infinite values" in found.findings[0].message


def test_valid_data(check_arrays) -> None:
    """Valid data has no findings."""
    assert kinds(check_arrays(NOISE, None, 5, label=np.zeros(40))) == []
    assert kinds(check_arrays(np.arange(200, dtype=np.uint8).reshape(40, 5), None, 5, dtype="uint8")) == []
    assert kinds(check_arrays(NOISE * 100 + 130.5, None, 5)) == []  # positive, and no pixels


def test_each_finding(check_arrays) -> None:
    """Few samples, unscaled pixels, constants, equal samples, unused keys and random data are found."""
    assert kinds(check_arrays(NOISE[:31], None, 5)) == ["few-samples"]
    assert kinds(check_arrays(np.arange(200.0).reshape(40, 5), None, 5)) == ["unscaled"]
    assert kinds(check_arrays(np.full((40, 5), 3.0), None, 5)) == ["constant"]
    assert kinds(check_arrays(NOISE * 1e30, None, 5)) == ["scale"]
    assert kinds(check_arrays(np.tile(NOISE[:1], (40, 1)), None, 5)) == ["same-samples"]
    assert kinds(check_arrays(NOISE, None, 5, imgaes=NOISE)) == ["ignored"]
    pixels = np.sort(np.random.default_rng(5).integers(-255, 1, (40, 4, 4, 1)), axis=1) / 255
    assert kinds(check_arrays(pixels, None, 4, 4, 1)) == ["negated"]
    assert kinds(check_arrays((pixels * 255).reshape(40, 16), None, 16)) == ["negated"]
    assert kinds(check_arrays(pixels.reshape(40, 16), None, 16)) == []  # other values are from -1 to 0 too
    decibels = np.sort(np.random.default_rng(5).uniform(-1, 0, (40, 4, 4, 1)), axis=1)
    decibels[0, 0, :2, 0] = -1, 0
    assert kinds(check_arrays(decibels, None, 4, 4, 1)) == []
    assert kinds(check_arrays(np.full((40, 1), 3.0), None, 1)) == []  # a rate or a switch
    large = np.where(np.arange(40)[:, None] == 7, 1000 * NOISE, NOISE)
    assert kinds(check_arrays(large, None, 5)) == ["large-samples"]
    assert kinds(check_arrays(np.where(np.arange(40)[:, None] < 20, 1000 * NOISE, NOISE), None, 5)) == []
    taker = InputSpec(name="x", dtype="float32", shape=(None, 5))
    assert kinds(check_dataset(open_data("random:40", [taker]), [taker])) == ["random"]


def test_cuts_of_few_items(check_arrays) -> None:
    """Overlapping windows of a clip and crops of a picture are found, but not those of many clips, or still frames."""
    rng = np.random.default_rng(8)
    clips = rng.normal(0, 1, (40, 1000)).cumsum(1)
    windows = np.lib.stride_tricks.sliding_window_view(clips, 64, axis=1)[:, ::16]  # (clip, window, 64)
    cut = ["overlapping-samples"]
    assert kinds(check_arrays(windows[0, :40], None, 64)) == cut
    assert kinds(check_arrays(windows[0, :40][::-1], None, 64)) == cut
    assert kinds(check_arrays(windows[:3, :14].reshape(-1, 64), None, 64)) == cut
    assert kinds(check_arrays(windows[:, :3].reshape(-1, 64), None, 64)) == []
    assert kinds(check_arrays(windows[0, ::4], None, 64)) == ["few-samples"]
    chunks = np.lib.stride_tricks.sliding_window_view(rng.normal(0, 1, 3000).cumsum(), 80)[::64]
    assert kinds(check_arrays(chunks[:40], None, 80)) == []  # each begins with the last 16 values of the one before
    picture = rng.normal(0, 1, (96, 96)).cumsum(0).cumsum(1)
    picture = (picture - picture.min()) / np.ptp(picture)
    crops = np.lib.stride_tricks.sliding_window_view(picture, (32, 32))[::8, ::8].reshape(-1, 1, 32, 32)
    assert kinds(check_arrays(crops, None, 1, 32, 32)) == cut
    still = np.where(np.arange(64) < 32, clips[0, :64], rng.normal(0, 1, (40, 64)) + clips[0, :64])
    assert "overlapping-samples" not in kinds(check_arrays(still, None, 64))


def test_cuts_beside_states(tmp_path: Path) -> None:
    """The states of a recurrent op need not be cuts, too."""
    rng = np.random.default_rng(9)
    weights = {"w": rng.normal(0, 0.1, (1, 128, 64)).astype(np.float32), "r": np.zeros((1, 128, 32), np.float32)}
    body = "o, next, cell = LSTM<hidden_size = 32>(x, w, r, , , h) y = Squeeze(o)"
    graph = f"g (float[1, 1, 64] x, float[1, 1, 32] h) => (float[32] y, float[1, 1, 32] next) {{ {body} }}"
    model = load_onnx(tmp_path, graph, weights)
    clip = rng.normal(0, 1, 1000).cumsum().astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(clip, 64)[:640:16].reshape(40, 1, 1, 64)
    states = rng.normal(0, 1, (40, 1, 1, 32)).cumsum(3).astype(np.float32)
    inputs = format_module("onnx").input_specs(model)
    report = check_dataset(open_data(as_data_spec({"x": windows, "h": states}), inputs), inputs, model)
    assert kinds(report) == ["overlapping-samples"]


def test_samples_that_differ_by_noise(check_arrays) -> None:
    """One item with noise is found, also if clipped. Columns of other units, and objects on a background, are not."""
    rng = np.random.default_rng(6)
    item, noise = rng.uniform(0, 1, 64), rng.normal(0, 1, (40, 64))
    assert kinds(check_arrays(item + 0.03 * noise, None, 64)) == ["similar-samples"]
    assert kinds(check_arrays(np.clip(item.round() + 0.03 * noise, 0, 1), None, 64)) == ["similar-samples"]
    assert kinds(check_arrays(item + 0.3 * noise, None, 64)) == []
    assert kinds(check_arrays((item + 0.03 * noise)[:, :8], None, 8)) == []  # too few values to judge
    units = np.logspace(-4, 4, 64)
    assert kinds(check_arrays(units * (item + 0.03 * noise), None, 64)) == []
    assert kinds(check_arrays(np.where(np.arange(64) < 4, item + 0.3 * noise, item), None, 64)) == []


@given(
    st.integers(0, 2**32 - 1),
    st.integers(24, 48),
    st.integers(16, 400),
    st.sampled_from(["normal", "uniform", "exponential", "laplace"]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_in_random_order(check_arrays, seed: int, count: int, size: int, distribution: str) -> None:
    """Random and shuffled values of any distribution are found, but not the same values in order or with a profile."""
    rng = np.random.default_rng(seed)
    values = getattr(rng, distribution)(size=(count, size)).astype(np.float32)
    profile = 4 * np.std(values, axis=1, keepdims=True) * np.linspace(-1, 1, size)
    assert "noise" in kinds(check_arrays(values, None, size))
    assert "noise" not in kinds(check_arrays(values[:15], None, size))
    assert "noise" not in kinds(check_arrays(np.sort(values, axis=1), None, size))
    assert "noise" not in kinds(check_arrays((values + profile).astype(np.float32), None, size))
    assert "noise" in kinds(check_arrays(rng.permuted(np.sort(values, axis=1), axis=1), None, size))


def test_values_without_order_that_are_right(check_arrays, tmp_path) -> None:
    """Categories, integers and points need no order, and columns of a table may hardly depend on each other."""
    rng = np.random.default_rng(4)
    points = rng.normal(size=(40, 500, 3)).astype(np.float32)
    points /= np.linalg.norm(points, axis=2, keepdims=True)
    assert kinds(check_arrays(points, None, 500, 3)) == []
    assert kinds(check_arrays(points.swapaxes(1, 2)[..., None], None, 3, 500, 1)) == []
    # Components of a principal component analysis, whose deviations differ.
    columns = (rng.standard_t(4, size=(40, 28)) * np.linspace(2, 0.3, 28)).astype(np.float32)
    assert kinds(check_arrays(columns, None, 28)) == []
    assert kinds(check_arrays(np.eye(64, dtype=np.float32)[rng.integers(0, 64, 40)], None, 64)) == []
    ids = rng.integers(0, 1000, (40, 64))
    assert kinds(check_arrays(ids, None, 64, dtype="int64")) == []
    table = {"table": rng.normal(size=(1000, 4)).astype(np.float32)}
    model = load_onnx(tmp_path, "g (int64[n, 64] ids) => (float[n, 64, 4] y) { y = Gather(table, ids) }", table)
    inputs = format_module("onnx").input_specs(model)
    assert kinds(check_dataset(open_data(as_data_spec({"ids": ids}), inputs), inputs, model)) == []


def test_swapped_layouts(model_folder, check_arrays) -> None:
    """Reshaped instead of transposed photographs are found in both directions. Correct ones are not; noise is."""
    photos = np.load(model_folder / "ultraface/images.npz")["rgb"].astype(np.float32) / 127.5 - 1
    height, width = photos.shape[1:3]
    photos = np.concatenate([photos, photos[:, :, ::-1]])  # mirrored: more than 32
    first = photos.transpose(0, 3, 1, 2)
    assert kinds(check_arrays(first, None, 3, height, width)) == []
    assert kinds(check_arrays(photos, None, height, width, 3)) == []
    found = check_arrays(photos.reshape(first.shape), None, 3, height, width)
    assert kinds(found) == ["layout"]
    assert "look like reshaped NHWC" in found.findings[0].message
    assert "array.transpose(0, 3, 1, 2)" in found.findings[0].message
    found = check_arrays(np.ascontiguousarray(first).reshape(photos.shape), None, height, width, 3)
    assert kinds(found) == ["layout"]
    assert "array.transpose(0, 2, 3, 1)" in found.findings[0].message
    noise = np.random.default_rng(0).standard_normal((40, 3, 20, 30)).astype(np.float32)
    assert kinds(check_arrays(noise, None, 3, 20, 30)) == ["noise"]
    assert kinds(check_arrays(noise, None, None, None, None)) == ["noise", "layout-open"]
    assert kinds(check_arrays(noise[:, :1], None, 1, 20, 30)) == ["noise"]
    assert kinds(check_arrays(photos[..., 1:2], None, height, width, 1)) == []
    assert kinds(check_arrays(np.zeros((40, 0, 3, 20, 30), np.float32), None, 3, 20, 30)) == []


def test_varying_sizes(tmp_path) -> None:
    """An axis whose size varies between samples is reported as open."""
    for index in range(3):
        write_wav(tmp_path / f"{index}.wav", np.arange(10 + index))
    taker = InputSpec(name="x", dtype="float32", shape=(None, None))
    (one,) = check_dataset(open_data(str(tmp_path), [taker]), [taker]).inputs
    assert one.data_shape == (1, None)


def test_command(cli, samples, tmp_path) -> None:
    """Findings give exit code 1, invalid data exit code 2. JSON contains the table."""
    model, data = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz"
    shown = cli("data", "check", model, data).stdout.splitlines()
    assert shown[0].split()[:5] == ["input", "dtype", "in", "the", "model"]
    assert shown[1].split()[:2] == ["image", "float32"]
    assert shown[-1].startswith("100 samples")
    few = cli("data", "check", model, data, "--samples", 3, code=1)
    assert few.stdout.splitlines()[-1] == "3 samples, 1 finding."
    told = json.loads(cli("data", "check", model, data, "--samples", 3, "--format", "json", code=1).stdout)
    assert (told["samples"], [one["kind"] for one in told["findings"]]) == (3, ["few-samples"])
    assert told["inputs"][0] | {"mean": 0, "high": 1} == {
        "name": "image",
        "dtype": "float32",
        "shape": [None, 8, 8, 1],
        "data_shape": [1, 8, 8, 1],
        "low": 0.0,
        "high": 1,
        "mean": 0,
        "nan": 0,
        "inf": 0,
    }
    np.savez(tmp_path / "bad.npz", image=np.zeros((40, 8, 8, 1), np.uint8))
    refused = cli("data", "check", model, tmp_path / "bad.npz", code=2)
    assert all(value in refused.stderr for value in ("bad.npz", "uint8", "'image'", "float32"))


def test_tensorflow_models_need_no_tensorflow(samples) -> None:
    """The inputs of a SavedModel are read without running it."""
    found = gq.check_data(samples / "digits_cnn_saved_model", str(samples / "digits_cnn_eval.npz"))
    assert (found.samples, found.ignored, found.inputs[0].shape) == (300, ("labels",), (None, 8, 8, 1))


def test_real_models(shared) -> None:
    """The data of the real models fits them and has no findings."""
    found = gq.check_data(shared / "kws/saved_model", str(shared / "kws/calib.npz"))
    assert (found.samples, found.findings) == (100, ())
    found = gq.check_data(shared / "silero_vad_16k_op15.onnx", str(shared / "silero_vad.npz"))
    assert ([one.data_shape for one in found.inputs], kinds(found)) == ([(1, 576), (2, 1, 128), ()], [])


def calibration_images(samples) -> np.ndarray:
    """Return the calibration images of the sample models, from 0 to 1."""
    return np.load(samples / "digits_cnn_calib.npz")["image"]


def model_findings(model, **arrays) -> list[str]:
    """Return the kinds of findings of data for a model."""
    source = gq.load(model)
    runner = format_module(source.format).create_runner(source)
    dataset = open_data_of(runner.inputs, arrays)
    return [finding.kind for finding in SampleCheck(dataset, runner).finish()]


def open_data_of(inputs, arrays) -> Dataset:
    """Open arrays as data, which may contain NaN."""
    with TemporaryDirectory() as folder:
        np.savez(Path(folder, "data.npz"), **arrays)
        feeds = list(open_data(str(Path(folder, "data.npz")), inputs, require_finite=False))
    return Dataset(count=len(feeds), digest="", open_feeds=lambda first, last: iter(feeds[first:last]))


SAMPLE_MODELS = [
    f"digits_{name}"
    for name in (
        "cnn.onnx",
        "cnn_bn.onnx",
        "nested.onnx",
        "rnn.onnx",
        "cnn.pb",
        "rnn.pb",
        "cnn_saved_model",
        "rnn_saved_model",
    )
]


def digits_for(model, images) -> np.ndarray:
    """Return images in the shape of the input of a sample model."""
    return images.reshape(-1, 8, 8) if "rnn" in str(model) else images


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE_MODELS)
def test_sample_models(samples, name) -> None:
    """The data of the sample models has no findings. Pixels from 0 to 255 and constants have."""
    images = digits_for(name, calibration_images(samples))
    assert model_findings(samples / name, image=images) == []
    assert not {"unscaled", "scale"}.isdisjoint(model_findings(samples / name, image=images * 255))
    assert model_findings(samples / name, image=images * 0) == ["constant"]
    assert model_findings(samples / name, image=images * 0 + 3) == ["constant"]
    assert model_findings(samples / name, image=np.tile(images[:2], (50, *[1] * (images.ndim - 1)))) == ["same-samples"]
    blank = np.where(np.arange(100).reshape(-1, *[1] * (images.ndim - 1)) % 3, np.float32(0), images)
    assert model_findings(samples / name, image=blank) == ["blank"]


@pytest.mark.slow
def test_commands_run_the_check(samples, tmp_path, cli) -> None:
    """Insert, calibrate and compare warn of pixels from 0 to 255 and of zeros; good data has no warning."""
    model, images = samples / "digits_cnn.onnx", calibration_images(samples)
    result = gq.insert(model, data=str(samples / "digits_cnn_calib.npz"))
    assert result.data_findings == ()
    result.save(tmp_path / "quantized.onnx")
    for name, factor, kind in (("pixels", 255, "unscaled"), ("zeros", 0, "constant"), ("good", 1, "")):
        data = tmp_path / f"{name}.npz"
        np.savez(data, image=images * np.float32(factor))
        report = tmp_path / f"{name}.json"
        shown = [
            cli("insert", model, "--data", data, "-o", tmp_path / f"{name}.onnx", "--report", report).stdout,
            cli("calibrate", model, "--data", data, "-o", tmp_path / f"{name}.gqs").stdout,
            cli("compare", model, tmp_path / "quantized.onnx", "--data", data).stdout,
        ]
        assert [sum(line.startswith("warning: image") for line in text.splitlines()) for text in shown] == [
            bool(kind)
        ] * 3
        assert [entry["kind"] for entry in json.loads(report.read_text())["data_findings"]] == [kind] * bool(kind)
        assert [entry.kind for entry in gq.compare(model, tmp_path / "quantized.onnx", str(data)).data_findings] == [
            kind
        ] * bool(kind)


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_samples_that_judge_their_own_ranges(samples, count) -> None:
    """Insert, calibrate and compare warn of fewer than 8 samples, of which none are held out."""
    model, data = samples / "digits_cnn.onnx", {"image": calibration_images(samples)[:count]}
    expected = ["few-samples"] if count < 8 else []
    result = gq.insert(model, data=data)
    assert [finding.kind for finding in result.data_findings] == expected
    assert result.validation.reuses_samples is (count < 8)
    assert [finding.kind for finding in gq.calibrate(model, gq.plan(model), data).data_findings] == expected
    assert [finding.kind for finding in gq.compare(result.source, result.model, data).data_findings] == expected


def test_batch_reports_the_warnings(samples, tmp_path) -> None:
    """A batch keeps the status and reports the warning."""
    np.savez(tmp_path / "zeros.npz", image=calibration_images(samples) * 0)
    entry = Entry(
        name="m",
        model=str(samples / "digits_cnn.onnx"),
        output=str(tmp_path / "m.onnx"),
        data=str(tmp_path / "zeros.npz"),
    )
    outcome = quantize_entry(entry)
    assert (outcome.status, len(outcome.data_warnings)) == ("done", 1)
    report = BatchReport(version="0", outcomes=(outcome,))
    assert [notice.code for notice in report_notices(report)] == ["GQ211"]


GATES = {
    "lstm": "y, h, c = LSTM<hidden_size=8>(x, w, r, b)",
    "cell": "p = MatMul(x, basis) q = MatMul(p, square) t = Add(p, q) f = Sigmoid(t) g = Tanh(t) y = Mul(f, g)",
    "branch": "no = Constant<value_int=0>() yes = Cast<to=9>(no)"
    " o = If(yes) <then_branch = one () => (float a) { a = MatMul(x, basis) },"
    " else_branch = two () => (float a) { a = MatMul(x, basis) }> y = Sigmoid(o)",
}


@pytest.mark.parametrize("name", GATES)
def test_saturated_gates(tmp_path, name: str) -> None:
    """Values that saturate the gates of a recurrent net are found, also if its cell has single ops or an If."""
    rng = np.random.default_rng(3)
    arrays = {"basis": rng.normal(size=(16, 8)), "square": rng.normal(size=(8, 8)) / 4}
    arrays |= {"w": rng.normal(size=(1, 32, 16)), "r": rng.normal(size=(1, 32, 8)) / 4, "b": rng.normal(size=(1, 64))}
    used = arrays.keys() & set(re.findall(r"\w+", GATES[name]))
    text = f"g (float[7, 1, 16] x) => (float y) {{ {GATES[name]} }}"
    model = onnx_model(text, {key: arrays[key].astype(np.float32) for key in sorted(used)})
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, tmp_path / "model.onnx")
    x = (rng.normal(size=(40, 7, 1, 16)) + np.linspace(-1, 1, 16)).astype(np.float32)
    assert model_findings(tmp_path / "model.onnx", x=x) == []
    assert model_findings(tmp_path / "model.onnx", x=x * 255) == ["scale"]


def test_scales_far_beyond_biases(samples) -> None:
    """Pixels that are a million times too large leave biases without influence."""
    images = calibration_images(samples)
    for name in ("digits_cnn.onnx", "digits_rnn.onnx"):
        assert model_findings(samples / name, image=digits_for(name, images) * 1e6) == ["scale"]


@pytest.mark.parametrize(
    "between", ["n = InstanceNormalization(c, s, z)", "r = Reshape(c, k) n = InstanceNormalization(r, s, z)"]
)
def test_biases_that_a_norm_takes_away(tmp_path, between: str) -> None:
    """Biases before an InstanceNormalization may have any size, and so say nothing of the scale."""
    rng = np.random.default_rng(5)
    arrays = {"w": rng.normal(size=(4, 3, 3, 3)), "b": np.full(4, 1e-9), "s": np.ones(4), "z": np.zeros(4)}
    nodes = f"k = Constant<value_ints=[0, 4, -1]>() c = Conv(image, w, b) {between} y = Relu(n)"
    text = f"g (float[n, 3, 20, 20] image) => (float y) {{ {nodes} }}"
    model = onnx_model(text, {name: value.astype(np.float32) for name, value in arrays.items()})
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, tmp_path / "model.onnx")
    assert model_findings(tmp_path / "model.onnx", image=smooth_images()) == []


def test_scales_that_no_pixel_has(tmp_path) -> None:
    """Values beyond 255 in images of three channels are found if the biases of the first layer are as small, too."""
    model, images = conv_model(tmp_path / "model.onnx"), smooth_images()
    assert model_findings(model, image=images * 2 - 1) == []
    assert model_findings(model, image=(images * 2 - 1) * np.float32(600)) == ["unscaled"]


def conv_model(path, *, scale: float = 1.0, size: int = 20) -> Path:
    """Write a trained-looking model for images: scaling, convolution with a bias of the size of its response."""
    rng = np.random.default_rng(1)
    weight = rng.normal(0, 1, (8, 3, 3, 3)) / np.sqrt(27) * 4
    model = onnx_model(
        f"""g (float[n, 3, {size}, {size}] image) => (float[n, 8] features) {{
            scaled = Mul(image, scale)
            c = Conv<pads=[1, 1, 1, 1]>(scaled, weight, bias)
            r = Relu(c)
            p = GlobalAveragePool(r)
            features = Flatten(p)
        }}""",
        {
            "scale": np.float32(scale),
            "weight": weight.astype(np.float32),
            "bias": rng.normal(0, 1, 8).astype(np.float32),
        },
    )
    onnx.save(model, path)
    return path


def smooth_images(size: int = 20) -> np.ndarray:
    """Return 40 smooth color images from 0 to 1, NCHW."""
    rng = np.random.default_rng(2)
    noise = rng.random((40, 3, size, size + 0))
    for axis in (2, 3):
        noise = sum(np.roll(noise, shift, axis) for shift in range(5)) / 5
    noise = noise + rng.random((40, 3, 1, 1))
    return ((noise - noise.min()) / np.ptp(noise)).astype(np.float32)


def test_scaling_in_the_model(tmp_path) -> None:
    """A model that divides by 255 takes pixels, and values from 0 to 1 have almost no influence on it."""
    images = smooth_images()
    plain, dividing = conv_model(tmp_path / "plain.onnx"), conv_model(tmp_path / "dividing.onnx", scale=1 / 255)
    assert model_findings(plain, image=images) == model_findings(dividing, image=images * 255) == []
    assert model_findings(plain, image=images * 255) == ["unscaled"]
    assert model_findings(dividing, image=images) == ["scale"]
    assert model_findings(plain, image=np.floor(images * 255) - 128) == ["unscaled"]
    assert model_findings(plain, image=(images / 255 - 0.5) * 0.004) == ["scale"]


def test_row_numbers_of_type_float_are_no_pixels(tmp_path) -> None:
    """Embedding layers of Keras 2 take floats, which they cast to row numbers."""
    tf = pytest.importorskip("tensorflow")
    table = np.random.default_rng(1).normal(size=(178, 4)).astype(np.float32)
    with tf.Graph().as_default() as graph:
        rows = tf.compat.v1.placeholder(tf.float32, [None, 6], name="rows")
        tf.reduce_sum(tf.gather(table, tf.cast(rows, tf.int32)), [1], name="y")
    (tmp_path / "net.pb").write_bytes(graph.as_graph_def().SerializeToString())
    rows = np.random.default_rng(0).integers(90, 178, (40, 6)).astype(np.float32)
    assert model_findings(tmp_path / "net.pb", rows=rows) == []


def test_layers_behind_the_first_one(samples, tmp_path) -> None:
    """Weights that callers may override, gates of an LSTM, and a layer behind a spectrogram tell the scale."""
    images = calibration_images(samples)
    assert model_findings(samples / "digits_cnn_bn.onnx", image=images / 255) == ["scale"]
    assert model_findings(samples / "digits_cnn_bn.onnx", image=images * 255) == ["scale"]
    rng = np.random.default_rng(3)
    arrays = {
        "w": rng.normal(size=(1, 32, 5)),
        "r": rng.normal(size=(1, 32, 8)) / 4,
        "b": rng.normal(size=(1, 64)) / 4,
        "basis": rng.normal(size=(5, 16)),
        "weight": rng.normal(size=(16, 4)) / 4,
        "bias": rng.normal(size=4),
    }
    product = "z = MatMul(q, weight) s = Add(z, bias) y = Relu(s)"
    texts = {
        "lstm": "y, h, c = LSTM<hidden_size=8>(x, w, r, b)",
        "spectrogram": f"m = MatMul(x, basis) p = Mul(m, m) q = Sqrt(p) {product}",
        "normalized": f"m = MatMul(x, basis) l = ReduceL2<axes=[-1]>(m) q = Div(m, l) {product}",
    }
    wave = (rng.normal(size=(40, 7, 1, 5)) + np.linspace(-2, 2, 7).reshape(7, 1, 1)).astype(np.float32)
    for name, text in texts.items():
        used = arrays.keys() & set(text.replace(",", " ").replace(")", " ").replace("(", " ").split())
        model = onnx_model(
            f"g (float[7, 1, 5] x) => (float y) {{ {text} }}",
            {key: arrays[key].astype(np.float32) for key in sorted(used)},
        )
        model.graph.output[0].type.tensor_type.ClearField("shape")
        onnx.save(model, tmp_path / f"{name}.onnx")
        assert model_findings(tmp_path / f"{name}.onnx", x=wave) == []
        expected = [] if name == "normalized" else ["scale"]
        assert model_findings(tmp_path / f"{name}.onnx", x=wave / 1000) == expected


def test_negated_samples(samples, tmp_path) -> None:
    """The means of a batch normalization tell the sign, also behind a bias; zero means tell nothing."""
    images = calibration_images(samples)
    assert model_findings(samples / "digits_cnn_bn.onnx", image=-images * 0.9) == ["negated"]
    assert model_findings(samples / "digits_cnn_bn.onnx", image=1 - images) == []
    rng = np.random.default_rng(7)
    values = rng.normal(0.5, 1, (40, 6)).astype(np.float32)
    arrays = {
        "weight": rng.normal(size=(6, 5)),
        "bias": 9 * rng.normal(size=5),
        "gain": np.ones(5),
        "shift": np.zeros(5),
    }
    product = values @ arrays["weight"] + arrays["bias"]
    for name, mean in (("stored", product.mean(0)), ("without", arrays["bias"])):
        statistics = arrays | {"mean": mean, "variance": product.var(0)}
        text = """g (float[n, 6] x) => (float[n, 5] y) {
            z = Gemm(x, weight, bias) y = BatchNormalization(z, gain, shift, mean, variance) }"""
        model = onnx_model(text, {key: value.astype(np.float32) for key, value in statistics.items()})
        onnx.save(model, tmp_path / f"{name}.onnx")
        assert model_findings(tmp_path / f"{name}.onnx", x=values) == []
        assert model_findings(tmp_path / f"{name}.onnx", x=-values) == ["negated"] * (name == "stored")


def test_each_sample_is_read_once(samples) -> None:
    """The check reads no sample twice, because a function may take long."""
    runner = format_module("onnx").create_runner(gq.load(samples / "digits_cnn.onnx"))
    feeds = [{"image": image[None]} for image in calibration_images(samples)]
    reads = []

    def open_feeds(first, last):
        for index in range(first, last):
            reads.append(index)
            yield feeds[index]

    SampleCheck(Dataset(count=len(feeds), digest="", open_feeds=open_feeds), runner).finish()
    assert reads == list(range(32))


def test_given_runs_are_judged_without_others(samples, monkeypatch) -> None:
    """With the runs of a validation, the model does not run again for its outputs."""
    runner = format_module("onnx").create_runner(gq.load(samples / "digits_cnn.onnx"))
    feeds = [{"image": image[None]} for image in calibration_images(samples)]
    dataset = Dataset(count=len(feeds), digest="", open_feeds=lambda first, last: iter(feeds[first:last]))
    monkeypatch.setattr(type(runner), "run_each", None)
    runs = [(feed, {"scores": np.array([[np.nan, k]], np.float32)}) for k, feed in enumerate(feeds[-4:])]
    assert [finding.kind for finding in SampleCheck(dataset, runner).finish(runs)] == ["not-finite-output"]


def test_samples_may_be_in_the_order_of_their_classes(tmp_path: Path) -> None:
    """The last samples, which the validation takes, are then of one class, and the outputs say nothing of the data."""
    values = np.random.default_rng(0).normal(size=(40, 24)).cumsum(1).astype(np.float32)
    weight = np.random.default_rng(1).normal(size=(24, 1)).astype(np.float32)
    model = onnx_model(
        "g (float[n, 24] x) => (bool[n, 1] y) { p = MatMul(x, w) y = Greater(p, t) }",
        {"w": weight, "t": np.zeros(1, np.float32)},
    )
    onnx.save(model, tmp_path / "m.onnx")
    ordered = values[np.argsort((values @ weight)[:, 0])]
    assert gq.insert(tmp_path / "m.onnx", data={"x": ordered}).data_findings == ()


def test_other_mistakes(tmp_path) -> None:
    """Reshaped NHWC, NaN, infinity, overflow and random data."""
    images = smooth_images()
    model = conv_model(tmp_path / "m.onnx")
    nhwc = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    assert model_findings(model, image=nhwc.reshape(images.shape)) == ["layout"]
    with pytest.raises(DataError, match=r"numpy\.moveaxis"):
        gq.insert(model, data=str(save_arrays(tmp_path, image=nhwc)))
    with pytest.raises(DataError, match="only NaN"):
        model_findings(model, image=images * np.nan)
    broken = images.copy()
    broken[3] = np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model_findings(model, image=broken)[0] == "not-finite"
        identity = load_onnx(tmp_path, "g (float[n, 8] x) => (float[n, 8] y) { y = Identity(x) }", {}).path
        x = np.tile(np.array([np.nan, np.inf, -np.inf, 1, 2, 3, 4, 5], np.float32), (40, 1))
        assert "not-finite-output" in model_findings(identity, x=x * np.linspace(1, 2, 40, dtype=np.float32)[:, None])
    assert "not-finite-output" in model_findings(model, image=images * np.float32(3e38) - np.float32(1e38))
    source = gq.load(model)
    runner = format_module("onnx").create_runner(source)
    assert SampleCheck(open_data("random:40", runner.inputs), runner).finish() == ()


def save_arrays(folder, **arrays) -> Path:
    """Write arrays and return the path."""
    np.savez(folder / "arrays.npz", **arrays)
    return folder / "arrays.npz"


def test_token_ids(tmp_path) -> None:
    """Ids beyond the table are an error; a mask in place of ids is a warning; a constant mask is none."""
    rng = np.random.default_rng(0)
    model = tmp_path / "m.onnx"
    onnx.save(
        onnx_model(
            """g (int64[n, 6] ids, int64[n, 6] mask) => (float[n, 6, 4] y) {
                e = Gather(table, ids)
                f = Cast<to=1>(mask)
                g = Unsqueeze(f, axes)
                h = Mul(e, g)
                y = MatMul(h, weight)
            }""",
            {
                "table": rng.normal(size=(50, 4)).astype(np.float32),
                "axes": np.array([2]),
                "weight": rng.normal(size=(4, 4)).astype(np.float32),
            },
        ),
        model,
    )
    ids, mask = rng.integers(0, 50, (40, 6)), np.ones((40, 6), np.int64)
    assert model_findings(model, ids=ids, mask=mask) == []
    assert model_findings(model, ids=mask * (ids % 2), mask=ids) == ["mask"]
    assert model_findings(model, ids=ids * 0, mask=mask * (ids % 2)) == ["constant"]  # only padding
    with pytest.raises(DataError, match=r"^ids .* 50\."):
        gq.insert(model, data=str(save_arrays(tmp_path, ids=ids + 1, mask=mask)))
    with pytest.raises(DataError, match=r"^ids .* 50\."):
        gq.compare(model, model, str(save_arrays(tmp_path, ids=ids * 100, mask=mask)))


def test_ids_of_several_tables(tmp_path) -> None:
    """Columns of ids for tables of their own, and remainders of large ids, are not compared with the smallest table."""
    rng = np.random.default_rng(0)
    model = tmp_path / "m.onnx"
    onnx.save(
        onnx_model(
            """g (int64[n, 2] ids) => (float[n, 4] y) {
                first, second = Split<axis=1>(ids)
                r = Mod(second, rows)
                a = Gather(large, first)
                b = Gather(small, r)
                s = Add(a, b)
                f = Squeeze(s, axes)
                y = MatMul(f, weight)
            }""",
            {
                "large": rng.normal(size=(90, 4)).astype(np.float32),
                "small": rng.normal(size=(50, 4)).astype(np.float32),
                "rows": np.array([50]),
                "axes": np.array([1]),
                "weight": rng.normal(size=(4, 4)).astype(np.float32),
            },
        ),
        model,
    )
    ids = np.stack([rng.integers(0, 90, 40), rng.integers(0, 10**9, 40)], axis=1)
    assert "index" not in model_findings(model, ids=ids)
    assert gq.insert(model, data=str(save_arrays(tmp_path, ids=ids))).is_changed


@pytest.mark.parametrize(
    ("outputs", "value", "findings"),
    [("y", 0, []), ("y", 1, ["constant"]), ("y, h", 0, ["constant"])],
    ids=["zero", "one", "returned"],
)
def test_initial_states(tmp_path, outputs: str, value: int, findings: list[str]) -> None:
    """Zeros are the usual initial state of a recurrent op, unless the model returns the state for the next run."""
    declared = "float[5, 1, 1, 3] y" + (", float[1, 1, 3] h" if "h" in outputs else "")
    model = onnx_model(
        f"g (float[5, 1, 4] x, float[1, 1, 3] s) => ({declared})"
        f" {{ {outputs} = GRU <hidden_size = 3> (x, w, r, , , s) }}",
        {"w": np.full((1, 9, 4), 0.1, np.float32), "r": np.full((1, 9, 3), 0.1, np.float32)},
    )
    onnx.save(model, tmp_path / "model.onnx")
    x = np.random.default_rng(0).normal(size=(40, 5, 1, 4)).cumsum(1).astype(np.float32)
    data = save_arrays(tmp_path, x=x, s=np.full((40, 1, 1, 3), value, np.float32))
    assert kinds(gq.check_data(tmp_path / "model.onnx", data)) == findings


@pytest.mark.parametrize("replacement", ["means", "x"])
def test_missing_values(tmp_path, replacement: str) -> None:
    """A model that replaces NaN itself may receive it; another one may not."""
    rng = np.random.default_rng(0)
    model = tmp_path / "m.onnx"
    test = "isn = IsNaN(x)" if replacement == "means" else "isn = Less(x, x)"
    onnx.save(
        onnx_model(
            f"""g (float[n, 8] x) => (float[n, 4] y) {{
                {test}
                z = Where(isn, {replacement}, x)
                y = MatMul(z, weight)
            }}""",
            {
                "means": np.zeros(8, np.float32),
                "weight": rng.normal(size=(8, 4)).astype(np.float32),
            },
        ),
        model,
    )
    values = rng.normal(size=(40, 8)).astype(np.float32)
    values[::3, 2] = np.nan
    path = str(save_arrays(tmp_path, x=values))
    if replacement == "means":
        assert model_findings(model, x=values) == []
        assert gq.insert(model, data=path).validation.worst_sqnr > 20
    else:
        assert "not-finite" in model_findings(model, x=values)
        with pytest.raises(DataError, match="NaN"):
            gq.insert(model, data=path)


def test_outputs_without_information(tmp_path) -> None:
    """Saturated probabilities and equal outputs of different samples are found."""
    model = tmp_path / "m.onnx"
    onnx.save(
        onnx_model(
            """g (float[n, 5] x) => (float[n, 5] y) {
                z = MatMul(x, weight)
                y = Softmax(z)
            }""",
            {"weight": np.eye(5, dtype=np.float32)},
        ),
        model,
    )
    assert model_findings(model, x=NOISE) == []
    assert model_findings(model, x=NOISE * 1e6) == ["saturated"]
    positive = np.abs(NOISE) + 1 + 100 * np.eye(5, dtype=np.float32)[2]
    assert model_findings(model, x=positive * 1e3) == ["saturated", "same-outputs"]


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("kws/saved_model", "kws/calib.npz"),
        ("silero_vad_16k_op15.onnx", "silero_vad.npz"),
        ("dtln/model_1.onnx", "dtln/model_1_calib.npz"),
        ("dtln/model_2.onnx", "dtln/model_2_calib.npz"),
        ("dtln/saved_model", "dtln/saved_model_calib.npz"),
        ("basic_pitch/nmp.onnx", "basic_pitch/calib.npz"),
    ],
)
def test_no_false_warnings(shared, model, data) -> None:
    """Real models with their own data have no findings."""
    with np.load(shared / data) as arrays:
        assert model_findings(shared / model, **arrays) == []


@pytest.mark.slow
def test_no_false_warnings_for_photographs(shared) -> None:
    """Detectors have no findings on their own scale, normalized or from 0 to 255; some have on another."""
    photos = np.load(shared / "ultraface/images.npz")["rgb"].astype(np.float32).transpose(0, 3, 1, 2)
    crops = np.load(shared / "osf/crops.npz")["rgb"].astype(np.float32).transpose(0, 3, 1, 2)[:32]
    squares = photos[:, ::-1, 8:232, 48:272]
    large = np.pad(photos, ((0, 0), (0, 0), (88, 88), (48, 48)), "edge")[:, ::-1]
    normalized = (crops / 255 - 0.45) / 0.225
    assert model_findings(shared / "ultraface/version-RFB-320.onnx", input=(photos - 127) / 128) == []
    assert model_findings(shared / "ultraface/version-RFB-320.onnx", input=photos) == ["scale"]
    assert model_findings(shared / "odd/squeezenet_fp16.onnx", data_0=squares.astype(np.float16)) == []
    assert model_findings(shared / "odd/yolox_nano.onnx", images=large) == []
    assert model_findings(shared / "odd/yolox_nano.onnx", images=large / 255) == ["scale"]
    for name in ("lm_model0_opt.onnx", "mnv3_detection_opt.onnx"):
        assert model_findings(shared / "osf" / name, input=normalized) == []
        assert "unscaled" in model_findings(shared / "osf" / name, input=crops)


class CountingRunner:
    """A runner whose only output is the mean of its input, or its negative, as two scores."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, feed):
        """Return the scores of a feed."""
        self.runs += 1
        return {"y": np.array([feed["x"].mean(), -feed["x"].mean()])}

    def run_each(self, feeds):
        """Return the scores of each feed."""
        return map(self.run, feeds)


@pytest.mark.parametrize(("last", "runs"), [(255.0, 2), (-255.0, 4)])
def test_divided_samples_run_only_if_outputs_differ(last: float, runs: int) -> None:
    """Samples of one class tell nothing about the scale, so that they are not run again divided by 255."""
    runner = CountingRunner()
    feeds = [{"x": np.array([value], np.float32)} for value in (255.0, last)]
    assert not _ModelResponse(runner, {}, list(zip(feeds, runner.run_each(feeds), strict=True))).needs_large_values("x")
    assert runner.runs == runs
