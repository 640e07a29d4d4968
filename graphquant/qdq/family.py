"""The interface of a family of quantize-dequantize ops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from sys import intern
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import ConfigDict, StrictFloat

from graphquant.errors import InternalError
from graphquant.ir import Graph, Op, Output, Parameters, Shape, TensorRef, Use
from graphquant.numerics import Array, DynamicQParams, QParams, QType

if TYPE_CHECKING:
    from graphquant.utils.option_types import RangeSource

RoundingMode = Literal["half-even", "half-up"]
ROUNDING_MODES: tuple[RoundingMode, ...] = get_args(RoundingMode)
"""Rounding of values halfway between two steps: to the even one, or up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyArguments:
    """Arguments that only the ops of one family have: `{ form = "args" }`.

    Attributes:
        form: For "fake-quant": "vars" stores the range in constants, "args" in attributes of the op. For "onnx-fused":
            "packed" has the kernel read packed blocks, "folded" has the runtime compute float weights when it starts,
            and "dynamic" multiplies integers, with the range of the activations in each run.
        input_min: For "quantize-and-dequantize-v4" with a dynamic range: gradients pass above it. By default all pass.
        input_max: For "quantize-and-dequantize-v4" with a dynamic range: gradients pass below it.
        accuracy_level: For "onnx-fused": 4 multiplies with activations rounded to int8, 0 in their own type.
        scale_type: For "onnx-qdq": the type of the scales of blocks. "float8_e8m0fnu" has powers of two, as the MX
            formats; "float8_e4m3fn" also has a float32 scale for the tensor, as NVFP4.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    form: Literal["vars", "args", "packed", "folded", "dynamic"] | None = None
    input_min: StrictFloat | None = None
    input_max: StrictFloat | None = None
    accuracy_level: Literal[0, 1, 4] | None = None
    scale_type: Literal["float8_e8m0fnu", "float8_e4m3fn"] | None = None

    def specified(self) -> tuple[str, ...]:
        """Return the names of the arguments that have a value."""
        return tuple(name for name in self.__slots__ if getattr(self, name) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QDQSite:
    """One tensor to quantize."""

    tensor: TensorRef  # the tensor to read
    name: str  # name of the new op; names of further ops begin with it
    params: QParams | DynamicQParams  # scale and zero point, or the type of a dynamic range
    rule: str  # name of the rule, recorded in each op
    # Function that returns the weight's value if it is to become an integer constant, else None. It is called when that
    # constant is read, so that weights are never all in memory.
    read_value: Callable[[], Array] | None = None
    # Function that returns the rows of a slice of that value, if they can be read alone, which takes less memory.
    read_rows: Callable[[slice], Array] | None = None
    # Function that returns integers computed earlier for this weight, or else calls its argument to compute them; None
    # computes them on each read.
    reuse_integers: Callable[[Callable[[], Array]], Array] | None = None
    is_parameter: bool = False  # the tensor is a weight, which is a constant even if it stays float
    needs_clip: bool = True  # values can be outside of the type's range, where its container could still store them
    shape: Shape | None = None  # The tensor's static shape if it is known. It must be known per channel.
    # Shape to which the tensor is reshaped, and back, so that its channels are one axis; None if they are.
    merged_shape: tuple[int, ...] | None = None
    # Common prefix of the names of variables that store a learned range, "" if it is not learned. The variables start
    # with the range of `params`.
    variable_prefix: str = ""
    in_frame: bool = False  # the tensor may be in a TF1 loop or cond frame
    rounding_mode: RoundingMode | None = None  # rounding of halves; None is the family's default
    args: FamilyArguments = field(default_factory=FamilyArguments)  # the family's own arguments
    opset: int = 0  # the model's opset in the ONNX default domain; 0 in other formats
    targets: tuple[str, ...] = ()  # the backends that the rule files are for

    @property
    def static_params(self) -> QParams:
        """The params, for a family that needs a range before the model runs."""
        if isinstance(self.params, DynamicQParams):
            raise InternalError(
                f"{self.tensor} has a dynamic range. `unsupported_reason` must reject it for this family."
            )
        return self.params


class FamilyRequest(NamedTuple):
    """The quantization that a family is asked to support, known before any range is."""

    type: QType  # the type of the quantized values
    axis: int | None  # the channel axis, or that of the blocks; None per tensor
    dtype: str  # the tensor's dtype
    shape: Shape | None  # the tensor's static shape, None if it is unknown
    is_parameter: bool = False  # the tensor is a weight, whose value can be stored as integers
    symmetric: bool = True  # the zero point is fixed
    range_source: RangeSource = "observed"  # the scheme's `range`
    rounding_mode: RoundingMode | None = None  # rounding of halves; None is the family's default
    args: FamilyArguments = FamilyArguments()  # the family's own arguments
    block: int | None = None  # number of elements along the axis that share one scale; None without blocks
    in_function: bool = False  # the tensor is in a function of the model, where constants are ops
    opset: int = 0  # the model's opset in the ONNX default domain; 0 if it is unknown, and in other formats
    targets: tuple[str, ...] = ()  # the backends that the rule files are for

    @property
    def is_dynamic(self) -> bool:
        """True if the range is that of the values in each run."""
        return self.range_source == "dynamic"


class FusedForm(NamedTuple):
    """A form of a dequantized weight and its consumer that only some runtimes compute, or compute fast."""

    op_type: str  # the op that replaces both, "" if standard ops replace the DequantizeLinear only
    bits: int  # bits of an element of the weight
    args: FamilyArguments  # the arguments that select the form
    has_zero_points: bool = False  # the zero points of the weight are stored


class QDQFamily(ABC):
    """A kind of quantize-dequantize op."""

    name: str  # its name in rule files
    format: str  # the format whose models can contain it
    variant_of: str = ""  # the family with the same values in a standard form, which replaces this one where needed
    op_types: frozenset[str]  # the op types that it reads back
    stores_integer_weights: bool = False  # it can store a weight as integers
    has_zero_points: bool = True  # 0.0 can be another integer than 0
    has_channel_ranges: bool = True  # a range per channel can be given
    supports_learned_range: bool = False  # gradients reach the range, so that it can be learned
    argument_names: frozenset[str] = frozenset()  # the `FamilyArguments` of its ops
    forms: tuple[str, ...] = ()  # values of the argument `form`

    @abstractmethod
    def add_ops(self, graph: Graph, site: QDQSite) -> TensorRef:
        """Add the ops to a graph and return the dequantized tensor."""

    @abstractmethod
    def unsupported_reason(self, request: FamilyRequest) -> str | None:
        """Return the reason why the runtime does not support a request, or None."""

    def fused_forms(
        self, _graph: Graph, _use: Use, _request: FamilyRequest, _model_weights: int | None = None
    ) -> list[FusedForm]:
        """Return the forms other than Q/DQ ops that a weight can have for a use, the preferred one first.

        `_model_weights` is the number of elements of all weights of matrix products, counted again if it is None.
        """
        return []

    def minimum_opset(self, _request: FamilyRequest) -> int:
        """Return the lowest opset that has the ops of a request; 0 in formats without opsets."""
        return 0

    def effective_params(self, params: QParams) -> QParams:
        """Return the scale and zero point that the ops compute for those of a plan, or from its `op_range`.

        Ops compute a float32 scale, which may differ in its last place.

        Raises:
            UsageError: The ops have no such scale. The message is the reason.
        """
        return params

    @abstractmethod
    def read_params(self, graph: Graph, op: Op, parameters: Parameters) -> QParams | DynamicQParams | None:
        """Return the quantization of an op of `op_types` from its parameters; None if they are unknown."""

    def read_restricted_params(self, graph: Graph, op: Op, parameters: Parameters) -> QParams | DynamicQParams | None:
        """Return the quantization of an op with the type to which its values are restricted, if that is narrower."""
        return self.read_params(graph, op, parameters)

    def rounding_mode_of(self, _op: Op) -> RoundingMode:
        """Return the rounding of such an op."""
        return "half-even"


def new_op(graph: Graph, name: str, dtype: str | None, shape: Shape | None, **fields: Any) -> Op:
    """Return an op with the `fields` of `Op`, named `name` or the next free name, and one output of that name."""
    op_name = graph.unique_name(name)
    return Op(**{"name": op_name, "outputs": (Output(op_name, dtype, shape),), "anchor": graph.anchor, **fields})


def new_constant(graph: Graph, name: str, value: Array, *, op_type: str, rule: str) -> Op:
    """Return a constant op with `value`, named `name` or the next free name."""
    fields: dict[str, Any] = {"kind": "constant", "type": op_type, "roles": (), "rule": rule}
    # Equal names of types are one object.
    return new_op(graph, name, intern(str(value.dtype)), value.shape, read_value=value.view, **fields)


def add_constant(
    graph: Graph, name: str, value: Array, *, op_type: str, rule: str, control_sources: tuple[str, ...] = ()
) -> TensorRef:
    """Add a constant with `value` and return its tensor."""
    op = new_constant(graph, name, value, op_type=op_type, rule=rule)
    return graph.add_op(op, control_sources=control_sources)
