"""Load a TensorFlow model: one graph for the main graph and one for each function of its library.

Tensors have their names in the file: "op:port" in the main graph, "op:output_arg:index" or an argument's bare name in a
function. Function arguments are ops of kind "input" and type "_Arg". Outputs are ops of kind "output" and type
"_Retval", named "@" and their label: the results of a function, the outputs of a signature, or tensors without readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from graphquant.errors import ModelError
from graphquant.formats.tensorflow import ops, proto
from graphquant.formats.tensorflow.learned_ranges import LEARNED_ATTR, stored_initial_values
from graphquant.formats.tensorflow.object_graph import add_saved_functions, get_shared_name
from graphquant.formats.tensorflow.ops import ASSIGN_TYPES, FUNCTION_ATTRS, VARIABLE_OP_TYPES, describe_tf_op
from graphquant.formats.tensorflow.proto import dtype_name
from graphquant.formats.tensorflow.source import ANCHOR_ATTR, RULE_ATTR, TensorFlowSource
from graphquant.formats.tensorflow.values import ConstValue, NodeAttrs, decode_shape
from graphquant.ir import NO_ATTRS, Call, Graph, Model, Op, Output, Shape, TensorRef, paused_gc, reachable

ARGUMENT_TYPE: Final = "_Arg"
RESULT_TYPE: Final = "_Retval"

_SHAPE_PRESERVING_KINDS: Final = frozenset(
    {"identity", "enter", "switch", "read_variable", "next_iteration", "exit", "cast", "qdq"}
)
_LEGACY_SCALARS: Final = 24  # older GraphDef versions write a placeholder of unknown shape as a scalar
_NON_SINK_KINDS: Final = frozenset(
    {"constant", "variable", "read_variable", "input", "switch", "enter", "next_iteration", "loop_cond", "stateful"}
)
_CALLING_KINDS: Final = frozenset({"call", "if", "while", "other", "stateful"})
"""Kinds of nodes whose attributes may name functions. The attributes of all others need no search."""

_DATA_KINDS: Final = frozenset({"input", "random", "stateful"})
_PLACEHOLDER_TYPES: Final = frozenset({"Placeholder", "PlaceholderV2", "PlaceholderWithDefault"})
_NON_RESULT_DTYPES: Final = frozenset({"string", "resource", "variant"})


def build_model(source: TensorFlowSource, path: Path) -> Model:
    """Build the model of a source, for `path`."""
    try:
        with paused_gc():
            return _ModelLoader(source, path).load()
    except ModelError as error:
        if str(source.file) in str(error):
            raise
        raise ModelError(f"{source.file}: {error}") from error


class _ModelLoader:
    """Builds the model of one source."""

    def __init__(self, source: TensorFlowSource, path: Path) -> None:
        self._graph_def = source.graph_def(source.message)
        self._functions = {function.signature.name: function for function in self._graph_def.library.function}
        if len(self._functions) != len(self._graph_def.library.function) or "" in self._functions:
            raise ModelError("Two functions have the same name, or one has none. The model file is damaged.")
        self._meta = meta = source.meta_graph(source.message)
        self._op_table = ops.model_op_table(self._graph_def, meta)
        # Saving and restoring variables is not part of the model's computation.
        saver = meta.saver_def if meta is not None else proto.SaverDef()
        self._saver_ops = {name.partition(":")[0] for name in (saver.save_tensor_name, saver.restore_op_name)}
        self._saver_filename = saver.filename_tensor_name.partition(":")[0]
        self._variables = source.checkpoint()
        self._learned = stored_initial_values(self._graph_def)
        self._model = Model(format="tensorflow", source=source, path=path, digest=source.digest)

    def load(self) -> Model:
        """Return the model."""
        main = self._model.graphs[""] = Graph("", self._model.graphs)
        self._fill_graph(main, self._graph_def.node, TensorNames(self._graph_def.node, self._op_table, {}))
        main.inputs = [op.name for op in main.ops() if op.kind == "input" and op.name != self._saver_filename]
        self._forget_saver_constants(main)
        if self._meta is None or not self._add_signatures(main, self._meta.signature_def):
            _add_sink_outputs(main)
        _mark_identities(main)
        for name, function in self._functions.items():
            build = partial(self._build_function, name, function)
            self._model.graphs[name] = Graph.deferred(name, self._model.graphs, build)
        if self._meta is not None:
            add_saved_functions(self._model, self._meta.object_graph_def, self._variables)
        # This builds the functions that a signature or Python code calls. A plan needs no others, which often are most.
        self._model.graphs_reachable_from((*self._model.entry_graphs, *self._model.saved_functions))
        return self._model

    def _forget_saver_constants(self, main: Graph) -> None:
        """Remove the values of constants that only the saver reads: the checkpoint's contents, in any order."""
        for op in [op for op in main.ops() if op.kind == "constant"]:
            if (readers := set(main.successors(op.name))) and readers <= self._saver_ops:
                main.replace_op(replace(op, read_value=None))

    def _build_function(self, name: str, function: Any, graphs: dict[str, Graph]) -> Graph:
        graph = Graph(name, graphs)
        arguments: dict[str, str | None] = {}
        for index, arg in enumerate(function.signature.input_arg):
            if arg.name in arguments or not arg.name:
                raise ModelError(f"Function {name!r} has the argument {arg.name!r} twice. The model file is damaged.")
            arguments[arg.name] = dtype_name(arg.type)
            output = Output(arg.name, dtype_name(arg.type), _argument_shape(function, index, arg))
            graph.add_op(Op(name=arg.name, kind="input", type=ARGUMENT_TYPE, roles=(), outputs=(output,), source=arg))
        graph.inputs = list(arguments)
        names = TensorNames(function.node_def, self._op_table, arguments, function=name)
        # Results are resolved before the ops are made: a port of an unknown operation exists if something names it.
        results = []
        for arg in function.signature.output_arg:
            if arg.name not in function.ret:
                raise ModelError(
                    f"Function {name!r} has no tensor for its result {arg.name!r}. The model file is damaged."
                )
            results.append((f"@{arg.name}", names.resolve_tensor(function.ret[arg.name], f"the result {arg.name!r}")))
        self._fill_graph(graph, function.node_def, names)
        for label, tensor in results:
            add_output(graph, label, tensor)
        _mark_identities(graph)
        return graph

    def _fill_graph(self, graph: Graph, nodes: Iterable[Any], names: TensorNames) -> None:
        """Add an op for each node, then wire the ops. Loops need all ops before their edges."""
        wiring = []
        for node in nodes:
            reader = f"node {node.name!r}"
            data, control = proto.split_inputs(node)
            tensors = [TensorRef(graph.name, *names.resolve_tensor(text, reader)) for text in data]
            wiring.append((node, tensors, [names.resolve_control(text[1:], reader) for text in control]))
        for node, tensors, _ in wiring:
            # The saver names nodes of the main graph; the same name in a function means another node.
            is_saver = not graph.name and node.name in self._saver_ops
            graph.add_op(self._make_op(node, len(tensors), names, is_saver=is_saver))
        for node, tensors, control_inputs in wiring:
            graph.connect_inputs(node.name, tensors, control_sources=dict.fromkeys(control_inputs))
        _propagate_shapes(graph)

    def _make_op(self, node: Any, inputs: int, names: TensorNames, *, is_saver: bool) -> Op:
        op_info = describe_tf_op(node.op, node.attr, inputs)
        calls = self._function_calls(node, op_info.kind)
        kind = "call" if calls and not calls[0].attr else op_info.kind
        if is_saver:
            calls, kind = (), "stateful"
        shapes = _declared_shapes(node, self._graph_def.versions.producer)
        outputs = tuple(
            Output(names.output_name(node.name, port), dtype, shapes[port] if port < len(shapes) else None)
            for port, (_, _, dtype) in enumerate(names.ports[node.name])
        )
        rule, anchor = (
            node.attr[key].s.decode(errors="replace") if key in node.attr else "" for key in (RULE_ATTR, ANCHOR_ATTR)
        )
        return Op(
            name=node.name,
            kind=kind,
            type=node.op,
            roles=op_info.roles,
            channel_axis=op_info.channel_axis,
            outputs=outputs,
            attrs=NodeAttrs(node.attr, op_info.defaults),
            read_value=self._value_reader(node, kind),
            calls=calls,
            source=node,
            rule=rule,
            anchor=anchor,
        )

    def _value_reader(self, node: Any, kind: str) -> Callable[[], Any] | None:
        if kind == "constant" and node.op == "Const" and "value" in node.attr:
            return ConstValue(node)
        if kind != "variable":
            return None
        reader = self._variables.key_reader(self._variables.checkpoint_key(node))
        return self._learned.get(get_shared_name(node)) if reader is None and LEARNED_ATTR in node.attr else reader

    def _function_calls(self, node: Any, kind: str) -> tuple[Call, ...]:
        """Return the calls of a node, its attributes in alphabetical order."""
        offsets = FUNCTION_ATTRS.get(node.op, {})
        calls = []
        if node.op in self._functions and node.op not in ops.builtin_table():
            calls.append(Call("", node.op, 0))
        for attr, function in proto.function_attrs(node) if kind in _CALLING_KINDS else ():
            if function.name in self._functions:
                calls.append(Call(attr, function.name, *offsets.get(attr, (None, False))))
            elif attr in offsets:
                raise ModelError(f"Node {node.name!r} ({node.op}) calls {function.name!r}, which is not in the model.")
        return tuple(calls)

    def _add_signatures(self, main: Graph, signatures: Mapping[str, Any]) -> bool:
        """Add an output for each tensor that a signature returns; return True if there are any."""
        exposed: set[TensorRef] = set()
        for key in sorted(signatures):
            for label in sorted(signatures[key].outputs):
                tensor = _signature_tensor(main, signatures[key].outputs[label].name, f"{key}/{label}")
                if tensor is not None and tensor not in exposed:
                    exposed.add(tensor)
                    add_output(main, f"@{key}/{label}", (tensor.op, tensor.port), {"tensor": str(tensor)})
        return bool(exposed)


class TensorNames:
    """Tensor names of one graph, as the inputs of its nodes spell them."""

    def __init__(
        self, nodes: Iterable[Any], table: ops.OpTable, arguments: Mapping[str, str | None], function: str = ""
    ) -> None:
        # Output argument, index within it and dtype of each output port, by node.
        self.ports: dict[str, list[tuple[str, int, str | None]]] = {}
        self._arguments = arguments
        self._function = function
        self._undeclared: set[str] = set()
        self._positions: dict[str, dict[tuple[str, int], int]] = {}
        for node in nodes:
            if not node.name or node.name in self.ports or node.name in arguments:
                raise self._damaged(f"two nodes are called {node.name!r}")
            if node.op in table:
                self.ports[node.name] = list(ops.output_ports(node, table))
            else:
                # A custom operation without a definition in the file has the outputs that are read.
                self.ports[node.name] = []
                self._undeclared.add(node.name)

    def resolve_control(self, node_name: str, reader: str) -> str:
        """Return the op that a control input names."""
        if node_name not in self.ports and node_name not in self._arguments:
            raise self._damaged(f"{reader} waits for {node_name!r}, which does not exist")
        return node_name

    def output_name(self, node: str, port: int) -> str:
        """Return the name of output `port` of `node`."""
        if not self._function:
            return f"{node}:{port}"
        arg, index, _ = self.ports[node][port]
        return f"{node}:{arg}:{index}"

    def resolve_tensor(self, tensor_name: str, reader: str) -> tuple[str, int]:
        """Return op and port of the tensor that `reader` calls `tensor_name`."""
        name, _, suffix = tensor_name.partition(":")
        if self._function and not suffix and name in self._arguments:
            return name, 0
        if name not in self.ports:
            raise self._damaged(f"{reader} reads {tensor_name!r}, which does not exist")
        port = self._function_port(name, suffix) if self._function else self._graph_port(name, suffix)
        if port is None:
            raise self._damaged(f"{reader} reads {tensor_name!r}, which {name!r} does not have")
        return name, port

    def _damaged(self, problem: str) -> ModelError:
        graph = f"function {self._function!r}" if self._function else "the graph"
        return ModelError(f"In {graph}, {problem}. The model file is damaged.")

    def _graph_port(self, node: str, suffix: str) -> int | None:
        port, ports = _port_number(suffix), self.ports[node]
        if port is not None and node in self._undeclared:
            ports.extend(("", index, None) for index in range(len(ports), port + 1))
        return port if port is not None and port < len(ports) else None

    def _function_port(self, node: str, suffix: str) -> int | None:
        arg, _, index = suffix.partition(":")
        if node not in self._positions:
            self._positions[node] = {(name, at): port for port, (name, at, _) in enumerate(self.ports[node])}
        positions = self._positions[node]
        if not arg or not (index or "0").isdecimal():
            return None
        key = (arg, int(index or 0))
        if node in self._undeclared and key not in positions:
            positions[key] = len(positions)
            self.ports[node].append((*key, None))
        # Without an index the name means the whole list of tensors.
        return None if not index and (arg, 1) in positions else positions.get(key)


def _declared_shapes(node: Any, producer: int) -> list[Shape | None]:
    attr = node.attr
    if "_output_shapes" in attr and attr["_output_shapes"].list.shape and node.op != "VarHandleOp":
        return [decode_shape(shape) for shape in attr["_output_shapes"].list.shape]
    if node.op == "Const" and "value" in attr:
        return [decode_shape(attr["value"].tensor.tensor_shape)]
    if "shape" in attr and (node.op in VARIABLE_OP_TYPES or node.op in _PLACEHOLDER_TYPES):
        shape = decode_shape(attr["shape"].shape)
        legacy = node.op == "Placeholder" and shape == () and producer < _LEGACY_SCALARS
        return [None if legacy else shape]
    return []


def _argument_shape(function: Any, index: int, arg: Any) -> Shape | None:
    """Return the static shape of a function's argument, or of the variable whose handle it is."""
    if arg.handle_data:
        return decode_shape(arg.handle_data[0].shape)
    attr = function.arg_attr[index].attr if index in function.arg_attr else {}
    if "_output_shapes" in attr and len(attr["_output_shapes"].list.shape) == 1 and dtype_name(arg.type) != "resource":
        return decode_shape(attr["_output_shapes"].list.shape[0])
    return None


def _mark_identities(graph: Graph) -> None:
    """Give each IdentityN of which only the first output is read the kind of Identity, such as that of a SiLU."""
    for op in [op for op in graph.ops() if op.type == "IdentityN"]:
        if set(graph.consumers_by_port(op.name)) <= {0}:
            graph.replace_op(replace(op, kind="identity"))


def _propagate_shapes(graph: Graph) -> None:
    """Copy shapes through ops that keep them. A read of a variable has the variable's shape."""
    visited: set[str] = set()
    chain: list[tuple[Op, TensorRef | None]]
    for start in list(graph.ops()):
        op, chain = start, []
        while (
            op.name not in visited and op.kind in _SHAPE_PRESERVING_KINDS and op.outputs and op.outputs[0].shape is None
        ):
            visited.add(op.name)
            source = next(iter(graph.slots(op.name)), None)
            chain.append((op, source))
            if source is None:
                break
            op = graph.op(source.op)
        for link, source in reversed(chain):
            shape = None if source is None else graph.op(source.op).outputs[source.port].shape
            if shape is not None:
                graph.replace_op(replace(link, outputs=tuple(replace(output, shape=shape) for output in link.outputs)))


def _signature_tensor(main: Graph, name: str, label: str) -> TensorRef | None:
    """Return the tensor that a signature names; None for ops without outputs and for composite tensors."""
    op, _, port = name.partition(":")
    outputs, number = main.op(op).outputs if op in main else (), _port_number(port)
    if not name or (op in main and not outputs and not port):
        return None
    if number is None or number >= len(outputs):
        problem = f"but {op!r} has no such output" if op in main else "which does not exist"
        raise ModelError(f"The signature's output {label!r} is {name!r}, {problem}. The model file is damaged.")
    return TensorRef("", op, number)


def _port_number(text: str) -> int | None:
    """Return the number of a port, 0 for an empty text; None if it is not a number or impossibly large."""
    if text and not (text.isascii() and text.isdigit() and len(text) < 6):  # noqa: PLR2004  # no op has as many ports
        return None
    return int(text or 0)


def add_output(graph: Graph, label: str, tensor: tuple[str, int], attrs: Mapping[str, Any] = NO_ATTRS) -> None:
    """Add an output op `label` that reads the tensor, given as op and port."""
    if label in graph:
        raise ModelError(f"{label!r} is returned twice. The model file is damaged.")
    graph.add_op(Op(name=label, kind="output", type=RESULT_TYPE, attrs=attrs), [TensorRef(graph.name, *tensor)])
    graph.outputs.append(label)


def _add_sink_outputs(graph: Graph) -> None:
    """Add an output for each tensor without readers that a run may return.

    A graph that still trains has other such tensors: parts of gradients, the loss, the state of the optimizer, and
    conditions. They are outputs only if there are no others.
    """
    sinks = []
    for op in graph.ops():
        if op.kind in _NON_SINK_KINDS or op.type in ASSIGN_TYPES or graph.successors(op.name):
            continue
        first_only = op.kind in {"batchnorm", "merge", "exit"}
        for port, output in enumerate(op.outputs[:1] if first_only else op.outputs):
            is_control = op.kind in {"merge", "exit"} and not str(output.dtype).startswith("float")
            if output.dtype not in _NON_RESULT_DTYPES and not is_control:
                sinks.append((op, port))
    scopes, differentiated_ops = _gradient_scopes(graph)
    computed_from_data = set(reachable((op.name for op in graph.ops() if op.kind in _DATA_KINDS), graph.successors))
    results = [
        (op, port)
        for op, port in sinks
        if op.name in computed_from_data - differentiated_ops
        and not op.name.startswith(scopes)
        and not (op.kind == "shape" or _is_condition(graph, op))
    ]
    for op, port in results or sinks:
        add_output(graph, f"@{op.name}" + (f":{port}" if port else ""), (op.name, port))


def _gradient_scopes(graph: Graph) -> tuple[tuple[str, ...], set[str]]:
    """Return the scopes of gradients, and the ops that have gradients: TensorFlow names that of OP "SCOPE/OP_grad"."""
    scopes, names = set(), set()
    for op in graph.ops():
        parts = op.name.split("/")
        for end in [index for index, part in enumerate(parts) if part.endswith("_grad")]:
            suffixes = ("/".join(parts[start : end + 1]).removesuffix("_grad") for start in range(1, end + 1))
            name = next((suffix for suffix in suffixes if suffix in graph), None)
            if name is not None:
                names.add(name)
                scopes.add("/".join(parts[: end + 1]).removesuffix(f"{name}_grad"))
    return tuple(scopes), names


def _is_condition(graph: Graph, op: Op) -> bool:
    """Return True for an Identity of the condition of a `tf.cond`, whose branches may not read it."""
    source = next(iter(graph.slots(op.name)), None) if op.kind == "identity" and op.outputs[0].dtype == "bool" else None
    return source is not None and any(
        graph.op(name).kind == "switch" for name in (source.op, *(use.op for use in graph.consumers(source)))
    )
