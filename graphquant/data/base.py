"""What calibration data is: feeds for a model's inputs, one per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np

from graphquant.numerics import Array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
class Batches:
    """Feeds for a model, one per sample; iterating again starts anew.

    Attributes:
        count: Number of samples.
        digest: Hex SHA-256 over names, dtypes, shapes and values of what is fed.
        ignored: Keys of the file that no input takes ("labels").
        random: Whether the values are random, so that the output can say so.
        feeds: Opens the data and gives the feeds.
    """

    count: int
    digest: str
    ignored: tuple[str, ...] = ()
    random: bool = False
    feeds: Callable[[], Iterator[Feed]]

    def __iter__(self) -> Iterator[Feed]:
        """One dict of input name to array for each sample."""
        return self.feeds()

    def __len__(self) -> int:
        return self.count


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype called `name`; that of Python objects for strings and whatever numpy does not have."""
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        return np.dtype(object)


def kind_of(dtype: np.dtype[Any]) -> str:
    """What can be converted losslessly in kind: "int", "float", or the dtype's own name."""
    if dtype.kind in "iu":
        return "int"
    return "float" if dtype.kind == "f" or dtype == ml_dtypes.bfloat16 else dtype.name


def shape_text(shape: Shape) -> str:
    """`shape` for people, "?" for what is not known."""
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"
