"""Pages of two models in a browser: compare's heat, diff's colors, one layout, view and selection for both sides."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from PIL import Image

from graphquant import api

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow

PLANTED = "pointwise/relu:0"


@pytest.fixture
def pair(tmp_path: Path, samples: Path, cli: Callable[..., Any]) -> tuple[Path, Path, Path]:
    """A sample model, what insert makes of it, and that with one scale ten times too small."""
    source = samples / "digits_cnn.onnx"
    cli("insert", source, "--data", samples / "digits_cnn_calib.npz", "--samples", 20, "-o", tmp_path / "quant.onnx")
    message = onnx.load(tmp_path / "quant.onnx")
    scale = next(node.input[1] for node in message.graph.node if node.input and node.input[0] == PLANTED)
    held = next(one for one in message.graph.initializer if one.name == scale)
    held.CopyFrom(numpy_helper.from_array(np.float32(0.1) * numpy_helper.to_array(held), scale))
    onnx.save(message, tmp_path / "wrong.onnx")
    return source, tmp_path / "quant.onnx", tmp_path / "wrong.onnx"


@pytest.fixture
def compared(pair: tuple[Path, Path, Path], samples: Path, tmp_path: Path, cli: Callable[..., Any]) -> Path:
    """The page of a comparison in which a fault was planted, with its JSON beside it."""
    source, _, wrong = pair
    data = ("--data", samples / "digits_cnn_eval.npz", "--samples", 20, "--format", "json")
    cli("compare", source, wrong, *data, "-o", tmp_path / "c.json", "--html", tmp_path / "c.html")
    return tmp_path / "c.html"


@pytest.fixture
def differing(pair: tuple[Path, Path, Path], tmp_path: Path, cli: Callable[..., Any]) -> Path:
    """The page of two models that differ in a scale, the type of an op, and the name of one."""
    message = onnx.load(pair[2])
    for node in message.graph.node:
        if node.name == "stem/relu":
            node.op_type = "Sigmoid"
        if node.name == "depthwise/relu6":
            node.name = "depthwise/renamed"
    onnx.save(message, tmp_path / "other.onnx")
    cli("diff", pair[1], tmp_path / "other.onnx", "--html", tmp_path / "d.html", code=1)
    return tmp_path / "d.html"


def _listed(page: Any) -> list[str]:
    return page.locator("#list li button > span:nth-child(2)").evaluate_all(
        "all => all.map(one => one.firstChild.data)"
    )


def _names(page: Any, side: int) -> list[str]:
    """What is drawn on a side, as it is called there."""
    return page.evaluate(
        f"Array.from(viewer.m.side.op).flatMap((mask, op) => (mask & {side} ?"
        f" [{side} === 1 && viewer.m.firstBoxes[op] ? viewer.m.firstBoxes[op].name : viewer.m.name(op)] : []))"
    )


def _color(page: Any, canvas: str, op: str) -> tuple[int, ...]:
    """The color on the screen of an op's box, near its lower left corner inside of the bar."""
    x, y = page.evaluate(
        f"""(() => {{
          const op = viewer.m.ops.name.findIndex((_, one) => viewer.m.full(one) === {json.dumps(op)});
          const {{ view, s, m }} = viewer, box = document.getElementById("{canvas}").getBoundingClientRect();
          const x = s.x[op] - m.ops.width[op] / 2 + 12, y = s.boxTop(m.layer[op]) + 22;
          return [box.left + view.x + x * view.k, box.top + view.y + y * view.k];
        }})()"""
    )
    shown = page.screenshot(clip={"x": x, "y": y, "width": 1, "height": 1})
    return Image.open(io.BytesIO(shown)).convert("RGB").getpixel((0, 0))


def test_the_worst_is_first_and_hot(compared: Path, opened: Callable[..., Any]) -> None:
    """The list holds compare's tensors and figures in its order; the planted fault leads, and is the hottest."""
    page = opened(compared)
    told = json.loads(compared.with_suffix(".json").read_text("utf-8"))["sites"]
    wanted = [one["tensor"] for one in told if one["local"] is not None or one["exact"]]
    assert _listed(page)[:2] == wanted[:2]
    assert sorted(_listed(page)) == sorted(one["tensor"] for one in told)
    figures = page.locator("#list li button > small").all_inner_texts()
    assert figures[0] == f"{told[0]['local']:.1f} dB"
    assert wanted[0] == PLANTED
    page.keyboard.press("n")
    assert page.locator("#panel h2").inner_text() == PLANTED
    assert page.locator("#panel output.figure").all_inner_texts() == [
        f"{told[0]['local']:.2f} dB",
        f"{told[0]['accumulated']:.2f} dB",
    ]
    page.wait_for_timeout(100)
    hot = page.evaluate("viewer.color.h4")
    assert _color(page, "graph", "max_pool") == tuple(bytes.fromhex(hot[1:]))
    assert _color(page, "other", "max_pool") == tuple(bytes.fromhex(hot[1:]))
    assert "Colors: its own error" in (page.keyboard.press("?"), page.locator("#panel").inner_text())[1]


def test_other_colors(compared: Path, opened: Callable[..., Any]) -> None:
    """The switch and the key h go from the error of its own to that so far, to plain quantization; the list follows."""
    page = opened(compared)
    told = json.loads(compared.with_suffix(".json").read_text("utf-8"))["sites"]
    page.locator("#by-color").select_option(label="error so far")
    known = [one for one in told if one["accumulated"] is not None]
    lowest = min(one["accumulated"] for one in known)
    assert page.locator("#list li button > small").first.inner_text() == f"{lowest:.1f} dB"
    assert "error so far" in page.locator("#list h2").inner_text()
    page.locator("#graph").focus()
    page.keyboard.press("h")
    assert page.locator("#by-color").input_value() == "quant"
    assert "inputs quantized" in page.locator("#panel").inner_text()
    page.keyboard.press("h")
    assert page.locator("#by-color").input_value() == "0"


def test_filter_by_figure(compared: Path, opened: Callable[..., Any]) -> None:
    """What is worse than so many dB is found, the worst first, by the figure that is shown."""
    page = opened(compared)
    told = json.loads(compared.with_suffix(".json").read_text("utf-8"))["sites"]
    figures = (
        "viewer.matches.filter((one) => one.kind === 'annotation').map((one) =>"
        " viewer.m.heat.values[one.annotation][viewer.column])"
    )
    for column, name in enumerate(("local", "accumulated")):
        page.locator("#by-color").select_option(str(column))
        page.locator("#by-sqnr").fill("42")
        found = page.evaluate(figures)
        assert found == sorted(found)
        assert len(found) == sum(one[name] is not None and one[name] < 42 for one in told) > 0


def test_a_model_compared_with_itself(compared: Path, opened: Callable[..., Any], until: Callable[..., None]) -> None:
    """One op is at one place on both sides; moving on one moves both; a click on either selects for both."""
    page = opened(compared)
    assert _names(page, 1) == _names(page, 2)
    one, other = (page.locator(f"#{name}").bounding_box() for name in ("graph", "other"))
    assert (one["width"], one["y"]) == (pytest.approx(other["width"], abs=2), other["y"])
    view = "[viewer.view.x, viewer.view.y, viewer.view.k]"
    x, y, k = page.evaluate(view)
    page.mouse.move(other["x"] + 30, 400)
    page.mouse.down()
    page.mouse.move(other["x"] + 50, 430, steps=4)
    page.mouse.up()
    assert page.evaluate(view) == [x + 20, y + 30, k]
    page.evaluate("location.hash = '#op=pointwise%2Fconv'")
    until(page, "document.querySelector('#panel h2').textContent === 'pointwise/conv'")
    for box in (one, other):
        page.mouse.click(box["x"] + 12, box["y"] + box["height"] - 60)
        assert page.locator("#panel h2").inner_text() != "pointwise/conv"
        place = page.evaluate(
            """(() => { const op = viewer.m.ops.name.findIndex((_, one) => viewer.m.full(one) === "pointwise/conv");
            return [viewer.s.x[op] * viewer.view.k + viewer.view.x,
                    (viewer.s.boxTop(viewer.m.layer[op]) + 22) * viewer.view.k + viewer.view.y]; })()"""
        )
        page.mouse.click(box["x"] + place[0], box["y"] + place[1])
        assert page.locator("#panel h2").inner_text() == "pointwise/conv"


def test_showing_one_side(compared: Path, opened: Callable[..., Any]) -> None:
    """The key v shows the first side, then the second, then both; annotations are on the quantized side alone."""
    page = opened(compared)
    for visible in ((True, False), (False, True), (True, True)):
        page.locator(f"#{'graph' if page.locator('#graph').is_visible() else 'other'}").focus()
        page.keyboard.press("v")
        assert (page.locator("#graph").is_visible(), page.locator("#other").is_visible()) == visible
    page.wait_for_timeout(100)
    assert page.evaluate("viewer.panes.map((pane) => pane.hits.some((hit) => hit.annotation !== undefined))") == [
        False,
        True,
    ]


def test_the_list_of_changes_jumps(differing: Path, opened: Callable[..., Any]) -> None:
    """Each change is listed as diff tells it; a click selects what it is about and brings it into view."""
    page = opened(differing)
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


def test_colors_of_changes(differing: Path, opened: Callable[..., Any], until: Callable[..., None]) -> None:
    """Removed ops are red and on the first side alone, added ones green and on the second; what is the same is grey."""
    page = opened(differing)
    assert "depthwise/relu6" in _names(page, 1)
    assert "depthwise/renamed" in _names(page, 2)
    rgb = {name: tuple(bytes.fromhex(page.evaluate(f"viewer.color.{name}")[1:])) for name in ("changedbox", "box")}
    page.evaluate("location.hash = '#op=depthwise%2Frenamed'")
    until(page, "document.querySelector('#panel h2').textContent === 'depthwise/renamed'")
    page.wait_for_timeout(100)
    assert _color(page, "graph", "depthwise/renamed") == _color(page, "other", "depthwise/renamed") == rgb["changedbox"]
    assert _color(page, "other", "pointwise/conv") == rgb["box"]
    assert "depthwise/relu6" in page.locator("#panel").inner_text()
    status = page.evaluate(
        "Array.from(viewer.m.side.op).flatMap((side, op) =>"
        " (viewer.m.full(op) === 'stem/relu' ? [[side, viewer.m.type(op), changeStatus(viewer, 'op', op)]] : []))"
    )
    assert sorted(status) == [[1, "Relu", "removed"], [2, "Sigmoid", "added"]]


def test_scales_old_to_new(differing: Path, opened: Callable[..., Any]) -> None:
    """The annotation of a scale that changed shows both numbers on the second side, and so does the panel."""
    page = opened(differing, PLANTED)
    (number,) = page.evaluate(
        "viewer.m.annotations.flatMap((one, i) => (i >= viewer.m.sides.split && one.tensor ==="
        f" '{PLANTED}' ? [i] : []))"
    )
    old, new = page.evaluate(
        f"[viewer.m.counterparts[{number}], {number}].map((one) => Math.fround(viewer.m.annotations[one].scale[0]))"
    )
    assert new == pytest.approx(old / 10)
    assert page.evaluate(f"annotationLabel(viewer, {number})") == f"u8 {old:.3g} → {new:.3g}"
    page.locator("#list li button", has_text="scale").click()
    row = page.locator("#panel tr", has_text="→").inner_text().split()
    assert (float(row[1]), float(row[3])) == (old, new)


def test_two_plans(tmp_path: Path, samples: Path, opened: Callable[..., Any], cli: Callable[..., Any]) -> None:
    """Plans are drawn on their model; a site that one alone has is colored; without a model they are refused."""
    model = samples / "digits_cnn.onnx"
    cli("plan", model, "--format", "json", "-o", tmp_path / "a.json")
    cli("plan", model, "--exclude", "stem/conv", "--format", "json", "-o", tmp_path / "b.json")
    sides = tmp_path / "a.json", tmp_path / "b.json"
    done = cli("diff", *sides, "--html", tmp_path / "p.html", code=2)
    assert "--model FILE" in done.stderr
    cli("diff", *sides, "--html", tmp_path / "p.html", "--model", model, code=1)
    page = opened(tmp_path / "p.html")
    gone = [str(site.tensor) for site in api.plan_or_none(sides[0]).sites]
    kept = [str(site.tensor) for site in api.plan_or_none(sides[1]).sites]
    lost = set(gone) - set(kept)
    assert lost
    assert lost <= set(_listed(page))
    assert page.evaluate(
        "viewer.m.annotations.flatMap((one, i) => (changeStatus(viewer, 'annotation', i) ==="
        " 'removed' ? [one.tensor] : []))"
    ) == [name for name in gone if name in lost]


def test_two_formats_show_the_quantized_side(
    tmp_path: Path, samples: Path, opened: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    """Of a TensorFlow model and an ONNX one nothing inside is matched: the page says so, and has heat all the same."""
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
    page = opened(html, scheme="dark")
    assert "different formats" in page.locator("#panel").inner_text()
    assert page.evaluate("viewer.panes.length") == 1
    assert len(_listed(page)) == page.evaluate("viewer.m.annotations.length")
