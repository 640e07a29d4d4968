"""A small drawing as text: an op a line, with the tensors that pass as rails at the left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from graphquant.errors import printable
from graphquant.view.badge_text import badge_text
from graphquant.view.drawing import shape_text
from graphquant.view.payload import placed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions

    from graphquant.view.drawing import Box, Drawing, Wire

Tensor = tuple[int, int]
"""A box and its port."""

ASCII = str.maketrans("│─┼├┤╯╰╮●◉", "|-+++'`.*@")

STATES = {"all": "green", "some": "yellow", "none": ""}


def rails_view(drawing: Drawing, chosen: Sequence[int]) -> RenderableType:
    """The ops from top to bottom, `chosen` ones marked, each with its quantized inputs below it."""
    return _Rails(drawing, chosen)


class _Rails:
    """What rich prints; it knows only then whether the terminal has more than ASCII."""

    def __init__(self, drawing: Drawing, chosen: Sequence[int]) -> None:
        self.drawing = drawing
        self.chosen = set(chosen)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        lines = list(self._lines())
        if options.ascii_only:
            lines = [Text(line.plain.translate(ASCII), style=line.style) for line in lines]
        yield Group(*lines)

    def _lines(self) -> Iterator[Text]:
        drawing, layout = self.drawing, placed(self.drawing)
        left: dict[Tensor, int] = {}
        read: list[list[Tensor]] = [[] for _ in drawing.boxes]
        order = sorted(range(len(drawing.boxes)), key=lambda box: (layout.layer[box], layout.x[box]))
        place = {box: number for number, box in enumerate(order)}
        wires: list[list[Wire]] = [[] for _ in drawing.boxes]
        for wire in drawing.wires:
            wires[wire.target].append(wire)
            if place[wire.source] < place[wire.target]:  # others close a cycle
                left[wire.source, wire.port] = left.get((wire.source, wire.port), 0) + 1
                read[wire.target].append((wire.source, wire.port))
        outgoing: dict[int, list[Tensor]] = {}
        for tensor in left:
            outgoing.setdefault(tensor[0], []).append(tensor)
        rails: list[Tensor | None] = []
        for box in order:
            column, line = _node(rails, read[box], left, "◉" if box in self.chosen else "●")
            told = drawing.boxes[box]
            yield Text(f"{line} {_named(told)}", style=STATES.get(told.inputs, "") or ("yellow" if told.reason else ""))
            made = outgoing.get(box, [])
            rails[column] = made[0] if made else None
            if len(made) > 1:
                yield Text(_fork(rails, column, made[1:]))
            while rails and rails[-1] is None:
                rails.pop()
            passing = "".join("  " if one is None else "│ " for one in rails)
            for said in self._below(told, wires[box]):
                yield Text(f"{passing}    {said}", style="dim")

    def _below(self, box: Box, wires: Sequence[Wire]) -> Iterator[str]:
        """The op's quantized inputs, and why it is float."""
        badges = self.drawing.badges
        marked = [(wire.slot, box.op.role(wire.slot), wire.badges) for wire in wires]
        marked += [(one.slot, one.role, one.badges) for one in box.constants]
        for _, role, found in sorted(marked):
            for badge in found:
                rule = f" by rule {badges[badge].rule}" if badges[badge].rule else ""
                yield printable(f"{role}: {badge_text(badges[badge])}{rule}")
        for badge in box.badges:
            yield printable(badge_text(badges[badge]))
        if box.reason:
            yield printable(f"float: {box.reason}")


def _named(box: Box) -> str:
    shape = shape_text(box.op.outputs[0]) if box.op.outputs else ""
    return printable("  ".join(part for part in (box.op.type, box.op.name, shape) if part))


def _node(rails: list[Tensor | None], read: Sequence[Tensor], left: dict[Tensor, int], sign: str) -> tuple[int, str]:
    """Puts an op on a rail: that of an input which nobody reads after it, or a new one. Its column and line."""
    joined: dict[int, bool] = {}  # columns that it reads, and whether others still read them
    for tensor in read:
        left[tensor] -= 1
    for tensor in dict.fromkeys(read):
        joined[rails.index(tensor)] = left[tensor] > 0
    ending = [column for column, goes_on in sorted(joined.items()) if not goes_on]
    column = ending[0] if ending else next((at for at, one in enumerate(rails) if one is None), len(rails))
    if column == len(rails):
        rails.append(None)
    reach = [*joined, column]
    cells = []
    for at, one in enumerate(rails):
        inside = min(reach) <= at < max(reach)
        if at == column:
            cell = sign
        elif at in joined:
            cell = ("├" if joined[at] else "╰") if at < column else ("┤" if joined[at] else "╯")
            cell = "┼" if min(reach) < at < max(reach) else cell
        else:
            cell = " " if one is None else "│"
            cell = ("┼" if one is not None else "─") if min(reach) < at < max(reach) else cell
        cells.append(cell + ("─" if inside else " "))
    for at, goes_on in joined.items():
        if not goes_on:
            rails[at] = None
    return column, "".join(cells).rstrip()


def _fork(rails: list[Tensor | None], column: int, more: Sequence[Tensor]) -> str:
    """Gives further outputs of the op at `column` rails of their own, right of all; the line that shows it."""
    first = len(rails)
    rails += more
    cells = []
    for at, one in enumerate(rails):
        if at == column:
            cells.append("├─")
        elif at >= first:
            cells.append("╮ " if at == len(rails) - 1 else "┼─")
        else:
            cells.append((" " if one is None else "│") + " " if at < column else ("─" if one is None else "┼") + "─")
    return "".join(cells).rstrip()
