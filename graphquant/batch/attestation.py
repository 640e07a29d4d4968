"""Attestations of outputs, and their verification by rebuilding.

An attestation is an in-toto statement v1 (https://in-toto.io/Statement/v1) with SLSA's provenance predicate, in a file
next to the output. It contains no times or machines, so equal outputs have equal attestations. It is not signed; tools
such as `cosign attest-blob` do that.
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
from graphquant.visualize.tables import join_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from graphquant.batch.types import BatchReport, Entry, Gates, Outcome


STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:graphquant:insert:1"
"""Build type, which defines the parameters: those of a manifest's entry."""

BUILDER_ID = "urn:graphquant:batch"

DIGEST_NAME = "graphquantSha256"
"""Name of digests over several files."""

ATTESTATION_SUFFIX = ".intoto.json"

MAX_ATTESTATION_BYTES = 64 << 20
"""Maximum size of an attestation."""

_OMITTED_FIELDS = frozenset({"name", "model", "output", "gates"})
"""Entry fields that do not influence the output."""


def attestation(entry: Entry, outcome: Outcome) -> dict[str, Any]:
    """Return the attestation of an existing output.

    A model in one file has its SHA-256. Digests over several files, and over rules and data with their options, are
    graphquant's own and have another name, as in-toto requires.
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
    return {"name": name, "digest": {algorithm: digest}, "annotations": {"path": path}}


def _is_single_file(model: str) -> bool:
    from graphquant.calibration.data.files import is_remote
    from graphquant.formats.model_files import model_files

    return not is_remote(model) and len(model_files(Path(model))) == 1


def attestation_path(output: str) -> Path:
    """Return the path of an output's attestation: its name with `.intoto.json` appended."""
    path = Path(output)
    return path.with_name(f"{path.name}{ATTESTATION_SUFFIX}")


def write_attestation(entry: Entry, outcome: Outcome) -> None:
    """Write the attestation of an output next to it, atomically.

    Raises:
        UsageError: It cannot be written.
    """
    path = attestation_path(outcome.output)
    text = json.dumps(attestation(entry, outcome), indent=2, sort_keys=True) + "\n"
    try:
        with atomic_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Free space, or remove --attest.") from error


def attested_digests(path: Path) -> dict[str, str]:
    """Return the hex SHA-256 of the files in an attestation.

    Raises:
        UsageError: It cannot be read, or is no attestation.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_ATTESTATION_BYTES + 1)
        data = json.loads(text) if len(text) <= MAX_ATTESTATION_BYTES else None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Create it again with --attest.") from error
    except (ValueError, RecursionError):
        data = None
    subjects = data.get("subject") if isinstance(data, dict) and data.get("_type") == STATEMENT_TYPE else None
    try:
        digests = {subject["name"]: subject["digest"]["sha256"] for subject in subjects or ()}
    except (KeyError, TypeError):
        digests = {}
    if not digests or not all(isinstance(text_, str) for entry in digests.items() for text_ in entry):
        raise UsageError(f"{path} is not an in-toto statement on files. Create it again with --attest.")
    return digests


def verify_outputs(
    entries: Sequence[Entry], build: Callable[[Sequence[Entry], Path], BatchReport], previous: BatchReport | None = None
) -> BatchReport:
    """Rebuild every entry in a temporary folder, and return a report that fails on differences.

    The rebuilt files are compared with the output, its attestation if there is one, and an earlier report if given.

    Args:
        entries: Entries with their existing outputs.
        build: Runs a batch, given entries and a folder for its files.
        previous: Earlier report.
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
    """Return the gates that steer the search; the others are not checked again."""
    return replace(entry.gates, max_size=None, check=None)


def _rebuild_differences(entry: Entry, built: Outcome, previous: Outcome | None) -> Iterator[str]:
    """Yield a message for each difference from the rebuilt output."""
    if is_remote(entry.output):
        yield "the output is remote and cannot be verified"
        return
    difference = _differing_files(built.products, _current_digests(Path(entry.output), built))
    if difference:
        yield f"the output differs from the rebuilt one: {difference}"
    path = attestation_path(entry.output)
    if path.exists():
        try:
            difference = _differing_files(built.products, attested_digests(path))
        except GraphQuantError as error:
            difference = str(error).rstrip(".")
        if difference:
            yield f"the attestation differs from the rebuilt output: {difference}"
    if previous is not None and previous.products:
        difference = _differing_files(built.products, previous.products)
        if difference:
            yield f"the report differs from the rebuilt output: {difference}{_possible_causes(previous, built)}"


def _current_digests(output: Path, built: Outcome) -> dict[str, str | None]:
    """Return the digests of the output's files and of rebuilt ones; None if missing."""
    try:
        names = {file.relative_to(output.parent).as_posix() for file in model_files(output)}
    except (GraphQuantError, OSError):  # no longer a model; the digests of its files show that
        names = set()
    return {name: _digest_or_none(output.parent / name) for name in {*names, *built.products}}


def _differing_files(built: Mapping[str, str], current: Mapping[str, str | None]) -> str:
    """Return the names of differing files, "" if all are equal."""
    names = [name for name in sorted({*built, *current}) if built.get(name) != current.get(name)]
    return join_names([f"{name}{_difference_suffix(name, built, current)}" for name in names])


def _difference_suffix(name: str, built: Mapping[str, str], current: Mapping[str, str | None]) -> str:
    if name not in built:
        return " is not part of it"
    return "" if current.get(name) else " is missing"


def _possible_causes(previous: Outcome, built: Outcome) -> str:
    """Return other differences, which may be the cause."""
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
    return f"; other differences: {', '.join(causes)}" if causes else ""


def _digest_or_none(path: Path) -> str | None:
    try:
        return file_digest(path)
    except OSError:
        return None
