"""Past keys and values of GroupQueryAttention as int8, with scales of the values that calibration samples give.

ONNX Runtime's op reads and writes such a cache itself, so no Q/DQ pair is needed. A scale is per tensor, or per
channel: one for each head and each of its values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from graphquant.errors import DataError
from graphquant.ir import Graph, Model, Op, TensorRef, Use, check_invariants
from graphquant.numerics import SMALLEST_SCALE, Array
from graphquant.qdq.family import add_constant
from graphquant.qdq.onnx_qdq import MICROSOFT_DOMAIN
from graphquant.quantize.integer_io import IO_KEY, BoundaryTensor, output_name
from graphquant.quantize.preparation_undo import remove_unread_ops

ATTENTION = "GroupQueryAttention"
CACHE_RULE = "kv-cache"  # rule of the constants with scales
CACHE_LIMIT = 127  # integer of the largest magnitude
EXPECTED_VALUES = 100_000  # values of a channel, or of a tensor, that should rarely be clipped

FIRST_PAST_SLOT, FIRST_SCALE_SLOT = 3, 12
"""Slots of the op; the value of each part follows its key."""

FIRST_PRESENT_PORT = 1
CACHE_ATTRS = ("k_quant_type", "v_quant_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCache:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLimits:
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
