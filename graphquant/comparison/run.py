"""Runs two models on the same data and measures how far they are apart, in memory that does not grow with samples."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.calibration.memory import at_once, room
from graphquant.calibration.passes import copies, feeds_of
from graphquant.comparison.difference import Difference, quiet
from graphquant.comparison.outputs import OutputTally, match_inputs, match_outputs
from graphquant.comparison.types import Comparison

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from graphquant.calibration.run import Load
    from graphquant.comparison.sites import Sites
    from graphquant.data import Batches
    from graphquant.formats import Feeds, Runner
    from graphquant.ir import TensorRef
    from graphquant.numerics import Array

    Seen = Mapping[TensorRef, list[Array]]


THREADS = 2
"""Runs at once without sites: one of each model; and threads that measure."""

AHEAD = 2
"""Runs of a watched model that there may be before they are measured, where memory allows."""

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
    most = batches.count if inside is None else inside
    all_feeds = feeds_of(batches, [(0, blocks)], load.block, batchable=batched)
    feeds, *ahead = copies(all_feeds, 1 if sites is None or watched is None else 1 + THREADS)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(THREADS))
        models = _Models(plain, quant, inputs, labels)
        if sites is not None and watched is not None:
            stack.callback(_close, ahead)
            held = at_once(2 * (load.elements or LARGE) * (load.block if batched else 1), room(None, ()), AHEAD)
            models.watch(sites, watched, [_until(most, load.block, copy) for copy in ahead], held, stack)
        done = 0
        for feed, block in feeds:
            expected, found = models.run(feed, pool, inside=done < most)
            with quiet():
                for tally in tallies:
                    tally.add(expected.get(tally.name), found.get(tally.other), feed.get(labels))
            del expected, found
            if block is not None:
                done = min((block + 1) * load.block, batches.count)
                if done >= most:
                    _close(ahead)  # else what is left would be kept for them
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


def _close(some: Iterable[Generator[object, None, None]]) -> None:
    for one in some:
        one.close()


def _until(most: int, size: int, feeds: Iterable[tuple[Feeds, int | None]]) -> Iterator[Feeds]:
    """Those of `feeds` that come before `most` samples are done, in blocks of `size`."""
    for feed, block in feeds:
        yield feed
        if block is not None and (block + 1) * size >= most:
            return


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

    def __init__(self, plain: Runner, quant: Runner, inputs: Mapping[str, str], labels: str) -> None:
        self._plain, self._quant, self._inputs, self._labels = plain, quant, inputs, labels
        self._sites: Sites | None = None
        self._watches: list[Iterator[Seen]] = []
        self._ends: Mapping[str, TensorRef] = {}
        self._proven = False
        self._waiting: list[tuple[Seen, Seen]] = []
        self._values = 0

    def watch(
        self, sites: Sites, plain: Runner, ahead: Sequence[Iterator[Feeds]], at_once: int, stack: ExitStack
    ) -> None:
        """Starts to observe both, each on its copy of the feeds, `at_once` of them ahead of `run`."""
        inside, outside = sites.watched()
        hidden, unseen = self._quant.unwatchable(inside), plain.unwatchable(outside)
        sites.forget(hidden, unseen)
        inside, outside = sites.watched()
        if outside and not sites.quantized and plain.ends.keys() >= set(self._plain.outputs):
            self._ends = plain.ends
        self._sites = sites
        shown = (
            (plain, list(dict.fromkeys([*outside, *self._ends.values()])), map(self._known, ahead[0])),
            (self._quant, [tensor for tensor in inside if tensor not in hidden], map(self._renamed, ahead[1])),
        )
        self._watches = [
            stack.enter_context(closing(runner.observe(tensors, feeds, at_once=at_once)))
            if tensors
            else ({} for _ in feeds)
            for runner, tensors, feeds in shown
        ]

    def _known(self, feed: Feeds) -> dict[str, Any]:
        """The feed without labels."""
        return {name: value for name, value in feed.items() if name != self._labels}

    def _renamed(self, feed: Feeds) -> dict[str, Any]:
        """The feed as the quantized model takes it."""
        return {name: feed[source] for name, source in self._inputs.items()}

    def run(self, feed: Feeds, pool: Executor, *, inside: bool) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
        """The outputs of both for the next feed; what is seen inside of them, if that is wanted, is measured too."""
        if not self._watches or not inside:
            beside = pool.submit(self._plain.run, self._known(feed))
            found = self._quant.run(self._renamed(feed))
            return beside.result(), found
        found = self._quant.run(self._renamed(feed))
        expected = {} if self._proven else self._plain.run(self._known(feed))
        plain, quant = map(next, self._watches)
        shown = {name: plain[tensor][-1] for name, tensor in self._ends.items() if plain[tensor]}
        if self._ends and not self._proven:
            self._proven = same(expected, shown)
            self._ends = self._ends if self._proven else {}
        elif self._proven:
            expected = shown
        self._waiting.append((quant, plain))
        self._values += sum(value.size for values in quant.values() for value in values)
        if self._values > LARGE:
            self.measure(pool)
        return expected, found

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


__all__ = ["compare"]
