"""TFLite files to models: each subgraph a graph, each tensor an op's output that keeps its own scale and zero point."""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphquant.errors import ModelError
from graphquant.formats.tflite import schema
from graphquant.formats.tflite.flat import Flat, Table, damaged
from graphquant.formats.tflite.ops import CALLS, describe
from graphquant.formats.tflite.values import Place, place, reader
from graphquant.ir import Call, Graph, Model, Op, Output, Stored, TensorRef, bulk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from graphquant.numerics import Array

MAX_SUBGRAPHS = 10_000
"""More than any model has."""


def load(path: Path) -> Model:
    """Reads the model at `path`; the data of its constants is mapped, and read when it is asked for.

    Raises:
        ModelError: The file is no TFLite model, or what it holds does not fit together.
    """
    try:
        with path.open("rb") as file:
            empty = not file.seek(0, 2)
            data = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}. Give the path of a TFLite model.") from error
    try:
        return parse(data, path)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def parse(data: bytes | mmap.mmap, path: Path | None = None) -> Model:
    """The model in `data`.

    Raises:
        ModelError: It is no TFLite model, or what it holds does not fit together.
    """
    view = memoryview(data)
    if not view:
        raise ModelError("The file is empty. Export or copy the model again.")
    if bytes(view[4:8]) != schema.IDENTIFIER:
        raise ModelError("This is no TFLite model: it does not say TFL3 in its fifth byte. Export the model again.")
    model = Model(format="tflite", path=path, source=view, digest=hashlib.sha256(view).hexdigest())
    with bulk():
        _Indexer(model, Flat(view).root(schema.MODEL)).run()
    return model


@dataclass(frozen=True, slots=True)
class _Known:
    """A tensor of a subgraph: what is known of it, and its value if the file holds one."""

    output: Output
    value: Callable[[], Array] | None
    variable: bool


@dataclass(slots=True)
class _Scope:
    """A subgraph that is being read: its tensors, the names of its ops, and which op makes each tensor."""

    graph: Graph
    tensors: list[_Known]
    taken: dict[str, int] = field(default_factory=dict)
    refs: dict[int, TensorRef] = field(default_factory=dict)

    def label(self, index: int, before: str = "") -> str:
        """A free name for what makes or takes tensor `index`."""
        return free(before + (self.tensors[index].output.name or f"tensor_{index}"), self.taken)

    def indices(self, table: Table, name: str) -> list[int]:
        """The tensors that a field lists, -1 for one that is left out."""
        found: list[int] = table.array(name, "int32").tolist()
        if found and not (min(found) >= -1 and max(found) < len(self.tensors)):
            raise damaged(f"the {name} {min(found)} to {max(found)} are listed, of {len(self.tensors)} tensors")
        if table.fields is schema.SUBGRAPH and -1 in found:
            raise damaged(f"one of its {name} is no tensor")
        return found

    def add(self, op: Op, indices: Sequence[int]) -> None:
        """Adds an op that makes the tensors `indices`."""
        self.graph.add(op)
        for port, index in enumerate(indices):
            if index in self.refs:
                raise damaged(f"tensor {index}, {self.tensors[index].output.name!r}, is made twice")
            if index >= 0:
                self.refs[index] = TensorRef(self.graph.name, op.name, port)

    def add_constants(self, computed: set[int]) -> None:
        """Adds what is no input and not `computed` by an op: constants, variables, and tensors without use."""
        for index, known in enumerate(self.tensors):
            if index not in self.refs and index not in computed:
                kind, op_type = ("variable", "Variable") if known.variable else ("constant", "Constant")
                outputs = (known.output,)
                op = Op(name=self.label(index), kind=kind, type=op_type, roles=(), outputs=outputs, value=known.value)
                self.add(op, [index])


class _Indexer:
    """Fills `model` with the subgraphs of a file."""

    def __init__(self, model: Model, root: Table) -> None:
        self._model = model
        self._root = root
        self._view: memoryview = model.source
        self._codes = [_code(table) for table in root.tables("operator_codes", schema.OPERATOR_CODE)]
        self._places = [place(table) for table in root.tables("buffers", schema.BUFFER)]
        self._names: list[str] = []

    def run(self) -> None:
        """Indexes every subgraph: the first is the main graph, and each may be run by itself, as a signature."""
        tables = self._root.tables("subgraphs", schema.SUBGRAPH)
        if not tables:
            raise ModelError("The file holds no graph. Export the model again.")
        if len(tables) > MAX_SUBGRAPHS:
            raise damaged(f"it has {len(tables)} graphs")
        taken = {"": 0}
        for index, table in enumerate(tables):
            wanted = table.text("name") or f"subgraph_{index}" if index else ""
            self._names.append(free(wanted, taken) if index else "")
            self._model.graphs[self._names[index]] = Graph(self._names[index], self._model.graphs)
        self._model.entries = tuple(self._names)
        for name, table in zip(self._names, tables, strict=True):
            self._fill(self._model.graphs[name], table)

    def _fill(self, graph: Graph, table: Table) -> None:
        tensors = [self._tensor(index, one) for index, one in enumerate(table.tables("tensors", schema.TENSOR))]
        nodes = table.tables("operators", schema.OPERATOR)
        scope = _Scope(graph, tensors)
        for index in scope.indices(table, "inputs"):
            graph.inputs.append(scope.label(index))
            output = tensors[index].output
            scope.add(Op(name=graph.inputs[-1], kind="input", type="Input", roles=(), outputs=(output,)), [index])
        scope.add_constants({index for node in nodes for index in scope.indices(node, "outputs")})
        added = [self._node(scope, node) for node in nodes]
        for op, node in zip(added, nodes, strict=True):
            graph.wire(op, [scope.refs.get(index) for index in scope.indices(node, "inputs")])
        for index in scope.indices(table, "outputs"):
            label = scope.label(index, "@")
            graph.add(Op(name=label, kind="output", type="Output"), [scope.refs.get(index)])
            graph.outputs.append(label)

    def _tensor(self, index: int, table: Table) -> _Known:
        code = table.number("type", "b")
        if not 0 <= code < len(schema.TYPES):
            raise ModelError(f"Tensor {index} has the unknown type {code}. This version does not read such files.")
        dtype = schema.TYPES[code]
        sizes = tuple(table.array("shape", "int32").tolist())
        if min(sizes, default=0) < 0:
            raise damaged(f"tensor {index} has the shape {list(sizes)}")
        signature = table.array("shape_signature", "int32").tolist() or sizes
        shape = tuple(None if size < 0 else size for size in signature)
        output = Output(table.text("name"), dtype, shape, _stored(index, sizes, table))
        buffer = table.number("buffer", "I")
        if buffer >= max(len(self._places), 1):
            raise damaged(f"tensor {index} has its data in buffer {buffer} of {len(self._places)}")
        apart = table.table("sparsity", {}) is not None or table.number("external_buffer", "I")
        held = self._places[buffer] if buffer and not apart else Place(0, 0)
        return _Known(output, reader(self._view, held, output, sizes), bool(table.number("is_variable", "b")))

    def _code(self, node: Table) -> str:
        index = node.number("opcode_index", "I")
        if index >= len(self._codes):
            raise damaged(f"an op has the code {index} of {len(self._codes)}")
        code: str = self._codes[index]
        return code

    def _node(self, scope: _Scope, node: Table) -> str:
        """Adds an op, which goes by the name of its first output."""
        code = self._code(node)
        info = describe(code)
        made = scope.indices(node, "outputs")
        first = next((index for index in made if index >= 0), None)
        name = free(code, scope.taken) if first is None else scope.label(first)
        op = Op(
            name=name,
            kind=info.kind,
            type=code,
            roles=info.roles,
            channel_axis=info.axis,
            outputs=tuple(scope.tensors[index].output if index >= 0 else Output("") for index in made),
            calls=tuple(self._calls(code, node)),
            source=node,
        )
        scope.add(op, made)
        return name

    def _calls(self, op_type: str, node: Table) -> Iterator[Call]:
        if op_type not in CALLS:
            return
        fields, called = CALLS[op_type]
        options = node.table("builtin_options", fields)
        for name, (offset, loop) in called.items():
            index = 0 if options is None else options.number(name, "i")
            if not 0 <= index < len(self._names):
                raise damaged(f"{op_type} runs graph {index} of {len(self._names)}")
            yield Call(name.removesuffix("_subgraph_index"), self._names[index], offset, loop)


def _code(table: Table) -> str:
    """The name of an op type; the old field holds those under 127, and has that number for all others."""
    code = max(table.number("builtin_code", "i"), table.number("deprecated_builtin_code", "b"))
    name: str = schema.BUILTINS[code] if 0 <= code < len(schema.BUILTINS) else f"BUILTIN_{code}"
    return (table.text("custom_code") or name) if name == schema.CUSTOM else name


def _stored(index: int, sizes: tuple[int, ...], table: Table) -> Stored:
    """What the file says of a tensor's scale; most tensors of a float model have none."""
    found = table.table("quantization", schema.QUANTIZATION)
    if found is None:
        return Stored(index=index, sizes=sizes)
    details = found.number("details_type", "B")
    return Stored(
        index=index,
        sizes=sizes,
        scale=found.array("scale", "float32"),
        zero_point=found.array("zero_point", "int64"),
        axis=found.number("quantized_dimension", "i"),
        low=found.array("min", "float32"),
        high=found.array("max", "float32"),
        details=schema.DETAILS[details] if details < len(schema.DETAILS) else f"unknown form {details}",
    )


def free(name: str, taken: dict[str, int]) -> str:
    """`name`, or with the smallest free `_k` behind it; `taken` has for each name the `k` to go on with."""
    found, k = name, taken.get(name, 0)
    while found in taken:
        k += 1
        found = f"{name}_{k}"
    if k:
        taken[name] = k
    taken.setdefault(found, 0)
    return found
