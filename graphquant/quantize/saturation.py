"""Ranges of activations outside of which the ops that read them return a constant.

A hard swish returns 0 below -3, and a SiLU nearly 0 below -6. Values beyond need no integers of their own: all of them
may be clipped to the end of the range. The steps between become smaller by the same share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from graphquant.ir import QUANTIZATION_KINDS, RESHAPING_KINDS, TRANSPARENT_KINDS, Model, Op, Parameters, TensorRef, Use
from graphquant.numerics import Array, Range
from graphquant.quantize.ties import RELU_LIMITS, clip_limits

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

GRID_POINTS = 1025  # values at which the ops are evaluated
MAX_OPS = 32  # ops below a tensor that are evaluated
QUICK_GELU_STEEPNESS = 1.702  # of the sigmoid in com.microsoft's QuickGelu, if the op states none
FLAT_SLOPE = 0.25  # largest slope of a constant end, as a share of the mean slope


def erf(x: Array) -> Array:
    """Return the error function of each value."""
    return np.array([math.erf(value) for value in x])


def gelu(x: Array) -> Array:
    """Return the Gaussian error linear unit of each value."""
    return np.asarray(x * (1 + erf(x / math.sqrt(2))) / 2)


def silu(x: Array, steepness: float) -> Array:
    """Return x * sigmoid(steepness * x) of each value."""
    return np.asarray(x / (1 + np.exp(-steepness * x)))


def hard_swish(x: Array) -> Array:
    """Return x * min(max(x + 3, 0), 6) / 6 of each value."""
    return np.asarray(x * np.clip(x / 6 + 0.5, 0, 1))


def gelu_by_tanh(x: Array) -> Array:
    """Return the approximation of `gelu` by a tanh."""
    return np.asarray(x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2)


_UNARY: Mapping[str, Callable[[Array], Array]] = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "hard_swish": hard_swish,
    "erf": erf,
    "softplus": lambda x: np.logaddexp(x, 0),
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "neg": np.negative,
    "abs": np.abs,
    **dict.fromkeys(TRANSPARENT_KINDS, lambda x: x),
}
_BINARY: Mapping[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    "max": np.maximum,
    "min": np.minimum,
}
"""Ops that are evaluated, by kind. The tensors that other ops read must not change."""


_WITH_ATTRIBUTES: Mapping[str, Callable[[Op, Array], Array]] = {
    "hard_sigmoid": lambda op, x: np.clip(op.numeric_attr("alpha", 0.2) * x + op.numeric_attr("beta", 0.5), 0, 1),
    "silu": lambda op, x: silu(x, op.numeric_attr("alpha", QUICK_GELU_STEEPNESS if op.type == "QuickGelu" else 1.0)),
    "gelu": lambda op, x: (gelu_by_tanh if op.text_attr("approximate", "none") == "tanh" else gelu)(x),
}
"""Ops whose result depends on attributes."""

EVALUATED_KINDS = frozenset({*_UNARY, *_BINARY, *_WITH_ATTRIBUTES, *RELU_LIMITS, "clip"})


def limit_to_responsive(
    model: Model, parameters: Parameters, tensor: TensorRef, uses: Collection[Use], observed: Range, levels: int
) -> Range:
    """Return the part of the `observed` range of `tensor` outside of which its readers return a constant.

    A result counts as constant if it changes by at most half of one of `levels` steps of its own range.
    """
    low, high = float(observed.low), float(observed.high)
    if not low < high or any(model.graphs[use.graph].op(use.op).kind not in EVALUATED_KINDS for use in uses):
        return observed
    grid = np.linspace(low, high, GRID_POINTS)
    with np.errstate(all="ignore"):
        results = _evaluate_readers(model, parameters, tensor, uses, grid)
    first, last = 0, GRID_POINTS - 1
    bounds = [_responsive_indices(values, levels) for values in results]
    if bounds:
        first, last = min(bound[0] for bound in bounds), max(bound[1] for bound in bounds)
    if first >= last or (first, last) == (0, GRID_POINTS - 1):
        return observed
    return Range(np.asarray(grid[first]), np.asarray(grid[last]))


_INCREASING_KINDS = frozenset(
    {*RELU_LIMITS, *RESHAPING_KINDS, *TRANSPARENT_KINDS, "flatten", "clip", "leaky_relu", "sigmoid", "tanh", "elu"}
    | {"silu", "gelu", "hard_swish", "hard_sigmoid", "softplus", "max_pool"}
)
"""Kinds whose largest output follows from their largest input. Those with a minimum are included."""


def is_read_by_maximum(model: Model, uses: Collection[Use]) -> bool:
    """Return True if readers take only the maximum over an axis of a tensor, also behind activations and max pools."""
    pending, is_read = [*uses], False
    for use in islice(pending, MAX_OPS):
        graph = model.graphs[use.graph]
        op = graph.op(use.op)
        if op.kind == "reduce_max" or op.type == "GlobalMaxPool":
            is_read = True
        elif op.kind in _INCREASING_KINDS:
            pending += graph.consumers(TensorRef(graph.name, use.op))
        else:
            return False
    return is_read and len(pending) <= MAX_OPS


_END_KINDS = RESHAPING_KINDS | TRANSPARENT_KINDS | QUANTIZATION_KINDS | {"flatten"}


def is_read_by_last_softmax(model: Model, uses: Collection[Use]) -> bool:
    """Return True if only a softmax reads a tensor, and its probabilities are outputs that no op computes with."""
    pending, is_probability = [(use, False) for use in uses], False
    for use, behind_softmax in islice(pending, MAX_OPS):
        graph = model.graphs[use.graph]
        op = graph.op(use.op)
        is_softmax = op.kind in {"softmax", "log_softmax"}
        is_end = op.kind == "output" and behind_softmax and graph is model.main  # ops may read the output of a body
        if (is_softmax and behind_softmax) or not (is_softmax or op.kind in _END_KINDS or is_end):
            return False
        is_probability |= is_softmax
        pending += [(later, behind_softmax or is_softmax) for later in graph.consumers(TensorRef(graph.name, use.op))]
    return is_probability and len(pending) <= MAX_OPS


def _responsive_indices(values: Array, levels: int) -> tuple[int, int]:
    """Return the last index up to which `values` are constant, and the first one from which they are."""
    if not np.isfinite(values).all():
        return 0, len(values) - 1
    spread = np.ptp(values)

    def last_constant(row: Array) -> int:
        # The slope tells the flat end of a SiLU from the last half step of a straight line.
        steepest = np.maximum.accumulate(np.abs(np.diff(row, prepend=row[0])))
        deviation = np.maximum(np.maximum.accumulate(row) - row, row - np.minimum.accumulate(row))
        is_flat = steepest <= FLAT_SLOPE * spread / len(row)
        return int(np.flatnonzero(is_flat & (deviation <= spread / (2 * levels)))[-1])

    return last_constant(values), len(values) - 1 - last_constant(values[::-1])


def _evaluate_readers(
    model: Model, parameters: Parameters, tensor: TensorRef, uses: Iterable[Use], grid: Array
) -> list[Array]:
    """Return the values that leave the element-wise ops below `tensor` if it holds `grid`; [] if `grid` itself does."""
    values, pending, unknown = {tensor: grid}, list(uses), dict[Use, TensorRef]()
    for use in pending:
        source = model.graphs[use.graph].slots(use.op)[use.slot]
        result = TensorRef(use.graph, use.op)
        if source is None or result in values:
            continue
        output = None
        if use.graph == tensor.graph and len(values) < MAX_OPS:
            output = evaluate_op(model, parameters, model.graphs[use.graph].op(use.op), result, values)
        if output is None:
            unknown[use] = source  # another operand may be evaluated later
            continue
        values[result] = output
        pending += [later for later in unknown if TensorRef(later.graph, later.op) not in values]
        pending += model.graphs[use.graph].consumers_by_port(use.op).get(0, [])
    ends = {source for use, source in unknown.items() if TensorRef(use.graph, use.op) not in values}
    return [] if tensor in ends else [values[end] for end in values if end in ends]


def evaluate_op(
    model: Model, parameters: Parameters, op: Op, result: TensorRef, values: Mapping[TensorRef, Array]
) -> Array | None:
    """Return the output of an op, None if it is not element-wise or an operand is unknown."""
    slots = model.graphs[result.graph].slots(op.name)
    operands = [_operand(parameters, slot, values) for slot in slots[: 2 if op.kind in _BINARY else 1]]
    if not operands or any(operand is None for operand in operands):
        return None
    first, *others = (operand for operand in operands if operand is not None)
    if (limits := clip_limits(model, parameters, result)) is not None:
        return np.clip(first, *limits)
    if op.kind in _WITH_ATTRIBUTES:
        return _WITH_ATTRIBUTES[op.kind](op, first)
    if op.kind in _UNARY:
        return _UNARY[op.kind](first)
    return _BINARY[op.kind](first, others[0]) if op.kind in _BINARY and len(slots) == 2 else None  # noqa: PLR2004


def _operand(parameters: Parameters, slot: TensorRef | None, values: Mapping[TensorRef, Array]) -> Array | None:
    """Return the values of an evaluated tensor or of a constant with one element."""
    if slot is None or slot in values:
        return None if slot is None else values[slot]
    number = parameters.number(slot)
    return None if number is None else np.asarray(number)
