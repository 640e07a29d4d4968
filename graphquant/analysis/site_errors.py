"""Error of each quantization of a model: local, and accumulated with all earlier ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from graphquant import formats
from graphquant.analysis.comparison import ErrorSums, SiteFigures, ignore_overflow
from graphquant.analysis.model_summary import QuantizationOp, summarize_model
from graphquant.errors import InternalError
from graphquant.ir import QUANTIZATION_KINDS, Model, Parameters, TensorRef
from graphquant.ir.op_matching import OpMatching, consumers_through_qdq, match_ops, unclipped_source, unquantized_source
from graphquant.numerics import Array, QParams, broadcast_to_tensor, dequantize, iter_slabs, quantize
from graphquant.quantize import parse_step_names, prepare

ObservedTensors = Mapping[TensorRef, Sequence[Array]]

VALUE_PRESERVING_STEPS = ("initializer-inputs", "fold-batchnorm")
"""Preparation steps that change values only by rounding."""

BIAS_BITS = 32  # bit width that only biases have


@dataclass(slots=True, kw_only=True, eq=False)
class ComparedSite:
    """Quantization op with its running figures."""

    quantization_op: QuantizationOp
    tensor: TensorRef  # the quantized tensor, before clamping
    parameter: bool  # True for a weight, whose figures need no run
    input_tensor: TensorRef | None  # Input of the op in the quantized model; None for stored integers.
    output_tensor: TensorRef  # output of the op
    float_tensor: TensorRef | None  # corresponding tensor of the float model, or None
    # Read the float weight behind stored integers; None otherwise.
    read_float_weight: Callable[[], Array] | None = None
    local_errors: ErrorSums = field(default_factory=ErrorSums)  # errors relative to the input of the op
    accumulated_errors: ErrorSums = field(default_factory=ErrorSums)  # errors relative to the float model
    note: str = ""  # reason for an unknown figure
    changed_bias: bool = False  # True for an int32 bias that differs from the float one by more than its rounding
    corrected: bool = False  # True for a bias that bias correction changed

    def add(self, runs: Sequence[tuple[ObservedTensors, ObservedTensors]]) -> None:
        """Add the observed values of some runs of the quantized and of the float model."""
        actual = [quantized_values.get(self.output_tensor, ()) for quantized_values, _ in runs]
        if self.input_tensor is not None:
            inputs = [quantized_values.get(self.input_tensor, ()) for quantized_values, _ in runs]
            _add_runs(self.local_errors, zip(inputs, actual, strict=True))
        if self.float_tensor is not None:
            expected = [float_values[self.float_tensor] if float_values else None for _, float_values in runs]
            _add_runs(self.accumulated_errors, zip(expected, actual, strict=True))

    def drop_reference(self, *, drop_local: bool) -> None:
        """Drop the comparison with a float model that differs by design, and with `drop_local` the local error."""
        self.note, self.float_tensor = "its channels were scaled before it was quantized", None
        self.accumulated_errors = ErrorSums()
        if drop_local:
            self.local_errors, self.read_float_weight = ErrorSums(), None

    def figures(self) -> SiteFigures:
        """Return the figures over all samples."""
        problem = self.note or self.local_errors.problem or self.accumulated_errors.problem
        if not self.local_errors.count and not self.accumulated_errors.count and not problem:
            problem = "it was not reached"
        local, accumulated = (
            errors.sqnr if errors.count and not errors.problem else None
            for errors in (self.local_errors, self.accumulated_errors)
        )
        op, params = self.quantization_op, self.quantization_op.params
        return SiteFigures(
            graph=op.graph,
            op=op.op,
            tensor=str(self.tensor),
            rule=op.rule,
            parameter=self.parameter,
            local=local,
            accumulated=accumulated,
            bias=isinstance(params, QParams) and params.type.bits == BIAS_BITS,
            note=problem,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparedSites:
    """Quantizations of a model matched with its float model."""

    sites: tuple[ComparedSite, ...]  # all of them, in graph order
    float_model: Model  # the float model, prepared like the quantized model
    float_has_quantization: bool  # True if the float model contains quantization, so that observing changes its results

    def tensors_to_observe(self, outputs: Iterable[TensorRef]) -> tuple[list[TensorRef], list[TensorRef]]:
        """Tensors to observe in the quantized model, whose outputs are `outputs`, and in the float model."""
        activations = [site for site in self.sites if not site.parameter]
        quantized_tensors = dict.fromkeys(
            tensor for site in activations for tensor in (site.input_tensor, site.output_tensor) if tensor is not None
        )
        float_tensors = dict.fromkeys(site.float_tensor for site in activations if site.float_tensor is not None)
        if quantized_tensors:  # else nothing is observed
            quantized_tensors |= dict.fromkeys(outputs)
        return list(quantized_tensors), list(float_tensors)

    def drop_hidden(self, hidden: Mapping[TensorRef, str], hidden_float: Iterable[TensorRef]) -> None:
        """Drop tensors that no runner can observe: `hidden` (quantized model) and `hidden_float`."""
        hidden_references = set(hidden_float)
        for site in self.sites:
            reasons = [
                hidden[tensor]
                for tensor in (site.input_tensor, site.output_tensor)
                if tensor is not None and tensor in hidden
            ]
            if reasons and not site.parameter:
                site.note, site.input_tensor, site.float_tensor = reasons[0], None, None
            elif site.float_tensor in hidden_references:
                site.float_tensor, site.note = None, "the float model does not show this tensor"

    def figures(self) -> tuple[SiteFigures, ...]:
        """Figures of each site, the largest local error first; unknown figures come last."""

        def rank(site: SiteFigures) -> tuple[bool, float, bool, float, str, str]:
            local, accumulated = ((sqnr is None, sqnr or 0.0) for sqnr in (site.local, site.accumulated))
            return *local, *accumulated, site.graph, site.op

        return tuple(sorted((site.figures() for site in self.sites), key=rank))


def match_sites(float_model: Model, quantized_model: Model, prepared: Model | None = None) -> ComparedSites:
    """Match the quantizations of `quantized_model` with the float model. Weights are measured at once.

    `prepared` is the float model with the preparation steps of the quantized one; by default they are repeated.
    """
    op_pairs = None
    if float_model.format == quantized_model.format:
        prepared = prepared or prepare_like(float_model, quantized_model)
        op_pairs = match_ops(quantized_model, prepared)
    prepared = prepared or float_model
    parameters, float_weights = Parameters(quantized_model), _FloatWeights(quantized_model, prepared, op_pairs)
    record = formats.provenance_of(quantized_model)
    compared, rescaled_tensors = [], _rescaled_tensors(record)
    has_corrected_biases = "bias-correction" in record.get("algorithms", "")
    for quantization_op in summarize_model(quantized_model).quantization_ops:
        output_tensor = TensorRef(quantization_op.graph, quantization_op.op)
        quantized_tensor = unclipped_source(quantized_model, quantization_op.tensor)
        reads_integers = (
            quantized_model.op(output_tensor).kind == "dequantize"
            and quantized_model.graphs[output_tensor.graph].slots(output_tensor.op)[0] == quantized_tensor
        )
        parameter = parameters.is_parameter(quantized_tensor)
        gives_integers = quantized_model.op(output_tensor).kind == "quantize"  # as those of an integer output
        if gives_integers or (reads_integers and not parameter):
            continue  # integers that the model computes
        unquantized = unquantized_source(quantized_model, quantized_tensor)
        site = ComparedSite(
            quantization_op=quantization_op,
            tensor=quantized_tensor,
            parameter=parameter,
            input_tensor=None if reads_integers else quantized_tensor,
            output_tensor=output_tensor,
            float_tensor=None if op_pairs is None or parameter else op_pairs.matching_tensor(unquantized),
        )
        if parameter:
            _measure_weight(site, parameters, float_weights)
            if has_corrected_biases and site.changed_bias:  # its change is no error of its quantization
                site.corrected, site.note, site.local_errors = True, "bias correction changed it", ErrorSums()
        elif op_pairs is not None and site.float_tensor is None:
            site.note = "no tensor of the float model is its match"
        if quantized_model.op(output_tensor).anchor in rescaled_tensors:
            site.drop_reference(drop_local=reads_integers)
        compared.append(site)
    kinds = {op.kind for graph in float_model.graphs.values() for op in graph.ops()}
    float_has_quantization = not kinds.isdisjoint(QUANTIZATION_KINDS)
    return ComparedSites(sites=tuple(compared), float_model=prepared, float_has_quantization=float_has_quantization)


def _rescaled_tensors(provenance: Mapping[str, str]) -> frozenset[str]:
    """Tensors and weights whose channels were scaled before quantization, as recorded in the model."""
    try:
        names = json.loads(provenance.get("scaled", "[]"))
    except (ValueError, RecursionError):  # whoever wrote that is no graphquant
        return frozenset()
    return frozenset(map(str, names)) if isinstance(names, list) else frozenset()


def prepare_like(float_model: Model, quantized_model: Model) -> Model:
    """Prepare the float model with the steps that the quantized model records or its op names show."""
    steps = formats.format_module(quantized_model.format).read_metadata(quantized_model).get("steps", "")
    if steps:
        return prepare(float_model, parse_step_names(steps))[0]
    has_folded_ops = any(
        op.kind == "batchnorm" and op.name not in quantized_model.graphs[name]
        for name, graph in float_model.graphs.items()
        if name in quantized_model.graphs
        for op in graph.ops()
    )
    return prepare(float_model, VALUE_PRESERVING_STEPS)[0] if has_folded_ops else float_model


class _FloatWeights:
    """Weights of the float model."""

    def __init__(self, quantized_model: Model, float_model: Model, op_pairs: OpMatching | None) -> None:
        self._quantized_model, self._float_model, self._op_pairs = quantized_model, float_model, op_pairs
        self._parameters = Parameters(float_model)

    def matching_value(self, quantized_weight: TensorRef) -> Array | None:
        """Find the float value at the use that reads a quantized weight."""
        if self._op_pairs is None:
            return None
        for use in consumers_through_qdq(self._quantized_model, quantized_weight):
            float_op = self._op_pairs.forward.get((use.graph, use.op))
            slots = [] if float_op is None else self._float_model.graphs[float_op[0]].slots(float_op[1])
            source = slots[use.slot] if use.slot < len(slots) else None
            if source is not None:
                return self._parameters.value(source)
        return None


def _measure_weight(site: ComparedSite, parameters: Parameters, float_weights: _FloatWeights) -> None:
    """Measure a weight from its values."""
    params, value = site.quantization_op.params, parameters.value(site.quantization_op.tensor)
    if not isinstance(params, QParams) or value is None:
        site.note = "its scale or its values are not in the model"
        return
    axis, last_axis = params.axis, value.ndim - 1
    fits = axis is None or params.block is not None or (axis <= last_axis and value.shape[axis] == params.scale.size)
    params = params if fits else replace(params, axis=last_axis)  # TensorFlow's ops always use the last axis
    stores_integers = site.input_tensor is None
    expected = float_weights.matching_value(site.output_tensor)
    if expected is not None and expected.size != value.size:
        expected = None
    if expected is None and stores_integers:
        site.note = "the float model has no such weight"
    elif expected is not None and stores_integers:
        site.read_float_weight = partial(_reshaped_float_weight, float_weights, site.output_tensor, value.shape)
    local_reference = expected if stores_integers else value
    is_bias = stores_integers and params.type.bits == BIAS_BITS
    # Some rows at a time, because a weight can take much of the memory.
    for rows, row_params in iter_slabs(value.shape, params):
        integers = value[rows] if stores_integers else quantize(value[rows], row_params)
        dequantized = dequantize(integers, row_params)
        if is_bias and expected is not None:
            difference = np.abs(expected.reshape(value.shape)[rows] - dequantized)
            steps = broadcast_to_tensor(row_params.scale, row_params, difference.shape)
            site.changed_bias |= bool(np.any(difference > steps))
        for errors, reference in ((site.local_errors, local_reference), (site.accumulated_errors, expected)):
            if reference is not None:
                with ignore_overflow():
                    errors.add(reference.reshape(value.shape)[rows], dequantized)


def _reshaped_float_weight(float_weights: _FloatWeights, quantized_weight: TensorRef, shape: tuple[int, ...]) -> Array:
    """Read a float weight in the shape of the quantized one."""
    if (value := float_weights.matching_value(quantized_weight)) is None:
        raise InternalError(f"the float weight of {quantized_weight} no longer exists.")
    return value.reshape(shape)


def _add_runs(errors: ErrorSums, runs: Iterable[tuple[Sequence[Array] | None, Sequence[Array]]]) -> None:
    """Add the values of several runs at once, because numpy's overhead dominates small arrays."""
    pairs: list[tuple[Array, Array]] = []
    for expected, actual in runs:
        if expected is None or not actual:
            continue  # it is on a branch that was not taken
        if len(expected) != len(actual):
            errors.problem = errors.problem or "it was computed another number of times"
            continue
        pairs += zip(expected, actual, strict=True)
    same_shape = [pair for pair in pairs if pair[0].shape == pair[1].shape]
    if len(same_shape) > 1:
        first, second = (
            np.concatenate([array.reshape(-1) for array in arrays]) for arrays in zip(*same_shape, strict=True)
        )
        pairs = [(first, second), *(pair for pair in pairs if pair[0].shape != pair[1].shape)]
    for first, second in pairs:
        errors.add(first, second)
