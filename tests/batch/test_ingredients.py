"""What the key of an output is made of beside its entry: the program, and what that runs on."""

from importlib.metadata import PackageNotFoundError

import pytest

import graphquant
from graphquant.batch import ingredients
from graphquant.batch.memo import Memo
from graphquant.kernels import ONEDNN


@pytest.mark.parametrize("name", ["onnxruntime-gpu", "onnxruntime-openvino", "tensorflow-cpu", "keras", "h5py"])
def test_a_framework_under_another_name(monkeypatch, name):
    """Its version is known."""

    def version(package):
        if package != name:
            raise PackageNotFoundError
        return "1.2"

    monkeypatch.setattr(ingredients, "version", version)
    assert ingredients.versions.__wrapped__() == {"graphquant": graphquant.__version__, name: "1.2"}


@pytest.mark.parametrize("name", ["part.py", "_fill.abi3.so", "rules/mine.toml"])
def test_the_program_is_its_files(tmp_path, monkeypatch, name):
    """Another file of code, compiled code or rules is another program; one of something else is not."""
    (tmp_path / "rules").mkdir()
    monkeypatch.setattr(graphquant, "__file__", str(tmp_path / "__init__.py"))
    with Memo(tmp_path / "files.sqlite") as memo:
        (tmp_path / name).write_bytes(b"1")
        before = ingredients.program(memo)
        (tmp_path / "notes.md").write_bytes(b"1")
        assert ingredients.program(memo) == before
        (tmp_path / name).write_bytes(b"other")
        assert ingredients.program(memo) != before


def test_how_tensorflow_is_run(tmp_path, monkeypatch):
    """Kernels that somebody switched on make other outputs; off is what is done anyway."""
    with Memo(tmp_path / "files.sqlite") as memo:
        made = {}
        for given in (None, "0", "1"):
            monkeypatch.delenv(ONEDNN, raising=False)
            if given is not None:
                monkeypatch.setenv(ONEDNN, given)
            made[given] = ingredients.program(memo)
    assert made[None] == made["0"] != made["1"]
