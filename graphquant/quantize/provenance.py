"""The record in a written model that gives back the message that it was made of, bit for bit.

It is that message without its large values, and for each of these where in the written model it is: there as it was, or
scaled by a BatchNorm that was folded; what is in neither form is in the record itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from graphquant.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphquant.ir import Model
    from graphquant.numerics import Array


# The large values in a protocol buffer message, whatever message it is, and where they are.

MAX_INLINE_BYTES = 128
"""Bytes up to which a value is no leaf: naming it would take as many."""

NUMPY_DTYPES = {
    FieldDescriptor.TYPE_FLOAT: "<f4",
    FieldDescriptor.TYPE_DOUBLE: "<f8",
    FieldDescriptor.TYPE_INT32: "<i4",
    FieldDescriptor.TYPE_INT64: "<i8",
    FieldDescriptor.TYPE_UINT32: "<u4",
    FieldDescriptor.TYPE_UINT64: "<u8",
}
"""How lists of numbers are held against bytes."""

FieldPath = list[int | str]
"""From the message on: a field's number, an index or key where it is a list or a map, and so on."""


@dataclass(frozen=True, slots=True)
class LargeValue:
    """A large value.

    Attributes:
        path: Where it is.
        message: The message that has it.
        field: Its field there.
        data: Its bytes.
    """

    path: FieldPath
    message: Any
    field: Any
    data: bytes

    @property
    def key(self) -> str:
        """What its bytes are known by."""
        return value_key(self.data)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the tensor that it holds, as its holder says them; () if it holds none."""
        if hasattr(self.message, "tensor_shape"):
            return tuple(dim.size for dim in self.message.tensor_shape.dim)
        return tuple(getattr(self.message, "dims", ()))


def value_key(data: bytes) -> str:
    """What these bytes are known by."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def large_values(message: Any) -> Iterator[LargeValue]:
    """The large values of `message`, always in the same order; it must not be changed meanwhile."""
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


def clear_large_values(message: Any) -> None:
    """Empties all large values of `message`."""
    for large_value in list(large_values(message)):
        large_value.message.ClearField(large_value.field.name)


def restore_value(message: Any, path: FieldPath, data: bytes) -> None:
    """Puts a large value back.

    Raises:
        ModelError: There is no such place.
    """
    try:
        holder = message
        field = holder.DESCRIPTOR.fields_by_number[path[0]]
        remaining = path[1:]
        while remaining:
            value = getattr(holder, field.name)
            if _is_map_field(field) or _is_list_field(field):
                value, remaining = value[remaining[0]], remaining[1:]
            holder = value
            field, remaining = holder.DESCRIPTOR.fields_by_number[remaining[0]], remaining[1:]
        _set_field(holder, field, data)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            "What the model says of the one it was made of does not fit together. It is damaged; start from the float"
            " model."
        ) from error


def _set_field(holder: Any, field: Any, data: bytes) -> None:
    if field.type == FieldDescriptor.TYPE_BYTES:
        setattr(holder, field.name, data)
    elif field.type == FieldDescriptor.TYPE_STRING:
        setattr(holder, field.name, data.decode())
    else:
        holder.ClearField(field.name)
        getattr(holder, field.name).extend(np.frombuffer(data, NUMPY_DTYPES[field.type]).tolist())


def _value_bytes(field: Any, value: Any) -> bytes | None:
    """A value as bytes, None where it is small by its type, or a list of texts."""
    if _is_list_field(field):
        return np.array(value, NUMPY_DTYPES[field.type]).tobytes() if field.type in NUMPY_DTYPES else None
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes(value)
    return str(value).encode() if field.type == FieldDescriptor.TYPE_STRING else None


def _submessages(field: Any, value: Any) -> Sequence[tuple[FieldPath, Any]]:
    """The messages in a field, each with its index or key."""
    if _is_map_field(field):
        if field.message_type.fields_by_name["value"].type != FieldDescriptor.TYPE_MESSAGE:
            return []
        return [([key], value[key]) for key in sorted(value)]
    return [([index], submessage) for index, submessage in enumerate(value)] if _is_list_field(field) else [([], value)]


def _is_list_field(field: Any) -> bool:
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED


def _is_map_field(field: Any) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


# Weights that another one with scaled channels gives back bit for bit, as a folded BatchNorm leaves them.
#
# W' = W * s is rounded to float32, so W' / s is W but for the last bits. The record has s and those bits, which are
# mostly 0: some 2 bits a weight when they are compressed, where the weight itself has 32.

MAX_ULP_DIFFERENCE = 127
"""Steps of float32 that a weight may be off."""

CORNER_SIZE = 8
"""Sizes of the corner of a weight by which most that are no scaled ones are told."""

CORNER_TOLERANCE = 1e-5

ChannelBlocks = tuple[int, int, int]
"""A weight's values as (before, channels, behind)."""


def fit_channel_factors(weight: bytes, scaled: bytes, sizes: tuple[int, ...]) -> tuple[ChannelBlocks, bytes] | None:
    """The channels along which `scaled` is `weight` times a factor, and what gives it back; None if it is not.

    Args:
        weight: float32 values.
        scaled: As many.
        sizes: The weight's shape.
    """
    if math.prod(sizes) * 4 != len(weight) or len(weight) != len(scaled):
        return None
    weight_values, scaled_values = (np.frombuffer(data, "<f4") for data in (weight, scaled))
    for blocks in _channel_blockings(sizes):
        weight_blocks, scaled_blocks = weight_values.reshape(blocks), scaled_values.reshape(blocks)
        corner = (slice(CORNER_SIZE), slice(CORNER_SIZE), slice(CORNER_SIZE))
        corner_factors = _channel_factors(weight_blocks[corner], scaled_blocks[corner])
        if corner_factors is None or not np.allclose(
            weight_blocks[corner] * corner_factors[None, :, None], scaled_blocks[corner], rtol=CORNER_TOLERANCE, atol=0
        ):
            continue
        factors = _channel_factors(weight_blocks, scaled_blocks)
        if factors is None:
            continue
        ulp_differences = weight_blocks.view("<i4").astype(np.int64) - _divide_by_factors(scaled_blocks, factors).view(
            "<i4"
        )
        if np.abs(ulp_differences).max(initial=0) <= MAX_ULP_DIFFERENCE:
            return blocks, factors.astype("<f8").tobytes() + ulp_differences.astype(np.int8).tobytes()
    return None


def undo_channel_factors(scaled: bytes, blocks: ChannelBlocks, factors_and_differences: bytes) -> bytes:
    """The weight that `fit` was given; a ValueError if this is no such thing."""
    values = np.frombuffer(scaled, "<f4").reshape(blocks)
    factors = np.frombuffer(factors_and_differences[: blocks[1] * 8], "<f8")
    ulp_differences = np.frombuffer(factors_and_differences[blocks[1] * 8 :], np.int8).reshape(blocks)
    return (_divide_by_factors(values, factors).view("<i4") + ulp_differences).astype("<i4").tobytes()


def _channel_blockings(sizes: tuple[int, ...]) -> Iterator[ChannelBlocks]:
    """The axes that channels may lie on: any one, or the last two (TensorFlow's depthwise kernels)."""
    axis_ranges = [(axis, axis + 1) for axis in range(len(sizes))] + (
        [(len(sizes) - 2, len(sizes))] if len(sizes) > 1 else []
    )
    for first, last in axis_ranges:
        yield math.prod(sizes[:first]), math.prod(sizes[first:last]), math.prod(sizes[last:])


def _channel_factors(weight: Array, scaled: Array) -> Array | None:
    """What each channel was multiplied by, float64 (C,); 1 where it is all zeros, None where there is none."""
    weight64 = weight.astype(np.float64)
    power = np.einsum("ocs,ocs->c", weight64, weight64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factors: Array = np.where(power > 0, np.einsum("ocs,ocs->c", weight64, scaled.astype(np.float64)) / power, 1.0)
    return factors if np.isfinite(factors).all() and factors.all() else None


def _divide_by_factors(values: Array, factors: Array) -> Array:
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return np.ascontiguousarray((values / factors[None, :, None]).astype("<f4"))


RECORD_SCHEMA = 1

MAX_RECORD_BYTES = 1 << 30
"""Bytes that a record may unpack to; one that says more is taken for hostile."""

_DAMAGED_RECORD = (
    "What the model says of the one it was made of cannot be read. It is damaged; start from the float model."
)


def make_record(source: Any, written: Any) -> bytes:
    """The record of `source` for a model that is written as the message `written`.

    Neither may be changed meanwhile, nor may `written` afterwards, but for what it says of itself.
    """
    written_values = {large_value.key: large_value for large_value in large_values(written)}
    changed_values: list[LargeValue] = []
    value_sources: list[list[Any]] = []
    blobs: list[bytes] = []
    source_keys = set()
    for large_value in large_values(source):
        source_keys.add(large_value.key)
        if large_value.key in written_values:
            value_sources.append([large_value.path, large_value.key])
        else:
            changed_values.append(large_value)
    unclaimed_values: dict[tuple[int, ...], list[LargeValue]] = defaultdict(list)
    for key, large_value in written_values.items():
        if key not in source_keys:
            unclaimed_values[large_value.sizes].append(large_value)
    value_sources.extend(
        [large_value.path, *_encode_value(large_value, unclaimed_values[large_value.sizes], blobs)]
        for large_value in changed_values
    )
    skeleton = type(source)()
    skeleton.CopyFrom(source)
    clear_large_values(skeleton)
    header = {
        "schema": RECORD_SCHEMA,
        "digest": _message_digest(source),
        "written": structure_digest(written),
        "bare": skeleton.ByteSize(),
        "cuts": value_sources,
    }
    header_json = json.dumps(header, separators=(",", ":")).encode()
    sections = [
        len(header_json).to_bytes(8, "little"),
        header_json,
        skeleton.SerializeToString(deterministic=True),
        *blobs,
    ]
    return zlib.compress(b"".join(sections), 9)


def restore_source(record: bytes, written: Any, message_type: Any) -> tuple[Any, bool]:
    """The message that a record is of.

    Args:
        record: What `make` gave.
        written: The message of the model that has it, without what it says of itself.
        message_type: The type of the message.

    Returns:
        The message, and whether `written` is as it was when the record was made, but for its large values.

    Raises:
        ModelError: The record is damaged, or a weight that it needs is not in the model any more.
    """
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(record, MAX_RECORD_BYTES)
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        if header["schema"] != RECORD_SCHEMA:
            raise ModelError(
                f"The model's record has schema {header['schema']!r}, and this version reads {RECORD_SCHEMA}."
            )
        start = 8 + size
        message = message_type.FromString(data[start : start + int(header["bare"])])
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
    return message, structure_digest(written) == header["written"]


def structure_digest(message: Any) -> str:
    """Hex SHA-256 of a message without its large values."""
    skeleton = type(message)()
    skeleton.CopyFrom(message)
    clear_large_values(skeleton)
    return _message_digest(skeleton)


def _encode_value(large_value: LargeValue, candidates: list[LargeValue], blobs: list[bytes]) -> list[Any]:
    """How a value that is not in the written model is had back; what the record must have for that goes to `blobs`."""
    for position, candidate in enumerate(candidates):
        scaling = fit_channel_factors(large_value.data, candidate.data, large_value.sizes)
        if scaling is not None:
            del candidates[position]
            blobs.append(scaling[1])
            return [candidate.key, list(scaling[0]), len(scaling[1])]
    blobs.append(large_value.data)
    return [len(large_value.data)]


def _decode_value(encoded: list[Any], written_values: dict[str, bytes], blobs: bytes, offset: int) -> tuple[bytes, int]:
    """A large value as `_encode_value` says it, and the place in `blobs` behind it."""
    if not isinstance(encoded[0], str):
        return blobs[offset : offset + int(encoded[0])], offset + int(encoded[0])
    if encoded[0] not in written_values:
        raise ModelError(
            "A weight of the float model is not in the model any more: it was changed after graphquant wrote it."
        )
    if len(encoded) == 1:
        return written_values[encoded[0]], offset
    leading, channels, trailing = map(int, encoded[1])
    return undo_channel_factors(
        written_values[encoded[0]], (leading, channels, trailing), blobs[offset : offset + int(encoded[2])]
    ), offset + int(encoded[2])


def _message_digest(message: Any) -> str:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()


# The keys under which a model says where it came from.

METADATA_PREFIX = "graphquant."
"""What all keys of a model's metadata start with."""

RECORD_KEY = "record"
"""The key of the record."""

OPS_KEY = "ops"
"""The key under which an old ONNX model, whose nodes have no metadata, has each op's rule and anchor."""


def op_provenance_json(model: Model) -> str:
    """Rule and anchor of each op that graphquant made, as JSON: by graph and op; "" if there is none."""
    by_graph: dict[str, dict[str, list[str]]] = {}
    for name, graph in model.graphs.items():
        rules_and_anchors = {op.name: [op.rule, op.anchor] for op in graph.ops() if op.rule and op.kind != "constant"}
        if rules_and_anchors:
            by_graph[name] = dict(sorted(rules_and_anchors.items()))
    return json.dumps(dict(sorted(by_graph.items())), separators=(",", ":")) if by_graph else ""
