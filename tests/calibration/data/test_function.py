"""Calibration data from Python code: forms of items, and failing code."""

from __future__ import annotations

import re
import sys
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from support.onnx_models import onnx_model

import graphquant as gq
from graphquant.calibration.data import function as data_function
from graphquant.calibration.data import open_data
from graphquant.calibration.data.check import check_dataset, check_samples
from graphquant.errors import DataError
from graphquant.formats import InputSpec, create_runner

if TYPE_CHECKING:
    from pathlib import Path

X = InputSpec(name="x", dtype="float32", shape=(None, 2))
STATE = InputSpec(name="state", dtype="float32", shape=(2, None, 3))
NUMBERS = count()


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch):
    """Write code into a module of the current folder and return its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(code: str) -> str:
        name = f"given_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(
            f"import numpy as np\nX = np.arange(6, dtype=np.float32).reshape(3, 2)\n{code}"
        )
        return name

    return write


def fed_values(spec: str, *inputs: InputSpec, samples: int | None = None) -> list[list[float]]:
    """Return the feeds of the input "x" after checking that two passes agree."""
    batches = open_data(spec, inputs or (X,), samples=samples)
    first, again = ([feed["x"].tolist() for feed in batches] for _ in range(2))
    assert first == again
    assert len(first) == batches.count
    return [values for (values,) in first]


ROWS = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize(
    "code",
    [
        "def get():\n    return X",
        "def get():\n    yield X[:2]\n    yield X[2:]",
        "def get():\n    for x in X:\n        yield {'x': x, 'label': 'cat'}",
        "def get():\n    return [({'x': x}, 1) for x in X]",
        "def get():\n    return [(x, 1) for x in X]",
        "def get():\n    return ([x[None]] for x in X)",
        "get = X",
        "get = [{'x': X}]",
        (
            "class get:\n    def __init__(self):\n        self.left = list(X)\n    def get_next(self):\n"
            "        return {'x': self.left.pop(0)[None]} if self.left else None"
        ),
        (
            "class get:\n    def __init__(self):\n        self.left = list(X)\n    def get_next(self):\n"
            "        return self.left.pop(0) if self.left else None"
        ),
        "class A:\n    @staticmethod\n    def b():\n        return iter(X)\nget = A.b",
    ],
)
def test_item_forms(write_module, code: str) -> None:
    """Arrays, dictionaries, tuples, features with labels, stacks, data readers and objects give the same feeds."""
    assert fed_values(f"{write_module(code)}:get") == ROWS


def test_stacked_items_finding(write_module) -> None:
    """An item that is split although its input has open axes is a finding."""
    name = write_module(
        "Y = np.arange(2 * 240 * 4 * 3, dtype=np.float32).reshape(2, 240, 4, 3) - 9\n"
        "def items():\n    yield from ({'x': y} for y in Y)\n"
        "def whole():\n    yield from ({'x': y[None]} for y in Y)"
    )
    free, fixed = (InputSpec(name="x", dtype="float32", shape=shape) for shape in ((None, None, 3), (None, 4, 3)))

    def found(what: str, taker: InputSpec) -> list[str]:
        report = check_dataset(open_data(f"{name}:{what}", [taker], require_finite=False), [taker])
        return [one.message for one in report.findings if one.kind == "stacked"]

    (message,) = found("items", free)
    assert re.search(r"\[240, 4, 3\] .* 240 samples .*\[1, 4, 3\]", message)
    assert "array[None]" in message
    assert found("whole", free) == []
    assert found("items", fixed) == []
    assert open_data(f"{name}:whole", [free]).count == 2


@pytest.mark.parametrize(("reduced", "stacked"), [("ReduceMean <axes = [0]>", True), ("Relu", False)])
def test_an_item_whose_only_open_axis_is_time(write_module, tmp_path, reduced: str, stacked: bool) -> None:
    """A model that gives one result for all rows of an item shows that its rows are no samples."""
    text = f"net (float[T, 4] x) => (float[N, 4] y) {{ a = MatMul(x, w) y = {reduced} (a) }}"
    onnx.save(onnx_model(text, {"w": np.eye(4, dtype=np.float32)}), tmp_path / "m.onnx")
    name = write_module(
        "Y = np.random.default_rng(0).random((3, 40, 4), np.float32)\n"
        "def items():\n    yield from ({'x': y} for y in Y)\n"
        "def single():\n    yield from ({'x': y[:1]} for y in Y)"
    )
    model = gq.load(tmp_path / "m.onnx")

    def kinds(what: str) -> set[str]:
        dataset = open_data(f"{name}:{what}", create_runner(model).inputs)
        return {finding.kind for finding in check_samples(dataset, model)}

    assert ("stacked" in kinds("items")) is stacked
    assert "stacked" not in kinds("single")


def test_ranges_and_ignored_keys(write_module) -> None:
    """Any range is available, also within stacked items. Unused keys are listed."""
    batches = open_data(
        f"{write_module('def get():' + chr(10) + '    yield X[:2], 1' + chr(10) + '    yield X[2:], 2')}:get", [X]
    )
    assert batches.ignored == ("labels",)
    assert [feed["x"].tolist() for feed in batches.feeds_between(1, 3)] == [[ROWS[1]], [ROWS[2]]]


def test_several_inputs(write_module) -> None:
    """Inputs are matched by name or order. A state of fixed shape goes with each sample of its item."""
    name = write_module("def get():\n    yield X, np.ones((2, 1, 3), np.float32)")
    feeds = list(open_data(f"{name}:get", [X, STATE]))
    assert [feed["state"].shape for feed in feeds] == [(2, 1, 3)] * 3


def test_dtypes(write_module) -> None:
    """float64 is converted. Raw bytes are bfloat16 if the input has that type."""
    assert fed_values(f"{write_module('get = [x.astype(float) for x in X]')}:get") == ROWS
    name = write_module("import ml_dtypes\nget = [x.astype(ml_dtypes.bfloat16).view('V2') for x in X]")
    assert fed_values(f"{name}:get", InputSpec(name="x", dtype="bfloat16", shape=(None, 2))) == ROWS


def test_digest(write_module) -> None:
    """The digest depends on the values, not on the form of the items."""
    codes = ["def get():\n    return iter(X)", "get = [{'x': x} for x in X]", "get = X + 1"]
    first, same, other = (open_data(f"{write_module(code)}:get", [X]).digest for code in codes)
    assert first == same != other


def test_sample_limit(write_module) -> None:
    """An endless iterable is limited by the number of samples, also within an item."""
    endless = write_module("def get():\n    while True:\n        yield X")
    assert fed_values(f"{endless}:get", samples=4) == [*ROWS, ROWS[0]]


def test_endless_iterable(write_module, monkeypatch) -> None:
    """An endless iterable is an error that names the option."""
    monkeypatch.setattr(data_function, "MAX_ITEMS", 9)
    with pytest.raises(DataError, match=r"9 items without ending.*--samples"):
        open_data(f"{write_module('import itertools' + chr(10) + 'def get(): return itertools.repeat(X[0])')}:get", [X])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('no luck')", r"cannot be imported: RuntimeError: no luck at .*given_\d+\.py:3\. Run it"),
        ("get = 3", "neither .*iterable"),
        ("get = iter(X)", "only once"),
        ("def get(): pass", "failed: TypeError"),
        ("def got(): pass", "has no 'get'"),
        ("def get(): return []", "returned no samples"),
        ("def get():\n    yield X\n    raise ValueError('a\\nb')", "failed at item 1: ValueError: a b"),
        ("raise SystemExit(3)", r"cannot be imported: SystemExit: 3 at .*given_\d+\.py:3\. Run it"),
        ("def get():\n    yield X\n    raise SystemExit(3)", "failed at item 1: SystemExit: 3"),
        ("get = [np.array(['a', 'b'])]", "item 0: array 'x' is <U1"),
        ("get = [np.array([None, {}])]", "item 0: array 'x' contains Python objects"),
        ("get = [{'z': 1}]", r"item 0 .*'x'\..* 'z'"),
        ("get = [X.astype(int)]", "item 0: array 'x' is int64,.* float32"),
        ("get = [X, np.full(2, np.nan)]", "item 1: array 'x' has 2 NaN"),
        ("get = [np.ones((1, 3), np.float32)]", r"item 0: array 'x' is \[1, 3\], but input 'x' takes \[\?, 2\]"),
        ("get = [()]", "item 0 .* 0 arrays,.* 'x'"),
        ("get = [[1.0, [2.0, 3.0]]] * 2 + [[[1.0, [2.0]]]]", "item"),
    ],
)
def test_failing_code(write_module, code: str, message: str) -> None:
    """Errors of the code or its items name the item."""
    with pytest.raises(DataError, match=message):
        open_data(f"{write_module(code)}:get", [X])


def test_different_second_pass(write_module) -> None:
    """A second pass with fewer or other samples is an error."""
    once = write_module("held = iter(X)\ndef get():\n    return held")
    with pytest.raises(DataError, match=r"3 items .*fewer"):
        list(open_data(f"{once}:get", [X]))
    grows = write_module("calls = []\ndef get():\n    calls.append(1)\n    yield X[: len(calls)]")
    with pytest.raises(DataError, match=r"had 1 samples .*another"):
        list(open_data(f"{grows}:get", [X]))


def test_missing_module(tmp_path: Path, monkeypatch) -> None:
    """A missing module is reported with the error of Python."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"nowhere_at_all:get .*: ModuleNotFoundError"):
        open_data("nowhere_at_all:get", [X])


@pytest.mark.slow
def test_tensorflow_and_onnxruntime(write_module) -> None:
    """A tf.data.Dataset and a CalibrationDataReader are read directly."""
    code = (
        "import tensorflow as tf\nfrom onnxruntime.quantization import CalibrationDataReader\n"
        "def dataset():\n    return tf.data.Dataset.from_tensor_slices((X, [1, 2, 3])).batch(2)\n"
        "class Reader(CalibrationDataReader):\n    def __init__(self):\n        self.rows = iter(X)\n"
        "    def get_next(self):\n        row = next(self.rows, None)\n"
        "        return None if row is None else {'x': row[None]}\n"
    )
    name = write_module(code)
    assert fed_values(f"{name}:dataset") == ROWS
    assert fed_values(f"{name}:Reader") == ROWS
