"""Imports are lazy: TensorFlow is imported only to run its models, and heavy packages never for the help."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import grimp
import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"numpy", "networkx", "onnx", "onnxruntime", "rich", "pydantic", "google", "tensorflow", "ml_dtypes"}


def imported_modules(*arguments: object) -> set[str]:
    """Return the modules that `python ARGUMENTS` imports, from -X importtime."""
    command = [sys.executable, "-X", "importtime", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return {line.split("|")[2].strip() for line in result.stderr.splitlines() if line.count("|") == 2}


def imported_packages(*arguments: object) -> set[str]:
    """Return the top-level packages that `python ARGUMENTS` imports."""
    return {name.partition(".")[0] for name in imported_modules(*arguments)}


RUN_COMMANDS = """
import json, sys
from graphquant.cli import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as ending:
        if ending.code:
            raise
"""


def packages_of_commands(model: Path, folder: Path, count: int | None = None) -> set[str]:
    """Return the packages that the first `count` commands, of those that need no data, import in one process."""
    lines = [
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
    return imported_packages("-c", RUN_COMMANDS, json.dumps(lines[:count], default=str))


@pytest.mark.slow
def test_no_tensorflow_for_saved_models(samples: Path, tmp_path: Path) -> None:
    """Reading, planning and rewriting a SavedModel import no TensorFlow, ONNX or ONNX Runtime."""
    packages = packages_of_commands(samples / "digits_cnn_saved_model", tmp_path)
    assert packages & {"tensorflow", "keras", "onnx", "onnxruntime", "click"} == {"click"}
    assert (tmp_path / "out").exists()


@pytest.mark.slow
def test_no_tensorflow_for_a_real_saved_model(shared: Path, tmp_path: Path) -> None:
    """A real SavedModel with 197 functions needs no TensorFlow, ONNX or ONNX Runtime."""
    packages = packages_of_commands(shared / "kws/saved_model", tmp_path, 6)
    assert packages & {"tensorflow", "keras", "onnx", "onnxruntime", "click"} == {"click"}


def test_no_tensorflow_for_onnx(samples: Path, tmp_path: Path) -> None:
    """Quantizing an ONNX model on data imports no TensorFlow."""
    data = ["--data", samples / "digits_cnn_calib.npz", "-o", tmp_path / "out.onnx"]
    packages = imported_packages("-m", "graphquant", "insert", samples / "digits_cnn.onnx", *data)
    assert packages.isdisjoint({"tensorflow", "networkx"})


@pytest.mark.parametrize(
    ("name", "loaded"), [("digits_cnn_saved_model", set()), ("digits_resnet.onnx", {"graphquant.backends"})]
)
def test_plan_loads_no_other_commands(name: str, loaded: set[str], samples: Path) -> None:
    """A plan loads no networkx, and nothing that only calibration, search and validation need."""
    modules = imported_modules("-m", "graphquant", "plan", samples / name)
    unneeded = {"optimize.algorithm", "analysis", "backends", "batch", "calibration.data", "api.insert", "api.compare"}
    unneeded = {"networkx", "onnxruntime", "concurrent.futures", *(f"graphquant.{name}" for name in unneeded)}
    assert modules & unneeded == loaded


@pytest.mark.parametrize("arguments", [["--help"], ["insert", "--help"], ["--version"], ["rules", "--help"]])
def test_help_imports_no_heavy_package(arguments: list[str]) -> None:
    """The help of each command imports no heavy package."""
    assert imported_packages("-m", "graphquant", *arguments) & HEAVY == set()


def test_package_is_lazy() -> None:
    """`import graphquant` imports only the standard library. Its functions import others on first use."""
    assert imported_packages("-c", "import graphquant") & (HEAVY | {"click"}) == set()
    assert (
        imported_packages("-c", "import graphquant as gq; gq.load; gq.insert") & {"onnx", "tensorflow", "rich", "click"}
        == set()
    )


def test_entry_point_imports_nothing() -> None:
    """The script that pip writes imports next to nothing before `run` handles Ctrl-C, and no handler is set by then."""
    script = "import signal, {}; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    bare, entry = (imported_modules("-c", script.format(name)) for name in ("sys", "graphquant.__main__"))
    assert {name for name in entry - bare if not name.startswith("__editable__")} == {
        *("graphquant", "graphquant.__main__", "__future__", "gc")
    }


@pytest.mark.parametrize("timeout", ["", "26"])
def test_idle_threads_of_openblas_sleep(timeout: str) -> None:
    """The command line sets the time after which they sleep, before numpy starts them, unless the user does."""
    script = """
import os, sys
import graphquant.cli
from graphquant.__main__ import run
graphquant.cli.main = lambda **_: print("numpy" in sys.modules, os.environ["OPENBLAS_THREAD_TIMEOUT"])
run()
"""
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_THREAD_TIMEOUT"}
    environment |= {"OPENBLAS_THREAD_TIMEOUT": timeout} if timeout else {}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment
    )
    assert result.stdout.split() == ["False", timeout or "20"], result.stderr


@pytest.mark.slow
def test_verbs_stay_callable_after_every_module_is_imported() -> None:
    """No module of the package hides a function of the same name."""
    script = """
import importlib, pkgutil, types
import graphquant as gq
for module in pkgutil.walk_packages(gq.__path__, "graphquant."):
    if module.name != "graphquant.__main__":
        importlib.import_module(module.name)
for verb in ("load", "plan", "calibrate", "insert", "save"):
    assert isinstance(getattr(gq, verb), types.FunctionType), verb
assert dir(gq) == sorted(gq.__all__) == sorted(set(gq.__all__))
assert all(getattr(gq, name) is not None for name in gq.__all__)
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
    """`graphquant --help` takes at most twice the time of importing click, by the benchmark."""
    script = ROOT / "benchmarks" / "startup.py"
    result = subprocess.run([sys.executable, str(script), "15"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert re.search(r"^ratio +\d\.\d\d ", result.stdout, re.MULTILINE)


def test_no_import_circles() -> None:
    """No module imports itself through others, also for type checks and when a function runs."""
    imports = grimp.build_graph("graphquant")
    graph = nx.DiGraph(
        (module, imported)
        for module in imports.modules
        for imported in imports.find_modules_directly_imported_by(module)
    )
    assert [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []
