"""Weight-only and dynamic models of 20 nets: time, bytes, SQNR and token agreement of five tools.

Run: python benchmarks/weight_forms.py --others PYTHON [--only NAME] [--seconds N]
PYTHON is an interpreter with NNCF and onnx_ir, as in `weights.py`, whose functions run the tools without data.
Each line has the time of a run relative to float with 1 and with 128 rows (tokens or sequences; 16 images), and with 16
for decoders without past states, on one thread, which is the median of parts of the medians of their rounds; the bytes
of all constants; SQNR in dB of the worst output on one batch of 128 rows; and the share of rows with the same largest
value of the first output, the logits of decoders.

Bars: only what is comparable is compared.

* Time: of results that round the same activations. onnxruntime multiplies the pairs of NNCF's int4 models as level 4 of
  MatMulNBits, which rounds activations to int8. So they are compared with our level 4, and level 0 of onnxruntime's
  tool with `weight_only_int4`, which is also compared with float. A time misses its bar if its median is above 1.02
  times another one in each of 5 parts, for which all sessions are opened anew in a random order: the memory that a
  session gets changes the time of the same ops by up to 10%. So a time is not compared with one of a result for which
  onnxruntime's optimizer makes the same ops, with equal attributes and constants of equal types and sizes.
* A decoder without past states computes a whole text in each run, so that its times with one token, in parentheses,
  are not compared. docs/decisions/0076-fused-ops.md has the reason.
* Accuracy: at equal bytes. Of the results of 4 bits, and of those with dynamic ranges, no other one has an SQNR above
  that of ours by 0.1 dB with at most 1.03 times its bytes, as the zero points of asymmetric weights take, and none has
  less than 1/1.03 of its bytes with an SQNR of at least that of ours.

Each figure that misses its bar is marked with *.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from weights import Arrays, constant_bytes, decoder_constants, decoder_text, sqnr, write_model

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.decoders import Decoder, build_decoder, feeds  # noqa: E402  # its folder was added above

from graphquant.formats.onnx.runtime import RUNTIME_ERRORS  # noqa: E402

Feed = Callable[[int], Arrays]  # the inputs of a net for a number of rows
MARGIN, MARGIN_SIZE, MARGIN_DB = 1.02, 1.03, 0.1
FEW_ROWS, MANY_ROWS, MANY_IMAGES = 16, 128, 16
PARTS = 5

FOUR_BITS, ROUNDED, DYNAMIC = "4 bits", "4 bits, int8 activations", "dynamic"
OURS = {
    FOUR_BITS: "graphquant, weight_only_int4",
    ROUNDED: "graphquant, int4 of level 4",
    DYNAMIC: "graphquant, dynamic",
}
OTHERS = {
    "onnxruntime, MatMulNBits": (FOUR_BITS, "onnxruntime", "symmetric"),
    "onnxruntime, asymmetric": (FOUR_BITS, "onnxruntime", "asymmetric"),
    "nncf, int4": (ROUNDED, "nncf", "asymmetric"),
}
TOOL_DYNAMIC = "onnxruntime, quantize_dynamic"


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return weights whose products keep the scale of their inputs."""
    return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def mlp(path: Path, act: str, width: int) -> Feed:
    """Write three products of one width."""
    rng = np.random.default_rng(width)
    values: Arrays = {f"w{i}": normal(rng, width, width) for i in range(3)}
    values |= {f"b{i}": rng.normal(size=width, scale=0.1).astype(np.float32) for i in range(3)}
    acts = {
        "SiLU": "s{i} = Sigmoid(a{i}) h{i} = Mul(a{i}, s{i})",
        "Relu": "h{i} = Relu(a{i})",
        "Gelu": "h{i} = Gelu(a{i})",
    }
    lines = [
        f"m{i} = MatMul({f'h{i - 1}' if i else 'x'}, w{i}) a{i} = Add(m{i}, b{i}) {acts[act].format(i=i)}"
        for i in range(3)
    ]
    write_model(path, f"(float[n,{width}] x) => (float[n,{width}] h2) {{ {' '.join(lines)} }}", values)
    return lambda rows: {"x": np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)}


def decoder(path: Path, architecture: Any, ops: Any, *, past: bool) -> Feed:
    """Write a decoder. With past states, 128 rows are the prompt, and one row follows 64 tokens."""
    net = Decoder(architecture=architecture, ops=ops, past=past, layers=3, hidden=256, vocabulary=1024, tied=None)
    onnx.save(build_decoder(net), path)

    def feed(rows: int) -> Arrays:
        rng = np.random.default_rng(1)
        states = None
        if past and rows == 1:
            count = 2 * net.layers
            shape = (1, net.key_heads, 64, net.head_size)
            states = [rng.standard_normal(shape).astype(np.float32) for _ in range(count)]
        return feeds(net, rng.integers(0, net.vocabulary, (1, rows)), states)

    return feed


def encoder(path: Path) -> Feed:
    """Write an encoder of 128 tokens in standard ops, without a mask; its rows are sequences of one length."""
    layers, width, length, words = 2, 256, 16, 1024
    rng = np.random.default_rng(7)
    values = decoder_constants(width, 4, length) | {"mask": np.zeros((length, length), np.float32)}
    values |= {"wte": rng.normal(size=(words, width)).astype(np.float32), "wpe": normal(rng, length, width)}
    for i in range(layers):
        values |= {f"wqkv{i}": normal(rng, width, 3 * width), f"wo{i}": normal(rng, width, width)}
        values |= {f"wup{i}": normal(rng, width, 4 * width), f"wdn{i}": normal(rng, 4 * width, width)}
        sizes = {"bqkv": 3 * width, "bo": width, "bup": 4 * width, "bdn": width, "h": width, "hz": width}
        values |= {f"{name}{i}": np.zeros(size, np.float32) for name, size in sizes.items()}
        values |= {f"{name}{i}": np.ones(width, np.float32) for name in ("g", "gz")}
    values |= {"gl": np.ones(width, np.float32), "hl": np.zeros(width, np.float32), "whead": normal(rng, width, 64)}
    write_model(path, decoder_text(layers, length, 64), values)
    return lambda rows: {"ids": np.random.default_rng(1).integers(0, words, (max(rows // length, 1), length))}


def embedding(path: Path) -> Feed:
    """Write a model of sentence embeddings: a table, the mean over tokens, and two products."""
    words, width = 4096, 384
    rng = np.random.default_rng(3)
    values = {"table": rng.normal(size=(words, width)).astype(np.float32), "axes": np.array([1])}
    values |= {"w": normal(rng, width, 4 * width), "v": normal(rng, 4 * width, width)}
    text = """e = Gather(table, ids) m = ReduceMean<keepdims = 0>(e, axes) a = MatMul(m, w) t = Gelu(a)
        b = MatMul(t, v) s = Add(m, b) y = LpNormalization<axis = -1>(s)"""
    write_model(path, f"(int64[n,l] ids) => (float[n,{width}] y) {{ {text} }}", values)
    return lambda rows: {"ids": np.random.default_rng(1).integers(0, words, (rows, 8))}


def convolutions(path: Path, *, depthwise: bool) -> Feed:
    """Write four convolutions and a product."""
    rng = np.random.default_rng(4)
    sizes = (3, 32, 64, 64, 128)
    values, lines = {"shape": np.array([0, -1]), "head": normal(rng, 128, 16)}, []
    for i in range(4):
        source, count = (f"h{i - 1}" if i else "x"), sizes[i]
        if depthwise and i:
            values[f"d{i}"] = (rng.standard_normal((count, 1, 3, 3)) / 3).astype(np.float32)
            lines.append(f"g{i} = Conv<group = {count}, pads = [1, 1, 1, 1]>({source}, d{i})")
            source, kernel, attrs = f"g{i}", 1, ""
        else:
            kernel, attrs = 3, "<pads = [1, 1, 1, 1]>"
        draw = rng.standard_normal((sizes[i + 1], count, kernel, kernel)) / np.sqrt(count * kernel**2)
        values[f"w{i}"] = draw.astype(np.float32)
        lines.append(f"c{i} = Conv{attrs}({source}, w{i}) h{i} = Relu(c{i})")
    lines.append("p = GlobalAveragePool(h3) f = Reshape(p, shape) y = MatMul(f, head)")
    write_model(path, f"(float[n,3,16,16] x) => (float[n,16] y) {{ {' '.join(lines)} }}", values)
    count = {1: 1, MANY_ROWS: MANY_IMAGES}
    return lambda rows: {"x": np.random.default_rng(1).standard_normal((count[rows], 3, 16, 16)).astype(np.float32)}


def lstm(path: Path, direction: str) -> Feed:
    """Write an LSTM over 20 steps and a product of its last state."""
    cells, features, directions = 256, 64, 2 if direction == "bidirectional" else 1
    rng = np.random.default_rng(5)
    values: Arrays = {
        "w": (rng.standard_normal((directions, 4 * cells, features)) / np.sqrt(features)).astype(np.float32),
        "r": (rng.standard_normal((directions, 4 * cells, cells)) / np.sqrt(cells)).astype(np.float32),
        "b": np.zeros((directions, 8 * cells), np.float32),
        "head": normal(rng, cells, 32),
    }
    text = f"""a, h, c = LSTM<hidden_size = {cells}, direction = "{direction}">(x, w, r, b) y = MatMul(h, head)"""
    write_model(path, f"(float[20,n,{features}] x) => (float[{directions},n,32] y) {{ {text} }}", values)
    return lambda rows: {"x": np.random.default_rng(1).standard_normal((20, rows, features)).astype(np.float32)}


NETS: dict[str, Callable[[Path], Feed]] = {
    **{
        f"mlp, {act}, {width}": lambda path, act=act, width=width: mlp(path, act, width)  # type: ignore[misc]
        for act, width in (("Relu", 256), ("Relu", 1024), ("SiLU", 256), ("SiLU", 1024), ("Gelu", 512), ("Gelu", 1024))
    },
    **{
        f"{architecture}, {ops}, {'past' if past else 'no past'}": (
            lambda path, architecture=architecture, ops=ops, past=past: decoder(path, architecture, ops, past=past)  # type: ignore[misc]
        )
        for architecture in ("gpt2", "llama")
        for ops in ("standard", "genai")
        for past in (False, True)
    },
    "encoder": encoder,
    "embedding": embedding,
    "convolutions": lambda path: convolutions(path, depthwise=False),
    "depthwise convolutions": lambda path: convolutions(path, depthwise=True),
    "lstm": lambda path: lstm(path, "forward"),
    "lstm, bidirectional": lambda path: lstm(path, "bidirectional"),
}


def write_contestants(model: Path, others: str, folder: Path) -> dict[str, Path]:
    """Quantize a model by each tool; return the files, and print the tools that fail."""
    from onnxruntime.quantization import quantize_dynamic

    import graphquant as gq

    files: dict[str, Path] = {}
    for number, (name, (_, tool, method)) in enumerate(OTHERS.items()):
        out = folder / f"other{number}.onnx"
        command = [
            others,
            str(ROOT / "benchmarks" / "weights.py"),
            "--run",
            tool,
            method,
            str(model),
            "-",
            str(out),
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            print(f"    {name} failed: {(result.stderr.strip().splitlines() or ['?'])[-1][:100]}")
        else:
            files[name] = out
    files[TOOL_DYNAMIC] = folder / "dynamic.onnx"
    # The types of contrib ops are unknown to the tool.
    quantize_dynamic(
        model, files[TOOL_DYNAMIC], per_channel=True, extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT}
    )
    for number, (kind, name) in enumerate(OURS.items()):
        files[name] = folder / f"ours{number}.onnx"
        rules = {FOUR_BITS: "weight_only_int4", ROUNDED: str(write_level_4_rules(folder)), DYNAMIC: "dynamic"}[kind]
        gq.insert(model, rules=[rules], validate=False, allow_empty=True).save(files[name], force=True)
    return files


def write_level_4_rules(folder: Path) -> Path:
    """Write `weight_only_int4` with packed weights whose activations onnxruntime rounds to int8."""
    family = 'family = "onnx-fused"\n'
    text = (ROOT / "rules" / "weight_only_int4.toml").read_text()
    path = folder / "level4.toml"
    path.write_text(text.replace(family, f'{family}args = {{ form = "packed", accuracy_level = 4 }}\n', 1))
    return path


def open_session(path: Path) -> onnxruntime.InferenceSession:
    """Open a model on one thread, with all optimizations."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def optimized_ops(path: Path, folder: Path) -> Counter[tuple[Any, ...]]:
    """Return the ops that onnxruntime makes of a model: types, attributes, kinds of inputs, and sizes of constants."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 3, str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    graph = onnx.load(folder / "optimized.onnx").graph
    kinds: dict[str, Any] = {name: node.op_type for node in graph.node for name in node.output}
    kinds |= {tensor.name: (tensor.data_type, int(np.prod(tensor.dims))) for tensor in graph.initializer}
    ops = Counter[tuple[Any, ...]]()
    for node in graph.node:
        # Later opsets write the default of an attribute of casts to float8.
        named = [attr for attr in node.attribute if (node.op_type, attr.name) != ("Cast", "saturate")]
        attrs = tuple(sorted(attr.SerializeToString(deterministic=True) for attr in named))
        inputs = [*node.input]
        while inputs and not inputs[-1]:  # a missing last input may be written or not
            inputs.pop()
        ops[node.domain, node.op_type, attrs, *(kinds.get(name, name) for name in inputs)] += 1
    return ops


def measure_times(files: dict[str, Path], feed: Arrays, seconds: float) -> dict[str, np.ndarray]:
    """Return the median times of parts. In each round of one, all models run in a random order.

    A run evicts the weights of other models from the cache.
    """
    rng, medians = np.random.default_rng(0), dict[str, list[float]]()
    for _ in range(PARTS):
        sessions = {name: open_session(files[name]) for name in rng.permutation([*files])}
        rounds: dict[str, list[int]] = {name: [] for name in files}
        for session in sessions.values():
            session.run(None, feed)
        end = time.perf_counter() + seconds / PARTS * len(sessions)
        while time.perf_counter() < end or len(rounds["float"]) < 5:  # noqa: PLR2004  # rounds
            for name in rng.permutation([*sessions]):
                start = time.process_time_ns()
                sessions[name].run(None, feed)
                rounds[name].append(time.process_time_ns() - start)
        for name, times in rounds.items():
            medians.setdefault(name, []).append(float(np.median(times)))
    return {name: np.array(times) for name, times in medians.items()}


def is_slower(times: np.ndarray, others: np.ndarray) -> bool:
    """Return True if the time is above the margin in all parts."""
    return bool((times > others * MARGIN).all())


def rivals_of(name: str, files: dict[str, Path], *, same_activations: bool) -> list[str]:
    """Return the results of other tools that one of ours is compared with; none for those of other tools."""
    kind = next((kind for kind, ours in OURS.items() if ours == name), "")
    if kind in {"", DYNAMIC}:
        return [TOOL_DYNAMIC] if kind else []
    kinds = {kind} if same_activations else {FOUR_BITS, ROUNDED}
    return [other for other, (its_kind, *_) in OTHERS.items() if other in files and its_kind in kinds]


def compare_tools(net: str, write: Callable[[Path], Feed], others: str, folder: Path, seconds: float) -> int:
    """Print one line for each tool; return the number of figures that miss their bar."""
    model = folder / "model.onnx"
    feed = write(model)
    print(net, flush=True)
    files = {"float": model} | write_contestants(model, others, folder)
    sessions = {}
    for name, path in [*files.items()]:
        try:
            sessions[name] = open_session(path)
            sessions[name].run(None, feed(1))
        except RUNTIME_ERRORS as error:
            print(f"    {name} does not run: {str(error)[:100]}")
            if name in OURS.values():
                raise
            del files[name]
            sessions.pop(name, None)
    computes_texts = net.endswith("no past")
    rows_of_columns = (1, FEW_ROWS, MANY_ROWS) if computes_texts else (1, MANY_ROWS)
    columns = {rows: measure_times(files, feed(rows), seconds) for rows in rows_of_columns}
    ops = {name: optimized_ops(path, folder) for name, path in files.items()}
    sizes = {name: float(constant_bytes(path)) for name, path in files.items()}
    expected = sessions["float"].run(None, feed(MANY_ROWS))
    results = {name: session.run(None, feed(MANY_ROWS)) for name, session in sessions.items()}
    quality = {name: sqnr(expected, result) for name, result in results.items() if name != "float"}
    missed = 0
    for name in files:
        cells = []
        for rows, times in columns.items():
            ratio = np.median(times[name]) / np.median(times["float"])
            if computes_texts and rows == 1:
                cells.append(f" ({ratio:.2f})")
                continue
            rivals = rivals_of(name, files, same_activations=True) + ["float"] * (name == OURS[FOUR_BITS])
            others_times = [times[rival] for rival in rivals if ops[rival] != ops[name]]
            slower = any(is_slower(times[name], other_times) for other_times in others_times)
            missed += slower
            cells.append(f"{ratio:6.2f}{'*' if slower else ' '}")
        rivals = rivals_of(name, files, same_activations=False)
        larger = [r for r in rivals if quality[r] >= quality[name] and sizes[r] * MARGIN_SIZE < sizes[name]]
        worse = [r for r in rivals if sizes[r] <= sizes[name] * MARGIN_SIZE and quality[r] > quality[name] + MARGIN_DB]
        missed += bool(larger) + bool(worse)
        agreement = np.mean(results[name][0].argmax(-1) == expected[0].argmax(-1))
        decibels = f"{quality[name]:6.1f}{'*' if worse else ' '}" if name in quality else "       "
        size = f"{sizes[name]:12,.0f}{'*' if larger else ' '}"
        print(f"    {name:30} {' '.join(cells)} {size} {decibels} dB {agreement:6.1%}", flush=True)
    return missed


def main() -> None:
    """Compare the tools on all nets."""
    print("Times are compared between results that round the same activations, accuracy at equal bytes.")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--others", default=sys.executable, help="interpreter of NNCF")
    parser.add_argument("--only", default="", help="nets whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.15, help="time for each model and number of rows")
    options = parser.parse_args()
    missed = {}
    for net, write in NETS.items():
        if options.only in net:
            with tempfile.TemporaryDirectory() as folder:
                missed[net] = compare_tools(net, write, options.others, Path(folder), options.seconds)
    print(f"{sum(not count for count in missed.values())} of {len(missed)} nets without a figure that misses its bar")


if __name__ == "__main__":
    main()
