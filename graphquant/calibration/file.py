"""Statistics files (`.gqs`): a zip of `header.json` and an array for each field of the sketches.

Arrays of all tensors lie one behind the other, each in little-endian bytes; the header says how much of them is whose.
The same statistics give the same bytes. A file that is read may be hostile: nothing is unpickled, sizes are bounded by
the header and by `MAX_BYTES`, and what does not fit together is a DataError.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from graphquant.calibration.stats import Run, Stats
from graphquant.calibration.targets import COARSE, FINE, Target
from graphquant.errors import DataError, UsageError
from graphquant.ir import TensorRef
from graphquant.sketch import Sketch
from graphquant.whole import whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from graphquant.numerics import Array

FORMAT = "graphquant statistics"
VERSION = 2

HEADER = "header.json"
ARRAYS = {"low": "<f8", "high": "<f8", "bins": "<u4", "counts": "<i8", "sums": "<u8"}
"""The arrays and their types. Ends have an entry per channel, the others one per bin."""

MAX_BYTES = 1 << 31
"""Bytes that a file's arrays may have together, and its header."""

MAX_CHANNELS = 1 << 24
DATE = (1980, 1, 1, 0, 0, 0)

_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    NotImplementedError,  # zipfile: a compression that it does not know
    RuntimeError,  # zipfile: encrypted
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)

_Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
_Sum = Annotated[str, Field(pattern=r"^-?[0-9a-f]{1,600}$")]
_Text = Annotated[str, Field(max_length=1 << 20)]
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_MAX_COUNT = 1 << 40
"""Values in one bin, so that the sum of their dropped bits fits into 64 bits."""

_FORBID = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What the header says of a tensor.

    `channels` and `bins` are how many entries of the arrays are its own, `low_sum` and `high_sum` are hexadecimal.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    graph: _Text
    op: _Text
    port: Annotated[int, Field(ge=0, lt=1 << 20)]
    cone: _Hex
    axis: Annotated[int, Field(ge=-64, le=64)] | None
    bits: Annotated[int, Field(ge=0, le=FINE)]
    channels: Annotated[int, Field(ge=0, le=MAX_CHANNELS)] | None
    bins: Annotated[int, Field(ge=0, le=1 << (9 + FINE))]
    count: _Count
    nan: _Count
    inf: _Count
    blank: _Count
    blocks: _Count
    low_sum: _Sum
    high_sum: _Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unwatchable:
    """A tensor of the targets that cannot be observed."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    tensor: _Count
    reason: _Text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The fields of a `Run`."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    data: _Hex
    samples: _Count
    block: Annotated[int, Field(ge=1, lt=1 << 20)]
    done: tuple[tuple[_Count, _Count], ...]
    random: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """What a file says."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    format: str
    version: int
    model: _Hex
    runs: tuple[_Run, ...]
    tensors: tuple[_Entry, ...]
    unwatchable: tuple[_Unwatchable, ...]


def save_stats(stats: Stats, path: Path) -> None:
    """Writes statistics to `path`, whole or not at all.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        with whole(path) as file, zipfile.ZipFile(file, "w") as archive:
            for name, data in _members(stats):
                info = zipfile.ZipInfo(name, DATE)
                info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(info, data, compresslevel=6)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Give another file.") from error


def _members(stats: Stats) -> Iterator[tuple[str, bytes]]:
    sketches = [stats.sketches[tensor] for tensor in stats.targets if tensor in stats.sketches]
    places = {tensor: place for place, tensor in enumerate(stats.targets)}
    header = _Header(
        format=FORMAT,
        version=VERSION,
        model=stats.model,
        runs=tuple(
            _Run(data=run.data, samples=run.samples, block=run.block, done=run.done, random=run.random)
            for run in stats.runs
        ),
        tensors=tuple(_entry(tensor, target, stats.sketches.get(tensor)) for tensor, target in stats.targets.items()),
        unwatchable=tuple(_Unwatchable(tensor=places[t], reason=reason) for t, reason in stats.unwatchable.items()),
    )
    yield HEADER, _adapter().dump_json(header)
    for name, dtype in ARRAYS.items():
        parts = [np.asarray(getattr(one, name)).reshape(-1) for one in sketches]
        yield name, np.concatenate(parts or [np.zeros(0)]).astype(dtype).tobytes()


def _entry(tensor: TensorRef, target: Target, found: Sketch | None) -> _Entry:
    """`found` is None for a tensor that was not reached, which has no entries in the arrays."""
    channels = 0 if found is None else found.low.size if found.low.ndim else None
    return _Entry(
        graph=tensor.graph,
        op=tensor.op,
        port=tensor.port,
        cone=target.cone,
        axis=target.axis,
        bits=target.bits,
        channels=channels,
        bins=found.bins.size if found else 0,
        count=found.count if found else 0,
        nan=found.nan if found else 0,
        inf=found.inf if found else 0,
        blank=found.blank if found else 0,
        blocks=found.blocks if found else 0,
        low_sum=f"{found.low_sum if found else 0:x}",
        high_sum=f"{found.high_sum if found else 0:x}",
    )


def load_stats(path: Path) -> Stats:
    """The statistics in the file at `path`.

    Raises:
        DataError: It is no such file, or it is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            header = _read_header(archive)
            ends = sum(1 if one.channels is None else one.channels for one in header.tensors)
            bins = sum(one.bins for one in header.tensors)
            sizes = {name: ends if name in {"low", "high"} else bins for name in ARRAYS}
            if sum(np.dtype(ARRAYS[name]).itemsize * size for name, size in sizes.items()) > MAX_BYTES:
                raise ValueError("it is larger than statistics ever are")
            arrays = {name: _read_array(archive, name, size) for name, size in sizes.items()}
        return _stats(header, arrays)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise _damaged(path, f"{HEADER}: {place}: {first['msg']}") from error
    except FileNotFoundError as error:
        raise DataError(
            f"There is no file {path}. `graphquant calibrate MODEL --data SPEC -o {path}` makes it."
        ) from error
    except _UNREADABLE as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path} cannot be read as statistics: {reason}. Make it again with `graphquant calibrate MODEL --data SPEC"
        f" -o {path}`."
    )


def _read_header(archive: zipfile.ZipFile) -> _Header:
    size = archive.getinfo(HEADER).file_size if HEADER in archive.namelist() else 0
    if not 0 < size <= MAX_BYTES >> 4:
        raise ValueError(f"it has no {HEADER} that can be read")
    header: _Header = _adapter().validate_json(_exactly(archive, HEADER, size), strict=True)
    if header.format != FORMAT or header.version != VERSION:
        raise ValueError(f"its version is {header.version}, and this program reads {VERSION}")
    return header


def _read_array(archive: zipfile.ZipFile, name: str, size: int) -> Array:
    dtype = np.dtype(ARRAYS[name])
    if name not in archive.namelist() or archive.getinfo(name).file_size != size * dtype.itemsize:
        raise ValueError(f"its {name!r} does not have the {size} numbers that its header tells of")
    return np.frombuffer(_exactly(archive, name, size * dtype.itemsize), dtype).astype(dtype.newbyteorder("="))


def _exactly(archive: zipfile.ZipFile, name: str, size: int) -> bytes:
    with archive.open(name) as stream:
        data = stream.read(size + 1)
    if len(data) != size:
        raise EOFError(f"{name!r} is cut off")
    return data


def _stats(header: _Header, arrays: Mapping[str, Array]) -> Stats:
    """The statistics, each number checked against the others."""
    targets: dict[TensorRef, Target] = {}
    sketches: dict[TensorRef, Sketch] = {}
    end = bin_ = 0
    for entry in header.tensors:
        tensor = TensorRef(entry.graph, entry.op, entry.port)
        if tensor in targets or entry.bits not in {0, COARSE, FINE}:
            raise ValueError(f"it holds {tensor} twice, or with bins of {entry.bits} bits")
        targets[tensor] = Target(entry.cone, entry.axis, entry.bits)
        ends = 1 if entry.channels is None else entry.channels
        if entry.count or entry.blank:
            sketches[tensor] = _sketch(
                entry,
                {
                    **{name: arrays[name][end : end + ends] for name in ("low", "high")},
                    **{name: arrays[name][bin_ : bin_ + entry.bins] for name in ("bins", "counts", "sums")},
                },
            )
        end, bin_ = end + ends, bin_ + entry.bins
    runs = tuple(
        Run(data=one.data, samples=one.samples, block=one.block, done=_ranges(one), random=one.random)
        for one in header.runs
    )
    tensors = list(targets)
    if len({run.data for run in runs}) != len(runs) or any(u.tensor >= len(tensors) for u in header.unwatchable):
        raise ValueError("its header names one data twice, or a tensor that it does not hold")
    unwatchable = {tensors[one.tensor]: one.reason for one in header.unwatchable}
    return Stats(model=header.model, targets=targets, sketches=sketches, runs=runs, unwatchable=unwatchable)


def _sketch(entry: _Entry, held: dict[str, Array]) -> Sketch:
    low, high, bins, counts, sums = (held[name] for name in ARRAYS)
    dropped = np.uint64(1 << (23 - entry.bits)) if entry.bits else np.uint64(1)
    finite = entry.count - entry.nan - entry.inf
    one_end = entry.channels is None
    fits = (
        finite >= 0
        and (one_end or (not entry.bins and low.size > 0))
        and not (np.isnan(low).any() or np.isnan(high).any())
        and not ((low > high) & ~((low == np.inf) & (high == -np.inf))).any()
        and bool((np.diff(bins.astype(np.int64)) > 0).all())
        and bool((counts > 0).all() and (counts < _MAX_COUNT).all())
        and (not bins.size or int(bins[-1]) < 1 << (9 + entry.bits))
        and bool((sums <= counts.astype(np.uint64) * (dropped - np.uint64(1))).all())
        and sum(map(int, counts)) == (finite if entry.bits and entry.axis is None else 0)
    )
    if not fits:
        raise ValueError(f"the numbers of {entry.op!r} do not fit together")
    return Sketch(
        low=low.reshape(()) if one_end else low,
        high=high.reshape(()) if one_end else high,
        count=entry.count,
        nan=entry.nan,
        inf=entry.inf,
        blank=entry.blank,
        bits=entry.bits if entry.axis is None else 0,
        bins=bins.astype(np.uint32),
        counts=counts,
        sums=sums,
        blocks=entry.blocks,
        low_sum=int(entry.low_sum, 16),
        high_sum=int(entry.high_sum, 16),
    )


def _ranges(run: _Run) -> tuple[tuple[int, int], ...]:
    """The ranges of blocks that were run, ascending and apart."""
    here = -1
    for start, stop in run.done:
        if not here < start < stop:
            raise ValueError("its header counts blocks of samples twice")
        here = stop
    if here > -(-run.samples // run.block):
        raise ValueError("its header counts more blocks than there are")
    return run.done


@cache
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(_Header)
