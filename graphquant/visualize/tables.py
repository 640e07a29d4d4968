"""Tables whose first column is a name. A name that is too long gets a line of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.text import Text

from graphquant.errors import escape_unprintable

if TYPE_CHECKING:
    from collections.abc import Collection

    from rich.console import Console, ConsoleOptions, RenderResult


COLUMN_GAP = 2
"""Spaces between columns."""

MIN_NAME_WIDTH = 16
"""Minimum width of a column of names; below it, names get lines of their own."""

CELL_INDENT = 4
"""Indentation of cells on a line of their own."""


class NameTable:
    """Table of names and their cells.

    A row that fits is one line. Names are never folded, so that they can be copied and searched.
    """

    def __init__(self, *columns: str, right: Collection[str] = ()) -> None:
        """Create a table. `columns` are the titles, the name's first; columns in `right` are right-aligned."""
        self._columns = columns
        self._right = [title in right for title in columns[1:]]
        self._rows: list[tuple[str, list[Text], str, str]] = []

    def add_row(self, name: str, *cells: str | Text, style: str = "", note: str = "") -> None:
        """Add a name and its cells; a note is printed on a line below."""
        texts = [Text(escape_unprintable(cell)) if isinstance(cell, str) else cell for cell in cells]
        self._rows.append((escape_unprintable(name), texts, style, escape_unprintable(note)))

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines for the width of the console."""
        heads = [Text(title) for title in self._columns[1:]]
        rows = [(self._columns[0], heads, "bold", ""), *self._rows]
        longest = max(Text(name).cell_len for name, *_ in rows)
        widths = [max(cell.cell_len for cell in column) for column in zip(*(row[1] for row in rows), strict=True)]
        cells_width = sum(widths) + COLUMN_GAP * len(widths)
        name_width = min(longest, options.max_width - cells_width)
        for name, cells, style, note in rows:
            padded = [
                self._padded(cell, column_number, width)
                for column_number, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            line = Text.assemble(*padded, style=style)
            line.rstrip()
            if name_width >= min(longest, MIN_NAME_WIDTH):
                overflows = Text(name).cell_len > name_width
                yield from [_unfolded_name(name, style)] if overflows else []
                label = Text(" " * name_width if overflows else name + " " * (name_width - Text(name).cell_len))
                yield Text.assemble(label, line, style=style)
            else:
                if cells_width + CELL_INDENT > options.max_width:
                    line = Text(" " * COLUMN_GAP, style).join([cell for cell in cells if cell])
                else:
                    line = line[COLUMN_GAP:]
                yield _unfolded_name(name, style)
                yield from [Padding(line, (0, 0, 0, CELL_INDENT))] if line.plain.strip() else []
            yield from [Padding(Text(note, "dim"), (0, 0, 0, COLUMN_GAP))] if note else []

    def _padded(self, cell: Text, column_number: int, width: int) -> Text:
        """Return a cell padded to the width, with a gap before it."""
        gap, spaces = Text(" " * COLUMN_GAP), Text(" " * (width - cell.cell_len))
        return Text.assemble(gap, spaces, cell) if self._right[column_number] else Text.assemble(gap, cell, spaces)


def _unfolded_name(name: str, style: str) -> Text:
    """Return a name that may be longer than the line."""
    return Text(name, style, no_wrap=True, overflow="ignore")
