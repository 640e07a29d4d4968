"""ONNX files to models."""

from __future__ import annotations

import hashlib
import re
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError
from onnx import ModelProto, parser, serialization

from graphquant.errors import ModelError
from graphquant.formats.onnx.evaluate import evaluate
from graphquant.formats.onnx.index import Indexer
from graphquant.formats.onnx.source import Source
from graphquant.formats.onnx.tensors import first_line
from graphquant.ir import Model, bulk

if TYPE_CHECKING:
    from pathlib import Path

MAX_MESSAGE = (1 << 31) - 1
"""Bytes that a protocol buffer may have."""

MAX_DEPTH = 1000
"""Brackets in brackets that onnx's textual form may have."""

_BRACKETS = re.compile(rb"[{}()<>\[\]]")

_UNREADABLE = (
    DecodeError,
    text_format.ParseError,
    json_format.ParseError,
    parser.ParseError,
    ValueError,
    RecursionError,
)


def load(path: Path) -> Model:
    """Reads the model at `path`; its suffix says which form it has.

    Raises:
        ModelError: The file is no ONNX model, or what it holds does not fit together.
    """
    try:
        if _form(path) == "protobuf" and path.stat().st_size > MAX_MESSAGE:
            raise ModelError(
                f"{path} is over 2 GB, more than a protocol buffer can hold. Save the model with external data."
            )
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}. Give the path of an ONNX model.") from error
    try:
        digest, message = hashlib.sha256(data).hexdigest(), parse(data, path)
        del data  # all weights may be in it
        return index(message, path=path, digest=digest)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def parse(data: bytes, path: Path) -> Any:
    """The ModelProto in `data`, in the form that the suffix of `path` names.

    Raises:
        ModelError: It is none.
    """
    if not data:
        raise ModelError("The file is empty. Export or copy the model again.")
    form = _form(path)
    if form == "onnxtxt" and _depth(data) > MAX_DEPTH:
        raise ModelError(f"Its brackets nest over {MAX_DEPTH} deep, more than can be read. Write the model as .onnx.")
    try:
        with warnings.catch_warnings(action="ignore"):  # onnx calls its text form experimental
            return serialization.registry.get(form).deserialize_proto(data, ModelProto())
    except _UNREADABLE as error:
        raise ModelError(
            f"This is no ONNX model in {form} form ({first_line(error)}). Export or copy the model again."
        ) from error


def _form(path: Path) -> str:
    """The form that a suffix names."""
    return serialization.registry.get_format_from_file_extension(path.suffix) or "protobuf"


def _depth(data: bytes) -> int:
    """How deep the brackets of a text nest at most; onnx's parser recurses into them without a limit."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(data):
        depth = depth + 1 if bracket in b"{(<[" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest


def index(message: Any, *, path: Path | None = None, digest: str = "") -> Model:
    """The model of a ModelProto, which must not be changed afterwards.

    Raises:
        ModelError: The message has no graph, or what it holds does not fit together.
    """
    if not message.HasField("graph"):
        raise ModelError("The model has no graph. Export or copy the model again.")
    opset = next((entry.version for entry in message.opset_import if entry.domain in {"", "ai.onnx"}), 0)
    source = Source(message=message, graphs={}, folder=path.parent if path else None)
    model = Model(format="onnx", source=source, path=path, opset=opset)
    model.digest = digest or hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()
    model.evaluate = partial(evaluate, message.opset_import)
    try:
        with bulk():
            Indexer(model, source).run()
    except UnicodeDecodeError as error:
        raise ModelError(
            f"A name in the model is no UTF-8 text ({error}). The file is damaged: copy it again."
        ) from error
    return model
