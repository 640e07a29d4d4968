"""Which ops onnxruntime runs on integers: for each type what has to be around it, and what it becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.backends.onnxruntime.around import (
    BYTES,
    REFUSED,
    Around,
    clip_behind,
    group_broken,
    inputs_broken,
    no_type,
    said,
    too_old,
    type_broken,
)
from graphquant.backends.onnxruntime.products import conv, gemm, matmul
from graphquant.backends.types import NOT_QUANTIZED, Broken

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.ir import Op

HALVES = frozenset({"int16", "uint16"})


def _unary(becomes: str) -> Callable[[Around], str | Broken]:
    def select(here: Around) -> str | Broken:
        return group_broken(here, 1) or type_broken(here) or becomes

    return select


def _average_pool(here: Around) -> str | Broken:
    broken = group_broken(here, 1) or type_broken(here)
    if broken is None and "dilations" in here.op.attrs:
        says = "onnxruntime's average pool on integers knows no 'dilations', not even of 1, and it refuses the model"
        return Broken(rule=REFUSED, says=says, fix="take the attribute away where it is 1, or leave the op float")
    return broken or "QLinearAveragePool"


def _joint(becomes: str) -> Callable[[Around], str | Broken]:
    def select(here: Around) -> str | Broken:
        return group_broken(here) or type_broken(here) or becomes

    return select


def _where(here: Around) -> str | Broken:
    return group_broken(here, 2) or type_broken(here) or "QLinearWhere"


def _passes(allowed: frozenset[str], *, positive: bool = False) -> Callable[[Around], str | Broken]:
    """An op that moves values about, or compares them: the same on integers if nothing else changes."""

    def select(here: Around) -> str | Broken:
        broken = too_old(here) or clip_behind(here) or group_broken(here, 1) or type_broken(here, allowed)
        if broken:
            return broken
        for q in here.qs:
            if not here.work.same_params(here.graph, q.name, here.dqs[0].name):
                return _tie(here, q)
        _, scale, _ = here.work.inputs(here.graph, here.qs[0].name)
        if positive and not (here.work.number(scale) or 0) > 0:
            return Broken(rule="scale", says="its scale is not positive", fix="quantize with a positive scale")
        return f"{here.op.type} on {here.types[0]}"

    return select


def _tie(here: Around, q: Op) -> Broken:
    shown = []
    for name in (here.dqs[0].name, q.name):
        _, scale, zero = here.work.inputs(here.graph, name)
        given = "no explicit" if zero is None else said(here.work.number(zero))
        shown.append(f"scale {said(here.work.number(scale))}, zero point {given}")
    says = f"its input has {shown[0]} and its output {shown[1]}"
    return Broken(rule="tie", says=says, fix="give input and output one scale and one explicit zero point")


def _arg_max(here: Around) -> str | Broken:
    if len(here.dqs) != 1 or here.clip:
        return inputs_broken(here, 1) or clip_behind(here) or NOT_QUANTIZED
    if here.types[0] not in BYTES:
        return no_type(here.op, here.types[0])
    if not here.work.scalar(here.graph, here.dqs[0].name, zero_needed=True):
        says = "its input's scale or zero point is not one explicit constant"
        return Broken(rule="scale", says=says, fix="quantize per tensor, with a zero point")
    return f"ArgMax on {here.types[0]}"


SELECTORS: dict[str, Callable[[Around], str | Broken]] = {
    "Conv": conv,
    "MatMul": matmul,
    "Gemm": gemm,
    "Add": _joint("QLinearAdd"),
    "Mul": _joint("QLinearMul"),
    "Concat": _joint("QLinearConcat"),
    "Where": _where,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _unary("QLinearGlobalAveragePool"),
    "LeakyRelu": _unary("QLinearLeakyRelu"),
    "Sigmoid": _unary("QLinearSigmoid"),
    "Softmax": _unary("QLinearSoftmax"),
    "Resize": _passes(BYTES),
    "MaxPool": _passes(BYTES | {"int4", "uint4"}, positive=True),
    "ReduceMax": _passes(BYTES, positive=True),
    "ReduceMin": _passes(BYTES, positive=True),
    "Split": _passes(BYTES | HALVES),
    "ArgMax": _arg_max,
    **dict.fromkeys(
        (
            "DepthToSpace",
            "Expand",
            "Flatten",
            "Gather",
            "GatherElements",
            "Reshape",
            "Slice",
            "Squeeze",
            "Tile",
            "Transpose",
            "Unsqueeze",
        ),
        _passes(BYTES | HALVES),
    ),
}
"""For each op type that can run on integers, what it takes; every other type stays float."""
