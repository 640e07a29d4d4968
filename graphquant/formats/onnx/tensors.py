"""Tensors of ONNX messages as numpy arrays: inline, sparse, and external ones through memory maps.

Ops and their attributes are converted to NodeProtos and TensorProtos here, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from graphquant.errors import ModelError
from graphquant.formats import LINKS_ADVICE
from graphquant.ir import DataType, Op, Shape
from graphquant.numerics import row_slices
from graphquant.utils.text import decode_bytes

if TYPE_CHECKING:
    from graphquant.numerics import Array

MAX_DENSE_ELEMENTS = 1 << 24
"""Number of elements up to which every sparse tensor is made dense; a small file may have a huge shape."""

MAX_SPARSITY = 1 << 10  # number of elements per stored element up to which a larger sparse tensor is made dense too

DTYPE_NAMES: dict[int, str] = {
    code: "string" if code == TensorProto.STRING else np.dtype(helper.tensor_dtype_to_np_dtype(code)).name
    for code in sorted(helper.get_all_tensor_dtypes())
}
"""numpy-like names of the element types."""

GRAPH_ATTRIBUTES = (AttributeProto.GRAPH, AttributeProto.GRAPHS)

DEFAULT_DOMAINS = frozenset({"", "ai.onnx"})  # names of ONNX's own domain

TEST_DATA_TYPES = frozenset({*range(TensorProto.FLOAT, TensorProto.UINT64 + 1), TensorProto.BFLOAT16})
"""Element types that tensors of test data may have."""

DTYPE_CODES: dict[str, int] = {name: code for code, name in DTYPE_NAMES.items()}

_CONSTANT_VALUE_DTYPES: dict[str, Any] = {
    "value": None,
    "sparse_value": None,
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
    "value_string": object,
    "value_strings": object,
}
"""The attributes that may hold the value of a Constant node, and the dtype of those that are no tensors."""

SUB_BYTE_BITS = {
    **dict.fromkeys(("int2", "uint2"), 2),
    **dict.fromkeys(("int4", "uint4", "float4_e2m1fn"), 4),
    **dict.fromkeys(("float6_e2m3fn", "float6_e3m2fn"), 6),
}
"""Bits of the types that store several elements in a byte."""


TypeAndShape = tuple[str | None, Shape | None]
"""Data type and shape, each None if unknown."""


def type_and_shape(proto: Any) -> TypeAndShape:
    """Return dtype name and static shape of a TypeProto; (None, None) if it is no dense tensor."""
    if not proto.HasField("tensor_type"):
        return None, None
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return DTYPE_NAMES.get(tensor.elem_type), None
    sizes = tuple(d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else None for d in tensor.shape.dim)
    return DTYPE_NAMES.get(tensor.elem_type), sizes


def element_type(tensor: Any) -> str:
    """Return the dtype of a TensorProto; raise ModelError if it is unknown."""
    if tensor.data_type not in DTYPE_NAMES:
        raise ModelError(
            f"The tensor {tensor.name!r} has the unknown element type {tensor.data_type}. Export the model again."
        )
    return DTYPE_NAMES[tensor.data_type]


def tensor_shape(tensor: Any) -> Shape:
    """Return the shape of a TensorProto; raise ModelError if a size is negative."""
    sizes = tuple(tensor.dims)
    if any(size < 0 for size in sizes):
        raise ModelError(
            f"The tensor {tensor.name!r} has the shape {list(sizes)}. Sizes cannot be negative: export the model again."
        )
    return sizes


def parse_test_tensor(content: bytes) -> tuple[str, Array]:
    """Return name and values of a serialized TensorProto of test data; raise ValueError if that fails."""
    try:
        tensor = TensorProto.FromString(content)
    except DecodeError as error:
        raise ValueError("it is not a tensor; sequences and optionals are not supported") from error
    if tensor.HasField("segment") or tensor.data_type not in TEST_DATA_TYPES:
        raise ValueError(
            f"it is a sequence, an optional, or a tensor of the type {tensor.data_type}, which are not supported"
        )
    if tensor.data_location:
        raise ValueError("its values are in another file, which is not supported")
    shape = tuple(tensor.dims)
    tensor.dims[:] = [-1]  # all values that are stored, to compare their number with the shape
    values = numpy_helper.to_array(tensor)
    if any(size < 0 for size in shape) or math.prod(shape) != values.size:
        raise ValueError(f"it has {values.size} values for the shape {list(shape)}")
    return tensor.name, np.asarray(values.reshape(shape))


def is_external(tensor: Any) -> bool:
    """Return True if the data of a TensorProto is in another file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def stored_bytes(dtype: str, count: int) -> int:
    """Return the number of bytes that `count` elements take in a file."""
    bits = SUB_BYTE_BITS.get(dtype) or 8 * np.dtype(helper.tensor_dtype_to_np_dtype(DTYPE_CODES[dtype])).itemsize
    return (count * bits + 7) // 8


def tensor_bytes(tensor: Any) -> int:
    """Return the number of bytes of a TensorProto's value, from its shape."""
    return stored_bytes(element_type(tensor), math.prod(tensor.dims))


def external_location(tensor: Any) -> str:
    """Return the name of the file of external data, relative to the model's folder, "" if there is none."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def tensor_value(tensor: Any, folder: Path | None) -> Array:
    """Return the value of a TensorProto; external data is a read-only memory map of a file in `folder`.

    Raises a ModelError if the size of the data does not match dtype and shape, or the external file is unsuitable.
    """
    tensor_shape(tensor)
    dtype = element_type(tensor)
    if is_external(tensor):
        return _external_array(tensor, folder)
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise ModelError(
            f"The data of tensor {tensor.name!r} does not fit its shape {list(tensor.dims)} of {dtype} "
            f"({first_line(error)}). The file is damaged: export the model again."
        ) from error


def sparse_value(sparse: Any, folder: Path | None) -> Array:
    """Return the dense value of a SparseTensorProto; raise ModelError if it is too large or inconsistent."""
    name, shape = sparse.values.name, tuple(sparse.dims)
    count = math.prod(shape)
    values, indices = tensor_value(sparse.values, folder), tensor_value(sparse.indices, folder)
    max_elements = max(MAX_DENSE_ELEMENTS, MAX_SPARSITY * values.size)
    if any(size < 0 for size in shape) or count > max_elements:
        raise ModelError(
            f"The sparse tensor {name!r} has the shape {list(shape)}. At most {max_elements} elements can be made "
            "dense. Store it as a dense tensor."
        )
    dense = np.zeros(shape, values.dtype)
    try:
        if indices.ndim > 1:
            dense[tuple(indices.T)] = values
        else:
            dense.reshape(-1)[indices] = values
    except (IndexError, ValueError) as error:
        raise ModelError(
            f"The sparse tensor {name!r} has indices outside its shape {list(shape)}. Export the model again."
        ) from error
    return dense


def constant_value(node: Any, folder: Path | None) -> Array:
    """Return the value of a Constant node in any of its forms; raise ModelError if it has none."""
    for attr in node.attribute:
        if attr.name in _CONSTANT_VALUE_DTYPES:
            value = attribute_value(attr, folder)
            return value if isinstance(value, np.ndarray) else np.array(value, _CONSTANT_VALUE_DTYPES[attr.name])
    raise ModelError(f"The Constant node that produces {list(node.output)} has no value. Export the model again.")


def external_path(tensor: Any, folder: Path | None, *, allow_links: bool = False) -> Path:
    """Return the file of a tensor's external data; raise ModelError if it is missing or outside the folder.

    With `allow_links`, the file may be a link out of the folder. Its name stays relative to the folder.
    """
    location = external_location(tensor)
    claim = f"The external data of tensor {tensor.name!r} should be in {location!r}"
    pure = PurePosixPath(location)
    if folder is None:
        raise ModelError(f"{claim}, but the model has no folder. Load the model from its file.")
    escapes = pure.is_absolute() or ".." in pure.parts or "\0" in location or PureWindowsPath(location).drive
    path = folder / location
    try:
        if not (escapes or allow_links or path.resolve().is_relative_to(folder.resolve())):
            raise ModelError(
                f"{claim}, which is a link to {path.resolve()}, outside the model's folder. {LINKS_ADVICE}."
            )
        if escapes or not location:
            raise ModelError(
                f"{claim}, outside the model's folder. Move the data into that folder and store its relative path."
            )
        exists = path.is_file()
    except (OSError, RuntimeError) as error:  # the name is too long, or links form a cycle
        raise ModelError(
            f"{claim}, which is not a valid path ({first_line(error)}). Export the model again."
        ) from error
    if not exists:
        raise ModelError(f"{claim}, but {folder} contains no such file. Put the data file next to the model.")
    return path


class OnnxAttributes(Mapping[str, Any]):
    """The attributes of a node, decoded when read, without bodies and references to a function's attributes."""

    __slots__ = ("_folder", "_node", "_protos")

    def __init__(self, node: Any, folder: Path | None) -> None:
        self._node = node
        self._folder = folder
        self._protos: dict[str, Any] | None = None

    def _protos_by_name(self) -> dict[str, Any]:
        if self._protos is None:
            attrs = (attr for attr in self._node.attribute if attr.type not in GRAPH_ATTRIBUTES)
            self._protos = {attr.name: attr for attr in attrs if not attr.ref_attr_name}
        return self._protos

    def __getitem__(self, name: str) -> Any:
        return attribute_value(self._protos_by_name()[name], self._folder)

    def __iter__(self) -> Iterator[str]:
        return iter(self._protos_by_name())

    def __len__(self) -> int:
        return len(self._protos_by_name())


def attribute_value(attr: Any, folder: Path | None) -> Any:
    """Return the value of an AttributeProto as numbers, text (bytes if it is not UTF-8), lists of these, or arrays."""
    decode = _DECODERS.get(attr.type)
    return decode(attr, folder) if decode else helper.get_attribute_value(attr)


def initializer_reader(tensor: Any, folder: Path | None) -> Callable[[], Array]:
    """Return the function that reads a TensorProto, a `TensorReader` if its rows can be read alone."""
    has_rows = is_external(tensor) and DTYPE_NAMES.get(tensor.data_type) not in SUB_BYTE_BITS
    return TensorReader(tensor, folder) if has_rows else partial(tensor_value, tensor, folder)


@dataclass(frozen=True, slots=True, eq=False)
class TensorReader:
    """Reads external data of a TensorProto in `folder`, or some rows of it; raises ModelErrors as `tensor_value`."""

    tensor: Any
    folder: Path | None

    def __call__(self) -> Array:
        """Return the whole value."""
        return tensor_value(self.tensor, self.folder)

    def read_rows(self, rows: slice) -> Array:
        """Return the value of consecutive rows."""
        return _external_array(self.tensor, self.folder, rows)


def read_slabs(tensor: Any, folder: Path | None) -> Iterator[Array]:
    """Yield the value of a TensorProto; of external data some rows at a time. Raises ModelErrors as `tensor_value`."""
    reader, shape = initializer_reader(tensor, folder), tuple(tensor.dims)
    if isinstance(reader, TensorReader) and shape:
        yield from map(reader.read_rows, row_slices(shape))
    else:
        yield reader()


def _external_array(tensor: Any, folder: Path | None, rows: slice | None = None) -> Array:
    """Return the value of external data, or of consecutive `rows`, for which no element may share a byte."""
    path = external_path(tensor, folder)
    name, shape, count = DTYPE_NAMES[tensor.data_type], tuple(tensor.dims), math.prod(tensor.dims)
    if name == "string":
        raise ModelError(
            f"The tensor {tensor.name!r} contains text in an external file, which ONNX does not allow: export it again."
        )
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    expected_bytes = stored_bytes(name, count)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or expected_bytes)
    except ValueError as error:
        raise ModelError(
            f"Offset or length of tensor {tensor.name!r}'s external data is not a number. Export the model again."
        ) from error
    if offset < 0 or length != expected_bytes or offset + expected_bytes > path.stat().st_size:
        raise ModelError(
            f"The tensor {tensor.name!r} needs {expected_bytes} bytes from byte {offset} of {path.name}. The model "
            f"states {length}, and the file has {path.stat().st_size}. The file is truncated, or it belongs to another "
            "model: copy it again."
        )
    if rows is not None:
        start, stop, _ = rows.indices(shape[0])
        row_bytes, shape = expected_bytes // max(shape[0], 1), (max(stop - start, 0), *shape[1:])
        offset, expected_bytes = offset + start * row_bytes, shape[0] * row_bytes
    data = np.fromfile(path, np.uint8, expected_bytes, offset=offset)
    if data.size < expected_bytes:  # A file that becomes shorter while it is mapped to memory would end the process.
        raise ModelError(f"{path} became shorter while it was read. Copy it again, and change no file during a run.")
    if name in SUB_BYTE_BITS:
        proto = TensorProto(data_type=tensor.data_type, dims=shape, raw_data=data.tobytes())
        return np.asarray(numpy_helper.to_array(proto))
    # The type says that the values can be read again, so that they need not stay in memory.
    values: Array = data.view(dtype).reshape(shape).view(np.memmap)
    return values


_DECODERS: dict[int, Callable[[Any, Path | None], Any]] = {
    AttributeProto.STRING: lambda attr, _: decode_bytes(attr.s),
    AttributeProto.STRINGS: lambda attr, _: [decode_bytes(s) for s in attr.strings],
    AttributeProto.TENSOR: lambda attr, folder: tensor_value(attr.t, folder),
    AttributeProto.TENSORS: lambda attr, folder: [tensor_value(tensor, folder) for tensor in attr.tensors],
    AttributeProto.SPARSE_TENSOR: lambda attr, folder: sparse_value(attr.sparse_tensor, folder),
    AttributeProto.FLOATS: lambda attr, _: list(attr.floats),
    AttributeProto.INTS: lambda attr, _: list(attr.ints),
}


_GROUP = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"  # parentheses in two others at most
_EXTENSION = r"\.(?:cc|cpp|cu|cuh|h|hpp|inc):\d+"  # and the number of the line
CPP_POSITION = re.compile(
    r"^\[ONNXRuntimeError\] : \d+ : \w+ : |"  # a status code
    rf"(?<![^\s:])(?:/\S+{_EXTENSION}: \w+: Assertion `[^`]*` failed: |"  # onnx
    # The signature of the function is behind a path, its name behind the name of a file and a path of Windows.
    rf"(?:/\S+{_EXTENSION} [^()]*{_GROUP}(?:[^\s()]*{_GROUP}(?:[>&]+(?!\S))?| const\b| \[with [^\]]*\])*|"
    rf"(?:[A-Z]:\\\S+|\w+){_EXTENSION} [\w:]+) "
    r"(?:.*? was false\. (?=\S))?)"  # the condition, if a sentence follows
)
"""Text about the C++ code of another library in its error messages."""

SEARCHED_CHARACTERS = 4_000  # at the start of an error message; the search takes time with the square of the length


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, without its place in C++ code and the full stop."""
    line = str(error).strip().partition("\n")[0]
    start = CPP_POSITION.sub("", line[:SEARCHED_CHARACTERS])  # a name in a model may have millions
    return (start + line[SEARCHED_CHARACTERS:]).strip(". ") or type(error).__name__


def runtime_reason(error: ModelError) -> str:
    """Return onnxruntime's own message, without the advice around it."""
    return first_line(error.__cause__ or error)


RULE_KEY = "graphquant.rule"
ANCHOR_KEY = "graphquant.anchor"


def write_node(node: Any, op: Op, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Write a new op to an empty NodeProto; raise ModelError if an attribute cannot be written."""
    count = max((slot + 1 for slot, value in enumerate(inputs) if value), default=0)  # no empty slots at the end
    node.name, node.op_type, node.domain, node.doc_string = op.name, op.type, op.domain, op.notes.get("", "")
    node.input.extend(inputs[:count])
    node.output.extend(outputs)
    _write_attributes(node, op, {})


def write_constant_node(node: Any, op: Op, output: str) -> None:
    """Write the constant `op` as a Constant node to an empty NodeProto, for graphs without initializers."""
    node.name, node.op_type = op.name, "Constant"
    node.output.append(output)
    node.attribute.append(helper.make_attribute("value", constant_tensor(op, output)))


def patch_node(node: Any, op: Op, loaded_op: Op) -> None:
    """Update `node`, the copy of the source of `loaded_op`, to the type, attributes, outputs and value of `op`."""
    node.op_type, node.domain = op.type, op.domain or ("ai.onnx" if node.domain == "ai.onnx" else "")
    for port, output in enumerate(op.outputs):
        if port < len(node.output):
            node.output[port] = output.name
        else:
            node.output.append(output.name)
    if op.read_value is not None and op.read_value is not loaded_op.read_value:
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("value", constant_tensor(op, "")))
    elif op.attrs is not loaded_op.attrs:
        preserved = [attr for attr in node.attribute if attr.type in GRAPH_ATTRIBUTES or attr.ref_attr_name]
        types = {attr.name: attr.type for attr in node.attribute}
        del node.attribute[:]
        node.attribute.extend(preserved)
        _write_attributes(node, op, types)


def constant_tensor(op: Op, name: str) -> Any:
    """Return the TensorProto of the value of the constant `op`; raise ModelError if ONNX cannot represent the value."""
    try:
        return numpy_helper.from_array(constant_op_value(op), name)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(
            f"The constant {op.name!r} cannot be written to ONNX ({error}). Use a dtype that ONNX supports."
        ) from error


def constant_op_value(op: Op) -> Any:
    """Return the value of a constant; raise ModelError if the constant has no value."""
    if op.read_value is None:
        raise ModelError(f"The constant {op.name!r} has no value. Give it one.")
    return op.read_value()


def write_rule_metadata(node: Any, op: Op) -> None:
    """Store the rule that inserted the op, the tensor it belongs to, and its notes in the metadata of `node`."""
    for key, value in {RULE_KEY: op.rule, ANCHOR_KEY: op.anchor, **op.notes}.items():
        if key and value:
            node.metadata_props.add(key=key, value=value)


def _write_attributes(node: Any, op: Op, types: Mapping[str, int]) -> None:
    for name, value in op.attrs.items():
        encoded = DTYPE_CODES[value] if isinstance(value, DataType) else value
        if isinstance(encoded, np.ndarray):
            encoded = numpy_helper.from_array(encoded)
        try:
            node.attribute.append(helper.make_attribute(name, encoded, attr_type=types.get(name)))
        except (ValueError, TypeError) as error:
            raise ModelError(
                f"Attribute {name!r} of {op.name!r} cannot be written to ONNX ({error}). Give it another value."
            ) from error
