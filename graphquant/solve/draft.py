"""A solution while it is looked for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from graphquant.ir import Parameters, TensorRef, Use
from graphquant.numerics import QParams, from_scale
from graphquant.plans import Plan, Site, Skip
from graphquant.qdq import FAMILIES
from graphquant.solve.types import Change

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.ir import Model
    from graphquant.numerics import Array, Range
    from graphquant.solve.types import Conflict

T = TypeVar("T")

MOST_READERS = 32
"""How many readers a weight may have to be copied for one of them."""


class Draft:
    """Sites, their scales and what is to be said of them, by position.

    Sites are only added behind those of the plan. Once a site has params, its scale only grows; see `raise_scale`.
    """

    def __init__(self, model: Model, plan: Plan) -> None:
        """Nothing is known yet but where the sites are."""
        self.model = model
        self.plan = plan
        self.parameters = Parameters(model)
        self.sites: list[Site] = list(plan.sites)
        self.feeding = {use: index for index, site in enumerate(plan.sites) for use in site.uses}
        self.followed = {site.twin for site in plan.sites if follows(site)}
        self.ranges: dict[int, Range] = {}
        self.params: dict[int, QParams] = {}
        self.skips: dict[int, Skip] = {}
        self.notes: dict[int, list[str]] = {}
        self.changes: list[Change] = []
        self.conflicts: list[Conflict] = []
        self.alike: dict[int, tuple[int, ...]] = {}
        self.explicit: set[Use] = set()
        self._movable: dict[int, bool] = {}
        self._weights: dict[int, bool] = {}
        self._biases: dict[TensorRef, Array | None] = {}

    def note(self, index: int, text: str) -> None:
        """Says something of a site."""
        self.notes.setdefault(index, []).append(text)

    def change(self, index: int, text: str) -> None:
        """Tells of what was done to a site beyond its own range."""
        self.changes.append(Change(tensor=self.sites[index].tensor, says=text))

    def skip(self, index: int, reason: str) -> None:
        """Leaves a site out."""
        site = self.sites[index]
        self.skips[index] = Skip(tensor=site.tensor, uses=site.uses, rule=site.rule, reason=reason)
        self.params.pop(index, None)

    def conflict(self, found: Conflict, *indices: int) -> None:
        """Tells of a conflict, at each of the sites too."""
        self.conflicts.append(found)
        for index in indices:
            self.note(index, str(found))

    def of(self, use: Use | None) -> QParams | None:
        """Scale and zero point at a use; None where it is float."""
        index = None if use is None else self.feeding.get(use)
        return None if index is None else self.params.get(index)

    def group(self, index: int) -> tuple[int, ...]:
        """The sites that share the params of a site, itself among them, in ascending order."""
        return self.alike.get(index, (index,))

    def movable(self, index: int) -> bool:
        """Whether the scale of a site is the solver's to choose."""
        group = self.group(index)
        if group[0] not in self._movable:
            self._movable[group[0]] = all(
                site.scale is None and site.scheme.range == "observed" and site.scheme.observe.name != "fixed-point"
                for site in (self.sites[one] for one in group)
            )
        return self._movable[group[0]]

    def weights_alone(self, index: int) -> bool:
        """Whether only weights have the scale of a site."""
        group = self.group(index)
        if group[0] not in self._weights:
            self._weights[group[0]] = all(self.sites[one].parameter for one in group)
        return self._weights[group[0]]

    def divide(self, index: int, parts: Sequence[Sequence[Use]]) -> list[int]:
        """The positions of the parts of a site's uses, each a site now: it has the first, and copies the others."""
        site = self.sites[index]
        self.sites[index] = replace(site, uses=tuple(parts[0]))
        places = [index]
        for uses in parts[1:]:
            copy = len(self.sites)
            places.append(copy)
            self.sites.append(replace(site, uses=tuple(uses)))
            self.feeding.update(dict.fromkeys(uses, copy))
            if index in self.params:
                self.params[copy] = self.params[index]
            if index in self.ranges:
                self.ranges[copy] = self.ranges[index]
            if index in self.notes:
                self.notes[copy] = list(self.notes[index])
        return places

    def split(self, index: int, use: Use) -> int:
        """The position of a copy of a site for one of its uses, which the site has no longer."""
        others = [one for one in self.sites[index].uses if one != use]
        return self.divide(index, [others, [use]])[1]

    def rejoin(self) -> None:
        """Takes back copies that came to have the scale of what they were copied from, or of a copy before them."""
        if len(self.sites) == len(self.plan.sites):
            return
        order = {use: place for place, use in enumerate(use for site in self.plan.sites for use in site.uses)}
        kept: dict[tuple[object, ...], int] = {}
        sites: list[Site] = []
        places: list[int] = []
        own = len(self.plan.sites)
        for index, site in enumerate(self.sites):
            scale = self.params[index].scale.tobytes() if index in self.params else index
            key = (*(getattr(site, name) for name in ("tensor", "graph", "scheme", "axis", "view", "rule")), scale)
            place = kept.get(key, len(sites)) if index >= own else index
            if place < len(sites):
                uses = sorted((*sites[place].uses, *site.uses), key=order.__getitem__)
                sites[place] = replace(sites[place], uses=tuple(uses))
            else:
                kept[key] = place
                sites.append(site)
            places.append(place)
        self.sites = sites
        self.feeding = {use: place for place, site in enumerate(sites) for use in site.uses}
        _move(self.params, places, own)
        _move(self.ranges, places, own)
        _move(self.notes, places, own)

    def divisible(self, index: int) -> bool:
        """Whether the uses of a site may have scales of their own: those of a weight that nothing else follows.

        One that very many read is raised for all of them, as copies are made one at a time.
        """
        site = self.sites[index]
        alone = len(self.group(index)) == 1 and not site.tie and site.twin is None
        return site.parameter and alone and len(site.uses) <= MOST_READERS and self.followed.isdisjoint(site.uses)

    def raise_scale(self, index: int, scale: Array, why: str) -> None:
        """Gives a site and all that share its params a larger scale, of the same shape, and the reason to each."""
        self.change(index, why)
        old = self.params[index]
        made = from_scale(
            np.maximum(scale, old.scale), old.zero_point, old.type, narrow=old.narrow, axis=old.axis, block=old.block
        )
        made = FAMILIES[self.sites[index].scheme.family or ""].settle(made)
        for one in self.group(index):
            if one in self.params:
                self.params[one] = made
                self.note(one, why)

    def lower_scale(self, index: int, scale: Array) -> None:
        """Gives a site of zeros, which any scale holds, a smaller one."""
        old = self.params[index]
        self.params[index] = from_scale(scale, old.zero_point, old.type, narrow=old.narrow)

    def state(self) -> tuple[object, ...]:
        """What `go_back` needs."""
        notes = {index: list(told) for index, told in self.notes.items()}
        return list(self.sites), dict(self.feeding), dict(self.ranges), dict(self.params), notes, list(self.changes)

    def go_back(self, state: tuple[object, ...]) -> None:
        """Forgets all that was done since `state` was asked for."""
        self.sites, self.feeding, self.ranges, self.params, self.notes, self.changes = state  # type: ignore[assignment]  # as made there

    def bias(self, tensor: TensorRef) -> Array | None:
        """The value of a bias, read once; None where it is not known."""
        if tensor not in self._biases:
            self._biases[tensor] = self.parameters.value(tensor)
        return self._biases[tensor]


def _move(known: dict[int, T], places: Sequence[int], own: int) -> None:
    """Gives what is known of copies its new position; that of a copy that is gone is dropped."""
    for index in range(own, len(places)):
        if index in known and places[index] != index:
            value = known.pop(index)
            if places[index] >= own:
                known.setdefault(places[index], value)


def follows(site: Site) -> bool:
    """Whether the site has its twin's scale; one of its own wins."""
    own = site.scale is not None or site.range is not None or site.scheme.range == "dynamic"
    return site.twin is not None and not own


def from_zero(site: Site) -> bool:
    """Whether the ops count from 0.0 upward: unsigned integers without a zero point."""
    return not FAMILIES[site.scheme.family or ""].zero_points and not site.scheme.type.signed
