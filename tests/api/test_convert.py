"""TFLite conversion: scales of the runtime, every op within a step of numpy, and accuracy."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.measurements import print_measurement, sqnr_db

import graphquant as gq
from graphquant import formats
from graphquant.analysis.conversion_report import find_wrong_kernel
from graphquant.api.convert import convert_to_tflite, freeze, require_convertible
from graphquant.errors import ModelError, UsageError
from graphquant.formats.tflite import parse_tflite
from graphquant.optimize.latency import TimeRatio

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

Array = np.ndarray[Any, Any]

CLASSES = 10


def simulation() -> Any:
    """The module of the numpy ops, which imports tensorflow."""
    spec = importlib.util.spec_from_file_location(
        "simulate_tflite", Path(__file__).parents[1] / "support/simulate_tflite.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interpreter(data: bytes) -> Any:
    """Return TFLite's interpreter with its own kernels, which preserves all tensors."""
    import tensorflow as tf

    plain = tf.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    return tf.lite.Interpreter(
        model_content=data, experimental_op_resolver_type=plain, experimental_preserve_all_tensors=True
    )


def tflite_outputs(made: Any, samples: Array) -> Array:
    """Return the real outputs of a TFLite model for each sample."""
    made.allocate_tensors()
    (source,), (target,) = made.get_input_details(), made.get_output_details()
    outputs = []
    for sample in samples:
        value = sample[None]
        if source["dtype"] is np.int8:
            scale, zero = source["quantization"]
            value = np.clip(np.floor(value / scale + 0.5) + zero, -128, 127)
        made.set_tensor(source["index"], value.astype(source["dtype"]))
        made.invoke()
        scale, zero = target["quantization"]
        result = made.get_tensor(target["index"])[0]
        outputs.append((result.astype(np.float64) - zero) * scale if scale else result)
    return np.stack(outputs)


def float_answers(model: gq.Model, samples: Array) -> Array:
    """Return the outputs of the float model for each sample."""
    runner = formats.format_module(model.format).create_runner(model)
    runs = [runner.run({runner.inputs[0].name: sample[None]}) for sample in samples]
    return np.concatenate([next(iter(run.values())) for run in runs]).astype(np.float64)


def digits_case(samples: Path, _tmp: Path, _shared: Path) -> tuple[Path, str, Array]:
    """The sample CNN."""
    data = np.load(samples / "digits_cnn_eval.npz")["image"]
    return samples / "digits_cnn.pb", str(samples / "digits_cnn_calib.npz"), data


def kws_case(_samples: Path, _tmp: Path, shared: Path) -> tuple[Path, str, Array]:
    """Keyword spotting, a SavedModel that TensorFlow's converter cannot read."""
    data = np.load(shared / "kws/eval.npz")["input_1"]
    return shared / "kws/saved_model", str(shared / "kws/calib.npz"), data


def trained(
    inputs: Any, outputs: Any, draw: Callable[[int], tuple[Array, Array]], tmp: Path
) -> tuple[Path, str, Array]:
    """Return a Keras model fitted to `draw`, as a frozen graph, with calibration data and samples."""
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    model = tf.keras.Model(inputs, outputs)
    model.compile(tf.keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy")
    model.fit(*draw(1500), batch_size=50, epochs=4, verbose=0)
    spec = tf.TensorSpec((None, *model.inputs[0].shape[1:]), model.inputs[0].dtype, name="x")
    function = tf.function(lambda x: model(x, training=False)).get_concrete_function(spec)
    graph_def = convert_variables_to_constants_v2(function).graph.as_graph_def()
    (tmp / "model.pb").write_bytes(graph_def.SerializeToString())
    np.savez(tmp / "calib.npz", x=draw(100)[0])
    return tmp / "model.pb", str(tmp / "calib.npz"), draw(200)[0]


def inverted_residuals(_samples: Path, tmp: Path, _shared: Path) -> tuple[Path, str, Array]:
    """MobileNet's blocks: expansion, depthwise with and without stride, linear projection, residual sums."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(5)
    layers = tf.keras.layers

    def block(x: Any, width: int, stride: int) -> Any:
        y = layers.Conv2D(4 * x.shape[-1], 1, use_bias=False)(x)
        y = layers.ReLU(6)(layers.BatchNormalization()(y))
        y = layers.DepthwiseConv2D(3, strides=stride, padding="same", use_bias=False)(y)
        y = layers.ReLU(6)(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(width, 1, use_bias=False)(y))
        return layers.Add()([x, y]) if stride == 1 and x.shape[-1] == width else y

    x = tf.keras.Input((16, 16, 3))
    y = layers.ReLU(6)(layers.BatchNormalization()(layers.Conv2D(8, 3, strides=2, padding="same", use_bias=False)(x)))
    for width, stride in ((8, 1), (12, 2), (12, 1), (16, 2), (16, 1)):
        y = block(y, width, stride)
    y = layers.GlobalAveragePooling2D()(y)
    y = layers.Dense(CLASSES, activation="softmax")(y)
    dice = np.random.default_rng(5)
    prototypes = dice.normal(size=(CLASSES, 16, 16, 3))

    def draw(count: int) -> tuple[Array, Array]:
        labels = dice.integers(CLASSES, size=count)
        return (prototypes[labels] + dice.normal(scale=0.7, size=(count, 16, 16, 3))).astype(np.float32), labels

    return trained(x, y, draw, tmp)


def text(_samples: Path, tmp: Path, _shared: Path) -> tuple[Path, str, Array]:
    """A text CNN: embedding, one-dimensional convolutions of several widths, maximum over time, gates, dense layers."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(6)
    layers = tf.keras.layers
    x = tf.keras.Input((20,), dtype="int32")
    y = layers.Embedding(60, 16)(x)
    branches = [layers.GlobalMaxPooling1D()(layers.Conv1D(16, width, activation="relu")(y)) for width in (2, 3, 4)]
    y = layers.Concatenate()(branches)
    gate = layers.Dense(48, activation="sigmoid")(y)
    y = layers.Multiply()([y, gate])
    y = layers.Dense(24, activation="tanh")(y)
    y = layers.Dense(CLASSES, activation="softmax")(y)
    dice = np.random.default_rng(6)
    phrases = dice.integers(60, size=(CLASSES, 3))

    def draw(count: int) -> tuple[Array, Array]:
        labels = dice.integers(CLASSES, size=count)
        words = dice.integers(60, size=(count, 20))
        for row, label in enumerate(labels):
            for start in (dice.integers(8), 9 + dice.integers(8)):
                words[row, start : start + 3] = phrases[label]
        return words.astype(np.int32), labels

    return trained(x, y, draw, tmp)


@pytest.mark.parametrize("make", [digits_case, kws_case, inverted_residuals, text])
def test_runtime_scales_equal_the_plan(
    make: Callable[..., Any], samples: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Every planned scale and zero point, every op within one step of numpy, and 98% agreement."""
    pytest.importorskip("tensorflow")
    shared = request.getfixturevalue("shared") if make is kws_case else samples
    path, data, values = make(samples, tmp_path, shared)
    result = gq.insert(freeze(gq.load(path)), rules=["tflite"], data=data, validate=False)
    conversion = convert_to_tflite(result, tmp_path / "model.tflite")
    assert [line for line in conversion.tensors if line.problem] == []
    assert len(conversion.tensors) == len(result.inserted) > 10
    assert [op for op in conversion.float_ops if op.type != "GATHER"] == []
    runtime_interpreter = interpreter((tmp_path / "model.tflite").read_bytes())
    after = tflite_outputs(runtime_interpreter, values)
    differences: dict[str, float] = {}
    simulated = simulation().Simulation((tmp_path / "model.tflite").read_bytes(), runtime_interpreter)
    for sample in values[:20]:
        tflite_outputs(runtime_interpreter, sample[None])
        for name, kind, steps in simulated.steps():
            differences[f"{kind} {name}"] = max(steps, differences.get(f"{kind} {name}", 0.0))
    assert {name: steps for name, steps in differences.items() if steps > 1} == {}
    before = float_answers(result.source, values)
    agreement = float((before.argmax(-1) == after.argmax(-1)).mean())
    print_measurement(
        f"{make.__name__}: {len(conversion.tensors)} tensors agree, {conversion.op_count} ops,"
        f" {len(differences)} simulated,"
        f" agreement {agreement:.4f}, SQNR {sqnr_db(before, after):.1f} dB"
    )
    assert agreement >= 0.98


def test_kws_keeps_its_accuracy(shared: Path, tmp_path: Path) -> None:
    """The .tflite file is within half a point of the float SavedModel on the labeled samples."""
    pytest.importorskip("tensorflow")
    path, data, values = kws_case(tmp_path, tmp_path, shared)
    labels = np.load(shared / "kws/eval.npz")["label"]
    result = gq.insert(gq.freeze(gq.load(path)), rules=["tflite"], data=data, validate=False)
    assert gq.convert_to_tflite(result, tmp_path / "kws.tflite").agrees
    after = tflite_outputs(interpreter((tmp_path / "kws.tflite").read_bytes()), values)
    before = float_answers(gq.load(path), values)
    points = [float((logits.argmax(-1) == labels).mean()) for logits in (before, after)]
    print_measurement(f"KWS accuracy: float {points[0]:.4f}, TFLite int8 {points[1]:.4f}")
    assert points[1] >= points[0] - 0.005


def test_command_line_writes_file_and_conversion_report(cli: Callable[..., Any], samples: Path, tmp_path: Path) -> None:
    """`insert -o x.tflite` of a SavedModel; its scales then quantize the frozen graph without data."""
    pytest.importorskip("tensorflow")
    data, output_path, report_path = samples / "digits_cnn_calib.npz", tmp_path / "x.tflite", tmp_path / "report.json"
    text = cli(
        "insert", samples / "digits_cnn_saved_model", "--data", data, "-o", output_path, "--report", report_path, "-v"
    ).stdout
    assert re.search(r"\b24 of 24 .*\b0 of 15 ops", text)
    conversion = json.loads(report_path.read_text())["conversion"]
    assert (conversion["agrees"], len(conversion["tensors"]), conversion["float_ops"]) == (True, 24, [])
    assert f"Time: {conversion['time_ratio']:.2f}" in text
    text = cli(
        "insert", samples / "digits_cnn.pb", "--ranges", output_path, "-o", tmp_path / "x.pb", "--report", report_path
    ).stdout
    report = json.loads(report_path.read_text())
    assert sum(applied["exact"] for applied in report["ranges"]["applied"]) == 15
    assert ", 15 with its exact" in text
    runtime = {tensor["tensor"]["op"]: tensor["runtime"] for tensor in conversion["tensors"]}
    for site in report["sites"]:
        if site["tensor"]["op"] in {"stem/relu", "residual/relu", "branches/concat", "logits/bias_add"}:
            numbers = runtime[site["tensor"]["op"]]
            assert ([site["scale"]], [site["zero_point"]]) == (numbers["scale"], numbers["zero_point"])


def test_time_beside_the_file_of_the_float_model(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that takes over 1.05 of the float file's time has a warning. Without data, nothing is measured."""
    pytest.importorskip("tensorflow")
    model, data = gq.freeze(gq.load(samples / "digits_cnn.pb")), str(samples / "digits_cnn_calib.npz")
    result = gq.insert(model, rules=["tflite"], data=data)
    for median, lines in ((1.04, 0), (1.06, 1)):
        ratio = TimeRatio(median=median, low=1.0, high=1.1, first_seconds=1.0, second_seconds=1.0)
        monkeypatch.setattr("graphquant.api.convert.time_in_turn", lambda *_, ratio=ratio: ratio)
        conversion = gq.convert_to_tflite(result, None)
        assert conversion.time_ratio == median
        assert conversion._repr_html_().count("howto/slower") == lines
    monkeypatch.setattr("graphquant.api.convert.time_in_turn", None)
    assert gq.convert_to_tflite(replace(result, validation=None), None).time_ratio is None

    def fail(*_: object) -> None:  # as a gather whose ids are negative if the input is zero
        raise ModelError("index out of bounds")

    monkeypatch.setattr("graphquant.api.convert.time_in_turn", fail)
    reused = replace(result, validation=replace(result.validation, reuses_samples=True))
    conversion = gq.convert_to_tflite(reused, None)
    assert conversion.time_ratio is None
    assert conversion.validation.reuses_samples


def test_powers_of_two_are_exact(samples: Path, tmp_path: Path) -> None:
    """Scales of exactly 2**exponent are preserved exactly."""
    pytest.importorskip("tensorflow")
    result = gq.insert(gq.freeze(gq.load(samples / "digits_cnn.pb")), rules=["fixed_point"])
    conversion = gq.convert_to_tflite(result, None)
    lines = {line.tensor.op: line for line in conversion.tensors if line.runtime is not None}
    assert len(lines) > 10
    assert all(
        np.array_equal(line.runtime[0], np.full_like(line.runtime[0], line.planned[0][0])) for line in lines.values()
    )


def test_unconvertible_sites_are_refused(samples: Path, tmp_path: Path) -> None:
    """Weights of 16 bits, mixed widths and unfrozen functions are refused; nothing is written."""
    pytest.importorskip("tensorflow")
    (tmp_path / "wide.toml").write_text(
        '[scheme.s]\nbits = 16\nobserve = { name = "fixed-point", exponent = -8 }\n[[rule]]\nname = "r"\n'
        'consumer = { kind = "conv", input = "input|weight" }\nquantize = "s"\n'
    )
    result = gq.insert(gq.freeze(gq.load(samples / "digits_cnn.pb")), rules=[str(tmp_path / "wide.toml")])
    with pytest.raises(UsageError, match="no 16 bits"):
        convert_to_tflite(result, tmp_path / "wide.tflite")
    weight_only_result = gq.insert(gq.load(samples / "digits_cnn_saved_model"), rules=["weight_only"])
    with pytest.raises(UsageError, match="frozen TensorFlow graph"):
        convert_to_tflite(weight_only_result, tmp_path / "wide.tflite")
    assert not (tmp_path / "wide.tflite").exists()


def write_constant_rule(folder: Path, dtype: str) -> str:
    """Write a rule file that quantizes the constants of element-wise ops, and return its path."""
    zero = "symmetric" if dtype == "int16" else "asymmetric"
    (folder / f"{dtype}.toml").write_text(
        f'[scheme.s]\ndtype = "{dtype}"\nzero = "{zero}"\nobserve = "minmax"\n[[rule]]\nname = "constant"\n'
        'producer = { kind = "parameter" }\nconsumer = { kind = "add|mul|div" }\nquantize = "s"\n'
    )
    return str(folder / f"{dtype}.toml")


def test_constants_of_float_ops_agree_if_they_are_rounded(tmp_path: Path) -> None:
    """The converter folds the pairs of the constants of a hard sigmoid, which stays float."""
    tf = pytest.importorskip("tensorflow")
    kernels = np.random.default_rng(7).normal(size=(3, 1, 1, 3, 3)).astype(np.float32)

    @tf.function(input_signature=[tf.TensorSpec((1, 4, 4, 3), tf.float32, name="x")])
    def net(x: Any) -> Any:
        offset, factor = tf.constant(3.0), tf.constant(1 / 6)
        y = tf.nn.conv2d(x, kernels[0], 1, "SAME")
        y = y * (tf.nn.relu6(y + offset) * factor)
        scores = tf.nn.conv2d(tf.reduce_mean(y, [1, 2], keepdims=True), kernels[1], 1, "SAME")
        return tf.nn.conv2d(y * (tf.nn.relu6(scores + offset) * factor), kernels[2], 1, "SAME")

    (tmp_path / "net.pb").write_bytes(net.get_concrete_function().graph.as_graph_def().SerializeToString())
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(8).normal(size=(8, 4, 4, 3)).astype(np.float32))
    for rules, dtype in (("tflite", "int8"), ("tflite16", "int16")):
        constants = write_constant_rule(tmp_path, dtype)
        result = gq.insert(
            gq.freeze(gq.load(tmp_path / "net.pb")),
            rules=[constants, rules],
            data=str(tmp_path / "data.npz"),
            validate=False,
        )
        conversion = convert_to_tflite(result, None)
        assert [(str(line.tensor), line.problem) for line in conversion.tensors if line.problem] == []
        folded = [line for line in conversion.tensors if line.runtime is None]
        assert {line.planned[0].size for line in folded if line.planned} == {1}
        assert len(folded) == 2
        assert not [float_op for float_op in conversion.float_ops if "Const" in float_op.reason]


def test_constants_that_the_converter_folds_agree(tmp_path: Path) -> None:
    """HARD_SWISH contains the 3 of its formula."""
    tf = pytest.importorskip("tensorflow")
    kernels = np.random.default_rng(7).normal(size=(2, 1, 1, 3, 3)).astype(np.float32)

    @tf.function(input_signature=[tf.TensorSpec((1, 4, 4, 3), tf.float32, name="x")])
    def net(x: Any) -> Any:
        y = tf.nn.conv2d(x, kernels[0], 1, "SAME")
        y = y * tf.nn.relu6(y + tf.constant(3.0)) / tf.constant(6.0)
        return tf.nn.conv2d(y, kernels[1], 1, "SAME")

    (tmp_path / "net.pb").write_bytes(net.get_concrete_function().graph.as_graph_def().SerializeToString())
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(8).normal(size=(8, 4, 4, 3)).astype(np.float32))
    model = gq.freeze(gq.load(tmp_path / "net.pb"))
    rules = [write_constant_rule(tmp_path, "int8"), "tflite"]
    result = gq.insert(model, rules=rules, data=str(tmp_path / "data.npz"), validate=False)
    conversion = convert_to_tflite(result, None)
    assert [(str(line.tensor), line.problem) for line in conversion.tensors if line.problem] == []
    planned = {str(line.tensor): line for line in conversion.tensors}
    assert planned["Const:0"].index is None


def conversion_of(tmp_path: Path, net: Any, shape: tuple[int, ...]) -> tuple[gq.ConversionReport, bytes]:
    """Return the report of a function of one input, quantized with the rules tflite, and its file."""
    import tensorflow as tf

    serve = tf.function(net, input_signature=[tf.TensorSpec(shape, tf.float32, name="x")])
    (tmp_path / "net.pb").write_bytes(serve.get_concrete_function().graph.as_graph_def().SerializeToString())
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(8).normal(size=(32, *shape[1:])).astype(np.float32))
    model = gq.freeze(gq.load(tmp_path / "net.pb"))
    result = gq.insert(model, rules=["tflite"], data=str(tmp_path / "data.npz"), validate=False)
    conversion = convert_to_tflite(result, tmp_path / "net.tflite", force=True)
    assert [(str(line.tensor), line.problem) for line in conversion.tensors if line.problem] == []
    return conversion, (tmp_path / "net.tflite").read_bytes()


def test_hard_swish_with_neutral_constants_is_one_int8_op(tmp_path: Path) -> None:
    """A hard swish of Rescaling layers, whose offsets are 0, is one int8 op, and the report has no difference."""
    tf = pytest.importorskip("tensorflow")
    kernels = np.random.default_rng(7).normal(size=(2, 1, 1, 3, 3)).astype(np.float32)

    def net(x: Any) -> Any:
        y = tf.nn.conv2d(x, kernels[0], 1, "SAME")
        y = (y * tf.nn.relu6(y + tf.constant(3.0))) * tf.constant(1 / 6) + tf.constant(0.0)
        return tf.nn.conv2d(y, kernels[1], 1, "SAME")

    conversion, data = conversion_of(tmp_path, net, (1, 4, 4, 3))
    assert conversion.float_ops == ()
    assert "HARD_SWISH" in {op.type for op in parse_tflite(data).main.ops()}


def test_equal_towers_and_tiny_weights_agree(tmp_path: Path) -> None:
    """The converter keeps one of two equal towers, and widens the range of a filter below 1e-6."""
    tf = pytest.importorskip("tensorflow")
    kernels = np.random.default_rng(7).normal(size=(2, 3, 3, 3, 3)).astype(np.float32)
    kernels[0, ..., 1] *= np.float32(1e-9)

    def net(x: Any) -> Any:
        def tower() -> Any:
            y = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, tf.constant(kernels[0]), 1, "SAME"), [0.5, 0.0, 2.0]))
            return tf.nn.relu(tf.nn.conv2d(y, tf.constant(kernels[1]), 1, "SAME"))

        return tf.nn.max_pool2d(tower(), 2, 2, "SAME") + tf.nn.avg_pool2d(tower(), 2, 2, "SAME")

    conversion, data = conversion_of(tmp_path, net, (1, 8, 8, 3))
    assert conversion.float_ops == ()
    assert [op.type for op in parse_tflite(data).main.ops()].count("CONV_2D") == 2
    lines = {str(line.tensor): line for line in conversion.tensors}
    assert lines["Relu_3:0"].index == lines["Relu_1:0"].index
    assert lines["Const:0"].runtime is not None
    assert lines["Const:0"].runtime[0][1] == np.float32(1e-6 / 254)


@pytest.mark.parametrize("dims", [1, 2])
def test_dilated_convolutions_are_int8(tmp_path: Path, dims: int) -> None:
    """The batches and the bias of a dilated convolution on the input are int8, as is the input."""
    tf = pytest.importorskip("tensorflow")
    kernel = np.random.default_rng(7).normal(size=(*(3,) * dims, 3, 4)).astype(np.float32)
    bias, factor = np.float32([0.5, -1, 2, 0]), np.float32([1, 2, 0.5, 3])

    def net(x: Any) -> Any:
        y = tf.nn.convolution(x, kernel, padding="SAME", dilations=2)
        y = tf.nn.relu(tf.nn.bias_add(y, bias))
        y = tf.nn.convolution(y, np.ones((*(1,) * dims, 4, 3), np.float32))
        y = tf.nn.convolution(y, kernel[..., ::-1], padding="VALID", dilations=2)
        return tf.nn.relu(y * factor + bias if dims == 2 else tf.nn.bias_add(y, bias))  # folded as a BatchNorm

    conversion, data = conversion_of(tmp_path, net, (1, *(12,) * dims, 3))
    assert conversion.float_ops == ()
    interpreter = tf.lite.Interpreter(model_content=data)
    details = [*interpreter.get_input_details(), *interpreter.get_output_details()]
    assert {detail["dtype"] for detail in details} == {np.int8}


@pytest.mark.parametrize("has_batchnorm", [False, True])
def test_dense_layers_on_sequences_are_int8(tmp_path: Path, has_batchnorm: bool) -> None:
    """A bias or BatchNorm behind the reshape of a Dense layer is fused with its product, also for a free batch size."""
    tf = pytest.importorskip("tensorflow")
    kernel, bias = np.random.default_rng(7).normal(size=(2, 6, 6)).astype(np.float32)

    def net(x: Any) -> Any:
        y = tf.nn.bias_add(tf.tensordot(x, kernel, 1), bias[0])
        y = y * bias[1] + bias[2] if has_batchnorm else y
        return tf.nn.bias_add(tf.tensordot(tf.nn.relu(y), kernel.T, 1), bias[3])

    conversion, data = conversion_of(tmp_path, net, (None, 4, 6))
    assert conversion.float_ops == ()
    products = [op for op in parse_tflite(data).main.ops() if op.type == "FULLY_CONNECTED"]
    assert [op.outputs[0].dtype for op in products] == ["int8", "int8"]
    assert "ADD" not in {op.type for op in parse_tflite(data).main.ops()}


def test_weight_of_several_dense_layers_agrees(tmp_path: Path) -> None:
    """The converter gives a weight that several layers share finer scales, one for each channel."""
    tf = pytest.importorskip("tensorflow")
    kernel = np.random.default_rng(7).normal(size=(6, 4)).astype(np.float32)

    def net(x: Any) -> Any:
        weight, bias = tf.constant(kernel), tf.constant(kernel[0])
        return tf.stack([tf.nn.bias_add(tf.matmul(x[:, step], weight), bias) for step in range(3)], 1)

    conversion, _ = conversion_of(tmp_path, net, (1, 3, 6))
    (weight,) = (line for line in conversion.tensors if line.planned is not None and line.runtime is None)
    assert (str(weight.tensor), weight.problem) == ("Const:0", "")
    assert conversion.float_ops == ()


def test_batchnorm_behind_a_convolution_of_one_dimension_is_folded(tmp_path: Path) -> None:
    """A BatchNorm behind the Squeeze of a Conv1D, and the BatchToSpaceND of a dilated one, is folded and restored."""
    tf = pytest.importorskip("tensorflow")
    kernel, values = np.random.default_rng(7).normal(size=(2, 3, 4, 4)).astype(np.float32)

    @tf.function(input_signature=[tf.TensorSpec((None, 12, 4), tf.float32, "x")])
    def net(x: Any) -> Any:
        y = tf.nn.relu(tf.nn.conv1d(x, kernel, 1, "SAME") * values[0, 0] + values[0, 1])
        y = tf.nn.bias_add(tf.nn.convolution(y, kernel, padding="SAME", dilations=2), values[0, 2])
        return tf.nn.relu(y * values[0, 3] + values[1, 0])

    (tmp_path / "net.pb").write_bytes(net.get_concrete_function().graph.as_graph_def().SerializeToString())
    model = gq.freeze(gq.load(tmp_path / "net.pb"))
    samples = np.random.default_rng(3).normal(size=(16, 12, 4)).astype(np.float32)
    result = gq.insert(model, rules=["tflite"], data={"x": samples}, validate=False)
    assert [step.step for step in result.plan.steps] == ["fold-batchnorm", "fold-batchnorm"]
    assert [line for line in convert_to_tflite(result, None).tensors if line.problem] == []
    restored = gq.strip(gq.load(result.save(tmp_path / "quantized.pb"))).model
    np.testing.assert_array_equal(float_answers(restored, samples), float_answers(model, samples))


def test_selected_signature_of_a_frozen_model(tmp_path: Path) -> None:
    """The model frozen with one signature accepts its name, as the command passes it, and refuses others."""
    tf = pytest.importorskip("tensorflow")
    module, kernel = tf.Module(), np.eye(3, dtype=np.float32)
    module.run = tf.function(lambda x: {"y": x @ kernel}, input_signature=[tf.TensorSpec((None, 3), tf.float32, "x")])
    tf.saved_model.save(module, str(tmp_path / "net"), signatures={"text": module.run, "image": module.run})
    frozen = gq.freeze(gq.load(tmp_path / "net", signature="image"))
    samples = np.random.default_rng(3).normal(size=(16, 3)).astype(np.float32)
    result = gq.insert(frozen, signature="image", data={"x": samples}, validate=False)
    assert convert_to_tflite(result, None).agrees
    with pytest.raises(UsageError, match="image"):
        gq.insert(frozen, signature="text", data={"x": samples})


def test_outputs_behind_an_identity_n_are_int8(tmp_path: Path) -> None:
    """TensorFlow joins the outputs of a Keras model with two of them in one op."""
    tf = pytest.importorskip("tensorflow")
    kernel = np.random.default_rng(7).normal(size=(1, 1, 3, 3)).astype(np.float32)

    def net(x: Any) -> Any:
        y = tf.nn.conv2d(x, kernel, 1, "SAME")
        return tf.identity_n([y, tf.sigmoid(y)])

    _, data = conversion_of(tmp_path, net, (1, 4, 4, 3))
    details = tf.lite.Interpreter(model_content=data).get_output_details()
    assert [detail["dtype"] for detail in details] == [np.int8, np.int8]


@pytest.mark.parametrize("bounded", ["sigmoid", "softmax"])
@pytest.mark.parametrize("moved", [False, True])
def test_products_with_a_bounded_second_operand_are_right(tmp_path: Path, bounded: str, moved: bool) -> None:
    """The second operand of a product gets the zero point 0, which TFLite's default runtime takes it to have."""
    tf = pytest.importorskip("tensorflow")
    kernels = np.random.default_rng(7).normal(size=(2, 1, 1, 3, 3)).astype(np.float32)

    def net(x: Any) -> Any:
        y = tf.reshape(tf.nn.conv2d(x, kernels[0], 1, "SAME"), (1, 16, 3))
        z = getattr(tf.nn, bounded)(tf.nn.conv2d(x, kernels[1], 1, "SAME"))
        return tf.matmul(y, tf.reshape(z, (1, 3, 16)) if moved else tf.transpose(z[:, 0], (0, 2, 1)))

    conversion, data = conversion_of(tmp_path, net, (1, 4, 4, 3))
    assert conversion.float_ops == ()
    images = np.random.default_rng(9).normal(size=(16, 1, 4, 4, 3)).astype(np.float32)
    results = tflite_outputs(tf.lite.Interpreter(model_content=data), images[:, 0])
    expected = np.concatenate([net(image).numpy() for image in images])
    assert sqnr_db(expected, results.reshape(expected.shape)) > 20


def test_the_loop_of_a_simple_rnn_stays_float(tmp_path: Path) -> None:
    """Its state adds up the rounding of all steps, in a SavedModel and a frozen graph. Dense layers are quantized."""
    tf = pytest.importorskip("tensorflow")
    layers = tf.keras.layers
    net = tf.keras.Sequential([layers.Input((8, 6)), layers.SimpleRNN(12), layers.Dense(5)])
    net.export(str(tmp_path / "net"), verbose=False)
    model = gq.load(tmp_path / "net")
    for rules in ("tflite", "openvino", "qnn", "vitis_ai"):
        for candidate in (model, gq.freeze(model)):
            tensors = [str(site.tensor) for site in gq.plan(candidate, rules=[rules]).sites]
            assert any("dense" in tensor for tensor in tensors)
            assert [tensor for tensor in tensors if "while" in tensor] == []


def test_sums_that_abort_the_process_are_found() -> None:
    """TFLite's interpreter aborts on an int8 ADD of which an input has 2**19 times the scale of the output."""
    tf = pytest.importorskip("tensorflow")

    def aborting_sum(limit: float) -> str | None:
        def rounded(x: Any, largest: float) -> Any:
            return tf.quantization.fake_quant_with_min_max_args(x, -largest, largest)

        spec = tf.TensorSpec((1, 4, 4, 3), tf.float32)
        net = tf.function(
            lambda x, y: rounded(rounded(x, 128.0) + rounded(y, 1.0), limit), input_signature=[spec, spec]
        )
        converter = tf.lite.TFLiteConverter.from_concrete_functions([net.get_concrete_function()])
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        return find_wrong_kernel(parse_tflite(converter.convert()))

    assert aborting_sum(1.0) is None
    assert aborting_sum(128 / 2**20) is not None


def test_joins_that_stay_float_are_converted(tmp_path: Path) -> None:
    """TensorFlow's converter gives the operands of a float Concat one scale, and refuses the file for other readers.

    XNNPACK refuses a QUANTIZE that rescales the table of a Gather, so the file has the rescaled table.
    """
    tf = pytest.importorskip("tensorflow")
    random = np.random.default_rng(0)
    table, narrow, dense = (random.normal(size=size).astype(np.float32) for size in ((50, 8), (1, 3, 8, 4), (16, 5)))
    wide = random.normal(0, 500, (2, 1, 1, 6, 8)).astype(np.float32)

    def net(x: Any) -> Any:
        rows = tf.gather(table, tf.minimum(tf.cast(tf.abs(x[:, :, 0]) * 8, tf.int32), 49)) * 0.3 + 0.1
        near = tf.nn.conv2d(tf.expand_dims(rows, 1), narrow, 1, "SAME")[:, 0]
        image = x[:, None]
        far = tf.maximum(*(tf.nn.relu(tf.nn.conv2d(image, kernel, 1, "SAME"))[:, 0] for kernel in wide))
        return tf.reduce_mean(tf.concat([rows, far], 2) * 0.01, [1]) @ dense + tf.reduce_mean(near, [1])[:, :1]

    conversion, data = conversion_of(tmp_path, net, (1, 5, 6))
    assert "CONCATENATION" in {op.type for op in conversion.float_ops}
    samples = np.load(tmp_path / "data.npz")["x"]
    results = tflite_outputs(tf.lite.Interpreter(model_content=data), samples)
    expected = np.concatenate([net(sample[None]).numpy() for sample in samples])
    assert sqnr_db(expected, results.reshape(expected.shape)) > 20


def test_the_cell_of_tensorflow_1_stays_float(tmp_path: Path) -> None:
    """Its input and state are joined before the product, and get no ranges of their own."""
    tf = pytest.importorskip("tensorflow")
    weight, dense = (np.random.default_rng(1).normal(0, 0.4, size).astype(np.float32) for size in ((14, 32), (8, 5)))

    def net(x: Any) -> Any:
        hidden = cell = tf.zeros([1, 8])
        for step in range(3):
            gates = tf.nn.bias_add(tf.concat([x[:, step], hidden], 1) @ weight, tf.fill([32], 0.1))
            i, j, f, o = tf.split(gates, 4, 1)
            cell = cell * tf.sigmoid(f + 1.0) + tf.sigmoid(i) * tf.tanh(j)
            hidden = tf.tanh(cell) * tf.sigmoid(o)
        return hidden @ dense

    conversion_of(tmp_path, net, (1, 3, 6))
    for rules in ("tflite", "openvino", "qnn", "vitis_ai"):
        readers = {use.op for site in gq.plan(tmp_path / "net.pb", rules=[rules]).sites for use in site.uses}
        assert [name for name in readers if name.startswith("concat")] == []


def test_types_of_other_widths_get_advice(tmp_path: Path) -> None:
    """TFLite has no kernels for float16, and the message says so instead of naming all ops."""
    tf = pytest.importorskip("tensorflow")
    kernel = np.ones((6, 4), np.float16)
    serve = tf.function(lambda x: x @ kernel, input_signature=[tf.TensorSpec((1, 6), tf.float16, name="x")])
    (tmp_path / "net.pb").write_bytes(serve.get_concrete_function().graph.as_graph_def().SerializeToString())
    with pytest.raises(ModelError, match="float32"):
        require_convertible(gq.freeze(gq.load(tmp_path / "net.pb")))


@pytest.mark.parametrize(("factor", "threshold"), [(1.0, -1e9), (1e-3, 2e-4)])
def test_comparisons_stay_float(tmp_path: Path, factor: float, threshold: float) -> None:
    """TFLite's int8 comparisons are wrong beside a large constant and below 1/256. In float they decide as planned."""
    tf = pytest.importorskip("tensorflow")
    kernel = np.random.default_rng(3).normal(size=(6, 4)).astype(np.float32)

    def net(x: Any) -> Any:
        product = x @ kernel
        return tf.where(tf.reduce_mean(tf.abs(x)) * factor > threshold, tf.nn.relu(product), product)

    samples = np.random.default_rng(4).normal(size=(32, 6)).astype(np.float32)
    conversion, data = conversion_of(tmp_path, net, (1, 6))
    assert "GREATER" in {op.type for op in conversion.float_ops}
    sites = gq.plan(tmp_path / "net.pb", rules=["tflite"]).sites  # a rounded operand may decide otherwise
    assert not any("Greater" in use.op for site in sites for use in site.uses)
    results = tflite_outputs(tf.lite.Interpreter(model_content=data), samples)
    expected = np.concatenate([net(sample[None]).numpy() for sample in samples])
    assert sqnr_db(expected, results.reshape(expected.shape)) > 20


def test_ops_that_stay_float_are_named(samples: Path, tmp_path: Path) -> None:
    """Ops of an excluded tensor stay float, and the report names the operand without a range."""
    pytest.importorskip("tensorflow")
    model = gq.freeze(gq.load(samples / "digits_cnn.pb"))
    data = str(samples / "digits_cnn_calib.npz")
    conversion = gq.convert_to_tflite(
        gq.insert(model, rules=["tflite"], data=data, exclude=["residual/relu:0"], validate=False), None
    )
    reasons = [float_op.reason for float_op in conversion.float_ops if float_op.type == "ADD"]
    assert [re.findall("input|output|weight", reason) for reason in reasons] == [["output"]]


def test_a_difference_ends_with_1(
    cli: Callable[..., Any], samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the runtime's scale differs from the plan, the table names it and the exit code is 1."""
    pytest.importorskip("tensorflow")
    from dataclasses import replace

    from graphquant.formats.tensorflow import tflite_converter as door

    real = door.runtime_tensors

    def other(data: bytes) -> Any:
        return tuple(replace(tensor, scales=tensor.scales * np.float32(1.5)) for tensor in real(data))

    monkeypatch.setattr(door, "runtime_tensors", other)
    data = samples / "digits_cnn_calib.npz"
    result = cli("insert", samples / "digits_cnn.pb", "--data", data, "-o", tmp_path / "x.tflite", code=1)
    assert "its scale differs" in result.stdout
    assert "0 of 24 planned tensors" in result.stdout
    assert "error: x.tflite does not" in result.stderr


@pytest.mark.parametrize(
    ("rules", "io"),
    [("tflite", "int8"), ("tflite", "uint8"), ("tflite", "float32"), ("tflite16", "int16"), ("tflite16", "float32")],
)
def test_signature_and_io_type_are_kept(
    cli: Callable[..., Any], samples: Path, tmp_path: Path, rules: str, io: str
) -> None:
    """The runner of the signature takes and gives values of the requested type, and the conversion report agrees."""
    tensorflow = pytest.importorskip("tensorflow")
    output_path, report_path = tmp_path / "x.tflite", tmp_path / "report.json"
    cli(
        "insert", samples / "digits_cnn_saved_model", "--data", samples / "digits_cnn_calib.npz", "-o", output_path,
        "--io", io, "--report", report_path, "--rules", rules,
    )  # fmt: skip
    assert json.loads(report_path.read_text())["conversion"]["agrees"]
    runner = tensorflow.lite.Interpreter(str(output_path)).get_signature_runner("serving_default")
    (source,) = runner.get_input_details().values()
    (target,) = runner.get_output_details().values()
    assert {np.dtype(detail["dtype"]).name for detail in (source, target)} == {io}
    data = np.load(samples / "digits_cnn_eval.npz")
    scale, zero = source["quantization"]
    images = data["image"][:50]
    values = np.round(images / scale) + zero if scale else images
    matches = [
        runner(image=value[None].astype(source["dtype"]))["probabilities"].argmax() == label
        for value, label in zip(values, data["labels"], strict=False)
    ]
    assert np.mean(matches) > 0.9


@pytest.mark.parametrize("io", [None, "float32", "uint8"])
def test_file_is_compared_with_its_model(
    cli: Callable[..., Any], samples: Path, tmp_path: Path, io: str | None
) -> None:
    """`compare` runs a TFLite file in the interpreter: its error is that of the outputs, in their real units."""
    source, evaluation = samples / "digits_cnn_saved_model", str(samples / "digits_cnn_eval.npz")
    options = [] if io is None else ["--io", io]
    output_path = tmp_path / "x.tflite"
    cli("insert", source, "--data", samples / "digits_cnn_calib.npz", "-o", output_path, *options)
    comparison = gq.compare(source, output_path, evaluation, samples=40)
    images = np.load(evaluation)["image"][:40]
    expected = float_answers(gq.load(source), images)
    (output,) = comparison.outputs
    assert (output.name, output.quantized_name) == ("probabilities", "probabilities")
    if io != "uint8":  # the reference quantizes inputs to int8
        answers = tflite_outputs(pytest.importorskip("tensorflow").lite.Interpreter(str(output_path)), images)
        assert output.sqnr == pytest.approx(sqnr_db(expected, answers), abs=0.01)
        assert output.agreement == np.mean(answers.argmax(-1) == expected.argmax(-1))
    assert output.sqnr is not None
    assert output.sqnr > 25
    assert output.accuracy is not None
    assert gq.compare(output_path, output_path, evaluation, samples=5).outputs[0].equal
    for option in ("--sensitivity", "--html=x.html"):
        assert "TFLite" in cli("compare", source, output_path, "--data", evaluation, option, code=2).stderr
    assert "'nix'" in cli("compare", source, output_path, "--data", evaluation, "--signature", "nix", code=2).stderr


def test_file_without_signatures_is_compared(shared: Path) -> None:
    """Inputs and outputs of a file without signatures are matched in order, and int8 ones are real numbers."""
    folder = shared / "kws"
    files = folder / "kws_float.tflite", folder / "kws_int8.tflite"
    comparison = gq.compare(*files, str(folder / "eval.npz"), samples=50)
    lite, images = pytest.importorskip("tensorflow").lite, np.load(folder / "eval.npz")["input_1"][:50]
    answers = [tflite_outputs(lite.Interpreter(str(file)), images) for file in files]
    assert comparison.outputs[0].sqnr == pytest.approx(sqnr_db(*answers), abs=0.01)


@pytest.mark.parametrize(("rules", "io"), [("tflite", "int16"), ("tflite16", "int8"), ("tflite16", "uint8")])
def test_io_of_another_width_is_refused(
    cli: Callable[..., Any], samples: Path, tmp_path: Path, rules: str, io: str
) -> None:
    """Inputs and outputs have the type of the activations, or are float."""
    pytest.importorskip("tensorflow")
    data, output_path = samples / "digits_cnn_calib.npz", tmp_path / "x.tflite"
    arguments = ("insert", samples / "digits_cnn.pb", "--data", data, "--rules", rules, "--io", io, "-o", output_path)
    assert "float32" in cli(*arguments, code=2).stderr
    assert not output_path.exists()


def test_io_of_an_input_without_a_range_is_refused(cli: Callable[..., Any], samples: Path, tmp_path: Path) -> None:
    """An int8 input needs a range; nothing is written."""
    pytest.importorskip("tensorflow")
    data, output_path = samples / "digits_cnn_calib.npz", tmp_path / "x.tflite"
    arguments = ("insert", samples / "digits_cnn.pb", "--data", data, "--exclude", "image:0", "--io", "int8")
    assert "image" in cli(*arguments, "-o", output_path, code=2).stderr
    assert not output_path.exists()
    cli("insert", samples / "digits_cnn.pb", "--data", data, "--io", "int8", "-o", tmp_path / "x.pb", code=2)


def test_unsupported_ops_are_refused_before_calibration(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float graph that the converter refuses ends with 3, before any sample runs."""
    tf = pytest.importorskip("tensorflow")
    v1 = tf.compat.v1
    with v1.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        kernel = tf.constant(np.eye(4, dtype=np.float32))
        v1.identity(v1.betainc(v1.nn.sigmoid(x @ kernel), tf.ones_like(x), tf.ones_like(x)), name="y")
    (tmp_path / "m.pb").write_bytes(graph.as_graph_def().SerializeToString())
    np.savez(tmp_path / "data.npz", x=np.ones((8, 4), np.float32))

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("calibration ran")

    monkeypatch.setattr("graphquant.api.insert", refuse)
    result = cli("insert", tmp_path / "m.pb", "--data", tmp_path / "data.npz", "-o", tmp_path / "m.tflite", code=3)
    assert "Betainc" in result.stderr


def test_weights_alone_give_dynamic_range(samples: Path, tmp_path: Path) -> None:
    """Weights are int8 with the planned scales, and inputs, outputs and small weights are float."""
    tensorflow = pytest.importorskip("tensorflow")
    (tmp_path / "fold.toml").write_text('prepare = ["fold-batchnorm"]\n')
    model = gq.freeze(gq.load(samples / "digits_cnn_saved_model"))
    unfolded = gq.convert_to_tflite(gq.insert(model, rules="weight_only"), None)
    assert (unfolded.agrees, len(unfolded.warnings), "fold-batchnorm" in unfolded.warnings[0]) == (False, 1, True)
    result = gq.insert(model, rules=[str(tmp_path / "fold.toml"), "weight_only"])
    conversion = gq.convert_to_tflite(result, tmp_path / "x.tflite")
    assert conversion.warnings == ()
    assert (conversion.agrees, 0 < len(conversion.tensors) < len(result.inserted)) == (True, True)
    assert all(line.runtime is not None and line.runtime[0].size > 1 for line in conversion.tensors)
    runner = tensorflow.lite.Interpreter(str(tmp_path / "x.tflite")).get_signature_runner("serving_default")
    details = (*runner.get_input_details().values(), *runner.get_output_details().values())
    assert {np.dtype(detail["dtype"]).name for detail in details} == {"float32"}
    images = np.load(samples / "digits_cnn_eval.npz")["image"][:50]
    after = np.concatenate([runner(image=image[None])["probabilities"] for image in images])
    assert sqnr_db(float_answers(model, images), after) > 30
    name, content = (
        next(iter(runner.get_output_details().values()))["name"].encode(),
        (tmp_path / "x.tflite").read_bytes(),
    )
    parts = content.split(name)
    for k in range(1, len(parts)):  # the tensor, and the key of the signature if it is the same
        (tmp_path / "x.tflite").write_bytes(name.join(parts[:k]) + b"\xff" + name[1:] + name.join(parts[k:]))
        with pytest.raises(ModelError):
            gq.compare(model, tmp_path / "x.tflite", {"image": images})


def test_weights_of_a_loop_give_dynamic_range(samples: Path) -> None:
    """Rounded weights become constants of the loop's body, whether it owns them or they enter it."""
    result = gq.insert(
        gq.freeze(gq.load(samples / "digits_rnn_saved_model")),
        rules="weight_only",
        data=str(samples / "digits_rnn_calib.npz"),
    )
    in_body = [str(insertion.site.tensor) for insertion in result.inserted if "/body/" in insertion.site.tensor.op]
    assert len(in_body) == 4
    report = gq.convert_to_tflite(result, None)
    assert report.agrees
    assert report.validation is not None
    assert report.validation.worst_sqnr == pytest.approx(result.validation.worst_sqnr, abs=2)


def test_tensor_arrays_of_tensorflow_1_get_advice(tmp_path: Path) -> None:
    """The graph with TensorArrayV3 is refused; built with control flow of version 2, as advised, it converts."""
    tf = pytest.importorskip("tensorflow")
    v1 = tf.compat.v1

    def frozen_loop(path: Path) -> gq.Model:
        with v1.Graph().as_default() as graph:
            rows = tf.transpose(v1.placeholder(tf.float32, [1, 5, 4], name="x"), [1, 0, 2])
            kernel = tf.constant(np.eye(4, dtype=np.float32) / 2)

            def step(index: Any, state: Any, states: Any) -> tuple[Any, Any, Any]:
                state = tf.tanh(tf.gather(rows, index) @ kernel + state)
                return index + 1, state, states.write(index, state)

            start = 0, tf.zeros([1, 4]), tf.TensorArray(tf.float32, 5, element_shape=[1, 4])
            *_, states = tf.while_loop(lambda index, *_: index < 5, step, start)
            v1.identity(states.stack(), name="y")
        path.write_bytes(graph.as_graph_def().SerializeToString())
        return gq.freeze(gq.load(path))

    was_enabled = v1.control_flow_v2_enabled()
    try:
        v1.disable_control_flow_v2()
        with pytest.raises(ModelError, match="enable_control_flow_v2"):
            require_convertible(frozen_loop(tmp_path / "v1.pb"))
        v1.enable_control_flow_v2()
        require_convertible(frozen_loop(tmp_path / "v2.pb"))
    finally:
        (v1.enable_control_flow_v2 if was_enabled else v1.disable_control_flow_v2)()


@pytest.mark.slow
def test_values_that_the_converter_would_clip_stay_float(cli: Callable[..., Any], tmp_path: Path) -> None:
    """A Relu joined with a Sigmoid keeps its values above 1. Data has the name of the SavedModel's tensor."""
    tf = pytest.importorskip("tensorflow")
    rng = np.random.default_rng(0)
    weights = [tf.constant(rng.normal(size=(3, 3, 2, 2)).astype(np.float32)) for _ in range(3)]
    last = tf.constant(rng.normal(size=(3, 3, 4, 2)).astype(np.float32))

    def serve(x: Any) -> Any:
        hidden = tf.nn.relu(tf.nn.conv2d(x, weights[0], 1, "SAME"))
        gate = tf.nn.sigmoid(tf.nn.conv2d(hidden, weights[1], 1, "SAME"))
        joined = tf.concat([gate, tf.nn.relu(tf.nn.conv2d(hidden, weights[2], 1, "SAME"))], 3)
        return {"gate": gate, "y": tf.nn.sigmoid(tf.nn.conv2d(joined, last, 1, "SAME"))}

    module = tf.Module()
    module.serve = tf.function(serve, input_signature=[tf.TensorSpec([1, 8, 8, 2], tf.float32, name="x")])
    tf.saved_model.save(module, tmp_path / "net", signatures={"serving_default": module.serve})
    np.savez(tmp_path / "data.npz", **{"serving_default_x:0": rng.normal(size=(8, 8, 8, 2)).astype(np.float32)})
    arguments = ["--data", tmp_path / "data.npz", "--min-sqnr", "none", "-o", tmp_path / "x.tflite"]
    cli("insert", tmp_path / "net", *arguments)
    compared = gq.compare(tmp_path / "net", tmp_path / "x.tflite", str(tmp_path / "data.npz"))
    assert min(output.sqnr or 0.0 for output in compared.outputs) >= 25
    joined = next(op for op in gq.load(tmp_path / "x.tflite").main.ops() if op.type == "CONCATENATION")
    assert joined.outputs[0].dtype == "float32"


def save_net(path: Path, compute: Callable[..., Any]) -> Path:
    """Write a SavedModel of `compute`, of x (1, 8, 12) and four kernels (12, 12), and its data with the suffix .npz."""
    tf = pytest.importorskip("tensorflow")
    rng = np.random.default_rng(1)
    module = tf.Module()
    module.kernels = [tf.Variable(rng.normal(0, 0.4, (12, 12)).astype(np.float32)) for _ in range(4)]
    spec = tf.TensorSpec([1, 8, 12], tf.float32, name="x")
    serve = tf.function(lambda x: {"y": compute(tf, x, *module.kernels)}, input_signature=[spec], autograph=False)
    module.serve = serve
    tf.saved_model.save(module, path, signatures={"serving_default": serve})
    np.savez(path.with_suffix(".npz"), x=rng.normal(size=(24, 8, 12)).astype(np.float32))
    return path


def product_with_eye(tf: Any, x: Any, first: Any, last: Any, *_: Any) -> Any:
    """Return a product whose second operand is a constant with positive values only."""
    return tf.matmul(tf.nn.relu(x @ first), tf.eye(12, batch_shape=[1])) @ last


def test_a_file_that_is_worse_than_its_plan_fails(cli: Callable[..., Any], tmp_path: Path) -> None:
    """TensorFlow's converter gives an excluded operand a range that XNNPACK computes wrong: exit code 1."""
    path = save_net(tmp_path / "net", product_with_eye)
    command = ("insert", path, "--data", path.with_suffix(".npz"), "--report", tmp_path / "report.json", "--force")
    reports = []
    for options, code in (((), 0), (("--exclude", "eye*"), 1)):
        cli(*command, "-o", tmp_path / "net.tflite", *options, code=code)
        reports.append(json.loads((tmp_path / "report.json").read_text("utf-8")))
    conversions = [report["conversion"] for report in reports]
    assert [conversion["agrees"] for conversion in conversions] == [True, True]
    assert [(len(conversion["warnings"]), len(conversion["failures"])) for conversion in conversions] == [
        (0, 0),
        (1, 1),
    ]
    planned = [report["validation"]["comparison"]["outputs"][0]["sqnr"] for report in reports]
    measured = [conversion["validation"]["comparison"]["outputs"][0]["sqnr"] for conversion in conversions]
    assert min(planned[0], planned[1], measured[0]) > 30
    assert measured[1] < 5


def test_a_file_without_data_is_not_measured(tmp_path: Path) -> None:
    """Without a validation there is neither a figure of the file nor a failure."""
    path = save_net(tmp_path / "net", product_with_eye)
    result = gq.insert(gq.freeze(gq.load(path)), rules=["tflite"], data=path.with_suffix(".npz"), validate=False)
    conversion = gq.convert_to_tflite(result, None)
    assert (conversion.validation, conversion.warnings, conversion.failures) == (None, (), ())


def softmax_on_both_sides(tf: Any, x: Any, *kernels: Any) -> Any:
    """Return products with one Softmax as first and as second operand."""
    first, second, third, fourth = kernels
    shares = tf.nn.softmax(tf.matmul(x @ first, x @ second, transpose_b=True))
    return tf.matmul(tf.matmul(shares, x @ third), shares, transpose_a=True) @ (x @ fourth)


def softmax_with_another_reader(tf: Any, x: Any, *kernels: Any) -> Any:
    """Return a product with a Softmax as second operand, which another op reads too."""
    shares = tf.nn.softmax(x @ kernels[0])
    return tf.matmul(x @ kernels[1], shares, transpose_b=True) + tf.reduce_max(shares, -1, keepdims=True)


@pytest.mark.parametrize("compute", [softmax_on_both_sides, softmax_with_another_reader])
def test_a_softmax_that_is_a_second_operand_has_one_range(compute: Callable[..., Any], tmp_path: Path) -> None:
    """All readers get the symmetric range. With a range for each reader the files had less than 5 dB."""
    path = save_net(tmp_path / "net", compute)
    result = gq.insert(gq.freeze(gq.load(path)), rules=["tflite"], data=path.with_suffix(".npz"))
    conversion = gq.convert_to_tflite(result, None)
    assert conversion.agrees
    assert conversion.validation is not None
    assert conversion.validation.worst_sqnr is not None
    assert conversion.validation.worst_sqnr > 20


def write_branches(folder: Path) -> None:
    """Write a SavedModel and a GraphDef of a tf.cond whose branches have convolutions of the same name."""
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    rng = np.random.default_rng(0)
    kernels = [tf.Variable(rng.normal(0, size, (1, 1, 4, 4)).astype(np.float32)) for size in (1, 1, 9, 1)]

    class Net(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([1, 6, 6, 4])])
        def __call__(self, x):
            def layer(value, kernel):
                return tf.nn.relu(tf.nn.conv2d(value, kernels[kernel], 1, "SAME"))

            start = layer(x, 0)
            joined = tf.cond(tf.reduce_mean(x) > 0, lambda: layer(start, 1), lambda: layer(start, 2))
            return {"y": layer(joined, 3)}

    net = Net()
    net.kernels = kernels  # a saved module owns its variables
    tf.saved_model.save(net, str(folder / "net"), signatures={"serving_default": net.__call__})
    for name, lowered in (("net", True), ("functions", False)):
        frozen = convert_variables_to_constants_v2(net.__call__.get_concrete_function(), lower_control_flow=lowered)
        (folder / f"{name}.pb").write_bytes(frozen.graph.as_graph_def().SerializeToString())
    shifts = np.where(np.arange(16) % 2, 2, -2)[:, None, None, None]
    images = rng.normal(0, 1, (16, 6, 6, 4)) + shifts
    np.savez(folder / "both.npz", x=images.astype(np.float32))
    np.savez(folder / "one.npz", x=np.abs(images).astype(np.float32))


def test_ranges_of_branches(cli: Callable[..., Any], tmp_path: Path) -> None:
    """Each branch takes its own scale of a TFLite file, and a branch without any stays float, with a warning."""
    pytest.importorskip("tensorflow")
    write_branches(tmp_path)
    frozen = gq.freeze(gq.load(tmp_path / "net"))
    result = gq.insert(frozen, data=f"{tmp_path / 'both.npz'}", rules="tflite", min_sqnr="none")
    gq.convert_to_tflite(result, tmp_path / "net.tflite")
    variables = gq.insert(tmp_path / "net", data=f"{tmp_path / 'both.npz'}", rules="tflite", min_sqnr="none")
    for ranges in (tmp_path / "net.tflite", variables.export_ranges(tmp_path / "net.encodings")):
        again = gq.insert(tmp_path / "net", ranges=ranges, rules="tflite", validate=False)
        scales = {
            pair.site.tensor.graph.split("_")[1]: float(np.asarray(pair.params.scale).item())
            for pair in again.inserted
            if "cond" in pair.site.tensor.graph and pair.site.tensor.op.endswith("/Relu")
        }
        assert scales["false"] > 3 * scales["true"]
    unlowered = gq.insert(
        gq.freeze(gq.load(tmp_path / "functions.pb")), data=f"{tmp_path / 'both.npz'}", rules="tflite"
    )
    assert gq.convert_to_tflite(unlowered, None).agrees
    cli("insert", tmp_path / "net.pb", "--data", tmp_path / "one.npz", "-o", tmp_path / "one.pb", "--min-sqnr", "none")
    text = cli("insert", tmp_path / "net.pb", "--ranges", tmp_path / "one.pb", "-o", tmp_path / "again.pb").stdout
    assert re.search(r"warning: not in that file.*cond/else/_\d+/cond/Relu:0", text)
