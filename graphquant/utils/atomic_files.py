"""Atomic writes: a file or folder appears complete under its name, or the name does not change.

One process at a time writes an output. What a killed process left of it is removed before the next one starts.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO

from graphquant.errors import UsageError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Linux constants: paths are relative to the current folder, and `renameat2` exchanges two paths."""

_PARTIAL_FILE = re.compile(r"\.(?P<name>.+)\.(?P<process>\d{1,9})\.[0-9a-f]{8}\.part")
"""Name of an unfinished file of `atomic_file`."""

_STAGING_FOLDER = re.compile(r"\.(?P<name>.+)\.(?P<process>\d{1,9})\.[a-z0-9_]{8}")
"""Name of a folder of `make_staging_folder`."""

_OWN_LOCKS: ContextVar[frozenset[Path]] = ContextVar("own_locks", default=frozenset())
"""Files that `lock_output` has locked for its callers in this thread."""

_FINISHED_PARTS: ContextVar[Path | None] = ContextVar("finished_parts", default=None)
"""The folder of `resumable_output`, in its block."""

_LOCK_FILE = re.compile(r"\.(?P<name>.+)\.lock")  # name of the file of `lock_output`


@contextmanager
def atomic_file(path: Path, final_path: Callable[[], Path] | None = None) -> Iterator[IO[bytes]]:
    """Open a temporary file next to `path`, and rename it to `path` if the block ends without an error.

    Missing folders are created.

    Args:
        path: The final path. The temporary name begins with its name, so that files of killed processes can be
            recognized.
        final_path: Returns the final path, in the same folder, if it is known only at the end.

    Raises an OSError if the file cannot be written.
    """
    # The random part is needed because processes in different containers can have the same process id.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path if final_path is None else final_path())
    except OSError as error:
        if error.filename is None:  # an error while writing lacks it
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_file(path: Path, content: str | bytes, advice: str = "Use another file.") -> None:
    """Write a file atomically; raise UsageError, with the advice, if that fails."""
    try:
        with atomic_file(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. {advice}") from error


def make_staging_folder(path: Path) -> Path:
    """Create a folder next to `path` in which to prepare its replacement. Its name begins with that of `path`.

    Raises an OSError if the folder cannot be created.
    """
    import tempfile

    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.{os.getpid()}."))


def replace_folder(new: Path, path: Path, staging: Path) -> None:
    """Move the folder `new` to `path`. A folder that exists there moves into `staging`.

    Linux exchanges the two in one step. On other systems there is a moment without a folder at `path`, when the old one
    is `old` in `staging`. Raises an OSError if the folder cannot be moved; the old one stays.
    """
    if not path.is_dir() or path.is_symlink():
        new.replace(path)
        return
    if _exchange_paths(new, path):
        return
    path.replace(staging / "old")
    try:
        new.replace(path)
    except BaseException:
        (staging / "old").replace(path)
        raise


def _exchange_paths(first: Path, second: Path) -> bool:
    """Exchange two paths in one step. Returns False if the system or file system cannot; most of Linux's can."""
    if sys.platform != "linux":
        return False
    import ctypes

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    status = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return int(status) == 0


def flush_to_disk(paths: Iterable[Path]) -> None:
    """Write files and their folder entries to disk, so that they survive a power failure.

    Raises an OSError if the disk is full or damaged.
    """
    files = list(paths)
    for file in files:
        with file.open("rb" if os.name == "posix" else "rb+") as opened:
            os.fsync(opened.fileno())
    for folder in sorted({parent for file in files for parent in (file.parent, file.parent.parent)}):
        with suppress(OSError):  # Windows cannot open folders
            opened_folder = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(opened_folder)
            finally:
                os.close(opened_folder)


def remove_stale_files(outputs: Iterable[str | Path]) -> None:
    """Remove unfinished files of dead processes; restore a folder whose replacement was interrupted."""
    names_by_folder: dict[Path, set[str]] = {}
    for output in outputs:
        names_by_folder.setdefault(Path(output).parent, set()).add(Path(output).name)
    for folder, names in names_by_folder.items():
        with suppress(OSError):  # the folder is missing or read-only
            for path in list(folder.glob(".*")):
                _remove_if_stale(path, names)


def _remove_if_stale(path: Path, names: set[str]) -> None:
    lock = _LOCK_FILE.fullmatch(path.name)
    if lock and lock["name"] in names:
        with suppress(UsageError), lock_output(path.with_name(lock["name"])):
            return
    partial, staging = _PARTIAL_FILE.fullmatch(path.name), _STAGING_FOLDER.fullmatch(path.name)
    match = partial or staging
    if match is None:
        return
    import psutil  # imported when needed, because most folders have no such file

    if psutil.pid_exists(int(match["process"])):
        return
    if partial and {partial["name"], partial["name"].rpartition(".")[0]} & names:
        path.unlink()
    elif staging and staging["name"] in names and path.is_dir() and not path.is_symlink():
        output = path.with_name(staging["name"])
        if (path / "old").exists() and not output.exists():
            (path / "old").replace(output)
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def lock_output(path: Path) -> Iterator[None]:
    """Keep other processes and threads that call this from writing `path`. The lock ends with the process.

    Raises a UsageError if another one has the lock, and an OSError if the lock file cannot be created.
    """
    lock_path, own_locks = path.with_name(f".{path.name}.lock"), _OWN_LOCKS.get()
    path.parent.mkdir(parents=True, exist_ok=True)
    while lock_path not in own_locks:
        with lock_path.open("ab") as file:
            if not lock_file(file):
                raise UsageError(f"Another process is writing {path}. Wait until it ends, or use another output.")
            if not os.fstat(file.fileno()).st_nlink:  # the process that had the lock has removed the file
                continue
            token = _OWN_LOCKS.set(own_locks | {lock_path})
            try:
                yield
            finally:
                _OWN_LOCKS.reset(token)
                if sys.platform == "win32":
                    file.close()  # Windows removes no open file; elsewhere, another process could lock it once closed
                with suppress(OSError):
                    lock_path.unlink()
            return
    yield  # a command locks its output, and `save` locks it again


def lock_file(file: IO[bytes]) -> bool:
    """Lock an open file until it is closed; return False if another process has the lock."""
    if sys.platform == "win32":
        import msvcrt

        file.seek(0)  # the lock is on one byte, at the position of the file
        with suppress(PermissionError):
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            return True
        return False
    import fcntl

    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


@contextmanager
def resumable_output(path: Path, key: str | None) -> Iterator[None]:
    """Keep finished parts of an output in a folder next to `path` until the block ends, unless it is interrupted.

    A later process goes on from there if its `key`, a digest of all that the output depends on, is equal. Without a
    key, nothing is kept. The caller has the lock of the output. Raises a UsageError if the folder cannot be written.
    """
    folder = path.with_name(f".{path.name}.resume")
    with suppress(FileNotFoundError):
        if key is None or (folder / "key").read_text() != key:
            shutil.rmtree(folder)
    if key is not None:
        write_file(folder / "key", key)
    token = _FINISHED_PARTS.set(None if key is None else folder)
    try:
        yield
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        _FINISHED_PARTS.reset(token)
    shutil.rmtree(folder, ignore_errors=True)


def finished_part(name: str) -> Path | None:
    """Return the path of a part of the output that this command keeps if it is interrupted, None if it keeps none."""
    folder = _FINISHED_PARTS.get()
    return None if folder is None else folder / name


LFS_HEADER = b"version https://git-lfs.github.com/spec/"
LFS_ADVICE = "is a pointer of Git LFS, not the file itself. Run `git lfs pull`, or download the file."


def is_lfs_pointer(path: Path) -> bool:
    """Return True if Git LFS has stored a pointer in place of the file."""
    with path.open("rb") as file:
        return file.read(len(LFS_HEADER)) == LFS_HEADER
