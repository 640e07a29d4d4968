"""Run Python code in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str, *arguments: str) -> str:
    """Run `code` in a new process and return its output. Skips the test if the code needs a missing TensorFlow."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if "No module named 'tensorflow'" in process.stderr:
        pytest.skip("TensorFlow is not installed")
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()
