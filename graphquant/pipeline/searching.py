"""The cheapest plan that meets bounds: blame, choice and measurement put together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from graphquant.accuracy import FLOAT, OWN, Blame, Found, Measured, groups, in_bytes, in_multiply_adds, search
from graphquant.errors import UsageError
from graphquant.pipeline.checking import sizes
from graphquant.pipeline.common import stage
from graphquant.pipeline.comparing import with_blame
from graphquant.pipeline.redrawing import by_site, redrawn
from graphquant.pipeline.trying import Trials, place

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from graphquant.accuracy import Group
    from graphquant.ir import Model, TensorRef, Use
    from graphquant.pipeline.checking import Bounds, Check, Kept
    from graphquant.pipeline.common import Progress
    from graphquant.pipeline.trying import Errors, Make
    from graphquant.plans import Plan
    from graphquant.rewrite import Inserted

    Measure = Callable[[Model], Check]
    Place = tuple[str, str]

RULE = "search"
"""The rule that sites are left by, or changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A plan that was searched for.

    Attributes:
        plan: The plan, in which sites that are left float are skips with their reason, and others say theirs.
        found: What the search did.
        tried: The check of the plan on the samples of the search.
        runs: How many runs each site took in all, for its blame and for measuring plans.
        left: What is left float, with the signal to noise in decibels that it alone leaves at the outputs.
        changed: What is quantized otherwise than rules want, with the way.
        alone: By position in `plan` what sites add alone to the outputs, as a share of these, if known.
    """

    plan: Plan
    found: Found
    tried: Check
    runs: float
    left: Mapping[TensorRef, float | None]
    changed: Mapping[TensorRef, str]
    alone: Mapping[int, float] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether the samples of the search show that the bounds are met."""
        return not self.tried.missed and not self.tried.doubts


def searched(
    prepared: Model,
    plan: Plan,
    make: Make,
    measure: Measure,
    kept: Kept,
    bounds: Bounds,
    *,
    optimize: str,
    costs: Mapping[Place, float] | None = None,
    fixed: Collection[Use] = (),
    progress: Progress | None,
) -> Searched:
    """Looks for the cheapest ways of the sites of `plan` so that `bounds` are met.

    Args:
        prepared: The float model as the plan names it.
        plan: What the rules make.
        make: Makes the model of a plan, with what was inserted.
        measure: Checks such a model on the samples of the search.
        kept: These samples.
        bounds: What is to be met.
        optimize: What to spend least of: "macs" or "size".
        costs: What each op that multiplies costs in float, if it is something else.
        fixed: The first use of each site that stays as it is.
        progress: Is told how far the work is.

    Raises:
        DataError: A sample is not what it should be.
        ModelError: A model cannot be run.
        UsageError: A bound is on something that no output has.
    """
    quant, inserted = make(plan)
    first = measure(quant)
    if first.unmeasured:
        raise UsageError(f"The bounds cannot be measured: {'; '.join(first.unmeasured)}. Leave out those.")
    unchanged = Searched(plan=plan, found=_nothing(first), tried=first, runs=0.0, left={}, changed={})
    if first.assured or first.comparison is None or not inserted:
        return unchanged
    trials = Trials(prepared, kept, progress)
    errors, others = trials.all(plan, quant, inserted, make)
    if trials.interrupted:
        return replace(unchanged, found=replace(unchanged.found, interrupted=True), runs=trials.passes(errors))
    held = [index for index, site in enumerate(plan.sites) if site.uses[0] in fixed]
    among = groups(prepared, plan, sorted(errors), errors, held)
    drawn = _Drawn(plan=plan, others=others, groups=among, errors=errors, bounds=bounds)
    checks = {(0,) * len(among): first}

    def tried(chosen: tuple[int, ...]) -> Measured:
        if chosen not in checks:
            checks[chosen] = measure(make(drawn.made(chosen))[0])
        check = checks[chosen]
        return Measured(met=check.assured, sqnr=_least(check))

    if costs is None:
        by_size = optimize == "size"
        costs = in_bytes(prepared) if by_size else in_multiply_adds(prepared, sizes(prepared, kept.samples()))
    found = search(among, costs, tried, wanted=bounds.sqnr, progress=stage(progress, "searching"))
    ways = drawn.ways(found.chosen)
    quantized = [i for i in range(len(plan.sites)) if ways.get(i) != FLOAT]
    measuring = 2 * len(checks) * kept.samples().count / len(errors)
    return Searched(
        plan=drawn.made(found.chosen),
        found=found,
        tried=checks[found.chosen],
        runs=trials.passes(errors) + measuring,
        left={plan.sites[i].tensor: _decibels(errors[i][OWN]) for i, way in ways.items() if way == FLOAT},
        changed={plan.sites[i].tensor: way for i, way in ways.items() if way != FLOAT},
        alone={new: errors[i][ways.get(i, OWN)] for new, i in enumerate(quantized) if i in trials.known},
    )


def blamed(check: Check, found: Searched, made: Model, inserted: Sequence[Inserted]) -> Check:
    """The check of the plan that was found with what each quantized tensor costs the outputs alone, most first.

    Where several ops quantize one tensor, each has what all of them cost.

    Args:
        check: The check.
        found: What the search did.
        made: The model of its plan.
        inserted: What that has of it.
    """
    if check.comparison is None or not found.alone:
        return check
    errors = {
        place(made, output): found.alone[index]
        for index, done in by_site(found.plan, inserted).items()
        if index in found.alone
        for output in done.outputs
    }
    known = Blame(errors=errors, runs=0, samples=0)
    return replace(check, comparison=with_blame(check.comparison, known))


def _nothing(first: Check) -> Found:
    """What is found without a search."""
    return search([], {}, lambda _: Measured(met=first.assured, sqnr=0.0), wanted=None)


def _least(check: Check) -> float:
    """The SQNR that the worst output has for sure, dB; -1 where there is none."""
    outputs = () if check.comparison is None else check.comparison.outputs
    known = [one.sqnr if one.least_sqnr is None else one.least_sqnr for one in outputs]
    return min((one for one in known if one is not None), default=-1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """Plans in the ways that were chosen.

    Attributes:
        plan: What the rules make.
        others: The plan of each other way.
        groups: The sites that are chosen for together.
        errors: What each site adds in each of its ways.
        bounds: What is to be met.
    """

    plan: Plan
    others: Mapping[str, Plan]
    groups: Sequence[Group]
    errors: Errors
    bounds: Bounds

    def ways(self, chosen: Sequence[int]) -> dict[int, str]:
        """The sites, by position, that are to be other than rules want, with their ways."""
        named = ((group, group.ways[way].name) for group, way in zip(self.groups, chosen, strict=True))
        return {
            index: name
            for group, name in named
            for index in group.sites
            if name == FLOAT or (name != OWN and name in self.errors[index])
        }

    def made(self, chosen: Sequence[int]) -> Plan:
        """The plan."""
        ways = self.ways(chosen)
        instead = {index: None if way == FLOAT else self.others[way].sites[index] for index, way in ways.items()}
        return redrawn(self.plan, instead, RULE, lambda index: self._reason(index, ways[index]))

    def _reason(self, index: int, way: str) -> str:
        errors = self.errors[index]
        own, found = _decibels(errors[OWN]), _decibels(errors.get(way, 0.0))
        alone = "" if own is None else f"; alone it leaves {own:.1f} dB at the outputs"
        if way == FLOAT:
            return f"the search left it float for {self.bounds}{alone}"
        better = "" if found is None or not alone else f", and {found:.1f} dB so"
        return f"the search gave it {way} for {self.bounds}{alone} as the rules say{better}"


def _decibels(error: float) -> float | None:
    return -10 * math.log10(error) if error else None


__all__ = ["Searched", "blamed", "searched"]
