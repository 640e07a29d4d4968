"""The `batch` command: options, reports and workers."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from graphquant.cli.options import (
    FORCE,
    INTERRUPTED,
    merge_disabled_algorithms,
    options_of,
    parse_max_memory,
    parse_shard,
    require_finite,
)
from graphquant.cli.output import batch_progress, print_view, progress_bar
from graphquant.errors import FindingsError, UsageError, escape_unprintable
from graphquant.utils.options import InsertOptions

if TYPE_CHECKING:
    from graphquant.batch.cache import OutcomeCache
    from graphquant.batch.run import BatchOptions, Execute
    from graphquant.batch.types import BatchReport, Entry, Outcome

CommandFunction = TypeVar("CommandFunction", bound="Callable[..., Any]")

OMITTED_OPTIONS = ("plan", "validate", "max_memory")
"""Options of `insert` that a batch does not have; `batch.manifest_schema.OMITTED_OPTIONS` gives the reasons."""

REPORT_OPTIONS = [
    click.option(
        "--report",
        "reports",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write a report: .json, .xml (JUnit), .sarif, .md, .html or .csv. Repeat it for several.",
    ),
    click.option(
        "--format",
        "form",
        type=click.Choice(["text", "json", "github"]),
        default="text",
        show_default=True,
        help="Format of the printed report; github prints annotations for a workflow.",
    ),
    click.option(
        "--compare",
        type=click.Path(path_type=Path),
        metavar="REPORT.json",
        help="Report regressions since an earlier report.",
    ),
    click.option("--fail-on", type=click.Choice(["regression"]), help="Exit code 1 if there is a regression."),
    click.option(
        "--sqnr-step",
        type=click.FloatRange(min=0),
        callback=require_finite,
        metavar="DB",
        help="Minimum loss of SQNR that counts as a regression. Default: 0.5.",
    ),
    click.option("--merge", is_flag=True, help="Merge the reports of all shards, REPORT.json..."),
    click.option("--attest", is_flag=True, help="Write an attestation of each output, OUTPUT.intoto.json."),
    click.option("--verify", is_flag=True, help="Rebuild all outputs in a temporary folder and compare their digests."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Options about reports."""

    reports: tuple[Path, ...]
    form: str
    compare: Path | None
    fail_on: str | None
    sqnr_step: float | None
    merge: bool
    attest: bool
    verify: bool

    def check_options(self, names: Sequence[str]) -> None:
        """Reject invalid combinations, before any work is done."""
        from graphquant.batch.reports import check_report_path

        if self.compare is None and self.sqnr_step is not None:
            raise UsageError("--sqnr-step applies to a comparison. Add --compare REPORT.json.")
        if self.compare is None and self.fail_on is not None:
            raise UsageError("--fail-on regression applies to a comparison. Add --compare REPORT.json.")
        if self.merge and (self.attest or self.verify):
            raise UsageError("--merge writes no models. Remove --attest and --verify.")
        if self.verify and (self.attest or self.fail_on or self.sqnr_step is not None):
            raise UsageError(
                "--verify compares digests and writes no output. Remove --attest, --fail-on and --sqnr-step."
            )
        if self.merge and not names:
            raise UsageError("--merge needs the JSON reports of all shards. Pass them as REPORT.json...")
        for path in self.reports:
            check_report_path(path)
            if self.fail_on is not None and self.compare is not None and path.resolve() == self.compare.resolve():
                raise UsageError(
                    f"--report {path} would overwrite the report of --compare, so the next run could not detect this"
                    " regression. Use another name, and copy the report when you accept it."
                )

    def check_entries(self, entries: Sequence[Entry]) -> None:
        """Reject reports that would overwrite a model, and attestations of remote outputs."""
        from graphquant.calibration.data.files import is_remote

        model_paths = {Path(path).resolve(): path for entry in entries for path in (entry.model, entry.output)}
        for report in self.reports:
            if report.resolve() in model_paths:
                raise UsageError(f"--report {report} is a model of the batch. Use another name for the report.")
        remote_outputs = [entry.output for entry in entries if is_remote(entry.output)]
        if self.attest and remote_outputs:
            raise UsageError(
                f"--attest writes next to local outputs, but {remote_outputs[0]} is remote. Remove --attest."
            )
        if self.verify and remote_outputs:
            raise UsageError(
                f"--verify reads local outputs, but {remote_outputs[0]} is remote. Copy it to this machine first."
            )

    def publish(
        self, report: BatchReport, earlier_report: BatchReport | None, entries: Sequence[Entry] = ()
    ) -> BatchReport:
        """Print the report, write attestations and report files, and return the report with its regressions.

        Raises:
            UsageError: A file cannot be written.
        """
        if earlier_report is not None and not self.verify:
            from graphquant.batch.reports import SQNR_STEP, compare_reports

            sqnr_step = SQNR_STEP if self.sqnr_step is None else self.sqnr_step
            report = compare_reports(report, earlier_report, sqnr_step=sqnr_step, fail=self.fail_on is not None)
        self._print_report(report)  # before the files, so that a write error does not hide the result
        if self.attest:
            from graphquant.batch.attestation import write_attestation
            from graphquant.calibration.data.files import is_remote

            by_name = {entry.name: entry for entry in entries}
            for outcome in report.outcomes:
                if outcome.products and not is_remote(outcome.output):
                    write_attestation(by_name[outcome.name], outcome)
        from graphquant.batch.reports import write_report

        for path in self.reports:
            with progress_bar() as progress:
                write_report(path, report, progress)
        return report

    def _print_report(self, report: BatchReport) -> None:
        if self.form == "text":
            from graphquant.batch.reports.text import batch_report_view

            print_view(batch_report_view(report))
        else:
            from graphquant.batch.reports import REPORTS, as_annotations

            click.echo(REPORTS[".json"](report) if self.form == "json" else as_annotations(report), nl=False)


def report_options(command: CommandFunction) -> CommandFunction:
    """Add the options about reports to a command, which receives them as one argument, `reporting`."""
    names = [field.name for field in fields(ReportOptions)]

    @wraps(command)
    def collect_options(**options: Any) -> Any:
        reporting = ReportOptions(**{name: options.pop(name) for name in names})
        return command(reporting=reporting, **options)

    decorated: Any = collect_options
    for option in reversed(REPORT_OPTIONS):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]  # click's decorators return the type of their argument


@click.command("batch")
@click.argument("names", nargs=-1, metavar="[MANIFEST|MODEL...]")
@options_of(InsertOptions, exclude=OMITTED_OPTIONS, unset=True)
@click.option("-o", "--output", metavar="PATTERN", help="Default: {parent}/{stem}.quant{suffix}.")
@click.option("--max-size", metavar="SIZE", help="Maximum size of an output.")
@click.option("--check", metavar="BACKEND", help="Require that `check --for BACKEND` has no findings.")
@click.option("--shard", metavar="I/N", help="Process only part I of N; --merge merges the reports.")
@click.option("--scheduler", metavar="ADDRESS", help="Run on a dask cluster, tcp://host:8786.")
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), metavar="N", help="Number of workers. Default: by cores and memory."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    callback=require_finite,
    metavar="SECONDS",
    help="Stop models that take longer.",
)
@click.option("--max-memory", metavar="SIZE", help="Stop models whose worker uses more memory, such as 4GB.")
@click.option(
    "--retries", type=click.IntRange(min=0), default=1, show_default=True, metavar="N", help="Attempts after a crash."
)
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@FORCE
@click.option("--no-cache", is_flag=True, help="Ignore the cache and do not fill it.")
@click.option(
    "--cache-dir", type=click.Path(path_type=Path), metavar="DIR", help="Default: the cache folder of the user."
)
@click.option(
    "--prune-cache", metavar="SIZE|AGE", help="Limit the cache afterwards to a size, or to an age such as 30d."
)
@click.option("--allow-code", is_flag=True, help="Execute the Python code that a MANIFEST names as data.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of manifests for editors.")
@report_options
def batch_command(
    names: tuple[str, ...],
    shard: str | None,
    scheduler: str | None,
    jobs: int | None,
    timeout: float | None,
    max_memory: str | None,
    retries: int,
    resume: bool,
    force: bool,
    no_cache: bool,
    cache_dir: Path | None,
    prune_cache: str | None,
    allow_code: bool,
    schema: bool,
    reporting: ReportOptions,
    **settings: Any,
) -> None:
    """Quantize the models of a MANIFEST, or MODELs and globs.

    MANIFEST is graphquant.toml by default. Outputs that are up to date are not built again. docs/batch.md describes
    manifests, gates and the cache. Exit code 1 if a model failed.
    """
    if schema:
        from graphquant.batch import manifest_schema

        click.echo(json.dumps(manifest_schema.manifest_schema(), indent=2))
        return
    if scheduler is not None and jobs is not None:
        raise UsageError("The cluster decides the number of workers. Remove -j or --scheduler.")
    from graphquant.batch.attestation import verify_outputs
    from graphquant.batch.cache import OutcomeCache, default_cache_folder, parse_prune_limit
    from graphquant.batch.manifest import has_manifest, load_entries
    from graphquant.batch.reports import merge_reports
    from graphquant.batch.run import BatchOptions, deal_digest, select_shard
    from graphquant.batch.types import read_report

    folder = cache_dir or default_cache_folder()
    if prune_cache is not None:
        parse_prune_limit(prune_cache)
        if not names and not reporting.reports and not has_manifest():
            _prune_cache(OutcomeCache(folder), prune_cache, reporting)
            return
    reporting.check_options(names)
    earlier_report = None if reporting.compare is None else read_report(reporting.compare)
    if reporting.merge:
        merged_report = merge_reports({Path(name): read_report(Path(name)) for name in names})
        _exit_with_report(reporting.publish(merged_report, earlier_report), merged=True)
        return
    shard_position = parse_shard(shard)
    merge_disabled_algorithms(settings)
    given_settings = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in settings.items()
        if value is not None and value != ()
    }
    all_entries = load_entries(names, given_settings, allow_code=allow_code)
    shard_entries = select_shard(all_entries, shard_position)
    reporting.check_entries(shard_entries)
    limit = parse_max_memory(max_memory)
    options = BatchOptions(folder=folder, cache=not no_cache, resume=resume, force=force, shard=shard_position)
    if shard_position[1] > 1:
        options = replace(options, deal_digest=deal_digest(all_entries))

    def run(todo: Sequence[Entry], options: BatchOptions) -> BatchReport:
        return _run_workers(todo, options, scheduler, jobs, timeout, limit, retries)

    rebuild_options = replace(options, cache=False, resume=False)
    report = (
        verify_outputs(
            shard_entries, lambda entries, folder: run(entries, replace(rebuild_options, folder=folder)), earlier_report
        )
        if reporting.verify
        else run(shard_entries, options)
    )
    report = reporting.publish(report, earlier_report, shard_entries)
    if prune_cache is not None:
        _prune_cache(OutcomeCache(folder), prune_cache, reporting)
    _exit_with_report(report)


def _run_workers(
    entries: Sequence[Entry],
    options: BatchOptions,
    scheduler: str | None,
    jobs: int | None,
    timeout: float | None,
    limit: int | None,
    retries: int,
) -> BatchReport:
    """Run the batch on this machine, or on the cluster of the scheduler."""
    from graphquant.batch.run import run_batch
    from graphquant.batch.work import quantize_entry
    from graphquant.batch.workers import WorkerLimits, default_jobs, run_workers
    from graphquant.calibration.calibrate import available_memory

    workers = min(jobs or default_jobs(), max(len(entries), 1)) if scheduler is None else 1
    limits = WorkerLimits(jobs=workers, timeout=timeout, memory=limit, retries=retries)
    with _sigterm_as_interrupt(), batch_progress(len(entries)) as bars:

        def execute(todo: Any) -> Iterator[Outcome]:
            if scheduler is None:
                worker = partial(quantize_entry, max_memory=(limit or available_memory() // workers) // 2)
                return run_workers(todo, worker, limits, bars.update_model)
            from graphquant.batch.cluster import run_on_cluster

            worker = partial(quantize_entry, max_memory=limit // 2 if limit else None)
            return run_on_cluster(scheduler, todo, worker, limits)

        def warn(message: str) -> None:
            click.echo(escape_unprintable(message), err=True)

        execute_batch: Execute = execute
        return run_batch(entries, options, execute_batch, on_outcome=bars.finish_model, on_warning=warn)


def _exit_with_report(report: BatchReport, *, merged: bool = False) -> None:
    """Exit with the code of the report."""
    from graphquant.batch.reports import has_regressions

    if not merged and any(outcome.status == "skipped" for outcome in report.outcomes):
        click.echo("Interrupted. Finished outputs are kept; continue with --resume.", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    if not report.passed or has_regressions(report):
        raise click.exceptions.Exit(FindingsError.exit_code)


def _prune_cache(cache: OutcomeCache, limit: str, reporting: ReportOptions) -> None:
    from graphquant.batch.cache_key import FileHashes

    removed_count, freed_bytes = cache.prune(limit)
    with FileHashes(cache.folder / "hashes.sqlite") as memo:
        memo.remove_missing()
    click.echo(f"Removed {removed_count} outputs ({freed_bytes} bytes) from the cache.", err=reporting.form != "text")


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM, with which CI systems end a job, like Ctrl-C."""
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
