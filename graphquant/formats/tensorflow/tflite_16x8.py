"""Turn the QUANTIZE and DEQUANTIZE pairs of a float TFLite file into integer ops of 8 or 16 bits with int8 weights.

TensorFlow's converter does this for int8. For int16 it refuses ops that the runtime has, such as Concat, and writes
int32 biases, which the kernels read as int64. For int8 it gives ops a range that the plan keeps float, and clips values
or writes sums that abort the process. It writes the pairs of FakeQuants correctly, around float ops.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from graphquant.numerics import Array

_BOUNDED_RESULTS: Final = {
    8: {"LOGISTIC": (1 / 256, -128), "SOFTMAX": (1 / 256, -128), "TANH": (1 / 128, 0)},
    16: dict.fromkeys(("LOGISTIC", "SOFTMAX", "TANH"), (1 / 32768, 0)),
}
"""Scale and zero point of results with a fixed range, which the kernels require, by the bits of activations."""

INT8_STEPS: Final = 127  # the largest integer of int8 weights, whose ranges are symmetric

_BOUNDED_OPS: Final = frozenset(_BOUNDED_RESULTS[16])

_SAME_SCALE_OPS: Final = frozenset(
    (
        *("AVERAGE_POOL_2D", "BROADCAST_TO", "CONCATENATION", "EXPAND_DIMS", "GATHER", "GATHER_ND", "MAXIMUM"),
        *("MAX_POOL_2D", "MINIMUM", "MIRROR_PAD", "PACK", "PAD", "REDUCE_MAX", "REDUCE_MIN", "RESHAPE"),
        *("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "SELECT_V2", "SLICE", "SPLIT", "SPLIT_V", "SQUEEZE"),
        *("STRIDED_SLICE", "TRANSPOSE", "UNPACK"),
    )
)
"""Ops whose kernels copy integers, so that inputs and outputs need one scale."""

_RESHAPING_OPS: Final = frozenset({"EXPAND_DIMS", "RESHAPE", "SQUEEZE", "TRANSPOSE"})

_SCALING_OPS: Final = frozenset({"ADD", "BATCH_MATMUL", "LEAKY_RELU", "MEAN", "MUL", "RELU", "SUB", "SUM"})
"""Other ops with int8 and int16 kernels for all of their inputs."""

_WEIGHTED_OPS: Final = {
    "CONV_2D": (0, 1, 2),
    "DEPTHWISE_CONV_2D": (0, 1, 2),
    "FULLY_CONNECTED": (0, 1, 2),
    "TRANSPOSE_CONV": (2, 1, 3),
}
"""The slots of input, int8 weight and bias, which is int32 for int8 activations and int64 for int16 ones."""

_MAX_SUM_RESCALING: Final = {8: 2**19, 16: 2**14}
"""The kernels of ADD and SUB need inputs whose scales are below that of the output times this, by bits of activations.

Otherwise ADD aborts the process, and SUB gives wrong results.
"""

WIDE_BITS: Final = 16  # bits of the activations of a 16x8 file

_SIGNED_BITS: Final = {"UINT8": ("INT8", 8), "UINT16": ("INT16", 16)}


def quantize_pairs(data: bytes, *, bits: int, integer_inputs: bool, integer_outputs: bool) -> bytes:
    """Return a TFLite file in which ops between DEQUANTIZE and QUANTIZE run on integers. Other ops stay float.

    `bits` are those of activations, 8 or 16. With `integer_inputs`, each input that only a QUANTIZE reads is an
    integer, and likewise for outputs.
    """
    from tensorflow.lite.python import schema_py_generated as schema
    from tensorflow.lite.tools import flatbuffer_utils

    file = flatbuffer_utils.convert_bytearray_to_object(bytearray(data))
    for graph in file.subgraphs:
        rewriter = _GraphRewriter(file, graph, schema, bits)
        rewriter.quantize_before_reshapes()
        rewriter.quantize_ops()
        rewriter.store_constants()  # XNNPACK refuses a QUANTIZE that rescales the integers of a constant
        if graph is file.subgraphs[0]:  # the ops that run the others pass floats
            rewriter.set_boundaries(integer_inputs=integer_inputs, integer_outputs=integer_outputs)
        rewriter.drop_unread()
    used_buffers = {tensor.buffer for graph in file.subgraphs for tensor in graph.tensors}
    used_buffers |= {entry.buffer for entry in file.metadata or ()}
    for index, buffer in enumerate(file.buffers):
        if index not in used_buffers:
            buffer.data = None
    return bytes(flatbuffer_utils.convert_object_to_bytearray(file))


def _aligned(values: Any, rank: int, axis: int) -> Array:
    """Return a vector in the shape that broadcasts along `axis`."""
    vector = np.asarray(values, np.float64)
    return vector.reshape([-1 if index == axis else 1 for index in range(rank)] if vector.size > 1 else ())


class _GraphRewriter:
    """One graph of a file, of which tensors are named by their index."""

    def __init__(self, file: Any, graph: Any, schema: Any, bits: int) -> None:
        self.file, self.graph, self.schema, self.bits = file, graph, schema, bits
        types = schema.TensorType
        is_wide = bits == WIDE_BITS
        self.activation_type, self.bias_type = (types.INT16, types.INT64) if is_wide else (types.INT8, types.INT32)
        self.op_names = {code: name for name, code in vars(schema.BuiltinOperator).items() if isinstance(code, int)}
        self._sign_types()
        self.producers = {index: op for op in graph.operators for index in op.outputs}
        self.store_constants()

    def _sign_types(self) -> None:
        """Replace unsigned integers with a scale by signed ones."""
        types = self.schema.TensorType
        for index, tensor in enumerate(self.graph.tensors):
            for name, (signed, bits) in _SIGNED_BITS.items():
                if tensor.type == getattr(types, name) and self.scale(index).size:
                    tensor.type = getattr(types, signed)
                    tensor.quantization.zeroPoint = np.asarray(tensor.quantization.zeroPoint) - (1 << (bits - 1))

    def store_constants(self) -> None:
        """Replace each QUANTIZE of a constant by the integers."""
        remaining = []
        for op in self.graph.operators:
            values = self.constant(op.inputs[0]) if self.name(op) == "QUANTIZE" else None
            if values is None:
                remaining.append(op)
                continue
            source, target = (self.graph.tensors[index] for index in (op.inputs[0], op.outputs[0]))
            integers = np.iinfo(np.int16 if target.type == self.schema.TensorType.INT16 else np.int8)
            scale, zero = self._aligned_numbers(op.outputs[0], values.ndim)
            if self._has_scale(op.inputs[0]):
                source_scale, source_zero = self._aligned_numbers(op.inputs[0], values.ndim)
                values = (values - source_zero) * source_scale
            stored = np.clip(np.rint(values / scale) + zero, integers.min, integers.max).astype(integers.dtype)
            target.shape, target.shapeSignature, target.buffer = source.shape, None, self._add_buffer(stored)
            self.producers.pop(op.outputs[0], None)
        self.graph.operators = remaining

    def _aligned_numbers(self, index: int, rank: int) -> tuple[Array, Array]:
        """Return the scales and zero points of a tensor in the shape in which they apply to its values."""
        quantization = self.graph.tensors[index].quantization
        axis = quantization.quantizedDimension
        return _aligned(self.scale(index), rank, axis), _aligned(quantization.zeroPoint, rank, axis)

    def quantize_before_reshapes(self) -> None:
        """Add a pair of the same scale before each reshape or transpose whose only reader is a QUANTIZE.

        The converter moves reshapes between an op and its FakeQuant.
        """
        operators: list[Any] = []
        readers, quantizations = self.readers(), {}
        for op in reversed(self.graph.operators):
            operators.append(op)
            if self.name(op) == "QUANTIZE":
                quantizations[op.inputs[0]] = self.graph.tensors[op.outputs[0]].quantization
            quantization, source = quantizations.get(op.outputs[0]), op.inputs[0] if len(op.inputs) else -1
            is_only_reader = all(len(readers[index]) == 1 for index in (source, op.outputs[0]) if index in readers)
            if quantization is None or self.name(op) not in _RESHAPING_OPS or not is_only_reader:
                continue
            if self.constant(source) is None and self.dequantized(source) is None:
                integers = self._add_integers(source, quantization)
                self.graph.tensors.append(copy.copy(self.graph.tensors[source]))
                op.inputs = [len(self.graph.tensors) - 1, *op.inputs[1:]]
                quantizations[source] = quantization
                for new_op in (
                    self._new_op("DEQUANTIZE", integers, op.inputs[0]),
                    self._new_op("QUANTIZE", source, integers),
                ):
                    self.producers[new_op.outputs[0]] = new_op
                    operators.append(new_op)
        self.graph.operators = operators[::-1]

    def quantize_ops(self) -> None:
        """Let ops run on integers, in the order of execution."""
        operators: list[Any] = []
        removed: set[int] = set()
        readers = self.readers()
        for op in self.graph.operators:
            name = self.name(op)
            if name == "TRANSPOSE":
                op = self._transposed_constant(op) or op  # noqa: PLW2901
            if name in {"SHAPE", "QUANTIZE"}:  # a QUANTIZE of integers rescales them
                source = self.dequantized(op.inputs[0])
                op.inputs = op.inputs if source is None else [source]
            inputs = self._integer_inputs(op, name)
            outputs = None if inputs is None else self._integer_outputs(op, name, inputs, readers)
            if inputs is None or outputs is None:
                operators.append(op)
                continue
            if name in _SAME_SCALE_OPS:
                operators += self._rescale_inputs(inputs, outputs[0])
            operators.append(op)
            for result, output in zip(op.outputs, outputs, strict=True):
                self.graph.tensors[output].name = self.graph.tensors[result].name
                if output in self.producers:
                    removed.add(id(self.producers[output]))
                else:
                    self.producers[result] = self._new_op("DEQUANTIZE", output, result)
                    operators.append(self.producers[result])
            op.inputs, op.outputs = inputs, outputs
            # The defaults are for scales that are powers of two, and for int32 biases.
            if hasattr(op.builtinOptions, "potScaleInt16"):
                op.builtinOptions.potScaleInt16 = False
            if hasattr(op.builtinOptions, "quantizedBiasType"):
                op.builtinOptions.quantizedBiasType = self.bias_type
        self.graph.operators = [op for op in operators if id(op) not in removed]

    def _transposed_constant(self, op: Any) -> Any | None:
        """Return a DEQUANTIZE of the transposed integers for a transpose of an integer constant, None for another."""
        source, permutation = self.dequantized(op.inputs[0]), self.constant(op.inputs[1])
        values = None if source is None else self.constant(source)
        if source is None or permutation is None or values is None:
            return None
        tensor = copy.copy(self.graph.tensors[source])
        axis = permutation.tolist().index(tensor.quantization.quantizedDimension)
        transposed = values.transpose(permutation)
        tensor.shape, tensor.buffer = list(transposed.shape), self._add_buffer(transposed)
        index = self._add_tensor(tensor, self._quantization(self.scale(source), axis=axis))
        self.producers[op.outputs[0]] = self._new_op("DEQUANTIZE", index, op.outputs[0])
        return self.producers[op.outputs[0]]

    def _integer_inputs(self, op: Any, name: str) -> list[int] | None:
        """Return the inputs of an op with integers for floats, None if it has no kernel for them."""
        types, tensors = self.schema.TensorType, self.graph.tensors
        is_known = name in _BOUNDED_OPS | _SAME_SCALE_OPS | _SCALING_OPS | _WEIGHTED_OPS.keys()
        _, weight_slot, bias_slot = _WEIGHTED_OPS.get(name, (0, -1, -1))
        inputs = list(op.inputs)
        slots = [slot for slot, index in enumerate(inputs) if index >= 0 and tensors[index].type == types.FLOAT32]
        if not is_known or not slots:
            return None
        for slot in slots:
            if slot != bias_slot:
                integers = self.dequantized(inputs[slot])
                if slot == weight_slot and name == "TRANSPOSE_CONV" and integers is None:
                    integers = self._quantized_weight(inputs[slot])
                expected_type = types.INT8 if slot == weight_slot else self.activation_type
                if integers is None or tensors[integers].type != expected_type:
                    return None
                needs_zero = slot == weight_slot or self.bits == WIDE_BITS
                if needs_zero and np.any(tensors[integers].quantization.zeroPoint):
                    return None
                inputs[slot] = integers
        if bias_slot in slots:
            values = self.constant(inputs[bias_slot])
            bias = None if values is None else self._integer_bias(inputs, name, values)
            if bias is None:
                return None
            inputs[bias_slot] = bias
        return inputs

    def _quantized_weight(self, index: int) -> int | None:
        """Return the integers of a float weight that is rounded already, with its channels on the first axis."""
        if (values := self.constant(index)) is None:
            return None
        largest = np.abs(values).max(axis=(1, 2, 3)).astype(np.float64)
        scale = np.where(largest > 0, largest, 1) / INT8_STEPS
        tensor = copy.copy(self.graph.tensors[index])
        tensor.type = self.schema.TensorType.INT8
        tensor.buffer = self._add_buffer(np.rint(values / _aligned(scale, values.ndim, 0)).astype(np.int8))
        return self._add_tensor(tensor, self._quantization(scale))

    def _integer_bias(self, inputs: Sequence[int], name: str, values: Array) -> int | None:
        """Return a new bias, whose scale is the product of those of input and weight; None if it is too large."""
        data_slot, weight_slot, bias_slot = _WEIGHTED_OPS[name]
        data_scale, weight_scale = (self.scale(inputs[slot]) for slot in (data_slot, weight_slot))
        scale = data_scale.astype(np.float64) * weight_scale
        steps = np.rint(values / scale)
        dtype = np.dtype("<i8" if self.bits == WIDE_BITS else "<i4")
        if np.abs(steps).max(initial=0) > np.iinfo(dtype).max:
            return None
        bias = copy.copy(self.graph.tensors[inputs[bias_slot]])
        bias.type, bias.buffer = self.bias_type, self._add_buffer(steps.astype(dtype))
        return self._add_tensor(bias, self._quantization(scale))

    def _integer_outputs(
        self, op: Any, name: str, inputs: Sequence[int], readers: Mapping[int, list[Any]]
    ) -> list[int] | None:
        """Return the outputs of an op as integers, None if one of them has no range and none follows from the op."""
        outputs = []
        bounded = _BOUNDED_RESULTS[self.bits].get(name)
        for index in op.outputs:
            quantizer, *others = readers.get(index, [None])
            if quantizer is not None and not others and self.name(quantizer) == "QUANTIZE":
                (output,) = quantizer.outputs
                if self.graph.tensors[output].type != self.activation_type:
                    return None
                scale = self.scale(output)
                if name in {"ADD", "SUB"}:
                    largest = max(float(self.scale(entry)[0]) for entry in inputs)
                    if largest >= _MAX_SUM_RESCALING[self.bits] * float(scale[0]):
                        return None
                is_possible = self._numbers(output) == bounded if bounded else len(op.outputs) == 1
                if is_possible or name not in _BOUNDED_OPS | _SAME_SCALE_OPS:
                    outputs.append(output)
                    continue
            if name not in _BOUNDED_OPS | _SAME_SCALE_OPS:
                return None
            numbers = [bounded] if bounded else [self._numbers(entry) for entry in inputs if self._has_scale(entry)]
            if self.bits != WIDE_BITS and len(set(numbers)) > 1:
                return None  # the range of one input may not contain that of another with another zero point
            step, zero = max(numbers)
            outputs.append(self._add_integers(index, self._quantization(np.full(1, step), zero)))
        return outputs

    def _rescale_inputs(self, inputs: list[int], output: int) -> list[Any]:
        """Let the inputs of an op have the scale of its output, and return the ops that rescale them."""
        ops: list[Any] = []
        for slot, index in enumerate(inputs):
            if self._has_scale(index) and self._numbers(index) != self._numbers(output):
                inputs[slot] = self._add_integers(index, self.graph.tensors[output].quantization)
                ops.append(self._new_op("QUANTIZE", index, inputs[slot]))
        return ops

    def set_boundaries(self, *, integer_inputs: bool, integer_outputs: bool) -> None:
        """Replace float inputs that only a QUANTIZE reads, and outputs of a DEQUANTIZE, by the integers."""
        readers = self.readers()
        producers = {index: op for op in self.graph.operators for index in op.outputs}
        for position, index in enumerate(self.graph.inputs if integer_inputs else ()):
            quantizer, *others = readers.get(index, [None])
            if quantizer is not None and not others and self.name(quantizer) == "QUANTIZE":
                self.graph.inputs[position] = quantizer.outputs[0]
                self.graph.tensors[quantizer.outputs[0]].name = self.graph.tensors[index].name
                self.graph.operators = [op for op in self.graph.operators if op is not quantizer]
        for position, index in enumerate(self.graph.outputs if integer_outputs else ()):
            if index in producers and self.name(producers[index]) == "DEQUANTIZE":
                self.graph.outputs[position] = producers[index].inputs[0]

    def drop_unread(self) -> None:
        """Remove each QUANTIZE and DEQUANTIZE whose result nothing reads, and tensors without an op."""
        graph, read, operators = self.graph, {*self.graph.inputs, *self.graph.outputs}, []
        for op in reversed(graph.operators):
            if self.name(op) not in {"QUANTIZE", "DEQUANTIZE"} or op.outputs[0] in read:
                operators.append(op)
                read |= {*op.inputs, *op.outputs, *(() if op.intermediates is None else op.intermediates)}
        graph.operators = operators[::-1]
        kept = sorted(read - {-1})
        numbers = {-1: -1} | {index: number for number, index in enumerate(kept)}
        graph.tensors = [graph.tensors[index] for index in kept]
        for owner in (graph, *operators):
            for field in ("inputs", "outputs", "intermediates"):
                if getattr(owner, field, None) is not None:
                    setattr(owner, field, [numbers[index] for index in getattr(owner, field)])

    def name(self, op: Any) -> str:
        """Return the type of an op."""
        name: str = self.op_names.get(self.file.operatorCodes[op.opcodeIndex].builtinCode, "")
        return name

    def dequantized(self, index: int) -> int | None:
        """Return the integers that a DEQUANTIZE makes a tensor of, None if it is the result of another op."""
        producer = self.producers.get(index)
        return producer.inputs[0] if producer is not None and self.name(producer) == "DEQUANTIZE" else None

    def scale(self, index: int) -> Array:
        """Return the scales of a tensor, float32 (n,); n is 0 without any."""
        quantization = self.graph.tensors[index].quantization
        scales = () if quantization is None or quantization.scale is None else quantization.scale
        return np.asarray(scales, np.float32)

    def _has_scale(self, index: int) -> bool:
        return index >= 0 and self.scale(index).size > 0

    def _numbers(self, index: int) -> tuple[float, int]:
        """Return the scale and zero point of an activation."""
        return float(self.scale(index)[0]), int(self.graph.tensors[index].quantization.zeroPoint[0])

    def constant(self, index: int) -> Array | None:
        """Return the value of a constant, None for another tensor."""
        tensor, types = self.graph.tensors[index], self.schema.TensorType
        data = self.file.buffers[tensor.buffer].data
        dtypes = {types.FLOAT32: "<f4", types.INT8: "i1", types.INT16: "<i2", types.INT32: "<i4"}
        if data is None or tensor.type not in dtypes:
            return None
        return np.frombuffer(bytes(data), dtypes[tensor.type]).reshape(tensor.shape)

    def readers(self) -> dict[int, list[Any]]:
        """Return the ops that read each tensor; the graph itself reads its outputs."""
        readers: dict[int, list[Any]] = {}
        for reader in (*self.graph.operators, None):
            for index in dict.fromkeys(self.graph.outputs if reader is None else reader.inputs):
                readers.setdefault(index, []).append(reader)
        return readers

    def _add_buffer(self, values: Array) -> int:
        buffer = self.schema.BufferT()
        buffer.data = np.frombuffer(values.tobytes(), np.uint8)
        self.file.buffers.append(buffer)
        return len(self.file.buffers) - 1

    def _quantization(self, scale: Array, zero: int = 0, axis: int = 0) -> Any:
        """Return the quantization of a tensor with a scale along `axis`."""
        quantization = self.schema.QuantizationParametersT()
        quantization.scale, quantization.quantizedDimension = scale.astype(np.float32), axis
        quantization.zeroPoint = np.full(scale.size, zero, np.int64)
        return quantization

    def _add_tensor(self, tensor: Any, quantization: Any) -> int:
        """Add a tensor with a quantization; return its index."""
        tensor.quantization = quantization
        self.graph.tensors.append(tensor)
        return len(self.graph.tensors) - 1

    def _add_integers(self, index: int, quantization: Any) -> int:
        """Add an activation of the shape of another tensor; return its index."""
        tensor = copy.copy(self.graph.tensors[index])
        tensor.type = self.activation_type
        return self._add_tensor(tensor, quantization)

    def _new_op(self, name: str, source: int, result: int) -> Any:
        """Return a QUANTIZE or DEQUANTIZE between two tensors."""
        builtin, codes = getattr(self.schema.BuiltinOperator, name), self.file.operatorCodes
        number = next((index for index, code in enumerate(codes) if code.builtinCode == builtin), len(codes))
        if number == len(codes):
            code = self.schema.OperatorCodeT()
            code.builtinCode = code.deprecatedBuiltinCode = builtin
            codes.append(code)
        op = self.schema.OperatorT()
        op.opcodeIndex, op.inputs, op.outputs = number, [source], [result]
        return op
