"""Sessions of the consecutive parts of a model with very many Q/DQ pairs or outputs.

ONNX Runtime creates a session in a time that grows with the square of the number of pairs, and with that of the number
of outputs. A cut is where few values pass, preferably behind a QuantizeLinear. Each part repeats the DequantizeLinear
nodes that it reads, so that ONNX Runtime fuses the same ops as in the whole model. For the same reason, a model without
many pairs is only cut where all values that pass are outputs, past which ONNX Runtime fuses nothing.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto
from onnx.helper import make_tensor_value_info, tensor_dtype_to_np_dtype

from graphquant.formats import prefetch
from graphquant.formats.onnx.emitter import node_bodies
from graphquant.formats.onnx.runtime import CONCURRENT_CREATIONS, TENSOR_TYPE

MAX_SESSION_PAIRS = 500  # maximum number of DequantizeLinear nodes of a model that is not split
MAX_SESSION_OUTPUTS = 10_000  # maximum number of outputs of a model that is not split
PART_NODES = 150  # minimum number of nodes of a part, not counting repeated ones; there are less than twice as many
OBSERVED_PART_NODES = 2000  # the same for a model without so many pairs, almost all of whose values are outputs
INTEGER_TYPES = frozenset({"QGemm", "QuantizeLinear", "DequantizeLinear"})  # in addition to the QLinear types
REPEATED_TYPES = frozenset({"DequantizeLinear", "Constant"})

NODE_NUMBER = re.compile("@([0-9]{1,9})@")
"""Number of a node, its name in a session. Names of fused nodes contain those of their parts."""


class SessionPart(NamedTuple):
    """A part of a model."""

    create: Callable[[], Any]  # returns its session
    inputs: Sequence[str]  # names of its inputs, which earlier parts may return
    outputs: Sequence[str]
    last_node: str  # name of its last node


@dataclass(frozen=True, slots=True)
class SplitSession:
    """Parts that run one after the other."""

    parts: Sequence[SessionPart]
    kept: bool = False  # False if only one session exists at a time, because all of them need much memory

    def run(self, names: Sequence[str], feeds: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
        """Return the outputs called `names` for each of `feeds`."""
        values = [dict(feed) for feed in feeds]
        last_readers = {name: index for index, part in enumerate(self.parts) for name in part.inputs}
        needed = {*names, *last_readers}
        with closing(prefetch(lambda part: part.create(), self.parts, CONCURRENT_CREATIONS)) as sessions:
            for index, (part, session) in enumerate(zip(self.parts, sessions, strict=True)):
                outputs = [name for name in part.outputs if name in needed]
                for known in values if outputs else ():  # for ONNX Runtime, no names are all names
                    results = session.run(outputs, {name: known[name] for name in part.inputs})
                    known.update(zip(outputs, results, strict=True))
                    for name in part.inputs:
                        if last_readers[name] == index and name not in names:
                            del known[name]
        return [[known[name] for name in names] for known in values]


def create_split_session(message: Any, prepare: Callable[[Any], Callable[[], Any]]) -> SplitSession | None:
    """Return the parts of a ModelProto; `prepare` returns the function that creates the session of a part.

    Returns None if the model has few pairs and outputs, or cannot be split.
    """
    has_many_pairs = count_pairs(message) > MAX_SESSION_PAIRS
    if not has_many_pairs and len(message.graph.output) <= MAX_SESSION_OUTPUTS:
        return None
    parts, infos = [], {info.name: info for info in message.graph.input}
    for graph, inputs in _split_graph(message.graph, observed=not has_many_pairs):
        if not infos.keys() >= inputs:
            return None  # the nodes are not sorted, or a value is no tensor that Python can pass on
        graph.input.extend(infos[name] for name in sorted(inputs))
        fields = {"opset_import": message.opset_import, "functions": message.functions}
        create = prepare(ModelProto(ir_version=message.ir_version, graph=graph, **fields))
        codes = {info.name: info.type.tensor_type.elem_type for info in graph.output}
        known_infos = {info.name: deepcopy(info) for info in graph.output}  # the original would keep the whole part
        if not all(codes.values()):
            for output in create().get_outputs():
                tensor_type = TENSOR_TYPE.fullmatch(output.type)
                code = TensorProto.DataType.Value(tensor_type[1].upper()) if tensor_type is not None else 0
                codes[output.name] = code
                known_infos[output.name] = make_tensor_value_info(output.name, code, output.shape or None)
        infos |= {
            name: known_infos[name]
            for name, code in codes.items()
            if code and tensor_dtype_to_np_dtype(code).isbuiltin == 1
        }
        parts.append(SessionPart(create, sorted(inputs), list(codes), graph.node[-1].name))
    return SplitSession(parts) if all(info.name in infos for info in message.graph.output) else None


def copy_header(message: Any) -> Any:
    """Return a ModelProto with the versions, functions, inputs and outputs of `message`, and no nodes."""
    fields = {"opset_import": message.opset_import, "functions": message.functions}
    header = ModelProto(ir_version=message.ir_version, **fields)
    header.graph.name = message.graph.name
    header.graph.input.extend(message.graph.input)
    header.graph.output.extend(message.graph.output)
    return header


def has_local_values(whole: Any, parts: Sequence[SessionPart]) -> bool:
    """Return True if each part reads only the inputs of the ModelProto `whole` and the outputs of the part before."""
    known = {info.name for info in whole.graph.input}
    return all(known.union(part.outputs).issuperset(reader.inputs) for part, reader in pairwise(parts))


def describe_integer_part(part: Any, first_node: int, values: dict[str, int]) -> list[Any]:
    """Return the nodes and types of a part that ONNX Runtime optimized, without names and stored values.

    Returns [] if it has other ops than integer kernels and quantizations, whose verdicts depend on stored values. The
    numbers in the names of nodes are counted from `first_node`. `values` has a number for each name of a value, and
    grows.
    """
    rows: list[Any] = []
    for node in part.graph.node:
        if not (node.op_type.startswith("QLinear") or node.op_type in INTEGER_TYPES):
            return []
        numbers = [values.setdefault(name, len(values)) for name in (*node.input, *node.output)]
        origin = NODE_NUMBER.search(node.name)
        attributes = [attribute.SerializeToString(deterministic=True) for attribute in node.attribute]
        rows.append((node.op_type, origin and int(origin[1]) - first_node, numbers, attributes))
    tensors = part.graph.initializer
    rows.append(sorted([(values.setdefault(t.name, len(values)), t.data_type, *t.dims) for t in tensors]))
    for infos in (part.graph.input, part.graph.output, part.graph.value_info):
        types = [(values.setdefault(info.name, len(values)), info.type.SerializeToString()) for info in infos]
        rows.append(sorted(types))
    return rows


def merge_graphs(whole: Any, parts: Iterable[Any]) -> Any:
    """Return a ModelProto with the nodes of consecutive parts of the ModelProto `whole`, each a ModelProto.

    It has the inputs of `whole`, those that the parts read from other parts, and the outputs of `whole` and of the last
    part. Nodes and initializers that are equal in several parts are merged. If only their names are, those of the later
    part are renamed, because ONNX Runtime numbers the values that it adds to each part anew.
    """
    result = copy_header(whole)
    del result.graph.output[:]
    values, outputs = ({info.name for info in infos} for infos in (whole.graph.input, whole.graph.output))
    known: dict[str, bytes] = {}  # the serialized initializer or node that gives each value
    last_outputs: list[Any] = []
    for index, part in enumerate(parts):
        result.graph.input.extend(info for info in part.graph.input if info.name not in values)
        result.graph.output.extend(info for info in part.graph.output if info.name in outputs)
        values.update(info.name for info in (*part.graph.input, *part.graph.output))
        last_outputs = [info for info in part.graph.output if info.name not in outputs]
        renames: dict[str, str] = {}
        for opset in part.opset_import:  # ONNX Runtime adds the domains of its own ops
            if opset.domain not in {other.domain for other in result.opset_import}:
                result.opset_import.append(opset)
        entries = [(tensor, [tensor.name]) for tensor in part.graph.initializer]
        entries += [(node, list(filter(None, node.output))) for node in part.graph.node]
        for entry, names in entries:
            if isinstance(entry, NodeProto):
                _rename_values(entry, renames)
            data = entry.SerializeToString(deterministic=True)
            if names and all(known.get(name) == data for name in names):
                continue
            renames.update((name, f"{name}/part {index}") for name in names if name in known)
            if isinstance(entry, NodeProto):
                entry.output[:] = [renames.get(name, name) for name in entry.output]
                result.graph.node.append(entry)
            else:
                entry.name = renames.get(entry.name, entry.name)
                result.graph.initializer.append(entry)
            known.update((renames.get(name, name), data) for name in names)
    result.graph.output.extend(last_outputs)
    return result


def _rename_values(node: Any, renames: Mapping[str, str]) -> None:
    """Rename values that a node reads, or that its bodies capture."""
    if renames:
        node.input[:] = [renames.get(name, name) for name in node.input]
        for body in node_bodies(node).values():
            own = {*(info.name for info in body.input), *(tensor.name for tensor in body.initializer)}
            own.update(name for inner in body.node for name in inner.output)
            outer = {name: new for name, new in renames.items() if name not in own}
            for inner in body.node:
                _rename_values(inner, outer)


def count_pairs(message: Any) -> int:
    """Return the number of DequantizeLinear nodes of the main graph of a ModelProto."""
    return sum(node.op_type == "DequantizeLinear" for node in message.graph.node)


def _split_graph(graph: Any, *, observed: bool) -> Iterator[tuple[Any, set[str]]]:
    """Yield the parts of a graph without their inputs, and the names of these.

    An `observed` graph is only cut where all values that pass are outputs.
    """
    types, all_reads, all_outputs, shared = _read_nodes(graph)
    names = ((shared.get(tensor.name), position) for position, tensor in enumerate(graph.initializer))
    initializers = {name: position for name, position in names if name is not None}
    del shared
    producers = {value: position for position, outputs in enumerate(all_outputs) for value in outputs if value}
    own = [position for position, op_type in enumerate(types) if op_type not in REPEATED_TYPES]
    repeated = {value for value, position in producers.items() if types[position] in REPEATED_TYPES}
    inputs, outputs = {info.name for info in graph.input}, {info.name for info in graph.output}

    def needs(names: Iterable[str]) -> tuple[set[str], set[int]]:
        """Return the values that a part needs for `names`, and the positions of the nodes that it repeats."""
        values: set[str] = set()
        positions: set[int] = set()
        pending = [name for name in names if name in producers or name in initializers or name in inputs]
        for name in pending:  # grows: a DequantizeLinear may read another one
            position = producers.get(name)
            if position is None or types[position] not in REPEATED_TYPES:
                values.add(name)
            elif position not in positions:
                positions.add(position)
                pending.extend(filter(None, all_reads[position]))
        return values, positions

    # Position of the last node that reads each value that a node returns.
    last_reads = {value: index for index in own for value in needs(all_reads[index])[0] if value in producers}
    last_reads.update((value, len(types)) for value in needs(outputs & repeated)[0] if value in producers)
    changes = [0] * (len(types) + 1)
    for value, last_read in last_reads.items():
        cost = 1 if types[producers[value]] == "QuantizeLinear" else 2
        cost = int(value not in outputs) if observed else cost
        changes[producers[value]] += cost
        changes[last_read] -= cost
    ends = _choose_cuts(list(accumulate(changes)), own, observed=observed)
    cuts = [own[end - 1] for end in ends]
    part_of = partial(bisect_left, cuts)  # number of the part that has the node at a position
    passed = {value for value, last_read in last_reads.items() if part_of(producers[value]) < part_of(last_read)}
    infos = {info.name: info for info in graph.value_info if info.name in passed}
    infos.update((info.name, info) for info in graph.output)
    for start, end in pairwise((0, *ends)):
        reads = [all_reads[position] for position in own[start:end]]
        values, positions = needs(chain(*reads, outputs & repeated if end == len(own) else ()))
        positions.update(own[start:end])
        made = {value for position in positions for value in all_outputs[position]}
        results = {value for value in made if value in outputs or last_reads.get(value, 0) > own[end - 1]}
        part = GraphProto(name=graph.name, node=[graph.node[position] for position in sorted(positions)])
        stored = [name for name in sorted(values) if name in initializers]
        part.initializer.extend(graph.initializer[initializers[name]] for name in stored)
        part.output.extend(infos.get(name, ValueInfoProto(name=name)) for name in sorted(results))
        yield part, (values - made).difference(stored)


def _choose_cuts(costs: Sequence[int], own: Sequence[int], *, observed: bool) -> list[int]:
    """Return the ends of parts of the nodes `own`, where the cost of the values that pass is lowest."""
    part_nodes, ends = OBSERVED_PART_NODES if observed else PART_NODES, [0]
    while ends[-1] < len(own):
        candidates = range(ends[-1] + part_nodes, min(ends[-1] + 2 * part_nodes, len(own)))
        end = min(candidates, key=lambda count: costs[own[count - 1]], default=len(own))
        ends.append(len(own) if observed and end < len(own) and costs[own[end - 1]] else end)
    return ends[1:]


def _read_nodes(graph: Any) -> tuple[list[str], list[tuple[str, ...]], list[tuple[str, ...]], dict[str, str]]:
    """Return the type of each node, the values that it reads, its outputs, and one object for each of these names."""
    types, reads, outputs = list[str](), list[tuple[str, ...]](), list[tuple[str, ...]]()
    shared: dict[str, str] = {}  # each access to a field makes a new string
    for node in graph.node:  # a list of nodes would also hold an object for each field that was read
        types.append(shared.setdefault(node.op_type, node.op_type))
        reads.append(tuple(shared.setdefault(name, name) for name in read_names(node)))
        outputs.append(tuple(shared.setdefault(name, name) for name in node.output))
    return types, reads, outputs, shared


def read_names(node: Any) -> Iterator[str]:
    """Yield the values that a node reads, and all values that are read in its bodies."""
    yield from node.input
    for body in node_bodies(node).values() if node.attribute else ():
        yield from (info.name for info in body.output)
        for inner in body.node:
            yield from read_names(inner)
