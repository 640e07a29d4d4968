"""The files that a data spec names: one, or those of a folder, on this machine or, through fsspec, on another."""

from __future__ import annotations

import hashlib
import os
import struct
import tokenize
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from graphquant.data.base import MAX_FEED_BYTES
from graphquant.errors import DataError, GraphQuantError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_FILES = 1_000_000
"""Files of a folder that are looked at; calibration wants hundreds."""

_CHUNK_BYTES = 1 << 20

INSTALL = "pip install 'graphquant[data]'"

FAILURES: tuple[type[Exception], ...] = (
    OSError,
    EOFError,
    ValueError,  # numpy: a header that is none, object arrays; Pillow: sizes that cannot be
    TypeError,  # numpy: a header of other types
    SyntaxError,  # numpy: a header that is no Python literal; Pillow: a broken PNG
    tokenize.TokenError,
    RuntimeError,  # zipfile: encrypted; Python: nested too deeply
    MemoryError,
    IndexError,  # Pillow: tables that end early
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""What reading a broken file may raise."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of the data.

    Attributes:
        name: Its path or address, as messages tell it.
        system: The fsspec file system that has it; None for a file of this machine.
    """

    name: str
    system: Any = None

    def open(self) -> IO[bytes]:
        """Opens it for reading; inside `reading`, which turns what may go wrong into a DataError."""
        if self.system is None:
            return Path(self.name).open("rb")
        opened: IO[bytes] = self.system.open(self.name, "rb")
        return opened

    def read(self, limit: int = MAX_FEED_BYTES) -> bytes:
        """All its bytes, no more than `limit` of them."""
        with self.open() as stream:
            content = stream.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"it has more than {limit} bytes")
        return content


@contextmanager
def reading(file: File, advice: str = "Write it again.") -> Iterator[None]:
    """Turns what reading `file` can go wrong with into a DataError that ends with `advice`."""
    # Each service behind fsspec raises its own kinds, which have no common base.
    kinds: tuple[type[Exception], ...] = FAILURES if file.system is None else (Exception,)
    try:
        yield
    except GraphQuantError:
        raise
    except kinds as error:
        said = str(error).strip().rstrip(".") or type(error).__name__
        raise DataError(f"{file.name} cannot be read: {said}. {advice}") from error


def remote(path: str) -> bool:
    """Whether fsspec is to open `path`: "s3://bucket/photos", "zip://*::photos.zip"."""
    return "://" in path


def found(path: str) -> tuple[list[File], bool]:
    """The file at `path`, or those of the folder and its folders, sorted by name; and whether it is a folder.

    Hidden files are left out; so are devices and pipes.

    Raises:
        DataError: There is nothing at `path`, a link leads out of the folder, or it has too many files.
        MissingDependencyError: It is elsewhere and fsspec, or what it needs for that service, is not installed.
    """
    if remote(path):
        return _found_remote(path)
    if "\0" in path:
        raise DataError(f"{path!r} is no path. Give the path of the calibration data.")
    where = Path(path)
    if where.is_file():
        return [File(path)], False
    if not where.is_dir():
        raise DataError(f"There is no file {path}. Give the path of the calibration data.")
    names = _bounded(path, _walk(where))
    return [File(str(where / name)) for name in names], True


def _walk(folder: Path) -> Iterator[str]:
    """Paths of the files inside `folder`, relative to it."""
    home = folder.resolve()
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(at) / name
            if name.startswith(".") or not path.is_file():
                continue
            if path.is_symlink() and home not in path.resolve().parents:
                raise DataError(f"{path} is a link out of the folder. Copy the file into it.")
            yield path.relative_to(folder).as_posix()


def _bounded(where: str, names: Iterable[str]) -> list[str]:
    kept = []
    for name in names:
        kept.append(name)
        if len(kept) > MAX_FILES:
            raise DataError(f"{where} has more than {MAX_FILES} files. Give a folder of the samples to calibrate with.")
    return sorted(kept)


def _found_remote(path: str) -> tuple[list[File], bool]:
    try:
        import fsspec
    except ImportError as error:
        raise MissingDependencyError(f"{path} needs the package fsspec. Install it: {INSTALL}") from error
    try:
        system, root = fsspec.core.url_to_fs(path)
        if system.isfile(root):
            return [File(root, system)], False
        names = _bounded(path, (name for name in system.find(root) if not _hidden(name, root)))
    except ImportError as error:
        scheme = path.partition("://")[0]
        raise MissingDependencyError(
            f"{path} needs another package: {error}. Install it: pip install"
            f" 'fsspec[{'http' if scheme == 'https' else scheme}]'"
        ) from error
    except DataError:
        raise
    except Exception as error:
        said = str(error).strip().rstrip(".") or type(error).__name__
        raise DataError(f"{path} cannot be listed: {said}. See that it exists and that you may read it.") from error
    if not names:
        raise DataError(f"There is nothing at {path}. Give the address of the calibration data.")
    return [File(name, system) for name in names], True


def _hidden(name: str, root: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name.removeprefix(root)).parts)


def hashed(start: str, files: Iterable[File]) -> str:
    """Hex SHA-256 over `start`, which says how the files are read, and the bytes of each, in their order."""
    digest = hashlib.sha256(f"{start}\n".encode())
    for file in files:
        own = hashlib.sha256()
        with reading(file), file.open() as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                own.update(chunk)
        digest.update(own.digest())
    return digest.hexdigest()
