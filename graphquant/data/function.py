"""Calibration data from Python code: `module:function`, which gives any iterable. The code is run.

What it gives may be arrays, dicts, tuples, a `tf.data.Dataset`, or an onnxruntime `CalibrationDataReader`; each pass
over the data calls the function again. An item is laid out as an array in an `.npz` file is: it may be a sample, or a
stack of them.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.data.base import Batches
from graphquant.data.fit import Fit, check_values, common_count, find_keys, fit
from graphquant.errors import DataError, GraphQuantError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.data.base import Feed, Wanted
    from graphquant.data.spec import Source
    from graphquant.numerics import Array

MAX_ITEMS = 1_000_000
"""Items after which an iterable is taken to have no end."""


def batches(source: Source, wanted: Wanted) -> Batches:
    """What the function gives. One pass over all of it counts and hashes the values, so shards agree on them.

    Raises:
        DataError: There is no such function, it fails, or what it gives does not fit the inputs.
    """
    make = _named(source.spec)
    digest = hashlib.sha256()
    counts: list[int] = []
    unused: dict[str, None] = {}
    stacked: dict[str, tuple[int, ...]] = {}
    for where, arrays in _items(source.spec, make, wanted):
        fits = _fits(where, arrays, wanted)
        for one, values in fits:
            digest.update(f"{one.input} {one.given.str} {values.shape}\n".encode())
            digest.update(_bytes(values))
        for one, values in fits:
            if one.rows and one.samples > 1:
                stacked.setdefault(one.input, values.shape)
        counts.append(common_count([one for one, _ in fits]))
        unused |= dict.fromkeys(_unused(where, arrays, wanted))
        if wanted.samples is not None and sum(counts) >= wanted.samples:
            break
        if len(counts) == MAX_ITEMS:
            raise DataError(
                f"{source.spec} gave {MAX_ITEMS} items and does not end. Say with --samples how many to use."
            )
    if not sum(counts):
        raise DataError(f"{source.spec} gives no samples. Let it give at least one, each time it is called.")
    feeds = partial(_feeds, source.spec, make, wanted, counts)
    return Batches(
        count=wanted.limit(sum(counts)),
        digest=digest.hexdigest(),
        ignored=tuple(unused),
        stacked=stacked,
        feeds=feeds,
    )


def _named(spec: str) -> Callable[[], Any]:
    """What gives the iterable anew each time."""
    name, _, path = spec.partition(":")
    if os.getcwd() not in sys.path:  # noqa: PTH109  # a string, as sys.path holds
        sys.path.append(os.getcwd())  # noqa: PTH109  # the same
    with _theirs(spec, "cannot be imported"):
        found: Any = importlib.import_module(name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise DataError(f"The module {name} has no {path!r}. Name a function that gives the data.")
        found = getattr(found, part)
    if isinstance(found, Iterator):
        raise DataError(f"{spec} can be read once only, and several passes are made. Name a function that makes it.")
    if isinstance(found, Iterable) and not isinstance(found, type):
        return lambda: found
    if not callable(found):
        raise DataError(f"{spec} is neither a function nor an iterable. Name a function that gives the data.")
    made: Callable[[], Any] = found
    return made


@contextmanager
def _theirs(spec: str, failed: str) -> Iterator[None]:
    """Turns whatever the user's code raises into a DataError."""
    try:
        yield
    except GraphQuantError:
        raise
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())
        raise DataError(f"{spec} {failed}: {type(error).__name__}: {said}. Run it by itself to see where.") from error


def _items(spec: str, make: Callable[[], Any], wanted: Wanted) -> Iterator[tuple[str, dict[str, Array]]]:
    """What each item is called, and its arrays by name."""
    with _theirs(spec, "failed"):
        given = make()
        following = iter(given) if not hasattr(given, "get_next") else _read_on(given.get_next)
    for index in range(sys.maxsize):
        where = f"{spec}, item {index}"
        with _theirs(spec, f"failed at item {index}"):
            try:
                item = next(following)
            except StopIteration:
                return
            arrays = _arrays(where, item, wanted)
        yield where, arrays


def _read_on(get_next: Callable[[], Any]) -> Iterator[Any]:
    """What an onnxruntime CalibrationDataReader gives until None ends it."""
    while (item := get_next()) is not None:
        yield item


def _arrays(where: str, item: Any, wanted: Wanted) -> dict[str, Array]:
    """The arrays of an item: by name, by position, or the only one. Features may come first of two, labels second."""
    if isinstance(item, tuple | list) and item and isinstance(item[0], Mapping):
        item = item[0]
    if isinstance(item, Mapping):
        return {str(key): np.asarray(value) for key, value in item.items()}
    names = [taker.name for taker in wanted.inputs]
    if not isinstance(item, tuple | list):
        item = (item,)
    if len(item) < len(names):
        raise DataError(
            f"{where} has {len(item)} arrays, and the model takes {', '.join(map(repr, names))}."
            " Give a dict of input name to array, or a tuple in that order."
        )
    more = [f"position {index}" for index in range(len(names), len(item))]
    return {name: np.asarray(value) for name, value in zip([*names, *more], item, strict=True)}


def _keys(where: str, arrays: Mapping[str, Array], wanted: Wanted) -> list[str]:
    return find_keys(where, list(arrays), wanted)


def _unused(where: str, arrays: Mapping[str, Array], wanted: Wanted) -> list[str]:
    used = _keys(where, arrays, wanted)
    return [key for key in arrays if key not in used]


def _fits(where: str, arrays: Mapping[str, Array], wanted: Wanted) -> list[tuple[Fit, Array]]:
    """How each input takes its array; every value is checked."""
    fits = []
    for taker, key in zip(wanted.inputs, _keys(where, arrays, wanted), strict=True):
        values = arrays[key]
        one = fit(f"{where}: array {key!r}", taker, values.shape, values.dtype)
        values = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("="), copy=False)
        values = (values.view(one.given) if values.dtype.kind == "V" else values).reshape(one.shape)
        check_values(one, values, finite=wanted.finite)
        fits.append((one, values))
    return fits


def _bytes(values: Array) -> bytes:
    return repr(values.tolist()).encode() if values.dtype.hasobject else values.tobytes()


def _feeds(
    spec: str, make: Callable[[], Any], wanted: Wanted, counts: Sequence[int], start: int, stop: int
) -> Iterator[Feed]:
    items = _items(spec, make, wanted)
    before = 0
    for count in counts:
        if before >= stop:
            return
        where, arrays = next(items, ("", None))
        if arrays is None:
            raise DataError(
                f"{spec} gave {len(counts)} items at first and fewer later."
                " Let the function make a new iterable each time."
            )
        first, last = max(start - before, 0), min(stop - before, count)
        before += count
        if first >= last:
            continue
        fits = _fits(where, arrays, wanted)
        if common_count([one for one, _ in fits]) != count:
            raise DataError(
                f"{where} had {count} samples at first and another number later. Let it give the same again."
            )
        for index in range(first, last):
            yield {
                one.input: one.feed(values[index * one.rows : (index + 1) * one.rows] if one.rows else values)
                for one, values in fits
            }
