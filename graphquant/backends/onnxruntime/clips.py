"""Relu and Clip before a quantization that has their limits anyway."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from graphquant.backends.onnxruntime.work import is_q, names

if TYPE_CHECKING:
    from graphquant.backends.onnxruntime.work import Gone, Work
    from graphquant.ir import Graph, TensorRef

EPSILON = float(np.finfo(np.float32).eps)


def absorb_clips(work: Work, graph: Graph, gone: Gone) -> None:
    """A Relu or Clip whose limits the Q behind it has anyway is dropped."""
    for name in names(graph, lambda op: op.type in {"Relu", "Clip"} and not op.domain):
        use = work.only(graph, name)
        source = work.slot(graph, name, 0)
        if use is None or source is None or not is_q(graph.op(use.op)) or work.inputs(graph, use.op)[2] is None:
            continue
        if _early(work, graph, name, use.op):
            gone.into[graph.name, name] = source.op if source.graph == graph.name else use.op
            gone.how[graph.name, name] = "QuantizeLinear"
            work.bypass(graph, name)


def _early(work: Work, graph: Graph, name: str, q: str) -> bool:
    """Whether a Relu or Clip goes by itself, whatever stands before it."""
    zero = work.inputs(graph, q)[2]
    if work.dtype(graph, q) not in {"int8", "uint8"}:
        return False
    if graph.op(name).type == "Clip":
        return redundant(work, graph, name, q)
    return work.own(graph, zero) and work.number(zero) == LIMITS[work.dtype(graph, q)][0]


LIMITS = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767), "uint16": (0, 65535)}


def redundant(work: Work, graph: Graph, name: str, q: str) -> bool:
    """Whether the Relu or Clip `name` changes nothing that the Q `q` would not."""
    _, scale, zero = work.inputs(graph, q)
    step, middle = work.number(scale), 0.0 if zero is None else work.number(zero)
    dtype = work.dtype(graph, q)
    if step is None or middle is None or dtype not in LIMITS or not _bare(graph, scale) or not _bare(graph, zero):
        return False
    least, most = LIMITS[dtype]
    if graph.op(name).type == "Relu":
        return middle == least
    low, high = clip_limits(work, graph, name)
    if low is None or high is None:
        return False
    return low - (least - middle) * step <= EPSILON and (most - middle) * step - high <= EPSILON


def _bare(graph: Graph, tensor: TensorRef | None) -> bool:
    """Whether a number has no axis, as it must for a Relu or Clip to be absorbed."""
    return tensor is None or graph.output(tensor).shape == ()


def clip_limits(work: Work, graph: Graph, name: str) -> tuple[float | None, float | None]:
    """The limits of a Clip, None for one that is not known before the model runs."""
    op, slots = graph.op(name), [*graph.slots(name), None, None, None][:3]
    found: list[float | None] = []
    for slot, attr, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        tensor = slots[slot]
        found.append(op.number(attr, 0) if attr in op.attrs else (default if tensor is None else work.number(tensor)))
    return found[0], found[1]
