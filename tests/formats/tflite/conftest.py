"""A writer of FlatBuffers for TFLite files made by hand."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from graphquant.formats.tflite import ops

if TYPE_CHECKING:
    from collections.abc import Callable

FORMS = {"b": "b", "i": "i", "I": "I", "Q": "Q", "B": "B"}


class Writer:
    """Writes tables, given as dicts of field names; numbers are (format, value), others by their Python type."""

    def __init__(self) -> None:
        self.out = bytearray(b"\0\0\0\0" + ops.IDENTIFIER)

    def build(self, model: dict[str, Any]) -> bytes:
        """Return the file whose root is `model`."""
        struct.pack_into("<I", self.out, 0, self.table(model, ops.MODEL))
        return bytes(self.out)

    def table(self, table: dict[str, Any], fields: Any) -> int:
        """Write a table and return its position."""
        size = max((fields[name] for name in table), default=-1) + 1
        layout = len(self.out)
        at = layout + 4 + 2 * size
        offsets = {name: 4 + 8 * number for number, name in enumerate(table)}
        self.out += struct.pack("<HH", 4 + 2 * size, 4 + 8 * len(table)) + bytes(2 * size)
        for name, offset in offsets.items():
            struct.pack_into("<H", self.out, layout + 4 + 2 * fields[name], offset)
        self.out += struct.pack("<i", at - layout) + bytes(8 * len(table))
        for name, offset in offsets.items():
            self.put(at + offset, name, table[name])
        return at

    def put(self, at: int, name: str, value: Any) -> None:
        """Write a field's content at the end, or in place if it is a number."""
        if isinstance(value, tuple):
            struct.pack_into(f"<{FORMS[value[0]]}", self.out, at, value[1])
            return
        if isinstance(value, dict):
            target = self.table(value, CHILDREN[name])
        elif isinstance(value, list):
            target = self.vector(len(value), bytes(4 * len(value)))
            written_tables: dict[int, int] = {}  # the same dict twice is one table that two places refer to
            for index, child in enumerate(value):
                spot = target + 4 + 4 * index
                if id(child) not in written_tables:
                    written_tables[id(child)] = self.table(child, CHILDREN[name])
                struct.pack_into("<I", self.out, spot, written_tables[id(child)] - spot)
        else:
            data = value.encode() if isinstance(value, str) else np.asarray(value)
            target = self.vector(len(data), bytes(data))
        struct.pack_into("<I", self.out, at, target - at)

    def vector(self, count: int, data: bytes) -> int:
        """Write a vector and return its position."""
        at = len(self.out)
        self.out += struct.pack("<I", count) + data
        return at


CHILDREN: dict[str, Any] = {
    "operator_codes": ops.OPERATOR_CODE,
    "subgraphs": ops.SUBGRAPH,
    "buffers": ops.BUFFER,
    "tensors": ops.TENSOR,
    "operators": ops.OPERATOR,
    "quantization": ops.QUANTIZATION,
    "builtin_options": ops.WHILE_OPTIONS,
    "sparsity": {},
}


@pytest.fixture
def build_tflite() -> Callable[[dict[str, Any]], bytes]:
    """A function that makes the bytes of a TFLite file."""
    return lambda model: Writer().build(model)


def ints(*values: int) -> Any:
    """A vector of int32."""
    return np.array(values, np.int32)


def code(name: str, **more: Any) -> dict[str, Any]:
    """An operator code."""
    return {"builtin_code": ("i", ops.BUILTINS.index(name)), **more}


@pytest.fixture
def full_tflite_model() -> dict[str, Any]:
    """A model with every supported feature: int8 per channel and int4 constants, a loop, a custom op, a variable."""
    scales = np.array([0.5, 0.25], np.float32)
    main = {
        "tensors": [
            {
                "name": "x",
                "shape": ints(1, 2),
                "shape_signature": ints(-1, 2),
                "type": ("b", 9),
                "quantization": {"scale": np.array([0.1], np.float32), "zero_point": np.array([-3], np.int64)},
            },
            {
                "name": "w",
                "shape": ints(2, 2),
                "type": ("b", 9),
                "buffer": ("I", 1),
                "quantization": {
                    "scale": scales,
                    "zero_point": np.zeros(2, np.int64),
                    "quantized_dimension": ("i", 0),
                    "min": np.array([-1, -2], np.float32),
                    "max": np.array([1, 2], np.float32),
                    "details_type": ("B", 2),
                },
            },
            {"name": "y", "shape": ints(1, 2), "type": ("b", 9)},
            {"name": "four", "shape": ints(3), "type": ("b", 17), "buffer": ("I", 2)},
            {"name": "state", "shape": ints(1), "is_variable": ("b", 1)},
            {"name": "y", "shape": ints(1, 2), "type": ("b", 9)},
            {"name": "far", "shape": ints(2), "buffer": ("I", 3)},
        ],
        "inputs": ints(0),
        "outputs": ints(5),
        "operators": [
            {"opcode_index": ("I", 0), "inputs": ints(0, 1, -1), "outputs": ints(2)},
            {"opcode_index": ("I", 1), "inputs": ints(2, 4, 6), "outputs": ints(5)},
            {
                "opcode_index": ("I", 2),
                "inputs": ints(),
                "outputs": ints(),
                "builtin_options": {"cond_subgraph_index": ("i", 1), "body_subgraph_index": ("i", 1)},
            },
        ],
    }
    body = {
        "name": "body",
        "tensors": [{"name": "t", "shape": ints()}],
        "inputs": ints(0),
        "outputs": ints(0),
    }
    return {
        "operator_codes": [
            code("FULLY_CONNECTED", deprecated_builtin_code=("b", 9)),
            code("CUSTOM", custom_code="My_Op"),
            code("WHILE"),
        ],
        "buffers": [
            {},
            {"data": np.array([1, 2, 3, -4], np.int8)},
            {"data": np.array([0x1F, 0x07], np.uint8)},
            {"offset": ("Q", 1 << 40), "size": ("Q", 8)},
        ],
        "subgraphs": [main, body],
    }
