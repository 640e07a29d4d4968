"""The C and numpy kernels count the same, and graphquant works without the compiled one."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import graphquant
from graphquant.observers import SketchAccumulator, histogram_kernel

ROOT = Path(graphquant.__file__).parents[1]


def unpacked(table: np.ndarray) -> tuple:
    """Return the contents of a table."""
    return histogram_kernel.unpack_entries(table)


@pytest.mark.parametrize("bits", [7, 10])
@pytest.mark.parametrize(
    "size", [0, 1, 2, 15, 16, 17, 31, 32, 33, 2047, 2048, 2049, 3 * histogram_kernel.COUNTING_CHUNK // 2 + 5]
)
def test_both_kernels_count_the_same(compiled, bits: int, size: int) -> None:
    """Tables, limits and finiteness are equal and correct for any patterns of finite values."""
    patterns = np.random.default_rng(size).integers(0, 1 << 32, size, dtype=np.uint32)
    patterns[::3] = 0
    patterns[patterns >> 23 & 0xFF == 0xFF] = 0x80000001
    tables, shift = [histogram_kernel.new_histogram_table(bits) for _ in range(2)], 23 - bits
    values = patterns.view(np.float32)
    results = [histogram_kernel.count_values_numpy(values, shift, tables[0]), compiled(values, shift, tables[1])]
    values = values.tolist()
    assert results == [(min(values, default=np.inf), max(values, default=-np.inf), True)] * 2
    for numpy_entries, compiled_entries in zip(*map(unpacked, tables), strict=True):
        np.testing.assert_array_equal(numpy_entries, compiled_entries)
    bins, counts, sums = unpacked(tables[1])
    expected, bin_index, numbers = np.unique(patterns >> shift, return_inverse=True, return_counts=True)
    assert (bins.tolist(), counts.tolist()) == (expected.tolist(), numbers.tolist())
    assert sums.tolist() == np.bincount(bin_index, weights=patterns & ((1 << shift) - 1)).tolist()


@pytest.mark.parametrize("place", [0, 1, 15, 16, 32, 40])
@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf, -np.inf])
def test_nonfinite_values_are_reported(fill, place: int, odd: float) -> None:
    """The result is the same for each position of the value."""
    values = np.linspace(-1, 1, 41, dtype=np.float32)
    assert fill(values, 16, histogram_kernel.new_histogram_table(7)) == (-1.0, 1.0, True)
    values[place] = odd
    assert fill(values, 16, histogram_kernel.new_histogram_table(7))[2] is False


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 2048, 2049, histogram_kernel.SQUARES_CHUNK + 1, 50_000])
def test_both_kernels_square_the_same(extension, size: int) -> None:
    """Sums of squares equal those in float64 up to rounding."""
    rng = np.random.default_rng(size)
    expected = rng.standard_normal(size).astype(np.float32)
    actual = expected + rng.standard_normal(size).astype(np.float32) / 64
    wide = expected.astype(np.float64)
    sums = [(wide**2).sum(), ((actual - wide) ** 2).sum()]
    for squares in (extension.squares, histogram_kernel.sum_squares_numpy):
        np.testing.assert_allclose(squares(expected, actual), sums, rtol=3e-6)


def test_squares_that_float32_cannot_hold_are_not_hidden(extension) -> None:
    """Too large squares and NaN make their sum infinite or NaN. Wrong shapes raise errors."""
    expected = np.ones(100, np.float32)
    for index in (0, 40, 99):
        for odd, power in ((np.nan, np.nan), (1e30, np.inf), (-np.inf, np.inf)):
            actual = expected.copy()
            actual[index] = odd
            with np.errstate(over="ignore", invalid="ignore"):
                for squares in (extension.squares, histogram_kernel.sum_squares_numpy):
                    np.testing.assert_equal(squares(actual, expected)[0], power)
                    assert not np.isfinite(squares(expected, actual)[1])
    for wrong in (
        (expected, expected[1:]),
        (expected, expected[::2]),
        (expected.view(np.uint8)[1:5], expected[:1]),
        (expected,),
    ):
        with pytest.raises((TypeError, ValueError)):
            extension.squares(*wrong)


def test_counting_all_equals_counting_one_by_one(extension) -> None:
    """Results are equal with and without a table and for values that are not finite. Wrong jobs raise errors first."""
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(size).astype(np.float32) for size in (0, 1, 33, 5000, 2048, 7)]
    arrays[3][4999], arrays[4][17], arrays[5][0] = np.nan, -np.inf, np.inf
    for bits in (7, 10):
        tables = [[histogram_kernel.new_histogram_table(bits) for _ in arrays] for _ in range(3)]
        jobs = [[(array, 23 - bits, table) for array, table in zip(arrays, some, strict=True)] for some in tables]
        separate = [histogram_kernel.count_values_numpy(*job) for job in jobs[0]]
        for batched in (extension.fill_all(jobs[1]), histogram_kernel.count_all_values_numpy(jobs[2])):
            assert [result[2] for result in batched] == [result[2] for result in separate] == [True] * 3 + [False] * 3
            assert batched[:3] == separate[:3]
        for some in tables[1:]:
            assert all(
                (array == batched).all()
                for array, batched in zip(
                    map(merge_zero_entries, tables[0]), map(merge_zero_entries, some), strict=True
                )
            )
    ends = extension.fill_all([(array, 0, None) for array in arrays])
    assert ends[:3] == [histogram_kernel.count_values_numpy(array, 0, None) for array in arrays[:3]]
    assert [result[2] for result in ends] == [True] * 3 + [False] * 3
    assert extension.fill_all([]) == []
    table = histogram_kernel.new_histogram_table(7)
    for wrong in ((arrays[2], 13, table), (arrays[2][::2], 16, table), (arrays[2], 16), (None, 16, table), "abc"):
        with pytest.raises((TypeError, ValueError)):
            extension.fill_all([(arrays[1], 16, table), wrong])
    with pytest.raises(TypeError, match="list"):
        extension.fill_all(((arrays[1], 16, table),))
    assert not table.any()


def merge_zero_entries(table: np.ndarray) -> np.ndarray:
    """Return the entries of a table, with those for zeros merged."""
    bins, counts, sums = unpacked(table)
    return np.stack([bins.astype(np.int64), counts, sums.astype(np.int64)])


def test_a_table_is_emptied_before_it_overflows(fill, reference_histogram, monkeypatch) -> None:
    """Many small arrays or one large array are counted exactly once, also with a sketch in between."""
    monkeypatch.setattr(histogram_kernel, "TABLE_CAPACITY", 100)
    monkeypatch.setattr(histogram_kernel, "FULL_ENTRY", int(histogram_kernel.COUNT_UNIT) * 2)
    values = np.random.default_rng(0).standard_normal(1005).astype(np.float32)
    values[100::3], values[::50], values[1::4] = np.nan, np.inf, 0
    whole, pieces = SketchAccumulator(bits=7), SketchAccumulator(bits=7)
    whole.add(values)
    for start in range(0, values.size, 37):
        pieces.add(values[start : start + 37])
        pieces.to_sketch()
    reference_histogram(values, 7).check(whole.to_sketch())
    reference_histogram(values, 7).check(pieces.to_sketch())


@pytest.mark.parametrize("places", [[], [0], [1], [2, 3], [5, 16], [0, 1, 2, 3], list(range(37))])
def test_zeros_are_of_one_bin(fill, reference_histogram, places: list[int]) -> None:
    """Zeros and the smallest values are counted in bin 0 at each position, and -0 is not."""
    values = np.ones(37, np.float32)
    values[places] = 0
    values[places[1:2]] = np.float32(1e-44)
    values[20] = -0.0
    gathering = SketchAccumulator(bits=7)
    gathering.add(values)
    reference_histogram(values, 7).check(gathering.to_sketch())


@pytest.mark.slow
def test_full_entries(fill) -> None:
    """A bin with the largest possible sums is counted correctly."""
    single = np.array([0x3F80FFFF], np.uint32).view(np.float32)
    gathering, many = SketchAccumulator(bits=7), np.repeat(single, histogram_kernel.TABLE_CAPACITY)
    for chunk in (many, single, many, single, single):
        gathering.add(chunk)
    actual = gathering.to_sketch()
    values = 2 * histogram_kernel.TABLE_CAPACITY + 3
    assert (actual.bins.tolist(), actual.counts.tolist(), actual.sums.tolist()) == (
        [0x3F80],
        [values],
        [values * 0xFFFF],
    )
    table = histogram_kernel.new_histogram_table(7)
    table[0x3F80] = histogram_kernel.COUNT_UNIT * np.uint64((1 << 24) - 2) + np.uint64(((1 << 24) - 2) * 0xFFFF)
    fill(single, 16, table)
    assert [values.tolist() for values in unpacked(table)] == [[0x3F80], [(1 << 24) - 1], [((1 << 24) - 1) * 0xFFFF]]


def test_compiled_kernel_rejects_wrong_arguments(compiled) -> None:
    """A wrong table or shift, a read-only table, gaps, and values of another type raise errors."""
    values, table = np.ones(8, np.float32), histogram_kernel.new_histogram_table(7)
    for arguments in [(values, 13, table), (values, 0, table), (values, 40, table), (values, -1, table)]:
        with pytest.raises(ValueError, match="table"):
            compiled(*arguments)
    for wrong in (np.ones(3, np.uint8), np.frombuffer(bytes(9), np.uint8)[1:]):
        with pytest.raises(ValueError, match="aligned float32"):
            compiled(wrong, 16, table)
    with pytest.raises(ValueError, match="contiguous"):
        compiled(values[::2], 16, table)
    frozen = histogram_kernel.new_histogram_table(7)
    frozen.flags.writeable = False
    with pytest.raises((TypeError, BufferError, ValueError)):
        compiled(values, 16, frozen)
    assert not table.any()


SCRIPT = """
import json, sys
sys.modules["graphquant.observers._fill"] = None
import numpy as np
from graphquant.observers import histogram_kernel as kernel, sketch_values
sketch = sketch_values(np.linspace(-1, 1, 1000, dtype=np.float32), bits=7)
uses_numpy = kernel.count_values is kernel.count_values_numpy
print(json.dumps([uses_numpy, sketch.bins.tolist(), sketch.counts.tolist(), sketch.sums.tolist()]))
"""


def test_numpy_counts_where_nothing_was_compiled(reference_histogram) -> None:
    """Without the compiled kernel, graphquant gives the same results."""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, check=True)
    expected = reference_histogram(np.linspace(-1, 1, 1000, dtype=np.float32), 7)
    assert json.loads(ran.stdout) == [True, expected.bins, expected.counts, expected.sums]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [True, False], ids=["with a compiler", "without a compiler"])
def test_the_kernel_is_in_a_wheel(compiler: bool, compiled, build_script, tmp_path) -> None:
    """With a compiler, a wheel is for this system and contains the kernel. Without one, it is for all systems."""
    assert compiled is not histogram_kernel.count_values_numpy
    assert build_script.NAME == "graphquant.observers._fill"
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    environment = os.environ if compiler else {**os.environ, "CC": "no-such-compiler"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        kernels = [
            name for name in archive.namelist() if name.startswith("graphquant/observers/_fill.") and ".py" not in name
        ]
    assert len([name for name in kernels if not name.endswith(".c")]) == compiler
    assert ("cp311-abi3" in wheel.name, "py3-none-any" in wheel.name) == (compiler, not compiler)
    assert ("No C compiler that works" in ran.stdout + ran.stderr) == (not compiler)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_table_takes_only_the_memory_that_is_written(fill) -> None:
    """64 tables of 8 MiB each, with values in a few bins, use less than a tenth of that memory."""

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  # no file, but a view of the system
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    tables = [histogram_kernel.new_histogram_table(10) for _ in range(64)]
    for table in tables:
        fill(np.array([1.0, -1.0, 0.0], np.float32), 13, table)
        assert len(unpacked(table)[0]) == 3
    assert resident() - before < 64 * tables[0].nbytes / 10
