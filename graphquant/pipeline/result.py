"""What `insert` made, and how it becomes a model of TensorFlow in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphquant.drawn import Drawn
from graphquant.errors import UsageError
from graphquant.losses import losses
from graphquant.pipeline.models import save

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from graphquant.calibration import Stats
    from graphquant.corrections import Corrected
    from graphquant.ir import Model, TensorRef
    from graphquant.losses import Loss
    from graphquant.pipeline.budgeting import Fitted
    from graphquant.pipeline.checking import Check
    from graphquant.pipeline.searching import Searched
    from graphquant.pipeline.timing import Timed
    from graphquant.plans import Plan, Skip
    from graphquant.ranges import Ranges
    from graphquant.rewrite import Inserted
    from graphquant.solve import Change, Conflict


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Drawn):
    """What `insert` made.

    Attributes:
        model: The rewritten model.
        source: The model as it was given.
        plan: What was to be done.
        inserted: What was done, a site each.
        skips: What the plan or the solver left out, with the reason.
        notes: A word on some sites, by their tensor.
        choices: For each of `inserted` why its scale is what it is, in sentences.
        changes: Scales that were raised, copies that were made, pairs that were added, with the reason.
        conflicts: Where not everything that rules want could be had.
        stats: What the ranges of activations come from, None where no data was needed.
        statistics: The statistics file, None where they were made now.
        ranges: What a TFLite file's scales were used for, None where none was given.
        corrected: What corrections did, an op each, and what they left, with the reason.
        searched: What the search for a plan that meets bounds did, None where there are none.
        timed: What was found about time, None where that was not to be least.
        fitted: What was chosen for a size budget, None where there is none.
        check: How far the rewritten model is from the source, None without data to measure on.
    """

    model: Model
    source: Model
    plan: Plan
    inserted: tuple[Inserted, ...]
    skips: tuple[Skip, ...]
    notes: Mapping[TensorRef, str] = field(default_factory=dict)
    choices: tuple[tuple[str, ...], ...] = ()
    changes: tuple[Change, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    stats: Stats | None = None
    statistics: Path | None = None
    ranges: Ranges | None = None
    corrected: tuple[Corrected, ...] = ()
    check: Check | None = None
    searched: Searched | None = None
    timed: Timed | None = None
    fitted: Fitted | None = None

    @property
    def samples(self) -> int:
        """Number of calibration samples."""
        return self.stats.samples if self.stats is not None else 0

    @property
    def random(self) -> bool:
        """Whether any of them were made up."""
        return self.stats is not None and self.stats.random

    @property
    def losses(self) -> tuple[Loss, ...]:
        """What quantized activations lose by themselves, that which loses most first; see `graphquant.losses`."""
        return losses(self.inserted, self.stats.sketches if self.stats is not None else {})

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
    made = model.model if isinstance(model, Result) else model
    if made.format != "tensorflow":
        raise UsageError(
            f"{made.path or 'The model'} is in the format {made.format}. Only TensorFlow models become objects."
        )
    from graphquant.formats.tensorflow import give_back

    return give_back(made)


__all__ = ["Result", "to_tf"]
