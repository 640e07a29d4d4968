"""What differs between two models or two plans."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "model",
    "op-added",
    "op-removed",
    "op-renamed",
    "op-changed",
    "attribute",
    "wiring",
    "weight",
    "site-added",
    "site-removed",
    "site-changed",
    "scale",
    "plan",
]
"""What changed: something of the whole model or plan, an op, what an op reads, a weight's values, a quantization."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference.

    Attributes:
        kind: What changed.
        where: The op or tensor, as the second model calls it where it has it.
        says: What it was and what it is.
        size: For scales the largest relative change, for weights the largest difference of two values.
    """

    kind: Kind
    where: str
    says: str
    size: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """All of them, in the order of the models.

    Attributes:
        changes: The differences.
        rerouted: How many uses read a tensor quantized in one of the two alone.
    """

    changes: tuple[Change, ...]
    rerouted: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """How many there are of each kind that there is."""
        found = Counter(change.kind for change in self.changes)
        return {kind: found[kind] for kind in KINDS if found[kind]}

    def __bool__(self) -> bool:
        return bool(self.changes)


KINDS: tuple[Kind, ...] = get_args(Kind)

__all__ = ["KINDS", "Change", "Differences", "Kind"]
