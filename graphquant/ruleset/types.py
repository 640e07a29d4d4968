"""What a rule file says, as data: selectors, schemes, patterns, rules.

pydantic checks each value as it is made and gives the JSON Schema that editors complete from.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from graphquant.numerics import IntType
from graphquant.qdq import FAMILIES
from graphquant.ruleset.syntax import parse_chain, parse_pattern
from graphquant.sketch import OBSERVERS

_FROZEN = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class Observe:
    """Which observer turns statistics into a range, with its arguments: `observe = { name = "fixed", low = 0, high = 1 }`.

    Attributes:
        name: An observer of `graphquant.sketch.OBSERVERS`.
        low: Lower end of a "fixed" range, real units.
        high: Upper end of a "fixed" range, real units.
        exponent: The scale of "fixed-point" is exactly 2**exponent.
    """

    name: str
    low: float | None = None
    high: float | None = None
    exponent: int | None = Field(default=None, ge=-126, le=126)

    @model_validator(mode="after")
    def _known(self) -> Observe:
        if self.name not in OBSERVERS:
            raise ValueError(f"there is no observer {self.name!r}; known are {', '.join(sorted(OBSERVERS))}")
        wanted = OBSERVERS[self.name].arguments
        for argument in ("low", "high", "exponent"):
            given = getattr(self, argument) is not None
            if given and argument not in wanted:
                raise ValueError(f"observer {self.name!r} takes no {argument!r}")
            if not given and argument in wanted:
                raise ValueError(f"observer {self.name!r} needs {argument!r}")
        if self.low is not None and self.high is not None and not (math.isfinite(self.low) and self.low <= self.high < math.inf):
            raise ValueError(f"a range from {self.low} to {self.high} is empty or not finite")
        return self


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class Scheme:
    """How a tensor is quantized.

    Attributes:
        name: The key of its `[scheme.NAME]` table.
        dtype: Integer type, "int8"; or give `bits` and `signed`.
        bits: Width in bits.
        signed: Whether negative values are represented without a zero point.
        zero: "symmetric" fixes the zero point to 0 (unsigned: the middle); "asymmetric" chooses it.
        narrow: Leaves out the most negative value, [-127, 127].
        per: "tensor" (one scale) or "channel" (one per output channel).
        scale: "any" or "power-of-two".
        observe: The observer that picks the range.
        family: Which ops stand for the quantization; by default the format's own.
    """

    name: str = ""
    dtype: str = ""
    bits: int | None = Field(default=None, ge=2, le=32)
    signed: bool | None = None
    zero: Literal["symmetric", "asymmetric"] = "symmetric"
    narrow: bool = False
    per: Literal["tensor", "channel"] = "tensor"
    scale: Literal["any", "power-of-two"] = "any"
    observe: Observe = Field(default_factory=lambda: Observe(name="minmax"))
    family: str | None = None

    @field_validator("observe", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _agree(self) -> Scheme:
        if self.dtype and (self.bits is not None or self.signed is not None):
            raise ValueError("give either 'dtype' or 'bits' and 'signed', not both")
        if self.dtype:
            IntType.parse(self.dtype)
        if self.family is not None and self.family not in FAMILIES:
            raise ValueError(f"there is no family {self.family!r}; known are {', '.join(sorted(FAMILIES))}")
        if self.observe.name == "fixed-point" and self.zero != "symmetric":
            raise ValueError("observer 'fixed-point' has zero point 0, so the scheme must be symmetric")
        return self

    @property
    def type(self) -> IntType:
        """The integer type."""
        if self.dtype:
            return IntType.parse(self.dtype)
        return IntType(self.bits or 8, True if self.signed is None else self.signed)


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class Selector:
    """Conditions on an op, all of which must hold. An empty one holds everywhere.

    Attributes:
        kind: A framework-neutral kind, alternatives by `|`, or a chain `conv > batchnorm? > relu|relu6?`, producer first;
            `parameter` stands for any weight, `*` for any op.
        type: The framework's own op type, alternatives by `|`.
        name: Glob on the op or tensor name, or a regex between slashes `/.../`.
        input: Role of the slot that reads the tensor ("input", "weight", "bias"), alternatives by `|`. Consumers only.
        pattern: `NAME` (its last op) or `NAME.op` of a `[pattern.NAME]`.
        attr: Attribute conditions: a value that must be equal, or a list of which one must be.
        min_rank: Smallest number of axes of the tensor.
        max_rank: Largest number of axes of the tensor.
        min_size: Smallest number of elements of the tensor, where it is known.
        max_size: Largest number of elements of the tensor, where it is known.
        min_channels: Smallest size of the tensor's channel axis, where it is known.
    """

    kind: str | None = None
    type: str | None = None
    name: str | None = None
    input: str | None = None
    pattern: str | None = None
    attr: dict[str, Any] = Field(default_factory=dict)
    min_rank: int | None = Field(default=None, ge=0)
    max_rank: int | None = Field(default=None, ge=0)
    min_size: int | None = Field(default=None, ge=0)
    max_size: int | None = Field(default=None, ge=0)
    min_channels: int | None = Field(default=None, ge=0)

    @field_validator("kind")
    @classmethod
    def _chain(cls, value: str | None) -> str | None:
        if value is not None:
            parse_chain(value)
        return value

    @field_validator("name")
    @classmethod
    def _regex(cls, value: str | None) -> str | None:
        if value is not None and len(value) > 1 and value[0] == value[-1] == "/":
            try:
                re.compile(value[1:-1])
            except re.error as error:
                raise ValueError(f"{value} is no regular expression: {error}") from error
        return value


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class Pattern:
    """A small graph as text: `ops = ["s = sigmoid(x)", "y = mul(x, s)"]`; the last op is the pattern's result."""

    ops: Annotated[list[str], Field(min_length=1, max_length=32)]

    @field_validator("ops")
    @classmethod
    def _parse(cls, value: list[str]) -> list[str]:
        parse_pattern(value)
        return value


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class Rule:
    """One sentence: what produces the tensor, who reads it, how to quantize in between.

    Attributes:
        name: Unique in its file.
        why: The reason, shown wherever the rule's work is shown.
        producer: What makes the tensor.
        consumer: Who reads it; only these uses are rerouted.
        quantize: Name of a scheme, "same-as-input" or "leave".
        optional: A name selector that matches nothing is no error.
        place: For a tensor that the body of an op reads from outside, where the new ops go: beside the "producer" or in
            the "body".
    """

    name: str
    why: str = ""
    producer: Selector = Field(default_factory=Selector)
    consumer: Selector = Field(default_factory=Selector)
    quantize: str
    optional: bool = False
    place: Literal["producer", "body"] = "producer"

    @model_validator(mode="after")
    def _says_something(self) -> Rule:
        if self.producer.input is not None:
            raise ValueError("'input' is a role of the consumer's slot; put it into 'consumer'")
        return self


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class RuleFile:
    """The tables of one rule file.

    Attributes:
        description: One line for `graphquant rules list`.
        prepare: Steps the rules want before matching ("fold-batchnorm").
        scheme: Schemes by name.
        pattern: Patterns by name.
        rule: The rules, in order.
    """

    description: str = ""
    prepare: list[Literal["initializer-inputs", "fold-batchnorm"]] = Field(default_factory=list)
    scheme: dict[str, Scheme] = Field(default_factory=dict)
    pattern: dict[str, Pattern] = Field(default_factory=dict)
    rule: list[Rule] = Field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundRule:
    """A rule with the file it came from: its schemes and patterns are that file's."""

    rule: Rule
    file: str
    line: int
    scheme: Scheme | None
    patterns: dict[str, Pattern]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """The rules of all files in the order given, the first that matches a use wins.

    Attributes:
        files: Names of the files as they were asked for.
        digest: Hex SHA-256 over the files' contents.
        prepare: The steps the files want, each once.
        rules: The rules.
    """

    files: tuple[str, ...]
    digest: str
    prepare: tuple[str, ...]
    rules: tuple[BoundRule, ...]
