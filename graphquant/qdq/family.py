"""The interface of a family of quantize-dequantize ops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from pydantic import ConfigDict, StrictFloat

from graphquant.errors import InternalError
from graphquant.ir import Graph, Op, Output, Parameters, Shape, TensorRef
from graphquant.numerics import DynamicQParams, IntType

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics import Array, QParams, QType


RoundingMode = Literal["half-even", "half-up"]
RangeSource = Literal["observed", "given", "dynamic", "learned"]
ROUNDING_MODES: tuple[RoundingMode, ...] = get_args(RoundingMode)
"""Rounding of values halfway between two steps: to the even one, or up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyArguments:
    """Arguments that only the ops of one family have: `{ form = "args" }`.

    Attributes:
        form: For "fake-quant": "vars" stores the range in constants, "args" in attributes of the op.
        input_min: For "quantize-and-dequantize-v4" with a dynamic range: gradients pass above it. By default all pass.
        input_max: For "quantize-and-dequantize-v4" with a dynamic range: gradients pass below it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    form: Literal["vars", "args"] | None = None
    input_min: StrictFloat | None = None
    input_max: StrictFloat | None = None

    def specified(self) -> tuple[str, ...]:
        """Return the names of the arguments that have a value."""
        return tuple(name for name in self.__slots__ if getattr(self, name) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QDQSite:
    """One tensor to quantize.

    Attributes:
        tensor: The tensor to read.
        name: Name of the new op; names of further ops begin with it.
        params: Scale and zero point, or the type of a dynamic range.
        rule: Name of the rule, recorded in each op.
        read_value: Function that returns the weight's value if it is to become an integer constant, else None. It is
            called when that constant is read, so that weights are never all in memory.
        reuse_integers: Function that returns integers computed earlier for this weight, or else calls its argument to
            compute them; None computes them on each read.
        is_parameter: The tensor is a weight, which is a constant even if it stays float.
        needs_clip: Values can be outside of the type's range, where its container could still store them.
        shape: The tensor's static shape if it is known. It must be known per channel.
        merged_shape: Shape to which the tensor is reshaped, and back, so that its channels are one axis; None if they
            are.
        variable_prefix: Common prefix of the names of variables that store a learned range, "" if it is not learned.
            The variables start with the range of `params`.
        in_frame: The tensor may be in a TF1 loop or cond frame.
        rounding_mode: Rounding of halves; None is the family's default.
        args: The family's own arguments.
        opset: The model's opset in the ONNX default domain; 0 in other formats.
    """

    tensor: TensorRef
    name: str
    params: QParams | DynamicQParams
    rule: str
    read_value: Callable[[], Array] | None = None
    reuse_integers: Callable[[Callable[[], Array]], Array] | None = None
    is_parameter: bool = False
    needs_clip: bool = True
    shape: Shape | None = None
    merged_shape: tuple[int, ...] | None = None
    variable_prefix: str = ""
    in_frame: bool = False
    rounding_mode: RoundingMode | None = None
    args: FamilyArguments = field(default_factory=FamilyArguments)
    opset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRequest:
    """The quantization that a family is asked to support, known before any range is.

    Attributes:
        type: The type of the quantized values.
        axis: The channel axis, or that of the blocks; None per tensor.
        dtype: The tensor's dtype.
        shape: The tensor's static shape, None if it is unknown.
        is_parameter: The tensor is a weight, whose value can be stored as integers.
        symmetric: The zero point is fixed.
        range_source: The scheme's `range`.
        rounding_mode: Rounding of halves; None is the family's default.
        args: The family's own arguments.
        block: Number of elements along the axis that share one scale; None without blocks.
        in_function: The tensor is in a function of the model, where constants are ops.
    """

    type: QType
    axis: int | None
    dtype: str
    shape: Shape | None
    is_parameter: bool = False
    symmetric: bool = True
    range_source: RangeSource = "observed"
    rounding_mode: RoundingMode | None = None
    args: FamilyArguments = field(default_factory=FamilyArguments)
    block: int | None = None
    in_function: bool = False

    @property
    def is_dynamic(self) -> bool:
        """True if the range is that of the values in each run."""
        return self.range_source == "dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class QDQFamily:
    """A kind of quantize-dequantize op.

    Attributes:
        name: Its name in rule files.
        format: The format whose models can contain it.
        add_ops: Adds the ops to a graph and returns the dequantized tensor.
        unsupported_reason: Returns the reason why the runtime does not support a request, or None.
        minimum_opset: Returns the lowest opset that has the ops of a request; 0 in formats without opsets.
        effective_params: Returns the scale and zero point that the ops compute for those of a plan, or from its
            `op_range`. Ops compute a float32 scale, which may differ in its last place. Raises a UsageError with the
            reason if the ops have no such scale.
        op_types: The op types that it reads back.
        stores_integer_weights: It can store a weight as integers.
        has_zero_points: 0.0 can be another integer than 0.
        supports_learned_range: Gradients reach the range, so that it can be learned.
        argument_names: The `FamilyArguments` of its ops.
        read_params: Returns the quantization of an op of `op_types` from its parameters; None if they are unknown.
        rounding_mode_of: Returns the rounding of such an op.
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
    """Add a constant with `value` and return its tensor."""
    op_name = graph.unique_name(name)
    output = Output(op_name, str(value.dtype), value.shape)
    op = Op(
        name=op_name, kind="constant", type=op_type, roles=(), outputs=(output,), read_value=lambda: value, rule=rule
    )
    return graph.add_op(op, control_sources=control_sources)


def require_static_params(site: QDQSite) -> QParams:
    """Return the params of a site whose family needs a range before the model runs."""
    if isinstance(site.params, DynamicQParams):
        raise InternalError(f"{site.tensor} has a dynamic range. `unsupported_reason` must reject it for this family.")
    return site.params


def integer_only_reason(request: FamilyRequest, op_type: str) -> str | None:
    """Return the reason if a request is not for integers with scales per tensor or channel, else None."""
    if not isinstance(request.type, IntType):
        return f"{op_type} supports only integer types; {request.type.name} is for ONNX models; use int8"
    if request.block is not None:
        return f'{op_type} does not support blocks, which are for ONNX models; use per = "channel"'
    return None


def no_minimum_opset(_request: FamilyRequest) -> int:
    """Return 0, since TensorFlow has no opsets."""
    return 0
