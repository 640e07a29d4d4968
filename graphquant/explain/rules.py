"""Why a tensor or op is quantized as it is: each rule, in order, with the first condition that failed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant.errors import UsageError, did_you_mean
from graphquant.explain.types import Explanation
from graphquant.match import name_matches
from graphquant.plans import UNTIED
from graphquant.solve import because

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphquant.ir import TensorRef, Use
    from graphquant.match import Matcher, Miss
    from graphquant.plans import Plan
    from graphquant.solve import Solution

HINT = " `graphquant plan` prints the names of those that rules match; a tensor is OP:0."


def explain(matcher: Matcher, plan: Plan, what: str, solution: Solution | None = None) -> tuple[Explanation, ...]:
    """Every use of the tensor `what`, or every use that the op `what` makes and offers.

    Args:
        matcher: The rules against the prepared model.
        plan: The plan that they make.
        what: A name.
        solution: The scales that were found for it, where there are any, which are explained too.

    Raises:
        UsageError: Nothing float is called that.
    """
    outcomes: dict[tuple[TensorRef, Use], tuple[str, str]] = {}
    places: dict[tuple[TensorRef, Use], int] = {}
    absorbed = {(skip.tensor, use) for skip in plan.skips if skip.absorbed for use in skip.uses}
    plan = plan if solution is None else solution.plan
    for skip in plan.skips:
        outcomes.update({(skip.tensor, use): (skip.rule, f"not quantized: {skip.reason}") for use in skip.uses})
    for index, site in enumerate(plan.sites):
        places.update({(site.tensor, use): index for use in site.uses})
        tied = f", with the scale of what {', '.join(map(str, site.tie))} reads" if site.tie else ""
        said = f"quantized to {site.scheme.type.name} {site.scheme.zero} per {site.scheme.per}{tied}"
        outcomes.update({(site.tensor, use): (site.rule, said) for use in site.uses})
    found = []
    for tensor, use, asked in asked_uses(matcher, what, matcher.labels):
        place = places.get((tensor, use))
        known = outcomes.get((tensor, use))
        winner, outcome = known or _unclaimed(matcher, tensor, use)
        found.append(
            Explanation(
                tensor=tensor,
                use=use,
                quantized=place is not None or (known is None and bool(winner)),
                winner=winner,
                outcome=outcome,
                choices=() if place is None else because(matcher.model, plan, place, solution),
                misses=_misses(matcher, tensor, use, winner),
                asked=asked,
                absorbed=(tensor, use) in absorbed,
            )
        )
    return tuple(found)


def _unclaimed(matcher: Matcher, tensor: TensorRef, use: Use) -> tuple[str, str]:
    """The rule and the outcome of a use that is neither among the plan's sites nor its skips."""
    first = next((rule for rule in matcher.ruleset.rules if not matcher.miss(rule, tensor, use)), None)
    if first is not None and first.rule.quantize == "passed-on":
        return first.rule.name, "quantized already: what makes it hands quantized values on, so nothing is inserted"
    return "", "not quantized: no rule matches"


def asked_uses(
    matcher: Matcher, what: str, names: Callable[[TensorRef], tuple[str, ...]]
) -> Iterator[tuple[TensorRef, Use, tuple[str, str]]]:
    """The uses of what goes by the name `what`, each with the op that is meant: its maker or its reader.

    Args:
        matcher: Knows the tensors of the model.
        what: A plain name, a glob or a regex between slashes.
        names: What a tensor is called.

    Raises:
        UsageError: Nothing float is called that.
    """
    none = True
    for tensor, uses in matcher.tensors():
        made = name_matches(what, *names(tensor))
        for use in uses:
            if made or name_matches(what, use.op, str(use)):
                none = False
                yield tensor, use, (tensor.graph, tensor.op) if made else (use.graph, use.op)
    if none:
        labels = matcher.all_labels()
        more = " It makes and reads no float tensor." if what in labels else did_you_mean(what, labels) or HINT
        raise UsageError(f"No float tensor or op is called {what!r}.{more}")


def _misses(matcher: Matcher, tensor: TensorRef, use: Use, winner: str) -> tuple[Miss, ...]:
    """The rules that did not take the use, in order."""
    tried = [matcher.tried(rule, tensor, use) for rule in matcher.ruleset.rules]
    first = next((miss for miss in tried if miss.rule.rule.name == winner and not miss.reason), None)
    misses, before = [], first is not None
    for miss in tried:
        if miss is first:
            before = False
        else:
            misses.append(replace(miss, reason=miss.reason or (UNTIED if before else "")))
    return tuple(misses)


__all__ = ["asked_uses", "explain"]
