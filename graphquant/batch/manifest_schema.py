"""Tables of a manifest, built from the options of `insert`, and their JSON Schema.

An option has the same name, unit and description in the manifest as in Python and on the command line, because
`EntrySettings` is generated from `InsertOptions`. pydantic validates the values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, TypeAdapter, field_validator
from pydantic.dataclasses import dataclass

from graphquant.backends import BACKENDS
from graphquant.calibration.targets import CALIBRATION_METHODS
from graphquant.errors import ManifestError, did_you_mean
from graphquant.qdq import FAMILIES
from graphquant.rules import DocumentKind, describe_table_schema
from graphquant.utils.option_types import Count, Decibels, SearchTime, Share, parse_bytes
from graphquant.utils.options import InsertOptions, OptionField, option_fields

DEFAULT_OUTPUT = "{parent}/{stem}.quant{suffix}"  # default path of an output

OMITTED_OPTIONS = {
    "plan": "a plan belongs to one model; `graphquant insert --plan` applies it",
    "validate": "a batch always validates, because its report and its gates need the metrics",
    "max_memory": "`graphquant batch --max-memory` limits the whole worker process",
    "runtime": "only Python has it; the suffix of an output selects its runtime",
}
"""Options of `insert` that a manifest does not have, with the reasons."""

_CONFIG = ConfigDict(extra="forbid")


def _reject_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("a name cannot contain the character NUL")
    return value


_Text = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_reject_nul)]
_TextList = Annotated[tuple[_Text, ...], Field(min_length=1, max_length=1000)]


def _setting_type(option: OptionField) -> Any:
    """Return the type of an option in TOML. TOML has types, so a string is not accepted as a number."""
    base = option.annotation
    if base is SearchTime:
        return base
    if get_origin(base) is Annotated:
        base = get_args(base)[0]
    if get_origin(base) is tuple:
        return _TextList
    if get_origin(base) is Literal:
        return base
    strict = {
        bool: StrictBool,
        Decibels: Annotated[StrictFloat, Field(allow_inf_nan=False)] | Literal["none"],
        Count: Annotated[StrictInt, Field(ge=1)],
        Share: Share,
    }
    return next((strict[member] for member in get_args(base) or [base] if member in strict), _Text)


_OPTIONS = {option.name: option for option in option_fields(InsertOptions) if option.name not in OMITTED_OPTIONS}

_LIST_KEYS = (
    *(name for name, option in _OPTIONS.items() if _setting_type(option) is _TextList),
    *("path", "exclude_models"),
)


class _SettingValidators:
    """Validators of the settings whose values depend on registries of the package."""

    @field_validator(*_LIST_KEYS, mode="before", check_fields=False)
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        if not isinstance(value, str | list | tuple | None):
            raise ValueError("expected a string or an array of strings")  # noqa: TRY004  # pydantic reports it
        return (value,) if isinstance(value, str) else value

    @field_validator("method", check_fields=False)
    @classmethod
    def _validate_method(cls, value: str | None) -> str | None:
        return _require_known("method", value, CALIBRATION_METHODS)

    @field_validator("family", check_fields=False)
    @classmethod
    def _validate_family(cls, value: str | None) -> str | None:
        return _require_known("family", value, FAMILIES)

    @field_validator("check", mode="before", check_fields=False)
    @classmethod
    def _validate_check(cls, value: Any) -> Any:
        if not isinstance(value, str | bool | None):
            raise ValueError("'check' is the name of a backend, true or false")  # noqa: TRY004  # pydantic reports it
        return _require_known("backend", value, BACKENDS) if isinstance(value, str) else value

    @field_validator("max_size", mode="before", check_fields=False)
    @classmethod
    def _validate_size(cls, value: Any) -> Any:
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise ValueError("'max_size' is a number of bytes, or a string like \"5MB\"")  # noqa: TRY004  # pydantic reports it
        return parse_bytes(value)


_BATCH_KEYS = {
    "output": (
        _Text,
        (
            'Path of the output, by default "{parent}/{stem}.quant{suffix}". `{stem}` and `{suffix}` are the parts of'
            " the model's name, `{parent}` is its folder, and `{variant}` the entry's variant."
        ),
    ),
    "max_size": (int, 'Maximum size of the output, in bytes or as "5MB".'),
    "check": (
        str | StrictBool,
        "Backend whose check must have no findings; true for the check without a backend, false for none.",
    ),
}
"""Types and descriptions of the keys that `insert` does not have."""

_SETTINGS = {name: (_setting_type(option), option.description) for name, option in _OPTIONS.items()} | _BATCH_KEYS

if TYPE_CHECKING:

    class EntrySettings:
        """Settings for a model; missing ones come from `[defaults]`."""

else:
    _DOC = "Settings for a model; missing ones come from `[defaults]`.\n\n    Attributes:\n"
    EntrySettings = dataclass(frozen=True, kw_only=True, config=_CONFIG)(
        type(
            "EntrySettings",
            (_SettingValidators,),
            {
                "__doc__": _DOC + "".join(f"        {name}: {text}\n" for name, (_, text) in _SETTINGS.items()),
                "__module__": __name__,
                "__annotations__": {name: annotation | None for name, (annotation, _) in _SETTINGS.items()},
                **dict.fromkeys(_SETTINGS),
            },
        )
    )


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class ModelTable(EntrySettings):
    """A model, or all models of a glob, with settings that differ from `[defaults]`.

    Attributes:
        path: One or several paths or globs, relative to the manifest; or an address for fsspec.
        exclude_models: Globs of models that `path` matches and that are skipped.
        variant: Name of the entry if another entry makes another output of the same model.
    """

    path: _TextList
    exclude_models: _TextList | None = None
    variant: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Manifest:
    """Models to quantize and their settings.

    Attributes:
        defaults: Settings of all models, unless their own entry differs.
        model: The models.
    """

    defaults: EntrySettings = Field(default_factory=EntrySettings)
    model: list[ModelTable] = Field(default_factory=list)


MANIFEST_FORM = DocumentKind(
    noun="manifest",
    example="path = 'models/*.onnx'",
    error_class=ManifestError,
    tables={"": Manifest, "defaults": EntrySettings, "model": ModelTable},
    table_labels={"": "a manifest", "defaults": "the defaults", "model": "a model's entry"},
    headings={
        "model": " The heading of an entry is [[model]].",
        "defaults": " The heading of the settings of all models is [defaults].",
    },
)
"""Names for messages and for the schema of manifests."""


def set_keys(table: EntrySettings) -> dict[str, Any]:
    """Return the keys that a table sets, with their values."""
    values = {name: getattr(table, name) for name in _SETTINGS}
    return {name: value for name, value in values.items() if value is not None}


def manifest_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of manifests."""
    json_schema = TypeAdapter(Manifest).json_schema()
    describe_table_schema(json_schema, Manifest)
    for table in (EntrySettings, ModelTable):
        node = json_schema["$defs"][table.__name__]
        describe_table_schema(node, table)
        entries = node["properties"]
        # The validators accept more than the types of the fields: one string for a list, a percentage for a share.
        for name in set(_LIST_KEYS) & set(entries):
            entries[name] = {
                "description": entries[name].pop("description"),
                "anyOf": [entries[name]["items"], entries[name]],
            }
        for name in ("min_agreement", "max_accuracy_drop", "min_quantized"):
            entries[name] = {
                "description": entries[name]["description"],
                "anyOf": [
                    {"type": "number", "minimum": 0, "maximum": 1},
                    {"type": "string", "pattern": r"^\d+(\.\d+)?%$"},
                ],
            }
        entries["method"]["enum"], entries["family"]["enum"] = list(CALIBRATION_METHODS), sorted(FAMILIES)
        entries["check"] = {
            "description": entries["check"]["description"],
            "anyOf": [{"enum": list(BACKENDS)}, {"type": "boolean"}],
        }
        entries["max_size"]["type"] = ["integer", "string"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **json_schema, "title": "graphquant manifest"}


def _require_known(noun: str, word: str | None, choices: Iterable[str]) -> str | None:
    """Return `word` if it is a known choice; otherwise raise a ValueError that suggests the nearest one."""
    if word is not None and word not in choices:
        hint = did_you_mean(word, choices) or f" Known are {', '.join(sorted(choices))}."
        raise ValueError(f"there is no {noun} {word!r}.{hint}")
    return word
