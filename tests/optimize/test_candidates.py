"""The ways in which tensors of a plan may be quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphquant as gq
from graphquant.api.plan import prepare_and_plan
from graphquant.optimize.candidates import make_candidate_plans, make_scale_groups
from graphquant.quantize import check_plan
from graphquant.utils.options import PlanOptions

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


def make_candidates(model: Path, rules: str, family: str | None = None) -> tuple[Any, Any, dict[str, Any]]:
    """The prepared model, its plan, and the plans of all other ways."""
    prepared, plan = prepare_and_plan(gq.load(model), PlanOptions(rules=rules, family=family))
    return prepared, plan, make_candidate_plans(prepared, plan)


@pytest.mark.parametrize("name", ["digits_cnn.onnx", "digits_cnn.pb"])
def test_each_way_is_a_plan_that_can_be(samples: Path, name: str) -> None:
    """Each way changes the schemes of some sites, and nothing else, to what the model can have."""
    for rules in ("tflite", "generic") if name.endswith(".pb") else ("onnxruntime", "generic", PER_TENSOR):
        prepared, plan, candidates = make_candidates(samples / name, rules)
        assert candidates
        for candidate_plan in candidates.values():
            check_plan(prepared, candidate_plan)
            assert [(site.tensor, site.uses) for site in candidate_plan.sites] == [
                (planned_site.tensor, planned_site.uses) for planned_site in plan.sites
            ]
            assert candidate_plan.sites != plan.sites


def test_which_there_are(samples: Path) -> None:
    """Ranges for activations; more bits and scales for weights; 16 bits only where the ops stand for any hardware."""
    assert list(make_candidates(samples / "digits_cnn.onnx", "onnxruntime")[2]) == ["minmax range", "mse range"]
    _, plan, candidates = make_candidates(samples / "digits_cnn.onnx", PER_TENSOR)
    assert list(candidates) == ["8-bit weights", "weights per channel"]
    assert {site.scheme.type.bits for site in candidates["8-bit weights"].sites} == {8}
    per = [site.scheme.per for site in candidates["weights per channel"].sites]
    assert 0 < per.count("tensor") < per.count("channel") == 7  # products of matrices keep one scale
    assert {site.scheme.per for site in plan.sites} == {"tensor"}
    _, _, wide = make_candidates(samples / "digits_cnn.pb", OUTPUTS, "quantize-and-dequantize-v4")
    assert "16 bits" in wide
    assert {site.scheme.type.bits for site in wide["16 bits"].sites} == {16}
    assert "16 bits" not in make_candidates(samples / "digits_cnn.onnx", OUTPUTS)[2]


def test_what_multiplies_on_what_a_pool_hands_on_needs_the_site_before_it() -> None:
    """QNN's rules quantize what a MaxPool reads and not what it gives; its reader is on integers by that site alone."""
    model, plan = prepare_and_plan(gq.load(SAMPLES / "digits_cnn.onnx"), PlanOptions(rules="qnn"))
    position = next(index for index, site in enumerate(plan.sites) if str(site.tensor) == "pointwise/relu:0")
    among = make_scale_groups(model, plan, range(len(plan.sites)), {})
    (mine,) = [group for group in among if position in group.sites]
    assert ("", "residual_1/conv") in mine.ops


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Split", "SplitV"])
def test_a_split_hands_on_what_it_reads_wherever_its_axis_comes(tmp_path: Path, kind: str) -> None:
    """TensorFlow's Split has its axis first, its SplitV last; what multiplies on their results needs the same site."""
    import tensorflow as tf

    rng, graph = np.random.default_rng(0), tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 4], name="x")
        first = tf.nn.conv2d(x, rng.normal(size=(3, 3, 4, 8)).astype(np.float32), 1, "SAME", name="first")
        limited = tf.nn.relu(first, name="limited")
        options = {"axis": tf.constant(3), "value": limited, "num_split": 2, "name": "s"}
        sizes = {"size_splits": tf.constant([4, 4])} if kind == "SplitV" else {}
        for number, piece in enumerate(getattr(tf.raw_ops, kind)(**options, **sizes)):
            tf.nn.conv2d(piece, rng.normal(size=(3, 3, 4, 8)).astype(np.float32), 1, "SAME", name=f"c{number}")
    (tmp_path / "net.pb").write_bytes(graph.as_graph_def().SerializeToString())
    (tmp_path / "rules.toml").write_text(OUTPUTS, "utf-8")
    model, plan = prepare_and_plan(gq.load(tmp_path / "net.pb"), PlanOptions(rules=str(tmp_path / "rules.toml")))
    among = make_scale_groups(model, plan, range(len(plan.sites)), {})
    (mine,) = [group for group in among for index in group.sites if plan.sites[index].tensor.op == "limited"]
    assert {name for _, name in mine.ops} == {"first", "c0", "c1"}
