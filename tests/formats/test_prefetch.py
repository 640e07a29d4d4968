"""Prefetching: concurrent runs give the same values in the same order as sequential runs."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from onnx import TensorProto, helper

from graphquant import formats
from graphquant.errors import ModelError
from graphquant.formats import prefetch
from graphquant.formats.onnx import runner as onnx_runner
from graphquant.ir import TensorRef

INFO = helper.make_tensor_value_info


@pytest.fixture
def runner(tmp_path):
    """Return a runner of exp(x) + x, for x of two elements."""
    nodes = [helper.make_node("Exp", ["x"], ["a"], name="a"), helper.make_node("Add", ["a", "x"], ["y"], name="y")]
    interface = [[INFO(name, TensorProto.FLOAT, [2])] for name in "xy"]
    graph = helper.make_graph(nodes, "g", *interface)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    onnx = formats.format_module("onnx")
    return onnx.create_runner(onnx.load(path))


@pytest.mark.parametrize("max_in_flight", [1, 2, 3, 50])
def test_prefetched_values_keep_the_order_of_feeds(runner, max_in_flight: int) -> None:
    """Each feed gives the same values as when it is run alone."""
    tensors = [TensorRef("", "a"), TensorRef("", "y")]
    feeds = [{"x": np.array([n, -n], np.float32)} for n in range(20)]
    observed_values = list(runner.observe(tensors, feeds, max_in_flight=max_in_flight))
    for feed, values in zip(feeds, observed_values, strict=True):
        (single_values,) = runner.observe(tensors, [feed])
        assert [values[tensor][0].tobytes() for tensor in tensors] == [
            single_values[tensor][0].tobytes() for tensor in tensors
        ]


def test_prefetch_raises_a_failed_run_in_its_place(runner) -> None:
    """Earlier results are yielded, and the error is raised in place of the failed result."""
    feeds = [{"x": np.zeros(2, np.float32)}, {"x": np.zeros(3, np.float32)}, {"x": np.zeros(2, np.float32)}]
    results = runner.observe([TensorRef("", "a")], feeds, max_in_flight=2)
    assert next(results)[TensorRef("", "a")][0].tolist() == [1, 1]
    with pytest.raises(ModelError, match=r"failed .* x float32\[3\]"):
        next(results)


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_prefetch_reads_a_bounded_number_of_feeds(max_in_flight: int) -> None:
    """While a result is consumed, at most `max_in_flight` further feeds have been read; none if that is 1."""
    read: list[int] = []

    def feeds():
        for number in range(9):
            read.append(number)
            yield number

    for number, result in enumerate(prefetch(lambda feed: feed * 10, feeds(), max_in_flight)):
        assert result == 10 * number
        assert len(read) <= number + max_in_flight + (max_in_flight > 1)
    assert read == list(range(9))


def test_prefetch_runs_concurrently() -> None:
    """Two runs that wait for each other both finish."""
    together = threading.Barrier(2, timeout=600)
    assert list(prefetch(lambda feed: together.wait() * 0 + feed, iter(range(4)), 2)) == [0, 1, 2, 3]


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_on_result_is_called_in_order_with_bounded_results(max_in_flight: int) -> None:
    """Slow and fast runs are reported in the order of their feeds; the number of unreported results is bounded."""
    reported: list[int] = []
    peak = [0]
    ended = [threading.Event() for _ in range(40)]

    def run(number: int) -> list[int]:
        peak[0] = max(peak[0], number - len(reported) + 1)
        if max_in_flight > 1 and number % 3 == 0 and number + 1 < len(ended):
            assert ended[number + 1].wait(600)  # the next run is faster
        ended[number].set()
        return [number]

    def on_result(result: list[int]) -> None:
        reported.append(result.pop())
        assert reported == list(range(len(reported)))

    assert list(prefetch(run, iter(range(40)), max_in_flight, on_result)) == [[]] * 40
    assert reported == list(range(40))
    assert peak[0] <= max_in_flight


def test_no_result_after_an_error_is_reported() -> None:
    """Results after a failed run are not reported, and the error is raised in place of its result."""
    reported: list[float] = []
    results = prefetch(lambda feed: 1 / (feed - 3), iter(range(9)), 2, reported.append)
    with pytest.raises(ZeroDivisionError):
        list(results)
    assert reported == [1 / -3, 1 / -2, -1]


def test_error_in_on_result_is_raised() -> None:
    """An error in `on_result` is raised for the consumer."""
    with pytest.raises(IndexError):
        list(prefetch(lambda feed: [feed], iter(range(9)), 2, lambda result: result[1]))


def test_closing_prefetch_cancels_pending_runs() -> None:
    """Runs that have not started are cancelled when the consumer stops."""
    begun: list[int] = []
    results = prefetch(begun.append, iter(range(1000)), 2)
    next(results)
    results.close()
    assert len(begun) <= 3


@pytest.mark.parametrize(("largest", "sessions"), [(onnx_runner.SESSION_PER_THREAD_BYTES, 2), (0, 1)])
def test_small_model_has_one_session_per_thread(
    runner, monkeypatch: pytest.MonkeyPatch, largest: int, sessions: int
) -> None:
    """A small model has a session per thread, a large one has one for all; the values are the same."""
    busy: dict[int, int] = {}
    concurrent_runs: list[int] = []
    together, runs = threading.Barrier(2), itertools.count()
    original = onnx_runner.run_session

    def counting_run_session(session, *arguments):
        busy[id(session)] = busy.get(id(session), 0) + 1
        concurrent_runs.append(busy[id(session)])
        try:
            if next(runs) < 2:
                together.wait(600)
            return original(session, *arguments)
        finally:
            busy[id(session)] -= 1

    monkeypatch.setattr(onnx_runner, "SESSION_PER_THREAD_BYTES", largest)
    monkeypatch.setattr(onnx_runner, "run_session", counting_run_session)
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
