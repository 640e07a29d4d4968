"""TFLite files, compared with TensorFlow's own reader and schema."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from graphquant.analysis.model_summary import summarize_model
from graphquant.formats.tflite import ops, parse_tflite
from graphquant.visualize.json_results import InspectResult

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TABLES = {
    "Model": ops.MODEL,
    "SubGraph": ops.SUBGRAPH,
    "Tensor": ops.TENSOR,
    "QuantizationParameters": ops.QUANTIZATION,
    "Operator": ops.OPERATOR,
    "OperatorCode": ops.OPERATOR_CODE,
    "Buffer": ops.BUFFER,
    "IfOptions": ops.IF_OPTIONS,
    "WhileOptions": ops.WHILE_OPTIONS,
    "CallOptions": ops.CALL_OPTIONS,
    "CallOnceOptions": ops.CALL_ONCE_OPTIONS,
}


def enum_names(cls: type) -> list[str]:
    """Return the names of an enum of generated code, in the order of their values."""
    names_by_number = {value: name for name, value in vars(cls).items() if isinstance(value, int)}
    assert sorted(names_by_number) == list(range(len(names_by_number)))
    return [names_by_number[value] for value in range(len(names_by_number))]


def test_schema_equals_that_of_tensorflow():
    """Every table's fields, the dtypes and the ops equal TensorFlow's generated code."""
    generated = pytest.importorskip("tensorflow.lite.python.schema_py_generated")
    for name, fields in TABLES.items():
        cls = getattr(generated, name)
        for field, number in fields.items():
            method = getattr(cls, "".join(word.capitalize() for word in field.split("_")))
            offsets = re.findall(r"self\._tab\.Offset\((\d+)\)", inspect.getsource(method))
            assert offsets == [str(4 + 2 * number)], (name, field)
    assert [name.lower() for name in enum_names(generated.TensorType)] == list(ops.TYPES)
    assert enum_names(generated.BuiltinOperator) == list(ops.BUILTINS)
    assert len(enum_names(generated.QuantizationDetails)) == len(ops.DETAILS)


def compare_tensors(data: bytes) -> dict[str, int]:
    """Compare each tensor of each subgraph with the interpreter's report; return the counts."""
    import tensorflow as tf

    resolver = tf.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = tf.lite.Interpreter(model_content=data, experimental_op_resolver_type=resolver)
    model = parse_tflite(data)
    ours = InspectResult.model_validate(summarize_model(model)).as_json()["tensors"]
    counts = {"tensors": 0, "quantized": 0, "per channel": 0, "constants": 0}
    for number, graph in enumerate(model.graphs):
        listed = {entry["index"]: entry for entry in ours if entry["graph"] == graph}
        details = interpreter.get_tensor_details(number)
        assert [detail["index"] for detail in details] == list(listed)
        for detail in details:
            mine = listed[detail["index"]]
            params, our_params = detail["quantization_parameters"], mine["quantization_parameters"]
            assert (detail["name"], detail["shape"].tolist()) == (mine["name"], mine["shape"])
            assert detail["shape_signature"].tolist() == mine["shape_signature"]
            assert np.dtype(detail["dtype"]).name == mine["dtype"] or mine["dtype"] in {
                "string",
                "resource",
                "variant",
                "int4",
            }
            assert detail["quantization"] == tuple(mine["quantization"])
            assert params["scales"].tolist() == our_params["scales"]
            assert params["zero_points"].tolist() == our_params["zero_points"]
            assert params["quantized_dimension"] == our_params["quantized_dimension"]
            counts["tensors"] += 1
            counts["quantized"] += bool(our_params["scales"])
            counts["per channel"] += len(our_params["scales"]) > 1
        counts["constants"] += compare_constants(interpreter, model, number, graph)
    assert [op["op_name"] for op in interpreter._get_ops_details()] == [
        op.type for op in model.main.ops() if op.kind not in {"input", "output", "constant"} and op.type != "Variable"
    ]
    return counts


def compare_constants(interpreter: Any, model: Any, number: int, graph: str) -> int:
    """Compare the values of a graph's constants."""
    count = 0
    for op in model.graphs[graph].ops():
        if op.kind == "constant" and op.read_value is not None and op.outputs[0].dtype != "int4":
            value = interpreter.get_tensor(op.outputs[0].quantization.index, number)
            np.testing.assert_array_equal(op.read_value(), value.reshape(op.outputs[0].quantization.sizes))
            count += 1
    return count


@pytest.mark.parametrize("name", ["kws_int8", "kws_float"])
def test_reference_files(shared, name):
    """The available files, with their reference int8 model."""
    pytest.importorskip("tensorflow")
    counts = compare_tensors((shared / f"kws/{name}.tflite").read_bytes())
    assert counts["tensors"] == (35 if name == "kws_int8" else counts["tensors"])
    print(name, counts)  # noqa: T201  # shown by pytest -rP


def sample_images() -> Any:
    """Representative samples."""
    dice = np.random.default_rng(3)
    for _ in range(4):
        yield [dice.normal(size=(1, 8, 8, 3)).astype(np.float32)]


def small_network() -> Any:
    """A small net with a convolution, a depthwise one, a sum and a dense layer, and its converter settings."""
    import tensorflow as tf

    x = y = tf.keras.Input((8, 8, 3), batch_size=None)
    y = tf.keras.layers.Conv2D(8, 3, padding="same", activation="relu")(y)
    z = tf.keras.layers.DepthwiseConv2D(3, padding="same", activation="relu6")(y)
    y = tf.keras.layers.Add()([y, z])
    y = tf.keras.layers.GlobalAveragePooling2D()(y)
    y = tf.keras.layers.Dense(64, activation="tanh")(y)
    y = tf.keras.layers.Dense(32, activation="softmax")(y)
    return converter(tf.keras.Model(x, y))


def sequence() -> Any:
    """An LSTM over words, which contains a loop or a fused op with variables."""
    import tensorflow as tf

    x = tf.keras.Input((12,), batch_size=1, dtype="int32")
    y = tf.keras.layers.Embedding(50, 64)(x)
    y = tf.keras.layers.LSTM(64)(y)
    return converter(tf.keras.Model(x, tf.keras.layers.Dense(4)(y)))


def branches() -> Any:
    """A model that has two subgraphs and a loop besides its main graph."""
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float32)])
    def run(x: Any) -> Any:
        y = tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: x - tf.constant([1.0, 2, 3, 4]))
        return tf.while_loop(lambda v: tf.reduce_max(v) < 10, lambda v: (v + 1,), (y,))[0]

    return tf.lite.TFLiteConverter.from_concrete_functions([run.get_concrete_function()])


def converter(model: Any) -> Any:
    """The converter for a Keras model."""
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    spec = tf.TensorSpec(model.inputs[0].shape, model.inputs[0].dtype)
    run = tf.function(lambda x: model(x, training=False)).get_concrete_function(spec)
    return tf.lite.TFLiteConverter.from_concrete_functions([convert_variables_to_constants_v2(run)])


def full(made: Any) -> None:
    """Full int8."""
    import tensorflow as tf

    made.representative_dataset = sample_images
    made.inference_input_type = made.inference_output_type = tf.int8


def wide(made: Any) -> None:
    """16-bit activations with 8-bit weights."""
    import tensorflow as tf

    made.representative_dataset = sample_images
    made.target_spec.supported_ops = [tf.lite.OpsSet.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8]


def half(made: Any) -> None:
    """float16 weights with DEQUANTIZE."""
    import tensorflow as tf

    made.target_spec.supported_types = [tf.float16]


def nothing(_made: Any) -> None:
    """Dynamic range: int8 weights, float activations (hybrid ops)."""


@pytest.mark.parametrize(
    ("make", "how", "quantized", "per_channel"),
    [
        (small_network, full, 10, 4),
        (small_network, wide, 10, 4),
        (small_network, half, 0, 0),
        (small_network, nothing, 1, 0),
        (sequence, nothing, 2, 0),
        (branches, None, 0, 0),
    ],
)
def test_converted_files(make: Callable[[], Any], how: Any, quantized: int, per_channel: int):
    """Per channel, depthwise, int16x8, float16, dynamic range, loops and branches: every tensor agrees."""
    tf = pytest.importorskip("tensorflow")
    converted = make()
    if how is not None:
        converted.optimizations = [tf.lite.Optimize.DEFAULT]
        how(converted)
    counts = compare_tensors(converted.convert())
    print(make.__name__, how and how.__name__, counts)  # noqa: T201  # shown by pytest -rP
    assert counts["quantized"] >= quantized
    assert counts["per channel"] >= per_channel
