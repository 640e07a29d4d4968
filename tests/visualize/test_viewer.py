"""The viewer in a browser: search, numbers, folding, filters, links, keys, colors."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from graphquant import api
from graphquant.visualize.annotations import annotation_text
from graphquant.visualize.drawing import plan_drawing, result_drawing
from graphquant.visualize.viewer_data import viewer_data
from graphquant.visualize.viewer_data import viewer_page as made_page

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow

HOSTILE = "</script><script>alert(1)</script>\"'&amp;\x1b[31m\u2028%<!--"

FIND = """
(tensors) => tensors.map((tensor) => {
  const query = document.getElementById("query");
  query.value = tensor;
  query.dispatchEvent(new Event("input"));
  const found = [];
  for (const button of document.querySelectorAll("#results button")) {
    if (button.querySelector("span").textContent !== tensor) continue;
    button.click();
    const annotation = viewer.selected.kind === "annotation" ? viewer.m.annotations[viewer.selected.annotation] : null;
    if (!annotation) continue;
    const rows = {};
    for (const row of document.querySelectorAll("#panel table:first-of-type tr")) {
      rows[row.querySelector("th").textContent] = row.querySelector("td").textContent;
    }
    found.push([annotation.dtype, (annotation.scale || []).map(Math.fround), annotation.zero || [], rows]);
  }
  return found;
})
"""
"""Types each tensor's name into the search, clicks each result that is called that, and reads the panel."""


@pytest.fixture
def digits(tmp_path: Path, samples: Path, cli: Callable[..., Any]) -> Path:
    """The page that insert makes of a sample model, with histograms."""
    source, data = samples / "digits_cnn.onnx", samples / "digits_cnn_calib.npz"
    out, html = tmp_path / "digits.onnx", tmp_path / "digits.html"
    cli("insert", source, "--data", data, "-o", out, "--html", html)
    return html


def _hit(kind: str) -> str:
    """Finds what was drawn last of a kind, "annotation" or "frame", and the middle of it on the screen."""
    return f"""
      const a = viewer, box = a.canvas.getBoundingClientRect(), hit = a.hits.find((one) => one.{kind} !== undefined);
      const middle = [box.left + a.view.x + (hit.x + hit.right) / 2 * a.view.k,
                      box.top + a.view.y + (hit.y + hit.bottom) / 2 * a.view.k];
    """


def _selected(page: Any) -> str:
    return page.locator("#panel h2").inner_text()


def _results(page: Any) -> list[str]:
    return page.locator("#results button span").all_inner_texts()


def _at(page: Any, what: str) -> tuple[float, float]:
    """Where on the screen the middle of a box, `what` in the page's words, is."""
    return tuple(
        page.evaluate(
            f"""() => {{
              const a = viewer, op = {what}, box = a.canvas.getBoundingClientRect();
              return [box.left + a.view.x + a.s.x[op] * a.view.k,
                      box.top + a.view.y + (a.s.boxTop(a.m.layer[op]) + 10) * a.view.k];
            }}"""
        )
    )


def _op(name: str) -> str:
    return f"viewer.m.ops.name.findIndex((_, op) => viewer.m.full(op) === {json.dumps(name)})"


MODELS = {
    "digits_cnn.onnx": "digits_cnn_calib.npz",
    "digits_cnn_bn.onnx": "digits_cnn_calib.npz",
    "digits_nested.onnx": "digits_nested_calib.npz",
    "digits_rnn.onnx": "digits_rnn_calib.npz",
    "digits_cnn.pbtxt": "digits_cnn_calib.npz",
    "digits_cnn.pb": "digits_cnn_calib.npz",
    "digits_rnn.pb": "digits_rnn_calib.npz",
    "digits_cnn_saved_model": "digits_cnn_calib.npz",
    "digits_rnn_saved_model": "digits_rnn_calib.npz",
}


def _check_sites(opened: Callable[..., Any], cli: Callable[..., Any], model: Path) -> None:
    """Each quantized tensor is found by its name, and the panel shows what `inspect --format json` gives."""
    html = model.parent / "page.html"
    cli("inspect", model, "--html", html)
    data = json.loads(cli("inspect", model, "--format", "json").stdout)
    wanted = [(_name(one["tensor"]), one) for one in data["quantization"]]
    wanted += [(_name(one), one) for one in data["tensors"] if one["quantization_parameters"]["scales"]]
    assert wanted
    page = opened(html)
    names = list(dict.fromkeys(name for name, _ in wanted))
    found = dict(zip(names, page.evaluate(FIND, names), strict=True))
    for name, one in wanted:
        stored = one.get("quantization_parameters")
        scales = stored["scales"] if stored else one.get("scale")
        if scales is None:
            assert any(rows["scale"] == "computed in each run" for *_, rows in found[name]), name
            continue
        flat, zeros = np.ravel(scales).tolist(), np.ravel(stored["zero_points"] if stored else one["zero_point"])
        same = [rows for dtype, shown, zero, rows in found[name] if (dtype, shown) == (one["dtype"], flat)]
        assert same, name
        zero = np.unique(zeros)
        said = f"{zero[0]}" if len(zero) == 1 else f"{zero[0]} to {zero[-1]}"
        assert any(rows["zero point"] == said for rows in same), name
        assert any(len(flat) > 1 or float(rows["scale"]) == flat[0] for rows in same), name


def _name(tensor: dict[str, Any]) -> str:
    if "index" in tensor:
        return tensor["name"]
    return (
        f"{tensor['graph']}/{tensor['op']}:{tensor['port']}" if tensor["graph"] else f"{tensor['op']}:{tensor['port']}"
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_site_of_a_sample_model_is_found(
    name: str, samples: Path, tmp_path: Path, opened: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    """By its name in the search, with type, scale and zero point."""
    made = api.insert(samples / name, data=str(samples / MODELS[name]), samples=8, validate=False)
    _check_sites(opened, cli, made.save(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("ultraface/version-RFB-320.onnx", "random:1"),
        ("silero_vad_16k_op15.onnx", "silero_vad.npz"),
        ("kws/saved_model", "random:1"),
    ],
)
def test_every_site_of_a_real_model_is_found(
    name: str, data: str, shared: Path, tmp_path: Path, opened: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    """The face detector, the voice detector with its nested graphs, and keyword spotting with its functions."""
    made = api.insert(shared / name, data=data if ":" in data else str(shared / data), samples=1, validate=False)
    _check_sites(opened, cli, made.save(tmp_path / (shared / name).name))


@pytest.mark.parametrize("name", ["kws/kws_int8.tflite", "kws/kws_float.tflite", "qlstm_tract.onnx"])
def test_every_scale_of_files_as_they_are_is_found(
    name: str, shared: Path, tmp_path: Path, opened: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    """TFLite files, whose tensors keep their scales, and a model that others quantized, inside of a Scan."""
    model = tmp_path / (shared / name).name
    model.write_bytes((shared / name).read_bytes())
    _check_sites(opened, cli, model)


def test_the_panel_of_an_annotation(digits: Path, opened: Callable[..., Any]) -> None:
    """Rule, reason, scheme, histogram with range, clipped share, SQNR, and the ops that it stands for."""
    page = opened(digits, "stem/relu:0")
    panel = page.locator("#panel").inner_text()
    annotation = page.evaluate("viewer.m.annotations[viewer.selected.annotation]")
    assert annotation["rule"]
    assert annotation["why"]
    for said in ("uint8 asymmetric, auto", annotation["rule"], annotation["why"], "clipped", "dB", "QuantizeLinear"):
        assert said in panel
    assert page.locator("#panel svg.plot path.in").count() == 1
    assert page.locator("#panel svg.plot rect.band").count() == 1


def test_scales_per_channel_are_a_plot(digits: Path, opened: Callable[..., Any]) -> None:
    """One bar for each channel."""
    page = opened(digits, "stem/conv")
    page.locator("#panel button.pill", has_text="i8[8]").click()
    assert page.locator("#panel figure path.in").get_attribute("d").count("z") == 8
    assert "scale of channels 0 to 7" in page.locator("#panel figcaption").inner_text()


def test_why_nothing_was_inserted(tmp_path: Path, samples: Path, opened: Callable[..., Any]) -> None:
    """A use that a rule asked for and that was left has the reason in its op's panel and in that of its wire."""
    made = api.insert(
        samples / "digits_cnn.onnx", data=str(samples / "digits_cnn_calib.npz"), samples=8, validate=False
    )
    html = tmp_path / "page.html"
    html.write_text(made_page(viewer_data(result_drawing(made))), "utf-8")
    skip = next(skip for skip in made.skips if skip.uses)
    page = opened(html, skip.uses[0].op)
    assert skip.reason in page.locator("#panel").inner_text()
    page.locator("#by-state").select_option("reason")
    assert skip.uses[0].op in _results(page)


def test_a_plan_is_labelled_as_plan(tmp_path: Path, samples: Path, opened: Callable[..., Any]) -> None:
    """The page of a plan says so, shows schemes, and each site is found."""
    model = api.load(samples / "digits_cnn.onnx")
    plan = api.plan(model)
    html = tmp_path / "plan.html"
    html.write_text(made_page(viewer_data(plan_drawing(api.prepare_for_plan(model, plan), plan))), "utf-8")
    page = opened(html)
    assert "This is a plan" in page.locator("#panel").inner_text()
    found = page.evaluate(FIND, [str(site.tensor) for site in plan.sites])
    for site, shown in zip(plan.sites, found, strict=True):
        assert any(rows["rule"] == site.rule and rows["type"] == site.scheme.type.name for *_, rows in shown)


def test_a_link_to_an_op(digits: Path, opened: Callable[..., Any], until: Callable[..., None]) -> None:
    """A link selects and shows the op; selecting writes the link; going back is followed; unknown names are told."""
    page = opened(digits, "residual/add")
    assert _selected(page) == "residual/add"
    assert page.evaluate("viewer.view.k") >= 0.8
    x, y = _at(page, _op("residual/add"))
    assert 0 < x < 960
    assert 40 < y < 820
    page.keyboard.press("ArrowDown")
    assert _selected(page) == "residual/relu"
    assert page.evaluate("location.hash") == "#op=residual%2Frelu"
    page.go_back()
    until(page, "document.querySelector('#panel h2').textContent === 'residual/add'")
    page.evaluate("location.hash = '#op=no%20such'")
    until(page, "document.querySelector('#panel h2').textContent === 'Not found'")


def test_search_by_keys(digits: Path, opened: Callable[..., Any]) -> None:
    """Slash, a word, Enter for the next, Shift for the one before; n and p outside; Escape clears."""
    page = opened(digits)
    page.keyboard.press("/")
    page.keyboard.type("residual/add")
    found = _results(page)
    assert found[0] == "residual/add:0" or found[0] == "residual/add"
    page.keyboard.press("Enter")
    first = _selected(page)
    page.keyboard.press("Enter")
    second = _selected(page)
    page.keyboard.press("Shift+Enter")
    assert _selected(page) == first
    page.locator("#graph").focus()
    page.keyboard.press("n")
    assert _selected(page) == second
    page.keyboard.press("p")
    assert _selected(page) == first
    page.keyboard.press("Escape")
    assert not page.locator("#results").is_visible()
    assert page.locator("#query").input_value() == ""
    assert _selected(page).startswith("digits_cnn")


def test_arrows_follow_wires(digits: Path, opened: Callable[..., Any]) -> None:
    """Up to what the op reads, down to who reads it, sideways in the row."""
    page = opened(digits, "stem/conv")
    page.keyboard.press("ArrowUp")
    assert _selected(page) == "stem/conv__6"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert _selected(page) == "stem/relu"
    page = opened(digits, "branch_wide/bias_add")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert _selected(page) == "branch_wide/bias_add"


def test_filters(digits: Path, opened: Callable[..., Any]) -> None:
    """By state, rule, kind and SQNR; what does not pass is not listed and drawn faintly."""
    page = opened(digits)
    page.locator("#by-kind").select_option("conv")
    convs = page.evaluate("viewer.matches.filter((one) => one.kind === 'op').map((one) => viewer.m.type(one.op))")
    assert set(convs) == {"Conv"}
    assert len(convs) == 6
    assert page.evaluate("viewer.matched.reduce((sum, one) => sum + one, 0)") == 6
    page.locator("#by-state").select_option("unquantized")
    assert _results(page) == []
    page.locator("#by-state").select_option("quantized")
    assert len(convs) == page.evaluate("viewer.matches.filter((one) => one.kind === 'op').length")
    page.keyboard.press("Escape")
    rule = page.evaluate("viewer.m.annotations.find((annotation) => annotation.rule).rule")
    page.locator("#by-rule").select_option(rule)
    annotations = page.evaluate(
        "viewer.matches.filter((one) => one.kind === 'annotation').map((one) =>"
        " viewer.m.annotations[one.annotation].rule)"
    )
    assert set(annotations) == {rule}
    page.keyboard.press("Escape")
    page.locator("#by-sqnr").fill("45")
    sqnr = page.evaluate(
        "viewer.matches.filter((one) => one.kind === 'annotation').map((one) =>"
        " viewer.m.annotations[one.annotation].sqnr)"
    )
    assert sqnr == sorted(sqnr)
    assert sqnr
    assert max(sqnr) < 45
    known = page.evaluate("viewer.m.annotations.map((annotation) => annotation.sqnr)")
    assert len(sqnr) == sum(one is not None and one < 45 for one in known)


def test_annotations_unfold_and_fold(digits: Path, opened: Callable[..., Any], until: Callable[..., None]) -> None:
    """One annotation makes room above its reader for its two ops; the key u folds it again, and unfolds all."""
    page = opened(digits, "stem/conv__6:0")
    height = page.evaluate("viewer.s.height")
    page.get_by_role("button", name="Unfold", exact=True).click()
    assert page.evaluate("viewer.s.height") == height + 64
    until(page, "viewer.hits.filter((hit) => hit.annotation === viewer.selected.annotation).length === 2")
    page.locator("#graph").focus()
    page.keyboard.press("u")
    assert page.evaluate("viewer.s.height") == height
    page.keyboard.press("Escape")
    page.keyboard.press("u")
    assert page.evaluate("viewer.unfolded.size === viewer.m.annotations.length")
    assert page.evaluate("viewer.s.height") > height + 64
    page.keyboard.press("u")
    assert page.evaluate("viewer.s.height") == height


def test_groups_collapse_and_expand(digits: Path, opened: Callable[..., Any], until: Callable[..., None]) -> None:
    """The key c makes one box of the scope around the selected op, wires to it stay; a link into it opens it again."""
    page = opened(digits, "stem/conv")
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
    shared: Path, tmp_path: Path, opened: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    """A body becomes one box with its ops counted; what goes into and out of it still leads to it."""
    cli("inspect", shared / "qlstm_tract.onnx", "--html", tmp_path / "page.html")
    page = opened(tmp_path / "page.html")
    (group,) = page.evaluate("viewer.m.group.graph.flatMap((graph, group) => (graph ? [group] : []))")
    inside = page.evaluate(f"viewer.m.groupExtents[{group}].ops")
    page.get_by_role("button", name="Collapse all groups").click()
    shown = page.evaluate(
        "Array.from({ length: viewer.m.count }, (_, op) => viewer.s.hiddenBy(op)).filter((one) => one < 0).length"
    )
    assert shown == page.evaluate("viewer.m.count") - inside
    assert page.evaluate("viewer.s.longWires.length") >= 1


STRANGERS = """
() => {
  const { m } = viewer, found = [];
  m.frameParts.forEach((parts, group) => {
    for (const { top, bottom, left, right } of parts.flatMap((part) => part.blocks)) {
      for (let row = top; row <= bottom; row++) {
        for (const op of m.inRow.of(row)) {
          let here = m.ops.group[op];
          while (here > group) here = m.group.parent[here];
          const half = m.ops.width[op] / 2, inside = m.x[op] + half > left && m.x[op] - half < right;
          if (inside !== (here === group)) found.push(`${m.full(op)} ${m.text(m.group.label[group])}`);
        }
      }
    }
  });
  return found;
}
"""
"""Ops that a frame is drawn around though they are of another group, and those of a group in no part of its frame."""


@pytest.mark.parametrize("name", ["digits_nested.onnx", "silero_vad_16k_op15.onnx", "mtcnn.pb"])
def test_frames_hold_only_their_ops(
    name: str, samples: Path, shared: Path, tmp_path: Path, opened: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    """Around nested graphs and scopes that are entangled, each op is in the frames of its groups and in no others."""
    model = samples / name if (samples / name).exists() else shared / name
    cli("inspect", model, "--html", tmp_path / "page.html")
    page = opened(tmp_path / "page.html", scheme="dark")
    assert page.evaluate("viewer.m.frameParts.filter((parts) => parts.length).length") > 10
    assert page.evaluate(STRANGERS) == []


def test_annotations_and_frame_labels_do_not_overlap(digits: Path, opened: Callable[..., Any]) -> None:
    """Wherever the drawing is looked at, no annotation covers the name of a frame."""
    page = opened(digits, "residual/add")
    for _ in range(6):
        page.mouse.wheel(0, -300)
        page.wait_for_timeout(50)
        hits = page.evaluate("viewer.hits")
        labels = [
            hit for hit in hits if "frame" in hit and hit["y"] > -page.evaluate("viewer.view.y / viewer.view.k") + 40
        ]
        for label in labels:
            for annotation in (hit for hit in hits if "annotation" in hit):
                apart = annotation["x"] > label["right"] or annotation["right"] < label["x"]
                assert apart or annotation["y"] >= label["bottom"] or annotation["bottom"] <= label["y"]


def test_clicks_on_the_drawing(digits: Path, opened: Callable[..., Any]) -> None:
    """A click selects a box, an annotation, a wire or nothing; a double click on a frame's label collapses it."""
    page = opened(digits, "stem/conv")
    page.mouse.click(*_at(page, _op("stem/relu")))
    assert _selected(page) == "stem/relu"
    page.wait_for_timeout(50)
    hit, tensor = page.evaluate(
        f"(() => {{ {_hit('annotation')} return [middle, viewer.m.annotations[hit.annotation].tensor]; }})()"
    )
    page.mouse.click(*hit)
    assert _selected(page) == tensor
    x, y = _at(page, _op("stem/conv"))
    k = page.evaluate("viewer.view.k")
    page.mouse.click(x, y + (42 + 30) * k)
    assert _selected(page) == "stem/conv:0"
    page.mouse.click(20, 780)
    assert _selected(page).startswith("digits_cnn")
    frame = page.evaluate(f"(() => {{ {_hit('frame')} return middle; }})()")
    page.mouse.dblclick(*frame)
    assert page.evaluate("viewer.collapsed.size") == 1


def test_moving_and_zooming(digits: Path, opened: Callable[..., Any], until: Callable[..., None]) -> None:
    """Dragging and the wheel move, Ctrl and the wheel zoom where the pointer is, keys zoom, the small map jumps."""
    page = opened(digits)
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
    place = f"[(260 - viewer.view.x) / viewer.view.k, ({340 - top} - viewer.view.y) / viewer.view.k]"
    before = page.evaluate(place)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    until(page, f"viewer.view.k > {k}")
    assert page.evaluate(place) == pytest.approx(before)
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
    """The color of the drawing's corner, as it is on the screen."""
    box = page.locator("#graph").bounding_box()
    shown = page.screenshot(clip={"x": box["x"] + 3, "y": box["y"] + 3, "width": 1, "height": 1})
    return Image.open(io.BytesIO(shown)).convert("RGB").getpixel((0, 0))


def test_light_and_dark(digits: Path, opened: Callable[..., Any]) -> None:
    """The system's scheme is followed, also when it changes; the button overrides it; paper is light."""
    page = opened(digits, scheme="dark")
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


def test_hostile_names_are_text(tmp_path: Path, opened: Callable[..., Any], cli: Callable[..., Any]) -> None:
    """Names with markup, control characters and percent signs are found, linked to and shown as they are."""
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
    page = opened(tmp_path / "q.html", HOSTILE)
    assert page.locator("#panel h2").text_content() == HOSTILE
    page.locator("#query").fill(HOSTILE[:20])
    assert page.locator("#results button span").count() >= 3
    assert page.evaluate("document.scripts.length") == 2


def test_a_neighborhood_page_has_no_errors(
    tmp_path: Path, samples: Path, opened: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    """A single op, and no hops around it, is a page too; keys do nothing bad there."""
    cli("inspect", samples / "digits_cnn.onnx", "--around", "stem/relu", "--hops", "0", "--html", tmp_path / "one.html")
    page = opened(tmp_path / "one.html")
    assert page.evaluate("viewer.m.count") == 1
    for key in ("n", "p", "u", "c", "e", "0", "1", "+", "-", "?", "ArrowUp", "ArrowLeft", "Escape"):
        page.keyboard.press(key)
    assert page.evaluate("viewer.m.wire.count") == 0


def test_annotation_texts_match_python(tmp_path: Path, samples: Path, opened: Callable[..., Any]) -> None:
    """The words on an annotation differ in nothing but the type's short name."""
    made = api.insert(
        samples / "digits_rnn.onnx", data=str(samples / "digits_rnn_calib.npz"), samples=8, validate=False
    )
    drawing = result_drawing(made)
    (tmp_path / "page.html").write_text(made_page(viewer_data(drawing)), "utf-8")
    page = opened(tmp_path / "page.html")
    shown = page.evaluate("viewer.m.annotations.map(annotationText)")
    words = [annotation_text(annotation).replace("uint", "u").replace("int", "i") for annotation in drawing.annotations]
    pairs = [(one, other) for one, other in zip(shown, words, strict=True) if "e-" not in one + other]
    assert [one for one, _ in pairs] == [other for _, other in pairs]
    assert len(pairs) > len(words) / 2


def test_control_edges(tmp_path: Path, opened: Callable[..., Any], cli: Callable[..., Any]) -> None:
    """A few are drawn from the beginning, very many are not; the key d and the button change that."""
    for count in (3, 61):
        nodes = ['node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }']
        nodes += [
            f'node {{ name: "n{i}" op: "Relu" input: "x" {f"""input: "^n{i - 1}" """ if i else ""}'
            'attr { key: "T" value { type: DT_FLOAT } } }'
            for i in range(count + 1)
        ]
        (tmp_path / "m.pbtxt").write_text("\n".join(nodes))
        cli("inspect", tmp_path / "m.pbtxt", "--html", tmp_path / f"{count}.html")
        page = opened(tmp_path / f"{count}.html", "n2")
        assert page.evaluate("viewer.m.control.source.length") == count
        assert page.evaluate("viewer.controls") == (count == 3)
        assert "Runs after n1" in page.locator("#panel").inner_text()
        page.locator("#graph").focus()
        page.keyboard.press("d")
        assert page.evaluate("viewer.controls") == (count != 3)
        page.locator("#controls").click()
        assert page.locator("#controls").get_attribute("aria-pressed") == ("true" if count == 3 else "false")


def test_truncation_is_always_marked(tmp_path: Path, opened: Callable[..., Any], cli: Callable[..., Any]) -> None:
    """A name too long for its box ends in dots on the drawing, is whole where the pointer is, and in the panel."""
    long = "very_long_" * 20
    node = helper.make_node("Relu", ["x"], ["y"], name=long, **{f"attribute_{i:02}": i for i in range(15)})
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    onnx.save(helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:]), ir_version=9), tmp_path / "m.onnx")
    cli("inspect", tmp_path / "m.onnx", "--html", tmp_path / "m.html")
    page = opened(tmp_path / "m.html", long)
    assert page.evaluate(
        "[...viewer.fittedTexts.values()].some((said) => said.startsWith('very') && said.endsWith('…'))"
    )
    page.mouse.move(*_at(page, _op(long)))
    assert page.locator("#graph").get_attribute("title") == f"Relu {long}"
    panel = page.locator("#panel").inner_text()
    assert long in panel.replace("\n", "")
    assert "and 3 more" in panel
