"""Planning: from rules, or from an existing plan, to a prepared model and its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from graphquant import formats
from graphquant.api.models import as_model
from graphquant.calibration.targets import with_observer
from graphquant.errors import ModelError, UsageError
from graphquant.numerics import IntType
from graphquant.qdq import FAMILIES, FamilyRequest
from graphquant.quantize import (
    Plan,
    SiteSelection,
    Skip,
    SkipCode,
    Step,
    check_plan,
    find_skipped_steps,
    make_plan,
    parse_step_names,
    prepare,
    read_plan,
    required_opset,
)
from graphquant.quantize.split_fused import REWRITE_NORMS_STEP, REWRITTEN_NORM
from graphquant.rules import RuleSet, Selector, choose_algorithms, load_ruleset
from graphquant.utils.option_types import parse_names
from graphquant.utils.options import InsertOptions, PlanOptions, resolve_options, takes_options

if TYPE_CHECKING:
    from graphquant.ir import Model, Shape
    from graphquant.qdq import FusedForm
    from graphquant.utils.option_types import RangeSource

OPSET_STEP = "opset"
"""The only preparation step that rule files do not list: it is added when the inserted ops need a newer opset."""


@takes_options(PlanOptions)
def plan(model: Model | str | Path, options: PlanOptions | None = None, /, **values: Any) -> Plan:
    """Return the plan that `insert` would apply to `model`.

    Args:
        model: A model, or its path.
        options: The options, in place of keyword arguments.
        values: The options as keyword arguments.

    Raises:
        ModelError: The model cannot be read or prepared.
        RuleError: A rule file has mistakes.
        UsageError: An option is invalid, or a pattern matches nothing.
    """
    settings = resolve_options(PlanOptions, options, values)
    return prepare_and_plan(as_model(model, settings, defers=True), settings)[1]


def prepare_and_plan(
    source: Model,
    options: PlanOptions | None = None,
    plan: Plan | str | Path | None = None,
    *,
    by_cost: bool = True,
    sample_shapes: Callable[[], Mapping[str, Shape]] = dict,
) -> tuple[Model, Plan]:
    """Return the prepared model and its plan: `plan` if there is one, else the plan of the rules.

    With `by_cost`, ops stay float where the cost table of the rules estimates that int8 does not pay. The estimate is
    for inputs of the shapes that `sample_shapes` returns. It is called only if the model does not tell all sizes.
    """
    settings = options or PlanOptions()
    if plan is not None:
        resolved_plan = plan if isinstance(plan, Plan) else read_plan(Path(plan))
        return prepare_for_plan(source, resolved_plan), with_observer(resolved_plan, settings.method)
    ruleset = resolve_ruleset(source, settings.rules)
    if settings.requantize:
        ruleset = replace(ruleset, prepare=tuple(dict.fromkeys(("requantize", *ruleset.prepare))))
    ruleset = replace(ruleset, algorithms=choose_algorithms(ruleset.algorithms, settings.algorithms))
    # The size or the measured latency may decide which ops stay float.
    goal = (settings.optimize, settings.size_budget) if isinstance(settings, InsertOptions) else ("macs", None)
    if not by_cost or goal != ("macs", None):
        ruleset = replace(ruleset, costs="")
    selection = select_sites(source, settings.include, settings.exclude, settings.family, settings.range_source)
    prepared, resolved_plan = plan_with_rules(source, ruleset, selection, sample_shapes)
    return prepared, with_observer(resolved_plan, settings.method)


def plan_with_rules(
    model: Model, ruleset: RuleSet, selection: SiteSelection, sample_shapes: Callable[[], Mapping[str, Shape]] = dict
) -> tuple[Model, Plan]:
    """Return the prepared model and its plan. If there is nothing to insert, the model stays unprepared.

    `sample_shapes` returns the shapes of inputs for which the time of the ops is estimated.
    """
    if model.saved_functions and not model.main.outputs:
        raise ModelError(
            f"{model.path or 'The model'} has no signature, only functions for Python code. Rules apply to signatures."
            " Save the model again with tf.saved_model.save(..., signatures=...)."
        )
    if model.format == "onnx":
        from graphquant.backends.onnxruntime_costs import read_cost_table, with_assumed_sizes

        selection = replace(selection, assume_sizes=partial(with_assumed_sizes, sample_shapes=sample_shapes))
    prepared, steps = prepare(model, ruleset.prepare)
    # The runtime, which is slow to import, is asked only about a model with such norms.
    if REWRITE_NORMS_STEP in {step.step for step in steps} and not selection.supports_fused_form(REWRITTEN_NORM):
        ruleset = replace(ruleset, prepare=tuple(name for name in ruleset.prepare if name != REWRITE_NORMS_STEP))
        prepared, steps = prepare(model, ruleset.prepare)
    plan = make_plan(prepared, ruleset, selection, steps=steps, source=model)
    opset = required_opset(prepared, plan)
    if model.opset and model.opset < opset:
        # The upgrade may change the ops that the steps match, so the model is prepared again from its source.
        module = formats.format_module(model.format)
        step = Step(
            step=OPSET_STEP,
            target="model",
            detail=f"opset {model.opset} to {opset}",
            why="the inserted ops need this opset",
            undo={"from": model.opset, "to": opset, "message": module.encode_skeleton(model)},
        )
        prepared, steps = prepare(module.upgrade_opset(model, opset), ruleset.prepare)
        plan = make_plan(prepared, ruleset, selection, steps=(step, *steps), source=model)
    skipped_steps = [
        Skip(tensor=skipped.tensor, uses=(), rule=skipped.step, reason=skipped.reason, code=SkipCode.PREPARATION)
        for skipped in find_skipped_steps(prepared, ruleset.prepare)
    ]
    plan = replace(plan, skips=(*skipped_steps, *plan.skips))
    if ruleset.costs and plan.sites and model.format == "onnx" and {*plan.targets} <= {"onnxruntime"}:
        from graphquant.backends.integer_placement import place_by_cost

        plan = place_by_cost(with_assumed_sizes(prepared, sample_shapes), plan, read_cost_table(ruleset.costs))
    return (prepared, plan) if plan.sites else (model, replace(plan, steps=(), prepared=model.digest))


def prepare_for_plan(model: Model, plan: Plan) -> Model:
    """Return `model` after the preparation steps of its plan.

    Raises a UsageError if the plan belongs to another model, or its steps give another result with this version.
    """
    if plan.format != model.format or plan.model != model.digest:
        raise UsageError(
            "The plan belongs to another model. Create one for this model with `graphquant plan MODEL --format json`."
        )
    start = model
    for step in plan.steps:
        if step.step == OPSET_STEP:
            opset = step.undo.get("to")
            if not isinstance(opset, int):
                raise UsageError("The plan's step 'opset' has no target opset. Create the plan again.")
            start = formats.format_module(model.format).upgrade_opset(model, opset)
    prepared, _ = prepare(start, [step.step for step in plan.steps])
    if prepared.digest != plan.prepared:
        raise UsageError(
            "The plan's preparation steps give another model with this version of graphquant. Create the plan again."
        )
    check_plan(prepared, plan)
    return prepared


def prepare_with_steps(model: Model, steps: str, opset: int) -> Model:
    """Return `model` after the preparation steps that a quantized model records, at its opset.

    Raises a ModelError if the opset cannot be upgraded.
    """
    names = parse_step_names(steps)
    start = formats.format_module(model.format).upgrade_opset(model, opset) if OPSET_STEP in names else model
    return prepare(start, names)[0]


def resolve_ruleset(model: Model, rules: str | Path | Sequence[str | Path]) -> RuleSet:
    """Load the rules, by default those of the model's format.

    Raises a UsageError if the model is a TFLite model, which cannot be rewritten.
    """
    if not model.traits.rewritable:
        raise UsageError(
            f"{model.path or 'The model'} is a TFLite model, which graphquant reads but cannot rewrite. Quantize the"
            " TensorFlow model from which it was converted, with -o NAME.tflite. --ranges uses the scales of this file."
        )
    return load_ruleset(list(parse_names(rules)) or [formats.format_module(model.format).DEFAULT_RULES])


def select_sites(
    model: Model,
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    family: str | None = None,
    range_source: RangeSource = "observed",
) -> SiteSelection:
    """Return the selection of tensors, of the QDQ family and of the source of ranges for a plan.

    Raises a UsageError if there is no such family for the format, it has no such ranges, or a pattern is invalid.
    """
    if family is not None and (family not in FAMILIES or FAMILIES[family].format != model.format):
        names = ", ".join(name for name, qdq_family in FAMILIES.items() if qdq_family.format == model.format)
        raise UsageError(f"There is no family {family!r} for {model.format} models. Use one of {names}.")
    for option, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            try:
                Selector(name=pattern)
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise UsageError(f"The pattern {pattern[:60]!r} of --{option} is invalid: {message}.") from error
    default = formats.format_module(model.format).DEFAULT_FAMILY
    chosen_family = FAMILIES[family or default]
    request = FamilyRequest(
        type=IntType(8, signed=True),
        axis=None,
        dtype="float32",
        shape=None,
        symmetric=not chosen_family.has_zero_points,
        range_source=range_source,
    )
    if range_source != "observed" and (reason := chosen_family.unsupported_reason(request)) is not None:
        raise UsageError(f"--range-source {range_source} is not possible: {reason}.")
    selection = SiteSelection(family=chosen_family.name, range_source=range_source, include=include, exclude=exclude)
    if (family is None or chosen_family.variant_of) and model.format == "onnx":
        selection = replace(selection, supports_fused_form=_runtime_supports_form)
    return selection


def _runtime_supports_form(form: FusedForm) -> bool:
    """Ask the installed ONNX Runtime, which is imported only for rules of fused ops."""
    from graphquant.formats.onnx import supports_fused_form

    return supports_fused_form(form)
