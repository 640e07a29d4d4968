"""Mutable state of the scale solver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.ir import FLOAT_TYPES, Model, Parameters, TensorRef, Use
from graphquant.quantize.plan import Plan, Site, Skip, SkipCode

if TYPE_CHECKING:
    from graphquant.numerics import Array, DynamicQParams, QParams, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two rules whose requirements contradict each other."""

    rules: tuple[str, str]  # their names, "" for a requirement of the plan itself, such as an edited scale
    tensors: tuple[TensorRef, TensorRef]  # the tensors concerned
    wants: tuple[str, str]  # the requirement of each on its tensor
    resolution: str  # the outcome

    def __str__(self) -> str:
        """Return one sentence."""
        first, second = (
            f"{f'rule {rule!r}' if rule else 'the plan'} for {tensor} requires {want}"
            for rule, tensor, want in zip(self.rules, self.tensors, self.wants, strict=True)
        )
        return f"{first}, and {second}: {self.resolution}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleChange:
    """A change of a tensor's quantization that its own values do not call for."""

    tensor: TensorRef  # the tensor
    message: str  # the change and its reason

    def __str__(self) -> str:
        """Return one sentence."""
        return f"{self.tensor}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Scales and zero points for a plan."""

    # The plan with the solver's additions: copies of tensors whose consumers need different scales, and pairs before a
    # Relu that cannot be fused. The given sites keep their positions.
    plan: Plan
    params: Mapping[int, QParams | DynamicQParams]  # scale and zero point for each site of `plan`, by position
    skips: Mapping[int, Skip]  # sites without params, by position, with the reason
    notes: Mapping[int, tuple[str, ...]]  # remarks on sites, by position: shared scales, raised scales, ignored values
    changes: tuple[ScaleChange, ...] = ()  # raised scales, copies and added pairs
    conflicts: tuple[Conflict, ...] = ()  # requirements that could not all be met
    # The range of each site by itself, by position; sites that follow others have none.
    ranges: Mapping[int, Range]
    saturated: frozenset[int] = frozenset()  # sites, by position, whose range ends where their readers saturate


MAX_COPIED_READERS = 32  # most readers of a weight that is copied for one of them
SNAPSHOT_FIELDS = ("sites", "index_by_use", "ranges", "params", "notes", "changes")


class SolverState:
    """Sites, scales and notes by site index.

    Sites are only appended after those of the plan. Once a site has params, its scale only grows; see `raise_scale`.
    """

    def __init__(self, model: Model, plan: Plan) -> None:
        """Start with the sites of the plan and no ranges or scales."""
        self.model = model
        self.plan = plan
        self.parameters = Parameters(model)
        self.sites: list[Site] = list(plan.sites)
        self.index_by_use = {use: index for index, site in enumerate(plan.sites) for use in site.uses}
        self.followed_uses = {site.clone_of for site in plan.sites if takes_original_scale(site)}
        self.ranges: dict[int, Range] = {}
        self.params: dict[int, QParams] = {}
        self.skips: dict[int, Skip] = {}
        self.notes: dict[int, tuple[str, ...]] = {}
        self.saturated: set[int] = set()
        self.changes: list[ScaleChange] = []
        self.conflicts: list[Conflict] = []
        self.shared_groups: dict[int, tuple[int, ...]] = {}
        self.explicit_uses: set[Use] = set()
        self._group_flags: dict[int, tuple[bool, bool]] = {}
        self._bias_values: dict[TensorRef, Array | None] = {}

    def add_note(self, index: int, text: str) -> None:
        """Add a note to a site."""
        self.notes[index] = (*self.notes.get(index, ()), text)

    def record_change(self, index: int, text: str) -> None:
        """Record a change of a site beyond its own range."""
        self.changes.append(ScaleChange(tensor=self.sites[index].tensor, message=text))

    def skip_site(self, index: int, code: SkipCode, reason: str) -> None:
        """Skip a site."""
        site = self.sites[index]
        self.skips[index] = Skip(tensor=site.tensor, uses=site.uses, rule=site.rule, reason=reason, code=code)
        self.params.pop(index, None)

    def record_conflict(self, conflict: Conflict, *indices: int) -> None:
        """Record a conflict, and note it at each of the sites."""
        self.conflicts.append(conflict)
        for index in indices:
            self.add_note(index, str(conflict))

    def site_at(self, use: Use) -> Site:
        """Return the site that has a use."""
        return self.sites[self.index_by_use[use]]

    def params_at(self, use: Use) -> QParams | None:
        """Return scale and zero point at a use, None if it is float."""
        index = self.index_by_use.get(use)
        return None if index is None else self.params.get(index)

    def scale_group(self, index: int) -> tuple[int, ...]:
        """Return the sites that share the params of a site, including itself, in ascending order."""
        return self.shared_groups.get(index, (index,))

    def is_movable(self, index: int) -> bool:
        """Return True if the solver may choose the scale of a site."""
        return self._flags_of_group(index)[0]

    def is_weight_group(self, index: int) -> bool:
        """Return True if only weights share the scale of a site."""
        return self._flags_of_group(index)[1]

    def _flags_of_group(self, index: int) -> tuple[bool, bool]:
        """Return if the solver may choose the scale of a group, and if only weights share it. Groups can be large."""
        group = self.scale_group(index)
        if group[0] not in self._group_flags:
            sites = [self.sites[member] for member in group]
            self._group_flags[group[0]] = (
                all(
                    site.scale is None and site.scheme.range == "observed" and site.scheme.observe.name != "fixed-point"
                    for site in sites
                ),
                all(site.parameter for site in sites),
            )
        return self._group_flags[group[0]]

    def divide_site(self, index: int, use_groups: Sequence[Sequence[Use]]) -> list[int]:
        """Split a site into one for each group of uses, copies for all but the first; return their indices."""
        site, skip = self.sites[index], self.skips.get(index)
        self.sites[index] = replace(site, uses=tuple(use_groups[0]))
        indices = [index]
        for uses in use_groups[1:]:
            copy_index = len(self.sites)
            indices.append(copy_index)
            self.sites.append(replace(site, uses=tuple(uses)))
            self.index_by_use.update(dict.fromkeys(uses, copy_index))
            for values in self._values_by_site():
                if index in values:
                    values[copy_index] = values[index]
        if skip is not None:
            self.skips |= {each: replace(skip, uses=self.sites[each].uses) for each in indices}
        return indices

    def _values_by_site(self) -> tuple[dict[int, Any], ...]:
        return self.params, self.ranges, self.notes

    def split_use(self, index: int, use: Use) -> int:
        """Move one use of a site to a copy and return the copy's index."""
        remaining_uses = [site_use for site_use in self.sites[index].uses if site_use != use]
        return self.divide_site(index, [remaining_uses, [use]])[1]

    def merge_equal_copies(self) -> None:
        """Merge copies that ended with the scale of their original or of an earlier copy."""
        planned_count = len(self.plan.sites)
        if len(self.sites) == planned_count:
            return
        order = {use: position for position, use in enumerate(use for site in self.plan.sites for use in site.uses)}
        merged_positions: dict[tuple[object, ...], int] = {}
        sites: list[Site] = []
        positions: list[int] = []
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
        for values in (*self._values_by_site(), self.skips):
            for index in range(planned_count, len(positions)):
                if index in values:
                    value = values.pop(index)
                    if positions[index] >= planned_count:
                        values.setdefault(positions[index], value)

    def is_divisible(self, index: int) -> bool:
        """Return True if the uses of a site may have different scales: those of a weight that no other site follows.

        A weight with very many readers is raised for all of them, because copies are made one at a time.
        """
        site = self.sites[index]
        is_independent = len(self.scale_group(index)) == 1 and not site.tie and site.clone_of is None
        has_few_uses = len(site.uses) <= MAX_COPIED_READERS
        return site.parameter and is_independent and has_few_uses and self.followed_uses.isdisjoint(site.uses)

    def raise_scale(self, index: int, scale: Array, why: str) -> None:
        """Give a site, and all sites that share its params, a larger scale of the same shape, with the reason."""
        self.record_change(index, why)
        old = self.params[index]
        raised = replace(old, scale=np.maximum(scale, old.scale), op_range=None)
        raised = self.sites[index].family.effective_params(raised)
        for member in self.scale_group(index):
            if member in self.params:
                self.params[member] = raised
                self.add_note(member, why)

    def snapshot(self) -> dict[str, Any]:
        """Return a snapshot for `restore`."""
        return {name: copy(getattr(self, name)) for name in SNAPSHOT_FIELDS}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Discard all changes since `snapshot`."""
        for name, value in snapshot.items():
            setattr(self, name, value)

    def bias_value(self, tensor: TensorRef) -> Array | None:
        """Return the value of a bias, None if it is unknown or not of a float type. It is read once."""
        if tensor not in self._bias_values:
            value = self.parameters.value(tensor)
            self._bias_values[tensor] = value if value is not None and value.dtype.name in FLOAT_TYPES else None
        return self._bias_values[tensor]


def takes_original_scale(site: Site) -> bool:
    """Return True if the site takes its original's scale: it has no scale, range or dynamic range itself."""
    return site.clone_of is not None and not site.has_given_range and site.scheme.range != "dynamic"


def starts_at_zero(site: Site) -> bool:
    """Return True for unsigned integers without a zero point, whose range starts at 0.0."""
    return not site.family.has_zero_points and not site.scheme.type.signed


def format_values(values: Array) -> str:
    """Format a number, or the smallest and the largest of several."""
    low, high = float(np.min(values)), float(np.max(values))
    return f"{low:.6g}" if low == high else f"{low:.4g}..{high:.4g}"


def format_range(value_range: Range) -> str:
    """Format a range; of several, the range that contains all."""
    return f"[{float(np.min(value_range.low)):.6g}, {float(np.max(value_range.high)):.6g}]"
