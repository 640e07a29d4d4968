"""What a manifest, or the command line, asks for; what is right in a manifest is known beside what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant import documents
from graphquant.batch.manifest_types import FORM, Manifest, ModelTable, Settings, settings
from graphquant.errors import ManifestError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from graphquant.documents import KeyPath, Mistake

NAME = "graphquant.toml"
PROJECT = "pyproject.toml"

_TOOL: KeyPath = ("tool", "graphquant")
"""Where a manifest stands in a pyproject.toml."""

_NAMING = ("path", "leave", "variant", "output", "data", "stats")
"""Keys that say which files an entry is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a manifest, or the command line, asks for.

    Attributes:
        tables: The entries, by their number; one without a sound `path` is `Settings` alone.
        defaults: What holds for all of them.
        given: What the command line says, which wins.
        folder: Where relative paths of the tables begin, "" for the current folder.
        path: The manifest, None without one.
        lines: The lines of its keys.
        under: The table that holds it, in a file of more.
        mistakes: What is wrong with its keys and their values; such keys are left out of the tables.
        doubtful: The entries of which, for these mistakes, nobody knows which files they are about.
    """

    tables: Mapping[int, Settings]
    defaults: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any]
    folder: str = ""
    path: Path | None = None
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    under: KeyPath = ()
    mistakes: Sequence[Mistake] = ()
    doubtful: frozenset[int] = frozenset()

    def place(self, index: int, key: str) -> KeyPath:
        """Where `key` of an entry is said."""
        own = getattr(self.tables[index], key) is not None
        return ("model", index, key) if own or key not in self.defaults else ("defaults", key)

    def error(self, mistakes: Iterable[Mistake], others: Iterable[str]) -> ManifestError:
        """All mistakes, and those of the rule files."""
        if self.path is None:
            told = list(dict.fromkeys(sentence for _, sentence in mistakes))
        else:
            told = [str(documents.mistaken(self.path, self.lines, mistakes, FORM, self.under))] if mistakes else []
        return ManifestError("\n".join([*told, *others]))


def find() -> Path:
    """The manifest of the current folder.

    Raises:
        UsageError: There is none.
    """
    own, project = Path(NAME), Path(PROJECT)
    if own.is_file():
        return own
    if project.is_file():
        data, _ = documents.parse(project, documents.read(project, FORM), FORM)
        if _inside(data) is not None:
            return project
    raise UsageError(
        f"There is no {NAME} here, nor a {PROJECT} with [tool.graphquant]. Name a manifest, or models and globs."
    )


def here() -> bool:
    """Whether the current folder has a manifest, with or without mistakes."""
    try:
        return find().is_file()
    except ManifestError:
        return True
    except UsageError:
        return False


def _inside(data: dict[str, Any]) -> Any:
    """What a pyproject.toml has as [tool.graphquant], None if it has nothing."""
    tool = data.get("tool")
    return tool.get("graphquant") if isinstance(tool, dict) else None


def read(path: Path, given: dict[str, Any]) -> Asked:
    """What the manifest at `path` says, with the mistakes of its keys and values.

    Args:
        path: The manifest.
        given: What the command line says.

    Raises:
        ManifestError: It is no TOML, or has no entries.
        UsageError: There is none.
    """
    if not path.exists():
        raise UsageError(f"There is no manifest {path}. Name one, or models and globs.")
    data, lines = documents.parse(path, documents.read(path, FORM), FORM)
    under: KeyPath = ()
    if path.name == PROJECT:
        under, data = _TOOL, _inside(data)
        if not isinstance(data, dict):
            raise UsageError(f"{path} has no table [tool.graphquant]. Put the manifest there, or into {NAME}.")
    _, mistakes = documents.check(data, Manifest, FORM)
    wrong = {key[:3] if key[:1] == ("model",) else key[:2] for key, _ in mistakes}
    defaults = _sound(data.get("defaults", {}), ("defaults",), wrong, Settings)
    listed = data.get("model", [])
    tables = {
        index: table
        for index, one in enumerate(listed if isinstance(listed, list) else [])
        if (table := _table(one, index, wrong)) is not None
    }
    asked = Asked(
        tables=tables,
        defaults={} if defaults is None else settings(defaults),
        given=given,
        folder="" if path.parent == Path() else path.parent.as_posix(),
        path=path,
        lines=lines,
        under=under,
        mistakes=mistakes,
        doubtful=_doubtful(tables, wrong),
    )
    if not mistakes and not tables:
        raise asked.error([((), "the manifest has no models. Give some: [[model]] and path = 'models/*.onnx'.")], [])
    return asked


def _table(one: Any, index: int, wrong: set[KeyPath]) -> Settings | None:
    """What is right in an entry, None if it is no table."""
    place: KeyPath = ("model", index)
    whole = _sound(one, place, wrong, ModelTable)
    if whole is not None or not isinstance(one, dict):
        return whole
    return _sound({key: said for key, said in one.items() if key in FORM.keys(Settings)}, place, wrong, Settings)


def _sound(data: Any, place: KeyPath, wrong: set[KeyPath], table: type[Settings]) -> Settings | None:
    """The table at `place` without the keys that are wrong, None if it is none."""
    if place in wrong or not isinstance(data, dict):
        return None
    found, _ = documents.check({key: said for key, said in data.items() if (*place, key) not in wrong}, table, FORM)
    return found


def _doubtful(tables: Iterable[int], wrong: set[KeyPath]) -> frozenset[int]:
    """The entries with a mistake in a key that says which files they are about, or that may have been meant to."""
    naming = [key for key in wrong if _names_files(str(key[-1]))]
    common = any(key[0] != "model" for key in naming)
    return frozenset(index for index in tables if common or any(key[:2] == ("model", index) for key in naming))


def _names_files(key: str) -> bool:
    nearest = get_close_matches(key[:100], FORM.keys(ModelTable), n=1, cutoff=0.5)
    return not nearest or nearest[0] in _NAMING


__all__ = ["NAME", "PROJECT", "Asked", "find", "here", "read"]
