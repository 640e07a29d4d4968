"""Read TensorFlow objects: a tf.Graph, a session, a ConcreteFunction, a tf.function or a Keras model.

A caller that has such an object has imported tensorflow, so it is taken from `sys.modules` and never imported. A
function becomes a graph that calls it with its captures: variables as VarHandleOps, tensors as constants. Trace numbers
are removed from function names, so that the same code gives the same model.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from graphquant.errors import ModelError, UsageError, did_you_mean
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.function_names import drop_traced_gradients, normalize_function_names
from graphquant.formats.tensorflow.learned_ranges import unique_node_name
from graphquant.formats.tensorflow.load import add_output, build_model
from graphquant.formats.tensorflow.ops import VARIABLE_OP_TYPES
from graphquant.formats.tensorflow.source import LiveObject, TensorFlowSource, fetch_from_session
from graphquant.formats.tensorflow.values import Array, encode_tensor
from graphquant.ir import reachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphquant.ir import Graph, Model


CALL_OP: Final = "StatefulPartitionedCall"
"""The op of the main graph that calls the function."""

OUTPUT_PREFIX: Final = "output_"
"""The signature's key of a function's result; its position follows."""

ESSENTIAL_KINDS: Final = frozenset({"constant", "variable", "input", "output", "stateful"})
"""Kinds that an op keeps even if no output depends on it."""

_HANDLE_DTYPES: Final = frozenset({"resource", "variant"})


def from_tensorflow(instance: Any, outputs: Sequence[Any] = ()) -> Model:
    """Read the model of a tf.Graph, a session, a ConcreteFunction, a tf.function or a Keras model.

    Args:
        instance: The object.
        outputs: The outputs of a graph, tensors or their names; by default all tensors without readers.

    Raises:
        ModelError: It contains something that cannot be read.
        UsageError: It is another kind of object, or does not declare its inputs.
    """
    tensorflow, keras = sys.modules.get("tensorflow"), sys.modules.get("keras")
    if tensorflow is not None:
        if isinstance(instance, tensorflow.compat.v1.Session | tensorflow.compat.v1.InteractiveSession):
            return _from_graph(instance.graph, instance, "the session", _variable_readers(instance.graph), outputs)
        if isinstance(instance, tensorflow.Graph):
            return _from_graph(_require_outer_graph(instance), instance, "the tf.Graph", {}, outputs)
        if outputs:
            raise UsageError("A function defines its own outputs. Name outputs only for a tf.Graph or a session.")
        if keras is not None and isinstance(instance, keras.Model):
            from graphquant.formats.tensorflow.keras import trace_keras_model

            function = trace_keras_model(tensorflow, keras, instance)
            return _from_concrete_function(tensorflow, function, "the Keras model")
        if isinstance(instance, tensorflow.types.experimental.ConcreteFunction):
            return _from_concrete_function(tensorflow, instance, "the ConcreteFunction")
        if isinstance(instance, tensorflow.types.experimental.GenericFunction):
            return _from_concrete_function(tensorflow, _single_concrete_function(instance), "the tf.function")
    raise UsageError(
        f"A {type(instance).__name__} is not a model. Give a path, a tf.Graph, a session, a ConcreteFunction or a Keras"
        " model."
    )


def _from_graph(
    graph: Any, instance: Any, description: str, value_tensors: Mapping[str, Any], outputs: Sequence[Any]
) -> Model:
    data = graph.as_graph_def(add_shapes=True).SerializeToString()
    message = proto.parse_binary(data, proto.GraphDef(), source=description)
    if not message.node:
        raise UsageError(f"{description[:1].upper()}{description[1:]} is empty. Build the model in it first.")
    values = {name: partial(_session_value, instance, tensor, name) for name, tensor in value_tensors.items()}
    live = LiveObject(instance=instance, description=description, values=values, value_tensors=value_tensors)
    model = _build_live_model(message, live)
    if outputs:
        _set_outputs(model.main, [str(getattr(output, "name", output)) for output in outputs])
    _ignore_training_ops(model.main)
    return model


def _set_outputs(main: Graph, names: Sequence[str]) -> None:
    """Make the tensors of these names the only outputs of the graph."""
    for label in main.outputs:
        main.remove_op(label)
    main.outputs.clear()
    main.removed_ops.clear()  # these outputs were never nodes
    for name in dict.fromkeys(names):
        op, _, port = name.partition(":")
        port_number = int(port or 0) if not port or port.isdecimal() else -1
        if op not in main or not 0 <= port_number < len(main.op(op).outputs):
            raise UsageError(f"The graph has no tensor {name!r}.{did_you_mean(op, main.nx)}")
        add_output(main, f"@{op}:{port_number}" if port_number else f"@{op}", (op, port_number))


def _ignore_training_ops(main: Graph) -> None:
    """Set the kind of ops that no output depends on to "other": they initialize, train or save."""
    ancestors = set(reachable(main.outputs, main.nx.pred.__getitem__))
    for op in list(main.ops()):
        if op.name not in ancestors and op.kind not in ESSENTIAL_KINDS:
            main.replace_op(replace(op, kind="other"))


def _require_outer_graph(graph: Any) -> Any:
    """Return `graph`; refuse the graph inside a function."""
    if getattr(graph, "building_function", False):
        raise UsageError(
            f"The tf.Graph {getattr(graph, 'name', '')!r} belongs to a function. Give the ConcreteFunction."
        )
    return graph


def _single_concrete_function(function: Any) -> Any:
    """Return the only ConcreteFunction of a tf.function."""
    name = getattr(function, "__name__", "f")
    if getattr(function, "input_signature", None) is not None:
        return function.get_concrete_function()
    traces = function._list_all_concrete_functions()  # noqa: SLF001  # TensorFlow has no public function for this
    if len(traces) != 1:
        count = "was never called" if not traces else f"was traced for {len(traces)} kinds of inputs"
        raise UsageError(
            f"The tf.function {name!r} {count}. Give one ConcreteFunction:"
            f" {name}.get_concrete_function(tf.TensorSpec([None, 28, 28, 1], tf.float32))."
        )
    return traces[0]


# -- sessions --------------------------------------------------------------------------------------


def _variable_readers(graph: Any) -> dict[str, Any]:
    """Return the tensors that read the variables, as far as they exist: nothing is added to the graph."""
    readers_by_name: dict[str, Any] = {}
    for op in graph.get_operations():
        tensor = op.outputs[0] if op.outputs else None
        if op.type == "VarHandleOp" and tensor is not None:
            # A reader with control inputs may give the value after an assignment.
            readers = (op for op in tensor.consumers() if op.type == "ReadVariableOp" and not op.control_inputs)
            tensor = next((reader.outputs[0] for reader in readers), None)
        elif op.type not in VARIABLE_OP_TYPES:
            continue
        if tensor is not None:
            readers_by_name[op.name] = tensor
    return readers_by_name


def _session_value(session: Any, tensor: Any, name: str) -> Array:
    try:
        (value,) = fetch_from_session(session, [tensor])
    except sys.modules["tensorflow"].errors.OpError as error:
        raise ModelError(f"The variable {name!r} has no value in the session. Run its initializer first.") from error
    return value


# -- functions -------------------------------------------------------------------------------------


def _from_concrete_function(tensorflow: Any, concrete: Any, description: str) -> Model:
    """Return the model of a function: a main graph that calls it, and its library."""
    graph = tensorflow.Graph()
    concrete.add_to_graph(graph)
    data = graph.as_graph_def(add_shapes=True).SerializeToString()
    graph_def = proto.parse_binary(data, proto.GraphDef(), source=description)
    names = normalize_function_names(graph_def)
    drop_traced_gradients(graph_def.library)
    meta = proto.MetaGraphDef(graph_def=graph_def)
    name = names[concrete.name.decode() if isinstance(concrete.name, bytes) else concrete.name]
    body = next(function for function in graph_def.library.function if function.signature.name == name)
    return _build_live_model(meta, _add_function_call(meta, body, concrete, description))


def _add_function_call(meta: Any, body: Any, concrete: Any, description: str) -> LiveObject:
    """Add the call of `body`, its arguments and its results to the main graph."""
    nodes, signature = meta.graph_def.node, meta.signature_def["serving_default"]
    captures = list(concrete.captured_inputs)
    argument_count = len(body.signature.input_arg) - len(captures)
    variables = _captured_variables(concrete)
    by_handle = {id(variable.handle): variable for variable in variables}
    unique_name = partial(unique_node_name, {CALL_OP})
    values: dict[str, Callable[[], Any]] = {}
    arguments, foreign_capture = [], ""
    for index, (arg, tensor) in enumerate(zip(body.signature.input_arg, concrete.inputs, strict=True)):
        captured_tensor: Any = captures[index - argument_count] if index >= argument_count else None
        variable = by_handle.get(id(captured_tensor)) if captured_tensor is not None else None
        # Arguments are renamed, so that a bare name always refers to the tensor inside the function.
        name = unique_name(f"serving_default_{arg.name}" if variable is None else variable.name.partition(":")[0])
        shape = (tensor if variable is None else variable).shape
        node = nodes.add(name=name, op="Placeholder")
        if variable is not None:
            node.op = "VarHandleOp"
            node.attr["shared_name"].s = name.encode()
            values[name] = partial(_eager_value, variable)
            # TensorFlow's freezing expects the read of a variable under the name that TensorFlow itself gives it.
            read_name = unique_name(f"{name}/Read/ReadVariableOp")
            variable_read = nodes.add(name=read_name, op="ReadVariableOp", input=[name])
            variable_read.attr["dtype"].type = variable.dtype.as_datatype_enum
        elif hasattr(captured_tensor, "numpy") and proto.dtype_name(arg.type) not in _HANDLE_DTYPES:
            node.op = "Const"
            node.attr["value"].tensor.CopyFrom(encode_tensor(captured_tensor.numpy()))
        elif index < argument_count:
            signature.inputs[arg.name].name = f"{name}:0"
        else:
            foreign_capture = foreign_capture or arg.name
        node.attr["dtype"].type = arg.type if variable is None else variable.dtype.as_datatype_enum
        if node.op != "Const":
            node.attr["shape"].shape.MergeFromString(shape.as_proto().SerializeToString())
        arguments.append(name)
    call = nodes.add(name=CALL_OP, op="StatefulPartitionedCall", input=arguments)
    call.attr["f"].func.name = body.signature.name
    call.attr["Tin"].list.type.extend(arg.type for arg in body.signature.input_arg)
    call.attr["Tout"].list.type.extend(arg.type for arg in body.signature.output_arg)
    for index, arg in enumerate(body.signature.output_arg):
        if proto.dtype_name(arg.type) not in _HANDLE_DTYPES:
            signature.outputs[f"{OUTPUT_PREFIX}{index}"].name = f"{CALL_OP}:{index}"
    return LiveObject(
        instance=concrete, description=description, values=values, variables=variables, foreign_capture=foreign_capture
    )


def _captured_variables(concrete: Any) -> tuple[Any, ...]:
    try:
        return tuple(concrete.graph.variables)
    except AssertionError as error:  # raised by TensorFlow: a function holds no reference to its variables
        raise UsageError(
            f"The variables of the function {concrete.graph.name!r} were deleted. Keep a reference to the object that"
            " owns them."
        ) from error


def _eager_value(variable: Any) -> Array:
    from tensorflow.python.eager.context import eager_mode

    with eager_mode():  # the caller may be building a graph
        return np.asarray(variable.numpy())


# -- graphs and functions --------------------------------------------------------------------------


def _build_live_model(message: Any, live_object: LiveObject) -> Model:
    digest = hashlib.sha256(proto.to_binary(message)).hexdigest()
    source = TensorFlowSource(
        message=message,
        index=0,
        text=False,
        file=Path(live_object.description),
        folder=None,
        digest=digest,
        live_object=live_object,
    )
    model = build_model(source, source.file)
    model.path = None  # `live_object.description` is no file
    for op in list(model.main.ops()):
        if op.kind == "variable":
            model.main.replace_op(replace(op, read_value=live_object.values.get(op.name)))
    return model
