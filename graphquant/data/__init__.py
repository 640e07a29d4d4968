"""Calibration data, whatever it lies in, as one feed per sample. docs/data.md says what a spec may be."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from graphquant.data.base import Batches, Feed, Input, Wanted
from graphquant.data.spec import KINDS, parse
from graphquant.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphquant.data.spec import Source

__all__ = ["Batches", "Feed", "Input", "check_spec", "open_data"]


def open_data(
    spec: str, inputs: Sequence[Input], *, samples: int | None = None, finite: bool = True, meanwhile: bool = False
) -> Batches:
    """The data that `spec` names, checked against the model's `inputs`.

    Args:
        spec: A data spec.
        inputs: What the model must be fed.
        samples: Use only that many samples, the first ones.
        finite: Refuse NaN and infinite values.
        meanwhile: Files that are read once to check them and for their digest may be read so while samples are used;
            `Batches.content` tells the outcome.

    Raises:
        DataError: The data cannot be read, or does not fit the inputs.
        MissingDependencyError: A package that this kind of data needs is not installed.
    """
    if samples is not None and samples < 1:
        raise DataError(f"{samples} samples are asked for. Ask for at least one.")
    source = parse(spec)
    opener: Callable[[Source, Wanted], Batches] = import_module(KINDS[source.kind].module).batches
    wanted = Wanted(inputs=inputs, samples=samples, finite=finite, keys=source.inputs, meanwhile=meanwhile)
    return opener(source, wanted)


def check_spec(spec: str) -> None:
    """Refuses a spec that names nothing, also where the data will not be read.

    Raises:
        DataError: It is no kind of data that is known, there is no such file, or a key is none of that kind's.
        MissingDependencyError: fsspec is needed and not installed.
    """
    parse(spec)
