"""Blame: the error that each quantization adds alone at the outputs of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from graphquant import formats
from graphquant.accuracy.switches import Choice, switchable, switched

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from graphquant.comparison import Sites
    from graphquant.data import Batches
    from graphquant.formats import Feeds
    from graphquant.ir import Model
    from graphquant.numerics import Array

    Place = tuple[str, str]

SAMPLES = 12
"""Samples on which each quantization is tried, where samples are run one by one."""

BATCHES = 4
"""Runs of each quantization where samples are run in batches."""

BATCH = 16
"""Samples in such a batch."""

GROUP = 16
"""Quantizations that have switches in one session: each takes time also while it is off, and a session takes more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """What each quantization adds.

    Attributes:
        errors: For graph and name of each quantization op the squared error that it adds alone to the outputs, as a
            share of their squares; of the output where that is largest.
        runs: How many runs there were for all, references included.
        samples: On how many samples.
        interrupted: Whether it was stopped before all were tried.
    """

    errors: Mapping[Place, float]
    runs: int
    samples: int
    interrupted: bool = False

    @property
    def passes(self) -> float:
        """How many runs that is for each quantization."""
        return self.runs / max(len(self.errors), 1)

    def sqnr(self, graph: str, op: str) -> float | None:
        """The signal to noise in decibels that the outputs have with this quantization alone; None if not known."""
        error = self.errors.get((graph, op))
        if error is None or math.isnan(error):
            return None
        return -10 * math.log10(error) if error else math.inf


def blame(
    quant: Model,
    sites: Sites,
    batches: Batches,
    *,
    inputs: Mapping[str, str],
    batchable: bool,
    only: Collection[Place] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Blame:
    """Tries each quantization alone: the model with all others taken out, beside the model with all taken out.

    Quantizations are switched by inputs of one session for some of them; each that no input can rule, as in a
    function, gets a session of its own. All are tried on the same samples, spread over the data, so that those that
    make more of any error make more of all. Ctrl-C ends that with what is known so far.

    Args:
        quant: The quantized model.
        sites: Its quantizations beside the float model.
        batches: The data, with the inputs of the float model.
        inputs: For each input of `quant` that of the float model.
        batchable: Whether samples may be joined.
        only: The quantizations to try, all by default.
        progress: Told how many quantizations are done, and of how many.

    Raises:
        ModelError: A model cannot be run.
    """
    places, choices = _choices(quant, sites)
    feeds = list(_feeds(batches, inputs, batchable=batchable))
    wanted = [index for index, place in enumerate(places) if only is None or place in only]
    found: dict[Place, float] = {}
    runs, interrupted = 0, False
    try:
        for index, error, ran in _tried(quant, choices, wanted, feeds):
            found[places[index]] = error
            runs += ran
            if progress is not None:
                progress(len(found), len(wanted))
    except KeyboardInterrupt:
        interrupted = True
    samples = sum(_rows(feed) if batchable else 1 for feed in feeds)
    return Blame(errors=found, runs=runs, samples=samples, interrupted=interrupted)


def _tried(
    quant: Model, choices: Sequence[Choice], wanted: Collection[int], feeds: Sequence[Feeds]
) -> Iterator[tuple[int, float, int]]:
    """For each of the choices `wanted` its position, its error, and how many runs there were since the one before."""
    among = set(wanted)
    open_ = [index for index in switchable(quant, choices) if index in among]
    for start in range(0, len(open_), GROUP):
        group = open_[start : start + GROUP]
        made = switched(quant, choices, by_input=group)
        trial = _Trial(made.model, feeds, made.feed())
        for index in group:
            error = trial.error(trial, made.feed({index}))
            yield index, error, trial.new_runs()
    reference: _Trial | None = None
    for index in sorted(among - set(open_)):
        before = 0
        if reference is None:
            reference = _Trial(switched(quant, choices, by_input=()).model, feeds, {})
            before = reference.new_runs()
        alone = _Trial(switched(quant, choices, by_input=(), on={index}).model, feeds, None)
        error = alone.error(reference, {})
        yield index, error, before + alone.new_runs()


def _choices(quant: Model, sites: Sites) -> tuple[list[Place], list[Choice]]:
    """The quantizations whose float tensor is known, with their places."""
    places, choices = [], []
    for site in sites.sites:
        before = site.before if site.before is not None else site.weight
        if site.before is not None and quant.output(site.before).shape != quant.output(site.after).shape:
            before = site.reading.tensor  # a weight that is quantized in another view
        if before is not None:
            places.append((site.reading.graph, site.reading.op))
            choices.append(Choice(after=site.after, before=before))
    return places, choices


def _feeds(batches: Batches, inputs: Mapping[str, str], *, batchable: bool) -> Iterator[Feeds]:
    """A few samples, spread over the data, joined where they can be."""
    wanted = BATCHES * BATCH if batchable else SAMPLES
    count = min(batches.count, wanted)
    chosen = sorted({index * batches.count // count for index in range(count)})
    samples: Iterator[Feeds] = (
        {name: feed[source] for name, source in inputs.items()}
        for feed in (next(batches.span(index, index + 1)) for index in chosen)
    )
    while some := list(islice(samples, BATCH if batchable else 1)):
        shapes = {tuple((name, value.shape) for name, value in one.items()) for one in some}
        if len(some) > 1 and len(shapes) == 1:
            yield {name: np.concatenate([one[name] for one in some]) for name in some[0]}
        else:
            yield from some


def _rows(feed: Feeds) -> int:
    return next((len(value) for value in feed.values() if value.ndim), 1)


class _Trial:
    """A model in a session, with the samples that it is run on."""

    def __init__(self, model: Model, feeds: Sequence[Feeds], off: Feeds | None) -> None:
        """`off` are the inputs with which it is the reference; None if it is none."""
        self._runner = formats.module(model.format).runner(model)
        self._feeds = feeds
        self._runs = 0
        self.plain = [] if off is None else [self.run(feed, off) for feed in feeds]

    def run(self, feed: Feeds, switches: Feeds) -> dict[str, Array]:
        """The outputs."""
        self._runs += 1
        return self._runner.run({**feed, **switches})

    def new_runs(self) -> int:
        """How many runs there were since this was last asked."""
        runs, self._runs = self._runs, 0
        return runs

    def error(self, reference: _Trial, switches: Feeds) -> float:
        """The largest error of an output over all samples, as a share of it."""
        power: dict[str, float] = {}
        error: dict[str, float] = {}
        for feed, plain in zip(self._feeds, reference.plain, strict=True):
            found = self.run(feed, switches)
            for name, value in plain.items():
                one, other = _power_and_error(value, found.get(name))
                power[name] = power.get(name, 0.0) + one
                error[name] = error.get(name, 0.0) + other
        floats = [name for name in power if reference.plain[0][name].dtype.kind == "f"]
        shares = [error[name] / power[name] if power[name] else (math.inf if error[name] else 0.0) for name in floats]
        return max(shares, default=math.nan)


def _power_and_error(plain: Array, found: Array | None) -> tuple[float, float]:
    """Sum of squares of an output and of its differences; what has another shape is wholly wrong."""
    if plain.dtype.kind != "f":
        return 0.0, 0.0
    one = plain.astype(np.float64).reshape(-1)
    power = float(one @ one)
    if found is None or found.shape != plain.shape:
        return power, power
    with np.errstate(invalid="ignore", over="ignore"):
        off = found.astype(np.float64).reshape(-1) - one
        return power, float(off @ off)


__all__ = ["Blame", "blame"]
