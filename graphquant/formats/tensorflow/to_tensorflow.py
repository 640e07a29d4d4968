"""Turn a `Model` back into a tf.Graph, a session, or a callable with the variables of its original function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import UsageError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.from_tensorflow import CALL_OP
from graphquant.formats.tensorflow.function_names import GRADIENT_ATTR, drop_traced_gradients, rename_functions
from graphquant.formats.tensorflow.learned_ranges import (
    INITIALIZER_OP,
    by_shared_name,
    capture_in_functions,
    learned_ranges,
)
from graphquant.formats.tensorflow.save import add_to_collections
from graphquant.formats.tensorflow.session import assign_variables, import_tensorflow, translate_tf_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from graphquant.formats.tensorflow.source import LiveObject, TensorFlowSource
    from graphquant.ir import Model


_CALL_TYPES: Final = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_INPUT_SHAPES: Final = "_input_shapes"


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
        if live_object is not None and hasattr(live_object.instance, "run"):
            return _to_session(tensorflow, graph, live_object, ranges=bool(learned_ranges(model)))
        return graph


# -- graphs ----------------------------------------------------------------------------------------


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
    add_to_collections(meta, meta.graph_def, learned_ranges(model))
    _add_to_control_flow_contexts(meta, model)
    new_graph = tensorflow.Graph()
    with new_graph.as_default():
        functions = _load_functions(graph_def.library) if graph_def.library.function else {}
        _call_loaded_functions(meta.graph_def, functions)
        v1.train.import_meta_graph(meta)
    functions_by_name = {function.name: function for function in functions.values()}
    for op in new_graph.get_operations() if functions_by_name else ():
        if op.type in _CALL_TYPES:
            callee = functions_by_name[op.get_attr("f").name.encode()]
            op._gradient_function = callee._get_gradient_function()  # noqa: SLF001  # as TensorFlow's loader does
    return new_graph


def _call_loaded_functions(graph_def: Any, functions: Mapping[str, Any]) -> None:
    """Let nodes call the loaded functions, which have gradients, under their new names."""
    names = {old: function.name.decode() for old, function in functions.items()}
    rename_functions(graph_def.node if names else (), names)
    for node in graph_def.node if names else ():
        node.attr.pop(GRADIENT_ATTR, None)
    graph_def.ClearField("library")


def _add_to_control_flow_contexts(meta: Any, model: Model) -> None:
    """Add new ops to the loop and branch contexts of TensorFlow 1, which gradients depend on."""
    from tensorflow.core.protobuf.control_flow_pb2 import CondContextDef, WhileContextDef

    new_ops = [op.name for op in model.main.ops() if op.source is None]
    for key, kind in (("while_context", WhileContextDef), ("cond_context", CondContextDef)):
        contexts = meta.collection_def[key].bytes_list.value if key in meta.collection_def else []
        for index, data in enumerate(contexts):
            context = kind.FromString(data)
            member_ops = {name.partition(":")[0] for name in context.values_def.values}
            for name in new_ops:
                if any(source in member_ops for source in model.main.nx.pred[name]):
                    member_ops.add(name)
                    ports = range(len(model.main.op(name).outputs))
                    context.values_def.values.extend(f"{name}:{port}" for port in ports)
            contexts[index] = context.SerializeToString()


def _to_session(tensorflow: Any, graph: Any, live_object: LiveObject, *, ranges: bool) -> Any:
    """Return a session for `graph` with the variable values of the original session. Learned ranges are initialized."""
    source_session = live_object.instance
    new_session = tensorflow.compat.v1.Session(target=source_session.sess_str, graph=graph)
    assign_variables(tensorflow, new_session, live_object.current_values())
    if ranges:
        new_session.run(INITIALIZER_OP)
    return new_session


# -- functions -------------------------------------------------------------------------------------


def _to_concrete_function(tensorflow: Any, model: Model, live_object: LiveObject) -> Any:
    """Return a ConcreteFunction of the edited function, bound to the original captures and to learned ranges."""
    from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

    source: TensorFlowSource = model.source
    graph_def = source.graph_def(emit(model))
    _require_main_unchanged(graph_def, source.graph_def(source.message))
    captures = capture_in_functions(graph_def, learned_ranges(model))
    library = tensorflow.compat.v1.GraphDef.FromString(proto.to_binary(graph_def)).library
    call = next(node for node in graph_def.node if node.name == CALL_OP)
    source_function, name = live_object.instance, call.attr["f"].func.name
    attrs = {
        key: value
        for function in library.function
        if function.signature.name == name
        for key, value in function.attr.items()
    }
    attrs.pop(_INPUT_SHAPES, None)
    graph = _load_functions(library)[name].graph
    ranges = _create_range_variables(tensorflow, model, captures.get(name, []))
    captured_tensors = [*source_function.captured_inputs, *(variable.handle for variable in ranges)]
    for tensor, placeholder in zip(
        captured_tensors, graph.inputs[len(graph.inputs) - len(captured_tensors) :], strict=True
    ):
        graph.replace_capture(tensor, placeholder)
    graph.variables = (*live_object.variables, *ranges)
    graph.structured_input_signature = source_function.structured_input_signature
    graph.structured_outputs = source_function.function_type.pack_output(graph.outputs)
    concrete = ConcreteFunction.from_func_graph(graph, source_function.function_type, attrs)
    # The flat signature, and captures that are looked up at each call, have no public setters.
    concrete._arg_keywords = source_function._arg_keywords  # noqa: SLF001
    concrete._num_positional_args = source_function._num_positional_args  # noqa: SLF001
    captured_inputs = source_function._captured_inputs  # noqa: SLF001
    concrete.set_external_captures([*captured_inputs, *(variable.handle for variable in ranges)])
    concrete._variables_kept = graph.variables  # noqa: SLF001  # the function itself holds no reference to them
    concrete.learned_ranges = ranges
    return concrete


def _create_range_variables(tensorflow: Any, model: Model, shared_names: Iterable[str]) -> list[Any]:
    """Create variables for learned ranges."""
    by_shared = by_shared_name(learned_ranges(model))
    with tensorflow.init_scope():
        return [
            tensorflow.Variable(
                by_shared[shared_name].value, trainable=by_shared[shared_name].trainable, name=shared_name
            )
            for shared_name in shared_names
        ]


def _require_main_unchanged(graph_def: Any, source_graph_def: Any) -> None:
    """Refuse changes outside the function, which a callable cannot hold."""
    if list(graph_def.node) != list(source_graph_def.node):
        unexpected = next((node.name for node in graph_def.node if node not in source_graph_def.node), CALL_OP)
        raise UsageError(
            f"{unexpected!r} is between the function and its caller, and a callable cannot contain it. Quantize ops"
            " inside the function only."
        )


def _load_functions(library: Any) -> dict[str, Any]:
    """Load the functions of a library, by name. They get new unique names and gradients of their own."""
    from tensorflow.python.saved_model.function_deserialization import load_function_def_library

    drop_traced_gradients(library)
    functions: dict[str, Any] = load_function_def_library(library, load_shared_name_suffix="")
    return functions
