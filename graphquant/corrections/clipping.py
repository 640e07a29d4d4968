"""Weights clipped where that costs less than it saves: their ranges by mean squared error instead of by largest value.

Source: Banner et al. 2018, "Post Training 4-bit Quantization of Convolutional Networks for Rapid-Deployment",
section 3; the range is searched for on the weight itself (observer "mse"), whatever its distribution.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from graphquant.corrections.types import Corrected
from graphquant.numerics import IntType
from graphquant.ruleset import Observe

if TYPE_CHECKING:
    from graphquant.plans import Plan, Site

NAME: Final = "weight-clipping"

WHOLE: Final = frozenset({"absmax", "minmax"})
"""Observers that clip nothing."""

MOST_BITS: Final = 8


def clip_weights(plan: Plan) -> tuple[Plan, list[Corrected]]:
    """The plan with the observer "mse" for weights whose whole range was to be kept; the float function stays."""
    sites, told = [], []
    for site in plan.sites:
        clips = _clips(site)
        sites.append(replace(site, scheme=replace(site.scheme, observe=Observe(name="mse"))) if clips else site)
        if clips:
            told.append(
                Corrected(correction=NAME, target=str(site.tensor), detail="its range has the least squared error")
            )
    return replace(plan, sites=tuple(sites)), told


def _clips(site: Site) -> bool:
    kind = site.scheme.type
    given = site.range is not None or site.scale is not None or site.twin is not None
    narrow = isinstance(kind, IntType) and kind.bits <= MOST_BITS
    return site.parameter and narrow and not given and site.scheme.observe.name in WHOLE


__all__ = ["NAME", "clip_weights"]
