"""TensorFlow sessions: import a model, restore its variables, and observe its tensors.

tensorflow is imported here, when a model is run.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import InvalidModelError, MissingDependencyError, ModelError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.learned_ranges import INITIALIZER_OP, LEARNED_ATTR, learned_ranges
from graphquant.formats.tensorflow.ops import ASSIGN_TYPES
from graphquant.formats.tensorflow.signatures import INIT_SIGNATURE
from graphquant.ir import DataType, Graph, Model, Op, Output, Parameters, TensorRef, Use, paused_gc, reachable
from graphquant.utils import disable_onednn

if TYPE_CHECKING:
    from graphquant.formats.tensorflow.source import LiveObject, TensorFlowSource

# Copy a model so that queues record the values of tensors inside functions and TF1 frames.
#
# Such a tensor cannot be fetched: a function's body has no tensors of the main graph, and a tensor in a frame has no
# value or several. Each one gets a queue and an Identity. All consumers read the Identity, which waits until the value
# is in the queue:
#
#     x -> Identity(^enqueue) -> consumers,    enqueue = QueueEnqueueV2(FIFOQueueV2(^x), x)
#
# The queue's op waits for the tensor's producer, so that it runs in the producer's frame, in each iteration of a loop.
# Its `shared_name` makes all these runs use one queue.

_QUEUE_PREFIX: Final = "graphquant_observe"


def unfetchable_ops(graph: Graph) -> set[str]:
    """Return the ops of the main graph that may run never or repeatedly: all descendants of an Enter or Switch."""
    return set(reachable((op.name for op in graph.ops() if op.kind in {"enter", "switch"}), graph.successors))


def instrument_with_queues(model: Model, tensors: Iterable[TensorRef], size_only: Collection[TensorRef] = ()) -> Model:
    """Copy `model` so that the tensor at position i puts its value in queue i each time it is computed.

    For tensors in `size_only` the queue receives the number of elements instead, as int64.
    """
    instrumented = model.copy()
    with paused_gc():
        for index, tensor in enumerate(tensors):
            _add_observation_queue(instrumented.graphs[tensor.graph], index, tensor, size_only=tensor in size_only)
    return instrumented


def add_input_reader(model: Model, graph: Graph, tensor: TensorRef) -> TensorRef:
    """Add ops by which a function reads an input of the main graph, and return its value there.

    A variable passes the value. Each call in the main graph waits for its assignment.
    """
    output, name = model.output(tensor), f"{tensor.op}/variable"
    type_attr = {"dtype": DataType(output.dtype or "float32")}

    def add_handle(in_graph: Graph) -> TensorRef:
        return _add_stateful_op(
            in_graph, name, "VarHandleOp", {**type_attr, "shape": output.shape, "shared_name": name}
        )

    if name not in model.main:
        inputs = [add_handle(model.main), tensor]
        assignment = _add_stateful_op(model.main, f"{name}/assign", "AssignVariableOp", type_attr, inputs, outputs=())
        for call in [op.name for op in model.main.ops() if op.calls]:
            model.main.connect_inputs(call, (), control_sources=[assignment.op])
    value = Output("", output.dtype, output.shape)
    return _add_stateful_op(graph, f"{name}/read", "ReadVariableOp", type_attr, [add_handle(graph)], outputs=(value,))


def _add_stateful_op(
    graph: Graph,
    name: str,
    op_type: str,
    attrs: Mapping[str, object],
    inputs: Sequence[TensorRef] = (),
    control_source: TensorRef | None = None,
    outputs: tuple[Output, ...] = (Output("", "resource"),),
) -> TensorRef:
    op = Op(name=graph.unique_name(name), kind="stateful", type=op_type, attrs=attrs, outputs=outputs)
    return graph.add_op(op, inputs, control_sources=[control_source.op] if control_source else ())


def _add_observation_queue(graph: Graph, index: int, tensor: TensorRef, *, size_only: bool) -> None:
    prefix = f"{_QUEUE_PREFIX}/{index}"
    output = graph.output(tensor)
    source = graph.slots(tensor.op)[0] if graph.op(tensor.op).kind == "next_iteration" else None
    # TensorFlow allows no op between NextIteration and Merge; the input of NextIteration has the same value.
    tensor = tensor if source is None else source
    uses = graph.consumers(tensor)
    dtype = DataType(output.dtype or "float32")
    observed, types = tensor, [dtype]
    if size_only:
        types, size = [DataType("int64")], Output("", "int64", ())
        attrs = {"T": dtype, "out_type": types[0]}
        observed = _add_stateful_op(graph, f"{prefix}/size", "Size", attrs, [tensor], outputs=(size,))
    queue_attrs = {"component_types": types, "shared_name": f"{_QUEUE_PREFIX}_{index}"}
    queue = _add_stateful_op(graph, f"{prefix}/queue", "FIFOQueueV2", queue_attrs, control_source=tensor)
    enqueue = _add_stateful_op(graph, f"{prefix}/enqueue", "QueueEnqueueV2", {"Tcomponents": types}, [queue, observed])
    result = graph.slots(graph.outputs[0])[0] if graph.name and graph.outputs and not uses else None
    if result is not None:
        # TensorFlow leaves out ops of a function that none of its outputs depends on.
        tensor, uses, output = result, [Use(graph.name, graph.outputs[0], 0)], graph.output(result)
    value = Output("", output.dtype, output.shape)
    attrs = {"T": DataType(output.dtype or "float32")}
    identity = _add_stateful_op(graph, f"{prefix}/value", "Identity", attrs, [tensor], enqueue, (value,))
    graph.reroute(tensor, uses, identity)


LISTED_VARIABLES: Final = 3  # names of variables in a message
ASSETS_COLLECTION: Final = "saved_model_assets"
OP_THREADS: Final = min(4, os.cpu_count() or 1)
"""Threads within an op. The number is fixed so that results do not depend on other settings of the process."""

MAX_DEQUEUE: Final = 32
"""Queue elements that one run dequeues. A power of two, as each half of it builds a run of its own in the session."""


@dataclass(slots=True)
class _ObservationQueue:
    """A queue of elements of one dtype, its size, and the tensors that dequeue its first elements in order."""

    handle: Any
    dtype: str
    size: Any
    dequeues: list[Any] = field(default_factory=list)


class TensorFlowSession:
    """A model in a TensorFlow session of its own, with restored and initialized variables."""

    def __init__(self, tensorflow: Any, model: Model, *, for_timing: bool = False) -> None:
        """Start a session; `for_timing` uses TensorFlow's own settings."""
        source: TensorFlowSource = model.source
        if source.live_object is not None and source.live_object.foreign_capture:
            raise ModelError(
                f"{source.live_object.description} captured something that is not a variable,"
                f" {source.live_object.foreign_capture!r}, and cannot run without it. Use ranges that need no data, or"
                " save it as a SavedModel and calibrate that."
            )
        if problem := describe_unfrozen_variables(model):
            raise ModelError(problem)
        self.tf, self.message, v1 = tensorflow, emit(model, to_run=True), tensorflow.compat.v1
        definition = source.graph_def(self.message)
        for message in (*definition.library.function, *proto.all_nodes(definition)):
            message.attr.pop("_XlaMustCompile", None)  # XLA has no queues, and fuses observed tensors
        _remove_unneeded_shapes(model, definition)
        graph_def = v1.GraphDef.FromString(proto.to_binary(definition))
        self.graph = tensorflow.Graph()
        with self.graph.as_default(), translate_tf_errors(tensorflow):
            tensorflow.import_graph_def(graph_def, name="")
        config = v1.ConfigProto(
            device_count={"GPU": 0},
            allow_soft_placement=True,
            inter_op_parallelism_threads=1,
            intra_op_parallelism_threads=1 if for_timing else OP_THREADS,
        )
        # Optimized graphs round differently, and observed values must equal those of the model that runs.
        config.graph_options.rewrite_options.disable_meta_optimizer = not for_timing
        self.tf_session = v1.Session(graph=self.graph, config=config)
        meta = source.meta_graph(self.message)
        if meta is not None:
            self._initialize(source, meta)
        elif any(node.name == INITIALIZER_OP for node in graph_def.node):
            self.run(self.operation(INITIALIZER_OP), {})
        with self.graph.as_default(), translate_tf_errors(tensorflow):
            raw_ops, assignments = tensorflow.raw_ops, []
            for variable in learned_ranges(model):
                value, name = variable.value, variable.shared_name
                handle = raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=name)
                assignments.append(raw_ops.AssignVariableOp(resource=handle, value=value))
        self.run(assignments, {})
        self._state_names = find_state_variables(model)
        self._lock = Lock()
        if source.live_object is not None:
            self._copy_live_values(model, source.live_object)
        elif meta is not None:
            self._restore_missing(model)

    def add_size_tensors(self, names: Mapping[TensorRef, str]) -> dict[TensorRef, Any]:
        """Add tensors that count the elements of others, which are given by name."""
        with self.graph.as_default(), translate_tf_errors(self.tf):
            return {
                tensor: self.tf.raw_ops.Size(input=self.graph.get_tensor_by_name(name), out_type=self.tf.int64)
                for tensor, name in names.items()
            }

    def run(self, fetches: Any, feed: dict[str, Any]) -> Any:
        """Return the values of `fetches`."""
        with translate_tf_errors(self.tf):
            return self.tf_session.run(fetches, feed)

    @property
    def has_state(self) -> bool:
        """True if runs change variables."""
        return bool(self._state_names)

    @cached_property
    def _state(self) -> tuple[list[Any], Sequence[Any]] | None:
        """The readers of the variables that runs change, and their values before the first run; None without any."""
        if not self._state_names:
            return None
        readers = []
        with self.graph.as_default(), translate_tf_errors(self.tf):
            for variable in map(self.graph.get_operation_by_name, self._state_names):
                handle, is_resource = variable.outputs[0], variable.type == "VarHandleOp"
                dtype = variable.get_attr("dtype")
                readers.append(self.tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype) if is_resource else handle)
        return readers, self.run(readers, {})

    def run_with_state(self, fetches: Any, feed: dict[str, Any], values: Sequence[Any] | None) -> tuple[Any, Any]:
        """Run with these values of the variables that runs change, None for the initial ones.

        Return the values of `fetches` and the new values of the variables.
        """
        with self._lock:
            if self._state is None:
                return self.run(fetches, feed), None
            readers, initial_values = self._state
            start_values = initial_values if values is None else values
            assign_variables(self.tf, self.tf_session, dict(zip(self._state_names, start_values, strict=True)))
            return self.run(fetches, feed), self.run(readers, {})

    def add_queues(self, dtypes: Sequence[str]) -> list[_ObservationQueue]:
        """Add the queues 0, 1, ... of these dtypes."""
        raw_ops, queues = self.tf.raw_ops, []
        with self.graph.as_default():
            for index, dtype in enumerate(dtypes):
                queue = raw_ops.FIFOQueueV2(component_types=[dtype], shared_name=f"{_QUEUE_PREFIX}_{index}")
                queues.append(_ObservationQueue(queue, dtype, raw_ops.QueueSizeV2(handle=queue)))
        return queues

    def drain_queues(self, queues: Sequence[_ObservationQueue]) -> list[list[Any]]:
        """Dequeue and return all elements of each queue, in order."""
        remaining = [int(size) for size in self.run([queue.size for queue in queues], {})] if queues else []
        elements: list[list[Any]] = [[] for _ in queues]
        step = MAX_DEQUEUE
        while step:
            ready = [index for index, size in enumerate(remaining) if size >= step]
            if not ready:
                step //= 2
                continue
            dequeued = self.run([self._dequeue_tensors(queues[index], step) for index in ready], {})
            for index, values in zip(ready, dequeued, strict=True):
                elements[index] += values
                remaining[index] -= step
        return elements

    def _dequeue_tensors(self, queue: _ObservationQueue, count: int) -> list[Any]:
        """Return tensors that dequeue the first `count` elements in order."""
        with self.graph.as_default():
            while len(queue.dequeues) < count:
                with self.graph.control_dependencies([dequeue.op for dequeue in queue.dequeues[-1:]]):
                    dequeue = self.tf.raw_ops.QueueDequeueV2(handle=queue.handle, component_types=[queue.dtype])
                queue.dequeues.append(dequeue[0])
        return queue.dequeues[:count]

    def _initialize(self, source: TensorFlowSource, meta: Any) -> None:
        """Restore the variables and run the model's initialization, as TensorFlow's loader does."""
        prefix = source.checkpoint_prefix()
        if prefix is not None and meta.saver_def.restore_op_name:
            self.run(self.operation(meta.saver_def.restore_op_name), {meta.saver_def.filename_tensor_name: str(prefix)})
        assets = {
            asset.tensor_info.name: str(source.folder / "assets" / asset.filename)
            for asset in _asset_files(meta)
            if source.folder is not None and Path(asset.filename).name == asset.filename
        }
        collections = [key for key in ("saved_model_main_op", "legacy_init_op") if key in meta.collection_def]
        names = [meta.collection_def[key].node_list.value for key in collections]
        if INIT_SIGNATURE in meta.signature_def:
            names.insert(0, [tensor_info.name for tensor_info in meta.signature_def[INIT_SIGNATURE].outputs.values()])
        for name in next((listed for listed in names if listed), ()):
            self.run(self.operation(name), assets)

    def _restore_missing(self, model: Model) -> None:
        """Assign values that the saver omits: Keras may save two nodes of a variable but list only one."""
        ops = model.main.ops()
        values = [(op.name, op.read_value) for op in ops if op.type == "VarHandleOp" and op.read_value is not None]
        with self.graph.as_default():
            handles = [self.graph.get_tensor_by_name(f"{name}:0") for name, _ in values]
            initialized = self.run([self.tf.raw_ops.VarIsInitializedOp(resource=handle) for handle in handles], {})
        missing = {name: read() for (name, read), restored in zip(values, initialized, strict=True) if not restored}
        assign_variables(self.tf, self.tf_session, missing)

    def _copy_live_values(self, model: Model, live_object: LiveObject) -> None:
        names = [op.name for op in model.main.ops() if op.kind == "variable" and LEARNED_ATTR not in op.attrs]
        if names and not live_object.values:
            raise ModelError(
                f"The variables of {live_object.description}, for example {names[0]!r}, have values only in a"
                " session. Pass the session to gq.load."
            )
        values = {name: value for name, value in live_object.current_values().items() if name in names}
        assign_variables(self.tf, self.tf_session, values)

    def operation(self, name: str) -> Any:
        """Return the operation that makes the tensor `name`."""
        with translate_tf_errors(self.tf):
            return self.graph.get_operation_by_name(name.partition(":")[0])


def _remove_unneeded_shapes(model: Model, graph_def: Any) -> None:
    """Remove the shapes of ops that no output needs: an older TensorFlow may have inferred others of gradients."""
    needed = model.needed_ops()[""]
    for node in graph_def.node:
        if node.name in model.main and node.name not in needed:
            node.attr.pop("_output_shapes", None)


class RunSequence:
    """Runs that start with the state in which the previous one ended, and the first one with the initial state.

    Other runs of the session do not change the state of the sequence. So two models that are compared have the same
    history, whatever else ran in their sessions.
    """

    def __init__(self, session: TensorFlowSession) -> None:
        """Start with the initial values of the variables."""
        self._session, self._values = session, None

    def run(self, fetches: Any, feed: dict[str, Any]) -> Any:
        """Return the values of `fetches`."""
        results, self._values = self._session.run_with_state(fetches, feed, self._values)
        return results


def describe_unfrozen_variables(model: Model) -> str:
    """Return a sentence on the variables of a GraphDef that the outputs need and that have no values; "" for none.

    A GraphDef has no checkpoint, so only a variable that graphquant added for a learned range has a value.
    """
    source, main = model.source, model.main
    if source.message_type != "GraphDef" or source.live_object is not None:
        return ""
    needed = model.needed_ops()[""]
    variables = [op for op in main.ops() if op.kind == "variable" and op.name in needed]
    names = sorted(op.name for op in variables if op.read_value is None and LEARNED_ATTR not in op.source.attr)
    if not names:
        return ""
    listed = ", ".join(map(repr, names[:LISTED_VARIABLES])) + (", ..." if len(names) > LISTED_VARIABLES else "")
    path = model.path or source.file
    return (
        f"{path} has {len(names)} variables without values: {listed}. A GraphDef stores none. Freeze the model from the"
        " SavedModel, or from the MetaGraph with its checkpoint: graphquant freeze SAVED_MODEL|NAME.meta -o"
        f" {path.stem}_frozen.pb"
    )


def find_state_variables(model: Model) -> list[str]:
    """Return the variables of the main graph that the outputs' ops assign, such as the states of a stateful LSTM."""
    main, parameters = model.main, Parameters(model)
    ancestors = set(reachable(main.outputs, main.predecessors))
    called = (call.graph for name in ancestors for call in main.op(name).calls if call.graph in model.graphs)
    names: dict[str, None] = {}
    for name in ("", *model.graphs_reachable_from(list(dict.fromkeys(called)))):
        graph = model.graphs[name]
        for op in graph.ops():
            is_run = bool(name) or op.name in ancestors
            handle = next(iter(graph.slots(op.name)), None) if is_run and op.type in ASSIGN_TYPES else None
            variable = None if handle is None else parameters.root_tensor(handle)
            if variable is not None and not variable.graph and main.op(variable.op).kind == "variable":
                names[variable.op] = None
    return sorted(names)


@dataclass(slots=True)
class TensorWatch:
    """A session that observes tensors."""

    session: TensorFlowSession  # the session
    owns_session: bool  # True if nothing else uses the session
    tensors: Sequence[TensorRef]  # the observed tensors, in order
    direct_fetches: dict[TensorRef, Any]  # the fetches of tensors that have one value in each run
    queued_tensors: dict[TensorRef, _ObservationQueue]  # the queues of tensors that may have no value or several
    target_ops: list[Any]  # the operations that a run executes
    sequence: RunSequence  # the sequence of the present runs

    def start_sequence(self) -> None:
        """Let the next run start with the initial state."""
        self.sequence = RunSequence(self.session)

    def observe(
        self, feed_dict: dict[str, Any], tensors: Sequence[TensorRef] | None = None
    ) -> dict[TensorRef, list[Any]]:
        """Return the values of all tensors, or of some of them, in one run."""
        requested = self.tensors if tensors is None else tensors
        counted = self.direct_fetches.keys() - set(self.tensors)  # they are run so that nothing is fused
        run = counted.union(requested)
        fetches = {tensor: fetch for tensor, fetch in self.direct_fetches.items() if tensor in run}
        values = self.sequence.run([*fetches.values(), *self.target_ops], feed_dict)
        observed = {tensor: [value] for tensor, value in zip(fetches, values, strict=False)}
        queued = self.session.drain_queues(list(self.queued_tensors.values()))
        observed.update(zip(self.queued_tensors, queued, strict=True))
        return {tensor: observed.get(tensor, []) for tensor in requested}

    def close(self) -> None:
        """Close the session if nothing else uses it."""
        if self.owns_session:
            self.session.tf_session.close()


def assign_variables(tensorflow: Any, session: Any, values: Mapping[str, Any]) -> None:
    """Assign values to variables in a single run: each run after a graph change is expensive in TensorFlow."""
    setters: list[Any] = []
    feed_dict: dict[str, Any] = {}
    with session.graph.as_default(), translate_tf_errors(tensorflow):
        for name, value in values.items():
            variable = session.graph.get_operation_by_name(name)
            handle = variable.outputs[0]
            readers = [reader for reader in handle.consumers() if reader.type in {"AssignVariableOp", "Assign"}]
            assign_ops = (reader for reader in readers if reader.inputs[0] is handle and not reader.control_inputs)
            setter = next(assign_ops, None)
            if setter is None or setter.inputs[1].name in feed_dict:  # two variables may have the same initial tensor
                with tensorflow.device(variable.device):
                    placeholder = tensorflow.compat.v1.placeholder(value.dtype)
                    if variable.type == "VarHandleOp":
                        setter = tensorflow.raw_ops.AssignVariableOp(resource=handle, value=placeholder)
                    else:
                        setter = tensorflow.raw_ops.Assign(ref=handle, value=placeholder, validate_shape=False).op
            setters.append(setter)
            feed_dict[setter.inputs[1].name] = value
        session.run(setters, feed_dict)


def _asset_files(meta: Any) -> list[Any]:
    """Return the AssetFileDefs of a MetaGraphDef. TensorFlow 1 and estimators have them in a collection."""
    assets = list(meta.asset_file_def)
    if ASSETS_COLLECTION in meta.collection_def:
        packed_assets = meta.collection_def[ASSETS_COLLECTION].any_list.value
        assets += [proto.parse_binary(packed.value, proto.AssetFileDef()) for packed in packed_assets]
    return assets


@contextmanager
def translate_tf_errors(tensorflow: Any) -> Iterator[None]:
    """Convert TensorFlow's errors into ModelErrors with the line that states the reason."""
    try:
        yield
    except tensorflow.errors.OpError as error:
        raise ModelError(f"TensorFlow cannot run the model: {last_error_line(error.message)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidModelError(f"TensorFlow refuses the model: {first_error_line(str(error))}.") from error


_PROTO_TEXT = re.compile(r"^\w+ \{$", re.MULTILINE)  # the start of a message in text form
_FAILED_NODE: Final = re.compile(r"\n\s*\[\[\{\{node ([^}]+)\}\}")
_MISSING_KERNEL: Final = re.compile(r"No OpKernel was registered to support Op '(\w+)' used by \{\{node ([^}]+)\}\}")


def last_error_line(text: str) -> str:
    """Return the op and the last line of the reason in an error of TensorFlow's runtime.

    The lines before it say where Python code created the op, and those after it repeat that or name other ops.
    """
    failed_node = _FAILED_NODE.search(text)
    reason = _PROTO_TEXT.split(text if failed_node is None else text[: failed_node.start()], maxsplit=1)[0]
    lines = [line.strip() for line in reason.splitlines() if line.strip() and not line.strip().startswith("[[")]
    line = lines[-1] if lines else "no reason given"
    if missing_kernel := _MISSING_KERNEL.search(reason):  # the lines after it list the kernels of other devices
        return f"op {missing_kernel[2]!r}: this version of TensorFlow has no kernel for {missing_kernel[1]}"
    return line if failed_node is None else f"op {failed_node[1]!r}: {line}"


def first_error_line(text: str) -> str:
    """Return the first line of an error's text that states a reason, without the full stop."""
    lines = (line.strip().rstrip(".") for line in text.splitlines())
    return next((line for line in lines if line not in {"", "Graph execution error:"}), "no reason given")


def import_tensorflow() -> Any:
    """Import tensorflow without output on stderr. An imported module stays as it is."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if sys.modules.get("tensorflow") is not None:
        return sys.modules["tensorflow"]
    disable_onednn()
    try:
        with silence_stderr():
            import tensorflow as tf
    except ImportError as error:
        raise MissingDependencyError(
            "Running a TensorFlow model needs tensorflow, which is not installed."
            " Install it with: pip install 'graphquant[tensorflow]'"
        ) from error
    tf.get_logger().setLevel("ERROR")
    return tf


@contextmanager
def silence_stderr() -> Iterator[None]:
    """Discard warnings, and output of libraries to file descriptor 2. Errors still propagate."""
    sys.stderr.flush()
    saved_stderr, null_device = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null_device, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)
        os.close(null_device)
