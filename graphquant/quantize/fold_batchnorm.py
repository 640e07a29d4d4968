"""Fold BatchNorms into the weight and bias of the convolution or matrix product before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from graphquant.ir import CONTROL_EDGE, WEIGHTED_KINDS, DataType, Graph, Model, Op, Parameters, TensorRef, Use
from graphquant.qdq.family import new_constant, new_op
from graphquant.quantize.preparation_undo import Candidate, RecordedEdits, ScaledWeight, Step, remove_unread_ops

if TYPE_CHECKING:
    from graphquant.numerics import Array

# Find BatchNorms that the preceding convolution or matrix product can absorb, by the structure of the graph.
#
# Keras 3 writes a BatchNorm out: after constant folding it is a Mul and an Add with one value per channel each. Nets
# converted from Caffe have such a pair after each BatchNorm; the BatchNorm absorbs it where no convolution can. Paddle
# writes the bias of a convolution as an Add behind it, and nets for OCR have a factor and a summand for all channels.

MATRIX_RANK: Final = 2
AFFINE_OPS: Final = {("Mul", "mul"), ("Add", "add"), ("AddV2", "add")}
VARIABLES_NOT_FOLDED: Final = "its values are variables, which training may still change; freeze the model to fold it"
FoldedConstants = tuple["ScaledWeight | None", "Array"]  # the weight, None if a sum leaves it unchanged, and the bias


class FoldCandidate(NamedTuple):
    """A BatchNorm that may be folded."""

    norm: Op  # the BatchNorm, or the last op of one that is written out
    affine: tuple[Op, ...]  # the Mul, the Add, or both, of one that is written out
    values: tuple[Use, ...]  # the uses that read scale, offset, mean and variance, or the factor and the summand
    weighted: Op  # the preceding convolution or matrix product; for a Mul or an Add, perhaps a BatchNorm
    weight: Use  # the use that reads the weight
    bias: Use | None  # the use that reads the bias, or could; None if the bias needs an op of its own


def find_fold_candidate(model: Model, graph: Graph, norm: Op, parameters: Parameters) -> FoldCandidate | str | None:
    """Return the ops that a fold would change, or a reason against it; None if there is no BatchNorm to fold."""
    candidate: FoldCandidate | str | None
    if (norm.type, norm.kind) in AFFINE_OPS:
        candidate = _affine_candidate(model, graph, norm, parameters)
    elif norm.kind == "batchnorm" and not batchnorm_trains(norm):
        values = tuple(Use(graph.name, norm.name, slot) for slot in range(1, 5))
        candidate = _candidate_before(model, graph, norm, (), values, Use(graph.name, norm.name, 0), parameters)
        if set(graph.consumers_by_port(norm.name)) - {0}:
            candidate = "other outputs of it have consumers"
        elif _has_control_edges(graph, norm.name):
            candidate = "control edges order it with other ops"
    else:
        return None
    if isinstance(candidate, FoldCandidate):
        uses = (candidate.weight, *candidate.values, candidate.bias)
        tensors = [graph.source_of(use) for use in uses if use is not None]
        if any(parameters.is_variable(tensor) for tensor in tensors if tensor is not None):
            return None if len(candidate.affine) == 1 else VARIABLES_NOT_FOLDED  # a sum alone is no BatchNorm
    return candidate


def _affine_candidate(model: Model, graph: Graph, last: Op, parameters: Parameters) -> FoldCandidate | None:
    """Return the candidate of a Mul, an Add, or a Mul and an Add, by known values."""
    affine, uses = [last], graph.consumers(TensorRef(graph.name, last.name))
    adds = [graph.op(use.op) for use in uses if use.graph == graph.name and graph.op(use.op).kind == "add"]
    if last.kind == "mul" and any(_affine_candidate(model, graph, add, parameters) for add in adds):
        return None  # the Add folds both
    start = Use(graph.name, last.name, _data_operand_slot(graph, last, parameters))
    mul = _sole_reader_source(graph, start)
    if last.kind == "add" and not isinstance(mul, str) and (mul.type, mul.kind) == ("Mul", "mul"):
        affine.insert(0, mul)
        start = Use(graph.name, mul.name, _data_operand_slot(graph, mul, parameters))
    values = tuple(Use(graph.name, op.name, 1 - _data_operand_slot(graph, op, parameters)) for op in affine)
    if set(graph.consumers_by_port(last.name)) - {0} or any(_has_control_edges(graph, op.name) for op in affine):
        return None
    if not all(_reads_parameter(graph, use, parameters) for use in values):
        return None
    candidate = _candidate_before(model, graph, last, tuple(affine), values, start, parameters)
    # TensorFlow's layers have no bias of their own. A sum alone is one, unless it is that of a hard sigmoid: one value.
    is_bias = last.kind == "add" and getattr(_parameter_value(graph, values[0], parameters), "size", 1) > 1
    if isinstance(candidate, str) or not (len(affine) > 1 or (is_bias if model.traits.type_attrs else candidate.bias)):
        return None
    return candidate


def _candidate_before(
    model: Model,
    graph: Graph,
    norm: Op,
    affine: tuple[Op, ...],
    values: tuple[Use, ...],
    start: Use,
    parameters: Parameters,
) -> FoldCandidate | str:
    """Return the candidate whose normalization reads, at `start`, a product or a product plus a bias."""
    source, adder, bias = _sole_reader_source(graph, start), None, None
    if not isinstance(source, str):
        bias = _added_bias(model, graph, source, parameters)
        if bias is not None:
            adder, data = source, 0 if source.kind == "bias_add" else 1 - bias.slot
            source = _sole_reader_source(graph, Use(graph.name, source.name, data))
    while not isinstance(source, str) and model.traits.type_attrs and _keeps_channels(graph, source):
        if len(graph.consumers(TensorRef(graph.name, source.name))) > 1:  # they would read the folded values
            return f"{source.name} has other consumers, or is an output of the model"
        source = _sole_reader_source(graph, Use(graph.name, source.name, 0))
    if isinstance(source, str):
        return source
    reason = None if affine and _is_inference_batchnorm(source) else _fold_obstacle(model, source, adder)
    if reason is not None or (affine and model.traits.stacked_matmul and source.kind in {"matmul", "gemm"}):
        return reason or "its values may lie along another axis than the channels"
    channels_first = {_channels_first(op) for op in (None if affine else norm, adder, source) if op is not None}
    if len(channels_first - {None}) > 1 or (affine and True in channels_first):
        return f"its channel axis differs from that of {source.name}"
    role_names = ("scale", "offset") if _is_inference_batchnorm(source) else ("weight", "bias")
    if bias is None and role_names[1] in source.roles:
        bias = Use(graph.name, source.name, source.roles.index(role_names[1]))
    weight = Use(graph.name, source.name, source.roles.index(role_names[0]))
    if not all(_reads_parameter(graph, use, parameters) for use in (weight, *values)):
        return f"its values, or the weight of {source.name}, are only known at run time"
    return FoldCandidate(norm, affine, values, source, weight, bias)


def _keeps_channels(graph: Graph, op: Op) -> bool:
    """Return True for the last part of a dilated or 1-D convolution, or of a Dense layer, as TensorFlow writes them."""
    if op.type not in {"Reshape", "Squeeze"}:
        return op.type == "BatchToSpaceND"
    source = graph.source_of(Use(graph.name, op.name, 0))
    shapes = [op.outputs[0].shape, None if source is None else graph.output(source).shape]
    channels = [shape[-1] if shape else None for shape in shapes]
    return channels[0] is not None and channels[0] == channels[1]


def _added_bias(model: Model, graph: Graph, op: Op, parameters: Parameters) -> Use | None:
    """Return the use that reads a bias in a BiasAdd, or in the sum of a known value and an op without a bias."""
    if op.kind == "bias_add":
        return Use(graph.name, op.name, 1)
    if op.kind != "add" or len(graph.slots(op.name)) != len(("product", "bias")) or _has_control_edges(graph, op.name):
        return None
    data = _data_operand_slot(graph, op, parameters)
    product, bias = graph.source_of(Use(graph.name, op.name, data)), Use(graph.name, op.name, 1 - data)
    if product is None or product.graph != graph.name or not _reads_parameter(graph, bias, parameters):
        return None
    return bias if graph.op(product.op).kind in (WEIGHTED_KINDS if model.traits.type_attrs else {"matmul"}) else None


def _fold_obstacle(model: Model, op: Op, adder: Op | None) -> str | None:
    """Return the reason why the op is not linear in one weight per output channel, or None."""
    if op.kind not in WEIGHTED_KINDS or "weight" not in op.roles:
        return f"its input comes from {op.name}, a {op.type}, which has no weight to fold it into"
    if op.channel_axis is None or op.type.startswith("_Fused"):
        return f"the output channels of {op.name}, which produces its input, are unknown"
    if op.kind == "gemm" and (op.attrs.get("alpha", 1.0), op.attrs.get("beta", 1.0)) != (1.0, 1.0):
        return f"{op.name} scales its product or its bias (alpha, beta)"
    if op.kind == "matmul":
        shapes = [producer.outputs[0].shape for producer in (op, adder) if producer is not None and producer.outputs]
        is_stacked = any(shape is not None and len(shape) != MATRIX_RANK for shape in shapes)
        if op.type != "MatMul" or (model.traits.stacked_matmul and is_stacked):
            return f"{op.name} multiplies stacks of matrices, whose channels are on another axis"
        if model.traits.stacked_matmul and None in shapes:
            return f"{op.name} multiplies matrices of unknown rank"
    return None


def _channels_first(op: Op) -> bool | None:
    """Return True if the channels follow the batch axis, None if the op has no data format attribute."""
    layout = op.attrs.get("data_format", "NHWC" if op.kind == "bias_add" else None)
    return None if layout is None else str(decode_text(layout)).startswith("NC")


def batchnorm_trains(op: Op) -> bool:
    """Return True if a BatchNorm uses mean and variance of its input."""
    return bool(op.attrs.get("training_mode") or op.attrs.get("is_training"))


def _is_inference_batchnorm(op: Op) -> bool:
    """Return True for an ONNX BatchNorm, whose scale and offset can absorb a factor and a summand per channel."""
    return op.type == "BatchNormalization" and not batchnorm_trains(op)


def _data_operand_slot(graph: Graph, op: Op, parameters: Parameters) -> int:
    """Return the operand of a Mul or Add that is no parameter, the first one if neither is."""
    return int(_reads_parameter(graph, Use(graph.name, op.name, 0), parameters))


def _reads_parameter(graph: Graph, use: Use, parameters: Parameters) -> bool:
    tensor = graph.source_of(use)
    return tensor is not None and parameters.is_parameter(tensor)


def _sole_reader_source(graph: Graph, use: Use) -> Op | str:
    """Return the op of this graph whose output 0 only `use` reads, or the reason why there is none."""
    source = graph.source_of(use)
    if source is None or source.graph != graph.name:
        return "its input is produced in another graph"
    op = graph.op(source.op)
    if source.port or op.kind in {"input", "constant", "variable"}:
        return f"it reads {source}, which no convolution or matrix product produces"
    other_readers = len(graph.consumers(source)) - 1
    if other_readers and (op.kind in WEIGHTED_KINDS or op.kind in {"bias_add", "add", "mul", "batchnorm"}):
        return f"{source} has other consumers, or is an output of the model"
    return op


def _has_control_edges(graph: Graph, name: str) -> bool:
    """Return True if the op has control edges, which would be lost with it."""
    return bool(graph.control_inputs(name)) or any(CONTROL_EDGE in edges for edges in graph.successors(name).values())


def decode_text(value: Any) -> Any:
    """Decode an attribute's text if it is stored as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


FOLD_BATCHNORM_STEP: Final = "fold-batchnorm"
_MAX_AXES: Final = 1 << 10  # an upper bound on the number of axes of any tensor


def fold_batchnorm(model: Model) -> Iterator[Step]:
    """Fold Y = scale * (conv(x) - mean) / sqrt(variance + epsilon) + offset into the convolution's constants.

    Values held in variables are skipped: constants in their place could not be trained any more, and function clones
    would still read the variables.

    Source of the formula: Ioffe and Szegedy 2015, "Batch Normalization", section 3.1.
    """
    parameters = Parameters(model)  # folding turns no tensor into a parameter or back
    for name in model.reachable_graphs():
        graph = model.graphs[name]
        for op in list(graph.ops()):
            candidate = find_fold_candidate(model, graph, op, parameters)
            if isinstance(candidate, FoldCandidate):
                folded = _compute_fold(graph, candidate, parameters)
                if not isinstance(folded, str):
                    yield _apply_fold(model, candidate, folded, parameters)


def remaining_batchnorms(model: Model) -> Iterator[Candidate]:
    """Yield the BatchNorms in inference mode that were not folded, with the reason."""
    parameters = Parameters(model)
    for graph, op in model.reachable_ops():
        candidate = find_fold_candidate(model, graph, op, parameters)
        reason = _compute_fold(graph, candidate, parameters) if isinstance(candidate, FoldCandidate) else candidate
        is_sum_or_product = isinstance(candidate, FoldCandidate) and len(candidate.affine) == 1
        if isinstance(reason, str) and not is_sum_or_product:
            yield graph, op, reason


def _compute_fold(graph: Graph, candidate: FoldCandidate, parameters: Parameters) -> FoldedConstants | str:
    """Return the folded weight, None for a sum alone, and the bias, float32 (C,), or the reason against the fold."""
    constants = [_parameter_value(graph, use, parameters) for use in candidate.values]
    values = [value for value in constants if value is not None]
    weight = _parameter_value(graph, candidate.weight, parameters)
    has_bias = candidate.bias is not None and graph.source_of(candidate.bias) is not None
    bias = _parameter_value(graph, candidate.bias, parameters) if candidate.bias is not None and has_bias else None
    if len(values) != len(constants) or weight is None or (has_bias and bias is None):
        return f"its values, or those of {candidate.weighted.name}, are only known at run time"
    shapes = _product_and_factor_shapes(candidate.weighted, weight.shape)
    channels = int(np.prod(shapes[1])) if shapes is not None else 0
    statistics = _affine_statistics(graph, candidate, values, weight, channels) if candidate.affine else values
    if weight.dtype != np.float32:
        return f"the weight of {candidate.weighted.name} is {weight.dtype}; only float32 is folded"
    if shapes is None or any(value.shape != (channels,) for value in statistics):
        return f"it has no value per channel for the {channels} output channels of {candidate.weighted.name}"
    if bias is not None and (bias.size not in {1, channels} or bias.shape[-1:] not in {(), (bias.size,)}):
        return f"the bias of {candidate.weighted.name} has no value per output channel"
    scale, offset, mean, variance = (value.astype(np.float64) for value in statistics)
    with np.errstate(all="ignore"):
        epsilon = 0.0 if candidate.affine else candidate.norm.numeric_attr("epsilon", 1e-5)
        factor = scale / np.sqrt(variance + epsilon)
        old_bias = 0.0 if bias is None else bias.astype(np.float64).reshape(-1)
        new_bias = (offset + (old_bias - mean) * factor).astype(np.float32)
        new_weight = _scale_output_channels(weight, factor, *shapes)
    if not (np.isfinite(new_bias).all() and np.isfinite(new_weight).all()):
        return "its variance is negative or its values are too large: the folded weight would not be finite"
    scaled_weight = ScaledWeight(
        weight=weight, product=new_weight, factor=factor, product_shape=shapes[0], factor_shape=shapes[1]
    )
    return None if [op.kind for op in candidate.affine] == ["add"] else scaled_weight, new_bias


def _affine_statistics(
    graph: Graph, candidate: FoldCandidate, values: list[Array], weight: Array, channels: int
) -> list[Array]:
    """Return scale, offset, mean and variance, each (C,), of a normalization that is written as a Mul or an Add."""
    shape, trailing_axes = graph.output(TensorRef(graph.name, candidate.norm.name)).shape, 0
    if candidate.weighted.type in {"Conv", "ConvTranspose"}:
        trailing_axes = weight.ndim - 2
    elif candidate.weighted.type == "BatchNormalization":
        trailing_axes = len(shape) - 2 if shape is not None else _MAX_AXES
    zeros, ones = np.zeros(channels, np.float32), np.ones(channels, np.float32)
    operands = {"mul": ones, "add": zeros}
    data = graph.slots(candidate.affine[0].name)[1 - candidate.values[0].slot]
    rank = weight.ndim if data is None else len(graph.output(data).shape or weight.shape)
    for op, value in zip(candidate.affine, values, strict=True):
        axis = value.ndim - 1 - trailing_axes
        if value.size == 1 and value.ndim <= rank:  # one value for all channels, as of a Rescaling layer
            operands[op.kind] = np.repeat(value, channels)
        else:
            # A value that differs along other axes, or adds one, gets an axis more, so that its shape is refused.
            is_channel = axis in {0, 1} if trailing_axes else 0 <= axis < rank
            is_vector = is_channel and value.shape[axis : axis + 1] == (value.size,)
            operands[op.kind] = value.reshape(-1) if is_vector else value[None]
    return [operands["mul"], operands["add"], zeros, ones]


def _parameter_value(graph: Graph, use: Use, parameters: Parameters) -> Array | None:
    tensor = graph.source_of(use)
    return None if tensor is None else parameters.value(tensor)


def _product_and_factor_shapes(weighted: Op, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shapes in which a weight and its factor are multiplied, None without an output channel axis."""
    axis = weighted.channel_axis or 0
    if not -len(shape) <= axis < len(shape):
        return None
    axis %= len(shape)
    ones = (1,) * len(shape)
    if weighted.kind == "conv_transpose" and (groups := int(weighted.numeric_attr("group", 1))) != 1:
        # The groups are consecutive on axis 0 of the weight; their channels are on axis 1.
        if groups < 1 or axis != 1 or shape[0] % groups:
            return None
        return (groups, shape[0] // groups, *shape[1:]), (groups, 1, shape[1], *ones[2:])
    if weighted.kind == "depthwise_conv" and axis == len(shape) - 2:  # [h, w, c, m]: channels on two axes
        return shape, (*ones[:axis], *shape[axis:])
    return shape, (*ones[:axis], shape[axis], *ones[axis + 1 :])


def _scale_output_channels(
    weight: Array, factor: Array, product_shape: tuple[int, ...], factor_shape: tuple[int, ...]
) -> Array:
    """Multiply each output channel of `weight` by its factor (C,), as float32."""
    product = weight.astype(np.float64).reshape(product_shape) * factor.reshape(factor_shape)
    return product.astype(np.float32).reshape(weight.shape)


def _apply_fold(model: Model, candidate: FoldCandidate, folded: FoldedConstants, parameters: Parameters) -> Step:
    """Give the weighted op new constants, which no other reader of the old ones sees, and remove the BatchNorm."""
    graph, norm, weighted = model.graphs[candidate.weight.graph], candidate.norm, candidate.weighted
    uses = [candidate.weight, *([] if candidate.bias is None else [candidate.bias]), *candidate.values]
    stale = [tensor for tensor in map(graph.source_of, uses) if tensor is not None]
    edits, (scaled_weight, new_bias) = RecordedEdits(model), folded
    if scaled_weight is not None:
        origin_ref = parameters.root_tensor(stale[0])
        origin_op = model.op(origin_ref)
        read = _lazy_folded_weight(scaled_weight, origin_op)
        constant = _folded_constant(graph, f"{weighted.name}/weight_folded", scaled_weight.product, read)
        if origin_op.kind == "constant":
            edits.scaled_weights[origin_ref.graph, origin_ref.op] = constant.name, scaled_weight
        edits.connect(candidate.weight, edits.add(graph, constant))
    bias_constant = edits.add(graph, _folded_constant(graph, f"{weighted.name}/bias_folded", new_bias))
    if candidate.bias is not None:
        edits.connect(candidate.bias, bias_constant)
        result = TensorRef(graph.name, candidate.bias.op)
    else:
        product = TensorRef(graph.name, weighted.name)
        first, slot = (candidate.affine[0], 1 - candidate.values[0].slot) if candidate.affine else (norm, 0)
        end = graph.source_of(Use(graph.name, first.name, slot))
        if end is not None and scaled_weight is None and graph.op(end.op).kind in {"squeeze", "reshape"}:
            # A sum stays behind them, where TFLite fuses it and a Relu behind it.
            product = end
        result = edits.add(graph, _bias_add_op(model, graph, norm, weighted, product), [product, bias_constant])
        if end is not None and end != product:  # a bias precedes the last parts of a convolution
            (first_part,) = (use for use in graph.consumers(product) if use.op != result.op)
            edits.connect(first_part, result)
            result = end
    readers = graph.consumers(TensorRef(graph.name, norm.name))
    for use in readers:
        edits.connect(use, result)
    for op in (norm, *candidate.affine[:-1]):
        edits.remove(graph, op.name)
    output_uses = [use for use in readers if graph.graphs[use.graph].op(use.op).kind == "output"]
    if output_uses and not model.traits.named_values and not graph.name:
        # Outputs of a GraphDef are fetched by op name.
        identity = Op(
            name=norm.name,
            kind="identity",
            type="Identity",
            outputs=norm.outputs[:1],
            attrs={"T": DataType("float32")},
            rule=FOLD_BATCHNORM_STEP,
        )
        renamed_result = edits.add(graph, identity, [result])
        for use in output_uses:
            edits.connect(use, renamed_result)
    removable_kinds = frozenset({"constant", "identity", "input"})
    remove_unread_ops(model, stale[:1], removable_kinds, edits)
    remove_unread_ops(model, stale[1:], None if candidate.affine else removable_kinds, edits)
    return edits.to_step(FOLD_BATCHNORM_STEP, graph, norm, f"folded into {weighted.name}", weighted=weighted.name)


def _lazy_folded_weight(scaled_weight: ScaledWeight, origin_op: Op) -> Callable[[], Array] | None:
    """Return a function that reads the weight from its file and scales it, None if the weight is in memory anyway."""
    read_weight, factor = origin_op.read_value, scaled_weight.factor
    if not isinstance(scaled_weight.weight, np.memmap) or origin_op.kind != "constant" or read_weight is None:
        return None
    shapes = scaled_weight.product_shape, scaled_weight.factor_shape  # the function must not hold the product
    return lambda: _scale_output_channels(read_weight(), factor, *shapes)


def _bias_add_op(model: Model, graph: Graph, norm: Op, weighted: Op, product: TensorRef) -> Op:
    """Return an op that adds the bias. TensorFlow's BiasAdd accepts only two data formats."""
    output = graph.output(product)
    fields: dict[str, Any] = {"kind": "add", "type": "Add"}
    if model.traits.type_attrs:
        data_format = str(decode_text(weighted.attrs.get("data_format", "NHWC")))
        attrs = {"T": DataType("float32"), "data_format": "NCHW" if data_format.startswith("NC") else "NHWC"}
        fields = {"kind": "bias_add", "type": "BiasAdd", "roles": ("input", "bias"), "attrs": attrs}
    return new_op(graph, f"{norm.name}/bias_add", output.dtype, output.shape, rule=FOLD_BATCHNORM_STEP, **fields)


def _folded_constant(graph: Graph, name: str, value: Array, read: Callable[[], Array] | None = None) -> Op:
    constant = new_constant(graph, name, value, op_type="Const", rule=FOLD_BATCHNORM_STEP)
    return constant if read is None else replace(constant, read_value=read)
