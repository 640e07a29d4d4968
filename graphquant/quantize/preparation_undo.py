"""What is needed to take a preparation back, as JSON data: what was removed, what was read before, what was added.

Values of weights are not copied into it. They are told by name and digest, and by how they follow from what took their
place: a quotient, and by how many float32 steps it is off, which is mostly 0. So the record of a model is small, and
gives each weight back to the bit.
"""

from __future__ import annotations

import base64
import hashlib
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import ConfigDict

from graphquant.errors import ModelError
from graphquant.ir import TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from graphquant.ir import Graph, Model, Op


Array = np.ndarray[Any, Any]

MAX_INLINE_ELEMENTS = 1 << 16
"""Most elements of a constant that is kept whole: biases and statistics are, weights are told by reference."""

_TENSOR_DATA_FIELDS = (
    *("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data"),
    *("tensor_content", "half_val", "float_val", "double_val", "int_val", "string_val", "int64_val", "bool_val"),
    *("uint32_val", "uint64_val", "scomplex_val", "dcomplex_val"),
)
"""The fields of ONNX's and TensorFlow's TensorProto that hold the elements."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledWeight:
    """A weight that was multiplied by a factor per output channel.

    Attributes:
        op: The constant that held the weight.
        weight: float32, the value before.
        product_name: The constant that holds the product.
        product: float32, of the same shape.
        factor: float64 (C,).
        product_shape: The shape in which the weight is multiplied: [2, 3, 4, 1, 1] for two groups of a transposed convolution.
        factor_shape: The shape that the factor has then.
    """

    op: TensorRef
    weight: Array
    product_name: str
    product: Array
    factor: Array
    product_shape: tuple[int, ...]
    factor_shape: tuple[int, ...]


class RecordedEdits:
    """Edits of a model, each noted so that it can be taken back."""

    def __init__(self, model: Model) -> None:
        """The model is changed by each edit."""
        self._model = model
        self._removed: list[dict[str, Any]] = []
        self._rewired: list[dict[str, Any]] = []
        self._added: list[dict[str, Any]] = []
        self._scaled_weights: dict[tuple[str, str], ScaledWeight] = {}

    def connect(self, use: Use, tensor: TensorRef | None) -> None:
        """Makes `use` read `tensor`, or nothing."""
        graph = self._model.graphs[use.graph]
        record = {**_op_record(use.graph, use.op), "slot": use.slot, "read": _tensor_record(graph.source_of(use))}
        graph.set_source(use, tensor)
        self._rewired.append(record)

    def add(self, graph: Graph, op: Op, inputs: list[TensorRef | None] | None = None) -> TensorRef:
        """Adds an op; returns its first output."""
        self._added.append(_op_record(graph.name, op.name))
        return graph.add_op(op, inputs or [])

    def replace(self, graph: Graph, op: Op) -> None:
        """Puts `op` in the place of the op of its name, which held the same value if it held one."""
        old = graph.op(op.name)
        reads = [_tensor_record(operand) for operand in graph.slots(op.name)]
        without_data = _is_large_constant(old)
        record = {
            **_op_record(graph.name, op.name),
            "type": old.type,
            "reads": reads,
            "node": encode_source_node(old, without_data=without_data),
        }
        if without_data and old.read_value is not None:
            value = old.read_value()
            record["value"] = {"shape": list(value.shape), "sha256": _array_digest(value), "now": op.name}
        graph.replace_op(op)
        self._removed.append(record)
        self._added.append(_op_record(graph.name, op.name))

    def remove(self, graph: Graph, name: str) -> None:
        """Takes out an op that nothing reads."""
        op = graph.op(name)
        record = {
            **_op_record(graph.name, name),
            "type": op.type,
            "reads": [_tensor_record(operand) for operand in graph.slots(name)],
        }
        scaled_weight = self._scaled_weights.get((graph.name, name))
        if scaled_weight is not None:
            record["value"] = _weight_reference(scaled_weight)
        elif op.kind == "constant" and op.read_value is not None and not _tensor_protos(op.source):
            record["value"] = encode_array(op.read_value())
        graph.remove_op(name)
        self._removed.append(
            {**record, "node": encode_source_node(op, without_data=scaled_weight is not None or _is_large_constant(op))}
        )

    def note_scaled_weight(self, scaled_weight: ScaledWeight) -> None:
        """Tells what the value of a constant follows from, should it be removed."""
        self._scaled_weights[scaled_weight.op.graph, scaled_weight.op.op] = scaled_weight

    def to_record(self) -> dict[str, Any]:
        """The record of all edits so far."""
        return {"removed": self._removed, "rewired": self._rewired, "added": self._added}


def original_weights(
    step: Step, read_constant: Callable[[str], Array | None]
) -> dict[tuple[str, str], tuple[Array, bool]]:
    """The values of the weights that a step replaced, by graph and op, and whether they are exact.

    Args:
        step: A step of a plan.
        read_constant: The value of a constant in the graph, after the step, given its name; None if there is no such value.

    Raises:
        ModelError: The record is damaged.
    """
    weights = {}
    for record in step.undo.get("removed", ()):
        try:
            value = record.get("value")
            op_key = str(record.get("graph", "")), str(record["op"])
            if value is None:
                continue
            if "data" in value:
                weights[op_key] = decode_array(value), True
                continue
            current = read_constant(str(value["now"]))
            if current is not None:
                weights[op_key] = _restore_weight(value, current)
        except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
            raise ModelError(
                f"The record of the step {step.step} on {step.target} is damaged. Make the plan anew."
            ) from error
    return weights


def encode_source_node(op: Op, *, without_data: bool = False) -> str | None:
    """The source node of `op`, serialized, in base64; without the elements of its tensors if it is to be `without_data`."""
    if op.source is None or isinstance(op.source, str):
        return None
    message = op.source
    if without_data:
        message = type(op.source)()
        message.CopyFrom(op.source)
        for tensor in _tensor_protos(message):
            for field in tensor.DESCRIPTOR.fields_by_name:
                if field in _TENSOR_DATA_FIELDS:
                    tensor.ClearField(field)
    return base64.b64encode(message.SerializeToString(deterministic=True)).decode()


def encode_array(value: Array) -> dict[str, Any]:
    """An array as JSON data."""
    return {
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "data": base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(),
    }


def decode_array(record: dict[str, Any]) -> Array:
    """The array that `encode_array` made data of."""
    return np.frombuffer(base64.b64decode(record["data"]), record["dtype"]).reshape(record["shape"])


def _restore_weight(record: dict[str, Any], current: Array) -> tuple[Array, bool]:
    """The weight before it was scaled to `current`; only nearly, if that is not the product as it was made."""
    if current.size != math.prod(record["shape"]):
        raise ValueError("the sizes differ")
    if "factor" not in record:
        return current, _array_digest(current) == record["sha256"]
    factor = decode_array(record["factor"])
    quotient = _divide_by_factor(current, factor, record["split"], record["along"])
    steps = _unpack_steps(record["steps"], current.size)
    exact = (_float_bits(quotient) + steps.reshape(quotient.shape)).view(np.float32)
    if _array_digest(exact) == record["sha256"]:
        return exact, True
    return quotient, False


def _weight_reference(scaled_weight: ScaledWeight) -> dict[str, Any]:
    """Name and digest of a weight, and what makes it of the product."""
    quotient = _divide_by_factor(
        scaled_weight.product, scaled_weight.factor, scaled_weight.product_shape, scaled_weight.factor_shape
    )
    return {
        "dtype": "float32",
        "shape": list(scaled_weight.weight.shape),
        "sha256": _array_digest(scaled_weight.weight),
        "now": scaled_weight.product_name,
        "factor": encode_array(scaled_weight.factor),
        "split": list(scaled_weight.product_shape),
        "along": list(scaled_weight.factor_shape),
        "steps": _pack_steps(_float_bits(scaled_weight.weight) - _float_bits(quotient)),
    }


def _divide_by_factor(product: Array, factor: Array, product_shape: Any, factor_shape: Any) -> Array:
    """float32: the product over the factor, 0 where that is 0."""
    divisor = np.where(factor == 0, np.inf, factor).reshape(factor_shape)
    with np.errstate(all="ignore"):
        quotient = (product.reshape(product_shape) / divisor).astype(np.float32)
    return quotient.reshape(product.shape)


def _float_bits(value: Array) -> Array:
    """int32: float32 numbers of one sign that are neighbours differ by 1."""
    return np.ascontiguousarray(value, np.float32).view(np.int32)


def _pack_steps(steps: Array) -> dict[str, Any]:
    """int32, mostly 0, in as few bytes as they need; sums and differences that leave the type come round again."""
    low, high = (int(steps.min()), int(steps.max())) if steps.size else (0, 0)
    dtype = next(
        candidate
        for candidate in ("<i1", "<i2", "<i4")
        if np.iinfo(candidate).min <= low and high <= np.iinfo(candidate).max
    )
    compressor = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
    packed = compressor.compress(steps.astype(dtype).tobytes()) + compressor.flush()
    return {"dtype": dtype, "data": base64.b64encode(packed).decode()}


def _unpack_steps(record: dict[str, Any], size: int) -> Array:
    dtype = np.dtype(record["dtype"])
    data = zlib.decompressobj().decompress(base64.b64decode(record["data"]), size * dtype.itemsize + 1)
    return np.frombuffer(data, dtype).astype(np.int32)


def _array_digest(value: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


def _is_large_constant(op: Op) -> bool:
    """Whether the op holds a constant that is told by reference."""
    shape = op.outputs[0].shape if op.kind == "constant" and op.outputs else None
    return shape is not None and math.prod(size or 0 for size in shape) > MAX_INLINE_ELEMENTS


def _tensor_protos(message: Any) -> list[Any]:
    """The TensorProtos that a source node holds, or is."""
    if hasattr(message, "data_type"):
        return [message]  # of ONNX
    if hasattr(message, "attribute"):
        return [attr.t for attr in message.attribute if attr.HasField("t")]
    attributes = getattr(message, "attr", {})
    return [attributes["value"].tensor] if "value" in attributes else []


def _op_record(graph: str, op: str) -> dict[str, Any]:
    return {"graph": graph, "op": op} if graph else {"op": op}


def _tensor_record(tensor: TensorRef | None) -> dict[str, Any] | None:
    return None if tensor is None else {**_op_record(tensor.graph, tensor.op), "port": tensor.port}


# What a preparation is made of: what it did, what it left, and the edits that several of them make.


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One preparation that was done before matching.

    Attributes:
        step: Its name, "fold-batchnorm".
        target: The op, input or model it changed.
        detail: What was done, for people.
        why: What it is good for.
        undo: What is needed to take it back, as JSON data; see `graphquant.prepare.undo`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    step: str
    target: str
    detail: str
    why: str = ""
    undo: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedStep:
    """An op that a preparation is for and that was left as it was.

    Attributes:
        step: The preparation's name.
        tensor: What the op makes.
        reason: Why it was left, and what else can be done.
    """

    step: str
    tensor: TensorRef
    reason: str


def remove_unread_ops(
    model: Model,
    tensors: Iterable[TensorRef],
    kinds: frozenset[str] | None = None,
    edits: RecordedEdits | None = None,
) -> None:
    """Takes out constants, and what was computed from them alone, that nothing reads or waits for any more.

    An argument that an ONNX function reads no more is left out of its calls.

    Args:
        model: The model, which is changed.
        tensors: Parameters that may have lost their last reader.
        kinds: If given, only ops of these kinds are taken out.
        edits: Keeps the record of what is done.
    """
    pending = list(dict.fromkeys(tensors))
    callers = model.callers() if any(tensor.graph for tensor in pending) and model.format == "onnx" else {}
    while pending:
        tensor = pending.pop()
        graph = model.graphs[tensor.graph]
        if tensor.op not in graph or graph.nx.adj[tensor.op]:
            continue
        op = graph.op(tensor.op)
        if op.kind == "input" and (kinds is None or op.kind in kinds) and graph.name and graph.parent is None:
            calls = [use for use, _ in callers.get(graph.name, ())]
            pending.extend(_disconnect_argument(model, calls, graph.inputs.index(op.name), edits))
        if op.kind in {"input", "output"} or op.calls or (kinds is not None and op.kind not in kinds):
            continue
        pending.extend(operand for operand in graph.slots(tensor.op) if operand is not None)
        if edits is None:
            graph.remove_op(tensor.op)
        else:
            edits.remove(graph, tensor.op)


def _disconnect_argument(
    model: Model, calls: Iterable[Use], slot: int, edits: RecordedEdits | None
) -> Iterator[TensorRef]:
    """Empties a slot of the ops that call a function; gives what they read there."""
    for graph_name, op_name, _ in calls:
        use = Use(graph_name, op_name, slot)
        tensor = model.graphs[graph_name].source_of(use)
        if tensor is not None:
            if edits is None:
                model.graphs[graph_name].set_source(use, None)
            else:
                edits.connect(use, None)
            yield tensor


def feeds_graph_output(graph: Graph, name: str) -> bool:
    """Whether an output of a graph reads the op's first output."""
    uses = graph.consumers_by_port(name).get(0, [])
    return any(graph.graphs[use.graph].op(use.op).kind == "output" for use in uses)
