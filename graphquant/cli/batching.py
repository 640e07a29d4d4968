"""`graphquant batch`."""

from __future__ import annotations

import json
import signal
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphquant.cli.group import INTERRUPTED
from graphquant.cli.options import finite, memory, selection
from graphquant.cli.options import shard as shard_part
from graphquant.cli.output import batch_bars
from graphquant.cli.reporting import report_options
from graphquant.errors import FindingsError, UsageError, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from graphquant.batch.cache import Cache
    from graphquant.batch.run import Execute, Options
    from graphquant.batch.types import Entry, Outcome, Report
    from graphquant.cli.reporting import Reporting


@click.command()
@click.argument("names", nargs=-1, metavar="[MANIFEST|MODEL...]")
@selection
@click.option("--data", metavar="SPEC", help="Calibration data of all models; {stem} stands for a model's name.")
@click.option("--stats", metavar="FILE", help="Statistics that ranges come from; likewise.")
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Use only the first N samples.")
@click.option("--method", metavar="NAME", help="How ranges are picked from the data, whatever the rules say.")
@click.option("--float-weights", is_flag=True, default=None, help="Keep weights float, behind a whole QDQ pair.")
@click.option("-o", "--output", metavar="PATTERN", help="Default: {parent}/{stem}.quant{suffix}.")
@click.option("--min-sqnr", type=float, callback=finite, metavar="DB", help="An output that has less fails.")
@click.option(
    "--min-agreement",
    type=click.FloatRange(0, 100),
    callback=finite,
    metavar="PERCENT",
    help="Likewise, top-1 agreement.",
)
@click.option(
    "--max-accuracy-drop",
    type=click.FloatRange(0, 100),
    callback=finite,
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
    callback=finite,
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
def batch(
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
    asked: Reporting,
    **settings: Any,
) -> None:
    """Quantize many models: those of a MANIFEST, or MODELs and globs.

    MANIFEST is graphquant.toml by default. What did not change since it was made is not made again. docs/batch.md tells
    of manifests, gates and the cache. Exit code 1 if a model failed.
    """
    if schema:
        from graphquant.batch import manifest_types

        click.echo(json.dumps(manifest_types.schema(), indent=2))
        return
    if scheduler is not None and jobs is not None:
        raise UsageError("The cluster says how many models are done at once. Leave -j out, or --scheduler.")
    from graphquant.batch.asked import here
    from graphquant.batch.cache import Cache, default_folder, parse_limit
    from graphquant.batch.manifest import entries
    from graphquant.batch.run import Options

    folder = cache_dir or default_folder()
    if prune_cache is not None:
        parse_limit(prune_cache)
        if not names and not asked.reports and not here():
            _prune(Cache(folder), prune_cache, asked)
            return
    asked.check(names)
    last = asked.earlier()
    if asked.merge:
        _end(asked.deliver(asked.merged(names), last), merged=True)
        return
    from graphquant.batch.shards import dealt, shard_of

    part = shard_part(shard)
    given = {
        key: list(said) if isinstance(said, tuple) else said for key, said in settings.items() if said not in {None, ()}
    }
    every = entries(names, given)
    made = shard_of(every, part)
    asked.check_entries(made)
    limit = memory(max_memory)
    options = Options(folder=folder, cache=not no_cache, resume=resume, force=force, shard=part)
    if part[1] > 1:
        options = replace(options, dealt=dealt(every))

    def run(todo: Sequence[Entry], options: Options) -> Report:
        return _run(todo, options, scheduler, jobs, timeout, limit, retries)

    report = _verified(made, options, run, last) if asked.verify else run(made, options)
    report = asked.deliver(report, last, made)
    if prune_cache is not None:
        _prune(Cache(folder), prune_cache, asked)
    _end(report)


def _verified(
    entries: Sequence[Entry], options: Options, run: Callable[[Sequence[Entry], Options], Report], last: Report | None
) -> Report:
    """Builds all again, with nothing of what was kept."""
    from graphquant.batch.verifying import verified

    return verified(
        entries, lambda moved, room: run(moved, replace(options, folder=room, cache=False, resume=False)), last
    )


def _run(
    entries: Sequence[Entry],
    options: Options,
    scheduler: str | None,
    jobs: int | None,
    timeout: float | None,
    limit: int | None,
    retries: int,
) -> Report:
    """Runs the batch on this machine, or on the cluster of the scheduler."""
    from graphquant.batch.processes import Limits, default_jobs, run
    from graphquant.batch.run import run_batch
    from graphquant.batch.work import work
    from graphquant.calibration.memory import free

    workers = min(jobs or default_jobs(), max(len(entries), 1)) if scheduler is None else 1
    limits = Limits(jobs=workers, timeout=timeout, memory=limit, retries=retries)
    with _stoppable(), batch_bars(len(entries)) as bars:

        def execute(todo: Any) -> Iterator[Outcome]:
            if scheduler is None:
                worker = partial(work, max_memory=(limit or free() // workers) // 2)
                return run(todo, worker, limits, bars.told)
            from graphquant.batch.cluster import run_on

            worker = partial(work, max_memory=limit // 2 if limit else None)
            return run_on(scheduler, todo, worker, limits)

        made: Execute = execute
        return run_batch(entries, options, made, told=bars.done, warned=_warn)


def _warn(said: str) -> None:
    click.echo(printable(said), err=True)


def _end(report: Report, *, merged: bool = False) -> None:
    """Ends as the report says."""
    from graphquant.batch.regressions import regressed

    if not merged and any(one.status == "skipped" for one in report.outcomes):
        click.echo("Interrupted. What is finished is kept: go on with --resume.", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    if not report.fine or regressed(report):
        raise click.exceptions.Exit(FindingsError.exit_code)


def _prune(cache: Cache, limit: str, asked: Reporting) -> None:
    from graphquant.batch.memo import Memo

    gone, freed = cache.prune(limit)
    with Memo(cache.folder / "files.sqlite") as memo:
        memo.tidy()
    click.echo(f"Removed {gone} outputs from the cache, {freed} bytes.", err=asked.form != "text")


@contextmanager
def _stoppable() -> Iterator[None]:
    """What ends a CI job ends the batch as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
