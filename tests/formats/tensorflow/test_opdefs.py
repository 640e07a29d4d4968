"""The table of operations equals TensorFlow's registry, and nodes have TensorFlow's ports."""

import importlib.util
from pathlib import Path

import pytest
from support.shared_models import SHARED_MODELS, needs_shared_models

from graphquant.errors import ModelError
from graphquant.formats.tensorflow import ops, proto
from graphquant.formats.tensorflow.ops import ArgSpec

HERE = Path(__file__).parent
SAMPLES = HERE.parents[2] / "sample_models"
TABLE = ops.builtin_table()


def node_with_attrs(op: str, **attrs: object):
    """Return a node with these attributes: a DataType name, a number, or a list of DataType names each."""
    message = proto.NodeDef(name="n", op=op)
    for name, value in attrs.items():
        if isinstance(value, int):
            message.attr[name].i = value
        elif isinstance(value, str):
            message.attr[name].type = proto.DataType[value]
        else:
            message.attr[name].list.type.extend(proto.DataType[dtype_name] for dtype_name in value)
    return message


def op_def(**fields: object):
    """Return a custom operation named Mine."""
    return proto.OpDef(name="Mine", **fields)


def known_spec(name):
    """Return a known operation."""
    known = TABLE.find_spec(name)
    assert known is not None
    return known


def input_ports(message, table):
    """Return the input ports of a node, expanded like its outputs."""
    return ops._expand_ports(message, table.find_spec(message.op), table.find_spec(message.op).inputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_table_equals_the_registry_of_tensorflow():
    """Every operation in both tables is equal."""
    pytest.importorskip("tensorflow")
    spec = importlib.util.spec_from_file_location("generate_opdefs", HERE / "generate_opdefs.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    theirs = {op_def.name: ops._parse_op_def(op_def) for op_def in generator.registered_op_defs()}
    common = [name for name in TABLE._lines if name in theirs]
    assert len(common) > 1500
    for name in common:
        assert TABLE.find_spec(name) == theirs[name]
        assert generator.table_line(TABLE.find_spec(name)) == f"{name} {TABLE._lines[name]}"


def test_every_line_parses():
    """The whole table is well-formed: each argument has exactly one source of its type."""
    assert len(TABLE._lines) > 1900
    for name in TABLE._lines:
        spec = TABLE.find_spec(name)
        for arg in (*spec.inputs, *spec.outputs):
            assert arg.name.isidentifier()
            assert [arg.dtype, arg.type_attr, arg.type_list_attr].count("") == 2


def test_arguments_of_operations():
    """Some operations with arguments of every kind."""
    assert known_spec("MatMul").outputs == (ArgSpec("product", type_attr="T"),)
    assert known_spec("ConcatV2").inputs == (
        ArgSpec("values", type_attr="T", number_attr="N"),
        ArgSpec("axis", type_attr="Tidx"),
    )
    assert known_spec("IdentityN").outputs == (ArgSpec("output", type_list_attr="T"),)
    assert known_spec("VarHandleOp").outputs == (ArgSpec("resource", "resource"),)
    assert known_spec("Assign").inputs[0] == ArgSpec("ref", type_attr="T", is_ref=True)
    assert known_spec("NoOp").outputs == ()


def test_unknown_operation():
    """An unregistered operation has no known arguments."""
    assert TABLE.find_spec("Nope") is None
    with pytest.raises(ModelError, match="unknown operation, 'Nope'"):
        ops.output_ports(node_with_attrs("Nope"), TABLE)


def test_state():
    """Stateful operations are known."""
    assert known_spec("VarHandleOp").is_stateful
    assert not known_spec("MatMul").is_stateful


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (node_with_attrs("MatMul", T="DT_BFLOAT16"), [("product", 0, "bfloat16")]),
        (node_with_attrs("Split", T="DT_HALF", num_split=2), [("output", 0, "float16"), ("output", 1, "float16")]),
        (
            node_with_attrs("IdentityN", T=["DT_FLOAT", "DT_STRING"]),
            [("output", 0, "float32"), ("output", 1, "string")],
        ),
        (node_with_attrs("IdentityN", T=[]), []),
        (node_with_attrs("VarHandleOp"), [("resource", 0, "resource")]),
        (node_with_attrs("VariableV2", dtype="DT_FLOAT"), [("ref", 0, "float32")]),
        (node_with_attrs("Identity", T="DT_FLOAT_REF"), [("output", 0, "float32")]),
        (node_with_attrs("Shape"), [("output", 0, "int32")]),  # out_type has a default
        (node_with_attrs("Shape", out_type="DT_INT64"), [("output", 0, "int64")]),
        (
            node_with_attrs("QuantizeV2", T="DT_QINT8"),
            [("output", 0, "qint8"), ("output_min", 0, "float32"), ("output_max", 0, "float32")],
        ),
    ],
)
def test_output_ports(message, expected):
    """Attributes and their defaults determine the number and types of a node's ports."""
    before = proto.to_binary(message)
    assert ops.output_ports(message, TABLE) == expected
    assert proto.to_binary(message) == before


def test_input_ports():
    """Inputs are expanded like outputs."""
    ports = input_ports(node_with_attrs("ConcatV2", N=2, T="DT_FLOAT"), TABLE)
    assert ports == [("values", 0, "float32"), ("values", 1, "float32"), ("axis", 0, "int32")]


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (node_with_attrs("Split", T="DT_FLOAT", num_split=1 << 62), "more than 65536"),
        (node_with_attrs("Split", T="DT_FLOAT", num_split=65_537), "more than 65536"),
        (node_with_attrs("Split", T="DT_FLOAT", num_split=-1), "negative"),
        (node_with_attrs("Split", T="DT_FLOAT"), "attribute 'num_split'"),
        (node_with_attrs("Split", T="DT_FLOAT", num_split="DT_FLOAT"), "attribute 'num_split'"),
        (node_with_attrs("MatMul"), "attribute 'T'"),
        (node_with_attrs("MatMul", T="DT_INVALID"), "unknown type 0"),
        (node_with_attrs("IdentityN", T=["DT_INVALID"]), "unknown type 0"),
    ],
)
def test_absurd_attributes_are_refused(message, match):
    """Hostile attributes neither exhaust memory nor crash."""
    with pytest.raises(ModelError, match=match):
        ops.output_ports(message, TABLE)


def test_extend_adds_operations_and_changes_nothing():
    """Custom operations are only in the new table; TensorFlow's are unchanged."""
    mine = op_def(is_stateful=True)
    mine.output_arg.add(name="y", type_attr="T", number_attr="N")
    for name, kind in (("T", "type"), ("N", "int")):
        mine.attr.add(name=name, type=kind)
    mine.attr[0].default_value.type = proto.DataType["DT_UINT8"]
    mine.attr[1].default_value.i = 2
    table = TABLE.with_op_defs([mine, proto.OpDef(name="MatMul")])
    assert ops.output_ports(node_with_attrs("Mine"), table) == [("y", 0, "uint8"), ("y", 1, "uint8")]
    assert table.find_spec("MatMul") == TABLE.find_spec("MatMul")
    assert "Mine" in table
    assert "Mine" not in TABLE
    assert "Mine" not in ops.builtin_table()
    assert "Mine" in table.with_op_defs([])


def test_bad_definition_is_refused():
    """A definition without a type is refused; a default of the wrong kind is ignored."""
    untyped = op_def()
    untyped.output_arg.add(name="y")
    with pytest.raises(ModelError, match=r"argument 'y' .*type 0"):
        TABLE.with_op_defs([untyped]).find_spec("Mine")
    odd = op_def()
    odd.output_arg.add(name="y", type=1, number_attr="N")
    odd.attr.add(name="N").default_value.type = 1
    with pytest.raises(ModelError, match="attribute 'N'"):
        ops.output_ports(node_with_attrs("Mine"), TABLE.with_op_defs([odd]))


@pytest.mark.parametrize(
    ("saved_path", "frozen_path"),
    [
        (SAMPLES / "digits_cnn_saved_model", SAMPLES / "digits_cnn.pb"),
        (SAMPLES / "digits_rnn_saved_model", SAMPLES / "digits_rnn.pb"),
        pytest.param(
            SHARED_MODELS / "kws/saved_model",
            SHARED_MODELS / "mtcnn.pb",
            marks=needs_shared_models,
        ),
    ],
)
def test_every_node_of_real_models_has_as_many_inputs_as_its_operation(saved_path, frozen_path):
    """The table agrees with the inputs of models."""
    saved_model = proto.parse_binary(saved_path.joinpath("saved_model.pb").read_bytes(), proto.SavedModel())
    saved = saved_model.meta_graphs[0]
    frozen = proto.parse_binary(frozen_path.read_bytes(), proto.GraphDef())
    table = TABLE.with_op_defs(saved.meta_info_def.stripped_op_list.op)
    bodies = [function.node_def for function in saved.graph_def.library.function]
    for nodes in (saved.graph_def.node, frozen.node, *bodies):
        for graph_node in nodes:
            data_inputs = [name for name in graph_node.input if not name.startswith("^")]
            assert len(input_ports(graph_node, table)) == len(data_inputs), graph_node.name
            outputs = graph_node.attr["_output_shapes"].list.shape if "_output_shapes" in graph_node.attr else None
            assert outputs is None or len(ops.output_ports(graph_node, table)) == len(outputs), graph_node.name
