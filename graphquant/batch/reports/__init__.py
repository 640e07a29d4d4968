"""Formats of a batch report for people and CI systems."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from graphquant.batch.types import batch_report_json
from graphquant.errors import UsageError, did_you_mean
from graphquant.utils.atomic_files import atomic_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from graphquant.batch.types import BatchReport
    from graphquant.utils.progress import Progress


__all__ = ["REPORTS", "as_annotations", "check_report_path", "write_report"]


def as_json(report: BatchReport) -> str:
    """Return JSON as specified by report.schema.json; `--compare` and `--merge` read it."""
    return json.dumps(batch_report_json(report), indent=2, allow_nan=False) + "\n"


def as_junit(report: BatchReport) -> str:
    """Return JUnit XML."""
    from graphquant.batch.reports.junit import junit_xml

    return junit_xml(report)


def as_sarif(report: BatchReport) -> str:
    """Return SARIF 2.1.0 for code scanning."""
    from graphquant.batch.reports.text import ALL_CODES, report_notices
    from graphquant.visualize.check_report import sarif_log

    return json.dumps(sarif_log(report_notices(report), ALL_CODES), indent=2) + "\n"


def as_markdown(report: BatchReport) -> str:
    """Return Markdown for a step summary."""
    from graphquant.batch.reports.text import report_markdown

    return report_markdown(report)


def as_html(report: BatchReport) -> str:
    """Return a page without links to graphs; `write_report` draws the graphs."""
    from graphquant.batch.reports.html import report_page

    return report_page(report)


def as_csv(report: BatchReport) -> str:
    """Return the table as CSV."""
    from graphquant.batch.reports.text import report_csv

    return report_csv(report)


def as_annotations(report: BatchReport) -> str:
    """Return GitHub workflow commands."""
    from graphquant.batch.reports.text import report_notices
    from graphquant.visualize.check_report import github_annotations

    return github_annotations(report_notices(report))


REPORTS: Mapping[str, Callable[[BatchReport], str]] = {
    ".json": as_json,
    ".xml": as_junit,
    ".sarif": as_sarif,
    ".md": as_markdown,
    ".html": as_html,
    ".csv": as_csv,
}
"""Report writers by file suffix."""


def check_report_path(path: Path) -> None:
    """Reject an invalid report path before any work is done.

    Raises:
        UsageError: The suffix is unknown, or the folder is missing or read-only.
    """
    from graphquant.api import models

    if path.suffix not in REPORTS:
        raise UsageError(
            f"{path} has the suffix {path.suffix!r}, which is not a report format. Use one of"
            f" {', '.join(REPORTS)}.{did_you_mean(path.suffix, REPORTS)}"
        )
    models.check_output(path, force=True)


def write_report(path: Path, report: BatchReport, progress: Progress | None = None) -> None:
    """Write a report in the format of the path's suffix, atomically; an HTML page with the graphs of its models.

    Raises:
        UsageError: It cannot be written.
    """
    if path.suffix == ".html":
        from graphquant.batch.reports.html import draw_graphs, report_page

        text = report_page(report, draw_graphs(report, path, progress))
    else:
        text = REPORTS[path.suffix](report)
    try:
        with atomic_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Give another file.") from error
