"""Fused ops of com.microsoft in files, and how they are read as standard ops of the intermediate representation.

`lift_fused_ops` runs after a model is loaded: each fused op with constant weights becomes a constant, a
DequantizeLinear and the op that computes with the result. `lower_fused_ops` of `fused_ops_writer` does the reverse
before a model is emitted. Everything between the two knows only the standard ops.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphquant.errors import InternalError
from graphquant.formats.onnx.ops import DEFAULT_DOMAIN_OPS, MICROSOFT_DOMAIN_OPS
from graphquant.formats.onnx.tensors import DTYPE_CODES
from graphquant.ir import NO_ATTRS, Model, Op, TensorRef, fully_known_shape
from graphquant.numerics import numpy_dtype, row_slices
from graphquant.qdq import (
    DYNAMIC_ATTENTION,
    DYNAMIC_FORM,
    DYNAMIC_LSTM,
    DYNAMIC_PRODUCT,
    FOLDED_FORM,
    LAYER_WEIGHT_SLOTS,
)
from graphquant.qdq.family import new_op
from graphquant.qdq.onnx_qdq import MICROSOFT_DOMAIN
from graphquant.quantize import METADATA_PREFIX, node_notes

if TYPE_CHECKING:
    from graphquant.ir import Graph, OpInfo, Shape
    from graphquant.numerics import Array

BITS_PER_BYTE = 8

FOLDED_TYPES = ("Cast", "Sub", "Mul", "Reshape", "Slice")  # the ops of a folded weight, in their order
INTEGER_DTYPES = frozenset({"int2", "uint2", "int4", "uint4", "int8", "uint8"})
SLICE_OPERANDS = 3  # start, end and axis
SCALE_DTYPES = frozenset({"float32", "float16", "bfloat16"})
PACKED_SUFFIX = "/packed"  # ends the names of packed constants; the rest is the name of the standard constant
TRANSPOSED_SUFFIX = "/transposed"  # ends the rest for the weight of a Gemm with `transB`
TABLE_SUFFIX = "/table"  # ends the rest for the weight of a MatMul that reads it through a Transpose

# Metadata of a fused op: type and names of the attributes of the op in its place, and the name of another op that it
# replaces: the Transpose of its table, or a product, by its slot in the Add that the fused op has.
OP_KEY, TRANSPOSE_KEY, *SUMMAND_KEYS = (f"{METADATA_PREFIX}{k}" for k in ("op", "transpose", "summand-0", "summand-1"))
REPLACED_VALUE = "-value"  # ends the key of the value's name of such an op; ":" and a key, that of its own metadata
DEFAULT_ATTRS = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0, "axis": 0}  # of Gemm and Gather

# Positions of the inputs of MatMulNBits and GatherBlockQuantized.
WEIGHT_SLOT, SCALE_SLOT, ZERO_POINT_SLOT, GROUP_INDEX_SLOT, BIAS_SLOT = 1, 2, 3, 4, 5
DYNAMIC_BIAS_SLOT = 4  # that of the bias of a DynamicQuantizeMatMul, whose inputs before it have the same positions

DYNAMIC_QUANTIZE, SHARED_DYNAMIC_PRODUCT = "DynamicQuantizeLinear", "MatMulIntegerToFloat"
DYNAMIC_SLOTS = {
    DYNAMIC_PRODUCT: (1, 2, 3, DYNAMIC_BIAS_SLOT, 0, 0),
    SHARED_DYNAMIC_PRODUCT: (1, 3, 5, 6, 2, 4),
    DYNAMIC_ATTENTION: (1, 4, 7, 2, 3, 6),
}
"""Positions of the weight, its scale and zero point, the bias, and the scale and zero point of the rounded input."""

MASK_SLOT, PAST_SLOT = 5, 8  # positions of further inputs of a QAttention

LSTM_SLOTS = 8  # inputs of LSTM; the scales and zero points of a DynamicQuantizeLSTM follow them
MOE_WEIGHTS = 3  # weights of a MoE, each with a bias; a QMoE also has scales, and zero points after these triples
MOE_FIRST_WEIGHT = 2
MOE_WEIGHT_AXES = 3  # experts, rows and bytes
QMOE_ATTRS = ("expert_weight_bits", "block_size", "accuracy_level", "quant_type")
"""Attributes of QMoE that MoE lacks. Other ones, as widths of single weights, are not supported."""


class LiftedOp(NamedTuple):
    """A fused op as it was loaded, or a folded weight and the packed products that share it, and their replacements."""

    fused: tuple[tuple[Op, tuple[TensorRef | None, ...]], ...]  # these ops with their inputs
    # The ops and constants that only they read, with their inputs, in topological order.
    sources: Mapping[TensorRef, tuple[Op, tuple[TensorRef | None, ...]]]
    # The ops in their place with their inputs, in topological order. Some have the names and outputs of the fused ones.
    replacements: tuple[tuple[Op, tuple[TensorRef | None, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lift:
    """The parts of a fused op while it is lifted."""

    model: Model
    graph: Graph
    op: Op
    slots: tuple[TensorRef | None, ...]
    shared: dict[tuple[Any, ...], TensorRef]  # dequantized weights by the inputs and attributes that define them
    folded: Op | None = None  # the last op of a folded weight that shares its constants, replaced by DequantizeLinear

    def constant(self, slot: int, dtypes: Collection[str]) -> Op | None:
        """Return the constant that the op reads at `slot`, if it has one of these types."""
        tensor = self.slots[slot] if slot < len(self.slots) else None
        op = None if tensor is None else self.model.op(tensor)
        if op is None or op.kind != "constant" or op.read_value is None:
            return None
        return op if op.outputs[0].dtype in dtypes else None

    def tensor(self, constant: Op) -> TensorRef:
        """Return the tensor of a constant that the op reads."""
        return next(slot for slot in self.slots if slot is not None and self.model.op(slot) is constant)

    @property
    def suffix(self) -> str:
        """The end of the name of the weight that graphquant wrote, which tells how the standard op reads it."""
        name = "" if (weight := self.slots[WEIGHT_SLOT]) is None else weight.op.removesuffix(PACKED_SUFFIX)
        return next((s for s in (TRANSPOSED_SUFFIX, TABLE_SUFFIX) if self.op.rule and name.endswith(s)), "")

    def as_read(self, *constants: Op | None) -> list[_LayerConstant]:
        """Return the given constants with their own types and shapes."""
        outputs = [(constant, constant.outputs[0]) for constant in constants if constant is not None]
        return [(each, output.dtype or "", fully_known_shape(output.shape) or (), None) for each, output in outputs]

    def weight_constants(self, *slots: int, dtypes: Collection[str]) -> tuple[Op | None, ...]:
        """Return a constant of `dtypes`, its scale and its zero point, which the op reads at `slots`."""
        weight, scale, zero_point = slots
        constant = self.constant(weight, dtypes)
        zero_point_dtypes = () if constant is None else (constant.outputs[0].dtype or "",)
        return constant, self.constant(scale, SCALE_DTYPES), self.constant(zero_point, zero_point_dtypes)


# Packed elements


def pack_elements(values: Array, bits: int) -> Array:
    """Return unsigned integers of `bits` bits (..., n) as bytes (..., ceil(n * bits / 8)), lowest bits first."""
    per_byte = BITS_PER_BYTE // bits
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % per_byte)]
    padded = np.pad(values.astype(np.uint8), padding)
    packed = padded[..., ::per_byte].copy()
    for position in range(1, per_byte):
        packed |= padded[..., position::per_byte] << (bits * position)
    return packed


def unpack_elements(packed: Array, bits: int, count: int) -> Array:
    """Return the first `count` integers of `bits` bits in each row of bytes; the inverse of `pack_elements`."""
    per_byte = BITS_PER_BYTE // bits
    values = np.empty((*packed.shape[:-1], packed.shape[-1] * per_byte), np.uint8)
    for position in range(per_byte):
        values[..., position::per_byte] = (packed >> (bits * position)) & ((1 << bits) - 1)
    return values[..., :count]


def _unsigned(values: Array, offset: int) -> Array:
    """Return integers plus `offset`, which is 0 for unsigned types, as uint8."""
    return np.asarray(values.astype(np.int8 if offset else np.uint8).view(np.uint8) + np.uint8(offset))


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixLayout:
    """The weight of a MatMulNBits: `rows` outputs, each the sum over `columns` inputs in blocks."""

    rows: int
    columns: int
    bits: int
    block: int
    transposed: bool  # true if the standard weight is (columns, rows), as MatMul reads it

    @property
    def blocks(self) -> int:
        """Number of blocks of a row."""
        return -(-self.columns // self.block)

    @property
    def zero_point_bytes(self) -> int:
        """Bytes of all packed zero points."""
        return self.rows * -(-self.blocks * self.bits // BITS_PER_BYTE)

    def pack(self, read_value: Callable[[], Array], offset: int) -> Array:
        """Return the packed weight, uint8 (rows, blocks, block * bits / 8). Elements past the last column are 0."""
        values = read_value()
        values = values.T if self.transposed else values.reshape(self.rows, -1)
        size = self.blocks * self.block
        packed = np.empty((self.rows, -(-size * self.bits // BITS_PER_BYTE)), np.uint8)
        for rows in row_slices(values.shape):  # copies of the whole weight would need twice its memory
            slab = values[rows]
            padded = np.zeros((len(slab), size), np.uint8)
            padded[:, : self.columns] = _unsigned(slab, offset)
            packed[rows] = pack_elements(padded, self.bits)
        return packed.reshape(self.rows, self.blocks, -1)

    def unpack(self, read_value: Callable[[], Array], dtype: np.dtype[Any], offset: int) -> Array:
        """Return the standard weight as `dtype`."""
        values = unpack_elements(read_value().reshape(self.rows, -1), self.bits, self.columns)
        signed = (values - np.uint8(offset)).view(np.int8) if offset else values
        return np.ascontiguousarray(signed.T if self.transposed else signed).astype(dtype)

    def pack_zero_points(self, zero_points: Array, offset: int) -> Array:
        """Return zero points in the standard layout, packed: uint8 (rows * ceil(blocks * bits / 8),)."""
        rows = zero_points.T if self.transposed else zero_points.reshape(self.rows, -1)
        return pack_elements(_unsigned(rows, offset), self.bits).reshape(-1)

    def pack_scales(self, read_value: Callable[[], Array]) -> Array:
        """Return scales in the standard layout as (rows * blocks,)."""
        scales = read_value()
        return np.ascontiguousarray(scales.T if self.transposed else scales).reshape(-1)

    def unpack_blocks(self, values: Array) -> Array:
        """Return one value per block, (rows * blocks,), in the standard layout."""
        rows = values.reshape(self.rows, self.blocks)
        return np.ascontiguousarray(rows.T if self.transposed else rows)


# From fused ops to standard ops


def lift_fused_ops(model: Model) -> dict[tuple[str, str], LiftedOp]:
    """Replace the fused ops of a loaded model that read constant weights; return them by graph and name."""
    lifted: dict[tuple[str, str], LiftedOp] = {}
    for graph in model.graphs.values():
        # Folded weights come first, because a packed product may share its weight with one.
        fused = sorted((op for op in graph.ops() if (op.domain, op.type) in _LIFTS), key=lambda op: op.domain)
        loaded = {op.name: (op, tuple(graph.slots(op.name))) for op in fused}
        shared = dict[tuple[Any, ...], TensorRef]()
        for op in fused:
            if graph.op(op.name) is not op:  # replaced with the folded weight that it shares
                continue
            lift = _Lift(model=model, graph=graph, op=op, slots=loaded[op.name][1], shared=shared)
            names = _LIFTS[op.domain, op.type](lift)
            if names:
                graph.rerouted_uses.clear()  # the ops are new, so that no input of a loaded one changed
                originals = tuple(loaded[name] for name in names if name in loaded)
                lifted[graph.name, op.name] = LiftedOp(
                    fused=originals,
                    sources=_constant_sources(model, [slot for _, slots in originals for slot in slots]),
                    replacements=tuple((graph.op(name), tuple(graph.slots(name))) for name in names),
                )
    for record in lifted.values():
        for tensor in reversed([*record.sources]):
            remove_if_unread(model, tensor)
    return lifted


def _constant_sources(
    model: Model, slots: Sequence[TensorRef | None]
) -> dict[TensorRef, tuple[Op, tuple[TensorRef | None, ...]]]:
    """Return the constants that an op reads, and the ops that round or compute what it reads, inputs first."""
    sources: dict[TensorRef, tuple[Op, tuple[TensorRef | None, ...]]] = {}
    for tensor in (slot for slot in slots if slot is not None):
        op, inputs = model.op(tensor), tuple(model.graphs[tensor.graph].slots(tensor.op))
        is_stored = op.type == "Reshape" and all(slot and model.op(slot).kind == "constant" for slot in inputs)
        if op.type == DYNAMIC_QUANTIZE:
            sources[tensor] = op, inputs
        elif op.kind == "constant" or (op.rule and op.type in {*FOLDED_TYPES, "Transpose"}) or is_stored:
            sources |= _constant_sources(model, inputs) | {tensor: (op, inputs)}
    return sources


def _lift_matmul(lift: _Lift) -> list[str]:
    """Replace a MatMulNBits by DequantizeLinear, MatMul and, with a bias, Add; return their names if possible."""
    op = lift.op
    weight, scale, zero_point = lift.weight_constants(WEIGHT_SLOT, SCALE_SLOT, ZERO_POINT_SLOT, dtypes={"uint8"})
    is_given = [tensor is not None for tensor in (*lift.slots, *[None] * BIAS_SLOT)]
    bits = int(op.numeric_attr("bits", 4))
    rows, columns, block = (int(op.numeric_attr(name, 0)) for name in ("N", "K", "block_size"))
    layout = MatrixLayout(rows=rows, columns=columns, bits=bits, block=max(block, 1), transposed=not lift.suffix)
    is_misfit = is_given[GROUP_INDEX_SLOT] or is_given[ZERO_POINT_SLOT] != (zero_point is not None)
    if weight is None or scale is None or is_misfit or bits not in {2, 4, 8}:
        return []
    if (
        min(layout.rows, layout.columns, block) < 1
        or _size(weight) != layout.rows * layout.blocks * -(-block * bits // BITS_PER_BYTE)
        or _size(scale) != layout.rows * layout.blocks
        or (zero_point is not None and _size(zero_point) != layout.zero_point_bytes)
    ):
        return []
    return _lift_product(lift, _add_lifted_weight(lift, layout, weight, scale, zero_point), BIAS_SLOT)


def _lift_dynamic_op(lift: _Lift) -> list[str]:
    """Replace an op of `DYNAMIC_SLOTS` by DequantizeLinear and the float op, maybe with an Add; return their names."""
    graph, op, positions = lift.graph, lift.op, DYNAMIC_SLOTS[lift.op.type]
    slots = [*lift.slots, *[None] * (PAST_SLOT + 1)]
    source, *operands, scale, zero_point = (slots[position] for position in (0, *positions))
    if op.type != DYNAMIC_PRODUCT:  # another op rounds its input
        rounded = source
        if rounded is None or rounded.graph != graph.name or graph.op(rounded.op).type != DYNAMIC_QUANTIZE:
            return []
        if (rounded, scale, zero_point) != tuple(rounded._replace(port=port) for port in range(3)):
            return []
        source = graph.slots(rounded.op)[0]
    product = replace(lift, slots=(source, *operands))
    dequantized = _dynamic_weight(product)
    if dequantized is None or op.type != DYNAMIC_ATTENTION:
        return [] if dequantized is None else _lift_product(product, dequantized, DYNAMIC_BIAS_SLOT)
    inputs = [source, dequantized, operands[-1], slots[MASK_SLOT], slots[PAST_SLOT]]
    while inputs[-1] is None:
        inputs.pop()
    attention = _standard_op(op, "Attention", op.attrs, MICROSOFT_DOMAIN_OPS["Attention"])
    graph.replace_op(replace(attention, domain=MICROSOFT_DOMAIN), inputs)
    return [dequantized.op, op.name]


def _dynamic_weight(lift: _Lift) -> TensorRef | None:
    """Add the DequantizeLinear of the weight of an op with the inputs of a DynamicQuantizeMatMul, if it has one."""
    values, source, *others = lift.slots
    is_table = source is not None and source.graph == lift.graph.name and lift.graph.op(source.op).type == "Transpose"
    table = replace(lift, slots=(values, lift.graph.slots(source.op)[0], *others)) if source and is_table else lift
    weight_slots = WEIGHT_SLOT, SCALE_SLOT, ZERO_POINT_SLOT
    weight, scale, zero_point = table.weight_constants(*weight_slots, dtypes={"int8", "uint8"})
    shape, sizes, zero_points = (
        None if op is None else fully_known_shape(op.outputs[0].shape) for op in (weight, scale, zero_point)
    )
    has_zero_points = any(lift.slots[ZERO_POINT_SLOT : ZERO_POINT_SLOT + 1])
    if (
        weight is None
        or shape is None
        or sizes not in {(), shape[:1] if is_table else shape[1:2]}
        or (is_table and not lift.suffix)
        or zero_points != (sizes if has_zero_points else None)
    ):
        return None
    attrs = {"axis": int(not (is_table or lift.suffix == TRANSPOSED_SUFFIX))} if sizes else {}
    constants = lift.as_read(weight, scale, zero_point)
    if lift.suffix == TRANSPOSED_SUFFIX and not is_table:
        read = partial(constant_value, weight)
        constants[0] = (weight, weight.outputs[0].dtype or "", shape[::-1], lambda: np.array(read().T, order="C"))
    return _add_weight(table, (constants, attrs, {"form": DYNAMIC_FORM}))


def _lift_lstm(lift: _Lift) -> list[str]:
    """Replace a DynamicQuantizeLSTM by two DequantizeLinear and an LSTM; return their names."""
    op, slots = lift.op, [*lift.slots, *[None] * (LSTM_SLOTS + 4)]
    inputs, weights = slots[:LSTM_SLOTS], dict[int, _LayerWeight]()
    for position, slot in enumerate(LAYER_WEIGHT_SLOTS["LSTM"]):
        first = LSTM_SLOTS + 2 * position
        data, scale, zero_point = lift.weight_constants(slot, first, first + 1, dtypes={"int8", "uint8"})
        shape = None if data is None else fully_known_shape(data.outputs[0].shape)
        if data is None or scale is None or zero_point is None or shape is None or len(shape) != 3:  # noqa: PLR2004  # directions, rows and columns
            return []
        directions, columns, gates = shape
        if min(shape) < 1 or {_size(scale), _size(zero_point)} - {directions, directions * gates}:
            return []
        steps, zeros = (constant_value(each).reshape(directions, -1) for each in (scale, zero_point))
        attrs: dict[str, Any] = {"axis": 2, "block_size": columns}
        sizes: tuple[int, ...] = (directions, gates, 1)
        if (steps == steps[:1]).all() and (zeros == zeros[:1]).all():  # one direction, or equal ones
            attrs, sizes = ({"axis": 1}, (gates,)) if steps.shape[1] > 1 else ({}, ())
        dtype = numpy_dtype(data.outputs[0].dtype or "")
        count = math.prod(sizes)
        values = partial(lambda constant: np.ascontiguousarray(constant_value(constant).swapaxes(1, 2)), data)
        scales, zero_points = (
            np.broadcast_to(each, (directions, gates)).reshape(-1)[:count].reshape(sizes) for each in (steps, zeros)
        )
        constants: list[_LayerConstant] = [
            (data, dtype.name, (directions, gates, columns), values),
            (scale, scale.outputs[0].dtype or "float32", sizes, scales.copy),
            (zero_point, dtype.name, sizes, zero_points.astype(dtype).copy),
        ]
        weights[slot] = constants, attrs, {"form": DYNAMIC_FORM}
    return _replace_layer(lift, DEFAULT_DOMAIN_OPS["LSTM"], "LSTM", "", inputs, op.attrs, weights)


def _lift_moe(lift: _Lift) -> list[str]:
    """Replace a QMoE of 2, 4 or 8 bits by one DequantizeLinear for each weight and a MoE; return their names."""
    op, attrs = lift.op, {name: value for name, value in lift.op.attrs.items() if name not in QMOE_ATTRS}
    bits, block = int(op.numeric_attr("expert_weight_bits", 4)), int(op.numeric_attr("block_size", 0))
    first_zero_point = MOE_FIRST_WEIGHT + 3 * MOE_WEIGHTS
    slots = [*lift.slots, *[None] * (first_zero_point + MOE_WEIGHTS)]
    is_plain = op.text_attr("quant_type", "int") == "int" and bits in {2, 4, 8} and block > 0
    has_others = any(slots[first_zero_point + MOE_WEIGHTS :]) or any(
        "weight" in name and name != "normalize_routing_weights" for name in attrs
    )
    if not is_plain or has_others or not op.numeric_attr("normalize_routing_weights", 0):
        return []
    inputs, weights = slots[:MOE_FIRST_WEIGHT], dict[int, _LayerWeight]()
    for index in range(MOE_WEIGHTS):
        position = MOE_FIRST_WEIGHT + 3 * index
        data, scale, zero_point = lift.weight_constants(
            position, position + 1, first_zero_point + index, dtypes={"uint8"}
        )
        shape = None if data is None else fully_known_shape(data.outputs[0].shape)
        if slots[position] is None:
            inputs += [None, None]
            continue
        is_variable = zero_point is None and slots[first_zero_point + index] is not None
        if data is None or scale is None or shape is None or len(shape) != MOE_WEIGHT_AXES or is_variable:
            return []
        experts, rows, columns = shape[0], shape[1], shape[2] * BITS_PER_BYTE // bits
        layout = MatrixLayout(rows=experts * rows, columns=columns, bits=bits, block=block, transposed=False)
        is_misfit = zero_point is not None and _size(zero_point) != layout.zero_point_bytes
        if is_misfit or columns % block or not columns or _size(scale) != layout.rows * layout.blocks:
            return []
        shapes = (experts, rows, columns), (experts, rows, columns // block)
        split = {"axis": 2, "block_size": block}
        weights[len(inputs)] = _packed_weight(lift, layout, shapes, split, data, scale, zero_point)
        inputs += [slots[position], slots[position + 2]]
    return _replace_layer(lift, MICROSOFT_DOMAIN_OPS["MoE"], "MoE", MICROSOFT_DOMAIN, inputs, attrs, weights)


_LayerConstant = tuple[Op, str, "Shape", Callable[[], "Array"] | None]
_LayerWeight = tuple[list[_LayerConstant], dict[str, Any], dict[str, Any]]
"""Constants of a file, each with the type, shape and value of the one in its place, which is itself without a value;
and a DequantizeLinear's attributes and `Op.fused_attrs`."""


def _add_weight(lift: _Lift, weight: _LayerWeight, number: int = 0) -> TensorRef:
    """Add the DequantizeLinear of weight `number` of a fused op, once for equal constants; return its tensor.

    The rule and anchor of the fused op have one line for each weight.
    """
    constants, attrs, fused_attrs = weight
    key = (*((constant.name, shape) for constant, _, shape, _ in constants), *attrs.items(), *fused_attrs.items())
    if key in lift.shared:
        return lift.shared[key]
    graph, op, (scale, dtype, *_) = lift.graph, lift.op, constants[1]
    inputs = [
        add_constant(graph, _unpacked_name(constant), dtype, shape, read) if read else lift.tensor(constant)
        for constant, dtype, shape, read in constants
    ]
    fields: dict[str, Any] = {
        name: (text.splitlines() or [""])[min(number, text.count("\n"))]
        for name, text in (("rule", op.rule), ("anchor", op.anchor))
    }
    fields |= {"kind": "dequantize", "type": "DequantizeLinear", "roles": ("input", "scale", "zero_point")}
    fields |= {"attrs": attrs, "fused_attrs": fused_attrs}
    name = scale.name.removesuffix(PACKED_SUFFIX)  # the family names the scale and the DequantizeLinear
    name = f"{name.removesuffix('/scale') if name.endswith('/scale') else op.name}/dequant"
    dequantize = new_op(graph, name, dtype, constants[0][2], **fields)
    if lift.folded is not None:
        dequantize = replace(dequantize, name=lift.folded.name, outputs=lift.folded.outputs)
        graph.replace_op(dequantize, inputs)
        return lift.shared.setdefault(key, TensorRef(graph.name, dequantize.name))
    return lift.shared.setdefault(key, graph.add_op(dequantize, inputs))


def _replace_layer(
    lift: _Lift,
    info: OpInfo,
    op_type: str,
    domain: str,
    inputs: list[TensorRef | None],
    attrs: Mapping[str, Any],
    weights: Mapping[int, _LayerWeight],
) -> list[str]:
    """Replace a fused LSTM or MoE by the op that reads dequantized `weights` in their slots; return all names."""
    names = list[str]()
    for number, (slot, weight) in enumerate(weights.items()):
        dequantized = _add_weight(lift, weight, number)
        inputs[slot] = dequantized
        names.append(dequantized.op)
    lift.graph.replace_op(replace(_standard_op(lift.op, op_type, attrs, info), domain=domain), inputs)
    return [*dict.fromkeys(names), lift.op.name]


def _standard_op(op: Op, op_type: str, attrs: Mapping[str, Any] = NO_ATTRS, info: OpInfo | None = None) -> Op:
    """Return a standard op in place of a fused one, with `attrs` and the attributes with default values that it had."""
    info, written = info or DEFAULT_DOMAIN_OPS[op_type], op.notes.get(OP_KEY, "").split()
    fields: dict[str, Any] = {"kind": info.kind, "roles": info.roles, "channel_axis": info.channel_axis}
    fields |= {"domain": "", "rule": "", "anchor": "", "source": None, "notes": node_notes(op)}
    fields["attrs"] = {name: value for name, value in DEFAULT_ATTRS.items() if name in written} | {**attrs}
    return replace(op, type=op_type, **fields)


def _lift_product(lift: _Lift, dequantized: TensorRef, bias_slot: int) -> list[str]:
    """Replace a fused product by Gemm, or by MatMul and Add; return the names of its ops and of its weight."""
    op, graph, notes = lift.op, lift.graph, lift.op.notes
    _, *old_summand = op.anchor.split("\n")
    if old_summand:  # earlier versions wrote its name and slot after the name of the tensor
        notes = {**notes, SUMMAND_KEYS[old_summand[-1] == "1"]: old_summand[0]}
    bias = [slot for slot in lift.slots[bias_slot : bias_slot + 1] if slot is not None]
    names, is_transposed = [dequantized.op], lift.suffix == TRANSPOSED_SUFFIX
    if lift.suffix == TABLE_SUFFIX:
        name = notes.get(TRANSPOSE_KEY, f"{op.name}/transpose")
        is_shared = name in graph and graph.op(name).type == "Transpose" and graph.slots(name) == [dequantized]
        if not is_shared:
            name = add_transpose(graph, name, dequantized).op
            graph.replace_op(_restored_op(graph, graph.op(name), TRANSPOSE_KEY, notes))
        dequantized = TensorRef(graph.name, name)
        names.append(dequantized.op)
    inputs = [lift.slots[0], dequantized]
    product = replace(_standard_op(op, "MatMul"), channel_axis=1)
    is_old_gemm = op.rule and bias and bias_slot == BIAS_SLOT and notes.keys().isdisjoint(SUMMAND_KEYS)
    if is_transposed or is_old_gemm or notes.get(OP_KEY, "").startswith("Gemm"):
        gemm = _standard_op(op, "Gemm", {"transB": 1} if is_transposed else {})
        product, inputs = replace(gemm, channel_axis=int(not is_transposed)), [*inputs, *bias]
    elif bias:
        slot = int(SUMMAND_KEYS[1] in notes)
        name, output = notes.get(SUMMAND_KEYS[slot], f"{op.name}/product"), op.outputs[0]
        fields: dict[str, Any] = {"kind": product.kind, "type": product.type, "roles": product.roles, "channel_axis": 1}
        summand = new_op(graph, name, output.dtype, output.shape, **fields)
        summand = summand if name in graph else replace(summand, name=name)
        source = graph.add_op(_restored_op(graph, summand, SUMMAND_KEYS[slot], notes), inputs)
        names.append(source.op)
        product, inputs = _standard_op(op, "Add"), [source, *bias] if slot == 0 else [*bias, source]
    graph.replace_op(product, inputs)
    return [*names, op.name]


def _restored_op(graph: Graph, op: Op, key: str, notes: Mapping[str, str]) -> Op:
    """Return an op with the name of its value, the doc string and the metadata that `notes` have under `key`."""
    own = {name.partition(":")[2]: text for name, text in notes.items() if name.startswith(f"{key}:")}
    value = notes.get(f"{key}{REPLACED_VALUE}", "")
    is_free = value and value not in graph.reserved_names
    return replace(op, outputs=(replace(op.outputs[0], name=value),) if is_free else op.outputs, notes=own)


def _lift_gather(lift: _Lift) -> list[str]:
    """Replace a GatherBlockQuantized by DequantizeLinear and Gather; return their names."""
    op, table = lift.op, next(iter(lift.slots), None)
    if table is not None and lift.model.op(table).type == "Reshape":  # a product reads the same bytes in blocks
        stored = next(iter(lift.model.graphs[table.graph].slots(table.op)), None)
        lift = replace(lift, slots=(stored, *lift.slots[1:]))
    weight, scale, zero_point = lift.weight_constants(0, SCALE_SLOT, ZERO_POINT_SLOT, dtypes={"int4", "uint4", "uint8"})
    has_zero_points = any(lift.slots[ZERO_POINT_SLOT : ZERO_POINT_SLOT + 1])
    shape = None if weight is None else fully_known_shape(weight.outputs[0].shape)
    block = int(op.numeric_attr("block_size", 128))
    if weight is None or scale is None or not shape or block < 1 or has_zero_points != (zero_point is not None):
        return []
    if weight.outputs[0].dtype == "uint8":
        shape = fully_known_shape(lift.model.output(table).shape) if table is not None else None
        return _lift_packed_gather(lift, weight, shape or (), scale, zero_point)
    if lift.slots[0] != table:
        return []
    axis = int(op.numeric_attr("quantize_axis", 1)) % len(shape)
    blocks = (*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :])
    if any(fully_known_shape(each.outputs[0].shape) != blocks for each in (scale, zero_point) if each is not None):
        return []
    constants, attrs = lift.as_read(weight, scale, zero_point), {"axis": axis, "block_size": block}
    return _replace_gather(lift, _add_weight(lift, (constants, attrs, {"form": "packed"})))


def _lift_packed_gather(lift: _Lift, weight: Op, shape: tuple[int, ...], scale: Op, zero_point: Op | None) -> list[str]:
    """Replace a GatherBlockQuantized of a matrix in bytes, of `shape`; return the names of the ops in its place."""
    op = lift.op
    bits, block = int(op.numeric_attr("bits", 4)), int(op.numeric_attr("block_size", 128))
    blocks = fully_known_shape(scale.outputs[0].shape)
    is_row = op.numeric_attr("gather_axis", 0) == 0 and op.numeric_attr("quantize_axis", 1) in {1, -1}
    if not is_row or bits not in {2, 4, 8} or len(shape) != 2 or math.prod(shape) != _size(weight):  # noqa: PLR2004
        return []
    rows, columns = shape[0], shape[1] * BITS_PER_BYTE // bits
    layout = MatrixLayout(rows=rows, columns=columns, bits=bits, block=block, transposed=False)
    is_misfit = zero_point is not None and _size(zero_point) != layout.zero_point_bytes
    if is_misfit or blocks != (rows, layout.blocks):
        return []
    return _replace_gather(lift, _add_lifted_weight(lift, layout, weight, scale, zero_point))


def _replace_gather(lift: _Lift, dequantized: TensorRef) -> list[str]:
    """Replace a GatherBlockQuantized by a Gather of dequantized rows; return the names of both."""
    axis = int(lift.op.numeric_attr("gather_axis", 0))
    gather = _standard_op(lift.op, "Gather", {"axis": axis} if axis else {})
    lift.graph.replace_op(gather, [dequantized, lift.slots[1]])
    return [dequantized.op, lift.op.name]


def _add_lifted_weight(lift: _Lift, layout: MatrixLayout, weight: Op, scale: Op, zero_point: Op | None) -> TensorRef:
    """Add the constants of a packed matrix in the standard layout and their DequantizeLinear, once for equal ones."""
    shapes: tuple[tuple[int, ...], ...] = (layout.rows, layout.columns), (layout.rows, layout.blocks)
    attrs = {"axis": int(not layout.transposed), "block_size": layout.block}
    if layout.transposed:
        shapes = shapes[0][::-1], shapes[1][::-1]
    elif layout.blocks == 1 and layout.bits == BITS_PER_BYTE and lift.op.type != "MatMulNBits":  # a scale per table row
        shapes, attrs = (shapes[0], (layout.rows,)), {"axis": 0}
    return _add_weight(lift, _packed_weight(lift, layout, shapes, attrs, weight, scale, zero_point))


def _packed_weight(
    lift: _Lift,
    layout: MatrixLayout,
    shapes: Sequence[tuple[int, ...]],
    attrs: dict[str, Any],
    weight: Op,
    scale: Op,
    zero_point: Op | None,
) -> _LayerWeight:
    """Return a packed weight in the standard layout. `shapes` are those of the weight and of its scales."""

    # A tool of onnxruntime gives blocks negative scales, so that their largest value is exact. The same values have the
    # opposite scale, and integers and zero points with inverted bits.
    def inverted_bits() -> Array:
        return np.where(constant_value(scale).reshape(layout.rows, layout.blocks) < 0, 255, 0).astype(np.uint8)

    is_inverted = not lift.op.rule and bool(inverted_bits().any())
    # Without zero points, integers are stored with the middle of their range added.
    has_zero_points, middle = zero_point is not None or is_inverted, 1 << (layout.bits - 1)
    type_name = f"{'u' if has_zero_points else ''}int{max(layout.bits, 4)}"
    dtype, offset = numpy_dtype(type_name), 0 if has_zero_points else middle

    def read_packed() -> Array:
        packed, size = constant_value(weight).reshape(layout.rows, -1), -(-layout.block * layout.bits // BITS_PER_BYTE)
        return packed ^ np.repeat(inverted_bits(), size, axis=1)[:, : packed.shape[1]] if is_inverted else packed

    def read_scales() -> Array:
        values = layout.unpack_blocks(constant_value(scale)).reshape(shapes[1])
        return np.abs(values) if is_inverted else values

    def read_zero_points() -> Array:
        values: Array = np.full((layout.rows, layout.blocks), middle, np.uint8)
        if zero_point is not None:
            values = unpack_elements(constant_value(zero_point).reshape(layout.rows, -1), layout.bits, layout.blocks)
        values = values ^ (inverted_bits() & (2 * middle - 1)) if is_inverted else values
        return layout.unpack_blocks(values).astype(dtype).reshape(shapes[1])

    constants: list[_LayerConstant] = [
        (weight, type_name, shapes[0], lambda: layout.unpack(read_packed, dtype, offset).reshape(shapes[0])),
        (scale, scale.outputs[0].dtype or "float32", shapes[1], read_scales),
    ]
    if has_zero_points:
        constants.append((zero_point or scale, type_name, shapes[1], read_zero_points))
    level = int(lift.op.numeric_attr("accuracy_level", 0))
    return constants, attrs, {"form": "packed", "bits": layout.bits, "accuracy_level": level}


def _lift_folded(lift: _Lift) -> list[str]:
    """Replace the last op of a folded weight by DequantizeLinear, and return its name."""
    op, graph = lift.op, lift.graph
    readers = [graph.op(use.op) for use in graph.consumers(TensorRef(graph.name, op.name)) if use.graph == graph.name]
    continues = any(r.type in FOLDED_TYPES and (r.rule, r.anchor) == (op.rule, op.anchor) for r in readers)
    if not op.rule or continues:
        return []
    chain, source = [op], next(iter(graph.slots(op.name)), None)
    while source is not None and source.graph == graph.name and graph.op(source.op).type in FOLDED_TYPES:
        chain.insert(0, graph.op(source.op))
        source = next(iter(graph.slots(source.op)), None)
    uses = [] if source is None else graph.consumers(source)
    tied = [graph.op(use.op) for use in uses if use.graph == graph.name]
    if products := [each for each in tied if each.type == "MatMulNBits" and each.rule]:
        lifts = [replace(lift, op=each, slots=tuple(graph.slots(each.name)), folded=op) for each in products]
        return [*dict.fromkeys(itertools.chain(*map(_lift_matmul, lifts)))]
    links = {link.type: [_link_operand(lift.model, slot) for slot in graph.slots(link.name)[1:]] for link in chain}
    data, (scale, *_), (zero_point, *_) = (
        _link_operand(lift.model, source),
        links.get("Mul") or [None],
        links.get("Sub") or [None],
    )
    is_chain = [link.type for link in chain] == [name for name in FOLDED_TYPES if name in links]
    if source is None or data is None or scale is None or not is_chain or (zero_point is None) != ("Sub" not in links):
        return []
    scale_output = scale.outputs[0]
    if (
        data.outputs[0].dtype not in INTEGER_DTYPES
        or scale_output.dtype not in SCALE_DTYPES
        or chain[0].attrs.get("to") != DTYPE_CODES[scale_output.dtype]
        or (zero_point is not None and zero_point.outputs[0].shape != scale_output.shape)
    ):
        return []
    if (layout := _folded_layout(data, scale, links)) is None:
        return []
    attrs, sizes, stored_shape, shape = layout
    dtype, scale_dtype = numpy_dtype(data.outputs[0].dtype), numpy_dtype(scale_output.dtype)

    def add(constant: Op, dtype: np.dtype[Any], shape: tuple[int, ...]) -> TensorRef:
        def read_value() -> Array:
            value = constant_value(constant).reshape(stored_shape if constant is data else shape)
            return np.ascontiguousarray(value[tuple(map(slice, shape))]).astype(dtype, copy=False)

        return add_constant(graph, _unpacked_name(constant), dtype.name, shape, read_value)

    inputs = [add(data, dtype, shape) if "Reshape" in links else source, add(scale, scale_dtype, sizes)]
    inputs += [add(zero_point, dtype, sizes)] if zero_point is not None else []
    dequantize = {"kind": "dequantize", "type": "DequantizeLinear", "roles": ("input", "scale", "zero_point")}
    fused_attrs = {"form": FOLDED_FORM}
    output = replace(op.outputs[0], dtype=scale_dtype.name, shape=shape)
    changes: dict[str, Any] = {**dequantize, "attrs": attrs, "outputs": (output,), "fused_attrs": fused_attrs}
    graph.replace_op(replace(op, source=None, **changes), inputs)
    return [op.name]


def _link_operand(model: Model, tensor: TensorRef | None) -> Op | None:
    """Return the constant that an op of a folded weight reads, also through a Cast, None if it is none."""
    op = None if tensor is None else model.op(tensor)
    if tensor is not None and op is not None and op.type == "Cast":
        op = next(
            (model.op(source) for source in model.graphs[tensor.graph].slots(op.name) if source is not None), None
        )
    return op if op is not None and op.kind == "constant" and op.read_value is not None else None


def _folded_layout(
    data: Op, scale: Op, links: Mapping[str, Sequence[Op | None]]
) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Return the attributes of the DequantizeLinear, and the shapes of scale, padded weight and weight.

    `links` has the operands of each op of the folded weight. None means that they belong to no such weight.
    """
    shape, scales = (fully_known_shape(constant.outputs[0].shape) for constant in (data, scale))
    if shape is None or scales is None or len(shape) != len(scales):
        return None
    axes = [axis for axis, size in enumerate(scales) if size != 1]
    if not {"Reshape", "Slice"} & links.keys():
        if any(shape[axis] != scales[axis] for axis in axes) or len(axes) > 1:
            return None
        return {"axis": axes[0]} if axes else {}, tuple(scales[axis] for axis in axes), shape, shape
    axes = [axis for axis, size in enumerate(scales) if size != shape[axis]]
    if len(axes) != 1 or not axes[0] or scales[axes[0]] != 1:
        return None
    axis, block = axes[0] - 1, shape[axes[0]]
    stored = (*shape[:axis], shape[axis] * block, *shape[axis + 2 :])
    reshape, slices = ([_integers(operand) for operand in links.get(name, ())] for name in ("Reshape", "Slice"))
    count = stored[axis]
    if "Slice" in links:
        end = slices[1] if len(slices) == SLICE_OPERANDS else None
        count = end[0] if end and len(end) == 1 and 0 < end[0] < count else 0
    is_sliced = "Slice" not in links or slices == [[0], [count], [axis]]
    if not count or not is_sliced or reshape != [list(stored)]:
        return None
    return (
        {"axis": axis, "block_size": block},
        (*scales[: axis + 1], *scales[axis + 2 :]),
        stored,
        (*stored[:axis], count, *stored[axis + 1 :]),
    )


_LIFTS: dict[tuple[str, str], Callable[[_Lift], list[str]]] = {
    (MICROSOFT_DOMAIN, "MatMulNBits"): _lift_matmul,
    (MICROSOFT_DOMAIN, DYNAMIC_LSTM): _lift_lstm,
    **{(MICROSOFT_DOMAIN, name): _lift_dynamic_op for name in DYNAMIC_SLOTS},
    (MICROSOFT_DOMAIN, "QMoE"): _lift_moe,
    (MICROSOFT_DOMAIN, "GatherBlockQuantized"): _lift_gather,
    **{("", name): _lift_folded for name in ("Mul", "Reshape", "Slice")},
}


def add_constant(
    graph: Graph, name: str, dtype: str | None, shape: Shape | None, read_value: Callable[[], Array], **fields: Any
) -> TensorRef:
    """Add a constant whose value is read when it is needed, with other `fields` of its op; return its tensor."""
    constant: dict[str, Any] = {"kind": "constant", "type": "Constant", "roles": (), "read_value": read_value}
    return graph.add_op(new_op(graph, name, dtype, shape, **constant, **fields))


def add_transpose(graph: Graph, name: str, matrix: TensorRef, **fields: Any) -> TensorRef:
    """Add a Transpose of a matrix of `graph`, with other `fields` of its op; return its tensor."""
    output, attrs = graph.output(matrix), {"perm": [1, 0]}
    shape = None if output.shape is None else output.shape[::-1]
    transpose = new_op(graph, name, output.dtype, shape, kind="transpose", type="Transpose", attrs=attrs, **fields)
    # A value may have the name, but no op.
    return graph.add_op(transpose if name in graph else replace(transpose, name=name), [matrix])


def constant_value(constant: Op) -> Array:
    """Return the value of a constant."""
    if constant.read_value is None:
        raise InternalError(f"{constant.name!r} has no value.")
    return constant.read_value()


def _integers(constant: Op | None) -> list[int] | None:
    """Return the values of a constant list of integers; None for anything else."""
    value = None if constant is None else constant_value(constant)
    return value.tolist() if value is not None and value.ndim == 1 and value.dtype.kind == "i" else None


def _unpacked_name(constant: Op) -> str:
    """Return the name of a constant before it was packed, or another name for one of another tool."""
    name = constant.name.removesuffix(PACKED_SUFFIX).removesuffix(TRANSPOSED_SUFFIX).removesuffix(TABLE_SUFFIX)
    return name if name != constant.name else f"{name}/unpacked"


def _size(constant: Op) -> int:
    """Return the number of elements of a constant; 0 if it is unknown."""
    shape = fully_known_shape(constant.outputs[0].shape)
    return 0 if shape is None else math.prod(shape)


def remove_if_unread(model: Model, tensor: TensorRef) -> None:
    """Remove the op of a tensor if nothing reads it, and the constants that only it reads."""
    graph = model.graphs[tensor.graph]
    if tensor.op in graph and not graph.consumers_by_port(tensor.op):
        constants = {slot for slot in graph.slots(tensor.op) if slot is not None and model.op(slot).kind == "constant"}
        graph.remove_op(tensor.op)
        for constant in sorted(constants):
            remove_if_unread(model, constant)
