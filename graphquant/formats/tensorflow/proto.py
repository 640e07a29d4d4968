"""TensorFlow's protocol buffer messages without TensorFlow.

The messages are declared in `schema.txt`, a table of names and field numbers, and built into graphquant's own
descriptor pool. TensorFlow registers the same full names in the default pool. The pools are separate, so both can be
imported in one process, in either order. To assign a message to one of the other pool, convert it to bytes.

Message classes have the type `Any`, because their fields are known only at run time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from operator import itemgetter
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError, EncodeError

from graphquant.errors import ModelError

_FIELD_DESCRIPTOR: Any = descriptor_pb2.FieldDescriptorProto
_SCALAR_NAMES: Final = (
    "double float int64 uint64 int32 fixed64 fixed32 bool string bytes uint32 sfixed32 sfixed64 sint32 sint64"
)
_SCALAR_TYPES: Final[dict[str, int]] = {
    name: _FIELD_DESCRIPTOR.Type.Value(f"TYPE_{name.upper()}") for name in _SCALAR_NAMES.split()
}

# DataType values whose name is not the numpy-like name in upper case.
_DTYPE_NAMES: Final = {"DT_FLOAT": "float32", "DT_DOUBLE": "float64", "DT_HALF": "float16"}
_REF_OFFSET: Final = 100


class _SchemaBuilder:
    """Builds file descriptors from the lines of `schema.txt`, whose header describes the format."""

    def __init__(self, lines: list[str]) -> None:
        self.files: list[Any] = []
        self._scopes: dict[str, Any] = {}
        self._enums: set[str] = set()
        self._current: Any = None
        rows = [words for line in lines if (words := line.split()) and not words[0].startswith("#")]
        package = ""
        for kind, name, *_ in rows:  # enums come first, because a field's declaration depends on its type's kind
            if kind == "file":
                package = name
            elif kind == "enum":
                self._enums.add(f".{package}.{name}")
        for first, *rest in rows:
            self._add_row(first, rest)

    def _add_row(self, first: str, rest: list[str]) -> None:
        in_enum = isinstance(self._current, descriptor_pb2.EnumDescriptorProto)
        if first == "file":
            package, syntax = rest
            name = f"graphquant/{package.replace('.', '/')}_{syntax}.proto"
            self._scopes = {"": descriptor_pb2.FileDescriptorProto(name=name, package=package, syntax=syntax)}
            # Every file may use the types of those before it.
            self._scopes[""].dependency.extend(file.name for file in self.files)
            self.files.append(self._scopes[""])
        elif first in {"message", "enum"}:
            self._start_type(first, rest[0])
        elif first == "reserved" and rest[0].isdigit():
            # The end of a range is exclusive in messages and inclusive in enums.
            self._current.reserved_range.add(start=int(rest[0]), end=int(rest[0]) + (0 if in_enum else 1))
        elif first == "reserved":
            self._current.reserved_name.append(rest[0])
        elif in_enum:
            self._current.value.add(name=rest[0], number=int(first))
        else:
            self._add_field(int(first), *rest)

    def _start_type(self, kind: str, name: str) -> None:
        outer, _, leaf = name.rpartition(".")
        parent = self._scopes[outer]
        if kind == "enum":
            self._current = parent.enum_type.add(name=leaf)
        else:
            self._current = (parent.nested_type if outer else parent.message_type).add(name=leaf)
            self._scopes[name] = self._current

    def _add_field(self, number: int, name: str, *words: str) -> None:
        field = self._current.field.add(name=name, number=number, label=_FIELD_DESCRIPTOR.LABEL_OPTIONAL)
        if words[0] == "repeated":
            words = words[1:]
            field.label = _FIELD_DESCRIPTOR.LABEL_REPEATED
        kind, *options = words
        if kind.startswith("map<"):
            field.label = _FIELD_DESCRIPTOR.LABEL_REPEATED
            self._set_map_type(field, *kind[len("map<") : -1].split(","))
        else:
            self._set_type(field, kind)
        for key, _, value in (option.partition("=") for option in options):
            if key == "oneof":
                groups = [group.name for group in self._current.oneof_decl]
                if value not in groups:
                    self._current.oneof_decl.add(name=value)
                    groups.append(value)
                field.oneof_index = groups.index(value)
            else:
                setattr(field.options, key, True)

    def _set_type(self, field: Any, kind: str) -> None:
        if kind in _SCALAR_TYPES:
            field.type = _SCALAR_TYPES[kind]
            return
        full = f".{kind}" if kind.startswith("google.") else f".{self.files[-1].package}.{kind}"
        field.type = _FIELD_DESCRIPTOR.TYPE_ENUM if full in self._enums else _FIELD_DESCRIPTOR.TYPE_MESSAGE
        field.type_name = full

    def _set_map_type(self, field: Any, key: str, value: str) -> None:
        """Declare a map: a repeated message of key and value, named after the field, inside the field's message."""
        owner = next(scope for scope, message in self._scopes.items() if message is self._current)
        leaf = "".join(word[:1].upper() + word[1:] for word in field.name.split("_")) + "Entry"
        entry = self._current.nested_type.add(name=leaf)
        entry.options.map_entry = True
        for number, (name, kind) in enumerate((("key", key), ("value", value)), start=1):
            self._set_type(entry.field.add(name=name, number=number, label=_FIELD_DESCRIPTOR.LABEL_OPTIONAL), kind)
        self._set_type(field, f"{owner}.{leaf}")


POOL: Final = descriptor_pool.DescriptorPool()
for _file in _SchemaBuilder(files(__package__).joinpath("schema.txt").read_text(encoding="utf-8").splitlines()).files:
    POOL.AddSerializedFile(_file.SerializeToString())


def message_class(name: str) -> Any:
    """Return the class of TensorFlow's message with that name, for instance `SavedObjectGraph`."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"tensorflow.{name}"))


AttrValue: Final = message_class("AttrValue")
BundleEntryProto: Final = message_class("BundleEntryProto")
BundleHeaderProto: Final = message_class("BundleHeaderProto")
GraphDef: Final = message_class("GraphDef")
MetaGraphDef: Final = message_class("MetaGraphDef")
AssetFileDef: Final = message_class("AssetFileDef")
NameAttrList: Final = message_class("NameAttrList")
NodeDef: Final = message_class("NodeDef")
OpDef: Final = message_class("OpDef")
SavedModel: Final = message_class("SavedModel")
SaverDef: Final = message_class("SaverDef")
TensorProto: Final = message_class("TensorProto")
TensorShapeProto: Final = message_class("TensorShapeProto")
TrackableObjectGraph: Final = message_class("TrackableObjectGraph")
TypeSpecProto: Final = message_class("TypeSpecProto")
VariableDef: Final = message_class("VariableDef")
CondContextDef: Final = message_class("CondContextDef")
WhileContextDef: Final = message_class("WhileContextDef")

DataType: Final[dict[str, int]] = {
    value.name: value.number for value in POOL.FindEnumTypeByName("tensorflow.DataType").values
}
_NAMES_BY_NUMBER: Final = {
    number: _DTYPE_NAMES.get(name, name.removeprefix("DT_").lower())
    for name, number in DataType.items()
    if 0 < number < _REF_OFFSET
}


def dtype_name(data_type: int) -> str | None:
    """Return the numpy-like name of a `DataType` number, such as "float32", "bfloat16", "qint8" or "resource".

    A reference type has the name of the type that it refers to. DT_INVALID and undefined numbers give None.
    """
    return _NAMES_BY_NUMBER.get(data_type - _REF_OFFSET if data_type > _REF_OFFSET else data_type)


@contextmanager
def _translate_errors(problem: str) -> Iterator[None]:
    """Convert protobuf's errors into ModelErrors that state the problem and the reason."""
    try:
        yield
    # The text parser raises ParseError, and passes on errors from decoding strings and expanded Any values.
    except (text_format.ParseError, DecodeError, EncodeError, ValueError, TypeError, RecursionError) as error:
        too_deep = isinstance(error, RecursionError)
        reason = "it nests too deeply" if too_deep else str(error).strip().rstrip(".") or type(error).__name__
        raise ModelError(f"{problem}: {reason}.") from error


def parse_binary(data: bytes, message: Any, *, source: str = "the input") -> Any:
    """Replace the content of `message` by its binary form and return it; `source` names the data in errors.

    Undeclared fields are preserved. Raises a ModelError if the bytes are not such a message, or nest deeper than
    protobuf's limit (100).
    """
    with _translate_errors(f"{source} is not a readable {message.DESCRIPTOR.full_name}"):
        message.ParseFromString(data)
    return message


def parse_text(text: str, message: Any, *, source: str = "the input") -> Any:
    """Replace the content of `message` by protobuf's text format and return it; `source` names the text in errors.

    Raises a ModelError if the text is not such a message (the error has line and column), or nests too deeply.
    """
    message.Clear()
    with _translate_errors(f"{source} is not a {message.DESCRIPTOR.full_name} in text format"):
        text_format.Parse(text, message, descriptor_pool=POOL)
    return message


def to_binary(message: Any) -> bytes:
    """Return the binary form. Equal messages give equal bytes, as map entries are sorted by key.

    Raises a ModelError if the message is larger than 2 GiB or nests deeper than protobuf's limit (100).
    """
    with _translate_errors(f"A {message.DESCRIPTOR.full_name} cannot be written"):
        data: bytes = message.SerializeToString(deterministic=True)
    return data


def to_text(message: Any) -> str:
    """Return the message in protobuf's text format; `parse_text` restores an equal message.

    Raises a ModelError if the message nests too deeply, or the content of an Any does not match its type URL.
    """
    with _translate_errors(f"A {message.DESCRIPTOR.full_name} cannot be written as text"):
        return text_format.MessageToString(message, descriptor_pool=POOL)


def all_nodes(graph_def: Any) -> Iterator[Any]:
    """Yield the nodes of the main graph, then those of each function."""
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def split_inputs(node: Any) -> tuple[list[str], list[str]]:
    """Return the data inputs of a NodeDef and its control inputs, which start with "^"."""
    data: list[str] = []
    controls: list[str] = []
    for text in node.input:
        (controls if text.startswith("^") else data).append(text)
    return data, controls


def input_node(input_name: str) -> str:
    """Return the node that an input of a node names, `name`, `name:port` or `^name`."""
    return input_name.removeprefix("^").partition(":")[0]


def replace_nodes(field: Any, nodes: Iterable[Any]) -> None:
    """Refill a repeated field with `nodes`. They are copied first, because clearing the field frees its own nodes."""
    copies = GraphDef(node=nodes)
    del field[:]
    field.extend(copies.node)


def function_attrs(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield a node's references to functions (NameAttrList) by attribute, in alphabetical order."""
    functions = []
    for key, value in node.attr.items():
        kind = value.WhichOneof("value")
        if kind == "func":
            functions.append((key, value.func))
        elif kind == "list":
            functions += [(key, function) for function in value.list.func]
    yield from sorted(functions, key=itemgetter(0))
