"""What rule files say of ops: conditions on one, and small graphs of several."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, field_validator, model_validator
from pydantic.dataclasses import dataclass

from graphquant.ruleset.fields import FROZEN, Count, Text, known_words
from graphquant.ruleset.syntax import compile_regex, parse_chain, parse_pattern

CONSUMER_ONLY = (
    *("input", "min_channels", "max_channels", "min_in_channels", "max_in_channels", "multiple_of"),
    *("min_rows", "max_rows", "min_kernel", "max_groups", "path", "beside"),
)
"""The conditions of a selector that are on what reads a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True, config=FROZEN)
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

    kind: Text | None = None
    type: Text | None = None
    name: Text | None = None
    input: Text | None = None
    pattern: Text | None = None
    attr: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    readers: Count | None = None
    min_rank: Count | None = None
    max_rank: Count | None = None
    min_size: Count | None = None
    max_size: Count | None = None
    min_channels: Count | None = None
    max_channels: Count | None = None
    min_in_channels: Count | None = None
    max_in_channels: Count | None = None
    multiple_of: Annotated[StrictInt, Field(ge=1)] | None = None
    min_rows: Count | None = None
    max_rows: Count | None = None
    min_kernel: Count | None = None
    max_groups: Count | None = None
    path: Literal["longest"] | None = None
    beside: Text | None = None

    @field_validator("kind")
    @classmethod
    def _chain(cls, value: str | None) -> str | None:
        from graphquant.ir.kinds import KINDS

        for link in parse_chain(value) if value is not None else ():
            known_words("kind", sorted(link.kinds), KINDS)
        return value

    @field_validator("input")
    @classmethod
    def _role(cls, value: str | None) -> str | None:
        from graphquant.ir.kinds import ROLES

        known_words("input role", value.split("|") if value is not None else (), ROLES)
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


@dataclass(frozen=True, slots=True, kw_only=True, config=FROZEN)
class Pattern:
    """A small graph as text: `ops = ["s = sigmoid(x)", "y = mul(x, s)"]`.

    Attributes:
        ops: One op a line, `name = kind(operand, ...)`; the last one is the pattern's result.
    """

    ops: Annotated[tuple[Text, ...], Field(min_length=1, max_length=32)]

    @field_validator("ops")
    @classmethod
    def _parse(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        from graphquant.ir.kinds import KINDS

        for op in parse_pattern(value):
            known_words("kind", sorted(op.kinds), KINDS)
        return value
