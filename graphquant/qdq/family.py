"""What every family of quantize-dequantize ops offers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from pydantic import ConfigDict, StrictFloat

from graphquant.errors import InternalError
from graphquant.ir import Graph, Op, Output, Parameters, TensorRef
from graphquant.numerics import DynamicQParams, IntType

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics import Array, QParams, QType


RoundingMode = Literal["half-even", "half-up"]
RangeSource = Literal["observed", "given", "dynamic", "learned"]
ROUNDING_MODES: tuple[RoundingMode, ...] = get_args(RoundingMode)
"""How values halfway between two steps are rounded: to the even one, or up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyArguments:
    """Arguments that the ops of one family have and those of others have not: `{ form = "args" }`.

    Attributes:
        form: Of "fake-quant": "vars" has the range in constants beside the op, "args" in its attributes.
        input_min: Of "quantize-and-dequantize-v4" with a dynamic range: gradients pass from there; by default all do.
        input_max: Likewise, up to there.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    form: Literal["vars", "args"] | None = None
    input_min: StrictFloat | None = None
    input_max: StrictFloat | None = None

    def specified(self) -> tuple[str, ...]:
        """Names of the arguments that are not left to the family."""
        return tuple(name for name in self.__slots__ if getattr(self, name) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QDQSite:
    """One tensor to quantize.

    Attributes:
        tensor: The tensor that is read.
        name: Name for the new ops; further ones append to it.
        params: Scale, zero point and range; or that the range is that of each run.
        rule: Name of the rule, stamped on each op.
        read_value: Gives the weight's value if it is to be folded into an integer constant, else None. It is read when
            that constant is, so that weights are never all in memory.
        reuse_integers: Gives the integers that were made of that value before, else those that what it is given makes; None where
            they are made whenever they are read.
        is_parameter: Whether the tensor is a weight, which is a constant even where it stays float.
        needs_clip: Whether values may lie outside of what the type represents, so that its container must not take them.
        shape: The tensor's static shape where it is known, as it must be per channel.
        merged_shape: That shape if the tensor is to be reshaped to it for its channels to be one axis, and back; else None.
        variable_prefix: Where the range is in variables, which start with that of `params`: the name that is common to theirs,
            "" where it is not.
        in_frame: Whether the tensor may live in a TF1 loop or cond frame.
        rounding_mode: How to round; None as the family does by itself.
        args: The family's own arguments.
        opset: The ONNX default domain's opset that the model has; 0 where there are no opsets.
    """

    tensor: TensorRef
    name: str
    params: QParams | DynamicQParams
    rule: str
    read_value: Callable[[], Array] | None = None
    reuse_integers: Callable[[Callable[[], Array]], Array] | None = None
    is_parameter: bool = False
    needs_clip: bool = True
    shape: tuple[int | None, ...] | None = None
    merged_shape: tuple[int, ...] | None = None
    variable_prefix: str = ""
    in_frame: bool = False
    rounding_mode: RoundingMode | None = None
    args: FamilyArguments = field(default_factory=FamilyArguments)
    opset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRequest:
    """What a family is asked for, known before any range is.

    Attributes:
        type: The type of the quantized values.
        axis: The channel axis, or that of the blocks; None per tensor.
        dtype: The tensor's dtype.
        shape: The tensor's static shape, None if it is unknown.
        is_parameter: Whether the tensor is a weight, whose value can be stored as integers.
        symmetric: Whether the zero point is fixed rather than chosen.
        range_source: Where the range comes from, as a scheme says it.
        rounding_mode: How to round; None as the family does by itself.
        args: The family's own arguments.
        block: How many elements along the axis have one scale; None where there are no blocks.
        in_function: Whether the tensor is in a function of the model, which holds constants as ops.
    """

    type: QType
    axis: int | None
    dtype: str
    shape: tuple[int | None, ...] | None
    is_parameter: bool = False
    symmetric: bool = True
    range_source: RangeSource = "observed"
    rounding_mode: RoundingMode | None = None
    args: FamilyArguments = field(default_factory=FamilyArguments)
    block: int | None = None
    in_function: bool = False

    @property
    def is_dynamic(self) -> bool:
        """Whether the range is that of the values in each run."""
        return self.range_source == "dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class QDQFamily:
    """A kind of quantize-dequantize op.

    Attributes:
        name: What rule files call it.
        format: The format whose models can hold it.
        add_ops: Adds the ops to a graph; returns the dequantized tensor.
        unsupported_reason: What is asked to the reason why the runtime cannot do that, or None.
        minimum_opset: What is asked to the lowest opset that has the ops; 0 where there are no opsets.
        effective_params: A scale and zero point to those that the ops have when they are to have these, or are told the `specified`
            range; theirs is float32, so a scale may be off in its last place. A UsageError says why there are none.
        op_types: The op types it reads back.
        stores_integer_weights: Whether it can store a weight as integers.
        has_zero_points: Whether 0.0 may be another integer than 0.
        supports_learned_range: Whether gradients reach the range, so that it can be learned.
        argument_names: Which of `FamilyArguments` its ops have.
        read_params: What an op of those types does, from the values of its parameters; None where they are not known.
        rounding_mode_of: How such an op rounds.
    """

    name: str
    format: str
    add_ops: Callable[[Graph, QDQSite], TensorRef]
    unsupported_reason: Callable[[FamilyRequest], str | None]
    minimum_opset: Callable[[FamilyRequest], int]
    effective_params: Callable[[QParams], QParams]
    op_types: frozenset[str]
    stores_integer_weights: bool
    has_zero_points: bool
    argument_names: frozenset[str]
    read_params: Callable[[Graph, Op, Parameters], QParams | DynamicQParams | None]
    rounding_mode_of: Callable[[Op], RoundingMode]
    supports_learned_range: bool = False


def add_constant(
    graph: Graph, name: str, value: Array, *, op_type: str, rule: str, control_sources: tuple[str, ...] = ()
) -> TensorRef:
    """Adds a constant holding `read_value` and returns its tensor."""
    op_name = graph.unique_name(name)
    output = Output(op_name, str(value.dtype), value.shape)
    op = Op(
        name=op_name, kind="constant", type=op_type, roles=(), outputs=(output,), read_value=lambda: value, rule=rule
    )
    return graph.add_op(op, control_sources=control_sources)


def require_static_params(site: QDQSite) -> QParams:
    """The params of a site whose family needs a range before the model runs."""
    if isinstance(site.params, DynamicQParams):
        raise InternalError(f"A dynamic range was asked for on {site.tensor}; why_not must refuse it.")
    return site.params


def integer_only_reason(request: FamilyRequest, op_type: str) -> str | None:
    """Why `op_type`, which know integers with a scale per tensor or channel, cannot do what is asked; None if they can."""
    if not isinstance(request.type, IntType):
        return f"{op_type} has integer types only, and {request.type.name} is for ONNX models; take int8"
    if request.block is not None:
        return f'{op_type} has no blocks, which are for ONNX models; take per = "channel"'
    return None
