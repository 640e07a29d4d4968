"""What a few samples show of a model before calibration: ranges of what its plan quantizes, channels of its streams."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.calibration import needs_data
from graphquant.corrections.costs import Costs, Seen, Weight, levels_of, weight_of
from graphquant.corrections.streams import Stream, streams
from graphquant.ir import Model, Parameters, TensorRef, Use
from graphquant.sketch import Accumulator, Sketch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.corrections.layouts import Layout
    from graphquant.corrections.types import Samples
    from graphquant.numerics import Array
    from graphquant.plans import Plan, Site

FIXED: Final = "a tensor of it has a range that is given, not observed"

UNSEEN: Final = "no sample reaches it, or it cannot be observed"

FINE_BITS, FINE, COARSE = 8, 10, 7
"""Bits above which histograms are fine, and mantissa bits of fine and coarse ones."""


@dataclass(slots=True, kw_only=True)
class Facts:
    """A model with its plan, and what is known of its streams.

    Attributes:
        model: The prepared model.
        plan: Its plan.
        streams: The model's streams.
        weights: The weights beside each stream, by its number.
        seen: What the channels of streams' tensors hold.
        sites: The sites that quantize each tensor.
    """

    model: Model
    plan: Plan
    streams: list[Stream]
    weights: dict[int, list[Weight]] = field(default_factory=dict)
    seen: dict[TensorRef, Seen] = field(default_factory=dict)
    sites: dict[TensorRef, list[Site]] = field(default_factory=dict)

    def unfit(self, stream: Stream) -> str:
        """Why the channels of a stream cannot be scaled, "" if they can."""
        if stream.blocked:
            return stream.blocked
        observed = {id(site) for site in needs_data(self.plan)}
        fixed = (
            site
            for tensor in stream.tensors
            for site in self.sites.get(tensor, ())
            if id(site) not in observed and site.scheme.range != "dynamic" and site.twin is None
        )
        return FIXED if any(fixed) else ""

    def costs(self, number: int, stream: Stream) -> Costs | None:
        """What rounding costs a stream; None where samples do not tell.

        Args:
            number: Whose weights to take.
            stream: The stream, or a part of it.
        """
        levels: dict[TensorRef, float] = {}
        for tensor in stream.tensors:
            for site in self.sites.get(tensor, ()):
                steps = levels_of(site)
                if steps is not None and site.axis is None:
                    levels[tensor] = min(levels.get(tensor, steps), steps)
        wanted = dict.fromkeys((*levels, *stream.multiplied))
        if not stream.multiplied or any(tensor not in self.seen for tensor in wanted):
            return None
        inside = {held.use for held in stream.held}
        weights = [weight for weight in self.weights[number] if weight.held.use in inside]
        return Costs(
            stream=stream,
            seen={tensor: self.seen[tensor] for tensor in wanted},
            levels=levels,
            reads=[weight for weight in weights if weight.held.reads and weight.held.weight],
            makes=[weight for weight in weights if not weight.held.reads],
        )


def facts(model: Model, plan: Plan) -> Facts:
    """What is known of a model without running it.

    Raises:
        ModelError: A weight cannot be read.
    """
    found = Facts(model=model, plan=plan, streams=streams(model))
    for site in plan.sites:
        if not site.parameter:
            found.sites.setdefault(site.tensor, []).append(site)
    by_use = {use: site for site in plan.sites for use in site.uses}
    _weigh(found, by_use)
    return found


def _weigh(found: Facts, by_use: dict[Use, Site]) -> None:
    """Adds the weights beside each stream, reduced along the axes that no channels lie along."""
    parameters = Parameters(found.model)
    kept: defaultdict[TensorRef, set[int]] = defaultdict(set)
    for stream in found.streams:
        for held in stream.held:
            kept[held.home].update(axis for axis, size in enumerate(held.places.shape) if size > 1)
    for number, stream in enumerate(found.streams):
        found.weights[number] = []
        for held in stream.held:
            read = found.model.graphs[held.use.graph].producer(held.use)
            value = None if read is None else parameters.value(read)
            if value is not None and (held.weight or held.scale):
                weight = weight_of(found.model, held, value, by_use.get(held.use), kept[held.home])
                found.weights[number].append(weight)


def look(found: Facts, chosen: Sequence[Stream], samples: Samples) -> None:
    """Adds what the samples that corrections are made by show of some streams.

    Raises:
        ModelError: The model cannot be run.
    """
    places = {
        tensor: (layout, stream.channels)
        for stream in chosen
        for tensor, layout in stream.tensors.items()
        if tensor in stream.multiplied or tensor in found.sites
    }
    runner = samples.runner(found.model)
    refused = runner.unwatchable(list(places))
    shown = [tensor for tensor in places if tensor not in refused]
    rows: dict[TensorRef, list[Seen]] = {}
    for seen in runner.observe(shown, samples.feeds) if shown else ():
        for tensor in shown:
            made = (channels_of(value, *places[tensor]) for value in seen[tensor])
            rows.setdefault(tensor, []).extend(one for one in made if one is not None)
    for tensor, parts in rows.items():
        if parts:
            low, high, power = (np.stack(column) for column in zip(*parts, strict=True))
            found.seen[tensor] = Seen(low.min(0), high.max(0), power.mean(0))


def ranges(model: Model, plan: Plan, samples: Samples) -> dict[TensorRef, Sketch]:
    """What calibration would keep of the samples that corrections are made by.

    Raises:
        ModelError: The model cannot be run.
    """
    observed: dict[TensorRef, Accumulator] = {}
    for site in needs_data(plan):
        bits = FINE if site.scheme.type.bits > FINE_BITS else COARSE
        observed[site.tensor] = Accumulator(site.axis, 0 if site.axis is not None else bits)
    runner = samples.runner(model)
    refused = runner.unwatchable(list(observed))
    shown = [tensor for tensor in observed if tensor not in refused]
    for seen in runner.observe(shown, samples.feeds) if shown else ():
        for tensor in shown:
            for value in seen[tensor]:
                if value.size:
                    observed[tensor].add(value)
                    observed[tensor].close_block()
    return {tensor: observed[tensor].sketch() for tensor in shown}


def channels_of(value: Array, layout: Layout, channels: int) -> Seen | None:
    """What the channels of a tensor hold in one run; None where it does not have as many, or has other numbers."""
    if value.ndim < -layout.axis or not value.size or value.shape[layout.axis] % (channels * layout.block):
        return None
    last = np.moveaxis(value, layout.axis, -1)
    split = last.reshape(-1, value.shape[layout.axis] // (channels * layout.block), channels, layout.block)
    rows = np.moveaxis(split, 2, -1).reshape(-1, channels)
    if not np.isfinite(rows).all():
        return None
    return Seen(
        rows.min(0).astype(np.float64),
        rows.max(0).astype(np.float64),
        np.einsum("rc,rc->c", rows, rows, dtype=np.float64) / len(rows),
    )


def least(seen: Sequence[Seen]) -> Array:
    """The largest magnitudes of channels over several tensors, (C,)."""
    return np.asarray(np.maximum.reduce([np.maximum(-one.low, one.high) for one in seen]))


__all__ = ["FIXED", "UNSEEN", "Facts", "channels_of", "facts", "least", "look", "ranges"]
