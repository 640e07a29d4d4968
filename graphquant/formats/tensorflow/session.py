"""TensorFlow's sessions: a model imported, its variables restored, and its tensors seen wherever they are.

The only module that imports tensorflow, and only when a model is to be run.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import MissingDependencyError, ModelError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.learned import INITIALIZER, MARK, learned
from graphquant.formats.tensorflow.observe import queue_name
from graphquant.kernels import repeatable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from graphquant.formats.tensorflow.learned import Learned
    from graphquant.formats.tensorflow.live import Live
    from graphquant.formats.tensorflow.source import Source
    from graphquant.ir import Model, Shape, TensorRef

__all__ = ["INIT_SIGNATURE", "Session", "Watch", "assign", "tensorflow"]

INIT_SIGNATURE: Final = "__saved_model_init_op"
INIT_COLLECTIONS: Final = ("saved_model_main_op", "legacy_init_op")
COMPILE_ATTR: Final = "_XlaMustCompile"
HEADING: Final = "Graph execution error:"
THREADS: Final = min(4, os.cpu_count() or 1)
"""Threads within an op; pinned, so that a run does not depend on what else the process set."""

MOST_AT_ONCE: Final = 32
"""Elements of a queue that one run takes: a power of two, for each half of it makes a run of its own in the session."""


@dataclass(slots=True)
class _Queue:
    """A queue of elements of one dtype, its size, and the tensors that take the first elements, one after the other."""

    handle: Any
    dtype: str
    size: Any
    takes: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Session:
    """A model in a TensorFlow session of its own; `message` is the model as it was emitted for it."""

    tf: Any
    graph: Any
    session: Any = field(repr=False)
    message: Any = field(repr=False)

    @classmethod
    def start(cls, tensorflow: Any, model: Model, *, timed: bool = False) -> Session:
        """Imports the model, restores its variables and initializes it; where it is `timed`, as TensorFlow would."""
        source: Source = model.source
        if source.live is not None and source.live.foreign:
            raise ModelError(
                f"{source.live.what} captured something that is no variable, {source.live.foreign!r}, and cannot run"
                " apart from it. Use ranges that need no data, or save it as a SavedModel and calibrate that."
            )
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
            intra_op_parallelism_threads=1 if timed else THREADS,
        )
        # What is rewritten for speed rounds differently, and what is observed must be what runs.
        config.graph_options.rewrite_options.disable_meta_optimizer = not timed
        made = cls(tensorflow, graph, v1.Session(graph=graph, config=config), message)
        meta = source.meta_graph(message)
        if meta is not None:
            made._initialize(source, meta)
        elif any(node.name == INITIALIZER for node in graph_def.node):
            made.run(made.operation(INITIALIZER), {})
        made._assign(learned(model))
        if source.live is not None:
            made._take_over(source.live)
        elif meta is not None:
            made._restore_rest(model)
        return made

    def sizes(self, names: Mapping[TensorRef, str]) -> dict[TensorRef, Any]:
        """Tensors that count the elements of others, by what goes by their `names`."""
        with self.graph.as_default(), _refusals(self.tf):
            return {
                tensor: self.tf.raw_ops.Size(input=self.graph.get_tensor_by_name(name), out_type=self.tf.int64)
                for tensor, name in names.items()
            }

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
                made.append(_Queue(queue, dtype, raw.QueueSizeV2(handle=queue)))
        return made

    def drain(self, queues: Sequence[_Queue]) -> list[list[Any]]:
        """Takes out and returns all that each queue holds, in the order it was put in."""
        left = [int(size) for size in self.run([queue.size for queue in queues], {})] if queues else []
        found: list[list[Any]] = [[] for _ in queues]
        step = MOST_AT_ONCE
        while step:
            ready = [index for index, size in enumerate(left) if size >= step]
            if not ready:
                step //= 2
                continue
            taken = self.run([self._takes(queues[index], step) for index in ready], {})
            for index, values in zip(ready, taken, strict=True):
                found[index] += values
                left[index] -= step
        return found

    def _takes(self, queue: _Queue, count: int) -> list[Any]:
        """Tensors that take the first `count` elements of a queue, in their order."""
        with self.graph.as_default():
            while len(queue.takes) < count:
                with self.graph.control_dependencies([take.op for take in queue.takes[-1:]]):
                    take = self.tf.raw_ops.QueueDequeueV2(handle=queue.handle, component_types=[queue.dtype])
                queue.takes.append(take[0])
        return queue.takes[:count]

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

    def _assign(self, variables: Sequence[Learned]) -> None:
        """Gives the variables of learned ranges that the model got since it was read their first values."""
        raw = self.tf.raw_ops
        with self.graph.as_default(), _refusals(self.tf):
            assigned = [
                raw.AssignVariableOp(
                    resource=raw.VarHandleOp(dtype=one.value.dtype, shape=one.value.shape, shared_name=one.shared),
                    value=one.value,
                )
                for one in variables
            ]
        self.run(assigned, {})

    def _restore_rest(self, model: Model) -> None:
        """Gives variables that the saver left out their values: Keras' may have two nodes, of which it knows one."""
        values = [(op.name, op.value) for op in model.main.ops() if op.type == "VarHandleOp" and op.value is not None]
        with self.graph.as_default():
            handles = [self.graph.get_tensor_by_name(f"{name}:0") for name, _ in values]
            restored = self.run([self.tf.raw_ops.VarIsInitializedOp(resource=handle) for handle in handles], {})
        left = {name: read() for (name, read), done in zip(values, restored, strict=True) if not done}
        assign(self.tf, self.session, left)

    def _take_over(self, live: Live) -> None:
        """Gives the variables the values that they have in the object that the model was made of."""
        kinds = {"VarHandleOp", "VariableV2", "Variable"}
        variables = [op for op in self.graph.get_operations() if op.type in kinds and MARK not in op.node_def.attr]
        if variables and not live.values:
            raise ModelError(
                f"The variables of {live.what}, {variables[0].name!r} first, have values only in a session."
                " Give gq.load the session."
            )
        names = {op.name for op in variables}
        assign(self.tf, self.session, {name: value for name, value in live.read().items() if name in names})

    def operation(self, name: str) -> Any:
        """The operation that makes the tensor `name`."""
        with _refusals(self.tf):
            return self.graph.get_operation_by_name(name.partition(":")[0])


@dataclass(slots=True)
class Watch:
    """A session in which tensors are seen.

    Attributes:
        session: The session.
        own: Whether it is there for this alone.
        tensors: What is seen, in that order.
        direct: What to fetch for tensors that have one value in each run.
        queued: The queues of tensors that have none or several.
        ends: The operations that a run is for.
    """

    session: Session
    own: bool
    tensors: Sequence[TensorRef]
    direct: dict[TensorRef, Any]
    queued: dict[TensorRef, _Queue]
    ends: list[Any]

    def values(self, fed: dict[str, Any]) -> dict[TensorRef, list[Any]]:
        """The values that each tensor takes in one run."""
        values = self.session.run([*self.direct.values(), *self.ends], fed)
        seen = {tensor: [value] for tensor, value in zip(self.direct, values, strict=False)}
        seen.update(zip(self.queued, self.session.drain(list(self.queued.values())), strict=True))
        return {tensor: seen.get(tensor, []) for tensor in self.tensors}

    def close(self) -> None:
        """Ends the session if it is there for this alone."""
        if self.own:
            self.session.session.close()


def assign(tensorflow: Any, session: Any, values: Mapping[str, Any]) -> None:
    """Gives variables values, all in one run: a graph that grew costs TensorFlow much at the next.

    Args:
        tensorflow: The package.
        session: A session, in whose graph operations are added for variables that have none that assigns them.
        values: Values by the names of the operations that make the variables.
    """
    setters: list[Any] = []
    fed: dict[str, Any] = {}
    with session.graph.as_default(), _refusals(tensorflow):
        for name, value in values.items():
            variable = session.graph.get_operation_by_name(name)
            setter = _setter(variable)
            if setter is None or setter.inputs[1].name in fed:  # two variables may start with one tensor
                setter = _new_setter(tensorflow, variable, value)
            setters.append(setter)
            fed[setter.inputs[1].name] = value
        session.run(setters, fed)


def _setter(variable: Any) -> Any:
    """The operation of the graph that assigns a variable and waits for nothing else, None if there is none."""
    handle = variable.outputs[0]
    kinds = {"AssignVariableOp", "Assign"}
    found = (one for one in handle.consumers() if one.type in kinds and one.inputs[0] is handle)
    return next((one for one in found if not one.control_inputs), None)


def _new_setter(tensorflow: Any, variable: Any, value: Any) -> Any:
    raw, handle = tensorflow.raw_ops, variable.outputs[0]
    with tensorflow.device(variable.device):
        given = tensorflow.compat.v1.placeholder(value.dtype, value.shape)
        if variable.type == "VarHandleOp":
            return raw.AssignVariableOp(resource=handle, value=given)
        return raw.Assign(ref=handle, value=given, validate_shape=False).op


def shapes_of(tensorflow: Any, graph_def: Any) -> dict[tuple[str, int], Shape | None]:
    """The static shapes that TensorFlow infers, by op and port.

    Raises:
        ModelError: It refuses the graph.
    """
    v1 = tensorflow.compat.v1
    graph = tensorflow.Graph()
    with graph.as_default(), _refusals(tensorflow):
        tensorflow.import_graph_def(v1.GraphDef.FromString(proto.to_binary(graph_def)), name="")
    return {
        (operation.name, port): None if output.shape.rank is None else tuple(output.shape.as_list())
        for operation in graph.get_operations()
        for port, output in enumerate(operation.outputs)
    }


def _uncompiled(graph_def: Any) -> Any:
    """`graph_def` without the demand to compile functions with XLA, which has no queues and fuses what is observed."""
    for function in graph_def.library.function:
        function.attr.pop(COMPILE_ATTR, None)
    for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
        for node in nodes:
            node.attr.pop(COMPILE_ATTR, None)
    return graph_def


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


def tensorflow() -> Any:
    """The tensorflow package, imported without a word on stderr; one that is imported already stays as it is."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if sys.modules.get("tensorflow") is not None:
        return sys.modules["tensorflow"]
    repeatable()
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
