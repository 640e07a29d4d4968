"""The files that a model is in, told without reading more of them than is needed."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant.errors import ModelError
from graphquant.formats import format_of

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_FILES = 100_000
"""Files of a SavedModel's folder."""

_EXTERNAL = b"location"
"""What a message holds that has data in other files: the key under which it names them."""


def files_of(path: Path) -> tuple[Path, ...]:
    """The files of the model at `path`, of which the first names the others; variables and external data are others.

    Raises:
        ModelError: There is no model, or a file of it is missing or out of its folder.
        OSError: A file cannot be read.
    """
    form = format_of(path)
    if path.is_dir():
        return _folder(path)
    if form == "onnx":
        return (path, *_external(path))
    if path.suffix == ".meta":
        return (
            path,
            *(path.with_name(name) for name in _variables(path, [file.name for file in path.parent.iterdir()])),
        )
    return (path,)


def names_beside(path: Path, there: Iterable[str]) -> tuple[str, ...]:
    """What else the model in the file at `path` is in, relative to its folder, whether or not it is there.

    Args:
        path: The file; it alone needs to be there.
        there: Names of what is in the folder that it comes from.

    Raises:
        ModelError: It is no model.
        OSError: It cannot be read.
    """
    if path.suffix == ".meta":
        return tuple(_variables(path, there))
    if format_of(path) != "onnx" or not has_external(path):
        return ()
    from graphquant.formats.onnx.files import external_names

    return external_names(path)


def _variables(path: Path, there: Iterable[str]) -> list[str]:
    """The names of the checkpoint's files of a MetaGraph."""
    prefix = path.stem
    ends = {name: name.removeprefix(prefix) for name in sorted(there) if name.startswith(f"{prefix}.")}
    return [name for name, end in ends.items() if end == ".index" or end.startswith(".data-")]


def _folder(path: Path) -> tuple[Path, ...]:
    """The files of a SavedModel, sorted, `saved_model.pb` first."""
    found = []
    for at, folders, names in os.walk(path):
        folders.sort()
        found += [Path(at) / name for name in sorted(names)]
        if len(found) > MAX_FILES:
            raise ModelError(f"{path} has more than {MAX_FILES} files. Give the folder of one SavedModel.")
    for file in found:
        if not file.is_file():
            raise ModelError(f"{file} is no regular file. Take it out of the model.")
    return tuple(sorted(found, key=lambda file: (file.parent != path or file.stem != "saved_model", file)))


def _external(path: Path) -> tuple[Path, ...]:
    """The files of external data of an ONNX model, sorted."""
    if not has_external(path):
        return ()
    from graphquant.formats.onnx.files import external_files

    return external_files(path)


def has_external(path: Path) -> bool:
    """Whether an ONNX model may have external data; told without parsing it."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(_EXTERNAL) >= 0


__all__ = ["files_of", "names_beside"]
