"""Geometry and type of the viewer, in a browser: nothing overlaps, starts off screen, or is too small to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.data_files import SAMPLE_DATA

import graphquant as gq
from graphquant.visualize.drawing import model_drawing
from graphquant.visualize.pages import notebook_html
from graphquant.visualize.viewer_data import box_label, viewer_data, viewer_page

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from graphquant.visualize.drawing import Drawing

pytestmark = pytest.mark.usefixtures("rules_alone")

OVERLAPS = """
(side) => {
  const { m, s } = viewer, boxes = [];
  const add = (name, left, top, width, height) => {
    boxes.push({ name, left, top, right: left + width, bottom: top + height });
  };
  for (let op = 0; op < m.count; op++) {
    if (s.hiddenBy(op) < 0 && m.side.op[op] & side) {
      add(m.full(op), s.x[op] - m.ops.width[op] / 2, s.boxTop(m.layer[op]), m.ops.width[op], BOX_HEIGHT);
    }
  }
  for (const { group, x, row, width } of s.boxes.values()) {
    add(`group ${group}`, x - width / 2, s.boxTop(row), width, BOX_HEIGHT);
  }
  for (const [row, { items }] of s.bands) {
    for (const { op, side: itemSide, left, width, up, height } of items) {
      if (itemSide & side) add(`annotation of ${m.full(op)}`, left, s.bandBottom(row) - up, width, height);
    }
  }
  m.frameParts.forEach((parts, group) => parts.forEach(({ top, blocks }, i) => {
    if (s.hidingGroup[group] >= 0) return;
    const left = blocks[0].left - 6 - 6 * m.groupExtents[group].deep;
    const y = s.boxTop(top) - LABEL_HEIGHT * s.lift[group][i];
    add(`label of ${m.text(m.group.label[group])}`, left, y, 20, LABEL_HEIGHT - 2);
  }));
  boxes.sort((a, b) => a.top - b.top);
  const overlaps = [];
  boxes.forEach((box, i) => {
    for (let j = i + 1; j < boxes.length && boxes[j].top < box.bottom - 0.5; j++) {
      const other = boxes[j];
      if (other.left < box.right - 0.5 && box.left < other.right - 0.5) overlaps.push(`${box.name} and ${other.name}`);
    }
  });
  return [boxes.length, overlaps];
}
"""
"""Return the number of boxes of a side (ops, groups, annotations, frame labels), and the pairs that overlap."""

MISPLACED = """
() => {
  const { s, view, canvas } = viewer, missing = [];
  const inView = (x, y) => x > 0 && x < canvas.clientWidth && y > 0 && y < canvas.clientHeight;
  for (const [row, { items }] of s.bands) {
    for (const { side, left, width, up } of items) {
      const top = s.bandBottom(row) - up;
      const isDrawn = (hit) => hit.y === top && hit.x >= left && hit.right <= left + width;
      if (!inView((left + width / 2) * view.k + view.x, top * view.k + view.y)) continue;
      if (!viewer.panes.some((pane) => pane.side & side && pane.hits.some(isDrawn))) missing.push([left, top]);
    }
  }
  return missing;
}
"""
"""Return the annotations and unfolded ops in view that are not drawn within the place of the scene."""

SMALLEST_TEXT = """
() => {
  const sizes = [], pixels = (font) => +/([\\d.]+)px/.exec(font)[1];
  for (const { ctx } of viewer.panes) {
    const fill = ctx.fillText;
    ctx.fillText = function (text, x, y) {
      if (text) sizes.push([pixels(ctx.font) * viewer.view.k, text]);
      fill.call(ctx, text, x, y);
    };
  }
  draw(viewer);
  for (const { ctx } of viewer.panes) delete ctx.fillText;
  const drawn = sizes.length;
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].map((child) => (child.nodeType === 3 ? child.data.trim() : "")).join("");
    if (text && node.getClientRects().length) sizes.push([pixels(getComputedStyle(node).fontSize), text]);
  }
  return [drawn, sizes.sort((a, b) => a[0] - b[0])[0]];
}
"""
"""Return the number of drawn texts, and the smallest text of the page with its size in pixels of the screen."""

BOXES_IN_VIEW = """
() => {
  const { m, s, view, canvas } = viewer, names = [];
  for (let op = 0; op < m.count; op++) {
    const x = s.x[op] * view.k + view.x, y = s.boxTop(m.layer[op]) * view.k + view.y;
    const half = (m.ops.width[op] / 2) * view.k, height = BOX_HEIGHT * view.k;
    const across = x >= half && x + half <= canvas.clientWidth;
    if (across && y >= 0 && y + height <= canvas.clientHeight) names.push(m.full(op));
  }
  return names;
}
"""
"""Return the ops whose boxes are completely in view."""

REAL_MODELS = (
    ("ultraface/version-RFB-320.onnx", "random:1"),
    ("silero_vad_16k_op15.onnx", "silero_vad.npz"),
    ("kws/saved_model", "random:1"),
    ("odd/yolox_nano.onnx", "random:1"),
    ("basic_pitch/nmp.onnx", "basic_pitch/calib.npz"),
    ("dtln/model_1.onnx", "dtln/model_1_calib.npz"),
)

STORED_SCALES = ("kws/kws_int8.tflite", "qlstm_tract.onnx")


def _write_page(drawing: Drawing, path: Path, **more: Any) -> Path:
    path.write_text(viewer_page(viewer_data(drawing, **more)), "utf-8")
    return path


def _check_overlaps(page: Any, sides: tuple[int, ...] = (3,)) -> None:
    """Check the folded and the unfolded page, each with all groups expanded and all collapsed."""
    for collapse in (False, True):
        for unfold in (False, True):
            page.evaluate(
                """([collapse, unfold]) => {
                  viewer.collapsed.clear();
                  viewer.unfolded.clear();
                  if (unfold) toggleUnfold(viewer);
                  rebuild(viewer);
                  if (collapse) collapseAll(viewer);
                }""",
                [collapse, unfold],
            )
            for side in sides:
                count, overlaps = page.evaluate(OVERLAPS, side)
                assert count
                assert overlaps == [], (collapse, unfold)
            page.evaluate("zoom(viewer, 1 / viewer.view.k); draw(viewer)")
            assert page.evaluate(MISPLACED) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE_DATA)
def test_boxes_of_a_sample_model_do_not_overlap(
    name: str, samples: Path, tmp_path: Path, open_viewer: Callable[..., Any]
) -> None:
    """Boxes, collapsed groups, unfolded ops and frame labels of a quantized sample model do not overlap."""
    result = gq.insert(samples / name, data=str(samples / SAMPLE_DATA[name]), samples=4, validate=False)
    page = open_viewer(_write_page(model_drawing(result.model), tmp_path / "page.html"))
    _check_overlaps(page)
    page.evaluate("expandAll(viewer); toggleUnfold(viewer); toggleUnfold(viewer)")
    assert page.evaluate("[...viewer.s.bands.values()].some(({ items }) => items.some((item) => item.ops))")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "data"), REAL_MODELS)
def test_boxes_of_a_real_model_do_not_overlap(
    name: str, data: str, shared: Path, tmp_path: Path, open_viewer: Callable[..., Any]
) -> None:
    """The same for real models: a detector, nested graphs, functions, joins of many tensors."""
    spec = data if ":" in data else str(shared / data)
    result = gq.insert(shared / name, data=spec, samples=1, validate=False)
    _check_overlaps(open_viewer(_write_page(model_drawing(result.model), tmp_path / "page.html")))


@pytest.mark.slow
@pytest.mark.parametrize("name", STORED_SCALES)
def test_boxes_of_a_quantized_model_do_not_overlap(
    name: str, shared: Path, tmp_path: Path, open_viewer: Callable[..., Any]
) -> None:
    """The same for models that other tools quantized."""
    _check_overlaps(open_viewer(_write_page(model_drawing(gq.load(shared / name)), tmp_path / "page.html")))


@pytest.mark.slow
def test_boxes_of_two_models_do_not_overlap(
    samples: Path, tmp_path: Path, open_viewer: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    """Unfolded ops at the same place on both sides do not overlap those of their own side."""
    source, data = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz"
    for number, rules in enumerate(("onnxruntime", "fixed_point")):
        cli("insert", source, "--data", data, "--rules", rules, "-o", tmp_path / f"{number}.onnx", "--no-validate")
    cli("diff", tmp_path / "0.onnx", tmp_path / "1.onnx", "--html", tmp_path / "page.html", code=1)
    _check_overlaps(open_viewer(tmp_path / "page.html"), sides=(1, 2))


@pytest.mark.slow
def test_unfolded_inputs_of_one_op_are_in_tiers(tmp_path: Path, open_viewer: Callable[..., Any]) -> None:
    """Thirty quantized inputs of one narrow op get as many tiers as overlap, next to a second such op."""
    inputs = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, [1, 2]) for i in range(60)]
    nodes = [
        helper.make_node("Concat", [f"x{i}" for i in range(30 * j, 30 * j + 30)], [f"y{j}"], axis=1) for j in (0, 1)
    ]
    outputs = [helper.make_tensor_value_info(f"y{j}", TensorProto.FLOAT, [1, 60]) for j in (0, 1)]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.save(model, tmp_path / "m.onnx")
    rules = '[scheme.int8]\nbits = 8\n[[rule]]\nname = "joined"\nconsumer = { kind = "concat" }\nquantize = "int8"\n'
    result = gq.insert(tmp_path / "m.onnx", rules=rules, data="random:1", samples=1, validate=False)
    page = open_viewer(_write_page(model_drawing(result.model), tmp_path / "page.html"))
    _check_overlaps(page)
    page.evaluate("expandAll(viewer)")
    assert max(page.evaluate("[...viewer.s.bands.values()].map(({ items }) => items.length)")) == 60


PAGES = ("digits_cnn.onnx", "digits_nested.onnx", "digits_rnn_saved_model")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_first_screen_is_readable(name: str, samples: Path, tmp_path: Path, open_viewer: Callable[..., Any]) -> None:
    """The first screen shows an input of the model, in text of at least 12 pixels, in the drawing and beside it."""
    result = gq.insert(samples / name, data=str(samples / SAMPLE_DATA[name]), samples=4, validate=False)
    page = open_viewer(_write_page(model_drawing(result.model), tmp_path / "page.html"))
    inputs = {op.name for op in result.model.main.ops() if op.kind == "input" and op.read_value is None}
    assert inputs & set(page.evaluate(BOXES_IN_VIEW))
    for action in (
        "0",
        "select(viewer, { kind: 'annotation', annotation: 0 }, { move: true })",
        "toggleUnfold(viewer)",
    ):
        page.evaluate(action)
        drawn, (size, text) = page.evaluate(SMALLEST_TEXT)
        assert drawn
        assert size >= 12 - 1e-6, text


@pytest.mark.slow
def test_small_model_fits(tmp_path: Path, samples: Path, open_viewer: Callable[..., Any]) -> None:
    """A model that fits at a readable zoom is shown as a whole."""
    model = gq.load(samples / "digits_cnn.onnx")
    drawing = model_drawing(model)
    page = open_viewer(_write_page(drawing, tmp_path / "page.html"), "stem/conv")
    page.evaluate("viewer.m.rows = 1; fitView(viewer, true)")
    assert page.evaluate("viewer.s.height * viewer.view.k <= viewer.canvas.clientHeight")


def _frames(page: Any, count: int, until: Callable[..., None]) -> list[Any]:
    frames = page.frames[1:]
    assert len(frames) == count
    for frame in frames:
        until(frame, "performance.getEntriesByName('drawn').length > 0 || window.viewer !== undefined")
    return frames


@pytest.mark.slow
@pytest.mark.parametrize("width", [700, 1000])
def test_no_cell_starts_off_screen(
    width: int, samples: Path, tmp_path: Path, browser: Any, until: Callable[..., None]
) -> None:
    """Each of several cells shows boxes, also one that is far below, and one in a hidden tab that is opened later."""
    names = ("digits_cnn.onnx", "digits_nested.onnx", "digits_rnn_saved_model", "digits_cnn.pb")
    cells = [notebook_html(gq.load(samples / name)) for name in names]
    hidden = f'<div id="tab" style="display:none">{cells[1]}</div>'
    (tmp_path / "notebook.html").write_text("<!DOCTYPE html>" + "".join(cells) + hidden, "utf-8")
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto((tmp_path / "notebook.html").as_uri())
    frames = _frames(page, len(names) + 1, until)
    page.evaluate("document.getElementById('tab').style.display = 'block'")
    for frame in frames:
        frame.frame_element().scroll_into_view_if_needed()
        until(frame, "viewer.canvas.width > 0")
        frame.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        assert len(frame.evaluate(BOXES_IN_VIEW)) >= 2
        assert frame.evaluate("viewer.canvas.clientHeight") >= 250
        assert frame.evaluate("document.documentElement.scrollWidth <= innerWidth")
        colors = "new Set(viewer.panes[0].ctx.getImageData(0, 0, viewer.canvas.width, viewer.canvas.height).data).size"
        assert frame.evaluate(colors) > 8
    page.close()


@pytest.mark.parametrize(
    ("op_type", "name", "label"),
    [
        ("Conv", "/layer1/layer1.0/conv1/Conv", "conv1"),
        ("Relu", "/layer1/layer1.0/relu/Relu", "relu"),
        ("Slice", "/stft/Slice_1", "stft/Slice_1"),
        ("Conv2D", "model/conv1/Conv2D", "conv1"),
        ("BiasAdd", "functional_1/dense/BiasAdd", "dense"),
        ("Add", "model/dense/BiasAdd", "dense"),
        ("Conv", "model/conv1/Conv2D__5", "conv1"),
        ("Conv", "conv1", "conv1"),
        ("Conv", "stem/conv", "stem/conv"),
        ("Squeeze", "Logits/SpatialSqueeze", "SpatialSqueeze"),
        ("Conv", "245", "backbone.stem"),
        ("Relu", "Relu", ""),
        ("Conv", "Conv_12", "backbone.stem"),
        ("Relu", "Relu_13", "Relu_13"),
        ("Relu", "123", "Relu 123"),
        ("Relu", "/layers/3/Relu", "layers/3"),
        ("CONV_2D", "net/act/Relu;net/bn/FusedBatchNormV3;net/conv/Conv2D", "act"),
    ],
)
def test_labels_are_the_authors_names(op_type: str, name: str, label: str) -> None:
    """A box is labeled with the name that the author of the model gave, not with the type that an exporter appended."""
    weight = numpy_helper.from_array(np.ones((4, 3, 1, 1), np.float32), "backbone.stem.weight")
    reads = ["x", "backbone.stem.weight"] if op_type == "Conv" else ["x"]
    node = helper.make_node(op_type, reads, ["y"], name=name, domain="" if op_type != "CONV_2D" else "tflite")
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, [1, 3, 4, 4]) for end in "xy"]
    model = helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:], [weight]), ir_version=9)
    boxes = model_drawing(gq.load(model)).boxes
    assert [box_label(box) for box in boxes if box.op.type == op_type] == [label]


def test_captured_variables_have_no_box(samples: Path) -> None:
    """Arguments of functions that always get the same variable are drawn on the op that reads them."""
    drawing = model_drawing(gq.load(samples / "digits_cnn_saved_model"))
    arguments = [box.op.name for box in drawing.boxes if box.op.type == "_Arg"]
    assert set(arguments) == {"image"}
    (conv,) = [box for box in drawing.boxes if box.op.name == "residual_1/conv"]
    assert [constant.role for constant in conv.constants] == ["weight"]


def test_narrow_types_are_one_annotation(samples: Path) -> None:
    """Max and Min, which limit 6-bit values before their quantization, are part of the annotation and have no box."""
    rules = """
[scheme.six]
bits = 6
zero = "symmetric"
scale = "power-of-two"
[[rule]]
name = "input"
consumer = { kind = "conv", input = "input" }
quantize = "six"
"""
    data = str(samples / "digits_cnn_calib.npz")
    result = gq.insert(samples / "digits_cnn.onnx", rules=rules, data=data, samples=4, validate=False)
    drawing = model_drawing(result.model)
    assert not [box.op.name for box in drawing.boxes if box.op.kind in {"max", "min"}]
    ops = [[op_type for op_type, _ in folded] for folded in drawing.folded_ops]
    assert ops
    assert all(types == ["Max", "Min", "QuantizeLinear", "DequantizeLinear"] for types in ops)
