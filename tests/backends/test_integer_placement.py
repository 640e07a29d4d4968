"""Ops that stay float by their estimated cost, in plans of the shipped rules."""

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.cost_tables import write_cost_table
from support.onnx_models import load_onnx, run_onnx

import graphquant as gq
from graphquant.api.plan import plan_with_rules, prepare_and_plan, resolve_ruleset, select_sites
from graphquant.backends import judge_ops
from graphquant.backends.integer_placement import (
    ALL_FLOAT_WARNING,
    Placement,
    PlacementSearch,
    converted_values,
    place_by_cost,
)
from graphquant.backends.onnxruntime_costs import CostTable
from graphquant.errors import RuleError, UsageError
from graphquant.formats.onnx import load as load_model
from graphquant.quantize import SkipCode
from graphquant.rules import load_ruleset, shipped_rule_files
from graphquant.utils.options import InsertOptions, PlanOptions

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CONVERSIONS = [f"{name}{layout}" for layout in ("", ".map", ".blocked") for name in ("quantize", "dequantize")]


def cost_table(conversion=0.0, **ratios) -> CostTable:
    """Return a table in which float ops take 100 ns, and int8 ops of the kernels `ratios` times as long."""
    kernels = {name.replace("_", ".", 1): ratio for name, ratio in ratios.items()}
    return CostTable(
        costs={
            **{f"{kernel} float": {"ops": 100.0} for kernel in kernels},
            **{f"{kernel} int8": {"ops": 100.0 * ratio} for kernel, ratio in kernels.items()},
            **{name: {"ops": conversion} for name in CONVERSIONS},
        }
    )


def net(folder, body, outputs="float[1, 8, 6, 6] y", **shapes):
    """Return a loaded model with seeded weights, its prepared form, and the plan of the rules without costs."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    source = load_onnx(folder, f"g (float[1, 8, 6, 6] x) => ({outputs}) {{ {body} }}", weights)
    ruleset = replace(resolve_ruleset(source, "onnxruntime"), costs="", algorithms=())
    return source, *plan_with_rules(source, ruleset, select_sites(source))


CONV = "Conv<pads = [1, 1, 1, 1]>"
POINTS = (8, 8, 1, 1)
KERNEL = (8, 8, 3, 3)
CHAIN = f"a = Conv(x, v) b = {CONV}(a, w) y = Conv(b, u)"


def quantized_weights(plan) -> set[str]:
    """Return the names of the quantized weights."""
    return {site.tensor.op for site in plan.sites if site.parameter}


def test_faster_ops_stay(tmp_path):
    """A plan whose ops are all faster in int8 does not change."""
    _, prepared, plan = net(tmp_path, CHAIN, v=POINTS, w=KERNEL, u=POINTS)
    assert place_by_cost(prepared, plan, cost_table(20.0, conv_dense=0.5, conv_pointwise=0.5)) is plan


def test_slow_op_is_float(tmp_path):
    """An op that loses more than its conversions cost is float with its weight; its neighbors stay int8."""
    _, prepared, plan = net(tmp_path, CHAIN, v=POINTS, w=KERNEL, u=POINTS)
    placed = place_by_cost(prepared, plan, cost_table(20.0, conv_dense=4.0, conv_pointwise=0.2))
    assert quantized_weights(placed) == {"v", "u"}
    skips = [skip for skip in placed.skips if skip.code == SkipCode.COST]
    assert {skip.tensor.op for skip in skips} == {"w"}
    assert all("us in float" in skip.reason for skip in skips)


def test_conversions_count(tmp_path):
    """An op that is slower in int8 stays between int8 ops if conversions cost more."""
    _, prepared, plan = net(tmp_path, CHAIN, v=POINTS, w=KERNEL, u=POINTS)
    table = cost_table(400.0, conv_dense=4.0, conv_pointwise=0.2)
    placement = Placement(prepared, plan)
    assert PlacementSearch(placement, table).run() == []
    middle = PlacementSearch(placement, cost_table(49.0, conv_dense=1.9, conv_pointwise=0.01)).run()
    assert middle == placement.decidable


def test_layouts(tmp_path):
    """A conversion next to a float convolution counts the values that are reordered for its layout."""
    _, prepared, plan = net(tmp_path, CHAIN, v=POINTS, w=KERNEL, u=POINTS)
    costs = {"quantize.blocked": {"ops": 3.0}, "dequantize.blocked": {"ops": 5.0}, "dequantize.map": {"ops": 7.0}}
    placement = Placement(prepared, plan)
    search = PlacementSearch(placement, CostTable(costs=costs))
    times = []
    for groups in ([], placement.decidable[1:2], placement.decidable[2:], placement.decidable):
        search.set_int8(groups)
        times.append(search.time)
    assert times == [0.0, 3.0 + 5.0, 3.0 + 7.0, 7.0]  # the output of the model has the usual layout


def test_all_float(tmp_path):
    """If no weighted op is faster in int8, the plan of the rules stays, with a warning."""
    _, prepared, plan = net(tmp_path, CHAIN, v=POINTS, w=KERNEL, u=POINTS)
    placed = place_by_cost(prepared, plan, cost_table(20.0, conv_dense=4.0, conv_pointwise=4.0))
    assert placed.sites == plan.sites
    assert placed.warnings == (ALL_FLOAT_WARNING,)


def test_slower_than_float(tmp_path):
    """A model that is estimated to be slower than float says so, also if ops that are not much slower stay int8."""
    _, prepared, plan = net(tmp_path, CHAIN, v=POINTS, w=KERNEL, u=POINTS)
    placed = place_by_cost(prepared, plan, cost_table(0.0, conv_dense=1.2, conv_pointwise=1.2))
    assert placed.sites == plan.sites
    assert len(placed.warnings) == 1
    assert "1.20" in placed.warnings[0]


def test_close_to_rules(tmp_path):
    """If float is the fastest, ops that are slower in int8 but close to float stay int8, rather than a small part."""
    _, prepared, plan = net(tmp_path, CHAIN, v=POINTS, w=KERNEL, u=POINTS)
    placed = place_by_cost(prepared, plan, cost_table(0.0, conv_dense=1.5, conv_pointwise=1.1))
    assert placed.sites == plan.sites
    assert "1.23" in placed.warnings[0]


def test_twice_the_time(tmp_path):
    """An op that takes twice as long in int8 stays int8 if the model is much faster than float all the same."""
    _, prepared, plan = net(tmp_path, CHAIN, v=POINTS, w=KERNEL, u=POINTS)
    assert place_by_cost(prepared, plan, cost_table(0.0, conv_dense=2.0, conv_pointwise=0.05)) is plan


def test_least_slow(tmp_path):
    """If float is the fastest, the fastest of the placements is used: ops that are much slower in int8 become float."""
    _, prepared, plan = net(tmp_path, CHAIN, v=POINTS, w=KERNEL, u=POINTS)
    placed = place_by_cost(prepared, plan, cost_table(0.0, conv_dense=2.0, conv_pointwise=1.1))
    assert quantized_weights(placed) == {"v", "u"}
    assert "1.07" in placed.warnings[0]


def test_clear_gains(tmp_path):
    """If no placement is clearly faster than float, only ops stay int8 that save a fifth of their float time."""
    points = " ".join(f"{after} = Conv({before}, {after}w)" for before, after in pairwise("bcdefgy"))
    shapes = {f"{name}w": POINTS for name in "cdefgy"}
    _, prepared, plan = net(tmp_path, f"b = {CONV}(x, w) {points}", w=KERNEL, **shapes)
    placed = place_by_cost(prepared, plan, cost_table(0.0, conv_dense=0.75, conv_pointwise=0.99))
    assert quantized_weights(placed) == {"w"}
    placed = place_by_cost(prepared, plan, cost_table(0.0, conv_dense=0.85, conv_pointwise=0.99))
    assert quantized_weights(placed) == {"w", *shapes}


def test_region_without_weights(tmp_path):
    """Ops without multiply-adds between float ops stay float, even if they would be faster in int8."""
    pool = "c = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(b)"
    body = f"a = Conv(x, v) b = {CONV}(a, w) {pool} d = {CONV}(c, s) y = Conv(d, u)"
    _, prepared, plan = net(tmp_path, body, v=POINTS, w=KERNEL, s=KERNEL, u=POINTS)
    placement = Placement(prepared, plan)
    groups = PlacementSearch(placement, cost_table(1.0, conv_dense=3.0, conv_pointwise=0.5, max_pool=0.1)).run()
    assert decidable_ops(prepared, plan) == ["a", "b", "c", "d", "y"]
    assert [placement.groups[index].members[0][1] for index in groups] == ["a", "y"]


def test_sizes_of_samples(tmp_path):
    """Times of a model with unknown sizes are estimated for the sizes of the samples."""
    rng = np.random.default_rng(0)
    text = "g (float[N, 8, H, W] x) => (float[N, 8, H, W] y) { a = Conv(x, v) b = Relu(a) y = Conv(b, v) }"
    source = load_onnx(tmp_path, text, {"v": rng.normal(0, 0.3, POINTS).astype(np.float32)})
    lines = shipped_rule_files()["onnxruntime"].read_text("utf-8").splitlines()
    lines = ['costs = "costs.toml"', *(line for line in lines if not line.startswith("costs"))]
    (tmp_path / "mine.toml").write_text("\n".join(lines), "utf-8")
    costs = {"conv.pointwise float": {"outputs": 1.0}, "conv.pointwise int8": {"ops": 5000.0}}
    write_cost_table(CostTable(costs=costs), tmp_path / "costs.toml")
    warnings = []
    for size in (6, 40):
        data = tmp_path / f"{size}.npz"
        np.savez(data, x=rng.normal(0, 1, (8, 8, size, size)).astype(np.float32))
        result = gq.insert(source, data=str(data), rules=str(tmp_path / "mine.toml"), min_sqnr="none")
        warnings.append(result.plan.warnings)
    assert warnings == [(ALL_FLOAT_WARNING,), ()]
    assert prepare_and_plan(source, PlanOptions(rules=str(tmp_path / "mine.toml")))[1].warnings == ()


@pytest.mark.parametrize("seed", range(12))
def test_optimum(tmp_path, seed):
    """The search comes close to the least time of all placements, in nets with branches and costs at random."""
    rng = np.random.default_rng(seed)
    body = f"""
        a = Conv(x, v) b = {CONV}(a, w) c = Add(a, b) d = Conv(c, u) f = Sigmoid(d)
        h = GlobalAveragePool(f) i = Conv(h, s) k = Mul(f, i) y = Concat<axis = 1>(k, c)
    """
    _, prepared, plan = net(tmp_path, body, "float[1, 16, 6, 6] y", v=POINTS, w=KERNEL, u=POINTS, s=POINTS)
    kernels = ("conv.dense", "conv.pointwise", "add", "sigmoid", "mul.broadcast", "concat")
    costs = {
        f"{kernel} {kind}": {"ops": float(rng.uniform(10, 100))}
        for kernel in (*kernels, "global_avg_pool")
        for kind in ("float", "int8")
    }
    table = CostTable(costs={**costs, **{name: {"ops": float(rng.uniform(5, 60))} for name in CONVERSIONS}})
    placement = Placement(prepared, plan)
    assert len(placement.decidable) == 9
    search = PlacementSearch(placement, table)
    times = []
    for count in range(len(placement.decidable) + 1):
        for groups in combinations(placement.decidable, count):
            search.set_int8(groups)
            times.append(search.time)
    search.set_int8(PlacementSearch(placement, table).run())
    assert search.time <= 1.04 * min(times)


def test_a_settled_placement_is_not_tried_again(tmp_path, monkeypatch):
    """The search from all float does not repeat the changes that saved no time in the search from all int8."""
    body = f"a = Conv(x, v) b = {CONV}(a, w) c = Add(a, b) d = Conv(c, u) y = Identity(d)"
    _, prepared, plan = net(tmp_path, body, v=POINTS, w=KERNEL, u=POINTS)
    search = PlacementSearch(Placement(prepared, plan), cost_table(1.0, conv_dense=0.5, conv_pointwise=0.25))
    tried = []
    try_flips = search.try_flips
    monkeypatch.setattr(search, "try_flips", lambda indices: tried.append((*indices,)) or try_flips(indices))
    groups = search.run()
    assert groups == search.decidable
    assert [indices for indices in tried if indices == (groups[0],)] == [(groups[0],)]


@pytest.mark.parametrize("seed", range(20))
def test_the_placement_of_a_chain_is_optimal(tmp_path, monkeypatch, seed):
    """In a net without branches no placement takes less time than the one that is found, and no single op is tried."""
    rng = np.random.default_rng(seed)
    body = f"a = Conv(x, v) b = {CONV}(a, w) c = Conv(b, u) d = {CONV}(c, s) e = Conv(d, u) y = Conv(e, v)"
    _, prepared, plan = net(tmp_path, body, v=POINTS, w=KERNEL, u=POINTS, s=KERNEL)
    kernels = ("conv.dense", "conv.pointwise")
    costs = {
        f"{kernel} {kind}": {"ops": float(rng.uniform(10, 99))} for kernel in kernels for kind in ("float", "int8")
    }
    table = CostTable(costs={**costs, **{name: {"ops": float(rng.uniform(5, 60))} for name in CONVERSIONS}})
    placement = Placement(prepared, plan)
    assert len(placement.decidable) == 6
    search, times, tried = PlacementSearch(placement, table), [], []
    for count in range(len(placement.decidable) + 1):
        for groups in combinations(placement.decidable, count):
            search.set_int8(groups)
            times.append(search.time)
    try_flips = search.try_flips
    monkeypatch.setattr(search, "try_flips", lambda indices: tried.append(indices) or try_flips(indices))
    search.set_int8(search.run())
    assert search.time == pytest.approx(min(times))
    assert len(tried) <= 4


def test_time_of_work(tmp_path, monkeypatch):
    """The time of the search is that of the work of the placement."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    total_work = pytest.importorskip("kernel_costs").total_work  # a source distribution has no benchmarks
    _, prepared, plan = net(tmp_path, CHAIN, v=POINTS, w=KERNEL, u=POINTS)
    table = cost_table(7.0, conv_dense=0.5, conv_pointwise=0.25)
    placement = Placement(prepared, plan)
    search = PlacementSearch(placement, table)
    search.set_int8(placement.decidable[1:])
    work = total_work(placement, placement.decidable[1:])
    assert sum(table.nanoseconds(kernel, {name: n}) for (kernel, name), n in work.items()) == 100 + 50 + 25 + 2 * 7
    assert search.time == 100 + 50 + 25 + 2 * 7


def decidable_ops(prepared, plan):
    """Return the first op of each group that may run on integers."""
    placement = Placement(prepared, plan)
    return [placement.groups[index].members[0][1] for index in placement.decidable]


def test_clamped_product(tmp_path):
    """ONNX Runtime joins a product of matrices and a Relu to a float op if no rule quantizes the output of the Relu."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.3, (8, 8)).astype(np.float32) for name in "wv"}
    text = (
        "g (float[1, 8] x) => (float[1, 8] y) { a = MatMul(x, w) b = Relu(a) c = MatMul(b, v) d = Relu(c) y = Exp(d) }"
    )
    source = load_onnx(tmp_path, text, weights)
    ruleset = replace(resolve_ruleset(source, "onnxruntime"), costs="", algorithms=())
    prepared, plan = plan_with_rules(source, ruleset, select_sites(source))
    assert decidable_ops(prepared, plan) == ["a", "c"]
    plan = replace(plan, sites=tuple(site for site in plan.sites if site.tensor.op != "d"))
    assert decidable_ops(prepared, plan) == ["a"]
    placed = place_by_cost(prepared, plan, cost_table(1.0, product_row=0.1))
    assert quantized_weights(placed) == {"w"}
    np.savez(tmp_path / "data.npz", x=rng.normal(0, 1, (8, 1, 8)).astype(np.float32))
    result = gq.insert(source, plan=placed, data=str(tmp_path / "data.npz"))
    statuses = {verdict.op: verdict.status for verdict in judge_ops(result.model, "onnxruntime")}
    assert statuses["a"] == "int8"
    assert statuses["c"] == "float"
    assert quantized_weights(plan) == {"w", "v"}


@pytest.mark.parametrize("moves", ["m = Identity(a)", "t = Transpose<perm = [0, 1, 3, 2]>(a) m = Identity(t)"])
def test_float_pool(tmp_path, moves):
    """A float MaxPool before a QuantizeLinear is not moved behind it; `strip` removes what prevents that."""
    body = f"a = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x) {moves} y = Conv(m, v)"
    source, _, plan = net(tmp_path, body, v=POINTS)
    samples = np.random.default_rng(1).normal(0, 1, (8, 1, 8, 6, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=samples)
    result = gq.insert(source, plan=plan, data=str(tmp_path / "data.npz"))
    statuses = {verdict.op: verdict.status for verdict in judge_ops(result.model, "onnxruntime")}
    assert [statuses["a"], statuses["y"]] == ["float", "int8"]
    assert "a/barrier" in result.model.main
    stripped = gq.strip(result.model).model
    assert "a/barrier" not in stripped.main
    expected = run_onnx(source, {"x": samples[0]})[0]
    np.testing.assert_allclose(run_onnx(stripped, {"x": samples[0]})[0], expected, atol=0.05)


@pytest.mark.parametrize(("ratio", "quantized"), [(9.0, set()), (0.2, {"w"})])
def test_quantized_by_another_tool(tmp_path, ratio, quantized):
    """Ops that another tool left in float stay float, unless they are estimated to be faster on integers."""
    source, prepared, plan = net(tmp_path, CHAIN, v=POINTS, w=KERNEL, u=POINTS)
    partial = place_by_cost(prepared, plan, cost_table(20.0, conv_dense=9.0, conv_pointwise=0.2))
    samples = {"x": np.random.default_rng(1).normal(0, 1, (8, 1, 8, 6, 6)).astype(np.float32)}
    message = onnx.load(gq.insert(source, plan=partial, data=samples, min_sqnr="none").save(tmp_path / "partial.onnx"))
    del message.metadata_props[:]
    onnx.save(message, tmp_path / "foreign.onnx")
    foreign = load_model(tmp_path / "foreign.onnx")
    ruleset = replace(resolve_ruleset(foreign, "onnxruntime"), costs="", algorithms=())
    prepared, plan = plan_with_rules(foreign, ruleset, select_sites(foreign))
    placed = place_by_cost(prepared, plan, cost_table(20.0, conv_dense=ratio, conv_pointwise=1.0))
    assert quantized_weights(placed) == quantized
    assert bool(placed.sites) == bool(quantized)


def test_converted_values(tmp_path):
    """Values that a float op converts in each run are counted, weights included."""
    source, prepared, plan = net(tmp_path, CHAIN, v=POINTS, w=KERNEL, u=POINTS)
    placed = place_by_cost(prepared, plan, cost_table(20.0, conv_dense=4.0, conv_pointwise=0.2))
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(1).normal(0, 1, (8, 1, 8, 6, 6)).astype(np.float32))
    result = gq.insert(source, plan=placed, data=str(tmp_path / "data.npz"))
    converted = converted_values(result.model, result.verdicts)
    assert converted[("", "b")] == 8 * 36
    assert ("", "a") not in converted


def test_rules_with_costs(tmp_path):
    """A rule file names a table, relative to itself; the digest of the rules covers it; size and latency ignore it."""
    source, _, _ = net(tmp_path, CHAIN, v=POINTS, w=KERNEL, u=POINTS)
    text = shipped_rule_files()["onnxruntime"].read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("costs")]
    (tmp_path / "mine.toml").write_text("\n".join(['costs = "costs.toml"', *lines]), "utf-8")
    rules = str(tmp_path / "mine.toml")
    write_cost_table(cost_table(20.0, conv_dense=4.0, conv_pointwise=0.2), tmp_path / "costs.toml")
    digest = load_ruleset([rules]).digest
    assert quantized_weights(prepare_and_plan(source, PlanOptions(rules=rules))[1]) == {"v", "u"}
    for options in (InsertOptions(rules=rules, optimize="size"), InsertOptions(rules=rules, optimize="latency")):
        assert quantized_weights(prepare_and_plan(source, options)[1]) == {"v", "w", "u"}
    assert quantized_weights(prepare_and_plan(source, PlanOptions(rules=rules), by_cost=False)[1]) == {"v", "w", "u"}
    write_cost_table(cost_table(20.0, conv_dense=0.5, conv_pointwise=0.2), tmp_path / "costs.toml")
    assert load_ruleset([rules]).digest != digest
    assert quantized_weights(prepare_and_plan(source, PlanOptions(rules=rules))[1]) == {"v", "w", "u"}
    (tmp_path / "costs.toml").unlink()
    with pytest.raises(UsageError):
        prepare_and_plan(source, PlanOptions(rules=rules))


def test_rules_without_costs(cli, tmp_path):
    """With `costs = "none"` the rules alone decide, also in later files and with `extends`; the value is checked."""
    source, _, _ = net(tmp_path, CHAIN, v=POINTS, w=KERNEL, u=POINTS)
    kept = {"v", "w", "u"}
    write_cost_table(cost_table(20.0, conv_dense=4.0, conv_pointwise=0.2), tmp_path / "costs.toml")
    text = (
        shipped_rule_files()["onnxruntime"].read_text("utf-8").replace('costs = "onnxruntime"', 'costs = "costs.toml"')
    )
    (tmp_path / "dear.toml").write_text(text, "utf-8")
    (tmp_path / "mine.toml").write_text('costs = "none"\n', "utf-8")
    (tmp_path / "silent.toml").write_text('description = "no costs"\n', "utf-8")
    mine, silent, dear = (str(tmp_path / f"{name}.toml") for name in ("mine", "silent", "dear"))
    assert quantized_weights(prepare_and_plan(source, PlanOptions(rules=(dear,)))[1]) < kept
    assert quantized_weights(prepare_and_plan(source, PlanOptions(rules=(silent, dear)))[1]) < kept
    assert quantized_weights(prepare_and_plan(source, PlanOptions(rules=(mine, dear)))[1]) == kept
    (tmp_path / "mine.toml").write_text('costs = "none"\nextends = "onnxruntime"\n', "utf-8")
    assert load_ruleset([mine]).costs == ""
    (tmp_path / "mine.toml").write_text('extends = "onnxruntime"\n', "utf-8")
    assert load_ruleset([mine]).costs == "onnxruntime"
    (tmp_path / "mine.toml").write_text('description = "x"\ncosts = "onnxruntim"\n', "utf-8")
    with pytest.raises(RuleError, match=r"mine\.toml:2: .*'onnxruntime'"):
        load_ruleset([mine])
    (tmp_path / "mine.toml").write_text('costs = "nowhere.toml"\n', "utf-8")
    assert "nowhere.toml" in cli("rules", "check", mine, code=2).stderr


def test_costs_keep_dynamic_lstms(tmp_path):
    """A rule before the default ones that gives an LSTM the fused form is kept: costs are those of pairs."""
    text = (Path(__file__).parents[2] / "docs" / "howto" / "slower.md").read_text()
    rules = tmp_path / "lstm.toml"
    rules.write_text(text.partition("<<'END'\n")[2].partition("END\n")[0])
    rng = np.random.default_rng(0)
    shapes = {"w": (1, 512, 24), "r": (1, 512, 128), "v": (128, 512)}
    weights = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    body = """h = LSTM<hidden_size = 128>(x, w, r)
        t = Transpose<perm = [0, 2, 1, 3]>(h)
        s = Constant<value = int64[2] {9, 128}>() q = Reshape(t, s) y = MatMul(q, v)"""
    path = tmp_path / "net.onnx"
    onnx.save(
        load_onnx(tmp_path, f"g (float[9, 1, 24] x) => (float[9, 512] y) {{ {body} }}", weights).source.message, path
    )
    data = {"x": rng.normal(size=(16, 9, 1, 24)).astype(np.float32)}
    result = gq.insert(path, data=data, rules=[rules, "onnxruntime"])
    types = {verdict.type: verdict.status for verdict in result.verdicts}
    assert types["LSTM"] == types["MatMul"] == "int8"
    assert result.validation.worst_sqnr > 25
    assert gq.insert(path, data=data).verdicts[0].status == "float"
