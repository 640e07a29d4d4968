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
    from graphquant.ir import Graph, Model, Shape
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


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of what a convolution or product makes.

    Attributes:
        count: How many there are.
        channel: That of its channels.
    """

    count: int
    channel: int


def axes_of(model: Model, op: Op, weight: Shape) -> Axes | None:
    """The axes of what `op` makes, whose weight has this shape; None if they are not known."""
    shape = op.outputs[0].shape
    count = len(shape) if shape is not None else None
    if count is None and (op.kind not in MATRICES or (op.type in {"Gemm", "MatMul"} and model.format == "tensorflow")):
        count = len(weight)
    if count is None or count < len(("sample", "channel")):
        return None
    if op.kind in MATRICES:
        return Axes(count, count - 1)
    layout = op.attrs.get("data_format", "NHWC" if model.format == "tensorflow" else "NCHW")
    text = layout.decode() if isinstance(layout, bytes) else str(layout)
    return Axes(count, 1 if text.startswith("NC") else count - 1)


def show_mean(model: Model, graph: Graph, tensor: TensorRef, axes: Axes) -> Mean:
    """Adds what averages `tensor` over all axes but samples and channels."""
    inner = [one for one in range(1, axes.count) if one != axes.channel]
    if not inner:
        return Mean(tensor, tensor)
    name = graph.fresh(f"{tensor.op}/mean")
    outputs = (Output(name, "float32", None),)
    if model.format == "tensorflow":
        attrs: Mapping[str, Any] = {"T": DataType("float32"), "Tidx": DataType("int32"), "keep_dims": False}
        made = Op(name=name, kind="reduce_mean", type="Mean", outputs=outputs, attrs=attrs, rule=RULE)
        listed = np.array(inner, np.int32)
        read = constant(graph, f"{name}/axes", listed, type_="Const", rule=RULE, after=(tensor.op,))
        return Mean(tensor, graph.add(made, [tensor, read]))
    attrs = {"keepdims": 0, **({} if model.opset >= AXES_AS_INPUT else {"axes": inner})}
    made = Op(name=name, kind="reduce_mean", type="ReduceMean", outputs=outputs, attrs=attrs, rule=RULE)
    inputs = [tensor]
    if model.opset >= AXES_AS_INPUT:
        inputs.append(constant(graph, f"{name}/axes", np.array(inner), type_="Const", rule=RULE))
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


__all__ = ["Axes", "Mean", "axes_of", "measure", "show_mean"]
