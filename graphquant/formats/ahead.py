"""Runs of a model ahead of whoever takes their results."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from concurrent.futures import Future

Fed = TypeVar("Fed")
Result = TypeVar("Result")


def ahead(
    run: Callable[[Fed], Result],
    feeds: Iterable[Fed],
    at_once: int,
    look: Callable[[Result], object] | None = None,
    *,
    threads: int | None = None,
) -> Generator[Result, None, None]:
    """The results of runs in order; no name here keeps them alive.

    The thread that made a result lets `look` see it, once those before it were seen, and goes on with the next run:
    waking another thread for that takes as long as a part of a short run.

    Args:
        run: Makes a result.
        feeds: What to run, read by whoever takes the results.
        at_once: How many results there may be, or runs under way, at a time; one at a time is run when it is asked for.
        look: Is shown each result, in order, by the thread that made it.
        threads: How many runs may be under way, `at_once` by default.
    """
    if at_once == 1:
        for feed in feeds:
            yield _seen(run(feed), look)
        return

    def work(feed: Fed, before: Future[Result] | None) -> Result:
        result = run(feed)
        if before is not None:
            before.result()  # of an error, which whoever takes the results meets there, nothing later is seen
        return _seen(result, look)

    with ThreadPoolExecutor(threads or at_once) as pool:
        under_way: deque[Future[Result]] = deque()
        waiting = look is not None  # for then a thread holds its result until it was seen, and a feed may lie ready
        try:
            for feed in feeds:  # read while others run, so that its run begins as soon as it may
                if len(under_way) == at_once + waiting:
                    yield under_way.popleft().result()
                last = under_way[-1] if look is not None and under_way else None
                under_way.append(pool.submit(work, feed, last))
            while under_way:
                yield under_way.popleft().result()
        finally:
            for left in under_way:
                left.cancel()


def _seen(result: Result, look: Callable[[Result], object] | None) -> Result:
    if look is not None:
        look(result)
    return result


__all__ = ["ahead"]
