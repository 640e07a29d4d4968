"""Calibration statistics of a model; combining shards, and selecting the statistics that a plan needs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant.errors import DataError
from graphquant.observers import EMPTY_SKETCH, Sketch, merge_sketches

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from graphquant.calibration.targets import ObservationTarget
    from graphquant.ir import TensorRef


MAX_LISTED_TENSORS = 5
"""Maximum number of tensors that an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRun:
    """One data set and the blocks of its samples that were run.

    Attributes:
        data_digest: Digest of all samples.
        samples: Total number of samples.
        block_size: Samples in a block; the last block may have fewer.
        block_ranges: Ranges [start, stop) of finished blocks, ascending and disjoint.
        random: Whether the data is random.
    """

    data_digest: str
    samples: int
    block_size: int
    block_ranges: tuple[tuple[int, int], ...]
    random: bool = False

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
        return sum(
            min(stop * self.block_size, self.samples) - start * self.block_size for start, stop in self.block_ranges
        )

    @property
    def complete(self) -> bool:
        """True if all blocks are finished."""
        return self.blocks_done == self.blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Result of a calibration.

    Attributes:
        model_digest: Digest of the source model.
        targets: Observed tensors and the details that were collected.
        sketches: Sketch of each tensor that was reached. It has no values if the tensor was always empty.
        runs: The data sets.
        unobservable: Tensors that cannot be observed, with the reason.
    """

    model_digest: str
    targets: Mapping[TensorRef, ObservationTarget]
    sketches: Mapping[TensorRef, Sketch]
    runs: tuple[DataRun, ...] = ()
    unobservable: Mapping[TensorRef, str] = field(default_factory=dict)

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

    def missing_reason(self, tensor: TensorRef) -> str:
        """Return the reason why a target has no values, or "" if it has some."""
        sketch = self.sketches.get(tensor)
        if sketch is None:
            return self.unobservable.get(tensor, "no sample reached it")
        return "" if sketch.count else f"it was empty in all {sketch.empty_arrays} observations"

    def save(self, path: str | Path) -> None:
        """Write the statistics to `path` atomically.

        Raises:
            UsageError: The file cannot be written.
        """
        from graphquant.calibration.stats_file import save_stats

        save_stats(self, Path(path))


def combine_stats(all_stats: Sequence[Stats]) -> Stats:
    """Combine statistics of several shards. The result does not depend on their order.

    Raises:
        DataError: The statistics are of different models or tensors, or two contain the same block of the same data.
    """
    merged = all_stats[0]
    for next_stats in all_stats[1:]:
        merged = _merge_two_stats(merged, next_stats)
    return merged


def _merge_two_stats(first: Stats, second: Stats) -> Stats:
    if first.model_digest != second.model_digest:
        raise DataError("The statistics are of different models. Merge only statistics of one model.")
    if dict(first.targets) != dict(second.targets) or dict(first.unobservable) != dict(second.unobservable):
        differing = [
            str(t) for t in {**first.targets, **second.targets} if first.targets.get(t) != second.targets.get(t)
        ]
        difference = f"the first one is {differing[0]}" if differing else "some can be observed in only one of them"
        raise DataError(
            f"The statistics differ in their tensors or collected details ({difference}). Calibrate all shards with"
            " the same rules and the"
            " same model."
        )
    data_runs = {run.data_digest: run for run in first.runs}
    for run in second.runs:
        data_runs[run.data_digest] = (
            _merge_data_runs(data_runs[run.data_digest], run) if run.data_digest in data_runs else run
        )
    tensors = [tensor for tensor in first.targets if tensor in first.sketches or tensor in second.sketches]
    return replace(
        first,
        sketches={
            t: merge_sketches(first.sketches.get(t, EMPTY_SKETCH), second.sketches.get(t, EMPTY_SKETCH))
            for t in tensors
        },
        runs=tuple(data_runs[data] for data in sorted(data_runs)),
    )


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
                f" {min(stop, ranges[-1][1]) * first.block_size - 1} of the same"
                " data, which would count twice. Merge each shard only once."
            )
        if ranges and start == ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return replace(first, block_ranges=tuple(ranges))


def select_stats(
    stats: Stats, targets: Mapping[TensorRef, ObservationTarget], model_digest: str, command: str
) -> Stats:
    """Select the statistics of `targets`, under the names that `targets` uses.

    Args:
        stats: The available statistics.
        targets: The tensors that a plan needs.
        model_digest: Digest of the source model of the plan.
        command: Command line that collects suitable statistics, for error messages.

    Raises:
        DataError: The statistics belong to another model, have no samples, or lack a target.
    """
    if stats.model_digest != model_digest:
        raise DataError(f"The statistics are of another model, or the model has changed. Calibrate again:\n  {command}")
    if targets and stats.runs and not stats.samples:
        raise DataError(
            f"The statistics cover none of {sum(run.samples for run in stats.runs)} samples, for example a shard"
            " without any"
            f" block. Merge them with other shards (calibrate --merge), or calibrate again:\n  {command}"
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
            missing[tensor] = next(iter(reasons.values()), _missing_tensor_reason(stats, tensor))
        elif sufficient[0] in stats.sketches:
            sketches[tensor] = stats.sketches[sufficient[0]]
    if missing:
        raise DataError(f"{_missing_tensors_message(missing)}Calibrate for this plan:\n  {command}")
    return replace(stats, targets=dict(targets), sketches=sketches, unobservable=unobservable)


def _missing_tensor_reason(stats: Stats, tensor: TensorRef) -> str:
    if tensor in stats.targets:
        return "its computation differs: the preparation or the weights of the model have changed"
    return "it was not observed"


def _missing_tensors_message(missing: Mapping[TensorRef, str]) -> str:
    lines = [f"\n  {tensor}: {reason}" for tensor, reason in list(missing.items())[:MAX_LISTED_TENSORS]]
    remainder = f"\n  and {len(missing) - MAX_LISTED_TENSORS} more" if len(missing) > MAX_LISTED_TENSORS else ""
    subject = "one tensor" if len(missing) == 1 else f"{len(missing)} tensors"
    return f"The statistics lack {subject} of the plan:{''.join(lines)}{remainder}\n"


def uncovered_ranges(covered: Iterable[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of [start, stop) that the ascending ranges `covered` do not cover."""
    gaps, position = [], start
    for low, high in covered:
        if low > position:
            gaps.append((position, min(low, stop)))
        position = max(position, high)
    if position < stop:
        gaps.append((position, stop))
    return [(low, high) for low, high in gaps if low < high]
