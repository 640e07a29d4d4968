"""Means of each channel of an op's output, sample by sample, taken inside of the graph so that little is copied out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from graphquant.ir import DataType, Op, Output, TensorRef
from graphquant.qdq.base import constant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphquant.corrections.types import Samples
    from graphquant.ir import Graph, Model
    from graphquant.numerics import Array

AXES_AS_INPUT: Final = 18
"""First opset whose ReduceMean reads its axes."""

MATRICES: Final = frozenset({"matmul", "gemm"})

RULE: Final = "correction"

AT_ONCE: Final = 2
"""Runs at once, each on a thread of its own."""


@dataclass(frozen=True, slots=True)
class Mean:
    """Where the means of a tensor's channels come out.

    Attributes:
        tensor: What is averaged.
        shown: What is observed: means, (samples, C), or the tensor itself where it has nothing to average inside.
    """

    tensor: TensorRef
    shown: TensorRef


def channels_of(model: Model, op: Op) -> int | None:
    """The axis of the channels of what a convolution or product makes, None if its number of axes is not known."""
    shape = op.outputs[0].shape
    if shape is None or len(shape) < len(("sample", "channel")):
        return None
    if op.kind in MATRICES:
        return len(shape) - 1
    layout = op.attrs.get("data_format", "NHWC" if model.format == "tensorflow" else "NCHW")
    text = layout.decode() if isinstance(layout, bytes) else str(layout)
    return 1 if text.startswith("NC") else len(shape) - 1


def show_mean(model: Model, graph: Graph, op: Op, tensor: TensorRef) -> Mean | None:
    """Adds what averages `tensor`, which has the shape of what `op` makes, over all axes but samples and channels."""
    axis, known = channels_of(model, op), op.outputs[0]
    if axis is None or known.shape is None or known.dtype != "float32":
        return None
    axes = [one for one in range(1, len(known.shape)) if one != axis]
    if not axes:
        return Mean(tensor, tensor)
    name = graph.fresh(f"{tensor.op}/mean")
    output = Output(name, known.dtype, (known.shape[0], known.shape[axis]))
    if model.format == "tensorflow":
        attrs: Mapping[str, Any] = {"T": DataType("float32"), "Tidx": DataType("int32"), "keep_dims": False}
        made = Op(name=name, kind="reduce_mean", type="Mean", outputs=(output,), attrs=attrs, rule=RULE)
        inputs = [
            tensor,
            constant(graph, f"{name}/axes", np.array(axes, np.int32), type_="Const", rule=RULE, after=(tensor.op,)),
        ]
    else:
        listed = model.opset < AXES_AS_INPUT
        attrs = {"keepdims": 0, **({"axes": axes} if listed else {})}
        made = Op(name=name, kind="reduce_mean", type="ReduceMean", outputs=(output,), attrs=attrs, rule=RULE)
        inputs = [
            tensor,
            *([] if listed else [constant(graph, f"{name}/axes", np.array(axes), type_="Const", rule=RULE)]),
        ]
    return Mean(tensor, graph.add(made, inputs))


def measure(model: Model, means: Sequence[Mean], samples: Samples) -> dict[TensorRef, Array]:
    """The means of each tensor's channels, float64 (samples, C); without those that no sample reaches.

    Raises:
        ModelError: The model cannot be run.
    """
    runner = samples.runner(model)
    refused = runner.unwatchable([one.shown for one in means])
    asked = [one for one in means if one.shown not in refused]
    rows: dict[TensorRef, list[Array]] = {one.tensor: [] for one in asked}
    shown = list(dict.fromkeys(one.shown for one in asked))
    for seen in runner.observe(shown, samples.feeds, at_once=AT_ONCE) if shown else ():
        for one in asked:
            values = [np.asarray(value, np.float64) for value in seen[one.shown]]
            parts = [value.reshape(-1, value.shape[-1]) for value in values if value.size]
            if parts:
                rows[one.tensor].append(np.concatenate(parts).mean(0))
    return {tensor: np.stack(found) for tensor, found in rows.items() if found}


__all__ = ["Mean", "channels_of", "measure", "show_mean"]
