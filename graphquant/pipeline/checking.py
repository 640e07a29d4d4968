"""What `insert` made beside its float model, on samples that calibration did not use."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.calibration import load_of
from graphquant.errors import MissingDependencyError, ModelError, UsageError
from graphquant.multiply_adds import multiply_adds, unsized
from graphquant.pipeline.common import stage
from graphquant.pipeline.comparing import watching, with_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphquant.calibration import Stats
    from graphquant.comparison import Comparison, OutputFigures, SiteFigures, Sites
    from graphquant.data import Batches
    from graphquant.formats import Runner
    from graphquant.ir import Model, TensorRef
    from graphquant.pipeline.common import Progress

SQNR = 20.0
"""Signal to noise in decibels that an output is expected to have; 8 bits mostly leave 25 to 45."""

LEAST = 4
"""Samples that are kept from calibration, if there are twice as many."""

FIFTHS = 5
"""One in so many samples is kept from calibration."""

ENOUGH = 32
"""Samples of a check that no bound asks for: it is to say whether a model is ruined, in little time."""

TAIL = 8
"""Where less than one in so many samples make half of an output's error, that is told."""

INSIDE = 4
"""Samples on which each quantized tensor is measured."""


SURE = "with 95% confidence"

NO_SQNR = "no output holds floats, which alone have a signal to noise"
NO_AGREEMENT = "no output has class scores or integers, which alone agree or not"
NO_ACCURACY = "the data has no 'labels' that fit an output, one of its classes for each row"
"""What is said of bounds where there is nothing to measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a quantized model must keep of its float model; None where nothing is asked.

    Attributes:
        sqnr: Signal to noise of each output, dB.
        agreement: Share of rows of each output whose largest value stays where it is, 0 to 1.
        drop: Points of accuracy that may be lost, 0 to 100.
    """

    sqnr: float | None = None
    agreement: float | None = None
    drop: float | None = None

    def __post_init__(self) -> None:
        """A UsageError if one is no number."""
        for given in filter(None, (self.sqnr, self.agreement, self.drop)):
            if not math.isfinite(given):
                raise UsageError(f"{given} is no bound. Give a number.")

    def __bool__(self) -> bool:
        return (self.sqnr, self.agreement, self.drop) != (None, None, None)

    def __str__(self) -> str:
        said = [
            f"{self.sqnr:g} dB" if self.sqnr is not None else "",
            f"{100 * self.agreement:g}% agreement" if self.agreement is not None else "",
            f"at most {self.drop:g} points of accuracy lost" if self.drop is not None else "",
        ]
        return ", ".join(filter(None, said)) or f"{SQNR:g} dB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What the check at the end of `insert` found.

    Attributes:
        comparison: Figures of each output and of each quantized tensor; None where they could not be had.
        problem: Why not, "" if they are there.
        reused: Whether ranges, corrections or a search were made with samples that are measured here.
        elsewhere: Whether calibration was of other data, as its statistics say.
        bounds: What was asked for.
        low: Multiply-adds for one sample of ops whose inputs are all quantized.
        multiply_adds: Of all ops whose sizes are known.
    """

    comparison: Comparison | None
    problem: str = ""
    reused: bool
    bounds: Bounds
    low: int = 0
    multiply_adds: int = 0
    elsewhere: bool = False

    @property
    def share(self) -> float | None:
        """The share of multiply-adds in low precision; None where there are none."""
        return self.low / self.multiply_adds if self.multiply_adds else None

    @property
    def costly(self) -> tuple[SiteFigures, ...]:
        """The quantized tensors that cost most first: by their blame where it was measured, else by their own figure.

        Biases are left out where there is no blame: by themselves small ones lose much, and the sums nothing.
        """
        sites = () if self.comparison is None else self.comparison.sites
        if self.blamed:
            return tuple(one for one in sites if one.blame is not None and one.blame < math.inf)
        return tuple(one for one in sites if one.local is not None and one.local < math.inf and not one.bias)

    @property
    def blamed(self) -> bool:
        """Whether it was measured what tensors cost the outputs; then these are in that order."""
        return self.comparison is not None and any(one.blame is not None for one in self.comparison.sites)

    @property
    def missed(self) -> tuple[str, ...]:
        """What is not as it should be, a sentence's part each; the usual bound holds where none is given."""
        if self.comparison is None:
            return (f"it could not be measured: {self.problem}",)
        found, bounds = self.comparison, self.bounds or Bounds(sqnr=SQNR)
        broken = [f"output {one.name!r} cannot be compared: {one.problem}" for one in found.outputs if one.problem]
        if found.nothing:
            broken.append(_nothing(found))
        return tuple(broken) or (
            *_sqnr(found, bounds, asked=bool(self.bounds)),
            *_agreement(found, bounds),
            *_drop(found, bounds),
        )

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """What the bounds are on and no output has, so that no model could meet them, a sentence's part each."""
        if self.comparison is None:
            return ()
        if self.comparison.nothing:
            return (_nothing(self.comparison),)
        outputs, bounds = self.comparison.outputs, self.bounds
        asked = (
            (bounds.sqnr, any(one.sqnr is not None for one in outputs), NO_SQNR),
            (bounds.agreement, any(one.agreement is not None for one in outputs), NO_AGREEMENT),
            (bounds.drop, any(one.accuracy is not None for one in outputs), NO_ACCURACY),
        )
        return tuple(said for bound, known, said in asked if bound is not None and not known)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What these samples meet of the bounds and do not show with 95% confidence, a sentence's part each."""
        return tuple(doubt for doubt, _ in self._doubts())

    @property
    def assured(self) -> bool:
        """Whether the bounds are met, and shown, but for what these samples could not show of any model."""
        return not self.missed and not any(helped for _, helped in self._doubts())

    def _doubts(self) -> list[tuple[str, bool]]:
        """The doubts, each with whether a better model would have none."""
        if self.comparison is None:
            return []
        samples = self.comparison.samples
        found = [doubt for one in self.comparison.outputs for doubt in _doubts(one, self.bounds, samples)]
        used = "these samples were used before, for ranges, corrections or a search, which fit no others as well", False
        return [*found, used] if self.reused and self.bounds else found


def _doubts(one: OutputFigures, bounds: Bounds, samples: int) -> Iterator[tuple[str, bool]]:
    """What of an output's figures may be chance."""
    if one.empty and bounds:
        yield f"output {one.name!r} was empty for all {samples} samples, which tell nothing of it", False
    if bounds.sqnr is not None and one.least_sqnr is not None and one.least_sqnr < bounds.sqnr:
        known = one.least_sqnr > -math.inf
        said = f"has {one.least_sqnr:.2f} dB at least {SURE}" if known else "was measured on too few samples to say"
        few = known and TAIL * one.half < samples
        tail = f", as {one.half} of {samples} samples make half of its error" if few else ""
        yield f"output {one.name!r} {said}{tail}", known
    if bounds.agreement is not None and one.least_agreement is not None and one.least_agreement < bounds.agreement:
        said = f"{100 * one.least_agreement:.2f}% of output {one.name!r} agree at least {SURE}"
        yield f"{said}{_rows(one.rows, 1 - bounds.agreement)}", one.agreement != 1
    if bounds.drop is not None and one.accuracy is not None and 100 * (one.most_lost or 0) > bounds.drop:
        said = f"accuracy of output {one.name!r} falls by {100 * (one.most_lost or 0):.2f} points at most {SURE}"
        yield f"{said}{_rows(one.rows, bounds.drop / 100)}", one.accuracy[1] < one.accuracy[0]


def _rows(count: int, share: float) -> str:
    """How many rows it takes, where there are too few."""
    from graphquant.comparison.confidence import rows_for

    wanted = rows_for(share)
    return f"; it takes {wanted:,} rows to show more, and there are {count:,}" if count < wanted else ""


def _nothing(found: Comparison) -> str:
    """What is said where there is nothing to compare."""
    return f"nothing was compared, since every output was empty for all {found.samples} samples"


def _sqnr(found: Comparison, bounds: Bounds, *, asked: bool) -> list[str]:
    if bounds.sqnr is None:
        return []
    known = [one for one in found.outputs if one.sqnr is not None]
    missed = [
        f"output {one.name!r} has {one.sqnr:.2f} dB, and {bounds.sqnr:g} are wanted"
        for one in known
        if one.sqnr is not None and not one.sqnr >= bounds.sqnr
    ]
    return missed if known or not asked else [NO_SQNR]


def _agreement(found: Comparison, bounds: Bounds) -> list[str]:
    if bounds.agreement is None:
        return []
    known = [one for one in found.outputs if one.agreement is not None]
    missed = [
        f"{100 * (one.agreement or 0):.2f}% of output {one.name!r} agree, and {100 * bounds.agreement:g}% are wanted"
        for one in known
        if one.agreement is not None and one.agreement < bounds.agreement
    ]
    return missed if known else [NO_AGREEMENT]


def _drop(found: Comparison, bounds: Bounds) -> list[str]:
    if bounds.drop is None:
        return []
    known = [(one.name, one.accuracy) for one in found.outputs if one.accuracy is not None]
    missed = [
        f"accuracy of output {name!r} falls from {100 * before:.2f}% to {100 * after:.2f}%, and"
        f" {bounds.drop:g} points are allowed"
        for name, (before, after) in known
        if 100 * (before - after) > bounds.drop
    ]
    return missed if known else [NO_ACCURACY]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Samples that are kept for the check.

    Attributes:
        spec: The data spec that the samples are of.
        asked: How many of its samples are used at all, None for all.
        batches: These, as they were opened.
        start: The first that is kept.
        reused: Whether calibration uses what is kept too.
        elsewhere: Whether the ranges come from statistics of other data, which may hold some of these samples too.
    """

    spec: str
    asked: int | None
    batches: Batches
    start: int
    reused: bool
    elsewhere: bool = False

    def samples(self) -> Batches:
        """What is kept, alone."""
        return _from(self.batches, self.start, None)


def parted(spec: str, asked: int | None, batches: Batches) -> tuple[Batches, Kept]:
    """What calibration uses, and what is kept for the check: the last fifth and at least 4, of 8 or more samples."""
    start = max(batches.count - max(LEAST, batches.count // FIFTHS), 0)
    few = batches.count < 2 * LEAST
    kept = Kept(spec=spec, asked=asked, batches=batches, start=start, reused=few)
    return batches if few else replace(batches, count=start), kept


def halved(batches: Batches) -> Batches:
    """What calibration uses where a search judges by the others: the first half, or all of less than 8 samples."""
    half = batches.count // 2
    return replace(batches, count=half) if half >= LEAST else batches


def searching(spec: str, asked: int | None, batches: Batches, seen: int) -> Kept:
    """What a search may look at: samples that neither gave the ranges nor are kept for the check.

    Ranges fit the samples that gave them better than all others, so that these tell nothing of others. Where less
    than 4 samples are left, they are looked at all the same.

    Args:
        spec: The data spec.
        asked: How many of its samples are used at all, None for all.
        batches: These, as they were opened.
        seen: How many of the first samples gave the ranges.
    """
    rest = parted(spec, asked, batches)[0]
    reused = seen > rest.count - LEAST
    return Kept(spec=spec, asked=asked, batches=rest, start=0 if reused else seen, reused=reused)


def given(stats: Stats | None, batches: Batches, again: Callable[[int], Batches]) -> int:
    """How many of the first samples of the data statistics are of; 0 where they are of other data.

    Args:
        stats: The statistics.
        batches: The data.
        again: Opens so many of its samples; some kinds of data have another digest for fewer.
    """
    runs = () if stats is None else stats.runs
    whole = batches.content() if runs else ""
    return max((run.samples for run in runs if run.data in {whole, again(run.samples).content()}), default=0)


def beside(spec: str, asked: int | None, batches: Batches, seen: int, *, searched: bool, stats: bool) -> Kept:
    """What to check on where the ranges come from elsewhere: all samples, or the last fifth.

    It is the last fifth where the first `seen` samples gave the ranges, or a search looked at them. `stats` tells
    whether statistics give ranges.
    """
    kept = replace(parted(spec, asked, batches)[1], elsewhere=stats and not seen)
    if searched and not seen:
        return kept
    return replace(kept, reused=kept.reused or seen > kept.start) if seen else replace(kept, start=0, reused=False)


def measured(
    source: Model, made: Model, kept: Kept, bounds: Bounds, progress: Progress | None, *, inside: bool = True
) -> Check:
    """Compares the model that was `made` with its source on the samples that were kept, few where no bound is given.

    Args:
        source: The float model.
        made: The quantized one.
        kept: The samples, with labels where their data has some.
        bounds: What is asked for.
        progress: Is told how far the work is.
        inside: Whether to measure quantized tensors and to count multiply-adds too.

    Raises:
        DataError: A sample is not what it should be.
    """
    from graphquant.comparison import sites_of

    try:
        runner = formats.module(source.format).runner(source)
        batches, labels = with_labels(kept.batches, kept.spec, runner.inputs, kept.asked)
        batches = replace(batches, count=kept.batches.count)  # what comes behind is kept for something else
        batches = _from(batches, kept.start, None if bounds else ENOUGH)
        sites = sites_of(source, made) if inside else None
        comparison = _compared(source, made, sites, runner, batches, labels, progress)
        low, everything = (0, 0) if sites is None else _work(source, sites, runner, batches, labels)
    except (MissingDependencyError, ModelError) as error:
        return Check(comparison=None, problem=str(error), reused=kept.reused, bounds=bounds)
    return Check(
        comparison=comparison,
        reused=kept.reused,
        bounds=bounds,
        low=low,
        multiply_adds=everything,
        elsewhere=kept.elsewhere,
    )


def _from(batches: Batches, start: int, most: int | None) -> Batches:
    """The samples from `start` on, at most so many."""
    count = batches.count - start
    feeds = batches.feeds
    return replace(
        batches,
        count=count if most is None else min(count, most),
        feeds=lambda first, last: feeds(start + first, start + last),
    )


def _compared(
    source: Model,
    made: Model,
    sites: Sites | None,
    runner: Runner,
    batches: Batches,
    labels: str,
    progress: Progress | None,
) -> Comparison:
    """Both models on the samples, with the quantized tensors on the first few."""
    from graphquant.comparison import compare

    load = load_of(source, batchable=runner.batchable)
    return compare(
        runner,
        formats.module(made.format).runner(made),
        batches,
        load=replace(load, block=min(load.block, INSIDE)),
        sites=sites,
        watched=watching(source, sites, runner),
        outputs={},
        labels=labels,
        inside=INSIDE,
        progress=stage(progress, "checking"),
    )


def _work(source: Model, sites: Sites, runner: Runner, batches: Batches, labels: str) -> tuple[int, int]:
    """Multiply-adds in low precision and all, for one sample."""
    counts = multiply_adds(source, sizes(source, batches, runner, labels))
    low = {(one.graph, one.op) for one in sites.coverage if one.quantized}
    return sum(count for place, count in counts.items() if place in low), sum(counts.values())


def sizes(model: Model, batches: Batches, runner: Runner | None = None, labels: str = "") -> dict[TensorRef, int]:
    """How many elements those tensors have for the first sample that multiply-adds want and only a run can tell.

    Args:
        model: The model.
        batches: The samples.
        runner: What runs the model, made here if it is wanted and not given.
        labels: The key of `batches` that is no input, "" if there is none.
    """
    wanted = unsized(model)
    if not wanted:
        return {}
    runner = runner or formats.module(model.format).runner(model)
    hidden = runner.unwatchable(wanted)
    feed = {name: value for name, value in next(batches.span(0, 1)).items() if name != labels}
    return runner.sizes([tensor for tensor in wanted if tensor not in hidden], feed)


__all__ = ["Bounds", "Check", "Kept", "beside", "given", "halved", "measured", "parted", "searching", "sizes"]
