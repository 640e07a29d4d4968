"""Record each result of `insert` over many models and rule files, and compare two records of two checkouts.

A refactoring must not change the plans or the written files. Record with both versions and compare::

    PYTHONPATH=OLD_CHECKOUT python benchmarks/same_results.py record old.json
    PYTHONPATH=NEW_CHECKOUT python benchmarks/same_results.py record new.json
    python benchmarks/same_results.py compare old.json new.json

The record of one case holds the plan as JSON and digests of the written file: one of all bytes, and one without the
metadata that graphquant itself stores in the model (its texts and its keys may be renamed on purpose).
`compare` first renames the plan's old keys and values by the tables below. It counts the results that differ by each
intended change and prints every other difference. Two records of one checkout, made with different values of
PYTHONHASHSEED, show whether results are reproducible: all files must be the same to the byte.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import sys
import tempfile
import time
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "models"

RULES = (
    "fixed_point", "generic", "onnxruntime", "openvino", "qnn", "qnn16", "tables_int4", "tensorrt", "tflite",
    "vitis_ai", "weight_only", "weight_only_int4", "weight_only_int8",
)  # fmt: skip

MODELS = {
    "digits_cnn.onnx": "digits_cnn_calib.npz",
    "digits_cnn_bn.onnx": "digits_cnn_calib.npz",
    "digits_cnn.pb": "digits_cnn_calib.npz",
    "digits_cnn.pbtxt": "digits_cnn_calib.npz",
    "digits_cnn_saved_model": "digits_cnn_calib.npz",
    "digits_rnn.onnx": "digits_rnn_calib.npz",
    "digits_rnn.pb": "digits_rnn_calib.npz",
    "digits_rnn_saved_model": "digits_rnn_calib.npz",
    "digits_nested.onnx": "digits_nested_calib.npz",
    "silero_vad_16k_op15.onnx": "silero_vad.npz",
    "qlstm_tract.onnx": "random:16",
    "mtcnn.pb": None,
    "kws/saved_model": "kws/calib.npz",
    "ultraface/version-RFB-320.onnx": "ultraface/images.npz?",
    "dtln/model_1.onnx": "dtln/model_1_calib.npz",
    "dtln/model_2.onnx": "dtln/model_2_calib.npz",
    "dtln/saved_model": "dtln/saved_model_calib.npz",
    "basic_pitch/nmp.onnx": "basic_pitch/calib.npz",
    "basic_pitch/saved_model": "basic_pitch/calib.npz",
    "osf/lm_model0_opt.onnx": "random:16",
    "osf/mnv3_detection_opt.onnx": "random:16",
    "odd/squeezenet_fp16.onnx": "random:16",
    "odd/yolox_nano.onnx": "random:16",
    "odd/tiny_gpt2_past.onnx": "random:16",
    "odd/occ_model0.onnx": "random:16",
    "odd/t2o_regression_saved_model": "random:16",
    "odd/taxi_tfma_saved_model": "random:16",
}

KEYS: dict[str, str] = {"corrections": "algorithms", "absorbed": "fused", "twin": "clone_of"}
"""Keys of the plan that were renamed, old to new."""

VALUES: dict[str, str] = {
    "equalization": "cross-layer-equalization",
    "migration": "smoothquant",
    "error-compensation": "gptq",
    "adaptive-rounding": "adaround",
}
"""Values of the plan that were renamed, old to new."""

IGNORED = frozenset({"schema", "unused", "reason", "message", "why", "digest", "detail", "code", "targets"})
"""Keys of the plan that hold prose, a digest of a file that holds prose, or names of rules that matched nothing. Old
plans do not have the targets."""

PLACEMENT = "sites skips schemes steps prepared normalized"

INTENDED: dict[str, tuple[str, str]] = {
    "patterns match by meaning: LayerNorm with x * x, joined heads in both orders": (
        PLACEMENT,
        (
            "digits_rnn* onnxruntime|digits_rnn* openvino|digits_rnn* vitis_ai|basic_pitch/* onnxruntime"
            "|basic_pitch/* openvino|basic_pitch/* tflite"
        ),
    ),
    "a result without a quantized tensor is an error": (
        "outcome",
        (
            "* tables_int4|digits_rnn.pb weight_only_*|digits_rnn_saved_model weight_only_*|odd/t2o_* *|odd/taxi_* *"
            "|dtln/model_1.onnx tensorrt"
        ),
    ),
    "a result with new NaN or infinite values is an error": (
        "outcome",
        "dtln/saved_model openvino|dtln/saved_model qnn|dtln/saved_model tflite|dtln/saved_model vitis_ai",
    ),
    "onnxruntime infers types that onnx does not know, so more is quantized": (
        PLACEMENT,
        "osf/*|odd/occ_model0.onnx fixed_point",
    ),
    "constants that a pair in a subgraph reads are in the subgraph": (
        "normalized",
        "digits_nested.onnx *|digits_rnn.onnx *|silero* onnxruntime|silero* qnn*|silero* tflite|silero* vitis_ai",
    ),
    "inputs of Concats: float if they span few integers, tied for OpenVINO and Vitis AI": (
        PLACEMENT,
        (
            "digits_nested.onnx openvino|digits_rnn* openvino|dtln/model_* [otv]*|silero* openvino|silero* tflite"
            "|silero* vitis_ai|ultraface/* openvino|odd/yolox* [oqv]*|basic_pitch/* [oqtv]*"
        ),
    ),
    "products with sums and biases, and Concats before depthwise convolutions, as the runtimes fuse them": (
        PLACEMENT,
        "digits_* onnxruntime|dtln/* onnxruntime|osf/mnv3* tensorrt",
    ),
    "a Clip without limits before float ops whose weights ONNX Runtime would quantize": (
        "normalized",
        "digits_cnn_bn.onnx tflite",
    ),
    "inputs of quantized models are not quantized again": (PLACEMENT, "qlstm_tract.onnx *"),
    "biases of convolutions are int32, and convolutions with narrow groups float, for ONNX Runtime": (
        PLACEMENT,
        "*.onnx onnxruntime",
    ),
    "products that ONNX Runtime fused are split": (PLACEMENT, "osf/mnv3*"),
    "the opset of models whose nodes are not in order is raised": ("outcome", "odd/occ_model0.onnx *"),
}
"""Intended changes: the parts of a result that may differ, and patterns of "MODEL RULES". The commits are in
docs/decisions/0073-same-results.md."""


def find_model(name: str) -> Path:
    """Path of a sample model or of a real one."""
    local = ROOT / "sample_models" / name
    return local if local.exists() else SHARED / name


def find_data(name: str | None) -> str | None:
    """Data spec of a case."""
    if name is None or name == "random:16":
        return name
    if name.endswith("?"):
        return "random:16"
    return str(find_model(name))


def normalized_digest(path: Path) -> str:
    """Digest of a written model without the metadata that graphquant stores in it."""
    if path.suffix == ".onnx":
        import onnx

        model = onnx.load(str(path))
        del model.metadata_props[:]

        def clear(graph: Any) -> None:
            for node in graph.node:
                del node.metadata_props[:]
                node.doc_string = ""
                for attribute in node.attribute:
                    for body in [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]:
                        clear(body)

        clear(model.graph)
        for function in model.functions:
            clear(function)
        return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    from google.protobuf import text_format

    digest = hashlib.sha256()
    if path.is_dir():
        proto = saved_model(path / "saved_model.pb")
        digest.update(proto)
        variables = sorted(path.glob("variables/*"))
        for file in variables:
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()
    from tensorflow.core.framework import graph_pb2

    graph = graph_pb2.GraphDef()
    data = path.read_bytes()
    if path.suffix == ".pbtxt":
        text_format.Parse(data, graph)
    else:
        graph.ParseFromString(data)
    clear_graph(graph)
    return hashlib.sha256(graph.SerializeToString(deterministic=True)).hexdigest()


def clear_graph(graph: Any) -> None:
    """Remove graphquant's own attributes from a GraphDef."""
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    for node in nodes:
        for key in [key for key in node.attr if key.startswith("_graphquant")]:
            del node.attr[key]
    for function in graph.library.function:
        for key in [key for key in function.attr if key.startswith("_graphquant")]:
            del function.attr[key]


def saved_model(path: Path) -> bytes:
    """Bytes of a SavedModel without graphquant's attributes and collections."""
    from tensorflow.core.protobuf import saved_model_pb2

    model = saved_model_pb2.SavedModel()
    model.ParseFromString(path.read_bytes())
    for meta in model.meta_graphs:
        clear_graph(meta.graph_def)
        for key in [key for key in meta.collection_def if "graphquant" in key]:
            del meta.collection_def[key]
    return bytes(model.SerializeToString(deterministic=True))


def run_case(name: str, rules: str, data: str | None, folder: Path) -> dict[str, Any]:
    """Insert one rule file into one model, and record the plan and the written file's digests, or the error's kind."""
    import graphquant as gq
    from graphquant.errors import GraphQuantError

    try:
        from graphquant.quantize import plan_to_json as to_json
    except ImportError:
        from graphquant.plans import to_json

    options: dict[str, Any] = {"rules": rules, "samples": 16}
    if data is not None:
        options["data"] = data
    if "check" in inspect.signature(gq.insert).parameters:
        options["check"] = True
    path = find_model(name)
    try:
        result = gq.insert(path, **options)
        output = result.save(folder / ("out" + path.suffix), force=True)
    except GraphQuantError as error:
        return {"error": type(error).__name__, "exit": error.exit_code}
    raw = hashlib.sha256()
    for file in sorted(output.rglob("*")) if output.is_dir() else [output]:
        if file.is_file():
            raw.update(file.read_bytes())
    return {
        "plan": to_json(result.plan),
        "sites": len(result.inserted),
        "raw": raw.hexdigest(),
        "normalized": normalized_digest(output),
    }


def record(out: Path, only: str | None) -> None:
    """Run all cases and write the record; a case is stored as soon as it has run."""
    cases: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for name, data in MODELS.items():
        if not find_model(name).exists() or (only and only not in name):
            continue
        for rules in RULES:
            key = f"{name} {rules}"
            if key in cases:
                continue
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                cases[key] = run_case(name, rules, find_data(data), Path(folder))
            sys.stderr.write(f"{time.perf_counter() - start:6.1f} s  {key}  {cases[key].get('error', '')}\n")
            out.write_text(json.dumps(cases, sort_keys=True))


def rename(value: Any) -> Any:
    """Apply the tables of renamed keys and values, and drop prose."""
    if isinstance(value, dict):
        pairs = ((KEYS.get(key, key), rename(item)) for key, item in value.items())
        return {key: item for key, item in pairs if key not in IGNORED}
    if isinstance(value, list):
        return [rename(item) for item in value]
    return VALUES.get(value, value) if isinstance(value, str) else value


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """List the paths at which two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted({*old, *new}):
            found += differences(old.get(key), new.get(key), f"{where}/{key}")
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            line
            for index, pair in enumerate(zip(old, new, strict=True))
            for line in differences(*pair, f"{where}/{index}")
        ]
    return [] if old == new else [f"{where}: {str(old)[:80]} -> {str(new)[:80]}"]


def intended_changes(key: str, lines: list[str], *, failed: bool) -> list[str]:
    """Intended changes that cause the differences of a result; none if a difference has no such cause."""
    parts = {"outcome"} if failed else {line.split(":")[0].strip("/").split("/")[0] for line in lines}
    causes = {
        cause: set(covered.split()) & parts
        for cause, (covered, patterns) in INTENDED.items()
        if any(fnmatch(key, pattern) for pattern in patterns.split("|"))
    }
    return [cause for cause, covered in causes.items() if covered] if parts <= set().union(*causes.values()) else []


def compare(old: Path, new: Path) -> int:
    """Print the differences of two records; the exit code."""
    before, after = json.loads(old.read_text()), json.loads(new.read_text())
    intended: Counter[str] = Counter()
    different = unexplained = raw = 0
    for key in sorted({*before, *after}):
        if key not in before or key not in after:
            sys.stdout.write(f"{key}: only in {'the old' if key in before else 'the new'} record\n")
            unexplained += 1
            continue
        left, right = before[key], after[key]
        lines = differences(rename(left.get("plan")), rename(right.get("plan")))
        lines += [
            f"{field}: {left.get(field)} -> {right.get(field)}"
            for field in ("error", "exit", "sites", "normalized")
            if left.get(field) != right.get(field)
        ]
        raw += "raw" in left and left["raw"] == right.get("raw")
        different += bool(lines)
        causes = intended_changes(key, lines, failed=left.get("error") != right.get("error"))
        intended.update(causes)
        if lines and not causes:
            unexplained += 1
            sys.stdout.write(f"{key}\n" + "".join(f"    {line}\n" for line in lines[:8]))
    sys.stdout.writelines(f"{count:5d}  {cause}\n" for cause, count in intended.items())
    sys.stdout.write(
        f"{len(before)} cases, {different} differ, {unexplained} of them without an intended change; "
        f"{raw} files are the same to the byte.\n"
    )
    return 1 if unexplained else 0


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("record")
    one.add_argument("out", type=Path)
    one.add_argument("--only")
    two = verbs.add_parser("compare")
    two.add_argument("old", type=Path)
    two.add_argument("new", type=Path)
    given = parser.parse_args()
    if given.verb == "record":
        record(given.out, given.only)
        return 0
    return compare(given.old, given.new)


if __name__ == "__main__":
    sys.exit(main())
