"""Biases that move: their values, constants, sites and scales, and what keeps them in place."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import onnx.parser
import pytest
from support.rule_files import input_rule, weight_rule

import graphquant as gq
from graphquant.formats import onnx as onnx_format
from graphquant.ir import TensorRef, Use
from graphquant.optimize import bias_correction
from graphquant.optimize.algorithm import AlgorithmData, WeightEdits, skipped_target
from graphquant.optimize.bias_correction import (
    NO_CHANNEL_BIAS,
    BiasStore,
    _correct_bias,
    _correction_stages,
    _restrict_to_rounded_ops,
    apply_bias_correction,
    shrink_mean,
)
from graphquant.optimize.weighted_ops import NO_BIAS, NOT_OBSERVED, OutputAxes, find_weighted_ops
from graphquant.quantize import solve_scales

SCHEMES = """
[scheme.weight]
dtype = "int8"
per = "channel"
observe = "absmax"
[scheme.tensor]
dtype = "int8"
observe = "absmax"
[scheme.activation]
dtype = "uint8"
observe = "minmax"
[scheme.bias]
dtype = "int32"
PER
observe = "bias"
"""
BIAS_RULE = """
[[rule]]
name = "bias"
why = "a reason"
producer = { kind = "parameter" }
consumer = { kind = "conv|gemm", input = "bias" }
quantize = "bias"
"""
KINDS = "conv|matmul|gemm"
FLOAT_BIAS = SCHEMES.replace("PER", 'per = "channel"') + weight_rule(KINDS) + input_rule(KINDS)
PER_CHANNEL = FLOAT_BIAS + BIAS_RULE
PER_TENSOR = SCHEMES.replace("PER", "") + weight_rule(KINDS, "tensor") + input_rule(KINDS) + BIAS_RULE
WEIGHTS = {name: np.array([[127.0, 1.0], [63.5, 63.5]]) for name in ("w", "v")}
B = np.array([1.0, -2.0])


def make_edits(tmp_path, body, rules, scales=None, **values):
    """Return the weight edits of a net of two matrix products whose inputs all have the scale 0.5."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 13]> g (float[N,2] x) => (float[N,2] y) {{ {body} }}'
    )
    for name, value in {**WEIGHTS, "b": B, **values}.items():
        if any(name in node.input for node in model.graph.node):
            dtype = np.float32 if value.dtype == np.float64 else value.dtype
            model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(dtype), name))
    onnx.save(model, tmp_path / "net.onnx")
    loaded, plan = gq.load(tmp_path / "net.onnx"), gq.plan(tmp_path / "net.onnx", rules=[rules])
    data = {"x", "a", "c", "r"}
    given = dict.fromkeys(data, 0.5) | (scales or {})
    sites = tuple(
        replace(site, scale=(given[site.tensor.op],), zero_point=(0,)) if site.tensor.op in given else site
        for site in plan.sites
    )
    solution = solve_scales(loaded, replace(plan, sites=sites), {})
    assert {site.tensor.op for index, site in enumerate(sites) if index in solution.params} >= {"x"}
    return WeightEdits(prepared_model=loaded, model=loaded, solution=solution)


def open_store(edits):
    """Return the store, and the weighted ops by name."""
    return BiasStore(edits), {weighted.op.name: weighted for weighted in find_weighted_ops(edits.model, edits.solution)}


def read_bias(store, op, slot=2):
    """Return the name of a bias and its values."""
    tensor = store.model.main.source_of(Use("", op, slot))
    return tensor.op, store.model.op(tensor).read_value().tolist()


def bias_sites(store):
    """Return the sites of biases: tensor, uses, scale and axis."""
    return [
        (
            site.tensor.op,
            [use.op for use in site.uses],
            np.asarray(store.solution.params[index].scale).tolist(),
            store.solution.params[index].axis,
        )
        for index, site in enumerate(store.solution.plan.sites)
        if site.scheme.name == "bias"
    ]


ONE = "y = Gemm (x, w, b)"
TWO = "a = Gemm (x, w, b) y = Gemm (a, v, b)"
WITHOUT = "a = Gemm (x, w, b) y = Gemm (a, v)"
ADDED = "a = MatMul (x, w) y = Add (a, b)"
SHIFT = np.array([0.25, -4.0])


@pytest.mark.parametrize("rules", [PER_CHANNEL, FLOAT_BIAS])
def test_a_bias_moves_by_all_shifts(tmp_path, rules):
    """The second shift of an op's own bias adds to the first, and the source keeps its bias."""
    edits = make_edits(tmp_path, ONE, rules)
    store, ops = open_store(edits)
    sites = bias_sites(store)
    assert store.move_bias(ops["y"], SHIFT) == ""
    assert read_bias(store, "y") == ("b", [1.25, -6.0])
    assert store.describe_change(ops["y"]).endswith(" 4")
    assert store.move_bias(ops["y"], np.array([1.0, 1.0])) == ""
    assert read_bias(store, "y") == ("b", [2.25, -5.0])
    assert store.describe_change(ops["y"]).endswith(" 3")
    assert edits.model.main.op("b").read_value().tolist() == [1.0, -2.0]
    assert store.solution.plan.sites == edits.solution.plan.sites
    assert bias_sites(store) == sites == ([("b", ["y"], [0.5, 0.25], 0)] if rules is PER_CHANNEL else [])


def test_a_bias_that_another_op_adds(tmp_path):
    """The op's output has neither the bias nor earlier shifts, so the last shift replaces those before."""
    store, ops = open_store(make_edits(tmp_path, ADDED, FLOAT_BIAS))
    for shift in (SHIFT, np.array([1.0, 1.0])):
        assert store.move_bias(ops["a"], shift) == ""
        assert read_bias(store, "y", 1) == ("b", (B + shift).tolist())
    assert store.describe_change(ops["a"]).endswith(" 1")


def test_small_shifts_are_described(tmp_path):
    """The change is the largest shift of a channel, also below 1."""
    store, ops = open_store(make_edits(tmp_path, ONE, FLOAT_BIAS))
    assert store.move_bias(ops["y"], np.array([-0.25, 0.125])) == ""
    assert store.describe_change(ops["y"]).endswith(" 0.25")


def test_biases_that_stay(tmp_path):
    """A variable, a value that is not known and one that would not be finite stay as they are."""
    store, ops = open_store(make_edits(tmp_path, WITHOUT, FLOAT_BIAS))
    assert "32-bit" in store.move_bias(ops["a"], np.array([np.inf, 0.0]))
    assert read_bias(store, "a") == ("b", [1.0, -2.0])
    assert not store.is_variable(ops["a"])
    store._parameters = SimpleNamespace(is_variable=lambda tensor: tensor.op == "b", value=lambda _: None)
    assert [store.is_variable(weighted) for weighted in (ops["a"], ops["y"], replace(ops["a"], bias=None))] == [
        True,
        False,
        False,
    ]
    assert store.move_bias(ops["a"], SHIFT) == NO_CHANNEL_BIAS


def test_biases_with_one_number(tmp_path):
    """One number for all channels becomes one per channel, in a constant of its own."""
    store, ops = open_store(make_edits(tmp_path, ONE, FLOAT_BIAS, b=np.array([3.0])))
    assert store.move_bias(ops["y"], SHIFT) == ""
    assert read_bias(store, "y") == ("y/bias_corrected", [3.25, -1.0])
    store, ops = open_store(make_edits(tmp_path, ONE, FLOAT_BIAS, b=np.array([[3.0, 4.0]])))
    assert store.move_bias(ops["y"], SHIFT) == ""
    assert read_bias(store, "y") == ("b", [[3.25, 0.0]])


@pytest.mark.parametrize(
    ("axes", "value", "reason"),
    [
        (OutputAxes(2, 1), B, ""),
        (OutputAxes(2, 1), B.astype(np.float16), NO_CHANNEL_BIAS),
        (OutputAxes(2, 1), np.array([[1.0], [2.0]]), " [2, 1]"),
        (OutputAxes(3, 1), B, NO_CHANNEL_BIAS),
        (None, B, NO_CHANNEL_BIAS),
    ],
)
def test_biases_of_other_shapes(tmp_path, axes, value, reason):
    """A bias that another op adds needs one float32, or one per channel of the last axis."""
    store, ops = open_store(make_edits(tmp_path, ADDED, FLOAT_BIAS))
    bias = store._original_model.main.op("b")
    if value is not B:
        dtype = np.float32 if value.ndim > 1 else value.dtype
        store._original_model.main.replace_op(replace(bias, read_value=lambda: value.astype(dtype)))
    obstacle = store.move_bias(replace(ops["a"], axes=axes), SHIFT)
    assert obstacle.endswith(reason)
    assert bool(obstacle) == bool(reason)


def test_an_own_bias_lies_along_any_axis(tmp_path):
    """The bias that an op itself reads is one number per channel, wherever its channels are."""
    store, ops = open_store(make_edits(tmp_path, ONE, FLOAT_BIAS))
    for axes in (OutputAxes(3, 1), None):
        assert store.move_bias(replace(ops["y"], axes=axes), SHIFT) == ""


def test_no_bias_can_be_added(tmp_path):
    """An op without a place for a bias keeps its reason, and has not moved."""
    store, ops = open_store(make_edits(tmp_path, ONE, FLOAT_BIAS))
    weighted = replace(ops["y"], bias=None, no_bias_reason="because")
    assert store.move_bias(weighted, SHIFT) == "because"
    assert store.describe_change(weighted).endswith(" 0")


@pytest.mark.parametrize("rules", [PER_CHANNEL, PER_TENSOR])
def test_integer_biases_stay_in_range(tmp_path, rules):
    """A shift beyond the last integer is refused and changes nothing; one up to it is applied."""
    edits = make_edits(tmp_path, ONE, rules, b=np.array([0.0, 0.0]))
    store, ops = open_store(edits)
    step = 0.25 if rules is PER_CHANNEL else 0.5
    for shift, is_moved in ((2.0**31 * step, False), (np.inf, False), (-(2.0**31) * step, False), (1.0, True)):
        reason = store.move_bias(ops["y"], np.array([0.0, shift]))
        assert (reason == "") == is_moved
        assert read_bias(store, "y") == ("b", [0.0, 1.0 if is_moved else 0.0])
    assert store.move_bias(ops["y"], np.array([0.0, (2.0**31 - 128) * step - 1.0])) == ""
    assert read_bias(store, "y")[1][1] == (2.0**31 - 128) * step


def test_narrow_biases_are_not_corrected(tmp_path):
    """The steps of a bias with fewer than 32 bits are as large as the correction."""
    rules = PER_CHANNEL.replace(
        'dtype = "int32"\nper = "channel"\nobserve = "bias"', 'dtype = "int16"\nobserve = "absmax"'
    )
    store, ops = open_store(make_edits(tmp_path, ONE, rules))
    assert " 16 bits" in store.move_bias(ops["y"], SHIFT)
    assert read_bias(store, "y") == ("b", [1.0, -2.0])


@pytest.mark.parametrize("first", ["a", "y"])
def test_a_shared_bias_is_split(tmp_path, first):
    """Each op gets a constant and a site of its own, in any order; the last one has no other reader to leave it to."""
    edits = make_edits(tmp_path, TWO, PER_TENSOR)
    tied = {"graph": "body", "tie": (Use("", "a", 0),), "clone_of": Use("", "a", 0)}
    sites = tuple(replace(site, **tied) if site.tensor.op == "b" else site for site in edits.solution.plan.sites)
    solution = replace(edits.solution, plan=replace(edits.solution.plan, sites=sites))
    store, ops = open_store(replace(edits, solution=solution))
    assert bias_sites(store) == [("b", ["a", "y"], 0.5, None)]
    other = "y" if first == "a" else "a"
    assert store.move_bias(ops[first], SHIFT) == ""
    assert read_bias(store, first) == (f"{first}/bias_corrected", [1.25, -6.0])
    assert read_bias(store, other) == ("b", [1.0, -2.0])
    split = (f"{first}/bias_corrected", [first], 0.5, None)
    assert bias_sites(store) == [("b", [other], 0.5, None), split]
    assert store.move_bias(ops[other], -SHIFT) == ""
    assert read_bias(store, first) == (f"{first}/bias_corrected", [1.25, -6.0])
    assert read_bias(store, other) == (f"{other}/bias_corrected", [0.75, 2.0])
    assert bias_sites(store) == [(f"{other}/bias_corrected", [other], 0.5, None), split]
    moved = [site for site in store.solution.plan.sites if site.scheme.name == "bias"]
    assert [(site.graph, site.tie, site.clone_of) for site in moved] == [("", (), None)] * 2


@pytest.mark.parametrize(
    ("rules", "scale", "axis"), [(PER_CHANNEL, [0.5, 0.25], 0), (PER_TENSOR, 0.5, None), (FLOAT_BIAS, None, None)]
)
def test_a_missing_bias_is_added(tmp_path, rules, scale, axis):
    """An op without a bias gets one, with an integer site if other biases have one, and the scale of its product."""
    store, ops = open_store(make_edits(tmp_path, WITHOUT, rules))
    sites = [] if scale is None else [("b", ["a"], scale, axis)]
    assert bias_sites(store) == sites
    assert store.move_bias(ops["y"], SHIFT) == ""
    assert read_bias(store, "y") == ("y/bias_corrected", [0.25, -4.0])
    assert store.move_bias(ops["y"], np.array([1001.0, 1.0])) == ""
    assert read_bias(store, "y") == ("y/bias_corrected", [1001.25, -3.0])
    assert bias_sites(store) == sites + [("y/bias_corrected", ["y"], scale, axis)] * len(sites)
    if sites:
        added = store.solution.plan.sites[-1]
        assert (added.graph, added.uses, added.parameter, added.axis) == ("", (Use("", "y", 2),), True, axis)
        example = next(site for site in store.solution.plan.sites if site.tensor.op == "b")
        assert (added.scheme, added.rule, added.why) == (example.scheme, "bias", "a reason")
        params = store.solution.params[len(store.solution.plan.sites) - 1]
        assert (params.type.name, np.asarray(params.zero_point).any()) == ("int32", False)
        # From now on its range is that of the type.
        assert "32-bit" in store.move_bias(ops["y"], np.full(2, 2.0**32))
        assert read_bias(store, "y") == ("y/bias_corrected", [1001.25, -3.0])


@pytest.mark.parametrize(
    ("target", "is_integer"),
    [("onnxruntime", True), ("qnn", True), ("openvino", False), ("tensorrt", False), ("", False)],
)
def test_an_added_bias_is_an_integer_where_the_target_stores_such_biases(tmp_path, target, is_integer):
    """If no op has a bias whose scheme could be copied, the target decides the type."""
    rules = (f'target = "{target}"\n' if target else "") + PER_CHANNEL
    store, ops = open_store(make_edits(tmp_path, "y = Gemm (x, w)", rules))
    assert bias_sites(store) == []
    assert store.move_bias(ops["y"], SHIFT) == ""
    assert read_bias(store, "y") == ("y/bias_corrected", [0.25, -4.0])
    assert bias_sites(store) == [("y/bias_corrected", ["y"], [0.5, 0.25], 0)] * is_integer
    if is_integer:
        added = store.solution.plan.sites[-1]
        assert (added.scheme.type.name, added.scheme.family, added.rule) == ("int32", "onnx-qdq", "bias-correction")
        assert added.uses == (Use("", "y", 2),)


@pytest.mark.parametrize(("kinds", "sources"), [((), []), (("gemm",), ["y"])])
def test_constants_in_loops(tmp_path, kinds, sources, monkeypatch):
    """In a graph with frames, a new constant waits for its op, so that it is in the op's frame."""
    monkeypatch.setattr(bias_correction, "FRAME_KINDS", frozenset(kinds))
    store, ops = open_store(make_edits(tmp_path, WITHOUT, PER_TENSOR))
    assert store.move_bias(ops["y"], SHIFT) == ""
    op = store.model.main.op("y/bias_corrected")
    assert (op.kind, op.type, op.rule) == ("constant", "Const", "correction")
    assert store.model.main.control_inputs("y/bias_corrected") == sources


def with_params(edits, name, **changes):
    """Return the edits with other params of a tensor, or none."""
    index = next(index for index, site in enumerate(edits.solution.plan.sites) if site.tensor.op == name)
    params = {**edits.solution.params}
    params[index] = replace(params[index], **changes)
    if not changes:
        del params[index]
    return replace(edits, solution=replace(edits.solution, params=params))


def test_biases_keep_their_own_range(tmp_path):
    """A bias that moved to another constant is still limited by its own scale, and one without a scale by none."""
    body = "a = Gemm (x, w, b) y = Gemm (a, v, e)"
    edits = make_edits(tmp_path, body, PER_TENSOR, b=np.array([1.0]), e=np.array([1.0, 2.0]))
    store, ops = open_store(with_params(edits, "b", scale=np.float32(2.0**-28)))
    assert store.move_bias(ops["a"], SHIFT) == ""
    assert read_bias(store, "a") == ("a/bias_corrected", [1.25, -3.0])
    assert "32-bit" in store.move_bias(ops["a"], np.array([100.0, 0.0]))
    store, ops = open_store(with_params(make_edits(tmp_path, TWO, PER_TENSOR), "b"))
    count = len(store.solution.params)
    for name in "ay":
        assert store.move_bias(ops[name], np.array([2.0**40, 0.0])) == ""
    assert len(store.solution.params) == count


def test_added_biases_that_stay_float(tmp_path):
    """No site is added if an operand has no scale, the value does not fit, or the scale is no normal float32."""
    edits, channel_edits = (make_edits(tmp_path, WITHOUT, rules) for rules in (PER_TENSOR, PER_CHANNEL))
    blocks, tiny = np.ones((2, 2), np.float32), np.finfo(np.float32).tiny
    for changed, shift, added in (
        (edits, 2.0**31 * 0.5, 0),
        (edits, -(2.0**31) * 0.5, 0),
        (edits, (2.0**31 - 128) * 0.5, 1),
        (with_params(edits, "a"), 1.0, 0),
        (with_params(channel_edits, "v", scale=blocks, zero_point=blocks.astype(np.int32), axis=0, block=1), 1.0, 0),
        (with_params(edits, "a", scale=np.float32(tiny)), 0.0, 1),
        (with_params(edits, "a", scale=np.float32(tiny / 2)), 0.0, 0),
    ):
        store, ops = open_store(changed)
        assert store.move_bias(ops["y"], np.array([shift, 0.0])) == ""
        assert len(bias_sites(store)) == 1 + added
        assert read_bias(store, "y") == ("y/bias_corrected", [shift, 0.0])


@pytest.mark.parametrize(
    ("rules", "changes"),
    [(PER_CHANNEL, {"axis": None}), (PER_TENSOR, {"axis": 0}), (PER_TENSOR, {"parameter": False})],
)
def test_added_biases_are_like_the_others(tmp_path, rules, changes):
    """A bias per channel needs another bias per channel, and one per tensor needs one per tensor."""
    edits = make_edits(tmp_path, WITHOUT, rules)
    sites = tuple(replace(site, **changes) if site.tensor.op == "b" else site for site in edits.solution.plan.sites)
    solution = replace(edits.solution, plan=replace(edits.solution.plan, sites=sites))
    store, ops = open_store(replace(edits, solution=solution))
    assert store.move_bias(ops["y"], SHIFT) == ""
    assert [entry[0] for entry in bias_sites(store)] == ["b"]


def test_means_of_two_samples(tmp_path):
    """A mean of one sample has no known noise, so that a bias needs two. The shift is the error, not its opposite."""
    store, ops = open_store(make_edits(tmp_path, ONE, FLOAT_BIAS))
    output = TensorRef("", "y")
    for rows, expected in ((0, None), (1, None), (2, [3.0, -4.0])):
        float_means = {output: np.tile([4.0, 1.0], (rows, 1))} if rows else {}
        reason = _correct_bias(store, ops["y"], float_means, {output: np.tile([2.0, 3.0], (rows, 1))})
        assert reason == ("" if expected else NOT_OBSERVED)
        assert read_bias(store, "y") == ("b", expected or [1.0, -2.0])
    assert _correct_bias(store, ops["y"], {output: np.ones((2, 2))}, {}) == NOT_OBSERVED


CHAIN = "a = Gemm (x, w, b) c = Gemm (a, v, b) r = Relu (c) d = Gemm (r, w, b) y = Gemm (d, v, b)"


@pytest.mark.parametrize(
    ("body", "stages"),
    [
        (ONE, ["y"]),
        (TWO, ["a", "y"]),
        (CHAIN, ["c", "y"]),
        ("a = Gemm (x, w, b) c = Gemm (a, v, b) y = Gemm (c, v, b)", ["c", "y"]),
        ("a = Gemm (x, w, b) c = Gemm (x, v, b) y = Add (a, c)", ["ac"]),
        ("a = Gemm (x, w, b) c = Gemm (x, v, b) d = Add (a, c) y = Gemm (d, w, b)", ["ac", "y"]),
    ],
)
def test_stages(tmp_path, body, stages):
    """The ops of one level halfway through the graph are corrected again, then the last ops."""
    edits = make_edits(tmp_path, body, FLOAT_BIAS)
    weighted_ops = list(find_weighted_ops(edits.model, edits.solution))
    chosen = [[weighted.op.name for weighted in stage] for stage in _correction_stages(edits.model, weighted_ops)]
    assert chosen == [list(stage) for stage in stages]
    assert list(_correction_stages(edits.model, [])) == []


@pytest.mark.parametrize("largest", ["", "body"])
def test_stages_of_the_largest_graph(tmp_path, largest):
    """Only the graph with most weighted ops is corrected again."""
    edits = make_edits(tmp_path, CHAIN, FLOAT_BIAS)
    model = SimpleNamespace(graphs={"": edits.model.main, "body": edits.model.main})
    ops = list(find_weighted_ops(edits.model, edits.solution))
    placed = [replace(weighted, graph=largest) for weighted in ops]
    other = replace(ops[0], graph="body" if largest == "" else "")
    stages = _correction_stages(model, [other, *placed, other])
    assert [[(weighted.graph, weighted.op.name) for weighted in stage] for stage in stages] == [
        [(largest, "c")],
        [(largest, "y")],
    ]


def test_sites_of_rounded_ops(tmp_path):
    """Only the sites that duplicated ops read remain, without ties. Edited weights are read from their constants."""
    edits = make_edits(tmp_path, CHAIN, PER_TENSOR)
    tied = tuple(replace(site, tie=(Use("", "d", 0),), clone_of=Use("", "d", 0)) for site in edits.solution.plan.sites)
    solution = replace(edits.solution, plan=replace(edits.solution.plan, sites=tied, skips=("a skip",)))
    constant = TensorRef("body", "c/rounded/weight")
    plan, params = _restrict_to_rounded_ops(
        solution, {("", "a"): "a/rounded", ("", "c"): "c/rounded"}, {Use("", "c", 1): constant}
    )
    assert {str(site.tensor): ([f"{use.op}[{use.slot}]" for use in site.uses], site.graph) for site in plan.sites} == {
        "x:0": (["a/rounded[0]"], ""),
        "w:0": (["a/rounded[1]"], ""),
        "b:0": (["a/rounded[2]", "c/rounded[2]"], ""),
        "a:0": (["c/rounded[0]"], ""),
        "body/c/rounded/weight:0": (["c/rounded[1]"], "body"),
    }
    assert not any(site.tie or site.clone_of for site in plan.sites)
    by_tensor = {site.tensor: index for index, site in enumerate(tied) if index in solution.params}
    originals = [by_tensor.get(site.tensor, by_tensor[TensorRef("", "v")]) for site in plan.sites]
    assert [params[index] for index in range(len(plan.sites))] == [solution.params[index] for index in originals]
    assert plan.skips == ()
    fewer = replace(solution, params={index: solution.params[index] for index in originals[:1]})
    assert len(_restrict_to_rounded_ops(fewer, {("", "a"): "a/rounded"}, {})[0].sites) == 1


def round_to(value, scale, low, high):
    """Return the values on the grid of a scale."""
    return np.clip(np.rint(value / scale), low, high) * scale


def make_samples(rows):
    """Return samples of these rows, (samples, N, 2)."""
    feeds = [{"x": entry.astype(np.float32)} for entry in rows]
    return AlgorithmData(feeds=feeds, validation_feeds=feeds, create_runner=onnx_format.create_runner)


@pytest.mark.parametrize("has_edited_weight", [False, True])
def test_biases_restore_the_means(tmp_path, has_edited_weight):
    """Each bias moves by the error that rounding the op's operands causes, then by that of the quantized model.

    A weight that another algorithm changed is rounded from its new values, and the error is still that of the old ones.
    """
    rng = np.random.default_rng(7)
    weights = {name: rng.uniform(0.1, 1.0, size=(2, 2)).astype(np.float32) for name in "wv"}
    body = "a = Gemm (x, w, b) r = Relu (a) y = Gemm (r, v, e)"
    biases = {"b": np.array([-4.0, -4.5]), "e": np.array([0.1, 0.4])}
    edits = make_edits(tmp_path, body, FLOAT_BIAS, {"x": 3.0}, **weights, **biases)
    rows = rng.uniform(0, 8, size=(6, 200, 2))
    sources = {**weights}
    if has_edited_weight:
        sources["w"] = weights["w"] + np.float32(0.2)
        model = edits.model.copy()
        model.main.replace_op(replace(model.main.op("w"), read_value=lambda: sources["w"]))
        edits = replace(edits, model=model, edited_weights={Use("", "a", 1): sources["w"]})
    corrected = apply_bias_correction(edits, make_samples(rows))

    by_name = {site.tensor.op: edits.solution.params.get(index) for index, site in enumerate(edits.solution.plan.sites)}
    rounded = {
        name: round_to(value.astype(np.float64), by_name[name].scale.astype(np.float64), -128, 127)
        for name, value in sources.items()
    }

    product_a = round_to(rows, 3.0, 0, 255) @ rounded["w"]

    def product_y(a):
        return round_to(np.maximum(a, 0), 0.5, 0, 255) @ rounded["v"]

    float_a = rows @ weights["w"].astype(np.float64) + biases["b"]
    float_y = np.maximum(float_a, 0) @ weights["v"].astype(np.float64) + biases["e"]
    moved = {
        "b": biases["b"] + shrink_mean((float_a - product_a - biases["b"]).mean(1)),
        "e": biases["e"] + shrink_mean((float_y - product_y(float_a) - biases["e"]).mean(1)),
    }
    alone = moved["e"]
    moved["b"] = moved["b"] + shrink_mean((float_a - product_a - moved["b"]).mean(1))
    moved["e"] = alone + shrink_mean((float_y - product_y(product_a + moved["b"]) - alone).mean(1))
    for name, expected in moved.items():
        assert corrected.model.main.op(name).read_value() == pytest.approx(expected, abs=2e-3)
        assert np.abs(expected - biases[name]).max() > 4e-3
    # The noise behind the Relu is seen in the whole quantized model alone.
    assert np.abs(moved["e"] - alone).max() > 1e-2
    assert [(entry.target, entry.applied) for entry in corrected.results] == [("a", True), ("y", True)]


def test_results_of_each_op(tmp_path):
    """Ops whose bias cannot move have the reason, after earlier results; the others are corrected."""
    earlier = skipped_target("gptq", "x", "earlier")
    rows = np.random.default_rng(7).uniform(0, 8, size=(6, 200, 2))
    body = "a = Gemm (x, w, b) c = MatMul (a, v) d = Relu (c) y = Gemm (d, w, e)"
    scales = {"x": 3.0, "d": 0.5}
    edits = make_edits(tmp_path, body, FLOAT_BIAS, scales, e=np.array([0.1, 0.2]), w=WEIGHTS["w"] + 0.3)
    free = apply_bias_correction(edits, make_samples(rows))
    assert np.abs(free.model.main.op("b").read_value() - B).max() > 0.1
    corrected = apply_bias_correction(replace(edits, results=(earlier,)), make_samples(rows))
    first, a, c, y = corrected.results
    assert first is earlier
    assert a.applied
    assert c == skipped_target("bias-correction", "c", NO_BIAS)
    assert (y.algorithm, y.target, y.applied) == ("bias-correction", "y", True)
    assert corrected.model.main.op("e").read_value().tolist() != [0.1, 0.2]
    # Without samples, and with one, nothing moves.
    for few in (rows[:0], rows[:1]):
        unmoved = apply_bias_correction(edits, make_samples(few))
        assert unmoved.results[2] == skipped_target("bias-correction", "y", NOT_OBSERVED)
        assert unmoved.model.main.op("e").read_value().tolist() == edits.model.main.op("e").read_value().tolist()


def test_added_sites_are_in_the_solution(tmp_path):
    """The plan of the result, and the quantized model in which means are measured, have the sites of added biases."""
    edits = make_edits(tmp_path, WITHOUT, PER_TENSOR, w=WEIGHTS["w"] + 0.3, v=WEIGHTS["v"] + 0.4)
    rows = np.random.default_rng(7).uniform(0, 8, size=(6, 40, 2))
    corrected = apply_bias_correction(edits, make_samples(rows))
    assert [entry.applied for entry in corrected.results] == [True, True]
    assert [site.tensor.op for site in corrected.solution.plan.sites if site.scheme.name == "bias"] == [
        "b",
        "y/bias_corrected",
    ]
    assert any(
        "y/bias_corrected" in op.name for op in corrected.quantized_model().main.ops() if op.kind == "dequantize"
    )


def test_rounded_biases_are_corrected_again(tmp_path, monkeypatch):
    """The second correction sees the rounding of the first one to an integer bias, also of an added bias."""
    body = "a = Gemm (x, w, b) c = Gemm (x, v) y = Add (a, c)"
    edits = make_edits(tmp_path, body, PER_TENSOR, {"x": 3.0}, w=WEIGHTS["w"] + 0.3, v=WEIGHTS["v"] + 0.4)
    rows = 3.0 * np.random.default_rng(7).integers(0, 4, size=(6, 200, 2))  # rounded without an error

    def corrected_bias():
        return apply_bias_correction(edits, make_samples(rows)).model.main.op("c/bias_corrected").read_value()

    twice = corrected_bias()
    monkeypatch.setattr(bias_correction, "_correction_stages", lambda *_: [])
    once = corrected_bias()
    step = 3.0 * np.abs(WEIGHTS["v"] + 0.4).max() / 127
    rounding = once - step * np.rint(once / step)
    assert np.abs(rounding).max() > 1
    assert twice - once == pytest.approx(rounding, rel=1e-3)
