"""Atomic writes: a file or folder appears complete under its name, or the name does not change."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Linux constants: paths are relative to the current folder, and `renameat2` exchanges two paths."""


@contextmanager
def atomic_file(path: Path, final_path: Callable[[], Path] | None = None) -> Iterator[IO[bytes]]:
    """Open a temporary file next to `path`, and rename it to `path` if the block ends without an error.

    Args:
        path: The final path. The temporary name begins with its name, so that files of killed processes can be
            recognized.
        final_path: Returns the final path, in the same folder, if it is known only at the end.

    Raises:
        OSError: The file cannot be written.
    """
    # The random part is needed because processes in different containers can have the same process id.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.part")
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path if final_path is None else final_path())
    finally:
        with suppress(OSError):
            temporary.unlink()


def make_staging_folder(path: Path) -> Path:
    """Create a folder next to `path` in which to prepare its replacement. Its name begins with that of `path`.

    Raises:
        OSError: The folder cannot be created.
    """
    import tempfile

    return Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.{os.getpid()}."))


def replace_folder(new: Path, path: Path, staging: Path) -> None:
    """Move the folder `new` to `path`. A folder that exists there moves into `staging`.

    Linux exchanges the two in one step. On other systems there is a moment without a folder at `path`, when the old
    one is `old` in `staging`.

    Raises:
        OSError: The folder cannot be moved; the old one stays.
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

    Raises:
        OSError: The disk is full or damaged.
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
