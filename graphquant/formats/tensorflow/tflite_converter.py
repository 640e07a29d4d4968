"""Convert a frozen model to TFLite with TensorFlow, run TFLite files, and read the scales of the runtime.

The FakeQuants hold every range, so no representative dataset is needed.
https://www.tensorflow.org/api_docs/python/tf/lite/TFLiteConverter
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from graphquant.errors import ModelError, UnobservableTensorError, UsageError, did_you_mean
from graphquant.formats import Feeds, InputSpec
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.freeze import with_constants
from graphquant.formats.tensorflow.learned_ranges import unique_node_name
from graphquant.formats.tensorflow.runner import served_signatures
from graphquant.formats.tensorflow.session import (
    first_error_line,
    import_tensorflow,
    silence_stderr,
    translate_tf_errors,
)
from graphquant.formats.tensorflow.tflite_16x8 import WIDE_BITS, quantize_pairs
from graphquant.formats.tensorflow.values import decode_tensor, set_constant
from graphquant.ir import BOUNDED_KINDS, FLOAT_TYPES, RESHAPING_KINDS, Model, Parameters, TensorRef, Use
from graphquant.numerics import IntType, QParams, dequantize, qparams_from_scale, quantize
from graphquant.qdq import read_qparams

if TYPE_CHECKING:
    from graphquant.formats.tensorflow.source import FrozenSignature
    from graphquant.numerics import Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RuntimeTensor:
    """A tensor as the TFLite interpreter reports it."""

    graph: int  # the index of its graph, 0 for the main graph
    index: int
    name: str
    dtype: str  # numpy-like
    scales: Array  # float32 (C,), real units per step
    zero_points: Array  # int32 (C,), steps
    axis: int  # the quantized dimension


_SOURCE_LOCATION = re.compile(r"(?:^|(?<=\.))\S+?:\d+:\d+: error: ")
"""The converter's reference to a line of the calling program, which is irrelevant for the model."""


def convert_signatures(model: Model, io: str | None = None, *, keep_float: bool = False) -> tuple[bytes, ...]:
    """Convert a frozen model with FakeQuants to one TFLite file for each set of outputs of its signatures.

    Args:
        model: The frozen model.
        io: The type of the file's float inputs and outputs: "int8", "uint8", "int16" or "float32". By default, inputs
            get the type of the activations if all of them have a range, and so do outputs.
        keep_float: Keep each op float that lacks a range in the plan. The converter gives it the range of another op.

    Raises a ModelError if the converter refuses the model, and a UsageError if `io` is not a type for its activations,
    or needs a range that is missing.
    """
    message = emit(model)
    signatures = served_signatures(model, message)
    io_types = ["int16", "float32"] if is_16x8(model) else ["int8", "uint8", "float32"]
    if io is not None and io not in io_types:
        raise UsageError(f"The activations of the plan are {io_types[0]}, so --io is one of {', '.join(io_types)}.")
    if io is not None and io != "float32":
        for signature in signatures:
            _require_ranges(model, io, signature)
    graph_def = model.source.graph_def(message)
    names = [op.name for op in model.main.ops() if op.kind == "qdq"]
    if not has_only_weight_ranges(model):
        names = _transposed_weight_quantizers(model)
    switched = _switched_weights(model, names)
    if names or switched:
        # The converter computes the scales of such weights from their values, which gives the planned scales: the
        # largest value is on the grid. FakeQuants would let it store float weights.
        graph_def = with_constants(graph_def, names, switched)
    graph_def = _with_fused_biases(model, graph_def)
    by_tensors: dict[tuple[tuple[str, ...], ...], list[FrozenSignature]] = {}
    for signature in signatures:
        tensors = tuple(signature.inputs.values()), tuple(signature.outputs.values())
        by_tensors.setdefault(tensors, []).append(signature)
    return tuple(
        _convert_signatures(model, graph_def, equal_signatures, io, keep_float=keep_float or is_16x8(model))
        for equal_signatures in by_tensors.values()
    )


def _convert_signatures(
    model: Model, graph_def: Any, signatures: list[FrozenSignature], io: str | None, *, keep_float: bool
) -> bytes:
    """Return the TFLite file of signatures that have the same tensors as inputs and outputs."""
    tensorflow = import_tensorflow()
    from tensorflow.lite.python.convert_phase import ConverterError

    if io != "float32" and all(_input_is_quantized(model, name) for name in signatures[0].inputs.values()):
        graph_def = _with_quantized_inputs(model, graph_def, signatures[0])
    try:
        try:
            data = _convert_graph(tensorflow, model, graph_def, signatures[0], io, keep_float=keep_float)
        except ConverterError as error:
            retried = None
            if "TensorList" in str(error) and "static" in str(error):  # lists whose elements have an unknown size
                retried = _with_batch_size_one(tensorflow, graph_def, signatures[0])
            elif "same scale constraint" in str(error) and not keep_float:
                # Scales of operands differ where the kernel needs one. The pairs decide which ops are integer then.
                retried, keep_float = graph_def, True
            if retried is None:
                raise
            data = _convert_graph(tensorflow, model, retried, signatures[0], io, keep_float=keep_float)
    # The converter's struct.error stands for an empty file.
    except (ConverterError, ValueError, RuntimeError, struct.error) as error:
        reason = _SOURCE_LOCATION.sub(" ", first_error_line(str(error))).strip()
        names = ", ".join(signature.name for signature in signatures)
        refused = "model" if len(served_signatures(model)) == len(signatures) else f"signature {names}"
        raise ModelError(
            f"TensorFlow's converter refuses the {refused}: {reason}. {_conversion_advice(model, str(error))}"
        ) from error
    return add_signatures(data, signatures)


def _convert_graph(
    tensorflow: Any, model: Model, graph_def: Any, signature: FrozenSignature, io: str | None, *, keep_float: bool
) -> bytes:
    """Return the TFLite file of `graph_def`, the graph of `model`, between the inputs and outputs of a signature."""
    v1 = tensorflow.compat.v1
    with silence_stderr():
        with translate_tf_errors(tensorflow):
            graph_message = v1.GraphDef.FromString(proto.to_binary(graph_def))
            function = v1.wrap_function(lambda: v1.import_graph_def(graph_message, name=""), [])
            feeds = [function.graph.as_graph_element(f"{name}:0") for name in signature.inputs.values()]
            fetches = [function.graph.as_graph_element(name) for name in signature.outputs.values()]
            converter = tensorflow.lite.TFLiteConverter.from_concrete_functions([function.prune(feeds, fetches)])
        has_ranges = any(op.kind == "qdq" for op in model.main.ops())
        # Without ranges the optimization quantizes the weights only.
        if has_ranges and not keep_float:
            converter.optimizations = [tensorflow.lite.Optimize.DEFAULT]
        quantizes_activations = has_ranges and not has_only_weight_ranges(model) and io != "float32"
        integer_inputs, integer_outputs = (
            quantizes_activations and all(is_quantized(model, name) for name in names)
            for is_quantized, names in (
                (_input_is_quantized, signature.inputs.values()),
                (_output_is_quantized, signature.outputs.values()),
            )
        )
        if integer_inputs and not keep_float:
            converter.inference_input_type = tensorflow.as_dtype(io or "int8")
        if integer_outputs and not keep_float:
            converter.inference_output_type = tensorflow.as_dtype(io or "int8")
        data: bytes = converter.convert()
    if not keep_float:
        return data
    bits, is_unsigned = WIDE_BITS if is_16x8(model) else 8, io == "uint8"
    integer_boundaries = {"integer_inputs": integer_inputs, "integer_outputs": integer_outputs}
    if not is_unsigned:
        return quantize_pairs(data, bits=bits, **integer_boundaries)
    from tensorflow.lite.python.util import modify_model_io_type

    data = quantize_pairs(data, bits=bits, **dict.fromkeys(integer_boundaries, False))
    types = [tensorflow.uint8 if is_integer else tensorflow.float32 for is_integer in integer_boundaries.values()]
    return bytes(modify_model_io_type(data, *types))


_LIST_SHAPE_SLOTS: Final = {
    "EmptyTensorList": 0,
    "TensorListReserve": 0,
    "TensorListFromTensor": 1,
    "TensorListStack": 1,
    "TensorListGetItem": 2,
}
"""The input of each list op that is the shape of an element."""


def _with_batch_size_one(tensorflow: Any, graph_def: Any, signature: FrozenSignature) -> Any:
    """Return the graph for batches of one sample, None if it does not run with them.

    Recurrent layers keep their outputs in lists, whose elements have a batch axis that the converter needs to know.
    TFLite's interpreter starts with a batch size of one anyway.
    """
    single = deepcopy(graph_def)
    nodes = {node.name: node for node in single.node}
    for name in signature.inputs.values():
        axes = nodes[name].attr["shape"].shape.dim
        if axes and axes[0].size < 0:
            axes[0].size = 1
    for node in list(single.node):
        node.attr.pop("_output_shapes", None)
        slot = _LIST_SHAPE_SLOTS.get(node.op, len(node.input))
        shape = nodes[node.input[slot].partition(":")[0]] if slot < len(node.input) else None
        if shape is not None and shape.op == "Const":
            sizes = decode_tensor(shape.attr["value"].tensor, shape.name)
            if sizes.ndim == 1 and sizes.size and sizes[0] < 0:
                set_constant(shape, np.concatenate([np.ones(1, sizes.dtype), sizes[1:]]))
    return single if _runs_on_zeros(tensorflow, single, signature) else None


def _runs_on_zeros(tensorflow: Any, graph_def: Any, signature: FrozenSignature) -> bool:
    """Return True if TensorFlow can run a graph on zeros; a list refuses elements of another size."""
    v1 = tensorflow.compat.v1
    try:
        with v1.Graph().as_default() as graph:
            v1.import_graph_def(v1.GraphDef.FromString(proto.to_binary(graph_def)), name="")
            feeds = {}
            for name in signature.inputs.values():
                tensor = graph.as_graph_element(f"{name}:0")
                sizes = [size or 1 for size in tensor.shape.as_list()]
                feeds[tensor] = np.zeros(sizes, tensor.dtype.as_numpy_dtype)
            with v1.Session(graph=graph) as session:
                session.run(list(signature.outputs.values()), feeds)
    except (ValueError, tensorflow.errors.OpError):
        return False
    return True


def _require_ranges(model: Model, io: str, signature: FrozenSignature) -> None:
    """Raise a UsageError if an input or output has no range, so that it cannot be of the type `io`."""
    float_inputs = [name for name in signature.inputs.values() if not _input_is_quantized(model, name)]
    float_outputs = [name for name in signature.outputs.values() if not _output_is_quantized(model, name)]
    if float_inputs or float_outputs:
        role, name = ("input", float_inputs[0]) if float_inputs else ("output", float_outputs[0])
        raise UsageError(
            f"The {role} {name} cannot be {io}, because the plan has no range for it. Quantize it with a rule, or use"
            " --io float32."
        )


def add_signatures(data: bytes, signatures: list[FrozenSignature]) -> bytes:
    """Return a TFLite file with signatures, which give the inputs and outputs of its main graph keys.

    The converter writes signatures only of SavedModels, which would have to be written for it.
    """
    from tensorflow.lite.python import schema_py_generated as schema
    from tensorflow.lite.tools import flatbuffer_utils

    def entries(keys: Iterable[str], tensors: Any) -> list[Any]:
        mapped = []
        for key, tensor in zip(keys, tensors, strict=True):
            entry = schema.TensorMapT()
            entry.name, entry.tensorIndex = key, int(tensor)
            mapped.append(entry)
        return mapped

    file = flatbuffer_utils.convert_bytearray_to_object(bytearray(data))
    _name_inputs(file.subgraphs[0], signatures[0])
    file.signatureDefs = []
    for signature in signatures:
        definition = schema.SignatureDefT()
        definition.signatureKey, definition.subgraphIndex = signature.name, 0
        definition.inputs = entries(signature.inputs, file.subgraphs[0].inputs)
        definition.outputs = entries(signature.outputs, file.subgraphs[0].outputs)
        file.signatureDefs.append(definition)
    return bytes(flatbuffer_utils.convert_object_to_bytearray(file))


def _name_inputs(graph: Any, signature: FrozenSignature) -> None:
    """Name the quantized inputs after their ops, as TensorFlow does. The converter names them after a pass."""
    for op, index in zip(signature.inputs.values(), graph.inputs, strict=True):
        if graph.tensors[index].name.startswith(b"tfl."):
            for tensor in graph.tensors:
                if tensor.name == op.encode():  # an unused rest of the float input
                    tensor.name += b"/float"
            graph.tensors[index].name = op.encode()


_SUBGRAPH_OPTIONS: Final = "subgraph", *(f"{name}SubgraphIndex" for name in ("then", "else", "cond", "body", "init"))
"""The options of TFLite's ops that are the index of a graph."""


def join_tflite_files(files: Sequence[bytes]) -> bytes:
    """Return one TFLite file with the graphs and signatures of all `files`, which stores equal constants once."""
    from tensorflow.lite.tools import flatbuffer_utils

    if len(files) == 1:
        return files[0]
    joined, *others = [flatbuffer_utils.convert_bytearray_to_object(bytearray(data)) for data in files]
    codes = {_code_key(code): index for index, code in enumerate(joined.operatorCodes)}
    buffers = {_buffer_content(buffer): index for index, buffer in reversed(list(enumerate(joined.buffers)))}
    for file in others:
        first_graph = len(joined.subgraphs)
        for graph in file.subgraphs:
            for tensor in graph.tensors:
                buffer = file.buffers[tensor.buffer]
                content = _buffer_content(buffer)
                if content not in buffers:
                    buffers[content] = len(joined.buffers)
                    joined.buffers.append(buffer)
                tensor.buffer = buffers[content] if content else 0
            for op in graph.operators:
                code = file.operatorCodes[op.opcodeIndex]
                if _code_key(code) not in codes:
                    codes[_code_key(code)] = len(joined.operatorCodes)
                    joined.operatorCodes.append(code)
                op.opcodeIndex = codes[_code_key(code)]
                _shift_called_graphs(op, first_graph)
        for definition in file.signatureDefs:
            definition.subgraphIndex += first_graph
        joined.subgraphs += file.subgraphs
        joined.signatureDefs += file.signatureDefs
    return bytes(flatbuffer_utils.convert_object_to_bytearray(joined))


def _code_key(code: Any) -> tuple[Any, ...]:
    """Return the content of an operator code of a TFLite file."""
    return code.builtinCode, code.deprecatedBuiltinCode, code.customCode, code.version


def _buffer_content(buffer: Any) -> bytes:
    """Return the bytes of a buffer of a TFLite file."""
    return b"" if buffer.data is None else bytes(buffer.data)


def _shift_called_graphs(op: Any, shift: int) -> None:
    """Add `shift` to the indices of the graphs that an op of a TFLite file runs."""
    for option in _SUBGRAPH_OPTIONS:
        if hasattr(op.builtinOptions, option):
            setattr(op.builtinOptions, option, getattr(op.builtinOptions, option) + shift)


_TENSOR_ARRAY: Final = re.compile(r"TensorArray(?:Read|Write|Gather|Scatter|Size|Split|Concat)?V[23]$")

_MISSING_OPS = re.compile(r"(?:TF Select|Custom|Flex) ops: ([\w, ]+)")
"""The converter's list of ops without a kernel of TFLite."""


def _conversion_advice(model: Model, message: str) -> str:
    """Return the advice for an error of the converter."""
    if any(_TENSOR_ARRAY.match(op.type) for op in model.main.ops()):
        return (
            "TFLite has no TensorArrays of TensorFlow 1. Call tf.compat.v1.enable_control_flow_v2() before the graph is"
            " built, and export it again."
        )
    if any(output.dtype in FLOAT_TYPES - {"float32", "float64"} for op in model.main.ops() for output in op.outputs):
        return "TFLite computes in float32. Save the model with that type, in Keras with the policy float32."
    if "TensorList" in message or "TensorArray" in message:
        return (
            "TFLite has no lists of strings, or of tensors whose elements have an unknown size. Build recurrent layers"
            " with unroll=True, or the model with a fixed batch size (batch_size=1), and export it again."
        )
    if missing := sorted({op for ops in _MISSING_OPS.findall(message) for op in ops.replace(" ", "").split(",") if op}):
        return f"TFLite has no kernel for {', '.join(missing)}. Export the model without these ops."
    if any(op.kind == "qdq" for op in model.main.ops()):
        return "It accepts the float model, so exclude the op that it names with --exclude."
    return "Its float graph cannot be converted either, so export the model without the op that it names."


def prepare_interpreter(data: bytes) -> Callable[[], object]:
    """Prepare a run of a TFLite file on zeros, with TFLite's defaults and one thread."""
    tensorflow = import_tensorflow()
    with silence_stderr(), _translate_runtime_errors():
        interpreter = tensorflow.lite.Interpreter(model_content=data, num_threads=1)
        interpreter.allocate_tensors()
        for tensor in interpreter.get_input_details():
            interpreter.set_tensor(tensor["index"], np.zeros(tensor["shape"], tensor["dtype"]))
        interpreter.invoke()
    run: Callable[[], object] = interpreter.invoke
    return run


def runtime_tensors(data: bytes) -> tuple[RuntimeTensor, ...]:
    """Return the interpreter's report of each tensor, after it allocated all of them."""
    tensorflow = import_tensorflow()
    resolver = tensorflow.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    with silence_stderr(), _translate_runtime_errors():
        interpreter = tensorflow.lite.Interpreter(model_content=data, experimental_op_resolver_type=resolver)
        interpreter.allocate_tensors()
        graph_count = interpreter.num_subgraphs()
        details = [(graph, item) for graph in range(graph_count) for item in interpreter.get_tensor_details(graph)]
    return tuple(
        RuntimeTensor(
            graph=graph,
            index=int(detail["index"]),
            name=detail["name"],
            dtype=np.dtype(detail["dtype"]).name,
            scales=detail["quantization_parameters"]["scales"],
            zero_points=detail["quantization_parameters"]["zero_points"],
            axis=int(detail["quantization_parameters"]["quantized_dimension"]),
        )
        for graph, detail in details
    )


class TFLiteRunner:
    """Runs a TFLite file in TensorFlow's interpreter, with floats in place of integers that have a scale.

    Inputs and outputs have the keys of the file's signatures, or its tensors' names if there are none.
    """

    def __init__(
        self,
        model: Model,
        signatures: Sequence[str] = (),
        other_outputs: Sequence[str] = (),
        other_inputs: Sequence[InputSpec] = (),
    ) -> None:
        """Create the interpreter of a model, and run these of its signatures, by default those of `other_inputs`.

        The outputs of signatures after the first are named "SIGNATURE/KEY", and only those in `other_outputs` are
        returned, if it has any. Inputs have the names of those in `other_inputs` that their signature takes under the
        same key.

        Raises:
            MissingDependencyError: tensorflow is not installed.
            ModelError: The interpreter refuses the file.
            UsageError: The file has no such signature.
        """
        self.model = model
        self._tensorflow = import_tensorflow()
        self.start_sequence()
        known = sorted(self._interpreter.get_signature_list(), key=lambda name: name != "serving_default")
        if unknown := [name for name in signatures if name not in known]:
            hint = did_you_mean(unknown[0], known)
            raise UsageError(
                f"{model.path} has no signature {unknown[0]!r}. It has {', '.join(known) or 'none'}.{hint}"
            )
        compared = dict.fromkeys(name for spec in other_inputs for name in spec.signatures if name in known)
        first, *others = signatures or compared or known or ("",)
        self._inputs: dict[str, dict[str, Any]] = {}
        self._input_names: dict[str, dict[str, str]] = {}
        self._outputs: dict[str, dict[str, str]] = {}
        self.output_steps: dict[str, float] = {}  # scales of the outputs, 0 for floats
        for signature in (first, *others):
            inputs, outputs = self._details(signature)
            names = {key: key if signature == first else f"{signature}/{key}" for key in outputs}
            is_compared = signature == first or (signature in signatures and not other_outputs)
            names = {key: name for key, name in names.items() if is_compared or name in other_outputs}
            if names:
                self._inputs[signature], self._outputs[signature], self._input_names[signature] = inputs, names, {}
                self.output_steps |= {name: outputs[key]["quantization"][0] for key, name in names.items()}
        specs: dict[str, InputSpec] = {}
        for signature, key, detail in (
            (name, *item) for name, inputs in self._inputs.items() for item in inputs.items()
        ):
            others_names = (s.name for s in other_inputs if signature in s.signatures and key in (*s.aliases, s.name))
            spec = _interpreter_input(next(others_names, key), key, detail, signature)
            shared = specs.get(spec.name, spec)
            if (shared.dtype, shared.shape) != (spec.dtype, spec.shape):  # another input with the same key
                shared = replace(spec, name=f"{signature}/{key}", aliases=(key,))
            readers = dict.fromkeys((*shared.signatures, signature))
            specs[shared.name] = replace(shared, signatures=tuple(filter(None, readers)))
            self._input_names[signature][key] = shared.name
        self.inputs: Sequence[InputSpec] = tuple(specs.values())
        self.outputs: Sequence[str] = [name for names in self._outputs.values() for name in names.values()]
        self.output_tensors: Mapping[str, TensorRef] = {}  # the interpreter overwrites tensors during a run

    def _details(self, signature: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the interpreter's report of the inputs and outputs of a signature by key, or of the main graph."""
        with self._translate_errors():  # names may be damaged
            if signature:
                runner = self._interpreter.get_signature_runner(signature)
                return runner.get_input_details(), runner.get_output_details()
            details = self._interpreter.get_input_details(), self._interpreter.get_output_details()
            return {tensor["name"]: tensor for tensor in details[0]}, {tensor["name"]: tensor for tensor in details[1]}

    def start_sequence(self) -> bool:
        """Let the next run start with the initial state. Return True if the file has variables."""
        with silence_stderr(), self._translate_errors():
            self._interpreter = self._tensorflow.lite.Interpreter(model_content=bytes(self.model.source))
            self._interpreter.allocate_tensors()  # reports its delegates on stderr
        return not self.model.op_kinds().isdisjoint({"variable", "read_variable", "stateful"})

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Return the outputs by name. A model with state continues from the previous call."""
        results: dict[str, Array] = {}
        with self._translate_errors():
            for signature, names in self._outputs.items():
                details = self._inputs[signature]
                feed_names = self._input_names[signature]
                inputs = {key: _to_integers(feeds[feed_names[key]], detail) for key, detail in details.items()}
                outputs, output_details = self._invoke(signature, inputs)
                results |= {name: _to_floats(outputs[key], output_details[key]) for key, name in names.items()}
        return results

    def _invoke(self, signature: str, inputs: Mapping[str, Array]) -> tuple[Mapping[str, Array], Mapping[str, Any]]:
        """Run a signature, or the main graph, on inputs of any size; return its outputs and the report of them."""
        if signature:
            outputs = self._interpreter.get_signature_runner(signature)(**inputs)
            return outputs, self._details(signature)[1]
        for key, value in inputs.items():
            self._interpreter.resize_tensor_input(self._inputs[""][key]["index"], value.shape)
        self._interpreter.allocate_tensors()
        for key, value in inputs.items():
            self._interpreter.set_tensor(self._inputs[""][key]["index"], value)
        self._interpreter.invoke()
        details = self._details("")[1]
        return {key: self._interpreter.get_tensor(detail["index"]) for key, detail in details.items()}, details

    def run_each(self, feeds: Iterable[Feeds]) -> Iterator[dict[str, Array]]:
        """Yield the outputs of each feed. A model with state starts with the initial one."""
        self.start_sequence()
        return map(self.run, feeds)

    def free_session(self, *, observing: bool = False, only_large: bool = True) -> None:
        """Do nothing: all runs share one interpreter."""

    @staticmethod
    def unobservable(tensors: Sequence[TensorRef]) -> dict[TensorRef, str]:
        """Return a reason for each of `tensors`: none can be observed."""
        return dict.fromkeys(tensors, "TFLite's interpreter overwrites it during a run")

    def element_counts(self, tensors: Sequence[TensorRef], _feed: Feeds) -> dict[TensorRef, int]:
        """Raise an UnobservableTensorError: no tensor can be observed."""
        raise UnobservableTensorError(f"{self.model.path}: TFLite's interpreter overwrites {tensors[0]} during a run.")

    def observe(self, tensors: Sequence[TensorRef], feeds: Iterable[Feeds], **_options: Any) -> Any:
        """Raise an UnobservableTensorError: no tensor can be observed."""
        self.element_counts(tensors, next(iter(feeds)))

    def _translate_errors(self) -> contextlib.AbstractContextManager[None]:
        return _translate_runtime_errors(
            f"TFLite's interpreter cannot run {self.model.path}",
            "Check the shapes of the data, and that the file has no custom ops",
        )


def _interpreter_input(name: str, key: str, detail: Mapping[str, Any], signature: str) -> InputSpec:
    """Return an input by the interpreter's report of it; integers with a scale are fed as floats."""
    is_scaled = detail["quantization_parameters"]["scales"].size
    return InputSpec(
        name=name,
        dtype="float32" if is_scaled else np.dtype(detail["dtype"]).name,
        shape=tuple(None if size < 0 else int(size) for size in detail["shape_signature"]),
        aliases=tuple(alias for alias in dict.fromkeys((key, key.removesuffix(":0"))) if alias != name),
        signatures=(signature,),
    )


def _stored_params(detail: Mapping[str, Any]) -> QParams | None:
    """Return the scale, zero point and type of the interpreter's report of a tensor, None if it has no scale."""
    stored = detail["quantization_parameters"]
    if not stored["scales"].size:
        return None
    dtype = IntType.parse(np.dtype(detail["dtype"]).name)
    return qparams_from_scale(stored["scales"].reshape(()), stored["zero_points"].reshape(()), dtype)


def _to_integers(values: Array, detail: Mapping[str, Any]) -> Array:
    """Quantize values with the scale of an input; integers stay as they are."""
    params = _stored_params(detail) if values.dtype.kind == "f" else None
    return values if params is None else quantize(values, params).astype(detail["dtype"])


def _to_floats(values: Array, detail: Mapping[str, Any]) -> Array:
    """Dequantize an output that has a scale."""
    params = _stored_params(detail)
    return values if params is None else dequantize(values, params)


@contextlib.contextmanager
def _translate_runtime_errors(
    problem: str = "TFLite's runtime refuses the converted model",
    advice: str = "Exclude that op with --exclude, or export the model without it",
) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"{problem}: {first_error_line(str(error))}. {advice}.") from error


def _input_is_quantized(model: Model, input_name: str) -> bool:
    """Return True if the input `input_name` is not float or has a FakeQuant."""
    is_float = model.main.op(input_name).outputs[0].dtype in FLOAT_TYPES
    return not is_float or _input_quantizer(model, input_name) is not None


def _input_quantizer(model: Model, input_name: str) -> str | None:
    """Return the FakeQuant of an input, also behind ops that only move its values, None if there is none."""
    pending = [TensorRef("", input_name)]
    for tensor in pending:  # grows during the loop
        readers = [use.op for use in model.main.consumers(tensor) if use.slot == 0]
        quantizer = next((name for name in readers if model.main.op(name).kind == "qdq"), None)
        if quantizer is not None:
            return quantizer
        pending += [TensorRef("", name) for name in readers if model.main.op(name).kind in RESHAPING_KINDS]
    return None


MIN_DYNAMIC_WEIGHT_SIZE: Final = 1024
"""The number of elements from which the converter quantizes a weight whose op has float activations."""


def has_only_weight_ranges(model: Model) -> bool:
    """Return True if a model has FakeQuants, and all of them are on weights: TFLite's dynamic range quantization."""
    parameters = Parameters(model)
    inputs = [model.main.source_of(Use("", op.name, 0)) for op in model.main.ops() if op.kind == "qdq"]
    return bool(inputs) and all(tensor is not None and parameters.is_parameter(tensor) for tensor in inputs)


def is_16x8(model: Model) -> bool:
    """Return True if a model has FakeQuants of 16 bits, which are on activations: TFLite's 16x8 quantization."""
    return any(op.kind == "qdq" and op.numeric_attr("num_bits", 8) == WIDE_BITS for op in model.main.ops())


def _transposed_weight_quantizers(model: Model) -> list[str]:
    """Return the FakeQuants on weights of transposed convolutions.

    Their channels are on an inner axis, so the FakeQuant is between reshapes, with which the converter fails silently.
    """
    names = []
    for op in model.main.ops():
        if op.kind == "conv_transpose":
            sources = [slot for index, slot in enumerate(model.main.slots(op.name)) if op.role(index) == "weight"]
            for source in sources:
                tensor = source
                while tensor is not None and model.op(tensor).kind in RESHAPING_KINDS:
                    tensor = model.main.source_of(Use("", tensor.op, 0))
                if tensor is not None and model.op(tensor).kind == "qdq":
                    names.append(tensor.op)
    return list(dict.fromkeys(names))


def _switched_weights(model: Model, computed: Collection[str]) -> dict[str, Array]:
    """Return the rounded weights that reach a FakeQuant per channel in a branch through a Switch, by its name.

    The converter makes such a weight an argument of the branch, and has no kernel for the FakeQuant of an argument.
    Weights that enter a loop are included if their FakeQuant is one of `computed`.
    """
    weights, parameters = {}, Parameters(model)
    for op in model.main.ops():
        is_computed = op.name in computed
        path = [TensorRef("", op.name)] if op.kind == "qdq" and ("PerChannel" in op.type or is_computed) else []
        for tensor in path:  # grows during the loop
            source = model.main.source_of(Use("", tensor.op, 0))
            if source is None or source in path:
                break
            passes_loop = is_computed and model.op(source).type in {"Enter", "Merge"}
            if passes_loop or model.op(source).kind in {"identity", "switch", "constant"}:
                path.append(source)
        params = read_qparams(model.main, op, parameters) if path else None
        read_value = model.op(path[-1]).read_value if path else None
        is_switched = any(model.op(tensor).kind == "switch" for tensor in path)
        if is_switched and isinstance(params, QParams) and read_value is not None:
            weights[op.name] = dequantize(quantize(read_value(), params), params)
    return weights


def _with_fused_biases(model: Model, graph_def: Any) -> Any:
    """Return the graph with each bias before the reshape that ends the product of a Dense layer on sequences.

    The converter fuses a bias behind a reshape only if all sizes are known, without a free batch size. The product
    would have no range then, and stay float.
    """
    changed = deepcopy(graph_def)
    nodes = {node.name: node for node in changed.node}
    for op in model.main.ops():
        if op.type != "BiasAdd":
            continue
        path = [TensorRef("", op.name)]
        for tensor in path:  # grows during the loop, from the sum to the product
            source = model.main.source_of(Use("", tensor.op, 0))
            if source is None or len(path) == len(("sum", "reshape", "product")):
                break
            if len(model.main.consumers(source)) == 1:
                path.append(source)
        channels = {(model.output(tensor).shape or (None,))[-1] for tensor in path[1:]}
        types = [model.op(tensor).type for tensor in path[1:]]
        if types == ["Reshape", "MatMul"] and len(channels) == 1 and None not in channels:
            # The nodes change places and names, so that the others read the same values as before.
            bias, reshape = nodes[op.name], nodes[path[1].op]
            bias.name, reshape.name, bias.input[0] = reshape.name, bias.name, reshape.input[0]
            reshape.input[0] = bias.name
            for node in (bias, reshape):
                node.attr.pop("_output_shapes", None)
    return changed


def _copy_node(graph_def: Any, node: Any, inputs: Sequence[str], used_names: set[str]) -> Any:
    """Add a copy of a node with other inputs to a graph, and return it."""
    copy = graph_def.node.add()
    copy.CopyFrom(node)
    copy.name = unique_node_name(used_names, node.name)
    copy.input[:] = inputs
    copy.attr.pop("_output_shapes", None)
    return copy


def _with_quantized_inputs(model: Model, graph_def: Any, signature: FrozenSignature) -> Any:
    """Return the graph in which each op reads a float input behind a FakeQuant, as it reads an int8 one."""
    rerouted = deepcopy(graph_def)
    nodes = {node.name: node for node in rerouted.node}
    used_names = set(nodes)
    for name in signature.inputs.values():
        quantizer = _input_quantizer(model, name) if model.main.op(name).outputs[0].dtype in FLOAT_TYPES else None
        if quantizer is None:
            continue
        node = nodes[quantizer]
        if proto.input_node(node.input[0]) != name:
            range_ops = [_copy_node(rerouted, nodes[proto.input_node(text)], (), used_names) for text in node.input[1:]]
            node = _copy_node(rerouted, node, (name, *(op.name for op in range_ops)), used_names)
        for reader in rerouted.node:
            if not reader.op.startswith("FakeQuant"):  # other readers of the input have ranges of their own
                reader.input[:] = [node.name if text in {name, f"{name}:0"} else text for text in reader.input]
    return rerouted


def _output_is_quantized(model: Model, name: str) -> bool:
    """Return True if the output is not float, or comes from a FakeQuant or from an op with a fixed output range."""
    op, _, port = name.partition(":")
    tensor: TensorRef | None = TensorRef("", op, int(port or 0))
    while tensor is not None:
        passes_each = model.op(tensor).type == "IdentityN"
        if not passes_each and model.op(tensor).kind not in {"identity", "reshape"}:
            break
        tensor = model.main.source_of(Use("", tensor.op, tensor.port if passes_each else 0))
    if tensor is None:
        return False
    dtype = model.output(tensor).dtype
    return dtype not in FLOAT_TYPES or model.op(tensor).kind in BOUNDED_KINDS | {"qdq"}
