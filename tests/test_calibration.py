"""Which tensors are observed, and what is kept of them."""

from collections.abc import Iterator

import numpy as np
import pytest

from graphquant.calibration import Stats, calibrate, needs_data
from graphquant.data import Batches
from graphquant.ir import TensorRef, Use
from graphquant.plans import Plan, Site
from graphquant.ruleset import Scheme
from graphquant.sketch import Sketch, sketch

A, B, C = (TensorRef("", name) for name in "abc")


def site(tensor: TensorRef, *, observe="minmax", **changes) -> Site:
    """A site with one use."""
    scheme = Scheme(dtype="int8", observe=observe)
    return Site(tensor=tensor, graph="", uses=(Use("", f"{tensor.op}_reader", 0),), scheme=scheme, **changes)


def plan(*sites: Site) -> Plan:
    """A plan of these sites."""
    return Plan(format="onnx", model="source", prepared="prepared", rules=(), sites=sites)


def batches(count: int) -> Batches:
    """Samples that hold their own number."""

    def feeds(start, stop):
        return ({"x": np.array([float(i)])} for i in range(start, stop))

    return Batches(count=count, digest="data", feeds=feeds)


class Runner:
    """Computes each tensor from the sample with a function; one that gives None was not reached."""

    def __init__(self, **tensors) -> None:
        """`tensors` are functions of the sample's number."""
        self.tensors = tensors
        self.asked: list[tuple[TensorRef, ...]] = []

    def unwatchable(self, tensors):
        """None is."""
        return {}

    def observe(self, tensors, feeds) -> Iterator[dict]:
        """The values of `tensors` for each feed."""
        self.asked.append(tuple(tensors))
        for feed in feeds:
            yield {
                tensor: self.tensors[tensor.op](float(feed["x"][0])) for tensor in tensors if tensor.op in self.tensors
            }


def ends(stats: Stats, tensor: TensorRef) -> tuple:
    """Smallest and largest value of a tensor."""
    return stats.sketches[tensor].low.tolist(), stats.sketches[tensor].high.tolist()


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, True),
        ({"observe": "absmax"}, True),
        ({"tie": (Use("", "b_reader", 0),)}, True),
        ({"parameter": True}, False),
        ({"range": (-1.0, 1.0)}, False),
        ({"scale": (0.5,), "zero_point": (0,)}, False),
        ({"observe": {"name": "fixed", "low": 0, "high": 6}}, False),
        ({"observe": {"name": "fixed-point", "exponent": -4}}, False),
    ],
)
def test_what_needs_data(changes, needed: bool) -> None:
    """Weights, and what the plan or the scheme gives, need no data; all else does."""
    one = site(A, **changes)
    assert needs_data(plan(one)) == ((one,) if needed else ())


def test_statistics_of_all_samples() -> None:
    """Samples and passes of a loop are merged; NaN is counted; only what is needed is observed."""
    runner = Runner(
        a=lambda i: [np.array([-i, 2 * i])],
        b=lambda i: [np.array([i]), np.array([np.nan, i + 10])],
        c=lambda i: [],
    )
    wanted = plan(site(A), site(B, observe="absmax"), site(A), site(TensorRef("", "w"), parameter=True), site(C))
    calls = []
    stats = calibrate(wanted, runner, batches(3), progress=calls.append)
    assert runner.asked == [(A, B, C)]
    assert list(stats.sketches) == [A, B]
    assert stats.sketches[A] == Sketch(np.array(-2.0), np.array(4.0), 6)
    assert stats.sketches[B] == Sketch(np.array(0.0), np.array(12.0), 9, nan=3)
    assert (stats.samples, stats.data, stats.model) == (3, "data", "prepared")
    assert calls == [1, 2, 3]


def test_what_is_not_reached_is_absent() -> None:
    """A tensor that only some samples reach has those; one with no values, or never shown, has no sketch."""
    runner = Runner(a=lambda i: [np.array([i])] if i == 1 else [], b=lambda i: [np.zeros(0)])
    stats = calibrate(plan(site(A), site(B), site(C)), runner, batches(3))
    assert stats.sketches == {A: sketch(np.array([1.0]))}
    assert stats.samples == 3


def test_values_that_are_all_nan_are_present() -> None:
    """A tensor without finite values is not the same as one that was not reached."""
    stats = calibrate(plan(site(A)), Runner(a=lambda i: [np.array([np.nan])]), batches(2))
    assert stats.sketches[A].empty
    assert stats.sketches[A].nan == 2


def test_per_channel() -> None:
    """The sketch has a range per channel where all sites of the tensor want that axis, else one range."""
    runner = Runner(a=lambda i: [np.array([[i, -1.0], [2.0, 5.0]])])
    assert ends(calibrate(plan(site(A, axis=1)), runner, batches(4)), A) == ([0.0, -1.0], [3.0, 5.0])
    for other in (None, 0):
        for pair in ((1, other), (other, 1), (1, other, 1)):
            stats = calibrate(plan(*(site(A, axis=axis) for axis in pair)), runner, batches(4))
            assert ends(stats, A) == (-1.0, 5.0)


def test_nothing_needed_runs_nothing() -> None:
    """A plan without activations does not run the model."""
    runner = Runner()
    stats = calibrate(plan(site(A, parameter=True)), runner, batches(2))
    assert (stats.sketches, stats.samples, runner.asked) == ({}, 0, [])


def test_the_order_of_samples_does_not_matter() -> None:
    """The same samples in another order give the same sketch."""
    values = {0.0: [np.array([1.0, np.inf])], 1.0: [np.array([-3.0])], 2.0: [np.array([np.nan])]}
    there = calibrate(plan(site(A)), Runner(a=values.__getitem__), batches(3))
    back = calibrate(plan(site(A)), Runner(a=lambda i: values[2 - i]), batches(3))
    assert there.sketches == back.sketches
