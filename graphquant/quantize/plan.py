"""The plan as data: which tensors are quantized for which consumers, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import ConfigDict

from graphquant.ir import CLAMPING_KINDS, QUANTIZATION_KINDS, Graph, TensorRef, Use
from graphquant.numerics import LARGEST_VALUE, SMALLEST_SCALE, FloatType
from graphquant.quantize.preparation_undo import Step
from graphquant.rules import ALGORITHM_NAMES, Scheme
from graphquant.utils.notebook_html import HtmlRepresentation

if TYPE_CHECKING:
    from graphquant.rules import RuleMatcher


# pydantic reads the annotations when it checks a plan's JSON.


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One tensor that gets a quantize-dequantize pair for some of its consumers.

    Attributes:
        tensor: What is quantized.
        uses: The consumers that are rerouted.
        graph: The graph that gets the new ops: the tensor's own, or the body that reads it.
        scheme: How it is quantized.
        axis: The channel axis of a per-channel scheme, or that of the blocks; None per tensor.
        view: The shape in which `axis` is the channel axis, where it is not the tensor's own: a depthwise kernel
            [3, 3, 4, 2] has 8 channels as [3, 3, 8].
        rule: Name of the rule that claimed the uses.
        why: That rule's reason.
        parameter: Whether the tensor is a weight, so that its range comes from its value.
        tie: Uses whose sites must have the same scale and zero point as this one ("same-as-input").
        clone_of: A use whose site this one has the scale of: the same computation in the graphs that run, of which this is
            a copy that no data reaches.
        range: (low, high) in real units, which wins over statistics.
        scale: One scale, or one per channel; with `zero_point` it wins over everything.
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
        """Checks what an edited plan may get wrong by itself; what needs the model is `check_plan`'s."""
        if self.range is not None and not (all(map(math.isfinite, self.range)) and self.range[0] <= self.range[1]):
            raise ValueError("'range' is (low, high), finite and in that order")
        if self.zero_point is not None and (self.scale is None or len(self.scale) != len(self.zero_point)):
            raise ValueError("'zero_point' goes with as many numbers in 'scale'")
        if self.scale is not None:
            self._check_scale(self.scale)
        qmin, qmax = self.scheme.type.limits(narrow=self.scheme.narrow)
        if isinstance(self.scheme.type, FloatType):
            qmin = qmax = 0
        if not all(qmin <= zero <= qmax for zero in self.zero_point or ()):
            raise ValueError(f"'zero_point' is not in [{qmin}, {qmax}]")

    def _check_scale(self, scale: tuple[float, ...]) -> None:
        if self.scheme.block_size is not None:
            raise ValueError("'scale' cannot be given for each block; give 'range'")
        if not scale or (self.axis is None and len(scale) != 1):
            raise ValueError("'scale' holds one number, or one per channel with an 'axis'")
        if not all(SMALLEST_SCALE <= value <= LARGEST_VALUE for value in scale):
            raise ValueError("'scale' is positive and a normal float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A place where a rule matched and nothing will be inserted, with the reason.

    Attributes:
        tensor: What is not quantized.
        uses: For which consumers.
        rule: Name of the rule that claimed them, or the step that was not made.
        reason: Why.
        fused: Whether that holds only as long as the ops that read it can be absorbed by the one that makes it
            ("absorbed"); where scales turn out not to allow that, the solver quantizes it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    tensor: TensorRef
    uses: tuple[Use, ...]
    rule: str
    reason: str
    fused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(HtmlRepresentation):
    """Everything that will be done to one model.

    Attributes:
        format: The model's format.
        model: Digest of the source model.
        prepared: Digest of the model after `steps`, whose ops the plan names.
        rules: The rule files, as asked for.
        steps: Preparations, in the order they were made.
        sites: What is quantized.
        skips: What matched and is not, with the reason.
        unused: Rules that matched nothing.
        digest: Hex SHA-256 of the rule files' contents, "" where that is not known.
        algorithms: Names of the corrections of weights and biases that are made once scales are known.
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
        """Checks what an edited plan may get wrong by itself."""
        for name in self.algorithms:
            if name not in ALGORITHM_NAMES:
                raise ValueError(f"there is no correction {name!r}; known are {', '.join(ALGORITHM_NAMES)}")


# What is quantized already: it is left as it is, so that nothing is quantized twice.

ALREADY_QUANTIZED = "it is quantized already"

INTEGER_CONSUMER = "its consumer computes on integers already"

LIMITS_QUANTIZED_TENSOR = "its consumer limits what is quantized already behind it"

INTEGER_SUM = "it is a sum that was made of integers, or a scale of such"

PASSES_QUANTIZED_TENSOR = "its producer hands on what is quantized already"

MAX_LIMITING_OPS = 2
"""Such ops in a row."""

MAX_OPERANDS = 2
"""What a sum or product of integers and scales reads; a sum of thousands is not looked through for each of them."""


def already_quantized_reason(matcher: RuleMatcher, tensor: TensorRef, use: Use) -> str:
    """Why nothing needs be done for `use` reading `tensor`; "" if it is float."""
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
    """Whether `tensor` is a sum of integers times its scale: a product that was quantized while the model runs."""
    operands = [operand for operand in matcher.model.graphs[tensor.graph].slots(tensor.op) if operand is not None]
    return (
        matcher.model.op(tensor).kind == "mul"
        and bool(operands)
        and all(_is_integer_sum_or_scale(matcher, operand) for operand in operands)
    )


def reads_quantized_tensor(matcher: RuleMatcher, use: Use) -> bool:
    """Whether `use` reads a tensor that is quantized and dequantized already."""
    tensor = matcher.model.graphs[use.graph].source_of(use)
    return tensor is not None and matcher.model.op(tensor).kind in QUANTIZATION_KINDS


def _is_between_reshapes(matcher: RuleMatcher, tensor: TensorRef) -> bool:
    """Whether `tensor` was reshaped for its channels to be one axis, quantized, and reshaped back."""
    kinds = []
    ancestor: TensorRef | None = tensor
    for _ in range(4):
        if ancestor is None:
            break
        kinds.append(matcher.model.op(ancestor).kind)
        ancestor = matcher.model.graphs[ancestor.graph].source_of(Use(ancestor.graph, ancestor.op, 0))
    return kinds[:3] == ["reshape", "qdq", "reshape"] or kinds == ["reshape", "dequantize", "quantize", "reshape"]


def _only_limits_quantized(matcher: RuleMatcher, graph: Graph, op_name: str) -> bool:
    """Whether all that op `op_name` does is to limit, by constants, what the op behind it quantizes."""
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
    """Whether `tensor` is a sum of integers in floats, a scale that was computed for such, or a product of scales."""
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
