"""Share of ops that `graphquant check --for onnxruntime` traces right, on models that graphquant quantized.

Run: python benchmarks/oracle.py [--rules NAME] [--models FOLDER] [NAME...]
Each model is quantized with random data, judged, and loaded by onnxruntime. The ops of its optimized model, found by
name, are the truth. The models: those of sample_models, those in FOLDER, the light_* nets of the onnx package with
seeded random weights, a transformer and an LSTM made here. NAMEs choose some of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.parser

import graphquant as gq
from graphquant.backends import check_quantized_model

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
SPEC = importlib.util.spec_from_file_location("run_onnxruntime", ROOT / "tests/backends/run_onnxruntime.py")
truth: Any = importlib.util.module_from_spec(SPEC)  # type: ignore[arg-type]  # the file is there
SPEC.loader.exec_module(truth)  # type: ignore[union-attr]  # the same

LIMIT = 0.98
"""The share of ops that must be judged right."""


def light(path: Path) -> Any:
    """A net of the onnx package, whose weights are written as shapes, with seeded random ones."""
    message = onnx.load(path)
    rng = np.random.default_rng(0)
    graph = message.graph
    shapes = {value.name: onnx.numpy_helper.to_array(value) for value in graph.initializer}
    readers = {name: (node.op_type, slot) for node in graph.node for slot, name in enumerate(node.input)}
    kept = [node for node in graph.node if node.op_type != "ConstantOfShape"]
    for node in graph.node:
        if node.op_type == "ConstantOfShape":
            name, shape = node.output[0], shapes[node.input[0]]
            graph.initializer.append(onnx.numpy_helper.from_array(_weight(rng, readers.get(name), shape), name))
    del graph.node[:]
    graph.node.extend(kept)
    message.ir_version = max(message.ir_version, 4)  # before, initializers had to be inputs too
    return message


def _weight(rng: np.random.Generator, reader: tuple[str, int] | None, shape: Any) -> Any:
    """Values that keep activations of the size they come in; variances are positive."""
    values = rng.standard_normal(shape.tolist()).astype(np.float32)
    if reader is not None and reader[0] == "BatchNormalization":
        return np.abs(values) + 0.5 if reader[1] in {1, 4} else values * 0.1
    fan = int(np.prod(shape[1:])) if len(shape) > 1 else 100
    return values * np.float32((2 / fan) ** 0.5)


def transformer(layers: int = 2, width: int = 32, heads: int = 4, length: int = 16, hidden: int = 64) -> Any:
    """An encoder: attention, layer normalisation, a GELU of Erf, and a head."""
    size = width // heads
    lines = []
    for layer in range(layers):
        here, into = ("x" if layer == 0 else f"out{layer - 1}"), f"_{layer}"
        for name in "qkv":
            lines.append(
                f"{name}m{into} = MatMul({here}, w{name}{into}) {name}a{into} = Add({name}m{into}, b{name}{into})"
            )
            lines.append(f"{name}r{into} = Reshape({name}a{into}, split)")
            perm = "[0, 2, 3, 1]" if name == "k" else "[0, 2, 1, 3]"
            lines.append(f"{name}t{into} = Transpose<perm = {perm}>({name}r{into})")
        lines.append(f"""
            qk{into} = MatMul(qt{into}, kt{into})   scaled{into} = Mul(qk{into}, eighth)
            soft{into} = Softmax<axis = -1>(scaled{into})   mixed{into} = MatMul(soft{into}, vt{into})
            back{into} = Transpose<perm = [0, 2, 1, 3]>(mixed{into})   joined{into} = Reshape(back{into}, join)
            om{into} = MatMul(joined{into}, wo{into})   oa{into} = Add(om{into}, bo{into})
            sum{into} = Add({here}, oa{into})   norm{into} = LayerNormalization<axis = -1>(sum{into}, g{into}, h{into})
            up{into} = MatMul(norm{into}, wup{into})   upb{into} = Add(up{into}, bup{into})
            ga{into} = Div(upb{into}, root)   gb{into} = Erf(ga{into})   gc{into} = Add(gb{into}, one)
            gd{into} = Mul(upb{into}, gc{into})   ge{into} = Mul(gd{into}, half)
            down{into} = MatMul(ge{into}, wdn{into})   downb{into} = Add(down{into}, bdn{into})
            res{into} = Add(norm{into}, downb{into})
            out{layer} = LayerNormalization<axis = -1>(res{into}, g{into}, h{into})
        """)
    body = f"{' '.join(lines)} y = MatMul(out{layers - 1}, whead)"
    ends = f"(float[1,{length},{width}] x) => (float[1,{length},10] y)"
    message = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {ends} {{ {body} }}')
    rng = np.random.default_rng(0)
    values = {
        "split": np.array([1, length, heads, size]),
        "join": np.array([1, length, width]),
        "eighth": np.float32(size**-0.5),
        "root": np.float32(2**0.5),
        "one": np.float32(1),
        "half": np.float32(0.5),
        "whead": _weight(rng, None, np.array([width, 10])),
    }
    for layer in range(layers):
        for name in ("wq", "wk", "wv", "wo"):
            values[f"{name}_{layer}"] = _weight(rng, None, np.array([width, width]))
        for name in ("bq", "bk", "bv", "bo", "bdn", "g", "h"):
            values[f"{name}_{layer}"] = _weight(rng, None, np.array([width])) + np.float32(name == "g")
        values[f"wup_{layer}"], values[f"bup_{layer}"] = (
            _weight(rng, None, np.array(s)) for s in ([width, hidden], [hidden])
        )
        values[f"wdn_{layer}"] = _weight(rng, None, np.array([hidden, width]))
    return _filled(message, values)


def lstm() -> Any:
    """An LSTM between two matrix products, with a convolution in front."""
    body = """
        c = Conv<pads = [1, 1]>(x, wc, bc)   r = Relu(c)   t = Transpose<perm = [2, 0, 1]>(r)
        h, last = LSTM<hidden_size = 16>(t, w, u, b)   s = Squeeze(last, zero)
        m = MatMul(s, wm)   a = Add(m, bm)   p = Relu(a)   y = Gemm(p, wg, bg)
    """
    message = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 14]> g (float[1,8,20] x) => (float[1,4] y) {{ {body} }}'
    )
    rng = np.random.default_rng(0)
    sizes = {
        "wc": [12, 8, 3],
        "bc": [12],
        "w": [1, 64, 12],
        "u": [1, 64, 16],
        "b": [1, 128],
        "wm": [16, 24],
        "bm": [24],
        "wg": [24, 4],
        "bg": [4],
    }
    values = {name: _weight(rng, None, np.array(size)) for name, size in sizes.items()}
    return _filled(message, values | {"zero": np.array([0])})


def _filled(message: Any, values: dict[str, Any]) -> Any:
    message.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), name) for name, v in values.items())
    return message


def models(folder: Path | None) -> dict[str, tuple[Callable[[], Any], str]]:
    """Return functions that create each model and its calibration data, by name."""
    files = sorted(path for path in (ROOT / "sample_models").glob("*.onnx") if ".quant" not in path.suffixes)
    files += sorted(folder.rglob("*.onnx")) if folder is not None and folder.is_dir() else []
    found: dict[str, tuple[Callable[[], Any], str]] = {
        path.stem: (partial(onnx.load, path), _data(path)) for path in files
    }
    found |= {path.stem: (partial(light, path), "random:1") for path in sorted(LIGHT.glob("*.onnx"))}
    return found | {"transformer": (transformer, "random:1"), "lstm": (lstm, "random:1")}


def _data(path: Path) -> str:
    """Data that lies beside a model and is called like it, or random data."""
    beside = [
        data for data in sorted(path.parent.glob("*.npz")) if path.stem.startswith(data.stem.removesuffix("_calib"))
    ]
    return str(beside[0]) if beside else "random:1"


def judge(message: Any, data: str, rules: list[str], folder: Path) -> tuple[int, int, list[str]]:
    """Quantizes a model; gives the ops judged, how many of them run in low precision, and what was judged wrong."""
    truth.name_ops(message)
    onnx.save(message, folder / "float.onnx")
    result = gq.insert(folder / "float.onnx", rules=rules, data=data, samples=1)
    path = result.save(folder / "quantized.onnx")
    written = onnx.load(path)
    for graph in (written.graph, *written.functions):
        for node in truth.all_nodes(graph):
            node.name = node.name or node.output[0]
    onnx.save(written, path)
    verdicts = check_quantized_model(gq.load(path), "onnxruntime").verdicts
    actual = truth.of_functions(truth.runs_as(truth.optimized(path)), [one.name for one in written.functions])
    wrong = truth.differences(verdicts, actual)
    return len(verdicts), sum(verdict.status != "float" for verdict in verdicts), wrong


def main() -> None:
    """Prints a line for each model and each op that was judged wrong; fails if too many were."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--rules", action="append", default=[])
    parser.add_argument("--models", type=Path)
    options = parser.parse_args()
    ops, right = 0, 0
    print(f"{'model':28} {'ops':>6} {'low':>6} {'wrong':>6} {'right':>8}")
    for name, (make, data) in models(options.models).items():
        if options.names and name not in options.names:
            continue
        with TemporaryDirectory() as folder:
            judged, low, wrong = judge(make(), data, options.rules, Path(folder))
        ops, right = ops + judged, right + judged - len(wrong)
        print(f"{name:28} {judged:6} {low:6} {len(wrong):6} {1 - len(wrong) / judged:8.2%}", flush=True)
        for line in wrong:
            print(f"    {line}")
    print(f"{right} of {ops} ops judged right: {right / ops:.2%}")
    sys.exit(right / ops < LIMIT)


if __name__ == "__main__":
    main()
