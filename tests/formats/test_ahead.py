"""Several runs at once: the same values in the same order, as one after the other."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from onnx import TensorProto, helper

from graphquant import formats
from graphquant.errors import ModelError
from graphquant.formats.ahead import ahead
from graphquant.formats.onnx import run
from graphquant.ir import TensorRef

INFO = helper.make_tensor_value_info


@pytest.fixture
def runner(tmp_path):
    """A runner of exp(x) + x, for x of two elements."""
    nodes = [helper.make_node("Exp", ["x"], ["a"], name="a"), helper.make_node("Add", ["a", "x"], ["y"], name="y")]
    ends = [[INFO(name, TensorProto.FLOAT, [2])] for name in "xy"]
    graph = helper.make_graph(nodes, "g", *ends)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    onnx = formats.module("onnx")
    return onnx.runner(onnx.load(path))


@pytest.mark.parametrize("at_once", [1, 2, 3, 50])
def test_values_come_in_order(runner, at_once: int) -> None:
    """Each feed's values are those that it has alone."""
    tensors = [TensorRef("", "a"), TensorRef("", "y")]
    feeds = [{"x": np.array([n, -n], np.float32)} for n in range(20)]
    found = list(runner.observe(tensors, feeds, at_once=at_once))
    for feed, seen in zip(feeds, found, strict=True):
        (alone,) = runner.observe(tensors, [feed])
        assert [seen[tensor][0].tobytes() for tensor in tensors] == [alone[tensor][0].tobytes() for tensor in tensors]


def test_a_run_that_fails_is_said(runner) -> None:
    """What came before it is given, and its error raised where its values would have been."""
    feeds = [{"x": np.zeros(2, np.float32)}, {"x": np.zeros(3, np.float32)}, {"x": np.zeros(2, np.float32)}]
    seen = runner.observe([TensorRef("", "a")], feeds, at_once=2)
    assert next(seen)[TensorRef("", "a")][0].tolist() == [1, 1]
    with pytest.raises(ModelError, match="failed on the inputs x float32"):
        next(seen)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_no_more_is_read_than_may_run(at_once: int) -> None:
    """While a result is looked at, `at_once` further feeds were read at the most; one at a time reads none ahead."""
    read: list[int] = []

    def feeds():
        for number in range(9):
            read.append(number)
            yield number

    for number, result in enumerate(ahead(lambda feed: feed * 10, feeds(), at_once)):
        assert result == 10 * number
        assert len(read) <= number + at_once + (at_once > 1)
    assert read == list(range(9))


def test_runs_are_under_way_together() -> None:
    """Two runs that wait for each other both end."""
    together = threading.Barrier(2, timeout=30)
    assert list(ahead(lambda feed: together.wait() * 0 + feed, iter(range(4)), 2)) == [0, 1, 2, 3]


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_results_are_seen_in_order_one_at_a_time_and_never_more_than_may_be_there(at_once: int) -> None:
    """Slow and fast runs are seen in the order of their feeds; a run begins only when one of those before was seen."""
    seen: list[int] = []
    most = [0]

    def one(number: int) -> list[int]:
        most[0] = max(most[0], number - len(seen) + 1)
        time.sleep(0.002 * (number % 3 == 0))
        return [number]

    def look(result: list[int]) -> None:
        seen.append(result.pop())
        assert seen == list(range(len(seen)))

    assert list(ahead(one, iter(range(40)), at_once, look)) == [[]] * 40
    assert seen == list(range(40))
    assert most[0] <= at_once


def test_nothing_is_seen_behind_an_error() -> None:
    """What comes after a run that fails is not seen, though it was run; the error comes where its result would."""
    seen: list[float] = []
    results = ahead(lambda feed: 1 / (feed - 3), iter(range(9)), 2, seen.append)
    with pytest.raises(ZeroDivisionError):
        list(results)
    assert seen == [1 / -3, 1 / -2, -1]


def test_what_fails_while_seen_is_said() -> None:
    """An error of what looks at results comes to whoever takes them."""
    with pytest.raises(IndexError):
        list(ahead(lambda feed: [feed], iter(range(9)), 2, lambda result: result[1]))


def test_leaving_early_runs_no_more() -> None:
    """Runs that have not begun are left out when nobody wants their results."""
    begun: list[int] = []
    results = ahead(begun.append, iter(range(1000)), 2)
    next(results)
    results.close()
    assert len(begun) <= 3


@pytest.mark.parametrize(("largest", "sessions"), [(run.OWN, 2), (0, 1)])
def test_each_thread_of_a_light_model_has_a_session_of_its_own(
    runner, monkeypatch: pytest.MonkeyPatch, largest: int, sessions: int
) -> None:
    """A light model's sessions are in one run at a time, a heavy one has one session for all; values are the same."""
    busy: dict[int, int] = {}
    most: list[int] = []
    original = run.run_session

    def watched(session, *arguments):
        busy[id(session)] = busy.get(id(session), 0) + 1
        most.append(busy[id(session)])
        try:
            time.sleep(0.002)
            return original(session, *arguments)
        finally:
            busy[id(session)] -= 1

    monkeypatch.setattr(run, "OWN", largest)
    monkeypatch.setattr(run, "run_session", watched)
    tensor, seen = TensorRef("", "y"), []
    feeds = [{"x": np.array([n, 0], np.float32)} for n in range(40)]
    list(runner.observe([tensor], feeds, at_once=2, look=lambda found: seen.append(found[tensor][0][0])))
    assert len(busy) == sessions
    assert max(most) == 3 - sessions
    assert np.allclose(seen, [np.exp(n) + n for n in range(40)], rtol=1e-5)
