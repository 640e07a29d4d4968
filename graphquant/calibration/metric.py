"""The user's own metric: a function that scores the outputs of a batch, higher is better.

The function gets the outputs by name, and the labels: all arrays of the data that no input takes. The first axis of an
array counts samples. The score of a model is the mean over the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphquant.calibration.data.function import import_object, wrap_user_errors
from graphquant.errors import DataError, UsageError

if TYPE_CHECKING:
    from graphquant.numerics import Array


@dataclass(frozen=True, slots=True)
class Metric:
    """A function of outputs and labels, and its name for reports."""

    name: str
    function: Callable[[dict[str, Array], dict[str, Array]], Any]

    def score(self, outputs: Mapping[str, Array], labels: Mapping[str, Array]) -> float:
        """Return the score of a batch. Raises a DataError if the function fails or returns no finite number."""
        with wrap_user_errors(f"The metric {self.name}", "failed"):
            result = self.function(dict(outputs), dict(labels))
        try:
            score = float(result)
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            found = f"{type(result).__name__} {str(result)[:40]}"
            raise DataError(f"The metric {self.name} returned {found}. Return one finite number; higher is better.")
        return score


def load_metric(metric: Any) -> Metric | None:
    """Return the metric of an option: `module:function`, which is imported, a function, or None."""
    if metric is None or isinstance(metric, Metric):
        return metric
    if callable(metric):
        return Metric(getattr(metric, "__qualname__", type(metric).__name__), metric)
    if not isinstance(metric, str) or not all(metric.partition(":")):
        raise UsageError(f"The metric {str(metric)[:60]!r} is not a function. Write module:function.")
    function = import_object(metric, "Name a function of outputs and labels that returns a number.")
    if not callable(function):
        raise DataError(f"{metric} is not a function. Name a function of outputs and labels that returns a number.")
    return Metric(metric, function)
