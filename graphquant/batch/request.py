"""What a manifest, or the command line, asks for; what is right in a manifest is known beside what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant import rules
from graphquant.batch.manifest_schema import MANIFEST_FORM, EntrySettings, Manifest, ModelTable, set_keys
from graphquant.errors import ManifestError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from graphquant.rules import KeyPath, Mistake


MANIFEST_NAME = "graphquant.toml"
PROJECT_FILE = "pyproject.toml"

_TOOL_TABLE: KeyPath = ("tool", "graphquant")
"""Where a manifest stands in a pyproject.toml."""

_FILE_KEYS = ("path", "leave", "variant", "output", "data", "stats")
"""Keys that say which files an entry is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """What a manifest, or the command line, asks for.

    Attributes:
        tables: The entries, by their number; one without a sound `path` is `Settings` alone.
        defaults: What holds for all of them.
        overrides: What the command line says, which wins.
        folder: Where relative paths of the tables begin, "" for the current folder.
        path: The manifest, None without one.
        key_lines: The lines of its keys.
        table_path: The table that holds it, in a file of more.
        mistakes: What is wrong with its keys and their values; such keys are left out of the tables.
        ambiguous: The entries of which, for these mistakes, nobody knows which files they are about.
    """

    tables: Mapping[int, EntrySettings]
    defaults: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any]
    folder: str = ""
    path: Path | None = None
    key_lines: Mapping[KeyPath, int] = field(default_factory=dict)
    table_path: KeyPath = ()
    mistakes: Sequence[Mistake] = ()
    ambiguous: frozenset[int] = frozenset()

    def key_path(self, index: int, key: str) -> KeyPath:
        """Where `key` of an entry is said."""
        is_set = getattr(self.tables[index], key) is not None
        return ("model", index, key) if is_set or key not in self.defaults else ("defaults", key)

    def manifest_error(self, mistakes: Iterable[Mistake], rule_errors: Iterable[str]) -> ManifestError:
        """All mistakes, and those of the rule files."""
        if self.path is None:
            messages = list(dict.fromkeys(sentence for _, sentence in mistakes))
        else:
            messages = (
                [str(rules.mistakes_error(self.path, self.key_lines, mistakes, MANIFEST_FORM, self.table_path))]
                if mistakes
                else []
            )
        return ManifestError("\n".join([*messages, *rule_errors]))


def find_manifest() -> Path:
    """The manifest of the current folder.

    Raises:
        UsageError: There is none.
    """
    manifest, project = Path(MANIFEST_NAME), Path(PROJECT_FILE)
    if manifest.is_file():
        return manifest
    if project.is_file():
        data, _ = rules.parse_document(project, rules.read_document(project, MANIFEST_FORM), MANIFEST_FORM)
        if _tool_table(data) is not None:
            return project
    raise UsageError(
        f"There is no {MANIFEST_NAME} here, nor a {PROJECT_FILE} with [tool.graphquant]. Name a manifest, or models and globs."
    )


def has_manifest() -> bool:
    """Whether the current folder has a manifest, with or without mistakes."""
    try:
        return find_manifest().is_file()
    except ManifestError:
        return True
    except UsageError:
        return False


def _tool_table(data: dict[str, Any]) -> Any:
    """What a pyproject.toml has as [tool.graphquant], None if it has nothing."""
    tool = data.get("tool")
    return tool.get("graphquant") if isinstance(tool, dict) else None


def read_manifest(path: Path, overrides: dict[str, Any]) -> BatchRequest:
    """What the manifest at `path` says, with the mistakes of its keys and values.

    Args:
        path: The manifest.
        overrides: What the command line says.

    Raises:
        ManifestError: It is no TOML, or has no entries.
        UsageError: There is none.
    """
    if not path.exists():
        raise UsageError(f"There is no manifest {path}. Name one, or models and globs.")
    data, lines = rules.parse_document(path, rules.read_document(path, MANIFEST_FORM), MANIFEST_FORM)
    table_path: KeyPath = ()
    if path.name == PROJECT_FILE:
        table_path, data = _TOOL_TABLE, _tool_table(data)
        if not isinstance(data, dict):
            raise UsageError(f"{path} has no table [tool.graphquant]. Put the manifest there, or into {MANIFEST_NAME}.")
    _, mistakes = rules.validate_document(data, Manifest, MANIFEST_FORM)
    invalid_keys = {key[:3] if key[:1] == ("model",) else key[:2] for key, _ in mistakes}
    defaults = _valid_table(data.get("defaults", {}), ("defaults",), invalid_keys, EntrySettings)
    model_tables = data.get("model", [])
    tables = {
        index: table
        for index, model_table in enumerate(model_tables if isinstance(model_tables, list) else [])
        if (table := _read_model_table(model_table, index, invalid_keys)) is not None
    }
    request = BatchRequest(
        tables=tables,
        defaults={} if defaults is None else set_keys(defaults),
        overrides=overrides,
        folder="" if path.parent == Path() else path.parent.as_posix(),
        path=path,
        key_lines=lines,
        table_path=table_path,
        mistakes=mistakes,
        ambiguous=_ambiguous_entries(tables, invalid_keys),
    )
    if not mistakes and not tables:
        raise request.manifest_error(
            [((), "the manifest has no models. Give some: [[model]] and path = 'models/*.onnx'.")], []
        )
    return request


def _read_model_table(data: Any, index: int, invalid_keys: set[KeyPath]) -> EntrySettings | None:
    """What is right in an entry, None if it is no table."""
    location: KeyPath = ("model", index)
    table = _valid_table(data, location, invalid_keys, ModelTable)
    if table is not None or not isinstance(data, dict):
        return table
    return _valid_table(
        {key: value for key, value in data.items() if key in MANIFEST_FORM.keys(EntrySettings)},
        location,
        invalid_keys,
        EntrySettings,
    )


def _valid_table(
    data: Any, location: KeyPath, invalid_keys: set[KeyPath], table: type[EntrySettings]
) -> EntrySettings | None:
    """The table at `location` without the keys that are wrong, None if it is none."""
    if location in invalid_keys or not isinstance(data, dict):
        return None
    checked, _ = rules.validate_document(
        {key: value for key, value in data.items() if (*location, key) not in invalid_keys}, table, MANIFEST_FORM
    )
    return checked


def _ambiguous_entries(tables: Iterable[int], invalid_keys: set[KeyPath]) -> frozenset[int]:
    """The entries with a mistake in a key that says which files they are about, or that may have been meant to."""
    file_keys = [key for key in invalid_keys if _may_name_files(str(key[-1]))]
    affects_all = any(key[0] != "model" for key in file_keys)
    return frozenset(index for index in tables if affects_all or any(key[:2] == ("model", index) for key in file_keys))


def _may_name_files(key: str) -> bool:
    nearest = get_close_matches(key[:100], MANIFEST_FORM.keys(ModelTable), n=1, cutoff=0.5)
    return not nearest or nearest[0] in _FILE_KEYS
