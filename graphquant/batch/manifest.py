"""From a manifest, or paths and globs, to the entries of a batch: all mistakes at once, each with file and line."""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant import documents
from graphquant.batch.asked import Asked, find, read
from graphquant.batch.manifest_types import FORM, OUTPUT, ModelTable, Settings, settings
from graphquant.batch.models_at import HERE, folder_of, models_at, suffix_of
from graphquant.batch.types import Entry, Gates
from graphquant.data import check_spec
from graphquant.data.files import remote
from graphquant.data.spec import moved
from graphquant.errors import DataError, RuleError, UsageError, did_you_mean
from graphquant.formats import KERAS, SUFFIXES
from graphquant.ruleset import load_ruleset, moved_rules

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from graphquant.documents import Mistake


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

FILLED = ("data", "stats", "output")
"""Keys in which braces may stand."""

_BRACES = re.compile(r"\{([^{}]*)\}")


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
        asked = read(Path(names[0]) if names else find(), said)
    else:
        table, mistakes = documents.check({"path": list(dict.fromkeys(names))}, ModelTable, FORM)
        if table is None:
            raise UsageError("\n".join(sentence for _, sentence in mistakes))
        tables = {index: ModelTable(path=(name,)) for index, name in enumerate(table.path)}
        asked = Asked(tables=tables, given=said)
    return _entries(asked)


def _entries(asked: Asked) -> list[Entry]:
    mistakes = list(asked.mistakes)
    chosen = [one for one in _chosen(asked, mistakes) if one.index not in asked.doubtful]
    looked = _Looked()
    for index in asked.tables:
        mistakes += _mistakes(asked, index, looked)
    made = [(one, _entry(asked, one, looked, mistakes)) for one in chosen]
    mistakes = [one for one in [*mistakes, *_clashes(asked, made)] if one[1]]
    if mistakes or looked.failures:
        raise asked.error(mistakes, looked.failures)
    return [entry for _, entry in made]


# -- which models --------------------------------------------------------------------------------


def _chosen(asked: Asked, mistakes: list[Mistake]) -> list[_Chosen]:
    """Each model with its table: of one variant a path wins over a glob, and an earlier glob over a later."""
    found: dict[tuple[str | None, str], tuple[int, bool]] = {}
    for index, table in asked.tables.items():
        if not isinstance(table, ModelTable):
            continue
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
                elif exact and other[0] != index and asked.path is not None and not asked.doubtful & {index, other[0]}:
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


def _named(asked: Asked, index: int, key: str, pattern: str, mistakes: list[Mistake]) -> tuple[Sequence[str], bool]:
    """The models that a pattern names, none with a mistake where it names nothing."""
    try:
        return models_at(pattern, asked.folder)
    except UsageError as error:
        mistakes.append((("model", index, key), str(error)))
        return (), False


# -- what is done with each ----------------------------------------------------------------------


class _Looked:
    """Rule files, data and statistics that were looked at, each once, and what is wrong with rule files themselves."""

    def __init__(self) -> None:
        self.failures: dict[str, None] = {}
        self.rules, self.data = cache(self._rules), cache(self._data)

    def _rules(self, name: str) -> str:
        """What is wrong with how rules are named, "" if nothing is."""
        try:
            load_ruleset([name])
        except RuleError as error:
            self.failures |= dict.fromkeys(str(error).split("\n"))
        except UsageError as error:
            return str(error)
        return ""

    @staticmethod
    def _data(spec: str) -> str:
        """What is wrong with a data spec, "" if nothing is."""
        try:
            check_spec(spec)
        except DataError as error:
            return str(error)
        return ""

    @staticmethod
    def stats(path: str) -> str:
        """What is wrong with the path of a statistics file, "" if nothing is."""
        if Path(path).is_file():
            return ""
        return f"There is no statistics file {path}. Make it with `graphquant calibrate`."


def _said(asked: Asked, index: int) -> dict[str, Any]:
    """All that is said of an entry's models."""
    return _layered(asked.defaults, settings(asked.tables[index]), asked.given)


def _start(asked: Asked, key: str) -> str:
    """Where a relative path that `key` says begins."""
    return "" if key in asked.given else asked.folder


def _mistakes(asked: Asked, index: int, looked: _Looked) -> Iterator[Mistake]:
    """What is wrong with an entry, whatever its models are."""
    said, table = _said(asked, index), asked.tables[index]
    for name in moved_rules(said.get("rules", ()), _start(asked, "rules")):
        yield asked.place(index, "rules"), looked.rules(name)
    for key in FILLED:
        yield from ((asked.place(index, key), told) for told in _unfilled(said.get(key, "")))
    data, stats = said.get("data"), said.get("stats")
    if data is not None and not _BRACES.search(data):
        yield asked.place(index, "data"), looked.data(moved(data, _start(asked, "data")))
    if stats is not None and not _BRACES.search(stats):
        yield asked.place(index, "stats"), looked.stats(_joined(_start(asked, "stats"), stats))
    if data is None and _gates(said).measures and index not in asked.doubtful and isinstance(table, ModelTable):
        key = next(key for key in ("min_sqnr", "min_agreement", "max_accuracy_drop") if key in said)
        told = f"{key!r} is measured on data, and none is named for {', '.join(table.path)}. Give it 'data'."
        yield asked.place(index, key), told


def _entry(asked: Asked, one: _Chosen, looked: _Looked, mistakes: list[Mistake]) -> Entry:
    """The entry of a model; what is wrong with files that are named after it goes to `mistakes`."""
    table, said = asked.tables[one.index], _said(asked, one.index)
    variant = table.variant if isinstance(table, ModelTable) else None
    filled = {key: _filled(said[key], one, variant) for key in FILLED if key in said}
    data = moved(filled["data"], _start(asked, "data")) if "data" in filled else None
    stats = _joined(_start(asked, "stats"), filled["stats"]) if "stats" in filled else None
    if data is not None:
        mistakes.append((asked.place(one.index, "data"), looked.data(data)))
    if stats is not None:
        mistakes.append((asked.place(one.index, "stats"), looked.stats(stats)))
    output = filled["output"] if "output" in filled else _filled(OUTPUT, one, variant)
    return Entry(
        name=f"{one.name} [{variant}]" if variant else one.name,
        model=_joined(asked.folder, one.name),
        output=_joined(_start(asked, "output"), output),
        rules=moved_rules(said.get("rules", ()), _start(asked, "rules")),
        data=data,
        stats=stats,
        samples=said.get("samples"),
        method=said.get("method"),
        family=said.get("family"),
        include=said.get("include", ()),
        exclude=said.get("exclude", ()),
        float_weights=said.get("float_weights", False),
        gates=_gates(said),
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


def _filled(text: str, one: _Chosen, variant: str | None) -> str:
    """`text` with what its braces stand for; nothing for those that stand for nothing."""
    return _BRACES.sub(lambda found: one.part(found[1], variant) if found[1] in PARTS else "", text)


def _unfilled(text: str) -> Iterator[str]:
    """What is wrong with the braces of a text."""
    for found in _BRACES.finditer(text):
        if found[1] not in PARTS:
            known = did_you_mean(found[1], PARTS) or f" Known are {', '.join(f'{{{name}}}' for name in PARTS)}."
            yield f"there is no {found[0]!r}.{known}"


def _joined(folder: str, path: str) -> str:
    """`path` as it is named from the current folder."""
    path = path.removeprefix(HERE)
    return path if remote(path) else posixpath.normpath(posixpath.join(folder, path))


# -- what they write -----------------------------------------------------------------------------


def _clashes(asked: Asked, made: Sequence[tuple[_Chosen, Entry]]) -> Iterator[Mistake]:
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
