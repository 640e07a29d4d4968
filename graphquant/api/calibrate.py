"""Running on data: statistics, alone and merged."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant import formats
from graphquant.api.models import as_model
from graphquant.api.options import stage_progress
from graphquant.api.plan import prepare_and_plan
from graphquant.calibration import (
    Stats,
    combine_stats,
    estimate_footprint,
    finest_histogram_bits,
    load_stats,
    plan_targets,
    preserved_fingerprints,
)
from graphquant.calibration import all_float_targets as _everything
from graphquant.calibration import collect_stats as _calibrate
from graphquant.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphquant.api.options import NameOrNames, Progress
    from graphquant.calibration import ObservationTargets
    from graphquant.calibration.data import Dataset
    from graphquant.ir import Model
    from graphquant.quantize import Plan


def calibrate(
    model: Model | str | Path,
    plan: Plan | str | Path | None = None,
    data: str | Dataset | None = None,
    *,
    rules: NameOrNames = (),
    everything: bool = False,
    full: bool = True,
    samples: int | None = None,
    shard: tuple[int, int] = (1, 1),
    max_memory: int | None = None,
    partial_stats: Stats | None = None,
    should_stop: Callable[[], bool] | None = None,
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
        partial_stats: What an earlier call for the same found before it was stopped, to go on from.
        should_stop: Asked after each block of samples whether to end with what there is.
        progress: Is told how far the work is.

    Raises:
        DataError: The data does not fit the model, or `partial_stats` is of something else.
        MissingDependencyError: The model's framework is not installed.
        ModelError: The model cannot be read, prepared or run.
        RuleError: A rule file has mistakes.
        UsageError: The plan is of another model, or no data was named.
    """
    if data is None:
        raise UsageError("There is no data to calibrate with. Give an .npz file, or random:8 to try things out.")
    source = as_model(model)
    prepared, resolved_plan = prepare_and_plan(source, plan, rules, (), (), None)
    if everything:
        prepared, targets = source, _everything(source, finest_histogram_bits(resolved_plan))
    else:
        targets = plan_targets(
            prepared, resolved_plan, full_histograms=full, overrides=preserved_fingerprints(source, prepared)
        )
    return run_calibration(
        prepared,
        targets,
        data,
        samples,
        progress,
        model=source.digest,
        shard=shard,
        max_memory=max_memory,
        before=partial_stats,
        stop=should_stop,
    )


def resolve_stats(stats: Stats | str | Path) -> Stats:
    """The statistics that are given, or in the file at a path.

    Raises:
        DataError: The file cannot be read.
    """
    return stats if isinstance(stats, Stats) else load_stats(Path(stats))


def merge_stats(stats_list: Sequence[Stats | str | Path]) -> Stats:
    """The statistics of all `stats_list`, or of the files at these paths, together.

    Raises:
        DataError: A file cannot be read, or they are of different models or tensors, or count samples twice.
        UsageError: There are none.
    """
    merged: Stats | None = None
    for stats in stats_list:
        loaded_stats = resolve_stats(stats)
        try:
            merged = loaded_stats if merged is None else combine_stats([merged, loaded_stats])
        except DataError as error:
            prefix = f"{stats} does not go with those before it. " if isinstance(stats, str | Path) else ""
            raise DataError(f"{prefix}{error}") from error
    if merged is None:
        raise UsageError("There are no statistics to merge. Give two or more.")
    return merged


def run_calibration(
    prepared: Model,
    targets: ObservationTargets,
    data: str | Dataset,
    samples: int | None,
    progress: Progress | None,
    **options: Any,
) -> Stats:
    """Runs the data through the model; `options` are those of `graphquant.calibration.calibrate`."""
    from graphquant.calibration.data import open_data

    runner = formats.format_module(prepared.format).create_runner(prepared)
    batches = (
        open_data(data, runner.inputs, samples=samples, check_in_background=True) if isinstance(data, str) else data
    )
    load = estimate_footprint(prepared, batch_independent=runner.batch_independent)
    return _calibrate(
        targets, runner, batches, footprint=load, progress=stage_progress(progress, "calibrating"), **options
    )


def calibrate_command_line(source: Model, resolved_plan: Plan, plan: object) -> str:
    """The command whose statistics serve the plan `resolved_plan`; any rules' may not serve one that was given."""
    model_path = shlex.quote(str(source.path or "MODEL"))
    rule_options = "".join(f" --rules {shlex.quote(name)}" for name in resolved_plan.rules)
    return f"graphquant calibrate {model_path} --data SPEC{rule_options}{' --all' if plan else ''} -o stats.gqs"
