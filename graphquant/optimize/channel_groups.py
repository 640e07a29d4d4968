"""Channel groups: tensors whose channels can be scaled without changing the function.

If a convolution produces channels, a Relu and a pool pass them through, and another convolution sums over them, then a
channel can be divided by a number and the weights that multiply it can be multiplied by that number. The output stays
the same. The inputs of a sum, such as the branches of a residual block, belong to one group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
from graphquant.optimize.channel_layout import (
    ChannelLayout,
    find_weight_channels,
    normalization_layout,
    propagate_layout,
)
from graphquant.optimize.weighted_ops import ALGORITHM_RULE, find_unshared_constant
from graphquant.qdq.family import add_constant, new_op

if TYPE_CHECKING:
    from graphquant.numerics import Array
    from graphquant.quantize import Plan

    """Tensors that belong to the group too, or the reason why its channels cannot be scaled."""

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
        shape = self._source_shape(use)
        if shape is None:
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
        read_scaled = partial(_read_and_multiply, read_value, factor)
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


def _read_and_multiply(read_value: Callable[[], Array], factor: Array) -> Array:
    return _multiply(read_value(), factor)


def _multiply(value: Array, factor: Array) -> Array:
    return np.asarray(value * (factor if factor.ndim == value.ndim else factor.reshape(value.shape)))
