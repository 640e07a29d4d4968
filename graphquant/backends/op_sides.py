"""Quantizations around an op: the scale and zero point of each input and output.

Identity and Dropout are looked through, as every backend does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant.ir import FLOAT_TYPES, TRANSPARENT_KINDS, Graph, Model, Op, Parameters, TensorRef, Use
from graphquant.numerics import Array, QParams
from graphquant.qdq import read_qparams

if TYPE_CHECKING:
    from collections.abc import Iterator


MAX_TRANSPARENT_OPS = 20
"""Maximum number of consecutive Identity and Dropout ops to look through."""

QUANTIZABLE_ROLES = frozenset({"input", "weight", "bias", "recurrent_weight"})
"""Roles of inputs that may be quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedInput:
    """One input of an op.

    Attributes:
        slot: Index of the input.
        role: Role of the input.
        tensor: The tensor that is read, past Identity and Dropout.
        dequantize_op: The op that dequantizes it, "" if it is float.
        params: Scale and zero point; None if it is float, or if they are computed at run time.
        source: The tensor before quantization, or the stored integers if the model has only those.
        parameter: Whether it is a weight with a known value.
    """

    slot: int
    role: str
    tensor: TensorRef
    dequantize_op: str
    params: QParams | None
    source: TensorRef
    parameter: bool


class QuantizationReader:
    """Reader of the quantizations of `model`, which must not be modified meanwhile."""

    def __init__(self, model: Model) -> None:
        """Create a reader; quantizations are read on demand."""
        self.model = model
        self.parameters = Parameters(model)
        self._params: dict[tuple[str, str], QParams | None] = {}

    def inputs(self, graph: Graph, op: Op) -> list[QuantizedInput]:
        """Return the float data inputs of an op."""
        quantized_inputs = []
        for slot, slot_tensor in enumerate(graph.slots(op.name)):
            if (
                slot_tensor is None
                or op.role(slot) not in QUANTIZABLE_ROLES
                or graph.output(slot_tensor).dtype not in FLOAT_TYPES | {None}
            ):
                continue
            tensor = self.look_through(slot_tensor)
            producer = self.model.op(tensor)
            quantized = producer.kind in {"dequantize", "qdq"}
            source = self.quantized_source(tensor) if quantized else tensor
            quantized_inputs.append(
                QuantizedInput(
                    slot=slot,
                    role=op.role(slot),
                    tensor=tensor,
                    dequantize_op=producer.name if quantized else "",
                    params=self.params(tensor.graph, producer.name) if quantized else None,
                    source=source,
                    parameter=self._is_weight(source),
                )
            )
        return quantized_inputs

    def look_through(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor that `tensor` is a copy of by Identity and Dropout, or `tensor` itself."""
        for _ in range(MAX_TRANSPARENT_OPS):
            graph = self.model.graphs[tensor.graph]
            input_tensor = graph.source_of(Use(tensor.graph, tensor.op, 0))
            if graph.op(tensor.op).kind not in TRANSPARENT_KINDS or input_tensor is None:
                break
            tensor = input_tensor
        return tensor

    def quantized_source(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor that was quantized if `tensor` is its dequantized value."""
        graph = self.model.graphs[tensor.graph]
        input_tensor = graph.source_of(Use(tensor.graph, tensor.op, 0))
        if (
            input_tensor is not None
            and graph.op(tensor.op).kind == "dequantize"
            and self.model.op(input_tensor).kind == "quantize"
        ):
            input_tensor = self.model.graphs[input_tensor.graph].source_of(Use(input_tensor.graph, input_tensor.op, 0))
        return tensor if input_tensor is None else self.look_through(input_tensor)

    def readers(self, graph: Graph, op: Op, port: int = 0) -> Iterator[tuple[Use, Op]]:
        """Yield the ops that read an output, past Identity and Dropout. Graph outputs are ops too."""
        pending = list(graph.consumers(TensorRef(graph.name, op.name, port)))
        for _ in range(MAX_TRANSPARENT_OPS):
            next_uses = []
            for use in pending:
                reader = self.model.graphs[use.graph].op(use.op)
                if reader.kind in TRANSPARENT_KINDS:
                    next_uses += self.model.graphs[use.graph].consumers(TensorRef(use.graph, use.op))
                else:
                    yield use, reader
            pending = next_uses

    def outputs(self, graph: Graph, op: Op) -> tuple[list[tuple[Op, QParams | None]], list[Use]]:
        """Return the quantizations that read the outputs of an op, and the other uses of the outputs."""
        quantizations: list[tuple[Op, QParams | None]] = []
        other_uses = []
        for port in range(len(op.outputs)):
            for use, reader in self.readers(graph, op, port):
                if reader.kind in {"quantize", "qdq"} and use.slot == 0:
                    quantizations.append((reader, self.params(use.graph, reader.name)))
                else:
                    other_uses.append(use)
        return quantizations, other_uses

    def params(self, graph: str, name: str) -> QParams | None:
        """Return scale and zero point of a quantization op; None if they are computed at run time or invalid."""
        key = graph, name
        if key not in self._params:
            home_graph = self.model.graphs[graph]
            op_params = read_qparams(home_graph, home_graph.op(name), self.parameters)
            self._params[key] = op_params if isinstance(op_params, QParams) else None
        return self._params[key]

    def value(self, tensor: TensorRef) -> Array | None:
        """Return the value of a weight, or its integers."""
        return self.parameters.value(tensor)

    def _is_weight(self, tensor: TensorRef) -> bool:
        return self.model.op(tensor).kind != "input" and self.parameters.is_parameter(tensor)


def same_quantization(first: QParams | None, second: QParams | None) -> bool:
    """Return whether two quantizations map integers to the same values."""
    if first is None or second is None:
        return False
    comparable = first.type == second.type and first.scale.shape == second.scale.shape and first.axis == second.axis
    return comparable and bool((first.scale == second.scale).all() and (first.zero_point == second.zero_point).all())
