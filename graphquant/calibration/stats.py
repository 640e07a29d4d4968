"""Calibration statistics of a model: combining shards, selecting the statistics of a plan, and statistics files.

A statistics file (`.gqs`) is a zip archive with `header.json` and one array for each field of the sketches. The arrays
of all tensors are concatenated, in little-endian order. The header gives the number of entries of each tensor. Equal
statistics give equal bytes. A file may be hostile: nothing is unpickled, sizes are bounded by the header and by
`MAX_STATS_BYTES`, and inconsistent content raises a DataError.
"""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from weakref import finalize

import numpy as np
from pydantic import ConfigDict, Field, ValidationError

from graphquant.calibration.targets import COARSE_BITS, FINE_BITS, ObservationTarget
from graphquant.errors import DataError, UsageError
from graphquant.ir import TensorRef
from graphquant.observers import EMPTY_SKETCH, Sketch, merge_sketches
from graphquant.utils import HtmlRepresentation
from graphquant.utils.atomic_files import atomic_file, lock_output
from graphquant.utils.option_types import type_adapter
from graphquant.utils.options import checks_types

if TYPE_CHECKING:
    from graphquant.calibration.data.check import DataFinding
    from graphquant.numerics import Array

MAX_LISTED_TENSORS = 5  # maximum number of tensors that an error lists

_HexText = Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
_HexSum = Annotated[str, Field(pattern=r"^-?[0-9a-f]{1,600}$")]
_BoundedText = Annotated[str, Field(max_length=1 << 20)]
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_FORBID = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRun:
    """One data set and the blocks of its samples that were run. The header of a statistics file has the same fields."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    data_digest: Annotated[_HexText, Field(alias="data")]  # digest of all samples
    samples: _Count  # total number of samples
    block_size: Annotated[int, Field(ge=1, lt=1 << 20)]  # samples in a block; the last block may have fewer
    block_ranges: tuple[tuple[_Count, _Count], ...]  # ranges [start, stop) of finished blocks, ascending and disjoint
    random: bool = False  # whether the data is random

    @property
    def blocks(self) -> int:
        """Total number of blocks."""
        return -(-self.samples // self.block_size)

    @property
    def blocks_done(self) -> int:
        """Number of finished blocks."""
        return sum(stop - start for start, stop in self.block_ranges)

    @property
    def samples_done(self) -> int:
        """Number of finished samples."""
        size = self.block_size
        return sum(min(stop * size, self.samples) - start * size for start, stop in self.block_ranges)

    @property
    def complete(self) -> bool:
        """True if all blocks are finished."""
        return self.blocks_done == self.blocks


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Stats(HtmlRepresentation):
    """Result of a calibration."""

    model_digest: str  # digest of the source model
    targets: Mapping[TensorRef, ObservationTarget]  # observed tensors and the details that were collected
    # Sketch of each tensor that was reached. It has no values if the tensor was always empty.
    sketches: Mapping[TensorRef, Sketch]
    runs: tuple[DataRun, ...] = ()  # the data sets
    # Tensors that cannot be observed, with the reason.
    unobservable: Mapping[TensorRef, str] = field(default_factory=dict)
    # Likely mistakes in the data of this calibration. Statistics files do not contain them.
    data_findings: tuple[DataFinding, ...] = field(default=(), compare=False)

    @property
    def samples(self) -> int:
        """Number of samples that were run."""
        return sum(run.samples_done for run in self.runs)

    @property
    def blocks(self) -> int:
        """Number of blocks that were run."""
        return sum(run.blocks_done for run in self.runs)

    @property
    def random(self) -> bool:
        """True if any of the data is random."""
        return any(run.random for run in self.runs)

    @property
    def complete(self) -> bool:
        """True if all samples of all data sets were run."""
        return all(run.complete for run in self.runs)

    @checks_types
    def missing_reason(self, tensor: TensorRef) -> str:
        """Return the reason why a target has no values, or "" if it has some."""
        if (sketch := self.sketches.get(tensor)) is None:
            return self.unobservable.get(tensor, "no sample reached it")
        return "" if sketch.count else f"it was empty in all {sketch.empty_arrays} observations"

    @checks_types
    def save(self, path: str | Path) -> None:
        """Write the statistics to `path` atomically. Raises a UsageError if the file cannot be written now."""
        try:
            with lock_output(Path(path)), atomic_file(Path(path)) as file, zipfile.ZipFile(file, "w") as archive:
                for name, data in _archive_members(self):
                    # A ZipInfo has the same date in all files.
                    archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}. Use another file.") from error


class StoredSketches(Mapping[TensorRef, Sketch]):
    """Sketches in a temporary file, which are read when they are needed, 250 at a time. A copy has its own file."""

    def __init__(self, sketches: Mapping[TensorRef, Sketch]) -> None:
        """Write `sketches`. Raises an OSError if there is no room for them."""
        self._positions, self._lock = dict[TensorRef, int](), Lock()
        self._chunk = -1, dict[TensorRef, Sketch]()  # its position and content, assigned at once in case of Ctrl-C
        self._file = TemporaryFile()  # noqa: SIM115  # closed with this object
        finalize(self, self._file.close)
        items = iter(sketches.items())
        while chunk := dict(islice(items, 250)):
            self._positions |= dict.fromkeys(chunk, self._file.tell())
            pickle.dump(chunk, self._file)
        self._file.flush()  # raises what a later read would raise

    def __getitem__(self, tensor: TensorRef) -> Sketch:
        with self._lock:
            position = self._positions[tensor]
            if self._chunk[0] != position:
                self._file.seek(position)
                self._chunk = position, pickle.load(self._file)  # noqa: S301  # no other process has the file
            return self._chunk[1][tensor]

    def __iter__(self) -> Iterator[TensorRef]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredSketches, (dict(self),)


def combine_stats(all_stats: Sequence[Stats]) -> Stats:
    """Combine statistics of several shards. The result does not depend on their order.

    Raises:
        DataError: The statistics are of different models or tensors, or two contain the same block of the same data.
    """
    return reduce(_merge_two_stats, all_stats)


def _merge_two_stats(first: Stats, second: Stats) -> Stats:
    if first.model_digest != second.model_digest:
        raise DataError("The statistics are of different models. Merge only statistics of one model.")
    if dict(first.targets) != dict(second.targets) or dict(first.unobservable) != dict(second.unobservable):
        all_targets = {**first.targets, **second.targets}
        differing = [tensor for tensor in all_targets if first.targets.get(tensor) != second.targets.get(tensor)]
        differing_reasons = [tensor for tensor, _ in first.unobservable.items() ^ second.unobservable.items()]
        difference = (
            f"first in {differing[0]}" if differing else f"{min(differing_reasons)} is unobservable in one only"
        )
        raise DataError(
            f"The statistics differ in their tensors or collected details ({difference}). Calibrate all shards with"
            " the same rules and the same model."
        )
    data_runs = {run.data_digest: run for run in first.runs}
    for run in second.runs:
        known_run = data_runs.get(run.data_digest)
        data_runs[run.data_digest] = run if known_run is None else _merge_data_runs(known_run, run)
    sketches = {
        tensor: merge_sketches(first.sketches.get(tensor, EMPTY_SKETCH), second.sketches.get(tensor, EMPTY_SKETCH))
        for tensor in first.targets
        if tensor in first.sketches or tensor in second.sketches
    }
    return replace(first, sketches=sketches, runs=tuple(data_runs[data] for data in sorted(data_runs)))


def _merge_data_runs(first: DataRun, second: DataRun) -> DataRun:
    if (first.samples, first.block_size, first.random) != (second.samples, second.block_size, second.random):
        raise DataError(
            "The statistics use different blocks of the same data. Calibrate all shards with the same version."
        )
    ranges: list[tuple[int, int]] = []
    for start, stop in sorted([*first.block_ranges, *second.block_ranges]):
        if ranges and start < ranges[-1][1]:
            raise DataError(
                f"Both statistics contain the samples {start * first.block_size} to"
                f" {min(stop, ranges[-1][1]) * first.block_size - 1} of the same data, which would count twice. Merge"
                " each shard only once."
            )
        if ranges and start == ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return replace(first, block_ranges=tuple(ranges))


def select_stats(
    stats: Stats, targets: Mapping[TensorRef, ObservationTarget], model_digest: str, command: str
) -> Stats:
    """Select the statistics of `targets`, which a plan of the model needs, under the names that `targets` uses.

    `command` is the command line that collects suitable statistics, for error messages.
    """
    if stats.model_digest != model_digest:
        raise DataError(f"The statistics are of another model, or the model has changed. Calibrate again:\n  {command}")
    if targets and stats.runs and not stats.samples:
        raise DataError(
            f"The statistics cover none of {sum(run.samples for run in stats.runs)} samples, for example a shard"
            f" without any block. Merge them with other shards (calibrate --merge), or calibrate again:\n  {command}"
        )
    by_fingerprint: dict[str, list[TensorRef]] = {}
    for tensor, target in stats.targets.items():
        by_fingerprint.setdefault(target.fingerprint, []).append(tensor)
    unobservable = {tensor: stats.unobservable[tensor] for tensor in targets if tensor in stats.unobservable}
    sketches: dict[TensorRef, Sketch] = {}
    missing: dict[TensorRef, str] = {}
    for tensor, target in targets.items():
        if tensor in unobservable:
            continue
        reasons = {
            candidate: stats.targets[candidate].shortfall(target)
            for candidate in by_fingerprint.get(target.fingerprint, ())
        }
        sufficient = [candidate for candidate, reason in reasons.items() if not reason]
        if not sufficient:
            differs = "its computation differs: the preparation or the weights of the model have changed"
            missing[tensor] = next(
                iter(reasons.values()), differs if tensor in stats.targets else "it was not observed"
            )
        elif sufficient[0] in stats.sketches:
            sketches[tensor] = stats.sketches[sufficient[0]]
    if missing:
        lines = [f"\n  {tensor}: {reason}" for tensor, reason in missing.items()][:MAX_LISTED_TENSORS]
        if len(missing) > MAX_LISTED_TENSORS:
            lines.append(f"\n  and {len(missing) - MAX_LISTED_TENSORS} more")
        subject = "one tensor" if len(missing) == 1 else f"{len(missing)} tensors"
        raise DataError(
            f"The statistics lack {subject} of the plan:{''.join(lines)}\nCalibrate for this plan:\n  {command}"
        )
    return replace(stats, targets=dict(targets), sketches=sketches, unobservable=unobservable)


def uncovered_ranges(covered: Iterable[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of [start, stop) that the ascending ranges `covered` do not cover."""
    gaps = []
    for low, high in [*covered, (stop, stop)]:
        if start < min(low, stop):
            gaps.append((start, min(low, stop)))
        start = max(start, high)
    return gaps


STATS_FORMAT = "graphquant statistics"
STATS_VERSION = 3

HEADER_MEMBER = "header.json"
ARRAY_DTYPES = {"low": "<f8", "high": "<f8", "bins": "<u4", "counts": "<i8", "sums": "<u8"}
"""Arrays and their dtypes. `low` and `high` have one entry per channel, the others one per bin."""

STORED_NUMBERS = ("count", "nan", "inf", "empty_arrays", "blocks")
"""Numbers of a sketch that the header stores unchanged."""

MAX_STATS_BYTES = 1 << 31  # Maximum number of bytes of all arrays of a file. The header may have a sixteenth of it.
MAX_CHANNELS = 1 << 24

_MAX_BIN_COUNT = 1 << 40  # maximum number of values in one bin, so that the sum of their dropped bits fits into 64 bits

_STATS_READ_ERRORS = (
    OSError,
    EOFError,
    ValueError,  # pydantic's ValidationError is one
    NotImplementedError,  # zipfile: unknown compression
    RuntimeError,  # zipfile: encrypted
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StatsTensorEntry:
    """Header entry of a tensor.

    `channels` and `bins` are its numbers of entries in the arrays. `low_sum` and `high_sum` are hexadecimal.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    graph: _BoundedText
    op: _BoundedText
    port: Annotated[int, Field(ge=0, lt=1 << 20)]
    fingerprint: _HexText
    axis: Annotated[int, Field(ge=-64, le=64)] | None
    bits: Annotated[int, Field(ge=0, le=FINE_BITS)]
    channels: Annotated[int, Field(ge=0, le=MAX_CHANNELS)] | None
    bins: Annotated[int, Field(ge=0, le=1 << (9 + FINE_BITS))]
    count: _Count
    nan: _Count
    inf: _Count
    empty_arrays: _Count
    blocks: _Count
    low_sum: _HexSum
    high_sum: _HexSum

    @property
    def end_count(self) -> int:
        """Number of entries in the arrays of smallest and of largest values."""
        return 1 if self.channels is None else self.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnobservableEntry:
    """Header entry of a target that cannot be observed; `tensor` is its index."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    tensor: _Count
    reason: _BoundedText


@dataclass(frozen=True, slots=True, kw_only=True)
class _StatsHeader:
    """Content of `header.json`."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID

    format: str
    version: int
    model: _HexText
    runs: tuple[DataRun, ...]
    tensors: tuple[_StatsTensorEntry, ...]
    unobservable: tuple[_UnobservableEntry, ...]


def _archive_members(stats: Stats) -> Iterator[tuple[str, bytes]]:
    sketches = [stats.sketches[tensor] for tensor in stats.targets if tensor in stats.sketches]
    positions = {tensor: position for position, tensor in enumerate(stats.targets)}
    header = _StatsHeader(
        format=STATS_FORMAT,
        version=STATS_VERSION,
        model=stats.model_digest,
        runs=stats.runs,
        tensors=tuple(
            _make_tensor_entry(tensor, target, stats.sketches.get(tensor)) for tensor, target in stats.targets.items()
        ),
        unobservable=tuple(
            _UnobservableEntry(tensor=positions[tensor], reason=reason) for tensor, reason in stats.unobservable.items()
        ),
    )
    yield HEADER_MEMBER, type_adapter(_StatsHeader).dump_json(header, by_alias=True)
    for name, dtype in ARRAY_DTYPES.items():
        arrays = [np.ravel(getattr(sketch, name)) for sketch in sketches]
        yield name, np.concatenate(arrays or [np.zeros(0)]).astype(dtype).tobytes()


def _make_tensor_entry(tensor: TensorRef, target: ObservationTarget, sketch: Sketch | None) -> _StatsTensorEntry:
    """Return the header entry of a tensor. `sketch` is None if no sample reached it; it then has no array entries."""
    values = sketch or EMPTY_SKETCH
    return _StatsTensorEntry(
        graph=tensor.graph,
        op=tensor.op,
        port=tensor.port,
        fingerprint=target.fingerprint,
        axis=target.axis,
        bits=target.bits,
        channels=0 if sketch is None else sketch.low.size if sketch.low.ndim else None,
        bins=values.bins.size,
        **{name: getattr(values, name) for name in STORED_NUMBERS},
        low_sum=f"{values.low_sum:x}",
        high_sum=f"{values.high_sum:x}",
    )


def load_stats(path: str | Path) -> Stats:
    """Read the statistics file at `path`."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = archive.getinfo(HEADER_MEMBER).file_size if HEADER_MEMBER in archive.namelist() else 0
            if not 0 < size <= MAX_STATS_BYTES >> 4:
                raise ValueError(f"it has no readable {HEADER_MEMBER}")
            header = type_adapter(_StatsHeader).validate_json(_read_member(archive, HEADER_MEMBER, size), strict=True)
            if header.format != STATS_FORMAT or header.version != STATS_VERSION:
                raise ValueError(f"its version is {header.version}, but only version {STATS_VERSION} is supported")
            return _build_stats(header, _read_stats_arrays(archive, header.tensors))
    except FileNotFoundError as error:
        raise DataError(
            f"The file {path} does not exist. Create it with `graphquant calibrate MODEL --data SPEC -o {path}`."
        ) from error
    except _STATS_READ_ERRORS as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{HEADER_MEMBER}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise DataError(
            f"{path} cannot be read as a statistics file: {reason}. Create it again with `graphquant calibrate MODEL"
            f" --data SPEC -o {path}`."
        ) from error


def _read_stats_arrays(archive: zipfile.ZipFile, tensors: Sequence[_StatsTensorEntry]) -> dict[str, Array]:
    """Return the arrays of all tensors, after checking that their sizes are those of the header."""
    end_count, bin_count = sum(entry.end_count for entry in tensors), sum(entry.bins for entry in tensors)
    sizes = {name: end_count if name in {"low", "high"} else bin_count for name in ARRAY_DTYPES}
    if sum(np.dtype(ARRAY_DTYPES[name]).itemsize * size for name, size in sizes.items()) > MAX_STATS_BYTES:
        raise ValueError("its arrays are too large for a statistics file")
    arrays = {}
    for name, size in sizes.items():
        dtype = np.dtype(ARRAY_DTYPES[name])
        if name not in archive.namelist() or archive.getinfo(name).file_size != size * dtype.itemsize:
            raise ValueError(f"its {name!r} does not have the {size} numbers that the header declares")
        data = _read_member(archive, name, size * dtype.itemsize)
        arrays[name] = np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))
    return arrays


def _read_member(archive: zipfile.ZipFile, name: str, size: int) -> bytes:
    with archive.open(name) as stream:
        data = stream.read(size)
    if len(data) != size:
        raise EOFError(f"{name!r} is truncated")
    return data


def _build_stats(header: _StatsHeader, arrays: Mapping[str, Array]) -> Stats:
    """Build the statistics and check that their numbers are consistent."""
    targets: dict[TensorRef, ObservationTarget] = {}
    sketches: dict[TensorRef, Sketch] = {}
    first_end = first_bin = 0
    for entry in header.tensors:
        tensor = TensorRef(entry.graph, entry.op, entry.port)
        if tensor in targets or entry.bits not in {0, COARSE_BITS, FINE_BITS}:
            raise ValueError(f"it contains {tensor} twice, or with unsupported bins of {entry.bits} bits")
        targets[tensor] = ObservationTarget(entry.fingerprint, entry.axis, entry.bits)
        ends, bins = slice(first_end, first_end + entry.end_count), slice(first_bin, first_bin + entry.bins)
        if entry.count or entry.empty_arrays:
            own_arrays = {name: array[ends if name in {"low", "high"} else bins] for name, array in arrays.items()}
            sketches[tensor] = _build_sketch(entry, **own_arrays)
        first_end, first_bin = ends.stop, bins.stop
    for run in header.runs:
        _check_block_ranges(run)
    tensors = list(targets)
    if len({run.data_digest for run in header.runs}) != len(header.runs) or any(
        entry.tensor >= len(tensors) for entry in header.unobservable
    ):
        raise ValueError("its header lists a data set twice, or refers to a missing tensor")
    unobservable = {tensors[entry.tensor]: entry.reason for entry in header.unobservable}
    return Stats(
        model_digest=header.model, targets=targets, sketches=sketches, runs=header.runs, unobservable=unobservable
    )


def _build_sketch(
    entry: _StatsTensorEntry, *, low: Array, high: Array, bins: Array, counts: Array, sums: Array
) -> Sketch:
    max_dropped_bits = np.uint64((1 << (23 - entry.bits)) - 1)
    finite = entry.count - entry.nan - entry.inf
    per_tensor = entry.channels is None
    consistent = (
        finite >= 0
        and (per_tensor or (not entry.bins and low.size > 0))
        and not (np.isnan(low).any() or np.isnan(high).any())
        and not ((low > high) & ~((low == np.inf) & (high == -np.inf))).any()
        and bool((np.diff(bins.astype(np.int64)) > 0).all())
        and bool((counts > 0).all() and (counts < _MAX_BIN_COUNT).all())
        and (not bins.size or int(bins[-1]) < 1 << (9 + entry.bits))
        and bool((sums <= counts.astype(np.uint64) * max_dropped_bits).all())
        and sum(map(int, counts)) == (finite if entry.bits and entry.axis is None else 0)
    )
    if not consistent:
        raise ValueError(f"the numbers of {entry.op!r} are inconsistent")
    return Sketch(
        low=low.reshape(()) if per_tensor else low,
        high=high.reshape(()) if per_tensor else high,
        **{name: getattr(entry, name) for name in STORED_NUMBERS},
        bits=entry.bits if entry.axis is None else 0,
        bins=bins.astype(np.uint32),
        counts=counts,
        sums=sums,
        low_sum=int(entry.low_sum, 16),
        high_sum=int(entry.high_sum, 16),
    )


def _check_block_ranges(run: DataRun) -> None:
    """Check that the ranges of finished blocks ascend, do not overlap, and are within the data."""
    previous_stop = -1
    for start, stop in run.block_ranges:
        if not previous_stop < start < stop:
            raise ValueError("its header counts blocks of samples twice")
        previous_stop = stop
    if previous_stop > run.blocks:
        raise ValueError("its header counts more blocks than the data has")
