"""What a path holds: a GraphDef, a MetaGraphDef or a SavedModel, binary or text, told apart by content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import ModelError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.checkpoint import Checkpoint
from graphquant.formats.tensorflow.object_graph import resolve_variables

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.formats.tensorflow.from_tensorflow import LiveObject


SAVED_MODEL_FILES: Final = ("saved_model.pb", "saved_model.pbtxt")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlowSource:
    """A model as its file has it.

    Attributes:
        message: A GraphDef, MetaGraphDef or SavedModel.
        index: Which of a SavedModel's meta graphs is the model; 0 for the others.
        text: Whether the file is in text format.
        file: The file that was read.
        folder: A SavedModel's folder, None for the others.
        digest: Hex SHA-256 of the file.
        live_object: The object in memory that stands in the place of the file, None where there is a file.
        temp_folder: The temporary folder that holds the files, which goes when nobody needs the model any more.
    """

    message: Any
    index: int
    text: bool
    file: Path
    folder: Path | None
    digest: str
    live_object: LiveObject | None = None
    temp_folder: Any = None

    @property
    def message_type(self) -> str:
        """The message's type: "GraphDef", "MetaGraphDef" or "SavedModel"."""
        return str(self.message.DESCRIPTOR.name)

    def meta_graph(self, message: Any) -> Any:
        """The MetaGraphDef in `message`, which is of this source's form; None for a GraphDef."""
        if self.message_type == "SavedModel":
            return message.meta_graphs[self.index]
        return message if self.message_type == "MetaGraphDef" else None

    def graph_def(self, message: Any) -> Any:
        """The GraphDef in `message`, which is of this source's form."""
        return message if self.message_type == "GraphDef" else self.meta_graph(message).graph_def

    def checkpoint_prefix(self) -> Path | None:
        """The path prefix of the model's checkpoint, None if there is none."""
        if self.message_type == "GraphDef" or self.live_object is not None:
            return None
        prefix = self.folder / "variables" / "variables" if self.folder is not None else self.file.with_suffix("")
        return prefix if prefix.with_name(prefix.name + ".index").is_file() else None

    def checkpoint(self) -> tuple[Checkpoint, dict[str, str]] | None:
        """The model's checkpoint and its keys by node or shared name of a variable, None if there is none."""
        prefix = self.checkpoint_prefix()
        if prefix is None:
            return None
        checkpoint = Checkpoint.open(prefix)
        holder = self.message if self.message_type == "SavedModel" else _MetaGraphHolder((self.message,))
        return checkpoint, resolve_variables(holder, checkpoint)


@dataclass(frozen=True, slots=True)
class _MetaGraphHolder:
    """Stands for a SavedModel of these meta graphs."""

    meta_graphs: tuple[Any, ...]


def read_source(path: Path) -> TensorFlowSource:
    """Reads the model at `path`.

    Raises:
        ModelError: There is none, or it is damaged.
    """
    file = _model_file(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}.") from error
    if not data:
        raise ModelError(f"{file} is empty. It holds no TensorFlow model.")
    text = _looks_like_text(data)
    message = _parse_text_model(data, file) if text else _parse_binary_model(data, file)
    folder = file.parent if message.DESCRIPTOR.name == "SavedModel" else None
    index = _serving_index(message.meta_graphs) if folder is not None else 0
    return TensorFlowSource(
        message=message, index=index, text=text, file=file, folder=folder, digest=hashlib.sha256(data).hexdigest()
    )


def _model_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in SAVED_MODEL_FILES:
        if (path / name).is_file():
            return path / name
    raise ModelError(f"{path} is a folder without saved_model.pb. Give a SavedModel's folder or a model file.")


def _serving_index(meta_graphs: Any) -> int:
    """The meta graph tagged `serve` (with the fewest other tags), else the first."""
    tagged = [index for index, meta in enumerate(meta_graphs) if "serve" in meta.meta_info_def.tags]
    return min(tagged, key=lambda index: (len(meta_graphs[index].meta_info_def.tags), index), default=0)


def _looks_like_text(data: bytes) -> bool:
    """Text format has no control characters; a binary message starts with a tag and a length, and holds some soon."""
    return not any(byte < 9 or 13 < byte < 32 for byte in data[:4096])  # noqa: PLR2004  # all but white space


def _parse_text_model(data: bytes, file: Path) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is neither a TensorFlow model in binary form nor text. It may be damaged.") from error
    candidates = (proto.GraphDef, proto.MetaGraphDef, proto.SavedModel)
    errors = []
    for message_class in candidates:
        message = message_class()
        try:
            proto.parse_text(text, message, source=str(file))
        except ModelError as error:
            errors.append(error)
            continue
        if _has_nodes(message):
            return message
    if not errors:
        raise ModelError(f"{file} holds no graph. It is no TensorFlow model.")
    # The parser that got furthest knows best what is wrong.
    raise max(errors, key=_error_line)


def _error_line(error: ModelError) -> int:
    words = str(error).replace(":", " ").split()
    return next((int(word) for word in words if word.isdigit()), 0)


def _parse_binary_model(data: bytes, file: Path) -> Any:
    # A field number means another thing in each message, so a file may parse as several: contents decide.
    for message_class in (proto.SavedModel, proto.MetaGraphDef, proto.GraphDef):
        message = message_class()
        try:
            proto.parse_binary(data, message, source=str(file))
        except ModelError:
            continue
        if _has_nodes(message):
            return message
    raise ModelError(
        f"{file} is no TensorFlow model: neither GraphDef nor MetaGraphDef nor SavedModel. It may be damaged."
    )


def _has_nodes(message: Any) -> bool:
    """Whether `message` holds what its type is for: nodes, each with a name and an operation."""
    message_type = message.DESCRIPTOR.name
    meta_graphs = message.meta_graphs if message_type == "SavedModel" else (message,)
    graphs = [message] if message_type == "GraphDef" else [meta.graph_def for meta in meta_graphs]
    nodes = [node for graph in graphs for node in graph.node]
    return bool(nodes) and all(node.name and node.op for node in nodes)
