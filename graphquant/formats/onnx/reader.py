"""ONNX files to models.

Constants computed by ops get their values from onnx's reference implementation, one op at a time.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import warnings
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError
from onnx import ModelProto, NodeProto, TensorProto, parser, serialization

from graphquant.errors import ModelError
from graphquant.formats.onnx.external_data import message_tensors
from graphquant.formats.onnx.fused_ops import lift_fused_ops
from graphquant.formats.onnx.index import GraphIndexer, OnnxSource, clear_metadata, read_metadata
from graphquant.formats.onnx.shape_inference import evaluate_node
from graphquant.formats.onnx.tensors import (
    DEFAULT_DOMAINS,
    external_location,
    external_path,
    first_line,
    is_external,
    write_node,
)
from graphquant.ir import Model, Op, paused_gc
from graphquant.quantize import RECORD_KEY, restore_source

if TYPE_CHECKING:
    from graphquant.numerics import Array


MAX_OPSET = (1 << 31) - 1  # maximum that onnx's functions accept
MAX_MESSAGE_BYTES = (1 << 31) - 1  # maximum size of a protocol buffer
MAX_BRACKET_DEPTH = 1000  # maximum nesting depth of brackets in onnx's text form
_BRACKETS = re.compile(rb"[{}()<>\[\]]")

_PARSE_ERRORS = (
    DecodeError,
    text_format.ParseError,
    json_format.ParseError,
    parser.ParseError,
    LookupError,  # the parser of the text form raises the exceptions of C++ for malformed numbers
    RuntimeError,
    ValueError,
)


def load(path: Path, *, allow_links: bool = False, lift: bool = True) -> Model:
    """Read the model at `path`: `.onnx`, `.onnxtxt`, `.textproto` or `.json`; external data is read lazily.

    With `allow_links`, external data may be links out of the folder of the model. Without `lift`, fused ops stay as
    they are in the file. Raises a ModelError if the file is not a valid ONNX model.
    """
    try:
        if serialization_form(path) == "protobuf" and path.stat().st_size > MAX_MESSAGE_BYTES:
            raise ModelError(
                f"{path} is over 2 GB, more than a protocol buffer can hold. Save the model with external data."
            )
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}. Give the path of an ONNX model.") from error
    try:
        digest, message = hashlib.sha256(data).hexdigest(), parse_message(data, path)
        del data  # it may contain all weights
        folder = _resolve_links(message, path.parent) if allow_links else path.parent
        return model_from_message(message, path=path, digest=digest, folder=folder, lift=lift)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def from_onnx(message: Any) -> Model:
    """Read the model of a ModelProto in memory, which is copied. Raises a ModelError if it is not a complete model."""
    for tensor in filter(is_external, message_tensors(message)):
        external_path(tensor, None)  # raises the error: a message does not name its folder
    copied = deepcopy(message)
    try:
        return model_from_message(copied)
    except (EncodeError, ValueError) as error:
        raise ModelError(
            f"The ModelProto cannot be serialized: {first_line(error)}. Save it with external data and give its path."
        ) from error


def parse_message(data: bytes, path: Path) -> Any:
    """Parse `data` as a ModelProto in the form of the suffix of `path`; raise ModelError if that fails."""
    if not data:
        raise ModelError("The file is empty. Export or copy the model again.")
    form = serialization_form(path)
    if form == "onnxtxt" and _bracket_depth(data) > MAX_BRACKET_DEPTH:
        raise ModelError(
            f"Its brackets are nested more than {MAX_BRACKET_DEPTH} levels deep. Write the model as .onnx."
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # onnx warns that its text form is experimental
            message = serialization.registry.get(form).deserialize_proto(data, ModelProto())
    except _PARSE_ERRORS as error:
        raise ModelError(
            f"This is not an ONNX model in {form} form ({first_line(error)}). Export or copy the model again."
        ) from error
    require_valid_text(message)
    return message


def require_valid_text(message: Any) -> None:
    """Raise ModelError if a string in a message of ONNX is not UTF-8; protobuf returns such strings as bytes."""
    children: list[Any] = []
    if isinstance(message, TensorProto):  # listing its fields would copy its data
        strings, children = [message.name, message.doc_string], [*message.external_data, *message.metadata_props]
    else:
        fields = [(field, value) for field, value in message.ListFields() if field.type in _TEXT_FIELDS]
        values = [element for _, value in fields for element in (value if hasattr(value, "extend") else (value,))]
        strings = [value for value in values if not hasattr(value, "ListFields")]
        children = [value for value in values if hasattr(value, "ListFields")]
    invalid = next((value for value in strings if isinstance(value, bytes)), None)
    if invalid is not None:
        name = getattr(message, "name", "")
        raise ModelError(
            f"The string {invalid[:60]!r} of the {message.DESCRIPTOR.name}{f' {name!r}' if name else ''} is not valid"
            " UTF-8. The file is damaged: export or copy the model again."
        )
    for child in children:
        require_valid_text(child)


_TEXT_FIELDS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE)


def serialization_form(path: Path) -> str:
    """Return the serialization form that a suffix names."""
    return serialization.registry.get_format_from_file_extension(path.suffix) or "protobuf"


def _bracket_depth(data: bytes) -> int:
    """Return the maximum nesting depth of brackets in a text; onnx's parser recurses into them without a limit."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(data):
        depth = depth + 1 if bracket in b"{(<[" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest


def _resolve_links(message: Any, folder: Path) -> Path:
    """Name the targets of links in the locations of external data; return the folder that the locations start from.

    onnxruntime refuses links out of that folder, so none of them may remain.
    """
    targets = {
        external_location(tensor): external_path(tensor, folder, allow_links=True).resolve()
        for tensor in message_tensors(message)
        if is_external(tensor)
    }
    if all(target.is_relative_to(folder.resolve()) for target in targets.values()):
        return folder
    root = Path(os.path.commonpath([target.parent for target in targets.values()]))
    for tensor in filter(is_external, message_tensors(message)):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = targets[external_location(tensor)].relative_to(root).as_posix()
                break
    return root


def model_from_message(
    message: Any, *, path: Path | None = None, digest: str = "", folder: Path | None = None, lift: bool = True
) -> Model:
    """Return the model of a ModelProto, which must not be changed afterwards; `folder` has its external data.

    With `lift`, standard ops replace fused ones with constant weights.

    Raises a ModelError if the message has no graph, or its content is inconsistent.
    """
    if not message.HasField("graph"):
        raise ModelError("The model has no graph. Export or copy the model again.")
    opset = next((entry.version for entry in message.opset_import if entry.domain in DEFAULT_DOMAINS), 0)
    if not 0 <= opset <= MAX_OPSET:
        raise ModelError(f"The model has opset {opset}, which does not exist. Export or copy the model again.")

    def evaluate_op(op: Op, inputs: list[Array]) -> list[Array] | None:
        node = op.source
        if node is None:  # an op of a preparation step
            node = NodeProto()
            write_node(node, op, [f"i{slot}" for slot in range(len(inputs))], [output.name for output in op.outputs])
        return evaluate_node(message.opset_import, node, inputs) if isinstance(node, NodeProto) else None

    source = OnnxSource(message=message, graphs={}, folder=folder, evaluate_op=evaluate_op)
    model = Model(format="onnx", source=source, path=path, opset=opset)
    model.digest = digest or hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()
    with paused_gc():
        GraphIndexer(model, source).run()
        if lift:
            source.lifted.update(lift_fused_ops(model))
    return model


def restore_original(model: Model) -> tuple[Model, bool] | None:
    """Restore the model that the provenance record describes; see `FormatModule`.

    Raises a ModelError if the record is damaged, or weights were changed.
    """
    if (text := read_metadata(model).get(RECORD_KEY)) is None:
        return None
    clean_message = deepcopy(model.source.message)
    clear_metadata(clean_message)
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ModelError(
            f"The record in the model is not valid base64 ({error}). Start from the float model."
        ) from error
    message, unchanged = restore_source(data, clean_message)
    require_valid_text(message)
    return model_from_message(message, path=model.path, folder=model.source.folder), unchanged
