"""Calibration: statistics of a model on data, and their merging."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant.api.models import load_source
from graphquant.api.plan import prepare_and_plan
from graphquant.calibration.calibrate import CalibrationRun, calibrate_model
from graphquant.calibration.data import Dataset, as_data_spec
from graphquant.calibration.holdout import complete_model_data, open_model_data
from graphquant.calibration.stats import Stats, combine_stats, load_stats
from graphquant.calibration.targets import all_float_targets, finest_histogram_bits, plan_targets
from graphquant.errors import DataError, UsageError
from graphquant.utils import Progress, stage_progress
from graphquant.utils.options import CalibrateOptions, PlanOptions, checks_types, resolve_options, takes_options

if TYPE_CHECKING:
    from graphquant.ir import Model
    from graphquant.quantize import Plan


@takes_options(CalibrateOptions)
def calibrate(
    model: Model | str | Path,
    plan: Plan | str | Path | None = None,
    data: Any = None,
    options: CalibrateOptions | None = None,
    *,
    partial_stats: Stats | None = None,
    should_stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
    **values: Any,
) -> Stats:
    """Run the model on data and collect statistics of each tensor that a plan needs, or of each float tensor.

    Args:
        model: A model, or its path.
        plan: A plan, or its path; by default the plan of the rules.
        data: A data spec, arrays, or an iterable of samples; see docs/data.md.
        options: The options, in place of keyword arguments.
        partial_stats: Statistics of an interrupted call with the same arguments, to continue.
        should_stop: Called after each block of samples; calibration ends when it returns True.
        progress: Progress callback.
        values: The options as keyword arguments.

    Raises:
        DataError: The data does not fit the model, or `partial_stats` belongs to other arguments.
        MissingDependencyError: The model's framework is not installed.
        ModelError: The model cannot be read, prepared or run.
        RuleError: A rule file has mistakes.
        UsageError: The plan belongs to another model, an option is invalid, or there is no data.
    """
    from graphquant.calibration.data.check import check_samples

    settings = resolve_options(CalibrateOptions, options, values)
    if data is None:
        raise UsageError("There is no calibration data. Pass an .npz file, or random:8 for a test.")
    spec = "" if isinstance(data, Dataset) else as_data_spec(data)
    source = load_source(model, settings, spec)
    # The statistics also serve a later `insert` that minimizes size or latency, so no op is left out by its cost.
    prepared, resolved_plan = prepare_and_plan(source, PlanOptions(rules=settings.rules), plan, by_cost=False)
    if settings.everything:
        prepared, targets = source, all_float_targets(source, finest_histogram_bits(resolved_plan))
    else:
        targets = plan_targets(source, prepared, resolved_plan, full_histograms=settings.full)
    if not isinstance(data, Dataset):
        data = open_model_data(prepared, complete_model_data(source, spec), settings.samples)
    findings = check_samples(data, source)
    run = CalibrationRun(
        model_digest=source.digest,
        shard=settings.shard,
        max_memory=settings.max_memory,
        resume_from=partial_stats,
        should_stop=should_stop,
        progress=stage_progress(progress, "calibrating"),
    )
    return replace(calibrate_model(prepared, targets, data, run), data_findings=findings)


@checks_types
def resolve_stats(stats: Stats | str | Path) -> Stats:
    """Return the statistics, loaded from their file if `stats` is a path.

    Raises a DataError if the file cannot be read.
    """
    return stats if isinstance(stats, Stats) else load_stats(Path(stats))


def merge_stats(stats_list: Sequence[Stats | str | Path]) -> Stats:
    """Merge statistics of several shards, given as objects or paths.

    Raises:
        DataError: A file cannot be read; or the statistics belong to different models or tensors, or share samples.
        UsageError: The list is empty.
    """
    merged: Stats | None = None
    for stats in stats_list:
        loaded = resolve_stats(stats)
        try:
            merged = loaded if merged is None else combine_stats([merged, loaded])
        except DataError as error:
            prefix = f"{stats} cannot be merged with the files before it. " if isinstance(stats, str | Path) else ""
            raise DataError(f"{prefix}{error}") from error
    if merged is None:
        raise UsageError("There are no statistics to merge. Pass two or more statistics files.")
    return merged


def calibrate_command_line(source: Model, resolved_plan: Plan, plan: object) -> str:
    """Return the command that collects the statistics for a plan; of all tensors if no rules were the source of it."""
    model_path = shlex.quote(str(source.path or "MODEL"))
    rules = "".join(f" --rules {shlex.quote(name)}" for name in resolved_plan.rules)
    return f"graphquant calibrate {model_path} --data SPEC{rules}{' --all' if plan else ''} -o stats.gqs"
