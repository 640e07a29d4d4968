"""TensorFlow's QuantizeAndDequantizeV2, V3 and V4; the first version is only read: TensorFlow no longer imports it.

https://www.tensorflow.org/api_docs/python/tf/quantization/quantize_and_dequantize_v2 : values are only scaled, so there
is no zero point. V2 and V3 pass gradients on as they come, V4 those inside the given range. V3's bits are a tensor.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from graphquant.errors import InternalError, UsageError
from graphquant.ir import DataType, Graph, Op, Output, Parameters, TensorRef
from graphquant.numerics import Array, Dynamic, IntType, QParams, Range
from graphquant.numerics import quantize_and_dequantize as qad
from graphquant.qdq.base import Family, Lowering, Request, Round, only_integers
from graphquant.qdq.nodes import held, within

ROUND_MODES: dict[Round, str] = {"half-even": "HALF_TO_EVEN", "half-up": "HALF_UP"}

FLOATS = frozenset({"float32", "float64"})
"""The types that have a CPU kernel."""

READABLE_BITS = 62


def lower(graph: Graph, site: Lowering, *, version: int) -> TensorRef:
    """Adds the op with the constants of its range, and of V3's bits."""
    return within(graph, site, partial(_lower, version=version))


def _lower(graph: Graph, site: Lowering, *, version: int) -> TensorRef:
    params, known = site.params, graph.output(site.tensor)
    attrs: dict[str, Any] = {
        "signed_input": params.type.signed,
        "range_given": not isinstance(params, Dynamic),
        "narrow_range": params.narrow and params.type.signed,
    }
    if params.axis is not None:
        attrs["axis"] = params.axis
    if version != 3:  # noqa: PLR2004  # whose bits are a tensor, and which rounds half to even
        attrs |= {"num_bits": params.type.bits, "round_mode": ROUND_MODES[site.round or "half-even"]}
    low, high = (end.astype(known.dtype) for end in _ends(site, version, known.dtype))
    label = graph.fresh(site.name)
    inputs = [site.tensor, held(graph, site, "min", low), held(graph, site, "max", high)]
    roles: tuple[str, ...] = ("input", "min", "max")
    if version == 3:  # noqa: PLR2004  # its bits are a tensor
        inputs.append(held(graph, site, "num_bits", np.array(params.type.bits, np.int32)))
        roles = (*roles, "other")
    op = Op(
        name=label,
        kind="qdq",
        type=f"QuantizeAndDequantizeV{version}",
        roles=roles,
        outputs=(Output(label, known.dtype, known.shape),),
        attrs={"T": DataType(known.dtype or "float32"), **attrs},
        rule=site.rule,
    )
    return graph.add(op, inputs)


def _ends(site: Lowering, version: int, dtype: str | None) -> tuple[Array, Array]:
    """What `input_min` and `input_max` are, () or (C,); float64, to be written in the tensor's type."""
    params = site.params
    if isinstance(params, QParams):
        given = params.given or (params.range if dtype == "float64" else qad.range_to_write(params))
        return given.low, given.high
    # V4 alone looks at a range that is not given: its gradients pass inside of it.
    largest = float(np.finfo(np.float32).max) if version == 4 else 0.0  # noqa: PLR2004
    ends = (site.args.input_min, -largest), (site.args.input_max, largest)
    low, high = (default if given is None else given for given, default in ends)
    if params.axis is None:
        return np.asarray(low, np.float64), np.asarray(high, np.float64)
    channels = None if site.shape is None else site.shape[params.axis]
    if channels is None:
        raise InternalError(
            f"A dynamic range per channel on {site.tensor} without its channels; why_not must refuse it."
        )
    return np.full(channels, low, np.float64), np.full(channels, high, np.float64)


def why_not(asked: Request, *, version: int) -> str | None:
    """The reason why TensorFlow cannot run this version, or None."""
    ops, most = f"QuantizeAndDequantizeV{version}", qad.SIGNED_BITS if asked.type.signed else qad.UNSIGNED_BITS
    if (reason := only_integers(asked, ops)) is not None:
        return reason
    if asked.dtype not in FLOATS:
        return f"{ops} has no CPU kernel for {asked.dtype}; cast the tensor to float32"
    if not (2 if asked.type.signed else 1) <= asked.type.bits <= most:
        kind = "signed" if asked.type.signed else "unsigned"
        return (
            f"{ops} takes {2 if asked.type.signed else 1} to {most} {kind} bits, and the scheme wants {asked.type.bits}"
        )
    if not asked.symmetric and asked.type.signed:
        return 'QuantizeAndDequantize has no zero point; take zero = "symmetric", or the family fake-quant'
    if asked.axis is not None and _channels(asked) is None:
        return f'{ops} per channel needs a known number of channels; take per = "tensor"'
    return _why_not_here(asked, ops, version)


def _why_not_here(asked: Request, ops: str, version: int) -> str | None:
    """What this version cannot do and another one can."""
    if version == 3:  # noqa: PLR2004  # V3 differs from V2 and V4 in each of these
        if asked.round == "half-up":
            return f"{ops} always rounds half to even; leave 'round' out, or take quantize-and-dequantize-v2 or -v4"
        if asked.shape == ():
            return f"{ops} takes no scalar; take quantize-and-dequantize-v2 or -v4"
        return None
    if asked.axis is not None and not asked.dynamic:
        return (
            f'{ops} has no CPU kernel for a range per channel; take per = "tensor", or the family'
            " quantize-and-dequantize-v3 or fake-quant"
        )
    if asked.args.given() and not asked.dynamic:
        return "'input_min' and 'input_max' bound the gradients of a dynamic range; use observe = \"fixed\""
    return None


def _channels(asked: Request) -> int | None:
    return None if asked.shape is None or asked.axis is None else asked.shape[asked.axis]


def opset(_asked: Request) -> int:
    """TensorFlow has no opsets."""
    return 0


def settle(params: QParams) -> QParams:
    """The scale that the op has when it is to have that of `params`: it computes it from a float32 range."""
    told = params.given or qad.range_to_write(params)
    found = qad.params_of(told, params.type, narrow=params.narrow, axis=params.axis)
    return replace(found, given=params.given)


def read(graph: Graph, op: Op, parameters: Parameters) -> QParams | Dynamic | None:
    """What an op of any version does; None where its range or its bits are computed while the model runs."""
    bits = _bits(graph, op, parameters)
    if bits is None or not 1 <= bits <= READABLE_BITS:
        return None
    integer = IntType(bits, signed=bool(op.attrs.get("signed_input", True)))
    narrow = bool(op.attrs.get("narrow_range", False)) and integer.signed
    axis = int(op.number("axis", qad.WHOLE))
    at = None if axis < 0 else axis
    if not op.attrs.get("range_given", op.type.endswith("V3")):
        return Dynamic(type=integer, narrow=narrow, axis=at)
    ends = _given(graph, op, parameters)
    if ends is None or (ends.low.ndim == 0) != (at is None):
        return None
    try:
        return qad.params_of(ends, integer, narrow=narrow, axis=at)
    except UsageError:  # there is no step in it
        return None


def _bits(graph: Graph, op: Op, parameters: Parameters) -> int | None:
    if not op.type.endswith("V3"):
        return int(op.number("num_bits", 8))
    slot = [*graph.slots(op.name), None, None, None, None][3]
    value = None if slot is None else parameters.value(slot)
    return int(value) if value is not None and value.shape == () and value.dtype.kind == "i" else None


def _given(graph: Graph, op: Op, parameters: Parameters) -> Range | None:
    """The constant range of the op; None where it is not constant or no range."""
    if op.type == "QuantizeAndDequantize":
        low, high = np.asarray(op.number("input_min", 0.0)), np.asarray(op.number("input_max", 0.0))
    else:
        values = [None if slot is None else parameters.value(slot) for slot in graph.slots(op.name)[1:3]]
        if len(values) != 2 or values[0] is None or values[1] is None:  # noqa: PLR2004  # min and max
            return None
        low, high = values[0], values[1]
    if low.dtype.name not in FLOATS or low.dtype != high.dtype or low.shape != high.shape or low.ndim > 1:
        return None
    proper = np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()
    return Range(low, high) if proper else None


def rounding(op: Op) -> Round:
    """Half to even, unless the op says otherwise."""
    return "half-up" if op.attrs.get("round_mode") == "HALF_UP" else "half-even"


def _family(version: int, arguments: frozenset[str] = frozenset()) -> Family:
    types = {f"QuantizeAndDequantizeV{version}"} | ({"QuantizeAndDequantize"} if version == 2 else set())  # noqa: PLR2004  # which replaced the first
    return Family(
        name=f"quantize-and-dequantize-v{version}",
        format="tensorflow",
        lower=partial(lower, version=version),
        why_not=partial(why_not, version=version),
        opset=opset,
        settle=settle,
        types=frozenset(types),
        folds=False,
        zero_points=False,
        arguments=arguments,
        read=read,
        rounding=rounding,
    )


V2, V3 = _family(2), _family(3)
V4 = _family(4, frozenset({"input_min", "input_max"}))
