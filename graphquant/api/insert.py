"""The whole story, from rules to a rewritten graph."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant import __version__, formats
from graphquant.api.algorithms import run_postcalibration_algorithms, run_precalibration_algorithms
from graphquant.api.calibrate import calibrate_command_line, resolve_stats, run_calibration
from graphquant.api.compare import open_required_labels
from graphquant.api.latency import LatencyTimer
from graphquant.api.models import as_model
from graphquant.api.plan import prepare_and_plan
from graphquant.api.result import Result
from graphquant.api.validation import (
    Bounds,
    count_calibrated_samples,
    first_half,
    holdout_for_stats,
    split_holdout,
    split_search_set,
    validate_model,
)
from graphquant.calibration import (
    Stats,
    plan_targets,
    preserved_fingerprints,
    select_stats,
    sites_needing_data,
    with_observer,
)
from graphquant.errors import NeedsDataError, UsageError, escape_unprintable
from graphquant.quantize import (
    Plan,
    RangeTransfer,
    Skip,
    explain_scale,
    format_step_counts,
    plan_to_json,
    read_name_map,
    solve_scales,
    transfer_ranges,
)
from graphquant.quantize.rewrite import rewrite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphquant.api.latency import LatencyResult
    from graphquant.api.options import NameOrNames, Progress
    from graphquant.api.search import PlanSearchResult
    from graphquant.api.size_budget import SizeBudgetResult
    from graphquant.api.validation import HoldOut, Validation
    from graphquant.calibration.data import Dataset
    from graphquant.ir import Model, TensorRef
    from graphquant.numerics import DynamicQParams, QParams
    from graphquant.optimize import AlgorithmResult, WeightEdits
    from graphquant.quantize import Solution
    from graphquant.quantize.rewrite import InsertedPair


OPTIMIZE_GOALS = ("macs", "size", "latency")
"""What a plan can be made to cost least of."""


def insert(
    model: Model | str | Path,
    *,
    rules: NameOrNames = (),
    data: str | None = None,
    stats: Stats | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    method: str | None = None,
    ranges: Model | str | Path | None = None,
    ranges_map: Mapping[str, str] | str | Path | None = None,
    samples: int | None = None,
    max_memory: int | None = None,
    include: NameOrNames = (),
    exclude: NameOrNames = (),
    family: str | None = None,
    float_weights: bool = False,
    requantize: bool = False,
    algorithms: NameOrNames = (),
    validate: bool = True,
    min_sqnr: float | None = None,
    min_agreement: float | None = None,
    max_accuracy_drop: float | None = None,
    optimize: str = "macs",
    runtime: str | None = None,
    size_budget: str | None = None,
    progress: Progress | None = None,
) -> Result:
    """Quantizes a model: the whole story from rules to a rewritten graph, and a check on samples kept for it.

    Where there is data, its last fifth and at least 4 samples are kept from calibration, if there are 8 or more; what
    was made is measured on these. `Result.check` says what was found, nothing is refused for it.

    Args:
        model: A model, or the path of one.
        rules: Names, paths or texts of rule files, the first that matches wins; by default the format's own.
        data: A calibration data spec, as in docs/data.md; not needed where ranges come from rules or weights.
        stats: Statistics from `calibrate`, or the path of a file of them; with them `data` is for the
            check, and for corrections where the statistics are of it.
        plan: A plan, or the path of an edited one, instead of rules.
        method: The observer of all activations whose range comes from data, instead of what the rules say.
        ranges: A TFLite file, whose scales are used for the same-named activations.
        ranges_map: Names of the model's tensors and of the file's that they get their scales from, or a TOML file.
        samples: Use only that many samples.
        max_memory: Bytes that observed values may take; by default half of what is free.
        include: Globs or /regexes/; only what they name is quantized.
        exclude: Globs or /regexes/; what they name is left.
        family: The QDQ family for schemes that name none.
        float_weights: Keep weights float, with a whole QDQ pair.
        requantize: Take out the quantization that the model has already.
        algorithms: Corrections to make beside those of the rules, or "not NAME" for one that is not to be made.
        validate: Whether to keep samples and to measure; else calibration uses all.
        min_sqnr: What each output must have, dB; with a bound the check is on all samples that were kept.
        min_agreement: Share of rows of each output whose largest value must stay where it is, 0 to 1.
        max_accuracy_drop: Points of accuracy that each output may lose, 0 to 100; the data must have labels.
        optimize: What a plan that meets the bounds is to cost least of: "macs", multiply-adds in float, "size", or
            "latency", the time that a run takes on this machine, which is made least without bounds too.
        runtime: "tflite" if it is to be least in that of a TFLite file; else it is that of the format's own framework.
        size_budget: Bytes that all constants may take, "2MB", or a share of the float model's, "25%"; bits of weights
            are chosen so that least is lost, by what each adds to the outputs, or without data to itself.
        progress: Is told how far the work is.

    Raises:
        NeedsDataError: Activations have no range without data.
        DataError: The data does not fit the model.
        ModelError: The model cannot be read, prepared or rewritten.
        RuleError: A rule file has mistakes.
        UsageError: A selector or the plan names what the model does not have, or the size budget cannot be met.
    """
    if data is not None:
        from graphquant.calibration.data import check_data_spec

        check_data_spec(data)
    source = as_model(model)
    prepared, resolved_plan = prepare_and_plan(
        source, plan, rules, include, exclude, family, requantize=requantize, algorithms=algorithms
    )
    resolved_plan = with_observer(resolved_plan, method)
    tflite_ranges = None
    if ranges is not None:
        resolved_plan, tflite_ranges = _apply_tflite_ranges(prepared, resolved_plan, ranges, ranges_map)
    calibration_stats = None if stats is None else resolve_stats(stats)
    unranged_sites, holdout, calibration_data = sites_needing_data(resolved_plan), None, None
    open_data_once = cache(
        partial(_open_calibration_data, prepared, data or "", samples)
    )  # once, and only where it is wanted
    latency_timer = _make_latency_timer(source, open_data_once, data, optimize, runtime, size_budget)
    bounds = Bounds(min_sqnr=min_sqnr, min_agreement=min_agreement, max_accuracy_drop=max_accuracy_drop)
    _require_labels(prepared, open_data_once, data, samples, bounds, validate=validate)
    if (
        data is not None
        and calibration_stats is None
        and (unranged_sites or (resolved_plan.algorithms and resolved_plan.sites))
    ):
        calibration_data, holdout = _split_calibration_data(data, samples, open_data_once(), bounds, validate=validate)
    calibration_count = cache(
        partial(
            _calibrated_sample_count,
            prepared,
            calibration_stats if unranged_sites else None,
            open_data_once,
            data or "",
            calibration_data,
        )
    )
    precalibration = run_precalibration_algorithms(
        prepared, resolved_plan, calibration_data, has_stats=calibration_stats is not None
    )
    prepared, resolved_plan = precalibration.model, precalibration.plan
    if calibration_stats is not None or unranged_sites:
        fingerprints = {
            tensor: fingerprint
            for tensor, fingerprint in preserved_fingerprints(source, prepared).items()
            if tensor not in precalibration.rescaled_tensors
        }
        targets = plan_targets(
            prepared, resolved_plan, full_histograms=bool(bounds) and calibration_stats is None, overrides=fingerprints
        )
        if calibration_stats is not None:
            calibration_stats = select_stats(
                calibration_stats, targets, source.digest, calibrate_command_line(source, resolved_plan, plan)
            )
            calibration_data = (
                _algorithm_data(open_data_once, calibration_count, data, samples, validate=validate)
                if resolved_plan.algorithms
                else None
            )
        elif calibration_data is not None:
            calibration_stats = run_calibration(
                prepared, targets, calibration_data, None, progress, model=source.digest, max_memory=max_memory
            )
        else:
            raise NeedsDataError(_needs_data_message(source, unranged_sites, tflite_ranges))
    search_set = _open_search_set(
        open_data_once,
        data,
        samples,
        calibration_count if bounds else int,
        has_search=validate and bool(bounds or size_budget),
    )
    build_model = partial(
        _build_model, prepared, stats=calibration_stats, calibration_data=calibration_data, float_weights=float_weights
    )
    size_bounds = bounds if optimize == "size" else Bounds()
    size_result = _optimize_size(
        source, prepared, resolved_plan, build_model, search_set, size_budget, size_bounds, progress
    )
    resolved_plan = resolved_plan if size_result is None else size_result.plan
    run_search = None
    if search_set is not None and bounds:
        from graphquant.api.search import search_plan

        run_search = partial(
            search_plan,
            prepared,
            make_model=lambda candidate_plan: _model_and_insertions(build_model(candidate_plan)),
            validate=lambda candidate_model: validate_model(
                source, candidate_model, search_set, bounds, None, include_sites=False
            ),
            search_set=search_set,
            bounds=bounds,
            optimize=optimize,
            fixed_uses=() if size_result is None else size_result.weights,
            progress=progress,
        )
    resolved_plan, build, latency_result, search_result = _choose_plan(
        prepared, resolved_plan, build_model, latency_timer, run_search, progress
    )
    edits, solution, params, skips = build.edits, build.edits.solution, build.params, build.skips
    quantized_model, insertions, solved_plan = build.model, build.insertions, solution.plan
    resolved_plan, algorithm_results = (
        precalibration.plan_without_factors(resolved_plan),
        (*precalibration.results, *edits.results),
    )
    quantized_model.provenance = _provenance_record(
        source,
        resolved_plan,
        calibration_stats if unranged_sites else None,
        algorithm_results,
        precalibration.rescaled_tensors,
    )
    quantized_model.original_model = None if any(insertion.folded for insertion in insertions) else source
    quantized_indices = [index for index in range(len(solved_plan.sites)) if index in params]
    if data is not None and validate and holdout is None and insertions:
        holdout = holdout_for_stats(
            data,
            samples,
            open_data_once(),
            calibration_count(),
            has_search=search_set is not None,
            ranges_from_stats=bool(unranged_sites),
        )
    return Result(
        model=quantized_model if insertions else source,
        source=source,
        plan=resolved_plan,
        inserted=tuple(insertions),
        skips=(*solved_plan.skips, *(skips[index] for index in sorted(skips))),
        site_notes=_notes_by_tensor(solution),
        scale_reasons=tuple(explain_scale(edits.model, solved_plan, index, solution) for index in quantized_indices),
        changes=solution.changes,
        conflicts=solution.conflicts,
        stats=calibration_stats if unranged_sites else None,
        stats_path=Path(stats) if unranged_sites and isinstance(stats, str | Path) else None,
        tflite_ranges=tflite_ranges,
        algorithm_results=algorithm_results,
        search=search_result,
        latency=latency_result,
        size_budget=size_result,
        validation=None
        if holdout is None
        else _validate_build(source, build, holdout, bounds, search_result, progress),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BuiltModel:
    """The model of a plan: what was inserted with which scales, and what was left."""

    edits: WeightEdits
    model: Model
    insertions: list[InsertedPair]
    params: dict[int, QParams | DynamicQParams]
    skips: dict[int, Skip]


def _require_labels(
    prepared: Model,
    open_data_once: Callable[[], Dataset],
    data: str | None,
    samples: int | None,
    bounds: Bounds,
    *,
    validate: bool,
) -> None:
    """Refuses data without labels where they are what a bound is measured by."""
    if data is not None and validate and bounds.max_accuracy_drop is not None:
        open_required_labels(
            open_data_once(), data, formats.format_module(prepared.format).input_specs(prepared), samples
        )


def _make_latency_timer(
    source: Model,
    open_data_once: Callable[[], Dataset],
    data: str | None,
    optimize: str,
    runtime: str | None,
    size_budget: str | None,
) -> LatencyTimer | None:
    """What times models if that is what is to be least."""
    if optimize not in OPTIMIZE_GOALS or runtime not in {None, "tflite"}:
        unknown = optimize if optimize not in OPTIMIZE_GOALS else runtime
        raise UsageError(
            f"{escape_unprintable(repr(unknown))} is nothing to optimize for. optimize is {', '.join(OPTIMIZE_GOALS)}; runtime is tflite"
            " or left out."
        )
    if optimize != "latency":
        return None
    if data is None:
        raise UsageError("To optimize for latency, models are run on a sample. Give data.")
    if size_budget is not None:
        raise UsageError(
            "A size budget and latency pull apart: a small model may have to be slow, and float is often fastest."
            " Give one of them."
        )
    return LatencyTimer.for_data(source, open_data_once(), as_tflite=runtime == "tflite")


def _choose_plan(
    prepared: Model,
    plan: Plan,
    build_model: Callable[[Plan], _BuiltModel],
    latency_timer: LatencyTimer | None,
    run_search: Callable[..., PlanSearchResult] | None,
    progress: Progress | None,
) -> tuple[Plan, _BuiltModel, LatencyResult | None, PlanSearchResult | None]:
    """The plan that is to be, of the one that the rules make, with its model, and what was found on the way."""
    latency_result, search_result = None, None
    if latency_timer is not None:
        latency_result = latency_timer.find_fastest_plan(
            prepared, plan, lambda candidate_plan: _model_and_insertions(build_model(candidate_plan)), progress
        )
        plan = latency_result.plan
    if run_search is not None and plan.sites:
        search_result = run_search(
            plan=plan, costs=None if latency_result is None else latency_result.float_costs or None
        )
        plan = search_result.plan
    build = build_model(plan)
    if latency_timer is not None and latency_result is not None:
        latency_result = latency_timer.confirm_gain(latency_result, plan, build.model)
        if latency_result.plan is not plan:
            plan = latency_result.plan
            build = build_model(plan)
            search_result = search_result if build.insertions else None  # it is of the plan that is not taken
            search_result = search_result and replace(search_result, site_errors={})  # that is of another plan
    return plan, build, latency_result, search_result


def _calibrated_sample_count(
    prepared: Model,
    stats: Stats | None,
    open_data_once: Callable[[], Dataset],
    data: str,
    calibration_data: Dataset | None,
) -> int:
    """How many of the first samples are for ranges and corrections: those `calibration_data`, or those that statistics are of."""
    if calibration_data is not None or stats is None:
        return 0 if calibration_data is None else calibration_data.count
    return count_calibrated_samples(stats, open_data_once(), partial(_open_calibration_data, prepared, data))


def _open_search_set(
    open_data_once: Callable[[], Dataset],
    data: str | None,
    samples: int | None,
    calibration_count: Callable[[], int],
    *,
    has_search: bool,
) -> HoldOut | None:
    """The samples that a search looks at, where there is one; the first that were `calibration_count` are not among them."""
    return (
        split_search_set(data, samples, open_data_once(), calibration_count())
        if data is not None and has_search
        else None
    )


def _optimize_size(
    source: Model,
    prepared: Model,
    plan: Plan,
    build_model: Callable[[Plan], _BuiltModel],
    search_set: HoldOut | None,
    budget: str | None,
    size_bounds: Bounds,
    progress: Progress | None,
) -> SizeBudgetResult | None:
    """The plan that fits into a size budget, or with which bounds are met in the fewest bytes, where there are any."""
    from graphquant.api.size_budget import fit_size_budget, minimize_size

    def make_model(candidate_plan: Plan) -> tuple[Model, list[InsertedPair]]:
        return _model_and_insertions(build_model(candidate_plan))

    if budget is not None:
        return fit_size_budget(source, prepared, plan, make_model, search_set, budget, progress)
    if search_set is None or not size_bounds:
        return None
    validate = partial(
        validate_model, source, holdout=search_set, bounds=size_bounds, progress=None, include_sites=False
    )
    return minimize_size(source, prepared, plan, make_model, validate, search_set, size_bounds, progress)


def _validate_build(
    source: Model,
    build: _BuiltModel,
    holdout: HoldOut,
    bounds: Bounds,
    search_result: PlanSearchResult | None,
    progress: Progress | None,
) -> Validation | None:
    """What was made, measured on the samples that were kept; None where nothing was."""
    if not build.insertions:
        return None
    validation = validate_model(source, build.model, holdout, bounds, progress)
    if search_result is None:
        return validation
    from graphquant.api.search import attach_sensitivity

    return attach_sensitivity(validation, search_result, build.model, build.insertions)


def _model_and_insertions(build: _BuiltModel) -> tuple[Model, list[InsertedPair]]:
    return build.model, build.insertions


def _build_model(
    prepared: Model, plan: Plan, *, stats: Stats | None, calibration_data: Dataset | None, float_weights: bool
) -> _BuiltModel:
    """Scales, corrections and new ops for a plan."""
    solution = (
        solve_scales(prepared, plan, stats.sketches, stats.unobservable) if stats else solve_scales(prepared, plan, {})
    )
    edits = run_postcalibration_algorithms(prepared, solution, plan, calibration_data)
    solved_plan, params, skips = edits.solution.plan, dict(edits.solution.params), dict(edits.solution.skips)
    for index, site in enumerate(solved_plan.sites if float_weights else ()):
        if index in params and site.scheme.type.bits == 32:  # noqa: PLR2004  # no op quantizes to int32 at run time
            del params[index]
            skips[index] = Skip(tensor=site.tensor, uses=site.uses, rule=site.rule, reason="weights are kept float")
    quantized_model, insertions = rewrite(
        edits.model, solved_plan, params, float_weights=float_weights, integer_cache=edits.integer_cache
    )
    return _BuiltModel(edits=edits, model=quantized_model, insertions=insertions, params=params, skips=skips)


def _open_calibration_data(prepared: Model, data: str, samples: int | None) -> Dataset:
    """The data, read through once for its digest while it is used."""
    from graphquant.calibration.data import open_data

    return open_data(
        data, formats.format_module(prepared.format).input_specs(prepared), samples=samples, check_in_background=True
    )


def _split_calibration_data(
    data: str, samples: int | None, batches: Dataset, bounds: Bounds, *, validate: bool
) -> tuple[Dataset, HoldOut | None]:
    """The samples to calibrate on, half of them where a search is to judge by others, and those for the check."""
    if not validate:
        return batches, None
    calibration_data, holdout = split_holdout(data, samples, batches)
    return (first_half(calibration_data) if bounds else calibration_data), holdout


def _algorithm_data(
    open_data_once: Callable[[], Dataset],
    calibration_count: Callable[[], int],
    data: str | None,
    samples: int | None,
    *,
    validate: bool,
) -> Dataset | None:
    """The first samples, which were `calibration_count` for statistics, that are not the check's; None where there are none."""
    if data is None or not calibration_count():
        return None
    calibration_data = split_holdout(data, samples, open_data_once())[0] if validate else open_data_once()
    return replace(calibration_data, count=min(calibration_data.count, calibration_count()))


def _notes_by_tensor(solution: Solution) -> dict[TensorRef, str]:
    """The notes by tensor; those of several sites of one are told one after the other."""
    notes: dict[TensorRef, str] = {}
    for index, site_notes in sorted(solution.notes.items()):
        tensor = solution.plan.sites[index].tensor
        notes[tensor] = "; ".join(filter(None, (notes.get(tensor), *site_notes)))
    return notes


def _provenance_record(
    source: Model,
    plan: Plan,
    stats: Stats | None,
    algorithm_results: Sequence[AlgorithmResult],
    scaled_tensors: frozenset[TensorRef],
) -> dict[str, str]:
    """What the written model is to say of where it came from: nothing of this machine and no time."""
    plan_json = plan_to_json(replace(plan, rules=(), steps=()))  # names of rules may be paths
    plan_json["steps"] = [[step.step, step.target, step.detail] for step in plan.steps]
    plan_digest = hashlib.sha256(json.dumps(plan_json, sort_keys=True).encode()).hexdigest()
    methods = sorted({site.scheme.observe.name for site in sites_needing_data(plan)})
    record = {
        "version": __version__,
        "source": source.digest,
        "plan": plan_digest,
        "rules": plan.digest,
        "method": ", ".join(methods) if stats is not None else "",
        "data": ", ".join(run.data_digest for run in stats.runs) if stats is not None else "",
        "steps": format_step_counts(step.step for step in plan.steps),
        "scaled": json.dumps(sorted(map(str, scaled_tensors))) if scaled_tensors else "",
        "corrections": format_step_counts(
            algorithm_result.algorithm for algorithm_result in algorithm_results if algorithm_result.applied
        ),
        "random": "yes" if stats is not None and stats.random else "",
    }
    return {key: value for key, value in record.items() if value}


def _apply_tflite_ranges(
    prepared: Model, plan: Plan, ranges: Model | str | Path, tensor_names: Mapping[str, str] | str | Path | None
) -> tuple[Plan, RangeTransfer]:
    """The plan with the scales of a TFLite file."""
    source = as_model(ranges)
    if source.format != "tflite":
        raise UsageError(f"{source.path or 'The model'} is no TFLite file. Give one whose scales are to be used.")
    return transfer_ranges(
        prepared,
        plan,
        source,
        read_name_map(Path(tensor_names)) if isinstance(tensor_names, str | Path) else tensor_names or {},
    )


def _needs_data_message(model: Model, unranged_sites: Sequence[Any], ranges: RangeTransfer | None) -> str:
    if ranges is not None:
        return (
            f"{ranges.path or 'The TFLite model'} has ranges for {len(ranges.transferred)} of the plan's tensors and none for"
            f" {len(unranged_sites)} activations, the first of which is {unranged_sites[0].tensor}. Give calibration data for these,"
            " or say with --ranges-map which tensors of that file they are."
        )
    suggestions = [("data", "calibration.npz"), ("rules", "fixed_point"), ("rules", "weight_only")]
    if model.live_object:
        lines = [f'  gq.insert(model, {name}="{value}")' for name, value in suggestions]
    else:
        model_path = shlex.quote(str(model.path or "MODEL"))
        lines = [f"  graphquant insert {model_path} --{name} {value}" for name, value in suggestions]
    suggestion_lines = "\n".join(lines)
    return (
        f"{len(unranged_sites)} activations have no range yet, the first is {unranged_sites[0].tensor}. Give calibration data, use"
        f" fixed-point ranges, or quantize the weights alone:\n{suggestion_lines}"
    )
