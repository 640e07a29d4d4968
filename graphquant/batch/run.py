"""Run of a batch: reuse of finished and cached outputs, processing of the remaining entries, and the report.

Machines that do not communicate share a batch by shards: each deals the models in the same way and runs its own.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import graphquant
from graphquant.api.models import model_files
from graphquant.batch.cache import Journal, OutcomeCache, journal_path
from graphquant.batch.cache_key import (
    CacheInputs,
    FileHashes,
    cache_inputs,
    combined_digest,
    data_digest,
    program_digest,
)
from graphquant.batch.remote import remote_fingerprint
from graphquant.batch.types import BatchReport, Entry, Outcome
from graphquant.batch.work import apply_gates, failed_outcome
from graphquant.calibration.data.files import is_remote, list_data_files, remote_file_system
from graphquant.errors import GraphQuantError, UsageError
from graphquant.utils.atomic_files import remove_stale_files

Execute = Callable[[Sequence[Entry]], Iterator[Outcome]]

OUTPUT_STATUSES = ("done", "gate")  # statuses of processed entries that have an output


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Options of a batch run."""

    folder: Path  # folder of the cache, the journals and the file digests
    cache: bool = True  # use the cache
    resume: bool = False  # use outputs that an earlier run of the same batch finished; never failures
    force: bool = False  # replace outputs that no batch wrote
    shard: tuple[int, int] = (1, 1)  # number of the shard and number of shards, for the report
    deal_digest: str = ""  # digest by which the shards were dealt, likewise


def run_batch(
    entries: Sequence[Entry],
    options: BatchOptions,
    execute: Execute,
    *,
    on_outcome: Callable[[Outcome], None] | None = None,
    on_warning: Callable[[str], None] | None = None,
) -> BatchReport:
    """Process the entries that are not finished. Ctrl-C ends the batch; remaining entries are skipped.

    Entries have unique names and outputs; `execute` yields outcomes in any order. `on_outcome` receives each outcome
    once it is on the disk, `on_warning` problems that do not belong to a model. Raises a UsageError if the batch runs
    already, or the cache folder cannot be used.
    """
    started, start = time.time(), time.monotonic()
    with FileHashes(options.folder / "hashes.sqlite") as file_hashes:
        path = journal_path(options.folder, entries)
        with Journal(path, resume=options.resume) as journal:
            remove_stale_files(entry.output for entry in entries if not is_remote(entry.output))
            warn_once = cache(on_warning or (lambda _message: None))
            batch = _BatchRun(entries, options, file_hashes, journal, warn_once)
            with closing(batch.outcomes(execute)) as outcomes, suppress(KeyboardInterrupt):
                for outcome in outcomes:
                    if on_outcome is not None:
                        on_outcome(outcome)
    message = "The batch was stopped before this model was processed. Run it with --resume."
    return BatchReport(
        version=graphquant.__version__,
        outcomes=tuple(
            batch.outcome_by_name.get(entry.name) or failed_outcome(entry, "Skipped", message, 130, "skipped")
            for entry in entries
        ),
        shard=options.shard,
        deal_digest=options.deal_digest,
        started=round(started, 3),
        seconds=round(time.monotonic() - start, 3),
    )


class _BatchRun:
    """One run of a batch."""

    def __init__(
        self,
        entries: Sequence[Entry],
        options: BatchOptions,
        file_hashes: FileHashes,
        journal: Journal,
        on_warning: Callable[[str], None],
    ) -> None:
        self._entries, self._options, self._file_hashes = entries, options, file_hashes
        self._journal, self._on_warning = journal, on_warning
        self._cache = OutcomeCache(options.folder) if options.cache else None
        self._inputs: dict[str, CacheInputs | None] = {}
        self._program_digest = program_digest(file_hashes)
        self._data_digest = cache(partial(data_digest, file_hashes=file_hashes))
        self.outcome_by_name: dict[str, Outcome] = {}  # outcomes so far by entry name

    def outcomes(self, execute: Execute) -> Generator[Outcome, None, None]:
        """Yield each outcome once it is in the journal: known ones first, then processed ones."""
        pending = []
        for entry in self._entries:
            inputs = self._inputs[entry.name] = self._read_inputs(entry)
            if (outcome := self._finished_outcome(entry, inputs)) is not None:
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
        """Process pending entries, largest first, so that no large model remains for the end."""
        by_name = {entry.name: entry for entry in pending}
        digest_before = {entry.name: self._file_hashes.output_digest(entry.output) for entry in pending}
        for entry in pending:
            self._file_hashes.claim_output(entry.output)
        sizes = {name: inputs.model_size for name, inputs in self._inputs.items() if inputs is not None}
        running = execute(sorted(pending, key=lambda entry: -sizes.get(entry.name, 0)))
        try:
            for outcome in running:
                yield self._record(self._complete_outcome(by_name[outcome.name], outcome))
        finally:
            if isinstance(running, Generator):
                running.close()  # after this, no worker writes any more
            for entry in pending:
                recorded = self.outcome_by_name.get(entry.name)
                if recorded is None or recorded.status not in OUTPUT_STATUSES:
                    self._release_output(entry, digest_before[entry.name])
            self._drop_changed_data(pending)

    def _drop_changed_data(self, entries: Sequence[Entry]) -> None:
        """Remove cached outcomes whose data changed during the run, since the version that was read is unknown."""
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
        """Restore the earlier claim on an output that was not written."""
        if not _output_exists(entry.output):
            self._file_hashes.claim_output(entry.output, None)
        elif (
            digest_before and not is_remote(entry.output) and self._current_digest(Path(entry.output)) == digest_before
        ):
            self._file_hashes.claim_output(entry.output, digest_before)

    def _record(self, outcome: Outcome) -> Outcome:
        try:
            self._journal.add(outcome)
        except OSError as error:
            self._on_warning(
                f"Finished outcomes cannot be stored in {self._options.folder}: {error.strerror}. --resume will not"
                " skip them."
            )
        self.outcome_by_name[outcome.name] = outcome
        return outcome

    def _complete_outcome(self, entry: Entry, outcome: Outcome) -> Outcome:
        """Complete a processed outcome with the digests of its inputs, and store its output in the cache."""
        if (inputs := self._inputs[entry.name]) is None:
            return outcome
        digests = replace(
            inputs.digests, rules=outcome.digests.rules or inputs.digests.rules, output=outcome.digests.output
        )
        outcome = replace(outcome, digests=digests)
        if outcome.status not in OUTPUT_STATUSES:
            return outcome
        self._file_hashes.claim_output(entry.output, _output_state(entry, outcome))
        # Inputs that changed during the run would give the output a wrong key.
        if self._cache is None or not inputs.deterministic or self._read_inputs(entry) != inputs:
            return outcome
        try:
            self._cache.store(outcome)
        except FileNotFoundError:  # this output was removed; others can still be cached
            self._cache.remove(inputs.digests.key)
        except OSError as error:
            folder, reason = self._options.folder, error.strerror
            self._on_warning(f"The cache in {folder} is full or read-only: {reason}. Prune it, or free space.")
            self._cache = None
        return outcome

    def _read_inputs(self, entry: Entry) -> CacheInputs | None:
        """Return the inputs of an output; None if a file cannot be read, which the quantization then reports."""
        try:
            return cache_inputs(entry, self._file_hashes, self._program_digest, self._data_digest)
        except (GraphQuantError, OSError):
            return None

    def _finished_outcome(self, entry: Entry, inputs: CacheInputs | None) -> Outcome | None:
        """Return the outcome of an earlier run of this batch if nothing changed; never a failure."""
        outcome = self._journal.finished.get(entry.name)
        if outcome is None or not outcome.products or inputs is None or outcome.digests.key != inputs.digests.key:
            return None
        if not self._is_intact(entry, outcome):
            return None
        return apply_gates(entry, outcome, "unchanged" if outcome.status == "unchanged" else "done")

    def _cached_outcome(self, entry: Entry, inputs: CacheInputs | None) -> Outcome | None:
        """Return the outcome of any earlier run with the same inputs, and restore its output."""
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
            except OSError:  # the quantization reports the error
                return None
        self._file_hashes.claim_output(entry.output, _output_state(entry, outcome))
        return replace(apply_gates(entry, outcome, "unchanged"), seconds=0.0)

    def _is_intact(self, entry: Entry, outcome: Outcome) -> bool:
        """Return True if the output is unchanged; for a remote output, by its fingerprint."""
        if is_remote(entry.output):
            return self._file_hashes.output_digest(entry.output) == (_output_state(entry, outcome) or None)
        folder = Path(entry.output).parent
        try:
            return all(self._file_hashes.digest(folder / name) == digest for name, digest in outcome.products.items())
        except OSError:
            return False

    def _blocked_outcome(self, entry: Entry) -> Outcome | None:
        """Return a failure if the output exists, no batch wrote it, and --force is missing."""
        output = Path(entry.output)
        if self._options.force or not _output_exists(entry.output):
            return None
        claimed = self._file_hashes.output_digest(entry.output)
        if claimed is not None:
            if is_remote(entry.output) or claimed in {"", self._current_digest(output)}:
                return None
            reason = "was changed after a batch wrote it."
        elif (source := _recorded_source(entry.output)) is None:
            reason = "exists already, and was not created by a batch."
        elif source == _model_digest_or_none(entry):
            return None
        else:
            reason = (
                f"exists already. graphquant wrote it, but not from {entry.model} in its current state, but from"
                " another model, or from this one before it changed. The cache folder has no record of it."
            )
        message = f"{entry.output} {reason} Give another output, or --force to replace it."
        return failed_outcome(entry, UsageError.__name__, message, UsageError.exit_code)

    def _current_digest(self, output: Path) -> str | None:
        """Return the digest of the model at an output path, None if it is no model."""
        with suppress(GraphQuantError, OSError):
            files = model_files(output)
            return combined_digest(
                (file.relative_to(output.parent).as_posix(), self._file_hashes.digest(file)) for file in files
            )
        return None


def _output_exists(output: str) -> bool:
    """Return True if an output exists. If the service does not answer, writing will report it."""
    if not is_remote(output):
        return os.path.lexists(output)
    with suppress(GraphQuantError), remote_file_system(output, UsageError, "looked at") as (system, path):
        return bool(system.exists(path))
    return False


def _recorded_source(output: str) -> str | None:
    """Return the source digest recorded in an output, None without one."""
    from graphquant import formats
    from graphquant.api.models import load

    with suppress(GraphQuantError, OSError):
        if not is_remote(output):
            model = load(output)
            return formats.format_module(model.format).read_metadata(model).get("source")
    return None


def _model_digest_or_none(entry: Entry) -> str | None:
    """Return the digest by which outputs identify this model, None if it cannot be read."""
    from graphquant.api.models import load

    with suppress(GraphQuantError, OSError):
        if not is_remote(entry.model):
            return load(entry.model, allow_links=entry.allow_links).digest
    return None


def _output_state(entry: Entry, outcome: Outcome) -> str:
    """Return the digest of an output, or the fingerprint of a remote one."""
    if not is_remote(entry.output):
        return outcome.digests.output
    with suppress(GraphQuantError):
        return remote_fingerprint(entry.output, outcome.products)
    return ""


def select_shard(entries: Sequence[Entry], shard: tuple[int, int]) -> list[Entry]:
    """Return the entries of one shard, in order. All shards together have each entry once.

    The largest models are dealt first, each to the shard with the fewest bytes so far. Machines with the same models
    deal the same way. `shard` is the number of the shard, from 1, and the number of shards.
    """
    number, total = shard
    if not 1 <= number <= total:
        raise UsageError(f"There is no shard {number} of {total}. Shards are numbered from 1, as in --shard 1/{total}.")
    sizes = {entry.name: model_size(entry.model, allow_links=entry.allow_links) for entry in entries}
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
    sizes = sorted((entry.name, model_size(entry.model, allow_links=entry.allow_links)) for entry in entries)
    encoded = json.dumps(sizes)
    return hashlib.sha256(encoded.encode(errors="surrogatepass")).hexdigest()


def model_size(model: str, *, allow_links: bool = False) -> int:
    """Return the bytes of a model with all its files; 0 if unreadable, which the quantization then reports."""
    try:
        if is_remote(model):
            return sum(file.filesystem.size(file.name) or 0 for file in list_data_files(model)[0])
        return sum(file.stat().st_size for file in model_files(Path(model), allow_links=allow_links))
    except (GraphQuantError, OSError):
        return 0
