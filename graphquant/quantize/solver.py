"""The scale solver: ranges, ties, limits, biases, Relus and function clones, in this order.

Each step visits the sites once, except `meet_limits`, whose module proves that it terminates. No step undoes the
work of another: tied sites stay tied, scales only grow, and biases, which depend on scales, come last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from graphquant.errors import DataError, InternalError, UsageError
from graphquant.ir import (
    BIAS_ADD_KINDS,
    FLOAT_TYPES,
    Model,
    TensorRef,
    Use,
    paused_gc,
    require_finite_weight,
    weight_ends,
)
from graphquant.numerics import (
    SMALLEST_SCALE,
    Array,
    DynamicQParams,
    FloatType,
    QParams,
    Range,
    block_scale_shape,
    broadcast_along_axis,
    qparams_from_scale,
    round_scale_to_float16,
    row_slices,
    split_blocks,
)
from graphquant.observers import EMPTY_SKETCH, OBSERVERS, Sketch, bin_means, search_block_params, sketch_values
from graphquant.quantize.limits import meet_limits
from graphquant.quantize.plan import Plan, Site, Skip, SkipCode, check_plan
from graphquant.quantize.saturation import is_read_by_last_softmax, is_read_by_maximum, limit_to_responsive
from graphquant.quantize.solver_state import (
    Solution,
    SolverState,
    format_range,
    format_values,
    starts_at_zero,
    takes_original_scale,
)
from graphquant.quantize.ties import (
    insert_pairs_before_clips,
    share_scales,
    skip_uneven_concats,
    skip_unfed_ties,
    solve_block_scales,
)
from graphquant.utils import MEGABYTE

# The range of each site by itself: from the plan, the rule, the weight's value or the calibration data.

TAKES_INFINITE_VALUES = "it has infinite values, as masks do, which integers cannot represent"

FLOAT32_BYTES = 4
MIN_REPORTED_BYTES = 1 << 28  # weights of less are read at once
SENTINEL_SIZE = 5_000.0  # smallest magnitude of values that stand for "none", as masks of -10000 do
LOGITS_MARGIN = 1.25  # range of the scores before a last softmax, relative to the largest one observed
LARGEST_MASK = 1e30  # beyond it, rounding to a scale could give infinity
SENTINEL_GAP = 256.0  # smallest quotient of such values and the largest ordinary one
TAKES_SENTINELS = "its values of {:.3g}, as masks have, leave no integers to the ordinary ones of at most {:.3g}"
IS_SENTINEL = (
    "its values of {:.3g} stand for infinity, as those of masks do; tensors that share a scale would lose theirs"
)


def find_site_ranges(
    state: SolverState,
    sketches: Mapping[TensorRef, Sketch],
    unobservable: Mapping[TensorRef, str],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Give each site that follows no other one its own range, the scale from the plan, or a skip.

    `progress` receives the megabytes of the weights that were read, and of all. Raises a ModelError if a weight holds
    NaN or infinity.
    """
    reached: dict[str, bool] = {}  # by graph with quantized activations
    for index, site in _with_progress(state, progress):
        follows_others = takes_original_scale(site) or (site.scheme.observe.name == "bias" and site.range is None)
        if site.scheme.range == "dynamic" or (site.scale is None and follows_others):
            continue
        if not (site.parameter or _has_explicit_range(site) or site.tensor in unobservable):
            sketch, graph = sketches.get(site.tensor, EMPTY_SKETCH), site.tensor.graph
            reached[graph] = reached.get(graph, False) or sketch.count + sketch.empty_arrays > 0
        try:
            if site.parameter and _has_explicit_range(site):
                _check_weight_is_finite(_read_weight(state, site), site)
            if site.scale is not None:
                state.params[index] = _params_given_by_plan(site, site.scale)
                continue
            # No range expresses the scale and zero point of least squared error.
            searches_blocks = site.scheme.observe.name == "mse" and site.scheme.block_size is not None
            if site.parameter and site.range is None and searches_blocks:
                state.params[index] = _search_blocks(state, index)
                continue
            state.ranges[index] = _find_site_range(state, index, sketches)
            if site.scheme.block_size is not None:
                solve_block_scales(state, index)
        except DataError as error:
            state.skip_site(index, SkipCode.RANGE, unobservable.get(site.tensor, str(error)))
    _skip_weights_in_bodies(state, {name for name, is_reached in reached.items() if name and not is_reached})


def _with_progress(state: SolverState, progress: Callable[[int, int], None] | None) -> Iterator[tuple[int, Site]]:
    """Yield the sites with their indices, and report the weights of those before in megabytes."""
    shapes = (state.parameters.shape(site.tensor) if site.parameter else () for site in state.sites)
    sizes = [FLOAT32_BYTES * math.prod(size or 0 for size in shape or ()) for shape in shapes]
    done, total = 0, sum(sizes)
    for index, site in enumerate(state.sites):
        yield index, site
        done += sizes[index] if index < len(sizes) else 0  # a site may have been divided since
        if progress is not None and total >= MIN_REPORTED_BYTES:
            progress(done // MEGABYTE, total // MEGABYTE)


def _skip_weights_in_bodies(state: SolverState, unreached: set[str]) -> None:
    """Keep weights float in bodies that no sample reached. Without ranges of outputs, their ops would run in float."""
    for index, site in enumerate(tuple(state.sites)):
        uses = [use for use in site.uses if use.graph in unreached]
        if uses and site.parameter and index in state.ranges and site.range is None:
            other_uses = [use for use in site.uses if use not in uses]
            skipped = state.divide_site(index, [other_uses, uses])[1] if other_uses else index
            state.skip_site(skipped, SkipCode.RANGE, "the ops that read it are in a branch without ranges")
            del state.ranges[skipped]


def _has_explicit_range(site: Site) -> bool:
    """Return True if the plan or the rule gives range or scale, so that no value is needed for it."""
    return site.has_given_range or not OBSERVERS[site.scheme.observe.name].needs_values


def _search_blocks(state: SolverState, index: int) -> QParams:
    """Return scale and zero point of each block of a weight, of least squared error."""
    site, value = state.sites[index], _read_quantizable_weight(state, index)
    if site.axis is None or site.scheme.block_size is None:
        raise InternalError(f"the blocks of {site.tensor} have no axis or no size.")
    return search_block_params(value, site.scheme.grid, site.axis, site.scheme.block_size)


def _read_weight(state: SolverState, site: Site) -> Array | None:
    """Return the value of a parameter in the view of the site, None if it is unknown.

    A checkpoint can hold another shape than the model declares. The channels of the plan would not fit it.
    """
    value, shape = state.parameters.value(site.tensor), site.view or state.parameters.shape(site.tensor)
    if value is None or shape is None or site.axis is None:
        return value
    if site.view is not None and value.size == math.prod(site.view):
        value = value.reshape(site.view)
    if value.ndim != len(shape) or any(size not in {None, value.shape[axis]} for axis, size in enumerate(shape)):
        raise DataError(f"its value has shape {value.shape}, but the model declares {shape}")
    return value


def _check_weight_is_finite(value: Array | None, site: Site) -> float:
    """Refuse a weight that is not finite, which any scale would hide. Return the largest magnitude of a finite one."""
    if value is None or value.dtype.name not in FLOAT_TYPES or not value.size:
        return 0.0
    low, high = weight_ends(value)  # no array of magnitudes, which would be as large as the weight
    if np.isinf([low, high]).any() and not np.isnan(low):
        raise DataError(TAKES_INFINITE_VALUES)
    if not np.isfinite([low, high]).all():
        require_finite_weight(value, site.tensor)
    return float(max(high, -low))


def _find_site_range(state: SolverState, index: int, sketches: Mapping[TensorRef, Sketch]) -> Range:
    """Return the range of the site, from the plan, the rule, the weight or the data, in the shape of its scales."""
    site = state.sites[index]
    if site.range is not None:
        value_range = Range(np.asarray(site.range[0]), np.asarray(site.range[1]))
    else:
        observer, arguments = OBSERVERS[site.scheme.observe.name], site.scheme.observe.arguments
        site_sketches = _sketches_of_site(state, index, sketches)
        if nan_count := sum(sketch.nan for sketch in site_sketches):
            state.add_note(index, f"{nan_count} NaN values were ignored")
        ranges = [observer.choose_range(sketch, site.scheme.grid, arguments) for sketch in site_sketches]
        value_range = ranges[0]
        is_auto = site.scheme.observe.name == "auto" and not site.parameter
        is_logits = is_auto and is_read_by_last_softmax(state.model, site.uses)
        if is_logits or (is_auto and is_read_by_maximum(state.model, site.uses)):
            observed = OBSERVERS["minmax"].choose_range(site_sketches[0], site.scheme.grid, {})
            high = observed.high * (LOGITS_MARGIN if is_logits else 1.0)
            value_range = value_range.union(Range(value_range.low, high))
        if len(ranges) > 1:
            lows, highs = zip(*((channel.low, channel.high) for channel in ranges), strict=True)
            value_range = Range(np.array(lows), np.array(highs))
    if site.axis is None:
        if value_range.low.ndim:
            value_range = Range(value_range.low.min(), value_range.high.max())
        value_range = _limit_range(state, index, value_range)
    elif value_range.low.ndim == 0 or site.scheme.block_size is not None:
        shape = _scale_shape(state, site, site.axis)
        expand = np.reshape if value_range.low.ndim else np.broadcast_to
        value_range = Range(expand(value_range.low, shape), expand(value_range.high, shape))
    elif site.parameter and site.range is None:
        value_range = _widen_channels_of_zeros(state, index, value_range)
    if starts_at_zero(site) and site.scheme.zero == "asymmetric" and (value_range.low < 0).any():
        raise DataError(
            f"it has negative values, but {site.scheme.family} has no zero point; use signed integers with"
            ' zero = "symmetric", or the family fake-quant'
        )
    return value_range


def _widen_channels_of_zeros(state: SolverState, index: int, observed: Range) -> Range:
    """Give channels without a value other than 0 the range of the widest channel.

    Their scale does not change the weight, but it is the step of their biases: with a scale of 1, as a range of 0 has
    it, a bias of a pruned channel is rounded to a multiple of the input's scale.
    """
    zeros = (observed.low == 0) & (observed.high == 0)
    if not zeros.any() or zeros.all():
        return observed
    state.add_note(index, f"{int(zeros.sum())} channels of zeros have the range of the widest one")
    widest = (np.maximum(observed.high, 0.0) - np.minimum(observed.low, 0.0)).argmax()
    low, high = (np.where(zeros, ends[widest], ends) for ends in (observed.low, observed.high))
    return Range(low, high)


def _limit_range(state: SolverState, index: int, observed: Range) -> Range:
    """Return the part of an activation's range to which its readers respond; see `limit_to_responsive`."""
    site = state.sites[index]
    if site.parameter or isinstance(site.scheme.type, FloatType) or _has_explicit_range(site):
        return observed
    qmin, qmax = site.scheme.type.limits()
    limited = limit_to_responsive(state.model, state.parameters, site.tensor, site.uses, observed, qmax - qmin)
    if limited is not observed:
        state.add_note(index, f"the ops that read it return constants outside of {format_range(limited)}")
        state.saturated.add(index)
    return limited


def _sketches_of_site(state: SolverState, index: int, sketches: Mapping[TensorRef, Sketch]) -> list[Sketch]:
    """Return the sketch of the site's values, or one per channel if the observer needs histograms."""
    site = state.sites[index]
    observer = OBSERVERS[site.scheme.observe.name]
    if not observer.needs_values:
        return [EMPTY_SKETCH]
    if site.parameter:
        value, bits = _read_quantizable_weight(state, index), observer.required_bits(site.scheme.type)
        if any(state.model.op(TensorRef(use.graph, use.op)).role(use.slot) == "input" for use in site.uses):
            _refuse_sentinel_constant(value)  # not of a weight or bias, whose scale is its own
        if site.axis is not None and (block := site.scheme.block_size) is not None:
            slabs = (value[rows] for rows in row_slices(value.shape, block))
            parts = [sketch_values(split_blocks(slab, site.axis, block), 0) for slab in slabs]
            low, high = (np.concatenate([getattr(part, end) for part in parts]) for end in ("low", "high"))
            return [Sketch(low=low, high=high)]
        if site.axis is None or not bits:
            return [sketch_values(value, site.axis, bits=bits)]
        return [sketch_values(channel, bits=bits) for channel in np.moveaxis(value, site.axis, 0)]
    sketch = sketches.get(site.tensor, EMPTY_SKETCH)
    if not sketch.count:
        unreached = "no calibration sample reached it, and no range is given"
        raise DataError("it was empty for each sample that reached it" if sketch.empty_arrays else unreached)
    if sketch.inf:
        raise DataError(TAKES_INFINITE_VALUES)
    _refuse_sentinels(sketch)
    return [sketch]


def _refuse_sentinels(sketch: Sketch) -> None:
    """Refuse values like those of a mask that was added to scores: two groups that are decades apart."""
    extreme = max(abs(float(sketch.low.min(initial=0.0))), abs(float(sketch.high.max(initial=0.0))))
    if extreme < SENTINEL_SIZE or not sketch.bits:
        return
    sizes = np.sort(np.abs(bin_means(sketch)))
    starts = np.flatnonzero((sizes[1:] > SENTINEL_GAP * sizes[:-1]) & (sizes[1:] >= SENTINEL_SIZE)) + 1
    if starts.size and sizes[starts[0] - 1] > 0:
        raise DataError(TAKES_SENTINELS.format(sizes[starts[0]], sizes[starts[0] - 1]))
    if starts.size and extreme > LARGEST_MASK:
        raise DataError(IS_SENTINEL.format(extreme))


def _refuse_sentinel_constant(value: Array) -> None:
    """Refuse a constant all of whose values are zero or huge. It may share a scale with ordinary values."""
    if not value.size or 0 < abs(float(value.reshape(-1)[0])) < SENTINEL_SIZE:
        return  # one ordinary value is enough
    sizes = np.abs(value[value != 0])
    if sizes.size and float(sizes.min()) >= SENTINEL_SIZE:
        raise DataError(IS_SENTINEL.format(float(sizes.max())))


def _read_quantizable_weight(state: SolverState, index: int) -> Array:
    """Return the value of the parameter if it can be quantized, zeros if all of it is denormal.

    Denormal weights would get denormal scales from the kernels, and a bias would not fit those.
    """
    site = state.sites[index]
    if (value := _read_weight(state, site)) is None:
        raise DataError(
            "it has no single value in the model's files (no checkpoint, ops that cannot be evaluated, or calls that"
            " pass different weights)"
        )
    if value.dtype.name not in FLOAT_TYPES:
        raise DataError(f"its value has type {value.dtype.name}, which is not a float type")
    if value.size == 0:
        raise DataError("it has no elements")
    largest = _check_weight_is_finite(value, site)
    if 0 < largest < SMALLEST_SCALE:
        why = f"its values, at most {largest:.3g}, are denormal and treated as zeros, as kernels do"
        state.record_change(index, why)
        return np.zeros_like(value)
    return value


def _scale_shape(state: SolverState, site: Site, axis: int) -> tuple[int, ...]:
    """Return the shape of the scales of a site with an axis: (C,), or that of its blocks."""
    shape, block = site.view or state.model.output(site.tensor).shape, site.scheme.block_size
    if shape is None or shape[axis] is None or (block is not None and None in shape):
        if (value := _read_weight(state, site)) is None:
            raise DataError("the number of its channels is unknown")
        shape = value.shape
    sizes = tuple(size or 0 for size in shape)
    if not sizes[axis]:
        raise DataError("it has no elements")
    return (sizes[axis],) if block is None else block_scale_shape(sizes, axis, block)


def _params_given_by_plan(site: Site, scales: tuple[float, ...]) -> QParams:
    """Return scale and zero point from the plan. A symmetric scheme needs no zero point."""
    scheme = site.scheme
    default = scheme.type.symmetric_zero_point if scheme.zero == "symmetric" and not starts_at_zero(site) else 0
    shape = () if site.axis is None else (len(scales),)
    zero_points = np.reshape(site.zero_point or [default] * len(scales), shape)
    return qparams_from_scale(np.reshape(scales, shape), zero_points, scheme.type, narrow=scheme.narrow, axis=site.axis)


# Scales of int32 biases: input scale times weight scale of the op that adds the bias.


def solve_biases(state: SolverState) -> None:
    """Solve the remaining bias sites. A bias whose consumers need different scales is copied.

    Raises a ModelError if a bias holds NaN or infinity.
    """
    for index, site in enumerate(state.plan.sites):
        is_solved = index in state.params or index in state.skips
        if is_solved or takes_original_scale(site) or site.scheme.range == "dynamic":
            continue
        groups: dict[object, tuple[QParams, list[Use]]] = {}
        refused_uses: dict[str, list[Use]] = {}
        for use in site.uses:
            try:
                params = _bias_params(state, index, use)
            except DataError as error:
                refused_uses.setdefault(str(error), []).append(use)
            else:
                groups.setdefault(params.scale.tobytes(), (params, []))[1].append(use)
        copies = f"{len(groups)} copies, as its consumers need different scales"
        if len(groups) > 1:
            state.record_change(index, f"it has {copies}")
        indices = state.divide_site(index, [*(uses for _, uses in groups.values()), *refused_uses.values()])
        for copy_index, (params, uses) in zip(indices, groups.values(), strict=False):
            state.params[copy_index] = params
            if len(groups) > 1:
                state.add_note(copy_index, f"it is one of {copies}: the copy for {', '.join(map(str, uses))}")
        for copy_index, reason in zip(indices[len(groups) :], refused_uses, strict=True):
            state.skip_site(copy_index, SkipCode.BIAS, reason)


def _bias_params(state: SolverState, index: int, use: Use) -> QParams:
    """Return int32 parameters with input scale times weight scale, per channel if the weight is.

    Source: https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html .
    """
    site, graph = state.sites[index], state.model.graphs[use.graph]
    weighted, slots = graph.op(use.op), graph.slots(use.op)
    if weighted.kind in BIAS_ADD_KINDS and len(slots) == 2:  # noqa: PLR2004  # product and bias
        product = slots[1 - use.slot]
        weighted = graph.op(product.op) if product is not None and product.graph == graph.name else weighted
    operand_params = [
        state.params_at(Use(use.graph, weighted.name, slot))
        for slot in range(len(graph.slots(weighted.name)))
        if weighted.role(slot) in {"input", "weight"}
    ]
    scales = [params.scale.astype(np.float64) for params in operand_params if params is not None]
    value = state.bias_value(site.tensor)
    if len(scales) != 2 or value is None:  # noqa: PLR2004  # one input and one weight
        raise DataError("its scale depends on its consumer's input and weight, which are not both quantized")
    require_finite_weight(value, site.tensor)
    with np.errstate(over="ignore", under="ignore"):
        scale = np.asarray(scales[0] * scales[1]).astype(np.float32)
    axis = site.axis if scale.ndim else None
    if scale.ndim and (axis is None or axis >= value.ndim or value.shape[axis] != scale.size):
        raise DataError(f"its shape {value.shape} does not match {scale.size} weight scales")
    if not (np.isfinite(scale).all() and (scale >= SMALLEST_SCALE).all()):
        raise DataError("its scale, input scale times weight scale, is not a normal float32")
    step_sizes = broadcast_along_axis(scale.astype(np.float64), axis, value.ndim)
    largest = float(np.max(np.abs(value) / step_sizes, initial=0.0))
    if largest > site.scheme.type.limits()[1]:
        raise DataError(
            f"its values reach {largest:.3g} steps of input scale times weight scale, beyond {site.scheme.type.name}"
        )
    return qparams_from_scale(scale, np.zeros(scale.shape, np.int32), site.scheme.type, axis=axis)


def note_clipped_weights(state: SolverState) -> None:
    """Note for each weight with a given range or scale how many values lie outside by more than rounding explains.

    It runs after everything that may widen a range. One weight is in memory at a time.
    """
    for index, params in state.params.items():
        site = state.sites[index]
        is_solved_bias = site.scheme.observe.name == "bias" and not site.has_given_range
        if not site.parameter or not _has_explicit_range(site) or is_solved_bias:
            continue
        value = _read_weight(state, site)
        if value is None or value.dtype.name not in FLOAT_TYPES:
            continue
        outside = _count_clipped_values(value, params)
        if outside:
            range_source = f"rule {site.rule!r} fixes" if site.rule and not site.has_given_range else "the plan gives"
            limits = format_range(params.range)
            values_text = f"{outside} of {value.size} values {'lies' if outside == 1 else 'lie'} outside {limits}"
            channels = (
                " (over all channels; each has its own range)" if params.scale.size > 1 and site.has_given_range else ""
            )
            clipped = f"{'is' if outside == 1 else 'are'} clipped"
            state.record_change(index, f"{values_text}, the range that {range_source}{channels}, and {clipped}")


def _count_clipped_values(value: Array, params: QParams) -> int:
    """Count the values that are farther than half a step, the largest rounding error, from a representable value."""
    represented = params.range
    low, high = represented.low - params.scale / 2, represented.high + params.scale / 2
    if params.block is not None:  # given ranges are one for all blocks
        low, high = low.min(), high.max()
    low, high = (broadcast_along_axis(np.asarray(end), params.axis, value.ndim) for end in (low, high))
    return int(np.count_nonzero((value < low) | (value > high)))


FLOAT8_NOT_RUNNABLE = (
    "onnxruntime's optimizer fuses float8 between quantized tensors into integer ops, which it then rejects; load the"
    " model with optimizations disabled, or quantize only weights"
)

RANGE_NOT_TRAINED = "its range is in variables without a gradient; only FakeQuant ops have one"


@paused_gc()
def solve_scales(
    model: Model,
    plan: Plan,
    sketches: Mapping[TensorRef, Sketch],
    unobservable: Mapping[TensorRef, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Solution:
    """Solve for scale and zero point of every site.

    A site with a scale keeps it. A site with a range uses it. A site in a function clone takes its original's scale.
    The range of a parameter comes from its value, all others from `sketches`; `unobservable` may give the reason why
    one is missing. Tied sites get the union of their ranges, so that they share one scale and zero point. Scales are
    raised as far as biases and shifts need. A tensor whose consumers need different scales is copied. Raises a
    ModelError if a weight holds NaN or infinity, and a UsageError if the plan does not fit the model.
    """
    check_plan(model, plan)
    state = SolverState(model, plan)
    find_site_ranges(state, sketches, unobservable or {}, progress)
    skip_uneven_concats(state)
    share_scales(state)
    _round_scales_like_family(state)
    skip_unfed_ties(state)
    meet_limits(state)
    state.merge_equal_copies()
    solve_biases(state)
    insert_pairs_before_clips(state)
    note_clipped_weights(state)
    _copy_original_scales(state)
    _add_family_notes(state)
    dynamic = {
        index: DynamicQParams(type=site.scheme.type, narrow=site.scheme.narrow, axis=site.axis)
        for index, site in enumerate(state.sites)
        if site.scheme.range == "dynamic"
    }
    return Solution(
        plan=replace(plan, sites=tuple(state.sites), skips=tuple(_remaining_skips(state, plan.skips))),
        params={**state.params, **dynamic},
        skips=state.skips,
        notes={index: state.notes[index] for index in sorted(state.notes) if index in state.params},
        changes=tuple(state.changes),
        conflicts=tuple(state.conflicts),
        ranges=state.ranges,
        saturated=frozenset(state.saturated & state.params.keys()),
    )


def _round_scales_like_family(state: SolverState) -> None:
    """Round each scale as the family's ops will; skip sites that the family cannot represent."""
    for index in list(state.params):
        try:
            site = state.sites[index]
            params = site.family.effective_params(state.params[index])
            is_float16 = state.model.output(site.tensor).dtype == "float16"
            state.params[index] = round_scale_to_float16(params) if is_float16 else params
        except UsageError as error:
            state.skip_site(index, SkipCode.SCHEME, str(error))


def _copy_original_scales(state: SolverState) -> None:
    """Give sites in function clones the scales of their originals."""
    for index, site in enumerate(state.sites):
        if not takes_original_scale(site) or site.clone_of is None:
            continue
        params = state.params_at(site.clone_of)
        if params is not None:
            state.params[index] = params
        else:
            state.skip_site(index, SkipCode.TIE, f"its original {site.clone_of} is not quantized")


def _add_family_notes(state: SolverState) -> None:
    """Note ranges that no gradient trains, and float8 between quantized tensors, which does not run."""
    for index in state.params:
        site = state.sites[index]
        if site.scheme.range == "learned" and not site.family.supports_learned_range:
            state.add_note(index, RANGE_NOT_TRAINED)
        if isinstance(site.scheme.type, FloatType):
            other_uses = (
                Use(use.graph, use.op, slot)
                for use in site.uses
                for slot in range(len(state.model.graphs[use.graph].slots(use.op)))
                if slot != use.slot
            )
            if not site.parameter or any(state.params_at(other_use) is not None for other_use in other_uses):
                state.add_note(index, FLOAT8_NOT_RUNNABLE)


def _remaining_skips(state: SolverState, skips: tuple[Skip, ...]) -> list[Skip]:
    """Return the plan's skips without the uses that the solver quantized after all."""
    remaining = []
    for skip in skips:
        uses = tuple(use for use in skip.uses if use not in state.explicit_uses)
        if uses or not skip.uses:
            remaining.append(skip if uses == skip.uses else replace(skip, uses=uses))
    return remaining


# Explain a site's scale in sentences: the source of its range, and what changed it.

MAX_SHOWN_RANGE_BITS = 16  # widest type whose range is shown. The range of an int32 bias is not informative.
OUTPUT_LIMITS = {"sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "hard_sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}
"""Output limits of kinds that never exceed them."""


def explain_scale(model: Model, plan: Plan, index: int, solution: Solution | None = None) -> tuple[str, ...]:
    """Explain one site of a plan, or of a solution's own plan.

    Without a solution, only the facts in the plan are explained.
    """
    site = plan.sites[index]
    if solution is not None and index in solution.skips:
        return (f"stays float: {solution.skips[index].reason}",)
    sentences = [_explain_origin(model, site, solution, index)]
    if solution is not None:
        params = solution.params.get(index)
        sentences += solution.notes.get(index, ())
        if isinstance(params, QParams):
            range_text = f", range {format_range(params.range)}" if params.type.bits <= MAX_SHOWN_RANGE_BITS else ""
            sentences.append(f"scale {format_values(params.scale)}{range_text}")
    elif site.tie:
        tie_text = f"rule {site.rule!r} ties it to" if site.rule else "it is tied to"
        sentences.append(f"{tie_text} the input of {', '.join(map(str, site.tie))}: both share one scale")
    return tuple(sentence for sentence in sentences if sentence)


def _explain_origin(model: Model, site: Site, solution: Solution | None, index: int) -> str:
    """Explain the source of the range or scale, before ties and limits."""
    if site.scale is not None:
        return "the plan gives its scale"
    if site.range is not None:
        return f"the plan gives its range [{site.range[0]:.6g}, {site.range[1]:.6g}]"
    if site.clone_of is not None:
        return f"it takes the scale of {site.clone_of}, of which it is a function clone"
    if site.scheme.range == "dynamic":
        return "its range is computed in each run"
    return _explain_observer(model, site, solution, index)


def _explain_observer(model: Model, site: Site, solution: Solution | None, index: int) -> str:
    """Explain the range from the scheme's observer; return "" if the observer was not used."""
    observe, rule = site.scheme.observe, f"rule {site.rule!r}" if site.rule else "its scheme"
    match observe.name:
        case "fixed":
            op = model.op(site.tensor)
            limits = OUTPUT_LIMITS.get(op.kind)
            limits_text = f"; {op.type} outputs stay in [{limits[0]:g}, {limits[1]:g}]" if limits is not None else ""
            low, high = observe.arguments["low"], observe.arguments["high"]
            return f"its range is fixed by {rule}: [{low:.6g}, {high:.6g}]{limits_text}"
        case "fixed-point":
            return f"its scale is fixed by {rule}: 2**{int(observe.arguments['exponent'])}"
        case "bias":
            return f"{rule} gives it the product of its consumer's input scale and weight scale"
    source = f"computed by {observe.name} {'from its values' if site.parameter else 'from the calibration data'}"
    if solution is None:
        return f"its range will be {source}"
    own_range = solution.ranges.get(index)
    return "" if own_range is None else f"its range {format_range(own_range)} is {source}"
