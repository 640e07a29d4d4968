"""Hardware limits on scales.

A `BiasFitLimit` says that a bias must fit int32 in units of input scale times weight scale. A `ShiftLimit` is for
hardware that computes with powers of two: the sum of positions (-log2 of scales) of some tensors, minus that of others,
must not exceed a number.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphquant.ir import WEIGHTED_KINDS, TensorRef, Use
from graphquant.numerics import LARGEST_VALUE, SMALLEST_SCALE
from graphquant.quantize.solver_state import Conflict, format_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.ir import Shape
    from graphquant.numerics import Array, QParams
    from graphquant.quantize.solver_state import SolverState


DPU_CUT_LIMITS = (0, 16)
"""Limits of weight plus input minus output positions on AMD's DPU."""

DPU_MAX_BIAS_CUT = 15
"""Largest weight plus input minus bias position."""

DPU_ADD_READ_LIMITS, DPU_ADD_WRITE_LIMITS = (0, 7), (-7, 25)
"""Limits of the largest minus the smallest input of a sum, and of the smallest input minus the output."""

DPU_MUL_WRITE_LIMITS = (0, 32)
"""Limits of the sum of a product's inputs minus its output."""

MAX_ADDENDS = 8
"""Inputs of a sum that are compared pairwise. Models have two, and the number of pairs grows quadratically."""

INT32_MAX = (1 << 31) - 1
"""Largest int32."""

FUSED_KINDS = frozenset({"bias_add", "relu", "relu6", "leaky_relu", "prelu"})
"""Kinds that are fused with the op before them."""

MAX_FUSED_OPS = 4
"""Ops that are followed from an op to its quantized output."""

INT32_BIAS_FAMILIES = frozenset({"onnx-qdq", "fake-quant"})
"""Families whose consumers convert a float bias to int32 themselves: onnxruntime's optimizer and TFLite's converter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasFitLimit:
    """The bias of an op must fit int32.

    Attributes:
        bias: The bias.
        data: The use that reads the op's input.
        weight: The use that reads its weight.
        rule: The rule that quantizes the bias, "" if no rule does and the backend will.
        max_integer: Largest integer of the bias type.
    """

    bias: TensorRef
    data: Use
    weight: Use
    rule: str
    max_integer: int

    @property
    def uses(self) -> tuple[Use, ...]:
        """The uses whose scales the limit constrains."""
        return self.data, self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftLimit:
    """The positions at `positive_uses`, minus those at `negative_uses`, sum to at most `max_shift`.

    Attributes:
        name: The hardware's shift, for people.
        op: The op.
        positive_uses: Uses whose scales may be raised, in order of preference.
        negative_uses: Uses that count negatively.
        max_shift: The largest sum.
    """

    name: str
    op: str
    positive_uses: tuple[Use, ...]
    negative_uses: tuple[Use, ...]
    max_shift: int

    @property
    def uses(self) -> tuple[Use, ...]:
        """The uses whose scales the limit constrains."""
        return *self.positive_uses, *self.negative_uses


def find_hardware_limits(state: SolverState) -> list[BiasFitLimit | ShiftLimit]:
    """Return the hardware limits on the scales, in the order of the sites."""
    limits: list[BiasFitLimit | ShiftLimit] = []
    visited: set[tuple[str, str]] = set()
    outputs: dict[TensorRef, Use] = {}
    for index, site in enumerate(state.sites):
        if index in state.params:
            outputs.setdefault(site.tensor, site.uses[0])
    for index, site in enumerate(state.sites):
        for use in site.uses if index in state.params else ():
            if (use.graph, use.op) not in visited:
                visited.add((use.graph, use.op))
                limits += _op_limits(state, use.graph, use.op, outputs)
    return limits


def _op_limits(
    state: SolverState, graph_name: str, op_name: str, outputs: dict[TensorRef, Use]
) -> Iterator[BiasFitLimit | ShiftLimit]:
    """Yield the limits of one op."""
    op = state.model.graphs[graph_name].op(op_name)
    roles: dict[str, list[Use]] = {}
    for slot in range(len(state.model.graphs[graph_name].slots(op_name))):
        roles.setdefault(op.role(slot), []).append(Use(graph_name, op_name, slot))
    quantized_uses = [
        use for role in ("input", "weight") for use in roles.get(role, ()) if state.params_at(use) is not None
    ]
    if op.kind in WEIGHTED_KINDS and len(quantized_uses) == 2:  # noqa: PLR2004  # an input and a weight
        bias = _find_bias_use(state, graph_name, op_name, roles)
        if bias is not None and not _scheme_shifts(state, quantized_uses[1]):
            yield from _bias_fit_limits(state, bias, quantized_uses[0], quantized_uses[1])
    if (
        op.kind in WEIGHTED_KINDS | {"add", "mul"}
        and quantized_uses
        and all(_scheme_shifts(state, use) for use in quantized_uses)
    ):
        output = _quantized_output_use(state, TensorRef(graph_name, op_name), outputs)
        if output is not None and _scheme_shifts(state, output):
            yield from _dpu_shift_limits(state, op.kind, op_name, quantized_uses, roles, output)


def _scheme_shifts(state: SolverState, use: Use) -> bool:
    """Return True if the scheme at a use is for hardware that shifts."""
    return state.params_at(use) is not None and state.sites[state.index_by_use[use]].scheme.shifts is not None


def _bias_fit_limits(state: SolverState, bias: Use, data: Use, weight: Use) -> Iterator[BiasFitLimit]:
    tensor = state.model.graphs[bias.graph].source_of(bias)
    site = state.sites[state.index_by_use[bias]] if bias in state.index_by_use else None
    family = state.sites[state.index_by_use[weight]].scheme.family
    has_bias_observer = site is not None and site.scheme.observe.name == "bias"
    if tensor is None or not state.parameters.is_parameter(tensor):
        return
    if has_bias_observer and site is not None:
        yield BiasFitLimit(
            bias=tensor, data=data, weight=weight, rule=site.rule, max_integer=int(site.scheme.type.limits()[1])
        )
    elif site is None and family in INT32_BIAS_FAMILIES and _has_one_long_axis(state.model.output(tensor).shape):
        yield BiasFitLimit(bias=tensor, data=data, weight=weight, rule="", max_integer=INT32_MAX)


def _has_one_long_axis(shape: Shape | None) -> bool:
    """Return True if all elements lie along one axis, like those of a bias."""
    return shape is not None and sum(size != 1 for size in shape) <= 1


def _find_bias_use(state: SolverState, graph_name: str, op_name: str, roles: dict[str, list[Use]]) -> Use | None:
    """Return the use that reads an op's bias: its own, or that of the only op after it, which adds the bias."""
    op_graph = state.model.graphs[graph_name]
    if "bias" in roles and op_graph.source_of(roles["bias"][0]) is not None:
        return roles["bias"][0]
    readers = op_graph.consumers(TensorRef(graph_name, op_name))
    if len(readers) != 1 or readers[0].graph != graph_name:
        return None
    next_op = op_graph.op(readers[0].op)
    other_slots = [slot for slot in range(len(op_graph.slots(next_op.name))) if slot != readers[0].slot]
    return (
        Use(graph_name, next_op.name, other_slots[0])
        if next_op.kind in {"bias_add", "add"} and len(other_slots) == 1
        else None
    )


def _quantized_output_use(state: SolverState, tensor: TensorRef, outputs: dict[TensorRef, Use]) -> Use | None:
    """Return the use that reads an op's quantized output, past ops that are fused with it."""
    graph = state.model.graphs[tensor.graph]
    for _ in range(MAX_FUSED_OPS):
        if tensor in outputs:
            return outputs[tensor]
        readers = graph.consumers(tensor)
        if len(readers) != 1 or readers[0].graph != tensor.graph or graph.op(readers[0].op).kind not in FUSED_KINDS:
            return None
        tensor = TensorRef(tensor.graph, readers[0].op)
    return None


def _dpu_shift_limits(
    state: SolverState, kind: str, op_name: str, input_uses: list[Use], roles: dict[str, list[Use]], output: Use
) -> Iterator[ShiftLimit]:
    """Yield the limits of AMD's DPU; see the DPU constants above."""

    def at_most(
        name: str, positive_uses: tuple[Use, ...], negative_uses: tuple[Use, ...], max_shift: int
    ) -> ShiftLimit:
        return ShiftLimit(
            name=name, op=op_name, positive_uses=positive_uses, negative_uses=negative_uses, max_shift=max_shift
        )

    if kind == "add":
        for first in input_uses[:MAX_ADDENDS]:
            for second in input_uses[:MAX_ADDENDS]:
                if first is not second:
                    yield at_most("shift between inputs", (first,), (second,), DPU_ADD_READ_LIMITS[1])
            yield at_most("shift of an input to the output", (output,), (first,), -DPU_ADD_WRITE_LIMITS[0])
            yield at_most("shift of an input to the output", (first,), (output,), DPU_ADD_WRITE_LIMITS[1])
    elif kind == "mul":
        yield at_most("shift of the product", (output,), tuple(input_uses), -DPU_MUL_WRITE_LIMITS[0])
        yield at_most("shift of the product", tuple(input_uses), (output,), DPU_MUL_WRITE_LIMITS[1])
    elif len(input_uses) == 2:  # noqa: PLR2004  # an input and a weight
        data, weight = input_uses
        bias = _find_bias_use(state, data.graph, op_name, roles)
        yield at_most("shift of weight plus input minus output", (output,), (weight, data), -DPU_CUT_LIMITS[0])
        yield at_most("shift of weight plus input minus output", (weight, data), (output,), DPU_CUT_LIMITS[1])
        if bias is not None and _scheme_shifts(state, bias):
            yield at_most("shift of weight plus input minus bias", (weight, data), (bias,), DPU_MAX_BIAS_CUT)


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
# A limit is examined once at the start, and again only when one of its own scales was raised. The work is at most
# MAX_WEIGHT_DOUBLINGS times the number of uses, linear in ops and edges. If nothing has to be raised, each limit is
# examined once.
#
# A `ShiftLimit` that its tensors cannot meet within their doublings is given up and reported as a conflict. A second
# run without it undoes the raises that it caused; limits that fail in the second run are reported and left violated.

INT32_MARGIN = 1e-6
"""Share of int32 that stays free, so that float32 rounding of scales and quotients cannot exceed the type."""

MAX_WEIGHT_DOUBLINGS = 31
"""Limit on the doublings of a weight's scale."""

MAX_FLOAT32_EXPONENT = 127
"""Largest exponent of a float32 power of two."""


def meet_limits(state: SolverState) -> None:
    """Raise scales until the limits hold. Report the limits that cannot hold; their tensors keep their scales."""
    limits, given_up = find_hardware_limits(state), set[int]()
    if not limits:
        return
    snapshot = state.snapshot()
    Worklist(state, limits, given_up).run()
    if any(isinstance(limits[position], ShiftLimit) for position in given_up):
        state.restore(snapshot)
        Worklist(state, limits, given_up).run()
    for position in sorted(given_up):
        limit = limits[position]
        problem = _bias_fit_problem(state, limit) if isinstance(limit, BiasFitLimit) else _shift_conflict(state, limit)
        index = state.index_by_use[limit.weight if isinstance(limit, BiasFitLimit) else limit.positive_uses[0]]
        if isinstance(problem, Conflict):
            state.record_conflict(problem, index)
        elif problem:
            state.add_note(index, problem)
            state.record_change(index, problem)


class Worklist:
    """Raises scales until all limits hold or are given up."""

    def __init__(self, state: SolverState, limits: list[BiasFitLimit | ShiftLimit], given_up: set[int]) -> None:
        """Skip the limits at the indices in `given_up`, and add the limits that this run gives up."""
        self.state, self.limits, self.given_up = state, limits, given_up
        self.doublings: dict[int, int] = {}
        self.mended_fits: set[int] = set()
        self.limits_by_use: dict[Use, list[int]] = {}
        for position, limit in enumerate(limits):
            for use in dict.fromkeys(limit.uses):
                self.limits_by_use.setdefault(use, []).append(position)
        self.queue = deque(position for position in range(len(limits)) if position not in given_up)
        self.waiting = set(self.queue)

    def run(self) -> None:
        """Examine each limit once, and again after one of its scales was raised."""
        while self.queue:
            position = self.queue.popleft()
            self.waiting.discard(position)
            limit = self.limits[position]
            if isinstance(limit, BiasFitLimit):
                self._meet_bias_fit(position, limit)
            else:
                self._meet_shift(position, limit)

    def _meet_bias_fit(self, position: int, fit: BiasFitLimit) -> None:
        needed = _min_weight_scale(self.state, fit)
        if needed is None or position in self.mended_fits:
            return
        index = self.state.index_by_use[fit.weight]
        if not self.state.is_movable(index):
            self.given_up.add(position)
            return
        self.mended_fits.add(position)
        factor_text = _format_factor(needed, self.state.params[index].scale)
        self._raise_scale(
            index, fit.weight, needed, f"its scale was raised {factor_text} so that bias {fit.bias} fits int32"
        )

    def _meet_shift(self, position: int, shift: ShiftLimit) -> None:
        excess = _shift_excess(self.state, shift)
        if excess <= 0 or self._shrink_zeros(shift, excess):
            return
        initial_excess = excess
        counts = self._count_groups(shift)
        for use in shift.positive_uses:
            index = self.state.index_by_use[use]
            times = counts.get(self.state.scale_group(index)[0], 0)
            if excess <= 0 or times <= 0 or not self.state.is_movable(index):
                continue
            steps = min(-(-excess // times), self._remaining_doublings(index))
            if steps:
                why = (
                    f"its scale was multiplied by {2**steps}: the {shift.name} of {shift.op} exceeded its limit by"
                    f" {initial_excess}"
                )
                self._double_scale(index, use, steps, why)
                excess -= steps * times
        if excess > 0:
            self.given_up.add(position)

    def _count_groups(self, shift: ShiftLimit) -> dict[int, int]:
        """Return the signed number of occurrences of each group in the limit."""
        counts: dict[int, int] = {}
        for sign, uses in ((1, shift.positive_uses), (-1, shift.negative_uses)):
            for use in uses:
                leader = self.state.scale_group(self.state.index_by_use[use])[0]
                counts[leader] = counts.get(leader, 0) + sign
        return counts

    def _shrink_zeros(self, shift: ShiftLimit, excess: int) -> bool:
        """Lower the scale of a tensor of zeros, such as many biases, that shares its scale with no other.

        Any scale represents zeros.
        """
        for use in shift.negative_uses:
            index = self.state.index_by_use[use]
            own_range, params = self.state.ranges.get(index), self.state.params[index]
            zeros = own_range is not None and not own_range.low.any() and not own_range.high.any()
            has_more_uses, smaller = len(self.state.sites[index].uses) > 1, np.ldexp(params.scale, -excess)
            if smaller < SMALLEST_SCALE or (has_more_uses and not self.state.is_divisible(index)):
                continue
            if (
                zeros
                and self.state.sites[index].scheme.observe.name != "fixed"
                and len(self.state.scale_group(index)) == 1
            ):
                if has_more_uses:
                    index = self.state.split_use(index, use)
                self.state.lower_scale(index, smaller)
                return True
        return False

    def _remaining_doublings(self, index: int) -> int:
        """Return how often the scale may still double before integers of the type exceed float32."""
        params, used_doublings = self.state.params[index], self.doublings.get(self.state.scale_group(index)[0], 0)
        max_doublings = MAX_WEIGHT_DOUBLINGS if self.state.is_weight_group(index) else params.type.bits - 1
        max_by_exponent = MAX_FLOAT32_EXPONENT - params.type.bits + (power_of_two_position(params) or 0)
        return max(min(max_doublings - used_doublings, max_by_exponent), 0)

    def _double_scale(self, index: int, use: Use, steps: int, why: str) -> None:
        raised_index = self._raise_scale(index, use, np.ldexp(self.state.params[index].scale, steps), why)
        new_leader, old_leader = self.state.scale_group(raised_index)[0], self.state.scale_group(index)[0]
        self.doublings[new_leader] = self.doublings.get(old_leader, 0) + steps

    def _raise_scale(self, index: int, use: Use, scale: Array, why: str) -> int:
        """Raise the scale at `use`, on a copy if others read the tensor too; return the site's index."""
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
        return index


def _shift_excess(state: SolverState, shift: ShiftLimit) -> int:
    """Return the excess over a `ShiftLimit`, 0 if a position is unknown."""
    positions = {
        use: position for use in shift.uses if (position := power_of_two_position(state.params_at(use))) is not None
    }
    if len(positions) < len(set(shift.uses)):
        return 0
    return (
        sum(positions[use] for use in shift.positive_uses)
        - sum(positions[use] for use in shift.negative_uses)
        - shift.max_shift
    )


def _shift_conflict(state: SolverState, shift: ShiftLimit) -> Conflict | None:
    """Return the conflict of a `ShiftLimit` that was given up, None if raises for other limits met it."""
    excess = _shift_excess(state, shift)
    positive_site, negative_site = (
        state.sites[state.index_by_use[uses[0]]] for uses in (shift.positive_uses, shift.negative_uses)
    )
    conflict = Conflict(
        rules=(positive_site.rule, negative_site.rule),
        tensors=(positive_site.tensor, negative_site.tensor),
        wants=(
            f"a scale with integers of {positive_site.scheme.type.name} to spare",
            "a scale within the range of the hardware's shift",
        ),
        resolution=f"the {shift.name} of {shift.op} exceeds its limit by {excess}",
    )
    return conflict if excess > 0 else None


def _bias_fit_problem(state: SolverState, fit: BiasFitLimit) -> Conflict | str:
    """Return the conflict or note for a weight whose scale the solver may not raise."""
    needed = _min_weight_scale(state, fit)
    if needed is None:
        return ""
    if not fit.rule:
        return (
            f"its scale is fixed, but bias {fit.bias} does not fit int32; backends that convert the bias will clip it"
        )
    site = state.sites[state.index_by_use[fit.weight]]
    factor_text = _format_factor(needed, state.params[state.index_by_use[fit.weight]].scale)
    return Conflict(
        rules=(site.rule, fit.rule),
        tensors=(site.tensor, fit.bias),
        wants=("its fixed scale", f"a scale {factor_text} larger, so that it fits int32"),
        resolution="the bias stays float",
    )


def power_of_two_position(params: QParams | None) -> int | None:
    """Return -log2 of a scale, None if it is no single power of two."""
    if params is None or params.scale.size != 1:
        return None
    mantissa, exponent = np.frexp(params.scale.reshape(-1)[0])
    return int(1 - exponent) if mantissa == 0.5 else None  # noqa: PLR2004  # frexp's own lower end


def _next_power_of_two(scale: Array) -> Array:
    """Return the smallest power of two that is not less than `scale`."""
    mantissa, exponent = np.frexp(scale)
    return np.asarray(np.ldexp(np.float32(1), exponent - (mantissa == 0.5)))  # noqa: PLR2004  # frexp's own lower end


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
    magnitudes = np.abs(value.astype(np.float64)).reshape(-1)
    bias = magnitudes if weight.scale.ndim else magnitudes.max()
    unit = float(data.scale)
    bias_steps = unit * weight.scale.astype(np.float64)
    fits = (bias <= bias_steps * fit.max_integer * (1 - INT32_MARGIN)) & (bias_steps >= SMALLEST_SCALE)
    min_scale = np.maximum(
        bias / (unit * fit.max_integer * (1 - 2 * INT32_MARGIN)), SMALLEST_SCALE * (1 + INT32_MARGIN) / unit
    )
    if fits.all() or (min_scale > LARGEST_VALUE / 2**weight.type.bits).any():
        return None
    raised = np.where(fits, weight.scale, np.maximum(min_scale.astype(np.float32), weight.scale))
    is_power_of_two = state.sites[state.index_by_use[fit.weight]].scheme.scale == "power-of-two"
    return np.maximum(_next_power_of_two(raised), weight.scale) if is_power_of_two else raised
