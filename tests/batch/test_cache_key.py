"""Parts of the cache key that are not in the entry: the program, its packages and its environment."""

from importlib.metadata import PackageNotFoundError

import pytest

import graphquant
from graphquant.batch import cache_key
from graphquant.batch.cache_key import FileHashes
from graphquant.utils import ONEDNN_VARIABLE


@pytest.mark.parametrize("name", ["onnxruntime-gpu", "onnxruntime-openvino", "tensorflow-cpu", "keras", "h5py"])
def test_versions_of_alternative_distributions(monkeypatch, name):
    """Alternative distributions of a framework are listed with their versions."""

    def version(package):
        if package != name:
            raise PackageNotFoundError
        return "1.2"

    monkeypatch.setattr(cache_key, "version", version)
    assert cache_key.package_versions.__wrapped__() == {"graphquant": graphquant.__version__, name: "1.2"}


@pytest.mark.parametrize("name", ["part.py", "_fill.abi3.so", "rules/mine.toml"])
def test_the_program_digest_covers_its_files(tmp_path, monkeypatch, name):
    """The digest depends on source, compiled code and rule files, and on no other file."""
    (tmp_path / "rules").mkdir()
    monkeypatch.setattr(graphquant, "__file__", str(tmp_path / "__init__.py"))
    with FileHashes(tmp_path / "hashes.sqlite") as file_hashes:
        (tmp_path / name).write_bytes(b"1")
        before = cache_key.program_digest(file_hashes)
        (tmp_path / "notes.md").write_bytes(b"1")
        assert cache_key.program_digest(file_hashes) == before
        (tmp_path / name).write_bytes(b"other")
        assert cache_key.program_digest(file_hashes) != before


def test_program_digest_depends_on_onednn(tmp_path, monkeypatch):
    """Enabling oneDNN changes the program digest. Disabling it does not, because that is the default."""
    with FileHashes(tmp_path / "hashes.sqlite") as file_hashes:
        digests = {}
        for setting in (None, "0", "1"):
            monkeypatch.delenv(ONEDNN_VARIABLE, raising=False)
            if setting is not None:
                monkeypatch.setenv(ONEDNN_VARIABLE, setting)
            digests[setting] = cache_key.program_digest(file_hashes)
    assert digests[None] == digests["0"] != digests["1"]
