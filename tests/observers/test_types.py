"""Sketches: exact, mergeable statistics."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from graphquant.errors import DataError, InternalError
from graphquant.observers import EMPTY_SKETCH, Sketch, bin_means, merge_sketches, sketch_values
from graphquant.observers.sketch import bin_edges, coarsen_histogram

arrays = npst.arrays(np.float32, st.just((4, 3)), elements=st.floats(width=32))
wide = npst.arrays(np.float64, st.integers(0, 6), elements=st.floats() | st.sampled_from([1.0, 1.001, 1.002, -1.0]))
sketches = st.builds(lambda values, bits: sketch_values(values, bits=bits), wide, st.sampled_from([0, 7, 10]))


@pytest.mark.slow
@given(arrays, arrays, arrays, st.sampled_from([None, 0, 1]))
def test_merging_per_channel(one, two, three, axis) -> None:
    """The statistics do not depend on the split and order of samples."""
    a, b, c = sketch_values(one, axis), sketch_values(two, axis), sketch_values(three, axis)
    assert merge_sketches(a, b) == merge_sketches(b, a)
    assert merge_sketches(merge_sketches(a, b), c) == merge_sketches(a, merge_sketches(b, c))
    assert merge_sketches(a, EMPTY_SKETCH) == a == merge_sketches(EMPTY_SKETCH, a)
    if axis == 1:
        assert merge_sketches(merge_sketches(a, b), c) == sketch_values(np.concatenate([one, two, three]), axis)


@given(sketches, sketches, sketches)
def test_merging_is_exact_commutative_and_associative(a, b, c) -> None:
    """Merging is exact with histograms, also of different bits, and with empty sketches."""
    assert merge_sketches(a, b) == merge_sketches(b, a)
    assert merge_sketches(merge_sketches(a, b), c) == merge_sketches(a, merge_sketches(b, c))
    assert merge_sketches(a, EMPTY_SKETCH) == a or not a.count
    assert merge_sketches(a, b).empty_arrays == a.empty_arrays + b.empty_arrays
    for name in ("low", "high"):
        assert getattr(merge_sketches(a, b), name).tobytes() == getattr(merge_sketches(b, a), name).tobytes()


@given(st.lists(wide, min_size=1, max_size=4), st.sampled_from([7, 10]), st.randoms())
def test_merging_equals_one_sketch_of_all(reference_histogram, parts, bits, random) -> None:
    """Merged sketches equal that of all values. Each array with a finite value is a block."""
    shuffled = parts.copy()
    random.shuffle(shuffled)
    merged = EMPTY_SKETCH
    for array in shuffled:
        merged = merge_sketches(sketch_values(array, bits=bits), merged)
    expected = reference_histogram(np.concatenate(parts), bits)
    if expected.count:
        expected.check(merged)
    blocks = [reference_histogram(array, bits) for array in parts if np.isfinite(array).any()]
    assert merged.blocks == len(blocks)
    assert merged.low_sum == sum(_units(block.low) for block in blocks)
    assert merged.high_sum == sum(_units(block.high) for block in blocks)


def _units(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator * (2**1074 // denominator)


def test_block_sums_lose_nothing() -> None:
    """The largest and the smallest float64 cancel, and the sum of other values remains."""
    merged = EMPTY_SKETCH
    for low in (1.7e308, 5e-324, -1.7e308, 0.25):
        merged = merge_sketches(merged, sketch_values(np.array([low, 1.7e308])))
    assert merged.blocks == 4
    assert merged.low_sum == 1 + 2**1072


@given(wide)
def test_coarsening_is_exact(values) -> None:
    """A histogram of 10 bits, coarsened to 7, equals one of 7 bits."""
    assert coarsen_histogram(sketch_values(values, bits=10), 7) == sketch_values(values, bits=7)
    assert coarsen_histogram(sketch_values(values, bits=7), 0) == sketch_values(values)
    assert coarsen_histogram(sketch_values(values, bits=7), 7) == sketch_values(values, bits=7)


def test_no_finer_than_it_was() -> None:
    """A histogram cannot be refined."""
    with pytest.raises(InternalError, match="7 mantissa bits"):
        coarsen_histogram(sketch_values(np.ones(1), bits=7), 10)


@given(
    npst.arrays(np.float32, st.integers(1, 8), elements=st.floats(width=32, allow_nan=False)), st.sampled_from([7, 10])
)
def test_means_are_exact(reference_histogram, values, bits) -> None:
    """Bin means are exact to one unit in the last place, and inside of the bin's edges."""
    actual = sketch_values(np.concatenate([values, values[:1], np.nextafter(values[:1], np.float32(0))]), bits=bits)
    expected = reference_histogram(np.concatenate([values, values[:1], np.nextafter(values[:1], np.float32(0))]), bits)
    low, high = bin_edges(actual)
    for mean, exact, start, end in zip(bin_means(actual), expected.means, low, high, strict=True):
        assert abs(mean - float(exact)) <= np.spacing(abs(float(exact)))
        assert start <= mean <= end


def test_edges_of_bins() -> None:
    """A bin extends from its first to its last float32, for both signs, zero and the largest value."""
    largest = float(np.finfo(np.float32).max)
    actual = sketch_values(np.array([0.0, -0.0, 1.0, -1.0, largest], np.float32), bits=7)
    low, high = bin_edges(actual)
    below = 2 - 2.0**-23
    step = 2.0**-7 - 2.0**-23
    denormal = 65535 * 2.0**-149
    assert actual.bins.tolist() == [0, 0x3F80, 0x7F7F, 0x8000, 0xBF80]
    assert low.tolist() == [0, 1.0, (2 - 2.0**-7) * 2.0**127, -denormal, -1 - step]
    assert high.tolist() == [denormal, 1 + step, below * 2.0**127, 0, -1.0]
    assert bin_means(actual).tolist() == [0, 1, largest, 0, -1]


def test_empty_sketch_has_no_bins() -> None:
    """Edges and means of an empty sketch are empty."""
    assert bin_means(EMPTY_SKETCH).shape == bin_edges(EMPTY_SKETCH)[0].shape == (0,)
    assert coarsen_histogram(sketch_values(np.zeros(0), bits=10), 7) == sketch_values(np.zeros(0), bits=7)


def test_different_channels_do_not_merge() -> None:
    """Sketches of 2 and 3 channels, or of a whole tensor, do not merge, except with empty sketches."""
    two_channels, three_channels = sketch_values(np.ones((1, 2)), 1), sketch_values(np.ones((1, 3)), 1)
    with pytest.raises(DataError, match=r"shapes \(2,\) and \(3,\)"):
        merge_sketches(two_channels, three_channels)
    with pytest.raises(DataError, match=r"shapes \(2,\) and \(\)"):
        merge_sketches(two_channels, sketch_values(np.ones(1)))
    assert merge_sketches(two_channels, sketch_values(np.ones((0, 3)), 1)) == replace(two_channels, empty_arrays=1)


def test_different_statistics_differ() -> None:
    """Equality compares limits, counts and the histogram."""
    assert sketch_values(np.ones(2)) != sketch_values(np.ones(3))
    assert sketch_values(np.ones(2)) != sketch_values(np.array([1.0, 2.0]))
    assert sketch_values(np.ones(2)) != sketch_values(np.ones(2), bits=7)
    assert sketch_values(np.array([1.0, 1.5, 2.0]), bits=7) != sketch_values(np.array([1.0, 1.6, 2.0]), bits=7)
    assert sketch_values(np.array([1.0, 1.0001, 2.0]), bits=7) != sketch_values(np.array([1.0, 1.0002, 2.0]), bits=7)
    assert sketch_values(np.ones(2)) != 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 8}, "8 bits"),
        ({"bits": 7}, "finite values"),
        ({"bins": np.zeros(1, np.uint32)}, "lengths"),
        ({"high": np.ones(2)}, "shapes"),
        ({"low": np.ones(2), "high": np.ones(2), "bits": 7}, "7 bits"),
    ],
)
def test_a_sketch_checks_itself(changes, message) -> None:
    """An inconsistent sketch raises an InternalError."""
    with pytest.raises(InternalError, match=message):
        Sketch(**{"low": np.array(1.0), "high": np.array(1.0), "count": 2, **changes})
