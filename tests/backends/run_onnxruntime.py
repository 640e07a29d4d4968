"""Ground truth of verdicts: the ops of a model after the optimizer of ONNX Runtime."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import onnx
import onnxruntime

from graphquant.formats.onnx.runtime import open_inference_session

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

INTEGERS = {2: "uint8", 3: "int8", 4: "uint16", 5: "int16"}
"""Names of those element types whose ops count as low precision."""

SILENT = {"QuantizeLinear", "DequantizeLinear", "If", "Loop", "Scan", "Cast", "Identity"}
"""Op types that are not judged."""

INTEGER_OPS = {"QGemm", "MatMulIntegerToFloat", "MatMulNBits", "ConvInteger", "MatMulInteger", "DynamicQuantizeMatMul"}

ZERO_POINTS = {
    "QuantizeLinear": 2,
    "QLinearConcat": 1,
    "QGemm": 8,
    "QLinearWhere": 8,
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QLinearAdd", "QLinearMul"), 7),
}
"""The slot of the zero point of the output; 4 for the other QLinear ops, that of the data itself for all else."""

MERGED = "_new_reshape"
"""Suffix of the name of a Reshape that ONNX Runtime makes of two."""

COPY = re.compile(r"_token_[0-9]+\Z")
"""Suffix that ONNX Runtime adds to the name of an op that it creates again."""

FUSED = re.compile("/(MatMulAddFusion|GatherSliceToSplitFusion)")
"""Suffix of the name of a Gemm that is made of MatMul and Add, or of a Split that is made of Slices."""


def name_ops(message: Any) -> None:
    """Give every op of the model, including subgraphs, a unique name."""
    for number, node in enumerate(all_nodes(message.graph)):
        node.name = f"{node.name or node.output[0]}@{number}"


def all_nodes(graph: Any) -> Iterator[Any]:
    """Yield all ops of a graph and its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]:
                yield from all_nodes(body)


def optimized(path: Path, *, level: str = "ORT_ENABLE_EXTENDED", config: dict[str, str] | None = None) -> Any:
    """Return the model at `path` as optimized by ONNX Runtime for a CPU, without layout changes."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.log_severity_level = 4
    for key, value in (config or {}).items():
        options.add_session_config_entry(key, value)
    with TemporaryDirectory() as folder:
        written = Path(folder) / "optimized.onnx"
        options.optimized_model_filepath = str(written)
        open_inference_session(path.read_bytes(), options)
        return onnx.load(written, load_external_data=False)


def runs_as(message: Any) -> dict[str, str]:
    """Return the final op of each op of an optimized model, by its original name."""
    found: dict[str, str] = {}
    _walk(message.graph, {}, found)
    return found


def _walk(graph: Any, outer: dict[str, int], found: dict[str, str]) -> None:
    types = dict(outer)
    for value in [*graph.input, *graph.output, *graph.value_info]:
        types[value.name] = value.type.tensor_type.elem_type
    for value in graph.initializer:
        types[value.name] = value.data_type
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _walk(attribute.g, types, found)
        if node.op_type not in SILENT:
            found[FUSED.sub("", COPY.sub("", node.name))] = _type(node, types)
        for name in node.output:
            types.setdefault(name, _made(node, types))


def _made(node: Any, types: dict[str, int]) -> int:
    """Return the element type of the outputs of an op, if it matters here; otherwise 0."""
    place = ZERO_POINTS.get(node.op_type, 4 if node.op_type.startswith("QLinear") else 0)
    if node.op_type in {"DequantizeLinear", "MatMulIntegerToFloat", "MatMulNBits"}:
        return 1
    if node.op_type in {"ArgMax", "Shape", "Cast"} or len(node.input) <= place:
        return 0
    return types.get(node.input[place], 0)


def _type(node: Any, types: dict[str, int]) -> str:
    if node.op_type.startswith("QLinear") or node.op_type in INTEGER_OPS:
        return str(node.op_type)
    first = types.get(node.input[0], 0) if node.input else 0
    return f"{node.op_type} on {INTEGERS[first]}" if first in INTEGERS else str(node.op_type)


def of_functions(actual: dict[str, str], functions: Iterable[str]) -> dict[str, str]:
    """Map ops of inlined functions to their names in the functions; float if any copy is float."""
    prefix = re.compile("|".join(rf"_inlfunc_{re.escape(name)}_(?:token_[0-9]+_)?" for name in functions) or r"\Z")
    found: dict[str, str] = {}
    for label, kind in actual.items():
        name = label
        while (start := prefix.match(name)) and start.end():
            name = name[start.end() :]
        found[name] = kind if name not in found or is_low(found[name]) else found[name]
    return found


def is_low(kind: str) -> bool:
    """Return whether an op that runs as `kind` computes on integers."""
    return " on " in kind or kind.startswith("QLinear") or kind in INTEGER_OPS


def differences(verdicts: Iterable[Any], actual: dict[str, str]) -> list[str]:
    """Return a line for each wrong verdict and each integer op that no verdict names.

    Ops that ONNX Runtime adds have no number and do not count, unless one is the result of merged Reshapes.
    """
    wrong, low = [], set()
    merged = Counter(kind for name, kind in actual.items() if name.endswith(MERGED))
    for verdict in verdicts:
        seen = actual.get(verdict.op, "gone")
        low.add(verdict.op)
        told = verdict.runs_as if verdict.status == "int8" else verdict.status
        if verdict.status == "int8" and seen == "gone" and merged[verdict.runs_as]:
            merged[verdict.runs_as] -= 1
            seen = verdict.runs_as
        right = {
            "int8": seen == verdict.runs_as,
            "fused": seen == "gone",
            "removed": seen == "gone",
            "float": not is_low(seen),
        }[verdict.status]
        if not right:
            wrong.append(f"{verdict.location} ({verdict.type}): {told} was told, {seen} came")
    left = {name: kind for name, kind in actual.items() if name not in low and "@" in name}
    return wrong + [f"{name}: {kind} has no verdict" for name, kind in left.items() if is_low(kind)]


def counts(kinds: Iterable[str]) -> dict[str, int]:
    """Return the number of integer ops of each kind."""
    return dict(sorted(Counter(kind for kind in kinds if is_low(kind)).items()))
