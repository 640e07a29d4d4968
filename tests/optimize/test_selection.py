"""Selections of candidates: small cases whose best selection follows from the errors and costs by hand."""

import numpy as np
import pytest

from graphquant.optimize import selection as module
from graphquant.optimize.candidates import FLOAT_CANDIDATE, FLOAT_GROUP_COST, RULE_CANDIDATE, Candidate, ScaleGroup
from graphquant.optimize.selection import (
    MAX_CLIMB_PLANS,
    MAX_CONSECUTIVE_MISSES,
    MAX_COST_RATIO,
    MAX_DROPPED_OPS,
    MAX_EXHAUSTIVE_OPS,
    MAX_REFINE_PLANS,
    PlanQuality,
    _greedy_high_ops,
    allocate_weight_bits,
    cheaper_selections,
    choose_selection,
    high_precision_ops,
    lighter_selection,
    search_cheapest_plan,
    selection_cost,
    settle_selection,
    total_error,
)


def key(name):
    """Return the key of an op of the main graph."""
    return "", name


def make_group(ops, error, *others, wide=None, is_float=True):
    """Return a group read by `ops`: the rules' candidate, others with these errors, 16 bits, and float."""
    candidates = [Candidate(name=RULE_CANDIDATE, error=error)]
    candidates += [Candidate(name=f"range {index}", error=other) for index, other in enumerate(others)]
    if wide is not None:
        candidates.append(Candidate(name="16 bits", error=wide, high_precision=True))
    if is_float:
        candidates.append(Candidate(name=FLOAT_CANDIDATE, error=0.0, high_precision=True))
    return ScaleGroup(sites=(0,), ops=frozenset(map(key, ops)), candidates=tuple(candidates))


def make_costs(**costs):
    """Return the costs of ops of the main graph."""
    return {key(name): cost for name, cost in costs.items()}


def single_op_groups(count, error=1e-3):
    """Return groups of one op each, with equal errors, and equal costs."""
    names = [f"op{index:02}" for index in range(count)]
    return [make_group([name], error) for name in names], {key(name): 1.0 for name in names}


def test_groups_without_ops_cost_a_little():
    """A float group that no weighted op reads costs a millionth of all costs, or of 1."""
    groups = [make_group([], 1e-3), make_group(["a"], 1e-3), make_group(["b"], 1e-9)]
    for b, a, expected in (
        (100.0, 0.9e-4, (0, 1, 0)),
        (100.0, 1.1e-4, (1, 0, 0)),
        (0.1, 0.9e-6, (0, 1, 0)),
        (0.1, 1.1e-6, (1, 0, 0)),
    ):
        assert choose_selection(groups, make_costs(a=a, b=b), 1.5e-3) == expected
    assert choose_selection(groups, make_costs(a=1.0, b=1.0), 1e-5) == (1, 1, 0)
    groups = [make_group([], 1e-3), make_group([], 1e-3), make_group(["a"], 2e-3)]
    assert choose_selection(groups, make_costs(a=1.5 * FLOAT_GROUP_COST), 2.2e-3) == (0, 0, 1)
    assert choose_selection(groups, make_costs(a=2.5 * FLOAT_GROUP_COST), 2.2e-3) == (1, 1, 0)
    assert choose_selection(groups, make_costs(a=1.0, b=1.0), 1.0) == (0, 0, 0)


def test_ranges_cost_nothing():
    """Only float groups have a cost: another range is chosen before an op that costs nearly nothing becomes float."""
    groups = [make_group([], 1e-3, 1e-4), make_group(["a"], 1e-3)]
    assert choose_selection(groups, make_costs(a=1e-12), 1.2e-3) == (0, 1)
    assert choose_selection([make_group(["b"], 1e-3, 1e-4), groups[1]], make_costs(a=1e-12, b=1.0), 1.2e-3) == (1, 0)


def test_sums_are_met_within_their_rounding():
    """A sum of errors may exceed the maximum by a billionth of it, which rounding explains, and may be equal to it."""
    ops = ["a"]
    for excess, expected in ((0.8e-9, (0,)), (1.2e-9, (1,))):
        assert choose_selection([make_group(ops, 1 + excess)], make_costs(a=1.0), 1.0) == expected
    assert choose_selection([make_group(ops, 0.0)], make_costs(a=1.0), 0.0) == (0,)
    assert settle_selection([make_group([], 1e-3, 1e-4)], frozenset(), 1e-3) == (0,)


def test_equal_ops_are_chosen_by_name():
    """Of selections of equal cost the first one in the order of names is chosen, which no hash decides."""
    groups, costs = single_op_groups(8)
    assert choose_selection(groups, costs, 7.5e-3) == (1, 0, 0, 0, 0, 0, 0, 0)
    assert choose_selection(groups[::-1], costs, 6.5e-3) == (0, 0, 0, 0, 0, 0, 1, 1)
    full = frozenset(costs)
    assert cheaper_selections(groups, costs, full, 1 / 8) == [
        *(tuple(int(index == chosen) for index in range(8)) for chosen in range(8)),
        (0,) * 8,
    ]


def test_cheap_pairs_are_found_behind_a_dear_op():
    """Two ops that cost 1 each are better than one that costs 10, in any order of their names."""
    for names in ("abc", "cab", "bca"):
        dear, *cheap = names
        groups = [make_group([dear], 1e-3), *(make_group([*entry, dear], 1e-3) for entry in cheap)]
        groups = [make_group([dear, *cheap], 1e-3)]
        costs = make_costs(**{dear: 10.0, cheap[0]: 1.0, cheap[1]: 1.0})
        assert choose_selection(groups, costs, 1e-4) == (1,)
        groups = [make_group([dear], 2e-3), *(make_group([entry], 1e-3) for entry in cheap)]
        assert choose_selection(groups, costs, 2.5e-3) == (0, 1, 1)


def test_many_ops_are_not_tried_in_all_subsets(monkeypatch):
    """All subsets of up to twelve ops are tried. With more ops, those chosen greedily are."""
    tried = []

    def greedy(*_):
        tried.append(True)
        return frozenset([key("op00")])

    monkeypatch.setattr(module, "_greedy_high_ops", greedy)
    for count, times in ((MAX_EXHAUSTIVE_OPS, 0), (MAX_EXHAUSTIVE_OPS + 1, 1)):
        groups, costs = single_op_groups(count)
        assert choose_selection(groups, costs, 1e-3 * count - 5e-4) == (1, *(0,) * (count - 1))
        assert len(tried) == times
    assert (MAX_EXHAUSTIVE_OPS, MAX_DROPPED_OPS) == (12, 32)


def test_cheaper_selections_by_error():
    """Few ops: each set that costs at most the ratio, and at most as much at a ratio of 1, the least error first."""
    groups = [make_group(["a"], 3e-3), make_group(["b"], 2e-3), make_group(["c"], 4e-3)]
    costs = make_costs(a=1.0, b=1.0, c=2.0)
    a, b, c, ab, none = (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 0, 0)
    ops = frozenset(map(key, "ab"))
    assert cheaper_selections(groups, costs, ops, 1.0) == [ab, c, a, b, none]
    assert cheaper_selections(groups, costs, ops, 0.98) == [a, b, none]
    assert cheaper_selections(groups, costs, frozenset(costs), 1.0)[0] == (1, 1, 1)
    assert cheaper_selections(groups[:1], costs, frozenset([key("a")]), 0.5) == [(0,)]


def test_cheaper_selections_without_one_op():
    """Many ops: each of the dearest runs in integers again, by its error for its cost, and of equal ones the first."""
    groups, costs = single_op_groups(40)
    groups[3] = make_group(["op03"], 5e-4)
    costs[key("op39")] = 3.0
    every = frozenset(costs)
    selections = cheaper_selections(groups, costs, every, 0.98)
    dropped = [selection.index(0) for selection in selections]
    assert [sum(selection) for selection in selections] == [39] * MAX_DROPPED_OPS
    assert dropped == [39, 3, *(index for index in range(MAX_DROPPED_OPS - 1) if index != 3)]
    groups, costs = single_op_groups(MAX_EXHAUSTIVE_OPS)
    assert len(cheaper_selections(groups, costs, frozenset(costs), 2 / 12)) == 1 + 12 + 66


def test_settled_selections():
    """High precision where all ops have it, other ranges in the order of their gain, and nothing without a gain."""
    ops = frozenset([key("a")])
    assert settle_selection([make_group([], 1e-3), make_group(["a", "b"], 1e-3)], ops, 1.0) == (0, 0)
    assert settle_selection([make_group(["a"], 1e-3, is_float=False)], ops, 1.0) == (0,)
    # 16 bits until only float is exact enough.
    wide = make_group(["a"], 1e-3, wide=1e-5)
    assert [settle_selection([wide], ops, most) for most in (1e-4, 1e-6)] == [(1,), (2,)]
    # Float that gains nothing stays float, though the rules' candidate has no error either.
    exact, poor = make_group(["a"], 0.0), make_group([], 1e-2, is_float=False)
    assert settle_selection([exact, poor], ops, 1e-6) == (1, 0)
    # A group that an op in integers reads takes the range of least error, and no float.
    assert settle_selection([make_group(["b"], 1e-3, 5e-4, 1e-4)], ops, 1e-6) == (2,)
    groups = [make_group([], 3e-3, 2e-3, is_float=False), make_group([], 3e-3, 1e-3, is_float=False)]
    assert [settle_selection(groups, ops, most) for most in (6e-3, 5e-3, 4e-3, 3e-3)] == [
        (0, 0),
        (0, 1),
        (0, 1),
        (1, 1),
    ]


def test_costs_of_selections():
    """The ops of groups in high precision have their cost, once each."""
    groups = [make_group(["a"], 1e-3, 5e-4), make_group(["a", "b"], 1e-4)]
    costs = make_costs(a=2.0, b=3.0)
    assert [high_precision_ops(groups, chosen) for chosen in ((0, 0), (1, 0), (2, 0), (2, 1))] == [
        frozenset(),
        frozenset(),
        {key("a")},
        {key("a"), key("b")},
    ]
    assert [selection_cost(groups, chosen, costs) for chosen in ((0, 0), (1, 0), (2, 0), (2, 1))] == [0, 0, 2, 5]
    assert total_error(groups, (1, 0)) == pytest.approx(6e-4)


def test_lighter_selections():
    """Groups with at most 5% of the sum of errors get the rules' candidate again."""
    groups = [
        make_group([], 8.0, 4.0, is_float=False),
        make_group([], 0.2, 0.0, is_float=False),
        make_group([], 0.21, 0.0, is_float=False),
        make_group(["a"], 0.19, 0.0, is_float=False),
    ]
    assert lighter_selection(groups, (1, 1, 1, 1)) == (1, 0, 1, 0)
    assert lighter_selection(groups, (1, 0, 0, 0)) == (1, 0, 0, 0)


def test_greedy_ops():
    """The largest error reduction per cost comes first; then the dearest ops that are not needed are returned."""
    assert _greedy_high_ops([make_group(["a"], 1e-3)], make_costs(a=1.0), 1e-3) == frozenset()
    # Groups that no op reads can be float at no cost, so their error does not count.
    groups = [make_group([], 1e-3), make_group(["b"], 1.1e-3)]
    assert _greedy_high_ops(groups, make_costs(b=1e-9), 1.15e-3) == frozenset()
    # a gains more for each multiply-add, b more in total.
    groups = [make_group(["a"], 1e-3), make_group(["b"], 2e-3)]
    assert _greedy_high_ops(groups, make_costs(a=1.0, b=3.0), 2e-3) == {key("a")}
    assert _greedy_high_ops(groups, make_costs(a=1.0, b=1.5), 2e-3) == {key("b")}
    assert _greedy_high_ops(groups, make_costs(a=1.0, b=3.0), 1.5e-3) == {key("b")}  # a is returned, as b is enough
    # Only the reduction that high precision brings counts.
    groups = [make_group(["a"], 2e-3, 1.9e-3, wide=1e-3, is_float=False), make_group(["b"], 1.5e-3)]
    assert _greedy_high_ops(groups, make_costs(a=1.0, b=1.0), 2.5e-3) == {key("b")}
    # The groups of one op become float at once. Another op reads the third group, which stays.
    groups = [make_group(["a"], 1e-3), make_group(["a"], 1e-3), make_group(["a", "b"], 1e-3), make_group(["c"], 2.5e-3)]
    assert _greedy_high_ops(groups, make_costs(a=1.5, b=3.0, c=2.0), 3.6e-3) == {key("a")}
    assert _greedy_high_ops(groups, make_costs(a=1.5, b=3.0, c=1.0), 3.6e-3) == {key("c")}


def test_greedy_ops_that_do_not_help():
    """Ops whose groups gain nothing stay in integers, even if the error cannot be met."""
    groups = [make_group(["a"], 1e-2, is_float=False), make_group(["b"], 1e-3), make_group(["c"], 0.0)]
    assert _greedy_high_ops(groups, make_costs(a=1.0, b=1.0, c=1.0), 1e-6) == {key("b")}


def test_greedy_ops_are_returned():
    """Of ops that are not needed, the most expensive ones are returned, and of equal ones the first by name."""
    # Cheap ops gain most for their cost and are chosen first. The last one makes some of them unnecessary.
    groups = [make_group([name], 1) for name in "abcd"] + [make_group(["e"], 10)]
    costs = make_costs(a=1.0, b=1.0, c=2.0 - 1e-9, d=1.0, e=20.0)
    assert _greedy_high_ops(groups, costs, 3) == {key("e"), key("d")}
    assert _greedy_high_ops(groups, costs, 4) == {key("e")}
    assert _greedy_high_ops(groups, costs, 2.5) == {key("e"), key("d"), key("b")}
    # Two ops of one group: its error counts once if both are returned.
    groups = [make_group(["a", "b"], 1), make_group(["e"], 10)]
    assert _greedy_high_ops(groups, make_costs(a=1.0, b=1.0, e=21.0), 1.5) == {key("e")}


@pytest.fixture(autouse=True)
def _many_plans(monkeypatch):
    """Allow many plans, so that other limits end a search."""
    monkeypatch.setattr(module, "MAX_MEASUREMENTS", 24)


def scripted_search(groups, costs, met, *, target_sqnr=None, sqnr=20.0):
    """Search with plans that meet the bound if `met` says so. Return the result and the measured selections."""
    measured, reported = [], []

    def measure(selection):
        measured.append(selection)
        return PlanQuality(met=met(selection), sqnr=sqnr(selection) if callable(sqnr) else sqnr)

    result = search_cheapest_plan(
        groups, costs, measure, target_sqnr=target_sqnr, progress=lambda *numbers: reported.append(numbers)
    )
    assert reported == [(index + 1, module.MAX_MEASUREMENTS) for index in range(len(measured))]
    assert len(set(measured)) == len(measured) == result.plans
    assert result.stop_reason is None
    return result, measured


def test_rules_that_meet_the_bound_are_not_searched():
    """The plan of the rules is the only one measured if it meets the bound."""
    groups, costs = single_op_groups(3)
    result, measured = scripted_search(groups, costs, lambda _: True)
    assert measured == [(0, 0, 0)]
    assert (result.selection, result.cost, result.quality) == ((0, 0, 0), 0.0, PlanQuality(met=True, sqnr=20.0))
    assert scripted_search([], {}, lambda _: False)[0].cost == 0.0


@pytest.mark.slow
def test_everything_in_float_is_the_last_resort():
    """Groups in steps of 3.3 dB are tried up to the aim, eight times, and then everything in float."""
    groups = [make_group([f"op{index:02}"], 10 ** (-index / 2)) for index in range(MAX_EXHAUSTIVE_OPS)]
    costs = {op: 1.0 for group in groups for op in group.ops}
    _, measured = scripted_search(groups, costs, lambda _: False, sqnr=lambda chosen: 20.0 + sum(chosen))
    assert len(measured) == 1 + 6 + 1  # two of the eight aims have a selection that was measured already
    assert measured[-1] == (1,) * len(groups)
    result, measured = scripted_search(groups, costs, lambda chosen: sum(chosen) == len(groups))
    assert result.quality.met
    assert result.cost == 1.0


def test_aims_climb_by_the_distance_to_the_bound():
    """With a bound on the SQNR the next aim is as much higher as the plan is below the bound, plus 0.3 dB."""
    groups = [make_group([], 10.0**-index) for index in range(8)]
    for sqnr, counts in (
        (20.0, [0, 2, 3, 4, 5, 6, 7, 8]),
        (0.0, [0, 4, 7, 8]),
        (9.9, [0, 3, 5, 7, 8]),
        (-np.inf, [0, 1, 2, 3, 8]),  # in steps of 3.3 dB, because the distance is unknown
        (40.0, [0, 1, 8]),  # in steps of 0.3 dB, because another bound is missed
    ):
        _, measured = scripted_search(groups, {}, lambda _: False, target_sqnr=30.0, sqnr=sqnr)
        assert [sum(chosen) for chosen in measured] == counts


TRAJECTORIES = {
    (1, 36.0): "000000000 121201121 121210021 121010021 121201021",
    (1, None): """
    000000000 021010011 120000020 121200021 121210021 121200121 121010021 121201121 121201021 021211111 021211011
    021202111 021201111 021202011
    """,
    (2, 36.0): """
    000000000 121202121 121212121 121012121 120211020 021212111 120201020 010212111 021202111 020211010
    """,
}
"""Measured selections by seed and bound in dB, one digit for each group."""


@pytest.mark.parametrize(("seed", "target"), TRAJECTORIES)
def test_trajectories(seed, target):
    """Searches whose estimated errors are wrong by a factor of two measure these plans, in this order."""
    rng = np.random.default_rng(seed)
    names, groups = [f"op{index}" for index in range(6)], []
    for index in range(9):
        some = rng.choice(names, size=rng.integers(0, 3), replace=False)
        error = float(10 ** rng.uniform(-5, -3))
        others = [error * rng.uniform(0.3, 0.9)] if index % 2 else []
        groups.append(make_group(some, error, *others))
    costs = {key(name): float(rng.integers(1, 100)) for name in names}
    factors = rng.lognormal(0, 0.7, size=9)

    def sqnr(selection):
        errors = (group.candidates[chosen].error for group, chosen in zip(groups, selection, strict=True))
        return -10 * np.log10(factors @ [*errors] + 1e-12)

    result, measured = scripted_search(groups, costs, lambda chosen: sqnr(chosen) >= 36, target_sqnr=target, sqnr=sqnr)
    assert ["".join(map(str, chosen)) for chosen in measured] == TRAJECTORIES[seed, target].split()
    meeting = [chosen for chosen in measured if sqnr(chosen) >= 36]
    assert result.selection == min(meeting, key=lambda chosen: selection_cost(groups, chosen, costs))
    assert result.cost == pytest.approx(selection_cost(groups, result.selection, costs) / sum(costs.values()))


def test_predictions_are_corrected_by_measurements():
    """The cheapest plan that is predicted to meet the bound is measured, and its difference corrects the predictions.

    The estimates are 10 dB too good, and the predictions 2 dB, so that four plans are enough.
    """
    groups = [make_group([f"op{index:02}"], 10 ** (-index / 10)) for index in range(40)]
    costs = {op: 1.0 for group in groups for op in group.ops}
    measured, predicted = [], []

    def sqnr(selection, shift):
        return -10 * np.log10(total_error(groups, selection) + 1e-12) - shift

    def measure(selection):
        measured.append(selection)
        value = sqnr(selection, 10.0 if any(selection) else 0.0)
        return PlanQuality(met=value >= 0.0, sqnr=value)

    def predict(selection):
        predicted.append(selection)
        return sqnr(selection, 8.0)

    result = search_cheapest_plan(groups, costs, measure, target_sqnr=0.0, predict=predict)
    cheapest = min(count for count in range(40) if sqnr([1] * count + [0] * (40 - count), 10.0) >= 0)
    assert (result.quality.met, sum(result.selection)) == (True, cheapest)
    assert len(measured) <= 10 < len(predicted)
    assert sum(selection_cost(groups, chosen, costs) <= cheapest + 2 for chosen in measured[1:]) == len(measured) - 1


def test_cheaper_plans_that_are_predicted_to_miss_are_not_measured():
    """A cheaper plan whose predicted difference from the best plan is 1 dB too much takes no measurement."""
    groups, costs = single_op_groups(30)
    for error, tried in ((0.9, True), (1.1, False)):
        measured = []

        def measure(selection, measured=measured):
            measured.append(selection)
            return PlanQuality(met=sum(selection) >= 20, sqnr=30.0 if sum(selection) >= 20 else 20.0)

        def predict(selection, error=error):
            return 30.0 if sum(selection) >= 20 else 30.0 - error

        search_cheapest_plan(groups, costs, measure, target_sqnr=30.0, predict=predict)
        assert any(0 < sum(selection) < 20 for selection in measured) == tried


def test_an_expensive_op_is_replaced_by_cheaper_ones():
    """An expensive float op returns to integers if its error was overestimated, and cheaper ops become float."""
    names = [f"op{index:02}" for index in range(20)]
    groups = [make_group(["dear"], 1.0), *(make_group([name], 0.045) for name in names)]
    costs = {key("dear"): 20.0, **{key(name): 1.0 for name in names}}

    def sqnr(selection):
        return -10 * np.log10(0.3 * (not selection[0]) + 0.045 * selection[1:].count(0))

    def measure(selection):
        return PlanQuality(met=sqnr(selection) >= 0.45, sqnr=sqnr(selection))

    result = search_cheapest_plan(groups, costs, measure, target_sqnr=0.45, predict=sqnr)
    assert (result.quality.met, result.selection[0]) == (True, 0)
    assert selection_cost(groups, result.selection, costs) < 12.0


def test_unpredictable_plans_are_not_searched_further():
    """Predictions without a finite value end the corrections; the plan of the rules stays the best."""
    groups, costs = single_op_groups(3)
    for value in (np.inf, np.nan):
        result = search_cheapest_plan(
            groups, costs, lambda _: PlanQuality(met=False, sqnr=1.0), target_sqnr=9.0, predict=lambda _, v=value: v
        )
        assert (result.selection, result.plans) == ((0, 0, 0), 1)


def test_an_interrupted_prediction_keeps_the_best_plan():
    """Ctrl-C in a prediction ends the search."""
    groups, costs = single_op_groups(3)
    calls = []

    def predict(selection):
        calls.append(selection)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return 5.0 + sum(selection)

    result = search_cheapest_plan(
        groups, costs, lambda _: PlanQuality(met=False, sqnr=1.0), target_sqnr=9.0, predict=predict
    )
    assert (result.selection, result.stop_reason, len(calls)) == ((0, 0, 0), "interrupt", 3)


def test_bisection_of_the_aim():
    """The interval between the last aim that misses and the first that meets is halved three times, down to 0.3 dB."""
    groups = [make_group([f"op{index:02}"], 10 ** (-index / 10)) for index in range(40)]
    costs = {op: 1.0 for group in groups for op in group.ops}
    for needed, counts in (
        (5, [0, 11, 6, 3, 4, 5, *[4] * 4]),
        (9, [0, 11, 6, 8, 10, 9, *[8] * 6]),
        (13, [0, 11, 21, 16, 13, 12, *[12] * 6]),
    ):
        _, measured = scripted_search(
            groups,
            costs,
            lambda chosen, needed=needed: sum(chosen) >= needed,
            target_sqnr=30.0,
            sqnr=lambda chosen, needed=needed: 34.0 if sum(chosen) >= needed else 20.0,
        )
        assert [sum(chosen) for chosen in measured] == counts


def test_aims_that_differ_little_are_not_bisected():
    """Aims that differ by 0.3 dB have no aim between them that is worth a plan."""
    groups = [make_group([f"op{index:02}"], 1 / 32) for index in range(32)]
    costs = {op: 1.0 for group in groups for op in group.ops}
    _, measured = scripted_search(groups, costs, lambda chosen: sum(chosen) > 1, target_sqnr=30.0, sqnr=40.0)
    assert [[*np.flatnonzero(chosen)] for chosen in measured] == [[], [0, 1, 2], [1, 2], [2], [1]]


def test_cheaper_plans_end_after_six_misses():
    """Six cheaper plans in a row that miss end the search; one that meets starts a new row."""
    groups, costs = single_op_groups(10)
    full = (1,) * 10
    _, measured = scripted_search(groups, costs, lambda chosen: chosen == full)
    assert measured[4] == full
    assert [chosen.index(0) for chosen in measured[5:]] == [8, 7, 6, 5, 4, 3]
    _, measured = scripted_search(groups, costs, lambda chosen: chosen[0] == 1 and sum(chosen) > 4)
    assert ["".join(map(str, chosen)) for chosen in measured[1:5]] == [
        "1111110000",
        "1111000000",
        "1111100000",
        "1110100000",
    ]
    assert len(measured) == 1 + 3 + MAX_CONSECUTIVE_MISSES


def test_plans_are_limited(monkeypatch):
    """The search for cheaper plans ends once the maximum number of plans was measured."""
    groups, costs = single_op_groups(60)
    for limit, counts in (
        (24, [0, 32, 19, 11, 6, 5, *[4] * 5]),
        (7, [0, 32, 19, 11, 6, 5, 4]),
        (4, [0, 32, 19, 11, 6]),
    ):
        monkeypatch.setattr(module, "MAX_MEASUREMENTS", limit)
        measured = []

        def measure(selection, measured=measured):
            measured.append(sum(selection))
            return PlanQuality(met=sum(selection) > 4, sqnr=20.0)

        search_cheapest_plan(groups, costs, measure, target_sqnr=None)
        assert measured == counts


def test_near_misses():
    """A plan that misses the bound by less than 2 dB is tried again with its negligible errors back at the rules."""
    groups = [
        make_group(["a"], 1.0),
        make_group(["b"], 0.9),
        make_group(["c"], 0.01, 0.0),
        make_group(["b", "c"], 0.02),
    ]
    costs = make_costs(a=3.0, b=2.0, c=1.0)
    for miss, expected in (
        (0.0, "0000 0100 1121 1110 1010 1020 0121 0110 0010 0020"),  # the miss is one of another bound
        (1.9, "0000 0100 1100 1121 1110 1010 1000 1020 0121 0110 0010 0020"),
        (2.0, "0000 0100 1100 1110 1121 1010 1020 0121 0110 0010 0020"),
    ):
        _, measured = scripted_search(
            groups,
            costs,
            lambda chosen: sum(chosen) >= 4,
            target_sqnr=30.0,
            sqnr=lambda chosen, miss=miss: 31.0 if sum(chosen) >= 4 else 30.0 - miss,
        )
        assert ["".join(map(str, chosen)) for chosen in measured] == expected.split()


@pytest.mark.parametrize(
    ("sizes_and_errors", "chosen"),
    [
        # Each step is taken as soon as its bytes fit.
        ([(10, 9.0), (20, 4.0), (40, 0.0)], {19: 0, 20: 1, 39: 1, 40: 2}),
        # The second candidate is above the line between the others and is left out.
        ([(10, 9.0), (20, 8.0), (30, 0.0)], {20: 0, 29: 0, 30: 2}),
        # More bytes for a larger error or the same one are never worth it.
        ([(10, 1.0), (20, 5.0)], {100: 0}),
        ([(10, 1.0), (20, 1.0)], {100: 0}),
        # The smallest candidate comes first, and is chosen even if it does not fit.
        ([(20, 1.0), (10, 2.0)], {5: 1, 19: 1, 20: 0}),
    ],
)
def test_weight_bits_of_one_group(sizes_and_errors, chosen):
    """Steps along the convex hull of size and error, as far as the bytes allow."""
    candidates = tuple(Candidate(name=f"{size}", size=size, error=error) for size, error in sizes_and_errors)
    group = ScaleGroup(sites=(0,), ops=frozenset(), candidates=candidates)
    assert {size: allocate_weight_bits([group], size)[0] for size in chosen} == chosen


def test_weight_bits_of_several_groups():
    """The largest error reduction per byte comes first; a step that does not fit makes room for smaller ones."""
    groups = [
        ScaleGroup(
            sites=(0,),
            ops=frozenset(),
            candidates=(
                Candidate(name="small", size=10, error=error),
                Candidate(name="large", size=10 + extra, error=0.0),
            ),
        )
        for error, extra in ((8.0, 4), (30.0, 10), (2.0, 2))
    ]
    for size, chosen in ((30, (0, 0, 0)), (33, (0, 0, 1)), (36, (1, 0, 1)), (41, (0, 1, 0)), (44, (1, 1, 0))):
        assert allocate_weight_bits(groups, size) == chosen


def test_limits():
    """Limits of a search, of which the confidence of its bounds depends on the number of plans."""
    assert (MAX_CLIMB_PLANS, MAX_REFINE_PLANS, MAX_CONSECUTIVE_MISSES, MAX_COST_RATIO) == (8, 3, 6, 0.98)
