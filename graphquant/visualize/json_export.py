"""JSON of the commands: one pydantic model for each result.

`as_json` of a model is the JSON, and results.schema.json has the JSON Schemas. A model reads its values from the
attributes of the result that it shows, so a new key is one more line. docs/json.md describes the keys.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from graphquant.analysis.conversion_report import ConversionReport, FloatOp
from graphquant.analysis.model_summary import OpCoverage, StoredScaleTensor
from graphquant.backends import LINT_CODES
from graphquant.backends.findings import BrokenRule
from graphquant.calibration.data.check import DataFinding, InputSummary
from graphquant.numerics import QParams
from graphquant.observers import distribution_of
from graphquant.optimize import AlgorithmResult, TimeRatio
from graphquant.quantize import SkipCode
from graphquant.visualize import JSON_SCHEMA_VERSION
from graphquant.visualize.histograms import bar_counts, histogram_axis

if TYPE_CHECKING:
    from graphquant.analysis.range_report import TensorRange
    from graphquant.api import Result
    from graphquant.ir import StoredQuantization

HISTOGRAM_BARS = 64  # Bars of a histogram. Their edges follow the drawn axis, so they are denser within the range


class _Source:
    """A result, with itself as the attribute `itself`, for keys that combine several of its attributes."""

    def __init__(self, result: object) -> None:
        self.itself = result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.itself, name)


class JsonObject(BaseModel):
    """An object of the JSON."""

    model_config = ConfigDict(frozen=True, from_attributes=True, json_schema_serialization_defaults_required=True)

    @model_validator(mode="before")
    @classmethod
    def _wrap_source(cls, source: Any) -> Any:
        return source if isinstance(source, dict) else _Source(source)


class JsonResult(JsonObject):
    """The result of a command."""

    schema_version: int = Field(JSON_SCHEMA_VERSION, serialization_alias="schema")

    def as_json(self) -> dict[str, Any]:
        """Return the JSON data."""
        return self.model_dump(mode="json", by_alias=True)


def at(path: str, *default: Any) -> Any:
    """Declare a key whose value is at a path of attributes, such as "params.type.name", or else the default."""
    first, *others = (int(part) if part.isdigit() else part for part in path.split("."))
    return Field(*default, validation_alias=AliasPath(str(first), *others))


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _finite_ends(ends: Any) -> Any:
    """Return the ends of a tensor or of its channels; null without finite values."""
    values = [_finite_or_none(value) for value in ends.reshape(-1).tolist()]
    return values if ends.ndim else values[0]


def _if_set(name: str) -> BeforeValidator:
    """Replace an object without this value by null."""

    def check(source: Any) -> Any:
        value = getattr(source, name)
        return None if value is None or value == "" else source  # 0 is a value

    return BeforeValidator(check)


def _named(*keys: str) -> BeforeValidator:
    """Turn a tuple into an object with these keys."""
    return BeforeValidator(lambda values: values and dict(zip(keys, values, strict=True)))


Text = Annotated[str, BeforeValidator(str)]
OptionalText = Annotated[str | None, BeforeValidator(lambda value: str(value) if value else None)]
Finite = Annotated[float | None, BeforeValidator(_finite_or_none)]
Metric = Annotated[Finite, AfterValidator(lambda value: None if value is None else float(f"{value:.6g}"))]
"""A metric with six digits, because TensorFlow runs differ in the ninth."""
PlainNumbers = BeforeValidator(lambda values: values.tolist() if isinstance(values, np.ndarray) else values)
Numbers = Annotated[float | list[Any], PlainNumbers]
"""One number, or a list of them for channels or blocks."""
Integers = Annotated[int | list[Any], PlainNumbers]
Ends = Annotated[float | list[float | None] | None, BeforeValidator(_finite_ends)]
Sizes = tuple[int | None, ...] | None
"""A shape; a size is null if it is unknown."""
Negated = Annotated[bool, BeforeValidator(lambda value: not value)]
Accuracy = Annotated[dict[Literal["float", "quantized"], float] | None, _named("float", "quantized")]
ScaleAndZeroPoint = Annotated[dict[Literal["scale", "zero_point"], Numbers] | None, _named("scale", "zero_point")]
Digests = Annotated[tuple[str, ...], BeforeValidator(lambda runs: [run.data_digest for run in runs])]


class TensorJson(JsonObject):
    """A tensor: output `port` of an op."""

    graph: str
    op: str
    port: int


class UseJson(JsonObject):
    """A use of a tensor: input `slot` of an op."""

    graph: str
    op: str
    slot: int


class ParametersJson(JsonObject):
    """Scale, zero point and range. Values that are computed at run time are null, and `dynamic` is true."""

    dtype: str | None = at("params.type.name", None)
    scale: Numbers | None = at("params.scale", None)
    zero_point: Integers | None = at("params.zero_point", None)
    axis: int | None = at("params.axis", None)
    block_size: int | None = at("params.block", None)
    narrow: bool | None = at("params.narrow", None)
    low: Numbers | None = at("params.range.low", None)
    high: Numbers | None = at("params.range.high", None)
    dynamic: Annotated[bool, BeforeValidator(lambda params: not isinstance(params, QParams))] = at("params")


OptionalParameters = Annotated[ParametersJson | None, _if_set("params")]


class OutputErrors(JsonObject):
    """Errors of one output."""

    name: str
    other: str = at("quantized_name")
    equal: bool
    sqnr: Metric
    cosine: Metric
    largest_difference: Metric = at("max_error")
    agreement: float | None
    sqnr_lower_bound: Metric
    agreement_lower_bound: float | None
    rows: int
    values: int
    accuracy: Accuracy
    problem: OptionalText


class SiteErrors(JsonObject):
    """Errors of one quantized tensor."""

    graph: str
    op: str
    tensor: str
    parameter: bool
    rule: OptionalText
    local: Metric
    accumulated: Metric
    sensitivity_db: Metric = at("sensitivity")
    exact: bool
    note: OptionalText


class CompareResult(JsonResult):
    """Result of `compare`."""

    samples: int
    random: bool
    labels: OptionalText
    sqnr: Metric
    agreement: float | None
    outputs: tuple[OutputErrors, ...]
    sites: tuple[SiteErrors, ...]
    data_findings: tuple[DataFinding, ...]


class Change(JsonObject):
    """A difference between two models or plans."""

    kind: str
    location: str
    message: str
    size: Finite


class DiffResult(JsonResult):
    """Result of `diff`."""

    counts: dict[str, int]
    rerouted: int
    changes: tuple[Change, ...]


class PredictedOp(JsonObject):
    """Predicted execution of an op."""

    graph: str
    op: str
    type: str
    status: str
    runs_as: str


class ExplainedOp(PredictedOp):
    """Predicted execution of an op, and the reason if it stays float."""

    reason: str | None = at("broken_rule.message", None)
    fix: str | None = at("broken_rule.fix", None)


class OtherRule(JsonObject):
    """A rule that did not claim a use."""

    rule: str = at("rule.rule.name")
    reason: str
    closeness: int


class ExplainedUse(JsonObject):
    """A use of a tensor, with the rule that claimed it."""

    tensor: Text
    use: Text
    quantized: bool
    rule: OptionalText = at("winner")
    outcome: str
    choices: tuple[str, ...] = at("scale_reasons")
    other_rules: tuple[OtherRule, ...]


class ExplainResult(JsonResult):
    """Result of `explain`."""

    written: bool = at("already_quantized")
    backend: OptionalText
    assumed_ranges: bool = at("placeholder_ranges")
    omitted_reason: OptionalText
    ops: tuple[ExplainedOp, ...] = at("verdicts")
    uses: tuple[ExplainedUse, ...]


class CheckedOp(PredictedOp):
    """Predicted execution of an op, and the rule that it breaks if it stays float."""

    broken_rule: BrokenRule | None
    note: OptionalText


class Finding(JsonObject):
    """A probable mistake in a quantized model."""

    code: str
    graph: str
    op: str
    message: str
    fix: str
    level: Annotated[str, BeforeValidator(lambda code: LINT_CODES[code].level)] = at("code")


class CheckResult(JsonResult):
    """Result of `check` for one model."""

    path: str
    backend: str
    quantization_ops: int
    counts: dict[str, int]
    runs_as: dict[str, int]
    ops: tuple[CheckedOp, ...] = at("verdicts")
    findings: tuple[Finding, ...]


class DataCheckResult(JsonResult):
    """Result of `data check`."""

    samples: int
    digest: str
    inputs: tuple[InputSummary, ...]
    ignored: tuple[str, ...]
    findings: tuple[DataFinding, ...]


class ModelInput(JsonObject):
    """An input of a model."""

    name: str
    dtype: str | None = at("outputs.0.dtype")
    shape: Sizes = at("outputs.0.shape")


class QuantizationOpJson(ParametersJson):
    """A quantization op with its parameters."""

    graph: str
    op: str
    type: str
    consumers: int
    rule: str
    learned: bool
    tensor: TensorJson
    round: str = at("rounding")


class StoredParameters(JsonObject):
    """Quantization of a TFLite tensor, named as in TFLite's interpreter."""

    scales: Numbers = at("scale")
    zero_points: Integers = at("zero_point")
    quantized_dimension: int = at("axis")


def _shape_signature(tensor: StoredScaleTensor) -> list[int]:
    sizes = tensor.stored.sizes if tensor.output.shape is None else tensor.output.shape
    return [-1 if size is None else size for size in sizes]


def _scale_of_tensor(stored: StoredQuantization) -> tuple[float, int]:
    """Return the scale and zero point of the whole tensor; zeros if there is not exactly one."""
    single = stored.scale.size == stored.zero_point.size == 1
    return (float(stored.scale[0]), int(stored.zero_point[0])) if single else (0.0, 0)


class StoredTensor(JsonObject):
    """A tensor that stores its own scale, with the keys of TFLite's interpreter."""

    graph: str = at("tensor.graph")
    index: int = at("stored.index")
    name: str = at("output.name")
    kind: str
    dtype: str | None = at("output.dtype")
    shape: tuple[int, ...] = at("stored.sizes")
    shape_signature: Annotated[tuple[int, ...], BeforeValidator(_shape_signature)] = at("itself")
    quantization: Annotated[tuple[float, int], BeforeValidator(_scale_of_tensor)] = at("stored")
    quantization_parameters: StoredParameters = at("stored")
    min: Numbers = at("stored.low")
    max: Numbers = at("stored.high")
    details: str = at("stored.details")


class InspectResult(JsonResult):
    """Result of `inspect`."""

    path: OptionalText = at("model.path")
    format: str = at("model.format")
    opset: Annotated[int | None, BeforeValidator(lambda opset: opset or None)] = at("model.opset")
    digest: str = at("model.digest")
    graphs: dict[str, int] = at("op_counts")
    unreachable_functions: tuple[str, ...]
    function_clones: tuple[OpCoverage, ...] = at("float_clone_ops")
    inputs: tuple[ModelInput, ...]
    outputs: tuple[str, ...] = at("model.main.outputs")
    ops: dict[str, int] = at("op_types")
    quantization: tuple[QuantizationOpJson, ...] = at("quantization_ops")
    tensors: tuple[StoredTensor, ...]
    coverage: tuple[OpCoverage, ...]


Histogram = dict[Literal["edges", "counts"], list[float]] | None


def _histogram(tensor_range: TensorRange) -> dict[str, Any] | None:
    """Return the edges of the bars, and the number of values in each."""
    sketch = tensor_range.sketch
    if sketch is None or not sketch.counts.size:
        return None
    axis = histogram_axis(sketch, tensor_range.params)
    counts = bar_counts(distribution_of(sketch), axis, HISTOGRAM_BARS)
    return {"edges": axis.values_at(np.linspace(0, 1, HISTOGRAM_BARS + 1)).tolist(), "counts": counts.tolist()}


class TensorStatistics(JsonObject):
    """Statistics of a tensor."""

    low: Ends = at("sketch.low")
    high: Ends = at("sketch.high")
    count: int = at("sketch.count")
    nan: int = at("sketch.nan")
    inf: int = at("sketch.inf")
    blank: int = at("sketch.empty_arrays")
    histogram: Annotated[Histogram, BeforeValidator(_histogram)] = at("itself")


class Cost(JsonObject):
    """Cost of a range. `sqnr` is null if the range is exact or there is no signal."""

    below: float = at("clipped_below")
    above: float = at("clipped_above")
    squared_error: float
    sqnr: Finite


class Alternative(JsonObject):
    """The range of another method."""

    method: str
    params: OptionalParameters = at("itself")
    cost: Cost | None


class RangedTensor(JsonObject):
    """Statistics and range of a tensor."""

    tensor: TensorJson
    note: str
    statistics: Annotated[TensorStatistics | None, _if_set("sketch")] = at("itself")
    rule: str
    method: str
    chosen_method: str = at("auto_method")
    params: OptionalParameters = at("itself")
    cost: Cost | None
    alternatives: tuple[Alternative, ...]


class InspectStatsResult(JsonResult):
    """Result of `inspect --stats`."""

    stats: OptionalText = at("path")
    model: OptionalText
    digest: str = at("stats.model_digest")
    by_name: bool = at("matched_by_name")
    samples: int = at("stats.samples")
    blocks: int = at("stats.blocks")
    complete: bool = at("stats.complete")
    random: bool = at("stats.random")
    data: Digests = at("stats.runs")
    tensors: tuple[RangedTensor, ...] = at("tensor_ranges")


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


class Search(JsonObject):
    """Result of the search for a plan."""

    minimize: str
    interrupted: bool
    plans: int
    cost: float
    runs: float = at("runs_per_site")
    met: bool = at("bounds_met")
    missed: tuple[str, ...] = at("failures")
    caveats: tuple[str, ...]
    float_tensors: Annotated[tuple[FloatTensor, ...], _pairs("tensor", "sensitivity_db")]
    changed: Annotated[tuple[ChangedTensor, ...], _pairs("tensor", "candidate")] = at("changed_tensors")
    size: Annotated[SearchSize | None, _if_set("size")] = at("itself")
    latency: Annotated[SearchLatency | None, _if_set("runtime")] = at("itself")


class BoundsJson(JsonObject):
    """Requested bounds; null if not set."""

    sqnr: float | None = at("min_sqnr")
    agreement: float | None = at("min_agreement")
    accuracy_drop: float | None = at("max_accuracy_drop")


class ValidationJson(JsonObject):
    """Validation of the quantized model."""

    met: Negated = at("failures")
    missed: tuple[str, ...] = at("failures")
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
