"""Channel groups: tensors whose channels can be scaled without changing the function.

If a convolution produces channels, a Relu and a pool pass them through, and another convolution sums over them, then a
channel can be divided by a number and the weights that multiply it can be multiplied by that number. The output stays
the same. The inputs of a sum, such as the branches of a residual block, belong to one group.

A layout has the positions of the channels in a tensor or a weight. Data-movement ops propagate it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from graphquant.ir import (
    WEIGHTED_KINDS,
    DataType,
    Graph,
    Model,
    Op,
    Parameters,
    TensorRef,
    Use,
    fully_known_shape,
    qualified_op_name,
)
from graphquant.optimize.algorithm import AlgorithmResult
from graphquant.optimize.weighted_ops import ALGORITHM_RULE, find_unshared_constant
from graphquant.qdq.family import add_constant, new_op

if TYPE_CHECKING:
    from graphquant.numerics import Array
    from graphquant.quantize import Plan

    """Tensors that belong to the group too, or the reason why its channels cannot be scaled."""
    from graphquant.ir import Op, Shape


MATRIX_RANK = 2


class ChannelLayout(NamedTuple):
    """Position of a tensor's channels."""

    axis: int  # the axis, counted from the end: -1 is the last
    # Number of adjacent elements that belong to one channel. The sequence of channels may repeat along the axis.
    block: int = 1

    def axis_size(self, shape: Shape | None) -> int | None:
        """Size of `shape` along the axis; None if unknown."""
        return shape[self.axis] if shape is not None and len(shape) >= -self.axis else None

    def vector_channels(self, shape: Sequence[int], channels: int) -> Array | None:
        """Channel of each element of an added value of `shape`; None if it has no channels."""
        if len(shape) < -self.axis or shape[self.axis] != channels or math.prod(shape) != channels or self.block > 1:
            return None
        return np.arange(channels).reshape(tuple(shape))


def find_weight_channels(op: Op, shape: Sequence[int], *, reads: bool) -> tuple[Array, ChannelLayout] | None:
    """Find the channel of each element of a weight, int64, and the channel layout of the op's tensor; None if unknown.

    With `reads` these are the channels that the op reads, else those that it produces.
    """
    rank, groups = len(shape), int(op.numeric_attr("group", 1))
    match op.type:
        case "Conv" if rank >= MATRIX_RANK and groups > 0 and shape[0] % groups == 0:
            # The kernel is [output, input of a group, kernel...].
            index = _index_along_axis(shape, 0)
            if reads:
                group = np.arange(shape[0] if groups > 1 else 1) // (shape[0] // groups)
                index = group[:, None] * shape[1] + np.arange(shape[1])
                index = index.reshape(-1, shape[1], *[1] * (rank - MATRIX_RANK))
            return index, ChannelLayout(1 - rank)
        case "Conv2D" | "DepthwiseConv2dNative" if rank == MATRIX_RANK + 2:
            # The kernel is [height, width, input, output], or [..., multiplier] if depthwise.
            layout = ChannelLayout(-3 if op.text_attr("data_format", "NHWC").startswith("NC") else -1)
            if reads or op.type == "Conv2D":
                return _index_along_axis(shape, 2 if reads else 3), layout
            return np.arange(shape[2] * shape[3]).reshape(1, 1, *shape[2:]), layout
        case "Gemm" | "MatMul" | "BatchMatMulV2" | "BatchMatMulV3" if rank >= MATRIX_RANK:
            if any(op.numeric_attr(name, 0) for name in ("transA", "transpose_a", "adj_x")):
                return None
            transposed = any(op.numeric_attr(name, 0) for name in ("transB", "transpose_b", "adj_y"))
            axis = -1 if reads == transposed else -2
            return _index_along_axis(shape, axis), ChannelLayout(-1)
    return None


def normalization_layout(op: Op, rank: int | None) -> ChannelLayout | None:
    """Channel layout of an op with one value per channel for a tensor of `rank` axes; None if unknown."""
    if op.kind in {"layernorm", "rmsnorm"}:
        return ChannelLayout(-1) if op.numeric_attr("axis", -1) in {-1, (rank or 0) - 1} else None
    default_format = "NCHW" if op.type.endswith("Normalization") else "NHWC"
    if not op.text_attr("data_format", default_format).startswith("NC"):
        return ChannelLayout(-1)
    return None if rank is None else ChannelLayout(1 - rank)


def _index_along_axis(shape: Sequence[int], axis: int) -> Array:
    """Index along an axis of each element of `shape`, broadcast."""
    sizes = [1] * len(shape)
    sizes[axis] = shape[axis]
    return np.arange(shape[axis]).reshape(sizes)


def propagate_layout(
    op: Op,
    layout: ChannelLayout,
    shapes: tuple[Shape | None, Shape | None],
    values: Sequence[Array | None],
    channels: int,
    *,
    forward: bool,
) -> ChannelLayout | None:
    """Propagate a channel layout through an op that moves or averages values; None if unknown.

    `layout` is on the input if `forward`, else on the output. `shapes` are those of input and output, `values` the
    known values of the other inputs.
    """
    match op.kind:
        case "clip":
            return layout if _is_relu_clip(op, values) else None
        case "pad":
            keeps_size = layout.axis_size(shapes[0]) == layout.axis_size(shapes[1])
            return layout if keeps_size and _pad_preserves_factors(op, values) else None
        case "transpose":
            return _transpose_layout(op, layout, values, forward=forward)
        case "reshape" | "flatten" | "squeeze" | "unsqueeze":
            return _reshape_layout(layout, shapes, channels, forward=forward)
        case "reduce_mean":
            return _reduce_mean_layout(op, layout, shapes[0], values, forward=forward)
    return None


def _is_relu_clip(op: Op, values: Sequence[Array | None]) -> bool:
    """Return True if a Clip is a Relu: lower limit 0, no upper limit."""
    if "min" in op.attrs or "max" in op.attrs:
        return op.numeric_attr("min", -math.inf) == 0 and "max" not in op.attrs
    low = values[0] if values else None
    return low is not None and len(values) == 1 and low.size == 1 and float(low.reshape(-1)[0]) == 0


def _pad_preserves_factors(op: Op, values: Sequence[Array | None]) -> bool:
    if op.type == "Pad" and "mode" not in op.attrs and len(values) <= 1 and "value" not in op.attrs:
        return True
    if op.type == "MirrorPad" or op.text_attr("mode", "constant") in {"reflect", "edge", "wrap"}:
        return True
    pad_value = values[1] if len(values) > 1 else None
    return op.numeric_attr("value", 0) == 0 and (len(values) <= 1 or (pad_value is not None and not np.any(pad_value)))


def _transpose_layout(
    op: Op, layout: ChannelLayout, values: Sequence[Array | None], *, forward: bool
) -> ChannelLayout | None:
    permutation = op.attrs.get("perm", values[0] if values else None)
    order = [] if permutation is None else [int(index) for index in np.asarray(permutation).reshape(-1)]
    if sorted(order) != list(range(len(order))) or len(order) < -layout.axis:
        return None
    position = layout.axis + len(order)
    return layout._replace(axis=(order.index(position) if forward else order[position]) - len(order))


def _reshape_layout(
    layout: ChannelLayout, shapes: tuple[Shape | None, Shape | None], channels: int, *, forward: bool
) -> ChannelLayout | None:
    """Propagate through a reshape that keeps the last axis, or merges all axes but the first."""
    before, after = shapes if forward else shapes[::-1]
    if before is None or after is None or not before or not after or layout.axis_size(before) is None:
        return None
    if layout.axis == -1 and before[-1] == after[-1]:
        return layout
    if layout.block > 1 or layout.axis_size(before) != channels:
        return None
    if sum(size == channels for size in before) == 1 and sum(size == channels for size in after) == 1:
        inner, position = before[layout.axis :][1:], after.index(channels)
        trailing = after[position + 1 :]
        if None not in (*inner, *trailing) and math.prod(inner) == math.prod(trailing):  # type: ignore[arg-type]
            return ChannelLayout(position - len(after))
    inner = before[len(before) + layout.axis + 1 :]
    if forward and len(after) == MATRIX_RANK and None not in inner and after[-1] is not None:
        sample_shape = before[1:]
        if layout.axis > -len(before) and None not in sample_shape and math.prod(sample_shape) == after[-1]:  # type: ignore[arg-type]
            return ChannelLayout(-1, math.prod(inner))  # type: ignore[arg-type]  # none is None
    return None


def _reduce_mean_layout(
    op: Op, layout: ChannelLayout, shape: Shape | None, values: Sequence[Array | None], *, forward: bool
) -> ChannelLayout | None:
    """Propagate through a mean over other axes. `shape` is that of the input."""
    axes = op.attrs.get("axes", values[0] if values else None)
    if shape is None or axes is None or layout.block > 1:
        return None
    rank = len(shape)
    reduced_axes = {int(axis) % rank for axis in np.asarray(axes).reshape(-1)}
    keep_dims = op.numeric_attr("keepdims", 1) if op.type == "ReduceMean" else op.numeric_attr("keep_dims", 0)
    remaining_axes = [axis for axis in range(rank) if axis not in reduced_axes]
    if forward or keep_dims:
        position = layout.axis + rank
        if position not in remaining_axes:
            return None
        return layout if keep_dims else ChannelLayout(remaining_axes.index(position) - len(remaining_axes))
    return ChannelLayout(remaining_axes[layout.axis] - rank) if len(remaining_axes) >= -layout.axis else None


Joined = list[tuple[TensorRef, ChannelLayout]] | str

HOMOGENEOUS_KINDS: Final = frozenset(
    {"relu", "leaky_relu", "identity", "dropout", "max_pool", "avg_pool", "global_avg_pool"}
)
"""Kinds that are positively homogeneous in each channel, if they keep the axes."""

NORM_KINDS: Final = frozenset({"batchnorm", "layernorm", "rmsnorm", "instancenorm"})
"""Kinds that end with a scale and an offset per channel."""


class ChannelConstant(NamedTuple):
    """Constant that changes with a channel group."""

    use: Use  # the use that reads it
    tensor: TensorRef  # the constant, which has no other reader
    channel_index: Array  # int64, broadcast to its shape: the channel of each element
    # True if the constant multiplies the group and grows as the group shrinks. Otherwise it produces the group.
    reads_group: bool
    is_weight: bool = False  # True for the weight of a convolution or matrix product
    is_scale: bool = False  # True for a scale per channel. A constant that is neither is added.


@dataclass(slots=True, kw_only=True)
class ChannelGroup:
    """Tensors with common channels."""

    start: TensorRef  # tensor at which the group was found; a weighted op reads it
    channels: int  # number of channels
    tensors: dict[TensorRef, ChannelLayout] = field(default_factory=dict)  # all tensors, with their channel layout
    constants: list[ChannelConstant] = field(default_factory=list)  # constants that change with the group
    # Tensors that weights multiply, with the uses of these weights.
    weight_uses: dict[TensorRef, list[Use]] = field(default_factory=dict)
    obstacle: str = ""  # reason why the channels cannot be scaled, or ""

    @property
    def name(self) -> str:
        """Name of the first op, for reports."""
        return qualified_op_name(self.start.graph, self.start.op)


def find_channel_groups(model: Model) -> list[ChannelGroup]:
    """Find the channel groups of all reachable graphs; each input of a known weight is in one."""
    finder, groups = _ChannelGroupFinder(model), []
    # Producers of channels come first, because only they know the number of channels.
    for find_start in (finder.produced_channels, finder.consumed_channels):
        for graph, op in model.reachable_ops():
            start = find_start(graph, op)
            if start is not None and start[0] not in finder.visited:
                groups.append(finder.expand_group(*start))
    for group in groups:
        group.start = next(iter(group.weight_uses), group.start)
    return [group for group in groups if group.weight_uses or group.start in finder.weighted_inputs]


class _ChannelGroupFinder:
    """Expand a channel group from tensor to tensor."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.visited: set[TensorRef] = set()
        self.weighted_inputs: set[TensorRef] = set()
        self._parameters = Parameters(model)

    def _weight_channels(self, graph: Graph, op: Op, *, reads: bool) -> tuple[Array, ChannelLayout, int] | None:
        """Channel of each element of an op's weight, and layout and count of the channels; None if unknown."""
        if op.kind not in WEIGHTED_KINDS or "weight" not in op.roles or op.type.startswith("_Fused"):
            return None
        shape = self._source_shape(Use(graph.name, op.name, op.roles.index("weight")))
        channels = None if shape is None else find_weight_channels(op, shape, reads=reads)
        return None if channels is None else (*channels, int(channels[0].max(initial=-1)) + 1)

    def produced_channels(self, graph: Graph, op: Op) -> tuple[TensorRef, ChannelLayout, int] | None:
        """Output tensor, layout and channel count of a weighted op; None if unknown."""
        channels = self._weight_channels(graph, op, reads=False)
        return None if channels is None else (TensorRef(graph.name, op.name), *channels[1:])

    def consumed_channels(self, graph: Graph, op: Op) -> tuple[TensorRef, ChannelLayout, int] | None:
        """Input tensor, layout and channel count of a weighted op; None if unknown."""
        channels = self._weight_channels(graph, op, reads=True) if "input" in op.roles else None
        tensor = None if channels is None else graph.source_of(Use(graph.name, op.name, op.main_slot))
        if channels is None or tensor is None or tensor.graph != graph.name or self._parameters.is_parameter(tensor):
            return None
        self.weighted_inputs.add(tensor)
        return (tensor, *channels[1:])

    def expand_group(self, start: TensorRef, layout: ChannelLayout, channels: int) -> ChannelGroup:
        """Expand the group of a tensor."""
        group = ChannelGroup(start=start, channels=channels)
        pending = [(start, layout)]
        while pending:
            tensor, tensor_layout = pending.pop()
            if tensor in group.tensors:
                if group.tensors[tensor] != tensor_layout:
                    group.obstacle = group.obstacle or "its channels lie in two ways"
                continue
            group.tensors[tensor] = tensor_layout
            self.visited.add(tensor)
            output, reason = self.model.output(tensor), ""
            size = tensor_layout.axis_size(output.shape)
            if output.dtype not in {None, "float32"}:
                reason = f"it is {output.dtype}"
            elif size is not None and size % (channels * tensor_layout.block):
                reason = "one of its tensors has another number of channels"
            else:
                for join in (self._join_producer, self._join_readers):
                    outcome = join(group, tensor, tensor_layout)
                    if isinstance(outcome, str):
                        reason = reason or outcome
                    else:
                        pending.extend(outcome)
            group.obstacle = group.obstacle or reason
        return group

    def _join_producer(self, group: ChannelGroup, tensor: TensorRef, layout: ChannelLayout) -> Joined:
        """Add the constants and tensors of the op that produces `tensor`."""
        graph, op = self.model.graphs[tensor.graph], self.model.op(tensor)
        if tensor.port:
            return "its producer has several outputs"
        if op.kind in NORM_KINDS and "scale" in op.roles:
            return self._join_vectors(group, graph, op, ("scale", "offset"), layout)
        if op.kind not in WEIGHTED_KINDS:
            return self._join_through_op(group, graph, op, layout)
        if op.type.startswith("_Fused"):
            return "its producer is part of a fused op"
        channels = self._weight_channels(graph, op, reads=False)
        if channels is None or channels[1:] != (layout, group.channels):
            return f"the channel layout of the output of this {op.type} is unknown"
        weight = Use(graph.name, op.name, op.roles.index("weight"))
        reason = self._add_constant(group, weight, channels[0], reads_group=False, is_weight=True)
        return reason or self._join_vectors(group, graph, op, ("bias",), layout)

    def _join_vectors(
        self, group: ChannelGroup, graph: Graph, op: Op, roles: tuple[str, ...], layout: ChannelLayout
    ) -> Joined:
        """Add the constants with one value per channel that an op reads in `roles`."""
        uses = [Use(graph.name, op.name, op.roles.index(role)) for role in roles if role in op.roles]
        filled = (use for use in uses if graph.source_of(use) is not None)
        return next(filter(None, (self._add_vector(group, use, layout, op) for use in filled)), "") or []

    def _add_vector(
        self, group: ChannelGroup, use: Use, layout: ChannelLayout, op: Op, *, reads_group: bool = False
    ) -> str:
        """Add a constant with one value per channel. Return the obstacle, or ""."""
        if (shape := self._source_shape(use)) is None:
            return "the value that is added or multiplied is only known at run time"
        if op.kind in NORM_KINDS | {"bias_add"}:
            output_shape = self.model.output(TensorRef(use.graph, op.name)).shape
            if normalization_layout(op, None if output_shape is None else len(output_shape)) != layout:
                return f"a {op.type} has its channels along another axis"
        channel_index = layout.vector_channels(shape, group.channels)
        if op.kind in NORM_KINDS | WEIGHTED_KINDS | {"bias_add"}:
            fits = math.prod(shape) == group.channels and layout.block == 1
            channel_index = np.arange(group.channels).reshape(shape) if fits else None
        if channel_index is None:
            return f"the operand of a {op.type} is not one number per channel"
        is_scale = op.kind == "mul" or op.role(use.slot) == "scale"
        return self._add_constant(group, use, channel_index, reads_group=reads_group, is_scale=is_scale)

    def _add_constant(
        self, group: ChannelGroup, use: Use, channel_index: Array, *, reads_group: bool, **kind: bool
    ) -> str:
        """Add a constant, with `kind` one of the flags of `ChannelConstant`. Return the obstacle, or ""."""
        shape = self._source_shape(use)
        constant = None if shape is None else find_unshared_constant(self.model, use, shape)
        if constant is None or self.model.output(constant).dtype not in {None, "float32"}:
            return "one of its weights or biases is a variable, or other ops read it too"
        group.constants.append(ChannelConstant(use, constant, channel_index, reads_group, **kind))
        return ""

    def _join_readers(self, group: ChannelGroup, tensor: TensorRef, layout: ChannelLayout) -> Joined:
        """Add everything that reads `tensor`, even after an obstacle, so that the group is complete."""
        joined: list[tuple[TensorRef, ChannelLayout]] = []
        obstacle = ""
        for use in self.model.graphs[tensor.graph].consumers(tensor):
            graph = self.model.graphs[use.graph]
            op = graph.op(use.op)
            outcome: Joined = []
            if op.kind != "shape" and (use.graph != tensor.graph or op.kind == "output"):
                outcome = "it is an output, or read in another graph"
            elif op.kind in WEIGHTED_KINDS:
                outcome = self._add_reading_weight(group, graph, op, use, layout)
            elif op.kind != "shape":
                outcome = self._join_through_op(group, graph, op, layout, forward=True)
            if isinstance(outcome, str):
                obstacle = obstacle or outcome
            else:
                joined += outcome
        return obstacle or joined

    def _add_reading_weight(self, group: ChannelGroup, graph: Graph, op: Op, use: Use, layout: ChannelLayout) -> Joined:
        start = self.consumed_channels(graph, op) if op.role(use.slot) == "input" else None
        if start is None or start[1].axis != layout.axis:
            return "it is multiplied by a value that is only known at run time"
        channels = self._weight_channels(graph, op, reads=True)
        if channels is None or channels[2] % group.channels:
            return f"a {op.type} of this form reads it"
        weight = Use(graph.name, op.name, op.roles.index("weight"))
        channel_index = channels[0] // layout.block % group.channels
        reason = self._add_constant(group, weight, channel_index, reads_group=True, is_weight=True)
        if not reason:
            group.weight_uses.setdefault(start[0], []).append(weight)
        return reason or []

    def _join_through_op(
        self, group: ChannelGroup, graph: Graph, op: Op, layout: ChannelLayout, *, forward: bool = False
    ) -> Joined:
        """Add the other tensors of a passthrough op."""
        output = TensorRef(graph.name, op.name)
        slots = [slot for slot in graph.slots(op.name) if slot is not None]
        if op.kind in {"add", "bias_add", "sub", "mul", "div"}:
            return self._join_elementwise(group, graph, op, layout, forward=forward)
        if not slots or slots[0].graph != graph.name:
            return "its producer is an input or a constant"
        if not forward and slots[0] in group.tensors:
            return []
        if op.kind in HOMOGENEOUS_KINDS:
            return [(output, layout), (slots[0], layout)]
        values = [self._parameters.value(slot) if self._parameters.is_parameter(slot) else None for slot in slots[1:]]
        shapes = (self.model.output(slots[0]).shape, self.model.output(output).shape)
        other_layout = propagate_layout(op, layout, shapes, values, group.channels, forward=forward)
        if other_layout is None:
            return f"it passes through a {op.type}, which does not preserve channel factors"
        return [(output, other_layout), (slots[0], layout)] if forward else [(output, layout), (slots[0], other_layout)]

    def _join_elementwise(
        self, group: ChannelGroup, graph: Graph, op: Op, layout: ChannelLayout, *, forward: bool
    ) -> Joined:
        """Add the operands of a sum. A product with one value per channel ends one group and starts another."""
        output = TensorRef(graph.name, op.name)
        joined, vectors = [(output, layout)], []
        for slot, tensor in enumerate(graph.slots(op.name)):
            if tensor is not None and self._parameters.is_parameter(tensor):
                vectors.append(Use(graph.name, op.name, slot))
            elif tensor is not None and tensor.graph == graph.name:
                joined.append((tensor, layout))
            else:
                return "an op reads another graph"
        if op.kind in {"add", "sub", "bias_add"}:
            if any(constant.use in vectors for constant in group.constants):
                return []
            return next(filter(None, (self._add_vector(group, use, layout, op) for use in vectors)), "") or joined
        shape = self._source_shape(vectors[0]) if len(vectors) == 1 else None
        if shape is not None and math.prod(shape) == 1 and (op.kind == "mul" or vectors[0].slot):
            return joined
        if shape is None or op.kind == "div":
            return "it is multiplied or divided by another tensor"
        return self._add_vector(group, vectors[0], layout, op, reads_group=forward) or []

    def _source_shape(self, use: Use) -> tuple[int, ...] | None:
        """Shape of the parameter that is read at `use`; None if it is unknown or not a parameter."""
        tensor = self.model.graphs[use.graph].source_of(use)
        if tensor is None or not self._parameters.is_parameter(tensor):
            return None
        shapes = (self.model.output(source).shape for source in (tensor, self._parameters.root_tensor(tensor)))
        known_shape = next((shape for shape in map(fully_known_shape, shapes) if shape is not None), None)
        if known_shape is not None:
            return known_shape
        value = self._parameters.value(tensor)
        return None if value is None else value.shape


# Scaling by powers of two is exact: it changes only exponents.

MAX_FACTOR_EXPONENT: Final = 12  # largest exponent of a factor. Real factors stay below 2**8.
INEXACT_SCALING: Final = "its values are so large or small that scaling them would not be exact"


def nearest_powers_of_two(factors: Array) -> Array:
    """Round positive float64 factors to powers of two with a mean exponent near 0."""
    exponents = np.log2(factors)
    return np.asarray(2.0 ** np.clip(np.rint(exponents - exponents.mean()), -MAX_FACTOR_EXPONENT, MAX_FACTOR_EXPONENT))


def rescale_group(model: Model, group: ChannelGroup, divisors: Array) -> bool:
    """Divide the channels of a group by `divisors`, (C,) powers of two; return False if that is not exact."""
    changed: dict[TensorRef, Callable[[], Array]] = {}
    for constant in group.constants:
        read_value = changed.get(constant.tensor, model.op(constant.tensor).read_value)
        if read_value is None:
            return False
        original, expanded = read_value(), divisors[constant.channel_index]
        factor = np.asarray(expanded if constant.reads_group else 1 / expanded, np.float32)
        value = _multiply(original, factor)
        if not np.isfinite(value).all() or not np.array_equal(_multiply(value, 1 / factor), original):
            return False
        # A memory-mapped weight is read again when needed, so that it does not stay in memory.
        is_memory_mapped = isinstance(original, np.memmap)
        read_scaled = partial(lambda read, factor: _multiply(read(), factor), read_value, factor)
        changed[constant.tensor] = read_scaled if is_memory_mapped else partial(np.asarray, value)
    for tensor, read_value in changed.items():
        graph = model.graphs[tensor.graph]
        graph.replace_op(replace(graph.op(tensor.op), read_value=read_value))
    return True


def scaled_group_result(algorithm: str, target: str, divisors: Array, detail: str = "") -> AlgorithmResult:
    """Return the result of an algorithm that scaled the channels of a group."""
    count, smallest, largest = np.count_nonzero(divisors != 1), 1 / divisors.max(), 1 / divisors.min()
    text = f"{count} of {len(divisors)} channels scaled by {smallest:g} to {largest:g}"
    return AlgorithmResult(algorithm=algorithm, target=target, detail=f"{text}; {detail}" if detail else text)


def insert_factor_op(model: Model, plan: Plan, branch: ChannelGroup, divisors: Array) -> tuple[Plan, TensorRef]:
    """Insert a product with 1 / `divisors` before a weighted op, and move the site of its input behind the product.

    The model is modified. `branch` is the tensor as part of a channel group, whose weights are already scaled;
    `divisors` are float64 (C,), powers of two.

    Returns:
        The plan for the changed model, and the inserted product.
    """
    tensor = branch.start
    graph = model.graphs[tensor.graph]
    uses = [use._replace(slot=graph.op(use.op).main_slot) for use in branch.weight_uses[tensor]]
    layout = branch.tensors[tensor]
    repeated = np.repeat(1 / divisors, layout.block)
    size = layout.axis_size(model.output(tensor).shape)
    value = np.tile(repeated, 1 if size is None else size // len(repeated)).astype(np.float32)
    value = value.reshape(-1, *[1] * (-layout.axis - 1))
    factor = add_constant(graph, f"{tensor.op}/factor", value, op_type="Const", rule=ALGORITHM_RULE)
    output = model.output(tensor)
    attrs = {"T": DataType("float32")} if model.traits.type_attrs else {}
    name, fields = f"{tensor.op}/scaled", {"kind": "mul", "type": "Mul", "attrs": attrs, "rule": ALGORITHM_RULE}
    product_op = new_op(graph, name, output.dtype, output.shape, **fields)
    product = graph.add_op(product_op, [tensor, factor])
    for use in uses:
        model.graphs[use.graph].set_source(use, product)
    sites = []
    for site in plan.sites:
        branch_uses = tuple(use for use in site.uses if use in uses) if site.tensor == tensor else ()
        if branch_uses:
            sites.append(replace(site, tensor=product, uses=branch_uses))
        if remaining_uses := tuple(use for use in site.uses if use not in branch_uses):
            sites.append(replace(site, uses=remaining_uses))
    return replace(plan, sites=tuple(sites)), product


def _multiply(value: Array, factor: Array) -> Array:
    return np.asarray(value * (factor if factor.ndim == value.ndim else factor.reshape(value.shape)))
