"""The page of `report.py`: one HTML file with inline styles and drawings, for light and dark screens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Entry = dict[str, Any]

ROW, LEFT, WIDTH, TOP = 20, 190, 900, 26
"""Pixels: height of a model's row, width of the names, width of a drawing, height of the axis."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #5b6472; --line: #dfe3e8; --paper: #ffffff;
  --c0: #0057b8; --c1: #b85c00; --c2: #8a6d00; --c3: #a03070; --c4: #00785a; --c5: #70757f; --c6: #7a4fc0;
  --c7: #2e7d99; --c8: #c03030; --c9: #4d6b1f; --c10: #111111; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa4b2; --line: #343b46; --paper: #14171c;
  --c0: #6db3ff; --c1: #ff9f4a; --c2: #e0c040; --c3: #f080c0; --c4: #40d0a0; --c5: #a8adb8; --c6: #b79cff;
  --c7: #6fc7e6; --c8: #ff7a7a; --c9: #a9cf6a; --c10: #ffffff; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1100px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } p, li { color: var(--soft); max-width: 46rem; }
table { border-collapse: collapse; font-size: 13px; } div.wide { overflow-x: auto; }
th, td { text-align: right; padding: 2px 9px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, td.text { text-align: left; }
td.text { white-space: normal; min-width: 24rem; color: var(--soft); }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }
svg .soft { fill: var(--soft); } svg line { stroke: var(--line); }
svg .bar { stroke: var(--soft); stroke-dasharray: 4 3; }
.key { display: inline-block; margin-right: 1.1rem; font-size: 13px; } .key svg { width: 14px; height: 12px; }
"""

SHAPES = (
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "M-4-4h8v8h-8z",
    "M0-5l5 5l-5 5l-5-5z",
    "M0-5l5 9h-10z",
    "M-4-2l2-2l2 2l2-2l2 2l-2 2l2 2l-2 2l-2-2l-2 2l-2-2l2-2z",
)
"""Outlines of marks: circle, square, diamond, triangle, cross."""

COLORS = 11


def mark(index: int, x: float, y: float, title: str = "") -> str:
    """Draw the mark of the tool with this index, with a tooltip."""
    shape = SHAPES[index % len(SHAPES)]
    tip = f"<title>{escape(title)}</title>" if title else ""
    style = f'style="fill: var(--c{index % COLORS})" fill-opacity="0.85"'
    return f'<path transform="translate({x:.1f} {y:.1f})" d="{shape}" {style}>{tip}</path>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A drawing with a row for each model and a mark for each tool.

    Attributes:
        title: Its heading.
        text: A sentence below the heading.
        key: The figure that it shows.
        ticks: Values of the axis; figures beyond them are drawn at its ends.
        unit: Unit of the figure.
        logarithmic: True for a logarithmic axis.
        bar: Position of the dashed line, or None.
        float_tools: True if tools that do not quantize are shown too.
    """

    title: str
    text: str
    key: str
    ticks: tuple[float, ...]
    unit: str
    logarithmic: bool = True
    bar: float | None = None
    float_tools: bool = True

    def shows(self, tool: str) -> bool:
        """Return True if the tool has marks."""
        return self.float_tools or tool not in FLOAT_TOOLS

    def place(self, figure: float) -> float:
        """Return the horizontal position of a figure."""
        first, last = self.ticks[0], self.ticks[-1]
        inside = min(max(figure, first), last)
        if self.logarithmic:
            share = math.log(inside / first) / math.log(last / first)
        else:
            share = (inside - first) / (last - first)
        return LEFT + (WIDTH - LEFT - 20) * share

    def render(self, models: dict[str, Entry], tools: Sequence[str]) -> str:
        """Draw the figures of all models."""
        bottom, parts = TOP + ROW * len(models), []
        for tick in self.ticks:
            x = self.place(tick)
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom}"/>')
            parts.append(f'<text class="soft" x="{x:.1f}" y="14" text-anchor="middle">{tick:g}{self.unit}</text>')
        if self.bar is not None:
            x = self.place(self.bar)
            parts.append(f'<line class="bar" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom}"/>')
        for position, (name, entry) in enumerate(models.items()):
            y = TOP + ROW * position + ROW / 2
            parts.append(f'<text x="{LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>')
            for index, tool in reversed(list(enumerate(tools))):  # graphquant is drawn last, above the others
                figures = entry["results"].get(tool) if self.shows(tool) else None
                if figures is not None and not figures["failure"] and figures[self.key] is not None:
                    figure = figures[self.key]
                    text = decibels(figure) if self.key == "sqnr" else f"{figure:.4g}"
                    parts.append(mark(index, self.place(figure), y, f"{name}, {tool}: {text}{self.unit}"))
        return f'<svg viewBox="0 0 {WIDTH} {bottom + 6}" role="img">{"".join(parts)}</svg>'


FLOAT_TOOLS = ("onnxsim", "TFLite float")
"""Tools that do not quantize."""

DRAWINGS = (
    Drawing(
        title="Accuracy",
        text="SQNR of the worst output on unseen samples. More is better; the dashed line is 20 dB.",
        key="sqnr",
        ticks=(0, 10, 20, 30, 40, 50, 60),
        unit=" dB",
        logarithmic=False,
        bar=20,
        float_tools=False,
    ),
    Drawing(
        title="Time of a run",
        text="Processor time relative to the given float model, median of paired sessions. Less is better.",
        key="ratio",
        ticks=(0.25, 0.5, 1, 2, 4),
        unit=" of float",
        bar=1,
    ),
    Drawing(
        title="Time of the tool",
        text="Processor time of the whole process. Less is better.",
        key="seconds",
        ticks=(0.5, 1, 2, 5, 10, 20, 50, 100),
        unit=" s",
    ),
    Drawing(
        title="Memory of the tool",
        text="Peak memory of the whole process. Less is better.",
        key="megabytes",
        ticks=(50, 100, 200, 500, 1000, 2000, 4000),
        unit=" MB",
    ),
)


def legend(tools: Sequence[str], used: Sequence[str]) -> str:
    """List the tools with their marks."""
    keys = [
        f'<span class="key"><svg viewBox="0 0 14 12">{mark(index, 7, 6)}</svg> {escape(tool)}</span>'
        for index, tool in enumerate(tools)
        if tool in used
    ]
    return f"<p>{''.join(keys)}</p>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> str:
    """Write a table; the columns `texts` hold sentences."""
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for row in rows:
        cells = [
            f'<td class="text">{escape(cell)}</td>' if index in texts else f"<td>{escape(cell)}</td>"
            for index, cell in enumerate(row)
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def decibels(value: float | None) -> str:
    """Format a SQNR; results without a difference, and with NaN, have their own texts."""
    if value is None:
        return "—"
    if abs(value) >= 1e6:  # noqa: PLR2004  # stands for infinity
        return "equal" if value > 0 else "NaN"
    return f"{value:.1f}"


def number(value: float | None, form: str) -> str:
    """Format a figure that may be missing."""
    return "—" if value is None else format(value, form)


def result_rows(models: dict[str, Entry]) -> Iterator[list[str]]:
    """Yield the row of each tool and model."""
    for name, entry in models.items():
        for tool, figures in entry["results"].items():
            if figures["failure"]:
                yield [name, tool, *["—"] * 8, f"failed: {figures['failure']}"]
                continue
            low, all_ops = figures["int8_ops"] or (0, 0)
            notes = [
                f"{share:.0%} of multiply-adds in float: {reason}" for reason, share in figures["float_macs"].items()
            ]
            notes += [f"repair or search: {figures['repair']}"] * bool(figures["repair"])
            notes += ["insert warns that it is slower"] * figures["warned"]
            notes += ["exit code 1"] * figures["gated"]
            notes += [f"MISSED: {', '.join(figures['missed'])}"] * bool(figures["missed"])
            least = "" if figures["least_ratio"] is None else f" ({figures['least_ratio']:.2f})"
            yield [
                name,
                tool,
                decibels(figures["sqnr"]),
                number(figures["agreement"], ".1%"),
                number(figures["ratio"], ".2f") + least,
                number(figures["milliseconds"], ".3f"),
                f"{low}/{all_ops}" if all_ops else "—",
                number(figures["int8_macs"], ".0%"),
                number(figures["seconds"], ".1f"),
                number(figures["megabytes"], ".0f"),
                "; ".join(notes),
            ]


RESULT_COLUMNS = (
    *("model", "tool", "SQNR dB", "agree", "time / float", "ms", "int8 ops", "int8 MACs", "CPU s", "MB", "notes"),
)


def summary_row(tool: str, figures: Entry) -> list[str]:
    """Format the summary of a tool."""
    pairs = figures["pairs"]
    return [
        tool,
        str(figures["models"]),
        str(figures["failed"]),
        str(figures["at_least_20_db"]),
        decibels(figures["median_sqnr"]),
        number(figures["median_ratio"], ".2f"),
        str(figures["not_slower"]),
        f"{figures['graphquant_better']} of {pairs}" if pairs else "—",
        number(figures["median_relative_seconds"], ".2f"),
        number(figures["median_relative_megabytes"], ".2f"),
    ]


SUMMARY_COLUMNS = (
    *("tool", "models", "failed", ">= 20 dB", "median dB", "time / float", "<= 1.05"),
    *("graphquant better", "CPU s / ours", "MB / ours"),
)


def render_page(report: Entry) -> str:
    """Render the report."""
    models = report["models"]
    tools = list(report["summary"])
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    loads = [entry["load"] for entry in models.values()]
    load = f"load average {min(loads):.1f} to {max(loads):.1f}" if loads else "no load measured"
    not_run = [f"{tool}: {reason}" for tool, reason in report["skipped"].items()]
    not_run += [f"{name}: there is no model" for name in report["not_measured"]]
    body = [
        "<h1>graphquant beside other quantizers</h1>",
        f"<p>{escape(report['date'])}, {report['cores']} cores, {load}. {escape(versions)}.</p>",
        "<p>The tools have their documented defaults and the same samples. onnxsim and “TFLite float” keep floats.</p>",
        "<h2>Summary</h2>",
        table(SUMMARY_COLUMNS, [summary_row(tool, figures) for tool, figures in report["summary"].items()]),
        "<p>“graphquant better” counts models on which graphquant's result of the same format has a higher SQNR.</p>",
        "<p>“/ ours” is the median of the tool's figure divided by graphquant's.</p>",
    ]
    for drawing in DRAWINGS:
        keys = legend(tools, [tool for tool in tools if drawing.shows(tool)])
        body += [f"<h2>{drawing.title}</h2><p>{drawing.text}</p>", keys, drawing.render(models, tools)]
    body += ["<h2>All figures</h2>", table(RESULT_COLUMNS, list(result_rows(models)), texts=(10,))]
    if not_run:
        body += ["<h2>Not run</h2><ul>", *(f"<li>{escape(line)}</li>" for line in not_run), "</ul>"]
    title = "<title>graphquant beside other quantizers</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}<style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"
