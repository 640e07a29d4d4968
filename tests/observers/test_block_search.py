"""Search of block scales and zero points: errors against references, extreme values, and time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphquant.numerics import QuantizationGrid, Range, dequantize, parse_type, quantize
from graphquant.numerics.affine import split_blocks
from graphquant.observers import search_block_params
from graphquant.observers.block_search import SQUARED_MEAN

NORMAL = np.random.default_rng(0).standard_normal((1024, 96)).astype(np.float32)


def signal_to_noise(value: np.ndarray, dtype: str, **grid: bool) -> float:
    """The SQNR in dB of a weight in blocks of 32 along axis 0."""
    zero_is_fixed = grid.pop("symmetric", dtype.startswith("int"))
    params = search_block_params(
        value, QuantizationGrid(type=parse_type(dtype), symmetric=zero_is_fixed, **grid), 0, 32
    )
    error = dequantize(quantize(value, params), params) - value
    return float(10 * np.log10(np.square(value).sum() / np.square(error).sum()))


@pytest.mark.parametrize(
    ("dtype", "least"),
    [("uint4", 22.1), ("int4", 21.2), ("uint3", 15.8), ("int3", 14.6), ("uint2", 9.5), ("int2", 8.5), ("uint8", 47.0)],
)
def test_normal_weights(dtype: str, least: float) -> None:
    """Ranges from the smallest to the largest value have 21.8, 20.4, 15.2 and less; these have more."""
    assert signal_to_noise(NORMAL, dtype) > least


def test_no_scale_and_zero_point_have_much_less_error() -> None:
    """An exhaustive search of 16 zero points and 60 scales for each block gains at most 0.15 dB."""
    cells = split_blocks(NORMAL[:, :8], 0, 32)
    least = np.full(len(cells), np.inf)
    for zero in range(16):
        for share in np.linspace(0.3, 1.1, 60):
            scale = share * np.maximum(cells.max(1) / max(15 - zero, 0.5), -cells.min(1) / max(zero, 0.5))[:, None]
            codes = np.clip(np.rint(cells / scale), -zero, 15 - zero)
            least = np.minimum(least, np.square(codes * scale - cells).sum(1))
    exhaustive = 10 * np.log10(np.square(cells).sum() / least.sum())
    assert exhaustive - 0.15 < signal_to_noise(NORMAL[:, :8], "uint4") < exhaustive + 0.1


@given(
    seed=st.integers(0, 999),
    exponent=st.integers(-36, 37),
    offset=st.sampled_from([0, 1, -3]),
    dtype=st.sampled_from(["uint4", "int4", "uint2", "int8", "uint8"]),
    shape=st.sampled_from([(64, 3), (33, 1), (7,), (2, 40, 3)]),
)
def test_never_worse_than_smallest_and_largest(
    seed: int, exponent: int, offset: int, dtype: str, shape: tuple[int, ...]
) -> None:
    """Over decades of sizes, no block has 1.2 times the error that its range gives, and several have 1.05 times."""
    rng = np.random.default_rng(seed)
    value = ((rng.standard_t(3, shape) + offset).clip(-30, 30) / 30 * 10.0**exponent).astype(np.float32)
    value[rng.random(shape) < 0.3] = 0
    grid, axis = QuantizationGrid(type=parse_type(dtype), symmetric=dtype.startswith("int")), len(shape) // 2
    params = search_block_params(value, grid, axis, 32)
    cells = split_blocks(value, axis, 32)
    ends = Range(cells.min(1).reshape(params.scale.shape), cells.max(1).reshape(params.scale.shape))
    errors = []
    for candidate in (params, grid.qparams(ends, axis=axis, block=32)):
        error = dequantize(quantize(value, candidate), candidate).astype(np.float64) - value
        cells_of_error = split_blocks(error, axis, 32)
        errors.append(np.square(cells_of_error).sum(1) + SQUARED_MEAN * np.square(cells_of_error.sum(1)))
    power = np.square(cells.astype(np.float64)).sum(1) + np.square(cells.astype(np.float64).sum(1))
    assert (errors[0] <= errors[1] * 1.2 + 1e-6 * power + 1e-76).all()
    if power.size > 1:
        assert errors[0].sum() <= errors[1].sum() * 1.05 + 1e-6 * power.sum() + 1e-76


def test_errors_of_inputs_with_a_mean() -> None:
    """Products with positive inputs have at least 0.3 dB less error than by the squared error of the weight alone."""
    inputs = np.maximum(np.random.default_rng(1).standard_normal((500, 1024)), 0)
    grid, product, errors = QuantizationGrid(type=parse_type("uint4"), symmetric=False), inputs @ NORMAL, []
    for share in (0, SQUARED_MEAN):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("graphquant.observers.block_search.SQUARED_MEAN", np.float32(share))
            params = search_block_params(NORMAL, grid, 0, 32)
        errors.append(np.square(inputs @ dequantize(quantize(NORMAL, params), params) - product).sum())
    assert 10 * np.log10(errors[0] / errors[1]) > 0.3


def test_zeros_and_powers_of_two() -> None:
    """Blocks of zeros get scale 1; a scheme with power-of-two scales gets only such scales."""
    grid = QuantizationGrid(type=parse_type("uint4"), symmetric=False)
    zeros = search_block_params(np.zeros((64, 2), np.float32), grid, 0, 32)
    np.testing.assert_array_equal(zeros.scale, np.ones((2, 2)))
    power = QuantizationGrid(type=parse_type("uint4"), symmetric=False, power_of_two=True)
    assert (np.frexp(search_block_params(NORMAL, power, 0, 32).scale)[0] == 0.5).all()


def test_unsigned_grids_mirror() -> None:
    """The better of both signs: a block whose largest value is positive is as close as its negative."""
    value = np.zeros((32, 2), np.float32)
    value[:, 0] = np.linspace(-7, 8, 32).round()
    value[:, 1] = -value[:, 0]
    grid = QuantizationGrid(type=parse_type("uint4"), symmetric=False)
    params = search_block_params(value, grid, 0, 32)
    np.testing.assert_array_equal(dequantize(quantize(value, params), params), value)
    assert params.zero_point.tolist() == [[7, 8]]
    assert params.zero_point.dtype == np.int8  # a quarter of int32, for as many zero points as blocks


def test_threads_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales and zero points do not depend on the number of threads."""
    weight = np.random.default_rng(4).standard_normal((1024, 1030), np.float32)
    grid = QuantizationGrid(type=parse_type("uint4"), symmetric=False)
    serial = search_block_params(weight, grid, 0, 32)
    monkeypatch.setattr("graphquant.numerics.affine.MIN_PARALLEL_ELEMENTS", 0)
    threads = search_block_params(weight, grid, 0, 32)
    assert threads.scale.tobytes() == serial.scale.tobytes()
    assert threads.zero_point.tobytes() == serial.zero_point.tobytes()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", ["uint4", "int4", "uint2", "int8", "uint8"])
@pytest.mark.parametrize("count", [1, 255, 256, 1030])
def test_both_kernels_search_the_same(
    monkeypatch: pytest.MonkeyPatch, extension, dtype: str, count: int, power_of_two: bool
) -> None:
    """The compiled trials give scales and zero points with the bits of those in numpy."""
    weight = np.random.default_rng(count).standard_t(3, (64, count)).astype(np.float32)
    weight[:, ::7] = 0
    grid = QuantizationGrid(type=parse_type(dtype), symmetric=dtype.startswith("int"), power_of_two=power_of_two)
    results = []
    for kernel in (extension.search_blocks, None):
        monkeypatch.setattr("graphquant.observers.histogram_kernel.search_blocks", kernel)
        results.append(search_block_params(weight, grid, 0, 32))
    assert results[0].scale.tobytes() == results[1].scale.tobytes()
    assert results[0].zero_point.tobytes() == results[1].zero_point.tobytes()


@pytest.mark.parametrize(
    ("shape", "axis", "block"),
    [
        ((3, 70, 5), 1, 32),
        ((6, 100), 1, 32),
        ((100, 6), 0, 64),
        ((6, 100), 1, 1 << 20),
        ((2, 9000), 1, 8200),
        ((40,), 0, 64),  # from here, a single block in all or in the last chunk
        ((1, 100), 1, 128),
        ((128, 1), 0, 128),
        ((4097, 32), 1, 32),
    ],
)
def test_kernels_agree_on_partial_blocks(
    monkeypatch: pytest.MonkeyPatch, extension, shape: tuple[int, ...], axis: int, block: int
) -> None:
    """Along any axis, the last block may be partial, and values may be denormal, huge or of another type."""
    value = np.random.default_rng(1).standard_normal(shape) * np.float64(2.0) ** np.random.default_rng(2).integers(
        -140, 120, (*shape[:-1], 1)
    )
    grid, results = QuantizationGrid(type=parse_type("uint4"), symmetric=False), []
    for weight in (value, value.astype(np.float32)):
        for kernel in (extension.search_blocks, None):
            monkeypatch.setattr("graphquant.observers.histogram_kernel.search_blocks", kernel)
            params = search_block_params(weight, grid, axis, block)
            results.append((params.scale.tobytes(), params.zero_point.tobytes()))
    assert results == results[:1] * 4


def test_search_of_other_shapes(extension) -> None:
    """Arrays that do not fit each other are rejected."""
    values, results, pairs = np.ones((32, 4), np.float32), np.ones((3, 4), np.float32), np.ones((1, 2), np.float32)
    for arrays in ((values[:31].copy(), results), (values, results[:, :3].copy()), (values.ravel()[:-1], results)):
        with pytest.raises(ValueError, match="fit"):
            extension.search_blocks(*arrays, pairs, pairs, (32, 4, 16), (0, 15, 0, 8, 1e-6), False, False)
    with pytest.raises(ValueError, match="fit"):  # a size whose bytes overflow
        extension.search_blocks(values, results, pairs, pairs, (32, 4, 1 << 60), (0, 15, 0, 8, 1e-6), False, False)
