"""Scales of a TFLite file for the tensors of another model: which names match, what is taken, what is said."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import graphquant as gq
from graphquant.errors import UsageError
from graphquant.ir import Graph, Model, Op, Output, StoredQuantization, TensorRef
from graphquant.quantize import prepare, read_name_map, transfer_ranges

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("rules_alone")


def tflite(*tensors: tuple[Any, ...]) -> Model:
    """A TFLite model of tensors (name, scale, zero point[, kind[, dtype]])."""
    model = Model(format="tflite")
    model.graphs[""] = Graph("", model.graphs)
    for index, (name, scale, zero, *more) in enumerate(tensors):
        kind, dtype = (more + ["conv", "int8"][len(more) :])[:2]
        scales, zeros = np.atleast_1d(np.float32(scale)), np.atleast_1d(np.int64(zero))
        output = Output(name, dtype, None, StoredQuantization(index=index, sizes=(), scale=scales, zero_point=zeros))
        model.main.add_op(Op(name=f"op{index}", kind=kind, type="X", outputs=(output,)))
    return model


@pytest.fixture
def planned(samples: Path) -> tuple[Model, gq.Plan]:
    """The sample CNN, prepared, with its plan for TFLite."""
    model = gq.load(samples / "digits_cnn.pb")
    plan = gq.plan(model, rules=["tflite"])
    return prepare(model, [step.step for step in plan.steps])[0], plan


def planned_site_of(plan: gq.Plan, op: str) -> Any:
    """The first site of what `op` makes."""
    return next(planned_site for planned_site in plan.sites if planned_site.tensor.op == op)


def test_exact_scales(planned):
    """By plain name, by fused names in any order, and behind a function's prefix."""
    source = tflite(
        ("stem/conv;stem/batch_norm;stem/relu", 0.5, -128),
        ("StatefulPartitionedCall/residual/add;StatefulPartitionedCall/residual/relu", 0.25, -128),
        ("max_pool", 0.5, -128),
        ("image/quant;image/quant/min", 0.125, 3),
    )
    plan, transfer = transfer_ranges(*planned, source, {})
    options = {str(transferred.tensor): (transferred.name, transferred.exact) for transferred in transfer.transferred}
    assert options == {
        "stem/relu:0": ("stem/conv;stem/batch_norm;stem/relu", True),
        "residual/relu:0": ("StatefulPartitionedCall/residual/add;StatefulPartitionedCall/residual/relu", True),
        "max_pool:0": ("max_pool", True),
        "image:0": ("image/quant;image/quant/min", True),
    }
    assert (planned_site_of(plan, "stem/relu").scale, planned_site_of(plan, "stem/relu").zero_point) == (
        (0.5,),
        (-128,),
    )
    assert planned_site_of(plan, "image").zero_point == (3,)
    assert transfer.unused == ()
    assert TensorRef("", "pointwise/relu") in transfer.missing
    assert TensorRef("", "image") not in transfer.missing


def test_missing_ranges_are_reported(samples):
    """If the file lacks activations of the plan, the message counts both and has the way to the rest."""
    with pytest.raises(gq.GraphQuantError) as error:
        gq.insert(samples / "digits_cnn.pb", rules="tflite", ranges=tflite(("stem/relu", 0.5, -128)))
    assert " 1 tensors " in str(error.value)
    assert "image:0" in str(error.value)
    assert "ranges_map=" in str(error.value)


def test_another_type_gives_the_range(samples):
    """Int8 numbers for a uint8 scheme, and 16 bits for 8, become the range that they stand for."""
    model = gq.load(samples / "digits_cnn.onnx")
    rule_plan = gq.plan(model, rules=["onnxruntime"])
    prepared, _ = prepare(model, [step.step for step in rule_plan.steps if step.step != "opset"])
    source = tflite(("stem/relu", 0.5, -100), ("pointwise/relu", 2.0**-10, 0, "conv", "int16"))
    plan, transfer = transfer_ranges(prepared, rule_plan, source, {})
    assert [transferred.exact for transferred in transfer.transferred] == [False, False]
    assert planned_site_of(plan, "stem/relu").range == (-14.0, 113.5)
    assert planned_site_of(plan, "pointwise/relu").range == (-32.0, 32767 / 1024)


def test_constants_and_foreign_parts_are_no_match(planned):
    """A kernel is called after its op; an op that several tensors are named after belongs to none of them."""
    source = tflite(
        ("stem/relu", 0.5, -128, "constant"),
        ("pointwise/relu;pointwise/batch_norm;pointwise/conv;residual_1/conv", 0.25, -128),
        ("residual_1/relu;residual_1/batch_norm;residual_1/conv", 0.125, -128),
    )
    plan, transfer = transfer_ranges(*planned, source, {})
    assert [str(transferred.tensor) for transferred in transfer.transferred] == [
        "pointwise/relu:0",
        "residual_1/relu:0",
    ]
    assert planned_site_of(plan, "stem/relu").scale is None


def test_scales_whose_range_is_not_finite_are_unused(planned):
    """Some integers of such a scale stand for values beyond float32."""
    source = tflite(("stem/relu", 1e37, -128), ("max_pool", 0.5, -128))
    _, transfer = transfer_ranges(*planned, source, {})
    assert [str(transferred.tensor) for transferred in transfer.transferred] == ["max_pool:0"]
    assert transfer.unused == ("stem/relu",)


def test_conflicting_names_match_nothing(planned):
    """If two tensors of the file claim one of the model and differ, it gets neither."""
    double = ("stem/batch_norm;stem/conv;stem/relu", 0.25, -128)
    source = tflite(("stem/relu:0", 0.5, -128), double, ("max_pool", 1, 0))
    _, transfer = transfer_ranges(*planned, source, {})
    assert [str(transferred.tensor) for transferred in transfer.transferred] == ["max_pool:0"]
    assert transfer.unused == ("stem/relu:0", double[0])


def test_ambiguous_last_part_matches_nothing(planned):
    """`batch_norm;relu` is not what the BatchNorm makes, also where a convolution's name lists the Relu."""
    source = tflite(("stem/relu;stem/batch_norm", 0.5, 0), ("stem/relu;depthwise/conv", 0.25, 0), ("max_pool", 1, 0))
    _, transfer = transfer_ranges(*planned, source, {})
    assert [(str(transferred.tensor), transferred.name) for transferred in transfer.transferred] == [
        ("stem/relu:0", "stem/relu;stem/batch_norm"),
        ("max_pool:0", "max_pool"),
    ]


def test_name_map(planned, tmp_path):
    """Mapped names win; a weight takes its scales only by being mapped."""
    model, rule_plan = planned
    weight = next(
        planned_site for planned_site in rule_plan.sites if planned_site.parameter and planned_site.axis is not None
    )
    channels = model.output(weight.tensor).shape[weight.axis]
    (tmp_path / "map.toml").write_text(f'"stem/relu:0" = "first"\n"{weight.tensor.op}" = "kernel"\n')
    scales = np.arange(1, channels + 1, dtype=np.float32)
    source = tflite(("first", 0.5, -128), ("kernel", scales, np.zeros(channels), "constant"), ("stem/relu", 9, 0))
    plan, transfer = transfer_ranges(model, rule_plan, source, read_name_map(tmp_path / "map.toml"))
    assert planned_site_of(plan, "stem/relu").scale == (0.5,)
    assert next(planned_site for planned_site in plan.sites if planned_site.tensor == weight.tensor).scale == tuple(
        scales
    )
    assert transfer.unused == ("stem/relu",)


def test_an_edited_plan_wins(planned):
    """Values that a plan gives itself are not overwritten."""
    model, rule_plan = planned
    sites = tuple(
        replace(planned_site, range=(0.0, 1.0)) if planned_site.tensor.op == "stem/relu" else planned_site
        for planned_site in rule_plan.sites
    )
    plan, transfer = transfer_ranges(
        model, replace(rule_plan, sites=sites), tflite(("stem/relu", 0.5, 0), ("max_pool", 1, 0)), {}
    )
    assert planned_site_of(plan, "stem/relu").range == (0.0, 1.0)
    assert [str(transferred.tensor) for transferred in transfer.transferred] == ["max_pool:0"]


def test_nothing_matched_is_an_error(planned):
    """The message has names of both sides, and the nearest ones."""
    with pytest.raises(UsageError, match=r"none of .*plan") as error:
        transfer_ranges(*planned, tflite(("imag", 0.5, 0), ("b", 0.5, 0)), {})
    assert "'imag', 'b'" in str(error.value)
    assert "Did you mean 'imag'?" in str(error.value)
    assert "--ranges-map" in str(error.value)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"stem/rel": "a"}, "no tensor 'stem/rel'. Did you mean 'stem/relu'"),
        ({"stem/relu": "aa"}, "'aa'. Did you mean 'aaa'?"),
    ],
)
def test_mapped_names_must_exist(planned, names, said):
    """On both sides, with what was meant."""
    with pytest.raises(UsageError) as error:
        transfer_ranges(*planned, tflite(("aaa", 0.5, 0)), names)
    assert said in str(error.value)


@pytest.mark.parametrize(("text", "said"), [("a = 1", "value of 'a'"), ("a =", "is not valid TOML")])
def test_a_map_is_toml_of_names(tmp_path, text, said):
    """Other things are refused with the form that is wanted."""
    (tmp_path / "map.toml").write_text(text)
    with pytest.raises(UsageError) as error:
        read_name_map(tmp_path / "map.toml")
    assert said in str(error.value)
    assert '"block1/Relu:0" = "model/block1/Relu"' in str(error.value)
    with pytest.raises(UsageError, match="cannot be read"):
        read_name_map(tmp_path / "none.toml")


def test_the_reference_file_fits_its_architecture(shared):
    """All planned activations of the KWS SavedModel are found in the reference file, whose names list foreign parts."""
    model = gq.load(shared / "kws/saved_model")
    plan = gq.plan(model, rules=["tflite"])
    prepared, _ = prepare(model, [step.step for step in plan.steps])
    _, transfer = transfer_ranges(prepared, plan, gq.load(shared / "kws/kws_int8.tflite"), {})
    assert (len(transfer.transferred), transfer.missing) == (15, ())
    assert all(transferred.exact for transferred in transfer.transferred)
    names = {transferred.tensor.op: transferred.name for transferred in transfer.transferred}
    assert names["functional_1/activation_7/Relu"].startswith("functional_1/activation_7/Relu;")
    assert names["functional_1/activation_8/Relu"].startswith("functional_1/activation_8/Relu;")
