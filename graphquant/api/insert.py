"""Quantization of a model, from rules to a rewritten and validated graph."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant import __version__, formats
from graphquant.analysis.range_report import Loss, activation_sqnr
from graphquant.analysis.validation import Bounds, Validation, count_quantized_macs, require_usable, validate_model
from graphquant.api.calibrate import calibrate_command_line, check_samples, resolve_stats, run_calibration
from graphquant.api.models import as_model, save
from graphquant.api.plan import prepare_and_plan
from graphquant.backends import Verdict, judge_ops
from graphquant.calibration import (
    Stats,
    plan_targets,
    preserved_fingerprints,
    refuse_growth,
    select_stats,
    sites_needing_data,
)
from graphquant.calibration.holdout import CalibrationData, open_required_labels
from graphquant.errors import EmptyResultError, ModelError, NeedsDataError, UsageError
from graphquant.ir import QUANTIZATION_KINDS, Model, TensorRef
from graphquant.optimize import (
    AlgorithmResult,
    BuiltModel,
    Objective,
    PreCalibrationState,
    SearchTrace,
    attach_sensitivity,
    build_model,
    run_precalibration_algorithms,
    search_plan,
)
from graphquant.quantize import (
    Conflict,
    Plan,
    RangeTransfer,
    ScaleChange,
    Skip,
    Solution,
    explain_scale,
    format_step_counts,
    plan_to_json,
    read_name_map,
    transfer_ranges,
)
from graphquant.utils import HtmlRepresentation, Progress
from graphquant.utils.options import InsertOptions, resolve_options, takes_options

if TYPE_CHECKING:
    from graphquant.calibration.data import Dataset
    from graphquant.calibration.data.check import DataFinding
    from graphquant.quantize.rewrite import InsertedPair


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(HtmlRepresentation):
    """Result of `insert`.

    Attributes:
        model: The quantized model.
        source: The float model.
        plan: The applied plan.
        inserted: The inserted Q/DQ pairs, one for each site.
        skips: Tensors that the plan or the solver skipped, with the reason.
        site_notes: Notes on sites, by tensor.
        scale_reasons: Explanations of the scale, for each of `inserted`.
        changes: Raised scales, copied weights and added pairs, with the reason.
        conflicts: Requirements of rules that contradict each other.
        stats: Statistics of the activations, or None if no data was needed.
        stats_path: The statistics file, or None if they were collected by this call.
        tflite_ranges: Use of a TFLite file's scales, or None without a file.
        algorithm_results: Changes by optimization algorithms, and ops that they skipped, with the reason.
        search: Result of the search, or None without bounds, a size budget or optimized latency.
        validation: Errors of the quantized model on the hold-out, or None without data.
        unjudged_reason: Reason why it is unknown whether the runtime accepts the model, or "".
        verdicts: How the installed ONNX Runtime runs each op; none if it cannot load the model, and in other formats.
        data_findings: Likely mistakes in the data.
    """

    model: Model
    source: Model
    plan: Plan
    inserted: tuple[InsertedPair, ...]
    skips: tuple[Skip, ...]
    site_notes: Mapping[TensorRef, str] = field(default_factory=dict)
    scale_reasons: tuple[tuple[str, ...], ...] = ()
    changes: tuple[ScaleChange, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    stats: Stats | None = None
    stats_path: Path | None = None
    tflite_ranges: RangeTransfer | None = None
    algorithm_results: tuple[AlgorithmResult, ...] = ()
    validation: Validation | None = None
    unjudged_reason: str = ""
    verdicts: tuple[Verdict, ...] = ()
    search: SearchTrace | None = None
    data_findings: tuple[DataFinding, ...] = ()

    @property
    def calibration_samples(self) -> int:
        """Number of calibration samples."""
        return self.stats.samples if self.stats is not None else 0

    @property
    def has_random_data(self) -> bool:
        """True if any calibration samples were generated."""
        return self.stats is not None and self.stats.random

    @property
    def activation_sqnr(self) -> tuple[Loss, ...]:
        """Estimated SQNR of the quantized activations, lowest first."""
        return activation_sqnr(self.inserted, self.stats.sketches if self.stats is not None else {})

    @property
    def already_quantized(self) -> bool:
        """True if the model was quantized before, and stays unchanged."""
        graphs = (self.source.graphs[name] for name in self.source.reachable_graphs())
        kinds = {op.kind for graph in graphs for op in graph.ops()} if not self.inserted else set()
        return not kinds.isdisjoint(QUANTIZATION_KINDS | {"integer"})

    @property
    def quantized_share(self) -> float | None:
        """Share of multiply-adds whose inputs are all quantized; None if the sizes of some are unknown without data."""
        if self.validation is not None and self.validation.total_macs:
            return self.validation.quantized_share
        quantized, total = count_quantized_macs(self.source, self.model)
        return quantized / total if total else None

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the quantized model and return its path; see `save`."""
        return save(self.model, path, force=force)


@takes_options(InsertOptions)
def insert(
    model: Model | str | Path,
    options: InsertOptions | None = None,
    /,
    *,
    progress: Progress | None = None,
    **values: Any,
) -> Result:
    """Quantize a model, and validate the result on a hold-out.

    With data, the last fifth of the samples, at least 4 of 8 or more, is held out from calibration, and the quantized
    model is validated on it. `Result.validation` has the outcome; a missed bound raises no error.

    Args:
        model: A model, or its path.
        options: The options, in place of keyword arguments.
        progress: Progress callback.
        values: The options as keyword arguments.

    Raises:
        NeedsDataError: The ranges of some activations need data, and there is none.
        DataError: The data does not fit the model.
        FindingsError: The runtime cannot load the quantized model, or its outputs have new NaN or infinite values.
        ModelError: The model cannot be read, prepared or rewritten.
        RuleError: A rule file has mistakes.
        EmptyResultError: No tensor would be quantized, also because no plan meets the bounds. `allow_empty` accepts it.
        UsageError: An option is invalid, a pattern matches nothing, or the size budget cannot be met.
    """
    settings = resolve_options(InsertOptions, options, values)
    if settings.data is not None:
        from graphquant.calibration.data import parse_data_spec

        parse_data_spec(settings.data)
    source = as_model(model, allow_links=settings.allow_links)
    refuse_growth(source, settings.max_memory)
    prepared, plan = prepare_and_plan(source, settings, settings.plan)
    plan, transfer = _apply_tflite_ranges(prepared, plan, settings)
    stats = None if settings.stats is None else resolve_stats(settings.stats)
    data = _open_data(prepared, plan, stats, settings)
    objective = _make_objective(prepared, data, settings)
    needs_calibration = bool(sites_needing_data(plan) or (plan.algorithms and plan.sites))
    if data.spec is not None and stats is None and needs_calibration:
        data.split(has_bounds=bool(objective.bounds))
    runs_samples = data.calibration is not None or (data.spec is not None and settings.validate and bool(plan.sites))
    findings = check_samples(source, data.dataset) if runs_samples else ()
    precalibration = run_precalibration_algorithms(prepared, plan, data.calibration, has_stats=stats is not None)
    if stats is not None and precalibration.plan.algorithms:
        data.calibration = data.samples_of_stats()
    stats = _collect_stats(source, precalibration, data, stats, settings, objective, transfer, progress)
    build = partial(
        build_model,
        precalibration.model,
        stats=stats,
        calibration_data=data.calibration,
        float_weights=settings.float_weights,
    )
    built, trace = search_plan(source, precalibration.model, precalibration.plan, build, objective, data, progress)
    result = _make_result(source, precalibration, data, stats, settings, objective, transfer, built, trace, progress)
    result = replace(result, data_findings=findings)
    if not (result.inserted or settings.allow_empty or result.already_quantized):
        raise EmptyResultError(_empty_result_message(result))
    return result


REASONS_LISTED = 3  # skip reasons in the message about an empty result


def _empty_result_message(result: Result) -> str:
    """Return the reason why no tensor is quantized, and the remedy."""
    name, trace = str(result.source.path or "the model"), result.search
    accept = "--allow-empty (allow_empty=True in Python) accepts the float model."
    if trace is not None and (trace.missed_bounds or trace.float_reason):
        reason = f": {'; '.join(trace.missed_bounds)}" if trace.missed_bounds else f": {trace.float_reason}"
        return f"No plan that quantizes a tensor of {name} reaches the goal{reason}. Change the goal; {accept}"
    reasons = Counter(skip.reason for skip in result.skips).most_common(REASONS_LISTED)
    listed = "; ".join(f"{reason} ({count})" for reason, count in reasons) or "no rule matches a tensor of it"
    return (
        f"No tensor of {name} would be quantized: {listed}. Use other rules, --include or --exclude; `graphquant"
        f" explain MODEL TENSOR` gives the reason for each rule. {accept}"
    )


def _apply_tflite_ranges(prepared: Model, plan: Plan, settings: InsertOptions) -> tuple[Plan, RangeTransfer | None]:
    """Return the plan with the scales of a TFLite file, if there is one."""
    if settings.ranges is None:
        return plan, None
    tflite_model = as_model(settings.ranges)
    if tflite_model.traits.rewritable:
        raise UsageError(
            f"{tflite_model.path or 'The model'} is not a TFLite file. Pass the TFLite file whose scales to use."
        )
    names = settings.ranges_map
    name_map = read_name_map(Path(names)) if isinstance(names, str | Path) else names or {}
    return transfer_ranges(prepared, plan, tflite_model, name_map)


def _open_data(prepared: Model, plan: Plan, stats: Stats | None, settings: InsertOptions) -> CalibrationData:
    """Return the data, which is opened on first use."""

    def open_samples(count: int | None) -> Dataset:
        from graphquant.calibration.data import open_data

        inputs = formats.format_module(prepared.format).input_specs(prepared)
        return open_data(settings.data or "", inputs, samples=count, check_in_background=True)

    return CalibrationData(
        spec=settings.data,
        max_samples=settings.samples,
        open_samples=open_samples,
        validates=settings.validate,
        stats=stats if sites_needing_data(plan) else None,
    )


def _make_objective(prepared: Model, data: CalibrationData, settings: InsertOptions) -> Objective:
    """Return the cost to minimize and the bounds. Missing data is reported now, before calibration takes its time."""
    bounds = Bounds(
        min_sqnr=settings.min_sqnr, min_agreement=settings.min_agreement, max_accuracy_drop=settings.max_accuracy_drop
    )
    if settings.optimize == "latency" and data.spec is None:
        raise UsageError("Optimizing latency runs the model on samples. Pass data.")
    if settings.optimize == "latency" and settings.size_budget is not None:
        raise UsageError(
            "A size budget cannot be combined with optimizing latency: a small model may be slow, and float ops are"
            " often the fastest. Use one of them."
        )
    if data.spec is not None and settings.validate and bounds.max_accuracy_drop is not None:
        inputs = formats.format_module(prepared.format).input_specs(prepared)
        open_required_labels(data.dataset, data.spec, inputs, settings.samples)
    return Objective(
        minimize=settings.optimize,
        bounds=bounds,
        size_budget=settings.size_budget,
        as_tflite=settings.runtime == "tflite",
    )


def _collect_stats(
    source: Model,
    precalibration: PreCalibrationState,
    data: CalibrationData,
    stats: Stats | None,
    settings: InsertOptions,
    objective: Objective,
    transfer: RangeTransfer | None,
    progress: Progress | None,
) -> Stats | None:
    """Return the statistics of the plan: selected from `stats`, or collected from data; None if none are needed."""
    prepared, plan = precalibration.model, precalibration.plan
    unranged_sites = sites_needing_data(plan)
    if stats is None and not unranged_sites:
        return None
    fingerprints = {
        tensor: fingerprint
        for tensor, fingerprint in preserved_fingerprints(source, prepared).items()
        if tensor not in precalibration.rescaled_tensors
    }
    # A search tries other observers, which need histograms even if those of the rules do not.
    full_histograms = bool(objective.bounds) and stats is None
    targets = plan_targets(prepared, plan, full_histograms=full_histograms, overrides=fingerprints)
    if stats is not None:
        return select_stats(stats, targets, source.digest, calibrate_command_line(source, plan, settings.plan))
    if data.calibration is None:
        raise NeedsDataError(_needs_data_message(source, unranged_sites, transfer))
    return run_calibration(
        prepared, targets, data.calibration, None, progress, model_digest=source.digest, max_memory=settings.max_memory
    )


def _make_result(
    source: Model,
    precalibration: PreCalibrationState,
    data: CalibrationData,
    stats: Stats | None,
    settings: InsertOptions,
    objective: Objective,
    transfer: RangeTransfer | None,
    built: BuiltModel,
    trace: SearchTrace | None,
    progress: Progress | None,
) -> Result:
    """Validate the chosen model, record its provenance, and return the result."""
    edits = built.edits
    solution, solved_plan = edits.solution, edits.solution.plan
    range_stats = stats if sites_needing_data(precalibration.plan) else None
    # The plan of the result applies to the prepared model, which has no rescaled channels.
    plan = precalibration.plan_without_factors(precalibration.plan if trace is None else trace.plan)
    algorithm_results = (*precalibration.results, *edits.results)
    built.model.provenance = _provenance_record(
        source, plan, range_stats, algorithm_results, precalibration.rescaled_tensors
    )
    built.model.original_model = None if any(pair.folded for pair in built.insertions) else source
    validation = None
    holdout = data.validation_set(has_search=objective.uses_search_set) if built.insertions else None
    if holdout is not None:
        validation = validate_model(source, built.model, holdout, objective.bounds, progress)
        if trace is not None:
            validation = attach_sensitivity(validation, trace, built.model, built.insertions)
    unjudged_reason = ""
    if built.insertions:
        unjudged_reason = require_usable(source, built.model, validation, other_backend=not plan.for_onnxruntime)
    model, verdicts = built.model if built.insertions else source, tuple[Verdict, ...]()
    if model.traits.predictable:
        with suppress(ModelError, OSError):  # the report does without it
            verdicts = judge_ops(model, "onnxruntime")
    return Result(
        model=model,
        source=source,
        plan=plan,
        inserted=tuple(built.insertions),
        skips=(*solved_plan.skips, *(built.skips[index] for index in sorted(built.skips))),
        site_notes=_notes_by_tensor(solution),
        scale_reasons=tuple(
            explain_scale(edits.model, solved_plan, index, solution)
            for index in range(len(solved_plan.sites))
            if index in built.params
        ),
        changes=solution.changes,
        conflicts=solution.conflicts,
        stats=range_stats,
        stats_path=Path(settings.stats) if range_stats and isinstance(settings.stats, str | Path) else None,
        tflite_ranges=transfer,
        algorithm_results=algorithm_results,
        search=trace,
        validation=validation,
        unjudged_reason=unjudged_reason,
        verdicts=verdicts,
    )


def _notes_by_tensor(solution: Solution) -> dict[TensorRef, str]:
    """Return the notes of the solver by tensor, joined if several sites quantize it."""
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
    """Return the origin that the written model records: no time, no paths and nothing about this machine."""
    # Names of rule files may be paths.
    plan_json = plan_to_json(replace(plan, rules=(), steps=()))
    plan_json["steps"] = [[step.step, step.target, step.detail] for step in plan.steps]
    methods = sorted({site.scheme.observe.name for site in sites_needing_data(plan)})
    record = {
        "version": __version__,
        "source": source.digest,
        "plan": hashlib.sha256(json.dumps(plan_json, sort_keys=True).encode()).hexdigest(),
        "rules": plan.digest,
        "method": ", ".join(methods) if stats is not None else "",
        "data": ", ".join(run.data_digest for run in stats.runs) if stats is not None else "",
        "steps": format_step_counts(step.step for step in plan.steps),
        "scaled": json.dumps(sorted(map(str, scaled_tensors))) if scaled_tensors else "",
        "algorithms": format_step_counts(result.algorithm for result in algorithm_results if result.applied),
        "random": "yes" if stats is not None and stats.random else "",
    }
    return {key: value for key, value in record.items() if value}


def _needs_data_message(model: Model, unranged_sites: Sequence[Any], transfer: RangeTransfer | None) -> str:
    """Return the error for activations without a range, with commands that provide one."""
    count, first = len(unranged_sites), unranged_sites[0].tensor
    if transfer is not None:
        return (
            f"{transfer.path or 'The TFLite model'} has ranges for {len(transfer.transferred)} tensors of the plan,"
            f" but not for {count} activations; the first is {first}. Pass calibration data for them, or map their"
            " names with --ranges-map."
        )
    suggestions = [("data", "calibration.npz"), ("rules", "fixed_point"), ("rules", "weight_only")]
    if formats.memory_object_name(model):
        lines = [f'  gq.insert(model, {name}="{value}")' for name, value in suggestions]
    else:
        path = shlex.quote(str(model.path or "MODEL"))
        lines = [f"  graphquant insert {path} --{name} {value}" for name, value in suggestions]
    text = "\n".join(lines)
    return (
        f"{count} activations have no range; the first is {first}. Pass calibration data, use fixed-point ranges, or"
        f" quantize only the weights:\n{text}"
    )
