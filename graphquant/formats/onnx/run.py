"""Models in onnxruntime: run, and watched at any of their tensors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

from graphquant.errors import ModelError, UnwatchableError
from graphquant.formats.onnx import inputs
from graphquant.formats.onnx.files import binary, external_tensors
from graphquant.formats.onnx.observe import Instrument
from graphquant.formats.onnx.tensors import first_line
from graphquant.formats.onnx.write import emit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
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
        found: dict[TensorRef, str] = {}
        if inside:
            instrument = Instrument(self._model, self._emission)
            for tensor in inside:
                try:
                    instrument.probe(tensor)
                except UnwatchableError as error:
                    found[tensor] = str(error)
        return found

    @property
    def batchable(self) -> bool:
        """Whether samples may be joined along axis 0 of every input and each result is still that of its sample."""
        return False

    def sizes(self, tensors: Sequence[TensorRef], feed: Feeds) -> dict[TensorRef, int]:
        """How many elements each tensor has in one run of `feed`, over all iterations; 0 if it is not reached.

        Raises:
            UnwatchableError: A tensor is one of the `unwatchable`.
            ModelError: onnxruntime cannot take the model, or the run failed.
        """
        (seen,) = self.observe(tensors, [feed])
        return {tensor: sum(value.size for value in values) for tensor, values in seen.items()}

    def observe(self, tensors: Sequence[TensorRef], feeds: Iterable[Feeds]) -> Iterator[dict[TensorRef, list[Array]]]:
        """For each feed the values that each tensor took: none if it was not reached, several inside loops.

        Raises:
            UnwatchableError: A tensor is one of the `unwatchable`.
            ModelError: onnxruntime cannot take the model, or a run failed.
        """
        instrument = Instrument(self._model, self._emission)
        probes = {tensor: instrument.probe(tensor) for tensor in tensors}
        names = list(dict.fromkeys(probe.output for probe in probes.values() if probe.output))
        watched = session(instrument.message(), self._model.source.folder) if names else None
        for feed in feeds:
            found = dict(zip(names, _run(watched, names, feed), strict=True)) if names else {}
            yield {tensor: probe.values(found, feed) for tensor, probe in probes.items()}


def session(message: Any, folder: Path | None) -> Any:
    """An onnxruntime session for a ModelProto whose external data is in `folder`.

    Raises:
        ModelError: onnxruntime cannot take the model.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ONLY_FATAL
    options.intra_op_num_threads = THREADS
    options.inter_op_num_threads = 1
    if folder is not None and any(True for _ in external_tensors(message)):
        options.add_session_config_entry(_EXTERNAL_FOLDER, str(folder.resolve()))
    try:
        return onnxruntime.InferenceSession(binary(message), options, providers=["CPUExecutionProvider"])
    except ERRORS as error:
        raise ModelError(
            f"onnxruntime cannot take the model: {first_line(error)}. Mend the model, or update onnxruntime."
        ) from error


def _run(started: Any, names: Sequence[str], feeds: Feeds) -> list[Any]:
    try:
        results: list[Any] = started.run(names, dict(feeds))
    except ERRORS as error:
        shapes = ", ".join(f"{name} {np.asarray(value).dtype}{list(np.shape(value))}" for name, value in feeds.items())
        raise ModelError(
            f"onnxruntime failed on the inputs {shapes or 'none'}: {first_line(error)}. Give inputs that fit the model."
        ) from error
    return results
