"""What each quantization adds alone at the outputs, by switches in one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.parser
import pytest

import graphquant as gq
from graphquant.accuracy import blame
from graphquant.accuracy.blame import _choices
from graphquant.accuracy.switches import switchable, switched
from graphquant.comparison import sites_of
from graphquant.data import open_data
from graphquant.formats import module
from graphquant.pipeline.planning import prepared_for
from graphquant.rewrite import rewrite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


def ranks(values: Any) -> Any:
    """The place of each value."""
    return np.argsort(np.argsort(values)).astype(float)


def correlation(one: Any, other: Any) -> float:
    """Spearman's, of two lists without ties."""
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def share(plain: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """The squared error of the worst output, as a share of its squares."""
    pairs = [(plain[name].astype(np.float64), found[name]) for name in plain if plain[name].dtype.kind == "f"]
    return max(float(((found - value) ** 2).sum() / (value**2).sum()) for value, found in pairs)


def together(runner: Any, feeds: list[Any], more: Any) -> dict[str, Any]:
    """The outputs of all feeds."""
    ran = [runner.run({**feed, **more}) for feed in feeds]
    return {name: np.concatenate([one[name] for one in ran]) for name in ran[0]}


@pytest.fixture
def made(samples: Path) -> Callable[[str], gq.Result]:
    """Quantizes a sample model by the rules of its format."""

    def make(name: str) -> gq.Result:
        data = samples / f"{name.partition('.')[0]}_calib.npz"
        return gq.insert(samples / name, data=str(data), samples=40, check=False)

    return make


@pytest.mark.parametrize(
    "name",
    ["digits_cnn.onnx", "digits_rnn.onnx", "digits_nested.onnx", pytest.param("digits_cnn.pb", marks=pytest.mark.slow)],
)
def test_switches(made: Callable[[str], gq.Result], samples: Path, name: str) -> None:
    """All off is the float model, all on is quantized as much as the quantized one, and those left on need no input."""
    result = made(name)
    choices = _choices(result.model, sites_of(result.source, result.model))[1]
    open_ = switchable(result.model, choices)
    stuck = set(range(len(choices))) - set(open_)
    assert bool(stuck) == (name == "digits_nested.onnx")  # which has sites in a function
    format_ = module(result.source.format)
    both = switched(result.model, choices, by_input=open_, on=stuck)
    data = np.load(samples / f"{name.partition('.')[0]}_calib.npz")["image"][:4]
    key = format_.inputs(result.source)[0].name
    feeds = [{key: image[None]} for image in data]
    plain = together(format_.runner(result.source), feeds, {})
    runner = format_.runner(both.model)
    if not stuck:
        assert share(plain, together(runner, feeds, both.feed())) < 1e-10
    quantized = share(plain, together(format_.runner(result.model), feeds, {}))
    on = share(plain, together(runner, feeds, both.feed(set(open_))))
    assert quantized / 4 < on < quantized * 4
    fixed = switched(result.model, choices, by_input=(), on=set(range(len(choices))))
    assert fixed.inputs == {}
    assert share(plain, together(format_.runner(fixed.model), feeds, {})) == pytest.approx(quantized, rel=1e-6)


def _alone(result: gq.Result, feeds: list[Any]) -> dict[tuple[str, str], float]:
    """For each site the error of a model in which the site alone is quantized, on all samples."""
    prepared = prepared_for(result.source, result.plan)
    format_ = module(prepared.format)
    plain = together(format_.runner(prepared), feeds, {})
    found = {}
    for done in result.inserted:
        index = result.plan.sites.index(done.site)
        model, (inserted,) = rewrite(prepared, result.plan, {index: done.params})
        error = share(plain, together(format_.runner(model), feeds, {}))
        found.update({(output.graph, output.op): error for output in done.outputs})
        assert inserted.folded == done.folded
    return found


@pytest.mark.parametrize("name", ["digits_rnn.onnx", pytest.param("digits_cnn.pb", marks=pytest.mark.slow)])
def test_ranks_are_those_of_one_at_a_time(made: Callable[[str], gq.Result], samples: Path, name: str) -> None:
    """The rank correlation with models of one quantized tensor each, on all samples, is at least 0.9."""
    result = made(name)
    spec = str(samples / f"{name.partition('.')[0]}_calib.npz")
    runner = module(result.source.format).runner(result.source)
    batches = open_data(spec, runner.inputs)
    inputs = {one.name: one.name for one in runner.inputs}
    sites = sites_of(result.source, result.model)
    found = blame(result.model, sites, batches, inputs=inputs, batchable=runner.batchable)
    assert found.passes <= 16
    honest = _alone(result, list(batches))
    places = [place for place in found.errors if place in honest]
    assert len(places) >= 20
    assert correlation([found.errors[one] for one in places], [honest[one] for one in places]) >= 0.9


def test_in_functions(made: Callable[[str], gq.Result], samples: Path) -> None:
    """Tensors in functions, which no input can rule, are measured one by one; the figure is the same kind of figure."""
    result = made("digits_nested.onnx")
    found = gq.compare(result.source, result.model, str(samples / "digits_nested_calib.npz"), samples=30, blame=True)
    inside = [one for one in found.sites if one.graph == "sample_models:Block"]
    assert len(inside) >= 4
    assert all(one.blame is not None and 30 < one.blame < 120 for one in inside)
    known = [one.blame for one in found.sites if one.blame is not None]
    assert known == sorted(known)


def test_the_worst_is_first(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """A coarse scale that the output hardly feels is behind a finer one that it feels, and both are as computed."""
    text = """
    <ir_version: 8, opset_import: ["" : 13]>
    net (float[N, 4] x) => (float[N, 4] y)
    { a = Relu(x) b = Mul(a, tiny) c = Neg(x) d = Sub(b, c) e = Tanh(d) y = Mul(e, one) }
    """
    model = onnx.parser.parse_model(text)
    for name, value in (("tiny", 0.001), ("one", 1.0)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(4, value, np.float32), name))
    onnx.save(model, tmp_path / "net.onnx")
    rules = """
    [scheme.coarse]
    bits = 8
    observe = { name = "fixed-point", exponent = -1 }
    [scheme.fine]
    bits = 8
    observe = { name = "fixed-point", exponent = -4 }
    [[rule]]
    name = "coarse"
    producer = { name = "a" }
    quantize = "coarse"
    [[rule]]
    name = "fine"
    producer = { name = "c" }
    quantize = "fine"
    """
    (tmp_path / "rules.toml").write_text(rules)
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    gq.insert(tmp_path / "net.onnx", rules=str(tmp_path / "rules.toml")).save(tmp_path / "quant.onnx")
    call = (tmp_path / "net.onnx", tmp_path / "quant.onnx", "--data", tmp_path / "data.npz")
    assert "at outputs dB" not in cli("compare", *call).stdout
    assert "at outputs dB" in cli("compare", *call, "--blame").stdout
    first, second = gq.compare(
        tmp_path / "net.onnx", tmp_path / "quant.onnx", str(tmp_path / "data.npz"), blame=True
    ).sites
    assert (first.tensor, second.tensor) == ("c:0", "a:0")
    assert second.local < first.local  # whose own error is smaller
    rounded = np.round(-x * 16) / 16
    exact, found = (np.tanh(0.001 * np.maximum(x, 0) - c) for c in (-x, rounded))
    expected = 10 * np.log10((exact**2).sum() / ((exact - found) ** 2).sum())
    assert first.blame == pytest.approx(expected, abs=0.01)


def test_usage(cli: Callable[..., Any], tmp_path: Path) -> None:
    """Blame is of quantized tensors."""
    said = cli("compare", "a.onnx", "b.onnx", "--data", "random:1", "--blame", "--outputs-only", code=2).stderr
    assert said.startswith("Error: --blame is of quantized tensors.")
