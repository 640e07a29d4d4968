"""The public verbs, each a story of a few lines: load, plan, calibrate, insert, explain, inspect, save."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from graphquant import formats, picked
from graphquant.calibration import (
    Stats,
    finest,
    kept,
    load_of,
    load_stats,
    merge,
    needs_data,
    planned,
    select,
    with_method,
)
from graphquant.calibration import calibrate as _calibrate
from graphquant.calibration import everything as _everything
from graphquant.errors import DataError, ModelError, NeedsDataError, UsageError
from graphquant.explain import Explanation
from graphquant.explain import explain as _explain
from graphquant.ir import Model, TensorRef
from graphquant.ir import check as _check_graphs
from graphquant.match import Matcher
from graphquant.outputs import check_model_output
from graphquant.plans import Choice, Plan, Skip, check_plan, make_plan, read_plan
from graphquant.prepare import Step, left_alone, prepare
from graphquant.qdq import FAMILIES
from graphquant.ranges import Ranges, give, read_map
from graphquant.rewrite import Inserted, rewrite
from graphquant.ruleset import RuleSet, Selector, load_ruleset
from graphquant.solve import solve
from graphquant.survey import survey

if TYPE_CHECKING:
    from graphquant.backends import Report as CheckReport
    from graphquant.calibration import Targets
    from graphquant.data import Batches
    from graphquant.data.check import DataReport
    from graphquant.picked import Picks

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is."""

Several = str | Path | Sequence[str | Path]
"""A name or several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What `insert` made.

    Attributes:
        model: The rewritten model.
        source: The model as it was given.
        plan: What was to be done.
        inserted: What was done, a site each.
        skips: What the plan or the solver left out, with the reason.
        notes: A word on some sites, by their tensor.
        stats: What the ranges of activations come from, None where no data was needed.
        statistics: The statistics file, None where they were made now.
        ranges: What a TFLite file's scales were used for, None where none was given.
    """

    model: Model
    source: Model
    plan: Plan
    inserted: tuple[Inserted, ...]
    skips: tuple[Skip, ...]
    notes: Mapping[TensorRef, str] = field(default_factory=dict)
    stats: Stats | None = None
    statistics: Path | None = None
    ranges: Ranges | None = None

    @property
    def samples(self) -> int:
        """Number of calibration samples."""
        return self.stats.samples if self.stats is not None else 0

    @property
    def random(self) -> bool:
        """Whether any of them were made up."""
        return self.stats is not None and self.stats.random

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Writes the rewritten model; see `save`."""
        return save(self.model, path, force=force)


def load(source: Any, *, outputs: Sequence[Any] = ()) -> Model:
    """The model at a path, or the model that is an object of TensorFlow.

    Args:
        source: The path of an ONNX file, a TensorFlow GraphDef, MetaGraphDef or SavedModel folder, a Keras file, or a
            TFLite file; or a tf.Graph, a session, a ConcreteFunction, a tf.function or a Keras model, which stays as it
            is: `to_tf` gives back one like it.
        outputs: What a tf.Graph or a session's graph is for, tensors or their names; by default all tensors that nobody
            reads. What leads to none of them, as initializers and optimizers do, is left as it is.

    Raises:
        MissingDependencyError: It is a Keras file, and tensorflow is not installed.
        ModelError: It cannot be read or is not supported.
        UsageError: It is no model.
    """
    if isinstance(source, str | Path):
        if outputs:
            raise UsageError(f"{source} is a file, and only a tf.Graph or a session is given outputs. Leave them out.")
        model = formats.module(formats.format_of(Path(source))).load(Path(source))
    else:
        from graphquant.formats.tensorflow import load_live

        model = load_live(source, outputs)
    model.saver = lambda made, out, force: save(made, out, force=force)
    _check_graphs(model, "load")
    return model


def plan(
    model: Model | str | Path,
    *,
    rules: Several = (),
    include: Several = (),
    exclude: Several = (),
    family: str | None = None,
    method: str | None = None,
) -> Plan:
    """What `insert` would do to `model`.

    Args:
        model: A model, or the path of one.
        rules: Names, paths or texts of rule files, the first that matches wins; by default the format's own.
        include: Globs or /regexes/; only what they name is quantized.
        exclude: Globs or /regexes/; what they name is left.
        family: The QDQ family for schemes that name none.
        method: The observer of all activations whose range comes from data, instead of what the rules say.

    Raises:
        ModelError: The model cannot be read or prepared.
        RuleError: A rule file has mistakes.
        UsageError: A selector matches nothing, or there is no such method.
    """
    loaded = _loaded(model)
    return with_method(_planned(loaded, _ruleset(loaded, rules), _choice(loaded, include, exclude, family))[1], method)


def calibrate(
    model: Model | str | Path,
    plan: Plan | str | Path | None = None,
    data: str | Batches | None = None,
    *,
    rules: Several = (),
    everything: bool = False,
    full: bool = True,
    samples: int | None = None,
    shard: tuple[int, int] = (1, 1),
    max_memory: int | None = None,
    before: Stats | None = None,
    stop: Callable[[], bool] | None = None,
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
        before: What an earlier call for the same found before it was stopped, to go on from.
        stop: Asked after each block of samples whether to end with what there is.
        progress: Is told how far the work is.

    Raises:
        DataError: The data does not fit the model, or `before` is of something else.
        MissingDependencyError: The model's framework is not installed.
        ModelError: The model cannot be read, prepared or run.
        RuleError: A rule file has mistakes.
        UsageError: The plan is of another model, or no data was named.
    """
    if data is None:
        raise UsageError("There is no data to calibrate with. Give an .npz file, or random:8 to try things out.")
    source = _loaded(model)
    prepared, made = _prepared(source, plan, rules, (), (), None)
    if everything:
        prepared, targets = source, _everything(source, finest(made))
    else:
        targets = planned(prepared, made, full=full, same=kept(source, prepared))
    return _observe(
        prepared,
        targets,
        data,
        samples,
        progress,
        model=source.digest,
        shard=shard,
        max_memory=max_memory,
        before=before,
        stop=stop,
    )


def insert(
    model: Model | str | Path,
    *,
    rules: Several = (),
    data: str | None = None,
    stats: Stats | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    method: str | None = None,
    ranges: Model | str | Path | None = None,
    ranges_map: Mapping[str, str] | str | Path | None = None,
    samples: int | None = None,
    max_memory: int | None = None,
    include: Several = (),
    exclude: Several = (),
    family: str | None = None,
    float_weights: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Quantizes a model: the whole story from rules to a rewritten graph.

    Args:
        model: A model, or the path of one.
        rules: Names, paths or texts of rule files, the first that matches wins; by default the format's own.
        data: A calibration data spec, as in docs/data.md; not needed where ranges come from rules or weights.
        stats: Statistics from `calibrate`, or the path of a file of them; with them `data` is not read.
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
        progress: Is told how far the work is.

    Raises:
        NeedsDataError: Activations have no range without data.
        DataError: The data does not fit the model.
        ModelError: The model cannot be read, prepared or rewritten.
        RuleError: A rule file has mistakes.
        UsageError: A selector or the plan names what the model does not have.
    """
    if data is not None:
        from graphquant.data import check_spec

        check_spec(data)
    source = _loaded(model)
    prepared, made = _prepared(source, plan, rules, include, exclude, family)
    made = with_method(made, method)
    taken = None
    if ranges is not None:
        made, taken = _given(prepared, made, ranges, ranges_map)
    statistics = Path(stats) if isinstance(stats, str | Path) else None
    found = load_stats(Path(stats)) if isinstance(stats, str | Path) else stats
    wanting = needs_data(made)
    if found is not None or wanting:
        targets = planned(prepared, made, full=False, same=kept(source, prepared))
        if found is not None:
            found = select(found, targets, source.digest, _calibrate_line(source, made, plan))
        elif data is not None:
            found = _observe(prepared, targets, data, samples, progress, model=source.digest, max_memory=max_memory)
        else:
            raise NeedsDataError(_data_lines(source, wanting, taken))
    solution = solve(prepared, made, found.sketches, found.unwatchable) if found else solve(prepared, made, {})
    params, skips = dict(solution.params), dict(solution.skips)
    for index, site in enumerate(made.sites if float_weights else ()):
        if index in params and site.scheme.type.bits == 32:  # noqa: PLR2004  # no op quantizes to int32 at run time
            del params[index]
            skips[index] = Skip(tensor=site.tensor, uses=site.uses, rule=site.rule, reason="weights are kept float")
    rewritten, inserted = rewrite(prepared, made, params, float_weights=float_weights)
    return Result(
        model=rewritten if inserted else source,
        source=source,
        plan=made,
        inserted=tuple(inserted),
        skips=(*made.skips, *(skips[index] for index in sorted(skips))),
        notes={made.sites[index].tensor: note for index, note in sorted(solution.notes.items())},
        stats=found if wanting else None,
        statistics=statistics if wanting else None,
        ranges=taken,
    )


def merge_stats(parts: Sequence[Stats | str | Path]) -> Stats:
    """The statistics of all `parts`, or of the files at these paths, together.

    Raises:
        DataError: A file cannot be read, or they are of different models or tensors, or count samples twice.
        UsageError: There are none.
    """
    whole: Stats | None = None
    for part in parts:
        here = part if isinstance(part, Stats) else load_stats(Path(part))
        try:
            whole = here if whole is None else merge([whole, here])
        except DataError as error:
            named = f"{part} does not go with those before it. " if isinstance(part, str | Path) else ""
            raise DataError(f"{named}{error}") from error
    if whole is None:
        raise UsageError("There are no statistics to merge. Give two or more.")
    return whole


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
    found = stats if isinstance(stats, Stats) else load_stats(Path(stats))
    if model is None:
        return picked.seen(found, path)
    source = _loaded(model)
    if source.format != "tflite" and not rules:
        there = survey(source)
        if any(reading.rule or source.digest != found.model for reading in there.readings):
            return picked.by_name(there, found, path, others=others)
    ruleset = _ruleset(source, rules)
    prepared, made = _planned(source, ruleset, _choice(source, (), (), None))
    same = kept(source, prepared)
    targets = planned(prepared, made, full=False, same=same)
    needed = select(found, targets, source.digest, _calibrate_line(source, made, None))
    solution = solve(prepared, made, needed.sketches, needed.unwatchable)
    sketches = {**picked.held(found, prepared, made, same), **needed.sketches}
    return picked.by_plan(made, solution, sketches, found, path, str(source.path or "the model"), others=others)


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

    loaded = _loaded(model)
    if loaded.format == "tflite":
        raise UsageError(f"{loaded.path} is a TFLite model, which is not run. Give the model that it was made from.")
    inputs = formats.module(loaded.format).inputs(loaded)
    return _check_data(open_data(data, inputs, samples=samples, finite=False), inputs)


def check(model: Model | str | Path, *, backend: str | None = None) -> CheckReport:
    """What is probably wrong with a quantized model, and how `backend` will run each of its ops; nothing is run.

    Raises:
        ModelError: The model cannot be read.
        UsageError: There is no such backend, or it does not run models of this format.
    """
    from graphquant.backends import check as _check

    return _check(_loaded(model), backend)


def save(model: Model, path: str | Path, *, force: bool = False) -> Path:
    """Writes `model` to `path`, whole or not at all; returns the path.

    Raises:
        UsageError: There is something at `path` and `force` is not given, it cannot be written, the suffix is another
            format's, or the model was made of an object in memory.
        ModelError: The model has no such form.
    """
    if model.alive:
        raise UsageError(
            f"The model was made of {model.alive}, in memory, and has no file's form. gq.to_tf(result) gives back one"
            " like it; write that as you would write your own."
        )
    where = Path(path)
    check_model_output(where, model.path, model.format, force=force)
    formats.module(model.format).save(model, where)
    return where


def to_tf(model: Model | Result) -> Any:
    """A TensorFlow model as an object in memory, edits included: of the kind that `load` was given.

    Returns:
        A tf.Graph for a tf.Graph or a graph's file, with the collections; for a session a new one, whose variables have
        the same values; for a ConcreteFunction, a tf.function or a Keras model a ConcreteFunction of the same
        signature, which reads the same variables.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: TensorFlow refuses the model.
        UsageError: It is no TensorFlow model or a SavedModel, or what was inserted has no place in such an object.
    """
    made = model.model if isinstance(model, Result) else model
    if made.format != "tensorflow":
        raise UsageError(
            f"{made.path or 'The model'} is in the format {made.format}. Only TensorFlow models become objects."
        )
    from graphquant.formats.tensorflow import give_back

    return give_back(made)


def explain(model: Model, what: str, *, rules: Several = ()) -> tuple[Explanation, ...]:
    """For each use of the tensor or op `what`, the rules in order and why each did or did not apply.

    Raises:
        UsageError: Nothing float is called that.
    """
    ruleset = _ruleset(model, rules)
    prepared, made = _planned(model, ruleset, _choice(model, (), (), None))
    return _explain(Matcher(prepared, ruleset), made, what)


# -- the steps between -----------------------------------------------------------------------------


def _planned(model: Model, ruleset: RuleSet, choice: Choice) -> tuple[Model, Plan]:
    """The prepared model and the plan for it; the model itself, unprepared, where there is nothing to insert."""
    if model.saved and not model.main.outputs:
        raise ModelError(
            f"{model.path or 'The model'} has no signature, only functions that Python code may call, and rules look at"
            " what runs. Save it again with tf.saved_model.save(..., signatures=...)."
        )
    prepared, steps = prepare(model, ruleset.prepare)
    made = make_plan(prepared, ruleset, choice, steps=steps, source=model.digest)
    opset = _opset(made) if made.sites else 0
    if model.opset and model.opset < opset:
        upgraded, step = _upgraded(model, opset)
        prepared, steps = prepare(upgraded, ruleset.prepare)
        made = make_plan(prepared, ruleset, choice, steps=(step, *steps), source=model.digest)
    made = replace(made, skips=(*_unprepared(prepared, ruleset), *made.skips))
    return (prepared, made) if made.sites else (model, replace(made, steps=(), prepared=model.digest))


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
    return upgraded, Step(step="opset", target="model", detail=f"opset {model.opset} to {opset}", undo=undo)


def _opset(made: Plan) -> int:
    """The lowest opset that has the ops of every site."""
    return max(
        FAMILIES[site.scheme.family or ""].opset(
            site.scheme.request(axis=site.axis, dtype="float32", shape=None, parameter=site.parameter)
        )
        for site in made.sites
    )


def _prepared_for(model: Model, made: Plan) -> Model:
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


def _observe(
    prepared: Model,
    targets: Targets,
    data: str | Batches,
    samples: int | None,
    progress: Progress | None,
    **options: Any,
) -> Stats:
    """Runs the data through the model; `options` are those of `graphquant.calibration.calibrate`."""
    from graphquant.data import open_data

    runner = formats.module(prepared.format).runner(prepared)
    batches = open_data(data, runner.inputs, samples=samples) if isinstance(data, str) else data
    told = (lambda done, total: progress("calibrating", done, total)) if progress is not None else None
    load = load_of(prepared, batchable=runner.batchable)
    return _calibrate(targets, runner, batches, load=load, progress=told, **options)


def _prepared(
    source: Model,
    plan: Plan | str | Path | None,
    rules: Several,
    include: Several,
    exclude: Several,
    family: str | None,
) -> tuple[Model, Plan]:
    """The prepared model and its plan, the one given or the one that the rules make."""
    if plan is None:
        return _planned(source, _ruleset(source, rules), _choice(source, include, exclude, family))
    made = plan if isinstance(plan, Plan) else read_plan(Path(plan))
    return _prepared_for(source, made), made


def _given(
    prepared: Model, made: Plan, ranges: Model | str | Path, names: Mapping[str, str] | str | Path | None
) -> tuple[Plan, Ranges]:
    """The plan with the scales of a TFLite file."""
    source = _loaded(ranges)
    if source.format != "tflite":
        raise UsageError(f"{source.path or 'The model'} is no TFLite file. Give one whose scales are to be used.")
    return give(prepared, made, source, read_map(Path(names)) if isinstance(names, str | Path) else names or {})


def _calibrate_line(source: Model, made: Plan, plan: object) -> str:
    """The command whose statistics serve the plan `made`; any rules' may not serve one that was given."""
    where = shlex.quote(str(source.path or "MODEL"))
    rules = "".join(f" --rules {shlex.quote(name)}" for name in made.rules)
    return f"graphquant calibrate {where} --data SPEC{rules}{' --all' if plan else ''} -o stats.gqs"


def _loaded(model: Any) -> Model:
    return model if isinstance(model, Model) else load(model)


def _names(given: Several) -> list[str]:
    """One name is a name, not a sequence of letters."""
    return [str(name) for name in ([given] if isinstance(given, str | Path) else given)]


def _ruleset(model: Model, rules: Several) -> RuleSet:
    if model.format == "tflite":
        raise UsageError(
            f"{model.path or 'The model'} is a TFLite model, which can be read, not rewritten. Quantize the TensorFlow"
            " model that it was made from and give -o NAME.tflite; --ranges uses this file's scales for that."
        )
    return load_ruleset(_names(rules) or [formats.module(model.format).DEFAULT_RULES])


def _choice(model: Model, include: Several, exclude: Several, family: str | None) -> Choice:
    if family is not None and (family not in FAMILIES or FAMILIES[family].format != model.format):
        known = ", ".join(name for name, made in FAMILIES.items() if made.format == model.format)
        raise UsageError(f"There is no family {family!r} for {model.format} models. Known are: {known}.")
    included, excluded = tuple(_names(include)), tuple(_names(exclude))
    for option, patterns in (("--include", included), ("--exclude", excluded)):
        for pattern in patterns:
            try:
                Selector(name=pattern)
            except ValidationError as error:
                said = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise UsageError(f"{option} {pattern[:60]!r} cannot be read: {said}.") from error
    return Choice(family=family or formats.module(model.format).FAMILY, include=included, exclude=excluded)


def _data_lines(model: Model, wanting: Sequence[Any], ranges: Ranges | None) -> str:
    if ranges is not None:
        return (
            f"{ranges.path or 'The TFLite model'} has ranges for {len(ranges.given)} of the plan's tensors and none for"
            f" {len(wanting)} activations, the first of which is {wanting[0].tensor}. Give calibration data for these,"
            " or say with --ranges-map which tensors of that file they are."
        )
    ways = [("data", "calibration.npz"), ("rules", "fixed_point"), ("rules", "weight_only")]
    if model.alive:
        lines = [f'  gq.insert(model, {name}="{value}")' for name, value in ways]
    else:
        where = shlex.quote(str(model.path or "MODEL"))
        lines = [f"  graphquant insert {where} --{name} {value}" for name, value in ways]
    told = "\n".join(lines)
    return (
        f"{len(wanting)} activations have no range yet, the first is {wanting[0].tensor}. Give calibration data, use"
        f" fixed-point ranges, or quantize the weights alone:\n{told}"
    )
