"""What is known of files from earlier runs: their digests, as long as they look the same, and which are ours."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from graphquant.batch.ingredients import file_digest
from graphquant.data.files import remote
from graphquant.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

RACY = 2_000_000_000
"""Nanoseconds for which a file may change and look the same: the grain of the times that file systems keep."""

PATIENCE = 60
"""Seconds to wait for another run that writes to the memo."""

_TABLES = """
create table if not exists looks (
    path text primary key, time integer, changed integer, size integer, inode integer, device integer, sha256 text
);
create table if not exists outputs (path text primary key, sha256 text);
"""

_ASKED = "select time, changed, size, inode, device, sha256 from looks where path = ?"


class Memo:
    """A small database beside the cache; it survives whatever ends the process, and several may use it at once.

    Args:
        path: Its file, made if it is not there.

    Raises:
        UsageError: The file cannot be written, or is something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._told():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
            self._base.execute("pragma journal_mode=wal")
            self._base.execute("pragma synchronous=normal")
            self._base.executescript(_TABLES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._base.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise UsageError(
                f"{self._path}, where digests of files are kept, cannot be used: {error}. Remove it, or give another"
                " folder with --cache-dir."
            ) from error

    def digest(self, path: Path) -> str:
        """Hex SHA-256 of a file; it is read only if it does not look as it did when it was read last.

        Raises:
            OSError: It cannot be read.
        """
        name, now = os.path.realpath(path), time.time_ns()
        look = _look(path)
        with self._told():
            row = self._base.execute(_ASKED, (name,)).fetchone()
        if row is not None and row[:-1] == look:
            return str(row[-1])
        found = file_digest(path)
        if max(look[:2]) + RACY < now and _look(path) == look:  # else it may change again and look the same
            self._remember("replace into looks values (?, ?, ?, ?, ?, ?, ?)", (name, *look, found))
        return found

    def ours(self, output: str | Path) -> str | None:
        """The digest of what a batch wrote to `output` last, "" if it was about to write, None if none did."""
        with self._told():
            row = self._base.execute("select sha256 from outputs where path = ?", (place(output),)).fetchone()
        return None if row is None else str(row[0])

    def own(self, output: str | Path, digest: str | None = "") -> None:
        """Remembers what at `output` is a batch's: what has this digest, whatever is written now, or nothing."""
        if digest is None:
            self._remember("delete from outputs where path = ?", (place(output),))
        else:
            self._remember("replace into outputs values (?, ?)", (place(output), digest))

    def _remember(self, said: str, values: tuple[str | int, ...]) -> None:
        """Writes what can be found out again, or asked with --force; a full disk is not to end a batch."""
        with suppress(sqlite3.OperationalError):
            self._base.execute(said, values)

    def tidy(self) -> None:
        """Forgets what is not there any more."""
        with self._told():
            for table in ("looks", "outputs"):
                rows = self._base.execute(f"select path from {table}").fetchall()  # noqa: S608  # of our own two names
                gone = [row for row in rows if not remote(row[0]) and not os.path.lexists(row[0])]
                self._base.executemany(f"delete from {table} where path = ?", gone)  # noqa: S608  # the same


def _look(path: Path) -> tuple[int, int, int, int, int]:
    """What tells a changed file without reading it: two times first, of which nobody can set the second back."""
    told = path.stat()
    return (told.st_mtime_ns, told.st_ctime_ns, told.st_size, told.st_ino, told.st_dev)


def place(output: str | Path) -> str:
    """The path itself, whether or not something is there, or the address."""
    if remote(str(output)):
        return str(output)
    path = Path(output)
    return os.path.join(os.path.realpath(path.parent), path.name)  # noqa: PTH118  # a string, for the database


__all__ = ["Memo", "place"]
