"""The supported file formats, the interface of their packages, and the detection of a file's format.

The package of a format is imported when it is first needed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, cast

import numpy.typing as npt

from graphquant.errors import ModelError, did_you_mean
from graphquant.utils.text import join_limited

if TYPE_CHECKING:
    from concurrent.futures import Future

    from graphquant.ir import Model, Shape, TensorRef
    from graphquant.utils import Progress

FeedT = TypeVar("FeedT")
ResultT = TypeVar("ResultT")

ANY_DTYPE = "any"  # dtype of an array of the data that no model reads, such as labels
Feeds = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """An input that must be fed to run a model."""

    name: str  # key of the input in the feeds of a runner
    dtype: str  # numpy-like dtype name
    shape: Shape | None  # static shape, None if the rank is unknown
    aliases: tuple[str, ...] = ()  # other names under which data may hold the input ("x:0", the key of a signature)
    signatures: tuple[str, ...] = ()  # the signatures of a TensorFlow model that take the input

    @property
    def key(self) -> str:
        """The key of the input in its signature, or its name."""
        return self.aliases[-1] if self.aliases and ":" not in self.aliases[-1] else self.name


class OpProfile(NamedTuple):
    """Seconds that each op of a model takes in one run.

    A framework may fuse several ops. The time of the fused op is listed under one of them.
    """

    seconds: Mapping[tuple[str, str], float]  # seconds by (graph, op name)
    # Seconds of conversions between float and integers, by the op itself or the op whose result is converted.
    conversion_seconds: Mapping[tuple[str, str], float]


class Runner(Protocol):
    """Runs a model in its framework."""

    model: Model
    inputs: Sequence[InputSpec]
    outputs: Sequence[str]

    @property
    def output_tensors(self) -> Mapping[str, TensorRef]:
        """Tensor of each entry of `outputs`; an output that is no tensor of the main graph is missing."""

    def run(self, feeds: Feeds) -> dict[str, npt.NDArray[Any]]:
        """Run one feed and return the model's outputs by name. A model with state continues from the previous call."""

    def start_sequence(self) -> bool:
        """Let the next `run` start with the initial state, as the other methods always do. Return True for a state."""

    def run_each(self, feeds: Iterable[Feeds]) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Yield the outputs of each feed. Some feeds may be read ahead."""

    def free_session(self, *, observing: bool = False, only_large: bool = True) -> None:
        """Free what only `run`, or only `observe`, needs, perhaps only much memory. The next run creates it again."""

    def unobservable(self, tensors: Sequence[TensorRef]) -> dict[TensorRef, str]:
        """Return the reason for each of `tensors` that cannot be observed."""

    def element_counts(self, tensors: Sequence[TensorRef], feed: Feeds) -> dict[TensorRef, int]:
        """Return the number of elements of each tensor in one run, over all iterations; 0 if it is not reached."""

    def observe(
        self,
        tensors: Sequence[TensorRef],
        feeds: Iterable[Feeds],
        *,
        other_tensors: Sequence[TensorRef] = (),
        max_in_flight: int = 1,
        on_result: Callable[[dict[TensorRef, list[npt.NDArray[Any]]]], object] | None = None,
        ancestors_only: bool = False,
    ) -> Generator[dict[TensorRef, list[npt.NDArray[Any]]], None, None]:
        """Yield for each feed the values of each tensor: none if it was not reached, several inside loops.

        With `ancestors_only`, ops that no value depends on may be left out. Values of up to `max_in_flight` feeds may
        exist or be in progress. With 1, a feed is read only when its values are requested. `on_result` receives the
        values in order, on any thread, and may remove values that need not stay in memory. `other_tensors` are observed
        by other calls on the same feeds, because memory does not suffice for all at once. Values must have the same
        bits no matter how tensors are divided among such calls.
        """


class FormatModule(Protocol):
    """Interface of the package of a format."""

    DEFAULT_RULES: str
    DEFAULT_FAMILY: str

    def load(self, path: Path, *, allow_links: bool = False) -> Model:
        """Read a model; raise ModelError if that fails. Links may lead out of its folder only with `allow_links`."""

    def emit(self, model: Model) -> Any:
        """Return the changed copy of the source message."""

    def save(self, model: Model, path: Path, progress: Progress | None = None) -> None:
        """Emit the model and write it to `path` atomically. `progress` receives the megabytes of a weights file."""

    def input_specs(self, model: Model) -> Sequence[InputSpec]:
        """Return the inputs that must be fed, without starting the framework."""

    def create_runner(self, model: Model) -> Runner:
        """Return a runner for the model."""

    def prepare_timed_run(self, model: Model, feeds: Sequence[Feeds]) -> Callable[[], object]:
        """Return a function that runs each of `feeds` once, on one thread and as fast as possible; raise ModelError."""

    def profile_ops(self, model: Model, feeds: Sequence[Feeds]) -> OpProfile | None:
        """Return the seconds of each op in such a run, None if the framework does not report them; raise ModelError."""

    def upgrade_opset(self, model: Model, opset: int) -> Model:
        """Return the model at an opset; raise ModelError if it cannot be converted."""

    def read_metadata(self, model: Model) -> dict[str, str]:
        """Return the provenance entries in the model's metadata."""

    def restore_original(self, model: Model) -> tuple[Model, bool] | None:
        """Restore the model that the provenance record describes, None if there is no record; raise ModelError.

        The second value is True if this model, apart from its weights, is unchanged since graphquant wrote it.
        """

    def encode_skeleton(self, model: Model) -> str:
        """Return the source message without its weight data as text, which is needed to undo an upgrade."""


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
    ".hdf5": "tensorflow",
}

KERAS_SUFFIXES = (".keras", ".h5", ".hdf5")
"""Suffixes of files that Keras exports to a SavedModel. Such a model is saved as a SavedModel."""


def format_module(name: str) -> FormatModule:
    """Import and return the package of the format called `name`."""
    return cast("FormatModule", import_module(FORMATS[name]))


def provenance_of(model: Model) -> Mapping[str, str]:
    """Return the entries that graphquant recorded in a model, or will record when it is written."""
    if model.provenance is not None or not model.traits.rewritable:
        return model.provenance or {}
    return format_module(model.format).read_metadata(model)


RunnerRole = Literal["source", "prepared", "quantized"]
_SHARED_RUNNERS: ContextVar[dict[RunnerRole, Runner] | None] = ContextVar("shared_runners", default=None)


@contextmanager
def shared_runners() -> Iterator[None]:
    """Within this context, `shared_runner` keeps one runner for each role, so that a model is loaded only once."""
    token = _SHARED_RUNNERS.set({})
    try:
        yield
    finally:
        _SHARED_RUNNERS.reset(token)


def shared_runner(model: Model, role: RunnerRole) -> Runner:
    """Return the runner of a model that does not change any more. It replaces the runner of another model."""
    return share_runner(create_runner(model), role)


def share_runner(runner: Runner, role: RunnerRole) -> Runner:
    """Let `create_runner` return this runner for its model from now on."""
    runners = _SHARED_RUNNERS.get()
    if runners is not None:
        runners[role] = runner
    return runner


def find_shared_runner(model: Model) -> Runner | None:
    """Return the shared runner of this model, None if there is none."""
    # Models that differ in their metadata alone share their graphs.
    runners = (_SHARED_RUNNERS.get() or {}).values()
    return next((runner for runner in runners if runner.model.graphs is model.graphs), None)


def create_runner(model: Model) -> Runner:
    """Return the shared runner of this model, or else a new one."""
    return find_shared_runner(model) or format_module(model.format).create_runner(model)


def run_outputs(runner: Runner, feeds: Iterable[Feeds]) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield the outputs for each feed, of a session that already observes tensors if possible.

    Such a session may fuse other ops, so that the outputs differ by rounding from those of `Runner.run`.
    """
    tensors = runner.output_tensors
    if tensors.keys() < set(runner.outputs):
        yield from runner.run_each(feeds)
        return
    for values in runner.observe(list(tensors.values()), feeds):
        yield {name: values[tensor][-1] for name, tensor in tensors.items() if values[tensor]}


def release_runners(*roles: RunnerRole) -> None:
    """Free the sessions of shared runners."""
    for role in roles:
        (_SHARED_RUNNERS.get() or {}).pop(role, None)


def detect_format(path: Path) -> str:
    """Return the format of the model at `path`, from its suffix or, for a folder, from its `saved_model.pb`.

    Raises a ModelError if there is no model at `path`, or its format is unknown.
    """
    if path.is_dir():
        if (path / "saved_model.pb").is_file() or (path / "saved_model.pbtxt").is_file():
            return "tensorflow"
        raise ModelError(f"{path} is a folder without saved_model.pb. Give the folder of a SavedModel or a model file.")
    if not path.is_file():
        models = sorted(p.name for p in path.parent.glob("*") if p.suffix in SUFFIXES) if path.parent.is_dir() else []
        listed = f" Models in that folder: {join_limited(models, 5)}." if models else ""
        raise ModelError(f"There is no file {path}.{did_you_mean(path.name, models) or listed}")
    if path.suffix not in SUFFIXES:
        problem = "no name before its suffix" if path.name in SUFFIXES else f"the unknown suffix {path.suffix!r}"
        raise ModelError(f"{path} has {problem}. Supported: {', '.join(SUFFIXES)} and SavedModel folders.")
    return SUFFIXES[path.suffix]


LINKS_ADVICE = "Copy the file into that folder, or use --allow-links if you trust the model"
"""Remedy for a link that leads out of the folder of a model."""


def refuse_outside_links(folder: Path, paths: Iterable[Path]) -> None:
    """Raise ModelError if one of `paths` in the folder of a model is a link out of it: its target may be a secret."""
    for path in paths:
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            raise ModelError(f"{path} is a link to {os.path.realpath(path)}, outside {folder}. {LINKS_ADVICE}.")


def walk_saved_model(folder: Path, *, follow_links: bool = False) -> Iterator[Path]:
    """Yield the files and folders in the folder of a SavedModel."""
    for root, folders, names in os.walk(folder, followlinks=follow_links):
        yield from (Path(root) / name for name in (*folders, *names))


def memory_object_name(model: Model) -> str:
    """Return the name of the object in memory that a model was read from ("the session"), "" for a file."""
    live_object = getattr(model.source, "live_object", None)
    return "" if live_object is None else str(live_object.description)


def is_graph_file(model: Model) -> bool:
    """Return True if a model is stored as one file, also if it was frozen from the folder of a SavedModel."""
    return getattr(model.source, "message_type", "") == "GraphDef"


def meta_graph_tags(model: Model) -> frozenset[str]:
    """Return the tags of the MetaGraph that a TensorFlow model was read from."""
    meta = model.source.meta_graph(model.source.message) if model.format == "tensorflow" else None
    return frozenset() if meta is None else frozenset(meta.meta_info_def.tags)


def prefetch(
    run: Callable[[FeedT], ResultT],
    feeds: Iterable[FeedT],
    max_in_flight: int,
    on_result: Callable[[ResultT], object] | None = None,
    *,
    threads: int | None = None,
) -> Generator[ResultT, None, None]:
    """Yield the results of runs in order, and keep no reference to a result that was yielded.

    The thread that consumes the results reads the feeds. The thread that computed a result also calls `on_result` for
    it, after all earlier results were reported, and then continues with the next run. Waking another thread would take
    as long as part of a short run. At most `max_in_flight` results and runs exist at once; with 1, each run starts when
    its result is requested. At most `threads` runs are concurrent, `max_in_flight` by default.
    """
    if max_in_flight == 1:
        for feed in feeds:
            yield _report_result(run(feed), on_result)
        return
    from concurrent.futures import ThreadPoolExecutor

    def run_and_report(feed: FeedT, previous: Future[ResultT] | None) -> ResultT:
        result = run(feed)
        if previous is not None:
            previous.result()  # raises if an earlier run failed, so that no later result is reported
        return _report_result(result, on_result)

    with ThreadPoolExecutor(threads or max_in_flight) as pool:
        pending: deque[Future[ResultT]] = deque()
        extra_slot = on_result is not None  # a thread holds its result until it is reported, so one more feed may wait
        try:
            for feed in feeds:  # read during other runs, so that the next run can start at once
                if len(pending) == max_in_flight + extra_slot:
                    yield pending.popleft().result()
                predecessor = pending[-1] if on_result is not None and pending else None
                pending.append(pool.submit(run_and_report, feed, predecessor))
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _report_result(result: ResultT, on_result: Callable[[ResultT], object] | None) -> ResultT:
    if on_result is not None:
        on_result(result)
    return result
