"""The request for calibration data, and a dataset of feeds with one feed per sample."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from graphquant.calibration.data.spec import DATA_KINDS, parse_data_spec
from graphquant.errors import DataError
from graphquant.numerics import Array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from graphquant.calibration.data.spec import DataSource
    from graphquant.formats import InputSpec

Feed = dict[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """The source of the data and the requirements on it.

    Attributes:
        source: The parsed data spec.
        inputs: Inputs of the model.
        samples: Maximum number of samples to use, from the first one on.
        require_finite: Reject NaN and infinite values.
        check_in_background: Allow samples to be used while all are still being read for the digest and checks.
    """

    source: DataSource
    inputs: Sequence[InputSpec]
    samples: int | None
    require_finite: bool
    check_in_background: bool

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs of the model."""
        return [model_input.name for model_input in self.inputs]

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
        open_feeds: Function that opens the data and yields the feeds from one sample index up to another. It skips
            earlier samples as cheaply as the format allows.
    """

    count: int
    digest: str | Future[str]
    ignored: tuple[str, ...] = ()
    random: bool = False
    stacked_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    open_feeds: Callable[[int, int], Iterator[Feed]]

    def final_digest(self) -> str:
        """Return the digest, after waiting until all samples were read. Raises a DataError for an invalid sample."""
        return self.digest if isinstance(self.digest, str) else self.digest.result()

    def raise_read_errors(self) -> None:
        """Raise the DataError that reading in the background has met so far."""
        if isinstance(self.digest, Future) and self.digest.done():
            self.digest.result()

    def feeds_between(self, start: int, stop: int) -> Iterator[Feed]:
        """Yield the feeds from sample `start` up to `stop`: one dictionary of input names and arrays for each."""
        return self.open_feeds(min(start, self.count), min(stop, self.count))

    def __iter__(self) -> Iterator[Feed]:
        return self.feeds_between(0, self.count)

    def __len__(self) -> int:
        return self.count


def open_data(
    spec: str,
    inputs: Sequence[InputSpec],
    *,
    samples: int | None = None,
    require_finite: bool = True,
    check_in_background: bool = False,
) -> Dataset:
    """Open the data that `spec` names and check it against the `inputs` of the model.

    Args:
        spec: A data spec.
        inputs: Inputs of the model.
        samples: Maximum number of samples to use, from the first one on.
        require_finite: Reject NaN and infinite values.
        check_in_background: Allow samples to be used while a file that must be read completely, for its digest and
            checks, is still being read. `Dataset.final_digest` reports the outcome.

    Raises:
        DataError: The data cannot be read or does not fit the inputs.
        MissingDependencyError: A package that this kind of data needs is not installed.
    """
    if samples is not None and samples < 1:
        raise DataError(f"{samples} samples were requested. Request at least one.")
    request = DataRequest(
        source=parse_data_spec(spec),
        inputs=inputs,
        samples=samples,
        require_finite=require_finite,
        check_in_background=check_in_background,
    )
    module, function = DATA_KINDS[request.source.kind].opener.split(":")
    dataset: Dataset = getattr(import_module(f"graphquant.calibration.data.{module}"), function)(request)
    return dataset
