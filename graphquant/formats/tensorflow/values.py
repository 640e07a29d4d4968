"""TensorProto and AttrValue messages to and from Python values.

Attributes: a shape is a tuple, a list is a list, a type is a `DataType`, a function is a `FunctionName`; so every value
says by itself how it is written back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from graphquant.errors import InternalError, ModelError
from graphquant.formats.tensorflow import proto
from graphquant.ir import DataType, Shape

__all__ = [
    "Attrs",
    "FunctionName",
    "Stored",
    "decode_attr",
    "decode_shape",
    "decode_tensor",
    "encode_attr",
    "encode_tensor",
]

Array = npt.NDArray[Any]

MAX_VALUE_BYTES: Final = 1 << 26
"""Largest constant that may be made from fewer bytes than it takes: a small hostile file must not fill memory."""

_MAX_RANK: Final = 64
_STORAGE: Final = {"qint8": "int8", "quint8": "uint8", "qint16": "int16", "quint16": "uint16", "qint32": "int32"}
_VALUE_FIELDS: Final = {
    "float32": "float_val",
    "float64": "double_val",
    "int64": "int64_val",
    "uint32": "uint32_val",
    "uint64": "uint64_val",
    "bool": "bool_val",
    "float16": "half_val",
    "bfloat16": "half_val",
    "complex64": "scomplex_val",
    "complex128": "dcomplex_val",
    "string": "string_val",
}
_TYPE_NUMBERS: Final = {
    name: number
    for number in sorted(proto.DataType.values(), reverse=True)
    if (name := proto.dtype_name(number)) is not None and number < 100  # noqa: PLR2004  # above are reference types, which no attribute holds
}


class FunctionName(str):
    """The name of a function of the library as the value of an op's attribute."""

    __slots__ = ()


class Attrs(Mapping[str, Any]):
    """The attributes of a node, decoded when they are read; one that the file leaves out has its known default."""

    __slots__ = ("_attr", "_defaults")

    def __init__(self, attr: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._attr = attr
        self._defaults = defaults

    def __getitem__(self, name: str) -> Any:
        # Looking an absent attribute up in the message would add it.
        return decode_attr(self._attr[name]) if name in self._attr else self._defaults[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._attr, *self._defaults}))

    def __len__(self) -> int:
        return len({*self._attr, *self._defaults})


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """The value of a Const node, decoded each time it is asked for."""

    node: Any

    def __call__(self) -> Array:
        """The value; raises ModelError if it is damaged."""
        return decode_tensor(self.node.attr["value"].tensor, f"the constant {self.node.name!r}")


def decode_shape(message: Any) -> Shape | None:
    """A TensorShapeProto as a shape, None if even the rank is unknown."""
    if message.unknown_rank or len(message.dim) > _MAX_RANK:
        return None
    return tuple(dim.size if dim.size >= 0 else None for dim in message.dim)


def decode_attr(value: Any) -> Any:
    """What an AttrValue holds; None for one that holds nothing and for a shape of unknown rank."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "list":
        for descriptor, items in value.list.ListFields():
            return [_decode(descriptor.name, item) for item in items]
        return []
    return _decode(kind, getattr(value, kind))


def _decode(kind: str, item: Any) -> Any:
    decoder = _DECODERS.get(kind)
    return item if decoder is None else decoder(item)


def _text(item: bytes) -> str | bytes:
    try:
        return item.decode()
    except UnicodeDecodeError:
        return item


def encode_attr(value: Any) -> Any:
    """The AttrValue that `decode_attr` turns into `value`."""
    message = proto.AttrValue()
    if isinstance(value, list):
        message.list.SetInParent()
        for item in value:
            kind, encoded = _encode(item)
            field = getattr(message.list, kind)
            field.add().CopyFrom(encoded) if kind in {"shape", "tensor", "func"} else field.append(encoded)
        return message
    kind, encoded = _encode(value)
    if kind in {"shape", "tensor", "func"}:
        getattr(message, kind).CopyFrom(encoded)
    else:
        setattr(message, kind, encoded)
    return message


def _encode(value: Any) -> tuple[str, Any]:
    """The field of AttrValue for `value`, and what it holds then."""
    for types, kind, encoder in _ENCODERS:
        if isinstance(value, types):
            return kind, encoder(value)
    raise InternalError(f"an attribute of type {type(value).__name__} cannot be written to a TensorFlow node.")


def _encode_shape(shape: Shape | None) -> Any:
    if shape is None:
        return proto.TensorShapeProto(unknown_rank=True)
    return proto.TensorShapeProto(dim=[proto.TensorShapeProto.Dim(size=-1 if size is None else size) for size in shape])


def type_number(name: str) -> int:
    """The `DataType` number of a numpy-like dtype name."""
    if name not in _TYPE_NUMBERS:
        raise InternalError(f"TensorFlow has no data type {name!r}.")
    return _TYPE_NUMBERS[name]


def decode_tensor(message: Any, where: str) -> Array:
    """The value of a TensorProto, not to be written to; strings as an object array of bytes.

    Raises:
        ModelError: It is damaged, is made of handles, or is far larger than what the file holds of it.
    """
    name = proto.dtype_name(message.dtype) or ""
    shape = decode_shape(message.tensor_shape)
    if shape is None or None in shape:
        raise ModelError(f"{_upper(where)} has no usable shape. The model file is damaged.")
    sizes = tuple(size for size in shape if size is not None)
    dtype = _numpy_dtype(name, where)
    elements = math.prod(sizes)
    if message.tensor_content and name != "string":
        return _from_content(message.tensor_content, name, dtype, sizes, where)
    values = _values(message, name, dtype)
    if len(values) > elements:
        raise ModelError(
            f"{_upper(where)} holds {len(values)} values for the shape {sizes}. The model file is damaged."
        )
    if len(values) <= 1 or elements == 0:
        # One value stands for all: no memory is needed for its repetitions.
        filler = values[0] if len(values) else (b"" if name == "string" else dtype.type(0))
        _check_size(elements, len(values), dtype, where)
        return np.broadcast_to(np.array(filler, dtype), sizes)
    _check_size(elements, len(values), dtype, where)
    whole = np.empty(elements, dtype)
    whole[: len(values)] = values
    whole[len(values) :] = values[-1]
    return whole.reshape(sizes)


def _check_size(elements: int, held: int, dtype: np.dtype[Any], where: str) -> None:
    if elements > 2 * held and elements * dtype.itemsize > MAX_VALUE_BYTES:
        raise ModelError(
            f"{_upper(where)} claims {elements} elements and the file does not hold them. The model file is damaged."
        )


def _from_content(content: bytes, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> Array:
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ModelError(
            f"{_upper(where)} takes {len(content)} bytes, which {math.prod(shape)} elements of {name} do not fill."
            " The model file is damaged."
        )
    if dtype == np.bool_:
        return np.asarray(np.frombuffer(content, np.uint8) != 0).reshape(shape)
    return np.frombuffer(content, dtype).reshape(shape)


def _values(message: Any, name: str, dtype: np.dtype[Any]) -> Any:
    """The listed values of a TensorProto as a flat array of `dtype`, or a list of bytes."""
    if name.startswith("float8"):
        return np.frombuffer(message.float8_val, dtype)
    listed = getattr(message, _VALUE_FIELDS.get(name, "int_val"))
    if name == "string":
        return list(listed)
    if name in {"float16", "bfloat16"}:
        return np.array(listed, np.int64).astype(np.uint16).view(dtype)
    if dtype.kind == "c":
        pairs = np.array(listed[: len(listed) // 2 * 2], dtype.type(0).real.dtype)
        return pairs.view(dtype)
    if dtype.kind in "iu" or _VALUE_FIELDS.get(name) is None:
        return np.array(listed, np.uint64 if name == "uint64" else np.int64).astype(dtype)
    return np.array(listed, dtype)


def _numpy_dtype(name: str, where: str) -> np.dtype[Any]:
    storage = _STORAGE.get(name, name)
    if storage == "string":
        return np.dtype(object)
    if storage not in {"resource", "variant", ""}:
        return np.dtype(getattr(ml_dtypes, storage, storage))
    raise ModelError(f"{_upper(where)} is of type {name or 'nothing known'}, which has no value to read.")


def _upper(where: str) -> str:
    return where[:1].upper() + where[1:]


def encode_tensor(value: Array) -> Any:
    """A TensorProto holding `value`, its numbers as little-endian `tensor_content`."""
    array = np.asarray(value)
    message = proto.TensorProto()
    for size in array.shape:
        message.tensor_shape.dim.add(size=size)
    message.tensor_shape.SetInParent()
    if array.dtype.kind in "OSU":
        message.dtype = type_number("string")
        flat = [array.item()] if array.ndim == 0 else array.reshape(-1).tolist()
        message.string_val.extend(item.encode() if isinstance(item, str) else item for item in flat)
        return message
    message.dtype = type_number(array.dtype.name)
    little = array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
    message.tensor_content = np.ascontiguousarray(little).tobytes()
    return message


_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "s": _text,
    "type": lambda item: DataType(proto.dtype_name(item) or "invalid"),
    "shape": decode_shape,
    "tensor": lambda item: decode_tensor(item, "an attribute"),
    "func": lambda item: FunctionName(item.name),
}

# The first that fits counts: a DataType is a str, a bool is an int.
_ENCODERS: Final[tuple[tuple[Any, str, Callable[[Any], Any]], ...]] = (
    (DataType, "type", type_number),
    (FunctionName, "func", lambda name: proto.NameAttrList(name=name)),
    (str, "s", str.encode),
    (bytes, "s", bytes),
    (bool | np.bool_, "b", bool),
    (int | np.integer, "i", int),
    (float | np.floating, "f", float),
    (np.ndarray, "tensor", encode_tensor),
    (tuple | None, "shape", _encode_shape),
)
