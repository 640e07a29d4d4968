"""Chains of kinds, `conv > batchnorm? > relu`, against the ops that lead to a tensor or from a use."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from graphquant.match.around import PASSES, Around
from graphquant.ruleset import Link, parse_chain

if TYPE_CHECKING:
    from graphquant.ir import TensorRef, Use

links_of = lru_cache(maxsize=1024)(parse_chain)


def chain_up(around: Around, links: tuple[Link, ...], tensor: TensorRef) -> bool:
    """Whether the ops that lead to `tensor` are the chain; every tensor inside it has one reader."""
    if len(links) == 1:
        return around.is_kind(links[0].kinds, tensor)
    literal = _names_passes(links)
    wanted = _after(links, len(links), -1)
    here: TensorRef | None = tensor
    while here is not None and wanted and 0 not in wanted:
        found = {index - 1 for index in wanted if around.is_kind(links[index - 1].kinds, here)}
        wanted = frozenset().union(*(_after(links, index, -1) for index in found))
        here = around.above(here, literal=literal)
    return 0 in wanted


def chain_down(around: Around, links: tuple[Link, ...], use: Use) -> bool:
    """Whether the op of `use` and its sole readers are the chain."""
    graph = around.model.graphs[use.graph]
    literal = _names_passes(links)
    wanted = _after(links, 0, 1)
    here: str | None = use.op
    while here is not None and wanted and len(links) not in wanted:
        kind = graph.op(here).kind
        found = {index + 1 for index in wanted if not links[index].kinds.isdisjoint((kind, "*"))}
        wanted = frozenset().union(*(_after(links, index, 1) for index in found))
        here = around.below(graph, here, literal=literal)
    return len(links) in wanted


def last_links(text: str) -> list[Link]:
    """The links of a chain that its last op may be: the last one, and what it leaves if that is optional."""
    links = links_of(text)
    return [links[index - 1] for index in sorted(_after(links, len(links), -1)) if index]


def _names_passes(links: tuple[Link, ...]) -> bool:
    return any(not link.kinds.isdisjoint(PASSES) for link in links)


def _after(links: tuple[Link, ...], index: int, step: int) -> frozenset[int]:
    """`index`, a place between links, and those that can be reached from it by leaving out optional links."""
    found = {index}
    while 0 <= (link := index if step > 0 else index - 1) < len(links) and links[link].optional:
        index += step
        found.add(index)
    return frozenset(found)
