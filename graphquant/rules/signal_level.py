"""Ops between a signal and the normalization that removes its level.

A normalization returns the same values for a signal and for ten times the signal. If only proportional ops are between
both, quiet samples matter as much as loud ones, and 8 bits for the loudest sample leave nothing of the quiet ones.

Degrees tell such ops in any spelling: a tensor has the degree d if it grows by a factor of k**d where the signal grows
by a factor of k. A product or quotient of degree 0, whose operands have other degrees, is a normalized value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphquant.ir import TRANSPARENT_KINDS, VALUE_MOVING_KINDS, WEIGHTED_KINDS, OpKey, TensorRef, reachable

if TYPE_CHECKING:
    from graphquant.ir import Graph, Model, Op, Parameters

MAX_SIGNAL_RANK = 3  # inputs with more axes are images, whose levels lie close together
MAX_EPSILON = 0.01  # largest magnitude of a constant that a normalization adds against a division by zero
MIN_LIMIT = 1e30  # magnitude above which a constant stands for infinity

NORMALIZATION_KINDS = frozenset({"layernorm", "rmsnorm", "instancenorm", "groupnorm"})
SOURCE_TYPES = frozenset({"IRFFT", "IRFFT2D", "IRFFT3D", "IFFT", "IFFT2D", "IFFT3D", "Log1p"})
"""Types of ops whose results are signals, like those of `log`: a logarithm of values that lie decades apart may be
normalized as well, by its mean or by its smallest and largest value."""

PROPORTIONAL_KINDS = (
    VALUE_MOVING_KINDS
    | TRANSPARENT_KINDS
    | {*("relu", "leaky_relu", "prelu", "avg_pool", "global_avg_pool", "resize", "reduce_mean", "reduce_sum")}
    | {*("reduce_max", "reduce_min", "read_variable")}
)
PROPORTIONAL_TYPES = frozenset({"RFFT", "FFT", "DFT", "STFT", "ReduceL1", "ReduceL2"})
PRODUCT_KINDS = WEIGHTED_KINDS | {"mul", "div", "einsum"}
SUM_KINDS = frozenset({"add", "sub", "max", "min", "clip"})
SIZE_ROLES = frozenset({"shape", "axis", "indices", "sizes", "repeats", "padding", "count", "like", "region"})
DEGREE_FACTORS = {"sqrt": 0.5, "rsqrt": -0.5}  # by kind
DEGREE_FACTORS_BY_TYPE = {
    **dict.fromkeys(("Square", "SQUARE", "SquaredDifference", "SQUARED_DIFFERENCE", "ReduceSumSquare"), 2.0),
    **dict.fromkeys(("Reciprocal", "Inv"), -1.0),
}


def find_unnormalized_ops(model: Model, parameters: Parameters) -> set[OpKey]:
    """Return the ops through which a signal reaches a normalization, proportional to the signal."""
    marked: set[OpKey] = set()
    input_degrees = {name: _signal_degrees(model.graphs[name]) for name in model.entry_graphs}  # by graph
    pending = list(input_degrees)
    for name in pending:
        graph = model.graphs[name]
        degrees = _GraphDegrees(graph, parameters, input_degrees[name])
        marked |= degrees.find_ops_before_normalizations()
        for op in graph.ops():
            for call in op.calls if op.kind == "call" else ():
                if call.graph in model.graphs and call.graph not in input_degrees:
                    operands = zip(model.graphs[call.graph].inputs, graph.slots(op.name), strict=False)
                    input_degrees[call.graph] = {
                        argument: degrees.of_tensor[tensor]
                        for argument, tensor in operands
                        if tensor is not None and tensor in degrees.of_tensor
                    }
                    pending.append(call.graph)
    return marked


def _signal_degrees(graph: Graph) -> dict[str, float]:
    """Return the degree 1 for each float input that is no image."""
    outputs = {name: graph.op(name).outputs[0] for name in graph.inputs if name in graph}
    return {
        name: 1.0
        for name, output in outputs.items()
        if (output.dtype or "").startswith("float") and 0 < len(output.shape or ()) <= MAX_SIGNAL_RANK
    }


class _GraphDegrees:
    """The degrees of the tensors of a graph. Tensors that follow the signal in another way have none."""

    def __init__(self, graph: Graph, parameters: Parameters, input_degrees: dict[str, float]) -> None:
        self._graph, self._parameters = graph, parameters
        self.of_tensor: dict[TensorRef, float] = {}
        self._normalized: list[TensorRef] = []  # operands of normalizations
        for name in graph.topological_order():
            op = graph.op(name)
            degree = input_degrees.get(name) if op.kind == "input" else self._degree(op)
            if degree is not None:
                self.of_tensor |= {TensorRef(graph.name, name, port): degree for port in range(len(op.outputs))}

    def find_ops_before_normalizations(self) -> set[OpKey]:
        """Return the ops that compute the operands of normalizations from the signal."""

        def proportional_operands(tensor: TensorRef) -> Sequence[TensorRef]:
            slots = () if self._is_source(self._graph.op(tensor.op)) else self._graph.slots(tensor.op)
            return [slot for slot in slots if slot is not None and slot in self.of_tensor]

        tensors = reachable(self._normalized, proportional_operands)
        names = {tensor.op for tensor in tensors if proportional_operands(tensor)}
        return {(self._graph.name, name) for name in names}

    def _degree(self, op: Op) -> float | None:
        """Return the degree of the outputs of an op, None if they do not follow the signal by a power of its factor."""
        if self._is_source(op):
            return 1.0
        slots = enumerate(self._graph.slots(op.name))
        data = {slot: tensor for slot, tensor in slots if tensor is not None and op.role(slot) not in SIZE_ROLES}
        operands = [tensor for tensor in data.values() if not self._parameters.is_parameter(tensor)]
        known = [self.of_tensor[tensor] for tensor in operands if tensor in self.of_tensor]
        if not known or len(known) < len(operands) or "bias" in map(op.role, data):
            return None
        if op.kind in NORMALIZATION_KINDS:
            self._normalized += operands
            return None
        tensors = [*data.values()]
        if op.kind in PRODUCT_KINDS:
            return self._product_degree(op, tensors)
        factor = self._degree_factor(op, [tensor for tensor in tensors if tensor not in operands])
        return None if factor is None or len(set(known)) > 1 else known[0] * factor

    def _is_source(self, op: Op) -> bool:
        """Return True for an op whose result is a signal."""
        is_source = op.kind == "log" or op.type in SOURCE_TYPES or (op.type == "DFT" and bool(op.attrs.get("inverse")))
        return is_source and not self._parameters.is_parameter(TensorRef(self._graph.name, op.name))

    def _degree_factor(self, op: Op, constants: Sequence[TensorRef]) -> float | None:
        """Return the factor by which an op multiplies the degree of its operands, None if there is none."""
        if op.kind == "pow":
            return self._parameters.number(constants[-1]) if constants else None
        if op.kind in SUM_KINDS:
            limits = [op.numeric_attr(name, 0) for name in ("min", "max") if name in op.attrs]
            # Too small, or too large, to change the values of ordinary signals.
            values = [*map(self._parameters.number, constants), *limits]
            is_neutral = all(value is not None and not MAX_EPSILON < abs(value) < MIN_LIMIT for value in values)
            return 1.0 if is_neutral else None
        if op.kind in PROPORTIONAL_KINDS or op.type in PROPORTIONAL_TYPES:
            return 1.0
        return DEGREE_FACTORS.get(op.kind, DEGREE_FACTORS_BY_TYPE.get(op.type))

    def _product_degree(self, op: Op, factors: Sequence[TensorRef]) -> float | None:
        """Return the degree of a product or quotient, None for a normalized value."""
        degrees = [self.of_tensor.get(tensor, 0.0) for tensor in factors]
        degree = degrees[0] - sum(degrees[1:]) if op.kind == "div" else sum(degrees)
        if not degree:
            self._normalized += [tensor for tensor in factors if tensor in self.of_tensor]
        return degree or None
