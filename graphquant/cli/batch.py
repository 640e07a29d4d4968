"""`graphquant batch`."""

from __future__ import annotations

import json
import signal
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from graphquant.cli.options import INTERRUPTED, parse_max_memory, require_finite, selection_options
from graphquant.cli.options import parse_shard as shard_part
from graphquant.cli.output import batch_progress, print_view, progress_bar
from graphquant.errors import FindingsError, UsageError, escape_unprintable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from graphquant.batch.cache import OutcomeCache
    from graphquant.batch.run import BatchOptions, Execute
    from graphquant.batch.types import BatchReport, Entry, Outcome


# What `graphquant batch` does with a report: files, the terminal, earlier reports, statements.

CommandFunction = TypeVar("CommandFunction", bound="Callable[..., Any]")

REPORT_OPTIONS = [
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
        callback=require_finite,
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
class ReportOptions:
    """What was asked for; see the options."""

    reports: tuple[Path, ...]
    form: str
    compare: Path | None
    fail_on: str | None
    sqnr_step: float | None
    merge: bool
    attest: bool
    verify: bool

    def check_options(self, names: Sequence[str]) -> None:
        """Refuses what cannot be carried out, before any work is done.

        Raises:
            UsageError: Options that do not go together, or a report that cannot be written.
        """
        from graphquant.batch.reports import check_report_path

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
            check_report_path(path)
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
        from graphquant.calibration.data.files import is_remote

        model_paths = {Path(path).resolve(): path for entry in entries for path in (entry.model, entry.output)}
        for report in self.reports:
            if report.resolve() in model_paths:
                raise UsageError(f"--report {report} is a model of the batch. Give the report another name.")
        remote_outputs = [entry.output for entry in entries if is_remote(entry.output)]
        if self.attest and remote_outputs:
            raise UsageError(
                f"--attest writes beside outputs on this machine, and {remote_outputs[0]} is elsewhere. Leave it out."
            )
        if self.verify and remote_outputs:
            raise UsageError(
                f"--verify reads outputs on this machine, and {remote_outputs[0]} is elsewhere. Copy it here first."
            )

    def read_earlier_report(self) -> BatchReport | None:
        """The report of --compare.

        Raises:
            UsageError: It cannot be read, or is none.
        """
        from graphquant.batch.types import read_report

        return None if self.compare is None else read_report(self.compare)

    def merge_reports(self, names: Sequence[str]) -> BatchReport:
        """The reports at `names` as one.

        Raises:
            UsageError: One cannot be read, or they do not belong together.
        """
        from graphquant.batch.shards import merge_reports
        from graphquant.batch.types import read_report

        return merge_reports({Path(name): read_report(Path(name)) for name in names})

    def publish(
        self, report: BatchReport, earlier_report: BatchReport | None, entries: Sequence[Entry] = ()
    ) -> BatchReport:
        """Prints, and writes statements and reports; the report with what changed since `earlier_report`.

        Raises:
            UsageError: Something cannot be written.
        """
        if earlier_report is not None and not self.verify:
            from graphquant.batch.regressions import SQNR_STEP, compare_reports

            sqnr_step = SQNR_STEP if self.sqnr_step is None else self.sqnr_step
            report = compare_reports(report, earlier_report, sqnr_step=sqnr_step, fail=self.fail_on is not None)
        self._print_report(report)  # first: what cannot be written takes no result away
        if self.attest:
            _write_attestations(report, entries)
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
    """The options about reports; the command is given them as one argument, `asked`."""
    names = [field.name for field in fields(ReportOptions)]

    @wraps(command)
    def collect_options(**options: Any) -> Any:
        reporting = ReportOptions(**{name: options.pop(name) for name in names})
        return command(asked=reporting, **options)

    decorated: Any = collect_options
    for option in reversed(REPORT_OPTIONS):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]  # click's decorators give what they were given


def _write_attestations(report: BatchReport, entries: Sequence[Entry]) -> None:
    from graphquant.batch.attestation import write_attestation
    from graphquant.calibration.data.files import is_remote

    by_name = {entry.name: entry for entry in entries}
    for outcome in report.outcomes:
        if outcome.products and not is_remote(outcome.output):
            write_attestation(by_name[outcome.name], outcome)


@click.command()
@click.argument("names", nargs=-1, metavar="[MANIFEST|MODEL...]")
@selection_options
@click.option("--data", metavar="SPEC", help="Calibration data of all models; {stem} stands for a model's name.")
@click.option("--stats", metavar="FILE", help="Statistics that ranges come from; likewise.")
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Use only the first N samples.")
@click.option("--method", metavar="NAME", help="How ranges are picked from the data, whatever the rules say.")
@click.option("--float-weights", is_flag=True, default=None, help="Keep weights float, behind a whole QDQ pair.")
@click.option("-o", "--output", metavar="PATTERN", help="Default: {parent}/{stem}.quant{suffix}.")
@click.option("--min-sqnr", type=float, callback=require_finite, metavar="DB", help="An output that has less fails.")
@click.option(
    "--min-agreement",
    type=click.FloatRange(0, 100),
    callback=require_finite,
    metavar="PERCENT",
    help="Likewise, top-1 agreement.",
)
@click.option(
    "--max-accuracy-drop",
    type=click.FloatRange(0, 100),
    callback=require_finite,
    metavar="POINTS",
    help="Likewise, with labels.",
)
@click.option("--max-size", metavar="SIZE", help="A larger output fails.")
@click.option("--check", metavar="BACKEND", help="An output that `check --for BACKEND` finds fault with fails.")
@click.option("--shard", metavar="I/N", help="Do only part I of N; --merge makes one report of those of all parts.")
@click.option("--scheduler", metavar="ADDRESS", help="Do the work on a dask cluster, tcp://host:8786.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), metavar="N", help="Workers; by default by cores and memory.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    callback=require_finite,
    metavar="SECONDS",
    help="Stop a model that takes longer.",
)
@click.option("--max-memory", metavar="SIZE", help="Stop a model whose worker takes more, as in 4GB.")
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="N",
    help="Try again after a crash, say.",
)
@click.option("--resume", is_flag=True, help="Go on with a run that was stopped or killed.")
@click.option("--force", is_flag=True, help="Replace outputs that no batch wrote.")
@click.option("--no-cache", is_flag=True, help="Make everything anew, and keep nothing.")
@click.option("--cache-dir", type=click.Path(path_type=Path), metavar="DIR", help="Default: the user's cache folder.")
@click.option(
    "--prune-cache", metavar="SIZE|AGE", help="Then make the cache that small, or remove what is older than 30d."
)
@click.option("--schema", is_flag=True, help="Print the JSON Schema of manifests, for editors.")
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
    schema: bool,
    asked: ReportOptions,
    **settings: Any,
) -> None:
    """Quantize many models: those of a MANIFEST, or MODELs and globs.

    MANIFEST is graphquant.toml by default. What did not change since it was made is not made again. docs/batch.md tells
    of manifests, gates and the cache. Exit code 1 if a model failed.
    """
    if schema:
        from graphquant.batch import manifest_schema

        click.echo(json.dumps(manifest_schema.manifest_schema(), indent=2))
        return
    if scheduler is not None and jobs is not None:
        raise UsageError("The cluster says how many models are done at once. Leave -j out, or --scheduler.")
    from graphquant.batch.cache import OutcomeCache, default_cache_folder, parse_prune_limit
    from graphquant.batch.manifest import load_entries
    from graphquant.batch.request import has_manifest
    from graphquant.batch.run import BatchOptions

    folder = cache_dir or default_cache_folder()
    if prune_cache is not None:
        parse_prune_limit(prune_cache)
        if not names and not asked.reports and not has_manifest():
            _prune_cache(OutcomeCache(folder), prune_cache, asked)
            return
    asked.check_options(names)
    earlier_report = asked.read_earlier_report()
    if asked.merge:
        _exit_with_report(asked.publish(asked.merge_reports(names), earlier_report), merged=True)
        return
    from graphquant.batch.shards import deal_digest, select_shard

    shard_position = shard_part(shard)
    given_settings = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in settings.items()
        if value not in {None, ()}
    }
    all_entries = load_entries(names, given_settings)
    shard_entries = select_shard(all_entries, shard_position)
    asked.check_entries(shard_entries)
    limit = parse_max_memory(max_memory)
    options = BatchOptions(folder=folder, cache=not no_cache, resume=resume, force=force, shard=shard_position)
    if shard_position[1] > 1:
        options = replace(options, deal_digest=deal_digest(all_entries))

    def run(todo: Sequence[Entry], options: BatchOptions) -> BatchReport:
        return _run_workers(todo, options, scheduler, jobs, timeout, limit, retries)

    report = _verify_batch(shard_entries, options, run, earlier_report) if asked.verify else run(shard_entries, options)
    report = asked.publish(report, earlier_report, shard_entries)
    if prune_cache is not None:
        _prune_cache(OutcomeCache(folder), prune_cache, asked)
    _exit_with_report(report)


def _verify_batch(
    entries: Sequence[Entry],
    options: BatchOptions,
    run: Callable[[Sequence[Entry], BatchOptions], BatchReport],
    earlier_report: BatchReport | None,
) -> BatchReport:
    """Builds all again, with nothing of what was kept."""
    from graphquant.batch.attestation import verify_outputs

    return verify_outputs(
        entries,
        lambda moved_entries, cache_folder: run(
            moved_entries, replace(options, folder=cache_folder, cache=False, resume=False)
        ),
        earlier_report,
    )


def _run_workers(
    entries: Sequence[Entry],
    options: BatchOptions,
    scheduler: str | None,
    jobs: int | None,
    timeout: float | None,
    limit: int | None,
    retries: int,
) -> BatchReport:
    """Runs the batch on this machine, or on the cluster of the scheduler."""
    from graphquant.batch.run import run_batch
    from graphquant.batch.work import quantize_entry
    from graphquant.batch.workers import WorkerLimits, default_jobs, run_workers
    from graphquant.calibration.memory import available_memory

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

        execute_batch: Execute = execute
        return run_batch(entries, options, execute_batch, on_outcome=bars.finish_model, on_warning=_echo_warning)


def _echo_warning(message: str) -> None:
    click.echo(escape_unprintable(message), err=True)


def _exit_with_report(report: BatchReport, *, merged: bool = False) -> None:
    """Ends as the report says."""
    from graphquant.batch.regressions import has_regressions

    if not merged and any(outcome.status == "skipped" for outcome in report.outcomes):
        click.echo("Interrupted. What is finished is kept: go on with --resume.", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    if not report.passed or has_regressions(report):
        raise click.exceptions.Exit(FindingsError.exit_code)


def _prune_cache(cache: OutcomeCache, limit: str, reporting: ReportOptions) -> None:
    from graphquant.batch.cache_key import FileHashes

    removed_count, freed_bytes = cache.prune(limit)
    with FileHashes(cache.folder / "hashes.sqlite") as memo:
        memo.remove_missing()
    click.echo(f"Removed {removed_count} outputs from the cache, {freed_bytes} bytes.", err=reporting.form != "text")


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """What ends a CI job ends the batch as Ctrl-C does."""
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
