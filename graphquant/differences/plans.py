"""Two plans beside each other."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from graphquant.differences.types import Change, Differences

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.ir import Use
    from graphquant.plans import Plan, Site


def diff_plans(one: Plan, other: Plan) -> Differences:
    """What differs between two plans: sites by their tensor and one of their uses."""
    changes: list[Change] = []
    for name in ("format", "model", "prepared"):
        before, after = getattr(one, name), getattr(other, name)
        if before != after:
            changes.append(Change(kind="plan", where=name, says=f"{before[:12]} became {after[:12]}"))
    steps = [{(step.step, step.target): step for step in plan.steps} for plan in (one, other)]
    changes += [
        Change(kind="plan", where=f"{n} {t}", says="is prepared") for n, t in steps[1] if (n, t) not in steps[0]
    ]
    changes += [
        Change(kind="plan", where=f"{n} {t}", says="is not prepared") for n, t in steps[0] if (n, t) not in steps[1]
    ]
    changes += [
        Change(kind="plan", where=f"correction {name}", says="is made" if name in other.corrections else "is not made")
        for name in dict.fromkeys([*one.corrections, *other.corrections])
        if (name in one.corrections) != (name in other.corrections)
    ]
    was = {use: site for site in one.sites for use in site.uses}
    now = {use: site for site in other.sites for use in site.uses}
    for site in other.sites:
        old = next((was[use] for use in site.uses if use in was and was[use].tensor == site.tensor), None)
        if old is None:
            changes.append(Change(kind="site-added", where=str(site.tensor), says=_said(site)))
        else:
            changes += _changed(old, site)
    for site in one.sites:
        if not any(use in now and now[use].tensor == site.tensor for use in site.uses):
            changes.append(Change(kind="site-removed", where=str(site.tensor), says=_said(site)))
    return Differences(changes=tuple(changes), rerouted=len(was.keys() ^ now.keys()))


def _said(site: Site) -> str:
    scheme = site.scheme
    return f"{scheme.type.name}, rule {site.rule}, read by {_listed(site.uses)}"


def _listed(uses: tuple[Use, ...]) -> str:
    return ", ".join(map(str, uses[:3])) + (f" and {len(uses) - 3} more" if len(uses) > 3 else "")  # noqa: PLR2004  # a line


def _changed(old: Site, site: Site) -> Iterator[Change]:
    """What is another one in a site that both plans have."""
    where = str(site.tensor)
    said = [
        f"{field.name}: {getattr(old.scheme, field.name)} became {getattr(site.scheme, field.name)}"
        for field in fields(site.scheme)
        if field.name != "name" and getattr(old.scheme, field.name) != getattr(site.scheme, field.name)
    ]
    said += [
        f"{name}: {getattr(old, name)} became {getattr(site, name)}"
        for name in ("rule", "axis", "range", "scale", "zero_point", "tie")
        if getattr(old, name) != getattr(site, name)
    ]
    if set(old.uses) != set(site.uses):
        said.append(f"read by {_listed(old.uses)} became {_listed(site.uses)}")
    if said:
        yield Change(kind="site-changed", where=where, says="; ".join(said))


__all__ = ["diff_plans"]
