"""What is drawn of a model: its ops as boxes in groups, tensors as wires, constants and QDQ pairs folded into badges.

Layouts, pages and files for other tools are made of a `Drawing`; none of them looks at the model again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphquant.ir import FLOAT_TYPES, QUANTIZATION_KINDS, Parameters, TensorRef, Use, bulk, named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.ir import Graph, Model, Op, Output
    from graphquant.view.badges import Badge, Marks

COMPUTED_ON = frozenset({"input", "weight", "recurrent_weight"})
"""Roles of the inputs that decide whether an op computes in float."""

MAX_DEPTH = 8
"""Name scopes that become groups of their own, counted from the outermost one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """An input of an op whose value is known before the model runs; drawn on the op.

    Attributes:
        slot: The input slot.
        role: What it is to the op.
        name: The constant's name; where it is computed, that of the op that does it.
        dtype: The dtype of the stored values.
        shape: Their shape.
        badges: Its quantization.
        reason: Why it is not quantized, where a rule asked for it.
    """

    slot: int
    role: str
    name: str
    dtype: str
    shape: str
    badges: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One op that is drawn.

    Attributes:
        op: The op.
        graph: The name of its graph.
        group: Its innermost group, -1 if it is in none.
        constants: Its inputs that are constants.
        badges: Quantization that is its own work, or that of its outputs where tensors keep their scales themselves.
        inputs: How much of what it computes on is quantized: "" where it computes on no float, "all", "some", "none".
        reason: Why it multiplies in float, "" where it does not.
        calls: The graphs that it runs, as numbers of groups.
    """

    op: Op
    graph: str
    group: int
    constants: tuple[Constant, ...] = ()
    badges: tuple[int, ...] = ()
    inputs: str = ""
    reason: str = ""
    calls: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A tensor on its way to one reader.

    Attributes:
        source: The box that makes it.
        port: Which of that op's outputs it is.
        target: The box that reads it.
        slot: The input slot, -1 where it only goes into or out of the graph that an op runs.
        badges: The quantization on the way.
        reason: Why there is none, where a rule asked for it.
    """

    source: int
    port: int
    target: int
    slot: int
    badges: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ops that can be drawn as one: a name scope, or a graph that an op runs.

    Attributes:
        label: Its name, without that of what it is in.
        parent: The group that it is in, -1 for none.
        graph: The graph's name, "" for a name scope.
    """

    label: str
    parent: int
    graph: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """All that is drawn.

    Attributes:
        title: What the model is called.
        format: The model's format, with its opset.
        boxes: The ops.
        wires: The tensors between them, ordered by source and port.
        badges: Quantization, which boxes, wires and constants name by number.
        folded: For each badge the types and names of the ops that it stands for.
        groups: Name scopes and nested graphs, each behind what it is in.
        controls: Boxes that run one before the other though the second reads nothing of the first.
        planned: Whether badges are what would be inserted, not what is there.
    """

    title: str
    format: str
    boxes: list[Box] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    badges: list[Badge] = field(default_factory=list)
    folded: list[tuple[tuple[str, str], ...]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    controls: list[tuple[int, int]] = field(default_factory=list)
    planned: bool = False

    def paths(self) -> list[tuple[int, ...]]:
        """For each box the groups that it is in, the outermost first."""
        known: list[tuple[int, ...]] = []
        for number, group in enumerate(self.groups):
            known.append((*known[group.parent], number) if group.parent >= 0 else (number,))
        return [known[box.group] if box.group >= 0 else () for box in self.boxes]

    def tensors(self) -> list[tuple[int, int, list[int]]]:
        """Each tensor that is drawn: the box that makes it, the port, and the numbers of its wires."""
        found: dict[tuple[int, int], list[int]] = {}
        for number, wire in enumerate(self.wires):
            found.setdefault((wire.source, wire.port), []).append(number)
        return [(source, port, wires) for (source, port), wires in found.items()]


@bulk()
def draw(model: Model, marks: Marks) -> Drawing:
    """What is drawn of the graphs of `model` that a run can reach."""
    return _Drawer(model, marks).drawing()


class _Drawer:
    """Makes one drawing."""

    def __init__(self, model: Model, marks: Marks) -> None:
        self.model = model
        self.marks = marks
        self.parameters = Parameters(model)
        self.live = model.live()
        self.groups: list[Group] = []
        self.graph_groups: dict[str, int] = {"": -1}
        self.numbers: dict[tuple[str, str], int] = {}
        self.folded: list[dict[tuple[str, str], None]] = [{} for _ in marks.badges]
        self.ends: dict[TensorRef, tuple[TensorRef, tuple[int, ...]]] = {}

    def drawing(self) -> Drawing:
        ops = [(graph, op) for graph in map(self.model.graphs.__getitem__, self.live) for op in graph.ops()]
        drawn = [(graph, op) for graph, op in ops if not self._is_folded(graph, op)]
        self.numbers = {(graph.name, op.name): number for number, (graph, op) in enumerate(drawn)}
        homes = self._groups(drawn)
        boxes, wires = [], []
        for (graph, op), home in zip(drawn, homes, strict=True):
            constants, read = self._inputs(graph, op)
            wires += read
            boxes.append(self._box(graph, op, home, constants, read))
        wires += self._into_bodies()
        wires.sort(key=lambda wire: (wire.source, wire.port))
        called = str(self.model.path.name if self.model.path else "model")
        opset = f", opset {self.model.opset}" if self.model.opset else ""
        return Drawing(
            title=called,
            format=self.model.format + opset,
            boxes=boxes,
            wires=wires,
            badges=self.marks.badges,
            folded=[tuple(names) for names in self.folded],
            groups=self.groups,
            controls=list(self._controls(drawn)),
            planned=not self.marks.coverage and bool(self.marks.by_use),
        )

    # -- what is folded --------------------------------------------------------------------------

    def _is_folded(self, graph: Graph, op: Op) -> bool:
        """Whether the op is part of a badge or of a constant, so that it has no box."""
        if op.kind in {"constant", "variable"}:
            return True
        if op.kind in QUANTIZATION_KINDS:
            return self._folds(graph, op)
        made = [TensorRef(graph.name, op.name, port) for port in range(len(op.outputs))]
        return op.kind not in {"input", "output"} and bool(made) and all(map(self.parameters.is_parameter, made))

    def _folds(self, graph: Graph, op: Op) -> bool:
        """Whether the quantization op does nothing but hand on its first input, and somebody reads that."""
        slots = graph.slots(op.name)
        if not slots or slots[0] is None or any(output.stored is not None for output in op.outputs):
            return False
        readers = graph.readers(op.name)
        return set(readers) == {0} and all(
            tensor is None or self.parameters.is_parameter(tensor) for tensor in slots[1:]
        )

    def _behind(self, tensor: TensorRef) -> tuple[TensorRef, tuple[int, ...]]:
        """Where `tensor` comes from, and the badges of the quantization ops on the way."""
        way: dict[TensorRef, None] = {}
        here = tensor
        while here not in self.ends:
            graph = self.model.graphs[here.graph]
            op = graph.op(here.op)
            if op.kind not in QUANTIZATION_KINDS or not self._folds(graph, op) or here in way:
                self.ends[here] = here, self._own(here)
                break
            way[here] = None
            here = graph.slots(here.op)[0] or here
        half: list[Op] = []
        for passed in reversed(way):
            before = self.ends[self.model.graphs[passed.graph].slots(passed.op)[0] or passed]
            half.append(self.model.op(passed))
            badge = self.marks.by_op.get(passed[:2])
            badges = before[1]
            if badge is not None:
                self.folded[badge].update({(op.type, op.name): None for op in half})
                badges, half = (*badges, badge), []
            self.ends[passed] = before[0], badges
        return self.ends[tensor]

    def _own(self, tensor: TensorRef) -> tuple[int, ...]:
        """The badge of a tensor that keeps its scale itself."""
        badge = self.marks.by_tensor.get(tensor)
        return () if badge is None else (badge,)

    # -- boxes and wires -------------------------------------------------------------------------

    def _inputs(self, graph: Graph, op: Op) -> tuple[list[Constant], list[Wire]]:
        """The inputs of `op`, those that are constants and those that come from other boxes."""
        constants, wires = [], []
        target = self.numbers[graph.name, op.name]
        for slot, tensor in enumerate(graph.slots(op.name)):
            if tensor is None:
                continue
            use = Use(graph.name, op.name, slot)
            source, badges = self._behind(tensor)
            planned = self.marks.by_use.get(use)
            if planned is not None:
                badges = (*badges, planned)
            reason = self.marks.reasons.get(use, "")
            number = self.numbers.get(source[:2])
            if number is None:
                constants.append(self._constant(op.role(slot), slot, source, badges, reason))
            else:
                wire = Wire(source=number, port=source.port, target=target, slot=slot, badges=badges, reason=reason)
                wires.append(wire)
        return constants, wires

    def _constant(self, role: str, slot: int, source: TensorRef, badges: tuple[int, ...], reason: str) -> Constant:
        origin = self.parameters.origin(source)
        output = self.model.output(origin)
        return Constant(
            slot=slot,
            role=role,
            name=named(origin.graph, origin.op),
            dtype=output.dtype or "",
            shape=shape_text(output),
            badges=badges,
            reason=reason,
        )

    def _box(self, graph: Graph, op: Op, home: int, constants: list[Constant], read: list[Wire]) -> Box:
        own = [self.marks.by_op[graph.name, op.name]] if (graph.name, op.name) in self.marks.by_op else []
        for port in range(len(op.outputs)):
            own += self._own(TensorRef(graph.name, op.name, port))
        found = self._quantized(graph, op, constants, read)
        reason = self.marks.coverage.get((graph.name, op.name), "")
        if found in {"some", "none"} and not reason:
            reason = next((one.reason for one in _both(read, constants) if one.reason), "")
        return Box(
            op=op,
            graph=graph.name,
            group=home,
            constants=tuple(constants),
            badges=tuple(own),
            inputs=found,
            reason=reason,
            calls=tuple(self.graph_groups[call.graph] for call in op.calls if call.graph in self.graph_groups),
        )

    def _quantized(self, graph: Graph, op: Op, constants: list[Constant], read: list[Wire]) -> str:
        """How much of what `op` computes on is quantized."""
        if (graph.name, op.name) in self.marks.coverage and not self.marks.coverage[graph.name, op.name]:
            return "all"
        slots = graph.slots(op.name)
        marked = []
        for one in _both(read, constants):
            tensor = slots[one.slot]
            if op.role(one.slot) in COMPUTED_ON and tensor is not None:
                dtype = self.model.output(tensor).dtype
                if one.badges or dtype in FLOAT_TYPES | {None}:
                    marked.append(bool(one.badges))
        if not marked or op.kind == "output":
            return ""
        return "all" if all(marked) else "some" if any(marked) else "none"

    def _controls(self, drawn: list[tuple[Graph, Op]]) -> Iterator[tuple[int, int]]:
        """The control edges between ops that are drawn."""
        for target, (graph, op) in enumerate(drawn):
            for name in graph.control_inputs(op.name):
                source = self.numbers.get((graph.name, name))
                if source is not None:
                    yield source, target

    def _into_bodies(self) -> Iterator[Wire]:
        """What goes into and comes out of each graph that a single op runs."""
        reached = set(self.live)
        for name, calls in self.model.callers().items():
            here = [(use, call) for use, call in calls if use.graph in reached]
            if len(here) != 1 or name not in reached:
                continue
            (owner, call), body = here[0], self.model.graphs[name]
            target = self.numbers[owner.graph, owner.op]
            for output in body.outputs:
                yield Wire(source=self.numbers[name, output], port=0, target=target, slot=-1)
            slots = self.model.graphs[owner.graph].slots(owner.op)
            for position, given in enumerate(body.inputs if call.offset is not None else ()):
                slot = position - (call.offset or 0)
                tensor = slots[slot] if 0 <= slot < len(slots) else None
                source = None if tensor is None else self._behind(tensor)[0]
                if source is not None and source[:2] in self.numbers:
                    entered = self.numbers[name, given]
                    yield Wire(source=self.numbers[source[:2]], port=source.port, target=entered, slot=-1)

    # -- groups ----------------------------------------------------------------------------------

    def _groups(self, drawn: list[tuple[Graph, Op]]) -> list[int]:
        """The innermost group of each op; makes the groups."""
        by_graph: dict[str, list[tuple[str, ...]]] = {name: [] for name in self.live}
        for graph, op in drawn:
            by_graph[graph.name].append(_scopes(op.name))
        callers = self.model.callers()
        homes: dict[tuple[str, tuple[str, ...]], int] = {}
        for name, paths in by_graph.items():
            if name:
                self.graph_groups[name] = len(self.groups)
                parent = self._home(name, callers, homes)
                outer = self.model.graphs[name].parent
                label = name.removeprefix(f"{outer[0]}/") if outer is not None and outer[0] else name
                self.groups.append(Group(label=label, parent=parent, graph=name))
            self._scope_groups(name, paths, homes)
        return [homes[graph.name, _scopes(op.name)] for graph, op in drawn]

    def _home(
        self, name: str, callers: dict[str, list[tuple[Use, object]]], homes: dict[tuple[str, tuple[str, ...]], int]
    ) -> int:
        """The group of the only op that runs graph `name`, if it has one already."""
        owners = dict.fromkeys(use[:2] for use, _ in callers.get(name, ()))
        if len(owners) != 1:
            return -1
        ((graph, op),) = owners
        return homes.get((graph, _scopes(op)), -1)

    def _scope_groups(
        self, name: str, paths: list[tuple[str, ...]], homes: dict[tuple[str, tuple[str, ...]], int]
    ) -> None:
        """Groups for the scopes of one graph that hold several ops, but not all that the scope around them holds."""
        counts: dict[tuple[str, ...], int] = {}
        for path in paths:
            for depth in range(len(path) + 1):
                counts[path[:depth]] = counts.get(path[:depth], 0) + 1
        homes[name, ()] = self.graph_groups[name]
        labels: dict[tuple[str, ...], int] = {}  # how much of a path its innermost group names
        for path in paths:
            for depth in range(1, len(path) + 1):
                here, outer = path[:depth], path[: depth - 1]
                if (name, here) in homes:
                    continue
                homes[name, here] = homes[name, outer]
                labels[here] = labels.get(outer, 0)
                if 1 < counts[here] < counts[outer]:
                    homes[name, here] = len(self.groups)
                    label = "/".join(here[labels[here] :])
                    labels[here] = depth
                    self.groups.append(Group(label=label, parent=homes[name, outer]))


def _both(read: list[Wire], constants: list[Constant]) -> list[Wire | Constant]:
    return [*read, *constants]


def _scopes(name: str) -> tuple[str, ...]:
    """The name scopes of an op; a leading slash starts none."""
    return tuple(name.lstrip("/").split("/")[:-1][:MAX_DEPTH])


def shape_text(output: Output) -> str:
    """`1x3x224x224`, `?` for a size that is not known before the model runs; "" where nothing is known."""
    if output.shape is None:
        return ""
    return "x".join("?" if size is None else str(size) for size in output.shape) or "scalar"
