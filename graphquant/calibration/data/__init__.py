"""Calibration data, whatever it lies in, as one feed per sample. docs/data.md says what a spec may be."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from graphquant.calibration.data.base import DataRequest, Dataset, Feed, ModelInput
from graphquant.calibration.data.spec import DATA_KINDS, parse_data_spec
from graphquant.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphquant.calibration.data.spec import DataSource


__all__ = ["Dataset", "Feed", "ModelInput", "check_data_spec", "open_data"]


def open_data(
    spec: str,
    inputs: Sequence[ModelInput],
    *,
    samples: int | None = None,
    require_finite: bool = True,
    check_in_background: bool = False,
) -> Dataset:
    """The data that `spec` names, checked against the model's `inputs`.

    Args:
        spec: A data spec.
        inputs: What the model must be fed.
        samples: Use only that many samples, the first ones.
        require_finite: Refuse NaN and infinite values.
        check_in_background: Files that are read once to check them and for their digest may be read so while samples are used;
            `Batches.content` tells the outcome.

    Raises:
        DataError: The data cannot be read, or does not fit the inputs.
        MissingDependencyError: A package that this kind of data needs is not installed.
    """
    if samples is not None and samples < 1:
        raise DataError(f"{samples} samples are asked for. Ask for at least one.")
    source = parse_data_spec(spec)
    module, function = DATA_KINDS[source.kind].opener.split(":")
    opener: Callable[[DataSource, DataRequest], Dataset] = getattr(import_module(f"{__name__}.{module}"), function)
    request = DataRequest(
        inputs=inputs,
        samples=samples,
        require_finite=require_finite,
        input_keys=source.input_keys,
        check_in_background=check_in_background,
    )
    return opener(source, request)


def check_data_spec(spec: str) -> None:
    """Refuses a spec that names nothing, also where the data will not be read.

    Raises:
        DataError: It is no kind of data that is known, there is no such file, or a key is none of that kind's.
        MissingDependencyError: fsspec is needed and not installed.
    """
    parse_data_spec(spec)
