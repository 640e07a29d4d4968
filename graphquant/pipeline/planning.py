"""From rules or a plan to a prepared model and its plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from graphquant import formats
from graphquant.calibration import with_method
from graphquant.errors import ModelError, UsageError, printable
from graphquant.pipeline.correcting import chosen
from graphquant.pipeline.models import loaded
from graphquant.plans import Choice, Plan, Skip, check_plan, make_plan, read_plan
from graphquant.prepare import Step, left_alone, names_told, prepare
from graphquant.qdq import FAMILIES
from graphquant.ruleset import RuleSet, Selector, load_ruleset

if TYPE_CHECKING:
    from graphquant.ir import Model
    from graphquant.pipeline.common import Several


OPSET = "opset"
"""The preparation that is made unasked."""


def plan(
    model: Model | str | Path,
    *,
    rules: Several = (),
    include: Several = (),
    exclude: Several = (),
    family: str | None = None,
    method: str | None = None,
    requantize: bool = False,
    correct: Several = (),
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
        correct: Corrections to make beside those of the rules, or "not NAME" for one that is not to be made.

    Raises:
        ModelError: The model cannot be read or prepared.
        RuleError: A rule file has mistakes.
        UsageError: A selector matches nothing, or there is no such method.
    """
    source = loaded(model)
    made = prepared_and_plan(source, None, rules, include, exclude, family, requantize=requantize, correct=correct)[1]
    return with_method(made, method)


def prepared_and_plan(
    source: Model,
    plan: Plan | str | Path | None,
    rules: Several,
    include: Several,
    exclude: Several,
    family: str | None,
    *,
    requantize: bool = False,
    correct: Several = (),
) -> tuple[Model, Plan]:
    """The prepared model and its plan, the one given or the one that the rules make."""
    if plan is None:
        ruleset = ruleset_for(source, rules)
        if requantize:
            ruleset = replace(ruleset, prepare=tuple(dict.fromkeys(("requantize", *ruleset.prepare))))
        ruleset = replace(ruleset, correct=chosen(ruleset.correct, _names(correct, "correct")))
        return planned_by(source, ruleset, choice_of(source, include, exclude, family))
    made = plan if isinstance(plan, Plan) else read_plan(Path(plan))
    return prepared_for(source, made), made


def planned_by(model: Model, ruleset: RuleSet, choice: Choice) -> tuple[Model, Plan]:
    """The prepared model and the plan for it; the model itself, unprepared, where there is nothing to insert."""
    if model.saved and not model.main.outputs:
        raise ModelError(
            f"{model.path or 'The model'} has no signature, only functions that Python code may call, and rules look at"
            " what runs. Save it again with tf.saved_model.save(..., signatures=...)."
        )
    prepared, steps = prepare(model, ruleset.prepare)
    made = make_plan(prepared, ruleset, choice, steps=steps, source=model.digest)
    opset = _opset(prepared, made) if made.sites else 0
    if model.opset and model.opset < opset:
        upgraded, step = _upgraded(model, opset)
        prepared, steps = prepare(upgraded, ruleset.prepare)
        made = make_plan(prepared, ruleset, choice, steps=(step, *steps), source=model.digest)
    made = replace(made, skips=(*_unprepared(prepared, ruleset), *made.skips))
    return (prepared, made) if made.sites else (model, replace(made, steps=(), prepared=model.digest))


def prepared_for(model: Model, made: Plan) -> Model:
    """`model` prepared as the plan says, if it is the plan's model."""
    if made.format != model.format or made.model != model.digest:
        raise UsageError(
            "The plan was made for another model. Make it anew with `graphquant plan MODEL --format json`."
        )
    start = model
    for step in made.steps:
        if step.step == "opset":
            opset = step.undo.get("to")
            if not isinstance(opset, int):
                raise UsageError("The plan's step 'opset' does not say to which one. Make the plan anew.")
            start = formats.module(model.format).upgrade(model, opset)
    prepared, _ = prepare(start, [step.step for step in made.steps])
    if prepared.digest != made.prepared:
        raise UsageError("The plan's preparation steps give another model now. Make the plan anew with this version.")
    check_plan(prepared, made)
    return prepared


def prepared_as(model: Model, steps: str, opset: int) -> Model:
    """`model` after the `steps` that a quantized model says it was prepared by, at its `opset`.

    Raises:
        ModelError: The opset cannot be raised.
    """
    names = names_told(steps)
    start = formats.module(model.format).upgrade(model, opset) if OPSET in names else model
    return prepare(start, names)[0]


def ruleset_for(model: Model, rules: Several) -> RuleSet:
    """The rules to plan with, by default those of the model's format."""
    if model.format == "tflite":
        raise UsageError(
            f"{model.path or 'The model'} is a TFLite model, which can be read, not rewritten. Quantize the TensorFlow"
            " model that it was made from and give -o NAME.tflite; --ranges uses this file's scales for that."
        )
    return load_ruleset(_names(rules, "rules") or [formats.module(model.format).DEFAULT_RULES])


def choice_of(model: Model, include: Several, exclude: Several, family: str | None) -> Choice:
    """What the options narrow a plan to, checked."""
    if family is not None and (family not in FAMILIES or FAMILIES[family].format != model.format):
        known = ", ".join(name for name, made in FAMILIES.items() if made.format == model.format)
        raise UsageError(f"There is no family {family!r} for {model.format} models. Known are: {known}.")
    included, excluded = tuple(_names(include, "include")), tuple(_names(exclude, "exclude"))
    for option, patterns in (("--include", included), ("--exclude", excluded)):
        for pattern in patterns:
            try:
                Selector(name=pattern)
            except ValidationError as error:
                said = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise UsageError(f"{option} {pattern[:60]!r} cannot be read: {said}.") from error
    return Choice(family=family or formats.module(model.format).FAMILY, include=included, exclude=excluded)


def _unprepared(prepared: Model, ruleset: RuleSet) -> tuple[Skip, ...]:
    """What no preparation was made for, as plans hold it."""
    return tuple(
        Skip(tensor=left.tensor, uses=(), rule=left.step, reason=left.reason)
        for left in left_alone(prepared, ruleset.prepare)
    )


def _upgraded(model: Model, opset: int) -> tuple[Model, Step]:
    module = formats.module(model.format)
    upgraded = module.upgrade(model, opset)
    undo = {"from": model.opset, "to": opset, "message": module.skeleton(model)}
    why = "the inserted ops are of that opset"
    return upgraded, Step(step="opset", target="model", detail=f"opset {model.opset} to {opset}", why=why, undo=undo)


def _opset(prepared: Model, made: Plan) -> int:
    """The lowest opset that has the ops of every site."""
    return max(
        FAMILIES[site.scheme.family or ""].opset(
            site.scheme.request(
                axis=site.axis,
                dtype=prepared.output(site.tensor).dtype or "float32",
                shape=None,
                parameter=site.parameter,
                function=prepared.graphs[site.tensor.graph].is_function,
            )
        )
        for site in made.sites
    )


def _names(given: Several, called: str) -> list[str]:
    """One name is a name, not a sequence of letters."""
    names = [given] if isinstance(given, str | Path) else given
    if not isinstance(names, Iterable):
        raise UsageError(f"{called} is {printable(repr(given))}. Give a name or a list of names, or leave it out.")
    return [str(name) for name in names]


__all__ = ["choice_of", "plan", "planned_by", "prepared_and_plan", "prepared_as", "prepared_for", "ruleset_for"]
