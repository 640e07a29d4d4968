"""Which tensors are parameters: values that are known before the model runs, wherever they come from.

A constant or variable is one; so is what Identity, Enter, Switch and ReadVariableOp make of one, what a pure op makes
of parameters alone, and a function's argument if every caller passes one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.errors import ModelError
from graphquant.ir.types import Op, TensorRef, Use

if TYPE_CHECKING:
    from graphquant.ir.graph import Model


FORWARDING_KINDS = frozenset({"identity", "enter", "switch", "read_variable"})
"""Kinds whose output 0 (for "switch" every output) is their slot 0, unchanged."""

IMPURE_KINDS = frozenset(
    {"input", "output", "constant", "variable", "call", "merge", "random", "stateful"}
    | {"quantize", "dequantize", "qdq", "integer"}
)
"""Kinds whose outputs do not follow from their inputs alone, or which are quantization already."""

MAX_FOLDED_ELEMENTS = 1 << 28
"""Largest number of elements that evaluating a chain of constants may make: a hostile model must not fill memory."""

STORED_KINDS = FORWARDING_KINDS | {"constant", "variable", "input"}
"""Kinds of parameters whose value is one of the model's own, not computed."""


class Parameters:
    """Answers whether a tensor of `model` is a parameter, and its value; remembers what it found."""

    def __init__(self, model: Model) -> None:
        """The model must not be edited while this is in use."""
        self._model = model
        reachable = set(model.graphs_reachable_from((*model.entry_graphs, *model.saved_functions)))
        self._callers = {
            # What only unreachable graphs pass to a graph that runs, or that can be called, never arrives there.
            name: [(use, call) for use, call in calls if name not in reachable or use.graph in reachable]
            for name, calls in model.callers().items()
        }
        self._sources: dict[TensorRef, tuple[TensorRef, ...] | None] = {}
        self._input_positions: dict[str, dict[str, int]] = {}
        self._root_tensors: dict[TensorRef, TensorRef] = {}

    def is_parameter(self, tensor: TensorRef) -> bool:
        """Whether the value of `tensor` is known before the model runs."""
        if tensor not in self._sources:
            self._resolve(tensor)
        return self._sources[tensor] is not None

    def value(self, tensor: TensorRef) -> np.ndarray[Any, Any] | None:
        """The value of parameter `tensor`, None if `tensor` is no parameter or its value is not in the files.

        Raises:
            ModelError: The value is in the files and cannot be read.
        """
        if not self.is_parameter(tensor):
            return None
        order: list[TensorRef] = []
        pending, visited = [tensor], set()
        while pending:
            current = pending.pop()
            if current not in visited:
                visited.add(current)
                order.append(current)
                pending.extend(self._sources[current] or ())
        values: dict[TensorRef, np.ndarray[Any, Any] | None] = {}
        computed_elements = 0
        for current in self._topological_order(order):
            value = self._compute(current, values)
            computed_elements += (
                value.size if value is not None and self._model.op(current).kind not in STORED_KINDS else 0
            )
            values[current] = None if computed_elements > MAX_FOLDED_ELEMENTS else value
        return values[tensor]

    def is_variable(self, tensor: TensorRef) -> bool:
        """Whether `tensor` is a parameter whose value comes, as it is or computed, from a variable."""
        pending, visited = [tensor] if self.is_parameter(tensor) else [], {tensor}
        for current in pending:
            if self._model.op(current).kind == "variable":
                return True
            pending.extend(source for source in self._sources[current] or () if source not in visited)
            visited.update(pending)
        return False

    def root_tensor(self, tensor: TensorRef) -> TensorRef:
        """The constant or variable behind a chain of forwarding ops, or the tensor where the chain ends.

        An argument for which all callers of its function pass the same constant or variable is that.
        """
        if not self.is_parameter(tensor):
            return tensor
        for current in (
            self._topological_order(self._forwarding_closure(tensor)) if tensor not in self._root_tensors else ()
        ):
            roots = {self._root_tensors[source] for source in self._forwarded_sources(current)}
            self._root_tensors[current] = roots.pop() if len(roots) == 1 else current
        return self._root_tensors[tensor]

    def _forwarded_sources(self, tensor: TensorRef) -> tuple[TensorRef, ...]:
        """What a parameter may be, unchanged; nothing where it is computed."""
        return self._sources[tensor] or () if self._model.op(tensor).kind in FORWARDING_KINDS | {"input"} else ()

    def _forwarding_closure(self, tensor: TensorRef) -> list[TensorRef]:
        """`tensor` and what it may be, unchanged."""
        order, pending, visited = [], [tensor], set()
        while pending:
            current = pending.pop()
            if current not in visited:
                visited.add(current)
                order.append(current)
                pending.extend(self._forwarded_sources(current))
        return order

    def _topological_order(self, tensors: list[TensorRef]) -> list[TensorRef]:
        members = set(tensors)
        ordered: dict[TensorRef, None] = {}
        for start in tensors:
            stack = [(start, False)]
            while stack:
                current, expanded = stack.pop()
                if expanded:
                    ordered[current] = None
                elif current not in ordered:
                    stack.append((current, True))
                    stack.extend(
                        (source, False)
                        for source in self._sources[current] or ()
                        if source in members and source not in ordered
                    )
        return list(ordered)

    def _compute(
        self, tensor: TensorRef, values: dict[TensorRef, np.ndarray[Any, Any] | None]
    ) -> np.ndarray[Any, Any] | None:
        op = self._model.op(tensor)
        sources = self._sources[tensor] or ()
        if op.kind in {"constant", "variable"}:
            return op.read_value() if op.read_value is not None else None
        if op.kind in STORED_KINDS:
            single_value = len(sources) == 1 or self.root_tensor(tensor) != tensor
            return values[sources[0]] if single_value else None
        inputs = [values[source] for source in sources]
        known_inputs = [value for value in inputs if value is not None]
        if self._model.evaluate_op is None or len(known_inputs) != len(inputs):
            return None
        if (
            sum(value.size for value in known_inputs) > MAX_FOLDED_ELEMENTS
            or _output_elements(op, tensor.port) > MAX_FOLDED_ELEMENTS
        ):
            return None
        outputs = self._model.evaluate_op(op, known_inputs)
        return None if outputs is None or tensor.port >= len(outputs) else outputs[tensor.port]

    def _resolve(self, tensor: TensorRef) -> None:
        """Decides `tensor` and all it depends on, without recursion: constant chains can be long."""
        stack = [tensor]
        expanded: set[TensorRef] = set()
        while stack:
            current = stack[-1]
            if current in self._sources:
                stack.pop()
                continue
            sources = self._required_sources(current)
            if sources is None:
                self._sources[current] = None
                stack.pop()
                continue
            unresolved = [source for source in sources if source not in self._sources]
            if current in expanded:
                # Second visit: what is still open depends on itself (a loop), so it is no parameter.
                is_known = not unresolved and all(self._sources[source] is not None for source in sources)
                self._sources[current] = sources if is_known else None
                stack.pop()
                continue
            expanded.add(current)
            stack.extend(source for source in unresolved if source not in expanded)

    def _required_sources(self, tensor: TensorRef) -> tuple[TensorRef, ...] | None:
        """The tensors that must be parameters for `tensor` to be one; None if it cannot be one."""
        graph = self._model.graphs[tensor.graph]
        op = graph.op(tensor.op)
        if op.kind in {"constant", "variable"}:
            return ()
        if op.kind == "input":
            return self._argument_sources(tensor, op)
        slots = graph.slots(tensor.op)
        if op.kind in FORWARDING_KINDS:
            return (slots[0],) if slots and slots[0] is not None else None
        if op.kind in IMPURE_KINDS or op.calls or not slots or any(slot is None for slot in slots):
            return None
        return tuple(slot for slot in slots if slot is not None)

    def _argument_sources(self, tensor: TensorRef, op: Op) -> tuple[TensorRef, ...] | None:
        """What the callers of a function pass for the argument `op`."""
        graph = self._model.graphs[tensor.graph]
        if not self._callers.get(tensor.graph):
            return None
        if tensor.graph not in self._input_positions:
            self._input_positions[tensor.graph] = {name: position for position, name in enumerate(graph.inputs)}
        position = self._input_positions[tensor.graph].get(op.name)
        if position is None:
            return None
        operands: dict[TensorRef, None] = {}
        for caller, call in self._callers[tensor.graph]:
            slots = self._model.graphs[caller.graph].slots(caller.op)
            slot = None if call.offset is None else position + call.offset
            operand = slots[slot] if slot is not None and slot < len(slots) else None
            if operand is None or (call.loop and not self._is_passed_through(call.graph, position)):
                return None
            operands[self._main_graph_tensor(operand)] = None
        return tuple(operands)

    def _main_graph_tensor(self, tensor: TensorRef) -> TensorRef:
        """The main graph's variable or constant where `tensor` is the same one in a graph of `model.saved`."""
        candidate = TensorRef(self._model.entry_graphs[0], tensor.op, tensor.port)
        exists_in_main = (
            tensor.graph in self._model.saved_functions and tensor.op in self._model.graphs[candidate.graph]
        )
        return candidate if exists_in_main and self._model.op(candidate).kind == self._model.op(tensor).kind else tensor

    def _is_passed_through(self, body: str, position: int) -> bool:
        """Whether a loop body hands its input `position` on unchanged."""
        graph = self._model.graphs[body]
        if position >= len(graph.outputs):
            return False
        current = graph.source_of(Use(body, graph.outputs[position], 0))
        for _ in range(len(graph)):  # a broken model may hold a ring of identities
            if current is None or current.graph != body or graph.op(current.op).kind != "identity":
                break
            current = graph.source_of(Use(body, current.op, 0))
        return current == TensorRef(body, graph.inputs[position], 0)


def _output_elements(op: Op, port: int) -> int:
    """The number of elements of an output, as far as its static shape tells."""
    return math.prod(size or 1 for size in op.outputs[port].shape or ())


def require_finite_weight(value: np.ndarray[Any, Any], tensor: TensorRef) -> np.ndarray[Any, Any]:
    """`value` if it is finite.

    Raises:
        ModelError: It holds NaN or infinity, for which there is no scale.
    """
    if value.size and not np.isfinite(value).all():
        raise ModelError(
            f"The weight {tensor} holds NaN or infinity. No scale exists for it; mend the model or leave it out with"
            " --exclude."
        )
    return value
