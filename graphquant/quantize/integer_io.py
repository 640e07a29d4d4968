"""Integer inputs, outputs and caches of ONNX models.

The Q/DQ pair of an input or output loses its float side, also if ops that change only the layout are between both;
before the pair of an input, ops may also take and join parts of it. If the model normalizes pictures itself, and the
pair maps the pixel values 0 to 255 to its integers in their order, the pair replaces the normalization. Without a
pair, pictures of integers become floats behind the input.

Past keys and values of GroupQueryAttention become int8, with scales of the values that calibration samples give. ONNX
Runtime's op reads and writes such a cache itself, so no Q/DQ pair is needed. A scale is per tensor, or per channel:
one for each head and each of its values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, ValidationError

from graphquant.errors import DataError
from graphquant.ir import (
    RESHAPING_KINDS,
    Graph,
    Model,
    Op,
    Parameters,
    TensorRef,
    Use,
    check_invariants,
    fixed_cache_size,
)
from graphquant.numerics import LARGEST_VALUE, SMALLEST_SCALE, Array, IntType, QParams, qparams_from_scale, quantize
from graphquant.qdq import read_qparams
from graphquant.qdq.family import add_constant, new_op
from graphquant.qdq.onnx_qdq import MICROSOFT_DOMAIN, OPSET_WITHOUT_KERNELS
from graphquant.quantize.preparation_undo import remove_unread_ops
from graphquant.utils.option_types import type_adapter

if TYPE_CHECKING:
    from graphquant.quantize.plan import Plan


LAYOUT_KINDS = RESHAPING_KINDS | {"flatten", "identity"}  # kinds that run on integers as on floats
MOVING_KINDS = LAYOUT_KINDS | {"slice"}
"""Kinds that may stand between an input and its pair: each value of their output is one of slot 0.

ONNX Runtime 1.22 has no SpaceToDepth of integers.
"""
IntegerType = Literal["int8", "uint8", "int16"]
NORMALIZATION_KINDS = frozenset({"add", "sub", "mul", "div"})
IO_KEY = "io"  # key of the integer inputs and outputs in the provenance
IO_RULE = "io"  # rule of the ops that convert between the requested type and that of a pair
PIXEL_LEVELS = 256
PICTURE_RANK, PICTURE_CHANNELS = 4, (1, 3, 4)  # shape of pictures: samples, height, width, and channels before or after
PAIR_ROLES = ("input", "scale", "zero_point")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryTensor:
    """A float input or output of a model, and the integers `q` that replace its values `(q - zero_point) * scale`."""

    name: str
    role: Literal["input", "output"]
    dtype: Literal["int8", "uint8", "int16", "float32"]
    scale: Annotated[float, Field(ge=SMALLEST_SCALE, le=LARGEST_VALUE)] = 1.0
    zero_point: Annotated[int, Field(ge=-(1 << 15), lt=1 << 15)] = 0
    constants: tuple[str, ...] = ()  # the initializers with the scale and zero point of the op that reads or writes it
    reason: str = ""  # reason why it stays float, or ""
    normalization: str = ""  # "folded" or the reason why it is kept, for an input that takes pixel values
    # Scales of a key or value cache, whose constant has them, or "" if it is none; `scale` is the largest one.
    cache: Literal["", "tensor", "channel"] = ""

    def __str__(self) -> str:
        scale = "scales of its channels up to" if self.cache == "channel" else "scale"
        params = f"because {self.reason}" if self.reason else f"{scale} {self.scale:.9g}, zero point {self.zero_point}"
        pixels = f", for pixel values; the normalization is {self.normalization}" if self.normalization else ""
        return f"{self.role} {self.name}: {self.dtype}, {params}{pixels}"

    @property
    def params(self) -> QParams:
        """Scale, zero point and type; of a cache with scales for its channels, the largest scale."""
        return qparams_from_scale(np.array(self.scale), np.array(self.zero_point), IntType.parse(self.dtype))

    def params_in(self, model: Model) -> QParams:
        """Return scale, zero point and type; those of the channels of a cache are for its merged heads."""
        name = self.constants[0] if self.cache == "channel" and self.constants else ""
        read_scale = model.main.op(name).read_value if name in model.main else None
        if read_scale is None:
            return self.params
        scales = read_scale()
        return qparams_from_scale(scales, np.zeros(scales.shape, np.int32), IntType.parse(self.dtype), axis=2)


def convert_boundary(convert: Callable[[Array, QParams], Array], values: Array, params: QParams) -> Array:
    """Return the quantized or dequantized values of an input or output, as `convert` does it.

    If there are scales of channels, the values are a cache (batch, heads, positions, size).
    """
    if params.axis is None:
        return convert(values, params)
    by_position = values.transpose(0, 2, 1, 3)
    batch, positions, heads, size = by_position.shape
    converted = convert(by_position.reshape(batch, positions, heads * size), params)
    return np.ascontiguousarray(converted.reshape(by_position.shape).transpose(0, 2, 1, 3))


def integer_tensors(provenance: Mapping[str, str]) -> tuple[BoundaryTensor, ...]:
    """Return the integer inputs and outputs that the provenance of a model lists; none if it is damaged."""
    try:
        tensors = type_adapter(tuple[BoundaryTensor, ...]).validate_json(provenance.get(IO_KEY, "[]"))
    except ValidationError:
        return ()
    return tuple(tensor for tensor in tensors if tensor.dtype != "float32")


def set_pixel_ranges(model: Model, plan: Plan, sample: Mapping[str, Array]) -> tuple[Plan, frozenset[str]]:
    """Return the plan with the ranges of normalized pictures, and the names of the inputs that take such pictures.

    An input takes pictures if all values of the sample are integers from 0 to 255, and constants normalize them or
    they have the shape of pictures.
    """
    parameters, names = Parameters(model), set()
    ranges: dict[TensorRef, tuple[float, float]] = {}
    for name, array in sample.items():
        if name not in model.main.inputs or array.dtype.kind != "f" or array.max(initial=0) <= 1:
            continue
        trace = _trace_input(model, parameters, name, "quantize")
        is_shaped = array.ndim == PICTURE_RANK and not {array.shape[1], array.shape[-1]}.isdisjoint(PICTURE_CHANNELS)
        is_integral = np.array_equal(array, np.clip(np.rint(array), 0, PIXEL_LEVELS - 1))
        if is_integral and (trace.normalization_ops or is_shaped):
            names.add(name)
            tables = [(tensor, table) for tensor, table in trace.tables.items() if table is not None]
            ranges.update((tensor, (float(table.min()), float(table.max()))) for tensor, table in tables)
    sites = (site if site.has_given_range else replace(site, range=ranges.get(site.tensor)) for site in plan.sites)
    return replace(plan, sites=tuple(sites)), frozenset(names)


def with_integer_io(
    model: Model, dtype: IntegerType, pictures: frozenset[str]
) -> tuple[Model, tuple[BoundaryTensor, ...]]:
    """Return a quantized model with integer inputs and outputs, and the conversion of each float one.

    The inputs `pictures` take integers from 0 to 255, so 8 bits suffice for them even if they have no pair.
    """
    changed, parameters, main = model.copy(), Parameters(model), model.main
    inputs = [op for op in map(main.op, main.inputs) if op.read_value is None and op.outputs[0].dtype == "float32"]
    sources = [(name, main.source_of(Use("", name, 0))) for name in main.outputs]
    outputs = [name for name, source in sources if source and model.output(source).dtype == "float32"]
    tensors = [_convert_input(changed, parameters, op.name, dtype, is_picture=op.name in pictures) for op in inputs]
    tensors += [_convert_output(changed, parameters, name, dtype) for name in outputs]
    check_invariants(changed, "the conversion of inputs and outputs")
    entries = [asdict(tensor) for tensor in tensors if not tensor.reason]
    provenance = {**(model.provenance or {}), IO_KEY: json.dumps(entries)}
    return replace(changed, provenance=provenance, original_model=model.original_model), tuple(tensors)


def with_float_io(model: Model, provenance: Mapping[str, str]) -> Model:
    """Return a copy in which inputs and outputs have the type float32 again; the ops of their pairs stay as they are.

    An input stays an integer if its normalization was folded, because the model does not have these ops any more.
    """
    changed = model.copy()
    graph, outputs = changed.main, {output_name(model.main.op(name)): name for name in model.main.outputs}
    for tensor in integer_tensors(provenance):
        if tensor.cache:
            continue  # see `restore_float_cache`
        if tensor.role == "input" and tensor.name in graph and tensor.normalization != "folded":
            layout_ops = _trace_input(changed, Parameters(changed), tensor.name, "dequantize").layout_ops
            _set_dtype(graph, [tensor.name, *layout_ops], "float32")
        elif tensor.role == "output" and tensor.name in outputs:
            sources = [graph.source_of(use) for use in _output_path(graph, outputs[tensor.name])]
            _set_dtype(graph, [source.op for source in sources if source is not None], "float32")
    return changed


@dataclass(slots=True, kw_only=True)
class _InputTrace:
    """Readers of an input, behind layout ops and its normalization."""

    tables: dict[TensorRef, Array | None]  # the value of a tensor for each pixel value; None if channels differ
    layout_ops: list[str] = field(default_factory=list)
    normalization_ops: list[str] = field(default_factory=list)
    pair_ops: list[str] = field(default_factory=list)  # the ops of the requested kind
    obstacle: str = ""  # reason why the input cannot be an integer


def _trace_input(model: Model, parameters: Parameters, name: str, kind: str) -> _InputTrace:
    """Find the ops of `kind`, "quantize" or "dequantize", that read an input of the main graph.

    Between both, ops may move its values, and join parts of it.
    """
    graph, pending = model.main, [TensorRef("", name)]
    incomplete: dict[str, str] = {}  # ops that join a part of the input and another tensor, with the message
    trace = _InputTrace(tables={pending[0]: np.arange(PIXEL_LEVELS, dtype=np.float32)})
    for tensor in pending:  # grows
        for use in graph.consumers(tensor):
            op, result = model.graphs[use.graph].op(use.op), TensorRef("", use.op)
            other = None if use.graph or op.kind not in NORMALIZATION_KINDS else graph.slots(op.name)[1 - use.slot]
            if use.graph:
                trace.obstacle = f"a subgraph reads {tensor}"
            elif op.kind == kind:
                trace.pair_ops.append(op.name)
            elif op.kind in MOVING_KINDS and use.slot == 0:
                trace.layout_ops.append(op.name)
                trace.tables[result] = trace.tables[tensor]
                pending.append(result)
            elif op.kind == "concat" and result not in trace.tables:
                tables = [None if slot is None else trace.tables.get(slot) for slot in graph.slots(op.name)]
                incomplete[op.name] = f"{op.name} ({op.type or op.kind}) joins it with another tensor"
                if all(slot in trace.tables for slot in graph.slots(op.name)):
                    del incomplete[op.name]
                    trace.layout_ops.append(op.name)
                    known = [table for table in tables if table is not None]
                    is_same = len(known) == len(tables) and all(np.array_equal(table, known[0]) for table in known)
                    trace.tables[result] = known[0] if is_same else None
                    pending.append(result)
            elif other is not None and parameters.is_parameter(other):
                trace.normalization_ops.append(op.name)
                trace.tables[result] = _normalized(model, op, use.slot, trace.tables[tensor], parameters.value(other))
                pending.append(result)
            elif op.kind not in {"shape", "concat"}:
                trace.obstacle = f"{op.name} ({op.type or op.kind}) reads its float values"
    trace.obstacle = trace.obstacle or next(iter(incomplete.values()), "")
    return trace


def _normalized(model: Model, op: Op, slot: int, table: Array | None, constant: Array | None) -> Array | None:
    """Return the outputs of an op for `table`, None if its constant is not a single number."""
    if table is None or constant is None or constant.size != 1:
        return None
    operands = [table, constant.reshape(())]
    outputs = model.source.evaluate_op(op, operands if slot == 0 else operands[::-1])
    return None if outputs is None else np.asarray(outputs[0])


def _convert_input(
    model: Model, parameters: Parameters, name: str, dtype: IntegerType, *, is_picture: bool
) -> BoundaryTensor:
    """Change the type of an input if that is possible."""
    graph, lowest = model.main, IntType.parse(dtype).limits()[0]
    trace = _trace_input(model, parameters, name, "quantize")
    tensor = BoundaryTensor(name=name, role="input", dtype=dtype, zero_point=lowest)
    pair = _read_pair(graph, parameters, trace.pair_ops, dtype)
    reason = trace.obstacle or (pair if isinstance(pair, str) else "")
    if not isinstance(pair, str) and trace.normalization_ops and not reason:
        integers = np.arange(PIXEL_LEVELS) + pair.type.limits()[0]
        tables = [trace.tables[source] for op in trace.pair_ops if (source := graph.slots(op)[0]) is not None]
        if any(table is None or not np.array_equal(quantize(table, pair), integers) for table in tables):
            reason = "its pair does not map the normalized pixel values to its integers"
    if isinstance(pair, str) or reason:
        if not is_picture or lowest < np.iinfo(np.int8).min:
            return replace(tensor, dtype="float32", reason=reason)
        domain = MICROSOFT_DOMAIN if model.opset >= OPSET_WITHOUT_KERNELS else ""
        normalization = f"kept, because {reason}" if trace.normalization_ops else ""
        return replace(_add_dequantize(graph, tensor, domain), normalization=normalization)
    stored = replace(tensor, scale=float(pair.scale), zero_point=_shifted(pair, dtype))
    _bypass(model, trace, trace.normalization_ops)
    if pair.type.name == dtype:
        scale, zero_point = (slot.op for slot in graph.slots(trace.pair_ops[0])[1:3] if slot is not None)
        stored = replace(stored, constants=(scale, zero_point))
        _set_dtype(graph, [name, *trace.layout_ops, *trace.pair_ops], dtype)
        _bypass(model, trace, trace.pair_ops)
    else:
        stored = _add_dequantize(graph, stored, graph.op(trace.pair_ops[0]).domain)
    is_folded = bool(trace.normalization_ops)
    return replace(tensor, constants=stored.constants, normalization="folded") if is_folded else stored


def _convert_output(model: Model, parameters: Parameters, name: str, dtype: IntegerType) -> BoundaryTensor:
    """Change the type of an output if that is possible."""
    graph = model.main
    tensor = BoundaryTensor(name=output_name(graph.op(name)), role="output", dtype=dtype)
    uses = _output_path(graph, name)
    floats = graph.source_of(uses[-1])
    is_pair = floats is not None and not floats.graph and graph.op(floats.op).kind == "dequantize"
    pair = _read_pair(graph, parameters, [floats.op] if floats is not None and is_pair else [], dtype)
    if isinstance(pair, str) or floats is None:
        return replace(tensor, dtype="float32", reason=str(pair))
    tensor = replace(tensor, scale=float(pair.scale), zero_point=_shifted(pair, dtype))
    integers, scale, zero_point = graph.slots(floats.op)[:3]
    if pair.type.name == dtype and scale is not None and zero_point is not None:
        _set_dtype(graph, [use.op for use in uses[1:]], dtype)
        graph.set_source(uses[-1], integers)
        remove_unread_ops(model, [floats])
        return replace(tensor, constants=(scale.op, zero_point.op))
    return _add_op(graph, "quantize", tensor, graph.source_of(uses[0]) or floats, uses[:1], graph.op(floats.op).domain)


def _read_pair(graph: Graph, parameters: Parameters, names: list[str], dtype: str) -> QParams | str:
    """Return the common scale of ops, or the reason why integers of a type cannot replace their pairs."""
    pairs = [read_qparams(graph, graph.op(name), parameters) for name in names]
    if not pairs:
        return "no rule of the plan quantizes it"
    pair = pairs[0]
    if not isinstance(pair, QParams) or pair.axis is not None or not isinstance(pair.type, IntType):
        return "its pair does not have one constant scale"
    if pair.type.bits != IntType.parse(dtype).bits:
        return f"its pair has {pair.type.name}"
    parts = [(other.type, other.axis, other.scale, other.zero_point) for other in pairs if isinstance(other, QParams)]
    if len(parts) < len(pairs) or any(part != parts[0] for part in parts[1:]):
        return "its readers have different types or scales"
    return pair


def _shifted(pair: QParams, dtype: str) -> int:
    """Return the zero point of a pair for integers of a type with the same bits, signed or not."""
    return int(pair.zero_point - pair.type.limits()[0] + IntType.parse(dtype).limits()[0])


def _output_path(graph: Graph, name: str) -> list[Use]:
    """Return the use of an output, followed by those of layout ops before it whose results nothing else reads."""
    uses = [Use("", name, 0)]
    for use in uses:  # grows
        source = graph.source_of(use)
        is_layout = source is not None and not source.graph and graph.op(source.op).kind in LAYOUT_KINDS
        if source is not None and is_layout and len(graph.consumers(source)) == 1:
            uses.append(Use("", source.op, 0))
    return uses


def output_name(output: Op) -> str:
    """Return the value name of an output of a graph."""
    return str(getattr(output.source, "name", output.source))


def _set_dtype(graph: Graph, names: Iterable[str], dtype: str) -> None:
    for op in map(graph.op, names):
        graph.replace_op(replace(op, outputs=(replace(op.outputs[0], dtype=dtype), *op.outputs[1:])))


def _bypass(model: Model, trace: _InputTrace, names: Iterable[str]) -> None:
    """Remove ops behind an input, whose consumers read the operand that depends on the input instead."""
    graph = model.main
    for name in names:
        source = next(slot for slot in graph.slots(name) if slot in trace.tables)
        graph.reroute(TensorRef("", name), graph.consumers(TensorRef("", name)), source)
        remove_unread_ops(model, [TensorRef("", name)])


def _add_dequantize(graph: Graph, tensor: BoundaryTensor, domain: str) -> BoundaryTensor:
    """Add a DequantizeLinear behind an input, which becomes an integer."""
    start = TensorRef("", tensor.name)
    uses = [use for use in graph.consumers(start) if graph.graphs[use.graph].op(use.op).kind != "shape"]
    tensor = _add_op(graph, "dequantize", tensor, start, uses, domain)
    _set_dtype(graph, [tensor.name], tensor.dtype)
    return tensor


def _add_op(
    graph: Graph, kind: str, tensor: BoundaryTensor, source: TensorRef, uses: Iterable[Use], domain: str
) -> BoundaryTensor:
    """Add a quantization op with the scale of an input or output before `uses`; return it with its constants."""
    values = {"scale": np.array(tensor.scale, np.float32), "zero_point": np.array(tensor.zero_point, tensor.dtype)}
    constants = [
        add_constant(graph, f"{tensor.name}/{name}", value, op_type="Constant", rule=IO_RULE)
        for name, value in values.items()
    ]
    dtype = "float32" if kind == "dequantize" else tensor.dtype
    fields: dict[str, Any] = {"type": f"{kind.capitalize()}Linear", "roles": PAIR_ROLES, "domain": domain}
    shape = graph.output(source).shape
    op = new_op(graph, f"{tensor.name}/{kind}", dtype, shape, kind=kind, rule=IO_RULE, anchor=str(source), **fields)
    result = graph.add_op(op, [source, *constants])
    for use in uses:
        graph.graphs[use.graph].set_source(use, result)
    return replace(tensor, constants=tuple(constant.op for constant in constants))


ATTENTION = "GroupQueryAttention"
CACHE_RULE = "kv-cache"  # rule of the constants with scales
CACHE_LIMIT = 127  # integer of the largest magnitude
EXPECTED_VALUES = 100_000  # values of a channel, or of a tensor, that should rarely be clipped

FIRST_PAST_SLOT, FIRST_SCALE_SLOT = 3, 12
"""Slots of the op; the value of each part follows its key."""

FIRST_PRESENT_PORT = 1
CACHE_ATTRS = ("k_quant_type", "v_quant_type")


class AttentionCache(NamedTuple):
    """The cache of one op: keys, then values."""

    op: str
    inputs: tuple[str, ...]  # the graph inputs with past states
    outputs: tuple[str, ...]  # the names of the graph outputs with present states
    reason: str = ""  # reason why it stays float, or ""


def find_caches(model: Model) -> list[AttentionCache]:
    """Return the caches of all GroupQueryAttention ops with past states, and the reasons of those that stay float."""
    found = []
    for graph in model.graphs.values():
        for op in graph.ops():
            past = graph.slots(op.name)[FIRST_PAST_SLOT : FIRST_PAST_SLOT + len(CACHE_ATTRS)]
            if op.type == ATTENTION and op.domain == MICROSOFT_DOMAIN and len(past) == len(CACHE_ATTRS) and all(past):
                found.append(_read_cache(model, graph, op, [tensor for tensor in past if tensor is not None]))
    return found


def _read_cache(model: Model, graph: Graph, op: Op, past: Sequence[TensorRef]) -> AttentionCache:
    """Return the cache of an op whose past states are `past`."""
    outputs, reason = [], ""
    if any(op.attrs.get(attr, "NONE") != "NONE" for attr in CACHE_ATTRS):
        reason = "its cache is quantized already"
    if fixed_cache_size(op):
        reason = "its cache of the last positions is small, and has no values where positions are missing"
    for part, tensor in enumerate(past):
        present = TensorRef(graph.name, op.name, FIRST_PRESENT_PORT + part)
        source, readers = model.op(tensor), graph.consumers(present)
        if graph.name or source.kind != "input" or source.outputs[0].dtype != "float32":
            reason = reason or f"its past state {tensor} is no float32 input of the model"
        others = [
            model.graphs[use.graph].op(use.op)
            for use in model.graphs[tensor.graph].consumers(tensor)
            if use.op != op.name
        ]
        if other := next((other for other in others if other.kind != "shape"), None):
            reason = reason or f"{other.name} ({other.type}) reads its past state {tensor} too"
        if [graph.op(use.op).kind for use in readers if use.graph == graph.name] != ["output"]:
            reason = reason or f"its present state {present} is not only an output of the model"
        else:
            outputs.append(output_name(graph.op(readers[0].op)))
    return AttentionCache(op=op.name, inputs=tuple(ref.op for ref in past), outputs=tuple(outputs), reason=reason)


class StateLimits(NamedTuple):
    """Largest magnitudes of a state in the samples."""

    magnitudes: Array  # float32 (heads, size)
    positions: int  # number of positions of all samples

    def scale(self, per: Literal["tensor", "channel"]) -> Array:
        """Return the scale, float32 (1,), or those of the channels, (heads * size,).

        Few values of a channel rarely have one as large as those of later texts. The largest of n normal values grows
        with the root of log n, so the limit of n values is raised to that of `EXPECTED_VALUES`.
        """
        whole = per == "tensor"
        limit = self.magnitudes.max(keepdims=True) if whole else self.magnitudes
        count = self.positions * (self.magnitudes.size if whole else 1)
        margin = max(1.0, math.log(EXPECTED_VALUES) / math.log(max(count, 2))) ** 0.5
        # A channel that is always 0 in the samples gets the scale of the largest one.
        limits = np.where(limit > 0, limit, limit.max()).reshape(-1) * (margin / CACHE_LIMIT)
        scales: Array = np.maximum(limits, SMALLEST_SCALE).astype(np.float32)
        return scales


def cache_limits(caches: Iterable[AttentionCache], results: Iterable[Mapping[str, Array]]) -> dict[str, StateLimits]:
    """Return the largest magnitudes of the present states by output name.

    `results` are the outputs of the float model for each sample, by name.

    Raises a DataError if a state has NaN or infinite values, or if all states of the samples are empty.
    """
    names = [name for cache in caches if not cache.reason for name in cache.outputs]
    limits: dict[str, StateLimits] = {}
    for outputs in results:
        for name in names:
            batch, _, positions, _ = outputs[name].shape
            magnitudes = np.abs(outputs[name]).max(axis=(0, 2), initial=0)
            if not np.isfinite(magnitudes).all():
                raise DataError(f"The state {name!r} has NaN or infinite values on a sample. Check the data.")
            previous = limits.get(name, StateLimits(magnitudes=magnitudes, positions=0))
            limits[name] = StateLimits(
                magnitudes=np.maximum(previous.magnitudes, magnitudes), positions=previous.positions + batch * positions
            )
    if not all(limit.magnitudes.any() for limit in limits.values()) or len(limits) < len(names):
        raise DataError("The samples give no present states, so their scales are unknown. Give data with tokens.")
    return limits


def with_int8_cache(
    model: Model, limits: Mapping[str, StateLimits], per: Literal["tensor", "channel"]
) -> tuple[Model, tuple[BoundaryTensor, ...]]:
    """Return a model whose caches are int8, and its past and present states.

    `limits` are those of `cache_limits`, and `per` tells how many scales a state has.
    """
    changed, tensors = model.copy(), []
    graph = changed.main
    for cache in find_caches(model):
        ends = [*zip(cache.inputs, ["input"] * 2, strict=True), *zip(cache.outputs, ["output"] * 2, strict=False)]
        if cache.reason:
            tensors += [_state(name, role, reason=f"{cache.op} is the op, and {cache.reason}") for name, role in ends]
            continue
        op, scales = graph.op(cache.op), []
        for part, output in enumerate(cache.outputs):
            scale = limits[output].scale(per)
            name = graph.unique_name(f"{op.name}/{'kv'[part]}_scale")
            constant = add_constant(graph, name, scale, op_type="Constant", rule=CACHE_RULE)
            graph.set_source(Use("", op.name, FIRST_SCALE_SLOT + part), constant)
            scales.append((float(scale.max()), constant.op))
        kinds = dict.fromkeys(CACHE_ATTRS, f"PER_{per.upper()}")
        _set_cache_type(graph, graph.op(op.name), cache.inputs, "int8", {**op.attrs, **kinds, "kv_cache_bit_width": 8})
        tensors += [
            _state(name, role, scale=scale, constants=(constant,), cache=per)
            for (name, role), (scale, constant) in zip(ends, scales * 2, strict=True)
        ]
    check_invariants(changed, "the quantization of caches")
    provenance = dict(model.provenance or {})
    entries = json.loads(provenance.get(IO_KEY, "[]")) + [asdict(tensor) for tensor in tensors if not tensor.reason]
    provenance[IO_KEY] = json.dumps(entries)
    return replace(changed, provenance=provenance, original_model=model.original_model), tuple(tensors)


def _state(name: str, role: str, **fields: Any) -> BoundaryTensor:
    """Return a past or present state, float32 if `fields` have a reason for that."""
    dtype = "float32" if "reason" in fields else "int8"
    return BoundaryTensor(name=name, role=role, dtype=dtype, **fields)  # type: ignore[arg-type]  # checked literals


def restore_float_cache(model: Model, tensors: Iterable[BoundaryTensor]) -> None:
    """Make the caches in place float32 again whose past or present states are among `tensors`."""
    graph, constants = model.main, {constant for tensor in tensors if tensor.cache for constant in tensor.constants}
    for op in [op for op in graph.ops() if op.type == ATTENTION]:
        slots = graph.slots(op.name)
        scales = [slot for slot in slots[FIRST_SCALE_SLOT : FIRST_SCALE_SLOT + 2] if slot and slot.op in constants]
        if len(scales) < len(CACHE_ATTRS):
            continue
        inputs = [slot.op for slot in slots[FIRST_PAST_SLOT : FIRST_PAST_SLOT + 2] if slot is not None]
        added = {*CACHE_ATTRS, "kv_cache_bit_width"}
        attrs = {name: value for name, value in op.attrs.items() if name not in added}
        _set_cache_type(graph, op, inputs, "float32", attrs)
        for part in range(len(CACHE_ATTRS)):
            graph.set_source(Use("", op.name, FIRST_SCALE_SLOT + part), None)
        remove_unread_ops(model, scales)


def _set_cache_type(graph: Graph, op: Op, inputs: Sequence[str], dtype: str, attrs: Mapping[str, object]) -> None:
    """Give the past and present states of an op a type, and the op its attributes."""
    outputs = [
        replace(output, dtype=dtype) if port >= FIRST_PRESENT_PORT and port <= len(CACHE_ATTRS) else output
        for port, output in enumerate(op.outputs)
    ]
    graph.replace_op(replace(op, attrs=attrs, outputs=tuple(outputs)))
    for past in map(graph.op, inputs):
        graph.replace_op(replace(past, outputs=(replace(past.outputs[0], dtype=dtype),)))
