"""Models to files: whole or not at all, with links to their external data where they go to another folder."""

from __future__ import annotations

import filecmp
import os
import shutil
import warnings
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import EncodeError
from onnx import printer, serialization

from graphquant.errors import ModelError, UsageError
from graphquant.formats.beside import Digested, data_path, replacing
from graphquant.formats.onnx.apart import fill, left_bytes, new_bytes, put_apart, tensors
from graphquant.formats.onnx.notes import annotate
from graphquant.formats.onnx.read import MAX_MESSAGE, parse
from graphquant.formats.onnx.tensors import external_path, is_external, tensor_value
from graphquant.formats.onnx.write import emit
from graphquant.ir import bulk
from graphquant.whole import whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphquant.formats.onnx.apart import Left
    from graphquant.formats.onnx.write import Emission
    from graphquant.ir import Model

MANY = 1 << 28
"""Bytes of new weights from which they are written outside of a message, where the source has its own outside."""


@bulk()
def save(model: Model, path: Path) -> None:
    """Emits the model and writes it to `path` in the form that its suffix names, with weights beside it if need be.

    Raises:
        ModelError: A change cannot be said in ONNX, or a textual form would be over 2 GB.
        UsageError: `path` or a file of external data beside it cannot be written.
    """
    emission = emit(model, bare=True)
    message, folder = emission.message, model.source.folder
    outside = binary_form(path) and _outside(model, emission)
    if not outside:
        fill(message, emission.later)
    annotate(message, model, record=not outside)
    try:
        with replacing(path, apart=outside):
            if outside:
                _save_apart(message, emission.later, folder, path)
                return
            data = serialize(message, path)
            link_data(message, folder, path)
            with whole(path) as file:
                file.write(data)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}. Give another output path.") from error


def binary_form(path: Path) -> bool:
    """Whether the suffix of `path` names the protocol buffer's own form."""
    return serialization.registry.get_format_from_file_extension(path.suffix) in {"protobuf", None}


def _outside(model: Model, emission: Emission) -> bool:
    """Whether weights are to be written beside the model.

    They are where the message could not hold them, and where many are new and the source has its own outside.
    """
    try:
        if left_bytes(emission.message, emission.later) + emission.message.ByteSize() > MAX_MESSAGE:
            return True
    except (EncodeError, ValueError):
        return True
    return new_bytes(emission.later) > MANY and any(True for _ in external_tensors(model.source.message))


def _save_apart(message: Any, later: Sequence[Left], folder: Path | None, path: Path) -> None:
    """Writes a model to `path`, and before that its weights to a file beside it, which is named by what it holds.

    So whatever model is at `path` meanwhile has its own weights beside it.

    Raises:
        ModelError: A weight cannot be read.
        OSError: They cannot be written.
    """
    data: Digested

    def named() -> Path:
        return data_path(path, data.digest)

    with whole(path) as file, whole(path.with_name(f"{path.name}.data"), named) as opened:  # which is left first
        data = Digested(opened)
        for place in put_apart(message, later, folder, data):
            place.value = data_path(path, data.digest).name
        file.write(binary(message))
        file.flush()  # while a full disk still changes nothing


def serialize(message: Any, path: Path) -> bytes:
    """The bytes of a ModelProto in the form that the suffix of `path` names.

    Raises:
        ModelError: It is over 2 GB, or the textual form cannot hold it.
    """
    form = serialization.registry.get_format_from_file_extension(path.suffix) or "protobuf"
    if form == "protobuf":
        return binary(message)
    with warnings.catch_warnings(action="ignore"):  # onnx calls its text form experimental
        data: bytes = serialization.registry.get(form).serialize_proto(message)
    if form == "onnxtxt" and not _holds(data, message, path):
        raise ModelError(
            f"onnx's textual form loses parts of this model. Write {path.stem}.onnx or {path.stem}.textproto instead."
        )
    return data


def _holds(data: bytes, message: Any, path: Path) -> bool:
    """Whether onnx's textual form, which is experimental, reads back as the same text and the same weights."""
    again = parse(data, path)
    before, after = message.graph.initializer, again.graph.initializer
    return printer.to_text(again).encode() == data and all(
        one.name == other.name and np.array_equal(tensor_value(one, None), tensor_value(other, None))
        for one, other in zip(before, after, strict=True)
        if not is_external(one)
    )


def binary(message: Any) -> bytes:
    """The bytes of a ModelProto in protocol buffer form, always the same ones for the same message.

    Raises:
        ModelError: It is over 2 GB.
    """
    try:
        data: bytes = message.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ModelError(_TOO_LARGE) from error
    if len(data) > MAX_MESSAGE:
        raise ModelError(_TOO_LARGE)
    return data


_TOO_LARGE = (
    "The model is over 2 GB, more than a protocol buffer can hold. "
    "Save the float model with external data and start from that."
)


def link_data(message: Any, source: Path | None, path: Path) -> None:
    """Puts links to (or copies of) the files of external data that `message` needs from folder `source` beside `path`.

    Each is there whole or not at all, and before the model is, as nothing else reads it.

    Raises:
        ModelError: A file is missing, or out of the model's folder.
        UsageError: Another file is in its place.
        OSError: They cannot be written.
    """
    linked: set[str] = set()
    for tensor in external_tensors(message):
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        if location in linked:
            continue
        linked.add(location)
        origin, target = external_path(tensor, source), path.parent / location
        if target.exists():
            if not target.samefile(origin) and not filecmp.cmp(origin, target, shallow=False):
                raise UsageError(
                    f"{target} is there already and is other data than the model's. Write to another folder."
                )
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(origin.resolve(), target)
        except OSError:  # another file system, or one without links
            with origin.open("rb") as file, whole(target.with_name(f"{path.name}.data"), partial(Path, target)) as copy:
                shutil.copyfileobj(file, copy)


def external_tensors(message: Any) -> Iterator[Any]:
    """The tensors of a ModelProto whose data is in other files, wherever they are."""
    return filter(is_external, tensors(message))


def external_files(path: Path) -> tuple[Path, ...]:
    """The files of external data that the model at `path` has, sorted.

    Raises:
        ModelError: It is no ONNX model, or a file is missing or out of the model's folder.
        OSError: It cannot be read.
    """
    message = parse(path.read_bytes(), path)
    return tuple(sorted({external_path(tensor, path.parent) for tensor in external_tensors(message)}))


def external_names(path: Path) -> tuple[str, ...]:
    """Where the model at `path` says its external data is, relative to its folder, sorted; nothing out of that.

    Raises:
        ModelError: It is no ONNX model.
        OSError: It cannot be read.
    """
    said = (
        next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        for tensor in external_tensors(parse(path.read_bytes(), path))
    )
    pure = {PurePosixPath(name) for name in said if name and "\0" not in name}
    return tuple(sorted(str(name) for name in pure if not name.is_absolute() and ".." not in name.parts))
