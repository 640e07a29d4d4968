"""What each tensor of a plan adds to the outputs in each of the ways that it may be quantized."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphquant import formats
from graphquant.accuracy import OWN, WIDE, blame, ways
from graphquant.calibration import load_of
from graphquant.comparison import sites_of
from graphquant.ir import Model, TensorRef
from graphquant.numerics import Dynamic
from graphquant.pipeline.common import stage
from graphquant.pipeline.redrawing import by_site
from graphquant.plans import Plan
from graphquant.rewrite import Inserted

if TYPE_CHECKING:
    from graphquant.numerics import QParams
    from graphquant.pipeline.checking import Kept
    from graphquant.pipeline.common import Progress

Make = Callable[[Plan], tuple[Model, Sequence[Inserted]]]
Errors = dict[int, dict[str, float]]
"""By position of a site and by way what it adds alone to the outputs, as a share of these."""

UNKNOWN = 1.0
"""What a site adds of which no run tells it: so much that it is the first to be left float."""

BETTER = 0.95
"""A way that is not another's must leave less of the error than that."""


class Trials:
    """Blame of plans in which all sites have one way each.

    Attributes:
        interrupted: Whether Ctrl-C ended it.
        known: The sites, by position, of which runs told what they add.
    """

    def __init__(self, prepared: Model, kept: Kept, progress: Progress | None) -> None:
        """`prepared` has the float weights as the plans quantize them; `kept` are the samples of the search."""
        self._prepared, self._kept, self._progress = prepared, kept, progress
        self._runner = formats.module(prepared.format).runner(prepared)
        self._runs = 0.0
        self.interrupted = False
        self.known: frozenset[int] = frozenset()

    def passes(self, errors: Errors) -> float:
        """How many runs there were for each site."""
        return self._runs / max(len(errors), 1)

    def all(self, plan: Plan, quant: Model, inserted: Sequence[Inserted], make: Make) -> tuple[Errors, dict[str, Plan]]:
        """What each site adds in each of its ways, and the plan of each way; until Ctrl-C, which `interrupted` tells.

        Args:
            plan: What the rules make.
            quant: The model of that plan.
            inserted: What it has of it.
            make: Makes the model of a plan, with what was inserted.

        Raises:
            ModelError: A model cannot be run.
        """
        own = by_site(plan, inserted)
        found = self.errors(quant, own, own)
        self.known = frozenset(found)
        errors: Errors = {index: {OWN: found.get(index, UNKNOWN)} for index in own}
        others = ways(self._prepared, plan)
        tried = [own]
        for name, other in others.items():
            if self.interrupted:
                break
            changed = [index for index in own if other.sites[index] != plan.sites[index]]
            if name == f"{WIDE} bits":
                found = {i: errors[i][OWN] * 4.0 ** (plan.sites[i].scheme.type.bits - WIDE) for i in changed}
            else:
                model, done = make(other)
                here = by_site(other, done)
                new = [i for i in changed if i in here and not any(_alike(here[i], one.get(i)) for one in tried)]
                found = self.errors(model, here, new) if new else {}
                tried.append(here)
            for index, error in found.items():
                if error < BETTER * errors[index][OWN]:
                    errors[index][name] = error
        return errors, others

    def errors(self, quant: Model, sites: Mapping[int, Inserted], wanted: Collection[int]) -> dict[int, float]:
        """What each of the sites `wanted` adds to the outputs of `quant`, by position, of those where that is known.

        What is in a graph that nothing runs, as the copies in a SavedModel, adds nothing.

        Raises:
            ModelError: A model cannot be run.
        """
        places = {index: [place(quant, output) for output in sites[index].outputs] for index in wanted}
        blamed = blame(
            quant,
            sites_of(self._prepared, quant),
            self._kept.samples(),
            inputs={one.name: one.name for one in self._runner.inputs},
            batchable=self._runner.batchable and load_of(self._prepared, batchable=True).elements is not None,
            only={one for some in places.values() for one in some},
            progress=stage(self._progress, "blaming"),
        )
        self._runs += blamed.runs
        self.interrupted |= blamed.interrupted
        known = {one: error for one, error in blamed.errors.items() if math.isfinite(error)}
        live = {*quant.live()}
        known |= {one: 0.0 for some in places.values() for one in some if one[0] not in live}
        return {index: sum(known[one] for one in some) for index, some in places.items() if known.keys() >= set(some)}


def place(quant: Model, output: TensorRef) -> tuple[str, str]:
    """The op that quantizes, whose result `output` is, perhaps in another view."""
    graph = quant.graphs[output.graph]
    if graph.op(output.op).kind == "reshape":
        output = graph.slots(output.op)[0] or output
    return output.graph, output.op


def _alike(one: Inserted, other: Inserted | None) -> bool:
    """Whether two were given the same scales."""
    return other is not None and _numbers(one.params) == _numbers(other.params)


def _numbers(params: QParams | Dynamic) -> object:
    if isinstance(params, Dynamic):
        return params
    return params.type, params.axis, np.asarray(params.scale).tobytes(), np.asarray(params.zero_point).tobytes()


__all__ = ["Errors", "Make", "Trials", "place"]
