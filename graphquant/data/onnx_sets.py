"""Calibration data as ONNX stores tests: folders `test_data_set_0` and so on with a TensorProto for each input."""

from __future__ import annotations

import math
import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError

from graphquant.data.base import MAX_FEED_BYTES
from graphquant.data.files import File, hashed, reading
from graphquant.data.messages import Tensor
from graphquant.data.samples import one_each
from graphquant.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.data.base import Batches, Feed, Wanted
    from graphquant.data.spec import Source
    from graphquant.numerics import Array

_DTYPES: dict[int, tuple[Any, str]] = {
    # TensorProto.DataType: dtype, and the field that holds values which are not raw
    1: (np.float32, "float_data"),
    2: (np.uint8, "int32_data"),
    3: (np.int8, "int32_data"),
    4: (np.uint16, "int32_data"),
    5: (np.int16, "int32_data"),
    6: (np.int32, "int32_data"),
    7: (np.int64, "int64_data"),
    9: (np.bool_, "int32_data"),
    10: (np.float16, "int32_data"),
    11: (np.float64, "double_data"),
    12: (np.uint32, "uint64_data"),
    13: (np.uint64, "uint64_data"),
    16: (ml_dtypes.bfloat16, "int32_data"),
}

_STRING = 8
_BITS = frozenset({10, 16})
"""Types whose values stand in int32_data as their bit patterns."""


def batches(source: Source, wanted: Wanted) -> Batches:
    """The sets in the order of their names, each one feed; the digest is over their files.

    Raises:
        DataError: A file is no tensor, or the tensors do not fit the inputs.
    """
    sets = _sets(source.files)
    if wanted.samples is not None:
        sets = sets[: wanted.samples]

    def read(start: int, stop: int) -> Iterator[tuple[str, Feed]]:
        for files in sets[start:stop]:
            where = str(PurePosixPath(files[0].name).parent)
            yield where, _feed(where, files, wanted)

    digest = hashed(f"{[taker.name for taker in wanted.inputs]}", [file for files in sets for file in files])
    return one_each(source, wanted, read, count=len(sets), digest=digest)


def _sets(files: tuple[File, ...]) -> list[list[File]]:
    """The files of each folder, input_2.pb before input_10.pb."""
    sets: dict[PurePosixPath, list[File]] = {}
    for file in files:
        sets.setdefault(PurePosixPath(file.name).parent, []).append(file)
    return [sorted(found, key=lambda file: (_number(file), file.name)) for found in sets.values()]


def _number(file: File) -> int:
    found = re.search(r"(\d{1,9})\.pb$", file.name)
    return int(found[1]) if found else 0


def _feed(where: str, files: list[File], wanted: Wanted) -> Feed:
    """Each tensor to the input of its name; if any has none or another, all by their numbers."""
    tensors = [_tensor(file) for file in files]
    names = [taker.name for taker in wanted.inputs]
    if len(tensors) != len(names):
        raise DataError(
            f"{where} holds {len(tensors)} inputs, and the model takes {', '.join(map(repr, names))}."
            " Give one file for each."
        )
    named = dict(tensors)
    return named if named.keys() == set(names) else dict(zip(names, (values for _, values in tensors), strict=True))


def _tensor(file: File) -> tuple[str, Array]:
    """Name and values of the TensorProto in `file`."""
    with reading(file, "Give a TensorProto, as ONNX's test data is."):
        content = file.read(MAX_FEED_BYTES)
        try:
            tensor = Tensor.FromString(content)
        except DecodeError as error:
            raise ValueError("it is no tensor; sequences and optionals are not supported") from error
        if tensor.HasField("segment") or tensor.data_type not in {*_DTYPES, _STRING}:
            raise ValueError(
                f"it is a sequence, an optional, or a tensor of the type {tensor.data_type}, which are not supported"
            )
        if tensor.data_location:
            raise ValueError("its values are in another file, which is not supported")
        return tensor.name.decode(), _values(tensor)


def _values(tensor: Any) -> Array:
    if tensor.data_type == _STRING:
        values: Array = np.array([value.decode() for value in tensor.string_data], object)
    else:
        dtype, field = _DTYPES[tensor.data_type]
        if tensor.HasField("raw_data"):
            values = np.frombuffer(tensor.raw_data, np.dtype(dtype).newbyteorder("<")).astype(dtype)
        elif tensor.data_type in _BITS:
            values = np.array(getattr(tensor, field), np.int64).astype(np.uint16).view(dtype)
        else:
            values = np.array(getattr(tensor, field)).astype(dtype)
    if any(size < 0 for size in tensor.dims) or math.prod(tensor.dims) != values.size:
        raise ValueError(f"it has {values.size} values for the shape {list(tensor.dims)}")
    return values.reshape(tuple(tensor.dims))
