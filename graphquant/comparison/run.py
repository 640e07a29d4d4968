"""Runs two models on the same data and measures how far they are apart, in memory that does not grow with samples."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.calibration.passes import feeds_of
from graphquant.comparison.difference import Difference, quiet
from graphquant.comparison.outputs import OutputTally, match_inputs, match_outputs
from graphquant.comparison.types import Comparison

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Executor

    from graphquant.calibration.run import Load
    from graphquant.comparison.sites import Sites
    from graphquant.data import Batches
    from graphquant.formats import Feeds, Runner
    from graphquant.ir import TensorRef
    from graphquant.numerics import Array

    Seen = Mapping[TensorRef, list[Array]]


THREADS = 2
"""Runs at once: one of each model."""

LARGE = 1 << 16
"""Values from which they are worth a thread more. Those of fewer are kept until as many have come together."""

ROUNDING = 80.0
"""dB from which two outputs differ by how floats are rounded in another order: 24 bits less what sums lose."""


def compare(
    plain: Runner,
    quant: Runner,
    batches: Batches,
    *,
    load: Load,
    sites: Sites | None,
    watched: Runner | None,
    outputs: Mapping[str, str],
    labels: str = "",
    inside: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Runs both models on all samples.

    Each runs as it is, for its outputs, and once more with its tensors shown, for a runtime may compute on integers
    only where nobody looks. The float model is no longer run as it is once it gave the same outputs while watched.

    Args:
        plain: Runs the float model.
        quant: Runs the quantized one.
        batches: The data, with the inputs of `plain`.
        load: What running the float model takes.
        sites: What to measure inside of them, None for the outputs alone.
        watched: Runs the float model as `sites` has it, None without sites.
        outputs: For names of the float model's outputs those of the quantized one's; others are matched.
        labels: The key under which `batches` has labels, "" if there are none.
        inside: The sites are measured in runs until so many samples are done, None for all.
        progress: Told how many samples are done, and of how many.

    Raises:
        ModelError: A model cannot be run.
        UsageError: The models' inputs or outputs do not match.
    """
    inputs = match_inputs(plain.inputs, quant.inputs)
    matched = match_outputs(plain.outputs, quant.outputs, outputs)
    batched = plain.batchable and quant.batchable and load.elements is not None
    tallies = [OutputTally(name, other, batched=batched) for name, other in matched.items()]
    blocks = -(-batches.count // load.block)
    done = 0
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(THREADS))
        models = _Models(plain, quant, watched, sites, inputs, stack)
        for feed, block in feeds_of(batches, [(0, blocks)], load.block, batchable=batched):
            known = {name: value for name, value in feed.items() if name != labels}
            run = models.run if inside is None or done < inside else models.run_plainly
            expected, found = run(known, pool)
            with quiet():
                for tally in tallies:
                    tally.add(expected.get(tally.name), found.get(tally.other), feed.get(labels))
            del expected, found
            if block is not None:
                done = min((block + 1) * load.block, batches.count)
                if progress is not None:
                    progress(done, batches.count)
        models.measure(pool)
    return Comparison(
        samples=batches.count,
        random=batches.random,
        outputs=tuple(tally.figures() for tally in tallies),
        sites=() if sites is None else sites.figures(),
        labels=labels,
    )


def same(expected: Mapping[str, Array], found: Mapping[str, Array]) -> bool:
    """Whether outputs are the same but for how floats are rounded."""
    if expected.keys() != found.keys():
        return False
    for name, value in expected.items():
        difference = Difference()
        if value.dtype.kind == "f" and value.shape == found[name].shape:
            with quiet():
                difference.add(value, found[name], full=True)
            if difference.sqnr < ROUNDING:
                return False
        elif not np.array_equal(value, found[name]):
            return False
    return True


class _Models:
    """Both models, which run beside each other, as they are and with their tensors shown."""

    def __init__(
        self,
        plain: Runner,
        quant: Runner,
        watched: Runner | None,
        sites: Sites | None,
        inputs: Mapping[str, str],
        stack: ExitStack,
    ) -> None:
        self._plain, self._quant, self._inputs = plain, quant, inputs
        self._sites = sites
        self._feeds: list[Feeds] = [{}, {}]
        self._watches: list[Iterator[Seen] | None] = [None, None]
        self._ends: Mapping[str, TensorRef] = {}
        self._proven = False
        self._waiting: list[tuple[Seen, Seen]] = []
        self._values = 0
        self._large = True
        if sites is not None and watched is not None:
            self._watch(sites, watched, stack)

    def _watch(self, sites: Sites, plain: Runner, stack: ExitStack) -> None:
        """Starts to observe both."""
        inside, outside = sites.watched()
        hidden, unseen = self._quant.unwatchable(inside), plain.unwatchable(outside)
        sites.forget(hidden, unseen)
        inside, outside = sites.watched()
        if outside and not sites.quantized and plain.ends.keys() >= set(self._plain.outputs):
            self._ends = plain.ends
        shown = (
            (plain, list(dict.fromkeys([*outside, *self._ends.values()]))),
            (self._quant, [tensor for tensor in inside if tensor not in hidden]),
        )
        self._watches = [
            stack.enter_context(closing(runner.observe(tensors, self._fed(side)))) if tensors else None
            for side, (runner, tensors) in enumerate(shown)
        ]

    def _fed(self, side: int) -> Iterator[Feeds]:
        """The feed of the moment, whenever one is asked for."""
        while True:
            yield self._feeds[side]

    def run(self, feed: Feeds, pool: Executor) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
        """The outputs of both for `feed`; what is seen inside of them is measured now or later."""
        self._feeds = [feed, _renamed(feed, self._inputs)]
        work: list[Callable[[], Any]] = [partial(self._seen, 1), partial(self._seen, 0)]  # the slowest first
        work += [partial(self._quant.run, self._feeds[1])]
        work += [] if self._proven else [partial(self._plain.run, feed)]
        done = pool.map if self._large else map
        quant, plain, found, *ran = done(lambda one: one(), work)
        shown = {name: plain[tensor][-1] for name, tensor in self._ends.items() if plain[tensor]}
        expected = ran[0] if ran else shown
        if self._ends and not self._proven:
            self._proven = same(expected, shown)
            self._ends = self._ends if self._proven else {}
        size = sum(value.size for values in quant.values() for value in values)
        self._large = size > LARGE
        self._values += size
        self._waiting.append((quant, plain))
        if self._values > LARGE:
            self.measure(pool)
        return expected, found

    def run_plainly(self, feed: Feeds, pool: Executor) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
        """The outputs of both for `feed`, with nothing seen inside of them."""
        work = [partial(self._plain.run, feed), partial(self._quant.run, _renamed(feed, self._inputs))]
        expected, found = (pool.map if self._large else map)(lambda one: one(), work)
        return expected, found

    def _seen(self, side: int) -> Seen:
        """What is observed of a model in the next run."""
        watch = self._watches[side]
        return {} if watch is None else next(watch)

    def measure(self, pool: Executor) -> None:
        """Measures what was seen and not measured yet."""
        left = iter(self._sites.sites if self._sites is not None else ())

        def some(_thread: int) -> None:
            with quiet():
                for site in left:
                    site.add(self._waiting)

        list(pool.map(some, range(THREADS)) if self._values > LARGE else map(some, range(1)))
        self._waiting.clear()
        self._values = 0


def _renamed(feed: Feeds, inputs: Mapping[str, str]) -> dict[str, Any]:
    """The feed as the other model takes it."""
    return {name: feed[source] for name, source in inputs.items()}


__all__ = ["compare"]
