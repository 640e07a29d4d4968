"""Tables whose first column is a name: one that is too long for its column stands on a line of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.text import Text

from graphquant.errors import printable

if TYPE_CHECKING:
    from collections.abc import Collection

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

    def __init__(self, *columns: str, right: Collection[str] = ()) -> None:
        """`columns` are the titles, that of the name first; those in `right` are of numbers, which end alike."""
        self._columns = columns
        self._right = [title in right for title in columns[1:]]
        self._rows: list[tuple[str, list[Text], str, str]] = []

    def add_row(self, name: str, *cells: str | Text, style: str = "", note: str = "") -> None:
        """Adds a name and what is told of it; a note stands on a line below."""
        told = [Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells]
        self._rows.append((printable(name), told, style, printable(note)))

    @property
    def row_count(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines for a console of that width."""
        heads = [Text(title) for title in self._columns[1:]]
        rows = [(self._columns[0], heads, "bold", ""), *self._rows]
        longest = max(Text(name).cell_len for name, *_ in rows)
        widths = [max(cell.cell_len for cell in column) for column in zip(*(row[1] for row in rows), strict=True)]
        rest = sum(widths) + GAP * len(widths)
        first = min(longest, options.max_width - rest)
        for name, cells, style, note in rows:
            told = [
                self._padded(cell, place, width) for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            line = Text.assemble(*told, style=style)
            line.rstrip()
            if first >= min(longest, NARROW):
                long = Text(name).cell_len > first
                yield from [_whole(name, style)] if long else []
                beside = Text(" " * first if long else name + " " * (first - Text(name).cell_len))
                yield Text.assemble(beside, line, style=style)
            else:
                if rest + INDENT > options.max_width:
                    line = Text(" " * GAP, style).join([cell for cell in cells if cell])
                else:
                    line = line[GAP:]
                yield _whole(name, style)
                yield from [Padding(line, (0, 0, 0, INDENT))] if line.plain.strip() else []
            yield from [Padding(Text(note, "dim"), (0, 0, 0, GAP))] if note else []

    def _padded(self, cell: Text, place: int, width: int) -> Text:
        """A cell with spaces up to the width, and a gap in front."""
        gap, spaces = Text(" " * GAP), Text(" " * (width - cell.cell_len))
        return Text.assemble(gap, spaces, cell) if self._right[place] else Text.assemble(gap, cell, spaces)


def _whole(name: str, style: str) -> Text:
    """A name that may be longer than the line."""
    return Text(name, style, no_wrap=True, overflow="ignore")


__all__ = ["Listing"]
