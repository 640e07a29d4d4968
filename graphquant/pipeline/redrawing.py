"""Plans drawn anew in part, and what became of their sites."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant.plans import Skip

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphquant.plans import Plan, Site
    from graphquant.rewrite import Inserted


def redrawn(plan: Plan, instead: Mapping[int, Site | None], rule: str, why: Callable[[int], str]) -> Plan:
    """The plan with other sites at these positions, or none: what is left float there is a skip.

    Args:
        plan: The plan.
        instead: By position what is there now, None for float.
        rule: The rule that did that.
        why: Gives the reason, by position.
    """
    sites, skips = [], list(plan.skips)
    for index, site in enumerate(plan.sites):
        if index not in instead:
            sites.append(site)
            continue
        other = instead[index]
        if other is None:
            skips.append(Skip(tensor=site.tensor, uses=site.uses, rule=rule, reason=why(index)))
        else:
            sites.append(replace(other, rule=rule, why=why(index)))
    return replace(plan, sites=tuple(sites), skips=tuple(skips))


def by_site(plan: Plan, inserted: Sequence[Inserted]) -> dict[int, Inserted]:
    """What was inserted for each site of the plan, by position; not the copies that the solver made."""
    places = {(site.tensor, site.uses): index for index, site in enumerate(plan.sites)}
    found = ((places.get((done.site.tensor, done.site.uses)), done) for done in inserted)
    return dict(sorted((index, done) for index, done in found if index is not None))


__all__ = ["by_site", "redrawn"]
