"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_HERE, _EXCHANGE = -100, 2
"""Of Linux: AT_FDCWD, from which relative paths go on, and RENAME_EXCHANGE."""


@contextmanager
def whole(path: Path, named: Callable[[], Path] | None = None) -> Iterator[IO[bytes]]:
    """A file beside `path`, to be written, that takes its place at the end; if that is not reached, nothing is changed.

    Args:
        path: Its place, which what is left of a killed process is called like.
        named: Gives the place in that folder, where it is only known at the end.

    Raises:
        OSError: It cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.part")  # containers have equal numbers
    try:
        with part.open("xb") as file:
            yield file
        part.replace(path if named is None else named())
    finally:
        with suppress(OSError):
            part.unlink()


def room_beside(path: Path) -> Path:
    """A new folder beside `path`, to make there what is to take its place; its name tells whose it is.

    Raises:
        OSError: It cannot be made.
    """
    import tempfile

    return Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.{os.getpid()}."))


def take_place(new: Path, path: Path, room: Path) -> None:
    """Puts a folder where another one may be, which goes into `room`; where the system can, in a single step.

    Elsewhere there is a moment between two steps in which nothing is at `path`, and the old folder is `old` in `room`.

    Raises:
        OSError: It cannot be moved; what was there still is.
    """
    if not path.is_dir() or path.is_symlink():
        new.replace(path)
        return
    if _exchanged(new, path):
        return
    path.replace(room / "old")
    try:
        new.replace(path)
    except BaseException:
        (room / "old").replace(path)
        raise


def _exchanged(one: Path, other: Path) -> bool:
    """Whether two paths could be exchanged at once, as Linux does on most of its file systems."""
    if sys.platform != "linux":
        return False
    import ctypes

    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if exchange is None:
        return False
    done = exchange(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)
    return int(done) == 0


def on_disk(paths: Iterable[Path]) -> None:
    """Returns when these files, and their names, will be there after a crash of the whole machine.

    Raises:
        OSError: The disk is full, or damaged.
    """
    files = list(paths)
    for file in files:
        with file.open("rb" if os.name == "posix" else "rb+") as opened:
            os.fsync(opened.fileno())
    for folder in sorted({above for file in files for above in (file.parent, file.parent.parent)}):
        with suppress(OSError):  # Windows opens no folders
            opened_folder = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(opened_folder)
            finally:
                os.close(opened_folder)
