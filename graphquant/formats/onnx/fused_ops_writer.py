"""Fused ops of com.microsoft in place of the standard ops that stand for them.

`lower_fused_ops` runs before a model is emitted: a DequantizeLinear with `Op.fused_attrs` and its readers become fused
ops. An op that `lift_fused_ops` replaced, and that was not changed since, is written exactly as it was read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.errors import InternalError
from graphquant.formats.onnx.fused_ops import (
    BIAS_SLOT,
    BITS_PER_BYTE,
    DYNAMIC_BIAS_SLOT,
    DYNAMIC_QUANTIZE,
    LSTM_SLOTS,
    MOE_FIRST_WEIGHT,
    MOE_WEIGHTS,
    PACKED_SUFFIX,
    SHARED_DYNAMIC_PRODUCT,
    TRANSPOSED_SUFFIX,
    LiftedOp,
    MatrixLayout,
    add_constant,
    constant_value,
    numpy_dtype,
    remove_if_unread,
    replace_op,
)
from graphquant.formats.onnx.tensors import DTYPE_CODES
from graphquant.ir import Model, Op, Output, Parameters, TensorRef, Use, fully_known_shape
from graphquant.numerics import IntType, QParams
from graphquant.qdq import (
    DYNAMIC_FORM,
    DYNAMIC_LSTM,
    DYNAMIC_PRODUCT,
    FOLDED_FORM,
    LAYER_WEIGHT_SLOTS,
    MIN_GATHER_BLOCK_SIZE,
    PackedWeight,
    fused_op_type,
    is_dynamic_lstm,
    is_dynamic_product,
    read_qparams,
)
from graphquant.qdq.family import new_op
from graphquant.qdq.onnx_qdq import MICROSOFT_DOMAIN

if TYPE_CHECKING:
    from graphquant.ir import Graph, Shape
    from graphquant.numerics import Array

_LayerConstants = dict[TensorRef, list[TensorRef | None]]  # data, scale and zero point by the dequantized weight
MIN_SHARED_READERS = 3  # of one tensor, for which one DynamicQuantizeLinear is as fast with a single row


def lower_fused_ops(model: Model) -> Model:
    """Return a copy of the model in which fused ops replace their standard form; the model itself if it has none."""
    marked = [
        (graph.name, op.name) for graph in model.graphs.values() for op in graph.ops() if op.fused_attrs is not None
    ]
    if not marked:
        return model
    lowered = replace(model.copy(), provenance=model.provenance, original_model=model.original_model)
    for (graph_name, _), record in model.source.lifted.items():
        if graph_name in lowered.graphs:
            _restore_unchanged(lowered, lowered.graphs[graph_name], record)
    parameters, layer_constants = Parameters(lowered), _LayerConstants()
    for graph_name, name in marked:
        graph = lowered.graphs[graph_name]
        if name in graph and (graph.op(name).fused_attrs or {}).get("form") == FOLDED_FORM:
            _fold(lowered, graph, graph.op(name), parameters)
        elif name in graph:
            _lower_readers(lowered, graph, graph.op(name), parameters, layer_constants)
    for graph in lowered.graphs.values():
        _share_rounded_inputs(graph)
    return lowered


def _restore_unchanged(model: Model, graph: Graph, record: LiftedOp) -> None:
    """Restore a lifted op if the ops in its place did not change."""
    for op, slots in record.replacements:
        if op.name not in graph or graph.op(op.name) is not op or tuple(graph.slots(op.name)) != slots:
            return
    for tensor, (op, slots) in record.sources.items():
        home = model.graphs[tensor.graph]
        if tensor.op not in home:
            home.add_op(op, slots)
        elif home.op(tensor.op) is not op:
            return
    replaced = [slot for _, slots in record.replacements for slot in slots if slot is not None]
    replace_op(graph, record.op, record.slots)
    graph.rerouted_uses.difference_update(Use(graph.name, record.op.name, slot) for slot in range(len(record.slots)))
    for op, _ in reversed(record.replacements[:-1]):
        remove_if_unread(model, TensorRef(graph.name, op.name))
    for tensor in replaced:
        if tensor.op in model.graphs[tensor.graph] and model.op(tensor).kind == "constant":
            remove_if_unread(model, tensor)


def _packed_weight(graph: Graph, dequantize: Op, params: QParams) -> PackedWeight:
    """Return the properties of the weight of a DequantizeLinear."""
    bits, data = (dequantize.fused_attrs or {}).get("bits"), graph.slots(dequantize.name)[0]
    return PackedWeight(
        type=params.type if bits is None else IntType(int(bits), signed=params.type.signed),
        axis=params.axis,
        block=params.block,
        shape=None if data is None else graph.output(data).shape,
    )


def _lower_readers(
    model: Model, graph: Graph, dequantize: Op, parameters: Parameters, layer_constants: _LayerConstants
) -> None:
    """Replace the readers of a dequantized weight that have a fused form, and the weight if no other op reads it.

    `layer_constants` has the constants of weights of an LSTM or MoE by the dequantized weight, and gets new ones.
    """
    data, scale, zero_point = [*graph.slots(dequantize.name), None][:3]
    params = read_qparams(graph, dequantize, parameters)
    if data is None or scale is None or not isinstance(params, QParams):
        return
    attrs, weight = dequantize.fused_attrs or {}, _packed_weight(graph, dequantize, params)
    packed: dict[str, list[TensorRef | None]] = {}
    transposed: list[TensorRef] = []
    for use in graph.consumers(TensorRef(graph.name, dequantize.name)):
        consumer = graph.op(use.op) if use.graph == graph.name and use.op in graph else None
        if consumer is not None and consumer.type in LAYER_WEIGHT_SLOTS:
            if not _lower_layer(model, graph, consumer, attrs, parameters, layer_constants):
                _fold(model, graph, dequantize, parameters)
                return
            continue
        if consumer is not None and attrs.get("form") == DYNAMIC_FORM:
            _lower_dynamic_product(model, graph, dequantize, use, weight, transposed)
            continue
        op_type = "" if consumer is None else fused_op_type(graph, consumer, use.slot, weight)
        if consumer is None or not op_type:
            continue
        slots = graph.slots(consumer.name)
        fused_attrs: dict[str, Any] = {"block_size": params.block, "bits": weight.bits}
        if op_type == "MatMulNBits":
            layout = _matrix_layout(weight)
            packed[op_type] = packed.get(op_type) or _add_packed_weight(graph, dequantize, layout, params, model)
            inputs = [slots[0], *packed[op_type]]
            if bias := next(iter(slots[2:]), None):
                inputs = [*inputs, *[None] * (BIAS_SLOT - len(inputs)), bias]
            fused_attrs |= {"K": layout.columns, "N": layout.rows, "accuracy_level": attrs.get("accuracy_level", 0)}
        else:
            constants = [data, scale, zero_point]
            fused_attrs = {"block_size": params.block, "gather_axis": 0, "quantize_axis": params.axis}
            if weight.bits == BITS_PER_BYTE:
                layout = _table_layout(weight)
                fused_attrs |= {"block_size": layout.block, "quantize_axis": 1, "bits": weight.bits}
                packed[op_type] = packed.get(op_type) or _add_packed_weight(
                    graph, dequantize, layout, params, model, sizes=(layout.rows,)
                )
                constants = packed[op_type]
            inputs = [constants[0], slots[1], *filter(None, constants[1:])]
        replace_op(graph, _fused_op(consumer, op_type, fused_attrs, dequantize), inputs)
    _remove_with_constants(model, TensorRef(graph.name, dequantize.name))


def _lower_layer(
    model: Model, graph: Graph, layer: Op, attrs: Mapping[str, Any], parameters: Parameters, constants: _LayerConstants
) -> bool:
    """Replace an LSTM or MoE by its fused op if it reads all its weights as dequantized ones of one form."""
    slots, weights = graph.slots(layer.name), dict[int, tuple[Op, PackedWeight, QParams]]()
    for slot in LAYER_WEIGHT_SLOTS[layer.type]:
        tensor = next(iter(slots[slot:]), None)
        if tensor is None:
            continue
        op = model.op(tensor)
        params = read_qparams(graph, op, parameters) if op.fused_attrs and tensor.graph == graph.name else None
        if not isinstance(params, QParams) or (op.fused_attrs or {}).get("form") != attrs.get("form"):
            return False
        weight = _packed_weight(graph, op, params)
        is_fused = fused_op_type(graph, layer, slot, weight) or is_dynamic_lstm(layer, slot, weight)
        if not is_fused:
            return False
        weights[slot] = op, weight, params
    for slot, (op, weight, params) in weights.items():
        if slots[slot] not in constants:
            layout, sizes = _matrix_layout(weight), (fully_known_shape(weight.shape) or ())[:-1]
            constants[TensorRef(graph.name, op.name)] = (
                _add_packed_weight(graph, op, layout, params, model, sizes=sizes)
                if layer.kind == "moe"
                else _add_gates(model, graph, op, weight, params)
            )
    sources = {slot: TensorRef(graph.name, op.name) for slot, (op, *_) in weights.items()}
    inputs = _fused_layer_inputs(layer, slots, {slot: constants[tensor] for slot, tensor in sources.items()})
    first, weight, _ = next(iter(weights.values()))
    rules, anchors = ("\n".join(getattr(op, key) for op, *_ in weights.values()) for key in ("rule", "anchor"))
    marks = replace(first, rule=rules.strip(), anchor=anchors.strip())
    fused_attrs = {name: value for name, value in layer.attrs.items() if name != "layout"}
    if layer.kind == "moe":
        # Releases before 1.31 have no accuracy level, and compute QMoE in up to 20 times the time of MoE.
        level = attrs.get("accuracy_level", 0)
        fused_attrs |= {"expert_weight_bits": weight.bits, "block_size": weight.block, "accuracy_level": level}
    op_type = "QMoE" if layer.kind == "moe" else DYNAMIC_LSTM
    replace_op(graph, _fused_op(layer, op_type, fused_attrs, marks), inputs)
    for tensor in sources.values():
        _remove_with_constants(model, tensor)
    return True


def _fused_layer_inputs(
    layer: Op, slots: Sequence[TensorRef | None], constants: Mapping[int, list[TensorRef | None]]
) -> list[TensorRef | None]:
    """Return the inputs of a fused LSTM or MoE. `constants` has data, scale and zero point by the slot of a weight."""
    if layer.kind != "moe":
        inputs = [*slots, *[None] * (LSTM_SLOTS - len(slots))]
        for slot, (data, *_) in constants.items():
            inputs[slot] = data
        return [*inputs, *(tensor for _, *scales in constants.values() for tensor in scales)]
    padded = [*slots, *[None] * (MOE_FIRST_WEIGHT + 2 * MOE_WEIGHTS)]
    weights = {slot: [*constants.get(slot, []), None, None, None][:3] for slot in LAYER_WEIGHT_SLOTS[layer.type]}
    inputs = [*padded[:MOE_FIRST_WEIGHT], *(t for i, (d, s, _) in weights.items() for t in (d, s, padded[i + 1]))]
    return [*inputs, *(zero_point for *_, zero_point in weights.values())]


def _add_gates(
    model: Model, graph: Graph, dequantize: Op, weight: PackedWeight, params: QParams
) -> list[TensorRef | None]:
    """Add a weight of a DynamicQuantizeLSTM, (directions, columns, gates), its scales and zero points.

    Both are (directions,) or (directions, gates).
    """
    directions, gates, columns = weight.shape or ()
    sizes: tuple[int, ...] = (directions or 0,) if params.axis is None else (directions or 0, gates or 0)
    data, scale = graph.slots(dequantize.name)[:2]
    if data is None or scale is None:
        raise InternalError(f"{dequantize.name!r} has no scale.")
    read_data = partial(constant_value, model.op(data))
    dtype = graph.output(data).dtype or ""

    def add(name: str, dtype_name: str | None, shape: Shape, read_value: Callable[[], Array]) -> TensorRef:
        return add_constant(graph, f"{name}{PACKED_SUFFIX}", dtype_name, shape, read_value, rule=dequantize.rule)

    def expand(values: Array) -> Array:
        return np.ascontiguousarray(np.broadcast_to(values.reshape(values.shape[:2]), sizes))

    return [
        add(data.op, dtype, (directions, columns, gates), lambda: read_data().swapaxes(1, 2).copy()),
        add(scale.op, graph.output(scale).dtype, sizes, lambda: expand(params.scale)),
        add(f"{dequantize.name}/zero_point", dtype, sizes, lambda: expand(params.zero_point.astype(dtype))),
    ]


def _fused_op(op: Op, op_type: str, attrs: Mapping[str, Any], dequantize: Op) -> Op:
    """Return the fused op with the name and output of `op`."""
    return replace(
        op,
        kind="integer",
        type=op_type,
        domain=MICROSOFT_DOMAIN,
        roles=("input",),
        channel_axis=None,
        attrs=attrs,
        source=None,
        rule=dequantize.rule,
        anchor=dequantize.anchor,
    )


def _lower_dynamic_product(
    model: Model, graph: Graph, dequantize: Op, use: Use, weight: PackedWeight, transposed: list[TensorRef]
) -> None:
    """Replace a MatMul or Gemm, and the Add of its bias, by DynamicQuantizeMatMul if possible.

    `transposed` has the transposed weight if a Gemm needed it before, and gets it otherwise.
    """
    product = graph.op(use.op)
    if not is_dynamic_product(graph, product, use.slot, weight):
        return
    source, _, *bias = graph.slots(product.name)
    constants = [tensor for tensor in graph.slots(dequantize.name) if tensor is not None]
    if product.numeric_attr("transB", 0):
        data, read = graph.output(constants[0]), partial(constant_value, model.op(constants[0]))
        name, shape = f"{constants[0].op}{TRANSPOSED_SUFFIX}", fully_known_shape(data.shape) or ()
        transposed[:] = transposed or [
            add_constant(
                graph, name, data.dtype, shape[::-1], lambda: np.array(read().T, order="C"), rule=dequantize.rule
            )
        ]
        constants = [*transposed, *constants[1:]]
    result, columns = product, graph.output(constants[0]).shape[-1:]
    readers = graph.consumers(TensorRef(graph.name, product.name))
    reads_once = not bias and len(readers) == 1 and readers[0].graph == graph.name
    if reads_once and graph.op(readers[0].op).type == "Add":
        add = graph.op(readers[0].op)
        addend = graph.slots(add.name)[1 - readers[0].slot]
        if addend is not None and model.op(addend).kind == "constant" and graph.output(addend).shape == columns:
            result, bias = add, [addend]
    inputs = [source, *constants, *[None] * (DYNAMIC_BIAS_SLOT - 1 - len(constants)), *bias]
    replace_op(graph, _fused_op(result, DYNAMIC_PRODUCT, {}, dequantize), inputs)
    if result is not product:
        graph.remove_op(product.name)


def _share_rounded_inputs(graph: Graph) -> None:
    """Round a tensor once for all new dynamic products that read it, if that takes less time than once for each."""
    readers = dict[TensorRef, list[str]]()
    for op in graph.ops():
        source = graph.slots(op.name)[0] if (op.type, op.source) == (DYNAMIC_PRODUCT, None) else None
        if source is not None:
            readers.setdefault(source, []).append(op.name)
    for source, names in readers.items():
        if len(names) < MIN_SHARED_READERS:
            continue
        first = graph.op(names[0])
        fields: dict[str, Any] = {"kind": "integer", "type": DYNAMIC_QUANTIZE, "roles": ("input",), "rule": first.rule}
        rounded = new_op(graph, f"{source.op}/rounded", "uint8", graph.output(source).shape, **fields)
        parameters = (("scale", "float32"), ("zero_point", "uint8"))
        outputs = [Output(f"{rounded.name}/{name}", dtype, ()) for name, dtype in parameters]
        rounded = replace(rounded, anchor=first.anchor, outputs=(*rounded.outputs, *outputs))
        graph.add_op(rounded, [source])
        values, scale, zero_point = (TensorRef(graph.name, rounded.name, port) for port in range(3))
        for name in names:
            _, weight, weight_scale, *rest = graph.slots(name)
            inputs = [values, weight, scale, weight_scale, zero_point, *rest]
            replace_op(graph, replace(graph.op(name), type=SHARED_DYNAMIC_PRODUCT), inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoldedOps:
    """Adds the ops that replace a DequantizeLinear."""

    model: Model
    graph: Graph
    dequantize: Op

    def add(self, op_type: str, suffix: str, inputs: Sequence[TensorRef], shape: Shape, **attrs: Any) -> TensorRef:
        """Add an op with the type of the dequantized tensor."""
        fields: dict[str, Any] = {"kind": op_type.lower(), "type": op_type, "attrs": attrs}
        name, dtype = f"{self.dequantize.name}{suffix}", self.dequantize.outputs[0].dtype
        op = new_op(self.graph, name, dtype, shape, rule=self.dequantize.rule, anchor=self.dequantize.anchor, **fields)
        return self.graph.add_op(op, inputs)

    def add_sizes(self, name: str, sizes: Sequence[int]) -> TensorRef:
        """Add a constant of sizes or axes."""
        values = np.array(sizes, np.int64)
        name = f"{self.dequantize.name}/{name}"
        return add_constant(self.graph, name, "int64", values.shape, values.view, rule=self.dequantize.rule)

    def reshape_constant(
        self, source: TensorRef, dtype: str | None, shape: tuple[int, ...], padded: tuple[int, ...]
    ) -> TensorRef:
        """Add a constant with the values of another one, with zeros to the shape `padded`, as `dtype` and `shape`."""
        constant = self.model.op(source)

        def read_value() -> Array:
            value = constant_value(constant)
            if math.prod(shape) > value.size:
                value = np.pad(value, [(0, whole - size) for size, whole in zip(value.shape, padded, strict=True)])
            return value.reshape(shape).astype(numpy_dtype(dtype or ""), copy=False)

        name = f"{source.op}{PACKED_SUFFIX}"
        return add_constant(self.graph, name, dtype, shape, read_value, rule=self.dequantize.rule)


def _fold(model: Model, graph: Graph, dequantize: Op, parameters: Parameters) -> None:
    """Replace a DequantizeLinear by Cast, Sub, Mul and, for blocks, Reshape; by a Slice for a partial last block."""
    sources = [tensor for tensor in graph.slots(dequantize.name) if tensor is not None]
    data, scale, *zero_point = sources
    params, dtype = read_qparams(graph, dequantize, parameters), dequantize.outputs[0].dtype or ""
    shape = fully_known_shape(graph.output(data).shape)
    if not isinstance(params, QParams) or shape is None or model.op(data).read_value is None:
        return
    ops, axis = _FoldedOps(model=model, graph=graph, dequantize=dequantize), params.axis or 0
    blocks, sizes = _folded_shapes(shape, params)
    padded = shape if blocks == shape else (*blocks[:axis], blocks[axis] * blocks[axis + 1], *blocks[axis + 2 :])
    if blocks != shape:
        data = ops.reshape_constant(data, graph.output(data).dtype, blocks, padded)
    values = ops.add("Cast", "/cast", [data], blocks, to=DTYPE_CODES[dtype])
    if zero_point and params.zero_point.any():
        values = ops.add("Sub", "/sub", [values, ops.reshape_constant(zero_point[0], dtype, sizes, sizes)], blocks)
    last, inputs = "Mul", [values, ops.reshape_constant(scale, dtype, sizes, sizes)]
    if blocks != shape:
        values = ops.add("Mul", "/blocks", inputs, blocks)
        last, inputs = "Reshape", [values, ops.add_sizes("shape", padded)]
    if padded != shape:
        values = ops.add("Reshape", "/padded", inputs, padded)
        ends = [ops.add_sizes(name, [value]) for name, value in (("start", 0), ("end", shape[axis]), ("axis", axis))]
        last, inputs = "Slice", [values, *ends]
    changes: dict[str, Any] = {"kind": last.lower(), "type": last, "domain": "", "roles": ("input",), "attrs": {}}
    replace_op(graph, replace(dequantize, **changes, fused_attrs=None), inputs)
    for tensor in sources:
        remove_if_unread(model, tensor)


def _folded_shapes(shape: tuple[int, ...], params: QParams) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a weight with an axis for its blocks, and that of scales which broadcast to it."""
    axis = params.axis
    if axis is None:
        return shape, (1,) * len(shape)
    if params.block is None:
        return shape, tuple(size if i == axis else 1 for i, size in enumerate(shape))
    count = -(-shape[axis] // params.block)
    return ((*shape[:axis], count, params.block, *shape[axis + 1 :]), (*shape[:axis], count, 1, *shape[axis + 1 :]))


def _matrix_layout(weight: PackedWeight) -> MatrixLayout:
    """Return the layout of a matrix, or of the rows of all experts, with blocks along the axis that is summed over."""
    *sizes, second = (size or 0 for size in weight.shape or ())
    first, transposed = math.prod(sizes), weight.axis == 0
    rows, columns = (second, first) if transposed else (first, second)
    return MatrixLayout(rows=rows, columns=columns, bits=weight.bits, block=weight.block or 1, transposed=transposed)


def _table_layout(weight: PackedWeight) -> MatrixLayout:
    """Return the layout of the rows of a table; a scale per row is one block, which must be a power of two."""
    rows, columns = (size or 0 for size in weight.shape or ())
    block = weight.block or max(1 << (columns - 1).bit_length(), MIN_GATHER_BLOCK_SIZE)
    return MatrixLayout(rows=rows, columns=columns, bits=weight.bits, block=block, transposed=False)


def _add_packed_weight(
    graph: Graph, dequantize: Op, layout: MatrixLayout, params: QParams, model: Model, *, sizes: tuple[int, ...] = ()
) -> list[TensorRef | None]:
    """Add the packed weight, the scales and, unless they are all in the middle of the range, the zero points.

    Those of experts and of tables have the shape (*sizes, values of a row), without elements past the last column.
    MatMulNBits reads those of a single matrix, in whole blocks.
    """
    data, scale, *zero_point = (tensor for tensor in graph.slots(dequantize.name) if tensor is not None)
    offset = 1 << (layout.bits - 1) if params.type.signed else 0

    def add(source: TensorRef, dtype: str, shape: tuple[int, ...], read: Callable[[], Array]) -> TensorRef:
        if sizes:
            shape = (*sizes, math.prod(shape) // layout.rows)
        is_transposed = source is data and not sizes and not layout.transposed
        name = f"{source.op}{TRANSPOSED_SUFFIX * is_transposed}{PACKED_SUFFIX}"
        return add_constant(graph, name, dtype, shape, lambda: read().reshape(shape), rule=dequantize.rule)

    read_data, read_scale = (model.op(tensor).read_value for tensor in (data, scale))
    if read_data is None or read_scale is None:
        raise InternalError(f"the weight {data} or its scale {scale} has no value.")
    blob = -(-layout.block * layout.bits // BITS_PER_BYTE)
    row_bytes = -(-layout.columns * layout.bits // BITS_PER_BYTE) if sizes else layout.blocks * blob
    scale_dtype, count = graph.output(scale).dtype, (layout.rows * layout.blocks,)

    def read_packed() -> Array:
        return layout.pack(read_data, offset).reshape(layout.rows, -1)[:, :row_bytes]

    packed_shape = (layout.rows, row_bytes) if sizes else (layout.rows, layout.blocks, blob)
    inputs: list[TensorRef | None] = [
        add(data, "uint8", packed_shape, read_packed),
        add(scale, scale_dtype, count, partial(layout.pack_scales, read_scale)),
    ]
    if (params.zero_point + offset != 1 << (layout.bits - 1)).any():
        zero_points = layout.pack_zero_points(params.zero_point, offset)
        inputs.append(add(next(iter(zero_point), scale), "uint8", zero_points.shape, zero_points.view))
    return inputs


def _remove_with_constants(model: Model, tensor: TensorRef) -> None:
    """Remove an op that nothing reads, and the constants that only it reads."""
    graph = model.graphs[tensor.graph]
    if tensor.op not in graph or graph.consumers_by_port(tensor.op):
        return
    constants = {slot for slot in graph.slots(tensor.op) if slot is not None and model.op(slot).kind == "constant"}
    graph.remove_op(tensor.op)
    for constant in sorted(constants):
        remove_if_unread(model, constant)
