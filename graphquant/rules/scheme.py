"""Quantization schemes and their observers, as rule files describe them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, field_validator, model_validator
from pydantic.dataclasses import dataclass

from graphquant.errors import did_you_mean
from graphquant.numerics import FLOAT_NAMES, FloatType, IntType, QType, QuantizationGrid, parse_type
from graphquant.observers import OBSERVERS
from graphquant.qdq import FAMILIES, FamilyArguments, FamilyRequest, RoundingMode
from graphquant.utils.option_types import RangeSource  # noqa: TC001  # pydantic evaluates the annotation

if TYPE_CHECKING:
    from graphquant.ir import Shape

# Field types that rule files share.

FORBID_EXTRA = ConfigDict(extra="forbid")

_MAX_TEXT = 500  # longest text of a selector or of a pattern's line, which also bounds the cost of a regular expression

ShortText = Annotated[str, Field(min_length=1, max_length=_MAX_TEXT)]
NonNegativeInt = Annotated[StrictInt, Field(ge=0)]


def check_known_words(noun: str, words: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise a ValueError about the first of `words` that is not in `allowed`."""
    for word in words:
        if word not in allowed:
            hint = did_you_mean(word, allowed) or f" Use one of {', '.join(sorted(allowed))}."
            raise ValueError(f"there is no {noun} {word!r}.{hint}")


@dataclass(frozen=True, slots=True, kw_only=True, config=FORBID_EXTRA)
class _ObserverConfig:
    """The part that all observers share. `ObserverConfig` adds their arguments."""

    name: ShortText

    @field_validator("name")
    @classmethod
    def _check_observer_name(cls, value: str) -> str:
        check_known_words("observer", [value], OBSERVERS)
        return value

    @model_validator(mode="after")
    def _check_arguments(self) -> _ObserverConfig:
        accepted = OBSERVERS[self.name].arguments
        specified = self._specified_arguments()
        for argument in specified:
            if argument not in accepted:
                accepted_text = " and ".join(repr(name) for name in sorted(accepted)) or "no argument"
                raise ValueError(f"the observer {self.name!r} has no {argument!r}; it takes {accepted_text}")
        for argument in OBSERVERS[self.name].required_arguments:
            if argument not in specified:
                raise ValueError(f"the observer {self.name!r} needs {argument!r}; give it a number")
        low, high = specified.get("low"), specified.get("high")
        if low is not None and high is not None and not (math.isfinite(low) and low <= high < math.inf):
            raise ValueError(f"a range from {low} to {high} is empty or not finite; 'low' must not be above 'high'")
        return self

    def _specified_arguments(self) -> dict[str, float]:
        values = {name: getattr(self, name) for name in _OBSERVER_ARGUMENTS}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def arguments(self) -> dict[str, float]:
        """The value of each argument that the observer takes, given or default."""
        values = ((name, getattr(self, name), entry) for name, entry in OBSERVERS[self.name].arguments.items())
        return {name: float((entry.default or 0.0) if value is None else value) for name, value, entry in values}


_OBSERVER_ARGUMENTS = {
    name: argument for observer in OBSERVERS.values() for name, argument in observer.arguments.items()
}

if TYPE_CHECKING:

    class ObserverConfig(_ObserverConfig):
        """An observer, which turns statistics into a range, with its arguments."""

        def __init__(self, *, name: str, **arguments: float | None) -> None: ...

else:
    _fields = {
        name: Annotated[
            StrictInt if argument.is_integer else StrictFloat, Field(ge=argument.minimum, le=argument.maximum)
        ]
        | None
        for name, argument in _OBSERVER_ARGUMENTS.items()
    }
    ObserverConfig = dataclass(frozen=True, slots=True, kw_only=True, config=FORBID_EXTRA)(
        type(
            "Observe",
            (_ObserverConfig,),
            {"__module__": __name__, "__annotations__": _fields, **dict.fromkeys(_fields)},
        )
    )
    ObserverConfig.__doc__ = "\n".join(
        [
            'An observer, which turns values into a range: `{ name = "fixed", low = 0, high = 1 }`.',
            "",
            "Attributes:",
            "    name: An observer of `graphquant.observers.OBSERVERS`.",
            *(
                f"    {name}: Of {' and '.join(repr(key) for key in OBSERVERS if name in OBSERVERS[key].arguments)}: "
                f"{argument.description}."
                for name, argument in _OBSERVER_ARGUMENTS.items()
            ),
        ]
    )

SCHEME_DTYPES = (*(f"{sign}int{bits}" for sign in ("", "u") for bits in range(2, 33)), *FLOAT_NAMES)
"""Data types of a scheme."""


@dataclass(frozen=True, slots=True, kw_only=True, config=FORBID_EXTRA)
class Scheme:
    """A quantization scheme.

    Attributes:
        name: The key of its `[scheme.NAME]` table.
        dtype: "int8" or another integer type, "float8_e4m3fn", "float8_e5m2" or "float4_e2m1fn". Alternatively, give
            `bits` and `signed`.
        bits: Width in bits.
        signed: True if the type represents negative values without a zero point.
        zero: "symmetric" fixes the zero point to 0 (unsigned: the middle); "asymmetric" chooses it.
        narrow: Omit the most negative value, [-127, 127].
        per: "tensor" (one scale), "channel" (one per output channel), or "block" (one per `block_size` elements).
        block_size: Number of elements of a weight with one scale, along the axis that its consumer sums over.
        axis: The axis of the channels or blocks, if it is not the default one.
        scale: "any" or "power-of-two".
        shifts: "dpu" keeps powers of two so close together that AMD's DPU can compute with shifts.
        smallest_range: Smallest width of the range in real units. A narrower range is widened.
        observe: The observer that chooses the range.
        family: The family of Q/DQ ops. The default depends on the model's format.
        range: "observed" computes scale and zero point from an observed range. "given" passes the range to the ops.
            "dynamic" uses the range of each run and needs no data. "learned" starts with an observed range, in
            variables that training may change.
        round: Rounding of values halfway between two steps. The default depends on the family.
        args: Arguments of this family's ops only.
    """

    name: str = ""
    dtype: ShortText | None = None
    bits: StrictInt | None = Field(default=None, ge=2, le=32)
    signed: StrictBool | None = None
    zero: Literal["symmetric", "asymmetric"] = "symmetric"
    narrow: StrictBool = False
    per: Literal["tensor", "channel", "block"] = "tensor"
    block_size: StrictInt | None = Field(default=None, ge=2, le=1 << 20)
    axis: StrictInt | None = Field(default=None, ge=0, le=31)
    scale: Literal["any", "power-of-two"] = "any"
    shifts: Literal["dpu"] | None = None
    smallest_range: Annotated[StrictFloat, Field(gt=0, le=1e30)] | None = None
    observe: ObserverConfig = Field(default_factory=lambda: ObserverConfig(name="minmax"))
    family: ShortText | None = None
    range: RangeSource = "observed"
    round: RoundingMode | None = None
    args: FamilyArguments = Field(default_factory=FamilyArguments)

    @field_validator("observe", mode="before")
    @classmethod
    def _expand_observer_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("dtype")
    @classmethod
    def _check_dtype(cls, value: str | None) -> str | None:
        if value is not None and value not in SCHEME_DTYPES:
            close = did_you_mean(value, SCHEME_DTYPES)
            allowed = f"int2 to int32, uint2 to uint32, {', '.join(FLOAT_NAMES[:-1])} and {FLOAT_NAMES[-1]}"
            raise ValueError(f"{value!r} is no data type; use {allowed}.{close}")
        return value

    @field_validator("family")
    @classmethod
    def _check_family_name(cls, value: str | None) -> str | None:
        if value is not None:
            check_known_words("family", [value], FAMILIES)
        return value

    @model_validator(mode="after")
    def _check_consistency(self) -> Scheme:
        observer, dtype = self.observe.name, self.type
        is_float, is_symmetric = isinstance(dtype, FloatType), self.zero == "symmetric"
        supports_blocks = not OBSERVERS[observer].needs_histogram and observer not in {"mean-minmax", "bias"}
        supports_blocks |= observer == "mse" and not is_float and self.smallest_range is None
        conflicts = {
            "'dtype' replaces 'bits' and 'signed'; give one or the other": (
                self.dtype and (self.bits is not None or self.signed is not None)
            ),
            "the observer 'fixed-point' has zero point 0; the scheme must be symmetric": (
                observer == "fixed-point" and not is_symmetric
            ),
            "the ops compute the scale of a range that is 'given'; a power of two needs range 'observed'": (
                self.range == "given" and self.scale == "power-of-two"
            ),
            '\'shifts\' needs scale = "power-of-two" and per = "tensor"': (
                self.shifts is not None and (self.scale != "power-of-two" or self.per != "tensor")
            ),
            f"{dtype.name} has no zero point; the scheme must be symmetric": is_float and not is_symmetric,
            f"{dtype.name} is symmetric around 0; remove 'narrow'": is_float and self.narrow,
            "'block_size' and per = \"block\" need each other; give both, or neither": (
                (self.per == "block") != (self.block_size is not None)
            ),
            "a scheme per tensor has no 'axis'; remove it, or set per = \"channel\"": (
                self.per == "tensor" and self.axis is not None
            ),
            f"the observer {observer!r} does not support such blocks; use minmax, absmax, or mse for integers": (
                self.per == "block" and not supports_blocks
            ),
        }
        if message := next((message for message, applies in conflicts.items() if applies), None):
            raise ValueError(message)
        self._check_family_support()
        return self

    def _check_family_support(self) -> None:
        """Raise a ValueError if the ops of the named family cannot implement the scheme for any tensor."""
        specified = self.args.specified()
        if self.family is None:
            if specified:
                raise ValueError(f"{specified[0]!r} is an argument of one family's ops; name the 'family'")
            return
        family = FAMILIES[self.family]
        if unknown := next((name for name in specified if name not in family.argument_names), None):
            accepted = " and ".join(map(repr, sorted(family.argument_names))) or "no arguments"
            raise ValueError(f"the family {self.family!r} has no {unknown!r}; it takes {accepted}")
        if self.args.form is not None and self.args.form not in family.forms:
            raise ValueError(f"the family {self.family!r} has the forms {' and '.join(map(repr, family.forms))}")
        low, high = self.args.input_min, self.args.input_max
        if low is not None and high is not None and not low <= high:
            raise ValueError(f"'input_min' {low} is above 'input_max' {high}")
        axis = None if self.per == "tensor" else 0
        request = self.family_request(axis=axis, dtype="float32", shape=(1,), is_parameter=True)
        if reason := family.unsupported_reason(request):
            raise ValueError(reason)

    def family_request(
        self,
        *,
        axis: int | None,
        dtype: str,
        shape: Shape | None,
        is_parameter: bool,
        in_function: bool = False,
        opset: int = 0,
        targets: tuple[str, ...] = (),
    ) -> FamilyRequest:
        """Return the request of the scheme to a family for such a tensor."""
        return FamilyRequest(
            type=self.type,
            axis=axis,
            dtype=dtype,
            shape=shape,
            is_parameter=is_parameter,
            symmetric=self.zero == "symmetric",
            range_source=self.range,
            rounding_mode=self.round,
            args=self.args,
            block=self.block_size,
            in_function=in_function,
            opset=opset,
            targets=targets,
        )

    @property
    def grid(self) -> QuantizationGrid:
        """The representable values, up to the scale."""
        return QuantizationGrid(
            type=self.type,
            symmetric=self.zero == "symmetric",
            narrow=self.narrow,
            power_of_two=self.scale == "power-of-two" or self.args.scale_type == "float8_e8m0fnu",
            float8_scales=self.args.scale_type == "float8_e4m3fn",
        )

    @property
    def type(self) -> QType:
        """The data type of the quantized values."""
        if self.dtype:
            return parse_type(self.dtype)
        return IntType(self.bits or 8, True if self.signed is None else self.signed)


@lru_cache(maxsize=1024)
def change_scheme(scheme: Scheme, **changes: Any) -> Scheme:
    """Return the scheme with other values of some fields. Equal results are one object, which many sites share."""
    return replace(scheme, **changes)
