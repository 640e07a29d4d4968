"""Differences of two plans."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import graphquant as gq

if TYPE_CHECKING:
    from pathlib import Path


def test_changed_uses_of_a_site_are_reported(samples: Path) -> None:
    """A site that loses one of its readers is one changed site, and that use counts as rerouted."""
    plan = gq.plan(samples / "digits_cnn.onnx", rules="fixed_point")
    index, site = next((index, site) for index, site in enumerate(plan.sites) if len(site.uses) > 1)
    sites = list(plan.sites)
    sites[index] = replace(site, uses=site.uses[:-1])
    differences = gq.diff(plan, replace(plan, sites=tuple(sites)))
    (change,) = differences.changes
    assert (change.kind, change.location) == ("site-changed", str(site.tensor))
    assert str(site.uses[-1]) in change.message
    assert differences.rerouted == 1


def test_equal_plans_have_no_differences(samples: Path) -> None:
    """The order of uses is irrelevant."""
    plan = gq.plan(samples / "digits_cnn.onnx", rules="fixed_point")
    reordered = replace(plan, sites=tuple(replace(site, uses=site.uses[::-1]) for site in plan.sites))
    differences = gq.diff(plan, reordered)
    assert (differences.changes, differences.rerouted) == ((), 0)
