"""The files that a model is in, told without reading more of them than is needed."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant.errors import ModelError
from graphquant.formats import detect_format

if TYPE_CHECKING:
    from collections.abc import Iterable


MAX_FILES = 100_000
"""Files of a SavedModel's folder."""

_LOCATION_KEY = b"location"
"""What a message holds that has data in other files: the key under which it names them."""


def model_files(path: Path) -> tuple[Path, ...]:
    """The files of the model at `path`, of which the first names the others; variables and external data are others.

    Raises:
        ModelError: There is no model, or a file of it is missing or out of its folder.
        OSError: A file cannot be read.
    """
    format_name = detect_format(path)
    if path.is_dir():
        return _saved_model_files(path)
    if format_name == "onnx":
        return (path, *_onnx_external_files(path))
    if path.suffix == ".meta":
        return (
            path,
            *(
                path.with_name(name)
                for name in _checkpoint_file_names(path, [file.name for file in path.parent.iterdir()])
            ),
        )
    return (path,)


def companion_file_names(path: Path, folder_names: Iterable[str]) -> tuple[str, ...]:
    """What else the model in the file at `path` is in, relative to its folder, whether or not it is there.

    Args:
        path: The file; it alone needs to be there.
        folder_names: Names of what is in the folder that it comes from.

    Raises:
        ModelError: It is no model.
        OSError: It cannot be read.
    """
    if path.suffix == ".meta":
        return tuple(_checkpoint_file_names(path, folder_names))
    if detect_format(path) != "onnx" or not may_have_external_data(path):
        return ()
    from graphquant.formats.onnx.file_writer import external_data_names

    return external_data_names(path)


def _checkpoint_file_names(path: Path, folder_names: Iterable[str]) -> list[str]:
    """The names of the checkpoint's files of a MetaGraph."""
    prefix = path.stem
    suffixes = {name: name.removeprefix(prefix) for name in sorted(folder_names) if name.startswith(f"{prefix}.")}
    return [name for name, suffix in suffixes.items() if suffix == ".index" or suffix.startswith(".data-")]


def _saved_model_files(path: Path) -> tuple[Path, ...]:
    """The files of a SavedModel, sorted, `saved_model.pb` first."""
    files = []
    for subfolder, child_folders, names in os.walk(path):
        child_folders.sort()
        files += [Path(subfolder) / name for name in sorted(names)]
        if len(files) > MAX_FILES:
            raise ModelError(f"{path} has more than {MAX_FILES} files. Give the folder of one SavedModel.")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is no regular file. Take it out of the model.")
    return tuple(sorted(files, key=lambda file: (file.parent != path or file.stem != "saved_model", file)))


def _onnx_external_files(path: Path) -> tuple[Path, ...]:
    """The files of external data of an ONNX model, sorted."""
    if not may_have_external_data(path):
        return ()
    from graphquant.formats.onnx.file_writer import external_data_files

    return external_data_files(path)


def may_have_external_data(path: Path) -> bool:
    """Whether an ONNX model may have external data; told without parsing it."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(_LOCATION_KEY) >= 0
