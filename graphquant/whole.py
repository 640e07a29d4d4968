"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@contextmanager
def whole(path: Path) -> Iterator[IO[bytes]]:
    """A file beside `path`, to be written, that takes its place at the end; if that is not reached, nothing is changed.

    Raises:
        OSError: It cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.part")  # containers have equal numbers
    try:
        with part.open("xb") as file:
            yield file
        part.replace(path)
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
