"""A batch on a dask.distributed cluster, by model, and by calibration shards for few models.

dask assigns the work, and assigns it again if a worker is lost. Each worker runs a model as the local machine does: in
a process of its own under the same limits. Workers must see the same files under the same paths, unless the entries use
fsspec addresses.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from graphquant.batch.cache_key import package_versions
from graphquant.batch.types import Entry, Outcome
from graphquant.batch.work import failed_outcome
from graphquant.batch.workers import WorkerLimits, WorkFunction, run_workers
from graphquant.calibration.data.files import is_remote
from graphquant.errors import GraphQuantError, MissingDependencyError, UsageError

if TYPE_CHECKING:
    from distributed import Future
    from distributed import Worker as DaskWorker

    from graphquant.calibration.stats import Stats
    from graphquant.utils import Progress

try:
    from distributed import Client, WorkerPlugin, as_completed, get_worker
except ImportError as _missing:
    raise MissingDependencyError(
        "A cluster needs dask.distributed. Install it: pip install 'graphquant[dask]'"
    ) from _missing

SCHEDULER_TIMEOUT = "10s"  # timeout for the answer of the scheduler
SHUTDOWN_SECONDS, POLL_SECONDS = 10.0, 0.02  # seconds for worker processes to end, and between two polls
STATS_FILE_NAME = "stats.gqs"  # name of a statistics file in a temporary folder


def run_on_cluster(
    address: str, entries: Sequence[Entry], worker: WorkFunction, limits: WorkerLimits
) -> Iterator[Outcome]:
    """Yield the outcome of each entry as it arrives, like `run_workers`. Closing the generator stops the work.

    The cluster at `address`, "tcp://host:8786", decides on parallelism: one entry per worker thread. With fewer entries
    than threads, calibration of each entry is sharded; merged statistics are exact. `worker` must be picklable.
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
            shard_count = max(threads // len(entries), 1)
            yield from _cluster_outcomes(client, entries, worker, limits, plugin_name, shard_count)
        finally:
            with suppress(OSError):  # the scheduler may be gone
                client.unregister_worker_plugin(plugin_name)


def _connect(address: str) -> Client:
    try:
        return Client(address, timeout=SCHEDULER_TIMEOUT, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise UsageError(f"There is no dask scheduler at {address}: {reason}. Start one: dask scheduler.") from error


def _cluster_outcomes(
    client: Client,
    entries: Sequence[Entry],
    worker: WorkFunction,
    limits: WorkerLimits,
    plugin_name: str,
    shard_count: int,
) -> Iterator[Outcome]:
    folder = str(Path.cwd())
    worker_limits = replace(limits, jobs=1)
    pending: dict[Future[Outcome], Entry] = {}
    try:
        for entry in entries:
            statistics = _submit_calibration(client, entry, worker_limits, plugin_name, folder, shard_count)
            context = (worker, worker_limits, plugin_name, folder, package_versions())
            pending[client.submit(_entry_on_worker, entry, statistics, *context, pure=False)] = entry
        for future in as_completed(list(pending), loop=client.loop):
            try:
                error = future.exception()
                outcome = future.result() if error is None else _worker_failure(pending[future], error)
            except (CancelledError, OSError) as lost:
                message = (
                    "The connection to the cluster's scheduler is lost. Restart it, and resume the batch with --resume."
                )
                raise UsageError(message) from lost
            yield outcome
    finally:
        with suppress(OSError):
            client.cancel(list(pending), force=True)


def _worker_failure(entry: Entry, error: BaseException) -> Outcome:
    """Return the outcome of an entry whose workers died repeatedly."""
    reason = str(error).strip().split("\n")[0]
    message = f"The cluster gave up on the model: {reason} Try the model locally with -j 1."
    return failed_outcome(entry, "Crash", message, status="crashed")


def _submit_calibration(
    client: Client, entry: Entry, limits: WorkerLimits, plugin_name: str, folder: str, shard_count: int
) -> Future[Stats | None] | None:
    """Submit sharded calibration of an entry.

    The result is None with one shard, or if the entry needs no calibration, has statistics, or has bounds.
    """
    calibrates = entry.data is not None and entry.stats is None and not entry.gates.needs_data
    if shard_count == 1 or not calibrates or is_remote(entry.model):
        return None
    context = (limits, plugin_name, folder, package_versions())
    shards = [
        client.submit(_shard_stats, entry, (number, shard_count), *context, pure=False)
        for number in range(1, shard_count + 1)
    ]
    return client.submit(_merge_shard_stats, shards, pure=False)


def _shard_stats(
    entry: Entry,
    shard: tuple[int, int],
    limits: WorkerLimits,
    plugin_name: str,
    folder: str,
    required_versions: dict[str, str],
) -> Stats | None:
    """Return the statistics of a shard of the samples; None on failure, which the quantization then reports."""
    from graphquant.calibration.stats import load_stats

    if required_versions != package_versions():
        return None
    worker = partial(_write_shard_stats, shard=shard, max_memory=limits.memory // 2 if limits.memory else None)
    with _temporary_folder() as temp_folder:
        shard_entry = replace(entry, output=str(Path(temp_folder, STATS_FILE_NAME)))
        outcome = _worker_pools(plugin_name).run_entry(
            shard_entry, partial(_run_in_folder, worker, folder), replace(limits, retries=0), None
        )
        return load_stats(Path(shard_entry.output)) if outcome.status == "done" else None


def _write_shard_stats(
    entry: Entry, *, shard: tuple[int, int], max_memory: int | None = None, progress: Progress | None = None
) -> Outcome:
    """Write the statistics of a shard of the samples to the entry's output."""
    from graphquant.api.calibrate import calibrate
    from graphquant.api.models import load_source
    from graphquant.api.plan import plan
    from graphquant.calibration.holdout import complete_model_data, open_model_data, split_holdout
    from graphquant.calibration.targets import with_observer
    from graphquant.utils.options import CalibrateOptions

    data = entry.data or ""
    try:
        options = CalibrateOptions(allow_links=entry.allow_links, signature=entry.signature, tags=entry.tags)
        model = load_source(Path(entry.model), options, data)
        quantization_plan = plan(
            model,
            rules=entry.rules,
            include=entry.include,
            exclude=entry.exclude,
            family=entry.family,
            range_source=entry.range_source,
        )
        batches = open_model_data(model, complete_model_data(model, data), entry.samples)
        # `insert` holds out the remaining samples, so the shards must not use them either.
        calibration_batches, _ = split_holdout(data, entry.samples, batches)
        stats = calibrate(
            model,
            with_observer(quantization_plan, entry.method),
            calibration_batches,
            full=False,
            shard=shard,
            max_memory=max_memory,
            progress=progress,
        )
        stats.save(entry.output)
    except (GraphQuantError, OSError, MemoryError) as error:
        return failed_outcome(entry, type(error).__name__, str(error))
    return Outcome(name=entry.name, model=entry.model, output=entry.output, status="done")


def _merge_shard_stats(shards: Sequence[Stats | None]) -> Stats | None:
    from graphquant.api.calibrate import merge_stats

    complete = [stats for stats in shards if stats is not None]
    return merge_stats(complete) if len(complete) == len(shards) else None


def _entry_on_worker(
    entry: Entry,
    stats: Stats | None,
    worker: WorkFunction,
    limits: WorkerLimits,
    plugin_name: str,
    folder: str,
    required_versions: dict[str, str],
) -> Outcome:
    """Quantize an entry in a worker process that is reused for the next one."""
    installed = package_versions()
    differing = [
        name
        for name in sorted(required_versions.keys() | installed.keys())
        if required_versions.get(name) != installed.get(name)
    ]
    if differing:
        installed_text = ", ".join(f"{name} {installed.get(name, 'is missing')}" for name in differing)
        required_text = ", ".join(f"{name} {required_versions.get(name, 'is missing')}" for name in differing)
        message = (
            f"A worker of the cluster has {installed_text}, and the client has {required_text}. Install the same"
            " versions."
        )
        return failed_outcome(entry, UsageError.__name__, message, UsageError.exit_code)
    plugin = _worker_pools(plugin_name)
    pool = plugin.idle.popleft() if plugin.idle else []
    try:
        with _temporary_folder() as temp_folder:
            if stats is not None:
                stats_path = Path(temp_folder, STATS_FILE_NAME)
                stats.save(stats_path)
                entry = replace(entry, stats=str(stats_path))
            return plugin.run_entry(entry, partial(_run_in_folder, worker, folder), limits, pool)
    finally:
        plugin.idle.append(pool)


def _run_in_folder(worker: Callable[..., Outcome], folder: str, entry: Entry, **options: Any) -> Outcome:
    """Run an entry in the folder of the batch, since its paths may be relative."""
    try:
        os.chdir(folder)
    except OSError as error:
        message = (
            f"A worker of the cluster cannot use {folder}: {error.strerror}. Use a shared file system, or addresses."
        )
        return failed_outcome(entry, UsageError.__name__, message, UsageError.exit_code)
    return worker(entry, **options)


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder in that of this worker. If it is killed, dask removes both at the start of the next worker."""
    return tempfile.TemporaryDirectory(prefix="graphquant-stats-", dir=get_worker().local_directory)


def _worker_pools(plugin_name: str) -> _WorkerPools:
    return cast("_WorkerPools", get_worker().plugins[plugin_name])


class _WorkerPools(WorkerPlugin):
    """Plugin that keeps worker processes alive between models on each dask worker."""

    def __init__(self) -> None:
        self.idle: deque[list[Any]] = deque()  # processes without a model
        self._busy: deque[Entry] = deque()

    def setup(self, worker: DaskWorker) -> None:
        """Allow the worker to start child processes; dask's nanny ends it with all of them."""
        del worker
        multiprocessing.current_process().daemon = False
        self._halt_reader, self._halt_writer = multiprocessing.Pipe(duplex=False)

    def run_entry(self, entry: Entry, worker: WorkFunction, limits: WorkerLimits, pool: list[Any] | None) -> Outcome:
        """Run an entry in a process of a pool, or in a new one."""
        self._busy.append(entry)
        try:
            for outcome in list(run_workers([entry], worker, limits, pool=pool, halt=self._halt_reader)):
                return outcome
        finally:
            self._busy.pop()
        return failed_outcome(
            entry, "Skipped", "The batch was stopped before this model was processed.", 130, "skipped"
        )

    async def teardown(self, worker: DaskWorker) -> None:
        """End all processes, busy ones too."""
        del worker
        self._halt_writer.close()
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        while self._busy and time.monotonic() < deadline:  # noqa: ASYNC110  # other threads may not set asyncio's events
            await asyncio.sleep(POLL_SECONDS)
        while self.idle:
            for process in self.idle.popleft():
                process.kill()
