"""A copy of a model that keeps the values of tensors inside functions and TF1 frames in queues.

Such a tensor cannot be fetched: a function's body has no tensors of the main graph, and one in a frame has none or
several values. Each gets a queue of its own and an Identity that all its consumers read instead, which waits until the
value is in the queue:

    x -> Identity(^enqueue) -> consumers,    enqueue = QueueEnqueueV2(FIFOQueueV2(^x), x)

The queue's op waits for the tensor's producer so that it runs in the producer's frame, in each round of a loop; its
`shared_name` makes all of them one queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from graphquant.ir import DataType, Graph, Model, Op, Output, TensorRef, bulk

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["instrument", "queue_name", "unfetchable"]

_PREFIX: Final = "graphquant_observe"
_STARTS: Final = frozenset({"enter", "switch"})


def queue_name(index: int) -> str:
    """The `shared_name` of queue `index`."""
    return f"{_PREFIX}_{index}"


def unfetchable(graph: Graph) -> set[str]:
    """The ops of the main graph that may run never or more than once in a run: all that follows an Enter or Switch."""
    found = {op.name for op in graph.ops() if op.kind in _STARTS}
    todo = list(found)
    while todo:
        for reader in graph.nx.adj[todo.pop()]:
            if reader not in found:
                found.add(reader)
                todo.append(reader)
    return found


def instrument(model: Model, tensors: Iterable[TensorRef], sized: Collection[TensorRef] = ()) -> Model:
    """A copy of `model` in which the value of the tensor at position i is put in queue i each time it is computed.

    For those in `sized` the number of its elements is put there instead, as int64.
    """
    copy = model.copy()
    with bulk():
        for index, tensor in enumerate(tensors):
            _observe(copy.graphs[tensor.graph], index, tensor, sizes=tensor in sized)
    return copy


def _observe(graph: Graph, index: int, tensor: TensorRef, *, sizes: bool) -> None:
    known = graph.op(tensor.op).outputs[tensor.port]
    kind = graph.op(tensor.op).kind
    source = graph.slots(tensor.op)[0] if kind == "next_iteration" else None
    # Between NextIteration and Merge nothing may stand; its input has the same value.
    tensor = tensor if source is None else source
    uses = graph.consumers(tensor)
    type_ = DataType(known.dtype or "float32")
    name, shown, types = f"{_PREFIX}/{index}", tensor, [type_]
    if sizes:
        types = [DataType("int64")]
        counted = _op(graph, f"{name}/size", "Size", {"T": type_, "out_type": types[0]}, Output("", "int64", ()))
        shown = graph.add(counted, [tensor])
    queue = graph.add(
        _op(graph, f"{name}/queue", "FIFOQueueV2", {"component_types": types, "shared_name": queue_name(index)}),
        after=[tensor.op],
    )
    put = graph.add(_op(graph, f"{name}/enqueue", "QueueEnqueueV2", {"Tcomponents": types}), [queue, shown])
    same = _op(graph, f"{name}/value", "Identity", {"T": type_}, Output("", known.dtype, known.shape))
    seen = graph.add(same, [tensor], after=[put.op])
    graph.reroute(tensor, uses, seen)


def _op(graph: Graph, name: str, type_: str, attrs: dict[str, object], output: Output | None = None) -> Op:
    return Op(
        name=graph.fresh(name), kind="stateful", type=type_, attrs=attrs, outputs=(output or Output("", "resource"),)
    )
