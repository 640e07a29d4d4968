"""Learned ranges in SavedModels and MetaGraphs: variables that are restored, trained and saved again."""

import numpy as np
import pytest
from reference import fake_quant
from support.qparams import choose_qparams
from support.shared_models import SHARED_MODELS

import graphquant as gq
from graphquant import formats
from graphquant.analysis.model_summary import summarize_model
from graphquant.errors import UsageError
from graphquant.numerics import tf_ranges

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

RULES = """
[scheme.x]
family = "{family}"
range = "learned"
observe = {{ name = "fixed", low = -0.75, high = 0.5 }}
[scheme.w]
family = "fake-quant"
range = "learned"
per = "channel"
observe = "absmax"
[[rule]]
name = "x"
consumer = {{ kind = "matmul", input = "input" }}
quantize = "x"
[[rule]]
name = "w"
consumer = {{ kind = "matmul", input = "weight" }}
quantize = "w"
"""
rng = np.random.default_rng(0)
X = rng.normal(size=(5, 3)).astype(np.float32)
WEIGHT, TARGET = rng.normal(size=(3, 3)).astype(np.float32), rng.normal(size=(5, 3)).astype(np.float32)


def save_product_model(tf, path, kind="plain"):
    """Write a SavedModel of one matrix product: in nested functions, a branch, a loop."""

    class Net(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable(WEIGHT, name="w")

        @tf.function
        def layer(self, x):
            return tf.matmul(x, self.w)

        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x")])
        def __call__(self, x):
            if kind == "cond":
                return tf.cond(tf.reduce_sum(x) > 1e9, lambda: self.layer(2.0 * x), lambda: self.layer(x))
            if kind == "while":
                return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, self.layer(y)), [0, x])[1]
            if kind == "map":
                return tf.data.Dataset.from_tensors(x).map(self.layer).get_single_element()
            if kind == "both":
                return tf.matmul(self.layer(x), self.w)
            return self.layer(x)

    net = Net()
    tf.saved_model.save(net, str(path), signatures=net.__call__)
    return path


def insert_learned_ranges(model, tmp_path, family="fake-quant"):
    """Quantize the model with learned ranges for the input and the weight of each product."""
    (tmp_path / "r.toml").write_text(RULES.format(family=family))
    return gq.insert(model, rules=[str(tmp_path / "r.toml")])


def assert_only_quantization_differs(source, result, path):
    """Assert that `diff` lists a written model's sites, and neither their variables nor what passes and saves them."""
    number = len(summarize_model(result.model).quantization_ops)  # without those of function clones
    assert gq.diff(source, path).counts == {"site-added": number}
    assert gq.diff(path, source).counts == {"site-removed": number}


def reference_product(rounds=1):
    """Compute the quantized product with the reference."""
    ends = tf_ranges.range_for_fake_quant(gq_params(-0.75, 0.5))
    largest = np.abs(WEIGHT).max(axis=0)
    weight = tf_ranges.range_for_fake_quant(gq_params(-largest, largest, axis=1))
    y = X
    for _ in range(rounds):
        y = fake_quant.fake_quant_with_vars(y, ends.low, ends.high) @ fake_quant.fake_quant_with_vars_per_channel(
            WEIGHT, weight.low, weight.high
        )
    return y


def gq_params(low, high, axis=None):
    """Return the scale that the rules choose for a range."""
    from graphquant.numerics import IntType, Range

    return choose_qparams(Range(low, high), IntType(8, signed=True), symmetric=True, axis=axis)


def test_layouts_of_the_rules(tf, tmp_path) -> None:
    """The reference has the params of the plan."""
    result = insert_learned_ranges(save_product_model(tf, tmp_path / "net"), tmp_path)
    scales = {inserted_site.site.rule: inserted_site.params.scale for inserted_site in result.inserted}
    largest = np.abs(WEIGHT).max(axis=0)
    np.testing.assert_array_equal(scales["x"], gq_params(-0.75, 0.5).scale)
    np.testing.assert_array_equal(scales["w"], gq_params(-largest, largest, axis=1).scale)


@pytest.mark.parametrize(("kind", "rounds"), [("plain", 1), ("cond", 1), ("while", 2), ("both", 2)])
def test_saved_models(tf, tmp_path, kind: str, rounds: int) -> None:
    """The model, loaded by each loader and by graphquant, gives the reference's values. Its ranges are variables."""
    source = save_product_model(tf, tmp_path / "net", kind)
    result = insert_learned_ranges(source, tmp_path)
    path = result.save(tmp_path / "made")
    assert_only_quantization_differs(source, result, path)
    expected = reference_product(rounds)
    loaded = tf.saved_model.load(str(path))
    assert "x/quant/min:0" in [variable.name for variable in loaded.learned_ranges]
    assert all(variable.trainable for variable in loaded.learned_ranges)
    np.testing.assert_allclose(loaded(X), expected, rtol=1e-5, atol=1e-6)
    signature = loaded.signatures["serving_default"]
    assert len(signature.trainable_variables) == 1 + len(loaded.learned_ranges)
    np.testing.assert_allclose(next(iter(signature(x=X).values())), expected, rtol=1e-5, atol=1e-6)
    again = gq.load(path)
    for model in (result.model, again):
        (actual,) = formats.format_module("tensorflow").create_runner(model).run({"x": X}).values()
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert all(reading.params is not None and reading.learned for reading in summarize_model(again).quantization_ops)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(path))
        (out,) = meta.signature_def["serving_default"].outputs.values()
        (x,) = meta.signature_def["serving_default"].inputs.values()
        np.testing.assert_allclose(session.run(out.name, {x.name: X}), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["plain", "cond", "while", "both"])
def test_training_moves_the_ranges(tf, tmp_path, kind: str) -> None:
    """Five steps of SGD lower the loss and change the ranges, which a saved model keeps."""
    path = insert_learned_ranges(save_product_model(tf, tmp_path / "net", kind), tmp_path).save(tmp_path / "made")
    loaded = tf.saved_model.load(str(path))
    variables = [*loaded.learned_ranges, loaded.w]
    before = [variable.numpy() for variable in variables]
    losses = []
    for _ in range(5):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(loaded(X) - TARGET))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.05 * gradient)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    moved = [not np.array_equal(old, new.numpy()) for old, new in zip(before, variables, strict=True)]
    assert moved[:2] == [True, True]
    assert moved[-1]
    tf.saved_model.save(loaded, str(tmp_path / "again"), signatures=loaded.signatures)
    twice = tf.saved_model.load(str(tmp_path / "again"))
    for trained_variable, loaded_variable in zip(twice.learned_ranges, loaded.learned_ranges, strict=True):
        np.testing.assert_array_equal(trained_variable, loaded_variable)
    np.testing.assert_array_equal(twice(X), loaded(X))
    readings = summarize_model(gq.load(tmp_path / "again")).quantization_ops
    assert any(reading.params is not None for reading in readings)


def test_the_gradient_is_the_references(tf, tmp_path) -> None:
    """The gradient of the input's range, through the loaded function, equals the reference's."""
    loaded = tf.saved_model.load(
        str(insert_learned_ranges(save_product_model(tf, tmp_path / "net"), tmp_path).save(tmp_path / "made"))
    )
    low, high, *_ = loaded.learned_ranges
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(loaded(X))
    gradients = tape.gradient(loss, [low, high])
    largest = np.abs(WEIGHT).max(axis=0)
    weight = tf_ranges.range_for_fake_quant(gq_params(-largest, largest, axis=1))
    kernel = fake_quant.fake_quant_with_vars_per_channel(WEIGHT, weight.low, weight.high)
    upstream = np.ones((5, 3), np.float32) @ kernel.T
    expected = fake_quant.fake_quant_with_vars_gradient(upstream, X, low.numpy(), high.numpy())[1:]
    np.testing.assert_allclose([float(gradient) for gradient in gradients], expected, rtol=1e-5)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_ranges_that_no_gradient_reaches(tf, tmp_path, version: int) -> None:
    """The ranges of V2, V3 and V4 are variables that are not trainable, which a note says. They can be assigned."""
    family = f"quantize-and-dequantize-v{version}"
    result = insert_learned_ranges(save_product_model(tf, tmp_path / "net"), tmp_path, family)
    assert any("without a gradient" in note for note in result.site_notes.values())
    path = result.save(tmp_path / "made")
    assert_only_quantization_differs(tmp_path / "net", result, path)
    loaded = tf.saved_model.load(str(path))
    names = [variable.name for variable in loaded.learned_ranges if not variable.trainable]
    assert names == [f"x/quant/{word}:0" for word in ("min", "max", "num_bits")[: 2 + (version == 3)]]
    before = loaded(X).numpy()
    loaded.learned_ranges[0].assign(-0.01)
    loaded.learned_ranges[1].assign(0.01)
    assert np.abs(loaded(X)).max() < np.abs(before).max() / 10


def test_callers_that_take_no_variables(tf, tmp_path) -> None:
    """A function that a dataset maps cannot receive variables: nothing is written, and the error names a remedy."""
    rules = tmp_path / "r.toml"
    rules.write_text(RULES.format(family="fake-quant").partition('[[rule]]\nname = "w"')[0])
    result = gq.insert(save_product_model(tf, tmp_path / "net", "map"), rules=[str(rules)])
    assert result.inserted
    with pytest.raises(UsageError, match="cannot pass variables"):
        result.save(tmp_path / "made")
    assert not (tmp_path / "made").exists()


def first_generation(tf, folder, *, variable: bool, metagraph: bool = False):
    """Write a TF1 SavedModel, or a MetaGraph with its checkpoint."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        weight = v1.get_variable("w", initializer=WEIGHT, use_resource=True) if variable else tf.constant(WEIGHT)
        y = tf.identity(tf.matmul(x, weight, name="product"), name="out")
        session.run(v1.global_variables_initializer())
        if metagraph:
            v1.train.Saver().save(session, str(folder / "net"), write_state=False)
            return folder / "net.meta"
        v1.saved_model.simple_save(session, str(folder / "net"), {"x": x}, {"y": y})
    del graph
    return folder / "net"


@pytest.mark.parametrize("variable", [True, False])
def test_saved_models_of_the_first_generation(tf, tmp_path, variable: bool) -> None:
    """TF1's loader restores the ranges, its collections contain them and its saver saves them."""
    result = insert_learned_ranges(first_generation(tf, tmp_path, variable=variable), tmp_path)
    path = result.save(tmp_path / "made")
    assert_only_quantization_differs(tmp_path / "net", result, path)
    v1, expected = tf.compat.v1, reference_product()
    with tf.Graph().as_default(), v1.Session() as session:
        v1.saved_model.load(session, ["serve"], str(path))
        np.testing.assert_allclose(session.run("out:0", {"x:0": X}), expected, rtol=1e-5, atol=1e-6)
        trained = v1.trainable_variables()
        assert [variable.name for variable in trained][-4:-2] == ["x/quant/min:0", "x/quant/max:0"]
        loss = tf.reduce_mean(tf.square(session.graph.get_tensor_by_name("out:0") - TARGET))
        step = v1.train.GradientDescentOptimizer(0.05).minimize(loss)
        losses = [session.run([loss, step], {"x:0": X})[0] for _ in range(5)]
        assert losses == sorted(losses, reverse=True)
        v1.train.Saver().save(session, str(tmp_path / "trained"))
    assert "x/quant/min" in [name for name, _ in tf.train.list_variables(str(tmp_path / "trained"))]
    (actual,) = formats.format_module("tensorflow").create_runner(gq.load(path)).run({"x": X}).values()
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_meta_graphs(tf, tmp_path) -> None:
    """A MetaGraph's checkpoint contains the ranges, and its saver restores and saves them."""
    v1, source = tf.compat.v1, first_generation(tf, tmp_path, variable=True, metagraph=True)
    result = insert_learned_ranges(source, tmp_path)
    path = result.save(tmp_path / "made.meta")
    assert_only_quantization_differs(source, result, path)
    with tf.Graph().as_default(), v1.Session() as session:
        saver = v1.train.import_meta_graph(str(path))
        saver.restore(session, str(tmp_path / "made"))
        np.testing.assert_allclose(session.run("out:0", {"x:0": X}), reference_product(), rtol=1e-5, atol=1e-6)
        (low,) = [variable for variable in v1.trainable_variables() if variable.name == "x/quant/min:0"]
        session.run(low.assign(-2.0))
        saver.save(session, str(tmp_path / "later"))
        saver.restore(session, str(tmp_path / "made"))
        assert session.run(low) != -2.0
        saver.restore(session, str(tmp_path / "later"))
        assert session.run(low) == -2.0


def test_the_source_is_not_touched(tf, tmp_path) -> None:
    """Linked files of the source keep their names and bytes."""
    source = save_product_model(tf, tmp_path / "net")
    before = {path: path.read_bytes() for path in sorted(source.rglob("*")) if path.is_file()}
    result = insert_learned_ranges(source, tmp_path)
    result.save(tmp_path / "made")
    assert {path: path.read_bytes() for path in sorted(source.rglob("*")) if path.is_file()} == before
    first = {path.name: path.read_bytes() for path in (tmp_path / "made").rglob("*") if path.is_file()}
    result.save(tmp_path / "made", force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "made").rglob("*") if path.is_file()} == first


def test_keyword_spotting(tf, tmp_path, samples, model_folder) -> None:
    """In a model with many function clones, these share variables. Only TF1's loader can load it."""
    source = model_folder / "kws/saved_model"
    rules = tmp_path / "r.toml"
    rules.write_text(
        '[scheme.s]\nfamily = "fake-quant"\nrange = "learned"\nobserve = {name = "fixed", low = -8.0, high = 8.0}\n'
        '[[rule]]\nname = "x"\nconsumer = {kind = "conv|depthwise_conv|matmul", input = "input"}\nquantize = "s"\n'
    )
    result = gq.insert(source, rules=[str(rules)])
    assert any(inserted_site.site.clone_of is not None for inserted_site in result.inserted)
    path = result.save(tmp_path / "made")
    name, data = "image", samples / "digits_cnn_eval.npz"
    if model_folder == SHARED_MODELS:
        name, data = "input_1", model_folder / "kws/eval.npz"
    x = np.load(data)[name][:4]
    (expected,) = formats.format_module("tensorflow").create_runner(gq.load(path)).run({name: x}).values()
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(path))
        handles = [
            op for op in graph.get_operations() if op.name.startswith("learned_ranges/") and op.type == "VarHandleOp"
        ]
        assert len(handles) == 2 * sum(inserted_site.site.clone_of is None for inserted_site in result.inserted)
        (out,) = meta.signature_def["serving_default"].outputs.values()
        (input_info,) = meta.signature_def["serving_default"].inputs.values()
        np.testing.assert_allclose(session.run(out.name, {input_info.name: x}), expected, rtol=1e-4, atol=1e-5)
        less = [
            tf.raw_ops.AssignVariableOp(resource=op.outputs[0], value=0.01) for op in handles if op.name.endswith("max")
        ]
        session.run(less)
        assert np.abs(session.run(out.name, {input_info.name: x}) - expected).max() > 1e-3
