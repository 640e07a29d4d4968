"""A copy of a message with further outputs, through which tensors anywhere in the model, or their sizes, are watched.

A tensor of the main graph becomes a graph output. Behind one in a body or function stands a node that is marked in its
doc_string; functions are put in place of their calls, so that each call has a mark of its own, and each marked value is
lifted out of the bodies around it.

onnxruntime keeps graph outputs to the end of a run, whether they are fetched or not. Where there is no memory for that,
each tensor is read by a Loop of its own that makes as many rounds as an input of the graph says, its flag: 1 gives the
value with an axis for rounds in front, 0 gives nothing. That keeps the tensor from being fused away just as an output
would, so values are the same bits, but it may be dropped once the Loop has run. Of the nodes that nobody reads,
onnxruntime runs the last first, after what leads to it. So the Loops stand behind all nodes, those of the first tensors
last. The model's own outputs, which would be kept too, get such readers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from onnx import ModelProto, TensorProto, helper, inliner

from graphquant.errors import UnwatchableError
from graphquant.formats.onnx.infer import ERRORS, inferred
from graphquant.formats.onnx.lift import Lifter, Mark, Place, marks
from graphquant.formats.onnx.tensors import CODES, first_line
from graphquant.formats.onnx.write import bodies
from graphquant.ir import TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from graphquant.formats import Feeds
    from graphquant.formats.onnx.write import Emission
    from graphquant.ir import Model, Op

Array = np.ndarray[Any, Any]

MARK = "graphquant.seen "

Showing = Literal["values", "values by flag", "sizes"]
"""What is shown of tensors: all values in each run, those whose flag is set, or how many elements each value has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Where the values of a watched tensor come from.

    Attributes:
        places: Where they come out of a run; a function gives one for each of its calls.
        flag: The graph input that must be 1 for that, "" if there is none.
        fed: The graph input that it is, "" if it is none.
        value: Gives its value if it is constant or not fed.
    """

    places: tuple[Place, ...] = ()
    flag: str = ""
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
        flags: All inputs that say what is shown; they must be fed.
        refused: The tensors that cannot be watched, with the reason.
    """

    message: Any
    probes: Mapping[TensorRef, Probe]
    flags: tuple[str, ...]
    refused: Mapping[TensorRef, UnwatchableError]


def fetches(probes: Iterable[Probe]) -> list[str]:
    """The outputs to fetch for `probes`."""
    return list(dict.fromkeys(name for probe in probes for place in probe.places for name in place.outputs))


def watch(model: Model, emission: Emission, tensors: Iterable[TensorRef], show: Showing = "values") -> Watched:
    """A copy of the emitted `model` that shows `tensors`."""
    return _Watcher(model, emission, show).run(list(dict.fromkeys(tensors)))


class _Watcher:
    """Builds one copy."""

    def __init__(self, model: Model, emission: Emission, show: Showing) -> None:
        self._model = model
        self._emission = emission
        self._show = show
        self._numbers = count(1)
        self._message = ModelProto()
        self._message.CopyFrom(emission.message)
        functions = [name for name, graph in model.graphs.items() if name and graph.parent is None]
        self._protos: dict[str, Any] = {
            "": self._message.graph,
            **dict(zip(functions, self._message.functions, strict=True)),
        }
        self._orders: dict[str, dict[str, int]] = {}
        self._flags: dict[TensorRef, str] = {}
        self._refused: dict[TensorRef, UnwatchableError] = {}

    def run(self, tensors: Sequence[TensorRef]) -> Watched:
        probes = {tensor: Probe() for tensor in tensors}
        outputs: dict[TensorRef, str] = {}
        hidden: list[TensorRef] = []
        for tensor in tensors:
            op = self._model.op(tensor)
            if op.kind == "constant":
                probes[tensor] = Probe(value=op.value)
            elif not tensor.graph and op.kind == "input":
                probes[tensor] = Probe(fed=op.name, value=op.value)
            elif not tensor.graph and self._show == "values":
                outputs[tensor] = self._output(tensor)
            else:
                hidden.append(tensor)
        if self._show != "values":
            hidden = self._last_first([*hidden, *(end for end in self._ends() if end not in probes)])
        found = self._found(hidden)
        lifter = Lifter(self._message, self._model.opset, self._fresh)
        for tensor, name in outputs.items():
            lifter.publish(name)
            probes[tensor] = Probe(places=(Place(outputs=(name,)),))
        for tensor, places in self._places(lifter, found).items():
            flag = self._flags.get(tensor, "")
            if tensor in probes:
                shown = (replace(place, lifted=True, stacked=place.stacked + 1) if flag else place for place in places)
                probes[tensor] = Probe(places=tuple(shown), flag=flag)
        return Watched(
            message=self._message,
            probes={tensor: probe for tensor, probe in probes.items() if tensor not in self._refused},
            flags=tuple(self._flags.values()),
            refused=self._refused,
        )

    def _ends(self) -> list[TensorRef]:
        """The tensors that are outputs of the model, which they cease to be; those that are no tensors remain."""
        infos = self._message.graph.output
        ends = []
        for index, label in reversed(list(enumerate(self._model.main.outputs))):
            tensor = self._model.main.producer(Use("", label, 0))
            if tensor is None or not infos[index].type.HasField("tensor_type"):
                continue
            if self._model.op(tensor).kind not in {"constant", "input"}:
                ends.append(tensor)
                del infos[index]
        return list(dict.fromkeys(ends))

    def _last_first(self, tensors: Sequence[TensorRef]) -> list[TensorRef]:
        """Tensors in the order in which a graph makes them, backwards; those of a graph it is given come last."""
        return sorted(tensors, key=self._made, reverse=True)

    def _made(self, tensor: TensorRef) -> int:
        """The place of the node that makes `tensor` in its graph, -1 if none does."""
        try:
            self._proto(tensor.graph)
        except UnwatchableError:  # refused later
            return -1
        return self._order(tensor.graph).get(self._emission.name(self._model, tensor), -1)

    def _output(self, tensor: TensorRef) -> str:
        """The value of the main graph that shows `tensor`."""
        nodes = self._shown(tensor, "")
        self._message.graph.node.extend(nodes)
        return str(nodes[-1].output[0]) if nodes else self._emission.name(self._model, tensor)

    def _shown(self, tensor: TensorRef, mark: str) -> list[Any]:
        """Nodes of which the last gives what is to be seen of `tensor`; with a `mark` there is at least one."""
        types = ["Size"] if self._show == "sizes" else ["Identity"] if mark else []
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
        known = self._show == "sizes" or all(self._model.output(tensor).dtype for tensor in tensors)
        typed = self._message if known else inferred(self._message, self._model.source.folder)
        found = marks(self._message, typed, MARK) if tensors else []
        pairs = [(tensors[int(mark.key)], mark) for mark in found]
        if self._show == "values by flag":
            # What has no type is always shown.
            return [(tensor, self._flag(tensor, mark) if self._dtype(tensor, mark) else mark) for tensor, mark in pairs]
        return pairs

    def _flag(self, tensor: TensorRef, mark: Mark) -> Mark:
        """Makes the marked node a Loop that gives its input once if the tensor's flag is 1, and never if it is 0."""
        if tensor not in self._flags:
            self._flags[tensor] = self._fresh()
            self._message.graph.input.append(_info(self._flags[tensor], TensorProto.INT64, []))
        flag = self._flags[tensor]
        turn, go, on, held, same, value, end, values = (self._fresh() for _ in range(8))
        copies = {go: on, held: same, mark.node.input[0]: value}
        body = helper.make_graph(
            [helper.make_node("Identity", [source], [target]) for source, target in copies.items()],
            value,
            [_info(turn, TensorProto.INT64, []), _info(go, TensorProto.BOOL, []), _info(held, TensorProto.INT64, [])],
            [
                _info(on, TensorProto.BOOL, []),
                _info(same, TensorProto.INT64, []),
                _info(value, self._dtype(tensor, mark), None),
            ],
        )
        shown = helper.make_node("Identity", [values], list(mark.node.output))
        # Before opset 11 a Loop must carry something.
        mark.node.CopyFrom(helper.make_node("Loop", [flag, "", flag], [end, values], body=body))
        nodes = (mark.levels[0].body if mark.levels else self._message.graph).node
        nodes.append(shown)
        return replace(mark, node=nodes[-1])

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
        if self._show == "sizes":
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
        port = next((k for k, output in enumerate(op.outputs) if output.name), None)
        if port is None:
            raise UnwatchableError(f"{op.type} {op.name!r} around it has no output")
        name = self._emission.name(self._model, TensorRef(graph, op.name, port))
        return self._protos[graph].node[self._order(graph)[name]]

    def _order(self, graph: str) -> Mapping[str, int]:
        """Where in its graph each value is made; what stands behind the nodes that were loaded does not change that."""
        if graph not in self._orders:
            nodes = self._protos[graph].node
            self._orders[graph] = {name: index for index, node in enumerate(nodes) for name in node.output if name}
        return self._orders[graph]

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


def _info(name: str, dtype: int, shape: list[int] | None) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def _widened(value: str, name: str) -> Any:
    """The node that makes `value` float32, which holds all of bfloat16; that onnxruntime hands out to nobody."""
    return helper.make_node("Cast", [value], [name], to=TensorProto.FLOAT)


def _spell_out_sequence_map(message: Any) -> Any:
    """`message` with each SequenceMap written as the Loop that it stands for."""
    return inliner.inline_selected_functions(message, [("", "SequenceMap")], inline_schema_functions=True)
