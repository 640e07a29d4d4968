"""JSON of the commands: one pydantic model for each result, in this module that of `insert`.

`as_json` of a model is the JSON, and results.schema.json has the JSON Schemas. docs/json.md describes the keys.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator

from graphquant.analysis.conversion_report import ConversionReport, FloatOp
from graphquant.calibration.data.check import DataFinding
from graphquant.optimize.algorithm import AlgorithmResult
from graphquant.quantize import SkipCode
from graphquant.quantize.integer_io import BoundaryTensor
from graphquant.visualize.json_results import (
    CheckedOp,
    CheckResult,
    CompareResult,
    DataCheckResult,
    DiffResult,
    Digests,
    ExplainResult,
    InspectResult,
    InspectStatsResult,
    JsonObject,
    JsonResult,
    Metric,
    Negated,
    OptionalText,
    ParametersJson,
    ScaleAndZeroPoint,
    TensorJson,
    Text,
    UseJson,
    at,
    if_set,
)

if TYPE_CHECKING:
    from graphquant.api.result import Result
    from graphquant.optimize.latency import TimeRatio


class StepJson(JsonObject):
    """A preparation step."""

    step: str
    target: str
    detail: str
    why: str


class Calibration(JsonObject):
    """Origin of the activation ranges."""

    samples: int = at("calibration_samples")
    random: bool = at("has_random_data")
    blocks: int = at("stats.blocks", 0)
    complete: bool = at("stats.complete", True)  # the default of a key
    digests: Digests = at("stats.runs", ())
    stats: OptionalText = at("stats_path")


class InsertedSite(ParametersJson):
    """A quantized tensor with its parameters."""

    tensor: TensorJson = at("pair.site.tensor")
    uses: tuple[UseJson, ...] = at("pair.site.uses")
    output: TensorJson = at("pair.output")
    outputs: tuple[TensorJson, ...] = at("pair.outputs")
    rule: str = at("pair.site.rule")
    why: str = at("pair.site.why")
    folded: bool = at("pair.folded")
    method: str = at("pair.site.scheme.observe.name")
    note: str
    choices: tuple[str, ...]


def _inserted_sites(result: Result) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(
            pair=pair, params=pair.params, note=result.site_notes.get(pair.site.tensor, ""), choices=choices
        )
        for pair, choices in zip(result.inserted, result.scale_reasons, strict=True)
    ]


class ScaleChangeJson(JsonObject):
    """A change of a tensor's quantization, with its reason."""

    tensor: TensorJson
    message: str


class ConflictJson(JsonObject):
    """Two rules whose requirements contradict each other."""

    rules: tuple[str, str]
    tensors: tuple[TensorJson, TensorJson]
    requested: tuple[str, str] = at("wants")
    resolution: str


class ActivationSqnr(JsonObject):
    """Estimated SQNR of an activation."""

    tensor: TensorJson
    sqnr: Annotated[float, BeforeValidator(lambda value: round(value, 2))]
    clipped: float


class FloatTensor(JsonObject):
    """A tensor that a search keeps in float."""

    tensor: Text
    sensitivity_db: float | None


class ChangedTensor(JsonObject):
    """A tensor that a search quantizes in another way than the rules."""

    tensor: Text
    candidate: str


def _pairs(*keys: str) -> BeforeValidator:
    """Turn a mapping into a list of objects with these two keys."""
    return BeforeValidator(lambda mapping: [dict(zip(keys, pair, strict=True)) for pair in mapping.items()])


class SearchSize(JsonObject):
    """Sizes in bytes."""

    bytes: int = at("size")
    budget: int | None = at("max_size")
    float_bytes: int = at("float_size")
    estimated: tuple[Text, ...] = at("estimated_weights")


LatencyRatio = dict[Literal["ms", "float_ms", "ratio", "low", "high"], float] | None


def _latency_ratio(ratio: TimeRatio | None, samples: int) -> dict[str, float] | None:
    """Return milliseconds per sample, and the ratio to float with its 95% interval."""
    if ratio is None:
        return None
    first, second = 1000 * ratio.first_seconds / samples, 1000 * ratio.second_seconds / samples
    return {"ms": first, "float_ms": second, "ratio": ratio.median, "low": ratio.low, "high": ratio.high}


class SearchLatency(JsonObject):
    """Measured latency."""

    runtime: str
    plans: int = at("timed_plans")
    quantized: Negated = at("all_float")
    samples: int = at("timed_samples")
    rules: Annotated[
        LatencyRatio, BeforeValidator(lambda trace: _latency_ratio(trace.rules_ratio, trace.timed_samples))
    ] = at("itself")
    outcome: Annotated[
        LatencyRatio, BeforeValidator(lambda trace: _latency_ratio(trace.outcome_ratio, trace.timed_samples))
    ] = at("itself")


class RepairStepJson(JsonObject):
    """A kind of change that a repair tried; `sqnr` is that with the changes before it."""

    change: str
    targets: tuple[str, ...]
    sqnr: Metric
    kept: bool


class Repair(JsonObject):
    """Changes of a plan whose outputs missed a target, in dB of the worst output."""

    met: bool
    requested: bool
    target: float = at("target_sqnr")
    default_sqnr: Metric
    sqnr: Metric
    steps: tuple[RepairStepJson, ...]
    float_blocks: tuple[str, ...]
    blocks: int
    stopped: Literal["work", "time", "interrupt", "error"] | None = at("stop_reason")
    problem: OptionalText


class Search(JsonObject):
    """Result of the search for a plan."""

    minimize: str
    interrupted: bool
    stopped: Literal["work", "time", "interrupt", "error"] | None = at("stop_reason")
    plans: int
    cost: float
    runs: float = at("runs_per_site")
    met: bool = at("bounds_met")
    status: Literal["met", "met-not-proven", "missed"] | None
    missed: tuple[str, ...] = at("failures")
    caveats: tuple[str, ...]
    float_tensors: Annotated[tuple[FloatTensor, ...], _pairs("tensor", "sensitivity_db")]
    changed: Annotated[tuple[ChangedTensor, ...], _pairs("tensor", "candidate")] = at("changed_tensors")
    size: Annotated[SearchSize | None, if_set("size")] = at("itself")
    latency: Annotated[SearchLatency | None, if_set("runtime")] = at("itself")
    repair: Repair | None


class BoundsJson(JsonObject):
    """Requested bounds; null if not set."""

    sqnr: float | None = at("min_sqnr")
    agreement: float | None = at("min_agreement")
    accuracy_drop: float | None = at("max_accuracy_drop")
    metric_drop: float | None = at("max_metric_drop")


class ValidationJson(JsonObject):
    """Validation of the quantized model."""

    met: Negated = at("failures")
    status: Literal["met", "met-not-proven", "missed"] | None
    missed: tuple[str, ...] = at("failures")
    warnings: tuple[str, ...]
    reused: bool = at("reuses_samples")
    other_data: bool = at("calibrated_on_other_data")
    bounds: BoundsJson
    multiply_adds: Annotated[
        dict[Literal["quantized", "total"], int],
        BeforeValidator(lambda validation: {"quantized": validation.quantized_macs, "total": validation.total_macs}),
    ] = at("itself")
    comparison: CompareResult | None


class SkipJson(JsonObject):
    """Uses that stay float, with the reason."""

    tensor: TensorJson
    uses: tuple[UseJson, ...]
    rule: str
    code: SkipCode
    reason: str


class AppliedRange(JsonObject):
    """A range that a TFLite file gave."""

    tensor: TensorJson
    name: str
    exact: bool


class Ranges(JsonObject):
    """Use of the ranges of a TFLite file."""

    path: OptionalText
    applied: tuple[AppliedRange, ...] = at("transferred")
    unused: tuple[str, ...]
    missing: tuple[TensorJson, ...]


class ConvertedTensorJson(JsonObject):
    """Planned and actual parameters of a tensor."""

    tensor: TensorJson
    name: str
    index: int | None
    planned: ScaleAndZeroPoint
    runtime: ScaleAndZeroPoint
    problem: str


class ConversionJson(JsonObject):
    """Comparison of a TFLite conversion with its plan."""

    agrees: bool
    tensors: tuple[ConvertedTensorJson, ...]
    op_count: int
    float_ops: tuple[FloatOp, ...]
    validation: ValidationJson | None
    time_ratio: float | None
    warnings: tuple[str, ...]
    failures: tuple[str, ...]


class InsertResult(JsonResult):
    """Report of `insert`."""

    input: OptionalText = at("result.source.path")
    output: str | None
    format: str = at("result.source.format")
    model: str = at("result.plan.model")
    rules: tuple[str, ...] = at("result.plan.rules")
    steps: tuple[StepJson, ...] = at("result.plan.steps")
    data: Calibration = at("result")
    sites: Annotated[tuple[InsertedSite, ...], BeforeValidator(_inserted_sites)] = at("result")
    algorithms: tuple[AlgorithmResult, ...] = at("result.algorithm_results")
    changes: tuple[ScaleChangeJson, ...] = at("result.changes")
    conflicts: tuple[ConflictJson, ...] = at("result.conflicts")
    activation_sqnr: tuple[ActivationSqnr, ...] = at("result.activation_sqnr")
    search: Search | None = at("result.search")
    validation: ValidationJson | None = at("result.validation")
    ops: tuple[CheckedOp, ...] = at("result.verdicts")
    data_findings: tuple[DataFinding, ...] = at("result.data_findings")
    latency: Annotated[LatencyRatio, BeforeValidator(lambda result: _latency_ratio(result.time_ratio, 1))] = at(
        "result"
    )
    io: tuple[BoundaryTensor, ...] = at("result.io")
    warnings: tuple[str, ...] = at("result.plan.warnings")
    skips: tuple[SkipJson, ...] = at("result.skips")
    unused: tuple[str, ...] = at("result.plan.unused")
    ranges: Ranges | None = at("result.tflite_ranges")
    conversion: ConversionJson | None

    @classmethod
    def of(cls, result: Result, output: str | None = None, conversion: ConversionReport | None = None) -> InsertResult:
        """Return the report of a result, with its output and with the conversion report for TFLite."""
        return cls.model_validate(SimpleNamespace(result=result, output=output, conversion=conversion))


RESULTS: dict[str, type[JsonResult]] = {
    "insert": InsertResult,
    "inspect": InspectResult,
    "inspect --stats": InspectStatsResult,
    "explain": ExplainResult,
    "check": CheckResult,
    "compare": CompareResult,
    "diff": DiffResult,
    "data check": DataCheckResult,
}
"""Model of each command's JSON. `plan` writes the file that `insert --plan` reads; see `quantize.plan_json`."""
