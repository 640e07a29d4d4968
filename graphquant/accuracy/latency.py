"""The fastest plan: what takes longer quantized than float is left float, as measured; docs/decisions/0067."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant.accuracy.costs import BEHIND, HOPS, THROUGH, bound, site_read
from graphquant.ir import Parameters, TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from graphquant.accuracy.timing import Ratio
    from graphquant.ir import Model
    from graphquant.plans import Plan

    Place = tuple[str, str]
    Left = tuple[int, ...]

PLANS = 16
"""Plans that are timed at most."""

FASTER = 0.995
"""What a plan takes of the time of the one before at most, for it to be kept."""

WORTH = 0.002
"""The share of a run's time that is looked for."""

IDLE = frozenset({"input", "constant", "variable", "read_variable"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Sites that are quantized together or not at all.

    Attributes:
        sites: Their positions in the plan.
        ops: What computes on them or makes them.
    """

    sites: tuple[int, ...]
    ops: frozenset[Place]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Where the time of one plan goes.

    Attributes:
        ops: Seconds of each op, with those that it absorbs.
        sites: Seconds of the conversions that each site takes.
    """

    ops: Mapping[Place, float]
    sites: Mapping[int, float]

    @property
    def whole(self) -> float:
        """Seconds in all."""
        return sum(self.ops.values()) + sum(self.sites.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """What was found.

    Attributes:
        left: Positions of the sites that are to be left float.
        plans: How many plans were timed.
        interrupted: Whether that was stopped before its end.
    """

    left: Left
    plans: int
    interrupted: bool


def fastest(
    parts: Sequence[Part],
    profile: Callable[[Left], Profile],
    compare: Callable[[Left, Left], Ratio],
    progress: Callable[[int, int], None] | None = None,
) -> Fastest:
    """Leaves float what makes the model faster.

    Profiles say what may be gained, and in which order to try; what is kept was faster when timed beside the plan
    before. What does not help together is tried by halves.

    Args:
        parts: The sites.
        profile: Where the time goes with these sites left float.
        compare: How long the plan that leaves the first sites takes, as a share of the one that leaves the second.
        progress: Told how many plans were timed, and of how many at most.
    """
    return _Race(parts, profile, compare, progress).run()


class _Race:
    """One search: the best plan so far, and what was tried in vain."""

    def __init__(
        self,
        parts: Sequence[Part],
        profile: Callable[[Left], Profile],
        compare: Callable[[Left, Left], Ratio],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._parts, self._profile, self._compare, self._progress = parts, profile, compare, progress
        self._best: frozenset[int] = frozenset()
        self._vain: set[frozenset[int]] = set()
        self._plans = 0

    def run(self) -> Fastest:
        """Leaves more and more, until nothing is to be gained."""
        interrupted = False
        try:
            plain = self._profile(self._sites(frozenset(range(len(self._parts)))))
            while self._plans < PLANS and self._step(plain):
                pass
        except KeyboardInterrupt:
            interrupted = True
        return Fastest(left=self._sites(self._best), plans=self._plans, interrupted=interrupted)

    def _step(self, plain: Profile) -> bool:
        """Tries to leave what the profile of the best plan says, then less of it; whether anything helped."""
        now = self._profile(self._sites(self._best))
        gains = {op: now.ops.get(op, 0.0) - plain.ops.get(op, 0.0) for op in {*now.ops, *plain.ops}}
        chosen = self._promising(gains, now.sites, WORTH * now.whole)
        while chosen and self._plans < PLANS:
            wanted = self._closed({*self._best, *chosen})
            if wanted != self._best and wanted not in self._vain:
                if self._faster(wanted):
                    self._best = wanted
                    return True
                self._vain.add(wanted)
            chosen = chosen[: len(chosen) // 2]
        return False

    def _promising(self, gains: Mapping[Place, float], sites: Mapping[int, float], least: float) -> list[int]:
        """Parts that take less float, with all that this makes float, the largest gain first."""
        floats = {op for index in self._best for op in self._parts[index].ops}

        def value(index: int) -> float:
            part = self._parts[index]
            freed = sum(gains.get(op, 0.0) for op in sorted(part.ops - floats))
            return freed + sum(sites.get(site, 0.0) for site in part.sites)

        open_ = [index for index, part in enumerate(self._parts) if part.ops and index not in self._best]
        chosen = []
        for index in sorted(open_, key=lambda one: (-value(one), one)):
            if value(index) > least:  # what was chosen before may have made it worth more or less
                chosen.append(index)
                floats |= self._parts[index].ops
        return chosen

    def _closed(self, chosen: Collection[int]) -> frozenset[int]:
        """`chosen`, and the parts that no op computes on any more where these are float."""
        floats = {op for index in chosen for op in self._parts[index].ops}
        freed = {index for index, part in enumerate(self._parts) if part.ops and part.ops <= floats}
        every = {index for index, part in enumerate(self._parts) if part.ops}
        return frozenset(range(len(self._parts))) if every <= freed else frozenset({*chosen, *freed})

    def _faster(self, wanted: frozenset[int]) -> bool:
        found = self._compare(self._sites(wanted), self._sites(self._best))
        self._plans += 1
        if self._progress is not None:
            self._progress(self._plans, PLANS)
        return found.median < FASTER and found.high < 1

    def _sites(self, chosen: Collection[int]) -> Left:
        return tuple(sorted(site for index in chosen for site in self._parts[index].sites))


def parts_of(model: Model, plan: Plan, taken: Collection[int]) -> list[Part]:
    """The sites `taken` of a plan in parts, in their order.

    Args:
        model: The prepared model.
        plan: The plan.
        taken: Positions of the sites that are quantized.
    """
    owner = {use: index for index in taken for use in plan.sites[index].uses}
    fused = Fused(model)
    ops: dict[int, set[Place]] = {index: set() for index in taken}
    for name in model.live():
        graph = model.graphs[name]
        for op in graph.ops():
            if op.kind not in THROUGH:
                for slot in range(len(graph.slots(op.name))):
                    index = site_read(model, Use(name, op.name, slot), owner)
                    if index is not None:
                        ops[index].add(fused.into((name, op.name)))
    for index in taken:
        tensor = plan.sites[index].tensor
        if not plan.sites[index].parameter:
            ops[index].add(fused.into((tensor.graph, tensor.op)))
    idle = {place for found in ops.values() for place in found if model.graphs[place[0]].op(place[1]).kind in IDLE}
    return [
        Part(sites=tuple(sites), ops=frozenset(place for index in sites for place in ops[index]) - idle)
        for sites in bound(plan, taken)
    ]


class Fused:
    """Which op of a model others are absorbed by, as runtimes do."""

    def __init__(self, model: Model) -> None:
        """Of `model`."""
        self._model, self._parameters = model, Parameters(model)

    def into(self, place: Place) -> Place:
        """The op whose result `place` adds a bias to, limits, or hands on; itself if it does none of these."""
        for _ in range(HOPS):
            before = self._before(place)
            if before is None:
                break
            place = before.graph, before.op
        return place

    def _before(self, place: Place) -> TensorRef | None:
        graph = self._model.graphs[place[0]]
        op = graph.op(place[1])
        if op.kind in BEHIND:
            return graph.producer(Use(*place, 0))
        if op.kind in {"add", "mul"}:
            read = [tensor for tensor in graph.slots(op.name) if tensor is not None]
            moving = [tensor for tensor in read if not self._parameters.is_parameter(tensor)]
            return moving[0] if len(moving) < len(read) and len(moving) == 1 else None
        return None


__all__ = ["Fastest", "Fused", "Part", "Profile", "fastest", "parts_of"]
