"""The numpy references of TensorFlow's quantization ops, compared with TensorFlow."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_bit_is_tensorflows() -> None:
    """On 22,000 seeded cases and those of hypothesis, the references and TensorFlow give the same bits."""
    pytest.importorskip("tensorflow")
    script = Path(__file__).with_name("against_tensorflow.py")
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    sys.stdout.write(process.stdout)
    assert process.returncode == 0, process.stderr[-5000:]
    counts = process.stdout.splitlines()[-2].split()
    assert int(counts[1]) >= 20_000
    assert process.stdout.endswith("mismatches = 0\n")


THREADS = """
import numpy as np, tensorflow as tf
import sys
sys.path.insert(0, "tests")
from reference import fake_quant
tf.config.threading.set_intra_op_parallelism_threads(4)
rng = np.random.default_rng(0)
for count in (1000, 8193, 30_000, 300_000):
    gradients = rng.normal(size=count).astype(np.float32)
    x = np.full(count, 9, np.float32)
    low, high = np.float32(-1), np.float32(1)
    theirs = tf.raw_ops.FakeQuantWithMinMaxVarsGradient(gradients=gradients, inputs=x, min=low, max=high)[2].numpy()
    ours = fake_quant.fake_quant_with_vars_gradient(gradients, x, low, high)[2]
    exact = np.sum(gradients, dtype=np.float64)
    assert count > 30_000 or ours == theirs, (count, ours, theirs)
    for total in (ours, theirs):
        assert abs(total - exact) <= 1e-6 * np.abs(gradients).sum(), (count, total, exact)
print("agreed")
"""


@pytest.mark.slow
def test_sums_of_large_tensors_are_close_with_more_threads() -> None:
    """Known difference: several threads sum tensors of about 50,000 gradients and more in another order."""
    pytest.importorskip("tensorflow")
    process = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert process.stdout == "agreed\n", process.stderr[-2000:]
