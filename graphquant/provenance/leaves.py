"""The large values in a protocol buffer message, whatever message it is, and where they are."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from graphquant.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SMALL = 128
"""Bytes up to which a value is no leaf: naming it would take as many."""

DTYPES = {
    FieldDescriptor.TYPE_FLOAT: "<f4",
    FieldDescriptor.TYPE_DOUBLE: "<f8",
    FieldDescriptor.TYPE_INT32: "<i4",
    FieldDescriptor.TYPE_INT64: "<i8",
    FieldDescriptor.TYPE_UINT32: "<u4",
    FieldDescriptor.TYPE_UINT64: "<u8",
}
"""How lists of numbers are held against bytes."""

Path = list[int | str]
"""From the message on: a field's number, an index or key where it is a list or a map, and so on."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A large value.

    Attributes:
        path: Where it is.
        holder: The message that has it.
        field: Its field there.
        data: Its bytes.
    """

    path: Path
    holder: Any
    field: Any
    data: bytes

    @property
    def key(self) -> str:
        """What its bytes are known by."""
        return key_of(self.data)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the tensor that it holds, as its holder says them; () if it holds none."""
        if hasattr(self.holder, "tensor_shape"):
            return tuple(dim.size for dim in self.holder.tensor_shape.dim)
        return tuple(getattr(self.holder, "dims", ()))


def key_of(data: bytes) -> str:
    """What these bytes are known by."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def leaves(message: Any) -> Iterator[Leaf]:
    """The large values of `message`, always in the same order; it must not be changed meanwhile."""
    todo: list[tuple[Any, Path]] = [(message, [])]
    while todo:
        holder, path = todo.pop()
        inner = []
        for field, value in holder.ListFields():
            here = [*path, field.number]
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                inner += [(each, [*here, *place]) for place, each in _messages(field, value)]
            elif (data := _data(field, value)) is not None and len(data) > SMALL:
                yield Leaf(here, holder, field, data)
        todo.extend(reversed(inner))


def cut(message: Any) -> None:
    """Empties all large values of `message`."""
    for leaf in list(leaves(message)):
        leaf.holder.ClearField(leaf.field.name)


def put(message: Any, path: Path, data: bytes) -> None:
    """Puts a large value back.

    Raises:
        ModelError: There is no such place.
    """
    try:
        holder = message
        field = holder.DESCRIPTOR.fields_by_number[path[0]]
        rest = path[1:]
        while rest:
            value = getattr(holder, field.name)
            if _is_map(field) or _is_list(field):
                value, rest = value[rest[0]], rest[1:]
            holder = value
            field, rest = holder.DESCRIPTOR.fields_by_number[rest[0]], rest[1:]
        _set(holder, field, data)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            "What the model says of the one it was made of does not fit together. It is damaged; start from the float"
            " model."
        ) from error


def _set(holder: Any, field: Any, data: bytes) -> None:
    if field.type == FieldDescriptor.TYPE_BYTES:
        setattr(holder, field.name, data)
    elif field.type == FieldDescriptor.TYPE_STRING:
        setattr(holder, field.name, data.decode())
    else:
        holder.ClearField(field.name)
        getattr(holder, field.name).extend(np.frombuffer(data, DTYPES[field.type]).tolist())


def _data(field: Any, value: Any) -> bytes | None:
    """A value as bytes, None where it is small by its type, or a list of texts."""
    if _is_list(field):
        return np.array(value, DTYPES[field.type]).tobytes() if field.type in DTYPES else None
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes(value)
    return str(value).encode() if field.type == FieldDescriptor.TYPE_STRING else None


def _messages(field: Any, value: Any) -> Sequence[tuple[Path, Any]]:
    """The messages in a field, each with its index or key."""
    if _is_map(field):
        if field.message_type.fields_by_name["value"].type != FieldDescriptor.TYPE_MESSAGE:
            return []
        return [([key], value[key]) for key in sorted(value)]
    return [([index], each) for index, each in enumerate(value)] if _is_list(field) else [([], value)]


def _is_list(field: Any) -> bool:
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED


def _is_map(field: Any) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


__all__ = ["Leaf", "Path", "cut", "key_of", "leaves", "put"]
