"""Shards of a batch: each model is in exactly one, and their sizes are balanced."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphquant.batch import run
from graphquant.batch.run import deal_digest, model_size, select_shard
from graphquant.batch.types import Entry
from graphquant.errors import UsageError


def make_entries(names):
    """Return entries of models with these names."""
    return [Entry(name=name, model=name, output=f"{name}.out") for name in names]


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(0, 1000), max_size=30), total=st.integers(1, 8))
def test_shards_are_a_partition(sizes, total):
    """Each entry is in one shard, in order. Shard sizes differ by at most the largest model."""
    weights = {f"m{index}": size for index, size in enumerate(sizes)}
    entries = make_entries(weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "model_size", lambda model, **_: weights[model])
        parts = [select_shard(entries, (number, total)) for number in range(1, total + 1)]
        reversed_parts = [select_shard(list(reversed(entries)), (number, total)) for number in range(1, total + 1)]
    assert sorted(entry.name for part in parts for entry in part) == sorted(weights)
    assert all(part == [entry for entry in entries if entry in part] for part in parts)
    assert [part[::-1] for part in reversed_parts] == parts
    sizes_of_parts = [sum(weights[entry.name] + 1 for entry in part) for part in parts]
    assert max(sizes_of_parts) - min(sizes_of_parts) <= max(sizes, default=0) + 1


def test_invalid_shard():
    """Shard numbers outside of 1 to the total raise UsageError."""
    for shard in ((0, 2), (3, 2), (1, 0)):
        with pytest.raises(UsageError, match=f"no shard {shard[0]} of {shard[1]}"):
            select_shard(make_entries("ab"), shard)


def test_model_size(tmp_path):
    """A folder's size is that of all its files, a missing model's is 0, a remote model's is fsspec's."""
    (tmp_path / "net" / "variables").mkdir(parents=True)
    (tmp_path / "net" / "saved_model.pb").write_bytes(b"12345")
    (tmp_path / "net" / "variables" / "variables.index").write_bytes(b"123")
    assert model_size(str(tmp_path / "net")) == 8
    assert model_size(str(tmp_path / "none.onnx")) == 0
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/sizes/a.onnx", b"1234")
    assert model_size("memory://sizes/a.onnx") == 4
    assert model_size("memory://sizes/b.onnx") == 0


def test_deal_digest(monkeypatch):
    """The digest depends on names and sizes of the models and not on their order."""
    sizes = {"a": 3, "b": 2, "c": 1}
    monkeypatch.setattr(run, "model_size", lambda model, **_: sizes[model])
    expected = deal_digest(make_entries("abc"))
    assert deal_digest(make_entries("cab")) == expected
    assert deal_digest(make_entries("ab")) != expected
    sizes["b"] = 1
    assert deal_digest(make_entries("abc")) != expected
