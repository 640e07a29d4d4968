"""Building blocks of terminal output: consoles, lines, and tables whose first column is a name."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from io import StringIO
from typing import IO, TYPE_CHECKING, TypeVar

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from graphquant.errors import escape_unprintable

if TYPE_CHECKING:
    from graphquant.numerics import Array


Key = TypeVar("Key")
Value = TypeVar("Value")

NAMES_SHOWN = 3  # names in a cell; the remaining ones are counted
UNFOLDED_WIDTH = 10_000  # width for output that is not a terminal: one line per site, for grep and diff
COLUMN_GAP = 2  # spaces between columns
MIN_NAME_WIDTH = 16  # minimum width of a column of names; below it, names get lines of their own
CELL_INDENT = 4  # indentation of cells on a line of their own


def make_console(*, stderr: bool = False, file: IO[str] | None = None) -> Console:
    """Create a console that folds at the width of a terminal or of COLUMNS, and otherwise never.

    Markup and emoji codes such as [red] and :x: in names are printed unchanged.
    """
    build = partial(Console, stderr=stderr, file=file, highlight=False, markup=False, emoji=False)
    default = build()
    if file is None and (default.is_terminal or os.environ.get("COLUMNS", "").isdecimal()):
        return default
    return build(width=UNFOLDED_WIDTH, color_system=None)


def render_text(view: RenderableType, *, folded: bool = False) -> str:
    """Render a view as plain text without trailing spaces; `folded` uses the width of `make_console`."""
    lines = StringIO()
    width = make_console().width if folded else UNFOLDED_WIDTH
    writer = Console(file=lines, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    writer.print(view, crop=False)
    return "".join(f"{line.rstrip()}\n" for line in lines.getvalue().splitlines())


def plain_line(text: str, style: str = "") -> Text:
    """Return a line in which control characters of names are escaped."""
    return Text(escape_unprintable(text), style=style)


def format_value_range(values: Array, single_format: str, span_format: str = "") -> str:
    """Format a single value with `single_format`, or the lowest and highest with `span_format`."""
    low, high = np.min(values).item(), np.max(values).item()
    span_format = span_format or single_format
    return format(low, single_format) if low == high else f"{low:{span_format}}..{high:{span_format}}"


def pluralize(number: int, noun: str) -> str:
    """Return `2 ops` or `1 op`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def join_names(names: Sequence[str], limit: int = NAMES_SHOWN) -> str:
    """Join the first names; count the remaining ones."""
    more_text = f", {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more_text


def group_values(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, in order of first use."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


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
