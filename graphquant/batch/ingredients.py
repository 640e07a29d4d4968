"""All that an output depends on, and the key made of it: the same key, the same output."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import graphquant
from graphquant.batch.types import Digests
from graphquant.data.files import found, remote
from graphquant.data.spec import parse
from graphquant.formats import SUFFIXES
from graphquant.formats.parts import files_of
from graphquant.kernels import asked
from graphquant.ruleset import find
from graphquant.ruleset.inline import SIGN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from graphquant.batch.memo import Memo
    from graphquant.batch.types import Entry

PACKAGES = (
    *("numpy", "ml_dtypes", "protobuf", "onnx", "pillow", "pyarrow", "keras", "h5py"),
    *("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml"),
    *("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos", "tf-nightly", "tf-nightly-cpu"),
)
"""What may change an output by being of another version, under each name that it is installed by."""

RESULT = ("samples", "method", "family", "include", "exclude", "float_weights")
"""Fields of an entry that go into the key as they are; the others are paths, whose content does, and gates."""

SEARCHED = ("min_sqnr", "min_agreement", "max_accuracy_drop", "check")
"""Gates that go into it: what is left float is searched for by the bounds, and a check's findings are kept."""

CODE = {".py", ".c", ".so", ".pyd", ".txt", ".toml"}
"""Suffixes of the files that this program is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredients:
    """What an entry's output is made of.

    Attributes:
        digests: Of it, and the key; the output's is not known yet.
        size: Bytes of the model.
        fixed: Whether the key tells all; what a data function gives is known only when it is run.
    """

    digests: Digests
    size: int
    fixed: bool


@cache
def versions() -> dict[str, str]:
    """Of graphquant and what it runs on, by package; those that are installed."""
    told = {"graphquant": graphquant.__version__}
    for package in PACKAGES:
        try:
            told[package] = version(package)
        except PackageNotFoundError:
            continue
    return told


def program(memo: Memo) -> str:
    """A digest of this program: its files, which in a checkout change without their version, and what runs it how."""
    package = Path(graphquant.__file__).parent
    rules = package / "rules" if (package / "rules").is_dir() else package.parent / "rules"
    files = {file for home in (package, rules) for file in home.rglob("*") if file.suffix in CODE and file.is_file()}
    told = sorted((f"{file.parent.name}/{file.name}", memo.digest(file)) for file in files)
    return _sha256(told, versions(), platform.machine(), platform.system(), asked())


def ingredients(entry: Entry, memo: Memo, program: str, data_of: Callable[[str], tuple[str, bool]]) -> Ingredients:
    """What the output of `entry` is made of.

    Args:
        entry: The entry.
        memo: Knows digests of files.
        program: What the function of that name gives.
        data_of: `data_digest` of a spec; many entries have one and the same.

    Raises:
        GraphQuantError: A file is not there, or nothing that is known.
        OSError: A file cannot be read.
    """
    model, size = _model(entry.model, memo)
    rules = _sha256([_rules(name, memo) for name in entry.rules]) if entry.rules else ""
    data, fixed = ("", True) if entry.data is None else data_of(entry.data)
    if entry.stats is not None:
        data = _sha256(_content(entry.stats, memo), data) if data else _content(entry.stats, memo)
    told = {name: value for name, value in asdict(entry).items() if name in RESULT}
    gates = {name: value for name, value in asdict(entry.gates).items() if name in SEARCHED}
    kind = [entry.stats is not None, gates, PurePosixPath(entry.output).name]
    key = _sha256(program, model, rules, data, told, kind)
    return Ingredients(digests=Digests(model=model, rules=rules, data=data, key=key), size=size, fixed=fixed)


def data_digest(spec: str, memo: Memo) -> tuple[str, bool]:
    """The digest of what a spec names and how it is read, and whether that tells what it gives.

    Raises:
        DataError: There is nothing that is known.
        MissingDependencyError: fsspec is needed, and not installed.
        OSError: A file cannot be read.
    """
    source = parse(spec)
    said = [source.kind, sorted(source.keys.items()), sorted(source.inputs.items())]
    if not source.files:
        return _sha256(spec, *said), source.kind != "function"
    return _sha256(*said, _named(source.files, memo)), True


def file_digest(path: Path) -> str:
    """Hex SHA-256 of a file.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(files: Iterable[tuple[str, str]]) -> str:
    """One digest for the files of a model, given their names and digests: its own for one that is a single file."""
    named = list(files)
    return named[0][1] if len(named) == 1 else _sha256(named)


def _model(path: str, memo: Memo) -> tuple[str, int]:
    """The digest of a model, its other files included, and its bytes."""
    if remote(path):
        return _elsewhere(path, memo)
    files = files_of(Path(path))
    home = Path(path) if Path(path).is_dir() else Path(path).parent
    named = [(file.relative_to(home).as_posix(), memo.digest(file)) for file in files]
    return digest_of(named), sum(file.stat().st_size for file in files)


def _elsewhere(path: str, memo: Memo) -> tuple[str, int]:
    """The same of a model that is not here; what else is in its folder and no model may be its data, and counts too."""
    files, folder = found(path)
    home = PurePosixPath(files[0].name).parent
    others = [] if folder else [(file, PurePosixPath(file.name)) for file in found(path.rpartition("/")[0])[0]]
    beside = [file for file, name in others if name.parent == home and name.suffix not in SUFFIXES]
    size = sum(file.system.size(file.name) or 0 for file in files)
    return _sha256(_named(files, memo), _named(beside, memo)), size


def _rules(name: str, memo: Memo) -> str:
    """What stands in a rule file, or the rule that is one itself."""
    return name if SIGN in name or "\n" in name else memo.digest(find(name))


def _content(path: str, memo: Memo) -> str:
    """The digest of a file, or of what is at an address."""
    return _sha256(_named(found(path)[0], memo)) if remote(path) else memo.digest(Path(path))


def _named(files: Sequence[Any], memo: Memo) -> list[tuple[str, str]]:
    """The files' last names, and their digests; for files elsewhere what their service says of them instead."""
    return [
        (
            PurePosixPath(file.name).name,
            memo.digest(Path(file.name)) if file.system is None else str(file.system.ukey(file.name)),
        )
        for file in files
    ]


def _sha256(*told: Any) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode(errors="surrogatepass")).hexdigest()


__all__ = ["Ingredients", "data_digest", "digest_of", "file_digest", "ingredients", "program", "versions"]
