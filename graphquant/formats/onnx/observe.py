"""A copy of a message with further outputs, through which tensors anywhere in the model, or their sizes, are watched.

A tensor of the main graph becomes a graph output. Behind one in a body or function stands a node that is marked in its
doc_string; functions are put in place of their calls, so that each call has a mark of its own, and each marked value is
lifted out of the bodies around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, inliner

from graphquant.errors import UnwatchableError
from graphquant.formats.onnx.infer import ERRORS, inferred
from graphquant.formats.onnx.lift import Lifter, Mark, Place, marks
from graphquant.formats.onnx.tensors import CODES, first_line
from graphquant.formats.onnx.write import bodies
from graphquant.ir import TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from graphquant.formats import Feeds
    from graphquant.formats.onnx.write import Emission
    from graphquant.ir import Model, Op

Array = np.ndarray[Any, Any]

MARK = "graphquant.seen "


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Where the values of a watched tensor come from.

    Attributes:
        places: Where they come out of a run; a function gives one for each of its calls.
        fed: The graph input that it is, "" if it is none.
        value: Gives its value if it is constant or not fed.
    """

    places: tuple[Place, ...] = ()
    fed: str = ""
    value: Callable[[], Array] | None = None

    def values(self, found: Mapping[str, Any], feed: Feeds) -> list[Array]:
        """The values that the tensor took, given the fetched outputs and the feed."""
        if self.fed in feed:
            return [feed[self.fed]]
        if self.value is not None:
            return [self.value()]
        return [value for place in self.places for value in place.values(found)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A message that shows tensors.

    Attributes:
        message: The ModelProto.
        probes: Where to find each tensor.
        refused: The tensors that cannot be watched, with the reason.
    """

    message: Any
    probes: Mapping[TensorRef, Probe]
    refused: Mapping[TensorRef, UnwatchableError]


def fetches(probes: Iterable[Probe]) -> list[str]:
    """The outputs to fetch for `probes`."""
    return list(dict.fromkeys(name for probe in probes for place in probe.places for name in place.outputs))


def watch(model: Model, emission: Emission, tensors: Iterable[TensorRef], *, sizes: bool = False) -> Watched:
    """A copy of the emitted `model` that shows `tensors`, or with `sizes` the number of elements of each value."""
    return _Watcher(model, emission, sizes=sizes).run(list(dict.fromkeys(tensors)))


class _Watcher:
    """Builds one copy."""

    def __init__(self, model: Model, emission: Emission, *, sizes: bool) -> None:
        self._model = model
        self._emission = emission
        self._sizes = sizes
        self._numbers = count(1)
        self._message = ModelProto()
        self._message.CopyFrom(emission.message)
        functions = [name for name, graph in model.graphs.items() if name and graph.parent is None]
        self._protos: dict[str, Any] = {
            "": self._message.graph,
            **dict(zip(functions, self._message.functions, strict=True)),
        }
        self._nodes: dict[str, dict[str, Any]] = {}
        self._refused: dict[TensorRef, UnwatchableError] = {}

    def run(self, tensors: Sequence[TensorRef]) -> Watched:
        probes = {tensor: Probe() for tensor in tensors}
        outputs: dict[TensorRef, str] = {}
        for tensor in tensors:
            op = self._model.op(tensor)
            if op.kind == "constant":
                probes[tensor] = Probe(value=op.value)
            elif not tensor.graph and op.kind == "input":
                probes[tensor] = Probe(fed=op.name, value=op.value)
            elif not tensor.graph:
                outputs[tensor] = self._output(tensor)
        hidden = [tensor for tensor in tensors if tensor.graph and self._model.op(tensor).kind != "constant"]
        found = self._found(hidden)
        lifter = Lifter(self._message, self._model.opset, self._fresh)
        for tensor, name in outputs.items():
            lifter.publish(name)
            probes[tensor] = Probe(places=(Place(outputs=(name,)),))
        for tensor, places in self._places(lifter, found).items():
            probes[tensor] = Probe(places=tuple(places))
        shown = {tensor: probe for tensor, probe in probes.items() if tensor not in self._refused}
        return Watched(message=self._message, probes=shown, refused=self._refused)

    def _output(self, tensor: TensorRef) -> str:
        """The value of the main graph that shows `tensor`."""
        nodes = self._shown(tensor, "")
        self._message.graph.node.extend(nodes)
        return str(nodes[-1].output[0]) if nodes else self._emission.name(self._model, tensor)

    def _shown(self, tensor: TensorRef, mark: str) -> list[Any]:
        """Nodes of which the last gives what is to be seen of `tensor`; with a `mark` there is at least one."""
        types = ["Size"] if self._sizes else ["Identity"] if mark else []
        if self._model.output(tensor).dtype == "bfloat16":
            types.insert(0, "Cast")
        nodes, value = [], self._emission.name(self._model, tensor)
        for type_ in types:
            made = self._model.graphs[tensor.graph].fresh(f"graphquant/shown/{next(self._numbers)}")
            nodes.append(_widened(value, made) if type_ == "Cast" else helper.make_node(type_, [value], [made]))
            value = made
        if mark:
            nodes[-1].doc_string = mark
        return nodes

    def _found(self, tensors: Sequence[TensorRef]) -> list[tuple[TensorRef, Mark]]:
        """Marks `tensors`, which are in bodies and functions; one in a function has a mark for each call of it."""
        for key, tensor in enumerate(tensors):
            try:
                proto = self._proto(tensor.graph)
            except UnwatchableError as error:
                self._refuse(tensor, str(error))
                continue
            proto.node.extend(self._shown(tensor, f"{MARK}{key}"))
        if any(self._in_function(tensor) for tensor in tensors):
            self._inline(inliner.inline_local_functions, tensors)
        found = marks(self._message, self._message, MARK) if tensors else []
        if any(level.type == "SequenceMap" for mark in found for level in mark.levels):
            self._inline(_spell_out_sequence_map, tensors)
        known = self._sizes or all(self._model.output(tensor).dtype for tensor in tensors)
        typed = self._message if known else inferred(self._message)
        found = marks(self._message, typed, MARK) if tensors else []
        return [(tensors[int(mark.key)], mark) for mark in found]

    def _inline(self, inline: Callable[[Any], Any], tensors: Sequence[TensorRef]) -> None:
        """Puts functions in place of their calls; refuses what remains inside one."""
        with_functions = self._message
        try:
            self._message = inline(with_functions)
        except ERRORS as error:
            for tensor in filter(self._in_function, tensors):
                self._refuse(tensor, f"its function cannot be put in place of the call: {first_line(error)}")
            return
        left = {function.name for function in self._message.functions}
        for tensor in filter(self._in_function, tensors):
            name = self._root(tensor.graph)
            if name in left:
                self._refuse(tensor, f"the function {name!r} is of another opset than the model")

    def _places(self, lifter: Lifter, found: Sequence[tuple[TensorRef, Mark]]) -> dict[TensorRef, list[Place]]:
        """Lifts all marked values."""
        places: dict[TensorRef, list[Place]] = {}
        for lift in (False, True):  # what is around one tensor is made ready for all before any of them is lifted
            for tensor, mark in found:
                try:
                    if lift:
                        places.setdefault(tensor, []).append(lifter.lift(mark, self._dtype(tensor, mark)))
                    else:
                        lifter.loosen(mark.levels)
                except UnwatchableError as error:
                    self._refuse(tensor, str(error))
        return places

    def _dtype(self, tensor: TensorRef, mark: Mark) -> int:
        """ONNX element type of what the mark's node gives."""
        if self._sizes:
            return int(TensorProto.INT64)
        dtype = CODES.get(self._model.output(tensor).dtype or "", mark.dtype)
        return int(TensorProto.FLOAT) if dtype == TensorProto.BFLOAT16 else dtype

    def _proto(self, graph: str) -> Any:
        """The copy of the GraphProto or FunctionProto of a graph."""
        names = [graph]
        while names[-1] not in self._protos:
            names.append(self._parent(names[-1])[0])
        for name in reversed(names[:-1]):
            outer, owner = self._parent(name)
            op = self._model.graphs[outer].op(owner)
            attr = next(call.attr for call in op.calls if call.graph == name)
            self._protos[name] = bodies(self._owner(outer, op))[attr]
        return self._protos[graph]

    def _owner(self, graph: str, op: Op) -> Any:
        """The node of `op` in the message; found by the name of its outputs as they were emitted."""
        if graph not in self._nodes:
            self._nodes[graph] = {name: node for node in self._protos[graph].node for name in node.output if name}
        port = next((k for k, output in enumerate(op.outputs) if output.name), None)
        if port is None:
            raise UnwatchableError(f"{op.type} {op.name!r} around it has no output")
        return self._nodes[graph][self._emission.name(self._model, TensorRef(graph, op.name, port))]

    def _parent(self, graph: str) -> tuple[str, str]:
        return self._model.graphs[graph].parent or ("", "")

    def _root(self, graph: str) -> str:
        """The main graph or the function around a graph."""
        while (parent := self._model.graphs[graph].parent) is not None:
            graph = parent[0]
        return graph

    def _in_function(self, tensor: TensorRef) -> bool:
        return bool(self._root(tensor.graph))

    def _refuse(self, tensor: TensorRef, why: str) -> None:
        said = f"The tensor {tensor} cannot be watched: {why}. Leave it out with --exclude."
        self._refused.setdefault(tensor, UnwatchableError(said))

    def _fresh(self) -> str:
        return self._model.main.fresh(f"graphquant/observed/{next(self._numbers)}")


def _widened(value: str, name: str) -> Any:
    """The node that makes `value` float32, which holds all of bfloat16; that onnxruntime hands out to nobody."""
    return helper.make_node("Cast", [value], [name], to=TensorProto.FLOAT)


def _spell_out_sequence_map(message: Any) -> Any:
    """`message` with each SequenceMap written as the Loop that it stands for."""
    return inliner.inline_selected_functions(message, [("", "SequenceMap")], inline_schema_functions=True)
