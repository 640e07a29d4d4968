"""Ops and tensors by regular expression, by scope, and by who makes or reads what."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from graphquant.errors import UsageError, did_you_mean
from graphquant.graph_editor.views import Operation, Tensor, homes, list_of_op, list_of_t, operations, tensors
from graphquant.ir import Graph, Model, TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T", Operation, Tensor)


def select_ops(
    *args: object, graph: Graph | Model | None = None, positive_filter: Callable[[Operation], bool] | None = None
) -> list[Operation]:
    r"""The ops that any of `args` names, each once.

    Args:
        args: Regular expressions, found anywhere in an op's name (`"^block1/"` is what stands under that scope), or
            ops, iterables of ops, a graph. Tensors are ignored. A graph output is found only by an expression with `@`,
            with which its name starts.
        graph: Where the expressions look: a graph, or a model with all graphs that run. An op of a nested graph is
            found by its own name and by `graph/op`.
        positive_filter: Keeps only the ops for which it is true.

    Raises:
        UsageError: There is an expression and no `graph`, it is no regular expression, or something is no op.
    """
    found: dict[Operation, None] = {}
    for arg in args:
        if isinstance(arg, str | re.Pattern):
            wanted, where = _regex(arg), _where(graph)
            ops = (op for op in operations(where) if op.kind != "output" or "@" in wanted.pattern)
            found.update((op, None) for op in ops if wanted.search(op.name) or wanted.search(str(op)))
        else:
            found.update(dict.fromkeys(list_of_op(arg, ignore_ts=True)))
    return _kept(found, positive_filter)


def select_ts(
    *args: object, graph: Graph | Model | None = None, positive_filter: Callable[[Tensor], bool] | None = None
) -> list[Tensor]:
    r"""The tensors that any of `args` names, each once.

    Args:
        args: Regular expressions, found anywhere in a tensor's name (`r"^block1/.*:0$"`), or tensors, iterables of
            tensors, a graph. Ops are ignored.
        graph: Where the expressions look: a graph, or a model with all graphs that run. A tensor is found by
            `op:port`, by `graph/op:port`, and by its name in the file.
        positive_filter: Keeps only the tensors for which it is true.

    Raises:
        UsageError: There is an expression and no `graph`, it is no regular expression, or something is no tensor.
    """
    found: dict[Tensor, None] = {}
    for arg in args:
        if isinstance(arg, str | re.Pattern):
            wanted, where = _regex(arg), _where(graph)
            found.update((one, None) for one in tensors(where) if any(map(wanted.search, _names(one))))
        else:
            found.update(dict.fromkeys(list_of_t(arg, ignore_ops=True)))
    return _kept(found, positive_filter)


def get_name_scope_ops(ops: object, scope: str) -> list[Operation]:
    """Those of `ops` (ops, a graph or a model) that are called `scope` or stand under it."""
    prefix = scope.rstrip("/")
    return [op for op in list_of_op(ops) if op.name == prefix or op.name.startswith(f"{prefix}/")]


def get_generating_ops(ts: object) -> list[Operation]:
    """The op that makes each tensor of `ts`, in that order."""
    return [tensor.op for tensor in list_of_t(ts)]


def get_consuming_ops(ts: object) -> list[Operation]:
    """The ops that read a tensor of `ts`, each once; graph outputs (`@name`) are among them."""
    return list(dict.fromkeys(op for tensor in list_of_t(ts) for op in tensor.consumers()))


def get_tensor_by_name(graph: Graph | Model, name: str) -> Tensor:
    """The one tensor that is called `name`: its name in the file, `op:port`, `graph/op:port`, or `op` for port 0.

    Raises:
        UsageError: There is none, or there are several.
    """
    found = find(graph, name)
    if len(found) > 1:
        listed = ", ".join(repr(str(one)) for one in found[:5])
        raise UsageError(f"{len(found)} tensors are called {name!r}. Say which of them: {listed}.")
    return found[0]


def find(graph: Graph | Model, name: str) -> list[Tensor]:
    """Every tensor called `name`, more than one where copies of a function hold it.

    The file's own name goes before `op:port`, and that before the name of an op.

    Raises:
        UsageError: There is none; the closest names are told.
    """
    by_file, by_port, by_op = list[Tensor](), list[Tensor](), list[Tensor]()
    for home in homes(graph):
        for op in home.ops():
            ports = (port for port, output in enumerate(op.outputs) if output.name == name)
            by_file += [Tensor(home, TensorRef(home.name, op.name, port)) for port in ports]
        for label in dict.fromkeys((name, name.removeprefix(f"{home.name}/"))):
            op_name, _, number = label.rpartition(":")
            made = home.op(op_name).outputs if op_name in home else ()
            by_port += [
                Tensor(home, TensorRef(home.name, op_name, port)) for port in range(len(made)) if str(port) == number
            ]
            if label in home and home.op(label).outputs:
                by_op.append(Tensor(home, TensorRef(home.name, label)))
    found = by_file or by_port or by_op
    if not found:
        known = dict.fromkeys(label for one in tensors(graph) for label in _names(one))
        close = did_you_mean(name, known) or " graph_editor.select_ts('', graph=model) lists them all."
        raise UsageError(f"The model has no tensor {name!r}.{close}")
    return found


def _names(tensor: Tensor) -> tuple[str, ...]:
    return (tensor.name, str(tensor), tensor.op.node.outputs[tensor.ref.port].name)


def _kept(found: Iterable[T], positive_filter: Callable[[T], bool] | None) -> list[T]:
    return [one for one in found if positive_filter is None or positive_filter(one)]


def _where(graph: Graph | Model | None) -> Graph | Model:
    if graph is None:
        raise UsageError("A regular expression needs a graph to look in. Give graph=model.")
    return graph


def _regex(given: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        return re.compile(given)
    except re.error as error:
        raise UsageError(f"{given!r} is no regular expression: {error}. Escape what stands for itself.") from error
