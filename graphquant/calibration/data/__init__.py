"""Calibration data in any supported format, read as one feed per sample. See docs/data.md for data specs."""

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
    """Check that a data spec is valid without reading the data.

    Raises:
        DataError: The kind of data is unknown, the file is missing, or the kind has no such key.
        MissingDependencyError: fsspec is needed and not installed.
    """
    parse_data_spec(spec)
