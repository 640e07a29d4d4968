"""All that an output depends on, and the key made of it: the same key, the same output."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sqlite3
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Self

import graphquant
from graphquant.batch.types import Digests
from graphquant.calibration.data.files import is_remote, list_data_files
from graphquant.calibration.data.spec import parse_data_spec
from graphquant.errors import UsageError
from graphquant.formats import SUFFIXES
from graphquant.formats.model_files import model_files
from graphquant.rules import find_rule_file
from graphquant.rules.load import INLINE_ARROW
from graphquant.utils.tf_determinism import onednn_setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType

    from graphquant.batch.types import Entry


VERSIONED_PACKAGES = (
    *("numpy", "ml_dtypes", "protobuf", "onnx", "pillow", "pyarrow", "keras", "h5py"),
    *("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml"),
    *("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos", "tf-nightly", "tf-nightly-cpu"),
)
"""What may change an output by being of another version, under each name that it is installed by."""

KEY_FIELDS = ("samples", "method", "family", "include", "exclude", "float_weights")
"""Fields of an entry that go into the key as they are; the others are paths, whose content does, and gates."""

KEY_GATES = ("min_sqnr", "min_agreement", "max_accuracy_drop", "check")
"""Gates that go into it: what is left float is searched for by the bounds, and a check's findings are kept."""

CODE_SUFFIXES = {".py", ".c", ".so", ".pyd", ".txt", ".toml"}
"""Suffixes of the files that this program is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInputs:
    """What an entry's output is made of.

    Attributes:
        digests: Of it, and the key; the output's is not known yet.
        model_size: Bytes of the model.
        deterministic: Whether the key tells all; what a data function gives is known only when it is run.
    """

    digests: Digests
    model_size: int
    deterministic: bool


@cache
def package_versions() -> dict[str, str]:
    """Of graphquant and what it runs on, by package; those that are installed."""
    versions = {"graphquant": graphquant.__version__}
    for package in VERSIONED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def program_digest(file_hashes: FileHashes) -> str:
    """A digest of this program: its files, which in a checkout change without their version, and what runs it how."""
    package = Path(graphquant.__file__).parent
    rules = package / "rules" if (package / "rules").is_dir() else package.parent / "rules"
    files = {
        file for home in (package, rules) for file in home.rglob("*") if file.suffix in CODE_SUFFIXES and file.is_file()
    }
    digests = sorted((f"{file.parent.name}/{file.name}", file_hashes.digest(file)) for file in files)
    return _json_sha256(digests, package_versions(), platform.machine(), platform.system(), onednn_setting())


def cache_inputs(
    entry: Entry, file_hashes: FileHashes, program: str, digest_data: Callable[[str], tuple[str, bool]]
) -> CacheInputs:
    """What the output of `entry` is made of.

    Args:
        entry: The entry.
        file_hashes: Knows digests of files.
        program: What the function of that name gives.
        digest_data: `data_digest` of a spec; many entries have one and the same.

    Raises:
        GraphQuantError: A file is not there, or nothing that is known.
        OSError: A file cannot be read.
    """
    model, size = _model_digest(entry.model, file_hashes)
    rules = _json_sha256([_rule_digest(name, file_hashes) for name in entry.rules]) if entry.rules else ""
    data, deterministic = ("", True) if entry.data is None else digest_data(entry.data)
    if entry.stats is not None:
        data = (
            _json_sha256(_content_digest(entry.stats, file_hashes), data)
            if data
            else _content_digest(entry.stats, file_hashes)
        )
    options = {name: value for name, value in asdict(entry).items() if name in KEY_FIELDS}
    gates = {name: value for name, value in asdict(entry.gates).items() if name in KEY_GATES}
    context = [entry.stats is not None, gates, PurePosixPath(entry.output).name]
    key = _json_sha256(program, model, rules, data, options, context)
    return CacheInputs(
        digests=Digests(model=model, rules=rules, data=data, key=key), model_size=size, deterministic=deterministic
    )


def data_digest(spec: str, file_hashes: FileHashes) -> tuple[str, bool]:
    """The digest of what a spec names and how it is read, and whether that tells what it gives.

    Raises:
        DataError: There is nothing that is known.
        MissingDependencyError: fsspec is needed, and not installed.
        OSError: A file cannot be read.
    """
    source = parse_data_spec(spec)
    fields = [source.kind, sorted(source.keys.items()), sorted(source.input_keys.items())]
    if not source.files:
        return _json_sha256(spec, *fields), source.kind != "function"
    return _json_sha256(*fields, _named_digests(source.files, file_hashes)), True


def file_digest(path: Path) -> str:
    """Hex SHA-256 of a file.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def combined_digest(files: Iterable[tuple[str, str]]) -> str:
    """One digest for the files of a model, given their names and digests: its own for one that is a single file."""
    digests = list(files)
    return digests[0][1] if len(digests) == 1 else _json_sha256(digests)


def _model_digest(path: str, file_hashes: FileHashes) -> tuple[str, int]:
    """The digest of a model, its other files included, and its bytes."""
    if is_remote(path):
        return _remote_model_digest(path, file_hashes)
    files = model_files(Path(path))
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    digests = [(file.relative_to(folder).as_posix(), file_hashes.digest(file)) for file in files]
    return combined_digest(digests), sum(file.stat().st_size for file in files)


def _remote_model_digest(path: str, file_hashes: FileHashes) -> tuple[str, int]:
    """The same of a model that is not here; what else is in its folder and no model may be its data, and counts too."""
    files, is_folder = list_data_files(path)
    folder = PurePosixPath(files[0].name).parent
    siblings = (
        [] if is_folder else [(file, PurePosixPath(file.name)) for file in list_data_files(path.rpartition("/")[0])[0]]
    )
    companions = [file for file, name in siblings if name.parent == folder and name.suffix not in SUFFIXES]
    size = sum(file.filesystem.size(file.name) or 0 for file in files)
    return _json_sha256(_named_digests(files, file_hashes), _named_digests(companions, file_hashes)), size


def _rule_digest(name: str, file_hashes: FileHashes) -> str:
    """What stands in a rule file, or the rule that is one itself."""
    return name if INLINE_ARROW in name or "\n" in name else file_hashes.digest(find_rule_file(name))


def _content_digest(path: str, file_hashes: FileHashes) -> str:
    """The digest of a file, or of what is at an address."""
    return (
        _json_sha256(_named_digests(list_data_files(path)[0], file_hashes))
        if is_remote(path)
        else file_hashes.digest(Path(path))
    )


def _named_digests(files: Sequence[Any], file_hashes: FileHashes) -> list[tuple[str, str]]:
    """The files' last names, and their digests; for files elsewhere what their service says of them instead."""
    return [
        (
            PurePosixPath(file.name).name,
            file_hashes.digest(Path(file.name)) if file.system is None else str(file.system.ukey(file.name)),
        )
        for file in files
    ]


def _json_sha256(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode(errors="surrogatepass")).hexdigest()


# What is known of files from earlier runs: their digests, as long as they look the same, and which are ours.

TIMESTAMP_GRAIN = 2_000_000_000
"""Nanoseconds for which a file may change and look the same: the grain of the times that file systems keep."""

LOCK_TIMEOUT = 60
"""Seconds to wait for another run that writes to the memo."""

_CREATE_TABLES = """
create table if not exists looks (
    path text primary key, time integer, changed integer, size integer, inode integer, device integer, sha256 text
);
create table if not exists outputs (path text primary key, sha256 text);
"""

_SELECT_DIGEST = "select time, changed, size, inode, device, sha256 from looks where path = ?"


class FileHashes:
    """A small database beside the cache; it survives whatever ends the process, and several may use it at once.

    Args:
        path: Its file, made if it is not there.

    Raises:
        UsageError: The file cannot be written, or is something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._database_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=LOCK_TIMEOUT, isolation_level=None)
            self._database.execute("pragma journal_mode=wal")
            self._database.execute("pragma synchronous=normal")
            self._database.executescript(_CREATE_TABLES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._database.close()

    @contextmanager
    def _database_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise UsageError(
                f"{self._path}, where digests of files are kept, cannot be used: {error}. Remove it, or give another"
                " folder with --cache-dir."
            ) from error

    def digest(self, path: Path) -> str:
        """Hex SHA-256 of a file; it is read only if it does not look as it did when it was read last.

        Raises:
            OSError: It cannot be read.
        """
        name, now = os.path.realpath(path), time.time_ns()
        fingerprint = _stat_fingerprint(path)
        with self._database_errors():
            row = self._database.execute(_SELECT_DIGEST, (name,)).fetchone()
        if row is not None and row[:-1] == fingerprint:
            return str(row[-1])
        digest = file_digest(path)
        if (
            max(fingerprint[:2]) + TIMESTAMP_GRAIN < now and _stat_fingerprint(path) == fingerprint
        ):  # else it may change again and look the same
            self._write("replace into looks values (?, ?, ?, ?, ?, ?, ?)", (name, *fingerprint, digest))
        return digest

    def output_digest(self, output: str | Path) -> str | None:
        """The digest of what a batch wrote to `output` last, "" if it was about to write, None if none did."""
        with self._database_errors():
            row = self._database.execute(
                "select sha256 from outputs where path = ?", (canonical_output(output),)
            ).fetchone()
        return None if row is None else str(row[0])

    def claim_output(self, output: str | Path, digest: str | None = "") -> None:
        """Remembers what at `output` is a batch's: what has this digest, whatever is written now, or nothing."""
        if digest is None:
            self._write("delete from outputs where path = ?", (canonical_output(output),))
        else:
            self._write("replace into outputs values (?, ?)", (canonical_output(output), digest))

    def _write(self, statement: str, values: tuple[str | int, ...]) -> None:
        """Writes what can be found out again, or asked with --force; a full disk is not to end a batch."""
        with suppress(sqlite3.OperationalError):
            self._database.execute(statement, values)

    def remove_missing(self) -> None:
        """Forgets what is not there any more."""
        with self._database_errors():
            for table in ("looks", "outputs"):
                rows = self._database.execute(f"select path from {table}").fetchall()  # noqa: S608  # of our own two names
                missing = [row for row in rows if not is_remote(row[0]) and not os.path.lexists(row[0])]
                self._database.executemany(f"delete from {table} where path = ?", missing)  # noqa: S608  # the same


def _stat_fingerprint(path: Path) -> tuple[int, int, int, int, int]:
    """What tells a changed file without reading it: two times first, of which nobody can set the second back."""
    status = path.stat()
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev)


def canonical_output(output: str | Path) -> str:
    """The path itself, whether or not something is there, or the address."""
    if is_remote(str(output)):
        return str(output)
    path = Path(output)
    return os.path.join(os.path.realpath(path.parent), path.name)  # noqa: PTH118  # a string, for the database
