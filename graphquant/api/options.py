"""Options of the public functions, each declared once.

The command line, the Python signatures, the manifest of `batch`, its JSON Schema and the tables in the documentation are
derived from the fields of these classes, so an option has the same name, unit and default everywhere.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, WithJsonSchema
from pydantic.dataclasses import dataclass as pydantic_dataclass

from graphquant.errors import UsageError, did_you_mean, escape_unprintable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.calibration import Stats
    from graphquant.ir import Model
    from graphquant.quantize import Plan

    NameOrNames = str | Path | Sequence[str | Path]
    StatsSource = Stats | str | Path
    PlanSource = Plan | str | Path
    ModelSource = Model | str | Path
    NameMapSource = Mapping[str, str] | str | Path
else:
    # The classes above are heavy to import, and pydantic would have to import them to build its validators. The
    # functions check such values when they use them.
    StatsSource = PlanSource = ModelSource = Annotated[Any, WithJsonSchema({"type": "string"})]
    NameMapSource = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})]

OptionsClass = TypeVar("OptionsClass")
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

OPTIMIZE_GOALS = ("macs", "size", "latency")
"""Costs that a plan can minimize."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CliForm:
    """Command-line form of an option.

    Attributes:
        metavar: Placeholder of the value in `--help`, or "" for a flag.
        flag: Name on the command line, or "" for `--` and the name of the field.
        path: True if the value is a file.
        help: Help text, if it differs from the field's description because the flag negates it.
    """

    metavar: str = ""
    flag: str = ""
    path: bool = False
    help: str = ""


PYTHON_ONLY = "python-only"
"""Marks a field that the command line does not have."""


def parse_share(value: Any) -> float:
    """Return a share from 0 to 1, given as a number or as a percentage such as "99%".

    Numbers above 1 are rejected because 99 could mean a percentage or a mistake, and 0.99 percent is a valid bound too.

    Raises:
        ValueError: The value is not such a share.
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
        raise ValueError(f"{escape_unprintable(text[:40])} is no share. Use 0 to 1, or a percentage such as 99%.{hint}")
    return share


def parse_finite(value: float) -> float:
    """Return `value` if it is finite, because a comparison with NaN or infinity never fails or always does.

    Raises:
        ValueError: The value is NaN or infinite.
    """
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    return value


def parse_bytes(value: Any) -> int:
    """Return a number of bytes, given as a number or as a size such as "512MB".

    Raises:
        ValueError: The value is not a size.
    """
    from graphquant.calibration import parse_size

    try:
        return parse_size(str(value))
    except UsageError as error:
        raise ValueError(str(error)) from error


def parse_names(value: Any) -> tuple[str, ...]:
    """Return one name or several as a tuple. A string is one name, not a sequence of letters.

    Raises:
        ValueError: The value is neither.
    """
    names = [value] if isinstance(value, str | Path) else value
    if not isinstance(names, Iterable):
        raise ValueError(f"{escape_unprintable(repr(value))} is neither a name nor a list of names")  # noqa: TRY004
    return tuple(map(str, names))


Names = Annotated[tuple[str, ...], BeforeValidator(parse_names)]
Share = Annotated[float, BeforeValidator(parse_share)]
Decibels = Annotated[float, AfterValidator(parse_finite)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Count = Annotated[int, Field(ge=1)]

_CONFIG = ConfigDict(extra="forbid")


@pydantic_dataclass(frozen=True, kw_only=True, config=_CONFIG)
class PlanOptions:
    """Options of `plan`: the tensors to quantize, and how."""

    rules: Annotated[Names, CliForm(metavar="NAME|FILE|RULE")] = Field(
        default=(),
        description="Rule files, by name, path or text, or one-line rules 'PRODUCER > CONSUMER: BITS, EXPONENT'. The"
        " first matching rule wins. Default: the rules of the model's format.",
    )
    include: Annotated[Names, CliForm(metavar="PATTERN")] = Field(
        default=(), description="Quantize only the tensors and ops that these globs or /regexes/ match."
    )
    exclude: Annotated[Names, CliForm(metavar="PATTERN")] = Field(
        default=(), description="Keep the tensors and ops float that these globs or /regexes/ match."
    )
    family: Annotated[str | None, CliForm(metavar="NAME")] = Field(
        default=None,
        description="Family of QDQ ops for schemes that name none: onnx-qdq, fake-quant, quantize-and-dequantize-v2,"
        " -v3 or -v4.",
    )
    method: Annotated[str | None, CliForm(metavar="NAME")] = Field(
        default=None, description="Observer that computes ranges from data, instead of the observers of the rules."
    )
    requantize: Annotated[bool, CliForm()] = Field(
        default=False, description="Remove the existing quantization of the model first."
    )
    algorithms: Annotated[Names, CliForm(metavar="NAME", flag="--algorithm")] = Field(
        default=(),
        description="Optimization algorithms in addition to those of the rules, or 'not NAME' to disable one; see"
        " docs/corrections.md.",
    )


@pydantic_dataclass(frozen=True, kw_only=True, config=_CONFIG)
class InsertOptions(PlanOptions):
    """Options of `insert`."""

    data: Annotated[str | None, CliForm(metavar="SPEC")] = Field(
        default=None,
        description="Calibration data: .npz, a folder, photos,preset=imagenet, or module:function, which is executed;"
        " see docs/data.md.",
    )
    samples: Annotated[Count | None, CliForm(metavar="N")] = Field(
        default=None, description="Use only the first N samples."
    )
    stats: Annotated[StatsSource | None, CliForm(metavar="FILE", path=True)] = Field(
        default=None, description="Statistics from calibrate. The data is then used for validation and for algorithms."
    )
    plan: Annotated[PlanSource | None, CliForm(metavar="FILE", path=True)] = Field(
        default=None, description="Apply this plan instead of rules."
    )
    ranges: Annotated[ModelSource | None, CliForm(metavar="FILE.tflite", path=True)] = Field(
        default=None, description="TFLite file whose scales are used for activations of the same name."
    )
    ranges_map: Annotated[NameMapSource | None, CliForm(metavar="FILE.toml", path=True)] = Field(
        default=None, description="Map from tensors of the model to tensors of the TFLite file."
    )
    max_memory: Annotated[Bytes | None, CliForm(metavar="SIZE")] = Field(
        default=None,
        description="Memory for observed values during calibration, such as 512MB. Default: half of the free memory.",
    )
    float_weights: Annotated[bool, CliForm()] = Field(
        default=False, description="Store weights as floats, followed by a complete QDQ pair."
    )
    validate: Annotated[
        bool,
        CliForm(flag="--no-validate", help="Calibrate on all samples and do not validate the quantized model."),
    ] = Field(default=True, description="Hold out samples from calibration and validate the quantized model on them.")
    min_sqnr: Annotated[Decibels | None, CliForm(metavar="DB")] = Field(
        default=None,
        description="Minimum SQNR of each output. A bound starts a search for the cheapest plan that meets it.",
    )
    min_agreement: Annotated[Share | None, CliForm(metavar="SHARE")] = Field(
        default=None, description="Minimum top-1 agreement of each output: 0.99 or 99%."
    )
    max_accuracy_drop: Annotated[Share | None, CliForm(metavar="SHARE")] = Field(
        default=None, description="Maximum loss of accuracy of each output: 0.005 or 0.5%. The data needs labels."
    )
    optimize: Annotated[Literal["macs", "size", "latency"], CliForm(metavar="COST")] = Field(
        default="macs",
        description="Cost to minimize: float MACs, weight bytes, or latency on this machine. Latency needs no bound.",
    )
    size_budget: Annotated[str | None, CliForm(metavar="SIZE")] = Field(
        default=None,
        description="Maximum bytes of all constants, such as 2MB, or 25% of the float model's. Weights get 4 bits,"
        " 8 bits or float.",
    )
    runtime: Annotated[Literal["tflite"] | None, PYTHON_ONLY] = Field(
        default=None,
        description='"tflite" to minimize the latency of a TFLite file. Default: the runtime of the format.',
    )


@pydantic_dataclass(frozen=True, kw_only=True, config=_CONFIG)
class CalibrateOptions:
    """Options of `calibrate`."""

    rules: Annotated[Names, CliForm(metavar="NAME|FILE")] = Field(
        default=(), description="Rule files whose observers need statistics. Default: the rules of the model's format."
    )
    everything: Annotated[bool, CliForm(flag="--all")] = Field(
        default=False, description="Observe each float tensor, so that the statistics serve any rules."
    )
    full: Annotated[bool, PYTHON_ONLY] = Field(
        default=True,
        description="Collect histograms even if no observer of the plan reads them, so that other methods can.",
    )
    samples: Annotated[Count | None, CliForm(metavar="N")] = Field(
        default=None, description="Use only the first N samples."
    )
    shard: Annotated[tuple[int, int], PYTHON_ONLY] = Field(
        default=(1, 1), description="Part of the data to run, counted from 1, and the number of parts."
    )
    max_memory: Annotated[Bytes | None, CliForm(metavar="SIZE")] = Field(
        default=None, description="Memory for observed values, such as 512MB. Default: half of the free memory."
    )


@pydantic_dataclass(frozen=True, kw_only=True, config=_CONFIG)
class CompareOptions:
    """Options of `compare`."""

    samples: Annotated[Count | None, CliForm(metavar="N")] = Field(
        default=None, description="Use only the first N samples."
    )
    outputs: Annotated[dict[str, str], PYTHON_ONLY] = Field(
        default_factory=dict,
        description="Outputs of the float model by name, and their names in the quantized model. Other outputs are"
        " matched by name, then in order.",
    )
    sites: Annotated[bool, CliForm(flag="--outputs-only", help="Compare only the outputs, which is faster.")] = Field(
        default=True, description="Measure quantized tensors as well as outputs."
    )
    sensitivity: Annotated[bool, CliForm()] = Field(
        default=False, description="Measure the effect of each quantized tensor on the outputs, in at most 16 runs."
    )


@pydantic_dataclass(frozen=True, kw_only=True, config=_CONFIG)
class CompareBounds:
    """Bounds of the `compare` command. They use the same units as those of `insert`."""

    min_sqnr: Annotated[Decibels | None, CliForm(metavar="DB")] = Field(
        default=None, description="Exit code 1 if an output has a lower SQNR."
    )
    min_agreement: Annotated[Share | None, CliForm(metavar="SHARE")] = Field(
        default=None, description="Exit code 1 if an output has a lower top-1 agreement: 0.99 or 99%."
    )


@pydantic_dataclass(frozen=True, kw_only=True, config=_CONFIG)
class ExplainOptions:
    """Options of `explain`."""

    rules: Annotated[Names, CliForm(metavar="NAME|FILE")] = Field(
        default=(), description="Rule files. The first matching rule wins. Default: the rules of the model's format."
    )
    plan: Annotated[PlanSource | None, CliForm(metavar="FILE", path=True)] = Field(
        default=None, description="Explain this plan instead of rules."
    )
    data: Annotated[str | None, CliForm(metavar="SPEC")] = Field(
        default=None, description="Calibration data, to explain the scales that insert would choose."
    )
    stats: Annotated[StatsSource | None, CliForm(metavar="FILE", path=True)] = Field(
        default=None, description="Statistics from calibrate, instead of data."
    )
    backend: Annotated[str | None, CliForm(metavar="BACKEND", flag="--for")] = Field(
        default=None, description="Backend that will run the model. Default: the backend of the rules."
    )


def resolve_options(
    options_class: type[OptionsClass], options: OptionsClass | None, values: Mapping[str, Any]
) -> OptionsClass:
    """Combine an options object with keyword arguments, which override it.

    Raises:
        TypeError: There is no such option.
        UsageError: The value of an option is invalid.
    """
    names = option_names(options_class)
    unknown = next((name for name in values if name not in names), None)
    if unknown is not None:
        raise TypeError(f"There is no option {unknown!r}.{did_you_mean(unknown, names)}")
    base = {} if options is None else {name: getattr(options, name) for name in names}
    try:
        return options_class(**{**base, **values})
    except ValidationError as error:
        raise UsageError(_validation_message(error)) from error


def _validation_message(error: ValidationError) -> str:
    """Return the first problem as a sentence that names the option."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    end = "" if message.endswith((".", "?")) else "."
    return f"The option {first['loc'][0]} is invalid: {message}{end}"


def option_names(options_class: type[Any]) -> tuple[str, ...]:
    """Return the names of the options in the order of their declaration."""
    return tuple(option.name for option in fields(options_class))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionField:
    """One option, as the command line and the documentation see it.

    Attributes:
        name: Name of the field.
        annotation: Type with its validators.
        default: Default value.
        description: One or two sentences.
        cli: Command-line form, or None if only Python has the option.
    """

    name: str
    annotation: Any
    default: Any
    description: str
    cli: CliForm | None

    @property
    def flag(self) -> str:
        """Name on the command line."""
        return (self.cli.flag if self.cli else "") or f"--{self.name.replace('_', '-')}"

    def parse(self, value: Any) -> Any:
        """Validate one value.

        Raises:
            ValidationError: The value is invalid.
        """
        return TypeAdapter(self.annotation).validate_python(value)


def option_fields(options_class: type[Any]) -> tuple[OptionField, ...]:
    """Return the options of a class in the order of their declaration."""
    hints = get_type_hints(options_class, include_extras=True)
    result = []
    for option in fields(options_class):
        info = options_class.__pydantic_fields__[option.name]
        form = next((extra for extra in hints[option.name].__metadata__ if isinstance(extra, CliForm)), None)
        default = info.get_default(call_default_factory=True)
        result.append(
            OptionField(
                name=option.name,
                annotation=hints[option.name],
                default=None if default is MISSING else default,
                description=info.description or "",
                cli=form,
            )
        )
    return tuple(result)


def takes_options(options_class: type[Any]) -> Callable[[AnyFunction], AnyFunction]:
    """Document the options of a function that takes them as keyword arguments: in its signature and its docstring."""

    def document(function: AnyFunction) -> AnyFunction:
        options = option_fields(options_class)
        signature = inspect.signature(function)
        explicit = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        generated = [
            inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default) for option in options
        ]
        positional = [p for p in explicit if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        keywords = [p for p in explicit if p.kind is inspect.Parameter.KEYWORD_ONLY]
        function.__signature__ = signature.replace(parameters=[*positional, *generated, *keywords])  # type: ignore[attr-defined]
        lines = "\n".join(f"    {option.name}: {option.description}" for option in options)
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions:\n{lines}\n"
        return function

    return document


def options_table(options_class: type[Any]) -> str:
    """Return a Markdown table of the options, for the documentation."""
    rows = ["| Python | command line | default | meaning |", "| --- | --- | --- | --- |"]
    for option in option_fields(options_class):
        flag = "" if option.cli is None else f"`{option.flag}{f' {option.cli.metavar}' if option.cli.metavar else ''}`"
        default = "" if option.default in (None, (), {}) else f"`{option.default!r}`"
        rows.append(f"| `{option.name}` | {flag.replace('|', chr(92) + '|')} | {default} | {option.description} |")
    return "\n".join(rows)
