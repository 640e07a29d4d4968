"""Quantization of the models in onnx's backend test suite: each runs again and is compared with the float model."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import graphquant as gq
from graphquant.calibration.data import Dataset
from graphquant.errors import GraphQuantError
from graphquant.formats import onnx as format_
from graphquant.formats.onnx.reader import model_from_message
from graphquant.formats.onnx.runtime import RUNTIME_ERRORS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = pytest.mark.slow

STORED = Path(onnx.__file__).parent / "backend/test/data"

CLOSE = 20.0
"""SQNR in dB that an output must reach to count as close; 8 bits give normal values about 40."""

EVERYTHING = """
description = "every float tensor for every consumer"
prepare = ["initializer-inputs"]
[scheme.any]
dtype = "uint8"
zero = "asymmetric"
observe = "minmax"
[[rule]]
name = "sizes"
consumer = { kind = "*", input = "sizes|region|ratio|repeats|shape|axis|indices|count|lengths|padding" }
quantize = "float"
[[rule]]
name = "any"
consumer = { kind = "*" }
quantize = "any"
"""


NOT_CLOSE = frozenset(
    {
        # The output jumps at a threshold, which 8 bits blur.
        "test_ai_onnx_ml_tree_ensemble_set_membership",
        "test_gridsample_nearest",
        "test_gridsample_volumetric_nearest_align_corners_0",
        "test_hardmax_axis_0",
        "test_hardmax_axis_1",
        "test_round",
        "test_thresholdedrelu_example",
        "test_thresholdedrelu_example_expanded_ver18",
        # Masked values reach 1000, while others are below 1.
        "test_attention_4d_softcap_neginf_mask_poison",
        "test_attention_4d_softcap_neginf_mask_poison_expanded",
        # Logits range from 0 to 10003, so a step is 39, and exp() changes by orders of magnitude.
        "test_logsoftmax_large_number",
        "test_logsoftmax_large_number_expanded",
        "test_logsoftmax_large_number_expanded_ver18",
        "test_softmax_large_number",
        "test_softmax_large_number_expanded",
        "test_softmax_large_number_expanded_ver18",
    }
)
"""Models that are inaccurate with 8 bits for every tensor."""

REJECTED_BY_ONNXRUNTIME = frozenset(
    {
        # Its int8 average pool does not support dilations.
        "test_averagepool_2d_dilations",
        "test_averagepool_3d_dilations_small",
        *(
            f"test_averagepool_3d_dilations_large_count_include_pad_is_{pad}_ceil_mode_is_{ceil}"
            for pad in (0, 1)
            for ceil in (False, True)
        ),
        # Its optimizer runs ReduceMax and ReduceMin on integers, which their opset 11 does not actual.
        "test_dynamicquantizelinear_min_adjusted_expanded",
        "test_dynamicquantizelinear_max_adjusted_expanded",
    }
)
"""Valid models that onnxruntime's optimizer makes invalid."""

REASON = re.compile(r"\S*[\w/]:\d+\b|'[^']*'|\S+(?:float32|float16|int64)\[[^\]]*\],?|/\S+")
"""Parts that differ between errors with the same reason: tensors, names, shapes."""

MISSING_KERNEL = re.compile(r"Could not find an implementation for (Quantize|Dequantize)Linear\(\d+\)")
"""Error of an onnxruntime that is older than the opset of the newest models in the suite."""


@dataclass(frozen=True)
class Case:
    """A model with one feed."""

    name: str
    message: Any
    feeds: Mapping[str, Any]


@dataclass
class OutcomeTable:
    """Number and names of the cases by outcome, for one rule file."""

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, outcome: str, name: str) -> None:
        """Count one case."""
        self.counts[outcome] += 1
        self.names.setdefault(outcome, []).append(name)

    def __str__(self) -> str:
        lines = []
        for outcome, count in sorted(self.counts.items(), key=lambda entry: (-entry[1], entry[0])):
            examples = f" ({', '.join(self.names[outcome][:2])})" if ":" in outcome else ""
            lines.append(f"  {count:5} {outcome}{examples}")
        return "\n".join(lines)


def stored_cases() -> Iterator[Case]:
    """Yield the models in onnx's wheel with their stored inputs, or with normal random inputs."""
    for path in sorted(STORED.rglob("*.onnx")):
        message = onnx.load(path)
        files = sorted((path.parent / "test_data_set_0").glob("input_*.pb"), key=lambda file: int(file.stem[6:]))
        weights = {tensor.name for tensor in message.graph.initializer}
        infos = [info for info in message.graph.input if info.name not in weights]
        feeds = {info.name: _read_input(file, info) for info, file in zip(infos, files, strict=False)}
        for info in infos[len(files) :]:
            shape = [side.dim_value or 1 for side in info.type.tensor_type.shape.dim]
            feeds[info.name] = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        yield Case(path.parent.name if path.name == "model.onnx" else path.stem, message, feeds)


def _read_input(file: Path, info: Any) -> Any:
    if info.type.HasField("sequence_type"):
        sequence = onnx.SequenceProto.FromString(file.read_bytes())
        return numpy_helper.to_list(sequence)
    return numpy_helper.to_array(onnx.TensorProto.FromString(file.read_bytes()))


def case_generator_models() -> Iterator[Case]:
    """Yield the models of onnx's case generator."""
    with warnings.catch_warnings(action="ignore"):
        from onnx.backend.test.case.node import collect_testcases

        test_cases = collect_testcases(None)
    for case in test_cases:
        if case.model is not None and case.data_sets:
            names = [info.name for info in case.model.graph.input]
            feeds = zip(names, case.data_sets[0][0], strict=False)
            yield Case(case.name, case.model, {name: _feed_value(value) for name, value in feeds if value is not None})


def _feed_value(value: Any) -> Any:
    """Convert an input of the case generator to a value that onnxruntime accepts."""
    return np.asarray(value) if isinstance(value, np.generic) else value


def execute(message: Any, feeds: Mapping[str, Any], *, optimized: bool = True) -> list[Any]:
    """Return the outputs in onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(message.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results: list[Any] = session.run(None, dict(feeds))
    return results


def float_outputs(case: Case) -> list[Any] | None:
    """Return the outputs of the float model; None if onnxruntime cannot run it with its inputs."""
    try:
        return execute(case.message, case.feeds)
    except RUNTIME_ERRORS:
        return None


def quantize_case(case: Case, rules: str) -> Any:
    """Return the message with QDQ ops, calibrated on its feed; None if there is nothing to insert."""
    model = model_from_message(case.message)
    plan = gq.plan(model, rules=[rules])
    if not plan.sites:
        return None
    batches = Dataset(count=1, digest="", open_feeds=lambda start, stop: iter([case.feeds][start:stop]))
    stats = gq.calibrate(model, plan, batches)
    result = gq.insert(model, plan=plan, stats=stats, allow_empty=True)
    return format_.emit(result.model) if result.inserted else None


def new_checker_error(message: Any, source: Any) -> str:
    """Return the error that onnx's checker raises for `message` but not for `source`, "" if there is none."""
    try:
        onnx.checker.check_model(message, full_check=True)
    except Exception as error:  # noqa: BLE001  # the checker raises exceptions of several modules
        try:
            onnx.checker.check_model(source, full_check=True)
        except Exception:  # noqa: BLE001  # the same
            return ""
        return str(error)
    return ""


def compare_outputs(expected_outputs: list[Any], outputs: list[Any]) -> str:
    """Return the result of comparing the outputs of the quantized model with those of the float model."""
    lowest = math.inf
    for expected, actual in zip(_flat_arrays(expected_outputs), _flat_arrays(outputs), strict=True):
        if expected.shape != actual.shape or expected.dtype != actual.dtype:
            return f"{actual.dtype}{list(actual.shape)} instead of {expected.dtype}{list(expected.shape)}"
        if expected.dtype.kind == "f":
            finite = np.isfinite(expected)
            signal, noise = expected[finite].astype(np.float64), actual[finite].astype(np.float64) - expected[finite]
            if not np.isfinite(noise).all():
                return "not finite"
            if noise.any():
                lowest = min(lowest, 10 * math.log10(max(np.square(signal).sum(), 1e-300) / np.square(noise).sum()))
    return "close" if lowest >= CLOSE else "not close"


def _flat_arrays(outputs: list[Any]) -> list[Any]:
    """Return the outputs and the elements of sequences; an empty optional becomes an array without elements."""
    flat = [value for output in outputs for value in (output if isinstance(output, list) else [output])]
    return [np.empty(0) if value is None else np.asarray(value) for value in flat]


def case_outcome(case: Case, rules: str, expected: list[Any]) -> str:  # noqa: PLR0911  # one for each outcome
    """Return the outcome of one case; exceptions other than rejections are bugs and are raised."""
    try:
        message = quantize_case(case, rules)
    except GraphQuantError as error:
        return "rejected: " + REASON.sub("...", str(error).partition(". ")[0])
    if message is None:
        return "no rule matches"
    problem = new_checker_error(message, case.message)
    if problem:
        return f"invalid model: {problem}"
    try:
        outcome = compare_outputs(expected, execute(message, case.feeds))
        unoptimized = execute(message, case.feeds, optimized=False) if outcome == "not close" else []
        if unoptimized and compare_outputs(expected, unoptimized) == "close":
            return "close in onnxruntime without its optimizations only"
    except RUNTIME_ERRORS as error:
        if MISSING_KERNEL.search(str(error)):
            return "no kernel"
        return f"onnxruntime rejects it: {str(error).strip().splitlines()[0]}"
    return outcome


def test_backend_suite_is_quantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each runnable model gets QDQ ops and stays close, or is rejected with a reason; the counts are printed."""
    everything = tmp_path / "everything.toml"
    everything.write_text(EVERYTHING)
    tables = {"onnxruntime": OutcomeTable(), "weight_only": OutcomeTable(), "everything": OutcomeTable()}
    total = ran = 0
    for case in itertools.chain(stored_cases(), case_generator_models()):
        total += 1
        expected = float_outputs(case)
        if expected is None:
            continue
        ran += 1
        first = case_outcome(case, "onnxruntime", expected)
        tables["onnxruntime"].add(first, case.name)
        if first == "no rule matches":
            tables["weight_only"].add(case_outcome(case, "weight_only", expected), case.name)
        tables["everything"].add(case_outcome(case, str(everything), expected), case.name)
    with capsys.disabled():
        print(f"\n{total} models load, {ran} of them run in onnxruntime with their inputs")  # noqa: T201  # the report
        for name, table in tables.items():
            print(f"{name}:\n{table}")  # noqa: T201  # the report
    assert (total > 2000, ran > 1400) == (True, True)
    for name in ("onnxruntime", "weight_only"):
        assert set(tables[name].names) <= {"close", "not close", "no rule matches", "no kernel"}
        assert set(tables[name].names.get("not close", [])) <= NOT_CLOSE
    assert tables["onnxruntime"].counts["close"] > 170  # average pools alone are no reason to quantize
    outcomes = tables["everything"].names
    assert set(outcomes.pop("not close")) <= NOT_CLOSE
    assert all(
        outcome.startswith(("close", "no rule matches", "no kernel", "rejected", "onnxruntime")) for outcome in outcomes
    )
    rejected = [name for outcome, names in outcomes.items() if outcome.startswith("onnxruntime") for name in names]
    assert set(rejected) <= REJECTED_BY_ONNXRUNTIME
    assert tables["everything"].counts["close"] > 1000
