"""What a path holds: a GraphDef, a MetaGraphDef or a SavedModel, binary or text, told apart by content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import ModelError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.checkpoint import Checkpoint
from graphquant.formats.tensorflow.variables import resolve_variables

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.formats.tensorflow.live import Live

__all__ = ["Source", "read"]

SAVED_MODEL_FILES: Final = ("saved_model.pb", "saved_model.pbtxt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model as its file has it.

    Attributes:
        message: A GraphDef, MetaGraphDef or SavedModel.
        index: Which of a SavedModel's meta graphs is the model; 0 for the others.
        text: Whether the file is in text format.
        file: The file that was read.
        folder: A SavedModel's folder, None for the others.
        digest: Hex SHA-256 of the file.
        live: The object in memory that stands in the place of the file, None where there is a file.
        room: The temporary folder that holds the files, which goes when nobody needs the model any more.
    """

    message: Any
    index: int
    text: bool
    file: Path
    folder: Path | None
    digest: str
    live: Live | None = None
    room: Any = None

    @property
    def form(self) -> str:
        """The message's type: "GraphDef", "MetaGraphDef" or "SavedModel"."""
        return str(self.message.DESCRIPTOR.name)

    def meta_graph(self, message: Any) -> Any:
        """The MetaGraphDef in `message`, which is of this source's form; None for a GraphDef."""
        if self.form == "SavedModel":
            return message.meta_graphs[self.index]
        return message if self.form == "MetaGraphDef" else None

    def graph_def(self, message: Any) -> Any:
        """The GraphDef in `message`, which is of this source's form."""
        return message if self.form == "GraphDef" else self.meta_graph(message).graph_def

    def prefix(self) -> Path | None:
        """The path prefix of the model's checkpoint, None if there is none."""
        if self.form == "GraphDef" or self.live is not None:
            return None
        prefix = self.folder / "variables" / "variables" if self.folder is not None else self.file.with_suffix("")
        return prefix if prefix.with_name(prefix.name + ".index").is_file() else None

    def checkpoint(self) -> tuple[Checkpoint, dict[str, str]] | None:
        """The model's checkpoint and its keys by node or shared name of a variable, None if there is none."""
        prefix = self.prefix()
        if prefix is None:
            return None
        checkpoint = Checkpoint.open(prefix)
        holder = self.message if self.form == "SavedModel" else _Holder((self.message,))
        return checkpoint, resolve_variables(holder, checkpoint)


@dataclass(frozen=True, slots=True)
class _Holder:
    """Stands for a SavedModel of these meta graphs."""

    meta_graphs: tuple[Any, ...]


def read(path: Path) -> Source:
    """Reads the model at `path`.

    Raises:
        ModelError: There is none, or it is damaged.
    """
    file = _file(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}.") from error
    if not data:
        raise ModelError(f"{file} is empty. It holds no TensorFlow model.")
    text = _is_text(data)
    message = _parse_text(data, file) if text else _parse_binary(data, file)
    folder = file.parent if message.DESCRIPTOR.name == "SavedModel" else None
    index = _serving(message.meta_graphs) if folder is not None else 0
    return Source(
        message=message, index=index, text=text, file=file, folder=folder, digest=hashlib.sha256(data).hexdigest()
    )


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in SAVED_MODEL_FILES:
        if (path / name).is_file():
            return path / name
    raise ModelError(f"{path} is a folder without saved_model.pb. Give a SavedModel's folder or a model file.")


def _serving(meta_graphs: Any) -> int:
    """The meta graph tagged `serve` (with the fewest other tags), else the first."""
    tagged = [index for index, meta in enumerate(meta_graphs) if "serve" in meta.meta_info_def.tags]
    return min(tagged, key=lambda index: (len(meta_graphs[index].meta_info_def.tags), index), default=0)


def _is_text(data: bytes) -> bool:
    """Text format has no control characters; a binary message starts with a tag and a length, and holds some soon."""
    return not any(byte < 9 or 13 < byte < 32 for byte in data[:4096])  # noqa: PLR2004  # all but white space


def _parse_text(data: bytes, file: Path) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is neither a TensorFlow model in binary form nor text. It may be damaged.") from error
    candidates = (proto.GraphDef, proto.MetaGraphDef, proto.SavedModel)
    errors = []
    for kind in candidates:
        message = kind()
        try:
            proto.parse_text(text, message, source=str(file))
        except ModelError as error:
            errors.append(error)
            continue
        if _fits(message):
            return message
    if not errors:
        raise ModelError(f"{file} holds no graph. It is no TensorFlow model.")
    # The parser that got furthest knows best what is wrong.
    raise max(errors, key=_line)


def _line(error: ModelError) -> int:
    words = str(error).replace(":", " ").split()
    return next((int(word) for word in words if word.isdigit()), 0)


def _parse_binary(data: bytes, file: Path) -> Any:
    # A field number means another thing in each message, so a file may parse as several: contents decide.
    for kind in (proto.SavedModel, proto.MetaGraphDef, proto.GraphDef):
        message = kind()
        try:
            proto.parse_binary(data, message, source=str(file))
        except ModelError:
            continue
        if _fits(message):
            return message
    raise ModelError(
        f"{file} is no TensorFlow model: neither GraphDef nor MetaGraphDef nor SavedModel. It may be damaged."
    )


def _fits(message: Any) -> bool:
    """Whether `message` holds what its type is for: nodes, each with a name and an operation."""
    form = message.DESCRIPTOR.name
    metas = message.meta_graphs if form == "SavedModel" else (message,)
    graphs = [message] if form == "GraphDef" else [meta.graph_def for meta in metas]
    nodes = [node for graph in graphs for node in graph.node]
    return bool(nodes) and all(node.name and node.op for node in nodes)
