"""Run models in onnxruntime, observe any of their tensors, and measure their time in total and by op."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from graphquant import formats
from graphquant.calibration.memory import return_freed_memory
from graphquant.errors import ModelError
from graphquant.formats import Feeds, InputSpec, OpProfile, prefetch, provenance_of
from graphquant.formats.onnx.emitter import Emission, emit_message
from graphquant.formats.onnx.external_data import take_session_weights
from graphquant.formats.onnx.file_writer import message_bytes
from graphquant.formats.onnx.index import input_specs
from graphquant.formats.onnx.observe import Probe, WatchMode, outputs_to_fetch, watch_tensors
from graphquant.formats.onnx.session import (
    MAX_KEPT_PAIRS,
    MAX_OPTIMIZED_PAIRS,
    Array,
    NumberedModel,
    OpKey,
    OpLookup,
    OptimizedModel,
    SessionMode,
    create_session,
    create_session_or_parts,
    load_numbered,
    optimization_options,
    read_weight_names,
    run_errors,
    run_session,
    serialize_for_session,
    session_parts,
)
from graphquant.formats.onnx.split_session import SplitSession, count_pairs, read_names
from graphquant.formats.onnx.tensors import tensor_bytes
from graphquant.ir import Model, TensorRef, Use
from graphquant.numerics import QParams, dequantize, quantize
from graphquant.quantize.integer_io import convert_boundary, integer_tensors

ObservedValues = dict[TensorRef, list[Array]]

SESSION_PER_THREAD_BYTES = 1 << 24
"""Maximum size of a model for which each observing thread has a session of its own. The values of two runs that share a
session are interleaved in its memory, which fragments it."""

MAX_COPIED_TENSORS = 1 << 12  # Maximum number of watched tensors for which there are such sessions.
FEEDS_PER_SPLIT_RUN = 32  # maximum number of feeds that pass a model in parts at once

MAX_PROFILED_RUNS, MAX_PROFILED_SECONDS = 100, 0.4
"""Maximum number and time of profiled runs; there are at least `MIN_PROFILED_RUNS`."""

MIN_PROFILED_RUNS = 5

MAX_PROFILER_OVERHEAD, MIN_OP_SECONDS = 5e-6, 0.5e-6
"""Maximum overhead of the profiler per op, and time of an op that does nothing without it, in seconds."""

GENERATED_SUFFIX = re.compile(r"(_nchwc|_q|_dq|_q_to_dq)$")
"""Suffix that onnxruntime adds to the name of a tensor to name an op after it."""

CONTAINER_OPS = frozenset({"Loop", "If", "Scan"})  # types whose time is that of the ops inside, which are reported too
CONVERSION_OPS = frozenset({"QuantizeLinear", "DequantizeLinear"})


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
        self._numbered: NumberedModel | None = None
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
        read_names = read_weight_names(emission)
        self._external_weights = take_session_weights(emission.message, emission.deferred, read_names)
        return emission

    def start(self) -> None:
        """Create the session, which otherwise happens at the first run; raise ModelError if that fails."""
        if self._session is None:
            mode, message = SessionMode(optimizes=self._optimizes), self._emission.message
            if self._optimizes and count_pairs(message) > MAX_OPTIMIZED_PAIRS:
                # `optimize_model` needs sessions of the same parts, so those that run write the optimized parts, too.
                self._numbered = NumberedModel(self.model, self._emission, optimization_options(self.model))
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
            with self._named_errors(), run_errors(group[0]):
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
        return numbered.load_optimized(session_parts(session))

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
        session = create_session_or_parts(message, self.model.source.folder, weights, mode)
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
    numbered, session = load_numbered(model, options | optimization_options(model), optimizes=True)
    # A reference to the session would keep the weights, which would be in memory twice.
    return numbered.load_optimized(session_parts(session))


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
    lookup = OpLookup(emission)
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


def _op_durations(events: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of each run of onnxruntime's ops, by name and type."""
    durations: dict[tuple[str, str], list[float]] = {}
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            key = name.removesuffix("_kernel_time"), event["args"]["op_name"]
            durations.setdefault(key, []).append(event["dur"] * 1e-6)
    return {key: seconds for key, seconds in durations.items() if key[1] not in CONTAINER_OPS}


def _sum_by_op(durations: Mapping[tuple[str, str], list[float]], lookup: OpLookup, runs: int) -> OpProfile:
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
