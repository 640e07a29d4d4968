"""Remote data through fsspec: the same feeds as local data, and failing services."""

from __future__ import annotations

import sys
import zipfile

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.data_files import encode_example, write_onnx_set, write_png, write_tfrecord

from graphquant.calibration.data import open_data
from graphquant.calibration.data.dataset import parse_data_spec
from graphquant.errors import DataError, MissingDependencyError
from graphquant.formats import InputSpec

X = InputSpec(name="x", dtype="float32", shape=(None, 3))
PICTURES = InputSpec(name="x", dtype="uint8", shape=(None, 6, 5, 3))


@pytest.fixture
def memory():
    """Return an empty file system in memory."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def upload(system, folder, under: str = "/bucket") -> None:
    """Upload each file of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            system.pipe(f"{under}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def test_arrays_and_records(memory, tmp_path) -> None:
    """npz, npy in Fortran order, TFRecord, Parquet and test sets give the same feeds as local files."""
    import pyarrow as pa
    from pyarrow import parquet

    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.savez(tmp_path / "a.npz", x=values)
    np.save(tmp_path / "a.npy", np.asfortranarray(values))
    write_tfrecord(tmp_path / "a.tfrecord.gz", [encode_example(x=row) for row in values])
    write_tfrecord(tmp_path / "b.tfrecord", [encode_example(x=row) for row in values])
    parquet.write_table(pa.table({"x": list(values)}), tmp_path / "a.parquet", row_group_size=3)
    for index, row in enumerate(values):
        write_onnx_set(tmp_path / f"sets/test_data_set_{index}", row[None])
    upload(memory, tmp_path)
    for name in ("a.npz", "a.npy", "a.tfrecord.gz", "b.tfrecord", "a.parquet", "sets"):
        here, there = (open_data(f"{start}/{name}", [X]) for start in (tmp_path, "memory://bucket"))
        assert there.digest == here.digest
        assert [feed["x"].tolist() for feed in there.feeds_between(1, 4)] == values[1:, None].tolist()


def test_folders(memory, tmp_path) -> None:
    """Images of a remote folder and of an archive equal the local ones. Hidden files are skipped."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, 6, 5, 3), np.uint8)
    for index, picture in enumerate(pixels):
        write_png(tmp_path / f"photos/{index % 2}/{index}.png", picture)
    (tmp_path / "photos/.hidden").mkdir()
    (tmp_path / "photos/.hidden/a.npz").touch()
    upload(memory, tmp_path)
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for path in sorted(tmp_path.rglob("*.png")):
            archive.write(path, path.relative_to(tmp_path / "photos"))
    here = [feed["x"].tolist() for feed in open_data(f"{tmp_path}/photos", [PICTURES])]
    for spec in ("memory://bucket/photos", f"zip://::{tmp_path}/photos.zip"):
        assert [feed["x"].tolist() for feed in open_data(spec, [PICTURES])] == here
    spec = f"{tmp_path}/photos,size=5x6,layout=nhwc"
    assert open_data(spec.replace(f"{tmp_path}", "memory://bucket"), [PICTURES]).count == 3


def test_missing_remote_data(memory, monkeypatch) -> None:
    """Missing data, an unknown service and a missing package are reported."""
    with pytest.raises(DataError, match=r"memory://nowhere"):
        parse_data_spec("memory://nowhere")
    with pytest.raises(DataError, match=r"nosuch://a cannot be listed: .* nosuch"):
        parse_data_spec("nosuch://a")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingDependencyError, match=r"fsspec\..*: pip install 'graphquant"):
        parse_data_spec("memory://bucket")


def test_failing_services(memory, tmp_path, monkeypatch) -> None:
    """An error of a service is a DataError that names the file."""
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3), np.float32))
    upload(memory, tmp_path)

    class OwnError(Exception):
        """An error that only this service raises."""

    def fails(*_arguments, **_options):
        raise OwnError("token-expired")

    monkeypatch.setattr(MemoryFileSystem, "open", fails)
    with pytest.raises(DataError, match=r"a\.npz .*: token-expired"):
        open_data("memory://bucket/a.npz", [X])
    monkeypatch.setattr(MemoryFileSystem, "isfile", fails)
    with pytest.raises(DataError, match=r"a\.npz .*: token-expired"):
        parse_data_spec("memory://bucket/a.npz")


def test_no_pillow(tmp_path, monkeypatch) -> None:
    """Without Pillow, the error contains the install command."""
    write_png(tmp_path / "a.png", np.zeros((6, 5, 3)))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDependencyError, match=r"pillow\..*: pip install 'graphquant"):
        open_data(str(tmp_path), [PICTURES])
