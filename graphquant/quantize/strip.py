"""Remove inserted quantization: consumers read the float tensors again, and integer weights become floats.

If the model has a record of its source, `quantize.source_record` restores that to the bit instead.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from graphquant.errors import InternalError
from graphquant.ir import Model, Op, Parameters, TensorRef, Use, check_invariants, fully_known_shape, paused_gc
from graphquant.ir.op_matching import is_inserted
from graphquant.numerics import Array, QParams, dequantize
from graphquant.qdq import read_qparams
from graphquant.qdq.family import add_constant, new_op
from graphquant.quantize.integer_io import integer_tensors, restore_float_cache, with_float_io
from graphquant.quantize.preparation_undo import remove_unread_ops
from graphquant.quantize.prepare import PREPARATION_STEPS
from graphquant.utils.option_types import type_adapter

BIASES_KEY = "biases"  # key of the original biases in the provenance
FACTORS_KEY = "factors"  # key of the factors of channels in the provenance
MAX_EXPONENT = 127  # limit of the exponents of factors, which are int8


class OriginalBias(NamedTuple):
    """Bias of an op before an algorithm changed it."""

    use: Use
    bias: TensorRef | None  # the constant, None if there was none
    shape: tuple[int, ...]
    values: str  # base64 of its float32 values


def original_biases(prepared: Model, values: Mapping[Use, Array]) -> list[OriginalBias]:
    """Return the biases of the prepared model for the metadata. Only the first use of a bias has its values."""
    biases = {use: prepared.graphs[use.graph].source_of(use) for use in values}
    first_uses = {bias: use for use, bias in reversed(biases.items())}
    return [
        OriginalBias(use, bias, values[use].shape, base64.b64encode(values[use].astype("<f4").tobytes()).decode())
        if bias is not None and first_uses[bias] == use
        else OriginalBias(use, bias, (0,), "")
        for use, bias in biases.items()
    ]


class ChannelFactors(NamedTuple):
    """Powers of two by which an algorithm multiplied the channels of a constant."""

    constant: TensorRef
    shape: tuple[int, ...]  # that of the constant, with 1 for axes along which the factors are equal
    exponents: str  # base64 of the compressed int8 exponents


def channel_factors(prepared: Model, scaled: Model) -> list[ChannelFactors]:
    """Return the factors of the constants of the prepared model that scaling changed, for the metadata."""
    factors = []
    for name, graph in prepared.graphs.items():
        for op in graph.ops():
            scaled_op = scaled.graphs[name].op(op.name)
            if scaled_op is not op and op.read_value is not None and scaled_op.read_value is not None:
                before, after = op.read_value(), scaled_op.read_value()
                exponents = _common_exponents(before, after)
                if np.array_equal(np.ldexp(before, exponents), after):  # else it was changed in another way
                    data = base64.b64encode(zlib.compress(exponents.astype(np.int8).tobytes())).decode()
                    factors.append(ChannelFactors(TensorRef(name, op.name), exponents.shape, data))
    return factors


def _common_exponents(before: Array, after: Array) -> Array:
    """Return the exponents of `after / before`, with one element along axes where they are equal; zeros have any."""
    is_known = before != 0
    _, exponents = np.frexp(np.divide(after, before, out=np.ones_like(before), where=is_known))
    low, high = np.where(is_known, exponents - 1, MAX_EXPONENT), np.where(is_known, exponents - 1, -MAX_EXPONENT)
    for axis in range(before.ndim):
        lowest, highest = low.min(axis, keepdims=True), high.max(axis, keepdims=True)
        if np.all(lowest >= highest):
            low, high = lowest, highest
    return np.where(low > high, 0, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrippedModel:
    """Result of `strip_quantization`."""

    model: Model  # the model without the quantization
    ops: tuple[TensorRef, ...]  # the removed quantization ops, in the order of the model
    # The integer constants that are floats again, with their quantization parameters.
    weights: tuple[tuple[TensorRef, QParams], ...]
    remaining: tuple[tuple[TensorRef, str], ...]  # quantization ops that could not be removed, with the reason
    replaced_arguments: tuple[TensorRef, ...]  # function arguments that were replaced by a constant in the function
    restored_biases: int  # number of ops that read their bias from before bias correction again
    exponents: Mapping[TensorRef, Array]  # of the factors by which constants were divided, which broadcast to them


@paused_gc()
def strip_quantization(model: Model, provenance: Mapping[str, str] | None = None) -> StrippedModel:
    """Return a copy of `model` without the quantization that graphquant inserted; `provenance` is its metadata.

    Raises a ModelError if a weight in the model's files cannot be read.
    """
    return _QuantizationRemover(model, provenance or {}).run()


class _QuantizationRemover:
    """Removes quantization from a copy of a model."""

    def __init__(self, model: Model, provenance: Mapping[str, str]) -> None:
        self._model = model
        self._provenance = provenance
        self._changed = with_float_io(model, provenance)
        restore_float_cache(self._changed, integer_tensors(provenance))
        self._parameters = Parameters(model)
        # Scales that a DequantizeLinear computes, as those of NVFP4, are parts of the quantization that reads them.
        self._scales = {
            tensor
            for graph in model.graphs.values()
            for op in graph.ops()
            if op.kind == "dequantize"
            for tensor in graph.slots(op.name)[1:2]
            if tensor is not None and model.op(tensor).kind == "dequantize"
        }
        self._floats: dict[tuple[str, str, bytes], tuple[TensorRef, QParams]] = {}
        self._remaining: dict[TensorRef, str] = {}
        self._replaced_arguments: dict[TensorRef, None] = {}
        self._exponents: dict[TensorRef, Array] = {}

    def run(self) -> StrippedModel:
        changed = self._changed
        changed.provenance = {}
        inserted_ops = [
            TensorRef(name, op.name)
            for name, graph in self._model.graphs.items()
            for op in graph.ops()
            if self._is_removable(op) and TensorRef(name, op.name) not in self._scales
        ]
        for op_ref in inserted_ops:
            self._reroute_readers(op_ref)
        removed = []
        for op_ref in reversed(inserted_ops):
            graph = changed.graphs[op_ref.graph]
            if graph.successors(op_ref.op):
                self._remaining.setdefault(op_ref, "remaining ops read it")
            else:
                graph.remove_op(op_ref.op)
                removed.append(op_ref)
        for scale in self._scales:
            graph = changed.graphs[scale.graph]
            if self._is_removable(self._model.op(scale)) and not graph.successors(scale.op):
                graph.remove_op(scale.op)
                removed.append(scale)
        original_inputs = (slot for ref in removed for slot in self._model.graphs[ref.graph].slots(ref.op))
        remove_unread_ops(changed, [slot for slot in original_inputs if slot is not None])
        restored_biases = self._restore_biases()
        self._divide_by_factors()
        if self._exponents:
            self._skip_factor_products()
        self._remove_leftovers()
        check_invariants(changed, "strip")
        return StrippedModel(
            model=changed,
            ops=tuple(reversed(removed)),
            weights=tuple(self._floats.values()),
            remaining=tuple(self._remaining.items()),
            replaced_arguments=tuple(self._replaced_arguments),
            restored_biases=restored_biases,
            exponents=self._exponents,
        )

    def _is_removable(self, op: Op) -> bool:
        """Return True if `op` is a quantization op that graphquant inserted."""
        return bool(op.rule) and op.rule not in PREPARATION_STEPS and is_inserted(op)

    def _reroute_readers(self, op_ref: TensorRef) -> None:
        """Reroute the consumers of a quantized tensor to the float tensor behind it."""
        op = self._model.op(op_ref)
        uses = [
            use
            for use in self._changed.graphs[op_ref.graph].consumers(op_ref)
            if use.slot or not self._is_removable(self._changed.graphs[use.graph].op(use.op))
        ]
        if not uses:
            return
        changed_op = self._changed.op(op_ref)
        if op.kind == "quantize" and changed_op.outputs[0].dtype == op.outputs[0].dtype:
            self._remaining[op_ref] = "other ops read its integers"
            return
        float_source = self._find_float_source(op_ref)
        if float_source is None:
            self._remaining[op_ref] = "its integers are computed at run time, or its scale is not in the model"
        else:
            self._changed.graphs[op_ref.graph].reroute(op_ref, uses, float_source)

    def _find_float_source(self, op_ref: TensorRef) -> TensorRef | None:
        """Return the float tensor behind a quantized one, None if there is none."""
        current = op_ref
        for _ in range(len(self._model.graphs[op_ref.graph]) + 1):  # a broken model may hold a ring
            op = self._model.op(current)
            if not self._is_removable(op):
                return current
            slots = self._model.graphs[current.graph].slots(current.op)
            if not slots or slots[0] is None:
                return None
            source = self._model.op(slots[0])
            is_float = self._changed.output(slots[0]).dtype == op.outputs[0].dtype and source.kind != "quantize"
            if is_float and not self._is_removable(source):  # a barrier reads the output of a DequantizeLinear
                return slots[0]
            if op.kind == "dequantize" and not (source.kind == "quantize" and self._is_removable(source)):
                return self._add_float_constant(current, slots[0])
            current = slots[0]
        return None

    def _add_float_constant(self, op_ref: TensorRef, integers: TensorRef) -> TensorRef | None:
        """Add a constant with the dequantized values of a stored integer weight."""
        op = self._model.op(op_ref)
        params = read_qparams(self._model.graphs[op_ref.graph], op, self._parameters)
        if not isinstance(params, QParams) or not self._parameters.is_parameter(integers):
            return None
        home, name = self._find_anchor_home(op_ref, op.anchor) if op.anchor else (op_ref.graph, f"{integers.op}/float")
        graph, dtype = self._changed.graphs[home], op.outputs[0].dtype or "float32"
        read_value = partial(_dequantized_weight, self._parameters, integers, params, dtype)
        # Readers that share a weight may store it with different scales, as layers that share a bias do.
        key = (home, name, b"" if op.anchor else params.scale.tobytes() + params.zero_point.tobytes())
        if key in self._floats:
            shared, other_params = self._floats[key]
            if params.scale.max(initial=0) < other_params.scale.max(initial=0):
                graph.replace_op(replace(graph.op(shared.op), read_value=read_value))
                self._floats[key] = shared, params
            return shared
        if name in graph and graph.op(name).kind == "input":
            self._replaced_arguments[TensorRef(home, name)] = None
        elif op.anchor and name in self._model.graphs[home]:  # other ops read the float weight
            return TensorRef(home, name)
        shape = self._model.output(integers).shape
        constant = new_op(graph, name, dtype, shape, kind="constant", type="Constant", roles=(), read_value=read_value)
        if op.anchor and name not in graph and any(name in body.inputs for body in self._changed.graphs.values()):
            constant = replace(constant, name=name, outputs=(replace(constant.outputs[0], name=name),))
        float_tensor = graph.add_op(constant)
        self._floats[key] = float_tensor, params
        return float_tensor

    def _find_anchor_home(self, op_ref: TensorRef, anchor: str) -> tuple[str, str]:
        """Return the graph and the op of the tensor that an op is anchored to: its own graph or an enclosing one."""
        name, graph = anchor.rpartition(":")[0], self._model.graphs[op_ref.graph]
        while graph.name and not name.startswith(f"{graph.name}/") and graph.parent is not None:
            graph = self._model.graphs[graph.parent[0]]
        return graph.name, name.removeprefix(f"{graph.name}/") if graph.name else name

    def _restore_biases(self) -> int:
        """Let ops read their original biases, and return their number.

        Entries that are damaged, or do not fit a changed model, are ignored.
        """
        changed, restored, exact = self._changed, set[Use](), set[TensorRef | None]()
        parameters = Parameters(changed)
        try:
            entries = type_adapter(tuple[OriginalBias, ...]).validate_json(self._provenance.get(BIASES_KEY, "[]"))
            values = [np.frombuffer(base64.b64decode(bias.values), "<f4").reshape(bias.shape) for bias in entries]
        except ValueError:  # also of pydantic
            return 0
        for (use, bias, shape, _), value in zip(entries, values, strict=True):
            graph, home = (changed.graphs.get(ref.graph) for ref in (use, bias or use))
            if graph is None or home is None or use.op not in graph or not 0 <= use.slot < len(graph.slots(use.op)):
                continue
            original = None if bias is None or bias.op not in home else home.op(bias.op)
            if bias is None and graph.op(use.op).role(use.slot) != "bias":
                continue
            if original is None and bias is not None:
                if not bias.op or not value.size:
                    continue
                add_constant(home, bias.op, value, op_type="Initializer", rule="")
            elif original is not None:
                # A hostile file could make a cycle, or name an output that the op does not have.
                is_computed = parameters.is_parameter(TensorRef(graph.name, use.op))
                if is_computed or bias != TensorRef(home.name, original.name) or not parameters.is_parameter(bias):
                    continue
                if original.kind == "constant" and original.outputs[0].shape == shape:
                    home.replace_op(replace(original, read_value=value.view))
            corrected = graph.slots(use.op)[use.slot]
            graph.set_source(use, bias)
            remove_unread_ops(changed, [corrected] if corrected is not None else [])
            exact.update({bias, corrected})
            restored.add(use)
        self._floats = {key: entry for key, entry in self._floats.items() if entry[0] not in exact}
        return len(restored)

    def _divide_by_factors(self) -> None:
        """Divide constants by the factors of their channels. Entries that are damaged, or do not fit, are ignored."""
        with suppress(ValueError, zlib.error):  # also of pydantic
            entries = type_adapter(tuple[ChannelFactors, ...]).validate_json(self._provenance.get(FACTORS_KEY, "[]"))
            for constant, shape, data in entries:
                graph = self._changed.graphs.get(constant.graph)
                if graph is None or constant.op not in graph:
                    continue
                op = graph.op(constant.op)
                sizes, read_value = fully_known_shape(op.outputs[0].shape), op.read_value
                if sizes is None or read_value is None or len(sizes) != len(shape):
                    continue
                if all(size in {1, whole} for size, whole in zip(shape, sizes, strict=True)):
                    content = zlib.decompressobj().decompress(base64.b64decode(data), math.prod(shape) + 1)
                    exponents = np.frombuffer(content, np.int8).reshape(shape).astype(np.int32)
                    graph.replace_op(replace(op, read_value=partial(_divided, read_value, exponents)))
                    self._exponents[constant] = exponents

    def _skip_factor_products(self) -> None:
        """Let the readers of products that an algorithm inserted, with the factors of constants, read the input."""
        for name, graph in self._changed.graphs.items():
            for op in [op for op in graph.ops() if op.kind == "mul" and op.rule and op.rule not in PREPARATION_STEPS]:
                product, tensor = TensorRef(name, op.name), next(iter(graph.slots(op.name)), None)
                if tensor is not None:
                    graph.reroute(product, graph.consumers(product), tensor)

    def _remove_leftovers(self) -> None:
        """Remove auxiliary ops: variables of learned ranges and their initializers."""
        for graph in self._changed.graphs.values():
            for op in reversed(list(graph.ops())):
                is_leftover = bool(op.rule) and op.rule not in PREPARATION_STEPS and op.kind not in {"output", "input"}
                if is_leftover and op.name in graph and not graph.successors(op.name) and not self._is_removable(op):
                    graph.remove_op(op.name)


def _divided(read_value: Callable[[], Array], exponents: Array) -> Array:
    """Return a constant divided by powers of two."""
    value = read_value()
    with np.errstate(over="ignore", under="ignore"):  # of a file that was changed
        return np.asarray(np.ldexp(value, -exponents), value.dtype)


def _dequantized_weight(parameters: Parameters, integers: TensorRef, params: QParams, dtype: str) -> Array:
    """Return the weight as floats."""
    if (value := parameters.value(integers)) is None:
        raise InternalError(f"the weight {integers} is missing.")
    return dequantize(value, params).astype(dtype, copy=False)
