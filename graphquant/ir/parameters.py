"""Parameters, tensors whose value is known before the model runs, and states, which one run passes to the next.

Constants and variables are parameters. So are the results of Identity, Enter, Switch and ReadVariableOp on a
parameter, the results of pure ops on parameters only, and arguments of functions if every caller passes a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.errors import ModelError
from graphquant.ir.kinds import (
    CONCATENATING_KINDS,
    DATA_MOVEMENT_KINDS,
    FORWARDING_KINDS,
    QUANTIZATION_KINDS,
    RECURRENT_KINDS,
    STORED_KINDS,
    TRANSPARENT_KINDS,
)
from graphquant.ir.types import Call, Op, Shape, TensorRef, Use, follow_to_end, reachable

if TYPE_CHECKING:
    from graphquant.ir.graph import Graph, Model

IMPURE_KINDS = STORED_KINDS | QUANTIZATION_KINDS | {"input", "output", "call", "merge", "random", "stateful", "integer"}
"""Kinds whose outputs do not follow from their inputs alone, or that are quantization already."""

MAX_FOLDED_ELEMENTS = 1 << 28
"""Limit of elements when a chain of constants is evaluated, so that a malicious model cannot fill memory."""

UNCOMPUTED_KINDS = FORWARDING_KINDS | STORED_KINDS | {"input", "merge"}
"""Kinds of parameters whose value is one of the model's own, not computed."""


class Parameters:
    """Determines which tensors of `model` are parameters, and their values. Caches results."""

    def __init__(self, model: Model) -> None:
        """The model must not be edited while this is in use."""
        self._model = model
        self._sources: dict[TensorRef, tuple[TensorRef, ...] | None] = {}
        self._input_positions: dict[str, dict[str, int]] = {}
        self._root_tensors: dict[TensorRef, TensorRef] = {}

    @cached_property
    def _runnable(self) -> set[str]:
        return set(self._model.graphs_reachable_from((*self._model.entry_graphs, *self._model.saved_functions)))

    @cached_property
    def _callers(self) -> dict[str, list[tuple[Use, Call]]]:
        # Arguments from unreachable graphs never arrive in a graph that runs or that can be called.
        return self._model.callers(self._runnable)

    @cached_property
    def _all_callers(self) -> dict[str, list[tuple[Use, Call]]]:
        return self._model.callers()

    def is_parameter(self, tensor: TensorRef) -> bool:
        """Return True if the value of `tensor` is known before the model runs."""
        if tensor not in self._sources:
            self._resolve(tensor)
        return self._sources[tensor] is not None

    def value(self, tensor: TensorRef) -> np.ndarray[Any, Any] | None:
        """Return the value of a parameter, or None if `tensor` is not one or its value is not in the files.

        Raises a ModelError if the value is in the files and cannot be read.
        """
        if not self.is_parameter(tensor):
            return None
        values: dict[TensorRef, np.ndarray[Any, Any] | None] = {}
        computed_elements = 0
        for current in self._topological_order(reachable([tensor], self._known_sources)):
            value = self._compute(current, values)
            if value is not None and self._model.op(current).kind not in UNCOMPUTED_KINDS:
                computed_elements += value.size
            values[current] = None if computed_elements > MAX_FOLDED_ELEMENTS else value
        return values[tensor]

    def number(self, tensor: TensorRef) -> float | None:
        """Return the value of a parameter with one element; None for others, and for weights, which are not read."""
        if not self.is_parameter(tensor) or math.prod(size or 0 for size in self.shape(tensor) or ()) > 1:
            return None
        value = self.value(tensor)
        is_number = value is not None and value.size == 1 and not np.iscomplexobj(value)
        return float(value.reshape(-1)[0]) if value is not None and is_number else None

    def is_variable(self, tensor: TensorRef) -> bool:
        """Return True for a parameter whose value is that of a variable, or is computed from one."""
        starts = [tensor] if self.is_parameter(tensor) else []
        return any(self._model.op(source).kind == "variable" for source in reachable(starts, self._known_sources))

    def root_tensor(self, tensor: TensorRef) -> TensorRef:
        """Return the constant or variable that forwarding ops pass on as `tensor`, or the tensor at which they begin.

        An argument of a function has a root if all callers pass the same constant or variable.
        """
        if not self.is_parameter(tensor):
            return tensor
        pending = [tensor]
        while pending:  # without recursion, like `_resolve`; the sources of a parameter are not cyclic
            sources = self._forwarded_sources(pending[-1])
            unresolved = [source for source in sources if source not in self._root_tensors]
            if not unresolved:
                roots = {self._root_tensors[source] for source in sources}
                current = pending.pop()
                self._root_tensors[current] = roots.pop() if len(roots) == 1 else current
            pending += unresolved
        return self._root_tensors[tensor]

    def shape(self, tensor: TensorRef) -> Shape | None:
        """Return the static shape of `tensor`. A parameter without one has the shape of its root tensor."""
        shape: Shape | None = self._model.output(tensor).shape
        if shape is None and self.is_parameter(tensor):
            shape = self._model.output(self.root_tensor(tensor)).shape
        return shape

    def _known_sources(self, tensor: TensorRef) -> tuple[TensorRef, ...]:
        return self._sources[tensor] or ()

    def _forwarded_sources(self, tensor: TensorRef) -> tuple[TensorRef, ...]:
        """Return the tensors that a parameter may be equal to; none if it is computed."""
        forwarded = self._model.op(tensor).kind in UNCOMPUTED_KINDS
        return self._known_sources(tensor) if forwarded else ()

    def _topological_order(self, tensors: list[TensorRef]) -> Iterator[TensorRef]:
        members = set(tensors)
        sources = {tensor: members.intersection(self._known_sources(tensor)) for tensor in tensors}
        yield from TopologicalSorter(sources).static_order()

    def _compute(
        self, tensor: TensorRef, values: dict[TensorRef, np.ndarray[Any, Any] | None]
    ) -> np.ndarray[Any, Any] | None:
        op = self._model.op(tensor)
        sources = self._known_sources(tensor)
        if op.kind in STORED_KINDS:
            return op.read_value() if op.read_value is not None else None
        if op.kind in UNCOMPUTED_KINDS:
            has_single_value = len(sources) == 1 or self.root_tensor(tensor) != tensor
            return values[sources[0]] if has_single_value else None
        inputs = [value for value in (values[source] for source in sources) if value is not None]
        evaluate_op = getattr(self._model.source, "evaluate_op", None)  # TFLite models have none
        if evaluate_op is None or len(inputs) != len(sources):
            return None
        output_elements = math.prod(size or 1 for size in op.outputs[tensor.port].shape or ())
        elements = max(sum(value.size for value in inputs), output_elements)
        outputs = None if elements > MAX_FOLDED_ELEMENTS else evaluate_op(op, inputs)
        return None if outputs is None or tensor.port >= len(outputs) else outputs[tensor.port]

    def _resolve(self, tensor: TensorRef) -> None:
        """Decide if `tensor` and all tensors that it depends on are parameters.

        There is no recursion, because chains of constants can be longer than Python's stack.
        """
        stack = [tensor]
        expanded: set[TensorRef] = set()
        while stack:
            current = stack[-1]
            if current in self._sources:
                stack.pop()
                continue
            if (sources := self._required_sources(current)) is None:
                self._sources[current] = None
                stack.pop()
                continue
            unresolved = [source for source in sources if source not in self._sources]
            if current in expanded:
                # On the second visit, an unresolved source depends on this tensor: a loop, so it is not a parameter.
                is_known = not unresolved and all(self._sources[source] is not None for source in sources)
                self._sources[current] = sources if is_known else None
                stack.pop()
                continue
            expanded.add(current)
            stack.extend(source for source in unresolved if source not in expanded)

    def _required_sources(self, tensor: TensorRef) -> tuple[TensorRef, ...] | None:
        """Return the tensors that must be parameters for `tensor` to be one; None if it cannot be one."""
        graph = self._model.graphs[tensor.graph]
        op = graph.op(tensor.op)
        if op.kind in STORED_KINDS:
            return ()
        if op.kind == "input":
            return self._argument_sources(tensor, op)
        slots = graph.slots(tensor.op)
        if op.kind == "merge":
            return self._loop_invariant(tensor)
        if op.kind in FORWARDING_KINDS:
            return (slots[0],) if slots and slots[0] is not None else None
        if op.kind in IMPURE_KINDS or op.calls or not slots or any(slot is None for slot in slots):
            return None
        return tuple(slot for slot in slots if slot is not None)

    def _loop_invariant(self, merge: TensorRef) -> tuple[TensorRef, ...] | None:
        """Return the value that enters a loop of TensorFlow 1 at `merge` if each iteration passes it on unchanged."""
        graph = self._model.graphs[merge.graph]
        entering, repeated = (*graph.slots(merge.op), None, None)[:2]
        if entering is None or repeated is None or graph.op(repeated.op).kind != "next_iteration":
            return None

        is_passed_on = _is_forwarded(graph, repeated, merge, frozenset({"next_iteration", "identity", "switch"}))
        return (entering,) if is_passed_on else None

    def _argument_sources(self, tensor: TensorRef, op: Op) -> tuple[TensorRef, ...] | None:
        """Return the tensors that callers of a function pass for the argument `op`; None if some are unknown."""
        callers = (self._callers if tensor.graph in self._runnable else self._all_callers).get(tensor.graph, ())
        if not callers:
            return None
        if tensor.graph not in self._input_positions:
            names = self._model.graphs[tensor.graph].inputs
            self._input_positions[tensor.graph] = {name: position for position, name in enumerate(names)}
        if (position := self._input_positions[tensor.graph].get(op.name)) is None:
            return None
        operands: dict[TensorRef, None] = {}
        for caller, call in callers:
            operand = self._model.passed_operand(caller, call, position)
            if operand is None or (call.loop and not self._is_passed_through(call.graph, position)):
                return None
            operands[self._main_graph_tensor(operand)] = None
        return tuple(operands)

    def _main_graph_tensor(self, tensor: TensorRef) -> TensorRef:
        """Return the main graph's variable or constant for the same one in a saved function, else `tensor`."""
        if tensor.graph not in self._model.saved_functions:
            return tensor
        candidate = TensorRef(self._model.entry_graphs[0], tensor.op, tensor.port)
        if tensor.op not in self._model.graphs[candidate.graph]:
            return tensor
        return candidate if self._model.op(candidate).kind == self._model.op(tensor).kind else tensor

    def _is_passed_through(self, body: str, position: int) -> bool:
        """Return True if a loop body returns its input `position` unchanged."""
        graph = self._model.graphs[body]
        if position >= len(graph.outputs):
            return False
        result, argument = graph.source_of(Use(body, graph.outputs[position], 0)), graph.inputs[position]
        return result is not None and _is_forwarded(graph, result, TensorRef(body, argument), frozenset({"identity"}))


def _is_forwarded(graph: Graph, tensor: TensorRef, start: TensorRef, kinds: frozenset[str]) -> bool:
    """Return True if `tensor` is `start`, or ops of `kinds` in the graph of both forward it."""

    def forwarded(current: TensorRef) -> TensorRef | None:
        is_forwarding = current.graph == graph.name and graph.op(current.op).kind in kinds
        return graph.source_of(Use(graph.name, current.op, 0)) if is_forwarding else None

    return follow_to_end(tensor, forwarded, len(graph)) == start


def weight_ends(value: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Return the least and the largest value, both NaN if any value is NaN; an empty tuple for an empty array."""
    with np.errstate(invalid="ignore"):  # numpy warns of NaN in types other than its own
        return (value.min(), value.max()) if value.size else ()


def require_finite_weight(value: np.ndarray[Any, Any], tensor: TensorRef) -> np.ndarray[Any, Any]:
    """Return `value` if it is finite. Raises a ModelError if it holds NaN or infinity, for which no scale exists."""
    if not np.isfinite(weight_ends(value)).all():  # np.isfinite(value) would take a quarter of the weight's memory
        raise ModelError(
            f"The weight {tensor} holds NaN or infinity, for which no scale exists. Repair the model, or exclude the"
            " tensor with --exclude."
        )
    return value


def find_states(model: Model) -> dict[str, TensorRef]:
    """Return the tensor that an output of the main graph returns as the next value of each input that is a state.

    A state is an input, such as past keys, whose values are part of an output, the present keys: the ops between them
    only move and join values, or are attention, which appends to its past states. A model with one input has none: its
    output may join the input with new values, but nothing feeds it with the next step.
    """
    graph, joining_kinds = model.main, DATA_MOVEMENT_KINDS | CONCATENATING_KINDS | TRANSPARENT_KINDS
    outputs = {slot for name in graph.outputs for slot in graph.slots(name)[:1]}

    def next_values(tensor: TensorRef) -> list[TensorRef]:
        following = []
        for use in graph.consumers(tensor):
            op = graph.op(use.op) if use.graph == graph.name else None
            if op is not None and op.kind in joining_kinds and op.role(use.slot) == "input":
                following += [TensorRef(graph.name, op.name, port) for port in range(len(op.outputs))]
            elif op is not None and op.kind not in RECURRENT_KINDS and op.role(use.slot) == "state":
                port = 1 + op.roles[: use.slot].count("state")
                following += [TensorRef(graph.name, op.name, port)] if port < len(op.outputs) else []
        return following

    states: dict[str, TensorRef] = {}
    for name in graph.inputs if len(graph.inputs) > 1 else ():
        start, dtype = TensorRef(graph.name, name), graph.op(name).outputs[0].dtype
        moved = reachable([start], next_values)[1:] if dtype is not None and "float" in dtype else []
        presents = [tensor for tensor in moved if tensor in outputs]
        if len(presents) == 1:
            states[name] = presents[0]
    return states


def fixed_cache_size(op: Op) -> int:
    """Return the number of positions in the states of an attention op that keeps only the last ones; 0 if they grow."""
    return int(op.numeric_attr("sliding_window_cache", 0) and max(op.numeric_attr("local_window_size", 0), 0))
