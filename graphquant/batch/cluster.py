"""A batch on a dask.distributed cluster: models, and the calibration of few models on many samples.

dask hands out the work and hands it out again where a worker is lost. On each of its workers a model is done as on this
machine: by a process of its own, under the same limits. Workers must see the same files under the same paths, or the
entries name addresses for fsspec.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections import deque
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from graphquant.batch.cache_key import package_versions
from graphquant.batch.types import Outcome
from graphquant.batch.work import failed_outcome
from graphquant.batch.workers import run_workers, stop_workers
from graphquant.calibration.data.files import is_remote
from graphquant.errors import GraphQuantError, MissingDependencyError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distributed import Future
    from distributed import Worker as DaskWorker

    from graphquant.api import Progress
    from graphquant.batch.types import Entry
    from graphquant.batch.workers import WorkerLimits, WorkFunction
    from graphquant.calibration import Stats


try:
    from distributed import Client, WorkerPlugin, as_completed, get_worker
except ImportError as _missing:
    raise MissingDependencyError(
        "A cluster needs dask.distributed. Install it: pip install 'graphquant[dask]'"
    ) from _missing


SCHEDULER_TIMEOUT = "10s"
"""How long a scheduler may take to answer."""

SHUTDOWN_SECONDS, POLL_SECONDS = 10.0, 0.02
"""Seconds in which the processes of a worker have to end, and between two looks whether they have."""

STATS_FILE_NAME = "stats.gqs"
"""Name of a file of statistics in a temporary folder."""


def run_on_cluster(
    address: str, entries: Sequence[Entry], worker: WorkFunction, limits: WorkerLimits
) -> Iterator[Outcome]:
    """Gives the outcome of each entry as soon as it is there, like `processes.run`; leaving early ends the work.

    How many are done at once is for the cluster to say: one for each thread of its workers. If there are fewer entries
    than threads, the samples of each are dealt out too; their statistics merge exactly.

    Args:
        address: The scheduler's, "tcp://host:8786".
        entries: What is to be done.
        worker: Does one; something that can be pickled.
        limits: What each may take.

    Raises:
        UsageError: There is no scheduler at the address, it has no workers, or it goes away.
    """
    if not entries:
        return
    with _connect(address) as client:
        threads = sum(client.nthreads().values())
        if not threads:
            raise UsageError(f"The cluster at {address} has no workers. Start some: dask worker {address}.")
        plugin_name = f"graphquant-{uuid4().hex}"
        client.register_plugin(_WorkerPools(), name=plugin_name)
        try:
            yield from _cluster_outcomes(
                client, list(entries), worker, limits, plugin_name, max(threads // len(entries), 1)
            )
        finally:
            with suppress(OSError):  # the scheduler is gone
                client.unregister_worker_plugin(plugin_name)


def _connect(address: str) -> Client:
    try:
        return Client(address, timeout=SCHEDULER_TIMEOUT, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise UsageError(f"There is no dask scheduler at {address}: {reason}. Start one: dask scheduler.") from error


def _cluster_outcomes(
    client: Client, entries: list[Entry], worker: WorkFunction, limits: WorkerLimits, plugin_name: str, shard_count: int
) -> Iterator[Outcome]:
    folder = str(Path.cwd())
    worker_limits = replace(limits, jobs=1)
    pending: dict[Future[Outcome], Entry] = {}
    try:
        for entry in entries:
            statistics = (
                _submit_calibration(client, entry, worker_limits, plugin_name, folder, shard_count)
                if shard_count > 1
                else None
            )
            submitted = client.submit(
                _entry_on_worker,
                entry,
                statistics,
                worker,
                worker_limits,
                plugin_name,
                folder,
                package_versions(),
                pure=False,
            )
            pending[submitted] = entry
        for future in as_completed(list(pending), loop=client.loop):
            try:
                outcome = _future_outcome(future, pending[future])
            except (CancelledError, OSError) as error:
                message = "The cluster's scheduler is gone. Start it again, and the batch with --resume."
                raise UsageError(message) from error
            yield outcome
    finally:
        with suppress(OSError):
            client.cancel(list(pending), force=True)


def _future_outcome(future: Future[Outcome], entry: Entry) -> Outcome:
    """What became of an entry; that of one at which workers died again and again is their end."""
    error = future.exception()
    if error is None:
        return future.result()
    reason = str(error).strip().split("\n")[0]
    return failed_outcome(
        entry, "Crash", f"The cluster gave it up: {reason} Try the model alone with -j 1.", status="crashed"
    )


def _submit_calibration(
    client: Client, entry: Entry, limits: WorkerLimits, plugin_name: str, folder: str, shard_count: int
) -> Future[Stats | None] | None:
    """The statistics of an entry, made in as many parts; None where it needs none, has some, or has bounds."""
    if entry.data is None or entry.stats is not None or entry.gates.needs_data or is_remote(entry.model):
        return None
    shards = [
        client.submit(
            _shard_stats, entry, (number, shard_count), limits, plugin_name, folder, package_versions(), pure=False
        )
        for number in range(1, shard_count + 1)
    ]
    return client.submit(_merge_shard_stats, shards, pure=False)


# -- on a worker ---------------------------------------------------------------------------------


def _shard_stats(
    entry: Entry,
    shard: tuple[int, int],
    limits: WorkerLimits,
    plugin_name: str,
    folder: str,
    required_versions: dict[str, str],
) -> Stats | None:
    """Statistics of a part of the samples; None where something is wrong, which whoever does the model will tell."""
    from graphquant.calibration import load_stats

    if required_versions != package_versions():
        return None
    worker = partial(_write_shard_stats, shard=shard, max_memory=limits.memory // 2 if limits.memory else None)
    with tempfile.TemporaryDirectory(prefix="graphquant-stats-") as temp_folder:
        shard_entry = replace(entry, output=str(Path(temp_folder, STATS_FILE_NAME)))
        outcome = _worker_pools(plugin_name).run_entry(
            shard_entry, partial(_run_in_folder, worker, folder), replace(limits, retries=0), None
        )
        return load_stats(Path(shard_entry.output)) if outcome.status == "done" else None


def _write_shard_stats(
    entry: Entry, *, shard: tuple[int, int], max_memory: int | None = None, progress: Progress | None = None
) -> Outcome:
    """Writes the statistics of a part of the samples to the entry's output."""
    from graphquant import api, formats
    from graphquant.api.validation import split_holdout
    from graphquant.calibration import save_stats, with_observer
    from graphquant.calibration.data import open_data

    data = entry.data or ""
    try:
        model = api.load(Path(entry.model))
        quantization_plan = api.plan(
            model, rules=entry.rules, include=entry.include, exclude=entry.exclude, family=entry.family
        )
        batches = open_data(
            data,
            formats.format_module(model.format).input_specs(model),
            samples=entry.samples,
            check_in_background=True,
        )
        calibration_batches, _ = split_holdout(data, entry.samples, batches)  # `insert` keeps the rest for its check
        made = with_observer(quantization_plan, entry.method)
        stats = api.calibrate(
            model, made, calibration_batches, full=False, shard=shard, max_memory=max_memory, progress=progress
        )
        save_stats(stats, Path(entry.output))
    except (GraphQuantError, OSError, MemoryError) as error:
        return failed_outcome(entry, type(error).__name__, str(error))
    return Outcome(name=entry.name, model=entry.model, output=entry.output, status="done")


def _merge_shard_stats(shards: Sequence[Stats | None]) -> Stats | None:
    from graphquant import api

    complete = [stats for stats in shards if stats is not None]
    return api.merge_stats(complete) if len(complete) == len(shards) else None


def _entry_on_worker(
    entry: Entry,
    stats: Stats | None,
    worker: WorkFunction,
    limits: WorkerLimits,
    plugin_name: str,
    folder: str,
    required_versions: dict[str, str],
) -> Outcome:
    """The outcome of an entry, done by a process of its own that stays for the next one."""
    installed = package_versions()
    differing = [
        name
        for name in sorted(required_versions.keys() | installed.keys())
        if required_versions.get(name) != installed.get(name)
    ]
    if differing:
        installed_text = ", ".join(f"{name} {installed.get(name, 'is missing')}" for name in differing)
        required_text = ", ".join(f"{name} {required_versions.get(name, 'is missing')}" for name in differing)
        message = f"A worker of the cluster has {installed_text}, and whoever started the batch {required_text}. Install the same."
        return failed_outcome(entry, UsageError.__name__, message, UsageError.exit_code)
    plugin = _worker_pools(plugin_name)
    pool = plugin.idle.popleft() if plugin.idle else []
    try:
        with tempfile.TemporaryDirectory(prefix="graphquant-stats-") as temp_folder:
            local_entry = (
                replace(entry, stats=_save_temp_stats(stats, Path(temp_folder))) if stats is not None else entry
            )
            return plugin.run_entry(local_entry, partial(_run_in_folder, worker, folder), limits, pool)
    finally:
        plugin.idle.append(pool)


def _save_temp_stats(stats: Stats, folder: Path) -> str:
    from graphquant.calibration import save_stats

    save_stats(stats, folder / STATS_FILE_NAME)
    return str(folder / STATS_FILE_NAME)


def _run_in_folder(worker: Callable[..., Outcome], folder: str, entry: Entry, **options: Any) -> Outcome:
    """Has the entry done in the folder in which the batch was started, as its paths may be relative."""
    try:
        os.chdir(folder)
    except OSError as error:
        message = f"A worker of the cluster cannot use {folder}: {error.strerror}. Give all the same file system, or addresses."
        return failed_outcome(entry, UsageError.__name__, message, UsageError.exit_code)
    return worker(entry, **options)


def _worker_pools(plugin_name: str) -> _WorkerPools:
    """Those of the dask worker that this is called on."""
    return cast("_WorkerPools", get_worker().plugins[plugin_name])


class _WorkerPools(WorkerPlugin):
    """Keeps, on each of dask's workers, the processes that do models, from one to the next.

    Attributes:
        idle: Those at no model.
    """

    def __init__(self) -> None:
        self.idle: deque[list[Any]] = deque()
        self._busy: deque[Entry] = deque()

    def setup(self, worker: DaskWorker) -> None:
        """Lets the process of a worker start others; dask's nanny ends it with all of them."""
        del worker
        multiprocessing.current_process().daemon = False
        self._halt_reader, self._halt_writer = multiprocessing.Pipe(duplex=False)

    def run_entry(self, entry: Entry, worker: WorkFunction, limits: WorkerLimits, pool: list[Any] | None) -> Outcome:
        """Has an entry done by a process: that of a crew, or one for this alone."""
        self._busy.append(entry)
        try:
            for outcome in list(run_workers([entry], worker, limits, pool=pool, halt=self._halt_reader)):
                return outcome
        finally:
            self._busy.pop()
        return failed_outcome(entry, "Skipped", "The batch was stopped before this model was done.", 130, "skipped")

    async def teardown(self, worker: DaskWorker) -> None:
        """Ends them, those at a model too."""
        del worker
        self._halt_writer.close()
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        while self._busy and time.monotonic() < deadline:  # noqa: ASYNC110  # other threads may not set asyncio's events
            await asyncio.sleep(POLL_SECONDS)
        while self.idle:
            stop_workers(self.idle.popleft())
