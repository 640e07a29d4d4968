"""Ties: sites that share scale and zero point get the union of their ranges, or what the plan gives one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.numerics import QParams, Range, choose
from graphquant.solve.clips import inside
from graphquant.solve.draft import from_zero
from graphquant.solve.types import Conflict
from graphquant.solve.words import shown, spelled

if TYPE_CHECKING:
    from graphquant.ir import TensorRef
    from graphquant.plans import Site
    from graphquant.solve.draft import Draft

HALF = 0.5
"""Steps by which a range may be left before a fixed one has to give way: rounding reaches as far."""


@dataclass(frozen=True, slots=True)
class _Edge:
    """Why a site is in its group: the rule that ties it to another one, or another one to it."""

    other: int
    rule: str


def share(draft: Draft) -> None:
    """Gives each site with a range its scale; those that are tied get one in common."""
    groups, edges = _groups(draft)
    for members in groups:
        kinds: dict[tuple[object, ...], list[int]] = {}
        for index in members:
            kinds.setdefault(_kind(draft.sites[index], index), []).append(index)
        for alike in kinds.values():
            _share(draft, alike, edges)
            if len(kinds) > 1 and members[0] not in alike:
                _differing(draft, alike, edges, members[0])
    for index in draft.params:
        draft.skips.pop(index, None)


def settle_blocks(draft: Draft, index: int) -> None:
    """Gives a site with a scale for each block these at once, as no tie reaches them, and forgets its range.

    Of all weights together the ranges are half as large as their int8 values.
    """
    _share(draft, [index], {})
    del draft.ranges[index]


def follow_skips(draft: Draft) -> None:
    """Tied sites that no living site leads to, however long the chain or ring of ties, are skipped."""
    tied: dict[int, list[int]] = {}
    queue: list[int] = []
    for index in draft.params:
        site = draft.sites[index]
        if not site.tie or site.scale is not None or site.range is not None:
            queue.append(index)
        for use in site.tie:
            if use in draft.feeding:
                tied.setdefault(draft.feeding[use], []).append(index)
    alive = set(queue)
    for source in queue:
        for index in tied.pop(source, ()):
            if index not in alive:
                alive.add(index)
                queue.append(index)
    for index in [index for index in draft.params if index not in alive]:
        draft.skip(index, "what it is tied to is not quantized")


def _groups(draft: Draft) -> tuple[list[list[int]], dict[int, _Edge]]:
    """Positions of sites that must share scale and zero point, each site in exactly one group, and why it is there."""
    leader = list(range(len(draft.sites)))
    edges: dict[int, _Edge] = {}

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    for index, site in enumerate(draft.sites):
        for use in site.tie:
            if use in draft.feeding:
                fed = draft.feeding[use]
                one, other = sorted((find(index), find(fed)))
                leader[other] = one
                edges[index] = _Edge(fed, site.rule)
                edges.setdefault(fed, _Edge(index, site.rule))
    members: dict[int, list[int]] = {}
    for index in range(len(draft.sites)):
        members.setdefault(find(index), []).append(index)
    return list(members.values()), edges


def _kind(site: Site, index: int) -> tuple[object, ...]:
    """What sites must have in common to share scale and zero point; one per channel shares with none."""
    alone = None if site.axis is None else index
    scheme = site.scheme
    return scheme.type, scheme.zero, scheme.narrow, scheme.scale, scheme.range, from_zero(site), alone


def _share(draft: Draft, members: list[int], edges: dict[int, _Edge]) -> None:
    """Gives sites of one kind of scheme the same scale and zero point."""
    draft.alike.update(dict.fromkeys(members, tuple(members)) if len(members) > 1 else {})
    dictated = [index for index in members if index in draft.params]
    if dictated:
        _dictate(draft, members, dictated[0], edges)
        return
    known = [index for index in members if index in draft.ranges]
    if not known:
        return
    first = draft.sites[known[0]]
    told = _union(draft, known, edges)
    shared = _widened(told, first.scheme.smallest_range)
    if from_zero(first):
        shared = Range(np.zeros_like(shared.low), np.maximum(shared.high, 0.0))
    chosen = choose(
        shared,
        first.scheme.type,
        symmetric=first.scheme.zero == "symmetric" and not from_zero(first),
        narrow=first.scheme.narrow,
        power_of_two=first.scheme.scale == "power-of-two",
        axis=first.axis,
        block=first.scheme.block_size,
    )
    if first.scheme.range == "observed":
        chosen = inside(draft, known, chosen)
    chosen = replace(chosen, given=told if first.scheme.range == "given" else None)
    for index in known:
        draft.params[index] = chosen
        if len(known) > 1:
            other = draft.sites[known[0] if index != known[0] else known[1]].tensor
            draft.note(index, f"shares scale and zero point with {other}{_by(draft, edges.get(index), other)}")
        raised = shared.high > np.maximum(told.high, 0.0)
        if first.scheme.smallest_range is not None and raised.any():
            where = f" in {int(raised.sum())} of {raised.size} channels" if raised.ndim else ""
            draft.note(
                index, f"its range was raised to {first.scheme.smallest_range:g}{where}, the least of its scheme"
            )


def _dictate(draft: Draft, members: list[int], given: int, edges: dict[int, _Edge]) -> None:
    """Gives all members the scale that the plan gives one; others that have their own keep it."""
    source, params = draft.sites[given].tensor, draft.params[given]
    for index in members:
        if index not in draft.params and (index in draft.ranges or draft.sites[index].tie):
            draft.params[index] = params
            draft.note(index, f"shares the scale that the plan gives {source}{_by(draft, edges.get(index), source)}")
        elif index in draft.params and _differ(draft.params[index], params):
            draft.note(index, f"is tied to {source}, for which the plan gives another scale")
            found = Conflict(
                rules=("", edges[index].rule if index in edges else ""),
                tensors=(draft.sites[index].tensor, source),
                wants=(f"the scale {shown(draft.params[index].scale)}", f"{shown(params.scale)} for both"),
                done="each keeps what the plan gives it",
            )
            draft.conflicts.append(found)


def _union(draft: Draft, known: list[int], edges: dict[int, _Edge]) -> Range:
    """The range that holds those of all; or a fixed one, where the others leave it by less than rounding does."""
    shared = draft.ranges[known[0]]
    for index in known[1:]:
        shared = shared.union(draft.ranges[index])
    fixed = next((index for index in known if _is_fixed(draft.sites[index])), None)
    if fixed is None or len(known) == 1 or draft.ranges[fixed] == shared:
        return shared
    own = draft.ranges[fixed]
    low, high = draft.sites[fixed].scheme.type.limits()
    step = (own.high - own.low) / (high - low)
    if (own.low - shared.low <= HALF * step).all() and (shared.high - own.high <= HALF * step).all():
        return own
    far = next(index for index in known if not _within(draft.ranges[index], own))
    edge = edges.get(far)
    found = Conflict(
        rules=(draft.sites[fixed].rule, edge.rule if edge is not None else ""),
        tensors=(draft.sites[fixed].tensor, draft.sites[far].tensor),
        wants=(f"the range {spelled(own)}", f"one scale with it and the range {spelled(draft.ranges[far])}"),
        done=f"all that is tied to them gets {spelled(shared)}",
    )
    draft.conflict(found, fixed, far)
    return shared


def _is_fixed(site: Site) -> bool:
    """Whether a rule or the plan, not data, says its range."""
    return site.range is not None or site.scheme.observe.name == "fixed"


def _within(inner: Range, outer: Range) -> bool:
    return bool((inner.low >= outer.low).all() and (inner.high <= outer.high).all())


def _differing(draft: Draft, alike: list[int], edges: dict[int, _Edge], first: int) -> None:
    """Says of sites whose schemes cannot share a scale with the rest of their group that they keep their own."""
    for index in alike:
        edge = edges.get(index)
        other = draft.sites[first if edge is None else edge.other]
        site = draft.sites[index]
        draft.note(index, f"is tied to {other.tensor}, whose scheme differs, so each has its own scale")
        if edge is not None and _kind(site, 0) != _kind(other, 0):
            draft.conflicts.append(
                Conflict(
                    rules=(other.rule, site.rule),
                    tensors=(other.tensor, site.tensor),
                    wants=(_words(other), f"{_words(site)}, and rule {edge.rule!r} one scale for both"),
                    done="each has its own scale",
                )
            )


def _words(site: Site) -> str:
    scheme = site.scheme
    narrow = ", narrow" if scheme.narrow else ""
    power = ", powers of two" if scheme.scale == "power-of-two" else ""
    return f"{scheme.type.name} {scheme.zero}{narrow}{power} per {scheme.per}"


def _by(draft: Draft, edge: _Edge | None, named: TensorRef) -> str:
    """The rule that ties a site, and to what if that is not `named` already, as the end of a sentence."""
    if edge is None or not edge.rule:
        return ""
    other = draft.sites[edge.other].tensor
    return f", by rule {edge.rule!r}" if other == named else f", as rule {edge.rule!r} ties it to {other}"


def _widened(found: Range, least: float | None) -> Range:
    """`found`, its upper end raised where less than `least` lies between the ends once 0.0 is inside."""
    if least is None:
        return found
    low = np.minimum(found.low, 0.0)
    return Range(low, np.maximum(np.maximum(found.high, 0.0), low + least))


def _differ(one: QParams, other: QParams) -> bool:
    same = np.array_equal(one.scale, other.scale) and np.array_equal(one.zero_point, other.zero_point)
    return not same
