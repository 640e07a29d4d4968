"""The files of a model: the model file, checkpoint files and external data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from graphquant.errors import ModelError
from graphquant.formats import detect_format, refuse_outside_links, walk_saved_model
from graphquant.formats.weights_files import may_have_external_data

MAX_FILES = 100_000  # maximum number of files in the folder of a SavedModel


def model_files(path: Path, *, allow_links: bool = False) -> tuple[Path, ...]:
    """Return the files of the model at `path`, starting with the file that refers to the others.

    With `allow_links`, its files may be links out of its folder. Raises a ModelError if there is no model, or one of
    its files is missing or outside its folder, and an OSError if a file cannot be read.
    """
    format_name = detect_format(path)
    if path.is_dir():
        return _saved_model_files(path, allow_links=allow_links)
    if format_name == "onnx" and may_have_external_data(path):
        from graphquant.formats.onnx.file_writer import external_data_files

        return (path, *external_data_files(path, allow_links=allow_links))
    if path.suffix == ".meta":
        names = _checkpoint_file_names(path, [file.name for file in path.parent.iterdir()])
        files = (path, *map(path.with_name, names))
        refuse_outside_links(path.parent, () if allow_links else files[1:])
        return files
    return (path,)


def companion_file_names(path: Path, folder_names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the other files of a model, relative to its folder, even if they do not exist.

    `folder_names` are the files in the folder from which the model comes; only `path` itself must exist. Raises a
    ModelError if the file is not a model, and an OSError if it cannot be read.
    """
    if path.suffix == ".meta":
        return tuple(_checkpoint_file_names(path, folder_names))
    if detect_format(path) != "onnx" or not may_have_external_data(path):
        return ()
    from graphquant.formats.onnx.file_writer import external_data_names

    return external_data_names(path)


def _checkpoint_file_names(path: Path, folder_names: Iterable[str]) -> list[str]:
    """Return the names of the checkpoint files of a MetaGraph."""
    suffixes = {name: name.removeprefix(path.stem) for name in sorted(folder_names) if name.startswith(f"{path.stem}.")}
    return [name for name, suffix in suffixes.items() if suffix == ".index" or suffix.startswith(".data-")]


def _saved_model_files(path: Path, *, allow_links: bool) -> tuple[Path, ...]:
    """Return the files of a SavedModel, sorted, with `saved_model.pb` first."""
    paths = list(itertools.islice(walk_saved_model(path, follow_links=allow_links), MAX_FILES + 1))
    if len(paths) > MAX_FILES:
        raise ModelError(f"{path} has more than {MAX_FILES} files. Give the folder of one SavedModel.")
    refuse_outside_links(path, () if allow_links else paths)
    files = [file for file in paths if not file.is_dir()]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is not a regular file. Remove it from the model's folder.")
    return tuple(sorted(files, key=lambda file: (file.parent != path or file.stem != "saved_model", file)))
