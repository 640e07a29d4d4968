"""Whether samples may be joined along axis 0 of every input: shown op by op, or refused.

Every tensor of such a model is one of three. It is *fixed*: no input decides on it. It is a *size*: integers that only
the inputs' shapes decide on. Or it has *rows*: axis 0 counts d rows for each row of the inputs, and what is in them
depends on nothing but that row of the inputs. Which ops keep rows apart is said in `rows`; an op that is not there, or
not in the way that is said there, makes the answer no. Shapes are inferred for several numbers of rows, and may grow
along axis 0 alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import networkx as nx
from onnx import ModelProto

from graphquant.formats.onnx.infer import inferred
from graphquant.formats.onnx.rows import FIXED, FROM_SIZES, ROWS, RULES, SIZE, SIZES_ONLY, Node
from graphquant.formats.onnx.tensors import type_of
from graphquant.ir import TensorRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.formats.onnx.write import Emission
    from graphquant.ir import Model, Op, Shape

COUNTS: Final = (1, 2, 3, 997)
"""Numbers of rows that shapes are inferred for; the last is far above a block's, so that no division hides it."""

OPSET_NUMPY: Final = 7
"""First opset whose ops broadcast as numpy does, and normalise as in inference unless they say otherwise."""

_INTEGERS: Final = frozenset({"int32", "int64"})
_DOMAINS: Final = frozenset({"", "ai.onnx"})


def batchable(model: Model, emission: Emission, inputs: Sequence[str]) -> bool:
    """Whether samples may be joined along axis 0 of all `inputs` and each result is still that of its sample."""
    own = [info for info in emission.message.graph.input if info.name in set(inputs)]
    if len(model.graphs) > 1 or not own or model.opset < OPSET_NUMPY or not all(map(_free, own)):
        return False
    if len(own) > 1 and (len(set(map(_batch, own))) > 1 or not _batch(own[0])):
        return False  # they may have different numbers of rows
    return _Rows(model, emission, inputs).hold()


def _free(info: Any) -> bool:
    """Whether the first dimension of an input is left open."""
    shape = type_of(info.type)[1]
    return bool(shape) and shape is not None and shape[0] is None


def _batch(info: Any) -> str:
    """What the first dimension of an input is called."""
    return str(info.type.tensor_type.shape.dim[0].dim_param)


class _Rows:
    """The three kinds of tensor in one model."""

    def __init__(self, model: Model, emission: Emission, inputs: Sequence[str]) -> None:
        self._model = model
        self._emission = emission
        self._inputs = frozenset(inputs)
        light = inferred(emission.message)
        self._shapes = [_shapes(light, self._inputs, count) for count in COUNTS]
        self._kinds: dict[TensorRef, str] = {}

    def hold(self) -> bool:
        """Whether all inputs and outputs have rows, and nothing on the way mixes them."""
        graph = self._model.main
        return all(self._holds(graph.op(name)) for name in nx.topological_sort(graph.nx))

    def _holds(self, op: Op) -> bool:
        slots = self._model.main.slots(op.name)
        kinds = ["" if tensor is None else self._kinds[tensor] for tensor in slots]
        if op.kind == "output":
            return kinds == [ROWS]
        kind = self._kind(op, kinds, slots)
        for port, output in enumerate(op.outputs):
            tensor = TensorRef("", op.name, port)
            if not kind or (kind == ROWS and output.name and not self._grows(tensor)):
                return False
            if kind == SIZE and output.dtype not in _INTEGERS:
                return False
            self._kinds[tensor] = kind
        return True

    def _kind(self, op: Op, kinds: Sequence[str], slots: Sequence[TensorRef | None]) -> str:
        """What the outputs of `op` are, "" if that is not known."""
        if op.kind in {"constant", "input"}:
            return ROWS if op.name in self._inputs else FIXED
        known = op.domain in _DOMAINS or op.kind in {"quantize", "dequantize"}
        if not known or op.kind in {"random", "stateful"}:
            return ""
        if ROWS not in kinds and SIZE not in kinds:
            return "" if op.kind == "dropout" else FIXED
        if op.type == "Shape" or (ROWS not in kinds and op.type in SIZES_ONLY):
            return SIZE
        return ROWS if self._has_rows(op, kinds, slots) else ""

    def _has_rows(self, op: Op, kinds: Sequence[str], slots: Sequence[TensorRef | None]) -> bool:
        node = self._node(op, kinds, slots)
        if node is None or op.type not in RULES or (ROWS not in kinds and op.type not in FROM_SIZES):
            return False
        return RULES[op.type](node)

    def _node(self, op: Op, kinds: Sequence[str], slots: Sequence[TensorRef | None]) -> Node | None:
        shape = self._shape(TensorRef("", op.name), 0)
        if not shape:
            return None
        return Node(
            op=op,
            opset=self._model.opset,
            kinds=kinds,
            shapes=[None if tensor is None else self._shape(tensor, 0) for tensor in slots],
            values=[None if tensor is None else self._model.op(tensor).value for tensor in slots],
            out=shape,
        )

    def _shape(self, tensor: TensorRef, index: int) -> Shape | None:
        """The shape of `tensor` for that one of `COUNTS`."""
        found = self._shapes[index].get(self._emission.name(self._model, tensor))
        shape: Shape | None = self._model.output(tensor).shape if found is None and self._constant(tensor) else found
        return shape

    def _constant(self, tensor: TensorRef) -> bool:
        return self._model.op(tensor).kind == "constant"

    def _grows(self, tensor: TensorRef) -> bool:
        """Whether axis 0 of `tensor` grows with the rows, and nothing else does."""
        first = self._shape(tensor, 0)
        if not first or not first[0]:
            return False
        wanted = [(count * first[0], *first[1:]) for count in COUNTS]
        return wanted == [self._shape(tensor, index) for index in range(len(COUNTS))]


def _shapes(light: Any, inputs: frozenset[str], count: int) -> dict[str, Shape | None]:
    """Static shapes by value name, for that number of rows in each of `inputs`; `light` has no weights' data."""
    message = ModelProto()
    message.CopyFrom(light)
    del message.graph.value_info[:]
    for info in message.graph.output:
        info.type.tensor_type.ClearField("shape")
    for info in message.graph.input:
        if info.name in inputs:
            info.type.tensor_type.shape.dim[0].dim_value = count
    graph = inferred(message).graph
    return {info.name: type_of(info.type)[1] for info in (*graph.input, *graph.value_info, *graph.output)}
