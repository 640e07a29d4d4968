"""Ops with quantized weights, their biases, and the means of their output channels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from graphquant.ir import (
    BIAS_ADD_KINDS,
    FORWARDING_KINDS,
    MATRIX_PRODUCT_KINDS,
    WEIGHTED_KINDS,
    DataType,
    FunctionClones,
    Graph,
    Model,
    Op,
    OpKey,
    Parameters,
    Shape,
    TensorRef,
    Use,
    qualified_op_name,
    reachable,
)
from graphquant.qdq.family import add_constant, new_op

if TYPE_CHECKING:
    from graphquant.numerics import Array
    from graphquant.optimize.algorithm import AlgorithmData
    from graphquant.quantize import Solution

# Channel means are computed inside the graph, so that only (samples, C) values are copied out.

AXES_INPUT_OPSET: Final = 18  # first opset whose ReduceMean reads its axes as an input
NO_BIAS: Final = "it has no bias, and no op that adds one follows"
NOT_OBSERVED: Final = "no sample reaches it, or it cannot be observed"
"""Reason to skip an op or group without measured values."""

ALGORITHM_RULE: Final = "correction"

MAX_RUNS_IN_FLIGHT: Final = 2  # maximum number of concurrent runs, each on its own thread


class ChannelMean(NamedTuple):
    """A tensor, and the observed tensor of its channel means, (samples, C); the tensor itself without other axes."""

    tensor: TensorRef
    observed_tensor: TensorRef


class OutputAxes(NamedTuple):
    """Number of axes of the output of a weighted op, and its channel axis."""

    rank: int
    channel: int


def find_output_axes(model: Model, op: Op, weight_shape: Shape) -> OutputAxes | None:
    """Find the axes of the output of `op` for a weight of this shape; None if unknown."""
    shape = op.outputs[0].shape
    rank = len(shape) if shape is not None else None
    if rank is None and (
        op.kind not in MATRIX_PRODUCT_KINDS or (op.type in {"Gemm", "MatMul"} and not model.traits.stacked_matmul)
    ):
        rank = len(weight_shape)
    if rank is None or rank < len(("sample", "channel")):
        return None
    channels_first = op.text_attr("data_format", model.traits.data_format).startswith("NC")
    return OutputAxes(rank, 1 if channels_first and op.kind not in MATRIX_PRODUCT_KINDS else rank - 1)


def add_channel_mean(model: Model, graph: Graph, tensor: TensorRef, axes: OutputAxes) -> ChannelMean:
    """Add an op that averages `tensor` over all axes but samples and channels."""
    averaged_axes = [axis for axis in range(1, axes.rank) if axis != axes.channel]
    if not averaged_axes:
        return ChannelMean(tensor, tensor)
    name, inputs = graph.unique_name(f"{tensor.op}/mean"), [tensor]
    has_type_attrs = model.traits.type_attrs
    attrs: dict[str, Any] = {"keepdims": 0}
    if has_type_attrs:
        attrs = {"T": DataType("float32"), "Tidx": DataType("int32"), "keep_dims": False}
    if has_type_attrs or model.opset >= AXES_INPUT_OPSET:
        value = np.array(averaged_axes, np.int32 if has_type_attrs else np.int64)
        control = (tensor.op,) if has_type_attrs else ()
        axes_name = f"{name}/axes"
        inputs.append(
            add_constant(graph, axes_name, value, op_type="Const", rule=ALGORITHM_RULE, control_sources=control)
        )
    else:
        attrs["axes"] = averaged_axes
    fields = {"type": "Mean" if has_type_attrs else "ReduceMean", "attrs": attrs, "rule": ALGORITHM_RULE}
    return ChannelMean(tensor, graph.add_op(new_op(graph, name, "float32", None, kind="reduce_mean", **fields), inputs))


def measure_channel_means(model: Model, means: Sequence[ChannelMean], samples: AlgorithmData) -> dict[TensorRef, Array]:
    """Measure the channel means of tensors, float64 (samples, C). Tensors that no sample reaches are left out.

    Raises a ModelError if the model cannot be run.
    """
    rows: dict[TensorRef, list[Array]] = defaultdict(list)
    observed = [mean.observed_tensor for mean in means]
    for values_by_tensor in samples.observe(model, observed, MAX_RUNS_IN_FLIGHT, ancestors_only=True):
        for mean in means:
            values = [np.asarray(value, np.float64) for value in values_by_tensor.get(mean.observed_tensor, ())]
            flattened = [value.reshape(-1, value.shape[-1]) for value in values if value.size]
            if len(flattened) == 1 and len(flattened[0]) == 1:
                rows[mean.tensor].append(flattened[0][0])  # numpy takes longer for the mean of a row than for the rest
            elif flattened:
                rows[mean.tensor].append(np.concatenate(flattened).mean(0))
    return {tensor: np.stack(sample_means) for tensor, sample_means in rows.items()}


RANK_UNKNOWN: Final = "its number of axes is not known before the model runs"

CONSTANT_OP_TYPES: Final = frozenset({"Const", "Initializer"})
"""Op types of constants whose value is no attribute of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedOp:
    """Op that multiplies by a quantized weight."""

    graph: str  # its graph
    op: Op  # the op
    weight: Use  # use that reads the weight
    bias: Use | None = None  # use that reads the bias, or could read one; None if no bias can be added
    axes: OutputAxes | None = None  # axes of its output; None if unknown
    no_bias_reason: str = ""  # reason why no bias can be added, or ""

    @property
    def data_input(self) -> Use:
        """The use that reads the data that the weight multiplies."""
        return Use(self.graph, self.op.name, self.op.main_slot)

    @property
    def output(self) -> TensorRef:
        """Output of the op."""
        return TensorRef(self.graph, self.op.name)

    @property
    def name(self) -> str:
        """Name of the op for reports."""
        return qualified_op_name(self.graph, self.op.name)


def find_weighted_ops(model: Model, solution: Solution) -> Iterator[WeightedOp]:
    """Find the reachable ops whose weight has a scale, in graph order."""
    return _find_weighted(model, solution, Parameters(model), model.reachable_ops())


def find_weighted_clones(model: Model, solution: Solution) -> Mapping[OpKey, list[WeightedOp]]:
    """Find the ops in function clones whose weight has a scale, by the graph and name of the op that they copy."""
    found: dict[OpKey, list[WeightedOp]] = defaultdict(list)
    parameters = Parameters(model)
    clones = FunctionClones(model, parameters)
    ops = [(model.graphs[name], op) for name in clones.clone_graphs for op in model.graphs[name].ops()]
    for weighted in _find_weighted(model, solution, parameters, ops):
        original = clones.original_op(weighted.graph, weighted.op.name)
        if original is not None:
            found[original].append(weighted)
    return found


def _find_weighted(
    model: Model, solution: Solution, parameters: Parameters, ops: Iterable[tuple[Graph, Op]]
) -> Iterator[WeightedOp]:
    quantized = {
        use
        for index, site in enumerate(solution.plan.sites)
        if index in solution.params and site.parameter
        for use in site.uses
    }
    for graph, op in ops:
        if op.kind not in WEIGHTED_KINDS or "weight" not in op.roles:
            continue
        weight = Use(graph.name, op.name, op.roles.index("weight"))
        if weight in quantized:
            axes = find_output_axes(model, op, _weight_tensor_shape(model, parameters, weight))
            bias = _find_bias(graph, op, parameters)
            if op.outputs[0].dtype not in {None, "float32"}:
                bias = f"it computes in {op.outputs[0].dtype}"
            if axes is None:
                bias = RANK_UNKNOWN
            use, reason = (bias, "") if isinstance(bias, Use) else (None, bias)
            yield WeightedOp(graph=graph.name, op=op, weight=weight, bias=use, axes=axes, no_bias_reason=reason)


def _weight_tensor_shape(model: Model, parameters: Parameters, weight: Use) -> Shape:
    tensor = model.graphs[weight.graph].source_of(weight)
    shape = None if tensor is None else parameters.shape(tensor)
    value = parameters.value(tensor) if tensor is not None and shape is None else None
    return shape or (() if value is None else value.shape)


def _find_bias(graph: Graph, op: Op, parameters: Parameters) -> Use | str:
    """Use that reads or could read the bias of an op, or the reason why there is none."""
    if op.type.startswith("_Fused"):
        return "the op is part of a fused op"
    if op.kind == "gemm" and op.numeric_attr("beta", 1.0) != 1.0:
        return "it multiplies its bias by a number"
    if "bias" in op.roles:
        use = Use(graph.name, op.name, op.roles.index("bias"))
        tensor = graph.source_of(use)
        return use if tensor is None or parameters.is_parameter(tensor) else "its bias is computed"
    readers = graph.consumers(TensorRef(graph.name, op.name))
    adder = graph.op(readers[0].op) if len(readers) == 1 and readers[0].graph == graph.name else None
    if adder is None or adder.kind not in BIAS_ADD_KINDS or len(graph.slots(adder.name)) != len(("product", "bias")):
        return NO_BIAS
    use = Use(graph.name, adder.name, 1 - readers[0].slot)
    tensor = graph.source_of(use)
    if tensor is None or not parameters.is_parameter(tensor):
        return "the value that is added to it is computed"
    return use


def find_unshared_constant(model: Model, use: Use, shape: Sequence[int]) -> TensorRef | None:
    """Constant of `shape` that is read only at `use`; None if there is none."""
    tensor = model.graphs[use.graph].source_of(use)
    while tensor is not None and len(model.graphs[tensor.graph].consumers(tensor)) == 1:
        op = model.op(tensor)
        if op.kind == "constant":
            return tensor if op.type in CONSTANT_OP_TYPES and op.outputs[0].shape == tuple(shape) else None
        slots = model.graphs[tensor.graph].slots(tensor.op)
        tensor = slots[0] if op.kind in FORWARDING_KINDS and slots else None
    return None


def dependency_levels(graph: Graph, ops: Sequence[str]) -> dict[str, int]:
    """Number of the given ops on the longest path to each of them. Empty if the ops form a cycle.

    No op depends on another op of its own level.
    """
    selected = set(ops)
    order = graph.topological_order()
    if len(order) < len(graph):
        return {}
    depths: dict[str, int] = {}
    for name in order:
        source_depth = max((depths[source] for source in graph.predecessors(name)), default=0)
        depths[name] = source_depth + (name in selected)
    return {name: depths[name] for name in ops}


def final_ops(graph: Graph, ops: Sequence[str]) -> list[str]:
    """Those of `ops` on which no other of them depends."""
    # Unlike nx.ancestors, an op of a cycle counts as its own ancestor.
    ancestors = {*reachable((source for name in ops for source in graph.predecessors(name)), graph.predecessors)}
    return [name for name in ops if name not in ancestors]
