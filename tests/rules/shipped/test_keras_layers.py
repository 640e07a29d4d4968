"""Layers of Keras that TensorFlow writes as several ops have the same pairs as the frozen, folded model."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
from support.measurements import sqnr_db

import graphquant as gq

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

RULES = ["tflite", "onnxruntime", "openvino", "qnn", "qnn16", "vitis_ai", "tensorrt", "generic"]
CELL_RULES = ["tflite", "openvino", "qnn", "vitis_ai"]


def convolutions(policy="float32"):
    """Return a net with a BatchNorm behind each kind of layer, whose statistics are not those of the start."""
    import keras

    keras.utils.set_random_seed(4)
    layers = keras.layers
    keras.mixed_precision.set_dtype_policy(policy)
    try:
        x = keras.Input((8, 8, 3), name="image")
        y = x
        for layer in (
            layers.Conv2D(8, 3, padding="same", use_bias=False),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.Conv2D(8, 1),
        ):
            y = layers.ReLU()(layers.BatchNormalization()(layer(y)))
        y = layers.BatchNormalization()(layers.Dense(8)(layers.GlobalAveragePooling2D()(y)))
        net = keras.Model(x, layers.Dense(5, name="logits")(y))
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    dice = np.random.default_rng(4)
    for norm in (layer for layer in net.layers if isinstance(layer, layers.BatchNormalization)):
        shape = norm.gamma.shape
        norm.set_weights([dice.uniform(0.5, 2, shape), *dice.normal(size=(2, *shape)), dice.uniform(0.5, 2, shape)])
    return net


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function that exports a Keras model once by name, and returns its path."""
    pytest.importorskip("tensorflow")
    folder = tmp_path_factory.mktemp("nets")

    def export(name, build, *args, **options):
        if not (folder / name).exists():
            build(*args, **options).export(folder / name, verbose=False)
        return folder / name

    return export


@pytest.fixture(scope="module")
def as_saved_and_frozen():
    """Return a function that loads a SavedModel and freezes it, once for all rules."""
    return cache(lambda path: (gq.load(path), gq.freeze(gq.load(path))))


def claimed(plan):
    """Return the number of sites by rule, without those behind the Identities by which freezing names the outputs."""
    named = {"shared-scale", "shared-position"}
    return Counter(site.rule for site in plan.sites if site.clone_of is None and site.rule not in named)


@pytest.mark.parametrize("rules", RULES)
def test_batchnorm_on_variables(exported, as_saved_and_frozen, rules):
    """The SavedModel has no pair inside a BatchNorm, and no more sites than the frozen model, where it is folded."""
    plan, frozen = (gq.plan(model, rules=[rules]) for model in as_saved_and_frozen(exported("float32", convolutions)))
    inner = [
        (site.tensor.op, use.op)
        for site in plan.sites
        for use in site.uses
        if "/batchnorm/" in use.op and not use.op.endswith("/batchnorm/add_1/bias_add")
    ]
    assert not inner
    assert plan.sites
    # Vitis AI has a range for each bias, and the fold gives one to the convolution without bias.
    assert claimed(plan).total() == claimed(frozen).total() - (rules == "vitis_ai")


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("rules", ["tflite", "onnxruntime", "qnn"])
def test_casts_of_mixed_precision(exported, as_saved_and_frozen, rules, policy):
    """Rules look through the Casts between layers, so the sites are those of the model without Casts."""
    expected = gq.plan(exported("float32", convolutions), rules=[rules])
    for model in as_saved_and_frozen(exported(policy, convolutions, policy)):
        plan = gq.plan(model, rules=[rules])
        # The model's input is cast too, so it counts as a site of the first Cast.
        assert claimed(plan).total() == claimed(expected).total()
        casts = {site.tensor.op for site in plan.sites for use in site.uses if "Cast" in use.op}
        assert not casts, "pairs before a Cast would be repeated behind it"


def recurrent_net(layer, **options):
    """Return a net with a recurrent layer of Keras directly behind the input."""
    import keras

    keras.utils.set_random_seed(2)
    sequence = keras.Input((6, 8), name="sequence")
    hidden = getattr(keras.layers, layer)(12, **options)(sequence)
    return keras.Model(sequence, keras.layers.Dense(5)(hidden))


@pytest.mark.parametrize("rules", CELL_RULES)
@pytest.mark.parametrize(
    ("layer", "options"),
    [
        ("LSTM", {}),
        ("GRU", {}),
        ("GRU", {"reset_after": False}),
        ("LSTM", {"unroll": True}),
        ("GRU", {"unroll": True}),
        ("GRU", {"unroll": True, "reset_after": False}),
    ],
)
def test_cells_stay_float(exported, as_saved_and_frozen, layer, options, rules):
    """No pair is inside a cell, in the loop, in its first step that Keras traces for the shapes, or frozen."""
    path = exported("_".join([layer, *options]), recurrent_net, layer, **options)
    for model in as_saved_and_frozen(path):
        plan = gq.plan(model, rules=[rules])
        read = {use.op for site in plan.sites for use in site.uses}
        assert not {op for op in read if "_cell" in op}
        assert any("dense" in op for op in read)
        if rules == "tflite":
            (steps,) = (site for site in plan.sites if site.rule == "input-steps" and site.clone_of is None)
            assert steps.scheme.dtype == "int8"


def attention_net():
    """Return attention of Keras with biases, so that the ranges of keys and values are not symmetric."""
    import keras

    keras.utils.set_random_seed(7)
    sequence = keras.Input((8, 12), name="sequence")
    attention = keras.layers.MultiHeadAttention(2, 8, bias_initializer=keras.initializers.RandomNormal(0.8, 0.3))
    return keras.Model(sequence, keras.layers.Dense(5)(attention(sequence, sequence)))


def test_attention_in_a_tflite_file(exported, tmp_path):
    """XNNPACK ignores the zero point of the second operand of a product of activations, so the plan gives it none."""
    tf = pytest.importorskip("tensorflow")
    path = exported("attention", attention_net)
    values = np.random.default_rng(0).normal(size=(60, 8, 12)).astype(np.float32)
    result = gq.insert(gq.freeze(gq.load(path)), data={"sequence": values[:40]}, validate=False)
    symmetric = [site for site in result.plan.sites if site.scheme.name == "right-operand" and site.clone_of is None]
    assert len(symmetric) == 3  # query and key, whose order in the product is the converter's, and value
    gq.convert_to_tflite(result, tmp_path / "net.tflite", io="float32")
    run = tf.lite.Interpreter(str(tmp_path / "net.tflite")).get_signature_runner("serving_default")
    name = next(iter(run.get_output_details()))
    actual = np.concatenate([run(sequence=value[None])[name] for value in values[40:]])
    loaded = tf.saved_model.load(str(path))
    assert sqnr_db(loaded.serve(values[40:]).numpy(), actual) > 25


def test_lookups_and_a_batchnorm_behind_no_layer(exported):
    """The output of a lookup has the scale of its table, and nothing inside the BatchNorm behind it has a pair."""

    def build():
        import keras

        x = keras.Input((6,), dtype="int32")
        y = keras.layers.BatchNormalization()(keras.layers.Embedding(9, 8)(x))
        return keras.Model(x, keras.layers.Dense(3)(keras.layers.Flatten()(y)))

    sites = gq.plan(exported("lookup", build), rules=["tflite"]).sites
    (lookup,) = (site for site in sites if site.tensor.op.endswith("/GatherV2"))
    assert [use.op.rpartition("/")[2] for use in lookup.tie] == ["GatherV2"]
    assert not [site for site in sites if "/batchnorm/" in site.tensor.op and not site.tensor.op.endswith("/add_1")]
