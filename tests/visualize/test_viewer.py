"""The viewer in a browser: search, values, folding, filters, links, keys, colors."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from support.data_files import SAMPLE_DATA

import graphquant as gq
from graphquant.api.plan import prepare_for_plan
from graphquant.visualize.annotations import annotation_text
from graphquant.visualize.drawing import plan_drawing, result_drawing
from graphquant.visualize.viewer_data import viewer_data, viewer_page

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("rules_alone")]

HOSTILE = "</script><script>alert(1)</script>\"'&amp;\x1b[31m\u2028%<!--"

READ_PANELS = """
(tensors) => tensors.map((tensor) => {
  const query = document.getElementById("query");
  query.value = tensor;
  query.dispatchEvent(new Event("input"));
  const matches = [];
  for (const button of document.querySelectorAll("#results button")) {
    if (button.querySelector("span").textContent !== tensor) continue;
    button.click();
    const annotation = viewer.selected.kind === "annotation" ? viewer.m.annotations[viewer.selected.annotation] : null;
    if (!annotation) continue;
    const rows = {};
    for (const row of document.querySelectorAll("#panel table:first-of-type tr")) {
      rows[row.querySelector("th").textContent] = row.querySelector("td").textContent;
    }
    matches.push([annotation.dtype, (annotation.scale || []).map(Math.fround), annotation.zero || [], rows]);
  }
  return matches;
})
"""
"""Search for each tensor, click each result with its name, and read the panel."""


@pytest.fixture
def digits_page(tmp_path: Path, samples: Path, cli: Callable[..., Any]) -> Path:
    """Return the page that `insert` writes for a sample model, with histograms."""
    source, data = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz"
    out, html = tmp_path / "digits.onnx", tmp_path / "digits.html"
    cli("insert", source, "--data", data, "-o", out, "--html", html)
    return html


def _hit(kind: str) -> str:
    """Return code that finds the last drawn "annotation" or "frame" and its middle on the screen."""
    return f"""
      const a = viewer, box = a.canvas.getBoundingClientRect(), hit = a.hits.find((part) => part.{kind} !== undefined);
      const middle = [box.left + a.view.x + (hit.x + hit.right) / 2 * a.view.k,
                      box.top + a.view.y + (hit.y + hit.bottom) / 2 * a.view.k];
    """


def _selected_title(page: Any) -> str:
    return page.locator("#panel h2").inner_text()


def _result_names(page: Any) -> list[str]:
    return page.locator("#results button span").all_inner_texts()


def _box_position(page: Any, op_expression: str) -> tuple[float, float]:
    """Return the middle of a box on the screen, for a JavaScript expression of its op."""
    return tuple(
        page.evaluate(
            f"""() => {{
              const a = viewer, op = {op_expression}, box = a.canvas.getBoundingClientRect();
              return [box.left + a.view.x + a.s.x[op] * a.view.k,
                      box.top + a.view.y + (a.s.boxTop(a.m.layer[op]) + 10) * a.view.k];
            }}"""
        )
    )


def _op_expression(name: str) -> str:
    return f"viewer.m.ops.name.findIndex((_, op) => viewer.m.full(op) === {json.dumps(name)})"


def _check_every_site(open_viewer: Callable[..., Any], cli: Callable[..., Any], model: Path) -> None:
    """Assert that search and panel show each quantized tensor with the values of `inspect --format json`.

    Functions that only Python code calls are not drawn.
    """
    html = model.parent / "page.html"
    cli("inspect", model, "--html", html)
    data = json.loads(cli("inspect", model, "--format", "json").stdout)
    drawn_graphs = set(gq.load(model).reachable_graphs())
    expected = [
        (_tensor_name(entry["tensor"]), entry) for entry in data["quantization"] if entry["graph"] in drawn_graphs
    ]
    expected += [
        (_tensor_name(entry), entry) for entry in data["tensors"] if entry["quantization_parameters"]["scales"]
    ]
    assert expected
    page = open_viewer(html)
    names = list(dict.fromkeys(name for name, _ in expected))
    results = dict(zip(names, page.evaluate(READ_PANELS, names), strict=True))
    for name, tensor in expected:
        stored = tensor.get("quantization_parameters")
        scales = stored["scales"] if stored else tensor.get("scale")
        if scales is None:
            assert any(rows["scale"].startswith("computed") for *_, rows in results[name]), name
            continue
        flat, zeros = np.ravel(scales).tolist(), np.ravel(stored["zero_points"] if stored else tensor["zero_point"])
        matching = [rows for dtype, shown, zero, rows in results[name] if (dtype, shown) == (tensor["dtype"], flat)]
        assert matching, name
        zero = np.unique(zeros)
        zero_text = f"{zero[0]}" if len(zero) == 1 else f"{zero[0]} to {zero[-1]}"
        assert any(rows["zero point"] == zero_text for rows in matching), name
        assert any(len(flat) > 1 or float(rows["scale"]) == flat[0] for rows in matching), name


def _tensor_name(tensor: dict[str, Any]) -> str:
    if "index" in tensor:
        return tensor["name"]
    return (
        f"{tensor['graph']}/{tensor['op']}:{tensor['port']}" if tensor["graph"] else f"{tensor['op']}:{tensor['port']}"
    )


@pytest.mark.parametrize("name", SAMPLE_DATA)
def test_search_finds_every_site_of_a_sample_model(
    name: str, samples: Path, tmp_path: Path, open_viewer: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    """Search finds each site by name, with type, scale and zero point."""
    result = gq.insert(samples / name, data=str(samples / SAMPLE_DATA[name]), samples=8, validate=False)
    _check_every_site(open_viewer, cli, result.save(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("ultraface/version-RFB-320.onnx", "random:1"),
        ("silero_vad_16k_op15.onnx", "silero_vad.npz"),
        ("kws/saved_model", "random:1"),
    ],
)
def test_search_finds_every_site_of_a_real_model(
    name: str, data: str, model_folder: Path, tmp_path: Path, open_viewer: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    """Search finds each site of a face detector, of nested graphs, and of a SavedModel with functions."""
    spec = data if ":" in data else str(model_folder / data)
    result = gq.insert(model_folder / name, data=spec, samples=1, validate=False)
    _check_every_site(open_viewer, cli, result.save(tmp_path / (model_folder / name).name))


@pytest.fixture
def model_path(request: pytest.FixtureRequest) -> Path:
    """Return the path of a model, from the fixture of its folder and its name."""
    folder, name = request.param
    return request.getfixturevalue(folder) / name


@pytest.mark.parametrize(
    "model_path",
    [
        ("stand_ins", "kws/kws_int8.tflite"),
        ("stand_ins", "qlstm_tract.onnx"),
        ("shared", "kws/kws_int8.tflite"),
        ("shared", "kws/kws_float.tflite"),
        ("shared", "qlstm_tract.onnx"),
    ],
    indirect=True,
)
def test_search_finds_every_stored_scale(
    model_path: Path, tmp_path: Path, open_viewer: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    """Search finds each scale of TFLite files and of a model quantized by other tools, inside of a Scan."""
    model = tmp_path / model_path.name
    model.write_bytes(model_path.read_bytes())
    _check_every_site(open_viewer, cli, model)


def test_annotation_panel(digits_page: Path, open_viewer: Callable[..., Any]) -> None:
    """The panel has rule, reason, scheme, histogram, clipped share, SQNR and the folded ops."""
    page = open_viewer(digits_page, "stem/relu:0")
    panel = page.locator("#panel").inner_text()
    annotation = page.evaluate("viewer.m.annotations[viewer.selected.annotation]")
    assert annotation["rule"]
    assert annotation["why"]
    for text in ("uint8 asymmetric, auto", annotation["rule"], annotation["why"], "clipped", "dB", "QuantizeLinear"):
        assert text in panel
    assert page.locator("#panel svg.plot path.in").count() == 1
    assert page.locator("#panel svg.plot rect.band").count() == 1


def test_per_channel_scales_are_a_plot(digits_page: Path, open_viewer: Callable[..., Any]) -> None:
    """The plot of per-channel scales has a bar for each channel."""
    page = open_viewer(digits_page, "stem/conv")
    page.locator("#panel button.pill", has_text="i8[8]").click()
    assert page.locator("#panel figure path.in").get_attribute("d").count("z") == 8
    assert "channels 0 to 7" in page.locator("#panel figcaption").inner_text()


def test_skip_reason_is_shown(tmp_path: Path, samples: Path, open_viewer: Callable[..., Any]) -> None:
    """The panels of an op and its wire show the reason of a skipped use."""
    result = gq.insert(
        samples / "digits_cnn.onnx", data=str(samples / "digits_cnn_calib.npz"), samples=8, validate=False
    )
    html = tmp_path / "page.html"
    html.write_text(viewer_page(viewer_data(result_drawing(result))), "utf-8")
    skip = next(skip for skip in result.skips if skip.uses)
    page = open_viewer(html, skip.uses[0].op)
    assert skip.reason in page.locator("#panel").inner_text()
    page.locator("#by-state").select_option("reason")
    assert skip.uses[0].op in _result_names(page)


def test_plan_is_labelled(tmp_path: Path, samples: Path, open_viewer: Callable[..., Any]) -> None:
    """The page of a plan is labelled so, shows schemes, and search finds each site."""
    model = gq.load(samples / "digits_cnn.onnx")
    plan = gq.plan(model)
    html = tmp_path / "plan.html"
    html.write_text(viewer_page(viewer_data(plan_drawing(prepare_for_plan(model, plan), plan))), "utf-8")
    page = open_viewer(html)
    assert "is a plan" in page.locator("#panel").inner_text()
    results = page.evaluate(READ_PANELS, [str(site.tensor) for site in plan.sites])
    for site, shown in zip(plan.sites, results, strict=True):
        assert any(rows["rule"] == site.rule and rows["type"] == site.scheme.type.name for *_, rows in shown)


def test_links_to_ops(digits_page: Path, open_viewer: Callable[..., Any], until: Callable[..., None]) -> None:
    """A link selects and shows its op, selections update the link, and unknown names are reported."""
    page = open_viewer(digits_page, "residual/add")
    assert _selected_title(page) == "residual/add"
    assert page.evaluate("viewer.view.k") >= 0.8
    x, y = _box_position(page, _op_expression("residual/add"))
    assert 0 < x < 960
    assert 40 < y < 820
    page.keyboard.press("ArrowDown")
    assert _selected_title(page) == "residual/relu"
    assert page.evaluate("location.hash") == "#op=residual%2Frelu"
    page.go_back()
    until(page, "document.querySelector('#panel h2').textContent === 'residual/add'")
    page.evaluate("location.hash = '#op=no%20such'")
    until(page, "document.querySelector('#panel h2').textContent === 'Not found'")


def test_search_by_keys(digits_page: Path, open_viewer: Callable[..., Any]) -> None:
    """Slash focuses the search, Enter and n go to the next result, Shift+Enter and p back, and Escape clears."""
    page = open_viewer(digits_page)
    page.keyboard.press("/")
    page.keyboard.type("residual/add")
    names = _result_names(page)
    assert names[0] == "residual/add:0" or names[0] == "residual/add"
    page.keyboard.press("Enter")
    first = _selected_title(page)
    page.keyboard.press("Enter")
    second = _selected_title(page)
    page.keyboard.press("Shift+Enter")
    assert _selected_title(page) == first
    page.locator("#graph").focus()
    page.keyboard.press("n")
    assert _selected_title(page) == second
    page.keyboard.press("p")
    assert _selected_title(page) == first
    page.keyboard.press("Escape")
    assert not page.locator("#results").is_visible()
    assert page.locator("#query").input_value() == ""
    assert _selected_title(page).startswith("digits_cnn")


def test_arrows_follow_wires(digits_page: Path, open_viewer: Callable[..., Any]) -> None:
    """Arrow keys go to producers, consumers and neighbors in the row."""
    page = open_viewer(digits_page, "stem/conv")
    page.keyboard.press("ArrowUp")
    assert _selected_title(page) == "stem/conv__6"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert _selected_title(page) == "stem/relu"
    page = open_viewer(digits_page, "branch_wide/bias_add")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert _selected_title(page) == "branch_wide/bias_add"


def test_filters(digits_page: Path, open_viewer: Callable[..., Any]) -> None:
    """Filters by state, rule, kind and SQNR hide other results and mark matching ops."""
    page = open_viewer(digits_page)
    page.locator("#by-kind").select_option("conv")
    convs = page.evaluate(
        "viewer.matches.filter((match) => match.kind === 'op').map((match) => viewer.m.type(match.op))"
    )
    assert set(convs) == {"Conv"}
    assert len(convs) == 6
    assert page.evaluate("viewer.matched.reduce((sum, matched) => sum + matched, 0)") == 6
    page.locator("#by-state").select_option("unquantized")
    assert _result_names(page) == []
    page.locator("#by-state").select_option("quantized")
    assert len(convs) == page.evaluate("viewer.matches.filter((match) => match.kind === 'op').length")
    page.keyboard.press("Escape")
    rule = page.evaluate("viewer.m.annotations.find((annotation) => annotation.rule).rule")
    page.locator("#by-rule").select_option(rule)
    annotations = page.evaluate(
        "viewer.matches.filter((match) => match.kind === 'annotation').map((match) =>"
        " viewer.m.annotations[match.annotation].rule)"
    )
    assert set(annotations) == {rule}
    page.keyboard.press("Escape")
    page.locator("#by-sqnr").fill("45")
    sqnr = page.evaluate(
        "viewer.matches.filter((match) => match.kind === 'annotation').map((match) =>"
        " viewer.m.annotations[match.annotation].sqnr)"
    )
    assert sqnr == sorted(sqnr)
    assert sqnr
    assert max(sqnr) < 45
    known = page.evaluate("viewer.m.annotations.map((annotation) => annotation.sqnr)")
    assert len(sqnr) == sum(value is not None and value < 45 for value in known)


def test_annotations_unfold_and_fold(
    digits_page: Path, open_viewer: Callable[..., Any], until: Callable[..., None]
) -> None:
    """An unfolded annotation shows its two ops above the consumer. The key u folds it, or unfolds all."""
    page = open_viewer(digits_page, "stem/conv__6:0")
    height = page.evaluate("viewer.s.height")
    page.get_by_role("button", name="Unfold", exact=True).click()
    assert page.evaluate("viewer.s.height") == height + page.evaluate("2 * OP_HEIGHT - PILL_HEIGHT")
    until(page, "viewer.hits.filter((hit) => hit.annotation === viewer.selected.annotation).length === 2")
    page.locator("#graph").focus()
    page.keyboard.press("u")
    assert page.evaluate("viewer.s.height") == height
    page.keyboard.press("Escape")
    page.keyboard.press("u")
    assert page.evaluate("viewer.unfolded.size === viewer.m.annotations.length")
    assert page.evaluate("viewer.s.height") > height + page.evaluate("2 * OP_HEIGHT - PILL_HEIGHT")
    page.keyboard.press("u")
    assert page.evaluate("viewer.s.height") == height


def test_groups_collapse_and_expand(
    digits_page: Path, open_viewer: Callable[..., Any], until: Callable[..., None]
) -> None:
    """The key c collapses the scope of the selected op to one box with wires. A link into it expands it."""
    page = open_viewer(digits_page, "stem/conv")
    height = page.evaluate("viewer.s.height")
    page.keyboard.press("c")
    assert page.evaluate(
        "[...viewer.s.boxes.values()].map((box) => viewer.m.text(viewer.m.group.label[box.group]))"
    ) == ["stem"]
    assert page.evaluate("viewer.s.height") < height
    assert page.evaluate("viewer.s.longWires.length") == 2
    assert "3 ops" in page.locator("#panel").inner_text()
    page.evaluate("location.hash = '#op=stem%2Frelu'")
    until(page, "viewer.s.boxes.size === 0")
    page.get_by_role("button", name="Collapse all groups").click()
    assert page.evaluate("viewer.s.boxes.size === viewer.m.group.parent.filter((parent) => parent < 0).length")
    page.locator("#graph").focus()
    page.keyboard.press("e")
    assert page.evaluate("viewer.s.height") == height


def test_nested_graphs_collapse(
    model_folder: Path, tmp_path: Path, open_viewer: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    """A collapsed nested graph is one box with the number of its ops, and keeps its wires."""
    cli("inspect", model_folder / "qlstm_tract.onnx", "--html", tmp_path / "page.html")
    page = open_viewer(tmp_path / "page.html")
    (group,) = page.evaluate("viewer.m.group.graph.flatMap((graph, group) => (graph ? [group] : []))")
    inside = page.evaluate(f"viewer.m.groupExtents[{group}].ops")
    page.get_by_role("button", name="Collapse all groups").click()
    visible = page.evaluate(
        "Array.from({ length: viewer.m.count }, (_, op) => viewer.s.hiddenBy(op)).filter((box) => box < 0).length"
    )
    assert visible == page.evaluate("viewer.m.count") - inside
    assert page.evaluate("viewer.s.longWires.length") >= 1


MISPLACED_OPS = """
() => {
  const { m } = viewer, misplaced = [];
  m.frameParts.forEach((parts, group) => {
    for (const { top, bottom, left, right } of parts.flatMap((part) => part.blocks)) {
      for (let row = top; row <= bottom; row++) {
        for (const op of m.inRow.of(row)) {
          let inner = m.ops.group[op];
          while (inner > group) inner = m.group.parent[inner];
          const half = m.ops.width[op] / 2, inside = m.x[op] + half > left && m.x[op] - half < right;
          if (inside !== (inner === group)) misplaced.push(`${m.full(op)} ${m.text(m.group.label[group])}`);
        }
      }
    }
  });
  return misplaced;
}
"""
"""Return ops inside of a frame of another group, and ops outside of the frame of their own group."""


@pytest.mark.parametrize(
    ("model_path", "frames"),
    [
        (("samples", "digits_nested.onnx"), 11),
        (("stand_ins", "mtcnn.pb"), 2),
        (("shared", "mtcnn.pb"), 11),
        (("shared", "silero_vad_16k_op15.onnx"), 11),
    ],
    indirect=["model_path"],
)
def test_frames_hold_only_their_ops(
    model_path: Path, frames: int, tmp_path: Path, open_viewer: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    """With nested graphs and interleaved scopes, each op is only in the frames of its own groups."""
    cli("inspect", model_path, "--html", tmp_path / "page.html")
    page = open_viewer(tmp_path / "page.html", scheme="dark")
    assert page.evaluate("viewer.m.frameParts.filter((parts) => parts.length).length") >= frames
    assert page.evaluate(MISPLACED_OPS) == []


def test_annotations_and_frame_labels_do_not_overlap(
    digits_page: Path, open_viewer: Callable[..., Any], drawn: Callable[[Any], None]
) -> None:
    """No annotation covers a frame's label, wherever the view is."""
    page = open_viewer(digits_page, "residual/add")
    for _ in range(6):
        page.mouse.wheel(0, -300)
        drawn(page)
        hits = page.evaluate("viewer.hits")
        labels = [
            hit for hit in hits if "frame" in hit and hit["y"] > -page.evaluate("viewer.view.y / viewer.view.k") + 40
        ]
        for label in labels:
            for annotation in (hit for hit in hits if "annotation" in hit):
                separate = annotation["x"] > label["right"] or annotation["right"] < label["x"]
                assert separate or annotation["y"] >= label["bottom"] or annotation["bottom"] <= label["y"]


def test_clicks_on_the_drawing(
    digits_page: Path, open_viewer: Callable[..., Any], drawn: Callable[[Any], None]
) -> None:
    """A click selects a box, annotation, wire or the model. A double click on a frame's label collapses it."""
    page = open_viewer(digits_page, "stem/conv")
    page.mouse.click(*_box_position(page, _op_expression("stem/relu")))
    assert _selected_title(page) == "stem/relu"
    drawn(page)
    hit, tensor = page.evaluate(
        f"(() => {{ {_hit('annotation')} return [middle, viewer.m.annotations[hit.annotation].tensor]; }})()"
    )
    page.mouse.click(*hit)
    assert _selected_title(page) == tensor
    x, y = _box_position(page, _op_expression("stem/conv"))
    k = page.evaluate("viewer.view.k")
    page.mouse.click(x, y + (42 + 30) * k)
    assert _selected_title(page) == "stem/conv:0"
    page.mouse.click(20, 780)
    assert _selected_title(page).startswith("digits_cnn")
    frame = page.evaluate(f"(() => {{ {_hit('frame')} return middle; }})()")
    page.mouse.dblclick(*frame)
    assert page.evaluate("viewer.collapsed.size") == 1


def test_moving_and_zooming(digits_page: Path, open_viewer: Callable[..., Any], until: Callable[..., None]) -> None:
    """Dragging and the wheel pan, Ctrl with the wheel zooms at the pointer, keys zoom, and the map jumps."""
    page = open_viewer(digits_page)
    view = "[viewer.view.x, viewer.view.y, viewer.view.k]"
    x, y, k = page.evaluate(view)
    page.mouse.move(200, 300)
    page.mouse.down()
    page.mouse.move(260, 340, steps=4)
    page.mouse.up()
    assert page.evaluate(view) == [x + 60, y + 40, k]
    page.mouse.wheel(0, 100)
    until(page, f"viewer.view.y === {y - 60}")
    top = page.evaluate("viewer.canvas.getBoundingClientRect().top")
    pointer_position = f"[(260 - viewer.view.x) / viewer.view.k, ({340 - top} - viewer.view.y) / viewer.view.k]"
    before = page.evaluate(pointer_position)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    until(page, f"viewer.view.k > {k}")
    assert page.evaluate(pointer_position) == pytest.approx(before)
    page.keyboard.press("1")
    assert page.evaluate("viewer.view.k") == 1
    page.keyboard.press("0")
    assert page.evaluate("viewer.s.height * viewer.view.k < viewer.canvas.clientHeight")
    page.keyboard.press("1")
    until(page, "viewer.mapped !== null")
    box = page.locator("#map").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] - 12)
    bottom = page.evaluate("(viewer.canvas.clientHeight / 2 - viewer.view.y) / viewer.view.k / viewer.s.height")
    assert bottom == pytest.approx(1, abs=0.1)


def _pixel(page: Any) -> tuple[int, ...]:
    """Return the color of the drawing's corner on the screen."""
    box = page.locator("#graph").bounding_box()
    screenshot = page.screenshot(clip={"x": box["x"] + 3, "y": box["y"] + 3, "width": 1, "height": 1})
    return Image.open(io.BytesIO(screenshot)).convert("RGB").getpixel((0, 0))


def test_light_and_dark(digits_page: Path, open_viewer: Callable[..., Any]) -> None:
    """The page follows the system's color scheme, the button overrides it, and printing is light."""
    page = open_viewer(digits_page, scheme="dark")
    assert max(_pixel(page)) < 60
    page.emulate_media(color_scheme="light")
    assert min(_pixel(page)) > 200
    page.get_by_role("button", name="Light or dark").click()
    assert max(_pixel(page)) < 60
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert min(_pixel(page)) > 200
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert max(_pixel(page)) < 60
    page.emulate_media(media="print")
    assert not page.locator("header").is_visible()
    assert page.locator("#graph").is_visible()
    assert page.pdf()[:5] == b"%PDF-"


def test_hostile_names_are_text(tmp_path: Path, open_viewer: Callable[..., Any], cli: Callable[..., Any]) -> None:
    """Names with markup, control characters and percent signs are searched, linked and shown as text."""
    weight = numpy_helper.from_array(np.ones((4, 3, 1, 1), np.float32), f"{HOSTILE}w")
    nodes = [
        helper.make_node("Conv", ["x", f"{HOSTILE}w"], [f"{HOSTILE}y"], name=HOSTILE, auto_pad=HOSTILE),
        helper.make_node("Relu", [f"{HOSTILE}y"], ["z"], name=f"{HOSTILE}/a"),
        helper.make_node("Neg", ["z"], ["n"], name=f"{HOSTILE}/b"),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 4, 4])]
    outputs = [helper.make_tensor_value_info("n", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "hostile", inputs, outputs, [weight])
    onnx.save(helper.make_model(graph, ir_version=9), tmp_path / "hostile.onnx")
    cli(
        "insert",
        tmp_path / "hostile.onnx",
        "--rules",
        "fixed_point",
        "-o",
        tmp_path / "q.onnx",
        "--html",
        tmp_path / "q.html",
    )
    page = open_viewer(tmp_path / "q.html", HOSTILE)
    assert page.locator("#panel h2").text_content() == HOSTILE
    page.locator("#query").fill(HOSTILE[:20])
    assert page.locator("#results button span").count() >= 3
    assert page.evaluate("document.scripts.length") == 2


def test_page_of_a_single_op(
    tmp_path: Path, samples: Path, open_viewer: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    """The page of a single op works, and keys cause no errors."""
    cli("inspect", samples / "digits_cnn.onnx", "--around", "stem/relu", "--hops", "0", "--html", tmp_path / "one.html")
    page = open_viewer(tmp_path / "one.html")
    assert page.evaluate("viewer.m.count") == 1
    for key in ("n", "p", "u", "c", "e", "0", "1", "+", "-", "?", "ArrowUp", "ArrowLeft", "Escape"):
        page.keyboard.press(key)
    assert page.evaluate("viewer.m.wire.count") == 0


def test_annotation_texts_match_python(tmp_path: Path, samples: Path, open_viewer: Callable[..., Any]) -> None:
    """The page's annotation texts equal those of Python, except for short type names."""
    result = gq.insert(
        samples / "digits_rnn.onnx", data=str(samples / "digits_rnn_calib.npz"), samples=8, validate=False
    )
    drawing = result_drawing(result)
    (tmp_path / "page.html").write_text(viewer_page(viewer_data(drawing)), "utf-8")
    page = open_viewer(tmp_path / "page.html")
    shown = page.evaluate("viewer.m.annotations.map(annotationText)")
    expected_texts = [
        annotation_text(annotation).replace("uint", "u").replace("int", "i") for annotation in drawing.annotations
    ]
    pairs = [
        (actual, expected)
        for actual, expected in zip(shown, expected_texts, strict=True)
        if "e-" not in actual + expected
    ]
    assert [actual for actual, _ in pairs] == [expected for _, expected in pairs]
    assert len(pairs) > len(expected_texts) / 2


def test_control_edges(tmp_path: Path, open_viewer: Callable[..., Any], cli: Callable[..., Any]) -> None:
    """Few control edges are drawn at the start, many are not. The key d and the button toggle them."""
    for count in (3, 61):
        nodes = ['node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }']
        nodes += [
            f'node {{ name: "n{i}" op: "Relu" input: "x" {f"""input: "^n{i - 1}" """ if i else ""}'
            'attr { key: "T" value { type: DT_FLOAT } } }'
            for i in range(count + 1)
        ]
        (tmp_path / "m.pbtxt").write_text("\n".join(nodes))
        cli("inspect", tmp_path / "m.pbtxt", "--html", tmp_path / f"{count}.html")
        page = open_viewer(tmp_path / f"{count}.html", "n2")
        assert page.evaluate("viewer.m.control.source.length") == count
        assert page.evaluate("viewer.controls") == (count == 3)
        assert "Runs after n1" in page.locator("#panel").inner_text()
        page.locator("#graph").focus()
        page.keyboard.press("d")
        assert page.evaluate("viewer.controls") == (count != 3)
        page.locator("#controls").click()
        assert page.locator("#controls").get_attribute("aria-pressed") == ("true" if count == 3 else "false")


def test_truncation_is_always_marked(tmp_path: Path, open_viewer: Callable[..., Any], cli: Callable[..., Any]) -> None:
    """A long name ends in an ellipsis on the drawing, and is complete in the tooltip and the panel."""
    long_name = "very_long_" * 20
    node = helper.make_node("Relu", ["x"], ["y"], name=long_name, **{f"attribute_{i:02}": i for i in range(15)})
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    onnx.save(helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:]), ir_version=9), tmp_path / "m.onnx")
    cli("inspect", tmp_path / "m.onnx", "--html", tmp_path / "m.html")
    page = open_viewer(tmp_path / "m.html", long_name)
    assert page.evaluate(
        "[...viewer.fittedTexts.values()].some((text) => text.startsWith('very') && text.endsWith('…'))"
    )
    page.mouse.move(*_box_position(page, _op_expression(long_name)))
    assert page.locator("#graph").get_attribute("title") == f"Relu {long_name}"
    panel = page.locator("#panel").inner_text()
    assert long_name in panel.replace("\n", "")
    assert "and 3 more" in panel


IN_VIEW = """op => {
  const a = viewer, group = a.s.hiddenBy(op);
  const box = group < 0 ? {x: a.s.x[op], row: a.m.layer[op]} : a.s.boxes.get(group);
  const x = box.x * a.view.k + a.view.x, y = a.s.boxTop(box.row) * a.view.k + a.view.y;
  return x > 0 && x < a.canvas.clientWidth && y > 0 && y < a.canvas.clientHeight;
}"""
"""Return true if an op, or the group that hides it, is in view."""


def test_folding_keeps_the_selection_in_view(digits_page: Path, open_viewer: Callable[..., Any]) -> None:
    """The selection, or else what was in the center, stays in view while all groups are collapsed and expanded."""
    page = open_viewer(digits_page, "stem/conv")
    for op in (page.evaluate("viewer.m.count - 2"), 0):
        page.evaluate("op => select(viewer, {kind: 'op', op}, {move: true})", op)
        for name in ("Collapse all groups", "Expand all groups (e)"):
            page.get_by_role("button", name=name).click()
            assert page.evaluate(IN_VIEW, op)
    page.evaluate("select(viewer, null); fitView(viewer, false); viewer.view.y -= viewer.s.height * viewer.view.k / 2")
    center = page.evaluate("anchorOp(viewer)")
    page.get_by_role("button", name="Collapse all groups").click()
    assert page.evaluate(IN_VIEW, center)


def test_figures_and_worst_tensors(digits_page: Path, open_viewer: Callable[..., Any]) -> None:
    """The strip at the top has the figures of the result, and links to the five tensors with the lowest SQNR."""
    page = open_viewer(digits_page)
    text = page.locator("#strip").inner_text()
    assert all(
        label in text
        for label in ("SQNR of the worst output", "agreement", "constants", "time", "quantized multiply-adds")
    )
    links = page.locator("#strip button")
    worst = page.evaluate(
        "viewer.m.annotations.filter((a) => typeof a.sqnr === 'number').sort((a, b) => a.sqnr - b.sqnr)"
        ".slice(0, 5).map((a) => a.name || a.tensor)"
    )
    assert [link.get_attribute("title") for link in links.all()] == worst
    assert [f"{link.rpartition(' ')[0].rpartition(' ')[0]}:0" for link in links.all_inner_texts()] == worst
    links.nth(4).click()
    assert _selected_title(page) == worst[4]


def test_scales_have_four_digits(digits_page: Path, open_viewer: Callable[..., Any]) -> None:
    """A drawn scale has four significant digits, and the panel has all."""
    page = open_viewer(digits_page)
    assert page.evaluate("[0.0171812, 12.34567, 1.23456e-5, 0].map(shortNumber)") == [
        "0.01718",
        "12.35",
        "1.235e-5",
        "0",
    ]


def test_legend_is_closed_on_a_narrow_screen(digits_page: Path, browser: Any) -> None:
    """The legend is open on a wide screen only, and a click opens it."""
    for width, is_open in ((1400, True), (480, False)):
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.goto(digits_page.as_uri())
        page.wait_for_function("window.viewer")
        assert page.locator("#panel details").evaluate("node => node.open") is is_open
        page.close()
