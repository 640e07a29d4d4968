"""Sharding of a batch over machines that do not communicate, and the merge of their reports."""

from __future__ import annotations

import hashlib
import heapq
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant.batch.types import TIME_KEYS, BatchReport, Outcome, outcome_json
from graphquant.calibration.data.files import is_remote, list_data_files
from graphquant.errors import GraphQuantError, UsageError
from graphquant.formats.model_files import model_files
from graphquant.visualize.tables import join_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from graphquant.batch.types import Entry


def select_shard(entries: Sequence[Entry], shard: tuple[int, int]) -> list[Entry]:
    """Return the entries of one shard, in order. All shards together have each entry once.

    The largest models are dealt first, each to the shard with the fewest bytes so far. Machines with the same models
    deal the same way.

    Args:
        entries: All entries of the batch.
        shard: Number of the shard, from 1, and number of shards.

    Raises:
        UsageError: There is no such shard.
    """
    number, total = shard
    if not 1 <= number <= total:
        raise UsageError(f"There is no shard {number} of {total}. Shards are numbered from 1, as in --shard 1/{total}.")
    sizes = {entry.name: model_size(entry.model) for entry in entries}
    heap = [(0, shard_number) for shard_number in range(1, total + 1)]
    selected = set()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        bytes_assigned, shard_number = heapq.heappop(heap)
        heapq.heappush(heap, (bytes_assigned + sizes[name] + 1, shard_number))  # an empty file still counts as work
        if shard_number == number:
            selected.add(name)
    return [entry for entry in entries if entry.name in selected]


def deal_digest(entries: Sequence[Entry]) -> str:
    """Return a digest of names and sizes: machines with other models or sizes deal differently."""
    encoded = json.dumps(sorted((entry.name, model_size(entry.model)) for entry in entries))
    return hashlib.sha256(encoded.encode(errors="surrogatepass")).hexdigest()


def model_size(model: str) -> int:
    """Return the bytes of a model with all its files; 0 if unreadable, which the quantization then reports."""
    try:
        if is_remote(model):
            return sum(file.filesystem.size(file.name) or 0 for file in list_data_files(model)[0])
        return sum(file.stat().st_size for file in model_files(Path(model)))
    except (GraphQuantError, OSError):
        return 0


def merge_reports(reports: Mapping[Path, BatchReport]) -> BatchReport:
    """Merge the reports of all shards into the report that one machine would have made.

    Raises:
        UsageError: They belong to different batches or versions, or a shard is duplicate or missing.
    """
    _check_shards(reports)
    ordered = sorted(reports.values(), key=lambda report: report.shard)
    outcomes_by_name: dict[str, list[Outcome]] = {}
    for report in ordered:
        for outcome in report.outcomes:
            outcomes_by_name.setdefault(outcome.name, []).append(outcome)
    names: Iterable[str] = outcomes_by_name
    # The order of the manifest is known only if every report has all of its models.
    if any(len(report.outcomes) < len(outcomes_by_name) for report in ordered):
        names = sorted(outcomes_by_name)
    return replace(
        ordered[0],
        outcomes=tuple(_merge_outcomes(name, outcomes_by_name[name]) for name in names),
        shard=(1, 1),
        deal_digest="",
        started=min(report.started for report in ordered),
        seconds=max(report.seconds for report in ordered),
        changes=(),
    )


def _check_shards(reports: Mapping[Path, BatchReport]) -> None:
    versions = {report.version: path for path, report in reports.items()}
    if len(versions) > 1:
        (first_version, first), (second_version, second) = list(versions.items())[:2]
        raise UsageError(
            f"{first} is of graphquant {first_version} and {second} of {second_version}. Run all"
            " shards with one version."
        )
    totals = {report.shard[1]: path for path, report in reports.items()}
    if len(totals) > 1:
        (first_total, first), (second_total, second) = list(totals.items())[:2]
        raise UsageError(
            f"{first} is one of {first_total} shards and {second} one of {second_total}. Give the reports of one batch."
        )
    deal_digests = {report.deal_digest: path for path, report in reports.items()}
    if len(deal_digests) > 1:
        first, second = list(deal_digests.values())[:2]
        raise UsageError(
            f"{first} and {second} have different models or sizes, so a model may be in"
            " neither. Give all shards the same files."
        )
    path_by_number: dict[int, Path] = {}
    for path, report in reports.items():
        earlier = path_by_number.setdefault(report.shard[0], path)
        if earlier != path:
            raise UsageError(
                f"{path} and {earlier} both belong to shard {report.shard[0]}. Give each shard's report once."
            )
    (total,) = totals
    missing = [f"{number}/{total}" for number in range(1, total + 1) if number not in path_by_number]
    if missing:
        raise UsageError(
            f"There is no report of shard {join_names(missing)}. Give the reports of all shards; otherwise the result"
            " is unknown."
        )


def _merge_outcomes(name: str, outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of an entry from the shard that processed it."""
    finished = [outcome for outcome in outcomes if outcome.status != "skipped"] or outcomes[:1]
    ignored = {*TIME_KEYS, "status"}
    contents = [
        {key: value for key, value in outcome_json(outcome).items() if key not in ignored} for outcome in finished
    ]
    if any(content != contents[0] for content in contents):
        raise UsageError(f"Two shards have different outcomes of {name}. Give the reports of one batch.")
    return finished[0]
