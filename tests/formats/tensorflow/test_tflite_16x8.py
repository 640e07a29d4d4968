"""Ops with int8 or int16 activations: each op of the tables runs in the interpreter, and others stay float."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.measurements import sqnr_db

import graphquant as gq
from graphquant.formats.tensorflow import tflite_16x8
from graphquant.formats.tensorflow.tflite_16x8 import quantize_pairs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

tf = pytest.importorskip("tensorflow")

LIMIT = 4.0  # the range of all activations, in real units
BITS = 16  # those of activations; some tests set 8


@pytest.fixture(params=[16, 8])
def bits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Set the bits of the activations of a test."""
    monkeypatch.setitem(globals(), "BITS", request.param)
    return int(request.param)


def rounded(x: Any, limit: float = LIMIT) -> Any:
    """Return a tensor behind a FakeQuant whose zero point is 0 for int16 and -32 for int8."""
    steps = 1 << (BITS - 1)
    step, low = limit / steps, -steps if BITS == 16 else -96
    return tf.quantization.fake_quant_with_min_max_args(x, low * step, (low + 2 * steps - 1) * step, num_bits=BITS)


def weight(shape: tuple[int, ...]) -> Any:
    """Return a random constant behind a FakeQuant of 8 bits."""
    values = np.random.default_rng(3).uniform(-0.5, 0.5, shape).astype(np.float32)
    return tf.quantization.fake_quant_with_min_max_args(values, -0.5, 0.5, num_bits=8, narrow_range=True)


def turned(x: Any, limit: float = LIMIT) -> Any:
    """Return another activation of the same shape."""
    return rounded(tf.transpose(x, [0, 2, 1, 3]), limit)


def steps(shape: tuple[int, ...]) -> Any:
    """Return a weight that has only multiples of a step, and the largest one in each channel."""
    values = np.random.default_rng(3).integers(-127, 128, shape)
    values[0, 0] = 127
    return (values / 254).astype(np.float32)


def bias(count: int) -> Any:
    """Return a random constant."""
    return np.random.default_rng(4).uniform(-1, 1, count).astype(np.float32)


nn = tf.nn
OPS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "add": ("ADD", lambda x: x + turned(x)),
    "average": ("AVERAGE_POOL_2D", lambda x: nn.avg_pool2d(x, 2, 2, "SAME")),
    "padded_average": ("AVERAGE_POOL_2D", lambda x: nn.avg_pool2d(x, 3, 2, "SAME")),
    "broadcast": ("BROADCAST_TO", lambda x: tf.broadcast_to(x[:, :1], (1, 4, 4, 4))),
    "concat": ("CONCATENATION", lambda x: tf.concat([x, rounded(nn.relu(x), 8.0)], 3)),
    "concat_of_three": (
        "CONCATENATION",
        lambda x: tf.concat([x, turned(nn.relu(x), 8.0), rounded(x * turned(x), 16.0)], 3),
    ),
    "conv": ("CONV_2D", lambda x: nn.relu(nn.conv2d(x, weight((3, 3, 4, 5)), 1, "SAME") + bias(5))),
    "depthwise": (
        "DEPTHWISE_CONV_2D",
        lambda x: nn.depthwise_conv2d(x, weight((3, 3, 4, 1)), [1] * 4, "SAME") + bias(4),
    ),
    "dense": ("FULLY_CONNECTED", lambda x: tf.matmul(tf.reshape(x, (1, 64)), weight((64, 3)))),
    "gather": ("GATHER", lambda x: tf.gather(x, [1, 0], axis=1)),
    "gather_nd": ("GATHER_ND", lambda x: tf.gather_nd(x, [[0, 1], [0, 0]])),
    "leaky": ("LEAKY_RELU", nn.leaky_relu),
    "logistic": ("LOGISTIC", tf.sigmoid),
    "maximum": ("MAXIMUM", lambda x: tf.maximum(x, turned(x))),
    "max_pool": ("MAX_POOL_2D", lambda x: nn.max_pool2d(x, 2, 2, "SAME")),
    "mean": ("MEAN", lambda x: tf.reduce_mean(x, [1, 2])),
    "minimum": ("MINIMUM", lambda x: tf.minimum(x, turned(x))),
    "mirror": ("MIRROR_PAD", lambda x: tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], mode="REFLECT")),
    "mul": ("MUL", lambda x: x * turned(x, 2 * LIMIT)),
    "pack": ("PACK", lambda x: tf.stack([x, x])),
    "pad": ("PAD", lambda x: tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])),
    "product": ("BATCH_MATMUL", lambda x: tf.matmul(x, rounded(tf.transpose(x, [0, 1, 3, 2])))),
    "reduce_max": ("REDUCE_MAX", lambda x: tf.reduce_max(x, [1, 2])),
    "reduce_min": ("REDUCE_MIN", lambda x: tf.reduce_min(x, [1, 2])),
    "relu": ("RELU", lambda x: nn.relu(tf.transpose(x, [0, 2, 1, 3]))),
    "reshape": ("RESHAPE", lambda x: tf.reshape(x, (2, 32))),
    "bilinear": ("RESIZE_BILINEAR", lambda x: tf.image.resize(x, (8, 8))),
    "nearest": ("RESIZE_NEAREST_NEIGHBOR", lambda x: tf.image.resize(x, (8, 8), method="nearest")),
    "select": ("SELECT_V2", lambda x: tf.where(np.arange(4) > 1, x, turned(x))),
    "slice": ("SLICE", lambda x: tf.slice(x, [0, 1, 0, 0], [1, 2, 2, 2])),
    "softmax": ("SOFTMAX", nn.softmax),
    "split": ("SPLIT", lambda x: tf.add(*[rounded(part) for part in tf.split(x, 2, 3)])),
    "split_v": ("SPLIT_V", lambda x: rounded(tf.split(x, [1, 3], 3)[1])),
    "strided": ("STRIDED_SLICE", lambda x: x[:, ::2]),
    "sub": ("SUB", lambda x: x - turned(x, 2 * LIMIT)),
    "sum": ("SUM", lambda x: tf.reduce_sum(x, [1, 2])),
    "tanh": ("TANH", tf.tanh),
    "transpose": ("TRANSPOSE", lambda x: tf.transpose(x, [0, 2, 1, 3])),
    "transpose_conv": (
        "TRANSPOSE_CONV",
        lambda x: nn.conv2d_transpose(x, steps((3, 3, 3, 4)), (1, 8, 8, 3), 2),
    ),
    "unpack": ("UNPACK", lambda x: tf.unstack(x, axis=1)[1]),
}


def run_integers(build: Callable[[Any], Any]) -> tuple[list[str], float, float]:
    """Return the types of the ops that run, and the SQNR in dB and largest error in steps of a small net's output."""
    dtype = np.int16 if BITS == 16 else np.int8
    net = tf.function(
        lambda x: build(rounded(x)) if build in BOUNDED else rounded(build(rounded(x)), 4 * LIMIT),
        input_signature=[tf.TensorSpec((1, 4, 4, 4))],
    )
    data = tf.lite.TFLiteConverter.from_concrete_functions([net.get_concrete_function()]).convert()
    made = tf.lite.Interpreter(
        model_content=quantize_pairs(data, bits=BITS, integer_inputs=True, integer_outputs=True),
        experimental_op_resolver_type=tf.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    made.allocate_tensors()
    (source,), (target,) = made.get_input_details(), made.get_output_details()
    assert {source["dtype"], target["dtype"]} == {dtype}
    x = np.random.default_rng(5).uniform(-3, 3, (1, 4, 4, 4)).astype(np.float32)
    scale, zero = source["quantization"]
    made.set_tensor(source["index"], (np.rint(x / scale) + zero).astype(dtype))
    made.invoke()
    scale, zero = target["quantization"]
    result = (made.get_tensor(target["index"]).astype(np.float64) - zero) * scale
    expected = net(x).numpy()
    types = [op["op_name"] for op in made._get_ops_details()]
    return types, sqnr_db(expected, result), float(np.abs(expected - result).max() / scale)


BOUNDED = {OPS[name][1] for name in ("logistic", "softmax", "tanh")}


@pytest.mark.parametrize("name", OPS)
def test_kernels_exist_and_agree_with_float(name: str, bits: int) -> None:
    """The op runs on integers in the interpreter, without a DEQUANTIZE, and its result is that of TensorFlow."""
    op_type, build = OPS[name]
    types, sqnr, steps = run_integers(build)
    assert op_type in types
    assert "DEQUANTIZE" not in types
    assert sqnr >= 60 if bits == 16 else steps < 1.01


def test_every_op_of_the_tables_is_tested() -> None:
    """Each op type that may run on int16 has a case, except those that TensorFlow's converter makes reshapes."""
    tables = tflite_16x8._BOUNDED_OPS | tflite_16x8._SAME_SCALE_OPS | tflite_16x8._SCALING_OPS
    tested = {op_type for op_type, _ in OPS.values()}
    assert {*tables, *tflite_16x8._WEIGHTED_OPS} - tested == {"EXPAND_DIMS", "SQUEEZE"}


def coarse_zeros() -> Any:
    """Return zeros with 2**16 times the scale of the outputs of `run_integers`."""
    return rounded(np.zeros(4, np.float32), 2**16 * 4 * LIMIT)


@pytest.mark.parametrize(
    "build",
    [
        nn.elu,
        lambda x: nn.relu6(tf.transpose(x, [0, 2, 1, 3])),
        lambda x: tf.tile(x, (1, 2, 1, 1)),
        lambda x: x + coarse_zeros(),
        lambda x: x - coarse_zeros(),
    ],
)
def test_ops_without_a_kernel_stay_float(build: Callable[[Any], Any]) -> None:
    """An op that has no int16 kernel for its inputs gets floats, and the file runs."""
    types, sqnr, _ = run_integers(build)
    assert "DEQUANTIZE" in types
    assert sqnr >= 60


@pytest.mark.parametrize(
    "build",
    [
        lambda x: tf.concat([tf.tanh(x), nn.relu(tf.transpose(x, [0, 2, 1, 3]))], 3),
        lambda x: tf.concat([tf.sigmoid(x), rounded(turned(x) * 8, 8 * LIMIT)], 3),
        lambda x: rounded(x + rounded(np.zeros(4, np.float32), 2**21 * LIMIT)),
    ],
)
def test_int8_ops_stay_float_if_ranges_differ(build: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No value is clipped to the range of another input, and no sum aborts the process."""
    monkeypatch.setitem(globals(), "BITS", 8)
    types, _, steps = run_integers(lambda x: nn.elu(build(x)))
    assert "DEQUANTIZE" in types
    assert steps < 1.01


def test_a_real_model_with_joined_heads_is_converted(shared: Path, tmp_path: Path) -> None:
    """The music transcriber joins a Sigmoid with a Relu before a convolution. Each planned tensor keeps its scale."""
    folder = shared / "basic_pitch"
    data = {key: values[:6] for key, values in np.load(folder / "calib.npz").items()}
    result = gq.insert(gq.freeze(gq.load(folder / "saved_model")), rules="tflite", data=data, validate=False)
    path = tmp_path / "net.tflite"
    conversion = gq.convert_to_tflite(result, path)
    assert [(str(line.tensor), line.problem) for line in conversion.tensors if line.problem] == []
    types = {op.name: op.outputs[0].dtype for op in gq.load(path).main.ops() if op.type in {"CONCATENATION", "CONV_2D"}}
    assert types["model_1/concat/concat"] == "float32"  # a Sigmoid and a Relu
    assert sum(dtype == "int8" for dtype in types.values()) == 5
    evaluation = {key: values[:2] for key, values in np.load(folder / "eval.npz").items()}
    outputs = gq.compare(folder / "saved_model", path, evaluation).outputs
    assert min(output.sqnr or 0.0 for output in outputs) >= 25
