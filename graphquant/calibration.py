"""A plan, a runner and data to statistics: each tensor whose range only data can tell fills one sketch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from graphquant.sketch import EMPTY, OBSERVERS, Sketch, merge, sketch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from graphquant.data import Batches
    from graphquant.ir import TensorRef
    from graphquant.numerics import Array
    from graphquant.plans import Plan, Site


class Observing(Protocol):
    """Runs a model and shows what its tensors hold."""

    def unwatchable(self, tensors: Sequence[TensorRef]) -> dict[TensorRef, str]:
        """Those of `tensors` that cannot be observed, with the reason."""

    def observe(
        self, tensors: Sequence[TensorRef], feeds: Iterable[Mapping[str, Array]]
    ) -> Iterator[dict[TensorRef, list[Array]]]:
        """For each feed the values that each tensor took: none if it was not reached, several inside loops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What calibration found.

    Attributes:
        sketches: The sketch of each tensor that was reached; per channel if all its sites have the same axis.
        samples: Number of samples that were run.
        data: Digest of the data.
        model: Digest of the prepared model, whose tensors these are.
        unwatchable: Tensors that cannot be observed, with the reason.
    """

    sketches: Mapping[TensorRef, Sketch]
    samples: int
    data: str
    model: str
    unwatchable: Mapping[TensorRef, str] = field(default_factory=dict)


def needs_data(plan: Plan) -> tuple[Site, ...]:
    """The sites whose range only data can tell: no weights, nothing given by the plan or by the scheme."""
    return tuple(
        site
        for site in plan.sites
        if not site.parameter
        and site.range is None
        and site.scale is None
        and OBSERVERS[site.scheme.observe.name].needs_values
    )


def calibrate(plan: Plan, runner: Observing, batches: Batches, progress: Callable[[int], None] | None = None) -> Stats:
    """Runs the data through the model and collects the statistics that the plan needs, and no others.

    Args:
        plan: The plan.
        runner: Runs the prepared model that the plan names.
        batches: The data.
        progress: Called after each sample with the number of samples done.
    """
    axes = _axes(needs_data(plan))
    unwatchable = runner.unwatchable(tuple(axes))
    axes = {tensor: axis for tensor, axis in axes.items() if tensor not in unwatchable}
    sketches: dict[TensorRef, Sketch] = {}
    samples = 0
    if axes:
        for seen in runner.observe(tuple(axes), batches):
            for tensor, axis in axes.items():
                for values in seen.get(tensor, ()):
                    sketches[tensor] = merge(sketches.get(tensor, EMPTY), sketch(values, axis))
            samples += 1
            if progress is not None:
                progress(samples)
    reached = {tensor: sketches[tensor] for tensor in axes if tensor in sketches and sketches[tensor].count}
    return Stats(sketches=reached, samples=samples, data=batches.digest, model=plan.prepared, unwatchable=unwatchable)


def _axes(sites: Iterable[Site]) -> dict[TensorRef, int | None]:
    """Each tensor with the channel axis that all its sites share, else None."""
    axes: dict[TensorRef, int | None] = {}
    for site in sites:
        axes[site.tensor] = site.axis if axes.get(site.tensor, site.axis) == site.axis else None
    return axes
