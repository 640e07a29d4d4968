"""Metadata in a TensorFlow model: underscore attributes of the first inserted op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from graphquant.quantize import RECORD_KEY, make_record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.formats.tensorflow.source import TensorFlowSource
    from graphquant.ir import Model


RULE_ATTR: Final = "_graphquant_rule"
"""The attribute of an inserted node that names its rule."""

ANCHOR_ATTR: Final = "_graphquant_anchor"
"""The attribute of an inserted node that names the tensor it was inserted for."""

_METADATA_PREFIX: Final = "_graphquant_model_"
"""The prefix of attributes with metadata of the whole model."""


def write_metadata(message: Any, model: Model) -> None:
    """Write the metadata of `model` into `message`, its emitted form."""
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
    """Return the metadata of a model, by key."""
    return {
        key.removeprefix(_METADATA_PREFIX): node.attr[key].s
        for node in _graph_def_nodes(source, message)
        for key in sorted(node.attr)
        if key.startswith(_METADATA_PREFIX)
    }


def original_record(source: TensorFlowSource) -> tuple[bytes, Any] | None:
    """Return the original's record in a model, and the model without its metadata; None if there is no record."""
    data = node_metadata(source, source.message).get(RECORD_KEY)
    if data is None:
        return None
    stripped = type(source.message)()
    stripped.CopyFrom(source.message)
    _clear_metadata(source, stripped)
    return data, stripped


def _clear_metadata(source: TensorFlowSource, message: Any) -> None:
    """Remove the metadata of a model."""
    for node in _graph_def_nodes(source, message):
        for key in [key for key in node.attr if key.startswith(_METADATA_PREFIX)]:
            del node.attr[key]


def _graph_def_nodes(source: TensorFlowSource, message: Any) -> Iterator[Any]:
    graph_def = source.graph_def(message)
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def
