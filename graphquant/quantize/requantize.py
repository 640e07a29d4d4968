"""Remove the quantization that a model has already: Q/DQ pairs, FakeQuant and the like.

Rules can then place their own. A weight that is stored as integers becomes their float values; its original values are
unknown. Other tools drop a Relu or Clip whose limits a pair imposes anyway, so it is restored with the pair's removal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from graphquant.errors import InternalError
from graphquant.ir import CLAMPING_KINDS, QUANTIZATION_KINDS, TABLE_KINDS, Graph, Model, Op, Parameters, TensorRef, Use
from graphquant.numerics import Array, FloatType, QParams, dequantize
from graphquant.qdq import read_qparams
from graphquant.qdq.family import new_op
from graphquant.quantize.preparation_undo import RecordedEdits, Step, remove_unread_ops

REQUANTIZE_STEP: Final = "requantize"
_SIGN_PRESERVING_KINDS: Final = frozenset(
    {"max_pool", "avg_pool", "global_avg_pool", "reshape", "flatten", "transpose", "squeeze", "unsqueeze", "slice"}
    | {"identity", "dropout", "concat"}
)
"""Kinds whose output is nonnegative if their input is."""

_NONNEGATIVE_KINDS: Final = frozenset(
    {"relu", "relu6", "clip", "sigmoid", "softmax", "hard_sigmoid", "exp", "sqrt", "abs"}
) | {*("input", "constant", "softplus", "dequantize", "integer")}
"""Kinds whose outputs are nonnegative, or are meant to be."""

_MAX_VISITED_TENSORS: Final = 32  # tensors that are examined for negative values
_INSERTED_DEQUANTIZE_NAME: Final = re.compile(r"(.+)/quant(?:_[0-9]+)?(?:/[^/]+)?/dequant(?:_[0-9]+)?")
"""The name that `rewrite` gives a dequantize op; group 1 is the name of the quantized op."""

_RELU6_LIMIT: Final = 6.0
_CLIP_INPUTS_OPSET: Final = 11  # first opset whose Clip reads its limits as inputs


def requantize(model: Model) -> Iterator[Step]:
    """Reroute consumers of each dequantized tensor to the original float tensor, or to the stored weight."""
    parameters = Parameters(model)  # scales and zero points do not change
    relu_outputs: dict[TensorRef, TensorRef] = {}
    float_constants: dict[tuple[TensorRef, ...], TensorRef] = {}
    pairs = _ops_of_kinds(model, {"dequantize", "qdq"})
    # Tables first, so that a product that reads a transposed copy finds the table.
    for graph, op in sorted(pairs, key=lambda pair: not _is_table(pair[0], TensorRef(pair[0].name, pair[1].name))):
        float_tensor, known_params = _float_source(model, graph, op), read_qparams(graph, op, parameters)
        params = known_params if isinstance(known_params, QParams) else None
        operands = [tensor for tensor in graph.slots(op.name) if tensor is not None]
        edits = RecordedEdits(model)
        if float_tensor is None and params is not None and _reads_stored_integers(model, graph, op):
            if tuple(operands) not in float_constants:
                constant = _float_constant(model, operands[0], op, params)
                float_constants[tuple(operands)] = _add_transposed_table(
                    edits, graph, constant, float_constants.values()
                ) or edits.add(model.graphs[operands[0].graph], constant)
            float_tensor = float_constants[tuple(operands)]
        elif float_tensor is not None and params is not None and _pair_removes_negatives(model, float_tensor, params):
            if float_tensor not in relu_outputs:
                relu_outputs[float_tensor] = _add_relu(model, edits, float_tensor, params)
            float_tensor = relu_outputs[float_tensor]
        if float_tensor is None:
            continue
        for use in graph.consumers(TensorRef(graph.name, op.name)):
            edits.connect(use, float_tensor)
        edits.remove(graph, op.name)
        _remove_quantize_chain(model, edits, operands)
        _remove_reshape_pair(model, edits, float_tensor)
        yield edits.to_step(REQUANTIZE_STEP, graph, op, f"its readers read {float_tensor}")


def iterate_quantized_tensors(model: Model) -> Iterator[tuple[str, str, bool, QParams]]:
    """Yield the tensors with a known scale: graph, name after `requantize`, True for a constant, and params."""
    parameters = Parameters(model)
    for graph, op in _ops_of_kinds(model, {"dequantize", "qdq"}):
        params = read_qparams(graph, op, parameters)
        if not isinstance(params, QParams):
            continue
        float_tensor = _float_source(model, graph, op)
        if float_tensor is not None:
            constant = parameters.is_parameter(float_tensor)
            yield float_tensor.graph, model.output(float_tensor).name or str(float_tensor), constant, params
            if _pair_removes_negatives(model, float_tensor, params):
                yield float_tensor.graph, _relu_name(float_tensor), constant, params
        elif _reads_stored_integers(model, graph, op):
            yield graph.name, _float_constant_name(op), True, params


def remaining_quantization_ops(model: Model) -> list[tuple[Graph, Op, str]]:
    """Return the ops that quantize or compute on integers and were not removed."""
    reasons = {
        "integer": "it is an integer op; start from the float model",
        "dequantize": "its integers or its scale are computed at run time",
        "quantize": "an op other than a dequantize op reads its integers",
    }
    ops = _ops_of_kinds(model, QUANTIZATION_KINDS | {"integer"})
    return [(graph, op, reasons.get(op.kind, "its input is unknown")) for graph, op in ops]


def _ops_of_kinds(model: Model, kinds: frozenset[str] | set[str]) -> list[tuple[Graph, Op]]:
    return [(graph, op) for graph, op in model.reachable_ops() if op.kind in kinds]


def _float_source(model: Model, graph: Graph, op: Op) -> TensorRef | None:
    """Return the float tensor that an op quantizes and dequantizes, None if its integers have another origin."""
    quantized = graph.source_of(Use(graph.name, op.name, 0))
    if op.kind == "qdq" or quantized is None:
        return quantized
    home = model.graphs[quantized.graph]
    if home.op(quantized.op).kind != "quantize":
        return None
    float_tensor = home.source_of(Use(home.name, quantized.op, 0))
    for _ in CLAMPING_KINDS:
        if float_tensor is None or float_tensor.graph != home.name:
            break
        if home.op(float_tensor.op).kind not in CLAMPING_KINDS:
            break
        operands = [operand for operand in home.slots(float_tensor.op) if operand is not None]
        data_inputs = [operand for operand in operands if model.op(operand).kind != "constant"]
        if len(home.consumers(float_tensor)) != 1 or len(data_inputs) != 1:
            break
        float_tensor = data_inputs[0]
    if float_tensor is not None and model.op(float_tensor).kind == "cast":
        operand, dtype = model.graphs[float_tensor.graph].slots(float_tensor.op)[0], op.outputs[0].dtype
        if operand is not None and model.output(operand).dtype == dtype != model.output(float_tensor).dtype:
            return operand
    return float_tensor


def _reads_stored_integers(model: Model, graph: Graph, op: Op) -> bool:
    """Return True if an op dequantizes stored integers."""
    integers = graph.source_of(Use(graph.name, op.name, 0))
    constant_op = None if integers is None else model.op(integers)
    has_value = constant_op is not None and constant_op.kind == "constant" and constant_op.read_value is not None
    return has_value and model.traits.rewritable and op.outputs[0].dtype in {"float16", "float32"}


def _pair_removes_negatives(model: Model, float_tensor: TensorRef, params: QParams) -> bool:
    """Return True if a Q/DQ pair removes negative values, and the tensor may have some."""
    if model.traits.runtime != "onnxruntime" or params.axis is not None or isinstance(params.type, FloatType):
        return False
    lowest = params.type.limits(narrow=params.narrow)[0]
    return int(params.zero_point) == lowest and not _is_nonnegative(model, float_tensor)


def _is_nonnegative(model: Model, tensor: TensorRef) -> bool:
    """Return True if none of the ops that produce `tensor`, as far as they are examined, produces negative values."""
    pending = [tensor]
    for current in pending:
        op = model.op(current)
        if op.kind in _NONNEGATIVE_KINDS:
            continue
        operands = model.graphs[current.graph].slots(current.op)
        float_inputs = [
            operand for slot, operand in enumerate(operands) if operand is not None and op.role(slot) == "input"
        ]
        if op.kind not in _SIGN_PRESERVING_KINDS or not float_inputs or len(pending) > _MAX_VISITED_TENSORS:
            return False
        pending += float_inputs
    return True


def _add_relu(model: Model, edits: RecordedEdits, float_tensor: TensorRef, params: QParams) -> TensorRef:
    """Add a Relu after a tensor, or a Clip if the pair's range ends at 6."""
    graph, float_output = model.graphs[float_tensor.graph], model.output(float_tensor)
    step = float(params.scale)
    is_relu6 = abs((params.type.limits()[1] - int(params.zero_point)) * step - _RELU6_LIMIT) <= step / 2
    fields: dict[str, Any] = {"kind": "relu", "type": "Relu"}
    inputs: list[TensorRef | None] = [float_tensor]
    if is_relu6 and model.opset >= _CLIP_INPUTS_OPSET:
        fields = {"kind": "relu6", "type": "Clip", "roles": ("input", "min", "max")}
        constant_fields: dict[str, Any] = {"kind": "constant", "type": "Constant", "roles": ()}
        for limit_name, bound in (("min", 0.0), ("max", _RELU6_LIMIT)):
            value = partial(np.array, bound, np.float32)
            name = f"{float_tensor.op}/{limit_name}"
            inputs.append(edits.add(graph, new_op(graph, name, "float32", (), read_value=value, **constant_fields)))
    return edits.add(
        graph, new_op(graph, _relu_name(float_tensor), float_output.dtype, float_output.shape, **fields), inputs
    )


def _relu_name(float_tensor: TensorRef) -> str:
    return f"{float_tensor.op}/relu"


def _float_constant_name(op: Op) -> str:
    """Return the name of the constant that replaces the output of a dequantize op."""
    name_match = _INSERTED_DEQUANTIZE_NAME.fullmatch(op.name)
    return name_match[1] if name_match else f"{op.name}/float"


def _float_constant(model: Model, integers: TensorRef, op: Op, params: QParams) -> Op:
    """Return a constant that replaces the output of `op`, which dequantizes `integers`."""
    output = op.outputs[0]
    return new_op(
        model.graphs[integers.graph],
        _float_constant_name(op),
        output.dtype,
        output.shape,
        kind="constant",
        type=model.traits.constant_type,
        roles=(),
        read_value=partial(_dequantized_constant, model.op(integers), params, output.dtype),
    )


def _is_table(graph: Graph, tensor: TensorRef) -> bool:
    return any(graph.graphs[use.graph].op(use.op).kind in TABLE_KINDS for use in graph.consumers(tensor))


def _add_transposed_table(
    edits: RecordedEdits, graph: Graph, constant: Op, tables: Iterable[TensorRef]
) -> TensorRef | None:
    """Add a Transpose in place of a constant with the values of a table, so that tied tables are stored once."""
    shape, read_value = constant.outputs[0].shape or (), constant.read_value
    for table in tables if constant.type == "Constant" and len(shape) == 2 else ():  # noqa: PLR2004  # rows and columns
        stored = graph.graphs[table.graph].op(table.op)
        is_similar = table.graph == graph.name and _is_table(graph, table) and stored.outputs[0].shape == shape[::-1]
        if not is_similar or stored.kind != "constant" or stored.read_value is None or read_value is None:
            continue
        if np.array_equal(stored.read_value().T, read_value()):
            fields = {"kind": "transpose", "type": "Transpose", "roles": ("input",), "attrs": {"perm": [1, 0]}}
            return edits.add(graph, new_op(graph, constant.name, constant.outputs[0].dtype, shape, **fields), [table])
    return None


def _dequantized_constant(integers: Op, params: QParams, dtype: str | None) -> Array:
    """Return the dequantized values of an integer constant, as float32 or float16."""
    if integers.read_value is None:
        raise InternalError(f"the constant {integers.name!r} has no value.")
    return dequantize(integers.read_value(), params).astype(dtype)


def _remove_reshape_pair(model: Model, edits: RecordedEdits, float_tensor: TensorRef) -> None:
    """Remove the two Reshapes around a removed pair, which only put the channels on one axis."""
    graph = model.graphs[float_tensor.graph]
    original = graph.source_of(Use(graph.name, float_tensor.op, 0))
    if original is None or graph.op(float_tensor.op).kind != "reshape":
        return
    for use in graph.consumers(float_tensor):
        reshaped_back = TensorRef(use.graph, use.op)
        reader_graph = model.graphs[use.graph]
        sizes = reader_graph.source_of(Use(use.graph, use.op, 1))
        value = None if sizes is None or reader_graph.op(use.op).kind != "reshape" else model.op(sizes).read_value
        if value is None or tuple(value().tolist()) != model.output(original).shape:
            continue
        for reader in reader_graph.consumers(reshaped_back):
            edits.connect(reader, original)
        remove_unread_ops(model, [reshaped_back], None, edits)


def _remove_quantize_chain(model: Model, edits: RecordedEdits, tensors: list[TensorRef]) -> None:
    """Remove the ops that produced the tensors of a removed op, unless something else reads them."""
    constants = list(tensors)
    for tensor in dict.fromkeys(tensors):  # an invalid op may read one tensor in two slots
        current: TensorRef | None = tensor
        while current is not None and model.op(current).kind in {"quantize", "cast", *CLAMPING_KINDS}:
            graph = model.graphs[current.graph]
            if graph.successors(current.op):
                break
            operands = [operand for operand in graph.slots(current.op) if operand is not None]
            edits.remove(graph, current.op)
            constants = [operand for operand in constants if operand != current] + operands
            current = next((source for source in operands if model.op(source).kind in {"cast", *CLAMPING_KINDS}), None)
    remove_unread_ops(model, constants, frozenset({"constant"}), edits)
