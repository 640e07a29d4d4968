"""Shards of a batch: each model is in one of them, and none has much more to do than another."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphquant.batch import shards
from graphquant.batch.shards import deal_digest, model_size, select_shard
from graphquant.batch.types import Entry
from graphquant.errors import UsageError


def entries(names):
    """Entries of models by these names."""
    return [Entry(name=name, model=name, output=f"{name}.out") for name in names]


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(0, 1000), max_size=30), total=st.integers(1, 8))
def test_shards_are_a_partition(sizes, total):
    """Together they have each entry once, in its order; the heaviest has no more than the lightest and one model."""
    weights = {f"m{place}": size for place, size in enumerate(sizes)}
    every = entries(weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "model_size", weights.__getitem__)
        parts = [select_shard(every, (number, total)) for number in range(1, total + 1)]
        again = [select_shard(list(reversed(every)), (number, total)) for number in range(1, total + 1)]
    assert sorted(one.name for part in parts for one in part) == sorted(weights)
    assert all(part == [one for one in every if one in part] for part in parts)
    assert [part[::-1] for part in again] == parts
    loads = [sum(weights[one.name] + 1 for one in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes, default=0) + 1


def test_an_invalid_shard():
    """Shards are counted from 1."""
    for shard in ((0, 2), (3, 2), (1, 0)):
        with pytest.raises(UsageError, match="There is no shard"):
            select_shard(entries("ab"), shard)


def test_sizes(tmp_path):
    """A folder counts with all its files, what cannot be read as nothing, what is elsewhere as its service says."""
    (tmp_path / "net" / "variables").mkdir(parents=True)
    (tmp_path / "net" / "saved_model.pb").write_bytes(b"12345")
    (tmp_path / "net" / "variables" / "variables.index").write_bytes(b"123")
    assert model_size(str(tmp_path / "net")) == 8
    assert model_size(str(tmp_path / "none.onnx")) == 0
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/sizes/a.onnx", b"1234")
    assert model_size("memory://sizes/a.onnx") == 4
    assert model_size("memory://sizes/b.onnx") == 0


def test_the_deal_digest(monkeypatch):
    """The same models in any order are the same; another name or size is not."""
    sizes = {"a": 3, "b": 2, "c": 1}
    monkeypatch.setattr(shards, "model_size", sizes.__getitem__)
    first = deal_digest(entries("abc"))
    assert deal_digest(entries("cab")) == first
    assert deal_digest(entries("ab")) != first
    sizes["b"] = 1
    assert deal_digest(entries("abc")) != first
