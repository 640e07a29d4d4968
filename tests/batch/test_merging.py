"""Reports of shards as one report."""

from dataclasses import replace
from pathlib import Path

import pytest

from graphquant.batch.shards import merge_reports
from graphquant.batch.types import BatchReport, Outcome, OutcomeChange, batch_report_json
from graphquant.errors import UsageError


def _outcome(name, status="done"):
    return Outcome(name=name, model=f"{name}.onnx", output=f"{name}.quant.onnx", status=status, seconds=1.0)


NAMES = "abcde"


def _shards(number, skipped):
    """The reports of so many shards: each has its own entries, and those of others as skipped, or not at all."""
    made = {}
    for shard in range(number):
        outcomes = [
            _outcome(name, "done" if place % number == shard else "skipped")
            for place, name in enumerate(NAMES)
            if skipped or place % number == shard
        ]
        path = Path(f"{shard}.json")
        made[path] = BatchReport(
            version="1", outcomes=tuple(outcomes), shard=(shard + 1, number), started=50.0 - shard, seconds=5.0 + shard
        )
    return made


@pytest.mark.parametrize("skipped", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_shards_merge_to_the_full_report(number, skipped):
    """In the manifest's order, however the reports are given, with the time from the first start and the longest."""
    shards = _shards(number, skipped)
    whole = BatchReport(version="1", outcomes=tuple(map(_outcome, NAMES)))
    for reports in (shards, dict(reversed(shards.items()))):
        merged = merge_reports(reports)
        assert batch_report_json(merged, times=False) == batch_report_json(whole, times=False)
        assert (merged.started, merged.seconds) == (51.0 - number, 4.0 + number)


def test_skipped_models_stay_skipped():
    """An entry that was not begun anywhere is not begun."""
    shards = {
        path: replace(one, outcomes=tuple(replace(each, status="skipped") for each in one.outcomes))
        for path, one in _shards(2, skipped=True).items()
    }
    assert {one.status for one in merge_reports(shards).outcomes} == {"skipped"}


def test_merging_drops_changes():
    """What a shard said of an earlier report is no word on the whole."""
    change = OutcomeChange(name="a", kind="missing", level="error", message="missing")
    shards = {path: replace(one, changes=(change,)) for path, one in _shards(2, skipped=True).items()}
    assert merge_reports(shards).changes == ()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda one, two: (one,), "There is no report of shard 2/2"),
        (lambda one, two: (one, one), "both belong to shard 1"),
        (lambda one, two: (one, replace(two, version="2")), "is of graphquant 1 and"),
        (lambda one, two: (one, replace(two, shard=(2, 3))), "is one of 2 shards and"),
        (
            lambda one, two: (replace(one, deal_digest="a"), replace(two, deal_digest="b")),
            "have different models",
        ),
        (
            lambda one, two: (one, replace(two, outcomes=(replace(_outcome("a"), sites=3),))),
            "Two shards have different outcomes of a",
        ),
    ],
)
def test_incompatible_shards(spoil, says):
    """It is refused: a result of a part must not pass for one of all."""
    given = spoil(*_shards(2, skipped=True).values())
    with pytest.raises(UsageError, match=says):
        merge_reports({Path(f"{place}.json"): report for place, report in enumerate(given)})
