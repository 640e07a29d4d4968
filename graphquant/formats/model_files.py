"""The files of a model: the model file, external data, and checkpoint files.

Nothing here parses more of a model than it needs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant.errors import ModelError
from graphquant.formats import detect_format
from graphquant.formats.external_weights import may_have_external_data

if TYPE_CHECKING:
    from collections.abc import Iterable


MAX_FILES = 100_000
"""Maximum number of files in the folder of a SavedModel."""


def model_files(path: Path) -> tuple[Path, ...]:
    """Return the files of the model at `path`, starting with the file that refers to the others.

    Raises:
        ModelError: There is no model, or one of its files is missing or outside its folder.
        OSError: A file cannot be read.
    """
    format_name = detect_format(path)
    if path.is_dir():
        return _saved_model_files(path)
    if format_name == "onnx":
        return (path, *_onnx_external_files(path))
    if path.suffix == ".meta":
        names = _checkpoint_file_names(path, [file.name for file in path.parent.iterdir()])
        return (path, *map(path.with_name, names))
    return (path,)


def companion_file_names(path: Path, folder_names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the other files of a model, relative to its folder, even if they do not exist.

    Args:
        path: The model file; only this file must exist.
        folder_names: Names of the files in the folder from which the model comes.

    Raises:
        ModelError: The file is not a model.
        OSError: The file cannot be read.
    """
    if path.suffix == ".meta":
        return tuple(_checkpoint_file_names(path, folder_names))
    if detect_format(path) != "onnx" or not may_have_external_data(path):
        return ()
    from graphquant.formats.onnx.file_writer import external_data_names

    return external_data_names(path)


def _checkpoint_file_names(path: Path, folder_names: Iterable[str]) -> list[str]:
    """Return the names of the checkpoint files of a MetaGraph."""
    prefix = path.stem
    suffixes = {name: name.removeprefix(prefix) for name in sorted(folder_names) if name.startswith(f"{prefix}.")}
    return [name for name, suffix in suffixes.items() if suffix == ".index" or suffix.startswith(".data-")]


def _saved_model_files(path: Path) -> tuple[Path, ...]:
    """Return the files of a SavedModel, sorted, with `saved_model.pb` first."""
    files = []
    for subfolder, child_folders, names in os.walk(path):
        child_folders.sort()
        files += [Path(subfolder) / name for name in sorted(names)]
        if len(files) > MAX_FILES:
            raise ModelError(f"{path} has more than {MAX_FILES} files. Give the folder of one SavedModel.")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is not a regular file. Remove it from the model's folder.")
    return tuple(sorted(files, key=lambda file: (file.parent != path or file.stem != "saved_model", file)))


def _onnx_external_files(path: Path) -> tuple[Path, ...]:
    """Return the files of external data of an ONNX model, sorted."""
    if not may_have_external_data(path):
        return ()
    from graphquant.formats.onnx.file_writer import external_data_files

    return external_data_files(path)
