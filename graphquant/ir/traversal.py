"""Walks over graphs. Each is bounded: a damaged model may hold a ring where a valid one cannot."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)

MAX_HOPS = 256  # default limit of nodes on one path


def follow(start: Node, step: Callable[[Node], Node | None], limit: int = MAX_HOPS) -> Iterator[Node]:
    """Yield `start` and the nodes that `step` leads to one by one, until it returns None or after `limit` steps."""
    current: Node | None = start
    for _ in range(limit + 1):
        if current is None:
            return
        yield current
        current = step(current)


def follow_to_end(start: Node, step: Callable[[Node], Node | None], limit: int = MAX_HOPS) -> Node:
    """Return the last node of `follow`."""
    *_, last = follow(start, step, limit)
    return last


def reachable(starts: Iterable[Node], successors: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Return `starts` and all nodes that `successors` lead to, breadth first, each once."""
    visited = dict.fromkeys(starts)
    queue = list(visited)
    for node in queue:
        new = [successor for successor in dict.fromkeys(successors(node)) if successor not in visited]
        visited.update(dict.fromkeys(new))
        queue += new
    return queue


def connected_groups(nodes: Iterable[Node], edges: Iterable[tuple[Node, Node]]) -> list[list[Node]]:
    """Group `nodes` that `edges` connect. Groups and their members are in the order of `nodes`."""
    import networkx as nx  # imported when needed, so that rule files are read without it

    graph: nx.Graph[Node] = nx.Graph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(edges)
    order = {node: position for position, node in enumerate(graph)}
    return [sorted(group, key=order.__getitem__) for group in nx.connected_components(graph)]


def unique_name(name: str, *used: Container[str]) -> str:
    """Return `name`, or `name` with the smallest suffix `_1`, `_2`, ... that is in none of `used`."""
    candidate, suffix = name, 0
    while any(candidate in names for names in used):
        suffix += 1
        candidate = f"{name}_{suffix}"
    return candidate
