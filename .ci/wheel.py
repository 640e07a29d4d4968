"""Install a wheel into a new environment without compiler and TensorFlow, and quantize the sample model there.

    python .ci/wheel.py              # build the wheel of this checkout first
    python .ci/wheel.py dist/*.whl   # test a wheel that is built already

The environment has the pinned versions of the dependencies. The wheel must have the compiled kernel of histograms.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECK = """
import importlib.util
import shutil
import sys
from pathlib import Path

import graphquant
from graphquant.observers import _fill
from graphquant.rules import find_rule_file

site = Path(sys.prefix).resolve()
assert all(site in Path(module.__file__).resolve().parents for module in (graphquant, _fill)), graphquant.__file__
assert site in find_rule_file("onnxruntime").resolve().parents
assert importlib.util.find_spec("tensorflow") is None
assert not any(map(shutil.which, ("cc", "gcc", "clang")))
"""


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout."""
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("graphquant-*.whl")
    return wheel


def check_wheel(wheel: Path, folder: Path) -> None:
    """Install the wheel in a new environment in `folder`, and run it there. Raise CalledProcessError if that fails."""
    environment = folder / "environment"
    venv.create(environment, with_pip=True, symlinks=True)
    programs = environment / "bin"
    only_own_programs = {**os.environ, "PATH": str(programs), "PYTHONNOUSERSITE": "1"}
    only_own_programs.pop("PYTHONPATH", None)

    def run(*command: str) -> None:
        subprocess.run(command, check=True, cwd=folder, env=only_own_programs)

    python = str(programs / "python")
    run(python, "-m", "pip", "install", "-q", "--only-binary", ":all:", "-c", str(ROOT / "constraints.txt"), str(wheel))
    run(python, "-c", CHECK)
    models = ROOT / "sample_models"
    data = str(models / "digits_cnn_calib.npz")
    program = str(programs / "graphquant")
    run(program, "insert", str(models / "digits_cnn.onnx"), "--data", data, "-o", "onnx.onnx", "--min-sqnr", "25")
    run(program, "insert", str(models / "digits_cnn.pb"), "--rules", "weight_only", "-o", "frozen.pb")
    run(program, "check", "onnx.onnx", "--for", "onnxruntime")


def main() -> None:
    """Test the wheel that is named on the command line, or build one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else build_wheel(folder)
        check_wheel(wheel, folder)
        print(f"{wheel.name} works without compiler and TensorFlow.")


if __name__ == "__main__":
    main()
