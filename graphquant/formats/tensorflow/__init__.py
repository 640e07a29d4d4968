"""The TensorFlow format: reads, rewrites and writes GraphDef, MetaGraphDef and SavedModel without importing tensorflow.

Only functions that run a model import tensorflow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant.formats import KERAS_SUFFIXES, Feeds
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.live_objects import from_tensorflow, to_tensorflow
from graphquant.formats.tensorflow.load import build_model
from graphquant.formats.tensorflow.runner import create_runner, input_specs
from graphquant.formats.tensorflow.save import save
from graphquant.formats.tensorflow.session import describe_unfrozen_variables
from graphquant.formats.tensorflow.signatures import omission_notes, select_signatures
from graphquant.formats.tensorflow.source import clear_metadata, node_metadata, read_source
from graphquant.quantize import RECORD_KEY, restore_source

if TYPE_CHECKING:
    from graphquant.ir import Model

DEFAULT_RULES = "tflite"
DEFAULT_FAMILY = "fake-quant"


def load(path: Path, *, allow_links: bool = False, tags: Sequence[str] = ()) -> Model:
    """Load the GraphDef, MetaGraphDef, SavedModel or Keras file at `path`, whatever its suffix.

    With `allow_links`, files may be links out of the folder of the model. `tags` choose the MetaGraph of a SavedModel.
    Raises a MissingDependencyError if it is a Keras file, and tensorflow is not installed, a ModelError if there is no
    such model there, it is damaged, or it is not supported, and a UsageError if no MetaGraph has these tags.
    """
    if path.suffix in KERAS_SUFFIXES and path.is_file():
        from graphquant.formats.tensorflow.keras import load_keras

        return load_keras(path)
    return build_model(read_source(path, allow_links=allow_links, tags=tags), path)


def prepare_timed_run(model: Model, feeds: Sequence[Feeds]) -> Callable[[], object]:
    """Prepare a run of the model on each of `feeds`, on one thread and with TensorFlow's graph optimizations."""
    return create_runner(model).prepare_timed_run(feeds)


def prepare_timed_tflite_run(model: Model) -> Callable[[], object]:
    """Prepare a run of a frozen model's TFLite file, on one thread."""
    from graphquant.formats.tensorflow.tflite_converter import (
        convert_signatures,
        join_tflite_files,
        prepare_interpreter,
    )

    return prepare_interpreter(join_tflite_files(convert_signatures(model)))


def profile_ops(model: Model, feeds: Sequence[Feeds]) -> None:  # the protocol's signature
    """Return None: TensorFlow's profiler slows the ops down, so its times are not those of a run."""


def upgrade_opset(model: Model, opset: int) -> Model:  # noqa: ARG001  # the protocol's signature
    """Return the model unchanged: TensorFlow has no opsets."""
    return model


def read_metadata(model: Model) -> dict[str, str]:
    """Return the metadata that graphquant wrote into the model."""
    entries = node_metadata(model.source)
    return {key: value.decode(errors="replace") for key, value in entries.items() if key != RECORD_KEY}


def restore_original(model: Model) -> tuple[Model, bool] | None:
    """Restore the original model from the record in this one; see `FormatModule`.

    Raises a ModelError if the record is damaged, or weights were changed.
    """
    if (record := node_metadata(model.source).get(RECORD_KEY)) is None:
        return None
    edited = deepcopy(model.source.message)
    clear_metadata(model.source.graph_def(edited))
    message, unchanged = restore_source(record, edited)
    digest = hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()
    source = replace(model.source, message=message, digest=digest)
    return build_model(source, model.path or source.file), unchanged


def encode_skeleton(model: Model) -> str:
    """Return the source message as text, without the data of its constants."""
    message = deepcopy(model.source.message)
    for node in proto.all_nodes(model.source.graph_def(message)):
        if node.op == "Const" and "value" in node.attr:
            tensor = node.attr["value"].tensor
            tensor.CopyFrom(proto.TensorProto(dtype=tensor.dtype, tensor_shape=tensor.tensor_shape))
    return proto.to_text(message)
