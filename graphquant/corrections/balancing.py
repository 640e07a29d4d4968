"""Steps before calibration: channels scaled, and weights clipped, so that rounding will cost less.

Factors are powers of two, so every float of the scaled model is that of the model before, or the same with another
exponent: the function stays the same to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.corrections import clipping, equalize, migrate
from graphquant.corrections.check import SURE, keep
from graphquant.corrections.scaling import add_factor, powers, rescale
from graphquant.corrections.seeing import UNSEEN, facts, look, ranges
from graphquant.corrections.types import Corrected, Draft
from graphquant.ir import bulk, check
from graphquant.solve import solve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphquant.corrections.types import Samples
    from graphquant.ir import Model, TensorRef
    from graphquant.numerics import Array
    from graphquant.plans import Plan

INEXACT: Final = "its values are so large or small that scaling them would not be exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """A prepared model and its plan before calibration, as far as they are corrected.

    Attributes:
        model: The model, perhaps with other weights.
        plan: Its plan.
        moved: The tensors whose channels are scaled, and the constants beside them.
        added: The products by factors that were put in, each with what it multiplies.
        told: What was done.
    """

    model: Model
    plan: Plan
    moved: frozenset[TensorRef] = frozenset()
    added: Mapping[TensorRef, TensorRef] = field(default_factory=dict)
    told: tuple[Corrected, ...] = ()

    def saying(self, told: tuple[Corrected, ...]) -> Balanced:
        """The same, having told this."""
        return replace(self, told=told)

    def before(self, plan: Plan) -> Plan:
        """`plan`, made of this one's, as a plan for the model that nothing was put into."""
        sites = (replace(site, tensor=self.added.get(site.tensor, site.tensor)) for site in plan.sites)
        return replace(plan, sites=tuple(sites)) if self.added else plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancing:
    """One kind of correction that is made before calibration.

    Attributes:
        why: What it is good for, for people.
        run: Corrects a model and its plan by samples, if there are any.
    """

    why: str
    run: Callable[[Balanced, Samples | None], Balanced]


@bulk()
def equalize_layers(given: Balanced, _: Samples | None) -> Balanced:
    """Scales channels so that the weights before and behind them have like ranges; see `equalize`."""
    known = facts(given.model, given.plan)
    told, chosen = [], []
    for number, stream in enumerate(known.streams):
        reason = known.unfit(stream)
        makes = [weight for weight in known.weights[number] if not weight.held.reads and weight.steps is not None]
        if not reason and not any(weight.axis is None for weight in makes):
            reason = equalize.PER_CHANNEL
        if reason:
            told.append(_left(equalize.NAME, stream.name, reason))
        else:
            chosen.append(number)
    factors = equalize.equalizing(
        [known.streams[number] for number in chosen],
        {place: known.weights[number] for place, number in enumerate(chosen)},
    )
    work = given.model.copy()
    moved = set(given.moved)
    for place, number in enumerate(chosen):
        stream, by = known.streams[number], powers(factors[place])
        if np.all(by == 1):
            told.append(_left(equalize.NAME, stream.name, equalize.EVEN))
        elif not rescale(work, stream, by):
            told.append(_left(equalize.NAME, stream.name, INEXACT))
        else:
            told.append(_done(equalize.NAME, stream.name, by))
            moved.update((*stream.tensors, *(held.home for held in stream.held)))
    return replace(given, model=work, moved=frozenset(moved), told=(*given.told, *told))


@bulk()
def migrate_scales(given: Balanced, samples: Samples | None) -> Balanced:
    """Scales channels so that activations fill their common range; see `migrate`."""
    if samples is None:
        return replace(given, told=(*given.told, _left(migrate.NAME, "model", "left out: it needs data")))
    known = facts(given.model, given.plan)
    parts = {number: migrate.parts(known, number) for number in range(len(known.streams))}
    look(known, [part for found in parts.values() for part in found], samples)
    work, plan, moved, told = given.model.copy(), given.plan, set(given.moved), []
    added = dict(given.added)
    for number, stream in enumerate(known.streams):
        reason = known.unfit(stream)
        if not parts[number]:
            told.append(_left(migrate.NAME, stream.name, reason))
        for part in parts[number]:
            least = migrate.OWN_GAIN if reason else migrate.GAIN
            costs = known.costs(number, part)
            choice = None if costs is None or not costs.levels else migrate.strongest(costs)
            if choice is None:
                told.append(_left(migrate.NAME, part.name, UNSEEN if costs is None else migrate.FLOAT))
            elif choice.gain < least:
                told.append(_left(migrate.NAME, part.name, migrate.SMALL.format(f"{least:.0f}")))
            elif not rescale(work, part, choice.by):
                told.append(_left(migrate.NAME, part.name, INEXACT))
            else:
                said = f"strength {choice.strength:.1f}, errors predicted to fall by {choice.gain:.1f} dB"
                if reason:
                    plan, product = add_factor(work, plan, part, choice.by)
                    added[product] = part.start
                    said += ", by a product of its own"
                else:
                    moved.update(part.tensors)
                moved.update(held.home for held in part.held)
                told.append(_done(migrate.NAME, part.name, choice.by, said))
    return Balanced(model=work, plan=plan, moved=frozenset(moved), added=added, told=(*given.told, *told))


@bulk()
def clip_weights(given: Balanced, _: Samples | None) -> Balanced:
    """Gives weights the range of least squared error; see `clipping`."""
    plan, told = clipping.clip_weights(given.plan)
    return replace(given, plan=plan, told=(*given.told, *told))


BALANCINGS: dict[str, Balancing] = {
    equalize.NAME: Balancing(
        why="with one scale for all channels of a weight, channels of small weights are lost",
        run=equalize_layers,
    ),
    migrate.NAME: Balancing(
        why="a few large channels take the range from all others, and weights have room for them",
        run=migrate_scales,
    ),
    clipping.NAME: Balancing(
        why="with few bits, steps for the largest weights are too wide for all others",
        run=clip_weights,
    ),
}
"""The corrections that are made before calibration by name, in their order."""


def balance(model: Model, plan: Plan, wanted: Sequence[str], samples: Samples | None) -> Balanced:
    """The model and its plan after those of the corrections named in `wanted` that are made before calibration.

    One after which outputs are not nearer to the float model's, on samples that it was not made by, is left out.

    Args:
        model: The prepared model, which stays as it is.
        plan: Its plan.
        wanted: Names of corrections.
        samples: What to correct by; None where nothing needs data, so that nothing is known of values.

    Raises:
        ModelError: The model cannot be run.
    """
    now = Balanced(model=model, plan=plan)
    asked = [name for name in BALANCINGS if name in wanted]
    if samples is None:
        for name in asked:
            now = BALANCINGS[name].run(now, None)
            check(now.model, name)
        return now

    def drafted(one: Balanced) -> Draft:
        seen = ranges(one.model, one.plan, samples)
        return Draft(before=one.model, model=one.model, solution=solve(one.model, one.plan, seen))

    return keep(now, [(name, BALANCINGS[name].run, SURE) for name in asked], drafted, samples)


def _left(name: str, target: str, reason: str) -> Corrected:
    return Corrected(correction=name, target=target, detail=reason, done=False)


def _done(name: str, target: str, by: Array, said: str = "") -> Corrected:
    return Corrected(
        correction=name,
        target=target,
        detail=f"{np.count_nonzero(by != 1)} of {len(by)} channels scaled by 1/{by.max():g} to {1 / by.min():g}"
        + (f"; {said}" if said else ""),
    )


__all__ = ["BALANCINGS", "Balanced", "balance"]
