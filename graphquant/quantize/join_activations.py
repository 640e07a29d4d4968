"""Join the ops of an activation that is written in parts, such as x * sigmoid(x), to the one op of ONNX Runtime.

ONNX Runtime joins the parts itself where they are float. Behind an op on integers it gives each part a DequantizeLinear
of its own first, and does not join them any more. An activation is recognized by its values, in any spelling.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from graphquant.ir import Graph, Model, Op, Parameters, TensorRef
from graphquant.qdq.onnx_qdq import MICROSOFT_DOMAIN
from graphquant.quantize.preparation_undo import OpEdits
from graphquant.quantize.saturation import EVALUATED_KINDS, evaluate_op, gelu, gelu_by_tanh, hard_swish, silu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphquant.numerics import Array
    from graphquant.quantize.preparation_undo import Step

JOIN_ACTIVATIONS_STEP: Final = "join-activations"

MAX_PARTS: Final = 12  # most ops of one activation
END_KINDS: Final = frozenset({"mul", "div"})  # kinds of the last op of an activation
GATE_KINDS: Final = frozenset({"sigmoid", "hard_sigmoid", "tanh", "erf", "clip", "relu6", "relu", "max", "min"})
FAR: Final = np.array([10, 16, 32, 64, 100, 1e3, 1e4, 1e5])
GRID: Final = np.concatenate([-FAR[::-1], np.linspace(-8, 8, 1025), FAR])
"""Values at which activations are compared. The far ones tell an activation from one with a limit."""

TOLERANCE: Final = 1e-6
"""Largest error of an activation. Constants of seven digits stay below; 1.4142 for a square root does not."""


class Activation(NamedTuple):
    """An activation that ONNX Runtime computes by one op."""

    kind: str
    type: str
    domain: str
    function: Callable[[Array, float], Array]  # its values, given its steepness, which only QuickGelu has
    opset: int = 0  # the first one of the default domain that has the op


ACTIVATIONS: Final = (
    Activation("silu", "QuickGelu", MICROSOFT_DOMAIN, silu),
    Activation("gelu", "Gelu", MICROSOFT_DOMAIN, lambda x, _: gelu(x)),
    # The kind FastGelu has in a model that is read: only ONNX Runtime has it, and no rule for others must name it.
    Activation("other", "FastGelu", MICROSOFT_DOMAIN, lambda x, _: gelu_by_tanh(x)),
    Activation("hard_swish", "HardSwish", "", lambda x, _: hard_swish(x), 14),
)


def join_activations(model: Model) -> Iterator[Step]:
    """Replace the last part of each float32 activation by an op that computes all of it, and remove the others."""
    parameters = Parameters(model)
    for name in model.reachable_graphs() if model.traits.named_values else ():
        graph = model.graphs[name]
        ends = [op for op in graph.ops() if op.kind in END_KINDS and op.outputs[0].dtype == "float32"]
        if graph.is_function or not ends:  # a function imports opsets of its own
            continue
        order = {op: position for position, op in enumerate(graph.topological_order())}
        for op in sorted((op for op in ends if op.name in order), key=lambda op: order[op.name]):
            for tensor, parts in _regions(graph, op, order, parameters):
                values = _evaluate(model, parameters, graph, tensor, sorted(parts, key=order.__getitem__))
                recognized = None if values is None else recognize(values, model.opset)
                if recognized is not None:
                    yield _join(model, graph, op, tensor, *recognized)
                    break


def _regions(
    graph: Graph, end: Op, order: dict[str, int], parameters: Parameters
) -> Iterator[tuple[TensorRef, list[str]]]:
    """Yield the tensors from which alone `end` is computed, from the nearest one on, with the ops behind each.

    Nothing but these ops reads what they compute.
    """
    constant_rank = 0

    def operands(name: str) -> set[TensorRef]:
        nonlocal constant_rank
        slots = [tensor for tensor in graph.slots(name) if tensor is not None]
        constants = [tensor for tensor in slots if parameters.is_parameter(tensor)]
        constant_rank = max([constant_rank, *(len(parameters.shape(tensor) or ()) for tensor in constants)])
        return {tensor for tensor in slots if tensor not in constants}

    parts, inputs, has_gate = [end.name], operands(end.name), False
    while inputs and len(parts) <= MAX_PARTS:
        if len(inputs) == 1 and has_gate:
            (tensor,) = inputs
            # A constant with more axes than the tensor gives the result more axes.
            if constant_rank <= len(parameters.shape(tensor) or ()):
                yield tensor, parts
        local = [tensor for tensor in inputs if tensor.graph == graph.name and tensor.op in order]
        if not local:
            return
        last = max(local, key=lambda tensor: order[tensor.op])
        kind, readers = graph.op(last.op).kind, graph.consumers(last)
        if kind not in EVALUATED_KINDS or any(use.graph != graph.name or use.op not in parts for use in readers):
            return
        parts.append(last.op)
        inputs = (inputs - {last}) | operands(last.op)
        has_gate |= kind in GATE_KINDS


def _evaluate(model: Model, parameters: Parameters, graph: Graph, tensor: TensorRef, parts: list[str]) -> Array | None:
    """Return what the last of the sorted `parts` computes if `tensor` holds the grid; None if that is not known."""
    values = {tensor: GRID}
    with np.errstate(all="ignore"):
        for name in parts:
            result = TensorRef(graph.name, name)
            output = evaluate_op(model, parameters, graph.op(name), result, values)
            if output is None:
                return None
            values[result] = output
    return values[TensorRef(graph.name, parts[-1])]


def recognize(values: Array, opset: int) -> tuple[Activation, float] | None:
    """Return the activation that has these values on the grid, with its steepness; None if there is none."""
    gate = float(np.interp(1.0, GRID, values))
    steepness = float(np.float32(math.log(gate / (1 - gate)))) if 0 < gate < 1 else 1.0
    with np.errstate(over="ignore"):
        for activation in ACTIVATIONS:
            expected = activation.function(GRID, steepness)
            if activation.opset <= opset and np.allclose(values, expected, rtol=TOLERANCE, atol=TOLERANCE):
                return activation, steepness
    return None


def _join(model: Model, graph: Graph, op: Op, tensor: TensorRef, activation: Activation, steepness: float) -> Step:
    attrs = {"alpha": steepness} if activation.kind == "silu" else {}
    fields = {"domain": activation.domain, "attrs": attrs, "roles": ("input",)}
    edits, detail = OpEdits(JOIN_ACTIVATIONS_STEP, model, graph, op), f"is one {activation.type} of {tensor}"
    return edits.turn(activation.kind, activation.type, [tensor], detail, **fields)
