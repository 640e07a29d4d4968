"""Whether a correction is kept: both models are run on samples that it was not made by.

Sums of squares over a few samples are mostly those of the worst one or two. What is asked is therefore whether the fall
of the errors' roots, sample by sample, is more than chance; and sums of squares must not grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from graphquant.corrections.types import Draft, Samples
    from graphquant.numerics import Array

FEWEST: Final = 3
"""Samples that say anything."""

SURE: Final = 2.5
"""Standard errors that the mean fall of an output's errors must be above 0."""

DOUBTFUL: Final = 1.0
"""Standard errors that the mean fall of no output's errors may be below 0."""

LOSS: Final = 0.5
"""dB that no output may lose over all samples."""

EXACT: Final = 1e-20
"""Of an output's power, the error that is taken for none."""

Outputs = list[dict[str, "Array"]]
"""What a model gives, sample by sample, by name."""


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


def worse(before: Array, after: Array, *, gain: bool = True) -> str:
    """Why a correction is not kept, given outputs' `errors` before and after it; "" if it is.

    Args:
        before: float64 (samples, outputs).
        after: Likewise.
        gain: Whether an output must gain; else it is enough that none loses.
    """
    gains = np.sqrt(before) - np.sqrt(after)
    total = 10 * np.log10((before.sum(0) + EXACT) / (after.sum(0) + EXACT))
    chance = gains.std(0, ddof=1) / np.sqrt(len(gains))
    mean = gains.mean(0)
    if np.any(total < -LOSS) or np.any(mean < -DOUBTFUL * chance):
        return f"an output is off by {10 ** (max(-total.min(), 0) / 20):.2f} times as much"
    if not gain or np.any(mean > SURE * chance):
        return ""
    return f"no output is nearer to the float model's by more than chance explains ({total.max(initial=0):.1f} dB)"


def _power(values: Array) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def _error(expected: Array, found: Array | None) -> float:
    """The squared error of an output; infinite where it is not there, or of another shape."""
    if found is None or found.shape != expected.shape:
        return float("inf")
    return float(np.square(np.subtract(found, expected, dtype=np.float64)).sum())


__all__ = ["FEWEST", "errors", "expected", "worse"]
