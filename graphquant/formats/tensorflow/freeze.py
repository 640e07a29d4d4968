"""Freeze a model into one graph of ops and constants, with the tensor names of its signatures."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import ModelError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.function_names import rename_functions
from graphquant.formats.tensorflow.learned_ranges import LEARNED_ATTR, unique_node_name
from graphquant.formats.tensorflow.load import build_model
from graphquant.formats.tensorflow.ops import builtin_table
from graphquant.formats.tensorflow.runner import run_inputs, served_signatures
from graphquant.formats.tensorflow.session import (
    TensorFlowSession,
    find_state_variables,
    import_tensorflow,
    silence_stderr,
    translate_tf_errors,
)
from graphquant.formats.tensorflow.source import FrozenSignature, TensorFlowSource
from graphquant.formats.tensorflow.values import decode_tensor, set_constant
from graphquant.ir import (
    FLOAT_TYPES,
    STORED_KINDS,
    Model,
    Parameters,
    TensorRef,
    connected_groups,
    follow_to_end,
    fully_known_shape,
    reachable,
)
from graphquant.ir.parameters import MAX_FOLDED_ELEMENTS

if TYPE_CHECKING:
    from graphquant.numerics import Array

_CALL_PREFIX: Final = re.compile(r"^(?:Func/)?(?:(?:Stateful)?PartitionedCall(?:_\d+)?/)+")
"""The prefix that inlining puts before the names of a function's ops."""

_INLINER_IDENTITY: Final = re.compile(
    r"^Func/.*/(?:input|output)/_\d+$|(?:^|/)(?:Stateful)?PartitionedCall(?:_\d+)?/Identity(?:_\d+)?$"
)
"""The names that Identity ops for arguments and results of functions have after inlining."""

_VARIABLE_LOOKUPS: Final = {"ResourceGather": "Gather", "ResourceGatherNd": "GatherNd"}
"""Ops that read a variable without a ReadVariableOp, and the same ops on its value."""

_LOOP_KINDS: Final = frozenset({"enter", "switch", "merge"})


def freeze_graph(model: Model) -> Model:
    """Return `model` as a GraphDef with constants for variables, inlined functions, and inferred shapes.

    Inputs and outputs have the names of the signature; ops keep their names within the function. Constants that only
    TensorFlow can compute, such as a MatrixDiag, are computed.
    """
    source: TensorFlowSource = model.source
    tensorflow = import_tensorflow()
    with translate_tf_errors(tensorflow), silence_stderr():
        values = source.live_object.values if source.live_object else {}
        learned = any(op.kind == "variable" and LEARNED_ATTR in op.attrs for op in model.main.ops())
        if source.message_type == "GraphDef" and len(model.graphs) == 1 and not values and not learned:
            graph_def, signatures = emit(model), source.signatures
        else:
            graph_def, signatures = _freeze_signatures(tensorflow, model)
        _use_defaults(model, graph_def, signatures)
        _write_inferred_shapes(tensorflow, graph_def)

    def build(graph_def: Any) -> Model:
        digest = hashlib.sha256(proto.to_binary(graph_def)).hexdigest()
        frozen = TensorFlowSource(message=graph_def, file=source.file, digest=digest, signatures=signatures)
        return build_model(frozen, model.path or source.file)

    frozen_model = build(graph_def)
    while (resolved := _without_dead_branches(frozen_model, graph_def)) is not None:
        graph_def, frozen_model = resolved, build(resolved)
    if computed := _unknown_constants(frozen_model):
        frozen_model = build(with_constants(graph_def, computed, {}))
    frozen_model.path = model.path
    return frozen_model


def _use_defaults(model: Model, graph_def: Any, signatures: Sequence[FrozenSignature]) -> None:
    """Let readers of placeholders with a default read the default: those that no signature has, or truth values.

    A model of TensorFlow 1 asks such a placeholder whether it is being trained.
    """
    optional = [node for node in graph_def.node if node.op == "PlaceholderWithDefault"]
    meta = model.source.meta_graph(emit(model)) if optional else None
    definitions = meta.signature_def.values() if meta is not None else ()
    named = {info.name.partition(":")[0] for definition in definitions for info in definition.inputs.values()}
    named |= {name for signature in signatures for name in signature.inputs.values()}
    for node in optional:
        is_flag = proto.dtype_name(node.attr["dtype"].type) == "bool" and not node.attr["shape"].shape.dim
        if node.name not in named and (signatures or is_flag):
            node.op = "Identity"
            node.attr["T"].type = node.attr["dtype"].type
            for name in ("dtype", "shape"):
                node.attr.pop(name, None)


def _without_dead_branches(model: Model, graph_def: Any) -> Any:
    """Return the graph without the dead branches of known conditions, None if there are none."""
    main, conditions = model.main, _known_conditions(model)
    changed = with_constants(graph_def, sorted({*conditions.values()}), {}) if conditions else graph_def
    nodes = {node.name: node for node in changed.node}
    chosen = {
        switch: int(decode_tensor(nodes[name].attr["value"].tensor, name).item())
        for switch, name in conditions.items()
        if switch in nodes
    }
    fetched = [name.partition(":")[0] for entry in model.source.signatures for name in entry.outputs.values()]
    fetched = fetched or [slot.op for name in main.outputs for slot in main.slots(name) if slot is not None]
    if not chosen or not _resolve(changed, chosen, fetched):
        return None
    _bypass_identities(changed, {op.name for op in main.ops() if op.kind in {"switch", "merge"}}, fetched)
    return _pruned(changed, fetched)


def _known_conditions(model: Model) -> dict[str, str]:
    """Return for each Switch with a known condition the op that computes it.

    A condition in a loop, or in a branch of another one, has the value that is passed on into it.
    """
    parameters, main = Parameters(model), model.main

    def copied(tensor: TensorRef) -> TensorRef | None:
        return main.slots(tensor.op)[0] if main.op(tensor.op).type in {"Identity", "Switch", "NextIteration"} else None

    def passed_on(tensor: TensorRef) -> TensorRef | None:
        """Return the tensor whose value an op passes on, also into a branch or loop, or unchanged to each iteration."""
        first, *others = main.slots(tensor.op) or [None]
        is_invariant = main.op(tensor.op).kind == "merge" and all(
            other is not None and follow_to_end(other, copied).op == tensor.op for other in others
        )
        return first if is_invariant or main.op(tensor.op).type == "Enter" else copied(tensor)

    conditions: dict[str, str] = {}
    for op in main.ops():
        condition = main.slots(op.name)[1] if op.kind == "switch" else None
        source = None if condition is None else follow_to_end(condition, passed_on)
        if source is not None and parameters.is_parameter(source):
            conditions[op.name] = source.op
    unconditional = _unconditional(model, {*conditions.values()})
    return {switch: name for switch, name in conditions.items() if name in unconditional}


def _bypass_identities(graph_def: Any, conditional: set[str], fetched: Collection[str]) -> None:
    """Let readers of resolved Switches and Merges, and of Identities beside them, read the tensor that these pass on.

    The Identities would separate a layer from its BatchNorm and activation.
    """
    _drop_controls_of_constants(graph_def)
    identities: dict[str, str] = {}
    for node in graph_def.node:
        if node.op == "Identity" and len(node.input) == 1 and node.name not in fetched:
            identities[node.name] = node.input[0]
    edges = [(name, source) for name, source in identities.items() if source in identities]
    groups = connected_groups(identities, edges)
    bypassed = {name: identities[name] for group in groups if conditional & {*group} for name in group}
    for node in graph_def.node:
        # A control input on the Identity of one output of a Switch would become one on the Switch, which always runs.
        node.input[:] = [text if text[:1] == "^" else _rename_input(text, bypassed, {}) for text in node.input]


def _drop_controls_of_constants(graph_def: Any) -> None:
    """Remove control inputs on ops that wait for nothing but constants."""
    inputs = {node.name: [proto.input_node(text) for text in node.input] for node in graph_def.node}
    readers: dict[str, list[str]] = defaultdict(list)
    for name, sources in inputs.items():
        for source in sources:
            readers[source].append(name)
    others = [node.name for node in graph_def.node if node.op not in {"Const", "Identity", "NoOp"}]
    waiting = set(reachable(others, lambda name: readers.get(name, ())))
    for node in graph_def.node:
        node.input[:] = [text for text in node.input if text[:1] != "^" or text[1:] in waiting]


def _resolve(graph_def: Any, chosen: Mapping[str, int], fetched: Collection[str]) -> bool:
    """Replace the Switches in `chosen`, and Merges of a single value, by Identities. Nodes that never run are left.

    `chosen` has the output of each Switch that has values. Returns False, without a change, if a node of `fetched`
    never runs, or the number of the value that a Merge takes is read.
    """
    live = _live_inputs(graph_def, chosen)
    merges = [
        node for node in graph_def.node if node.op == "Merge" and len(live.get(node.name, node.input)) < len(node.input)
    ]
    read = {text for name in live for text in live[name]}
    if not live.keys() >= {*fetched} or any(f"{node.name}:1" in read for node in merges):
        return False
    for node in merges:
        node.input[:] = live[node.name]
        node.attr["N"].i = count = sum(text[:1] != "^" for text in node.input)
        if count == 1:
            node.op = "Identity"
            node.attr.pop("N")
    for node in graph_def.node:
        if node.name in chosen:
            node.op = "Identity"
            del node.input[1]
        node.attr.pop("_class", None)  # it may name a node that is removed
        node.input[:] = [text.partition(":")[0] if text.partition(":")[0] in chosen else text for text in node.input]
    return True


def _live_inputs(graph_def: Any, chosen: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the inputs with values of each node that runs. `chosen` has the output of each Switch that has values.

    A loop runs only if values enter it: its Merges do not run because of their own next iteration.
    """
    live: dict[str, list[str]] = {}

    def has_values(text: str) -> bool:
        name, _, port = text.removeprefix("^").partition(":")
        return name in live and (text[:1] == "^" or chosen.get(name, int(port or 0)) == int(port or 0))

    readers: dict[str, list[Any]] = {}
    for node in graph_def.node:
        for name in map(proto.input_node, node.input):
            readers.setdefault(name, []).append(node)
    pending = list(graph_def.node)
    while pending:
        node = pending.pop()
        if node.name not in live:
            data = [text for text in node.input if text[:1] != "^"]
            controls = node.input[len(data) :]
            needed = any if node.op == "Merge" else all
            if all(map(has_values, controls)) and needed(map(has_values, data)):
                live[node.name] = []
                pending += readers.get(node.name, ())
    return {node.name: [*filter(has_values, node.input)] for node in graph_def.node if node.name in live}


def _unconditional(model: Model, names: Collection[str]) -> set[str]:
    """Return the ops that run in each run of the model: no branch or loop of TensorFlow 1 computes or controls them."""
    main, inputs = model.main, {node.name: node.input for node in emit(model).node} if names else {}

    def is_unconditional(source: str) -> bool:
        return main.op(source).kind not in _LOOP_KINDS and not any(text[:1] == "^" for text in inputs.get(source, ()))

    return {name for name in names if all(map(is_unconditional, reachable([name], main.predecessors)))}


def _unknown_constants(model: Model) -> list[str]:
    """Return the ops of a frozen model that compute float constants whose values are unknown, and which other ops read.

    A plan has no ranges for such constants, and TFLite's converter gives them ranges of its own, with a zero point that
    its runtime ignores in products. Ops in loops of TensorFlow 1, which depend on control inputs, are left out.
    """
    parameters, main, names = Parameters(model), model.main, []
    for op in main.ops():
        tensor = TensorRef("", op.name)
        if op.kind in STORED_KINDS or not parameters.is_parameter(tensor) or len(op.outputs) != 1:
            continue
        sizes = fully_known_shape(op.outputs[0].shape)
        is_small = sizes is not None and math.prod(sizes) <= MAX_FOLDED_ELEMENTS
        is_read = any(not parameters.is_parameter(TensorRef("", use.op)) for use in main.consumers(tensor))
        is_candidate = op.outputs[0].dtype in FLOAT_TYPES and is_small and is_read
        if is_candidate and parameters.value(tensor) is None:
            names.append(op.name)
    unconditional = _unconditional(model, names)
    return [name for name in names if name in unconditional]


def with_constants(graph_def: Any, names: Sequence[str], known: Mapping[str, Array]) -> Any:
    """Return a graph with Const nodes for the ops `names`, which TensorFlow computes, and for those `known` by name.

    Ops that only these read are left out.
    """
    tensorflow = import_tensorflow()
    v1 = tensorflow.compat.v1
    changed, computed = deepcopy(graph_def), deepcopy(graph_def)
    # No session returns values of a loop's body: its control inputs on constants, and Enter ops, place an op there.
    for node in computed.node:
        node.input[:] = [text for text in node.input if text[:1] != "^"]
        if node.op == "Enter":
            node.op = "Identity"
            for name in [name for name in node.attr if name != "T"]:
                del node.attr[name]
    names = [name for name in names if name not in known]
    with v1.Graph().as_default() as graph, silence_stderr(), translate_tf_errors(tensorflow):
        v1.import_graph_def(v1.GraphDef.FromString(proto.to_binary(_pruned(computed, names))), name="")
        with v1.Session(graph=graph) as session:
            values = {**dict(zip(names, session.run([f"{name}:0" for name in names]), strict=True)), **known}
    controls = _loop_controls(graph_def, values)
    for node in changed.node:
        if node.name in values:
            name = node.name
            node.Clear()
            node.name, node.op = name, "Const"
            node.input.extend(controls.get(name, ()))
            set_constant(node, values[name])
    read = {proto.input_node(text) for node in graph_def.node for text in node.input}
    return _pruned(changed, [node.name for node in changed.node if node.name not in read])


def _loop_controls(graph_def: Any, names: Iterable[str]) -> dict[str, list[str]]:
    """Return a control input for each of the nodes `names` that run in a loop, which keeps it there without others."""
    nodes = {node.name: node for node in graph_def.node}
    readers: dict[str, list[str]] = defaultdict(list)
    for node in graph_def.node:
        for text in node.input if node.op != "Exit" else ():
            readers[proto.input_node(text)].append(node.name)
    entries = [node.name for node in graph_def.node if node.op == "Enter"]
    in_loops = set(reachable(entries, lambda name: readers.get(name, ())))

    def data_inputs(name: str) -> list[str]:
        return [proto.input_node(text) for text in nodes[name].input if text[:1] != "^"]

    controls = {}
    for name in in_loops.intersection(names):
        sources = reachable([name], data_inputs)
        entered = [f"^{source}" for source in sources if nodes[source].op == "Enter"]
        waits = [text for source in sources for text in nodes[source].input if text[:1] == "^" and text[1:] in in_loops]
        controls[name] = (waits + entered)[:1]  # the converter refuses a control edge from an Enter
    return controls


def _pruned(graph_def: Any, outputs: Iterable[str]) -> Any:
    """Remove the nodes that do not feed outputs, except placeholders, and return the graph."""
    inputs = {node.name: [proto.input_node(text) for text in node.input] for node in graph_def.node}
    used = set(reachable(outputs, inputs.__getitem__))
    remaining = [node for node in graph_def.node if node.name in used or node.op == "Placeholder"]
    del graph_def.node[:]
    graph_def.node.extend(remaining)
    return graph_def


def _write_inferred_shapes(tensorflow: Any, graph_def: Any) -> None:
    """Write the static shapes that TensorFlow infers into the nodes, from which the loader reads them."""
    v1 = tensorflow.compat.v1
    graph = tensorflow.Graph()
    with graph.as_default():
        tensorflow.import_graph_def(v1.GraphDef.FromString(proto.to_binary(graph_def)), name="")
    for node in graph_def.node:
        outputs = graph.get_operation_by_name(node.name).outputs
        node.attr.pop("_output_shapes", None)
        if outputs:
            shapes = (output.shape.as_proto().SerializeToString() for output in outputs)
            node.attr["_output_shapes"].list.shape.extend(map(proto.TensorShapeProto.FromString, shapes))


def _freeze_signatures(tensorflow: Any, model: Model) -> tuple[Any, tuple[FrozenSignature, ...]]:
    """Return the GraphDef of the signatures that run, and these with their tensors there."""
    signatures = served_signatures(model)
    served, *others = signatures
    names = _placeholder_names(model, signatures)
    try:
        data, tensors = _freeze_with_tensorflow(tensorflow, model, signatures, names)
    except (ModelError, ValueError):
        if not others or model.source.selected_signatures:
            raise
        signatures = (served,)  # another one may change variables
        names = {op: names[op] for op in served.inputs.values()}
        data, tensors = _freeze_with_tensorflow(tensorflow, model, signatures, names)
    graph_def = proto.parse_binary(data, proto.GraphDef(), source=str(model.source.file))
    if others:
        tensors = _merge_equal_nodes(graph_def, tensors)
    proposed_names: dict[tuple[str, int], str] = {}
    for signature in signatures:
        for key, tensor in signature.outputs.items():
            is_taken = key in proposed_names.values()
            proposed_names.setdefault(tensors[tensor], f"{signature.name}/{key}" if is_taken else key)
    graph_def, output_names = _restore_op_names(graph_def, proposed_names, list(names.values()))
    frozen = tuple(
        FrozenSignature(
            name=signature.name,
            inputs={key: names[op] for key, op in sorted(signature.inputs.items())},
            source_inputs=signature.inputs,
            outputs={key: f"{output_names[tensors[tensor]]}:0" for key, tensor in signature.outputs.items()},
        )
        for signature in signatures
    )
    return graph_def, frozen


def _placeholder_names(model: Model, signatures: Sequence[FrozenSignature]) -> dict[str, str]:
    """Return the name of the placeholder in the frozen graph for each one that the signatures read.

    Inputs that share their data become one placeholder.
    """
    keys = {op: key for signature in reversed(signatures) for key, op in signature.inputs.items()}
    names: dict[str, str] = {}
    used_names: set[str] = set()
    for entry in run_inputs(model):
        key = keys.get(entry.spec.name, entry.spec.name)
        name = unique_node_name(used_names, f"{entry.spec.signatures[0]}_{key}" if key in used_names else key)
        names |= {tensors.values_op: name for tensors in entry.targets}
    return names


def _merge_equal_nodes(graph_def: Any, outputs: Mapping[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Let the readers of equal nodes read the first of them, and return `outputs` with their tensors.

    Keras saves a second signature with the same function, and signatures for parts of a model share its first layers.
    """
    # Loops have a frame name, and a part of one loop cannot read another. Whole loops may be equal.
    kinds = _equivalent_nodes(graph_def, ignored_attrs={"frame_name"})
    first_outputs: dict[tuple[int, str], tuple[str, int]] = {}
    merged = {}
    for tensor, (name, dtype) in outputs.items():
        op, _, port = name.partition(":")
        merged[tensor] = first_outputs.setdefault((kinds[op], port), (name, dtype))
    kinds = _equivalent_nodes(graph_def, ignored_attrs=set())
    first_nodes: dict[int, str] = {}
    replacements = {node.name: first_nodes.setdefault(kinds[node.name], node.name) for node in graph_def.node}
    for node in graph_def.node:
        node.input[:] = [_rename_input(text, {}, replacements) for text in node.input]
    renamed = {tensor: (_rename_input(name, {}, replacements), dtype) for tensor, (name, dtype) in merged.items()}
    return {tensor: renamed[tensor] for tensor in outputs}


def _equivalent_nodes(graph_def: Any, *, ignored_attrs: Collection[str]) -> dict[str, int]:
    """Return a number for each node, the same for nodes that compute the same.

    Nodes with equal contents start with the same number and get different ones if their inputs have different ones.
    The repetition ends when no number is split, so that equal loops, which are cycles, keep theirs.
    """
    table = builtin_table()
    contents: dict[str, object] = {}
    for node in graph_def.node:
        is_unique = node.op == "Placeholder" or (spec := table.find_spec(node.op)) is None or spec.is_stateful
        attrs = {
            key: value.SerializeToString(deterministic=True)
            for key, value in sorted(node.attr.items())
            if not key.startswith("_") and key not in ignored_attrs
        }
        contents[node.name] = node.name if is_unique else (node.op, *attrs.items())
    numbers = _numbered(contents)
    while True:
        refined = _numbered(
            {
                node.name: (
                    numbers[node.name],
                    *(
                        (text[:1] == "^", numbers[proto.input_node(text)], text.partition(":")[2])
                        for text in node.input
                    ),
                )
                for node in graph_def.node
            }
        )
        if len(set(refined.values())) == len(set(numbers.values())):
            return numbers
        numbers = refined


def _numbered(contents: Mapping[str, object]) -> dict[str, int]:
    """Return the same number for the names of equal contents."""
    numbers: dict[object, int] = {}
    return {name: numbers.setdefault(content, len(numbers)) for name, content in contents.items()}


def _freeze_with_tensorflow(
    tensorflow: Any, model: Model, signatures: Sequence[FrozenSignature], names: Mapping[str, str]
) -> tuple[bytes, dict[str, tuple[str, int]]]:
    """Return the binary GraphDef between the inputs and outputs of signatures, and each output's name and type there.

    `names` has the new name of each placeholder.
    """
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    v1 = tensorflow.compat.v1
    session = TensorFlowSession(tensorflow, model)
    fetches = list(dict.fromkeys(tensor for signature in signatures for tensor in signature.outputs.values()))
    with session.tf_session:
        ops = [name.partition(":")[0] for name in fetches]
        definition = session.graph.as_graph_def()
        _read_variables_before_lookups(definition)
        constant = v1.graph_util.convert_variables_to_constants(session.tf_session, definition, ops)
    constant = v1.GraphDef.FromString(_with_unique_function_names(constant.SerializeToString()))
    existing = {node.name for node in constant.node}

    def rebuild() -> Any:
        placeholders: dict[str, Any] = {}
        for op, name in names.items():
            output = model.main.op(op).outputs[0]
            if name not in placeholders:
                placeholders[name] = v1.placeholder(output.dtype or "float32", output.shape, name=name)
        input_map = {f"{op}:0": placeholders[name] for op, name in names.items() if op in existing}
        # The inliner only inlines a call whose results are fetched directly.
        results = v1.import_graph_def(constant, name="", input_map=input_map, return_elements=fetches)
        return list(placeholders.values()), results

    traced: list[Any] = []
    try:
        function = v1.wrap_function(lambda: traced.extend(rebuild()), [])
    except ValueError as error:
        if not (changed := find_state_variables(model)):
            raise
        raise ModelError(
            f"{model.path or 'The model'} cannot be frozen, because each run changes the variable {changed[0]}, and"
            " constants cannot change. Export it with its state as inputs and outputs, or without stateful=True, or"
            " choose other signatures with --signature."
        ) from error
    frozen_function = convert_variables_to_constants_v2(function.prune(*traced))
    pairs = zip(fetches, frozen_function.outputs, strict=True)
    outputs = {tensor: (output.name, output.dtype.as_datatype_enum) for tensor, output in pairs}
    return frozen_function.graph.as_graph_def().SerializeToString(), outputs


def _read_variables_before_lookups(graph_def: Any) -> None:
    """Insert a ReadVariableOp before each lookup in a variable: TensorFlow freezes no other op of a function."""
    for function in graph_def.library.function:
        names = {node.name for node in function.node_def}
        lookups = (node for node in function.node_def if node.op in _VARIABLE_LOOKUPS)
        for node in [node for node in lookups if not node.attr["batch_dims"].i]:  # as tf.gather writes them
            read = function.node_def.add(name=unique_node_name(names, f"{node.name}/read"), op="ReadVariableOp")
            read.input.append(node.input[0])
            read.attr["dtype"].type = node.attr["Tparams"].type = node.attr["dtype"].type
            node.op, node.input[0] = _VARIABLE_LOOKUPS[node.op], f"{read.name}:value:0"
            for name in ("dtype", "batch_dims"):
                node.attr.pop(name, None)


_NOT_INLINED = ("_XlaMustCompile", "_noinline")
"""Attributes of functions, and of their calls, that are not inlined, such as Keras's convolutions of groups."""


def _with_unique_function_names(data: bytes) -> bytes:
    """Return a binary GraphDef whose function names contain its digest, and whose branches and loops can be inlined.

    TensorFlow keeps all functions of a process by name, and those of two models may have the same names.
    """
    graph_def = proto.parse_binary(data, proto.GraphDef(), source="the frozen graph")
    digest = hashlib.sha256(data).hexdigest()[:12]
    names = {function.signature.name: f"{function.signature.name}_{digest}" for function in graph_def.library.function}
    rename_functions(proto.all_nodes(graph_def), names)
    for function in graph_def.library.function:
        function.signature.name = names[function.signature.name]
    for node in proto.all_nodes(graph_def):
        if node.op.removeprefix("Stateless") in {"Case", "If", "While"}:
            node.attr["_lower_using_switch_merge"].b = True  # False in graphs frozen without lower_control_flow
    for holder in (*graph_def.library.function, *proto.all_nodes(graph_def)):
        for name in _NOT_INLINED:
            holder.attr.pop(name, None)
    del graph_def.library.gradient[:]  # a graph of constants is not trained
    return bytes(proto.to_binary(graph_def))


def _restore_op_names(
    graph_def: Any, proposed_names: Mapping[tuple[str, int], str], input_names: list[str]
) -> tuple[Any, dict[tuple[str, int], str]]:
    """Return the graph with the names that ops had inside their functions, where they are free, and its outputs' names.

    `proposed_names` has the name of each output tensor, given with its type.
    """
    used_names = {node.name for node in graph_def.node}
    counts = Counter(tensor.partition(":")[0] for tensor, _ in proposed_names)
    names: dict[tuple[str, int], str] = {}
    for output, key in proposed_names.items():
        tensor, dtype = output
        if tensor == f"{key}:0" and counts[key] == 1:
            names[output] = key
            continue
        names[output] = unique_node_name(used_names, key.replace(":", "_"))
        graph_def.node.add(name=names[output], op="Identity", input=[tensor]).attr["T"].type = dtype
    _drop_controls_of_constants(graph_def)
    results = {*names.values()}
    bypassed_inputs = {
        node.name: node.input[0]
        for node in graph_def.node
        if node.op == "Identity" and len(node.input) == 1 and _INLINER_IDENTITY.search(node.name)
        if node.name not in results
    }
    nodes = {node.name: node for node in graph_def.node if node.name not in bypassed_inputs}

    def sources(name: str) -> list[str]:
        renamed_inputs = (_rename_input(text, bypassed_inputs, {}) for text in nodes[name].input)
        return [proto.input_node(text) for text in renamed_inputs]

    # Lowering loops leaves placeholders without readers, which would be inputs of the frozen graph.
    used_nodes = set(reachable(names.values(), sources)) | set(input_names)
    remaining = [node for node in graph_def.node if node.name in used_nodes]
    inner_names = {node.name: _CALL_PREFIX.sub("", node.name) for node in remaining}
    counts = Counter(inner_names.values())
    new_names = {old: new if counts[new] == 1 else old for old, new in inner_names.items()}
    renamed = proto.GraphDef(versions=graph_def.versions, library=graph_def.library)
    for node in remaining:
        new_node = renamed.node.add()
        new_node.CopyFrom(node)
        new_node.name = new_names[node.name]
        new_node.attr.pop("_class", None)
        new_node.input[:] = [_rename_input(tensor_name, bypassed_inputs, new_names) for tensor_name in node.input]
    return renamed, names


def _rename_input(tensor_name: str, bypassed: Mapping[str, str], new_names: Mapping[str, str]) -> str:
    """Return a node's input by its new name, past bypassed ops."""
    control, tensor_name = ("^", tensor_name[1:]) if tensor_name.startswith("^") else ("", tensor_name)
    while tensor_name.partition(":")[0] in bypassed:
        tensor_name = bypassed[tensor_name.partition(":")[0]]
    op, colon, port = tensor_name.partition(":")
    new_name = new_names.get(op, op)
    return f"{control}{new_name}" if control else f"{new_name}{colon}{port}"
