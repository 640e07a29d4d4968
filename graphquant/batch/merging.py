"""Reports of the shards of one batch, as one report."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant.batch.types import TIMES, Outcome, Report, outcome_json
from graphquant.errors import UsageError
from graphquant.view.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


def merged(reports: Mapping[Path, Report]) -> Report:
    """One report of all entries that the reports at these paths are of, as one machine would have made it.

    Raises:
        UsageError: They are of different batches or versions, one is there twice, or a shard is missing.
    """
    _check_shards(reports)
    of_shards = sorted(reports.values(), key=lambda report: report.shard)
    found: dict[str, list[Outcome]] = {}
    for name in _order([[one.name for one in report.outcomes] for report in of_shards]):
        found[name] = []
    for report in of_shards:
        for one in report.outcomes:
            found[one.name].append(one)
    return replace(
        of_shards[0],
        outcomes=tuple(_one(name, made) for name, made in found.items()),
        shard=(1, 1),
        dealt="",
        started=min(report.started for report in of_shards),
        seconds=max(report.seconds for report in of_shards),
        changes=(),
    )


def _check_shards(reports: Mapping[Path, Report]) -> None:
    versions = {report.version: path for path, report in reports.items()}
    if len(versions) > 1:
        (one, first), (other, second) = list(versions.items())[:2]
        raise UsageError(f"{first} is of graphquant {one} and {second} of {other}. Run all shards with one version.")
    totals = {report.shard[1]: path for path, report in reports.items()}
    if len(totals) > 1:
        (one_of, first), (other_of, second) = list(totals.items())[:2]
        raise UsageError(
            f"{first} is one of {one_of} shards and {second} one of {other_of}. Give the reports of one batch."
        )
    decks = {report.dealt: path for path, report in reports.items()}
    if len(decks) > 1:
        first, second = list(decks.values())[:2]
        raise UsageError(
            f"{first} and {second} are of machines that saw other models, or other sizes of them, so one may be in"
            " neither. Give all shards the same files."
        )
    of: dict[int, Path] = {}
    for path, report in reports.items():
        number = report.shard[0]
        if number in of:
            raise UsageError(f"{path} and {of[number]} are both of shard {number}. Give each shard's report once.")
        of[number] = path
    (total,) = totals
    missing = [f"{number}/{total}" for number in range(1, total + 1) if number not in of]
    if missing:
        raise UsageError(
            f"No report is of shard {listed(missing)}. Give the reports of all shards: what one of them would say is"
            " unknown."
        )


def _order(lists: Sequence[Sequence[str]]) -> Iterable[str]:
    """The names of all shards: in the manifest's order, where each report has it, else in their own."""
    named = {name for names in lists for name in names}
    return dict.fromkeys(lists[0]) if all(set(names) == named for names in lists) else sorted(named)


def _one(name: str, made: Sequence[Outcome]) -> Outcome:
    """What became of an entry in that shard which did it."""
    done = [one for one in made if one.status != "skipped"] or made[:1]
    if any(_lasting(one) != _lasting(done[0]) for one in done):
        raise UsageError(f"Two shards have different outcomes of {name}. Give the reports of one batch.")
    return done[0]


def _lasting(outcome: Outcome) -> dict[str, object]:
    """An outcome without what differs from run to run."""
    return {key: value for key, value in outcome_json(outcome).items() if key not in {*TIMES, "status"}}
