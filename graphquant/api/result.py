"""Result of `insert`, and its conversion to a TensorFlow object."""

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
    from graphquant.analysis.validation import Validation
    from graphquant.calibration import Stats
    from graphquant.ir import Model, TensorRef
    from graphquant.optimize import AlgorithmResult, SearchTrace
    from graphquant.quantize import Conflict, Plan, RangeTransfer, ScaleChange, Skip
    from graphquant.quantize.rewrite import InsertedPair


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(HtmlRepresentation):
    """Result of `insert`.

    Attributes:
        model: The quantized model.
        source: The float model.
        plan: The applied plan.
        inserted: The inserted Q/DQ pairs, one for each site.
        skips: Tensors that the plan or the solver skipped, with the reason.
        site_notes: Notes on sites, by tensor.
        scale_reasons: Explanations of the scale, for each of `inserted`.
        changes: Raised scales, copied weights and added pairs, with the reason.
        conflicts: Requirements of rules that contradict each other.
        stats: Statistics of the activations, or None if no data was needed.
        stats_path: The statistics file, or None if they were collected by this call.
        tflite_ranges: Use of a TFLite file's scales, or None without a file.
        algorithm_results: Changes by optimization algorithms, and ops that they skipped, with the reason.
        search: Result of the search, or None without bounds, a size budget or optimized latency.
        validation: Errors of the quantized model on the hold-out, or None without data.
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
    search: SearchTrace | None = None

    @property
    def calibration_samples(self) -> int:
        """Number of calibration samples."""
        return self.stats.samples if self.stats is not None else 0

    @property
    def has_random_data(self) -> bool:
        """True if any calibration samples were generated."""
        return self.stats is not None and self.stats.random

    @property
    def activation_sqnr(self) -> tuple[Loss, ...]:
        """Estimated SQNR of the quantized activations, lowest first."""
        return activation_sqnr(self.inserted, self.stats.sketches if self.stats is not None else {})

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the quantized model and return its path; see `save`."""
        return save(self.model, path, force=force)


def to_tf(model: Model | Result) -> Any:
    """Convert a TensorFlow model to an object in memory, of the kind from which it was loaded.

    Returns:
        A tf.Graph with its collections, if the model is a tf.Graph or a graph file. A new session with the same
        variable values, if it is a session. A ConcreteFunction with the same signature and the same variables, if it is
        a ConcreteFunction, a tf.function or a Keras model.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: TensorFlow rejects the model.
        UsageError: It is not a TensorFlow model, it is a SavedModel, or such an object cannot hold the inserted ops.
    """
    tensorflow_model = model.model if isinstance(model, Result) else model
    if tensorflow_model.format != "tensorflow":
        raise UsageError(
            f"{tensorflow_model.path or 'The model'} has the format {tensorflow_model.format}. Only TensorFlow models"
            " can be converted to objects."
        )
    from graphquant.formats.tensorflow import to_tensorflow

    return to_tensorflow(tensorflow_model)
