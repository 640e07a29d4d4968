"""Worker processes: each does one model after the other, and what ends one of them ends nothing else.

A worker that hangs or takes too much memory is killed, and one that dies is replaced; that is the outcome of the model
which it was at, and of no other.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant.batch.types import Outcome
from graphquant.batch.work import failed_outcome
from graphquant.errors import UsageError, escape_unprintable
from graphquant.utils.tf_determinism import disable_onednn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from graphquant.batch.types import Entry

    WorkFunction = Callable[..., Outcome]
    ProgressCallback = Callable[[Entry, str, int, int], None]


# What a process that was killed left beside the output that it was about to write.

_PARTIAL_FILE = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.[0-9a-f]{8}\.part")
"""As `graphquant.whole` calls a file that it has not finished."""

_STAGING_FOLDER = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.[a-z0-9_]{8}")
"""As it calls the folder in which a SavedModel is made ready."""


def remove_stale_files(outputs: Iterable[str]) -> None:
    """Removes unfinished files of processes that are gone; a folder that was just being replaced is put back."""
    names_by_folder: dict[Path, set[str]] = {}
    for output in outputs:
        names_by_folder.setdefault(Path(output).parent, set()).add(Path(output).name)
    for folder, names in names_by_folder.items():
        with suppress(OSError):  # there is no such folder, or nothing may be removed from it
            for path in list(folder.iterdir()):
                _remove_if_stale(path, names)


def _remove_if_stale(path: Path, names: set[str]) -> None:
    partial, staging = _PARTIAL_FILE.fullmatch(path.name), _STAGING_FOLDER.fullmatch(path.name)
    match = partial or staging
    if match is None or _process_exists(int(match["process"])):
        return
    if partial and {partial["name"], partial["name"].rpartition(".")[0]} & names:
        path.unlink()
    elif staging and staging["name"] in names and path.is_dir() and not path.is_symlink():
        output = path.with_name(staging["name"])
        if (path / "old").exists() and not output.exists():
            (path / "old").replace(output)
        shutil.rmtree(path, ignore_errors=True)


def _process_exists(process: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # it is somebody else's
    return True


BYTES_PER_WORKER = 2 << 30
"""Bytes of free memory for each worker, where nobody says how many there are to be."""

MEMORY_POLL_SECONDS = 0.05
"""Seconds between two looks at how much memory workers take: what one can take meanwhile comes on top."""

WORKER_POLL_SECONDS = 1.0
"""Seconds between two looks whether workers are there; of most that end their pipes tell."""

STARTUP_SECONDS = 120.0
"""Seconds that a worker may take to start, beside the time for the model."""

MAX_IDLE_BYTES = 1 << 30
"""Bytes that a worker may hold between two models; one that holds more is replaced."""

PROGRESS_SECONDS = 0.1
"""Seconds between two words on how far a worker is."""

MAX_LOG_CHARS = 300
"""Characters of what a worker said last, told where it died."""

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl
_STARTED = "begun"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What workers may take.

    Attributes:
        jobs: How many there are at once.
        timeout: Seconds for one model, None for any time.
        memory: Bytes that a worker may have to itself, None for any number. Address space would not do as a measure:
            frameworks reserve much of it, and mapped weights count.
        retries: How often a model is tried again whose worker died or took too much memory, or whose files are
            elsewhere and could not be read.

    Raises:
        UsageError: Memory is limited, and the system does not say how much of it a process has.
    """

    jobs: int = 1
    timeout: float | None = None
    memory: int | None = None
    retries: int = 1

    def __post_init__(self) -> None:
        if self.memory is not None and not process_memory(os.getpid()):
            raise UsageError("What workers take cannot be watched on this system. Leave --max-memory out.")


def default_jobs() -> int:
    """As many workers as there are cores, if there is memory for them."""
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
    """Gives the outcome of each entry as soon as it is there; leaving early ends all workers.

    Args:
        entries: What is to be done.
        worker: Does one: takes an entry, and `progress` to tell how far it is; something that can be pickled.
        limits: How many workers, and what each may take.
        on_progress: Is told which entry is at what, how much of it is done and how much there is; "" when one begins.
        pool: Workers of an earlier call with the same `worker`; those that are free at the end stay in it.
        halt: Ends all workers, as leaving early does, once its other end is closed, which another thread may do.
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
        stop_workers([process for process in workers if pool is None or process.attempt is not None])


def stop_workers(pool: Sequence[_WorkerProcess]) -> None:
    """Ends workers."""
    for process in pool:
        process.kill()


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An entry, and which time it is tried."""

    entry: Entry
    number: int


def _assign_entries(
    pending: deque[_Attempt], workers: list[_WorkerProcess], worker: WorkFunction, limits: WorkerLimits
) -> None:
    """Gives each free worker an entry, and starts workers while there is more to do."""
    for process in workers:
        if pending and process.attempt is None:
            process.assign(pending.popleft())
    while pending and len(workers) < limits.jobs:
        workers.append(_WorkerProcess(worker))
        workers[-1].assign(pending.popleft())


def _ready_workers(
    workers: list[_WorkerProcess], limits: WorkerLimits, halt: Connection | None
) -> list[_WorkerProcess]:
    """The workers that have something to say, or are over a limit; waits a while for one, or until all is to end."""
    busy = [process for process in workers if process.attempt is not None]
    now = time.monotonic()
    patience = min([max(process.deadline(limits) - now, 0.0) for process in busy], default=0.0)
    pipes = [process.pipe for process in busy] + ([] if halt is None else [halt])
    ready = set(wait(pipes, min(patience, MEMORY_POLL_SECONDS if limits.memory else WORKER_POLL_SECONDS)))
    return [process for process in busy if process.pipe in ready or process.exited or process.exceeds_limits(limits)]


def _should_retry(entry: Entry, outcome: Outcome) -> bool:
    """Whether it may go well another time."""
    is_remote = any("://" in path for path in (entry.model, entry.output, entry.data or "", entry.stats or ""))
    return outcome.status in {"crashed", "memory"} or (outcome.status == "failed" and is_remote)


class _WorkerProcess:
    """A process that works, seen from outside.

    Attributes:
        pipe: What it says comes through here.
        attempt: What it is at, None if it is free.
        alive: Whether it can be given more.
    """

    def __init__(self, worker: WorkFunction) -> None:
        context = multiprocessing.get_context("spawn")  # frameworks have threads, which a fork would lose
        descriptor, name = tempfile.mkstemp(prefix="graphquant-worker-")
        self._log = os.fdopen(descriptor, errors="replace")
        self.pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_worker_main, args=(child_pipe, worker, name))
        self._process.start()
        child_pipe.close()
        self._process_id = self._process.pid or 0
        self.attempt: _Attempt | None = None
        self.alive = True
        self._assigned_at = self._started_at = 0.0

    def assign(self, attempt: _Attempt) -> None:
        """Has it do an entry."""
        self.attempt, self._assigned_at, self._started_at = attempt, time.monotonic(), 0.0
        with suppress(OSError):  # it is dead already, which the pipe tells next
            self.pipe.send(attempt.entry)

    def deadline(self, limits: WorkerLimits) -> float:
        """When it must be done, on the monotonic clock."""
        start = self._started_at or self._assigned_at + STARTUP_SECONDS
        return start + (limits.timeout if limits.timeout is not None else float("inf"))

    @property
    def exited(self) -> bool:
        """Whether it has ended; its pipe does not tell while a process that it forked has that open."""
        return self._process.exitcode is not None

    def exceeds_limits(self, limits: WorkerLimits) -> bool:
        """Whether it takes more time or memory than it may."""
        return time.monotonic() >= self.deadline(limits) or self._exceeds_memory(limits)

    def poll_outcome(self, limits: WorkerLimits, on_progress: ProgressCallback | None) -> Outcome | None:
        """What became of its entry; None while it is still at it."""
        attempt = self.attempt
        if attempt is None:
            return None
        exited = self.exited  # before what it said last is read
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
            limit_mib = (limits.memory or 0) / (1 << 20)
            message = (
                f"It took more than {limit_mib:.0f} MiB of memory, which is what --max-memory allows, and was stopped. Give"
                " more, or use fewer samples."
            )
            return self._kill_with_outcome(attempt.entry, "memory", "Memory", message)
        if time.monotonic() >= self.deadline(limits):
            message = f"It was not done after {limits.timeout:g} s, which is what --timeout allows, and was stopped."
            return self._kill_with_outcome(
                attempt.entry, "timeout", "Timeout", f"{message} Give more time, or use fewer samples."
            )
        return None

    def kill(self) -> None:
        """Ends it and what it started, at once."""
        self.alive = False
        entry = self.attempt.entry if self.attempt is not None else None
        self.attempt = None
        with suppress(OSError):  # it has no group of its own yet, or is gone
            if self._process_id:
                os.killpg(self._process_id, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.pipe.close()
        self._log.close()
        if entry is not None and "://" not in entry.output:
            remove_stale_files([entry.output])

    def _finish(self, outcome: Outcome, limits: WorkerLimits) -> Outcome:
        """Its entry is done; it stays for the next unless it holds on to much memory."""
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
        """How the process ended."""
        self._process.join(STARTUP_SECONDS)
        code = self._process.exitcode
        ending = f"ended with exit code {code}"
        if code is not None and code < 0:
            ending = f"was ended by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"
            ending += ", as the system does when no memory is left" if -code == signal.SIGKILL else ""
        lines = self._log.read().strip().splitlines()
        last_line = f" The last it said: {escape_unprintable(lines[-1])[:MAX_LOG_CHARS]}" if lines else ""
        return f"The process that worked on it {ending}.{last_line} Try the model alone with `graphquant insert`."


def process_memory(process: int) -> int:
    """Bytes that a process has to itself, 0 where the system does not say."""
    try:
        status = Path(f"/proc/{process}/status").read_text("ascii", errors="replace")
    except OSError:
        return 0
    rows = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    private = (rows.get(name, "0 kB").split()[0] for name in ("RssAnon", "RssShmem"))
    return sum(map(int, private)) << 10


def _worker_main(pipe: Connection, worker: WorkFunction, log: str) -> None:
    """What a worker does: takes entries, tells how far it is, gives outcomes, until nobody is there any more."""
    _detach_process(log)
    disable_onednn()  # else it would depend on what the data function of an earlier entry imported
    report_progress = _ProgressSender(pipe)
    while True:
        try:
            entry = pipe.recv()
        except EOFError:
            return
        pipe.send(_STARTED)
        pipe.send(worker(entry, progress=report_progress))


def _detach_process(log: str) -> None:
    """Makes this process go when its parent goes, and keeps Ctrl-C and the terminal from it."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        with suppress(OSError):  # where memory runs out, a worker is to go, and not whoever watches it
            Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
    log_descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    Path(log).unlink()  # whoever started this has it open
    os.dup2(log_descriptor, 1)
    os.dup2(log_descriptor, 2)


class _ProgressSender:
    """Passes on how far the work is, not too often."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._next_time = 0.0

    def __call__(self, activity: str, completed: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next_time or completed == total:
            self._next_time = now + PROGRESS_SECONDS
            self._pipe.send((activity, completed, total))
