from __future__ import annotations

import numpy as np
import pytest

from graphquant.quantize.source_record import fit_channel_factors, undo_channel_factors


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
def test_scaled_weights_are_restored_exactly(shape: tuple[int, ...], channels: tuple[int, ...]) -> None:
    """Whatever axis channels lie on, the weight is what it was, and takes a byte a value before compression."""
    weight, scaled_weight = scaled(shape, channels)
    fitted = fit_channel_factors(weight.tobytes(), scaled_weight.tobytes(), shape)
    assert fitted is not None
    blocks, rest = fitted
    assert undo_channel_factors(scaled_weight.tobytes(), blocks, rest) == weight.tobytes()
    assert len(rest) == weight.size + 8 * blocks[1]
    off = np.frombuffer(rest[8 * blocks[1] :], np.int8)
    assert np.abs(off).max() <= 2


def test_unrelated_weights_do_not_fit() -> None:
    """Other weights, other sizes, and channels multiplied by 0 are told."""
    weight, unrelated = scaled((16, 8, 3, 3), (16, 1, 1, 1))
    sizes = weight.shape
    assert fit_channel_factors(weight.tobytes(), np.roll(unrelated, 1).tobytes(), sizes) is None
    assert fit_channel_factors(weight.tobytes(), unrelated.tobytes()[4:], sizes) is None
    assert fit_channel_factors(weight.tobytes(), unrelated.tobytes(), (3,)) is None
    unrelated[2] = 0
    assert fit_channel_factors(weight.tobytes(), unrelated.tobytes(), sizes) is None
