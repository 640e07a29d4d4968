"""Types of calibration data: the requested inputs, and a dataset of feeds with one feed per sample."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread
from typing import TYPE_CHECKING, Protocol

from graphquant.numerics import Array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


Feed = dict[str, Array]
Shape = tuple[int | None, ...]

MAX_FEED_BYTES = 1 << 31
"""Maximum size of one array of one feed. A file that claims more is considered broken or hostile."""


class ModelInput(Protocol):
    """Protocol of a model input: its key, dtype, shape and aliases."""

    @property
    def name(self) -> str:
        """Key of the input in a feed."""

    @property
    def dtype(self) -> str:
        """Name of the dtype, as in NumPy."""

    @property
    def shape(self) -> Shape | None:
        """Static shape; None if even the rank is unknown."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names under which data may contain the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """Requirements on the data.

    Attributes:
        inputs: Inputs of the model.
        samples: Maximum number of samples to use, from the first one on.
        require_finite: Reject NaN and infinite values.
        input_keys: For some inputs, by name, the key under which the data contains them.
        check_in_background: Allow samples to be used while all are still being read for the digest and checks.
    """

    inputs: Sequence[ModelInput]
    samples: int | None = None
    require_finite: bool = True
    input_keys: Mapping[str, str] = field(default_factory=dict)
    check_in_background: bool = False

    def limit_count(self, count: int) -> int:
        """Return the number of samples to use if `count` are available."""
        return count if self.samples is None else min(count, self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Feeds for a model, one per sample. Each iteration starts from the first sample.

    Attributes:
        count: Number of samples.
        digest: Hex SHA-256 of the fed values. It is the same wherever the data is opened and whichever range is read.
            It is a future while samples are read in the background; the future raises a DataError for an invalid
            sample.
        ignored: Keys or files of the data that no input takes, for example "labels".
        random: Whether the values are random, so that the output can report it.
        stacked_shapes: For some inputs, the shape of the first item of a function that was split into several samples.
        open_feeds: Function that opens the data and yields the feeds from one sample index up to another.
    """

    count: int
    digest: str | Future[str]
    ignored: tuple[str, ...] = ()
    random: bool = False
    stacked_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    open_feeds: Callable[[int, int], Iterator[Feed]]

    def final_digest(self) -> str:
        """Return the digest, after waiting until all samples were read.

        Raises:
            DataError: A sample is invalid.
        """
        return self.digest if isinstance(self.digest, str) else self.digest.result()

    def raise_read_errors(self) -> None:
        """Raise the error that reading in the background has met so far.

        Raises:
            DataError: A sample is invalid.
        """
        if not isinstance(self.digest, str) and self.digest.done():
            self.digest.result()

    def feeds_between(self, start: int, stop: int) -> Iterator[Feed]:
        """Yield the feeds from sample `start` up to `stop`.

        Earlier samples are skipped as cheaply as the format allows.
        """
        return self.open_feeds(min(start, self.count), min(stop, self.count))

    def __iter__(self) -> Iterator[Feed]:
        """Yield one dictionary of input names and arrays for each sample."""
        return self.feeds_between(0, self.count)

    def __len__(self) -> int:
        return self.count


def run_in_background(task: Callable[[], str]) -> Future[str]:
    """Run `task` on a daemon thread and return a future of its result. The program does not wait for it at exit."""
    future: Future[str] = Future()

    def run_task() -> None:
        try:
            future.set_result(task())
        except BaseException as error:  # noqa: BLE001  # raised again by Future.result
            future.set_exception(error)

    Thread(target=run_task, daemon=True).start()
    return future
