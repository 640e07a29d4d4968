"""Runs of a model ahead of whoever takes their results."""

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
    """The results of runs in order; no name here keeps them alive.

    The thread that made a result lets `on_result` see it, once those before it were seen, and goes on with the next run:
    waking another thread for that takes as long as a part of a short run.

    Args:
        run: Makes a result.
        feeds: What to run, read by whoever takes the results.
        max_in_flight: How many results there may be, or runs under way, at a time; one at a time is run when it is asked for.
        on_result: Is shown each result, in order, by the thread that made it.
        threads: How many runs may be under way, `max_in_flight` by default.
    """
    if max_in_flight == 1:
        for feed in feeds:
            yield _report_result(run(feed), on_result)
        return

    def run_and_report(feed: FeedT, previous: Future[ResultT] | None) -> ResultT:
        result = run(feed)
        if previous is not None:
            previous.result()  # of an error, which whoever takes the results meets there, nothing later is seen
        return _report_result(result, on_result)

    with ThreadPoolExecutor(threads or max_in_flight) as pool:
        pending: deque[Future[ResultT]] = deque()
        extra_slot = (
            on_result is not None
        )  # for then a thread holds its result until it was seen, and a feed may lie ready
        try:
            for feed in feeds:  # read while others run, so that its run begins as soon as it may
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
