"""Models in onnxruntime: run, and watched at any of their tensors."""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

from graphquant.errors import ModelError
from graphquant.formats.ahead import ahead
from graphquant.formats.onnx import inputs
from graphquant.formats.onnx.apart import BULKY, handed, size_of
from graphquant.formats.onnx.batching import batchable
from graphquant.formats.onnx.files import binary, external_tensors
from graphquant.formats.onnx.observe import Probe, fetches, watch
from graphquant.formats.onnx.tensors import NAMES, bytes_of, first_line
from graphquant.formats.onnx.write import emit
from graphquant.ir import TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
    from pathlib import Path

    from graphquant.formats import Feeds, InputSpec
    from graphquant.formats.onnx.observe import Showing
    from graphquant.formats.onnx.write import Emission
    from graphquant.ir import Model

    Seen = dict[TensorRef, list["Array"]]

Array = np.ndarray[Any, Any]

THREADS = min(4, os.cpu_count() or 1)
"""Threads within an op; pinned, so that a run does not depend on what else the process set."""

ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    TypeError,
    *(kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)
"""What onnxruntime raises; its own kinds have no common base."""

MAPPED = 1 << 29
"""Bytes of external data from which a model is run from the file as it is mapped, which is slower."""

OWN = 1 << 24
"""Bytes of a model up to which each thread that runs it watched has a session of its own: the values of two runs that
share one lie mixed in its memory, and what is free between them fits ever worse."""

_ONLY_FATAL = 4  # errors are raised, with the same words
_SPINNING = "session.intra_op.allow_spinning"
"""Threads that wait for the next run at full speed take it from the other session where two take turns."""

_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


class OnnxRunner:
    """Runs a model with onnxruntime on the CPU.

    Attributes:
        inputs: What must be fed: the graph's inputs without a default value.
        outputs: Names of the graph's outputs that are tensors.
    """

    def __init__(self, model: Model) -> None:
        """A ModelError if the model cannot be emitted."""
        self._model = model
        self._emission = emit(model, bare=True)
        self._apart = handed(self._emission.message, self._emission.later, _read(model, self._emission))
        self._session: Any = None
        self._all: _Watch | None = None
        self._by_flag: _Watch | None = None
        self.inputs: Sequence[InputSpec] = inputs(model)
        infos = self._emission.message.graph.output
        self.outputs: Sequence[str] = [info.name for info in infos if not info.type.HasField("sequence_type")]

    def start(self) -> None:
        """Makes the session, which the first run does by itself.

        Raises:
            ModelError: onnxruntime cannot take the model.
        """
        if self._session is None:
            self._session = self._opened(self._emission.message)

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """The model's outputs by name, for one feed.

        Raises:
            ModelError: onnxruntime cannot take the model, or the run failed.
        """
        self.start()
        return dict(zip(self.outputs, run_session(self._session, self.outputs, feeds), strict=True))

    def unwatchable(self, tensors: Sequence[TensorRef]) -> dict[TensorRef, str]:
        """Those of `tensors` that cannot be observed, with the reason."""
        inside = [tensor for tensor in tensors if tensor.graph]
        refused = watch(self._model, self._emission, inside).refused if inside else {}
        return {tensor: str(error) for tensor, error in refused.items()}

    @property
    def ends(self) -> Mapping[str, TensorRef]:
        """The tensors that `outputs` are."""
        main, wanted = self._model.main, set(self.outputs)
        infos = zip(self._emission.message.graph.output, main.outputs, strict=True)
        made = {info.name: main.producer(Use("", label, 0)) for info, label in infos if info.name in wanted}
        return {name: tensor for name, tensor in made.items() if tensor is not None}

    @cached_property
    def batchable(self) -> bool:
        """Whether samples may be joined along axis 0 of every input and each result is still that of its sample."""
        return batchable(self._model, self._emission, [spec.name for spec in self.inputs])

    def sizes(self, tensors: Sequence[TensorRef], feed: Feeds) -> dict[TensorRef, int]:
        """How many elements each tensor has in one run of `feed`, over all iterations; 0 if it is not reached.

        Raises:
            UnwatchableError: A tensor is one of the `unwatchable`.
            ModelError: onnxruntime cannot take the model, or the run failed.
        """
        if all(spec.shape is not None and None not in spec.shape for spec in self.inputs) and not any(
            tensor.graph for tensor in tensors
        ):
            self._all = self._watch(tensors)  # which `observe` takes
            stated = self._all.sizes(feed)
            if stated is not None:
                return stated
            self._all = None
        watch = self._watch(tensors, "sizes")
        return {
            tensor: sum(int(value) if watch.probes[tensor].places else value.size for value in values)
            for tensor, values in watch.values(tensors)(feed).items()
        }

    def observe(
        self,
        tensors: Sequence[TensorRef],
        feeds: Iterable[Feeds],
        *,
        beside: Sequence[TensorRef] = (),
        at_once: int = 1,
        look: Callable[[Seen], object] | None = None,
    ) -> Generator[Seen, None, None]:
        """For each feed the values that each tensor took: none if it was not reached, several inside loops.

        Nothing here keeps them: what is dropped before the next are asked for needs no memory during the next run.

        Args:
            tensors: What to observe.
            feeds: What to run.
            beside: What other calls observe on the same feeds, for want of memory. They share a session, which shows
                what it is asked for; onnxruntime fuses ops between which nothing is watched, so it must know all.
            at_once: How many feeds' values there may be at once: while those of one are looked at, others are run, each
                on a thread of its own.
            look: Is shown what each feed gave, in order, by the thread that ran it; what it takes out is not given.

        Raises:
            UnwatchableError: A tensor is one of the `unwatchable`.
            ModelError: onnxruntime cannot take the model, or a run failed.
        """
        found, self._all = self._all, None
        if beside:
            found = self._shared({*tensors, *beside})
        elif found is None or found.probes.keys() != set(tensors):
            found = self._watch(tensors)
        run = found.values(tensors)
        if look is not None and self._bytes <= OWN:
            run = _each_its_own([run, *(self._watch(list(found.probes)).values(tensors) for _ in range(at_once - 1))])
        yield from ahead(run, feeds, at_once, look)

    @property
    def _bytes(self) -> int:
        """Bytes of the model with its weights."""
        return int(self._emission.message.ByteSize()) + sum(value.nbytes for value in self._weights.values())

    def _shared(self, tensors: set[TensorRef]) -> _Watch:
        """A session that shows any of `tensors` by flag."""
        if self._by_flag is None or self._by_flag.probes.keys() != tensors:
            self._by_flag = None  # the one before goes first
            self._by_flag = self._watch(sorted(tensors), "values by flag")
        return self._by_flag

    def _watch(self, tensors: Sequence[TensorRef], show: Showing = "values") -> _Watch:
        """A session that shows `tensors`."""
        watched = watch(self._model, self._emission, sorted(set(tensors)), show)
        for error in watched.refused.values():
            raise error
        probes, flags = {tensor: watched.probes[tensor] for tensor in tensors}, watched.flags
        if not fetches(probes.values()):
            return _Watch(None, probes, flags)
        return _Watch(self._opened(watched.message, watched=True), probes, flags)

    def _opened(self, message: Any, *, watched: bool = False) -> Any:
        """A session for a form of the model; all of them share what they have of its weights."""
        data, external = contents(message, self._apart)
        return session(data, self._model.source.folder, external, self._weights, watched=watched)

    @cached_property
    def _weights(self) -> dict[str, Array]:
        """Values of the weights that are not in the message, by name."""
        return {name: value() for name, value in self._apart.items()}


@dataclass(frozen=True, slots=True)
class _Watch:
    """A session that shows tensors.

    Attributes:
        session: The session, None where nothing comes out of one.
        probes: Where to find each tensor.
        flags: All inputs that say what is shown.
    """

    session: Any
    probes: Mapping[TensorRef, Probe]
    flags: Sequence[str]

    def sizes(self, feed: Feeds) -> dict[TensorRef, int] | None:
        """How many elements each tensor of the main graph has in one run; None where onnxruntime does not know."""
        shapes = {} if self.session is None else {output.name: output.shape for output in self.session.get_outputs()}
        found = {}
        for tensor, probe in self.probes.items():
            shape = shapes[probe.places[0].outputs[0]] if probe.places else np.shape(probe.values({}, feed)[0])
            if probe.places and (not shape or not all(isinstance(size, int) for size in shape)):
                return None  # it shows an unknown rank as no axes
            found[tensor] = math.prod(shape)
        return found

    def values(self, tensors: Sequence[TensorRef]) -> Callable[[Feeds], Seen]:
        """What gives the values that each of `tensors` takes in one run of a feed."""
        probes = {tensor: self.probes[tensor] for tensor in tensors}
        names = fetches(probes.values())
        wanted = {probe.flag for probe in probes.values()}
        flags = {flag: np.array(flag in wanted, np.int64) for flag in self.flags}

        def run(feed: Feeds) -> Seen:
            found = dict(zip(names, run_session(self.session, names, feed, flags), strict=True)) if names else {}
            return {tensor: probe.values(found, feed) for tensor, probe in probes.items()}

        return run


def _each_its_own(runs: Sequence[Callable[[Feeds], Seen]]) -> Callable[[Feeds], Seen]:
    """Each thread that calls this, of which there are no more than `runs`, calls one of them, always the same."""
    mine, left = threading.local(), iter(runs)

    def run(feed: Feeds) -> Seen:
        if not hasattr(mine, "run"):
            mine.run = next(left)
        seen: Seen = mine.run(feed)
        return seen

    return run


def session(
    data: bytes,
    folder: Path | None,
    external: int = 0,
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
        external: Bytes of that. From `MAPPED` on, weights stay where the file is mapped, instead of being put into the
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
    options.log_severity_level = _ONLY_FATAL
    options.intra_op_num_threads = 1 if watched or timed else THREADS
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = not watched
    options.add_session_config_entry(_SPINNING, "0")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    if external >= MAPPED and not timed:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if folder is not None and external:
        options.add_session_config_entry(_EXTERNAL_FOLDER, str(folder.resolve()))
    if weights:
        options.add_external_initializers(
            list(weights), [*map(onnxruntime.OrtValue.ortvalue_from_numpy, weights.values())]
        )
    try:
        opened = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except ERRORS as error:
        raise ModelError(
            f"onnxruntime cannot take the model: {first_line(error)}. Mend the model, or update onnxruntime."
        ) from error
    opened.weights = weights  # which must live as long
    return opened


def contents(message: Any, apart: Container[str] = ()) -> tuple[bytes, int]:
    """A ModelProto as bytes, and how many bytes of external data it has beside the weights `apart`."""
    found = (tensor for tensor in external_tensors(message) if tensor.name not in apart)
    return binary(message), sum(bytes_of(NAMES[tensor.data_type], math.prod(tensor.dims)) for tensor in found)


def _read(model: Model, emission: Emission) -> set[str]:
    """Names of the bulky values that the main graph is given and that something reads."""
    bulky = (op.name for op in model.main.ops() if op.value is not None and size_of(op) >= BULKY)
    return {emission.name(model, TensorRef("", name)) for name in bulky if model.main.readers(name)}


def run_session(started: Any, names: Sequence[str] | None, feeds: Feeds, flags: Feeds | None = None) -> list[Any]:
    """What comes out of a session; all of it where no names are given.

    Raises:
        ModelError: The run failed.
    """
    try:
        results: list[Any] = started.run(names, {**feeds, **(flags or {})})
    except ERRORS as error:
        shapes = ", ".join(f"{name} {np.asarray(value).dtype}{list(np.shape(value))}" for name, value in feeds.items())
        raise ModelError(
            f"onnxruntime failed on the inputs {shapes or 'none'}: {first_line(error)}. Give inputs that fit the model."
        ) from error
    return results
