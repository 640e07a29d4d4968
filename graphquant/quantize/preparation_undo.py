"""Records of preparation steps, and the JSON data that undoes them.

The data lists removed ops, their former inputs, and added ops. Weights are not copied into it. A weight is identified
by name and digest, and by its relation to the constant that replaced it: a quotient, plus the number of float32 steps
(ULPs) by which it is off, mostly 0. So the record of a model is small and still restores each weight to the bit.
"""

from __future__ import annotations

import base64
import hashlib
import math
import zlib
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import ConfigDict

from graphquant.ir import Graph, Model, Op, TensorRef, Use, qualified_op_name
from graphquant.qdq.family import new_constant, new_op
from graphquant.quantize.source_record import node_notes

if TYPE_CHECKING:
    from graphquant.numerics import Array

MAX_INLINE_ELEMENTS = 1 << 16
"""Largest number of elements of a constant that is stored whole. Larger ones are stored by reference."""

_TENSOR_DATA_FIELDS = (
    *("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data"),
    *("tensor_content", "half_val", "float_val", "double_val", "int_val", "string_val", "int64_val", "bool_val"),
    *("uint32_val", "uint64_val", "scomplex_val", "dcomplex_val"),
)
"""Fields of ONNX's and TensorFlow's TensorProto that hold the elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One preparation that was applied before matching."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    step: str  # its name, "fold-batchnorm"
    target: str  # the op, input or model that was changed
    detail: str  # the change, for people
    why: str = ""  # the purpose of the step
    undo: dict[str, Any]  # JSON data that undoes the change


class SkippedStep(NamedTuple):
    """An op that a preparation step applies to and that was left unchanged, with the reason and perhaps a remedy."""

    step: str
    tensor: TensorRef
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledWeight:
    """A weight that was multiplied by a factor per output channel."""

    weight: Array  # float32, the value before
    product: Array  # float32, of the same shape
    factor: Array  # float64 (C,)
    # The shape in which the weight is multiplied: [2, 3, 4, 1, 1] for two groups of a transposed convolution.
    product_shape: tuple[int, ...]
    factor_shape: tuple[int, ...]  # the shape of the factor in that product


Candidate = tuple[Graph, Op, str | None]
"""An op that a step applies to, with its graph and the obstacle that keeps it unchanged, if there is one."""


class RecordedEdits:
    """Edits a model and records each edit so that it can be undone."""

    def __init__(self, model: Model) -> None:
        """Edit `model` in place."""
        self._model = model
        self._removed: list[dict[str, Any]] = []
        self._rewired: list[dict[str, Any]] = []
        self._added: list[dict[str, Any]] = []
        # How the values of constants, by graph and op, can be restored: from a constant of this name.
        self.scaled_weights: dict[tuple[str, str], tuple[str, ScaledWeight]] = {}

    def connect(self, use: Use, tensor: TensorRef | None) -> None:
        """Make `use` read `tensor`, or nothing."""
        graph = self._model.graphs[use.graph]
        record = {**_op_record(use.graph, use.op), "slot": use.slot, "read": _tensor_record(graph.source_of(use))}
        graph.set_source(use, tensor)
        self._rewired.append(record)

    def add(self, graph: Graph, op: Op, inputs: list[TensorRef | None] | None = None) -> TensorRef:
        """Add an op; return its first output."""
        self._added.append(_op_record(graph.name, op.name))
        return graph.add_op(op, inputs or [])

    def replace(self, graph: Graph, op: Op) -> None:
        """Replace the op of the same name by `op`. If they are constants, both must have the same value."""
        old = graph.op(op.name)
        record = _removed_op_record(graph, old, without_data=_is_large_constant(old))
        if _is_large_constant(old) and old.read_value is not None:
            value = old.read_value()
            record["value"] = {"shape": list(value.shape), "sha256": _array_digest(value), "now": op.name}
        graph.replace_op(op)
        self._removed.append(record)
        self._added.append(_op_record(graph.name, op.name))

    def remove(self, graph: Graph, name: str) -> None:
        """Remove an op that nothing reads."""
        op, scaled_weight = graph.op(name), self.scaled_weights.get((graph.name, name))
        without_data = scaled_weight is not None or _is_large_constant(op)
        record = _removed_op_record(graph, op, without_data=without_data)
        if scaled_weight is not None:
            record["value"] = _weight_reference(*scaled_weight)
        elif op.kind == "constant" and op.read_value is not None and not _tensor_protos(op.source):
            record["value"] = encode_array(op.read_value())
        record["node"] = record.pop("node")  # the order of keys in plans
        graph.remove_op(name)
        self._removed.append(record)

    def to_step(self, step: str, graph: Graph, op: Op, detail: str, **undo: Any) -> Step:
        """Return the step that changed `op`, with the record of all edits so far."""
        undo |= {"removed": self._removed, "rewired": self._rewired, "added": self._added}
        return Step(step=step, target=qualified_op_name(graph.name, op.name), detail=detail, undo=undo)


class OpEdits(RecordedEdits):
    """Edits of one op and of those that a preparation step inserts around it."""

    def __init__(self, step: str, model: Model, graph: Graph, op: Op) -> None:
        """Edit `model` in place."""
        super().__init__(model)
        self.step, self.graph, self.op = step, graph, op
        self.types: list[str] = []  # those of the inserted ops

    def insert(self, name: str, kind: str, op_type: str, terms: Sequence[TensorRef | None], **fields: Any) -> TensorRef:
        """Insert an op whose output has the type of that of the edited op; all its inputs have the role "input"."""
        (output, *_), roles = self.op.outputs, ("input",) * len(terms)
        self.types.append(op_type)
        fields = {"kind": kind, "type": op_type, "roles": roles, "rule": self.step, "shape": output.shape, **fields}
        return self.add(self.graph, new_op(self.graph, f"{self.op.name}/{name}", output.dtype, **fields), [*terms])

    def insert_constant(self, name: str, value: float) -> TensorRef:
        """Insert a scalar of the same type."""
        array = np.array(value, self.op.outputs[0].dtype or "float32")
        op = new_constant(self.graph, f"{self.op.name}/{name}", array, op_type="Const", rule=self.step)
        return self.add(self.graph, op)

    def turn(
        self, kind: str, op_type: str, inputs: Sequence[TensorRef | None], detail: str = "", **fields: Any
    ) -> Step:
        """Give the op this kind, type, inputs and fields, and remove what nothing reads any more."""
        graph, op, old = self.graph, self.op, [*self.graph.slots(self.op.name)]
        self.replace(graph, replace(op, kind=kind, type=op_type, source=None, notes=node_notes(op), **fields))
        for slot, (before, tensor) in enumerate(zip_longest(old, inputs)):
            if before != tensor:
                self.connect(Use(graph.name, op.name, slot), tensor)
        remove_unread_ops(self._model, [tensor for tensor in old if tensor is not None], edits=self)
        return self.to_step(self.step, graph, op, detail or f"is a {op_type}")


def encode_source_node(op: Op, *, without_data: bool = False) -> str | None:
    """Return the source node of `op`, serialized in base64, with its tensors' elements omitted if `without_data`."""
    if op.source is None or isinstance(op.source, str):
        return None
    message = op.source
    if without_data:
        message = deepcopy(op.source)
        for tensor in _tensor_protos(message):
            for field in tensor.DESCRIPTOR.fields_by_name:
                if field in _TENSOR_DATA_FIELDS:
                    tensor.ClearField(field)
    return base64.b64encode(message.SerializeToString(deterministic=True)).decode()


def encode_array(value: Array) -> dict[str, Any]:
    """Return an array as JSON data."""
    return {
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "data": base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(),
    }


def _weight_reference(product_name: str, scaled_weight: ScaledWeight) -> dict[str, Any]:
    """Return name and digest of a weight, and its relation to the product."""
    quotient = _divide_by_factor(
        scaled_weight.product, scaled_weight.factor, scaled_weight.product_shape, scaled_weight.factor_shape
    )
    return {
        "dtype": "float32",
        "shape": list(scaled_weight.weight.shape),
        "sha256": _array_digest(scaled_weight.weight),
        "now": product_name,
        "factor": encode_array(scaled_weight.factor),
        "split": list(scaled_weight.product_shape),
        "along": list(scaled_weight.factor_shape),
        "steps": _pack_steps(_float_bits(scaled_weight.weight) - _float_bits(quotient)),
    }


def _divide_by_factor(product: Array, factor: Array, product_shape: Any, factor_shape: Any) -> Array:
    """Return product / factor as float32, 0 for a zero factor."""
    divisor = np.where(factor == 0, np.inf, factor).reshape(factor_shape)
    with np.errstate(all="ignore"):
        quotient = (product.reshape(product_shape) / divisor).astype(np.float32)
    return quotient.reshape(product.shape)


def _float_bits(value: Array) -> Array:
    """Return float32 values as int32: neighboring floats of one sign differ by 1."""
    return np.ascontiguousarray(value, np.float32).view(np.int32)


def _pack_steps(steps: Array) -> dict[str, Any]:
    """Pack int32 values, mostly 0, into few bytes. Overflow wraps around and cancels out."""
    low, high = (int(steps.min()), int(steps.max())) if steps.size else (0, 0)
    limits = {candidate: np.iinfo(candidate) for candidate in ("<i1", "<i2", "<i4")}
    dtype = next(candidate for candidate, info in limits.items() if info.min <= low and high <= info.max)
    compressor = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
    packed = compressor.compress(steps.astype(dtype).tobytes()) + compressor.flush()
    return {"dtype": dtype, "data": base64.b64encode(packed).decode()}


def _array_digest(value: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


def _is_large_constant(op: Op) -> bool:
    """Return True if the op holds a constant that is stored by reference."""
    shape = op.outputs[0].shape if op.kind == "constant" and op.outputs else None
    return shape is not None and math.prod(size or 0 for size in shape) > MAX_INLINE_ELEMENTS


def _tensor_protos(message: Any) -> list[Any]:
    """Return the TensorProtos of a source node."""
    if hasattr(message, "data_type"):
        return [message]  # of ONNX
    if hasattr(message, "attribute"):
        return [attr.t for attr in message.attribute if attr.HasField("t")]
    attributes = getattr(message, "attr", {})
    return [attributes["value"].tensor] if "value" in attributes else []


def _removed_op_record(graph: Graph, op: Op, *, without_data: bool) -> dict[str, Any]:
    return {
        **_op_record(graph.name, op.name),
        "type": op.type,
        "reads": [_tensor_record(operand) for operand in graph.slots(op.name)],
        "node": encode_source_node(op, without_data=without_data),
    }


def _op_record(graph: str, op: str) -> dict[str, Any]:
    return {"graph": graph, "op": op} if graph else {"op": op}


def _tensor_record(tensor: TensorRef | None) -> dict[str, Any] | None:
    return None if tensor is None else {**_op_record(tensor.graph, tensor.op), "port": tensor.port}


def remove_unread_ops(
    model: Model, tensors: Iterable[TensorRef], kinds: frozenset[str] | None = None, edits: RecordedEdits | None = None
) -> None:
    """Remove constants, and ops computed from constants only, that nothing reads or waits for any more.

    An argument that an ONNX function no longer reads is removed from its calls. `tensors` may have lost their last
    reader; with `kinds`, only ops of these kinds are removed.
    """
    pending = list(dict.fromkeys(tensors))
    callers = model.callers() if any(tensor.graph for tensor in pending) and model.traits.removable_arguments else {}
    while pending:
        tensor = pending.pop()
        graph = model.graphs[tensor.graph]
        if tensor.op not in graph or graph.successors(tensor.op):
            continue
        op = graph.op(tensor.op)
        if op.kind == "input" and (kinds is None or op.kind in kinds) and graph.name and graph.parent is None:
            for call, _ in callers.get(graph.name, ()):
                use = Use(call.graph, call.op, graph.inputs.index(op.name))
                operand = model.graphs[call.graph].source_of(use)
                if operand is not None:
                    pending.append(operand)
                    (edits.connect if edits is not None else model.graphs[call.graph].set_source)(use, None)
        if op.kind in {"input", "output"} or op.calls or (kinds is not None and op.kind not in kinds):
            continue
        pending.extend(operand for operand in graph.slots(tensor.op) if operand is not None)
        if edits is not None:
            edits.remove(graph, tensor.op)
        else:
            graph.remove_op(tensor.op)


def feeds_graph_output(graph: Graph, name: str) -> bool:
    """Return True if a graph output reads the op's first output."""
    uses = graph.consumers_by_port(name).get(0, [])
    return any(graph.graphs[use.graph].op(use.op).kind == "output" for use in uses)
