"""Extended checkpoints, read by graphquant and by TensorFlow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.checkpoint import (
    Checkpoint,
    encode_varint,
    extend_checkpoint,
    read_table,
    read_varint,
    write_table,
)

VALUES = {
    "a/scalar": np.array(2.5, np.float32),
    "b": np.arange(12, dtype=np.int32).reshape(3, 4),
    "c/empty": np.zeros((0, 2), np.float64),
}


@given(st.dictionaries(st.binary(max_size=40), st.binary(max_size=3000), max_size=80))
def test_table_round_trip(entries: dict[bytes, bytes]) -> None:
    """Tables of any keys and values round-trip, in any number of blocks."""
    restored = read_table(write_table(entries), source="it")
    assert restored == entries
    assert list(restored) == sorted(entries)


@given(st.integers(0, 2**32 - 1))
def test_varint_round_trip(number: int) -> None:
    """Lengths round-trip."""
    assert read_varint(encode_varint(number), 0) == (number, len(encode_varint(number)))


def test_a_new_checkpoint(tmp_path) -> None:
    """A checkpoint is created, then extended, and a key gets a new value."""
    prefix = tmp_path / "variables" / "variables"
    extend_checkpoint(prefix, VALUES, None)
    extend_checkpoint(prefix, {"d": np.array([True, False]), "b": np.zeros(2, np.float32)}, None)
    checkpoint = Checkpoint(prefix)
    assert list(checkpoint.names) == ["a/scalar", "b", "c/empty", "d"]
    for name, value in {**VALUES, "d": np.array([True, False]), "b": np.zeros(2, np.float32)}.items():
        np.testing.assert_array_equal(checkpoint.read(name), value)
        assert (checkpoint.read(name).dtype, checkpoint.read(name).shape) == (value.dtype, value.shape)
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        "variables.data-00000-of-00002",
        "variables.data-00001-of-00002",
        "variables.index",
    ]


def test_linked_files_are_not_changed(tmp_path) -> None:
    """Extending a checkpoint of hard links does not change the linked files."""
    prefix, copy = tmp_path / "one" / "variables", tmp_path / "two" / "variables"
    extend_checkpoint(prefix, VALUES, None)
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}
    copy.parent.mkdir()
    for name in before:
        (copy.parent / name).hardlink_to(prefix.parent / name)
    extend_checkpoint(copy, {"d": np.ones(3)}, None)
    assert {path.name: path.read_bytes() for path in prefix.parent.iterdir()} == before
    assert len(Checkpoint(copy).names) == 4


def test_object_graph_is_replaced(tmp_path) -> None:
    """The object graph is replaced completely."""
    prefix = tmp_path / "variables"
    objects = proto.TrackableObjectGraph()
    for count in (1, 300):
        for number in range(count):
            objects.nodes.add().children.add(node_id=number, local_name=f"child{number}")
        extend_checkpoint(prefix, {}, objects)
        assert Checkpoint(prefix).object_graph() == objects


@pytest.mark.slow
def test_tensorflow_reads_it(tmp_path) -> None:
    """TensorFlow reads old and new values."""
    tf = pytest.importorskip("tensorflow")
    variables = {f"v{number}": tf.Variable(np.full(3, number, np.float32)) for number in range(3)}
    path = tf.train.Checkpoint(**variables).write(str(tmp_path / "variables"))
    objects = Checkpoint(tmp_path / "variables").object_graph()
    extend_checkpoint(tmp_path / "variables", VALUES, objects)
    reader = tf.train.load_checkpoint(path)
    for name, value in VALUES.items():
        np.testing.assert_array_equal(reader.get_tensor(name), value)
    np.testing.assert_array_equal(reader.get_tensor("v2/.ATTRIBUTES/VARIABLE_VALUE"), np.full(3, 2))
    fresh = {name: tf.Variable(np.zeros(3, np.float32)) for name in variables}
    tf.train.Checkpoint(**fresh).read(path).assert_consumed()
    np.testing.assert_array_equal(fresh["v1"], np.ones(3))
