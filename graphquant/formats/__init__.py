"""The table of file formats, and which of them a path holds. A format's package is imported when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy.typing as npt

from graphquant.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.ir import Model, Shape, TensorRef


__all__ = [
    "FORMATS",
    "KERAS_SUFFIXES",
    "SUFFIXES",
    "Feeds",
    "FormatModule",
    "InputSpec",
    "Runner",
    "detect_format",
    "format_module",
]

Feeds = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """An input that a run must be fed.

    Attributes:
        name: The key a runner takes.
        dtype: numpy-like dtype name.
        shape: Static shape, None if even the rank is unknown.
        aliases: Other names under which data may hold it ("x:0", a signature's key).
    """

    name: str
    dtype: str
    shape: Shape | None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpProfile:
    """Seconds that the ops of a model take in one run.

    Attributes:
        seconds: By graph and name; what a framework makes of several ops is told of one of them.
        conversion_seconds: Of these what turns float to integers or back, by the op, or the one whose result is turned.
    """

    seconds: Mapping[tuple[str, str], float]
    conversion_seconds: Mapping[tuple[str, str], float]


class Runner(Protocol):
    """Runs a model in its framework."""

    inputs: Sequence[InputSpec]
    outputs: Sequence[str]

    @property
    def batch_independent(self) -> bool:
        """Whether samples may be joined along axis 0 of every input and each result is still that of its sample.

        Known from the model alone; False where that cannot be shown.
        """

    @property
    def output_tensors(self) -> Mapping[str, TensorRef]:
        """The tensors that `outputs` are; an output that is no tensor of the main graph is left out."""

    def run(self, feeds: Feeds) -> dict[str, npt.NDArray[Any]]:
        """The model's outputs by name, for one feed."""

    def unobservable(self, tensors: Sequence[TensorRef]) -> dict[TensorRef, str]:
        """Those of `tensors` that cannot be observed, with the reason."""

    def element_counts(self, tensors: Sequence[TensorRef], feed: Feeds) -> dict[TensorRef, int]:
        """How many elements each tensor has in one run of `feed`, over all iterations; 0 if it is not reached."""

    def observe(
        self,
        tensors: Sequence[TensorRef],
        feeds: Iterable[Feeds],
        *,
        other_tensors: Sequence[TensorRef] = (),
        max_in_flight: int = 1,
        on_result: Callable[[dict[TensorRef, list[npt.NDArray[Any]]]], object] | None = None,
    ) -> Generator[dict[TensorRef, list[npt.NDArray[Any]]], None, None]:
        """For each feed the values that each tensor took: none if it was not reached, several inside loops.

        The values of up to `max_in_flight` feeds may be there or under way, so if it is 1, a feed is read only when its
        values are asked for. `on_result` is shown them in order, on whatever thread, and may take out what need not be kept
        until it is asked for. `other_tensors` are tensors that other calls observe on the same feeds, for want of memory:
        values must be the same bits however tensors are shared out among such calls.
        """


class FormatModule(Protocol):
    """What the package of a format offers."""

    DEFAULT_RULES: str
    DEFAULT_FAMILY: str

    def load(self, path: Path) -> Model:
        """Reads a model; raises ModelError."""

    def emit(self, model: Model) -> Any:
        """The changed copy of the source message."""

    def save(self, model: Model, path: Path) -> None:
        """Emits the model and writes it to `path`, whole or not at all."""

    def input_specs(self, model: Model) -> Sequence[InputSpec]:
        """What a run of the model must be fed, told without starting its framework."""

    def create_runner(self, model: Model) -> Runner:
        """A runner for the model."""

    def prepare_timed_run(self, model: Model, feeds: Sequence[Feeds]) -> Callable[[], object]:
        """What runs the model once on each of `feeds`, on one thread and as fast as it can; raises ModelError."""

    def profile_ops(self, model: Model, feeds: Sequence[Feeds]) -> OpProfile | None:
        """Seconds that each op takes in such a run, None where the framework does not tell; raises ModelError."""

    def upgrade_opset(self, model: Model, opset: int) -> Model:
        """The model at an opset; raises ModelError if that cannot be done."""

    def read_metadata(self, model: Model) -> dict[str, str]:
        """What the model says of where it came from, by key."""

    def restore_original(self, model: Model) -> tuple[Model, bool] | None:
        """The model that the record in this one gives back, None if there is no record; raises ModelError.

        With it comes whether this one is as graphquant wrote it, but for its weights.
        """

    def encode_skeleton(self, model: Model) -> str:
        """The source message without the data of its weights, as text: what taking an upgrade back needs."""


FORMATS: dict[str, str] = {
    "onnx": "graphquant.formats.onnx",
    "tensorflow": "graphquant.formats.tensorflow",
    "tflite": "graphquant.formats.tflite",
}

SUFFIXES: dict[str, str] = {
    ".onnx": "onnx",
    ".onnxtxt": "onnx",
    ".textproto": "onnx",
    ".json": "onnx",
    ".pb": "tensorflow",
    ".pbtxt": "tensorflow",
    ".meta": "tensorflow",
    ".tflite": "tflite",
    ".keras": "tensorflow",
    ".h5": "tensorflow",
}

KERAS_SUFFIXES = (".keras", ".h5")
"""Suffixes of files that Keras exports to a SavedModel, as which the model is written."""


def format_module(name: str) -> FormatModule:
    """The package of the format called `name`."""
    return cast("FormatModule", import_module(FORMATS[name]))


def detect_format(path: Path) -> str:
    """The format of the model at `path`, from its suffix or, for a folder, its `saved_model.pb`.

    Raises:
        ModelError: There is nothing at `path`, or nothing that is known.
    """
    if path.is_dir():
        if (path / "saved_model.pb").is_file() or (path / "saved_model.pbtxt").is_file():
            return "tensorflow"
        raise ModelError(f"{path} is a folder without saved_model.pb. Give a SavedModel's folder or a model file.")
    if not path.is_file():
        nearby = (
            sorted(file.name for file in path.parent.glob("*") if file.suffix in SUFFIXES)[:5]
            if path.parent.is_dir()
            else []
        )
        raise ModelError(
            f"There is no file {path}." + (f" Models in that folder: {', '.join(nearby)}." if nearby else "")
        )
    if path.suffix not in SUFFIXES:
        raise ModelError(
            f"{path} has the unknown suffix {path.suffix!r}. Known are {', '.join(SUFFIXES)} and SavedModel folders."
        )
    return SUFFIXES[path.suffix]
