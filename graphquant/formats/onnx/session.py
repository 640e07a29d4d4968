"""Models in onnxruntime: run, and watched at any of their tensors."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnx import NodeProto
from onnxruntime.capi import onnxruntime_pybind11_state as state

from graphquant.errors import ModelError
from graphquant.formats import OpProfile
from graphquant.formats.onnx import input_specs
from graphquant.formats.onnx.batch_independence import is_batch_independent
from graphquant.formats.onnx.emitter import emit_message
from graphquant.formats.onnx.external_data import EXTERNAL_MIN_BYTES, constant_bytes, take_session_weights
from graphquant.formats.onnx.file_writer import external_tensors, message_bytes
from graphquant.formats.onnx.observe import Probe, outputs_to_fetch, watch_tensors
from graphquant.formats.onnx.reader import model_from_message
from graphquant.formats.onnx.tensors import DTYPE_NAMES, first_line, stored_bytes
from graphquant.formats.prefetch import prefetch
from graphquant.ir import TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence

    from graphquant.formats import Feeds, InputSpec
    from graphquant.formats.onnx.emitter import Emission
    from graphquant.formats.onnx.observe import WatchMode
    from graphquant.ir import Model

    ObservedValues = dict[TensorRef, list["Array"]]
    OpKey = tuple[str, str]


Array = np.ndarray[Any, Any]

INTRA_OP_THREADS = min(4, os.cpu_count() or 1)
"""Threads within an op; pinned, so that a run does not depend on what else the process set."""

RUNTIME_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    TypeError,
    *(kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)
"""What onnxruntime raises; its own kinds have no common base."""

MEMORY_MAPPED_BYTES = 1 << 29
"""Bytes of external data from which a model is run from the file as it is mapped, which is slower."""

SESSION_PER_THREAD_BYTES = 1 << 24
"""Bytes of a model up to which each thread that runs it watched has a session of its own: the values of two runs that
share one lie mixed in its memory, and what is free between them fits ever worse."""

_FATAL_LOG_LEVEL = 4  # errors are raised, with the same words
_SPINNING_OPTION = "session.intra_op.allow_spinning"
"""Threads that wait for the next run at full speed take it from the other session where two take turns."""

_EXTERNAL_FOLDER_OPTION = "session.model_external_initializers_file_folder_path"


class OnnxRunner:
    """Runs a model with onnxruntime on the CPU.

    Attributes:
        inputs: What must be fed: the graph's inputs without a default value.
        outputs: Names of the graph's outputs that are tensors.
    """

    def __init__(self, model: Model) -> None:
        """A ModelError if the model cannot be emitted."""
        self._model = model
        self._emission = emit_message(model, defer_weights=True)
        self._external_weights = take_session_weights(
            self._emission.message, self._emission.deferred, _read_weight_names(model, self._emission)
        )
        self._session: Any = None
        self._full_watch: _WatchSession | None = None
        self._flagged_watch: _WatchSession | None = None
        self.inputs: Sequence[InputSpec] = input_specs(model)
        infos = self._emission.message.graph.output
        self.outputs: Sequence[str] = [info.name for info in infos if not info.type.HasField("sequence_type")]

    def start(self) -> None:
        """Makes the session, which the first run does by itself.

        Raises:
            ModelError: onnxruntime cannot take the model.
        """
        if self._session is None:
            self._session = self._open_session(self._emission.message)

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """The model's outputs by name, for one feed.

        Raises:
            ModelError: onnxruntime cannot take the model, or the run failed.
        """
        self.start()
        return dict(zip(self.outputs, run_session(self._session, self.outputs, feeds), strict=True))

    def unobservable(self, tensors: Sequence[TensorRef]) -> dict[TensorRef, str]:
        """Those of `tensors` that cannot be observed, with the reason."""
        nested = [tensor for tensor in tensors if tensor.graph]
        rejected = watch_tensors(self._model, self._emission, nested).rejected if nested else {}
        return {tensor: str(error) for tensor, error in rejected.items()}

    @property
    def output_tensors(self) -> Mapping[str, TensorRef]:
        """The tensors that `outputs` are."""
        main, output_names = self._model.main, set(self.outputs)
        infos = zip(self._emission.message.graph.output, main.outputs, strict=True)
        producers = {info.name: main.source_of(Use("", label, 0)) for info, label in infos if info.name in output_names}
        return {name: tensor for name, tensor in producers.items() if tensor is not None}

    @cached_property
    def batch_independent(self) -> bool:
        """Whether samples may be joined along axis 0 of every input and each result is still that of its sample."""
        return is_batch_independent(self._model, self._emission, [spec.name for spec in self.inputs])

    def element_counts(self, tensors: Sequence[TensorRef], feed: Feeds) -> dict[TensorRef, int]:
        """How many elements each tensor has in one run of `feed`, over all iterations; 0 if it is not reached.

        Raises:
            UnwatchableError: A tensor is one of the `unobservable`.
            ModelError: onnxruntime cannot take the model, or the run failed.
        """
        if all(spec.shape is not None and None not in spec.shape for spec in self.inputs) and not any(
            tensor.graph for tensor in tensors
        ):
            self._full_watch = self._create_watch(tensors)  # which `observe` takes
            static_counts = self._full_watch.static_element_counts(feed)
            if static_counts is not None:
                return static_counts
            self._full_watch = None
        size_watch = self._create_watch(tensors, "sizes")
        return {
            tensor: sum(int(value) if size_watch.probes[tensor].sources else value.size for value in values)
            for tensor, values in size_watch.run_function(tensors)(feed).items()
        }

    def observe(
        self,
        tensors: Sequence[TensorRef],
        feeds: Iterable[Feeds],
        *,
        other_tensors: Sequence[TensorRef] = (),
        max_in_flight: int = 1,
        on_result: Callable[[ObservedValues], object] | None = None,
    ) -> Generator[ObservedValues, None, None]:
        """For each feed the values that each tensor took: none if it was not reached, several inside loops.

        Nothing here keeps them: what is dropped before the next are asked for needs no memory during the next run.

        Args:
            tensors: What to observe.
            feeds: What to run.
            other_tensors: What other calls observe on the same feeds, for want of memory. They share a session, which shows
                what it is asked for; onnxruntime fuses ops between which nothing is watched, so it must know all.
            max_in_flight: How many feeds' values there may be at once: while those of one are looked at, others are run, each
                on a thread of its own.
            on_result: Is shown what each feed gave, in order, by the thread that ran it; what it takes out is not given.

        Raises:
            UnwatchableError: A tensor is one of the `unobservable`.
            ModelError: onnxruntime cannot take the model, or a run failed.
        """
        watch_session, self._full_watch = self._full_watch, None
        if other_tensors:
            watch_session = self._watch_by_flag({*tensors, *other_tensors})
        elif watch_session is None or watch_session.probes.keys() != set(tensors):
            watch_session = self._create_watch(tensors)
        run = watch_session.run_function(tensors)
        if on_result is not None and self._model_bytes <= SESSION_PER_THREAD_BYTES:
            run = _run_per_thread(
                [
                    run,
                    *(
                        self._create_watch(list(watch_session.probes)).run_function(tensors)
                        for _ in range(max_in_flight - 1)
                    ),
                ]
            )
        yield from prefetch(run, feeds, max_in_flight, on_result)

    @property
    def _model_bytes(self) -> int:
        """Bytes of the model with its weights."""
        return int(self._emission.message.ByteSize()) + sum(value.nbytes for value in self._weights.values())

    def _watch_by_flag(self, tensors: set[TensorRef]) -> _WatchSession:
        """A session that shows any of `tensors` by flag."""
        if self._flagged_watch is None or self._flagged_watch.probes.keys() != tensors:
            self._flagged_watch = None  # the one before goes first
            self._flagged_watch = self._create_watch(sorted(tensors), "values by flag")
        return self._flagged_watch

    def _create_watch(self, tensors: Sequence[TensorRef], mode: WatchMode = "values") -> _WatchSession:
        """A session that shows `tensors`."""
        watched_message = watch_tensors(self._model, self._emission, sorted(set(tensors)), mode)
        for error in watched_message.rejected.values():
            raise error
        probes, flags = {tensor: watched_message.probes[tensor] for tensor in tensors}, watched_message.flags
        if not outputs_to_fetch(probes.values()):
            return _WatchSession(None, probes, flags)
        return _WatchSession(self._open_session(watched_message.message, watched=True), probes, flags)

    def _open_session(self, message: Any, *, watched: bool = False) -> Any:
        """A session for a form of the model; all of them share what they have of its weights."""
        data, external = serialize_for_session(message, self._external_weights)
        return create_session(data, self._model.source.folder, external, self._weights, watched=watched)

    @cached_property
    def _weights(self) -> dict[str, Array]:
        """Values of the weights that are not in the message, by name."""
        return {name: value() for name, value in self._external_weights.items()}


@dataclass(frozen=True, slots=True)
class _WatchSession:
    """A session that shows tensors.

    Attributes:
        session: The session, None where nothing comes out of one.
        probes: Where to find each tensor.
        flags: All inputs that say what is shown.
    """

    session: Any
    probes: Mapping[TensorRef, Probe]
    flags: Sequence[str]

    def static_element_counts(self, feed: Feeds) -> dict[TensorRef, int] | None:
        """How many elements each tensor of the main graph has in one run; None where onnxruntime does not know."""
        shapes = {} if self.session is None else {output.name: output.shape for output in self.session.get_outputs()}
        counts = {}
        for tensor, probe in self.probes.items():
            shape = shapes[probe.sources[0].outputs[0]] if probe.sources else np.shape(probe.values({}, feed)[0])
            if probe.sources and (not shape or not all(isinstance(size, int) for size in shape)):
                return None  # it shows an unknown rank as no axes
            counts[tensor] = math.prod(shape)
        return counts

    def run_function(self, tensors: Sequence[TensorRef]) -> Callable[[Feeds], ObservedValues]:
        """What gives the values that each of `tensors` takes in one run of a feed."""
        probes = {tensor: self.probes[tensor] for tensor in tensors}
        names = outputs_to_fetch(probes.values())
        requested_flags = {probe.flag for probe in probes.values()}
        flags = {flag: np.array(flag in requested_flags, np.int64) for flag in self.flags}

        def run(feed: Feeds) -> ObservedValues:
            fetched = dict(zip(names, run_session(self.session, names, feed, flags), strict=True)) if names else {}
            return {tensor: probe.values(fetched, feed) for tensor, probe in probes.items()}

        return run


def _run_per_thread(runs: Sequence[Callable[[Feeds], ObservedValues]]) -> Callable[[Feeds], ObservedValues]:
    """Each thread that calls this, of which there are no more than `runs`, calls one of them, always the same."""
    thread_state, unassigned = threading.local(), iter(runs)

    def run(feed: Feeds) -> ObservedValues:
        if not hasattr(thread_state, "run"):
            thread_state.run = next(unassigned)
        values: ObservedValues = thread_state.run(feed)
        return values

    return run


def create_session(
    data: bytes,
    folder: Path | None,
    external_bytes: int = 0,
    weights: Mapping[str, Array] | None = None,
    *,
    watched: bool = False,
    timed: bool = False,
    profile: Path | None = None,
) -> Any:
    """An onnxruntime session for a ModelProto.

    Args:
        data: The ModelProto as bytes.
        folder: Where its external data is.
        external_bytes: Bytes of that. From `MEMORY_MAPPED_BYTES` on, weights stay where the file is mapped, instead of being put into the
            order that kernels like best: that is a copy of all of them, in memory that nobody can take back.
        weights: Values of initializers that are said to be external and are not; the session reads their memory.
        watched: Whether most of its values are outputs, which no plan of how values share memory can hold: making one
            then costs time and memory for nothing. A run takes one thread, for there are several runs at once.
        timed: Whether time is what matters: weights are put into order whatever memory that takes, and a run takes one
            thread, so that it depends least on what else the machine does.
        profile: How the file begins that is to tell what each op took.

    Raises:
        ModelError: onnxruntime cannot take the model.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL_LOG_LEVEL
    options.intra_op_num_threads = 1 if watched or timed else INTRA_OP_THREADS
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = not watched
    options.add_session_config_entry(_SPINNING_OPTION, "0")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    if external_bytes >= MEMORY_MAPPED_BYTES and not timed:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if folder is not None and external_bytes:
        options.add_session_config_entry(_EXTERNAL_FOLDER_OPTION, str(folder.resolve()))
    if weights:
        options.add_external_initializers(
            list(weights), [*map(onnxruntime.OrtValue.ortvalue_from_numpy, weights.values())]
        )
    try:
        inference_session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except RUNTIME_ERRORS as error:
        raise ModelError(
            f"onnxruntime cannot take the model: {first_line(error)}. Mend the model, or update onnxruntime."
        ) from error
    inference_session.weights = weights  # which must live as long
    return inference_session


def serialize_for_session(message: Any, separate_weights: Container[str] = ()) -> tuple[bytes, int]:
    """A ModelProto as bytes, and how many bytes of external data it has beside the weights `separate_weights`."""
    external = (tensor for tensor in external_tensors(message) if tensor.name not in separate_weights)
    return message_bytes(message), sum(
        stored_bytes(DTYPE_NAMES[tensor.data_type], math.prod(tensor.dims)) for tensor in external
    )


def _read_weight_names(model: Model, emission: Emission) -> set[str]:
    """Names of the bulky values that the main graph is given and that something reads."""
    large_names = (
        op.name for op in model.main.ops() if op.read_value is not None and constant_bytes(op) >= EXTERNAL_MIN_BYTES
    )
    return {
        emission.value_name(model, TensorRef("", name)) for name in large_names if model.main.consumers_by_port(name)
    }


def run_session(
    inference_session: Any, names: Sequence[str] | None, feeds: Feeds, flags: Feeds | None = None
) -> list[Any]:
    """What comes out of a session; all of it where no names are given.

    Raises:
        ModelError: The run failed.
    """
    try:
        results: list[Any] = inference_session.run(names, {**feeds, **(flags or {})})
    except RUNTIME_ERRORS as error:
        shapes = ", ".join(f"{name} {np.asarray(value).dtype}{list(np.shape(value))}" for name, value in feeds.items())
        raise ModelError(
            f"onnxruntime failed on the inputs {shapes or 'none'}: {first_line(error)}. Give inputs that fit the model."
        ) from error
    return results


# What models take in onnxruntime: in all, and by op, as its profiler tells.

MAX_PROFILED_RUNS, MAX_PROFILED_SECONDS = 100, 0.4
"""Runs that are profiled at most, and how long; there are at least `FEW`."""

MIN_PROFILED_RUNS = 5

MAX_PROFILER_OVERHEAD, MIN_OP_SECONDS = 5e-6, 0.5e-6
"""What profiling adds to an op at most, and what an op that does nothing takes without it, seconds."""

NODE_NUMBER = re.compile("@([0-9]{1,9})@")
"""A node's number, which its name is while it is profiled: what onnxruntime makes of nodes has parts of their names."""

GENERATED_SUFFIX = re.compile(r"(_nchwc|_q|_dq|_q_to_dq)$")
"""What onnxruntime puts behind the name of a tensor to name an op after it."""

CONTAINER_OPS = frozenset({"Loop", "If", "Scan"})
"""Types whose time is that of the ops inside, which are told too."""

CONVERSION_OPS = frozenset({"QuantizeLinear", "DequantizeLinear"})


def start_timed_session(model: Model, feeds: Sequence[Feeds]) -> Callable[[], object]:
    """What runs the model once on each of `feeds`, in a session of its own on one thread.

    Raises:
        ModelError: onnxruntime cannot take the model, or a run failed.
    """
    data, external_bytes = serialize_for_session(emit_message(model).message)
    inference_session = create_session(data, model.source.folder, external_bytes, timed=True)
    for feed in feeds:
        run_session(inference_session, None, feed)
    return lambda: [inference_session.run(None, feed) for feed in feeds]


def profile_session_ops(model: Model, feeds: Sequence[Feeds]) -> OpProfile:
    """Seconds that each op takes in a run; those of several that became one are told of one of them.

    Raises:
        ModelError: onnxruntime cannot take the model, or a run failed.
    """
    message = emit_message(model).message
    lookup = _number_nodes(message, model.path)
    data, external_bytes = serialize_for_session(message)
    with TemporaryDirectory() as folder:
        inference_session = create_session(
            data, model.source.folder, external_bytes, timed=True, profile=Path(folder, "run")
        )
        for feed in feeds:
            run_session(inference_session, None, feed)
        runs, deadline = 1, time.perf_counter() + MAX_PROFILED_SECONDS
        while runs < MIN_PROFILED_RUNS or (runs < MAX_PROFILED_RUNS and time.perf_counter() < deadline):
            for feed in feeds:
                inference_session.run(None, feed)
            runs += 1
        events = json.loads(Path(inference_session.end_profiling()).read_bytes())
    return _sum_by_op(_op_durations(events), lookup, runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpLookup:
    """The ops that a message's nodes are, by their number and by what they make."""

    numbered: Sequence[OpKey]
    producers: Mapping[str, OpKey]

    def find_op(self, name: str) -> OpKey | None:
        """The op that one of onnxruntime's is, by its name."""
        number_match = NODE_NUMBER.search(name)
        if number_match is not None and int(number_match[1]) < len(self.numbered):
            return self.numbered[int(number_match[1])]
        return self.producers.get(GENERATED_SUFFIX.sub("", name)) or self.producers.get(name)


def _number_nodes(message: Any, path: Path | None) -> _OpLookup:
    """Names each node of the message by a number."""
    numbered: list[OpKey] = []
    producers: dict[str, OpKey] = {info.name: ("", info.name) for info in message.graph.input}
    for graph in model_from_message(message, path=path).graphs.values():
        for op in graph.ops():
            if isinstance(op.source, NodeProto):
                op.source.name = f"@{len(numbered)}@"
                numbered.append((graph.name, op.name))
                producers.update(dict.fromkeys(filter(None, op.source.output), (graph.name, op.name)))
    return _OpLookup(numbered=numbered, producers=producers)


def _op_durations(events: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """For each of onnxruntime's ops, by name and type, the seconds that its runs took."""
    durations: dict[tuple[str, str], list[float]] = {}
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            key = name.removesuffix("_kernel_time"), event["args"]["op_name"]
            durations.setdefault(key, []).append(event["dur"] * 1e-6)
    return {key: seconds for key, seconds in durations.items() if key[1] not in CONTAINER_OPS}


def _sum_by_op(durations: Mapping[tuple[str, str], list[float]], lookup: _OpLookup, runs: int) -> OpProfile:
    """What is told of onnxruntime's ops as that of the model's, without what the profiler itself takes."""
    means = {key: _fast_half_mean(seconds) for key, seconds in durations.items()}
    overhead = min(min(means.values(), default=0.0), MAX_PROFILER_OVERHEAD)
    ops: dict[OpKey, float] = {}
    conversions: dict[OpKey, float] = {}
    for (name, kind), mean_seconds in means.items():
        op_key = lookup.find_op(name)
        if op_key is not None:
            totals = conversions if kind in CONVERSION_OPS else ops
            count = len(durations[name, kind]) / runs
            totals[op_key] = (
                totals.get(op_key, 0.0) + max(mean_seconds - overhead, 0.0) * count + MIN_OP_SECONDS * count
            )
    return OpProfile(seconds=ops, conversion_seconds=conversions)


def _fast_half_mean(seconds: list[float]) -> float:
    """The mean of the shorter half, for whole microseconds are told and a few runs are interrupted."""
    return mean(sorted(seconds)[: max(len(seconds) // 2, 1)])
