"""Pages of two models in a browser: heat of compare, colors of diff, shared layout and selection."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from PIL import Image

from graphquant.api.compare import plan_or_none

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("rules_alone")]

PLANTED = "pointwise/relu:0"


@pytest.fixture
def models_with_fault(tmp_path: Path, samples: Path, cli: Callable[..., Any]) -> tuple[Path, Path, Path]:
    """Return a sample model, its quantized model, and that with one scale ten times too small."""
    source = samples / "digits_cnn.onnx"
    cli("insert", source, "--data", samples / "digits_cnn_calib.npz", "--samples", 20, "-o", tmp_path / "quant.onnx")
    message = onnx.load(tmp_path / "quant.onnx")
    scale = next(node.input[1] for node in message.graph.node if node.input and node.input[0] == PLANTED)
    initializer = next(tensor for tensor in message.graph.initializer if tensor.name == scale)
    initializer.CopyFrom(numpy_helper.from_array(np.float32(0.1) * numpy_helper.to_array(initializer), scale))
    onnx.save(message, tmp_path / "wrong.onnx")
    return source, tmp_path / "quant.onnx", tmp_path / "wrong.onnx"


@pytest.fixture
def compare_page(
    models_with_fault: tuple[Path, Path, Path], samples: Path, tmp_path: Path, cli: Callable[..., Any]
) -> Path:
    """Return the page of a comparison with a planted fault, next to its JSON."""
    source, _, wrong = models_with_fault
    data = ("--data", samples / "digits_cnn_eval.npz", "--samples", 20, "--format", "json")
    cli("compare", source, wrong, *data, "-o", tmp_path / "c.json", "--html", tmp_path / "c.html")
    return tmp_path / "c.html"


@pytest.fixture
def diff_page(models_with_fault: tuple[Path, Path, Path], tmp_path: Path, cli: Callable[..., Any]) -> Path:
    """Return the page of two models that differ in a scale, an op type and an op name."""
    message = onnx.load(models_with_fault[2])
    for node in message.graph.node:
        if node.name == "stem/relu":
            node.op_type = "Sigmoid"
        if node.name == "depthwise/relu6":
            node.name = "depthwise/renamed"
    onnx.save(message, tmp_path / "other.onnx")
    cli("diff", models_with_fault[1], tmp_path / "other.onnx", "--html", tmp_path / "d.html", code=1)
    return tmp_path / "d.html"


def _list_entries(page: Any) -> list[str]:
    return page.locator("#list li button > span:nth-child(2)").evaluate_all(
        "spans => spans.map(span => span.firstChild.data)"
    )


def _op_names(page: Any, side: int) -> list[str]:
    """Return the names of the ops on a side."""
    return page.evaluate(
        f"Array.from(viewer.m.side.op).flatMap((mask, op) => (mask & {side} ?"
        f" [{side} === 1 && viewer.m.firstBoxes[op] ? viewer.m.firstBoxes[op].name : viewer.m.name(op)] : []))"
    )


def _box_color(page: Any, canvas: str, op: str) -> tuple[int, ...]:
    """Return the color of an op's box on the screen, inside of its lower left corner."""
    x, y = page.evaluate(
        f"""(() => {{
          const op = viewer.m.ops.name.findIndex((_, number) => viewer.m.full(number) === {json.dumps(op)});
          const {{ view, s, m }} = viewer, box = document.getElementById("{canvas}").getBoundingClientRect();
          const x = s.x[op] - m.ops.width[op] / 2 + 12, y = s.boxTop(m.layer[op]) + 22;
          return [box.left + view.x + x * view.k, box.top + view.y + y * view.k];
        }})()"""
    )
    screenshot = page.screenshot(clip={"x": x, "y": y, "width": 1, "height": 1})
    return Image.open(io.BytesIO(screenshot)).convert("RGB").getpixel((0, 0))


def test_worst_tensor_is_first_and_hottest(
    compare_page: Path, open_viewer: Callable[..., Any], drawn: Callable[[Any], None]
) -> None:
    """The list has the tensors of compare in its order. The planted fault is first and has the hottest color."""
    page = open_viewer(compare_page)
    sites = json.loads(compare_page.with_suffix(".json").read_text("utf-8"))["sites"]
    expected = [site["tensor"] for site in sites if site["local"] is not None or site["exact"]]
    assert _list_entries(page)[:2] == expected[:2]
    assert sorted(_list_entries(page)) == sorted(site["tensor"] for site in sites)
    figures = page.locator("#list li button > small").all_inner_texts()
    assert figures[0] == f"{sites[0]['local']:.1f} dB"
    assert expected[0] == PLANTED
    page.keyboard.press("n")
    assert page.locator("#panel h2").inner_text() == PLANTED
    assert page.locator("#panel output.figure").all_inner_texts() == [
        f"{sites[0]['local']:.2f} dB",
        f"{sites[0]['accumulated']:.2f} dB",
    ]
    drawn(page)
    hot = page.evaluate("viewer.color.h4")
    assert _box_color(page, "graph", "max_pool") == tuple(bytes.fromhex(hot[1:]))
    assert _box_color(page, "other", "max_pool") == tuple(bytes.fromhex(hot[1:]))
    assert "Colors: its own" in (page.keyboard.press("?"), page.locator("#panel").inner_text())[1]


def test_color_modes(compare_page: Path, open_viewer: Callable[..., Any]) -> None:
    """The menu and the key h select the error of the op, the error so far, or quantization. The list follows."""
    page = open_viewer(compare_page)
    sites = json.loads(compare_page.with_suffix(".json").read_text("utf-8"))["sites"]
    page.locator("#by-color").select_option(label="error so far")
    known = [site for site in sites if site["accumulated"] is not None]
    lowest = min(site["accumulated"] for site in known)
    assert page.locator("#list li button > small").first.inner_text() == f"{lowest:.1f} dB"
    assert "error so far" in page.locator("#list h2").inner_text()
    page.locator("#graph").focus()
    page.keyboard.press("h")
    assert page.locator("#by-color").input_value() == "quant"
    assert "inputs quantized" in page.locator("#panel").inner_text()
    page.keyboard.press("h")
    assert page.locator("#by-color").input_value() == "0"


def test_filter_by_figure(compare_page: Path, open_viewer: Callable[..., Any]) -> None:
    """The filter lists tensors below an SQNR, worst first, by the selected column."""
    page = open_viewer(compare_page)
    sites = json.loads(compare_page.with_suffix(".json").read_text("utf-8"))["sites"]
    figures = (
        "viewer.matches.filter((match) => match.kind === 'annotation').map((match) =>"
        " viewer.m.heat.values[match.annotation][viewer.column])"
    )
    for column, name in enumerate(("local", "accumulated")):
        page.locator("#by-color").select_option(str(column))
        page.locator("#by-sqnr").fill("42")
        values = page.evaluate(figures)
        assert values == sorted(values)
        assert len(values) == sum(site[name] is not None and site[name] < 42 for site in sites) > 0


def test_sides_share_layout_view_and_selection(
    compare_page: Path, open_viewer: Callable[..., Any], until: Callable[..., None]
) -> None:
    """Both sides have the same positions, view and selection."""
    page = open_viewer(compare_page)
    assert _op_names(page, 1) == _op_names(page, 2)
    first, second = (page.locator(f"#{name}").bounding_box() for name in ("graph", "other"))
    assert (first["width"], first["y"]) == (pytest.approx(second["width"], abs=2), second["y"])
    view = "[viewer.view.x, viewer.view.y, viewer.view.k]"
    x, y, k = page.evaluate(view)
    page.mouse.move(second["x"] + 30, 400)
    page.mouse.down()
    page.mouse.move(second["x"] + 50, 430, steps=4)
    page.mouse.up()
    assert page.evaluate(view) == [x + 20, y + 30, k]
    page.evaluate("location.hash = '#op=pointwise%2Fconv'")
    until(page, "document.querySelector('#panel h2').textContent === 'pointwise/conv'")
    for box in (first, second):
        page.mouse.click(box["x"] + 12, box["y"] + box["height"] - 60)
        assert page.locator("#panel h2").inner_text() != "pointwise/conv"
        position = page.evaluate(
            """(() => { const op = viewer.m.ops.name.findIndex((_, i) => viewer.m.full(i) === "pointwise/conv");
            return [viewer.s.x[op] * viewer.view.k + viewer.view.x,
                    (viewer.s.boxTop(viewer.m.layer[op]) + 22) * viewer.view.k + viewer.view.y]; })()"""
        )
        page.mouse.click(box["x"] + position[0], box["y"] + position[1])
        assert page.locator("#panel h2").inner_text() == "pointwise/conv"


def test_showing_one_side(compare_page: Path, open_viewer: Callable[..., Any], drawn: Callable[[Any], None]) -> None:
    """The key v shows the first side, the second, then both. Only the quantized side has annotations."""
    page = open_viewer(compare_page)
    for visible in ((True, False), (False, True), (True, True)):
        page.locator(f"#{'graph' if page.locator('#graph').is_visible() else 'other'}").focus()
        page.keyboard.press("v")
        assert (page.locator("#graph").is_visible(), page.locator("#other").is_visible()) == visible
    drawn(page)
    assert page.evaluate("viewer.panes.map((pane) => pane.hits.some((hit) => hit.annotation !== undefined))") == [
        False,
        True,
    ]


def test_clicking_a_change_shows_its_op(diff_page: Path, open_viewer: Callable[..., Any]) -> None:
    """The list has each change of diff. A click selects its op and scrolls to it."""
    page = open_viewer(diff_page)
    kinds = page.locator("#list li button > small").all_inner_texts()
    assert sorted(kinds) == ["+ op-added", "- op-removed", "~ op-renamed", "~ scale", "~ wiring"]
    for number, kind in enumerate(kinds):
        page.locator("#list li button").nth(number).click()
        assert (
            page.locator("#panel .is-changed, #panel .is-added, #panel .is-removed").first.inner_text().startswith(kind)
        )
        x, y = page.evaluate(
            "(() => { const op = targetOp(viewer, viewer.selected); "
            "return [viewer.s.x[op] * viewer.view.k + viewer.view.x,"
            " viewer.s.boxTop(viewer.m.layer[op]) * viewer.view.k + viewer.view.y]; })()"
        )
        assert 0 < x < page.locator("#graph").bounding_box()["width"]
        assert 0 < y < page.locator("#graph").bounding_box()["height"]
    assert "5 changes" in page.locator("#list h2").inner_text()


def test_colors_of_changes(
    diff_page: Path, open_viewer: Callable[..., Any], until: Callable[..., None], drawn: Callable[[Any], None]
) -> None:
    """Removed ops are only on the first side and added ops only on the second. Changes have their own colors."""
    page = open_viewer(diff_page)
    assert "depthwise/relu6" in _op_names(page, 1)
    assert "depthwise/renamed" in _op_names(page, 2)
    rgb = {name: tuple(bytes.fromhex(page.evaluate(f"viewer.color.{name}")[1:])) for name in ("changedbox", "box")}
    page.evaluate("location.hash = '#op=depthwise%2Frenamed'")
    until(page, "document.querySelector('#panel h2').textContent === 'depthwise/renamed'")
    drawn(page)
    assert (
        _box_color(page, "graph", "depthwise/renamed")
        == _box_color(page, "other", "depthwise/renamed")
        == rgb["changedbox"]
    )
    assert _box_color(page, "other", "pointwise/conv") == rgb["box"]
    assert "depthwise/relu6" in page.locator("#panel").inner_text()
    status = page.evaluate(
        "Array.from(viewer.m.side.op).flatMap((side, op) =>"
        " (viewer.m.full(op) === 'stem/relu' ? [[side, viewer.m.type(op), changeStatus(viewer, 'op', op)]] : []))"
    )
    assert sorted(status) == [[1, "Relu", "removed"], [2, "Sigmoid", "added"]]


def test_changed_scale_shows_both_values(diff_page: Path, open_viewer: Callable[..., Any]) -> None:
    """The second side and the panel show the old and the new scale."""
    page = open_viewer(diff_page, PLANTED)
    (number,) = page.evaluate(
        "viewer.m.annotations.flatMap((annotation, i) => (i >= viewer.m.sides.split && annotation.tensor ==="
        f" '{PLANTED}' ? [i] : []))"
    )
    old, new = page.evaluate(
        f"[viewer.m.counterparts[{number}], {number}].map((i) => Math.fround(viewer.m.annotations[i].scale[0]))"
    )
    assert new == pytest.approx(old / 10)
    assert page.evaluate(f"annotationLabel(viewer, {number})") == f"u8 {old:.3g} → {new:.3g}"
    page.locator("#list li button", has_text="scale").click()
    row = page.locator("#panel tr", has_text="→").inner_text().split()
    assert (float(row[1]), float(row[3])) == (old, new)


def test_two_plans(tmp_path: Path, samples: Path, open_viewer: Callable[..., Any], cli: Callable[..., Any]) -> None:
    """Plans are drawn on their model, with colors for added and removed sites. The model is required."""
    model = samples / "digits_cnn.onnx"
    cli("plan", model, "--format", "json", "-o", tmp_path / "a.json")
    cli("plan", model, "--exclude", "stem/conv", "--format", "json", "-o", tmp_path / "b.json")
    sides = tmp_path / "a.json", tmp_path / "b.json"
    result = cli("diff", *sides, "--html", tmp_path / "p.html", code=2)
    assert "--model FILE" in result.stderr
    cli("diff", *sides, "--html", tmp_path / "p.html", "--model", model, code=1)
    page = open_viewer(tmp_path / "p.html")
    first_tensors = [str(site.tensor) for site in plan_or_none(sides[0]).sites]
    second_tensors = [str(site.tensor) for site in plan_or_none(sides[1]).sites]
    removed = set(first_tensors) - set(second_tensors)
    assert removed
    assert removed <= set(_list_entries(page))
    assert page.evaluate(
        "viewer.m.annotations.flatMap((annotation, i) => (changeStatus(viewer, 'annotation', i) ==="
        " 'removed' ? [annotation.tensor] : []))"
    ) == [name for name in first_tensors if name in removed]


def test_two_formats_show_the_quantized_side(
    tmp_path: Path, samples: Path, open_viewer: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    """Models of two formats have no matched ops. The page says so, and shows the quantized side with heat."""
    quant, html = tmp_path / "q.onnx", tmp_path / "c.html"
    cli("insert", samples / "digits_cnn.onnx", "--data", samples / "digits_cnn_calib.npz", "--samples", 8, "-o", quant)
    cli(
        "compare",
        samples / "digits_cnn.pb",
        quant,
        "--data",
        samples / "digits_cnn_eval.npz",
        "--samples",
        8,
        "--html",
        html,
    )
    page = open_viewer(html, scheme="dark")
    assert "different formats" in page.locator("#panel").inner_text()
    assert page.evaluate("viewer.panes.length") == 1
    assert len(_list_entries(page)) == page.evaluate("viewer.m.annotations.length")
