"""Weights that are kept out of the message until they are written to a file or passed to onnxruntime.

A message with all weights takes long to copy and to write, and may fill memory. Instead, weights are read one at a time
when they go to a weights file, or passed to onnxruntime as arrays.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.unknown_fields import UnknownFieldSet
from onnx import GraphProto, TensorProto, numpy_helper

from graphquant.formats.onnx.shape_inference import nested_graphs
from graphquant.formats.onnx.tensors import (
    DTYPE_CODES,
    DTYPE_NAMES,
    SUB_BYTE_BITS,
    constant_op_value,
    constant_tensor,
    is_external,
    read_slabs,
    stored_bytes,
    tensor_bytes,
    tensor_value,
)
from graphquant.ir import Op
from graphquant.utils import MEGABYTE

if TYPE_CHECKING:
    from graphquant.formats.weights_files import HashingWriter
    from graphquant.numerics import Array

EXTERNAL_MIN_BYTES = 1 << 10
"""Minimum size of a tensor that is stored externally. Smaller tensors may be shapes and stay in the message."""

ALIGNMENT = 64  # each tensor in a weights file starts at a multiple of this number of bytes

WEIGHT_DTYPES = frozenset({"float16", "float32", "float64", "int8", "uint8", "int16", "uint16"})
"""Types that onnxruntime accepts from numpy, and that no shape has."""

MAX_READ_BYTES = 1 << 26
"""Size of all new weights from which a session that is never run gets zeros in place of large weights. To quantize them
again would take longer than all the rest, onnxruntime would copy them, and it plans the same graph."""

MAX_SMALL_BYTES = 1 << 20  # maximum size of a tensor that keeps its value there

_DEFERRED_KEY = f"graphquant.later {secrets.token_hex(8)}"
"""Key under which a deferred tensor stores its index. The random part keeps files from containing it."""

DeferredWeight = Op | Any
"""A constant whose value is added later: a new op, or an initializer of the source (a TensorProto)."""


def copy_without_weights(source: Any, target: Any) -> list[DeferredWeight]:
    """Copy a ModelProto to an empty one without the values of large weights in the main graph; return these."""
    # Only CopyFrom keeps fields that this version of onnx does not know.
    if len(UnknownFieldSet(source)) or len(UnknownFieldSet(source.graph)):
        target.CopyFrom(source)
        return []
    deferred: list[DeferredWeight] = []
    target.graph.SetInParent()
    for message, copy, skipped_field in ((source, target, "graph"), (source.graph, target.graph, "initializer")):
        for field, value in message.ListFields():
            if field.name == skipped_field:
                continue
            if hasattr(value, "extend"):  # a repeated field
                getattr(copy, field.name).extend(value)
            else:
                setattr(copy, field.name, value)
    for tensor in source.graph.initializer:
        is_weight = DTYPE_NAMES.get(tensor.data_type) in WEIGHT_DTYPES
        if is_external(tensor) or not is_weight or tensor_bytes(tensor) < EXTERNAL_MIN_BYTES:
            target.graph.initializer.add().CopyFrom(tensor)
            continue
        _write_weightless(tensor, target.graph.initializer.add(), {_DEFERRED_KEY: len(deferred)})
        deferred.append(tensor)
    return deferred


def missing_weight_bytes(message: Any, ops: Sequence[DeferredWeight]) -> int:
    """Return the number of bytes of the deferred weights that a ModelProto lacks."""
    deferred = (_deferred_weight(tensor, ops) for tensor in (message_tensors(message) if ops else ()))
    return sum(constant_bytes(w) if isinstance(w, Op) else w.ByteSize() for w in deferred if w is not None)


def constant_bytes(op: Op) -> int:
    """Return the number of bytes of a constant's value, 0 if it is unknown."""
    output = op.outputs[0]
    if output.dtype not in DTYPE_CODES or output.dtype == "string" or output.shape is None or None in output.shape:
        return 0
    return stored_bytes(output.dtype, math.prod(size or 0 for size in output.shape))


def _write_weightless(tensor: Any, target: Any, external_entries: Mapping[str, Any]) -> None:
    """Fill `target`, an empty TensorProto, with all fields but the value, and with `external_entries` in its place."""
    target.name, target.data_type = tensor.name, tensor.data_type
    target.dims.extend(tensor.dims)
    target.doc_string = tensor.doc_string
    target.metadata_props.extend(tensor.metadata_props)
    target.data_location = TensorProto.EXTERNAL
    for key, entry_value in external_entries.items():
        target.external_data.add(key=key, value=str(entry_value))


def deferred_tensor(op: Op, name: str, index: int) -> Any:
    """Return the TensorProto of a constant without its value, to be filled with the deferred weight at `index`."""
    output = op.outputs[0]
    dims = [size or 0 for size in output.shape or ()]
    tensor = TensorProto(name=name, data_type=DTYPE_CODES[output.dtype or ""], dims=dims)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key=_DEFERRED_KEY, value=str(index))
    return tensor


def fill_deferred_weights(message: Any, ops: Sequence[DeferredWeight]) -> None:
    """Fill in the values of all deferred weights of a ModelProto; raise ModelError if ONNX cannot represent a value."""
    take_session_weights(message, ops, ())


def take_session_weights(
    message: Any, ops: Sequence[DeferredWeight], read_names: Container[str]
) -> dict[str, Callable[[], Array]]:
    """Return loaders for the weights that onnxruntime receives as arrays, and fill in all other deferred weights.

    onnxruntime rejects arrays that no node reads, so `read_names` lists the values that are read. Raise ModelError if
    ONNX cannot represent a value.
    """
    loaders: dict[str, Callable[[], Array]] = {}

    def fill(tensor: Any, op: DeferredWeight) -> None:
        name = tensor.name
        tensor.CopyFrom(constant_tensor(op, name) if isinstance(op, Op) else op)
        tensor.name = name

    remaining_new = sum(isinstance(op, Op) for op in ops)
    for tensor in message.graph.initializer if ops else ():
        op = _deferred_weight(tensor, ops)
        remaining_new -= isinstance(op, Op)
        if op is not None and tensor.name in read_names and DTYPE_NAMES[tensor.data_type] in WEIGHT_DTYPES:
            loaders[tensor.name] = partial(_deferred_value, op)
            tensor.external_data[0].key = "location"  # the tensor is not deferred any more
        elif op is not None:
            fill(tensor, op)
    for tensor in message_tensors(message) if remaining_new else ():  # bodies are searched last because that takes long
        op = _deferred_weight(tensor, ops)
        if op is not None:
            fill(tensor, op)
    return loaders


def exceeds_read_bytes(ops: Sequence[DeferredWeight]) -> bool:
    """Return True if the new weights are too large to compute them for a session that is never run."""
    return sum(constant_bytes(op) for op in ops if isinstance(op, Op)) > MAX_READ_BYTES


def store_zeros(message: Any, ops: Sequence[DeferredWeight], folder: Path | None, zeros: Path) -> None:
    """Give a ModelProto zeros in place of large weights, for a session that is never run.

    All share the start of the new file `zeros`, which takes no disk space, and which onnxruntime maps to memory. Small
    tensors get their values, also those whose external data is in `folder`.
    """
    largest = 0
    for tensor in message_tensors(message):
        op = _deferred_weight(tensor, ops)
        if op is None and not is_external(tensor):
            continue
        size = 0 if tensor.data_type == TensorProto.STRING else tensor_bytes(tensor)
        filled = TensorProto()
        if size > MAX_SMALL_BYTES:
            _write_weightless(tensor, filled, {"location": zeros.name, "offset": 0, "length": size})
            largest = max(largest, size)
        else:
            value = tensor_value(tensor, folder) if op is None else _deferred_value(op)
            filled.CopyFrom(numpy_helper.from_array(value, tensor.name))
        tensor.CopyFrom(filled)
    with zeros.open("wb") as file:
        file.truncate(largest)


def _deferred_value(op: DeferredWeight) -> Array:
    return np.ascontiguousarray(constant_op_value(op) if isinstance(op, Op) else tensor_value(op, None))


def write_external_weights(
    message: Any,
    ops: Sequence[DeferredWeight],
    folder: Path | None,
    file: HashingWriter,
    progress: Callable[[int, int], None] | None,
) -> list[Any]:
    """Write the large tensors of a ModelProto to `file`, and store their offsets in the message.

    `folder` has the external data of its other tensors. `progress` receives the megabytes that were written, and those
    of all deferred weights. Return the entries that must be set to the name of the file. Raises a ModelError if a
    tensor cannot be read or written, and an OSError if the file cannot be written.
    """
    location_entries = []
    total = missing_weight_bytes(message, ops)
    for tensor in message_tensors(message):
        op = _deferred_weight(tensor, ops)
        is_inline = op is None and not is_external(tensor)
        if tensor.data_type == TensorProto.STRING or (is_inline and tensor.ByteSize() < EXTERNAL_MIN_BYTES):
            continue
        start = file.tell() + -file.tell() % ALIGNMENT
        if not file.skip_to(start + tensor_bytes(tensor)):
            file.write(bytes(start - file.tell()))
            for value in read_slabs(tensor, folder) if op is None else [_deferred_value(op)]:
                if value.dtype.name in SUB_BYTE_BITS:
                    file.write(numpy_helper.from_array(value).raw_data)
                else:  # as ONNX stores the elements, without a copy where possible
                    file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            file.finish_tensor()
        if progress is not None:
            progress(file.tell() // MEGABYTE, max(total, file.tell()) // MEGABYTE)
        stub = TensorProto()
        _write_weightless(tensor, stub, {"location": "", "offset": start, "length": file.tell() - start})
        tensor.CopyFrom(stub)
        location_entries.append(tensor.external_data[0])
    return location_entries


def _deferred_weight(tensor: Any, ops: Sequence[DeferredWeight]) -> DeferredWeight | None:
    """Return the deferred weight that belongs in `tensor`, None if its value is not deferred."""
    entry = next(iter(tensor.external_data), None) if is_external(tensor) else None
    return ops[int(entry.value)] if entry is not None and entry.key == _DEFERRED_KEY else None


def message_tensors(message: Any) -> Iterator[Any]:
    """Yield the tensors of a ModelProto: initializers and attributes of the graph, its bodies and its functions."""
    for graph in (graph for root in reversed([message.graph, *message.functions]) for graph in nested_graphs(root)):
        if isinstance(graph, GraphProto):
            yield from graph.initializer
            yield from (tensor for sparse in graph.sparse_initializer for tensor in (sparse.values, sparse.indices))
        for node in graph.node:
            for attr in node.attribute:
                yield from [attr.t] if attr.HasField("t") else []
                yield from attr.tensors
