"""Results of a check: one verdict per op, and lint findings with codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from graphquant.errors import ModelError
from graphquant.ir import QUANTIZATION_KINDS, Graph, Model, Op, OpKey, qualified_op_name
from graphquant.utils import HtmlRepresentation

UNJUDGED_KINDS = QUANTIZATION_KINDS | {
    *("input", "output", "constant", "variable", "shape", "if", "loop", "scan", "call", "identity", "dropout", "cast")
}
"""Kinds that compute nothing on floats, or whose bodies have verdicts of their own."""

RunStatus = Literal["int8", "fused", "float", "removed"]
""""int8" runs on integers. "fused" is part of an op that does. "float" runs in float. "removed" has no effect."""

FindingLevel = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """Rule of a backend that keeps an op in float."""

    rule: str  # short identifier, for example "no-quantized-output"
    message: str  # description of the problem
    fix: str  # advice


NOT_QUANTIZED = BrokenRule(
    "not-quantized", "none of its inputs and outputs are quantized", "quantize its inputs and its output"
)
"""Rule of ops without any quantization around them."""

ONLY_WEIGHTS = BrokenRule(
    "only-weights",
    "only weights of this model are quantized",
    "keep it in float, or quantize the float model with rules for activations",
)
"""Rule of all float ops of a model whose activations are not quantized."""


class RejectedModelError(ModelError):
    """The backend cannot load the model, so there are no verdicts."""

    def __init__(self, message: str, fix: str, op_key: OpKey) -> None:
        """Create the error from the backend's own words and the advice."""
        super().__init__(message)
        self.fix = fix
        self.op_key = op_key  # graph and name of the op that the error names, both "" if it names none


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Execution of one op by a backend, predicted or as the backend itself decided."""

    graph: str  # graph of the op, "" for the main graph
    op: str  # name of the op
    type: str  # type of the op
    status: RunStatus  # the status
    runs_as: str  # the op that does its work, for example "QLinearConv"; "" if it is removed
    broken_rule: BrokenRule | None = None  # the first rule that the op breaks; None unless it stays float
    note: str = ""  # reason why low precision is probably slower, "" for most ops
    fault: str = ""  # wrong results of the installed runtime on this machine, "" for nearly all ops

    @property
    def location(self) -> str:
        """Graph and name of the op."""
        return qualified_op_name(self.graph, self.op)


def make_verdict(
    graph: Graph,
    op: Op,
    status: RunStatus,
    runs_as: str,
    *,
    broken_rule: BrokenRule | None = None,
    note: str = "",
    fault: str = "",
) -> Verdict:
    """Return the verdict on an op of a graph."""
    return Verdict(
        graph=graph.name,
        op=op.name,
        type=op.type,
        status=status,
        runs_as=runs_as,
        broken_rule=broken_rule,
        note=note,
        fault=fault,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A runtime and its requirements."""

    name: str  # value of `--for`
    description: str  # short description
    # function that returns the verdicts; raises `RejectedModelError` if the backend cannot load the model
    judge: Callable[[Model], tuple[Verdict, ...]]
    by_tables: bool = False  # True if tables of its rules predict the verdicts, and False if the runtime shows them
    symmetric: bool = False  # whether activations must be symmetric, so that a symmetric Relu is not a mistake
    per_tensor_kinds: frozenset[str] = frozenset()  # kinds whose weight has one scale
    ties_concat: bool = False  # whether all inputs and the output of a Concat need one scale
    # type of a bias: "int32" (with scale input times weight), "int8" or "float"
    bias_type: Literal["int32", "int8", "float"] = "int32"
    # for each kind, the kinds of following ops that are fused with it, so that no Q/DQ pair may be between them
    fuses: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LintFinding:
    """A likely mistake in a quantized model."""

    code: str  # key of `LINT_CODES`
    graph: str  # graph of the op
    op: str  # the affected op
    message: str  # description of the problem
    fix: str  # advice

    @property
    def location(self) -> str:
        """Graph and name of the op."""
        return qualified_op_name(self.graph, self.op)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckReport(HtmlRepresentation):
    """Result of `check` for one model."""

    path: str  # path of the model, "" for a model in memory
    backend: str  # the requested backend, "" if only the lint ran
    quantization_ops: int  # number of quantization ops in the model
    # One per op that computes on floats, in the order of the model; none without a backend, or if it cannot load the
    # model.
    verdicts: tuple[Verdict, ...]
    findings: tuple[LintFinding, ...]  # findings by code, then in the order of the model

    @property
    def counts(self) -> dict[str, int]:
        """Number of ops by status."""
        counter = Counter(verdict.status for verdict in self.verdicts)
        return {status: counter[status] for status in get_args(RunStatus)}

    @property
    def runs_as(self) -> dict[str, int]:
        """Number of int8 ops by the op that they run as."""
        counter = Counter(verdict.runs_as for verdict in self.verdicts if verdict.status == "int8")
        return dict(sorted(counter.items()))
