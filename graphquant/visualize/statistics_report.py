"""Range reports: histograms, chosen ranges and their cost, as terminal text, JSON and an HTML page.

The page works from disk without scripts. With a model, the viewer shows the statistics on its drawing instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from graphquant.errors import escape_unprintable
from graphquant.visualize import svg
from graphquant.visualize.histogram_bars import histogram_line
from graphquant.visualize.tables import NameTable, join_names, plain_line, pluralize
from graphquant.visualize.text import incomplete_stats

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from graphquant.analysis.range_report import RangeReport, TensorRange
    from graphquant.numerics import QParams
    from graphquant.observers import QuantizationCost


STATS_NAME_WIDTH, MIN_HISTOGRAM_WIDTH = 20, 16
"""Minimum widths of the name and histogram columns."""

MAX_HISTOGRAM_WIDTH = 44
"""Maximum width of a histogram."""

STATS_COLUMN_GAP = 2

MAX_NOTES = 12
"""Maximum number of notes to print; the JSON data has all of them."""

MATCHED_BY_NAME = "The model contains its ranges; tensors are matched by name only."

EXACT_SQNR = 140.0
"""Decibels from which on the result counts as exact: the precision of float32."""


def range_report_view(report: RangeReport) -> RenderableType:
    """Render the table of tensors, worst first if a model gives costs, and notes on them."""
    stats = report.stats
    sections: list[RenderableType] = [plain_line(stats_heading(report), style="bold")]
    if stats.random:
        sections.append(plain_line("The data is RANDOM: use the statistics for tests only.", style="bold red"))
    sections += incomplete_stats(stats)
    if report.matched_by_name:
        sections.append(plain_line(MATCHED_BY_NAME, style="dim"))
    if not report.tensor_ranges:
        sections.append(plain_line("No tensor gets a range from insert." if report.model else "It is empty."))
        return Group(*sections)
    sections.append(_RangeTable(report.tensor_ranges, has_ranges=bool(report.model)))
    names_by_note: dict[str, list[str]] = {}
    for tensor_range in report.tensor_ranges:
        if tensor_range.note:
            names_by_note.setdefault(tensor_range.note, []).append(str(tensor_range.tensor))
    note_lines = [f"{join_names(names)}: {note}" for note, names in names_by_note.items()]
    sections += [plain_line(note, style="yellow") for note in note_lines[:MAX_NOTES]]
    if len(note_lines) > MAX_NOTES:
        sections.append(plain_line(f"{len(note_lines) - MAX_NOTES} more notes are in --format json.", style="dim"))
    sections.append(plain_line(_histogram_legend(report), style="dim"))
    return Group(*sections)


def sqnr_text(cost: QuantizationCost | None) -> str:
    """Return the estimated SQNR in dB to one decimal; "exact" if nothing is lost."""
    if cost is None:
        return ""
    return "exact" if cost.sqnr > EXACT_SQNR else f"{cost.sqnr:.1f}"


def share_text(fraction: float) -> str:
    """Format a share from 0 to 1 as a percentage."""
    if not fraction:
        return "0"
    if fraction < 1e-5:  # noqa: PLR2004  # a thousandth of a percent
        return "<0.001%"
    return f"{100 * fraction:.{2 if fraction < 0.1 else 3}g}%"  # noqa: PLR2004  # from here on, two digits are whole percentages


def clipped_text(cost: QuantizationCost | None) -> str:
    """Return the clipped shares at the lower and upper end."""
    return "" if cost is None else f"{share_text(cost.clipped_below)}, {share_text(cost.clipped_above)}"


def value_range_text(tensor_range: TensorRange) -> str:
    """Return the smallest and the largest observed value."""
    sketch = tensor_range.sketch
    return "" if sketch is None or sketch.empty else f"[{sketch.low.min():.4g}, {sketch.high.max():.4g}]"


def range_text(params: QParams | None) -> str:
    """Return the representable range of scale and zero point."""
    return "" if params is None else f"[{params.range.low.min():.4g}, {params.range.high.max():.4g}]"


def method_text(tensor_range: TensorRange) -> str:
    """Return the observer, and the method that `auto` chose."""
    return f"{tensor_range.method}: {tensor_range.auto_method}" if tensor_range.auto_method else tensor_range.method


def stats_heading(report: RangeReport) -> str:
    """Return the number of tensors and samples."""
    stats = report.stats
    coverage = f"on {pluralize(stats.samples, 'sample')} in {pluralize(stats.blocks, 'block')}"
    path = escape_unprintable(str(report.path or "statistics"))
    if not report.model:
        return f"{path}: {pluralize(len(stats.targets), 'tensor')} {coverage}"
    return f"{report.model}: {pluralize(len(report.tensor_ranges), 'tensor')} with statistics of {path}, {coverage}"


def _histogram_legend(report: RangeReport) -> str:
    if not report.model:
        return "Histograms: heights are logarithmic; the axis is linear for 99.9% of magnitudes, logarithmic beyond."
    return (
        "Histograms: heights are logarithmic; [ ] is the range, values outside of it are clipped; the axis is"
        " logarithmic beyond its larger end. SQNR is estimated for each tensor alone."
    )


@dataclass(frozen=True, slots=True)
class _RangeTable:
    """Table that drops columns from the right until names and histograms fit."""

    ranges: Sequence[TensorRange]
    has_ranges: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [escape_unprintable(str(entry.tensor)) for entry in self.ranges]
        columns = self._columns()
        longest = max(map(len, [*names, "tensor"]))
        room = options.max_width - min(longest, STATS_NAME_WIDTH) - MIN_HISTOGRAM_WIDTH - STATS_COLUMN_GAP
        fitting: list[tuple[str, list[str]]] = []
        omitted: list[tuple[str, list[str]]] = []
        for title, cells in columns:
            room -= max(len(text) for text in (*cells, title)) + STATS_COLUMN_GAP
            (fitting if room >= 0 and not omitted else omitted).append((title, cells))
        used = sum(max(len(text) for text in (*cells, title)) + STATS_COLUMN_GAP for title, cells in fitting)
        width = max(
            MIN_HISTOGRAM_WIDTH,
            min(
                MAX_HISTOGRAM_WIDTH, options.max_width - used - STATS_COLUMN_GAP - min(longest, options.max_width // 3)
            ),
        )
        table = NameTable("tensor", "histogram", *(title for title, _ in fitting), right=("SQNR", "NaN", "inf"))
        for row, tensor_range in enumerate(self.ranges):
            histogram = _histogram_text(tensor_range, width, ascii_only=options.ascii_only)
            table.add_row(names[row], histogram, *(cells[row] for _, cells in fitting))
        yield table
        if omitted:
            yield plain_line(
                f"For more columns ({', '.join(title for title, _ in omitted)}) widen the terminal.", style="dim"
            )

    def _columns(self) -> list[tuple[str, list[str]]]:
        """Return the columns after tensor and histogram, the most important first."""
        if not self.has_ranges:
            sketches = [entry.sketch for entry in self.ranges]
            return [
                ("seen", [value_range_text(entry) for entry in self.ranges]),
                ("values", [f"{sketch.count:,}" if sketch else "" for sketch in sketches]),
                ("NaN", [str(sketch.nan or "") if sketch else "" for sketch in sketches]),
                ("inf", [str(sketch.inf or "") if sketch else "" for sketch in sketches]),
            ]
        return [
            ("SQNR", [sqnr_text(entry.cost) for entry in self.ranges]),
            ("clipped", [clipped_text(entry.cost) for entry in self.ranges]),
            ("range", [range_text(entry.params) for entry in self.ranges]),
            ("method", [method_text(entry) for entry in self.ranges]),
            ("seen", [value_range_text(entry) for entry in self.ranges]),
            ("type", [entry.params.type.name if entry.params else "" for entry in self.ranges]),
            ("rule", [escape_unprintable(entry.rule) for entry in self.ranges]),
        ]


def _histogram_text(tensor_range: TensorRange, width: int, *, ascii_only: bool) -> Text:
    if tensor_range.sketch is None:
        return Text("")
    below, inside, above = histogram_line(tensor_range.sketch, tensor_range.params, width, ascii_only=ascii_only)
    return Text.assemble((below, "red"), inside, (above, "red"))


STATS_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b6470;--line:#dfe3e8;--back:#fff;--bar:#3667b0;
--warn:#8a5a00}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa4b0;--line:#343a42;--back:#15181c;
--bar:#7ba7e8;--warn:#e0b050}}
@media print{:root{color-scheme:light;--ink:#000;--soft:#444;--line:#ccc;--back:#fff;--bar:#3667b0;
--warn:#8a5a00}section,tr{break-inside:avoid}
.scroll{overflow:visible!important}table{font-size:9px!important}th,td{white-space:normal!important;
padding-right:.4rem!important}td.name{min-width:0!important}svg.small{width:80px!important}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
body{margin:2rem auto;max-width:70rem;padding:0 1rem;font:14px/1.45 system-ui,sans-serif;color:var(--ink);
background:var(--back)}
h1{font-size:1.3rem}h2{font:600 .95rem ui-monospace,monospace;margin:0 0 .3rem}h1,h2,td.name{overflow-wrap:anywhere}
a{color:inherit}p{margin:.4rem 0}.soft{color:var(--soft)}.warn{color:var(--warn)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px}
td.name{font-family:ui-monospace,monospace;min-width:11rem}
th,td{text-align:left;padding:.2rem .7rem .2rem 0;border-bottom:1px solid var(--line);white-space:nowrap;
font-variant-numeric:tabular-nums}td.name{white-space:normal}
th.right,td.right{text-align:right}
section{border-top:1px solid var(--line);margin-top:1.6rem;padding-top:.9rem}section svg{width:100%;height:auto}
svg.small{width:120px;height:20px;vertical-align:middle}
"""

STATS_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content-Security-Policy of the page, which loads nothing."""

STATS_LEGEND = (
    "Heights are values per bar on a log scale. The axis is linear for 99.9% of magnitudes and logarithmic beyond."
)

STATS_COLUMNS = (
    ("tensor", "name"),
    ("histogram", ""),
    ("seen", ""),
    ("values", "right"),
    ("NaN", "right"),
    ("inf", "right"),
)
"""Titles, and CSS classes of the cells."""


def stats_page(report: RangeReport) -> str:
    """Return the page of statistics; deterministic."""
    return "\n".join(_stats_lines(report)) + "\n"


def _stats_lines(report: RangeReport) -> Iterator[str]:
    title = _stats_text(str(report.path or "statistics"))
    yield "<!DOCTYPE html>"
    yield f'<html lang="en"><head><meta charset="utf-8"><title>{title}: statistics</title>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{STATS_POLICY}">'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
    yield f"<style>{STATS_STYLE}{svg.HISTOGRAM_STYLE}</style></head><body>"
    yield f"<h1>{title}</h1>"
    yield f"<p>{_stats_text(stats_heading(report))}.</p>"
    yield from _stats_warnings(report)
    yield f'<p class="soft">{STATS_LEGEND}</p>'
    yield from _stats_table(report)
    for number, tensor_range in enumerate(report.tensor_ranges):
        yield from _stats_section(number, tensor_range)
    yield "</body></html>"


def _stats_warnings(report: RangeReport) -> Iterator[str]:
    stats = report.stats
    if stats.random:
        yield '<p class="warn">The data is RANDOM: use the statistics for tests only.</p>'
    if not stats.complete:
        total = sum(run.samples for run in stats.runs)
        yield f'<p class="warn">The statistics are of {stats.samples} of {total} samples of the data.</p>'


def _stats_table(report: RangeReport) -> Iterator[str]:
    yield '<div class="scroll"><table><thead><tr>'
    yield "".join(f'<th class="{kind}">{title}</th>' for title, kind in STATS_COLUMNS)
    yield "</tr></thead><tbody>"
    for number, tensor_range in enumerate(report.tensor_ranges):
        link = f'<a href="#t{number}">{_stats_text(str(tensor_range.tensor))}</a>'
        histogram_ = svg.histogram_thumbnail(tensor_range.sketch) if tensor_range.sketch else ""
        cells = [link, histogram_, *map(_stats_text, _stats_cells(tensor_range))]
        columns = (f'<td class="{kind}">{cell}</td>' for cell, (_, kind) in zip(cells, STATS_COLUMNS, strict=True))
        yield f"<tr>{''.join(columns)}</tr>"
    yield "</tbody></table></div>"


def _stats_cells(tensor_range: TensorRange) -> Sequence[str]:
    sketch = tensor_range.sketch
    return (
        (value_range_text(tensor_range), f"{sketch.count:,}", str(sketch.nan), str(sketch.inf))
        if sketch
        else ("", "", "", "")
    )


def _stats_section(number: int, tensor_range: TensorRange) -> Iterator[str]:
    yield f'<section id="t{number}"><h2>{_stats_text(str(tensor_range.tensor))}</h2>'
    facts = list(_value_facts(tensor_range))
    if facts:
        yield f"<p>{_stats_text('; '.join(facts))}.</p>"
    if tensor_range.note:
        yield f'<p class="warn">{_stats_text(tensor_range.note)}</p>'
    if tensor_range.sketch is not None and tensor_range.sketch.low.ndim:
        yield svg.channel_ranges_svg(tensor_range.sketch)
    elif tensor_range.sketch is not None and tensor_range.sketch.counts.size:
        yield svg.histogram_svg(tensor_range.sketch)
    elif tensor_range.sketch is not None:
        yield '<p class="soft">No histogram was stored.</p>'
    yield "</section>"


def _value_facts(tensor_range: TensorRange) -> Iterator[str]:
    sketch = tensor_range.sketch
    if sketch is not None:
        yield f"{sketch.count:,} values" + (
            f" in {value_range_text(tensor_range)}" if value_range_text(tensor_range) else ", none finite"
        )
        for count, label in ((sketch.nan, "NaN"), (sketch.inf, "infinite")):
            if count:
                yield f"{count:,} {label}"


def _stats_text(text: str) -> str:
    return escape(escape_unprintable(text))
