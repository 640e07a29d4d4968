"""Mutate the inputs of every command, for small models of every format, and count how the commands end.

A case copies a model with its data, statistics, plan, rule file and manifest to a new folder, mutates one of the files,
and runs a command of the command line in this process. Worker processes with limits on time and memory run the cases::

    python benchmarks/mutated_inputs.py [--cases 50000] [--folder DIR]
    python benchmarks/mutated_inputs.py --only 1234

The results are lines of JSON in the folder, and the same command continues an interrupted run. It prints the endings of
each command, and each problem: a traceback, a crash, a case beyond a limit, a changed source, a file that a failed
command wrote, and a quantized model that its runtime does not load although it loads the source. The exit code is 1 if
there is any. `--only` runs a single case, keeps its folder, and prints the command and its output.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import importlib
import io
import json
import os
import pkgutil
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "sample_models"

MEMORY = 8 << 30
"""Bytes of address space of a worker; TensorFlow alone takes a quarter of it."""

CPU_SECONDS, SECONDS = 60, 600
"""Longest times of a case, of the processor and in total. The usual one is some hundredths of a second."""

CASES_OF_WORKER = 1000
"""Number of cases after which a worker is replaced."""

DATA = "data.npz"
STATS = "stats.gqs"
PLAN = "plan.json"
RULES = "rules.toml"
MANIFEST = "graphquant.toml"
RANGES = "ranges.tflite"
RANGES_MAP = "ranges.toml"

# -- models ----------------------------------------------------------------------------------------

MODEL_WEIGHTS = {
    **dict.fromkeys(("digits_cnn.onnx", "digits_cnn_bn.onnx", "digits_rnn.onnx", "digits_nested.onnx"), 5),
    **dict.fromkeys(("conv.onnx", "depthwise.onnx", "transposed.onnx", "gemm.onnx", "attention.onnx"), 4),
    **dict.fromkeys(("layernorm.onnx", "lstm.onnx", "if.onnx", "loop.onnx", "function.onnx", "float16.onnx"), 4),
    "external.onnx": 6, "matmul.onnxtxt": 2, "conv.textproto": 2, "gemm.json": 2,
    "digits_cnn.pb": 5, "digits_rnn.pb": 3, "digits_cnn.pbtxt": 2, "digits_cnn.meta": 4,
    "digits_cnn_saved_model": 2.5, "digits_rnn_saved_model": 1.5, "net.keras": 0.2, "digits_cnn.tflite": 6,
}  # fmt: skip
"""Models, and how often they occur."""


def build_models(folder: Path) -> None:
    """Write each model with its data, and what the commands make of it, to a folder of its own."""
    for name in MODEL_WEIGHTS:
        target = folder / name
        if (target / "done").exists():
            continue
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        write_model(target, name)
        write_inputs(target, name)
        (target / "done").touch()


def write_model(folder: Path, name: str) -> None:
    """Write the float model and its data."""
    import numpy as np
    import onnx
    from opsets import GRAPHS

    stem, suffix = Path(name).stem, Path(name).suffix
    if stem in GRAPHS:
        message = GRAPHS[stem](21 if stem in {"conv", "gemm", "if", "lstm"} else 13)
        texts = {".json": "json", ".onnxtxt": "onnxtxt", ".textproto": "textproto"}
        onnx.save(message, str(folder / name), format=texts.get(suffix, "protobuf"))
        shape = [dim.dim_value or 2 for dim in message.graph.input[0].type.tensor_type.shape.dim]
        np.savez(folder / DATA, x=np.random.default_rng(0).standard_normal((8, *shape)).astype(np.float32))
        return
    source = stem.removesuffix("_bn").removesuffix("_saved_model")
    source = source if source in {"digits_rnn", "digits_nested"} else "digits_cnn"
    with np.load(SAMPLES / f"{source}_calib.npz") as arrays:
        np.savez(folder / DATA, **{key: array[:12] for key, array in arrays.items()})
    if name == "external.onnx":
        onnx.save(
            onnx.load(SAMPLES / "digits_cnn.onnx"), str(folder / name), save_as_external_data=True, size_threshold=200,
            location="weights.bin",
        )  # fmt: skip
    elif suffix in {".meta", ".keras", ".tflite"}:
        write_tensorflow_model(folder / name)
    elif (SAMPLES / name).is_dir():
        shutil.copytree(SAMPLES / name, folder / name)
    else:
        shutil.copy(SAMPLES / name, folder / name)


def write_tensorflow_model(path: Path) -> None:
    """Write a file that only TensorFlow or Keras can write."""
    import numpy as np
    import tensorflow as tf

    if path.suffix == ".tflite":
        converter = tf.lite.TFLiteConverter.from_saved_model(str(SAMPLES / "digits_cnn_saved_model"))
        images = np.load(SAMPLES / "digits_cnn_calib.npz")["image"]
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.representative_dataset = lambda: ([image[None]] for image in images)
        path.write_bytes(converter.convert())
    elif path.suffix == ".meta":
        with tf.Graph().as_default():
            message = tf.compat.v1.GraphDef.FromString((SAMPLES / "digits_cnn.pb").read_bytes())
            tf.compat.v1.import_graph_def(message, name="")
            tf.compat.v1.train.export_meta_graph(str(path))
    else:
        import keras

        image = keras.Input((8, 8, 1), name="image")
        hidden = keras.layers.Conv2D(4, 3, activation="relu", name="conv")(image)
        hidden = keras.layers.Flatten(name="flat")(hidden)
        keras.Model(image, keras.layers.Dense(3, name="logits")(hidden), name="net").save(path)


def write_inputs(folder: Path, name: str) -> None:
    """Write the other inputs of the commands: a quantized model, a plan, statistics, a rule file and a manifest."""
    from support.cli import invoke_cli

    model, quantized = folder / name, folder / quantized_name(name)
    commands: list[list[object]] = [
        ["insert", model, "--data", folder / DATA, "-o", quantized, "--no-validate"],
        ["plan", model, "--format", "json", "-o", folder / PLAN],
        ["calibrate", model, "--data", folder / DATA, "-o", folder / STATS],
    ]
    for command in commands if format_of(name) != "tflite" else ():
        if (result := invoke_cli(*command)).exit_code:
            raise SystemExit(f"{name}: {command}: {result.output}")
    rules = ROOT / "rules" / ("onnxruntime.toml" if format_of(name) == "onnx" else "tflite.toml")
    shutil.copy(rules, folder / RULES)
    (folder / MANIFEST).write_text(
        f'[defaults]\noutput = "out/{{stem}}.quant{{suffix}}"\nrules = ["{RULES}"]\nmin_sqnr = 5\nsamples = 4\n\n'
        f'[[model]]\npath = "{name}"\ndata = "{DATA}"\nmax_size = "2MB"\nmin_quantized = "10%"\n'
    )
    if format_of(name) == "tensorflow":
        source = folder.parent / "digits_cnn.tflite" / "digits_cnn.tflite"
        if not source.exists():
            source.parent.mkdir(exist_ok=True)
            write_tensorflow_model(source)
        shutil.copy(source, folder / RANGES)
        (folder / RANGES_MAP).write_text('max_pool = "max_pool"\n')


def quantized_name(name: str) -> str:
    """Return the name of the quantized model."""
    return "quant_" + name.removesuffix(".keras")


def format_of(name: str) -> str:
    """Return the format of a model, by its name."""
    suffix = Path(name).suffix
    if suffix == ".tflite":
        return "tflite"
    return "onnx" if suffix in {".onnx", ".onnxtxt", ".textproto", ".json"} else "tensorflow"


# -- commands --------------------------------------------------------------------------------------


def chance(rng: random.Random, probability: float) -> bool:
    """Return True with the probability."""
    return rng.random() < probability


Command = tuple[list[str], list[str]]
"""Arguments, and the files that may be mutated."""

RULE_FILES = sorted(path.stem for path in ROOT.joinpath("rules").glob("*.toml"))
NO_DATA_RULES = ("fixed_point", "weight_only", "weight_only_int4", "weight_only_int8")


def insert_options(rng: random.Random) -> list[str]:
    """Return options of insert, mostly none."""
    options = (["--float-weights"], ["--allow-empty"], ["--no-validate"], ["--samples", "5"], ["--method", "entropy"])
    return rng.choice(options) if chance(rng, 0.3) else []


def commands(rng: random.Random, name: str) -> dict[str, tuple[float, Command]]:
    """Return the commands with their weights."""
    model, quantized = name, quantized_name(name)
    output = "out" + Path(quantized).suffix
    insert = ["insert", model, "-o", output, *insert_options(rng)]
    rules = ["--rules", RULES] if chance(rng, 0.5) else ["--rules", rng.choice(RULE_FILES)]
    tensor = rng.choice(("image", "x", "logits", "y", "conv1", "c1", "missing", "Identity:0"))
    drawing = rng.choice((["--html", "page.html"], ["--format", "svg"], ["--format", "json"], []))
    drawing += ["--around", tensor] if chance(rng, 0.1) else []
    backend = rng.choice(("onnxruntime", "tensorrt", "qnn", "openvino", "vitis-ai", "tflite"))
    search = rng.choice((["--min-sqnr", "20"], ["--size-budget", "50%"], ["--min-agreement", "0.9"]))
    form = rng.choice((["--format", "json"], ["--html", "page.html"], []))
    table: dict[str, tuple[float, Command]] = {
        "insert": (18, ([*insert, "--rules", rng.choice(NO_DATA_RULES)], [model])),
        "insert --data": (7, ([*insert, *rules, "--data", DATA], [model, model, DATA, RULES])),
        "insert --stats": (4, ([*insert, "--rules", RULES, "--stats", STATS], [STATS, STATS, RULES, RULES, model])),
        "insert --plan": (6, ([*insert, "--plan", PLAN, "--stats", STATS], [PLAN, PLAN, PLAN, STATS, model])),
        "insert --requantize": (4, (
            ["insert", quantized, "-o", output, "--requantize", "--rules", rng.choice(NO_DATA_RULES)], [quantized])),
        "insert, search": (1, ([*insert, *search, "--data", DATA, "--samples", "6"], [model, DATA])),
        "plan": (8, (["plan", model, *rules, *form], [model, model, RULES])),
        "inspect": (12, (["inspect", rng.choice((model, quantized)), *drawing], [model, quantized])),
        "inspect --stats": (3, (["inspect", model, "--stats", STATS, *rules], [model, STATS, STATS])),
        "explain": (4, (["explain", model, tensor, *rules], [model, RULES])),
        "explain --data": (2, (["explain", model, tensor, "--rules", RULES, "--data", DATA], [model, DATA])),
        "diff": (6, (["diff", model, quantized, *form], [model, quantized])),
        "diff of plans": (1, (["diff", PLAN, PLAN.replace("plan", "other")], [PLAN])),
        "strip": (10, (["strip", quantized, "-o", output], [quantized])),
        "strip --check": (3, (["strip", quantized, "-o", output, "--check", model], [model, quantized])),
        "check": (6, (["check", quantized], [quantized])),
        "check --for": (4, (["check", quantized, "--for", backend], [quantized])),
        "check --stats": (1, (["check", quantized, "--stats", STATS], [quantized, STATS])),
        "compare": (2.5, (["compare", model, quantized, "--data", DATA, *form], [model, quantized, DATA])),
        "calibrate": (5, (["calibrate", model, "--data", DATA, "-o", "new.gqs", *rules], [model, DATA, RULES])),
        "calibrate --merge": (3, (["calibrate", "--merge", STATS, "-o", "new.gqs"], [STATS])),
        "batch": (0.2, (["batch", MANIFEST, "-j", "1", "--no-cache", "--timeout", "50", "--report", "report.json"],
                        [model, MANIFEST, MANIFEST, MANIFEST, DATA, RULES])),
        "data check": (4, (["data", "check", model, DATA], [model, DATA, DATA])),
        "rules check": (6, (["rules", "check", RULES], [RULES])),
    }  # fmt: skip
    if format_of(name) == "tensorflow":
        ranges = [*insert, "--ranges", RANGES, "--data", DATA]
        ranges += ["--ranges-map", RANGES_MAP] if name.startswith("digits_cnn") else []
        table["insert --ranges"] = 6, (ranges, [RANGES, RANGES, RANGES_MAP, model])
    if format_of(name) == "tflite":
        kinds = {"inspect": 8, "check": 4, "check --for": 2, "explain": 2, "diff": 3, "insert": 1, "plan": 1,
                 "compare": 2, "data check": 1}  # fmt: skip
        table = {
            kind: (weight, ([model if part == quantized else part for part in table[kind][1][0]], [model]))
            for kind, weight in kinds.items()
        }
    if name.endswith(".keras"):
        table = {kind: table[kind] for kind in ("insert", "inspect", "plan", "calibrate", "data check")}
    return table


# -- mutations -------------------------------------------------------------------------------------


def mutate_file(rng: random.Random, path: Path) -> str:
    """Mutate a file or a file of a folder, and return the kind of the mutation."""
    if path.is_dir():
        parts = [path / "saved_model.pb", *path.glob("variables/*")]
        path = rng.choice([parts[0], parts[0], *parts])
    weights = path.with_name("weights.bin")
    if path.suffix == ".onnx" and weights.exists() and chance(rng, 0.3):
        return mutate_data_file(rng, weights)
    mutators: dict[str, Callable[[random.Random, Path], object]] = {
        ".onnx": mutate_onnx, ".pb": mutate_tensorflow, ".pbtxt": mutate_tensorflow, ".meta": mutate_tensorflow,
        ".npz": mutate_arrays, ".gqs": partial(mutate_archive, member="header.json"),
        ".keras": partial(mutate_archive, member="config.json"), ".json": mutate_json_file,
        ".toml": mutate_lines, ".onnxtxt": mutate_lines, ".textproto": mutate_lines, ".tflite": mutate_words,
    }  # fmt: skip
    mutator = mutators.get(path.suffix)
    if mutator is None or chance(rng, 0.25):
        mutate_bytes(rng, path)
        return f"bytes of {path.suffix}"
    try:
        mutator(rng, path)
    except ValueError:  # an earlier mutation broke the part that is to be changed
        mutate_bytes(rng, path)
    return f"{getattr(mutator, '__name__', 'mutate_archive').removeprefix('mutate_')} of {path.suffix}"


def mutate_bytes(rng: random.Random, path: Path) -> None:
    """Flip bits, or truncate or splice the bytes."""
    from test_fuzz import BYTES

    path.write_bytes(bytes(rng.choice(BYTES)(rng, path.read_bytes())))


def mutate_data_file(rng: random.Random, path: Path) -> str:
    """Mutate, truncate or delete external weights."""
    if chance(rng, 0.2):
        path.unlink()
        return "missing weights"
    mutate_bytes(rng, path)
    return "bytes of weights"


def mutate_onnx(rng: random.Random, path: Path) -> None:
    """Change fields of an ONNX message, or its initializers, edges, opsets, shapes and types."""
    import onnx
    from test_fuzz import mutate_message, serialize

    message = onnx.ModelProto.FromString(path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if chance(rng, 0.4) or not mutate_onnx_part(rng, message):  # the rest are parts that random fields rarely hit
            mutate_message(rng, message, rng.choice((1, 1, 2, 8)))
    with suppress(ValueError):  # text that is no UTF-8 cannot be serialized
        path.write_bytes(serialize(message))


TENSOR_TYPE, TENSOR_VALUES, EDGE, OPSET, SHAPE, OP_TYPE, NAME = range(7)


def mutate_onnx_part(rng: random.Random, message: Any) -> bool:
    """Change an initializer, an op, an opset, or a shape or type; return False if the model has none."""
    from onnx import helper

    part = rng.randrange(7)
    graphs = [message.graph, *(a.g for node in message.graph.node for a in node.attribute if a.HasField("g"))]
    graph = rng.choice(graphs)
    nodes, tensors = list(graph.node), list(graph.initializer)
    values = [*graph.input, *graph.output, *graph.value_info]
    if part in {TENSOR_TYPE, TENSOR_VALUES} and tensors:
        mutate_tensor(rng, part, rng.choice(tensors))
    elif part in {EDGE, OP_TYPE, NAME} and nodes:
        mutate_nodes(rng, part, nodes, tensors)
    elif part == OPSET:
        if message.opset_import and chance(rng, 0.7):
            rng.choice(message.opset_import).version = rng.choice((0, 1, 6, 7, 9, 11, 13, 17, 19, 21, 24, 28, 99))
        else:
            message.ir_version = rng.choice((0, 3, 4, 8, 10, 13, 99))
    elif part == SHAPE and values:
        value = rng.choice(values)
        value.type.tensor_type.elem_type = rng.choice((1, 1, 1, rng.randrange(24)))
        dims = rng.choice(([], [None], [0], [3], [1, 8, 8, 1], ["n", "n"], [1 << 33], [2, 3, 8, 8]))
        value.CopyFrom(helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, dims))
    else:
        return False
    return True


def mutate_tensor(rng: random.Random, part: int, tensor: Any) -> None:
    """Change type and shape, or the values, of an initializer."""
    from onnx import TensorProto, numpy_helper

    if part == TENSOR_TYPE:
        tensor.data_type = rng.choice((tensor.data_type, tensor.data_type, rng.randrange(24)))
        if chance(rng, 0.5):
            tensor.dims[:] = rng.choice(([], [0], [-1], [1 << 40], [*tensor.dims, 1], list(tensor.dims)[::-1]))
    elif tensor.data_type == TensorProto.FLOAT and not tensor.external_data:
        array = numpy_helper.to_array(tensor).copy()
        array[...] = rng.choice((0, 1e38, float("nan"), -1, 1e-40, 65504)) if chance(rng, 0.5) else array * 1e4
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def mutate_nodes(rng: random.Random, part: int, nodes: list[Any], tensors: list[Any]) -> None:
    """Change an edge, an op type with the attributes of another op, or a name everywhere."""
    from test_fuzz import WORDS

    names = sorted({name for node in nodes for name in (*node.input, *node.output)} | {t.name for t in tensors})
    if part == NAME:
        old, new = rng.choice(names or [""]), rng.choice([*names, *WORDS])
        for node in nodes:
            node.input[:] = [new if name == old else name for name in node.input]
            node.output[:] = [new if name == old else name for name in node.output]
        return
    node = rng.choice(nodes)
    if part == EDGE and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice([*names, ""])
    elif part == OP_TYPE:
        types = [other.op_type for other in nodes]
        node.op_type = rng.choice([*types, "Relu", "Conv", "Loop", "Scan", "DequantizeLinear"])
        if chance(rng, 0.3):
            node.attribute.extend(list(rng.choice(nodes).attribute))


def mutate_tensorflow(rng: random.Random, path: Path) -> None:
    """Change fields of a GraphDef, MetaGraphDef or SavedModel, or edges and attributes of its nodes."""
    from test_fuzz import mutate_file_message, mutate_message, serialize

    from graphquant.formats.tensorflow import proto

    kinds = {".meta": proto.MetaGraphDef, ".pbtxt": proto.GraphDef}
    kind: Any = kinds.get(path.suffix, proto.SavedModel if path.name == "saved_model.pb" else proto.GraphDef)
    if path.suffix == ".pbtxt" or chance(rng, 0.5):
        mutate_file_message(rng, path, kind)
        return
    message = kind.FromString(path.read_bytes())
    metas = list(message.meta_graphs) if kind is proto.SavedModel else [message]
    graph = getattr(metas[0], "graph_def", metas[0])
    lists = [graph.node, *(function.node_def for function in graph.library.function)]
    nodes = list(rng.choice([nodes for nodes in lists if nodes]))
    node = rng.choice(nodes)
    action = rng.choice((EDGE, TENSOR_TYPE, OP_TYPE, NAME))
    if action == EDGE and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(nodes).name + rng.choice(("", ":0", ":1", ":output:0"))
    elif action == TENSOR_TYPE and node.attr:
        mutate_message(rng, node.attr[rng.choice(sorted(node.attr))], 1)
    elif action == OP_TYPE:
        node.op = rng.choice(nodes).op
    else:
        node.name = rng.choice(nodes).name
    with suppress(ValueError):
        path.write_bytes(serialize(message))


def mutate_arrays(rng: random.Random, path: Path) -> None:
    """Change names, types, shapes and values of the arrays."""
    import numpy as np

    with np.load(path) as file:
        arrays = dict(file)
    key = rng.choice(sorted(arrays))
    array = arrays.pop(key)
    changes: list[Callable[[], Any]] = [
        lambda: array.astype(rng.choice(("int32", "uint8", "float64", "float16", "bool", "complex64", "U3", "O"))),
        lambda: array[:0], lambda: array[:1], lambda: array[0], lambda: array.T, lambda: array.reshape(-1),
        lambda: array[..., None], lambda: array * np.float32(rng.choice((0, 1e38, 255, -1, 1e-30))),
        lambda: np.where(np.arange(array.size).reshape(array.shape) % 7, array, rng.choice((np.nan, np.inf))),
        lambda: np.concatenate([array] * 3, rng.randrange(array.ndim)), lambda: np.float32(3), lambda: array[:, ::2],
    ]  # fmt: skip
    action = rng.randrange(6)
    if action == 0:
        key = rng.choice(("", "x", "image", "label", "labels", "../a", "x" * 300, "position 1", "files"))
    arrays[key] = rng.choice(changes)() if action else array
    if action == 1:
        arrays["labels"] = np.arange(rng.randrange(20))
    np.savez(path, **arrays)


def mutate_archive(rng: random.Random, path: Path, member: str) -> None:
    """Change the JSON member or the bytes of another member of a zip archive."""
    from test_fuzz import BYTES, mutate_json

    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    if chance(rng, 0.7):
        data = json.loads(content[member])
        for _ in range(rng.choice((1, 1, 2, 4))):
            mutate_json(rng, data)
        content[member] = json.dumps(data).encode()
    else:
        name = rng.choice(sorted(content))
        content[name] = bytes(rng.choice(BYTES)(rng, content[name])) if chance(rng, 0.8) else b""
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in content.items():
            archive.writestr(name, part)


def mutate_json_file(rng: random.Random, path: Path) -> None:
    """Change values of a JSON file."""
    from test_fuzz import mutate_json

    data = json.loads(path.read_text())
    for _ in range(rng.choice((1, 1, 2, 5))):
        mutate_json(rng, data)
    path.write_text(json.dumps(data))


DELETE, REPEAT, SWAP, VALUE, KEY = range(5)

VALUES = (
    '""', '"x"', "-1", "1e400", "nan", "[]", "{}", "true", '"**"', '"/(/"', "99999999999999999999", "[1, 2]",
    '"../../x"', '"{stem}{x}"', '"int3"', '"percentile(200)"', "'''", "=", "[", '"10ZB"', '"a > b > c"',
)  # fmt: skip


def mutate_lines(rng: random.Random, path: Path) -> None:
    """Delete, repeat, swap or change lines of a text file."""
    lines = path.read_text().split("\n")
    for _ in range(rng.choice((1, 1, 2, 4))):
        index, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        filled = [number for number, line in enumerate(lines) if "=" in line or ":" in line] or [index]
        action = rng.randrange(5)
        if action == DELETE and len(lines) > 1:
            del lines[index]
        elif action == REPEAT:
            lines.insert(index, lines[other])
        elif action == SWAP:
            lines[index], lines[other] = lines[other], lines[index]
        else:
            index = rng.choice(filled)
            separator = "=" if "=" in lines[index] else ":"
            head, _, tail = lines[index].partition(separator)
            tail = f" {rng.choice(VALUES)}" if action == VALUE else tail
            key = rng.choice(lines).partition(separator)[0] if action == KEY else head
            lines[index] = f"{key}{separator}{tail}"
    path.write_text("\n".join(lines))


def mutate_words(rng: random.Random, path: Path) -> None:
    """Change 32-bit words of a FlatBuffer, which are offsets, sizes and numbers."""
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 8))):
        position = rng.randrange(len(data) // 4) * 4
        old = int.from_bytes(data[position : position + 4], "little")
        new = rng.choice((0, 1, 4, 255, 1 << 31, (1 << 32) - 1, old + 1, old - 1, old * 2, len(data)))
        data[position : position + 4] = (new % (1 << 32)).to_bytes(4, "little")
    path.write_bytes(data)


# -- cases -----------------------------------------------------------------------------------------


def run_case(index: int, corpus: Path, folder: Path, *, verbose: bool = False) -> dict[str, Any]:
    """Run one case in a new folder and return its record."""
    from support.cli import invoke_cli

    rng = random.Random(f"case {index}")  # noqa: S311  # not a secret
    name = rng.choices(list(MODEL_WEIGHTS), list(MODEL_WEIGHTS.values()))[0]
    table = commands(rng, name)
    command = rng.choices(list(table), [weight for weight, _ in table.values()])[0]
    arguments, files = table[command][1]
    shutil.copytree(corpus / name, folder)
    (folder / "done").unlink()
    for file in (STATS, PLAN):
        if (folder / file).exists():
            shutil.copy(folder / file, folder / f"other{Path(file).suffix}")
    os.chdir(folder)
    file = rng.choice([file for file in files if file in arguments] or files)
    mutation = mutate_file(rng, folder / file)
    before = file_digests(folder)
    if verbose:
        print(f"{name}: {mutation} ({file})\ngraphquant {' '.join(arguments)}")
    start = time.monotonic()
    result = invoke_cli(*arguments)
    seconds = time.monotonic() - start
    ending, details = ending_of(result)
    if verbose:
        print(result.output, ending, details, f"{seconds:.2f} s", sep="\n")
    problems = [details] if details else []
    after = file_digests(folder)
    problems += [f"changed {path}" for path in before if after.get(path) != before[path]]
    new_files = sorted(after.keys() - before.keys())
    kind = arguments[0]
    # A missed bound is exit code 1 with a result; so are findings of the commands that print.
    may_write = ending == "exit 1" and (kind in {"diff", "check", "compare", "data"} or "search" in command)
    if ending != "exit 0" and new_files and not may_write and kind != "batch":
        problems.append(f"{ending} wrote {new_files}")
    problems += [f"temporary file {path}" for path in new_files if path.endswith((".part", ".tmp"))]
    if ending == "exit 0" and kind == "insert" and (folder / arguments[3]).exists():
        reason = load_failure(folder / arguments[1], folder / arguments[3])
        problems += [f"the result does not load: {reason}"] if reason else []
    return {
        "case": index, "command": command, "model": name, "mutation": mutation, "ending": ending,
        "seconds": round(seconds, 3), "problems": problems,
    }  # fmt: skip


def file_digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def ending_of(result: Any) -> tuple[str, str]:
    """Return the ending of a command, and details if it is a problem."""
    from graphquant.errors import InternalError

    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        return "traceback", "".join(traceback.format_exception(error))[-3000:]
    cause = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return "memory", ""
        if isinstance(cause, InternalError):
            return "internal error", "".join(traceback.format_exception(cause))[-3000:]
        cause = cause.__cause__ or cause.__context__
    if "Traceback" in result.output:
        return "traceback", result.output[-3000:]
    return f"exit {result.exit_code}", ""


def load_failure(source: Path, quantized: Path) -> str:
    """Return why the runtime does not load the quantized model; "" if it loads it, or not the source either."""
    load = load_onnx if format_of(source.name) == "onnx" else load_tensorflow
    try:
        load(source)
    except Exception:  # noqa: BLE001  # the runtimes' errors have no common class
        return ""
    try:
        load(quantized)
    except Exception as error:  # noqa: BLE001  # the same
        return str(error)[:1000]
    return ""


def load_onnx(path: Path) -> None:
    """Load a model in onnxruntime."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    content: Any = str(path)
    if path.suffix != ".onnx":
        texts = {".json": "json", ".onnxtxt": "onnxtxt", ".textproto": "textproto"}
        content = onnx.load(str(path), format=texts[path.suffix]).SerializeToString()
    onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def load_tensorflow(path: Path) -> None:
    """Import a graph into TensorFlow. A Keras file counts as loaded."""
    import tensorflow as tf
    from google.protobuf import text_format

    v1 = tf.compat.v1
    with v1.Graph().as_default() as graph:
        if path.is_dir():
            with v1.Session(graph=graph) as session:
                v1.saved_model.load(session, ["serve"], str(path))
        elif path.suffix == ".meta":
            v1.train.import_meta_graph(str(path))
        elif path.suffix in {".pb", ".pbtxt"}:
            message = v1.GraphDef()
            if path.suffix == ".pbtxt":
                text_format.Parse(path.read_text(), message)
            else:
                message.ParseFromString(path.read_bytes())
            v1.import_graph_def(message, name="")


# -- workers ---------------------------------------------------------------------------------------


def import_modules() -> None:
    """Import before workers are forked, so that each starts at once, and edits of the code do not reach a run."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]
    import graphquant

    for module in pkgutil.walk_packages(graphquant.__path__, "graphquant."):
        with suppress(ImportError):
            importlib.import_module(module.name)
    for name in ("support.cli", "test_fuzz", "opsets", "keras", "tensorflow", "onnxruntime"):
        importlib.import_module(name)
    importlib.import_module("onnxruntime").set_default_logger_severity(4)


def work(cases: list[int], corpus: Path, folder: Path, writer: int) -> None:
    """Run cases in a worker process; write the number of each case and then its record to the pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with (folder / "crash.txt").open("w") as log, os.fdopen(writer, "w") as pipe:
        faulthandler.enable(log)
        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        # Workers of a batch are new processes, which would import this file again.
        del sys.modules["__main__"].__file__
        for index in cases:
            target = folder / f"case{index}"
            try:
                record = run_case(index, corpus, target)
            except BaseException:  # noqa: BLE001  # a defect of this script must not end the run
                record = {"case": index, "command": "?", "model": "?", "mutation": "?", "ending": "not run",
                          "seconds": 0, "problems": [traceback.format_exc()[-3000:]]}  # fmt: skip
            os.chdir(folder)
            shutil.rmtree(target, ignore_errors=True)
            pipe.write(json.dumps(record) + "\n")
            pipe.flush()


def cpu_seconds(process: int) -> float:
    """Return the processor time of a process, which does not depend on the load of the machine."""
    times = psutil.Process(process).cpu_times()
    return times.user + times.system


def run_worker(cases: list[int], corpus: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of cases that run in one worker, until it dies; the last one says how."""
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.close(reader)
            os.setpgid(0, 0)
            work(cases, corpus, folder, writer)
        finally:
            os._exit(0)
    os.close(writer)
    done, cpu_limit, deadline = 0, CPU_SECONDS, time.monotonic() + SECONDS
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        lines = io.BytesIO()
        while done < len(cases):
            ready = select.select([pipe], [], [], 2)[0]
            if not ready and cpu_seconds(process) < cpu_limit and time.monotonic() < deadline:
                continue
            content = os.read(pipe.fileno(), 1 << 20) if ready else b""
            if not content:
                break
            cpu_limit, deadline = cpu_seconds(process) + CPU_SECONDS, time.monotonic() + SECONDS
            pending = (lines.getvalue() + content).split(b"\n")
            lines = io.BytesIO()
            lines.write(pending.pop())
            for line in pending:
                done += 1
                yield json.loads(line)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    status = os.waitpid(process, 0)[1]
    if done < len(cases):
        ending = f"signal {os.WTERMSIG(status)}" if ready and os.WIFSIGNALED(status) else "timeout"
        log = (folder / "crash.txt").read_text()[-3000:]
        yield {**describe(cases[done]), "ending": ending, "seconds": 0, "problems": [f"{ending} {log}"]}


def describe(index: int) -> dict[str, Any]:
    """Return the start of the record of a case that did not end."""
    rng = random.Random(f"case {index}")  # noqa: S311  # not a secret
    name = rng.choices(list(MODEL_WEIGHTS), list(MODEL_WEIGHTS.values()))[0]
    table = commands(rng, name)
    command = rng.choices(list(table), [weight for weight, _ in table.values()])[0]
    return {"case": index, "command": command, "model": name, "mutation": "?"}


def print_summary(records: list[dict[str, Any]]) -> int:
    """Print the endings of each command and the problems; return the number of problems."""
    endings = sorted({record["ending"] for record in records})
    print("| command | cases | " + " | ".join(endings) + " |\n" + "| --- " * (len(endings) + 2) + "|")
    names = sorted({record["command"] for record in records})
    for name in (*names, "all"):
        counts = Counter(record["ending"] for record in records if name in {record["command"], "all"})
        print(f"| {name} | {counts.total()} | " + " | ".join(str(counts[ending]) for ending in endings) + " |")
    formats = Counter(format_of(record["model"]) for record in records)
    seconds = sorted(record["seconds"] for record in records)
    print(f"\n{dict(formats)}; seconds: median {seconds[len(seconds) // 2]}, longest {seconds[-1]}\n")
    problems = [record for record in records if record["problems"]]
    for record in problems:
        last_line = record["problems"][0].strip().split("\n")[-1][:300]
        print(f"{record['case']}: {record['command']}, {record['model']}, {record['mutation']}: {last_line}")
    return len(problems)


def run_cases(cases: list[int], folder: Path, records: list[dict[str, Any]]) -> None:
    """Run cases in workers, append their records to the results, and print problems at once."""
    with (folder / "results.jsonl").open("a") as file:
        while cases:
            done = set()
            for record in run_worker(cases[:CASES_OF_WORKER], folder / "models", folder / "work"):
                records.append(record)
                done.add(record["case"])
                file.write(json.dumps(record) + "\n")
                file.flush()
                if record["problems"]:
                    last_line = record["problems"][0].strip().split("\n")[-1][:300]
                    print(f"{record['case']}: {record['command']}, {record['model']}: {last_line}", flush=True)
            for path in (folder / "work").iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
            cases = [index for index in cases if index not in done]


def prepare_models(folder: Path) -> None:
    """Build the models in a process of its own, because TensorFlow must not start threads in this one."""
    if (folder / "done").exists():
        return
    process = os.fork()
    if not process:
        status = 1
        try:
            build_models(folder)
            (folder / "done").touch()
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(process, 0)[1]:
        sys.exit("The models cannot be built.")


def main() -> None:
    """Run the cases that have no result yet, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "graphquant-mutations")
    parser.add_argument("--only", type=int)
    parser.add_argument("--repeat", action="store_true", help="run the cases with problems again")
    parser.add_argument("--summary", action="store_true", help="print the summary of the results so far")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    results = folder / "results.jsonl"
    records = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if arguments.summary:
        sys.exit(bool(print_summary(records)))
    (folder / "work").mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    import_modules()
    prepare_models(folder / "models")
    if arguments.only is not None:
        target = folder / "work" / f"only{arguments.only}"
        shutil.rmtree(target, ignore_errors=True)
        print(json.dumps(run_case(arguments.only, folder / "models", target, verbose=True), indent=1))
        return
    if arguments.repeat:
        records = [record for record in records if not record["problems"]]
        results.write_text("".join(json.dumps(record) + "\n" for record in records))
    finished = {record["case"] for record in records}
    run_cases([index for index in range(arguments.cases) if index not in finished], folder, records)
    sys.exit(bool(print_summary(records)))


if __name__ == "__main__":
    main()
