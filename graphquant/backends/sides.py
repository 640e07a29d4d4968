"""What stands on both sides of an op: the scale and zero point that each input was quantized with, and each output is.

Ops that change nothing, Identity and Dropout, are looked through, as every backend does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant.ir import FLOAT_TYPES, Graph, Model, Op, Parameters, TensorRef, Use
from graphquant.numerics import Array, QParams
from graphquant.qdq import params_of

if TYPE_CHECKING:
    from collections.abc import Iterator

THROUGH = frozenset({"identity", "dropout"})

LONGEST = 20
"""Identities in a row that are looked through."""

DATA = frozenset({"input", "weight", "bias", "recurrent_weight"})
"""Roles of inputs that may be quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One input of an op.

    Attributes:
        slot: Its place.
        role: What it is to the op.
        tensor: What is read, seen through Identity and Dropout.
        pair: The op that dequantizes it, "" if it is float.
        params: Its scale and zero point; None if it is float, or they are computed when the model runs.
        source: The tensor before it was quantized; its integers, where only those are in the model.
        parameter: Whether it is a weight, whose value is known.
    """

    slot: int
    role: str
    tensor: TensorRef
    pair: str
    params: QParams | None
    source: TensorRef
    parameter: bool


class Sides:
    """Reads the quantizations of `model`, which must not be edited meanwhile."""

    def __init__(self, model: Model) -> None:
        """Nothing is read yet."""
        self.model = model
        self.parameters = Parameters(model)
        self._params: dict[tuple[str, str], QParams | None] = {}

    def inputs(self, graph: Graph, op: Op) -> list[Side]:
        """The float data inputs of an op."""
        found = []
        for slot, read in enumerate(graph.slots(op.name)):
            if read is None or op.role(slot) not in DATA or graph.output(read).dtype not in FLOAT_TYPES | {None}:
                continue
            tensor = self.behind(read)
            maker = self.model.op(tensor)
            quantized = maker.kind in {"dequantize", "qdq"}
            source = self.source(tensor) if quantized else tensor
            found.append(
                Side(
                    slot=slot,
                    role=op.role(slot),
                    tensor=tensor,
                    pair=maker.name if quantized else "",
                    params=self.params(tensor.graph, maker.name) if quantized else None,
                    source=source,
                    parameter=self._is_weight(source),
                )
            )
        return found

    def behind(self, tensor: TensorRef) -> TensorRef:
        """`tensor`, or the one that Identity and Dropout made it of."""
        for _ in range(LONGEST):
            graph = self.model.graphs[tensor.graph]
            read = graph.producer(Use(tensor.graph, tensor.op, 0))
            if graph.op(tensor.op).kind not in THROUGH or read is None:
                break
            tensor = read
        return tensor

    def source(self, tensor: TensorRef) -> TensorRef:
        """What was quantized where `tensor` is dequantized."""
        graph = self.model.graphs[tensor.graph]
        read = graph.producer(Use(tensor.graph, tensor.op, 0))
        if read is not None and graph.op(tensor.op).kind == "dequantize" and self.model.op(read).kind == "quantize":
            read = self.model.graphs[read.graph].producer(Use(read.graph, read.op, 0))
        return tensor if read is None else self.behind(read)

    def readers(self, graph: Graph, op: Op, port: int = 0) -> Iterator[tuple[Use, Op]]:
        """The ops that read an output, seen through Identity and Dropout; graph outputs are ops too."""
        todo = list(graph.consumers(TensorRef(graph.name, op.name, port)))
        for _ in range(LONGEST):
            following = []
            for use in todo:
                reader = self.model.graphs[use.graph].op(use.op)
                if reader.kind in THROUGH:
                    following += self.model.graphs[use.graph].consumers(TensorRef(use.graph, use.op))
                else:
                    yield use, reader
            todo = following

    def outputs(self, graph: Graph, op: Op) -> tuple[list[tuple[Op, QParams | None]], list[Use]]:
        """The quantizations that read an op's outputs, and the other uses of them."""
        pairs: list[tuple[Op, QParams | None]] = []
        others = []
        for port in range(len(op.outputs)):
            for use, reader in self.readers(graph, op, port):
                if reader.kind in {"quantize", "qdq"} and use.slot == 0:
                    pairs.append((reader, self.params(use.graph, reader.name)))
                else:
                    others.append(use)
        return pairs, others

    def params(self, graph: str, name: str) -> QParams | None:
        """Scale and zero point of a quantization op; None where only a run tells, or they make no sense."""
        key = graph, name
        if key not in self._params:
            home = self.model.graphs[graph]
            read = params_of(home, home.op(name), self.parameters)
            self._params[key] = read if isinstance(read, QParams) else None
        return self._params[key]

    def value(self, tensor: TensorRef) -> Array | None:
        """The value of a weight, or its integers."""
        return self.parameters.value(tensor)

    def _is_weight(self, tensor: TensorRef) -> bool:
        return self.model.op(tensor).kind != "input" and self.parameters.is_parameter(tensor)


def same(one: QParams | None, other: QParams | None) -> bool:
    """Whether two quantizations mean the same by each integer."""
    if one is None or other is None:
        return False
    alike = one.type == other.type and one.scale.shape == other.scale.shape and one.axis == other.axis
    return alike and bool((one.scale == other.scale).all() and (one.zero_point == other.zero_point).all())
