"""What is imported when: no TensorFlow but to run its models, nothing heavy for the help, all lazily."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"numpy", "networkx", "onnx", "onnxruntime", "rich", "pydantic", "google", "tensorflow", "ml_dtypes"}


def imported(*arguments: object) -> set[str]:
    """The top-level packages that `python ARGUMENTS` imports, as -X importtime tells them."""
    command = [sys.executable, "-X", "importtime", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return {line.split("|")[2].strip().split(".")[0] for line in result.stderr.splitlines() if line.count("|") == 2}


def verbs(model: Path, folder: Path) -> list[list[object]]:
    """Calls of each verb that needs no data."""
    return [
        ["plan", model],
        ["plan", model, "--format", "json"],
        ["inspect", model],
        ["inspect", model, "--format", "dot"],
        ["inspect", model, "--html", folder / "page.html", "--force"],
        ["check", model],
        ["insert", model, "--rules", "fixed_point", "-o", folder / "out"],
        ["rules", "list"],
        ["rules", "check", "tflite"],
    ]


def test_no_tensorflow_for_saved_models(samples: Path, tmp_path: Path) -> None:
    """Reading, planning and rewriting a SavedModel import neither tensorflow nor onnx, nor what data alone needs."""
    unwanted = {"tensorflow", "keras", "onnx", "onnxruntime"}
    for arguments in verbs(samples / "digits_cnn_saved_model", tmp_path):
        assert imported("-m", "graphquant", *arguments) & unwanted == set()


def test_no_tensorflow_for_a_real_saved_model(shared: Path, tmp_path: Path) -> None:
    """The same for one of 197 functions."""
    for arguments in verbs(shared / "kws/saved_model", tmp_path)[:6]:
        assert imported("-m", "graphquant", *arguments) & {"tensorflow", "keras", "onnx", "onnxruntime"} == set()


def test_no_tensorflow_for_onnx(samples: Path, tmp_path: Path) -> None:
    """An ONNX model is quantized on data without tensorflow."""
    data = ["--data", samples / "digits_cnn_calib.npz", "-o", tmp_path / "out.onnx"]
    seen = imported("-m", "graphquant", "insert", samples / "digits_cnn.onnx", *data)
    assert "tensorflow" not in seen


@pytest.mark.parametrize("arguments", [["--help"], ["insert", "--help"], ["--version"], ["rules", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """The help of each command needs click alone."""
    assert imported("-m", "graphquant", *arguments) & HEAVY == set()


def test_the_package_is_lazy() -> None:
    """`import graphquant` imports nothing but the standard library; its verbs come when they are used."""
    assert imported("-c", "import graphquant") & (HEAVY | {"click"}) == set()
    assert (
        imported("-c", "import graphquant as gq; gq.load; gq.insert") & {"onnx", "tensorflow", "rich", "click"} == set()
    )


def test_verbs_stay_callable_after_every_module_is_imported() -> None:
    """No module of the package hides a verb of the same name."""
    script = """
import importlib, pkgutil, types
import graphquant as gq
for module in pkgutil.walk_packages(gq.__path__, "graphquant."):
    if module.name != "graphquant.__main__":
        importlib.import_module(module.name)
for verb in ("load", "plan", "calibrate", "insert", "save"):
    assert isinstance(getattr(gq, verb), types.FunctionType), verb
assert sorted(gq.__all__) == sorted(set(gq.__all__)) and all(getattr(gq, name) is not None for name in gq.__all__)
try:
    gq.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_help_starts_fast() -> None:
    """`graphquant --help` takes at most twice the time of importing click, as the benchmark measures it."""
    script = ROOT / "benchmarks" / "startup.py"
    result = subprocess.run([sys.executable, str(script), "15"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert re.search(r"^ratio +\d\.\d\d ", result.stdout, re.MULTILINE)
