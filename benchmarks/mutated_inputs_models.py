"""Models of `mutated_inputs.py` with their data, plans and manifests, and the commands that read them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from file_mutations import chance

if TYPE_CHECKING:
    import random

    import onnx

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "sample_models"

DATA = "data.npz"
STATS = "stats.gqs"
PLAN = "plan.json"
RULES = "rules.toml"
MANIFEST = "graphquant.toml"
RANGES = "ranges.tflite"
RANGES_MAP = "ranges.toml"
PACKED_RULES = "packed.toml"

PACKED_SCHEME = """description = "Weights of products that are stored packed"
[scheme.block]
dtype = "uint4"
zero = "asymmetric"
per = "block"
block_size = 32
family = "onnx-fused"
args = { form = "packed" }
[[rule]]
name = "product"
producer = { kind = "parameter", min_rank = 2 }
consumer = { kind = "matmul|gemm", input = "weight" }
quantize = "block"
"""
"""Rules whose results contain MatMulNBits."""

MODEL_WEIGHTS = {
    **dict.fromkeys(("digits_cnn.onnx", "digits_cnn_bn.onnx", "digits_rnn.onnx", "digits_nested.onnx"), 5),
    **dict.fromkeys(("conv.onnx", "depthwise.onnx", "transposed.onnx", "gemm.onnx", "attention.onnx"), 4),
    **dict.fromkeys(("layernorm.onnx", "lstm.onnx", "if.onnx", "loop.onnx", "function.onnx", "float16.onnx"), 4),
    "packed.onnx": 8, "external.onnx": 6, "matmul.onnxtxt": 2, "conv.textproto": 2, "gemm.json": 2,
    "digits_cnn.pb": 5, "digits_rnn.pb": 3, "digits_cnn.pbtxt": 2, "digits_cnn.meta": 4,
    "digits_cnn_saved_model": 2.5, "digits_rnn_saved_model": 1.5, "net.keras": 0.2, "digits_cnn.tflite": 6,
    "digits_cnn_int16.tflite": 3,
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
    graphs = {**GRAPHS, "packed": build_products}
    if stem in graphs:
        message = graphs[stem](21 if stem in {"conv", "gemm", "if", "lstm", "packed"} else 13)
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


def build_products(opset: int) -> onnx.ModelProto:
    """Return two products with a Relu, whose weights are wide enough for blocks."""
    from opsets import make_model, node, weight

    nodes = [node("MatMul", "x w1", "m"), node("Relu", "m", "r"), node("MatMul", "r w2", "y")]
    return make_model(opset, nodes, ((3, 64), (3, 32)), [weight("w1", 64, 64), weight("w2", 64, 32)])


def write_tensorflow_model(path: Path) -> None:
    """Write a file that only TensorFlow or Keras can write."""
    import numpy as np
    import tensorflow as tf

    if path.suffix == ".tflite":
        converter = tf.lite.TFLiteConverter.from_saved_model(str(SAMPLES / "digits_cnn_saved_model"))
        images = np.load(SAMPLES / "digits_cnn_calib.npz")["image"]
        if path.stem.endswith("int16"):
            kind = tf.lite.OpsSet.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8
            converter.target_spec.supported_ops = [kind]
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
    (folder / PACKED_RULES).write_text(PACKED_SCHEME)
    other_rules = {"packed.onnx": folder / PACKED_RULES, "float16.onnx": "weight_only"}
    rule_options = ["--rules", other_rules[name]] if name in other_rules else []
    commands: list[list[object]] = [
        ["insert", model, "--data", folder / DATA, "-o", quantized, "--no-validate", *rule_options],
        ["plan", model, "--format", "json", "-o", folder / PLAN],
        ["calibrate", model, "--data", folder / DATA, "-o", folder / STATS],
    ]
    for command in commands if format_of(name) != "tflite" else ():
        if (result := invoke_cli(*command)).exit_code:
            raise SystemExit(f"{name}: {command}: {result.output}")
    rule_file = ROOT / "rules" / ("onnxruntime.toml" if format_of(name) == "onnx" else "tflite.toml")
    shutil.copy(rule_file, folder / RULES)
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


Command = tuple[list[str], list[str]]
"""Arguments, and the files that may be mutated."""

RULE_FILES = sorted(path.stem for path in ROOT.joinpath("rules").glob("*.toml"))
NO_DATA_RULES = ("fixed_point", "weight_only", "weight_only_int4", "weight_only_int8")


def insert_options(rng: random.Random) -> list[str]:
    """Return options of insert, mostly none."""
    options = (["--float-weights"], ["--allow-empty"], ["--no-validate"], ["--samples", "5"], ["--method", "entropy"])
    if chance(rng, 0.1):
        return ["--io", rng.choice(("int8", "uint8", "int16"))]
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
    if format_of(name) == "onnx":
        packed = [*insert, "--rules", PACKED_RULES]
        table["insert, packed"] = 4, (packed, [model, model, PACKED_RULES])
    if name.endswith("saved_model"):
        convert = ["insert", model, "-o", "out.tflite", "--data", DATA, "--rules", rng.choice(("tflite", "tflite16"))]
        table["insert to TFLite"] = 3, (convert, [model, model, DATA])
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
