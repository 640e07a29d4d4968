"""SavedModels edited in every function clone: loaded, called, trained, saved again, and used as a Keras layer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.shared_models import SHARED_MODELS
from support.tensorflow_models import write_branching_module, write_module_with_clones

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.errors import UsageError
from graphquant.ir import FunctionClones, Parameters
from graphquant.numerics import QParams, tf_ranges
from graphquant.quantize import plan_from_json, plan_to_json

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, Any]

WEIGHTED = {"conv", "depthwise_conv", "matmul"}


def copies(model: gq.Model) -> list[tuple[str, str]]:
    """Return the weighted ops in graphs that only saved functions reach."""
    live = set(model.reachable_graphs())
    reached = [name for name in model.graphs_reachable_from(model.saved_functions) if name not in live]
    return [(name, op.name) for name in reached for op in model.graphs[name].ops() if op.kind in WEIGHTED]


# -- a SavedModel with clones, and KWS: what TensorFlow of today does not load ---------------------


def test_function_clones_of_kws_have_the_same_sites(model_folder: Path) -> None:
    """All functions with weights outside the signature, 18 in KWS, are planned with the scales of their variables."""
    model = gq.load(model_folder / "kws/saved_model")
    plan = gq.plan(model, rules=["weight_only"])
    weights = [site for site in plan.sites if site.parameter]
    by_use = {use: site for site in weights if site.clone_of is None for use in site.uses}
    planned = {(use.graph, use.op) for site in weights for use in site.uses if site.clone_of is not None}
    assert planned == set(copies(model))
    assert len({graph for graph, _ in planned}) == (18 if model_folder == SHARED_MODELS else 1)
    clones = FunctionClones(model, Parameters(model))
    for site in weights:
        if site.clone_of is not None:
            assert clones.variable_name(site.tensor) == clones.variable_name(by_use[site.clone_of].tensor)


def test_plan_with_function_clones_round_trip(model_folder: Path) -> None:
    """A site's `clone_of` survives JSON, and a reference to a missing site is an error."""
    model = gq.load(model_folder / "kws/saved_model")
    plan = gq.plan(model, rules=["weight_only"])
    data = plan_to_json(plan)
    assert plan_from_json(data) == plan
    original_indices = [index for index, site in enumerate(plan.sites) if site.clone_of is None]
    del data["sites"][original_indices[0]]
    original = plan.sites[original_indices[0]].uses[0]
    with pytest.raises(UsageError, match=rf"scale of {re.escape(str(original))}"):
        gq.insert(model, plan=plan_from_json(data))


@pytest.mark.slow
def test_function_clones_share_scales(model_folder: Path, tmp_path: Path) -> None:
    """Each site in a clone has the identical parameters of its original."""
    result = gq.insert(model_folder / "kws/saved_model", rules=["weight_only"])
    params_by_use = {
        use: insertion.params
        for insertion in result.inserted
        if insertion.site.clone_of is None
        for use in insertion.site.uses
    }
    followers = [insertion for insertion in result.inserted if insertion.site.clone_of is not None]
    assert len(followers) >= len(params_by_use) > 0
    assert all(insertion.params is params_by_use[insertion.site.clone_of] for insertion in followers)
    again = gq.load(result.save(tmp_path / "kws"))
    summary = summarize_model(again)
    assert summary.float_clone_ops == ()
    copied = {(copy.graph, copy.op) for row in summary.distinct_ops for copy in row.copies}
    assert copied == {
        (name, op.name)
        for name in FunctionClones(again, Parameters(again)).clone_graphs
        for op in again.graphs[name].ops()
        if op.kind == "qdq"
    }
    assert not copied.intersection((row.graph, row.op) for row in summary.distinct_ops)
    assert {graph for graph, _ in copied}.isdisjoint(summary.unreachable_functions)
    # A FakeQuant per channel has its channels on the last axis, also between reshapes.
    shapes = {row.op: again.graphs[row.graph].output(row.tensor).shape for row in summary.distinct_ops}
    axes = {row.op: row.params.axis for row in summary.distinct_ops if isinstance(row.params, QParams)}
    assert {axis for name, axis in axes.items() if name.endswith("depthwise/ReadVariableOp/quant")} <= {2}
    assert {axes[name] - len(shape) for name, shape in shapes.items() if shape and axes[name] is not None} == {-1}


# -- a module with copies --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def module_with_clones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SavedModel with separate functions for the signature, other shapes and training."""
    pytest.importorskip("tensorflow")
    path = tmp_path_factory.mktemp("net") / "net"
    write_module_with_clones(path)
    return path


@pytest.fixture(scope="module")
def clones_result(module_with_clones: Path, tmp_path_factory: pytest.TempPathFactory) -> gq.Result:
    """The quantized module, saved next to it as "quantized"."""
    data = tmp_path_factory.mktemp("data") / "data.npz"
    np.savez(data, x=module_inputs(8))
    inserted = gq.insert(module_with_clones, data=str(data), validate=False)
    inserted.save(module_with_clones.parent / "quantized")
    return inserted


def module_inputs(count: int) -> Array:
    """Return inputs [count, 8, 8, 3]."""
    return np.random.default_rng(1).normal(0, 1, (count, 8, 8, 3)).astype(np.float32)


def result_by_hand(result: gq.Result, folder: Path, x: Array) -> Array:
    """Compute the module's result with FakeQuant ops at the plan's sites, by hand."""
    import tensorflow as tf

    net = tf.saved_model.load(str(folder))
    ranges = {
        insertion.site.tensor.op: (insertion.params, insertion.site)
        for insertion in result.inserted
        if insertion.site.clone_of is None
    }

    def quantized(value: Any, op: str) -> Any:
        params, site = ranges[op]
        low, high = params.range.low.astype(np.float32), params.range.high.astype(np.float32)
        call = tf.quantization.fake_quant_with_min_max_vars
        if site.axis is not None:
            call = tf.quantization.fake_quant_with_min_max_vars_per_channel
        return call(value, low, high, 8, narrow_range=params.narrow and params.type.signed)

    y = tf.nn.conv2d(quantized(x, "x"), quantized(net.k, "Conv2D/ReadVariableOp"), 1, "SAME")
    mean = tf.reduce_mean(quantized(tf.nn.relu(y), "Relu"), [1, 2])
    product = quantized(mean, "Mean") @ quantized(net.w, "matmul/ReadVariableOp")
    return np.asarray(quantized(product, "matmul"))


@pytest.mark.slow
def test_calls_and_signatures_give_what_is_written_by_hand(clones_result: gq.Result, module_with_clones: Path) -> None:
    """loaded(x) and loaded.signatures equal a hand-written QDQ graph bit for bit."""
    tf = pytest.importorskip("tensorflow")
    x = module_inputs(2)
    loaded = tf.saved_model.load(str(module_with_clones.parent / "quantized"))
    expected = result_by_hand(clones_result, module_with_clones, x)
    np.testing.assert_array_equal(loaded(x), expected)
    np.testing.assert_array_equal(loaded.signatures["serving_default"](tf.constant(x))["output_0"], expected)
    assert np.abs(tf.saved_model.load(str(module_with_clones))(x) - expected).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_five_steps_lower_the_loss(clones_result: gq.Result, module_with_clones: Path, training: bool) -> None:
    """Five SGD steps through `loaded(x, training)`, with FakeQuant's gradients, lower the loss."""
    tf = pytest.importorskip("tensorflow")
    assert clones_result.inserted
    loaded = tf.saved_model.load(str(module_with_clones.parent / "quantized"))
    target = 0.5 * tf.saved_model.load(str(module_with_clones))(module_inputs(2))  # within what the ranges let through

    def loss(training: bool) -> Any:
        return tf.reduce_mean((loaded(module_inputs(2), training) - target) ** 2)

    before = float(loss(training=False))  # without dropout, which draws
    for _ in range(5):
        with tf.GradientTape() as tape:
            value = loss(training)
        variables = [loaded.k, loaded.w]
        for variable, gradient in zip(variables, tape.gradient(value, variables), strict=True):
            assert np.abs(gradient).max() > 0
            variable.assign_sub(0.02 * gradient)
    assert float(loss(training=False)) < before


@pytest.mark.slow
def test_loaded_model_is_saved_again_and_used_as_a_layer(
    clones_result: gq.Result, module_with_clones: Path, tmp_path: Path
) -> None:
    """Saved again and loaded as a Keras TFSMLayer, the model gives the same bits."""
    tf = pytest.importorskip("tensorflow")
    assert clones_result.inserted
    path, x = module_with_clones.parent / "quantized", module_inputs(2)
    loaded = tf.saved_model.load(str(path))
    tf.saved_model.save(loaded, str(tmp_path / "again"), signatures=loaded.signatures)
    again = tf.saved_model.load(str(tmp_path / "again"))
    np.testing.assert_array_equal(again(x), loaded(x))
    layer = tf.keras.layers.TFSMLayer(str(path), call_endpoint="serving_default")
    np.testing.assert_array_equal(layer(x)["output_0"], loaded(x))


@pytest.mark.slow
def test_unmatched_ops_get_scales_of_their_own(clones_result: gq.Result, module_with_clones: Path) -> None:
    """A function that convolves other data with the same kernel has only the kernel quantized."""
    tf = pytest.importorskip("tensorflow")
    sites = [sites.site for sites in clones_result.inserted if "elsewhere" in sites.site.uses[0].graph]
    assert [(site.parameter, use.op, use.slot) for site in sites for use in site.uses] == [(True, "Conv2D", 1)]
    net, x = tf.saved_model.load(str(module_with_clones)), module_inputs(2)
    (params,) = [insertion.params for insertion in clones_result.inserted if insertion.site == sites[0]]
    limits = tf_ranges.range_for_fake_quant(params)
    low, high = limits.low.astype(np.float32), limits.high.astype(np.float32)
    kernel = tf.quantization.fake_quant_with_min_max_vars_per_channel(net.k, low, high, 8, narrow_range=params.narrow)
    expected = tf.nn.conv2d(tf.nn.relu(100.0 * x), kernel, 1, "SAME")
    loaded = tf.saved_model.load(str(module_with_clones.parent / "quantized"))
    np.testing.assert_allclose(loaded.elsewhere(x), expected, rtol=1e-5)


@pytest.mark.slow
def test_a_function_that_is_no_clone_stays_float(clones_result: gq.Result) -> None:
    """A saved function with its own weights is not edited, and inspect lists it."""
    unmatched = summarize_model(clones_result.model).float_clone_ops
    elsewhere = unmatched[0].graph
    assert [(clone.op, clone.kind, f"{elsewhere}/before/Relu:0" in clone.reason) for clone in unmatched] == [
        ("Conv2D", "conv", True),
        ("matmul", "matmul", False),
    ]
    assert not any("other" in use.graph for insertion in clones_result.inserted for use in insertion.site.uses)


# -- what else a SavedModel holds ------------------------------------------------------------------


@pytest.mark.slow
def test_gradients_aliases_and_debug_info_are_kept(tmp_path: Path) -> None:
    """Custom gradients, aliases and debug info are preserved.

    One inner function is called with one variable by the signature and with another by `both`, so its weight has no
    one scale and is left.
    """
    tf = pytest.importorskip("tensorflow")

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def doubled(x: Any) -> Any:
        return tf.tanh(x), lambda upstream: 2.0 * upstream

    class Net(tf.Module):  # type: ignore[misc]  # TensorFlow has no types
        def __init__(self) -> None:
            super().__init__()
            random = np.random.default_rng(2)
            self.v, self.w, self.u = (
                tf.Variable(random.normal(0, 0.3, (5, 5)).astype(np.float32), name=name) for name in "vwu"
            )

        @tf.function  # type: ignore[untyped-decorator]
        def inner(self, x: Any, weight: Any) -> Any:
            return x @ weight

        @tf.function(input_signature=[tf.TensorSpec([None, 5])])  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            return doubled(self.inner(x, self.v) @ self.u)

        @tf.function(input_signature=[tf.TensorSpec([None, 5])])  # type: ignore[untyped-decorator]
        def both(self, x: Any) -> Any:
            return self.inner(x, self.w)

    net = Net()
    options = tf.saved_model.SaveOptions(
        experimental_custom_gradients=True, save_debug_info=True, function_aliases={"answer": net.__call__}
    )
    tf.saved_model.save(net, str(tmp_path / "net"), signatures=net.__call__, options=options)
    result = gq.insert(tmp_path / "net", rules=["weight_only"])
    assert [insertion.site.uses[0].op for insertion in result.inserted if insertion.site.clone_of is None] == ["matmul"]
    (skip,) = [skip for skip in result.skips if "inner" in skip.tensor.graph]
    assert "different weights" in skip.reason
    path = result.save(tmp_path / "quantized")
    debug = "debug/saved_model_debug_info.pb"
    assert (path / debug).read_bytes() == (tmp_path / "net" / debug).read_bytes()
    meta_info = gq.load(path).source.message.meta_graphs[0].meta_info_def
    assert dict(meta_info.function_aliases) == dict(
        result.source.source.message.meta_graphs[0].meta_info_def.function_aliases
    )
    assert set(meta_info.function_aliases.values()) == {"answer"}
    loaded, x = tf.saved_model.load(str(path)), np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5)
    np.testing.assert_array_equal(loaded.both(x), net.both(x))
    params = result.inserted[0].params
    limits = tf_ranges.range_for_fake_quant(params)
    call = tf.quantization.fake_quant_with_min_max_vars
    if params.axis is not None:
        call = tf.quantization.fake_quant_with_min_max_vars_per_channel
    u = call(net.u, limits.low.astype(np.float32), limits.high.astype(np.float32), 8, narrow_range=params.narrow)
    with tf.GradientTape() as tape:
        y = loaded(x)
    np.testing.assert_allclose(y, tf.tanh((x @ net.v) @ u), rtol=1e-6)
    expected = tf.transpose(tf.constant(x)) @ (2 * tf.ones_like(y)) @ tf.transpose(u)
    np.testing.assert_allclose(tape.gradient(y, loaded.v), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_model_without_a_signature_is_refused(tmp_path: Path) -> None:
    """Rules have no graph to apply to; the message explains how to save a signature."""
    tf = pytest.importorskip("tensorflow")
    module = tf.Module()
    module.w = tf.Variable(np.ones((5, 3), np.float32))
    module.call = tf.function(lambda x: x @ module.w)
    module.call(tf.zeros([2, 5]))
    tf.saved_model.save(module, str(tmp_path / "net"))
    with pytest.raises(gq.GraphQuantError, match=r"no signature.*tf\.saved_model\.save"):
        gq.plan(tmp_path / "net")
    assert len(summarize_model(gq.load(tmp_path / "net")).float_clone_ops) == 1


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("activation", ["relu", "sin"])
@pytest.mark.slow
def test_a_branch_that_reads_the_result_of_a_call_is_a_clone(activation: str, calls: int, tmp_path: Path) -> None:
    """All traces of `head` give the bits of the signature: the function that it calls is one of those that run.

    The branches of its tf.cond read the result of that function, and all of them quantize it.
    """
    tf = pytest.importorskip("tensorflow")
    write_branching_module(tmp_path / "net", activation=activation, calls=calls)
    samples = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    result = gq.insert(tmp_path / "net", data={"x": samples}, validate=False)
    branches = [graph for graph in result.model.graphs.values() if "cond/MatMul" in graph]
    assert len(branches) > len([graph for graph in branches if graph.name in result.model.reachable_graphs()])
    operands = [graph.slots("cond/MatMul")[0] for graph in branches]
    assert {result.model.op(operand).kind for operand in operands if operand is not None} == {"qdq"}
    conditions = [graph.slots("Sum")[0] for graph in result.model.graphs.values() if "Sum" in graph]
    assert len(conditions) > 1
    assert len({result.model.op(operand).kind for operand in conditions if operand is not None}) == 1
    loaded, original = (
        tf.saved_model.load(str(path)) for path in (result.save(tmp_path / "quantized"), tmp_path / "net")
    )
    changes = []
    for rows in (samples[:5], -samples[:5], samples[:7]):
        expected = loaded.signatures["serving_default"](x=tf.constant(rows))["y"].numpy()
        np.testing.assert_array_equal(loaded.head(tf.constant(rows)).numpy(), expected)
        changes.append(np.abs(original.head(tf.constant(rows)).numpy() - expected).max())
    assert max(changes) > 0
