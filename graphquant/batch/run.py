"""The story of a batch: what is known already, what has to be done, and the report of both."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import graphquant
from graphquant.batch.cache import Cache
from graphquant.batch.elsewhere import exists, look
from graphquant.batch.ingredients import data_digest, digest_of, ingredients, program
from graphquant.batch.journal import Journal, journal_of
from graphquant.batch.litter import sweep
from graphquant.batch.memo import Memo
from graphquant.batch.types import Outcome, Report
from graphquant.batch.work import judged, unmade
from graphquant.data.files import remote
from graphquant.errors import GraphQuantError, UsageError
from graphquant.formats.parts import files_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from graphquant.batch.ingredients import Ingredients
    from graphquant.batch.types import Entry

    Execute = Callable[[Sequence[Entry]], Iterator[Outcome]]

MADE = ("done", "gate")
"""Statuses of entries that were worked on and have an output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a batch is run.

    Attributes:
        folder: Where the cache, the journals and the digests of files are kept.
        cache: Whether outputs are taken from the cache, and put there.
        resume: Whether outputs that an earlier run of the same batch finished count; failures never do.
        force: Whether outputs are replaced that no batch wrote.
        shard: Which part of the manifest the entries are of, of how many; the report tells it.
        dealt: By what the parts were made; likewise.
    """

    folder: Path
    cache: bool = True
    resume: bool = False
    force: bool = False
    shard: tuple[int, int] = (1, 1)
    dealt: str = ""


def run_batch(
    entries: Sequence[Entry],
    options: Options,
    execute: Execute,
    *,
    told: Callable[[Outcome], None] | None = None,
    warned: Callable[[str], None] | None = None,
) -> Report:
    """Does what is not done yet. Ctrl-C ends it with what is finished, and the rest skipped.

    Args:
        entries: The models; no two have one name or one output.
        options: How to.
        execute: Gives the outcomes of entries as they come, in any order; what does the work.
        told: Is told each outcome as soon as it is on the disk.
        warned: Is told what went wrong beside the models.

    Raises:
        UsageError: The batch is being run already, or the folder for the cache cannot be used.
    """
    started, begun = time.time(), time.monotonic()
    with Memo(options.folder / "files.sqlite") as memo:
        path = journal_of(options.folder, entries)
        with Journal(path, resume=options.resume) as journal:
            sweep(entry.output for entry in entries if not remote(entry.output))
            once = cache(warned or (lambda _said: None))
            batch = _Batch(entries, options, memo, journal, once)
            with closing(batch.outcomes(execute)) as outcomes, suppress(KeyboardInterrupt):
                for outcome in outcomes:
                    if told is not None:
                        told(outcome)
    found = {entry.name: batch.found.get(entry.name) or _skipped(entry) for entry in entries}
    return Report(
        version=graphquant.__version__,
        outcomes=tuple(found.values()),
        shard=options.shard,
        dealt=options.dealt,
        started=round(started, 3),
        seconds=round(time.monotonic() - begun, 3),
    )


def _skipped(entry: Entry) -> Outcome:
    return unmade(
        entry, "Skipped", "The batch was stopped before this model was done. Run it with --resume.", 130, "skipped"
    )


class _Batch:
    """A run of a batch.

    Attributes:
        found: What became of entries so far, by their name.
    """

    def __init__(
        self, entries: Sequence[Entry], options: Options, memo: Memo, journal: Journal, warned: Callable[[str], None]
    ) -> None:
        self._entries, self._options, self._memo, self._journal, self._warned = entries, options, memo, journal, warned
        self._cache = Cache(options.folder) if options.cache else None
        self._made: dict[str, Ingredients | None] = {}
        self._program, self._data = program(memo), cache(partial(data_digest, memo=memo))
        self.found: dict[str, Outcome] = {}

    def outcomes(self, execute: Execute) -> Generator[Outcome, None, None]:
        """Each outcome once it is in the journal: first what is known, then what comes of the work."""
        todo = []
        for entry in self._entries:
            made = self._made[entry.name] = self._ingredients(entry)
            outcome = self._finished(entry, made)
            if outcome is not None:
                self.found[entry.name] = outcome
                yield outcome
                continue
            outcome = self._cached(entry, made) or self._blocked(entry)
            if outcome is not None:
                yield self._enter(outcome)
            else:
                todo.append(entry)
        if todo:
            yield from self._worked(todo, execute)

    def _worked(self, todo: Sequence[Entry], execute: Execute) -> Generator[Outcome, None, None]:
        """The outcomes of what has to be done; the largest models are begun first, so that none is left for the end."""
        by_name = {entry.name: entry for entry in todo}
        before = {entry.name: self._memo.ours(entry.output) for entry in todo}
        for entry in todo:
            self._memo.own(entry.output)
        going = execute(sorted(todo, key=lambda entry: -self._size(entry)))
        try:
            for outcome in going:
                yield self._enter(self._taken_in(by_name[outcome.name], outcome))
        finally:
            if isinstance(going, Generator):
                going.close()  # nobody writes any more
            for entry in todo:
                if entry.name not in self.found or self.found[entry.name].status not in MADE:
                    self._give_back(entry, before[entry.name])
            self._forget_changed(todo)

    def _forget_changed(self, entries: Sequence[Entry]) -> None:
        """Takes out of the cache what was made with data that changed meanwhile: nobody knows with which."""
        changed = set()
        for spec in dict.fromkeys(entry.data for entry in entries if entry.data is not None):
            with suppress(GraphQuantError, OSError):
                if data_digest(spec, self._memo) == self._data(spec):
                    continue
            changed.add(spec)
        for entry in entries:
            made = self._made[entry.name]
            if self._cache is not None and made is not None and entry.data in changed:
                self._cache.forget(made.digests.key)

    def _give_back(self, entry: Entry, before: str | None) -> None:
        """What was not written is no more ours than it was: somebody else may put something there."""
        if not _there(entry.output):
            self._memo.own(entry.output, None)
        elif before and not remote(entry.output) and self._digest(Path(entry.output)) == before:
            self._memo.own(entry.output, before)

    def _enter(self, outcome: Outcome) -> Outcome:
        """Puts an outcome into the journal."""
        try:
            self._journal.add(outcome)
        except OSError as error:
            self._warned(
                f"What is finished cannot be kept in {self._options.folder}: {error.strerror}. --resume will not know"
                " of it."
            )
        self.found[outcome.name] = outcome
        return outcome

    def _taken_in(self, entry: Entry, outcome: Outcome) -> Outcome:
        """An outcome of the work, with the digests of what it was made of; its output goes to the cache."""
        made = self._made[entry.name]
        if made is None:
            return outcome
        digests = replace(
            made.digests, rules=outcome.digests.rules or made.digests.rules, output=outcome.digests.output
        )
        outcome = replace(outcome, digests=digests)
        if outcome.status not in MADE:
            return outcome
        self._memo.own(entry.output, _state(entry, outcome))
        if self._cache is not None and made.fixed and self._ingredients(entry) == made:  # nothing changed meanwhile
            try:
                self._cache.keep(outcome)
            except FileNotFoundError:  # the output went again meanwhile, which says nothing of the others
                self._cache.forget(made.digests.key)
            except OSError as error:
                self._warned(
                    f"The cache in {self._options.folder} takes no more: {error.strerror}. Prune it, or make room."
                )
                self._cache = None
        return outcome

    def _ingredients(self, entry: Entry) -> Ingredients | None:
        """What the output is made of; None where something cannot be read, which whoever does the work tells best."""
        try:
            return ingredients(entry, self._memo, self._program, self._data)
        except (GraphQuantError, OSError):
            return None

    def _size(self, entry: Entry) -> int:
        made = self._made[entry.name]
        return 0 if made is None else made.size

    def _finished(self, entry: Entry, made: Ingredients | None) -> Outcome | None:
        """What an earlier run of this batch made of the entry, if nothing has changed since; no failure of it."""
        outcome = self._journal.finished.get(entry.name)
        if outcome is None or not outcome.products or made is None or outcome.digests.key != made.digests.key:
            return None
        if not self._intact(entry, outcome):
            return None
        return judged(entry, outcome, "unchanged" if outcome.status == "unchanged" else "done")

    def _cached(self, entry: Entry, made: Ingredients | None) -> Outcome | None:
        """What any earlier run made of the same, with its output where it belongs."""
        if self._cache is None or made is None or not made.fixed:
            return None
        outcome, output = self._cache.outcome(made.digests.key), Path(entry.output)
        if outcome is None:
            return None
        if not self._intact(entry, outcome):
            if remote(entry.output) or self._blocked(entry) is not None:
                return None
            self._memo.own(entry.output)
            try:
                if not self._cache.restore(outcome, output):
                    return None
            except OSError:  # whoever does the work tells it
                return None
        self._memo.own(entry.output, _state(entry, outcome))
        return replace(judged(entry, outcome, "unchanged"), seconds=0.0)

    def _intact(self, entry: Entry, outcome: Outcome) -> bool:
        """Whether the output is there as it was made; elsewhere, whether it looks as it did then."""
        if remote(entry.output):
            return self._memo.ours(entry.output) == (_state(entry, outcome) or None)
        home = Path(entry.output).parent
        try:
            return all(self._memo.digest(home / name) == digest for name, digest in outcome.products.items())
        except OSError:
            return False

    def _blocked(self, entry: Entry) -> Outcome | None:
        """What is said where something stands at the output that no batch wrote, and --force is not given."""
        output = Path(entry.output)
        if self._options.force or not _there(entry.output):
            return None
        ours = self._memo.ours(entry.output)
        if ours is not None and (remote(entry.output) or ours in {"", self._digest(output)}):
            return None
        if ours is None and _source(entry.output) in {_digest_of(entry.model)} - {None}:
            return None
        said = (
            f"{entry.output} {_stranger(entry, known=ours is not None)} Give another output, or --force to replace it."
        )
        return unmade(entry, UsageError.__name__, said, UsageError.exit_code)

    def _digest(self, output: Path) -> str | None:
        """The digest of what is at an output, None if it is no model."""
        try:
            files = files_of(output)
            return digest_of((file.relative_to(output.parent).as_posix(), self._memo.digest(file)) for file in files)
        except (GraphQuantError, OSError):
            return None


def _there(output: str) -> bool:
    """Whether something is at an output; if nobody can tell, whoever writes it will."""
    if remote(output):
        try:
            return exists(output)
        except GraphQuantError:
            return False
    return os.path.lexists(output)


def _source(output: str) -> str | None:
    """The digest of the model that graphquant made an output of, as the output tells; None if it does not."""
    from graphquant import formats, pipeline

    if remote(output):
        return None
    try:
        model = pipeline.load(output)
        return formats.module(model.format).said(model).get("source")
    except (GraphQuantError, OSError):
        return None


def _digest_of(model: str) -> str | None:
    """The digest by which an output names this model, None if it cannot be had."""
    from graphquant import pipeline

    if remote(model):
        return None
    try:
        return pipeline.load(model).digest
    except (GraphQuantError, OSError):
        return None


def _stranger(entry: Entry, *, known: bool) -> str:
    """What is at an output that may not be replaced; `known` if a batch wrote to it before."""
    if known:
        return "was changed since a batch wrote it."
    if _source(entry.output) is None:
        return "exists already, and nothing tells that a batch made it."
    return (
        f"exists already. graphquant made it, but not of {entry.model} as it is now: of another model, or of this one"
        " before it changed, which the cache folder does not know any more."
    )


def _state(entry: Entry, outcome: Outcome) -> str:
    """What tells that an output is as it was made: its digest, or how it looks where it is elsewhere."""
    if not remote(entry.output):
        return outcome.digests.output
    try:
        return look(entry.output, outcome.products)
    except GraphQuantError:
        return ""


__all__ = ["Options", "run_batch"]
