"""Conditions on one op by itself: its type, its attributes, and the sizes of what it reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.ir import Op, TensorRef, Use, input_channels, kernel_size, output_channels, rows

if TYPE_CHECKING:
    from graphquant.match.around import Around
    from graphquant.ruleset import Selector

_MEASURES = {
    "channels": output_channels,
    "input channels": input_channels,
    "rows": rows,
    "sides of its kernel": kernel_size,
}
"""Sizes of an op, from the shape of its weight; its rows from that of its input."""


def size_miss(around: Around, selector: Selector, tensor: TensorRef, use: Use | None) -> str:
    """Which condition on sizes fails; one on a size that is not known does."""
    bounds = (
        ("axes", selector.min_rank, selector.max_rank),
        ("elements", selector.min_size, selector.max_size),
        ("channels", selector.min_channels, selector.max_channels),
        ("input channels", selector.min_in_channels, selector.max_in_channels),
        ("rows", selector.min_rows, selector.max_rows),
        ("sides of its kernel", selector.min_kernel, None),
        ("groups", None, selector.max_groups),
    )
    for what, least, most in bounds:
        if least is None and most is None:
            continue
        size = _size(around, what, tensor, use)
        named = tensor if use is None or what in {"axes", "elements"} else use.op
        said = f"{named} has {'an unknown number of' if size is None else size} {what}"
        if least is not None and (size is None or size < least):
            return f"{said}, not at least {least}"
        if most is not None and (size is None or size > most):
            return f"{said}, not at most {most}"
    if selector.multiple_of is not None:
        size = _size(around, "input channels", tensor, use)
        if size is None or size % selector.multiple_of:
            known = "an unknown number of" if size is None else size
            return f"{use.op if use else tensor} has {known} input channels, no multiple of {selector.multiple_of}"
    return ""


def _size(around: Around, what: str, tensor: TensorRef, use: Use | None) -> int | None:
    """A size of `tensor`, or of the op of `use`, counted in its weight. None if it is not known."""
    if what not in {"axes", "elements"}:
        return None if use is None else _measure(around, what, use)
    shape = around.shape(tensor)
    if shape is None:
        return None
    if what == "axes":
        return len(shape)
    known = [side for side in shape if side is not None]
    return math.prod(known) if len(known) == len(shape) else None


def _measure(around: Around, what: str, use: Use) -> int | None:
    """A size of the weighted op of `use`."""
    graph = around.model.graphs[use.graph]
    op = graph.op(use.op)
    if op.channel_axis is None:
        return None
    if what == "groups":
        return int(op.number("group", 1))
    role = "input" if what == "rows" else "weight"
    read = next((read for slot, read in enumerate(graph.slots(op.name)) if read and op.role(slot) == role), None)
    shape = None if read is None else around.shape(read)
    return None if shape is None else _MEASURES[what](op, shape)


def type_miss(selector: Selector, op: Op) -> str:
    """Whether the condition on the type of `op` fails."""
    if selector.type is not None and op.type not in selector.type.split("|"):
        return f"{op.name} is of type {op.type!r}, not {selector.type!r}"
    return ""


def attribute_miss(selector: Selector, op: Op) -> str:
    """Which condition on an attribute of `op` fails."""
    for name, wanted in selector.attr.items():
        given = _plain(op.attrs.get(name))
        if not _same(given, wanted) and not (isinstance(wanted, list) and any(_same(given, one) for one in wanted)):
            return f"{op.name} has {name} = {given!r}, not {wanted!r}"
    return ""


def _same(given: Any, wanted: Any) -> bool:
    """Whether an attribute has the value that a rule names; files keep numbers with a fraction as float32."""
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_same, given, wanted))
    if isinstance(given, float) and isinstance(wanted, int | float):
        with np.errstate(over="ignore"):
            return bool(given == wanted or np.float32(given) == np.float32(wanted))
    return bool(given == wanted)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return list(value) if isinstance(value, tuple) else value
