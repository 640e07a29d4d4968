"""What is probably wrong with a quantized model: each kind of finding has a code, explained in docs/check.md."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphquant.backends.sides import Side, Sides, same
from graphquant.backends.types import Finding, Level, Verdict
from graphquant.errors import DataError
from graphquant.ir import QUANTIZATION_KINDS, WEIGHTED_KINDS, TensorRef
from graphquant.numerics import SMALLEST_SCALE, IntType
from graphquant.solve import absorbs, clip_ends

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphquant.backends.types import Backend
    from graphquant.calibration import Stats
    from graphquant.ir import Graph, Model, Op, Use
    from graphquant.numerics import QParams

    Predict = Callable[[Model], tuple[Verdict, ...]]


class Code(NamedTuple):
    """A kind of finding: its level and what it says in general."""

    level: Level
    explains: str


CODES = {
    "GQ101": Code(
        "warning", "the output of a Relu is quantized symmetrically, and half of the integers are never used"
    ),
    "GQ102": Code("warning", "a convolution or matrix product reads integers and still runs in float"),
    "GQ103": Code("warning", "an op that moves values about has other scales behind it than before it"),
    "GQ104": Code("error", "a bias does not fit into int32 at its scale"),
    "GQ105": Code("warning", "ranges that share a scale are so unlike that one of them has few integers left"),
    "GQ106": Code("error", "a scale is zero, negative, not finite, or too small for kernels"),
    "GQ107": Code("warning", "a quantization never sees data: nothing reads it, no graph or no sample reaches it"),
    "GQ108": Code("warning", "a graph input is quantized, and no op uses its integers"),
    "GQ109": Code("error", "the backend refuses the model"),
    "GQ110": Code("warning", "the scale of an int32 bias is not that of input times weight"),
    "GQ111": Code("error", "a weight's scales do not lie along its output channels"),
    "GQ112": Code("warning", "a quantization stands between two ops that would become one without it"),
    "GQ113": Code("note", "an op runs on integers, and would be faster in float"),
}
"""Every code."""

MOVERS = frozenset(
    {
        *("max_pool", "reshape", "flatten", "transpose", "squeeze", "unsqueeze", "slice", "expand", "tile", "gather"),
        *("depth_to_space", "space_to_depth", "split"),
    }
)
"""Kinds whose output values are input values."""

RANGES = {"sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "hard_sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}
"""Kinds whose output lies in a range that is known."""

FEWEST = 16
"""Integers that a range must be left with where it shares a scale."""

FEWEST_OF_CHANNEL = 4
"""The same for a channel of a weight, counted from the smallest to the largest value."""

UNUSED = 0.25
"""Share of the integers below zero from which on a Relu's output counts as symmetric."""

NEAR = 0.01
"""How far, as a share, a bias's scale may be from what it should be."""

LARGEST = (1 << 31) - 1


Verdicts = dict[tuple[str, str], Verdict]
"""By graph and op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the checks look at.

    Attributes:
        sides: The model's quantizations.
        backend: The backend that was asked for, or None.
        verdicts: Its verdicts, by graph and op.
        joined: Its verdicts if no quantization stood between ops that it could make one op of.
    """

    sides: Sides
    backend: Backend | None
    verdicts: Verdicts
    joined: Verdicts


def lint(
    model: Model, backend: Backend | None, predict: Predict, stats: Stats | None = None
) -> tuple[tuple[Verdict, ...], tuple[Finding, ...]]:
    """The verdicts of a backend, and the findings, by code and then in the order of the model.

    Args:
        model: The model.
        backend: The backend that was asked for.
        predict: Gives its verdicts; none without a backend.
        stats: What calibration saw of the model before it was quantized, if that is known.

    Raises:
        DataError: That is of none of the tensors that are quantized.
        ModelError: A weight cannot be read.
    """
    sides, verdicts = Sides(model), predict(model)
    joined = _joined(sides, backend, predict)
    context = Context(sides=sides, backend=backend, verdicts=_by_op(verdicts), joined=_by_op(joined))
    found: list[Finding] = []
    for name in model.live():
        graph = model.graphs[name]
        for op in graph.ops():
            for check in _CHECKS:
                found += check(context, graph, op)
    found += _unreached(model)
    found += [] if stats is None else _unseen(sides, stats)
    return verdicts, tuple(sorted(found, key=lambda finding: finding.code))


def _by_op(verdicts: tuple[Verdict, ...]) -> Verdicts:
    return {(verdict.graph, verdict.op): verdict for verdict in verdicts}


def _finding(code: str, graph: Graph, op: Op, says: str, fix: str) -> Finding:
    return Finding(code=code, graph=graph.name, op=op.name, says=says, fix=fix)


def _relu(context: Context, graph: Graph, op: Op) -> Iterator[Finding]:
    if op.kind not in {"relu", "relu6"} or (context.backend is not None and context.backend.symmetric):
        return
    for pair, params in context.sides.outputs(graph, op)[0]:
        if params is None or not isinstance(params.type, IntType):
            continue
        low, high = params.type.limits(narrow=params.narrow)
        below = (float(np.max(params.zero_point)) - low) / (high - low)
        if below >= UNUSED:
            says = f"{pair.name} gives {below:.0%} of its integers to values below 0, which a {op.type} never has"
            yield _finding("GQ101", graph, op, says, "quantize it asymmetrically, with the smallest integer for 0")


def _weighted(context: Context, graph: Graph, op: Op) -> Iterator[Finding]:
    """Float in spite of quantized inputs; refused models."""
    verdict = context.verdicts.get((graph.name, op.name))
    if verdict is None or verdict.broken is None:
        return
    broken = verdict.broken
    if broken.rule == "refused":
        yield _finding("GQ109", graph, op, broken.says, broken.fix)
    elif op.kind in WEIGHTED_KINDS:
        sides = context.sides.inputs(graph, op)
        wanted = [side for side in sides if side.role != "bias"]
        if wanted and all(side.pair for side in wanted):
            yield _finding("GQ102", graph, op, f"it reads integers and runs in float: {broken.says}", broken.fix)


def _behind(sides: Sides, backend: Backend | None, graph: Graph, op: Op) -> tuple[Use, Op] | None:
    """The activation that could be fused with an op but for the one pair between them, and how it reads the pair."""
    fused = None if backend is None else backend.fuses.get(op.kind)
    pairs, others = sides.outputs(graph, op) if fused else ([], [])
    if fused is None or len(pairs) != 1 or others:
        return None
    inner = [pairs[0][0]]
    if inner[0].kind == "quantize":
        inner = [reader for _, reader in sides.readers(graph, inner[0])]
    ends = [end for one in inner if one.name in graph for end in sides.readers(graph, one)]
    return ends[0] if len(ends) == 1 and ends[0][1].kind in fused and ends[0][0].slot == 0 else None


def _joined(sides: Sides, backend: Backend | None, predict: Predict) -> tuple[Verdict, ...]:
    """The verdicts on the model without any such pair; none where it has none."""
    changed: Model | None = None
    for name in sides.model.live() if backend is not None else ():
        for op in sides.model.graphs[name].ops():
            end = _behind(sides, backend, sides.model.graphs[name], op)
            if end is not None:
                changed = changed or sides.model.copy()
                _take_out(changed, end[0], TensorRef(name, op.name))
    return () if changed is None else predict(changed)


def _take_out(model: Model, use: Use, tensor: TensorRef) -> None:
    """Makes `use` read `tensor`, and takes out what was between and nobody else reads."""
    here = model.graphs[use.graph].producer(use)
    model.graphs[use.graph].connect(use, tensor)
    while here is not None and here != tensor and not model.graphs[here.graph].readers(here.op):
        graph = model.graphs[here.graph]
        before = next(iter(graph.slots(here.op)), None)
        graph.remove(here.op)
        here = before


def _between(context: Context, graph: Graph, op: Op) -> Iterator[Finding]:
    """A pair between an op and the activation that would be fused with it, so that both stay on integers."""
    end = _behind(context.sides, context.backend, graph, op)
    if end is None or _runs_alone(context, graph, end[1]):
        return
    told = [context.joined.get(key) for key in ((graph.name, op.name), (end[0].graph, end[1].name))]
    if all(verdict is not None and verdict.status != "float" for verdict in told):
        says = f"a quantization stands between it and {end[1].name} ({end[1].type})"
        yield _finding("GQ112", graph, op, says, f"quantize behind {end[1].name} only")


def _runs_alone(context: Context, graph: Graph, op: Op) -> bool:
    """Whether a Relu or Clip cannot be absorbed, as the integers behind it do not end where it does."""
    ends = clip_ends(context.sides.model, context.sides.parameters, TensorRef(graph.name, op.name))
    known = [params for _, params in context.sides.outputs(graph, op)[0] if params is not None]
    return ends is not None and any(params.scale.ndim == 0 and not absorbs(params, ends) for params in known)


def _slower(context: Context, graph: Graph, op: Op) -> Iterator[Finding]:
    verdict = context.verdicts.get((graph.name, op.name))
    if verdict is not None and verdict.note:
        yield _finding("GQ113", graph, op, verdict.note, "leave it float")


def _mover(context: Context, graph: Graph, op: Op) -> Iterator[Finding]:
    tied = context.backend is not None and context.backend.ties_concat
    if op.kind not in MOVERS and not (op.kind == "concat" and tied):
        return
    before = [side.params for side in context.sides.inputs(graph, op) if side.params is not None]
    after = [params for _, params in context.sides.outputs(graph, op)[0] if params is not None]
    if before and after and not all(same(before[0], other) for other in [*before[1:], *after]):
        scales = ", ".join(dict.fromkeys(f"{_scale(params)}" for params in [*before, *after]))
        fix = "give input and output one scale and zero point"
        yield _finding("GQ103", graph, op, f"its inputs and outputs have the scales {scales}", fix)


def _scale(params: QParams) -> str:
    scale = np.unique(params.scale)
    zero = np.unique(params.zero_point)
    shown = f"{scale[0]:.4g}" if scale.size == 1 else f"{scale[0]:.4g}..{scale[-1]:.4g}"
    return f"{shown} (zero point {zero[0]})" if zero.size == 1 else shown


def _bias(context: Context, graph: Graph, op: Op) -> Iterator[Finding]:
    """A bias that does not fit int32, or that has a scale of its own."""
    if op.kind not in WEIGHTED_KINDS or (context.backend is not None and context.backend.bias != "int32"):
        return
    sides = {side.role: side for side in context.sides.inputs(graph, op)}
    data, weight, bias = (sides.get(role) for role in ("input", "weight", "bias"))
    if data is None or weight is None or bias is None or data.params is None or weight.params is None:
        return
    unit = data.params.scale.astype(np.float64) * weight.params.scale.astype(np.float64).reshape(-1)
    if bias.pair:
        yield from _quantized_bias(context, graph, op, bias, unit)
    elif bias.parameter:
        value = context.sides.value(bias.source)
        if value is not None and value.ndim == 1 and unit.size in {1, value.size}:
            steps = np.abs(value.astype(np.float64) / unit)
            if steps.max(initial=0) > LARGEST:
                yield _overflow(graph, op, bias, int(steps.argmax()))


def _quantized_bias(
    context: Context, graph: Graph, op: Op, bias: Side, unit: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> Iterator[Finding]:
    value = context.sides.value(bias.source)
    if value is not None and value.dtype == np.int32 and value.size:
        farthest = np.abs(value.astype(np.int64))
        if farthest.max() >= LARGEST:
            yield _overflow(graph, op, bias, int(farthest.argmax()))
    if bias.params is None or bias.params.scale.size not in {1, unit.size}:
        return
    off = np.abs(bias.params.scale.astype(np.float64).reshape(-1) / unit - 1)
    if off.max(initial=0) > NEAR:
        says = f"the scale of its bias {bias.source} is off by up to {off.max():.0%} from input times weight"
        yield _finding("GQ110", graph, op, says, "requantize the bias; copy it where ops with other scales share it")


def _overflow(graph: Graph, op: Op, bias: Side, place: int) -> Finding:
    says = f"its bias {bias.source} does not fit into int32 at element {place}"
    return _finding("GQ104", graph, op, says, "give its weight or its input a larger scale, or leave the op float")


def _disparity(context: Context, graph: Graph, op: Op) -> Iterator[Finding]:
    """Parts of a Concat that are small beside the others."""
    if op.kind != "concat":
        return
    after = [params for _, params in context.sides.outputs(graph, op)[0] if params is not None]
    if not after:
        return
    step = float(np.max(after[0].scale))
    for side in context.sides.inputs(graph, op):
        span = _span(context, side)
        if span is not None and 0 < span / step < FEWEST:
            says = f"its input {side.source} spans {span:.4g}, which is {span / step:.1f} steps of its output"
            fix = "quantize the parts behind the Concat, or let this one leave the model by itself"
            yield _finding("GQ105", graph, op, says, fix)


def _span(context: Context, side: Side) -> float | None:
    """How far the values of a tensor reach, as far as that is known."""
    maker = context.sides.model.op(context.sides.behind(side.source))
    known = RANGES.get(maker.kind)
    spans = [] if known is None else [known[1] - known[0]]
    if side.params is not None:
        spans.append(float(np.max(side.params.range.high - side.params.range.low)))
    return min(spans, default=None)


def _channels(context: Context, graph: Graph, op: Op) -> Iterator[Finding]:
    """Weights whose scales lie along another axis, or whose one scale leaves some channel nothing."""
    if op.kind not in WEIGHTED_KINDS or op.channel_axis is None:
        return
    for side in context.sides.inputs(graph, op):
        params = side.params
        if side.role != "weight" or params is None or not side.parameter or params.block is not None:
            continue
        if params.axis is not None and params.axis != op.channel_axis:
            says = f"its weight {side.source} has scales along axis {params.axis}, its output channels are axis"
            yield _finding("GQ111", graph, op, f"{says} {op.channel_axis}", f"put them along axis {op.channel_axis}")
        elif params.axis is None:
            yield from _flat_channels(context, graph, op, side, params)


def _flat_channels(context: Context, graph: Graph, op: Op, side: Side, params: QParams) -> Iterator[Finding]:
    value = context.sides.value(side.source)
    axis = op.channel_axis or 0
    if value is None or value.ndim <= axis or not value.size:
        return
    others = tuple(place for place in range(value.ndim) if place != axis)
    steps = np.ptp(value.astype(np.float64), axis=others)
    if value.dtype.kind == "f":
        steps = steps / float(params.scale)
    few = np.flatnonzero((steps > 0) & (steps < FEWEST_OF_CHANNEL)) if steps.size > 1 else np.empty(0)
    if few.size:
        says = (
            f"{few.size} of {steps.size} channels of its weight {side.source} keep fewer than {FEWEST_OF_CHANNEL + 1}"
        )
        yield _finding("GQ105", graph, op, f"{says} integers", "quantize the weight per channel")


def _bad_scale(context: Context, graph: Graph, op: Op) -> Iterator[Finding]:
    if op.kind not in {"quantize", "dequantize"}:
        return
    scale = next(iter(graph.slots(op.name)[1:2]), None)
    value = None if scale is None else context.sides.value(scale)
    if value is None or not value.size:
        return
    wide = value.astype(np.float64)
    bad = ~np.isfinite(wide) | (wide < SMALLEST_SCALE)
    behind = context.sides.source(TensorRef(graph.name, op.name)) if op.kind == "dequantize" else None
    twin = behind is not None and context.sides.model.op(behind).kind != "constant"
    if bad.any() and not twin:
        says = f"its scale {scale} is {wide.reshape(-1)[bad.reshape(-1).argmax()]:g}"
        yield _finding("GQ106", graph, op, says, "calibrate again, or leave this tensor float")


def _idle(context: Context, graph: Graph, op: Op) -> Iterator[Finding]:
    """Quantizations that nothing reads, and those of inputs whose integers nobody wants."""
    if op.kind in QUANTIZATION_KINDS and not graph.readers(op.name):
        yield _finding("GQ107", graph, op, "nothing reads it", "remove it")
    if op.kind != "input" or context.backend is None or graph.parent is not None:
        return
    sides = context.sides
    readers: list[tuple[str, str]] = []
    for use, reader in sides.readers(graph, op):
        if reader.kind != "quantize":
            return
        for inner, behind in sides.readers(sides.model.graphs[use.graph], reader):
            if behind.kind != "dequantize":
                return
            readers += [(end.graph, end.op) for end, _ in sides.readers(sides.model.graphs[inner.graph], behind)]
    told = [context.verdicts.get(key) for key in readers]
    if told and all(verdict is not None and verdict.status == "float" for verdict in told):
        says = f"it is quantized, and the ops that read it run in float: {', '.join(sorted({op for _, op in readers}))}"
        yield _finding("GQ108", graph, op, says, "leave this input float, or quantize what reads it too")


def _unreached(model: Model) -> Iterator[Finding]:
    """Quantizations in functions that nothing calls."""
    live = set(model.live())
    for name, graph in model.graphs.items():
        pairs = [] if name in live else [op for op in graph.ops() if op.kind in QUANTIZATION_KINDS]
        if pairs:
            kinds = Counter(op.type for op in pairs)
            counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            yield _finding(
                "GQ107", graph, pairs[0], f"nothing calls its graph, which has {counted}", "remove the function"
            )


def _unseen(sides: Sides, stats: Stats) -> list[Finding]:
    """Quantizations of tensors that no sample reached.

    Raises:
        DataError: The statistics are of none of the tensors that are quantized.
    """
    found, known = [], False
    for name in sides.model.live():
        graph = sides.model.graphs[name]
        for op in graph.ops():
            tensor = next(iter(graph.slots(op.name)), None)
            if op.kind not in {"quantize", "qdq"} or tensor is None:
                continue
            places = [place for place in (tensor, sides.behind(tensor)) if place in stats.targets]
            known = known or bool(places)
            if places and not any(place in stats.sketches and stats.sketches[place].count for place in places):
                says = f"no sample of the statistics reached {places[0]}"
                found.append(_finding("GQ107", graph, op, says, "calibrate with data that does, or leave it float"))
    if not known:
        raise DataError(
            f"The statistics are of none of the tensors that {sides.model.path or 'the model'} quantizes. Give those"
            " of the model that it was made from."
        )
    return found


_CHECKS: tuple[Callable[[Context, Graph, Op], Iterator[Finding]], ...] = (
    _relu,
    _weighted,
    _mover,
    _bias,
    _disparity,
    _channels,
    _bad_scale,
    _idle,
    _between,
    _slower,
)
