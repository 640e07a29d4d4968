"""Limits are met by raising scales, never by lowering them: a worklist of those that may not hold.

A limit is mended by raising scales of its own tensors, a Fit's weight or what a Shift counts positively, so that
nothing is clipped that was not before; it costs steps at the fine end only.

Why this ends. A scale, once chosen, only grows. A Shift at least doubles the scale that it raises, and may not double
that of an activation more than `bits - 1` times in all, as beyond that no integers are left, nor that of a weight more
than OF_WEIGHTS times: one that is so far below what it is added to may as well be 0. A Fit that was mended stays so,
since the scales whose product it wants large only grow. So each raise makes the sum over all uses of the doublings that
are left to the scale there, plus the number of Fits that do not hold, smaller. A copy, for one use of a weight that
others read, leaves that sum as it is, and there are at most as many as uses. What is all zeros, as many biases are,
takes any scale and so may also be given a smaller one; it is, once at most for each Shift, as the positions that it is
held against only fall.

A limit is looked at once in the beginning, and then only when a scale of its own was raised, so the work is at most
OF_WEIGHTS times the number of uses, linear in ops and edges; where nothing has to be raised it is one look at each.

A Shift that its tensors cannot meet within their doublings is given up and told as a conflict. What it had raised
before is taken back by a second run without it; what cannot be met in that one is told and left as it is.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from graphquant.numerics import LARGEST_VALUE, SMALLEST_SCALE
from graphquant.solve.limits import Fit, Shift, limits_of
from graphquant.solve.types import Conflict
from graphquant.solve.words import shown

if TYPE_CHECKING:
    from graphquant.ir import Use
    from graphquant.numerics import Array, QParams
    from graphquant.solve.draft import Draft

ROOM = 1e-6
"""Share of int32 that is left free, so that float32 rounding of scales and quotients cannot use it up."""

OF_WEIGHTS = 31
"""How often the scale of a weight may double."""

LARGEST_EXPONENT = 127
"""Of a power of two that is a float32."""


def meet(draft: Draft) -> None:
    """Raises scales until the limits hold; tells of those that cannot, which are left as they were."""
    limits, given_up = limits_of(draft), set[int]()
    if not limits:
        return
    before = draft.state()
    Worklist(draft, limits, given_up).run()
    if any(isinstance(limits[place], Shift) for place in given_up):
        draft.go_back(before)
        Worklist(draft, limits, given_up).run()
    for place in sorted(given_up):
        limit = limits[place]
        found = _unfit(draft, limit) if isinstance(limit, Fit) else _unmet(draft, limit)
        index = draft.feeding[limit.weight if isinstance(limit, Fit) else limit.more[0]]
        if isinstance(found, Conflict):
            draft.conflict(found, index)
        elif found:
            draft.note(index, found)
            draft.change(index, found)


class Worklist:
    """Raises scales until all limits hold, or those that cannot are given up."""

    def __init__(self, draft: Draft, limits: list[Fit | Shift], given_up: set[int]) -> None:
        """`given_up` has those of the run before, by position among `limits`, and gets those of this one."""
        self.draft, self.limits, self.given_up = draft, limits, given_up
        self.doublings: dict[int, int] = {}
        self.mended: set[int] = set()
        self.touching: dict[Use, list[int]] = {}
        for place, limit in enumerate(limits):
            for use in dict.fromkeys(limit.uses):
                self.touching.setdefault(use, []).append(place)
        self.queue = deque(place for place in range(len(limits)) if place not in given_up)
        self.waiting = set(self.queue)

    def run(self) -> None:
        """Looks at each limit once, and again when a scale of its own was raised."""
        while self.queue:
            place = self.queue.popleft()
            self.waiting.discard(place)
            limit = self.limits[place]
            if isinstance(limit, Fit):
                self._mend_fit(place, limit)
            else:
                self._mend_shift(place, limit)

    def _mend_fit(self, place: int, fit: Fit) -> None:
        needed = _needed(self.draft, fit)
        if needed is None or place in self.mended:
            return
        index = self.draft.feeding[fit.weight]
        if not self.draft.movable(index):
            self.given_up.add(place)
            return
        self.mended.add(place)
        said = _times(needed, self.draft.params[index].scale)
        self._raise(index, fit.weight, needed, f"its scale was raised {said}, so that bias {fit.bias} fits int32")

    def _mend_shift(self, place: int, shift: Shift) -> None:
        over = _excess(self.draft, shift)
        if over <= 0 or self._spare(shift, over):
            return
        first = over
        counts = self._counts(shift)
        for use in shift.more:
            index = self.draft.feeding[use]
            times = counts.get(self.draft.group(index)[0], 0)
            if over <= 0 or times <= 0 or not self.draft.movable(index):
                continue
            steps = min(-(-over // times), self._left(index))
            if steps:
                why = f"its scale was raised {2**steps} times: {shift.op} had a {shift.name} {first} beyond its limit"
                self._double(index, use, steps, why)
                over -= steps * times
        if over > 0:
            self.given_up.add(place)

    def _counts(self, shift: Shift) -> dict[int, int]:
        """How often each group counts, those that count negatively below 0."""
        counts: dict[int, int] = {}
        for sign, uses in ((1, shift.more), (-1, shift.less)):
            for use in uses:
                first = self.draft.group(self.draft.feeding[use])[0]
                counts[first] = counts.get(first, 0) + sign
        return counts

    def _spare(self, shift: Shift, over: int) -> bool:
        """Moves what is all zeros, as many biases are, and has no scale of its own to lose; it takes any."""
        for use in shift.less:
            index = self.draft.feeding[use]
            own, params = self.draft.ranges.get(index), self.draft.params[index]
            zeros = own is not None and not own.low.any() and not own.high.any()
            many, smaller = len(self.draft.sites[index].uses) > 1, np.ldexp(params.scale, -over)
            if smaller < SMALLEST_SCALE or (many and not self.draft.divisible(index)):
                continue
            if zeros and self.draft.sites[index].scheme.observe.name != "fixed" and len(self.draft.group(index)) == 1:
                if many:
                    index = self.draft.split(index, use)
                self.draft.lower_scale(index, smaller)
                return True
        return False

    def _left(self, index: int) -> int:
        """How many more times the scale of a site may double, so that all of its integers stand for float32 values."""
        params, done = self.draft.params[index], self.doublings.get(self.draft.group(index)[0], 0)
        most = OF_WEIGHTS if self.draft.weights_alone(index) else params.type.bits - 1
        largest = LARGEST_EXPONENT - params.type.bits + (position_of(params) or 0)
        return max(min(most - done, largest), 0)

    def _double(self, index: int, use: Use, steps: int, why: str) -> None:
        copy = self._raise(index, use, np.ldexp(self.draft.params[index].scale, steps), why)
        first, old = self.draft.group(copy)[0], self.draft.group(index)[0]
        self.doublings[first] = self.doublings.get(old, 0) + steps

    def _raise(self, index: int, use: Use, scale: Array, why: str) -> int:
        """Raises the scale of what is read at `use`: of a copy where others read it too; returns its position."""
        if len(self.draft.sites[index].uses) > 1 and self.draft.divisible(index):
            index = self.draft.split(index, use)
            why = f"is a copy for {use}: {why}"
        self.draft.raise_scale(index, scale, why)
        for one in self.draft.group(index):
            for read in self.draft.sites[one].uses:
                for place in self.touching.get(read, ()):
                    if place not in self.waiting and place not in self.given_up:
                        self.waiting.add(place)
                        self.queue.append(place)
        return index


def _excess(draft: Draft, shift: Shift) -> int:
    """By how much a Shift is beyond its limit; 0 where a position is not known."""
    positions = {use: position for use in shift.uses if (position := position_of(draft.of(use))) is not None}
    if len(positions) < len(set(shift.uses)):
        return 0
    return sum(positions[use] for use in shift.more) - sum(positions[use] for use in shift.less) - shift.most


def _unmet(draft: Draft, shift: Shift) -> Conflict | None:
    """What is told of a Shift that was given up; None if it came to hold by what was done for others."""
    over = _excess(draft, shift)
    more, less = (draft.sites[draft.feeding[uses[0]]] for uses in (shift.more, shift.less))
    found = Conflict(
        rules=(more.rule, less.rule),
        tensors=(more.tensor, less.tensor),
        wants=(
            f"a scale that leaves {more.scheme.type.name} some integers",
            "one beside it that the hardware shifts to",
        ),
        done=f"{shift.op} has a {shift.name} {over} beyond its limit",
    )
    return found if over > 0 else None


def _unfit(draft: Draft, fit: Fit) -> Conflict | str:
    """What is told of a weight whose scale is not ours to raise."""
    needed = _needed(draft, fit)
    if needed is None:
        return ""
    if not fit.rule:
        return (
            f"with its scale, which is given, bias {fit.bias} does not fit int32; readers that make it so will cut it"
        )
    site = draft.sites[draft.feeding[fit.weight]]
    said = _times(needed, draft.params[draft.feeding[fit.weight]].scale)
    return Conflict(
        rules=(site.rule, fit.rule),
        tensors=(site.tensor, fit.bias),
        wants=("the scale that it has", f"one that is {said} larger, for int32 to hold it"),
        done="the bias stays float",
    )


def position_of(params: QParams | None) -> int | None:
    """-log2 of a scale; None if it is no single power of two."""
    if params is None or params.scale.size != 1:
        return None
    mantissa, exponent = np.frexp(params.scale.reshape(-1)[0])
    return int(1 - exponent) if mantissa == 0.5 else None  # noqa: PLR2004  # frexp's own lower end


def _power(scale: Array) -> Array:
    """The next power of two that is not smaller."""
    mantissa, exponent = np.frexp(scale)
    return np.asarray(np.ldexp(np.float32(1), exponent - (mantissa == 0.5)))  # noqa: PLR2004  # frexp's own lower end


def _times(larger: Array, scale: Array) -> str:
    """How many times larger, and where."""
    times = larger.astype(np.float64) / scale
    where = f" in {int((times > 1).sum())} of {times.size} channels" if times.ndim else ""
    return f"{shown(times[times > 1])} times{where}"


def _needed(draft: Draft, fit: Fit) -> Array | None:
    """The smallest weight scales, of the shape that they have, with which a bias fits; None if it does or nobody knows.

    Input scale times weight scale must be a normal float32 too. Where they are raised there is twice as much room as is
    asked for, so that a family's own rounding of scales cannot ask for more.
    """
    data, weight, value = draft.of(fit.data), draft.of(fit.weight), draft.bias(fit.bias)
    if data is None or weight is None or value is None or data.scale.ndim or weight.block is not None:
        return None
    if not value.size or not np.isfinite(value).all() or (weight.scale.ndim and value.size != weight.scale.size):
        return None
    farthest = np.abs(value.astype(np.float64)).reshape(-1)
    bias = farthest if weight.scale.ndim else farthest.max()
    unit = float(data.scale)
    now = unit * weight.scale.astype(np.float64)
    fits = (bias <= now * fit.most * (1 - ROOM)) & (now >= SMALLEST_SCALE)
    least = np.maximum(bias / (unit * fit.most * (1 - 2 * ROOM)), SMALLEST_SCALE * (1 + ROOM) / unit)
    if fits.all() or (least > LARGEST_VALUE / 2**weight.type.bits).any():
        return None
    larger = np.where(fits, weight.scale, np.maximum(least.astype(np.float32), weight.scale))
    pairs = draft.sites[draft.feeding[fit.weight]].scheme.scale == "power-of-two"
    return np.maximum(_power(larger), weight.scale) if pairs else larger
