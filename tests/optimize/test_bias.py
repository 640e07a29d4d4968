"""Bias correction: means that come back, biases that are added, shared or left, and what it costs nothing."""

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rule_files import input_rule, weight_rule

import graphquant as gq
from graphquant.api.strip import prove_stripped
from graphquant.formats import onnx as onnx_format
from graphquant.optimize import algorithm
from graphquant.optimize.algorithm import MIN_TARGETED_GAIN_STANDARD_ERRORS, rejection_reason
from graphquant.optimize.algorithms import POST_CALIBRATION_ALGORITHMS, PRE_CALIBRATION_ALGORITHMS
from graphquant.optimize.bias_correction import BIAS_CORRECTION, shrink_mean
from graphquant.optimize.weighted_ops import NO_BIAS, dependency_levels, final_ops
from graphquant.rules import ALGORITHM_NAMES as NAMES

HEAD = '<ir_version: 8, opset_import: ["": 13]>\n'
KINDS = "conv|depthwise_conv|conv_transpose|matmul|gemm"
SCHEMES = """
algorithms = ["bias-correction"]

[scheme.weight]
bits = 4
zero = "symmetric"
per = "channel"
observe = "absmax"

[scheme.activation]
dtype = "uint8"
observe = "minmax"
"""
RULES = SCHEMES + weight_rule(KINDS) + input_rule(KINDS)
RNG = np.random.default_rng(11)
IMAGES = (RNG.normal(size=(64, 3, 8, 8)) + 1.5).astype(np.float32)
FLAT = "h = Relu (c)\n g = GlobalAveragePool (h)\n z = Flatten (g)\n"
NETS = {
    "conv": ("c = Conv <pads = [1, 1, 1, 1]> (x, w, b)\n y = Relu (c)", {"w": (4, 3, 3, 3), "b": (4,)}),
    "no bias": ("c = Conv (x, w)\n y = Relu (c)", {"w": (4, 3, 3, 3)}),
    "grouped": ("c = Conv <group = 3, strides = [2, 2]> (x, w)\n y = Relu (c)", {"w": (6, 1, 3, 3)}),
    "transposed": ("c = ConvTranspose (x, w, b)\n y = Relu (c)", {"w": (3, 4, 3, 3), "b": (4,)}),
    "matmul": (
        f"c = Conv (x, v)\n {FLAT} m = MatMul (z, w)\n y = Add (m, b)",
        {"v": (4, 3, 1, 1), "w": (4, 5), "b": (5,)},
    ),
    "gemm": (f"c = Conv (x, v)\n {FLAT} y = Gemm <transB = 1> (z, w, b)", {"v": (4, 3, 1, 1), "w": (5, 4), "b": (5,)}),
}


def image_model(tmp_path, body, shapes, values=None):
    """A model of one input of images, its initializers drawn from a fixed seed."""
    rng = np.random.default_rng(3)
    message = onnx.parser.parse_model(f"{HEAD} g (float[N,3,8,8] x) => (float y) {{\n {body}\n}}")
    message.graph.output[0].type.tensor_type.ClearField("shape")
    for name, shape in shapes.items():
        value = (rng.normal(size=shape) * 0.3 + 0.1).astype(np.float32)
        message.graph.initializer.append(onnx.numpy_helper.from_array((values or {}).get(name, value), name))
    onnx.save(message, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=IMAGES)
    return tmp_path / "model.onnx"


def mean(path_or_model, images=IMAGES):
    """The means of the output's channels."""
    path = path_or_model.path
    (actual,) = onnx_format.create_runner(gq.load(path)).run({"x": images}).values()
    return actual.mean(axis=(0, *range(2, actual.ndim)))


def insert_and_reload(tmp_path, path, name="out.onnx", **options):
    """Return the result of `insert`, written and read back."""
    result = gq.insert(path, rules=[RULES], data=str(tmp_path / "data.npz"), **options)
    return result, gq.load(result.save(tmp_path / name, force=True))


@pytest.mark.parametrize("net", NETS)
def test_means_come_back(tmp_path, net, monkeypatch):
    """The means of the last output are nearer to the float model's, and each op was corrected, kept or not."""
    monkeypatch.setattr(algorithm, "rejection_reason", lambda *_: "")
    path = image_model(tmp_path, *NETS[net])
    result, corrected = insert_and_reload(tmp_path, path)
    assert [entry.detail for entry in result.algorithm_results if not entry.applied] == []
    assert {entry.algorithm for entry in result.algorithm_results} == {"bias-correction"}
    _, plain = insert_and_reload(tmp_path, path, "plain.onnx", algorithms=["not bias-correction"])
    expected = mean(gq.load(path))
    off, before = (np.square(mean(entry) - expected).sum() for entry in (corrected, plain))
    assert off < before / 4


def test_a_bias_that_two_ops_share_gets_a_copy(tmp_path):
    """Each op has a bias of its own afterwards, the float weights are the same, and the source keeps its bias."""
    body = "c = Conv (x, w, b)\n d = Conv (x, v, b)\n y = Concat <axis = 1> (c, d)"
    path = image_model(tmp_path, body, {"w": (4, 3, 1, 1), "v": (4, 3, 1, 1), "b": (4,)})
    result, quantized_path = insert_and_reload(tmp_path, path, float_weights=True)
    assert [entry.applied for entry in result.algorithm_results] == [True, True]
    values = {
        op.name: op.read_value() for op in quantized_path.main.ops() if op.kind == "constant" and "bias" in op.name
    }
    assert sorted(values) == ["c/bias_corrected", "d/bias_corrected"]
    assert not np.array_equal(*values.values())
    assert np.array_equal(result.source.main.op("b").read_value(), gq.load(path).main.op("b").read_value())
    stripped = gq.strip(quantized_path)
    assert stripped.exact
    assert stripped.model.digest == result.source.digest


def test_the_same_bytes_again(tmp_path):
    """Two runs write the same file."""
    path = image_model(tmp_path, *NETS["matmul"])
    files = [insert_and_reload(tmp_path, path, f"{k}.onnx")[1].path.read_bytes() for k in range(2)]
    assert files[0] == files[1]


def test_skipped_ops_have_reasons(tmp_path, monkeypatch):
    """A product without a bias is skipped, and so is everything with statistics alone, random data and few samples."""
    body = f"c = Conv (x, v)\n {FLAT} y = MatMul (z, w)"
    path = image_model(tmp_path, body, {"v": (4, 3, 1, 1), "w": (4, 5)})
    with monkeypatch.context() as patch:
        patch.setattr(algorithm, "rejection_reason", lambda *_: "")
        result, _ = insert_and_reload(tmp_path, path)
    entries = [entry for entry in result.algorithm_results if entry.algorithm == BIAS_CORRECTION]
    assert {entry.detail for entry in entries if not entry.applied} == {NO_BIAS}
    stats = gq.calibrate(path, data=str(tmp_path / "data.npz"), rules=[RULES])
    from_stats = gq.insert(path, rules=[RULES], stats=stats)
    assert [(entry.applied, "samples" in entry.detail) for entry in from_stats.algorithm_results] == [(False, True)]
    random = gq.insert(path, rules=[RULES], data="random:8")
    assert [(entry.applied, "random data" in entry.detail) for entry in random.algorithm_results] == [(False, True)]
    few = gq.insert(path, rules=[RULES], data=str(tmp_path / "data.npz"), samples=4)
    assert [(entry.applied, "2 validation samples" in entry.detail) for entry in few.algorithm_results] == [
        (False, True)
    ]


def test_it_is_left_out_where_it_does_not_help(tmp_path):
    """Weights that are steps of their scale lose nothing, so that nothing is changed."""
    grid = np.random.default_rng(0).integers(-7, 8, (4, 3, 1, 1)).astype(np.float32)
    grid[:, 0] = 7
    path = image_model(tmp_path, "y = Conv (x, w, b)", {"w": (4, 3, 1, 1), "b": (4,)}, {"w": grid})
    result = gq.insert(
        path,
        rules=[
            RULES,
        ],
        data=str(tmp_path / "data.npz"),
        exclude=["x"],
    )
    assert [entry.applied for entry in result.algorithm_results] == [False]
    assert result.model.main.op("b").read_value() is not None


def test_shrunk_keeps_what_chance_does_not_explain():
    """A mean that is the same in all samples stays whole; one within its standard error is dropped."""
    rows = np.array([[2.0, 1.0], [2.0, -1.0], [2.0, 0.5], [2.0, -0.4]])
    assert shrink_mean(rows).tolist() == [2.0, 0.0]
    # The squared standard error of 1 is a quarter of the squared mean.
    assert shrink_mean(np.array([[1.0, 0.0, 1.0], [3.0, 0.0, -1.0]])).tolist() == [1.5, 0.0, 0.0]
    assert shrink_mean(np.array([[1.0], [2.0], [6.0]])) == pytest.approx(3 * (1 - 7 / 27))


@given(st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=12))
@settings(max_examples=200)
def test_shrunk_goes_towards_zero(column):
    """It never turns a mean around, nor makes it larger."""
    (shrunken,) = shrink_mean(np.array(column)[:, None])
    mean = float(np.mean(column))
    assert 0 <= shrunken * np.sign(mean) <= abs(mean) * (1 + 1e-12)


def test_algorithms_need_more_gain_than_chance():
    """Errors of all samples fall; one falls more than the others grow; one output falls and the other grows."""
    before = np.ones((4, 2))
    assert not rejection_reason(before, np.full((4, 2), 0.5) + np.arange(8).reshape(4, 2) / 100)
    assert "more than chance" in rejection_reason(before, np.array([[0.2, 1], [1, 1], [1, 1], [0.9, 1]]))
    assert "1.41" in rejection_reason(before, np.tile([0.1, 2.0], (4, 1)))
    assert rejection_reason(before, np.full((4, 2), 0.95)) == "no output gains 0.5 dB (the most is 0.2 dB)"


def test_a_few_samples_do_not_decide():
    """Three of 16 samples have most of the error and gain. That is not enough if most of the others lose."""
    before = np.ones((16, 1))
    before[:3] = 40
    after = before * 0.9
    after[:3] = 1
    assert rejection_reason(before, after, MIN_TARGETED_GAIN_STANDARD_ERRORS) == ""
    after[3:] *= 1.2
    assert "without the 3 samples" in rejection_reason(before, after, MIN_TARGETED_GAIN_STANDARD_ERRORS)
    after[4:] = 0.99
    assert rejection_reason(before, after, MIN_TARGETED_GAIN_STANDARD_ERRORS) == ""
    after[4] = 3.2
    assert rejection_reason(before, after, MIN_TARGETED_GAIN_STANDARD_ERRORS) == ""
    after[3:] = 1.08
    assert "without the 3 samples" in rejection_reason(
        before[:, [0, 0]], np.concatenate([before * 0.5, after], axis=1), MIN_TARGETED_GAIN_STANDARD_ERRORS
    )


def test_less_is_asked_for_where_a_gain_is_expected():
    """A fall of two standard errors is enough for what lowers errors that it can see, not for others."""
    before = np.ones((9, 1))
    after = np.array([0.2, 0.5, 1.1, 0.9, 1.3, 0.7, 0.4, 1.2, 0.8])[:, None]
    assert rejection_reason(before, after, MIN_TARGETED_GAIN_STANDARD_ERRORS) == ""
    assert "more than chance" in rejection_reason(before, after)


def test_levels_and_ends(tmp_path):
    """Two branches: what is before both is level 1, they are level 2, and what reads both is the end."""
    body = "a = Conv (x, w)\n b = Conv (a, v)\n c = Conv (a, u)\n d = Add (b, c)\n y = Conv (d, t)"
    graph = gq.load(image_model(tmp_path, body, dict.fromkeys("wvut", (3, 3, 1, 1)))).main
    names = [op.name for op in graph.ops() if op.kind == "conv"]
    assert list(dependency_levels(graph, names).values()) == [1, 2, 2, 3]
    assert final_ops(graph, names) == names[-1:]
    assert final_ops(graph, names[:3]) == names[1:3]


def test_rule_files_know_every_correction():
    """The names that rule files may say are those of the table, in its order."""
    assert (*PRE_CALIBRATION_ALGORITHMS, *POST_CALIBRATION_ALGORITHMS) == NAMES


@pytest.mark.slow
def test_frozen_tensorflow(samples, tmp_path, monkeypatch):
    """A frozen net's BiasAdds get other constants, and its outputs come nearer to the float model's."""
    pytest.importorskip("tensorflow")
    monkeypatch.setattr(algorithm, "rejection_reason", lambda *_: "")
    figures = []
    for correct in ("bias-correction", "not bias-correction"):
        result = gq.insert(samples / "digits_cnn.pb", data=str(samples / "digits_cnn_calib.npz"), algorithms=[correct])
        quantized_path = result.save(tmp_path / f"{len(figures)}.pb")
        stored_weights = str(samples / "digits_cnn_eval.npz")
        figures.append(
            gq.compare(samples / "digits_cnn.pb", quantized_path, stored_weights, samples=200, sites=False).sqnr
        )
        assert [entry.applied for entry in result.algorithm_results] == [True] * 9 * (correct[0] == "b")
    assert figures[0] > figures[1] + 1


@pytest.mark.slow
def test_constants_in_functions(tmp_path, monkeypatch):
    """Ops in the functions of a SavedModel are observed and corrected like those of a frozen net."""
    tf = pytest.importorskip("tensorflow")
    monkeypatch.setattr(algorithm, "rejection_reason", lambda *_: "")
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(24, 16)).astype(np.float32), rng.normal(size=16).astype(np.float32)

    class Net(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None, 24), tf.float32)])
        def __call__(self, x):
            return tf.nn.relu(tf.nn.bias_add(tf.matmul(x, weight), bias))

    tf.saved_model.save(Net(), tmp_path / "net")
    data = rng.gamma(1.0, size=(256, 24)).astype(np.float32)
    result = gq.insert(tmp_path / "net", rules="tflite", data=data)
    assert [(entry.algorithm, entry.applied) for entry in result.algorithm_results] == [("bias-correction", True)]


@pytest.mark.slow
def test_variables_keep_their_values(tmp_path, monkeypatch):
    """A constant is added to biases that are variables, in the functions that run and in their copies alike."""
    tf = pytest.importorskip("tensorflow")
    monkeypatch.setattr(algorithm, "rejection_reason", lambda *_: "")
    rng = np.random.default_rng(0)

    class Net(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable(rng.normal(size=(24, 16)).astype(np.float32))
            self.bias = tf.Variable(rng.normal(size=16).astype(np.float32))

        @tf.function(input_signature=[tf.TensorSpec((None, 24), tf.float32)])
        def serve(self, x):
            return {"y": tf.nn.relu(tf.nn.bias_add(tf.matmul(x, self.weight), self.bias))}

        @tf.function(input_signature=[tf.TensorSpec((None, 24), tf.float32)])
        def copy(self, x):
            return tf.nn.relu(tf.nn.bias_add(tf.matmul(x, self.weight), self.bias)) * 2

    net, data = Net(), rng.gamma(1.0, size=(256, 24)).astype(np.float32)
    tf.saved_model.save(net, tmp_path / "net", signatures={"serving_default": net.serve})
    float_mean, errors = net.serve(data)["y"].numpy().mean(0), []
    for correct in ("bias-correction", "not bias-correction"):
        result = gq.insert(tmp_path / "net", rules="tflite", data=data, algorithms=correct)
        assert [entry.applied for entry in result.algorithm_results] == [True] * (correct[0] == "b")
        loaded = tf.saved_model.load(result.save(tmp_path / correct))
        served = loaded.serve(data)["y"].numpy()
        errors.append(np.abs(served.mean(0) - float_mean).max())
        assert np.array_equal(loaded.copy(data).numpy(), served * 2)
        assert np.array_equal(loaded.bias.numpy(), net.bias.numpy())
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loaded.serve(data)["y"])
        assert np.abs(tape.gradient(loss, loaded.bias).numpy()).max() > 0
    assert errors[0] < errors[1] / 2
    stripped = gq.strip(tmp_path / "bias-correction")
    assert gq.compare(tmp_path / "net", stripped.model, data=data).sqnr == np.inf


@pytest.mark.parametrize("name", ["adaround", "gptq"])
def test_rounding_and_bias_together(tmp_path, name):
    """Weights of 4 bits are rounded for what they make, the bias on top of it, and outputs gain two decibels."""
    path = image_model(tmp_path, *NETS["conv"])
    plain = insert_and_reload(tmp_path, path, "plain.onnx", algorithms=["not bias-correction"])[1]
    result, quantized_path = insert_and_reload(tmp_path, path, algorithms=[name])
    assert {entry.algorithm for entry in result.algorithm_results if entry.applied} >= {name}
    expected, *outputs = (
        next(iter(onnx_format.create_runner(gq.load(entry.path)).run({"x": IMAGES}).values()))
        for entry in (gq.load(path), plain, quantized_path)
    )
    errors = [np.square(entry - expected).sum() for entry in outputs]
    assert errors[1] < errors[0] * 0.63


def test_rounding_of_weights_alone_sees_the_data(samples) -> None:
    """Without an activation that needs a range, data still serves corrections. Validation has samples of its own."""
    options = {"rules": "weight_only_int4", "data": str(samples / "digits_rnn_calib.npz")}
    plain = gq.insert(samples / "digits_rnn.onnx", **options)
    rounded = gq.insert(samples / "digits_rnn.onnx", **options, algorithms="gptq")
    assert (plain.algorithm_results, plain.validation.comparison.samples) == ((), 32)
    assert all(entry.applied for entry in rounded.algorithm_results)
    assert (rounded.validation.reuses_samples, rounded.validation.comparison.samples) == (False, 20)
    assert rounded.validation.comparison.sqnr > plain.validation.comparison.sqnr + 2


def test_statistics_of_the_first_samples_tell_which_corrections_may_see(samples) -> None:
    """Data of which statistics have the first samples alone is known by them, and corrections are made by those."""
    model, data = samples / "digits_cnn.onnx", str(samples / "digits_cnn_calib.npz")
    stats = gq.calibrate(model, data=data, samples=40)
    inserted_result = gq.insert(model, stats=stats, data=data)
    assert all("needs samples" not in entry.detail for entry in inserted_result.algorithm_results)
    assert (inserted_result.validation.reuses_samples, inserted_result.validation.calibrated_on_other_data) == (
        False,
        False,
    )


def test_rounded_weights_of_bodies(samples, monkeypatch):
    """Bias correction reads the weights that GPTQ rounded, also if a body of the model captures them."""
    monkeypatch.setattr(algorithm, "rejection_reason", lambda *_: "")
    data = str(samples / "digits_nested_calib.npz")
    result = gq.insert(samples / "digits_nested.onnx", rules=[RULES], data=data, algorithms=["gptq"])
    applied = {entry.algorithm for entry in result.algorithm_results if entry.applied}
    assert applied == {"gptq", "bias-correction"}


SHARING_NETS = {
    "shared": "c = Conv (x, w, b)\n d = Conv (x, v, b)\n y = Concat <axis = 1> (c, d)",
    "reshaped": "k = Constant <value_ints = [-1]> ()\n r = Reshape (b, k)\n c = Conv (x, w, r)\n d = Conv (x, v, r)\n"
    " y = Concat <axis = 1> (c, d)",
}


@pytest.mark.parametrize("net", [*NETS, *SHARING_NETS])
def test_strip_restores_the_biases(tmp_path, net, monkeypatch):
    """Biases that were changed, copied for one of their readers or added are as before."""
    monkeypatch.setattr(algorithm, "rejection_reason", lambda *_: "")
    shapes = {"w": (4, 3, 1, 1), "v": (4, 3, 1, 1), "b": (4,)}
    path = image_model(tmp_path, *((SHARING_NETS[net], shapes) if net in SHARING_NETS else NETS[net]))
    result = gq.insert(path, rules=["qnn"], data=str(tmp_path / "data.npz"), min_sqnr="none")
    assert any(entry.applied for entry in result.algorithm_results)
    stripped = gq.strip(result.save(tmp_path / "out.onnx"))
    proof = prove_stripped(stripped, path)
    assert proof.holds
    assert proof.rounded_weights == len(stripped.weights) > 0


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda text: text[1:], lambda text: text.replace("[4]", "[5]"), lambda text: text.replace('"c"', '"d"')),
        *(lambda text: text.replace('"b", 0', '"b", 7'), lambda text: text.replace('"b"', '"y"')),  # port, cycle
        *(lambda _: '[[["", "c", 1], null, [0], ""]]', lambda text: text.replace('"b"', '""')),  # weight, empty name
        lambda _: "[]",  # as in files of versions that recorded none
    ],
)
def test_strip_ignores_damaged_biases(tmp_path, damage, monkeypatch):
    """Biases keep their corrections, and the note says so, if the metadata does not fit the model."""
    monkeypatch.setattr(algorithm, "rejection_reason", lambda *_: "")
    path = image_model(tmp_path, *NETS["conv"])
    result = gq.insert(path, rules=["qnn"], data=str(tmp_path / "data.npz"), min_sqnr="none")
    message = onnx.load(result.save(tmp_path / "out.onnx"))
    (entry,) = [entry for entry in message.metadata_props if entry.key == "graphquant.biases"]
    entry.value = damage(entry.value)
    onnx.save(message, tmp_path / "damaged.onnx")
    stripped = gq.strip(tmp_path / "damaged.onnx")
    assert [note for note in stripped.notes if "Weights and biases keep" in note]
    proof = prove_stripped(stripped, path)
    assert [(change.kind, change.location) for change in proof.other_differences.changes] == [("weight", "b")]


def test_strip_joins_shared_weights(tmp_path):
    """Layers of a head that share weight and bias store the bias with two scales, and share one bias again."""
    body = "d = Mul (x, s)\n c = Conv (x, w, b)\n e = Conv (d, w, b)\n y = Concat <axis = 1> (c, e)"
    path = image_model(tmp_path, body, {"w": (4, 3, 1, 1), "b": (4,), "s": ()}, {"s": np.float32(9)})
    result = gq.insert(path, rules=["qnn"], data=str(tmp_path / "data.npz"), algorithms=["not bias-correction"])
    scales = {pair.params.scale.tobytes() for pair in result.inserted if pair.site.tensor.op == "b"}
    assert len(scales) == len(("c", "e"))
    proof = prove_stripped(gq.strip(result.save(tmp_path / "out.onnx")), path)
    assert proof.holds
    assert proof.rounded_weights == len(("w", "b"))
