"""Which ops multiply on which sites of a plan, and what it costs to run these in float."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant.accuracy.ways import FLOAT, HIGH, OWN, Way
from graphquant.ir import Parameters, TensorRef, Use
from graphquant.multiply_adds import COUNTED, multiply_adds
from graphquant.survey import HANDED_ON

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Mapping, Sequence

    from graphquant.ir import Model
    from graphquant.plans import Plan

    Place = tuple[str, str]

THROUGH = frozenset({"reshape", "identity", "transpose", "squeeze", "unsqueeze"})
"""Kinds between a site and an op that multiplies on it."""

BEHIND = THROUGH | {"bias_add", "batchnorm", "relu", "relu6", "clip", "leaky_relu", "hard_swish"}
"""Kinds between an op that multiplies and the site behind it."""

HOPS = 6
"""How many of these are looked through."""

LITTLE = 1e-6
"""The cost of leaving a group float that no op multiplies on, as a share of all: they are not left without need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sites that are quantized together or not at all, since they share a scale.

    Attributes:
        sites: Their positions in the plan.
        ops: The ops that multiply on them, or make them: while one of these is quantized, so are they.
        ways: How they may be quantized; the first is what the rules want, and high ones come last.
    """

    sites: tuple[int, ...]
    ops: frozenset[Place]
    ways: tuple[Way, ...]


def groups(
    model: Model,
    plan: Plan,
    taken: Collection[int],
    errors: Mapping[int, Mapping[str, float]],
    fixed: Collection[int] = (),
) -> list[Group]:
    """The sites `taken` of a plan in groups, in their order.

    Args:
        model: The prepared model.
        plan: The plan.
        taken: Positions of the sites that are quantized.
        errors: What each adds alone, by position, in each way that it has; those not known add nothing.
        fixed: Positions of sites that stay as they are.
    """
    owner = {use: index for index in taken for use in plan.sites[index].uses}
    needed = _needed(model, plan, taken, owner)
    return [
        Group(
            sites=tuple(sites),
            ops=frozenset(op for index in sites for op in needed[index]),
            ways=_ways([errors.get(index, {}) for index in sites])[: 1 if set(sites) & set(fixed) else None],
        )
        for sites in bound(plan, taken)
    ]


def bound(plan: Plan, taken: Collection[int]) -> list[list[int]]:
    """The sites `taken` of a plan, those together that must have one scale."""
    root = {index: index for index in taken}

    def find(index: int) -> int:
        while root[index] != index:
            root[index] = root[root[index]]
            index = root[index]
        return index

    owner = {use: index for index in root for use in plan.sites[index].uses}
    for index in root:
        site = plan.sites[index]
        for use in (*site.tie, *((site.twin,) if site.twin is not None else ())):
            if use in owner:
                one, other = sorted((find(index), find(owner[use])))
                root[other] = one
    members: dict[int, list[int]] = {}
    for index in sorted(root):
        members.setdefault(find(index), []).append(index)
    return list(members.values())


def _ways(errors: Sequence[Mapping[str, float]]) -> tuple[Way, ...]:
    """The ways of sites that share a scale; where only some have one, the others stay as they are."""
    names = dict.fromkeys(name for one in errors for name in one if name != OWN)
    found = [Way(name=OWN, error=sum(one.get(OWN, 0.0) for one in errors))]
    for name in names:
        error = sum(one.get(name, one.get(OWN, 0.0)) for one in errors)
        found.append(Way(name=name, error=error, high=name in HIGH))
    found.append(Way(name=FLOAT, error=0.0, high=True))
    return tuple(sorted(found, key=lambda way: way.high))


def _needed(model: Model, plan: Plan, taken: Collection[int], owner: Mapping[Use, int]) -> dict[int, set[Place]]:
    """For each site the ops that multiply on it or make it."""
    found: dict[int, set[Place]] = {index: set() for index in taken}
    live = dict.fromkeys(model.live())  # a SavedModel keeps copies of functions that nothing here calls
    for name in live:
        graph = model.graphs[name]
        for op in graph.ops():
            if op.kind in COUNTED:
                for slot in range(len(graph.slots(op.name))):
                    index = site_read(model, Use(name, op.name, slot), owner, HANDED_ON)
                    if index is not None:
                        found[index].add((name, op.name))
    for index in taken:
        made = _maker(model, plan.sites[index].tensor)
        if made is not None and made[0] in live:
            found[index].add(made)
    return found


def site_read(model: Model, use: Use, owner: Mapping[Use, int], through: Container[str] = THROUGH) -> int | None:
    """The site that `use` reads, through ops of these kinds."""
    for _ in range(HOPS):
        tensor = model.graphs[use.graph].producer(use)
        if use in owner or tensor is None or model.op(tensor).kind not in through:
            break
        use = Use(tensor.graph, tensor.op, model.op(tensor).main)
    return owner.get(use)


def _maker(model: Model, tensor: TensorRef) -> Place | None:
    """The op that multiplies and whose result, but for a bias and what limits it, `tensor` is."""
    here: TensorRef | None = tensor
    for _ in range(HOPS):
        if here is None:
            break
        op = model.op(here)
        if op.kind in COUNTED:
            return here.graph, here.op
        if op.kind not in BEHIND:
            break
        here = model.graphs[here.graph].producer(Use(here.graph, here.op, 0))
    return None


def in_multiply_adds(model: Model, sizes: Mapping[TensorRef, int]) -> dict[Place, float]:
    """The cost of each op that multiplies: its multiply-adds; one of unknown size costs as much as the dearest."""
    known = {place: float(count) for place, count in multiply_adds(model, sizes).items()}
    return _completed(model, known)


def in_bytes(model: Model) -> dict[Place, float]:
    """The cost of each op that multiplies: what its weights take more in float than in 8 bits."""
    parameters = Parameters(model)
    known: dict[Place, float] = {}
    for name in model.live():
        graph = model.graphs[name]
        for op in graph.ops():
            held = [tensor for tensor in graph.slots(op.name) if tensor is not None and parameters.is_parameter(tensor)]
            if op.kind in COUNTED:
                known[name, op.name] = float(sum(_size(model, tensor) for tensor in held) * 3)
    return known


def _size(model: Model, tensor: TensorRef) -> int:
    shape: Sequence[int | None] | None = model.output(tensor).shape
    return math.prod(size or 1 for size in shape or ())


def _completed(model: Model, known: dict[Place, float]) -> dict[Place, float]:
    dearest = max(known.values(), default=1.0)
    every = [(name, op.name) for name in model.live() for op in model.graphs[name].ops() if op.kind in COUNTED]
    return {place: known.get(place, dearest) for place in every}


__all__ = ["LITTLE", "Group", "bound", "groups", "in_bytes", "in_multiply_adds"]
