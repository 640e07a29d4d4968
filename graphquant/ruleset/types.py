"""What a rule file says, as data: rules and what a file has beside them.

pydantic checks each value as it is made and gives the JSON Schema that editors complete from.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, StrictBool, field_validator, model_validator
from pydantic.dataclasses import dataclass

from graphquant.ruleset.fields import FROZEN, Text, known_words
from graphquant.ruleset.scheme import Scheme  # noqa: TC001 - pydantic needs it at run time
from graphquant.ruleset.selector import CONSUMER_ONLY, Pattern, Selector

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True, config=FROZEN)
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
    quantize: Text
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
    known_words("step", [name.removeprefix(NOT) for name in value], known)
    twice = next((name for name in value if NOT + name in value), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is wanted and not wanted; leave out one of the two")
    return value


@dataclass(frozen=True, slots=True, kw_only=True, config=FROZEN)
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
