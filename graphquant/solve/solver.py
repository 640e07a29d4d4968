"""The story of a solution: ranges, ties, limits, biases, Relus, copies, each step on what the ones before it found.

Each step goes over the sites once, and only one looks at anything again: `worklist`, which says why it ends. No
step undoes another's work: what ties share stays shared, scales only grow, and biases, which follow scales, come after.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant.errors import UsageError
from graphquant.ir import Model, TensorRef, Use, bulk
from graphquant.numerics import Dynamic, FloatType, halved
from graphquant.plans import Plan, Site, Skip, check_plan
from graphquant.qdq import FAMILIES
from graphquant.solve.biases import solve_biases
from graphquant.solve.clipping import tell_clipped
from graphquant.solve.clips import make_explicit
from graphquant.solve.draft import Draft, follows
from graphquant.solve.ranges import find_ranges
from graphquant.solve.ties import follow_skips, share
from graphquant.solve.types import Solution
from graphquant.solve.worklist import meet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphquant.sketch import Sketch

FLOAT8_BETWEEN = (
    "onnxruntime's optimizer makes integer ops of float8 between quantized tensors, which it then refuses; load the"
    " model with its optimizations off, or quantize weights alone"
)

UNTAUGHT = "its range is in variables that no gradient reaches; FakeQuant alone has one"


@bulk()
def solve(
    model: Model, plan: Plan, sketches: Mapping[TensorRef, Sketch], unwatchable: Mapping[TensorRef, str] | None = None
) -> Solution:
    """Scale and zero point of every site.

    A site with a scale keeps it; one with a range gets that; one with a twin has its twin's; a parameter's range comes
    from its value; all else from `sketches`; where one is missing, `unwatchable` may tell why. Sites that are tied get
    the union of their ranges, so that they share one scale and zero point; scales are raised as far as biases and
    shifts need; what consumers need with different scales is copied.

    Raises:
        ModelError: A weight holds NaN or infinity.
        UsageError: The plan does not fit the model.
    """
    check_plan(model, plan)
    draft = Draft(model, plan)
    find_ranges(draft, sketches, unwatchable or {})
    share(draft)
    _as_written(draft)
    follow_skips(draft)
    meet(draft)
    draft.rejoin()
    solve_biases(draft)
    make_explicit(draft)
    tell_clipped(draft)
    _follow_twins(draft)
    _remark(draft)
    dynamic = {index: _dynamic(site) for index, site in enumerate(draft.sites) if site.scheme.range == "dynamic"}
    return Solution(
        plan=replace(plan, sites=tuple(draft.sites), skips=tuple(_left(draft, plan.skips))),
        params={**draft.params, **dynamic},
        skips=draft.skips,
        notes={index: tuple(draft.notes[index]) for index in sorted(draft.notes) if index in draft.params},
        changes=tuple(draft.changes),
        conflicts=tuple(draft.conflicts),
        ranges=draft.ranges,
    )


def _as_written(draft: Draft) -> None:
    """Makes each scale that which the family's ops will have; skips sites for which they have none."""
    for index in list(draft.params):
        try:
            site = draft.sites[index]
            settled = FAMILIES[site.scheme.family or ""].settle(draft.params[index])
            half = draft.model.output(site.tensor).dtype == "float16"
            draft.params[index] = halved(settled) if half else settled
        except UsageError as error:
            draft.skip(index, str(error))


def _follow_twins(draft: Draft) -> None:
    """Gives sites in copies the scales of their twins."""
    for index, site in enumerate(draft.sites):
        if not follows(site) or site.twin is None:
            continue
        params = draft.of(site.twin)
        if params is not None:
            draft.params[index] = params
        else:
            draft.skip(index, f"its twin {site.twin} is not quantized")


def _remark(draft: Draft) -> None:
    """Says where learned ranges are not taught, and where float8 between quantized tensors runs."""
    for index in draft.params:
        site = draft.sites[index]
        if site.scheme.range == "learned" and not FAMILIES[site.scheme.family or ""].learns:
            draft.note(index, UNTAUGHT)
        if isinstance(site.scheme.type, FloatType):
            others = (
                Use(use.graph, use.op, slot)
                for use in site.uses
                for slot in range(len(draft.model.graphs[use.graph].slots(use.op)))
                if slot != use.slot
            )
            if not site.parameter or any(draft.of(other) is not None for other in others):
                draft.note(index, FLOAT8_BETWEEN)


def _left(draft: Draft, skips: tuple[Skip, ...]) -> list[Skip]:
    """The plan's skips without the uses that were quantized after all."""
    left = []
    for skip in skips:
        uses = tuple(use for use in skip.uses if use not in draft.explicit)
        if uses or not skip.uses:
            left.append(skip if uses == skip.uses else replace(skip, uses=uses))
    return left


def _dynamic(site: Site) -> Dynamic:
    return Dynamic(type=site.scheme.type, narrow=site.scheme.narrow, axis=site.axis)
