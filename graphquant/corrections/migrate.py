"""Channels of activations scaled so that they fill their common range, at the cost of the weights that multiply them.

Source: Xiao et al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
equation 4: a channel is divided by max|x|^a / max|w|^(1 - a). The paper searches one strength a for a model by its
accuracy. Here each stream gets the one of eleven, from 0 to 1, for which the errors of rounding both are predicted to
be least, as noise with a twelfth of a step's square. The factors go into what makes the channels: a LayerNorm, also one
written out as single ops, an RMSNorm, a convolution or product. Where something else reads these, the residual branch
of an encoder say, a product by the factors is put before the matrix products; the paper leaves these out. The paper is
on transformers; what convolutions multiply gains likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.corrections.scaling import powers
from graphquant.corrections.seeing import least
from graphquant.corrections.streams import Stream
from graphquant.rewrite import FRAMES, PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.corrections.costs import Costs
    from graphquant.corrections.seeing import Facts
    from graphquant.ir import TensorRef, Use
    from graphquant.numerics import Array

NAME: Final = "migration"

STRENGTHS: Final = tuple(place / 10 for place in range(11))

GAIN: Final = 1.0
"""dB of predicted errors that a stream must gain."""

OWN_GAIN: Final = 3.0
"""dB where an op is added for it."""

SMALL: Final = "its errors are predicted to fall by less than {} dB"

FLOAT: Final = "none of its tensors is quantized with one scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a stream is to be scaled.

    Attributes:
        by: float64 (C,), powers of two.
        strength: The share of it that weights take.
        gain: dB that errors are predicted to fall by.
    """

    by: Array
    strength: float
    gain: float


def strongest(costs: Costs) -> Choice | None:
    """The best strength for a stream; None if nothing of it is rounded."""
    channels = costs.stream.channels
    values = least([costs.seen[tensor] for tensor in costs.stream.multiplied])
    weights = np.maximum.reduce([weight.largest(channels) for weight in costs.reads])
    plain = costs.of(np.ones(channels))
    known = (values > 0) & (weights > 0)
    if plain <= 0 or not known.any():
        return None
    best = Choice(by=np.ones(channels), strength=0.0, gain=0.0)
    for strength in STRENGTHS:
        factors = np.ones(channels)
        factors[known] = powers(values[known] ** strength / weights[known] ** (1 - strength))
        gain = 10 * np.log10(plain / costs.of(factors))
        if gain > best.gain:
            best = Choice(by=factors, strength=strength, gain=float(gain))
    return best


def parts(facts: Facts, number: int) -> list[Stream]:
    """A stream that can be scaled, or else the parts of it that a product of their own can scale."""
    stream = facts.streams[number]
    return list(_branches(facts, stream)) if facts.unfit(stream) else [stream]


def _branches(facts: Facts, stream: Stream) -> Iterator[Stream]:
    for tensor, uses in stream.multiplied.items():
        graph = facts.model.graphs[tensor.graph]
        ops = [facts.model.graphs[use.graph].op(use.op) for use in uses]
        held = [one for one in stream.held if one.use in uses]
        if (
            all(op.kind in PRODUCTS for op in ops)
            and all(use.graph == tensor.graph for use in uses)
            and len(held) == len(uses)
            and _free(facts, tensor, uses)
            and not any(op.kind in FRAMES for op in graph.ops())
        ):
            part = Stream(start=tensor, channels=stream.channels)
            part.tensors[tensor], part.multiplied[tensor], part.held = stream.tensors[tensor], uses, held
            yield part


def _free(facts: Facts, tensor: TensorRef, uses: list[Use]) -> bool:
    """Whether the tensor has a scale of its own for these uses, which no other hangs on."""
    read = {(use.graph, use.op, facts.model.graphs[use.graph].op(use.op).roles.index("input")) for use in uses}
    tied = {use for site in facts.plan.sites for use in (*site.tie, *([site.twin] if site.twin else []))}
    here = [site for site in facts.sites.get(tensor, ()) if any(tuple(use) in read for use in site.uses)]
    return bool(here) and not any(
        site.tie or site.twin or site.range or site.scale or any(use in tied for use in site.uses) for site in here
    )


__all__ = ["FLOAT", "GAIN", "NAME", "OWN_GAIN", "SMALL", "Choice", "parts", "strongest"]
