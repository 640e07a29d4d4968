"""Weights apart from the message, which with all of them takes long to copy and to write, and may fill memory.

They go to a file beside the model one at a time, or to onnxruntime as they are.
"""

from __future__ import annotations

import math
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.unknown_fields import UnknownFieldSet
from onnx import GraphProto, TensorProto, numpy_helper

from graphquant.formats.onnx.calls import graphs
from graphquant.formats.onnx.nodes import tensor_of, value_of
from graphquant.formats.onnx.tensors import CODES, NAMES, SUB_BYTE, bytes_of, is_external, tensor_value
from graphquant.ir import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence
    from pathlib import Path

    from graphquant.formats.beside import Digested
    from graphquant.formats.onnx.tensors import Array

BULKY = 1 << 10
"""Bytes from which a tensor is worth a place in another file; smaller ones may be shapes, and stay in the message."""

ALIGNED = 64
"""Each tensor starts at a multiple of so many bytes."""

WEIGHTS = frozenset({"float16", "float32", "float64", "int8", "uint8", "int16", "uint16"})
"""Types that onnxruntime takes from numpy, of what is surely no shape."""

_LATER = f"graphquant.later {secrets.token_hex(8)}"
"""The key under which a tensor that is still to be filled says which one it is; no file can have it."""

Left = Op | Any
"""A constant whose value is left for later: a new one, or an initializer as the source has it, a TensorProto."""


def copied(source: Any, target: Any) -> list[Left]:
    """Copies a ModelProto to an empty one but for the values of bulky weights of its main graph.

    Returns:
        These weights, as whose places they are left for later.
    """
    if len(UnknownFieldSet(source)) or len(UnknownFieldSet(source.graph)):
        target.CopyFrom(source)
        return []
    left: list[Left] = []
    target.graph.SetInParent()
    for message, copy, apart in ((source, target, "graph"), (source.graph, target.graph, "initializer")):
        for field, value in message.ListFields():
            if field.name == apart:
                continue
            if field.is_repeated:
                getattr(copy, field.name).extend(value)
            else:
                setattr(copy, field.name, value)
    for tensor in source.graph.initializer:
        if is_external(tensor) or NAMES.get(tensor.data_type) not in WEIGHTS or _bytes(tensor) < BULKY:
            target.graph.initializer.add().CopyFrom(tensor)
            continue
        _bare(tensor, target.graph.initializer.add(), {_LATER: len(left)})
        left.append(tensor)
    return left


def new_bytes(ops: Sequence[Left]) -> int:
    """Bytes of the new constants among those that were left for later."""
    return sum(size_of(op) for op in ops if isinstance(op, Op))


def left_bytes(message: Any, ops: Sequence[Left]) -> int:
    """Bytes that a ModelProto lacks, of constants that were left for later."""
    found = (_left(tensor, ops) for tensor in tensors(message))
    return sum(size_of(one) if isinstance(one, Op) else one.ByteSize() for one in found if one is not None)


def size_of(op: Op) -> int:
    """Bytes of the value of a constant; 0 where they are not known."""
    known = op.outputs[0]
    if known.dtype not in CODES or known.dtype == "string" or known.shape is None or None in known.shape:
        return 0
    return bytes_of(known.dtype, math.prod(size or 0 for size in known.shape))


def _bytes(tensor: Any) -> int:
    """Bytes of the value of a TensorProto, as its shape has it."""
    return bytes_of(NAMES[tensor.data_type], math.prod(tensor.dims))


def _bare(tensor: Any, target: Any, told: Mapping[str, Any]) -> None:
    """Makes `target`, which is empty, a TensorProto without its value, and says what is told instead."""
    target.name, target.data_type = tensor.name, tensor.data_type
    target.dims.extend(tensor.dims)
    target.doc_string = tensor.doc_string
    target.metadata_props.extend(tensor.metadata_props)
    target.data_location = TensorProto.EXTERNAL
    for key, what in told.items():
        target.external_data.add(key=key, value=str(what))


def later(op: Op, name: str, place: int) -> Any:
    """The TensorProto of a constant without its value, which is to be filled as the one at `place`."""
    known = op.outputs[0]
    tensor = TensorProto(name=name, data_type=CODES[known.dtype or ""], dims=[size or 0 for size in known.shape or ()])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key=_LATER, value=str(place))
    return tensor


def fill(message: Any, ops: Sequence[Left]) -> None:
    """Gives the tensors of a ModelProto that were left for `later` the values of `ops`.

    Raises:
        ModelError: There is no such tensor in ONNX.
    """
    handed(message, ops, ())


def handed(message: Any, ops: Sequence[Left], read: Container[str]) -> dict[str, Callable[[], Array]]:
    """What gives the weights of a ModelProto that onnxruntime takes beside it; fills in all others that were left.

    Args:
        message: The ModelProto.
        ops: The constants that were left for `later`.
        read: Names of values that something reads; onnxruntime does not know others.

    Raises:
        ModelError: There is no such tensor in ONNX.
    """
    found: dict[str, Callable[[], Array]] = {}
    elsewhere = sum(isinstance(op, Op) for op in ops)
    for tensor in message.graph.initializer:
        op = _left(tensor, ops)
        elsewhere -= isinstance(op, Op)
        if op is not None and tensor.name in read and NAMES[tensor.data_type] in WEIGHTS:
            found[tensor.name] = partial(_value, op)
            tensor.external_data[0].key = "location"  # so that it is left no more
        elif op is not None:
            _fill(tensor, op)
    for tensor in tensors(message) if elsewhere else ():  # in bodies, which take long to look through
        op = _left(tensor, ops)
        if op is not None:
            _fill(tensor, op)
    return found


def _fill(tensor: Any, op: Left) -> None:
    name = tensor.name
    tensor.CopyFrom(tensor_of(op, name) if isinstance(op, Op) else op)
    tensor.name = name


def _value(op: Left) -> Array:
    return np.ascontiguousarray(value_of(op) if isinstance(op, Op) else tensor_value(op, None))


def put_apart(message: Any, ops: Sequence[Left], folder: Path | None, file: Digested) -> list[Any]:
    """Writes the bulky tensors of a ModelProto to `file`, one after the other, and leaves word of their places in it.

    Args:
        message: The ModelProto.
        ops: The constants that were left for `later`.
        folder: Where the external data of its other tensors is.
        file: A file at its start.

    Returns:
        What is to hold the file's name: a StringStringEntryProto of each such tensor.

    Raises:
        ModelError: A tensor cannot be read or written.
        OSError: The file cannot be written.
    """
    places = []
    for tensor in tensors(message):
        op = _left(tensor, ops)
        inside = op is None and not is_external(tensor)
        if tensor.data_type == TensorProto.STRING or (inside and tensor.ByteSize() < BULKY):
            continue
        value = tensor_value(tensor, folder) if op is None else _value(op)
        file.write(bytes(-file.tell() % ALIGNED))
        start = file.tell()
        file.write(_raw(value))
        bare = TensorProto()
        _bare(tensor, bare, {"location": "", "offset": start, "length": file.tell() - start})
        tensor.CopyFrom(bare)
        places.append(tensor.external_data[0])
    return places


def _left(tensor: Any, ops: Sequence[Left]) -> Left | None:
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
