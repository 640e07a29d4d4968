"""The data of rule files: rules, schemes, patterns and the requested steps.

pydantic validates each value on construction and generates the JSON Schema with which editors complete rule files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, StrictBool, StrictInt, ValidationInfo, field_validator, model_validator
from pydantic.dataclasses import dataclass

from graphquant.errors import UsageError, did_you_mean
from graphquant.rules.pattern_syntax import FUNCTIONS, compile_regex, parse_chain, parse_pattern, pattern_definitions
from graphquant.rules.scheme import FORBID_EXTRA, NonNegativeInt, Scheme, ShortText, check_known_words
from graphquant.utils.options import ALGORITHM_NAMES

# Conditions on one op, and patterns of several ops, as rule files describe them.

CONSUMER_CONDITIONS = (
    *("input", "min_channels", "max_channels", "min_in_channels", "max_in_channels", "multiple_of"),
    *("min_rows", "max_rows", "min_kernel", "min_groups", "max_groups"),
    *("max_group_inputs", "min_group_outputs", "path", "sibling_rule"),
)
"""Conditions of a selector that apply only to consumers."""

NO_COSTS = "none"  # value of `costs` with which the rules alone decide
SHIPPED_COSTS = "onnxruntime"  # name of the shipped cost table


@dataclass(frozen=True, slots=True, kw_only=True, config=FORBID_EXTRA)
class Selector:
    """Conditions on an op, all of which must hold.

    An empty selector matches any op. A condition on an unknown size does not hold.

    Attributes:
        kind: A framework-neutral kind, alternatives separated by `|`, or a chain `conv > batchnorm? > relu|relu6?`,
            producer first. `parameter` matches any weight, `*` any op.
        type: The framework's own op type, alternatives separated by `|`.
        name: A glob for the op or tensor name, or a regular expression between slashes `/.../`.
        input: Role of the input that reads the tensor ("input", "weight", "bias"), alternatives separated by `|`.
            Consumers only.
        pattern: `NAME` (its last op), `NAME.op` or `NAME.*` (any op) of a `[pattern.NAME]` or of a library,
            alternatives separated by `|`.
        feeds: `NAME.op` or `NAME.*` of a pattern that every consumer of the tensor, or of the op's outputs, belongs to.
            Ops between that move values, or add, subtract, multiply or divide by parameters, do not count.
        attr: Attribute conditions: a value that must be equal, or a list of allowed values.
        readers: Number of consumers that the tensor must have. Producers only.
        min_rank: Smallest number of axes of the tensor.
        max_rank: Largest number of axes of the tensor.
        min_size: Smallest number of elements of the tensor.
        max_size: Largest number of elements of the tensor.
        min_channels: Smallest number of output channels of the op, according to its weight. Consumers only.
        max_channels: Largest number of output channels. Consumers only.
        min_in_channels: Smallest number of input channels of the op, over all groups; for a matrix product the rows of
            its weight. Consumers only.
        max_in_channels: Largest number of input channels. Consumers only.
        multiple_of: A number that must divide the number of input channels. Consumers only.
        min_rows: Smallest number of rows of a matrix product's left operand. Consumers only.
        max_rows: Largest number of rows. Consumers only.
        min_kernel: Smallest size of the shortest side of a convolution's kernel. Consumers only.
        min_groups: Smallest number of groups of a convolution. Consumers only.
        max_groups: Largest number of groups. Consumers only.
        max_group_inputs: Largest number of input channels of each group. Consumers only.
        min_group_outputs: Smallest number of output channels of each group. Consumers only.
        path: "longest" selects, among the op's inputs that `producer` matches, the one farthest from the common
            ancestor of all of them, or the first if there is none. The op must read at least two tensors that are no
            parameters. Consumers only.
        sibling_rule: Name of a rule in the same file that claims another input of the op. Consumers only.
    """

    kind: ShortText | None = None
    type: ShortText | None = None
    name: ShortText | None = None
    input: ShortText | None = None
    pattern: ShortText | None = None
    feeds: ShortText | None = None
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
    min_groups: NonNegativeInt | None = None
    max_groups: NonNegativeInt | None = None
    max_group_inputs: NonNegativeInt | None = None
    min_group_outputs: NonNegativeInt | None = None
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
            raise ValueError(f"{value!r} is not an op type; write 'Conv' or 'Conv|Gemm'")
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
                f"{value!r} is no valid regular expression ({error}); a name without slashes is a glob"
            ) from error
        return value

    @field_validator("attr")
    @classmethod
    def _check_attr_values(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, condition in value.items():
            alternatives = condition if isinstance(condition, list) else [condition]
            rows = [entry if isinstance(entry, list) else [entry] for entry in alternatives]
            if not all(isinstance(scalar, bool | int | float | str) for row in rows for scalar in row):
                raise ValueError(f"the attribute {name!r} can only be compared with strings, numbers and booleans")
        return value

    @model_validator(mode="after")
    def _check_bounds(self) -> Selector:
        for quantity in ("rank", "size", "channels", "in_channels", "rows", "groups"):
            low, high = getattr(self, f"min_{quantity}"), getattr(self, f"max_{quantity}")
            if low is not None and high is not None and low > high:
                raise ValueError(f"'min_{quantity}' {low} is above 'max_{quantity}' {high}; nothing can match")
        return self


@dataclass(frozen=True, slots=True, kw_only=True, config=FORBID_EXTRA)
class Pattern:
    """A small graph as text: `ops = ["s = sigmoid(x)", "y = mul(x, s)"]`.

    Attributes:
        ops: One op a line, `name = kind(operand, ...)`. The last op is the pattern's result. An operand is a name, a
            number that a constant must have, or `_` for any input. Kinds may also be functions with several spellings:
            square(x), rsqrt(x), divide_by_sqrt(x, y), squared_difference(x, y), product(x, y, z),
            join(x, y).
    """

    ops: Annotated[tuple[ShortText, ...], Field(min_length=1, max_length=32)]

    @field_validator("ops")
    @classmethod
    def _check_ops(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        from graphquant.ir.kinds import KINDS

        ops = parse_pattern(value)
        for op in ops:
            check_known_words("kind", sorted(op.kinds), {*KINDS, *FUNCTIONS})
        pattern_definitions(ops)
        return value


@dataclass(frozen=True, slots=True, kw_only=True, config=FORBID_EXTRA)
class Rule:
    """One rule: the producer of a tensor, its consumer, and the quantization between them.

    "same-as-input" gives the tensor the scale of its producer's input. "passthrough" inserts nothing, because the
    producer passes quantized values through. If the producer's input is float, both leave the use to later rules.
    "float" inserts nothing. "fused" inserts nothing either: it stands before a Relu or Clip that the backend fuses into
    the producer. If the scale after that op does not end at its limits, as a tie may cause, the pair after the op is
    also inserted before it.

    Attributes:
        name: Unique in its file; letters, digits, '_', '-' and '.', because new ops may be named after it.
        why: The reason, shown in every report about the rule's sites.
        producer: Conditions on the op that produces the tensor.
        consumer: Conditions on the op that reads it. Only these uses are rerouted.
        quantize: A scheme, "same-as-input", "passthrough", "fused" or "float".
        optional: Accept a name selector that matches nothing.
        insert_in: For a tensor that a subgraph reads from outside, the graph in which it is quantized: once, next to
            its "producer", or in the "body" of each subgraph. It is dequantized in the body in both cases.
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
                raise ValueError(f"{key!r} is a condition on the consumer; move it to 'consumer'")
        if self.consumer.readers is not None:
            raise ValueError("'readers' is a condition on the producer; move it to 'producer'")
        if self.producer == self.consumer == Selector():
            raise ValueError("the rule has no condition; give it a 'producer' or a 'consumer', kind = '*' for any op")
        return self


@dataclass(frozen=True, slots=True, kw_only=True, config=FORBID_EXTRA)
class Library:
    """Patterns and rules that several rule files share."""

    description: str = ""  # the subject of the library in one line
    pattern: dict[str, Pattern] = Field(default_factory=dict)  # patterns by name
    # Rules without schemes, such as reasons why tensors stay float. They follow those of all files.
    rule: list[Rule] = Field(default_factory=list)


PREPARATION_NAMES = (
    "requantize",
    *("initializer-inputs", "constant-nodes", "inference-batchnorm", "split-fused", "drop-identity", "drop-dropout"),
    *("fold-batchnorm", "split-prelu", "rewrite-norms", "join-activations"),
)
"""Steps before matching; `PREPARATION_STEPS` in `graphquant.quantize.prepare` describes each."""

NEGATION = "not "  # prefix of a step that a rule file switches off, whatever later files request


def choose_algorithms(rule_algorithms: Sequence[str], requested: Sequence[str]) -> tuple[str, ...]:
    """Return the algorithms of the rules with the changes that a caller requests, in the order in which they run.

    `requested` are names to add, or with a leading "not " to remove.
    """
    for name in requested:
        algorithm = name.removeprefix(NEGATION)
        if algorithm not in ALGORITHM_NAMES:
            hint = did_you_mean(algorithm, ALGORITHM_NAMES) or f" Use one of {', '.join(ALGORITHM_NAMES)}."
            raise UsageError(f"The optimization algorithm {algorithm[:60]!r} does not exist.{hint}")
    enabled = {*rule_algorithms, *(name for name in requested if not name.startswith(NEGATION))}
    return tuple(name for name in ALGORITHM_NAMES if name in enabled and NEGATION + name not in requested)


def _step_choices(names: tuple[str, ...]) -> Any:
    return Field(json_schema_extra={"enum": [*names, *(NEGATION + name for name in names)]})


@dataclass(frozen=True, slots=True, kw_only=True, config=FORBID_EXTRA)
class RuleFile:
    """The tables of one rule file.

    Attributes:
        description: One line for `graphquant rules list`.
        target: The backend that the rules are for, if they are for one. `explain` predicts it. Without a target, the
            result must load in ONNX Runtime, and its optimizer is considered.
        prepare: Steps to run before matching ("fold-batchnorm"), or to switch off although a later file requests them
            ("not fold-batchnorm").
        algorithms: Optimization algorithms to run ("bias-correction"), or to switch off ("not bias-correction").
        extends: Name of a shipped rule file whose rules follow those of this file. Schemes of this file replace those
            of the same name there.
        use: Names of shipped libraries ("transformers", "weights") whose patterns the rules may name, and whose rules
            follow those of all files.
        costs: Table of kernel costs by which ops stay float where int8 does not pay: "onnxruntime" for the shipped one,
            or a TOML file, relative to the rule file. With "none" the rules alone decide, also those of later files and
            of `extends`; without this key, these may name a table.
        scheme: Schemes by name.
        pattern: Patterns by name.
        rule: The rules, in order.
    """

    description: str = ""
    target: Literal["", "onnxruntime", "onnxruntime-arm", "openvino", "qnn", "tensorrt", "vitis_ai"] = ""
    prepare: list[Annotated[str, _step_choices(PREPARATION_NAMES)]] = Field(default_factory=list)
    algorithms: list[Annotated[str, _step_choices(ALGORITHM_NAMES)]] = Field(default_factory=list)
    extends: str = ""
    use: list[ShortText] = Field(default_factory=list)
    costs: str = ""
    scheme: dict[str, Scheme] = Field(default_factory=dict)
    pattern: dict[str, Pattern] = Field(default_factory=dict)
    rule: list[Rule] = Field(default_factory=list)

    @field_validator("costs")
    @classmethod
    def _check_costs(cls, value: str) -> str:
        if value and not value.endswith(".toml"):
            check_known_words("cost table", [value], (NO_COSTS, SHIPPED_COSTS))
        return value

    @field_validator("prepare", "algorithms")
    @classmethod
    def _check_steps(cls, value: list[str], field: ValidationInfo) -> list[str]:
        allowed = PREPARATION_NAMES if field.field_name == "prepare" else ALGORITHM_NAMES
        check_known_words("step", [name.removeprefix(NEGATION) for name in value], allowed)
        if contradicted := next((name for name in value if NEGATION + name in value), None):
            raise ValueError(f"{contradicted!r} is switched on and off; remove one of the two")
        return value


class BoundRule(NamedTuple):
    """A rule with the name of its file, its line, its scheme, and the patterns of the file."""

    rule: Rule
    file: str
    find_line: Callable[[], int]
    scheme: Scheme | None
    patterns: dict[str, Pattern]
    inherited: bool = False  # True for a rule of a shipped file or library that a file names in `extends` or `use`

    @property
    def line(self) -> int:
        """The line at which the rule begins."""
        return self.find_line()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """The rules of all files in the given order. The first rule that matches a use wins."""

    files: tuple[str, ...]  # names of the files, as the caller named them
    descriptions: tuple[str, ...]  # description of each file
    targets: tuple[str, ...] = ()  # the backends that the files are for, each once
    digest: str  # hex SHA-256 over the files' contents
    prepare: tuple[str, ...]  # steps to run before matching, each once; the first file that names a step decides
    algorithms: tuple[str, ...] = ()  # optimization algorithms to run, likewise
    costs: str = ""  # table of kernel costs, by name or path, or "" for none; the first file with the key decides
    rules: tuple[BoundRule, ...]
