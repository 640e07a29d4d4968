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
from graphquant.batch.cache import Journal, OutcomeCache, journal_path
from graphquant.batch.cache_key import FileHashes, cache_inputs, combined_digest, data_digest, program_digest
from graphquant.batch.remote import remote_exists, remote_fingerprint
from graphquant.batch.types import BatchReport, Outcome
from graphquant.batch.work import apply_gates, failed_outcome
from graphquant.batch.workers import remove_stale_files
from graphquant.calibration.data.files import is_remote
from graphquant.errors import GraphQuantError, UsageError
from graphquant.formats.model_files import model_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from graphquant.batch.cache_key import CacheInputs
    from graphquant.batch.types import Entry

    Execute = Callable[[Sequence[Entry]], Iterator[Outcome]]


OUTPUT_STATUSES = ("done", "gate")
"""Statuses of entries that were worked on and have an output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How a batch is run.

    Attributes:
        folder: Where the cache, the journals and the digests of files are kept.
        cache: Whether outputs are taken from the cache, and put there.
        resume: Whether outputs that an earlier run of the same batch finished count; failures never do.
        force: Whether outputs are replaced that no batch wrote.
        shard: Which part of the manifest the entries are of, of how many; the report tells it.
        deal_digest: By what the parts were made; likewise.
    """

    folder: Path
    cache: bool = True
    resume: bool = False
    force: bool = False
    shard: tuple[int, int] = (1, 1)
    deal_digest: str = ""


def run_batch(
    entries: Sequence[Entry],
    options: BatchOptions,
    execute: Execute,
    *,
    on_outcome: Callable[[Outcome], None] | None = None,
    on_warning: Callable[[str], None] | None = None,
) -> BatchReport:
    """Does what is not done yet. Ctrl-C ends it with what is finished, and the rest skipped.

    Args:
        entries: The models; no two have one name or one output.
        options: How to.
        execute: Gives the outcomes of entries as they come, in any order; what does the work.
        on_outcome: Is told each outcome as soon as it is on the disk.
        on_warning: Is told what went wrong beside the models.

    Raises:
        UsageError: The batch is being run already, or the folder for the cache cannot be used.
    """
    started, start = time.time(), time.monotonic()
    with FileHashes(options.folder / "files.sqlite") as memo:
        path = journal_path(options.folder, entries)
        with Journal(path, resume=options.resume) as journal:
            remove_stale_files(entry.output for entry in entries if not is_remote(entry.output))
            warn_once = cache(on_warning or (lambda _message: None))
            batch = _BatchRun(entries, options, memo, journal, warn_once)
            with closing(batch.outcomes(execute)) as outcomes, suppress(KeyboardInterrupt):
                for outcome in outcomes:
                    if on_outcome is not None:
                        on_outcome(outcome)
    outcome_by_name = {
        entry.name: batch.outcome_by_name.get(entry.name) or _skipped_outcome(entry) for entry in entries
    }
    return BatchReport(
        version=graphquant.__version__,
        outcomes=tuple(outcome_by_name.values()),
        shard=options.shard,
        deal_digest=options.deal_digest,
        started=round(started, 3),
        seconds=round(time.monotonic() - start, 3),
    )


def _skipped_outcome(entry: Entry) -> Outcome:
    return failed_outcome(
        entry, "Skipped", "The batch was stopped before this model was done. Run it with --resume.", 130, "skipped"
    )


class _BatchRun:
    """A run of a batch.

    Attributes:
        outcome_by_name: What became of entries so far, by their name.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        options: BatchOptions,
        file_hashes: FileHashes,
        journal: Journal,
        on_warning: Callable[[str], None],
    ) -> None:
        self._entries, self._options, self._file_hashes, self._journal, self._on_warning = (
            entries,
            options,
            file_hashes,
            journal,
            on_warning,
        )
        self._cache = OutcomeCache(options.folder) if options.cache else None
        self._inputs: dict[str, CacheInputs | None] = {}
        self._program_digest, self._data_digest = (
            program_digest(file_hashes),
            cache(partial(data_digest, file_hashes=file_hashes)),
        )
        self.outcome_by_name: dict[str, Outcome] = {}

    def outcomes(self, execute: Execute) -> Generator[Outcome, None, None]:
        """Each outcome once it is in the journal: first what is known, then what comes of the work."""
        pending = []
        for entry in self._entries:
            inputs = self._inputs[entry.name] = self._read_inputs(entry)
            outcome = self._finished_outcome(entry, inputs)
            if outcome is not None:
                self.outcome_by_name[entry.name] = outcome
                yield outcome
                continue
            outcome = self._cached_outcome(entry, inputs) or self._blocked_outcome(entry)
            if outcome is not None:
                yield self._record(outcome)
            else:
                pending.append(entry)
        if pending:
            yield from self._run_pending(pending, execute)

    def _run_pending(self, pending: Sequence[Entry], execute: Execute) -> Generator[Outcome, None, None]:
        """The outcomes of what has to be done; the largest models are begun first, so that none is left for the end."""
        by_name = {entry.name: entry for entry in pending}
        digest_before = {entry.name: self._file_hashes.output_digest(entry.output) for entry in pending}
        for entry in pending:
            self._file_hashes.claim_output(entry.output)
        running = execute(sorted(pending, key=lambda entry: -self._input_size(entry)))
        try:
            for outcome in running:
                yield self._record(self._complete_outcome(by_name[outcome.name], outcome))
        finally:
            if isinstance(running, Generator):
                running.close()  # nobody writes any more
            for entry in pending:
                if (
                    entry.name not in self.outcome_by_name
                    or self.outcome_by_name[entry.name].status not in OUTPUT_STATUSES
                ):
                    self._release_output(entry, digest_before[entry.name])
            self._drop_changed_data(pending)

    def _drop_changed_data(self, entries: Sequence[Entry]) -> None:
        """Takes out of the cache what was made with data that changed meanwhile: nobody knows with which."""
        changed = set()
        for spec in dict.fromkeys(entry.data for entry in entries if entry.data is not None):
            with suppress(GraphQuantError, OSError):
                if data_digest(spec, self._file_hashes) == self._data_digest(spec):
                    continue
            changed.add(spec)
        for entry in entries:
            inputs = self._inputs[entry.name]
            if self._cache is not None and inputs is not None and entry.data in changed:
                self._cache.remove(inputs.digests.key)

    def _release_output(self, entry: Entry, digest_before: str | None) -> None:
        """What was not written is no more ours than it was: somebody else may put something there."""
        if not _output_exists(entry.output):
            self._file_hashes.claim_output(entry.output, None)
        elif (
            digest_before and not is_remote(entry.output) and self._current_digest(Path(entry.output)) == digest_before
        ):
            self._file_hashes.claim_output(entry.output, digest_before)

    def _record(self, outcome: Outcome) -> Outcome:
        """Puts an outcome into the journal."""
        try:
            self._journal.add(outcome)
        except OSError as error:
            self._on_warning(
                f"What is finished cannot be kept in {self._options.folder}: {error.strerror}. --resume will not know"
                " of it."
            )
        self.outcome_by_name[outcome.name] = outcome
        return outcome

    def _complete_outcome(self, entry: Entry, outcome: Outcome) -> Outcome:
        """An outcome of the work, with the digests of what it was made of; its output goes to the cache."""
        inputs = self._inputs[entry.name]
        if inputs is None:
            return outcome
        digests = replace(
            inputs.digests, rules=outcome.digests.rules or inputs.digests.rules, output=outcome.digests.output
        )
        outcome = replace(outcome, digests=digests)
        if outcome.status not in OUTPUT_STATUSES:
            return outcome
        self._file_hashes.claim_output(entry.output, _output_state(entry, outcome))
        if (
            self._cache is not None and inputs.deterministic and self._read_inputs(entry) == inputs
        ):  # nothing changed meanwhile
            try:
                self._cache.store(outcome)
            except FileNotFoundError:  # the output went again meanwhile, which says nothing of the others
                self._cache.remove(inputs.digests.key)
            except OSError as error:
                self._on_warning(
                    f"The cache in {self._options.folder} takes no more: {error.strerror}. Prune it, or make room."
                )
                self._cache = None
        return outcome

    def _read_inputs(self, entry: Entry) -> CacheInputs | None:
        """What the output is made of; None where something cannot be read, which whoever does the work tells best."""
        try:
            return cache_inputs(entry, self._file_hashes, self._program_digest, self._data_digest)
        except (GraphQuantError, OSError):
            return None

    def _input_size(self, entry: Entry) -> int:
        inputs = self._inputs[entry.name]
        return 0 if inputs is None else inputs.model_size

    def _finished_outcome(self, entry: Entry, inputs: CacheInputs | None) -> Outcome | None:
        """What an earlier run of this batch made of the entry, if nothing has changed since; no failure of it."""
        outcome = self._journal.finished.get(entry.name)
        if outcome is None or not outcome.products or inputs is None or outcome.digests.key != inputs.digests.key:
            return None
        if not self._is_intact(entry, outcome):
            return None
        return apply_gates(entry, outcome, "unchanged" if outcome.status == "unchanged" else "done")

    def _cached_outcome(self, entry: Entry, inputs: CacheInputs | None) -> Outcome | None:
        """What any earlier run made of the same, with its output where it belongs."""
        if self._cache is None or inputs is None or not inputs.deterministic:
            return None
        outcome, output = self._cache.load_outcome(inputs.digests.key), Path(entry.output)
        if outcome is None:
            return None
        if not self._is_intact(entry, outcome):
            if is_remote(entry.output) or self._blocked_outcome(entry) is not None:
                return None
            self._file_hashes.claim_output(entry.output)
            try:
                if not self._cache.restore(outcome, output):
                    return None
            except OSError:  # whoever does the work tells it
                return None
        self._file_hashes.claim_output(entry.output, _output_state(entry, outcome))
        return replace(apply_gates(entry, outcome, "unchanged"), seconds=0.0)

    def _is_intact(self, entry: Entry, outcome: Outcome) -> bool:
        """Whether the output is there as it was made; elsewhere, whether it looks as it did then."""
        if is_remote(entry.output):
            return self._file_hashes.output_digest(entry.output) == (_output_state(entry, outcome) or None)
        folder = Path(entry.output).parent
        try:
            return all(self._file_hashes.digest(folder / name) == digest for name, digest in outcome.products.items())
        except OSError:
            return False

    def _blocked_outcome(self, entry: Entry) -> Outcome | None:
        """What is said where something stands at the output that no batch wrote, and --force is not given."""
        output = Path(entry.output)
        if self._options.force or not _output_exists(entry.output):
            return None
        claimed = self._file_hashes.output_digest(entry.output)
        if claimed is not None and (is_remote(entry.output) or claimed in {"", self._current_digest(output)}):
            return None
        if claimed is None and _recorded_source(entry.output) in {_recorded_digest(entry.model)} - {None}:
            return None
        message = f"{entry.output} {_refusal_reason(entry, was_claimed=claimed is not None)} Give another output, or --force to replace it."
        return failed_outcome(entry, UsageError.__name__, message, UsageError.exit_code)

    def _current_digest(self, output: Path) -> str | None:
        """The digest of what is at an output, None if it is no model."""
        try:
            files = model_files(output)
            return combined_digest(
                (file.relative_to(output.parent).as_posix(), self._file_hashes.digest(file)) for file in files
            )
        except (GraphQuantError, OSError):
            return None


def _output_exists(output: str) -> bool:
    """Whether something is at an output; if nobody can tell, whoever writes it will."""
    if is_remote(output):
        try:
            return remote_exists(output)
        except GraphQuantError:
            return False
    return os.path.lexists(output)


def _recorded_source(output: str) -> str | None:
    """The digest of the model that graphquant made an output of, as the output tells; None if it does not."""
    from graphquant import api, formats

    if is_remote(output):
        return None
    try:
        model = api.load(output)
        return formats.format_module(model.format).read_metadata(model).get("source")
    except (GraphQuantError, OSError):
        return None


def _recorded_digest(model: str) -> str | None:
    """The digest by which an output names this model, None if it cannot be had."""
    from graphquant import api

    if is_remote(model):
        return None
    try:
        return api.load(model).digest
    except (GraphQuantError, OSError):
        return None


def _refusal_reason(entry: Entry, *, was_claimed: bool) -> str:
    """What is at an output that may not be replaced; `was_claimed` if a batch wrote to it before."""
    if was_claimed:
        return "was changed since a batch wrote it."
    if _recorded_source(entry.output) is None:
        return "exists already, and nothing tells that a batch made it."
    return (
        f"exists already. graphquant made it, but not of {entry.model} as it is now: of another model, or of this one"
        " before it changed, which the cache folder does not know any more."
    )


def _output_state(entry: Entry, outcome: Outcome) -> str:
    """What tells that an output is as it was made: its digest, or how it looks where it is elsewhere."""
    if not is_remote(entry.output):
        return outcome.digests.output
    try:
        return remote_fingerprint(entry.output, outcome.products)
    except GraphQuantError:
        return ""
