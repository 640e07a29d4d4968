"""A writer of FlatBuffers for TFLite files made by hand."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from graphquant.formats.tflite import ops

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
    "details": ops.BLOCKWISE,
    "builtin_options": ops.WHILE_OPTIONS,
    "sparsity": {},
}


def ints(*values: int) -> Any:
    """A vector of int32."""
    return np.array(values, np.int32)


def code(name: str, **more: Any) -> dict[str, Any]:
    """An operator code."""
    return {"builtin_code": ("i", ops.BUILTINS.index(name)), **more}
