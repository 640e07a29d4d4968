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
from graphquant.calibration import Stats, kept, needs_data, planned, select, with_method
from graphquant.errors import NeedsDataError, UsageError, printable
from graphquant.pipeline import comparing
from graphquant.pipeline.calibrating import calibrate_line, observe, statistics
from graphquant.pipeline.checking import Bounds, beside, given, halved, measured, parted, searching
from graphquant.pipeline.correcting import balanced, corrected
from graphquant.pipeline.models import loaded
from graphquant.pipeline.planning import prepared_and_plan
from graphquant.pipeline.result import Result
from graphquant.pipeline.timing import Timing
from graphquant.plans import Plan, Skip, to_json
from graphquant.prepare import steps_told
from graphquant.ranges import Ranges, give, read_map
from graphquant.rewrite import rewrite
from graphquant.solve import because, solve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphquant.corrections import Corrected, Draft
    from graphquant.data import Batches
    from graphquant.ir import Model, TensorRef
    from graphquant.numerics import Dynamic, QParams
    from graphquant.pipeline.budgeting import Fitted
    from graphquant.pipeline.checking import Check, Kept
    from graphquant.pipeline.common import Progress, Several
    from graphquant.pipeline.searching import Searched
    from graphquant.pipeline.timing import Timed
    from graphquant.rewrite import Inserted
    from graphquant.solve import Solution


OPTIMIZE = ("macs", "size", "latency")
"""What a plan can be made to cost least of."""


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
    requantize: bool = False,
    correct: Several = (),
    check: bool = True,
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
        correct: Corrections to make beside those of the rules, or "not NAME" for one that is not to be made.
        check: Whether to keep samples and to measure; else calibration uses all.
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
        from graphquant.data import check_spec

        check_spec(data)
    source = loaded(model)
    prepared, made = prepared_and_plan(
        source, plan, rules, include, exclude, family, requantize=requantize, correct=correct
    )
    made = with_method(made, method)
    taken = None
    if ranges is not None:
        made, taken = _given(prepared, made, ranges, ranges_map)
    found = None if stats is None else statistics(stats)
    wanting, held, used = needs_data(made), None, None
    opened = cache(partial(_opened, prepared, data or "", samples))  # once, and only where it is wanted
    timing = _timing(source, opened, data, optimize, runtime, size_budget)
    bounds = Bounds(sqnr=min_sqnr, agreement=min_agreement, drop=max_accuracy_drop)
    _need_labels(prepared, opened, data, samples, bounds, check=check)
    if data is not None and found is None and (wanting or (made.corrections and made.sites)):
        used, held = _shared(data, samples, opened(), bounds, check=check)
    seen = cache(partial(_seen, prepared, found if wanting else None, opened, data or "", used))
    early = balanced(prepared, made, used, stats=found is not None)
    prepared, made = early.model, early.plan
    if found is not None or wanting:
        same = {tensor: cone for tensor, cone in kept(source, prepared).items() if tensor not in early.moved}
        targets = planned(prepared, made, full=bool(bounds) and found is None, same=same)
        if found is not None:
            found = select(found, targets, source.digest, calibrate_line(source, made, plan))
            used = _used(opened, seen, data, samples, check=check) if made.corrections else None
        elif used is not None:
            found = observe(prepared, targets, used, None, progress, model=source.digest, max_memory=max_memory)
        else:
            raise NeedsDataError(_data_lines(source, wanting, taken))
    tuning = _tuning(opened, data, samples, seen if bounds else int, wanted=check and bool(bounds or size_budget))
    build = partial(_built, prepared, found=found, used=used, float_weights=float_weights)
    least = bounds if optimize == "size" else Bounds()
    budget = _fitted(source, prepared, made, build, tuning, size_budget, least, progress)
    made = made if budget is None else budget.plan
    search = None
    if tuning is not None and bounds:
        from graphquant.pipeline.searching import searched

        search = partial(
            searched,
            prepared,
            make=lambda tried: _pair(build(tried)),
            measure=lambda tried: measured(source, tried, tuning, bounds, None, inside=False),
            kept=tuning,
            bounds=bounds,
            optimize=optimize,
            fixed=() if budget is None else budget.weights,
            progress=progress,
        )
    made, built, quick, outcome = _decided(prepared, made, build, timing, search, progress)
    draft, solution, params, skips = built.draft, built.draft.solution, built.params, built.skips
    rewritten, inserted, solved = built.model, built.inserted, solution.plan
    made, told = early.before(made), (*early.told, *draft.told)
    rewritten.provenance = _provenance(source, made, found if wanting else None, told, early.moved)
    rewritten.origin = None if any(done.folded for done in inserted) else source
    places = [index for index in range(len(solved.sites)) if index in params]
    if data is not None and check and held is None and inserted:
        held = beside(data, samples, opened(), seen(), searched=tuning is not None, stats=bool(wanting))
    return Result(
        model=rewritten if inserted else source,
        source=source,
        plan=made,
        inserted=tuple(inserted),
        skips=(*solved.skips, *(skips[index] for index in sorted(skips))),
        notes=_notes(solution),
        choices=tuple(because(draft.model, solved, index, solution) for index in places),
        changes=solution.changes,
        conflicts=solution.conflicts,
        stats=found if wanting else None,
        statistics=Path(stats) if wanting and isinstance(stats, str | Path) else None,
        ranges=taken,
        corrected=told,
        searched=outcome,
        timed=quick,
        fitted=budget,
        check=None if held is None else _checked(source, built, held, bounds, outcome, progress),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """The model of a plan: what was inserted with which scales, and what was left."""

    draft: Draft
    model: Model
    inserted: list[Inserted]
    params: dict[int, QParams | Dynamic]
    skips: dict[int, Skip]


def _need_labels(
    prepared: Model,
    opened: Callable[[], Batches],
    data: str | None,
    samples: int | None,
    bounds: Bounds,
    *,
    check: bool,
) -> None:
    """Refuses data without labels where they are what a bound is measured by."""
    if data is not None and check and bounds.drop is not None:
        comparing.labelled(opened(), data, formats.module(prepared.format).inputs(prepared), samples)


def _timing(
    source: Model,
    opened: Callable[[], Batches],
    data: str | None,
    optimize: str,
    runtime: str | None,
    size_budget: str | None,
) -> Timing | None:
    """What times models if that is what is to be least."""
    if optimize not in OPTIMIZE or runtime not in {None, "tflite"}:
        given = optimize if optimize not in OPTIMIZE else runtime
        raise UsageError(
            f"{printable(repr(given))} is nothing to optimize for. optimize is {', '.join(OPTIMIZE)}; runtime is tflite"
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
    return Timing.on(source, opened(), lite=runtime == "tflite")


def _decided(
    prepared: Model,
    made: Plan,
    build: Callable[[Plan], _Built],
    timing: Timing | None,
    search: Callable[..., Searched] | None,
    progress: Progress | None,
) -> tuple[Plan, _Built, Timed | None, Searched | None]:
    """The plan that is to be, of the one that the rules make, with its model, and what was found on the way."""
    quick, outcome = None, None
    if timing is not None:
        quick = timing.quickest(prepared, made, lambda tried: _pair(build(tried)), progress)
        made = quick.plan
    if search is not None and made.sites:
        outcome = search(plan=made, costs=None if quick is None else quick.costs or None)
        made = outcome.plan
    built = build(made)
    if timing is not None and quick is not None:
        quick = timing.confirmed(quick, made, built.model)
        if quick.plan is not made:
            made = quick.plan
            built = build(made)
            outcome = outcome if built.inserted else None  # it is of the plan that is not taken
            outcome = outcome and replace(outcome, alone={})  # that is of another plan
    return made, built, quick, outcome


def _seen(prepared: Model, found: Stats | None, opened: Callable[[], Batches], data: str, used: Batches | None) -> int:
    """How many of the first samples are for ranges and corrections: those `used`, or those that statistics are of."""
    if used is not None or found is None:
        return 0 if used is None else used.count
    return given(found, opened(), partial(_opened, prepared, data))


def _tuning(
    opened: Callable[[], Batches], data: str | None, samples: int | None, seen: Callable[[], int], *, wanted: bool
) -> Kept | None:
    """The samples that a search looks at, where there is one; the first that were `seen` are not among them."""
    return searching(data, samples, opened(), seen()) if data is not None and wanted else None


def _fitted(
    source: Model,
    prepared: Model,
    made: Plan,
    build: Callable[[Plan], _Built],
    tuning: Kept | None,
    budget: str | None,
    least: Bounds,
    progress: Progress | None,
) -> Fitted | None:
    """The plan that fits into a size budget, or with which bounds are met in the fewest bytes, where there are any."""
    from graphquant.pipeline.budgeting import fitted, smallest

    def make(tried: Plan) -> tuple[Model, list[Inserted]]:
        return _pair(build(tried))

    if budget is not None:
        return fitted(source, prepared, made, make, tuning, budget, progress)
    if tuning is None or not least:
        return None
    measure = partial(measured, source, kept=tuning, bounds=least, progress=None, inside=False)
    return smallest(source, prepared, made, make, measure, tuning, least, progress)


def _checked(
    source: Model, built: _Built, held: Kept, bounds: Bounds, outcome: Searched | None, progress: Progress | None
) -> Check | None:
    """What was made, measured on the samples that were kept; None where nothing was."""
    if not built.inserted:
        return None
    check = measured(source, built.model, held, bounds, progress)
    if outcome is None:
        return check
    from graphquant.pipeline.searching import blamed

    return blamed(check, outcome, built.model, built.inserted)


def _pair(built: _Built) -> tuple[Model, list[Inserted]]:
    return built.model, built.inserted


def _built(prepared: Model, made: Plan, *, found: Stats | None, used: Batches | None, float_weights: bool) -> _Built:
    """Scales, corrections and new ops for a plan."""
    solution = solve(prepared, made, found.sketches, found.unwatchable) if found else solve(prepared, made, {})
    draft = corrected(prepared, solution, made, used)
    solved, params, skips = draft.solution.plan, dict(draft.solution.params), dict(draft.solution.skips)
    for index, site in enumerate(solved.sites if float_weights else ()):
        if index in params and site.scheme.type.bits == 32:  # noqa: PLR2004  # no op quantizes to int32 at run time
            del params[index]
            skips[index] = Skip(tensor=site.tensor, uses=site.uses, rule=site.rule, reason="weights are kept float")
    rewritten, inserted = rewrite(draft.model, solved, params, float_weights=float_weights, folds=draft.folds)
    return _Built(draft=draft, model=rewritten, inserted=inserted, params=params, skips=skips)


def _opened(prepared: Model, data: str, samples: int | None) -> Batches:
    """The data, read through once for its digest while it is used."""
    from graphquant.data import open_data

    return open_data(data, formats.module(prepared.format).inputs(prepared), samples=samples, meanwhile=True)


def _shared(
    data: str, samples: int | None, opened: Batches, bounds: Bounds, *, check: bool
) -> tuple[Batches, Kept | None]:
    """The samples to calibrate on, half of them where a search is to judge by others, and those for the check."""
    if not check:
        return opened, None
    used, held = parted(data, samples, opened)
    return (halved(used) if bounds else used), held


def _used(
    opened: Callable[[], Batches], seen: Callable[[], int], data: str | None, samples: int | None, *, check: bool
) -> Batches | None:
    """The first samples, which were `seen` for statistics, that are not the check's; None where there are none."""
    if data is None or not seen():
        return None
    used = parted(data, samples, opened())[0] if check else opened()
    return replace(used, count=min(used.count, seen()))


def _notes(solution: Solution) -> dict[TensorRef, str]:
    """The notes by tensor; those of several sites of one are told one after the other."""
    notes: dict[TensorRef, str] = {}
    for index, told in sorted(solution.notes.items()):
        tensor = solution.plan.sites[index].tensor
        notes[tensor] = "; ".join(filter(None, (notes.get(tensor), *told)))
    return notes


def _provenance(
    source: Model, made: Plan, stats: Stats | None, told: Sequence[Corrected], scaled: frozenset[TensorRef]
) -> dict[str, str]:
    """What the written model is to say of where it came from: nothing of this machine and no time."""
    said = to_json(replace(made, rules=(), steps=()))  # names of rules may be paths
    said["steps"] = [[step.step, step.target, step.detail] for step in made.steps]
    plan = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    methods = sorted({site.scheme.observe.name for site in needs_data(made)})
    says = {
        "version": __version__,
        "source": source.digest,
        "plan": plan,
        "rules": made.digest,
        "method": ", ".join(methods) if stats is not None else "",
        "data": ", ".join(run.data for run in stats.runs) if stats is not None else "",
        "steps": steps_told(step.step for step in made.steps),
        "scaled": json.dumps(sorted(map(str, scaled))) if scaled else "",
        "corrections": steps_told(one.correction for one in told if one.done),
        "random": "yes" if stats is not None and stats.random else "",
    }
    return {key: value for key, value in says.items() if value}


def _given(
    prepared: Model, made: Plan, ranges: Model | str | Path, names: Mapping[str, str] | str | Path | None
) -> tuple[Plan, Ranges]:
    """The plan with the scales of a TFLite file."""
    source = loaded(ranges)
    if source.format != "tflite":
        raise UsageError(f"{source.path or 'The model'} is no TFLite file. Give one whose scales are to be used.")
    return give(prepared, made, source, read_map(Path(names)) if isinstance(names, str | Path) else names or {})


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


__all__ = ["insert"]
