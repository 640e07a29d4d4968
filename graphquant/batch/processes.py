"""Worker processes: each does one model after the other, and what ends one of them ends nothing else.

A worker that hangs or takes too much memory is killed, and one that dies is replaced; that is the outcome of the model
which it was at, and of no other.
"""

from __future__ import annotations

import multiprocessing
import os
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

from graphquant.batch.litter import sweep
from graphquant.batch.types import Outcome
from graphquant.batch.work import unmade
from graphquant.errors import UsageError, printable
from graphquant.kernels import repeatable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from graphquant.batch.types import Entry

    Worker = Callable[..., Outcome]
    Told = Callable[[Entry, str, int, int], None]

EACH = 2 << 30
"""Bytes of free memory for each worker, where nobody says how many there are to be."""

WATCH = 0.05
"""Seconds between two looks at how much memory workers take: what one can take meanwhile comes on top."""

LOOK = 1.0
"""Seconds between two looks whether workers are there; of most that end their pipes tell."""

START = 120.0
"""Seconds that a worker may take to start, beside the time for the model."""

HEAVY = 1 << 30
"""Bytes that a worker may hold between two models; one that holds more is replaced."""

OFTEN = 0.1
"""Seconds between two words on how far a worker is."""

LAST_WORDS = 300
"""Characters of what a worker said last, told where it died."""

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl
_BEGUN = "begun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
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
        if self.memory is not None and not memory_of(os.getpid()):
            raise UsageError("What workers take cannot be watched on this system. Leave --max-memory out.")


def default_jobs() -> int:
    """As many workers as there are cores, if there is memory for them."""
    from graphquant.calibration.memory import free

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(cores, free() // EACH), 1)


def run(
    entries: Sequence[Entry],
    worker: Worker,
    limits: Limits,
    told: Told | None = None,
    *,
    crew: list[_Worker] | None = None,
    halt: Connection | None = None,
) -> Iterator[Outcome]:
    """Gives the outcome of each entry as soon as it is there; leaving early ends all workers.

    Args:
        entries: What is to be done.
        worker: Does one: takes an entry, and `progress` to tell how far it is; something that can be pickled.
        limits: How many workers, and what each may take.
        told: Is told which entry is at what, how much of it is done and how much there is; "" when one begins.
        crew: Workers of an earlier call with the same `worker`; those that are free at the end stay in it.
        halt: Ends all workers, as leaving early does, once its other end is closed, which another thread may do.
    """
    todo = deque(_Attempt(entry, 1) for entry in entries)
    workers: list[_Worker] = [] if crew is None else crew
    try:
        while todo or any(each.attempt for each in workers):
            if halt is not None and halt.poll():
                return
            _give_out(todo, workers, worker, limits)
            for each in _heard(workers, limits, halt):
                attempt = each.attempt
                outcome = each.outcome(limits, told)
                if attempt is None or outcome is None:
                    continue
                if attempt.number <= limits.retries and _worth_another(attempt.entry, outcome):
                    todo.append(_Attempt(attempt.entry, attempt.number + 1))
                else:
                    yield replace(outcome, attempts=attempt.number)
            workers[:] = [each for each in workers if each.alive]
    finally:
        dismiss([each for each in workers if crew is None or each.attempt is not None])


def dismiss(crew: Sequence[_Worker]) -> None:
    """Ends workers."""
    for each in crew:
        each.kill()


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An entry, and which time it is tried."""

    entry: Entry
    number: int


def _give_out(todo: deque[_Attempt], workers: list[_Worker], worker: Worker, limits: Limits) -> None:
    """Gives each free worker an entry, and starts workers while there is more to do."""
    for each in workers:
        if todo and each.attempt is None:
            each.give(todo.popleft())
    while todo and len(workers) < limits.jobs:
        workers.append(_Worker(worker))
        workers[-1].give(todo.popleft())


def _heard(workers: list[_Worker], limits: Limits, halt: Connection | None) -> list[_Worker]:
    """The workers that have something to say, or are over a limit; waits a while for one, or until all is to end."""
    busy = [each for each in workers if each.attempt is not None]
    now = time.monotonic()
    patience = min([max(each.deadline(limits) - now, 0.0) for each in busy], default=0.0)
    pipes = [each.pipe for each in busy] + ([] if halt is None else [halt])
    ready = set(wait(pipes, min(patience, WATCH if limits.memory else LOOK)))
    return [each for each in busy if each.pipe in ready or each.gone or each.over(limits)]


def _worth_another(entry: Entry, outcome: Outcome) -> bool:
    """Whether it may go well another time."""
    elsewhere = any("://" in path for path in (entry.model, entry.output, entry.data or "", entry.stats or ""))
    return outcome.status in {"crashed", "memory"} or (outcome.status == "failed" and elsewhere)


class _Worker:
    """A process that works, seen from outside.

    Attributes:
        pipe: What it says comes through here.
        attempt: What it is at, None if it is free.
        alive: Whether it can be given more.
    """

    def __init__(self, worker: Worker) -> None:
        context = multiprocessing.get_context("spawn")  # frameworks have threads, which a fork would lose
        descriptor, name = tempfile.mkstemp(prefix="graphquant-worker-")
        self._log = os.fdopen(descriptor, errors="replace")
        self.pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, worker, name))
        self._process.start()
        there.close()
        self._number = self._process.pid or 0
        self.attempt: _Attempt | None = None
        self.alive = True
        self._since = self._begun = 0.0

    def give(self, attempt: _Attempt) -> None:
        """Has it do an entry."""
        self.attempt, self._since, self._begun = attempt, time.monotonic(), 0.0
        with suppress(OSError):  # it is dead already, which the pipe tells next
            self.pipe.send(attempt.entry)

    def deadline(self, limits: Limits) -> float:
        """When it must be done, on the monotonic clock."""
        start = self._begun or self._since + START
        return start + (limits.timeout if limits.timeout is not None else float("inf"))

    @property
    def gone(self) -> bool:
        """Whether it has ended; its pipe does not tell while a process that it forked has that open."""
        return self._process.exitcode is not None

    def over(self, limits: Limits) -> bool:
        """Whether it takes more time or memory than it may."""
        return time.monotonic() >= self.deadline(limits) or self._heavy(limits)

    def outcome(self, limits: Limits, told: Told | None) -> Outcome | None:
        """What became of its entry; None while it is still at it."""
        attempt = self.attempt
        if attempt is None:
            return None
        gone = self.gone  # before what it said last is read
        try:
            while self.pipe.poll():
                said = self.pipe.recv()
                if isinstance(said, Outcome):
                    return self._free(said, limits)
                if said == _BEGUN:
                    self._begun, said = time.monotonic(), ("", 0, 0)
                if told is not None:
                    told(attempt.entry, *said)
        except (EOFError, OSError):
            gone = True
        if gone:
            return self._ended(attempt.entry, "crashed", "Crash", self._death())
        if self._heavy(limits):
            most = (limits.memory or 0) / (1 << 20)
            said = (
                f"It took more than {most:.0f} MiB of memory, which is what --max-memory allows, and was stopped. Give"
                " more, or use fewer samples."
            )
            return self._ended(attempt.entry, "memory", "Memory", said)
        if time.monotonic() >= self.deadline(limits):
            said = f"It was not done after {limits.timeout:g} s, which is what --timeout allows, and was stopped."
            return self._ended(attempt.entry, "timeout", "Timeout", f"{said} Give more time, or use fewer samples.")
        return None

    def kill(self) -> None:
        """Ends it and what it started, at once."""
        self.alive = False
        entry = self.attempt.entry if self.attempt is not None else None
        self.attempt = None
        with suppress(OSError):  # it has no group of its own yet, or is gone
            if self._number:
                os.killpg(self._number, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.pipe.close()
        self._log.close()
        if entry is not None and "://" not in entry.output:
            sweep([entry.output])

    def _free(self, outcome: Outcome, limits: Limits) -> Outcome:
        """Its entry is done; it stays for the next unless it holds on to much memory."""
        self.attempt = None
        if memory_of(self._number) > min(HEAVY, (limits.memory or 2 * HEAVY) // 2):
            self.kill()
        return outcome

    def _heavy(self, limits: Limits) -> bool:
        return limits.memory is not None and memory_of(self._number) > limits.memory

    def _ended(self, entry: Entry, status: Any, kind: str, says: str) -> Outcome:
        outcome = unmade(entry, kind, says, status=status)
        seconds = time.monotonic() - (self._begun or self._since)
        self.kill()
        return replace(outcome, seconds=round(seconds, 3))

    def _death(self) -> str:
        """How the process ended."""
        self._process.join(START)
        code = self._process.exitcode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"
            how += ", as the system does when no memory is left" if -code == signal.SIGKILL else ""
        lines = self._log.read().strip().splitlines()
        last = f" The last it said: {printable(lines[-1])[:LAST_WORDS]}" if lines else ""
        return f"The process that worked on it {how}.{last} Try the model alone with `graphquant insert`."


def memory_of(process: int) -> int:
    """Bytes that a process has to itself, 0 where the system does not say."""
    try:
        told = Path(f"/proc/{process}/status").read_text("ascii", errors="replace")
    except OSError:
        return 0
    rows = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
    kept = (rows.get(name, "0 kB").split()[0] for name in ("RssAnon", "RssShmem"))
    return sum(map(int, kept)) << 10


def _serve(pipe: Connection, worker: Worker, log: str) -> None:
    """What a worker does: takes entries, tells how far it is, gives outcomes, until nobody is there any more."""
    _apart(log)
    repeatable()  # else it would depend on what the data function of an earlier entry imported
    tell = _Tell(pipe)
    while True:
        try:
            entry = pipe.recv()
        except EOFError:
            return
        pipe.send(_BEGUN)
        pipe.send(worker(entry, progress=tell))


def _apart(log: str) -> None:
    """Makes this process go when its parent goes, and keeps Ctrl-C and the terminal from it."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        with suppress(OSError):  # where memory runs out, a worker is to go, and not whoever watches it
            Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
    to = os.open(log, os.O_WRONLY | os.O_APPEND)
    Path(log).unlink()  # whoever started this has it open
    os.dup2(to, 1)
    os.dup2(to, 2)


class _Tell:
    """Passes on how far the work is, not too often."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._next = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next or done == total:
            self._next = now + OFTEN
            self._pipe.send((what, done, total))


__all__ = ["Limits", "default_jobs", "memory_of", "run"]
