"""What of a batch is finished, a line each, written to the disk before anything else is done."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Self

from graphquant.batch.memo import place
from graphquant.batch.types import Entry, Outcome, outcome_from, outcome_json
from graphquant.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType


def journal_of(folder: Path, entries: Sequence[Entry]) -> Path:
    """The journal of the batch that writes these outputs, from wherever it is started."""
    outputs = sorted(place(entry.output) for entry in entries)
    told = json.dumps(outputs).encode(errors="surrogatepass")
    return folder / "batches" / f"{hashlib.sha256(told).hexdigest()[:32]}.jsonl"


def remove_journals(folder: Path, age: float) -> None:
    """Removes the journals that nothing was written to for so many seconds, and that no batch holds."""
    for path in (folder / "batches").glob("*.jsonl"):
        with suppress(OSError), path.open("ab") as file:
            if path.stat().st_mtime < time.time() - age and _held(file):
                path.unlink()


def _held(file: IO[bytes]) -> bool:
    """Takes the lock of a journal, which goes when it is closed; False if another process has it."""
    try:
        import fcntl
    except ImportError:  # Windows has none; there two runs of one batch do the work twice
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Journal:
    """The journal of a batch that runs, held by a lock that ends with the process.

    Args:
        path: Its file, made if it is not there.
        resume: Whether what is in it counts; else it starts anew.

    Attributes:
        finished: The outcomes in it, by the entry's name.

    Raises:
        UsageError: The batch is being run already, or the file cannot be written.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path = path
        self.finished: dict[str, Outcome] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)  # what is not written does not wait for the end
        except OSError as error:
            raise UsageError(
                f"{path}, where a batch keeps what is finished, cannot be written: {error.strerror}. Give another"
                " folder with --cache-dir."
            ) from error
        if not _held(self._file):
            self._file.close()
            raise UsageError("This batch is being run already. Wait for the other run to end, or stop it.")
        if resume:
            self._read()
        else:
            self._file.truncate(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def add(self, outcome: Outcome) -> None:
        """Appends an outcome; when this returns, it is on the disk, but for one that the cache has too.

        Raises:
            OSError: The disk is full.
        """
        line, end = json.dumps(outcome_json(outcome)).encode() + b"\n", self._file.seek(0, os.SEEK_END)
        if self._file.write(line) != len(line):  # as a raw file may, where the disk is full
            self._file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if outcome.status != "unchanged":
            os.fsync(self._file.fileno())

    def _read(self) -> None:
        """Takes in what is finished; a line that was cut off, and what follows it, is not."""
        self._file.seek(0)
        good = 0
        for line in self._file:
            try:
                if not line.endswith(b"\n"):
                    break
                outcome = outcome_from(json.loads(line), str(self._path))
            except (ValueError, RecursionError, UsageError):
                break
            self.finished[outcome.name] = outcome
            good += len(line)
        self._file.truncate(good)


__all__ = ["Journal", "journal_of", "remove_journals"]
