"""onnxruntime sessions, and the models that onnxruntime makes of those that it loads."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain, count, pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnxruntime
from onnx import ModelProto, NodeProto

from graphquant.errors import ModelError
from graphquant.formats.onnx.emitter import Emission, emit_message, node_bodies
from graphquant.formats.onnx.external_data import (
    EXTERNAL_MIN_BYTES,
    constant_bytes,
    exceeds_read_bytes,
    store_zeros,
    take_session_weights,
)
from graphquant.formats.onnx.file_writer import external_tensors, message_bytes
from graphquant.formats.onnx.reader import load, model_from_message
from graphquant.formats.onnx.runtime import FATAL_LOG_LEVEL, RELEASE, RUNTIME_ERRORS, open_inference_session
from graphquant.formats.onnx.split_session import (
    NODE_NUMBER,
    SessionPart,
    SplitSession,
    copy_header,
    count_pairs,
    create_split_session,
    describe_integer_part,
    has_local_values,
    merge_graphs,
)
from graphquant.formats.onnx.tensors import external_path, first_line, runtime_reason, tensor_bytes
from graphquant.ir import Model, TensorRef, qualified_op_name
from graphquant.ir.op_matching import is_barrier

if TYPE_CHECKING:
    from graphquant.formats import Feeds

OpKey = tuple[str, str]

Array = np.ndarray[Any, Any]

INTRA_OP_THREADS = min(4, os.cpu_count() or 1)
"""Threads within an op; fixed, so that a run does not depend on other settings of the process."""

MEMORY_MAPPED_BYTES = 1 << 29
"""Size of external data from which weights stay memory-mapped during runs, which is slower."""

MAX_OPTIMIZED_PAIRS = 10_000  # maximum number of DequantizeLinear nodes of a model that is optimized as a whole
PARTS_PER_OPTIMIZED_MODEL = 50  # number of parts of a very long model that are read at once after optimizations
MAX_KEPT_PAIRS = 4000  # maximum number of DequantizeLinear nodes of a model in parts whose sessions exist at once
_SPINNING_OPTION = "session.intra_op.allow_spinning"
"""If two sessions take turns, threads that spin while waiting for the next run take CPU time from the other session."""

_EXTERNAL_FOLDER_OPTION = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMode:
    """Purpose of a session, and the files that it writes."""

    # True if most values are outputs, or for one of many parts. No memory pattern applies to those, and values hardly
    # reuse memory of others, so planning it would only cost time and memory. A run uses one thread, because several
    # runs are concurrent.
    watched: bool = False
    # True to measure time: weights are packed however much memory that takes, and a run uses one thread, so that it
    # depends least on the load of the machine.
    timed: bool = False
    profile: Path | None = None  # prefix of the file to which the time of each op is written
    optimized: Path | None = None  # file for the optimized model, before the steps that only change layouts
    extra_options: Mapping[str, str] = field(default_factory=dict)  # further configuration entries
    optimizes: bool = True  # False to run the graph as it is


PLAIN_SESSION = SessionMode()


def create_session(
    data: bytes,
    folder: Path | None,
    external_bytes: int = 0,
    weights: Mapping[str, Array] | None = None,
    mode: SessionMode = PLAIN_SESSION,
) -> Any:
    """Return an onnxruntime session for a ModelProto.

    Args:
        data: The ModelProto as bytes.
        folder: Folder of its external data.
        external_bytes: Size of that data. From `MEMORY_MAPPED_BYTES` on, weights stay in the mapped file. Otherwise
            they are packed for the kernels, which copies all of them to memory that cannot be freed.
        weights: Values of initializers that the message declares as external but that are in memory; the session reads
            them there.
        mode: Purpose of the session.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = FATAL_LOG_LEVEL
    options.intra_op_num_threads = 1 if mode.watched or mode.timed else INTRA_OP_THREADS
    options.inter_op_num_threads = 1  # the order of ops, and so memory, is the same in each run
    options.enable_mem_pattern = options.enable_mem_reuse = not mode.watched
    options.add_session_config_entry(_SPINNING_OPTION, "0")
    if mode.profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(mode.profile)
    if mode.optimized is not None:
        options.optimized_model_filepath = str(mode.optimized)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    if not mode.optimizes:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    entries = dict(mode.extra_options)
    if external_bytes >= MEMORY_MAPPED_BYTES and not mode.timed:
        entries["session.disable_prepacking"] = "1"
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    if folder is not None and external_bytes:
        options.add_session_config_entry(_EXTERNAL_FOLDER_OPTION, str(folder.resolve()))
    if weights:
        values = [*map(onnxruntime.OrtValue.ortvalue_from_numpy, weights.values())]
        options.add_external_initializers(list(weights), values)
    try:
        session = open_inference_session(data, options)
    except RUNTIME_ERRORS as error:
        if mode.optimized is not None and (failure := _WRITE_FAILURE.search(str(error))):
            code = int(failure[1] or errno.ENOSPC)
            raise OSError(code, os.strerror(code), str(mode.optimized)) from error
        raise _rejection(error, data, folder, weights or {}) from error
    session.weights = weights  # the session reads their memory
    return session


# Errors of a session that cannot write the optimized model: the disk is full, or the file cannot be opened.
_WRITE_FAILURE = re.compile(r"Protobuf serialization failed|SystemError : (\d+)")
_CUSTOM_OP = re.compile(r"([\w.-]+:\w+)\(-?\d+\) is not a registered function/op")


def _rejection(error: Exception, data: bytes, folder: Path | None, weights: Container[str]) -> ModelError:
    """Return the error for a model that onnxruntime rejects. Missing data and custom ops have messages of their own."""
    if custom_op := _CUSTOM_OP.search(str(error)):
        return ModelError(
            f"onnxruntime has no op {custom_op[1]}, which belongs to a library of its own, so the model cannot be run"
            " here. Replace it by ops of ONNX or by a function of the model, or quantize only the weights, which needs"
            " no run: --rules weight_only, without --data."
        )
    try:
        for tensor in external_tensors(ModelProto.FromString(data)):
            if tensor.name not in weights:
                external_path(tensor, folder)
    except ModelError as missing:
        return missing
    return ModelError(f"onnxruntime rejects the model: {first_line(error)}. Correct the model, or update onnxruntime.")


def create_session_or_parts(message: Any, folder: Path | None, weights: Mapping[str, Array], mode: SessionMode) -> Any:
    """Return a session for a ModelProto, or sessions of its parts if a single one would take too long."""
    numbers = count()

    def prepare(part: Any, mode: SessionMode) -> Callable[[], Any]:
        if mode.optimized is not None and part is not message:
            mode = replace(mode, optimized=_part_path(mode.optimized, next(numbers)))
        names = (tensor.name for tensor in part.graph.initializer)
        part_weights = {name: weights[name] for name in names if name in weights}
        data, external_bytes = serialize_for_session(part, weights)
        if mode.optimized is not None and part is not message:  # all parts of a very long model need much memory
            path = mode.optimized.with_suffix(".part")
            path.write_bytes(data)
            return lambda: create_session(path.read_bytes(), folder, external_bytes, part_weights, mode=mode)
        create = partial(create_session, data, folder, external_bytes, part_weights, mode=mode)
        return cache(create) if kept else create

    # Other runs of a small model create no sessions, and threads of its sessions need little memory.
    kept = mode.watched or count_pairs(message) <= MAX_KEPT_PAIRS
    part_mode = mode if kept else replace(mode, watched=True)
    single = mode.timed or (mode.optimized is not None and count_pairs(message) <= MAX_OPTIMIZED_PAIRS)
    split = None if single else create_split_session(message, partial(prepare, mode=part_mode))
    return replace(split, kept=kept) if split is not None else prepare(message, mode)()


def _part_path(optimized: Path, number: int) -> Path:
    """Return the file for an optimized part of a model."""
    return optimized.with_suffix(f".{number}{optimized.suffix}")


def serialize_for_session(message: Any, separate_weights: Container[str] = ()) -> tuple[bytes, int]:
    """Return a ModelProto as bytes, and the size of its external data without the weights `separate_weights`."""
    external = (tensor for tensor in external_tensors(message) if tensor.name not in separate_weights)
    return message_bytes(message), sum(map(tensor_bytes, external))


def read_weight_names(emission: Emission) -> set[str]:
    """Return the names of large values that the main graph receives and that a node reads."""
    model = emission.model
    ops = (op for op in model.main.ops() if op.read_value is not None and constant_bytes(op) >= EXTERNAL_MIN_BYTES)
    return {emission.value_name(model, TensorRef("", op.name)) for op in ops if model.main.consumers_by_port(op.name)}


def run_session(session: Any, names: Sequence[str] | None, feeds: Feeds, flags: Feeds | None = None) -> list[Any]:
    """Return the outputs called `names`, or all outputs if that is None; raise ModelError if the run fails."""
    with run_errors(feeds):
        if isinstance(session, SplitSession):
            return session.run(names or (), [{**feeds, **(flags or {})}])[0]
        results: list[Any] = session.run(names, {**feeds, **(flags or {})})
    return results


@contextmanager
def run_errors(feeds: Feeds) -> Iterator[None]:
    """Turn errors of onnxruntime into a ModelError about a run of `feeds`."""
    try:
        yield
    except RUNTIME_ERRORS as error:
        shapes = ", ".join(f"{name} {np.asarray(value).dtype}{list(np.shape(value))}" for name, value in feeds.items())
        raise ModelError(
            f"onnxruntime failed on the inputs {shapes or 'none'}: {first_line(error)}. Give inputs that fit the model."
        ) from error


MAX_INLINE_OPTIMIZED_BYTES = 1 << 18
"""Size from which a weight of an optimized model goes to a file of its own, which nobody reads. Scales are smaller."""


class SessionError(ModelError):
    """onnxruntime cannot load a model; the message is its reason."""

    def __init__(self, message: str, op_key: OpKey) -> None:
        """Create the error."""
        super().__init__(message)
        self.op_key = op_key  # graph and name of the op that the error names, both "" if it names none


def require_loadable(model: Model) -> None:
    """Create a session for the model and close it.

    Raises a ModelError if the model cannot be emitted, and a SessionError if onnxruntime rejects the model.
    """
    load_numbered(model, {}, optimizes=False)


class NumberedModel:
    """Numbers as names of the nodes of a message, and a folder to which its sessions write it after optimizations.

    The optimized model, and errors of onnxruntime, name ops by these numbers.
    """

    def __init__(self, model: Model, emission: Emission, options: Mapping[str, str], *, optimizes: bool = True) -> None:
        """Number the nodes of the message. Without `optimizes`, sessions write nothing."""
        self._model, self._lookup, self._header = model, OpLookup(emission), copy_header(emission.message)
        self.folder = Path(mkdtemp())
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._path = self.folder / "optimized.onnx"
        self.mode = SessionMode(extra_options=options, optimized=self._path if optimizes else None)

    def name_ops(self, text: str) -> str:
        """Return an error with the names of ops in place of their numbers."""
        return NODE_NUMBER.sub(self._lookup.name_of_number, text)

    @contextmanager
    def session_errors(self) -> Iterator[None]:
        """Turn a ModelError into a SessionError that names the op."""
        try:
            yield
        except ModelError as error:
            reason = runtime_reason(error)
            raise SessionError(self.name_ops(reason), self._lookup.numbered_op(reason) or ("", "")) from error

    def load_optimized(self, parts: Sequence[SessionPart]) -> Iterator[OptimizedModel]:
        """Yield the model that the session, or those of the parts of the model, wrote; see `optimize_model`."""
        if not parts:
            yield _trace_optimized(self._model, load(self._path, lift=False), self._lookup)
            return
        starts = [0, *(self._lookup.number_after(part.last_node) for part in parts)]
        # ONNX Runtime changes the ops of a part for those of its neighbors at most.
        is_local = len(self._model.graphs) == 1 and 0 not in starts[1:] and has_local_values(self._header, parts)
        ops = [self._lookup.numbered[start:stop] for start, stop in pairwise((*starts[:-1], None))]
        count, size = len(parts), PARTS_PER_OPTIMIZED_MODEL if is_local else len(parts)
        equal_parts = {number: [number] for number in range(count)}
        if is_local:
            equal_parts = self._find_equal_parts([part.inputs for part in parts], starts, ops)
        del parts
        for group in reversed(list(_consecutive(equal_parts, size))):
            first, last = max(group[0] - 1, 0), min(group[-1] + 2, count)
            merged = merge_graphs(self._header, map(self._read_part, range(first, last)))
            optimized = model_from_message(merged, digest=self._model.digest, folder=self.folder, lift=False)
            traced = _trace_optimized(self._model, optimized, self._lookup)
            if len(group) < count:
                inner, nearby = chain(*(ops[number] for number in group)), chain(*ops[first:last])
                copies = [(ops[copy], ops[number]) for number in group for copy in equal_parts[number][1:]]
                traced = traced._replace(ops=list(inner), nearby_ops=list(nearby), copies=copies)
            yield traced

    def _read_part(self, number: int) -> Any:
        return ModelProto.FromString(_part_path(self._path, number).read_bytes())

    def _find_equal_parts(
        self, inputs: Sequence[Sequence[str]], starts: Sequence[int], ops: Sequence[Sequence[OpKey]]
    ) -> dict[int, list[int]]:
        """Return groups of parts that are equal after optimizations, except for names and stored values, by the first.

        The neighbors of each part are equal, too. There are the inputs of each part, the number of its first op, and
        its ops.
        """
        digests: list[object] = [None]
        last_values: dict[str, int] = {}
        for number, names in enumerate(inputs):
            values: dict[str, int] = {}
            rows = describe_integer_part(self._read_part(number), starts[number], values)
            if rows:
                rows.append(self._lookup.describe_ops(ops[number], values))
                rows.append(sorted((last_values.get(name, -1), values.get(name, -1)) for name in names))
            digests.append(hashlib.sha256(repr(rows).encode()).digest() if rows else number)
            last_values = values
        digests.append(None)
        groups: dict[tuple[object, ...], list[int]] = {}
        for number in range(len(inputs)):
            groups.setdefault(tuple(digests[number : number + 3]), []).append(number)
        return {group[0]: group for group in groups.values()}


def _consecutive(numbers: Iterable[int], size: int) -> Iterator[list[int]]:
    """Yield runs of up to `size` consecutive numbers."""
    run: list[int] = []
    for number in numbers:
        if run and (number > run[-1] + 1 or len(run) == size):
            yield run
            run = []
        run.append(number)
    yield run


def load_numbered(model: Model, options: Mapping[str, str], *, optimizes: bool) -> tuple[NumberedModel, Any]:
    """Create a session for the model, or sessions of its parts; return it with the numbers of its ops.

    Raises a SessionError that names the op if onnxruntime rejects the model.
    """
    emission = emit_message(model, defer_weights=True)
    folder, weights = model.source.folder, dict[str, Array]()
    options, is_large = {"session.disable_prepacking": "1", **options}, exceeds_read_bytes(emission.deferred)
    if is_large and not optimizes:  # folded weights would be computed, in memory
        # Products of integer weights would become MatMulNBits with copies of these, which can fail in bodies.
        is_plain = all(not name and all(op.kind != "quantize" for op in g.ops()) for name, g in model.graphs.items())
        disabled = "ConstantFolding;QDQSelectorActionTransformer" if is_plain else "ConstantFolding"
        options["optimization.disable_specified_optimizers"] = disabled
    numbered = NumberedModel(model, emission, options, optimizes=optimizes)
    if is_large:
        store_zeros(emission.message, emission.deferred, folder, numbered.folder / "zeros")
        folder = numbered.folder
    else:
        loaders = take_session_weights(emission.message, emission.deferred, read_weight_names(emission))
        weights.update((name, load()) for name, load in loaders.items())
    with numbered.session_errors():
        session = create_session_or_parts(emission.message, folder, weights, numbered.mode)
        for part in session_parts(session):
            part.create()
    return numbered, session


class OptimizedModel(NamedTuple):
    """A model after the optimizations of onnxruntime."""

    model: Model  # The optimized model. Values of large weights cannot be read.
    origins: Mapping[OpKey, OpKey]  # the op of the given model after which each optimized op is named
    # The tensor of the given model that each tensor computes, for those whose names survive.
    tensors: Mapping[TensorRef, TensorRef]
    # Consecutive ops of the given model that it runs, and these with their neighbors; None for all ops.
    ops: Sequence[OpKey] | None = None
    nearby_ops: Sequence[OpKey] | None = None
    # Further ops, and for each of them the one of `ops` that is optimized in the same way.
    copies: Sequence[tuple[Sequence[OpKey], Sequence[OpKey]]] = ()


def session_parts(session: Any) -> Sequence[SessionPart]:
    """Return the parts of a session, none if it has the whole model."""
    return session.parts if isinstance(session, SplitSession) else ()


def optimization_options(model: Model) -> dict[str, str]:
    """Return the configuration entries that keep large weights out of the file of the optimized model."""
    # Releases before 1.31 write some initializers twice, or fail, if weights go to a file of their own.
    weights = (op for op in model.main.ops() if op.read_value is not None)
    if RELEASE < (1, 31) and sum(map(constant_bytes, weights)) < MEMORY_MAPPED_BYTES:
        return {}
    return {
        "session.optimized_model_external_initializers_file_name": "weights",
        "session.optimized_model_external_initializers_min_size_in_bytes": str(MAX_INLINE_OPTIMIZED_BYTES),
    }


def _trace_optimized(model: Model, optimized: Model, lookup: OpLookup) -> OptimizedModel:
    """Trace the ops and tensors of an optimized model back to those of `model`."""
    origins: dict[OpKey, OpKey] = {}
    tensors: dict[TensorRef, TensorRef] = {}
    graph_names = {"": ""}
    for name in optimized.reachable_graphs():
        for op in optimized.graphs[name].ops():
            origin = lookup.numbered_op(op.source.name) if isinstance(op.source, NodeProto) else None
            for port, output in enumerate(op.outputs):
                tensor = lookup.tensors.get(graph_names.get(name, name), {}).get(output.name) if output.name else None
                if tensor is not None:
                    tensors[TensorRef(name, op.name, port)] = tensor
            # Ops of a folded weight are not in the model.
            if origin is not None and origin[1] in model.graphs[origin[0]]:
                origins[name, op.name] = origin
                bodies = {call.attr: call.graph for call in model.graphs[origin[0]].op(origin[1]).calls}
                graph_names.update((call.graph, bodies[call.attr]) for call in op.calls if call.attr in bodies)
    return OptimizedModel(model=optimized, origins=origins, tensors=tensors)


class OpLookup:
    """Ops of a message's nodes, which get numbers as names, and tensors by the names of their values."""

    def __init__(self, emission: Emission) -> None:
        """Rename each node of an emitted model to a number."""
        self._model, self._renamed_tensors = emission.model, emission.renamed_tensors
        self.numbered: list[OpKey] = []  # the ops, in the order of the message
        functions = [name for name, graph in self._model.graphs.items() if graph.is_function]
        pending = [("", emission.message.graph), *zip(functions, emission.message.functions, strict=True)]
        for name, proto in pending:  # grows while bodies are visited
            graph, producers = self._model.graphs[name], {value: op for value, op, _ in self._values(name)}
            for node in proto.node:
                value = next(filter(None, node.output), "")
                if value not in producers:  # the emitter adds an Identity for an output that reads a constant
                    continue
                node.name = f"@{len(self.numbered)}@"
                self.numbered.append((name, producers[value]))
                calls = {call.attr: call.graph for call in graph.op(producers[value]).calls}
                if calls:
                    pending += [(calls[label], body) for label, body in node_bodies(node).items() if label in calls]

    def _values(self, graph_name: str) -> Iterator[tuple[str, str, int]]:
        """Yield the name of each value of a graph, and the op and the port that return it."""
        for op in self._model.graphs[graph_name].ops():
            if op.kind == "constant" and not graph_name and op.name == op.outputs[0].name:
                continue  # its value has the same name after optimizations, and there are many
            for port, output in enumerate(op.outputs):
                name = self._renamed_tensors.get(TensorRef(graph_name, op.name, port)) or output.name
                if name:
                    yield name, op.name, port

    @cached_property
    def tensors(self) -> Mapping[str, Mapping[str, TensorRef]]:
        """Tensors by graph and value name. They exist only when they are read, because a large model has many."""
        return {
            name: {value: TensorRef(name, op, port) for value, op, port in self._values(name)}
            for name in self._model.graphs
        }

    def describe_ops(self, ops: Sequence[OpKey], values: dict[str, int]) -> list[tuple[Any, ...]]:
        """Return kinds, types and inputs of ops of the main graph and of the constants that they read, without names.

        `values` has a number for each name of a value, and grows.
        """
        graph, rows = self._model.main, list[tuple[Any, ...]]()
        names, pending = {name for _, name in ops}, [name for _, name in ops]
        for name in pending:  # grows
            op, numbers = graph.op(name), list[int]()
            for tensor in graph.slots(name):
                if tensor is None:
                    continue
                source = graph.op(tensor.op)
                value = self._renamed_tensors.get(tensor) or source.outputs[tensor.port].name
                numbers.append(values.setdefault(value, len(values)))
                if source.kind in {"constant", "dequantize"} and source.name not in names:
                    names.add(source.name)
                    pending.append(source.name)
            for port, output in enumerate(op.outputs):
                value = self._renamed_tensors.get(TensorRef("", name, port)) or output.name
                numbers.append(values.setdefault(value, len(values)))
            types = [(output.dtype, output.shape) for output in op.outputs]
            rows.append((op.kind, op.type, is_barrier(graph, op), types, numbers))
        return rows

    def numbered_op(self, name: str) -> OpKey | None:
        """Return the op whose number is in the name of onnxruntime's op, None if there is none."""
        number_match = NODE_NUMBER.search(name)
        known = number_match is not None and int(number_match[1]) < len(self.numbered)
        return self.numbered[int(number_match[1])] if number_match is not None and known else None

    @staticmethod
    def number_after(name: str) -> int:
        """Return the number after that of a node, 0 if it has none."""
        number_match = NODE_NUMBER.fullmatch(name)
        return 0 if number_match is None else int(number_match[1]) + 1

    def name_of_number(self, number_match: re.Match[str]) -> str:
        """Return the name of the op with a number in an error of onnxruntime, for messages."""
        op_key = self.numbered_op(number_match[0])
        return number_match[0] if op_key is None else qualified_op_name(*op_key)
