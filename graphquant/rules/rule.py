"""What a rule file says, as data: rules and what a file has beside them.

pydantic checks each value as it is made and gives the JSON Schema that editors complete from.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, field_validator, model_validator
from pydantic.dataclasses import dataclass

from graphquant.rules.pattern_syntax import compile_regex, parse_chain, parse_pattern
from graphquant.rules.scheme import FORBID_EXTRA, NonNegativeInt, Scheme, ShortText, check_known_words

if TYPE_CHECKING:
    from collections.abc import Callable


# What rule files say of ops: conditions on one, and small graphs of several.

CONSUMER_CONDITIONS = (
    *("input", "min_channels", "max_channels", "min_in_channels", "max_in_channels", "multiple_of"),
    *("min_rows", "max_rows", "min_kernel", "max_groups", "path", "beside"),
)
"""The conditions of a selector that are on what reads a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True, config=FORBID_EXTRA)
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
        sibling_rule: Name of a rule in the same file that claims another input of the op. Consumers only.
    """

    kind: ShortText | None = None
    type: ShortText | None = None
    name: ShortText | None = None
    input: ShortText | None = None
    pattern: ShortText | None = None
    attr: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    readers: NonNegativeInt | None = None
    min_rank: NonNegativeInt | None = None
    max_rank: NonNegativeInt | None = None
    min_size: NonNegativeInt | None = None
    max_size: NonNegativeInt | None = None
    min_channels: NonNegativeInt | None = None
    max_channels: NonNegativeInt | None = None
    min_in_channels: NonNegativeInt | None = None
    max_in_channels: NonNegativeInt | None = None
    multiple_of: Annotated[StrictInt, Field(ge=1)] | None = None
    min_rows: NonNegativeInt | None = None
    max_rows: NonNegativeInt | None = None
    min_kernel: NonNegativeInt | None = None
    max_groups: NonNegativeInt | None = None
    path: Literal["longest"] | None = None
    sibling_rule: ShortText | None = None

    @field_validator("kind")
    @classmethod
    def _check_kind_chain(cls, value: str | None) -> str | None:
        from graphquant.ir.kinds import KINDS

        for link in parse_chain(value) if value is not None else ():
            check_known_words("kind", sorted(link.kinds), KINDS)
        return value

    @field_validator("input")
    @classmethod
    def _check_input_roles(cls, value: str | None) -> str | None:
        from graphquant.ir.kinds import ROLES

        check_known_words("input role", value.split("|") if value is not None else (), ROLES)
        return value

    @field_validator("type")
    @classmethod
    def _check_op_types(cls, value: str | None) -> str | None:
        if value is not None and not all(re.fullmatch(r"[\w.:>-]+", word) for word in value.split("|")):
            raise ValueError(f"{value!r} is no op type; types read 'Conv' or 'Conv|Gemm'")
        return value

    @field_validator("name")
    @classmethod
    def _check_name_regex(cls, value: str | None) -> str | None:
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
    def _check_attr_values(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, condition in value.items():
            alternatives = condition if isinstance(condition, list) else [condition]
            scalars = [
                scalar
                for alternative in alternatives
                for scalar in (alternative if isinstance(alternative, list) else [alternative])
            ]
            if not all(isinstance(scalar, bool | int | float | str) for scalar in scalars):
                raise ValueError(
                    f"the attribute {name!r} is compared with something else than strings, numbers and booleans"
                )
        return value

    @model_validator(mode="after")
    def _check_bounds(self) -> Selector:
        for quantity in ("rank", "size", "channels", "in_channels", "rows"):
            low, high = getattr(self, f"min_{quantity}"), getattr(self, f"max_{quantity}")
            if low is not None and high is not None and low > high:
                raise ValueError(f"'min_{quantity}' {low} is above 'max_{quantity}' {high}; nothing can match")
        return self


@dataclass(frozen=True, slots=True, kw_only=True, config=FORBID_EXTRA)
class Pattern:
    """A small graph as text: `ops = ["s = sigmoid(x)", "y = mul(x, s)"]`.

    Attributes:
        ops: One op a line, `name = kind(operand, ...)`; the last one is the pattern's result.
    """

    ops: Annotated[tuple[ShortText, ...], Field(min_length=1, max_length=32)]

    @field_validator("ops")
    @classmethod
    def _check_ops(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        from graphquant.ir.kinds import KINDS

        for op in parse_pattern(value):
            check_known_words("kind", sorted(op.kinds), KINDS)
        return value


@dataclass(frozen=True, slots=True, kw_only=True, config=FORBID_EXTRA)
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
        insert_in: For a tensor that the body of an op reads from outside, where it is quantized: beside its "producer",
            once for all, or in the "body". It is dequantized in the body either way.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]
    why: str = ""
    producer: Selector = Field(default_factory=Selector)
    consumer: Selector = Field(default_factory=Selector)
    quantize: ShortText
    optional: StrictBool = False
    insert_in: Literal["producer", "body"] = "producer"

    @model_validator(mode="after")
    def _check_conditions(self) -> Rule:
        for key in CONSUMER_CONDITIONS:
            if getattr(self.producer, key) is not None:
                raise ValueError(f"{key!r} is a condition on what reads the tensor; put it into 'consumer'")
        if self.consumer.readers is not None:
            raise ValueError("'readers' counts who reads the tensor; put it into 'producer'")
        if self.producer == self.consumer == Selector():
            raise ValueError("the rule has no condition; give it a 'producer' or a 'consumer', kind = '*' for any op")
        return self


PREPARATION_NAMES = (
    "requantize",
    *("initializer-inputs", "constant-nodes", "inference-batchnorm", "drop-identity", "drop-dropout"),
    "fold-batchnorm",
)
"""The steps before matching; `graphquant.prepare.STEPS` says what each is for."""

ALGORITHM_NAMES = (
    *("equalization", "migration", "weight-clipping"),
    *("error-compensation", "adaptive-rounding", "bias-correction"),
)
"""The steps before calibration and between scales and rewriting; `BALANCINGS` and `ALGORITHM_NAMES` of
`graphquant.corrections` say what each is for."""

NEGATION = "not "
"""What stands before the name of a step that a rule file does not want, whatever the files after it say."""


def _check_steps(value: list[str], allowed: tuple[str, ...]) -> list[str]:
    """`value`, a list of steps that are wanted or not, if it makes sense."""
    check_known_words("step", [name.removeprefix(NEGATION) for name in value], allowed)
    contradicted = next((name for name in value if NEGATION + name in value), None)
    if contradicted is not None:
        raise ValueError(f"{contradicted!r} is wanted and not wanted; leave out one of the two")
    return value


@dataclass(frozen=True, slots=True, kw_only=True, config=FORBID_EXTRA)
class RuleFile:
    """The tables of one rule file.

    Attributes:
        description: One line for `graphquant rules list`.
        prepare: Steps the rules want before matching ("fold-batchnorm"), or do not want though a file after this one
            does ("not fold-batchnorm").
        algorithms: Corrections of weights and biases the rules want once scales are known ("bias-correction"), or do not
            want ("not bias-correction").
        scheme: Schemes by name.
        pattern: Patterns by name.
        rule: The rules, in order.
    """

    description: str = ""
    prepare: list[
        Annotated[
            str,
            Field(json_schema_extra={"enum": [*PREPARATION_NAMES, *(NEGATION + name for name in PREPARATION_NAMES)]}),
        ]
    ] = Field(default_factory=list)
    algorithms: list[
        Annotated[
            str, Field(json_schema_extra={"enum": [*ALGORITHM_NAMES, *(NEGATION + name for name in ALGORITHM_NAMES)]})
        ]
    ] = Field(default_factory=list)
    scheme: dict[str, Scheme] = Field(default_factory=dict)
    pattern: dict[str, Pattern] = Field(default_factory=dict)
    rule: list[Rule] = Field(default_factory=list)

    @field_validator("prepare")
    @classmethod
    def _check_preparations(cls, value: list[str]) -> list[str]:
        return _check_steps(value, PREPARATION_NAMES)

    @field_validator("correct")
    @classmethod
    def _check_algorithms(cls, value: list[str]) -> list[str]:
        return _check_steps(value, ALGORITHM_NAMES)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BoundRule:
    """A rule with the file it came from: its schemes and patterns are that file's, and `find_line` finds its line there."""

    rule: Rule
    file: str
    find_line: Callable[[], int]
    scheme: Scheme | None
    patterns: dict[str, Pattern]

    @property
    def line(self) -> int:
        """Where it begins in the file."""
        return self.find_line()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """The rules of all files in the order given, the first that matches a use wins.

    Attributes:
        files: Names of the files as they were asked for.
        descriptions: What each file says it is for.
        digest: Hex SHA-256 over the files' contents.
        prepare: The steps the files want, each once; the first file that names a step decides.
        algorithms: The corrections, likewise.
        rules: The rules.
    """

    files: tuple[str, ...]
    descriptions: tuple[str, ...]
    digest: str
    prepare: tuple[str, ...]
    algorithms: tuple[str, ...] = ()
    rules: tuple[BoundRule, ...]
