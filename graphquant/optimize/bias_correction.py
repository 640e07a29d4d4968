"""Bias correction: shift biases by the change of each output channel's mean that rounding causes.

Sources: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section 4.2 and
appendix D (the empirical form); Banner et al. 2018, "Post Training 4-bit Quantization of Convolutional Networks for
Rapid-Deployment", section 4.

The paper corrects ops one by one, which takes a run of the data per op. Here all ops are first corrected at once for
the rounding of their own weights and input. Only the whole quantized model shows the noise behind a Relu, so one level
of ops halfway through and the last ops are then corrected again. Means of few samples are noisy. Each channel's mean is
therefore shrunk towards 0 by the share that chance explains (James and Stein 1961, positive part).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from graphquant.backends import BACKENDS
from graphquant.ir import DataType, Model, Parameters, TensorRef, Use, paused_gc
from graphquant.numerics import SMALLEST_SCALE, Array, DynamicQParams, QParams, broadcast_along_axis, qparams_from_scale
from graphquant.optimize.algorithm import AlgorithmData, AlgorithmResult, WeightEdits, skipped_target
from graphquant.optimize.weighted_ops import (
    ALGORITHM_RULE,
    NOT_OBSERVED,
    ChannelMean,
    WeightedOp,
    add_channel_mean,
    dependency_levels,
    final_ops,
    find_unshared_constant,
    find_weighted_clones,
    find_weighted_ops,
    measure_channel_means,
)
from graphquant.qdq.family import add_constant, new_op
from graphquant.quantize import Plan, Site, Solution
from graphquant.quantize.rewrite import FRAME_KINDS, rewrite
from graphquant.rules import ObserverConfig, Scheme

# A bias can be shared or missing. BiasStore changes it without affecting any other reader.

BIAS_BITS: Final = 32
"""Smallest bit width of a bias that can be corrected. With fewer bits, one step is as large as the corrections."""

ADDED_BIAS: Final = Scheme(name="bias", dtype="int32", per="channel", observe=ObserverConfig(name="bias"))
"""Scheme of an added bias if the model has no bias whose scheme it could take, for backends with int32 biases: with a
float bias, ONNX Runtime before 1.24 may run an op in float, and at opset 28 it may reject the model."""

NO_CHANNEL_BIAS: Final = "its bias is not one number per channel"


class BiasStore:
    """Model and solution with movable biases."""

    def __init__(self, edits: WeightEdits) -> None:
        """Copy the model of the weight edits."""
        self.model: Model = edits.model.copy()  # Copy of the model. It is modified.
        self._solution = edits.solution
        self._sites, self._params = list(edits.solution.plan.sites), dict(edits.solution.params)
        self._bias_example = next((s for s in self._sites if s.parameter and s.scheme.type.bits == BIAS_BITS), None)
        self._has_integer_biases = self._bias_example is not None or any(
            target in BACKENDS and BACKENDS[target].bias_type == "int32" for target in edits.solution.plan.targets
        )
        graphs = edits.model.graphs.items()
        self._framed = {name for name, graph in graphs if any(op.kind in FRAME_KINDS for op in graph.ops())}
        self._original_model = edits.model
        self._parameters = Parameters(edits.model)
        self.originals: dict[Use, Array] = {}  # values of moved biases before, by use
        self._moved: dict[Use, Array] = {}
        self._constants: dict[Use, TensorRef] = {}
        self._site_indices = {use: index for index, site in enumerate(self._sites) for use in site.uses}

    @property
    def solution(self) -> Solution:
        """The solution, extended by sites of added biases."""
        plan = replace(self._solution.plan, sites=tuple(self._sites))
        return replace(self._solution, plan=plan, params=dict(self._params))

    def is_variable(self, weighted: WeightedOp) -> bool:
        """Return True if the bias is a variable. It keeps its value, with which training may go on."""
        use = weighted.bias
        tensor = None if use is None else self._original_model.graphs[use.graph].source_of(use)
        return tensor is not None and self._parameters.is_variable(tensor)

    def move_bias(self, weighted: WeightedOp, shift: Array) -> str:
        """Shift a bias by the error of the op's mean. Return the reason if that is impossible, else "".

        `shift` is float64 (C,). If another op adds the bias, the op's output does not contain it, nor earlier shifts.
        """
        if (use := weighted.bias) is None:
            return weighted.no_bias_reason
        original = self.originals[use] if use in self.originals else self._read_bias(weighted, use, len(shift))
        if isinstance(original, str):
            return original
        adds_bias_itself = use.op == weighted.op.name
        moved = self._moved.get(use, np.zeros(len(shift))) + shift if adds_bias_itself else shift
        value = (original + moved).astype(np.float32)
        if not np.isfinite(value).all() or not self._fits_integers(use, value):
            return "the corrected bias would not fit into 32-bit integers"
        self.originals[use], self._moved[use] = original, moved
        self._write_bias(weighted, use, value)
        return ""

    def move_bias_of_clone(self, weighted: WeightedOp, clone: WeightedOp) -> None:
        """Shift the bias of an op's copy in a function clone like that of the op, so that both compute the same."""
        if weighted.bias is not None and clone.bias is not None:
            self.move_bias(clone, self._moved[weighted.bias])

    def describe_change(self, weighted: WeightedOp) -> str:
        """Describe the change of a bias for reports."""
        moved = np.abs(self._moved[weighted.bias]).max(initial=0) if weighted.bias is not None else 0.0
        return f"its bias moved by up to {moved:.3g}"

    def _read_bias(self, weighted: WeightedOp, use: Use, channels: int) -> Array | str:
        """Read a bias as float64 in its own shape, or return the reason why it cannot change."""
        params = self._params_at(use)
        if params is not None and params.type.bits < BIAS_BITS:
            return f"its bias has {params.type.bits} bits, whose steps are as large as the correction"
        if (tensor := self._original_model.graphs[use.graph].source_of(use)) is None:
            return np.zeros(channels)
        value = self._parameters.value(tensor)
        is_channel_last = weighted.axes is not None and weighted.axes.channel == weighted.axes.rank - 1
        is_separate_add = self._original_model.graphs[use.graph].op(use.op).kind == "add"
        if value is None or value.dtype != np.float32 or (is_separate_add and not is_channel_last):
            return NO_CHANNEL_BIAS
        if value.shape[-1:] == (channels,):
            return value.astype(np.float64)
        if value.size == 1:
            return np.broadcast_to(value.astype(np.float64), channels)
        return f"its bias has the shape {list(value.shape)}"

    def _fits_integers(self, use: Use, value: Array) -> bool:
        if (params := self._params_at(use)) is None:
            return True
        step_sizes = broadcast_along_axis(params.scale.astype(np.float64), params.axis, value.ndim)
        return bool(np.max(np.abs(value) / step_sizes, initial=0.0) <= params.type.limits()[1])

    def _params_at(self, use: Use) -> QParams | None:
        index = self._site_indices.get(use)
        params = None if index is None else self._params.get(index)
        return params if isinstance(params, QParams) else None

    def _write_bias(self, weighted: WeightedOp, use: Use, value: Array) -> None:
        """Set the value of a bias. If other uses read the constant, or there is none, add one, quantized like it.

        To a variable, a constant is added with the shift.
        """
        target = self._constants.get(use) or find_unshared_constant(self._original_model, use, value.shape)
        is_variable = self.is_variable(weighted)
        stored = (value - self.originals[use]).astype(np.float32) if is_variable else value
        if target is not None:
            self._constants[use] = target
            graph = self.model.graphs[target.graph]
            graph.replace_op(replace(graph.op(target.op), read_value=lambda: stored))
            return
        graph = self.model.graphs[use.graph]
        old_bias = graph.source_of(use)
        self._constants[use] = new_bias = add_constant(
            graph,
            f"{weighted.op.name}/bias_{'shift' if is_variable else 'corrected'}",
            stored,
            op_type="Const",
            rule=ALGORITHM_RULE,
            control_sources=(weighted.op.name,) if use.graph in self._framed else (),
        )
        if is_variable:
            name, fields = f"{weighted.op.name}/bias_corrected", {"type": "AddV2", "attrs": {"T": DataType("float32")}}
            total = new_op(graph, name, "float32", value.shape, kind="add", rule=ALGORITHM_RULE, **fields)
            new_bias = graph.add_op(total, [old_bias, new_bias])
        graph.set_source(use, new_bias)
        self._move_site(weighted, use, new_bias, value, is_new=old_bias is None)

    def _move_site(self, weighted: WeightedOp, use: Use, new_bias: TensorRef, value: Array, *, is_new: bool) -> None:
        """Move the use's site to the new constant, or add a site where there was no bias."""
        sites, params, index = self._sites, self._params, self._site_indices.get(use)
        if index is not None:
            site = sites[index]
            remaining_uses = tuple(site_use for site_use in site.uses if site_use != use)
            new_site = replace(site, tensor=new_bias, uses=(use,), graph=use.graph, tie=(), clone_of=None)
            if not remaining_uses:
                sites[index] = new_site
            else:
                sites[index] = replace(site, uses=remaining_uses)
                self._site_indices[use] = len(sites)
                if index in params:
                    params[len(sites)] = params[index]
                sites.append(new_site)
        else:
            site_and_params = self._make_site_like_others(weighted, use, new_bias, value) if is_new else None
            if site_and_params is None:
                return
            self._site_indices[use] = len(sites)
            params[len(sites)] = site_and_params[1]
            sites.append(site_and_params[0])

    def _make_site_like_others(
        self, weighted: WeightedOp, use: Use, new_bias: TensorRef, value: Array
    ) -> tuple[Site, QParams] | None:
        """Make a site for a new bias if biases are integers. Its scale is input scale times weight scale."""
        operand_params = (self._params_at(weighted.data_input), self._params_at(weighted.weight))
        scales = [params.scale.astype(np.float64) for params in operand_params if params]
        if not self._has_integer_biases or len(scales) != len(("input", "weight")):
            return None
        scale = np.asarray(scales[0] * scales[1]).astype(np.float32)
        largest = np.max(np.abs(value) / np.maximum(scale.astype(np.float64), SMALLEST_SCALE), initial=0.0)
        axis = 0 if scale.ndim else None
        example, has_other_shape = self._bias_example, scale.shape not in {(), value.shape}
        if example is None:
            family = self._sites[self._site_indices[weighted.data_input]].scheme.family
            scheme, rule, why = replace(ADDED_BIAS, family=family), BIAS_CORRECTION, ""
        else:
            scheme, rule, why = example.scheme, example.rule, example.why
            has_other_shape |= (example.axis is None) != (axis is None)
        if has_other_shape or (scale < SMALLEST_SCALE).any() or largest > scheme.type.limits()[1]:
            return None
        site = Site(
            tensor=new_bias, uses=(use,), graph=use.graph, scheme=scheme, axis=axis, rule=rule, why=why, parameter=True
        )
        return site, qparams_from_scale(scale, np.zeros(scale.shape, np.int32), scheme.type, axis=axis)


BIAS_CORRECTION: Final = "bias-correction"

MIN_BIAS_SAMPLES: Final = 2  # fewest samples for an estimate of the noise of a mean


@paused_gc()
def apply_bias_correction(edits: WeightEdits, samples: AlgorithmData) -> WeightEdits:
    """Give ops with quantized weights the bias that restores the mean of each output channel.

    Without rounding, nothing changes. The float function changes by the amount that compensates the rounding.
    """
    weighted_ops = list(find_weighted_ops(edits.model, edits.solution))
    reasons = {weighted.weight: weighted.no_bias_reason for weighted in weighted_ops if weighted.bias is None}
    usable = [weighted for weighted in weighted_ops if weighted.weight not in reasons]
    if not usable:  # no copy of the model
        skipped = (skipped_target(BIAS_CORRECTION, op.name, reasons[op.weight]) for op in weighted_ops)
        return replace(edits, results=(*edits.results, *skipped))
    store = BiasStore(edits)
    float_means, rounded_means = _isolated_means(edits, usable, samples)
    corrected_ops = []
    for weighted in usable:
        reason = _correct_bias(store, weighted, float_means, rounded_means)
        if reason:
            reasons[weighted.weight] = reason
        else:
            corrected_ops.append(weighted)
    for stage in _correction_stages(edits.model, corrected_ops):
        quantized_means = _quantized_model_means(
            replace(edits, model=store.model, solution=store.solution), stage, samples
        )
        for weighted in stage:
            _correct_bias(store, weighted, float_means, quantized_means)
    clones = find_weighted_clones(edits.model, edits.solution)
    for weighted in corrected_ops:
        for clone in clones.get((weighted.graph, weighted.op.name), ()):
            store.move_bias_of_clone(weighted, clone)
    results = [
        skipped_target(BIAS_CORRECTION, weighted.name, reasons[weighted.weight])
        if weighted.weight in reasons
        else AlgorithmResult(algorithm=BIAS_CORRECTION, target=weighted.name, detail=store.describe_change(weighted))
        for weighted in weighted_ops
    ]
    edits = replace(edits, original_biases=store.originals, results=(*edits.results, *results))
    return replace(edits, model=store.model, solution=store.solution)


SampleMeans = dict[TensorRef, "Array"]  # means of channels, (samples, C), by tensor


def _correct_bias(store: BiasStore, weighted: WeightedOp, float_means: SampleMeans, rounded_means: SampleMeans) -> str:
    """Shift one bias. Return the reason if that is impossible, else ""."""
    expected, measured = float_means.get(weighted.output), rounded_means.get(weighted.output)
    if expected is None or measured is None or len(expected) < MIN_BIAS_SAMPLES:
        return NOT_OBSERVED
    return store.move_bias(weighted, shrink_mean(expected - measured))


def shrink_mean(rows: Array) -> Array:
    """Shrink the mean of `rows`, float64 (samples, C), by the share that chance explains. Returns float64 (C,)."""
    mean = rows.mean(0)
    mean_variance = rows.var(0, ddof=1) / len(rows)
    power = np.square(mean)
    share = np.clip(1 - np.divide(mean_variance, power, out=np.ones_like(power), where=power > 0), 0, 1)
    return np.asarray(mean * share)


def _isolated_means(
    edits: WeightEdits, weighted_ops: Sequence[WeightedOp], samples: AlgorithmData
) -> tuple[SampleMeans, SampleMeans]:
    """Measure the output means of each op on float inputs: exact, and with rounded weights and input."""
    samples.create_runner(edits.prepared_model).free_session(observing=True)  # the weights need not be there twice
    model = edits.prepared_model.copy()
    rounded_ops: dict[tuple[str, str], str] = {}
    means: list[tuple[WeightedOp, ChannelMean, ChannelMean]] = []
    rounded_weights: dict[Use, TensorRef] = {}
    for weighted in weighted_ops:
        graph, op = model.graphs[weighted.graph], weighted.op
        if weighted.axes is None:
            continue
        name = graph.unique_name(f"{op.name}/rounded")
        rounded_op = replace(op, name=name, outputs=(replace(op.outputs[0], name=name),), source=None)
        float_output = add_channel_mean(model, graph, weighted.output, weighted.axes)
        rounded_output = add_channel_mean(model, graph, graph.add_op(rounded_op, graph.slots(op.name)), weighted.axes)
        rounded_ops[weighted.graph, op.name] = name
        if weighted.weight in edits.edited_weights:
            value = edits.edited_weights[weighted.weight]
            constant = add_constant(graph, f"{name}/weight", value, op_type="Const", rule=ALGORITHM_RULE)
            graph.set_source(weighted.weight._replace(op=name), constant)
            rounded_weights[weighted.weight] = constant
        means.append((weighted, float_output, rounded_output))
    plan, params = _restrict_to_rounded_ops(edits.solution, rounded_ops, rounded_weights)
    instrumented, _ = rewrite(model, plan, params, integer_cache=edits.integer_cache)
    rows = measure_channel_means(instrumented, [mean for _, *pair in means for mean in pair], samples)
    float_means = {weighted.output: rows[mean.tensor] for weighted, mean, _ in means if mean.tensor in rows}
    rounded_means = {weighted.output: rows[mean.tensor] for weighted, _, mean in means if mean.tensor in rows}
    return float_means, rounded_means


def _restrict_to_rounded_ops(
    solution: Solution, rounded_ops: Mapping[tuple[str, str], str], rounded_weights: Mapping[Use, TensorRef]
) -> tuple[Plan, dict[int, QParams | DynamicQParams]]:
    """Restrict a solution to the duplicated ops and the weights they read."""
    sites: list[Site] = []
    params: dict[int, QParams | DynamicQParams] = {}
    for index, site in enumerate(solution.plan.sites):
        uses_by_tensor: dict[TensorRef, list[Use]] = {}
        for use in site.uses if index in solution.params else ():
            if (use.graph, use.op) in rounded_ops:
                rounded_use = Use(use.graph, rounded_ops[use.graph, use.op], use.slot)
                uses_by_tensor.setdefault(rounded_weights.get(use, site.tensor), []).append(rounded_use)
        for tensor, uses in uses_by_tensor.items():
            params[len(sites)] = solution.params[index]
            # A rounded weight is in the graph of its op, where a body that captures the weight can read it.
            graph = site.graph if tensor == site.tensor else tensor.graph
            sites.append(replace(site, tensor=tensor, uses=tuple(uses), graph=graph, tie=(), clone_of=None))
    return replace(solution.plan, sites=tuple(sites), skips=()), params


def _correction_stages(model: Model, corrected_ops: Sequence[WeightedOp]) -> Iterator[list[WeightedOp]]:
    """Choose the ops to correct again: a level halfway through the graph with most weighted ops, then the last ops."""
    by_graph: dict[str, list[WeightedOp]] = {}
    for weighted in corrected_ops:
        by_graph.setdefault(weighted.graph, []).append(weighted)
    if not by_graph:
        return
    largest = max(by_graph.values(), key=len)
    graph, names = model.graphs[largest[0].graph], [weighted.op.name for weighted in largest]
    level_by_name, last_ops = dependency_levels(graph, names), set(final_ops(graph, names))
    middle_level = (max(level_by_name.values(), default=0) + 1) // 2
    middle_ops = {name for name, op_level in level_by_name.items() if op_level == middle_level}
    for stage in (middle_ops - last_ops, last_ops):
        chosen = [weighted for weighted in largest if weighted.op.name in stage]
        if chosen:
            yield chosen


def _quantized_model_means(edits: WeightEdits, stage: Sequence[WeightedOp], samples: AlgorithmData) -> SampleMeans:
    """Measure the output means of ops in the whole quantized model."""
    model = edits.model.copy()
    means = [
        add_channel_mean(model, model.graphs[weighted.graph], weighted.output, weighted.axes)
        for weighted in stage
        if weighted.axes is not None
    ]
    return measure_channel_means(replace(edits, model=model).quantized_model(), means, samples)
