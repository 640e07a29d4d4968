"""The `batch` command: options, reports and workers."""

# ruff: noqa: RUF009  # option() returns a dataclass field, not a shared default

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from graphquant.cli.options import (
    FORCE,
    INTERRUPTED,
    PATH,
    GroupedCommand,
    NameType,
    collect_options,
    example_lines,
    options_of,
    parse_shard,
)
from graphquant.cli.output import BatchProgress, print_view, progress_bar, remember_output, signal_handler, terminal_bar
from graphquant.errors import FindingsError, UsageError, escape_unprintable
from graphquant.utils.options import BACKEND_NAMES, InsertOptions, Options, option

if TYPE_CHECKING:
    from graphquant.batch.cache import OutcomeCache
    from graphquant.batch.run import BatchOptions
    from graphquant.batch.types import BatchReport, Entry, Outcome
    from graphquant.utils.option_types import Bytes, Count, NonNegative, NumberFromZero, Seconds

OMITTED_OPTIONS = ("plan", "validate", "max_memory")
"""Options of `insert` that a batch does not have; `batch.manifest_schema.OMITTED_OPTIONS` gives the reasons."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Options about reports."""

    reports: tuple[Path, ...] = option(
        (),
        "Write a report: .json, .xml (JUnit), .sarif, .md, .html or .csv. Repeat it for several.",
        metavar="FILE",
        flag="--report",
    )
    form: Literal["text", "json", "github"] = option(
        "text",
        "Format of the printed report; github prints annotations for a workflow.",
        flag="--format",
        choices=("text", "json", "github"),
    )
    compare: Path | None = option(None, "Report regressions since an earlier report.", metavar="REPORT.json", path=True)
    fail_on: Literal["regression"] | None = option(
        None, "Exit code 1 if there is a regression.", choices=("regression",)
    )
    sqnr_step: NonNegative | None = option(
        None, "Minimum loss of SQNR that counts as a regression. Default: 0.5.", metavar="DB"
    )
    merge: bool = option(False, "Merge the reports of all shards, REPORT.json...")
    attest: bool = option(False, "Write an attestation of each output, OUTPUT.intoto.json.")
    verify: bool = option(False, "Rebuild all outputs in a temporary folder and compare their digests.")

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

        Raises a UsageError if a file cannot be written.
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
            remember_output(path)
        return report

    def _print_report(self, report: BatchReport) -> None:
        if self.form == "text":
            from graphquant.batch.reports.text import batch_report_view

            print_view(batch_report_view(report))
        else:
            from graphquant.batch.reports import REPORTS, as_annotations

            click.echo(REPORTS[".json"](report) if self.form == "json" else as_annotations(report), nl=False)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(Options):
    """Options about workers."""

    scheduler: str | None = option(None, "Run on a dask cluster, tcp://host:8786.", metavar="ADDRESS")
    jobs: Count | None = option(None, "Number of workers. Default: by cores and memory.", metavar="N", flag="-j --jobs")
    timeout: Seconds | None = option(None, "Stop models that take longer.", metavar="SECONDS")
    max_memory: Bytes | None = option(None, "Stop models whose worker uses more memory, such as 4GB.", metavar="SIZE")
    retries: NumberFromZero = option(1, "Further attempts after a crash.", metavar="N")


@click.command(
    "batch",
    cls=GroupedCommand,
    epilog=example_lines(
        "batch",
        "batch 'models/*.onnx' --data calibration.npz --min-sqnr 25 --report report.html",
        "batch graphquant.toml --shard 2/8 --report part2.json",
        "batch --merge part1.json part2.json --report all.html",
    ),
)
@click.argument("names", nargs=-1, metavar="[MANIFEST|MODEL...]")
@options_of(InsertOptions, exclude=OMITTED_OPTIONS, unset=True)
@click.option("-o", "--output", metavar="PATTERN", help="Default: {parent}/{stem}.quant{suffix}.")
@click.option("--max-size", metavar="SIZE", help="Maximum size of an output.")
@click.option(
    "--check",
    type=NameType(BACKEND_NAMES),
    metavar="BACKEND",
    help="Require that `check --for BACKEND` has no findings.",
)
@click.option("--shard", metavar="I/N", help="Process only part I of N; --merge merges the reports.")
@options_of(WorkerOptions)
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@FORCE
@click.option("--no-cache", is_flag=True, help="Ignore the cache and do not fill it.")
@click.option("--cache-dir", type=PATH, metavar="DIR", help="Default: the cache folder of the user.")
@click.option(
    "--prune-cache", metavar="SIZE|AGE", help="Limit the cache afterwards to a size, or to an age such as 30d."
)
@click.option("--allow-code", is_flag=True, help="Execute the Python code that a MANIFEST names as data.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of manifests for editors.")
@options_of(ReportOptions)
def batch_command(
    names: tuple[str, ...],
    shard: str | None,
    resume: bool,
    force: bool,
    no_cache: bool,
    cache_dir: Path | None,
    prune_cache: str | None,
    allow_code: bool,
    schema: bool,
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
    reporting, workers = collect_options(ReportOptions, settings), collect_options(WorkerOptions, settings)
    if workers.scheduler is not None and workers.jobs is not None:
        raise UsageError("The cluster decides the number of workers. Remove -j or --scheduler.")
    from platformdirs import user_cache_path

    from graphquant.batch.attestation import verify_outputs
    from graphquant.batch.cache import OutcomeCache, parse_prune_limit
    from graphquant.batch.manifest import has_manifest, load_entries
    from graphquant.batch.reports import merge_reports
    from graphquant.batch.run import BatchOptions, deal_digest, select_shard
    from graphquant.batch.types import read_report

    folder = cache_dir or user_cache_path("graphquant", appauthor=False)
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
    given_settings = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in settings.items()
        if value is not None and value != ()
    }
    warnings: list[str] = []
    all_entries = load_entries(names, given_settings, allow_code=allow_code, on_warning=warnings.append)
    shard_entries = select_shard(all_entries, shard_position)
    reporting.check_entries(shard_entries)
    options = BatchOptions(folder=folder, cache=not no_cache, resume=resume, force=force, shard=shard_position)
    if shard_position[1] > 1:
        options = replace(options, deal_digest=deal_digest(all_entries))

    run = partial(_run_workers, settings=workers)
    rebuild_options = replace(options, cache=False, resume=False)
    report = (
        verify_outputs(
            shard_entries, lambda entries, folder: run(entries, replace(rebuild_options, folder=folder)), earlier_report
        )
        if reporting.verify
        else run(shard_entries, options)
    )
    report = reporting.publish(replace(report, warnings=tuple(warnings)), earlier_report, shard_entries)
    if prune_cache is not None:
        _prune_cache(OutcomeCache(folder), prune_cache, reporting)
    _exit_with_report(report)


def _run_workers(entries: Sequence[Entry], options: BatchOptions, settings: WorkerOptions) -> BatchReport:
    """Run the batch on this machine, or on the cluster of the scheduler."""
    from graphquant.batch.run import run_batch
    from graphquant.batch.work import quantize_entry
    from graphquant.batch.workers import WorkerLimits, default_jobs, run_workers
    from graphquant.calibration.memory import available_memory

    scheduler, limit = settings.scheduler, settings.max_memory
    workers = min(settings.jobs or default_jobs(), max(len(entries), 1)) if scheduler is None else 1
    limits = WorkerLimits(jobs=workers, timeout=settings.timeout, memory=limit, retries=settings.retries)
    # CI systems end a job with SIGTERM, which then acts like Ctrl-C.
    with signal_handler(signal.SIGTERM, signal.default_int_handler), terminal_bar("TimeElapsedColumn") as bar:
        bars = BatchProgress(len(entries), bar)

        def execute(todo: Any) -> Iterator[Outcome]:
            if scheduler is None:
                worker = partial(quantize_entry, max_memory=(limit or available_memory() // workers) // 2)
                return run_workers(todo, worker, limits, bars.update_model)
            from graphquant.batch.cluster import run_on_cluster

            worker = partial(quantize_entry, max_memory=limit // 2 if limit else None)
            return run_on_cluster(scheduler, todo, worker, limits)

        return run_batch(
            entries,
            options,
            execute,
            on_outcome=bars.finish_model,
            on_warning=lambda message: click.echo(escape_unprintable(message), err=True),
        )


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
