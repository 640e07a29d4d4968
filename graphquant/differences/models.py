"""Two models beside each other: their ops, what these read, attributes and weights; quantization looked through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.differences.sites import compare_sites
from graphquant.differences.types import Change, Differences
from graphquant.errors import UsageError
from graphquant.pairs import Pairs, behind, inserted, pair
from graphquant.prepare.run import STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.ir import Graph, Model, Op, TensorRef, Use

HELD = frozenset({"constant", "variable"})
"""Kinds that are compared where they are read."""

SCALES = HELD | {"read_variable", "identity", "enter"}
"""Kinds behind the scale of a quantization op."""

BESIDE = frozenset({"input", "output"})


def diff_models(one: Model, other: Model, *, quantization: bool = True) -> Differences:
    """What differs between two models of one format.

    Args:
        one: The first.
        other: The second.
        quantization: Tell what differs in quantization too.

    Raises:
        ModelError: A weight cannot be read.
        UsageError: They are of two formats.
    """
    if one.format != other.format:
        raise UsageError(
            f"One model is of {one.format} and the other of {other.format}. Only models of one format are compared by"
            " their ops; `graphquant compare` runs both on the same data."
        )
    pairs = pair(one, other)
    changes = list(_whole(one, other, pairs))
    beside = _beside(one) | _beside(other)
    for name, graph in other.graphs.items():
        for op in graph.ops():
            place = pairs.back.get((name, op.name))
            if inserted(op) or (op.kind in HELD and place is None) or (name, op.name) in beside:
                continue
            if place is None:
                changes.append(Change(kind="op-added", where=_where(name, op.name), says=op.type))
            else:
                changes += _of_op(one, other, pairs, one.graphs[place[0]], graph, place[1], op)
    for name, graph in one.graphs.items():
        changes += [
            Change(kind="op-removed", where=_where(name, op.name), says=op.type)
            for op in graph.ops()
            if (name, op.name) not in pairs.to
            and not inserted(op)
            and op.kind not in HELD
            and (name, op.name) not in beside
        ]
    rerouted = 0
    if quantization:
        found, rerouted = compare_sites(one, other, pairs)
        changes += found
        changes += _stored(one, other, pairs)
    return Differences(changes=tuple(changes), rerouted=rerouted)


def _where(graph: str, op: str) -> str:
    return f"{graph}/{op}" if graph else op


def _whole(one: Model, other: Model, pairs: Pairs) -> Iterator[Change]:
    """What is of the whole model."""
    if one.opset != other.opset:
        yield Change(kind="model", where="opset", says=f"{one.opset} became {other.opset}")
    found = set(pairs.graphs.values())
    for name in other.graphs:
        if name not in found:
            yield Change(kind="model", where=name, says="this graph is new")
    for name in one.graphs:
        if name not in pairs.graphs:
            yield Change(kind="model", where=name, says="this graph is gone")


def _beside(model: Model) -> set[tuple[str, str]]:
    """Constants and such that only quantization ops read: scales, zero points and ranges."""
    found = set()
    for name, graph in model.graphs.items():
        for op in graph.ops():
            uses = [use for each in graph.readers(op.name).values() for use in each]
            if (op.kind in SCALES and uses and all(_scales(model, use) for use in uses)) or (
                op.rule and op.rule not in STEPS and op.kind not in BESIDE and not inserted(op)
            ):
                found.add((name, op.name))
    return found


def _scales(model: Model, use: Use) -> bool:
    """Whether what is read there is no data but how it is quantized."""
    op = model.graphs[use.graph].op(use.op)
    return (inserted(op) and use.slot > 0) or (op.kind in SCALES and bool(op.rule))


def _of_op(
    one: Model, other: Model, pairs: Pairs, graph: Graph, other_graph: Graph, name: str, op: Op
) -> Iterator[Change]:
    """What is another one in an op that both models have."""
    was, where = graph.op(name), _where(other_graph.name, op.name)
    same = was.kind in HELD and op.kind in HELD and was.outputs[:1] and was.outputs[0].name == op.outputs[0].name
    if name != op.name and not same:  # a Constant node may have become an initializer
        yield Change(kind="op-renamed", where=where, says=f"was {_where(graph.name, name)}")
    yield from _values(where, was, op)
    if was.kind in HELD and op.kind in HELD:
        return
    if (was.domain, was.type) != (op.domain, op.type):
        yield Change(kind="op-changed", where=where, says=f"{was.type} became {op.type}")
    if was.kind in BESIDE and was.outputs and op.outputs:
        before, after = was.outputs[0], op.outputs[0]
        if (before.dtype, before.shape) != (after.dtype, after.shape):
            said = f"{before.dtype} {_shape(before.shape)} became {after.dtype} {_shape(after.shape)}"
            yield Change(kind="op-changed", where=where, says=said)
    if was.kind not in BESIDE:
        yield from _attributes(where, was, op)
    yield from _wiring(one, other, pairs, graph.slots(name), other_graph.slots(op.name), where)


def _shape(shape: Any) -> str:
    return "of any shape" if shape is None else "[" + ", ".join("?" if n is None else str(n) for n in shape) + "]"


def _attributes(where: str, was: Op, op: Op) -> Iterator[Change]:
    """The attributes that are new, gone or other ones."""
    bodies = {call.attr for call in (*was.calls, *op.calls)}
    for name in sorted({*was.attrs, *op.attrs}):
        if name.startswith("_") or name in bodies:
            continue
        before, after = was.attrs.get(name), op.attrs.get(name)
        if not _equal(before, after):
            yield Change(kind="attribute", where=where, says=f"{name}: {_short(before)} became {_short(after)}")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        same = isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and one.dtype == other.dtype
        return same and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and bool(one == other)


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."  # noqa: PLR2004  # it is to fit a line


def _values(where: str, was: Op, op: Op) -> Iterator[Change]:
    """Whether a weight has other values."""
    if was.value is None or op.value is None:
        return
    before, after = was.value(), op.value()
    if before.dtype != after.dtype or before.shape != after.shape:
        said = f"{before.dtype} {_shape(before.shape)} became {after.dtype} {_shape(after.shape)}"
        yield Change(kind="weight", where=where, says=said)
    elif before.dtype.kind in "OSUV":
        if before.tolist() != after.tolist():
            yield Change(kind="weight", where=where, says="holds other values")
    elif before.tobytes() != after.tobytes():
        off = np.abs(after.astype(np.float64) - before.astype(np.float64))
        largest = float(np.nan_to_num(off, nan=np.inf).max())
        said = f"{int((off != 0).sum())} of {off.size} values are others, by up to {largest:.4g}"
        yield Change(kind="weight", where=where, says=said, size=largest)


def _wiring(
    one: Model, other: Model, pairs: Pairs, slots: list[TensorRef | None], now: list[TensorRef | None], where: str
) -> Iterator[Change]:
    """The inputs that are read from elsewhere."""
    for slot in range(max(len(slots), len(now))):
        before = slots[slot] if slot < len(slots) else None
        after = now[slot] if slot < len(now) else None
        raw = None if before is None else behind(one, before)
        raw_now = None if after is None else behind(other, after)
        if raw is not None and raw_now is not None:
            folded = {model.op(tensor).kind for model, tensor in ((one, raw), (other, raw_now))} <= HELD
            if pairs.tensor(raw) == raw_now or (folded and (raw != before or raw_now != after)):
                continue
        if raw is not None or raw_now is not None:
            yield Change(
                kind="wiring", where=f"{where}[{slot}]", says=f"{raw or 'nothing'} became {raw_now or 'nothing'}"
            )


def _stored(one: Model, other: Model, pairs: Pairs) -> Iterator[Change]:
    """Scales that are in tensors (TFLite)."""
    for place, twin in pairs.to.items():
        before, after = one.graphs[place[0]].op(place[1]), other.graphs[twin[0]].op(twin[1])
        for old, new in zip(before.outputs, after.outputs, strict=False):
            a, b = old.stored, new.stored
            if a is None or b is None:
                continue
            if a.scale.shape != b.scale.shape or not np.array_equal(a.zero_point, b.zero_point):
                yield Change(kind="site-changed", where=new.name, says="other zero points, or another number of scales")
            elif not np.array_equal(a.scale, b.scale):
                off = float(np.abs(b.scale.astype(float) / np.where(a.scale == 0, 1, a.scale) - 1).max())
                said = f"{a.scale.min():.6g} became {b.scale.min():.6g} ({100 * off:.3g}%)"
                yield Change(kind="scale", where=new.name, says=said, size=off)


__all__ = ["diff_models"]
