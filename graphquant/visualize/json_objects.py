"""Base classes of the JSON's pydantic models, their field types, and the objects that several results share.

A model reads its values from the attributes of the result that it shows, so a new key is one more line.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from graphquant.numerics import QParams
from graphquant.visualize import JSON_SCHEMA_VERSION


class _Source:
    """A result, with itself as the attribute `itself`, for keys that combine several of its attributes."""

    def __init__(self, result: object) -> None:
        self.itself = result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.itself, name)


class JsonObject(BaseModel):
    """An object of the JSON."""

    model_config = ConfigDict(frozen=True, from_attributes=True, json_schema_serialization_defaults_required=True)

    @model_validator(mode="before")
    @classmethod
    def _wrap_source(cls, source: Any) -> Any:
        return source if isinstance(source, dict) else _Source(source)


class JsonResult(JsonObject):
    """The result of a command."""

    schema_version: int = Field(JSON_SCHEMA_VERSION, serialization_alias="schema")

    def as_json(self) -> dict[str, Any]:
        """Return the JSON data."""
        return self.model_dump(mode="json", by_alias=True)


def at(path: str, *default: Any) -> Any:
    """Declare a key whose value is at a path of attributes, such as "params.type.name", or else the default."""
    first, *others = (int(part) if part.isdigit() else part for part in path.split("."))
    return Field(*default, validation_alias=AliasPath(str(first), *others))


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _finite_ends(ends: Any) -> Any:
    """Return the ends of a tensor or of its channels; null without finite values."""
    values = [_finite_or_none(value) for value in ends.reshape(-1).tolist()]
    return values if ends.ndim else values[0]


def if_set(name: str) -> BeforeValidator:
    """Replace an object without this value by null."""

    def check(source: Any) -> Any:
        value = getattr(source, name)
        return None if value is None or value == "" else source  # 0 is a value

    return BeforeValidator(check)


def _named(*keys: str) -> BeforeValidator:
    """Turn a tuple into an object with these keys."""
    return BeforeValidator(lambda values: values and dict(zip(keys, values, strict=True)))


Text = Annotated[str, BeforeValidator(str)]
OptionalText = Annotated[str | None, BeforeValidator(lambda value: str(value) if value else None)]
Finite = Annotated[float | None, BeforeValidator(_finite_or_none)]
Metric = Annotated[Finite, AfterValidator(lambda value: None if value is None else float(f"{value:.6g}"))]
"""A metric with six digits, because TensorFlow runs differ in the ninth."""
PlainNumbers = BeforeValidator(lambda values: values.tolist() if isinstance(values, np.ndarray) else values)
Numbers = Annotated[float | list[Any], PlainNumbers]
"""One number, or a list of them for channels or blocks."""
Integers = Annotated[int | list[Any], PlainNumbers]
Ends = Annotated[float | list[float | None] | None, BeforeValidator(_finite_ends)]
Sizes = tuple[int | None, ...] | None
"""A shape; a size is null if it is unknown."""
Negated = Annotated[bool, BeforeValidator(lambda value: not value)]
Accuracy = Annotated[dict[Literal["float", "quantized"], float] | None, _named("float", "quantized")]
ScaleAndZeroPoint = Annotated[dict[Literal["scale", "zero_point"], Numbers] | None, _named("scale", "zero_point")]
Digests = Annotated[tuple[str, ...], BeforeValidator(lambda runs: [run.data_digest for run in runs])]


class TensorJson(JsonObject):
    """A tensor: output `port` of an op."""

    graph: str
    op: str
    port: int


class UseJson(JsonObject):
    """A use of a tensor: input `slot` of an op."""

    graph: str
    op: str
    slot: int


class ParametersJson(JsonObject):
    """Scale, zero point and range. Values that are computed at run time are null, and `dynamic` is true."""

    dtype: str | None = at("params.type.name", None)
    scale: Numbers | None = at("params.scale", None)
    zero_point: Integers | None = at("params.zero_point", None)
    axis: int | None = at("params.axis", None)
    block_size: int | None = at("params.block", None)
    narrow: bool | None = at("params.narrow", None)
    low: Numbers | None = at("params.range.low", None)
    high: Numbers | None = at("params.range.high", None)
    dynamic: Annotated[bool, BeforeValidator(lambda params: not isinstance(params, QParams))] = at("params")


OptionalParameters = Annotated[ParametersJson | None, if_set("params")]
