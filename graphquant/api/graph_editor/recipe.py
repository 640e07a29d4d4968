"""The fixed-point recipe: quantize a tensor for the consumers that a layer's name picks out."""

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
"""Stamped on each new op, as the name of a rule is."""

QUANT_SCOPE = "SlimQuant"

MIN_BITS, MAX_BITS = 2, 16
MIN_EXPONENT = -126

MAX_LISTED_CONSUMERS = 5
"""How many consumers an error lists."""

_TENSORFLOW_SCOPE = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Signed fixed point: integers of `bits` bits in steps of exactly 2**exponent, the most negative one left out.

    Attributes:
        bits: 2 to 16; the recipe has 8 and 16.
        exponent: The scale is 2**exponent.
        family: The QDQ ops that stand for it, by default those of the model's format.
        round: How values halfway between two steps are rounded, "half-even" or "half-up"; by default as the ops do.
    """

    bits: int
    exponent: int
    family: str | None = None
    round: RoundingMode | None = None

    def __post_init__(self) -> None:
        """Checks that the numbers can be held.

        Raises:
            UsageError: They cannot.
        """
        if type(self.bits) is not int or not MIN_BITS <= self.bits <= MAX_BITS:
            raise UsageError(
                f"FixedPoint has no {self.bits!r} bits. Give {MIN_BITS} to {MAX_BITS}; 8 and 16 are usual."
            )
        max_exponent = 128 - self.bits  # TensorFlow computes max - min in float32
        if type(self.exponent) is not int or not MIN_EXPONENT <= self.exponent <= max_exponent:
            raise UsageError(
                f"FixedPoint has no exponent {self.exponent!r}. With {self.bits} bits it is"
                f" {MIN_EXPONENT} to {max_exponent}, as the range must fit float32."
            )
        if self.family is not None and self.family not in FAMILIES:
            suggestion = did_you_mean(self.family, FAMILIES) or f" Known are {', '.join(FAMILIES)}."
            raise UsageError(f"There is no family {self.family!r}.{suggestion}")
        if self.round not in {None, *ROUNDING_MODES}:
            raise UsageError(f"FixedPoint cannot round {self.round!r}. Give 'half-even' or 'half-up', or leave it out.")

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
        """Scale, zero point and range."""
        return qparams_from_scale(np.asarray(self.scale), np.asarray(0), IntType(self.bits, signed=True), narrow=True)


def insert_quant_op(graph: Model, producer: str | Tensor, name: str, quantizer: FixedPoint) -> int:
    """Quantizes `producer` for those of its consumers whose op name contains `name`, and for no others.

    The new ops live under the scope `name/SlimQuant`; `select_ts` finds their tensors there. Graph outputs and what
    graphquant inserted before are no consumers here. The model is edited in place; `model.save(path)` writes it.

    Args:
        graph: The model.
        producer: A kernel or what a layer makes: a tensor, or its name as for `get_tensor_by_name`. Where copies of a
            function hold it, each copy is edited.
        name: A part of the consumers' names, usually a layer's.
        quantizer: The fixed-point format.

    Returns:
        How many inputs were rerouted.

    Raises:
        UsageError: There is no such producer or it has no such consumer, the ops cannot do what is asked, or `name` is
            no scope. Nothing is changed then.
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
    """Puts a quantizer behind `tensor`, which nothing reads yet, and returns the quantized tensor for `reroute_ts`.

    Args:
        graph: The model.
        tensor: What is quantized.
        name: The new ops live under `name/SlimQuant`.
        quantizer: The fixed-point format.

    Raises:
        UsageError: The ops cannot do what is asked, or `name` is no scope.
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
    """Whether it is an op of the model itself."""
    return op.kind not in {"output", *QUANTIZATION_KINDS} and f"/{QUANT_SCOPE}/" not in f"/{op.name}"


def _require_quantizable(model: Model, tensor: Tensor, name: str, quantizer: FixedPoint) -> QDQFamily:
    """The family that quantizes the tensor; what it cannot do is refused before anything is changed."""
    if not isinstance(model, Model):
        raise UsageError(f"A quantizer needs the model, and this is a {type(model).__name__}. Give what gq.load gave.")
    if tensor.graph.graphs is not model.graphs:
        raise UsageError(f"{tensor} is of another model. Select it in the one that is edited.")
    scope = name.strip("/")
    if not scope or (model.format == "tensorflow" and not _TENSORFLOW_SCOPE.fullmatch(scope)):
        raise UsageError(f"New ops cannot live under the name {name!r}. Give a part of a layer's name that is one.")
    family = FAMILIES[quantizer.family or formats.format_module(model.format).DEFAULT_FAMILY]
    if family.format != model.format:
        families = ", ".join(candidate.name for candidate in FAMILIES.values() if candidate.format == model.format)
        raise UsageError(
            f"The family {family.name!r} is for {family.format} models. For this one there are: {families}."
        )
    if tensor.dtype is None:
        raise UsageError(f"The data type of {tensor} is not known without running the model. Quantize what it reads.")
    kind = IntType(quantizer.bits, signed=True)
    request = FamilyRequest(type=kind, axis=None, dtype=tensor.dtype, shape=tensor.shape, rounding_mode=quantizer.round)
    reason = family.unsupported_reason(request)
    if reason:
        raise UsageError(
            f"{tensor} cannot be quantized by {family.name}: {reason}. Choose other bits or another tensor."
        )
    if model.opset and model.opset < family.minimum_opset(request):
        raise UsageError(
            f"The model has opset {model.opset}, and {family.name} needs {family.minimum_opset(request)} for this. Use rules,"
            " with which `graphquant insert` converts the model first."
        )
    return family


def _no_consumer_message(producers: list[Tensor], name: str) -> str:
    """No consumer of the producer is called so: who reads it."""
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
    inserted_hint = f", and {inserted!r} was inserted before" if inserted else ""
    return f"No op whose name contains {name!r} reads {producers[0]}.{reader_list}{ellipsis}{inserted_hint}.{did_you_mean(name, readers)}"
