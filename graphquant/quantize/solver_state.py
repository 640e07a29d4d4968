"""A solution while it is looked for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from graphquant.ir import Parameters, TensorRef, Use
from graphquant.numerics import QParams, qparams_from_scale
from graphquant.qdq import FAMILIES
from graphquant.quantize.plan import Plan, Site, Skip

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphquant.ir import Model
    from graphquant.numerics import Array, DynamicQParams, Range


# What the solver finds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two rules that cannot both have what they want.

    Attributes:
        rules: Their names; "" for what is no rule's, as the scale that an edited plan gives.
        tensors: What they speak of.
        wants: What each wants of its tensor.
        resolution: What was done.
    """

    rules: tuple[str, str]
    tensors: tuple[TensorRef, TensorRef]
    wants: tuple[str, str]
    resolution: str

    def __str__(self) -> str:
        """One sentence."""
        first, second = (
            f"{f'rule {rule!r}' if rule else 'the plan'} for {tensor} wants {want}"
            for rule, tensor, want in zip(self.rules, self.tensors, self.wants, strict=True)
        )
        return f"{first}, and {second}: {self.resolution}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleChange:
    """What was done to a tensor beyond what its own values ask for.

    Attributes:
        tensor: The tensor.
        message: What was done, and for what.
    """

    tensor: TensorRef
    message: str

    def __str__(self) -> str:
        """One sentence."""
        return f"{self.tensor}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What was found.

    Attributes:
        plan: The plan with what the solver had to add: copies of tensors whose consumers need different scales, and
            pairs before a Relu that cannot be absorbed. The sites that were given keep their positions.
        params: For each site of `plan`, by its position, its scale and zero point.
        skips: Sites that have none, by position, with the reason.
        notes: Sites whose outcome needs a word, by position: what shares a scale, what was raised, what was left out.
        changes: Scales that were raised, copies that were made, pairs that were added.
        conflicts: Where not everything could be had.
        ranges: The range that a site would have by itself, by position; sites that follow others have none.
    """

    plan: Plan
    params: Mapping[int, QParams | DynamicQParams]
    skips: Mapping[int, Skip]
    notes: Mapping[int, tuple[str, ...]]
    changes: tuple[ScaleChange, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    ranges: Mapping[int, Range] = field(default_factory=dict)


T = TypeVar("T")

MAX_COPIED_READERS = 32
"""How many readers a weight may have to be copied for one of them."""


class SolverState:
    """Sites, their scales and what is to be said of them, by position.

    Sites are only added behind those of the plan. Once a site has params, its scale only grows; see `raise_scale`.
    """

    def __init__(self, model: Model, plan: Plan) -> None:
        """Nothing is known yet but where the sites are."""
        self.model = model
        self.plan = plan
        self.parameters = Parameters(model)
        self.sites: list[Site] = list(plan.sites)
        self.index_by_use = {use: index for index, site in enumerate(plan.sites) for use in site.uses}
        self.followed_uses = {site.clone_of for site in plan.sites if takes_original_scale(site)}
        self.ranges: dict[int, Range] = {}
        self.params: dict[int, QParams] = {}
        self.skips: dict[int, Skip] = {}
        self.notes: dict[int, list[str]] = {}
        self.changes: list[ScaleChange] = []
        self.conflicts: list[Conflict] = []
        self.shared_groups: dict[int, tuple[int, ...]] = {}
        self.explicit_uses: set[Use] = set()
        self._movable: dict[int, bool] = {}
        self._weight_groups: dict[int, bool] = {}
        self._bias_values: dict[TensorRef, Array | None] = {}

    def add_note(self, index: int, text: str) -> None:
        """Says something of a site."""
        self.notes.setdefault(index, []).append(text)

    def record_change(self, index: int, text: str) -> None:
        """Tells of what was done to a site beyond its own range."""
        self.changes.append(ScaleChange(tensor=self.sites[index].tensor, message=text))

    def skip_site(self, index: int, reason: str) -> None:
        """Leaves a site out."""
        site = self.sites[index]
        self.skips[index] = Skip(tensor=site.tensor, uses=site.uses, rule=site.rule, reason=reason)
        self.params.pop(index, None)

    def record_conflict(self, conflict: Conflict, *indices: int) -> None:
        """Tells of a conflict, at each of the sites too."""
        self.conflicts.append(conflict)
        for index in indices:
            self.add_note(index, str(conflict))

    def params_at(self, use: Use | None) -> QParams | None:
        """Scale and zero point at a use; None where it is float."""
        index = None if use is None else self.index_by_use.get(use)
        return None if index is None else self.params.get(index)

    def scale_group(self, index: int) -> tuple[int, ...]:
        """The sites that share the params of a site, itself among them, in ascending order."""
        return self.shared_groups.get(index, (index,))

    def is_movable(self, index: int) -> bool:
        """Whether the scale of a site is the solver's to choose."""
        group = self.scale_group(index)
        if group[0] not in self._movable:
            self._movable[group[0]] = all(
                site.scale is None and site.scheme.range == "observed" and site.scheme.observe.name != "fixed-point"
                for site in (self.sites[member] for member in group)
            )
        return self._movable[group[0]]

    def is_weight_group(self, index: int) -> bool:
        """Whether only weights have the scale of a site."""
        group = self.scale_group(index)
        if group[0] not in self._weight_groups:
            self._weight_groups[group[0]] = all(self.sites[member].parameter for member in group)
        return self._weight_groups[group[0]]

    def divide_site(self, index: int, use_groups: Sequence[Sequence[Use]]) -> list[int]:
        """The positions of the parts of a site's uses, each a site now: it has the first, and copies the others."""
        site = self.sites[index]
        self.sites[index] = replace(site, uses=tuple(use_groups[0]))
        positions = [index]
        for uses in use_groups[1:]:
            copy_index = len(self.sites)
            positions.append(copy_index)
            self.sites.append(replace(site, uses=tuple(uses)))
            self.index_by_use.update(dict.fromkeys(uses, copy_index))
            if index in self.params:
                self.params[copy_index] = self.params[index]
            if index in self.ranges:
                self.ranges[copy_index] = self.ranges[index]
            if index in self.notes:
                self.notes[copy_index] = list(self.notes[index])
        return positions

    def split_use(self, index: int, use: Use) -> int:
        """The position of a copy of a site for one of its uses, which the site has no longer."""
        remaining_uses = [site_use for site_use in self.sites[index].uses if site_use != use]
        return self.divide_site(index, [remaining_uses, [use]])[1]

    def merge_equal_copies(self) -> None:
        """Takes back copies that came to have the scale of what they were copied from, or of a copy before them."""
        if len(self.sites) == len(self.plan.sites):
            return
        order = {use: position for position, use in enumerate(use for site in self.plan.sites for use in site.uses)}
        merged_positions: dict[tuple[object, ...], int] = {}
        sites: list[Site] = []
        positions: list[int] = []
        planned_count = len(self.plan.sites)
        for index, site in enumerate(self.sites):
            scale = self.params[index].scale.tobytes() if index in self.params else index
            key = (*(getattr(site, name) for name in ("tensor", "graph", "scheme", "axis", "view", "rule")), scale)
            position = merged_positions.get(key, len(sites)) if index >= planned_count else index
            if position < len(sites):
                uses = sorted((*sites[position].uses, *site.uses), key=order.__getitem__)
                sites[position] = replace(sites[position], uses=tuple(uses))
            else:
                merged_positions[key] = position
                sites.append(site)
            positions.append(position)
        self.sites = sites
        self.index_by_use = {use: position for position, site in enumerate(sites) for use in site.uses}
        _move_to_merged(self.params, positions, planned_count)
        _move_to_merged(self.ranges, positions, planned_count)
        _move_to_merged(self.notes, positions, planned_count)

    def is_divisible(self, index: int) -> bool:
        """Whether the uses of a site may have scales of their own: those of a weight that nothing else follows.

        One that very many read is raised for all of them, as copies are made one at a time.
        """
        site = self.sites[index]
        is_independent = len(self.scale_group(index)) == 1 and not site.tie and site.clone_of is None
        return (
            site.parameter
            and is_independent
            and len(site.uses) <= MAX_COPIED_READERS
            and self.followed_uses.isdisjoint(site.uses)
        )

    def raise_scale(self, index: int, scale: Array, why: str) -> None:
        """Gives a site and all that share its params a larger scale, of the same shape, and the reason to each."""
        self.record_change(index, why)
        old = self.params[index]
        raised = qparams_from_scale(
            np.maximum(scale, old.scale), old.zero_point, old.type, narrow=old.narrow, axis=old.axis, block=old.block
        )
        raised = FAMILIES[self.sites[index].scheme.family or ""].effective_params(raised)
        for member in self.scale_group(index):
            if member in self.params:
                self.params[member] = raised
                self.add_note(member, why)

    def lower_scale(self, index: int, scale: Array) -> None:
        """Gives a site of zeros, which any scale holds, a smaller one."""
        old = self.params[index]
        self.params[index] = qparams_from_scale(scale, old.zero_point, old.type, narrow=old.narrow)

    def snapshot(self) -> tuple[object, ...]:
        """What `restore` needs."""
        notes = {index: list(texts) for index, texts in self.notes.items()}
        return (
            list(self.sites),
            dict(self.index_by_use),
            dict(self.ranges),
            dict(self.params),
            notes,
            list(self.changes),
        )

    def restore(self, snapshot: tuple[object, ...]) -> None:
        """Forgets all that was done since `snapshot` was asked for."""
        self.sites, self.index_by_use, self.ranges, self.params, self.notes, self.changes = snapshot  # type: ignore[assignment]  # as made there

    def bias_value(self, tensor: TensorRef) -> Array | None:
        """The value of a bias, read once; None where it is not known."""
        if tensor not in self._bias_values:
            self._bias_values[tensor] = self.parameters.value(tensor)
        return self._bias_values[tensor]


def _move_to_merged(values_by_index: dict[int, T], positions: Sequence[int], planned_count: int) -> None:
    """Gives what is known of copies its new position; that of a copy that is gone is dropped."""
    for index in range(planned_count, len(positions)):
        if index in values_by_index and positions[index] != index:
            value = values_by_index.pop(index)
            if positions[index] >= planned_count:
                values_by_index.setdefault(positions[index], value)


def takes_original_scale(site: Site) -> bool:
    """Whether the site has its twin's scale; one of its own wins."""
    has_own_scale = site.scale is not None or site.range is not None or site.scheme.range == "dynamic"
    return site.clone_of is not None and not has_own_scale


def starts_at_zero(site: Site) -> bool:
    """Whether the ops count from 0.0 upward: unsigned integers without a zero point."""
    return not FAMILIES[site.scheme.family or ""].has_zero_points and not site.scheme.type.signed


# Numbers in the sentences of the solver.


def format_values(values: Array) -> str:
    """A number, or the smallest and the largest of several."""
    low, high = float(np.min(values)), float(np.max(values))
    return f"{low:.6g}" if low == high else f"{low:.4g}..{high:.4g}"


def format_range(value_range: Range) -> str:
    """A range; of several the one that holds them."""
    return f"[{float(np.min(value_range.low)):.6g}, {float(np.max(value_range.high)):.6g}]"
