"""The plan as data: which tensors are quantized for which consumers, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from graphquant.ir import TensorRef, Use
from graphquant.prepare import Step
from graphquant.ruleset import Scheme

@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One tensor that gets a quantize-dequantize pair for some of its consumers.

    Attributes:
        tensor: What is quantized.
        uses: The consumers that are rerouted.
        graph: The graph that gets the new ops: the tensor's own, or the body that reads it.
        scheme: How it is quantized.
        axis: The channel axis of a per-channel scheme, else None.
        rule: Name of the rule that claimed the uses.
        why: That rule's reason.
        parameter: Whether the tensor is a weight, so that its range comes from its value.
        tie: Uses whose sites must have the same scale and zero point as this one ("same-as-input").
        range: (low, high) in real units, which wins over statistics.
        scale: One scale, or one per channel; with `zero_point` it wins over everything.
        zero_point: One zero point, or one per channel.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    tensor: TensorRef
    uses: tuple[Use, ...]
    graph: str
    scheme: Scheme
    axis: int | None = None
    rule: str = ""
    why: str = ""
    parameter: bool = False
    tie: tuple[Use, ...] = ()
    range: tuple[float, float] | None = None
    scale: tuple[float, ...] | None = None
    zero_point: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A place where a rule matched and nothing will be inserted, with the reason."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    tensor: TensorRef
    uses: tuple[Use, ...]
    rule: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that will be done to one model.

    Attributes:
        format: The model's format.
        model: Digest of the source model.
        prepared: Digest of the model after `steps`, whose ops the plan names.
        rules: The rule files, as asked for.
        steps: Preparations, in the order they were made.
        sites: What is quantized.
        skips: What matched and is not, with the reason.
        unused: Rules that matched nothing.
    """

    format: str
    model: str
    prepared: str
    rules: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    sites: tuple[Site, ...] = ()
    skips: tuple[Skip, ...] = ()
    unused: tuple[str, ...] = ()
