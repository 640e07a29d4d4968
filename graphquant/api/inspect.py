"""Inspection without changes: explanations, checks of models and data, and reports on statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant import formats
from graphquant.analysis import range_report
from graphquant.analysis.explain import (
    NO_RULES,
    ExplanationReport,
    explain_quantized,
    explain_uses,
    judge_explained_ops,
)
from graphquant.analysis.model_summary import summarize_model
from graphquant.api.calibrate import calibrate_command_line, resolve_stats
from graphquant.api.models import as_model, select_signatures
from graphquant.api.plan import plan_with_rules, prepare_for_plan, resolve_ruleset, select_sites
from graphquant.calibration.calibrate import CalibrationRun, calibrate_model
from graphquant.calibration.data import as_data_spec
from graphquant.calibration.holdout import open_model_data
from graphquant.calibration.stats import Stats, select_stats
from graphquant.calibration.targets import plan_targets
from graphquant.errors import RuleError, UsageError
from graphquant.ir import QUANTIZATION_KINDS, Model
from graphquant.ir.graph import check_tensor_sizes
from graphquant.quantize import Plan, Solution, read_plan, solve_scales
from graphquant.rules import RuleMatcher, RuleSet, load_ruleset
from graphquant.utils.options import ExplainOptions, resolve_options, takes_options

if TYPE_CHECKING:
    from graphquant.analysis.range_report import RangeReport
    from graphquant.backends import CheckReport
    from graphquant.calibration.data.check import DataReport


@takes_options(ExplainOptions)
def explain(
    model: Model | str | Path, name: str, options: ExplainOptions | None = None, /, **values: Any
) -> ExplanationReport:
    """Explain each use of a tensor or op: the rules in order, and the reason why each does or does not apply.

    A model that is quantized already is described as it is, unless rules, a plan, data or statistics are given.

    Args:
        model: A model, or its path.
        name: Name of a tensor or op.
        options: The options, in place of keyword arguments.
        values: The options as keyword arguments.

    Raises:
        DataError: The data does not fit the model, or the statistics lack tensors of the plan.
        ModelError: The model cannot be prepared or run.
        UsageError: No float tensor or op has this name, there is no such backend, the plan belongs to another model,
            or an option is invalid.
    """
    settings = resolve_options(ExplainOptions, options, values)
    source = as_model(model, settings)
    plan = settings.plan if settings.plan is None or isinstance(settings.plan, Plan) else read_plan(Path(settings.plan))
    ruleset, omitted_reason = (resolve_ruleset(source, settings.rules), "") if plan is None else _ruleset_of_plan(plan)
    targets = ruleset.targets if plan is None else plan.targets
    # The framework of other models is a backend without verdicts in `check`, because it treats all ops alike.
    framework = source.format if source.traits.rewritable else ""
    backend = settings.backend or (next(iter(targets), "") if source.traits.judgeable else framework)
    has_data = settings.data is not None or settings.stats is not None
    if plan is None and not settings.rules and not has_data and not source.op_kinds().isdisjoint(QUANTIZATION_KINDS):
        uses = explain_quantized(source, name)
        verdicts = judge_explained_ops(source, backend, uses) if backend else ()
        return ExplanationReport(uses=uses, verdicts=verdicts, backend=backend, already_quantized=True)
    if plan is not None:
        prepared = prepare_for_plan(source, plan)
    else:
        prepared, plan = plan_with_rules(source, ruleset, select_sites(source))
    solution = _solve_with_data(source, prepared, plan, settings) if has_data else None
    uses = explain_uses(RuleMatcher(prepared, ruleset), plan, name, solution, source)
    verdicts = judge_explained_ops(prepared, backend, uses, plan, solution) if backend else ()
    return ExplanationReport(
        uses=uses,
        verdicts=verdicts,
        backend=backend,
        placeholder_ranges=solution is None,
        omitted_reason=omitted_reason,
    )


def _solve_with_data(model: Model, prepared: Model, plan: Plan, settings: ExplainOptions) -> Solution:
    """Solve the scales of a plan with statistics, or with data."""
    targets = plan_targets(model, prepared, plan, full_histograms=False)
    if settings.stats is not None:
        stats = resolve_stats(settings.stats)
        stats = select_stats(stats, targets, model.digest, calibrate_command_line(model, plan, settings.plan))
    else:
        data = open_model_data(prepared, as_data_spec("" if settings.data is None else settings.data), None)
        stats = calibrate_model(prepared, targets, data, CalibrationRun(model_digest=model.digest))
    return solve_scales(prepared, plan, stats.sketches, stats.unobservable)


def _ruleset_of_plan(plan: Plan) -> tuple[RuleSet, str]:
    """Return the rules of a plan; if they are not available, an empty rule set and the reason."""
    empty_ruleset = replace(NO_RULES, files=plan.rules)
    try:
        ruleset = load_ruleset(plan.rules)
    except (RuleError, UsageError) as error:
        return empty_ruleset, f"Other rules are not listed, because the rule files of the plan cannot be read. {error}"
    if plan.digest not in {"", ruleset.digest}:
        return empty_ruleset, "Other rules are not listed, because the rule files changed after the plan was created."
    return ruleset, ""


def check(
    model: Model | str | Path, *, backend: str | None = None, stats: Stats | str | Path | None = None
) -> CheckReport:
    """Find probable mistakes in a quantized model, and determine how a backend runs each op, without running it.

    Args:
        model: A model, or its path.
        backend: The backend, or None for mistakes alone.
        stats: Statistics of the float model, or their path. They show quantizations that no sample reaches.

    Raises:
        DataError: The statistics cannot be read, or contain none of the quantized tensors.
        ModelError: The model cannot be read.
        UsageError: There is no such backend, or it does not run this format.
    """
    from graphquant.backends import check_quantized_model

    loaded = as_model(model)
    if backend is not None:
        check_tensor_sizes(loaded, remedy="Without --for, it is checked without running ops on constants.")
    return check_quantized_model(loaded, backend, None if stats is None else resolve_stats(stats))


def check_data(model: Model | str | Path, data: Any, *, samples: int | None = None) -> DataReport:
    """Compare data with the inputs of a model and find probable mistakes, without running the model.

    Raises:
        DataError: The data cannot be read, or does not fit the model.
        MissingDependencyError: A package that this kind of data needs is not installed.
        ModelError: The model cannot be read.
        UsageError: The model is a TFLite model.
    """
    from graphquant.calibration.data import open_data, split_by_signature
    from graphquant.calibration.data.check import check_dataset
    from graphquant.calibration.holdout import complete_model_data

    spec = as_data_spec(data)
    source = select_signatures(as_model(model), tuple(split_by_signature(spec)), separate_inputs=True)
    if not source.traits.rewritable:
        raise UsageError(
            f"{source.path} is a TFLite model, which cannot be run. Pass the model from which it was converted."
        )
    inputs = formats.format_module(source.format).input_specs(source)
    spec = complete_model_data(source, spec)
    return check_dataset(open_data(spec, inputs, samples=samples, require_finite=False), inputs, source)


def inspect_stats(
    stats: Stats | str | Path,
    model: Model | str | Path | None = None,
    *,
    rules: str | Path | Sequence[str | Path] = (),
    compare_methods: bool = False,
) -> RangeReport:
    """Report statistics, and the ranges and errors that the tensors of a model get from them.

    Args:
        stats: Statistics, or their path.
        model: The model of the statistics, or a model that was quantized from it.
        rules: Rule files for the plan; by default those of the model's format.
        compare_methods: If True, also compute the ranges of the other methods, which takes about 50 ms per tensor.

    Raises:
        DataError: The file cannot be read, belongs to another model, or lacks tensors of the plan.
        ModelError: The model cannot be read or prepared.
        RuleError: A rule file has mistakes.
        UsageError: The model is a TFLite model.
    """
    path = None if isinstance(stats, Stats) else Path(stats)
    loaded = resolve_stats(stats)
    if model is None:
        return range_report.stats_range_report(loaded, path)
    source = as_model(model)
    if source.traits.rewritable and not rules:
        summary = summarize_model(source)
        # A model that graphquant quantized has its ranges in the graph, and a plan for it would be empty.
        if any(op.rule or source.digest != loaded.model_digest for op in summary.quantization_ops):
            return range_report.model_range_report(summary, loaded, path, compare_methods=compare_methods)
    prepared, plan = plan_with_rules(source, resolve_ruleset(source, rules), select_sites(source))
    targets = plan_targets(source, prepared, plan, full_histograms=False)
    needed = select_stats(loaded, targets, source.digest, calibrate_command_line(source, plan, None))
    solution = solve_scales(prepared, plan, needed.sketches, needed.unobservable)
    fixed = range_report.sketches_of_fixed_ranges(loaded, source, prepared, plan)
    name = str(source.path or "the model")
    return range_report.plan_range_report(
        plan, solution, {**fixed, **needed.sketches}, loaded, path, name, compare_methods=compare_methods
    )
