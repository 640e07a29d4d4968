"""Compare a converted model with its plan: each planned scale and zero point, and the ops that stayed float."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.calibration.targets import fingerprints
from graphquant.ir import (
    BIAS_ADD_KINDS,
    BOUNDED_KINDS,
    COMMUTATIVE_KINDS,
    CONCATENATING_KINDS,
    FORWARDING_KINDS,
    NON_COMPUTE_KINDS,
    STORED_KINDS,
    VALUE_MOVING_KINDS,
    WEIGHTED_KINDS,
    Graph,
    Model,
    Op,
    Output,
    Parameters,
    TensorRef,
    Use,
    connected_groups,
)
from graphquant.numerics import Array, DynamicQParams, QParams, dequantize, quantize
from graphquant.quantize import iterate_equivalent_tensors, match_tensor_names, may_have_same_size
from graphquant.utils import HtmlRepresentation

if TYPE_CHECKING:
    from graphquant.analysis.validation import Validation
    from graphquant.formats.tensorflow.tflite_converter import RuntimeTensor
    from graphquant.quantize.rewrite import InsertedPair

SCALE_TOLERANCE = 1e-6  # relative tolerance for scales that are not powers of two: the range passed through float32

CONVERTER_RANGE = 1e-6  # width of the smallest range in the files of the converter


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedTensor:
    """A planned tensor and its counterpart in the converted model."""

    tensor: TensorRef  # the tensor in the model
    name: str  # its name in the converted model, "" if it is absent
    index: int | None  # its index in the converted model, None if it is absent
    planned: tuple[Array, Array] | None  # scale and zero point of the plan, None if the range is computed at each run
    runtime: tuple[Array, Array] | None  # scale and zero point of the runtime, None if it has none
    problem: str  # the difference, "" if there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatOp:
    """A float op of the converted model, with the reason."""

    op: str
    type: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConversionReport(HtmlRepresentation):
    """The result of comparing a converted model with its plan."""

    tensors: tuple[ConvertedTensor, ...]  # one entry for each planned tensor
    float_ops: tuple[FloatOp, ...]  # the ops that stayed float
    op_count: int  # the number of ops that compute something
    validation: Validation | None = None  # errors of the file on the hold-out, None if they were not measured
    time_ratio: float | None = None  # time of a run relative to the float model's file, None if it was not measured
    warnings: tuple[str, ...] = ()  # outputs with at least twice the error of the plan's pairs, BatchNorms to fold
    failures: tuple[str, ...] = ()  # bounds that the file misses, and reasons why it is not usable

    @property
    def agrees(self) -> bool:
        """True if every planned tensor has its scale and zero point."""
        return not any(line.problem for line in self.tensors)


@dataclass(frozen=True, slots=True, eq=False)
class _StoredTensor:
    """A quantized tensor of the converted model."""

    output: Output
    runtime: RuntimeTensor | None  # the report of the runtime, None if it removed the tensor
    axis: int | None = None  # the channel axis of the op that reads it as a weight


def compare_conversion(
    model: Model, inserted: Sequence[InsertedPair], converted: Model, runtime: Sequence[RuntimeTensor]
) -> ConversionReport:
    """Compare the plan of the rewritten `model` with the runtime's report of each tensor of the converted model.

    The converter renames tensors, merges equal ones, and removes those that another op computes. A tensor without a
    counterpart of its name therefore matches if an unclaimed one of its size has exactly its scale and zero point, or
    if an equal tensor matches. A weight also matches if the model has its rounded values as floats.
    """
    activations, stored_constants = _stored_tensors(converted, runtime)
    constants: dict[str, _StoredTensor] = {}
    for stored in stored_constants:
        for op in stored.output.name.split(";"):  # the converter joins the names of merged tensors
            constants.setdefault(op, stored)
    names_by_tensor = match_tensor_names(
        model, {name: stored.output for name, stored in activations.items()}, {tensor.name for tensor in runtime}
    )
    callers = model.callers()
    matches: list[_StoredTensor | None] = []
    for insertion in inserted:
        if insertion.site.parameter:
            # The constant is named after the last inserted op, or the one before it.
            graph, output_op = model.graphs[insertion.output.graph], insertion.output.op
            ops = [output_op, *(slot.op for slot in graph.slots(output_op) if slot is not None)]
            matches.append(next((constants[op] for op in ops if op in constants), None))
        else:
            equivalents = iterate_equivalent_tensors(model, callers, insertion.site.tensor)
            name = next((names_by_tensor[ref] for ref in equivalents if ref in names_by_tensor), None)
            matches.append(None if name is None else activations[name])
    claimed = set(matches)
    unclaimed = [stored for stored in (*activations.values(), *stored_constants) if stored not in claimed]
    for index, insertion in enumerate(inserted):
        match = matches[index]
        # A tensor that is passed on may have another range behind it, as the inputs of a branch. TFLite fixes the
        # range of a Sigmoid, Softmax or Tanh, and the converter rescales its result to a planned one.
        is_passed_on = not insertion.site.parameter and insertion.site.tensor not in names_by_tensor
        is_rescaled = model.op(insertion.site.tensor).kind in BOUNDED_KINDS
        if match is None or ((is_passed_on or is_rescaled) and not _is_renamed(model, insertion, match)):
            matches[index] = next((stored for stored in unclaimed if _is_renamed(model, insertion, stored)), match)
    lines = [_compare_tensor(insertion, stored) for insertion, stored in zip(inserted, matches, strict=True)]
    _accept_rounded_floats(model, inserted, converted, lines)
    lines = list(_with_equal_tensors(model, inserted, lines))
    _accept_folded_constants(model, inserted, converted, lines)
    graphs = converted.graphs.values()
    op_count = sum(op.kind not in NON_COMPUTE_KINDS for graph in graphs for op in graph.ops())
    float_ops = tuple(float_op for graph in graphs for float_op in _find_float_ops(graph))
    return ConversionReport(tensors=tuple(lines), float_ops=float_ops, op_count=op_count)


def _accept_rounded_floats(
    model: Model, inserted: Sequence[InsertedPair], converted: Model, lines: list[ConvertedTensor]
) -> None:
    """Let a weight agree if the converted model has its rounded values: as floats, or with finer scales.

    Float values are those of ops that stay float. If several dense layers read a weight, the converter gives it a scale
    per channel.
    """
    parameters = Parameters(model)
    constants = list(_real_constants(converted, {line.name for line in lines}))
    for index, (insertion, line) in enumerate(zip(inserted, lines, strict=True)):
        if insertion.site.parameter and line.index is None and isinstance(insertion.params, QParams):
            if (value := parameters.value(insertion.site.tensor)) is None:
                continue
            rounded = np.sort(dequantize(quantize(value, insertion.params), insertion.params), axis=None)
            for output, values, scale in constants:
                is_finer = scale <= float(np.max(insertion.params.scale)) * (1 + SCALE_TOLERANCE)
                if not is_finer or values.size != rounded.size:
                    continue
                if np.allclose(values, rounded, rtol=SCALE_TOLERANCE, atol=scale / 2):
                    lines[index] = replace(line, name=output.name, problem="")


def _real_constants(converted: Model, matched: Collection[str]) -> Iterator[tuple[Output, Array, float]]:
    """Yield float constants, and int8 and int16 ones not in `matched`: sorted values, and the largest scale or 0."""
    for graph in converted.graphs.values():
        for op in graph.ops():
            if op.kind not in STORED_KINDS or op.read_value is None:
                continue
            output, values = op.outputs[0], np.asarray(op.read_value())
            stored = output.quantization
            if output.dtype == "float32":
                yield output, np.sort(values, axis=None), 0.0
            elif output.dtype in {"int8", "int16"} and stored and stored.scale.size and output.name not in matched:
                shape = [-1 if axis == stored.axis else 1 for axis in range(values.ndim)]
                scales, zeros = (
                    part.reshape(shape if part.size > 1 else ()) for part in (stored.scale, stored.zero_point)
                )
                yield output, np.sort((values.astype(np.float64) - zeros) * scales, axis=None), float(scales.max())


def _accept_folded_constants(
    model: Model, inserted: Sequence[InsertedPair], converted: Model, lines: list[ConvertedTensor]
) -> None:
    """Let a constant agree that is nowhere in the converted model, if the planned tensors computed from it agree.

    HARD_SWISH contains its constants, and the converter removes an addition of zeros.
    """
    parameters = Parameters(model)
    agreeing = {line.tensor: not line.problem for line in lines if line.index is not None}
    matched = {line.name for line in lines}
    bounds = [
        (values[0], values[-1], scale or SCALE_TOLERANCE * np.abs(values).max())
        for output, values, scale in _real_constants(converted, matched)
        if values.size and output.name not in matched
    ]
    for index, (insertion, line) in enumerate(zip(inserted, lines, strict=True)):
        is_absent = insertion.site.parameter and line.index is None and line.planned is not None and line.problem
        value = parameters.value(insertion.site.tensor) if is_absent else None
        if value is None or not value.size:
            continue
        is_stored = any(
            abs(value.min() - low) <= tolerance and abs(value.max() - high) <= tolerance
            for low, high, tolerance in bounds
        )
        if not is_stored and _results_agree(model, insertion, agreeing):
            lines[index] = replace(line, problem="")


def _results_agree(model: Model, insertion: InsertedPair, agreeing: Mapping[TensorRef, bool]) -> bool:
    """Return True if the planned activations computed from a constant agree, which is no weight of a product."""
    pending, visited = [TensorRef(use.graph, use.op) for use in insertion.site.uses], set[TensorRef]()
    while pending:
        tensor = pending.pop()
        if tensor in visited:
            continue
        visited.add(tensor)
        op, readers = model.op(tensor), model.graphs[tensor.graph].consumers(tensor)
        if op.kind in WEIGHTED_KINDS or len(op.outputs) > 1 or not agreeing.get(tensor, bool(readers)):
            return False
        if tensor not in agreeing:
            pending += [TensorRef(use.graph, use.op) for use in readers]
    return True


def _stored_tensors(
    converted: Model, runtime: Sequence[RuntimeTensor]
) -> tuple[dict[str, _StoredTensor], list[_StoredTensor]]:
    """Return the quantized activations of the converted model by name, and its quantized constants."""
    runtime_by_index = {(tensor.graph, tensor.index): tensor for tensor in runtime}
    activations: dict[str, _StoredTensor] = {}
    constants: list[_StoredTensor] = []
    for graph_index, graph in enumerate(converted.graphs.values()):
        for op in graph.ops():
            for port, output in enumerate(op.outputs):
                if output.quantization is None or not output.quantization.scale.size:
                    continue
                runtime_tensor = runtime_by_index.get((graph_index, output.quantization.index))
                if op.kind in STORED_KINDS:
                    readers = [(use, graph.op(use.op)) for use in graph.consumers(TensorRef(graph.name, op.name, port))]
                    axes = (reader.channel_axis for use, reader in readers if reader.role(use.slot) == "weight")
                    constants.append(_StoredTensor(output, runtime_tensor, next(axes, None)))
                # Only inputs and outputs of the file are uint8. The int8 tensors beside them have the planned scales.
                elif output.dtype != "uint8":
                    activations.setdefault(output.name, _StoredTensor(output, runtime_tensor))
    return activations, constants


def _is_renamed(model: Model, insertion: InsertedPair, stored: _StoredTensor) -> bool:
    """Return True if a tensor of the converted model has the size and exactly the numbers of a planned one."""
    if isinstance(insertion.params, DynamicQParams) or stored.runtime is None:
        return False
    shapes = model.output(insertion.site.tensor).shape, stored.output.shape
    return may_have_same_size(*shapes, first_axis=int(not insertion.site.parameter)) and not _describe_difference(
        _planned_numbers(insertion.params), stored.runtime, None
    )


def _with_equal_tensors(
    model: Model, inserted: Sequence[InsertedPair], lines: Sequence[ConvertedTensor]
) -> Iterator[ConvertedTensor]:
    """Yield the lines; an absent tensor has the counterpart of a tensor of the same values and numbers.

    Such a tensor is moved from or to it, or is the result of an equal op. The converter fuses pads, transposes and
    reshapes into other ops, and keeps only one of equal ops.
    """
    positions = {insertion.site.tensor: index for index, insertion in enumerate(inserted)}
    parameters, live = Parameters(model), set(model.reachable_graphs())
    pairs = [
        (index, positions[equal])
        for index, insertion in enumerate(inserted)
        for equal in _equal_tensors(model, parameters, insertion.site.tensor)
        if equal in positions
    ]
    contents: dict[str, int] = {}
    for tensor, content in fingerprints(model, (tensor for tensor in positions if tensor.graph in live)).items():
        pairs.append((positions[tensor], contents.setdefault(content, positions[tensor])))
    edges = [(one, other) for one, other in pairs if _have_equal_numbers(lines[one], lines[other])]
    counterparts: dict[int, ConvertedTensor] = {}
    for group in connected_groups(range(len(lines)), edges):
        matching = next((lines[index] for index in group if not lines[index].problem), None)
        if matching is not None:
            counterparts.update(dict.fromkeys(group, matching))
    for index, line in enumerate(lines):
        counterpart = counterparts.get(index)
        if line.index is None and counterpart is not None:
            yield replace(line, name=counterpart.name, index=counterpart.index, runtime=counterpart.runtime, problem="")
        else:
            yield line


def _have_equal_numbers(first: ConvertedTensor, second: ConvertedTensor) -> bool:
    """Return True if two tensors have the same planned scales and zero points."""
    if first.planned is None or second.planned is None:
        return False
    return all(np.array_equal(one, other) for one, other in zip(first.planned, second.planned, strict=True))


def _equal_tensors(model: Model, parameters: Parameters, tensor: TensorRef) -> Iterator[TensorRef]:
    """Yield the tensors whose values an op moves into `tensor`, or keeps."""
    graph, op = model.graphs[tensor.graph], model.op(tensor)

    def unquantized(source: TensorRef | None) -> TensorRef | None:
        while source is not None and source.graph == graph.name and graph.op(source.op).kind in _PASSED_KINDS:
            source = graph.source_of(Use(graph.name, source.op, 0))
        return source

    sources = [unquantized(slot) for slot in graph.slots(op.name)]
    if op.kind in VALUE_MOVING_KINDS | FORWARDING_KINDS | {"pad"}:
        yield from (source for source in sources if source is not None)
    elif op.kind in _NEUTRAL_VALUES and len(sources) == len(("operand", "constant")):
        yield from _unchanged_operands(op, sources, parameters)


def _unchanged_operands(op: Op, sources: Sequence[TensorRef | None], parameters: Parameters) -> Iterator[TensorRef]:
    """Yield the operand that a product with 1 or a sum with 0 returns. The converter removes such an op."""
    is_commutative = op.kind in COMMUTATIVE_KINDS | BIAS_ADD_KINDS
    for operand, constant in [sources, sources[::-1]] if is_commutative else [sources]:
        value = None if constant is None else parameters.value(constant)
        if operand is not None and value is not None and np.all(value == _NEUTRAL_VALUES[op.kind]):
            yield operand


_PASSED_KINDS = FORWARDING_KINDS | {"qdq"}
_NEUTRAL_VALUES = {"add": 0.0, "bias_add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0}
"""The constant with which an op keeps its other operand."""


_MAX_SUM_RESCALING = 2**19  # for int8; int16 sums beyond 2**14 are float in the files of the converter
_COMPARISONS = frozenset({"EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL", "NOT_EQUAL"})


def find_wrong_kernel(converted: Model) -> str | None:
    """Return an int8 op whose TFLite kernel, or whose scale from the converter, is wrong.

    ADD aborts the process if an input has a scale so much above that of the output. Comparisons round to multiples of
    1/256 and overflow at 2**15. TFLite joins only tensors of one scale: the converter passes the fixed range of a
    Sigmoid, Softmax or Tanh to the other inputs, whose values beyond it are then clipped.
    """
    for graph in converted.graphs.values():
        for op in graph.ops():
            inputs = _largest_scale(graph.output(slot) for slot in graph.slots(op.name) if slot is not None)
            result = _largest_scale(op.outputs[:1])
            is_inexact = op.type in _COMPARISONS and inputs > 0
            is_overflowing = op.type == "ADD" and 0 < _MAX_SUM_RESCALING * result <= inputs
            is_clipping = op.kind in CONCATENATING_KINDS and result > 0 and _clips_an_input(graph, op)
            if is_inexact or is_overflowing or is_clipping:
                return op.outputs[0].name
    return None


def _largest_scale(outputs: Iterable[Output]) -> float:
    """Return the largest scale that the file stores for tensors, 0 if none of them is quantized."""
    stored = (output.quantization for output in outputs)
    return max((float(entry.scale.max()) for entry in stored if entry is not None and entry.scale.size), default=0.0)


def _clips_an_input(graph: Graph, op: Op) -> bool:
    """Return True if a product has the scale of `op`, which joins it to a result with a fixed range."""
    sources = [graph.op(slot.op) for slot in graph.slots(op.name) if slot is not None]
    behind = [graph.slots(source.name)[0] for source in sources if source.kind == "quantize"]
    origins = [*sources, *(graph.op(slot.op) for slot in behind if slot is not None)]
    joined = op.outputs[0].quantization
    return any(origin.kind in BOUNDED_KINDS for origin in origins) and any(
        np.array_equal(stored.scale, joined.scale) and np.array_equal(stored.zero_point, joined.zero_point)
        for source in sources
        if source.kind in WEIGHTED_KINDS and joined and (stored := source.outputs[0].quantization)
    )


def join_reports(reports: Sequence[ConversionReport]) -> ConversionReport:
    """Return the report of a plan whose signatures were converted one by one; each has a part of the tensors."""
    lines = zip(*(report.tensors for report in reports), strict=True)
    return ConversionReport(
        # A tensor that differs from its plan comes before one that agrees, and an absent one last.
        tensors=tuple(max(part, key=lambda line: line.index is not None and 1 + bool(line.problem)) for part in lines),
        float_ops=tuple(float_op for report in reports for float_op in report.float_ops),
        op_count=sum(report.op_count for report in reports),
    )


def _compare_tensor(insertion: InsertedPair, stored: _StoredTensor | None) -> ConvertedTensor:
    params, tensor = insertion.params, insertion.site.tensor
    absent = ConvertedTensor(tensor=tensor, name="", index=None, planned=None, runtime=None, problem="")
    if isinstance(params, DynamicQParams):
        return replace(absent, problem="its range is computed at each run, which the converter cannot express")
    planned = _planned_numbers(params)
    if stored is None or stored.runtime is None:
        problem = "no quantized tensor of the converted model has its name or its scale"
        return replace(absent, planned=planned, problem=problem)
    runtime_tensor = stored.runtime
    return ConvertedTensor(
        tensor=tensor,
        name=stored.output.name,
        index=runtime_tensor.index,
        planned=planned,
        runtime=(runtime_tensor.scales, runtime_tensor.zero_points) if runtime_tensor.scales.size else None,
        problem=_describe_difference(planned, runtime_tensor, stored.axis if params.axis is not None else None),
    )


def _planned_numbers(params: QParams) -> tuple[Array, Array]:
    """Return scales and zero points, each (C,). The converter widens a smaller symmetric range to CONVERTER_RANGE."""
    scale, zero_point = np.atleast_1d(params.scale), np.atleast_1d(params.zero_point)
    low, high = params.type.limits(narrow=params.narrow)
    if not zero_point.any():
        scale = np.maximum(scale, np.float32(CONVERTER_RANGE / (high - low)))
    return scale, zero_point


def _describe_difference(planned: tuple[Array, Array], runtime: RuntimeTensor, axis: int | None) -> str:
    """Describe the difference of the runtime's numbers, "" if there is none."""
    count = runtime.scales.size
    if not count:
        return "it has no scale: it stayed float"
    if count % planned[0].size:  # a depthwise multiplier repeats the scale of each channel
        return f"it has {count} scales and not {planned[0].size}"
    scale, zero_point = (np.repeat(values, count // values.size) for values in planned)
    power_of_two = np.frexp(scale)[0] == 0.5  # noqa: PLR2004  # a power of two
    close_scales = np.abs(runtime.scales.astype(np.float64) - scale) <= SCALE_TOLERANCE * scale
    if not np.where(power_of_two, runtime.scales == scale, close_scales).all():
        return "its scale differs"
    if not np.array_equal(runtime.zero_points, zero_point):
        return "its zero point differs"
    if axis is not None and count > 1 and runtime.axis != axis:
        return f"its axis is {runtime.axis} and not {axis}"
    return ""


def _find_float_ops(graph: Graph) -> Iterator[FloatOp]:
    for op in graph.ops():
        if op.kind in NON_COMPUTE_KINDS or op.calls:
            continue
        reasons = list(_missing_ranges(graph, op))
        if reasons:
            reason = reasons[0] or "TFLite has no integer kernel here"
            yield FloatOp(op=_short_op_name(op), type=op.type, reason=reason)


def _missing_ranges(graph: Graph, op: Op) -> Iterator[str]:
    """Yield the reason for each float operand and result: no range, or "" if it has one; those without range first."""
    reasons: list[str] = []
    constant_reasons: list[str] = []  # they come last: the converter folds the pairs of constants of a float op
    for slot, tensor in enumerate(graph.slots(op.name)):
        if tensor is None or graph.output(tensor).dtype != "float32":
            continue
        source = graph.op(tensor.op)
        lacks_range = source.kind != "dequantize" and op.role(slot) != "bias"
        reason = f"its {op.role(slot)} {_short_op_name(source)} has no range" if lacks_range else ""
        (constant_reasons if source.kind == "constant" else reasons).append(reason)
    for port, output in enumerate(op.outputs):
        if output.dtype == "float32":
            readers = graph.consumers(TensorRef(graph.name, op.name, port))
            has_range = bool(readers) and all(graph.op(use.op).kind == "quantize" for use in readers)
            reasons.append("" if has_range else "its output has no range")
    yield from sorted([*reasons, *constant_reasons], key=lambda reason: not reason)


def _short_op_name(op: Op) -> str:
    return op.name.partition(";")[0]
