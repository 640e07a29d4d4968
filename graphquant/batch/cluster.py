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

from graphquant.batch.ingredients import versions
from graphquant.batch.processes import dismiss, run
from graphquant.batch.types import Outcome
from graphquant.batch.work import unmade
from graphquant.data.files import remote
from graphquant.errors import GraphQuantError, MissingDependencyError, UsageError

try:
    from distributed import Client, WorkerPlugin, as_completed, get_worker
except ImportError as _missing:
    raise MissingDependencyError(
        "A cluster needs dask.distributed. Install it: pip install 'graphquant[dask]'"
    ) from _missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distributed import Future
    from distributed import Worker as DaskWorker

    from graphquant.batch.processes import Limits, Worker
    from graphquant.batch.types import Entry
    from graphquant.calibration import Stats
    from graphquant.pipeline import Progress

PATIENCE = "10s"
"""How long a scheduler may take to answer."""

END, LOOK = 10.0, 0.02
"""Seconds in which the processes of a worker have to end, and between two looks whether they have."""

STATS = "stats.gqs"
"""Name of a file of statistics in a temporary folder."""


def run_on(address: str, entries: Sequence[Entry], worker: Worker, limits: Limits) -> Iterator[Outcome]:
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
    with _client(address) as client:
        threads = sum(client.nthreads().values())
        if not threads:
            raise UsageError(f"The cluster at {address} has no workers. Start some: dask worker {address}.")
        name = f"graphquant-{uuid4().hex}"
        client.register_plugin(_Crews(), name=name)
        try:
            yield from _outcomes(client, list(entries), worker, limits, name, max(threads // len(entries), 1))
        finally:
            with suppress(OSError):  # the scheduler is gone
                client.unregister_worker_plugin(name)


def _client(address: str) -> Client:
    try:
        return Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        said = str(error).strip().split("\n")[0].rstrip(".")
        raise UsageError(f"There is no dask scheduler at {address}: {said}. Start one: dask scheduler.") from error


def _outcomes(
    client: Client, entries: list[Entry], worker: Worker, limits: Limits, crews: str, parts: int
) -> Iterator[Outcome]:
    here = str(Path.cwd())
    one = replace(limits, jobs=1)
    todo: dict[Future[Outcome], Entry] = {}
    try:
        for entry in entries:
            stats = _calibrated(client, entry, one, crews, here, parts) if parts > 1 else None
            done = client.submit(_done, entry, stats, worker, one, crews, here, versions(), pure=False)
            todo[done] = entry
        for future in as_completed(list(todo), loop=client.loop):
            try:
                outcome = _outcome(future, todo[future])
            except (CancelledError, OSError) as error:
                said = "The cluster's scheduler is gone. Start it again, and the batch with --resume."
                raise UsageError(said) from error
            yield outcome
    finally:
        with suppress(OSError):
            client.cancel(list(todo), force=True)


def _outcome(future: Future[Outcome], entry: Entry) -> Outcome:
    """What became of an entry; that of one at which workers died again and again is their end."""
    error = future.exception()
    if error is None:
        return future.result()
    said = str(error).strip().split("\n")[0]
    return unmade(entry, "Crash", f"The cluster gave it up: {said} Try the model alone with -j 1.", status="crashed")


def _calibrated(
    client: Client, entry: Entry, limits: Limits, crews: str, here: str, parts: int
) -> Future[Stats | None] | None:
    """The statistics of an entry, made in as many parts; None where it needs none, has some, or has bounds."""
    if entry.data is None or entry.stats is not None or entry.gates.measures or remote(entry.model):
        return None
    shards = [
        client.submit(_part, entry, (number, parts), limits, crews, here, versions(), pure=False)
        for number in range(1, parts + 1)
    ]
    return client.submit(_merged, shards, pure=False)


# -- on a worker ---------------------------------------------------------------------------------


def _part(
    entry: Entry, shard: tuple[int, int], limits: Limits, crews: str, here: str, wanted: dict[str, str]
) -> Stats | None:
    """Statistics of a part of the samples; None where something is wrong, which whoever does the model will tell."""
    from graphquant.calibration import load_stats

    if wanted != versions():
        return None
    worker = partial(_observed, shard=shard, max_memory=limits.memory // 2 if limits.memory else None)
    with tempfile.TemporaryDirectory(prefix="graphquant-stats-") as room:
        given = replace(entry, output=str(Path(room, STATS)))
        outcome = _crews(crews).do(given, partial(_in_folder, worker, here), replace(limits, retries=0), None)
        return load_stats(Path(given.output)) if outcome.status == "done" else None


def _observed(
    entry: Entry, *, shard: tuple[int, int], max_memory: int | None = None, progress: Progress | None = None
) -> Outcome:
    """Writes the statistics of a part of the samples to the entry's output."""
    from graphquant import formats, pipeline
    from graphquant.calibration import save_stats, with_method
    from graphquant.data import open_data
    from graphquant.pipeline.checking import parted

    data = entry.data or ""
    try:
        model = pipeline.load(Path(entry.model))
        made = pipeline.plan(
            model, rules=entry.rules, include=entry.include, exclude=entry.exclude, family=entry.family
        )
        batches = open_data(data, formats.module(model.format).inputs(model), samples=entry.samples, meanwhile=True)
        used, _ = parted(data, entry.samples, batches)  # `insert` keeps the rest for its check
        made = with_method(made, entry.method)
        stats = pipeline.calibrate(model, made, used, full=False, shard=shard, max_memory=max_memory, progress=progress)
        save_stats(stats, Path(entry.output))
    except (GraphQuantError, OSError, MemoryError) as error:
        return unmade(entry, type(error).__name__, str(error))
    return Outcome(name=entry.name, model=entry.model, output=entry.output, status="done")


def _merged(parts: Sequence[Stats | None]) -> Stats | None:
    from graphquant import pipeline

    whole = [part for part in parts if part is not None]
    return pipeline.merge_stats(whole) if len(whole) == len(parts) else None


def _done(
    entry: Entry, stats: Stats | None, worker: Worker, limits: Limits, crews: str, here: str, wanted: dict[str, str]
) -> Outcome:
    """The outcome of an entry, done by a process of its own that stays for the next one."""
    found = versions()
    differing = [name for name in sorted(wanted.keys() | found.keys()) if wanted.get(name) != found.get(name)]
    if differing:
        told = ", ".join(f"{name} {found.get(name, 'is missing')}" for name in differing)
        here_told = ", ".join(f"{name} {wanted.get(name, 'is missing')}" for name in differing)
        said = f"A worker of the cluster has {told}, and whoever started the batch {here_told}. Install the same."
        return unmade(entry, UsageError.__name__, said, UsageError.exit_code)
    own = _crews(crews)
    crew = own.free.popleft() if own.free else []
    try:
        with tempfile.TemporaryDirectory(prefix="graphquant-stats-") as room:
            given = replace(entry, stats=_saved(stats, Path(room))) if stats is not None else entry
            return own.do(given, partial(_in_folder, worker, here), limits, crew)
    finally:
        own.free.append(crew)


def _saved(stats: Stats, room: Path) -> str:
    from graphquant.calibration import save_stats

    save_stats(stats, room / STATS)
    return str(room / STATS)


def _in_folder(worker: Callable[..., Outcome], here: str, entry: Entry, **options: Any) -> Outcome:
    """Has the entry done in the folder in which the batch was started, as its paths may be relative."""
    try:
        os.chdir(here)
    except OSError as error:
        said = (
            f"A worker of the cluster cannot use {here}: {error.strerror}. Give all the same file system, or addresses."
        )
        return unmade(entry, UsageError.__name__, said, UsageError.exit_code)
    return worker(entry, **options)


def _crews(name: str) -> _Crews:
    """Those of the dask worker that this is called on."""
    return cast("_Crews", get_worker().plugins[name])


class _Crews(WorkerPlugin):
    """Keeps, on each of dask's workers, the processes that do models, from one to the next.

    Attributes:
        free: Those at no model.
    """

    def __init__(self) -> None:
        self.free: deque[list[Any]] = deque()
        self._busy: deque[Entry] = deque()

    def setup(self, worker: DaskWorker) -> None:
        """Lets the process of a worker start others; dask's nanny ends it with all of them."""
        del worker
        multiprocessing.current_process().daemon = False
        self._halt, self._going = multiprocessing.Pipe(duplex=False)

    def do(self, entry: Entry, worker: Worker, limits: Limits, crew: list[Any] | None) -> Outcome:
        """Has an entry done by a process: that of a crew, or one for this alone."""
        self._busy.append(entry)
        try:
            for outcome in list(run([entry], worker, limits, crew=crew, halt=self._halt)):
                return outcome
        finally:
            self._busy.pop()
        return unmade(entry, "Skipped", "The batch was stopped before this model was done.", 130, "skipped")

    async def teardown(self, worker: DaskWorker) -> None:
        """Ends them, those at a model too."""
        del worker
        self._going.close()
        last = time.monotonic() + END
        while self._busy and time.monotonic() < last:  # noqa: ASYNC110  # other threads may not set asyncio's events
            await asyncio.sleep(LOOK)
        while self.free:
            dismiss(self.free.popleft())
