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


class Input(Protocol):
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
class Wanted:
    """What is asked of the data.

    Attributes:
        inputs: What the model must be fed.
        samples: Use only that many samples, the first ones.
        finite: Refuse NaN and infinite values.
        keys: For some inputs, by name, the key under which the data holds them.
        meanwhile: Samples may be used while all are still read to check them and for the digest.
    """

    inputs: Sequence[Input]
    samples: int | None = None
    finite: bool = True
    keys: Mapping[str, str] = field(default_factory=dict)
    meanwhile: bool = False

    def limit(self, count: int) -> int:
        """How many of `count` samples are used."""
        return count if self.samples is None else min(count, self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Feeds for a model, one per sample; iterating again starts anew.

    Attributes:
        count: Number of samples.
        digest: Hex SHA-256 of what is fed; the same wherever the data is opened, whatever span is read. A future of it
            where all samples are still read meanwhile, with a DataError if there is something wrong with one.
        ignored: Keys or files of the data that no input takes ("labels").
        random: Whether the values are random, so that the output can say so.
        stacked: For some inputs the shape of the first item of a function that makes several samples of it.
        feeds: Opens the data and gives the feeds of the samples from one index up to another.
    """

    count: int
    digest: str | Future[str]
    ignored: tuple[str, ...] = ()
    random: bool = False
    stacked: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    feeds: Callable[[int, int], Iterator[Feed]]

    def content(self) -> str:
        """The digest, once all samples were read.

        Raises:
            DataError: There is something wrong with one.
        """
        return self.digest if isinstance(self.digest, str) else self.digest.result()

    def check(self) -> None:
        """Tells what reading the samples meanwhile has found wrong so far.

        Raises:
            DataError: There is something wrong with one.
        """
        if not isinstance(self.digest, str) and self.digest.done():
            self.digest.result()

    def span(self, start: int, stop: int) -> Iterator[Feed]:
        """The feeds of the samples `start` up to `stop`; the ones before are skipped as cheaply as the kind allows."""
        return self.feeds(min(start, self.count), min(stop, self.count))

    def __iter__(self) -> Iterator[Feed]:
        """One dict of input name to array for each sample."""
        return self.span(0, self.count)

    def __len__(self) -> int:
        return self.count


def behind(work: Callable[[], str]) -> Future[str]:
    """What `work`, which goes on meanwhile on a thread of its own, gives; leaving the program does not wait for it."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # whoever asks for the result gets it
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
