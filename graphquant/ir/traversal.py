"""Walks over graphs. Each is bounded: a damaged model may hold a ring where a valid one cannot."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
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
    neighbors: dict[Node, list[Node]] = {node: [] for node in nodes}
    for first, second in edges:
        neighbors.setdefault(first, []).append(second)
        neighbors.setdefault(second, []).append(first)
    order = {node: position for position, node in enumerate(neighbors)}
    grouped: set[Node] = set()
    groups = []
    for node in neighbors:
        if node not in grouped:
            group = reachable([node], neighbors.__getitem__)
            grouped.update(group)
            groups.append(sorted(group, key=order.__getitem__))
    return groups


def strongly_connected_groups(successors: Mapping[Node, Iterable[Node]]) -> Iterator[list[Node]]:
    """Yield the strongly connected components of a graph, each after those that its edges lead to.

    Tarjan 1972, "Depth-First Search and Linear Graph Algorithms", without recursion.
    """
    indices: dict[Node, int] = {}
    lowest: dict[Node, int] = {}  # smallest index of a node on the stack that a node is known to reach
    stack: list[Node] = []
    on_stack: set[Node] = set()
    for start in successors:
        path = [] if start in indices else [(start, iter(successors[start]))]
        while path:
            node, remaining = path[-1]
            if node not in indices:
                indices[node] = lowest[node] = len(indices)
                stack.append(node)
                on_stack.add(node)
            for following in remaining:
                if following not in indices:
                    path.append((following, iter(successors.get(following, ()))))
                    break
                if following in on_stack:
                    lowest[node] = min(lowest[node], lowest[following])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[node])
                if lowest[node] == indices[node]:
                    group: list[Node] = []
                    while not group or group[-1] != node:
                        group.append(stack.pop())
                    on_stack.difference_update(group)
                    yield group


def unique_name(name: str, *used: Container[str]) -> str:
    """Return `name`, or `name` with the smallest suffix `_1`, `_2`, ... that is in none of `used`."""
    candidate, suffix = name, 0
    while any(candidate in names for names in used):
        suffix += 1
        candidate = f"{name}_{suffix}"
    return candidate
