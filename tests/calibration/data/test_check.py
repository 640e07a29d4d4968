"""`graphquant data check`: output and findings."""

from __future__ import annotations

import json

import numpy as np
import pytest

import graphquant as gq
from graphquant.calibration.data import open_data
from graphquant.calibration.data.check import check_dataset
from graphquant.formats import InputSpec


@pytest.fixture
def report(tmp_path):
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


def test_statistics_of_inputs(report) -> None:
    """Minimum, maximum and mean cover finite values. NaN and infinity are counted."""
    values = NOISE.copy()
    values[3, 1], values[4, 0], values[5, 2] = np.nan, np.inf, -np.inf
    found = report(values, None, 5, labels=np.zeros(40))
    (one,) = found.inputs
    finite = values[np.isfinite(values)].astype(np.float64)
    assert (one.name, one.dtype, one.shape, one.data_shape) == ("x", "float32", (None, 5), (1, 5))
    assert (one.low, one.high, one.nan, one.inf) == (float(finite.min()), float(finite.max()), 1, 2)
    assert one.mean == pytest.approx(finite.mean())
    assert (found.samples, found.ignored, kinds(found)) == (40, ("labels",), ["not-finite"])
    assert "receives 1 NaN and 2 infinite values" in found.findings[0].message


def test_valid_data(report) -> None:
    """Valid data has no findings."""
    assert kinds(report(NOISE, None, 5, label=np.zeros(40))) == []
    assert kinds(report(np.arange(200, dtype=np.uint8).reshape(40, 5), None, 5, dtype="uint8")) == []
    assert kinds(report(NOISE * 100 + 130.5, None, 5)) == []  # positive, and no pixels


def test_each_finding(report) -> None:
    """Few samples, unscaled pixels, constants, equal samples, unused keys and random data are found."""
    assert kinds(report(NOISE[:31], None, 5)) == ["few-samples"]
    assert kinds(report(np.arange(200.0).reshape(40, 5), None, 5)) == ["unscaled"]
    assert kinds(report(np.full((40, 5), 3.0), None, 5)) == ["constant"]
    assert kinds(report(np.tile(NOISE[:1], (40, 1)), None, 5)) == ["same-samples"]
    assert kinds(report(NOISE, None, 5, imgaes=NOISE)) == ["ignored"]
    assert kinds(report(np.full((40, 1), 3.0), None, 1)) == []  # a rate or a switch
    taker = InputSpec(name="x", dtype="float32", shape=(None, 5))
    assert kinds(check_dataset(open_data("random:40", [taker]), [taker])) == ["random"]


def test_swapped_layouts(shared, report) -> None:
    """Reshaped instead of transposed photographs are found in both directions. Correct ones and noise are not."""
    photos = np.load(shared / "ultraface/images.npz")["rgb"].astype(np.float32) / 127.5 - 1
    photos = np.concatenate([photos, photos[:, :, ::-1]])  # mirrored: more than 32
    first = photos.transpose(0, 3, 1, 2)
    assert kinds(report(first, None, 3, 240, 320)) == []
    assert kinds(report(photos, None, 240, 320, 3)) == []
    found = report(photos.reshape(first.shape), None, 3, 240, 320)
    assert kinds(found) == ["layout"]
    assert "look like reshaped NHWC" in found.findings[0].message
    assert "array.transpose(0, 3, 1, 2)" in found.findings[0].message
    found = report(np.ascontiguousarray(first).reshape(photos.shape), None, 240, 320, 3)
    assert kinds(found) == ["layout"]
    assert "array.transpose(0, 2, 3, 1)" in found.findings[0].message
    noise = np.random.default_rng(0).standard_normal((40, 3, 20, 30)).astype(np.float32)
    assert kinds(report(noise, None, 3, 20, 30)) == []
    assert kinds(report(noise, None, None, None, None)) == ["layout-open"]


def test_varying_sizes(tmp_path, stored) -> None:
    """An axis whose size varies between samples is reported as open."""
    for index in range(3):
        stored.wav(tmp_path / f"{index}.wav", np.arange(10 + index))
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
    assert "is uint8, but input 'image' takes float32. Convert it, and scale it" in refused.stderr


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
