"""Runs two models on the same data and measures how far they are apart, in memory that does not grow with samples."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from graphquant.calibration.passes import feeds_of
from graphquant.comparison.difference import quiet
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
"""Values of one run from which they are worth a thread more."""


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
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Runs both models on all samples.

    Each runs as it is, for its outputs, and once more beside the other with its quantized tensors shown: a runtime may
    compute on integers only where nobody looks.

    Args:
        plain: Runs the float model.
        quant: Runs the quantized one.
        batches: The data, with the inputs of `plain`.
        load: What running the float model takes.
        sites: What to measure inside of them, None for the outputs alone.
        watched: Runs the float model as `sites` has it, None without sites.
        outputs: For names of the float model's outputs those of the quantized one's; others are matched.
        labels: The key under which `batches` has labels, "" if there are none.
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
        watching = None if sites is None or watched is None else _Watching(sites, watched, quant, inputs, stack)
        for feed, block in feeds_of(batches, [(0, blocks)], load.block, batchable=batched):
            known = {name: value for name, value in feed.items() if name != labels}
            expected, found = plain.run(known), quant.run(_renamed(known, inputs))
            with quiet():
                for tally in tallies:
                    tally.add(expected.get(tally.name), found.get(tally.other), feed.get(labels))
            del expected, found
            if watching is not None:
                watching.add(known, pool)
            if block is not None:
                done = min((block + 1) * load.block, batches.count)
                if progress is not None:
                    progress(done, batches.count)
    return Comparison(
        samples=batches.count,
        random=batches.random,
        outputs=tuple(tally.figures() for tally in tallies),
        sites=() if sites is None else sites.figures(),
        labels=labels,
    )


class _Watching:
    """Both models running beside each other, with their tensors shown."""

    def __init__(self, sites: Sites, plain: Runner, quant: Runner, inputs: Mapping[str, str], stack: ExitStack) -> None:
        self._sites, self._inputs = sites, inputs
        inside, outside = sites.watched()
        hidden, unseen = quant.unwatchable(inside), plain.unwatchable(outside)
        sites.forget(hidden, unseen)
        inside, outside = sites.watched()
        self._feeds: list[Feeds] = [{}, {}]
        self._large = True
        shown = ((plain, outside, 0), (quant, [tensor for tensor in inside if tensor not in hidden], 1))
        self._runs = [
            stack.enter_context(closing(runner.observe(tensors, self._fed(side)))) if tensors else None
            for runner, tensors, side in shown
        ]

    def _fed(self, side: int) -> Iterator[Feeds]:
        """The feed of the moment, whenever one is asked for."""
        while True:
            yield self._feeds[side]

    def add(self, feed: Feeds, pool: Executor) -> None:
        """Runs both on `feed` and adds what is seen."""
        self._feeds = [feed, _renamed(feed, self._inputs)]
        run = pool.map if self._large else map
        plain, quant = run(lambda one: {} if one is None else next(one), self._runs)
        self._large = sum(value.size for values in quant.values() for value in values) > LARGE
        left = iter(self._sites.sites)

        def some(_thread: int) -> None:
            with quiet():
                for site in left:
                    site.add(quant, plain)

        list(pool.map(some, range(THREADS)) if self._large else map(some, range(1)))


def _renamed(feed: Feeds, inputs: Mapping[str, str]) -> dict[str, Any]:
    """The feed as the other model takes it."""
    return {name: feed[source] for name, source in inputs.items()}


__all__ = ["compare"]
