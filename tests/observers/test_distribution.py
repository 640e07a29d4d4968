"""Squared errors in C and in numpy."""

import numpy as np
import pytest
from support.qparams import choose_qparams

from graphquant.numerics import IntType, QParams, Range
from graphquant.observers import distribution_of, histogram_kernel, sketch_values

RNG = np.random.default_rng(7)
TENSORS = {
    "normal": RNG.standard_normal(20_000),
    "heavy-tailed": RNG.standard_t(1.5, 20_000),
    "one-sided": np.maximum(RNG.standard_normal(20_000), 0),
    "pixels": RNG.integers(0, 256, 20_000) / 255,
    "far from zero": RNG.standard_normal(20_000) * 1e-3 + 5,
    "few": np.array([-3.0, 0.1, 0.2, 40.0]),
    "one": np.array([0.7]),
    "denormal": RNG.standard_normal(1000) * 1e-40,
    "huge": RNG.standard_normal(1000) * 1e37,
}
INT4, INT8, INT16 = (IntType(bits, signed=True) for bits in (4, 8, 16))
UINT8 = IntType(8, signed=False)
SHARES = np.append(2.0 ** -np.arange(0, 18, 0.37), 1e-9)


def candidates(values: np.ndarray, dtype: IntType, *, symmetric: bool) -> QParams:
    """Return ranges of all sizes, with both ends or one end clipped."""
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    still = np.ones_like(SHARES)
    ends = Range(low * np.concatenate([SHARES, SHARES, still]), high * np.concatenate([SHARES, still, SHARES]))
    return choose_qparams(ends, dtype, symmetric=symmetric, axis=0)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [INT4, INT8, UINT8, INT16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", TENSORS)
def test_compiled_and_numpy_errors_agree(extension, monkeypatch, name: str, dtype: IntType, symmetric: bool) -> None:
    """Both agree for ranges that clip no value up to ranges that clip nearly all."""
    values = TENSORS[name].astype(np.float32)
    values_distribution = distribution_of(sketch_values(values, bits=10 if dtype is INT16 else 7))
    params = candidates(values, dtype, symmetric=symmetric)
    monkeypatch.setattr(histogram_kernel, "squared_errors", extension.squared_errors)
    in_c = values_distribution.squared_error(params)
    monkeypatch.setattr(histogram_kernel, "squared_errors", None)
    np.testing.assert_allclose(
        in_c, values_distribution.squared_error(params), rtol=1e-5, atol=1e-12 * values_distribution.power
    )


def test_compiled_errors_reject_wrong_shapes(extension) -> None:
    """Pieces without eight rows, candidates without three numbers, and arrays of other types raise errors."""
    pieces, candidate, error = np.zeros((8, 3)), np.ones((1, 3)), np.zeros(1)
    extension.squared_errors(pieces, candidate, error)
    for arguments in [
        (pieces[:7], candidate, error),
        (pieces, candidate[:, :2].copy(), error),
        (pieces, candidate, np.zeros(2)),
    ]:
        with pytest.raises(ValueError, match="do not fit"):
            extension.squared_errors(*arguments)
    with pytest.raises(ValueError, match="do not fit"):
        extension.squared_errors(pieces[:, :0].copy(), candidate, error)
    with pytest.raises(ValueError, match="do not fit"):
        extension.squared_errors(pieces, np.zeros(0), np.zeros(5, np.uint8))
