"""The file of weights that is written beside a model: its name, which tells what it holds, and when it goes again."""

from __future__ import annotations

import hashlib
import re
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from graphquant.formats.parts import has_external

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

_NAME = re.compile(r"(?P<model>.+)\.[0-9a-f]{16}\.data")

_ENDING = len("0123456789abcdef.data")

_MAX_BYTES = 1 << 31
"""Of a model's own file, which is a protocol buffer."""

_PIECE = 1 << 22

MAX_LOOKED = 1 << 33
"""Bytes of files that are looked through for names of weights."""


class Digested:
    """A file that is written from its start on, and the digest of what was.

    Args:
        file: The file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._found, self._size = file, hashlib.sha256(), 0

    def write(self, data: Any) -> None:
        """Writes bytes behind the last ones.

        Raises:
            OSError: They cannot be written.
        """
        self._size += self._file.write(data)
        self._found.update(data)

    def tell(self) -> int:
        """How many bytes were written."""
        return self._size

    @property
    def digest(self) -> str:
        """The hex SHA-256 of what was written."""
        return self._found.hexdigest()


def data_path(path: Path, digest: str) -> Path:
    """Where weights with this digest are that belong to the model at `path`."""
    return path.with_name(f"{path.name}.{digest[:16]}.data")


@contextmanager
def replacing(path: Path, *, apart: bool = False) -> Iterator[None]:
    """Around what writes a model to `path`: in the end weights go that were written for a model there and are nobody's.

    They are what the model had that was there before, or what a process left that was killed.

    Args:
        path: The model.
        apart: Whether the new one has weights of its own beside it.
    """
    looked = apart or (path.is_file() and has_external(path))
    try:
        yield
    finally:
        if looked:
            with suppress(OSError):  # it is there, with its weights
                for name in _unread(path):
                    path.with_name(name).unlink(missing_ok=True)


def _unread(path: Path) -> list[str]:
    """The files of weights that were written for a model at `path`, and that nothing in its folder names."""
    there = sorted(path.parent.iterdir())
    left = written_for(path.name, [file.name for file in there])
    return unnamed(left, [file for file in there if may_name(file.name) and file.is_file()]) if left else []


def written_for(model: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that are called like weights that were written for a model of this name."""
    found = ((name, _NAME.fullmatch(name)) for name in sorted(names))
    return [name for name, told in found if told is not None and told["model"] == model]


def may_name(name: str) -> bool:
    """Whether a file of this name may be a model: it is none of what is written beside models."""
    return _NAME.fullmatch(name) is None and not name.endswith((".part", ".intoto.json"))


def unnamed(weights: Iterable[str], files: Sequence[Path]) -> list[str]:
    """Those of the files of weights that none of `files` names; none where these are too large to be looked through.

    What is looked for are the digests in the names, which look the same in all forms of a model. A file need not be one
    that can be read, for one that is just being copied cannot.

    Raises:
        OSError: A file cannot be read.
    """
    left = list(weights)
    sizes = {file: file.stat().st_size for file in files}
    looked = [file for file, size in sizes.items() if 0 < size <= _MAX_BYTES]
    if sum(sizes[file] for file in looked) > MAX_LOOKED:
        return []
    for file in looked:
        for piece in _pieces(file):
            left = [name for name in left if name[-_ENDING:].encode("ascii") not in piece]
    return left


def _pieces(file: Path) -> Iterator[bytes]:
    """What is in a file, which may change meanwhile, in overlapping pieces."""
    with file.open("rb") as opened:
        end = b""
        while data := opened.read(_PIECE):
            yield end + data
            end = data[-_ENDING:]
