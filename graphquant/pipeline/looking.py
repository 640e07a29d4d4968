"""What is in a model, in statistics and in data, and why; nothing is changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant import formats, picked
from graphquant.calibration import Stats, kept, planned, select
from graphquant.errors import RuleError, UsageError
from graphquant.explain import NO_RULES, Explained, explain_written, foretold, meant_for
from graphquant.explain import explain as _explain
from graphquant.ir import QUANTIZATION_KINDS
from graphquant.match import Matcher
from graphquant.pipeline.calibrating import calibrate_line, observe, statistics
from graphquant.pipeline.models import loaded
from graphquant.pipeline.planning import choice_of, planned_by, prepared_for, ruleset_for
from graphquant.plans import Plan, read_plan
from graphquant.ruleset import RuleSet, load_ruleset
from graphquant.solve import solve
from graphquant.survey import survey

if TYPE_CHECKING:
    from graphquant.backends import Report as CheckReport
    from graphquant.data.check import DataReport
    from graphquant.ir import Model
    from graphquant.picked import Picks
    from graphquant.pipeline.common import Several


def explain(
    model: Model,
    what: str,
    *,
    rules: Several = (),
    plan: Plan | str | Path | None = None,
    data: str | None = None,
    stats: Stats | str | Path | None = None,
    backend: str | None = None,
) -> Explained:
    """For each use of the tensor or op `what`, the rules in order and why each did or did not apply.

    Of a model that is quantized already it tells what is in it instead, unless rules, data or statistics are given.

    Args:
        model: The model.
        what: The name of a tensor or an op.
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
    given = plan if plan is None or isinstance(plan, Plan) else read_plan(Path(plan))
    ruleset, untold = (ruleset_for(model, rules), "") if given is None else _rules_of(given)
    meant = backend or meant_for(model, ruleset.files)
    if given is None and not rules and data is None and stats is None and _is_quantized(model):
        uses = explain_written(model, what)
        verdicts = foretold(model, meant, uses) if meant else ()
        return Explained(uses=uses, verdicts=verdicts, backend=meant, written=True)
    if given is not None:
        prepared, made = prepared_for(model, given), given
    else:
        prepared, made = planned_by(model, ruleset, choice_of(model, (), (), None))
    matcher, solution = Matcher(prepared, ruleset), None
    if data is not None or stats is not None:
        found = None if stats is None else statistics(stats)
        targets = planned(prepared, made, full=False, same=kept(model, prepared))
        if found is not None:
            found = select(found, targets, model.digest, calibrate_line(model, made, plan))
        elif data is not None:
            found = observe(prepared, targets, data, None, None, model=model.digest)
        solution = solve(prepared, made, found.sketches, found.unwatchable) if found is not None else None
    uses = _explain(matcher, made, what, solution)
    verdicts = foretold(prepared, meant, uses, made, solution) if meant else ()
    return Explained(uses=uses, verdicts=verdicts, backend=meant, assumed=solution is None, untold=untold)


def _rules_of(made: Plan) -> tuple[RuleSet, str]:
    """The rules that a plan was made by; none where they are not at hand any more, and why."""
    none = replace(NO_RULES, files=made.rules)
    try:
        ruleset = load_ruleset(made.rules)
    except (RuleError, UsageError) as error:
        return none, f"Which rules came close cannot be told, since those of the plan are not at hand. {error}"
    if made.digest not in {"", ruleset.digest}:
        return none, "Which rules came close cannot be told, since those of the plan have changed since it was made."
    return ruleset, ""


def _is_quantized(model: Model) -> bool:
    """Whether quantization ops are in the graphs that run."""
    graphs = [model.graphs[name] for name in model.live()]
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
    from graphquant.backends import check as _check

    return _check(loaded(model), backend, None if stats is None else statistics(stats))


def check_data(model: Model | str | Path, data: str, *, samples: int | None = None) -> DataReport:
    """The data that a spec names beside the model's inputs, and what is probably wrong with it; nothing is run.

    Raises:
        DataError: The data cannot be read, or does not fit the model.
        MissingDependencyError: A package that this kind of data needs is not installed.
        ModelError: The model cannot be read.
        UsageError: It is a TFLite model.
    """
    from graphquant.data import open_data
    from graphquant.data.check import check_data as _check_data

    source = loaded(model)
    if source.format == "tflite":
        raise UsageError(f"{source.path} is a TFLite model, which is not run. Give the model that it was made from.")
    inputs = formats.module(source.format).inputs(source)
    return _check_data(open_data(data, inputs, samples=samples, finite=False), inputs)


def inspect_stats(
    stats: Stats | str | Path,
    model: Model | str | Path | None = None,
    *,
    rules: Several = (),
    others: bool = False,
) -> Picks:
    """What statistics hold, and which range the tensors of `model` get from them, at what cost.

    Args:
        stats: Statistics, or the path of their file.
        model: The model that they are of, or one that insert made from it, which is taken as it is.
        rules: Names, paths or texts of rule files, which plan for the model; by default the format's own.
        others: Find out what other methods would pick, which takes some 50 ms a tensor.

    Raises:
        DataError: The file cannot be read, is of another model, or lacks tensors of the plan.
        ModelError: The model cannot be read or prepared.
        RuleError: A rule file has mistakes.
        UsageError: It is a TFLite model.
    """
    path = None if isinstance(stats, Stats) else Path(stats)
    found = statistics(stats)
    if model is None:
        return picked.seen(found, path)
    source = loaded(model)
    if source.format != "tflite" and not rules:
        there = survey(source)
        if any(reading.rule or source.digest != found.model for reading in there.readings):
            return picked.by_name(there, found, path, others=others)
    ruleset = ruleset_for(source, rules)
    prepared, made = planned_by(source, ruleset, choice_of(source, (), (), None))
    same = kept(source, prepared)
    targets = planned(prepared, made, full=False, same=same)
    needed = select(found, targets, source.digest, calibrate_line(source, made, None))
    solution = solve(prepared, made, needed.sketches, needed.unwatchable)
    sketches = {**picked.held(found, prepared, made, same), **needed.sketches}
    return picked.by_plan(made, solution, sketches, found, path, str(source.path or "the model"), others=others)


__all__ = ["check", "check_data", "explain", "inspect_stats"]
