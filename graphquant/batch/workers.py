"""Worker processes.

A worker processes one model after the other. One that hangs or takes too much memory is killed, and one that dies is
replaced. Only the model that it was processing fails.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from graphquant.batch.types import Entry, Outcome
from graphquant.batch.work import failed_outcome
from graphquant.errors import UsageError, escape_unprintable
from graphquant.utils import disable_onednn
from graphquant.utils.atomic_files import remove_stale_files

WorkFunction = Callable[..., Outcome]
ProgressCallback = Callable[[Entry, str, int, int], None]

BYTES_PER_WORKER = 2 << 30  # free memory per worker for the default number of workers
MEMORY_POLL_SECONDS = 0.05  # Seconds between two polls of memory. A worker may exceed its limit for that long
WORKER_POLL_SECONDS = 1.0  # seconds between two polls for dead workers; most of them also close their pipes
STARTUP_SECONDS = 120.0  # seconds for the start of a worker, not counted as time for the model
MAX_IDLE_BYTES = 1 << 30  # bytes that a worker may keep between two models; above that, it is replaced
PROGRESS_SECONDS = 0.1  # seconds between two progress messages
MAX_LOG_CHARS = 300  # maximum number of characters of a dead worker's last output line
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl on Linux
_STARTED = "begun"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits of workers."""

    jobs: int = 1  # number of concurrent workers
    timeout: float | None = None  # seconds per model, None without a limit
    # Private memory per worker in bytes, None without a limit. Address space would be no measure: frameworks reserve
    # much of it, and memory-mapped weights count.
    memory: int | None = None
    retries: int = 1  # number of further attempts after a crash, excessive memory, or a failure with remote files

    def __post_init__(self) -> None:
        if self.memory is not None and not process_memory(os.getpid()):
            raise UsageError("This system does not report the memory of processes. Remove --max-memory.")


def default_jobs() -> int:
    """Return the number of cores, limited by free memory."""
    from graphquant.calibration.memory import available_memory

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(cores, available_memory() // BYTES_PER_WORKER), 1)


def run_workers(
    entries: Sequence[Entry],
    worker: WorkFunction,
    limits: WorkerLimits,
    on_progress: ProgressCallback | None = None,
    *,
    pool: list[_WorkerProcess] | None = None,
    halt: Connection | None = None,
) -> Iterator[Outcome]:
    """Yield the outcome of each entry as it arrives. Closing the generator ends all workers.

    `worker` is picklable. `on_progress` receives the entry, the stage ("" at the start), and completed and total steps.
    `pool` has workers of an earlier call with the same `worker`; idle ones remain in it. `halt` ends all workers when
    its other end is closed, which another thread may do.
    """
    pending = deque(_Attempt(entry, 1) for entry in entries)
    workers: list[_WorkerProcess] = [] if pool is None else pool
    try:
        while pending or any(process.attempt for process in workers):
            if halt is not None and halt.poll():
                return
            _assign_entries(pending, workers, worker, limits)
            for process in _ready_workers(workers, limits, halt):
                attempt = process.attempt
                outcome = process.poll_outcome(limits, on_progress)
                if attempt is None or outcome is None:
                    continue
                if attempt.number <= limits.retries and _should_retry(attempt.entry, outcome):
                    pending.append(_Attempt(attempt.entry, attempt.number + 1))
                else:
                    yield replace(outcome, attempts=attempt.number)
            workers[:] = [process for process in workers if process.alive]
    finally:
        for process in workers:
            if pool is None or process.attempt is not None:
                process.kill()


class _Attempt(NamedTuple):
    entry: Entry
    number: int


def _assign_entries(
    pending: deque[_Attempt], workers: list[_WorkerProcess], worker: WorkFunction, limits: WorkerLimits
) -> None:
    """Assign entries to idle workers, and start workers while entries remain."""
    for process in workers:
        if pending and process.attempt is None:
            process.assign(pending.popleft())
    while pending and len(workers) < limits.jobs:
        workers.append(_WorkerProcess(worker))
        workers[-1].assign(pending.popleft())


def _ready_workers(
    workers: list[_WorkerProcess], limits: WorkerLimits, halt: Connection | None
) -> list[_WorkerProcess]:
    """Wait for workers that sent a message, exited or exceed a limit."""
    busy = [process for process in workers if process.attempt is not None]
    now = time.monotonic()
    patience = min([max(process.deadline(limits) - now, 0.0) for process in busy], default=0.0)
    pipes = [process.pipe for process in busy] + ([] if halt is None else [halt])
    ready = set(wait(pipes, min(patience, MEMORY_POLL_SECONDS if limits.memory else WORKER_POLL_SECONDS)))
    return [process for process in busy if process.pipe in ready or process.exited or process.exceeds_limits(limits)]


def _should_retry(entry: Entry, outcome: Outcome) -> bool:
    is_remote = any("://" in path for path in (entry.model, entry.output, entry.data or "", entry.stats or ""))
    return outcome.status in {"crashed", "memory"} or (outcome.status == "failed" and is_remote)


class _WorkerProcess:
    """A worker process, seen from its parent."""

    def __init__(self, worker: WorkFunction) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would lose the threads of frameworks
        descriptor, name = tempfile.mkstemp(prefix="graphquant-worker-")
        self._log = os.fdopen(descriptor, errors="replace")
        self.pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_worker_main, args=(child_pipe, worker, name))
        resource_tracker.ensure_running()  # the first start would do it, and end the block of signals
        # Ctrl-C must not end the worker with a traceback before it ignores the signal itself.
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        child_pipe.close()
        self._process_id = self._process.pid or 0
        self.attempt: _Attempt | None = None  # its current attempt, None if idle
        self.alive = True  # True if it accepts entries
        self._assigned_at = self._started_at = 0.0

    def assign(self, attempt: _Attempt) -> None:
        """Send an entry to the worker."""
        self.attempt, self._assigned_at, self._started_at = attempt, time.monotonic(), 0.0
        with suppress(OSError):  # the process is dead; the next read of the pipe reports that
            self.pipe.send(attempt.entry)

    def deadline(self, limits: WorkerLimits) -> float:
        """Return the deadline of the attempt on the monotonic clock."""
        start = self._started_at or self._assigned_at + STARTUP_SECONDS
        return start + (limits.timeout if limits.timeout is not None else float("inf"))

    @property
    def exited(self) -> bool:
        """True if the process ended. Its pipe stays open while a child process has it."""
        return self._process.exitcode is not None

    def exceeds_limits(self, limits: WorkerLimits) -> bool:
        """Return True if time or memory is above the limit."""
        return time.monotonic() >= self.deadline(limits) or self._exceeds_memory(limits)

    def poll_outcome(self, limits: WorkerLimits, on_progress: ProgressCallback | None) -> Outcome | None:
        """Return the outcome of the entry, None while it runs."""
        if (attempt := self.attempt) is None:
            return None
        exited = self.exited  # checked before the last messages are read, so that none is lost
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                if isinstance(message, Outcome):
                    return self._finish(message, limits)
                if message == _STARTED:
                    self._started_at, message = time.monotonic(), ("", 0, 0)
                if on_progress is not None:
                    on_progress(attempt.entry, *message)
        except (EOFError, OSError):
            exited = True
        if exited:
            return self._kill_with_outcome(attempt.entry, "crashed", "Crash", self._exit_description())
        if self._exceeds_memory(limits):
            message = (
                f"The worker used more than {(limits.memory or 0) / (1 << 20):.0f} MiB of memory, the limit of"
                " --max-memory, and was stopped. Allow more, or use fewer samples."
            )
            return self._kill_with_outcome(attempt.entry, "memory", "Memory", message)
        if time.monotonic() >= self.deadline(limits):
            message = (
                f"The model was not finished after {limits.timeout:g} s, the limit of --timeout, and the worker was"
                " stopped. Give more time, or use fewer samples."
            )
            return self._kill_with_outcome(attempt.entry, "timeout", "Timeout", message)
        return None

    def kill(self) -> None:
        """End the process and its children at once."""
        self.alive = False
        entry = self.attempt.entry if self.attempt is not None else None
        self.attempt = None
        with suppress(OSError):  # the process has no group yet, or has ended
            if self._process_id:
                os.killpg(self._process_id, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.pipe.close()
        self._log.close()
        if entry is not None and "://" not in entry.output:
            remove_stale_files([entry.output])

    def _finish(self, outcome: Outcome, limits: WorkerLimits) -> Outcome:
        """Mark the worker idle, and end it if it keeps much memory."""
        self.attempt = None
        if process_memory(self._process_id) > min(MAX_IDLE_BYTES, (limits.memory or 2 * MAX_IDLE_BYTES) // 2):
            self.kill()
        return outcome

    def _exceeds_memory(self, limits: WorkerLimits) -> bool:
        return limits.memory is not None and process_memory(self._process_id) > limits.memory

    def _kill_with_outcome(self, entry: Entry, status: Any, kind: str, message: str) -> Outcome:
        outcome = failed_outcome(entry, kind, message, status=status)
        seconds = time.monotonic() - (self._started_at or self._assigned_at)
        self.kill()
        return replace(outcome, seconds=round(seconds, 3))

    def _exit_description(self) -> str:
        self._process.join(STARTUP_SECONDS)
        code = self._process.exitcode
        ending = f"ended with exit code {code}"
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            ending = f"was ended by {name}"
            ending += ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
        lines = self._log.read().strip().splitlines()
        last_line = f" Its last output: {escape_unprintable(lines[-1])[:MAX_LOG_CHARS]}" if lines else ""
        return f"The worker process {ending}.{last_line} Try the model alone with `graphquant insert`."


def process_memory(process: int) -> int:
    """Return the memory of a process without shared files and libraries in bytes, 0 if the process has ended."""
    try:
        memory = psutil.Process(process).memory_info()
    except psutil.Error:
        return 0
    return int(memory.rss - getattr(memory, "shared", 0))


def _worker_main(pipe: Connection, worker: WorkFunction, log: str) -> None:
    """Process entries of the pipe until it is closed."""
    _detach_process(log)
    disable_onednn()  # otherwise imports by an earlier entry's data function would change results
    next_time = 0.0

    def report_progress(activity: str, completed: int, total: int) -> None:
        nonlocal next_time
        now = time.monotonic()
        if now >= next_time or completed == total:
            next_time = now + PROGRESS_SECONDS
            pipe.send((activity, completed, total))

    while True:
        try:
            entry = pipe.recv()
        except EOFError:
            return
        pipe.send(_STARTED)
        pipe.send(worker(entry, progress=report_progress))


def _detach_process(log: str) -> None:
    """End this process with its parent, and protect it from Ctrl-C and from writing to the terminal."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the parent starts workers with a block
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        with suppress(OSError):  # if memory runs out, Linux should end a worker, not its parent
            Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
    log_descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    Path(log).unlink()  # the parent has the file open
    os.dup2(log_descriptor, 1)
    os.dup2(log_descriptor, 2)
