"""What calibration data is: feeds for a model's inputs, one per sample."""

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
"""Largest size of one array of one feed; a file that claims more is taken for broken or hostile."""


class ModelInput(Protocol):
    """What is to be known of an input: the key a runner takes, its dtype and shape, and other names for it."""

    @property
    def name(self) -> str:
        """The key a runner takes."""

    @property
    def dtype(self) -> str:
        """numpy-like dtype name."""

    @property
    def shape(self) -> Shape | None:
        """Static shape, None if even the rank is unknown."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names under which data may hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """What is asked of the data.

    Attributes:
        inputs: What the model must be fed.
        samples: Use only that many samples, the first ones.
        require_finite: Refuse NaN and infinite values.
        input_keys: For some inputs, by name, the key under which the data holds them.
        check_in_background: Samples may be used while all are still read to check them and for the digest.
    """

    inputs: Sequence[ModelInput]
    samples: int | None = None
    require_finite: bool = True
    input_keys: Mapping[str, str] = field(default_factory=dict)
    check_in_background: bool = False

    def limit_count(self, count: int) -> int:
        """How many of `count` samples are used."""
        return count if self.samples is None else min(count, self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Feeds for a model, one per sample; iterating again starts anew.

    Attributes:
        count: Number of samples.
        digest: Hex SHA-256 of what is fed; the same wherever the data is opened, whatever span is read. A future of it
            where all samples are still read meanwhile, with a DataError if there is something wrong with one.
        ignored: Keys or files of the data that no input takes ("labels").
        random: Whether the values are random, so that the output can say so.
        stacked_shapes: For some inputs the shape of the first item of a function that makes several samples of it.
        open_feeds: Opens the data and gives the feeds of the samples from one index up to another.
    """

    count: int
    digest: str | Future[str]
    ignored: tuple[str, ...] = ()
    random: bool = False
    stacked_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    open_feeds: Callable[[int, int], Iterator[Feed]]

    def final_digest(self) -> str:
        """The digest, once all samples were read.

        Raises:
            DataError: There is something wrong with one.
        """
        return self.digest if isinstance(self.digest, str) else self.digest.result()

    def raise_read_errors(self) -> None:
        """Tells what reading the samples meanwhile has found wrong so far.

        Raises:
            DataError: There is something wrong with one.
        """
        if not isinstance(self.digest, str) and self.digest.done():
            self.digest.result()

    def feeds_between(self, start: int, stop: int) -> Iterator[Feed]:
        """The feeds of the samples `start` up to `stop`; the ones before are skipped as cheaply as the kind allows."""
        return self.open_feeds(min(start, self.count), min(stop, self.count))

    def __iter__(self) -> Iterator[Feed]:
        """One dict of input name to array for each sample."""
        return self.feeds_between(0, self.count)

    def __len__(self) -> int:
        return self.count


def run_in_background(task: Callable[[], str]) -> Future[str]:
    """What `task`, which goes on meanwhile on a thread of its own, gives; leaving the program does not wait for it."""
    future: Future[str] = Future()

    def run_task() -> None:
        try:
            future.set_result(task())
        except BaseException as error:  # noqa: BLE001  # whoever asks for the result gets it
            future.set_exception(error)

    Thread(target=run_task, daemon=True).start()
    return future
