from __future__ import annotations

import numpy as np
import pytest

from graphquant.provenance.scaled import fit, undo


def scaled(shape: tuple[int, ...], channels: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """A weight, and what is left of it when its channels are multiplied and rounded to float32."""
    random = np.random.default_rng(1)
    weight = random.normal(size=shape).astype(np.float32)
    weight.reshape(-1)[:3] = [0.0, -0.0, 1e-12]
    factor = random.uniform(0.01, 30, channels) * random.choice([-1, 1], channels)
    return weight, (weight.astype(np.float64) * factor).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "channels"),
    [
        ((16, 8, 3, 3), (16, 1, 1, 1)),  # ONNX's Conv
        ((8, 16, 3, 3), (1, 16, 1, 1)),  # its ConvTranspose
        ((3, 3, 8, 16), (16,)),  # TensorFlow's Conv2D
        ((3, 3, 8, 2), (8, 2)),  # its DepthwiseConv2dNative
        ((32, 10), (10,)),
    ],
)
def test_it_comes_back_bit_for_bit(shape: tuple[int, ...], channels: tuple[int, ...]) -> None:
    """Whatever axis channels lie on, the weight is what it was, and takes a byte a value before compression."""
    weight, other = scaled(shape, channels)
    found = fit(weight.tobytes(), other.tobytes(), shape)
    assert found is not None
    blocks, rest = found
    assert undo(other.tobytes(), blocks, rest) == weight.tobytes()
    assert len(rest) == weight.size + 8 * blocks[1]
    off = np.frombuffer(rest[8 * blocks[1] :], np.int8)
    assert np.abs(off).max() <= 2


def test_what_is_no_scaled_weight() -> None:
    """Other weights, other sizes, and channels multiplied by 0 are told."""
    weight, other = scaled((16, 8, 3, 3), (16, 1, 1, 1))
    sizes = weight.shape
    assert fit(weight.tobytes(), np.roll(other, 1).tobytes(), sizes) is None
    assert fit(weight.tobytes(), other.tobytes()[4:], sizes) is None
    assert fit(weight.tobytes(), other.tobytes(), (3,)) is None
    other[2] = 0
    assert fit(weight.tobytes(), other.tobytes(), sizes) is None
