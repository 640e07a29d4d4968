"""Tables of a manifest. pydantic validates the values, and generates the JSON Schema for editors."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, TypeAdapter, field_validator
from pydantic.dataclasses import dataclass

from graphquant.backends import BACKENDS
from graphquant.calibration import CALIBRATION_METHODS, parse_size
from graphquant.errors import ManifestError, UsageError, did_you_mean
from graphquant.qdq import FAMILIES
from graphquant.rules import DocumentKind, describe_table_schema

if TYPE_CHECKING:
    from collections.abc import Iterable


_STRICT_CONFIG = ConfigDict(extra="forbid")


def _reject_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("a name cannot contain the character NUL")
    return value


_TextValue = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_reject_nul)]
_TextList = Annotated[tuple[_TextValue, ...], Field(min_length=1, max_length=1000)]
_Percent = Annotated[StrictFloat, Field(ge=0, le=100)]

DEFAULT_OUTPUT = "{parent}/{stem}.quant{suffix}"
"""Default path of an output."""

LIST_KEYS = ("rules", "include", "exclude", "path", "leave")
"""Keys that take one string or several."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT_CONFIG)
class EntrySettings:
    """Settings for a model; missing ones come from `[defaults]`.

    Attributes:
        rules: Rule files by name or path, in order of priority; by default those of the format.
        data: Calibration data, as in docs/data.md. `{stem}` and other placeholders stand for parts of the model's path.
        stats: Statistics file for ranges, with placeholders too. `data` is then used for the bounds below, and for
            optimization algorithms if the statistics come from it.
        samples: Maximum number of samples.
        method: Observer of all calibrated activations, instead of those of the rules.
        family: QDQ family for schemes without one.
        include: Globs or /regexes/; only matching ops are quantized.
        exclude: Globs or /regexes/; matching ops stay float.
        float_weights: Keep weights float, with a complete QDQ pair.
        output: Path of the output, by default "{parent}/{stem}.quant{suffix}". `{stem}` and `{suffix}` are the parts of
            the model's name, `{parent}` is its folder, and `{variant}` the entry's variant.
        min_sqnr: Minimum signal-to-noise ratio of the worst output, dB.
        min_agreement: Minimum agreement of the worst output, percent.
        max_accuracy_drop: Maximum loss of accuracy, percentage points; the data must have labels.
        max_size: Maximum size of the output, in bytes or as "5MB".
        check: Backend whose check must have no findings; true for the check without a backend, false for none.
    """

    rules: _TextList | None = None
    data: _TextValue | None = None
    stats: _TextValue | None = None
    samples: Annotated[StrictInt, Field(ge=1)] | None = None
    method: _TextValue | None = None
    family: _TextValue | None = None
    include: _TextList | None = None
    exclude: _TextList | None = None
    float_weights: StrictBool | None = None
    output: _TextValue | None = None
    min_sqnr: Annotated[StrictFloat, Field(allow_inf_nan=False)] | None = None
    min_agreement: _Percent | None = None
    max_accuracy_drop: _Percent | None = None
    max_size: int | None = None
    check: str | StrictBool | None = None

    @field_validator(*LIST_KEYS, mode="before", check_fields=False)
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        if not isinstance(value, str | list | tuple | None):
            raise ValueError("expected a string or an array of strings")  # noqa: TRY004  # pydantic reports it
        return (value,) if isinstance(value, str) else value

    @field_validator("method")
    @classmethod
    def _validate_method(cls, value: str | None) -> str | None:
        return _require_known("method", value, CALIBRATION_METHODS)

    @field_validator("family")
    @classmethod
    def _validate_family(cls, value: str | None) -> str | None:
        return _require_known("family", value, FAMILIES)

    @field_validator("check", mode="before")
    @classmethod
    def _validate_check(cls, value: Any) -> Any:
        if not isinstance(value, str | bool | None):
            raise ValueError("'check' is the name of a backend, true or false")  # noqa: TRY004  # pydantic reports it
        return _require_known("backend", value, BACKENDS) if isinstance(value, str) else value

    @field_validator("max_size", mode="before")
    @classmethod
    def _validate_size(cls, value: Any) -> Any:
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise ValueError("'max_size' is a number of bytes, or a string like \"5MB\"")  # noqa: TRY004  # pydantic reports it
        try:
            return parse_size(str(value))
        except UsageError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT_CONFIG)
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


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT_CONFIG)
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
        "model": " An entry is headed [[model]].",
        "defaults": " What holds for all models is headed [defaults].",
    },
)
"""Names for messages and for the schema of manifests."""


def set_keys(table: EntrySettings) -> dict[str, Any]:
    """Return the keys that a table sets, with their values."""
    values = {name: getattr(table, name) for name in _SETTING_NAMES}
    return {name: value for name, value in values.items() if value is not None}


_SETTING_NAMES = tuple(setting_field.name for setting_field in dataclasses.fields(EntrySettings))


def manifest_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of manifests."""
    json_schema = TypeAdapter(Manifest).json_schema()
    describe_table_schema(json_schema, Manifest)
    for table in (EntrySettings, ModelTable):
        node = json_schema["$defs"][table.__name__]
        describe_table_schema(node, table)
        entries = node["properties"]
        for name in LIST_KEYS:
            if name in entries:
                entries[name] = {
                    "description": entries[name].pop("description"),
                    "anyOf": [entries[name]["items"], entries[name]],
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
