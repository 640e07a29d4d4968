"""What a TensorFlow model says of where it came from: underscore attributes of the first op that was inserted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from graphquant.provenance import RECORD, make

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.formats.tensorflow.source import Source
    from graphquant.ir import Model

__all__ = ["ANCHOR_ATTR", "RULE_ATTR", "annotate", "record", "said"]

RULE_ATTR: Final = "_graphquant_rule"
"""The attribute of a node that graphquant made, which names the rule it came from."""

ANCHOR_ATTR: Final = "_graphquant_anchor"
"""The attribute that names the tensor that it was made for."""

_MODEL: Final = "_graphquant_model_"
"""What the attributes start with that are about the whole model."""


def annotate(message: Any, model: Model) -> None:
    """Writes into `message`, which `model` was emitted as, what the model is to say of itself."""
    if model.provenance is None:
        return
    source: Source = model.source
    _clear(source, message)
    said: dict[str, bytes] = {key: value.encode() for key, value in model.provenance.items()}
    if model.origin is not None:
        said[RECORD] = make(model.origin.source.message, message)
    node = next((node for node in _nodes(source, message) if RULE_ATTR in node.attr), None)
    if node is not None:
        for key in sorted(said):
            node.attr[_MODEL + key].s = said[key]


def said(source: Source, message: Any) -> dict[str, bytes]:
    """What a model says of itself, by key."""
    return {
        key.removeprefix(_MODEL): node.attr[key].s
        for node in _nodes(source, message)
        for key in sorted(node.attr)
        if key.startswith(_MODEL)
    }


def record(source: Source) -> tuple[bytes, Any] | None:
    """The record in a model and the model without what it says of itself; None if there is none."""
    data = said(source, source.message).get(RECORD)
    if data is None:
        return None
    bare = type(source.message)()
    bare.CopyFrom(source.message)
    _clear(source, bare)
    return data, bare


def _clear(source: Source, message: Any) -> None:
    """Takes out what the model says of itself."""
    for node in _nodes(source, message):
        for key in [key for key in node.attr if key.startswith(_MODEL)]:
            del node.attr[key]


def _nodes(source: Source, message: Any) -> Iterator[Any]:
    graph_def = source.graph_def(message)
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def
