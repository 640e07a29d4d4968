"""ONNX QuantizeLinear and DequantizeLinear: https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html .

What onnxruntime runs was measured, and docs/decisions/0031-onnx-types.md has the tables: each type and granularity that
an opset of the default domain has; and, below the opset that brought 4 and 16 bits there, these in its own domain, in
models of any opset. So 4 and 16 bits never cost an upgrade, which only blocks and float8 need.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from graphquant.ir import Graph, Op, Output, TensorRef
from graphquant.numerics import Array, FloatType, IntType, QParams, QType, over, stored
from graphquant.qdq.base import Family, Lowering, Request, constant, static_params
from graphquant.qdq.onnx_read import read, rounding

if TYPE_CHECKING:
    from collections.abc import Callable

OPSET_PER_TENSOR, OPSET_PER_CHANNEL = 10, 13
"""Of 8 bits, and of int32 biases."""

OPSET_RUN_TIME = 11
"""Where activations are quantized, onnxruntime adds a Round to float biases, which opset 10 has not."""

OPSET_FLOAT8, OPSET_BLOCKS = 19, 21
"""The first has float16 too, the second of 4 and 16 bits."""

OPSET_OTHER_WIDTHS = 21
"""Where 4 and 16 bits came to the default domain."""

MICROSOFT = "com.microsoft"
"""Where onnxruntime has them below, whatever the opset."""

OPSET_BROADCAST = 8
"""First opset whose Max and Min broadcast, as the clipping of odd widths needs."""

OTHER_WIDTHS = frozenset({"int4", "uint4", "int16", "uint16"})

NO_CONSTANT = frozenset({"int4", "uint4"})
"""Of these what initializers may be and Constants may not, below the opset that brought them."""

_ROLES = ("input", "scale", "zero_point")
_QUANTIZE = ("quantize", "QuantizeLinear", _ROLES)
_DEQUANTIZE = ("dequantize", "DequantizeLinear", _ROLES)
_MAX = ("max", "Max", ("input",))
_MIN = ("min", "Min", ("input",))


def _container(dtype: QType, *, parameter: bool) -> str:
    """The type that holds the values: 8 bits where 4 would do at run time.

    onnxruntime's optimizer moves 4 bits past a MaxPool, into a convolution and the like, whose kernels have no such
    type, and then refuses the model. It leaves weights alone.
    """
    narrow = isinstance(dtype, IntType) and dtype.container in {"int4", "uint4"}
    return dtype.container.replace("4", "8") if narrow and not parameter else dtype.container


def lower(graph: Graph, site: Lowering) -> TensorRef:
    """Adds QuantizeLinear and DequantizeLinear; where there is a value to fold, an integer constant for the former."""
    params = static_params(site)
    known = graph.output(site.tensor)
    held = _container(params.type, parameter=site.parameter)
    integer = np.dtype(getattr(ml_dtypes, held, held))
    shape = () if _one_block(params) else params.scale.shape
    zeros = params.zero_point.astype(integer).reshape(shape)
    floats = np.dtype(known.dtype)  # the scale's type is the tensor's
    scales = params.scale.astype(floats).reshape(shape)
    scale = constant(graph, f"{site.name}/scale", scales, type_="Constant", rule=site.rule)
    zero = constant(graph, f"{site.name}/zero_point", zeros, type_="Constant", rule=site.rule)
    if site.value is not None:
        label = graph.fresh(f"{site.name}/{integer.name}")
        folded = partial(_folded, site.value, params, integer)
        folded = folded if site.keep is None else partial(site.keep, folded)
        made = Output(label, integer.name, site.shape)
        op = Op(name=label, kind="constant", type="Constant", roles=(), outputs=(made,), value=folded, rule=site.rule)
        source = graph.add(op)
    else:
        made = Output("", integer.name, known.shape)
        data = _clipped(graph, site)
        source = _add(graph, site, site.name, _QUANTIZE, made, [data, scale, zero])
    made = Output("", known.dtype, known.shape)
    return _add(graph, site, f"{site.name}/dequant", _DEQUANTIZE, made, [source, scale, zero])


def _folded(value: Callable[[], Array], params: QParams, integer: np.dtype[Any]) -> Array:
    return stored(value(), params, integer)


def _one_block(params: QParams) -> bool:
    """Whether a vector is one block: onnxruntime then takes the scale for the tensor's, and refuses a block size."""
    return params.block is not None and params.scale.shape == (1,)


def _clipped(graph: Graph, site: Lowering) -> TensorRef:
    """The tensor without what the type's container has and the type has not, by Max and Min, which broadcast.

    onnxruntime's QuantizeLinear to 4 bits per channel wraps around where a value is 2**31 steps large, so a weight that
    stays float gets both ends before that.
    """
    params, known = static_params(site), graph.output(site.tensor)
    result = site.tensor
    if isinstance(params.type, FloatType) or not site.clip:
        return result
    ends = params.type.limits(narrow=params.narrow)
    held = IntType.parse(_container(params.type, parameter=site.parameter))
    container, wraps = held.limits(), held.container in {"int4", "uint4"}
    bounds = ((_MAX, "low", params.range.low), (_MIN, "high", params.range.high))
    for place, (op, word, values) in enumerate(bounds):
        if wraps or ends[place] != container[place]:
            shaped = _bound(values.astype(np.dtype(known.dtype)), site)
            bound = constant(graph, f"{site.name}/{word}", shaped, type_="Constant", rule=site.rule)
            made = Output("", known.dtype, known.shape)
            result = _add(graph, site, f"{site.name}/clip_{word}", op, made, [result, bound])
    return result


def _bound(values: Array, site: Lowering) -> Array:
    """Bounds shaped to broadcast over the tensor, whose shape is known where there are blocks."""
    shape = tuple(size or 0 for size in site.shape or ())
    return over(values, static_params(site), shape)


def _add(
    graph: Graph,
    site: Lowering,
    name: str,
    kind: tuple[str, str, tuple[str, ...]],
    made: Output,
    inputs: list[TensorRef],
) -> TensorRef:
    label = graph.fresh(name)
    known = Output(label, made.dtype, made.shape)
    domain, attrs = _form(site) if kind in {_QUANTIZE, _DEQUANTIZE} else ("", {})
    op = Op(
        name=label,
        kind=kind[0],
        type=kind[1],
        domain=domain,
        roles=kind[2],
        outputs=(known,),
        attrs=attrs,
        rule=site.rule,
    )
    return graph.add(op, inputs)


def _form(site: Lowering) -> tuple[str, dict[str, int]]:
    """The domain of the ops, and their attributes."""
    params = static_params(site)
    attrs = {} if _one_block(params) else {"axis": params.axis, "block_size": params.block}
    held = _container(params.type, parameter=site.parameter)
    own = site.opset < OPSET_OTHER_WIDTHS and held in OTHER_WIDTHS
    return MICROSOFT if own else "", {name: value for name, value in attrs.items() if value is not None}


def why_not(asked: Request) -> str | None:  # noqa: PLR0911  # one for each thing it cannot do
    """The reason why onnxruntime cannot run these ops, or None."""
    if asked.dtype == "float16" and not (asked.parameter and isinstance(asked.type, IntType)):
        return "onnxruntime runs ops between float16 pairs in float; convert the model to float32 first"
    if asked.dtype not in {"float16", "float32"}:
        return f"QuantizeLinear with a float32 scale takes no {asked.dtype} tensor"
    if asked.range != "observed":
        return "QuantizeLinear needs a scale that is known; leave 'range' out"
    if asked.round == "half-up":
        return "QuantizeLinear always rounds half to even; leave 'round' out"
    if asked.block is not None and not asked.parameter:
        return (
            "blocks are for weights, whose values are known: no statistics are kept for each block of an activation;"
            ' take per = "tensor" or per = "channel"'
        )
    if asked.type.name == "int32" and asked.parameter:
        return None
    if isinstance(asked.type, FloatType) or asked.type.container in {"int8", "uint8", *OTHER_WIDTHS}:
        return None
    return (
        f"{asked.type.name} does not fit the types of 4, 8 and 16 bits that onnxruntime quantizes to; take 2 to 16 bits"
    )


def opset(asked: Request) -> int:
    """The lowest opset of the default domain that has these ops, or that goes with those of onnxruntime's own."""
    held = _container(asked.type, parameter=asked.parameter)
    other = held in OTHER_WIDTHS
    if asked.function and asked.parameter and held in NO_CONSTANT:
        return OPSET_OTHER_WIDTHS
    if asked.block is not None or (asked.dtype == "float16" and other):
        return OPSET_BLOCKS
    if isinstance(asked.type, FloatType) or asked.dtype == "float16":
        return OPSET_FLOAT8
    if other:
        return OPSET_BROADCAST if asked.parameter else OPSET_RUN_TIME
    if asked.axis is not None:
        return OPSET_PER_CHANNEL
    return OPSET_PER_TENSOR if asked.parameter else OPSET_RUN_TIME


def settle(params: QParams) -> QParams:
    """What is asked for: scale and zero point are written as they are."""
    return params


ONNX_QDQ = Family(
    name="onnx-qdq",
    format="onnx",
    lower=lower,
    why_not=why_not,
    opset=opset,
    settle=settle,
    types=frozenset({"QuantizeLinear", "DequantizeLinear"}),
    folds=True,
    zero_points=True,
    arguments=frozenset(),
    read=read,
    rounding=rounding,
)
