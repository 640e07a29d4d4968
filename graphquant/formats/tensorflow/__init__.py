"""The TensorFlow door: reads, rewrites and writes GraphDef, MetaGraphDef and SavedModel without importing tensorflow.

Only running a model imports it, inside the functions of `session`.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant.formats.tensorflow import metadata, proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.from_tensorflow import from_tensorflow
from graphquant.formats.tensorflow.load import build_model, load
from graphquant.formats.tensorflow.runner import create_runner, input_specs
from graphquant.formats.tensorflow.save import save
from graphquant.formats.tensorflow.to_tensorflow import to_tensorflow
from graphquant.quantize import RECORD_KEY, restore_source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphquant.formats import Feeds
    from graphquant.ir import Model


__all__ = [
    "DEFAULT_RULES",
    "DEFAULT_FAMILY",
    "emit",
    "to_tensorflow",
    "input_specs",
    "load",
    "from_tensorflow",
    "create_runner",
    "save",
    "encode_skeleton",
    "profile_ops",
    "prepare_timed_run",
    "prepare_timed_tflite_run",
    "upgrade_opset",
]

DEFAULT_RULES = "tflite"
DEFAULT_FAMILY = "fake-quant"


def prepare_timed_run(model: Model, feeds: Sequence[Feeds]) -> Callable[[], object]:
    """What runs the model once on each of `feeds` on one thread, with TensorFlow's own rewriting for speed.

    Raises:
        DataError: The feeds do not fit the model.
        MissingDependencyError: tensorflow is not installed.
        ModelError: TensorFlow refuses the model.
    """
    return create_runner(model).prepare_timed_run(feeds)


def prepare_timed_tflite_run(model: Model) -> Callable[[], object]:
    """What runs the TFLite file of a frozen model once, on one thread.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: The converter or the runtime refuses the model.
    """
    from graphquant.formats.tensorflow.tflite_converter import prepare_interpreter, run_tflite_converter

    return prepare_interpreter(run_tflite_converter(model))


def profile_ops(model: Model, feeds: Sequence[Feeds]) -> None:  # the protocol's signature
    """Nothing: what TensorFlow tells of ops is not what they take without telling."""


def upgrade_opset(model: Model, opset: int) -> Model:  # noqa: ARG001  # the protocol's signature
    """The model itself: TensorFlow has no opsets."""
    return model


def read_metadata(model: Model) -> dict[str, str]:
    """What the model says of where it came from."""
    entries = metadata.node_metadata(model.source, model.source.message)
    return {key: value.decode(errors="replace") for key, value in entries.items() if key != RECORD_KEY}


def restore_original(model: Model) -> tuple[Model, bool] | None:
    """The model that the record in this one gives back; see `FormatModule`.

    Raises:
        ModelError: The record is damaged, or weights were changed.
    """
    record = metadata.original_record(model.source)
    if record is None:
        return None
    message, unchanged = restore_source(*record, type(model.source.message))
    digest = hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()
    return build_model(
        replace(model.source, message=message, digest=digest), model.path or model.source.file
    ), unchanged


def encode_skeleton(model: Model) -> str:
    """The source message without the data of its constants, as text."""
    message = type(model.source.message)()
    message.CopyFrom(model.source.message)
    graph_def = model.source.graph_def(message)
    for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
        for node in nodes:
            if node.op == "Const" and "value" in node.attr:
                tensor = node.attr["value"].tensor
                node.attr["value"].tensor.CopyFrom(
                    proto.TensorProto(dtype=tensor.dtype, tensor_shape=tensor.tensor_shape)
                )
    return proto.to_text(message)
