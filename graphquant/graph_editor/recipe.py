"""The fixed-point recipe: quantize a tensor for the consumers that a layer's name picks out."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from graphquant import formats
from graphquant.errors import UsageError, did_you_mean
from graphquant.graph_editor.reroute import reroute_ts
from graphquant.graph_editor.select import find
from graphquant.graph_editor.views import Operation, Tensor
from graphquant.ir import QUANTIZATION_KINDS, Model
from graphquant.numerics import IntType, QParams, from_scale
from graphquant.qdq import FAMILIES, Family, Lowering, Request, Round
from graphquant.qdq.base import ROUNDS
from graphquant.rewrite import FRAMES

RULE = "insert_quant_op"
"""Stamped on each new op, as the name of a rule is."""

SCOPE = "SlimQuant"

MIN_BITS, MAX_BITS = 2, 16
MIN_EXPONENT = -126

MAX_SHOWN = 5
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
    round: Round | None = None

    def __post_init__(self) -> None:
        """Checks that the numbers can be held.

        Raises:
            UsageError: They cannot.
        """
        if type(self.bits) is not int or not MIN_BITS <= self.bits <= MAX_BITS:
            raise UsageError(
                f"FixedPoint has no {self.bits!r} bits. Give {MIN_BITS} to {MAX_BITS}; 8 and 16 are usual."
            )
        highest = 128 - self.bits  # TensorFlow computes max - min in float32
        if type(self.exponent) is not int or not MIN_EXPONENT <= self.exponent <= highest:
            raise UsageError(
                f"FixedPoint has no exponent {self.exponent!r}. With {self.bits} bits it is"
                f" {MIN_EXPONENT} to {highest}, as the range must fit float32."
            )
        if self.family is not None and self.family not in FAMILIES:
            close = did_you_mean(self.family, FAMILIES) or f" Known are {', '.join(FAMILIES)}."
            raise UsageError(f"There is no family {self.family!r}.{close}")
        if self.round not in {None, *ROUNDS}:
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
        return from_scale(np.asarray(self.scale), np.asarray(0), IntType(self.bits, signed=True), narrow=True)


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
    found = [producer] if isinstance(producer, Tensor) else find(graph, producer)
    consumers = {tensor: [op for op in tensor.consumers() if name in op.name and _counts(op)] for tensor in found}
    if not any(consumers.values()):
        raise UsageError(_no_consumer(found, name))
    wanted = [tensor for tensor in found if consumers[tensor]]
    for tensor in wanted:
        _check(graph, tensor, name, quantizer)
    return sum(
        reroute_ts(make_quant_op(graph, tensor, name, quantizer), tensor, can_modify=consumers[tensor])
        for tensor in wanted
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
    family = _check(graph, tensor, name, quantizer)
    home, known = tensor.graph, tensor.op.node.outputs[tensor.ref.port]
    lowering = Lowering(
        tensor=tensor.ref,
        name=home.fresh(f"{name.strip('/')}/{SCOPE}/quant"),
        params=quantizer.params(),
        rule=RULE,
        shape=known.shape,
        round=quantizer.round,
        in_frame=any(op.kind in FRAMES for op in home.ops()),
        opset=graph.opset,
    )
    return Tensor(home, family.lower(home, lowering))


def _counts(op: Operation) -> bool:
    """Whether it is an op of the model itself."""
    return op.kind not in {"output", *QUANTIZATION_KINDS} and f"/{SCOPE}/" not in f"/{op.name}"


def _check(model: Model, tensor: Tensor, name: str, quantizer: FixedPoint) -> Family:
    """The family that quantizes the tensor; what it cannot do is refused before anything is changed."""
    if not isinstance(model, Model):
        raise UsageError(f"A quantizer needs the model, and this is a {type(model).__name__}. Give what gq.load gave.")
    if tensor.graph.graphs is not model.graphs:
        raise UsageError(f"{tensor} is of another model. Select it in the one that is edited.")
    scope = name.strip("/")
    if not scope or (model.format == "tensorflow" and not _TENSORFLOW_SCOPE.fullmatch(scope)):
        raise UsageError(f"New ops cannot live under the name {name!r}. Give a part of a layer's name that is one.")
    family = FAMILIES[quantizer.family or formats.module(model.format).FAMILY]
    if family.format != model.format:
        known = ", ".join(one.name for one in FAMILIES.values() if one.format == model.format)
        raise UsageError(f"The family {family.name!r} is for {family.format} models. For this one there are: {known}.")
    if tensor.dtype is None:
        raise UsageError(f"The data type of {tensor} is not known without running the model. Quantize what it reads.")
    kind = IntType(quantizer.bits, signed=True)
    asked = Request(type=kind, axis=None, dtype=tensor.dtype, shape=tensor.shape, round=quantizer.round)
    reason = family.why_not(asked)
    if reason:
        raise UsageError(
            f"{tensor} cannot be quantized by {family.name}: {reason}. Choose other bits or another tensor."
        )
    if model.opset and model.opset < family.opset(asked):
        raise UsageError(
            f"The model has opset {model.opset}, and {family.name} needs {family.opset(asked)} for this. Use rules,"
            " with which `graphquant insert` converts the model first."
        )
    return family


def _no_consumer(found: list[Tensor], name: str) -> str:
    """No consumer of the producer is called so: who reads it."""
    reading = list(dict.fromkeys(op for tensor in found for op in tensor.consumers()))
    readers = list(dict.fromkeys(op.name for op in reading if _counts(op)))
    inserted = next((op.name for op in reading if name in op.name and op.kind != "output" and not _counts(op)), None)
    told = f" It is read by {', '.join(map(repr, readers[:MAX_SHOWN]))}" if readers else " No op of a layer reads it"
    more = ", ..." if len(readers) > MAX_SHOWN else ""
    before = f", and {inserted!r} was inserted before" if inserted else ""
    return f"No op whose name contains {name!r} reads {found[0]}.{told}{more}{before}.{did_you_mean(name, readers)}"
