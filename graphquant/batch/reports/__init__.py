"""A batch's report in the forms that people and CI systems read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from graphquant.batch.types import report_json
from graphquant.errors import UsageError, did_you_mean
from graphquant.whole import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from graphquant.batch.types import Report
    from graphquant.pipeline import Progress


def as_json(report: Report) -> str:
    """JSON, as report.schema.json beside this file describes it; `--compare` and `--merge` read it."""
    return json.dumps(report_json(report), indent=2, allow_nan=False) + "\n"


def as_junit(report: Report) -> str:
    """JUnit XML."""
    from graphquant.batch.reports.junit import junit

    return junit(report)


def as_sarif(report: Report) -> str:
    """SARIF 2.1.0, for code scanning."""
    from graphquant.batch.reports.findings import ALL_CODES, notices
    from graphquant.view.notices import sarif

    return json.dumps(sarif(notices(report), ALL_CODES), indent=2) + "\n"


def as_markdown(report: Report) -> str:
    """Markdown, for a step summary."""
    from graphquant.batch.reports.markdown import markdown

    return markdown(report)


def as_html(report: Report) -> str:
    """One page, without links to graphs; `write_report` draws them."""
    from graphquant.batch.reports.html import page

    return page(report)


def as_annotations(report: Report) -> str:
    """Commands that a GitHub workflow shows beside the files."""
    from graphquant.batch.reports.findings import notices
    from graphquant.view.notices import github

    return github(notices(report))


REPORTS: Mapping[str, Callable[[Report], str]] = {
    ".json": as_json,
    ".xml": as_junit,
    ".sarif": as_sarif,
    ".md": as_markdown,
    ".html": as_html,
}
"""What writes a report, by the suffix of its file."""


def check_report(path: Path) -> None:
    """Refuses a report of no known kind, before any work is done.

    Raises:
        UsageError: The suffix is of none, or the folder is missing or cannot be written.
    """
    from graphquant import outputs

    if path.suffix not in REPORTS:
        raise UsageError(
            f"{path} has the suffix {path.suffix!r}, which is of no kind of report. Give it one of"
            f" {', '.join(REPORTS)}.{did_you_mean(path.suffix, REPORTS)}"
        )
    outputs.check_output(path, force=True)


def write_report(path: Path, report: Report, progress: Progress | None = None) -> None:
    """Writes a report of the kind that the path's suffix names, whole or not at all; a page with its models' graphs.

    Raises:
        UsageError: It cannot be written.
    """
    if path.suffix == ".html":
        from graphquant.batch.reports.graphs import draw_graphs
        from graphquant.batch.reports.html import page

        text = page(report, draw_graphs(report, path, progress))
    else:
        text = REPORTS[path.suffix](report)
    try:
        with whole(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Give another file.") from error


__all__ = ["REPORTS", "as_annotations", "check_report", "write_report"]
