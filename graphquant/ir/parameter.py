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

FORWARDING = frozenset({"identity", "enter", "switch", "read_variable"})
"""Kinds whose output 0 (for "switch" every output) is their slot 0, unchanged."""

IMPURE = frozenset(
    {"input", "output", "constant", "variable", "call", "merge", "random", "stateful"}
    | {"quantize", "dequantize", "qdq", "integer"}
)
"""Kinds whose outputs do not follow from their inputs alone, or which are quantization already."""

MAX_CHAIN_VALUE = 1 << 28
"""Largest number of elements that evaluating a chain of constants may make: a hostile model must not fill memory."""

GIVEN = FORWARDING | {"constant", "variable", "input"}
"""Kinds of parameters whose value is one of the model's own, not computed."""


class Parameters:
    """Answers whether a tensor of `model` is a parameter, and its value; remembers what it found."""

    def __init__(self, model: Model) -> None:
        """The model must not be edited while this is in use."""
        self._model = model
        reached = set(model.reached((*model.entries, *model.saved)))
        self._callers = {
            # What only unreachable graphs pass to a graph that runs, or that can be called, never arrives there.
            name: [(use, call) for use, call in calls if name not in reached or use.graph in reached]
            for name, calls in model.callers().items()
        }
        self._roots: dict[TensorRef, tuple[TensorRef, ...] | None] = {}
        self._positions: dict[str, dict[str, int]] = {}
        self._origins: dict[TensorRef, TensorRef] = {}

    def is_parameter(self, tensor: TensorRef) -> bool:
        """Whether the value of `tensor` is known before the model runs."""
        if tensor not in self._roots:
            self._resolve(tensor)
        return self._roots[tensor] is not None

    def value(self, tensor: TensorRef) -> np.ndarray[Any, Any] | None:
        """The value of parameter `tensor`, None if `tensor` is no parameter or its value is not in the files.

        Raises:
            ModelError: The value is in the files and cannot be read.
        """
        if not self.is_parameter(tensor):
            return None
        order: list[TensorRef] = []
        todo, seen = [tensor], set()
        while todo:
            here = todo.pop()
            if here not in seen:
                seen.add(here)
                order.append(here)
                todo.extend(self._roots[here] or ())
        values: dict[TensorRef, np.ndarray[Any, Any] | None] = {}
        made = 0
        for here in self._topological(order):
            value = self._compute(here, values)
            made += value.size if value is not None and self._model.op(here).kind not in GIVEN else 0
            values[here] = None if made > MAX_CHAIN_VALUE else value
        return values[tensor]

    def is_variable(self, tensor: TensorRef) -> bool:
        """Whether `tensor` is a parameter whose value comes, as it is or computed, from a variable."""
        todo, seen = [tensor] if self.is_parameter(tensor) else [], {tensor}
        for here in todo:
            if self._model.op(here).kind == "variable":
                return True
            todo.extend(source for source in self._roots[here] or () if source not in seen)
            seen.update(todo)
        return False

    def origin(self, tensor: TensorRef) -> TensorRef:
        """The constant or variable behind a chain of forwarding ops, or the tensor where the chain ends.

        An argument for which all callers of its function pass the same constant or variable is that.
        """
        if not self.is_parameter(tensor):
            return tensor
        for here in self._topological(self._behind(tensor)) if tensor not in self._origins else ():
            ends = {self._origins[source] for source in self._handed(here)}
            self._origins[here] = ends.pop() if len(ends) == 1 else here
        return self._origins[tensor]

    def _handed(self, tensor: TensorRef) -> tuple[TensorRef, ...]:
        """What a parameter may be, unchanged; nothing where it is computed."""
        return self._roots[tensor] or () if self._model.op(tensor).kind in FORWARDING | {"input"} else ()

    def _behind(self, tensor: TensorRef) -> list[TensorRef]:
        """`tensor` and what it may be, unchanged."""
        order, todo, seen = [], [tensor], set()
        while todo:
            here = todo.pop()
            if here not in seen:
                seen.add(here)
                order.append(here)
                todo.extend(self._handed(here))
        return order

    def _topological(self, tensors: list[TensorRef]) -> list[TensorRef]:
        members = set(tensors)
        done: dict[TensorRef, None] = {}
        for start in tensors:
            stack = [(start, False)]
            while stack:
                here, ready = stack.pop()
                if ready:
                    done[here] = None
                elif here not in done:
                    stack.append((here, True))
                    stack.extend((s, False) for s in self._roots[here] or () if s in members and s not in done)
        return list(done)

    def _compute(
        self, tensor: TensorRef, values: dict[TensorRef, np.ndarray[Any, Any] | None]
    ) -> np.ndarray[Any, Any] | None:
        op = self._model.op(tensor)
        sources = self._roots[tensor] or ()
        if op.kind in {"constant", "variable"}:
            return op.value() if op.value is not None else None
        if op.kind in GIVEN:
            one = len(sources) == 1 or self.origin(tensor) != tensor
            return values[sources[0]] if one else None
        inputs = [values[source] for source in sources]
        known = [value for value in inputs if value is not None]
        if self._model.evaluate is None or len(known) != len(inputs):
            return None
        if sum(value.size for value in known) > MAX_CHAIN_VALUE or _size(op, tensor.port) > MAX_CHAIN_VALUE:
            return None
        outputs = self._model.evaluate(op, known)
        return None if outputs is None or tensor.port >= len(outputs) else outputs[tensor.port]

    def _resolve(self, tensor: TensorRef) -> None:
        """Decides `tensor` and all it depends on, without recursion: constant chains can be long."""
        stack = [tensor]
        open_: set[TensorRef] = set()
        while stack:
            here = stack[-1]
            if here in self._roots:
                stack.pop()
                continue
            sources = self._sources(here)
            if sources is None:
                self._roots[here] = None
                stack.pop()
                continue
            waiting = [source for source in sources if source not in self._roots]
            if here in open_:
                # Second visit: what is still open depends on itself (a loop), so it is no parameter.
                known = not waiting and all(self._roots[source] is not None for source in sources)
                self._roots[here] = sources if known else None
                stack.pop()
                continue
            open_.add(here)
            stack.extend(source for source in waiting if source not in open_)

    def _sources(self, tensor: TensorRef) -> tuple[TensorRef, ...] | None:
        """The tensors that must be parameters for `tensor` to be one; None if it cannot be one."""
        graph = self._model.graphs[tensor.graph]
        op = graph.op(tensor.op)
        if op.kind in {"constant", "variable"}:
            return ()
        if op.kind == "input":
            return self._arguments(tensor, op)
        slots = graph.slots(tensor.op)
        if op.kind in FORWARDING:
            return (slots[0],) if slots and slots[0] is not None else None
        if op.kind in IMPURE or op.calls or not slots or any(slot is None for slot in slots):
            return None
        return tuple(slot for slot in slots if slot is not None)

    def _arguments(self, tensor: TensorRef, op: Op) -> tuple[TensorRef, ...] | None:
        """What the callers of a function pass for the argument `op`."""
        graph = self._model.graphs[tensor.graph]
        if not self._callers.get(tensor.graph):
            return None
        if tensor.graph not in self._positions:
            self._positions[tensor.graph] = {name: position for position, name in enumerate(graph.inputs)}
        position = self._positions[tensor.graph].get(op.name)
        if position is None:
            return None
        passed: dict[TensorRef, None] = {}
        for caller, call in self._callers[tensor.graph]:
            slots = self._model.graphs[caller.graph].slots(caller.op)
            slot = None if call.offset is None else position + call.offset
            operand = slots[slot] if slot is not None and slot < len(slots) else None
            if operand is None or (call.loop and not self._passed_through(call.graph, position)):
                return None
            passed[self._in_main(operand)] = None
        return tuple(passed)

    def _in_main(self, tensor: TensorRef) -> TensorRef:
        """The main graph's variable or constant where `tensor` is the same one in a graph of `model.saved`."""
        main = TensorRef(self._model.entries[0], tensor.op, tensor.port)
        same = tensor.graph in self._model.saved and tensor.op in self._model.graphs[main.graph]
        return main if same and self._model.op(main).kind == self._model.op(tensor).kind else tensor

    def _passed_through(self, body: str, position: int) -> bool:
        """Whether a loop body hands its input `position` on unchanged."""
        graph = self._model.graphs[body]
        if position >= len(graph.outputs):
            return False
        here = graph.producer(Use(body, graph.outputs[position], 0))
        for _ in range(len(graph)):  # a broken model may hold a ring of identities
            if here is None or here.graph != body or graph.op(here.op).kind != "identity":
                break
            here = graph.producer(Use(body, here.op, 0))
        return here == TensorRef(body, graph.inputs[position], 0)


def _size(op: Op, port: int) -> int:
    """The number of elements of an output, as far as its static shape tells."""
    return math.prod(size or 1 for size in op.outputs[port].shape or ())


def readable(value: np.ndarray[Any, Any], tensor: TensorRef) -> np.ndarray[Any, Any]:
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
