"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Of Linux: AT_FDCWD, from which relative paths go on, and RENAME_EXCHANGE."""


@contextmanager
def atomic_file(path: Path, final_path: Callable[[], Path] | None = None) -> Iterator[IO[bytes]]:
    """A file beside `path`, to be written, that takes its place at the end; if that is not reached, nothing is changed.

    Args:
        path: Its place, which what is left of a killed process is called like.
        final_path: Gives the place in that folder, where it is only known at the end.

    Raises:
        OSError: It cannot be written.
    """
    temporary = path.with_name(
        f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.part"
    )  # containers have equal numbers
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path if final_path is None else final_path())
    finally:
        with suppress(OSError):
            temporary.unlink()


def make_staging_folder(path: Path) -> Path:
    """A new folder beside `path`, to make there what is to take its place; its name tells whose it is.

    Raises:
        OSError: It cannot be made.
    """
    import tempfile

    return Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.{os.getpid()}."))


def replace_folder(new: Path, path: Path, staging: Path) -> None:
    """Puts a folder where another one may be, which goes into `staging`; where the system can, in a single step.

    Elsewhere there is a moment between two steps in which nothing is at `path`, and the old folder is `old` in `staging`.

    Raises:
        OSError: It cannot be moved; what was there still is.
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
    """Whether two paths could be exchanged at once, as Linux does on most of its file systems."""
    if sys.platform != "linux":
        return False
    import ctypes

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    status = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return int(status) == 0


def flush_to_disk(paths: Iterable[Path]) -> None:
    """Returns when these files, and their names, will be there after a crash of the whole machine.

    Raises:
        OSError: The disk is full, or damaged.
    """
    files = list(paths)
    for file in files:
        with file.open("rb" if os.name == "posix" else "rb+") as opened:
            os.fsync(opened.fileno())
    for folder in sorted({parent for file in files for parent in (file.parent, file.parent.parent)}):
        with suppress(OSError):  # Windows opens no folders
            opened_folder = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(opened_folder)
            finally:
                os.close(opened_folder)
