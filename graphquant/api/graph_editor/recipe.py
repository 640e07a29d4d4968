"""The fixed-point recipe: quantize a tensor for the consumers selected by a layer's name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from graphquant import formats
from graphquant.api.graph_editor.verbs import find_tensors, reroute_ts
from graphquant.api.graph_editor.views import Operation, Tensor
from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import QUANTIZATION_KINDS, Model
from graphquant.numerics import IntType, QParams, qparams_from_scale
from graphquant.qdq import FAMILIES, FamilyRequest, QDQFamily, QDQSite, RoundingMode
from graphquant.qdq.family import ROUNDING_MODES
from graphquant.quantize.rewrite import FRAME_KINDS

RULE_NAME = "insert_quant_op"
"""Stamped on each new op in place of a rule's name."""

QUANT_SCOPE = "SlimQuant"

MIN_BITS, MAX_BITS = 2, 16
MIN_EXPONENT = -126

MAX_LISTED_CONSUMERS = 5
"""Number of consumers that an error lists."""

_TENSORFLOW_SCOPE = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Signed fixed point: `bits`-bit integers with the scale 2**exponent, without the most negative integer.

    Attributes:
        bits: 2 to 16; the recipe has 8 and 16.
        exponent: The scale is 2**exponent.
        family: The family of QDQ ops, by default that of the model's format.
        round: Rounding of values halfway between two steps, "half-even" or "half-up"; by default that of the ops.
    """

    bits: int
    exponent: int
    family: str | None = None
    round: RoundingMode | None = None

    def __post_init__(self) -> None:
        """Check the ranges of the fields.

        Raises:
            UsageError: A field is out of range.
        """
        if type(self.bits) is not int or not MIN_BITS <= self.bits <= MAX_BITS:
            raise UsageError(
                f"FixedPoint does not support {self.bits!r} bits. Give {MIN_BITS} to {MAX_BITS}; 8 and 16 are usual."
            )
        max_exponent = 128 - self.bits  # TensorFlow computes max - min in float32
        if type(self.exponent) is not int or not MIN_EXPONENT <= self.exponent <= max_exponent:
            raise UsageError(
                f"FixedPoint does not support the exponent {self.exponent!r}. With {self.bits} bits it is"
                f" {MIN_EXPONENT} to {max_exponent}, because the range must fit float32."
            )
        if self.family is not None and self.family not in FAMILIES:
            suggestion = did_you_mean(self.family, FAMILIES) or f" Known are {', '.join(FAMILIES)}."
            raise UsageError(f"There is no family {self.family!r}.{suggestion}")
        if self.round not in {None, *ROUNDING_MODES}:
            raise UsageError(
                f"FixedPoint does not support the rounding {self.round!r}. Give 'half-even' or 'half-up', or omit it."
            )

    @property
    def scale(self) -> float:
        """The step between two values."""
        return math.ldexp(1, self.exponent)

    @property
    def max(self) -> float:
        """The largest value, (2**(bits - 1) - 1) * 2**exponent."""
        return ((1 << (self.bits - 1)) - 1) * self.scale

    @property
    def min(self) -> float:
        """The smallest value, -max."""
        return -self.max

    def params(self) -> QParams:
        """Return scale, zero point and range."""
        return qparams_from_scale(np.asarray(self.scale), np.asarray(0), IntType(self.bits, signed=True), narrow=True)


def insert_quant_op(graph: Model, producer: str | Tensor, name: str, quantizer: FixedPoint) -> int:
    """Quantize `producer` for its consumers with `name` in their op names, and for no others.

    The new ops are in the scope `name/SlimQuant`, where `select_ts` finds their tensors. Graph outputs and ops that
    graphquant inserted do not count as consumers. The model is edited in place; `model.save(path)` writes it.

    Args:
        graph: The model.
        producer: A kernel or a layer's output: a tensor, or its name as for `get_tensor_by_name`. If function clones
            contain it, each clone is edited.
        name: Part of the consumers' names, usually a layer's name.
        quantizer: The fixed-point format.

    Returns:
        The number of rerouted inputs.

    Raises:
        UsageError: There is no such producer or it has no such consumer, the ops do not support the request, or `name`
            is not a valid scope. The model is then unchanged.
    """
    producers = [producer] if isinstance(producer, Tensor) else find_tensors(graph, producer)
    consumers = {
        tensor: [op for op in tensor.consumers() if name in op.name and _is_model_op(op)] for tensor in producers
    }
    if not any(consumers.values()):
        raise UsageError(_no_consumer_message(producers, name))
    quantized = [tensor for tensor in producers if consumers[tensor]]
    for tensor in quantized:
        _require_quantizable(graph, tensor, name, quantizer)
    return sum(
        reroute_ts(make_quant_op(graph, tensor, name, quantizer), tensor, can_modify=consumers[tensor])
        for tensor in quantized
    )


def make_quant_op(graph: Model, tensor: Tensor, name: str, quantizer: FixedPoint) -> Tensor:
    """Add a quantizer after `tensor` and return its output, which has no readers yet, for `reroute_ts`.

    Args:
        graph: The model.
        tensor: The tensor to quantize.
        name: The new ops are in the scope `name/SlimQuant`.
        quantizer: The fixed-point format.

    Raises:
        UsageError: The ops do not support the request, or `name` is not a valid scope.
    """
    family = _require_quantizable(graph, tensor, name, quantizer)
    graph_of_tensor, output = tensor.graph, tensor.op.node.outputs[tensor.ref.port]
    lowering = QDQSite(
        tensor=tensor.ref,
        name=graph_of_tensor.unique_name(f"{name.strip('/')}/{QUANT_SCOPE}/quant"),
        params=quantizer.params(),
        rule=RULE_NAME,
        shape=output.shape,
        rounding_mode=quantizer.round,
        in_frame=any(op.kind in FRAME_KINDS for op in graph_of_tensor.ops()),
        opset=graph.opset,
    )
    return Tensor(graph_of_tensor, family.add_ops(graph_of_tensor, lowering))


def _is_model_op(op: Operation) -> bool:
    """Return True for ops of the model itself, False for inserted ones and graph outputs."""
    return op.kind not in {"output", *QUANTIZATION_KINDS} and f"/{QUANT_SCOPE}/" not in f"/{op.name}"


def _require_quantizable(model: Model, tensor: Tensor, name: str, quantizer: FixedPoint) -> QDQFamily:
    """Return the family for the tensor. An impossible request is refused before anything is changed."""
    if not isinstance(model, Model):
        raise UsageError(
            f"A quantizer needs the model, but this is a {type(model).__name__}. Pass the result of gq.load."
        )
    if tensor.graph.graphs is not model.graphs:
        raise UsageError(f"{tensor} belongs to another model. Select it in the edited model.")
    scope = name.strip("/")
    if not scope or (model.format == "tensorflow" and not _TENSORFLOW_SCOPE.fullmatch(scope)):
        raise UsageError(f"{name!r} is not a valid scope for new ops. Give a part of a layer's name that is a scope.")
    family = FAMILIES[quantizer.family or formats.format_module(model.format).DEFAULT_FAMILY]
    if family.format != model.format:
        families = ", ".join(candidate.name for candidate in FAMILIES.values() if candidate.format == model.format)
        raise UsageError(f"The family {family.name!r} is for {family.format} models. This model supports: {families}.")
    if tensor.dtype is None:
        raise UsageError(f"The data type of {tensor} is unknown before a run. Quantize its input instead.")
    kind = IntType(quantizer.bits, signed=True)
    request = FamilyRequest(type=kind, axis=None, dtype=tensor.dtype, shape=tensor.shape, rounding_mode=quantizer.round)
    reason = family.unsupported_reason(request)
    if reason:
        raise UsageError(
            f"{tensor} cannot be quantized by {family.name}: {reason}. Choose other bits or another tensor."
        )
    if model.opset and model.opset < family.minimum_opset(request):
        raise UsageError(
            f"The model has opset {model.opset}, but {family.name} needs {family.minimum_opset(request)} for this. Use"
            " rules with `graphquant insert`, which converts the model first."
        )
    return family


def _no_consumer_message(producers: list[Tensor], name: str) -> str:
    """Return the error for a producer without consumers of that name; it lists the actual readers."""
    consumers = list(dict.fromkeys(op for tensor in producers for op in tensor.consumers()))
    readers = list(dict.fromkeys(op.name for op in consumers if _is_model_op(op)))
    inserted = next(
        (op.name for op in consumers if name in op.name and op.kind != "output" and not _is_model_op(op)), None
    )
    reader_list = (
        f" It is read by {', '.join(map(repr, readers[:MAX_LISTED_CONSUMERS]))}"
        if readers
        else " No op of a layer reads it"
    )
    ellipsis = ", ..." if len(readers) > MAX_LISTED_CONSUMERS else ""
    inserted_hint = f", and {inserted!r} was inserted earlier" if inserted else ""
    hints = f"{reader_list}{ellipsis}{inserted_hint}.{did_you_mean(name, readers)}"
    return f"No op whose name contains {name!r} reads {producers[0]}.{hints}"
