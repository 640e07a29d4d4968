"""What a TensorFlow model says of where it came from: underscore attributes of the first op that was inserted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from graphquant.quantize import RECORD_KEY, make_record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.formats.tensorflow.source import TensorFlowSource
    from graphquant.ir import Model


RULE_ATTR: Final = "_graphquant_rule"
"""The attribute of a node that graphquant made, which names the rule it came from."""

ANCHOR_ATTR: Final = "_graphquant_anchor"
"""The attribute that names the tensor that it was made for."""

_METADATA_PREFIX: Final = "_graphquant_model_"
"""What the attributes start with that are about the whole model."""


def write_metadata(message: Any, model: Model) -> None:
    """Writes into `message`, which `model` was emitted as, what the model is to say of itself."""
    if model.provenance is None:
        return
    source: TensorFlowSource = model.source
    _clear_metadata(source, message)
    entries: dict[str, bytes] = {key: value.encode() for key, value in model.provenance.items()}
    if model.original_model is not None:
        entries[RECORD_KEY] = make_record(model.original_model.source.message, message)
    node = next((node for node in _graph_def_nodes(source, message) if RULE_ATTR in node.attr), None)
    if node is not None:
        for key in sorted(entries):
            node.attr[_METADATA_PREFIX + key].s = entries[key]


def node_metadata(source: TensorFlowSource, message: Any) -> dict[str, bytes]:
    """What a model says of itself, by key."""
    return {
        key.removeprefix(_METADATA_PREFIX): node.attr[key].s
        for node in _graph_def_nodes(source, message)
        for key in sorted(node.attr)
        if key.startswith(_METADATA_PREFIX)
    }


def original_record(source: TensorFlowSource) -> tuple[bytes, Any] | None:
    """The record in a model and the model without what it says of itself; None if there is none."""
    data = node_metadata(source, source.message).get(RECORD_KEY)
    if data is None:
        return None
    stripped = type(source.message)()
    stripped.CopyFrom(source.message)
    _clear_metadata(source, stripped)
    return data, stripped


def _clear_metadata(source: TensorFlowSource, message: Any) -> None:
    """Takes out what the model says of itself."""
    for node in _graph_def_nodes(source, message):
        for key in [key for key in node.attr if key.startswith(_METADATA_PREFIX)]:
            del node.attr[key]


def _graph_def_nodes(source: TensorFlowSource, message: Any) -> Iterator[Any]:
    graph_def = source.graph_def(message)
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def
