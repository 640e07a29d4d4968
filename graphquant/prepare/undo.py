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
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.ir import Graph, Model, Op, TensorRef, Use
    from graphquant.prepare.steps import Step

Array = np.ndarray[Any, Any]

INLINE = 1 << 16
"""Most elements of a constant that is kept whole: biases and statistics are, weights are told by reference."""

_DATA = (
    *("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data"),
    *("tensor_content", "half_val", "float_val", "double_val", "int_val", "string_val", "int64_val", "bool_val"),
    *("uint32_val", "uint64_val", "scomplex_val", "dcomplex_val"),
)
"""The fields of ONNX's and TensorFlow's TensorProto that hold the elements."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scaled:
    """A weight that was multiplied by a factor per output channel.

    Attributes:
        op: The constant that held the weight.
        weight: float32, the value before.
        now: The constant that holds the product.
        product: float32, of the same shape.
        factor: float64 (C,).
        split: The shape in which the weight is multiplied: [2, 3, 4, 1, 1] for two groups of a transposed convolution.
        along: The shape that the factor has then.
    """

    op: TensorRef
    weight: Array
    now: str
    product: Array
    factor: Array
    split: tuple[int, ...]
    along: tuple[int, ...]


class Edits:
    """Edits of a model, each noted so that it can be taken back."""

    def __init__(self, model: Model) -> None:
        """The model is changed by each edit."""
        self._model = model
        self._removed: list[dict[str, Any]] = []
        self._rewired: list[dict[str, Any]] = []
        self._added: list[dict[str, Any]] = []
        self._scaled: dict[tuple[str, str], Scaled] = {}

    def connect(self, use: Use, tensor: TensorRef | None) -> None:
        """Makes `use` read `tensor`, or nothing."""
        graph = self._model.graphs[use.graph]
        told = {**_place(use.graph, use.op), "slot": use.slot, "read": _told(graph.producer(use))}
        graph.connect(use, tensor)
        self._rewired.append(told)

    def add(self, graph: Graph, op: Op, inputs: list[TensorRef | None] | None = None) -> TensorRef:
        """Adds an op; returns its first output."""
        self._added.append(_place(graph.name, op.name))
        return graph.add(op, inputs or [])

    def replace(self, graph: Graph, op: Op) -> None:
        """Puts `op` in the place of the op of its name, which held the same value if it held one."""
        old = graph.op(op.name)
        reads = [_told(read) for read in graph.slots(op.name)]
        bare = _is_large(old)
        told = {**_place(graph.name, op.name), "type": old.type, "reads": reads, "node": encoded(old, bare=bare)}
        if bare and old.value is not None:
            value = old.value()
            told["value"] = {"shape": list(value.shape), "sha256": _digest(value), "now": op.name}
        graph.replace(op)
        self._removed.append(told)
        self._added.append(_place(graph.name, op.name))

    def remove(self, graph: Graph, name: str) -> None:
        """Takes out an op that nothing reads."""
        op = graph.op(name)
        told = {**_place(graph.name, name), "type": op.type, "reads": [_told(read) for read in graph.slots(name)]}
        scaled = self._scaled.get((graph.name, name))
        if scaled is not None:
            told["value"] = _reference(scaled)
        elif op.kind == "constant" and op.value is not None and not _tensors(op.source):
            told["value"] = array(op.value())
        graph.remove(name)
        self._removed.append({**told, "node": encoded(op, bare=scaled is not None or _is_large(op))})

    def scaled(self, scaled: Scaled) -> None:
        """Tells what the value of a constant follows from, should it be removed."""
        self._scaled[scaled.op.graph, scaled.op.op] = scaled

    def undo(self) -> dict[str, Any]:
        """The record of all edits so far."""
        return {"removed": self._removed, "rewired": self._rewired, "added": self._added}


def originals(step: Step, read: Callable[[str], Array | None]) -> dict[tuple[str, str], tuple[Array, bool]]:
    """The values of the weights that a step replaced, by graph and op, and whether they are exact.

    Args:
        step: A step of a plan.
        read: The value of a constant in the graph, after the step, given its name; None if there is no such value.

    Raises:
        ModelError: The record is damaged.
    """
    found = {}
    for item in step.undo.get("removed", ()):
        try:
            value = item.get("value")
            place = str(item.get("graph", "")), str(item["op"])
            if value is None:
                continue
            if "data" in value:
                found[place] = plain(value), True
                continue
            now = read(str(value["now"]))
            if now is not None:
                found[place] = _original(value, now)
        except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
            raise ModelError(
                f"The record of the step {step.step} on {step.target} is damaged. Make the plan anew."
            ) from error
    return found


def encoded(op: Op, *, bare: bool = False) -> str | None:
    """The source node of `op`, serialized, in base64; without the elements of its tensors if it is to be `bare`."""
    if op.source is None or isinstance(op.source, str):
        return None
    message = op.source
    if bare:
        message = type(op.source)()
        message.CopyFrom(op.source)
        for tensor in _tensors(message):
            for field in tensor.DESCRIPTOR.fields_by_name:
                if field in _DATA:
                    tensor.ClearField(field)
    return base64.b64encode(message.SerializeToString(deterministic=True)).decode()


def array(value: Array) -> dict[str, Any]:
    """An array as JSON data."""
    return {
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "data": base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(),
    }


def plain(told: dict[str, Any]) -> Array:
    """The array that `array` made data of."""
    return np.frombuffer(base64.b64decode(told["data"]), told["dtype"]).reshape(told["shape"])


def _original(told: dict[str, Any], now: Array) -> tuple[Array, bool]:
    """The weight before it was scaled to `now`; only nearly, if that is not the product as it was made."""
    if now.size != math.prod(told["shape"]):
        raise ValueError("the sizes differ")
    if "factor" not in told:
        return now, _digest(now) == told["sha256"]
    factor = plain(told["factor"])
    guess = _quotient(now, factor, told["split"], told["along"])
    steps = _unpacked(told["steps"], now.size)
    exact = (_bits(guess) + steps.reshape(guess.shape)).view(np.float32)
    if _digest(exact) == told["sha256"]:
        return exact, True
    return guess, False


def _reference(scaled: Scaled) -> dict[str, Any]:
    """Name and digest of a weight, and what makes it of the product."""
    guess = _quotient(scaled.product, scaled.factor, scaled.split, scaled.along)
    return {
        "dtype": "float32",
        "shape": list(scaled.weight.shape),
        "sha256": _digest(scaled.weight),
        "now": scaled.now,
        "factor": array(scaled.factor),
        "split": list(scaled.split),
        "along": list(scaled.along),
        "steps": _packed(_bits(scaled.weight) - _bits(guess)),
    }


def _quotient(product: Array, factor: Array, split: Any, along: Any) -> Array:
    """float32: the product over the factor, 0 where that is 0."""
    by = np.where(factor == 0, np.inf, factor).reshape(along)
    with np.errstate(all="ignore"):
        made = (product.reshape(split) / by).astype(np.float32)
    return made.reshape(product.shape)


def _bits(value: Array) -> Array:
    """int32: float32 numbers of one sign that are neighbours differ by 1."""
    return np.ascontiguousarray(value, np.float32).view(np.int32)


def _packed(steps: Array) -> dict[str, Any]:
    """int32, mostly 0, in as few bytes as they need; sums and differences that leave the type come round again."""
    low, high = (int(steps.min()), int(steps.max())) if steps.size else (0, 0)
    dtype = next(t for t in ("<i1", "<i2", "<i4") if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
    pack = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
    packed = pack.compress(steps.astype(dtype).tobytes()) + pack.flush()
    return {"dtype": dtype, "data": base64.b64encode(packed).decode()}


def _unpacked(told: dict[str, Any], size: int) -> Array:
    dtype = np.dtype(told["dtype"])
    found = zlib.decompressobj().decompress(base64.b64decode(told["data"]), size * dtype.itemsize + 1)
    return np.frombuffer(found, dtype).astype(np.int32)


def _digest(value: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


def _is_large(op: Op) -> bool:
    """Whether the op holds a constant that is told by reference."""
    shape = op.outputs[0].shape if op.kind == "constant" and op.outputs else None
    return shape is not None and math.prod(size or 0 for size in shape) > INLINE


def _tensors(message: Any) -> list[Any]:
    """The TensorProtos that a source node holds, or is."""
    if hasattr(message, "data_type"):
        return [message]  # of ONNX
    if hasattr(message, "attribute"):
        return [attr.t for attr in message.attribute if attr.HasField("t")]
    held = getattr(message, "attr", {})
    return [held["value"].tensor] if "value" in held else []


def _place(graph: str, op: str) -> dict[str, Any]:
    return {"graph": graph, "op": op} if graph else {"op": op}


def _told(tensor: TensorRef | None) -> dict[str, Any] | None:
    return None if tensor is None else {**_place(tensor.graph, tensor.op), "port": tensor.port}
