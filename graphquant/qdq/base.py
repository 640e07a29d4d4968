"""What every family of quantize-dequantize ops offers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from pydantic import ConfigDict, StrictFloat

from graphquant.errors import InternalError
from graphquant.ir import Graph, Op, Output, Parameters, TensorRef
from graphquant.numerics import Dynamic, IntType

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics import Array, QParams, QType

Round = Literal["half-even", "half-up"]
RangeFrom = Literal["observed", "given", "dynamic", "learned"]
ROUNDS: tuple[Round, ...] = get_args(Round)
"""How values halfway between two steps are rounded: to the even one, or up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
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

    def given(self) -> tuple[str, ...]:
        """Names of the arguments that are not left to the family."""
        return tuple(name for name in self.__slots__ if getattr(self, name) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """One tensor to quantize.

    Attributes:
        tensor: The tensor that is read.
        name: Name for the new ops; further ones append to it.
        params: Scale, zero point and range; or that the range is that of each run.
        rule: Name of the rule, stamped on each op.
        value: Gives the weight's value if it is to be folded into an integer constant, else None. It is read when
            that constant is, so that weights are never all in memory.
        keep: Gives the integers that were made of that value before, else those that what it is given makes; None where
            they are made whenever they are read.
        parameter: Whether the tensor is a weight, which is a constant even where it stays float.
        clip: Whether values may lie outside of what the type represents, so that its container must not take them.
        shape: The tensor's static shape where it is known, as it must be per channel.
        view: That shape if the tensor is to be reshaped to it for its channels to be one axis, and back; else None.
        learned: Where the range is in variables, which start with that of `params`: the name that is common to theirs,
            "" where it is not.
        in_frame: Whether the tensor may live in a TF1 loop or cond frame.
        round: How to round; None as the family does by itself.
        args: The family's own arguments.
        opset: The ONNX default domain's opset that the model has; 0 where there are no opsets.
    """

    tensor: TensorRef
    name: str
    params: QParams | Dynamic
    rule: str
    value: Callable[[], Array] | None = None
    keep: Callable[[Callable[[], Array]], Array] | None = None
    parameter: bool = False
    clip: bool = True
    shape: tuple[int | None, ...] | None = None
    view: tuple[int, ...] | None = None
    learned: str = ""
    in_frame: bool = False
    round: Round | None = None
    args: Arguments = field(default_factory=Arguments)
    opset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a family is asked for, known before any range is.

    Attributes:
        type: The type of the quantized values.
        axis: The channel axis, or that of the blocks; None per tensor.
        dtype: The tensor's dtype.
        shape: The tensor's static shape, None if it is unknown.
        parameter: Whether the tensor is a weight, whose value can be stored as integers.
        symmetric: Whether the zero point is fixed rather than chosen.
        range: Where the range comes from, as a scheme says it.
        round: How to round; None as the family does by itself.
        args: The family's own arguments.
        block: How many elements along the axis have one scale; None where there are no blocks.
        function: Whether the tensor is in a function of the model, which holds constants as ops.
    """

    type: QType
    axis: int | None
    dtype: str
    shape: tuple[int | None, ...] | None
    parameter: bool = False
    symmetric: bool = True
    range: RangeFrom = "observed"
    round: Round | None = None
    args: Arguments = field(default_factory=Arguments)
    block: int | None = None
    function: bool = False

    @property
    def dynamic(self) -> bool:
        """Whether the range is that of the values in each run."""
        return self.range == "dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of quantize-dequantize op.

    Attributes:
        name: What rule files call it.
        format: The format whose models can hold it.
        lower: Adds the ops to a graph; returns the dequantized tensor.
        why_not: What is asked to the reason why the runtime cannot do that, or None.
        opset: What is asked to the lowest opset that has the ops; 0 where there are no opsets.
        settle: A scale and zero point to those that the ops have when they are to have these, or are told the `given`
            range; theirs is float32, so a scale may be off in its last place. A UsageError says why there are none.
        types: The op types it reads back.
        folds: Whether it can store a weight as integers.
        zero_points: Whether 0.0 may be another integer than 0.
        learns: Whether gradients reach the range, so that it can be learned.
        arguments: Which of `Arguments` its ops have.
        read: What an op of those types does, from the values of its parameters; None where they are not known.
        rounding: How such an op rounds.
    """

    name: str
    format: str
    lower: Callable[[Graph, Lowering], TensorRef]
    why_not: Callable[[Request], str | None]
    opset: Callable[[Request], int]
    settle: Callable[[QParams], QParams]
    types: frozenset[str]
    folds: bool
    zero_points: bool
    arguments: frozenset[str]
    read: Callable[[Graph, Op, Parameters], QParams | Dynamic | None]
    rounding: Callable[[Op], Round]
    learns: bool = False


def constant(graph: Graph, name: str, value: Array, *, type_: str, rule: str, after: tuple[str, ...] = ()) -> TensorRef:
    """Adds a constant holding `value` and returns its tensor."""
    label = graph.fresh(name)
    known = Output(label, str(value.dtype), value.shape)
    op = Op(name=label, kind="constant", type=type_, roles=(), outputs=(known,), value=lambda: value, rule=rule)
    return graph.add(op, after=after)


def static_params(site: Lowering) -> QParams:
    """The params of a site whose family needs a range before the model runs."""
    if isinstance(site.params, Dynamic):
        raise InternalError(f"A dynamic range was asked for on {site.tensor}; why_not must refuse it.")
    return site.params


def only_integers(asked: Request, ops: str) -> str | None:
    """Why `ops`, which know integers with a scale per tensor or channel, cannot do what is asked; None if they can."""
    if not isinstance(asked.type, IntType):
        return f"{ops} has integer types only, and {asked.type.name} is for ONNX models; take int8"
    if asked.block is not None:
        return f'{ops} has no blocks, which are for ONNX models; take per = "channel"'
    return None
