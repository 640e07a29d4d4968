"""Layout of weights, and the multiply-adds (MACs) of ops for one sample: the cost that reports and the search count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from graphquant.ir.kinds import CONVOLUTION_KINDS, FUSED_PREFIX, MAC_KINDS, MATRIX_PRODUCT_KINDS, RECURRENT_KINDS
from graphquant.ir.parameters import Parameters
from graphquant.ir.types import Op, OpKey, Shape, TensorRef, fully_known_shape

if TYPE_CHECKING:
    from graphquant.ir.graph import Graph, Model


def channel_axis(op: Op, shape: Shape) -> int | None:
    """Return the output channel axis of a weight of `shape` that `op` reads, counted from 0; None if it has none."""
    axis = op.channel_axis
    return None if axis is None or not -len(shape) <= axis < len(shape) else axis % len(shape)


def reduction_axis(op: Op, role: str, shape: Shape) -> int | None:
    """Return the axis of the blocks of a tensor of `shape` that `op` reads as `role`, counted from 0; None if none.

    For a weight it is the axis of the sum, that of the input channels. For the table of a Gather it is the last axis,
    along which each row lies.
    """
    if op.kind == "gather" and role == "input":
        return len(shape) - 1 if shape else None
    axis = channel_axis(op, shape) if role in {"weight", "recurrent_weight"} else None
    if axis is None or len(shape) == 1:
        return None
    if op.kind == "conv_transpose":
        return 0 if axis else 1
    return axis + 1 if axis < len(shape) - 1 else axis - 1


def merged_channel_shape(op: Op, shape: Shape) -> Shape | None:
    """Return the shape with one axis for the output channels, if they lie on two axes of a weight; else None.

    They do in TensorFlow's depthwise kernels: [h, w, channels, multiplier] becomes [h, w, channels * multiplier]. A
    multiplier of 1 needs no other shape. Unknown sizes stay unknown.
    """
    axis = channel_axis(op, shape)
    if op.kind != "depthwise_conv" or axis is None or axis != len(shape) - 2 or shape[-1] == 1:
        return None
    sizes = fully_known_shape(shape[axis:])
    return (*shape[:axis], None if sizes is None else prod(sizes))


def input_channels(op: Op, shape: Shape) -> int | None:
    """Return the number of channels that `op` reads, in all groups, for a weight of `shape`; its rows for a product."""
    axis = reduction_axis(op, "weight", shape)
    if axis is None or shape[axis] is None:
        return None
    if op.kind == "depthwise_conv" and channel_axis(op, shape) == len(shape) - 2:  # [h, w, channels, multiplier]
        return shape[-2]
    return int(shape[axis] or 0) * (int(op.numeric_attr("group", 1)) if op.kind in CONVOLUTION_KINDS else 1)


def output_channels(op: Op, shape: Shape) -> int | None:
    """Return the size of the output channel axis of a weight of `shape`."""
    axis = channel_axis(op, shape)
    return None if axis is None else (merged_channel_shape(op, shape) or shape)[axis]


def kernel_size(op: Op, shape: Shape) -> int | None:
    """Return the shortest side of the kernel in a convolution's weight of `shape`."""
    channels = {channel_axis(op, shape), reduction_axis(op, "weight", shape)}
    sides = [size for axis, size in enumerate(shape) if axis not in channels and size is not None]
    return min(sides) if sides and len(sides) == len(shape) - 2 else None


def matrix_rows(op: Op, shape: Shape) -> int | None:
    """Return the number of rows of the left matrix of a product, from its shape."""
    transposed = op.kind == "gemm" and bool(op.numeric_attr("transA", 0))
    if op.kind not in MATRIX_PRODUCT_KINDS or len(shape) < 2:  # noqa: PLR2004  # matrices
        return None
    return shape[-1 if transposed else -2]


def count_macs(model: Model, sizes: Mapping[TensorRef, int] | None = None) -> dict[OpKey, int]:
    """Count the multiply-adds of each op of `MAC_KINDS` for one sample. Ops of unknown sizes are omitted.

    `sizes` are the measured numbers of elements of the tensors that `unsized_tensors` lists.
    """
    parameters, macs = Parameters(model), {}
    for graph, op in _counted_ops(model):
        tensor = _driving_tensor(graph, op)
        elements = None if tensor is None else _elements(graph, tensor, sizes or {})
        macs_per_element = _macs_per_element(graph, op, parameters, sizes or {})
        if elements is not None and macs_per_element is not None:
            macs[graph.name, op.name] = round(elements * macs_per_element)
    return macs


def unsized_tensors(model: Model, *, batched: bool = True) -> list[TensorRef]:
    """Return the tensors that `count_macs` needs and whose number of elements is known only when the model runs.

    If `batched`, a first axis of unknown size counts samples. Otherwise it may count steps of time, for example.
    """
    parameters, unsized = Parameters(model), dict[TensorRef, None]()
    for graph, op in _counted_ops(model):
        tensors = [_driving_tensor(graph, op)]
        if _macs_per_element(graph, op, parameters, {}) is None:
            tensors += [tensor for tensor, _ in _summed_axes(graph, op)]
        for tensor in tensors:
            shape = None if tensor is None else graph.output(tensor).shape
            if tensor is not None and fully_known_shape(shape[1:] if shape and batched else shape) is None:
                unsized[tensor] = None
    return list(unsized)


def _counted_ops(model: Model) -> Iterator[tuple[Graph, Op]]:
    """Yield the ops of `MAC_KINDS` that the outputs need, fused ones with the kind of their product."""
    needed_ops = model.needed_ops()
    for graph, op in model.reachable_ops():
        if op.kind in MAC_KINDS and op.name in needed_ops.get(graph.name, ()):
            kind = op.kind.removeprefix(FUSED_PREFIX)
            yield graph, op if kind == op.kind else replace(op, kind=kind)


def _elements(graph: Graph, tensor: TensorRef, sizes: Mapping[TensorRef, int]) -> int | None:
    """Return the elements of a tensor for one sample; a first axis of unknown size is taken to count samples."""
    known: int | None = graph.output(tensor).elements_per_sample
    return sizes.get(tensor, known)


def _driving_tensor(graph: Graph, op: Op) -> TensorRef | None:
    """Return the tensor whose elements each cost the same number of multiply-adds.

    That is the output of convolutions, products and attention. A transposed convolution, a recurrent op or a mixture
    of experts uses each element of its input equally often.
    """
    if op.kind in CONVOLUTION_KINDS | MATRIX_PRODUCT_KINDS | {"einsum", "attention"}:
        return TensorRef(graph.name, op.name)
    return _operand_with_role(graph, op, "input")


def _operand_with_role(graph: Graph, op: Op, role: str) -> TensorRef | None:
    roles, slots = op.roles or ("input",), graph.slots(op.name)
    slot = roles.index(role) if role in roles else len(slots)
    return slots[slot] if slot < len(slots) else None


def _macs_per_element(graph: Graph, op: Op, parameters: Parameters, sizes: Mapping[TensorRef, int]) -> float | None:
    """Return the multiply-adds of `op` for each element of its driving tensor."""
    roles = {"weight", "recurrent_weight"}
    tensors = [tensor for slot, tensor in enumerate(graph.slots(op.name)) if tensor and op.role(slot) in roles]
    weights = [fully_known_shape(parameters.shape(tensor)) for tensor in tensors]
    weight = weights[0] if weights else None
    if op.kind in MATRIX_PRODUCT_KINDS:
        return _inner_size(graph, op, weight) or _summed_length(graph, op, sizes)
    if op.kind in {"einsum", "attention"}:
        return _contracted_size(graph, op) if op.kind == "einsum" else _attention_macs(graph, op, weight, sizes)
    if not weight or not prod(weight):
        return None
    if op.kind in CONVOLUTION_KINDS:
        channels = output_channels(op, weight)
        return prod(weight) / channels if channels else None
    if op.kind in RECURRENT_KINDS | {"moe"}:
        # The weights [directions, gates x hidden, features] are applied once per time step, which has `features`
        # elements. A row passes `k` of the experts, whose weights are [experts, rows, features].
        share = op.numeric_attr("k", 1) / weight[0] if op.kind == "moe" else 1
        sizes_known = len(weights) > 1 and None not in weights
        return share * sum(prod(shape or ()) for shape in weights) / weight[-1] if sizes_known else None
    return prod(weight) / (weight[0] if op.channel_axis == 1 else weight[-1])


def _contracted_size(graph: Graph, op: Op) -> float | None:
    """Return the number of products that each element of an Einsum is the sum of; None if a size is unknown."""
    terms, arrow, result = op.text_attr("equation", "").replace(" ", "").partition("->")
    if not arrow:
        result = "".join(label for label in terms if terms.count(label) == 1)
    sizes: dict[str, int | None] = {}
    for term, tensor in zip(terms.split(","), graph.slots(op.name), strict=False):
        shape = None if tensor is None else graph.output(tensor).shape
        # Axes that an ellipsis stands for are in the result, so only the labels after it count from the end.
        labels = term.partition("...")
        if shape is None or len(labels[0]) + len(labels[2]) > len(shape):
            return None
        sizes |= zip(labels[0], shape, strict=False)
        sizes |= zip(reversed(labels[2]), reversed(shape), strict=False)
    contracted = [size for label, size in sizes.items() if label not in result]
    return None if None in contracted else prod(size or 0 for size in contracted)


def _inner_size(graph: Graph, op: Op, weight: tuple[int, ...] | None) -> float | None:
    """Return the number of products that each element of a matrix product is the sum of."""
    operands = (_operand_with_role(graph, op, role) for role in ("input", "weight"))
    left, right = (None if tensor is None else graph.output(tensor).shape for tensor in operands)
    size = None
    if left:
        transposed = any(op.numeric_attr(name, 0) for name in ("transA", "transpose_a", "adj_x"))
        size = left[-2 if transposed and len(left) > 1 else -1]
    right = weight or right
    if size is None and right:
        transposed = any(op.numeric_attr(name, 0) for name in ("transB", "transpose_b", "adj_y"))
        size = right[-1 if transposed or len(right) == 1 else -2]
    return size


def _summed_axes(graph: Graph, op: Op) -> Iterator[tuple[TensorRef, int]]:
    """Yield tensors with the axis, counted from the end, whose length is the number of products that are summed.

    For attention, that is the number of keys: all positions of the present state, or those of the keys of this run.
    """
    if op.kind in MATRIX_PRODUCT_KINDS:
        flags = (("transA", "transpose_a", "adj_x"), ("transB", "transpose_b", "adj_y"))
        for role, names, plain_axis in zip(("input", "weight"), flags, (-1, -2), strict=True):
            tensor = _operand_with_role(graph, op, role)
            if tensor is not None:
                yield tensor, -3 - plain_axis if any(op.numeric_attr(name, 0) for name in names) else plain_axis
        return
    if op.kind != "attention":
        return
    if len(op.outputs) > 1 and op.outputs[1].shape:  # present keys, or keys and values: (..., positions, size)
        yield TensorRef(graph.name, op.name, 1), -2
        return
    inputs = [tensor for slot, tensor in enumerate(graph.slots(op.name)) if op.role(slot) == "input"]
    source = next((tensor for tensor in reversed(inputs[:2]) if tensor is not None), None)  # keys, or packed queries
    rank = 0 if source is None else len(graph.output(source).shape or ())
    if source is not None and rank in _POSITION_AXES:
        yield source, _POSITION_AXES[rank]


_POSITION_AXES = {3: -2, 4: -2, 5: -4}
"""Axis of the positions in queries and keys by their rank: (batch, positions, width), (batch, heads, positions, size),
or packed as (batch, positions, heads, 2 or 3, size)."""


def _summed_length(graph: Graph, op: Op, sizes: Mapping[TensorRef, int]) -> float | None:
    """Return the length of the axes of `_summed_axes`, from the shape or a measured size; None if neither is known."""
    for tensor, axis in _summed_axes(graph, op):
        shape: Shape = graph.output(tensor).shape or ()
        if len(shape) < -axis:
            continue
        if (length := shape[axis]) is not None:
            return length
        # The only other unknown axis is that of the samples, of which a run has one.
        others = [size for index, size in enumerate(shape) if index != len(shape) + axis]
        if tensor in sizes and others.count(None) <= 1 and 0 not in others:
            return sizes[tensor] / prod(size or 1 for size in others)
    return None


def _attention_macs(
    graph: Graph, op: Op, weight: tuple[int, ...] | None, sizes: Mapping[TensorRef, int]
) -> float | None:
    """Return the multiply-adds of an attention op for each element of its output.

    The output has heads x queries x value size elements. The scores, queries times keys, take heads x queries x keys x
    key size multiply-adds, and the mean of the values heads x queries x keys x value size. Masked scores count, because
    kernels compute them as well. An op that projects its input itself also multiplies by its weight.
    """
    widths = op.attrs.get("qkv_hidden_sizes")
    if not isinstance(widths, list | tuple) or len(widths) != 3:  # noqa: PLR2004  # queries, keys and values
        inputs = [tensor for slot, tensor in enumerate(graph.slots(op.name)) if op.role(slot) == "input"]
        shapes = [None if tensor is None else graph.output(tensor).shape for tensor in inputs]
        widths = [shape[-1] if shape else None for shape in shapes] if len(shapes) == 3 else []  # noqa: PLR2004
    ratio = widths[1] / widths[2] if len(widths) > 1 and widths[1] and widths[2] else 1
    width, keys = (op.outputs[0].shape or (None,))[-1], _summed_length(graph, op, sizes)
    if keys is None or (weight is not None and not width):
        return None
    return keys * (1 + ratio) + (prod(weight) / width if weight is not None and width else 0)
