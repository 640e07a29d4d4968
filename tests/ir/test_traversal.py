"""Walks over graphs, which are bounded and visit each node once."""

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphquant.ir import connected_groups, follow, follow_to_end, reachable, unique_name
from graphquant.ir.types import dependency_components


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


def test_dependency_components_are_after_their_dependencies() -> None:
    """Each node of a graph without cycles is a component. The nodes of a cycle are one."""
    assert dependency_components({"a": ["b", "c"], "b": ["c"], "c": []}) == [["c"], ["b"], ["a"]]
    components = dependency_components({"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": [], "e": ["e"], "f": []})
    assert sorted(map(sorted, components)) == [["a"], ["b", "c"], ["d"], ["e"], ["f"]]
    order = [
        member for component in dependency_components({"a": ["b"], "b": ["a", "d"], "d": []}) for member in component
    ]
    assert order[0] == "d"


@given(
    st.integers(1, 12).flatmap(lambda n: st.lists(st.lists(st.integers(0, n - 1), max_size=3), min_size=n, max_size=n))
)
def test_components_are_those_of_networkx(targets: list[list[int]]) -> None:
    """Components partition the nodes as those of networkx do, and none depends on a later one."""
    dependencies = dict(enumerate(targets))
    components = dependency_components(dependencies)
    graph = nx.DiGraph([(node, target) for node, others in dependencies.items() for target in others])
    graph.add_nodes_from(dependencies)
    assert sorted(map(sorted, components)) == sorted(map(sorted, nx.strongly_connected_components(graph)))
    visited: set[int] = set()
    for component in components:
        visited.update(component)
        assert visited.issuperset(target for node in component for target in dependencies[node])


def test_unique_name_uses_the_smallest_suffix_that_no_container_has() -> None:
    """Each container is checked."""
    assert unique_name("x", {"y"}) == "x"
    assert unique_name("x", {"x", "x_1"}, {"x_2"}) == "x_3"
