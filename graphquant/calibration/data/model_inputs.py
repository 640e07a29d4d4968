"""The first computations of a model on its inputs, which determine the values that it expects."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.ir import (
    BIAS_ADD_KINDS,
    BOUNDED_KINDS,
    FLOAT_TYPES,
    RECURRENT_KINDS,
    RESHAPING_KINDS,
    WEIGHTED_KINDS,
    Call,
    Model,
    Op,
    Parameters,
    TensorRef,
    Use,
)

if TYPE_CHECKING:
    from graphquant.formats import InputSpec
    from graphquant.numerics import Array

CONTENT_TYPES = FLOAT_TYPES | {None, "complex64", "variant"}  # of spectra, and of lists of tensors that a loop reads
GATE_KINDS = frozenset({"sigmoid", "tanh"})  # a softmax may receive large negative values of a mask
MAX_VISITED_OPS = 500  # number of ops after which the search for the first layer of an input ends

PASSING_KINDS = RESHAPING_KINDS | {"identity"}  # kinds that may stand between a weighted op and its bias
MIN_MEANS = 4  # number of channels whose means do not all have the opposite sign by chance
MIN_MEAN_DISTANCE = 0.2  # distance of means, in standard deviations, that a few samples do not cause by chance

UNSCALING_KINDS = frozenset({"div", "layernorm", "rmsnorm", "instancenorm", "groupnorm", "lrn"})
"""Kinds that may divide values by their own size, so that no later layer shows the scale of an input."""

NORMALIZING_KINDS = UNSCALING_KINDS | {"sub", "mul", "add", "log", "sqrt"}  # kinds that change the scale of an input


@dataclass(frozen=True, slots=True, eq=False)
class InputLayer:
    """First layer that stores the scale of its values."""

    op: str  # name of the op with the stored values
    tensor: TensorRef  # tensor whose standard deviation is compared with them
    spread: Array  # float64 (C,), standard deviations of training, or absolute biases
    axis: int  # channel axis of the tensor
    has_variance: bool  # True for standard deviations of training, which a batch normalization stores
    weight: Array | None = None  # (I, C), matrix that maps the tensor to the compared values; None for itself
    is_first: bool = True  # False behind a weighted op that stores no scale, such as a spectrogram
    mean: Array | None = None  # float64 (C,), means of training, which a batch normalization stores
    offset: Array | None = None  # float64 (C,), bias that the tensor contains whatever the input is


@dataclass(slots=True)
class InputUse:
    """First uses of an input."""

    rescaled: bool = False  # True if the model changes the scale of the input before its first layer
    table_rows: int | None = None  # number of rows of the smallest table that the input selects from, or None
    selects_all: bool = True  # False if a part or a function of the input selects rows, such as a column or a remainder
    layer: InputLayer | None = None  # first layer that stores the scale of its values, or None
    gate: TensorRef | None = None  # input of the first sigmoid or tanh behind a weighted op without such a layer
    may_be_nan: bool = False  # True if the model looks for NaN itself
    is_state: bool = False  # True if it is the initial state of a recurrent op
    starts_states: bool = False  # True if also nothing reads the final state


def find_input_uses(model: Model, inputs: Sequence[InputSpec]) -> Mapping[str, InputUse]:
    """Return the first uses of each input that is an op of the main graph."""
    parameters = Parameters(model)
    names = {spec.name: {spec.name, *spec.aliases} & set(model.main.inputs) for spec in inputs}
    return {
        name: _follow_input(model, parameters, TensorRef("", next(iter(op_names))))
        for name, op_names in names.items()
        if len(op_names) == 1
    }


def replaces_nan(model: Model) -> bool:
    """Return True if the model has ops for missing values, as those of tables with columns of numbers do."""
    return any(op.type in {"IsNaN", "IsNan", "Imputer"} for _, op in model.reachable_ops())


def channel_moments(layer: InputLayer, values: Iterable[Array]) -> tuple[Array, Array] | None:
    """Return the means (C,) and standard deviations (C,) of the values that a layer compares with the stored ones.

    None if the shapes do not match, or if values are missing or not finite.
    """
    count, total, squares = 0, np.zeros(layer.spread.size), np.zeros(layer.spread.size)
    if (weight := layer.weight) is not None:
        values = (array @ weight for array in values if array.ndim and array.shape[-1] == len(weight))
    for array in values:
        is_shaped = array.ndim > max(layer.axis, 1) and array.shape[layer.axis] == layer.spread.size
        if not is_shaped or not np.isfinite(array).all():
            return None
        rows = np.moveaxis(array, layer.axis, -1).reshape(-1, layer.spread.size).astype(np.float64)
        count += len(rows)
        total += rows.sum(0)
        squares += np.square(rows, out=rows).sum(0)
    if count <= 1:
        return None
    return total / count, np.sqrt(np.maximum(squares / count - (total / count) ** 2, 0))


def is_negated(layer: InputLayer, means: Array) -> bool:
    """Return True if the means of training fit the negated response, and not the response itself."""
    if layer.mean is None or layer.mean.shape != means.shape or means.size < MIN_MEANS:
        return False
    offset = layer.offset if layer.offset is not None and layer.offset.shape == means.shape else 0
    trained, received = ((mean - offset) / layer.spread for mean in (layer.mean, means))
    distance = float(np.linalg.norm(received - trained))
    is_far = distance > MIN_MEAN_DISTANCE * np.sqrt(trained.size)
    return is_far and float(np.linalg.norm(received + trained)) < distance / 2


def _follow_input(model: Model, parameters: Parameters, start: TensorRef) -> InputUse:
    """Search forward from an input up to the first weighted ops."""
    result, visited, pending = InputUse(may_be_nan=replaces_nan(model)), {start}, deque([start])
    callers = model.callers() if len(model.graphs) > 1 else {}
    needed = model.needed_ops()
    behind: set[TensorRef] = set()  # tensors behind a weighted op that stores no scale
    computed: set[TensorRef] = set()  # tensors that have other values than the input
    is_float = model.output(start).dtype in FLOAT_TYPES
    while pending and len(visited) < MAX_VISITED_OPS:
        tensor = pending.popleft()
        for use in model.graphs[tensor.graph].consumers(tensor):
            op = model.graphs[use.graph].op(use.op)
            role = op.role(use.slot)
            is_first = tensor not in behind
            if op.kind == "gather" and role == "indices" and is_first:
                shape = parameters.shape(_require_source(model, use._replace(slot=0)))
                axis = op.attrs.get("axis", 0)
                if shape and axis == 0 and shape[0] is not None:
                    result.table_rows = min(shape[0], result.table_rows or shape[0])
                    result.selects_all &= tensor not in computed
                continue
            if op.kind == "shape" or use.op not in needed.get(use.graph, ()):
                continue  # the length of the input, such as positions that depend on it, or an op that never runs
            if op.kind == "batchnorm" or op.kind in WEIGHTED_KINDS | RECURRENT_KINDS:
                result.rescaled |= op.kind == "batchnorm" and is_first
                read_ports = model.graphs[use.graph].consumers_by_port(use.op)
                result.is_state |= role == "state"
                result.starts_states |= role == "state" and read_ports.keys() <= {0}
                if role == "input" and result.layer is None:
                    layer = _stored_scale(model, parameters, op, tensor, TensorRef(use.graph, use.op))
                    result.layer = None if layer is None else replace(layer, is_first=is_first)
                if role != "input" or result.layer is not None or op.kind not in WEIGHTED_KINDS:
                    continue
                behind.add(TensorRef(use.graph, use.op))
            result.gate = result.gate or (tensor if op.kind in GATE_KINDS and not is_first else None)
            if op.kind in BOUNDED_KINDS or (not is_first and op.kind in UNSCALING_KINDS):
                continue
            result.rescaled |= op.kind in NORMALIZING_KINDS and is_first
            following = list(_called_tensors(model, callers, op, use)) or [
                TensorRef(use.graph, use.op, port)
                for port, output in enumerate(op.outputs)
                if not is_float or output.dtype in CONTENT_TYPES or op.kind == "cast"  # not the input's shape
            ]
            behind.update(() if is_first else following)
            is_same = tensor not in computed and (op.calls or op.kind in PASSING_KINDS | {"cast", "expand"})
            computed.update(() if is_same else following)
            pending.extend(reached for reached in following if reached not in visited)
            visited.update(following)
    return result


def _called_tensors(
    model: Model, callers: Mapping[str, Sequence[tuple[Use, Call]]], op: Op, use: Use
) -> Iterator[TensorRef]:
    """Yield the inputs of called graphs, and the outputs of calling ops, that receive the operand of `use`."""
    for call in op.calls:
        graph = model.graphs.get(call.graph)
        if graph is not None and call.offset is not None and 0 <= use.slot - call.offset < len(graph.inputs):
            yield TensorRef(call.graph, graph.inputs[use.slot - call.offset])
    names = model.graphs[use.graph].outputs
    for caller, _ in callers.get(use.graph, ()) if use.op in names else ():
        # The first output of the body of an ONNX Loop is its condition, which the op does not return.
        port = names.index(use.op) + len(model.graphs[caller.graph].op(caller.op).outputs) - len(names)
        if port >= 0:
            yield TensorRef(caller.graph, caller.op, port)


def _require_source(model: Model, use: Use) -> TensorRef:
    source = model.graphs[use.graph].source_of(use)
    return TensorRef(use.graph, use.op) if source is None else source


def _stored_scale(
    model: Model, parameters: Parameters, op: Op, source: TensorRef, output: TensorRef
) -> InputLayer | None:
    """Return the scale that a batch normalization, a bias or the addition after a weighted op has stored."""
    if op.kind == "batchnorm":
        variance = _operand(model, parameters, output, op, "variance")
        spread = np.sqrt(np.maximum(0 if variance is None else variance, 0) + float(op.attrs.get("epsilon", 1e-3)))
        mean = _operand(model, parameters, output, op, "mean")
        layer = InputLayer(op.name, source, spread, _channel_axis(model, op), has_variance=True, mean=mean)
        return None if variance is None or variance.min() < 0 else layer
    bias = _operand(model, parameters, output, op, "bias")
    if op.kind not in WEIGHTED_KINDS:
        return _recurrent_layer(op, source, _operand(model, parameters, output, op, "weight"), bias)
    current = output
    for _ in range(3):  # at most two reshapes are between a product and its bias
        uses = model.graphs[current.graph].consumers(current)
        following = model.graphs[uses[0].graph].op(uses[0].op) if len(uses) == 1 else op
        if following.kind == "batchnorm":
            normalized = _stored_scale(model, parameters, following, current, TensorRef(uses[0].graph, uses[0].op))
            offset = None if bias is None else bias.reshape(-1)
            return None if normalized is None else replace(normalized, offset=offset)
        if following.kind == "instancenorm":  # it takes a bias away, so that training may leave it at any size
            return None
        if following.kind == "output":  # the biases of a regression have the unit of the output
            bias = None
        elif bias is None and following.kind in BIAS_ADD_KINDS:
            bias = _stored_value(model, parameters, _require_source(model, uses[0]._replace(slot=1 - uses[0].slot)))
        if following.kind not in PASSING_KINDS:
            break
        current = TensorRef(uses[0].graph, uses[0].op)
    if bias is None or not bias.any() or bias.size == 1 or bias.size != max(bias.shape):
        return None
    spread = np.abs(bias.reshape(-1).astype(np.float64))
    return InputLayer(op.name, output, spread, _channel_axis(model, op), has_variance=False)


def _recurrent_layer(op: Op, source: TensorRef, weight: Array | None, bias: Array | None) -> InputLayer | None:
    """Return the scale of the gates of ONNX's LSTM, GRU or RNN: weight (D, C, I), bias (D, 2 * C) for D directions."""
    if weight is None or bias is None or (weight.ndim, bias.ndim) != (3, 2) or bias.shape[1] != 2 * weight.shape[1]:
        return None
    spread = np.abs(bias[0].reshape(2, -1).sum(0))
    return InputLayer(op.name, source, spread, -1, has_variance=False, weight=weight[0].T)


def _operand(model: Model, parameters: Parameters, output: TensorRef, op: Op, role: str) -> Array | None:
    """Return the value of the operand with this role as float64, or None if it is missing or not stored."""
    slots = model.graphs[output.graph].slots(output.op)
    tensor = next((slot for index, slot in enumerate(slots) if op.role(index) == role), None)
    value = None if tensor is None else _stored_value(model, parameters, tensor)
    return None if value is None or not value.size else value.astype(np.float64)


def _stored_value(model: Model, parameters: Parameters, tensor: TensorRef) -> Array | None:
    """Return the value of a parameter, or the default of an input that callers may override."""
    value, read_value = parameters.value(tensor), model.op(tensor).read_value
    return read_value() if value is None and read_value is not None else value


def _channel_axis(model: Model, op: Op) -> int:
    """Return the channel axis of an op's values: 1, or -1 for matrix products and channels-last formats."""
    is_first = model.format == "onnx" or str(op.attrs.get("data_format", "")).startswith(("NC", "b'NC"))
    return 1 if is_first and op.kind not in {"matmul", "gemm"} else -1
