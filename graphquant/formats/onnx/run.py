"""Models in onnxruntime: run, and watched at any of their tensors."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

from graphquant.errors import ModelError
from graphquant.formats.onnx import inputs
from graphquant.formats.onnx.batching import batchable
from graphquant.formats.onnx.files import binary, external_tensors
from graphquant.formats.onnx.observe import Probe, fetches, watch
from graphquant.formats.onnx.tensors import first_line
from graphquant.formats.onnx.write import emit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from graphquant.formats import Feeds, InputSpec
    from graphquant.ir import Model, TensorRef

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

_ONLY_FATAL = 4  # errors are raised, with the same words
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
        self._emission = emit(model)
        self._session: Any = None
        self.inputs: Sequence[InputSpec] = inputs(model)
        infos = self._emission.message.graph.output
        self.outputs: Sequence[str] = [info.name for info in infos if not info.type.HasField("sequence_type")]

    def start(self) -> None:
        """Makes the session, which the first run does by itself.

        Raises:
            ModelError: onnxruntime cannot take the model.
        """
        if self._session is None:
            self._session = session(self._emission.message, self._model.source.folder)

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """The model's outputs by name, for one feed.

        Raises:
            ModelError: onnxruntime cannot take the model, or the run failed.
        """
        self.start()
        return dict(zip(self.outputs, _run(self._session, self.outputs, feeds), strict=True))

    def unwatchable(self, tensors: Sequence[TensorRef]) -> dict[TensorRef, str]:
        """Those of `tensors` that cannot be observed, with the reason."""
        inside = [tensor for tensor in tensors if tensor.graph]
        refused = watch(self._model, self._emission, inside).refused if inside else {}
        return {tensor: str(error) for tensor, error in refused.items()}

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
        probes, names, started = self._watch(tensors, sizes=True)
        found = _fetched(started, names, feed)
        return {
            tensor: sum(int(value) if probe.places else value.size for value in probe.values(found, feed))
            for tensor, probe in probes.items()
        }

    def observe(
        self, tensors: Sequence[TensorRef], feeds: Iterable[Feeds], *, beside: Sequence[TensorRef] = ()
    ) -> Iterator[dict[TensorRef, list[Array]]]:
        """For each feed the values that each tensor took: none if it was not reached, several inside loops.

        Nothing here keeps them: what is dropped before the next are asked for needs no memory during the next run.

        Args:
            tensors: What to observe.
            feeds: What to run.
            beside: What other calls observe on the same feeds. onnxruntime fuses ops between which nothing is watched,
                so the model is made to show these too, but they are not fetched.

        Raises:
            UnwatchableError: A tensor is one of the `unwatchable`.
            ModelError: onnxruntime cannot take the model, or a run failed.
        """
        probes, names, started = self._watch(tensors, beside)
        for feed in feeds:
            yield _seen(probes, _fetched(started, names, feed), feed)  # no name here keeps the values alive

    def _watch(
        self, tensors: Sequence[TensorRef], beside: Sequence[TensorRef] = (), *, sizes: bool = False
    ) -> tuple[Mapping[TensorRef, Probe], list[str], Any]:
        """Where to find `tensors` or their sizes, what to fetch for it, and a session that has it."""
        watched = watch(self._model, self._emission, sorted({*tensors, *beside}), sizes=sizes)
        for error in watched.refused.values():
            raise error
        probes = {tensor: watched.probes[tensor] for tensor in tensors}
        names = fetches(probes.values())
        folder = self._model.source.folder
        return probes, names, session(watched.message, folder, watched=True) if names else None


def session(message: Any, folder: Path | None, *, watched: bool = False) -> Any:
    """An onnxruntime session for a ModelProto whose external data is in `folder`.

    Args:
        message: The ModelProto.
        folder: Where its external data is.
        watched: Whether most of its values are outputs, which no plan of how values share memory can hold: making one
            then costs time and memory for nothing.

    Raises:
        ModelError: onnxruntime cannot take the model.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ONLY_FATAL
    options.intra_op_num_threads = THREADS
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = not watched
    if folder is not None and any(True for _ in external_tensors(message)):
        options.add_session_config_entry(_EXTERNAL_FOLDER, str(folder.resolve()))
    try:
        return onnxruntime.InferenceSession(binary(message), options, providers=["CPUExecutionProvider"])
    except ERRORS as error:
        raise ModelError(
            f"onnxruntime cannot take the model: {first_line(error)}. Mend the model, or update onnxruntime."
        ) from error


def _fetched(started: Any, names: Sequence[str], feeds: Feeds) -> dict[str, Any]:
    return dict(zip(names, _run(started, names, feeds), strict=True)) if names else {}


def _seen(probes: Mapping[TensorRef, Probe], found: Mapping[str, Any], feed: Feeds) -> dict[TensorRef, list[Array]]:
    return {tensor: probe.values(found, feed) for tensor, probe in probes.items()}


def _run(started: Any, names: Sequence[str], feeds: Feeds) -> list[Any]:
    try:
        results: list[Any] = started.run(names, dict(feeds))
    except ERRORS as error:
        shapes = ", ".join(f"{name} {np.asarray(value).dtype}{list(np.shape(value))}" for name, value in feeds.items())
        raise ModelError(
            f"onnxruntime failed on the inputs {shapes or 'none'}: {first_line(error)}. Give inputs that fit the model."
        ) from error
    return results
