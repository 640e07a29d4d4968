"""Cache keys: digests of everything that an output depends on, and a database of file digests.

Equal keys mean equal outputs. A file is hashed again only if its metadata changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sqlite3
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Self

import graphquant
from graphquant.api.models import model_files
from graphquant.batch.types import METRIC_GATES, PLAIN_OPTIONS, Digests, Entry
from graphquant.calibration.data.dataset import parse_data_spec, split_by_signature
from graphquant.calibration.data.files import is_remote, list_data_files
from graphquant.errors import UsageError
from graphquant.formats import SUFFIXES, detect_format
from graphquant.rules import find_rule_file
from graphquant.rules.load import INLINE_ARROW, resolve_costs
from graphquant.utils import ONEDNN_OFF, ONEDNN_VARIABLE

if TYPE_CHECKING:
    from graphquant.utils.options import InsertOptions

VERSIONED_PACKAGES = (
    *("numpy", "ml_dtypes", "protobuf", "onnx", "pillow", "pyarrow", "keras", "h5py"),
    *("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml"),
    *("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos", "tf-nightly", "tf-nightly-cpu"),
)
"""Packages whose version may change an output, under each of their distribution names."""

KEY_GATES = (*METRIC_GATES, "check")
"""Gates in the cache key: bounds steer the search, and findings of the check are stored."""

CODE_SUFFIXES = {".py", ".c", ".so", ".pyd", ".txt", ".toml"}  # suffixes of the program's files


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInputs:
    """Everything that an entry's output depends on."""

    digests: Digests  # digests of the inputs, and the key; without the output's digest
    model_size: int  # bytes of the model
    deterministic: bool  # True if the key determines the output; False for data functions.


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of graphquant and of the installed packages that it runs on."""
    versions = {"graphquant": graphquant.__version__}
    for package in VERSIONED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def program_digest(file_hashes: FileHashes) -> str:
    """Return a digest of the program's files, package versions, platform and TensorFlow settings.

    A checkout may change without a new version, so the files count too.
    """
    digests = sorted((f"{file.parent.name}/{file.name}", file_hashes.digest(file)) for file in _program_files())
    onednn = os.environ.get(ONEDNN_VARIABLE, ONEDNN_OFF)
    return _json_sha256(digests, package_versions(), platform.machine(), platform.system(), onednn)


def _program_files() -> set[Path]:
    """Return the files of the program and its rules."""
    package = Path(graphquant.__file__).parent
    rules = package / "rules" if (package / "rules").is_dir() else package.parent / "rules"
    return {
        file
        for folder in (package, rules)
        for file in folder.rglob("*")
        if file.suffix in CODE_SUFFIXES and file.is_file()
    }


def resume_key(model: Path, settings: InsertOptions, min_bytes: int) -> str | None:
    """Return a key of the result of `insert` for `resumable_output`; None if it reads data, or the model is smaller.

    The key has the times of change of all files in place of their content, which may be large. Raises a GraphQuantError
    if a file is missing, and an OSError if one cannot be read.
    """
    reads_data = any(value is not None for value in (settings.data, settings.stats, settings.ranges))
    if reads_data or detect_format(model) != "onnx":
        return None
    files = model_files(model, allow_links=settings.allow_links)
    if sum(file.stat().st_size for file in files) < min_bytes:
        return None
    rules = [find_rule_file(name) for name in settings.rules if INLINE_ARROW not in name and "\n" not in name]
    plan = [] if settings.plan is None else [Path(settings.plan)]
    read_files = {*_program_files(), *files, *rules, *_cost_tables(settings.rules), *plan}
    fingerprints = [(os.path.realpath(file), *_stat_fingerprint(file)) for file in sorted(read_files)]
    return _json_sha256(fingerprints, package_versions(), repr(settings))


def _cost_tables(rules: Iterable[str]) -> Iterator[Path]:
    """Yield the cost tables that the user's rule files name."""
    for name in rules:
        if INLINE_ARROW in name or "\n" in name:
            continue
        path = find_rule_file(name)
        with suppress(OSError, ValueError):  # reading the rules reports these
            costs = tomllib.loads(path.read_text("utf-8")).get("costs")
            table = Path(resolve_costs(costs, path)) if isinstance(costs, str) else None
            if table is not None and table.is_file():
                yield table


def cache_inputs(
    entry: Entry, file_hashes: FileHashes, program: str, digest_data: Callable[[str], tuple[str, bool]]
) -> CacheInputs:
    """Return everything that the output of `entry` depends on.

    `program` is its `program_digest`. `digest_data` is `data_digest`, cached because many entries share one spec.
    Raises a GraphQuantError if a file is missing or unknown, and an OSError if a file cannot be read.
    """
    model, size = _model_digest(entry.model, file_hashes, allow_links=entry.allow_links)
    rule_contents = [  # an inline rule is its own content
        name if INLINE_ARROW in name or "\n" in name else file_hashes.digest(find_rule_file(name))
        for name in entry.rules
    ]
    rule_contents += [file_hashes.digest(path) for path in _cost_tables(entry.rules)]
    rules = _json_sha256(rule_contents) if rule_contents else ""
    data, deterministic = ("", True) if entry.data is None else digest_data(entry.data)
    if entry.stats is not None:
        stats = _content_digest(entry.stats, file_hashes)
        data = _json_sha256(stats, data) if data else stats
    options = {name: value for name, value in asdict(entry).items() if name in PLAIN_OPTIONS}
    gates = {name: value for name, value in asdict(entry.gates).items() if name in KEY_GATES}
    given_ranges = [path and _content_digest(path, file_hashes) for path in (entry.ranges, entry.ranges_map)]
    context = [entry.stats is not None, gates, PurePosixPath(entry.output).name, given_ranges]
    key = _json_sha256(program, model, rules, data, options, context)
    return CacheInputs(
        digests=Digests(model=model, rules=rules, data=data, key=key),
        model_size=size,
        # Measured latency differs between runs, and the code of a metric may change.
        deterministic=deterministic and entry.optimize != "latency" and entry.metric is None,
    )


def data_digest(spec: str, file_hashes: FileHashes) -> tuple[str, bool]:
    """Return the digest of a data spec, and whether it determines the samples.

    Raises a DataError if the spec is invalid, a MissingDependencyError if fsspec is needed and not installed, and an
    OSError if a file cannot be read.
    """
    if parts := split_by_signature(spec):
        digests = {name: data_digest(str(part), file_hashes) for name, part in parts.items()}
        return _json_sha256(digests), all(deterministic for _, deterministic in digests.values())
    source = parse_data_spec(spec)
    fields = [source.kind, sorted(source.keys.items()), sorted(source.input_keys.items())]
    if not source.files:
        return _json_sha256(spec, *fields), source.kind != "function"
    return _json_sha256(*fields, _named_digests(source.files, file_hashes)), True


def file_digest(path: Path) -> str:
    """Return the hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def combined_digest(files: Iterable[tuple[str, str]]) -> str:
    """Return one digest of a model's files, given names and digests; a single file keeps its own."""
    digests = list(files)
    return digests[0][1] if len(digests) == 1 else _json_sha256(digests)


def _model_digest(path: str, file_hashes: FileHashes, *, allow_links: bool) -> tuple[str, int]:
    """Return digest and bytes of a model with its companion files.

    Files in the folder of a remote model that are not models may be its weights, and count too.
    """
    if not is_remote(path):
        local_files = model_files(Path(path), allow_links=allow_links)
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        digests = [(file.relative_to(folder).as_posix(), file_hashes.digest(file)) for file in local_files]
        return combined_digest(digests), sum(file.stat().st_size for file in local_files)
    files, is_folder = list_data_files(path)
    parent = PurePosixPath(files[0].name).parent
    companions = []
    for file in [] if is_folder else list_data_files(path.rpartition("/")[0])[0]:
        name = PurePosixPath(file.name)
        if name.parent == parent and name.suffix not in SUFFIXES:
            companions.append(file)
    size = sum(file.filesystem.size(file.name) or 0 for file in files)
    return _json_sha256(_named_digests(files, file_hashes), _named_digests(companions, file_hashes)), size


def _content_digest(path: str, file_hashes: FileHashes) -> str:
    if is_remote(path):
        return _json_sha256(_named_digests(list_data_files(path)[0], file_hashes))
    return file_hashes.digest(Path(path))


def _named_digests(files: Sequence[Any], file_hashes: FileHashes) -> list[tuple[str, str]]:
    """Return base names and digests of files; for remote files the version key of the service."""
    return [
        (
            PurePosixPath(file.name).name,
            file_hashes.digest(Path(file.name)) if file.filesystem is None else str(file.filesystem.ukey(file.name)),
        )
        for file in files
    ]


def _json_sha256(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode(errors="surrogatepass")).hexdigest()


TIMESTAMP_GRAIN = 2_000_000_000
"""Nanoseconds within which a file may change without a new timestamp: the resolution of file systems."""

LOCK_TIMEOUT = 60  # seconds to wait for the database lock of another run

_CREATE_TABLES = """
create table if not exists fingerprints (
    path text primary key, mtime integer, ctime integer, size integer, inode integer, device integer, sha256 text
);
create table if not exists outputs (path text primary key, sha256 text);
"""

_SELECT_DIGEST = "select mtime, ctime, size, inode, device, sha256 from fingerprints where path = ?"


class FileHashes:
    """Database of file digests and claimed outputs, safe for concurrent use and crashes; created if missing.

    Raises a UsageError if the file cannot be written, or is not a database.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._database_errors(), ExitStack() as on_failure:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=LOCK_TIMEOUT, isolation_level=None)
            on_failure.callback(self._database.close)
            self._database.execute("pragma journal_mode=wal")
            self._database.execute("pragma synchronous=normal")
            self._database.executescript(_CREATE_TABLES)
            on_failure.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    @contextmanager
    def _database_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise UsageError(
                f"{self._path}, the database of file digests, cannot be used: {error}. Remove it, or give another"
                " folder with --cache-dir."
            ) from error

    def digest(self, path: Path) -> str:
        """Return the hex SHA-256 of a file. The file is read only if its fingerprint changed."""
        name, now = os.path.realpath(path), time.time_ns()
        fingerprint = _stat_fingerprint(path)
        with self._database_errors():
            row = self._database.execute(_SELECT_DIGEST, (name,)).fetchone()
        if row is not None and row[:-1] == fingerprint:
            return str(row[-1])
        digest = file_digest(path)
        # A very recent file may change again within the timestamp's resolution.
        if max(fingerprint[:2]) + TIMESTAMP_GRAIN < now and _stat_fingerprint(path) == fingerprint:
            self._write("replace into fingerprints values (?, ?, ?, ?, ?, ?, ?)", (name, *fingerprint, digest))
        return digest

    def output_digest(self, output: str | Path) -> str | None:
        """Return the digest of a batch's last output at a path; "" if a batch was about to write, None if none did."""
        with self._database_errors():
            query = "select sha256 from outputs where path = ?"
            row = self._database.execute(query, (canonical_output(output),)).fetchone()
        return None if row is None else str(row[0])

    def claim_output(self, output: str | Path, digest: str | None = "") -> None:
        """Record the digest of a batch's output at a path: "" before writing, None to release it."""
        if digest is None:
            self._write("delete from outputs where path = ?", (canonical_output(output),))
        else:
            self._write("replace into outputs values (?, ?)", (canonical_output(output), digest))

    def _write(self, statement: str, values: tuple[str | int, ...]) -> None:
        """Execute a statement, and ignore errors.

        A full disk must not end a batch: digests can be recomputed, and outputs replaced with --force.
        """
        with suppress(sqlite3.OperationalError):
            self._database.execute(statement, values)

    def remove_missing(self) -> None:
        """Remove rows of files that no longer exist."""
        with self._database_errors():
            for table in ("fingerprints", "outputs"):
                rows = self._database.execute(f"select path from {table}").fetchall()  # noqa: S608  # the table names are constants
                missing = [row for row in rows if not is_remote(row[0]) and not os.path.lexists(row[0])]
                self._database.executemany(f"delete from {table} where path = ?", missing)  # noqa: S608  # the same


def _stat_fingerprint(path: Path) -> tuple[int, int, int, int, int]:
    """Return file metadata that reveals changes without reading: the change time cannot be reset by users."""
    status = path.stat()
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev)


def canonical_output(output: str | Path) -> str:
    """Return the canonical path of an output, existing or not, or the address."""
    if is_remote(str(output)):
        return str(output)
    path = Path(output)
    return os.path.join(os.path.realpath(path.parent), path.name)  # noqa: PTH118  # the database stores a string
