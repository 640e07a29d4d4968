"""What a model that is quantized already tells of the tensor or op that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.explain.rules import asked_uses
from graphquant.explain.types import Explanation
from graphquant.ir import QUANTIZATION_KINDS
from graphquant.match import Matcher
from graphquant.numerics import QParams
from graphquant.pairs import behind, inserted
from graphquant.ruleset import RuleSet
from graphquant.solve.words import shown
from graphquant.survey import survey

if TYPE_CHECKING:
    from graphquant.ir import Model, TensorRef
    from graphquant.survey import Reading

NO_RULES = RuleSet(files=(), descriptions=(), digest="", prepare=(), rules=())

FLOAT = "stays float: nothing quantizes it in this model. Explain the model that it was made of for the reason"

SHOWN = 4
"""Tensors of one scale that are named; the rest are counted."""


def explain_written(model: Model, what: str) -> tuple[Explanation, ...]:
    """Every use of the tensor `what`, or every use that the op `what` makes and offers, also behind its quantization.

    Raises:
        UsageError: Nothing float is called that.
    """
    readings = {(one.graph, one.op): one for one in survey(model).readings}
    shared: dict[object, list[str]] = {}
    for one in readings.values():
        shared.setdefault(_scale(one), []).append(str(behind(model, one.tensor)))
    matcher = Matcher(model, NO_RULES)
    found = []
    for tensor, use, asked in asked_uses(matcher, what, lambda tensor: _names(matcher, tensor)):
        if inserted(model.graphs[use.graph].op(use.op)):
            continue  # told where it is read
        reading = readings.get((tensor.graph, tensor.op))
        source = behind(model, tensor)
        made = (source.graph, source.op) if asked == (tensor.graph, tensor.op) else asked
        found.append(
            Explanation(
                tensor=source,
                use=use,
                quantized=reading is not None,
                winner="" if reading is None else reading.rule,
                outcome=FLOAT if reading is None else f"quantized {_params(reading)}, by {reading.op}",
                choices=() if reading is None else _shared(shared[_scale(reading)], str(source)),
                misses=(),
                asked=made,
            )
        )
    return tuple(found)


def _names(matcher: Matcher, tensor: TensorRef) -> tuple[str, ...]:
    """What a tensor is called, and what it was before it was quantized."""
    if matcher.model.op(tensor).kind not in QUANTIZATION_KINDS:
        return matcher.labels(tensor)
    return (*matcher.labels(tensor), *matcher.labels(behind(matcher.model, tensor)))


def _scale(reading: Reading) -> object:
    """What is equal for tensors of one scale and zero point; a weight's is its own."""
    params = reading.params
    if not isinstance(params, QParams) or params.scale.size > 1:
        return reading.graph, reading.op
    return params.type, params.scale.item(), params.zero_point.item()


def _params(reading: Reading) -> str:
    params = reading.params
    if params is None:
        return "with a scale that is computed at run time"
    if not isinstance(params, QParams):
        return f"to {params.type.name} with the range of each run"
    zero = f", zero point {params.zero_point.item()}" if params.scale.size == 1 else ""
    return f"to {params.type.name}, scale {shown(params.scale)}{zero}"


def _shared(names: list[str], own: str) -> tuple[str, ...]:
    others = [name for name in dict.fromkeys(names) if name != own]
    more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
    return (f"one scale and zero point with {', '.join(others[:SHOWN])}{more}",) if others else ()


__all__ = ["explain_written"]
