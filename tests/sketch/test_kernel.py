"""Both kernels count the same, and the compiled one comes when it pays."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from graphquant.sketch import kernel

SCRIPT = """
import json, sys
import numpy as np
from graphquant.sketch import Accumulator, kernel
kernel.MANY = int(sys.argv[1])
gathering = Accumulator(bits=7)
for _ in range(3):
    gathering.add(np.linspace(-1, 1, 1000, dtype=np.float32))
found = gathering.sketch()
print(json.dumps(["numba" in sys.modules, found.bins.tolist(), found.counts.tolist(), found.sums.tolist()]))
"""


def count(many: int, **environment: str) -> list:
    """What a process that compiles after `many` values counts, and whether it loaded numba."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(many)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    assert result.stderr == ""
    return json.loads(result.stdout)


@pytest.mark.parametrize("bits", [7, 10])
def test_both_kernels_count_the_same(bits: int) -> None:
    """Every finite pattern's bin is there, more than a chunk of them, and sums take the dropped bits."""
    patterns = np.random.default_rng(0).integers(0, 1 << 32, 3 * kernel.CHUNK // 2, dtype=np.uint32)
    patterns[::3] = 0
    tables = [kernel.new_table(bits) for _ in range(2)]
    kernel.in_numpy(patterns, 23 - bits, tables[0])
    kernel.compiled()(patterns, 23 - bits, tables[1])
    assert kernel.compiled() is not kernel.in_numpy
    np.testing.assert_array_equal(tables[0], tables[1])
    assert tables[0][:, 0].sum() == patterns.size
    assert tables[0][:, 1].sum() == (patterns & ((1 << 23 - bits) - 1)).sum()


@pytest.mark.slow
def test_counts_beyond_24_bits() -> None:
    """A bin of more than 2**24 values, and sums of more than 2**40, are exact in both kernels."""
    patterns = np.full(1 << 20, 0x3F80FFFF, np.uint32)
    for fill in (kernel.in_numpy, kernel.compiled()):
        table = kernel.new_table(7)
        for _ in range(17):
            fill(patterns, 16, table)
        assert table[0x3F80].tolist() == [17 << 20, (17 << 20) * 0xFFFF]


def test_the_compiled_kernel_comes_after_many_values() -> None:
    """A small model never loads numba; a large one does; the result is the same."""
    few, many = count(kernel.MANY), count(1500)
    assert few[0] is False
    assert many[0] is True
    assert few[1:] == many[1:]


def test_it_compiles_where_nothing_can_be_written() -> None:
    """Without a writable folder for its cache the kernel is compiled anew, without a word."""
    environment = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": ""}
    script = (
        "import numba; numba.njit(cache=True)(__import__('graphquant.sketch.kernel').sketch.kernel.in_machine_code)"
    )
    refused = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert "cannot cache function" in refused.stderr
    found = count(0, **environment)
    assert found[0] is True
    assert found[1:] == count(kernel.MANY)[1:]


def test_numpy_goes_on_where_numba_does_not_load(monkeypatch) -> None:
    """A numba that refuses to be imported, as beside a numpy newer than it knows, costs speed and nothing else."""
    monkeypatch.setitem(sys.modules, "numba", None)
    assert kernel.compiled.__wrapped__() is kernel.in_numpy


def test_threads_wait_for_the_first_to_compile() -> None:
    """Threads that cross the threshold together all count right."""
    fill, patterns = kernel.Fill(), np.arange(1 << 16, dtype=np.uint32) << 16
    fill._seen = kernel.MANY - 1000
    tables = [kernel.new_table(7) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda table: [fill(patterns, 16, table) for _ in range(4)], tables))
    for table in tables:
        assert table[:, 0].tolist() == [4] * (1 << 16)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_table_takes_only_the_memory_that_is_written() -> None:
    """64 tables of 8 MiB each, with values in a few bins, take less than a tenth of that."""

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  # no file, but a view of the system
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    tables = [kernel.new_table(10) for _ in range(64)]
    for table in tables:
        kernel.in_numpy(np.array([1.0, -1.0, 0.0], np.float32).view(np.uint32), 13, table)
        assert np.count_nonzero(table[:, 0]) == 3
    assert resident() - before < 64 * tables[0].nbytes / 10
