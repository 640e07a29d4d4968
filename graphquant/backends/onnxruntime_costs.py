"""A static cost model of ONNX Runtime's CPU kernels: seconds of each op in float and in int8, from its shapes.

An op's cost is a sum of products: amounts of work, such as multiply-adds or values to write, times the nanoseconds of
each in a table. `benchmarks/kernel_costs.py` fits a table on the machine on which it runs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pydantic import TypeAdapter, ValidationError

from graphquant.errors import UsageError
from graphquant.ir import (
    CONVOLUTION_KINDS,
    MATRIX_PRODUCT_KINDS,
    RECURRENT_KINDS,
    Graph,
    Model,
    Op,
    OpKey,
    Parameters,
    Shape,
    TensorRef,
    Use,
)
from graphquant.rules.rule import SHIPPED_COSTS

if TYPE_CHECKING:
    from graphquant.formats import InputSpec


Work = Mapping[str, float]
"""Amounts of work by their names in a table."""


class KernelWork(NamedTuple):
    """The work of one op: the kernel that does it, and its amounts for a float and for an int8 kernel."""

    kernel: str  # name of the kernel in a table, without "float" or "int8"
    float_work: Work
    int8_work: Work
    # Kernels of the op in float after an int8 op, with which it is not joined, and does not share its layout.
    split_kernels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Nanoseconds for each unit of work, by kernel ("conv.dense float") and name of the work."""

    costs: dict[str, dict[str, float]]
    machine: str = ""  # processor on which the table was fitted
    onnxruntime: str = ""  # release for which it was fitted
    threads: int = 1  # threads of each op

    def knows(self, kernel: str) -> bool:
        """Return True if the table has the float and the int8 form of a kernel."""
        return {f"{kernel} float", f"{kernel} int8"} <= self.costs.keys()

    def nanoseconds(self, kernel: str, work: Work) -> float:
        """Return the time of `work`. A kernel that the table lacks costs nothing."""
        row = self.costs.get(kernel, {})
        return sum([row.get(name, 0.0) * amount for name, amount in work.items()])


def read_cost_table(name: str) -> CostTable:
    """Return the table of a rule file: the shipped one, or the TOML file at a path.

    Raises a UsageError if the file cannot be read, or is no table.
    """
    path = Path(__file__).with_name("onnxruntime_costs.toml") if name == SHIPPED_COSTS else Path(name)
    try:
        return TypeAdapter(CostTable).validate_python(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise UsageError(f"The cost table {path} cannot be read: {error.strerror}.") from error
    except (ValidationError, ValueError) as error:
        raise UsageError(
            f"{path} is not a cost table. `python benchmarks/kernel_costs.py --out FILE.toml` writes one."
        ) from error


# Kernels of ONNX Runtime process blocks of this many output channels, and the int8 ones groups of so many products.
CHANNEL_BLOCK, PRODUCT_GROUP = 16, 4
MAX_VALUES = 1 << 62  # number of values beyond which a shape is a mistake
UNKNOWN_SIZE = 16  # size that is assumed for axes whose size is known only when the model runs
USUAL_IMAGE_SIZE, USUAL_LENGTH = 224, 64  # sizes of inputs that are assumed without samples, for images and others
FEW_INPUT_CHANNELS = 4  # up to so many, the first convolution of images has a float kernel of its own
FIRST_CONVOLUTION: Final = "conv.first"  # kernel of the first convolution of images, which reads the usual layout
IMAGE_RANK = 4  # rank of feature maps, whose float convolutions run in a blocked layout


def describe_work(graph: Graph, op: Op, parameters: Parameters) -> KernelWork | None:
    """Return the work of an op for one sample; None if no table has its kind, or if a rank is unknown."""
    gate = find_gate(graph, op)
    describe = _DESCRIPTIONS.get(GATED_KINDS[graph.op(gate).kind] if gate else op.kind)
    if describe is None:
        return None
    tensors = [tensor for tensor in graph.slots(op.name) if tensor is not None]
    inputs = [_assumed_sizes(parameters.shape(tensor)) for tensor in tensors]
    output = _assumed_sizes(op.outputs[0].shape) if op.outputs else None
    if inputs and (inputs[0] is None or output is None):
        inputs[0], output = _shapes_for_weight(op, inputs)
    if not inputs or inputs[0] is None or output is None:
        return None
    work = describe(op, inputs, output, [parameters.is_parameter(tensor) for tensor in tensors])
    if work is None or len(output) != IMAGE_RANK:
        return work
    if work.kernel in LAYOUT_KERNELS:
        source = graph.source_of(Use(graph.name, gate or op.name, 0))
        is_blocked = source is not None and _is_local(graph, BLOCKED_KINDS, source[:2])
        return work._replace(kernel=f"{work.kernel}.blocked", split_kernels=(work.kernel,)) if is_blocked else work
    reordered = _count_reordered_values(graph, op) if op.kind in CONVOLUTION_KINDS else 0.0
    return work._replace(float_work={**work.float_work, "reordered": reordered}) if reordered else work


GATED_KINDS = {"hard_sigmoid": "hard_swish"}  # kinds of x * gate(x), by that of the gate
LAYOUT_KERNELS = frozenset({"hard_gate", "resize.linear"})
"""Kernels that take less time in the blocked layout of float convolutions, which apply hard gates themselves."""
BLOCKED_KINDS = CONVOLUTION_KINDS | {"max_pool", "avg_pool", "global_avg_pool", "add", "concat", "sigmoid", "tanh"}
"""Kinds whose float kernels read and write the blocked layout of convolutions."""
# Kinds that a float convolution applies itself.
FUSED_ACTIVATION_KINDS = frozenset({"relu", "relu6", "clip", "leaky_relu", "hard_swish", "hard_sigmoid"})


def _count_reordered_values(graph: Graph, op: Op) -> float:
    """Return the values that a float convolution reads from ops with the usual layout, and writes for such ops."""
    source, result = graph.source_of(Use(graph.name, op.name, 0)), TensorRef(graph.name, op.name)
    if source is not None and _is_local(graph, FUSED_ACTIVATION_KINDS, source[:2]):
        source = graph.source_of(Use(graph.name, source.op, 0))
    count = 0.0 if source is None or _is_local(graph, BLOCKED_KINDS, source[:2]) else count_values(graph, source)
    uses = graph.consumers(result)
    if len(uses) == 1 and _is_local(graph, FUSED_ACTIVATION_KINDS, uses[0][:2]):
        uses = graph.consumers(TensorRef(graph.name, uses[0].op))
    is_blocked = all(_is_local(graph, BLOCKED_KINDS, use[:2]) for use in uses)
    return count + (0.0 if is_blocked else count_values(graph, result))


def _is_local(graph: Graph, kinds: Collection[str], tensor: OpKey) -> bool:
    return tensor[0] == graph.name and graph.op(tensor[1]).kind in kinds


def find_gate(graph: Graph, op: Op) -> str:
    """Return the gate if `op` is the product of x * gate(x), else "". ONNX Runtime runs both as one float op."""
    slots = [tensor for tensor in graph.slots(op.name) if tensor is not None and tensor.graph == graph.name]
    if op.kind != "mul" or len(slots) != 2:  # noqa: PLR2004  # factors
        return ""
    for x, gate in (slots, reversed(slots)):
        reads_x = graph.source_of(Use(graph.name, gate.op, 0)) == x
        if graph.op(gate.op).kind in GATED_KINDS and reads_x and len(graph.consumers(gate)) == 1:
            return gate.op
    return ""


def count_values(graph: Graph, tensor: TensorRef) -> float:
    """Return the number of values of a tensor for one sample; 0 if it is unknown."""
    return float(prod(_assumed_sizes(graph.output(tensor).shape) or (0,)))


def _shapes_for_weight(op: Op, inputs: Sequence[Sizes | None]) -> tuple[Sizes | None, Sizes | None]:
    """Return usual shapes of the input and output of an op whose weight alone has a known shape; None for others."""
    weight = inputs[1] if len(inputs) > 1 else None
    if weight is None:
        return None, None
    if op.kind in CONVOLUTION_KINDS and len(weight) > 2:  # noqa: PLR2004  # a kernel has spatial axes
        positions = (UNKNOWN_SIZE,) * (len(weight) - 2)
        return (1, weight[1] * int(op.numeric_attr("group", 1)), *positions), (1, weight[0], *positions)
    if op.kind in MATRIX_PRODUCT_KINDS and len(weight) == 2:  # noqa: PLR2004  # a matrix
        rows, columns = weight[::-1] if op.numeric_attr("transB", 0) else weight
        return (UNKNOWN_SIZE, rows), (UNKNOWN_SIZE, columns)
    return None, None


def assume_input_shapes(inputs: Iterable[InputSpec]) -> dict[str, Shape]:
    """Return usual shapes of a model's inputs: one sample, with the known sizes."""
    shapes: dict[str, Shape] = {}
    for spec in inputs:
        if spec.shape is not None:
            usual = USUAL_IMAGE_SIZE if len(spec.shape) == IMAGE_RANK else USUAL_LENGTH
            first = spec.shape[:1] if None not in spec.shape[:1] else (1,)
            shapes[spec.name] = (*first, *(usual if size is None else size for size in spec.shape[1:]))
    return shapes


def with_assumed_sizes(model: Model, sample_shapes: Callable[[], Mapping[str, Shape]] = dict) -> Model:
    """Return an ONNX model with sizes for all tensors, as far as they follow from the shapes of its inputs."""
    shapes = (output.shape for _, op in model.reachable_ops() for output in op.outputs)
    if not any(shape is None or None in shape[1:] for shape in shapes):
        return model
    from graphquant.formats.onnx import bind_input_shapes, input_specs  # imported when needed, for their packages

    return bind_input_shapes(model, {**assume_input_shapes(input_specs(model)), **sample_shapes()})


def _assumed_sizes(shape: Shape | None) -> tuple[int, ...] | None:
    """Return a shape with guesses for unknown sizes: one sample along the first axis.

    None if the rank is unknown, or if no memory holds so many values.
    """
    if shape is None:
        return None
    sizes = tuple(size if size is not None else (UNKNOWN_SIZE if axis else 1) for axis, size in enumerate(shape))
    return sizes if prod(sizes) <= MAX_VALUES else None


Sizes = tuple[int, ...]
Describe = Callable[[Op, list[Sizes | None], Sizes, list[bool]], KernelWork | None]


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _describe_conv(op: Op, inputs: list[Sizes | None], output: Sizes, _constant: list[bool]) -> KernelWork | None:
    data, weight = inputs[0], inputs[1] if len(inputs) > 1 else None
    if data is None or weight is None or len(weight) < 3 or len(output) != len(weight) or 0 in weight:  # noqa: PLR2004
        return None
    groups = max(int(op.numeric_attr("group", 1)), 1)
    channels, group_inputs, kernel = weight[0], weight[1], prod(weight[2:])
    positions, group_outputs = output[0] * prod(output[2:]), max(channels // groups, 1)
    name = "conv.dense" if kernel > 1 else "conv.pointwise"
    if groups > 1:
        name = "conv.depthwise" if group_inputs == group_outputs == 1 else "conv.grouped"
    elif group_inputs <= FEW_INPUT_CHANNELS and len(output) == IMAGE_RANK:
        name = FIRST_CONVOLUTION
    is_volume = len(output) > IMAGE_RANK
    name += ".volume" if is_volume else "" if len(output) == IMAGE_RANK else ".line"
    common = {"ops": 1.0, "inputs": float(prod(data)), "outputs": float(prod(output)), "weights": float(prod(weight))}
    if name.startswith("conv.depthwise"):
        return _describe_depthwise(name, common, channels, positions, kernel)
    block = CHANNEL_BLOCK
    # The blocked layout of feature maps pads the input channels, too.
    pads_inputs = len(output) == IMAGE_RANK and groups == 1 and name != FIRST_CONVOLUTION
    float_inputs = _rounded_up(group_inputs, block) if pads_inputs else group_inputs
    float_macs = float(positions * groups * _rounded_up(group_outputs, block) * float_inputs * kernel)
    products = _rounded_up(group_inputs * kernel, PRODUCT_GROUP)
    int8_macs = float(positions * groups * _rounded_up(group_outputs, block) * products)
    common["columns"] = float(positions * groups * group_inputs * kernel)
    if groups > 1:
        common["groups"] = float(groups)
    elif group_outputs < block and name != FIRST_CONVOLUTION:
        common["narrow"] = common["outputs"]
    int8_work = {**common, "macs": int8_macs}
    if kernel > 1:  # each row of the kernel is copied in one piece; of a volume, each position
        int8_work["copies"] = float(positions * groups * prod(weight[2:] if is_volume else weight[2:-1]))
    return KernelWork(kernel=name, float_work={**common, "macs": float_macs}, int8_work=int8_work)


def _describe_depthwise(name: str, common: Work, channels: int, positions: int, kernel: int) -> KernelWork:
    """Describe a depthwise convolution. Its int8 kernel is slow for channels beyond the last block."""
    block, half = CHANNEL_BLOCK, CHANNEL_BLOCK // 2
    padded = float(positions * _rounded_up(channels, block))
    float_work = {**common, "outputs": padded, "macs": padded * kernel}
    int8_work = {**common, "macs": float(positions * channels * kernel)}
    int8_work["half_blocks"] = float(positions * (channels % block // half * half))
    int8_work["rest"] = float(positions * (channels % half))
    return KernelWork(kernel=name, float_work=float_work, int8_work=int8_work)


def _describe_product(op: Op, inputs: list[Sizes | None], output: Sizes, constant: list[bool]) -> KernelWork | None:
    left, right = inputs[0], inputs[1] if len(inputs) > 1 else None
    if left is None or right is None or len(left) < 2 or len(right) < 2 or 0 in left or not output:  # noqa: PLR2004
        return None
    columns = output[-1]
    sums = left[-2] if op.kind == "gemm" and op.numeric_attr("transA", 0) else left[-1]
    # A stack of left matrices times one matrix is one product with more rows.
    stack = prod(right[:-2])
    rows = max(prod(output) // max(columns * stack, 1), 1)
    name = "product"
    if not constant[1]:
        name = "product.activations"
    elif rows == 1:
        name = "product.row"
    common = {
        "ops": 1.0,
        "inputs": float(stack * rows * sums),
        "outputs": float(prod(output)),
        "weights": float(stack * sums * columns),
        "stack": float(stack),
    }
    blocked = stack * rows * _rounded_up(columns, CHANNEL_BLOCK)
    return KernelWork(
        kernel=name,
        float_work={**common, "macs": float(blocked * sums)},
        int8_work={**common, "macs": float(blocked * _rounded_up(sums, PRODUCT_GROUP))},
    )


def _describe_values(
    kernel: str, op: Op, inputs: list[Sizes | None], output: Sizes, constant: list[bool]
) -> KernelWork | None:
    """Describe an op whose time depends on the number of values that it reads or writes."""
    values = float(max(prod(output), *(prod(sizes) for sizes in inputs[:1] if sizes is not None)))
    work = {"ops": 1.0, "values": values}
    if kernel in {"add", "mul"}:
        broadcast = any(sizes is not None and sizes != output for sizes in inputs)
        kernel += ".broadcast" if broadcast else ""
        work["inputs"] = float(sum(not is_constant for is_constant in constant)) * values
    if op.kind == "softmax":
        work["rows"] = float(prod(output) / max(output[-1] if output else 1, 1))
    if op.kind == "resize" and op.attrs.get("mode") == "linear":
        kernel = "resize.linear"
    if op.kind in {"max_pool", "avg_pool"}:
        kernel_shape = op.attrs.get("kernel_shape")
        kernel_shape = kernel_shape if isinstance(kernel_shape, Sequence) else ()
        kernel_size = prod(size for size in kernel_shape if isinstance(size, int))
        work["macs"] = float(prod(output)) * float(min(kernel_size, MAX_VALUES))
    return KernelWork(kernel=kernel, float_work=work, int8_work=work)


def _describe_transposed_conv(
    op: Op, inputs: list[Sizes | None], output: Sizes, _constant: list[bool]
) -> KernelWork | None:
    data, weight = inputs[0], inputs[1] if len(inputs) > 1 else None
    if data is None or weight is None or len(weight) < 3 or not weight[0]:  # noqa: PLR2004
        return None
    macs = float(prod(data) * prod(weight) // weight[0])
    work = {"ops": 1.0, "outputs": float(prod(output)), "macs": macs}
    return KernelWork(kernel=op.kind, float_work=work, int8_work=work)


def _describe_recurrent(op: Op, inputs: list[Sizes | None], _output: Sizes, _constant: list[bool]) -> KernelWork | None:
    data, weights = inputs[0], [sizes for sizes in inputs[1:3] if sizes is not None]
    if data is None or not data:
        return None
    work = {"ops": 1.0, "steps": float(data[0]), "macs": float(prod(data[:-1]) * sum(map(prod, weights)))}
    return KernelWork(kernel=op.kind, float_work=work, int8_work=work)


VIEW_KINDS = frozenset({"reshape", "flatten", "squeeze", "unsqueeze", "identity", "dropout"})
MOVE_KINDS = frozenset({"slice", "split", "gather", "expand", "tile", "depth_to_space", "space_to_depth", "pad"})
FLOAT_KERNELS = {
    **dict.fromkeys(("layernorm", "rmsnorm", "instancenorm", "groupnorm", "batchnorm", "lrn"), "normalization"),
    **dict.fromkeys(("reduce_mean", "reduce_sum", "reduce_max", "reduce_min"), "reduction"),
    **dict.fromkeys(("abs", "neg", "max", "min", "where"), "elementwise"),
    **dict.fromkeys(("hard_swish", "hard_sigmoid"), "hard_gate"),
    **dict.fromkeys(("exp", "erf", "gelu", "pow", "sqrt"), "transcendental"),
    **dict.fromkeys(("elu", "log", "prelu"), "elu"),
    "softplus": "softplus",
}
"""Kernels of kinds that run in float between int8 ops. The time of their conversions is weighed against theirs."""
_VALUE_KINDS = """add mul sub div concat sigmoid tanh softmax relu clip leaky_relu max_pool avg_pool global_avg_pool
resize transpose"""

_DESCRIPTIONS: dict[str, Describe] = {
    **dict.fromkeys(CONVOLUTION_KINDS, _describe_conv),
    **dict.fromkeys(MATRIX_PRODUCT_KINDS, _describe_product),
    **dict.fromkeys(RECURRENT_KINDS, _describe_recurrent),
    "conv_transpose": _describe_transposed_conv,
    "silu": partial(_describe_values, "silu"),
    **{kind: partial(_describe_values, kind) for kind in _VALUE_KINDS.split()},
    **{kind: partial(_describe_values, kernel) for kind, kernel in FLOAT_KERNELS.items()},
    **dict.fromkeys(VIEW_KINDS, partial(_describe_values, "view")),
    **dict.fromkeys(MOVE_KINDS, partial(_describe_values, "move")),
}
"""Functions that describe the work of an op, by its kind."""
