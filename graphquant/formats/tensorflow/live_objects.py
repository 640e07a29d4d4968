"""Read TensorFlow objects (a tf.Graph, a session, a ConcreteFunction, a tf.function, a Keras model) and write them.

A caller that has such an object has imported tensorflow, so reading takes it from `sys.modules` and never imports it. A
function becomes a graph that calls it with its captures: variables as VarHandleOps, tensors as constants. A model of a
function is written as a callable with the variables of the original function.

Tracing numbers functions and resources in the order of the process. These numbers are removed from the names, so that
the same code gives the same model.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from graphquant.errors import ModelError, UsageError, did_you_mean
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.function_names import (
    GRADIENT_ATTR,
    drop_traced_gradients,
    normalize_function_names,
    rename_functions,
)
from graphquant.formats.tensorflow.learned_ranges import (
    INITIALIZER_OP,
    by_shared_name,
    capture_in_functions,
    learned_ranges,
    unique_node_name,
)
from graphquant.formats.tensorflow.load import add_output, build_model
from graphquant.formats.tensorflow.ops import VARIABLE_OP_TYPES
from graphquant.formats.tensorflow.save import add_to_collections, update_control_flow_contexts
from graphquant.formats.tensorflow.session import assign_variables, import_tensorflow, translate_tf_errors
from graphquant.formats.tensorflow.source import LiveObject, TensorFlowSource, fetch_from_session
from graphquant.formats.tensorflow.values import encode_tensor
from graphquant.ir import Graph, Model, reachable

if TYPE_CHECKING:
    from graphquant.numerics import Array

_CALL_OP: Final = "StatefulPartitionedCall"  # the op of the main graph that calls the function
_ESSENTIAL_KINDS: Final = frozenset({"constant", "variable", "input", "output", "stateful"})
"""Kinds that an op keeps even if no output depends on it."""

_HANDLE_DTYPES: Final = frozenset({"resource", "variant"})


def from_tensorflow(instance: Any, outputs: Sequence[Any] = ()) -> Model:
    """Read the model of a tf.Graph, a session, a ConcreteFunction, a tf.function or a Keras model.

    Args:
        instance: The object.
        outputs: The outputs of a graph, tensors or their names; by default all tensors without readers.

    Raises a ModelError if it contains something that cannot be read, and a UsageError if it is another kind of object,
    or does not declare its inputs.
    """
    tensorflow, keras = sys.modules.get("tensorflow"), sys.modules.get("keras")
    if tensorflow is not None:
        if isinstance(instance, tensorflow.compat.v1.Session | tensorflow.compat.v1.InteractiveSession):
            return _from_graph(instance.graph, instance, "the session", _variable_readers(instance.graph), outputs)
        if isinstance(instance, tensorflow.Graph):
            if getattr(instance, "building_function", False):
                raise UsageError(
                    f"The tf.Graph {getattr(instance, 'name', '')!r} belongs to a function. Give the ConcreteFunction."
                )
            return _from_graph(instance, instance, "the tf.Graph", {}, outputs)
        if outputs:
            raise UsageError("A function defines its own outputs. Name outputs only for a tf.Graph or a session.")
        if keras is not None and isinstance(instance, keras.Model):
            from graphquant.formats.tensorflow.keras import trace_keras_model

            function = trace_keras_model(tensorflow, keras, instance)
            return _from_concrete_function(tensorflow, function, "the Keras model")
        tf_keras = sys.modules.get("tf_keras")
        if tf_keras is not None and isinstance(instance, tf_keras.Model):
            from graphquant.formats.tensorflow.keras import trace_tf_keras_model

            return _from_concrete_function(tensorflow, trace_tf_keras_model(tensorflow, instance), "the Keras model")
        if isinstance(instance, tensorflow.types.experimental.ConcreteFunction):
            return _from_concrete_function(tensorflow, instance, "the ConcreteFunction")
        if isinstance(instance, tensorflow.types.experimental.GenericFunction):
            return _from_concrete_function(tensorflow, _single_concrete_function(instance), "the tf.function")
    raise UsageError(
        f"A {type(instance).__name__} is not a model. Give a path, an onnx.ModelProto, a tf.Graph, a session, a"
        " ConcreteFunction or a Keras model."
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
    # Ops that no output depends on initialize, train or save.
    ancestors = set(reachable(model.main.outputs, model.main.predecessors))
    for op in list(model.main.ops()):
        if op.name not in ancestors and op.kind not in _ESSENTIAL_KINDS:
            model.main.replace_op(replace(op, kind="other"))
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
            raise UsageError(f"The graph has no tensor {name!r}.{did_you_mean(op, [op.name for op in main.ops()])}")
        add_output(main, f"@{op}:{port_number}" if port_number else f"@{op}", (op, port_number))


def _single_concrete_function(function: Any) -> Any:
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
    try:
        variables = tuple(concrete.graph.variables)
    except AssertionError as error:  # raised by TensorFlow: a function holds no reference to its variables
        raise UsageError(
            f"The variables of the function {concrete.graph.name!r} were deleted. Keep a reference to the object that"
            " owns them."
        ) from error
    by_handle = {id(variable.handle): variable for variable in variables}
    unique_name = partial(unique_node_name, {_CALL_OP})
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
    call = nodes.add(name=_CALL_OP, op="StatefulPartitionedCall", input=arguments)
    call.attr["f"].func.name = body.signature.name
    call.attr["Tin"].list.type.extend(arg.type for arg in body.signature.input_arg)
    call.attr["Tout"].list.type.extend(arg.type for arg in body.signature.output_arg)
    for index, arg in enumerate(body.signature.output_arg):
        if proto.dtype_name(arg.type) not in _HANDLE_DTYPES:
            signature.outputs[f"output_{index}"].name = f"{_CALL_OP}:{index}"
    return LiveObject(
        instance=concrete, description=description, values=values, variables=variables, foreign_capture=foreign_capture
    )


def _eager_value(variable: Any) -> Array:
    from tensorflow.python.eager.context import eager_mode

    with eager_mode():  # the caller may be building a graph
        return np.asarray(variable.numpy())


def _build_live_model(message: Any, live_object: LiveObject) -> Model:
    source = TensorFlowSource(
        message=message,
        file=Path(live_object.description),
        digest=hashlib.sha256(proto.to_binary(message)).hexdigest(),
        live_object=live_object,
    )
    model = build_model(source, source.file)
    model.path = None  # `live_object.description` is no file
    for op in list(model.main.ops()):
        if op.kind == "variable":
            model.main.replace_op(replace(op, read_value=live_object.values.get(op.name)))
    return model


def to_tensorflow(model: Model) -> Any:
    """Return `model` as a TensorFlow object, edits included. The original object is not changed.

    Returns:
        A tf.Graph with the collections for a tf.Graph, a GraphDef or a MetaGraphDef. For a session, a new session whose
        variables have the same values. For a function, a ConcreteFunction with the same signature that shares the
        variables; its `learned_ranges` are new variables.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: TensorFlow refuses the model.
        UsageError: It is a SavedModel, or an op was inserted around a function instead of inside it.
    """
    source: TensorFlowSource = model.source
    live_object = source.live_object
    if live_object is None and source.message_type == "SavedModel":
        raise UsageError(
            f"{model.path} is a SavedModel, and a tf.Graph cannot hold all of it. Save the result and pass its folder"
            " to tf.saved_model.load."
        )
    tensorflow = import_tensorflow()
    from tensorflow.python.eager.context import eager_mode

    with translate_tf_errors(tensorflow):
        if live_object is not None and source.message_type == "MetaGraphDef":
            with eager_mode():  # the caller may be building a graph, which must not receive the functions
                return _to_concrete_function(tensorflow, model, live_object)
        graph = _to_graph(tensorflow, model, live_object)
        if live_object is None or not hasattr(live_object.instance, "run"):
            return graph
        new_session = tensorflow.compat.v1.Session(target=live_object.instance.sess_str, graph=graph)
        assign_variables(tensorflow, new_session, live_object.current_values())
        if learned_ranges(model):
            new_session.run(INITIALIZER_OP)
        return new_session


def _to_graph(tensorflow: Any, model: Model, live_object: LiveObject | None) -> Any:
    """Return a new tf.Graph with the collections of the original one."""
    v1 = tensorflow.compat.v1
    message = emit(model)
    graph_def = v1.GraphDef.FromString(proto.to_binary(model.source.graph_def(message)))
    meta = v1.MetaGraphDef()
    if live_object is not None:
        source_graph = getattr(live_object.instance, "graph", live_object.instance)
        with source_graph.as_default():
            meta = v1.train.export_meta_graph(graph=source_graph)
    elif model.source.message_type == "MetaGraphDef":
        meta = v1.MetaGraphDef.FromString(proto.to_binary(message))
        meta.ClearField("saver_def")
    meta.meta_info_def.ClearField("stripped_op_list")
    meta.graph_def.CopyFrom(graph_def)
    add_to_collections(meta, learned_ranges(model))
    update_control_flow_contexts(meta, model.source.graph_def(model.source.message))
    new_graph = tensorflow.Graph()
    with new_graph.as_default():
        functions = _load_functions(graph_def.library) if graph_def.library.function else {}
        if functions:  # nodes call the loaded functions, which have gradients, under their new names
            rename_functions(meta.graph_def.node, {old: loaded.name.decode() for old, loaded in functions.items()})
            for node in meta.graph_def.node:
                node.attr.pop(GRADIENT_ATTR, None)
        meta.graph_def.ClearField("library")
        v1.train.import_meta_graph(meta)
    functions_by_name = {function.name: function for function in functions.values()}
    for op in new_graph.get_operations() if functions else ():
        if op.type in {"PartitionedCall", "StatefulPartitionedCall"}:
            callee = functions_by_name[op.get_attr("f").name.encode()]
            op._gradient_function = callee._get_gradient_function()  # noqa: SLF001  # as TensorFlow's loader does
    return new_graph


def _to_concrete_function(tensorflow: Any, model: Model, live_object: LiveObject) -> Any:
    """Return a ConcreteFunction of the edited function, bound to the original captures and to learned ranges."""
    from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

    graph_def, source_graph_def = model.source.graph_def(emit(model)), model.source.graph_def(model.source.message)
    if list(graph_def.node) != list(source_graph_def.node):
        unexpected = next((node.name for node in graph_def.node if node not in source_graph_def.node), _CALL_OP)
        raise UsageError(
            f"{unexpected!r} is between the function and its caller, and a callable cannot contain it. Quantize ops"
            " inside the function only."
        )
    variables = learned_ranges(model)
    by_shared, captures = by_shared_name(variables), capture_in_functions(graph_def, variables)
    library = tensorflow.compat.v1.GraphDef.FromString(proto.to_binary(graph_def)).library
    name = next(node for node in graph_def.node if node.name == _CALL_OP).attr["f"].func.name
    source_function = live_object.instance
    attrs = dict(next(function for function in library.function if function.signature.name == name).attr)
    attrs.pop("_input_shapes", None)
    graph = _load_functions(library)[name].graph
    with tensorflow.init_scope():
        ranges = [
            tensorflow.Variable(by_shared[key].value, trainable=by_shared[key].trainable, name=key)
            for key in captures.get(name, [])
        ]
    range_handles = [variable.handle for variable in ranges]
    captured_tensors = [*source_function.captured_inputs, *range_handles]
    placeholders = graph.inputs[len(graph.inputs) - len(captured_tensors) :]
    for tensor, placeholder in zip(captured_tensors, placeholders, strict=True):
        graph.replace_capture(tensor, placeholder)
    graph.variables = (*live_object.variables, *ranges)
    graph.structured_input_signature = source_function.structured_input_signature
    graph.structured_outputs = source_function.function_type.pack_output(graph.outputs)
    concrete = ConcreteFunction.from_func_graph(graph, source_function.function_type, attrs)
    # The flat signature, and captures that are looked up at each call, have no public setters.
    concrete._arg_keywords = source_function._arg_keywords  # noqa: SLF001
    concrete._num_positional_args = source_function._num_positional_args  # noqa: SLF001
    concrete.set_external_captures([*source_function._captured_inputs, *range_handles])  # noqa: SLF001
    concrete._variables_kept = graph.variables  # noqa: SLF001  # the function itself holds no reference to them
    concrete.learned_ranges = ranges
    return concrete


def _load_functions(library: Any) -> dict[str, Any]:
    """Load the functions of a library, by name. They get new unique names and gradients of their own."""
    from tensorflow.python.saved_model.function_deserialization import load_function_def_library

    drop_traced_gradients(library)
    functions: dict[str, Any] = load_function_def_library(library, load_shared_name_suffix="")
    return functions
