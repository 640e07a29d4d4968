"""What each quantization of a model costs: alone, and with all that is before it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from graphquant import formats
from graphquant.comparison.difference import Difference, quiet
from graphquant.comparison.types import SiteFigures
from graphquant.errors import InternalError
from graphquant.ir import QUANTIZATION_KINDS, Model, Parameters, TensorRef
from graphquant.numerics import QParams, dequantize, quantize
from graphquant.pairs import behind, pair, readers, unclipped
from graphquant.prepare import names_told, prepare
from graphquant.survey import survey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from graphquant.numerics import Array
    from graphquant.pairs import Pairs
    from graphquant.survey import Coverage, Reading

    Seen = Mapping[TensorRef, Sequence[Array]]

PREPARATIONS = ("initializer-inputs", "fold-batchnorm")
"""What may have been done to a float model before it was quantized, and changes no values but by rounding."""

BIAS = 32
"""Bits that only what is added to a sum of products has."""

SCALED = "its channels were scaled before it was quantized"


@dataclass(slots=True, kw_only=True, eq=False)
class Site:
    """A quantization, and what is known of it so far.

    Attributes:
        reading: The quantization op.
        tensor: What it quantizes, before values are clipped for it.
        parameter: Whether it quantizes a weight, whose figures need no run.
        before: What it quantizes, in the quantized model; None where that is integers already.
        after: What it makes.
        reference: The float model's tensor that it stands for, None if there is none.
        weight: Gives what the float model has in place of a weight that is stored as integers; None for all else.
        local: What it makes against what it got.
        accumulated: What it makes against the float model's values.
        note: Why a figure is not known.
    """

    reading: Reading
    tensor: TensorRef
    parameter: bool
    before: TensorRef | None
    after: TensorRef
    reference: TensorRef | None
    weight: Callable[[], Array] | None = None
    local: Difference = field(default_factory=Difference)
    accumulated: Difference = field(default_factory=Difference)
    note: str = ""

    def add(self, runs: Sequence[tuple[Seen, Seen]]) -> None:
        """Adds what each of some runs showed, of the quantized model and of the float one."""
        if self.before is not None:
            _add(self.local, [(quant.get(self.before, ()), quant.get(self.after, ())) for quant, _ in runs])
        if self.reference is not None:
            pairs = [(plain[self.reference], quant.get(self.after, ())) for quant, plain in runs if plain]
            _add(self.accumulated, pairs)

    def forget(self, *, alone: bool) -> None:
        """Leaves out what the float model says of it, which holds other numbers; what it costs `alone` too."""
        self.note, self.reference, self.accumulated = SCALED, None, Difference()
        if alone:
            self.local, self.weight = Difference(), None

    def figures(self) -> SiteFigures:
        """What was found over all samples."""
        problem = self.note or self.local.problem or self.accumulated.problem
        if not self.local.count and not self.accumulated.count and not problem:
            problem = "it was not reached"
        return SiteFigures(
            graph=self.reading.graph,
            op=self.reading.op,
            tensor=str(self.tensor),
            rule=self.reading.rule,
            parameter=self.parameter,
            local=_known(self.local),
            accumulated=_known(self.accumulated),
            bias=isinstance(self.reading.params, QParams) and self.reading.params.type.bits == BIAS,
            note=problem,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sites:
    """The quantizations of a model beside its float model.

    Attributes:
        sites: All of them, in the order of the model.
        plain: The float model as its tensors are to be watched: prepared as the quantized one was.
        quantized: Whether the float model has quantization of its own, so that it computes otherwise while watched.
        coverage: The ops of the quantized model that multiply, and whether they do so on integers.
    """

    sites: tuple[Site, ...]
    plain: Model
    quantized: bool
    coverage: tuple[Coverage, ...]

    def watched(self) -> tuple[list[TensorRef], list[TensorRef]]:
        """The tensors to watch in the quantized model, and in the float one."""
        live = [site for site in self.sites if not site.parameter]
        quant = dict.fromkeys(t for site in live for t in (site.before, site.after) if t is not None)
        plain = dict.fromkeys(site.reference for site in live if site.reference is not None)
        return list(quant), list(plain)

    def forget(self, hidden: Mapping[TensorRef, str], unseen: Iterable[TensorRef]) -> None:
        """Leaves out what no runner can show: `hidden` of the quantized model, `unseen` of the float one."""
        lost = set(unseen)
        for site in self.sites:
            why = [hidden[tensor] for tensor in (site.before, site.after) if tensor is not None and tensor in hidden]
            if why and not site.parameter:
                site.note, site.before, site.reference = why[0], None, None
            elif site.reference in lost:
                site.reference, site.note = None, "the float model does not show this tensor"

    def figures(self) -> tuple[SiteFigures, ...]:
        """Those of each site, the largest error of its own first."""
        return tuple(sorted((site.figures() for site in self.sites), key=_rank))


def sites_of(plain: Model, quant: Model) -> Sites:
    """The quantizations of `quant`, weights with their figures already.

    Args:
        plain: The float model, of whatever format.
        quant: The quantized one.
    """
    ready = prepared_beside(plain, quant) if plain.format == quant.format else plain
    pairs = pair(quant, ready) if plain.format == quant.format else None
    held, floats = Parameters(quant), _Weights(quant, ready, pairs)
    found, whole, scaled = [], survey(quant), _scaled(quant)
    for reading in whole.readings:
        after = TensorRef(reading.graph, reading.op)
        known = unclipped(quant, reading.tensor)
        integers = quant.op(after).kind == "dequantize" and quant.graphs[after.graph].slots(after.op)[0] == known
        if integers and not held.is_parameter(known):
            continue  # integers that the model computes
        raw = behind(quant, known)
        site = Site(
            reading=reading,
            tensor=known,
            parameter=held.is_parameter(known),
            before=None if integers else known,
            after=after,
            reference=None if pairs is None or held.is_parameter(known) else pairs.tensor(raw),
        )
        if site.parameter:
            _weigh(site, held, floats)
        elif pairs is not None and site.reference is None:
            site.note = "no tensor of the float model is its match"
        if quant.op(after).anchor in scaled:
            site.forget(alone=integers)
        found.append(site)
    kinds = {op.kind for graph in plain.graphs.values() for op in graph.ops()}
    quantized = not kinds.isdisjoint(QUANTIZATION_KINDS)
    return Sites(sites=tuple(found), plain=ready, quantized=quantized, coverage=whole.coverage)


def _scaled(quant: Model) -> frozenset[str]:
    """Tensors and weights whose channels were scaled before they were quantized, as the model says."""
    said = quant.provenance or formats.module(quant.format).said(quant)
    try:
        found = json.loads(said.get("scaled", "[]"))
    except (ValueError, RecursionError):  # whoever wrote that is no graphquant
        return frozenset()
    return frozenset(map(str, found)) if isinstance(found, list) else frozenset()


def prepared_beside(plain: Model, quant: Model) -> Model:
    """The float model with those steps that were taken before it was quantized, as it says or its op names tell."""
    said = formats.module(quant.format).said(quant).get("steps", "")
    if said:
        return prepare(plain, names_told(said))[0]
    gone = [
        op.name
        for name, graph in plain.graphs.items()
        if name in quant.graphs
        for op in graph.ops()
        if op.kind == "batchnorm" and op.name not in quant.graphs[name]
    ]
    return prepare(plain, PREPARATIONS)[0] if gone else plain


class _Weights:
    """The weights of the float model."""

    def __init__(self, quant: Model, plain: Model, pairs: Pairs | None) -> None:
        self._quant, self._plain, self._pairs = quant, plain, pairs
        self._parameters = Parameters(plain)

    def read_as(self, after: TensorRef) -> Array | None:
        """What the op that reads the quantized weight `after` reads there in the float model."""
        for use in readers(self._quant, after) if self._pairs is not None else ():
            twin = self._pairs.to.get((use.graph, use.op)) if self._pairs is not None else None
            slots = [] if twin is None else self._plain.graphs[twin[0]].slots(twin[1])
            source = slots[use.slot] if use.slot < len(slots) else None
            if source is not None:
                return self._parameters.value(source)
        return None


def _weigh(site: Site, held: Parameters, floats: _Weights) -> None:
    """The figures of a weight, from its values alone."""
    params, value = site.reading.params, held.value(site.reading.tensor)
    if not isinstance(params, QParams) or value is None:
        site.note = "its scale or its values are not in the model"
        return
    params = _fitting(params, value)
    made = dequantize(value if site.before is None else quantize(value, params), params)
    if site.before is not None:
        with quiet():
            site.local.add(value, made)
    expected = floats.read_as(site.after)
    if expected is not None and expected.size == made.size and site.before is None:
        site.weight = partial(_shaped, floats, site.after, made.shape)
    if expected is None or expected.size != made.size:
        site.note = "" if site.before is not None else "the float model has no such weight"
        return
    for difference in (site.local, site.accumulated) if site.before is None else (site.accumulated,):
        with quiet():
            difference.add(expected.reshape(made.shape), made)


def _shaped(floats: _Weights, after: TensorRef, shape: tuple[int, ...]) -> Array:
    """A weight of the float model, read anew, in the shape that it has in the quantized one."""
    value = floats.read_as(after)
    if value is None:
        raise InternalError(f"the weight that {after} stands for is not there any more.")
    return value.reshape(shape)


def _fitting(params: QParams, value: Array) -> QParams:
    """`params` for a weight whose shape says which axis channels lie on: TensorFlow's ops take the last one."""
    axis, last = params.axis, value.ndim - 1
    fits = axis is None or params.block is not None or (axis <= last and value.shape[axis] == params.scale.size)
    return params if fits else replace(params, axis=last)


def _add(difference: Difference, runs: Iterable[tuple[Sequence[Array], Sequence[Array]]]) -> None:
    """Adds the values of all runs, in one go if there are several: small arrays take longer by themselves."""
    pairs: list[tuple[Array, Array]] = []
    for expected, found in runs:
        if not found:
            continue  # it is on a branch that was not taken
        if len(expected) != len(found):
            difference.problem = difference.problem or "it was computed another number of times"
            continue
        pairs += zip(expected, found, strict=True)
    alike = [pair for pair in pairs if pair[0].shape == pair[1].shape]
    if len(alike) > 1:
        others = [pair for pair in pairs if pair[0].shape != pair[1].shape]
        pairs = [(_joined([one for one, _ in alike]), _joined([other for _, other in alike])), *others]
    for one, other in pairs:
        difference.add(one, other)


def _joined(arrays: Sequence[Array]) -> Array:
    """All values in a row."""
    return np.concatenate([array.reshape(-1) for array in arrays])


def _known(difference: Difference) -> float | None:
    return difference.sqnr if difference.count and not difference.problem else None


def _rank(site: SiteFigures) -> tuple[float, float, str, str]:
    """The place of a site in the list; what is not known comes last."""
    local, accumulated = (math.inf if known is None else known for known in (site.local, site.accumulated))
    return local, accumulated, site.graph, site.op


__all__ = ["Site", "Sites", "prepared_beside", "sites_of"]
