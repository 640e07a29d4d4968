"""Tables whose first column is a name: one that is too long for its column stands on a line of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.text import Text

from graphquant.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

GAP = 2
"""Spaces between columns."""

NARROW = 16
"""Columns below which a name's column is too small to have any."""

INDENT = 4
"""Spaces before what is told of a name, where that has lines of its own."""


class Listing:
    """Rows of a name and what is told of it.

    Where all of a row fits in a line it is a table. Names are never folded, so that they can be copied and found.
    """

    def __init__(self, *columns: str) -> None:
        """`columns` are the titles, that of the name first."""
        self._columns = columns
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Adds a name and what is told of it."""
        self._rows.append(tuple(map(printable, cells)))

    @property
    def row_count(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines for a console of that width."""
        rows = [self._columns, *self._rows]
        widths = [max(Text(cell).cell_len for cell in column) for column in zip(*rows, strict=True)]
        rest = sum(widths[1:]) + GAP * (len(widths) - 1)
        first = min(widths[0], options.max_width - rest)
        for number, (name, *cells) in enumerate(rows):
            style = "bold" if number == 0 else ""
            told = "".join(_padded(cell, width) for cell, width in zip(cells, widths[1:], strict=True)).rstrip()
            if first >= min(widths[0], NARROW):
                long = Text(name).cell_len > first
                yield from [_whole(name, style)] if long else []
                yield Text(f"{' ' * first if long else _padded(name, first, gap=0, before=False)}{told}", style)
            else:
                if rest + INDENT > options.max_width:
                    told = (" " * GAP).join(filter(None, cells))
                yield _whole(name, style)
                yield from [Padding(Text(told.strip(), style), (0, 0, 0, INDENT))] if told.strip() else []


def _whole(name: str, style: str) -> Text:
    """A name that may be longer than the line."""
    return Text(name, style, no_wrap=True, overflow="ignore")


def _padded(cell: str, width: int, *, gap: int = GAP, before: bool = True) -> str:
    """A cell with spaces up to the width, and a gap in front."""
    filled = cell + " " * (width - Text(cell).cell_len)
    return " " * gap + filled if before else filled


__all__ = ["Listing"]
