"""Exports of a drawing: page, SVG, GraphML, JSON and ASCII graph."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import xml.etree.ElementTree as ET
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

import graphquant as gq
from graphquant.visualize.drawing import model_drawing, neighborhood
from graphquant.visualize.graph_export import AsciiGraph, graph_graphml, graph_json, graph_svg
from graphquant.visualize.viewer_data import viewer_data, viewer_page

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from graphquant.visualize.drawing import Drawing

HOSTILE = "</script><script>alert(1)</script>\"'&amp;\x1b[31m\u2028\x00<!--"


@pytest.fixture
def hostile_drawing(tmp_path: Path) -> Drawing:
    """Return the drawing of a model with hostile names of ops, tensors, constants and attributes."""
    weight = numpy_helper.from_array(np.ones((4, 3, 1, 1), np.float32), f"{HOSTILE}w")
    nodes = [
        helper.make_node("Conv", ["x", f"{HOSTILE}w"], [f"{HOSTILE}y"], name=HOSTILE, auto_pad=HOSTILE),
        helper.make_node("Relu", [f"{HOSTILE}y"], ["z"], name=f"{HOSTILE}/relu"),
        helper.make_node("Neg", ["z"], ["n"], name=f"{HOSTILE}/neg"),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 4, 4])]
    outputs = [helper.make_tensor_value_info("n", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "hostile", inputs, outputs, [weight])
    path = tmp_path / "hostile.onnx"
    path.write_bytes(helper.make_model(graph, ir_version=9).SerializeToString())
    return model_drawing(gq.insert(path, rules="fixed_point").model)


@pytest.fixture
def quantized_drawing(samples: Path) -> Drawing:
    """Return the drawing of a quantized sample model."""
    data = str(samples / "digits_cnn_calib.npz")
    return model_drawing(gq.insert(samples / "digits_cnn.onnx", data=data, samples=8, validate=False).model)


def unpack_data(text: str) -> dict[str, Any]:
    """Return the data in a page."""
    match = re.search(r'<script id="data"[^>]*>([^<]*)</script>', text)
    return json.loads(zlib.decompress(base64.b64decode(match[1])))


def test_names_are_only_in_the_packed_data(hostile_drawing: Drawing) -> None:
    """The page has only its own two scripts. Names are only in the packed data."""
    text = viewer_page(viewer_data(hostile_drawing))
    assert "alert" not in text
    assert text.count("<script") == text.count("</script") == 2
    assert HOSTILE in unpack_data(text)["texts"]


def test_title_is_escaped(quantized_drawing: Drawing) -> None:
    """Markup in the title is escaped."""
    text = viewer_page({**viewer_data(quantized_drawing), "title": HOSTILE})
    assert "<script>alert" not in text
    assert text.count("<script") == 2


def test_policy_allows_only_own_script_and_style(quantized_drawing: Drawing) -> None:
    """The policy has the hashes of the page's script and style, and forbids everything else."""
    text = viewer_page(viewer_data(quantized_drawing))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert not re.search(r"(src|href)\s*=", text.split("<script>")[0])


def test_columns_are_consistent(quantized_drawing: Drawing) -> None:
    """Each column has an entry per op, wire or constant. References to texts and annotations are valid."""
    data = unpack_data(viewer_page(viewer_data(quantized_drawing, ["a note"])))
    assert (data["version"], data["notes"], data["planned"]) == (2, ["a note"], False)
    for column, count in (("ops", len(quantized_drawing.boxes)), ("wires", len(quantized_drawing.wires))):
        columns = [column for column in data[column].values() if isinstance(column, list)]
        assert {len(column) for column in columns} == {count}
    names = [data["texts"][number] for number in data["ops"]["name"]]
    assert names == [box.op.name for box in quantized_drawing.boxes]
    annotation_numbers = [annotation for data in data["wires"]["annotations"].values() for annotation in data]
    assert max(annotation_numbers) < len(data["annotations"])
    scale = next(
        annotation
        for annotation in quantized_drawing.annotations
        if annotation.params is not None and annotation.params.scale.size > 1
    )
    annotations = data["annotations"][quantized_drawing.annotations.index(scale)]
    assert np.array_equal(np.float32(annotations["scale"]), scale.params.scale)


def test_exports_are_reproducible(samples: Path) -> None:
    """Two drawings of one file give the same page and SVG."""
    drawings = [model_drawing(gq.load(samples / "digits_rnn.onnx")) for _ in range(2)]
    assert viewer_page(viewer_data(drawings[0])) == viewer_page(viewer_data(drawings[1]))
    assert graph_svg(drawings[0]) == graph_svg(drawings[1])


def test_non_finite_numbers_are_omitted(quantized_drawing: Drawing) -> None:
    """NaN and infinite scales, possible in a hostile TFLite file, become null."""
    non_finite = next(
        annotation
        for annotation in quantized_drawing.annotations
        if annotation.params is not None and annotation.params.scale.size > 1
    )
    non_finite.params.scale[:2] = np.nan, np.inf
    exported = unpack_data(viewer_page(viewer_data(quantized_drawing)))["annotations"][
        quantized_drawing.annotations.index(non_finite)
    ]
    assert exported["scale"][:2] == [None, None]
    assert None in exported["ends"]


@pytest.mark.parametrize("drawing_fixture", ["hostile_drawing", "quantized_drawing"])
def test_svg_is_well_formed(drawing_fixture: str, request: pytest.FixtureRequest) -> None:
    """The SVG is XML with an element per box, wire and annotation, and has no script."""
    drawing = request.getfixturevalue(drawing_fixture)
    root = ET.fromstring(graph_svg(drawing))  # noqa: S314  # our own output
    name = "{http://www.w3.org/2000/svg}"
    classes = [element.get("class", "").split()[0] for element in root.iter() if element.get("class")]
    assert classes.count("box") == len(drawing.boxes)
    assert classes.count("wire") == len(drawing.wires)
    pills = sum(len(wire.annotations) for wire in drawing.wires)
    pills += sum(bool(constant.annotations) for box in drawing.boxes for constant in box.constants)
    assert classes.count("annotation") == pills
    assert not list(root.iter(f"{name}script"))


@pytest.mark.parametrize("drawing_fixture", ["hostile_drawing", "quantized_drawing"])
def test_graphml_is_read_by_networkx(drawing_fixture: str, request: pytest.FixtureRequest) -> None:
    """NetworkX reads the nodes and edges with types and quantization."""
    drawing = request.getfixturevalue(drawing_fixture)
    graph = nx.read_graphml(io.BytesIO(graph_graphml(drawing).encode()), force_multigraph=True)
    assert [data["type"] for _, data in graph.nodes(data=True)] == [box.op.type for box in drawing.boxes]
    assert graph.number_of_edges() == len(drawing.wires)
    quantization = sorted(data["quantization"] for *_, data in graph.edges(data=True) if data["quantization"])
    assert len(quantization) == sum(bool(wire.annotations) for wire in drawing.wires)


def test_json_export(quantized_drawing: Drawing) -> None:
    """The JSON has the drawing's nodes, edges and quantization parameters."""
    data = json.loads(json.dumps(graph_json(quantized_drawing)))
    assert [node["name"] for node in data["nodes"]] == [box.op.name for box in quantized_drawing.boxes]
    for edge, wire in zip(data["edges"], quantized_drawing.wires, strict=True):
        assert (edge["source"], edge["target"], edge["quantization"]) == (
            wire.source,
            wire.target,
            list(wire.annotations),
        )
    for exported, annotation in zip(data["quantization"], quantized_drawing.annotations, strict=True):
        assert np.array_equal(np.float32(exported["scale"]), annotation.params.scale)


def _print_ascii_graph(drawing: Drawing, chosen: list[int], encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding)
    Console(file=stream, width=80, color_system=None, highlight=False, markup=False).print(AsciiGraph(drawing, chosen))
    stream.flush()
    return raw.getvalue().decode(encoding)


def test_ascii_graph(samples: Path) -> None:
    """The ASCII graph has a line per op, rails for other tensors, and quantized constants below their op."""
    result = gq.insert(samples / "digits_cnn.onnx", rules="fixed_point")
    drawing, chosen = neighborhood(model_drawing(result.model), "residual/add", 1)
    assert _print_ascii_graph(drawing, chosen) == (
        "● MaxPool  max_pool  ?x16x4x4\n"
        "│ ● Conv  residual_2/conv  ?x16x4x4\n"
        "│ │     weight: int8 0.01562 by rule kernel\n"
        "◉─╯ Add  residual/add  ?x16x4x4\n"
        "● Relu  residual/relu  ?x16x4x4\n"
    )


def test_ascii_graph_with_hostile_names(hostile_drawing: Drawing) -> None:
    """An ASCII terminal gets ASCII signs, and names cannot write control characters."""
    text = _print_ascii_graph(hostile_drawing, [1], "ascii")
    assert text.splitlines()[0].startswith("* Input  x")
    assert "@ Conv" in text
    assert all(char.isprintable() or char == "\n" for char in text)


def test_many_outputs_fork(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """Each output has a rail up to its last consumer."""
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b", "c"], name="split", axis=0),
        helper.make_node("Neg", ["b"], ["n"], name="neg"),
        helper.make_node("Add", ["a", "n"], ["s"], name="first"),
        helper.make_node("Add", ["s", "c"], ["y"], name="second"),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "fork", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]), tmp_path / "fork.onnx")
    output = cli("inspect", tmp_path / "fork.onnx", "--around", "split", "--hops", "9").stdout
    assert [line.split("  ")[0] for line in output.splitlines()] == [
        "● Input",
        "◉ Split",
        "├─┼─╮",
        "│ ● │ Neg",
        "●─╯ │ Add",
        "●───╯ Add",
        "● Output",
    ]


def test_many_scales_are_sampled(quantized_drawing: Drawing) -> None:
    """The page has at most 2048 of many scales, with their number and extremes."""
    number, annotation = next(item for item in enumerate(quantized_drawing.annotations) if item[1].params is not None)
    scale = np.linspace(1, 2, 100_000, dtype=np.float32)
    zero = np.arange(100_000) % 7
    quantized_drawing.annotations[number] = replace(
        annotation, params=replace(annotation.params, scale=scale, zero_point=zero, axis=0)
    )
    exported = unpack_data(viewer_page(viewer_data(quantized_drawing)))["annotations"][number]
    assert 1000 < len(exported["scale"]) <= 2048
    assert (exported["count"], exported["ends"], exported["zero"]) == (100_000, [1.0, 2.0], [0, 6])
