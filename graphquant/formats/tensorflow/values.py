"""Convert TensorProto and AttrValue messages to Python values and back, and evaluate operations on constants.

As attribute values, a shape is a tuple, a list is a list, a type is a `DataType` and a function is a `FunctionName`. So
the Python type of a value determines the AttrValue field to write it to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from graphquant.errors import InternalError, ModelError
from graphquant.formats.tensorflow import proto
from graphquant.ir import DataType, Op, Shape
from graphquant.numerics import Array, numpy_dtype
from graphquant.utils.text import decode_bytes

MAX_VALUE_BYTES: Final = 1 << 26
"""Limit on the bytes of a constant that expands its stored bytes: a small hostile file must not fill memory."""

_MAX_RANK: Final = 64
# numpy has no quantized types, so their values are read as the integers that store them.
_STORAGE_DTYPES: Final = {"qint8": "int8", "quint8": "uint8", "qint16": "int16", "quint16": "uint16", "qint32": "int32"}
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
    if (name := proto.dtype_name(number)) is not None and number < 100  # noqa: PLR2004  # larger numbers are reference types, which no attribute holds
}


class FunctionName(str):
    """The name of a library function as the value of an op's attribute."""

    __slots__ = ()


class NodeAttrs(Mapping[str, Any]):
    """The attributes of a node, decoded on access. An absent attribute has its default."""

    __slots__ = ("_attr", "_defaults")

    def __init__(self, attr: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._attr = attr
        self._defaults = defaults

    def __getitem__(self, name: str) -> Any:
        # Reading an absent attribute of the message would add it.
        return decode_attr(self._attr[name]) if name in self._attr else self._defaults[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._attr, *self._defaults}))

    def __len__(self) -> int:
        return len({*self._attr, *self._defaults})


@dataclass(frozen=True, slots=True, eq=False)
class ConstValue:
    """The value of a Const node, decoded on each call."""

    node: Any

    def __call__(self) -> Array:
        """Return the value; raise ModelError if it is damaged."""
        return decode_tensor(self.node.attr["value"].tensor, f"the constant {self.node.name!r}")


def decode_shape(message: Any) -> Shape | None:
    """Convert a TensorShapeProto to a shape, None if the rank is unknown."""
    if message.unknown_rank or len(message.dim) > _MAX_RANK:
        return None
    return tuple([None if (size := dim.size) < 0 else size for dim in message.dim])


def decode_attr(value: Any) -> Any:
    """Return the value of an AttrValue; None for an empty one and for a shape of unknown rank."""
    if (kind := value.WhichOneof("value")) is None:
        return None
    if kind == "list":
        return [_decode_item(descriptor.name, item) for descriptor, items in value.list.ListFields() for item in items]
    return _decode_item(kind, getattr(value, kind))


def _decode_item(kind: str, item: Any) -> Any:
    decoder = _DECODERS.get(kind)
    return item if decoder is None else decoder(item)


def encode_attr(value: Any) -> Any:
    """Return the AttrValue that `decode_attr` converts to `value`."""
    if not isinstance(value, list):
        kind, encoded = _encode_item(value)
        return proto.AttrValue(**{kind: encoded})
    message = proto.AttrValue()
    message.list.SetInParent()
    for element in value:
        kind, encoded = _encode_item(element)
        getattr(message.list, kind).append(encoded)
    return message


def _encode_item(value: Any) -> tuple[str, Any]:
    for types, kind, encoder in _ENCODERS:
        if isinstance(value, types):
            return kind, encoder(value)
    raise InternalError(f"an attribute of type {type(value).__name__} cannot be written to a TensorFlow node.")


def encode_shape(shape: Shape | None) -> Any:
    """Convert a shape to a TensorShapeProto."""
    if shape is None:
        return proto.TensorShapeProto(unknown_rank=True)
    return proto.TensorShapeProto(dim=[proto.TensorShapeProto.Dim(size=-1 if size is None else size) for size in shape])


def type_number(name: str) -> int:
    """Return the `DataType` number of a numpy-like dtype name."""
    if name not in _TYPE_NUMBERS:
        raise InternalError(f"TensorFlow has no data type {name!r}.")
    return _TYPE_NUMBERS[name]


def storage_dtype(name: str) -> np.dtype[Any] | None:
    """Return the numpy dtype that stores the numbers of a type, None for strings and handles."""
    name = _STORAGE_DTYPES.get(name, name)
    return None if name in {"string", "resource", "variant"} else numpy_dtype(name)


def decode_tensor(message: Any, description: str) -> Array:
    """Return the value of a TensorProto, read-only; strings as an object array of bytes."""
    subject = f"{description[:1].upper()}{description[1:]}"

    def damaged(problem: str) -> ModelError:
        return ModelError(f"{subject} {problem}. The model file is damaged.")

    name = proto.dtype_name(message.dtype) or ""
    shape = decode_shape(message.tensor_shape)
    if shape is None or None in shape:
        raise damaged("has no usable shape")
    sizes = tuple(size for size in shape if size is not None)
    elements = math.prod(sizes)
    dtype = np.dtype(object) if name == "string" else storage_dtype(name) if name else None
    if dtype is None:
        raise ModelError(f"{subject} has {name or 'an unknown type'}, which cannot be read as a value.")
    content = message.tensor_content
    if content and name != "string":
        if len(content) != elements * dtype.itemsize:
            raise damaged(f"has {len(content)} bytes, which {elements} elements of {name} do not fill")
        array = np.frombuffer(content, np.uint8) != 0 if dtype == np.bool_ else np.frombuffer(content, dtype)
        return array.reshape(sizes)
    values = _decode_listed_values(message, name, dtype)
    if len(values) > elements:
        raise damaged(f"holds {len(values)} values for the shape {sizes}")
    if elements > 2 * len(values) and elements * dtype.itemsize > MAX_VALUE_BYTES:
        raise damaged(f"claims {elements} elements, which the file does not contain")
    if len(values) <= 1 or elements == 0:
        # A single value repeats, so the array is broadcast and its repetitions need no memory.
        filler = values[0] if len(values) else (b"" if name == "string" else dtype.type(0))
        return np.broadcast_to(np.array(filler, dtype), sizes)
    array = np.empty(elements, dtype)
    array[: len(values)] = values
    array[len(values) :] = values[-1]
    return array.reshape(sizes)


def _decode_listed_values(message: Any, name: str, dtype: np.dtype[Any]) -> Any:
    """Return the listed values of a TensorProto as a flat array of `dtype`, or a list of bytes."""
    if name.startswith("float8"):
        return np.frombuffer(message.float8_val, dtype)
    listed = getattr(message, _VALUE_FIELDS.get(name, "int_val"))
    if name == "string":
        return list(listed)
    if name in {"float16", "bfloat16"}:
        return np.array(listed, np.int64).astype(np.uint16).view(dtype)
    if dtype.kind == "c":
        return np.array(listed[: len(listed) // 2 * 2], dtype.type(0).real.dtype).view(dtype)
    if dtype.kind in "iu" or name not in _VALUE_FIELDS:
        return np.array(listed, np.uint64 if name == "uint64" else np.int64).astype(dtype)
    return np.array(listed, dtype)


def encode_tensor(value: Array) -> Any:
    """Return a TensorProto of `value`, its numbers as little-endian `tensor_content`."""
    array = np.asarray(value)
    message = proto.TensorProto(tensor_shape=encode_shape(array.shape))
    if array.dtype.kind in "OSU":
        message.dtype = type_number("string")
        flat = [array.item()] if array.ndim == 0 else array.reshape(-1).tolist()
        message.string_val.extend(element.encode() if isinstance(element, str) else element for element in flat)
        return message
    message.dtype = type_number(array.dtype.name)
    little = array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
    message.tensor_content = np.ascontiguousarray(little).tobytes()
    return message


def set_constant(node: Any, value: Array) -> None:
    """Write the value and dtype of a Const node."""
    tensor = encode_tensor(value)
    node.attr["dtype"].type = tensor.dtype
    node.attr["value"].tensor.CopyFrom(tensor)


_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "s": decode_bytes,
    "type": lambda item: DataType(proto.dtype_name(item) or "invalid"),
    "shape": decode_shape,
    "tensor": lambda item: decode_tensor(item, "an attribute"),
    "func": lambda item: FunctionName(item.name),
}

# The first match counts: a DataType is a str, a bool is an int.
_ENCODERS: Final[tuple[tuple[Any, str, Callable[[Any], Any]], ...]] = (
    (DataType, "type", type_number),
    (FunctionName, "func", lambda name: proto.NameAttrList(name=name)),
    (str, "s", str.encode),
    (bytes, "s", bytes),
    (bool | np.bool_, "b", bool),
    (int | np.integer, "i", int),
    (float | np.floating, "f", float),
    (np.ndarray, "tensor", encode_tensor),
    (tuple | None, "shape", encode_shape),
)

Arrays = list[Array]

MAX_ELEMENTS: Final = 1 << 26
"""Limit on a result's elements: a small hostile model must not fill memory by broadcasting."""


def evaluate_tf_op(op: Op, inputs: Arrays) -> Arrays | None:
    """Return the outputs of `op` for `inputs`; None if the operation is not in the table or rejects such inputs."""
    if (function := _EVALUATORS.get(op.type)) is None:
        return None
    try:
        with np.errstate(all="ignore"):
            outputs = function(op, inputs)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, np.exceptions.AxisError):
        return None  # the node is damaged; TensorFlow would refuse it too
    return None if any(output.size > MAX_ELEMENTS for output in outputs) else outputs


def _elementwise_binary(function: Callable[[Array, Array], Array]) -> Callable[[Op, Arrays], Arrays]:
    def evaluate_operands(_unused_op: Op, inputs: Arrays) -> Arrays:
        x, y = inputs
        if x.dtype != y.dtype or int(np.prod(np.broadcast_shapes(x.shape, y.shape))) > MAX_ELEMENTS:
            raise ValueError
        return [np.asarray(function(x, y)).astype(x.dtype, copy=False)]

    return evaluate_operands


def _elementwise_unary(function: Callable[[Array], Array]) -> Callable[[Op, Arrays], Arrays]:
    return lambda _op, inputs: [np.asarray(function(inputs[0])).astype(inputs[0].dtype, copy=False)]


def _divide_floats(dividend: Array, divisor: Array) -> Array:
    if dividend.dtype.kind in "iu":
        raise TypeError
    return np.divide(dividend, divisor)


def _evaluate_cast(op: Op, inputs: Arrays) -> Arrays:
    return [inputs[0].astype(numpy_dtype(str(op.attrs["DstT"])))]


def _evaluate_strided_slice(op: Op, inputs: Arrays) -> Arrays:
    x, begin, end, strides = inputs[0], *(_int_list(value) for value in inputs[1:4])
    names = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    masks = {name: int(op.attrs.get(f"{name}_mask", 0)) for name in names}
    index: list[Any] = []
    for position, (first, last, step) in enumerate(zip(begin, end, strides, strict=True)):
        bit = 1 << position
        if masks["ellipsis"] & bit:
            index.append(Ellipsis)
        elif masks["new_axis"] & bit:
            index.append(np.newaxis)
        elif masks["shrink_axis"] & bit:
            index.append(first)
        else:
            index.append(slice(None if masks["begin"] & bit else first, None if masks["end"] & bit else last, step))
    return [x[tuple(index)]]


def _evaluate_slice(_op: Op, inputs: Arrays) -> Arrays:
    x, begin, size = inputs[0], _int_list(inputs[1]), _int_list(inputs[2])
    pairs = zip(begin, size, strict=True)
    return [x[tuple(slice(start, None if length == -1 else start + length) for start, length in pairs)]]


def _evaluate_split(op: Op, inputs: Arrays) -> Arrays:
    sections = int(op.attrs["num_split"])
    if not 0 < sections <= inputs[1].size:
        raise ValueError
    return np.split(inputs[1], sections, axis=int(inputs[0]))


def _evaluate_split_v(_op: Op, inputs: Arrays) -> Arrays:
    x, sizes, axis = inputs[0], _int_list(inputs[1]), int(inputs[2])
    fixed_total = sum(size for size in sizes if size >= 0)
    section_sizes = [size if size >= 0 else x.shape[axis] - fixed_total for size in sizes]
    return np.split(x, np.cumsum(section_sizes)[:-1], axis=axis)


def _int_list(value: Array) -> list[int]:
    return [int(number) for number in value.reshape(-1)]


_EVALUATORS: Final[dict[str, Callable[[Op, Arrays], Arrays]]] = {
    "Add": _elementwise_binary(np.add),
    "AddV2": _elementwise_binary(np.add),
    "Sub": _elementwise_binary(np.subtract),
    "Mul": _elementwise_binary(np.multiply),
    "RealDiv": _elementwise_binary(_divide_floats),
    "Maximum": _elementwise_binary(np.maximum),
    "Minimum": _elementwise_binary(np.minimum),
    "Neg": _elementwise_unary(np.negative),
    "Sqrt": _elementwise_unary(np.sqrt),
    "Rsqrt": _elementwise_unary(lambda x: np.divide(np.ones((), x.dtype), np.sqrt(x))),
    "Square": _elementwise_unary(np.square),
    "Cast": _evaluate_cast,
    "Reshape": lambda _op, inputs: [inputs[0].reshape(_int_list(inputs[1]))],
    "Transpose": lambda _op, inputs: [np.transpose(inputs[0], _int_list(inputs[1]))],
    "Squeeze": lambda op, inputs: [np.squeeze(inputs[0], tuple(op.attrs.get("squeeze_dims") or ()) or None)],
    "ExpandDims": lambda _op, inputs: [np.expand_dims(inputs[0], int(inputs[1]))],
    "Slice": _evaluate_slice,
    "StridedSlice": _evaluate_strided_slice,
    "ConcatV2": lambda _op, inputs: [np.concatenate(inputs[:-1], axis=int(inputs[-1]))],
    "Pack": lambda op, inputs: [np.stack(inputs, axis=int(op.attrs.get("axis", 0)))],
    "Split": _evaluate_split,
    "SplitV": _evaluate_split_v,
}
