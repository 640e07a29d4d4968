"""The fastest plan on this machine, and whether what was made is faster than float at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.pipeline.common import stage
from graphquant.pipeline.redrawing import by_site, redrawn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphquant.accuracy import Profile, Ratio
    from graphquant.data import Batches
    from graphquant.formats import Feeds
    from graphquant.ir import Model, TensorRef
    from graphquant.pipeline.common import Progress
    from graphquant.plans import Plan
    from graphquant.rewrite import Inserted

    Left = tuple[int, ...]
    Make = Callable[[Plan], tuple[Model, Sequence[Inserted]]]
    Place = tuple[str, str]

RULE = "latency"
"""The rule that sites are left by."""

SECONDS = 0.6
"""How long two plans are timed beside each other."""

AGAIN = 3
"""In how many pairs of new sessions the fastest plan is held against that of the rules."""

PAIRS = 5
"""How often the outcome is timed beside float, in new sessions: where these lie in memory makes some percent."""

SAMPLES = 8
"""Samples that models with branches, loops or functions are run on."""

LEAST = 0.95
"""What the outcome takes of float's time at most, in the middle of these: as much comes and goes with what
else is in memory, and for less nobody gives accuracy away."""

FASTER = "on this machine float is faster"
HARDLY = "on this machine it would hardly be faster, and a gain below 5% comes and goes"
UNSURE = "on this machine it would not surely be faster"

RUNTIMES = {"onnx": "onnxruntime", "tensorflow": "TensorFlow"}
LITE = "TFLite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What was found about time; no two runs find the same figures.

    Attributes:
        runtime: What ran the models, on one thread.
        samples: On how many samples a run is.
        plan: The plan, in which sites that are left float are skips with their reason.
        rules: What the rules make, beside float.
        outcome: What was made in the end, beside float; that of `rules` or of the plan where nothing was faster.
        left: What is left float.
        plans: How many plans were timed.
        interrupted: Whether that was stopped before its end.
        costs: Seconds that each op takes more in float than on integers.
        why: Why nothing is quantized, a sentence's part; "" if something is.
    """

    runtime: str
    samples: int
    plan: Plan
    rules: Ratio | None
    outcome: Ratio | None = None
    left: tuple[TensorRef, ...] = ()
    plans: int = 0
    interrupted: bool = False
    costs: Mapping[Place, float]
    why: str = ""

    @property
    def floats(self) -> bool:
        """Whether nothing is quantized, since float is faster."""
        return not self.plan.sites


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How models are timed.

    Attributes:
        source: The float model.
        feeds: Samples, on all of which a run is.
        lite: Whether as TFLite files, which are run on zeros.
    """

    source: Model
    feeds: Sequence[Feeds]
    lite: bool

    @property
    def runtime(self) -> str:
        """What runs them."""
        return LITE if self.lite else RUNTIMES[self.source.format]

    @property
    def samples(self) -> int:
        """On how many samples a run is."""
        return 1 if self.lite else len(self.feeds)

    def run_of(self, model: Model) -> Callable[[], object]:
        """What runs `model` once."""
        if self.lite:
            from graphquant.formats.tensorflow import timed_lite

            return timed_lite(model)
        return formats.module(model.format).timed(model, self.feeds)

    @classmethod
    def on(cls, source: Model, batches: Batches, *, lite: bool) -> Timing:
        """On one sample, or on some spread over the data where samples may take other ways through the model.

        Raises:
            DataError: A sample is not what it should be.
        """
        count = min(batches.count, SAMPLES if len(source.live()) > 1 else 1)
        chosen = [index * batches.count // count for index in range(count)]
        return cls(source=source, feeds=[next(batches.span(at, at + 1)) for at in chosen], lite=lite)

    def middle(self, one: Model, other: Model, pairs: int) -> Ratio:
        """How long `one` takes as a share of `other`, in the middle of some pairs of new sessions."""
        from graphquant.accuracy import ratio

        found = [ratio(self.run_of(one), self.run_of(other), seconds=SECONDS) for _ in range(pairs)]
        return sorted(found, key=lambda each: each.median)[pairs // 2]

    def quickest(self, prepared: Model, plan: Plan, make: Make, progress: Progress | None) -> Timed:
        """Leaves float what makes the model faster.

        Args:
            prepared: The float model as the plan names it.
            plan: What the rules make.
            make: Makes the model of a plan, with what was inserted.
            progress: Is told how far the work is.

        Raises:
            ModelError: A model cannot be run.
        """
        from graphquant.accuracy import fastest, parts_of, ratio

        plain = replace(plan, corrections=())  # which change numbers, not how long they take
        built = lru_cache(2)(lambda left: make(_without(plain, left, "")))
        run_of = lru_cache(2)(lambda left: self.run_of(built(left)[0]))
        if not built(())[1]:
            return Timed(runtime=self.runtime, samples=self.samples, plan=plan, rules=None, costs={})
        rules = ratio(run_of(()), self.run_of(self.source), seconds=SECONDS)
        profiles = None if self.lite else _Profiles(prepared, plan, built, self.feeds)
        if profiles is None or not profiles.known:
            return Timed(runtime=self.runtime, samples=self.samples, plan=plan, rules=rules, plans=1, costs={})
        found = fastest(
            parts_of(prepared, plan, profiles.taken),
            profiles.of,
            lambda one, other: ratio(run_of(one), run_of(other), seconds=SECONDS),
            progress=stage(progress, "timing"),
        )
        left = found.left
        if left and self.middle(built(left)[0], built(())[0], AGAIN).median >= 1:
            left = ()  # where the memory of those sessions lies was what was faster
        return Timed(
            runtime=self.runtime,
            samples=self.samples,
            plan=_without(plan, left, f"it was faster in float, in {self.runtime} on this machine"),
            rules=rules,
            left=tuple(plan.sites[index].tensor for index in left),
            plans=found.plans + 1,
            interrupted=found.interrupted,
            costs=profiles.costs(),
        )

    def confirmed(self, timed: Timed, plan: Plan, made: Model) -> Timed:
        """`plan` if the model that was `made` of it is faster than the source, else one that leaves all float.

        Raises:
            ModelError: A model cannot be run.
        """
        if timed.rules is None:
            return replace(timed, plan=plan)
        if not plan.sites:
            why = "what is fastest does not meet the bounds" if timed.plan.sites else FASTER
            return replace(timed, plan=plan, outcome=timed.rules, why=why)
        middle = self.middle(made, self.source, PAIRS)
        timed = replace(timed, plan=plan, outcome=middle, plans=timed.plans + 1)
        return timed if middle.median <= LEAST and middle.high < 1 else _nothing(timed, middle)


def _nothing(timed: Timed, found: Ratio) -> Timed:
    """The same with nothing quantized."""
    why = FASTER if found.median >= 1 else HARDLY if found.median > LEAST else UNSURE
    said = f"{why}; in {timed.runtime} a run takes {found.median:.2f} times as long if this is quantized"
    rest = tuple(site.tensor for site in timed.plan.sites)
    plan = _without(timed.plan, range(len(rest)), said)
    return replace(timed, plan=plan, left=(*timed.left, *rest), why=why)


class _Profiles:
    """Where the time of plans goes, by the names of the prepared model."""

    def __init__(
        self,
        prepared: Model,
        plan: Plan,
        built: Callable[[Left], tuple[Model, Sequence[Inserted]]],
        feeds: Sequence[Feeds],
    ) -> None:
        from graphquant.accuracy import Fused

        self._prepared, self._plan, self._built, self._feeds = prepared, plan, built, feeds
        self._fused = Fused(prepared)
        self._module = formats.module(prepared.format)
        self._made: dict[Left, Profile] = {}
        self._plain = self._module.spent(prepared, feeds)
        self.taken = sorted(by_site(plan, built(())[1]))

    @property
    def known(self) -> bool:
        """Whether the runtime tells what ops take."""
        return self._plain is not None

    def of(self, left: Left) -> Profile:
        """That of the plan that leaves these sites float."""
        if left not in self._made:
            self._made[left] = self._profile(left)
        return self._made[left]

    def costs(self) -> dict[Place, float]:
        """Seconds that each op that multiplies takes more in float."""
        from graphquant.accuracy import in_multiply_adds

        low, high = self.of(()), self.of(tuple(self.taken))
        saved = {op: high.ops.get(op, 0.0) - low.ops.get(op, 0.0) for op in in_multiply_adds(self._prepared, {})}
        least = 1e-3 * max([*saved.values(), 1e-6])
        return {op: max(value, least) for op, value in saved.items()}

    def _profile(self, left: Left) -> Profile:
        from graphquant.accuracy import Profile

        model, inserted = (self._prepared, ()) if {*left} >= {*self.taken} else self._built(left)
        spent = self._plain if model is self._prepared else self._module.spent(model, self._feeds)
        if spent is None:
            return Profile(ops={}, sites={})
        by_place = self._inserted(model, inserted)
        ops: dict[Place, float] = {}
        sites: dict[int, float] = {}
        for place, seconds in spent.ops.items():
            if self._knows(place):
                here = self._fused.into(place)
                ops[here] = ops.get(here, 0.0) + seconds
        for place, seconds in spent.conversions.items():
            if place in by_place:
                sites[by_place[place]] = sites.get(by_place[place], 0.0) + seconds
        return Profile(ops=ops, sites=sites)

    def _knows(self, place: Place) -> bool:
        return place[0] in self._prepared.graphs and place[1] in self._prepared.graphs[place[0]]

    def _inserted(self, model: Model, inserted: Sequence[Inserted]) -> dict[Place, int]:
        """The ops that each site's pair consists of, and the one whose result it quantizes, with the site."""
        found: dict[Place, int] = {}
        for index, done in by_site(self._plan, inserted).items():
            if not done.site.parameter:
                found.setdefault((done.site.tensor.graph, done.site.tensor.op), index)
            for output in done.outputs:
                found[output.graph, output.op] = index
                before = model.graphs[output.graph].slots(output.op)
                if before and before[0] is not None and not self._knows((before[0].graph, before[0].op)):
                    found[before[0].graph, before[0].op] = index
        return found


def _without(plan: Plan, left: Sequence[int], why: str) -> Plan:
    """The plan with the sites `left` as skips."""
    return redrawn(plan, dict.fromkeys(left), RULE, lambda _index: why)


__all__ = ["Timed", "Timing"]
