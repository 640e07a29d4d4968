"""Which range each tensor of some statistics was given, by which method, what it costs, and what others would pick."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.calibration import METHODS, needs_data
from graphquant.calibration.cones import cones
from graphquant.errors import DataError
from graphquant.numerics import Grid, QParams, Range
from graphquant.sketch import OBSERVERS, Cost, Sketch, estimate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from graphquant.calibration import Stats
    from graphquant.ir import Model, TensorRef
    from graphquant.plans import Plan, Site
    from graphquant.solve import Solution
    from graphquant.survey import Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """What a method would pick for a tensor by itself.

    Attributes:
        method: The observer.
        params: Scale and zero point.
        cost: What they cost.
    """

    method: str
    params: QParams
    cost: Cost | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """One tensor, and the range that it was given.

    Attributes:
        tensor: The tensor.
        sketch: What calibration saw of it; None where no sample gave it a value.
        rule: The rule that quantizes it, "" for none that is known.
        method: The observer that picked the range, with its arguments; "" where that is not known.
        like: For "auto" what it came to: "minmax", "mse", or "mse, widened"; else "".
        params: Scale and zero point; None where there are none.
        cost: What they cost, None where it cannot be estimated.
        others: What each method would pick.
        note: A word on it: why it has no range, or with what it shares one.
    """

    tensor: TensorRef
    sketch: Sketch | None
    rule: str = ""
    method: str = ""
    like: str = ""
    params: QParams | None = None
    cost: Cost | None = None
    others: tuple[Other, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picks:
    """Statistics, and what was made of them.

    Attributes:
        stats: The statistics, as they are in their file.
        path: That file, None if there is none.
        model: What the model is called beside which they are shown, "" if there is none.
        by_name: Whether the model says itself how tensors are quantized, so that only their names tell which is which.
        picks: The tensors; with a model, that which loses most comes first.
    """

    stats: Stats
    path: Path | None = None
    model: str = ""
    by_name: bool = False
    picks: tuple[Pick, ...]


def seen(stats: Stats, path: Path | None = None) -> Picks:
    """Statistics by themselves, in the order of the model."""
    picks = tuple(
        Pick(tensor=tensor, sketch=_known(stats.sketches, tensor), note=stats.unseen(tensor))
        for tensor in stats.targets
    )
    return Picks(stats=stats, path=path, picks=picks)


def by_plan(
    plan: Plan,
    solution: Solution,
    sketches: Mapping[TensorRef, Sketch],
    stats: Stats,
    path: Path | None = None,
    model: str = "",
    *,
    others: bool = False,
) -> Picks:
    """What a plan gives each of its sites that statistics tell about.

    Args:
        plan: The plan.
        solution: The scales that were found for it.
        sketches: What the statistics have of its tensors, under the plan's names.
        stats: The statistics.
        path: Their file.
        model: What the plan's model is called.
        others: Whether to find out what other methods would pick, which takes some 50 ms a tensor.
    """
    wanting = set(map(id, needs_data(plan)))
    picks = []
    for index, site in enumerate(plan.sites):
        if site.parameter or (site.tensor not in sketches and id(site) not in wanting):
            continue
        params, skip = solution.params.get(index), solution.skips.get(index)
        one = Pick(
            tensor=site.tensor,
            sketch=_known(sketches, site.tensor),
            rule=site.rule,
            method=_method(site),
            params=params if isinstance(params, QParams) else None,
            note=skip.reason if skip else "; ".join(solution.notes.get(index, ())),
        )
        picks.append(_judged(one, site.scheme.grid, others=others))
    return Picks(stats=stats, path=path, model=model, picks=_worst_first(picks))


def held(stats: Stats, prepared: Model, plan: Plan, same: Mapping[TensorRef, str]) -> dict[TensorRef, Sketch]:
    """The statistics, as far as there are any, of tensors that get their range from elsewhere: from a fixed scale.

    Args:
        stats: The statistics.
        prepared: The model that the plan names.
        plan: The plan.
        same: Cones that are known otherwise; see `graphquant.calibration.kept`.
    """
    known_else = {site.tensor for site in needs_data(plan)}
    live = set(prepared.live())
    rest = [s.tensor for s in plan.sites if not s.parameter and s.tensor.graph in live and s.tensor not in known_else]
    if not rest:
        return {}
    whole = {target.cone: tensor for tensor, target in stats.targets.items() if target.axis is None}
    known = cones(prepared, rest, same)
    found = {tensor: whole[known[tensor]] for tensor in rest if known[tensor] in whole}
    return {tensor: stats.sketches[other] for tensor, other in found.items() if other in stats.sketches}


def by_name(found: Survey, stats: Stats, path: Path | None = None, *, others: bool = False) -> Picks:
    """What the quantization ops of a model do to the tensors of statistics that are called the same.

    Raises:
        DataError: None is called the same.
    """
    picks = []
    for reading in found.readings:
        if reading.tensor not in stats.targets:
            continue
        params = reading.params if isinstance(reading.params, QParams) else None
        one = Pick(
            tensor=reading.tensor,
            sketch=_known(stats.sketches, reading.tensor),
            rule=reading.rule,
            params=params,
            note=stats.unseen(reading.tensor) or ("" if params else "its range is that of each run"),
        )
        picks.append(_judged(one, _grid(params) if params else None, others=others))
    if not picks:
        raise DataError(
            "The statistics are of another model, and this one quantizes none of their tensors. Give the model that"
            " they were made of, or one that insert made from it."
        )
    called = str(found.model.path or "the model")
    return Picks(stats=stats, path=path, model=called, by_name=True, picks=_worst_first(picks))


def _worst_first(picks: Iterable[Pick]) -> tuple[Pick, ...]:
    return tuple(sorted(picks, key=lambda one: (one.cost is None, one.cost.sqnr if one.cost else 0.0)))


def _judged(one: Pick, grid: Grid | None, *, others: bool) -> Pick:
    """The pick with what it costs, and beside what other methods would pick on `grid` for the tensor by itself."""
    if one.params is None or one.sketch is None or one.sketch.inf or grid is None:
        return one
    cost = estimate(one.sketch, one.params)
    if cost is None:
        return one
    methods = METHODS if others else ("auto", "minmax", "mse") if one.method == "auto" else ()
    ranges = {name: found for name in methods if (found := _range(name, one.sketch, grid)) is not None}
    like = _like(ranges) if one.method == "auto" else ""
    if not others:
        return replace(one, cost=cost, like=like)
    compared = []
    for name, picked in ranges.items():
        params = _params(picked, one.params, grid)
        compared.append(Other(method=name, params=params, cost=estimate(one.sketch, params)))
    return replace(one, cost=cost, like=like, others=tuple(compared))


def _range(method: str, sketch: Sketch, grid: Grid) -> Range | None:
    """What an observer picks with the arguments that it has by default; None where it cannot."""
    observer = OBSERVERS[method]
    defaults = {name: argument.default for name, argument in observer.arguments.items()}
    try:
        return observer.pick(sketch, grid, {name: value for name, value in defaults.items() if value is not None})
    except DataError:
        return None


def _params(picked: Range, chosen: QParams, grid: Grid) -> QParams:
    """Scale and zero point for a range; unsigned ones that were chosen with no zero point count from 0.0."""
    if grid.symmetric and grid.type.middle and not chosen.zero_point.any():
        return replace(grid, symmetric=False).choose(Range(np.zeros(()), np.maximum(picked.high, 0.0)))
    return grid.choose(picked)


def _grid(params: QParams) -> Grid:
    """What scale and zero point tell of their scheme."""
    fixed = bool((params.zero_point == params.type.middle).all())
    return Grid(type=params.type, symmetric=fixed, narrow=params.narrow)


def _like(ranges: Mapping[str, Range]) -> str:
    """What the range of `auto` came to."""
    auto = ranges.get("auto")
    if auto is None:
        return ""
    return next((name for name in ("minmax", "mse") if ranges.get(name) == auto), "mse, widened")


def _method(site: Site) -> str:
    """The observer of a site, with the arguments that its rule gives."""
    if site.scale is not None or site.range is not None:
        return "given by the plan"
    observe = site.scheme.observe
    return " ".join([observe.name, *(f"{value:g}" for value in observe.arguments.values())])


def _known(sketches: Mapping[TensorRef, Sketch], tensor: TensorRef) -> Sketch | None:
    found = sketches.get(tensor)
    return found if found is not None and found.count else None
