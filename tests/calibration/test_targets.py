"""Calibration targets: observed tensors and collected details."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.plans import make_plan

import graphquant as gq
from graphquant.calibration.targets import (
    ObservationTarget,
    all_float_targets,
    finest_histogram_bits,
    plan_targets,
    sites_needing_data,
    with_observer,
)
from graphquant.errors import UsageError
from graphquant.ir import Graph, Op, Output, TensorRef, Use
from graphquant.quantize import Site
from graphquant.rules import Scheme

RELU = TensorRef("", "stem/relu")
POOL = TensorRef("", "max_pool")


def site_of_one_use(tensor: TensorRef = RELU, *, dtype="int8", observe="minmax", **changes) -> Site:
    """Return a site with one use."""
    scheme = Scheme(dtype=dtype, observe=observe)
    return Site(tensor=tensor, graph="", uses=(Use("", "reader", 0),), scheme=scheme, **changes)


@pytest.fixture
def loaded_cnn(samples: Path) -> gq.Model:
    """Load the sample CNN."""
    return gq.load(samples / "digits_cnn.onnx")


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, True),
        ({"observe": "absmax"}, True),
        ({"tie": (Use("", "b_reader", 0),)}, True),
        ({"parameter": True}, False),
        ({"range": (-1.0, 1.0)}, False),
        ({"scale": (0.5,), "zero_point": (0,)}, False),
        ({"observe": {"name": "fixed", "low": 0, "high": 6}}, False),
        ({"observe": {"name": "fixed-point", "exponent": -4}}, False),
    ],
)
def test_sites_needing_data(changes, needed: bool) -> None:
    """Weights and given ranges need no data; other sites do."""
    one = site_of_one_use(**changes)
    assert sites_needing_data(make_plan(one)) == ((one,) if needed else ())


def test_axis_of_targets(loaded_cnn: gq.Model) -> None:
    """A tensor is observed per channel if all its sites have the same axis."""
    for axes, kept in (((1,), 1), ((1, 1), 1), ((1, None), None), ((1, 0, 1), None), ((None,), None)):
        found = plan_targets(
            loaded_cnn, loaded_cnn, make_plan(*(site_of_one_use(axis=axis) for axis in axes)), full_histograms=True
        )
        assert found[RELU].axis == kept


def test_histogram_bits(loaded_cnn: gq.Model) -> None:
    """Histograms have seven bits up to int8, ten above, and none if only min and max are needed."""
    sites = site_of_one_use(), site_of_one_use(dtype="int16"), site_of_one_use(POOL)
    full = plan_targets(loaded_cnn, loaded_cnn, make_plan(*sites), full_histograms=True)
    assert {tensor: target.bits for tensor, target in full.items()} == {RELU: 10, POOL: 7}
    bare = plan_targets(loaded_cnn, loaded_cnn, make_plan(*sites), full_histograms=False)
    assert {tensor: target.bits for tensor, target in bare.items()} == {RELU: 0, POOL: 0}
    assert (
        finest_histogram_bits(make_plan(*sites)),
        finest_histogram_bits(make_plan(sites[2])),
        finest_histogram_bits(make_plan()),
    ) == (10, 7, 7)


def test_all_float_targets(samples: Path) -> None:
    """All float activations are targets, including those of subgraphs; parameters and integers are not."""
    for name in ("digits_cnn.onnx", "digits_rnn.onnx", "digits_cnn.pb", "digits_rnn_saved_model"):
        model = gq.load(samples / name)
        found = all_float_targets(model)
        for rules in ("onnxruntime", "tflite", "tensorrt", "fixed_point"):
            made = gq.plan(model, rules=[rules])
            sites = {one.tensor for one in made.sites if not one.parameter and not made.steps}
            assert sites <= set(found)
        assert all(target.bits == 7 and target.axis is None for target in found.values())
        assert all(model.output(tensor).dtype in {"float32", "float16"} for tensor in found)


def test_rescaled_tensors_are_observed_anew(loaded_cnn: gq.Model) -> None:
    """A tensor has the fingerprint of its value before preparation, unless an algorithm scaled its channels."""
    prepared = loaded_cnn.copy()
    prepared.opset = loaded_cnn.opset + 1
    prepared.main.replace_op(replace(prepared.op(POOL), attrs={**prepared.op(POOL).attrs, "storage_order": 1}))
    plan = make_plan(site_of_one_use(), site_of_one_use(POOL))
    before, after, rescaled = (
        {
            tensor: target.fingerprint
            for tensor, target in plan_targets(
                loaded_cnn, model, plan, full_histograms=True, rescaled=scaled_tensors
            ).items()
        }
        for model, scaled_tensors in ((loaded_cnn, ()), (prepared, ()), (prepared, {POOL}))
    )
    assert after == before
    assert {tensor: rescaled[tensor] == before[tensor] for tensor in rescaled} == {RELU: True, POOL: False}


def test_targets_of_kinds() -> None:
    """Stored values, tensors that are not read, integers, and tensors on their way to the next iteration are none."""
    model = gq.Model(format="tensorflow")
    graph = model.graphs[""] = Graph("", model.graphs)
    expected, unread = ("relu", "input", "merge"), (Output("", "float32"),)
    for kind in (*expected, "constant", "variable", "next_iteration"):
        graph.add_op(Op(name=kind, kind=kind, type=kind, outputs=(Output("", "float32"), Output("", "int32"))))
        for port in (0, 1):
            source = TensorRef("", kind, port)
            graph.add_op(Op(name=f"reader {port} of {kind}", kind="relu", type="Relu", outputs=unread), [source])
    assert set(all_float_targets(model)) == {TensorRef("", kind) for kind in expected}


@pytest.mark.parametrize(
    ("kept", "wanted", "reason"),
    [
        ((None, 7), (None, 7), ""),
        ((None, 10), (None, 7), ""),
        ((None, 7), (None, 0), ""),
        ((1, 7), (1, 7), ""),
        ((1, 7), (None, 0), ""),
        ((None, 7), (1, 7), ".* all channels .* axis 1"),
        ((1, 7), (None, 7), ".* axis 1.* all channels .*"),
        ((None, 7), (None, 10), ".* 7 .* 10"),
        ((None, 0), (None, 7), "no .* 7"),
    ],
)
def test_shortfall(kept: tuple, wanted: tuple, reason: str) -> None:
    """Finer bins serve coarser ones, and per-channel extremes serve per-tensor ones."""
    assert re.fullmatch(reason, ObservationTarget("", *kept).shortfall(ObservationTarget("", *wanted)))


def test_method_replaces_observers() -> None:
    """Sites that need data get the method; all others stay."""
    fixed = site_of_one_use(POOL, observe={"name": "fixed", "low": 0, "high": 6})
    weight = site_of_one_use(TensorRef("", "w"), parameter=True)
    made = with_observer(make_plan(site_of_one_use(), fixed, weight), "absmax")
    assert [one.scheme.observe.name for one in made.sites] == ["absmax", "fixed", "minmax"]
    assert with_observer(made, None) is made


@pytest.mark.parametrize(("name", "near"), [("absmx", "'absmax'"), ("fixed", "Use "), ("bias", "Use ")])
def test_unknown_methods(name: str, near: str) -> None:
    """An unknown method gives suggestions. Observers with arguments are not methods."""
    with pytest.raises(UsageError, match=f"'{name}'.*{near}"):
        with_observer(make_plan(site_of_one_use()), name)


@pytest.mark.slow
@pytest.mark.parametrize("rules", ["onnxruntime", "tflite", "tensorrt"])
def test_all_float_targets_in_frames(rules: str, model_folder: Path, samples: Path) -> None:
    """All tensors that a plan needs data for, including those that enter loops, are float targets."""
    for path in (samples / "digits_rnn.pb", model_folder / "mtcnn.pb"):
        model = gq.load(path)
        wanted = plan_targets(model, model, gq.plan(model, rules=[rules]), full_histograms=True)
        assert len(wanted) > 3
        assert set(wanted) <= set(all_float_targets(model))
