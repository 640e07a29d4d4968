"""Weights files of graphquant: files with the weights of a model file that is too large, or has deferred weights.

The name of a weights file contains the digest of its content, so a model is never paired with the weights of another
run. Nothing here parses more of a model than it needs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from graphquant.utils.atomic_files import atomic_file, finished_part

MAX_SEARCHED_BYTES = 1 << 33  # maximum total size of the files that are searched for names of weights files
_MAX_MODEL_BYTES = 1 << 31  # maximum size of a model file, which is a protocol buffer
_CHUNK_BYTES = 1 << 22
_WEIGHTS_FILE_NAME = re.compile(r"(?P<model>.+)\.[0-9a-f]{16}\.data")
_JOURNAL_LINE = re.compile(r"^(\d{1,18}) ([0-9a-f]{64})$", re.MULTILINE)
_SUFFIX_LENGTH = len("0123456789abcdef.data")


def may_have_external_data(path: Path) -> bool:
    """Return False if an ONNX model has no external data for certain, without parsing it."""
    key, rest = b"location", b""  # the key under which an ONNX message names a file
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            if key in rest + chunk:
                return True
            rest = chunk[-len(key) :]
    return False


class HashingWriter:
    """A binary file that is written from its start, with the SHA-256 digest of its content.

    With a `journal`, whose lines have the size of the file after a tensor and the digest up to there, the file may have
    the first tensors already. They are kept if the digest is theirs.
    """

    def __init__(self, file: IO[bytes], journal: Path | None = None) -> None:
        self._file, self._hash, self._size, self._journal = file, hashlib.sha256(), 0, journal
        text = journal.read_text(errors="replace") if journal is not None and journal.exists() else ""
        size, digest = [("0", self.digest), *_JOURNAL_LINE.findall(text)][-1]
        self._finished = int(size)  # bytes of the tensors that an interrupted process has written
        while self._size < self._finished and (data := file.read(min(_CHUNK_BYTES, self._finished - self._size))):
            self._hash.update(data)
            self._size += len(data)
        if (self._size, self.digest) != (self._finished, digest):
            self._hash, self._finished = hashlib.sha256(), 0
        self._size = 0
        if journal is not None:
            file.truncate(file.seek(self._finished))

    def write(self, data: Any) -> None:
        """Append bytes; raise OSError if the bytes cannot be written."""
        self._size += self._file.write(data)
        self._hash.update(data)

    def skip_to(self, end: int) -> bool:
        """Move to the end of a tensor and return True if the file has it already."""
        is_finished = end <= self._finished
        self._size = end if is_finished else self._size
        return is_finished

    def finish_tensor(self) -> None:
        """Record that a tensor ends here. Raises an OSError if the journal cannot be written."""
        if self._journal is not None:
            self._file.flush()
            with self._journal.open("a") as journal:  # to replace the file waits for the disk
                journal.write(f"{self._size} {self.digest}\n")

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._size

    @property
    def digest(self) -> str:
        """Hex SHA-256 digest of the bytes written."""
        return self._hash.hexdigest()


@contextmanager
def open_weights_file(path: Path) -> Iterator[HashingWriter]:
    """Open the weights file of the model at `path`, which gets its name if the block ends without an error.

    A command that can be resumed goes on with the file of a process that was interrupted. Raises an OSError if the file
    cannot be written.
    """
    if (partial := finished_part("weights")) is None:
        with atomic_file(path.with_name(f"{path.name}.data"), lambda: weights_path(path, writer.digest)) as file:
            writer = HashingWriter(file)
            yield writer
        return
    partial.touch()
    with partial.open("r+b") as file:
        writer = HashingWriter(file, finished_part("journal"))
        yield writer
    partial.replace(weights_path(path, writer.digest))


def weights_path(path: Path, digest: str) -> Path:
    """Return the path of the weights file with this digest for the model at `path`."""
    return path.with_name(f"{path.name}.{digest[:16]}.data")


@contextmanager
def replacing_model(path: Path, *, external_weights: bool = False) -> Iterator[None]:
    """Delete unreferenced weights files of the model at `path` when the context ends, which writes the model.

    Such files belonged to the model that was replaced, or were left by a process that was killed. `external_weights` is
    True if the new model has a weights file.
    """
    needs_cleanup = external_weights or (path.is_file() and may_have_external_data(path))
    try:
        yield
    finally:
        if needs_cleanup:
            with suppress(OSError):  # the model is complete; leftover weights do no harm
                folder_files = sorted(path.parent.iterdir())
                if weight_files := weight_files_of(path.name, [file.name for file in folder_files]):
                    searched = [file for file in folder_files if may_be_model_file(file.name) and file.is_file()]
                    for name in unreferenced_weights(weight_files, searched):
                        path.with_name(name).unlink(missing_ok=True)


def weight_files_of(model: str, names: Iterable[str]) -> list[str]:
    """Return those of `names` that are names of weights files of a model file called `model`."""
    matches = map(_WEIGHTS_FILE_NAME.fullmatch, sorted(names))
    return [match[0] for match in matches if match is not None and match["model"] == model]


def may_be_model_file(name: str) -> bool:
    """Return False for the names of files that are written next to models, True for all others."""
    return _WEIGHTS_FILE_NAME.fullmatch(name) is None and not name.endswith((".part", ".intoto.json"))


def unreferenced_weights(weights: Iterable[str], files: Sequence[Path]) -> list[str]:
    """Return the weights files to which none of `files` refers; none of them if `files` are too large to search.

    The search looks for the digests in the names, which are spelled alike in all serialization forms of a model. It
    does not parse the files, because a file that is still being copied cannot be parsed. Raises an OSError if a file
    cannot be read.
    """
    unreferenced = list(weights)
    sizes = {file: size for file in files if 0 < (size := file.stat().st_size) <= _MAX_MODEL_BYTES}
    if sum(sizes.values()) > MAX_SEARCHED_BYTES:
        return []
    for file in sizes:
        with file.open("rb") as stream:
            overlap = b""  # a digest may begin in one chunk and end in the next one
            while data := stream.read(_CHUNK_BYTES):
                chunk = overlap + data
                unreferenced = [name for name in unreferenced if name[-_SUFFIX_LENGTH:].encode("ascii") not in chunk]
                overlap = data[-_SUFFIX_LENGTH:]
    return unreferenced
