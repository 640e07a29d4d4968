"""Runs a model in TensorFlow's sessions. The only module that imports tensorflow, and only when a runner is made."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import DataError, MissingDependencyError, ModelError, did_you_mean
from graphquant.formats import Feeds, InputSpec
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.observe import instrument, queue_name, unfetchable
from graphquant.ir import Model, TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from graphquant.formats.tensorflow.source import Source

__all__ = ["TensorFlowRunner", "inputs", "runner"]

INIT_SIGNATURE: Final = "__saved_model_init_op"
INIT_COLLECTIONS: Final = ("saved_model_main_op", "legacy_init_op")
COMPILE_ATTR: Final = "_XlaMustCompile"
HEADING: Final = "Graph execution error:"
SERVING: Final = "serving_default"


def runner(model: Model) -> TensorFlowRunner:
    """A runner for `model` as it stands, edits included.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: TensorFlow refuses the model.
    """
    return TensorFlowRunner(model, _tensorflow())


def inputs(model: Model) -> Sequence[InputSpec]:
    """What a run of `model` must be fed: its signature's inputs or, without one, its placeholders."""
    meta = model.source.meta_graph(emit(model))
    signature = _signature(meta) if meta is not None else None
    return _placeholders(model) if signature is None else _signature_inputs(model, signature)


class TensorFlowRunner:
    """Runs one signature of a model, or what leads to all tensors that nobody reads.

    Attributes:
        inputs: What must be fed, by the placeholder's name.
        outputs: The signature's keys, or the names of the tensors.
    """

    def __init__(self, model: Model, tensorflow: Any) -> None:
        self._tf = tensorflow
        self._model = model
        self.inputs = inputs(model)
        self._fetches = _fetches(model)
        self.outputs: Sequence[str] = tuple(self._fetches)
        self._keys = {key: spec for spec in self.inputs for key in (*spec.aliases, spec.name)}
        self._session = _Session.start(tensorflow, model)

    def run(self, feeds: Feeds) -> dict[str, npt.NDArray[Any]]:
        """The model's outputs by name, for one feed; inputs may go by name or alias.

        Raises:
            DataError: An input is missing, unknown, or of another shape than the model wants.
            ModelError: TensorFlow cannot run the model.
        """
        values = self._session.run(list(self._fetches.values()), self._feed(feeds))
        return dict(zip(self._fetches, values, strict=True))

    @staticmethod
    def unwatchable(_tensors: Sequence[TensorRef]) -> dict[TensorRef, str]:
        """None: queues carry values out of every function and frame."""
        return {}

    @property
    def batchable(self) -> bool:
        """Whether samples may be joined along axis 0 of every input and each result is still that of its sample."""
        return False

    def sizes(self, tensors: Sequence[TensorRef], feed: Feeds) -> dict[TensorRef, int]:
        """How many elements each tensor has in one run of `feed`, over all iterations; 0 if it is not reached.

        Raises:
            DataError: An input is missing, unknown, or of another shape than the model wants.
            ModelError: TensorFlow cannot run the model.
        """
        (seen,) = self.observe(tensors, [feed])
        return {tensor: sum(value.size for value in values) for tensor, values in seen.items()}

    def observe(
        self, tensors: Sequence[TensorRef], feeds: Iterable[Feeds], *, beside: Sequence[TensorRef] = ()
    ) -> Iterator[dict[TensorRef, list[npt.NDArray[Any]]]]:
        """For each feed the values that each tensor took: none if it was not reached, several inside loops.

        Args:
            tensors: What to observe.
            feeds: What to run.
            beside: What other calls observe on the same feeds; nothing depends on it, as no op is fused.

        Raises:
            DataError: An input is missing, unknown, or of another shape than the model wants.
            ModelError: TensorFlow cannot run the model.
        """
        del beside
        live, hidden = set(self._model.live()), unfetchable(self._model.main)
        wanted = list(dict.fromkeys(tensors))
        queued = [tensor for tensor in wanted if tensor.graph in live and (tensor.graph or tensor.op in hidden)]
        direct = [tensor for tensor in wanted if not tensor.graph and tensor.op not in hidden]
        watched = instrument(self._model, queued) if queued else self._model
        session = _Session.start(self._tf, watched) if queued else self._session
        dtypes = [self._model.output(tensor).dtype or "float32" for tensor in queued]
        queues = session.queues(dtypes)
        # The outputs only have to run: one on the branch of a TF1 cond that is not taken has no value to fetch.
        ends = [session.operation(name) for name in _fetches(watched).values()]
        fetches = [*(f"{tensor.op}:{tensor.port}" for tensor in direct), *ends]
        try:
            for feed in feeds:
                values = session.run(fetches, self._feed(feed))
                seen: dict[TensorRef, list[npt.NDArray[Any]]] = {tensor: [] for tensor in wanted}
                seen.update((tensor, [value]) for tensor, value in zip(direct, values, strict=False))
                seen.update(zip(queued, session.drain(queues), strict=True))
                yield seen
        finally:
            if session is not self._session:
                session.session.close()

    def _feed(self, feeds: Feeds) -> dict[str, Any]:
        fed: dict[str, Any] = {}
        for key, value in feeds.items():
            spec = self._keys.get(key)
            if spec is None:
                raise DataError(
                    f"The data has {key!r}, which is no input of the model. Its inputs are "
                    f"{', '.join(spec.name for spec in self.inputs)}.{did_you_mean(key, self._keys)}"
                )
            if not _fits(spec, value.shape):
                raise DataError(
                    f"The data for {spec.name!r} has shape {value.shape}, and the model wants {_written(spec)}."
                    " Reshape the data."
                )
            fed[f"{spec.name}:0"] = value
        missing = [spec.name for spec in self.inputs if f"{spec.name}:0" not in fed]
        if missing:
            raise DataError(f"The data lacks the model's input {missing[0]!r}. It has {', '.join(feeds) or 'nothing'}.")
        return fed


@dataclass(slots=True)
class _Queue:
    """A queue's size and the tensor that takes its first element."""

    size: Any
    take: Any


@dataclass(slots=True)
class _Session:
    """A model in a TensorFlow session of its own."""

    tf: Any
    graph: Any
    session: Any = field(repr=False)

    @classmethod
    def start(cls, tensorflow: Any, model: Model) -> _Session:
        """Imports the model, restores its variables and initializes it."""
        source: Source = model.source
        message = emit(model)
        v1 = tensorflow.compat.v1
        graph_def = v1.GraphDef.FromString(proto.to_binary(_uncompiled(source.graph_def(message))))
        graph = tensorflow.Graph()
        with graph.as_default(), _refusals(tensorflow):
            tensorflow.import_graph_def(graph_def, name="")
        config = v1.ConfigProto(
            device_count={"GPU": 0},
            allow_soft_placement=True,
            inter_op_parallelism_threads=1,
            intra_op_parallelism_threads=os.cpu_count() or 1,
        )
        # What is rewritten for speed rounds differently, and what is observed must be what runs.
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        made = cls(tensorflow, graph, v1.Session(graph=graph, config=config))
        meta = source.meta_graph(message)
        if meta is not None:
            made._initialize(source, meta)
        return made

    def run(self, fetches: Any, feed: dict[str, Any]) -> Any:
        """The values of `fetches`."""
        with _refusals(self.tf):
            return self.session.run(fetches, feed)

    def queues(self, dtypes: Sequence[str]) -> list[_Queue]:
        """The queues 0, 1, ... of these dtypes."""
        raw, made = self.tf.raw_ops, []
        with self.graph.as_default():
            for index, dtype in enumerate(dtypes):
                queue = raw.FIFOQueueV2(component_types=[dtype], shared_name=queue_name(index))
                take = raw.QueueDequeueV2(handle=queue, component_types=[dtype])
                made.append(_Queue(raw.QueueSizeV2(handle=queue), take[0]))
        return made

    def drain(self, queues: Sequence[_Queue]) -> list[list[Any]]:
        """Takes out and returns all that each queue holds, in the order it was put in."""
        sizes = self.run([queue.size for queue in queues], {}) if queues else []
        found: list[list[Any]] = [[] for _ in queues]
        for turn in range(max(sizes, default=0)):
            left = [index for index, size in enumerate(sizes) if size > turn]
            for index, value in zip(left, self.run([queues[index].take for index in left], {}), strict=True):
                found[index].append(value)
        return found

    def _initialize(self, source: Source, meta: Any) -> None:
        """Restores the variables and runs the model's own initialization, as TensorFlow's loader does."""
        prefix = source.prefix()
        if prefix is not None and meta.saver_def.restore_op_name:
            self.run(self.operation(meta.saver_def.restore_op_name), {meta.saver_def.filename_tensor_name: str(prefix)})
        assets = {
            asset.tensor_info.name: str(source.folder / "assets" / asset.filename)
            for asset in meta.asset_file_def
            if source.folder is not None and Path(asset.filename).name == asset.filename
        }
        names = [meta.collection_def[key].node_list.value for key in INIT_COLLECTIONS if key in meta.collection_def]
        if INIT_SIGNATURE in meta.signature_def:
            names.insert(0, [info.name for info in meta.signature_def[INIT_SIGNATURE].outputs.values()])
        for name in next((listed for listed in names if listed), ()):
            self.run(self.operation(name), assets)

    def operation(self, name: str) -> Any:
        """The operation that makes the tensor `name`."""
        with _refusals(self.tf):
            return self.graph.get_operation_by_name(name.partition(":")[0])


def _uncompiled(graph_def: Any) -> Any:
    """`graph_def` without the demand to compile functions with XLA, which has no queues and fuses what is observed."""
    for function in graph_def.library.function:
        function.attr.pop(COMPILE_ATTR, None)
    for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
        for node in nodes:
            node.attr.pop(COMPILE_ATTR, None)
    return graph_def


def _signature(meta: Any) -> Any:
    """The signature that serves: `serving_default`, else the first with outputs; None if there is none."""
    names = [SERVING, *sorted(meta.signature_def)]
    found = (meta.signature_def[name] for name in names if name in meta.signature_def and name != INIT_SIGNATURE)
    return next((signature for signature in found if any(info.name for info in signature.outputs.values())), None)


def _signature_inputs(model: Model, signature: Any) -> tuple[InputSpec, ...]:
    specs = []
    for key in sorted(signature.inputs):
        name = signature.inputs[key].name.partition(":")[0]
        if name not in model.main or not model.main.op(name).outputs:
            raise ModelError(f"The signature's input {key!r} is {name!r}, which does not exist. The model is damaged.")
        specs.append(_spec(model, name, key))
    return tuple(specs)


def _spec(model: Model, name: str, *keys: str) -> InputSpec:
    known = model.main.op(name).outputs[0]
    aliases = tuple(dict.fromkeys(key for key in (f"{name}:0", *keys) if key != name))
    return InputSpec(name=name, dtype=known.dtype or "float32", shape=known.shape, aliases=aliases)


def _placeholders(model: Model) -> tuple[InputSpec, ...]:
    """The placeholders that the outputs depend on."""
    needed, todo = set(model.main.outputs), list(model.main.outputs)
    while todo:
        for source in model.main.nx.pred[todo.pop()]:
            if source not in needed:
                needed.add(source)
                todo.append(source)
    names = [name for name in model.main.inputs if name in needed and not model.main.slots(name)]
    return tuple(_spec(model, name) for name in names)


def _fetches(model: Model) -> dict[str, str]:
    """The outputs of a run and the tensors that they are."""
    meta = model.source.meta_graph(emit(model))
    signature = _signature(meta) if meta is not None else None
    return _sinks(model) if signature is None else _signature_outputs(signature)


def _signature_outputs(signature: Any) -> dict[str, str]:
    names = {key: signature.outputs[key].name for key in sorted(signature.outputs)}
    return {key: name if ":" in name else f"{name}:0" for key, name in names.items() if name}


def _sinks(model: Model) -> dict[str, str]:
    found = {}
    for label in model.main.outputs:
        tensor = model.main.producer(Use("", label, 0))
        if tensor is not None:
            found[label.removeprefix("@")] = f"{tensor.op}:{tensor.port}"
    return found


def _fits(spec: InputSpec, shape: tuple[int, ...]) -> bool:
    if spec.shape is None:
        return True
    return len(shape) == len(spec.shape) and all(
        wanted is None or wanted == given for wanted, given in zip(spec.shape, shape, strict=True)
    )


def _written(spec: InputSpec) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in spec.shape or ()) + "]"


@contextmanager
def _refusals(tensorflow: Any) -> Iterator[None]:
    """Turns TensorFlow's own errors into a ModelError with their first line."""
    try:
        yield
    except tensorflow.errors.OpError as error:
        raise ModelError(f"TensorFlow cannot run the model: {_first_line(error.message)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"TensorFlow refuses the model: {_first_line(str(error))}") from error


def _first_line(text: str) -> str:
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line not in {"", HEADING}), "no reason given")


def _tensorflow() -> Any:
    """The tensorflow package, imported without a word on stderr."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if sys.modules.get("tensorflow") is not None:
        return sys.modules["tensorflow"]
    try:
        with _silence(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import tensorflow as tf
    except ImportError as error:
        raise MissingDependencyError(
            "Running a TensorFlow model needs tensorflow, which is not installed."
            " Install it with: pip install 'graphquant[tensorflow]'"
        ) from error
    tf.get_logger().setLevel("ERROR")
    return tf


@contextmanager
def _silence() -> Iterator[None]:
    """Sends what libraries write to file descriptor 2 to nowhere."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
