"""Corrections made one after the other, each kept only where samples that it was not made by show that it gains.

Sums of squares over a few samples are mostly those of the worst one to three. So no output may lose, neither with all
samples nor, unless most samples gain, without the three that gain most; and the roots of some output's errors must fall
by more than chance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import numpy as np

from graphquant.corrections.types import Corrected
from graphquant.ir import check

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from graphquant.corrections.types import Draft, Samples
    from graphquant.ir import Model
    from graphquant.numerics import Array

FEWEST: Final = 3
"""Samples that say anything."""

SURE: Final = 2.5
"""Standard errors that the mean fall of an output's errors must be above 0."""

LIKELY: Final = 1.0
"""The same where the correction lowers errors of single ops that it can see, so that a gain is what is expected."""

DOUBTFUL: Final = 1.0
"""Standard errors that the mean fall of no output's errors may be below 0."""

LOSS: Final = 0.5
"""dB that no output may lose over all samples."""

WORTH: Final = 0.5
"""dB that some output must gain."""

LUCKY: Final = 3
"""Samples that may not decide by themselves, or a quarter of few."""

EXACT: Final = 1e-20
"""Of an output's power, the error that is taken for none."""

Outputs = list[dict[str, "Array"]]
"""What a model gives, sample by sample, by name."""


class Stage(Protocol):
    """A model as far as it is corrected."""

    @property
    def model(self) -> Model:
        """The model."""

    @property
    def told(self) -> tuple[Corrected, ...]:
        """What was done."""

    def saying(self, told: tuple[Corrected, ...]) -> Self:
        """The same, having told this."""


S = TypeVar("S", bound=Stage)


def keep(
    now: S,
    steps: Sequence[tuple[str, Callable[[S, Samples], S], float]],
    drafted: Callable[[S], Draft],
    samples: Samples,
) -> S:
    """What is left of `now` after these corrections, those taken back after which outputs are not nearer.

    Args:
        now: The model before them, which stays as it is.
        steps: Names of corrections, what makes them, and how sure each gain must be, in standard errors.
        drafted: Gives a model its scales.
        samples: What to correct by, and to check with.

    Raises:
        ModelError: The model cannot be run.
    """
    count = len(samples.others)
    if count < FEWEST:
        few = f"there are {count} samples to check it with, and {FEWEST} are the least"
        return now.saying((*now.told, *(left_out(name, few) for name, *_ in steps)))
    floats: Outputs = []
    before = None
    for name, run, sure in steps:
        made = run(now, samples)
        check(made.model, name)
        if not any(one.done for one in made.told[len(now.told) :]):
            now = now.saying(made.told)
            continue
        if before is None:
            draft = drafted(now)
            floats = expected(draft, samples)
            before = errors(draft, floats, samples)
        after = errors(drafted(made), floats, samples)
        reason = worse(before, after, sure)
        if reason:
            said = f"{reason}, measured on {count} samples that it was not made by"
            now = now.saying((*now.told, left_out(name, said)))
        else:
            now, before = made, after
    return now


def left_out(name: str, reason: str) -> Corrected:
    """What is told of a correction that was not made."""
    return Corrected(correction=name, target="model", detail=f"left out: {reason}", done=False)


def expected(draft: Draft, samples: Samples) -> Outputs:
    """What the float model gives for the samples that corrections are checked with.

    Raises:
        ModelError: The model cannot be run.
    """
    runner = samples.runner(draft.model)
    return [runner.run(feed) for feed in samples.others]


def errors(draft: Draft, floats: Outputs, samples: Samples) -> Array:
    """Squared errors of the quantized model's float outputs, of each output's power: float64 (samples, outputs).

    Raises:
        ModelError: The model cannot be run.
    """
    runner = samples.runner(draft.quantized())
    names = [
        name for name, value in floats[0].items() if value.dtype.kind == "f" and all(name in one for one in floats)
    ]
    power = {name: float(np.mean([_power(one[name]) for one in floats])) or 1.0 for name in names}
    rows = []
    for one, feed in zip(floats, samples.others, strict=True):
        found = runner.run(feed)
        rows.append([_error(one[name], found.get(name)) / power[name] for name in names])
    return np.array(rows).reshape(len(rows), len(names))


def worse(before: Array, after: Array, sure: float = SURE) -> str:
    """Why a correction is not kept, given outputs' `errors` before and after it; "" if it is.

    Args:
        before: float64 (samples, outputs).
        after: Likewise.
        sure: Standard errors that the mean fall of some output's errors must be above 0.
    """
    gains = np.sqrt(before) - np.sqrt(after)
    chance = gains.std(0, ddof=1) / np.sqrt(len(gains))
    mean = gains.mean(0)
    total = _decibels(before.sum(0), after.sum(0))
    if np.any(total < -LOSS) or np.any(mean < -DOUBTFUL * chance):
        return f"an output is off by {10 ** (max(-total.min(), 0) / 20):.2f} times as much"
    lucky = max(min(LUCKY, len(gains) // 4), 1)
    others = np.argsort(before - after, axis=0)[:-lucky]
    rest = _decibels(*(np.take_along_axis(one, others, 0).sum(0) for one in (before, after)))
    rest[2 * (after < before).sum(0) - len(gains) > SURE * np.sqrt(len(gains))] = 0  # most samples gain
    if np.any(rest < 0):
        times = 10 ** (-rest.min() / 20)
        return f"without the {lucky} samples that gain most an output is off by {times:.2f} times as much"
    if not np.any(mean > sure * chance):
        return f"no output is nearer to the float model's by more than chance explains ({total.max(initial=0):.1f} dB)"
    most = total.max(initial=0)
    return "" if most >= WORTH else f"no output gains {WORTH:g} dB (the most is {most:.1f} dB)"


def _decibels(before: Array, after: Array) -> Array:
    """How far squared errors fell, in dB."""
    return np.asarray(10 * np.log10((before + EXACT) / (after + EXACT)))


def _power(values: Array) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def _error(expected: Array, found: Array | None) -> float:
    """The squared error of an output; infinite where it is not there, or of another shape."""
    if found is None or found.shape != expected.shape:
        return float("inf")
    return float(np.square(np.subtract(found, expected, dtype=np.float64)).sum())


__all__ = ["LIKELY", "SURE", "errors", "expected", "keep", "left_out", "worse"]
