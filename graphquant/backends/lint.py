"""Lint of quantized models: each kind of finding has a code, which docs/check.md explains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphquant.backends.findings import Backend, FindingLevel, LintFinding, RejectedModelError, Verdict
from graphquant.backends.requirements import QuantizationReader, QuantizedInput, same_quantization
from graphquant.errors import DataError
from graphquant.ir import (
    CONCATENATING_KINDS,
    DATA_MOVEMENT_KINDS,
    QUANTIZATION_KINDS,
    WEIGHTED_KINDS,
    Graph,
    Model,
    Op,
    TensorRef,
    Use,
    channel_axis,
)
from graphquant.numerics import SMALLEST_SCALE, Array, IntType, QParams
from graphquant.quantize import MIN_SHARED_STEPS, clip_limits, power_of_two_position, saturates_like_clip
from graphquant.quantize.limits import INT32_MAX
from graphquant.quantize.solver import OUTPUT_LIMITS

if TYPE_CHECKING:
    from graphquant.calibration.stats import Stats

_RELU_KINDS = frozenset({"relu", "relu6"})

JudgeOps = Callable[[Model], tuple[Verdict, ...]]


class LintCode(NamedTuple):
    """A kind of finding: its level and general description."""

    level: FindingLevel
    description: str


LINT_CODES = {
    "GQ101": LintCode(
        "warning", "the output of a Relu is quantized symmetrically, and half of the integers are never used"
    ),
    "GQ102": LintCode("warning", "a convolution or matrix product has quantized inputs and still runs in float"),
    "GQ103": LintCode("warning", "a data-movement op has different scales before and after it"),
    "GQ104": LintCode("error", "a bias does not fit into int32 at its scale"),
    "GQ105": LintCode("warning", "ranges with a common scale differ, and one of them spans few integers"),
    "GQ106": LintCode("error", "a scale is zero, negative, not finite, or too small for kernels"),
    "GQ107": LintCode(
        "warning", "a quantization never receives data: nothing reads it, or no graph or sample reaches it"
    ),
    "GQ108": LintCode("warning", "a graph input is quantized, and all ops that read it run in float"),
    "GQ109": LintCode("error", "the backend cannot load the model"),
    "GQ110": LintCode("warning", "the scale of an int32 bias is not input times weight"),
    "GQ111": LintCode("error", "the scales of a weight are not along its output channels"),
    "GQ112": LintCode("warning", "a Q/DQ pair prevents the fusion of two ops"),
    "GQ113": LintCode("note", "an op runs on integers and would be faster in float"),
    "GQ114": LintCode("error", "the installed runtime computes an integer op wrong on this CPU"),
    "GQ115": LintCode("error", "the scales or zero points of a quantization do not fit the shape of its tensor"),
}
"""All codes."""

MIN_CHANNEL_STEPS = 4  # minimum number of integers between the smallest and largest value of a weight channel
MAX_UNUSED_SHARE = 0.25  # share of integers below zero from which the output of a Relu counts as symmetric
BIAS_SCALE_TOLERANCE = 0.01  # maximum relative error of the scale of a bias
INT32_BITS = 32

Problem = tuple[str, str, str]
"""Code, message and fix of a finding."""

VerdictsByOp = dict[tuple[str, str], Verdict]
"""Verdicts by graph and op."""


@dataclass(frozen=True, kw_only=True)
class LintContext:
    """Model and verdicts that the checks read."""

    quantizations: QuantizationReader
    backend: Backend | None
    verdicts: VerdictsByOp  # verdicts of the backend, by graph and op
    joined_verdicts: VerdictsByOp  # verdicts of the backend if no Q/DQ pair separated ops that it could fuse

    @cached_property
    def channel_scaled_kinds(self) -> frozenset[str]:
        """Kinds of ops with a weight that has a scale for each channel."""
        return frozenset(
            op.kind
            for graph, op in self.quantizations.model.reachable_ops()
            if op.kind in WEIGHTED_KINDS
            for side in self.quantizations.inputs(graph, op)
            if side.role == "weight" and side.params and side.params.axis is not None
        )

    @cached_property
    def accepts_zero_points(self) -> bool:
        """True if the backend does; without one, if the model has a zero point, as the target is unknown."""
        if self.backend is not None:
            return not self.backend.symmetric
        all_params = (
            self.quantizations.params(graph.name, op.name)
            for graph, op in self.quantizations.model.reachable_ops()
            if op.kind in QUANTIZATION_KINDS
        )
        return any(params is not None and params.zero_point.any() for params in all_params)


def lint_model(
    model: Model, backend: Backend | None, judge: JudgeOps, stats: Stats | None = None
) -> tuple[tuple[Verdict, ...], tuple[LintFinding, ...]]:
    """Return the verdicts of a backend, and the findings by code and then in the order of the model.

    `judge` returns the verdicts of the backend. `stats` are those of the model before it was quantized, if available.
    Raises a DataError if the statistics contain none of the quantized tensors, and a ModelError if a weight cannot be
    read.
    """
    quantizations, findings = QuantizationReader(model), list[LintFinding]()
    try:
        verdicts = judge(model)
    except RejectedModelError as error:
        verdicts = ()
        findings.append(LintFinding("GQ109", *error.op_key, str(error), error.fix))
    joined_verdicts = _verdicts_without_pairs(quantizations, backend, judge)
    by_op, joined_by_op = (
        {(verdict.graph, verdict.op): verdict for verdict in each} for each in (verdicts, joined_verdicts)
    )
    context = LintContext(quantizations=quantizations, backend=backend, verdicts=by_op, joined_verdicts=joined_by_op)
    for graph, op in model.reachable_ops():
        for check in _LINT_CHECKS:
            problems = check(context, graph, op)
            findings += (LintFinding(code, graph.name, op.name, message, fix) for code, message, fix in problems)
    findings += _check_uncalled_functions(model)
    findings += [] if stats is None else _check_unobserved_tensors(quantizations, stats)
    return verdicts, tuple(sorted(findings, key=lambda finding: finding.code))


def _check_symmetric_relu(context: LintContext, graph: Graph, op: Op) -> Iterator[Problem]:
    if op.kind not in _RELU_KINDS or not context.accepts_zero_points:
        return
    for quantize_op, params in context.quantizations.outputs(graph, op)[0]:
        if params is None or not isinstance(params.type, IntType):
            continue
        low, high = params.type.limits(narrow=params.narrow)
        unused_share = (float(np.max(params.zero_point)) - low) / (high - low)
        if unused_share >= MAX_UNUSED_SHARE and not _shares_range(context.quantizations, graph, quantize_op, params):
            message = (
                f"{quantize_op.name} gives {unused_share:.0%} of its integers to values below 0, which a {op.type}"
            )
            yield "GQ101", f"{message} never has", "quantize it asymmetrically, with the smallest integer for 0"


def _shares_range(quantizations: QuantizationReader, graph: Graph, quantize_op: Op, params: QParams) -> bool:
    """Return True if a quantized tensor is concatenated with one of the same range that may have negative values."""
    pending = [(graph, quantize_op)] if quantize_op.name in graph else []
    for home, op in pending:
        readers = [reader for port in range(len(op.outputs)) for reader in quantizations.readers(home, op, port)]
        for use, reader in readers:
            home_of_reader = quantizations.model.graphs[use.graph]
            if reader.kind in CONCATENATING_KINDS:
                others = [side for side in quantizations.inputs(home_of_reader, reader) if side.slot != use.slot]
                if any(
                    same_quantization(side.params, params)
                    and quantizations.model.op(side.source).kind not in _RELU_KINDS
                    for side in others
                ):
                    return True
            elif reader.kind in DATA_MOVEMENT_KINDS | {"dequantize"} or same_quantization(
                quantizations.params(use.graph, reader.name) if reader.kind in QUANTIZATION_KINDS else None, params
            ):
                pending += [(home_of_reader, reader)] if (home_of_reader, reader) not in pending else []
    return False


def _check_weighted_op(context: LintContext, graph: Graph, op: Op) -> Iterator[Problem]:
    """Yield a finding if an op is float in spite of quantized inputs, or if the backend refuses the model."""
    verdict = context.verdicts.get((graph.name, op.name))
    if verdict is None or verdict.broken_rule is None:
        return
    broken_rule = verdict.broken_rule
    if broken_rule.rule == "refused":
        yield "GQ109", broken_rule.message, broken_rule.fix
    elif op.kind in WEIGHTED_KINDS:
        op_inputs = context.quantizations.inputs(graph, op)
        quantizable_inputs = [side for side in op_inputs if side.role != "bias"]
        if quantizable_inputs and all(side.dequantize_op for side in quantizable_inputs):
            yield "GQ102", f"its inputs are quantized, and it runs in float: {broken_rule.message}", broken_rule.fix


def _fusable_activation(
    quantizations: QuantizationReader, backend: Backend | None, graph: Graph, op: Op
) -> tuple[Use, Op] | None:
    """Return the activation that an op could fuse if no Q/DQ pair were between them, and its use of the pair."""
    fusable_kinds = None if backend is None else backend.fuses.get(op.kind)
    pairs, float_uses = quantizations.outputs(graph, op) if fusable_kinds else ([], [])
    if fusable_kinds is None or len(pairs) != 1 or float_uses:
        return None
    dequantize_ops = [pairs[0][0]]
    if dequantize_ops[0].kind == "quantize":
        dequantize_ops = [reader for _, reader in quantizations.readers(graph, dequantize_ops[0])]
    inner_ops = (dequantize_op for dequantize_op in dequantize_ops if dequantize_op.name in graph)
    readers = [reader_use for inner_op in inner_ops for reader_use in quantizations.readers(graph, inner_op)]
    return readers[0] if len(readers) == 1 and readers[0][1].kind in fusable_kinds and readers[0][0].slot == 0 else None


def _verdicts_without_pairs(
    quantizations: QuantizationReader, backend: Backend | None, judge: JudgeOps
) -> tuple[Verdict, ...]:
    """Return the verdicts on the model without any such pair; none if it has no such pair."""
    edited: Model | None = None
    for graph, op in quantizations.model.reachable_ops() if backend is not None else ():
        activation = _fusable_activation(quantizations, backend, graph, op)
        if activation is not None:
            edited = edited or quantizations.model.copy()
            _remove_pair(edited, activation[0], TensorRef(graph.name, op.name))
    try:
        return () if edited is None else judge(edited)
    except RejectedModelError:
        return ()


def _remove_pair(model: Model, use: Use, tensor: TensorRef) -> None:
    """Connect `use` to `tensor`, and remove the ops in between that nothing else reads."""
    current = model.graphs[use.graph].source_of(use)
    model.graphs[use.graph].set_source(use, tensor)
    while current is not None and current != tensor and not model.graphs[current.graph].consumers_by_port(current.op):
        graph = model.graphs[current.graph]
        previous = next(iter(graph.slots(current.op)), None)
        graph.remove_op(current.op)
        current = previous


def _check_blocked_fusion(context: LintContext, graph: Graph, op: Op) -> Iterator[Problem]:
    """Yield a finding if a Q/DQ pair prevents the fusion of an op with its activation on integers."""
    activation = _fusable_activation(context.quantizations, context.backend, graph, op)
    if activation is None or _is_unfusable_clip(context, graph, activation[1]):
        return
    keys = (graph.name, op.name), (activation[0].graph, activation[1].name)
    verdicts = map(context.joined_verdicts.get, keys)
    if all(verdict is not None and verdict.status != "float" for verdict in verdicts):
        message = f"a Q/DQ pair prevents its fusion with {activation[1].name} ({activation[1].type})"
        yield "GQ112", message, f"quantize only after {activation[1].name}"


def _is_unfusable_clip(context: LintContext, graph: Graph, op: Op) -> bool:
    """Return whether a Relu or Clip cannot be fused because the integer range after it does not end at its limits."""
    limits = clip_limits(context.quantizations.model, context.quantizations.parameters, TensorRef(graph.name, op.name))
    all_params = [params for _, params in context.quantizations.outputs(graph, op)[0] if params is not None]
    return limits is not None and any(
        params.scale.ndim == 0 and not saturates_like_clip(params, limits) for params in all_params
    )


def _check_integer_kernel(context: LintContext, graph: Graph, op: Op) -> Iterator[Problem]:
    verdict = context.verdicts.get((graph.name, op.name))
    if verdict is not None and verdict.note:
        yield "GQ113", verdict.note, "keep it in float"
    if verdict is not None and verdict.fault:
        yield "GQ114", verdict.fault, "install a newer release of the runtime, or keep the op in float"


def _check_data_movement(context: LintContext, graph: Graph, op: Op) -> Iterator[Problem]:
    ties_concat = context.backend is not None and context.backend.ties_concat
    if op.kind not in DATA_MOVEMENT_KINDS and not (op.kind == "concat" and ties_concat):
        return
    input_params = [side.params for side in context.quantizations.inputs(graph, op) if side.params is not None]
    output_params = [params for _, params in context.quantizations.outputs(graph, op)[0] if params is not None]
    all_params = [*input_params, *output_params]
    differ = any(not same_quantization(all_params[0], params) for params in all_params[1:])
    if input_params and output_params and differ:
        scales = ", ".join(dict.fromkeys(map(_format_params, all_params)))
        fix = "use one scale and zero point for input and output"
        yield "GQ103", f"its inputs and outputs have the scales {scales}", fix


def _format_params(params: QParams) -> str:
    scales, zero_points = np.unique(params.scale), np.unique(params.zero_point)
    scale_text = f"{scales[0]:.4g}" if scales.size == 1 else f"{scales[0]:.4g}..{scales[-1]:.4g}"
    return f"{scale_text} (zero point {zero_points[0]})" if zero_points.size == 1 else scale_text


def _check_bias(context: LintContext, graph: Graph, op: Op) -> Iterator[Problem]:
    """Yield a finding if a bias does not fit into int32 or has a scale of its own."""
    if op.kind not in WEIGHTED_KINDS or (context.backend is not None and context.backend.bias_type != "int32"):
        return
    by_role = {side.role: side for side in context.quantizations.inputs(graph, op)}
    data, weight, bias = (by_role.get(role) for role in ("input", "weight", "bias"))
    if data is None or weight is None or bias is None or data.params is None or weight.params is None:
        return
    expected_scale = data.params.scale.astype(np.float64) * weight.params.scale.astype(np.float64).reshape(-1)
    if bias.dequantize_op:
        yield from _check_quantized_bias(context, bias, expected_scale)
    elif bias.parameter:
        value = context.quantizations.parameters.value(bias.source)
        if value is not None and value.ndim == 1 and expected_scale.size in {1, value.size}:
            steps = np.abs(value.astype(np.float64) / expected_scale)
            if steps.max(initial=0) > INT32_MAX:
                yield _bias_overflow(bias, int(steps.argmax()))


def _check_quantized_bias(context: LintContext, bias: QuantizedInput, expected_scale: Array) -> Iterator[Problem]:
    value = context.quantizations.parameters.value(bias.source)
    if value is not None and value.dtype == np.int32 and value.size:
        magnitudes = np.abs(value.astype(np.int64))
        if magnitudes.max() >= INT32_MAX:
            yield _bias_overflow(bias, int(magnitudes.argmax()))
    # Backends that add narrower biases, such as those for AMD's DPU, shift them from a scale of their own.
    is_int32 = bias.params is not None and bias.params.type.bits == INT32_BITS
    if bias.params is None or not is_int32 or bias.params.scale.size not in {1, expected_scale.size}:
        return
    deviation = np.abs(bias.params.scale.astype(np.float64).reshape(-1) / expected_scale - 1)
    if deviation.max(initial=0) > BIAS_SCALE_TOLERANCE:
        message = f"the scale of its bias {bias.source} differs by up to {deviation.max():.0%} from input times weight"
        yield "GQ110", message, "requantize the bias; duplicate it if ops with other scales share it"


def _bias_overflow(bias: QuantizedInput, element: int) -> Problem:
    message = f"its bias {bias.source} does not fit into int32 at element {element}"
    return "GQ104", message, "use a larger scale for its weight or input, or keep the op in float"


def _check_concat_ranges(context: LintContext, graph: Graph, op: Op) -> Iterator[Problem]:
    """Yield findings about inputs of a Concat whose range is small compared with its output."""
    if op.kind != "concat":
        return
    output_params = [params for _, params in context.quantizations.outputs(graph, op)[0] if params is not None]
    if not output_params:
        return
    step = float(np.max(output_params[0].scale))
    for side in context.quantizations.inputs(graph, op):
        span = _known_value_span(context, side)
        if span is not None and 0 < span / step < MIN_SHARED_STEPS:
            message = f"its input {side.source} spans {span:.4g}, which is {span / step:.1f} steps of its output"
            fix = "quantize each input of the Concat separately, or make this input a model output of its own"
            yield "GQ105", message, fix


def _known_value_span(context: LintContext, side: QuantizedInput) -> float | None:
    """Return an upper bound of the span of the values of a tensor, or None if it is unknown."""
    producer = context.quantizations.model.op(context.quantizations.look_through(side.source))
    known_range = OUTPUT_LIMITS.get(producer.kind)
    spans = [] if known_range is None else [known_range[1] - known_range[0]]
    if side.params is not None:
        spans.append(float(np.max(side.params.range.high - side.params.range.low)))
    return min(spans, default=None)


def _check_weight_scales(context: LintContext, graph: Graph, op: Op) -> Iterator[Problem]:
    """Yield findings about weights with scales along the wrong axis or too coarse a scale for a channel."""
    if op.kind not in WEIGHTED_KINDS or op.channel_axis is None:
        return
    for side in context.quantizations.inputs(graph, op):
        params = side.params
        if side.role != "weight" or params is None or not side.parameter or params.block is not None:
            continue
        shape = context.quantizations.parameters.shape(side.source)
        axis = op.channel_axis if shape is None else channel_axis(op, shape)
        if params.axis is not None and axis is not None and min(axis, params.axis) >= 0 and params.axis != axis:
            message = f"its weight {side.source} has scales along axis {params.axis}, but its output channels are axis"
            yield "GQ111", f"{message} {axis}", f"use axis {axis}"
        elif params.axis is None and not _takes_one_scale(context, op, params):
            yield from _check_narrow_channels(context, op, side, params)


def _takes_one_scale(context: LintContext, op: Op, params: QParams) -> bool:
    """Return whether the target takes one scale for a weight; without a backend, the weights of the model show it."""
    if context.backend is not None:
        return op.kind in context.backend.per_tensor_kinds
    kinds = context.channel_scaled_kinds
    return power_of_two_position(params) is not None or (bool(kinds) and op.kind not in kinds)


def _check_narrow_channels(context: LintContext, op: Op, side: QuantizedInput, params: QParams) -> Iterator[Problem]:
    value = context.quantizations.parameters.value(side.source)
    axis = None if value is None else channel_axis(op, value.shape)
    if value is None or axis is None or not value.size or value.dtype.kind in "OSU":
        return
    reduced_axes = tuple(dimension for dimension in range(value.ndim) if dimension != axis)
    steps = np.ptp(value.astype(np.float64), axis=reduced_axes)
    if value.dtype.kind == "f":
        steps = steps / float(params.scale)
    narrow_channels = np.flatnonzero((steps > 0) & (steps < MIN_CHANNEL_STEPS)) if steps.size > 1 else np.empty(0)
    if narrow_channels.size:
        message = f"{narrow_channels.size} of {steps.size} channels of its weight {side.source} span fewer than"
        yield "GQ105", f"{message} {MIN_CHANNEL_STEPS + 1} integers", "quantize the weight per channel"


def _check_scale_value(context: LintContext, graph: Graph, op: Op) -> Iterator[Problem]:
    if op.kind not in {"quantize", "dequantize"} or op.role(1) != "scale":  # TensorFlow's ops have limits instead
        return
    tensors = [*graph.slots(op.name), None, None, None][1:3]  # a damaged op may have no scale
    value, zero = (None if tensor is None else context.quantizations.parameters.value(tensor) for tensor in tensors)
    if value is None or not value.size or value.dtype.kind in "OSU":
        return
    scales = value.astype(np.float64)
    bad = ~np.isfinite(scales) | (scales < SMALLEST_SCALE)
    quantized_source = context.quantizations.quantized_source(TensorRef(graph.name, op.name))
    is_computed = op.kind == "dequantize" and context.quantizations.model.op(quantized_source).kind != "constant"
    if bad.any() and not is_computed:
        message = f"its scale {tensors[0]} is {scales.reshape(-1)[bad.reshape(-1).argmax()]:g}"
        yield "GQ106", message, "calibrate again, or keep this tensor in float"
    has_constants = zero is not None or tensors[1] is None
    if not bad.any() and has_constants and context.quantizations.params(graph.name, op.name) is None:
        message = f"its scales of shape {value.shape} or its zero points do not fit its tensor"
        yield "GQ115", message, "use an axis of the tensor, and as many scales and zero points as it has elements there"


def _check_unused_quantization(context: LintContext, graph: Graph, op: Op) -> Iterator[Problem]:
    """Yield findings about quantizations that nothing reads, and quantized inputs that are only read in float."""
    if op.kind in QUANTIZATION_KINDS and not graph.consumers_by_port(op.name):
        yield "GQ107", "nothing reads it", "remove it"
    if op.kind != "input" or context.backend is None or graph.parent is not None:
        return
    quantizations, graphs = context.quantizations, context.quantizations.model.graphs
    reader_keys: list[tuple[str, str]] = []
    for use, reader in quantizations.readers(graph, op):
        if reader.kind != "quantize":
            return
        for inner_use, dequantize_op in quantizations.readers(graphs[use.graph], reader):
            if dequantize_op.kind != "dequantize":
                return
            end_uses = quantizations.readers(graphs[inner_use.graph], dequantize_op)
            reader_keys += [(end_use.graph, end_use.op) for end_use, _ in end_uses]
    verdicts = [context.verdicts.get(key) for key in reader_keys]
    if verdicts and all(verdict is not None and verdict.status == "float" for verdict in verdicts):
        names = ", ".join(sorted({op for _, op in reader_keys}))
        message = f"it is quantized, and all ops that read it run in float: {names}"
        yield "GQ108", message, "keep this input in float, or quantize its readers"


def _check_uncalled_functions(model: Model) -> Iterator[LintFinding]:
    """Yield findings about quantizations in functions that nothing calls."""
    # Python code calls the functions of a SavedModel's objects.
    live = set(model.graphs_reachable_from((*model.entry_graphs, *model.saved_functions)))
    for name, graph in model.graphs.items():
        quantization_ops = [] if name in live else [op for op in graph.ops() if op.kind in QUANTIZATION_KINDS]
        if quantization_ops:
            kinds = Counter(op.type for op in quantization_ops)
            counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            message = f"nothing calls its graph, which has {counted}"
            yield LintFinding("GQ107", name, quantization_ops[0].name, message, "remove the function")


def _check_unobserved_tensors(quantizations: QuantizationReader, stats: Stats) -> list[LintFinding]:
    """Return findings about quantized tensors that no sample reached."""
    findings, any_matched = [], False
    for graph, op in quantizations.model.reachable_ops():
        tensor = next(iter(graph.slots(op.name)), None)
        if op.kind not in {"quantize", "qdq"} or tensor is None:
            continue
        observable = [ref for ref in (tensor, quantizations.look_through(tensor)) if ref in stats.targets]
        any_matched = any_matched or bool(observable)
        if observable and not any(ref in stats.sketches and stats.sketches[ref].count for ref in observable):
            fix = "calibrate with data that reaches it, or keep it in float"
            message = f"no calibration sample reached {observable[0]}"
            findings.append(LintFinding("GQ107", graph.name, op.name, message, fix))
    if not any_matched:
        path = quantizations.model.path or "the model"
        message = f"The statistics contain none of the tensors that {path} quantizes."
        raise DataError(f"{message} Use the statistics of the model that it was quantized from.")
    return findings


_LINT_CHECKS: tuple[Callable[[LintContext, Graph, Op], Iterator[Problem]], ...] = (
    *(_check_symmetric_relu, _check_weighted_op, _check_data_movement, _check_bias, _check_concat_ranges),
    *(_check_weight_scales, _check_scale_value, _check_unused_quantization, _check_blocked_fusion),
    _check_integer_kernel,
)
