"""Outputs built again, elsewhere and without the cache, and held against what there is."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant.batch.ingredients import file_digest
from graphquant.batch.statements import stated, statement_path
from graphquant.batch.types import Change
from graphquant.data.files import remote
from graphquant.errors import GraphQuantError
from graphquant.formats.parts import files_of
from graphquant.view.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from graphquant.batch.types import Entry, Gates, Outcome, Report


def verified(
    entries: Sequence[Entry], build: Callable[[Sequence[Entry], Path], Report], last: Report | None = None
) -> Report:
    """The report of building every entry again in a temporary folder; what differs from what there is fails it.

    What there is: the output's files, its statement where it has one, and the report of an earlier batch where one is
    given.

    Args:
        entries: The models, with their outputs where they should be.
        build: Makes the report of a batch, given its entries and a folder for all that it wants to keep.
        last: The report.
    """
    with tempfile.TemporaryDirectory(prefix="graphquant-") as room:
        moved = [
            replace(entry, output=str(Path(room, str(place), Path(entry.output).name)), gates=_bounds(entry))
            for place, entry in enumerate(entries)
        ]
        report = build(moved, Path(room))
    before = {} if last is None else {one.name: one for one in last.outcomes}
    outcomes, changes = [], []
    for entry, outcome in zip(entries, report.outcomes, strict=True):
        status = "done" if outcome.status == "gate" else outcome.status
        outcomes.append(replace(outcome, output=entry.output, status=status, misses=()))
        if outcome.products:
            told = _differences(entry, outcome, before.get(entry.name))
            changes += [Change(name=entry.name, what="digest", level="error", says=says) for says in told]
    return replace(report, outcomes=tuple(outcomes), changes=tuple(changes))


def _bounds(entry: Entry) -> Gates:
    """What an output is searched for by; whether it has that is not asked again."""
    return replace(entry.gates, max_size=None, check=None)


def _differences(entry: Entry, built: Outcome, before: Outcome | None) -> Iterator[str]:
    """What does not agree with the output that was built again, a sentence for each."""
    if remote(entry.output):
        yield "the output is elsewhere, where its files cannot be digested"
        return
    wrong = _unlike(built.products, _there(Path(entry.output), built))
    if wrong:
        yield f"the output is not what is built now: {wrong}"
    path = statement_path(entry.output)
    if path.exists():
        try:
            wrong = _unlike(built.products, stated(path))
        except GraphQuantError as error:
            wrong = str(error).rstrip(".")
        if wrong:
            yield f"the statement is not of what is built now: {wrong}"
    if before is not None and before.products:
        wrong = _unlike(built.products, before.products)
        if wrong:
            yield f"the report is not of what is built now: {wrong}{_causes(before, built)}"


def _there(output: Path, built: Outcome) -> dict[str, str | None]:
    """The digests of the output's files, more or fewer than were built; None for one that is missing."""
    try:
        names = {file.relative_to(output.parent).as_posix() for file in files_of(output)}
    except (GraphQuantError, OSError):  # no model any more, which the files' digests tell
        names = set()
    return {name: _digest(output.parent / name) for name in {*names, *built.products}}


def _unlike(built: Mapping[str, str], there: Mapping[str, str | None]) -> str:
    """Which files are not the same, "" if all are."""
    names = [name for name in sorted({*built, *there}) if built.get(name) != there.get(name)]
    return listed([f"{name}{_why(name, built, there)}" for name in names])


def _why(name: str, built: Mapping[str, str], there: Mapping[str, str | None]) -> str:
    if name not in built:
        return " is no part of it"
    return "" if there.get(name) else " is missing"


def _causes(before: Outcome, built: Outcome) -> str:
    """What else differs, which may be why."""
    parts = ("model", "rules", "data")
    differ = [f"the {part}" for part in parts if getattr(before.digests, part) != getattr(built.digests, part)]
    for package in sorted({*before.versions, *built.versions}):
        was, now = before.versions.get(package, "none"), built.versions.get(package, "none")
        if was != now:
            differ.append(f"{package} ({was}, now {now})")
    return f"; so do {', '.join(differ)}" if differ else ""


def _digest(path: Path) -> str | None:
    try:
        return file_digest(path)
    except OSError:
        return None
