"""Merging the reports of shards."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.batch_reports import report_without_times

from graphquant.batch.reports import merge_reports
from graphquant.batch.types import BatchReport, Outcome, OutcomeChange
from graphquant.errors import UsageError


def _outcome(name, status="done"):
    return Outcome(name=name, model=f"{name}.onnx", output=f"{name}.quant.onnx", status=status, seconds=1.0)


NAMES = "abcde"


def _shards(number, skipped):
    """Return the reports of shards. Each has its own entries, and those of other shards as skipped or not at all."""
    reports = {}
    for shard in range(number):
        outcomes = [
            _outcome(name, "done" if index % number == shard else "skipped")
            for index, name in enumerate(NAMES)
            if skipped or index % number == shard
        ]
        path = Path(f"{shard}.json")
        reports[path] = BatchReport(
            version="1", outcomes=tuple(outcomes), shard=(shard + 1, number), started=50.0 - shard, seconds=5.0 + shard
        )
    return reports


@pytest.mark.parametrize("skipped", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_shards_merge_to_the_full_report(number, skipped):
    """The merged report is in the manifest's order, with the first start and the longest duration."""
    shards = _shards(number, skipped)
    full = BatchReport(version="1", outcomes=tuple(map(_outcome, NAMES)))
    for reports in (shards, dict(reversed(shards.items()))):
        merged = merge_reports(reports)
        assert report_without_times(merged) == report_without_times(full)
        assert (merged.started, merged.seconds) == (51.0 - number, 4.0 + number)


def test_skipped_models_stay_skipped():
    """An entry that every shard skipped is skipped in the merged report."""
    shards = {
        path: replace(report, outcomes=tuple(replace(outcome, status="skipped") for outcome in report.outcomes))
        for path, report in _shards(2, skipped=True).items()
    }
    assert {outcome.status for outcome in merge_reports(shards).outcomes} == {"skipped"}


def test_merging_drops_changes():
    """Changes of a shard are not part of the merged report."""
    change = OutcomeChange(name="a", kind="missing", level="error", message="missing")
    shards = {path: replace(report, changes=(change,)) for path, report in _shards(2, skipped=True).items()}
    assert merge_reports(shards).changes == ()


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda first, second: (first,), "no report .* 2/2"),
        (lambda first, second: (first, first), r"1\.json and 0\.json .* shard 1\b"),
        (lambda first, second: (first, replace(second, version="2")), r"graphquant 1 .* 2\b"),
        (lambda first, second: (first, replace(second, shard=(2, 3))), r"2 shards .* 3\b"),
        (
            lambda first, second: (replace(first, deal_digest="a"), replace(second, deal_digest="b")),
            "have different models",
        ),
        (
            lambda first, second: (first, replace(second, outcomes=(replace(_outcome("a"), sites=3),))),
            r"different outcomes .* a\b",
        ),
    ],
)
def test_incompatible_shards(alter, message):
    """Reports that are not of one complete batch cannot be merged."""
    reports = alter(*_shards(2, skipped=True).values())
    with pytest.raises(UsageError, match=message):
        merge_reports({Path(f"{index}.json"): report for index, report in enumerate(reports)})
