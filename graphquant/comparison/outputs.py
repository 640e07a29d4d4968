"""What models are fed and what they give, name by name, and figures of each output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphquant.comparison.confidence import Spread, most
from graphquant.comparison.difference import Difference
from graphquant.comparison.types import OutputFigures
from graphquant.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphquant.formats import InputSpec
    from graphquant.numerics import Array

CLASSES = 2
"""Axes of an output whose rows are scores of classes: samples and classes. One axis will do where there is no batch."""


class OutputTally:
    """Figures of one output, sample by sample."""

    def __init__(self, name: str, other: str, *, batched: bool) -> None:
        """`batched`: the first axis counts samples, so that a vector is no row of scores."""
        self.name, self.other = name, other
        self._axes = {CLASSES} if batched else {CLASSES - 1, CLASSES}
        self._batched = batched
        self._difference, self._spread = Difference(), Spread()
        self._floats = False
        self._rows = self._agreed = 0
        self._labelled: int | None = None
        self._right = [0, 0]
        self._changed = [0, 0]

    def add(self, expected: Array | None, found: Array | None, labels: Array | None) -> None:
        """Adds what one run gave; None where it gave nothing."""
        if expected is None or found is None:
            if expected is not found:
                said = f"only {'the quantized' if expected is None else 'the float'} model gives it for some sample"
                self._difference.problem = self._difference.problem or said
            return
        if expected.dtype.kind in "OSU":
            self._difference.problem = self._difference.problem or f"it holds {expected.dtype}, no numbers"
            return
        self._difference.add(expected, found, full=True)
        if self._difference.problem:
            return
        if expected.dtype.kind in "iub":
            self._rows += expected.size
            self._agreed += int((expected == found).sum())
            return
        if expected.size:
            self._floats = True
            self._spread.add(*_squares(expected, found, batched=self._batched))
        if expected.ndim not in self._axes or expected.shape[-1] <= 1:
            return
        tops = [np.asarray(values.argmax(-1)).reshape(-1) for values in (expected, found)]
        self._rows += tops[0].size
        self._agreed += int((tops[0] == tops[1]).sum())
        if labels is not None and labels.size == tops[0].size and _are_classes(labels, expected.shape[-1]):
            self._labelled = (self._labelled or 0) + labels.size
            right = [top == labels.reshape(-1) for top in tops]
            for side, other in ((0, 1), (1, 0)):
                self._right[side] += int(right[side].sum())
                self._changed[side] += int((right[side] & ~right[other]).sum())

    def figures(self) -> OutputFigures:
        """What was found over all samples."""
        difference, fine = self._difference, not self._difference.problem
        labelled = self._labelled if self._labelled == self._rows else None
        return OutputFigures(
            name=self.name,
            other=self.other,
            sqnr=difference.sqnr if self._floats and fine else None,
            cosine=difference.cosine if self._floats and fine else None,
            largest=difference.largest,
            agreement=self._agreed / self._rows if self._rows and fine else None,
            rows=self._rows,
            values=difference.count,
            accuracy=(self._right[0] / labelled, self._right[1] / labelled) if labelled and fine else None,
            problem=difference.problem or (f"{difference.bad} values are NaN or infinite" if difference.bad else ""),
            least_sqnr=self._spread.least if self._floats and fine and not difference.bad else None,
            half=self._spread.half if fine and not difference.bad else 0,
            least_agreement=1 - most(self._rows - self._agreed, 0, self._rows) if self._rows and fine else None,
            most_lost=most(self._changed[0], self._changed[1], labelled) if labelled and fine else None,
        )


def _are_classes(labels: Array, count: int) -> bool:
    """Whether labels are numbers of so many classes."""
    return not labels.size or bool(labels.min() >= 0 and labels.max() < count)


def _squares(expected: Array, found: Array, *, batched: bool) -> tuple[Array, Array]:
    """Sums of squares of an output and of its errors, float64 (N,), of each sample, which the first axis counts."""
    rows = len(expected) if batched and expected.ndim else 1
    one = expected.reshape(rows, -1).astype(np.float64)
    off = found.reshape(rows, -1) - one
    return np.einsum("ij,ij->i", one, one), np.einsum("ij,ij->i", off, off)


def match_inputs(one: Sequence[InputSpec], other: Sequence[InputSpec]) -> dict[str, str]:
    """For each input of the other model the input of the one that it gets its data from: by name, or in order.

    Raises:
        UsageError: They take different inputs.
    """
    known = {name: spec.name for spec in reversed(one) for name in (*spec.aliases, spec.name)}
    known.update((spec.name, spec.name) for spec in one)
    found = {}
    for spec in other:
        source = next((known[name] for name in (spec.name, *spec.aliases) if name in known), None)
        if source is not None:
            found[spec.name] = source
    if len(found) == len(other) and len(set(found.values())) == len(one):
        return found
    if len(one) != len(other):
        raise UsageError(
            f"The models take different inputs: {_names([spec.name for spec in one])}, and"
            f" {_names([spec.name for spec in other])}. Compare models that take the same."
        )
    return {theirs.name: ours.name for ours, theirs in zip(one, other, strict=True)}


def match_outputs(one: Sequence[str], other: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """For each output of the one model that of the other: as given, by name, and what is left in order.

    Raises:
        UsageError: A given name is none, or outputs are left that nothing matches.
    """
    for names, wanted, whose in ((one, given.keys(), "first"), (other, given.values(), "second")):
        for name in wanted:
            if name not in names:
                raise UsageError(
                    f"The {whose} model has no output {name!r}. It has {_names(names)}.{did_you_mean(name, names)}"
                )
    if given:
        return dict(given)
    found = {name: name for name in one if name in set(other)}
    left, there = [name for name in one if name not in found], [name for name in other if name not in found]
    if len(left) != len(there):
        raise UsageError(
            f"The models have different outputs: {_names(left) or 'none'} of the first has no match, nor has"
            f" {_names(there) or 'none'} of the second. Say which is which: --match NAME=OTHER."
        )
    found.update(zip(left, there, strict=True))
    return {name: found[name] for name in one}


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


__all__ = ["OutputTally", "match_inputs", "match_outputs"]
