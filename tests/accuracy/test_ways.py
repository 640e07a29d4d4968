"""The ways in which tensors of a plan may be quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import graphquant as gq
from graphquant.accuracy import groups, ways
from graphquant.pipeline.planning import prepared_and_plan
from graphquant.plans import check_plan

SAMPLES = Path(__file__).parents[2] / "sample_models"

PER_TENSOR = """
[scheme.few]
bits = 4
[[rule]]
name = "few"
producer = { kind = "parameter" }
consumer = { kind = "conv|depthwise_conv|gemm|matmul", input = "weight" }
quantize = "few"
"""

OUTPUTS = """
[scheme.output]
bits = 8
[[rule]]
name = "output"
producer = { kind = "relu|relu6" }
quantize = "output"
"""


def made(model: Path, rules: str, family: str | None = None) -> tuple[Any, Any, dict[str, Any]]:
    """The prepared model, its plan, and the plans of all other ways."""
    prepared, plan = prepared_and_plan(gq.load(model), None, rules, (), (), family)
    return prepared, plan, ways(prepared, plan)


@pytest.mark.parametrize("name", ["digits_cnn.onnx", "digits_cnn.pb"])
def test_each_way_is_a_plan_that_can_be(samples: Path, name: str) -> None:
    """Each way changes the schemes of some sites, and nothing else, to what the model can have."""
    for rules in ("tflite", "generic") if name.endswith(".pb") else ("onnxruntime", "generic", PER_TENSOR):
        prepared, plan, found = made(samples / name, rules)
        assert found
        for other in found.values():
            check_plan(prepared, other)
            assert [(site.tensor, site.uses) for site in other.sites] == [(one.tensor, one.uses) for one in plan.sites]
            assert other.sites != plan.sites


def test_which_there_are(samples: Path) -> None:
    """Ranges for activations; more bits and scales for weights; 16 bits only where the ops stand for any hardware."""
    assert list(made(samples / "digits_cnn.onnx", "onnxruntime")[2]) == ["minmax range", "mse range"]
    _, plan, found = made(samples / "digits_cnn.onnx", PER_TENSOR)
    assert list(found) == ["8-bit weights", "weights per channel"]
    assert {site.scheme.type.bits for site in found["8-bit weights"].sites} == {8}
    per = [site.scheme.per for site in found["weights per channel"].sites]
    assert 0 < per.count("tensor") < per.count("channel") == 7  # products of matrices keep one scale
    assert {site.scheme.per for site in plan.sites} == {"tensor"}
    _, _, wide = made(samples / "digits_cnn.pb", OUTPUTS, "quantize-and-dequantize-v4")
    assert "16 bits" in wide
    assert {site.scheme.type.bits for site in wide["16 bits"].sites} == {16}
    assert "16 bits" not in made(samples / "digits_cnn.onnx", OUTPUTS)[2]


def test_what_multiplies_on_what_a_pool_hands_on_needs_the_site_before_it() -> None:
    """QNN's rules quantize what a MaxPool reads and not what it gives; its reader is on integers by that site alone."""
    model, plan = prepared_and_plan(gq.load(SAMPLES / "digits_cnn.onnx"), None, "qnn", (), (), None)
    place = next(index for index, site in enumerate(plan.sites) if str(site.tensor) == "pointwise/relu:0")
    among = groups(model, plan, range(len(plan.sites)), {})
    (mine,) = [group for group in among if place in group.sites]
    assert ("", "residual_1/conv") in mine.ops
