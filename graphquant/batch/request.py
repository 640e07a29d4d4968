"""Reading of manifests. The valid part of a manifest is kept along with its mistakes."""

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
"""Table of a manifest in pyproject.toml."""

_FILE_KEYS = ("path", "leave", "variant", "output", "data", "stats")
"""Keys that select the files of an entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """Entries of a manifest or command line, before they are resolved to models.

    Attributes:
        tables: Entries by index; one without a valid `path` is only `EntrySettings`.
        defaults: Settings of all entries.
        overrides: Settings of the command line, which have priority.
        folder: Base folder of relative paths in the tables, "" for the current folder.
        path: The manifest, None without one.
        key_lines: Lines of its keys.
        table_path: Table that contains the manifest, in a larger file.
        mistakes: Invalid keys and values. The tables do not contain them.
        ambiguous: Entries whose files are unknown because of these mistakes.
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
        """Return the location of `key` for an entry: in the entry itself or in the defaults."""
        is_set = getattr(self.tables[index], key) is not None
        return ("model", index, key) if is_set or key not in self.defaults else ("defaults", key)

    def manifest_error(self, mistakes: Iterable[Mistake], rule_errors: Iterable[str]) -> ManifestError:
        """Return an error with all mistakes, and those of the rule files."""
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
    """Return the manifest of the current folder.

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
        f"There is no {MANIFEST_NAME} or {PROJECT_FILE} with [tool.graphquant] here. Give a manifest,"
        " or models and globs."
    )


def has_manifest() -> bool:
    """Return True if the current folder has a manifest, valid or not."""
    try:
        return find_manifest().is_file()
    except ManifestError:
        return True
    except UsageError:
        return False


def _tool_table(data: dict[str, Any]) -> Any:
    """Return [tool.graphquant] of a pyproject.toml, None without it."""
    tool = data.get("tool")
    return tool.get("graphquant") if isinstance(tool, dict) else None


def read_manifest(path: Path, overrides: dict[str, Any]) -> BatchRequest:
    """Read a manifest, with the mistakes in its keys and values.

    Args:
        path: The manifest.
        overrides: Settings of the command line.

    Raises:
        ManifestError: It is not TOML, or has no entries.
        UsageError: It does not exist.
    """
    if not path.exists():
        raise UsageError(f"There is no manifest {path}. Give one, or models and globs.")
    data, lines = rules.parse_document(path, rules.read_document(path, MANIFEST_FORM), MANIFEST_FORM)
    table_path: KeyPath = ()
    if path.name == PROJECT_FILE:
        table_path, data = _TOOL_TABLE, _tool_table(data)
        if not isinstance(data, dict):
            raise UsageError(f"{path} has no table [tool.graphquant]. Put the manifest there or into {MANIFEST_NAME}.")
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
            [((), "the manifest has no models. Add some: [[model]] and path = 'models/*.onnx'.")], []
        )
    return request


def _read_model_table(data: Any, index: int, invalid_keys: set[KeyPath]) -> EntrySettings | None:
    """Return the valid part of an entry, None if it is not a table."""
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
    """Return the table at `location` without invalid keys, None if it is not a table."""
    if location in invalid_keys or not isinstance(data, dict):
        return None
    checked, _ = rules.validate_document(
        {key: value for key, value in data.items() if (*location, key) not in invalid_keys}, table, MANIFEST_FORM
    )
    return checked


def _ambiguous_entries(tables: Iterable[int], invalid_keys: set[KeyPath]) -> frozenset[int]:
    """Return the entries with a mistake in a key that selects files, or in one that may be meant to."""
    file_keys = [key for key in invalid_keys if _may_name_files(str(key[-1]))]
    affects_all = any(key[0] != "model" for key in file_keys)
    return frozenset(index for index in tables if affects_all or any(key[:2] == ("model", index) for key in file_keys))


def _may_name_files(key: str) -> bool:
    nearest = get_close_matches(key[:100], MANIFEST_FORM.keys(ModelTable), n=1, cutoff=0.5)
    return not nearest or nearest[0] in _FILE_KEYS
