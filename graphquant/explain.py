"""Why a tensor or op is quantized as it is: each rule, in order, with the first condition that failed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphquant.errors import UsageError, did_you_mean
from graphquant.match import Matcher, Miss, name_matches
from graphquant.plans import UNTIED
from graphquant.solve import because

if TYPE_CHECKING:
    from graphquant.ir import TensorRef, Use
    from graphquant.plans import Plan
    from graphquant.solve import Solution

HINT = " `graphquant plan` prints the names of those that rules match; a tensor is OP:0."


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What was tried for one use of one tensor.

    Attributes:
        tensor: The tensor.
        use: The consumer.
        winner: Name of the rule that claimed the use, "" if none did.
        outcome: What will be done, in words.
        choices: Why its scale is what it is, in sentences.
        misses: The other rules in order, each with the condition that failed; "" where a rule before it was first.
    """

    tensor: TensorRef
    use: Use
    winner: str
    outcome: str
    choices: tuple[str, ...] = ()
    misses: tuple[Miss, ...]


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
    plan = plan if solution is None else solution.plan
    for skip in plan.skips:
        outcomes.update({(skip.tensor, use): (skip.rule, f"not quantized: {skip.reason}") for use in skip.uses})
    for index, site in enumerate(plan.sites):
        places.update({(site.tensor, use): index for use in site.uses})
        tied = f", with the scale of what {', '.join(map(str, site.tie))} reads" if site.tie else ""
        said = f"quantized to {site.scheme.type.name} {site.scheme.zero} per {site.scheme.per}{tied}"
        outcomes.update({(site.tensor, use): (site.rule, said) for use in site.uses})
    found = []
    for tensor, uses in matcher.tensors():
        made = _called(what, *matcher.labels(tensor))
        asked = [use for use in uses if made or _called(what, use.op, str(use))]
        for use in asked:
            winner, outcome = outcomes.get((tensor, use), ("", "not quantized: no rule matches"))
            place = places.get((tensor, use))
            choices = () if place is None else because(matcher.model, plan, place, solution)
            found.append(replace(_one(matcher, tensor, use, winner, outcome), choices=choices))
    if not found:
        labels = matcher.all_labels()
        more = " It makes and reads no float tensor." if what in labels else did_you_mean(what, labels) or HINT
        raise UsageError(f"No float tensor or op is called {what!r}.{more}")
    return tuple(found)


def _one(matcher: Matcher, tensor: TensorRef, use: Use, winner: str, outcome: str) -> Explanation:
    holding = [(rule, matcher.miss(rule, tensor, use)) for rule in matcher.ruleset.rules]
    first = next((rule for rule, reason in holding if rule.rule.name == winner and not reason), None)
    misses, before = [], first is not None
    for rule, reason in holding:
        if rule is first:
            before = False
            continue
        misses.append(Miss(rule=rule, reason=reason or (UNTIED if before else "")))
    return Explanation(tensor=tensor, use=use, winner=winner, outcome=outcome, misses=tuple(misses))


def _called(what: str, *names: str) -> bool:
    """Whether one of `names` is `what`, a plain name, a glob or a regex between slashes."""
    return name_matches(what, *names)
