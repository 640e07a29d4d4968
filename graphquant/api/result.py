"""What `insert` made, and how it becomes a model of TensorFlow in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphquant.analysis.range_report import activation_sqnr
from graphquant.api.models import save
from graphquant.errors import UsageError
from graphquant.utils.notebook_html import HtmlRepresentation

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from graphquant.analysis.range_report import Loss
    from graphquant.api.latency import LatencyResult
    from graphquant.api.search import PlanSearchResult
    from graphquant.api.size_budget import SizeBudgetResult
    from graphquant.api.validation import Validation
    from graphquant.calibration import Stats
    from graphquant.ir import Model, TensorRef
    from graphquant.optimize import AlgorithmResult
    from graphquant.quantize import Conflict, Plan, RangeTransfer, ScaleChange, Skip
    from graphquant.quantize.rewrite import InsertedPair


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(HtmlRepresentation):
    """What `insert` made.

    Attributes:
        model: The rewritten model.
        source: The model as it was given.
        plan: What was to be done.
        inserted: What was done, a site each.
        skips: What the plan or the solver left out, with the reason.
        site_notes: A word on some sites, by their tensor.
        scale_reasons: For each of `inserted` why its scale is what it is, in sentences.
        changes: Scales that were raised, copies that were made, pairs that were added, with the reason.
        conflicts: Where not everything that rules want could be had.
        stats: What the ranges of activations come from, None where no data was needed.
        stats_path: The statistics file, None where they were made now.
        tflite_ranges: What a TFLite file's scales were used for, None where none was given.
        algorithm_results: What corrections did, an op each, and what they left, with the reason.
        search: What the search for a plan that meets bounds did, None where there are none.
        latency: What was found about time, None where that was not to be least.
        size_budget: What was chosen for a size budget, None where there is none.
        validation: How far the rewritten model is from the source, None without data to measure on.
    """

    model: Model
    source: Model
    plan: Plan
    inserted: tuple[InsertedPair, ...]
    skips: tuple[Skip, ...]
    site_notes: Mapping[TensorRef, str] = field(default_factory=dict)
    scale_reasons: tuple[tuple[str, ...], ...] = ()
    changes: tuple[ScaleChange, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    stats: Stats | None = None
    stats_path: Path | None = None
    tflite_ranges: RangeTransfer | None = None
    algorithm_results: tuple[AlgorithmResult, ...] = ()
    validation: Validation | None = None
    search: PlanSearchResult | None = None
    latency: LatencyResult | None = None
    size_budget: SizeBudgetResult | None = None

    @property
    def calibration_samples(self) -> int:
        """Number of calibration samples."""
        return self.stats.samples if self.stats is not None else 0

    @property
    def has_random_data(self) -> bool:
        """Whether any of them were made up."""
        return self.stats is not None and self.stats.random

    @property
    def activation_sqnr(self) -> tuple[Loss, ...]:
        """What quantized activations lose by themselves, that which loses most first; see `graphquant.losses`."""
        return activation_sqnr(self.inserted, self.stats.sketches if self.stats is not None else {})

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Writes the rewritten model; see `save`."""
        return save(self.model, path, force=force)


def to_tf(model: Model | Result) -> Any:
    """A TensorFlow model as an object in memory, edits included: of the kind that `load` was given.

    Returns:
        A tf.Graph for a tf.Graph or a graph's file, with the collections; for a session a new one, whose variables have
        the same values; for a ConcreteFunction, a tf.function or a Keras model a ConcreteFunction of the same
        signature, which reads the same variables.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: TensorFlow refuses the model.
        UsageError: It is no TensorFlow model or a SavedModel, or what was inserted has no place in such an object.
    """
    tensorflow_model = model.model if isinstance(model, Result) else model
    if tensorflow_model.format != "tensorflow":
        raise UsageError(
            f"{tensorflow_model.path or 'The model'} is in the format {tensorflow_model.format}. Only TensorFlow models become objects."
        )
    from graphquant.formats.tensorflow import to_tensorflow

    return to_tensorflow(tensorflow_model)
