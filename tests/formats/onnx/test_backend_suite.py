"""Models of onnx's backend test suite that onnxruntime runs are quantized, run again and compared."""

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

from graphquant import api
from graphquant.calibration.data import Dataset
from graphquant.errors import GraphQuantError
from graphquant.formats import onnx as format_
from graphquant.formats.onnx.reader import model_from_message
from graphquant.formats.onnx.session import RUNTIME_ERRORS

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
        # A jump at a threshold that 8 bits blur.
        "test_ai_onnx_ml_tree_ensemble_set_membership",
        "test_gridsample_nearest",
        "test_gridsample_volumetric_nearest_align_corners_0",
        "test_hardmax_axis_0",
        "test_hardmax_axis_1",
        "test_round",
        "test_thresholdedrelu_example",
        "test_thresholdedrelu_example_expanded_ver18",
        # Values up to 1000 behind the mask, beside others below 1.
        "test_attention_4d_softcap_neginf_mask_poison",
        "test_attention_4d_softcap_neginf_mask_poison_expanded",
        # Logits from 0 to 10003: a step is 39, and exp() of it far.
        "test_logsoftmax_large_number",
        "test_logsoftmax_large_number_expanded",
        "test_logsoftmax_large_number_expanded_ver18",
        "test_softmax_large_number",
        "test_softmax_large_number_expanded",
        "test_softmax_large_number_expanded_ver18",
    }
)
"""Models whose every tensor cannot have 8 bits."""

REFUSED_BY_ONNXRUNTIME = frozenset(
    {
        # Its int8 average pool knows no dilations.
        "test_averagepool_2d_dilations",
        "test_averagepool_3d_dilations_small",
        *(
            f"test_averagepool_3d_dilations_large_count_include_pad_is_{pad}_ceil_mode_is_{ceil}"
            for pad in (0, 1)
            for ceil in (False, True)
        ),
        # Its optimizer runs ReduceMax and ReduceMin on integers, which their opset 11 does not have.
        "test_dynamicquantizelinear_min_adjusted_expanded",
        "test_dynamicquantizelinear_max_adjusted_expanded",
    }
)
"""Valid models that onnxruntime spoils itself."""

REASON = re.compile(r"\S*[\w/]:\d+\b|'[^']*'|\S+(?:float32|float16|int64)\[[^\]]*\],?|/\S+")
"""What differs between refusals for the same reason: tensors, names, shapes."""


@dataclass(frozen=True)
class Case:
    """A model with one feed."""

    name: str
    message: Any
    feeds: Mapping[str, Any]


@dataclass
class Table:
    """What became of the cases under one rule file: how many, and which, by ending."""

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, found: str, name: str) -> None:
        """Counts one case."""
        self.counts[found] += 1
        self.names.setdefault(found, []).append(name)

    def __str__(self) -> str:
        lines = []
        for found, count in sorted(self.counts.items(), key=lambda item: (-item[1], item[0])):
            some = self.names[found]
            lines.append(f"  {count:5} {found}" + (f" ({', '.join(some[:2])})" if ":" in found else ""))
        return "\n".join(lines)


def stored() -> Iterator[Case]:
    """Yield the models that lie in onnx's wheel, with their own inputs or, where they have none, normal ones."""
    for path in sorted(STORED.rglob("*.onnx")):
        message = onnx.load(path)
        files = sorted((path.parent / "test_data_set_0").glob("input_*.pb"), key=lambda file: int(file.stem[6:]))
        weights = {tensor.name for tensor in message.graph.initializer}
        infos = [info for info in message.graph.input if info.name not in weights]
        feeds = {info.name: _read(file, info) for info, file in zip(infos, files, strict=False)}
        for info in infos[len(files) :]:
            shape = [side.dim_value or 1 for side in info.type.tensor_type.shape.dim]
            feeds[info.name] = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        yield Case(path.parent.name if path.name == "model.onnx" else path.stem, message, feeds)


def _read(file: Path, info: Any) -> Any:
    if info.type.HasField("sequence_type"):
        sequence = onnx.SequenceProto.FromString(file.read_bytes())
        return numpy_helper.to_list(sequence)
    return numpy_helper.to_array(onnx.TensorProto.FromString(file.read_bytes()))


def generated() -> Iterator[Case]:
    """Yield the models of onnx's case generator."""
    with warnings.catch_warnings(action="ignore"):
        from onnx.backend.test.case.node import collect_testcases

        made = collect_testcases(None)
    for case in made:
        if case.model is not None and case.data_sets:
            names = [info.name for info in case.model.graph.input]
            given = zip(names, case.data_sets[0][0], strict=False)
            yield Case(case.name, case.model, {name: _value(value) for name, value in given if value is not None})


def _value(value: Any) -> Any:
    """What onnxruntime takes for an input of the case generator."""
    return np.asarray(value) if isinstance(value, np.generic) else value


def execute(message: Any, feeds: Mapping[str, Any], *, optimized: bool = True) -> list[Any]:
    """The outputs in onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(message.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results: list[Any] = session.run(None, dict(feeds))
    return results


def runnable(case: Case) -> list[Any] | None:
    """The float outputs; None if onnxruntime cannot run the model with its inputs."""
    try:
        return execute(case.message, case.feeds)
    except RUNTIME_ERRORS:
        return None


def quantized(case: Case, rules: str) -> Any:
    """The message with QDQ ops, calibrated on the very feed; None if there is nothing to insert."""
    model = model_from_message(case.message)
    plan = api.plan(model, rules=[rules])
    if not plan.sites:
        return None
    batches = Dataset(count=1, digest="", open_feeds=lambda start, stop: iter([case.feeds][start:stop]))
    stats = api.calibrate(model, plan, batches)
    result = api.insert(model, plan=plan, stats=stats)
    return format_.emit(result.model) if result.inserted else None


def invalid(message: Any, source: Any) -> str:
    """What onnx's checker has against `message` and not against `source`; "" if nothing."""
    try:
        onnx.checker.check_model(message, full_check=True)
    except Exception as error:  # noqa: BLE001  # the checker raises kinds of several modules
        try:
            onnx.checker.check_model(source, full_check=True)
        except Exception:  # noqa: BLE001  # the same
            return ""
        return str(error)
    return ""


def judge(before: list[Any], after: list[Any]) -> str:
    """How the outputs after the insertion compare with those before."""
    lowest = math.inf
    for want, have in zip(_arrays(before), _arrays(after), strict=True):
        if want.shape != have.shape or want.dtype != have.dtype:
            return f"{have.dtype}{list(have.shape)} instead of {want.dtype}{list(want.shape)}"
        if want.dtype.kind == "f":
            finite = np.isfinite(want)
            signal, noise = want[finite].astype(np.float64), have[finite].astype(np.float64) - want[finite]
            if not np.isfinite(noise).all():
                return "not finite"
            if noise.any():
                lowest = min(lowest, 10 * math.log10(max(np.square(signal).sum(), 1e-300) / np.square(noise).sum()))
    return "close" if lowest >= CLOSE else "not close"


def _arrays(outputs: list[Any]) -> list[Any]:
    """The outputs, those in sequences too; an empty optional one is an array without elements."""
    flat = [part for output in outputs for part in (output if isinstance(output, list) else [output])]
    return [np.empty(0) if part is None else np.asarray(part) for part in flat]


def ending(case: Case, rules: str, before: list[Any]) -> str:
    """What became of one case; anything but a refusal or a run model is our fault and raised."""
    try:
        message = quantized(case, rules)
    except GraphQuantError as error:
        return "refused: " + REASON.sub("...", str(error).partition(". ")[0])
    if message is None:
        return "no rule matches"
    fault = invalid(message, case.message)
    if fault:
        return f"invalid model: {fault}"
    try:
        found = judge(before, execute(message, case.feeds))
        if found == "not close" and judge(before, execute(message, case.feeds, optimized=False)) == "close":
            return "close in onnxruntime without its optimizations only"
    except RUNTIME_ERRORS as error:
        return f"onnxruntime refuses it: {str(error).strip().splitlines()[0]}"
    return found


def test_backend_suite_is_quantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each runnable model gets QDQ ops and stays close, or is refused with a reason; the counts are printed."""
    everything = tmp_path / "everything.toml"
    everything.write_text(EVERYTHING)
    tables = {"onnxruntime": Table(), "weight_only": Table(), "everything": Table()}
    total = ran = 0
    for case in itertools.chain(stored(), generated()):
        total += 1
        before = runnable(case)
        if before is None:
            continue
        ran += 1
        first = ending(case, "onnxruntime", before)
        tables["onnxruntime"].add(first, case.name)
        if first == "no rule matches":
            tables["weight_only"].add(ending(case, "weight_only", before), case.name)
        tables["everything"].add(ending(case, str(everything), before), case.name)
    with capsys.disabled():
        print(f"\n{total} models load, {ran} of them run in onnxruntime with their inputs")  # noqa: T201  # the report
        for name, table in tables.items():
            print(f"{name}:\n{table}")  # noqa: T201  # the report
    assert (total > 2000, ran > 1400) == (True, True)
    for name in ("onnxruntime", "weight_only"):
        assert set(tables[name].names) <= {"close", "not close", "no rule matches"}
        assert set(tables[name].names.get("not close", [])) <= NOT_CLOSE
    assert tables["onnxruntime"].counts["close"] > 170  # average pools alone are no reason to quantize
    found = tables["everything"].names
    assert set(found.pop("not close")) <= NOT_CLOSE
    assert [one for one in found if not one.startswith(("close", "no rule matches", "refused", "onnxruntime"))] == []
    refused = [name for one, names in found.items() if one.startswith("onnxruntime") for name in names]
    assert set(refused) <= REFUSED_BY_ONNXRUNTIME
    assert tables["everything"].counts["close"] > 1000
