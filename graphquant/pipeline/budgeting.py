"""The plan that loses least within so many bytes of weights."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphquant.accuracy import FLOAT, OWN, Group, Way, bound, fit, groups, ways
from graphquant.calibration import parse_size
from graphquant.comparison import sites_of
from graphquant.errors import UsageError
from graphquant.numerics import Dynamic, IntType
from graphquant.pipeline.common import stage
from graphquant.pipeline.redrawing import by_site, redrawn
from graphquant.pipeline.trying import Trials, place
from graphquant.qdq import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from graphquant.ir import Model, TensorRef, Use
    from graphquant.pipeline.checking import Bounds, Check, Kept
    from graphquant.pipeline.common import Progress
    from graphquant.pipeline.trying import Make
    from graphquant.plans import Plan
    from graphquant.rewrite import Inserted

HALVINGS = 7
"""Plans that are measured at most to find the smallest that meets a bound."""

RULE = "size-budget"
"""The rule that weights are left by, or changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A plan that fits into so many bytes.

    Attributes:
        plan: The plan; weights that differ from what rules want say so.
        size: Bytes that all constants of the written model take.
        most: Bytes that they may take; None where they are to be as few as a bound allows.
        whole: Bytes that they take in the float model.
        weights: The first use of each weight that was chosen for.
        ways: What is other than rules want, with the way.
        guessed: Weights of which nothing tells what they lose; they count as much as their bits may lose at most.
    """

    plan: Plan
    size: int
    most: int | None
    whole: int
    weights: frozenset[Use]
    ways: Mapping[TensorRef, str]
    guessed: tuple[TensorRef, ...] = ()


def fitted(
    source: Model, prepared: Model, plan: Plan, make: Make, kept: Kept | None, budget: str, progress: Progress | None
) -> Fitted:
    """Chooses bits for each weight of `plan` so that all constants fit into `budget`.

    Args:
        source: The float model.
        prepared: The same as the plan names it.
        plan: What the rules make.
        make: Makes the model of a plan, with what was inserted.
        kept: Samples on which to measure what each weight adds to the outputs; without them the error of the weight
            by itself is what counts.
        budget: Bytes, as "2MB", or a share of the float model's, as "25%".
        progress: Is told how far the work is.

    Raises:
        DataError: A sample is not what it should be.
        ModelError: A model cannot be run.
        UsageError: The budget is no size, or less than what weights take with the fewest bits; or the format keeps
            weights float.
    """
    most = _bytes(budget, stored(source))
    _check_family(plan)
    weights = _Weights(source, prepared, plan, make, kept, progress)
    found = weights.within(most, f"a budget of {budget}")
    if found.size > most:
        raise UsageError(
            f"The constants of the model take {found.size:,} bytes with the fewest bits, and the budget is {most:,}."
            f" Give --size-budget {found.size} or more, or rules that quantize more of the weights."
        )
    return found


def smallest(
    source: Model,
    prepared: Model,
    plan: Plan,
    make: Make,
    measure: Callable[[Model], Check],
    kept: Kept,
    bounds: Bounds,
    progress: Progress | None,
) -> Fitted | None:
    """Chooses bits for each weight of `plan` so that constants take the fewest bytes with which `bounds` are met.

    Args:
        source: The float model.
        prepared: The same as the plan names it.
        plan: What the rules make.
        make: Makes the model of a plan, with what was inserted.
        measure: Checks such a model on the samples of the search.
        kept: These samples.
        bounds: What is to be met.
        progress: Is told how far the work is.

    Returns:
        None where nothing smaller than what the rules make meets the bounds, or the format keeps weights float.

    Raises:
        DataError: A sample is not what it should be.
        ModelError: A model cannot be run.
    """
    if _float_families(plan) or not ways(prepared, plan, small=True):
        return None
    own = make(plan)[0]
    if not measure(own).assured:
        return None
    told = stage(progress, "searching")
    best, missed, most = None, -math.inf, stored(own)
    try:
        weights = _Weights(source, prepared, plan, make, kept, progress)
        for tried in range(HALVINGS):
            middle = missed if math.isinf(missed) else (missed + most) / 2
            found = weights.within(middle, f"{bounds}")
            if found.size >= most:
                break
            if found.size <= missed:  # there is nothing between
                missed = middle
            elif measure(make(found.plan)[0]).assured:
                best, most = replace(found, most=None), found.size
            else:
                missed = found.size
            if told is not None:
                told(tried + 1, HALVINGS)
            if math.isinf(missed):  # the fewest bits will do
                break
    except KeyboardInterrupt:
        return best
    return best


class _Weights:
    """The weights of a plan, with what each takes and loses in each of its ways."""

    def __init__(
        self, source: Model, prepared: Model, plan: Plan, make: Make, kept: Kept | None, progress: Progress | None
    ) -> None:
        """As for `fitted`."""
        self._plan, self._make, self._whole = plan, make, stored(source)
        made = {OWN: (plan, *make(plan))}
        made |= {name: (other, *make(other)) for name, other in ways(prepared, plan, small=True).items()}
        inserted = {name: by_site(one, done) for name, (one, _, done) in made.items()}
        own = inserted[OWN]
        self._sites = [i for i, done in own.items() if done.folded and plan.sites[i].scheme.observe.name != "bias"]
        errors, self._guessed = dict[str, dict[int, float]](), set[int]()
        for name, (_, model, _) in made.items():
            errors[name], unknown = _errors(prepared, model, inserted[name], self._sites, kept, progress)
            self._guessed |= unknown
        integers = _on_integers(prepared, plan, own)
        self._groups = [_group(prepared, plan, sites, inserted, errors, integers) for sites in bound(plan, self._sites)]
        self._others = {name: one for name, (one, _, _) in made.items()}
        self._rest = stored(made[OWN][1]) - sum(group.ways[0].size for group in self._groups)

    def within(self, most: float, why: str) -> Fitted:
        """The plan that loses least of those of `most` bytes, for `why`, or if none is so small the smallest."""
        fewest, room = fit(self._groups, -math.inf), most - self._rest
        while True:
            chosen = fit(self._groups, room)
            pairs = list(zip(self._groups, chosen, strict=True))
            names = {i: group.ways[way].name for group, way in pairs for i in group.sites}
            best = _plan(self._plan, self._others, names, why)
            size = stored(self._make(best)[0])
            if size <= most or chosen == fewest:
                break
            taken = sum(group.ways[way].size for group, way in pairs)
            room = taken - (size - most)  # what several share is counted for each, or for none
        sites = self._plan.sites
        return Fitted(
            plan=best,
            size=size,
            most=None if math.isinf(most) else int(most),
            whole=self._whole,
            weights=frozenset(sites[index].uses[0] for index in self._sites),
            ways={sites[index].tensor: name for index, name in names.items() if name != OWN},
            guessed=tuple(sites[index].tensor for index in sorted(self._guessed)),
        )


def stored(model: Model) -> int:
    """Bytes that the constants of a model take, those of its bodies and functions too."""
    total = 0
    for name in model.live():
        for op in model.graphs[name].ops():
            held = op.kind == "constant" or (op.kind == "input" and op.value is not None)  # old ONNX names both
            known = op.outputs[0] if held and op.outputs else None
            if known is not None and known.shape is not None and known.dtype is not None:
                total += math.ceil(math.prod(size or 0 for size in known.shape) * _bits(known.dtype) / 8)
    return total


def _bits(dtype: str) -> int:
    """Bits of an element; of texts none, which are no weights."""
    found = re.search(r"(\d+)", dtype)
    return 8 if dtype == "bool" else int(found[1]) if found else 0


def _bytes(budget: str, whole: int) -> int:
    """What `budget` says in bytes."""
    found = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,3})?)\s*%\s*", budget)
    if found:
        return int(float(found[1]) / 100 * whole)
    try:
        return parse_size(budget)
    except UsageError:
        raise UsageError(
            f"{budget[:40]!r} is no size budget. Write it in bytes, 2MB, or as a share of the float model's, 25%."
        ) from None


def _check_family(plan: Plan) -> None:
    """Refuses families that store weights as floats."""
    floats = _float_families(plan)
    if floats:
        raise UsageError(
            f"The ops of {floats[0]} round weights that stay float in the file, which gets no smaller. Leave"
            " --size-budget out, or quantize the model as ONNX."
        )


def _float_families(plan: Plan) -> list[str]:
    families = {site.scheme.family or "" for site in plan.sites if site.parameter}
    return sorted(name for name in families if not FAMILIES[name].folds)


def _errors(
    prepared: Model,
    model: Model,
    inserted: Mapping[int, Inserted],
    weights: Sequence[int],
    kept: Kept | None,
    progress: Progress | None,
) -> tuple[dict[int, float], set[int]]:
    """What each weight adds to the outputs, or to itself where there are no samples; and of which neither is known.

    Raises:
        KeyboardInterrupt: Not all are known.
    """
    here = [index for index in weights if index in inserted]
    if kept is not None:
        trials = Trials(prepared, kept, progress)
        found = trials.errors(model, inserted, here)
        if trials.interrupted:
            raise KeyboardInterrupt
    else:
        local = {(one.graph, one.op): one.local for one in sites_of(prepared, model).figures()}
        lost = {index: local.get(place(model, inserted[index].output)) for index in here}
        found = {index: 10 ** (-known / 10) for index, known in lost.items() if known is not None}
    guessed = {index: _guess(inserted[index]) for index in here if index not in found}
    return {**found, **guessed}, {*guessed}


def _guess(done: Inserted) -> float:
    """What a weight loses of itself by its bits alone, rather more than less: it is to keep them, if another can."""
    return 1.0 if isinstance(done.params, Dynamic) else 4.0 ** (2 - _bits(done.params.type.container))


def _group(
    prepared: Model,
    plan: Plan,
    sites: Sequence[int],
    inserted: Mapping[str, Mapping[int, Inserted]],
    errors: Mapping[str, Mapping[int, float]],
    integers: Collection[int],
) -> Group:
    """Weights of one scale, with the ways that all of them have; none that multiplies `integers` becomes float."""
    found = [
        Way(
            name=name,
            error=sum(errors[name][index] for index in sites),
            size=sum(_size(prepared, plan, index, done[index]) for index in sites),
        )
        for name, done in inserted.items()
        if all(index in done for index in sites)
    ]
    if not set(sites) & set(integers):
        found.append(Way(name=FLOAT, error=0.0, size=sum(_size(prepared, plan, index, None) for index in sites)))
    return Group(sites=tuple(sites), ops=frozenset(), ways=tuple(found))


def _on_integers(prepared: Model, plan: Plan, taken: Collection[int]) -> set[int]:
    """Positions of sites beside an op that multiplies on a quantized activation."""
    found = groups(prepared, plan, sorted(taken), {})
    ops = {op for group in found for index in group.sites if not plan.sites[index].parameter for op in group.ops}
    return {index for group in found if group.ops & ops for index in group.sites}


def _size(prepared: Model, plan: Plan, index: int, done: Inserted | None) -> int:
    """Bytes of a weight, with its scales and zero points; in float for None."""
    known = prepared.output(plan.sites[index].tensor)
    count: int = math.prod(size or 0 for size in known.shape or ())
    floats = _bits(known.dtype or "")
    if done is None or isinstance(done.params, Dynamic):
        return count * floats // 8
    held, cells = _bits(done.params.type.container), int(done.params.scale.size)
    return -(-count * held // 8) - (-cells * held // 8) + cells * floats // 8


def _plan(plan: Plan, others: Mapping[str, Plan], names: Mapping[int, str], wanted: str) -> Plan:
    """The plan of the ways that were chosen."""
    instead = {
        index: None if name == FLOAT else others[name].sites[index] for index, name in names.items() if name != OWN
    }

    def why(index: int) -> str:
        other = instead[index]
        if other is None:
            return f"there is room for it in {wanted}"
        dtype = other.scheme.type
        bits = f"{dtype.bits} bits" if isinstance(dtype, IntType) else dtype.name
        return f"of all weights it loses least with {bits} for {wanted}"

    return redrawn(plan, instead, RULE, why)


__all__ = ["Fitted", "fitted", "smallest", "stored"]
