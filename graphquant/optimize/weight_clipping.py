"""Weight clipping: give low-bit weights the range of least squared error in place of the largest absolute value.

Source: Banner et al. 2018, "Post Training 4-bit Quantization of Convolutional Networks for Rapid-Deployment", section
3. The observer "mse" searches the range on the weight itself, so no distribution is assumed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from graphquant.ir import paused_gc
from graphquant.numerics import IntType
from graphquant.optimize.algorithm import AlgorithmData, AlgorithmResult, PreCalibrationState
from graphquant.rules import ObserverConfig

if TYPE_CHECKING:
    from graphquant.quantize import Plan, Site

WEIGHT_CLIPPING: Final = "weight-clipping"

UNCLIPPED_OBSERVERS: Final = frozenset({"absmax", "minmax"})
"""Observers that clip nothing."""

MAX_CLIPPED_BITS: Final = 8


def clip_weights_in_plan(plan: Plan) -> tuple[Plan, list[AlgorithmResult]]:
    """Give clipped ranges to low-bit weights that have no explicit range. The float function does not change."""
    sites, results = [], []
    for site in plan.sites:
        should_clip = _should_clip_weight(site)
        sites.append(
            replace(site, scheme=replace(site.scheme, observe=ObserverConfig(name="mse"))) if should_clip else site
        )
        if should_clip:
            results.append(
                AlgorithmResult(
                    algorithm=WEIGHT_CLIPPING, target=str(site.tensor), detail="its range has the least squared error"
                )
            )
    return replace(plan, sites=tuple(sites)), results


def _should_clip_weight(site: Site) -> bool:
    dtype = site.scheme.type
    has_explicit_range = site.range is not None or site.scale is not None or site.clone_of is not None
    has_few_bits = isinstance(dtype, IntType) and dtype.bits <= MAX_CLIPPED_BITS
    return (
        site.parameter and has_few_bits and not has_explicit_range and site.scheme.observe.name in UNCLIPPED_OBSERVERS
    )


@paused_gc()
def apply_weight_clipping(state: PreCalibrationState, _: AlgorithmData | None) -> PreCalibrationState:
    """Give low-bit weights the range of least squared error."""
    plan, results = clip_weights_in_plan(state.plan)
    return replace(state, plan=plan, results=(*state.results, *results))
