"""Range reports: histograms, chosen ranges and their cost, as terminal text and an HTML page.

The page works from disk without scripts. With a model, the viewer shows the statistics on its drawing instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
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
from graphquant.visualize.tables import NameTable, group_values, join_names, plain_line, pluralize
from graphquant.visualize.text import incomplete_stats
from graphquant.visualize.viewer_data import page_head, viewer_file

if TYPE_CHECKING:
    from graphquant.analysis.range_report import RangeReport, TensorRange
    from graphquant.observers import QuantizationCost


STATS_NAME_WIDTH, MIN_HISTOGRAM_WIDTH = 20, 16  # minimum widths of the name and histogram columns
MAX_HISTOGRAM_WIDTH = 44  # maximum width of a histogram
STATS_COLUMN_GAP = 2
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


def value_range_text(tensor_range: TensorRange) -> str:
    """Return the smallest and the largest observed value."""
    sketch = tensor_range.sketch
    return "" if sketch is None or sketch.empty else f"[{sketch.low.min():.4g}, {sketch.high.max():.4g}]"


def stats_heading(report: RangeReport) -> str:
    """Return the number of tensors and samples."""
    stats = report.stats
    coverage = f"on {pluralize(stats.samples, 'sample')} in {pluralize(stats.blocks, 'block')}"
    path = escape_unprintable(str(report.path or "statistics"))
    if not report.model:
        return f"{path}: {pluralize(len(stats.targets), 'tensor')} {coverage}"
    return f"{report.model}: {pluralize(len(report.tensor_ranges), 'tensor')} with statistics of {path}, {coverage}"


def _sqnr_text(cost: QuantizationCost) -> str:
    """Return the estimated SQNR in dB to one decimal; "exact" if nothing is lost."""
    return "exact" if cost.sqnr > EXACT_SQNR else f"{cost.sqnr:.1f}"


STATS_COLUMNS: dict[str, Callable[[TensorRange], str]] = {
    "seen": value_range_text,
    "values": lambda entry: f"{entry.sketch.count:,}" if entry.sketch else "",
    "NaN": lambda entry: str(entry.sketch.nan) if entry.sketch else "",
    "inf": lambda entry: str(entry.sketch.inf) if entry.sketch else "",
}
"""Columns of the page, and of the terminal without a model."""

RANGE_COLUMNS: dict[str, Callable[[TensorRange], str]] = {
    "SQNR": lambda entry: _sqnr_text(entry.cost) if entry.cost else "",
    "clipped": lambda entry: (
        f"{share_text(entry.cost.clipped_below)}, {share_text(entry.cost.clipped_above)}" if entry.cost else ""
    ),
    "range": lambda entry: (
        f"[{entry.params.range.low.min():.4g}, {entry.params.range.high.max():.4g}]" if entry.params else ""
    ),
    "method": lambda entry: f"{entry.method}: {entry.auto_method}" if entry.auto_method else entry.method,
    "seen": value_range_text,
    "type": lambda entry: entry.params.type.name if entry.params else "",
    "rule": lambda entry: escape_unprintable(entry.rule),
}
"""Columns with a model, the most important first."""


@dataclass(frozen=True, slots=True)
class _RangeTable:
    """Table that drops columns from the right until names and histograms fit."""

    ranges: Sequence[TensorRange]
    columns: Mapping[str, Callable[[TensorRange], str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [escape_unprintable(str(entry.tensor)) for entry in self.ranges]
        longest = max(map(len, [*names, "tensor"]))
        room = options.max_width - min(longest, STATS_NAME_WIDTH) - MIN_HISTOGRAM_WIDTH - STATS_COLUMN_GAP
        fitting: dict[str, list[str]] = {}
        omitted: list[str] = []
        used = 0
        for title, text_of in self.columns.items():
            cells = [text_of(entry) for entry in self.ranges]
            if title in {"NaN", "inf"}:
                cells = ["" if cell == "0" else cell for cell in cells]
            width = max(map(len, (*cells, title))) + STATS_COLUMN_GAP
            if omitted or used + width > room:
                omitted.append(title)
            else:
                used += width
                fitting[title] = cells
        width = options.max_width - used - STATS_COLUMN_GAP - min(longest, options.max_width // 3)
        width = max(MIN_HISTOGRAM_WIDTH, min(MAX_HISTOGRAM_WIDTH, width))
        table = NameTable("tensor", "histogram", *fitting, right=("SQNR", "NaN", "inf"))
        for row, entry in enumerate(self.ranges):
            histogram = Text("")
            if entry.sketch is not None:
                bars = histogram_line(entry.sketch, entry.params, width, ascii_only=options.ascii_only)
                histogram = Text.assemble((bars[0], "red"), bars[1], (bars[2], "red"))
            table.add_row(names[row], histogram, *(cells[row] for cells in fitting.values()))
        yield table
        if omitted:
            yield plain_line(f"For more columns ({', '.join(omitted)}) widen the terminal.", style="dim")


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
    yield f"<h1>{_stats_text(title)}</h1>"
    yield f"<p>{_stats_text(stats_heading(report))}.</p>"
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
    classes = {"tensor": "name", "histogram": "", "seen": "", "values": "right", "NaN": "right", "inf": "right"}
    yield '<div class="scroll"><table><thead><tr>'
    yield "".join(f'<th class="{kind}">{title}</th>' for title, kind in classes.items())
    yield "</tr></thead><tbody>"
    for number, entry in enumerate(report.tensor_ranges):
        link = f'<a href="#t{number}">{_stats_text(str(entry.tensor))}</a>'
        thumbnail = histogram_thumbnail(entry.sketch) if entry.sketch else ""
        cells = [link, thumbnail, *(_stats_text(text_of(entry)) for text_of in STATS_COLUMNS.values())]
        columns = (f'<td class="{kind}">{cell}</td>' for cell, kind in zip(cells, classes.values(), strict=True))
        yield f"<tr>{''.join(columns)}</tr>"
    yield "</tbody></table></div>"


def _stats_section(number: int, tensor_range: TensorRange) -> Iterator[str]:
    yield f'<section id="t{number}"><h2>{_stats_text(str(tensor_range.tensor))}</h2>'
    sketch = tensor_range.sketch
    if sketch is not None:
        ends = value_range_text(tensor_range)
        facts = [f"{sketch.count:,} values" + (f" in {ends}" if ends else ", none finite")]
        facts += [f"{count:,} {label}" for count, label in ((sketch.nan, "NaN"), (sketch.inf, "infinite")) if count]
        yield f"<p>{_stats_text('; '.join(facts))}.</p>"
    if tensor_range.note:
        yield f'<p class="warn">{_stats_text(tensor_range.note)}</p>'
    if sketch is not None and sketch.low.ndim:
        yield channel_ranges_svg(sketch)
    elif sketch is not None and sketch.counts.size:
        yield histogram_svg(sketch)
    elif sketch is not None:
        yield '<p class="soft">No histogram was stored.</p>'
    yield "</section>"


def _stats_text(text: str) -> str:
    return escape(escape_unprintable(text))
