"""Accuracy and bytes of weight-only models of 4 bits: graphquant beside onnxruntime's tool and NNCF.

Run: python benchmarks/weights.py --others PYTHON [--model MODEL DATA]
PYTHON is an interpreter with NNCF, torch and onnx_ir, which the other tools need. DATA is an .npz file of samples; its
first two thirds calibrate, and the others measure. All tools use blocks of 32, and no tool quantizes tables. HQQ also
has blocks of 64, with which it needs as few bytes as the others.

SQNR in dB: of the worst output against the float model, on samples that no tool has seen. onnxruntime runs all models
with basic optimizations, so that every kernel multiplies float32 activations, and only the weights differ. Bytes: of
all constants of the written file. Bar: of each other tool, one of our files has at least the SQNR less 0.1 dB, and at
most 1.03 times the bytes. Tools that see data are compared with ours with data, the others with ours without.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime

if TYPE_CHECKING:
    from collections.abc import Callable

Arrays = dict[str, np.ndarray]
BLOCK = 32
SAMPLES = 96
BUDGET = "18%"  # size budget that gives HQQ in blocks of 32 its bytes
MARGIN_DB, MARGIN_SIZE = 0.1, 1.03
"""Differences in decibels and quotients of bytes that do not count."""


def write_model(path: Path, text: str, values: Arrays, opset: int = 21) -> None:
    """Write a model from its text and the values of its initializers."""
    message = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {text}')
    used = {name for node in message.graph.node for name in node.input}
    message.graph.initializer.extend(onnx.numpy_helper.from_array(v, n) for n, v in values.items() if n in used)
    onnx.save(message, path)


def mlp(path: Path, act: str, *, heavy_tails: bool) -> Arrays:
    """Write three products with correlated inputs; return samples."""
    rng = np.random.default_rng(len(act) + heavy_tails)
    sizes = (192, 512, 512, 64)
    values: Arrays = {}
    for index, shape in enumerate(itertools.pairwise(sizes)):
        draw = rng.standard_t(3, shape) / 1.7 if heavy_tails else rng.standard_normal(shape)
        values[f"w{index}"] = (draw / np.sqrt(shape[0])).astype(np.float32)
        values[f"b{index}"] = rng.normal(size=shape[1], scale=0.1).astype(np.float32)
    lines = []
    for i, (source, op) in enumerate((("x", act), ("h0", act), ("h1", "Identity"))):
        lines.append(f"m{i} = MatMul({source}, w{i}) a{i} = Add(m{i}, b{i}) h{i} = {op}(a{i})")
    body = " ".join(lines)
    write_model(path, f"(float[n,192] x) => (float[n,64] h2) {{ {body} }}", values)
    factors = rng.normal(size=(48, sizes[0])) * np.geomspace(4, 0.2, 48)[:, None]
    return {"x": (rng.normal(size=(SAMPLES * 4, 48)) @ factors / 5 + 0.3).astype(np.float32).reshape(SAMPLES, 4, -1)}


def decoder_text(layers: int, length: int, words: int) -> str:
    """Return the text of a decoder in standard ops, as GPT-2 is exported: ids (n, length) to logits."""
    lines = ["e = Gather(wte, ids) r0 = Add(e, wpe)"]
    for i in range(layers):
        lines.append(f"""
            n{i} = LayerNormalization<axis = -1>(r{i}, g{i}, h{i})
            qkv{i} = MatMul(n{i}, wqkv{i}) qkvb{i} = Add(qkv{i}, bqkv{i})
            q{i}, k{i}, v{i} = Split<axis = -1, num_outputs = 3>(qkvb{i})""")
        for part in "qkv":
            lines.append(f"{part}s{i} = Reshape({part}{i}, split)")
            perm = "[0, 2, 3, 1]" if part == "k" else "[0, 2, 1, 3]"
            lines.append(f"{part}t{i} = Transpose<perm = {perm}>({part}s{i})")
        lines.append(f"""
            s{i} = MatMul(qt{i}, kt{i}) sc{i} = Mul(s{i}, root) sm{i} = Add(sc{i}, mask)
            p{i} = Softmax<axis = -1>(sm{i}) c{i} = MatMul(p{i}, vt{i})
            ct{i} = Transpose<perm = [0, 2, 1, 3]>(c{i}) cr{i} = Reshape(ct{i}, join)
            o{i} = MatMul(cr{i}, wo{i}) ob{i} = Add(o{i}, bo{i}) a{i} = Add(r{i}, ob{i})
            z{i} = LayerNormalization<axis = -1>(a{i}, gz{i}, hz{i})
            u{i} = MatMul(z{i}, wup{i}) ub{i} = Add(u{i}, bup{i}) ge{i} = Gelu<approximate = "tanh">(ub{i})
            d{i} = MatMul(ge{i}, wdn{i}) db{i} = Add(d{i}, bdn{i}) r{i + 1} = Add(a{i}, db{i})""")
    lines.append(f"last = LayerNormalization<axis = -1>(r{layers}, gl, hl) logits = MatMul(last, whead)")
    return f"(int64[n,{length}] ids) => (float[n,{length},{words}] logits) {{ {' '.join(lines)} }}"


def decoder_constants(width: int, heads: int, length: int) -> Arrays:
    """Return the constants of a decoder that are no weights."""
    return {
        "split": np.array([-1, length, heads, width // heads]),
        "join": np.array([-1, length, width]),
        "root": np.float32((width // heads) ** -0.5).reshape(()),
        "mask": np.triu(np.full((length, length), -1e4, np.float32), 1),
    }


def decoder(path: Path) -> Arrays:
    """Write a decoder with seeded weights of heavy tails, and channels that LayerNorm makes 10 times larger."""
    layers, width, heads, length, words = 3, 128, 4, 24, 256
    rng = np.random.default_rng(7)
    values = decoder_constants(width, heads, length)

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_t(4, shape) / np.sqrt(2 * shape[0])).astype(np.float32)

    values |= {"wte": rng.normal(size=(words, width)).astype(np.float32), "wpe": draw(length, width) * 2}
    for i in range(layers):
        values |= {f"wqkv{i}": draw(width, 3 * width), f"wo{i}": draw(width, width)}
        values |= {f"wup{i}": draw(width, 4 * width), f"wdn{i}": draw(4 * width, width)}
        sizes = {"bqkv": 3 * width, "bo": width, "bup": 4 * width, "bdn": width, "h": width, "hz": width}
        values |= {f"{name}{i}": rng.normal(size=size, scale=0.1).astype(np.float32) for name, size in sizes.items()}
        for name in ("g", "gz"):
            values[f"{name}{i}"] = np.ones(width, np.float32)
            values[f"{name}{i}"][rng.choice(width, 4, replace=False)] = 10
    values |= {"gl": np.ones(width, np.float32), "hl": np.zeros(width, np.float32), "whead": draw(width, words)}
    write_model(path, decoder_text(layers, length, words), values)
    return {"ids": rng.zipf(1.3, (SAMPLES, 1, length)) % words}


NETS: dict[str, Callable[[Path], Arrays]] = {
    "mlp, Relu, normal": lambda path: mlp(path, "Relu", heavy_tails=False),
    "mlp, Gelu, heavy tails": lambda path: mlp(path, "Gelu", heavy_tails=True),
    "decoder, seeded": decoder,
}


# Each tool writes a model of 4 bits from a float model and calibration samples.


def read_feeds(path: str) -> list[Arrays]:
    """Read the samples of a file; each has the axes of the model's inputs."""
    arrays = dict(np.load(path))
    return [{name: array[i] for name, array in arrays.items()} for i in range(len(next(iter(arrays.values()))))]


def run_onnxruntime(method: str, model: str, _data: str, out: str) -> None:
    """Quantize with onnxruntime's MatMulNBitsQuantizer."""
    from onnxruntime.quantization import matmul_nbits_quantizer as tool

    if "hqq" in method:  # its zero points are float32, so that only larger blocks have as few bytes as the others
        config: Any = tool.HQQWeightOnlyQuantConfig(block_size=64 if "64" in method else BLOCK, bits=4)
    else:
        config = tool.DefaultWeightOnlyQuantConfig(block_size=BLOCK, is_symmetric=method == "symmetric", bits=4)
    quantizer = tool.MatMulNBitsQuantizer(onnx.load(model), algo_config=config)
    quantizer.process()
    quantizer.model.save_model_to_file(out)


def run_nncf(method: str, model: str, data: str, out: str) -> None:
    """Quantize with NNCF's compress_weights."""
    import nncf

    mode = nncf.CompressWeightsMode.INT4_SYM if method.startswith("symmetric") else nncf.CompressWeightsMode.INT4_ASYM
    options: dict[str, Any] = {"mode": mode, "group_size": BLOCK, "ratio": 1.0, "all_layers": True}
    options["ignored_scope"] = nncf.IgnoredScope(types=["Gather"], validate=False)
    if "data" in method:
        options |= {"dataset": nncf.Dataset(read_feeds(data)), "scale_estimation": True, "awq": "awq" in method}
    onnx.save(nncf.compress_weights(onnx.load(model), **options), out)


def run_ours(method: str, model: str, data: str, out: str) -> None:
    """Quantize with graphquant."""
    import graphquant as gq

    algorithms = [name for name in method.split() if name not in {"default", "data", BUDGET}]
    options: dict[str, Any] = {"data": data, "algorithms": algorithms} if "data" in method else {}
    options |= {"size_budget": BUDGET} if BUDGET in method else {}
    gq.insert(model, rules=["weight_only_int4"], validate=False, **options).save(out)


TOOLS: dict[str, Callable[[str, str, str, str], None]] = {
    "onnxruntime": run_onnxruntime,
    "nncf": run_nncf,
    "graphquant": run_ours,
}
CONTESTANTS = (
    *(("onnxruntime", method) for method in ("symmetric", "asymmetric", "hqq", "hqq of 64")),
    *(("nncf", method) for method in ("symmetric", "asymmetric", "symmetric data awq", "asymmetric data awq")),
    *(("graphquant", method) for method in ("default", BUDGET, "data gptq", "data adaround")),
)


def constant_bytes(path: Path) -> int:
    """Return the bytes of the constants of a file."""
    from graphquant.formats.onnx import load
    from graphquant.optimize.size_budget import model_constant_bytes

    return model_constant_bytes(load(path))


def run_model(path: Path, feeds: list[Arrays]) -> list[np.ndarray]:
    """Return all outputs, each over all samples."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return [np.stack(parts) for parts in zip(*(session.run(None, feed) for feed in feeds), strict=True)]


def sqnr(expected: list[np.ndarray], actual: list[np.ndarray]) -> float:
    """Return the SQNR in dB of the worst output."""
    pairs = [(a.astype(np.float64), b) for a, b in zip(expected, actual, strict=True) if a.dtype.kind == "f"]
    return float(min(10 * np.log10(np.square(a).sum() / np.square(a - b).sum()) for a, b in pairs))


def compare_tools(name: str, model: Path, samples: Arrays, others: str, folder: Path) -> bool:
    """Print one line for each tool; return True if no other one is better at the same bytes."""
    from graphquant.formats.onnx.runtime import RUNTIME_ERRORS  # other tools run in an environment without graphquant

    split = len(next(iter(samples.values()))) * 2 // 3
    data = folder / "data.npz"
    np.savez(data, **{key: array[:split] for key, array in samples.items()})
    ours_data = folder / "ours.npz"  # the batch axis of a sample joins that of the samples
    np.savez(ours_data, **{key: array[:split].reshape(-1, *array.shape[2:]) for key, array in samples.items()})
    feeds = [{key: array[i] for key, array in samples.items()} for i in range(split, split + split // 2)]
    expected, rows = run_model(model, feeds), []
    for tool, method in CONTESTANTS:
        out = folder / "out.onnx"
        out.unlink(missing_ok=True)
        is_ours = tool == "graphquant"
        command = [sys.executable if is_ours else others, __file__, "--run", tool, method, str(model)]
        command += [str(ours_data if is_ours else data), str(out)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            print(f"{name:24} {tool:12} {method:20} failed: {result.stderr.strip().splitlines()[-1][:80]}")
            continue
        try:
            rows.append((tool, method, sqnr(expected, run_model(out, feeds)), constant_bytes(out)))
        except RUNTIME_ERRORS as error:
            print(f"{name:24} {tool:12} {method:20} does not run: {str(error)[:80]}")
    holds = True
    for tool, method, decibels, size in rows:
        mark = ""
        if tool != "graphquant":
            uses_data = "data" in method
            rivals = [row for row in rows if row[0] == "graphquant" and ("data" in row[1]) == uses_data]
            is_matched = any(row[2] >= decibels - MARGIN_DB and row[3] <= size * MARGIN_SIZE for row in rivals)
            mark, holds = ("" if is_matched else "  ahead of ours"), holds and is_matched
        print(f"{name:24} {tool:12} {method:20} {decibels:6.2f} dB {size:10,} bytes{mark}", flush=True)
    return holds


def main() -> None:
    """Compare the tools on all nets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--others", default=sys.executable, help="interpreter of the other tools")
    parser.add_argument("--model", nargs=2, action="append", default=[], metavar=("MODEL", "DATA"))
    parser.add_argument("--only", default="", help="nets whose name contains this")
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        tool, *rest = options.run
        TOOLS[tool](*rest)
        return
    held = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for net, write in NETS.items():
            if options.only in net:
                model = folder / "model.onnx"
                held.append(compare_tools(net, model, write(model), options.others, folder))
        for model, data in options.model:
            samples = {key: array[:, None] for key, array in np.load(data).items()}
            held.append(compare_tools(Path(model).stem, Path(model), samples, options.others, folder))
    print(f"{sum(held)} of {len(held)} nets: no other tool is ahead at the same bytes")


if __name__ == "__main__":
    main()
