"""TFLite files load without TensorFlow; damaged ones are refused with a plain message."""

from __future__ import annotations

import json
import random
import struct
from contextlib import suppress

import numpy as np
import pytest
from support.tflite_files import Writer, ints

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.errors import ModelError
from graphquant.formats.tflite import parse_tflite
from graphquant.ir import TensorRef, Use, check_invariants


def places_far_data(data: bytes) -> bytes:
    """Return `data` with the last buffer's bytes after the FlatBuffer, at the offset that refers to them."""
    at = data.index(struct.pack("<Q", 1 << 40))
    return data[:at] + struct.pack("<Q", len(data)) + data[at + 8 :] + np.array([1.5, -2], np.float32).tobytes()


def test_file_that_is_truncated_after_loading(build_tflite, full_tflite_model, tmp_path):
    """Constants can still be read."""
    path = tmp_path / "a.tflite"
    path.write_bytes(places_far_data(build_tflite(full_tflite_model)))
    model = gq.load(path)
    path.write_bytes(b"")
    np.testing.assert_array_equal(model.main.op("far").read_value(), np.array([1.5, -2], np.float32))


def test_all_parts_of_a_model_are_read(build_tflite, full_tflite_model):
    """Ops are named after their first output; constants, variables, custom ops and other graphs are loaded."""
    model = parse_tflite(places_far_data(build_tflite(full_tflite_model)))
    check_invariants(model, "the test")
    main = model.main
    kinds = [(op.name, op.kind, op.type) for op in main.ops()]
    assert kinds == [
        ("x", "input", "Input"),
        ("w", "constant", "Constant"),
        ("four", "constant", "Constant"),
        ("state", "variable", "Variable"),
        ("far", "constant", "Constant"),
        ("y", "gemm", "FULLY_CONNECTED"),
        ("y_1", "other", "My_Op"),
        ("WHILE", "while", "WHILE"),
        ("@y", "output", "Output"),
    ]
    assert main.slots("y") == [TensorRef("", "x"), TensorRef("", "w"), None]
    assert main.source_of(Use("", "@y", 0)) == TensorRef("", "y_1")
    assert (main.op("y").role(2), main.op("y").channel_axis) == ("bias", 0)
    assert [(call.attr, call.graph, call.offset, call.loop) for call in main.op("WHILE").calls] == [
        ("cond", "body", None, True),
        ("body", "body", 0, True),
    ]
    assert (list(model.graphs), model.reachable_graphs()) == (["", "body"], ["", "body"])
    assert main.op("x").outputs[0].shape == (None, 2)


def test_constants_are_read_lazily(build_tflite, full_tflite_model):
    """Int8, packed int4, and data after the FlatBuffer as in files over 2 GB."""
    main = parse_tflite(places_far_data(build_tflite(full_tflite_model))).main
    values = {op.name: op.read_value for op in main.ops() if op.kind == "constant"}
    np.testing.assert_array_equal(values["w"](), np.array([[1, 2], [3, -4]], np.int8))
    assert values["four"]().astype(int).tolist() == [-1, 1, 7]
    assert values["far"]().tolist() == [1.5, -2.0]
    assert main.op("state").read_value is None


def test_scales_belong_to_tensors(build_tflite, full_tflite_model):
    """The summary lists every tensor with its scale and zero point, in the order of the file."""
    summary = summarize_model(parse_tflite(places_far_data(build_tflite(full_tflite_model))))
    assert [tensor.stored.index for tensor in summary.tensors] == [0, 1, 2, 3, 4, 5, 6, 0]
    x, w = summary.tensors[:2]
    assert (x.output.dtype, x.stored.scale.tolist(), x.stored.zero_point.tolist()) == (
        "int8",
        [float(np.float32(0.1))],
        [-3],
    )
    assert (w.stored.scale.tolist(), w.stored.axis, w.stored.low.tolist(), w.stored.details) == (
        [0.5, 0.25],
        0,
        [-1.0, -2.0],
        "blockwise",
    )
    assert summary.quantization_ops == ()
    assert [(covered.op, covered.quantized) for covered in summary.coverage] == [("y", True)]


def blockwise_file(
    values: np.ndarray, sizes: tuple[int, ...], zeros: np.ndarray | None = None, **details: int
) -> bytes:
    """A file with the int4 weight `w`, whose scales are in the tensor `s` and whose zero points are in `z`."""
    tensors = [
        {"name": "x", "shape": ints(1, sizes[-1])},
        {
            "name": "w",
            "shape": ints(*sizes),
            "type": ("b", 17),
            "buffer": ("I", 1),
            "quantization": {
                "details_type": ("B", 2),
                "details": {name: ("i", number) for name, number in {"scales": 2, **details}.items()},
            },
        },
        {"name": "s", "shape": ints(*values.shape), "type": ("b", 1), "buffer": ("I", 2)},
    ]
    buffers = [{}, {"data": np.full(np.prod(sizes) // 2, 0x7F, np.uint8)}, {"data": values.view(np.uint8).ravel()}]
    if zeros is not None:
        tensors.append({"name": "z", "shape": ints(*zeros.shape), "type": ("b", 9), "buffer": ("I", 3)})
        buffers.append({"data": zeros.ravel()})
    graph = {"tensors": tensors, "inputs": ints(0), "outputs": ints(0), "operators": []}
    return Writer().build({"buffers": buffers, "subgraphs": [graph]})


@pytest.mark.parametrize(
    ("sizes", "scales_shape", "axis"),
    [((4, 64), (4, 2), 1), ((64, 4), (2, 4), 0), ((4, 60), (4, 2), 1), ((4, 64), (8,), 1)],
)
@pytest.mark.parametrize("has_zeros", [False, True])
def test_scales_of_blocks_are_those_of_their_tensor(sizes, scales_shape, axis, has_zeros):
    """Each block of 32 elements has the scale that its tensor of scales holds, also if the last block is shorter."""
    scales = np.random.default_rng(0).uniform(0.01, 1, scales_shape).astype(np.float16)
    zeros = np.arange(8, dtype=np.int8).reshape(scales_shape) if has_zeros else None
    numbers = {"block_size": 32, "zero_points": 3 if has_zeros else -1}
    model = parse_tflite(blockwise_file(scales, sizes, zeros, **numbers))
    (output,) = model.main.op("w").outputs
    stored = output.quantization
    assert (stored.axis, stored.block, stored.details) == (axis, 32, "blockwise")
    shape = (4, 2) if axis else (2, 4)
    np.testing.assert_array_equal(stored.scale, scales.reshape(shape))
    np.testing.assert_array_equal(stored.zero_point, np.zeros(shape) if zeros is None else zeros.reshape(shape))
    integers = model.main.op("w").read_value().astype(np.int64)
    assert set(integers.ravel()) == {-1, 7}


@pytest.mark.parametrize(
    ("scales_shape", "numbers"),
    [
        ((4, 3), {"block_size": 32}),
        ((4, 2), {"block_size": 0}),
        ((4, 2), {"block_size": 32, "scales": 0}),
        ((4, 2), {"block_size": 32, "scales": 9}),
        ((4, 2), {"block_size": 32, "zero_points": 1}),
    ],
)
def test_blocks_without_their_scales_are_damage(scales_shape, numbers):
    """The error names the tensor."""
    with pytest.raises(ModelError, match="'w'"):
        parse_tflite(blockwise_file(np.ones(scales_shape, np.float16), (4, 64), **numbers))


def test_inspect_shows_blocks(tmp_path, cli):
    """The table has the number, axis and size of the blocks, and JSON their scales."""
    path = tmp_path / "model.tflite"
    path.write_bytes(blockwise_file(np.float16([[0.5, 0.25], [1, 2]]), (2, 64), block_size=32, zero_points=-1))
    row = next(line.split() for line in cli("inspect", path).stdout.splitlines() if line.split()[:1] == ["w"])
    assert row[2:8] == ["int4[4]", "axis", "1", "by", "32", "0.25..2"]
    tensor = json.loads(cli("inspect", path, "--format", "json").stdout)["tensors"][1]
    assert tensor["quantization_parameters"] == {
        "scales": [[0.5, 0.25], [1.0, 2.0]],
        "zero_points": [[0, 0], [0, 0]],
        "quantized_dimension": 1,
        "block_size": 32,
    }


def test_inspect_shows_the_tensors(build_tflite, full_tflite_model, tmp_path, cli):
    """Text, JSON and DOT contain scales and zero points; JSON uses the interpreter's terms."""
    path = tmp_path / "model.tflite"
    path.write_bytes(places_far_data(build_tflite(full_tflite_model)))
    text = cli("inspect", path).stdout
    assert "7 tensors\n" in text
    assert "1 tensor in body" in text
    row = next(line for line in text.splitlines() if line.split()[:1] == ["w"])
    assert row.split() == ["w", "1", "int8[2]", "axis", "0", "0.25..0.5", "0", "[-2,", "2]", "[2,", "2]"]
    tensors = json.loads(cli("inspect", path, "--format", "json").stdout)["tensors"]
    assert tensors[1] == {
        "graph": "",
        "index": 1,
        "name": "w",
        "kind": "constant",
        "dtype": "int8",
        "shape": [2, 2],
        "shape_signature": [2, 2],
        "quantization": [0.0, 0],
        "quantization_parameters": {
            "scales": [0.5, 0.25],
            "zero_points": [0, 0],
            "quantized_dimension": 0,
            "block_size": 0,
        },
        "min": [-1.0, -2.0],
        "max": [1.0, 2.0],
        "details": "blockwise",
    }
    assert tensors[0]["quantization"] == [0.10000000149011612, -3]
    assert 'int8 scale 0.1 zp -3"' in cli("inspect", path, "--format", "dot").stdout


def test_a_file_is_not_rewritten(build_tflite, full_tflite_model, tmp_path, cli):
    """Insert and plan explain that TFLite files are read only, with an alternative."""
    path = tmp_path / "model.tflite"
    path.write_bytes(places_far_data(build_tflite(full_tflite_model)))
    for command in (["insert", path, "-o", tmp_path / "out.tflite"], ["plan", path]):
        assert "model.tflite is a TFLite model" in cli(*command, code=2).stderr
    assert not (tmp_path / "out.tflite").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["subgraphs"][0]["tensors"][0].update(type=("b", 77)), "unknown type 77"),
        (lambda m: m["subgraphs"][0]["tensors"][0].update(shape=np.array([-5], np.int32)), "has the shape [-5]"),
        (lambda m: m["subgraphs"][0]["tensors"][1].update(buffer=("I", 9)), "in buffer 9 of 4"),
        (lambda m: m["subgraphs"][0].update(inputs=np.array([9], np.int32)), "inputs 9 to 9"),
        (lambda m: m["subgraphs"][0].update(inputs=np.array([-1], np.int32)), "its inputs"),
        (lambda m: m["subgraphs"][0].update(inputs=np.array([0, 0], np.int32)), "tensor 0, 'x'"),
        (lambda m: m["subgraphs"][0]["operators"][0].update(opcode_index=("I", 9)), "code 9 of 3"),
        (
            lambda m: m["subgraphs"][0]["operators"][2]["builtin_options"].update(body_subgraph_index=("i", 2)),
            "WHILE runs graph 2 of 2",
        ),
        (lambda m: m["buffers"][3].update(size=("Q", 1 << 50)), "bytes at 1099511627776"),
        (lambda m: m.update(subgraphs=[]), "no graph"),
    ],
)
def test_inconsistent_files_are_refused(build_tflite, full_tflite_model, change, message):
    """Each inconsistency has its message."""
    change(full_tflite_model)
    with pytest.raises(ModelError, match=r"Export|cannot read") as error:
        parse_tflite(
            build_tflite(full_tflite_model)
            if "1099511627776" in message
            else places_far_data(build_tflite(full_tflite_model))
        )
    assert message in str(error.value)


def test_a_constant_of_the_wrong_size_is_refused_when_read(build_tflite, full_tflite_model):
    """Sizes in a file do not determine how much is read."""
    full_tflite_model["subgraphs"][0]["tensors"][1]["shape"] = np.array([1 << 30, 1 << 30], np.int32)
    model = parse_tflite(places_far_data(build_tflite(full_tflite_model)))
    with pytest.raises(ModelError, match="has 4 bytes, not"):
        model.main.op("w").read_value()


def test_no_tflite_model(tmp_path):
    """An empty file, another kind of file and the name of a folder are refused."""
    for data, message in (
        (b"", "The file is empty"),
        (b"PK\3\4" * 99, "not a TFLite model"),
        (b"ab", "not a TFLite model"),
    ):
        (tmp_path / "x.tflite").write_bytes(data)
        with pytest.raises(ModelError, match=message):
            gq.load(tmp_path / "x.tflite")


def test_endlessly_shared_tables_are_refused(build_tflite, full_tflite_model):
    """A small file whose thousands of graphs share one large graph is refused quickly."""
    body = full_tflite_model["subgraphs"][1]
    body["tensors"] = [{"name": f"tensor {number}"} for number in range(500)]
    full_tflite_model["subgraphs"] = [full_tflite_model["subgraphs"][0], *[body] * 5000]
    full_tflite_model["buffers"][3] = {}
    data = build_tflite(full_tflite_model)
    assert len(data) < 60_000
    with pytest.raises(ModelError, match=r"refer .*too often"):
        parse_tflite(data)


def use(data: bytes) -> None:
    """Inspect a file and read its constants; a ModelError is a valid result."""
    with suppress(ModelError):
        look(parse_tflite(data))


def look(model: gq.Model) -> None:
    """Inspect a model like `use`."""
    check_invariants(model, "the test")
    summarize_model(model)
    for graph in model.graphs.values():
        for op in graph.ops():
            if op.read_value is not None:
                op.read_value()


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_never_end_in_a_traceback(build_tflite, full_tflite_model, seed):
    """Truncated files, flipped bits and overwritten numbers give a model or a ModelError."""
    intact_bytes = places_far_data(build_tflite(full_tflite_model))
    dice = random.Random(seed)  # noqa: S311  # it only breaks files
    for _ in range(800):
        data = bytearray(intact_bytes)
        for _ in range(dice.choice((1, 1, 1, 4))):
            at = dice.randrange(len(data))
            if dice.random() < 0.5:
                data[at] ^= 1 << dice.randrange(8)
            else:
                data[at : at + 4] = dice.choice((b"\xff" * 4, b"\0" * 4, dice.randbytes(4), b"\xff\xff\xff\x7f"))
        if dice.random() < 0.3:
            del data[dice.randrange(len(data)) :]
        use(bytes(data))


def test_a_real_file_cut_or_flipped(shared):
    """A real model gives a model or a ModelError too."""
    intact_bytes = (shared / "kws/kws_int8.tflite").read_bytes()
    dice = random.Random(7)  # noqa: S311  # it only breaks files
    for _ in range(150):
        data = bytearray(intact_bytes)
        at = dice.choice((dice.randrange(400), dice.randrange(len(data))))
        data[at] ^= 1 << dice.randrange(8)
        cut = dice.randrange(len(data)) if dice.random() < 0.3 else len(data)
        use(bytes(data[:cut]))
