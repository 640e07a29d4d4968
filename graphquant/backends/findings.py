"""What a check tells: a verdict for each op, and findings with codes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from graphquant.ir import qualified_op_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphquant.ir import Model


RunStatus = Literal["low", "absorbed", "float"]
"""Runs on integers; runs not at all, since another op does its work; runs in float."""

FindingLevel = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRule:
    """The rule of a backend that keeps an op in float.

    Attributes:
        rule: A short name, "no-quantized-output".
        message: What is the matter with this op.
        fix: What to do about it.
    """

    rule: str
    message: str
    fix: str


NOT_QUANTIZED = BrokenRule(
    rule="not-quantized", message="nothing around it is quantized", fix="quantize its inputs and its output"
)
"""Of ops that nobody has tried to quantize."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a backend will run one op.

    Attributes:
        graph: The op's graph, "" for the main one.
        op: Its name.
        type: Its type.
        status: Whether it runs in low precision.
        runs_as: The op that does its work, "QLinearConv"; the op's own type where it stays float.
        broken_rule: The first rule that it breaks, None unless it stays float.
        note: Why that is probably not worth it, "" for most.
    """

    graph: str
    op: str
    type: str
    status: RunStatus
    runs_as: str
    broken_rule: BrokenRule | None = None
    note: str = ""

    @property
    def location(self) -> str:
        """Graph and name."""
        return qualified_op_name(self.graph, self.op)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What runs a model, and what it wants.

    Attributes:
        name: What `--for` calls it.
        description: A line for people.
        predict: Gives the verdicts on a model's ops.
        symmetric: Whether activations have to be symmetric, so that a symmetric Relu is no mistake.
        ties_concat: Whether all inputs and the output of a Concat need one scale.
        bias_type: What a bias is: "int32" (whose scale is input times weight), "int8" or "float".
        fuses: For each kind the kinds behind it that become one op with it, so that no pair may stand between.
    """

    name: str
    description: str
    predict: Callable[[Model], tuple[Verdict, ...]]
    symmetric: bool = False
    ties_concat: bool = False
    bias_type: Literal["int32", "int8", "float"] = "int32"
    fuses: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """Something in a quantized model that is probably not meant.

    Attributes:
        code: Key of `CODES`.
        graph: Graph of the op.
        op: The op it is about.
        message: What is the matter.
        fix: What to do about it.
    """

    code: str
    graph: str
    op: str
    message: str
    fix: str

    @property
    def location(self) -> str:
        """Graph and name."""
        return qualified_op_name(self.graph, self.op)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What `check` found in one model.

    Attributes:
        path: The model's path, "" for one in memory.
        backend: The backend that was asked for, "" where only the lint ran.
        quantization_ops: Number of quantization ops in the model.
        verdicts: One for each op that computes on floats, in the order of the model; none without a backend.
        findings: In the order of their codes, then of the model.
    """

    path: str
    backend: str
    quantization_ops: int
    verdicts: tuple[Verdict, ...]
    findings: tuple[LintFinding, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many ops have each status."""
        counter = Counter(verdict.status for verdict in self.verdicts)
        return {status: counter[status] for status in ("low", "absorbed", "float")}

    @property
    def runs_as(self) -> dict[str, int]:
        """How many ops run as what, of those in low precision, by name."""
        counter = Counter(verdict.runs_as for verdict in self.verdicts if verdict.status == "low")
        return dict(sorted(counter.items()))
