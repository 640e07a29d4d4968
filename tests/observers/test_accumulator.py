"""Adding values to a sketch: every float type, special values, and memory layouts."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from graphquant.errors import DataError
from graphquant.observers import EMPTY_SKETCH, Sketch, SketchAccumulator, add_all, merge_sketches, sketch_values
from graphquant.observers.sketch import MAX_BUFFERED_VALUES

TINY, LARGEST = float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max)


def test_statistics_of_a_small_array() -> None:
    """Limits, counts, NaN and infinities of a small array."""
    stats = sketch_values(np.array([[1.0, -2.0], [np.nan, np.inf], [-np.inf, 3.5]], np.float32))
    assert (stats.low, stats.high, stats.count, stats.nan, stats.inf) == (-2.0, 3.5, 6, 1, 2)
    assert not stats.empty
    assert (stats.bits, stats.bins.size) == (0, 0)


def test_statistics_per_channel() -> None:
    """Each channel has its own limits and no histogram; a negative axis counts from the end."""
    values = np.array([[1.0, -2.0, 0.0], [4.0, np.inf, -1.0]])
    stats = sketch_values(values, 1, bits=7)
    assert stats.low.tolist() == [1.0, -2.0, -1.0]
    assert stats.high.tolist() == [4.0, -2.0, 0.0]
    assert (stats.count, stats.inf, stats.bits, stats.blocks) == (6, 1, 0, 0)
    assert sketch_values(values, -1) == stats
    assert sketch_values(values, 0).high.tolist() == [1.0, 4.0]


def test_a_channel_without_finite_values() -> None:
    """The channel has no limits; other channels have theirs."""
    stats = sketch_values(np.array([[1.0, np.nan], [2.0, np.inf]], np.float32), 1)
    assert stats.empty
    assert (stats.low.tolist(), stats.high.tolist()) == ([1.0, np.inf], [2.0, -np.inf])
    assert merge_sketches(stats, sketch_values(np.array([[0.0, 7.0]]), 1)).high.tolist() == [2.0, 7.0]


@pytest.mark.usefixtures("fill")
@pytest.mark.parametrize("bits", [0, 7, 10])
def test_every_float_type(reference_histogram, dtype: type, bits: int) -> None:
    """A histogram is exact for normal values, NaN, infinities, signed zeros, denormals and the largest value."""
    random = np.random.default_rng(0)
    spread = random.standard_normal(300) * 10.0 ** random.integers(-9, 5, 300)
    odd = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, TINY, -TINY, 1e-40, 2.0**-24, 65504.0, -65504.0, 1.0, 1.0]
    with np.errstate(over="ignore"):
        values = np.concatenate([spread, odd]).astype(dtype)
    reference_histogram(values, bits).check(sketch_values(values, bits=bits))


@pytest.mark.slow
@pytest.mark.usefixtures("fill")
@pytest.mark.parametrize("bits", [7, 10])
def test_every_16_bit_pattern(reference_histogram, bits: int) -> None:
    """All float16 values, including signaling NaN, are counted correctly and without warnings."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    reference_histogram(values, bits).check(sketch_values(values, bits=bits))


@pytest.mark.usefixtures("fill")
def test_signalling_nan_of_float32() -> None:
    """Signaling NaN count as NaN, even if the upper half of their bits is that of infinity."""
    values = np.array([0x7F800001, 0xFFA00000, 0x7F800000, 0x3F800000], np.uint32).view(np.float32)
    stats = sketch_values(values, bits=7)
    assert (stats.nan, stats.inf, stats.low, stats.bins.tolist()) == (2, 1, 1.0, [0x3F80])


def test_float64_beyond_float32() -> None:
    """Limits are exact, and bins end at the largest float32 and at zero."""
    values = np.array([1e300, -1e39, LARGEST * (1 + 2**-25), 1e-300, np.inf])
    stats = sketch_values(values, bits=7)
    assert (stats.low, stats.high, stats.inf) == (-1e39, 1e300, 1)
    assert stats.bins.tolist() == [0, 0x7F7F, 0xFF7F]
    assert stats.counts.tolist() == [1, 2, 1]
    assert stats.sums.tolist() == [0, 2 * 0xFFFF, 0xFFFF]


@pytest.mark.parametrize("dtype", [">f4", ">f8", np.int32, np.int64, np.bool_])
def test_other_types(reference_histogram, dtype) -> None:
    """Values of another byte order and integers are counted correctly."""
    values = np.array([0, 1, 1, 0, 1], dtype)
    reference_histogram(values, 7).check(sketch_values(values, bits=7))


@pytest.mark.usefixtures("fill")
def test_memory_layout_does_not_matter(dtype: type) -> None:
    """Slices, transposed, reversed, broadcast, read-only and unaligned arrays, and scalars, in either kernel."""
    values = np.random.default_rng(1).standard_normal((6, 8, 10)).astype(dtype)
    plain = sketch_values(values[::2, 1:5, ::-3].copy(), bits=7)
    assert sketch_values(values[::2, 1:5, ::-3], bits=7) == plain
    assert sketch_values(values[::2, 1:5, ::-3].T, bits=7) == plain
    assert sketch_values(np.asfortranarray(values[::2, 1:5, ::-3]), bits=7) == plain
    frozen = values[::2, 1:5, ::-3].copy()
    frozen.flags.writeable = False
    assert sketch_values(frozen, bits=7) == plain
    shifted = np.frombuffer(b"x" + frozen.tobytes(), frozen.dtype, frozen.size, offset=1)
    assert sketch_values(shifted, bits=7) == plain
    assert sketch_values(np.broadcast_to(values[0, 0, 0], (3, 2)), bits=7).counts.tolist() == [6]
    assert sketch_values(values[0, 0, 0], bits=7).count == 1


def test_no_finite_values(dtype: type) -> None:
    """Empty arrays are only counted. Values of which none is finite give an empty sketch."""
    assert EMPTY_SKETCH.empty
    for bits in (0, 7):
        nothing = sketch_values(np.zeros((2, 0, 3), dtype), bits=bits)
        assert nothing == Sketch(np.array(np.inf), np.array(-np.inf), empty_arrays=1, bits=bits)
    assert sketch_values(np.zeros((0, 3), dtype), 1) == replace(EMPTY_SKETCH, empty_arrays=1)
    gathering, some = SketchAccumulator(bits=7), np.arange(4, dtype=dtype)
    for values in (some[:0], some, some[:0].reshape(0, 5)):
        gathering.add(values)
    assert gathering.to_sketch() == replace(
        sketch_values(some, bits=7), empty_arrays=2, blocks=0, low_sum=0, high_sum=0
    )
    unreal = sketch_values(np.array([np.nan, np.inf], dtype), bits=7)
    assert unreal.empty
    assert (unreal.count, unreal.nan, unreal.inf, unreal.blocks, unreal.bins.size) == (2, 1, 1, 0, 0)


@pytest.mark.usefixtures("fill")
def test_adding_equals_one_sketch_of_all(reference_histogram, dtype: type) -> None:
    """Many additions in several blocks give the same as one addition. A sketch in between has no effect."""
    values = (np.random.default_rng(2).standard_normal((5, 40)) * 100).astype(dtype)
    values[1, 3], values[3] = np.nan, np.inf
    gathering = SketchAccumulator(bits=10)
    for row in values:
        gathering.add(row[:7])
        gathering.add(row[7:])
        gathering.add(row[:0])
        gathering.to_sketch()
        gathering.close_block()
    reference_histogram(values, 10).check(gathering.to_sketch())
    expected = EMPTY_SKETCH
    for row in values:
        expected = merge_sketches(expected, sketch_values(row, bits=10))
    assert gathering.to_sketch() == replace(expected, empty_arrays=5)
    assert expected.blocks == 4


@pytest.mark.usefixtures("fill")
@pytest.mark.parametrize("size", [1, 37, MAX_BUFFERED_VALUES - 1, MAX_BUFFERED_VALUES, 3 * MAX_BUFFERED_VALUES])
def test_values_that_are_buffered_first(reference_histogram, size: int) -> None:
    """The first values are stored, and later moved to a table. The histogram is that of all of them."""
    values = np.random.default_rng(size).standard_normal(3 * MAX_BUFFERED_VALUES).astype(np.float32)
    values[::101], values[5::103] = np.nan, -np.inf
    reused = values.copy()
    gathering = SketchAccumulator(bits=7)
    for start in range(0, values.size, size):
        part = reused[start : start + size]
        gathering.add(part)
        part[:] = 0  # a caller may use its memory again
    reference_histogram(values, 7).check(gathering.to_sketch())


def test_an_open_block_is_not_counted_as_one() -> None:
    """Values of an open block are counted, but not in the means. Closing a block twice equals closing it once."""
    gathering = SketchAccumulator()
    gathering.add(np.array([1.0]))
    assert gathering.to_sketch() == Sketch(np.array(1.0), np.array(1.0), 1)
    gathering.close_block()
    gathering.close_block()
    assert gathering.to_sketch() == sketch_values(np.array([1.0]))


def test_zero_has_one_sign() -> None:
    """Limits have the same bytes for both orders of 0.0 and -0.0."""
    for values in ([0.0, -0.0], [-0.0, 0.0], [-0.0]):
        stats = sketch_values(np.array(values, np.float32))
        assert stats.low.tobytes() == stats.high.tobytes() == np.zeros(1).tobytes()


def test_sketches_do_not_change_when_more_values_are_added() -> None:
    """Adding values changes neither the array nor earlier sketches."""
    values = np.array([1.0, np.nan, -3.0], np.float32)
    before = values.tobytes()
    gathering = SketchAccumulator(bits=7)
    gathering.add(values)
    snapshot = gathering.to_sketch()
    gathering.add(values * 2)
    assert values.tobytes() == before
    gathering.close_block()
    assert snapshot.counts.tolist() == [1, 1]
    assert gathering.to_sketch().count == 6


def test_axes_that_do_not_fit_are_refused() -> None:
    """A missing axis, or one of another length than before, raises an error."""
    with pytest.raises(DataError, match=r"shape \(2,\) has no axis 1"):
        sketch_values(np.ones(2), 1)
    gathering = SketchAccumulator(0)
    gathering.add(np.ones(2))
    with pytest.raises(DataError, match=r"shapes \(2,\) and \(1,\)"):
        gathering.add(np.ones(1))
    gathering.close_block()
    with pytest.raises(DataError, match=r"shapes \(2,\) and \(3,\)"):
        gathering.add(np.ones(3))


def test_threads_may_fill_different_accumulators() -> None:
    """Eight threads on eight tensors give the same as sequential additions."""
    tensors = [np.random.default_rng(seed).standard_normal((20, 5000)).astype(np.float32) for seed in range(8)]

    def gather(values: np.ndarray) -> Sketch:
        gathering = SketchAccumulator(bits=7)
        for row in values:
            gathering.add(row)
        return gathering.to_sketch()

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(gather, tensors))
    assert together == [gather(values) for values in tensors]


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("bits", [0, 7, 10])
def test_add_all_equals_adding_one_by_one(fill, bits: int, axis: int | None) -> None:
    """The results are equal for all types, layouts, values and numbers of arrays."""
    rng = np.random.default_rng(2)
    normal = rng.standard_normal((4, 30)).astype(np.float32)
    odd = normal.copy()
    odd[1, 2], odd[2, 3], odd[3, 4] = np.nan, np.inf, -np.inf
    tensors = [
        [normal],
        [normal, -3 * normal],
        [normal.astype(np.float16)],
        [normal.astype(np.float64)],
        [normal[:, ::2]],
        [normal.T.copy().T],
        [odd],
        [np.full((4, 2), np.nan, np.float32)],
        [np.zeros((4, 0), np.float32)],
        [],
    ]
    together, separate = ([SketchAccumulator(axis, bits) for _ in tensors] for _ in range(2))
    for _ in range(2):
        add_all(list(zip(together, tensors, strict=True)))
        for accumulator, arrays in zip(separate, tensors, strict=True):
            for values in arrays:
                accumulator.add(values)
        for accumulator in (*together, *separate):
            accumulator.close_block()
    for batched_accumulator, separate_accumulator in zip(together, separate, strict=True):
        first, second = batched_accumulator.to_sketch(), separate_accumulator.to_sketch()
        for name in Sketch.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)
