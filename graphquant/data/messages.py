"""The protocol buffer messages that calibration data comes in, in a pool of their own.

They are declared here by field numbers, so that reading them needs neither TensorFlow nor onnx.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD: Final[Any] = descriptor_pb2.FieldDescriptorProto

_MESSAGES: Final[dict[str, tuple[tuple[int, str, str, bool], ...]]] = {
    # number, name, type (a scalar's or a message's), repeated
    "BytesList": ((1, "value", "bytes", True),),
    "FloatList": ((1, "value", "float", True),),
    "Int64List": ((1, "value", "int64", True),),
    "Feature": (
        (1, "bytes_list", "BytesList", False),
        (2, "float_list", "FloatList", False),
        (3, "int64_list", "Int64List", False),
    ),
    # A map is this on the wire; keys are checked where it is read.
    "Entry": ((1, "key", "bytes", False), (2, "value", "Feature", False)),
    "Features": ((1, "feature", "Entry", True),),
    "Example": ((1, "features", "Features", False),),
    "Tensor": (
        (1, "dims", "int64", True),
        (2, "data_type", "int32", False),
        (3, "segment", "bytes", False),
        (4, "float_data", "float", True),
        (5, "int32_data", "int32", True),
        (6, "string_data", "bytes", True),
        (7, "int64_data", "int64", True),
        (8, "name", "bytes", False),
        (9, "raw_data", "bytes", False),
        (10, "double_data", "double", True),
        (11, "uint64_data", "uint64", True),
        (14, "data_location", "int32", False),
    ),
}


def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="graphquant/data.proto", package="data", syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, kind, repeated in fields:
            added = message.field.add(name=field, number=number)
            added.label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            if kind in _MESSAGES:
                added.type, added.type_name = _FIELD.TYPE_MESSAGE, f".data.{kind}"
            else:
                added.type = _FIELD.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL: Final = _pool()

Example: Final[Any] = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("data.Example"))
Tensor: Final[Any] = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("data.Tensor"))
