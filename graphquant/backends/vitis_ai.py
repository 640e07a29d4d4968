"""AMD's Vitis AI with power-of-two scales: every op between quantizations, and shifts that the hardware can do."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from graphquant.backends.requirements import (
    Row,
    Table,
    inputs_quantized,
    judge,
    output_quantized,
    symmetric,
    tied,
    types,
)
from graphquant.backends.types import Backend, Broken
from graphquant.solve import ADD_READ, ADD_WRITE, BIAS_CUT, CUT, MUL_WRITE, position_of

if TYPE_CHECKING:
    from graphquant.backends.requirements import Seen

INT8 = frozenset({"int8"})


def power_of_two(seen: Seen) -> Broken | None:
    """Every scale is one power of two."""
    named = [(f"its {side.role} {side.source}", side.params) for side in seen.inputs]
    for name, params in [*named, *(("its output", params) for params in seen.pairs)]:
        if params is not None and position_of(params) is None:
            shown = (
                f"{params.scale.size} scales" if params.scale.size > 1 else f"the scale {float(np.max(params.scale)):g}"
            )
            says = f"{name} has {shown}, not one power of two"
            return Broken(rule="power-of-two", says=says, fix='quantize per tensor with scale = "power-of-two"')
    return None


def _bias_quantized(seen: Seen) -> Broken | None:
    side = seen.by_role("bias")
    if side is None or side.pair:
        return None
    return Broken(rule="float-bias", says=f"its bias {side.source} is float", fix="quantize the bias to int8")


def _positions(seen: Seen) -> tuple[list[int], int | None]:
    """Those of the inputs, and of the output."""
    inputs = [
        place for side in seen.inputs if side.params is not None and (place := position_of(side.params)) is not None
    ]
    outputs = [place for params in seen.pairs if params is not None and (place := position_of(params)) is not None]
    return inputs, outputs[0] if outputs else None


def _within(name: str, value: int, limits: tuple[int, int]) -> Broken | None:
    low, high = limits
    if low <= value <= high:
        return None
    says = f"its {name} is {value}, outside of {low} to {high}"
    return Broken(
        rule="shift", says=says, fix="move the scale of its output, or of an input, by that many powers of two"
    )


def _weighted_shift(seen: Seen) -> Broken | None:
    """The shifts of a product: of the sum, and of the bias into it."""
    places = {side.role: position_of(side.params) for side in seen.inputs if side.params is not None}
    data, weight, output = places.get("input"), places.get("weight"), _positions(seen)[1]
    if data is None or weight is None or output is None:
        return None
    bias = places.get("bias")
    broken = _within("shift of weight plus input minus output", weight + data - output, CUT)
    if broken is None and bias is not None and weight + data - bias > BIAS_CUT:
        says = f"its shift of weight plus input minus bias is {weight + data - bias}, above {BIAS_CUT}"
        return Broken(rule="shift", says=says, fix="give the bias a smaller scale")
    return broken


def _add_shift(seen: Seen) -> Broken | None:
    inputs, output = _positions(seen)
    if not inputs or output is None:
        return None
    broken = _within("shift between its inputs", max(inputs) - min(inputs), ADD_READ)
    return broken or _within("shift of its inputs to its output", min(inputs) - output, ADD_WRITE)


def _mul_shift(seen: Seen) -> Broken | None:
    inputs, output = _positions(seen)
    return None if not inputs or output is None else _within("shift of its product", sum(inputs) - output, MUL_WRITE)


_COMMON = (inputs_quantized, output_quantized, types(INT8, INT8), symmetric, power_of_two)

_SHARED = Row(requires=(*_COMMON, tied))

TABLE = Table(
    name="Vitis AI",
    rows={
        **dict.fromkeys(
            ("conv", "depthwise_conv", "conv_transpose", "matmul", "gemm"),
            Row(requires=(*_COMMON, _bias_quantized, _weighted_shift)),
        ),
        "add": Row(requires=(*_COMMON, _add_shift)),
        "mul": Row(requires=(*_COMMON, _mul_shift)),
        **dict.fromkeys(("relu", "relu6", "leaky_relu", "prelu", "clip"), Row(requires=_COMMON)),
        **dict.fromkeys(
            ("concat", "max_pool", "avg_pool", "global_avg_pool", "pad", "slice", "reshape", "flatten", "transpose"),
            _SHARED,
        ),
    },
    fuses=dict.fromkeys(
        (
            *("conv", "depthwise_conv", "conv_transpose", "matmul", "gemm", "add"),
            *("max_pool", "avg_pool", "global_avg_pool"),
        ),
        frozenset({"relu", "relu6", "leaky_relu", "prelu"}),
    ),
)

VITIS_AI = Backend(
    name="vitis_ai",
    explains="AMD's Vitis AI, power-of-two scales",
    predict=partial(judge, table=TABLE),
    symmetric=True,
    ties_concat=True,
    bias="int8",
    fuses=TABLE.fuses,
)
