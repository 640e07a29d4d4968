"""Small drawings as text: one op per line, with tensors as rails at the left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from graphquant.errors import escape_unprintable
from graphquant.visualize.annotations import annotation_text
from graphquant.visualize.drawing import drawn_shape
from graphquant.visualize.viewer_data import drawing_layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions

    from graphquant.visualize.drawing import Box, Drawing, Wire


RailTensor = tuple[int, int]
"""Box number and output port."""

ASCII_GLYPHS = str.maketrans("│─┼├┤╯╰╮●◉", "|-+++'`.*@")

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
            cell = (
                ("├" if continues_by_column[position] else "╰")
                if position < column
                else ("┤" if continues_by_column[position] else "╯")
            )
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
