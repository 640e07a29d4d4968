"""Working copy of a model for the optimizer steps, with the queries that they need."""

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
"""Maximum number of scales or zero points that are read. Per-block scales may be as many as weights."""

MAX_SHARED = 8
"""Maximum number of elements of a constant that ONNX Runtime merges with equal constants."""

SHARED_TYPES = frozenset({"float16", "float32", "float64", "int32", "int64"})
"""Types of such constants."""

MAX_CHAINED_QUANTIZATIONS = 8
"""Maximum number of consecutive quantizations to look through for a shape."""

_ROLES = ("input", "scale", "zero_point")


FIRST_OPSET = {"MaxPool": 12}
"""Lowest opset with an integer kernel for an op."""


@dataclass(slots=True)
class RemovedOps:
    """Ops that were removed, by graph and name.

    Attributes:
        host_names: The op that does their work.
        host_types: Type of that op if it is no longer in the graph.
    """

    host_names: dict[tuple[str, str], str] = field(default_factory=dict)
    host_types: dict[tuple[str, str], str] = field(default_factory=dict)


class WorkingCopy:
    """Editable graphs of the model, with information about the original tensors."""

    def __init__(self, model: Model) -> None:
        """Copy `model`, which is not modified."""
        self.model = model.copy()
        self._initial_model = model
        self._parameters = Parameters(model)
        self._values: dict[TensorRef, np.ndarray[Any, Any] | None] = {}
        self._added_count = 0
        self._labels: dict[TensorRef, TensorRef] = {}
        self._equal_constant_counts: dict[str, Counter[tuple[str | None, object, bytes]]] = {}

    # -- reading ---------------------------------------------------------------------------------

    def is_constant(self, tensor: TensorRef | None) -> bool:
        """Return whether `tensor` is stored in the model, or is folded into a constant before any other step."""
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
        """Return the value of a small constant, otherwise None."""
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
        """Return whether a QuantizeLinear is folded before any other step, because its input is constant."""
        return self.is_constant(TensorRef(graph.name, name))

    def is_local_constant(self, graph: Graph, tensor: TensorRef | None) -> bool:
        """Return whether `tensor` is a constant of `graph` itself. Some steps do not look into outer graphs."""
        return tensor is not None and tensor.graph == graph.name and self.is_constant(tensor)

    def scalar_value(self, tensor: TensorRef | None) -> float | None:
        """Return the value of a constant with one element, otherwise None."""
        value = self.small_constant_value(tensor)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def static_shape(self, tensor: TensorRef) -> Shape | None:
        """Return the static shape of `tensor`. onnx infers none for quantizations of the domain com.microsoft."""
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
        """Return the static shape of `tensor`, with the names of symbolic sizes."""
        shape = self.static_shape(tensor) or self._matmul_shape(tensor)
        source_graph = self.model.source.graphs.get(tensor.graph) if self.model.source is not None else None
        names = source_graph.dimension_names.get(self.model.output(tensor).name) if source_graph is not None else None
        if shape is None or names is None or len(names) != len(shape):
            return shape
        return tuple(name or None if size is None else size for size, name in zip(shape, names, strict=True))

    def _matmul_shape(self, tensor: TensorRef) -> Shape | None:
        """Return the shape of a MatMul after quantizations of the domain com.microsoft."""
        graph = self.model.graphs[tensor.graph]
        operands = [self.slot_tensor(graph, tensor.op, slot) for slot in (0, 1)]
        if graph.op(tensor.op).type != "MatMul" or operands[0] is None or operands[1] is None:
            return None
        left_shape, right_shape = self.static_shape(operands[0]), self.static_shape(operands[1])
        return (
            (*left_shape[:-1], right_shape[-1])
            if left_shape and right_shape is not None and len(right_shape) == 2  # noqa: PLR2004  # a matrix
            else None
        )

    def integer_dtype(self, graph: Graph, name: str) -> str:
        """Return the integer type of a QuantizeLinear or DequantizeLinear."""
        op = graph.op(name)
        data, _, zero = self.qdq_inputs(graph, name)
        dtype = op.outputs[0].dtype if op.kind == "quantize" else (graph.output(data).dtype if data else None)
        if dtype is None and zero is not None:
            dtype = graph.output(zero).dtype
        return dtype or "uint8"

    def qdq_inputs(self, graph: Graph, name: str) -> tuple[TensorRef | None, TensorRef | None, TensorRef | None]:
        """Return data, scale and zero point of a QuantizeLinear or DequantizeLinear."""
        data, scale, zero = [*graph.slots(name), None, None, None][:3]
        return data, scale, zero

    def has_scalar_params(self, graph: Graph, name: str, *, zero_needed: bool = False) -> bool:
        """Return whether scale and zero point of a Q or DQ are constants with one element."""
        _, scale, zero = self.qdq_inputs(graph, name)
        if self.scalar_value(scale) is None:
            return False
        return not zero_needed if zero is None else self.scalar_value(zero) is not None

    def same_params(self, graph: Graph, first: str, second: str) -> bool:
        """Return whether a Q and a DQ have equal, explicit, constant, scalar scales and zero points."""
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
        """Return the tensor of the original model that `tensor` stands for, because steps add new tensors."""
        while tensor in self._labels:
            tensor = self._labels[tensor]
        return tensor

    def set_label(self, added: TensorRef, tensor: TensorRef) -> None:
        """Make messages refer to `added` as `tensor`."""
        if added != tensor:
            self._labels[added] = tensor

    def constant_use_count(self, graph: Graph, tensor: TensorRef) -> int:
        """Return the number of uses of a constant, including small constants of equal value, which are merged."""
        if tensor.graph:  # ONNX Runtime merges equal constants of the main graph only
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
        """Add an op like `template` under a new name derived from `name`."""
        self._added_count += 1
        label = graph.unique_name(f"{name}#{self._added_count}")
        outputs = tuple(replace(output, name=label) for output in template.outputs)
        return graph.add_op(replace(template, name=label, outputs=outputs, source=None), inputs)

    def insert_pair(self, graph: Graph, tensor: TensorRef, uses: Iterable[Use], template_name: str) -> list[TensorRef]:
        """Insert a Q after `tensor` and a separate DQ before each of `uses`, with the parameters of `template_name`."""
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
        """Add a constant. Without a `value`, its value is never read."""
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
        """Remove an op and connect its readers to its first input."""
        source = self.slot_tensor(graph, name, 0)
        for use in self.all_uses(graph, name):
            self.model.graphs[use.graph].set_source(use, source)
        self.drop(graph, name)

    def drop(self, graph: Graph, name: str) -> None:
        """Remove an op that nothing reads."""
        for slot, tensor in enumerate(list(graph.slots(name))):
            if tensor is not None and tensor.graph != graph.name:
                graph.set_source(Use(graph.name, name, slot), None)
        graph.nx.remove_node(name)

    # -- edges -----------------------------------------------------------------------------------

    def all_uses(self, graph: Graph, name: str) -> list[Use]:
        """Return every use of any output of the op."""
        return [use for uses in graph.consumers_by_port(name).values() for use in uses]

    def op_uses(self, graph: Graph, name: str, port: int | None = None) -> list[Use]:
        """Return the uses of the op by other ops, without graph outputs."""
        uses_by_port = graph.consumers_by_port(name)
        uses = self.all_uses(graph, name) if port is None else uses_by_port.get(port, [])
        return [use for use in uses if self.model.graphs[use.graph].op(use.op).kind != "output"]

    def is_output(self, graph: Graph, name: str) -> bool:
        """Return whether an output of the op is a graph output."""
        return any(self.model.graphs[use.graph].op(use.op).kind == "output" for use in self.all_uses(graph, name))

    def only_use(self, graph: Graph, name: str) -> Use | None:
        """Return the only use of the op if it is in its own graph and not a graph output, otherwise None."""
        uses = self.all_uses(graph, name)
        if len(uses) != 1 or uses[0].graph != graph.name or graph.op(uses[0].op).kind == "output":
            return None
        return uses[0]

    def slot_tensor(self, graph: Graph, name: str, slot: int) -> TensorRef | None:
        """Return the tensor at an input slot; an invalid model may lack the slot."""
        slots = graph.slots(name)
        return slots[slot] if 0 <= slot < len(slots) else None

    def producer(self, graph: Graph, name: str, slot: int) -> Op | None:
        """Return the op of the same graph that feeds a slot."""
        tensor = self.slot_tensor(graph, name, slot)
        return graph.op(tensor.op) if tensor is not None and tensor.graph == graph.name else None


def op_names(graph: Graph, test: Callable[[Op], bool]) -> list[str]:
    """Return the names of the current ops that pass `test`."""
    return [op.name for op in graph.ops() if test(op)]


def is_q(op: Op | None) -> bool:
    """Return whether `op` is a QuantizeLinear."""
    return op is not None and op.type == "QuantizeLinear" and op.domain in QDQ_DOMAINS


def is_dq(op: Op | None) -> bool:
    """Return whether `op` is a DequantizeLinear."""
    return op is not None and op.type == "DequantizeLinear" and op.domain in QDQ_DOMAINS


def _is_small_constant(output: Output) -> bool:
    shape = output.shape
    return shape is not None and None not in shape and int(np.prod([size or 0 for size in shape])) <= MAX_SCALARS
