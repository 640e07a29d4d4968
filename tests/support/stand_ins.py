"""Small models with the structure of real ones and seeded weights, for machines without the folder of shared models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import helper, numpy_helper
from PIL import Image
from support.tflite_files import Writer, code, ints

from graphquant.formats.tensorflow import proto

ONNX_STAND_INS = [
    Path(name) for name in ("qlstm_tract.onnx", "silero_vad_16k_op15.onnx", "ultraface/version-RFB-320.onnx")
]
"""Paths of ONNX models in the folder that `write_stand_ins` writes."""

FACE_DETECTOR = """<ir_version: 3, opset_import: ["" : 9]>
detector (float[1,3,24,32] input) => (float[1,96,2] scores, float[1,96,4] boxes) {
    c1 = Conv <pads = [1,1,1,1], strides = [2,2]> (input, w1)
    n1 = BatchNormalization (c1, g1, b1, m1, v1)
    r1 = Relu (n1)
    c2 = Conv <pads = [1,1,1,1], strides = [2,2], group = 8> (r1, w2)
    n2 = BatchNormalization (c2, g2, b2, m2, v2)
    r2 = Relu (n2)
    c3 = Conv (r2, w3, b3)
    r3 = Relu (c3)
    class_map = Conv <pads = [1,1,1,1]> (r3, w4, b4)
    class_rows = Transpose <perm = [0,2,3,1]> (class_map)
    logits = Reshape (class_rows, pairs)
    scores = Softmax <axis = 2> (logits)
    box_map = Conv <pads = [1,1,1,1]> (r3, w5, b5)
    box_rows = Transpose <perm = [0,2,3,1]> (box_map)
    offsets = Reshape (box_rows, fours)
    centers = Slice <axes = [2], starts = [0], ends = [2]> (offsets)
    sizes = Slice <axes = [2], starts = [2], ends = [4]> (offsets)
    moved = Mul (centers, variance)
    grown = Exp (sizes)
    boxes = Concat <axis = 2> (moved, grown)
}"""
"""A detector of opset 9 with BatchNorms, a depthwise convolution and decoded boxes."""

SPEECH_DETECTOR = """<ir_version: 8, opset_import: ["" : 15]>
speech (float[N,64] input, float[1,N,8] state, int64 sr) => (float[N,1] output, float[1,N,8] next) {
    rate = Constant <value = int64 {16000}> ()
    fast = Equal (sr, rate)
    features = If (fast) <
        then_branch = wide () => (float[N,8,M] wide_out) {
            wide_in = Unsqueeze (input, one)
            wide_conv = Conv <strides = [4]> (wide_in, wide_w, wide_b)
            wide_out = Relu (wide_conv)
        },
        else_branch = narrow () => (float[N,8,M] narrow_out) {
            narrow_in = Unsqueeze (input, one)
            narrow_conv = Conv <strides = [2]> (narrow_in, narrow_w, narrow_b)
            narrow_out = Relu (narrow_conv)
        }
    >
    steps = Transpose <perm = [2,0,1]> (features)
    first_gates = Slice (gates, eight, end, one)
    other_gates = Slice (gates, zero, eight, one)
    lstm_w = Concat <axis = 1> (first_gates, other_gates)
    hidden, next, cell = LSTM <hidden_size = 8> (steps, lstm_w, lstm_r, lstm_b, no_lengths, state)
    last = Squeeze (next, zero)
    active = Relu (last)
    logit = Gemm <transB = 1> (active, head_w, head_b)
    output = Sigmoid (logit)
}"""
"""A detector with one branch for each sample rate, convolutions of one axis, and an LSTM with joined weights."""

QUANTIZED_CELL = """<ir_version: 8, opset_import: ["" : 13]>
recurrent (float[5,4] x, float[1,8] state) => (float[1,8] last, float[5,1,8] y) {
    last, y = Scan <num_scan_inputs = 1, body = cell (float[1,8] h, float[4] e) => (float[1,8] after, float[1,8] out) {
        batch = Unsqueeze (e, zero)
        joined = Concat <axis = 1> (batch, h)
        joined_q = QuantizeLinear (joined, scale, zero_point)
        joined_dq = DequantizeLinear (joined_q, scale, zero_point)
        w_dq = DequantizeLinear (w, w_scale, w_zero)
        gates = MatMul (joined_dq, w_dq)
        gates_q = QuantizeLinear (gates, scale, zero_point)
        gates_dq = DequantizeLinear (gates_q, scale, zero_point)
        update, value = Split <axis = 1> (gates_dq)
        keep = Sigmoid (update)
        new = Tanh (value)
        change = Sub (new, h)
        step = Mul (keep, change)
        after = Add (h, step)
        out = Identity (after)
    }> (state, x)
}"""
"""A recurrent cell in a Scan that another tool quantized."""

LOOP_DETECTOR = """
image = Placeholder
rounds = Placeholder int32
threshold = Placeholder
start = Const int32
w/zero = Const
w/slope = Const
w/conv1/read = Identity w/conv1
w/conv2/read = Identity w/conv2
w/conv3/read = Identity w/conv3
w/conv4/read = Identity w/conv4
net/while/Enter = Enter int32 start
net/while/Enter_1 = Enter image
net/while/rounds = Enter int32 constant rounds
net/while/conv1/Enter = Enter constant w/conv1/read
net/while/conv2/Enter = Enter constant w/conv2/read
net/while/zero = Enter constant w/zero
net/while/slope = Enter constant w/slope
net/while/Merge = Merge int32 net/while/Enter net/while/NextIteration
net/while/Merge_1 = Merge net/while/Enter_1 net/while/NextIteration_1
net/while/Less = Less int32 net/while/Merge net/while/rounds
net/while/LoopCond = LoopCond net/while/Less
net/while/Switch = Switch int32 net/while/Merge net/while/LoopCond
net/while/Switch_1 = Switch net/while/Merge_1 net/while/LoopCond
net/while/Identity = Identity int32 net/while/Switch:1
net/while/Identity_1 = Identity net/while/Switch_1:1
net/while/one = Const int32 ^net/while/Identity
net/while/add = Add int32 net/while/Identity net/while/one
net/while/conv1/Conv2D = Conv2D net/while/Identity_1 net/while/conv1/Enter
net/while/Greater = Greater net/while/conv1/Conv2D net/while/zero
net/while/Mul = Mul net/while/conv1/Conv2D net/while/slope
net/while/Select = Select net/while/Greater net/while/conv1/Conv2D net/while/Mul
net/while/pool1/MaxPool = MaxPool net/while/Select
net/while/conv2/Conv2D = Conv2D net/while/pool1/MaxPool net/while/conv2/Enter
net/while/skip/Conv2D = Conv2D net/while/Select net/while/conv1/Enter
net/while/sum = Add net/while/conv2/Conv2D net/while/skip/Conv2D
net/while/Relu6 = Relu6 net/while/sum
net/while/NextIteration = NextIteration int32 net/while/add
net/while/NextIteration_1 = NextIteration net/while/Relu6
net/while/Exit = Exit int32 net/while/Switch
net/while/Exit_1 = Exit net/while/Switch_1
axes = Const int32
mean = Mean net/while/Exit_1 axes
large = Greater mean threshold
head/cond/Switch = Switch net/while/Exit_1 large
head/cond/pool3/MaxPool = MaxPool head/cond/Switch:1
head/cond/conv3/Switch = Switch w/conv3/read large
head/cond/conv3/Conv2D = Conv2D head/cond/pool3/MaxPool head/cond/conv3/Switch:1
head/cond/conv4/Switch = Switch w/conv4/read large
head/cond/conv4/Conv2D = Conv2D head/cond/Switch head/cond/conv4/Switch
head/cond/Merge = Merge head/cond/conv4/Conv2D head/cond/conv3/Conv2D
prob = Softmax head/cond/Merge
"""
"""A TensorFlow 1 graph with a loop and a conditional of Enter, Switch and Merge, which the weights enter."""


def _weights(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {
        name: (rng.standard_normal(shape) / np.sqrt(max(1, np.prod(shape[1:])))).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_face_detector(path: Path) -> Path:
    """Write `FACE_DETECTOR` with initializers that are also inputs, as before IR version 4."""
    rng = np.random.default_rng(5)
    message = onnx.parser.parse_model(FACE_DETECTOR)
    shapes: dict[str, tuple[int, ...]] = {
        "w1": (8, 3, 3, 3), "w2": (8, 1, 3, 3), "w3": (16, 8, 1, 1), "b3": (16,), "w4": (4, 16, 3, 3), "b4": (4,),
        "w5": (8, 16, 3, 3), "b5": (8,), "b1": (8,), "m1": (8,), "b2": (8,), "m2": (8,),
    }  # fmt: skip
    values = _weights(rng, shapes)
    values |= {name: rng.uniform(0.5, 2, 8).astype(np.float32) for name in ("g1", "v1", "g2", "v2")}
    values |= {"pairs": np.array([1, -1, 2]), "fours": np.array([1, -1, 4]), "variance": np.float32(0.1)}
    for name, value in values.items():
        tensor = numpy_helper.from_array(np.asarray(value), name)
        message.graph.initializer.append(tensor)
        message.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    onnx.checker.check_model(message, full_check=True)
    onnx.save(message, path)
    return path


def write_speech_detector(path: Path) -> Path:
    """Write `SPEECH_DETECTOR`."""
    message = onnx.parser.parse_model(SPEECH_DETECTOR)
    shapes: dict[str, tuple[int, ...]] = {
        "wide_w": (8, 1, 8), "wide_b": (8,), "narrow_w": (8, 1, 4), "narrow_b": (8,), "gates": (1, 32, 8),
        "lstm_r": (1, 32, 8), "lstm_b": (1, 64), "head_w": (1, 8), "head_b": (1,),
    }  # fmt: skip
    values = _weights(np.random.default_rng(6), shapes) | {
        "one": np.array([1]), "zero": np.array([0]), "eight": np.array([8]), "end": np.array([32]),
    }  # fmt: skip
    message.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    for node in message.graph.node:
        node.input[:] = ["" if name == "no_lengths" else name for name in node.input]
    onnx.save(message, path)
    return path


def write_quantized_cell(path: Path) -> Path:
    """Write `QUANTIZED_CELL`."""
    message = onnx.parser.parse_model(QUANTIZED_CELL)
    values = {
        "w": np.random.default_rng(7).integers(-127, 128, (12, 16), np.int8), "w_scale": np.float32(1 / 256),
        "w_zero": np.int8(0), "scale": np.float32(1 / 16), "zero_point": np.uint8(128), "zero": np.array([0]),
    }  # fmt: skip
    message.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in values.items())
    onnx.checker.check_model(message, full_check=True)
    onnx.save(message, path)
    return path


LOOP_ATTRS = {
    "Conv2D": {"strides": "list { i: [1, 1, 1, 1] }", "padding": 's: "SAME"'},
    "MaxPool": {"ksize": "list { i: [1, 2, 2, 1] }", "strides": "list { i: [1, 1, 1, 1] }", "padding": 's: "SAME"'},
    "Enter": {"frame_name": 's: "net/while/frame"'},
    "Merge": {"N": "i: 2"},
    "Mean": {"Tidx": "type: DT_INT32"},
}
"""Attributes of the ops in `LOOP_DETECTOR`, in text form."""


def _set_value(tensor: Any, dtype: int, value: np.ndarray) -> None:
    tensor.dtype, tensor.tensor_content = dtype, value.tobytes()
    tensor.tensor_shape.SetInParent()
    for size in value.shape:
        tensor.tensor_shape.dim.add(size=size)


def write_loop_detector(path: Path) -> Path:
    """Write `LOOP_DETECTOR` as a frozen graph."""
    shapes = {"w/conv1": (3, 3, 16, 16), "w/conv2": (3, 3, 16, 16), "w/conv3": (1, 1, 16, 2), "w/conv4": (1, 1, 16, 2)}
    rng = np.random.default_rng(8)
    values = {
        name: rng.normal(0, 1.5 / np.sqrt(np.prod(shape[:-1])), shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    values |= {"w/zero": np.float32(0), "w/slope": np.float32(0.25), "start": np.int32(0)}
    values |= {"net/while/one": np.int32(1), "axes": np.arange(4, dtype=np.int32)}
    message = proto.GraphDef()
    message.versions.producer = 1200
    lines = [f"{name} = Const" for name in shapes] + LOOP_DETECTOR.strip().splitlines()
    for name, _, op, *words in (line.split() for line in lines):
        options = {word for word in words if word in {"int32", "constant"}}
        node = message.node.add(name=name, op=op, input=[word for word in words if word not in options])
        dtype = proto.DataType["DT_INT32" if "int32" in options else "DT_FLOAT"]
        if op != "LoopCond":
            node.attr["dtype" if op in {"Placeholder", "Const"} else "T"].type = dtype
        for key, value in LOOP_ATTRS.get(op, {}).items():
            node.attr[key].MergeFrom(proto.parse_text(value, proto.AttrValue()))
        if op == "Const":
            _set_value(node.attr["value"].tensor, dtype, np.asarray(values[name]))
        if "constant" in options:
            node.attr["is_constant"].b = True
    path.write_bytes(message.SerializeToString())
    return path


def loop_detector_feeds() -> dict[str, np.ndarray]:
    """Return feeds of `LOOP_DETECTOR` that run five iterations, and the first branch."""
    image = np.random.default_rng(9).normal(size=(1, 8, 8, 16)).astype(np.float32)
    return {"image": image, "rounds": np.int32(5), "threshold": np.float32(0)}


def speech_detector_data(count: int) -> dict[str, np.ndarray]:
    """Return samples for `SPEECH_DETECTOR` that run both branches."""
    rng = np.random.default_rng(0)
    return {
        "input": rng.standard_normal((count, 1, 64)).astype(np.float32),
        "state": rng.uniform(-1, 1, (count, 1, 1, 8)).astype(np.float32),
        "sr": np.resize([16000, 8000], count),
    }


def write_cloned_saved_model(source: Path, folder: Path) -> Path:
    """Write a SavedModel of the project with a clone of its function, for Python code that calls the loaded model."""
    shutil.copytree(source, folder)
    path = folder / "saved_model.pb"
    message = proto.parse_binary(path.read_bytes(), proto.SavedModel())
    functions, objects = message.meta_graphs[0].graph_def.library.function, message.meta_graphs[0].object_graph_def
    original = next(function for function in functions if function.signature.name.startswith("__inference_serve_"))
    name = original.signature.name
    clone = functions.add()
    clone.CopyFrom(original)
    clone.signature.name = f"{name}_clone"
    objects.concrete_functions[f"{name}_clone"].CopyFrom(objects.concrete_functions[name])
    for node in objects.nodes:
        if name in node.function.concrete_functions:
            node.function.concrete_functions.append(f"{name}_clone")
    path.write_bytes(message.SerializeToString())
    return folder


def write_quantized_tflite(path: Path) -> Path:
    """Write a quantized TFLite file: a convolution, a depthwise one and a sum, with scales per channel."""
    rng, tensors, buffers = np.random.default_rng(10), [], [{}]

    def add(name: str, *shape: int, channels: int = 1, axis: int = 0, constant: bool = False) -> int:
        quantization = {
            "scale": rng.uniform(0.1, 0.2, channels).astype(np.float32),
            "zero_point": np.full(channels, 0 if constant else -1),
            "quantized_dimension": ("i", axis),
        }
        if constant:
            buffers.append({"data": rng.integers(-127, 128, shape, np.int8)})
        buffer = len(buffers) - 1 if constant else 0
        tensors.append(
            {
                "name": name,
                "shape": ints(*shape),
                "type": ("b", 9),
                "buffer": ("I", buffer),
                "quantization": quantization,
            }
        )
        return len(tensors) - 1

    image, kernel = add("image", 1, 8, 8, 2), add("kernel", 4, 3, 3, 2, channels=4, constant=True)
    first, depthwise = add("first/Relu", 1, 8, 8, 4), add("depthwise", 1, 3, 3, 4, channels=4, axis=3, constant=True)
    second, total = add("second/Relu", 1, 8, 8, 4), add("sum", 1, 8, 8, 4)
    operators = [
        {"opcode_index": ("I", index), "inputs": ints(*inputs), "outputs": ints(output)}
        for index, inputs, output in (
            (0, (image, kernel, -1), first),
            (1, (first, depthwise, -1), second),
            (2, (first, second), total),
        )
    ]
    graph = {"tensors": tensors, "inputs": ints(image), "outputs": ints(total), "operators": operators}
    codes = [code("CONV_2D"), code("DEPTHWISE_CONV_2D"), code("ADD")]
    path.write_bytes(Writer().build({"operator_codes": codes, "buffers": buffers, "subgraphs": [graph]}))
    return path


def write_images(path: Path) -> Path:
    """Write smooth random images of the size of `FACE_DETECTOR`, as uint8 under the key `rgb`."""
    rng = np.random.default_rng(11)
    images = [
        Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8)).resize((32, 24), Image.Resampling.BICUBIC)
        for _ in range(25)
    ]
    np.savez(path, rgb=np.stack([np.asarray(image) for image in images]))
    return path


def write_stand_ins(folder: Path, samples: Path) -> Path:
    """Write a stand-in for each shared model that tests name, at its path in the folder of shared models."""
    for name in ("ultraface", "kws"):
        folder.joinpath(name).mkdir()
    write_face_detector(folder / "ultraface/version-RFB-320.onnx")
    write_images(folder / "ultraface/images.npz")
    write_speech_detector(folder / "silero_vad_16k_op15.onnx")
    np.savez(folder / "silero_vad.npz", **speech_detector_data(60))
    write_quantized_cell(folder / "qlstm_tract.onnx")
    write_loop_detector(folder / "mtcnn.pb")
    write_quantized_tflite(folder / "kws/kws_int8.tflite")
    write_cloned_saved_model(samples / "digits_cnn_saved_model", folder / "kws/saved_model")
    return folder
