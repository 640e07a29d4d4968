"""What models, plans and results show in a notebook."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from typing import TYPE_CHECKING, Any

import pytest

import graphquant as gq
from graphquant.ir import Graph, Model, Op, Output
from graphquant.visualize import notebook

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def result(samples: Path) -> gq.Result:
    """A sample model, quantized."""
    data = str(samples / "digits_cnn_calib.npz")
    return gq.insert(samples / "digits_cnn.onnx", data=data, samples=8, validate=False)


def text(drawn: str) -> str:
    """What its tables say."""
    return unescape("\n".join(re.findall(r"<pre[^>]*>(.*?)</pre>", drawn, re.DOTALL)))


def test_a_model_is_drawn(samples: Path) -> None:
    """Its format, inputs, outputs and ops as text, and the viewer in a frame that cannot reach the notebook."""
    drawn = gq.load(samples / "digits_cnn.onnx")._repr_html_()
    lines = text(drawn).splitlines()
    assert lines[0].endswith("digits_cnn.onnx: onnx, opset 13, 27 ops in 1 graph")
    assert lines[1:3] == ["  inputs  image float32[?, 8, 8, 1]", "  outputs probabilities float32[?, 10]"]
    (attributes,) = re.findall(r"<iframe ([^>]*)>", drawn)
    assert attributes.startswith('sandbox="allow-scripts" ')
    page = unescape(attributes.partition('srcdoc="')[2].removesuffix('"'))
    assert page.startswith("<!DOCTYPE html>")
    assert len(drawn) < 200_000


def test_a_result_is_drawn(result: gq.Result) -> None:
    """What was inserted, and the model with it."""
    drawn = result._repr_html_()
    sites, uses = len(result.inserted), sum(len(done.site.uses) for done in result.inserted)
    assert text(drawn).startswith(f"{sites} sites inserted, {uses} uses rerouted, calibrated on 8 samples. .save(PATH)")
    assert drawn.count("<iframe ") == 1


def test_a_plan_and_a_comparison_are_tables(samples: Path, result: gq.Result) -> None:
    """A plan tells its rules and sites, cut where it is long; a comparison its outputs and worst tensors."""
    told = text(result.plan._repr_html_()).splitlines()
    assert len(told) == notebook.CELL_LINES
    assert f"{sum(site.rule == 'weight' for site in result.plan.sites)} by rule weight:" in "\n".join(told)
    assert re.fullmatch(r"\.\.\. \d+ more lines \.\.\.", told[-2])
    assert told[-1].startswith(f"{len(result.plan.sites)} sites, ")
    found = gq.compare(samples / "digits_cnn.onnx", result.model, str(samples / "digits_cnn_eval.npz"), samples=20)
    told = text(found._repr_html_()).splitlines()
    assert told[0].split()[:3] == ["output", "SQNR", "dB"]
    assert told[-1].endswith("over 20 samples.")


def test_large_models_are_not_drawn_in_a_cell() -> None:
    """Their page would be kept in the notebook's file; the command that draws them is told instead."""
    model = Model(format="onnx", graphs={})
    graph = model.graphs[""] = Graph("", model.graphs)
    before = graph.add_op(Op(name="x", kind="input", type="Input", outputs=(Output("x", "float32", (1,)),)))
    for number in range(notebook.MAX_DRAWN_OPS):
        made = Op(name=f"r{number}", kind="relu", type="Relu", outputs=(Output(f"r{number}", "float32", (1,)),))
        before = graph.add_op(made, [before])
    drawn = model._repr_html_()
    assert "<iframe" not in drawn
    assert "5001 ops are too many for a cell. Draw them: graphquant inspect MODEL --html page.html" in text(drawn)


def test_names_cannot_act_on_the_notebook() -> None:
    """What a model calls its ops is text."""
    model = Model(format="onnx", graphs={})
    graph = model.graphs[""] = Graph("", model.graphs)
    name = "</pre><script>alert(1)</script>"
    graph.add_op(Op(name=name, kind="input", type="Input", outputs=(Output(name, "float32", (1,)),)))
    assert "<script>alert" not in model._repr_html_()


def test_importing_the_package_draws_nothing() -> None:
    """What draws is imported when something is drawn."""
    code = "import graphquant, sys; assert not any('view' in name or name == 'rich' for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ipython_shows_it(samples: Path) -> None:
    """The formatter of a notebook finds the drawing by itself."""
    formatters = pytest.importorskip("IPython.core.formatters")
    found: dict[str, Any] = formatters.DisplayFormatter().format(gq.load(samples / "digits_cnn.onnx"))[0]
    assert found["text/html"].count("<iframe ") == 1


@pytest.mark.slow
def test_the_frame_draws_in_a_browser(samples: Path, tmp_path: Path, browser: Any, until: Callable[..., None]) -> None:
    """Inside a notebook's page the viewer draws, within its frame, without a word on the console."""
    (tmp_path / "cell.html").write_text(gq.load(samples / "digits_cnn.onnx")._repr_html_())
    page, amiss = browser.new_page(), []
    page.on("console", lambda message: amiss.append(message.text))
    page.on("pageerror", lambda error: amiss.append(str(error)))
    page.goto((tmp_path / "cell.html").as_uri())
    until(page.frames[1], "performance.getEntriesByName('drawn').length > 0")
    assert page.frames[1].evaluate("document.querySelectorAll('canvas').length") > 0
    page.close()
    assert amiss == []
