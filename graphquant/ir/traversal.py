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


def strongly_connected_components(edges: Mapping[Node, Iterable[Node]]) -> Iterator[list[Node]]:
    """Yield the groups of nodes that lead to each other, each group after those that it leads to.

    This is Gabow's path-based algorithm; to import networkx takes longer than to read a small model.
    """
    numbers: dict[Node, int] = {}
    finished: set[Node] = set()
    for root in edges:
        # The nodes without a group yet, the first ones of their possible groups, and the path with the edges to follow.
        members, starts, path = list[Node](), list[Node](), list[tuple[Node, Iterator[Node]]]()
        following: Node | None = None if root in numbers else root
        while path or following is not None:
            if following is not None:
                numbers[following] = len(numbers)
                members.append(following)
                starts.append(following)
                path.append((following, iter(edges[following])))
            node, targets = path[-1]
            following = None
            for target in targets:
                if target not in numbers:
                    following = target
                    break
                while target not in finished and numbers[starts[-1]] > numbers[target]:
                    starts.pop()
            if following is None:
                path.pop()
                if starts[-1] == node:
                    starts.pop()
                    group = [members.pop()]
                    while group[-1] != node:
                        group.append(members.pop())
                    finished.update(group)
                    yield group


def connected_groups(nodes: Iterable[Node], edges: Iterable[tuple[Node, Node]]) -> list[list[Node]]:
    """Group `nodes` that `edges` connect. Groups and their members are in the order of `nodes`."""
    neighbors: dict[Node, list[Node]] = {node: [] for node in nodes}
    for first, second in edges:
        neighbors.setdefault(first, []).append(second)
        neighbors.setdefault(second, []).append(first)
    order, visited = {node: position for position, node in enumerate(neighbors)}, set[Node]()
    groups = []
    for node in neighbors:
        if node not in visited:
            groups.append(sorted(reachable([node], neighbors.__getitem__), key=order.__getitem__))
            visited.update(groups[-1])
    return groups


def unique_name(name: str, *used: Container[str]) -> str:
    """Return `name`, or `name` with the smallest suffix `_1`, `_2`, ... that is in none of `used`."""
    candidate, suffix = name, 0
    while any(candidate in names for names in used):
        suffix += 1
        candidate = f"{name}_{suffix}"
    return candidate
