"""Fused ops of com.microsoft in place of the standard ops that stand for them.

`lower_fused_ops` runs before a model is emitted: a DequantizeLinear with `Op.fused_attrs` and its readers become fused
ops. An op that `lift_fused_ops` replaced, and that was not changed since, is written exactly as it was read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    OP_KEY,
    PACKED_SUFFIX,
    REPLACED_VALUE,
    SHARED_DYNAMIC_PRODUCT,
    SUMMAND_KEYS,
    TABLE_SUFFIX,
    TRANSPOSE_KEY,
    TRANSPOSED_SUFFIX,
    LiftedOp,
    MatrixLayout,
    add_constant,
    add_transpose,
    constant_value,
    remove_if_unread,
)
from graphquant.formats.onnx.tensors import DTYPE_CODES
from graphquant.ir import (
    MATRIX_PRODUCT_KINDS,
    TABLE_KINDS,
    Model,
    Op,
    Output,
    Parameters,
    TensorRef,
    Use,
    fully_known_shape,
)
from graphquant.numerics import IntType, QParams, numpy_dtype
from graphquant.qdq import (
    DYNAMIC_ATTENTION,
    DYNAMIC_FORM,
    DYNAMIC_LSTM,
    DYNAMIC_PRODUCT,
    FOLDED_FORM,
    LAYER_WEIGHT_SLOTS,
    MIN_GATHER_BLOCK_SIZE,
    PackedWeight,
    dynamic_op_type,
    fused_op_type,
    is_matrix_transpose,
    read_qparams,
)
from graphquant.qdq.family import new_op
from graphquant.qdq.onnx_qdq import MICROSOFT_DOMAIN
from graphquant.quantize import node_notes

if TYPE_CHECKING:
    from graphquant.ir import Graph, Shape
    from graphquant.numerics import Array

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
    parameters, layer_weights = Parameters(lowered), dict[TensorRef, _Weight]()
    for graph_name, name in marked:
        graph = lowered.graphs[graph_name]
        weight = _Weight.read(lowered, graph, graph.op(name), parameters) if name in graph else None
        if weight is not None and weight.form == FOLDED_FORM:
            weight.fold()
        elif weight is not None:
            _lower_readers(weight, parameters, layer_weights)
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
    for op, slots in record.fused:
        graph.replace_op(op, slots)
        graph.rerouted_uses.difference_update(Use(graph.name, op.name, slot) for slot in range(len(slots)))
    for op, _ in reversed(record.replacements[:-1]):
        remove_if_unread(model, TensorRef(graph.name, op.name))
    for tensor in replaced:
        if tensor.op in model.graphs[tensor.graph] and model.op(tensor).kind == "constant":
            remove_if_unread(model, tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """A weight with its DequantizeLinear, and the ops and constants in its place."""

    model: Model
    graph: Graph
    dequantize: Op
    params: QParams
    constants: dict[str, list[TensorRef | None]] = field(default_factory=dict)  # new ones by op type or suffix of names

    @classmethod
    def read(cls, model: Model, graph: Graph, op: Op, parameters: Parameters) -> _Weight | None:
        """Return the weight of an op, or None if it is no DequantizeLinear that can be replaced."""
        params = read_qparams(graph, op, parameters) if op.fused_attrs else None
        return cls(model=model, graph=graph, dequantize=op, params=params) if isinstance(params, QParams) else None

    @property
    def form(self) -> str | None:
        """The form of the weight in files."""
        return (self.dequantize.fused_attrs or {}).get("form")

    @property
    def tensor(self) -> TensorRef:
        """The dequantized tensor."""
        return TensorRef(self.graph.name, self.dequantize.name)

    @property
    def sources(self) -> list[TensorRef]:
        """The constants: data, scale and, in some weights, zero point."""
        return [tensor for tensor in self.graph.slots(self.dequantize.name) if tensor is not None]

    @property
    def packed(self) -> PackedWeight:
        """The properties on which the choice of a fused op depends."""
        bits, params = (self.dequantize.fused_attrs or {}).get("bits"), self.params
        return PackedWeight(
            type=params.type if bits is None else IntType(int(bits), signed=params.type.signed),
            axis=params.axis,
            block=params.block,
            shape=self.graph.output(self.sources[0]).shape,
        )

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

    def fold(self) -> None:
        """Replace a DequantizeLinear by Cast, Sub, Mul and, for blocks, Reshape; by a Slice for a partial last block.

        If a MatMulNBits has the same weight of bytes, its integers are read.
        """
        graph, dequantize, params, (data, scale, *zero_point) = self.graph, self.dequantize, self.params, self.sources
        sources, dtype, axis = self.sources, dequantize.outputs[0].dtype or "", params.axis or 0
        shape = fully_known_shape(graph.output(data).shape)
        if shape is None or self.model.op(data).read_value is None:
            return
        packed = self.constants.get(TABLE_SUFFIX) or self.constants.get(TRANSPOSED_SUFFIX) or []
        shared = packed[0] if len(packed) == 2 else None  # noqa: PLR2004  # integers and scales, without zero points
        blocks, sizes = _folded_shapes(shape, params, is_packed=shared is not None)
        padded = shape if blocks == shape else (*blocks[:axis], blocks[axis] * blocks[axis + 1], *blocks[axis + 2 :])
        if blocks != shape:
            data = shared or self.reshape_constant(data, graph.output(data).dtype, blocks, padded)
        values = self.add("Cast", "/cast", [data], blocks, to=DTYPE_CODES[dtype])
        if shared is not None:
            middle = np.full((1,) * len(sizes), 1 << (BITS_PER_BYTE - 1), numpy_dtype(dtype))
            name = f"{dequantize.name}/middle"
            zero = add_constant(graph, name, dtype, middle.shape, middle.view, rule=dequantize.rule)
            values = self.add("Sub", "/sub", [values, zero], blocks)
        elif zero_point and params.zero_point.any():
            # As floats, those of blocks of 32 with 4 bits take a sixth of the file.
            stored_dtype = dtype if params.block is None else graph.output(zero_point[0]).dtype
            zero = self.reshape_constant(zero_point[0], stored_dtype, sizes, sizes)
            if params.block is not None:
                zero = self.add("Cast", "/zero_cast", [zero], sizes, to=DTYPE_CODES[dtype])
            values = self.add("Sub", "/sub", [values, zero], blocks)
        last, inputs = "Mul", [values, self.reshape_constant(scale, dtype, sizes, sizes)]
        if blocks != shape:
            values = self.add("Mul", "/blocks", inputs, blocks)
            last, inputs = "Reshape", [values, self.add_sizes("shape", padded)]
        if padded != shape:
            values = self.add("Reshape", "/padded", inputs, padded)
            ends = ("start", 0), ("end", shape[axis]), ("axis", axis)
            last, inputs = "Slice", [values, *(self.add_sizes(name, [value]) for name, value in ends)]
        changes: dict[str, Any] = {"kind": last.lower(), "type": last, "domain": "", "roles": ("input",), "attrs": {}}
        graph.replace_op(replace(dequantize, **changes, fused_attrs=None), inputs)
        for tensor in sources:
            remove_if_unread(self.model, tensor)

    def pack_reader(self, use: Use, read: PackedWeight) -> None:
        """Replace a reader of the weight, which reads it transposed or not, by a fused op if there is one."""
        graph, dequantize, params, weight = self.graph, self.dequantize, self.params, self.packed
        consumer, slots, constants = graph.op(use.op), graph.slots(use.op), [*graph.slots(dequantize.name)]
        result, op_type, attrs = consumer, fused_op_type(graph, consumer, use.slot, read), dequantize.fused_attrs or {}
        fused_attrs: dict[str, Any] = {"block_size": params.block, "bits": weight.bits}
        if op_type == "MatMulNBits":
            layout, suffix = _matrix_layout(weight), TRANSPOSED_SUFFIX if weight.axis else ""
            suffix = suffix if read == weight else TABLE_SUFFIX
            self.constants[suffix] = self.constants.get(suffix) or self.add_packed(layout, suffix)
            inputs = [slots[0], *self.constants[suffix]]
            # onnxruntime would join the Add of the bias and a Gelu to a BiasGelu, which takes longer.
            result, bias = self.find_bias(consumer, (layout.rows,))
            if any(bias):
                inputs = [*inputs, *[None] * (BIAS_SLOT - len(inputs)), *bias]
            fused_attrs |= {"K": layout.columns, "N": layout.rows, "accuracy_level": attrs.get("accuracy_level", 0)}
        elif op_type:
            fused_attrs = {"block_size": params.block, "gather_axis": 0, "quantize_axis": params.axis}
            if weight.bits == BITS_PER_BYTE:
                rows, columns = (size or 0 for size in weight.shape or ())
                # A scale per row is one block, which must be a power of two.
                block = weight.block or max(1 << (columns - 1).bit_length(), MIN_GATHER_BLOCK_SIZE)
                layout = MatrixLayout(rows=rows, columns=columns, bits=weight.bits, block=block, transposed=False)
                fused_attrs |= {"block_size": layout.block, "quantize_axis": 1, "bits": weight.bits}
                constants = self.constants.get(op_type) or self.add_packed(layout, sizes=(layout.rows,))
                self.constants[op_type] = constants
            inputs = [constants[0], slots[1], *filter(None, constants[1:])]
        else:
            return
        self.replace_product(use, result, _fused_op(result, op_type, fused_attrs, dequantize), inputs)

    def find_bias(self, product: Op, columns: Shape | None) -> tuple[Op, list[TensorRef | None]]:
        """Return the op that adds the bias, the product or an Add of a constant with the shape `columns`, and it."""
        graph, bias = self.graph, [*self.graph.slots(product.name)[2:]]
        readers = graph.consumers(TensorRef(graph.name, product.name))
        if any(bias) or product.type != "MatMul" or len(readers) != 1 or readers[0].graph != graph.name:
            return product, bias
        add = graph.op(readers[0].op)
        if add.type == "Add":
            addend = graph.slots(add.name)[1 - readers[0].slot]
            if addend and self.model.op(addend).kind == "constant" and graph.output(addend).shape == columns:
                return add, [addend]
        return product, bias

    def add_packed(self, layout: MatrixLayout, suffix: str = "", sizes: tuple[int, ...] = ()) -> list[TensorRef | None]:
        """Add the packed weight, the scales and, unless they are all in the middle of the range, the zero points.

        Those of experts and of tables have the shape (*sizes, values of a row), without elements past the last column.
        MatMulNBits reads those of a single matrix, in whole blocks. `suffix` tells how the standard product reads it.
        """
        graph, params, (data, scale, *zero_point) = self.graph, self.params, self.sources
        offset = 1 << (layout.bits - 1) if params.type.signed else 0

        def add(source: TensorRef, dtype: str, shape: tuple[int, ...], read: Callable[[], Array]) -> TensorRef:
            if sizes:
                shape = (*sizes, math.prod(shape) // layout.rows)
            name = f"{source.op}{suffix if source is data else ''}{PACKED_SUFFIX}"
            return add_constant(graph, name, dtype, shape, lambda: read().reshape(shape), rule=self.dequantize.rule)

        read_data, read_scale = (self.model.op(tensor).read_value for tensor in (data, scale))
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

    def add_gates(self) -> list[TensorRef | None]:
        """Add a weight of a DynamicQuantizeLSTM, (directions, columns, gates), its scales and zero points.

        Both are (directions,) or (directions, gates).
        """
        graph, dequantize, params = self.graph, self.dequantize, self.params
        directions, gates, columns = self.packed.shape or ()
        sizes: tuple[int, ...] = (directions or 0,) if params.axis is None else (directions or 0, gates or 0)
        data, scale = self.sources[:2]
        read_data = partial(constant_value, self.model.op(data))
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

    def lower_dynamic_product(self, use: Use, read: PackedWeight, *, is_tied: bool) -> None:
        """Replace a MatMul or Gemm, and the Add of its bias, by DynamicQuantizeMatMul if possible.

        `read` is the weight, maybe transposed. A tied table is transposed when the model is loaded.
        """
        graph, dequantize, model = self.graph, self.dequantize, self.model
        product = graph.op(use.op)
        op_type = dynamic_op_type(graph, product, use.slot, read)
        if op_type == DYNAMIC_ATTENTION and graph.source_of(use) == self.tensor:  # a transposed weight stays as it is
            self.lower_dynamic_attention(product)
        if op_type != DYNAMIC_PRODUCT:
            return
        # Without zero points, which are zero in symmetric weights, the kernel takes less time for a single row.
        constants = self.sources if self.params.zero_point.any() else self.sources[:2]
        source = graph.slots(product.name)[0]
        if graph.source_of(use) != self.tensor or product.numeric_attr("transB", 0):
            data, value = graph.output(constants[0]), partial(constant_value, model.op(constants[0]))
            suffix = TRANSPOSED_SUFFIX if product.numeric_attr("transB", 0) else TABLE_SUFFIX
            name, shape = f"{constants[0].op}{suffix}", fully_known_shape(data.shape) or ()
            create = partial(add_transpose, graph, name, constants[0], anchor=dequantize.anchor)
            if not is_tied:
                turned = (name, data.dtype, shape[::-1], lambda: np.array(value().T, order="C"))
                create = partial(add_constant, graph, *turned)
            self.constants[suffix] = self.constants.get(suffix) or [create(rule=dequantize.rule)]
            constants = [*filter(None, self.constants[suffix]), *constants[1:]]
        result, bias = self.find_bias(product, graph.output(constants[0]).shape[-1:])
        inputs = [source, *constants, *[None] * (DYNAMIC_BIAS_SLOT - 1 - len(constants)), *bias]
        self.replace_product(use, result, _fused_op(result, DYNAMIC_PRODUCT, {}, dequantize), inputs)

    def lower_dynamic_attention(self, attention: Op) -> None:
        """Replace an Attention by a QAttention whose input is rounded in each run."""
        data, scale, *zero_point = self.sources
        fused = _fused_op(attention, DYNAMIC_ATTENTION, attention.attrs, self.dequantize)
        source, _, bias, mask, past = [*self.graph.slots(attention.name), None, None][:5]
        if source is None:
            raise InternalError(f"{attention.name!r} has no input.")
        values, step, zero = _add_rounded(self.graph, source, fused)
        weight_zero = zero_point[0] if zero_point else None
        self.graph.replace_op(fused, [values, data, bias, step, scale, mask, zero, weight_zero, past])

    def replace_product(self, use: Use, result: Op, fused: Op, inputs: Sequence[TensorRef | None]) -> None:
        """Replace the product of a use, or the Add `result` of its bias, by a fused op that has the names of both."""
        graph, product, weight = self.graph, self.graph.op(use.op), self.graph.source_of(use)
        notes = {} if weight is None or weight == self.tensor else _replaced_notes(TRANSPOSE_KEY, self.model.op(weight))
        if result is not product:
            slot = graph.slots(result.name).index(TensorRef(graph.name, product.name))
            notes |= _replaced_notes(SUMMAND_KEYS[slot], product)
        elif product.type != "MatMul":
            notes[OP_KEY] = " ".join([product.type, *product.attrs])
        fused = replace(fused, notes={**fused.notes, **notes})
        graph.replace_op(fused, inputs)
        if result is not product:
            graph.remove_op(product.name)


def _lower_readers(weight: _Weight, parameters: Parameters, weights: dict[TensorRef, _Weight]) -> None:
    """Replace the readers of a dequantized weight that have a fused form, and the weight if no other op reads it.

    `weights` has those of an LSTM or MoE that are lowered, and gets new ones.
    """
    graph, packed = weight.graph, weight.packed
    uses = [(use, packed) for use in graph.consumers(weight.tensor) if use.graph == graph.name]
    turned = [TensorRef(*use[:2]) for use, _ in uses if is_matrix_transpose(graph.op(use.op))]
    if turned:
        read = packed._replace(axis=None if packed.axis is None else 1 - packed.axis, shape=(packed.shape or ())[::-1])
        uses += [(use, read) for tensor in turned for use in graph.consumers(tensor) if use.graph == graph.name]
    kinds = {graph.op(use.op).kind for use, _ in uses}
    is_tied = packed.bits == BITS_PER_BYTE and bool(kinds & TABLE_KINDS) and bool(kinds & MATRIX_PRODUCT_KINDS)
    for use, read in ((use, read) for use, read in uses if use.op in graph):
        consumer = graph.op(use.op)
        if consumer.type in LAYER_WEIGHT_SLOTS:
            if not _lower_layer(weight, consumer, parameters, weights):
                weight.fold()
                return
        elif weight.form == DYNAMIC_FORM:
            weight.lower_dynamic_product(use, read, is_tied=is_tied)
        elif not (is_tied and consumer.kind in TABLE_KINDS):
            weight.pack_reader(use, read)
    for tensor in turned:
        remove_if_unread(weight.model, tensor)
    if is_tied and graph.consumers(weight.tensor):
        weight.fold()
    remove_if_unread(weight.model, weight.tensor)


def _lower_layer(reader: _Weight, layer: Op, parameters: Parameters, lowered: dict[TensorRef, _Weight]) -> bool:
    """Replace an LSTM or MoE by its fused op if it reads all its weights as dequantized ones of one form."""
    model, graph = reader.model, reader.graph
    slots, weights = graph.slots(layer.name), dict[int, _Weight]()
    for slot in LAYER_WEIGHT_SLOTS[layer.type]:
        if (tensor := next(iter(slots[slot:]), None)) is None:
            continue
        weight = _Weight.read(model, graph, model.op(tensor), parameters) if tensor.graph == graph.name else None
        if weight is None or weight.form != reader.form:
            return False
        if not any(find_type(graph, layer, slot, weight.packed) for find_type in (fused_op_type, dynamic_op_type)):
            return False
        weights[slot] = lowered.get(tensor, weight)
    for weight in weights.values():
        if weight.tensor not in lowered:
            sizes = (fully_known_shape(weight.packed.shape) or ())[:-1]
            weight.constants[layer.kind] = (
                weight.add_packed(_matrix_layout(weight.packed), sizes=sizes)
                if layer.kind == "moe"
                else weight.add_gates()
            )
            lowered[weight.tensor] = weight
    inputs = _fused_layer_inputs(layer, slots, {slot: each.constants[layer.kind] for slot, each in weights.items()})
    ops = [weight.dequantize for weight in weights.values()]
    rules, anchors = ("\n".join(getattr(op, key) for op in ops) for key in ("rule", "anchor"))
    fused_attrs = {name: value for name, value in layer.attrs.items() if name != "layout"}
    if layer.kind == "moe":
        # Releases before 1.31 have no accuracy level, and compute QMoE in up to 20 times the time of MoE.
        packed = next(iter(weights.values())).packed
        level = (reader.dequantize.fused_attrs or {}).get("accuracy_level", 0)
        fused_attrs |= {"expert_weight_bits": packed.bits, "block_size": packed.block, "accuracy_level": level}
    op_type = "QMoE" if layer.kind == "moe" else DYNAMIC_LSTM
    marks = replace(ops[0], rule=rules.strip(), anchor=anchors.strip())
    graph.replace_op(_fused_op(layer, op_type, fused_attrs, marks), inputs)
    for weight in weights.values():
        remove_if_unread(model, weight.tensor)
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
        notes=node_notes(op),
    )


def _replaced_notes(key: str, op: Op) -> dict[str, str]:
    """Return the entries of a fused op for another op that it replaces, from which `_restored_op` gives it back."""
    entries = {f"{key}{REPLACED_VALUE}": op.outputs[0].name, **{f"{key}:{k}": v for k, v in node_notes(op).items()}}
    return {key: op.name} | entries


def _share_rounded_inputs(graph: Graph) -> None:
    """Round a tensor once for all new dynamic products that read it, if that takes less time than once for each."""
    readers = dict[TensorRef, list[str]]()
    for op in graph.ops():
        source = graph.slots(op.name)[0] if (op.type, op.source) == (DYNAMIC_PRODUCT, None) else None
        if source is not None:
            readers.setdefault(source, []).append(op.name)
    shared = {source: names for source, names in readers.items() if len(names) >= MIN_SHARED_READERS}
    for source, names in shared.items():
        values, scale, zero_point = _add_rounded(graph, source, graph.op(names[0]))
        for name in names:
            _, weight, weight_scale, *rest = graph.slots(name)
            inputs = [values, weight, scale, weight_scale, zero_point, *rest]
            graph.replace_op(replace(graph.op(name), type=SHARED_DYNAMIC_PRODUCT), inputs)


def _add_rounded(graph: Graph, source: TensorRef, reader: Op) -> list[TensorRef]:
    """Add the op that rounds a tensor to uint8 for a reader; return its values, scale and zero point."""
    fields: dict[str, Any] = {"kind": "integer", "type": DYNAMIC_QUANTIZE, "roles": ("input",), "rule": reader.rule}
    rounded = new_op(graph, f"{source.op}/rounded", "uint8", graph.output(source).shape, **fields)
    parameters = (("scale", "float32"), ("zero_point", "uint8"))
    outputs = [Output(graph.unique_name(f"{rounded.name}/{name}"), dtype, ()) for name, dtype in parameters]
    graph.add_op(replace(rounded, anchor=reader.anchor, outputs=(*rounded.outputs, *outputs)), [source])
    return [TensorRef(graph.name, rounded.name, port) for port in range(3)]


def _folded_shapes(
    shape: tuple[int, ...], params: QParams, *, is_packed: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a weight with an axis for its blocks, and that of scales which broadcast to it.

    A single partial block of several values is not padded, unless the weight `is_packed` for a product too.
    """
    if (axis := params.axis) is None:
        return shape, (1,) * len(shape)
    if params.block is None:
        return shape, tuple(size if i == axis else 1 for i, size in enumerate(shape))
    count, block = -(-shape[axis] // params.block), params.block
    if count == 1 and not is_packed and shape[axis] > 1:
        block = shape[axis]
    return ((*shape[:axis], count, block, *shape[axis + 1 :]), (*shape[:axis], count, 1, *shape[axis + 1 :]))


def _matrix_layout(weight: PackedWeight) -> MatrixLayout:
    """Return the layout of a matrix, or of the rows of all experts, with blocks along the axis that is summed over."""
    *sizes, second = (size or 0 for size in weight.shape or ())
    first, transposed = math.prod(sizes), weight.axis == 0
    rows, columns = (second, first) if transposed else (first, second)
    return MatrixLayout(rows=rows, columns=columns, bits=weight.bits, block=weight.block or 1, transposed=transposed)
