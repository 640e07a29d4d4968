"""Weights in a file beside the model, written one at a time: a message with all of them would fill memory."""

from __future__ import annotations

import math
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from onnx import GraphProto, TensorProto, numpy_helper

from graphquant.formats.onnx.calls import graphs
from graphquant.formats.onnx.nodes import tensor_of, value_of
from graphquant.formats.onnx.tensors import CODES, SUB_BYTE, bytes_of, is_external, tensor_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from graphquant.formats.onnx.tensors import Array
    from graphquant.ir import Op

BULKY = 1 << 10
"""Bytes from which a tensor is worth a place in another file; smaller ones may be shapes, and stay in the message."""

ALIGNED = 64
"""Each tensor starts at a multiple of so many bytes."""

_LATER = "graphquant.later"
"""The key under which a tensor that is still to be filled says which one it is."""


def size_of(op: Op) -> int:
    """Bytes of the value of a constant; 0 where they are not known."""
    known = op.outputs[0]
    if known.dtype not in CODES or known.dtype == "string" or known.shape is None or None in known.shape:
        return 0
    return bytes_of(known.dtype, math.prod(size or 0 for size in known.shape))


def later(op: Op, name: str, place: int) -> Any:
    """The TensorProto of a constant without its value, which is to be filled as the one at `place`."""
    known = op.outputs[0]
    tensor = TensorProto(name=name, data_type=CODES[known.dtype or ""], dims=[size or 0 for size in known.shape or ()])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key=_LATER, value=str(place))
    return tensor


def fill(message: Any, ops: Sequence[Op]) -> None:
    """Gives the tensors of a ModelProto that were left for `later` the values of `ops`.

    Raises:
        ModelError: There is no such tensor in ONNX.
    """
    for tensor in tensors(message):
        op = _left(tensor, ops)
        if op is not None:
            tensor.CopyFrom(tensor_of(op, tensor.name))


def put_apart(message: Any, ops: Sequence[Op], folder: Path | None, file: IO[bytes], location: str) -> None:
    """Writes the bulky tensors of a ModelProto to `file`, one after the other, and leaves word of their places.

    Args:
        message: The ModelProto.
        ops: The constants that were left for `later`.
        folder: Where the external data of its other tensors is.
        file: A file at its start.
        location: What the model is to call it.

    Raises:
        ModelError: A tensor cannot be read or written.
        OSError: The file cannot be written.
    """
    for tensor in tensors(message):
        op = _left(tensor, ops)
        inside = op is None and not is_external(tensor)
        if tensor.data_type == TensorProto.STRING or (inside and tensor.ByteSize() < BULKY):
            continue
        value = tensor_value(tensor, folder) if op is None else value_of(op)
        file.write(bytes(-file.tell() % ALIGNED))
        start = file.tell()
        file.write(_raw(value))
        bare = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, doc_string=tensor.doc_string)
        bare.metadata_props.extend(tensor.metadata_props)
        bare.data_location = TensorProto.EXTERNAL
        for key, what in (("location", location), ("offset", start), ("length", file.tell() - start)):
            bare.external_data.add(key=key, value=str(what))
        tensor.CopyFrom(bare)


def _left(tensor: Any, ops: Sequence[Op]) -> Op | None:
    """The constant whose value the tensor is to get."""
    entry = next(iter(tensor.external_data), None) if is_external(tensor) else None
    return ops[int(entry.value)] if entry is not None and entry.key == _LATER else None


def _raw(value: Array) -> Any:
    """The bytes of an array as ONNX stores them, without copying where it can be helped."""
    if value.dtype.name in SUB_BYTE:
        return numpy_helper.from_array(value).raw_data
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def tensors(message: Any) -> Iterator[Any]:
    """The tensors of a ModelProto: initializers and attributes, in the graph, its bodies and its functions."""
    for graph in (graph for holder in reversed([message.graph, *message.functions]) for graph in graphs(holder)):
        if isinstance(graph, GraphProto):
            yield from graph.initializer
            yield from (part for sparse in graph.sparse_initializer for part in (sparse.values, sparse.indices))
        for node in graph.node:
            for attr in node.attribute:
                yield from [attr.t] if attr.HasField("t") else []
                yield from attr.tensors
