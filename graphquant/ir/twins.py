"""Twins: what an op of a copy computes, an op of the graphs that run computes too.

A SavedModel holds a computation several times: signatures call one copy of a function, whoever loads the model calls
others. Ops that read the same variables in the same slots, and have the same attributes, are twins; where several are,
those whose paths (the names of the calls that lead to them, and their own) end alike. From there on, what twins read
and what reads them are twins, as long as type, attributes and constants agree and no other op comes into question.
Calls, branches and Identities are looked through. Functions that share no variable with what runs are no copies.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.ir.types import FLOAT_TYPES, Call, Op, TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from graphquant.ir.graph import Model
    from graphquant.ir.parameter import Parameters

MAX_CHANGES: Final = 4
"""How often the path of a function may grow while its callers are found; one that calls itself has none."""

MAX_LOOK: Final = 4
"""How many ops may stand between a weight and what it is quantized for."""

MAX_HOPS: Final = 256
"""How many calls, branches and Identities are looked through: a damaged model may hold a ring of them."""

_CALL: Final = re.compile(r"\A(Stateful)?PartitionedCall(_\d+)?\Z")
_PLAIN: Final = frozenset({"input", "output", "constant", "variable", "identity", "call", "read_variable"})

_OF_TRAINING: Final = frozenset({"is_training", "exponential_avg_factor", "seed", "seed2"})
"""Attributes in which a copy for training may differ."""

Place = tuple[str, str]
"""Graph and name of an op."""

Key = tuple[str, tuple[tuple[int, str], ...]]
"""Type of an op, and the variables that it reads by slot."""


class Twins:
    """The twins of ops in copies, which are the graphs that only saved functions reach."""

    def __init__(self, model: Model, parameters: Parameters) -> None:
        """The model must not be edited while this is in use."""
        self._model = model
        self._parameters = parameters
        live = set(model.live())
        self.copies = [name for name in model.reached(model.saved) if name not in live and name not in model.saved]
        self._in_copies = set(self.copies)
        self._positions: dict[str, dict[str, int]] = {}
        self._keys: dict[Place, Key] = {}
        self._found: dict[Place, Place | None] = {}
        if self.copies:
            self._callers = model.callers()
            self._spread(list(self._anchors()))

    def of(self, graph: str, name: str) -> Place | None:
        """The op of the graphs that run that is the twin of op `name` in a copy; None if there is none, or several."""
        return self._found.get((graph, name))

    def alike(self, copy: TensorRef, live: TensorRef) -> bool:
        """Whether what is computed for a tensor of a copy may be what is computed for one of the graphs that run.

        Twins made them, or whoever calls the copy gives it, as a layer's input.
        """
        one, other = self._made(copy), self._made(live)
        if one is None or other is None:
            return one is None
        return one.port == other.port and self.of(one.graph, one.op) == (other.graph, other.op)

    def variable(self, tensor: TensorRef) -> str | None:
        """The variable that `tensor` is, quantized or not; None if it is none."""
        for _ in range(MAX_LOOK):
            op = self._model.op(tensor)
            source = next(iter(self._model.graphs[tensor.graph].slots(tensor.op)), None)
            if op.kind not in {"qdq", "reshape"} or source is None:
                break
            tensor = source
        origin = self._parameters.origin(tensor)
        return origin.op if self._model.op(origin).kind == "variable" else None

    def _anchors(self) -> Iterator[tuple[Place, Place]]:
        """The pairs that variables make known."""
        known: dict[Key, list[tuple[Place, str | None]]] = {}
        for place, path in self._readers(_paths(self._model, self._model.entries)):
            known.setdefault(self._key(place), []).append((place, path))
        paths = _paths(self._model, self._model.saved)
        for place, path in self._readers({name: paths[name] for name in self.copies}):
            same = [one for one in known.get(self._key(place), []) if self._fits(place, one[0])]
            if len(same) > 1:
                same = [(one, other) for one, other in same if other and path and _meet(other, path)]
            if len(same) == 1:
                yield place, same[0][0]

    def _readers(self, paths: dict[str, str | None]) -> Iterator[tuple[Place, str | None]]:
        """The ops of these graphs that read variables, with their paths."""
        for name, path in paths.items():
            for op in self._model.graphs[name].ops():
                if op.kind not in _PLAIN and self._key((name, op.name))[1]:
                    yield (name, op.name), None if path is None else _join(path, op.name)

    def _key(self, place: Place) -> Key:
        if place not in self._keys:
            self._keys[place] = self._new_key(place)
        return self._keys[place]

    def _new_key(self, place: Place) -> Key:
        read = []
        for slot, tensor in enumerate(self._model.graphs[place[0]].slots(place[1])):
            variable = None if tensor is None else self.variable(tensor)
            if variable is not None:
                read.append((slot, variable))
        return self._op(place).type, tuple(read)

    def _op(self, place: Place) -> Op:
        return self._model.graphs[place[0]].op(place[1])

    def _spread(self, queue: list[tuple[Place, Place]]) -> None:
        """Notes the pairs in `queue` and those beside them."""
        for copy, live in queue:
            if copy in self._found:
                if self._found[copy] != live:
                    self._found[copy] = None
                continue
            self._found[copy] = live
            queue.extend(pair for pair in self._beside(copy, live) if self._fits(*pair) and self._same(*pair))

    def _beside(self, copy: Place, live: Place) -> Iterator[tuple[Place, Place]]:
        """The pairs of ops that two twins read, and of those that read the twins."""
        slots = [self._model.graphs[name].slots(op) for name, op in (copy, live)]
        for one, other in zip(*slots, strict=False):
            ends = self._made(one), self._made(other)
            if ends[0] is not None and ends[1] is not None and ends[0].port == ends[1].port:
                yield (ends[0].graph, ends[0].op), (ends[1].graph, ends[1].op)
        for port in range(len(self._op(copy).outputs)):
            readers = self._read(TensorRef(*copy, port)), self._read(TensorRef(*live, port))
            for kind, copies in readers[0].items():
                yield from _matched(copies, readers[1].get(kind, []))

    def _made(self, tensor: TensorRef | None) -> TensorRef | None:
        """What computes `tensor`, behind Identities, calls and arguments; None where that may be several."""
        for _ in range(MAX_HOPS):
            if tensor is None:
                break
            graph, op = self._model.graphs[tensor.graph], self._model.op(tensor)
            if op.kind == "identity":
                tensor = next(iter(graph.slots(op.name)), None)
            elif op.kind == "call" and op.calls:
                called = self._model.graphs[op.calls[0].graph]
                end = called.outputs[tensor.port] if tensor.port < len(called.outputs) else None
                tensor = None if end is None else called.producer(Use(called.name, end, 0))
            elif op.kind == "input":
                passed = self._passed(tensor.graph, op.name)
                tensor = passed[0] if len(passed) == 1 else None
            else:
                return tensor
        return None

    def _passed(self, name: str, argument: str) -> list[TensorRef]:
        """What callers pass for an argument of a function or branch; nothing for one of a loop."""
        if name not in self._positions:
            inputs = self._model.graphs[name].inputs
            self._positions[name] = {label: position for position, label in enumerate(inputs)}
        position, found = self._positions[name].get(argument), []
        for use, call in self._callers.get(name, []) if position is not None else ():
            slots = self._model.graphs[use.graph].slots(use.op)
            slot = None if call.offset is None or call.loop else (position or 0) + call.offset
            operand = slots[slot] if slot is not None and slot < len(slots) else None
            if operand is not None:
                found.append(operand)
        return list(dict.fromkeys(found))

    def _read(self, tensor: TensorRef) -> dict[tuple[str, int], list[Place]]:
        """The ops that read `tensor`, behind Identities, calls and results, by their type and slot."""
        found: dict[tuple[str, int], list[Place]] = {}
        todo, seen = [tensor], {tensor}
        for here in todo:
            for use in self._model.graphs[here.graph].consumers(here):
                op = self._op((use.graph, use.op))
                on = list(self._on(op, use))
                if not on and op.kind not in _PLAIN:
                    found.setdefault((op.type, use.slot), []).append((use.graph, use.op))
                todo.extend(one for one in on if one not in seen)
                seen.update(on)
            if len(todo) > MAX_HOPS:
                return {}
        return found

    def _on(self, op: Op, use: Use) -> Iterator[TensorRef]:
        """Where what `op` reads at `use` is handed on to."""
        graph = self._model.graphs[use.graph]
        if op.kind == "identity":
            yield TensorRef(use.graph, op.name)
        elif op.kind in {"call", "if"}:
            for call in op.calls:
                inputs = self._model.graphs[call.graph].inputs
                position = -1 if call.offset is None else use.slot - call.offset
                if 0 <= position < len(inputs):
                    yield TensorRef(call.graph, inputs[position])
        elif op.kind == "output" and op.name in graph.outputs:
            port = graph.outputs.index(op.name)
            for caller, call in self._callers.get(use.graph, []):
                if not call.loop and port < len(self._op((caller.graph, caller.op)).outputs):
                    yield TensorRef(caller.graph, caller.op, port)

    def _fits(self, copy: Place, live: Place) -> bool:
        """Whether two ops have one type and the same attributes, and one is in a copy, the other in what runs."""
        one, other = self._op(copy), self._op(live)
        if one.type != other.type or one.kind in _PLAIN or one.calls:
            return False
        if copy[0] not in self._in_copies or live[0] in self._in_copies:
            return False
        names = {name for name in (*one.attrs, *other.attrs) if not name.startswith("_")} - _OF_TRAINING
        return all(repr(one.attrs.get(name)) == repr(other.attrs.get(name)) for name in names)

    def _same(self, copy: Place, live: Place) -> bool:
        """Whether two ops read the same variables and the same float constants."""
        if self._key(copy) != self._key(live):
            return False
        slots = [self._model.graphs[name].slots(op) for name, op in (copy, live)]
        return len(slots[0]) == len(slots[1]) and all(map(self._equal, *slots))

    def _equal(self, one: TensorRef | None, other: TensorRef | None) -> bool:
        """Whether two operands, if one is a float constant, have one value."""
        if one is None or other is None or self._model.output(one).dtype not in FLOAT_TYPES:
            return (one is None) == (other is None)
        known = [self._parameters.is_parameter(tensor) for tensor in (one, other)]
        if not any(known) or self.variable(one) is not None:
            return True
        if not all(known):
            return False
        value, copy = self._parameters.value(one), self._parameters.value(other)
        return value is not None and copy is not None and np.array_equal(value, copy)


def _matched(copies: list[Place], live: list[Place]) -> Iterator[tuple[Place, Place]]:
    """The pairs of ops among those of one type that read one value: one of each, or such as have one name."""
    if len(copies) == len(live) == 1:
        yield copies[0], live[0]
        return
    for one in copies:
        same = [other for other in live if other[1] == one[1]]
        if len(same) == 1:
            yield one, same[0]


def _paths(model: Model, starts: Iterable[str]) -> dict[str, str | None]:
    """For each graph that `starts` reach the names of the calls that lead to it; None where these differ."""
    found: dict[str, str | None] = dict.fromkeys(starts, "")
    changes: dict[str, int] = {}
    queue = list(found)
    for name in queue:
        for op in model.graphs[name].ops():
            for call in op.calls:
                path = found[name]
                inner = None if path is None else _join(path, _scope(op, call))
                outer = inner if call.graph not in found else _longer(found[call.graph], inner)
                if call.graph not in found or outer != found[call.graph]:
                    changes[call.graph] = changes.get(call.graph, 0) + 1
                    found[call.graph] = outer if changes[call.graph] <= MAX_CHANGES else None
                    queue.append(call.graph)
    return found


def _scope(op: Op, call: Call) -> str:
    """What a call adds to the path of what it calls; the name that TensorFlow makes up for a plain call says nothing.

    The ops of `model.saved` stand for the caller's own code.
    """
    parts = op.name.split("/")
    if _CALL.match(parts[-1]) or parts[0].startswith("@"):
        parts.pop()
    return "/".join(parts if call.attr == "f" else (*parts, call.attr))


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path and name else path or name


def _longer(one: str | None, other: str | None) -> str | None:
    """The longer of two paths of which one ends in the other, else None."""
    if one is None or other is None or not _meet(one, other):
        return None
    return max(one, other, key=len)


def _meet(one: str, other: str) -> bool:
    """Whether one of two paths ends in the other."""
    return f"/{one}".endswith(f"/{other}") or f"/{other}".endswith(f"/{one}") or not (one and other)
