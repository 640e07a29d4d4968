"""Read FlatBuffers, the container of TFLite files, and check every offset: files may be damaged or hostile.

https://flatbuffers.dev/internals/ : a table starts with the distance to its vtable, which lists the offset of each
field; strings, vectors and tables in fields are distances forward. Distances are followed only as deep as the schema
goes, and shared data counts each time it is read, so that a small file cannot cause endless work.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.errors import ModelError

if TYPE_CHECKING:
    import numpy.typing as npt


FieldNumbers = Mapping[str, int]
"""Field numbers of a table, by the field names of the schema."""

MAX_READS_PER_BYTE = 4
"""The average number of times that each byte of a file may be read as part of a table or vector."""

MIN_READ_BUDGET = 1 << 16
"""Bytes that may be read from any file, however small."""

_U16, _I32, _U32 = struct.Struct("<H"), struct.Struct("<i"), struct.Struct("<I")


class FlatBuffer:
    """A FlatBuffers file with a budget for reads."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self._read_budget = MAX_READS_PER_BYTE * len(data) + MIN_READ_BUDGET

    def require_range(self, position: int, size: int) -> None:
        """Check that `size` bytes from `position` on are in the file, and subtract them from the budget.

        Raises:
            ModelError: They are outside the file, or the budget is used up.
        """
        if position < 0 or position + size > len(self.data):
            raise damaged_file_error(f"{size} bytes at {position} are outside of its {len(self.data)}")
        self._read_budget -= size
        if self._read_budget < 0:
            raise damaged_file_error("its tables refer to each other too often")

    def unpack(self, layout: struct.Struct, position: int) -> Any:
        """Read the number at `position`."""
        self.require_range(position, layout.size)
        return layout.unpack_from(self.data, position)[0]

    def root(self, fields: FieldNumbers) -> FlatTable:
        """Return the root table of the file."""
        return self.table(self.unpack(_U32, 0), fields)

    def table(self, position: int, fields: FieldNumbers) -> FlatTable:
        """Return the table at `position`."""
        vtable = position - self.unpack(_I32, position)
        size = self.unpack(_U16, vtable)
        self.require_range(vtable, size)
        field_offsets = struct.unpack_from(f"<{size // 2}H", self.data, vtable)[2:]
        return FlatTable(self, position, field_offsets, fields)


@dataclass(frozen=True, slots=True)
class FlatTable:
    """A table; its fields are accessed by their names in the schema.

    Attributes:
        buffer: The file.
        start: The position of the table.
        field_offsets: The offset of each field from `start`, 0 for an absent field.
        fields: The numbers of the fields.
    """

    buffer: FlatBuffer
    start: int
    field_offsets: tuple[int, ...]
    fields: FieldNumbers

    def number(self, field: str, struct_format: str, default: float = 0) -> Any:
        """Return a number; `struct_format` is a format of the `struct` module."""
        position = self._field_position(field)
        return default if position is None else self.buffer.unpack(struct.Struct(f"<{struct_format}"), position)

    def table(self, field: str, fields: FieldNumbers) -> FlatTable | None:
        """Return the table in a field, None if the field is absent."""
        position = self._referenced_position(field)
        return None if position is None else self.buffer.table(position, fields)

    def tables(self, field: str, fields: FieldNumbers) -> list[FlatTable]:
        """Return the tables of a vector."""
        start, count = self.vector_span(field, 4)
        positions = [start + 4 * index for index in range(count)]
        return [self.buffer.table(position + self.buffer.unpack(_U32, position), fields) for position in positions]

    def text(self, field: str) -> str:
        """Return a string; bytes that are not UTF-8 are escaped."""
        start, count = self.vector_span(field, 1)
        return bytes(self.buffer.data[start : start + count]).decode("utf-8", errors="backslashreplace")

    def array(self, field: str, dtype: str) -> npt.NDArray[Any]:
        """Return a vector of numbers, (n,)."""
        kind = np.dtype(dtype).newbyteorder("<")
        start, count = self.vector_span(field, kind.itemsize)
        return np.frombuffer(self.buffer.data, kind, count, start).astype(dtype)

    def vector_span(self, field: str, size: int) -> tuple[int, int]:
        """Return start and count of a vector's elements of `size` bytes; (0, 0) if the field is absent."""
        position = self._referenced_position(field)
        if position is None:
            return 0, 0
        count = self.buffer.unpack(_U32, position)
        self.buffer.require_range(position + 4, count * size)
        return position + 4, count

    def _field_position(self, field: str) -> int | None:
        number = self.fields[field]
        offset = self.field_offsets[number] if number < len(self.field_offsets) else 0
        return self.start + offset if offset else None

    def _referenced_position(self, field: str) -> int | None:
        position = self._field_position(field)
        return None if position is None else position + self.buffer.unpack(_U32, position)


def damaged_file_error(problem: str) -> ModelError:
    """Return the error for an inconsistent file."""
    return ModelError(f"The file is damaged: {problem}. Export or copy the model again.")
