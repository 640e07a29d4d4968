"""Twins: what an op of a copy computes, an op of the graphs that run computes too.

A SavedModel holds a computation several times: signatures call one copy of a function, whoever loads the model calls
others. Ops are twins if they have one type, read the same variables in the same slots, and one's path (the names of
the calls that lead to it, and its own) ends in the other's. An op that reads variables no other op of its type reads
needs no path; for the rest there may be only one such op. An op that reads none has a twin only beside ops that do:
functions that call each other and share no variable with what runs are no copies.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from graphquant.ir.graph import Model
    from graphquant.ir.parameter import Parameters
    from graphquant.ir.types import Call, Op, TensorRef

MAX_PARTS: Final = 12
"""How many parts at the end of a path are compared."""

MAX_CHANGES: Final = 4
"""How often the path of a function may grow while its callers are found; one that calls itself has none."""

MAX_LOOK: Final = 4
"""How many ops may stand between a weight and what it is quantized for."""

_CALL: Final = re.compile(r"\A(Stateful)?PartitionedCall(_\d+)?\Z")
_PLAIN: Final = frozenset({"input", "output", "constant", "variable", "identity", "call", "read_variable"})

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
        self._paths = _paths(model, model.saved) if self.copies else {}
        self._by_key: dict[Key, list[tuple[Place, str | None]]] = {}
        self._by_end: dict[tuple[str, str], list[Place]] = {}
        self._by_path: dict[tuple[str, str], list[Place]] = {}
        for name, path in _paths(model, model.entries).items() if self.copies else ():
            self._enter(name, path)
        self._found: dict[Place, Place | None] = {}
        groups = self._groups()
        known = {groups[name] for name in self.copies if self._shares(name)}
        self._sharing = {name for name in self.copies if groups[name] in known}

    def of(self, graph: str, name: str) -> Place | None:
        """The op of the graphs that run that is the twin of op `name` in a copy; None if there is none, or several."""
        place = (graph, name)
        if place not in self._found:
            op = self._model.graphs[graph].op(name)
            self._found[place] = None if op.kind in _PLAIN else self._find(graph, op)
        return self._found[place]

    def _shares(self, graph: str) -> bool:
        """Whether an op of the copy reads variables as one of the graphs that run does."""
        keys = (self._key(graph, op) for op in self._model.graphs[graph].ops() if op.kind not in _PLAIN)
        return any(key[1] and key in self._by_key for key in keys)

    def _groups(self) -> dict[str, str]:
        """For each copy one that stands for all that it calls and is called by."""
        beside: dict[str, list[str]] = {name: [] for name in self.copies}
        for name in self.copies:
            for called in {call.graph: 0 for op in self._model.graphs[name].ops() for call in op.calls}:
                if called in beside:
                    beside[name].append(called)
                    beside[called].append(name)
        found: dict[str, str] = {}
        for start in self.copies:
            queue = [start] if start not in found else []
            for name in queue:
                if name not in found:
                    found[name] = start
                    queue.extend(beside[name])
        return found

    def _enter(self, graph: str, path: str | None) -> None:
        """Notes the ops of a graph that runs."""
        for op in self._model.graphs[graph].ops():
            if op.kind in _PLAIN:
                continue
            place, whole = (graph, op.name), None if path is None else _join(path, op.name)
            key = self._key(graph, op)
            if key[1]:
                self._by_key.setdefault(key, []).append((place, whole))
            elif whole is not None:
                self._by_path.setdefault((op.type, whole), []).append(place)
                for end in _ends(whole):
                    self._by_end.setdefault((op.type, end), []).append(place)

    def _find(self, graph: str, op: Op) -> Place | None:
        path = self._paths[graph]
        whole = None if path is None else _join(path, op.name)
        key = self._key(graph, op)
        if key[1]:
            same = self._by_key.get(key, [])
            if len(same) > 1:
                same = [(place, other) for place, other in same if other and whole and _meet(other, whole)]
            return same[0][0] if len(same) == 1 else None
        if whole is None or graph not in self._sharing:
            return None
        found = self._by_end.get((op.type, whole), [])
        for end in _ends(whole):
            found = found or self._by_path.get((op.type, end), [])
        return found[0] if len(found) == 1 else None

    def _key(self, graph: str, op: Op) -> Key:
        read = []
        for slot, tensor in enumerate(self._model.graphs[graph].slots(op.name)):
            variable = None if tensor is None else self.variable(tensor)
            if variable is not None:
                read.append((slot, variable))
        return op.type, tuple(read)

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


def _ends(path: str) -> Iterator[str]:
    """The path and what is left without its first parts, the longest first."""
    parts = path.split("/")
    yield path
    for start in range(max(1, len(parts) - MAX_PARTS), len(parts)):
        yield "/".join(parts[start:])
