"""Cache of outputs by cache key, and the journal of finished outcomes.

The journal has one line per outcome, synced to the disk before the batch continues.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

from graphquant.batch.cache_key import canonical_output, file_digest
from graphquant.batch.types import Entry, Outcome, parse_json, record_json
from graphquant.calibration.data.files import is_remote
from graphquant.errors import UsageError
from graphquant.formats.weights_files import replacing_model
from graphquant.utils.atomic_files import atomic_file, lock_file, make_staging_folder, replace_folder
from graphquant.utils.text import parse_size


def journal_path(folder: Path, entries: Sequence[Entry]) -> Path:
    """Return the journal of a batch with these outputs, independent of the current folder."""
    outputs = sorted(canonical_output(entry.output) for entry in entries)
    encoded = json.dumps(outputs).encode(errors="surrogatepass")
    return folder / "batches" / f"{hashlib.sha256(encoded).hexdigest()[:32]}.jsonl"


class Journal:
    """Journal of a running batch, with a lock that ends with the process.

    Args:
        path: The file, created if missing.
        resume: True to read finished outcomes, False to start anew.

    Raises a UsageError if the batch runs already, or the file cannot be written.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path = path
        self.finished: dict[str, Outcome] = {}  # outcomes in the journal by entry name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)  # unbuffered, so that nothing is written after an error
        except OSError as error:
            raise UsageError(
                f"{path}, the journal of finished outputs, cannot be written: {error.strerror}. Give another"
                " folder with --cache-dir."
            ) from error
        if not lock_file(self._file):
            self._file.close()
            raise UsageError("This batch is already running. Wait for the other run, or stop it.")
        if resume:
            self._read_finished()
        else:
            self._file.truncate(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, outcome: Outcome) -> None:
        """Append an outcome and write it to the disk, except one that the cache also has. A full disk is an OSError."""
        line, end = json.dumps(record_json(outcome)).encode() + b"\n", self._file.seek(0, os.SEEK_END)
        if self._file.write(line) != len(line):  # a raw file writes partially if the disk is full
            self._file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if outcome.status != "unchanged":
            os.fsync(self._file.fileno())

    def _read_finished(self) -> None:
        """Read finished outcomes up to the first truncated or invalid line."""
        self._file.seek(0)
        valid_bytes = 0
        for line in self._file:
            try:
                if not line.endswith(b"\n"):
                    break
                outcome: Outcome = parse_json(Outcome, json.loads(line), str(self._path))
            except (ValueError, RecursionError, UsageError):
                break
            self.finished[outcome.name] = outcome
            valid_bytes += len(line)
        self._file.truncate(valid_bytes)


_CHUNK_SIZE = 1 << 20
_UNIT_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}
_AGE_PATTERN = re.compile(r"(\d{1,5})\s*([hdw])", re.IGNORECASE)
_DEFAULT_AGE = 30 * 86400
_SHA256_PATTERN = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class OutcomeCache:
    """Folder of outcomes by cache key, and of output files by digest."""

    folder: Path  # the folder, created on the first write

    def load_outcome(self, key: str) -> Outcome | None:
        """Return the outcome of a key, None if missing or unreadable."""
        path = self._outcome_path(key)
        outcome = _read_cached_outcome(path)
        if outcome is not None:
            with suppress(OSError):
                os.utime(path)  # pruning uses the time of the last use
        return outcome

    def store(self, outcome: Outcome) -> None:
        """Store an outcome under its key, and its output files if they are local.

        Raises an OSError if the folder is full or read-only.
        """
        folder = Path(outcome.output).parent
        for name, digest in outcome.products.items():
            path = self._file_path(digest)
            if not is_remote(outcome.output) and not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                _copy_verified(folder / name, path, digest)
        path = self._outcome_path(outcome.digests.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(json.dumps(record_json(outcome)).encode())

    def remove(self, key: str) -> None:
        """Remove the outcome of a key, if present."""
        with suppress(OSError):
            self._outcome_path(key).unlink()

    def restore(self, outcome: Outcome, output: Path) -> bool:
        """Write a stored output atomically. Return False if it is incomplete. Raise OSError if it cannot be written."""
        folder, digests = output.parent, {PurePosixPath(name): digest for name, digest in outcome.products.items()}
        if not all(self._file_path(digest).is_file() for digest in digests.values()):
            return False
        companions = {name: digest for name, digest in digests.items() if name.parts[0] != output.name}
        if any(
            (folder / name).exists() and file_digest(folder / name) != digest for name, digest in companions.items()
        ):
            return False  # weights of another model; rebuilding reports the conflict
        folder.mkdir(parents=True, exist_ok=True)
        staging = make_staging_folder(output)
        try:
            for name, digest in digests.items():
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                if not _copy_verified(self._file_path(digest), staging / name, digest):
                    self._file_path(digest).unlink(missing_ok=True)  # damaged
                    return False
            with replacing_model(output, external_weights=bool(companions)):
                for name in companions:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (staging / name).replace(folder / name)
                replace_folder(staging / output.name, output, staging)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return True

    def prune(self, limit: str) -> tuple[int, int]:
        """Remove entries older than an age ("30d"), or the least recently used ones above a size ("2GB").

        Journals of that age are removed too; with a size, journals older than a month.

        Returns:
            Number of removed outputs, and of freed bytes.

        Raises a UsageError if `limit` is neither an age nor a size.
        """
        age, size = parse_prune_limit(limit)
        outcome_files = (self.folder / "outcomes").glob("*/*.json")
        stored = sorted(outcome_files, key=lambda path: (-path.stat().st_mtime_ns, path.name))
        if size is None:
            retained = [path for path in stored if path.stat().st_mtime >= time.time() - age]
        else:
            retained = self._within_size(stored, size)
        for path in set(stored) - set(retained):
            path.unlink(missing_ok=True)
        used_digests = {digest for path in retained for digest in self._output_digests(path)}
        freed_bytes = 0
        for path in (self.folder / "files").glob("*/*"):
            if path.is_file() and path.name not in used_digests:
                freed_bytes += path.stat().st_size
                path.unlink(missing_ok=True)
        for path in (self.folder / "batches").glob("*.jsonl"):
            with suppress(OSError), path.open("ab") as file:
                if path.stat().st_mtime < time.time() - age and lock_file(file):
                    path.unlink()
        return len(stored) - len(retained), freed_bytes

    def _within_size(self, stored: list[Path], size: int) -> list[Path]:
        """Return the first outcomes whose files take at most `size` bytes together."""
        retained, counted_digests = [], set[str]()
        for path in stored:
            for digest in self._output_digests(path):
                if digest not in counted_digests:
                    counted_digests.add(digest)
                    with suppress(OSError):
                        size -= self._file_path(digest).stat().st_size
            if size < 0:
                break
            retained.append(path)
        return retained

    def _output_digests(self, path: Path) -> list[str]:
        outcome = _read_cached_outcome(path)
        return [] if outcome is None else list(outcome.products.values())

    def _outcome_path(self, key: str) -> Path:
        return self.folder / "outcomes" / key[:2] / f"{key}.json"

    def _file_path(self, digest: str) -> Path:
        return self.folder / "files" / digest[:2] / digest


def parse_prune_limit(limit: str) -> tuple[int, int | None]:
    """Parse a limit: seconds and None for an age, or seconds of a month and bytes for a size; else a UsageError."""
    age = _AGE_PATTERN.fullmatch(limit.strip())
    return (int(age[1]) * _UNIT_SECONDS[age[2].lower()], None) if age else (_DEFAULT_AGE, parse_size(limit))


def _copy_verified(source: Path, target: Path, digest: str) -> bool:
    """Copy a file atomically. Return False, without a copy, if its digest differs."""
    hasher = hashlib.sha256()
    with source.open("rb") as reader, atomic_file(target) as file:
        while chunk := reader.read(_CHUNK_SIZE):
            hasher.update(chunk)
            file.write(chunk)
    if hasher.hexdigest() != digest:
        target.unlink()
        return False
    return True


def _read_cached_outcome(path: Path) -> Outcome | None:
    """Return the outcome in a file, None if invalid.

    Anyone may fill a shared cache. The names of its products become paths, so they must stay in the output's folder.
    """
    try:
        outcome: Outcome = parse_json(Outcome, json.loads(path.read_bytes()), str(path))
    except (OSError, ValueError, RecursionError, UsageError):
        return None
    names_are_safe = all(
        _SHA256_PATTERN.fullmatch(digest)
        and PurePosixPath(name).parts
        and not Path(name).is_absolute()
        and ".." not in Path(name).parts
        for name, digest in outcome.products.items()
    )
    return outcome if outcome.digests.key == path.stem and outcome.products and names_are_safe else None
