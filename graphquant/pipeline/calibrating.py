"""Running on data: statistics, alone and merged."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant import formats
from graphquant.calibration import Stats, finest, kept, load_of, load_stats, merge, planned
from graphquant.calibration import calibrate as _calibrate
from graphquant.calibration import everything as _everything
from graphquant.errors import DataError, UsageError
from graphquant.pipeline.common import stage
from graphquant.pipeline.models import loaded
from graphquant.pipeline.planning import prepared_and_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphquant.calibration import Targets
    from graphquant.data import Batches
    from graphquant.ir import Model
    from graphquant.pipeline.common import Progress, Several
    from graphquant.plans import Plan


def calibrate(
    model: Model | str | Path,
    plan: Plan | str | Path | None = None,
    data: str | Batches | None = None,
    *,
    rules: Several = (),
    everything: bool = False,
    full: bool = True,
    samples: int | None = None,
    shard: tuple[int, int] = (1, 1),
    max_memory: int | None = None,
    before: Stats | None = None,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> Stats:
    """Runs the model on samples and keeps the statistics of each tensor that a plan needs, or of every float tensor.

    Args:
        model: A model, or the path of one.
        plan: The plan, or the path of one; by default the one that the rules make.
        data: A calibration data spec, or opened data.
        rules: Names, paths or texts of rule files, where no plan is given; by default the format's own.
        everything: Observe every float tensor of the model, so that the statistics serve other rules too.
        full: Keep histograms also where no observer of the plan reads them, so that other methods can.
        samples: Use only that many samples.
        shard: Which of how many parts of the data to run, counted from 1.
        max_memory: Bytes that observed values may take; by default half of what is free.
        before: What an earlier call for the same found before it was stopped, to go on from.
        stop: Asked after each block of samples whether to end with what there is.
        progress: Is told how far the work is.

    Raises:
        DataError: The data does not fit the model, or `before` is of something else.
        MissingDependencyError: The model's framework is not installed.
        ModelError: The model cannot be read, prepared or run.
        RuleError: A rule file has mistakes.
        UsageError: The plan is of another model, or no data was named.
    """
    if data is None:
        raise UsageError("There is no data to calibrate with. Give an .npz file, or random:8 to try things out.")
    source = loaded(model)
    prepared, made = prepared_and_plan(source, plan, rules, (), (), None)
    if everything:
        prepared, targets = source, _everything(source, finest(made))
    else:
        targets = planned(prepared, made, full=full, same=kept(source, prepared))
    return observe(
        prepared,
        targets,
        data,
        samples,
        progress,
        model=source.digest,
        shard=shard,
        max_memory=max_memory,
        before=before,
        stop=stop,
    )


def statistics(given: Stats | str | Path) -> Stats:
    """The statistics that are given, or in the file at a path.

    Raises:
        DataError: The file cannot be read.
    """
    return given if isinstance(given, Stats) else load_stats(Path(given))


def merge_stats(parts: Sequence[Stats | str | Path]) -> Stats:
    """The statistics of all `parts`, or of the files at these paths, together.

    Raises:
        DataError: A file cannot be read, or they are of different models or tensors, or count samples twice.
        UsageError: There are none.
    """
    whole: Stats | None = None
    for part in parts:
        here = statistics(part)
        try:
            whole = here if whole is None else merge([whole, here])
        except DataError as error:
            named = f"{part} does not go with those before it. " if isinstance(part, str | Path) else ""
            raise DataError(f"{named}{error}") from error
    if whole is None:
        raise UsageError("There are no statistics to merge. Give two or more.")
    return whole


def observe(
    prepared: Model,
    targets: Targets,
    data: str | Batches,
    samples: int | None,
    progress: Progress | None,
    **options: Any,
) -> Stats:
    """Runs the data through the model; `options` are those of `graphquant.calibration.calibrate`."""
    from graphquant.data import open_data

    runner = formats.module(prepared.format).runner(prepared)
    batches = open_data(data, runner.inputs, samples=samples, meanwhile=True) if isinstance(data, str) else data
    load = load_of(prepared, batchable=runner.batchable)
    return _calibrate(targets, runner, batches, load=load, progress=stage(progress, "calibrating"), **options)


def calibrate_line(source: Model, made: Plan, plan: object) -> str:
    """The command whose statistics serve the plan `made`; any rules' may not serve one that was given."""
    where = shlex.quote(str(source.path or "MODEL"))
    rules = "".join(f" --rules {shlex.quote(name)}" for name in made.rules)
    return f"graphquant calibrate {where} --data SPEC{rules}{' --all' if plan else ''} -o stats.gqs"


__all__ = ["calibrate", "calibrate_line", "merge_stats", "observe", "statistics"]
