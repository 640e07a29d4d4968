"""Arrays as calibration data: conversion to feeds, and errors for arrays that do not fit."""

import contextlib
import gc
import io
import threading
import time
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.data_files import assert_feed

from graphquant.calibration.data import Dataset, arrays, open_data
from graphquant.errors import DataError
from graphquant.formats import InputSpec
from graphquant.ir import Shape


def input_spec(name: str = "x", dtype: str = "float32", shape: Shape | None = (None, 3), **fields: Any) -> InputSpec:
    """Return an input, by default of rows of three floats."""
    return InputSpec(name=name, dtype=dtype, shape=shape, **fields)


@pytest.fixture
def open_arrays(tmp_path: Path):
    """Save arrays and open them for inputs."""

    def do(arrays, *inputs: InputSpec, samples: int | None = None, compressed: bool = False) -> Dataset:
        path = tmp_path / "data.npz"
        (np.savez_compressed if compressed else np.savez)(path, **arrays)
        return open_data(str(path), inputs or (input_spec(),), samples=samples)

    return do


X = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("array", [X, np.asfortranarray(X), X.astype(">f4")])
def test_stacked_samples(open_arrays, array, compressed: bool) -> None:
    """Entries along the first axis are samples with a first axis of 1. Unused keys are listed."""
    batches = open_arrays({"x": array, "labels": np.zeros(9)}, compressed=compressed)
    assert (batches.count, len(batches), batches.ignored, batches.random) == (4, 4, ("labels",), False)
    for _ in range(2):  # it can be iterated again
        feeds = list(batches)
        assert len(feeds) == 4
        for i, feed in enumerate(feeds):
            assert_feed(feed, x=X[i : i + 1])


def test_headers_are_read_in_threads(tmp_path: Path) -> None:
    """Threads that open arrays while garbage is collected read all headers, also with Python 3.11."""
    np.savez(tmp_path / "data.npz", x=X)
    gc.callbacks.append(lambda *_: time.sleep(0))  # finalizers may let another thread run, too
    thresholds = gc.get_threshold()
    gc.set_threshold(5)

    def count_samples(_: int) -> int:
        return open_data(str(tmp_path / "data.npz"), (input_spec(),), samples=None).count

    try:
        with ThreadPoolExecutor(4) as threads:
            assert set(threads.map(count_samples, range(200))) == {4}
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.pop()


def test_whole_feeds(open_arrays) -> None:
    """An array with one more axis, or any array for an input of unknown rank, is a stack of whole feeds."""
    whole = X.reshape(2, 2, 3)
    for shape in [(None, 3), (2, 3), None]:
        feeds = list(open_arrays({"x": whole}, input_spec(shape=shape)))
        assert len(feeds) == 2
        assert_feed(feeds[1], x=whole[1])
    scalars = list(open_arrays({"x": X[:, 0]}, input_spec(shape=())))
    assert_feed(scalars[2], x=np.array(6.0, np.float32))


def test_fixed_batch_size(open_arrays) -> None:
    """With a fixed batch size k, k entries form one feed. A remainder is an error."""
    feeds = list(open_arrays({"x": X}, input_spec(shape=(2, 3))))
    assert len(feeds) == 2
    assert_feed(feeds[1], x=X[2:])
    with pytest.raises(DataError, match=r" 4 entries,.*'x' takes 3 .*: 1 "):
        open_arrays({"x": X}, input_spec(shape=(3, 3)))


def test_arrays_shared_by_all_samples(open_arrays) -> None:
    """A state of exactly the fixed shape and a scalar go to each sample. Alone, they are one sample."""
    state, rate = np.ones((2, 1, 5), np.float32), np.array(0.5, np.float32)
    inputs = (
        input_spec(),
        input_spec("state", shape=(2, None, 5)),
        input_spec("rate", shape=()),
        input_spec("any", shape=None),
    )
    feeds = list(open_arrays({"x": X, "state": state, "rate": rate, "any": rate}, *inputs))
    assert len(feeds) == 4
    assert_feed(feeds[3], x=X[3:], state=state, rate=rate, any=rate)
    assert open_arrays({"state": state}, inputs[1]).count == 1


def test_aliases(open_arrays) -> None:
    """A tensor name or signature key is accepted. The name of the input takes precedence."""
    taker = input_spec("serving_default_x", aliases=("x:0", "image"))
    assert_feed(next(iter(open_arrays({"x:0": X}, taker))), serving_default_x=X[:1])
    batches = open_arrays({"image": X + 1, "serving_default_x": X}, taker)
    assert batches.ignored == ("image",)
    assert_feed(next(iter(batches)), serving_default_x=X[:1])


def test_arrays_are_requested_by_the_key_of_the_signature(open_arrays, tmp_path: Path) -> None:
    """A spec names an input by its key or its name, and messages have the key."""
    taker = input_spec("serving_default_x", aliases=("x:0", "image"))
    with pytest.raises(DataError, match=r"inputs\.image=pixels"):
        open_arrays({"pixels": X}, taker)
    for name in ("image", "serving_default_x"):
        batches = open_data(f"{tmp_path / 'data.npz'},inputs.{name}=pixels", (taker,))
        assert_feed(next(iter(batches)), serving_default_x=X[:1])
    with pytest.raises(DataError, match=r"inputs\.image and inputs\.serving_default_x"):
        open_data(f"{tmp_path / 'data.npz'},inputs.image=pixels,inputs.serving_default_x=x", (taker,))


def test_keys_that_are_names_of_other_inputs(open_arrays, tmp_path: Path) -> None:
    """Such a key stands for the input of that name, and no array feeds two inputs."""
    takers = input_spec("a", aliases=("a:0", "b")), input_spec("b", aliases=("b:0", "c"))
    with pytest.raises(DataError, match="inputs"):
        open_arrays({"p": X, "q": X + 1}, *takers)
    batches = open_data(f"{tmp_path / 'data.npz'},inputs.a=p,inputs.b=q", takers)
    assert_feed(next(iter(batches)), a=X[:1], b=X[:1] + 1)
    with pytest.raises(DataError, match="inputs"):
        open_data(f"{tmp_path / 'data.npz'},inputs.b=p", takers)


def test_alias_equal_to_another_input(open_arrays) -> None:
    """An array never feeds two inputs."""
    with pytest.raises(DataError, match=r"'a'\. .* 'b'"):
        open_arrays({"b": X}, input_spec("a", aliases=("b",)), input_spec("b"))


def test_missing_keys(open_arrays) -> None:
    """The error for a missing input lists the available keys, the inputs and a suggestion."""
    with pytest.raises(DataError) as caught:
        open_arrays({"imagse": X, "labels": X}, input_spec("images"), input_spec("rate"))
    for part in ("input 'images'", "contains 'imagse', 'labels'", "takes 'images', 'rate'", "Did you mean 'imagse'"):
        assert part in str(caught.value)
    with pytest.raises(DataError, match=r"'x'\. .* 'y'"):
        open_arrays({"y": X})


def test_different_sample_counts(open_arrays) -> None:
    """The error for different numbers of samples names both inputs and counts."""
    with pytest.raises(DataError, match=r"array 'x' has 4 .*array 'y' has 3"):
        open_arrays({"x": X, "y": X[:3]}, input_spec(), input_spec("y"))


@pytest.mark.parametrize(
    ("array", "shape", "message"),
    [
        (
            np.zeros((2, 28, 28, 3)),
            (None, 3, 28, 28),
            r"\[2, 28, 28, 3\].*takes \[\?, 3, 28, 28\].*moveaxis\(array, -1, 1",
        ),
        (np.zeros((2, 3, 28, 28)), (None, 28, 28, 3), r"channels last \(NHWC\): numpy.moveaxis\(array, 1, -1\) fits"),
        (np.zeros((2, 28, 28)), (None, 28, 28, 1), r"array.reshape\(-1, 28, 28, 1\) fits"),
        (np.zeros((2, 784)), (1, 28, 28), r"array.reshape\(-1, 28, 28\) fits"),
        (np.zeros((2, 5)), (None, 3), r"\[2, 5\],.*'x'.* \[\?, 3\].*Give each sample"),
        (np.zeros(()), (None, 3), r"\[\], but input 'x' takes \[\?, 3\]"),
        (np.zeros((2, 3)), (4, 3), r"2 are left over"),
    ],
)
def test_invalid_shapes(open_arrays, array, shape, message: str) -> None:
    """The error names the input, both shapes and a fix."""
    with pytest.raises(DataError, match=message):
        open_arrays({"x": array.astype(np.float32)}, input_spec(shape=shape))


def test_safe_conversions(open_arrays) -> None:
    """Floats become floats of the input, integers become its integers if they are in range."""
    assert_feed(next(iter(open_arrays({"x": X.astype(np.float64)}))), x=X[:1])
    integers = np.array([[1, 2, -3]])
    assert_feed(next(iter(open_arrays({"x": integers}, input_spec(dtype="int32")))), x=integers.astype(np.int32))
    text = np.array([["a", "b", "c"]])
    assert_feed(next(iter(open_arrays({"x": text}, input_spec(dtype="string")))), x=text.astype(object))
    half = next(iter(open_arrays({"x": X}, input_spec(dtype="bfloat16"))))["x"]
    assert (half.dtype.name, half.astype(np.float32).tolist()) == ("bfloat16", [[0.0, 1.0, 2.0]])


@pytest.mark.parametrize(
    ("array", "dtype", "message"),
    [
        (np.ones((1, 3), np.uint8), "float32", r"is uint8,.*'x'.* float32\..*scale"),
        (
            np.full((1, 3), 2**40),
            "int32",
            "1099511627776.* 1099511627776,.*'x'.* int32",
        ),
        (np.full((1, 3), 1e300), "float32", "outside the range"),
        (np.ones((1, 3), bool), "float32", r"is bool,.*'x'.* float32\..*as float32"),
        (np.ones((1, 3), np.float32), "int64", "is float32,.*'x' takes int64"),
        (np.ones((1, 3), np.float32), "string", "is float32,.*'x' takes string"),
        (np.ones((1, 3), np.complex64), "float32", "is complex64"),
        (np.array([[{}, 1, 2]], object), "float32", "Python objects"),
    ],
)
def test_invalid_dtypes(open_arrays, array, dtype: str, message: str) -> None:
    """Another kind of number, or a value out of range, is rejected with a fix."""
    with pytest.raises(DataError, match=message):
        open_arrays({"x": array}, input_spec(dtype=dtype))


def test_nan_and_infinity(open_arrays) -> None:
    """NaN and infinite values are counted, with the key and first index. Unused keys are not checked."""
    bad = X.copy()
    bad[2, 1], bad[3, 0] = np.nan, np.inf
    with pytest.raises(DataError, match=r"array 'x' has 2 NaN.* \[2, 1\]"):
        open_arrays({"x": bad})
    assert open_arrays({"x": bad}, samples=2).count == 2
    assert open_arrays({"x": X, "extra": bad}).count == 4


def test_sample_limits(open_arrays) -> None:
    """The first samples are used, at most as many as there are. No samples are an error."""
    assert [feed["x"][0, 0] for feed in open_arrays({"x": X}, samples=2)] == [0.0, 3.0]
    assert open_arrays({"x": X}, samples=99).count == 4
    with pytest.raises(DataError, match=r"^0 samples"):
        open_arrays({"x": X}, samples=0)
    with pytest.raises(DataError, match="contains no samples"):
        open_arrays({"x": X[:0]})


def test_digest(open_arrays) -> None:
    """The digest depends on the fed values, not on the storage."""
    plain = open_arrays({"x": X}).digest
    assert len(plain) == 64
    assert open_arrays({"x": X, "labels": X}, compressed=True).digest == plain
    assert open_arrays({"x": np.asfortranarray(X)}).digest == plain
    assert open_arrays({"x": X.astype(">f4")}).digest == plain
    assert open_arrays({"x": X.reshape(4, 1, 3)}).digest == plain
    others = [open_arrays({"x": X + 1}), open_arrays({"x": X}, samples=3), open_arrays({"x": X.astype(np.float64)})]
    assert len({plain, *(batches.digest for batches in others)}) == 4


def test_memory_does_not_grow_with_samples(tmp_path: Path) -> None:
    """A file is read one sample at a time."""
    path = tmp_path / "big.npz"
    np.savez(path, x=np.zeros((4000, 4096), np.float32))  # 64 MiB
    tracemalloc.start()
    assert sum(1 for _ in open_data(str(path), [input_spec(shape=(None, 4096))])) == 4000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20


@pytest.mark.slow
def test_fortran_order_memory(tmp_path: Path) -> None:
    """An array in Fortran order is read through a file, one sample at a time, in .npz and .npy."""
    values = np.asfortranarray(np.arange(4000 * 4096, dtype=np.float32).reshape(4000, 4096))  # 64 MiB
    np.savez(tmp_path / "big.npz", x=values)
    np.save(tmp_path / "big.npy", values)
    for name in ("big.npz", "big.npy"):
        tracemalloc.start()
        batches = open_data(str(tmp_path / name), [input_spec(shape=(None, 4096))])
        seen = [feed["x"][0, 5] for feed in batches.feeds_between(3990, 4000)]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert seen == values[3990:, 5].tolist()
        assert peak < 24 << 20


def test_bfloat16(tmp_path: Path) -> None:
    """Raw bytes of bfloat16 and other small types are read if the input has that type."""
    values = X.astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "data.npz", x=values)
    for feed, row in zip(open_data(str(tmp_path / "data.npz"), [input_spec(dtype="bfloat16")]), values, strict=True):
        assert_feed(feed, x=row[None])
    np.save(tmp_path / "data.npy", X.astype(ml_dtypes.float8_e4m3fn))
    (feed,) = open_data(str(tmp_path / "data.npy"), [input_spec(dtype="float8_e4m3fn")], samples=1)
    assert feed["x"].astype(np.float32).tolist() == [[0.0, 1.0, 2.0]]
    with pytest.raises(DataError, match=r"array 'x' is .*V2.*, but input 'x' takes float32"):
        open_data(str(tmp_path / "data.npz"), [input_spec()])
    values[1, 2] = np.nan
    np.savez(tmp_path / "data.npz", x=values)
    with pytest.raises(DataError, match=r"array 'x' has 1 NaN.* \[1, 2\]"):
        open_data(str(tmp_path / "data.npz"), [input_spec(dtype="bfloat16")])


def test_npy_and_folders(tmp_path: Path) -> None:
    """An .npy file feeds models with one input. The files of a folder are fitted separately."""
    np.save(tmp_path / "a.npy", X)
    with pytest.raises(DataError, match=r"a\.npy .*one array.* 'x', 'y'"):
        open_data(str(tmp_path / "a.npy"), [input_spec(), input_spec("y")])
    np.save(tmp_path / "b.npy", X[0])
    np.save(tmp_path / "c.npy", np.zeros((0, 3), np.float32))
    np.save(tmp_path / "d.npy", X[1:].astype(np.float64))
    batches = open_data(str(tmp_path), [input_spec()])
    wanted = [*X.tolist(), *X[:1].tolist(), *X[1:].tolist()]
    assert [feed["x"][0].tolist() for feed in batches] == wanted
    assert [feed["x"][0].tolist() for feed in batches.feeds_between(3, 6)] == wanted[3:6]
    assert open_data(str(tmp_path), [input_spec()], samples=5).count == 5
    np.save(tmp_path / "e.npy", X.reshape(3, 4))
    with pytest.raises(DataError, match=r"e\.npy: array 'x' is \[3, 4\]"):
        open_data(str(tmp_path), [input_spec()])


def test_background_check(tmp_path: Path, monkeypatch) -> None:
    """Samples are available before the digest. Errors are raised once they are found."""
    path = tmp_path / "data.npz"
    np.savez(path, x=X)
    go = threading.Event()
    scan = arrays._scan_array
    monkeypatch.setattr(arrays, "_scan_array", lambda *given, **more: go.wait(60) and scan(*given, **more))
    found = open_data(str(path), (input_spec(),), check_in_background=True)
    assert_feed(next(found.feeds_between(1, 2)), x=X[1:2])
    found.raise_read_errors()
    go.set()
    assert found.final_digest() == open_data(str(path), (input_spec(),)).final_digest()
    found.raise_read_errors()
    np.savez(path, x=np.where(np.arange(3) == 1, np.nan, X))
    found = open_data(str(path), (input_spec(),), check_in_background=True)
    for tell in (found.final_digest, found.raise_read_errors):
        with pytest.raises(DataError, match="has 4 NaN or infinite values"):
            tell()


def test_nan_without_require_finite(tmp_path: Path) -> None:
    """Without require_finite, NaN is fed, and other values are still checked."""
    bad = X.astype(np.float64)
    bad[2, 1] = np.nan
    np.savez(tmp_path / "data.npz", x=bad)
    feeds = list(open_data(str(tmp_path / "data.npz"), [input_spec()], require_finite=False))
    assert np.isnan(feeds[2]["x"][0, 1])
    bad[0, 0] = 1e300
    np.savez(tmp_path / "data.npz", x=bad)
    with pytest.raises(DataError, match="outside the range"):
        open_data(str(tmp_path / "data.npz"), [input_spec()], require_finite=False)


def test_unreadable_files(tmp_path: Path) -> None:
    """Missing, empty, invalid and unknown files are reported."""
    path = tmp_path / "data.npz"
    with pytest.raises(DataError, match="does not exist"):
        open_data(str(path), [input_spec()])
    path.write_bytes(b"not a zip")
    with pytest.raises(DataError, match=r"data\.npz cannot be read: .*zip"):
        open_data(str(path), [input_spec()])
    (tmp_path / "data.csv").write_text("1,2,3")
    with pytest.raises(DataError, match=r"data\.csv .*known kind"):
        open_data(str(tmp_path / "data.csv"), [input_spec()])


def npy(header: bytes, body: bytes = b"") -> bytes:
    """Write an npy file with any header."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


@pytest.mark.parametrize(
    "member",
    [
        b"",
        b"garbage",
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999, 3), }", b"\0" * 12),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 3), }", b"\0" * 12),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", b"\0" * 12),
        npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (1, 3), }", b"\0" * 24),
        npy(b"{'descr': 7, 'fortran_order': False, 'shape': (1, 3), }"),
        npy(b"["),
        npy(b"[" * 5000),
        npy(b"\xff\xfe"),
        b"\x93NUMPY\x09\x00" + b"\0" * 90,
    ],
)
def test_hostile_arrays(tmp_path: Path, member: bytes) -> None:
    """Invalid headers are rejected before memory is allocated."""
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", member)
    with pytest.raises(DataError, match=r"data\.npz"):
        open_data(str(path), [input_spec()])


def good_file() -> bytes:
    """Return the bytes of a small compressed file."""
    held = io.BytesIO()
    np.savez_compressed(held, x=X)
    return held.getvalue()


GOOD = good_file()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, len(GOOD)))
@pytest.mark.filterwarnings("ignore")  # numpy warns of headers it can almost read
def test_broken_files(tmp_path: Path, position: int, byte: int, end: int) -> None:
    """A file with one changed byte, or truncated anywhere, gives its feeds or a DataError."""
    path = tmp_path / "data.npz"
    flipped = bytearray(GOOD)
    flipped[position] = byte
    for content in (bytes(flipped), GOOD[:end]):
        path.write_bytes(content)
        with contextlib.suppress(DataError):
            assert len(list(open_data(str(path), [input_spec()]))) >= 1


def test_random_data() -> None:
    """Random data is marked as random, reproducible, and depends on name, dtype and shape of the input."""
    inputs = [
        input_spec(),
        input_spec("y"),
        input_spec("i", "uint8", (2, 50)),
        input_spec("n", "int64", (None, 40)),
        input_spec("b", "bool", ()),
    ]
    batches = open_data("random:3", inputs)
    assert (batches.count, batches.random, batches.ignored) == (3, True, ())
    feeds, again = list(batches), list(open_data("random:3", inputs))
    for feed, other in zip(feeds, again, strict=True):
        assert_feed(feed, **other)
    assert {name: (values.dtype.name, values.shape) for name, values in feeds[0].items()} == {
        "x": ("float32", (1, 3)),
        "y": ("float32", (1, 3)),
        "i": ("uint8", (2, 50)),
        "n": ("int64", (1, 40)),
        "b": ("bool", ()),
    }
    assert not np.array_equal(feeds[0]["x"], feeds[0]["y"])
    assert not np.array_equal(feeds[0]["x"], feeds[1]["x"])
    assert set(feeds[0]["n"].ravel().tolist()) == {0, 1}
    assert feeds[0]["i"].max() > 200
    assert open_data("random:9", inputs, samples=2).count == 2
    assert open_data("random:2", inputs).digest != batches.digest


@pytest.mark.parametrize(
    ("spec", "taker", "message"),
    [
        ("random:", input_spec(), "'random:'.* random:8"),
        ("random:0", input_spec(), "'random:0'.* random:8"),
        ("random:-1", input_spec(), "'random:-1'.* random:8"),
        ("random:99999999999", input_spec(), "'random:99999999999'.* random:8"),
        ("random:2", input_spec(shape=None), "no known rank"),
        ("random:2", input_spec(shape=(None, None, 3)), r"the shape \[\?, \?, 3\]"),
        ("random:2", input_spec(shape=(1, 1 << 40)), "too large"),
        ("random:2", input_spec(dtype="string"), "'x' of string"),
        ("random:2", input_spec(dtype="resource"), "'x' of resource"),
    ],
)
def test_unsupported_random_data(spec: str, taker: InputSpec, message: str) -> None:
    """Unknown sizes are not guessed."""
    with pytest.raises(DataError, match=message):
        open_data(spec, [taker])


def test_compressed_arrays_are_bounded(tmp_path) -> None:
    """A small file that claims far more bytes is rejected before it is read; `max_size` sets another limit."""
    inputs = [input_spec(name="x", dtype="float32", shape=(None, 1024))]
    path = tmp_path / "zeros.npz"
    np.savez_compressed(path, x=np.zeros(((1 << 16) + 1024, 1024), np.float32))
    with pytest.raises(DataError, match="268,435,456") as caught:
        open_data(str(path), inputs, samples=2)
    assert open_data(str(caught.value).rpartition("--data ")[2], inputs, samples=2).count == 2
    assert open_data(f"{path},max_size=1GB", inputs, samples=2).count == 2
    small = tmp_path / "small.npz"
    np.savez_compressed(small, x=np.zeros((4, 1024), np.float32))
    assert open_data(str(small), inputs).count == 4
    for size in ("1KB", "many"):
        with pytest.raises(DataError):
            open_data(f"{small},max_size={size}", inputs)
