"""The record in a written model that gives back the message that it was made of, bit for bit.

It is that message without its large values, and for each of these where in the written model it is: there as it was, or
scaled by a BatchNorm that was folded; what is in neither form is in the record itself.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import defaultdict
from typing import Any

from google.protobuf.message import DecodeError

from graphquant.errors import ModelError
from graphquant.provenance.leaves import Leaf, cut, key_of, leaves, put
from graphquant.provenance.scaled import fit, undo

SCHEMA = 1

MAX_RECORD = 1 << 30
"""Bytes that a record may unpack to; one that says more is taken for hostile."""

_DAMAGED = "What the model says of the one it was made of cannot be read. It is damaged; start from the float model."


def make(source: Any, written: Any) -> bytes:
    """The record of `source` for a model that is written as the message `written`.

    Neither may be changed meanwhile, nor may `written` afterwards, but for what it says of itself.
    """
    there = {leaf.key: leaf for leaf in leaves(written)}
    lost: list[Leaf] = []
    cuts: list[list[Any]] = []
    blobs: list[bytes] = []
    here = set()
    for leaf in leaves(source):
        here.add(leaf.key)
        if leaf.key in there:
            cuts.append([leaf.path, leaf.key])
        else:
            lost.append(leaf)
    spare: dict[tuple[int, ...], list[Leaf]] = defaultdict(list)
    for key, leaf in there.items():
        if key not in here:
            spare[leaf.sizes].append(leaf)
    cuts.extend([leaf.path, *_told(leaf, spare[leaf.sizes], blobs)] for leaf in lost)
    bare = type(source)()
    bare.CopyFrom(source)
    cut(bare)
    head = {
        "schema": SCHEMA,
        "digest": _digest(source),
        "written": shape(written),
        "bare": bare.ByteSize(),
        "cuts": cuts,
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    parts = [len(text).to_bytes(8, "little"), text, bare.SerializeToString(deterministic=True), *blobs]
    return zlib.compress(b"".join(parts), 9)


def restore(record: bytes, written: Any, form: Any) -> tuple[Any, bool]:
    """The message that a record is of.

    Args:
        record: What `make` gave.
        written: The message of the model that has it, without what it says of itself.
        form: The type of the message.

    Returns:
        The message, and whether `written` is as it was when the record was made, but for its large values.

    Raises:
        ModelError: The record is damaged, or a weight that it needs is not in the model any more.
    """
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(record, MAX_RECORD)
        size = int.from_bytes(data[:8], "little")
        head = json.loads(data[8 : 8 + size])
        if head["schema"] != SCHEMA:
            raise ModelError(f"The model's record has schema {head['schema']!r}, and this version reads {SCHEMA}.")
        start = 8 + size
        message = form.FromString(data[start : start + int(head["bare"])])
        blobs = data[start + int(head["bare"]) :]
        there = {leaf.key: leaf.data for leaf in leaves(written)}
        place = 0
        for path, *told in head["cuts"]:
            value, place = _value(told, there, blobs, place)
            put(message, path, value)
    except (zlib.error, DecodeError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ModelError(_DAMAGED) from error
    if _digest(message) != head["digest"]:
        raise ModelError(_DAMAGED)
    return message, shape(written) == head["written"]


def shape(message: Any) -> str:
    """Hex SHA-256 of a message without its large values."""
    bare = type(message)()
    bare.CopyFrom(message)
    cut(bare)
    return _digest(bare)


def _told(leaf: Leaf, candidates: list[Leaf], blobs: list[bytes]) -> list[Any]:
    """How a value that is not in the written model is had back; what the record must have for that goes to `blobs`."""
    for place, other in enumerate(candidates):
        found = fit(leaf.data, other.data, leaf.sizes)
        if found is not None:
            del candidates[place]
            blobs.append(found[1])
            return [other.key, list(found[0]), len(found[1])]
    blobs.append(leaf.data)
    return [len(leaf.data)]


def _value(told: list[Any], there: dict[str, bytes], blobs: bytes, place: int) -> tuple[bytes, int]:
    """A large value as `_told` says it, and the place in `blobs` behind it."""
    if not isinstance(told[0], str):
        return blobs[place : place + int(told[0])], place + int(told[0])
    if told[0] not in there:
        raise ModelError(
            "A weight of the float model is not in the model any more: it was changed after graphquant wrote it."
        )
    if len(told) == 1:
        return there[told[0]], place
    before, channels, behind = map(int, told[1])
    return undo(there[told[0]], (before, channels, behind), blobs[place : place + int(told[2])]), place + int(told[2])


def _digest(message: Any) -> str:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()


__all__ = ["key_of", "make", "restore", "shape"]
