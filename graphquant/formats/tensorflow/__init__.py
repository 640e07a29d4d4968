"""The TensorFlow door: reads, rewrites and writes GraphDef, MetaGraphDef and SavedModel without importing tensorflow.

Only running a model imports it, inside the functions of `run`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.load import load
from graphquant.formats.tensorflow.save import save

if TYPE_CHECKING:
    from graphquant.ir import Model

DEFAULT_RULES = "tflite"
FAMILY = "fake-quant"


def upgrade(model: Model, opset: int) -> Model:  # noqa: ARG001  # the protocol's signature
    """The model itself: TensorFlow has no opsets."""
    return model


__all__ = ["DEFAULT_RULES", "FAMILY", "emit", "load", "save", "upgrade"]
