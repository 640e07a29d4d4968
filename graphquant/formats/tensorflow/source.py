"""Read a GraphDef, a MetaGraphDef or a SavedModel, binary or text; the content decides which."""

from __future__ import annotations

import glob
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from graphquant.errors import ModelError
from graphquant.formats import refuse_outside_links, walk_saved_model
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.checkpoint import Checkpoint
from graphquant.formats.tensorflow.object_graph import CheckpointVariables, resolve_variables
from graphquant.formats.tensorflow.signatures import choose_meta_graph
from graphquant.formats.tensorflow.values import evaluate_tf_op
from graphquant.quantize import RECORD_KEY, make_record

if TYPE_CHECKING:
    from graphquant.ir import Model
    from graphquant.numerics import Array

SAVED_MODEL_FILES: Final = ("saved_model.pb", "saved_model.pbtxt")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveObject:
    """The TensorFlow object that a model was read from."""

    instance: Any = field(repr=False)  # the object: a tf.Graph, a session or a ConcreteFunction
    description: str  # its description in messages
    values: Mapping[str, Callable[[], Array]]  # readers of the variables' present values, by the node of the variable
    # The tensors that a session fetches for these values.
    value_tensors: Mapping[str, Any] = field(default_factory=dict, repr=False)
    variables: tuple[Any, ...] = ()  # the captured variables of a function, referenced so that they stay alive
    # The argument of a capture that is neither variable nor value, such as a table; "" for none.
    foreign_capture: str = ""

    def current_values(self) -> dict[str, Array]:
        """Return the present values of all initialized variables; raise ModelError if the session is closed."""
        if not self.value_tensors:
            return {name: value() for name, value in self.values.items()}
        try:
            values = fetch_from_session(self.instance, list(self.value_tensors.values()))
        except sys.modules["tensorflow"].errors.FailedPreconditionError:  # a variable has no value
            initialized: dict[str, Array] = {}
            for name, value in self.values.items():
                with suppress(ModelError):
                    initialized[name] = value()
            return initialized
        return dict(zip(self.value_tensors, values, strict=True))


def fetch_from_session(session: Any, tensors: list[Any]) -> list[Array]:
    """Return the values of tensors in a session; raise ModelError if it is closed."""
    try:
        return [np.asarray(value) for value in session.run(tensors)]
    except RuntimeError as error:
        raise ModelError("The session is closed, so its variables have no values. Give an open session.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSignature:
    """A signature of a frozen graph."""

    name: str
    inputs: Mapping[str, str]  # the ops of the inputs by key
    outputs: Mapping[str, str]  # the tensors of the outputs by key
    source_inputs: Mapping[str, str] = field(default_factory=dict)  # the ops of the inputs before freezing, by key


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlowSource:
    """The message, file and kind of a loaded model."""

    message: Any  # a GraphDef, MetaGraphDef or SavedModel
    file: Path  # the loaded file
    digest: str  # hex SHA-256 of the file
    index: int = 0  # the index of the model among a SavedModel's meta graphs; 0 for other messages
    text: bool = False  # True if the file is in text format
    folder: Path | None = None  # a SavedModel's folder, None for other messages
    live_object: LiveObject | None = None  # the object in memory that the model was read from, None for a file
    temp_folder: Any = None  # the temporary folder of the files, deleted with the last reference to the model
    allow_links: bool = False  # True if files may be links out of the folder of the model
    signatures: tuple[FrozenSignature, ...] = ()  # the signatures from which a GraphDef was frozen
    selected_signatures: tuple[str, ...] = ()  # the signatures that run; empty for the default ones
    separate_inputs: bool = False  # True if each signature has data of its own

    evaluate_op = staticmethod(evaluate_tf_op)

    @property
    def message_type(self) -> str:
        """The message's type: "GraphDef", "MetaGraphDef" or "SavedModel"."""
        return str(self.message.DESCRIPTOR.name)

    def meta_graph(self, message: Any) -> Any:
        """Return the MetaGraphDef in `message`, which has this source's type; None for a GraphDef."""
        if self.message_type == "SavedModel":
            return message.meta_graphs[self.index]
        return message if self.message_type == "MetaGraphDef" else None

    def graph_def(self, message: Any) -> Any:
        """Return the GraphDef in `message`, which has this source's type."""
        return message if self.message_type == "GraphDef" else self.meta_graph(message).graph_def

    def checkpoint_prefix(self) -> Path | None:
        """Return the path prefix of the model's checkpoint, None if there is none."""
        if self.message_type == "GraphDef" or self.live_object is not None:
            return None
        prefix = self.folder / "variables" / "variables" if self.folder is not None else self.file.with_suffix("")
        return prefix if prefix.with_name(prefix.name + ".index").is_file() else None

    def require_links_inside(self) -> None:
        """Raise ModelError if a file of the model is a link out of its folder, unless this is allowed."""
        if not self.allow_links and self.folder is not None:
            refuse_outside_links(self.folder, walk_saved_model(self.folder))
        elif not self.allow_links and self.message_type == "MetaGraphDef":
            refuse_outside_links(self.file.parent, self.file.parent.glob(f"{glob.escape(self.file.stem)}.*"))

    def checkpoint(self) -> CheckpointVariables:
        """Return the checkpoint and its keys by node name or shared name; no keys if there is none."""
        if (prefix := self.checkpoint_prefix()) is None:
            return CheckpointVariables(None, {})
        checkpoint = Checkpoint(prefix)
        meta_graphs = self.message.meta_graphs if self.message_type == "SavedModel" else [self.message]
        return CheckpointVariables(checkpoint, resolve_variables(meta_graphs, checkpoint))


def read_source(path: Path, *, allow_links: bool = False, tags: Sequence[str] = ()) -> TensorFlowSource:
    """Read the model at `path`; with `allow_links`, files may be links out of its folder.

    `tags` are those of the MetaGraph of a SavedModel. Raises a UsageError if there is none with these tags.
    """
    file = path
    if path.is_dir():
        existing = [path / name for name in SAVED_MODEL_FILES if (path / name).is_file()]
        if not existing:
            raise ModelError(f"{path} is a folder without saved_model.pb. Give a SavedModel's folder or a model file.")
        file = existing[0]
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}.") from error
    if not data:
        raise ModelError(f"{file} is empty. It is not a TensorFlow model.")
    # Text has no control characters but white space. Binary messages soon contain some.
    text = not any(byte < 9 or 13 < byte < 32 for byte in data[:4096])  # noqa: PLR2004
    message = _parse_text_model(data, file) if text else _parse_binary_model(data, file)
    folder = file.parent if message.DESCRIPTOR.name == "SavedModel" else None
    index = choose_meta_graph([] if folder is None else message.meta_graphs, tags, path)
    digest = hashlib.sha256(data).hexdigest()
    source = TensorFlowSource(
        message=message, file=file, digest=digest, index=index, text=text, folder=folder, allow_links=allow_links
    )
    source.require_links_inside()
    return source


def _parse_text_model(data: bytes, file: Path) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is neither a TensorFlow model in binary form nor text. It may be damaged.") from error
    errors = []
    for message_class in (proto.GraphDef, proto.MetaGraphDef, proto.SavedModel):
        try:
            message = proto.parse_text(text, message_class(), source=str(file))
        except ModelError as error:
            errors.append(error)
            continue
        if _has_nodes(message):
            return message
    if not errors:
        raise ModelError(f"{file} contains no graph. It is not a TensorFlow model.")
    # The parser that got furthest has the most useful error.
    raise max(errors, key=_error_line)


def _error_line(error: ModelError) -> int:
    words = str(error).replace(":", " ").split()
    return next((int(word) for word in words if word.isdigit()), 0)


def _parse_binary_model(data: bytes, file: Path) -> Any:
    # Field numbers mean different fields in each message, so a file may parse as several: the content decides.
    for message_class in (proto.SavedModel, proto.MetaGraphDef, proto.GraphDef):
        try:
            message = proto.parse_binary(data, message_class(), source=str(file))
        except ModelError:
            continue
        if _has_nodes(message):
            return message
    raise ModelError(
        f"{file} is not a TensorFlow model: neither GraphDef nor MetaGraphDef nor SavedModel. It may be damaged."
    )


def _has_nodes(message: Any) -> bool:
    """Return True if `message` has nodes, each with a name and an operation."""
    meta_graphs = message.meta_graphs if isinstance(message, proto.SavedModel) else [message]
    graphs = [message] if isinstance(message, proto.GraphDef) else [meta.graph_def for meta in meta_graphs]
    nodes = [node for graph in graphs for node in graph.node]
    return bool(nodes) and all(node.name and node.op for node in nodes)


RULE_ATTR: Final = "_graphquant_rule"  # the attribute of an inserted node that names its rule
ANCHOR_ATTR: Final = "_graphquant_anchor"  # the attribute of an inserted node that names the tensor it was inserted for
_METADATA_PREFIX: Final = "_graphquant_model_"  # the prefix of attributes with metadata of the whole model


def write_metadata(message: Any, model: Model) -> None:
    """Write the metadata of `model` into `message`, its emitted form."""
    if model.provenance is None:
        return
    source: TensorFlowSource = model.source
    graph_def = source.graph_def(message)
    clear_metadata(graph_def)
    entries: dict[str, bytes] = {key: value.encode() for key, value in model.provenance.items()}
    if model.original_model is not None:
        entries[RECORD_KEY] = make_record(model.original_model.source.message, message)
    node = next((node for node in proto.all_nodes(graph_def) if RULE_ATTR in node.attr), None)
    if node is not None:
        for key in sorted(entries):
            node.attr[_METADATA_PREFIX + key].s = entries[key]


def node_metadata(source: TensorFlowSource) -> dict[str, bytes]:
    """Return the metadata of a model, by key."""
    return {
        key.removeprefix(_METADATA_PREFIX): node.attr[key].s
        for node in proto.all_nodes(source.graph_def(source.message))
        for key in sorted(node.attr)
        if key.startswith(_METADATA_PREFIX)
    }


def clear_metadata(graph_def: Any) -> None:
    """Remove the metadata of a model."""
    for node in proto.all_nodes(graph_def):
        for key in [key for key in node.attr if key.startswith(_METADATA_PREFIX)]:
            del node.attr[key]
