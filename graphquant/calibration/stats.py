"""What calibration found, of which model and on which data; merging, and picking what a plan needs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant.errors import DataError
from graphquant.sketch import EMPTY, Sketch
from graphquant.sketch import merge as merge_sketches

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from graphquant.calibration.targets import Target
    from graphquant.ir import TensorRef

SHOWN = 5
"""Tensors that an error names; the rest are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Some data, and which blocks of its samples were run.

    Attributes:
        data: Digest of all its samples.
        samples: Number of samples in all.
        block: Samples in a block; the last block may have fewer.
        done: Ranges of blocks, [start, stop), ascending and apart.
        random: Whether the data was made up.
    """

    data: str
    samples: int
    block: int
    done: tuple[tuple[int, int], ...]
    random: bool = False

    @property
    def blocks(self) -> int:
        """Number of blocks in all."""
        return -(-self.samples // self.block)

    @property
    def blocks_done(self) -> int:
        """Number of blocks that were run."""
        return sum(stop - start for start, stop in self.done)

    @property
    def samples_done(self) -> int:
        """Number of samples that were run."""
        return sum(min(stop * self.block, self.samples) - start * self.block for start, stop in self.done)

    @property
    def complete(self) -> bool:
        """Whether all of it was run."""
        return self.blocks_done == self.blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What calibration found.

    Attributes:
        model: Digest of the source model.
        targets: What was observed, by tensor, and what was kept of it.
        sketches: The sketch of each tensor that was reached; of no values where it only ever was empty.
        runs: The data.
        unwatchable: Tensors that cannot be observed, with the reason.
    """

    model: str
    targets: Mapping[TensorRef, Target]
    sketches: Mapping[TensorRef, Sketch]
    runs: tuple[Run, ...] = ()
    unwatchable: Mapping[TensorRef, str] = field(default_factory=dict)

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
        """Whether any of the data was made up."""
        return any(run.random for run in self.runs)

    @property
    def complete(self) -> bool:
        """Whether all samples of all its data were run."""
        return all(run.complete for run in self.runs)

    def unseen(self, tensor: TensorRef) -> str:
        """Why there are no values of a target; an empty text if there are."""
        found = self.sketches.get(tensor)
        if found is None:
            return self.unwatchable.get(tensor, "no sample of the data reached it")
        return "" if found.count else f"it was empty all {found.blank} times that it was seen"

    def save(self, path: str | Path) -> None:
        """Writes the statistics to `path`, whole or not at all.

        Raises:
            UsageError: It cannot be written.
        """
        from graphquant.calibration.file import save_stats

        save_stats(self, Path(path))


def merge(parts: Sequence[Stats]) -> Stats:
    """The statistics of all parts together; the order of `parts` does not show in it.

    Raises:
        DataError: The parts are of different models or tensors, or two hold the same block of the same data.
    """
    whole = parts[0]
    for part in parts[1:]:
        whole = _joined(whole, part)
    return whole


def _joined(one: Stats, other: Stats) -> Stats:
    if one.model != other.model:
        raise DataError("They are of different models. Merge statistics of one model only.")
    if dict(one.targets) != dict(other.targets) or dict(one.unwatchable) != dict(other.unwatchable):
        differ = [str(t) for t in {**one.targets, **other.targets} if one.targets.get(t) != other.targets.get(t)]
        named = f"the first is {differ[0]}" if differ else "some can be observed in one of them only"
        raise DataError(
            f"They do not hold the same tensors, kept alike ({named}). Calibrate all parts with the same rules and the"
            " same model."
        )
    runs = {run.data: run for run in one.runs}
    for run in other.runs:
        runs[run.data] = _run(runs[run.data], run) if run.data in runs else run
    names = [tensor for tensor in one.targets if tensor in one.sketches or tensor in other.sketches]
    return replace(
        one,
        sketches={t: merge_sketches(one.sketches.get(t, EMPTY), other.sketches.get(t, EMPTY)) for t in names},
        runs=tuple(runs[data] for data in sorted(runs)),
    )


def _run(one: Run, other: Run) -> Run:
    if (one.samples, one.block, one.random) != (other.samples, other.block, other.random):
        raise DataError("They cut the same data into other blocks. Calibrate both parts with the same version.")
    found: list[tuple[int, int]] = []
    for start, stop in sorted([*one.done, *other.done]):
        if found and start < found[-1][1]:
            raise DataError(
                f"Both hold the samples {start * one.block} to {min(stop, found[-1][1]) * one.block - 1} of the same"
                " data, which would count twice. Give each shard once."
            )
        if found and start == found[-1][1]:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return replace(one, done=tuple(found))


def select(stats: Stats, wanted: Mapping[TensorRef, Target], model: str, command: str) -> Stats:
    """The statistics of `wanted`, under the names it gives the tensors.

    Args:
        stats: What there is.
        wanted: The tensors that a plan needs.
        model: Digest of the plan's source model.
        command: What to run for statistics that do.

    Raises:
        DataError: They are of another model or of no samples, or do not hold all that is wanted.
    """
    if stats.model != model:
        raise DataError(f"The statistics are of another model, or it was changed since. Make them anew:\n  {command}")
    if wanted and stats.runs and not stats.samples:
        raise DataError(
            f"The statistics are of none of {sum(run.samples for run in stats.runs)} samples, as of a shard without any"
            f" block. Merge them with those of other shards (calibrate --merge), or make them anew:\n  {command}"
        )
    by_cone: dict[str, list[TensorRef]] = {}
    for tensor, target in stats.targets.items():
        by_cone.setdefault(target.cone, []).append(tensor)
    unwatchable = {tensor: stats.unwatchable[tensor] for tensor in wanted if tensor in stats.unwatchable}
    sketches: dict[TensorRef, Sketch] = {}
    missing: dict[TensorRef, str] = {}
    for tensor, target in wanted.items():
        if tensor in unwatchable:
            continue
        reasons = {other: stats.targets[other].serves(target) for other in by_cone.get(target.cone, ())}
        enough = [other for other, reason in reasons.items() if not reason]
        if not enough:
            missing[tensor] = next(iter(reasons.values()), _absent(stats, tensor))
        elif enough[0] in stats.sketches:
            sketches[tensor] = stats.sketches[enough[0]]
    if missing:
        raise DataError(f"{_listed(missing)}Calibrate for this plan:\n  {command}")
    return replace(stats, targets=dict(wanted), sketches=sketches, unwatchable=unwatchable)


def _absent(stats: Stats, tensor: TensorRef) -> str:
    if tensor in stats.targets:
        return "there it is computed otherwise: the model was prepared otherwise, or its weights changed"
    return "it was not observed"


def _listed(missing: Mapping[TensorRef, str]) -> str:
    shown = [f"\n  {tensor}: {reason}" for tensor, reason in list(missing.items())[:SHOWN]]
    more = f"\n  and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    what = "one tensor" if len(missing) == 1 else f"{len(missing)} tensors"
    return f"The statistics lack {what} of the plan:{''.join(shown)}{more}\n"


def spans(done: Iterable[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """The parts of [start, stop) that are not in the ascending ranges `done`."""
    found, here = [], start
    for low, high in done:
        if low > here:
            found.append((here, min(low, stop)))
        here = max(here, high)
    if here < stop:
        found.append((here, stop))
    return [(low, high) for low, high in found if low < high]
