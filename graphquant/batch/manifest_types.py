"""What a manifest says, as data; pydantic checks each value and gives the JSON Schema that editors complete from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, TypeAdapter, field_validator
from pydantic.dataclasses import dataclass

from graphquant.backends import BACKENDS
from graphquant.calibration import METHODS, parse_size
from graphquant.documents import Form, describe
from graphquant.errors import ManifestError, UsageError, did_you_mean
from graphquant.qdq import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterable

_FROZEN = ConfigDict(extra="forbid")


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("a name cannot hold the character NUL")
    return value


_Text = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_no_nul)]
_Texts = Annotated[tuple[_Text, ...], Field(min_length=1, max_length=1000)]
_Share = Annotated[StrictFloat, Field(ge=0, le=100)]

OUTPUT = "{parent}/{stem}.quant{suffix}"
"""Where an output goes by default."""

SEVERAL = ("rules", "include", "exclude", "path", "leave")
"""Keys that take one string or several."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class Settings:
    """What is to be done with a model; what is left out comes from `[defaults]`.

    Attributes:
        rules: Rule files, by name or path, in the order in which they are tried; by default the format's own.
        data: Calibration data, as in docs/data.md; `{stem}` and the like stand for parts of the model's path.
        stats: A statistics file that ranges come from; likewise. The data is then for the bounds below, and for
            corrections if the statistics are of it.
        samples: Use only that many samples.
        method: The observer of all activations whose range comes from data, instead of what the rules say.
        family: The QDQ family for schemes that name none.
        include: Globs or /regexes/; only what they name is quantized.
        exclude: Globs or /regexes/; what they name is left.
        float_weights: Keep weights float, with a whole QDQ pair.
        output: Where the output goes, by default "{parent}/{stem}.quant{suffix}": `{stem}` and `{suffix}` are the
            model's name in two parts, `{parent}` its folder, `{variant}` what the entry says of itself.
        min_sqnr: Least signal to noise of the worst output, dB.
        min_agreement: Least agreement of the worst output, percent.
        max_accuracy_drop: Most that accuracy may lose, percent points; the data must have labels.
        max_size: Largest output, in bytes or as "5MB".
        check: The backend whose check must find nothing; true for the check that is of no backend, false for
            none.
    """

    rules: _Texts | None = None
    data: _Text | None = None
    stats: _Text | None = None
    samples: Annotated[StrictInt, Field(ge=1)] | None = None
    method: _Text | None = None
    family: _Text | None = None
    include: _Texts | None = None
    exclude: _Texts | None = None
    float_weights: StrictBool | None = None
    output: _Text | None = None
    min_sqnr: Annotated[StrictFloat, Field(allow_inf_nan=False)] | None = None
    min_agreement: _Share | None = None
    max_accuracy_drop: _Share | None = None
    max_size: int | None = None
    check: str | StrictBool | None = None

    @field_validator(*SEVERAL, mode="before", check_fields=False)
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        if not isinstance(value, str | list | tuple | None):
            raise ValueError("a string or an array of strings is wanted here")  # noqa: TRY004  # told by pydantic
        return (value,) if isinstance(value, str) else value

    @field_validator("method")
    @classmethod
    def _method(cls, value: str | None) -> str | None:
        return _known("method", value, METHODS)

    @field_validator("family")
    @classmethod
    def _family(cls, value: str | None) -> str | None:
        return _known("family", value, FAMILIES)

    @field_validator("check", mode="before")
    @classmethod
    def _check(cls, value: Any) -> Any:
        if not isinstance(value, str | bool | None):
            raise ValueError("'check' is the name of a backend, true or false")  # noqa: TRY004  # told by pydantic
        return _known("backend", value, BACKENDS) if isinstance(value, str) else value

    @field_validator("max_size", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise ValueError("'max_size' is a number of bytes, or a string like \"5MB\"")  # noqa: TRY004  # told by pydantic
        try:
            return parse_size(str(value))
        except UsageError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class ModelTable(Settings):
    """A model, or all that a glob names, and what is to be done differently from `[defaults]`.

    Attributes:
        path: Path or glob, one or several, relative to the manifest; or an address for fsspec.
        leave: Globs of models that the globs of `path` name and that are left out.
        variant: A name for this entry where another one makes another output of the same model.
    """

    path: _Texts
    leave: _Texts | None = None
    variant: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class Manifest:
    """Which models to quantize, and how.

    Attributes:
        defaults: What is done with every model, but for what its own entry says.
        model: The models.
    """

    defaults: Settings = Field(default_factory=Settings)
    model: list[ModelTable] = Field(default_factory=list)


FORM = Form(
    noun="manifest",
    example="path = 'models/*.onnx'",
    error=ManifestError,
    tables={"": Manifest, "defaults": Settings, "model": ModelTable},
    names={"": "a manifest", "defaults": "the defaults", "model": "a model's entry"},
    headings={
        "model": " An entry is headed [[model]].",
        "defaults": " What holds for all models is headed [defaults].",
    },
)
"""What messages and the schema say of manifests."""


def settings(table: Settings) -> dict[str, Any]:
    """The keys that a table has, with their values."""
    values = {name: getattr(table, name) for name in _KEYS}
    return {name: value for name, value in values.items() if value is not None}


_KEYS = tuple(item.name for item in dataclasses.fields(Settings))


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of manifests."""
    made = TypeAdapter(Manifest).json_schema()
    describe(made, Manifest)
    for table in (Settings, ModelTable):
        node = made["$defs"][table.__name__]
        describe(node, table)
        entries = node["properties"]
        for name in SEVERAL:
            if name in entries:
                entries[name] = {
                    "description": entries[name].pop("description"),
                    "anyOf": [entries[name]["items"], entries[name]],
                }
        entries["method"]["enum"], entries["family"]["enum"] = list(METHODS), sorted(FAMILIES)
        entries["check"] = {
            "description": entries["check"]["description"],
            "anyOf": [{"enum": list(BACKENDS)}, {"type": "boolean"}],
        }
        entries["max_size"]["type"] = ["integer", "string"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": "graphquant manifest"}


def _known(what: str, word: str | None, known: Iterable[str]) -> str | None:
    """`word`, which is one of `known`; else a ValueError that names the nearest."""
    if word is not None and word not in known:
        close = did_you_mean(word, known) or f" Known are {', '.join(sorted(known))}."
        raise ValueError(f"there is no {what} {word!r}.{close}")
    return word
