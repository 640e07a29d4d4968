"""`benchmarks/tensorflow_models.py`, which examines every TensorFlow model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "tensorflow_models.py"
NAMES = ("digits_cnn.pb", "digits_cnn.pbtxt", "digits_cnn_saved_model", "digits_rnn.pb", "digits_rnn_saved_model")


@pytest.mark.slow
def test_sample_models_hold() -> None:
    """Each sample model is quantized, reloaded, run, checked and trained, and its copies agree."""
    pytest.importorskip("tensorflow")
    result = subprocess.run([sys.executable, str(SCRIPT), *NAMES], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows if row[-1] == "ok"] == list(NAMES)
