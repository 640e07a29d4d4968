"""Entries of a batch from a manifest, paths or globs. All mistakes are reported at once, with file and line."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from graphquant import rules
from graphquant.batch.manifest_schema import (
    DEFAULT_OUTPUT,
    MANIFEST_FORM,
    EntrySettings,
    Manifest,
    ModelTable,
    set_keys,
)
from graphquant.batch.remote import LOCAL_SCHEME, find_models, is_model_folder, suffix_of
from graphquant.batch.types import METRIC_GATES, PLAIN_OPTIONS, Entry, Gates
from graphquant.calibration.data import parse_data_sources
from graphquant.calibration.data.dataset import rebase_data_spec
from graphquant.calibration.data.files import is_remote
from graphquant.errors import DataError, ManifestError, RuleError, UsageError, did_you_mean
from graphquant.formats import KERAS_SUFFIXES, SUFFIXES
from graphquant.rules import KeyPath, Mistake, load_ruleset, rebase_rule_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class _SelectedModel:
    name: str
    index: int
    is_folder: bool

    def expand_placeholders(self, text: str, variant: str | None) -> str:
        """Replace the placeholders of a text; unknown ones by nothing."""
        parent, _, file_name = self.name.rpartition("/")
        suffix = "" if self.is_folder or suffix_of(file_name) not in SUFFIXES else suffix_of(file_name)
        values = {
            "stem": file_name.removesuffix(suffix),
            "suffix": "" if suffix in KERAS_SUFFIXES else suffix,  # Keras models are written as SavedModels
            "name": file_name,
            "parent": parent or ".",
            "variant": variant or "",
        }
        return _PLACEHOLDER.sub(lambda match: values.get(match[1], ""), text)


PLACEHOLDERS = ("stem", "suffix", "name", "parent", "variant")  # placeholders that may stand in braces

_FILE_OPTIONS = {
    "stats": "There is no statistics file {}. Create it with `graphquant calibrate`.",
    "ranges": "There is no file of ranges {}. Give the path of one.",
    "ranges_map": "There is no map of names {}. Give the path of one.",
}
"""Options with the path of a file, and the message if it is missing."""

TEMPLATE_KEYS = ("data", *_FILE_OPTIONS, "output")  # keys that may contain placeholders
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def load_entries(
    patterns: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    *,
    allow_code: bool = False,
    on_warning: Callable[[str], object] = str,
) -> list[Entry]:
    """Load the entries of a batch, in the order of the manifest; those of a glob sorted by path.

    Args:
        patterns: Paths and globs, or the path of one manifest; empty for the manifest of the current folder.
        overrides: Settings of the command line, by key of `EntrySettings`; they override the manifest.
        allow_code: True if the data of the manifest may be Python code, which is executed. A manifest cannot allow it
            itself, because it may come from a stranger.
        on_warning: Receives a message for each entry of the manifest that gets no model.

    Raises:
        ManifestError: The manifest has mistakes; the message lists all of them.
        MissingDependencyError: fsspec, or its package for a service, is not installed.
        UsageError: There is no manifest, or an option's value is invalid.
    """
    options, mistakes = rules.validate_document(dict(overrides or {}), EntrySettings, MANIFEST_FORM)
    if options is None:
        raise UsageError("\n".join(sentence for _, sentence in mistakes))
    overridden = set_keys(options)
    if not patterns or (len(patterns) == 1 and patterns[0].endswith(".toml")):
        request = read_manifest(Path(patterns[0]) if patterns else find_manifest(), overridden)
    else:
        table, mistakes = rules.validate_document({"path": list(dict.fromkeys(patterns))}, ModelTable, MANIFEST_FORM)
        if table is None:
            raise UsageError("\n".join(sentence for _, sentence in mistakes))
        tables = {index: ModelTable(path=(name,)) for index, name in enumerate(table.path)}
        request = BatchRequest(tables=tables, overrides=overridden)
    return _request_entries(request, allow_code=allow_code, on_warning=on_warning)


def _request_entries(request: BatchRequest, *, allow_code: bool, on_warning: Callable[[str], object]) -> list[Entry]:
    mistakes = list(request.mistakes)
    selected = [model for model in _select_models(request, mistakes) if model.index not in request.ambiguous]
    # Code on the command line is requested by the user.
    checks = _FileChecks(
        allow_data=allow_code or "data" in request.overrides, allow_metric=allow_code or "metric" in request.overrides
    )
    for index in request.tables:
        mistakes += _entry_mistakes(request, index, checks)
    entries = [(model, _build_entry(request, model, checks, mistakes)) for model in selected]
    mistakes = [mistake for mistake in [*mistakes, *_output_clashes(request, entries)] if mistake[1]]
    if mistakes or checks.failures:
        raise request.manifest_error(mistakes, checks.failures)
    for message in _unused_entries(request, selected) if request.path is not None else ():
        on_warning(str(request.manifest_error([message], ())))
    return [entry for _, entry in entries]


def _unused_entries(request: BatchRequest, selected: Sequence[_SelectedModel]) -> Iterator[Mistake]:
    """Yield the entries that match models and get none of them, because other entries have priority."""
    used = {model.index for model in selected}
    for index, table in request.tables.items():
        if index not in used and isinstance(table, ModelTable):
            taken = {
                name for pattern in table.path for name in _matching_models(request, index, "path", pattern, [])[0]
            }
            owners = sorted({model.index + 1 for model in selected if model.name in taken})
            reason = f"[[model]] {', '.join(map(str, owners))} has" if owners else "'exclude_models' names"
            message = (
                f"this entry gets no model, because {reason} all that it matches. Narrow that, or remove the entry."
            )
            yield ("model", index, "path"), message


def _select_models(request: BatchRequest, mistakes: list[Mistake]) -> list[_SelectedModel]:
    """Select each model with its table.

    For one variant, a path has priority over a glob, and an earlier glob over a later one.
    """
    table_by_model: dict[tuple[str | None, str], tuple[int, bool]] = {}
    for index, table in request.tables.items():
        if not isinstance(table, ModelTable):
            continue
        excluded = {
            name
            for pattern in table.exclude_models or ()
            for name in _matching_models(request, index, "exclude_models", pattern, mistakes)[0]
        }
        for pattern in table.path:
            names, exact = _matching_models(request, index, "path", pattern, mistakes)
            for name in names:
                key = (table.variant, name)
                earlier = table_by_model.get(key)
                if name in excluded and not exact:
                    continue
                if earlier is None or (exact and not earlier[1]):
                    table_by_model[key] = (index, exact)
                elif (
                    exact
                    and earlier[0] != index
                    and request.path is not None
                    and not request.ambiguous & {index, earlier[0]}
                ):
                    message = f"{name!r} has its own entry above. Give one of them a 'variant', or remove it."
                    mistakes.append((("model", index, "path"), message))
    return [
        _SelectedModel(name=name, index=index, is_folder=is_model_folder(name, request.folder))
        for (_, name), (index, _) in sorted(table_by_model.items(), key=lambda item: (item[1][0], item[0][1]))
    ]


def _matching_models(
    request: BatchRequest, index: int, key: str, pattern: str, mistakes: list[Mistake]
) -> tuple[Sequence[str], bool]:
    """Return the models that match a pattern; none, and a mistake, if nothing matches."""
    try:
        return find_models(pattern, request.folder)
    except UsageError as error:
        mistakes.append((("model", index, key), str(error)))
        return (), False


class _FileChecks:
    """Cached checks of rule files and data, and the errors in rule files. Each check returns a mistake, or ""."""

    def __init__(self, *, allow_data: bool, allow_metric: bool) -> None:
        self._allow_data, self.allow_metric = allow_data, allow_metric
        self.failures: dict[str, None] = {}
        self.rules, self.data = cache(self._check_rules), cache(self._check_data)

    def _check_rules(self, name: str) -> str:
        try:
            load_ruleset([name])
        except RuleError as error:
            self.failures |= dict.fromkeys(str(error).split("\n"))
        except UsageError as error:
            return str(error)
        return ""

    def _check_data(self, spec: str) -> str:
        try:
            sources = parse_data_sources(spec)
        except DataError as error:
            return str(error)
        is_code = any(source.kind == "function" for source in sources)
        return _code_refusal(f"data {spec}") if is_code and not self._allow_data else ""


def _code_refusal(subject: str) -> str:
    return (
        f"the {subject} is Python code, which graphquant would execute. If you trust the manifest, pass"
        " --allow-code on the command line."
    )


def _check_file(key: str, path: str) -> str:
    """Return the mistake in the path of an option, "" if valid."""
    return "" if Path(path).is_file() else _FILE_OPTIONS[key].format(path)


def _entry_settings(request: BatchRequest, index: int) -> dict[str, Any]:
    """Return all settings of an entry, with defaults and overrides. Data replaces the statistics of earlier layers."""
    merged: dict[str, Any] = {}
    for layer in (request.defaults, set_keys(request.tables[index]), request.overrides):
        if "data" in layer:
            merged.pop("stats", None)
        merged |= layer
    return merged


def _base_folder(request: BatchRequest, key: str) -> str:
    """Return the base folder of a relative path in `key`."""
    return "" if key in request.overrides else request.folder


def _entry_mistakes(request: BatchRequest, index: int, checks: _FileChecks) -> Iterator[Mistake]:
    """Yield the mistakes of an entry that do not depend on its models."""
    entry_settings, table = _entry_settings(request, index), request.tables[index]
    for name in rebase_rule_paths(entry_settings.get("rules", ()), _base_folder(request, "rules")):
        yield request.key_path(index, "rules"), checks.rules(name)
    for key in TEMPLATE_KEYS:
        for placeholder in _PLACEHOLDER.findall(entry_settings.get(key, "")):
            if placeholder not in PLACEHOLDERS:
                known = f" Known are {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}."
                hint = did_you_mean(placeholder, PLACEHOLDERS) or known
                yield request.key_path(index, key), f"there is no '{{{placeholder}}}'.{hint}"
    data = entry_settings.get("data")
    if data is not None and not _PLACEHOLDER.search(data):
        yield request.key_path(index, "data"), checks.data(rebase_data_spec(data, _base_folder(request, "data")))
    if (metric := entry_settings.get("metric")) is not None and not checks.allow_metric:
        yield request.key_path(index, "metric"), _code_refusal(f"metric {metric}")
    for key in _FILE_OPTIONS:
        path = entry_settings.get(key)
        if path is not None and not _PLACEHOLDER.search(path):
            yield request.key_path(index, key), _check_file(key, _join_path(_base_folder(request, key), path))
    lacks_data = data is None and _build_gates(entry_settings).needs_data
    if lacks_data and index not in request.ambiguous and isinstance(table, ModelTable):
        key = next(key for key in METRIC_GATES if key in entry_settings)
        message = f"{key!r} needs data, and there is none for {', '.join(table.path)}. Add 'data'."
        yield request.key_path(index, key), message


def _build_entry(request: BatchRequest, model: _SelectedModel, checks: _FileChecks, mistakes: list[Mistake]) -> Entry:
    """Build the entry of a model, and append mistakes of files named after it to `mistakes`."""
    table, entry_settings = request.tables[model.index], _entry_settings(request, model.index)
    variant = table.variant if isinstance(table, ModelTable) else None
    expanded = {
        key: model.expand_placeholders(entry_settings[key], variant) for key in TEMPLATE_KEYS if key in entry_settings
    }
    data = rebase_data_spec(expanded["data"], _base_folder(request, "data")) if "data" in expanded else None
    paths: dict[str, Any] = {
        key: _join_path(_base_folder(request, key), expanded[key]) for key in _FILE_OPTIONS if key in expanded
    }
    if data is not None:
        mistakes.append((request.key_path(model.index, "data"), checks.data(data)))
    mistakes += [(request.key_path(model.index, key), _check_file(key, path)) for key, path in paths.items()]
    output = expanded["output"] if "output" in expanded else model.expand_placeholders(DEFAULT_OUTPUT, variant)
    return Entry(
        name=f"{model.name} [{variant}]" if variant else model.name,
        model=_join_path(request.folder, model.name),
        output=_join_path(_base_folder(request, "output"), output),
        rules=rebase_rule_paths(entry_settings.get("rules", ()), _base_folder(request, "rules")),
        data=data,
        **paths,
        **{key: entry_settings[key] for key in PLAIN_OPTIONS if key in entry_settings},
        gates=_build_gates(entry_settings),
    )


def _build_gates(entry_settings: Mapping[str, Any]) -> Gates:
    check = entry_settings.get("check", False)
    bounds = {
        name: entry_settings[name]
        for name in (*METRIC_GATES, "strict", "min_quantized", "max_size")
        if name in entry_settings
    }
    return Gates(**bounds, check=check if isinstance(check, str) else "" if check else None)


def _join_path(folder: str, path: str) -> str:
    """Return a path relative to the current folder."""
    path = path.removeprefix(LOCAL_SCHEME)
    return path if is_remote(path) else posixpath.normpath(posixpath.join(folder, path))


def _output_clashes(request: BatchRequest, entries: Sequence[tuple[_SelectedModel, Entry]]) -> Iterator[Mistake]:
    """Yield outputs that would overwrite each other or a model."""
    models = {_real_path(entry.model): entry.model for _, entry in entries}
    outputs: dict[str, Entry] = {}
    for selected, entry in entries:
        output_path, key_path = _real_path(entry.output), request.key_path(selected.index, "output")
        if output_path in outputs:
            earlier = outputs[output_path]
            placeholder = "{variant}" if earlier.model == entry.model else "{parent}"
            message = f"{entry.output} is the output of {earlier.name} and of {entry.name}."
            yield key_path, f"{message} Put {placeholder} into 'output'."
        outputs.setdefault(output_path, entry)
        overwritten = next((models[path] for path in _path_and_parents(output_path) if path in models), None)
        if overwritten is not None:
            relation = "over" if output_path == _real_path(overwritten) else "into the folder of"
            message = (
                f"the output of {entry.name} would be written {relation} {overwritten}, which is a model. Give another"
                " 'output', or exclude that model."
            )
            yield key_path, message


def _real_path(path: str) -> str:
    return path if is_remote(path) else os.path.realpath(path)


def _path_and_parents(path: str) -> Iterator[str]:
    while path:
        yield path
        parent = path.rpartition("/")[0]
        path = parent if parent != path else ""


MANIFEST_NAME = "graphquant.toml"
PROJECT_FILE = "pyproject.toml"

_FILE_KEYS = ("path", "exclude_models", "variant", *TEMPLATE_KEYS)  # keys that select the files of an entry


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """Entries of a manifest or command line, before they are resolved to models."""

    tables: Mapping[int, EntrySettings]  # entries by index; one without a valid `path` is only `EntrySettings`
    defaults: dict[str, Any] = field(default_factory=dict)  # settings of all entries
    overrides: dict[str, Any]  # settings of the command line, which have priority
    folder: str = ""  # base folder of relative paths in the tables, "" for the current folder
    path: Path | None = None  # the manifest, None without one
    locate_keys: Callable[[], Mapping[KeyPath, int]] = dict  # returns the lines of its keys
    table_path: KeyPath = ()  # table that contains the manifest, in a larger file
    mistakes: Sequence[Mistake] = ()  # Invalid keys and values. The tables do not contain them.
    ambiguous: frozenset[int] = frozenset()  # entries whose files are unknown because of these mistakes

    def key_path(self, index: int, key: str) -> KeyPath:
        """Return the location of `key` for an entry: in the entry itself or in the defaults."""
        is_set = getattr(self.tables[index], key) is not None
        return ("model", index, key) if is_set or key not in self.defaults else ("defaults", key)

    def manifest_error(self, mistakes: Sequence[Mistake], rule_errors: Iterable[str]) -> ManifestError:
        """Return an error with all mistakes, and those of the rule files."""
        messages = list(dict.fromkeys(sentence for _, sentence in mistakes))
        if self.path is not None and messages:
            messages = [
                str(rules.mistakes_error(self.path, self.locate_keys, mistakes, MANIFEST_FORM, self.table_path))
            ]
        return ManifestError("\n".join([*messages, *rule_errors]))


def find_manifest() -> Path:
    """Return the manifest of the current folder."""
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

    Raises a ManifestError if it is not TOML, or has no entries, and a UsageError if it does not exist.
    """
    if not path.exists():
        raise UsageError(f"There is no manifest {path}. Give one, or models and globs.")
    data, locate = rules.parse_document(path, rules.read_document(path, MANIFEST_FORM), MANIFEST_FORM)
    table_path: KeyPath = ()
    if path.name == PROJECT_FILE:
        table_path, data = ("tool", "graphquant"), _tool_table(data)
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
        locate_keys=locate,
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
    settings = {key: value for key, value in data.items() if key in MANIFEST_FORM.keys(EntrySettings)}
    return _valid_table(settings, location, invalid_keys, EntrySettings)


def _valid_table(
    data: Any, location: KeyPath, invalid_keys: set[KeyPath], table: type[EntrySettings]
) -> EntrySettings | None:
    """Return the table at `location` without invalid keys, None if it is not a table."""
    if location in invalid_keys or not isinstance(data, dict):
        return None
    valid = {key: value for key, value in data.items() if (*location, key) not in invalid_keys}
    return rules.validate_document(valid, table, MANIFEST_FORM)[0]


def _ambiguous_entries(tables: Iterable[int], invalid_keys: set[KeyPath]) -> frozenset[int]:
    """Return the entries with a mistake in a key that selects files, or in a misspelled one."""
    file_keys = []
    for key in invalid_keys:
        nearest = get_close_matches(str(key[-1])[:100], MANIFEST_FORM.keys(ModelTable), n=1, cutoff=0.5)
        if not nearest or nearest[0] in _FILE_KEYS:
            file_keys.append(key)
    affects_all = any(key[0] != "model" for key in file_keys)
    return frozenset(index for index in tables if affects_all or any(key[:2] == ("model", index) for key in file_keys))
