"""TensorFlow's own objects to a `Model`: a tf.Graph, a session, a ConcreteFunction, a tf.function, a Keras model.

Whoever has such an object has imported tensorflow; it is looked up among the modules that are there, never imported. A
function becomes a graph that calls it with what it captured: variables are VarHandleOps, tensors constants. Its
functions lose the numbers that tracing gave their names, so that the same code gives the same model.
"""

from __future__ import annotations

import hashlib
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from graphquant.errors import ModelError, UsageError, did_you_mean
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.load import add_result, build
from graphquant.formats.tensorflow.source import Source
from graphquant.formats.tensorflow.values import Array, encode_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from graphquant.ir import Graph, Model

__all__ = ["CALL", "GRADIENT", "Live", "forget_gradients", "load_live", "mentioned", "rename"]

CALL: Final = "StatefulPartitionedCall"
"""The op of the main graph that calls the function."""

OUTPUT: Final = "output_"
"""What the signature calls a function's results, with their position behind it."""

KEPT: Final = frozenset({"constant", "variable", "input", "output", "stateful"})
"""Kinds that say what an op is, whoever needs it."""

_TRACED: Final = re.compile(r"(?:__inference_)?(.+?)(?:_\d+)?")
GRADIENT: Final = "_gradient_op_type"
"""The attribute of a node that names its registered gradient."""

_UNUSED: Final = "___redundant_placeholder"
_COUNT: Final = re.compile(r"_\d+")
_USER_NAME: Final = "_user_specified_name"
"""The attribute of a function's argument that holds what the caller called it, a number for what was captured."""

_CALL_GRADIENT: Final = b"PartitionedCall-"
"""How the registered gradient of a function that was traced starts: that of the function as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The object that a model was made of.

    Attributes:
        thing: What was given: a tf.Graph, a session or a ConcreteFunction.
        what: What it is, for messages.
        values: What reads the present value of a variable, by the node that stands for it.
        tensors: What a session is asked for these values.
        variables: What a function captured, kept alive.
        foreign: The argument for what a function captured that is neither variable nor value, a table; "" for none.
    """

    thing: Any = field(repr=False)
    what: str
    values: Mapping[str, Callable[[], Array]]
    tensors: Mapping[str, Any] = field(default_factory=dict, repr=False)
    variables: tuple[Any, ...] = ()
    foreign: str = ""

    def read(self) -> dict[str, Array]:
        """The present values of all variables that have one.

        Raises:
            ModelError: The session is closed.
        """
        if not self.tensors:
            return {name: value() for name, value in self.values.items()}
        try:
            return dict(zip(self.tensors, _run(self.thing, list(self.tensors.values())), strict=True))
        except sys.modules["tensorflow"].errors.FailedPreconditionError:  # one of them has none
            found: dict[str, Array] = {}
            for name, value in self.values.items():
                with suppress(ModelError):
                    found[name] = value()
            return found


def load_live(thing: Any, outputs: Sequence[Any] = ()) -> Model:
    """The model that a tf.Graph, a session, a ConcreteFunction, a tf.function or a Keras model is.

    Args:
        thing: The object.
        outputs: What a graph is for, tensors or their names; by default all tensors that nobody reads.

    Raises:
        ModelError: It holds what cannot be taken over.
        UsageError: It is something else, or does not say for which inputs.
    """
    tensorflow, keras = sys.modules.get("tensorflow"), sys.modules.get("keras")
    if tensorflow is not None:
        if isinstance(thing, tensorflow.compat.v1.Session | tensorflow.compat.v1.InteractiveSession):
            return _graph(thing.graph, thing, "the session", _readers(thing.graph), outputs)
        if isinstance(thing, tensorflow.Graph):
            return _graph(_outermost(thing), thing, "the tf.Graph", {}, outputs)
        if outputs:
            raise UsageError("A function says itself what it returns. Name outputs for a tf.Graph or a session.")
        if keras is not None and isinstance(thing, keras.Model):
            from graphquant.formats.tensorflow.keras import traced

            return _function(tensorflow, traced(tensorflow, keras, thing), "the Keras model")
        if isinstance(thing, tensorflow.types.experimental.ConcreteFunction):
            return _function(tensorflow, thing, "the ConcreteFunction")
        if isinstance(thing, tensorflow.types.experimental.GenericFunction):
            return _function(tensorflow, _only_trace(thing), "the tf.function")
    raise UsageError(
        f"A {type(thing).__name__} is no model. Give a path, a tf.Graph, a session, a ConcreteFunction or a Keras"
        " model."
    )


def _graph(graph: Any, thing: Any, what: str, tensors: Mapping[str, Any], outputs: Sequence[Any]) -> Model:
    data = graph.as_graph_def(add_shapes=True).SerializeToString()
    message = proto.parse_binary(data, proto.GraphDef(), source=what)
    if not message.node:
        raise UsageError(f"{what[:1].upper()}{what[1:]} is empty. Build the model in it first.")
    values = {name: partial(_value, thing, tensor, name) for name, tensor in tensors.items()}
    model = _built(message, Live(thing=thing, what=what, values=values, tensors=tensors))
    if outputs:
        _name_outputs(model.main, [str(getattr(one, "name", one)) for one in outputs])
    _leave_training(model.main)
    return model


def _name_outputs(main: Graph, names: Sequence[str]) -> None:
    """Makes the tensors of these names the outputs of the graph, and no others."""
    for label in main.outputs:
        main.remove(label)
    main.outputs.clear()
    main.removed.clear()  # these were no nodes
    for name in dict.fromkeys(names):
        op, _, port = name.partition(":")
        number = int(port or 0) if not port or port.isdecimal() else -1
        if op not in main or not 0 <= number < len(main.op(op).outputs):
            raise UsageError(f"The graph has no tensor {name!r}.{did_you_mean(op, main.nx)}")
        add_result(main, f"@{op}:{number}" if number else f"@{op}", (op, number))


def _leave_training(main: Graph) -> None:
    """Takes the kinds from ops that lead to no output: they initialize, train or save, and stay as they are."""
    needed, todo = set(main.outputs), list(main.outputs)
    while todo:
        for source in main.nx.pred[todo.pop()]:
            if source not in needed:
                needed.add(source)
                todo.append(source)
    for op in list(main.ops()):
        if op.name not in needed and op.kind not in KEPT:
            main.replace(replace(op, kind="other"))


def _outermost(graph: Any) -> Any:
    """`graph`, unless it is the inside of a function."""
    if getattr(graph, "building_function", False):
        raise UsageError(
            f"The tf.Graph {getattr(graph, 'name', '')!r} is the inside of a function. Give the ConcreteFunction."
        )
    return graph


def _only_trace(function: Any) -> Any:
    """The one ConcreteFunction of a tf.function."""
    name = getattr(function, "__name__", "f")
    if getattr(function, "input_signature", None) is not None:
        return function.get_concrete_function()
    found = function._list_all_concrete_functions()  # noqa: SLF001  # there is no public way to ask
    if len(found) != 1:
        count = "was never called" if not found else f"was traced for {len(found)} kinds of inputs"
        raise UsageError(
            f"The tf.function {name!r} {count}. Give the one that is meant:"
            f" {name}.get_concrete_function(tf.TensorSpec([None, 28, 28, 1], tf.float32))."
        )
    return found[0]


# -- sessions --------------------------------------------------------------------------------------


def _readers(graph: Any) -> dict[str, Any]:
    """The tensors that are the variables' values, as far as they are there: nothing is added to the graph."""
    found: dict[str, Any] = {}
    for op in graph.get_operations():
        tensor = op.outputs[0] if op.outputs else None
        if op.type == "VarHandleOp" and tensor is not None:
            readers = (one for one in tensor.consumers() if one.type == "ReadVariableOp" and not one.control_inputs)
            tensor = next((one.outputs[0] for one in readers), None)
        elif op.type not in {"VariableV2", "Variable"}:
            continue
        if tensor is not None:
            found[op.name] = tensor
    return found


def _value(session: Any, tensor: Any, name: str) -> Array:
    try:
        (value,) = _run(session, [tensor])
    except sys.modules["tensorflow"].errors.OpError as error:
        raise ModelError(f"The variable {name!r} has no value in the session. Run its initializer first.") from error
    return value


def _run(session: Any, tensors: list[Any]) -> list[Array]:
    try:
        return [np.asarray(value) for value in session.run(tensors)]
    except RuntimeError as error:
        raise ModelError("The session is closed, so its variables have no values. Give an open one.") from error


# -- functions -------------------------------------------------------------------------------------


def _function(tensorflow: Any, concrete: Any, what: str) -> Model:
    """The model of a function: a main graph that calls it, and its library."""
    graph = tensorflow.Graph()
    concrete.add_to_graph(graph)
    data = graph.as_graph_def(add_shapes=True).SerializeToString()
    graph_def = proto.parse_binary(data, proto.GraphDef(), source=what)
    names = rename(graph_def)
    forget_gradients(graph_def.library)
    meta = proto.MetaGraphDef(graph_def=graph_def)
    name = names[concrete.name.decode() if isinstance(concrete.name, bytes) else concrete.name]
    body = next(one for one in graph_def.library.function if one.signature.name == name)
    live = _add_call(meta, body, concrete, what)
    return _built(meta, live)


def _add_call(meta: Any, body: Any, concrete: Any, what: str) -> Live:
    """Adds the call of `body`, its arguments and its results to the main graph."""
    nodes, signature = meta.graph_def.node, meta.signature_def["serving_default"]
    captured = list(concrete.captured_inputs)
    given = len(body.signature.input_arg) - len(captured)
    variables = _variables(concrete)
    by_handle = {id(variable.handle): variable for variable in variables}
    fresh = _Fresh([CALL])
    values: dict[str, Callable[[], Any]] = {}
    arguments, foreign = [], ""
    for index, (arg, tensor) in enumerate(zip(body.signature.input_arg, concrete.inputs, strict=True)):
        bound = captured[index - given] if index >= given else None
        variable = by_handle.get(id(bound)) if bound is not None else None
        # An argument is called otherwise than in the function, whose tensor a name shall find.
        name = fresh(f"serving_default_{arg.name}" if variable is None else variable.name.partition(":")[0])
        shape = (tensor if variable is None else variable).shape
        node = nodes.add(name=name, op="Placeholder")
        if variable is not None:
            node.op = "VarHandleOp"
            node.attr["shared_name"].s = name.encode()
            values[name] = partial(_variable_value, variable)
            # TensorFlow's freezing looks for what reads a variable under the name that TensorFlow gives it.
            read = nodes.add(name=fresh(f"{name}/Read/ReadVariableOp"), op="ReadVariableOp", input=[name])
            read.attr["dtype"].type = variable.dtype.as_datatype_enum
        elif (
            bound is not None and hasattr(bound, "numpy") and proto.dtype_name(arg.type) not in {"resource", "variant"}
        ):
            node.op = "Const"
            node.attr["value"].tensor.CopyFrom(encode_tensor(bound.numpy()))
        elif index < given:
            signature.inputs[arg.name].name = f"{name}:0"
        else:
            foreign = foreign or arg.name
        node.attr["dtype"].type = arg.type if variable is None else variable.dtype.as_datatype_enum
        if node.op != "Const":
            node.attr["shape"].shape.MergeFromString(shape.as_proto().SerializeToString())
        arguments.append(name)
    call = nodes.add(name=CALL, op="StatefulPartitionedCall", input=arguments)
    call.attr["f"].func.name = body.signature.name
    call.attr["Tin"].list.type.extend(arg.type for arg in body.signature.input_arg)
    call.attr["Tout"].list.type.extend(arg.type for arg in body.signature.output_arg)
    for index, arg in enumerate(body.signature.output_arg):
        if proto.dtype_name(arg.type) not in {"resource", "variant"}:
            signature.outputs[f"{OUTPUT}{index}"].name = f"{CALL}:{index}"
    return Live(thing=concrete, what=what, values=values, variables=variables, foreign=foreign)


def _variables(concrete: Any) -> tuple[Any, ...]:
    try:
        return tuple(concrete.graph.variables)
    except AssertionError as error:  # TensorFlow's own: a function does not keep its variables
        raise UsageError(
            f"The variables of the function {concrete.graph.name!r} are gone. Keep the object that owns them."
        ) from error


def _variable_value(variable: Any) -> Array:
    from tensorflow.python.eager.context import eager_mode

    with eager_mode():  # whoever asks may be building a graph
        return np.asarray(variable.numpy())


class _Fresh:
    """Gives each name once."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def __call__(self, name: str) -> str:
        k, new = 0, name
        while new in self._taken:
            k += 1
            new = f"{name}_{k}"
        self._taken.add(new)
        return new


def rename(graph_def: Any) -> dict[str, str]:
    """Takes the numbers of traces out of the functions' names and sorts them; new names by old ones."""
    fresh, names = _Fresh([]), {}
    library = graph_def.library
    for name in sorted((function.signature.name for function in library.function), key=_by_number):
        match = _TRACED.fullmatch(name)
        names[name] = fresh(match[1] if match else name)
    for nodes in (graph_def.node, *(function.node_def for function in library.function)):
        for node in nodes:
            node.op = names.get(node.op, node.op)
            for func in mentioned(node):
                func.name = names.get(func.name, func.name)
    for function in library.function:
        function.signature.name = names[function.signature.name]
        _rename_resources(function)
    for gradient in library.gradient:
        gradient.function_name = names.get(gradient.function_name, gradient.function_name)
        gradient.gradient_func = names.get(gradient.gradient_func, gradient.gradient_func)
    for registered in library.registered_gradients:
        registered.gradient_func = names.get(registered.gradient_func, registered.gradient_func)
    library.function.sort(key=lambda function: str(function.signature.name))
    return names


def _rename_resources(function: Any) -> None:
    """Takes the numbers of tensors out of the names of the resources that a function takes and gives."""
    given, made = function.signature.input_arg, function.signature.output_arg
    fresh = _Fresh([*(node.name for node in function.node_def), *(arg.name for arg in given if not _is_resource(arg))])
    names = {arg.name: fresh(_COUNT.sub("", arg.name)) for arg in given if _is_resource(arg)}
    for index, arg in enumerate(given):
        arg.name = names.get(arg.name, arg.name)
        if index in function.arg_attr and _USER_NAME in function.arg_attr[index].attr:
            del function.arg_attr[index].attr[_USER_NAME]
    for node in function.node_def if names else ():
        for index, text in enumerate(node.input):
            node.input[index] = names.get(text, text)
    results = [function.ret[arg.name] for arg in made]
    function.ret.clear()
    fresh = _Fresh([arg.name for arg in made if not _is_resource(arg)])
    for arg, text in zip(made, results, strict=True):
        arg.name = fresh(_COUNT.sub("", arg.name)) if _is_resource(arg) else arg.name
        function.ret[arg.name] = names.get(text, text)


def _is_resource(arg: Any) -> bool:
    """Whether an argument is a resource, or stands where a loop's condition has no use for one of the body."""
    return proto.dtype_name(arg.type) == "resource" or _UNUSED in arg.name


def forget_gradients(library: Any) -> None:
    """Takes out what leads from calls to the gradients of the functions as they were traced."""
    for function in library.function:
        for node in function.node_def:
            if GRADIENT in node.attr and node.attr[GRADIENT].s.startswith(_CALL_GRADIENT):
                del node.attr[GRADIENT]


def _by_number(name: str) -> tuple[str, int, str]:
    """Sorts functions by their names, those of one name in the order of tracing."""
    base, _, number = name.rpartition("_")
    return (base, int(number), name) if number.isdecimal() else (name, -1, name)


def mentioned(node: Any) -> Iterator[Any]:
    """What a node says of functions that it calls, to be changed in place."""
    for value in node.attr.values():
        kind = value.WhichOneof("value")
        if kind == "func":
            yield value.func
        elif kind == "list":
            yield from value.list.func


# -- both ------------------------------------------------------------------------------------------


def _built(message: Any, live: Live) -> Model:
    digest = hashlib.sha256(proto.to_binary(message)).hexdigest()
    source = Source(message=message, index=0, text=False, file=Path(live.what), folder=None, digest=digest, live=live)
    model = build(source, source.file)
    model.path, model.alive = None, live.what
    for op in list(model.main.ops()):
        if op.kind == "variable":
            model.main.replace(replace(op, value=live.values.get(op.name)))
    return model
