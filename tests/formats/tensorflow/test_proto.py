"""The declared messages equal TensorFlow's own, and real models round-trip unchanged."""

from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import run_python
from support.shared_models import SHARED_MODELS, needs_shared_models

from graphquant.errors import ModelError
from graphquant.formats.tensorflow import proto

ROOT = Path(__file__).parents[3]
KWS = SHARED_MODELS / "kws" / "saved_model" / "saved_model.pb"
MTCNN = SHARED_MODELS / "mtcnn.pb"
SAVED_MODEL = ROOT / "sample_models/digits_cnn_saved_model/saved_model.pb"
real_models = pytest.mark.parametrize(
    ("path", "message_class"),
    [
        pytest.param(SAVED_MODEL, proto.SavedModel, id="digits_cnn_saved_model"),
        pytest.param(ROOT / "sample_models/digits_rnn.pb", proto.GraphDef, id="digits_rnn"),
        pytest.param(KWS, proto.SavedModel, id="kws", marks=needs_shared_models),
        pytest.param(MTCNN, proto.GraphDef, id="mtcnn", marks=needs_shared_models),
    ],
)


def describe_field(field: FieldDescriptor) -> tuple[object, ...]:
    """Return the declaration of a field."""
    kind = field.message_type or field.enum_type
    oneof = field.containing_oneof
    return (
        field.name,
        field.number,
        field.type,
        field.is_repeated,
        field.is_packed,
        field.json_name,
        field.has_presence,
        field.has_default_value,
        field.default_value if not field.is_repeated and not field.message_type else None,
        kind.full_name if kind else None,
        oneof.name if oneof else None,
        bool(field.message_type and field.message_type.GetOptions().map_entry),
        field.GetOptions().deprecated,
    )


def describe_enum(enum: EnumDescriptor) -> dict[str, object]:
    """Return an enum's values."""
    return {"closed": enum.is_closed, "values": [(value.name, value.number) for value in enum.values]}


def reserved(message: Descriptor) -> tuple[object, ...]:
    """Return the reserved numbers and names of a message."""
    declared = proto.descriptor_pb2.DescriptorProto()
    message.CopyToProto(declared)
    return [(reserved_range.start, reserved_range.end) for reserved_range in declared.reserved_range], list(
        declared.reserved_name
    )


def describe(message: Descriptor, into: dict[str, object]) -> None:
    """Return everything reachable from a message, by full name."""
    if message.full_name in into:
        return
    into[message.full_name] = (
        [describe_field(field) for field in message.fields],
        [(oneof.name, [field.name for field in oneof.fields]) for oneof in message.oneofs],
        reserved(message),
    )
    for field in message.fields:
        if field.message_type:
            describe(field.message_type, into)
        if field.enum_type:
            into[field.enum_type.full_name] = describe_enum(field.enum_type)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_declarations_equal_those_of_tensorflow():
    """Every message and field reachable from a model or checkpoint is declared as TensorFlow does."""
    pytest.importorskip("tensorflow")
    from google.protobuf import descriptor_pool
    from tensorflow.core.protobuf import saved_model_pb2, tensor_bundle_pb2  # noqa: F401

    theirs_pool = descriptor_pool.Default()
    roots = ("SavedModel", "OpList", "BundleHeaderProto", "BundleEntryProto", "SavedObjectGraph", "VariableDef")
    ours: dict[str, object] = {}
    theirs: dict[str, object] = {}
    for root in (*roots, "SavedResource", "RegisteredSaver", "VariantTensorDataProto"):
        describe(proto.POOL.FindMessageTypeByName(f"tensorflow.{root}"), ours)
        describe(theirs_pool.FindMessageTypeByName(f"tensorflow.{root}"), theirs)
    assert len(ours) > 90
    assert ours.keys() == theirs.keys()
    for name, declaration in theirs.items():
        assert ours[name] == declaration, name


@pytest.mark.slow
@pytest.mark.parametrize("path", [SAVED_MODEL, pytest.param(KWS, marks=needs_shared_models)], ids=["sample", "kws"])
@pytest.mark.parametrize("tensorflow_first", [True, False])
def test_bytes_equal_those_of_tensorflow_in_either_import_order(tensorflow_first, path):
    """Both sets of messages work in one process and serialize alike."""
    imports = [
        "from graphquant.formats.tensorflow import proto",
        "from tensorflow.core.protobuf.saved_model_pb2 import SavedModel as Theirs",
    ]
    code = "\n".join(
        [
            *(reversed(imports) if tensorflow_first else imports),
            "from google.protobuf import text_format",
            f"data = open({str(path)!r}, 'rb').read()",
            "theirs, ours = Theirs.FromString(data), proto.parse_binary(data, proto.SavedModel())",
            "assert theirs.SerializeToString(deterministic=True) == proto.to_binary(ours)",
            "assert text_format.MessageToString(theirs) == proto.to_text(ours)",
            "print('equal')",
        ]
    )
    assert run_python(code).strip() == "equal"


def test_tensorflow_is_not_imported():
    """Reading models does not import TensorFlow, which takes seconds."""
    code = (
        "import sys; from graphquant.formats.tensorflow import proto, checkpoint, ops;"
        " ops.builtin_table().find_spec('Add');"
        "print([name for name in sys.modules if name.split('.')[0] in ('tensorflow', 'keras')])"
    )
    assert run_python(code).strip() == "[]"


@real_models
def test_real_model_round_trips_in_binary(path, message_class):
    """A real model round-trips, and its serialization is deterministic."""
    data = path.read_bytes()
    message = proto.parse_binary(data, message_class())
    written = proto.to_binary(message)
    assert len(written) == len(data)
    assert proto.parse_binary(written, message_class()) == message
    assert proto.to_binary(proto.parse_binary(written, message_class())) == written


@pytest.mark.slow
@real_models
def test_real_model_round_trips_in_text(path, message_class):
    """The text form is as complete as the binary form."""
    message = proto.parse_binary(path.read_bytes(), message_class())
    read = proto.parse_text(proto.to_text(message), message_class())
    assert proto.to_binary(read) == proto.to_binary(message)


def test_unknown_fields_survive():
    """Undeclared fields of a newer TensorFlow are preserved."""
    newer = proto.to_binary(proto.NodeDef(name="n")) + b"\xa0\x06\x2a"  # field 100, varint 42
    assert proto.to_binary(proto.parse_binary(newer, proto.NodeDef())) == newer


def test_any_is_written_out_in_text():
    """An Any with a known type is readable in text."""
    graph = proto.MetaGraphDef()
    graph.meta_info_def.any_info.type_url = "type.googleapis.com/tensorflow.VersionDef"
    graph.meta_info_def.any_info.value = proto.to_binary(proto.message_class("VersionDef")(producer=7))
    text = proto.to_text(graph)
    assert "[type.googleapis.com/tensorflow.VersionDef]" in text
    assert proto.parse_text(text, proto.MetaGraphDef()) == graph


def test_any_that_does_not_hold_its_type_is_refused():
    """A damaged Any raises ModelError."""
    graph = proto.MetaGraphDef()
    graph.meta_info_def.any_info.type_url = "type.googleapis.com/tensorflow.VersionDef"
    graph.meta_info_def.any_info.value = b"\xff"
    with pytest.raises(ModelError, match="written as text"):
        proto.to_text(graph)


def nested_type(depth: int) -> bytes:
    """A FullTypeDef inside a FullTypeDef inside ..."""
    data = b""
    for _ in range(depth):
        size, length = len(data), b""
        while size > 0x7F:
            length += bytes([size & 0x7F | 0x80])
            size >>= 7
        data = b"\x12" + length + bytes([size]) + data
    return data


@pytest.mark.parametrize("depth", [200, 20_000])
def test_deep_nesting_is_refused(depth):
    """Deep nesting neither overflows the stack nor takes long."""
    with pytest.raises(ModelError, match=r"a\.pb .*tensorflow\.FullTypeDef"):
        proto.parse_binary(nested_type(depth), proto.message_class("FullTypeDef")(), source="a.pb")
    with pytest.raises(ModelError, match=r"a\.pbtxt .*tensorflow\.FullTypeDef"):
        proto.parse_text("args {" * depth, proto.message_class("FullTypeDef")(), source="a.pbtxt")


def test_text_error_tells_the_place():
    """The error for text contains line and column."""
    with pytest.raises(ModelError, match=r'a\.pbtxt .* 2:3 : .* no field named "nam"'):
        proto.parse_text("node {\n  nam: 1\n}", proto.GraphDef(), source="a.pbtxt")


@pytest.mark.parametrize(
    "text", ['node{name: "\\xff"}', "versions{producer: 99999999999}", "node{", "[a.b/c.D]{}", "\0"]
)
def test_bad_text_is_refused(text):
    """Invalid text of any kind raises ModelError."""
    with pytest.raises(ModelError):
        proto.parse_text(text, proto.GraphDef())


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_random_bytes_parse_or_are_refused(data):
    """Random bytes raise nothing but ModelError."""
    try:
        message = proto.parse_binary(data, proto.SavedModel())
        proto.parse_text(proto.to_text(message), proto.SavedModel())
    except ModelError:
        return


@given(st.text(alphabet="node{}[]:\"'\\1.af<>,;#\n value-attr/", max_size=80))
@settings(max_examples=300)
def test_random_text_parses_or_is_refused(text):
    """Random text raises nothing but ModelError."""
    try:
        proto.parse_text(text, proto.GraphDef())
    except ModelError:
        return


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("DT_FLOAT", "float32"),
        ("DT_HALF", "float16"),
        ("DT_BFLOAT16", "bfloat16"),
        ("DT_QINT8", "qint8"),
        ("DT_FLOAT_REF", "float32"),
        ("DT_RESOURCE", "resource"),
        ("DT_FLOAT8_E4M3FN", "float8_e4m3fn"),
        ("DT_INVALID", None),
    ],
)
def test_dtype_names(name, expected):
    """Types have numpy-like names."""
    assert proto.dtype_name(proto.DataType[name]) == expected


def test_dtype_name_of_an_unknown_number():
    """Undefined numbers have no name."""
    assert proto.dtype_name(99) is None
    assert proto.dtype_name(-1) is None
