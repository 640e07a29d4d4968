"""How an input takes an array: under which key, in which layout, as which dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from graphquant.data.base import MAX_FEED_BYTES
from graphquant.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.data.base import Input, Shape, Wanted
    from graphquant.numerics import Array

STRINGS = frozenset({"string", "str", "object"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How an input takes an array.

    Attributes:
        input: Name of the input.
        where: What the array is called in messages.
        given: The array's dtype, native byte order.
        wanted: The input's dtype.
        shape: The array's shape; with a first axis of 1 if it is a sample without one.
        rows: How many entries along the first axis make one feed; 0: every feed gets the whole array.
        whole: Each entry is one whole feed, so the first axis is dropped.
    """

    input: str
    where: str
    given: np.dtype[Any]
    wanted: np.dtype[Any]
    shape: tuple[int, ...]
    rows: int = 0
    whole: bool = False

    @property
    def samples(self) -> int:
        """Number of feeds that it makes."""
        return self.shape[0] // self.rows

    def feed_shape(self) -> tuple[int, ...]:
        """Shape of one feed."""
        if self.rows == 0:
            return self.shape
        return self.shape[1:] if self.whole else (self.rows, *self.shape[1:])

    def feed(self, block: Array) -> Array:
        """The feed that `block` is: (rows, ...) of the given dtype, or the whole array."""
        values = np.asarray(block[0] if self.whole else block)
        return values.astype(self.wanted, order="C", copy=False)


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


def find_keys(where: str, held: Sequence[str], wanted: Wanted) -> list[str]:
    """For each input the key that holds it: the one asked for, its name, else an alias that is no other input's name.

    Raises:
        DataError: There is none.
    """
    names = {taker.name for taker in wanted.inputs}
    for name in wanted.keys:
        if name not in names:
            raise DataError(
                f"inputs.{name}={wanted.keys[name]} is for no input of the model, which takes"
                f" {', '.join(map(repr, sorted(names)))}.{did_you_mean(name, names)} Name one of them."
            )
    found = []
    for taker in wanted.inputs:
        asked = wanted.keys.get(taker.name)
        own = [taker.name, *(alias for alias in taker.aliases if alias not in names)]
        key = next((candidate for candidate in ([asked] if asked else own) if candidate in held), None)
        if key is None:
            holds = ", ".join(repr(key) for key in held) or "nothing"
            needed = ", ".join(repr(other.name) for other in wanted.inputs)
            raise DataError(
                f"{where} has no array {asked!r} for input {taker.name!r}: it holds {holds}."
                if asked
                else f"{where} has no array for input {taker.name!r}: it holds {holds}, and the model takes {needed}."
                f"{did_you_mean(taker.name, held)} Save each array under the name of its input."
            )
        found.append(key)
    return found


def fit(where: str, taker: Input, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Fit:
    """How `taker` takes an array of `shape` and `dtype`: a stack of samples, of whole feeds, or one sample.

    Raises:
        DataError: It does not.
    """
    given = _stored_as(taker, dtype.newbyteorder("="))
    static = taker.shape
    if static and len(shape) == len(static) - 1 and static[0] in {1, None} and _fits(shape, static[1:]):
        shape = (1, *shape)
    rows, whole = _layout(where, taker, shape)
    made = Fit(
        input=taker.name,
        where=where,
        given=given,
        wanted=_wanted(where, taker, given),
        shape=shape,
        rows=rows,
        whole=whole,
    )
    size = math.prod(made.feed_shape()) * given.itemsize
    if size > MAX_FEED_BYTES:
        raise DataError(f"{where} has {size} bytes for one sample. Save smaller samples.")
    return made


def common_count(fits: Sequence[Fit]) -> int:
    """The number of samples, which all stacked arrays must agree on.

    Raises:
        DataError: They do not.
    """
    stacked = [one for one in fits if one.rows]
    for one in stacked:
        if one.samples != stacked[0].samples:
            raise DataError(
                f"{stacked[0].where} has {stacked[0].samples} samples and {one.where.rpartition(': ')[2]} has"
                f" {one.samples}. Give every input the same number."
            )
    return stacked[0].samples if stacked else 1


def not_finite(values: Array) -> Array:
    """Where `values` are NaN or infinite: bool, of the same shape; nowhere unless they are floats."""
    if kind_of(values.dtype) != "float":
        return np.zeros(values.shape, bool)
    return np.asarray(~np.isfinite(values))


def check_values(one: Fit, values: Array, *, finite: bool) -> None:
    """Values must fit the input's dtype, and be finite if that is asked for.

    Raises:
        DataError: They do not, or are not.
    """
    wrong = not_finite(values)
    if wrong.any():
        if finite:
            index = [int(axis) for axis in np.unravel_index(int(wrong.argmax()), values.shape)]
            raise DataError(infinite(one.where, int(wrong.sum()), index))
        values = values[~wrong]
    check_convertible(one, values)


def infinite(where: str, count: int, index: list[int]) -> str:
    """What is said of NaN and infinite values."""
    return (
        f"{where} has {count} NaN or infinite values, the first at index {index}."
        " Mend the data; no range can be taken from it."
    )


def check_convertible(one: Fit, values: Array) -> None:
    """Finite values must fit the input's dtype.

    Raises:
        DataError: They do not.
    """
    if values.size == 0 or one.given == one.wanted or one.wanted.hasobject:
        return
    low, high = values.min(), values.max()
    if kind_of(one.given) == "int":
        limits = np.iinfo(one.wanted)
        fits = limits.min <= int(low) and int(high) <= limits.max
    else:
        with np.errstate(over="ignore"):
            fits = bool(np.isfinite(np.array([low, high]).astype(one.wanted).astype(np.float64)).all())
    if not fits:
        raise DataError(
            f"{one.where} holds values from {low} to {high}, which input {one.input!r} of {one.wanted} cannot hold."
            " Give values in its range."
        )


def _stored_as(taker: Input, given: np.dtype[Any]) -> np.dtype[Any]:
    """`given`, or what its nameless bytes are: numpy saves bfloat16 and other small types as "V2" and "V1"."""
    dtype = numpy_dtype(taker.dtype)
    nameless = given.kind == "V" and given.names is None and given.subdtype is None
    return dtype if nameless and not dtype.hasobject and given.itemsize == dtype.itemsize else given


def _layout(where: str, taker: Input, shape: tuple[int, ...]) -> tuple[int, bool]:
    """`rows` and `whole` of a `Fit`: how `taker` takes an array of `shape`."""
    static = taker.shape
    if static is None:
        return (1, True) if shape else (0, False)
    fixed = static[0] if static else 1
    if len(shape) == len(static) + 1 and _fits(shape[1:], static):
        return 1, True
    if len(shape) == len(static):
        if not shape or (fixed is not None and fixed > 1 and _fits(shape, static)):
            return 0, False
        rows = fixed or 1
        if _fits((rows, *shape[1:]), static):
            if shape[0] % rows:
                raise DataError(
                    f"{where} has {shape[0]} entries, and input {taker.name!r} takes {rows} at a time:"
                    f" {shape[0] % rows} are left over. Give a multiple of {rows}."
                )
            return rows, False
    raise DataError(
        f"{where} is {shape_text(shape)}, and input {taker.name!r} takes {shape_text(static)}, samples stacked along"
        " the first axis."
        f" {_fix(shape, static)}"
    )


def _fits(shape: Sequence[int], static: Shape) -> bool:
    return len(shape) == len(static) and all(b is None or a == b for a, b in zip(shape, static, strict=True))


def _fix(shape: tuple[int, ...], static: Shape) -> str:
    """What would make an array of `shape` fit."""
    rest = static[1:]
    if len(shape) == len(static) and len(shape) > 2:  # noqa: PLR2004  # two axes have no layout
        for source, target, name in ((-1, 1, "channels first (NCHW)"), (1, -1, "channels last (NHWC)")):
            axes = list(shape)
            axes.insert(target % len(shape), axes.pop(source))
            if _fits(axes[1:], rest):
                return f"The model wants {name}: numpy.moveaxis(array, {source}, {target}) fits."
    sizes = [size for size in rest if size is not None]
    if shape and len(sizes) == len(rest) and math.prod(shape[1:]) == math.prod(sizes):
        return f"array.reshape({', '.join(map(str, (-1, *sizes)))}) fits."
    return "Give each sample that shape."


def _wanted(where: str, taker: Input, given: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that values are fed as.

    Raises:
        DataError: `given` values are of another kind.
    """
    if given.hasobject and taker.dtype not in STRINGS:
        raise DataError(f"{where} holds Python objects, which are never loaded. Save it as numbers.")
    if taker.dtype in STRINGS and given.kind in "SUO":
        return np.dtype(object)  # what runners take for strings
    dtype = numpy_dtype(taker.dtype)
    kinds = (kind_of(given), kind_of(dtype))
    if given == dtype or kinds in {("float", "float"), ("int", "int")}:
        return dtype
    clash = f"{where} is {given}, and input {taker.name!r} takes {taker.dtype}."
    if kinds == ("int", "float"):
        raise DataError(f"{clash} Convert it, and scale it as in training: (array / 255).astype('{taker.dtype}').")
    raise DataError(f"{clash} Save the array as {taker.dtype}.")


def as_feed(where: str, taker: Input, values: Array, *, finite: bool) -> Array:
    """`values` as the feed of `taker`, whose shape they must have already.

    Raises:
        DataError: They have another shape, are of another kind, or are out of its range.
    """
    static = taker.shape
    if static is not None and not _fits(values.shape, static):
        raise DataError(
            f"{where} is {shape_text(values.shape)}, and input {taker.name!r} takes {shape_text(static)}."
            " Give each sample that shape."
        )
    given = values.dtype
    one = Fit(input=taker.name, where=where, given=given, wanted=_wanted(where, taker, given), shape=values.shape)
    check_values(one, values, finite=finite)
    return one.feed(values)
