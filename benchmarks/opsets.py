"""Insert each shipped rule file into small graphs at each opset, and run the results with the installed onnxruntime.

Fourteen graphs cover the ops that are quantized: conv, depthwise, transposed conv, matmul, gemm; attention, activations
and LayerNorm in single ops; LSTM, If, Loop, a model-local function, and float16. Every result must load and run, or
`insert` must end with an error and exit code 1 or 3. Run it once for each release of onnxruntime::

    python benchmarks/opsets.py [--opsets 7-28] [--graphs conv,lstm] [--rules onnxruntime,weight_only]

It prints the cases by outcome and each case that is wrong, and its exit code is 1 if there is any. A graph that
onnxruntime does not run before quantization either, because it does not know the opset, is not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import graphquant as gq

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
IR_VERSION = 8
"""Every held onnxruntime reads it, and functions exist."""

MIN_SQNR = 10  # in dB

RNG = np.random.default_rng(0)
ERF_OPSET, GEMM_OPSET = 9, 11  # the first opsets with Erf, and with a Gemm without a bias


def weight(name: str, *shape: int) -> onnx.TensorProto:
    """Return a weight with values of a usual size for its shape."""
    scale = np.sqrt(2 / max(1, np.prod(shape[1:])))
    return numpy_helper.from_array((RNG.standard_normal(shape) * scale).astype(np.float32), name)


def value(name: str, *shape: int | str, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """Return the declaration of a graph's input or output."""
    return helper.make_tensor_value_info(name, dtype, shape)


def make_model(
    opset: int,
    nodes: list[onnx.NodeProto],
    shapes: tuple[tuple[int | str, ...], tuple[int | str, ...]],
    weights: list[onnx.TensorProto],
    functions: tuple[onnx.FunctionProto, ...] = (),
) -> onnx.ModelProto:
    """Return a model with the input x and the output y."""
    graph = helper.make_graph(nodes, "g", [value("x", *shapes[0])], [value("y", *shapes[1])], weights)
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid("local", 1)] if functions else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, functions=functions)


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """Return a node that is named after its first output."""
    return helper.make_node(
        kind, inputs.split(), outputs.split(), name=f"n_{outputs.split(maxsplit=1)[0]}", **attributes
    )


def axes_of(opset: int, first: int, name: str, axes: list[int]) -> tuple[str, dict[str, Any], list[onnx.TensorProto]]:
    """Return axes as an input from opset `first` on, else as an attribute: input, attributes, weights."""
    if opset >= first:
        return f" {name}", {}, [numpy_helper.from_array(np.array(axes, np.int64), name)]
    return "", {"axes": axes}, []


def conv(opset: int) -> onnx.ModelProto:
    """Two convolutions with a Relu between them."""
    nodes = [
        node("Conv", "x w1 b1", "c1", pads=[1, 1, 1, 1]),
        node("Relu", "c1", "r1"),
        node("Conv", "r1 w2", "c2"),
        node("Relu", "c2", "y"),
    ]
    return make_model(opset, nodes, (("n", 3, 8, 8), ("n", 4, 8, 8)), [
        weight("w1", 8, 3, 3, 3), weight("b1", 8), weight("w2", 4, 8, 1, 1),
    ])  # fmt: skip


def bare(opset: int) -> onnx.ModelProto:
    """Convolutions and a product, none of which has a bias, so that bias correction adds the first one."""
    product = node("Gemm" if opset >= GEMM_OPSET else "MatMul", "f2 w3", "y")
    nodes = [
        node("Conv", "x w1", "c1", pads=[1, 1, 1, 1]),
        node("Relu", "c1", "r1"),
        node("Conv", "r1 w2", "c2", strides=[2, 2]),
        node("Relu", "c2", "r2"),
        node("Flatten", "r2", "f2"),
        product,
    ]
    return make_model(
        opset,
        nodes,
        (("n", 3, 8, 8), ("n", 5)),
        [weight("w1", 8, 3, 3, 3), weight("w2", 4, 8, 1, 1), weight("w3", 64, 5)],
    )


def depthwise(opset: int) -> onnx.ModelProto:
    """A depthwise and a pointwise convolution, and a residual sum."""
    nodes = [
        node("Conv", "x w1", "c1", pads=[1, 1, 1, 1], group=4),
        node("Conv", "c1 w2", "c2"),
        node("Add", "c2 x", "y"),
    ]
    return make_model(
        opset, nodes, (("n", 4, 8, 8), ("n", 4, 8, 8)), [weight("w1", 4, 1, 3, 3), weight("w2", 4, 4, 1, 1)]
    )


def activations(opset: int) -> onnx.ModelProto:
    """Convolutions with a SiLU, a hard swish and a GELU of single ops between them."""
    nodes = [
        node("Conv", "x w1", "c1"),
        node("Sigmoid", "c1", "s1"),
        node("Mul", "c1 s1", "m1"),
        node("Conv", "m1 w2", "c2"),
        node("HardSigmoid", "c2", "s2", alpha=1 / 6, beta=0.5),
        node("Mul", "c2 s2", "m2"),
        node("Conv", "m2 w2", "c3"),
        node("Mul", "c3 root", "d3"),
        node("Erf" if opset >= ERF_OPSET else "Tanh", "d3", "e3"),
        node("Add", "e3 one", "o3"),
        node("Mul", "c3 o3", "p3"),
        node("Mul", "p3 half", "m3"),
        node("Conv", "m3 w2", "c4"),
        node("Relu", "c4", "y"),
    ]
    values = {"root": 0.5**0.5 if opset >= ERF_OPSET else 0.5, "one": 1.0, "half": 0.5}
    constants = [numpy_helper.from_array(np.float32(value), name) for name, value in values.items()]
    sizes = (("n", 4, 8, 8), ("n", 8, 8, 8))
    return make_model(opset, nodes, sizes, [weight("w1", 8, 4, 1, 1), weight("w2", 8, 8, 1, 1), *constants])


def transposed(opset: int) -> onnx.ModelProto:
    """A transposed convolution and an average over the positions."""
    nodes = [node("ConvTranspose", "x w1", "c1", strides=[2, 2]), node("GlobalAveragePool", "c1", "y")]
    return make_model(opset, nodes, (("n", 4, 4, 4), ("n", 6, 1, 1)), [weight("w1", 4, 6, 2, 2)])


def matmul(opset: int) -> onnx.ModelProto:
    """Two products with a bias and a Sigmoid."""
    nodes = [
        node("MatMul", "x w1", "m1"),
        node("Add", "m1 b1", "a1"),
        node("Sigmoid", "a1", "s1"),
        node("MatMul", "s1 w2", "y"),
    ]
    return make_model(
        opset, nodes, (("n", 5, 16), ("n", 5, 16)), [weight("w1", 16, 16), weight("b1", 16), weight("w2", 16, 16)]
    )


def gemm(opset: int) -> onnx.ModelProto:
    """Two Gemms, one with a transposed weight."""
    nodes = [node("Gemm", "x w1 b1", "g1", transB=1), node("Tanh", "g1", "t1"), node("Gemm", "t1 w2 b2", "y")]
    return make_model(opset, nodes, ((3, 16), (3, 8)), [
        weight("w1", 32, 16), weight("b1", 32), weight("w2", 32, 8), weight("b2", 8),
    ])  # fmt: skip


def attention(opset: int) -> onnx.ModelProto:
    """One head of attention in single ops."""
    weights = [weight(f"w{name}", 16, 16) for name in "qkvo"]
    nodes = [
        *(node("MatMul", f"x w{name}", name) for name in "qkv"),
        node("Transpose", "k", "kt", perm=[0, 2, 1]),
        node("MatMul", "q kt", "scores"),
        node("Div", "scores root", "scaled"),
        node("Softmax", "scaled", "p", axis=2),
        node("MatMul", "p v", "context"),
        node("MatMul", "context wo", "y"),
    ]
    weights.append(numpy_helper.from_array(np.array(4, np.float32), "root"))
    return make_model(opset, nodes, ((2, 6, 16), (2, 6, 16)), weights)


def layernorm(opset: int) -> onnx.ModelProto:
    """A LayerNorm in single ops between two products."""
    axes, attributes, more = axes_of(opset, 18, "last", [-1])
    nodes = [
        node("MatMul", "x w1", "m"),
        node("ReduceMean", f"m{axes}", "mean", keepdims=1, **attributes),
        node("Sub", "m mean", "d"),
        node("Pow", "d two", "sq"),
        node("ReduceMean", f"sq{axes}", "var", keepdims=1, **attributes),
        node("Add", "var eps", "ve"),
        node("Sqrt", "ve", "std"),
        node("Div", "d std", "nd"),
        node("Mul", "nd gamma", "ng"),
        node("Add", "ng beta", "ln"),
        node("MatMul", "ln w2", "y"),
    ]
    scalars = [
        numpy_helper.from_array(np.array(number, np.float32), name) for name, number in (("two", 2), ("eps", 1e-5))
    ]
    weights = [weight("w1", 16, 16), weight("w2", 16, 16), weight("gamma", 16), weight("beta", 16), *scalars, *more]
    return make_model(opset, nodes, (("n", 5, 16), ("n", 5, 16)), weights)


def lstm(opset: int) -> onnx.ModelProto:
    """An LSTM and a product."""
    axes, attributes, more = axes_of(opset, 13, "direction", [1])
    nodes = [
        node("LSTM", "x w r b", "h", hidden_size=8),
        node("Squeeze", f"h{axes}", "hs", **attributes),
        node("MatMul", "hs w2", "y"),
    ]
    weights = [weight("w", 1, 32, 4), weight("r", 1, 32, 8), weight("b", 1, 64), weight("w2", 8, 6), *more]
    return make_model(opset, nodes, ((5, 2, 4), (5, 2, 6)), weights)


def branches(opset: int) -> onnx.ModelProto:
    """An If with a product in each branch; the weight of one of them belongs to the outer graph."""
    bodies = [
        helper.make_graph(
            [node("MatMul", f"x {name}", f"{name}_product"), node("Relu", f"{name}_product", f"{name}_out")],
            name, [], [value(f"{name}_out", 4, 16)], [weight("inner", 16, 16)] if name == "inner" else [],
        )
        for name in ("outer", "inner")
    ]  # fmt: skip
    axes, attributes, more = axes_of(opset, 18, "all", [0, 1])
    nodes = [
        node("ReduceMax", f"x{axes}", "largest", keepdims=0, **attributes),  # far from 0, which is false
        node("Cast", "largest", "flag", to=TensorProto.BOOL),
        node("If", "flag", "chosen", then_branch=bodies[0], else_branch=bodies[1]),
        node("MatMul", "chosen last", "y"),
    ]
    return make_model(opset, nodes, ((4, 16), (4, 16)), [weight("outer", 16, 16), weight("last", 16, 16), *more])


def loop(opset: int) -> onnx.ModelProto:
    """A Loop that multiplies its state by a weight of the outer graph."""
    body = helper.make_graph(
        [node("Identity", "go", "go_on"), node("MatMul", "state w", "product"), node("Tanh", "product", "next")],
        "body",
        [value("i", dtype=TensorProto.INT64), value("go", dtype=TensorProto.BOOL), value("state", 4, 16)],
        [value("go_on", dtype=TensorProto.BOOL), value("next", 4, 16)],
    )
    body.input[0].type.tensor_type.shape.SetInParent()
    nodes = [node("Loop", "turns start x", "end", body=body), node("MatMul", "end w2", "y")]
    weights = [
        weight("w", 16, 16), weight("w2", 16, 16),
        numpy_helper.from_array(np.array(3, np.int64), "turns"), numpy_helper.from_array(np.array(True), "start"),
    ]  # fmt: skip
    return make_model(opset, nodes, ((4, 16), (4, 16)), weights)


def function(opset: int) -> onnx.ModelProto:
    """A model-local function that is called twice with other weights."""
    body = [node("MatMul", "a w", "product"), node("Relu", "product", "b")]
    dense = helper.make_function("local", "Dense", ["a", "w"], ["b"], body, [helper.make_opsetid("", opset)])
    nodes = [node("Dense", "x w1", "d1", domain="local"), node("Dense", "d1 w2", "y", domain="local")]
    return make_model(opset, nodes, ((4, 16), (4, 16)), [weight("w1", 16, 16), weight("w2", 16, 16)], (dense,))


def half(opset: int) -> onnx.ModelProto:
    """A float16 convolution and product between Casts."""
    nodes = [
        node("Cast", "x", "x16", to=TensorProto.FLOAT16),
        node("Conv", "x16 w1", "c1"),
        node("Relu", "c1", "r1"),
        node("Flatten", "r1", "flat"),
        node("MatMul", "flat w2", "m"),
        node("Cast", "m", "y", to=TensorProto.FLOAT),
    ]
    weights = [
        numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name)
        for tensor in (weight("w1", 8, 3, 1, 1), weight("w2", 128, 8))
    ]
    return make_model(opset, nodes, ((2, 3, 4, 4), (2, 8)), weights)


GRAPHS: dict[str, Callable[[int], onnx.ModelProto]] = {
    "conv": conv, "bare": bare, "depthwise": depthwise, "transposed": transposed, "matmul": matmul, "gemm": gemm,
    "attention": attention, "activations": activations,
    "layernorm": layernorm, "lstm": lstm, "if": branches, "loop": loop, "function": function, "float16": half,
}  # fmt: skip


def run(path: Path, samples: NDArray[Any]) -> NDArray[Any]:
    """Run the model on each sample with the installed onnxruntime, and return the outputs.

    One sample of the transposed convolution gives 12 values that an average over 64 positions left near zero. Vitis AI
    ties their scale to that of the average's input, so that they are rounded to a few steps and their error varies.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.stack([session.run(None, {"x": x})[0] for x in samples])


def outcome(model: Path, rules: str, data: Path, samples: NDArray[Any], expected: NDArray[Any]) -> str:
    """Insert one rule file and run the result. An outcome that begins with "wrong" is a defect."""
    target = model.with_name("out.onnx")
    target.unlink(missing_ok=True)
    try:
        result = gq.insert(model, rules=rules, data=str(data), samples=8)
        result.save(target)
    except gq.GraphQuantError as error:
        if target.exists() or error.exit_code not in {1, 3}:
            return f"wrong: exit {error.exit_code}: {error}"
        return f"refused with exit code {error.exit_code}"
    try:
        actual = run(target, samples)
    except Exception as error:  # noqa: BLE001  # onnxruntime's errors have no common class
        if result.unjudged_reason and rules not in {"onnxruntime", "generic"}:
            return "for another backend, and insert says that onnxruntime does not load it"
        return f"wrong: {error}"
    with np.errstate(divide="ignore"):
        sqnr = 10 * np.log10((expected**2).mean() / ((actual - expected) ** 2).mean())
    if not sqnr > MIN_SQNR:  # also if it is not a number
        return f"wrong: {sqnr:.1f} dB"
    return "runs" if result.inserted else "runs, nothing inserted"


def main() -> None:
    """Run all chosen cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opsets", default="7-28")
    parser.add_argument("--graphs", default=",".join(GRAPHS))
    parser.add_argument(
        "--rules", default=",".join(sorted(path.stem for path in ROOT.joinpath("rules").glob("*.toml")))
    )
    arguments = parser.parse_args()
    first, _, last = arguments.opsets.partition("-")
    counts: Counter[str] = Counter()
    onnxruntime.set_default_logger_severity(4)
    print(f"onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        model, data = Path(folder) / "model.onnx", Path(folder) / "data.npz"
        for name in arguments.graphs.split(","):
            for opset in range(int(first), int(last or first) + 1):
                message = GRAPHS[name](opset)
                onnx.save(message, str(model))
                shape = [dim.dim_value or 2 for dim in message.graph.input[0].type.tensor_type.shape.dim]
                samples = RNG.standard_normal((8, *shape)).astype(np.float32)
                np.savez(data, x=samples)
                try:
                    expected = run(model, samples)
                except Exception:  # noqa: BLE001  # onnxruntime's errors have no common class
                    counts["not run before quantization either"] += 1
                    continue
                for rules in arguments.rules.split(","):
                    text = outcome(model, rules, data, samples, expected)
                    counts[text.split(":")[0]] += 1
                    if text.startswith("wrong"):
                        print(f"{name}, opset {opset}, {rules}: {text[:300]}", flush=True)
    for text, count in sorted(counts.items()):
        print(f"{count:6} {text}")
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
