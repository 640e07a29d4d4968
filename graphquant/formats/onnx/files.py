"""Models to files: whole or not at all, with links to their external data where they go to another folder."""

from __future__ import annotations

import filecmp
import os
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import EncodeError
from onnx import GraphProto, printer, serialization

from graphquant.errors import ModelError, UsageError
from graphquant.formats.onnx.read import MAX_MESSAGE, parse
from graphquant.formats.onnx.tensors import external_path, is_external, tensor_value
from graphquant.formats.onnx.write import emit
from graphquant.ir import bulk
from graphquant.whole import whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from graphquant.ir import Model


@bulk()
def save(model: Model, path: Path) -> None:
    """Emits the model and writes it to `path` in the form that its suffix names.

    Raises:
        ModelError: A change cannot be said in ONNX, or the message is over 2 GB.
        UsageError: `path` or a file of external data beside it cannot be written.
    """
    message = emit(model).message
    data = serialize(message, path)
    try:
        link_data(message, model.source.folder, path.parent)
        with whole(path) as file:
            file.write(data)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}. Give another output path.") from error


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
        if message.ByteSize() <= MAX_MESSAGE:
            data: bytes = message.SerializeToString(deterministic=True)
            return data
    except (EncodeError, ValueError) as error:
        raise ModelError(_TOO_LARGE) from error
    raise ModelError(_TOO_LARGE)


_TOO_LARGE = (
    "The model is over 2 GB, more than a protocol buffer can hold. "
    "Save the float model with external data and start from that."
)


def link_data(message: Any, source: Path | None, folder: Path) -> None:
    """Puts links to (or copies of) the files of external data that `message` needs from folder `source` into `folder`.

    Raises:
        ModelError: A file is missing, or out of the model's folder.
        UsageError: Another file is in its place.
        OSError: `folder` cannot be written.
    """
    linked: set[str] = set()
    for tensor in external_tensors(message):
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        if location in linked:
            continue
        linked.add(location)
        origin, target = external_path(tensor, source), folder / location
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
            shutil.copyfile(origin, target)


def external_tensors(message: Any) -> Iterator[Any]:
    """The tensors of a ModelProto whose data is in other files, wherever they are."""
    todo: list[Any] = [message.graph, *message.functions]
    while todo:
        graph = todo.pop()
        if isinstance(graph, GraphProto):
            tensors = [*graph.initializer]
            tensors += [part for sparse in graph.sparse_initializer for part in (sparse.values, sparse.indices)]
            yield from (tensor for tensor in tensors if is_external(tensor))
        for node in graph.node:
            for attr in node.attribute:
                todo += [attr.g] if attr.HasField("g") else []
                todo += attr.graphs
                held = [attr.t, *attr.tensors] if attr.HasField("t") else attr.tensors
                yield from (tensor for tensor in held if is_external(tensor))
