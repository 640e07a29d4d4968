"""A copy of a model that the optimizer's steps are tried out on, and what those steps ask of it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.ir import Graph, Model, Op, Output, Parameters, TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from graphquant.ir import Shape

DOMAINS = frozenset({"", "com.microsoft"})

MAX_SCALARS = 1 << 16
"""Largest scale or zero point that is read; per block there may be as many as weights."""

MAX_SHARED = 8
"""Elements of a constant that is merged with others of the same value."""

SHARED_TYPES = frozenset({"float16", "float32", "float64", "int32", "int64"})
"""Types of such constants."""

LONGEST = 8
"""Quantizations in a row that a shape is sought behind."""

_ROLES = ("input", "scale", "zero_point")


FIRST_OPSET = {"MaxPool": 12}
"""The lowest opset in which an op is known to run on integers."""


@dataclass(slots=True)
class Gone:
    """What became of ops that were taken out, by graph and name.

    Attributes:
        into: The op that does their work.
        how: Its type, where that is not to be found in the graph any more.
    """

    into: dict[tuple[str, str], str] = field(default_factory=dict)
    how: dict[tuple[str, str], str] = field(default_factory=dict)


class Work:
    """The model's graphs, to be edited, beside what is known of the tensors that were there at the start."""

    def __init__(self, model: Model) -> None:
        """`model` itself is not touched."""
        self.model = model.copy()
        self._start = model
        self._parameters = Parameters(model)
        self._values: dict[TensorRef, np.ndarray[Any, Any] | None] = {}
        self._made = 0
        self._stands_for: dict[TensorRef, TensorRef] = {}
        self._equal: dict[str, Counter[tuple[str | None, object, bytes]]] = {}

    # -- reading ---------------------------------------------------------------------------------

    def constant(self, tensor: TensorRef | None) -> bool:
        """Whether the value of `tensor` is in the model, or folded into it before anything else happens."""
        if tensor is None:
            return False
        home = self._start.graphs[tensor.graph]
        if tensor.op not in home:
            return self.model.op(tensor).kind == "constant"
        op = home.op(tensor.op)
        if op.kind == "quantize":
            return self.constant(home.producer(Use(tensor.graph, tensor.op, 0)))
        return op.kind != "input" and self._parameters.is_parameter(tensor)

    def value(self, tensor: TensorRef | None) -> np.ndarray[Any, Any] | None:
        """The value of a small constant, else None."""
        if tensor is None or not self.constant(tensor):
            return None
        if tensor not in self._values:
            op = self.model.op(tensor)
            if op.kind == "constant":
                self._values[tensor] = op.value() if op.value is not None and _small(op.outputs[0]) else None
            else:
                small = op.kind != "quantize" and _small(op.outputs[tensor.port])
                self._values[tensor] = self._parameters.value(tensor) if small else None
        return self._values[tensor]

    def folded(self, graph: Graph, name: str) -> bool:
        """Whether a QuantizeLinear is gone before anything else happens, since what it quantizes is constant."""
        return self.constant(TensorRef(graph.name, name))

    def own(self, graph: Graph, tensor: TensorRef | None) -> bool:
        """Whether `tensor` is a constant of `graph` itself, not of one around it: some steps look no further."""
        return tensor is not None and tensor.graph == graph.name and self.constant(tensor)

    def number(self, tensor: TensorRef | None) -> float | None:
        """The value of a constant with one element, else None."""
        value = self.value(tensor)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def shape(self, tensor: TensorRef) -> Shape | None:
        """The static shape of `tensor`; onnx tells none for quantizations of another domain than its own."""
        for _ in range(LONGEST):
            known = self.model.output(tensor)
            graph = self.model.graphs[tensor.graph]
            read = self.slot(graph, tensor.op, 0)
            if known.shape is not None or read is None or not (is_q(graph.op(tensor.op)) or is_dq(graph.op(tensor.op))):
                return known.shape  # type: ignore[no-any-return]  # an Output's
            tensor = read
        return None

    def sizes(self, tensor: TensorRef) -> tuple[int | str | None, ...] | None:
        """The static shape of `tensor`, with the names of sizes that are no numbers."""
        shape = self.shape(tensor) or self._product(tensor)
        source = self.model.source.graphs.get(tensor.graph) if self.model.source is not None else None
        names = source.symbols.get(self.model.output(tensor).name) if source is not None else None
        if shape is None or names is None or len(names) != len(shape):
            return shape
        return tuple(name or None if size is None else size for size, name in zip(shape, names, strict=True))

    def _product(self, tensor: TensorRef) -> Shape | None:
        """The shape of a MatMul behind quantizations of another domain than onnx's own."""
        graph = self.model.graphs[tensor.graph]
        read = [self.slot(graph, tensor.op, slot) for slot in (0, 1)]
        if graph.op(tensor.op).type != "MatMul" or read[0] is None or read[1] is None:
            return None
        left, right = self.shape(read[0]), self.shape(read[1])
        return (*left[:-1], right[-1]) if left and right is not None and len(right) == 2 else None  # noqa: PLR2004  # a matrix

    def dtype(self, graph: Graph, name: str) -> str:
        """The integer type of a QuantizeLinear or DequantizeLinear."""
        op = graph.op(name)
        data, _, zero = self.inputs(graph, name)
        known = op.outputs[0].dtype if op.kind == "quantize" else (graph.output(data).dtype if data else None)
        if known is None and zero is not None:
            known = graph.output(zero).dtype
        return known or "uint8"

    def inputs(self, graph: Graph, name: str) -> tuple[TensorRef | None, TensorRef | None, TensorRef | None]:
        """Data, scale and zero point of a QuantizeLinear or DequantizeLinear."""
        data, scale, zero = [*graph.slots(name), None, None, None][:3]
        return data, scale, zero

    def scalar(self, graph: Graph, name: str, *, zero_needed: bool = False) -> bool:
        """Whether scale and zero point of a Q or DQ are constants with one element."""
        _, scale, zero = self.inputs(graph, name)
        if self.number(scale) is None:
            return False
        return not zero_needed if zero is None else self.number(zero) is not None

    def same_params(self, graph: Graph, one: str, other: str) -> bool:
        """Whether a Q and a DQ have explicit, constant, scalar scales and zero points that are equal."""
        if not (self.scalar(graph, one, zero_needed=True) and self.scalar(graph, other, zero_needed=True)):
            return False
        mine, theirs = self.inputs(graph, one), self.inputs(graph, other)
        same = all(self.number(a) == self.number(b) for a, b in zip(mine[1:], theirs[1:], strict=True))
        return same and self.dtype(graph, one) == self.dtype(graph, other)

    def label(self, tensor: TensorRef) -> TensorRef:
        """The tensor of the model that `tensor` stands for: steps make tensors that nobody has heard of."""
        while tensor in self._stands_for:
            tensor = self._stands_for[tensor]
        return tensor

    def stand_for(self, made: TensorRef, tensor: TensorRef) -> None:
        """Lets messages say `tensor` for `made`."""
        if made != tensor:
            self._stands_for[made] = tensor

    def uses(self, graph: Graph, tensor: TensorRef) -> int:
        """How often a constant is read, together with the small ones of the same value, which become one."""
        if tensor.graph:  # constants of bodies are left alone
            return len(graph.consumers(tensor))
        if tensor.graph not in self._equal:
            home = self.model.graphs[tensor.graph]
            self._equal[tensor.graph] = Counter()
            for op in home.ops():
                key = self._key(TensorRef(home.name, op.name)) if op.kind == "constant" else None
                if key is not None:
                    self._equal[tensor.graph][key] += len(self.readers(home, op.name))
        key = self._key(tensor)
        return len(graph.consumers(tensor)) if key is None else self._equal[tensor.graph][key]

    def _key(self, tensor: TensorRef) -> tuple[str | None, object, bytes] | None:
        known = self.model.output(tensor)
        if known.dtype not in SHARED_TYPES or known.shape is None or None in known.shape:
            return None
        value = self.value(tensor) if math.prod(known.shape) <= MAX_SHARED else None
        return None if value is None else (known.dtype, known.shape, value.tobytes())

    # -- editing ---------------------------------------------------------------------------------

    def add(self, graph: Graph, like: Op, name: str, inputs: Sequence[TensorRef | None]) -> TensorRef:
        """Adds an op like `like` under a new name made of `name`."""
        self._made += 1
        label = graph.fresh(f"{name}#{self._made}")
        outputs = tuple(replace(output, name=label) for output in like.outputs)
        return graph.add(replace(like, name=label, outputs=outputs, source=None), inputs)

    def pair(self, graph: Graph, tensor: TensorRef, uses: Iterable[Use], like: str) -> list[TensorRef]:
        """Puts a Q behind `tensor`, and a DQ of its own before each of `uses`, with the parameters of `like`."""
        _, scale, zero = self.inputs(graph, like)
        known, dtype = graph.output(tensor), self.dtype(graph, like)
        domain = graph.op(like).domain
        quantize = Op(
            name="",
            kind="quantize",
            type="QuantizeLinear",
            domain=domain,
            roles=_ROLES,
            outputs=(Output("", dtype, known.shape),),
        )
        made = self.add(graph, quantize, f"{tensor.op}/q", [tensor, scale, zero])
        dequantize = replace(quantize, kind="dequantize", type="DequantizeLinear", outputs=(known,))
        found = []
        for use in uses:
            found.append(self.add(graph, dequantize, f"{tensor.op}/dq", [made, scale, zero]))
            self.stand_for(found[-1], tensor)
            self.model.graphs[use.graph].connect(use, found[-1])
        return found

    def stand_in(self, graph: Graph, name: str, dtype: str, like: Output, value: float | None = None) -> TensorRef:
        """A constant whose value, where none is given, nobody asks for."""
        shape = like.shape if value is None else ()
        made = None if value is None else np.array(value, dtype)
        op = Op(
            name="",
            kind="constant",
            type="Constant",
            roles=(),
            outputs=(Output("", dtype, shape),),
            value=None if made is None else (lambda: made),
        )
        return self.add(graph, op, name, [])

    def bypass(self, graph: Graph, name: str) -> None:
        """Takes out an op of one input that changes nothing; its readers read what it read."""
        source = self.slot(graph, name, 0)
        for use in self.readers(graph, name):
            self.model.graphs[use.graph].connect(use, source)
        self.drop(graph, name)

    def drop(self, graph: Graph, name: str) -> None:
        """Takes out an op that nothing reads."""
        for slot, tensor in enumerate(list(graph.slots(name))):
            if tensor is not None and tensor.graph != graph.name:
                graph.connect(Use(graph.name, name, slot), None)
        graph.nx.remove_node(name)

    # -- edges -----------------------------------------------------------------------------------

    def readers(self, graph: Graph, name: str) -> list[Use]:
        """Every use of any output of the op."""
        return [use for uses in graph.readers(name).values() for use in uses]

    def edges(self, graph: Graph, name: str, port: int | None = None) -> list[Use]:
        """The ops that read the op, graph outputs left out."""
        found = graph.readers(name)
        uses = self.readers(graph, name) if port is None else found.get(port, [])
        return [use for use in uses if self.model.graphs[use.graph].op(use.op).kind != "output"]

    def is_output(self, graph: Graph, name: str) -> bool:
        """Whether an output of the op is one of the graph's."""
        return any(self.model.graphs[use.graph].op(use.op).kind == "output" for use in self.readers(graph, name))

    def only(self, graph: Graph, name: str) -> Use | None:
        """The one reader of the op, in its own graph; None if there are others or it is a graph output."""
        uses = self.readers(graph, name)
        if len(uses) != 1 or uses[0].graph != graph.name or graph.op(uses[0].op).kind == "output":
            return None
        return uses[0]

    def slot(self, graph: Graph, name: str, slot: int) -> TensorRef | None:
        """What an input slot reads; a broken model may have none."""
        slots = graph.slots(name)
        return slots[slot] if 0 <= slot < len(slots) else None

    def producer(self, graph: Graph, name: str, slot: int) -> Op | None:
        """The op of the same graph that fills a slot."""
        tensor = self.slot(graph, name, slot)
        return graph.op(tensor.op) if tensor is not None and tensor.graph == graph.name else None


def names(graph: Graph, test: Callable[[Op], bool]) -> list[str]:
    """The ops that are there now and of some type."""
    return [op.name for op in graph.ops() if test(op)]


def is_q(op: Op | None) -> bool:
    """Whether `op` is a QuantizeLinear."""
    return op is not None and op.type == "QuantizeLinear" and op.domain in DOMAINS


def is_dq(op: Op | None) -> bool:
    """Whether `op` is a DequantizeLinear."""
    return op is not None and op.type == "DequantizeLinear" and op.domain in DOMAINS


def _small(output: Output) -> bool:
    shape = output.shape
    return shape is not None and None not in shape and int(np.prod([size or 0 for size in shape])) <= MAX_SCALARS
