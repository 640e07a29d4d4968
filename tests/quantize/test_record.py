from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

from graphquant.errors import ModelError
from graphquant.quantize import make_record, restore_source


def message_of_constants(*values: np.ndarray, fields: bool = False) -> ModelProto:
    """A model of constants and nothing else."""
    tensors = [numpy_helper.from_array(value, f"t{index}") for index, value in enumerate(values)]
    if fields:
        tensors = [
            helper.make_tensor(f"t{index}", 1, value.shape, value.reshape(-1).tolist())
            for index, value in enumerate(values)
        ]
    return helper.make_model(helper.make_graph([], "g", [], [], tensors), producer_name="somebody")


def test_round_trip() -> None:
    """Present, scaled, removed and small constants all come back, and so do lists of floats."""
    random = np.random.default_rng(0)
    there, weight, gone = (random.normal(size=(8, 40)).astype(np.float32) for _ in range(3))
    small = np.arange(3, dtype=np.float32)
    scaled = (weight * np.linspace(1, 9, 8)[:, None]).astype(np.float32)
    for fields in (False, True):
        source = message_of_constants(there, weight, gone, small, fields=fields)
        written = message_of_constants(small, scaled, there, fields=fields)
        record = make_record(source, written)
        restored, same = restore_source(record, written)
        assert restored == source
        assert same
        assert len(zlib.decompress(record)) < source.ByteSize() + (900 if not fields else 1200)
        written.graph.name = "another"
        assert restore_source(record, written)[1] is False
        written.graph.initializer.pop()
        with pytest.raises(ModelError, match=r"float model .*missing"):
            restore_source(record, written)


def forge_record(record: bytes, **changes: object) -> bytes:
    """A record whose head says of another type."""
    data = zlib.decompress(record)
    size = int.from_bytes(data[:8], "little")
    head = json.dumps({**json.loads(data[8 : 8 + size]), **changes}).encode()
    return zlib.compress(len(head).to_bytes(8, "little") + head + data[8 + size :])


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 7},
        {"cuts": [[[7], "x"]]},
        {"cuts": [[[7, 99], 3]]},
        {"cuts": [[[7, 5, 10**9, 9], 3]]},
        {"cuts": 3},
        {"cuts": [[]]},
        {"bare": "x"},
        {"bare": -5},
        {"digest": "0"},
    ],
)
def test_damaged_records(changes: dict[str, object]) -> None:
    """A record that does not fit together is a model's error, never a traceback."""
    source = message_of_constants(np.arange(99, dtype=np.float32))
    record = forge_record(make_record(source, source), **changes)
    with pytest.raises(ModelError):
        restore_source(record, source)
    for data in (b"", b"junk", record[:40], zlib.compress(b"\xff" * 9)):
        with pytest.raises(ModelError):
            restore_source(data, source)
