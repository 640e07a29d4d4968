"""Models of the golden plans that `sample_models` does not have: a transformer and an LSTM, in ONNX and TensorFlow.

Weights come from fixed seeds, and TensorFlow is not imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.parser
from encoder_model import write_encoder

from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.values import FunctionName, encode_attr, set_constant, type_number
from graphquant.ir import DataType

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FLOAT, INT32 = DataType("float32"), DataType("int32")
TOKENS, WIDTH, INNER, WORDS, HEADS, CLASSES, STATE = 16, 32, 64, 50, 2, 5, 8


class NodeWriter:
    """Writes nodes of a GraphDef or a FunctionDef, with constants from a fixed seed."""

    def __init__(self, nodes: Any, seed: int = 0) -> None:
        self.nodes = nodes
        self.rng = np.random.default_rng(seed)

    def add(self, op: str, name: str, *inputs: str, **attrs: Any) -> str:
        """Add a node, of float32 if no attribute is given, and return its name."""
        node = self.nodes.add(name=name, op=op, input=inputs)
        for key, value in (attrs or {"T": FLOAT}).items():
            node.attr[key].CopyFrom(encode_attr(value))
        return name

    def constant(self, name: str, value: Any) -> str:
        """Add a Const; integers become int32 and other numbers float32."""
        array = np.asarray(value)
        set_constant(self.nodes.add(name=name, op="Const"), array.astype("i4" if array.dtype.kind == "i" else "f4"))
        return name

    def weight(self, name: str, *shape: int) -> str:
        """Add a Const of random values."""
        return self.constant(name, self.rng.normal(size=shape) / shape[-1] ** 0.5)

    def reshape(self, name: str, source: str, shape: list[int]) -> str:
        """Add a Reshape with its shape."""
        return self.add("Reshape", name, source, self.constant(f"{name}/shape", shape), T=FLOAT, Tshape=INT32)

    def transpose(self, name: str, source: str, order: list[int]) -> str:
        """Add a Transpose with its order."""
        return self.add("Transpose", name, source, self.constant(f"{name}/perm", order), T=FLOAT, Tperm=INT32)

    def mean(self, name: str, source: str, axis: int, *, keep_dims: bool) -> str:
        """Add a Mean over an axis."""
        axes = self.constant(f"{name}/axis", [axis])
        return self.add("Mean", name, source, axes, T=FLOAT, Tidx=INT32, keep_dims=keep_dims)

    def dense(self, name: str, source: str, inputs: int, outputs: int) -> str:
        """Add a dense layer on [N, TOKENS, inputs] as Keras writes it: a product of two axes between Reshapes."""
        flat = self.reshape(f"{name}/flatten", source, [-1, inputs])
        weight = self.weight(f"{name}/kernel", inputs, outputs)
        product = self.add("MatMul", f"{name}/matmul", flat, weight)
        restored = self.reshape(f"{name}/restore", product, [-1, TOKENS, outputs])
        return self.add("BiasAdd", f"{name}/bias_add", restored, self.weight(f"{name}/bias", outputs))

    def layer_norm(self, name: str, source: str) -> str:
        """Add a LayerNorm over the last axis as single ops."""
        mean = self.mean(f"{name}/mean", source, 2, keep_dims=True)
        squares = self.add("SquaredDifference", f"{name}/squares", source, mean)
        variance = self.mean(f"{name}/variance", squares, 2, keep_dims=True)
        shifted = self.add("AddV2", f"{name}/shifted", variance, self.constant(f"{name}/epsilon", 1e-3))
        root = self.add("Rsqrt", f"{name}/rsqrt", shifted)
        gamma = self.constant(f"{name}/gamma", np.linspace(0.5, 1.5, WIDTH))
        scale = self.add("Mul", f"{name}/scale", root, gamma)
        scaled = self.add("Mul", f"{name}/scaled", source, scale)
        scaled_mean = self.add("Mul", f"{name}/scaled_mean", mean, scale)
        beta = self.constant(f"{name}/beta", np.linspace(-0.5, 0.5, WIDTH))
        return self.add("AddV2", f"{name}/out", scaled, self.add("Sub", f"{name}/offset", beta, scaled_mean))

    def attention(self, source: str) -> str:
        """Add self-attention of two heads."""
        heads = [-1, TOKENS, HEADS, WIDTH // HEADS]
        query, key, value = (
            self.transpose(
                f"{name}/heads",
                self.reshape(f"{name}/split", self.dense(name, source, WIDTH, WIDTH), heads),
                [0, 2, 1, 3],
            )
            for name in ("query", "key", "value")
        )
        scores = self.add("BatchMatMulV2", "scores", query, key, T=FLOAT, adj_x=False, adj_y=True)
        scaled = self.add("Mul", "scaled_scores", scores, self.constant("scores/factor", 0.25))
        weights = self.add("Softmax", "attention", scaled)
        context = self.add("BatchMatMulV2", "context", weights, value, T=FLOAT, adj_x=False, adj_y=False)
        joined = self.reshape("context/join", self.transpose("context/tokens", context, [0, 2, 1, 3]), [-1, TOKENS, 32])
        return self.dense("projection", joined, WIDTH, WIDTH)

    def gelu(self, source: str) -> str:
        """Add GELU as single ops."""
        divided = self.add("Mul", "gelu/divided", source, self.constant("gelu/factor", 0.5**0.5))
        erf = self.add("Erf", "gelu/erf", divided)
        raised = self.add("AddV2", "gelu/raised", erf, self.constant("gelu/one", 1.0))
        halved = self.add("Mul", "gelu/halved", source, self.constant("gelu/half", 0.5))
        return self.add("Mul", "gelu/out", halved, raised)

    def embedding(self) -> str:
        """Add an input `ids` [N, TOKENS] and the rows of a table that it names."""
        self.add("Placeholder", "ids", dtype=INT32, shape=(None, TOKENS))
        axis = self.constant("embedding/axis", 0)
        attrs = {"Tparams": FLOAT, "Tindices": INT32, "Taxis": INT32, "batch_dims": 0}
        return self.add("GatherV2", "embedding", self.weight("table", WORDS, WIDTH), "ids", axis, **attrs)

    def classifier(self, source: str, inputs: int) -> None:
        """Add the last dense layer and its Softmax."""
        product = self.add("MatMul", "logits/matmul", source, self.weight("logits/kernel", inputs, CLASSES))
        self.add(
            "Softmax", "probabilities", self.add("BiasAdd", "logits", product, self.weight("logits/bias", CLASSES))
        )


def write_tf_transformer(folder: Path) -> Path:
    """Write one encoder layer with a classifier as a frozen graph."""
    graph = proto.GraphDef()
    graph.versions.producer = 1087
    write = NodeWriter(graph.node)
    x = write.add("AddV2", "positioned", write.embedding(), write.weight("position", TOKENS, WIDTH))
    attended = write.add("AddV2", "residual_1", x, write.attention(write.layer_norm("norm_1", x)))
    inner = write.gelu(write.dense("inner", write.layer_norm("norm_2", attended), WIDTH, INNER))
    x = write.add("AddV2", "residual_2", attended, write.dense("outer", inner, INNER, WIDTH))
    write.classifier(write.mean("pool", x, 1, keep_dims=False), WIDTH)
    path = folder / "transformer.pb"
    path.write_bytes(graph.SerializeToString(deterministic=True))
    return path


def _add_function(graph: Any, name: str, arguments: dict[str, DataType], results: list[str]) -> Any:
    """Add a function whose results have the arguments' types, and return it. `results` are its nodes' outputs."""
    function = graph.library.function.add()
    function.signature.name = name
    for key, dtype in arguments.items():
        function.signature.input_arg.add(name=key, type=type_number(dtype))
    dtypes = list(arguments.values()) if len(results) > 1 else [DataType("bool")]
    for number, (result, dtype) in enumerate(zip(results, dtypes, strict=True)):
        function.signature.output_arg.add(name=f"result_{number}", type=type_number(dtype))
        function.ret[f"result_{number}"] = result
    return function


def write_tf_lstm(folder: Path) -> Path:
    """Write an LSTM as Keras does, with a While over the tokens, as a frozen graph."""
    graph = proto.GraphDef()
    graph.versions.producer = 1087
    write = NodeWriter(graph.node)
    steps = write.transpose("time_major", write.embedding(), [1, 0, 2])
    step = write.constant("step", 0)
    rows = write.add("Shape", "rows", "ids", T=INT32, out_type=INT32)
    ends = [write.constant(f"rows/{name}", [value]) for name, value in (("begin", 0), ("end", 1), ("stride", 1))]
    attrs = {"T": INT32, "Index": INT32, "shrink_axis_mask": 1}
    count = write.add("StridedSlice", "count", rows, *ends, **attrs)
    size = write.add("Pack", "state/shape", count, write.constant("state/width", STATE), N=2, T=INT32, axis=0)
    state = write.add("Fill", "state", size, write.constant("state/value", 0.0), T=FLOAT, index_type=INT32)
    weights = [write.weight("kernel", WIDTH, 4 * STATE), write.weight("recurrent_kernel", STATE, 4 * STATE)]
    arguments = {"i": INT32, **dict.fromkeys(("h", "c", "x", "k", "r", "b"), FLOAT)}
    inputs = (step, state, state, steps, *weights, write.weight("bias", 4 * STATE))
    loop = {"T": list(arguments.values()), "cond": FunctionName("lstm_cond"), "body": FunctionName("lstm_body")}
    write.add("StatelessWhile", "lstm", *inputs, **loop, output_shapes=[])
    write.classifier("lstm:1", STATE)

    condition = NodeWriter(_add_function(graph, "lstm_cond", arguments, ["less:z:0"]).node_def)
    condition.add("Less", "less", "i", f"{condition.constant('count', TOKENS)}:output:0", T=INT32)
    results = ["next:z:0", "h_new:z:0", "c_new:z:0", "x", "k", "r", "b"]
    body = NodeWriter(_add_function(graph, "lstm_body", arguments, results).node_def)
    attrs = {"Tparams": FLOAT, "Tindices": INT32, "Taxis": INT32, "batch_dims": 0}
    body.add("GatherV2", "token", "x", "i", f"{body.constant('axis', 0)}:output:0", **attrs)
    body.add("MatMul", "of_input", "token:output:0", "k")
    body.add("MatMul", "of_state", "h", "r")
    body.add("AddV2", "sum", "of_input:product:0", "of_state:product:0")
    body.add("BiasAdd", "biased", "sum:z:0", "b")
    body.add("Split", "gates", f"{body.constant('gate_axis', 1)}:output:0", "biased:output:0", T=FLOAT, num_split=4)
    for number, name in ((0, "input"), (1, "forget"), (3, "output")):
        body.add("Sigmoid", f"{name}_gate", f"gates:output:{number}")
    body.add("Tanh", "candidate", "gates:output:2")
    body.add("Mul", "kept", "forget_gate:y:0", "c")
    body.add("Mul", "added", "input_gate:y:0", "candidate:y:0")
    body.add("AddV2", "c_new", "kept:z:0", "added:z:0")
    body.add("Tanh", "activated", "c_new:z:0")
    body.add("Mul", "h_new", "output_gate:y:0", "activated:y:0")
    body.add("AddV2", "next", "i", f"{body.constant('one', 1)}:output:0", T=INT32)
    path = folder / "lstm.pb"
    path.write_bytes(graph.SerializeToString(deterministic=True))
    return path


LSTM_TEXT = """<ir_version: 8, opset_import: ["": 13]>
net (int64[batch, 16] ids) => (float[batch, 5] probabilities) {
    embedding = Gather(table, ids) steps = Transpose<perm = [1, 0, 2]>(embedding)
    all, last, cell = LSTM<hidden_size = 8, direction = "bidirectional">(steps, kernel, recurrent, bias)
    rows = Transpose<perm = [1, 0, 2]>(last) state = Reshape(rows, flat)
    logits = Gemm(state, weight, offset) probabilities = Softmax<axis = -1>(logits)
}"""


def write_onnx_lstm(folder: Path) -> Path:
    """Write a bidirectional LSTM with a classifier as ONNX."""
    rng = np.random.default_rng(0)
    shapes = {
        "table": (WORDS, WIDTH),
        "kernel": (2, 4 * STATE, WIDTH),
        "recurrent": (2, 4 * STATE, STATE),
        "bias": (2, 8 * STATE),
        "weight": (2 * STATE, CLASSES),
        "offset": (CLASSES,),
    }
    message = onnx.parser.parse_model(LSTM_TEXT)
    for name, shape in shapes.items():
        value = rng.normal(size=shape) / shape[-1] ** 0.5
        message.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    message.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 2 * STATE]), "flat"))
    for node in message.graph.node:
        node.name = node.output[0]
    onnx.save(onnx.shape_inference.infer_shapes(message), folder / "lstm.onnx")
    return folder / "lstm.onnx"


def write_onnx_transformer(folder: Path) -> Path:
    """Write one layer of the encoder as ONNX."""
    return write_encoder(folder, layers=1)[0]


WRITERS: dict[str, Callable[[Path], Path]] = {
    "transformer.onnx": write_onnx_transformer,
    "transformer.pb": write_tf_transformer,
    "lstm.onnx": write_onnx_lstm,
    "lstm.pb": write_tf_lstm,
}
"""Functions that write the models into a folder and return the path, by the name in the golden files."""
