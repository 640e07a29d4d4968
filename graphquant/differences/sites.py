"""Quantization ops of two models beside each other: what is read quantized, and with which scale."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from graphquant.differences.types import Change
from graphquant.ir import Model, TensorRef, Use
from graphquant.numerics import Dynamic
from graphquant.pairs import Pairs, readers, unclipped
from graphquant.survey import Reading, survey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.numerics import Array, QParams

    Readings = list[Reading]


def compare_sites(one: Model, other: Model, pairs: Pairs) -> tuple[list[Change], int]:
    """What differs in quantization, and how many uses are quantized in one alone."""
    before, after = _by_use(one), _by_use(other)
    there = {_translated(use, pairs): found for use, found in before.items()}
    rerouted = sum(len(found) != len(after.get(use, ())) for use, found in there.items() if use is not None)
    rerouted += sum(use not in there for use in after)
    matched: dict[str, tuple[Reading, Reading | None]] = {}
    kept: set[str] = set()
    for use, found in after.items():
        old = there.get(use, [])
        for place, reading in enumerate(found):
            twin = old[place] if place < len(old) else None
            key = _key(other, reading)
            if key not in matched or matched[key][1] is None:
                matched[key] = reading, twin
            if twin is not None:
                kept.add(_key(one, twin))
    changes: list[Change] = []
    for reading, twin in matched.values():
        where = _where(other, reading)
        if twin is None:
            changes.append(Change(kind="site-added", where=where, says=_said(reading)))
        else:
            changes += _changed(where, twin, reading)
    lost = {_key(one, old): old for found in before.values() for old in found}
    changes += [
        Change(kind="site-removed", where=_where(one, old), says=_said(old))
        for key, old in lost.items()
        if key not in kept
    ]
    return changes, rerouted


def _where(model: Model, reading: Reading) -> str:
    """The tensor that is quantized: as graphquant noted it, for it may be integers now."""
    return model.graphs[reading.graph].op(reading.op).anchor or str(unclipped(model, reading.tensor))


def _key(model: Model, reading: Reading) -> str:
    """What a site is known by: what is quantized in one graph may be dequantized in several."""
    op = model.graphs[reading.graph].op(reading.op)
    return f"{op.rule} {op.anchor} {_said(reading)}" if op.anchor else f"{reading.graph}/{reading.op}"


def _by_use(model: Model) -> dict[Use, Readings]:
    """The quantizations that each use reads through, in the order of the model."""
    found: dict[Use, Readings] = defaultdict(list)
    for reading in survey(model).readings:
        for use in readers(model, TensorRef(reading.graph, reading.op)):
            found[use].append(reading)
    return found


def _translated(use: Use, pairs: Pairs) -> Use | None:
    """The use as the other model calls it, None if its op is not there."""
    op = pairs.to.get((use.graph, use.op))
    return None if op is None else Use(*op, use.slot)


def _said(reading: Reading) -> str:
    params = reading.params
    if params is None:
        return f"{reading.type}, its scale is computed"
    if isinstance(params, Dynamic):
        return f"{params.type.name}, the range of each run"
    return f"{params.type.name}, scale {_span(params.scale)}, zero point {_span(params.zero_point)}"


def _span(values: Array) -> str:
    low, high = values.min(), values.max()
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"


def _changed(where: str, old: Reading, new: Reading) -> Iterator[Change]:
    """What is another one in a quantization that both models have."""
    a, b = old.params, new.params
    if old.type != new.type:
        yield Change(kind="site-changed", where=where, says=f"{old.type} became {new.type}")
    if a is None or b is None or isinstance(a, Dynamic) or isinstance(b, Dynamic):
        if _said(old) != _said(new):
            yield Change(kind="site-changed", where=where, says=f"{_said(old)} became {_said(new)}")
        return
    yield from _of_params(where, a, b)


def _of_params(where: str, a: QParams, b: QParams) -> Iterator[Change]:
    said = [
        f"{word} {one} became {other}"
        for word, one, other in (
            ("type", a.type.name, b.type.name),
            ("axis", a.axis, b.axis),
            ("block", a.block, b.block),
            ("narrow", a.narrow, b.narrow),
        )
        if one != other
    ]
    if a.scale.shape != b.scale.shape:
        said.append(f"{a.scale.size} scales became {b.scale.size}")
    elif not np.array_equal(a.zero_point, b.zero_point):
        said.append(f"zero point {_span(a.zero_point)} became {_span(b.zero_point)}")
    if said:
        yield Change(kind="site-changed", where=where, says=", ".join(said))
    if a.scale.shape == b.scale.shape and not np.array_equal(a.scale, b.scale):
        off = float(np.abs(b.scale.astype(float) / a.scale.astype(float) - 1).max())
        yield Change(
            kind="scale", where=where, says=f"{_span(a.scale)} became {_span(b.scale)} ({100 * off:.3g}%)", size=off
        )


__all__ = ["compare_sites"]
