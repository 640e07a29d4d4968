"""From rules or a plan to a prepared model and its plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from graphquant import formats
from graphquant.api.algorithms import choose_algorithms
from graphquant.api.models import as_model
from graphquant.calibration import with_observer
from graphquant.errors import ModelError, UsageError, escape_unprintable
from graphquant.qdq import FAMILIES
from graphquant.quantize import (
    Plan,
    PlanOptions,
    Skip,
    Step,
    check_plan,
    find_skipped_steps,
    make_plan,
    parse_step_names,
    prepare,
    read_plan,
)
from graphquant.rules import RuleSet, Selector, load_ruleset

if TYPE_CHECKING:
    from graphquant.api.options import NameOrNames
    from graphquant.ir import Model


OPSET_STEP = "opset"
"""The preparation that is made unasked."""


def plan(
    model: Model | str | Path,
    *,
    rules: NameOrNames = (),
    include: NameOrNames = (),
    exclude: NameOrNames = (),
    family: str | None = None,
    method: str | None = None,
    requantize: bool = False,
    algorithms: NameOrNames = (),
) -> Plan:
    """What `insert` would do to `model`.

    Args:
        model: A model, or the path of one.
        rules: Names, paths or texts of rule files, the first that matches wins; by default the format's own.
        include: Globs or /regexes/; only what they name is quantized.
        exclude: Globs or /regexes/; what they name is left.
        family: The QDQ family for schemes that name none.
        method: The observer of all activations whose range comes from data, instead of what the rules say.
        requantize: Take out the quantization that the model has already.
        algorithms: Corrections to make beside those of the rules, or "not NAME" for one that is not to be made.

    Raises:
        ModelError: The model cannot be read or prepared.
        RuleError: A rule file has mistakes.
        UsageError: A selector matches nothing, or there is no such method.
    """
    source = as_model(model)
    resolved_plan = prepare_and_plan(
        source, None, rules, include, exclude, family, requantize=requantize, algorithms=algorithms
    )[1]
    return with_observer(resolved_plan, method)


def prepare_and_plan(
    source: Model,
    plan: Plan | str | Path | None,
    rules: NameOrNames,
    include: NameOrNames,
    exclude: NameOrNames,
    family: str | None,
    *,
    requantize: bool = False,
    algorithms: NameOrNames = (),
) -> tuple[Model, Plan]:
    """The prepared model and its plan, the one given or the one that the rules make."""
    if plan is None:
        ruleset = resolve_ruleset(source, rules)
        if requantize:
            ruleset = replace(ruleset, prepare=tuple(dict.fromkeys(("requantize", *ruleset.prepare))))
        ruleset = replace(
            ruleset, algorithms=choose_algorithms(ruleset.algorithms, _as_name_list(algorithms, "correct"))
        )
        return plan_with_rules(source, ruleset, parse_selection(source, include, exclude, family))
    resolved_plan = plan if isinstance(plan, Plan) else read_plan(Path(plan))
    return prepare_for_plan(source, resolved_plan), resolved_plan


def plan_with_rules(model: Model, ruleset: RuleSet, choice: PlanOptions) -> tuple[Model, Plan]:
    """The prepared model and the plan for it; the model itself, unprepared, where there is nothing to insert."""
    if model.saved_functions and not model.main.outputs:
        raise ModelError(
            f"{model.path or 'The model'} has no signature, only functions that Python code may call, and rules look at"
            " what runs. Save it again with tf.saved_model.save(..., signatures=...)."
        )
    prepared, steps = prepare(model, ruleset.prepare)
    resolved_plan = make_plan(prepared, ruleset, choice, steps=steps, source_digest=model.digest)
    required_opset = _required_opset(prepared, resolved_plan) if resolved_plan.sites else 0
    if model.opset and model.opset < required_opset:
        upgraded, step = _upgrade_opset(model, required_opset)
        prepared, steps = prepare(upgraded, ruleset.prepare)
        resolved_plan = make_plan(prepared, ruleset, choice, steps=(step, *steps), source_digest=model.digest)
    resolved_plan = replace(resolved_plan, skips=(*_preparation_skips(prepared, ruleset), *resolved_plan.skips))
    return (
        (prepared, resolved_plan)
        if resolved_plan.sites
        else (model, replace(resolved_plan, steps=(), prepared=model.digest))
    )


def prepare_for_plan(model: Model, plan: Plan) -> Model:
    """`model` prepared as the plan says, if it is the plan's model."""
    if plan.format != model.format or plan.model != model.digest:
        raise UsageError(
            "The plan was made for another model. Make it anew with `graphquant plan MODEL --format json`."
        )
    start = model
    for step in plan.steps:
        if step.step == "opset":
            opset = step.undo.get("to")
            if not isinstance(opset, int):
                raise UsageError("The plan's step 'opset' does not say to which one. Make the plan anew.")
            start = formats.format_module(model.format).upgrade_opset(model, opset)
    prepared, _ = prepare(start, [step.step for step in plan.steps])
    if prepared.digest != plan.prepared:
        raise UsageError("The plan's preparation steps give another model now. Make the plan anew with this version.")
    check_plan(prepared, plan)
    return prepared


def prepare_with_steps(model: Model, steps: str, opset: int) -> Model:
    """`model` after the `steps` that a quantized model says it was prepared by, at its `opset`.

    Raises:
        ModelError: The opset cannot be raised.
    """
    names = parse_step_names(steps)
    start = formats.format_module(model.format).upgrade_opset(model, opset) if OPSET_STEP in names else model
    return prepare(start, names)[0]


def resolve_ruleset(model: Model, rules: NameOrNames) -> RuleSet:
    """The rules to plan with, by default those of the model's format."""
    if model.format == "tflite":
        raise UsageError(
            f"{model.path or 'The model'} is a TFLite model, which can be read, not rewritten. Quantize the TensorFlow"
            " model that it was made from and give -o NAME.tflite; --ranges uses this file's scales for that."
        )
    return load_ruleset(_as_name_list(rules, "rules") or [formats.format_module(model.format).DEFAULT_RULES])


def parse_selection(model: Model, include: NameOrNames, exclude: NameOrNames, family: str | None) -> PlanOptions:
    """What the options narrow a plan to, checked."""
    if family is not None and (family not in FAMILIES or FAMILIES[family].format != model.format):
        known_families = ", ".join(name for name, qdq_family in FAMILIES.items() if qdq_family.format == model.format)
        raise UsageError(f"There is no family {family!r} for {model.format} models. Known are: {known_families}.")
    included, excluded = tuple(_as_name_list(include, "include")), tuple(_as_name_list(exclude, "exclude"))
    for option, patterns in (("--include", included), ("--exclude", excluded)):
        for pattern in patterns:
            try:
                Selector(name=pattern)
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise UsageError(f"{option} {pattern[:60]!r} cannot be read: {message}.") from error
    return PlanOptions(
        family=family or formats.format_module(model.format).DEFAULT_FAMILY, include=included, exclude=excluded
    )


def _preparation_skips(prepared: Model, ruleset: RuleSet) -> tuple[Skip, ...]:
    """What no preparation was made for, as plans hold it."""
    return tuple(
        Skip(tensor=unprepared.tensor, uses=(), rule=unprepared.step, reason=unprepared.reason)
        for unprepared in find_skipped_steps(prepared, ruleset.prepare)
    )


def _upgrade_opset(model: Model, opset: int) -> tuple[Model, Step]:
    module = formats.format_module(model.format)
    upgraded = module.upgrade_opset(model, opset)
    undo = {"from": model.opset, "to": opset, "message": module.encode_skeleton(model)}
    reason = "the inserted ops are of that opset"
    return upgraded, Step(step="opset", target="model", detail=f"opset {model.opset} to {opset}", why=reason, undo=undo)


def _required_opset(prepared: Model, plan: Plan) -> int:
    """The lowest opset that has the ops of every site."""
    return max(
        FAMILIES[site.scheme.family or ""].minimum_opset(
            site.scheme.family_request(
                axis=site.axis,
                dtype=prepared.output(site.tensor).dtype or "float32",
                shape=None,
                is_parameter=site.parameter,
                in_function=prepared.graphs[site.tensor.graph].is_function,
            )
        )
        for site in plan.sites
    )


def _as_name_list(names_or_name: NameOrNames, option: str) -> list[str]:
    """One name is a name, not a sequence of letters."""
    names = [names_or_name] if isinstance(names_or_name, str | Path) else names_or_name
    if not isinstance(names, Iterable):
        raise UsageError(
            f"{option} is {escape_unprintable(repr(names_or_name))}. Give a name or a list of names, or leave it out."
        )
    return [str(name) for name in names]
