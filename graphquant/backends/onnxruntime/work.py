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


QDQ_DOMAINS = frozenset({"", "com.microsoft"})

MAX_SCALARS = 1 << 16
"""Largest scale or zero point that is read; per block there may be as many as weights."""

MAX_SHARED = 8
"""Elements of a constant that is merged with others of the same value."""

SHARED_TYPES = frozenset({"float16", "float32", "float64", "int32", "int64"})
"""Types of such constants."""

MAX_CHAINED_QUANTIZATIONS = 8
"""Quantizations in a row that a shape is sought behind."""

_ROLES = ("input", "scale", "zero_point")


FIRST_OPSET = {"MaxPool": 12}
"""The lowest opset in which an op is known to run on integers."""


@dataclass(slots=True)
class RemovedOps:
    """What became of ops that were taken out, by graph and name.

    Attributes:
        host_names: The op that does their work.
        host_types: Its type, where that is not to be found in the graph any more.
    """

    host_names: dict[tuple[str, str], str] = field(default_factory=dict)
    host_types: dict[tuple[str, str], str] = field(default_factory=dict)


class WorkingCopy:
    """The model's graphs, to be edited, beside what is known of the tensors that were there at the start."""

    def __init__(self, model: Model) -> None:
        """`model` itself is not touched."""
        self.model = model.copy()
        self._initial_model = model
        self._parameters = Parameters(model)
        self._values: dict[TensorRef, np.ndarray[Any, Any] | None] = {}
        self._added_count = 0
        self._labels: dict[TensorRef, TensorRef] = {}
        self._equal_constant_counts: dict[str, Counter[tuple[str | None, object, bytes]]] = {}

    # -- reading ---------------------------------------------------------------------------------

    def is_constant(self, tensor: TensorRef | None) -> bool:
        """Whether the value of `tensor` is in the model, or folded into it before anything else happens."""
        if tensor is None:
            return False
        home_graph = self._initial_model.graphs[tensor.graph]
        if tensor.op not in home_graph:
            return self.model.op(tensor).kind == "constant"
        op = home_graph.op(tensor.op)
        if op.kind == "quantize":
            return self.is_constant(home_graph.source_of(Use(tensor.graph, tensor.op, 0)))
        return op.kind != "input" and self._parameters.is_parameter(tensor)

    def small_constant_value(self, tensor: TensorRef | None) -> np.ndarray[Any, Any] | None:
        """The value of a small constant, else None."""
        if tensor is None or not self.is_constant(tensor):
            return None
        if tensor not in self._values:
            op = self.model.op(tensor)
            if op.kind == "constant":
                self._values[tensor] = (
                    op.read_value() if op.read_value is not None and _is_small_constant(op.outputs[0]) else None
                )
            else:
                small = op.kind != "quantize" and _is_small_constant(op.outputs[tensor.port])
                self._values[tensor] = self._parameters.value(tensor) if small else None
        return self._values[tensor]

    def is_folded(self, graph: Graph, name: str) -> bool:
        """Whether a QuantizeLinear is gone before anything else happens, since what it quantizes is constant."""
        return self.is_constant(TensorRef(graph.name, name))

    def is_local_constant(self, graph: Graph, tensor: TensorRef | None) -> bool:
        """Whether `tensor` is a constant of `graph` itself, not of one around it: some steps look no further."""
        return tensor is not None and tensor.graph == graph.name and self.is_constant(tensor)

    def scalar_value(self, tensor: TensorRef | None) -> float | None:
        """The value of a constant with one element, else None."""
        value = self.small_constant_value(tensor)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def static_shape(self, tensor: TensorRef) -> Shape | None:
        """The static shape of `tensor`; onnx tells none for quantizations of another domain than its own."""
        for _ in range(MAX_CHAINED_QUANTIZATIONS):
            output = self.model.output(tensor)
            graph = self.model.graphs[tensor.graph]
            input_tensor = self.slot_tensor(graph, tensor.op, 0)
            if (
                output.shape is not None
                or input_tensor is None
                or not (is_q(graph.op(tensor.op)) or is_dq(graph.op(tensor.op)))
            ):
                return output.shape  # type: ignore[no-any-return]  # an Output's
            tensor = input_tensor
        return None

    def named_sizes(self, tensor: TensorRef) -> tuple[int | str | None, ...] | None:
        """The static shape of `tensor`, with the names of sizes that are no numbers."""
        shape = self.static_shape(tensor) or self._matmul_shape(tensor)
        source_graph = self.model.source.graphs.get(tensor.graph) if self.model.source is not None else None
        names = source_graph.dimension_names.get(self.model.output(tensor).name) if source_graph is not None else None
        if shape is None or names is None or len(names) != len(shape):
            return shape
        return tuple(name or None if size is None else size for size, name in zip(shape, names, strict=True))

    def _matmul_shape(self, tensor: TensorRef) -> Shape | None:
        """The shape of a MatMul behind quantizations of another domain than onnx's own."""
        graph = self.model.graphs[tensor.graph]
        operands = [self.slot_tensor(graph, tensor.op, slot) for slot in (0, 1)]
        if graph.op(tensor.op).type != "MatMul" or operands[0] is None or operands[1] is None:
            return None
        left_shape, right_shape = self.static_shape(operands[0]), self.static_shape(operands[1])
        return (
            (*left_shape[:-1], right_shape[-1])
            if left_shape and right_shape is not None and len(right_shape) == 2
            else None
        )  # noqa: PLR2004  # a matrix

    def integer_dtype(self, graph: Graph, name: str) -> str:
        """The integer type of a QuantizeLinear or DequantizeLinear."""
        op = graph.op(name)
        data, _, zero = self.qdq_inputs(graph, name)
        dtype = op.outputs[0].dtype if op.kind == "quantize" else (graph.output(data).dtype if data else None)
        if dtype is None and zero is not None:
            dtype = graph.output(zero).dtype
        return dtype or "uint8"

    def qdq_inputs(self, graph: Graph, name: str) -> tuple[TensorRef | None, TensorRef | None, TensorRef | None]:
        """Data, scale and zero point of a QuantizeLinear or DequantizeLinear."""
        data, scale, zero = [*graph.slots(name), None, None, None][:3]
        return data, scale, zero

    def has_scalar_params(self, graph: Graph, name: str, *, zero_needed: bool = False) -> bool:
        """Whether scale and zero point of a Q or DQ are constants with one element."""
        _, scale, zero = self.qdq_inputs(graph, name)
        if self.scalar_value(scale) is None:
            return False
        return not zero_needed if zero is None else self.scalar_value(zero) is not None

    def same_params(self, graph: Graph, first: str, second: str) -> bool:
        """Whether a Q and a DQ have explicit, constant, scalar scales and zero points that are equal."""
        if not (
            self.has_scalar_params(graph, first, zero_needed=True)
            and self.has_scalar_params(graph, second, zero_needed=True)
        ):
            return False
        first_inputs, second_inputs = self.qdq_inputs(graph, first), self.qdq_inputs(graph, second)
        equal_values = all(
            self.scalar_value(a) == self.scalar_value(b)
            for a, b in zip(first_inputs[1:], second_inputs[1:], strict=True)
        )
        return equal_values and self.integer_dtype(graph, first) == self.integer_dtype(graph, second)

    def label(self, tensor: TensorRef) -> TensorRef:
        """The tensor of the model that `tensor` stands for: steps make tensors that nobody has heard of."""
        while tensor in self._labels:
            tensor = self._labels[tensor]
        return tensor

    def set_label(self, added: TensorRef, tensor: TensorRef) -> None:
        """Lets messages say `tensor` for `added`."""
        if added != tensor:
            self._labels[added] = tensor

    def constant_use_count(self, graph: Graph, tensor: TensorRef) -> int:
        """How often a constant is read, together with the small ones of the same value, which become one."""
        if tensor.graph:  # constants of bodies are left alone
            return len(graph.consumers(tensor))
        if tensor.graph not in self._equal_constant_counts:
            home_graph = self.model.graphs[tensor.graph]
            self._equal_constant_counts[tensor.graph] = Counter()
            for op in home_graph.ops():
                key = self._merge_key(TensorRef(home_graph.name, op.name)) if op.kind == "constant" else None
                if key is not None:
                    self._equal_constant_counts[tensor.graph][key] += len(self.all_uses(home_graph, op.name))
        key = self._merge_key(tensor)
        return len(graph.consumers(tensor)) if key is None else self._equal_constant_counts[tensor.graph][key]

    def _merge_key(self, tensor: TensorRef) -> tuple[str | None, object, bytes] | None:
        output = self.model.output(tensor)
        if output.dtype not in SHARED_TYPES or output.shape is None or None in output.shape:
            return None
        value = self.small_constant_value(tensor) if math.prod(output.shape) <= MAX_SHARED else None
        return None if value is None else (output.dtype, output.shape, value.tobytes())

    # -- editing ---------------------------------------------------------------------------------

    def add_like(self, graph: Graph, template: Op, name: str, inputs: Sequence[TensorRef | None]) -> TensorRef:
        """Adds an op like `template` under a new name made of `name`."""
        self._added_count += 1
        label = graph.unique_name(f"{name}#{self._added_count}")
        outputs = tuple(replace(output, name=label) for output in template.outputs)
        return graph.add_op(replace(template, name=label, outputs=outputs, source=None), inputs)

    def insert_pair(self, graph: Graph, tensor: TensorRef, uses: Iterable[Use], template_name: str) -> list[TensorRef]:
        """Puts a Q behind `tensor`, and a DQ of its own before each of `uses`, with the parameters of `template_name`."""
        _, scale, zero = self.qdq_inputs(graph, template_name)
        float_output, dtype = graph.output(tensor), self.integer_dtype(graph, template_name)
        domain = graph.op(template_name).domain
        quantize = Op(
            name="",
            kind="quantize",
            type="QuantizeLinear",
            domain=domain,
            roles=_ROLES,
            outputs=(Output("", dtype, float_output.shape),),
        )
        quantized = self.add_like(graph, quantize, f"{tensor.op}/q", [tensor, scale, zero])
        dequantize = replace(quantize, kind="dequantize", type="DequantizeLinear", outputs=(float_output,))
        dequantized = []
        for use in uses:
            dequantized.append(self.add_like(graph, dequantize, f"{tensor.op}/dq", [quantized, scale, zero]))
            self.set_label(dequantized[-1], tensor)
            self.model.graphs[use.graph].set_source(use, dequantized[-1])
        return dequantized

    def add_placeholder(
        self, graph: Graph, name: str, dtype: str, float_output: Output, value: float | None = None
    ) -> TensorRef:
        """A constant whose value, where none is given, nobody asks for."""
        shape = float_output.shape if value is None else ()
        constant_value = None if value is None else np.array(value, dtype)
        op = Op(
            name="",
            kind="constant",
            type="Constant",
            roles=(),
            outputs=(Output("", dtype, shape),),
            read_value=None if constant_value is None else (lambda: constant_value),
        )
        return self.add_like(graph, op, name, [])

    def bypass(self, graph: Graph, name: str) -> None:
        """Takes out an op of one input that changes nothing; its readers read what it read."""
        source = self.slot_tensor(graph, name, 0)
        for use in self.all_uses(graph, name):
            self.model.graphs[use.graph].set_source(use, source)
        self.drop(graph, name)

    def drop(self, graph: Graph, name: str) -> None:
        """Takes out an op that nothing reads."""
        for slot, tensor in enumerate(list(graph.slots(name))):
            if tensor is not None and tensor.graph != graph.name:
                graph.set_source(Use(graph.name, name, slot), None)
        graph.nx.remove_node(name)

    # -- edges -----------------------------------------------------------------------------------

    def all_uses(self, graph: Graph, name: str) -> list[Use]:
        """Every use of any output of the op."""
        return [use for uses in graph.consumers_by_port(name).values() for use in uses]

    def op_uses(self, graph: Graph, name: str, port: int | None = None) -> list[Use]:
        """The ops that read the op, graph outputs left out."""
        uses_by_port = graph.consumers_by_port(name)
        uses = self.all_uses(graph, name) if port is None else uses_by_port.get(port, [])
        return [use for use in uses if self.model.graphs[use.graph].op(use.op).kind != "output"]

    def is_output(self, graph: Graph, name: str) -> bool:
        """Whether an output of the op is one of the graph's."""
        return any(self.model.graphs[use.graph].op(use.op).kind == "output" for use in self.all_uses(graph, name))

    def only_use(self, graph: Graph, name: str) -> Use | None:
        """The one reader of the op, in its own graph; None if there are others or it is a graph output."""
        uses = self.all_uses(graph, name)
        if len(uses) != 1 or uses[0].graph != graph.name or graph.op(uses[0].op).kind == "output":
            return None
        return uses[0]

    def slot_tensor(self, graph: Graph, name: str, slot: int) -> TensorRef | None:
        """What an input slot reads; a broken model may have none."""
        slots = graph.slots(name)
        return slots[slot] if 0 <= slot < len(slots) else None

    def producer(self, graph: Graph, name: str, slot: int) -> Op | None:
        """The op of the same graph that fills a slot."""
        tensor = self.slot_tensor(graph, name, slot)
        return graph.op(tensor.op) if tensor is not None and tensor.graph == graph.name else None


def op_names(graph: Graph, test: Callable[[Op], bool]) -> list[str]:
    """The ops that are there now and of some type."""
    return [op.name for op in graph.ops() if test(op)]


def is_q(op: Op | None) -> bool:
    """Whether `op` is a QuantizeLinear."""
    return op is not None and op.type == "QuantizeLinear" and op.domain in QDQ_DOMAINS


def is_dq(op: Op | None) -> bool:
    """Whether `op` is a DequantizeLinear."""
    return op is not None and op.type == "DequantizeLinear" and op.domain in QDQ_DOMAINS


def _is_small_constant(output: Output) -> bool:
    shape = output.shape
    return shape is not None and None not in shape and int(np.prod([size or 0 for size in shape])) <= MAX_SCALARS
