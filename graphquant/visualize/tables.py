"""Tables in text, Markdown, HTML and CSV from one list of columns; consoles and lines of terminal output."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from io import StringIO
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from graphquant.errors import escape_unprintable

if TYPE_CHECKING:
    from graphquant.numerics import Array

Key = TypeVar("Key")
Value = TypeVar("Value")
Row = TypeVar("Row")
CellMarkup = Mapping[str, Callable[[Row], str]]
"""Functions that return the markup of a row's cell, by the name of the column."""

NAMES_SHOWN = 3  # names in a cell; the remaining ones are counted
UNFOLDED_WIDTH = 10_000  # width for output that is not a terminal: one line per site, for grep and diff
COLUMN_GAP = 2  # spaces between columns
MIN_NAME_WIDTH = 16  # minimum width of a column of names; below it, names get lines of their own
ROWS_SHOWN = 1000  # maximum number of rows of a table in text; the remaining ones are counted
CELL_INDENT = 4  # indentation of cells on a line of their own
MAX_MARKDOWN_LENGTH = 600  # maximum number of characters of a Markdown cell
NO_MARKUP: Mapping[str, Callable[[Any], str]] = MappingProxyType({})


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
    """Format a single value with `single_format`, or the lowest and highest with `span_format`; "" without values."""
    if not values.size:
        return ""
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


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column of a table in text, Markdown, HTML and CSV. A cell is empty if its value is None."""

    name: str
    value: Callable[[Row], Any]
    form: Callable[[Any], str | Text] = str  # text of a value
    unit: str = ""  # unit of all values, for the heading
    number: bool = False  # numbers are right-aligned, are sort keys in HTML, and stay unrounded in CSV
    optional: bool = False  # a table omits the column if all of its cells are empty

    @property
    def heading(self) -> str:
        """Name and unit."""
        return f"{self.name} {self.unit}".rstrip()

    def cell(self, row: Row) -> str | Text:
        """Return the text of a cell."""
        value = self.value(row)
        return "" if value is None else self.form(value)

    def markdown_cell(self, row: Row) -> str:
        """Return a cell as Markdown."""
        return escape_markdown(str(self.cell(row)))

    def html_cell(self, row: Row) -> str:
        """Return a cell as HTML, with the value of a number as its sort key."""
        value, text = self.value(row), html_text(str(self.cell(row)))
        if not self.number:
            return f"<td>{text}</td>"
        sort_key = "" if value is None else f"{value:.6g}"
        return f'<td class="n" data-v="{sort_key}">{text}</td>'

    def html_head(self) -> str:
        """Return the heading as HTML."""
        kind = ' class="n"' if self.number else ""
        return f"<th{kind}>{html_text(self.heading)}</th>"


def html_text(text: str) -> str:
    """Escape text for HTML; lines stay lines."""
    return escape("\n".join(map(escape_unprintable, text.split("\n"))))


def escape_markdown(text: str) -> str:
    """Escape text so that it has no markup, mention or end of a cell, and shorten it."""
    visible = escape_unprintable(text.replace("\n", " "))
    visible = visible if len(visible) <= MAX_MARKDOWN_LENGTH else f"{visible[:MAX_MARKDOWN_LENGTH]}..."
    return "".join(f"&#{ord(char)};" if char in "&<>|*_`[]\\~#@!:$" else char for char in visible)


def _padded(column: Column[Any], cell: Text, width: int) -> Text:
    """Return a cell padded to the width, with a gap before it."""
    gap, spaces = " " * COLUMN_GAP, " " * (width - cell.cell_len)
    return Text.assemble(gap, spaces, cell) if column.number else Text.assemble(gap, cell, spaces)


class Table(Generic[Row]):
    """Rows and the columns that show them; the first column is a name.

    In a terminal, a row that fits is one line. Names are never folded, so that they can be copied and searched. A style
    applies to a whole row, and a note is printed below it.
    """

    def __init__(
        self,
        columns: Iterable[Column[Row]],
        rows: Iterable[Row],
        *,
        style: Callable[[Row], str] = lambda _: "",
        note: Callable[[Row], str] = lambda _: "",
        max_rows: int | None = None,
    ) -> None:
        self.rows = list(rows)
        self.columns = [
            column
            for column in columns
            if not column.optional or any(column.value(row) is not None for row in self.rows)
        ]
        self._style, self._note = style, note
        self._max_rows = ROWS_SHOWN if max_rows is None else max_rows

    def csv_text(self) -> str:
        """Return CSV with numbers instead of formatted text."""
        file = StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(column.heading for column in self.columns)
        for row in self.rows:
            writer.writerow(
                column.value(row) if column.number else escape_unprintable(str(column.cell(row)))
                for column in self.columns
            )
        return file.getvalue()

    def markdown_lines(self, special: CellMarkup[Row] = NO_MARKUP) -> list[str]:
        """Return two lines of headings, then a line for each row. `special` replaces cells of the columns it names."""
        cells = [special.get(column.name, column.markdown_cell) for column in self.columns]
        lines = [[escape_markdown(column.heading) for column in self.columns]]
        lines.append(["---:" if column.number else "---" for column in self.columns])
        lines += [[cell(row) for cell in cells] for row in self.rows]
        return [f"| {' | '.join(line)} |" for line in lines]

    def html_lines(
        self,
        special: CellMarkup[Row] = NO_MARKUP,
        head: Callable[[Column[Row]], str] = Column.html_head,
        attributes: Callable[[Row], str] = lambda _: "",
    ) -> Iterator[str]:
        """Yield the head and the body of an HTML table. `special` replaces cells of the columns it names."""
        cells = [special.get(column.name, column.html_cell) for column in self.columns]
        yield f"<thead><tr>{''.join(map(head, self.columns))}</tr></thead><tbody>"
        for row in self.rows:
            yield f"<tr{attributes(row)}>{''.join(cell(row) for cell in cells)}</tr>"
        yield "</tbody>"

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [([Text(column.heading) for column in self.columns], "bold", "")]
        for row in self.rows[: self._max_rows]:
            texts = (column.cell(row) for column in self.columns)
            cells = [Text(escape_unprintable(text)) if isinstance(text, str) else text for text in texts]
            rows.append((cells, self._style(row), escape_unprintable(self._note(row))))
        longest, *widths = (
            max(cell.cell_len for cell in column) for column in zip(*(cells for cells, *_ in rows), strict=True)
        )
        cells_width = sum(widths) + COLUMN_GAP * len(widths)
        name_width = min(longest, options.max_width - cells_width)
        for (name, *cells), style, note in rows:
            padded = map(_padded, self.columns[1:], cells, widths)
            line = Text.assemble(*padded, style=style)
            line.rstrip()
            unfolded = Text(name.plain, style, no_wrap=True, overflow="ignore")
            if name_width >= min(longest, MIN_NAME_WIDTH):
                overflows = name.cell_len > name_width
                yield from [unfolded] if overflows else []
                label = " " * name_width if overflows else name.plain + " " * (name_width - name.cell_len)
                yield Text.assemble(label, line, style=style)
            else:
                if cells_width + CELL_INDENT > options.max_width:
                    line = Text(" " * COLUMN_GAP, style).join([cell for cell in cells if cell])
                else:
                    line = line[COLUMN_GAP:]
                yield unfolded
                yield from [Padding(line, (0, 0, 0, CELL_INDENT))] if line.plain.strip() else []
            yield from [Padding(Text(note, "dim"), (0, 0, 0, COLUMN_GAP))] if note else []
        if len(self.rows) > self._max_rows:
            yield Text(f"{len(self.rows) - self._max_rows} more; the result as JSON lists them")
