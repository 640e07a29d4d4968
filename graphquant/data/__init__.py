"""Calibration data: `FILE.npz` or `random:N`, as one feed per sample."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphquant.data.base import Batches, Feed, Input
from graphquant.data.npz import npz_batches
from graphquant.data.random import random_batches
from graphquant.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Batches", "Feed", "Input", "check_spec", "open_data"]

RANDOM = "random:"


def open_data(spec: str, inputs: Sequence[Input], *, samples: int | None = None) -> Batches:
    """The data that `spec` names, checked against the model's `inputs`.

    Args:
        spec: Path of an `.npz` file whose keys are input names, or `random:N` for N random samples.
        inputs: What the model must be fed.
        samples: Use only that many samples, the first ones.

    Raises:
        DataError: The file cannot be read, or does not fit the inputs.
    """
    if samples is not None and samples < 1:
        raise DataError(f"{samples} samples are asked for. Ask for at least one.")
    check_spec(spec)
    if spec.startswith(RANDOM):
        return random_batches(spec, inputs, samples)
    return npz_batches(Path(spec), inputs, samples)


def check_spec(spec: str) -> None:
    """Refuses a spec that names nothing, also where the data will not be read.

    Raises:
        DataError: It is no kind of data that is known, or there is no such file.
    """
    if spec.startswith(RANDOM):
        return
    path = Path(spec)
    if path.suffix != ".npz":
        raise DataError(
            f"{spec} is no calibration data that is known. Give an .npz file, or random:8 to try things out."
        )
    if not path.is_file():
        raise DataError(f"There is no file {path}. Give the path of an .npz file.")
