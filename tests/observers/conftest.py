"""A slow reference for sketches, value by value in Python's integers and fractions."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import math
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

from graphquant.observers import histogram_kernel

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
LARGEST = float(np.finfo(np.float32).max)
ROOT = Path(__file__).parents[2]


def pattern(value: float) -> int:
    """Return the bits of the nearest finite float32."""
    return int(np.float32(min(max(value, -LARGEST), LARGEST)).view(np.uint32))


class ReferenceHistogram:
    """Expected fields of a sketch of `values`."""

    def __init__(self, values: np.ndarray, bits: int) -> None:
        """Process the values one by one."""
        every = [float(value) for value in np.asarray(values).ravel()]
        self.finite = [value for value in every if math.isfinite(value)]
        self.low, self.high = min(self.finite, default=math.inf), max(self.finite, default=-math.inf)
        self.count, self.bits = len(every), bits
        self.nan = sum(map(math.isnan, every))
        self.inf = sum(map(math.isinf, every))
        patterns = [pattern(value) for value in self.finite] if bits else []
        counted = Counter(bit_pattern >> 23 - bits for bit_pattern in patterns)
        summed: Counter[int] = Counter()
        exact: dict[int, Fraction] = {}
        for bit_pattern in patterns:
            code = bit_pattern >> 23 - bits
            summed[code] += bit_pattern & (1 << 23 - bits) - 1
            exact[code] = exact.get(code, Fraction(0)) + Fraction(float(np.uint32(bit_pattern).view(np.float32)))
        self.bins = sorted(counted)
        self.counts = [counted[code] for code in self.bins]
        self.sums = [summed[code] for code in self.bins]
        self.means = [exact[code] / counted[code] for code in self.bins]

    def check(self, actual) -> None:
        """Compare the sketch field by field."""
        assert (actual.low, actual.high) == (self.low, self.high)
        assert (actual.count, actual.nan, actual.inf, actual.bits) == (self.count, self.nan, self.inf, self.bits)
        assert actual.bins.tolist() == self.bins
        assert actual.counts.tolist() == self.counts
        assert actual.sums.tolist() == self.sums
        assert {values.dtype.kind for values in (actual.bins, actual.counts, actual.sums)} == {"u"}


@pytest.fixture(scope="session")
def reference_histogram() -> type[ReferenceHistogram]:
    """Return the class of references."""
    return ReferenceHistogram


@pytest.fixture(params=FLOATS, ids=lambda dtype: np.dtype(dtype).name)
def dtype(request: pytest.FixtureRequest) -> type:
    """Return each float type."""
    return request.param


@pytest.fixture(scope="session")
def build_script() -> ModuleType:
    """Return the script that compiles the kernel when graphquant is installed."""
    pytest.importorskip("hatchling")
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.fixture(scope="session")
def extension(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Return the C extension, which is compiled here if it is not installed."""
    if histogram_kernel.count_values is not histogram_kernel.count_values_numpy:
        return importlib.import_module("graphquant.observers._fill")
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")
    script = request.getfixturevalue("build_script")
    library = script.compiled(ROOT / script.SOURCE, tmp_path_factory.mktemp("kernel"))
    assert library is not None
    loader = importlib.machinery.ExtensionFileLoader(script.NAME, str(library))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(script.NAME, loader))
    loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def compiled(extension: ModuleType) -> Callable:
    """Return the C kernel that counts."""
    return extension.fill


@pytest.fixture(params=["in_numpy", "compiled"])
def fill(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Return each kernel, and make sketches use it."""
    if request.param == "in_numpy":
        chosen, several = histogram_kernel.count_values_numpy, histogram_kernel.count_all_values_numpy
    else:
        chosen, several = request.getfixturevalue("compiled"), request.getfixturevalue("extension").fill_all
    monkeypatch.setattr(histogram_kernel, "count_values", chosen)
    monkeypatch.setattr(histogram_kernel, "count_all_values", several)
    return chosen
