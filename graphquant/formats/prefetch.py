"""Runs of a model that start before their results are requested."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from concurrent.futures import Future


FeedT = TypeVar("FeedT")
ResultT = TypeVar("ResultT")


def prefetch(
    run: Callable[[FeedT], ResultT],
    feeds: Iterable[FeedT],
    max_in_flight: int,
    on_result: Callable[[ResultT], object] | None = None,
    *,
    threads: int | None = None,
) -> Generator[ResultT, None, None]:
    """Yield the results of runs in order, and keep no reference to a result that was yielded.

    The thread that computed a result also calls `on_result` for it, after all earlier results were reported, and then
    continues with the next run. Waking another thread would take as long as part of a short run.

    Args:
        run: Computes the result of one feed.
        feeds: Feeds, read by the thread that consumes the results.
        max_in_flight: Maximum number of results and runs in progress. With 1, each run starts when its result is
            requested.
        on_result: Receives each result in order, on the thread that computed it.
        threads: Maximum number of concurrent runs, `max_in_flight` by default.
    """
    if max_in_flight == 1:
        for feed in feeds:
            yield _report_result(run(feed), on_result)
        return

    def run_and_report(feed: FeedT, previous: Future[ResultT] | None) -> ResultT:
        result = run(feed)
        if previous is not None:
            previous.result()  # raises if an earlier run failed, so that no later result is reported
        return _report_result(result, on_result)

    with ThreadPoolExecutor(threads or max_in_flight) as pool:
        pending: deque[Future[ResultT]] = deque()
        extra_slot = on_result is not None  # a thread holds its result until it is reported, so one more feed may wait
        try:
            for feed in feeds:  # read during other runs, so that the next run can start at once
                if len(pending) == max_in_flight + extra_slot:
                    yield pending.popleft().result()
                predecessor = pending[-1] if on_result is not None and pending else None
                pending.append(pool.submit(run_and_report, feed, predecessor))
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _report_result(result: ResultT, on_result: Callable[[ResultT], object] | None) -> ResultT:
    if on_result is not None:
        on_result(result)
    return result
