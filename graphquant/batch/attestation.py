"""Attestations of outputs, and their verification by rebuilding.

An attestation is an in-toto statement v1 (https://in-toto.io/Statement/v1) with SLSA's provenance predicate, in a file
next to the output. It contains no times or machines, so equal outputs have equal attestations. It is not signed; tools
such as `cosign attest-blob` do that.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from graphquant.api.models import model_files
from graphquant.batch.cache_key import file_digest
from graphquant.batch.types import ENTRY_OPTIONS, BatchReport, Entry, Outcome, OutcomeChange
from graphquant.calibration.data.files import is_remote
from graphquant.errors import GraphQuantError, UsageError
from graphquant.utils.atomic_files import write_file
from graphquant.visualize.tables import join_names

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
DIGEST_NAME = "graphquantSha256"  # name of digests over several files
MAX_ATTESTATION_BYTES = 64 << 20  # maximum size of an attestation


def attestation(entry: Entry, outcome: Outcome) -> dict[str, Any]:
    """Return the attestation of an existing output.

    A model in one file has its SHA-256. Digests over several files, and over rules and data with their options, are
    graphquant's own and have another name, as in-toto requires.
    """
    digests = outcome.digests
    parameters = {name: value for name, value in asdict(entry).items() if name in ENTRY_OPTIONS}
    is_single_file = (
        not is_remote(entry.model) and len(model_files(Path(entry.model), allow_links=entry.allow_links)) == 1
    )
    materials = [
        ("model", entry.model, "sha256" if is_single_file else DIGEST_NAME, digests.model),
        ("rules", ", ".join(entry.rules), DIGEST_NAME, digests.rules),
        ("data", entry.stats or entry.data or "", DIGEST_NAME, digests.data),
    ]
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(outcome.products.items())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:graphquant:insert:1",  # it defines the parameters: those of a manifest's entry
                "externalParameters": parameters,
                "internalParameters": {"key": digests.key},
                "resolvedDependencies": [
                    {"name": name, "digest": {algorithm: digest}, "annotations": {"path": path}}
                    for name, path, algorithm, digest in materials
                    if digest
                ],
            },
            "runDetails": {"builder": {"id": "urn:graphquant:batch", "version": outcome.versions}},
        },
    }


def attestation_path(output: str) -> Path:
    """Return the path of an output's attestation: its name with `.intoto.json` appended."""
    path = Path(output)
    return path.with_name(f"{path.name}.intoto.json")


def write_attestation(entry: Entry, outcome: Outcome) -> None:
    """Write the attestation of an output next to it, atomically."""
    text = json.dumps(attestation(entry, outcome), indent=2, sort_keys=True) + "\n"
    write_file(attestation_path(outcome.output), text, "Free space, or remove --attest.")


def attested_digests(path: Path) -> dict[str, str]:
    """Return the hex SHA-256 of the files in an attestation."""
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
    if not digests or not all(isinstance(text, str) for item in digests.items() for text in item):
        raise UsageError(f"{path} is not an in-toto statement on files. Create it again with --attest.")
    return digests


def verify_outputs(
    entries: Sequence[Entry], build: Callable[[Sequence[Entry], Path], BatchReport], previous: BatchReport | None = None
) -> BatchReport:
    """Rebuild every entry in a temporary folder, and return a report that fails on differences.

    The rebuilt files are compared with the output, its attestation if there is one, and an earlier report if given.
    `build` runs a batch, given entries and a folder for its files.
    """
    with tempfile.TemporaryDirectory(prefix="graphquant-") as temp_folder:
        rebuilt_entries = [
            replace(
                entry,
                output=str(Path(temp_folder, str(number), Path(entry.output).name)),
                gates=replace(
                    entry.gates, min_quantized=None, max_size=None, check=None
                ),  # those that remain steer the search
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


def _rebuild_differences(entry: Entry, built: Outcome, previous: Outcome | None) -> Iterator[str]:
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
    digests: dict[str, str | None] = dict.fromkeys(built.products)
    with suppress(GraphQuantError, OSError):  # no longer a model; the digests of its files show that
        digests |= dict.fromkeys(file.relative_to(output.parent).as_posix() for file in model_files(output))
    for name in digests:
        with suppress(OSError):
            digests[name] = file_digest(output.parent / name)
    return digests


def _differing_files(built: Mapping[str, str], current: Mapping[str, str | None]) -> str:
    """Return the names of differing files, "" if all are equal."""
    differing = []
    for name in sorted({*built, *current}):
        if built.get(name) != current.get(name):
            problem = " is not part of it" if name not in built else " is missing"
            differing.append(name if name in built and current.get(name) else name + problem)
    return join_names(differing)


def _possible_causes(previous: Outcome, built: Outcome) -> str:
    """Return other differences, which may be the cause."""
    causes = [
        f"the {name}"
        for name in ("model", "rules", "data")
        if getattr(previous.digests, name) != getattr(built.digests, name)
    ]
    for package in sorted({*previous.versions, *built.versions}):
        version_before, version_after = previous.versions.get(package, "none"), built.versions.get(package, "none")
        if version_before != version_after:
            causes.append(f"{package} ({version_before}, now {version_after})")
    return f"; other differences: {', '.join(causes)}" if causes else ""
