"""What the key of an output is made of beside its entry: the program, and what that runs on."""

from importlib.metadata import PackageNotFoundError

import pytest

import graphquant
from graphquant.batch import cache_key
from graphquant.batch.cache_key import FileHashes
from graphquant.utils.tf_determinism import ONEDNN_VARIABLE


@pytest.mark.parametrize("name", ["onnxruntime-gpu", "onnxruntime-openvino", "tensorflow-cpu", "keras", "h5py"])
def test_a_framework_under_another_name(monkeypatch, name):
    """Its version is known."""

    def version(package):
        if package != name:
            raise PackageNotFoundError
        return "1.2"

    monkeypatch.setattr(cache_key, "version", version)
    assert cache_key.package_versions.__wrapped__() == {"graphquant": graphquant.__version__, name: "1.2"}


@pytest.mark.parametrize("name", ["part.py", "_fill.abi3.so", "rules/mine.toml"])
def test_the_program_digest_covers_its_files(tmp_path, monkeypatch, name):
    """Another file of code, compiled code or rules is another program; one of something else is not."""
    (tmp_path / "rules").mkdir()
    monkeypatch.setattr(graphquant, "__file__", str(tmp_path / "__init__.py"))
    with FileHashes(tmp_path / "hashes.sqlite") as memo:
        (tmp_path / name).write_bytes(b"1")
        before = cache_key.program_digest(memo)
        (tmp_path / "notes.md").write_bytes(b"1")
        assert cache_key.program_digest(memo) == before
        (tmp_path / name).write_bytes(b"other")
        assert cache_key.program_digest(memo) != before


def test_how_tensorflow_is_run(tmp_path, monkeypatch):
    """Kernels that somebody switched on make other outputs; off is what is done anyway."""
    with FileHashes(tmp_path / "hashes.sqlite") as memo:
        made = {}
        for given in (None, "0", "1"):
            monkeypatch.delenv(ONEDNN_VARIABLE, raising=False)
            if given is not None:
                monkeypatch.setenv(ONEDNN_VARIABLE, given)
            made[given] = cache_key.program_digest(memo)
    assert made[None] == made["0"] != made["1"]
