"""Load TFLite files: each subgraph becomes a graph, each tensor an op's output with its stored scale and zero point.

The files are FlatBuffers (https://flatbuffers.dev/internals/): a table starts with the distance to its vtable, which
lists the offset of each field; strings, vectors and tables in fields are distances forward. Files may be damaged or
hostile, so every offset is checked. Distances are followed only as deep as the schema goes, and shared data counts each
time it is read, so that a small file cannot cause endless work.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from graphquant.errors import ModelError
from graphquant.formats.tflite import ops
from graphquant.formats.tflite.ops import SUBGRAPH_FIELDS, describe_tflite_op
from graphquant.ir import Call, Graph, Model, Op, Output, StoredQuantization, TensorRef, paused_gc
from graphquant.numerics import block_scale_shape

if TYPE_CHECKING:
    from graphquant.numerics import Array

_NON_NUMERIC_DTYPES: Final = frozenset({"string", "resource", "variant"})
_PACKED_DTYPES: Final = {"int4": (4, ml_dtypes.int4), "uint4": (4, ml_dtypes.uint4), "int2": (2, ml_dtypes.int2)}

BLOCKWISE_DETAILS: Final = ops.DETAILS[2]

_MAX_SUBGRAPHS: Final = 10_000  # limit on the subgraphs of a file, above that of any real model

_MAX_READS_PER_BYTE: Final = 4
"""The average number of times that each byte of a file may be read as part of a table or vector."""

_MIN_READ_BUDGET: Final = 1 << 16  # bytes that may be read from any file, however small


def load(path: Path, *, allow_links: bool = False) -> Model:  # noqa: ARG001  # the protocol's signature
    """Load the model at `path`. Its constants are decoded on request."""
    try:
        data = path.read_bytes()  # A file that becomes shorter while it is mapped to memory would end the process.
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}. Give the path of a TFLite model.") from error
    try:
        return parse_tflite(data, path)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def parse_tflite(data: bytes, path: Path | None = None) -> Model:
    """Load the model in `data`."""
    view = memoryview(data)
    if not view:
        raise ModelError("The file is empty. Export or copy the model again.")
    if bytes(view[4:8]) != ops.IDENTIFIER:
        raise ModelError("This is not a TFLite model: it lacks the identifier TFL3 at byte 4. Export the model again.")
    model = Model(format="tflite", path=path, source=view, digest=hashlib.sha256(view).hexdigest())
    with paused_gc():
        buffer = _FlatBuffer(view)
        _ModelReader(model, buffer.table(buffer.number("I", 0), ops.MODEL)).read_subgraphs()
    return model


class _FlatBuffer:
    """A FlatBuffers file with a budget for reads."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self._read_budget = _MAX_READS_PER_BYTE * len(data) + _MIN_READ_BUDGET

    def require_range(self, position: int, size: int) -> None:
        """Check that `size` bytes from `position` on are in the file, and subtract them from the budget."""
        if position < 0 or position + size > len(self.data):
            raise _damaged_file_error(f"{size} bytes at {position} are outside of its {len(self.data)}")
        self._read_budget -= size
        if self._read_budget < 0:
            raise _damaged_file_error("its tables refer to each other too often")

    def number(self, struct_format: str, position: int) -> Any:
        """Read the number at `position`; `struct_format` is a format of the `struct` module."""
        self.require_range(position, struct.calcsize(struct_format))
        return struct.unpack_from(f"<{struct_format}", self.data, position)[0]

    def table(self, position: int, fields: Mapping[str, int]) -> _FlatTable:
        """Return the table at `position`, whose fields have these numbers."""
        vtable = position - self.number("i", position)
        size = self.number("H", vtable)
        self.require_range(vtable, size)
        return _FlatTable(self, position, struct.unpack_from(f"<{size // 2}H", self.data, vtable)[2:], fields)


@dataclass(frozen=True, slots=True)
class _FlatTable:
    """A table; its fields are accessed by their names in the schema."""

    buffer: _FlatBuffer  # the file
    start: int  # the position of the table
    field_offsets: tuple[int, ...]  # the offset of each field from `start`, 0 for an absent field
    fields: Mapping[str, int]  # the numbers of the fields

    def number(self, field: str, struct_format: str) -> Any:
        """Return a number, 0 if the field is absent; `struct_format` is a format of the `struct` module."""
        position = self._field_position(field)
        return 0 if position is None else self.buffer.number(struct_format, position)

    def table(self, field: str, fields: Mapping[str, int]) -> _FlatTable | None:
        """Return the table in a field, None if the field is absent."""
        position = self._referenced_position(field)
        return None if position is None else self.buffer.table(position, fields)

    def tables(self, field: str, fields: Mapping[str, int]) -> list[_FlatTable]:
        """Return the tables of a vector."""
        start, count = self.vector_span(field, 4)
        positions = range(start, start + 4 * count, 4)
        return [self.buffer.table(position + self.buffer.number("I", position), fields) for position in positions]

    def text(self, field: str) -> str:
        """Return a string; bytes that are not UTF-8 are escaped."""
        start, count = self.vector_span(field, 1)
        return bytes(self.buffer.data[start : start + count]).decode("utf-8", errors="backslashreplace")

    def array(self, field: str, dtype: str) -> Array:
        """Return a vector of numbers, (n,)."""
        kind = np.dtype(dtype).newbyteorder("<")
        start, count = self.vector_span(field, kind.itemsize)
        return np.frombuffer(self.buffer.data, kind, count, start).astype(dtype)

    def vector_span(self, field: str, size: int) -> tuple[int, int]:
        """Return start and count of a vector's elements of `size` bytes; (0, 0) if the field is absent."""
        if (position := self._referenced_position(field)) is None:
            return 0, 0
        count = self.buffer.number("I", position)
        self.buffer.require_range(position + 4, count * size)
        return position + 4, count

    def _field_position(self, field: str) -> int | None:
        number = self.fields[field]
        offset = self.field_offsets[number] if number < len(self.field_offsets) else 0
        return self.start + offset if offset else None

    def _referenced_position(self, field: str) -> int | None:
        position = self._field_position(field)
        return None if position is None else position + self.buffer.number("I", position)


def _damaged_file_error(problem: str) -> ModelError:
    return ModelError(f"The file is damaged: {problem}. Export or copy the model again.")


class _TensorEntry(NamedTuple):
    """A tensor of a subgraph, and its value if the file holds one."""

    output: Output
    value: Callable[[], Array] | None
    is_variable: bool


@dataclass(slots=True)
class _SubgraphScope:
    """A subgraph under construction: its tensors, the names of its ops, and the producer of each tensor."""

    graph: Graph
    tensors: list[_TensorEntry]
    used_names: dict[str, int] = field(default_factory=dict)
    tensor_refs: dict[int, TensorRef] = field(default_factory=dict)

    def claim_label(self, index: int, prefix: str = "") -> str:
        """Return a free op name for tensor `index`."""
        return _claim_name(prefix + (self.tensors[index].output.name or f"tensor_{index}"), self.used_names)

    def tensor_indices(self, table: _FlatTable, name: str) -> list[int]:
        """Return the tensor indices in a field, -1 for an omitted one."""
        indices: list[int] = table.array(name, "int32").tolist()
        if indices and not (min(indices) >= -1 and max(indices) < len(self.tensors)):
            listed = f"the {name} {min(indices)} to {max(indices)} are listed"
            raise _damaged_file_error(f"{listed}, but it has {len(self.tensors)} tensors")
        if table.fields is ops.SUBGRAPH and -1 in indices:
            raise _damaged_file_error(f"one of its {name} is not a tensor")
        return indices

    def add_op(self, op: Op, indices: Sequence[int]) -> None:
        """Add an op that produces the tensors `indices`."""
        self.graph.add_op(op)
        for port, index in enumerate(indices):
            if index in self.tensor_refs:
                raise _damaged_file_error(f"tensor {index}, {self.tensors[index].output.name!r}, has two producers")
            if index >= 0:
                self.tensor_refs[index] = TensorRef(self.graph.name, op.name, port)

    def add_source(self, kind: str, index: int) -> str:
        """Add an op without inputs that produces tensor `index`; return its name."""
        name, (output, value, _) = self.claim_label(index), self.tensors[index]
        read_value = None if kind == "input" else value
        op = Op(name=name, kind=kind, type=kind.capitalize(), roles=(), outputs=(output,), read_value=read_value)
        self.add_op(op, [index])
        return name


class _ModelReader:
    """Fills `model` with the subgraphs of a file."""

    def __init__(self, model: Model, root: _FlatTable) -> None:
        self._model = model
        self._root = root
        self._op_types = [_op_type_name(table) for table in root.tables("operator_codes", ops.OPERATOR_CODE)]
        self._buffer_spans = [_buffer_span(table) for table in root.tables("buffers", ops.BUFFER)]
        self._graph_names: list[str] = []

    def read_subgraphs(self) -> None:
        """Read every subgraph. The first is the main graph; each one may be run by itself, as a signature."""
        tables = self._root.tables("subgraphs", ops.SUBGRAPH)
        if not tables:
            raise ModelError("The file contains no graph. Export the model again.")
        if len(tables) > _MAX_SUBGRAPHS:
            raise _damaged_file_error(f"it has {len(tables)} graphs")
        used_names = {"": 0}
        for index, table in enumerate(tables):
            preferred = table.text("name") or f"subgraph_{index}" if index else ""
            self._graph_names.append(_claim_name(preferred, used_names) if index else "")
            self._model.graphs[self._graph_names[index]] = Graph(self._graph_names[index], self._model.graphs)
        self._model.entry_graphs = tuple(self._graph_names)
        for name, table in zip(self._graph_names, tables, strict=True):
            self._fill_graph(self._model.graphs[name], table)

    def _fill_graph(self, graph: Graph, table: _FlatTable) -> None:
        tables = table.tables("tensors", ops.TENSOR)
        tensors = [self._read_tensor(*entry) for entry in enumerate(tables)]
        for index, tensor in enumerate(tables):
            quantization = tensor.table("quantization", ops.QUANTIZATION)
            if quantization is not None and _details_name(quantization) == BLOCKWISE_DETAILS:
                tensors[index] = _with_block_scales(tensors, index, quantization)
        nodes = table.tables("operators", ops.OPERATOR)
        scope = _SubgraphScope(graph, tensors)
        graph.inputs = [scope.add_source("input", index) for index in scope.tensor_indices(table, "inputs")]
        computed = {index for node in nodes for index in scope.tensor_indices(node, "outputs")}
        for index, entry in enumerate(tensors):
            if index not in scope.tensor_refs and index not in computed:  # constants, variables and unused tensors
                scope.add_source("variable" if entry.is_variable else "constant", index)
        op_names = [self._add_node(scope, node) for node in nodes]
        for op, node in zip(op_names, nodes, strict=True):
            graph.connect_inputs(op, [scope.tensor_refs.get(index) for index in scope.tensor_indices(node, "inputs")])
        for index in scope.tensor_indices(table, "outputs"):
            label = scope.claim_label(index, "@")
            graph.add_op(Op(name=label, kind="output", type="Output"), [scope.tensor_refs.get(index)])
            graph.outputs.append(label)

    def _read_tensor(self, index: int, table: _FlatTable) -> _TensorEntry:
        code = table.number("type", "b")
        if not 0 <= code < len(ops.TYPES):
            raise ModelError(f"Tensor {index} has the unknown type {code}, which this version cannot read.")
        dtype = ops.TYPES[code]
        sizes = tuple(table.array("shape", "int32").tolist())
        if min(sizes, default=0) < 0:
            raise _damaged_file_error(f"tensor {index} has the shape {list(sizes)}")
        signature = table.array("shape_signature", "int32").tolist() or sizes
        shape = tuple(None if size < 0 else size for size in signature)
        output = Output(table.text("name"), dtype, shape, _read_quantization(index, sizes, table))
        buffer = table.number("buffer", "I")
        if buffer >= max(len(self._buffer_spans), 1):
            raise _damaged_file_error(f"tensor {index} stores its data in buffer {buffer} of {len(self._buffer_spans)}")
        is_elsewhere = table.table("sparsity", {}) is not None or table.number("external_buffer", "I")
        start, size = self._buffer_spans[buffer] if buffer and not is_elsewhere else (0, 0)
        value = None
        if size and dtype not in _NON_NUMERIC_DTYPES:
            value = partial(_read_constant, self._model.source, start, size, output, sizes)
        return _TensorEntry(output, value, bool(table.number("is_variable", "b")))

    def _add_node(self, scope: _SubgraphScope, node: _FlatTable) -> str:
        """Add an op, named after its first output; return its name."""
        code = node.number("opcode_index", "I")
        if code >= len(self._op_types):
            raise _damaged_file_error(f"an op has the code {code} of {len(self._op_types)}")
        op_type = self._op_types[code]
        op_info = describe_tflite_op(op_type)
        outputs = scope.tensor_indices(node, "outputs")
        first_output = next((index for index in outputs if index >= 0), None)
        name = _claim_name(op_type, scope.used_names) if first_output is None else scope.claim_label(first_output)
        op = Op(
            name=name,
            kind=op_info.kind,
            type=op_type,
            roles=op_info.roles,
            channel_axis=op_info.channel_axis,
            outputs=tuple(scope.tensors[index].output if index >= 0 else Output("") for index in outputs),
            calls=tuple(self._subgraph_calls(op_type, node)),
            source=node,
        )
        scope.add_op(op, outputs)
        return name

    def _subgraph_calls(self, op_type: str, node: _FlatTable) -> Iterator[Call]:
        if op_type not in SUBGRAPH_FIELDS:
            return
        fields, subgraph_fields = SUBGRAPH_FIELDS[op_type]
        options = node.table("builtin_options", fields)
        for name, (offset, loop) in subgraph_fields.items():
            index = 0 if options is None else options.number(name, "i")
            if not 0 <= index < len(self._graph_names):
                raise _damaged_file_error(f"{op_type} runs graph {index} of {len(self._graph_names)}")
            yield Call(name.removesuffix("_subgraph_index"), self._graph_names[index], offset, loop)


def _buffer_span(table: _FlatTable) -> tuple[int, int]:
    """Return start and size of a Buffer's bytes: inside the FlatBuffer, or after it in files over 2 GB."""
    start, size = table.vector_span("data", 1)
    offset = table.number("offset", "Q")
    if not size and offset > 1:  # an offset of 1 marks omitted bytes
        start, size = offset, table.number("size", "Q")
        if start + size > len(table.buffer.data):
            raise _damaged_file_error(f"a buffer of {size} bytes at {start} is outside of its {len(table.buffer.data)}")
    return start, size


def _read_constant(data: memoryview, start: int, size: int, output: Output, sizes: tuple[int, ...]) -> Array:
    count, name = math.prod(sizes), output.dtype or ""
    bits, element_type = _PACKED_DTYPES.get(name, (0, None))
    dtype: Any = np.dtype("uint8" if bits else ml_dtypes.bfloat16 if name == "bfloat16" else name)
    needed = (count * bits + 7) // 8 if bits else count * dtype.itemsize
    if needed != size:
        raise _damaged_file_error(f"{output.name!r} of shape {list(sizes)} and {name} has {size} bytes, not {needed}")
    stored = np.frombuffer(data, dtype, needed // dtype.itemsize, start)
    if not bits:
        return stored.reshape(sizes)
    unpacked = [(stored >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    integers = np.stack(unpacked, axis=-1).reshape(-1)[:count].astype(np.uint8).view(np.int8)
    return integers.astype(element_type).reshape(sizes)


def _op_type_name(table: _FlatTable) -> str:
    """Return the name of an op type. The old field stores codes below 127 and is 127 for all others."""
    code = max(table.number("builtin_code", "i"), table.number("deprecated_builtin_code", "b"))
    name: str = ops.BUILTINS[code] if 0 <= code < len(ops.BUILTINS) else f"BUILTIN_{code}"
    return (table.text("custom_code") or name) if name == ops.CUSTOM else name


def _read_quantization(index: int, sizes: tuple[int, ...], table: _FlatTable) -> StoredQuantization:
    """Return the stored scale of a tensor; most tensors of a float model have none."""
    if (quantization := table.table("quantization", ops.QUANTIZATION)) is None:
        return StoredQuantization(index=index, sizes=sizes)
    return StoredQuantization(
        index=index,
        sizes=sizes,
        scale=quantization.array("scale", "float32"),
        zero_point=quantization.array("zero_point", "int64"),
        axis=quantization.number("quantized_dimension", "i"),
        low=quantization.array("min", "float32"),
        high=quantization.array("max", "float32"),
        details=_details_name(quantization),
    )


def _details_name(quantization: _FlatTable) -> str:
    """Return the name of a quantization that is not one scale per tensor or channel, else ""."""
    number: int = quantization.number("details_type", "B")
    return ops.DETAILS[number] if number < len(ops.DETAILS) else f"unknown form {number}"


def _with_block_scales(tensors: Sequence[_TensorEntry], index: int, quantization: _FlatTable) -> _TensorEntry:
    """Return a tensor with the scales and zero points of its blocks, which other tensors of its graph hold.

    The axis of the blocks is the one along which there are fewer scales than elements. A field `details` that is
    absent leaves the tensor without scales.
    """
    entry = tensors[index]
    blockwise, stored = quantization.table("details", ops.BLOCKWISE), entry.output.quantization
    if blockwise is None or stored is None:
        return entry
    label, sizes = f"the tensor {entry.output.name!r} with blocks", stored.sizes
    block, scales = blockwise.number("block_size", "i"), _constant_at(tensors, blockwise.number("scales", "i"))
    if scales is None or scales.dtype.kind != "f" or block < 1:
        raise _damaged_file_error(f"{label} has no scales, or the block size {block}")
    axes = [axis for axis, size in enumerate(sizes) if scales.shape == block_scale_shape(sizes, axis, block)]
    if not axes and sizes and scales.size == math.prod(block_scale_shape(sizes, len(sizes) - 1, block)):
        axes = [len(sizes) - 1]  # a flat list of scales
    if not axes:
        raise _damaged_file_error(f"{label} of {block} has the shape {list(sizes)} and {list(scales.shape)} scales")
    shape = block_scale_shape(sizes, axes[-1], block)
    number = blockwise.number("zero_points", "i")  # symmetric weights have the index -1, or by default 0
    values = _constant_at(tensors, number) if number > 0 else None
    if values is not None and values.size != scales.size:
        raise _damaged_file_error(f"{label} has {scales.size} scales and {values.size} zero points")
    zeros = np.broadcast_to(np.int64(0), shape) if values is None else values.reshape(shape)
    blocks = replace(stored, scale=scales.reshape(shape), zero_point=zeros, axis=axes[-1], block=block)
    return entry._replace(output=replace(entry.output, quantization=blocks))


def _constant_at(tensors: Sequence[_TensorEntry], index: int) -> Array | None:
    """Return the value of the constant with an index, None if there is none."""
    read_value = tensors[index].value if 0 <= index < len(tensors) else None
    return None if read_value is None else read_value()


def _claim_name(name: str, used_names: dict[str, int]) -> str:
    """Return `name`, or `name_k` with the smallest free k; `used_names` remembers the last k of each name."""
    candidate, number = name, used_names.get(name, 0)
    while candidate in used_names:
        number += 1
        candidate = f"{name}_{number}"
    if number:
        used_names[name] = number
    used_names.setdefault(candidate, 0)
    return candidate
