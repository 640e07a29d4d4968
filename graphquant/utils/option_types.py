"""Types of option values with pydantic's validators.

They are separate from `options`, because the help of a command must not import pydantic, which takes longer than
everything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, WithJsonSchema

from graphquant.errors import UsageError, escape_unprintable
from graphquant.utils.argument_types import require_file_or_object
from graphquant.utils.text import parse_size


@cache
def type_adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the validator of a type, which is created once, because that takes longer than most validations."""
    return TypeAdapter(kind)


def parse_share(value: Any) -> float:
    """Return a share from 0 to 1, given as a number or as a percentage such as "99%".

    Numbers above 1 are rejected, because 99 may be a percentage or a mistake, and 0.99% is a valid bound too.
    """
    text = str(value).strip()
    percent = text.endswith("%")
    try:
        number = math.nan if isinstance(value, bool) else float(text.removesuffix("%"))
    except ValueError:
        number = math.nan
    share = number / 100 if percent else number
    if not 0 <= share <= 1:
        hint = f" Did you mean {number:g}%?" if not percent and 1 < number <= 100 else ""  # noqa: PLR2004  # percent
        message = f"{escape_unprintable(text[:40])} is not a share. Use 0 to 1, or a percentage such as 99%.{hint}"
        raise ValueError(message)
    return share


def parse_finite(value: float) -> float:
    """Return `value` if it is finite, because a comparison with NaN or infinity never fails or always does."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    return value


def parse_search_time(value: Any) -> str:
    """Return a limit of the search's time: seconds such as "90s", or a factor such as "10x" of the calibration's time.

    A number without a unit counts seconds.
    """
    text = str(value).strip().lower()
    unit = text[-1:] if text[-1:] in {"s", "x"} else "s"
    try:
        number = math.nan if isinstance(value, bool) else float(text.removesuffix(unit))
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        message = (
            f"{escape_unprintable(str(value)[:40])} is not a time. Use seconds, such as 90s, or a factor, such as 10x"
        )
        raise ValueError(message)
    return f"{number:g}{unit}"


def parse_bytes(value: Any) -> int:
    """Return a number of bytes, given as a number or as a size such as "512MB"."""
    try:
        return parse_size(str(value))
    except UsageError as error:
        raise ValueError(str(error)) from error


def parse_names(value: Any) -> tuple[str, ...]:
    """Return one name or several as a tuple. A string is one name, not a sequence of letters."""
    names = [value] if isinstance(value, str | Path) else value
    names = tuple(names) if isinstance(names, Iterable) and not isinstance(names, Mapping) else (names,)
    if not all(isinstance(name, str | Path) for name in names):
        raise ValueError(f"{escape_unprintable(repr(value))} is neither a name nor a list of names")
    return tuple(map(str, names))


def parse_tags(value: Any) -> tuple[str, ...]:
    """Return tags as a tuple; text may contain several, with commas between them.

    The tuple ("",) stands for the MetaGraph without tags, and an empty one for no choice.
    """
    names = parse_names(value)
    tags = tuple(filter(None, (tag.strip() for name in names for tag in name.split(","))))
    return tags or (names and ("",))


Names = Annotated[tuple[str, ...], BeforeValidator(parse_names)]
Tags = Annotated[tuple[str, ...], BeforeValidator(parse_tags)]
Share = Annotated[float, BeforeValidator(parse_share)]
Decibels = Annotated[float, AfterValidator(parse_finite)]
SqnrTarget = Decibels | Literal["none"]
SearchTime = Annotated[str, BeforeValidator(parse_search_time)]
NonNegative = Annotated[float, Field(ge=0), AfterValidator(parse_finite)]
Seconds = Annotated[float, Field(gt=0), AfterValidator(parse_finite)]
NumberFromZero = Annotated[int, Field(ge=0)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Count = Annotated[int, Field(ge=1)]
# `module:function`, or the function itself.
MetricFunction = Annotated[Any, WithJsonSchema({"type": "string"})]
Cost = Literal["macs", "size", "latency"]
RangeSource = Literal["observed", "given", "dynamic", "learned"]
Runtime = Literal["tflite"]
InputOutputType = Literal["int8", "uint8", "int16", "float32"]
CacheType = Literal["int8", "int8-per-tensor"]
# A spec, its path or data in memory, which only the code that opens data can check.
DataSpec = Annotated[Any, WithJsonSchema({"type": "string"})]
# A path, or the object that its file contains.
ObjectOrPath = Annotated[Any, BeforeValidator(require_file_or_object), WithJsonSchema({"type": "string"})]
NameMapOrPath = Annotated[
    dict[str, str] | str | Path, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})
]
