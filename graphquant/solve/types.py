"""What the solver finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphquant.ir import TensorRef
    from graphquant.numerics import Dynamic, QParams, Range
    from graphquant.plans import Plan, Skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two rules that cannot both have what they want.

    Attributes:
        rules: Their names; "" for what is no rule's, as the scale that an edited plan gives.
        tensors: What they speak of.
        wants: What each wants of its tensor.
        done: What was done.
    """

    rules: tuple[str, str]
    tensors: tuple[TensorRef, TensorRef]
    wants: tuple[str, str]
    done: str

    def __str__(self) -> str:
        """One sentence."""
        first, second = (
            f"{f'rule {rule!r}' if rule else 'the plan'} for {tensor} wants {want}"
            for rule, tensor, want in zip(self.rules, self.tensors, self.wants, strict=True)
        )
        return f"{first}, and {second}: {self.done}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What was done to a tensor beyond what its own values ask for.

    Attributes:
        tensor: The tensor.
        says: What was done, and for what.
    """

    tensor: TensorRef
    says: str

    def __str__(self) -> str:
        """One sentence."""
        return f"{self.tensor}: {self.says}"


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
    params: Mapping[int, QParams | Dynamic]
    skips: Mapping[int, Skip]
    notes: Mapping[int, tuple[str, ...]]
    changes: tuple[Change, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    ranges: Mapping[int, Range] = field(default_factory=dict)
