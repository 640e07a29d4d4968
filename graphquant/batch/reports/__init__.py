"""A batch's report in the forms that people and CI systems read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from graphquant.batch.types import batch_report_json
from graphquant.errors import UsageError, did_you_mean
from graphquant.utils.atomic_files import atomic_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from graphquant.api import Progress
    from graphquant.batch.types import BatchReport


__all__ = ["REPORTS", "as_annotations", "check_report_path", "write_report"]


def as_json(report: BatchReport) -> str:
    """JSON, as report.schema.json beside this file describes it; `--compare` and `--merge` read it."""
    return json.dumps(batch_report_json(report), indent=2, allow_nan=False) + "\n"


def as_junit(report: BatchReport) -> str:
    """JUnit XML."""
    from graphquant.batch.reports.junit import junit_xml

    return junit_xml(report)


def as_sarif(report: BatchReport) -> str:
    """SARIF 2.1.0, for code scanning."""
    from graphquant.batch.reports.text import ALL_CODES, report_notices
    from graphquant.visualize.ci_annotations import sarif_log

    return json.dumps(sarif_log(report_notices(report), ALL_CODES), indent=2) + "\n"


def as_markdown(report: BatchReport) -> str:
    """Markdown, for a step summary."""
    from graphquant.batch.reports.text import report_markdown

    return report_markdown(report)


def as_html(report: BatchReport) -> str:
    """One page, without links to graphs; `write_report` draws them."""
    from graphquant.batch.reports.html import report_page

    return report_page(report)


def as_annotations(report: BatchReport) -> str:
    """Commands that a GitHub workflow shows beside the files."""
    from graphquant.batch.reports.text import report_notices
    from graphquant.visualize.ci_annotations import github_annotations

    return github_annotations(report_notices(report))


REPORTS: Mapping[str, Callable[[BatchReport], str]] = {
    ".json": as_json,
    ".xml": as_junit,
    ".sarif": as_sarif,
    ".md": as_markdown,
    ".html": as_html,
}
"""What writes a report, by the suffix of its file."""


def check_report_path(path: Path) -> None:
    """Refuses a report of no known kind, before any work is done.

    Raises:
        UsageError: The suffix is of none, or the folder is missing or cannot be written.
    """
    from graphquant.api import models

    if path.suffix not in REPORTS:
        raise UsageError(
            f"{path} has the suffix {path.suffix!r}, which is of no kind of report. Give it one of"
            f" {', '.join(REPORTS)}.{did_you_mean(path.suffix, REPORTS)}"
        )
    models.check_output(path, force=True)


def write_report(path: Path, report: BatchReport, progress: Progress | None = None) -> None:
    """Writes a report of the kind that the path's suffix names, whole or not at all; a page with its models' graphs.

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
