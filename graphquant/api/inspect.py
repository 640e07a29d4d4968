"""What is in a model, in statistics and in data, and why; nothing is changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.analysis import (
    NO_RULES,
    ExplanationReport,
    backend_of_rules,
    explain_quantized,
    predict_verdicts,
    range_report,
)
from graphquant.analysis import explain_uses as _explain
from graphquant.analysis.model_summary import summarize_model
from graphquant.api.calibrate import calibrate_command_line, resolve_stats, run_calibration
from graphquant.api.models import as_model
from graphquant.api.plan import parse_selection, plan_with_rules, prepare_for_plan, resolve_ruleset
from graphquant.calibration import Stats, plan_targets, preserved_fingerprints, select_stats
from graphquant.errors import RuleError, UsageError
from graphquant.ir import QUANTIZATION_KINDS
from graphquant.quantize import Plan, read_plan, solve_scales
from graphquant.rules import RuleMatcher, RuleSet, load_ruleset

if TYPE_CHECKING:
    from graphquant.analysis.range_report import RangeReport
    from graphquant.api.options import NameOrNames
    from graphquant.backends import CheckReport
    from graphquant.calibration.data.check import DataReport
    from graphquant.ir import Model


def explain(
    model: Model,
    name: str,
    *,
    rules: NameOrNames = (),
    plan: Plan | str | Path | None = None,
    data: str | None = None,
    stats: Stats | str | Path | None = None,
    backend: str | None = None,
) -> ExplanationReport:
    """For each use of the tensor or op `name`, the rules in order and why each did or did not apply.

    Of a model that is quantized already it tells what is in it instead, unless rules, data or statistics are given.

    Args:
        model: The model.
        name: The name of a tensor or an op.
        rules: Names, paths or texts of rule files, the first that matches wins; by default the format's own.
        plan: A plan, or the path of one, instead of rules: edited, searched for, or narrowed by options.
        data: A calibration data spec; with it, or `stats`, scales are explained too.
        stats: Statistics from `calibrate`, or the path of a file of them.
        backend: What is to run the model; by default what the rules are for.

    Raises:
        DataError: The data does not fit the model, or the statistics lack what the plan needs.
        ModelError: The model cannot be prepared or run.
        UsageError: Nothing float is called that, there is no such backend, or the plan is of another model.
    """
    requested_plan = plan if plan is None or isinstance(plan, Plan) else read_plan(Path(plan))
    ruleset, omitted_reason = (
        (resolve_ruleset(model, rules), "") if requested_plan is None else _ruleset_of_plan(requested_plan)
    )
    target_backend = backend or backend_of_rules(model, ruleset.files)
    if requested_plan is None and not rules and data is None and stats is None and _is_quantized(model):
        uses = explain_quantized(model, name)
        verdicts = predict_verdicts(model, target_backend, uses) if target_backend else ()
        return ExplanationReport(uses=uses, verdicts=verdicts, backend=target_backend, already_quantized=True)
    if requested_plan is not None:
        prepared, resolved_plan = prepare_for_plan(model, requested_plan), requested_plan
    else:
        prepared, resolved_plan = plan_with_rules(model, ruleset, parse_selection(model, (), (), None))
    matcher, solution = RuleMatcher(prepared, ruleset), None
    if data is not None or stats is not None:
        calibration_stats = None if stats is None else resolve_stats(stats)
        targets = plan_targets(
            prepared, resolved_plan, full_histograms=False, overrides=preserved_fingerprints(model, prepared)
        )
        if calibration_stats is not None:
            calibration_stats = select_stats(
                calibration_stats, targets, model.digest, calibrate_command_line(model, resolved_plan, plan)
            )
        elif data is not None:
            calibration_stats = run_calibration(prepared, targets, data, None, None, model=model.digest)
        solution = (
            solve_scales(prepared, resolved_plan, calibration_stats.sketches, calibration_stats.unobservable)
            if calibration_stats is not None
            else None
        )
    uses = _explain(matcher, resolved_plan, name, solution)
    verdicts = predict_verdicts(prepared, target_backend, uses, resolved_plan, solution) if target_backend else ()
    return ExplanationReport(
        uses=uses,
        verdicts=verdicts,
        backend=target_backend,
        placeholder_ranges=solution is None,
        omitted_reason=omitted_reason,
    )


def _ruleset_of_plan(plan: Plan) -> tuple[RuleSet, str]:
    """The rules that a plan was made by; none where they are not at hand any more, and why."""
    empty_ruleset = replace(NO_RULES, files=plan.rules)
    try:
        ruleset = load_ruleset(plan.rules)
    except (RuleError, UsageError) as error:
        return empty_ruleset, f"Which rules came close cannot be told, since those of the plan are not at hand. {error}"
    if plan.digest not in {"", ruleset.digest}:
        return (
            empty_ruleset,
            "Which rules came close cannot be told, since those of the plan have changed since it was made.",
        )
    return ruleset, ""


def _is_quantized(model: Model) -> bool:
    """Whether quantization ops are in the graphs that run."""
    graphs = [model.graphs[name] for name in model.reachable_graphs()]
    return any(op.kind in QUANTIZATION_KINDS for graph in graphs for op in graph.ops())


def check(
    model: Model | str | Path, *, backend: str | None = None, stats: Stats | str | Path | None = None
) -> CheckReport:
    """What is probably wrong with a quantized model, and how `backend` will run each of its ops; nothing is run.

    Args:
        model: A model, or the path of one.
        backend: What is to run it.
        stats: Statistics, or the path of a file of them, of the model before it was quantized: they tell which
            quantizations no sample reaches.

    Raises:
        DataError: The statistics cannot be read, or are of none of the tensors that are quantized.
        ModelError: The model cannot be read.
        UsageError: There is no such backend, or it does not run models of this format.
    """
    from graphquant.backends import check_quantized_model as _check

    return _check(as_model(model), backend, None if stats is None else resolve_stats(stats))


def check_data(model: Model | str | Path, data: str, *, samples: int | None = None) -> DataReport:
    """The data that a spec names beside the model's inputs, and what is probably wrong with it; nothing is run.

    Raises:
        DataError: The data cannot be read, or does not fit the model.
        MissingDependencyError: A package that this kind of data needs is not installed.
        ModelError: The model cannot be read.
        UsageError: It is a TFLite model.
    """
    from graphquant.calibration.data import open_data
    from graphquant.calibration.data.check import check_dataset as _check_data

    source = as_model(model)
    if source.format == "tflite":
        raise UsageError(f"{source.path} is a TFLite model, which is not run. Give the model that it was made from.")
    inputs = formats.format_module(source.format).input_specs(source)
    return _check_data(open_data(data, inputs, samples=samples, require_finite=False), inputs)


def inspect_stats(
    stats: Stats | str | Path,
    model: Model | str | Path | None = None,
    *,
    rules: NameOrNames = (),
    compare_methods: bool = False,
) -> RangeReport:
    """What statistics hold, and which range the tensors of `model` get from them, at what cost.

    Args:
        stats: Statistics, or the path of their file.
        model: The model that they are of, or one that insert made from it, which is taken as it is.
        rules: Names, paths or texts of rule files, which plan for the model; by default the format's own.
        compare_methods: Find out what other methods would pick, which takes some 50 ms a tensor.

    Raises:
        DataError: The file cannot be read, is of another model, or lacks tensors of the plan.
        ModelError: The model cannot be read or prepared.
        RuleError: A rule file has mistakes.
        UsageError: It is a TFLite model.
    """
    path = None if isinstance(stats, Stats) else Path(stats)
    loaded_stats = resolve_stats(stats)
    if model is None:
        return range_report.stats_range_report(loaded_stats, path)
    source = as_model(model)
    if source.format != "tflite" and not rules:
        summary = summarize_model(source)
        if any(
            quantization_op.rule or source.digest != loaded_stats.model_digest
            for quantization_op in summary.quantization_ops
        ):
            return range_report.model_range_report(summary, loaded_stats, path, compare_methods=compare_methods)
    ruleset = resolve_ruleset(source, rules)
    prepared, resolved_plan = plan_with_rules(source, ruleset, parse_selection(source, (), (), None))
    fingerprints = preserved_fingerprints(source, prepared)
    targets = plan_targets(prepared, resolved_plan, full_histograms=False, overrides=fingerprints)
    needed = select_stats(loaded_stats, targets, source.digest, calibrate_command_line(source, resolved_plan, None))
    solution = solve_scales(prepared, resolved_plan, needed.sketches, needed.unobservable)
    sketches = {
        **range_report.sketches_of_fixed_ranges(loaded_stats, prepared, resolved_plan, fingerprints),
        **needed.sketches,
    }
    return range_report.plan_range_report(
        resolved_plan,
        solution,
        sketches,
        loaded_stats,
        path,
        str(source.path or "the model"),
        compare_methods=compare_methods,
    )
