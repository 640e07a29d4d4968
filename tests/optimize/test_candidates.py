"""The ways in which tensors of a plan may be quantized."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.rule_files import weight_rule

import graphquant as gq
from graphquant.api.plan import prepare_and_plan
from graphquant.ir import TensorRef, Use
from graphquant.numerics import IntType, qparams_from_scale
from graphquant.optimize import candidates as candidates_module
from graphquant.optimize.blocks import Block
from graphquant.optimize.candidates import RULE_CANDIDATE, GroupTrials, make_candidate_plans, make_scale_groups
from graphquant.quantize import Plan, Site, check_plan
from graphquant.rules import Scheme
from graphquant.utils.options import PlanOptions

SAMPLES = Path(__file__).parents[2] / "sample_models"

SCHEME = """
[scheme.few]
bits = 4
"""
PER_TENSOR = SCHEME + weight_rule("conv|depthwise_conv|gemm|matmul", "few")

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


def make_pair(scale: float) -> Any:
    """Return an inserted pair with this scale."""
    return SimpleNamespace(params=qparams_from_scale(np.float32(scale), np.int32(0), IntType(8, False)))


class Switches:
    """Given errors of groups of sites, which add up."""

    groups, runs = frozenset({0, 1, 2}), 5

    def __init__(self, errors: dict[int, float]) -> None:
        self.errors, self.measured = errors, list[list[int]]()

    def error(self, on: Any) -> float:
        """Note the groups, and return their error."""
        self.measured.append(sorted(on))
        return sum(self.errors[group] for group in on)


@pytest.fixture
def group_trials(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Plan, dict[str, Plan]]:
    """Return the trials of four sites in two blocks, the first two of which share a scale, and other plans."""
    scheme = Scheme(name="act", dtype="uint8", family="onnx-qdq")
    sites = tuple(
        Site(tensor=TensorRef("", name), uses=(Use("", "y", slot),), graph="", scheme=scheme)
        for slot, name in enumerate("abcde")
    )
    sites = (sites[0], replace(sites[1], tie=sites[0].uses), *sites[2:])
    plan = Plan(format="onnx", model="", prepared="", rules=(), sites=sites)
    other = replace(plan, sites=tuple(replace(site, rule="other") for site in sites))
    plans = {"mse range": other, "minmax range": replace(other, sites=(*sites[:3], *other.sites[3:])), "16 bits": other}
    monkeypatch.setattr(candidates_module, "make_candidate_plans", lambda *_: plans)
    monkeypatch.setattr(candidates_module, "insertions_by_site", lambda *_: dict.fromkeys(range(5)))
    blocks = (Block(sites=(0, 1, 2), ops=frozenset(), name="first"), Block(sites=(3,), ops=frozenset(), name="second"))
    monkeypatch.setattr(candidates_module, "find_blocks", lambda *_: blocks)
    built = SimpleNamespace(insertions=())
    return GroupTrials("prepared", plan, built, "samples", [2, 1]), plan, plans  # type: ignore[arg-type]


def test_errors_of_candidates(group_trials: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are measured first, then the groups inside; sites of a group share its error, as those of a part.

    Candidates are measured by block, and listed below 95% of the rules' error. Each further bit divides the error by 4.
    A site in no reachable block adds nothing, and one that no switch can bypass counts as 1.
    """
    trials, plan, plans = group_trials
    rules, mse, minmax = (
        Switches({0: 2e-2, 1: 1e-3, 2: 1e-2}),
        Switches({0: 1e-2, 1: 1e-3, 2: 1e-2}),
        Switches({2: 5e-3}),
    )
    by_plan = {id(plan): rules, id(plans["mse range"]): mse, id(plans["minmax range"]): minmax}
    monkeypatch.setattr(candidates_module, "switch_groups", lambda _prepared, some_plan, *_: by_plan[id(some_plan)])
    errors, made = trials.measure_candidates(lambda some_plan: some_plan)
    assert made is plans
    assert rules.measured[:5] == [[0, 1, 2], [0, 1], [2], [0], [1]]
    ratio = pytest.approx(1.1e-2 / 2.1e-2)
    assert {name: error / 1e-2 for name, error in errors[0].items()} == {
        RULE_CANDIDATE: 1.0,
        "mse range": ratio,
        "16 bits": 4.0**-8,
    }
    assert errors[1] == errors[0]
    assert errors[2].keys() == {RULE_CANDIDATE, "mse range", "16 bits"}
    assert errors[3] == {RULE_CANDIDATE: 1e-2, "minmax range": pytest.approx(5e-3), "16 bits": 1e-2 / 4**8}
    assert errors[4] == {RULE_CANDIDATE: 0.0, "16 bits": 0.0}
    assert trials.measured_sites == {0, 1, 2, 3}
    assert trials.runs == 15
    assert not trials.interrupted


def test_unknown_errors(group_trials: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that no switch can bypass is the first to become float; Ctrl-C keeps what is known."""
    trials, _, _ = group_trials
    switches = Switches({0: 2e-2, 1: 1e-3})
    switches.groups = frozenset({0, 1})
    monkeypatch.setattr(candidates_module, "switch_groups", lambda *_: switches)

    def interrupt(_: Any) -> Any:
        raise KeyboardInterrupt

    errors, _ = trials.measure_candidates(interrupt)
    assert [errors[index][RULE_CANDIDATE] for index in range(5)] == [1e-2, 1e-2, 1e-3, 1.0, 0.0]
    assert trials.interrupted
