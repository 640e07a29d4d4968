"""The cheapest plan that meets bounds: blame, choice and measurement put together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.calibration import load_of
from graphquant.pipeline.checking import sizes
from graphquant.pipeline.common import stage
from graphquant.plans import Skip

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphquant.accuracy import Blame, Found
    from graphquant.formats import Runner
    from graphquant.ir import Model, TensorRef
    from graphquant.pipeline.checking import Bounds, Check, Kept
    from graphquant.pipeline.common import Progress
    from graphquant.plans import Plan
    from graphquant.rewrite import Inserted

    Make = Callable[[Plan], tuple[Model, Sequence[Inserted]]]
    Measure = Callable[[Model], Check]

RULE = "search"
"""The rule that sites are left by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A plan that was searched for.

    Attributes:
        plan: The plan, in which sites that are left float are skips with their reason.
        found: What the search did.
        tried: The check of the plan on the samples of the search.
        runs: How many runs each site took for its blame.
        left: What is left float, with the signal to noise in decibels that it alone leaves at the outputs.
    """

    plan: Plan
    found: Found
    tried: Check
    runs: float
    left: Mapping[TensorRef, float | None]


def searched(
    source: Model,
    prepared: Model,
    plan: Plan,
    make: Make,
    measure: Measure,
    kept: Kept,
    bounds: Bounds,
    *,
    optimize: str,
    progress: Progress | None,
) -> Searched:
    """Looks for the cheapest sites of `plan` to leave float so that `bounds` are met.

    Args:
        source: The float model.
        prepared: The same as the plan names it.
        plan: What the rules make.
        make: Makes the model of a plan, with what was inserted.
        measure: Checks such a model on the samples of the search.
        kept: These samples.
        bounds: What is to be met.
        optimize: What to spend least of: "macs" or "size".
        progress: Is told how far the work is.

    Raises:
        DataError: A sample is not what it should be.
        ModelError: A model cannot be run.
    """
    from graphquant.accuracy import Measured, groups, in_bytes, in_multiply_adds, search

    quant, inserted = make(plan)
    first = measure(quant)
    checks: dict[tuple[int, ...], Check] = {(): first}
    if not first.missed or first.comparison is None or not inserted:
        found = search([], {}, lambda _left: Measured(met=True, sqnr=0.0), wanted=None)
        return Searched(plan=plan, found=found, tried=first, runs=0.0, left={})
    runner = formats.module(source.format).runner(source)
    blamed = _blame(source, quant, runner, kept, progress)
    alone = _by_site(quant, plan, inserted, blamed)
    costs = in_bytes(prepared) if optimize == "size" else in_multiply_adds(prepared, sizes(prepared, kept.samples()))

    def tried(left: tuple[int, ...]) -> Measured:
        if left not in checks:
            made, _ = make(_without(plan, left, alone, bounds))
            checks[left] = measure(made)
        check = checks[left]
        sqnr = None if check.comparison is None else check.comparison.sqnr
        return Measured(met=not check.missed, sqnr=-1.0 if sqnr is None else sqnr)

    found = search(
        groups(prepared, plan, sorted(alone), alone),
        costs,
        tried,
        wanted=bounds.sqnr,
        progress=stage(progress, "searching"),
    )
    return Searched(
        plan=_without(plan, found.left, alone, bounds),
        found=found,
        tried=checks[found.left],
        runs=blamed.passes,
        left={plan.sites[index].tensor: _decibels(alone[index]) for index in found.left},
    )


def _blame(source: Model, quant: Model, runner: Runner, kept: Kept, progress: Progress | None) -> Blame:
    """What each quantization adds alone, on samples of the search."""
    from graphquant.accuracy import blame
    from graphquant.comparison import sites_of

    return blame(
        quant,
        sites_of(source, quant),
        kept.samples(),
        inputs={one.name: one.name for one in runner.inputs},
        batchable=runner.batchable and load_of(source, batchable=True).elements is not None,
        progress=stage(progress, "blaming"),
    )


def _by_site(quant: Model, plan: Plan, inserted: Sequence[Inserted], blamed: Blame) -> dict[int, float]:
    """What each site adds, by its position; nothing where that is not known."""
    places = {(site.tensor, site.uses): index for index, site in enumerate(plan.sites)}
    found = {}
    for done in inserted:
        index = places.get((done.site.tensor, done.site.uses))
        if index is None:
            continue  # a copy that the solver made
        found[index] = 0.0
        for output in done.outputs:
            graph, here = quant.graphs[output.graph], output
            if graph.op(here.op).kind == "reshape":  # behind a weight that is quantized in another view
                here = graph.slots(here.op)[0] or here
            error = blamed.errors.get((here.graph, here.op), 0.0)
            found[index] += error if math.isfinite(error) else 1.0
    return found


def _without(plan: Plan, left: Sequence[int], alone: Mapping[int, float], bounds: Bounds) -> Plan:
    """The plan with the sites `left` as skips."""
    gone = set(left)
    skips = tuple(
        Skip(
            tensor=plan.sites[index].tensor,
            uses=plan.sites[index].uses,
            rule=RULE,
            reason=_reason(alone[index], bounds),
        )
        for index in left
    )
    sites = tuple(site for index, site in enumerate(plan.sites) if index not in gone)
    return replace(plan, sites=sites, skips=(*plan.skips, *skips))


def _reason(error: float, bounds: Bounds) -> str:
    found = _decibels(error)
    said = "" if found is None else f"; alone it leaves {found:.1f} dB at the outputs"
    return f"the search left it float for {bounds}{said}"


def _decibels(error: float) -> float | None:
    return -10 * math.log10(error) if error else None


__all__ = ["Searched", "searched"]
