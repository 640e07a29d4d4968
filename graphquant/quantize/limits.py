"""Hardware limits on scales.

A `BiasFitLimit` says that a bias must fit int32 in units of input scale times weight scale. A `ShiftLimit` is for
hardware that computes with powers of two: the sum of positions (-log2 of scales) of some tensors, minus that of others,
must not exceed a number.

The output of an 8-bit Softmax also has a smallest scale, below which ONNX Runtime's kernel overflows.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphquant.ir import BIAS_ADD_KINDS, WEIGHTED_KINDS, Graph, TensorRef, Use
from graphquant.numerics import LARGEST_VALUE, SMALLEST_SCALE, Array, IntType, QParams
from graphquant.quantize.solver_state import Conflict, SolverState, format_values

if TYPE_CHECKING:
    from graphquant.quantize.plan import Site

DPU_CUT_LIMITS = (0, 16)  # limits of weight plus input minus output positions on AMD's DPU
DPU_MAX_BIAS_CUT = 15  # largest weight plus input minus bias position
DPU_ADD_READ_LIMITS, DPU_ADD_WRITE_LIMITS = (0, 7), (-7, 25)
"""Limits of the largest minus the smallest input of a sum, and of the smallest input minus the output."""

DPU_MUL_WRITE_LIMITS = (0, 32)  # limits of the sum of a product's inputs minus its output
MAX_ADDENDS = 8
"""Inputs of a sum that are compared pairwise. Models have two, and the number of pairs grows quadratically."""

INT32_MAX = (1 << 31) - 1
SOFTMAX_STEPS = 148
"""Largest inverse of the scale of an 8-bit Softmax, for each of the values that it normalizes together.

Up to ONNX Runtime 1.31, QLinearSoftmax multiplies exponentials of up to the largest float32 / (exp(5) * values) by the
inverse of the scale. Products that overflow become 0."""

FUSED_KINDS = frozenset({"bias_add", "relu", "relu6", "leaky_relu", "prelu"})
"""Kinds that are fused with the op before them."""

SOFTMAX_BITS, SOFTMAX_AXIS_OPSET = 8, 13  # bits of the integer kernel; opset from which the axis is a single one
MAX_FUSED_OPS = 4  # ops that are followed from an op to its quantized output
INT32_BIAS_FAMILIES = frozenset({"onnx-qdq", "fake-quant"})
"""Families whose consumers convert a float bias to int32 themselves: onnxruntime's optimizer and TFLite's converter."""


class BiasFitLimit(NamedTuple):
    """The bias of an op must fit int32."""

    bias: TensorRef  # the bias
    data: Use  # the use that reads the op's input
    weight: Use  # the use that reads its weight
    rule: str  # the rule that quantizes the bias, "" if no rule does and the backend will
    max_integer: int  # largest integer of the bias type


class ShiftLimit(NamedTuple):
    """The sum or the smallest of the positions at `positive_uses`, minus those at `negative_uses`, has a maximum."""

    name: str  # the hardware's shift, for people
    op: str  # the op
    positive_uses: tuple[Use, ...]  # uses whose scales may be raised, in order of preference
    negative_uses: tuple[Use, ...]  # uses that count negatively
    max_shift: int  # the maximum
    smallest: bool  # True if only the smallest position at `positive_uses` counts


def find_hardware_limits(state: SolverState) -> list[BiasFitLimit | ShiftLimit]:
    """Return the hardware limits on the scales, in the order of the sites."""
    limits: list[BiasFitLimit | ShiftLimit] = []
    quantized_sites = [site for index, site in enumerate(state.sites) if index in state.params]
    outputs = {site.tensor: site.uses[0] for site in reversed(quantized_sites)}
    for graph, op in dict.fromkeys((use.graph, use.op) for site in quantized_sites for use in site.uses):
        limits += _op_limits(state, graph, op, outputs)
    return limits


def _op_limits(
    state: SolverState, graph_name: str, op_name: str, outputs: dict[TensorRef, Use]
) -> Iterator[BiasFitLimit | ShiftLimit]:
    """Yield the limits of one op."""
    graph = state.model.graphs[graph_name]
    op = graph.op(op_name)
    uses = [Use(graph_name, op_name, slot) for slot in range(len(graph.slots(op_name)))]
    quantized_uses = [
        use
        for role in ("input", "weight")
        for use in uses
        if op.role(use.slot) == role and state.params_at(use) is not None
    ]
    own_bias = next((use for use in uses if op.role(use.slot) == "bias" and graph.source_of(use) is not None), None)
    bias = None
    if op.kind in WEIGHTED_KINDS and len(quantized_uses) == 2:  # noqa: PLR2004  # an input and a weight
        bias = own_bias or _following_bias_use(graph, op_name)
        if bias is not None and not _scheme_shifts(state, quantized_uses[1]):
            yield from _bias_fit_limits(state, bias, quantized_uses[0], quantized_uses[1])
    if op.kind not in WEIGHTED_KINDS | {"add", "mul"}:
        return
    if not all(_scheme_shifts(state, use) for use in quantized_uses):
        return
    output = _quantized_output_use(graph, TensorRef(graph_name, op_name), outputs)
    if output is not None and _scheme_shifts(state, output):
        bias = bias if bias is not None and _scheme_shifts(state, bias) else None
        for name, positive, negative, max_shift in _dpu_shift_limits(op.kind, quantized_uses, bias, output):
            yield ShiftLimit(name, op_name, positive, negative, max_shift, smallest=op.kind == "add")


def _scheme_shifts(state: SolverState, use: Use) -> bool:
    """Return True if the scheme at a use is for hardware that shifts."""
    return state.params_at(use) is not None and state.site_at(use).scheme.shifts is not None


def _bias_fit_limits(state: SolverState, bias: Use, data: Use, weight: Use) -> Iterator[BiasFitLimit]:
    tensor = state.model.graphs[bias.graph].source_of(bias)
    if tensor is None or not state.parameters.is_parameter(tensor):
        return
    if bias in state.index_by_use:
        site = state.site_at(bias)
        if site.scheme.observe.name == "bias":
            max_integer = int(site.scheme.type.limits()[1])
            yield BiasFitLimit(bias=tensor, data=data, weight=weight, rule=site.rule, max_integer=max_integer)
    elif state.site_at(weight).family.name in INT32_BIAS_FAMILIES:
        shape = state.model.output(tensor).shape
        # All elements of a bias lie along one axis.
        if shape is not None and sum(size != 1 for size in shape) <= 1:
            yield BiasFitLimit(bias=tensor, data=data, weight=weight, rule="", max_integer=INT32_MAX)


def _following_bias_use(graph: Graph, op_name: str) -> Use | None:
    """Return the use that reads the bias in the only op after a product, which adds it; None for another op."""
    readers = graph.consumers(TensorRef(graph.name, op_name))
    if len(readers) != 1 or readers[0].graph != graph.name:
        return None
    (reader,) = readers
    is_sum = graph.op(reader.op).kind in BIAS_ADD_KINDS and len(graph.slots(reader.op)) == 2  # noqa: PLR2004  # product and bias
    return Use(graph.name, reader.op, 1 - reader.slot) if is_sum else None


def _quantized_output_use(graph: Graph, tensor: TensorRef, outputs: dict[TensorRef, Use]) -> Use | None:
    """Return the use that reads an op's quantized output, past ops that are fused with it."""
    for _ in range(MAX_FUSED_OPS):
        if tensor in outputs:
            return outputs[tensor]
        readers = graph.consumers(tensor)
        if len(readers) != 1 or readers[0].graph != tensor.graph or graph.op(readers[0].op).kind not in FUSED_KINDS:
            return None
        tensor = TensorRef(tensor.graph, readers[0].op)
    return None


def _dpu_shift_limits(
    kind: str, input_uses: list[Use], bias: Use | None, output: Use
) -> Iterator[tuple[str, tuple[Use, ...], tuple[Use, ...], int]]:
    """Yield name, positive uses, negative uses and largest shift of AMD's DPU; see the DPU constants above."""
    if kind == "add":
        for first in input_uses[:MAX_ADDENDS]:
            for second in input_uses[:MAX_ADDENDS]:
                if first is not second:
                    yield "shift between inputs", (first,), (second,), DPU_ADD_READ_LIMITS[1]
            yield "shift of an input to the output", (output,), (first,), -DPU_ADD_WRITE_LIMITS[0]
        yield "shift of the inputs to the output", tuple(input_uses[:MAX_ADDENDS]), (output,), DPU_ADD_WRITE_LIMITS[1]
    elif kind == "mul":
        yield "shift of the product", (output,), tuple(input_uses), -DPU_MUL_WRITE_LIMITS[0]
        yield "shift of the product", tuple(input_uses), (output,), DPU_MUL_WRITE_LIMITS[1]
    elif len(input_uses) == 2:  # noqa: PLR2004  # an input and a weight
        data, weight = input_uses
        yield "shift of weight plus input minus output", (output,), (weight, data), -DPU_CUT_LIMITS[0]
        yield "shift of weight plus input minus output", (weight, data), (output,), DPU_CUT_LIMITS[1]
        if bias is not None:
            yield "shift of weight plus input minus bias", (weight, data), (bias,), DPU_MAX_BIAS_CUT


# Meet limits by raising scales, never by lowering them: a worklist of limits that may be violated.
#
# A limit is met by raising scales of its own tensors: the weight of a `BiasFitLimit`, or the positive uses of a
# `ShiftLimit`. Nothing is clipped that was not clipped before; only resolution at the fine end is lost.
#
# Termination: a scale, once chosen, only grows. A `ShiftLimit` at least doubles the scale that it raises. It may double
# an activation's scale at most `bits - 1` times in all, as no integers remain beyond that, and a weight's scale at most
# MAX_WEIGHT_DOUBLINGS times: a weight that far below the other summand may as well be 0. A met `BiasFitLimit` stays
# met, since the scales whose product it bounds from below only grow. So each raise decreases the sum, over all uses, of
# the remaining doublings, plus the number of violated `BiasFitLimit`s. A copy for one use of a shared weight does not
# change that sum, and there are at most as many copies as uses. A tensor of zeros, such as many biases, accepts any
# scale, so its scale may also be lowered, at most once for each `ShiftLimit`, because the positions that it is compared
# with only decrease.
#
# A limit is examined once at the start, and again only when a raised scale can violate it. The work is at most
# MAX_WEIGHT_DOUBLINGS times the number of uses, linear in ops and edges. If nothing has to be raised, each limit is
# examined once.
#
# A `ShiftLimit` that its tensors cannot meet within their doublings is given up and reported as a conflict. A second
# run without it undoes the raises that it caused; limits that fail in the second run are reported and left violated.

INT32_MARGIN = 1e-6
"""Share of int32 that stays free, so that float32 rounding of scales and quotients cannot exceed the type."""

MAX_WEIGHT_DOUBLINGS = 31  # limit on the doublings of a weight's scale
MAX_FLOAT32_EXPONENT = 127  # largest exponent of a float32 power of two


def meet_limits(state: SolverState) -> None:
    """Raise scales until the limits hold. Report the limits that cannot hold; their tensors keep their scales."""
    for index, site in enumerate(state.sites):
        smallest = _smallest_softmax_scale(state, site) if index in state.params and state.is_movable(index) else 0.0
        if smallest and (state.params[index].scale < smallest).any():
            why = "its scale was raised: with a smaller one the int8 Softmax of onnxruntime overflows"
            state.raise_scale(index, np.full_like(state.params[index].scale, smallest), why)
    limits, given_up = find_hardware_limits(state), set[int]()
    snapshot = state.snapshot()
    Worklist(state, limits, given_up).run()
    if any(isinstance(limits[position], ShiftLimit) for position in given_up):
        state.restore(snapshot)
        Worklist(state, limits, given_up).run()
    for position in sorted(given_up):
        limit = limits[position]
        if isinstance(limit, BiasFitLimit):
            _report_bias_fit(state, limit)
        elif _shift_excess(state, limit) > 0:  # else only raises that were undone violated it
            _report_shift(state, limit)


def _smallest_softmax_scale(state: SolverState, site: Site) -> float:
    """Return the smallest scale of a site that the int8 Softmax of ONNX Runtime supports; 0.0 for other ops."""
    op = state.model.op(site.tensor)
    shape, dtype = op.outputs[0].shape, site.scheme.type
    is_byte = isinstance(dtype, IntType) and dtype.bits == SOFTMAX_BITS
    if op.kind != "softmax" or state.model.format != "onnx" or shape is None or not is_byte:
        return 0.0
    flattens = state.model.opset < SOFTMAX_AXIS_OPSET  # then it normalizes over all axes from `axis` on
    axis = int(op.numeric_attr("axis", 1 if flattens else -1))
    sizes = shape[axis:] if flattens else shape[axis : axis + 1 or None]
    steps = 0 if None in sizes else SOFTMAX_STEPS * math.prod(size or 1 for size in sizes)
    if not steps:
        return 0.0
    return 2.0 ** -math.floor(math.log2(steps)) if site.scheme.scale == "power-of-two" else 1 / steps


class Worklist:
    """Raises scales until all limits hold or are given up."""

    def __init__(self, state: SolverState, limits: list[BiasFitLimit | ShiftLimit], given_up: set[int]) -> None:
        """Skip the limits at the indices in `given_up`, and add the limits that this run gives up."""
        self.state, self.limits, self.given_up = state, limits, given_up
        self.doublings: dict[int, int] = {}
        self.limits_by_use: dict[Use, list[int]] = {}
        for position, limit in enumerate(limits):
            # Other raises relax a limit. A larger input scale can make the weight scale of a bias representable.
            for use in (limit.data,) if isinstance(limit, BiasFitLimit) else limit.negative_uses:
                self.limits_by_use.setdefault(use, []).append(position)
        self.queue = deque(position for position in range(len(limits)) if position not in given_up)
        self.waiting = set(self.queue)

    def run(self) -> None:
        """Examine each limit once, and again after each raise that can violate it."""
        while self.queue:
            position = self.queue.popleft()
            self.waiting.discard(position)
            limit = self.limits[position]
            if not (self._meet_bias_fit(limit) if isinstance(limit, BiasFitLimit) else self._meet_shift(limit)):
                self.given_up.add(position)

    def _meet_bias_fit(self, fit: BiasFitLimit) -> bool:
        """Raise the scale of the weight if necessary; return False if the limit cannot hold."""
        if (needed := _min_weight_scale(self.state, fit)) is None:
            return True
        index = self.state.index_by_use[fit.weight]
        if not self.state.is_movable(index):
            return False
        factor_text = _format_factor(needed, self.state.params[index].scale)
        why = f"its scale was raised {factor_text} so that bias {fit.bias} fits int32"
        self._raise_scale(index, fit.weight, needed, why)
        return True

    def _meet_shift(self, shift: ShiftLimit) -> bool:
        """Double scales as far as necessary; return False if the limit cannot hold."""
        excess = initial_excess = _shift_excess(self.state, shift)
        if excess <= 0 or self._shrink_zeros(shift, excess):
            return True
        if shift.smallest:
            lowest = min(shift.positive_uses, key=lambda use: power_of_two_position(self.state.params_at(use)) or 0)
            shift = shift._replace(positive_uses=(lowest,))
        counts = Counter(map(self._group_leader, shift.positive_uses))
        counts.subtract(map(self._group_leader, shift.negative_uses))
        for use in shift.positive_uses:
            index, times = self.state.index_by_use[use], counts[self._group_leader(use)]
            if times <= 0 or not self.state.is_movable(index):
                continue
            steps = min(-(-excess // times), self._remaining_doublings(index))
            if steps > 0:
                why = (
                    f"its scale was multiplied by {2**steps}: the {shift.name} of {shift.op} exceeded its limit by"
                    f" {initial_excess}"
                )
                doublings = self.doublings.get(self._group_leader(use), 0)
                self._raise_scale(index, use, np.ldexp(self.state.params[index].scale, steps), why)
                self.doublings[self._group_leader(use)] = doublings + steps
                excess -= steps * times
        return excess <= 0

    def _group_leader(self, use: Use) -> int:
        """Return the first of the sites that share the scale at a use."""
        return self.state.scale_group(self.state.index_by_use[use])[0]

    def _shrink_zeros(self, shift: ShiftLimit, excess: int) -> bool:
        """Lower the scale of a tensor of zeros, which any scale represents, if it shares its scale with no other."""
        for use in shift.negative_uses:
            index = self.state.index_by_use[use]
            own_range, params, site = self.state.ranges.get(index), self.state.params[index], self.state.sites[index]
            smaller = np.ldexp(params.scale, -excess)
            if own_range is None or own_range.low or own_range.high or smaller < SMALLEST_SCALE:
                continue
            if site.scheme.observe.name == "fixed" or len(self.state.scale_group(index)) > 1:
                continue
            if len(site.uses) > 1:
                if not self.state.is_divisible(index):
                    continue
                index = self.state.split_use(index, use)
            self.state.params[index] = replace(params, scale=smaller, op_range=None)
            return True
        return False

    def _remaining_doublings(self, index: int) -> int:
        """Return how often the scale may still double before integers of the type exceed float32."""
        params, used_doublings = self.state.params[index], self.doublings.get(self.state.scale_group(index)[0], 0)
        max_doublings = MAX_WEIGHT_DOUBLINGS if self.state.is_weight_group(index) else params.type.bits - 1
        max_by_exponent = MAX_FLOAT32_EXPONENT - params.type.bits + (power_of_two_position(params) or 0)
        return max(min(max_doublings - used_doublings, max_by_exponent), 0)

    def _raise_scale(self, index: int, use: Use, scale: Array, why: str) -> None:
        """Raise the scale at `use`, on a copy if others read the tensor too."""
        if len(self.state.sites[index].uses) > 1 and self.state.is_divisible(index):
            index = self.state.split_use(index, use)
            why = f"it is a copy for {use}: {why}"
        self.state.raise_scale(index, scale, why)
        for member in self.state.scale_group(index):
            for member_use in self.state.sites[member].uses:
                for position in self.limits_by_use.get(member_use, ()):
                    if position not in self.waiting and position not in self.given_up:
                        self.waiting.add(position)
                        self.queue.append(position)


def _shift_excess(state: SolverState, shift: ShiftLimit) -> int:
    """Return the excess over a `ShiftLimit`, 0 if a position is unknown."""
    positive, negative = (
        [position for use in uses if (position := power_of_two_position(state.params_at(use))) is not None]
        for uses in (shift.positive_uses, shift.negative_uses)
    )
    if len(positive) + len(negative) < len(shift.positive_uses) + len(shift.negative_uses):
        return 0
    return (min(positive) if shift.smallest else sum(positive)) - sum(negative) - shift.max_shift


def _report_shift(state: SolverState, shift: ShiftLimit) -> None:
    site, negative_site = state.site_at(shift.positive_uses[0]), state.site_at(shift.negative_uses[0])
    conflict = Conflict(
        rules=(site.rule, negative_site.rule),
        tensors=(site.tensor, negative_site.tensor),
        wants=(
            f"a scale with integers of {site.scheme.type.name} to spare",
            "a scale within the range of the hardware's shift",
        ),
        resolution=f"the {shift.name} of {shift.op} exceeds its limit by {_shift_excess(state, shift)}",
    )
    state.record_conflict(conflict, state.index_by_use[shift.positive_uses[0]])


def _report_bias_fit(state: SolverState, fit: BiasFitLimit) -> None:
    """Record the conflict or note for a weight whose scale the solver may not raise."""
    needed, index = _min_weight_scale(state, fit), state.index_by_use[fit.weight]
    if needed is None:
        return
    site = state.sites[index]
    if not fit.rule:
        note = (
            f"its scale is fixed, but bias {fit.bias} does not fit int32; backends that convert the bias will clip it"
        )
        state.add_note(index, note)
        state.record_change(index, note)
        return
    factor_text = _format_factor(needed, state.params[index].scale)
    conflict = Conflict(
        rules=(site.rule, fit.rule),
        tensors=(site.tensor, fit.bias),
        wants=("its fixed scale", f"a scale {factor_text} larger, so that it fits int32"),
        resolution="the bias stays float, and backends that convert it to int32 will clip it",
    )
    state.record_conflict(conflict, index)


def power_of_two_position(params: QParams | None) -> int | None:
    """Return -log2 of a scale, None if it is no single power of two."""
    if params is None or params.scale.size != 1:
        return None
    mantissa, exponent = np.frexp(params.scale.item())
    return int(1 - exponent) if mantissa == 0.5 else None  # noqa: PLR2004  # frexp's own lower end


def _format_factor(larger_scale: Array, scale: Array) -> str:
    """Format the factor between two scales, and the number of channels it concerns."""
    factors = larger_scale.astype(np.float64) / scale
    channels_text = f" in {int((factors > 1).sum())} of {factors.size} channels" if factors.ndim else ""
    return f"{format_values(factors[factors > 1])} times{channels_text}"


def _min_weight_scale(state: SolverState, fit: BiasFitLimit) -> Array | None:
    """Return the smallest weight scales with which a bias fits, None if it fits already or that is unknown.

    Input scale times weight scale must be a normal float32 too. A raised scale leaves twice the necessary margin, so
    that the family's own rounding of scales cannot violate the limit.
    """
    data, weight, value = state.params_at(fit.data), state.params_at(fit.weight), state.bias_value(fit.bias)
    if data is None or weight is None or value is None or data.scale.ndim or weight.block is not None:
        return None
    if not value.size or not np.isfinite(value).all() or (weight.scale.ndim and value.size != weight.scale.size):
        return None
    magnitudes, unit = np.abs(value.astype(np.float64)).ravel(), float(data.scale)
    bias = magnitudes if weight.scale.ndim else magnitudes.max()
    bias_steps = unit * weight.scale.astype(np.float64)
    fits = (bias <= bias_steps * fit.max_integer * (1 - INT32_MARGIN)) & (bias_steps >= SMALLEST_SCALE)
    min_scale = np.maximum(
        bias / (unit * fit.max_integer * (1 - 2 * INT32_MARGIN)), SMALLEST_SCALE * (1 + INT32_MARGIN) / unit
    )
    if fits.all() or (min_scale > LARGEST_VALUE / 2**weight.type.bits).any():
        return None
    raised = np.where(fits, weight.scale, np.maximum(min_scale.astype(np.float32), weight.scale))
    if state.site_at(fit.weight).scheme.scale == "power-of-two":
        mantissa, exponent = np.frexp(raised)  # round up to a power of two
        raised = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))  # noqa: PLR2004  # frexp's own lower end
        raised = np.maximum(raised, weight.scale)
    return np.asarray(raised)
