"""Writes a model: a file or a SavedModel's folder, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import ModelError, UsageError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.keep import Kept, keep
from graphquant.formats.tensorflow.learned import learned
from graphquant.formats.tensorflow.notes import annotate
from graphquant.formats.tensorflow.source import SAVED_MODEL_FILES, Source
from graphquant.whole import room_beside, take_place, whole

if TYPE_CHECKING:
    from graphquant.ir import Model

__all__ = ["save"]

FINGERPRINT: Final = "fingerprint.pb"
"""Holds hashes of saved_model.pb; readers do without it, and a stale one would be a lie."""


def save(model: Model, path: Path) -> None:
    """Emits the model and writes it to `path` in the form it was read: file, MetaGraph with its checkpoint, or folder.

    A file is text if its suffix is `.pbtxt`; `.meta` keeps the source's form.

    Raises:
        UsageError: `path` cannot be written, or is something else than what would be replaced.
        ModelError: The message is too large for its format.
    """
    source: Source = model.source
    message = emit(model)
    annotate(message, model)
    kept = keep(source, message, learned(model)) if source.form != "GraphDef" else None
    try:
        if source.folder is not None:
            _save_folder(source, message, path, kept)
            return
        if path.is_dir():
            raise UsageError(f"{path} is a folder, and the model is a single file. Give the path of a file.")
        data = _data(source, message, text=source.text if path.suffix == ".meta" else path.suffix == ".pbtxt")
        if source.form == "MetaGraphDef":
            _copy_checkpoint(source, path.with_suffix(""))
        if kept is not None:
            kept.add_to(path.with_suffix(""))
        with whole(path) as file:
            file.write(data)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}. Choose another place.") from error


def _data(source: Source, message: Any, *, text: bool) -> bytes:
    if text == source.text and message == source.message and source.file.is_file():
        data = source.file.read_bytes()  # the same message may have several binary forms
        if hashlib.sha256(data).hexdigest() == source.digest:
            return data
    return proto.to_text(message).encode() if text else proto.to_binary(message)


def _open_up(path: Path, mode: int) -> None:
    """Gives what was made for the owner alone the permissions that a new file has."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(mode & ~mask)


def _copy_checkpoint(source: Source, prefix: Path) -> None:
    """Puts the checkpoint of a MetaGraph beside the new one, under its name."""
    before = source.prefix()
    if before is None or before.resolve() == prefix.resolve():
        return
    for file in sorted(before.parent.iterdir()):
        rest = file.name.removeprefix(before.name)
        if rest != file.name and (rest == ".index" or rest.startswith(".data-")):
            target = prefix.with_name(prefix.name + rest)
            target.unlink(missing_ok=True)
            _link(file, target)


def _link(source: str | Path, target: str | Path) -> str:
    """A hard link where the file system allows one, else a copy.

    Raises:
        ModelError: `source` is a device or a pipe, which may have no end.
    """
    if Path(source).exists() and not Path(source).is_file():
        raise ModelError(f"{source} is no regular file, so it cannot be copied. Take it out of the model.")
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
    return str(target)


def _save_folder(source: Source, message: Any, path: Path, kept: Kept | None) -> None:
    """Writes a SavedModel beside its place and moves it there; files that did not change are linked or copied."""
    if path.exists() and not _is_saved_model(path):
        raise UsageError(
            f"{path} exists and is no SavedModel. A SavedModel is written as a folder; choose another path."
        )
    if source.folder is None:
        return
    data = _data(source, message, text=source.text)
    stale = set(SAVED_MODEL_FILES) if message == source.message else {*SAVED_MODEL_FILES, FINGERPRINT}
    top, seen = str(source.folder), set[str]()

    def left_out(folder: str, _names: list[str]) -> set[str]:
        _check_folder(folder, top, seen)
        return stale if folder == top else set()

    room = room_beside(path)
    try:
        new = room / "new"
        shutil.copytree(top, new, copy_function=_link, ignore=left_out)
        with whole(new / source.file.name) as file:
            file.write(data)
        if kept is not None:
            kept.add_to(new / "variables" / "variables")
        take_place(new, path, room)
    except shutil.Error as error:
        name, _, why = error.args[0][0]
        raise UsageError(f"{path} cannot be written: {name} cannot be copied: {why}. Choose another place.") from error
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _check_folder(folder: str, top: str, seen: set[str]) -> None:
    """Refuses a folder that links lead to a second time, or that is out of the model's folder `top`."""
    real = os.path.realpath(folder)
    if real in seen or not Path(real).is_relative_to(os.path.realpath(top)):
        raise ModelError(f"{folder} is a link to a folder outside of it, or in a circle. Copy the model without links.")
    seen.add(real)


def _is_saved_model(path: Path) -> bool:
    return path.is_dir() and (any((path / name).is_file() for name in SAVED_MODEL_FILES) or not any(path.iterdir()))
