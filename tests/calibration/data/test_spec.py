"""Data specs: parsing, and errors of invalid specs."""

import os
from pathlib import Path

import numpy as np
import pytest

from graphquant.calibration.data import files as data_files
from graphquant.calibration.data import open_data
from graphquant.calibration.data.dataset import DATA_KINDS, parse_data_spec
from graphquant.errors import DataError
from graphquant.formats import InputSpec

X = InputSpec(name="x", dtype="float32", shape=(None, 3))


@pytest.fixture
def folder_of_kinds(tmp_path: Path, monkeypatch) -> Path:
    """Create a folder with an empty file of each kind in its own folder, and one with two kinds."""
    for name in ("npz/a.npz", "npy/a.npy", "images/a.JPG", "audio/a.wav", "both/a.npz", "both/b.npy", "none/a.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("tfrecord/a.tfrecord", "tfrecord/b.tfrec.gz", "tfrecord/c.tfrecords-00000-of-00002", "parquet/a.pq"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "onnx-test-set/test_data_set_0").mkdir(parents=True)
    (tmp_path / "onnx-test-set/test_data_set_0/input_0.pb").touch()
    (tmp_path / "onnx-test-set/test_data_set_0/output_0.pb").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", [kind for kind, known in DATA_KINDS.items() if known.file_pattern])
def test_kinds_by_file_name(folder_of_kinds, kind: str) -> None:
    """File names identify each kind, alone and in a folder."""
    source = parse_data_spec(kind)
    assert source.kind == kind
    assert [parse_data_spec(file.name).kind for file in source.files] == [kind] * len(source.files)
    assert len(source.files) == (3 if kind == "tfrecord" else 1)


def test_keys(folder_of_kinds) -> None:
    """Keys follow commas, lists use colons, and a path may contain commas and equals signs."""
    source = parse_data_spec("images,mean=1:2:3,size=320x240")
    assert (source.spec, dict(source.keys)) == ("images", {"mean": "1:2:3", "size": "320x240"})
    source = parse_data_spec("npz/a.npz,inputs.x:0=image/encoded")
    assert dict(source.input_keys) == {"x:0": "image/encoded"}
    odd = folder_of_kinds / "a, b=c.npz"
    odd.touch()
    assert parse_data_spec(str(odd)).files[0].name == str(odd)


def test_descriptions(folder_of_kinds) -> None:
    """A description has the same keys and a relative path. The spec overrides it."""
    (folder_of_kinds / "deep").mkdir()
    text = 'path = "../images"\npreset = "unit"\nsize = 32\nmean = [0.5, 1, 2]\n'
    (folder_of_kinds / "deep/d.toml").write_text(text)
    source = parse_data_spec("deep/d.toml,size=64")
    assert dict(source.keys) == {"preset": "unit", "size": "64", "mean": "0.5:1:2"}
    assert [file.name for file in source.files] == [str(Path("deep/../images/a.JPG"))]
    (folder_of_kinds / "deep/d.toml").write_text('path = "../npz"\n[inputs]\n"x:0" = "image/encoded"\n')
    assert dict(parse_data_spec("deep/d.toml").input_keys) == {"x:0": "image/encoded"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path = ", "d.toml cannot be read: "),
        ("size = 3", "d.toml .*Set path"),
        ("path = 3", "d.toml .*Set path"),
        ('path = "os:getcwd"', "d.toml: path = 'os:getcwd'"),
        ('path = "random:8"', "d.toml: path = 'random:8'"),
        ('path = "d.toml"', "d.toml: path = 'd.toml'"),
        ('path = "images"\nmean = true', "d.toml: mean "),
        ('path = "images"\n[mean]\na = 1', "d.toml: mean "),
        ('path = "images"\nmena = 1', "no key 'mena'. Did you mean 'mean'"),
        ('path = "nowhere"', "does not exist"),
        ("\xff", "cannot be read"),
    ],
)
def test_invalid_descriptions(folder_of_kinds, text: str, message: str) -> None:
    """Errors of a description are reported; it names only files."""
    (folder_of_kinds / "d.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        parse_data_spec("d.toml")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "'' .*calibration.npz"),
        (",kind=npz", "',kind=npz' .*calibration.npz"),
        ("nowhere", "file nowhere .*exist"),
        ("a\0b", r"'a\\x00b' .*valid path"),
        ("none", "^none .*known kind"),
        ("none/a.csv", "^none/a.csv .*known kind"),
        ("both", "several kinds: 1 npy, 1 npz. Select one with kind="),
        ("both,kind=nzp", "kind=nzp is unknown.*Did you mean 'npz'"),
        ("both,kind=audio", "^both .*no files .*audio"),
        ("both,kind=random", "kind=random .* random:N"),
        ("images,men=3", "no key 'men'. Did you mean 'mean'.* preset, size"),
        ("npz,rate=3", "has no key 'rate'"),
        ("npy,inputs.x=y", "named fields.* inputs.x"),
        ("random:3,size=3", "kind random,.* 'size'"),
    ],
)
def test_invalid_specs(folder_of_kinds, spec: str, message: str) -> None:
    """Errors of a spec are reported before a model is run."""
    with pytest.raises(DataError, match=message):
        parse_data_spec(spec)


def test_selected_files_of_a_folder(folder_of_kinds) -> None:
    """Other files are listed by suffix. kind= selects files."""
    assert parse_data_spec("both,kind=npy").files[0].name == "both/b.npy"
    assert parse_data_spec("both,kind=npy").ignored == ("files with .npz (1)",)
    (folder_of_kinds / "images/.hidden.png").touch()
    (folder_of_kinds / "images/notes").touch()
    source = parse_data_spec("images")
    assert [file.name for file in source.files] == ["images/a.JPG"]
    assert [text.rpartition("with ")[2] for text in source.ignored] == ["no suffix (1)"]
    (folder_of_kinds / "records").mkdir()
    (folder_of_kinds / "records/part-0").touch()
    assert parse_data_spec("records,kind=tfrecord").files[0].name == "records/part-0"
    assert parse_data_spec("none/a.csv,kind=parquet").kind == "parquet"


def test_inputs_of_a_spec(folder_of_kinds) -> None:
    """A key of the file feeds the assigned input. An unknown input is an error."""
    np.savez("named.npz", images=np.ones((2, 3), np.float32))
    batches = open_data("named.npz,inputs.x=images", [X])
    assert (batches.count, batches.ignored) == (2, ())
    with pytest.raises(DataError, match=r"inputs\.z=images .* 'x'"):
        open_data("named.npz,inputs.z=images", [X])
    with pytest.raises(DataError, match=r"no array 'nix' .*'x'\. .* 'images'"):
        open_data("named.npz,inputs.x=nix", [X])
    with pytest.raises(DataError, match=r"inputs\.x="):
        open_data("named.npz", [X])


def test_links_and_devices(folder_of_kinds) -> None:
    """A link inside a folder is followed, a link out of it is an error, pipes are skipped."""
    (folder_of_kinds / "images/link.png").symlink_to("a.JPG")
    os.mkfifo(folder_of_kinds / "images/pipe.png")
    assert [file.name for file in parse_data_spec("images").files] == ["images/a.JPG", "images/link.png"]
    (folder_of_kinds / "images/out.png").symlink_to("/etc/passwd")
    with pytest.raises(DataError, match=r"out\.png is a link.* Copy"):
        parse_data_spec("images")
    (folder_of_kinds / "away").symlink_to("images")
    (folder_of_kinds / "images/out.png").unlink()
    assert len(parse_data_spec("away").files) == 2
    with pytest.raises(DataError, match="does not exist"):
        parse_data_spec("images/pipe.png")


def test_too_many_files(folder_of_kinds, monkeypatch) -> None:
    """A folder with too many files is rejected."""
    monkeypatch.setattr(data_files, "MAX_FILES", 2)
    with pytest.raises(DataError, match=r"tfrecord .* 2 files"):
        parse_data_spec("tfrecord")
