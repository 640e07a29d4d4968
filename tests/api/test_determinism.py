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
TENSORFLOW = ("digits_cnn.pb", "digits_cnn.pbtxt", "digits_cnn_saved_model", "digits_rnn.pb", "digits_rnn_saved_model")

SCRIPT = """
import ast, contextlib, importlib, sys
from graphquant.cli import main
# The time beside float, which `insert` reports, differs between runs.
importlib.import_module("graphquant.api.insert").time_beside_float = lambda *_: None
for number, arguments in enumerate(ast.literal_eval(sys.argv[1])):
    with open(f"stdout{number}", "w") as file, contextlib.redirect_stdout(file):
        main(arguments, standalone_mode=False)
"""


def written(folder: Path, seed: int, *calls: list[object]) -> dict[str, str]:
    """Return a digest of each file that graphquant writes into `folder` with this hash seed, its output included."""
    folder.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, repr([[str(word) for word in call] for call in calls])],
        capture_output=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
    )
    assert result.returncode == 0, result.stderr
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def calls(model: Path, *options: object) -> list[list[object]]:
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


def assert_equal(folder: Path, *todo: list[object]) -> None:
    """Two seeds write the same files."""
    one, other = written(folder / "a", 1, *todo), written(folder / "b", 4321, *todo)
    assert one == other
    assert len(one) >= len(todo) + 3
    written_options = {"-o", "--report", "--html"}
    names = {str(name) for call in todo for option, name in pairwise(call) if option in written_options}
    assert {Path(name).parts[0] for name in names} <= {Path(name).parts[0] for name in one}


@pytest.mark.slow
def test_calibrated_model_with_bodies(samples: Path, tmp_path: Path) -> None:
    """Model, report, plan and texts of a calibrated ONNX model; a statistics file, its table, JSON data and page."""
    model, data = samples / "digits_rnn.onnx", samples / "digits_rnn_calib.npz"
    shown = ["inspect", model, "--stats", "stats.gqs"]
    assert_equal(
        tmp_path,
        *calls(model, "--data", data, "--samples", 16),
        ["calibrate", model, "--data", data, "--samples", 16, "-o", "stats.gqs"],
        shown,
        [*shown, "--format", "json"],
        [*shown, "--html", "page.html"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ONNX, *TENSORFLOW])
def test_calibrated_models(samples: Path, tmp_path: Path, name: str) -> None:
    """The same for all sample models, calibrated in their framework."""
    assert_equal(tmp_path, *calls(samples / name, "--data", samples / f"{name[:10]}_calib.npz"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSORFLOW)
def test_fixed_point_tensorflow_models(samples: Path, tmp_path: Path, name: str) -> None:
    """The same for TensorFlow models with fixed-point ranges: a quick test of their bytes is in test_emit.py."""
    assert_equal(tmp_path, *calls(samples / name, "--rules", "fixed_point"))
