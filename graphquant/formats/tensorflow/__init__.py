"""The TensorFlow door: reads, rewrites and writes GraphDef, MetaGraphDef and SavedModel without importing tensorflow.

Only running a model imports it, inside the functions of `session`.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant.formats.tensorflow import notes, proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.give_back import give_back
from graphquant.formats.tensorflow.live import load_live
from graphquant.formats.tensorflow.load import build, load
from graphquant.formats.tensorflow.run import inputs, runner
from graphquant.formats.tensorflow.save import save
from graphquant.provenance import RECORD, restore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphquant.formats import Feeds
    from graphquant.ir import Model

DEFAULT_RULES = "tflite"
FAMILY = "fake-quant"


def timed(model: Model, feeds: Sequence[Feeds]) -> Callable[[], object]:
    """What runs the model once on each of `feeds` on one thread, with TensorFlow's own rewriting for speed.

    Raises:
        DataError: The feeds do not fit the model.
        MissingDependencyError: tensorflow is not installed.
        ModelError: TensorFlow refuses the model.
    """
    return runner(model).timed(feeds)


def timed_lite(model: Model) -> Callable[[], object]:
    """What runs the TFLite file of a frozen model once, on one thread.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: The converter or the runtime refuses the model.
    """
    from graphquant.formats.tensorflow.convert import convert, interpreter

    return interpreter(convert(model))


def spent(model: Model, feeds: Sequence[Feeds]) -> None:  # the protocol's signature
    """Nothing: what TensorFlow tells of ops is not what they take without telling."""


def upgrade(model: Model, opset: int) -> Model:  # noqa: ARG001  # the protocol's signature
    """The model itself: TensorFlow has no opsets."""
    return model


def said(model: Model) -> dict[str, str]:
    """What the model says of where it came from."""
    known = notes.said(model.source, model.source.message)
    return {key: value.decode(errors="replace") for key, value in known.items() if key != RECORD}


def origin(model: Model) -> tuple[Model, bool] | None:
    """The model that the record in this one gives back; see `FormatModule`.

    Raises:
        ModelError: The record is damaged, or weights were changed.
    """
    found = notes.record(model.source)
    if found is None:
        return None
    message, same = restore(*found, type(model.source.message))
    digest = hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()
    return build(replace(model.source, message=message, digest=digest), model.path or model.source.file), same


def skeleton(model: Model) -> str:
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


__all__ = [
    "DEFAULT_RULES",
    "FAMILY",
    "emit",
    "give_back",
    "inputs",
    "load",
    "load_live",
    "runner",
    "save",
    "skeleton",
    "spent",
    "timed",
    "timed_lite",
    "upgrade",
]
