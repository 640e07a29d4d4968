"""What a correction is, and what it says of what it did."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from graphquant.rewrite import rewrite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphquant.formats import Feeds, Runner
    from graphquant.ir import Model, Use
    from graphquant.numerics import Array
    from graphquant.rewrite import Folds
    from graphquant.solve import Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """One op whose weights or bias a correction changed, or left.

    Attributes:
        correction: The correction's name.
        target: The op, with its graph where that is not the main one.
        detail: What was done, or why nothing was.
        done: Whether it was changed.
    """

    correction: str
    target: str
    detail: str
    done: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Data to correct by, and what runs it.

    Attributes:
        feeds: What corrections are made by, one sample each; few, so that it costs little.
        others: What they are checked with.
        runner: Makes what runs a model.
    """

    feeds: Sequence[Feeds]
    others: Sequence[Feeds]
    runner: Callable[[Model], Runner]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A solved plan and its model, as far as they are corrected.

    Attributes:
        before: The prepared model.
        model: The same, perhaps with other weights.
        solution: Scales and zero points of its plan.
        weights: Weights that are others now, float32, by where they are read.
        folds: Keeps the integers of weights while the model is quantized time and again; None where it is not.
        told: What was done.
    """

    before: Model
    model: Model
    solution: Solution
    weights: Mapping[Use, Array] = field(default_factory=dict)
    folds: Folds | None = None
    told: tuple[Corrected, ...] = ()

    def saying(self, told: tuple[Corrected, ...]) -> Draft:
        """The same, having told this."""
        return replace(self, told=told)

    def quantized(self) -> Model:
        """The model with all of its quantization.

        Raises:
            UsageError: The plan does not fit the model.
        """
        return rewrite(self.model, self.solution.plan, self.solution.params, folds=self.folds)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """One kind of correction.

    Attributes:
        why: What it is good for, for people.
        run: Corrects a draft.
        sure: Standard errors that the gain of some output must be above 0.
    """

    why: str
    run: Callable[[Draft, Samples], Draft]
    sure: float


__all__ = ["Corrected", "Correction", "Draft", "Samples"]
