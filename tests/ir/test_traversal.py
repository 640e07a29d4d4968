"""Walks over graphs, which are bounded and visit each node once."""

import networkx as nx
import pytest

from graphquant.ir import connected_groups, follow, follow_to_end, reachable, strongly_connected_groups, unique_name


def test_follow_ends_at_none() -> None:
    """A walk yields the start and each step."""
    assert list(follow(3, lambda node: node - 1 if node else None)) == [3, 2, 1, 0]
    assert follow_to_end(3, lambda node: node - 1 if node else None) == 0


@pytest.mark.parametrize("limit", [0, 1, 7])
def test_follow_is_bounded(limit: int) -> None:
    """A walk in a ring ends after `limit` steps."""
    walk = list(follow(0, lambda node: (node + 1) % 3, limit))
    assert walk == [step % 3 for step in range(limit + 1)]


def test_reachable_visits_each_node_once_in_breadth_first_order() -> None:
    """Rings and repeated edges do not repeat nodes."""
    successors = {"a": ["b", "c", "b"], "b": ["d"], "c": ["d", "a"], "d": ["a"]}
    assert reachable(["a"], successors.__getitem__) == ["a", "b", "c", "d"]
    assert reachable([], successors.__getitem__) == []


def test_connected_groups_keep_the_order_of_nodes() -> None:
    """Groups begin with their first node, and single nodes are groups."""
    assert connected_groups("edcba", [("a", "e"), ("b", "c")]) == [["e", "a"], ["d"], ["c", "b"]]


@pytest.mark.parametrize("seed", range(5))
def test_strongly_connected_groups_follow_those_they_lead_to(seed: int) -> None:
    """The groups are those of networkx, and each edge between groups leads to an earlier one."""
    graph = nx.gnp_random_graph(30, 0.05, seed=seed, directed=True)
    groups = list(strongly_connected_groups({node: list(graph.adj[node]) for node in graph}))
    assert sorted(map(sorted, groups)) == sorted(map(sorted, nx.strongly_connected_components(graph)))
    positions = {node: position for position, group in enumerate(groups) for node in group}
    assert all(positions[target] <= positions[source] for source, target in graph.edges)


def test_strongly_connected_groups_of_a_long_path() -> None:
    """No recursion limits the length of a path."""
    successors = {node: [node + 1] for node in range(10_000)}
    assert next(iter(strongly_connected_groups(successors))) == [10_000]


def test_unique_name_uses_the_smallest_suffix_that_no_container_has() -> None:
    """Each container is checked."""
    assert unique_name("x", {"y"}) == "x"
    assert unique_name("x", {"x", "x_1"}, {"x_2"}) == "x_3"
