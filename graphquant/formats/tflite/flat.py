"""Reads FlatBuffers, the container of TFLite files, with every offset checked: a file may be damaged or hostile.

https://flatbuffers.dev/internals/ : a table starts with the distance to its vtable, which lists where each field lies;
strings, vectors and tables in fields are distances forward. Distances can only be followed as deep as the schema asks,
and what is shared between many places is counted each time it is read, so that a small file cannot make endless work.
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

Fields = Mapping[str, int]
"""The names of a table's fields and their numbers in the schema."""

SHARING = 4
"""How often, on average, each byte of a file may be read as part of a table or vector."""

SMALL = 1 << 16
"""Bytes that may be read from any file, however small."""

_U16, _I32, _U32 = struct.Struct("<H"), struct.Struct("<i"), struct.Struct("<I")


class Flat:
    """A FlatBuffers file, and how much of it may still be read."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self._left = SHARING * len(data) + SMALL

    def spend(self, at: int, size: int) -> None:
        """Checks that `size` bytes from `at` on are in the file, and counts them.

        Raises:
            ModelError: They are not, or the file is read over and over.
        """
        if at < 0 or at + size > len(self.data):
            raise damaged(f"{size} bytes at {at} are outside of its {len(self.data)}")
        self._left -= size
        if self._left < 0:
            raise damaged("its parts refer to each other over and over")

    def unpack(self, form: struct.Struct, at: int) -> Any:
        """The number of the form `form` at `at`."""
        self.spend(at, form.size)
        return form.unpack_from(self.data, at)[0]

    def root(self, fields: Fields) -> Table:
        """The table that the file starts with."""
        return self.table(self.unpack(_U32, 0), fields)

    def table(self, at: int, fields: Fields) -> Table:
        """The table at `at`."""
        layout = at - self.unpack(_I32, at)
        size = self.unpack(_U16, layout)
        self.spend(layout, size)
        places = struct.unpack_from(f"<{size // 2}H", self.data, layout)[2:]
        return Table(self, at, places, fields)


@dataclass(frozen=True, slots=True)
class Table:
    """One table: fields by the names of the schema.

    Attributes:
        flat: The file.
        at: Where the table starts.
        places: Where each field lies behind `at`, 0 for one that is left out.
        fields: The numbers of the fields.
    """

    flat: Flat
    at: int
    places: tuple[int, ...]
    fields: Fields

    def number(self, field: str, form: str, default: float = 0) -> Any:
        """A number in the form of the `struct` module."""
        at = self._place(field)
        return default if at is None else self.flat.unpack(struct.Struct(f"<{form}"), at)

    def table(self, field: str, fields: Fields) -> Table | None:
        """The table in a field, None if it is left out."""
        at = self._target(field)
        return None if at is None else self.flat.table(at, fields)

    def tables(self, field: str, fields: Fields) -> list[Table]:
        """The tables in a vector."""
        start, count = self.span(field, 4)
        places = [start + 4 * index for index in range(count)]
        return [self.flat.table(at + self.flat.unpack(_U32, at), fields) for at in places]

    def text(self, field: str) -> str:
        """A string; bytes that are no UTF-8 are spelled out."""
        start, count = self.span(field, 1)
        return bytes(self.flat.data[start : start + count]).decode("utf-8", errors="backslashreplace")

    def array(self, field: str, dtype: str) -> npt.NDArray[Any]:
        """A vector of numbers, (n,)."""
        kind = np.dtype(dtype).newbyteorder("<")
        start, count = self.span(field, kind.itemsize)
        return np.frombuffer(self.flat.data, kind, count, start).astype(dtype)

    def span(self, field: str, size: int) -> tuple[int, int]:
        """Where the elements of a vector start, and how many of `size` bytes there are; (0, 0) if it is left out."""
        at = self._target(field)
        if at is None:
            return 0, 0
        count = self.flat.unpack(_U32, at)
        self.flat.spend(at + 4, count * size)
        return at + 4, count

    def _place(self, field: str) -> int | None:
        number = self.fields[field]
        place = self.places[number] if number < len(self.places) else 0
        return self.at + place if place else None

    def _target(self, field: str) -> int | None:
        at = self._place(field)
        return None if at is None else at + self.flat.unpack(_U32, at)


def damaged(what: str) -> ModelError:
    """The error for a file that does not hold together."""
    return ModelError(f"The file is damaged: {what}. Export or copy the model again.")
