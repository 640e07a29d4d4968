"""From a manifest, or paths and globs, to the entries of a batch: all mistakes at once, each with file and line."""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant import documents
from graphquant.batch.manifest_types import FORM, OUTPUT, Manifest, ModelTable, Settings, settings
from graphquant.batch.models_at import HERE, folder_of, models_at, suffix_of
from graphquant.batch.types import Entry, Gates
from graphquant.data import check_spec
from graphquant.data.files import remote
from graphquant.data.spec import moved
from graphquant.errors import DataError, ManifestError, RuleError, UsageError, did_you_mean
from graphquant.formats import KERAS, SUFFIXES
from graphquant.ruleset import load_ruleset, moved_rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from graphquant.documents import KeyPath, Mistake

NAME = "graphquant.toml"
PROJECT = "pyproject.toml"

_TOOL: KeyPath = ("tool", "graphquant")
"""Where a manifest stands in a pyproject.toml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a manifest, or the command line, asks for.

    Attributes:
        tables: The entries.
        defaults: What holds for all of them.
        given: What the command line says, which wins.
        folder: Where relative paths of the tables begin, "" for the current folder.
        path: The manifest, None without one.
        lines: The lines of its keys.
        under: The table that holds it, in a file of more.
    """

    tables: Sequence[ModelTable]
    defaults: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any]
    folder: str = ""
    path: Path | None = None
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    under: KeyPath = ()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """A model of the batch: its name, and which table is for it."""

    name: str
    index: int
    folder: bool

    def part(self, key: str, variant: str | None) -> str:
        """What `{key}` stands for."""
        above, _, own = self.name.rpartition("/")
        suffix = "" if self.folder or suffix_of(own) not in SUFFIXES else suffix_of(own)
        stem = own.removesuffix(suffix)
        return {
            "stem": stem,
            "suffix": "" if suffix in KERAS else suffix,  # a Keras model is written as a SavedModel
            "name": own,
            "parent": above or ".",
            "variant": variant or "",
        }[key]


PARTS = ("stem", "suffix", "name", "parent", "variant")
"""What may stand in braces."""


def entries(names: Sequence[str] = (), given: Mapping[str, Any] | None = None) -> list[Entry]:
    """The entries of a batch, in the order of the manifest, those of a glob by path.

    Args:
        names: Paths and globs, or the path of one manifest; none for that of the current folder.
        given: What the command line says, by key of `Settings`; it wins over what a manifest says.

    Raises:
        ManifestError: There are mistakes; the message has all of them, a line each.
        MissingDependencyError: fsspec, or what it needs, is not installed.
        UsageError: There is no manifest, or an option's value is none.
    """
    options, mistakes = documents.check(dict(given or {}), Settings, FORM)
    if options is None:
        raise UsageError("\n".join(sentence for _, sentence in mistakes))
    said = settings(options)
    if not names or (len(names) == 1 and names[0].endswith(".toml")):
        asked = _read(Path(names[0]) if names else find(), said)
    else:
        table, mistakes = documents.check({"path": list(dict.fromkeys(names))}, ModelTable, FORM)
        if table is None:
            raise UsageError("\n".join(sentence for _, sentence in mistakes))
        asked = _Asked(tables=[ModelTable(path=(name,)) for name in table.path], given=said)
    return _entries(asked)


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


def _read(path: Path, given: dict[str, Any]) -> _Asked:
    """What the manifest at `path` says."""
    if not path.exists():
        raise UsageError(f"There is no manifest {path}. Name one, or models and globs.")
    data, lines = documents.parse(path, documents.read(path, FORM), FORM)
    under: KeyPath = ()
    if path.name == PROJECT:
        under, data = _TOOL, _inside(data)
        if not isinstance(data, dict):
            raise UsageError(f"{path} has no table [tool.graphquant]. Put the manifest there, or into {NAME}.")
    manifest, mistakes = documents.check(data, Manifest, FORM)
    if manifest is None:
        raise documents.mistaken(path, lines, mistakes, FORM, under)
    asked = _Asked(
        tables=manifest.model,
        defaults=settings(manifest.defaults),
        given=given,
        folder="" if path.parent == Path() else path.parent.as_posix(),
        path=path,
        lines=lines,
        under=under,
    )
    if not manifest.model:
        raise asked.error([((), "the manifest has no models. Give some: [[model]] and path = 'models/*.onnx'.")], [])
    return asked


def _entries(asked: _Asked) -> list[Entry]:
    mistakes: list[Mistake] = []
    chosen = _chosen(asked, mistakes)
    rules = _Rules()
    specs: dict[str, str] = {}
    made = [(one, _entry(asked, one, rules, specs, mistakes)) for one in chosen]
    mistakes += _clashes(asked, made)
    if mistakes or rules.failures:
        raise asked.error(mistakes, rules.failures)
    return [entry for _, entry in made]


# -- which models --------------------------------------------------------------------------------


def _chosen(asked: _Asked, mistakes: list[Mistake]) -> list[_Chosen]:
    """Each model with its table: of one variant a path wins over a glob, and an earlier glob over a later."""
    found: dict[tuple[str | None, str], tuple[int, bool]] = {}
    for index, table in enumerate(asked.tables):
        left = {name for pattern in table.leave or () for name in _named(asked, index, "leave", pattern, mistakes)[0]}
        for pattern in table.path:
            names, exact = _named(asked, index, "path", pattern, mistakes)
            for name in names:
                key = (table.variant, name)
                other = found.get(key)
                if name in left and not exact:
                    continue
                if other is None or (exact and not other[1]):
                    found[key] = (index, exact)
                elif exact and other[0] != index and asked.path is not None:
                    mistakes.append(
                        (
                            ("model", index, "path"),
                            f"{name!r} has an entry of its own above. Give one of them a 'variant', or take it out.",
                        )
                    )
    order = sorted(found, key=lambda key: (found[key][0], key[1]))
    return [
        _Chosen(name=key[1], index=found[key][0], folder=folder_of(key[1], asked.folder).is_folder(key[1]))
        for key in order
    ]


def _named(asked: _Asked, index: int, key: str, pattern: str, mistakes: list[Mistake]) -> tuple[Sequence[str], bool]:
    """The models that a pattern names, none with a mistake where it names nothing."""
    try:
        return models_at(pattern, asked.folder)
    except UsageError as error:
        mistakes.append((("model", index, key), str(error)))
        return (), False


# -- what is done with each ----------------------------------------------------------------------


class _Rules:
    """Rule files that were looked at, and what is wrong with them."""

    def __init__(self) -> None:
        self.failures: dict[str, None] = {}
        self._seen: dict[tuple[str, ...], str] = {}

    def mistake(self, names: tuple[str, ...]) -> str:
        """What is wrong with how they are named, "" if nothing is."""
        if names not in self._seen:
            self._seen[names] = ""
            try:
                load_ruleset(names)
            except RuleError as error:
                self.failures |= dict.fromkeys(str(error).split("\n"))
            except UsageError as error:
                self._seen[names] = str(error)
        return self._seen[names]


def _entry(asked: _Asked, one: _Chosen, rules: _Rules, specs: dict[str, str], mistakes: list[Mistake]) -> Entry:
    """The entry of a model; what is wrong with it goes to `mistakes`."""
    table = asked.tables[one.index]
    said = _layered(asked.defaults, settings(table), asked.given)

    def wrong(key: str, sentence: str) -> None:
        mistakes.append((asked.place(one.index, key), sentence))

    def filled(key: str, default: str | None = None) -> str | None:
        text = said.get(key, default)
        return None if text is None else _filled(text, one, table.variant, lambda sentence: wrong(key, sentence))

    def start(key: str) -> str:
        return "" if key in asked.given else asked.folder

    named = moved_rules(said.get("rules", ()), start("rules"))
    data, stats = filled("data"), filled("stats")
    data = moved(data, start("data")) if data is not None else None
    stats = _joined(start("stats"), stats) if stats is not None else None
    if told := rules.mistake(named):
        wrong("rules", told)
    if data is not None and (told := _spec_mistake(data, specs)):
        wrong("data", told)
    if stats is not None and not Path(stats).is_file():
        wrong("stats", f"There is no statistics file {stats}. Make it with `graphquant calibrate`.")
    gates = _gates(said)
    if gates.measures and data is None:
        key = next(key for key in ("min_sqnr", "min_agreement", "max_accuracy_drop") if key in said)
        wrong(key, f"{key!r} is measured on data, and none is named for {one.name}. Give it 'data'.")
    return Entry(
        name=f"{one.name} [{table.variant}]" if table.variant else one.name,
        model=_joined(asked.folder, one.name),
        output=_joined(start("output"), filled("output", OUTPUT) or ""),
        rules=named,
        data=data,
        stats=stats,
        samples=said.get("samples"),
        method=said.get("method"),
        family=said.get("family"),
        include=said.get("include", ()),
        exclude=said.get("exclude", ()),
        float_weights=said.get("float_weights", False),
        gates=gates,
    )


def _layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of all layers, the last one's winning; data takes the place of statistics that an earlier one has."""
    said: dict[str, Any] = {}
    for layer in layers:
        if "data" in layer:
            said.pop("stats", None)
        said |= layer
    return said


def _gates(said: Mapping[str, Any]) -> Gates:
    check = said.get("check", False)
    return Gates(
        min_sqnr=said.get("min_sqnr"),
        min_agreement=said.get("min_agreement"),
        max_accuracy_drop=said.get("max_accuracy_drop"),
        max_size=said.get("max_size"),
        check=check if isinstance(check, str) else "" if check else None,
    )


def _filled(text: str, one: _Chosen, variant: str | None, wrong: Any) -> str:
    """`text` with what its braces stand for."""

    def part(found: re.Match[str]) -> str:
        if found[1] in PARTS:
            return one.part(found[1], variant)
        known = did_you_mean(found[1], PARTS) or f" Known are {', '.join(f'{{{name}}}' for name in PARTS)}."
        wrong(f"there is no {found[0]!r}.{known}")
        return ""

    return re.sub(r"\{([^{}]*)\}", part, text)


def _spec_mistake(spec: str, seen: dict[str, str]) -> str:
    """What is wrong with a data spec, "" if nothing is."""
    if spec not in seen:
        seen[spec] = ""
        try:
            check_spec(spec)
        except DataError as error:
            seen[spec] = str(error)
    return seen[spec]


def _joined(folder: str, path: str) -> str:
    """`path` as it is named from the current folder."""
    path = path.removeprefix(HERE)
    return path if remote(path) else posixpath.normpath(posixpath.join(folder, path))


# -- what they write -----------------------------------------------------------------------------


def _clashes(asked: _Asked, made: Sequence[tuple[_Chosen, Entry]]) -> Iterator[Mistake]:
    """Outputs that would take the place of one another, or of a model."""
    models = {_real(entry.model): entry.model for _, entry in made}
    outputs: dict[str, Entry] = {}
    for one, entry in made:
        where, place = _real(entry.output), asked.place(one.index, "output")
        if where in outputs:
            other = outputs[where]
            advice = "{variant}" if other.model == entry.model else "{parent}"
            yield (
                place,
                f"{entry.output} is the output of {other.name} and of {entry.name}. Put {advice} into 'output'.",
            )
        outputs.setdefault(where, entry)
        over = next((model for path in _upwards(where) if (model := models.get(path)) is not None), None)
        if over is not None:
            into = "over" if where == _real(over) else "into the folder of"
            yield (
                place,
                (
                    f"the output of {entry.name} would be written {into} {over}, which is a model. Give another"
                    " 'output', or leave that model out."
                ),
            )


def _real(path: str) -> str:
    return path if remote(path) else os.path.realpath(path)


def _upwards(path: str) -> Iterator[str]:
    """`path` and the folders around it."""
    while path:
        yield path
        above = path.rpartition("/")[0]
        path = above if above != path else ""
