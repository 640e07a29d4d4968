"""Corrections before calibration and once scales are known, on a few of the samples that give the scales."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.calibration import load_of
from graphquant.corrections import BALANCINGS, CLIPPING, Balanced, Corrected, Draft, Samples, balance, correct
from graphquant.errors import ModelError, UsageError, did_you_mean
from graphquant.ruleset import CORRECTIONS, NOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from graphquant.data import Batches
    from graphquant.formats import Feeds, Runner
    from graphquant.ir import Model
    from graphquant.plans import Plan
    from graphquant.solve import Solution

SAMPLES, MOST_SAMPLES = 32, 128
"""Samples that are looked at, every second one to correct by, the others to check with: more of them in small models,
where they cost little."""

LARGEST = 1 << 28
"""Elements of weights, of which corrections hold a second copy: 1 GB."""

ELEMENTS = 1 << 24
"""Elements that the activations of all samples may have where there are more than `SAMPLES`."""

TOO_LARGE = "the weights are so many that a second copy of them takes too much memory"

SPANS = 8
"""Places in the data that they are taken from."""


def balanced(prepared: Model, made: Plan, used: Batches | None, *, stats: bool) -> Balanced:
    """The prepared model and its plan after the corrections that change what calibration sees.

    Args:
        prepared: The prepared model, which stays as it is.
        made: The plan.
        used: The samples that will give the scales, None where there are none.
        stats: Whether statistics are given, which are of the model as it is.

    Raises:
        DataError: A sample cannot be read.
    """
    wanted = [name for name in made.corrections if name in BALANCINGS]
    plain = Balanced(model=prepared, plan=made)
    if not wanted or not made.sites:
        return plain
    reason = "the statistics are of the model as it is" if stats else ""
    if used is not None and used.random:
        reason = "made-up data says nothing of ranges"
    if _size(prepared, made) > LARGEST:
        reason = TOO_LARGE
    if reason:  # clipping looks at weights alone
        plain = replace(plain, told=_told((name for name in wanted if name != CLIPPING), reason))
        return plain if CLIPPING not in wanted else _after(plain, balance(prepared, made, [CLIPPING], None))
    try:
        return balance(prepared, made, wanted, None if used is None else _samples(prepared, made, used))
    except ModelError as error:
        return replace(plain, told=_told(wanted, str(error)))


def _after(one: Balanced, other: Balanced) -> Balanced:
    return replace(other, told=(*one.told, *other.told))


def corrected(prepared: Model, solution: Solution, made: Plan, used: Batches | None) -> Draft:
    """The model and its solution after the corrections of the plan, and what they did.

    Args:
        prepared: The prepared model, which stays as it is.
        solution: Scales and zero points of its plan.
        made: The plan.
        used: The samples that gave the scales, None where there are none.

    Raises:
        DataError: A sample cannot be read.
    """
    draft = Draft(before=prepared, model=prepared, solution=solution)
    wanted = [name for name in made.corrections if name not in BALANCINGS]
    if not wanted or not solution.params:
        return draft
    if used is None:
        return _none(draft, wanted, "it needs samples, and statistics keep none")
    if used.random:
        return _none(draft, wanted, "made-up data says nothing of means")
    if _size(prepared, made) > LARGEST:
        return _none(draft, wanted, TOO_LARGE)
    try:
        return correct(prepared, solution, wanted, _samples(prepared, made, used))
    except ModelError as error:  # what the check of the result tells too, if it is not the corrections' alone
        return _none(draft, wanted, str(error))


def _samples(prepared: Model, made: Plan, used: Batches) -> Samples:
    """Every second one of some samples to correct by, the others to check with."""
    runner = formats.module(prepared.format).runner
    elements = load_of(prepared, batchable=False).elements
    if elements is None and used.count > SAMPLES:
        elements = _measured(runner(prepared), made, next(iter(used.span(0, 1))))
    count = SAMPLES if elements is None else min(max(ELEMENTS // max(elements, 1), SAMPLES), MOST_SAMPLES)
    feeds = list(_some(used, count))
    return Samples(feeds=feeds[::2], others=feeds[1::2], runner=runner)


def _measured(runner: Runner, made: Plan, feed: Feeds) -> int:
    """Elements that quantized activations have in one run, where shapes do not tell."""
    tensors = list(dict.fromkeys(site.tensor for site in made.sites if not site.parameter))
    refused = runner.unwatchable(tensors)
    return sum(runner.sizes([tensor for tensor in tensors if tensor not in refused], feed).values())


def _none(draft: Draft, wanted: Iterable[str], reason: str) -> Draft:
    """The draft as it is, and why."""
    return replace(draft, told=_told(wanted, reason))


def _told(wanted: Iterable[str], reason: str) -> tuple[Corrected, ...]:
    return tuple(
        Corrected(correction=name, target="model", detail=f"left out: {reason}", done=False) for name in wanted
    )


def _size(prepared: Model, made: Plan) -> int:
    """Elements of the weights that are quantized, as far as they are told."""
    shapes = (prepared.output(site.tensor).shape for site in made.sites if site.parameter)
    return sum(math.prod(size or 1 for size in shape) for shape in shapes if shape is not None)


def chosen(wanted: Sequence[str], given: Sequence[str]) -> tuple[str, ...]:
    """The corrections that rules want, with what a caller wants beside them or does not want.

    Raises:
        UsageError: There is no such correction.
    """
    for name in given:
        plain = name.removeprefix(NOT)
        if plain not in CORRECTIONS:
            known = did_you_mean(plain, CORRECTIONS) or f" Known are {', '.join(CORRECTIONS)}."
            raise UsageError(f"There is no correction {plain[:60]!r}.{known}")
    asked = {*wanted, *(name for name in given if not name.startswith(NOT))}
    return tuple(name for name in CORRECTIONS if name in asked and NOT + name not in given)


def _some(batches: Batches, count: int) -> Iterator[Feeds]:
    """`count` of the samples, from all over the data."""
    if batches.count <= count:
        yield from batches
        return
    each = count // SPANS
    for span in range(SPANS):
        start = span * (batches.count - each) // (SPANS - 1)
        yield from batches.span(start, start + each)


__all__ = ["balanced", "chosen", "corrected"]
