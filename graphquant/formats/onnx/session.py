"""onnxruntime sessions: run models, observe any of their tensors, and measure their time in total and by op."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain, count, islice, pairwise
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from onnx import ModelProto, NodeProto

from graphquant import formats
from graphquant.calibration.memory import return_freed_memory
from graphquant.errors import ModelError
from graphquant.formats import Feeds, InputSpec, OpProfile, prefetch, provenance_of
from graphquant.formats.onnx.emitter import Emission, emit_message, node_bodies
from graphquant.formats.onnx.external_data import (
    EXTERNAL_MIN_BYTES,
    constant_bytes,
    exceeds_read_bytes,
    store_zeros,
    take_session_weights,
)
from graphquant.formats.onnx.file_writer import external_tensors, message_bytes
from graphquant.formats.onnx.index import input_specs
from graphquant.formats.onnx.observe import Probe, WatchMode, outputs_to_fetch, watch_tensors
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
    read_names,
)
from graphquant.formats.onnx.tensors import external_path, first_line, tensor_bytes
from graphquant.ir import Model, TensorRef, Use, qualified_op_name
from graphquant.ir.op_matching import is_barrier
from graphquant.numerics import QParams, dequantize, quantize
from graphquant.quantize.integer_io import convert_boundary, integer_tensors

ObservedValues = dict[TensorRef, list["Array"]]
OpKey = tuple[str, str]

Array = np.ndarray[Any, Any]

INTRA_OP_THREADS = min(4, os.cpu_count() or 1)
"""Threads within an op; fixed, so that a run does not depend on other settings of the process."""

MEMORY_MAPPED_BYTES = 1 << 29
"""Size of external data from which weights stay memory-mapped during runs, which is slower."""

SESSION_PER_THREAD_BYTES = 1 << 24
"""Maximum size of a model for which each observing thread has a session of its own. The values of two runs that share a
session are interleaved in its memory, which fragments it."""

MAX_COPIED_TENSORS = 1 << 12  # Maximum number of watched tensors for which there are such sessions.
MAX_OPTIMIZED_PAIRS = 10_000  # maximum number of DequantizeLinear nodes of a model that is optimized as a whole
PARTS_PER_OPTIMIZED_MODEL = 50  # number of parts of a very long model that are read at once after optimizations
MAX_KEPT_PAIRS = 4000  # maximum number of DequantizeLinear nodes of a model in parts whose sessions exist at once
FEEDS_PER_SPLIT_RUN = 32  # maximum number of feeds that pass a model in parts at once
_SPINNING_OPTION = "session.intra_op.allow_spinning"
"""If two sessions take turns, threads that spin while waiting for the next run take CPU time from the other session."""

_EXTERNAL_FOLDER_OPTION = "session.model_external_initializers_file_folder_path"


def _integer_params(model: Model) -> dict[str, QParams]:
    """Return the scales of the integer inputs and outputs that stand for floats, by name."""
    return {tensor.name: tensor.params_in(model) for tensor in integer_tensors(provenance_of(model))}


def _quantize_feed(feed: Feeds, integers: Mapping[str, QParams]) -> Feeds:
    """Return a feed with quantized values for integer inputs that get floats."""
    quantized = {
        name: convert_boundary(quantize, feed[name], params).astype(params.type.name)
        for name, params in integers.items()
        if name in feed and np.asarray(feed[name]).dtype.kind == "f"
    }
    return {**feed, **quantized} if quantized else feed


class OnnxRunner:
    """Runs a model with onnxruntime on the CPU: inputs without a default value, and outputs that are tensors."""

    def __init__(self, model: Model, *, optimizes: bool = True) -> None:
        """Raise ModelError if the model cannot be emitted. Without `optimizes`, the model runs as it is written."""
        self.model, self._optimizes = model, optimizes
        self._external_weights: Mapping[str, Callable[[], Array]] = {}
        self._weights: dict[str, Array] = {}  # values of weights that are not in the message, by name
        self._session: Any = None
        self._full_watch: _WatchSession | None = None
        self._flagged_watch: _WatchSession | None = None
        self._numbered: _NumberedModel | None = None
        # The model with its message as bytes, for its file; None for a model whose message is not large.
        self.serialized: Emission | None = None
        self._counted: tuple[Feeds, dict[TensorRef, int]] = {}, {}  # the last feed of `element_counts`, and its result
        self.inputs: Sequence[InputSpec] = input_specs(model)
        infos = self._emission.message.graph.output
        self._output_names = [info.name for info in infos]
        # Float feeds of integer inputs are quantized, and integer outputs dequantized.
        self._integers = _integer_params(model)
        self.outputs: Sequence[str] = [info.name for info in infos if not info.type.HasField("sequence_type")]

    @cached_property
    def _emission(self) -> Emission:
        """The model as a message without large weights."""
        emission = emit_message(self.model, defer_weights=True)
        if count_pairs(emission.message) > MAX_OPTIMIZED_PAIRS:
            self.serialized = emission._replace(message=message_bytes(emission.message))
        read_names = _read_weight_names(emission)
        self._external_weights = take_session_weights(emission.message, emission.deferred, read_names)
        return emission

    def start(self) -> None:
        """Create the session, which otherwise happens at the first run; raise ModelError if that fails."""
        if self._session is None:
            mode, message = SessionMode(optimizes=self._optimizes), self._emission.message
            if self._optimizes and count_pairs(message) > MAX_OPTIMIZED_PAIRS:
                # `optimize_model` needs sessions of the same parts, so those that run write the optimized parts, too.
                self._numbered = _NumberedModel(self.model, self._emission, _optimization_options(self.model))
                mode = self._numbered.mode
            with self._named_errors():
                self._session = self._open_session(message, mode)
            if isinstance(self._session, SplitSession) and not self._session.kept:
                del self._emission, message  # it is large, and few models with so many pairs are observed
                return_freed_memory()

    def create_timed_session(self) -> Any:
        """Return a new session to measure time."""
        return self._open_session(self._emission.message, SessionMode(timed=True))

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run one feed and return the model's outputs by name; raise ModelError if that fails."""
        return next(self.run_each([feeds]))

    @staticmethod
    def start_sequence() -> bool:
        """Do nothing: ONNX models have no state."""
        return False

    def run_each(self, feeds: Iterable[Feeds]) -> Iterator[dict[str, Array]]:
        """Yield the outputs of each feed. A model in parts runs many feeds at once, because it creates its sessions."""
        self.start()
        session, is_split = self._session, isinstance(self._session, SplitSession)
        remaining = (_quantize_feed(feed, self._integers) for feed in feeds)
        while group := list(islice(remaining, FEEDS_PER_SPLIT_RUN if is_split else 1)):
            if not self.outputs:  # for onnxruntime, no names are all names
                yield from ({} for _ in group)
                continue
            with self._named_errors(), _run_errors(group[0]):
                results = session.run(self.outputs, group) if is_split else [session.run(self.outputs, *group)]
            for values in results:
                outputs = dict(zip(self.outputs, values, strict=True))
                yield outputs | {
                    name: convert_boundary(dequantize, outputs[name], params)
                    for name, params in self._integers.items()
                    if name in outputs
                }

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Name ops in errors by their names if they have numbers in the message."""
        try:
            yield
        except ModelError as error:
            if self._numbered is None:
                raise
            raise ModelError(self._numbered.name_ops(str(error))) from error

    def take_optimized(self) -> Iterator[OptimizedModel] | None:
        """Return the model as onnxruntime optimized it for the runs so far, only once; None if that is not known.

        See `optimize_model`.
        """
        numbered, self._numbered = self._numbered, None
        if numbered is None or self._session is None:
            return None
        session, self._session = self._session, None
        return_freed_memory()
        return numbered.load_optimized(_session_parts(session))

    def unobservable(self, tensors: Sequence[TensorRef]) -> dict[TensorRef, str]:
        """Return the reason for each of `tensors` that cannot be observed."""
        nested = [tensor for tensor in tensors if tensor.graph]
        rejected = watch_tensors(self.model, self._emission, nested).rejected if nested else {}
        return {tensor: str(error) for tensor, error in rejected.items()}

    @property
    def output_tensors(self) -> Mapping[str, TensorRef]:
        """Tensor of each entry of `outputs` that is not an integer in place of a float."""
        main, output_names = self.model.main, set(self.outputs) - self._integers.keys()
        labels = zip(self._output_names, main.outputs, strict=True)
        producers = {name: main.source_of(Use("", label, 0)) for name, label in labels if name in output_names}
        return {name: tensor for name, tensor in producers.items() if tensor is not None}

    def element_counts(self, tensors: Sequence[TensorRef], feed: Feeds) -> dict[TensorRef, int]:
        """Return the number of elements of each tensor in one run, over all iterations; 0 if it is not reached.

        Raises an UnobservableTensorError if a tensor is `unobservable`, and a ModelError if onnxruntime rejects the
        model, or the run failed.
        """
        feed = _quantize_feed(feed, self._integers)
        if all(spec.shape is not None and None not in spec.shape for spec in self.inputs) and not any(
            tensor.graph for tensor in tensors
        ):
            self._full_watch = None
            self._full_watch = self._create_watch(tensors)  # `observe` reuses it
            static_counts = self._full_watch.static_element_counts(tensors, feed)
            if static_counts is not None:
                return static_counts
            self._full_watch = None
        last_feed, counts = self._counted
        is_known = counts.keys() >= {*tensors} and last_feed.keys() == feed.keys()
        if not is_known or not all(np.array_equal(last_feed[name], value) for name, value in feed.items()):
            size_watch = self._create_watch(tensors, "sizes")
            counts = {
                tensor: sum(int(value) if size_watch.probes[tensor].sources else value.size for value in values)
                for tensor, values in size_watch.run_function(tensors)(feed).items()
            }
            self._counted = feed, counts
        return {tensor: counts[tensor] for tensor in tensors}

    def observe(
        self,
        tensors: Sequence[TensorRef],
        feeds: Iterable[Feeds],
        *,
        other_tensors: Sequence[TensorRef] = (),
        max_in_flight: int = 1,
        on_result: Callable[[ObservedValues], object] | None = None,
        ancestors_only: bool = False,
    ) -> Generator[ObservedValues, None, None]:
        """Yield for each feed the values of each tensor: none if it was not reached, several inside loops.

        The runner keeps no reference to the values: values that the caller drops need no memory during the next run.

        Args:
            tensors: Tensors to observe.
            feeds: Feeds to run.
            other_tensors: Tensors that other calls observe on the same feeds, because memory does not suffice. The
                calls share a session, which returns the requested tensors. onnxruntime fuses ops between which nothing
                is watched, so the session must know all of them.
            max_in_flight: Maximum number of feeds whose values exist at once. While the values of one feed are
                processed, others are run, each on a thread of its own.
            on_result: Receives the values of each feed in order, on the thread that ran it. Values that it removes are
                not yielded.
            ancestors_only: True to leave out the nodes that no value of `tensors` depends on.

        Raises an UnobservableTensorError if a tensor is `unobservable`, and a ModelError if onnxruntime rejects the
        model, or a run failed.
        """
        if other_tensors:
            self._full_watch, flagged = None, {*tensors, *other_tensors}
            if self._flagged_watch is None or self._flagged_watch.probes.keys() != flagged:
                self._flagged_watch = None  # free the previous session first
                self._flagged_watch = self._create_watch(sorted(flagged), "values by flag")
            watch_session = self._flagged_watch
        elif self._full_watch is not None and self._full_watch.probes.keys() >= set(tensors):
            watch_session = self._full_watch
        elif ancestors_only:
            watch_session = self._create_watch(tensors, ancestors_only=True)
        else:
            self._full_watch = None  # free the previous session first
            watch_session = self._full_watch = self._create_watch(tensors)
        run, feeds = watch_session.run_function(tensors), (_quantize_feed(feed, self._integers) for feed in feeds)
        is_small = self._model_bytes <= SESSION_PER_THREAD_BYTES and len(watch_session.probes) <= MAX_COPIED_TENSORS
        if ancestors_only and is_small:
            max_in_flight = 1  # the activations of a second run need more memory than the model
        elif on_result is not None and is_small:
            copies = [self._create_watch(list(watch_session.probes)) for _ in range(max_in_flight - 1)]
            run = _run_per_thread([run, *(copy.run_function(tensors) for copy in copies)])
        yield from prefetch(run, feeds, max_in_flight, on_result)

    @property
    def _model_bytes(self) -> int:
        """Size of the model with its weights."""
        sizes = (tensor_bytes(t) for t in self._emission.message.graph.initializer if t.name in self._external_weights)
        return int(self._emission.message.ByteSize()) + sum(sizes)

    def _create_watch(
        self, tensors: Sequence[TensorRef], mode: WatchMode = "values", *, ancestors_only: bool = False
    ) -> _WatchSession:
        """Return a session that watches `tensors`, and all float outputs that cost nothing more."""
        outputs = () if mode != "values" or ancestors_only else self.output_tensors.values()
        watched = {*tensors, *(tensor for tensor in outputs if self.model.output(tensor).dtype == "float32")}
        watched_message = watch_tensors(self.model, self._emission, sorted(watched), mode)
        for error in watched_message.rejected.values():
            raise error
        probes, flags = {tensor: watched_message.probes[tensor] for tensor in watched}, watched_message.flags
        fetched = outputs_to_fetch(probes[tensor] for tensor in tensors)
        if not fetched:
            return _WatchSession(None, {tensor: probes[tensor] for tensor in tensors}, flags)
        if ancestors_only:
            _keep_ancestors(watched_message.message.graph, fetched)
        session_mode = SessionMode(watched=True, optimizes=self._optimizes)
        return _WatchSession(self._open_session(watched_message.message, session_mode), probes, flags)

    def _open_session(self, message: Any, mode: SessionMode) -> Any:
        """Return a session for a variant of the model; all sessions share the weights that are not in the message."""
        names = [tensor.name for tensor in message.graph.initializer if tensor.name in self._external_weights]
        for name in names:
            if name not in self._weights:
                self._weights[name] = self._external_weights[name]()
        weights = {name: self._weights[name] for name in names}
        session = _create_session_or_parts(message, self.model.source.folder, weights, mode)
        if sum(value.nbytes for value in weights.values()) > SESSION_PER_THREAD_BYTES:
            return_freed_memory()  # onnxruntime copies weights while it packs them
        return session

    def free_session(self, *, observing: bool = False, only_large: bool = True) -> None:
        """Free the session of `run`, or that of `observe`, perhaps only if its weights need much memory."""
        if not only_large or self._model_bytes > SESSION_PER_THREAD_BYTES:
            if observing:
                self._full_watch = self._flagged_watch = None
            else:
                self._session = None
            if self._session is None and self._full_watch is None and self._flagged_watch is None:
                self._weights.clear()
                vars(self).pop("_emission", None)


def create_runner(model: Model, *, optimizes: bool = True) -> OnnxRunner:
    """Return a runner for the model. It creates its onnxruntime session at the first run.

    Raises a ModelError if the model cannot be emitted.
    """
    return OnnxRunner(model, optimizes=optimizes)


class _WatchSession(NamedTuple):
    """A session that returns watched tensors."""

    session: Any  # the session, None if no tensor needs one
    probes: Mapping[TensorRef, Probe]  # source of each tensor's values
    flags: Sequence[str]  # all flag inputs

    def static_element_counts(self, tensors: Sequence[TensorRef], feed: Feeds) -> dict[TensorRef, int] | None:
        """Return the elements of each of `tensors` in one run, None if onnxruntime does not know all shapes."""
        if isinstance(self.session, SplitSession):
            return None
        shapes = {} if self.session is None else {output.name: output.shape for output in self.session.get_outputs()}
        counts = {}
        for tensor in tensors:
            probe = self.probes[tensor]
            shape = shapes[probe.sources[0].outputs[0]] if probe.sources else np.shape(probe.values({}, feed)[0])
            if probe.sources and (not shape or not all(isinstance(size, int) for size in shape)):
                return None  # onnxruntime reports an unknown rank as no axes
            counts[tensor] = math.prod(shape)
        return counts

    def run_function(self, tensors: Sequence[TensorRef]) -> Callable[[Feeds], ObservedValues]:
        """Return a function that runs a feed and returns the values of each of `tensors`."""
        probes = {tensor: self.probes[tensor] for tensor in tensors}
        names = outputs_to_fetch(probes.values())
        requested_flags = {probe.flag for probe in probes.values()}
        flags = {flag: np.array(flag in requested_flags, np.int64) for flag in self.flags}

        def run(feed: Feeds) -> ObservedValues:
            fetched = dict(zip(names, run_session(self.session, names, feed, flags), strict=True)) if names else {}
            return {tensor: probe.values(fetched, feed) for tensor, probe in probes.items()}

        return run


def _run_per_thread(runs: Sequence[Callable[[Feeds], ObservedValues]]) -> Callable[[Feeds], ObservedValues]:
    """Return a function that calls one of `runs` on each thread, always the same one."""
    thread_state, unassigned = threading.local(), iter(runs)

    def run(feed: Feeds) -> ObservedValues:
        if not hasattr(thread_state, "run"):
            thread_state.run = next(unassigned)
        values: ObservedValues = thread_state.run(feed)
        return values

    return run


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


def _create_session_or_parts(message: Any, folder: Path | None, weights: Mapping[str, Array], mode: SessionMode) -> Any:
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


def _keep_ancestors(graph: Any, names: Sequence[str]) -> None:
    """Remove the outputs of a graph except `names`, and all nodes and initializers that these do not need."""
    nodes = list(graph.node)
    producers = {value: position for position, node in enumerate(nodes) for value in node.output if value}
    needed, pending, positions = set(names), list(names), set()
    for name in pending:  # grows
        position = producers.get(name)
        if position is not None and position not in positions:
            positions.add(position)
            new_names = set(read_names(nodes[position])) - needed
            needed |= new_names
            pending += new_names
    del graph.node[:]
    graph.node.extend(nodes[position] for position in sorted(positions))
    # An input with a default goes with it: alone it would have to be fed, and onnxruntime drops a default that no node
    # reads before it looks for its value.
    inputs = needed | {info.name for info in graph.input} - {tensor.name for tensor in graph.initializer}
    for entries, kept_names in ((graph.input, inputs), (graph.initializer, needed), (graph.output, set(names))):
        for index in reversed(range(len(entries))):
            if entries[index].name not in kept_names:
                del entries[index]


def _read_weight_names(emission: Emission) -> set[str]:
    """Return the names of large values that the main graph receives and that a node reads."""
    model = emission.model
    ops = (op for op in model.main.ops() if op.read_value is not None and constant_bytes(op) >= EXTERNAL_MIN_BYTES)
    return {emission.value_name(model, TensorRef("", op.name)) for op in ops if model.main.consumers_by_port(op.name)}


def run_session(session: Any, names: Sequence[str] | None, feeds: Feeds, flags: Feeds | None = None) -> list[Any]:
    """Return the outputs called `names`, or all outputs if that is None; raise ModelError if the run fails."""
    with _run_errors(feeds):
        if isinstance(session, SplitSession):
            return session.run(names or (), [{**feeds, **(flags or {})}])[0]
        results: list[Any] = session.run(names, {**feeds, **(flags or {})})
    return results


@contextmanager
def _run_errors(feeds: Feeds) -> Iterator[None]:
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
    _load_numbered(model, {}, optimizes=False)


class _NumberedModel:
    """Numbers as names of the nodes of a message, and a folder to which its sessions write it after optimizations.

    The optimized model, and errors of onnxruntime, name ops by these numbers.
    """

    def __init__(self, model: Model, emission: Emission, options: Mapping[str, str], *, optimizes: bool = True) -> None:
        """Number the nodes of the message. Without `optimizes`, sessions write nothing."""
        self._model, self._lookup, self._header = model, _OpLookup(emission), copy_header(emission.message)
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
            reason = first_line(error.__cause__ or error)
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


def _load_numbered(model: Model, options: Mapping[str, str], *, optimizes: bool) -> tuple[_NumberedModel, Any]:
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
    numbered = _NumberedModel(model, emission, options, optimizes=optimizes)
    if is_large:
        store_zeros(emission.message, emission.deferred, folder, numbered.folder / "zeros")
        folder = numbered.folder
    else:
        loaders = take_session_weights(emission.message, emission.deferred, _read_weight_names(emission))
        weights.update((name, load()) for name, load in loaders.items())
    with numbered.session_errors():
        session = _create_session_or_parts(emission.message, folder, weights, numbered.mode)
        for part in _session_parts(session):
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


def optimize_model(model: Model, *, int8_activations: bool = False) -> Iterator[OptimizedModel]:
    """Yield the model as onnxruntime optimizes it for the CPU, without changes of layout.

    There are several models if it has very many parts, so that only some of the parts are in memory. The last ops come
    first.

    Args:
        model: The model.
        int8_activations: Optimize for kernels that accept int8 activations, as on ARM.

    Raises a ModelError if the model cannot be emitted, and a SessionError if onnxruntime rejects the model.
    """
    runner = None if int8_activations else formats.find_shared_runner(model)
    optimized = runner.take_optimized() if isinstance(runner, OnnxRunner) else None
    if optimized is not None:
        return optimized
    options = {"session.qdqisint8allowed": "1"} if int8_activations else {}
    numbered, session = _load_numbered(model, options | _optimization_options(model), optimizes=True)
    # A reference to the session would keep the weights, which would be in memory twice.
    return numbered.load_optimized(_session_parts(session))


def _session_parts(session: Any) -> Sequence[SessionPart]:
    """Return the parts of a session, none if it has the whole model."""
    return session.parts if isinstance(session, SplitSession) else ()


def _optimization_options(model: Model) -> dict[str, str]:
    """Return the configuration entries that keep large weights out of the file of the optimized model."""
    # Releases before 1.31 write some initializers twice, or fail, if weights go to a file of their own.
    weights = (op for op in model.main.ops() if op.read_value is not None)
    if RELEASE < (1, 31) and sum(map(constant_bytes, weights)) < MEMORY_MAPPED_BYTES:
        return {}
    return {
        "session.optimized_model_external_initializers_file_name": "weights",
        "session.optimized_model_external_initializers_min_size_in_bytes": str(MAX_INLINE_OPTIMIZED_BYTES),
    }


def _trace_optimized(model: Model, optimized: Model, lookup: _OpLookup) -> OptimizedModel:
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


MAX_PROFILED_RUNS, MAX_PROFILED_SECONDS = 100, 0.4
"""Maximum number and time of profiled runs; there are at least `MIN_PROFILED_RUNS`."""

MIN_PROFILED_RUNS = 5

MAX_PROFILER_OVERHEAD, MIN_OP_SECONDS = 5e-6, 0.5e-6
"""Maximum overhead of the profiler per op, and time of an op that does nothing without it, in seconds."""

GENERATED_SUFFIX = re.compile(r"(_nchwc|_q|_dq|_q_to_dq)$")
"""Suffix that onnxruntime adds to the name of a tensor to name an op after it."""

CONTAINER_OPS = frozenset({"Loop", "If", "Scan"})  # types whose time is that of the ops inside, which are reported too
CONVERSION_OPS = frozenset({"QuantizeLinear", "DequantizeLinear"})


def prepare_timed_run(model: Model, feeds: Sequence[Feeds]) -> Callable[[], object]:
    """Return a function that runs each of `feeds` once, in a new session with one thread.

    Raises a ModelError if onnxruntime rejects the model, a run failed, or the model has very many Q/DQ pairs.
    """
    if sum(op.kind == "dequantize" for op in model.main.ops()) > MAX_KEPT_PAIRS:  # a single session takes too long
        raise ModelError(
            "the time of a model with so many Q/DQ pairs cannot be measured. Choose another objective than latency."
        )
    session, integers = OnnxRunner(model).create_timed_session(), _integer_params(model)
    feeds = [_quantize_feed(feed, integers) for feed in feeds]
    for feed in feeds:
        run_session(session, None, feed)
    return lambda: [session.run(None, feed) for feed in feeds]


def profile_ops(model: Model, feeds: Sequence[Feeds]) -> OpProfile:
    """Return the seconds of each op in a run; the time of a fused op is listed under one of its ops.

    Raises a ModelError if onnxruntime rejects the model, or a run failed.
    """
    emission = emit_message(model)
    lookup = _OpLookup(emission)
    data, external_bytes = serialize_for_session(emission.message)
    with TemporaryDirectory() as folder:
        profile = Path(folder, "run")
        mode = SessionMode(timed=True, profile=profile)
        session = create_session(data, model.source.folder, external_bytes, mode=mode)
        integers = _integer_params(model)
        feeds = [_quantize_feed(feed, integers) for feed in feeds]
        for feed in feeds:
            run_session(session, None, feed)
        runs, deadline = 1, time.perf_counter() + MAX_PROFILED_SECONDS
        while runs < MIN_PROFILED_RUNS or (runs < MAX_PROFILED_RUNS and time.perf_counter() < deadline):
            for feed in feeds:
                session.run(None, feed)
            runs += 1
        events = json.loads(Path(session.end_profiling()).read_bytes())
    return _sum_by_op(_op_durations(events), lookup, runs)


class _OpLookup:
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


def _op_durations(events: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of each run of onnxruntime's ops, by name and type."""
    durations: dict[tuple[str, str], list[float]] = {}
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            key = name.removesuffix("_kernel_time"), event["args"]["op_name"]
            durations.setdefault(key, []).append(event["dur"] * 1e-6)
    return {key: seconds for key, seconds in durations.items() if key[1] not in CONTAINER_OPS}


def _sum_by_op(durations: Mapping[tuple[str, str], list[float]], lookup: _OpLookup, runs: int) -> OpProfile:
    """Attribute the time of onnxruntime's ops to those of the model, without the overhead of the profiler."""
    # Means of the shorter half: the profiler reports whole microseconds, and some runs are interrupted.
    means = {key: mean(sorted(seconds)[: max(len(seconds) // 2, 1)]) for key, seconds in durations.items()}
    producers = {value: tensor[:2] for values in lookup.tensors.values() for value, tensor in values.items()}
    overhead = min(min(means.values(), default=0.0), MAX_PROFILER_OVERHEAD)
    ops: dict[OpKey, float] = {}
    conversions: dict[OpKey, float] = {}
    for (name, kind), mean_seconds in means.items():
        op_key = lookup.numbered_op(name) or producers.get(GENERATED_SUFFIX.sub("", name)) or producers.get(name)
        if op_key is not None:
            totals = conversions if kind in CONVERSION_OPS else ops
            count = len(durations[name, kind]) / runs
            seconds = max(mean_seconds - overhead, 0.0) * count + MIN_OP_SECONDS * count
            totals[op_key] = totals.get(op_key, 0.0) + seconds
    return OpProfile(seconds=ops, conversion_seconds=conversions)
