"""What an output was made of, as an in-toto statement beside it: the same output has the same statement.

The statement is https://in-toto.io/Statement/v1 with SLSA's predicate for provenance. Nothing in it tells when or where
the output was made, and it is not signed: `cosign attest-blob` and the like do that.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant.batch.cache_key import file_digest
from graphquant.batch.types import OutcomeChange
from graphquant.calibration.data.files import is_remote
from graphquant.errors import GraphQuantError, UsageError
from graphquant.formats.model_files import model_files
from graphquant.utils.atomic_files import atomic_file
from graphquant.visualize.text import join_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from graphquant.batch.types import BatchReport, Entry, Gates, Outcome


STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:graphquant:insert:1"
"""What was done, and so what the parameters mean: those of an entry of a manifest."""

BUILDER_ID = "urn:graphquant:batch"

DIGEST_NAME = "graphquantSha256"
"""The name of digests that are not of one file."""

ATTESTATION_SUFFIX = ".intoto.json"

MAX_ATTESTATION_BYTES = 64 << 20
"""Of a statement's file."""

_OMITTED_FIELDS = frozenset({"name", "model", "output", "gates"})
"""Fields of an entry that do not go into the output."""


def attestation(entry: Entry, outcome: Outcome) -> dict[str, Any]:
    """The statement of an output that is there.

    A model that is one file has its SHA-256. Over several files, and over rules and data with how they are read,
    graphquant has a digest of its own, which goes by another name, as in-toto asks.
    """
    digests = outcome.digests
    parameters = {name: value for name, value in asdict(entry).items() if name not in _OMITTED_FIELDS}
    materials = [
        _dependency("model", entry.model, "sha256" if _is_single_file(entry.model) else DIGEST_NAME, digests.model),
        _dependency("rules", ", ".join(entry.rules), DIGEST_NAME, digests.rules),
        _dependency("data", entry.stats or entry.data or "", DIGEST_NAME, digests.data),
    ]
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(outcome.products.items())],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": parameters,
                "internalParameters": {"key": digests.key},
                "resolvedDependencies": [material for material in materials if material],
            },
            "runDetails": {"builder": {"id": BUILDER_ID, "version": outcome.versions}},
        },
    }


def _dependency(name: str, path: str, algorithm: str, digest: str) -> dict[str, Any]:
    if not digest:
        return {}
    return {"name": name, "digest": {algorithm: digest}, "annotations": {"given": path}}


def _is_single_file(model: str) -> bool:
    from graphquant.calibration.data.files import is_remote
    from graphquant.formats.model_files import model_files

    return not is_remote(model) and len(model_files(Path(model))) == 1


def attestation_path(output: str) -> Path:
    """Where an output's statement is: beside it, with `.intoto.json` behind its name."""
    path = Path(output)
    return path.with_name(f"{path.name}{ATTESTATION_SUFFIX}")


def write_attestation(entry: Entry, outcome: Outcome) -> None:
    """Writes the statement of an output beside it, whole or not at all; it takes the place of an earlier one.

    Raises:
        UsageError: It cannot be written.
    """
    path = attestation_path(outcome.output)
    text = json.dumps(attestation(entry, outcome), indent=2, sort_keys=True) + "\n"
    try:
        with atomic_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Make room, or leave --attest out.") from error


def attested_digests(path: Path) -> dict[str, str]:
    """The files that a statement is about, with their hex SHA-256.

    Raises:
        UsageError: It cannot be read, or is no statement.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_ATTESTATION_BYTES + 1)
        data = json.loads(text) if len(text) <= MAX_ATTESTATION_BYTES else None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Make it again with --attest.") from error
    except (ValueError, RecursionError):
        data = None
    subjects = data.get("subject") if isinstance(data, dict) and data.get("_type") == STATEMENT_TYPE else None
    try:
        digests = {subject["name"]: subject["digest"]["sha256"] for subject in subjects or ()}
    except (KeyError, TypeError):
        digests = {}
    if not digests or not all(isinstance(text_, str) for entry in digests.items() for text_ in entry):
        raise UsageError(f"{path} is no in-toto statement on files. Make it again with --attest.")
    return digests


# Outputs built again, elsewhere and without the cache, and held against what there is.


def verify_outputs(
    entries: Sequence[Entry], build: Callable[[Sequence[Entry], Path], BatchReport], previous: BatchReport | None = None
) -> BatchReport:
    """The report of building every entry again in a temporary folder; what differs from what there is fails it.

    What there is: the output's files, its statement where it has one, and the report of an earlier batch where one is
    given.

    Args:
        entries: The models, with their outputs where they should be.
        build: Makes the report of a batch, given its entries and a folder for all that it wants to keep.
        previous: The report.
    """
    with tempfile.TemporaryDirectory(prefix="graphquant-") as temp_folder:
        rebuilt_entries = [
            replace(
                entry, output=str(Path(temp_folder, str(number), Path(entry.output).name)), gates=_search_gates(entry)
            )
            for number, entry in enumerate(entries)
        ]
        report = build(rebuilt_entries, Path(temp_folder))
    previous_outcomes = {} if previous is None else {outcome.name: outcome for outcome in previous.outcomes}
    outcomes, changes = [], []
    for entry, outcome in zip(entries, report.outcomes, strict=True):
        status = "done" if outcome.status == "gate" else outcome.status
        outcomes.append(replace(outcome, output=entry.output, status=status, misses=()))
        if outcome.products:
            differences = _rebuild_differences(entry, outcome, previous_outcomes.get(entry.name))
            changes += [
                OutcomeChange(name=entry.name, kind="digest", level="error", message=message) for message in differences
            ]
    return replace(report, outcomes=tuple(outcomes), changes=tuple(changes))


def _search_gates(entry: Entry) -> Gates:
    """What an output is searched for by; whether it has that is not asked again."""
    return replace(entry.gates, max_size=None, check=None)


def _rebuild_differences(entry: Entry, built: Outcome, previous: Outcome | None) -> Iterator[str]:
    """What does not agree with the output that was built again, a sentence for each."""
    if is_remote(entry.output):
        yield "the output is elsewhere, where its files cannot be digested"
        return
    difference = _differing_files(built.products, _current_digests(Path(entry.output), built))
    if difference:
        yield f"the output is not what is built now: {difference}"
    path = attestation_path(entry.output)
    if path.exists():
        try:
            difference = _differing_files(built.products, attested_digests(path))
        except GraphQuantError as error:
            difference = str(error).rstrip(".")
        if difference:
            yield f"the statement is not of what is built now: {difference}"
    if previous is not None and previous.products:
        difference = _differing_files(built.products, previous.products)
        if difference:
            yield f"the report is not of what is built now: {difference}{_possible_causes(previous, built)}"


def _current_digests(output: Path, built: Outcome) -> dict[str, str | None]:
    """The digests of the output's files, more or fewer than were built; None for one that is missing."""
    try:
        names = {file.relative_to(output.parent).as_posix() for file in model_files(output)}
    except (GraphQuantError, OSError):  # no model any more, which the files' digests tell
        names = set()
    return {name: _digest_or_none(output.parent / name) for name in {*names, *built.products}}


def _differing_files(built: Mapping[str, str], current: Mapping[str, str | None]) -> str:
    """Which files are not the same, "" if all are."""
    names = [name for name in sorted({*built, *current}) if built.get(name) != current.get(name)]
    return join_names([f"{name}{_difference_suffix(name, built, current)}" for name in names])


def _difference_suffix(name: str, built: Mapping[str, str], current: Mapping[str, str | None]) -> str:
    if name not in built:
        return " is no part of it"
    return "" if current.get(name) else " is missing"


def _possible_causes(previous: Outcome, built: Outcome) -> str:
    """What else differs, which may be why."""
    inputs = ("model", "rules", "data")
    causes = [
        f"the {input_name}"
        for input_name in inputs
        if getattr(previous.digests, input_name) != getattr(built.digests, input_name)
    ]
    for package in sorted({*previous.versions, *built.versions}):
        version_before, version_after = previous.versions.get(package, "none"), built.versions.get(package, "none")
        if version_before != version_after:
            causes.append(f"{package} ({version_before}, now {version_after})")
    return f"; so do {', '.join(causes)}" if causes else ""


def _digest_or_none(path: Path) -> str | None:
    try:
        return file_digest(path)
    except OSError:
        return None
