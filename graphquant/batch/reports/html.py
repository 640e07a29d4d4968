"""Batch report as one page that works from disk: a sortable, filterable table with links to drawn graphs.

Names come from manifests and models and may contain anything. They are escaped, and the Content-Security-Policy allows
only the page's own script.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from graphquant import __version__
from graphquant.batch.reports.text import (
    INT8_NOTE,
    REPORT_COLUMNS,
    STATUS_LABELS,
    failure_reasons,
    percent_text,
    report_summary,
    status_text,
)
from graphquant.errors import GraphQuantError
from graphquant.utils.atomic_files import write_file
from graphquant.visualize.tables import Column, Table, group_values, html_text
from graphquant.visualize.viewer_data import page_head

if TYPE_CHECKING:
    from graphquant.batch.types import BatchReport, Outcome, OutcomeChange
    from graphquant.utils import Progress


def report_page(report: BatchReport, graphs: Mapping[str, str] | None = None) -> str:
    """Return the page; deterministic. `graphs` has relative addresses of the models' graph pages, by name."""
    return "\n".join(_report_lines(report, graphs or {})) + "\n"


def _report_lines(report: BatchReport, graphs: Mapping[str, str]) -> Iterator[str]:
    folder = files("graphquant.batch.reports")
    script, style = (folder.joinpath(f"report.{suffix}").read_text("utf-8") for suffix in ("js", "css"))
    style = style.replace("NUMBERS", str(sum(column.number for column in REPORT_COLUMNS)))
    yield page_head("graphquant batch", style, script) + "<body>"
    yield from _page_header(report)
    changes = group_values((change.name, change) for change in report.changes)
    yield '<table id="models">'
    yield from _table_lines(report, changes, graphs)
    yield "</table>"
    names = {outcome.name for outcome in report.outcomes}
    for change in chain.from_iterable(changes[name] for name in changes if name not in names):
        yield f'<p class="bad">{html_text(change.name)}: {html_text(change.message)}</p>'
    yield f"<script>{script}</script></body></html>"


def _page_header(report: BatchReport) -> Iterator[str]:
    started = datetime.fromtimestamp(report.started, UTC).strftime("%Y-%m-%d %H:%M UTC")
    yield f"<header><h1>graphquant batch</h1><p>{html_text(report_summary(report))}</p>"
    yield from (f'<p class="bad">{html_text(warning)}</p>' for warning in report.warnings)
    yield f'<p class="soft">graphquant {html_text(report.version)}, {started}</p>'
    yield '<form id="controls">'
    yield '<input id="query" type="search" placeholder="filter by name" aria-label="filter by name">'
    yield '<select id="status" aria-label="status"><option value="">every status</option>'
    counts = Counter(outcome.status for outcome in report.outcomes)
    for status, label in STATUS_LABELS.items():
        if status in counts:
            yield f'<option value="{status}">{label} ({counts[status]})</option>'
    if report.changes:
        yield '<option value="changed">changed</option>'
    yield '</select><output id="shown"></output><button type="button" id="theme">light or dark</button></form></header>'


def _table_lines(
    report: BatchReport, changes: Mapping[str, list[OutcomeChange]], graphs: Mapping[str, str]
) -> Iterator[str]:
    def head(column: Column[Outcome]) -> str:
        if column.name == "graph":
            return "<th>graph</th>"
        attributes = ' class="n"' if column.number else ""
        attributes += f' title="{html_text(INT8_NOTE)}"' if column.name == "int8" else ""
        return f'<th{attributes} aria-sort="none"><button type="button">{column.name}</button></th>'

    def status_cell(outcome: Outcome) -> str:
        passed = outcome.passed and all(change.level == "note" for change in changes.get(outcome.name, ()))
        status_class = "soft" if outcome.status == "skipped" else "good" if passed else "bad"
        status = "regressed" if outcome.passed and not passed else status_text(outcome)
        return f'<td data-v="{status}"><span class="{status_class}">{status}</span></td>'

    def name_cell(outcome: Outcome) -> str:
        details = _name_details(outcome, changes.get(outcome.name, []))
        return f'<td class="name" data-v="{html_text(outcome.name)}">{details}</td>'

    def graph_cell(outcome: Outcome) -> str:
        graph = graphs.get(outcome.name)
        return "<td></td>" if graph is None else f'<td><a href="{html_text(graph)}">graph</a></td>'

    def attributes(outcome: Outcome) -> str:
        return f' data-status="{outcome.status}"' + (' data-changed="1"' if outcome.name in changes else "")

    special = {"model": name_cell, "status": status_cell, "int8": _int8_cell, "graph": graph_cell}
    graph: Column[Outcome] = Column("graph", lambda outcome: graphs.get(outcome.name))
    yield from Table((*REPORT_COLUMNS, graph), report.outcomes).html_lines(special, head, attributes)


def _int8_cell(outcome: Outcome) -> str:
    if outcome.int8_ops is None or outcome.int8_share is None:
        return '<td class="n" data-v=""></td>'
    int8_ops, all_ops = outcome.int8_ops
    width = round(60 * outcome.int8_share, 1)
    band, bar = '<rect class="band" width="60" height="8"/>', f'<rect width="{width}" height="8"/>'
    drawn = f'<svg width="60" height="8" aria-hidden="true">{band}{bar}</svg>'
    share = f'<span title="{int8_ops} of {all_ops} ops">{percent_text(outcome.int8_share)} {drawn}</span>'
    return f'<td class="n" data-v="{outcome.int8_share:.6g}">{share}</td>'


def _name_details(outcome: Outcome, changes: list[OutcomeChange]) -> str:
    digests = outcome.digests
    rows = {
        "model": outcome.model,
        "output": outcome.output,
        **{f"SHA-256 of the {label}": getattr(digests, label) for label in ("model", "rules", "data", "output")},
        **{f"skipped: {reason}": str(count) for reason, count in outcome.skips.items()},
        **{
            f"{finding.code} {finding.site}": f"{finding.message}. Remedy: {finding.fix}."
            for finding in outcome.findings
        },
    }
    table = "".join(
        f"<tr><th>{html_text(label)}</th><td>{html_text(detail)}</td></tr>" for label, detail in rows.items() if detail
    )
    messages = [("bad", reason) for reason in failure_reasons(outcome)]
    messages += [("soft" if change.level == "note" else "bad", change.message) for change in changes]
    paragraphs = "".join(f'<p class="{style}">{html_text(message)}</p>' for style, message in messages)
    return f"<details><summary>{html_text(outcome.name)}</summary><table>{table}</table></details>{paragraphs}"


MAX_NAME_LENGTH = 80  # maximum number of characters of a model's name in its page's name


def draw_graphs(report: BatchReport, report_path: Path, progress: Progress | None = None) -> dict[str, str]:
    """Draw each local output into a folder next to the report, unless it is drawn already.

    Returns:
        Address of each page relative to the report, by model name.

    Raises a UsageError if the folder cannot be written.
    """
    folder = report_path.with_name(f"{report_path.stem}_graphs")
    drawn = [
        outcome
        for outcome in report.outcomes
        if outcome.digests.output and "://" not in outcome.output and Path(outcome.output).exists()
    ]
    links: dict[str, str] = {}
    for number, outcome in enumerate(drawn):
        # The name changes with the output and the version of graphquant.
        version_key = f"{outcome.name}\0{outcome.digests.output}\0{__version__}"
        mark = hashlib.sha256(version_key.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", outcome.name)[:MAX_NAME_LENGTH].strip("._")
        page = folder / f"{stem}-{mark}.html"
        if page.is_file() or _draw_output(outcome, page):
            links[outcome.name] = f"{quote(folder.name)}/{quote(page.name)}"
        if progress is not None:
            progress("drawing", number + 1, len(drawn))
    return links


def _draw_output(outcome: Outcome, page: Path) -> bool:
    """Draw an output; return False if it is unreadable, for example because it changed."""
    from graphquant.api.models import load
    from graphquant.visualize.drawing import model_drawing
    from graphquant.visualize.viewer_data import viewer_data, viewer_page

    try:
        drawing = model_drawing(load(Path(outcome.output)))
    except GraphQuantError:
        return False
    with suppress(OSError):  # `write_file` reports it
        page.parent.mkdir(exist_ok=True)
    write_file(page, viewer_page(viewer_data(drawing, [])), "Write the report to another folder.")
    return True
