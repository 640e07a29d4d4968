"""HTML of models, plans and results in a notebook."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest

import graphquant as gq
from graphquant.ir import Graph, Model, Op, Output
from graphquant.utils import ShortDict
from graphquant.visualize import pages, text
from graphquant.visualize.tables import render_text

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def sample_result(samples: Path) -> gq.Result:
    """Return the result of quantizing a sample model."""
    data = str(samples / "digits_cnn_calib.npz")
    return gq.insert(samples / "digits_cnn.onnx", data=data, samples=8, validate=False)


def table_text(html: str) -> str:
    """Return the text of the tables in HTML."""
    return unescape("\n".join(re.findall(r"<pre[^>]*>(.*?)</pre>", html, re.DOTALL)))


def test_model_html(samples: Path) -> None:
    """A model shows format, inputs, outputs and ops as text, and the viewer in a sandboxed frame."""
    drawn = gq.load(samples / "digits_cnn.onnx")._repr_html_()
    lines = table_text(drawn).splitlines()
    assert "digits_cnn.onnx: onnx, opset 13, 27 ops" in lines[0]
    assert lines[1:3] == ["  inputs  image float32[?, 8, 8, 1]", "  outputs probabilities float32[?, 10]"]
    (attributes,) = re.findall(r"<iframe ([^>]*)>", drawn)
    assert attributes.startswith('sandbox="allow-scripts" ')
    page = unescape(attributes.partition('srcdoc="')[2].removesuffix('"'))
    assert page.startswith("<!DOCTYPE html>")
    assert len(drawn) < 200_000


def test_result_html(sample_result: gq.Result) -> None:
    """A result shows the number of quantized tensors and one viewer."""
    drawn = sample_result._repr_html_()
    constants = sum(pair.site.parameter for pair in sample_result.inserted)
    counts = [len(sample_result.inserted), len(sample_result.inserted) - constants, constants, 8]
    first, second = table_text(drawn).splitlines()[:2]
    assert list(map(int, re.findall(r"\d+", first))) == counts
    assert ".save(PATH)" in second
    assert drawn.count("<iframe ") == 1


def test_plan_and_comparison_html(samples: Path, sample_result: gq.Result) -> None:
    """A plan shows a truncated table of rules and sites, and a comparison its outputs and worst tensors."""
    lines = table_text(sample_result.plan._repr_html_()).splitlines()
    assert len(lines) == pages.CELL_LINES
    assert f"{sum(site.rule == 'weight' for site in sample_result.plan.sites)} by rule weight:" in "\n".join(lines)
    assert re.fullmatch(r"\.\.\. \d+ more lines \.\.\.", lines[-2])
    assert lines[-1].startswith(f"{len(sample_result.plan.sites)} tensors to quantize: ")
    comparison = gq.compare(
        samples / "digits_cnn.onnx", sample_result.model, str(samples / "digits_cnn_eval.npz"), samples=20
    )
    lines = table_text(comparison._repr_html_()).splitlines()
    assert lines[0].split()[:3] == ["output", "SQNR", "dB"]
    assert lines[-1].endswith("over 20 samples.")


MAX_CELL_LENGTH = 300_000
MAX_TEXT_LENGTH = 1000


def assert_short(value: Any) -> None:
    """Check that the text of an object is one short line, and its HTML fits into a notebook."""
    line = repr(value)
    assert line.startswith(f"{type(value).__name__}(")
    assert len(line) <= MAX_TEXT_LENGTH
    assert "\n" not in line
    drawn = value._repr_html_()
    assert drawn.startswith("<pre")
    assert len(drawn) < MAX_CELL_LENGTH


def test_public_objects_are_short(samples: Path, sample_result: gq.Result) -> None:
    """The text and the HTML of each public object are short."""
    data, model = samples / "digits_cnn_eval.npz", gq.load(samples / "digits_cnn.onnx")
    for value in (
        model,
        sample_result,
        sample_result.plan,
        sample_result.stats,
        gq.compare(model, sample_result.model, data, samples=4),
        gq.check(sample_result.model, backend="onnxruntime"),
        gq.check_data(model, data),
        gq.diff(model, sample_result.model),
        gq.strip(sample_result.model),
    ):
        assert_short(value)


def test_result_tells_its_figures(samples: Path) -> None:
    """The text of a result has its error, its size, its time and its share in int8."""
    result = gq.insert(samples / "digits_cnn.onnx", data=samples / "digits_cnn_calib.npz", samples=16)
    assert result.validation is not None
    assert result.validation.comparison is not None
    assert repr(result).startswith(f"Result(SQNR of the worst output: {result.validation.comparison.sqnr:.2f} dB, ")
    pattern = r"constants: [\d,]+ of [\d,]+ bytes, time: [\d.]+ of float, quantized multiply-adds: [\d.]+%"
    assert re.search(pattern, repr(result))


def test_collections_of_results_are_short() -> None:
    """The text of long tuples and dictionaries has the first items; otherwise they are tuples and dictionaries."""
    result = gq.insert(make_chain(40), rules="weight_only")
    for items in (result.inserted, result.plan.sites, ShortDict.fromkeys(range(40), "x" * 1000)):
        lines = repr(items).splitlines()
        assert len(lines) == 5
        assert lines[-1].startswith(" ... 36 more")
        assert max(map(len, lines)) < 120
    assert isinstance(result.inserted, tuple)
    assert result.plan.sites == (*result.plan.sites,)
    assert isinstance(result.site_notes, dict)


def make_chain(op_count: int, suffix: str = "") -> onnx.ModelProto:
    """Return a chain of matrix products, of which each has a weight of its own."""
    weight = np.random.default_rng(0).normal(size=(2, 2)).astype(np.float32)
    infos = [onnx.helper.make_tensor_value_info(f"x{name}{suffix}", 1, ["N", 2]) for name in (0, op_count)]
    nodes = [
        onnx.helper.make_node("MatMul", [f"x{number}{suffix}", f"w{number}"], [f"x{number + 1}{suffix}"])
        for number in range(op_count)
    ]
    weights = [onnx.numpy_helper.from_array(weight, f"w{number}") for number in range(op_count)]
    graph = onnx.helper.make_graph(nodes, "chain", infos[:1], infos[1:], weights)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.slow
def test_terminal_text_is_bounded(monkeypatch) -> None:
    """The summary of a large result has few lines, and its tables have a limit in all."""
    monkeypatch.setattr(text, "ROWS_SHOWN", 50)
    result = gq.insert(make_chain(400), rules="weight_only")
    lines = {tables: render_text(text.result_view(result, tables=tables)).splitlines() for tables in (True, False)}
    assert len(result.inserted) == 400
    assert len(lines[False]) <= 15
    assert 50 <= len(lines[True]) <= 70
    assert len(render_text(text.plan_view(result.plan)).splitlines()) <= 70


@pytest.mark.parametrize(
    ("op_count", "suffix"), [pytest.param(1500, "", marks=pytest.mark.slow), (400, ""), (20, "n" * 20_000)]
)
def test_objects_of_large_models_are_short(op_count: int, suffix: str) -> None:
    """The text and the HTML stay short for many ops, and for long names."""
    model = gq.load(make_chain(op_count, suffix))
    quantized = gq.insert(model, rules="weight_only")
    for value in (model, quantized, quantized.plan, gq.check(quantized.model), gq.diff(model, quantized.model)):
        assert_short(value)


def test_large_models_are_not_drawn_in_a_cell() -> None:
    """A large model shows the command that draws it, because its page would be stored in the notebook."""
    model = Model(format="onnx", graphs={})
    graph = model.graphs[""] = Graph("", model.graphs)
    producer = graph.add_op(Op(name="x", kind="input", type="Input", outputs=(Output("x", "float32", (1,)),)))
    for number in range(pages.MAX_DRAWN_OPS):
        op = Op(name=f"r{number}", kind="relu", type="Relu", outputs=(Output(f"r{number}", "float32", (1,)),))
        producer = graph.add_op(op, [producer])
    drawn = model._repr_html_()
    assert "<iframe" not in drawn
    assert re.search(r"\b5001 ops .*: graphquant inspect MODEL --html page\.html", table_text(drawn))


def test_names_are_escaped() -> None:
    """Markup in names is escaped."""
    model = Model(format="onnx", graphs={})
    graph = model.graphs[""] = Graph("", model.graphs)
    name = "</pre><script>alert(1)</script>"
    graph.add_op(Op(name=name, kind="input", type="Input", outputs=(Output(name, "float32", (1,)),)))
    assert "<script>alert" not in model._repr_html_()


def test_import_does_not_load_drawing_modules() -> None:
    """Importing the package imports no module for drawing."""
    code = "import graphquant, sys; assert not any('view' in name or name == 'rich' for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ipython_formatter(samples: Path) -> None:
    """IPython's formatter uses the HTML of a model."""
    formatters = pytest.importorskip("IPython.core.formatters")
    formats: dict[str, Any] = formatters.DisplayFormatter().format(gq.load(samples / "digits_cnn.onnx"))[0]
    assert formats["text/html"].count("<iframe ") == 1


@pytest.mark.slow
def test_viewer_draws_inside_the_frame(samples: Path, tmp_path: Path, browser: Any, until: Callable[..., None]) -> None:
    """The viewer draws in the notebook's frame without messages on the console."""
    (tmp_path / "cell.html").write_text(gq.load(samples / "digits_cnn.onnx")._repr_html_())
    page, messages = browser.new_page(), []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto((tmp_path / "cell.html").as_uri())
    until(page.frames[1], "performance.getEntriesByName('drawn').length > 0")
    assert page.frames[1].evaluate("document.querySelectorAll('canvas').length") > 0
    page.close()
    assert messages == []


@pytest.mark.parametrize(("output", "notes"), [("a.pb", 1), ("a.tflite", 0)])
def test_tensorflow_results_gain_no_time(samples: Path, output: str, notes: int) -> None:
    """The summary of a model in TensorFlow's own format names the format that runs on integers."""
    result = gq.insert(samples / "digits_cnn.pb", rules="weight_only")
    lines = render_text(text.result_view(result, to_tflite=output.endswith(".tflite"))).splitlines()
    assert sum(line.startswith("note: ") and ".tflite" in line for line in lines) == notes
