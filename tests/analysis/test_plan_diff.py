"""Differences of two plans."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import graphquant as gq
from graphquant.analysis.diff import _attributes_equal

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


@pytest.mark.parametrize(
    ("second", "equal"),
    [
        (np.array([1, 2], np.int32), True),
        (np.array([1, 2], np.uint32), False),
        (np.array([[1, 2]], np.int32), False),
        (np.array([1, 3], np.int32), False),
        ([1, 2], False),
    ],
)
def test_array_attributes_equal_in_type_shape_and_values(second: object, equal: bool) -> None:
    """Arrays of another type or shape differ, even with the same bytes."""
    assert _attributes_equal(np.array([1, 2], np.int32), second) is equal


def test_preparation_steps_of_one_plan_are_reported(samples: Path) -> None:
    """A step is prepared in the second plan or only in the first."""
    plan = gq.plan(samples / "digits_cnn_bn.onnx", rules="fixed_point")
    step = plan.steps[-1]
    shorter = replace(plan, steps=plan.steps[:-1])
    for first, second, message in ((shorter, plan, "is prepared"), (plan, shorter, "is not prepared")):
        (change,) = gq.diff(first, second).changes
        assert (change.kind, change.location, change.message) == ("plan", f"{step.step} {step.target}", message)


def test_digests_and_schemes_of_plans(samples: Path) -> None:
    """Another model, format or preparation is a change of the plan; another smallest range one of a site."""
    plan = gq.plan(samples / "digits_cnn.onnx", rules="fixed_point")
    for name in ("format", "model", "prepared"):
        other = "other" + "0" * 20
        (change,) = gq.diff(plan, replace(plan, **{name: other})).changes
        assert (change.kind, change.location) == ("plan", name)
        assert change.message == f"{getattr(plan, name)[:12]} became {other[:12]}"
    site, *others = plan.sites
    smallest = site.scheme.smallest_range
    for fields, messages in (
        ({"name": "other"}, []),
        ({"smallest_range": 0.5}, [f"smallest_range: {smallest} became 0.5"]),
    ):
        changed = replace(site, scheme=replace(site.scheme, **fields))
        changes = gq.diff(plan, replace(plan, sites=(changed, *others))).changes
        assert [change.message for change in changes] == messages
