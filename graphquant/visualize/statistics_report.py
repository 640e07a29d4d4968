"""Range reports: histograms, chosen ranges and their cost, as terminal text and an HTML page.

The page works from disk without scripts. With a model, the viewer shows the statistics on its drawing instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from graphquant.errors import escape_unprintable
from graphquant.visualize.histograms import (
    HISTOGRAM_STYLE,
    channel_ranges_svg,
    histogram_line,
    histogram_svg,
    histogram_thumbnail,
)
from graphquant.visualize.tables import (
    COLUMN_GAP,
    Column,
    Table,
    group_values,
    html_text,
    join_names,
    plain_line,
    pluralize,
)
from graphquant.visualize.text import incomplete_stats
from graphquant.visualize.viewer_data import page_head, viewer_file

if TYPE_CHECKING:
    from graphquant.analysis.range_report import RangeReport, TensorRange
    from graphquant.observers import Sketch

STATS_NAME_WIDTH, MIN_HISTOGRAM_WIDTH = 20, 16  # minimum widths of the name and histogram columns
MAX_HISTOGRAM_WIDTH = 44  # maximum width of a histogram
MAX_NOTES = 12  # maximum number of notes to print; the JSON data has all of them
EXACT_SQNR = 140.0  # decibels from which on the result counts as exact: the precision of float32


def range_report_view(report: RangeReport) -> RenderableType:
    """Render the table of tensors, worst first if a model gives costs, and notes on them."""
    stats = report.stats
    sections: list[RenderableType] = [plain_line(stats_heading(report), style="bold")]
    if stats.random:
        sections.append(plain_line("The data is RANDOM: use the statistics for tests only.", style="bold red"))
    sections += incomplete_stats(stats)
    if report.matched_by_name:
        message = "The model contains its ranges; tensors are matched by name only."
        sections.append(plain_line(message, style="dim"))
    if not report.tensor_ranges:
        sections.append(plain_line("No tensor gets a range from insert." if report.model else "It is empty."))
        return Group(*sections)
    sections.append(_RangeTable(report.tensor_ranges, RANGE_COLUMNS if report.model else STATS_COLUMNS))
    names_by_note = group_values((entry.note, str(entry.tensor)) for entry in report.tensor_ranges if entry.note)
    note_lines = [f"{join_names(names)}: {note}" for note, names in names_by_note.items()]
    sections += [plain_line(note, style="yellow") for note in note_lines[:MAX_NOTES]]
    if len(note_lines) > MAX_NOTES:
        sections.append(plain_line(f"{len(note_lines) - MAX_NOTES} more notes are in --format json.", style="dim"))
    legend = "the axis is linear for 99.9% of magnitudes, logarithmic beyond."
    if report.model:
        legend = "[ ] is the range, values outside of it are clipped; the axis is logarithmic beyond its larger end."
        legend += " SQNR is estimated for each tensor alone."
    sections.append(plain_line(f"Histograms: heights are logarithmic; {legend}", style="dim"))
    return Group(*sections)


def share_text(fraction: float) -> str:
    """Format a share from 0 to 1 as a percentage."""
    if not fraction:
        return "0"
    if fraction < 1e-5:  # noqa: PLR2004  # a thousandth of a percent
        return "<0.001%"
    return f"{100 * fraction:.{2 if fraction < 0.1 else 3}g}%"  # noqa: PLR2004  # from here on, two digits are whole percentages


def value_range_text(sketch: Sketch) -> str:
    """Return the smallest and the largest observed value."""
    return "" if sketch.empty else f"[{sketch.low.min():.4g}, {sketch.high.max():.4g}]"


def stats_heading(report: RangeReport) -> str:
    """Return the number of tensors and samples."""
    stats = report.stats
    coverage = f"on {pluralize(stats.samples, 'sample')} in {pluralize(stats.blocks, 'block')}"
    path = escape_unprintable(str(report.path or "statistics"))
    if not report.model:
        return f"{path}: {pluralize(len(stats.targets), 'tensor')} {coverage}"
    return f"{report.model}: {pluralize(len(report.tensor_ranges), 'tensor')} with statistics of {path}, {coverage}"


TENSOR: Column[TensorRange] = Column("tensor", lambda entry: entry.tensor)
SEEN: Column[TensorRange] = Column("seen", lambda entry: entry.sketch, value_range_text)
STATS_COLUMNS: tuple[Column[TensorRange], ...] = (
    SEEN,
    Column("values", lambda entry: entry.sketch and entry.sketch.count, "{:,}".format, number=True),
    Column("NaN", lambda entry: (entry.sketch and entry.sketch.nan) or None, number=True),
    Column("inf", lambda entry: (entry.sketch and entry.sketch.inf) or None, number=True),
)
"""Columns of the page, and of the terminal without a model."""

RANGE_COLUMNS: tuple[Column[TensorRange], ...] = (
    Column(
        "SQNR",
        lambda entry: entry.cost and entry.cost.sqnr,
        lambda sqnr: "exact" if sqnr > EXACT_SQNR else f"{sqnr:.1f}",
        number=True,
    ),
    Column(
        "clipped",
        lambda entry: entry.cost,
        lambda cost: f"{share_text(cost.clipped_below)}, {share_text(cost.clipped_above)}",
    ),
    Column(
        "range",
        lambda entry: entry.params and entry.params.range,
        lambda ends: f"[{ends.low.min():.4g}, {ends.high.max():.4g}]",
    ),
    Column("method", lambda entry: f"{entry.method}: {entry.auto_method}" if entry.auto_method else entry.method),
    SEEN,
    Column("type", lambda entry: entry.params and entry.params.type.name),
    Column("rule", lambda entry: entry.rule),
)
"""Columns with a model, the most important first."""


@dataclass(frozen=True, slots=True)
class _RangeTable:
    """Table that drops columns from the right until names and histograms fit."""

    ranges: Sequence[TensorRange]
    columns: Sequence[Column[TensorRange]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = ([column.heading, *map(column.cell, self.ranges)] for column in (TENSOR, *self.columns))
        longest, *widths = (max(len(escape_unprintable(str(text))) for text in texts) for texts in cells)
        room = options.max_width - min(longest, STATS_NAME_WIDTH) - MIN_HISTOGRAM_WIDTH - COLUMN_GAP
        ends = [*accumulate(width + COLUMN_GAP for width in widths)]
        count = sum(end <= room for end in ends)
        width = (
            options.max_width - (ends[count - 1] if count else 0) - COLUMN_GAP - min(longest, options.max_width // 3)
        )
        width = max(MIN_HISTOGRAM_WIDTH, min(MAX_HISTOGRAM_WIDTH, width))

        def draw_bars(entry: TensorRange) -> Text | None:
            if entry.sketch is None:
                return None
            bars = histogram_line(entry.sketch, entry.params, width, ascii_only=options.ascii_only)
            return Text.assemble((bars[0], "red"), bars[1], (bars[2], "red"))

        histogram: Column[TensorRange] = Column("histogram", draw_bars, lambda bars: bars)
        yield Table((TENSOR, histogram, *self.columns[:count]), self.ranges)
        if omitted := ", ".join(column.name for column in self.columns[count:]):
            yield plain_line(f"For more columns ({omitted}) widen the terminal.", style="dim")


STATS_LEGEND = (
    "Heights are values per bar on a log scale. The axis is linear for 99.9% of magnitudes and logarithmic beyond."
)


def stats_page(report: RangeReport) -> str:
    """Return the page of statistics; deterministic."""
    return "\n".join(_stats_lines(report)) + "\n"


def _stats_lines(report: RangeReport) -> Iterator[str]:
    title = str(report.path or "statistics")
    style = f"\n{viewer_file('statistics.css')}{HISTOGRAM_STYLE}"
    yield page_head(f"{title}: statistics", style) + "<body>"
    yield f"<h1>{html_text(title)}</h1>"
    yield f"<p>{html_text(stats_heading(report))}.</p>"
    stats = report.stats
    if stats.random:
        yield '<p class="warn">The data is RANDOM: use the statistics for tests only.</p>'
    if not stats.complete:
        total = sum(run.samples for run in stats.runs)
        yield f'<p class="warn">The statistics are of {stats.samples} of {total} samples of the data.</p>'
    yield f'<p class="soft">{STATS_LEGEND}</p>'
    yield from _stats_table(report)
    for number, tensor_range in enumerate(report.tensor_ranges):
        yield from _stats_section(number, tensor_range)
    yield "</body></html>"


def _stats_table(report: RangeReport) -> Iterator[str]:
    numbers = {entry.tensor: number for number, entry in enumerate(report.tensor_ranges)}
    histogram: Column[TensorRange] = Column("histogram", lambda entry: entry.sketch)
    special = {
        "tensor": lambda row: (
            f'<td class="name"><a href="#t{numbers[row.tensor]}">{html_text(str(row.tensor))}</a></td>'
        ),
        "histogram": lambda row: f"<td>{histogram_thumbnail(row.sketch) if row.sketch else ''}</td>",
    }
    yield '<div class="scroll"><table>'
    yield from Table((TENSOR, histogram, *STATS_COLUMNS), report.tensor_ranges).html_lines(special)
    yield "</table></div>"


def _stats_section(number: int, tensor_range: TensorRange) -> Iterator[str]:
    yield f'<section id="t{number}"><h2>{html_text(str(tensor_range.tensor))}</h2>'
    sketch = tensor_range.sketch
    if sketch is not None:
        ends = value_range_text(sketch)
        facts = [f"{sketch.count:,} values" + (f" in {ends}" if ends else ", none finite")]
        facts += [f"{count:,} {label}" for count, label in ((sketch.nan, "NaN"), (sketch.inf, "infinite")) if count]
        yield f"<p>{html_text('; '.join(facts))}.</p>"
    if tensor_range.note:
        yield f'<p class="warn">{html_text(tensor_range.note)}</p>'
    if sketch is not None and sketch.low.ndim:
        yield channel_ranges_svg(sketch)
    elif sketch is not None and sketch.counts.size:
        yield histogram_svg(sketch)
    elif sketch is not None:
        yield '<p class="soft">No histogram was stored.</p>'
    yield "</section>"
