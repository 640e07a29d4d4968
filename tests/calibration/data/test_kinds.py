"""The same samples stored in each kind of calibration data: equal feeds, ranges and digests; broken files."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pyarrow import parquet
from support.data_files import assert_feed, encode_example, write_onnx_set, write_png, write_tfrecord

from graphquant.calibration.data import open_data
from graphquant.errors import DataError
from graphquant.formats import InputSpec

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.calibration.data import Dataset

HEIGHT, WIDTH = 4, 5
PICTURES = InputSpec(name="x", dtype="float32", shape=(None, 3, HEIGHT, WIDTH))
SCALED = "mean=127,std=128"


def normalized(pixels: np.ndarray) -> np.ndarray:
    """Convert images (n, height, width, 3) to float32 (n, 3, height, width) by (pixel - 127) / 128."""
    return ((pixels.astype(np.float64) - 127) / 128).astype(np.float32).transpose(0, 3, 1, 2)


def write_npz(folder, pixels):
    """Write an npz file."""
    np.savez(folder / "data.npz", x=normalized(pixels))
    return folder / "data.npz"


def write_fortran(folder, pixels):
    """Write a compressed npz file in Fortran order and foreign byte order."""
    np.savez_compressed(folder / "data.npz", x=np.asfortranarray(normalized(pixels).astype(">f4")))
    return folder / "data.npz"


def write_npy(folder, pixels):
    """Write an npy file."""
    np.save(folder / "data.npy", normalized(pixels))
    return folder / "data.npy"


def write_npz_folder(folder, pixels):
    """Write a folder of npz files with one or more samples each, with and without a batch axis."""
    values = normalized(pixels)
    np.savez(folder / "0.npz", x=values[0])
    np.savez(folder / "1.npz", x=values[1:])
    return folder


def write_npy_folder(folder, pixels):
    """Write a folder of npy files with one sample each."""
    for index, values in enumerate(normalized(pixels)):
        np.save(folder / f"{index:04}.npy", values)
    return folder


def write_onnx_sets(folder, pixels):
    """Write ONNX test data sets."""
    for index, values in enumerate(normalized(pixels)):
        write_onnx_set(folder / f"test_data_set_{index}", values[None])
    return folder


def write_images(folder, pixels):
    """Write images in two folders, next to another file."""
    for index, picture in enumerate(pixels):
        write_png(folder / f"class_{index // 2}" / f"{index}.png", picture)
    folder.joinpath("labels.txt").write_text("cats")
    folder.joinpath(".DS_Store").write_bytes(b"\0")
    return f"{folder},{SCALED}"


def write_described(folder, pixels):
    """Write images with a description."""
    write_images(folder / "photos", pixels)
    folder.joinpath("data.toml").write_text('path = "photos"\nmean = [127, 127, 127]\nstd = 128\norder = "rgb"\n')
    return folder / "data.toml"


def write_tfrecord_file(folder, pixels):
    """Write a compressed TFRecord file of floats."""
    return write_tfrecord(folder / "data.tfrecord.gz", [encode_example(x=v, label=[1]) for v in normalized(pixels)])


def write_tfrecord_shards(folder, pixels):
    """Write TFRecord shards of encoded images, and one of bare pixels."""
    write_png(folder / "photos/0.png", pixels[0])
    encoded = folder.joinpath("photos/0.png").read_bytes()
    shutil.rmtree(folder / "photos")
    write_tfrecord(folder / "train.tfrecord-00000-of-00002", [encode_example(**{"image/encoded": encoded})])
    rest = [encode_example(**{"image/encoded": picture.tobytes()}) for picture in pixels[1:]]
    write_tfrecord(folder / "train.tfrecord-00001-of-00002", rest)
    return f"{folder},inputs.x=image/encoded,{SCALED}"


def write_parquet(folder, pixels):
    """Write a table of lists in small row groups."""
    table = pa.table({"x": [values.ravel() for values in normalized(pixels)], "label": list(range(len(pixels)))})
    parquet.write_table(table, folder / "data.parquet", row_group_size=2)
    return folder / "data.parquet"


def write_parquet_pictures(folder, pixels):
    """Write a table of images as published data sets do."""
    rows = []
    for index, picture in enumerate(pixels):
        rows.append({"bytes": write_png(folder / f"{index}.png", picture).read_bytes(), "path": "a.png"})
        folder.joinpath(f"{index}.png").unlink()
    parquet.write_table(pa.table({"image": rows}), folder / "data.parquet")
    return f"{folder},inputs.x=image,{SCALED}"


def write_function(folder, pixels):
    """Write a module with a generator of dictionaries."""
    np.save(folder / "values.npy", normalized(pixels))
    name = f"calibration_{next(COUNTER)}"
    code = f"import numpy\ndef samples():\n    for x in numpy.load({str(folder / 'values.npy')!r}):\n"
    folder.joinpath(f"{name}.py").write_text(f"{code}        yield {{'x': x, 'labels': 1}}\n")
    return f"{name}:samples"


COUNTER = itertools.count()
WRITERS = [
    write_npz,
    write_fortran,
    write_npy,
    write_npz_folder,
    write_npy_folder,
    write_onnx_sets,
    write_images,
    write_described,
    write_tfrecord_file,
    write_tfrecord_shards,
    write_parquet,
    write_parquet_pictures,
    write_function,
]
PIXELS = np.random.default_rng(0).integers(0, 256, (5, HEIGHT, WIDTH, 3), np.uint8)


@pytest.fixture
def module_folder(tmp_path: Path, monkeypatch) -> Path:
    """Change to an empty folder, the only one on the module path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def open_spec(spec: object, *inputs: InputSpec, samples: int | None = None) -> Dataset:
    """Open a spec for inputs, by default one image input."""
    return open_data(str(spec), inputs or (PICTURES,), samples=samples)


@pytest.mark.parametrize("write", WRITERS)
def test_equal_feeds(module_folder, write) -> None:
    """Each kind gives the same feeds, repeatedly and for any range."""
    batches = open_spec(write(module_folder, PIXELS))
    wanted = normalized(PIXELS)
    assert (batches.count, batches.random, len(batches.digest)) == (5, False, 64)
    for _ in range(2):
        for feed, values in zip(batches, wanted, strict=True):
            assert_feed(feed, x=values[None])
    for start, stop in ((0, 2), (1, 4), (3, 5), (4, 99), (2, 2), (9, 99)):
        spanned = [feed["x"][0] for feed in batches.feeds_between(start, stop)]
        assert len(spanned) == len(wanted[start:stop])
        assert all(map(np.array_equal, spanned, wanted[start:stop]))


@pytest.mark.parametrize("write", WRITERS)
def test_digests(module_folder, write) -> None:
    """The digest is equal for equal data, and differs for other values, fewer samples or another order."""
    places = [module_folder / name for name in "abcd"]
    for place in places:
        place.mkdir()
    sys.path.extend(map(str, places))
    first = write(places[0], PIXELS)
    digest = open_spec(first).digest
    assert open_spec(first).digest == digest
    assert open_spec(write(places[1], PIXELS)).digest == digest
    changed = PIXELS.copy()
    changed[4, 3, 4, 2] ^= 1
    assert open_spec(write(places[2], changed)).digest != digest
    assert open_spec(write(places[3], PIXELS[::-1])).digest != digest
    assert open_spec(first, samples=3).digest != digest
    assert open_spec(first, samples=3).count == 3


WHOLE = {write_onnx_sets, write_npz_folder, write_npy_folder}
"""Writers whose files must hold whole feeds."""


@pytest.mark.parametrize("write", [write for write in WRITERS if write not in WHOLE])
def test_fixed_batch_size(module_folder, write) -> None:
    """With a batch size of two, two samples form a feed, and a remainder is an error."""
    pair = InputSpec(name="x", dtype="float32", shape=(2, 3, HEIGHT, WIDTH))
    spec = write(module_folder, PIXELS[:4])
    if write is write_function:
        with pytest.raises(DataError, match=r"'x' takes (2|\[2, 3, )"):
            open_spec(spec, pair)
        return
    batches = open_spec(spec, pair)
    assert batches.count == 2
    assert_feed(list(batches)[1], x=normalized(PIXELS[2:4]))
    assert_feed(next(batches.feeds_between(1, 2)), x=normalized(PIXELS[2:4]))
    assert open_spec(spec, pair, samples=1).count == 1
    with pytest.raises(DataError, match="left over"):
        open_spec(spec, InputSpec(name="x", dtype="float32", shape=(3, 3, HEIGHT, WIDTH)))


@pytest.mark.parametrize("write", [write_npz, write_onnx_sets, write_tfrecord_file, write_parquet, write_function])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(pixels=hnp.arrays(np.uint8, st.tuples(st.integers(1, 4), st.just(HEIGHT), st.just(WIDTH), st.just(3))))
def test_round_trip(tmp_path_factory, write, pixels) -> None:
    """Any samples are read as stored."""
    place = tmp_path_factory.mktemp("data")
    sys.path.append(str(place))
    try:
        assert np.array_equal([feed["x"][0] for feed in open_spec(write(place, pixels))], normalized(pixels))
    finally:
        sys.path.remove(str(place))
        shutil.rmtree(place)


@pytest.mark.parametrize("write", [write for write in WRITERS if write is not write_function])
@pytest.mark.filterwarnings("ignore")  # numpy warns of headers that it can almost read
def test_broken_files(module_folder, write) -> None:
    """A file with one changed byte, or truncated anywhere, gives feeds or a DataError."""
    spec = write(module_folder, PIXELS[:2])
    files = sorted(path for path in module_folder.rglob("*") if path.is_file() and path.suffix not in {"", ".txt"})

    @settings(deadline=None, max_examples=60)
    @given(st.sampled_from(files), st.integers(0, 1 << 20), st.integers(1, 255))
    def damage(path: Path, position: int, change: int) -> None:
        content = path.read_bytes()
        changed = bytearray(content)
        changed[position % len(content)] ^= change
        try:
            for broken in (bytes(changed), content[: position % len(content)]):
                path.write_bytes(broken)
                with contextlib.suppress(DataError):
                    assert len(list(open_spec(spec))) >= 1
        finally:
            path.write_bytes(content)

    damage()


@pytest.mark.parametrize("write", [write for write in WRITERS if write is not write_function])
def test_names_of_broken_files(module_folder, write) -> None:
    """The error for a truncated file names the file and a fix."""
    spec = write(module_folder, PIXELS[:2])
    (path, *_) = sorted(
        path for path in module_folder.rglob("*") if path.suffix not in {"", ".txt", ".toml"} and path.is_file()
    )
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError) as caught:
        list(open_spec(spec))
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).count(". ") >= 1
