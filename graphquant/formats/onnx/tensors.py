"""Tensors of ONNX messages as numpy arrays: inline, sparse, and external ones through memory maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from graphquant.errors import ModelError

if TYPE_CHECKING:
    from graphquant.ir import Shape

Array = np.ndarray[Any, Any]

MAX_DENSE = 1 << 24
"""Number of elements that any sparse tensor is written out to: its size says nothing about the file's."""

MAX_SPARSITY = 1 << 10
"""Elements for each one that is stored, up to which a larger one is written out too."""

NAMES: dict[int, str] = {
    code: "string" if code == TensorProto.STRING else np.dtype(helper.tensor_dtype_to_np_dtype(code)).name
    for code in sorted(helper.get_all_tensor_dtypes())
}
"""numpy-like names of the element types."""

CODES: dict[str, int] = {name: code for code, name in NAMES.items()}

_CONSTANT_FORMS: dict[str, Any] = {
    "value": None,
    "sparse_value": None,
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
    "value_string": object,
    "value_strings": object,
}
"""The attributes that may hold a Constant node's value, and the dtype of those that are no tensors."""

SUB_BYTE = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}
"""Bits of the types of which several elements are stored in a byte."""


def type_of(proto: Any) -> tuple[str | None, Shape | None]:
    """Dtype name and static shape of a TypeProto; (None, None) for what is no dense tensor."""
    if not proto.HasField("tensor_type"):
        return None, None
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return NAMES.get(tensor.elem_type), None
    sizes = tuple(d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else None for d in tensor.shape.dim)
    return NAMES.get(tensor.elem_type), sizes


def size_of(tensor: Any) -> Shape:
    """The shape of a TensorProto.

    Raises:
        ModelError: A size is negative.
    """
    sizes = tuple(tensor.dims)
    if any(size < 0 for size in sizes):
        raise ModelError(
            f"The tensor {tensor.name!r} has the shape {list(sizes)}. Sizes cannot be negative: export the model again."
        )
    return sizes


def is_external(tensor: Any) -> bool:
    """Whether the data of a TensorProto is in another file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def bytes_of(dtype: str, count: int) -> int:
    """Bytes that `count` elements take in a file."""
    bits = SUB_BYTE.get(dtype) or 8 * np.dtype(helper.tensor_dtype_to_np_dtype(CODES[dtype])).itemsize
    return (count * bits + 7) // 8


def tensor_value(tensor: Any, folder: Path | None) -> Array:
    """The value of a TensorProto; external data is a read-only memory map of a file in `folder`.

    Raises:
        ModelError: The data is not as long as dtype and shape need, or the external file is unsuitable.
    """
    size_of(tensor)
    if tensor.data_type not in NAMES:
        raise ModelError(
            f"The tensor {tensor.name!r} has the unknown element type {tensor.data_type}. Export the model again."
        )
    if is_external(tensor):
        return _external_value(tensor, folder)
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise ModelError(
            f"The data of tensor {tensor.name!r} does not fit its shape {list(tensor.dims)} of "
            f"{NAMES[tensor.data_type]} ({first_line(error)}). The file is damaged: export the model again."
        ) from error


def sparse_value(sparse: Any, folder: Path | None) -> Array:
    """The value of a SparseTensorProto, written out.

    Raises:
        ModelError: It is too large, or its indices are out of its shape.
    """
    name, shape = sparse.values.name, tuple(sparse.dims)
    count = math.prod(shape)
    values, indices = tensor_value(sparse.values, folder), tensor_value(sparse.indices, folder)
    most = max(MAX_DENSE, MAX_SPARSITY * values.size)
    if any(size < 0 for size in shape) or count > most:
        raise ModelError(
            f"The sparse tensor {name!r} has the shape {list(shape)}. At most {most} elements can be written out."
            " Store it dense."
        )
    dense = np.zeros(shape, values.dtype)
    try:
        if indices.ndim > 1:
            dense[tuple(indices.T)] = values
        else:
            dense.reshape(-1)[indices] = values
    except (IndexError, ValueError) as error:
        raise ModelError(
            f"The sparse tensor {name!r} has indices out of its shape {list(shape)}. Export the model again."
        ) from error
    return dense


def constant_value(node: Any, folder: Path | None) -> Array:
    """The value of a Constant node in any of its forms.

    Raises:
        ModelError: It has none, or one that cannot be read.
    """
    for attr in node.attribute:
        if attr.name in _CONSTANT_FORMS:
            value = attribute_value(attr, folder)
            return value if isinstance(value, np.ndarray) else np.array(value, _CONSTANT_FORMS[attr.name])
    raise ModelError(f"The Constant node that makes {list(node.output)} has no value. Export the model again.")


def external_path(tensor: Any, folder: Path | None) -> Path:
    """The file that holds a tensor's external data.

    Raises:
        ModelError: It is out of the model's folder, or there is no such file.
    """
    location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
    where = f"The external data of tensor {tensor.name!r} is said to be in {location!r}"
    pure = PurePosixPath(location)
    if folder is None:
        raise ModelError(f"{where}, but the model has no folder. Load the model from its file.")
    leaves = pure.is_absolute() or ".." in pure.parts or "\0" in location or PureWindowsPath(location).drive
    path = folder / location
    try:
        if leaves or not location or not path.resolve().is_relative_to(folder.resolve()):
            raise ModelError(
                f"{where}, out of the model's folder. Put the data beside the model, and its path relative to it."
            )
        found = path.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, links in a circle
        raise ModelError(f"{where}, which is no path ({first_line(error)}). Export the model again.") from error
    if not found:
        raise ModelError(f"{where}, but {folder} holds no such file. Put the data file beside the model.")
    return path


class Attrs(Mapping[str, Any]):
    """The attributes of a node, decoded when read; without bodies and references to a function's attributes."""

    __slots__ = ("_folder", "_node", "_protos")

    def __init__(self, node: Any, folder: Path | None) -> None:
        self._node = node
        self._folder = folder
        self._protos: dict[str, Any] | None = None

    def _index(self) -> dict[str, Any]:
        if self._protos is None:
            skipped = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
            self._protos = {a.name: a for a in self._node.attribute if a.type not in skipped and not a.ref_attr_name}
        return self._protos

    def __getitem__(self, name: str) -> Any:
        return attribute_value(self._index()[name], self._folder)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index())

    def __len__(self) -> int:
        return len(self._index())


def attribute_value(attr: Any, folder: Path | None) -> Any:
    """The value of an AttributeProto as numbers, text (bytes if it is no UTF-8), lists of these, or arrays."""
    read = _DECODERS.get(attr.type)
    return read(attr, folder) if read else helper.get_attribute_value(attr)


def _external_value(tensor: Any, folder: Path | None) -> Array:
    path = external_path(tensor, folder)
    name, shape, count = NAMES[tensor.data_type], tuple(tensor.dims), math.prod(tensor.dims)
    if name == "string":
        raise ModelError(
            f"The tensor {tensor.name!r} holds text in an external file. ONNX has no such thing: export it again."
        )
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    needed = bytes_of(name, count)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or needed)
    except ValueError as error:
        raise ModelError(
            f"Offset or length of tensor {tensor.name!r}'s external data is no number. Export the model again."
        ) from error
    if offset < 0 or length != needed or offset + needed > path.stat().st_size:
        raise ModelError(
            f"The tensor {tensor.name!r} needs {needed} bytes from byte {offset} of {path.name}; the model says "
            f"{length}, and the file has {path.stat().st_size}. The file is cut off or another model's: copy it again."
        )
    if not count:
        return np.zeros(shape, dtype)
    if name in SUB_BYTE:
        packed = np.memmap(path, np.uint8, "r", offset, (needed,)).tobytes()
        return np.asarray(numpy_helper.to_array(TensorProto(data_type=tensor.data_type, dims=shape, raw_data=packed)))
    return np.memmap(path, dtype, "r", offset, shape)


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


_DECODERS: dict[int, Callable[[Any, Path | None], Any]] = {
    AttributeProto.STRING: lambda attr, _: _text(attr.s),
    AttributeProto.STRINGS: lambda attr, _: [_text(s) for s in attr.strings],
    AttributeProto.TENSOR: lambda attr, folder: tensor_value(attr.t, folder),
    AttributeProto.TENSORS: lambda attr, folder: [tensor_value(tensor, folder) for tensor in attr.tensors],
    AttributeProto.SPARSE_TENSOR: lambda attr, folder: sparse_value(attr.sparse_tensor, folder),
    AttributeProto.FLOATS: lambda attr, _: list(attr.floats),
    AttributeProto.INTS: lambda attr, _: list(attr.ints),
}


def first_line(error: BaseException) -> str:
    """The first line of what an error of another library says, without the full stop."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
