"""A solution while it is looked for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.ir import Parameters, TensorRef, Use
from graphquant.numerics import QParams, from_scale
from graphquant.plans import Plan, Site, Skip
from graphquant.qdq import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphquant.ir import Model
    from graphquant.numerics import Array, Range
    from graphquant.solve.types import Conflict


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
        self.conflicts: list[Conflict] = []
        self.alike: dict[int, tuple[int, ...]] = {}
        self.explicit: set[Use] = set()
        self._movable: dict[int, bool] = {}
        self._weights: dict[int, bool] = {}
        self._biases: dict[TensorRef, Array | None] = {}

    def note(self, index: int, text: str) -> None:
        """Says something of a site."""
        self.notes.setdefault(index, []).append(text)

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

    def split(self, index: int, uses: Iterable[Use]) -> int:
        """The position of a copy of a site, for some of its uses, which the site has no longer."""
        site, moved = self.sites[index], tuple(uses)
        copy = len(self.sites)
        self.sites[index] = replace(site, uses=tuple(use for use in site.uses if use not in set(moved)))
        self.sites.append(replace(site, uses=moved))
        self.feeding.update(dict.fromkeys(moved, copy))
        if index in self.params:
            self.params[copy] = self.params[index]
        if index in self.ranges:
            self.ranges[copy] = self.ranges[index]
        if index in self.notes:
            self.notes[copy] = list(self.notes[index])
        return copy

    def divisible(self, index: int) -> bool:
        """Whether the uses of a site may have scales of their own: those of a weight that nothing else follows."""
        site = self.sites[index]
        alone = len(self.group(index)) == 1 and not site.tie and site.twin is None
        return site.parameter and alone and self.followed.isdisjoint(site.uses)

    def raise_scale(self, index: int, scale: Array, why: str) -> None:
        """Gives a site and all that share its params a larger scale, of the same shape, and the reason to each."""
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
        return list(self.sites), dict(self.feeding), dict(self.ranges), dict(self.params), notes

    def go_back(self, state: tuple[object, ...]) -> None:
        """Forgets all that was done since `state` was asked for."""
        self.sites, self.feeding, self.ranges, self.params, self.notes = state  # type: ignore[assignment]  # as made there

    def bias(self, tensor: TensorRef) -> Array | None:
        """The value of a bias, read once; None where it is not known."""
        if tensor not in self._biases:
            self._biases[tensor] = self.parameters.value(tensor)
        return self._biases[tensor]


def follows(site: Site) -> bool:
    """Whether the site has its twin's scale; one of its own wins."""
    own = site.scale is not None or site.range is not None or site.scheme.range == "dynamic"
    return site.twin is not None and not own


def from_zero(site: Site) -> bool:
    """Whether the ops count from 0.0 upward: unsigned integers without a zero point."""
    return not FAMILIES[site.scheme.family or ""].zero_points and not site.scheme.type.signed
