"""The file of weights that is written beside a model: its name, which tells what it holds, and when it goes again."""

from __future__ import annotations

import hashlib
import re
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from graphquant.formats.model_files import may_have_external_data

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


_WEIGHTS_FILE_NAME = re.compile(r"(?P<model>.+)\.[0-9a-f]{16}\.data")

_SUFFIX_LENGTH = len("0123456789abcdef.data")

_MAX_MODEL_BYTES = 1 << 31
"""Of a model's own file, which is a protocol buffer."""

_CHUNK_BYTES = 1 << 22

MAX_SEARCHED_BYTES = 1 << 33
"""Bytes of files that are looked through for names of weights."""


class HashingWriter:
    """A file that is written from its start on, and the digest of what was.

    Args:
        file: The file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash, self._size = file, hashlib.sha256(), 0

    def write(self, data: Any) -> None:
        """Writes bytes behind the last ones.

        Raises:
            OSError: They cannot be written.
        """
        self._size += self._file.write(data)
        self._hash.update(data)

    def tell(self) -> int:
        """How many bytes were written."""
        return self._size

    @property
    def digest(self) -> str:
        """The hex SHA-256 of what was written."""
        return self._hash.hexdigest()


def weights_path(path: Path, digest: str) -> Path:
    """Where weights with this digest are that belong to the model at `path`."""
    return path.with_name(f"{path.name}.{digest[:16]}.data")


@contextmanager
def replacing_model(path: Path, *, external_weights: bool = False) -> Iterator[None]:
    """Around what writes a model to `path`: in the end weights go that were written for a model there and are nobody's.

    They are what the model had that was there before, or what a process left that was killed.

    Args:
        path: The model.
        external_weights: Whether the new one has weights of its own beside it.
    """
    needs_cleanup = external_weights or (path.is_file() and may_have_external_data(path))
    try:
        yield
    finally:
        if needs_cleanup:
            with suppress(OSError):  # it is there, with its weights
                for name in _unreferenced_weight_files(path):
                    path.with_name(name).unlink(missing_ok=True)


def _unreferenced_weight_files(path: Path) -> list[str]:
    """The files of weights that were written for a model at `path`, and that nothing in its folder names."""
    folder_files = sorted(path.parent.iterdir())
    weight_files = weight_files_of(path.name, [file.name for file in folder_files])
    return (
        unreferenced_weights(
            weight_files, [file for file in folder_files if may_be_model_file(file.name) and file.is_file()]
        )
        if weight_files
        else []
    )


def weight_files_of(model: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that are called like weights that were written for a model of this name."""
    matches = ((name, _WEIGHTS_FILE_NAME.fullmatch(name)) for name in sorted(names))
    return [name for name, match in matches if match is not None and match["model"] == model]


def may_be_model_file(name: str) -> bool:
    """Whether a file of this name may be a model: it is none of what is written beside models."""
    return _WEIGHTS_FILE_NAME.fullmatch(name) is None and not name.endswith((".part", ".intoto.json"))


def unreferenced_weights(weights: Iterable[str], files: Sequence[Path]) -> list[str]:
    """Those of the files of weights that none of `files` names; none where these are too large to be looked through.

    What is looked for are the digests in the names, which look the same in all forms of a model. A file need not be one
    that can be read, for one that is just being copied cannot.

    Raises:
        OSError: A file cannot be read.
    """
    unreferenced = list(weights)
    sizes = {file: file.stat().st_size for file in files}
    searchable_files = [file for file, size in sizes.items() if 0 < size <= _MAX_MODEL_BYTES]
    if sum(sizes[file] for file in searchable_files) > MAX_SEARCHED_BYTES:
        return []
    for file in searchable_files:
        for chunk in _overlapping_chunks(file):
            unreferenced = [name for name in unreferenced if name[-_SUFFIX_LENGTH:].encode("ascii") not in chunk]
    return unreferenced


def _overlapping_chunks(file: Path) -> Iterator[bytes]:
    """What is in a file, which may change meanwhile, in overlapping pieces."""
    with file.open("rb") as stream:
        overlap = b""
        while data := stream.read(_CHUNK_BYTES):
            yield overlap + data
            overlap = data[-_SUFFIX_LENGTH:]
