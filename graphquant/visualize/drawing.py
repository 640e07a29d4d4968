"""Drawings of models: ops as boxes in groups, tensors as wires, constants and Q/DQ pairs folded into annotations.

Layouts, pages and exports use only a `Drawing`, never the model itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.analysis.model_summary import summarize_model
from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import (
    FLOAT_TYPES,
    QUANTIZATION_KINDS,
    Graph,
    Model,
    Op,
    Output,
    Parameters,
    TensorRef,
    Use,
    paused_gc,
    qualified_op_name,
)
from graphquant.ir.op_matching import is_barrier, is_inserted
from graphquant.rules import load_ruleset, shipped_rule_files
from graphquant.visualize.annotations import Annotation, AnnotationSet, annotate_model, annotate_plan, annotate_result
from graphquant.visualize.tables import group_values

if TYPE_CHECKING:
    from graphquant.analysis.range_report import RangeReport
    from graphquant.api.result import Result
    from graphquant.quantize import Plan

COMPUTE_ROLES = frozenset({"input", "weight", "recurrent_weight"})
"""Roles of the inputs that decide whether an op computes in float."""

MAX_DEPTH = 8  # number of outermost name scopes that become groups


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnConstant:
    """An op input whose value is known before the model runs, drawn on the op.

    `name` is that of the constant or of the op that computes it, `dtype` and `shape` those of the stored values.
    `reason` says why it is float although a rule matched.
    """

    slot: int
    role: str
    name: str
    dtype: str
    shape: str
    annotations: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A drawn op."""

    op: Op
    graph: str
    group: int  # number of its innermost group, -1 without one
    constants: tuple[DrawnConstant, ...] = ()
    # quantization by the op itself, or of its outputs if tensors store their own scales
    annotations: tuple[int, ...] = ()
    inputs: str = ""  # share of the float inputs that is quantized: "all", "some", "none", or "" without float inputs
    reason: str = ""  # reason why a weighted op is float, else ""
    calls: tuple[int, ...] = ()  # groups of the graphs that it runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A tensor on its way to one reader."""

    source: int  # box that produces it
    port: int  # output port of that box
    target: int  # box that reads it
    slot: int  # input slot, -1 for a wire into or out of a called graph
    annotations: tuple[int, ...] = ()  # quantization on the way
    reason: str = ""  # reason why there is none although a rule matched


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxGroup:
    """Boxes that can be collapsed into one: a name scope, or the called graph with the name `graph`.

    The label is relative to the enclosing group, whose number is `parent`, -1 without one.
    """

    label: str
    parent: int
    graph: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Complete content of a drawing."""

    title: str
    format: str  # format of the model, with its opset
    boxes: list[Box] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)  # tensors between boxes, ordered by source and port
    # quantization; boxes, wires and constants refer to it by number
    annotations: list[Annotation] = field(default_factory=list)
    # type and name of the ops that each annotation stands for
    folded_ops: list[tuple[tuple[str, str], ...]] = field(default_factory=list)
    # name scopes and nested graphs; a parent precedes its children
    groups: list[BoxGroup] = field(default_factory=list)
    # control edges: pairs of boxes that run in order without data flow
    controls: list[tuple[int, int]] = field(default_factory=list)
    planned: bool = False  # True if the annotations are a plan

    def group_paths(self) -> list[tuple[int, ...]]:
        """Return the groups of each box, outermost first."""
        paths: list[tuple[int, ...]] = []
        for number, group in enumerate(self.groups):
            paths.append((*paths[group.parent], number) if group.parent >= 0 else (number,))
        return [paths[box.group] if box.group >= 0 else () for box in self.boxes]

    def tensors(self) -> list[tuple[int, int, list[int]]]:
        """Return each drawn tensor as source box, port, and wire numbers."""
        wires_by_tensor = group_values(((wire.source, wire.port), number) for number, wire in enumerate(self.wires))
        return [(source, port, wires) for (source, port), wires in wires_by_tensor.items()]


class _DrawingBuilder:
    def __init__(self, model: Model, annotations: AnnotationSet) -> None:
        self.model, self.annotations = model, annotations
        self.parameters = Parameters(model)
        self.live = model.reachable_graphs()
        self.groups: list[BoxGroup] = []
        self.graph_groups: dict[str, int] = {"": -1}
        self.numbers: dict[tuple[str, str], int] = {}
        self.folded: list[dict[tuple[str, str], None]] = [{} for _ in annotations.annotations]
        self.sources: dict[TensorRef, tuple[TensorRef, tuple[int, ...]]] = {}

    @paused_gc()
    def build(self) -> Drawing:
        ops = [(graph, op) for graph in map(self.model.graphs.__getitem__, self.live) for op in graph.ops()]
        drawn = [(graph, op) for graph, op in ops if not self._is_folded(graph, op)]
        self.numbers = {(graph.name, op.name): number for number, (graph, op) in enumerate(drawn)}
        box_groups = self._assign_groups(drawn)
        boxes, wires = [], []
        for (graph, op), group in zip(drawn, box_groups, strict=True):
            constants, input_wires = self._split_inputs(graph, op)
            wires += input_wires
            boxes.append(self._drawn_box(graph, op, group, constants, input_wires))
        wires += self._body_wires()
        wires.sort(key=lambda wire: (wire.source, wire.port))
        controls = [
            (self.numbers[graph.name, name], target)
            for target, (graph, op) in enumerate(drawn)
            for name in graph.control_inputs(op.name)
            if (graph.name, name) in self.numbers
        ]
        return Drawing(
            title=self.model.path.name if self.model.path else "model",
            format=self.model.format + (f", opset {self.model.opset}" if self.model.opset else ""),
            boxes=boxes,
            wires=wires,
            annotations=self.annotations.annotations,
            folded_ops=[tuple(names) for names in self.folded],
            groups=self.groups,
            controls=controls,
            planned=not self.annotations.float_reasons and bool(self.annotations.by_use),
        )

    def _is_folded(self, graph: Graph, op: Op) -> bool:
        """Return True if the op is part of an annotation or a constant and gets no box."""
        if op.kind in {"constant", "variable"}:
            return True
        if is_inserted(op):
            return self._passes_through(graph, op)
        if op.kind == "output" or (op.kind == "input" and not graph.name):
            return op.read_value is not None  # old ONNX lists initializers as inputs too
        outputs = [TensorRef(graph.name, op.name, port) for port in range(len(op.outputs))]
        return bool(outputs) and all(map(self.parameters.is_parameter, outputs))

    def _passes_through(self, graph: Graph, op: Op) -> bool:
        """Return True if a quantization op, or a helper inserted with one, only forwards its first input to readers."""
        if not is_inserted(op) or is_barrier(graph, op):
            return False
        slots = graph.slots(op.name)
        if not slots or slots[0] is None or any(output.quantization is not None for output in op.outputs):
            return False
        parameters = [tensor for tensor in slots[1:] if tensor is not None]
        return set(graph.consumers_by_port(op.name)) == {0} and all(map(self.parameters.is_parameter, parameters))

    def _trace_source(self, tensor: TensorRef) -> tuple[TensorRef, tuple[int, ...]]:
        """Return the origin of a tensor and the annotations of the quantization ops before it."""
        passed_through: dict[TensorRef, None] = {}
        current = tensor
        while current not in self.sources:
            graph = self.model.graphs[current.graph]
            op = graph.op(current.op)
            if not self._passes_through(graph, op) or current in passed_through:
                self.sources[current] = current, self._stored_annotations(current)
                break
            passed_through[current] = None
            current = graph.slots(current.op)[0] or current
        pending: list[Op] = []
        for step in reversed(passed_through):
            origin, annotations = self.sources[self.model.graphs[step.graph].slots(step.op)[0] or step]
            pending.append(self.model.op(step))
            annotation = self.annotations.by_op.get(step[:2])
            if annotation is not None:
                self.folded[annotation].update({(op.type, op.name): None for op in pending})
                annotations, pending = (*annotations, annotation), []
            self.sources[step] = origin, annotations
        if pending and annotations and pending[0].kind not in QUANTIZATION_KINDS:  # a Cast after the last pair
            self.folded[annotations[-1]].update({(op.type, op.name): None for op in pending})
        return self.sources[tensor]

    def _stored_annotations(self, tensor: TensorRef) -> tuple[int, ...]:
        """Return the annotation of a tensor that stores its own scale."""
        return (self.annotations.by_tensor[tensor],) if tensor in self.annotations.by_tensor else ()

    def _split_inputs(self, graph: Graph, op: Op) -> tuple[list[DrawnConstant], list[Wire]]:
        """Split the inputs of an op into constants and wires."""
        constants, wires = [], []
        target = self.numbers[graph.name, op.name]
        for slot, tensor in enumerate(graph.slots(op.name)):
            if tensor is None:
                continue
            use = Use(graph.name, op.name, slot)
            source, annotations = self._trace_source(tensor)
            if use in self.annotations.by_use:
                annotations = (*annotations, self.annotations.by_use[use])
            reason = self.annotations.skip_reasons.get(use, "")
            if (number := self.numbers.get(source[:2])) is not None:
                wire = Wire(
                    source=number, port=source.port, target=target, slot=slot, annotations=annotations, reason=reason
                )
                wires.append(wire)
                continue
            origin = self.parameters.root_tensor(source)
            output = self.model.output(origin)
            constant = DrawnConstant(
                slot=slot,
                role=op.role(slot),
                name=qualified_op_name(origin.graph, origin.op),
                dtype=output.dtype or "",
                shape=drawn_shape(output),
                annotations=annotations,
                reason=reason,
            )
            constants.append(constant)
        return constants, wires

    def _drawn_box(
        self, graph: Graph, op: Op, group: int, constants: list[DrawnConstant], input_wires: list[Wire]
    ) -> Box:
        key = (graph.name, op.name)
        annotations = [self.annotations.by_op[key]] if key in self.annotations.by_op else []
        for port in range(len(op.outputs)):
            annotations += self._stored_annotations(TensorRef(graph.name, op.name, port))
        inputs: list[Wire | DrawnConstant] = [*input_wires, *constants]
        quantized = self._quantized_share(graph, op, inputs)
        reason = self.annotations.float_reasons.get(key, "")
        if quantized in {"some", "none"} and not reason:
            reason = next((input_.reason for input_ in inputs if input_.reason), "")
        return Box(
            op=op,
            graph=graph.name,
            group=group,
            constants=tuple(constants),
            annotations=tuple(annotations),
            inputs=quantized,
            reason=reason,
            calls=tuple(self.graph_groups[call.graph] for call in op.calls if call.graph in self.graph_groups),
        )

    def _quantized_share(self, graph: Graph, op: Op, inputs: list[Wire | DrawnConstant]) -> str:
        """Return the quantized share of the inputs that the op computes on."""
        if self.annotations.float_reasons.get((graph.name, op.name)) == "":
            return "all"
        slots = graph.slots(op.name)
        is_annotated = []
        for input_ in inputs:
            tensor = slots[input_.slot]
            if op.role(input_.slot) not in COMPUTE_ROLES or tensor is None:
                continue
            if input_.annotations or self.model.output(tensor).dtype in FLOAT_TYPES | {None}:
                is_annotated.append(bool(input_.annotations))
        if not is_annotated or op.kind == "output":
            return ""
        return "all" if all(is_annotated) else "some" if any(is_annotated) else "none"

    def _body_wires(self) -> Iterator[Wire]:
        """Yield the wires into and out of each graph that exactly one op runs."""
        reached = set(self.live)
        for name, calls in self.model.callers().items():
            reachable_calls = [(use, call) for use, call in calls if use.graph in reached]
            if len(reachable_calls) != 1 or name not in reached:
                continue
            (owner, call), body = reachable_calls[0], self.model.graphs[name]
            target = self.numbers.get((owner.graph, owner.op))
            if target is None:  # a damaged Q/DQ op with a body, which is drawn as an annotation
                continue
            for output in body.outputs:
                yield Wire(source=self.numbers[name, output], port=0, target=target, slot=-1)
            slots = self.model.graphs[owner.graph].slots(owner.op)
            for position, body_input in enumerate(body.inputs if call.offset is not None else ()):
                slot = position - (call.offset or 0)
                tensor = slots[slot] if 0 <= slot < len(slots) else None
                source = None if tensor is None else self._trace_source(tensor)[0]
                entered = self.numbers.get((name, body_input))  # None for an argument that is always the same constant
                if entered is not None and source is not None and source[:2] in self.numbers:
                    yield Wire(source=self.numbers[source[:2]], port=source.port, target=entered, slot=-1)

    def _assign_groups(self, drawn: list[tuple[Graph, Op]]) -> list[int]:
        """Create the groups, and return the innermost group of each op."""
        by_graph: dict[str, list[tuple[str, ...]]] = {name: [] for name in self.live}
        for graph, op in drawn:
            by_graph[graph.name].append(_name_scopes(op.name))
        callers = self.model.callers()
        group_by_scope: dict[tuple[str, tuple[str, ...]], int] = {}
        for name, paths in by_graph.items():
            if name:
                self.graph_groups[name] = len(self.groups)
                owners = dict.fromkeys(use[:2] for use, _ in callers.get(name, ()))
                parent = -1
                if len(owners) == 1:
                    ((graph_name, op_name),) = owners
                    parent = group_by_scope.get((graph_name, _name_scopes(op_name)), -1)
                outer = self.model.graphs[name].parent
                label = name.removeprefix(f"{outer[0]}/") if outer is not None and outer[0] else name
                self.groups.append(BoxGroup(label=label, parent=parent, graph=name))
            self._add_scope_groups(name, paths, group_by_scope)
        return [group_by_scope[graph.name, _name_scopes(op.name)] for graph, op in drawn]

    def _add_scope_groups(
        self, name: str, paths: list[tuple[str, ...]], group_by_scope: dict[tuple[str, tuple[str, ...]], int]
    ) -> None:
        """Create a group for each scope of a graph that holds several ops, but not all ops of the scope around it."""
        counts = Counter(path[:depth] for path in paths for depth in range(len(path) + 1))
        group_by_scope[name, ()] = self.graph_groups[name]
        labels: dict[tuple[str, ...], int] = {}  # number of path components in the label of its innermost group
        for path in paths:
            for depth in range(1, len(path) + 1):
                scope, outer_scope = path[:depth], path[: depth - 1]
                if (name, scope) in group_by_scope:
                    continue
                group_by_scope[name, scope] = group_by_scope[name, outer_scope]
                labels[scope] = labels.get(outer_scope, 0)
                if 1 < counts[scope] < counts[outer_scope]:
                    group_by_scope[name, scope] = len(self.groups)
                    label = "/".join(scope[labels[scope] :])
                    labels[scope] = depth
                    self.groups.append(BoxGroup(label=label, parent=group_by_scope[name, outer_scope]))


def _name_scopes(name: str) -> tuple[str, ...]:
    """Return the name scopes of an op; a leading slash starts none."""
    return tuple(name.lstrip("/").split("/")[:-1][:MAX_DEPTH])


def drawn_shape(output: Output) -> str:
    """Return a shape like `1x3x224x224`; `?` for an unknown size, "" for an unknown shape."""
    if output.shape is None:
        return ""
    return "x".join("?" if size is None else str(size) for size in output.shape) or "scalar"


def model_drawing(model: Model, range_report: RangeReport | None = None) -> Drawing:
    """Draw a model with its quantization, and with statistics of tensors of the same name."""
    summary = summarize_model(model)
    names = {reading.rule for reading in summary.quantization_ops if reading.rule}
    return _DrawingBuilder(model, annotate_model(summary, _rule_reasons(model, names), range_report)).build()


def plan_drawing(prepared: Model, plan: Plan, range_report: RangeReport | None = None) -> Drawing:
    """Draw the prepared model of a plan with the planned quantization."""
    return _DrawingBuilder(prepared, annotate_plan(plan, range_report)).build()


def result_drawing(result: Result) -> Drawing:
    """Draw the result of `insert`, with the histograms behind its ranges."""
    return _DrawingBuilder(result.model, annotate_result(result, summarize_model(result.model))).build()


def _rule_reasons(model: Model, names: set[str]) -> dict[str, str]:
    """Return the reasons of the named rules, from the shipped rule files."""
    reasons: dict[str, str] = {}
    if not model.traits.rewritable:
        return reasons
    for file in dict.fromkeys((formats.format_module(model.format).DEFAULT_RULES, *shipped_rule_files())):
        if names <= set(reasons):
            break
        for bound in load_ruleset([file]).rules:
            reasons.setdefault(bound.rule.name, bound.rule.why)
    return reasons


def neighborhood(drawing: Drawing, name: str, hops: int) -> tuple[Drawing, list[int]]:
    """Cut out the boxes within `hops` wires of an op, a tensor, or an op that an annotation stands for.

    The numbers of the boxes that `name` matches are returned too. If there are none, a UsageError is raised.
    """
    matches = _boxes_by_name(drawing, name)
    neighbors: list[list[int]] = [[] for _ in drawing.boxes]
    for wire in drawing.wires:
        neighbors[wire.source].append(wire.target)
        neighbors[wire.target].append(wire.source)
    reached, frontier = set(matches), set(matches)
    while frontier and hops:
        frontier = {neighbor for box in frontier for neighbor in neighbors[box]} - reached
        reached |= frontier
        hops -= 1
    numbers = {box: number for number, box in enumerate(sorted(reached))}
    wires = [wire for wire in drawing.wires if wire.source in numbers and wire.target in numbers]
    subdrawing = replace(
        drawing,
        boxes=[drawing.boxes[box] for box in numbers],
        wires=[replace(wire, source=numbers[wire.source], target=numbers[wire.target]) for wire in wires],
        controls=[(numbers[start], numbers[end]) for start, end in drawing.controls if {start, end} <= reached],
    )
    return subdrawing, [numbers[box] for box in matches]


def _boxes_by_name(drawing: Drawing, name: str) -> list[int]:
    names: dict[str, list[int]] = defaultdict(list)
    for box_number, box in enumerate(drawing.boxes):
        full_name = qualified_op_name(box.graph, box.op.name)
        names[full_name].append(box_number)
        for port, output in enumerate(box.op.outputs):
            names[f"{full_name}:{port}"].append(box_number)
            names[output.name].append(box_number)
        for constant in box.constants:
            names[constant.name].append(box_number)
    for wire in drawing.wires:
        for badge in wire.annotations:
            for _, folded_name in drawing.folded_ops[badge]:
                names[folded_name].append(wire.target)
    if name not in names:
        hint = did_you_mean(name, names) or " `graphquant inspect --format graph-json` lists the names."
        raise UsageError(f"The drawing has nothing named {name!r}.{hint}")
    return list(dict.fromkeys(names[name]))
