"""Which models a path, a glob or an address for fsspec names."""

from __future__ import annotations

import glob
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant.data.files import INSTALL, remote
from graphquant.errors import MissingDependencyError, UsageError, did_you_mean
from graphquant.formats import SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_MODELS = 100_000
"""Models of one batch."""

TAKEN = (".onnx", ".onnxtxt", ".pb", ".pbtxt", ".keras")
"""Suffixes of files that a glob takes for models; of the other formats' only where the glob itself ends with it."""

_MADE = re.compile(r"\.quant(\.|$)")
"""In the name of an output of an earlier run."""

_TEST_DATA = re.compile(r"(in|out)put_\d+\.pb")
"""Names of tensors that ONNX test sets have beside a model."""

HERE = "file://"
"""What begins an address that is a path of this machine."""

_SAVED = ("saved_model.pb", "saved_model.pbtxt")


@dataclass(frozen=True, slots=True)
class Folder:
    """Where relative paths begin: a folder of this machine, or one that fsspec opens.

    Attributes:
        path: The folder.
        system: The fsspec file system that has it; None for this machine.
    """

    path: str
    system: Any = None

    def at(self, name: str) -> str:
        """The path of `name` in it."""
        return posixpath.normpath(posixpath.join(self.path, name)) if self.system is None else name

    def is_file(self, name: str) -> bool:
        """Whether there is a file `name`."""
        return Path(self.at(name)).is_file() if self.system is None else bool(self.system.isfile(name))

    def is_folder(self, name: str) -> bool:
        """Whether there is a folder `name`."""
        return Path(self.at(name)).is_dir() if self.system is None else bool(self.system.isdir(name))

    def is_saved_model(self, name: str) -> bool:
        """Whether `name` is a SavedModel's folder."""
        return any(self.is_file(f"{name}/{inside}") for inside in _SAVED)

    def glob(self, pattern: str) -> list[str]:
        """The names that a glob fits, hidden ones left out."""
        if self.system is None:
            return glob.glob(pattern, root_dir=self.path or None, recursive=True)  # noqa: PTH207  # Path's takes hidden ones
        return [self.system.unstrip_protocol(name) for name in self.system.glob(pattern)]

    def names(self, folder: str) -> list[str]:
        """What is in a folder."""
        if not self.is_folder(folder):
            return []
        if self.system is None:
            return sorted(path.name for path in Path(self.at(folder)).iterdir())
        return sorted(posixpath.basename(name) for name in self.system.ls(folder, detail=False))


def folder_of(path: str, start: str) -> Folder:
    """Where `path` is looked for: from the folder `start` on, or by fsspec.

    Raises:
        MissingDependencyError: fsspec, or what it needs for that service, is not installed.
        UsageError: There is no such service.
    """
    if not remote(path):
        return Folder(start)
    try:
        import fsspec

        return Folder("", fsspec.core.url_to_fs(path)[0])
    except ImportError as error:
        raise MissingDependencyError(
            f"{path} needs fsspec, or what it needs for that service ({error}). Install it: {INSTALL}"
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} cannot be opened: {error}. Give a path, or an address that fsspec knows.") from error


def models_at(pattern: str, start: str) -> tuple[list[str], bool]:
    """The models that `pattern` names, sorted, and whether it is the path of one and no glob.

    A glob takes no outputs of earlier runs (`*.quant.*`) unless it has `.quant` itself; of a SavedModel it takes the
    folder and nothing in it.

    Raises:
        MissingDependencyError: fsspec, or what it needs, is not installed.
        UsageError: There is none.
    """
    pattern = pattern.removeprefix(HERE)
    folder = folder_of(pattern, start)
    try:
        return _found(folder, pattern)
    except OSError as error:
        raise UsageError(f"{pattern} cannot be looked for: {error.strerror or error}. Give another path.") from error


def suffix_of(name: str) -> str:
    """The suffix of a path's last part, "" if it has none."""
    return posixpath.splitext(posixpath.basename(name))[1]


def _found(folder: Folder, pattern: str) -> tuple[list[str], bool]:
    """The models that `pattern` names in `folder`, and whether it is a path."""
    if folder.is_file(pattern):
        if suffix_of(pattern) not in SUFFIXES:
            raise UsageError(f"{pattern} is no model. Give a file with one of {', '.join(SUFFIXES)}.")
        return [_plain(pattern)], True
    if folder.is_folder(pattern):
        if not folder.is_saved_model(pattern):
            raise UsageError(
                f"{pattern} is a folder without saved_model.pb. Give {pattern.rstrip('/')}/* for the models in it."
            )
        return [_plain(pattern)], True
    if not glob.has_magic(pattern):
        raise UsageError(f"There is no model {pattern!r}.{_near(folder, pattern)}")
    fitting = list(dict.fromkeys(_plain(name) for name in folder.glob(pattern)))
    found = sorted(_models(folder, pattern, fitting))
    if not found:
        there = f"{len(fitting)} files and folders, none of which is a model to quantize" if fitting else "nothing"
        raise UsageError(f"{pattern!r} names {there}.{_near(folder, pattern)}")
    if len(found) > MAX_MODELS:
        raise UsageError(f"{pattern!r} names {len(found)} models. Take at most {MAX_MODELS} at once.")
    return found, False


def _models(folder: Folder, pattern: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that are models to quantize."""
    last = pattern.rstrip("/").rpartition("/")[2]
    taken = {*TAKEN, suffix_of(pattern)} & SUFFIXES.keys()
    known: dict[str, bool] = {"": False}

    def saved(path: str) -> bool:
        """Whether the folder `path` is a SavedModel's or in one."""
        if path not in known:
            above = path.rpartition("/")[0]
            known[path] = (above != path and saved(above)) or folder.is_saved_model(path)
        return known[path]

    found = []
    for name in names:
        above, _, own = name.rpartition("/")
        unwanted = (_MADE.search(own) and ".quant" not in last) or (own.startswith(".") and not last.startswith("."))
        if unwanted or saved(above):
            continue
        is_file = suffix_of(name) in taken and not _TEST_DATA.fullmatch(own) and folder.is_file(name)
        if is_file or (folder.is_folder(name) and saved(name)):
            found.append(name)
    return found


def _near(folder: Folder, pattern: str) -> str:
    """What was probably meant: the nearest name in the deepest folder of the pattern that there is."""
    above, _, last = pattern.rstrip("/").rpartition("/")
    while above and not folder.is_folder(above) and "/" in above:
        above, _, last = above.rpartition("/")
    if above and not folder.is_folder(above):
        above, last = "", above
    names = folder.names(above or (pattern.partition("://")[0] + "://" if folder.system else "."))
    models = [name for name in names if not _MADE.search(name) and Path(name).suffix in {"", *SUFFIXES}]
    close = did_you_mean(last, models)
    return close or " Give the path of a model, or a glob such as 'models/*.onnx'."


def _plain(name: str) -> str:
    """The shortest spelling of a path."""
    return name.rstrip("/") if remote(name) else posixpath.normpath(name)
