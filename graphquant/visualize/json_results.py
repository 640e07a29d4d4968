"""JSON of the commands that write no model: `inspect`, `compare`, `diff`, `explain`, `check` and `data check`.

The base classes of all pydantic models, their field types, and the objects that several results share come first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from graphquant.analysis.model_summary import OpCoverage, StoredScaleTensor
from graphquant.backends import LINT_CODES
from graphquant.backends.findings import BrokenRule
from graphquant.calibration.data.check import DataFinding, InputSummary
from graphquant.numerics import QParams
from graphquant.observers import distribution_of
from graphquant.quantize.integer_io import BoundaryTensor
from graphquant.visualize import JSON_SCHEMA_VERSION
from graphquant.visualize.histograms import bar_counts, histogram_axis

if TYPE_CHECKING:
    from graphquant.analysis.range_report import TensorRange
    from graphquant.ir import StoredQuantization


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


def if_set(name: str) -> BeforeValidator:
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


OptionalParameters = Annotated[ParametersJson | None, if_set("params")]


HISTOGRAM_BARS = 64  # Bars of a histogram. Their edges follow the drawn axis, so they are denser within the range


class ModelInput(JsonObject):
    """An input of a model."""

    name: str
    dtype: str | None = at("outputs.0.dtype")
    shape: Sizes = at("outputs.0.shape")


class OpKeyJson(JsonObject):
    """An op and its graph."""

    graph: str
    op: str


class QuantizationOpJson(ParametersJson):
    """A quantization op with its parameters."""

    graph: str
    op: str
    type: str
    consumers: Annotated[int, BeforeValidator(len)]
    readers: tuple[UseJson, ...] = at("consumers")
    copies: tuple[OpKeyJson, ...]
    rule: str
    learned: bool
    tensor: TensorJson
    round: str = at("rounding")


class StoredParameters(JsonObject):
    """Quantization of a TFLite tensor, named as in TFLite's interpreter."""

    scales: Numbers = at("scale")
    zero_points: Integers = at("zero_point")
    quantized_dimension: int = at("axis")
    block_size: int = at("block")


def _shape_signature(tensor: StoredScaleTensor) -> list[int]:
    sizes = tensor.stored.sizes if tensor.output.shape is None else tensor.output.shape
    return [-1 if size is None else size for size in sizes]


def _scale_of_tensor(stored: StoredQuantization) -> tuple[float, int]:
    """Return the scale and zero point of the whole tensor; zeros if there is not exactly one."""
    single = stored.scale.size == stored.zero_point.size == 1
    return (float(stored.scale.item()), int(stored.zero_point.item())) if single else (0.0, 0)


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
    io: tuple[BoundaryTensor, ...]
    ops: dict[str, int] = at("op_types")
    quantization: tuple[QuantizationOpJson, ...] = at("distinct_ops")
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
    statistics: Annotated[TensorStatistics | None, if_set("sketch")] = at("itself")
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
    perplexity: Accuracy
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


class MetricScores(JsonObject):
    """Scores of both models by the user's metric; the bound of the drop is null if there are too few samples."""

    name: str
    scores: Accuracy
    drop: float
    drop_upper_bound: Metric


class CompareResult(JsonResult):
    """Result of `compare`."""

    samples: int
    random: bool
    labels: OptionalText
    sqnr: Metric
    agreement: float | None
    metric: MetricScores | None
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
