"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[IO[bytes]]:
    """A file beside `path`, to be written, that takes its place at the end; if that is not reached, nothing is changed.

    Raises:
        OSError: It cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with suppress(OSError):  # of a process of that number which was killed
        part.unlink()
    try:
        with part.open("xb") as file:
            yield file
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()
