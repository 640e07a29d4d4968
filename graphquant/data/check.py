"""What calibration data looks like beside the inputs it feeds, and what is probably wrong with it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from graphquant.data.fit import kind_of, not_finite, numpy_dtype, shape_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from graphquant.data.base import Batches, Input, Shape
    from graphquant.numerics import Array

FEW = 32
"""Samples under which ranges depend on which ones they are."""

BRIGHT = 128
"""A largest value from here to 255, where nothing is negative, looks like a pixel that nobody scaled."""

LABELS = frozenset({"label", "labels", "target", "targets", "y", "class", "position 1"})
"""Keys that nobody expects an input to take."""

COLOURS = 3

LOOKED_AT = 32
"""Samples whose neighbouring values are compared."""

SWAPPED = 0.8
"""How much more alike the values of a layout's neighbours must be before it is believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSummary:
    """What an input is fed, over all samples.

    Attributes:
        name: The input.
        dtype: Its dtype.
        shape: Its shape in the model.
        given: The shape of a feed; None for an axis whose size differs from sample to sample, or for all of them.
        low: Smallest finite value; None where there is none.
        high: Largest finite value.
        mean: Mean of the finite values.
        nan: Number of NaN.
        inf: Number of infinite values.
    """

    name: str
    dtype: str
    shape: Shape | None
    given: Shape | None
    low: float | None
    high: float | None
    mean: float | None
    nan: int
    inf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is probably wrong.

    Attributes:
        kind: Its name, for programs.
        input: The input it is about, if about one.
        says: What is wrong, then what to do.
    """

    kind: str
    input: str | None = None
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Calibration data beside the inputs it feeds.

    Attributes:
        samples: Number of samples.
        digest: Digest of the data.
        inputs: What each input is fed.
        ignored: Keys and files that no input takes.
        findings: What is probably wrong.
    """

    samples: int
    digest: str
    inputs: tuple[InputSummary, ...]
    ignored: tuple[str, ...]
    findings: tuple[Finding, ...]


@dataclass(slots=True)
class _Seen:
    """What was seen of an input so far."""

    shape: Shape | None = None
    low: float = np.inf
    high: float = -np.inf
    total: float = 0.0
    finite: int = 0
    nan: int = 0
    inf: int = 0
    whole: bool = True
    digests: set[bytes] = field(default_factory=set)
    values: int = 0
    near: float = 0.0
    far: float = 0.0


def check_data(batches: Batches, inputs: Sequence[Input]) -> DataReport:
    """Reads all of the data once; it must have been opened with `finite=False` for NaN to be counted.

    Raises:
        DataError: A sample cannot be read, or does not fit.
    """
    seen = {taker.name: _Seen() for taker in inputs}
    for index, feed in enumerate(batches):
        for taker in inputs:
            _look(seen[taker.name], feed[taker.name])
            if index < LOOKED_AT:
                _compare(seen[taker.name], taker, feed[taker.name])
    return DataReport(
        samples=batches.count,
        digest=batches.content(),
        inputs=tuple(_summary(taker, seen[taker.name]) for taker in inputs),
        ignored=batches.ignored,
        findings=(
            *_of_all(batches),
            *(found for taker in inputs for found in _of_one(taker, seen[taker.name], batches)),
        ),
    )


def _look(seen: _Seen, values: Array) -> None:
    """Adds the values of one feed."""
    if not seen.values:
        seen.shape = values.shape
    elif seen.shape is not None:
        alike = len(seen.shape) == len(values.shape)
        seen.shape = (
            tuple(a if a == b else None for a, b in zip(seen.shape, values.shape, strict=True)) if alike else None
        )
    seen.values += values.size
    if len(seen.digests) <= 1:  # only whether they are all the same is asked
        text = values.dtype.hasobject
        content = repr(values.tolist()).encode() if text else np.ascontiguousarray(values).tobytes()
        seen.digests.add(hashlib.sha256(f"{values.shape}".encode() + content).digest())
    if kind_of(values.dtype) not in {"int", "float"}:
        return
    wrong = not_finite(values)
    numbers = values[~wrong].astype(np.float64) if wrong.any() else values.astype(np.float64)
    nan = int(np.isnan(values.astype(np.float64)).sum()) if wrong.any() else 0
    seen.nan += nan
    seen.inf += int(wrong.sum()) - nan
    if numbers.size:
        seen.low = min(seen.low, float(numbers.min()))
        seen.high = max(seen.high, float(numbers.max()))
        seen.total += float(numbers.sum())
        seen.finite += numbers.size
        seen.whole = seen.whole and bool((numbers == np.rint(numbers)).all())


def _compare(seen: _Seen, taker: Input, values: Array) -> None:
    """Adds how unlike values are that lie a row apart if the layout is what it says, and if it is the other one.

    In a picture the pixel below is much like the one above. Where channels come first it lies one width further, where
    they come last one width times the channels.
    """
    layout = _picture(taker, values.shape)
    if layout is None or kind_of(values.dtype) not in {"int", "float"}:
        return
    width = values.shape[3] if layout == "NCHW" else values.shape[2]
    for picture in values.reshape(len(values), -1).astype(np.float64):
        one = float(np.abs(picture[width:] - picture[:-width]).mean())
        three = float(np.abs(picture[width * COLOURS :] - picture[: -width * COLOURS]).mean())
        seen.near += one if layout == "NCHW" else three
        seen.far += three if layout == "NCHW" else one


def _picture(taker: Input, shape: Sequence[int]) -> str | None:
    """The layout of colour pictures that the input takes, where its shape tells; None if these are none."""
    static = taker.shape
    if static is None or len(static) != 4 or len(shape) != 4 or min(shape[1:]) <= 1:  # noqa: PLR2004  # N, C, H and W
        return None
    first, last = shape[1] == COLOURS, shape[3] == COLOURS
    if first == last or (COLOURS not in {static[1], static[3]}):
        return None
    return "NCHW" if first else "NHWC"


def _summary(taker: Input, seen: _Seen) -> InputSummary:
    any_ = seen.finite > 0
    return InputSummary(
        name=taker.name,
        dtype=taker.dtype,
        shape=taker.shape,
        given=seen.shape,
        low=seen.low if any_ else None,
        high=seen.high if any_ else None,
        mean=seen.total / seen.finite if any_ else None,
        nan=seen.nan,
        inf=seen.inf,
    )


def _of_all(batches: Batches) -> Iterable[Finding]:
    if batches.random:
        yield Finding(kind="random", says="The data is random. Give samples like those that the model will see.")
    if batches.count < FEW:
        yield Finding(
            kind="few-samples",
            says=f"Samples are few ({batches.count}): under {FEW}, ranges depend on which they are. Give more.",
        )
    unused = [name for name in batches.ignored if name.lower() not in LABELS and not name.startswith("files with ")]
    if unused:
        yield Finding(
            kind="ignored",
            says=f"No input takes {', '.join(map(repr, unused))}. Leave them out, or give them an input's name.",
        )


def _of_one(taker: Input, seen: _Seen, batches: Batches) -> Iterable[Finding]:
    """What is probably wrong with what `taker` is fed."""
    if seen.nan or seen.inf:
        yield Finding(
            kind="not-finite",
            input=taker.name,
            says=f"{taker.name} gets {seen.nan} NaN and {seen.inf} infinite values, and calibration refuses such data."
            " Mend it, or leave these samples out.",
        )
    is_float = kind_of(numpy_dtype(taker.dtype)) == "float"
    pixels = seen.whole or (taker.shape is not None and len(taker.shape) == 4)  # noqa: PLR2004  # a batch of pictures
    if is_float and pixels and seen.low >= 0 and BRIGHT <= seen.high <= 255:  # noqa: PLR2004  # the largest pixel
        yield Finding(
            kind="unscaled",
            input=taker.name,
            says=f"{taker.name} of {taker.dtype} gets {seen.low:g} to {seen.high:g}, which look like pixels that nobody"
            " scaled. Scale them as in training; it is right only for models that do so themselves.",
        )
    stored = seen.values // max(batches.count, 1)
    if seen.finite and seen.low == seen.high and stored > 1:
        yield Finding(
            kind="constant",
            input=taker.name,
            says=f"{taker.name} is always {seen.low:g}, which gives nothing to calibrate with. Give real values.",
        )
    elif batches.count > 1 and len(seen.digests) == 1 and stored > 1:
        yield Finding(
            kind="same-samples",
            input=taker.name,
            says=f"{taker.name} is the same in all {batches.count} samples. Give different ones.",
        )
    yield from _of_layout(taker, seen)
    item, static = batches.stacked.get(taker.name), taker.shape
    if item is not None and static is not None and len(item) == len(static) and None in static[1:]:
        count = item[0] // (static[0] or 1)
        yield Finding(
            kind="stacked",
            input=taker.name,
            says=f"{taker.name} has axes of any size, and an item of {shape_text(item)} was taken as {count}"
            f" samples of {shape_text((static[0] or 1, *item[1:]))}. If it is one sample, give array[None].",
        )


def _of_layout(taker: Input, seen: _Seen) -> Iterable[Finding]:
    """Whether channels seem to be where they should not."""
    if seen.near and seen.far < SWAPPED * seen.near:
        first = seen.shape is not None and seen.shape[1] == COLOURS
        wants, has = ("NCHW", "NHWC") if first else ("NHWC", "NCHW")
        axes = "0, 3, 1, 2" if first else "0, 2, 3, 1"
        yield Finding(
            kind="layout",
            input=taker.name,
            says=f"{taker.name} has the shape of {wants}, but its values look like {has} that was reshaped. Transpose"
            f" instead: array.transpose({axes}).",
        )
    static, given = taker.shape, seen.shape
    if static is None or given is None or len(static) != 4 or len(given) != 4:  # noqa: PLR2004  # N, C, H and W
        return
    if static[1] is None and static[3] is None and (given[1] in {1, COLOURS}) != (given[3] in {1, COLOURS}):
        last = given[3] in {1, COLOURS}
        yield Finding(
            kind="layout-open",
            input=taker.name,
            says=f"{taker.name} takes any size everywhere, and the data has its channels {'last' if last else 'first'}."
            " See that the model wants them there.",
        )
