"""Drawings for other tools, documents and terminals: JSON, GraphML, Graphviz DOT, SVG and text.

DOT omits constants, and shows quantization ops as colored nodes with their scales.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from graphquant.errors import escape_unprintable
from graphquant.ir import MAC_KINDS, Graph, Model, Op, Parameters, TensorRef
from graphquant.numerics import Array, DynamicQParams
from graphquant.qdq import read_qparams
from graphquant.visualize import JSON_SCHEMA_VERSION
from graphquant.visualize.annotations import Annotation, annotation_text
from graphquant.visualize.drawing import Box, Drawing, Wire, drawn_shape
from graphquant.visualize.viewer_data import attributes_text, box_label, box_width, drawing_layout

if TYPE_CHECKING:
    from graphquant.visualize.layout import Placement


def graph_json(drawing: Drawing) -> dict[str, Any]:
    """Return nodes and edges by number, with quantization and layout positions."""
    layout = drawing_layout(drawing)
    return {
        "schema": JSON_SCHEMA_VERSION,
        **{key: getattr(drawing, key) for key in ("title", "format", "planned")},
        "nodes": [
            {
                "id": number,
                "graph": box.graph,
                **{key: getattr(box.op, key) for key in ("name", "type", "kind")},
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
                "constants": [
                    {
                        **{key: getattr(constant, key) for key in ("slot", "role", "name")},
                        "dtype": constant.dtype or None,
                        "shape": constant.shape or None,
                        "quantization": list(constant.annotations),
                        "reason": constant.reason,
                    }
                    for constant in box.constants
                ],
                "quantization": list(box.annotations),
            }
            for number, box in enumerate(drawing.boxes)
        ],
        "edges": [
            {
                **{key: getattr(wire, key) for key in ("source", "port", "target")},
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
        **{key: getattr(annotation, key) for key in ("rule", "why", "scheme", "note")},
    }


def graph_graphml(drawing: Drawing) -> str:
    """Return GraphML for yEd, Gephi and networkx. Characters that XML cannot hold are escaped as in Python."""
    import networkx as nx

    graph: nx.MultiDiGraph[int] = nx.MultiDiGraph()
    labels = [annotation_text(annotation) for annotation in drawing.annotations]
    for number, box in enumerate(drawing.boxes):
        texts = [f"{constant.role} {labels[index]}" for constant in box.constants for index in constant.annotations]
        texts += [labels[index] for index in box.annotations]
        attributes = {
            "graph": box.graph,
            **{key: getattr(box.op, key) for key in ("name", "type", "kind")},
            "inputs": box.inputs,
            "reason": box.reason,
            "quantization": "; ".join(texts),
        }
        graph.add_node(number, **{key: escape_unprintable(value) for key, value in attributes.items()})
    for wire in drawing.wires:
        quantization, reason = "; ".join(labels[number] for number in wire.annotations), escape_unprintable(wire.reason)
        ends = {"port": wire.port, "slot": wire.slot}
        graph.add_edge(wire.source, wire.target, **ends, quantization=quantization, reason=reason)
    return "\n".join(nx.generate_graphml(graph)) + "\n"


FILL_COLOURS = {
    "quantize": "#fde68a",
    "dequantize": "#bbf7d0",
    "qdq": "#bbf7d0",
    "input": "#dbeafe",
    "output": "#dbeafe",
}


def graphviz_dot(model: Model, subdrawing: Drawing | None = None) -> str:
    """Return DOT text with one cluster per reachable graph; only the ops that `subdrawing` shows or folds, if given."""
    return "\n".join(_dot_lines(model, None if subdrawing is None else _shown_ops(subdrawing))) + "\n"


def _shown_ops(subdrawing: Drawing) -> set[tuple[str, str]]:
    """Return the ops that a drawing shows or folds."""
    boxes = subdrawing.boxes
    annotated = [(boxes[wire.target].graph, wire.annotations) for wire in subdrawing.wires]
    annotated += [(box.graph, constant.annotations) for box in boxes for constant in box.constants]
    numbered = [(graph, number) for graph, annotations in annotated for number in annotations]
    folded = {(graph, name) for graph, number in numbered for _, name in subdrawing.folded_ops[number]}
    return folded | {(box.graph, box.op.name) for box in boxes}


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
                label, fill = _dot_label(graph, op, parameters), "#ede9fe" if op.rule else "#ffffff"
                fill = _dot_quoted(FILL_COLOURS.get(op.kind, fill))
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
        stored = output.quantization
        if stored is not None and stored.scale.size and stored.zero_point.size:
            text += f"\n{output.dtype} scale {_scale_range_text(stored.scale)} zp {stored.zero_point.flat[0]}"
    return _dot_quoted(text)


def _scale_range_text(scale: Array) -> str:
    return f"{scale.min():.4g}" + (f"..{scale.max():.4g}" if scale.size > 1 else "")


def _dot_node(graph: str, op: str) -> str:
    return _dot_quoted(str(TensorRef(graph, op)).rpartition(":")[0])


def _dot_quoted(text: str) -> str:
    lines = [escape_unprintable(line).replace("\\", "\\\\").replace('"', '\\"') for line in text.split("\n")]
    return '"' + "\\n".join(lines) + '"'


RailTensor = tuple[int, int]
"""Box number and output port."""

ASCII_GLYPHS = str.maketrans("│─┼├┤╯╮●◉", "|-+++'.*@")

STATE_STYLES = {"all": "green", "some": "yellow", "none": ""}


class AsciiGraph:
    """Drawing from top to bottom for terminals, with `highlighted` ops marked and quantized inputs below each op."""

    def __init__(self, drawing: Drawing, highlighted: Sequence[int]) -> None:
        self.drawing = drawing
        self.highlighted = set(highlighted)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        lines = list(self._lines())
        if options.ascii_only:  # rich knows only now whether the terminal supports Unicode
            lines = [Text(line.plain.translate(ASCII_GLYPHS), style=line.style) for line in lines]
        yield Group(*lines)

    def _lines(self) -> Iterator[Text]:
        drawing, layout = self.drawing, drawing_layout(self.drawing)
        unread: Counter[RailTensor] = Counter()
        inputs: list[list[RailTensor]] = [[] for _ in drawing.boxes]
        order = sorted(range(len(drawing.boxes)), key=lambda box: (layout.layer[box], layout.x[box]))
        positions = {box: number for number, box in enumerate(order)}
        wires: list[list[Wire]] = [[] for _ in drawing.boxes]
        for wire in drawing.wires:
            wires[wire.target].append(wire)
            if positions[wire.source] < positions[wire.target]:  # other wires close a cycle
                unread[wire.source, wire.port] += 1
                inputs[wire.target].append((wire.source, wire.port))
        outgoing: dict[int, list[RailTensor]] = {}
        for tensor in unread:
            outgoing.setdefault(tensor[0], []).append(tensor)
        rails: list[RailTensor | None] = []
        for box in order:
            column, line = _op_line(rails, inputs[box], unread, "◉" if box in self.highlighted else "●")
            drawn = drawing.boxes[box]
            style = STATE_STYLES.get(drawn.inputs, "") or ("yellow" if drawn.reason else "")
            shape = drawn_shape(drawn.op.outputs[0]) if drawn.op.outputs else ""
            label = escape_unprintable("  ".join(filter(None, (drawn.op.type, drawn.op.name, shape))))
            yield Text(f"{line} {label}", style=style)
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


def _op_line(
    rails: list[RailTensor | None], inputs: Sequence[RailTensor], unread: dict[RailTensor, int], glyph: str
) -> tuple[int, str]:
    """Place an op on the rail of an input without later readers or on a new one; return its column and line."""
    continues_by_column: dict[int, bool] = {}  # columns that it reads; True if later ops read them too
    for tensor in inputs:
        unread[tensor] -= 1
    for tensor in dict.fromkeys(inputs):
        continues_by_column[rails.index(tensor)] = unread[tensor] > 0
    ending = [column for column, continues in sorted(continues_by_column.items()) if not continues]
    free = (position for position, rail in enumerate(rails) if rail is None)
    column = ending[0] if ending else next(free, len(rails))
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
        elif position < column:
            cells.append("  " if rail is None else "│ ")
        else:
            cells.append("──" if rail is None else "┼─")
    return "".join(cells).rstrip()


BOX_HEIGHT, ROW_GAP, MARGIN = 52, 58, 24
"""Box height, room above a box, and outer margin; the viewer uses the same numbers."""

LETTER_WIDTH = 6.4  # width of a letter in a box

GRAPH_STYLE = """
text{font:10px system-ui,sans-serif;fill:#5b6470;text-anchor:middle}
.type{font-size:12px;font-weight:600;fill:#1b1f24}.label{text-anchor:start}
.annotation{font:10px ui-monospace,monospace;fill:#fff}
.wire{fill:none;stroke:#9aa5b1;stroke-width:1.2}.into{stroke-dasharray:5 4}
.frame{fill:#5a6e8c;fill-opacity:.05;stroke:#c9d0d8}.box{fill:#eef1f4;stroke:#c9d0d8}
.io{fill:#d6e4f7}.all{fill:#c5e8cd}.some{fill:#e6edbf}.float{fill:#f7d9a8}
.b4{fill:#7c3aed}.b8{fill:#0f766e}.b16{fill:#1d4ed8}.b32{fill:#64748b}.f8{fill:#be185d}
"""


def graph_svg(drawing: Drawing) -> str:
    """Return the drawing as SVG text; deterministic."""
    return "\n".join(_svg_lines(drawing)) + "\n"


def _svg_lines(drawing: Drawing) -> Iterator[str]:
    layout = drawing_layout(drawing)
    width = layout.width + 2 * MARGIN
    height = (max(layout.layer, default=-1) + 1) * (BOX_HEIGHT + ROW_GAP) + 2 * MARGIN
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-MARGIN} {-MARGIN} {width} {height}" width="{width}">'
    yield f"<title>{escape(escape_unprintable(drawing.title))}</title><style>{GRAPH_STYLE}</style>"
    yield f'<rect x="{-MARGIN}" y="{-MARGIN}" width="{width}" height="{height}" fill="#fff"/>'
    yield from _group_frames(drawing, layout)
    pills: list[str] = []
    for number, (_, _, wires) in enumerate(drawing.tensors()):
        for wire in wires:
            yield _wire_path(drawing, layout, drawing.wires[wire], layout.trunks[number], layout.lanes[number], pills)
    for number, box in enumerate(drawing.boxes):
        yield _box_svg(drawing, box, layout.x[number], _box_top(layout, number))
    yield from pills
    yield "</svg>"


def _box_top(layout: Placement, number: int) -> int:
    return layout.layer[number] * (BOX_HEIGHT + ROW_GAP) + ROW_GAP


def _group_frames(drawing: Drawing, layout: Placement) -> Iterator[str]:
    """Yield a frame for each group, outer ones first and larger."""
    ends: dict[int, tuple[int, int, int, int]] = {}
    depths: dict[int, int] = {}
    for number, groups in enumerate(drawing.group_paths()):
        half_width, x, y = box_width(drawing.boxes[number]) // 2, layout.x[number], _box_top(layout, number)
        for depth, group in enumerate(reversed(groups)):
            left, top, right, bottom = ends.get(group, (x, y, x, y))
            left, right = min(left, x - half_width), max(right, x + half_width)
            ends[group] = (left, min(top, y), right, max(bottom, y + BOX_HEIGHT))
            depths[group] = max(depths.get(group, 0), depth)
    for group in sorted(ends):
        left, top, right, bottom = ends[group]
        pad, above = 6 + 7 * depths[group], 14 + 13 * depths[group]
        width, height = right - left + 2 * pad, bottom - top + pad + above
        yield f'<rect class="frame" x="{left - pad}" y="{top - above}" width="{width}" height="{height}"/>'
        label = _fit_text(drawing.groups[group].label, width - 8)
        yield f'<text class="label" x="{left - pad + 4}" y="{top - above + 11}">{label}</text>'


def _wire_path(
    drawing: Drawing, layout: Placement, wire: Wire, trunk: Sequence[int], lane: int, pills: list[str]
) -> str:
    """Return the path of one wire along its tensor's trunk or lane; append the labels of its annotations to `pills`."""
    x, y = layout.x[wire.source], _box_top(layout, wire.source) + BOX_HEIGHT
    path = [f"M{x} {y}"]
    layers_passed = layout.layer[wire.target] - layout.layer[wire.source] - 1
    end, bottom = layout.x[wire.target], _box_top(layout, wire.target)
    if layers_passed < 0:
        side = max(x, end) + 90
        path.append(f"C{x} {y + 50} {side} {y + 50} {side} {(y + bottom) / 2:g}S{end} {bottom - 50} {end} {bottom}")
    else:
        if lane >= 0:
            path.append(f"C{x} {y + ROW_GAP / 2:g} {lane} {y + ROW_GAP / 2:g} {lane} {y + ROW_GAP}V{bottom - ROW_GAP}")
            x, y = lane, bottom - ROW_GAP
        for waypoint in trunk[:layers_passed]:
            path.append(f"{_curve_to(x, y, waypoint, y + ROW_GAP)}V{y + ROW_GAP + BOX_HEIGHT}")
            x, y = waypoint, y + ROW_GAP + BOX_HEIGHT
        path.append(_curve_to(x, y, end, bottom))
    for position, number in enumerate(wire.annotations):
        annotation = drawing.annotations[number]
        middle, height = (x + end) / 2, (y + bottom) / 2 + 18 * position
        pills.append(_pill(annotation_text(annotation), annotation.dtype, middle, height))
    kind = "wire into" if wire.slot < 0 else "wire"
    return f'<path class="{kind}" d="{"".join(path)}"/>'


def _curve_to(x: int, y: int, end_x: int, end_y: int) -> str:
    middle = (y + end_y) / 2
    return f"V{end_y}" if x == end_x else f"C{x} {middle:g} {end_x} {middle:g} {end_x} {end_y}"


def _box_svg(drawing: Drawing, box: Box, x: int, y: int) -> str:
    width = box_width(box)
    kind = "io" if box.op.kind in {"input", "output"} else box.inputs if box.inputs in {"all", "some"} else ""
    kind = "float" if box.op.kind in MAC_KINDS and kind != "all" else kind
    elements = [f'<rect class="box {kind}" x="{x - width // 2}" y="{y}" width="{width}" height="{BOX_HEIGHT}" rx="6"/>']
    elements.append(f'<text class="type" x="{x}" y="{y + 16}">{_fit_text(box.op.type, width)}</text>')
    elements.append(f'<text x="{x}" y="{y + 30}">{_fit_text(box_label(box), width)}</text>')
    annotated = [constant for constant in box.constants if constant.annotations]
    chips = [(constant.role[:1].upper(), constant.annotations[-1]) for constant in annotated]
    chips += [("", annotation_number) for annotation_number in box.annotations]
    room = width / max(len(chips), 1)
    for number, (letter, annotation_number) in enumerate(chips):
        annotation = drawing.annotations[annotation_number]
        text = f"{letter} {annotation.dtype}" if letter or len(chips) > 1 else annotation_text(annotation)
        elements.append(_pill(text.strip(), annotation.dtype, x - width / 2 + room * (number + 0.5), y + 41, room))
    if not chips and box.op.outputs:
        elements.append(f'<text x="{x}" y="{y + 44}">{_fit_text(drawn_shape(box.op.outputs[0]), width)}</text>')
    return "".join(elements)


def _pill(text: str, dtype: str, x: float, y: float, room: float = 200) -> str:
    width = min(len(text) * 6.1 + 10, room - 2)
    bits = dtype.removeprefix("u").removeprefix("int")
    colour = next((f"b{size}" for size in (4, 8, 16) if bits.isdecimal() and int(bits) <= size), "b32")
    colour = "f8" if dtype.startswith("float8") else colour
    left, label = x - width / 2, _fit_text(text, width)
    background = f'<rect class="{colour}" x="{left:.1f}" y="{y - 8:g}" width="{width:.1f}" height="16" rx="7"/>'
    return f'{background}<text class="annotation" x="{x:g}" y="{y + 3.5:g}">{label}</text>'


def _fit_text(text: str, room: float) -> str:
    visible, max_letters = escape_unprintable(text), max(2, int(room / LETTER_WIDTH))
    return escape(visible if len(visible) <= max_letters else f"{visible[: max_letters - 1]}…")
