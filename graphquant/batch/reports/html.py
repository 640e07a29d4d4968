"""A report as one page that works from disk: a table of models to sort and to filter, with links to their graphs.

Names come out of manifests and models and may be anything; they are escaped, and the page's policy runs its own script
and no other.
"""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from graphquant.batch.reports.words import (
    INT8,
    STATUSES,
    decibels,
    percent,
    ratio,
    reasons,
    size,
    status,
    summary,
    time,
)
from graphquant.errors import printable
from graphquant.view.html import digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from graphquant.batch.types import Change, Outcome, Report

COLUMNS = ("model", "status", "before", "after", "", "sites", "int8", "SQNR", "time", "graph")
"""Heads of the table; what has one is sorted by."""

_NUMBERS = frozenset({"before", "after", "", "sites", "int8", "SQNR", "time"})


def page(report: Report, graphs: Mapping[str, str] | None = None) -> str:
    """The whole page; the same report gives the same bytes.

    Args:
        report: The report.
        graphs: For models that have a page of their own its address, relative to this one, by their names.
    """
    return "\n".join(_page(report, graphs or {})) + "\n"


def _page(report: Report, graphs: Mapping[str, str]) -> Iterator[str]:
    script, style = _shipped("report.js"), _shipped("report.css")
    policy = f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}"
    yield "<!DOCTYPE html>"
    yield '<html lang="en"><head><meta charset="utf-8"><title>graphquant batch</title>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
    yield f"<style>{style}</style></head><body>"
    yield from _header(report)
    yield '<table id="models"><thead><tr>'
    yield from (_head(column) for column in COLUMNS)
    yield "</tr></thead><tbody>"
    changes: dict[str, list[Change]] = {}
    for change in report.changes:
        changes.setdefault(change.name, []).append(change)
    for one in report.outcomes:
        yield _row(one, changes.pop(one.name, []), graphs.get(one.name))
    yield "</tbody></table>"
    yield from (f'<p class="bad">{_text(one.name)}: {_text(one.says)}</p>' for some in changes.values() for one in some)
    yield f"<script>{script}</script></body></html>"


def _header(report: Report) -> Iterator[str]:
    started = datetime.fromtimestamp(report.started, UTC).strftime("%Y-%m-%d %H:%M UTC")
    yield f"<header><h1>graphquant batch</h1><p>{_text(summary(report))}</p>"
    yield f'<p class="soft">graphquant {_text(report.version)}, {started}</p>'
    yield '<form id="controls">'
    yield '<input id="query" type="search" placeholder="filter by name" aria-label="filter by name">'
    yield '<select id="status" aria-label="status"><option value="">every status</option>'
    counts = {name: sum(one.status == name for one in report.outcomes) for name in STATUSES}
    yield from (
        f'<option value="{name}">{STATUSES[name]} ({count})</option>' for name, count in counts.items() if count
    )
    if report.changes:
        yield '<option value="changed">changed</option>'
    yield '</select><output id="shown"></output><button type="button" id="theme">light or dark</button></form></header>'


def _head(column: str) -> str:
    of = ' class="n"' if column in _NUMBERS else ""
    if column == "graph":
        return f"<th{of}>{column}</th>"
    says = f' title="{_text(INT8)}"' if column == "int8" else ""
    return f'<th{of}{says} aria-sort="none"><button type="button">{column or "%"}</button></th>'


def _row(outcome: Outcome, changes: list[Change], graph: str | None) -> str:
    fine = outcome.fine and all(one.level == "note" for one in changes)
    kind = "soft" if outcome.status == "skipped" else "good" if fine else "bad"
    shown = "regressed" if outcome.fine and not fine else status(outcome)
    part = ratio(outcome)
    sqnr = outcome.figures.sqnr if outcome.figures is not None else None
    exact = outcome.figures is not None and outcome.figures.exact
    made = outcome.size_after is not None
    link = f'<a href="{_text(graph)}">graph</a>' if graph is not None else ""
    cells = [
        f'<td class="name" data-v="{_text(outcome.name)}">{_name(outcome, changes)}</td>',
        f'<td data-v="{shown}"><span class="{kind}">{shown}</span></td>',
        _number(outcome.size_before, size(outcome.size_before)),
        _number(outcome.size_after, size(outcome.size_after)),
        _number(part, percent(part)),
        _number(outcome.sites if made else None, str(outcome.sites) if made else ""),
        _number(outcome.int8_share, _bar(outcome)),
        _number(10_000.0 if exact else sqnr, decibels(outcome.figures)),
        _number(outcome.seconds or None, time(outcome)),
        f"<td>{link}</td>",
    ]
    changed = ' data-changed="1"' if changes else ""
    return f'<tr data-status="{outcome.status}"{changed}>{"".join(cells)}</tr>'


def _number(value: float | None, shown: str) -> str:
    return f'<td class="n" data-v="{"" if value is None else f"{value:.6g}"}">{shown}</td>'


def _bar(outcome: Outcome) -> str:
    """The share as a bar with its number."""
    if outcome.low is None or outcome.int8_share is None:
        return ""
    low, all_ops = outcome.low
    width = round(60 * outcome.int8_share, 1)
    band, bar = '<rect class="band" width="60" height="8"/>', f'<rect width="{width}" height="8"/>'
    drawn = f'<svg width="60" height="8" aria-hidden="true">{band}{bar}</svg>'
    return f'<span title="{low} of {all_ops} ops">{percent(outcome.int8_share)} {drawn}</span>'


def _name(outcome: Outcome, changes: list[Change]) -> str:
    """The name, why it is not fine, and the rest to unfold."""
    rows = {"model": outcome.model, "output": outcome.output, **_digests(outcome)}
    rows |= {f"left: {why}": str(count) for why, count in outcome.skips.items()}
    rows |= {f"{one.code} {one.where}": f"{one.says}. To mend it: {one.fix}." for one in outcome.findings}
    table = "".join(f"<tr><th>{_text(what)}</th><td>{_text(said)}</td></tr>" for what, said in rows.items() if said)
    said = [f'<p class="bad">{_text(one)}</p>' for one in reasons(outcome)]
    said += [f'<p class="{"soft" if one.level == "note" else "bad"}">{_text(one.says)}</p>' for one in changes]
    return f"<details><summary>{_text(outcome.name)}</summary><table>{table}</table></details>{''.join(said)}"


def _digests(outcome: Outcome) -> dict[str, str]:
    some = outcome.digests
    rows = {"model": some.model, "rules": some.rules, "data": some.data, "output": some.output}
    return {f"SHA-256 of the {what}": said for what, said in rows.items()}


def _text(said: str) -> str:
    return escape("\n".join(map(printable, said.split("\n"))))


def _shipped(name: str) -> str:
    return files("graphquant.batch.reports").joinpath(name).read_text("utf-8")
