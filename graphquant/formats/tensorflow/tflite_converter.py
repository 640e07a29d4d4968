"""Freeze a model into one graph of constants, convert it to TFLite with TensorFlow, and read the runtime's scales.

The FakeQuants hold every range, so no representative dataset is needed.
https://www.tensorflow.org/api_docs/python/tf/lite/TFLiteConverter
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from graphquant.errors import ModelError, UsageError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.function_names import rename_functions
from graphquant.formats.tensorflow.learned_ranges import LEARNED_ATTR, unique_node_name
from graphquant.formats.tensorflow.load import build_model
from graphquant.formats.tensorflow.runner import input_specs, output_fetches, served_signature_name
from graphquant.formats.tensorflow.session import (
    TensorFlowSession,
    find_state_variables,
    first_error_line,
    import_tensorflow,
    silence_stderr,
    translate_tf_errors,
)
from graphquant.formats.tensorflow.source import TensorFlowSource
from graphquant.ir import FLOAT_TYPES, Model, TensorRef, Use, reachable

if TYPE_CHECKING:
    from graphquant.numerics import Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RuntimeTensor:
    """A tensor of the main graph, as the TFLite interpreter reports it."""

    index: int
    name: str
    dtype: str  # numpy-like
    scales: Array  # float32 (C,), real units per step
    zero_points: Array  # int32 (C,), steps
    axis: int  # the quantized dimension


_SOURCE_LOCATION = re.compile(r"^\S+:\d+:\d+: error: ")
"""The converter's reference to a line of the calling program, which is irrelevant for the model."""


def run_tflite_converter(model: Model, io: str | None = None) -> bytes:
    """Convert a frozen model with FakeQuants to a TFLite file with the signature of `model`.

    Args:
        model: The frozen model.
        io: The type of the file's float inputs and outputs: "int8", "uint8" or "float32". By default, inputs become
            int8 if all of them have a range, and so do outputs.

    Raises a ModelError if the converter refuses the model, and a UsageError if `io` needs a range that is missing.
    """
    tensorflow = import_tensorflow()
    v1 = tensorflow.compat.v1
    message = emit(model)
    graph_def = v1.GraphDef.FromString(proto.to_binary(model.source.graph_def(message)))
    input_names = [spec.name for spec in input_specs(model, message)]
    fetches_by_key = output_fetches(model, message)
    output_names = list(fetches_by_key.values())
    if io in {"int8", "uint8"}:
        _require_ranges(model, io, input_names, output_names)
    with silence_stderr(), translate_tf_errors(tensorflow):
        function = v1.wrap_function(lambda: v1.import_graph_def(graph_def, name=""), [])
        feeds = [function.graph.as_graph_element(f"{name}:0") for name in input_names]
        fetches = [function.graph.as_graph_element(name) for name in output_names]
        converter = tensorflow.lite.TFLiteConverter.from_concrete_functions([function.prune(feeds, fetches)])
        # Without ranges the optimization would quantize the weights only.
        if any(op.kind == "qdq" for op in model.main.ops()):
            converter.optimizations = [tensorflow.lite.Optimize.DEFAULT]
            io_type = tensorflow.as_dtype(io or "int8")
            if all(_input_is_quantized(model, name) for name in input_names):
                converter.inference_input_type = io_type
            if all(_output_is_quantized(model, name) for name in output_names):
                converter.inference_output_type = io_type
    from tensorflow.lite.python.convert_phase import ConverterError

    try:
        with silence_stderr():
            data: bytes = converter.convert()
    except (ConverterError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"TensorFlow's converter refuses the model: {_SOURCE_LOCATION.sub('', first_error_line(str(error)))}."
            f" {_conversion_advice(model, str(error))}"
        ) from error
    return _with_signature(data, model.source.signature_name, _signature_keys(model), list(fetches_by_key))


def _require_ranges(model: Model, io: str, input_names: list[str], output_names: list[str]) -> None:
    """Raise a UsageError if an input or output has no range, so that it cannot be of the type `io`."""
    float_inputs = [name for name in input_names if not _input_is_quantized(model, name)]
    float_outputs = [name for name in output_names if not _output_is_quantized(model, name)]
    if float_inputs or float_outputs:
        role, name = ("input", float_inputs[0]) if float_inputs else ("output", float_outputs[0])
        raise UsageError(
            f"The {role} {name} cannot be {io}, because the plan has no range for it. Quantize it with a rule, or use"
            " --io float32."
        )


def _signature_keys(model: Model) -> list[str]:
    """Return the key of each input in the signature, or its name without one."""
    return [next((alias for alias in spec.aliases if ":" not in alias), spec.name) for spec in input_specs(model)]


def _with_signature(data: bytes, name: str, input_keys: list[str], output_keys: list[str]) -> bytes:
    """Return a TFLite file with the signature `name`, which gives the inputs and outputs of its main graph keys.

    The converter writes signatures only of SavedModels, which would have to be written for it.
    """
    from tensorflow.lite.python import schema_py_generated as schema
    from tensorflow.lite.tools import flatbuffer_utils

    file = flatbuffer_utils.convert_bytearray_to_object(bytearray(data))
    signature = schema.SignatureDefT()
    signature.signatureKey, signature.subgraphIndex = name, 0

    def entries(keys: list[str], tensors: Any) -> list[Any]:
        mapped = []
        for key, tensor in zip(keys, tensors, strict=True):
            entry = schema.TensorMapT()
            entry.name, entry.tensorIndex = key, int(tensor)
            mapped.append(entry)
        return mapped

    signature.inputs = entries(input_keys, file.subgraphs[0].inputs)
    signature.outputs = entries(output_keys, file.subgraphs[0].outputs)
    file.signatureDefs = [signature]
    return bytes(flatbuffer_utils.convert_object_to_bytearray(file))


_MISSING_OPS = re.compile(r"(?:TF Select|Custom|Flex) ops: ([\w, ]+)")
"""The converter's list of ops without a kernel of TFLite."""


def _conversion_advice(model: Model, message: str) -> str:
    """Return the advice for an error of the converter."""
    if "TensorList" in message or "TensorArray" in message:
        return (
            "TFLite has no lists of tensors whose elements have an unknown size. Build recurrent layers with"
            " unroll=True, or the model with a fixed batch size (batch_size=1), and export it again."
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
        details = interpreter.get_tensor_details()
    return tuple(
        RuntimeTensor(
            index=int(detail["index"]),
            name=detail["name"],
            dtype=np.dtype(detail["dtype"]).name,
            scales=detail["quantization_parameters"]["scales"],
            zero_points=detail["quantization_parameters"]["zero_points"],
            axis=int(detail["quantization_parameters"]["quantized_dimension"]),
        )
        for detail in details
    )


@contextlib.contextmanager
def _translate_runtime_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise ModelError(
            f"TFLite's runtime refuses the converted model: {first_error_line(str(error))}. Exclude that op with"
            " --exclude, or export the model without it."
        ) from error


def _input_is_quantized(model: Model, input_name: str) -> bool:
    """Return True if the input `input_name` is not float or has FakeQuants as its only readers."""
    readers = model.main.consumers(TensorRef("", input_name))
    return model.main.op(input_name).outputs[0].dtype not in FLOAT_TYPES or (
        bool(readers) and all(model.main.op(use.op).kind == "qdq" for use in readers)
    )


def _output_is_quantized(model: Model, name: str) -> bool:
    """Return True if the output is not float, or comes from a FakeQuant or from an op with a fixed output range."""
    op, _, port = name.partition(":")
    tensor: TensorRef | None = TensorRef("", op, int(port or 0))
    while tensor is not None and model.op(tensor).kind in {"identity", "reshape"}:
        tensor = model.main.source_of(Use("", tensor.op, 0))
    if tensor is None:
        return False
    dtype = model.output(tensor).dtype
    return dtype not in FLOAT_TYPES or model.op(tensor).kind in {"qdq", "softmax", "sigmoid", "tanh"}


_CALL_PREFIX: Final = re.compile(r"^(?:Func/)?(?:(?:Stateful)?PartitionedCall(?:_\d+)?/)+")
"""The prefix that inlining puts before the names of a function's ops."""

_INLINER_IDENTITY: Final = re.compile(r"^Func/.*/(?:input|output)/_\d+$")
"""The names that inlining gives to Identity ops for arguments and results."""


def freeze_graph(model: Model) -> Model:
    """Return `model` as a GraphDef with constants for variables, inlined functions, and inferred shapes.

    Inputs and outputs have the names of the signature; ops keep their names within the function.
    """
    source: TensorFlowSource = model.source
    tensorflow = import_tensorflow()
    with translate_tf_errors(tensorflow), silence_stderr():
        values = source.live_object.values if source.live_object else {}
        learned = any(op.kind == "variable" and LEARNED_ATTR in op.attrs for op in model.main.ops())
        if source.message_type == "GraphDef" and len(model.graphs) == 1 and not values and not learned:
            graph_def = emit(model)
        else:
            data, outputs = _freeze_with_tensorflow(tensorflow, model)
            graph_def = _restore_op_names(
                proto.parse_binary(data, proto.GraphDef(), source=str(source.file)), outputs, _signature_keys(model)
            )
        _write_inferred_shapes(tensorflow, graph_def)
    digest = hashlib.sha256(proto.to_binary(graph_def)).hexdigest()
    frozen = TensorFlowSource(
        message=graph_def, file=source.file, digest=digest, signature_name=served_signature_name(model)
    )
    frozen_model = build_model(frozen, model.path or source.file)
    frozen_model.path = model.path
    return frozen_model


def _write_inferred_shapes(tensorflow: Any, graph_def: Any) -> None:
    """Write the static shapes that TensorFlow infers into the nodes, from which the loader reads them."""
    v1 = tensorflow.compat.v1
    graph = tensorflow.Graph()
    with graph.as_default():
        tensorflow.import_graph_def(v1.GraphDef.FromString(proto.to_binary(graph_def)), name="")
    for node in graph_def.node:
        outputs = graph.get_operation_by_name(node.name).outputs
        node.attr.pop("_output_shapes", None)
        if outputs:
            shapes = (output.shape.as_proto().SerializeToString() for output in outputs)
            node.attr["_output_shapes"].list.shape.extend(map(proto.TensorShapeProto.FromString, shapes))


def _freeze_with_tensorflow(tensorflow: Any, model: Model) -> tuple[bytes, dict[str, tuple[str, int]]]:
    """Return the binary GraphDef between the signature's inputs and outputs, and the outputs by key."""
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    v1 = tensorflow.compat.v1
    session = TensorFlowSession(tensorflow, model)
    fetches, specs = output_fetches(model), input_specs(model)
    with session.tf_session:
        ops = [name.partition(":")[0] for name in fetches.values()]
        constant = v1.graph_util.convert_variables_to_constants(session.tf_session, session.graph.as_graph_def(), ops)
    constant = v1.GraphDef.FromString(_with_unique_function_names(constant.SerializeToString()))

    def rebuild() -> Any:
        placeholders = {}
        for spec in specs:
            key = next((alias for alias in spec.aliases if ":" not in alias), spec.name)
            placeholders[f"{spec.name}:0"] = v1.placeholder(spec.dtype, spec.shape, name=key)
        # The inliner only inlines a call whose results are fetched directly.
        results = v1.import_graph_def(constant, name="", input_map=placeholders, return_elements=list(fetches.values()))
        return list(placeholders.values()), results

    traced: list[Any] = []
    try:
        function = v1.wrap_function(lambda: traced.extend(rebuild()), [])
    except ValueError as error:
        if not (changed := find_state_variables(model)):
            raise
        raise ModelError(
            f"{model.path or 'The model'} cannot be frozen, because each run changes the variable {changed[0]}, and"
            " constants cannot change. Export it with its state as inputs and outputs, or without stateful=True."
        ) from error
    frozen_function = convert_variables_to_constants_v2(function.prune(*traced))
    pairs = zip(fetches, frozen_function.outputs, strict=True)
    outputs = {key: (output.name, output.dtype.as_datatype_enum) for key, output in pairs}
    return frozen_function.graph.as_graph_def().SerializeToString(), outputs


def _with_unique_function_names(data: bytes) -> bytes:
    """Return a binary GraphDef whose function names contain its digest.

    TensorFlow keeps all functions of a process by name, and those of two models may have the same names.
    """
    graph_def = proto.parse_binary(data, proto.GraphDef(), source="the frozen graph")
    digest = hashlib.sha256(data).hexdigest()[:12]
    names = {function.signature.name: f"{function.signature.name}_{digest}" for function in graph_def.library.function}
    rename_functions(proto.all_nodes(graph_def), names)
    for function in graph_def.library.function:
        function.signature.name = names[function.signature.name]
    del graph_def.library.gradient[:]  # a graph of constants is not trained
    return bytes(proto.to_binary(graph_def))


def _restore_op_names(graph_def: Any, outputs: Mapping[str, tuple[str, int]], input_names: list[str]) -> Any:
    """Return the graph with the names that ops had inside their functions, where they are free, and with `outputs`."""
    used_names = {node.name for node in graph_def.node}
    for key, (tensor, dtype) in outputs.items():
        name = unique_node_name(used_names, key)
        graph_def.node.add(name=name, op="Identity", input=[tensor]).attr["T"].type = dtype
    bypassed_inputs = {
        node.name: node.input[0]
        for node in graph_def.node
        if node.op == "Identity" and len(node.input) == 1 and _INLINER_IDENTITY.match(node.name)
    }
    remaining = [node for node in graph_def.node if node.name not in bypassed_inputs]
    inner_names = {node.name: _CALL_PREFIX.sub("", node.name) for node in remaining}
    counts = Counter(inner_names.values())
    new_names = {old: new if counts[new] == 1 else old for old, new in inner_names.items()}
    nodes = {node.name: node for node in remaining}

    def sources(name: str) -> list[str]:
        renamed_inputs = (_rename_input(text, bypassed_inputs, {}) for text in nodes[name].input)
        return [text.removeprefix("^").partition(":")[0] for text in renamed_inputs]

    # Lowering loops leaves placeholders without readers, which would be inputs of the frozen graph.
    used_nodes = set(reachable(outputs, sources)) | set(input_names)
    renamed = proto.GraphDef(versions=graph_def.versions, library=graph_def.library)
    for node in (node for node in remaining if node.name in used_nodes):
        new_node = renamed.node.add()
        new_node.CopyFrom(node)
        new_node.name = new_names[node.name]
        new_node.attr.pop("_class", None)
        new_node.input[:] = [_rename_input(tensor_name, bypassed_inputs, new_names) for tensor_name in node.input]
    return renamed


def _rename_input(tensor_name: str, bypassed: Mapping[str, str], new_names: Mapping[str, str]) -> str:
    """Return a node's input by its new name, past bypassed ops."""
    control, tensor_name = ("^", tensor_name[1:]) if tensor_name.startswith("^") else ("", tensor_name)
    while tensor_name.partition(":")[0] in bypassed:
        tensor_name = bypassed[tensor_name.partition(":")[0]]
    op, colon, port = tensor_name.partition(":")
    new_name = new_names.get(op, op)
    return f"{control}{new_name}" if control else f"{new_name}{colon}{port}"
