"""Several runs at once: the same values in the same order, as one after the other."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from onnx import TensorProto, helper

from graphquant import formats
from graphquant.errors import ModelError
from graphquant.formats.onnx import session as run
from graphquant.formats.prefetch import prefetch
from graphquant.ir import TensorRef

INFO = helper.make_tensor_value_info


@pytest.fixture
def runner(tmp_path):
    """A runner of exp(x) + x, for x of two elements."""
    nodes = [helper.make_node("Exp", ["x"], ["a"], name="a"), helper.make_node("Add", ["a", "x"], ["y"], name="y")]
    interface = [[INFO(name, TensorProto.FLOAT, [2])] for name in "xy"]
    graph = helper.make_graph(nodes, "g", *interface)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    onnx = formats.format_module("onnx")
    return onnx.create_runner(onnx.load(path))


@pytest.mark.parametrize("at_once", [1, 2, 3, 50])
def test_prefetched_values_keep_the_order_of_feeds(runner, at_once: int) -> None:
    """Each feed's values are those that it has alone."""
    tensors = [TensorRef("", "a"), TensorRef("", "y")]
    feeds = [{"x": np.array([n, -n], np.float32)} for n in range(20)]
    observed_values = list(runner.observe(tensors, feeds, max_in_flight=at_once))
    for feed, values in zip(feeds, observed_values, strict=True):
        (single_values,) = runner.observe(tensors, [feed])
        assert [values[tensor][0].tobytes() for tensor in tensors] == [
            single_values[tensor][0].tobytes() for tensor in tensors
        ]


def test_prefetch_raises_a_failed_run_in_its_place(runner) -> None:
    """What came before it is given, and its error raised where its values would have been."""
    feeds = [{"x": np.zeros(2, np.float32)}, {"x": np.zeros(3, np.float32)}, {"x": np.zeros(2, np.float32)}]
    results = runner.observe([TensorRef("", "a")], feeds, max_in_flight=2)
    assert next(results)[TensorRef("", "a")][0].tolist() == [1, 1]
    with pytest.raises(ModelError, match="failed on the inputs x float32"):
        next(results)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_prefetch_reads_a_bounded_number_of_feeds(at_once: int) -> None:
    """While a result is looked at, `at_once` further feeds were read at the most; one at a time reads none ahead."""
    read: list[int] = []

    def feeds():
        for number in range(9):
            read.append(number)
            yield number

    for number, result in enumerate(prefetch(lambda feed: feed * 10, feeds(), at_once)):
        assert result == 10 * number
        assert len(read) <= number + at_once + (at_once > 1)
    assert read == list(range(9))


def test_prefetch_runs_concurrently() -> None:
    """Two runs that wait for each other both end."""
    together = threading.Barrier(2, timeout=30)
    assert list(prefetch(lambda feed: together.wait() * 0 + feed, iter(range(4)), 2)) == [0, 1, 2, 3]


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_on_result_is_called_in_order_with_bounded_results(at_once: int) -> None:
    """Slow and fast runs are seen in the order of their feeds; a run begins only when one of those before was seen."""
    reported: list[int] = []
    peak = [0]

    def run(number: int) -> list[int]:
        peak[0] = max(peak[0], number - len(reported) + 1)
        time.sleep(0.002 * (number % 3 == 0))
        return [number]

    def on_result(result: list[int]) -> None:
        reported.append(result.pop())
        assert reported == list(range(len(reported)))

    assert list(prefetch(run, iter(range(40)), at_once, on_result)) == [[]] * 40
    assert reported == list(range(40))
    assert peak[0] <= at_once


def test_no_result_after_an_error_is_reported() -> None:
    """What comes after a run that fails is not seen, though it was run; the error comes where its result would."""
    reported: list[float] = []
    results = prefetch(lambda feed: 1 / (feed - 3), iter(range(9)), 2, reported.append)
    with pytest.raises(ZeroDivisionError):
        list(results)
    assert reported == [1 / -3, 1 / -2, -1]


def test_error_in_on_result_is_raised() -> None:
    """An error of what looks at results comes to whoever takes them."""
    with pytest.raises(IndexError):
        list(prefetch(lambda feed: [feed], iter(range(9)), 2, lambda result: result[1]))


def test_closing_prefetch_cancels_pending_runs() -> None:
    """Runs that have not begun are left out when nobody wants their results."""
    begun: list[int] = []
    results = prefetch(begun.append, iter(range(1000)), 2)
    next(results)
    results.close()
    assert len(begun) <= 3


@pytest.mark.parametrize(("largest", "sessions"), [(run.SESSION_PER_THREAD_BYTES, 2), (0, 1)])
def test_small_model_has_one_session_per_thread(
    runner, monkeypatch: pytest.MonkeyPatch, largest: int, sessions: int
) -> None:
    """A light model's sessions are in one run at a time, a heavy one has one session for all; values are the same."""
    busy: dict[int, int] = {}
    concurrent_runs: list[int] = []
    original = run.run_session

    def counting_run_session(session, *arguments):
        busy[id(session)] = busy.get(id(session), 0) + 1
        concurrent_runs.append(busy[id(session)])
        try:
            time.sleep(0.002)
            return original(session, *arguments)
        finally:
            busy[id(session)] -= 1

    monkeypatch.setattr(run, "SESSION_PER_THREAD_BYTES", largest)
    monkeypatch.setattr(run, "run_session", counting_run_session)
    tensor, values = TensorRef("", "y"), []
    feeds = [{"x": np.array([n, 0], np.float32)} for n in range(40)]
    list(
        runner.observe(
            [tensor],
            feeds,
            max_in_flight=2,
            on_result=lambda observed_values: values.append(observed_values[tensor][0][0]),
        )
    )
    assert len(busy) == sessions
    assert max(concurrent_runs) == 3 - sessions
    assert np.allclose(values, [np.exp(n) + n for n in range(40)], rtol=1e-5)
