"""Batch report as one page that works from disk: a sortable, filterable table with links to drawn graphs.

Names come from manifests and models and may contain anything. They are escaped, and the Content-Security-Policy allows
only the page's own script.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from html import escape
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
from graphquant.errors import GraphQuantError, UsageError, escape_unprintable
from graphquant.utils.atomic_files import atomic_file
from graphquant.visualize.tables import group_values
from graphquant.visualize.viewer_data import page_head

if TYPE_CHECKING:
    from graphquant.batch.types import BatchReport, Outcome, OutcomeChange
    from graphquant.utils import Progress


def report_page(report: BatchReport, graphs: Mapping[str, str] | None = None) -> str:
    """Return the page; deterministic. `graphs` has relative addresses of the models' graph pages, by name."""
    return "\n".join(_report_lines(report, graphs or {})) + "\n"


def _report_lines(report: BatchReport, graphs: Mapping[str, str]) -> Iterator[str]:
    script, style = _report_file("report.js"), _report_file("report.css")
    yield page_head("graphquant batch", style, script) + "<body>"
    yield from _page_header(report)
    yield '<table id="models"><thead><tr>'
    for column in REPORT_COLUMNS:
        attributes = ' class="n"' if column.value is not None else ""
        attributes += f' title="{_html_text(INT8_NOTE)}"' if column.title == "int8" else ""
        yield f'<th{attributes} aria-sort="none"><button type="button">{column.title}</button></th>'
    yield "<th>graph</th>\n</tr></thead><tbody>"
    changes = group_values((change.name, change) for change in report.changes)
    for outcome in report.outcomes:
        yield _model_row(outcome, changes.pop(outcome.name, []), graphs.get(outcome.name))
    yield "</tbody></table>"
    for change in chain.from_iterable(changes.values()):
        yield f'<p class="bad">{_html_text(change.name)}: {_html_text(change.message)}</p>'
    yield f"<script>{script}</script></body></html>"


def _page_header(report: BatchReport) -> Iterator[str]:
    started = datetime.fromtimestamp(report.started, UTC).strftime("%Y-%m-%d %H:%M UTC")
    yield f"<header><h1>graphquant batch</h1><p>{_html_text(report_summary(report))}</p>"
    yield f'<p class="soft">graphquant {_html_text(report.version)}, {started}</p>'
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


def _model_row(outcome: Outcome, changes: list[OutcomeChange], graph: str | None) -> str:
    passed = outcome.passed and all(change.level == "note" for change in changes)
    status_class = "soft" if outcome.status == "skipped" else "good" if passed else "bad"
    status = "regressed" if outcome.passed and not passed else status_text(outcome)
    special = {
        "model": f'<td class="name" data-v="{_html_text(outcome.name)}">{_name_cell(outcome, changes)}</td>',
        "status": f'<td data-v="{status}"><span class="{status_class}">{status}</span></td>',
        "int8": _number_cell(outcome.int8_share, _int8_bar(outcome)),
    }
    cells = [
        special.get(column.title) or _number_cell(column.value and column.value(outcome), column.text(outcome))
        for column in REPORT_COLUMNS
    ]
    cells.append(f'<td><a href="{_html_text(graph)}">graph</a></td>' if graph is not None else "<td></td>")
    changed = ' data-changed="1"' if changes else ""
    return f'<tr data-status="{outcome.status}"{changed}>{"".join(cells)}</tr>'


def _number_cell(value: float | None, text: str) -> str:
    return f'<td class="n" data-v="{"" if value is None else f"{value:.6g}"}">{text}</td>'


def _int8_bar(outcome: Outcome) -> str:
    if outcome.int8_ops is None or outcome.int8_share is None:
        return ""
    int8_ops, all_ops = outcome.int8_ops
    width = round(60 * outcome.int8_share, 1)
    band, bar = '<rect class="band" width="60" height="8"/>', f'<rect width="{width}" height="8"/>'
    drawn = f'<svg width="60" height="8" aria-hidden="true">{band}{bar}</svg>'
    return f'<span title="{int8_ops} of {all_ops} ops">{percent_text(outcome.int8_share)} {drawn}</span>'


def _name_cell(outcome: Outcome, changes: list[OutcomeChange]) -> str:
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
        f"<tr><th>{_html_text(label)}</th><td>{_html_text(detail)}</td></tr>"
        for label, detail in rows.items()
        if detail
    )
    messages = [("bad", reason) for reason in failure_reasons(outcome)]
    messages += [("soft" if change.level == "note" else "bad", change.message) for change in changes]
    paragraphs = "".join(f'<p class="{style}">{_html_text(message)}</p>' for style, message in messages)
    return f"<details><summary>{_html_text(outcome.name)}</summary><table>{table}</table></details>{paragraphs}"


def _html_text(text: str) -> str:
    return escape("\n".join(map(escape_unprintable, text.split("\n"))))


def _report_file(name: str) -> str:
    return files("graphquant.batch.reports").joinpath(name).read_text("utf-8")


MAX_NAME_LENGTH = 80  # maximum number of characters of a model's name in its page's name


def draw_graphs(report: BatchReport, report_path: Path, progress: Progress | None = None) -> dict[str, str]:
    """Draw each local output into a folder next to the report, unless it is drawn already.

    Returns:
        Address of each page relative to the report, by model name.

    Raises:
        UsageError: The folder cannot be written.
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
    from graphquant import api
    from graphquant.visualize.drawing import model_drawing
    from graphquant.visualize.viewer_data import viewer_data, viewer_page

    try:
        drawing = model_drawing(api.load(Path(outcome.output)))
    except GraphQuantError:
        return False
    try:
        page.parent.mkdir(exist_ok=True)
        with atomic_file(page) as file:
            file.write(viewer_page(viewer_data(drawing, [])).encode())
    except OSError as error:
        raise UsageError(f"{page} cannot be written: {error.strerror}. Write the report to another folder.") from error
    return True
