"""What every family of quantize-dequantize ops offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant.ir import Graph, Op, Output, Parameters, TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics import Array, IntType, QParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """One tensor to quantize.

    Attributes:
        tensor: The tensor that is read.
        name: Name for the new ops; further ones append to it.
        params: Scale, zero point and range.
        rule: Name of the rule, stamped on each op.
        value: The weight's value if it is to be folded into an integer constant, else None.
        clip: Whether values may lie outside of what the type represents, so that its container must not take them.
        shape: The tensor's static shape where it is known, as it must be per channel.
        in_frame: Whether the tensor may live in a TF1 loop or cond frame.
    """

    tensor: TensorRef
    name: str
    params: QParams
    rule: str
    value: Array | None = None
    clip: bool = True
    shape: tuple[int | None, ...] | None = None
    in_frame: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a family is asked for, known before any range is.

    Attributes:
        type: The integer type.
        axis: The channel axis, None per tensor.
        dtype: The tensor's dtype.
        shape: The tensor's static shape, None if it is unknown.
        parameter: Whether the tensor is a weight, whose value can be stored as integers.
    """

    type: IntType
    axis: int | None
    dtype: str
    shape: tuple[int | None, ...] | None
    parameter: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of quantize-dequantize op.

    Attributes:
        name: What rule files call it.
        format: The format whose models can hold it.
        lower: Adds the ops to a graph; returns the dequantized tensor.
        why_not: What is asked to the reason why the runtime cannot do that, or None.
        opset: What is asked to the lowest opset that has the ops; 0 where there are no opsets.
        types: The op types it reads back.
        folds: Whether it can store a weight as integers.
        read: What an op of those types does, from the values of its parameters; None where they are not known.
    """

    name: str
    format: str
    lower: Callable[[Graph, Lowering], TensorRef]
    why_not: Callable[[Request], str | None]
    opset: Callable[[Request], int]
    types: frozenset[str]
    folds: bool
    read: Callable[[Graph, Op, Parameters], QParams | None]


def constant(graph: Graph, name: str, value: Array, *, type_: str, rule: str, after: tuple[str, ...] = ()) -> TensorRef:
    """Adds a constant holding `value` and returns its tensor."""
    label = graph.fresh(name)
    known = Output(label, str(value.dtype), value.shape)
    op = Op(name=label, kind="constant", type=type_, roles=(), outputs=(known,), value=lambda: value, rule=rule)
    return graph.add(op, after=after)
