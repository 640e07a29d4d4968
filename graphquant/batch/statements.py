"""What an output was made of, as an in-toto statement beside it: the same output has the same statement.

The statement is https://in-toto.io/Statement/v1 with SLSA's predicate for provenance. Nothing in it tells when or where
the output was made, and it is not signed: `cosign attest-blob` and the like do that.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant.errors import UsageError
from graphquant.whole import whole

if TYPE_CHECKING:
    from graphquant.batch.types import Entry, Outcome

STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
BUILD = "urn:graphquant:insert:1"
"""What was done, and so what the parameters mean: those of an entry of a manifest."""

BUILDER = "urn:graphquant:batch"

OWN = "graphquantSha256"
"""The name of digests that are not of one file."""

SUFFIX = ".intoto.json"

MAX_BYTES = 64 << 20
"""Of a statement's file."""

_PLACES = frozenset({"name", "model", "output", "gates"})
"""Fields of an entry that do not go into the output."""


def statement(entry: Entry, outcome: Outcome) -> dict[str, Any]:
    """The statement of an output that is there.

    A model that is one file has its SHA-256. Over several files, and over rules and data with how they are read,
    graphquant has a digest of its own, which goes by another name, as in-toto asks.
    """
    made = outcome.digests
    parameters = {name: value for name, value in asdict(entry).items() if name not in _PLACES}
    materials = [
        _material("model", entry.model, "sha256" if _one_file(entry.model) else OWN, made.model),
        _material("rules", ", ".join(entry.rules), OWN, made.rules),
        _material("data", entry.stats or entry.data or "", OWN, made.data),
    ]
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(outcome.products.items())],
        "predicateType": PROVENANCE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD,
                "externalParameters": parameters,
                "internalParameters": {"key": made.key},
                "resolvedDependencies": [material for material in materials if material],
            },
            "runDetails": {"builder": {"id": BUILDER, "version": outcome.versions}},
        },
    }


def _material(name: str, path: str, algorithm: str, digest: str) -> dict[str, Any]:
    if not digest:
        return {}
    return {"name": name, "digest": {algorithm: digest}, "annotations": {"given": path}}


def _one_file(model: str) -> bool:
    from graphquant.data.files import remote
    from graphquant.formats.parts import files_of

    return not remote(model) and len(files_of(Path(model))) == 1


def statement_path(output: str) -> Path:
    """Where an output's statement is: beside it, with `.intoto.json` behind its name."""
    path = Path(output)
    return path.with_name(f"{path.name}{SUFFIX}")


def write_statement(entry: Entry, outcome: Outcome) -> None:
    """Writes the statement of an output beside it, whole or not at all; it takes the place of an earlier one.

    Raises:
        UsageError: It cannot be written.
    """
    path = statement_path(outcome.output)
    text = json.dumps(statement(entry, outcome), indent=2, sort_keys=True) + "\n"
    try:
        with whole(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Make room, or leave --attest out.") from error


def stated(path: Path) -> dict[str, str]:
    """The files that a statement is about, with their hex SHA-256.

    Raises:
        UsageError: It cannot be read, or is no statement.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        data = json.loads(text) if len(text) <= MAX_BYTES else None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Make it again with --attest.") from error
    except (ValueError, RecursionError):
        data = None
    subjects = data.get("subject") if isinstance(data, dict) and data.get("_type") == STATEMENT else None
    try:
        found = {one["name"]: one["digest"]["sha256"] for one in subjects or ()}
    except (KeyError, TypeError):
        found = {}
    if not found or not all(isinstance(one, str) for pair in found.items() for one in pair):
        raise UsageError(f"{path} is no in-toto statement on files. Make it again with --attest.")
    return found
