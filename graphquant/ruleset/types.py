"""What a rule file says, as data: selectors, schemes, patterns, rules.

pydantic checks each value as it is made and gives the JSON Schema that editors complete from.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, field_validator, model_validator
from pydantic.dataclasses import dataclass

from graphquant.errors import did_you_mean
from graphquant.numerics import FLOAT8, FloatType, Grid, IntType, QType, parse_type
from graphquant.qdq import FAMILIES, Arguments, RangeFrom, Request, Round
from graphquant.ruleset.syntax import compile_regex, parse_chain, parse_pattern
from graphquant.sketch import OBSERVERS, Argument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from graphquant.ir import Shape

_FROZEN = ConfigDict(extra="forbid")

_MAX_TEXT = 500
"""Longest text of a selector or of a pattern's line, which also bounds what a regex can cost."""

_Text = Annotated[str, Field(min_length=1, max_length=_MAX_TEXT)]
_Count = Annotated[StrictInt, Field(ge=0)]


def _known(what: str, words: Iterable[str], known: Iterable[str]) -> None:
    """Raises a ValueError that names the first of `words` that is not `known`."""
    for word in words:
        if word not in known:
            raise ValueError(f"there is no {what} {word!r}.{did_you_mean(word, known) or _listed(known)}")


def _listed(known: Iterable[str]) -> str:
    return f" Known are {', '.join(sorted(known))}."


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class _Observe:
    """What all observers have in common; `Observe` adds their arguments."""

    name: _Text

    @field_validator("name")
    @classmethod
    def _observer(cls, value: str) -> str:
        _known("observer", [value], OBSERVERS)
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
    Observe = dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)(
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


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
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
    dtype: _Text | None = None
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
    family: _Text | None = None
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
            _known("family", [value], FAMILIES)
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

    def request(self, *, axis: int | None, dtype: str, shape: Shape | None, parameter: bool) -> Request:
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


CONSUMER_ONLY = (
    *("input", "min_channels", "max_channels", "min_in_channels", "max_in_channels", "multiple_of"),
    *("min_rows", "max_rows", "min_kernel", "max_groups", "path", "beside"),
)
"""The conditions of a selector that are on what reads a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class Selector:
    """Conditions on an op, all of which must hold. An empty one holds everywhere; one on an unknown size does not.

    Attributes:
        kind: A framework-neutral kind, alternatives by `|`, or a chain `conv > batchnorm? > relu|relu6?`, producer
            first; `parameter` stands for any weight, `*` for any op.
        type: The framework's own op type, alternatives by `|`.
        name: Glob on the op or tensor name, or a regex between slashes `/.../`.
        input: Role of the slot that reads the tensor ("input", "weight", "bias"), alternatives by `|`. Consumers only.
        pattern: `NAME` (its last op), `NAME.op` or `NAME.*` (any op) of a `[pattern.NAME]`.
        attr: Attribute conditions: a value that must be equal, or a list of which one must be.
        readers: Number of consumers that the tensor must have. Producers only.
        min_rank: Smallest number of axes of the tensor.
        max_rank: Largest number of axes of the tensor.
        min_size: Smallest number of elements of the tensor.
        max_size: Largest number of elements of the tensor.
        min_channels: Smallest number of output channels of the op, counted in its weight. Consumers only.
        max_channels: Largest number of them.
        min_in_channels: Smallest number of channels that the op reads, those of all groups; the rows of a matrix
            product's weight. Consumers only.
        max_in_channels: Largest number of them.
        multiple_of: What that number must be a multiple of. Consumers only.
        min_rows: Smallest number of rows of a matrix product's left side. Consumers only.
        max_rows: Largest number of them.
        min_kernel: Smallest size of the shortest side of a convolution's kernel. Consumers only.
        max_groups: Largest number of groups of a convolution. Consumers only.
        path: "longest": of the op's inputs that `producer` fits this is the one that is farthest from where all of
            them part, or else the first; the op reads two tensors at least that are no parameters. Consumers only.
        beside: Name of a rule in the same file that claims another input of the op. Consumers only.
    """

    kind: _Text | None = None
    type: _Text | None = None
    name: _Text | None = None
    input: _Text | None = None
    pattern: _Text | None = None
    attr: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    readers: _Count | None = None
    min_rank: _Count | None = None
    max_rank: _Count | None = None
    min_size: _Count | None = None
    max_size: _Count | None = None
    min_channels: _Count | None = None
    max_channels: _Count | None = None
    min_in_channels: _Count | None = None
    max_in_channels: _Count | None = None
    multiple_of: Annotated[StrictInt, Field(ge=1)] | None = None
    min_rows: _Count | None = None
    max_rows: _Count | None = None
    min_kernel: _Count | None = None
    max_groups: _Count | None = None
    path: Literal["longest"] | None = None
    beside: _Text | None = None

    @field_validator("kind")
    @classmethod
    def _chain(cls, value: str | None) -> str | None:
        from graphquant.ir.kinds import KINDS

        for link in parse_chain(value) if value is not None else ():
            _known("kind", sorted(link.kinds), KINDS)
        return value

    @field_validator("input")
    @classmethod
    def _role(cls, value: str | None) -> str | None:
        from graphquant.ir.kinds import ROLES

        _known("input role", value.split("|") if value is not None else (), ROLES)
        return value

    @field_validator("type")
    @classmethod
    def _types(cls, value: str | None) -> str | None:
        if value is not None and not all(re.fullmatch(r"[\w.:>-]+", word) for word in value.split("|")):
            raise ValueError(f"{value!r} is no op type; types read 'Conv' or 'Conv|Gemm'")
        return value

    @field_validator("name")
    @classmethod
    def _regex(cls, value: str | None) -> str | None:
        if value is None or not (len(value) > 1 and value[0] == value[-1] == "/"):
            return value
        try:
            compile_regex(value[1:-1])
        except ValueError as error:
            raise ValueError(
                f"{value!r} is no regular expression ({error}); a name without slashes is a glob"
            ) from error
        return value

    @field_validator("attr")
    @classmethod
    def _attributes(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, wanted in value.items():
            one_of = wanted if isinstance(wanted, list) else [wanted]
            flat = [item for part in one_of for item in (part if isinstance(part, list) else [part])]
            if not all(isinstance(item, bool | int | float | str) for item in flat):
                raise ValueError(
                    f"the attribute {name!r} is compared with something else than strings, numbers and booleans"
                )
        return value

    @model_validator(mode="after")
    def _satisfiable(self) -> Selector:
        for what in ("rank", "size", "channels", "in_channels", "rows"):
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if low is not None and high is not None and low > high:
                raise ValueError(f"'min_{what}' {low} is above 'max_{what}' {high}; nothing can match")
        return self


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class Pattern:
    """A small graph as text: `ops = ["s = sigmoid(x)", "y = mul(x, s)"]`.

    Attributes:
        ops: One op a line, `name = kind(operand, ...)`; the last one is the pattern's result.
    """

    ops: Annotated[tuple[_Text, ...], Field(min_length=1, max_length=32)]

    @field_validator("ops")
    @classmethod
    def _parse(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        from graphquant.ir.kinds import KINDS

        for op in parse_pattern(value):
            _known("kind", sorted(op.kinds), KINDS)
        return value


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class Rule:
    """One sentence: what produces the tensor, who reads it, how to quantize in between.

    "same-as-input" gives the tensor the scale of what its producer reads; with "passed-on" nothing is inserted, since
    the producer hands quantized values on. Where what the producer reads is float, both leave the use to later rules.
    "leave" inserts nothing; nor does "absorbed", before a Relu or Clip that is one with the producer, unless the scale
    behind it, as a tie may make it, does not end where that does: then the pair behind it stands before it too.

    Attributes:
        name: Unique in its file; letters, digits, '_', '-' and '.', as new ops may be named after it.
        why: The reason, shown wherever the rule's work is shown.
        producer: What makes the tensor.
        consumer: Who reads it; only these uses are rerouted.
        quantize: A scheme, "same-as-input", "passed-on", "absorbed" or "leave".
        optional: A name selector that matches nothing is no error.
        place: For a tensor that the body of an op reads from outside, where it is quantized: beside its "producer",
            once for all, or in the "body". It is dequantized in the body either way.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]
    why: str = ""
    producer: Selector = Field(default_factory=Selector)
    consumer: Selector = Field(default_factory=Selector)
    quantize: _Text
    optional: StrictBool = False
    place: Literal["producer", "body"] = "producer"

    @model_validator(mode="after")
    def _says_something(self) -> Rule:
        for key in CONSUMER_ONLY:
            if getattr(self.producer, key) is not None:
                raise ValueError(f"{key!r} is a condition on what reads the tensor; put it into 'consumer'")
        if self.consumer.readers is not None:
            raise ValueError("'readers' counts who reads the tensor; put it into 'producer'")
        if self.producer == self.consumer == Selector():
            raise ValueError("the rule has no condition; give it a 'producer' or a 'consumer', kind = '*' for any op")
        return self


PREPARATIONS = (
    "requantize",
    *("initializer-inputs", "constant-nodes", "inference-batchnorm", "drop-identity", "drop-dropout"),
    "fold-batchnorm",
)
"""The steps before matching; `graphquant.prepare.STEPS` says what each is for."""

CORRECTIONS = (
    *("equalization", "migration", "weight-clipping"),
    *("error-compensation", "adaptive-rounding", "bias-correction"),
)
"""The steps before calibration and between scales and rewriting; `BALANCINGS` and `CORRECTIONS` of
`graphquant.corrections` say what each is for."""

NOT = "not "
"""What stands before the name of a step that a rule file does not want, whatever the files after it say."""


def _steps(value: list[str], known: tuple[str, ...]) -> list[str]:
    """`value`, a list of steps that are wanted or not, if it makes sense."""
    _known("step", [name.removeprefix(NOT) for name in value], known)
    twice = next((name for name in value if NOT + name in value), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is wanted and not wanted; leave out one of the two")
    return value


@dataclass(frozen=True, slots=True, kw_only=True, config=_FROZEN)
class RuleFile:
    """The tables of one rule file.

    Attributes:
        description: One line for `graphquant rules list`.
        prepare: Steps the rules want before matching ("fold-batchnorm"), or do not want though a file after this one
            does ("not fold-batchnorm").
        correct: Corrections of weights and biases the rules want once scales are known ("bias-correction"), or do not
            want ("not bias-correction").
        scheme: Schemes by name.
        pattern: Patterns by name.
        rule: The rules, in order.
    """

    description: str = ""
    prepare: list[
        Annotated[str, Field(json_schema_extra={"enum": [*PREPARATIONS, *(NOT + name for name in PREPARATIONS)]})]
    ] = Field(default_factory=list)
    correct: list[
        Annotated[str, Field(json_schema_extra={"enum": [*CORRECTIONS, *(NOT + name for name in CORRECTIONS)]})]
    ] = Field(default_factory=list)
    scheme: dict[str, Scheme] = Field(default_factory=dict)
    pattern: dict[str, Pattern] = Field(default_factory=dict)
    rule: list[Rule] = Field(default_factory=list)

    @field_validator("prepare")
    @classmethod
    def _preparations(cls, value: list[str]) -> list[str]:
        return _steps(value, PREPARATIONS)

    @field_validator("correct")
    @classmethod
    def _corrections(cls, value: list[str]) -> list[str]:
        return _steps(value, CORRECTIONS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BoundRule:
    """A rule with the file it came from: its schemes and patterns are that file's, and `place` finds its line there."""

    rule: Rule
    file: str
    place: Callable[[], int]
    scheme: Scheme | None
    patterns: dict[str, Pattern]

    @property
    def line(self) -> int:
        """Where it begins in the file."""
        return self.place()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """The rules of all files in the order given, the first that matches a use wins.

    Attributes:
        files: Names of the files as they were asked for.
        descriptions: What each file says it is for.
        digest: Hex SHA-256 over the files' contents.
        prepare: The steps the files want, each once; the first file that names a step decides.
        correct: The corrections, likewise.
        rules: The rules.
    """

    files: tuple[str, ...]
    descriptions: tuple[str, ...]
    digest: str
    prepare: tuple[str, ...]
    correct: tuple[str, ...] = ()
    rules: tuple[BoundRule, ...]
