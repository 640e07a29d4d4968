"""How a tensor is quantized, as rule files say it: schemes and their observers."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt, field_validator, model_validator
from pydantic.dataclasses import dataclass

from graphquant.errors import did_you_mean
from graphquant.numerics import FLOAT8, FloatType, Grid, IntType, QType, parse_type
from graphquant.qdq import FAMILIES, Arguments, RangeFrom, Request, Round
from graphquant.ruleset.fields import FROZEN, Text, known_words
from graphquant.sketch import OBSERVERS, Argument

if TYPE_CHECKING:
    from graphquant.ir import Shape


@dataclass(frozen=True, slots=True, kw_only=True, config=FROZEN)
class _Observe:
    """What all observers have in common; `Observe` adds their arguments."""

    name: Text

    @field_validator("name")
    @classmethod
    def _observer(cls, value: str) -> str:
        known_words("observer", [value], OBSERVERS)
        return value

    @model_validator(mode="after")
    def _fitting(self) -> _Observe:
        wanted = OBSERVERS[self.name].arguments
        given = self._given()
        for argument in given:
            if argument not in wanted:
                takes = " and ".join(repr(name) for name in sorted(wanted)) or "no argument"
                raise ValueError(f"the observer {self.name!r} has no {argument!r}; it takes {takes}")
        for argument in OBSERVERS[self.name].required:
            if argument not in given:
                raise ValueError(f"the observer {self.name!r} needs {argument!r}; give it a number")
        low, high = given.get("low"), given.get("high")
        if low is not None and high is not None and not (math.isfinite(low) and low <= high < math.inf):
            raise ValueError(f"a range from {low} to {high} is empty or not finite; 'low' must not be above 'high'")
        return self

    def _given(self) -> dict[str, float]:
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "name"}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def arguments(self) -> dict[str, float]:
        """The number of each argument that the observer takes, as given or by default."""
        takes, given = OBSERVERS[self.name].arguments, self._given()
        return {name: float(given.get(name, one.default or 0.0)) for name, one in takes.items()}


_ARGUMENTS = {name: argument for observer in OBSERVERS.values() for name, argument in observer.arguments.items()}


def _number(argument: Argument) -> Any:
    """The type of an argument's field."""
    kind = StrictInt if argument.whole else StrictFloat
    return Annotated[kind, Field(ge=argument.least, le=argument.most)] | None


if TYPE_CHECKING:

    class Observe(_Observe):
        """Which observer turns statistics into a range, with its arguments."""

        def __init__(self, *, name: str, **arguments: float | None) -> None: ...

else:
    _fields = {name: _number(argument) for name, argument in _ARGUMENTS.items()}
    Observe = dataclass(frozen=True, slots=True, kw_only=True, config=FROZEN)(
        type("Observe", (_Observe,), {"__module__": __name__, "__annotations__": _fields, **dict.fromkeys(_fields)})
    )
    Observe.__doc__ = "\n".join(
        [
            'Which observer turns values into a range, with its arguments: `{ name = "fixed", low = 0, high = 1 }`.',
            "",
            "Attributes:",
            "    name: An observer of `graphquant.sketch.OBSERVERS`.",
            *(
                f"    {name}: Of {' and '.join(repr(one) for one in OBSERVERS if name in OBSERVERS[one].arguments)}: "
                f"{argument.explains}."
                for name, argument in _ARGUMENTS.items()
            ),
        ]
    )


DTYPES = (*(f"{sign}int{bits}" for sign in ("", "u") for bits in range(2, 33)), *FLOAT8)
"""The types a scheme may have."""


@dataclass(frozen=True, slots=True, kw_only=True, config=FROZEN)
class Scheme:
    """How a tensor is quantized.

    Attributes:
        name: The key of its `[scheme.NAME]` table.
        dtype: "int8" or another integer type, "float8_e4m3fn" or "float8_e5m2"; or give `bits` and `signed`.
        bits: Width in bits.
        signed: Whether negative values are represented without a zero point.
        zero: "symmetric" fixes the zero point to 0 (unsigned: the middle); "asymmetric" chooses it.
        narrow: Leaves out the most negative value, [-127, 127].
        per: "tensor" (one scale), "channel" (one per output channel), or "block" (one per `block_size` elements).
        block_size: How many elements of a weight, along the axis that its consumer sums over, have one scale.
        axis: Which axis the channels or blocks lie along, where it is another one.
        scale: "any" or "power-of-two".
        shifts: "dpu" keeps powers of two so near to each other that AMD's DPU can compute with them by shifting.
        smallest_range: The least that lies between the ends of the range, in real units; a narrower one is widened.
        observe: The observer that picks the range.
        family: Which ops stand for the quantization; by default the format's own.
        range: "observed", the one of which the scheme makes a scale and zero point; "given", told to the ops as it
            stands; "dynamic", that of the values in each run, which needs no data; "learned", observed and then kept
            in variables that training may change.
        round: How values halfway between two steps are rounded; by default as the family does.
        args: Arguments that only this family's ops have.
    """

    name: str = ""
    dtype: Text | None = None
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
    observe: Observe = Field(default_factory=lambda: Observe(name="minmax"))
    family: Text | None = None
    range: RangeFrom = "observed"
    round: Round | None = None
    args: Arguments = Field(default_factory=Arguments)

    @field_validator("observe", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("dtype")
    @classmethod
    def _type(cls, value: str | None) -> str | None:
        if value is not None and value not in DTYPES:
            close = did_you_mean(value, DTYPES)
            known = f"int2 to int32, uint2 to uint32, {' and '.join(FLOAT8)}"
            raise ValueError(f"{value!r} is no type; {known} are.{close}")
        return value

    @field_validator("family")
    @classmethod
    def _family(cls, value: str | None) -> str | None:
        if value is not None:
            known_words("family", [value], FAMILIES)
        return value

    @model_validator(mode="after")
    def _agree(self) -> Scheme:
        if self.dtype and (self.bits is not None or self.signed is not None):
            raise ValueError("'dtype' says what 'bits' and 'signed' say; give one or the other")
        if self.observe.name == "fixed-point" and self.zero != "symmetric":
            raise ValueError("the observer 'fixed-point' has zero point 0; the scheme must be symmetric")
        if self.range == "given" and self.scale == "power-of-two":
            raise ValueError("the ops make the scale of a range that is 'given'; a power of two needs range 'observed'")
        if self.shifts is not None and (self.scale != "power-of-two" or self.per != "tensor"):
            raise ValueError('\'shifts\' is for one power of two; take scale = "power-of-two" and per = "tensor"')
        self._check_type()
        self._check_blocks()
        self._fits_family()
        return self

    def _check_type(self) -> None:
        """Raises a ValueError for what a float8 type does not have."""
        if isinstance(self.type, FloatType):
            if self.zero != "symmetric":
                raise ValueError(f"{self.type.name} has no zero point; the scheme must be symmetric")
            if self.narrow:
                raise ValueError(f"{self.type.name} has as many values on both sides of 0; leave 'narrow' out")

    def _check_blocks(self) -> None:
        """Raises a ValueError for blocks without a size, or with a range that is not had from smallest and largest."""
        if (self.per == "block") != (self.block_size is not None):
            raise ValueError("'block_size' and per = \"block\" go together; give both, or neither")
        if self.per == "tensor" and self.axis is not None:
            raise ValueError("one scale for the whole tensor has no 'axis'; leave it out, or take per = \"channel\"")
        observer = self.observe.name
        if self.per == "block" and (OBSERVERS[observer].needs_histogram or observer in {"mean-minmax", "bias"}):
            raise ValueError(f"the observer {observer!r} does not look at single blocks; take minmax or absmax")

    def _fits_family(self) -> None:
        """Raises a ValueError for what the ops of the named family cannot do, whatever the tensor."""
        given = self.args.given()
        if self.family is None:
            if given:
                raise ValueError(f"{given[0]!r} is an argument of one family's ops; name that with 'family'")
            return
        family = FAMILIES[self.family]
        unknown = next((name for name in given if name not in family.arguments), None)
        if unknown is not None:
            takes = " and ".join(map(repr, sorted(family.arguments))) or "no arguments"
            raise ValueError(f"the family {self.family!r} has no {unknown!r}; it takes {takes}")
        low, high = self.args.input_min, self.args.input_max
        if low is not None and high is not None and not low <= high:
            raise ValueError(f"'input_min' {low} is above 'input_max' {high}")
        plain = self.per != "block" and isinstance(self.type, IntType)
        if plain and not given and self.range == "observed" and self.round is None and self.zero == "symmetric":
            return  # what is left depends on the tensor too
        axis = None if self.per == "tensor" else 0
        reason = family.why_not(self.request(axis=axis, dtype="float32", shape=(1,), parameter=True))
        if reason is not None:
            raise ValueError(reason)

    def request(
        self, *, axis: int | None, dtype: str, shape: Shape | None, parameter: bool, function: bool = False
    ) -> Request:
        """What the scheme asks of a family for such a tensor."""
        return Request(
            type=self.type,
            axis=axis,
            dtype=dtype,
            shape=shape,
            parameter=parameter,
            symmetric=self.zero == "symmetric",
            range=self.range,
            round=self.round,
            args=self.args,
            block=self.block_size,
            function=function,
        )

    @property
    def grid(self) -> Grid:
        """What the scheme can represent, but for the scale."""
        return Grid(
            type=self.type,
            symmetric=self.zero == "symmetric",
            narrow=self.narrow,
            power_of_two=self.scale == "power-of-two",
        )

    @property
    def type(self) -> QType:
        """The type of the quantized values."""
        if self.dtype:
            return parse_type(self.dtype)
        return IntType(self.bits or 8, True if self.signed is None else self.signed)
