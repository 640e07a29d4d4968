"""FakeQuantWithMinMax in numpy: values of TensorFlow's own tests, examples, errors and ranges to write."""

import numpy as np
import pytest
from reference import fake_quant, quantize_and_dequantize

from graphquant.errors import UsageError
from graphquant.numerics import IntType, QParams, Range, qparams_from_scale, tf_ranges

# What fake_quant_ops_test.cc expects: (num_bits, narrow_range, min, max, inputs, outputs).
VECTORS = [
    (8, False, -10, 10, [0, 0], [0, 0]),
    (8, True, -10, 10, [0, 0], [0, 0]),
    (8, False, -10, 53.75, [-10.1, -10, -9.9, -9.75, 53.75, 53.8], [-10, -10, -10, -9.75, 53.75, 53.75]),
    (8, True, -10, 53.5, [-10.1, -10, -9.9, -9.75, 53.5, 53.6], [-10, -10, -10, -9.75, 53.5, 53.5]),
    (8, False, -0.1, 63.65, [-0.1, 0, 0.1, 0.25, 63.75, 63.8], [0, 0, 0, 0.25, 63.75, 63.75]),
    (8, True, -0.1, 63.4, [-0.1, 0, 0.1, 0.25, 63.5, 63.6], [0, 0, 0, 0.25, 63.5, 63.5]),
    (8, False, -0.1275, 63.6225, [-0.26, -0.25, -0.24, 0, 63.5, 63.6], [-0.25, -0.25, -0.25, 0, 63.5, 63.5]),
    (8, True, -0.1275, 63.3725, [-0.26, -0.25, -0.24, 0, 63.25, 63.3], [-0.25, -0.25, -0.25, 0, 63.25, 63.25]),
    (8, False, -0.125, 63.625, [-0.26, -0.25, -0.24, 0, 63.5, 63.6], [-0.25, -0.25, -0.25, 0, 63.5, 63.5]),
    (8, True, -0.125, 63.375, [-0.26, -0.25, -0.24, 0, 63.25, 63.3], [-0.25, -0.25, -0.25, 0, 63.25, 63.25]),
    (8, False, -63.65, 0.1, [-63.8, -63.75, -63.7, -63.5, 0, 0.1], [-63.75, -63.75, -63.75, -63.5, 0, 0]),
    (8, True, -63.4, 0.1, [-63.6, -63.5, -63.4, -63.25, 0, 0.1], [-63.5, -63.5, -63.5, -63.25, 0, 0]),
    (4, False, -6, 1.5, [-6.1, -6, -5.9, -5.5, 1.5, 1.6], [-6, -6, -6, -5.5, 1.5, 1.5]),
    (4, True, -6, 1, [-6.1, -6, -5.9, -5.5, 1, 1.1], [-6, -6, -6, -5.5, 1, 1]),
    (4, False, -0.1, 7.4, [-0.1, 0, 0.1, 0.5, 7.5, 7.6], [0, 0, 0, 0.5, 7.5, 7.5]),
    (4, True, -0.1, 6.9, [-0.1, 0, 0.1, 0.5, 7, 7.1], [0, 0, 0, 0.5, 7, 7]),
    (4, False, -0.4, 7.1, [-0.6, -0.5, -0.24, 0, 7, 7.1], [-0.5, -0.5, 0, 0, 7, 7]),
    (4, True, -0.4, 6.6, [-0.6, -0.5, -0.24, 0, 6.5, 6.6], [-0.5, -0.5, 0, 0, 6.5, 6.5]),
    (4, False, -7.3, 0.2, [-7.6, -7.5, -7.4, -7.2, 0, 0.1], [-7.5, -7.5, -7.5, -7, 0, 0]),
    (4, True, -6.8, 0.2, [-7.1, -7, -6.9, -6.7, 0, 0.1], [-7, -7, -7, -6.5, 0, 0]),
    (2, False, -1, 0.5, [-1.1, -1, -0.9, -0.3, 0.1, 0.6], [-1, -1, -1, -0.5, 0, 0.5]),
    (2, True, -1, 0, [-1.1, -1, -0.9, -0.3, 0, 0.1], [-1, -1, -1, -0.5, 0, 0]),
    (2, False, -0.1, 1.4, [-0.2, 0.1, 0.7, 1, 1.3, 1.6], [0, 0, 0.5, 1, 1.5, 1.5]),
    (2, True, -0.1, 0.9, [-0.1, 0.1, 0.7, 0.9, 1, 1.1], [0, 0, 0.5, 1, 1, 1]),
    (2, False, -0.4, 1.1, [-0.6, -0.5, -0.24, 0, 1, 1.1], [-0.5, -0.5, 0, 0, 1, 1]),
    (2, True, -0.4, 0.6, [-0.6, -0.5, -0.24, 0, 0.5, 0.6], [-0.5, -0.5, 0, 0, 0.5, 0.5]),
]
MORE_VECTORS = [0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25]
TIES = [1, 1.5, 1.5, 2, 2.5, 3, 3.5, 4]
HUGE = [100, 100, 100, 100, 1000]

# The (1, 2, 3, 4) tensors of the per-channel tests, all of whose channels have one range.
VECTORS_OF_24 = [
    (
        (8, False, -0.1, 63.65),
        [-0.1, 0, 0.1, 0.25, *MORE_VECTORS, 63, 63.25, 63.5, 63.7, 63.75, 63.8, 63.9, *HUGE],
        [0, 0, 0, 0.25, *MORE_VECTORS, 63, 63.25, 63.5, *[63.75] * 9],
    ),
    (
        (8, True, -0.1, 63.4),
        [-0.1, 0, 0.1, 0.25, *MORE_VECTORS, 63, 63.25, 63.3, 63.4, 63.5, 63.6, 63.7, *HUGE],
        [0, 0, 0, 0.25, *MORE_VECTORS, 63, 63.25, 63.25, *[63.5] * 9],
    ),
    (
        (8, False, -0.125, 63.625),
        [-0.3, -0.25, -0.2, 0, 0.25, *MORE_VECTORS[:-1], 63, 63.25, 63.4, 63.5, 63.6, 63.7, 100, *HUGE],
        [-0.25, -0.25, -0.25, 0, 0.25, *MORE_VECTORS[:-1], 63, 63.25, *[63.5] * 10],
    ),
    (
        (8, True, -0.125, 63.375),
        [-0.3, -0.25, -0.2, 0, 0.25, *MORE_VECTORS[:-1], 63, 63.2, 63.25, 63.3, 63.4, 63.5, 100, *HUGE],
        [-0.25, -0.25, -0.25, 0, 0.25, *MORE_VECTORS[:-1], 63, *[63.25] * 11],
    ),
    (
        (4, False, -0.1, 7.4),
        [-0.1, 0, 0.1, 0.5, *TIES, 6, 6.5, 7, 7.4, 7.5, 7.7, 7.8, *HUGE],
        [0, 0, 0, 0.5, *TIES, 6, 6.5, 7, *[7.5] * 9],
    ),
    (
        (4, True, -0.1, 6.9),
        [-0.1, 0, 0.1, 0.5, *TIES, 6, 6.5, 6.8, 6.9, 7, 7.1, 7.2, *HUGE],
        [0, 0, 0, 0.5, *TIES, 6, 6.5, *[7] * 10],
    ),
    (
        (4, False, -0.4, 7.1),
        [-0.6, -0.5, -0.4, 0, 0.5, *TIES[:2], *TIES[3:], 6, 6.5, 6.9, 7, 7.1, 7.7, 100, *HUGE],
        [-0.5, -0.5, -0.5, 0, 0.5, *TIES[:2], *TIES[3:], 6, 6.5, *[7] * 10],
    ),
    (
        (4, True, -0.4, 6.6),
        [-0.6, -0.5, -0.4, 0, 0.5, *TIES[:2], *TIES[3:], 5.5, 6, 6.4, 6.5, 6.6, 6.7, 100, *HUGE],
        [-0.5, -0.5, -0.5, 0, 0.5, *TIES[:2], *TIES[3:], 5.5, 6, *[6.5] * 10],
    ),
]
VECTORS += [(*scheme, inputs, outputs) for scheme, inputs, outputs in VECTORS_OF_24]

# What fake_quant_ops_test.py expects: (min, max, num_bits, narrow_range, nudged min, nudged max, step).
NUDGED = [
    (0, 255, 8, False, 0, 255, 1),
    (0.5, 128, 8, False, 0, 127.5, 0.5),
    (-128, -0.5, 8, False, -127.5, 0, 0.5),
    (-0.1, 127.4, 8, False, 0, 127.5, 0.5),
    (0, 254, 8, True, 0, 254, 1),
    (0.1, 127.1, 8, True, 0, 127, 0.5),
    (-127.1, -0.1, 8, True, -127, 0, 0.5),
    (-0.1, 126.9, 8, True, 0, 127, 0.5),
    (0, 127, 7, False, 0, 127, 1),
    (0.5, 64, 7, False, 0, 63.5, 0.5),
    (-64, -0.5, 7, False, -63.5, 0, 0.5),
    (-0.1, 63.4, 7, False, 0, 63.5, 0.5),
    (0, 126, 7, True, 0, 126, 1),
    (0.1, 63.1, 7, True, 0, 63, 0.5),
    (-63.1, -0.1, 7, True, -63, 0, 0.5),
    (-0.1, 62.9, 7, True, 0, 63, 0.5),
]


def channels(end: float, count: int) -> np.ndarray:
    """Return one end of a range for `count` channels."""
    return np.full(count, end, np.float32)


@pytest.mark.parametrize(("bits", "narrow", "low", "high", "inputs", "outputs"), VECTORS)
def test_vectors_of_tensorflow(bits, narrow, low, high, inputs, outputs) -> None:
    """All three ops give the values of TensorFlow's tests, per channel in each shape that they use."""
    x, scheme = np.array(inputs, np.float32), {"num_bits": bits, "narrow_range": narrow}
    results = [
        fake_quant.fake_quant_with_args(x, low=low, high=high, **scheme),
        fake_quant.fake_quant_with_vars(x, low, high, **scheme),
    ]
    for shape in {(len(x),), (len(x) // 2, 2), (1, 1, 2, len(x) // 2)}:
        ends = channels(low, shape[-1]), channels(high, shape[-1])
        results.append(fake_quant.fake_quant_with_vars_per_channel(x.reshape(shape), *ends, **scheme).reshape(-1))
    for actual in results:
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("low", "high", "bits", "narrow", "first", "last", "step"), NUDGED)
def test_nudged_vectors_of_tensorflow(low, high, bits, narrow, first, last, step) -> None:
    """Values round within the nudged range. Gradients pass within it, and are summed outside of it."""
    steps = [-step, -0.01, 0, 0.01, step - 0.01, step, step + 0.01]
    x = np.array([*(first + offset for offset in steps), last - 0.01, last, last + 0.01, last + step], np.float32)
    expected = [first] * 4 + [first + step] * 3 + [last] * 4
    scheme = {"num_bits": bits, "narrow_range": narrow}
    upstream = np.arange(1, 12, dtype=np.float32)
    passed = [0, 0, 3, 4, 5, 6, 7, 8, 9, 0, 0]
    column = x[:, None], channels(low, 1), channels(high, 1)
    close = {"rtol": 1e-3, "atol": 1e-5}
    np.testing.assert_allclose(fake_quant.fake_quant_with_args(x, low=low, high=high, **scheme), expected, **close)
    np.testing.assert_allclose(fake_quant.fake_quant_with_vars(x, low, high, **scheme), expected, **close)
    np.testing.assert_allclose(fake_quant.fake_quant_with_vars_per_channel(*column, **scheme)[:, 0], expected, **close)
    assert fake_quant.fake_quant_with_args_gradient(upstream, x, low=low, high=high, **scheme).tolist() == passed
    gradients = fake_quant.fake_quant_with_vars_gradient(upstream, x, low, high, **scheme)
    assert [offset.tolist() for offset in gradients] == [passed, 3, 21]
    gradients = fake_quant.fake_quant_with_vars_per_channel_gradient(upstream[:, None], *column, **scheme)
    assert [offset[:, 0].tolist() for offset in gradients[:1]] + [offset.tolist() for offset in gradients[1:]] == [
        passed,
        [3],
        [21],
    ]
    nudged = tf_ranges.nudge_range(low, high, **scheme)
    np.testing.assert_allclose((nudged.low, nudged.high, nudged.scale), (first, last, step), **close)


@pytest.mark.parametrize(
    ("bits", "narrow", "low", "high", "x"),
    [
        (8, False, -0.1, 63.65, [-0.1, 0.0, 63.75, 63.8]),
        (8, True, -0.1, 63.4, [-0.1, 0.0, 63.5, 63.6]),
        (8, False, -0.125, 63.625, [-0.3, -0.25, 63.5, 63.6]),
        (8, True, -0.125, 63.375, [-0.3, -0.25, 63.25, 63.3]),
        (4, False, -0.1, 7.4, [-0.1, 0.0, 7.5, 7.6]),
        (4, True, -0.1, 6.9, [-0.1, 0.0, 7.0, 7.1]),
        (4, False, -0.4, 7.1, [-0.6, -0.5, 7.0, 7.1]),
        (4, True, -0.4, 6.6, [-0.6, -0.5, 6.5, 6.6]),
    ],
)
def test_gradient_vectors_of_tensorflow(bits, narrow, low, high, x) -> None:
    """Per channel, the first of four channels is below its range and the last above, for 1, 2 and 6 rows."""
    for rows in (1, 2, 6):
        upstream = np.random.default_rng(rows).integers(-9, 9, (rows, 4)).astype(np.float32)
        values = np.tile(np.array(x, np.float32), (rows, 1))
        ends = channels(low, 4), channels(high, 4)
        scheme = {"num_bits": bits, "narrow_range": narrow}
        passed, below, above = fake_quant.fake_quant_with_vars_per_channel_gradient(upstream, values, *ends, **scheme)
        np.testing.assert_array_equal(passed, upstream * [0, 1, 1, 0])
        assert below.tolist() == [upstream[:, 0].sum(), 0, 0, 0]
        assert above.tolist() == [0, 0, 0, upstream[:, 3].sum()]
        passed, below, above = fake_quant.fake_quant_with_vars_gradient(upstream, values, low, high, **scheme)
        np.testing.assert_array_equal(passed, upstream * [0, 1, 1, 0])
        assert (below, above) == (upstream[:, 0].sum(), upstream[:, 3].sum())


def test_a_range_of_zeros() -> None:
    """A range of (0, 0) gives zeros and passes each gradient, also in single channels."""
    x, upstream = np.array([[-1, 2], [3, -4]], np.float32), np.array([[1, 2], [3, 1e-40]], np.float32)
    assert fake_quant.fake_quant_with_vars(x, 0, 0).tolist() == [[0, 0], [0, 0]]
    passed, below, above = fake_quant.fake_quant_with_vars_gradient(upstream, x, 0, 0)
    np.testing.assert_array_equal(passed, upstream)
    assert (below, above) == (0, 0)
    ends = np.array([0, -1], np.float32), np.array([0, 1], np.float32)
    assert fake_quant.fake_quant_with_vars_per_channel(x, *ends)[:, 0].tolist() == [0, 0]
    passed, below, above = fake_quant.fake_quant_with_vars_per_channel_gradient(upstream, x, *ends)
    assert passed[:, 0].tolist() == [1, 3]
    assert (below.tolist(), above.tolist()) == ([0, 0], [0, 2])  # the denormal gradient below counts as 0


def test_the_ops_differ_in_bits() -> None:
    """Vars divides by the step, Args and PerChannel multiply by its inverse: some values round differently."""
    x = np.random.default_rng(3).uniform(-6, 6, 200_000).astype(np.float32)
    x = np.concatenate([x, (np.arange(-60, 60, dtype=np.float32) + np.float32(0.5)) * np.float32(12 / 255)])
    by_args, by_vars = fake_quant.fake_quant_with_args(x), fake_quant.fake_quant_with_vars(x, -6.0, 6.0)
    by_channel = fake_quant.fake_quant_with_vars_per_channel(x[:, None], channels(-6, 1), channels(6, 1))[:, 0]
    np.testing.assert_array_equal(by_args, by_channel)
    assert 0 < (by_args != by_vars).sum() < 200


def test_fixed_point_ties_go_up() -> None:
    """In a narrow power-of-two range it equals QuantizeAndDequantize with rounding half up, not half to even."""
    x = (np.arange(-300, 300, dtype=np.float32) + np.float32(0.5)) / np.float32(16)
    end = np.float32(127 / 16)
    ours = fake_quant.fake_quant_with_vars(x, -end, end, narrow_range=True)
    same = {"range_given": True, "narrow_range": True}
    up = quantize_and_dequantize.quantize_and_dequantize_v2(x, -end, end, round_mode="HALF_UP", **same)
    even = quantize_and_dequantize.quantize_and_dequantize_v2(x, -end, end, **same)
    np.testing.assert_array_equal(ours, up)
    assert (ours != even).sum() == 127


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (2, 0, 3)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    """A scalar and empty tensors keep their shape; an empty sum of gradients is 0."""
    x = np.full(shape, 9, np.float32)
    assert fake_quant.fake_quant_with_args(x).shape == fake_quant.fake_quant_with_vars(x, -6, 6).shape == shape
    passed, below, above = fake_quant.fake_quant_with_vars_gradient(x, x, -6, 6)
    assert (passed.shape, below, above) == (shape, 0, 0 if x.size == 0 else 9)
    if shape:
        ends = channels(-6, shape[-1]), channels(6, shape[-1])
        assert fake_quant.fake_quant_with_vars_per_channel(x, *ends).shape == shape
        passed, below, above = fake_quant.fake_quant_with_vars_per_channel_gradient(x, x, *ends)
        assert (passed.shape, below.tolist(), above.tolist()) == (shape, [0] * shape[-1], [0] * shape[-1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fake_quant.fake_quant_with_args(np.ones(2)), "tensor is float64"),
        (lambda: fake_quant.fake_quant_with_args(np.ones(2, np.float32), low=1, high=1), "minimum"),
        (
            lambda: fake_quant.fake_quant_with_args(np.ones(2, np.float32), low=np.nan, high=1),
            "minimum",
        ),
        (lambda: fake_quant.fake_quant_with_vars(np.ones(2, np.float32), -1, 1, num_bits=1), "2 to 16 bits"),
        (lambda: fake_quant.fake_quant_with_vars(np.ones(2, np.float32), -1, 1, num_bits=17), "2 to 16 bits"),
        (lambda: fake_quant.fake_quant_with_vars(np.ones(2, np.float32), [-1], [1]), r"Both must be \(\)"),
        (
            lambda: fake_quant.fake_quant_with_vars_per_channel(np.ones((2, 3), np.float32), [-1], [1]),
            r"Both must be \(3,\)",
        ),
        (lambda: fake_quant.fake_quant_with_vars_per_channel(np.float32(1), [-1], [1]), "scalar"),
        (lambda: fake_quant.fake_quant_with_args_gradient(np.ones(3), np.ones(2, np.float32)), "Give both one shape"),
    ],
)
def test_refusals(call, message: str) -> None:
    """Cases that the kernels reject or crash on raise a UsageError."""
    with pytest.raises(UsageError, match=message):
        call()


def params(scale, bits: int, *, signed: bool, narrow: bool, zero) -> QParams:
    """Return params with scales and zero points per channel."""
    return qparams_from_scale(np.asarray(scale), np.asarray(zero), IntType(bits, signed), narrow=narrow, axis=0)


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize(("signed", "narrow"), [(True, False), (True, True), (False, False)])
def test_ranges_to_write(bits: int, signed: bool, narrow: bool) -> None:
    """Zero points and power-of-two scales are exact; other scales differ at most in the last place."""
    rng = np.random.default_rng(bits)
    qmin, qmax = IntType(bits, signed).limits(narrow=narrow)
    for exact in (True, False):
        exponents = rng.integers(-40, 40, 3000) if exact else rng.uniform(-40, 40, 3000)
        scale = np.exp2(exponents).astype(np.float32)
        zero = rng.integers(qmin, qmax, 3000, endpoint=True)
        target = params(scale, bits, signed=signed, narrow=narrow, zero=zero)
        ends = tf_ranges.range_for_fake_quant(target)
        low, high = ends.low.astype(np.float32), ends.high.astype(np.float32)
        np.testing.assert_array_equal((low, high), (ends.low, ends.high))  # they are float32 numbers
        nudged = tf_ranges.nudge_range(low, high, num_bits=bits, narrow_range=narrow)
        np.testing.assert_array_equal(nudged.zero_point, zero - qmin + narrow)
        if exact:
            np.testing.assert_array_equal(nudged.scale, scale)
        assert (np.abs(nudged.scale - scale) <= np.spacing(scale)).all()
        assert (nudged.scale == scale).mean() > 0.7


def test_params_of_a_range() -> None:
    """A range gives the nudged scale and zero point in the type's integers. A range without a step raises an error."""
    op_range = Range(np.array([-0.1275, -6]), np.array([63.6225, 1.5]))
    actual = tf_ranges.fake_quant_params(op_range, IntType(8, signed=True), axis=0)
    np.testing.assert_allclose(actual.scale, [0.25, 7.5 / 255], rtol=1e-6)
    assert actual.zero_point.tolist() == [1 - 128, 204 - 128]
    assert tf_ranges.fake_quant_params(op_range, IntType(8, signed=False), axis=0).zero_point.tolist() == [1, 204]
    narrow = tf_ranges.fake_quant_params(Range(np.array(-1.0), np.array(1.0)), IntType(8, signed=True), narrow=True)
    assert (narrow.zero_point, narrow.range.low) == (0, -127 * float(narrow.scale))
    with pytest.raises(UsageError, match=r"range 1.0 to 1.0"):
        tf_ranges.fake_quant_params(Range(np.array(1.0), np.array(1.0)), IntType(8, signed=True))
