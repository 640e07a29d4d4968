"""Files of a data spec: one file or the files of a folder, on this machine or, through fsspec, elsewhere."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import os
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from graphquant.errors import DataError, GraphQuantError, MissingDependencyError
from graphquant.utils.atomic_files import LFS_ADVICE, is_lfs_pointer

MAX_FEED_BYTES = 1 << 31
"""Maximum size of one array of one feed. A file that claims more is considered broken or hostile."""

MAX_FILES = 1_000_000  # Maximum number of files in a folder. Calibration needs hundreds.
DATA_EXTRA_INSTALL = "pip install 'graphquant[data]'"

FILE_READ_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    EOFError,
    ValueError,  # NumPy: invalid headers, object arrays; Pillow: impossible sizes
    TypeError,  # NumPy: wrong types in a header
    SyntaxError,  # NumPy: a header that is not a Python literal; Pillow: a broken PNG
    tokenize.TokenError,
    RuntimeError,  # zipfile: encrypted files; Python: deep nesting
    MemoryError,
    IndexError,  # Pillow: truncated tables
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""Exceptions that reading a broken file may raise."""


class DataFile(NamedTuple):
    """A file of the data: its path or address, and the fsspec file system of a remote file."""

    name: str
    filesystem: Any = None

    def open(self) -> IO[bytes]:
        """Open the file for reading. Use it inside `wrap_read_errors`, which turns failures into a DataError."""
        if self.filesystem is None:
            return Path(self.name).open("rb")
        opened: IO[bytes] = self.filesystem.open(self.name, "rb")
        return opened

    def read(self, limit: int = MAX_FEED_BYTES) -> bytes:
        """Read the whole file, which must not exceed `limit` bytes."""
        with self.open() as stream:
            content = stream.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"it has more than {limit} bytes")
        return content


def error_reason(error: Exception) -> str:
    """Return the message of an error of another library without its period, or the name of its class."""
    return str(error).strip().rstrip(".") or type(error).__name__


@contextmanager
def wrap_read_errors(file: DataFile, advice: str = "Replace the file.") -> Iterator[None]:
    """Turn errors while reading `file` into a DataError that ends with `advice`."""
    # The services of fsspec raise errors of their own without a common base class.
    error_types: tuple[type[Exception], ...] = FILE_READ_ERRORS if file.filesystem is None else (Exception,)
    try:
        yield
    except GraphQuantError:
        raise
    except error_types as error:
        raise DataError(f"{file.name} cannot be read: {error_reason(error)}. {advice}") from error


def is_remote(path: str) -> bool:
    """Return whether fsspec opens `path`: "s3://bucket/photos", "zip://*::photos.zip"."""
    return "://" in path


def list_data_files(path: str) -> tuple[list[DataFile], bool]:
    """List the file at `path`, or the files of the folder and its subfolders by name; and whether it is a folder.

    Hidden files, devices and pipes are skipped. Raises a DataError if `path` does not exist, a link leads out of the
    folder, or the folder has too many files. Raises a MissingDependencyError if the path is remote, and fsspec or its
    package for that service is not installed.
    """
    if is_remote(path):
        return _list_remote_files(path)
    if "\0" in path:
        raise DataError(f"{path!r} is not a valid path. Use the path of the calibration data.")
    location = Path(path)
    if location.is_file():
        with wrap_read_errors(DataFile(path)):
            if is_lfs_pointer(location):
                raise DataError(f"{path} {LFS_ADVICE}")
        return [DataFile(path)], False
    if not location.is_dir():
        raise DataError(f"The file {path} does not exist. Use the path of the calibration data.")
    return [DataFile(str(location / name)) for name in _sort_limited(path, _walk_folder(location))], True


def _walk_folder(folder: Path) -> Iterator[str]:
    """Yield the relative paths of the files inside `folder`."""
    resolved_folder = folder.resolve()
    for directory, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            path = Path(directory) / name
            if name.startswith(".") or not path.is_file():
                continue
            if path.is_symlink() and resolved_folder not in path.resolve().parents:
                raise DataError(f"{path} is a link out of the folder. Copy the file into the folder.")
            yield path.relative_to(folder).as_posix()


def _sort_limited(location: str, names: Iterator[str]) -> list[str]:
    """Sort at most `MAX_FILES` names."""
    collected = list(itertools.islice(names, MAX_FILES + 1))
    if len(collected) > MAX_FILES:
        raise DataError(
            f"{location} has more than {MAX_FILES} files. Use a folder with only the samples for calibration."
        )
    return sorted(collected)


def missing_remote_package(address: str, error: ImportError) -> MissingDependencyError:
    """Return the error about fsspec, or its package for a service, which is not installed."""
    if error.name == "fsspec":
        return MissingDependencyError(f"{address} needs the package fsspec. Install it: {DATA_EXTRA_INSTALL}")
    scheme = re.findall(r"([^/:]+)://", address)[-1]  # of zip://*::https://host/a.zip the second
    extra = "http" if scheme == "https" else scheme
    known_extras = importlib.metadata.metadata("fsspec").get_all("Provides-Extra", [])
    command = f": pip install 'fsspec[{extra}]'" if extra in known_extras else ""
    return MissingDependencyError(f"{address} needs another package: {error_reason(error)}. Install it{command or '.'}")


@contextmanager
def remote_file_system(address: str, error_class: type[GraphQuantError], action: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system of an address and the path in it; raise errors of the service as `error_class`."""
    try:
        import fsspec

        yield fsspec.core.url_to_fs(address)
    except GraphQuantError:
        raise
    except ImportError as error:
        raise missing_remote_package(address, error) from error
    except Exception as error:  # services raise exceptions of their own without a common base class
        raise error_class(
            f"{address} cannot be {action}: {error_reason(error)}. Check that it exists and that you have access to it."
        ) from error


def _list_remote_files(path: str) -> tuple[list[DataFile], bool]:
    with remote_file_system(path, DataError, "listed") as (filesystem, root):
        if filesystem.isfile(root):
            return [DataFile(root, filesystem)], False
        visible = (
            name
            for name in filesystem.find(root)
            if not any(component.startswith(".") for component in PurePosixPath(name.removeprefix(root)).parts)
        )
        names = _sort_limited(path, visible)
    if not names:
        raise DataError(f"{path} is empty or does not exist. Use the address of the calibration data.")
    return [DataFile(name, filesystem) for name in names], True


def hash_files(prefix: str, files: Iterable[DataFile]) -> str:
    """Return the hex SHA-256 of `prefix`, which describes the reading of the files, and the bytes of each file."""
    digest = hashlib.sha256(f"{prefix}\n".encode())
    for file in files:
        file_digest = hashlib.sha256()
        with wrap_read_errors(file), file.open() as stream:
            while chunk := stream.read(1 << 20):
                file_digest.update(chunk)
        digest.update(file_digest.digest())
    return digest.hexdigest()
