"""Record of the source in a written model, which restores the source message bit for bit.

It contains the source message without its large values, and the location of each of these in the written model, where
it is unchanged or scaled by a folded BatchNorm. Values that are in neither form are in the record itself. A model
without a record is stripped by `quantize.strip`, which removes the ops.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from graphquant.errors import ModelError

if TYPE_CHECKING:
    from graphquant.ir import Model, Op
    from graphquant.numerics import Array

# Find large values in any protocol buffer message.

MAX_INLINE_BYTES = 128  # size in bytes up to which a value stays inline: a reference to it would be as long
NUMPY_DTYPES = {
    FieldDescriptor.TYPE_FLOAT: "<f4",
    FieldDescriptor.TYPE_DOUBLE: "<f8",
    FieldDescriptor.TYPE_INT32: "<i4",
    FieldDescriptor.TYPE_INT64: "<i8",
    FieldDescriptor.TYPE_UINT32: "<u4",
    FieldDescriptor.TYPE_UINT64: "<u8",
}
"""Data types in which lists of numbers are compared as bytes."""

FieldPath = list[int | str]
"""Path from the message to a value: a field number, followed by an index or key if the field is a list or a map, and so
on."""


class LargeValue(NamedTuple):
    """A large value: its path in the source message, the message and field that contain it, and its bytes."""

    path: FieldPath
    message: Any
    field: Any
    data: bytes

    @property
    def key(self) -> str:
        """The hash of its bytes."""
        return hashlib.blake2b(self.data, digest_size=12).hexdigest()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the tensor that contains it, () if there is none."""
        if hasattr(self.message, "tensor_shape"):
            return tuple(dim.size for dim in self.message.tensor_shape.dim)
        return tuple(getattr(self.message, "dims", ()))


def large_values(message: Any) -> Iterator[LargeValue]:
    """Yield the large values of `message` in a fixed order. The message must not change meanwhile."""
    pending: list[tuple[Any, FieldPath]] = [(message, [])]
    while pending:
        holder, path = pending.pop()
        submessages = []
        for field, value in holder.ListFields():
            field_path = [*path, field.number]
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                submessages += [
                    (submessage, [*field_path, *subpath]) for subpath, submessage in _submessages(field, value)
                ]
            elif (data := _value_bytes(field, value)) is not None and len(data) > MAX_INLINE_BYTES:
                yield LargeValue(field_path, holder, field, data)
        pending.extend(reversed(submessages))


def _without_large_values(message: Any, values: Iterable[LargeValue]) -> Any:
    """Return a copy of `message` without its large values, which are `values`."""
    skeleton = deepcopy(message)
    for value in values:
        holder, field = _find_holder(skeleton, value.path)
        holder.ClearField(field.name)
    return skeleton


def _find_holder(message: Any, path: FieldPath) -> tuple[Any, Any]:
    """Return the message that contains the value at `path`, and its field."""
    holder = message
    field = holder.DESCRIPTOR.fields_by_number[path[0]]
    remaining = path[1:]
    while remaining:
        value = getattr(holder, field.name)
        if _is_map_field(field) or _is_list_field(field):
            value, remaining = value[remaining[0]], remaining[1:]
        holder = value
        field, remaining = holder.DESCRIPTOR.fields_by_number[remaining[0]], remaining[1:]
    return holder, field


def restore_value(message: Any, path: FieldPath, data: bytes) -> None:
    """Put a large value back."""
    try:
        holder, field = _find_holder(message, path)
        if field.type == FieldDescriptor.TYPE_BYTES:
            setattr(holder, field.name, data)
        elif field.type == FieldDescriptor.TYPE_STRING:
            setattr(holder, field.name, data.decode())
        else:
            holder.ClearField(field.name)
            getattr(holder, field.name).extend(np.frombuffer(data, NUMPY_DTYPES[field.type]).tolist())
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            "The provenance record in the model is inconsistent. It is damaged; start from the float model."
        ) from error


def _value_bytes(field: Any, value: Any) -> bytes | None:
    """Return a value as bytes, None if its type is small or it is a list of strings."""
    if _is_list_field(field):
        return np.array(value, NUMPY_DTYPES[field.type]).tobytes() if field.type in NUMPY_DTYPES else None
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes(value)
    return str(value).encode() if field.type == FieldDescriptor.TYPE_STRING else None


def _submessages(field: Any, value: Any) -> Sequence[tuple[FieldPath, Any]]:
    """Return the messages in a field, each with its index or key."""
    if _is_map_field(field):
        if field.message_type.fields_by_name["value"].type != FieldDescriptor.TYPE_MESSAGE:
            return []
        return [([key], value[key]) for key in sorted(value)]
    return [([index], submessage) for index, submessage in enumerate(value)] if _is_list_field(field) else [([], value)]


@cache
def _is_list_field(field: Any) -> bool:
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED


@cache
def _is_map_field(field: Any) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


# Restore weights bit for bit from the product that a folded BatchNorm left.
#
# W' = W * s is rounded to float32, so W' / s is W up to the last bits. The record stores s and those bits, which are
# mostly 0: about 2 bits a weight when compressed, instead of 32.

MAX_ULP_DIFFERENCE = 127  # largest difference of a weight, in float32 steps
CORNER_SIZE = 8  # sizes of the corner of a weight that is compared first, to reject most pairs quickly
CORNER_TOLERANCE = 1e-5

ChannelBlocks = tuple[int, int, int]  # a weight's values as (before, channels, after)


def fit_channel_factors(weight: bytes, scaled: bytes, sizes: tuple[int, ...]) -> tuple[ChannelBlocks, bytes] | None:
    """Return the data that restores `weight` from `scaled`, None if they do not differ by a factor per channel.

    Both are float32 values, and `sizes` is the weight's shape.
    """
    if math.prod(sizes) * 4 != len(weight) or len(weight) != len(scaled):
        return None
    weight_values, scaled_values = (np.frombuffer(data, "<f4") for data in (weight, scaled))
    for blocks in _channel_blockings(sizes):
        weight_blocks, scaled_blocks = weight_values.reshape(blocks), scaled_values.reshape(blocks)
        corner = (slice(CORNER_SIZE),) * 3
        corner_factors = _channel_factors(weight_blocks[corner], scaled_blocks[corner])
        if corner_factors is None or not np.allclose(
            weight_blocks[corner] * corner_factors[None, :, None], scaled_blocks[corner], rtol=CORNER_TOLERANCE, atol=0
        ):
            continue
        if (factors := _channel_factors(weight_blocks, scaled_blocks)) is None:
            continue
        restored = _divide_by_factors(scaled_blocks, factors)
        ulp_differences = weight_blocks.view("<i4").astype(np.int64) - restored.view("<i4")
        if np.abs(ulp_differences).max(initial=0) <= MAX_ULP_DIFFERENCE:
            return blocks, factors.astype("<f8").tobytes() + ulp_differences.astype(np.int8).tobytes()
    return None


def undo_channel_factors(scaled: bytes, blocks: ChannelBlocks, factors_and_differences: bytes) -> bytes:
    """Return the weight that `fit` was given. Raise a ValueError if the data is invalid."""
    values = np.frombuffer(scaled, "<f4").reshape(blocks)
    factors = np.frombuffer(factors_and_differences[: blocks[1] * 8], "<f8")
    ulp_differences = np.frombuffer(factors_and_differences[blocks[1] * 8 :], np.int8).reshape(blocks)
    return (_divide_by_factors(values, factors).view("<i4") + ulp_differences).astype("<i4").tobytes()


def _channel_blockings(sizes: tuple[int, ...]) -> Iterator[ChannelBlocks]:
    """Yield the axes that channels may lie on: any single one, or the last two (TensorFlow's depthwise kernels)."""
    last_two = [(len(sizes) - 2, len(sizes))] if len(sizes) > 1 else []
    for first, last in [*((axis, axis + 1) for axis in range(len(sizes))), *last_two]:
        yield math.prod(sizes[:first]), math.prod(sizes[first:last]), math.prod(sizes[last:])


def _channel_factors(weight: Array, scaled: Array) -> Array | None:
    """Return the factor of each channel, float64 (C,), 1 for a channel of zeros, None if there is no such factor."""
    weight64 = weight.astype(np.float64)
    power = np.einsum("ocs,ocs->c", weight64, weight64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factors: Array = np.where(power > 0, np.einsum("ocs,ocs->c", weight64, scaled.astype(np.float64)) / power, 1.0)
    return factors if np.isfinite(factors).all() and factors.all() else None


def _divide_by_factors(values: Array, factors: Array) -> Array:
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return np.ascontiguousarray((values / factors[None, :, None]).astype("<f4"))


RECORD_SCHEMA = 1
MAX_RECORD_BYTES = 1 << 30  # largest size of an unpacked record in bytes, as a protection against hostile files
_DAMAGED_RECORD = "The provenance record in the model cannot be read. It is damaged; start from the float model."


def make_record(source: Any, written: Any) -> bytes:
    """Return the record of `source` for a model that is written as the message `written`.

    Neither message may change meanwhile. `written` may not change afterwards either, except for its metadata.
    """
    all_written, all_source = list(large_values(written)), list(large_values(source))
    written_values = {large_value.key: large_value for large_value in all_written}
    changed_values: list[LargeValue] = []
    value_sources: list[list[Any]] = []
    blobs: list[bytes] = []
    source_keys = set()
    for large_value in all_source:
        key = large_value.key
        source_keys.add(key)
        if key in written_values:
            value_sources.append([large_value.path, key])
        else:
            changed_values.append(large_value)
    unclaimed_values: dict[tuple[int, ...], list[LargeValue]] = defaultdict(list)
    for key, large_value in written_values.items():
        if key not in source_keys:
            unclaimed_values[large_value.sizes].append(large_value)
    for large_value in changed_values:
        candidates = unclaimed_values[large_value.sizes]
        for position, candidate in enumerate(candidates):
            scaling = fit_channel_factors(large_value.data, candidate.data, large_value.sizes)
            if scaling is not None:
                del candidates[position]
                blobs.append(scaling[1])
                value_sources.append([large_value.path, candidate.key, list(scaling[0]), len(scaling[1])])
                break
        else:
            blobs.append(large_value.data)
            value_sources.append([large_value.path, len(large_value.data)])
    skeleton = _without_large_values(source, all_source)
    header = {
        "schema": RECORD_SCHEMA,
        "digest": _message_digest(source),
        "written": _message_digest(_without_large_values(written, all_written)),
        "bare": skeleton.ByteSize(),
        "cuts": value_sources,
    }
    header_json = json.dumps(header, separators=(",", ":")).encode()
    sections = [len(header_json).to_bytes(8, "little"), header_json, skeleton.SerializeToString(deterministic=True)]
    return zlib.compress(b"".join([*sections, *blobs]), 9)


def restore_source(record: bytes, written: Any) -> tuple[Any, bool]:
    """Restore the source message from a record.

    Args:
        record: The result of `make_record`.
        written: The message of the model that contains the record, without the metadata.

    Returns:
        The message, and True if `written` is unchanged since the record was made, apart from large values.
    """
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(record, MAX_RECORD_BYTES)
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        if header["schema"] != RECORD_SCHEMA:
            raise ModelError(
                f"The provenance record has schema {header['schema']!r}; this version reads {RECORD_SCHEMA}."
            )
        start = 8 + size
        message = type(written).FromString(data[start : start + int(header["bare"])])
        blobs = data[start + int(header["bare"]) :]
        written_values = {large_value.key: large_value.data for large_value in large_values(written)}
        offset = 0
        for path, *encoded in header["cuts"]:
            value, offset = _decode_value(encoded, written_values, blobs, offset)
            restore_value(message, path, value)
    except (zlib.error, DecodeError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ModelError(_DAMAGED_RECORD) from error
    if _message_digest(message) != header["digest"]:
        raise ModelError(_DAMAGED_RECORD)
    structure_digest = _message_digest(_without_large_values(written, large_values(written)))
    return message, structure_digest == header["written"]


def _decode_value(encoded: list[Any], written_values: dict[str, bytes], blobs: bytes, offset: int) -> tuple[bytes, int]:
    """Return the large value of a reference, and the position in `blobs` after it."""
    if not isinstance(encoded[0], str):
        return blobs[offset : offset + int(encoded[0])], offset + int(encoded[0])
    if encoded[0] not in written_values:
        raise ModelError("A weight of the float model is missing: the model was changed after graphquant wrote it.")
    if len(encoded) == 1:
        return written_values[encoded[0]], offset
    leading, channels, trailing = map(int, encoded[1])
    return undo_channel_factors(
        written_values[encoded[0]], (leading, channels, trailing), blobs[offset : offset + int(encoded[2])]
    ), offset + int(encoded[2])


def _message_digest(message: Any) -> str:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()


# Keys of the provenance metadata.

METADATA_PREFIX = "graphquant."  # prefix of all metadata keys
RECORD_KEY = "record"  # key of the record
OPS_KEY = "ops"  # key of the entries of each op in an old ONNX model, whose nodes have no metadata


def op_provenance_json(model: Model) -> str:
    """Return rule, anchor and notes of each inserted op as JSON, by graph and op; "" if there is none."""
    by_graph: dict[str, dict[str, list[Any]]] = {}
    for name, graph in model.graphs.items():
        inserted = (op for op in graph.ops() if op.rule and op.kind != "constant")
        if entries := {op.name: [op.rule, op.anchor, *filter(None, [dict(op.notes)])] for op in inserted}:
            by_graph[name] = dict(sorted(entries.items()))
    return json.dumps(dict(sorted(by_graph.items())), separators=(",", ":")) if by_graph else ""


def node_notes(op: Op) -> dict[str, str]:
    """Return the metadata of an op's node without that of graphquant, and its doc string under ""."""
    notes = op.notes
    if op.source is not None:
        notes = {"": op.source.doc_string, **{entry.key: entry.value for entry in op.source.metadata_props}}
    return {key: value for key, value in notes.items() if value and not key.startswith(METADATA_PREFIX)}
