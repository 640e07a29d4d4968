"""Drawings for other tools: JSON, GraphML and Graphviz DOT.

DOT omits constants, and shows quantization ops as colored nodes with their scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from graphquant.errors import escape_unprintable
from graphquant.ir import Graph, Model, Op, Parameters, TensorRef
from graphquant.numerics import DynamicQParams
from graphquant.qdq import read_qparams
from graphquant.visualize import JSON_SCHEMA_VERSION
from graphquant.visualize.annotations import annotation_text
from graphquant.visualize.drawing import drawn_shape
from graphquant.visualize.viewer_data import attributes_text, drawing_layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions

    from graphquant.numerics import Array
    from graphquant.visualize.annotations import Annotation
    from graphquant.visualize.drawing import Box, Drawing, DrawnConstant, Wire


def graph_json(drawing: Drawing) -> dict[str, Any]:
    """Return nodes and edges by number, with quantization and layout positions."""
    layout = drawing_layout(drawing)
    return {
        "schema": JSON_SCHEMA_VERSION,
        "title": drawing.title,
        "format": drawing.format,
        "planned": drawing.planned,
        "nodes": [
            {
                "id": number,
                "graph": box.graph,
                "name": box.op.name,
                "type": box.op.type,
                "kind": box.op.kind,
                "group": box.group if box.group >= 0 else None,
                "layer": layout.layer[number],
                "x": layout.x[number],
                "inputs": box.inputs or None,
                "reason": box.reason,
                "rule": box.op.rule,
                "attributes": attributes_text(box.op).split("\n") if box.op.attrs else [],
                "outputs": [
                    {"name": out.name, "dtype": out.dtype, "shape": None if out.shape is None else list(out.shape)}
                    for out in box.op.outputs
                ],
                "constants": [_constant_json(constant) for constant in box.constants],
                "quantization": list(box.annotations),
            }
            for number, box in enumerate(drawing.boxes)
        ],
        "edges": [
            {
                "source": wire.source,
                "port": wire.port,
                "target": wire.target,
                "slot": wire.slot if wire.slot >= 0 else None,
                "quantization": list(wire.annotations),
                "reason": wire.reason,
            }
            for wire in drawing.wires
        ],
        "groups": [
            {"label": group.label, "parent": group.parent if group.parent >= 0 else None, "graph": group.graph or None}
            for group in drawing.groups
        ],
        "quantization": [
            _annotation_json(annotation, ops)
            for annotation, ops in zip(drawing.annotations, drawing.folded_ops, strict=True)
        ],
    }


def _constant_json(constant: DrawnConstant) -> dict[str, Any]:
    return {
        "slot": constant.slot,
        "role": constant.role,
        "name": constant.name,
        "dtype": constant.dtype or None,
        "shape": constant.shape or None,
        "quantization": list(constant.annotations),
        "reason": constant.reason,
    }


def _annotation_json(annotation: Annotation, ops: Sequence[tuple[str, str]]) -> dict[str, Any]:
    params = annotation.params
    return {
        "tensor": annotation.tensor._asdict(),
        "ops": [{"type": type_, "name": name} for type_, name in ops],
        "dtype": annotation.dtype or None,
        "dynamic": annotation.dynamic,
        "scale": None if params is None else params.scale.astype(float).tolist(),
        "zero_point": None if params is None else params.zero_point.tolist(),
        "axis": None if params is None else params.axis,
        "rule": annotation.rule,
        "why": annotation.why,
        "scheme": annotation.scheme,
        "note": annotation.note,
    }


def graph_graphml(drawing: Drawing) -> str:
    """Return GraphML for yEd, Gephi and networkx. Characters that XML cannot hold are escaped as in Python."""
    import networkx as nx

    graph: nx.MultiDiGraph[int] = nx.MultiDiGraph()
    for number, box in enumerate(drawing.boxes):
        identity = {"graph": box.graph, "name": box.op.name, "type": box.op.type, "kind": box.op.kind}
        annotation_texts = [
            f"{constant.role} {annotation_text(drawing.annotations[number])}"
            for constant in box.constants
            for number in constant.annotations
        ]
        annotation_texts += [annotation_text(drawing.annotations[mark]) for mark in box.annotations]
        attributes = {
            **identity,
            "inputs": box.inputs,
            "reason": box.reason,
            "quantization": "; ".join(annotation_texts),
        }
        graph.add_node(number, **{key: escape_unprintable(value) for key, value in attributes.items()})
    for wire in drawing.wires:
        wire_annotations = "; ".join(annotation_text(drawing.annotations[mark]) for mark in wire.annotations)
        graph.add_edge(
            wire.source,
            wire.target,
            port=wire.port,
            slot=wire.slot,
            quantization=wire_annotations,
            reason=escape_unprintable(wire.reason),
        )
    return "\n".join(nx.generate_graphml(graph)) + "\n"


FILL_COLOURS = {
    "quantize": "#fde68a",
    "dequantize": "#bbf7d0",
    "qdq": "#bbf7d0",
    "input": "#dbeafe",
    "output": "#dbeafe",
}


def graphviz_dot(model: Model, subdrawing: Drawing | None = None) -> str:
    """Return DOT text with one cluster per reachable graph.

    Args:
        model: The model.
        subdrawing: Limits the ops to those in it, including folded quantization ops.
    """
    return "\n".join(_dot_lines(model, None if subdrawing is None else _shown_ops(subdrawing))) + "\n"


def _shown_ops(subdrawing: Drawing) -> set[tuple[str, str]]:
    """Return the ops that a drawing shows or folds."""
    boxed = {(box.graph, box.op.name) for box in subdrawing.boxes}
    annotated = [
        (subdrawing.boxes[wire.target].graph, annotation)
        for wire in subdrawing.wires
        for annotation in wire.annotations
    ]
    annotated += [
        (box.graph, annotation)
        for box in subdrawing.boxes
        for constant in box.constants
        for annotation in constant.annotations
    ]
    return boxed | {(graph, name) for graph, annotation in annotated for _, name in subdrawing.folded_ops[annotation]}


def _dot_lines(model: Model, selection: set[tuple[str, str]] | None) -> Iterator[str]:
    parameters = Parameters(model)
    yield "digraph graphquant {"
    yield '  rankdir=TB; node [shape=box, style="rounded,filled", fillcolor=white, fontname=Helvetica, fontsize=10];'
    yield "  edge [fontname=Helvetica, fontsize=8];"
    for number, name in enumerate(model.reachable_graphs()):
        graph = model.graphs[name]
        if name:
            yield f"  subgraph cluster_{number} {{ label={_dot_quoted(name)};"
        for op in graph.ops():
            if op.kind != "constant" and (selection is None or (name, op.name) in selection):
                label, fill = _dot_label(graph, op, parameters), _dot_quoted(_fill_colour(op))
                yield f"  {_dot_node(name, op.name)} [label={label}, fillcolor={fill}];"
        if name:
            yield "  }"
    for name in model.reachable_graphs():
        yield from _dot_edges(model.graphs[name], selection)
    yield "}"


def _dot_edges(graph: Graph, selection: set[tuple[str, str]] | None) -> Iterator[str]:
    for op in graph.ops():
        for slot, tensor in enumerate(graph.slots(op.name)):
            if tensor is None or graph.graphs[tensor.graph].op(tensor.op).kind == "constant":
                continue
            if selection is not None and not {(graph.name, op.name), tensor[:2]} <= selection:
                continue
            role = op.role(slot)
            label = "" if role == "input" else f" [label={_dot_quoted(role)}]"
            yield f"  {_dot_node(tensor.graph, tensor.op)} -> {_dot_node(graph.name, op.name)}{label};"


def _dot_label(graph: Graph, op: Op, parameters: Parameters) -> str:
    text = f"{op.name}\n{op.type}" if op.kind not in {"input", "output"} else op.name.removeprefix("@")
    params = read_qparams(graph, op, parameters)
    if isinstance(params, DynamicQParams):
        text += f"\n{params.type.name} dynamic"
    elif params is not None:
        text += f"\n{params.type.name} scale {_scale_range_text(params.scale)} zp {params.zero_point.flat[0]}"
    for output in op.outputs:
        if output.quantization is not None and output.quantization.scale.size and output.quantization.zero_point.size:
            text += (
                f"\n{output.dtype} scale {_scale_range_text(output.quantization.scale)} zp"
                f" {output.quantization.zero_point[0]}"
            )
    return _dot_quoted(text)


def _scale_range_text(scale: Array) -> str:
    return f"{scale.min():.4g}" + (f"..{scale.max():.4g}" if scale.size > 1 else "")


def _fill_colour(op: Op) -> str:
    return FILL_COLOURS.get(op.kind, "#ede9fe" if op.rule else "#ffffff")


def _dot_node(graph: str, op: str) -> str:
    return _dot_quoted(str(TensorRef(graph, op)).rpartition(":")[0])


def _dot_quoted(text: str) -> str:
    lines = [escape_unprintable(line).replace("\\", "\\\\").replace('"', '\\"') for line in text.split("\n")]
    return '"' + "\\n".join(lines) + '"'


RailTensor = tuple[int, int]
"""Box number and output port."""

ASCII_GLYPHS = str.maketrans("│─┼├┤╯╮●◉", "|-+++'.*@")

STATE_STYLES = {"all": "green", "some": "yellow", "none": ""}


def ascii_graph(drawing: Drawing, highlighted: Sequence[int]) -> RenderableType:
    """Draw the ops from top to bottom, with `highlighted` ones marked and quantized inputs below each op."""
    return _AsciiGraph(drawing, highlighted)


class _AsciiGraph:
    """Renderable drawing. rich tells only at rendering time whether the terminal supports Unicode."""

    def __init__(self, drawing: Drawing, highlighted: Sequence[int]) -> None:
        self.drawing = drawing
        self.highlighted = set(highlighted)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        lines = list(self._lines())
        if options.ascii_only:
            lines = [Text(line.plain.translate(ASCII_GLYPHS), style=line.style) for line in lines]
        yield Group(*lines)

    def _lines(self) -> Iterator[Text]:
        drawing, layout = self.drawing, drawing_layout(self.drawing)
        unread: dict[RailTensor, int] = {}
        inputs: list[list[RailTensor]] = [[] for _ in drawing.boxes]
        order = sorted(range(len(drawing.boxes)), key=lambda box: (layout.layer[box], layout.x[box]))
        positions = {box: number for number, box in enumerate(order)}
        wires: list[list[Wire]] = [[] for _ in drawing.boxes]
        for wire in drawing.wires:
            wires[wire.target].append(wire)
            if positions[wire.source] < positions[wire.target]:  # other wires close a cycle
                unread[wire.source, wire.port] = unread.get((wire.source, wire.port), 0) + 1
                inputs[wire.target].append((wire.source, wire.port))
        outgoing: dict[int, list[RailTensor]] = {}
        for tensor in unread:
            outgoing.setdefault(tensor[0], []).append(tensor)
        rails: list[RailTensor | None] = []
        for box in order:
            column, line = _op_line(rails, inputs[box], unread, "◉" if box in self.highlighted else "●")
            drawn = drawing.boxes[box]
            yield Text(
                f"{line} {_box_label(drawn)}",
                style=STATE_STYLES.get(drawn.inputs, "") or ("yellow" if drawn.reason else ""),
            )
            outputs = outgoing.get(box, [])
            rails[column] = outputs[0] if outputs else None
            if len(outputs) > 1:
                yield Text(_fork_line(rails, column, outputs[1:]))
            while rails and rails[-1] is None:
                rails.pop()
            passing = "".join("  " if rail is None else "│ " for rail in rails)
            for detail in self._op_details(drawn, wires[box]):
                yield Text(f"{passing}    {detail}", style="dim")

    def _op_details(self, box: Box, wires: Sequence[Wire]) -> Iterator[str]:
        """Yield the quantized inputs of an op, and the reason why it is float."""
        annotations = self.drawing.annotations
        annotated_inputs = [(wire.slot, box.op.role(wire.slot), wire.annotations) for wire in wires]
        annotated_inputs += [(constant.slot, constant.role, constant.annotations) for constant in box.constants]
        for _, role, numbers in sorted(annotated_inputs):
            for number in numbers:
                rule = f" by rule {annotations[number].rule}" if annotations[number].rule else ""
                yield escape_unprintable(f"{role}: {annotation_text(annotations[number])}{rule}")
        for badge in box.annotations:
            yield escape_unprintable(annotation_text(annotations[badge]))
        if box.reason:
            yield escape_unprintable(f"float: {box.reason}")


def _box_label(box: Box) -> str:
    shape = drawn_shape(box.op.outputs[0]) if box.op.outputs else ""
    return escape_unprintable("  ".join(text for text in (box.op.type, box.op.name, shape) if text))


def _op_line(
    rails: list[RailTensor | None], inputs: Sequence[RailTensor], unread: dict[RailTensor, int], glyph: str
) -> tuple[int, str]:
    """Place an op on a rail, and return its column and line.

    The op takes the rail of an input without later readers, or a new one.
    """
    continues_by_column: dict[int, bool] = {}  # columns that it reads; True if later ops read them too
    for tensor in inputs:
        unread[tensor] -= 1
    for tensor in dict.fromkeys(inputs):
        continues_by_column[rails.index(tensor)] = unread[tensor] > 0
    ending = [column for column, continues in sorted(continues_by_column.items()) if not continues]
    column = (
        ending[0] if ending else next((position for position, rail in enumerate(rails) if rail is None), len(rails))
    )
    if column == len(rails):
        rails.append(None)
    reach = [*continues_by_column, column]
    cells = []
    for position, rail in enumerate(rails):
        inside = min(reach) <= position < max(reach)
        if position == column:
            cell = glyph
        elif position in continues_by_column:
            # The op takes the leftmost rail that ends, so every rail to the left of it continues.
            cell = "├" if position < column else ("┤" if continues_by_column[position] else "╯")
            cell = "┼" if min(reach) < position < max(reach) else cell
        else:
            cell = " " if rail is None else "│"
            cell = ("┼" if rail is not None else "─") if min(reach) < position < max(reach) else cell
        cells.append(cell + ("─" if inside else " "))
    for position, continues in continues_by_column.items():
        if not continues:
            rails[position] = None
    return column, "".join(cells).rstrip()


def _fork_line(rails: list[RailTensor | None], column: int, outputs: Sequence[RailTensor]) -> str:
    """Add rails for further outputs of the op at `column`, and return the line that shows them."""
    first = len(rails)
    rails += outputs
    cells = []
    for position, rail in enumerate(rails):
        if position == column:
            cells.append("├─")
        elif position >= first:
            cells.append("╮ " if position == len(rails) - 1 else "┼─")
        else:
            cells.append(
                (" " if rail is None else "│") + " " if position < column else ("─" if rail is None else "┼") + "─"
            )
    return "".join(cells).rstrip()
