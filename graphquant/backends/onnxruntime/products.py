"""Convolutions and matrix products: what onnxruntime makes of them, or the rule they break."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphquant.backends.onnxruntime.around import (
    BYTES,
    REFUSED,
    group_broken,
    inputs_broken,
    no_int8,
    no_type,
    output_broken,
)
from graphquant.backends.onnxruntime.operands import STAND_IN
from graphquant.backends.onnxruntime.work import is_dq
from graphquant.backends.types import NOT_QUANTIZED, Broken

if TYPE_CHECKING:
    from graphquant.backends.onnxruntime.around import Around
    from graphquant.ir import Op

SMALLEST_BLOCK = 16
"""Values that share a scale in the weights of MatMulNBits, at least; a power of two."""

BIAS_CLOSE, BIAS_NEAR = 1e-6, 1e-2
"""How far the scale of a bias may be off: absolutely, and as a share of what it should be."""

NARROW = frozenset({"int2", "uint2", "int4", "uint4", "int8", "uint8"})


def conv(here: Around) -> str | Broken:
    """Conv: all quantized, the bias too, and int8 activations only where kernels take them."""
    broken = group_broken(here) or _weightless(here) or no_int8(here) or _mixed(here) or _wrong_type(here, 2)
    return broken or _bias(here, scaled=True) or "QLinearConv"


def _weightless(here: Around) -> Broken | None:
    """A broken model may leave the weight out."""
    return NOT_QUANTIZED if len(here.dqs) < 2 else None  # noqa: PLR2004  # data and weight


def _mixed(here: Around) -> Broken | None:
    """Input and output differ in type."""
    if not here.qs or here.types[0] == here.made:
        return None
    says = f"its input is {here.types[0]} and its output {here.made}"
    return Broken(rule="mixed-types", says=says, fix="give both of them one integer type")


def _wrong_type(here: Around, inputs: int) -> Broken | None:
    wrong = next((dtype for dtype in here.types[:inputs] if dtype not in BYTES), "")
    return no_type(here.op, wrong) if wrong else None


def _bias(here: Around, *, scaled: bool = False) -> Broken | None:
    if len(here.types) < 3:  # noqa: PLR2004  # the slot of the bias
        return None
    if here.types[2] != "int32":
        says = f"its bias is {here.types[2]}"
        return Broken(rule="bias-type", says=says, fix="quantize the bias to int32, scale input times weight")
    if scaled and here.dqs[2].rule != STAND_IN and not _bias_scale(here):
        says = "its bias does not have the scale input times weight and zero point 0"
        return Broken(rule="bias-scale", says=says, fix="requantize the bias with that scale, or leave it float")
    return None


def _bias_scale(here: Around) -> bool:
    """Whether the scale of the bias is the product of the other two, as closely as onnxruntime asks."""
    of = [here.work.inputs(here.graph, dq.name) for dq in here.dqs]
    scales = [here.work.value(scale) for _, scale, _ in of]
    zero = here.work.value(of[2][2])
    if any(scale is None for scale in scales) or (zero is not None and np.any(zero)):
        return False
    given, weight, bias = (np.asarray(scale, np.float64).reshape(-1) for scale in scales)
    if len({1, given.size, weight.size, bias.size}) > 2:  # noqa: PLR2004  # 1 and one other, or they do not fit
        return False
    product = given * weight
    return bool((np.abs(bias - product) <= BIAS_CLOSE + BIAS_NEAR * np.abs(product)).all())


def matmul(here: Around) -> str | Broken:
    """MatMul: both inputs quantized, with or without a quantized output; or a weight of few bits alone."""
    if len(here.dqs) == 1:
        return _n_bits(here)
    broken = inputs_broken(here, 2) or no_int8(here) or _wrong_type(here, 2)
    if broken or not here.qs:
        return broken or "MatMulIntegerToFloat"
    return output_broken(here) or _mixed(here) or "QLinearMatMul"


def _n_bits(here: Around) -> str | Broken:
    """Float activations times weights of few bits."""
    source = here.work.producer(here.graph, here.op.name, 1)
    if source is None or not is_dq(source) or here.qs or here.clip:
        return inputs_broken(here, 2) or Broken(
            rule="float-input", says="it has one quantized input", fix="quantize both"
        )
    dtype = here.work.dtype(here.graph, source.name)
    data, scale, zero = here.work.inputs(here.graph, source.name)
    if dtype not in NARROW or not here.work.constant(data) or not here.work.constant(scale):
        return inputs_broken(here, 2) or no_type(here.op, dtype)
    parts = [part for part in (data, scale, zero) if part is not None]
    if any(part.graph != here.graph.name for part in parts):
        says = "its weight is a constant of another graph, and onnxruntime refuses the whole model for that"
        return Broken(rule=REFUSED, says=says, fix="put the weight, its scales and zero points into the body")
    if any(here.work.uses(here.graph, part) > 1 for part in parts):
        says = "its weight, or a constant of up to 8 scales with these very values, is read elsewhere too"
        return Broken(rule="shared-weight", says=says, fix="give it a weight and scales of its own")
    shape = here.graph.output(data).shape if data is not None else None
    sizes = here.graph.output(scale).shape if scale is not None else None
    zeros = here.graph.output(zero).shape if zero is not None else sizes
    if shape is None or len(shape) != 2 or zeros != sizes:  # noqa: PLR2004  # a matrix
        says = "its quantized weight is no matrix, or scales and zero points differ in shape"
        return Broken(rule="weight-shape", says=says, fix="quantize a weight of two axes, or the activation too")
    return _blocks(source, shape, sizes) or "MatMulNBits"


def _blocks(source: Op, shape: tuple[int | None, ...], sizes: tuple[int | None, ...] | None) -> Broken | None:
    block = int(source.number("block_size", 0))
    axis = int(source.number("axis", 1))
    if not block:
        if sizes == () or (sizes == (shape[1],) and axis == 1):
            return None
        says = "its weight's scales are neither one, nor one for each column, nor one for each block of rows"
        return Broken(rule="weight-axis", says=says, fix="use one scale for each column, axis 1")
    if axis != 0:
        says = f"its weight's blocks lie along axis {axis}"
        return Broken(rule="weight-axis", says=says, fix="put blocks along axis 0, the one that is summed over")
    if block < SMALLEST_BLOCK or block & (block - 1):
        says = f"its weight's blocks have {block} values"
        return Broken(rule="block-size", says=says, fix="use blocks of 16, 32, 64 or another power of two")
    return None


def gemm(here: Around) -> str | Broken:
    """Gemm: all inputs quantized, the bias too, with or without a quantized output."""
    broken = inputs_broken(here) or _weightless(here)
    if broken:
        return _gemm_n_bits(here) or broken
    if here.qs or here.clip:
        broken = output_broken(here)
    if not broken and here.types[0] == "int8" and here.types[1] != "int8":
        says = f"its activation is int8 and its weight {here.types[1]}"
        broken = Broken(rule="int8-activation", says=says, fix="quantize activations to uint8")
    broken = broken or _mixed(here) or _wrong_type(here, 2)
    if not broken and len(here.types) > 2 and here.op.number("beta", 1.0) != 1.0:  # noqa: PLR2004  # with a bias
        return Broken(rule="beta", says="its beta is not 1", fix="multiply the bias by beta and set beta to 1")
    return broken or _bias(here) or "QGemm"


def _gemm_n_bits(here: Around) -> str | Broken | None:
    """A Gemm that is no more than a MatMul and a bias, with few bits in its weight; None if it is something else."""
    source = here.work.producer(here.graph, here.op.name, 1)
    first = here.work.producer(here.graph, here.op.name, 0)
    if source is None or not is_dq(source) or (first is not None and is_dq(first)) or here.qs:
        return None
    plain = here.op.number("alpha", 1.0) == 1.0 and not here.op.number("transA", 0) and not here.op.number("transB", 0)
    slots = [*here.graph.slots(here.op.name), None, None, None][:3]
    if not plain or (slots[2] is not None and here.op.number("beta", 1.0) != 1.0):
        return None
    data = here.work.slot(here.graph, source.name, 0)
    columns = here.graph.output(data).shape if data is not None else None
    if slots[2] is not None and columns is not None and here.graph.output(slots[2]).shape != columns[1:]:
        return None
    return _n_bits(here)
