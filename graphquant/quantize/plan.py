"""The plan as data: sites, skips, preparation steps; and the test for tensors that are quantized already."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from pydantic import ConfigDict

from graphquant.ir import CLAMPING_KINDS, QUANTIZATION_KINDS, Graph, TensorRef, Use
from graphquant.numerics import LARGEST_VALUE, SMALLEST_SCALE, FloatType
from graphquant.qdq import FAMILIES, QDQFamily
from graphquant.quantize.preparation_undo import Step  # noqa: TC001  # pydantic reads the annotations
from graphquant.rules import ALGORITHM_NAMES, Scheme
from graphquant.utils.notebook_html import HtmlRepresentation

if TYPE_CHECKING:
    from graphquant.rules import RuleMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One tensor that gets a Q/DQ pair for some of its consumers.

    Attributes:
        tensor: The tensor to quantize.
        uses: The consumers that are rerouted to the dequantized tensor.
        graph: The graph that receives the new ops: the tensor's own, or the subgraph that reads it.
        scheme: The quantization scheme.
        axis: The channel axis of a per-channel scheme, or the axis of blocks; None per tensor.
        view: The shape in which `axis` is the channel axis if it is not the tensor's own: a depthwise kernel [3, 3, 4,
            2] has 8 channels as [3, 3, 8].
        rule: Name of the rule that claimed the uses.
        why: The reason that the rule gives.
        parameter: True for a weight, whose range comes from its value.
        tie: Uses whose sites must have the same scale and zero point as this one ("same-as-input").
        clone_of: For a site in a function clone, a use of the original site. The clone is never run on data, so it
            takes the original's scale.
        range: (low, high) in real units. It overrides statistics.
        scale: One scale, or one per channel. With `zero_point` it overrides everything else.
        zero_point: One zero point, or one per channel.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    tensor: TensorRef
    uses: tuple[Use, ...]
    graph: str
    scheme: Scheme
    axis: int | None = None
    view: tuple[int, ...] | None = None
    rule: str = ""
    why: str = ""
    parameter: bool = False
    tie: tuple[Use, ...] = ()
    clone_of: Use | None = None
    range: tuple[float, float] | None = None
    scale: tuple[float, ...] | None = None
    zero_point: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the fields of an edited plan by themselves. `check_plan` checks them against the model."""
        if self.range is not None and not (all(map(math.isfinite, self.range)) and self.range[0] <= self.range[1]):
            raise ValueError("'range' must be (low, high), finite and in that order")
        if self.zero_point is not None and (self.scale is None or len(self.scale) != len(self.zero_point)):
            raise ValueError("'zero_point' needs 'scale' with as many numbers")
        if self.scale is not None:
            self._check_scale(self.scale)
        qmin, qmax = self.scheme.type.limits(narrow=self.scheme.narrow)
        if isinstance(self.scheme.type, FloatType):
            qmin = qmax = 0
        if not all(qmin <= zero <= qmax for zero in self.zero_point or ()):
            raise ValueError(f"'zero_point' is not in [{qmin}, {qmax}]")

    @property
    def family(self) -> QDQFamily:
        """The family of the scheme."""
        return FAMILIES[self.scheme.family or ""]

    def _check_scale(self, scale: tuple[float, ...]) -> None:
        if self.scheme.block_size is not None:
            raise ValueError("'scale' is not supported for blocks; give 'range'")
        if not scale or (self.axis is None and len(scale) != 1):
            raise ValueError("'scale' must have one number, or one per channel with an 'axis'")
        if not all(SMALLEST_SCALE <= value <= LARGEST_VALUE for value in scale):
            raise ValueError("'scale' must be a positive normal float32")


class SkipCode(StrEnum):
    """Machine-readable reason of a skip. The `reason` of the skip has the details."""

    RULE = "rule"  # the rule says float or fused
    QUANTIZED = "quantized"  # quantized already
    WEIGHT = "weight"  # the consumer computes a weight, which is quantized where it is used
    SELECTION = "selection"  # include or exclude
    TIE = "tie"  # the tensor it is tied to has no scale to share
    CAPTURE = "capture"  # the runtime would move the pair into a subgraph
    SCHEME = "scheme"  # the scheme or the family does not support the tensor
    RANGE = "range"  # no usable range or value
    BIAS = "bias"  # no usable bias scale
    PREPARATION = "preparation"  # a preparation step left the op unchanged
    OPTIMIZATION = "optimization"  # a search or an algorithm keeps it in float


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Uses that a rule matched and that stay float, with the reason.

    Attributes:
        tensor: The tensor that is not quantized.
        uses: The consumers that keep reading the float tensor.
        rule: Name of the rule that claimed them, or of the preparation step that was skipped.
        reason: The reason.
        code: The kind of reason.
        fused: True if the skip assumes that the producer can fuse the ops that read the tensor ("fused"). The solver
            quantizes the tensor if the scales rule that out.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    tensor: TensorRef
    uses: tuple[Use, ...]
    rule: str
    reason: str
    code: SkipCode = SkipCode.RULE
    fused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(HtmlRepresentation):
    """All changes to one model.

    Attributes:
        format: The model's format.
        model: Digest of the source model.
        prepared: Digest of the model after `steps`. The plan names its ops.
        rules: The rule files, as the caller named them.
        steps: Preparation steps, in the order of their application.
        sites: The tensors to quantize.
        skips: Matched uses that stay float, with the reason.
        unused: Rules that matched nothing.
        digest: Hex SHA-256 of the rule files' contents, "" if unknown.
        algorithms: Names of the optimization algorithms to run.
    """

    format: str
    model: str
    prepared: str
    rules: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    sites: tuple[Site, ...] = ()
    skips: tuple[Skip, ...] = ()
    unused: tuple[str, ...] = ()
    digest: str = ""
    algorithms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the fields of an edited plan by themselves."""
        for name in self.algorithms:
            if name not in ALGORITHM_NAMES:
                raise ValueError(f"there is no algorithm {name!r}; use one of {', '.join(ALGORITHM_NAMES)}")


# Detect tensors that are quantized already, so that nothing is quantized twice.

ALREADY_QUANTIZED = "it is quantized already"

INTEGER_CONSUMER = "its consumer is an integer op"

LIMITS_QUANTIZED_TENSOR = "its consumer only limits values that are quantized already"

INTEGER_SUM = "it is an integer sum, or the scale of one"

PASSES_QUANTIZED_TENSOR = "its producer passes through values that are quantized already"

MAX_LIMITING_OPS = 2
"""Longest run of limiting ops (Relu, Clip) that is followed to a quantization op."""

MAX_OPERANDS = 2
"""Operands of an integer sum or product. Larger sums are not examined, to bound the cost."""


def already_quantized_reason(matcher: RuleMatcher, tensor: TensorRef, use: Use) -> str:
    """Return the reason why `use` of `tensor` needs no quantization, or "" if the tensor is float."""
    model = matcher.model
    graph = model.graphs[use.graph]
    producer, consumer = model.op(tensor), graph.op(use.op)
    if (
        producer.kind in QUANTIZATION_KINDS
        or consumer.kind in QUANTIZATION_KINDS
        or _is_between_reshapes(matcher, tensor)
    ):
        return ALREADY_QUANTIZED
    if consumer.kind == "integer":
        return INTEGER_CONSUMER
    if _only_limits_quantized(matcher, graph, use.op):
        return LIMITS_QUANTIZED_TENSOR
    slots = graph.slots(use.op)
    operands = (
        [operand for operand in slots if operand]
        if consumer.kind in {"mul", "add"} and len(slots) == MAX_OPERANDS
        else []
    )
    if consumer.kind == "add":
        rescaled_sums = [operand for operand in operands if _is_rescaled_integer_sum(matcher, operand)]
        return (
            INTEGER_SUM
            if rescaled_sums
            and all(operand in rescaled_sums or matcher.parameters.is_parameter(operand) for operand in operands)
            else ""
        )
    return INTEGER_SUM if any(_is_integer_sum_or_scale(matcher, operand) for operand in (tensor, *operands)) else ""


def _is_rescaled_integer_sum(matcher: RuleMatcher, tensor: TensorRef) -> bool:
    """Return True if `tensor` is an integer sum times its scale: a product that was quantized dynamically."""
    operands = [operand for operand in matcher.model.graphs[tensor.graph].slots(tensor.op) if operand is not None]
    return (
        matcher.model.op(tensor).kind == "mul"
        and bool(operands)
        and all(_is_integer_sum_or_scale(matcher, operand) for operand in operands)
    )


def reads_quantized_tensor(matcher: RuleMatcher, use: Use) -> bool:
    """Return True if `use` reads the output of a quantization op."""
    tensor = matcher.model.graphs[use.graph].source_of(use)
    return tensor is not None and matcher.model.op(tensor).kind in QUANTIZATION_KINDS


def _is_between_reshapes(matcher: RuleMatcher, tensor: TensorRef) -> bool:
    """Return True if `tensor` was reshaped to put its channels on one axis, quantized, and reshaped back."""
    kinds = []
    ancestor: TensorRef | None = tensor
    for _ in range(4):
        if ancestor is None:
            break
        kinds.append(matcher.model.op(ancestor).kind)
        ancestor = matcher.model.graphs[ancestor.graph].source_of(Use(ancestor.graph, ancestor.op, 0))
    return kinds[:3] == ["reshape", "qdq", "reshape"] or kinds == ["reshape", "dequantize", "quantize", "reshape"]


def _only_limits_quantized(matcher: RuleMatcher, graph: Graph, op_name: str) -> bool:
    """Return True if op `op_name` only limits, by constants, a tensor that the op after it quantizes."""
    for _ in range(MAX_LIMITING_OPS):
        if graph.op(op_name).kind not in CLAMPING_KINDS:
            return False
        data_inputs = [
            tensor for tensor in graph.slots(op_name) if tensor and not matcher.parameters.is_parameter(tensor)
        ]
        readers = graph.consumers_by_port(op_name).get(0, [])
        if len(data_inputs) > 1 or len(readers) != 1 or readers[0].graph != graph.name:
            return False
        op_name = readers[0].op
        if graph.op(op_name).kind in QUANTIZATION_KINDS:
            return True
    return False


def _is_integer_sum_or_scale(matcher: RuleMatcher, tensor: TensorRef) -> bool:
    """Return True if `tensor` is an integer sum cast to float, a scale computed for one, or a product of scales."""
    model = matcher.model
    op = model.op(tensor)
    if op.kind == "integer":
        return tensor.port > 0
    if op.kind not in {"cast", "mul"}:
        return False
    operands = [operand for operand in model.graphs[tensor.graph].slots(tensor.op) if operand is not None]
    if op.kind == "cast":
        return bool(operands) and model.op(operands[0]).kind == "integer"
    scales = [operand for operand in operands if model.op(operand).kind == "integer" and operand.port > 0]
    return bool(scales) and all(operand in scales or matcher.parameters.is_parameter(operand) for operand in operands)
