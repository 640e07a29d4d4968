"""What `graphquant batch` does with a report: files, the terminal, earlier reports, statements."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from graphquant.cli.options import finite
from graphquant.cli.output import print_view, progress_bar
from graphquant.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphquant.batch.types import Entry, Report

F = TypeVar("F", bound="Callable[..., Any]")

_OPTIONS = [
    click.option(
        "--report",
        "reports",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write a report: .json, .xml (JUnit), .sarif, .md or .html; repeat it for several.",
    ),
    click.option(
        "--format",
        "form",
        type=click.Choice(["text", "json", "github"]),
        default="text",
        show_default=True,
        help="What is printed; github: annotations for a workflow.",
    ),
    click.option(
        "--compare",
        type=click.Path(path_type=Path),
        metavar="REPORT.json",
        help="Tell what is worse than in an earlier report.",
    ),
    click.option("--fail-on", type=click.Choice(["regression"]), help="End with exit code 1 if something is."),
    click.option(
        "--sqnr-step",
        type=click.FloatRange(min=0),
        callback=finite,
        metavar="DB",
        help="SQNR that may be lost without that being a regression; 0.5 by default.",
    ),
    click.option("--merge", is_flag=True, help="Make one report of those of all shards, REPORT.json..."),
    click.option("--attest", is_flag=True, help="Write what each output was made of, as OUTPUT.intoto.json."),
    click.option(
        "--verify", is_flag=True, help="Build all again elsewhere, and compare with what there is; write no output."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """What was asked for; see the options."""

    reports: tuple[Path, ...]
    form: str
    compare: Path | None
    fail_on: str | None
    sqnr_step: float | None
    merge: bool
    attest: bool
    verify: bool

    def check(self, names: Sequence[str]) -> None:
        """Refuses what cannot be carried out, before any work is done.

        Raises:
            UsageError: Options that do not go together, or a report that cannot be written.
        """
        from graphquant.batch.reports import check_report

        if self.compare is None and self.sqnr_step is not None:
            raise UsageError("--sqnr-step is about a comparison. Give --compare REPORT.json too.")
        if self.compare is None and self.fail_on is not None:
            raise UsageError("--fail-on regression is about a comparison. Give --compare REPORT.json too.")
        if self.merge and (self.attest or self.verify):
            raise UsageError("--merge makes no models. Leave --attest and --verify out.")
        if self.verify and (self.attest or self.fail_on or self.sqnr_step is not None):
            raise UsageError(
                "--verify compares digests and writes no output. Leave --attest, --fail-on and --sqnr-step out."
            )
        if self.merge and not names:
            raise UsageError("--merge wants the JSON reports of all shards. Give them as REPORT.json...")
        for path in self.reports:
            check_report(path)
            if self.fail_on is not None and self.compare is not None and path.resolve() == self.compare.resolve():
                raise UsageError(
                    f"--report {path} would take the place of what this run is held against, and the next run would be"
                    " fine. Give another name, and copy it there when this one is accepted."
                )

    def check_entries(self, entries: Sequence[Entry]) -> None:
        """Refuses reports that would take the place of a model, and statements that have none.

        Raises:
            UsageError: A report is a model or an output, or an output is elsewhere and wants a statement.
        """
        from graphquant.data.files import remote

        taken = {Path(path).resolve(): path for entry in entries for path in (entry.model, entry.output)}
        for report in self.reports:
            if report.resolve() in taken:
                raise UsageError(f"--report {report} is a model of the batch. Give the report another name.")
        far = [entry.output for entry in entries if remote(entry.output)]
        if self.attest and far:
            raise UsageError(
                f"--attest writes beside outputs on this machine, and {far[0]} is elsewhere. Leave it out."
            )
        if self.verify and far:
            raise UsageError(f"--verify reads outputs on this machine, and {far[0]} is elsewhere. Copy it here first.")

    def earlier(self) -> Report | None:
        """The report of --compare.

        Raises:
            UsageError: It cannot be read, or is none.
        """
        from graphquant.batch.types import read_report

        return None if self.compare is None else read_report(self.compare)

    def merged(self, names: Sequence[str]) -> Report:
        """The reports at `names` as one.

        Raises:
            UsageError: One cannot be read, or they do not belong together.
        """
        from graphquant.batch.merging import merged
        from graphquant.batch.types import read_report

        return merged({Path(name): read_report(Path(name)) for name in names})

    def deliver(self, report: Report, last: Report | None, entries: Sequence[Entry] = ()) -> Report:
        """Prints, and writes statements and reports; the report with what changed since `last`.

        Raises:
            UsageError: Something cannot be written.
        """
        if last is not None and not self.verify:
            from graphquant.batch.regressions import SQNR_STEP, compared

            step = SQNR_STEP if self.sqnr_step is None else self.sqnr_step
            report = compared(report, last, sqnr_step=step, fail=self.fail_on is not None)
        self._print(report)  # first: what cannot be written takes no result away
        if self.attest:
            _attest(report, entries)
        from graphquant.batch.reports import write_report

        for path in self.reports:
            with progress_bar() as progress:
                write_report(path, report, progress)
        return report

    def _print(self, report: Report) -> None:
        if self.form == "text":
            from graphquant.batch.reports.text import report_view

            print_view(report_view(report))
        else:
            from graphquant.batch.reports import REPORTS, as_annotations

            click.echo(REPORTS[".json"](report) if self.form == "json" else as_annotations(report), nl=False)


def report_options(command: F) -> F:
    """The options about reports; the command is given them as one argument, `asked`."""
    names = [field.name for field in fields(Reporting)]

    @wraps(command)
    def gathered(**given: Any) -> Any:
        asked = Reporting(**{name: given.pop(name) for name in names})
        return command(asked=asked, **given)

    decorated: Any = gathered
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]  # click's decorators give what they were given


def _attest(report: Report, entries: Sequence[Entry]) -> None:
    from graphquant.batch.statements import write_statement
    from graphquant.data.files import remote

    by_name = {entry.name: entry for entry in entries}
    for outcome in report.outcomes:
        if outcome.products and not remote(outcome.output):
            write_statement(by_name[outcome.name], outcome)
