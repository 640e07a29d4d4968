"""Models to files: atomic, with links to external data in another folder, and with a weights file for large models."""

from __future__ import annotations

import filecmp
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from google.protobuf.message import EncodeError
from onnx import ModelProto, printer, serialization

from graphquant.errors import ModelError, UsageError
from graphquant.formats.onnx.emitter import Emission, emit_message
from graphquant.formats.onnx.external_data import (
    constant_bytes,
    fill_deferred_weights,
    message_tensors,
    missing_weight_bytes,
    write_external_weights,
)
from graphquant.formats.onnx.index import write_onnx_metadata
from graphquant.formats.onnx.reader import MAX_MESSAGE_BYTES, parse_message, serialization_form
from graphquant.formats.onnx.tensors import external_location, external_path, is_external, tensor_value
from graphquant.formats.weights_files import open_weights_file, replacing_model, weights_path
from graphquant.ir import Model, Op, paused_gc
from graphquant.utils import Progress, stage_progress
from graphquant.utils.atomic_files import atomic_file

EXTERNALIZE_BYTES = 1 << 28
"""Size of new weights from which they are written to a weights file, if the source has external data."""


@paused_gc()
def save(model: Model, path: Path, progress: Progress | None = None, emission: Emission | None = None) -> None:
    """Emit the model and write it to `path` atomically. In another folder, external data is linked or copied.

    An `emission` of the model, with its message as bytes, is written without emitting the model again.
    All large weights go to one file, `NAME.onnx.DIGEST.data`, if the message would exceed 2 GB, or if the source has
    external data and there are many new weights. That file is complete before the model is written, and the weights
    file of a replaced model is deleted. Any model that is at `path` meanwhile still has its own weights file. Raises a
    ModelError if a change cannot be expressed in ONNX, a weight cannot be read, or a text form would exceed 2 GB.
    Raises a UsageError if `path` cannot be written.
    """
    if emission is None:
        emission = emit_message(model, defer_weights=True)
    else:
        known = replace(emission.model, provenance=model.provenance, original_model=model.original_model)
        emission = emission._replace(message=ModelProto.FromString(emission.message), model=known)
    message, folder = emission.message, model.source.folder
    external = serialization_form(path) == "protobuf" and _needs_external_weights(model, emission)
    if not external:
        fill_deferred_weights(message, emission.deferred)
    write_onnx_metadata(message, emission.model, record=not external)
    try:
        with replacing_model(path, external_weights=external):
            if not external:
                data = serialize_message(message, path)
                link_external_data(message, folder, path)
                with atomic_file(path) as file:
                    file.write(data)
                return
            # Leaving this context moves the weights into place before the model.
            with atomic_file(path) as file, open_weights_file(path) as writer:
                for location_entry in write_external_weights(
                    message, emission.deferred, folder, writer, stage_progress(progress, "writing weights, MB")
                ):
                    location_entry.value = weights_path(path, writer.digest).name
                file.write(message_bytes(message))
                file.flush()  # a full disk raises here, before any file is replaced
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}. Give another output path.") from error


def _needs_external_weights(model: Model, emission: Emission) -> bool:
    """Return True if weights must go to a weights file.

    That is the case if the message could not hold them, or if many are new and the source has external data.
    """
    try:
        if missing_weight_bytes(emission.message, emission.deferred) + emission.message.ByteSize() > MAX_MESSAGE_BYTES:
            return True
    except (EncodeError, ValueError):
        return True
    has_external_data = any(True for _ in external_tensors(model.source.message))
    new_bytes = sum(constant_bytes(op) for op in emission.deferred if isinstance(op, Op))
    return new_bytes > EXTERNALIZE_BYTES and has_external_data


def serialize_message(message: Any, path: Path) -> bytes:
    """Return a ModelProto in the form of the suffix of `path`; raise ModelError if that form cannot hold it."""
    form = serialization_form(path)
    if form == "protobuf":
        return message_bytes(message)
    with warnings.catch_warnings(action="ignore"):  # onnx warns that its text form is experimental
        data: bytes = serialization.registry.get(form).serialize_proto(message)
    if form == "onnxtxt":
        reparsed = parse_message(data, path)
        pairs = zip(message.graph.initializer, reparsed.graph.initializer, strict=True)
        if printer.to_text(reparsed).encode() != data or not all(
            old.name == new.name and np.array_equal(tensor_value(old, None), tensor_value(new, None))
            for old, new in pairs
            if not is_external(old)
        ):
            raise ModelError(
                f"onnx's text form loses parts of this model. Write {path.stem}.onnx or {path.stem}.textproto instead."
            )
    return data


def message_bytes(message: Any) -> bytes:
    """Return the deterministic binary form of a ModelProto; raise ModelError if it exceeds 2 GB."""
    try:
        data: bytes = message.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ModelError(_TOO_LARGE) from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise ModelError(_TOO_LARGE)
    return data


_TOO_LARGE = (
    "The model is over 2 GB, more than a protocol buffer can hold. "
    "Save the float model with external data and start from that."
)


def link_external_data(message: Any, source: Path | None, path: Path) -> None:
    """Link or copy the files of external data that `message` needs from folder `source` to the folder of `path`.

    Each file is complete or absent, and is there before the model, as nothing else reads it. Raises a ModelError if a
    file is missing, or outside the model's folder, a UsageError if another file has its name, and an OSError if the
    files cannot be written.
    """
    tensors: dict[str, Any] = {}
    for tensor in external_tensors(message):
        tensors.setdefault(external_location(tensor), tensor)
    for location, tensor in tensors.items():
        source_file, target = external_path(tensor, source), path.parent / location
        if target.exists():
            if not target.samefile(source_file) and not filecmp.cmp(source_file, target, shallow=False):
                raise UsageError(f"{target} already exists and contains other data. Write to another folder.")
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:  # a hard link costs neither time nor space
            os.link(source_file.resolve(), target)
        except OSError:  # another file system, or one without hard links
            temporary = target.with_name(f"{path.name}.data")
            with source_file.open("rb") as file, atomic_file(temporary, partial(Path, target)) as copy:
                shutil.copyfileobj(file, copy)


def external_tensors(message: Any) -> Iterator[Any]:
    """Return the tensors of a ModelProto whose data is in other files."""
    return filter(is_external, message_tensors(message))


def external_data_files(path: Path, *, allow_links: bool = False) -> tuple[Path, ...]:
    """Return the files of external data of the model at `path`, sorted; raise ModelError if one is missing."""
    message = parse_message(path.read_bytes(), path)
    tensors = external_tensors(message)
    return tuple(sorted({external_path(tensor, path.parent, allow_links=allow_links) for tensor in tensors}))


def external_data_names(path: Path) -> tuple[str, ...]:
    """Return the locations of external data that the model at `path` declares inside its folder, sorted."""
    locations = map(external_location, external_tensors(parse_message(path.read_bytes(), path)))
    relative_paths = {PurePosixPath(name) for name in locations if name and "\0" not in name}
    return tuple(sorted(str(name) for name in relative_paths if not name.is_absolute() and ".." not in name.parts))
