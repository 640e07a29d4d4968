"""A `Model` back to what it was made of: a tf.Graph, a session, or a callable with the function's own variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import UsageError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.captures import hand_over
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.keep import tell
from graphquant.formats.tensorflow.learned import INITIALIZER, by_name, learned
from graphquant.formats.tensorflow.live import CALL, GRADIENT, forget_gradients, mentioned
from graphquant.formats.tensorflow.session import _refusals, assign
from graphquant.formats.tensorflow.session import tensorflow as installed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from graphquant.formats.tensorflow.live import Live
    from graphquant.formats.tensorflow.source import Source
    from graphquant.ir import Model

__all__ = ["give_back"]

_CALLS: Final = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_INPUT_SHAPES: Final = "_input_shapes"


def give_back(model: Model) -> Any:
    """What `model` is in TensorFlow, edits included; what was given to `load_live` stays as it is.

    Returns:
        A tf.Graph for a tf.Graph, a GraphDef or a MetaGraphDef, with the collections; for a session a new one, whose
        variables have the same values; for a function a ConcreteFunction of the same signature that reads the same
        variables, and has new ones for learned ranges: `learned_ranges`.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: TensorFlow refuses the model.
        UsageError: It is a SavedModel, or something was inserted around a function instead of in it.
    """
    source: Source = model.source
    if source.live is None and source.form == "SavedModel":
        raise UsageError(
            f"{model.path} is a SavedModel, which is more than a graph. Save the result and give its folder to"
            " tf.saved_model.load."
        )
    tensorflow = installed()
    from tensorflow.python.eager.context import eager_mode

    with _refusals(tensorflow):
        if source.live is not None and source.form == "MetaGraphDef":
            with eager_mode():  # whoever asks may be building a graph, which is no place for the functions
                return _callable(tensorflow, model, source.live)
        graph = _graph(tensorflow, model, source.live)
        if source.live is not None and hasattr(source.live.thing, "run"):
            return _session(tensorflow, graph, source.live, ranges=bool(learned(model)))
        return graph


# -- graphs ----------------------------------------------------------------------------------------


def _graph(tensorflow: Any, model: Model, live: Live | None) -> Any:
    """A new tf.Graph with the collections of the given one."""
    v1 = tensorflow.compat.v1
    message = emit(model)
    graph_def = v1.GraphDef.FromString(proto.to_binary(model.source.graph_def(message)))
    meta = v1.MetaGraphDef()
    if live is not None:
        given = getattr(live.thing, "graph", live.thing)
        with given.as_default():
            meta = v1.train.export_meta_graph(graph=given)
    elif model.source.form == "MetaGraphDef":
        meta = v1.MetaGraphDef.FromString(proto.to_binary(message))
        meta.ClearField("saver_def")
    meta.meta_info_def.ClearField("stripped_op_list")
    meta.graph_def.CopyFrom(graph_def)
    tell(meta, meta.graph_def, learned(model))
    _add_to_frames(meta, model)
    made = tensorflow.Graph()
    with made.as_default():
        functions = _loaded(graph_def.library) if graph_def.library.function else {}
        _call_loaded(meta.graph_def, functions)
        v1.train.import_meta_graph(meta)
    by_name = {function.name: function for function in functions.values()}
    for op in made.get_operations() if by_name else ():
        if op.type in _CALLS:
            called = by_name[op.get_attr("f").name.encode()]
            op._gradient_function = called._get_gradient_function()  # noqa: SLF001  # as TensorFlow's loader does
    return made


def _call_loaded(graph_def: Any, functions: Mapping[str, Any]) -> None:
    """Makes the nodes call functions that know their gradients, under their new names, instead of the library's."""
    names = {old: function.name.decode() for old, function in functions.items()}
    for node in graph_def.node if names else ():
        node.op = names.get(node.op, node.op)
        for func in mentioned(node):
            func.name = names.get(func.name, func.name)
        node.attr.pop(GRADIENT, None)
    graph_def.ClearField("library")


def _add_to_frames(meta: Any, model: Model) -> None:
    """Tells loops and branches of TensorFlow 1 which new ops are theirs: gradients ask for that."""
    from tensorflow.core.protobuf.control_flow_pb2 import CondContextDef, WhileContextDef

    fresh = [op.name for op in model.main.ops() if op.source is None]
    for key, kind in (("while_context", WhileContextDef), ("cond_context", CondContextDef)):
        contexts = meta.collection_def[key].bytes_list.value if key in meta.collection_def else []
        for index, data in enumerate(contexts):
            context = kind.FromString(data)
            inside = {name.partition(":")[0] for name in context.values_def.values}
            for name in fresh:
                sources = model.main.nx.pred[name]
                if any(source in inside for source in sources):
                    inside.add(name)
                    context.values_def.values.extend(
                        f"{name}:{port}" for port in range(len(model.main.op(name).outputs))
                    )
            contexts[index] = context.SerializeToString()


def _session(tensorflow: Any, graph: Any, live: Live, *, ranges: bool) -> Any:
    """A session for `graph` whose variables have their values of the given one, and learned ranges their first."""
    given = live.thing
    made = tensorflow.compat.v1.Session(target=given.sess_str, graph=graph)
    assign(tensorflow, made, live.read())
    if ranges:
        made.run(INITIALIZER)
    return made


# -- functions -------------------------------------------------------------------------------------


def _callable(tensorflow: Any, model: Model, live: Live) -> Any:
    """A ConcreteFunction of the edited function, bound to what the given one captured and to learned ranges."""
    from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

    source: Source = model.source
    graph_def = source.graph_def(emit(model))
    _check_main(graph_def, source.graph_def(source.message))
    needed = hand_over(graph_def, learned(model))
    library = tensorflow.compat.v1.GraphDef.FromString(proto.to_binary(graph_def)).library
    call = next(node for node in graph_def.node if node.name == CALL)
    given, name = live.thing, call.attr["f"].func.name
    attrs = {key: value for one in library.function if one.signature.name == name for key, value in one.attr.items()}
    attrs.pop(_INPUT_SHAPES, None)
    graph = _loaded(library)[name].graph
    ranges = _ranges(tensorflow, model, needed.get(name, []))
    captured = [*given.captured_inputs, *(one.handle for one in ranges)]
    for tensor, inside in zip(captured, graph.inputs[len(graph.inputs) - len(captured) :], strict=True):
        graph.replace_capture(tensor, inside)
    graph.variables = (*live.variables, *ranges)
    graph.structured_input_signature = given.structured_input_signature
    graph.structured_outputs = given.function_type.pack_output(graph.outputs)
    made = ConcreteFunction.from_func_graph(graph, given.function_type, attrs)
    # The flat signature, and captures that are looked up at each call, have no setters.
    made._arg_keywords, made._num_positional_args = given._arg_keywords, given._num_positional_args  # noqa: SLF001
    made.set_external_captures([*given._captured_inputs, *(one.handle for one in ranges)])  # noqa: SLF001
    made._variables_kept = graph.variables  # noqa: SLF001  # a function alone does not keep them alive
    made.learned_ranges = ranges
    return made


def _ranges(tensorflow: Any, model: Model, shared: Iterable[str]) -> list[Any]:
    """New variables for learned ranges."""
    named = by_name(learned(model))
    with tensorflow.init_scope():
        return [tensorflow.Variable(named[one].value, trainable=named[one].trainable, name=one) for one in shared]


def _check_main(graph_def: Any, before: Any) -> None:
    """Refuses what cannot be part of the callable."""
    if list(graph_def.node) != list(before.node):
        new = next((node.name for node in graph_def.node if node not in before.node), CALL)
        raise UsageError(
            f"{new!r} stands between the function and its caller, where nothing can be given back. Quantize what is in"
            " the function."
        )


def _loaded(library: Any) -> dict[str, Any]:
    """The functions of a library by name, registered under names that nothing has yet, with gradients of their own."""
    from tensorflow.python.saved_model.function_deserialization import load_function_def_library

    forget_gradients(library)
    functions: dict[str, Any] = load_function_def_library(library, load_shared_name_suffix="")
    return functions
