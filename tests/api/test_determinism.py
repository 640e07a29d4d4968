"""Two runs with different hash seeds write identical bytes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ONNX = ("digits_cnn.onnx", "digits_cnn_bn.onnx")
TENSORFLOW = ("digits_cnn.pb", "digits_cnn_saved_model", "digits_rnn.pb", "digits_rnn_saved_model")
FIXED_POINT = ("digits_cnn.pbtxt", "digits_cnn_saved_model", "digits_rnn_saved_model")

SCRIPT = """
import ast, contextlib, importlib, os, sys
from graphquant.cli import main
from graphquant.optimize.latency import TimeRatio
# The time beside float, which `insert` reports, differs between runs.
ratio = TimeRatio(median=0.5, low=0.5, high=0.5, first_seconds=0.5, second_seconds=1.0)
importlib.import_module("graphquant.api.insert").time_beside_float = lambda *_: ratio
for folder, calls in ast.literal_eval(sys.argv[1]).items():
    os.makedirs(folder)
    with contextlib.chdir(folder):
        for number, arguments in enumerate(calls):
            with open(f"stdout{number}", "w") as file, contextlib.redirect_stdout(file):
                main(arguments, standalone_mode=False)
"""


Calls = list[list[object]]


def written(folder: Path, seed: int, calls: dict[str, Calls]) -> dict[str, dict[str, str]]:
    """Run all calls in one process with this hash seed, each list in a folder of its own with its name.

    Returns a digest of each file of a folder, the output of the calls included, by the folder's name.
    """
    folder.mkdir()
    words = {name: [[str(word) for word in call] for call in todo] for name, todo in calls.items()}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, repr(words)],
        capture_output=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
    )
    assert result.returncode == 0, result.stderr
    return {name: digests(folder / name) for name in calls}


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def calls(model: Path, *options: object) -> Calls:
    """Insert with a report, plan, inspect and explain."""
    out = f"out{model.suffix}"
    return [
        ["insert", model, "-o", out, "--report", "report.json", "--html", "insert.html", *options],
        ["plan", model, "--html", "plan.html"],
        ["inspect", out, "--format", "svg"],
        ["inspect", out, "--format", "graph-json"],
        ["plan", model, "--format", "json", "-o", "plan.json"],
        ["plan", model],
        ["inspect", out, "--format", "json"],
        ["inspect", out, "--format", "dot"],
    ]


def short_calls(model: Path, *options: object) -> Calls:
    """Insert with a report, plan and inspect, for models whose pages and drawings are like those of others."""
    wanted = ("insert", "plan.json", "json")
    return [call for call in calls(model, *options) if wanted[0] == call[0] or call[-1] in wanted]


def assert_equal(folder: Path, calls: dict[str, Calls]) -> None:
    """Two seeds write the same files."""
    one, other = written(folder / "a", 1, calls), written(folder / "b", 4321, calls)
    for name, todo in calls.items():
        assert one[name] == other[name], name
        assert len(one[name]) >= len(todo) + 3
        written_options = {"-o", "--report", "--html"}
        outputs = {str(path) for call in todo for option, path in pairwise(call) if option in written_options}
        assert {Path(path).parts[0] for path in outputs} <= {Path(path).parts[0] for path in one[name]}


@pytest.mark.slow
def test_calibrated_model_with_bodies(samples: Path, tmp_path: Path) -> None:
    """Model, report, plan and texts of a calibrated ONNX model; a statistics file, its table, JSON data and page."""
    model, data = samples / "digits_rnn.onnx", samples / "digits_rnn_calib.npz"
    shown = ["inspect", model, "--stats", "stats.gqs"]
    todo = [
        *calls(model, "--data", data, "--samples", 16),
        ["calibrate", model, "--data", data, "--samples", 16, "-o", "stats.gqs"],
        shown,
        [*shown, "--format", "json"],
        [*shown, "--html", "page.html"],
    ]
    assert_equal(tmp_path, {"digits_rnn": todo})


@pytest.mark.slow
def test_calibrated_models(samples: Path, tmp_path: Path) -> None:
    """The same for the ONNX models without bodies."""
    data = samples / "digits_cnn_calib.npz"
    assert_equal(tmp_path, {name: calls(samples / name, "--data", data) for name in ONNX})


@pytest.mark.slow
def test_tensorflow_models(samples: Path, tmp_path: Path) -> None:
    """Models of TensorFlow, calibrated or with fixed-point ranges: a quick test of their bytes is in test_emit.py."""
    data = {name: samples / f"{name[:10]}_calib.npz" for name in TENSORFLOW}
    todo = {name: short_calls(samples / name, "--data", path, "--samples", 16) for name, path in data.items()}
    todo |= {f"{name} fixed": short_calls(samples / name, "--rules", "fixed_point") for name in FIXED_POINT}
    todo["digits_cnn.pb"] = calls(samples / "digits_cnn.pb", "--data", data["digits_cnn.pb"], "--samples", 16)
    assert_equal(tmp_path, todo)
