"""A drawing as a page, as SVG, GraphML, JSON and text."""

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

from graphquant import api
from graphquant.visualize.drawing import model_drawing, neighborhood
from graphquant.visualize.graph_export import ascii_graph, graph_graphml, graph_json
from graphquant.visualize.svg import graph_svg
from graphquant.visualize.viewer_data import viewer_data, viewer_page

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from graphquant.visualize.drawing import Drawing

HOSTILE = "</script><script>alert(1)</script>\"'&amp;\x1b[31m\u2028\x00<!--"


@pytest.fixture
def hostile(tmp_path: Path) -> Drawing:
    """A quantized model whose ops, tensors, constants and attributes have hostile names."""
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
    return model_drawing(api.insert(path, rules="fixed_point").model)


@pytest.fixture
def quantized(samples: Path) -> Drawing:
    """A quantized sample model."""
    data = str(samples / "digits_cnn_calib.npz")
    return model_drawing(api.insert(samples / "digits_cnn.onnx", data=data, samples=8, validate=False).model)


def unpacked(text: str) -> dict[str, Any]:
    """The data in a page."""
    found = re.search(r'<script id="data"[^>]*>([^<]*)</script>', text)
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


def test_names_are_only_in_the_packed_data(hostile: Drawing) -> None:
    """The page has the two scripts it is made of and no other, whatever ops are called; the data has the names."""
    text = viewer_page(viewer_data(hostile))
    assert "alert" not in text
    assert text.count("<script") == text.count("</script") == 2
    assert HOSTILE in unpacked(text)["texts"]


def test_the_title_is_escaped(quantized: Drawing) -> None:
    """A file may be called anything too."""
    text = viewer_page({**viewer_data(quantized), "title": HOSTILE})
    assert "<script>alert" not in text
    assert text.count("<script") == 2


def test_the_policy_allows_only_this_script(quantized: Drawing) -> None:
    """The hashes in the policy are those of the script and the style in the page, and nothing else may be loaded."""
    text = viewer_page(viewer_data(quantized))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        inner = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert not re.search(r"(src|href)\s*=", text.split("<script>")[0])


def test_columns_are_consistent(quantized: Drawing) -> None:
    """Every column has an entry for each op, wire or constant; numbers of texts, annotations and groups exist."""
    data = unpacked(viewer_page(viewer_data(quantized, ["a note"])))
    assert (data["version"], data["notes"], data["planned"]) == (2, ["a note"], False)
    for column, count in (("ops", len(quantized.boxes)), ("wires", len(quantized.wires))):
        columns = [column for column in data[column].values() if isinstance(column, list)]
        assert {len(column) for column in columns} == {count}
    names = [data["texts"][number] for number in data["ops"]["name"]]
    assert names == [box.op.name for box in quantized.boxes]
    marked = [annotation for data in data["wires"]["annotations"].values() for annotation in data]
    assert max(marked) < len(data["annotations"])
    scale = next(
        annotation
        for annotation in quantized.annotations
        if annotation.params is not None and annotation.params.scale.size > 1
    )
    annotations = data["annotations"][quantized.annotations.index(scale)]
    assert np.array_equal(np.float32(annotations["scale"]), scale.params.scale)


def test_the_same_drawing_gives_the_same_bytes(samples: Path) -> None:
    """Loaded and drawn twice, the page and the picture are the same."""
    drawn = [model_drawing(api.load(samples / "digits_rnn.onnx")) for _ in range(2)]
    assert viewer_page(viewer_data(drawn[0])) == viewer_page(viewer_data(drawn[1]))
    assert graph_svg(drawn[0]) == graph_svg(drawn[1])


def test_non_finite_numbers_are_omitted(quantized: Drawing) -> None:
    """NaN and infinite scales, as a hostile TFLite file may have, become null."""
    odd = next(
        annotation
        for annotation in quantized.annotations
        if annotation.params is not None and annotation.params.scale.size > 1
    )
    odd.params.scale[:2] = np.nan, np.inf
    told = unpacked(viewer_page(viewer_data(quantized)))["annotations"][quantized.annotations.index(odd)]
    assert told["scale"][:2] == [None, None]
    assert None in told["ends"]


@pytest.mark.parametrize("which", ["hostile", "quantized"])
def test_svg_is_well_formed(which: str, request: pytest.FixtureRequest) -> None:
    """It parses as XML, has a box for each op and a curve for each wire, and the annotations that the wires have."""
    drawing = request.getfixturevalue(which)
    root = ET.fromstring(graph_svg(drawing))  # noqa: S314  # our own output
    name = "{http://www.w3.org/2000/svg}"
    classes = [one.get("class", "").split()[0] for one in root.iter() if one.get("class")]
    assert classes.count("box") == len(drawing.boxes)
    assert classes.count("wire") == len(drawing.wires)
    pills = sum(len(wire.annotations) for wire in drawing.wires)
    pills += sum(bool(one.annotations) for box in drawing.boxes for one in box.constants)
    assert classes.count("annotation") == pills
    assert not list(root.iter(f"{name}script"))


@pytest.mark.parametrize("which", ["hostile", "quantized"])
def test_graphml_is_read_by_networkx(which: str, request: pytest.FixtureRequest) -> None:
    """Nodes and edges come back, with type and quantization."""
    drawing = request.getfixturevalue(which)
    graph = nx.read_graphml(io.BytesIO(graph_graphml(drawing).encode()), force_multigraph=True)
    assert [data["type"] for _, data in graph.nodes(data=True)] == [box.op.type for box in drawing.boxes]
    assert graph.number_of_edges() == len(drawing.wires)
    marked = sorted(data["quantization"] for *_, data in graph.edges(data=True) if data["quantization"])
    assert len(marked) == sum(bool(wire.annotations) for wire in drawing.wires)


def test_json_has_the_numbers(quantized: Drawing) -> None:
    """Nodes, edges and quantization, by number."""
    data = json.loads(json.dumps(graph_json(quantized)))
    assert [node["name"] for node in data["nodes"]] == [box.op.name for box in quantized.boxes]
    for edge, wire in zip(data["edges"], quantized.wires, strict=True):
        assert (edge["source"], edge["target"], edge["quantization"]) == (
            wire.source,
            wire.target,
            list(wire.annotations),
        )
    for told, annotation in zip(data["quantization"], quantized.annotations, strict=True):
        assert np.array_equal(np.float32(told["scale"]), annotation.params.scale)


def _printed(drawing: Drawing, chosen: list[int], encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding)
    Console(file=stream, width=80, color_system=None, highlight=False, markup=False).print(ascii_graph(drawing, chosen))
    stream.flush()
    return raw.getvalue().decode(encoding)


def test_a_neighborhood_as_text(samples: Path) -> None:
    """An op a line, what passes as rails, quantized inputs below."""
    result = api.insert(samples / "digits_cnn.onnx", rules="fixed_point")
    drawing, chosen = neighborhood(model_drawing(result.model), "residual/add", 1)
    assert _printed(drawing, chosen) == (
        "● MaxPool  max_pool  ?x16x4x4\n"
        "│ ● Conv  residual_2/conv  ?x16x4x4\n"
        "│ │     weight: int8 0.0156 by rule kernel\n"
        "◉─╯ Add  residual/add  ?x16x4x4\n"
        "● Relu  residual/relu  ?x16x4x4\n"
    )


def test_ascii_graph_with_hostile_names(hostile: Drawing) -> None:
    """A terminal without more has signs that it knows; names cannot act on it."""
    text = _printed(hostile, [1], "ascii")
    assert text.splitlines()[0].startswith("* Input  x")
    assert "@ Conv" in text
    assert all(char.isprintable() or char == "\n" for char in text)


def test_many_outputs_fork(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """Each output that is read has its rail, until its last reader."""
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
    shown = cli("inspect", tmp_path / "fork.onnx", "--around", "split", "--hops", "9").stdout
    assert [line.split("  ")[0] for line in shown.splitlines()] == [
        "● Input",
        "◉ Split",
        "├─┼─╮",
        "│ ● │ Neg",
        "●─╯ │ Add",
        "●───╯ Add",
        "● Output",
    ]


def test_many_scales_are_sampled(quantized: Drawing) -> None:
    """A weight in blocks may have a million scales: the page has two thousand, their number, and the ends."""
    place, annotation = next((at, one) for at, one in enumerate(quantized.annotations) if one.params is not None)
    scale = np.linspace(1, 2, 100_000, dtype=np.float32)
    zero = np.arange(100_000) % 7
    quantized.annotations[place] = replace(
        annotation, params=replace(annotation.params, scale=scale, zero_point=zero, axis=0)
    )
    told = unpacked(viewer_page(viewer_data(quantized)))["annotations"][place]
    assert 1000 < len(told["scale"]) <= 2048
    assert (told["count"], told["ends"], told["zero"]) == (100_000, [1.0, 2.0], [0, 6])
