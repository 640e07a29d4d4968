"""What quantization is drawn on a graph: that of a quantized model, of a plan, or of what `insert` made."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from graphquant.numerics import Dynamic, IntType, QParams
from graphquant.picked import Pick
from graphquant.sketch import estimate
from graphquant.view.text import scheme_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphquant.ir import TensorRef, Use
    from graphquant.numerics import Array
    from graphquant.picked import Picks
    from graphquant.pipeline import Result
    from graphquant.plans import Plan, Skip
    from graphquant.survey import StoredTensor, Survey


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Numbers:
    """Scale and zero point as they are drawn.

    Attributes:
        scale: float32, one or several, real units per step.
        zero_point: Integers, steps; as many.
        axis: The channel axis, or that of the blocks, where there are several.
        block: How many elements along `axis` have one scale; None where there are no blocks.
        low: The smallest value that is represented, real units; one or several, none where it is not known.
        high: The largest one.
    """

    scale: Array
    zero_point: Array
    axis: int | None = None
    block: int | None = None
    low: Array = field(default_factory=partial(np.empty, 0))
    high: Array = field(default_factory=partial(np.empty, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Badge:
    """How one tensor is quantized for those that read it, or will be.

    Attributes:
        tensor: The float tensor, or the constant that is stored as integers.
        name: What else it is called: the file's own name where scales are in tensors.
        dtype: The type of the quantized values, "" where that is not known.
        numbers: Scale and zero point; None where they are not known, not known yet, or computed in each run.
        dynamic: Whether they are computed in each run.
        rule: The rule, "" where none is known.
        why: That rule's reason.
        scheme: The scheme in words, "" where it is not known.
        note: A word on it: with what it shares its scale, that its range is learned, how it rounds.
        pick: What calibration saw of the tensor and what the range costs.
        place: The quantization op, as graph and name; two empty texts where none is in the model.
    """

    tensor: TensorRef
    name: str = ""
    dtype: str = ""
    numbers: Numbers | None = None
    dynamic: bool = False
    rule: str = ""
    why: str = ""
    scheme: str = ""
    note: str = ""
    pick: Pick | None = None
    place: tuple[str, str] = ("", "")


@dataclass(slots=True, kw_only=True)
class Marks:
    """Badges and where they belong.

    Attributes:
        badges: The badges.
        by_op: For quantization ops that are in the model, (graph, op), the badge.
        by_use: For uses that are not rerouted yet the badge.
        by_tensor: For tensors that keep their scale themselves the badge.
        reasons: For uses that a rule asked for and that stay float the reason.
        coverage: For ops that multiply, (graph, op), why they stay float, "" where they do not; empty for a plan.
    """

    badges: list[Badge] = field(default_factory=list)
    by_op: dict[tuple[str, str], int] = field(default_factory=dict)
    by_use: dict[Use, int] = field(default_factory=dict)
    by_tensor: dict[TensorRef, int] = field(default_factory=dict)
    reasons: dict[Use, str] = field(default_factory=dict)
    coverage: dict[tuple[str, str], str] = field(default_factory=dict)


def of_survey(found: Survey, why: Mapping[str, str], picks: Picks | None = None) -> Marks:
    """The quantization that is in a model.

    Args:
        found: What was found in it.
        why: The reasons of rules by their names.
        picks: Statistics of tensors that are called the same.
    """
    marks = Marks()
    seen = _by_tensor(picks)
    for one in found.readings:
        marks.by_op[one.graph, one.op] = len(marks.badges)
        notes = (f"rounds {one.round}" if one.round else "", "its range is learned" if one.learned else "")
        badge = Badge(
            tensor=one.tensor,
            dtype=one.params.type.name if one.params is not None else "",
            numbers=_numbers(one.params),
            dynamic=one.params is None or isinstance(one.params, Dynamic),
            rule=one.rule,
            why=why.get(one.rule, ""),
            note="; ".join(note for note in notes if note),
            pick=seen.get(one.tensor),
            place=(one.graph, one.op),
        )
        marks.badges.append(badge)
    for stored in found.tensors:
        if stored.stored.scale.size or stored.stored.details:
            marks.by_tensor[stored.tensor] = len(marks.badges)
            marks.badges.append(_stored(stored))
    marks.coverage = {(one.graph, one.op): one.reason for one in found.coverage}
    return marks


def of_plan(plan: Plan, picks: Picks | None = None) -> Marks:
    """What a plan will insert."""
    marks = Marks()
    seen = _by_tensor(picks)
    for site in plan.sites:
        marks.by_use.update(dict.fromkeys(site.uses, len(marks.badges)))
        pick = seen.get(site.tensor)
        badge = Badge(
            tensor=site.tensor,
            dtype=site.scheme.type.name,
            numbers=_numbers(pick.params) if pick is not None else None,
            dynamic=site.scheme.range == "dynamic",
            rule=site.rule,
            why=site.why,
            scheme=scheme_text(site),
            pick=pick,
        )
        marks.badges.append(badge)
    _give_reasons(marks, plan.skips)
    return marks


def of_result(result: Result, found: Survey) -> Marks:
    """What `insert` made of a model; `found` is the survey of the rewritten one."""
    plan = result.plan
    marks = of_survey(found, {site.rule: site.why for site in plan.sites})
    sketches = result.stats.sketches if result.stats is not None else {}
    for done in result.inserted:
        place = marks.by_op.get(done.output[:2])
        if place is None:
            continue
        site, sketch = done.site, sketches.get(done.site.tensor)
        params = done.params if isinstance(done.params, QParams) else None
        pick = None
        if sketch is not None and sketch.count:
            cost = None if params is None or sketch.inf else estimate(sketch, params)
            pick = Pick(tensor=site.tensor, sketch=sketch, params=params, cost=cost, method=site.scheme.observe.name)
        notes = [note for note in (result.notes.get(site.tensor, ""), marks.badges[place].note) if note]
        marks.badges[place] = replace(
            marks.badges[place], why=site.why, scheme=scheme_text(site), note="; ".join(notes), pick=pick
        )
    _give_reasons(marks, result.skips)
    return marks


def _give_reasons(marks: Marks, skips: Sequence[Skip]) -> None:
    for skip in skips:
        said = f"{skip.reason} (rule {skip.rule})" if skip.rule else skip.reason
        marks.reasons.update(dict.fromkeys(skip.uses, said))


def _by_tensor(picks: Picks | None) -> dict[TensorRef, Pick]:
    return {one.tensor: one for one in picks.picks} if picks is not None else {}


def _numbers(params: QParams | Dynamic | None) -> Numbers | None:
    if not isinstance(params, QParams):
        return None
    low, high = params.range.low, params.range.high
    return Numbers(
        scale=params.scale, zero_point=params.zero_point, axis=params.axis, block=params.block, low=low, high=high
    )


def _stored(one: StoredTensor) -> Badge:
    """The badge of a tensor that keeps its scale itself."""
    stored, dtype = one.stored, one.output.dtype or ""
    numbers = None
    if stored.scale.size and stored.scale.size == stored.zero_point.size:
        axis = stored.axis if stored.scale.size > 1 else None
        numbers = Numbers(scale=stored.scale, zero_point=stored.zero_point, axis=axis)
        with suppress(ValueError):  # an int64 bias: what it represents is of no interest
            limits = IntType.parse(dtype).limits()
            wide, zero = stored.scale.astype(np.float64), stored.zero_point.astype(np.float64)
            numbers = replace(numbers, low=(limits[0] - zero) * wide, high=(limits[1] - zero) * wide)
    return Badge(tensor=one.tensor, name=one.output.name, dtype=dtype, numbers=numbers, note=stored.details)
