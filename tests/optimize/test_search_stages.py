"""The stages of a search by themselves, with times, errors and validations that are given."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from graphquant.analysis.comparison import Comparison, OutputFigures
from graphquant.analysis.validation import Bounds, Validation
from graphquant.errors import UsageError
from graphquant.ir import TensorRef, Use
from graphquant.optimize import search
from graphquant.optimize.algorithm import PreCalibrationState
from graphquant.optimize.candidates import FLOAT_CANDIDATE, RULE_CANDIDATE, Candidate, ScaleGroup, SearchFold
from graphquant.optimize.latency import FloatSitesResult, TimeRatio
from graphquant.optimize.search import (
    BOUNDS_NOT_MET,
    CONFIRMATION_PAIRS,
    FLOAT_IS_FASTER,
    GAIN_TOO_SMALL,
    GAIN_UNCERTAIN,
    MAX_BISECTIONS,
    MAX_RELATIVE_TIME,
    OUTCOME_PAIRS,
    Objective,
    SearchTrace,
    _SearchStages,
    search_plan,
)
from graphquant.optimize.search_budget import SearchLimitError
from graphquant.optimize.selection import MAX_MEASUREMENTS
from graphquant.optimize.sensitivity import error_to_db
from graphquant.optimize.size_budget import SizedPlan
from graphquant.quantize import Plan, Site, SkipCode
from graphquant.rules import Scheme

ACTIVATION = Scheme(name="act", dtype="uint8", family="onnx-qdq")
NAMES = "abcd"


def plan_of_names(names=NAMES, **changes):
    """Return a plan with a site for each name, which op y reads."""
    sites = tuple(
        Site(tensor=TensorRef("", name), uses=(Use("", "y", slot),), graph="", scheme=ACTIVATION)
        for slot, name in enumerate(names)
    )
    return Plan(format="onnx", model="", prepared="", rules=(), sites=sites, **changes)


def make_trace(plan=None, **fields):
    """Return the trace of a search that is to find the lowest latency."""
    return SearchTrace(minimize="latency", plan=plan or plan_of_names(), **fields)


def make_stages(build=None, progress=None, search_set=None, folds=(), **objective):
    """Return the stages for an objective."""
    return _SearchStages(
        source=SimpleNamespace(size=4000),
        prepared="prepared",
        build=build or (lambda plan: SimpleNamespace(model=make_model(plan), insertions=plan.sites)),
        stats="stats",
        objective=Objective(**objective),
        search_set=search_set,
        folds=folds,
        progress=progress,
        budget=None,
    )


def make_model(plan):
    """Return the model of a plan, which no backend judges."""
    return SimpleNamespace(plan=plan, traits=SimpleNamespace(judgeable=False))


def tensors(mapping):
    """Return a mapping by tensor as one by name."""
    return {tensor.op: value for tensor, value in mapping.items()}


def make_validation(*sqnrs, bounds=None, lower=None):
    """Return the validation of a model whose outputs have these SQNRs."""
    outputs = tuple(
        OutputFigures(
            name=str(index),
            quantized_name=str(index),
            sqnr=sqnr,
            cosine=1.0,
            max_error=1.0,
            agreement=None,
            rows=0,
            values=10,
            accuracy=None,
            problem="",
            sqnr_lower_bound=lower,
        )
        for index, sqnr in enumerate(sqnrs)
    )
    comparison = Comparison(samples=100, random=False, outputs=outputs, sites=(), labels="")
    return Validation(comparison=comparison, reuses_samples=False, bounds=bounds or Bounds(min_sqnr=30))


def time_ratio(median, high=None):
    """Return a ratio of two times."""
    return TimeRatio(median=median, low=median, high=high or median, first_seconds=median, second_seconds=1.0)


# -- the trace ----------------------------------------------------------------------------------


def test_samples_of_their_own():
    """Plans are measured on samples of their own for bounds and for a size budget, not for latency alone."""
    assert not Objective(minimize="latency").uses_search_set
    assert Objective(bounds=Bounds(min_sqnr=1)).uses_search_set
    assert Objective(size_budget="1MB").uses_search_set


def test_defaults():
    """Multiply-adds of ONNX models are the default. Fields of stages that did not run are empty."""
    objective, trace = Objective(), make_trace()
    assert (objective.minimize, objective.as_tflite) == ("macs", False)
    assert (trace.plans, trace.cost, trace.runs_per_site, trace.float_size) == (0, 0.0, 0.0, 0)
    assert (trace.timed_samples, trace.timed_plans, trace.interrupted) == (0, 0, False)
    assert (MAX_BISECTIONS, CONFIRMATION_PAIRS, OUTCOME_PAIRS, MAX_RELATIVE_TIME) == (7, 3, 5, 0.95)


def test_verdicts_of_a_trace():
    """Without a validation there are no bounds to miss. Failures and caveats are those of the validation."""
    assert make_trace().bounds_met
    assert make_trace().status is None
    validations = make_validation(40.0, lower=35.0), make_validation(40.0, lower=20.0), make_validation(20.0)
    for validation, status in zip(validations, ("met", "met-not-proven", "missed"), strict=True):
        trace = make_trace(search_validation=validation)
        assert (trace.failures, trace.caveats) == (validation.failures, validation.caveats)
        assert trace.bounds_met == (status == "met")
        assert trace.status == validation.status == status
    assert [bool(v.failures) for v in (make_validation(40.0, lower=20.0), make_validation(20.0))] == [False, True]
    assert make_trace(plan=plan_of_names(""), runtime="onnxruntime").all_float
    assert not make_trace(plan=plan_of_names("")).all_float
    assert not make_trace(runtime="onnxruntime").all_float


def test_candidates_of_a_trace():
    """Candidates of further tensors are added to those of earlier stages."""
    a, b, c = (TensorRef("", name) for name in "abc")
    trace = make_trace(float_tensors={a: 12.0}, changed_tensors={b: "8-bit weights"})
    added = trace.with_candidates({b: FLOAT_CANDIDATE, c: "mse range"})
    assert added.float_tensors == {a: 12.0, b: None}
    assert added.changed_tensors == {b: "8-bit weights", c: "mse range"}


@pytest.mark.parametrize(
    ("sqnrs", "worst", "error"),
    [((40.0, 20.0), 20.0, 0.5), ((None, 50.0), 50.0, 0.5), ((40.0,), 40.0, 0.5), ((), -1, 0)],
)
def test_worst_output(sqnrs, worst, error):
    """The worst output counts as it was measured, with its standard error."""
    validation = make_validation(*sqnrs, lower=3.0)
    outputs = [
        replace(output, sqnr_standard_error=0.5 if output.sqnr == worst else 9.0)
        for output in validation.comparison.outputs
    ]
    validation = replace(validation, comparison=replace(validation.comparison, outputs=tuple(outputs)))
    assert (search._worst_sqnr(validation), search._worst_output(validation)) == (worst, (worst, error))


def test_no_comparison():
    """A model that cannot be measured is worse than all others."""
    validation = Validation(comparison=None, reuses_samples=False, bounds=Bounds())
    assert search._worst_sqnr(validation) == -1
    assert [error_to_db(error) for error in (0.0, 1e-3)] == [math.inf, pytest.approx(30)]


# -- weight bit widths --------------------------------------------------------------------------


@pytest.fixture
def sizes(monkeypatch):
    """Let the constants of a model have the size of its plan, and offer the sizes in the list that is returned."""
    offered, limits = [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000], []

    class Chooser:
        """Choose the largest plan within a limit, or the smallest of all."""

        weights, estimated = frozenset([Use("", "y", 1)]), (TensorRef("", "a"),)

        def __init__(self, prepared, plan, build, search_set, progress):
            assert (prepared, plan.size, callable(build)) == ("prepared", 1000, True)
            assert search_set in {None, "samples"}
            assert progress is None or callable(progress)

        def best_plan_within(self, limit, _):
            """Return the plan."""
            limits.append(limit)
            size = max((size for size in offered if size <= limit), default=min(offered))
            candidates = {TensorRef("", f"w{size}"): "4-bit weights", TensorRef("", f"v{size}"): FLOAT_CANDIDATE}
            return SizedPlan(SimpleNamespace(size=size), size, candidates)

    monkeypatch.setattr(search, "WeightBitsChooser", Chooser)
    monkeypatch.setattr(search, "families_with_float_weights", lambda plan: getattr(plan, "float_families", ()))
    monkeypatch.setattr(
        search,
        "make_candidate_plans",
        lambda model, _plan, *, small: {"4-bit weights": 1} if small and model == "prepared" else {},
    )
    monkeypatch.setattr(search, "model_constant_bytes", lambda model: model.size)
    return offered, limits


def minimize_size(monkeypatch, passing, plan=None, **changes):
    """Return the trace of the least size with which `passing` is true of a model's size, and the reported progress."""
    reported = []
    monkeypatch.setattr(_SearchStages, "_validate", lambda _, plan: SimpleNamespace(failures=not passing(plan.size)))
    defaults = {
        "minimize": "size",
        "bounds": Bounds(min_sqnr=30),
        "search_set": "samples",
        "progress": lambda *numbers: reported.append(numbers),
    }
    stages = make_stages(lambda plan: SimpleNamespace(model=SimpleNamespace(size=plan.size)), **defaults | changes)
    trace = make_trace(plan or SimpleNamespace(size=1000))
    return trace, stages.choose_weight_bits(trace), reported


def test_the_smallest_size_within_bounds(sizes, monkeypatch):
    """The size is bisected between the largest that failed and the smallest that passed."""
    _, limits = sizes
    before, trace, reported = minimize_size(monkeypatch, lambda size: size >= 430)
    assert limits == [-math.inf, 550, 300, 400, 450, 475, 487.5]
    assert reported == [("searching", number, MAX_BISECTIONS) for number in range(1, 8)]
    assert (trace.size, trace.plan.size, trace.max_size, trace.float_size) == (500, 500, None, 4000)
    assert trace.sized_weights == {Use("", "y", 1)}
    assert trace.estimated_weights == (TensorRef("", "a"),)
    assert tensors(trace.changed_tensors) == {"w500": "4-bit weights"}
    assert tensors(trace.float_tensors) == {"v500": None}
    assert before.size is None
    without_progress = minimize_size(monkeypatch, lambda size: size >= 130, progress=None)[1]
    assert tensors(without_progress.changed_tensors) == {"w200": "4-bit weights"}
    assert tensors(without_progress.float_tensors) == {"v200": None}


def test_the_smallest_size_of_all(sizes, monkeypatch):
    """If the smallest plan meets the bounds, no other one is tried."""
    _, limits = sizes
    _, trace, reported = minimize_size(monkeypatch, lambda _: True)
    assert (limits, trace.size, reported) == ([-math.inf], 100, [("searching", 1, MAX_BISECTIONS)])


def test_no_smaller_size(sizes, monkeypatch):
    """The plan of the rules stays if none is smaller, if it fails itself, or if nothing else can be chosen."""
    offered, limits = sizes
    for changes in ({"minimize": "macs"}, {"bounds": Bounds()}, {"search_set": None}):
        before, after, _ = minimize_size(monkeypatch, lambda _: True, **changes)
        assert after is before
    before, after, _ = minimize_size(monkeypatch, lambda _: False)
    assert after is before
    before, after, _ = minimize_size(monkeypatch, lambda _: True, SimpleNamespace(size=1000, float_families=("x",)))
    assert after is before
    assert limits == []
    offered[:] = [1000]
    before, after, reported = minimize_size(monkeypatch, lambda _: True)
    assert after is before
    assert (limits, reported) == ([-math.inf], [])
    offered[:] = [900]
    before, after, _ = minimize_size(monkeypatch, lambda size: size > 900)
    assert after is before
    monkeypatch.setattr(search, "make_candidate_plans", lambda *_, **__: {})
    limits.clear()
    before, after, _ = minimize_size(monkeypatch, lambda _: True)
    assert after is before
    assert limits == []


def test_an_interrupted_size(sizes, monkeypatch):
    """Ctrl-C keeps the smallest plan so far."""
    _, limits = sizes

    def passing(size):
        if len(limits) == 4:
            raise KeyboardInterrupt
        return size >= 430

    _, trace, _ = minimize_size(monkeypatch, passing)
    assert trace.size == 500


def test_size_budgets(sizes):
    """The best plan within the budget is chosen. A budget that cannot be met or does nothing is a usage error."""
    _, limits = sizes
    trace = make_stages(size_budget="25%").choose_weight_bits(make_trace(SimpleNamespace(size=1000)))
    assert limits == [1000]
    assert (trace.size, trace.max_size) == (1000, 1000)
    assert make_stages(size_budget="100").choose_weight_bits(trace).size == 100
    with pytest.raises(UsageError, match="--size-budget 100 or more"):
        make_stages(size_budget="99").choose_weight_bits(trace)
    with pytest.raises(UsageError, match="fake-quant keeps float weights"):
        make_stages(size_budget="25%").choose_weight_bits(
            make_trace(SimpleNamespace(size=1, float_families=("fake-quant",)))
        )


def test_a_validation_needs_samples():
    """A stage that validates without samples is a mistake of the caller."""
    with pytest.raises(ValueError, match="search samples"):
        make_stages()._validate("model")


def test_validations_of_a_search(monkeypatch):
    """Plans are compared with the source on all folds, each built without the samples of the fold."""
    calls = []

    class Validator:
        """Note the arguments."""

        def __init__(self, *arguments):
            calls.append(arguments)

        def validate(self, models):
            """Return the models."""
            return models

    monkeypatch.setattr(search, "FoldValidator", Validator)
    folds = tuple(
        SearchFold(
            held_out=f"part {index}", build=lambda plan, index=index: SimpleNamespace(model=(plan, index)), stats=None
        )
        for index in range(2)
    )
    stages = make_stages(search_set="samples", folds=folds, bounds=Bounds(min_sqnr=1))
    assert stages._validate("plan") == [("plan", 0), ("plan", 1)]
    assert calls == [(stages.source, ["part 0", "part 1"], Bounds(min_sqnr=1))]


# -- latency ------------------------------------------------------------------------------------


class Timer:
    """A timer with given ratios of the time of plans."""

    runtime, samples, as_tflite, feeds = "onnxruntime", 7, False, ()

    def __init__(self, ratio=None, high=None):
        self.ratio, self.high, self.calls = ratio, high, []

    def make_run(self, model):
        """Return the model as its own run."""
        return model

    def time_ratio(self, first, second):
        """Note the two models."""
        self.calls.append(("once", first, second))
        return time_ratio(1.5)

    def median_ratio(self, first, second, pairs):
        """Return the ratio."""
        self.calls.append((pairs, first, second))
        return time_ratio(self.ratio, self.high)


def test_a_gain_is_confirmed():
    """A plan stays if it takes at most 95% of the time of float, and surely less than all of it."""
    rules_ratio = time_ratio(0.9)
    trace = make_trace(rules_ratio=rules_ratio, timed_plans=3, runtime="onnxruntime")
    stages, timer = make_stages(), Timer(MAX_RELATIVE_TIME, 0.99)
    confirmed = stages.confirm_gain(trace, timer, "quantized")
    assert timer.calls == [(OUTCOME_PAIRS, "quantized", stages.source)]
    assert confirmed == replace(trace, outcome_ratio=time_ratio(MAX_RELATIVE_TIME, 0.99), timed_plans=4)
    unmeasured = make_trace()
    assert stages.confirm_gain(unmeasured, timer, "quantized") is unmeasured


@pytest.mark.parametrize(
    ("ratio", "high", "reason"),
    [
        (0.95, 1.0, GAIN_UNCERTAIN),
        (0.951, 0.96, GAIN_TOO_SMALL),
        (0.99, 1.1, GAIN_TOO_SMALL),
        (1.0, 1.1, FLOAT_IS_FASTER),
        (1.2, 1.3, FLOAT_IS_FASTER),
    ],
)
def test_a_gain_that_is_none(ratio, high, reason):
    """All sites become float, with the reason, and nothing is said of the rejected plan."""
    trace = make_trace(
        rules_ratio=time_ratio(0.9),
        timed_plans=3,
        plans=5,
        cost=0.5,
        runs_per_site=2.0,
        search_validation=make_validation(40.0),
        site_errors={0: 1e-3},
        changed_tensors={TensorRef("", "a"): "mse range"},
        runtime="onnxruntime",
    )
    rejected = make_stages().confirm_gain(trace, Timer(ratio, high), "quantized")
    assert rejected.plan.sites == ()
    assert [skip.tensor.op for skip in rejected.plan.skips] == [*NAMES]
    assert {skip.rule for skip in rejected.plan.skips} == {"latency"}
    assert all(skip.reason.startswith(reason) for skip in rejected.plan.skips)
    assert (rejected.float_reason, rejected.outcome_ratio) == (reason, time_ratio(ratio, high))
    assert tensors(rejected.float_tensors) == dict.fromkeys(NAMES)
    assert (rejected.plans, rejected.cost, rejected.runs_per_site, rejected.timed_plans) == (0, 0.0, 0.0, 4)
    assert (rejected.search_validation, rejected.site_errors, rejected.changed_tensors) == (None, {}, {})
    assert rejected.all_float


@pytest.mark.parametrize(("validation", "reason"), [(None, FLOAT_IS_FASTER), (make_validation(1.0), BOUNDS_NOT_MET)])
def test_nothing_is_left_to_confirm(validation, reason):
    """A plan without sites is not timed. The reason is the bounds, if there are any."""
    timer, ratio = Timer(), time_ratio(0.9)
    trace = make_trace(plan_of_names(""), rules_ratio=ratio, search_validation=validation, timed_plans=3)
    confirmed = make_stages().confirm_gain(trace, timer, "quantized")
    assert confirmed == replace(trace, outcome_ratio=ratio, float_reason=reason)
    assert timer.calls == []


class Profiler:
    """A profiler whose ops cost given seconds."""

    available, quantized_sites, costs = True, (0, 1), {("", "y"): 1.0}

    def __init__(self, prepared, plan, build, feeds):
        assert (prepared, [site.tensor.op for site in plan.sites]) == ("prepared", [*NAMES])
        assert (callable(build), feeds) == (True, Timer.feeds)

    def profile(self, sites):
        """Return no profile."""
        raise NotImplementedError

    def float_costs(self):
        """Return the costs."""
        return self.costs


@pytest.mark.parametrize(("ratio", "kept"), [(0.99, (1, 3)), (1.0, ())])
def test_the_fastest_sites(ratio, kept, monkeypatch):
    """Sites that are faster in float stay so if new sessions confirm the gain. Algorithms do not change times."""
    asked = []

    def minimize(groups, profile, compare, *, progress):
        asked.extend([groups, compare((0,), ())])
        progress(1, 2)
        return FloatSitesResult((1, 3), 5, interrupted=True)

    monkeypatch.setattr(search, "PlanProfiler", Profiler)
    monkeypatch.setattr(search, "make_latency_groups", lambda *arguments: arguments)
    monkeypatch.setattr(search, "minimize_latency", minimize)
    built, reported = [], []

    def build(plan):
        built.append(plan)
        names = "".join(site.tensor.op for site in plan.sites)
        return SimpleNamespace(model=names, insertions=plan.sites)

    timer, plan = Timer(ratio), plan_of_names(algorithms=("bias-correction",))
    stages = make_stages(build, lambda *numbers: reported.append(numbers))
    trace, costs = stages.choose_fastest_sites(make_trace(plan), timer)
    assert asked == [("prepared", plan, (0, 1)), time_ratio(1.5)]
    assert reported == [("timing", 1, 2)]
    assert timer.calls == [
        ("once", "abcd", stages.source),
        ("once", "bcd", "abcd"),
        (CONFIRMATION_PAIRS, "ac", "abcd"),
    ]
    assert all(plan.algorithms == () for plan in built)
    assert ["".join(site.tensor.op for site in plan.sites) for plan in built] == ["abcd", "bcd", "ac", "abcd"]
    assert costs == Profiler.costs
    assert [site.tensor.op for site in trace.plan.sites] == [name for i, name in enumerate(NAMES) if i not in kept]
    assert trace.plan.algorithms == ("bias-correction",)
    assert tensors(trace.float_tensors) == {NAMES[index]: None for index in kept}
    assert (trace.rules_ratio, trace.timed_plans, trace.interrupted) == (time_ratio(1.5), 6, True)
    assert (trace.runtime, trace.timed_samples) == ("onnxruntime", 7)


def test_no_site_is_faster_in_float(monkeypatch):
    """Without such sites there is nothing to confirm. An earlier interruption is not forgotten."""
    monkeypatch.setattr(search, "PlanProfiler", Profiler)
    monkeypatch.setattr(Profiler, "costs", {})
    monkeypatch.setattr(search, "make_latency_groups", lambda *_: [])
    monkeypatch.setattr(search, "minimize_latency", lambda *_, **__: FloatSitesResult((), 5, interrupted=False))
    timer = Timer()
    trace, costs = make_stages().choose_fastest_sites(make_trace(interrupted=True), timer)
    assert [call[0] for call in timer.calls] == ["once"]
    assert (trace.interrupted, costs) == (True, None)
    assert trace.plan.sites == plan_of_names().sites


def test_sites_that_cannot_be_profiled(monkeypatch):
    """Nothing is timed without quantized tensors. Without times of ops, only the plan of the rules is."""
    monkeypatch.setattr(search, "PlanProfiler", Profiler)
    empty = make_stages(lambda _: SimpleNamespace(model="empty", insertions=()))
    timer = Timer()
    trace, costs = empty.choose_fastest_sites(make_trace(), timer)
    assert (trace.rules_ratio, trace.timed_plans, trace.runtime, costs) == (None, 0, "onnxruntime", None)
    assert timer.calls == []
    for name, value in (("as_tflite", True), ("available", False)):
        monkeypatch.setattr(Timer if name == "as_tflite" else Profiler, name, value)
        trace, costs = make_stages().choose_fastest_sites(make_trace(), Timer())
        assert (trace.rules_ratio, trace.timed_plans, costs) == (time_ratio(1.5), 1, None)
        monkeypatch.undo()
        monkeypatch.setattr(search, "PlanProfiler", Profiler)


# -- bounds -------------------------------------------------------------------------------------


ERRORS = {
    3: {RULE_CANDIDATE: 1.0},
    0: {RULE_CANDIDATE: 1e-2, "mse range": 2e-3},
    2: {RULE_CANDIDATE: 1e-5},
    1: {RULE_CANDIDATE: 1e-3},
}


class Trials:
    """Given errors of the candidates of each site: the sum of all of them is the error of a plan."""

    interrupted, measured_sites, blocks, runs = False, frozenset({0, 1, 2}), (), 12

    def __init__(self, prepared, plan, built, samples, order, progress, budget, costs):
        assert budget is None
        assert costs
        assert (prepared, built, samples.count, order) == ("prepared", "worst fold", 20, [1, 0])
        assert progress is None or callable(progress)
        self.plan = plan

    def measure_candidates(self, rebuild, _missing):
        """Return the errors, and a plan with another scheme."""
        assert rebuild("plan") == "rebuilt plan"
        other = replace(ACTIVATION, name="mse")
        sites = tuple(replace(site, scheme=other) for site in self.plan.sites)
        return ERRORS, {"mse range": replace(self.plan, sites=sites)}

    def make_predictor(self, plan, built):
        """Predict nothing."""
        assert built == f"fold of {plan}"


class Measurer:
    """Measures plans by the sum of the errors of their sites."""

    samples = SimpleNamespace(count=20)

    def __init__(self, source, prepared, plan, built, folds, bounds, budget):
        assert budget is None
        assert (prepared, built.model.plan, folds) == ("prepared", plan, ("fold",))
        self.bound = bounds.min_sqnr

    def charge_plan(self, *, bypassed=False):
        """Do not limit the work."""

    def select_worst_fold(self):
        """Return stand-ins."""
        return "worst fold", self.samples, [1, 0]

    def build_worst_fold(self, plan):
        """Return a stand-in."""
        return f"fold of {plan}"

    def rebuild_worst_fold(self, plan):
        """Return a stand-in."""
        return f"rebuilt {plan}"

    def validate_final(self, plan, validation, build, stats):
        """Validate a plan that is worse than its folds."""
        assert (build(plan).model.plan, stats) == (plan, "stats")
        if validation.comparison is None:
            return validation
        sqnr = validation.comparison.outputs[0].sqnr - Measurer.final_loss
        if sqnr >= self.bound or validation.failures:
            return validation
        return make_validation(sqnr, bounds=Bounds(min_sqnr=self.bound), lower=sqnr)

    def build_final(self, plan, build, stats):
        """Return the model of a plan."""
        assert stats == "stats"
        return build(plan)

    def validate_bypassed(self, plan, float_sites):
        """Validate a plan without some sites."""
        return self.validate(replace(plan, sites=tuple(s for i, s in enumerate(plan.sites) if i not in float_sites)))

    def validate(self, plan):
        """Note the plan; after some plans, Ctrl-C ends the search."""
        if len(VALIDATED) == Measurer.limit:
            raise KeyboardInterrupt
        VALIDATED.append(plan)
        sqnr = -10 * math.log10(model_error(plan))
        return make_validation(sqnr, bounds=Bounds(min_sqnr=self.bound), lower=sqnr - Measurer.margin)


VALIDATED = []


@pytest.fixture
def trials(monkeypatch):
    """Let each site be a group that one op reads, and return the arguments of functions."""
    asked = {}

    def make_groups(_model, plan, indices, errors, fixed):
        asked["fixed"] = fixed
        assert indices == sorted(errors)
        groups = []
        for index in indices:
            candidates = [Candidate(name=name, error=error) for name, error in errors[index].items()]
            candidates.append(Candidate(name=FLOAT_CANDIDATE, error=0.0, high_precision=True))
            ops = frozenset([("", plan.sites[index].tensor.op)])
            groups.append(ScaleGroup(sites=(index,), ops=ops, candidates=tuple(candidates)))
        return groups

    def costs(name):
        def of(*arguments):
            asked[name] = arguments
            return {("", "a"): 1.0, ("", "b"): 10.0, ("", "c"): 1.0, ("", "d"): 1.0}

        return of

    monkeypatch.setattr(search, "GroupTrials", Trials)
    monkeypatch.setattr(search, "PlanMeasurer", Measurer)
    monkeypatch.setattr(search, "make_scale_groups", make_groups)
    monkeypatch.setattr(search, "mac_costs", costs("macs"))
    monkeypatch.setattr(search, "byte_costs", costs("bytes"))
    monkeypatch.setattr(search, "measure_tensor_sizes", lambda *arguments: ("sizes", *arguments))
    return asked


def model_error(plan):
    """Return the error of a plan."""
    return 1e-9 + sum(
        ERRORS["abcd".index(site.tensor.op)]["mse range" if site.scheme.name == "mse" else RULE_CANDIDATE]
        for site in plan.sites
    )


def meet_bounds(monkeypatch, bound, trace=None, costs=None, *, margin=0.0, plans=99, final_loss=0.0, **changes):
    """Return the trace of the search for a bound in dB, and the plans that were validated.

    `margin` is that of the confidence in dB, Ctrl-C ends the search after some `plans`, and the final models are worse
    than those of the folds by `final_loss`.
    """
    VALIDATED.clear()
    monkeypatch.setattr(Measurer, "final_loss", final_loss, raising=False)
    monkeypatch.setattr(Measurer, "limit", plans, raising=False)
    monkeypatch.setattr(Measurer, "margin", margin, raising=False)
    stages = make_stages(search_set="samples", folds=("fold",), **{"bounds": Bounds(min_sqnr=bound)} | changes)
    trace, built = stages.meet_bounds(trace or make_trace(), costs)
    assert built.model.plan.sites == trace.plan.sites
    return trace, list(VALIDATED)


def decibels(reason):
    """Return the figures in dB of a reason."""
    return re.findall(r"(\S+) dB", reason)


def test_the_cheapest_candidates(trials, monkeypatch):
    """A site takes another range before it is float; the reasons and sensitivities are those of the changed sites."""
    trace, validated = meet_bounds(monkeypatch, 25.0)
    assert [(site.tensor.op, site.scheme.name, site.rule) for site in trace.plan.sites] == [
        ("a", "mse", "search"),
        ("b", "act", ""),
        ("c", "act", ""),
    ]
    assert decibels(trace.plan.sites[0].why) == ["25", "20.0", "27.0"]
    assert "mse range" in trace.plan.sites[0].why
    (skip,) = trace.plan.skips
    assert (skip.tensor.op, skip.rule, skip.code) == ("d", "search", SkipCode.OPTIMIZATION)
    assert decibels(skip.reason) == ["25", "-0.0"]
    assert tensors(trace.float_tensors) == {"d": None}  # it was not measured alone
    assert tensors(trace.changed_tensors) == {"a": "mse range"}
    assert trace.site_errors == {0: 2e-3, 1: 1e-3, 2: 1e-5}
    assert trace.cost == pytest.approx(1 / 13)
    assert trace.plans == len(validated) - 1  # the chosen plan is validated once more as it is built
    assert trace.runs_per_site == (12 + (trace.plans + 1) * 20) / 4
    assert trace.search_validation.comparison.outputs[0].sqnr == pytest.approx(-10 * math.log10(3.01e-3), abs=1e-4)
    assert trace.missed_bounds == ()
    assert not trace.interrupted
    assert trials.keys() == {"fixed", "macs"}
    assert trials["macs"][0] == "prepared"
    assert trials["macs"][1][:2] == ("sizes", "prepared")
    assert trials["fixed"] == []


def test_sites_of_one_group():
    """Sites of a group without the chosen candidate keep the rules' one, and errors of 0 have no decibels."""
    candidates = (
        Candidate(name=RULE_CANDIDATE, error=1e-2),
        Candidate(name="mse range", error=0.0),
        Candidate(name=FLOAT_CANDIDATE, error=0.0, high_precision=True),
    )
    group = ScaleGroup(sites=(0, 1), ops=frozenset(), candidates=candidates)
    plan = plan_of_names("ab")
    other = replace(plan, sites=tuple(replace(site, graph="other") for site in plan.sites))
    errors = {0: {RULE_CANDIDATE: 1e-2, "mse range": 0.0}, 1: {RULE_CANDIDATE: 0.0}}
    drafts = search._CandidatePlans(plan, {"mse range": other}, [group], errors, Bounds(min_sqnr=30))
    assert [drafts.changed_candidates((index,)) for index in range(3)] == [
        {},
        {0: "mse range"},
        {0: FLOAT_CANDIDATE, 1: FLOAT_CANDIDATE},
    ]
    first, second = drafts.build_plan((1,)).sites
    assert (first.graph, decibels(first.why), "mse range" in first.why) == ("other", ["30", "20.0"], True)
    assert (second.graph, second.why) == ("", "")
    assert [decibels(skip.reason) for skip in drafts.build_plan((2,)).skips] == [["30", "20.0"], ["30"]]


def test_errors_that_were_not_measured(trials, monkeypatch):
    """Only measured errors are sensitivities."""
    monkeypatch.setattr(Trials, "measured_sites", frozenset({0, 2}))
    assert meet_bounds(monkeypatch, 25.0)[0].site_errors == {0: 2e-3, 2: 1e-5}


def test_an_interrupted_search_for_bounds(trials, monkeypatch):
    """Ctrl-C keeps the best plan so far, and an earlier interruption is not forgotten."""
    reported = []
    trace, validated = meet_bounds(monkeypatch, 25.0, plans=2, progress=lambda *numbers: reported.append(numbers))
    assert (trace.interrupted, trace.plans, len(validated)) == (True, 2, 2)
    assert reported == [("searching", 1, MAX_MEASUREMENTS)]
    assert len(trace.plan.sites) == 4
    assert meet_bounds(monkeypatch, 25.0, make_trace(interrupted=True))[0].interrupted


def test_costs_of_the_objective(trials, monkeypatch):
    """The cost is bytes for size, given seconds for latency, and otherwise multiply-adds."""
    meet_bounds(monkeypatch, 25.0, minimize="size")
    assert trials.keys() == {"fixed", "bytes"}
    trials.clear()
    costs = {("", "a"): 3.0, ("", "b"): 1.0, ("", "c"): 1.0, ("", "d"): 2.0}
    trace, _ = meet_bounds(monkeypatch, 25.0, costs=costs, minimize="latency")
    assert trials.keys() == {"fixed"}
    assert trace.cost == pytest.approx(2 / 7)
    trace, _ = meet_bounds(monkeypatch, 35.0, costs=costs)
    assert tensors(trace.changed_tensors) == {}
    assert sorted(tensors(trace.float_tensors)) == ["a", "b", "d"]
    assert tensors(trace.float_tensors) == {"a": pytest.approx(20), "b": pytest.approx(30), "d": None}
    assert trace.site_errors == {0: 1e-5}


def test_sized_weights_are_fixed(trials, monkeypatch):
    """Weights whose bit width was chosen keep it."""
    trace = make_trace(sized_weights=frozenset([Use("", "y", 2)]), float_tensors={TensorRef("", "z"): 1.0})
    trace, _ = meet_bounds(monkeypatch, 25.0, trace)
    assert trials["fixed"] == [2]
    assert tensors(trace.float_tensors) == {"z": 1.0, "d": None}


def test_the_rules_meet_the_bounds(trials, monkeypatch):
    """Nothing is searched if the plan of the rules meets the bounds, or quantizes nothing."""
    for bound, names in ((-5.0, NAMES), (99.0, "")):
        trace, validated = meet_bounds(monkeypatch, bound, make_trace(plan_of_names(names), timed_plans=2))
        assert trace.plan.sites == plan_of_names(names).sites
        assert (trace.plans, trace.timed_plans, len(validated)) == (1, 2, 1)
        assert trace.search_validation is not None
        assert trials == {}


def test_interrupted_trials(trials, monkeypatch):
    """Ctrl-C in the sensitivity analysis keeps the plan of the rules."""
    monkeypatch.setattr(Trials, "interrupted", True)
    trace, validated = meet_bounds(monkeypatch, 25.0)
    assert (trace.interrupted, trace.plans, len(validated)) == (True, 1, 1)
    assert len(trace.plan.sites) == 4


@pytest.mark.parametrize(("error", "interrupted"), [(KeyboardInterrupt(), True), (SearchLimitError("work"), False)])
def test_predictions_that_end_early(trials, monkeypatch, error, interrupted):
    """Ctrl-C before the predictions keeps the plan of the rules. Without work for them, the search goes on."""

    def raise_error(*_):
        raise error

    monkeypatch.setattr(Trials, "make_predictor", raise_error)
    trace, _ = meet_bounds(monkeypatch, 25.0)
    assert (trace.interrupted, trace.status) == (interrupted, "missed" if interrupted else "met")
    assert (len(trace.plan.sites) == 4) == interrupted


def test_bounds_that_only_float_meets(trials, monkeypatch):
    """If nothing quantized meets the bounds, the trace has the misses of the best plan that quantizes something."""
    trace, validated = meet_bounds(monkeypatch, 60.0)
    assert trace.status == "met"
    assert trace.plan.sites == ()
    assert len(trace.plan.skips) == 4
    best = max((plan for plan in validated if plan.sites), key=lambda plan: -model_error(plan))
    sqnr = -10 * math.log10(model_error(best))
    assert trace.missed_bounds == make_validation(sqnr, bounds=Bounds(min_sqnr=60.0), lower=sqnr).failures
    assert trace.site_errors == {}
    assert trace.cost == 1.0


def test_a_bound_that_is_met_without_proof(trials, monkeypatch):
    """A plan that meets the bound as measured stays, however far it is from a proof."""
    trace, validated = meet_bounds(monkeypatch, -1.0, margin=25.0)
    assert (trace.status, trace.plans, len(validated)) == ("met-not-proven", 1, 1)
    assert trace.plan.sites == plan_of_names().sites
    trace, _ = meet_bounds(monkeypatch, 25.0, margin=25.0)
    assert (trace.status, tensors(trace.float_tensors)) == ("met-not-proven", {"d": None})


@pytest.mark.parametrize("bound", [-1.0, 25.0])
def test_the_final_model_is_worse_than_the_folds(trials, monkeypatch, bound):
    """The search goes on until the folds exceed the bound by as much as the final model is worse."""
    without, _ = meet_bounds(monkeypatch, bound)
    trace, _ = meet_bounds(monkeypatch, bound, final_loss=3.0)
    sqnrs = [found.search_validation.comparison.outputs[0].sqnr for found in (without, trace)]
    assert sqnrs[0] < bound + 3 <= sqnrs[1]
    assert (trace.status, trace.failures) == ("met", ())


@pytest.mark.parametrize(
    ("folds", "final", "status"),
    [
        ((22.0, 21.0), (19.9, 19.0), "missed"),
        ((22.0, 21.0), (20.5, 19.0), "met-not-proven"),
        ((22.0, 21.0), (20.5, 20.1), "met"),
        ((22.0, 19.0), (20.5, 19.0), "met-not-proven"),
        ((24.0, 23.0), None, "met"),
        ((19.0, 18.0), None, "missed"),
    ],
)
def test_final_models_are_validated_near_the_bound(monkeypatch, folds, final, status):
    """The worse status of the folds and the final model counts. Far from the bound, only the folds are measured."""
    validations = [
        make_validation(sqnr, bounds=Bounds(min_sqnr=20.0), lower=lower) for sqnr, lower in filter(None, (folds, final))
    ]
    measured = []

    class Validator:
        def __init__(self, *_):
            """Use no data."""

        def validate(self, models):
            """Return the next validation."""
            measured.append(models)
            return validations[len(measured)]

    monkeypatch.setattr(search, "FoldValidator", Validator)
    plan, built = plan_of_names(), SimpleNamespace(model="final")
    parts = [SimpleNamespace(held_out=None)] * 2
    measurer = search.PlanMeasurer("source", "prepared", plan, built, parts, Bounds(min_sqnr=20.0), None)
    assert measurer.validate_final(plan, validations[0], None, None).status == status
    assert measured == ([["final", "final"]] if final else [])


def test_a_miss_of_the_final_model_is_reported(trials, monkeypatch):
    """If no search is left, the status is that of the final model."""
    monkeypatch.setattr(search, "MAX_SEARCHES", 1)
    trace, _ = meet_bounds(monkeypatch, 25.0, final_loss=3.0)
    assert trace.status == "missed"
    assert trace.search_validation.comparison.outputs[0].sqnr < 25.0


def test_bounds_that_cannot_be_measured(trials, monkeypatch):
    """A bound that applies to no output is a usage error."""
    monkeypatch.setattr(Measurer, "validate", lambda *_: SimpleNamespace(unmeasurable_bounds=("labels", "classes")))
    with pytest.raises(UsageError, match="labels; classes"):
        make_stages(folds=("fold",), bounds=Bounds(min_sqnr=1)).meet_bounds(make_trace(), None)


def test_a_model_that_cannot_be_compared(trials, monkeypatch):
    """Without a comparison nothing is searched."""
    validation = Validation(comparison=None, problem="broken", reuses_samples=False, bounds=Bounds(min_sqnr=1))
    monkeypatch.setattr(Measurer, "validate", lambda *_: validation)
    trace, _ = make_stages(folds=("fold",), bounds=Bounds(min_sqnr=1)).meet_bounds(make_trace(), None)
    assert (trace.search_validation, trace.plans, trials) == (validation, 1, {})


# -- the whole search ---------------------------------------------------------------------------


class Data:
    """Samples of a search."""

    dataset = "dataset"

    def __init__(self, objective):
        self.search_set = "samples" if objective.uses_search_set else None


@pytest.fixture
def stages(monkeypatch):
    """Replace the stages by ones that record their call in the trace's number of plans, and return the calls."""
    calls = []

    def note(name, change):
        def stage(stages, trace, *arguments):
            assert (stages.source, stages.prepared, stages.progress) == ("source", "prepared", print)
            assert stages.build("plan").model == "model"
            assert stages.search_set == ("samples" if stages.objective.uses_search_set else None)
            calls.append((name, *arguments))
            return change(trace)

        monkeypatch.setattr(_SearchStages, name, stage)

    note("choose_weight_bits", lambda trace: trace)
    note("choose_fastest_sites", lambda trace: (replace(trace, runtime="rt"), {("", "a"): 1.0}))
    note("meet_bounds", lambda trace: (replace(trace, plans=2), None))
    note("confirm_gain", lambda trace: trace)
    monkeypatch.setattr(
        search, "LatencyTimer", SimpleNamespace(for_data=lambda *arguments, as_tflite: (*arguments, as_tflite))
    )
    return calls, note


def run_search(objective, plan=None, insertions=()):
    """Return the result of a search, and the plans that were built."""
    built, data = [], Data(objective)

    def build(plan):
        if plan != "plan":  # of the stages
            built.append(plan)
        return SimpleNamespace(model="model", insertions=insertions)

    state = PreCalibrationState(model="prepared", plan=plan or plan_of_names())
    model, trace = search_plan("source", state, build, "stats", objective, data, (), print)
    return model, trace, built


def test_stages_of_each_objective(stages):
    """Bounds and budgets need samples, latency a timer, and the other stages do not run."""
    calls, _ = stages
    plan = plan_of_names()
    _, trace, built = run_search(Objective(), plan)
    assert (trace, built) == (None, [plan])
    assert calls == [("choose_weight_bits",)]
    calls.clear()
    _, trace, built = run_search(Objective(bounds=Bounds(min_sqnr=1)), plan)
    assert (trace.plans, len(built)) == (2, 1)
    assert calls == [("choose_weight_bits",), ("meet_bounds", None)]
    calls.clear()
    _, trace, _ = run_search(Objective(size_budget="1MB"), plan)
    assert trace is None
    assert calls == [("choose_weight_bits",)]
    calls.clear()
    timer = ("source", "dataset", True)
    _, trace, built = run_search(Objective(minimize="latency", as_tflite=True), plan)
    assert (trace.runtime, len(built)) == ("rt", 1)
    assert calls == [("choose_weight_bits",), ("choose_fastest_sites", timer), ("confirm_gain", timer, "model")]
    calls.clear()
    run_search(Objective(minimize="latency", as_tflite=True, bounds=Bounds(min_sqnr=1)), plan)
    assert calls[2] == ("meet_bounds", {("", "a"): 1.0})
    calls.clear()
    run_search(Objective(bounds=Bounds(min_sqnr=1)), plan_of_names(""))
    assert calls == [("choose_weight_bits",)]


def test_a_rejected_plan_is_built_again(stages):
    """The model of a plan that is no faster than float is replaced by that of the plan in float."""
    _, note = stages
    note("confirm_gain", lambda trace: replace(trace, plan=plan_of_names("")))
    _, trace, built = run_search(Objective(minimize="latency"))
    assert [len(plan.sites) for plan in built] == [4, 0]
    assert trace.plan.sites == ()


# -- sensitivities ------------------------------------------------------------------------------


def test_sensitivities_of_ops(stages, monkeypatch):
    """Each op that quantizes a tensor gets the error of all, and tensors without an error have none."""
    plan = plan_of_names("abc")
    pairs = [
        SimpleNamespace(site=site, outputs=outputs)
        for site, outputs in zip(plan.sites, (("qa", "qa2"), ("qb",), ("qc",)), strict=True)
    ]
    monkeypatch.setattr(search, "quantizing_op", lambda model, output: ("", output))
    _, note = stages
    note("meet_bounds", lambda trace: (replace(trace, site_errors={0: 1e-2, 1: 1e-1}), None))
    _, trace, _ = run_search(Objective(bounds=Bounds(min_sqnr=1)), plan, pairs)
    sensitivities = [trace.sensitivity.sqnr("", op) for op in ("qa", "qa2", "qb", "qc")]
    assert sensitivities == [pytest.approx(20), pytest.approx(20), pytest.approx(10), None]
    note("meet_bounds", lambda trace: (replace(trace, plans=2), None))
    assert run_search(Objective(bounds=Bounds(min_sqnr=1)), plan, pairs)[1].sensitivity is None
