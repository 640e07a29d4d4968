"""What a preparation is made of: what it did, what it left, and the edits that several of them make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict

from graphquant.ir import TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from graphquant.ir import Graph, Model
    from graphquant.prepare.undo import Edits


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One preparation that was done before matching.

    Attributes:
        step: Its name, "fold-batchnorm".
        target: The op, input or model it changed.
        detail: What was done, for people.
        why: What it is good for.
        undo: What is needed to take it back, as JSON data; see `graphquant.prepare.undo`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    step: str
    target: str
    detail: str
    why: str = ""
    undo: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """An op that a preparation is for and that was left as it was.

    Attributes:
        step: The preparation's name.
        tensor: What the op makes.
        reason: Why it was left, and what else can be done.
    """

    step: str
    tensor: TensorRef
    reason: str


def drop_unread(
    model: Model,
    tensors: Iterable[TensorRef],
    kinds: frozenset[str] | None = None,
    edits: Edits | None = None,
) -> None:
    """Takes out constants, and what was computed from them alone, that nothing reads or waits for any more.

    An argument that an ONNX function reads no more is left out of its calls.

    Args:
        model: The model, which is changed.
        tensors: Parameters that may have lost their last reader.
        kinds: If given, only ops of these kinds are taken out.
        edits: Keeps the record of what is done.
    """
    todo = list(dict.fromkeys(tensors))
    callers = model.callers() if any(tensor.graph for tensor in todo) and model.format == "onnx" else {}
    while todo:
        tensor = todo.pop()
        graph = model.graphs[tensor.graph]
        if tensor.op not in graph or graph.nx.adj[tensor.op]:
            continue
        op = graph.op(tensor.op)
        if op.kind == "input" and (kinds is None or op.kind in kinds) and graph.name and graph.parent is None:
            calls = [use for use, _ in callers.get(graph.name, ())]
            todo.extend(_leave_out(model, calls, graph.inputs.index(op.name), edits))
        if op.kind in {"input", "output"} or op.calls or (kinds is not None and op.kind not in kinds):
            continue
        todo.extend(read for read in graph.slots(tensor.op) if read is not None)
        if edits is None:
            graph.remove(tensor.op)
        else:
            edits.remove(graph, tensor.op)


def _leave_out(model: Model, calls: Iterable[Use], slot: int, edits: Edits | None) -> Iterator[TensorRef]:
    """Empties a slot of the ops that call a function; gives what they read there."""
    for graph, name, _ in calls:
        use = Use(graph, name, slot)
        read = model.graphs[graph].producer(use)
        if read is not None:
            if edits is None:
                model.graphs[graph].connect(use, None)
            else:
                edits.connect(use, None)
            yield read


def makes_output(graph: Graph, name: str) -> bool:
    """Whether an output of a graph reads the op's first output."""
    uses = graph.readers(name).get(0, [])
    return any(graph.graphs[use.graph].op(use.op).kind == "output" for use in uses)
