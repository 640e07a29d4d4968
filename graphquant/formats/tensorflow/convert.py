"""A quantized GraphDef to TFLite, by TensorFlow's converter, and what its interpreter then says of each tensor.

The FakeQuants carry every range, so that no representative dataset is needed.
https://www.tensorflow.org/api_docs/python/tf/lite/TFLiteConverter
"""

from __future__ import annotations

import contextlib
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import ModelError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.run import _fetches, inputs
from graphquant.formats.tensorflow.session import _first_line, _refusals, _silence
from graphquant.formats.tensorflow.session import tensorflow as installed
from graphquant.ir import FLOAT_TYPES, TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphquant.ir import Model
    from graphquant.numerics import Array

__all__ = ["Detail", "convert", "details", "interpreter"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Detail:
    """What the interpreter tells of a tensor of the main graph.

    Attributes:
        index: Its position.
        name: Its name.
        dtype: numpy-like dtype name.
        scales: float32 (C,), real units per step.
        zero_points: int32 (C,), steps.
        axis: The quantized dimension.
    """

    index: int
    name: str
    dtype: str
    scales: Array
    zero_points: Array
    axis: int


_WHERE = re.compile(r"^\S+:\d+:\d+: error: ")
"""A line of the program that called the converter, which is no line of the model."""

_LEAVE = " Leave that op float with --exclude, or export the model without it."


def convert(model: Model) -> bytes:
    """The TFLite file of a frozen model with FakeQuants; its float inputs and outputs that have a range are int8.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: The converter refuses the model.
    """
    tensorflow = installed()
    v1 = tensorflow.compat.v1
    graph_def = v1.GraphDef.FromString(proto.to_binary(model.source.graph_def(emit(model))))
    with _quiet(), _refusals(tensorflow):
        function = v1.wrap_function(lambda: v1.import_graph_def(graph_def, name=""), [])
        feeds = [function.graph.as_graph_element(f"{spec.name}:0") for spec in inputs(model)]
        fetches = [function.graph.as_graph_element(name) for name in _fetches(model).values()]
        converter = tensorflow.lite.TFLiteConverter.from_concrete_functions([function.prune(feeds, fetches)])
        some = any(op.kind == "qdq" for op in model.main.ops())  # else the converter would take weights alone
        if some:
            converter.optimizations = [tensorflow.lite.Optimize.DEFAULT]
        if some and all(_quantized(model, spec.name) for spec in inputs(model)):
            converter.inference_input_type = tensorflow.int8
        if some and all(_integer(model, name) for name in _fetches(model).values()):
            converter.inference_output_type = tensorflow.int8
    from tensorflow.lite.python.convert_phase import ConverterError

    try:
        with _quiet():
            data: bytes = converter.convert()
    except (ConverterError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"TensorFlow's converter refuses the model: {_WHERE.sub('', _first_line(str(error)))}. Leave what it names"
            " float with --exclude."
        ) from error
    return data


def interpreter(data: bytes) -> Callable[[], object]:
    """What runs a file once with TFLite's defaults on one thread, on zeros.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: The runtime refuses the file.
    """
    tensorflow = installed()
    try:
        with _quiet():
            made = tensorflow.lite.Interpreter(model_content=data, num_threads=1)
            made.allocate_tensors()
            for one in made.get_input_details():
                made.set_tensor(one["index"], np.zeros(one["shape"], one["dtype"]))
            made.invoke()
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"TFLite's runtime refuses the converted model: {_first_line(str(error))}.{_LEAVE}") from error
    run: Callable[[], object] = made.invoke
    return run


def details(data: bytes) -> tuple[Detail, ...]:
    """What the interpreter tells of each tensor, after it has made room for all of them.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: The runtime refuses the file.
    """
    tensorflow = installed()
    plain = tensorflow.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    try:
        with _quiet():
            interpreter = tensorflow.lite.Interpreter(model_content=data, experimental_op_resolver_type=plain)
            interpreter.allocate_tensors()
            found = interpreter.get_tensor_details()
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"TFLite's runtime refuses the converted model: {_first_line(str(error))}.{_LEAVE}") from error
    return tuple(
        Detail(
            index=int(one["index"]),
            name=one["name"],
            dtype=np.dtype(one["dtype"]).name,
            scales=one["quantization_parameters"]["scales"],
            zero_points=one["quantization_parameters"]["zero_points"],
            axis=int(one["quantization_parameters"]["quantized_dimension"]),
        )
        for one in found
    )


def _quantized(model: Model, name: str) -> bool:
    """Whether the input `name` is no float, or all that reads it is a range."""
    readers = model.main.consumers(TensorRef("", name))
    return model.main.op(name).outputs[0].dtype not in FLOAT_TYPES or (
        bool(readers) and all(model.main.op(use.op).kind == "qdq" for use in readers)
    )


def _integer(model: Model, name: str) -> bool:
    """Whether the output is no float, or comes from a range or from an op whose output range is fixed."""
    op, _, port = name.partition(":")
    tensor: TensorRef | None = TensorRef("", op, int(port or 0))
    while tensor is not None and model.op(tensor).kind in {"identity", "reshape"}:
        tensor = model.main.producer(Use("", tensor.op, 0))
    if tensor is None:
        return False
    known = model.output(tensor).dtype
    return known not in FLOAT_TYPES or model.op(tensor).kind in {"qdq", "softmax", "sigmoid", "tanh"}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the converter's and the interpreter's notes to themselves; errors are told."""
    with _silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
