"""Models and outputs at fsspec addresses, and the search for models by path, glob or address.

Remote models are downloaded and processed as local files; outputs are uploaded when they are complete.
"""

from __future__ import annotations

import glob
import hashlib
import posixpath
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from graphquant.api.models import companion_file_names
from graphquant.calibration.data.files import is_remote, remote_file_system
from graphquant.errors import ModelError, UsageError, did_you_mean
from graphquant.formats import SUFFIXES
from graphquant.formats.weights_files import may_be_model_file, unreferenced_weights, weight_files_of

if TYPE_CHECKING:
    from graphquant.batch.types import Entry, Outcome

MAX_REFERENCE_BYTES = 1 << 30
"""Maximum bytes of models next to an output that are downloaded to look for references to its old weights."""


def process_remote(entry: Entry, process: Callable[[Entry], Outcome]) -> Outcome:
    """Run `process` on a local copy of an entry if it has remote files, and upload its output.

    Remote data is read in place. Raises a MissingDependencyError if fsspec, or its package for a service, is not
    installed, a ModelError if a file cannot be read, and a UsageError if the output cannot be written.
    """
    if not any(is_remote(path) for path in (entry.model, entry.stats or "", entry.output)):
        return process(entry)
    with tempfile.TemporaryDirectory(prefix="graphquant-") as temp_name:
        temp_folder = Path(temp_name)
        local_entry = replace(
            entry,
            model=_fetch_model(entry.model, temp_folder / "model"),
            stats=None if entry.stats is None else _fetch_model(entry.stats, temp_folder / "stats"),
            output=str(temp_folder / "output" / posixpath.basename(entry.output))
            if is_remote(entry.output)
            else entry.output,
        )
        outcome = process(local_entry)
        if is_remote(entry.output) and outcome.products:
            _upload(temp_folder / "output", outcome.products, entry.output)
    problem = outcome.problem
    if problem is not None:
        for name in ("model", "output", "stats"):
            path, address = getattr(local_entry, name), getattr(entry, name)
            problem = replace(problem, message=problem.message.replace(path or "\0", address or ""))
    return replace(outcome, model=entry.model, output=entry.output, problem=problem)


def remote_fingerprint(address: str, products: Collection[str]) -> str:
    """Return a hash of file versions of a remote output, without reading it; "" if a file is missing.

    Raises a UsageError if the service does not answer.
    """
    hasher = hashlib.sha256()
    with remote_file_system(address, UsageError, "looked at") as (system, path):
        home = posixpath.dirname(path)
        for name in sorted(products):
            if not system.isfile(f"{home}/{name}"):
                return ""
            hasher.update(f"{name}\n{system.ukey(f'{home}/{name}')}\n".encode(errors="surrogatepass"))
    return hasher.hexdigest()


def _fetch_model(address: str, folder: Path) -> str:
    """Copy all files of a remote model into `folder`, and return its path; return a local path unchanged."""
    if not is_remote(address):
        return address
    with remote_file_system(address, ModelError, "read") as (system, path):
        parent, name = posixpath.split(path.rstrip("/"))
        folder.mkdir()
        if system.isdir(path):
            for file in system.find(path):
                _fetch_file(system, parent, posixpath.relpath(file, parent), folder)
        else:
            _fetch_file(system, parent, name, folder)
            names = [posixpath.basename(file) for file in system.ls(parent, detail=False)]
            for companion in companion_file_names(folder / name, names):
                if system.isfile(f"{parent}/{companion}"):  # loading the model reports missing files
                    _fetch_file(system, parent, companion, folder)
    return str(folder / name)


def _fetch_file(system: Any, parent: str, name: str, folder: Path) -> None:
    if ".." in PurePosixPath(name).parts:
        raise ModelError(f"{parent}/{name} is outside of the model's folder. Remove it.")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    system.get_file(f"{parent}/{name}", str(folder / name))


def _upload(folder: Path, names: Collection[str], address: str) -> None:
    """Upload the files of an output, in one transaction if the service has them, and remove old ones.

    The model itself comes last, after the weights that it reads.
    """
    with remote_file_system(address, UsageError, "written") as (system, path):
        parent, output_name = posixpath.split(path)
        for name in names:
            system.makedirs(posixpath.dirname(f"{parent}/{name}"), exist_ok=True)
        with system.transaction:
            for name in sorted(names, key=lambda name: name == output_name):
                with (folder / name).open("rb") as file, system.open(f"{parent}/{name}", "wb") as remote_file:
                    shutil.copyfileobj(file, remote_file)
        if (folder / output_name).is_dir():
            for file in system.find(path):
                if posixpath.relpath(file, parent) not in names:
                    system.rm_file(file)
        elif len(names) > 1:
            _remove_old_weights(system, path, names, folder.with_name("others"))


def _remove_old_weights(system: Any, path: str, names: Collection[str], folder: Path) -> None:
    """Remove weights of an earlier model at `path` that no model in its folder references.

    Old weights stay if the other models are large or one of them cannot be downloaded.
    """
    parent, output_name = posixpath.split(path)
    system.invalidate_cache(parent)
    remote_files = {
        posixpath.basename(info["name"]): info for info in system.ls(parent, detail=True) if info["type"] == "file"
    }
    old_weights = set(weight_files_of(output_name, remote_files)) - set(names)
    model_sizes = {
        name: info["size"] for name, info in remote_files.items() if name != output_name and may_be_model_file(name)
    }
    if not old_weights or None in model_sizes.values() or sum(model_sizes.values()) > MAX_REFERENCE_BYTES:
        return
    folder.mkdir()
    try:
        for name in model_sizes:
            _fetch_file(system, parent, name, folder)
    except Exception:  # noqa: BLE001  # the service's own classes; the output is complete, so old weights may stay
        return
    for name in unreferenced_weights(sorted(old_weights), [folder / name for name in model_sizes]):
        system.rm_file(f"{parent}/{name}")


MAX_MODELS = 100_000  # maximum number of models in a batch

MODEL_SUFFIXES = (".onnx", ".onnxtxt", ".pb", ".pbtxt", ".keras")
"""Suffixes that a glob matches as models. Suffixes of other formats match only if the glob ends with them."""

_QUANTIZED_NAME = re.compile(r"\.quant(\.|$)")  # pattern of output names of earlier runs
_TEST_DATA = re.compile(r"(in|out)put_\d+\.pb")  # pattern of tensor files of ONNX test sets
LOCAL_SCHEME = "file://"  # scheme of local addresses


@dataclass(frozen=True, slots=True)
class _ModelFolder:
    """Base folder of relative paths."""

    path: str
    system: Any = None  # fsspec file system, None for a local folder

    def path_of(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self.path, name)) if self.system is None else name

    def is_file(self, name: str) -> bool:
        return Path(self.path_of(name)).is_file() if self.system is None else bool(self.system.isfile(name))

    def is_folder(self, name: str) -> bool:
        return Path(self.path_of(name)).is_dir() if self.system is None else bool(self.system.isdir(name))

    def is_saved_model(self, name: str) -> bool:
        return any(self.is_file(f"{name}/{inside}") for inside in ("saved_model.pb", "saved_model.pbtxt"))

    def glob(self, pattern: str) -> list[str]:
        """Return the names that match a glob, without hidden ones."""
        if self.system is None:
            return glob.glob(pattern, root_dir=self.path or None, recursive=True)  # noqa: PTH207  # Path.glob matches hidden files
        return [self.system.unstrip_protocol(name) for name in self.system.glob(pattern)]

    def names(self, folder: str) -> list[str]:
        if not self.is_folder(folder):
            return []
        if self.system is None:
            return sorted(path.name for path in Path(self.path_of(folder)).iterdir())
        return sorted(map(posixpath.basename, self.system.ls(folder, detail=False)))


@contextmanager
def _open_folder(path: str, base: str) -> Iterator[_ModelFolder]:
    """Yield the folder in which `path` is resolved, `base` or an fsspec file system; raise its errors as UsageError."""
    if is_remote(path):
        with remote_file_system(path, UsageError, "searched") as (system, _):
            yield _ModelFolder("", system)
        return
    try:
        yield _ModelFolder(base)
    except OSError as error:
        raise UsageError(f"{path} cannot be searched: {error.strerror or error}. Give another path.") from error


def is_model_folder(name: str, base: str) -> bool:
    """Return True if a model, relative to `base` or at an address, is a folder."""
    with _open_folder(name, base) as folder:
        return folder.is_folder(name)


def find_models(pattern: str, base: str) -> tuple[list[str], bool]:
    """Return the models that `pattern` matches, sorted, and True if it is a path instead of a glob.

    A glob skips outputs of earlier runs (`*.quant.*`) unless it contains `.quant`. Of a SavedModel it matches only the
    folder. Raises a MissingDependencyError if fsspec, or its package for the service, is not installed, and a
    UsageError if nothing matches.
    """
    pattern = pattern.removeprefix(LOCAL_SCHEME)
    with _open_folder(pattern, base) as folder:
        return _match_pattern(folder, pattern)


def suffix_of(name: str) -> str:
    """Return the suffix of a path, "" without one."""
    return posixpath.splitext(posixpath.basename(name))[1]


def _match_pattern(folder: _ModelFolder, pattern: str) -> tuple[list[str], bool]:
    """Return the models that match in `folder`, and True if the pattern is a path."""
    if folder.is_file(pattern):
        if suffix_of(pattern) not in SUFFIXES:
            raise UsageError(f"{pattern} is not a model. Give a file with one of {', '.join(SUFFIXES)}.")
        return [_normalize_path(pattern)], True
    if folder.is_folder(pattern):
        if not folder.is_saved_model(pattern):
            raise UsageError(
                f"{pattern} is a folder without saved_model.pb. Give {pattern.rstrip('/')}/* for the models in it."
            )
        return [_normalize_path(pattern)], True
    if not glob.has_magic(pattern):
        raise UsageError(f"There is no model {pattern!r}.{_suggest_model(folder, pattern)}")
    matches = list(dict.fromkeys(_normalize_path(name) for name in folder.glob(pattern)))
    models = sorted(_filter_models(folder, pattern, matches))
    if not models:
        matched_text = f"{len(matches)} files and folders, but no model to quantize" if matches else "nothing"
        raise UsageError(f"{pattern!r} names {matched_text}.{_suggest_model(folder, pattern)}")
    if len(models) > MAX_MODELS:
        raise UsageError(f"{pattern!r} names {len(models)} models. The maximum is {MAX_MODELS} at once.")
    return models, False


def _filter_models(folder: _ModelFolder, pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that are models to quantize."""
    last = pattern.rstrip("/").rpartition("/")[2]
    suffixes = {*MODEL_SUFFIXES, suffix_of(pattern)} & SUFFIXES.keys()
    is_saved: dict[str, bool] = {"": False}

    def in_saved_model(path: str) -> bool:
        """Return True if `path` is a SavedModel or inside one."""
        if path not in is_saved:
            parent = path.rpartition("/")[0]
            is_saved[path] = (parent != path and in_saved_model(parent)) or folder.is_saved_model(path)
        return is_saved[path]

    models = []
    for name in names:
        parent, _, file_name = name.rpartition("/")
        is_output = _QUANTIZED_NAME.search(file_name) and ".quant" not in last
        is_hidden = file_name.startswith(".") and not last.startswith(".")
        if is_output or is_hidden or in_saved_model(parent):
            continue
        is_file = suffix_of(name) in suffixes and not _TEST_DATA.fullmatch(file_name) and folder.is_file(name)
        if is_file or (folder.is_folder(name) and in_saved_model(name)):
            models.append(name)
    return models


def _suggest_model(folder: _ModelFolder, pattern: str) -> str:
    """Suggest the nearest name in the deepest existing folder of a pattern."""
    parent, _, last = pattern.rstrip("/").rpartition("/")
    while parent and not folder.is_folder(parent) and "/" in parent:
        parent, _, last = parent.rpartition("/")
    if parent and not folder.is_folder(parent):
        parent, last = "", parent
    names = folder.names(parent or (pattern.partition("://")[0] + "://" if folder.system else "."))
    models = [name for name in names if not _QUANTIZED_NAME.search(name) and Path(name).suffix in {"", *SUFFIXES}]
    hint = did_you_mean(last, models)
    return hint or " Give the path of a model, or a glob such as 'models/*.onnx'."


def _normalize_path(name: str) -> str:
    return name.rstrip("/") if is_remote(name) else posixpath.normpath(name)
