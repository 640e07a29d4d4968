"""JSON of `compare`, `diff`, `explain`, `check` and `data check`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from graphquant.backends import LINT_CODES
from graphquant.backends.findings import BrokenRule
from graphquant.calibration.data.check import DataFinding, InputSummary
from graphquant.visualize.json_objects import Accuracy, Finite, JsonObject, JsonResult, Metric, OptionalText, Text, at


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
