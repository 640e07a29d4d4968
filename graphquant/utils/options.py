"""Options of the public functions, each declared once.

The command line, the Python signatures, the manifest of `batch`, its JSON Schema and the tables in the documentation
are derived from the fields of these classes, so an option has the same name, unit and default everywhere. Their types
are in `option_types`; pydantic validates the values.
"""

# ruff: noqa: RUF009  # option() returns a dataclass field, not a shared default

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_type_hints

from graphquant.errors import CallError, GraphQuantError, UsageError, did_you_mean
from graphquant.utils.argument_types import is_accepted, parameter_types

if TYPE_CHECKING:
    from graphquant.utils.option_types import (
        Bytes,
        CacheType,
        Cost,
        Count,
        DataSpec,
        Decibels,
        InputOutputType,
        MetricFunction,
        NameMapOrPath,
        Names,
        NonNegative,
        ObjectOrPath,
        RangeSource,
        Runtime,
        SearchTime,
        Share,
        SqnrTarget,
        Tags,
    )

NO_TARGET = "none"  # value of `min_sqnr` that disables the default target

# Names for the help and the completion of the command line, which must not import the tables that define them.
# `tests/cli/test_help.py` compares them with these tables.
RULE_NAMES = (
    *("onnxruntime", "tflite", "tflite16", "tensorrt", "qnn", "qnn16", "openvino", "vitis_ai", "generic"),
    *("fixed_point", "weight_only", "weight_only_int8", "weight_only_int4", "w4a8", "tables_int4", "dynamic"),
)
FAMILY_NAMES = (
    *("onnx-qdq", "onnx-fused", "fake-quant", "quantize-and-dequantize-v2", "quantize-and-dequantize-v3"),
    "quantize-and-dequantize-v4",
)
METHOD_NAMES = ("auto", "minmax", "absmax", "mean-minmax", "percentile", "mse", "entropy")
ALGORITHM_NAMES = (
    *("cross-layer-equalization", "smoothquant", "weight-clipping", "gptq", "adaround", "bias-correction"),
)
BACKEND_NAMES = ("onnxruntime", "onnxruntime-arm", "tensorrt", "qnn", "openvino", "vitis_ai")

OptionsClass = TypeVar("OptionsClass", bound="Options")
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


class OptionForm(NamedTuple):
    """Documentation and command-line form of an option."""

    description: str  # one or two sentences
    metavar: str = ""  # placeholder of the value in `--help`, or "" for a flag
    flag: str = ""  # name on the command line, or "" for `--` and the name of the field
    path: bool = False  # True if the value is a file
    choices: tuple[str, ...] = ()  # possible values, if there are only a few
    names: tuple[str, ...] = ()  # names that `--help` and completion list; files, say, are possible values too
    help: str = ""  # help text, if it differs from the description because the flag negates the field
    python_only: bool = False  # True if the command line does not have the option


def option(default: Any, description: str, **form: Any) -> Any:
    """Declare an option."""
    metadata = {"form": OptionForm(description=description, **form)}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


class Options:
    """Base of the options models, which validates each value."""

    def __post_init__(self) -> None:
        """Replace each value by its validated form; raise UsageError if a value is invalid."""
        for entry in option_fields(type(self)):
            value = getattr(self, entry.name)
            # Defaults are valid, and skipping them avoids the import of pydantic.
            if value is not entry.default:
                object.__setattr__(self, entry.name, entry.parse(value))


@dataclass(frozen=True, kw_only=True)
class ReadOptions(Options):
    """Options of each function that reads a model."""

    allow_links: bool = option(
        False,
        "Follow symbolic links of a model's files out of its folder, as in the cache of Hugging Face. Their content"
        " becomes part of the output.",
    )


@dataclass(frozen=True, kw_only=True)
class SignatureOptions(ReadOptions):
    """Options of each function that runs a model, or plans for its runs."""

    signature: Names = option(
        (),
        "Signature of a SavedModel to quantize and run. Default: quantize all, and run those that the data of the first"
        " one can feed.",
        metavar="NAME",
    )
    tags: Tags = option((), "Tags of the MetaGraph of a SavedModel, such as serve,gpu.", metavar="TAG[,TAG...]")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SignatureOptions):
    """Options of `plan`: the tensors to quantize, and how."""

    rules: Names = option(
        (),
        "Rule files, by name, path or text, or one-line rules 'PRODUCER > CONSUMER: BITS, EXPONENT'. The first matching"
        " rule wins. Default: the rules of the model's format.",
        metavar="NAME|FILE|RULE",
        names=RULE_NAMES,
    )
    include: Names = option(
        (), "Quantize only the tensors and ops that these globs or /regexes/ match.", metavar="PATTERN"
    )
    exclude: Names = option(
        (), "Keep the tensors and ops float that these globs or /regexes/ match.", metavar="PATTERN"
    )
    family: str | None = option(
        None,
        "Family of QDQ ops for schemes that name none: onnx-qdq, fake-quant, quantize-and-dequantize-v2, -v3 or -v4.",
        metavar="NAME",
        names=FAMILY_NAMES,
    )
    range_source: RangeSource = option(
        "observed",
        "Source of the ranges of TensorFlow's ops, for schemes that name none; see docs/families.md.",
        metavar="SOURCE",
        choices=("observed", "given", "dynamic", "learned"),
    )
    method: str | None = option(
        None,
        "Observer that computes ranges from data, instead of the observers of the rules.",
        metavar="NAME",
        names=METHOD_NAMES,
    )
    requantize: bool = option(False, "Remove the existing quantization of the model first.")
    algorithms: Names = option(
        (),
        "Optimization algorithms in addition to those of the rules, or 'not NAME' to disable one; see"
        " docs/algorithms.md.",
        metavar="NAME",
        flag="--algorithm",
        names=ALGORITHM_NAMES,
    )


@dataclass(frozen=True, kw_only=True)
class InsertOptions(PlanOptions):
    """Options of `insert`."""

    data: DataSpec | None = option(
        None,
        "Calibration data: .npz, a folder, photos,preset=imagenet, or module:function, which is executed; see"
        " docs/data.md.",
        metavar="SPEC",
    )
    samples: Count | None = option(None, "Use only the first N samples.", metavar="N")
    stats: ObjectOrPath | None = option(
        None,
        "Statistics from calibrate. The data is then used for validation and for algorithms.",
        metavar="FILE",
        path=True,
    )
    plan: ObjectOrPath | None = option(None, "Apply this plan instead of rules.", metavar="FILE", path=True)
    ranges: ObjectOrPath | None = option(
        None,
        "Quantized model, AIMET encodings, TensorRT calibration cache or overrides of onnxruntime, whose ranges are"
        " used for activations of the same name.",
        metavar="FILE",
        path=True,
    )
    keep_ranges: bool = option(
        False, "With requantize: keep the learned ranges of activations and weights that the model has."
    )
    ranges_map: NameMapOrPath | None = option(
        None, "Map from tensors of the model to tensors of the file of ranges.", metavar="FILE.toml", path=True
    )
    max_memory: Bytes | None = option(
        None,
        "Memory for observed values during calibration, such as 512MB. Default: half of the free memory.",
        metavar="SIZE",
    )
    float_weights: bool = option(False, "Store weights as floats, followed by a complete QDQ pair.")
    allow_empty: bool = option(False, "Accept a result in which no tensor is quantized. Without it, that is an error.")
    validate: bool = option(
        True,
        "Hold out samples from calibration and validate the quantized model on them.",
        flag="--no-validate",
        help="Calibrate on all samples and do not validate the quantized model.",
    )
    min_sqnr: SqnrTarget | None = option(
        None,
        "Minimum SQNR of each output. The search finds the cheapest plan that meets it. Default: a target of 20 dB,"
        " whose miss is a warning; 'none' disables it.",
        metavar="DB|none",
    )
    min_agreement: Share | None = option(None, "Minimum top-1 agreement of each output: 0.99 or 99%.", metavar="SHARE")
    max_accuracy_drop: Share | None = option(
        None, "Maximum loss of accuracy of each output: 0.005 or 0.5%. The data needs labels.", metavar="SHARE"
    )
    metric: MetricFunction | None = option(
        None,
        "Function of outputs and labels that scores a batch, higher is better; it is executed. See docs/compare.md.",
        metavar="MODULE:FUNCTION",
    )
    max_metric_drop: NonNegative | None = option(
        None, "Maximum loss of the metric against the float model, in its own unit.", metavar="X"
    )
    strict: bool = option(
        False,
        "Exit code 1 also if an output misses the default target of 20 dB, if the samples are too few to prove that a"
        " bound is met, or if the models could not be compared.",
    )
    min_quantized: Share | None = option(
        None,
        "Minimum share of multiply-adds whose inputs are all quantized: 0.9 or 90%. The search ignores it.",
        metavar="SHARE",
    )
    optimize: Cost = option(
        "macs",
        "Cost to minimize: float MACs, weight bytes, or latency on this machine. Latency needs no bound.",
        metavar="COST",
        choices=("macs", "size", "latency"),
    )
    search_time: SearchTime = option(
        "10x",
        "Limit of the search: seconds, such as 90s, or a multiple of the calibration's time, such as 10x.",
        metavar="TIME",
    )
    size_budget: str | None = option(
        None,
        "Maximum bytes of all constants, such as 2MB, or 25% of the float model's. Weights get 4 bits, 8 bits or"
        " float.",
        metavar="SIZE",
    )
    io: InputOutputType | None = option(
        None,
        "Type of the float inputs and outputs of an ONNX model or a TFLite file. Default: float32 in ONNX, and the type"
        " of the plan's activations in TFLite if all of them have a range.",
        metavar="TYPE",
        choices=("int8", "uint8", "int16", "float32"),
    )
    kv_cache: CacheType | None = option(
        None,
        "Type of the past keys and values of GroupQueryAttention in an ONNX model, with a scale for each channel or"
        " tensor. Needs data. Default: as the model has them.",
        metavar="TYPE",
        choices=("int8", "int8-per-tensor"),
    )
    runtime: Runtime | None = option(
        None, '"tflite" to minimize the latency of a TFLite file. Default: the runtime of the format.', python_only=True
    )


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(SignatureOptions):
    """Options of `calibrate`."""

    rules: Names = option(
        (),
        "Rule files whose observers need statistics. Default: the rules of the model's format.",
        metavar="NAME|FILE",
        names=RULE_NAMES,
    )
    everything: bool = option(False, "Observe each float tensor, so that the statistics serve any rules.", flag="--all")
    full: bool = option(
        True,
        "Collect histograms even if no observer of the plan reads them, so that other methods can.",
        python_only=True,
    )
    samples: Count | None = option(None, "Use only the first N samples.", metavar="N")
    shard: tuple[Count, Count] = option(
        (1, 1), "Part of the data to run, counted from 1, and the number of parts.", python_only=True
    )
    max_memory: Bytes | None = option(
        None, "Memory for observed values, such as 512MB. Default: half of the free memory.", metavar="SIZE"
    )


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SignatureOptions):
    """Options of `compare`."""

    samples: Count | None = option(None, "Use only the first N samples.", metavar="N")
    outputs: dict[str, str] = option(
        {},
        "Outputs of the float model by name, and their names in the quantized model. Other outputs are matched by"
        " name, then in order.",
        python_only=True,
    )
    sites: bool = option(
        True,
        "Measure quantized tensors as well as outputs.",
        flag="--outputs-only",
        help="Compare only the outputs, which is faster.",
    )
    metric: MetricFunction | None = option(
        None,
        "Function of outputs and labels that scores a batch, higher is better; it is executed. See docs/compare.md.",
        metavar="MODULE:FUNCTION",
    )
    sensitivity: bool = option(False, "Measure the effect of each quantized tensor on the outputs, in at most 16 runs.")
    max_memory: Bytes | None = option(
        None, "Maximum size of a tensor of a small model, such as 4GB. Default: 256 MiB.", metavar="SIZE"
    )


@dataclass(frozen=True, kw_only=True)
class CompareBounds(Options):
    """Bounds of the `compare` command. They use the same units as those of `insert`."""

    min_sqnr: Decibels | None = option(None, "Exit code 1 if an output has a lower SQNR.", metavar="DB")
    min_agreement: Share | None = option(
        None, "Exit code 1 if an output has a lower top-1 agreement: 0.99 or 99%.", metavar="SHARE"
    )
    max_metric_drop: NonNegative | None = option(
        None, "Exit code 1 if the metric of the quantized model is lower by more, in its own unit.", metavar="X"
    )


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(SignatureOptions):
    """Options of `explain`."""

    rules: Names = option(
        (),
        "Rule files. The first matching rule wins. Default: the rules of the model's format.",
        metavar="NAME|FILE",
        names=RULE_NAMES,
    )
    plan: ObjectOrPath | None = option(None, "Explain this plan instead of rules.", metavar="FILE", path=True)
    data: DataSpec | None = option(
        None, "Calibration data, to explain the scales that insert would choose.", metavar="SPEC"
    )
    stats: ObjectOrPath | None = option(None, "Statistics from calibrate, instead of data.", metavar="FILE", path=True)
    backend: str | None = option(
        None,
        "Backend that will run the model. Default: the backend of the rules.",
        metavar="BACKEND",
        flag="--for",
        names=BACKEND_NAMES,
    )


class OptionField(NamedTuple):
    """One option, as the command line and the documentation see it."""

    owner: type[Any]  # the options model
    name: str  # name of the field
    default: Any  # default value
    form: OptionForm  # documentation and command-line form

    @property
    def annotation(self) -> Any:
        """Type with its validators."""
        from graphquant.utils import option_types

        return get_type_hints(self.owner, localns=vars(option_types), include_extras=True)[self.name]

    @property
    def description(self) -> str:
        """One or two sentences."""
        return self.form.description

    @property
    def flag(self) -> str:
        """Name on the command line."""
        return self.form.flag or f"--{self.name.replace('_', '-')}"

    def parse(self, value: Any) -> Any:
        """Return the validated value."""
        from pydantic import ValidationError

        from graphquant.utils.option_types import type_adapter

        try:
            return type_adapter(self.annotation).validate_python(value)
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            end = "" if message.endswith((".", "?")) else "."
            raise UsageError(f"The value of {self.name} is invalid: {message}{end}") from error


def option_fields(options_class: type[Any]) -> tuple[OptionField, ...]:
    """Return the options of a class in the order of their declaration."""
    return tuple(
        OptionField(
            owner=options_class,
            name=entry.name,
            default={} if entry.default is MISSING else entry.default,
            form=entry.metadata["form"],
        )
        for entry in fields(options_class)
    )


def resolve_options(
    options_class: type[OptionsClass], options: OptionsClass | None, values: Mapping[str, Any]
) -> OptionsClass:
    """Combine an options object with keyword arguments, which override it.

    Raises a CallError if there is no such option, and a UsageError if the value of an option is invalid.
    """
    names = [entry.name for entry in fields(options_class)]  # type: ignore[arg-type]  # a dataclass
    if (unknown := next((name for name in values if name not in names), None)) is not None:
        raise CallError(f"There is no option {unknown!r}.{did_you_mean(unknown, names)}")
    return options_class(**{**({} if options is None else {name: getattr(options, name) for name in names}), **values})


_IN_COMMAND: ContextVar[bool] = ContextVar("in_command", default=False)  # True while a command runs

# Texts of the command line that name no option of a class below, and the arguments of the public functions.
_PYTHON_WORDS = {
    "-o NAME.tflite": "gq.convert_to_tflite(result, 'NAME.tflite')",
    "--match NAME=OTHER": "outputs={'NAME': 'OTHER'}",
    "(calibrate --merge)": "(gq.merge_stats)",
    "--allow-empty (allow_empty=True in Python)": "allow_empty=True",
    "--force": "force=True",
    "-o": "path=",
}
_COMMAND = r"`[^`]*`|graphquant [a-z]+ [^`\n]*"  # a whole command, which stays as it is
_OPTION_VALUE = r"(?: ('[^']*'|[^\s;]*[A-Z0-9_=-][^\s;,.]*))?"


@contextmanager
def command_line_words() -> Iterator[None]:
    """Within this context, errors name the options of the command line instead of arguments."""
    token = _IN_COMMAND.set(True)
    try:
        yield
    finally:
        _IN_COMMAND.reset(token)


@cache
def _argument_by_flag() -> dict[str, str]:
    """Return the argument of each option: `data=` for `--data`, `validate=False` for `--no-validate`."""
    options = (InsertOptions, CalibrateOptions, CompareOptions, ExplainOptions)
    return {
        entry.flag: f"{entry.name}={not entry.default if isinstance(entry.default, bool) else ''}"
        for options_class in options
        for entry in option_fields(options_class)
    }


def python_words(message: str) -> str:
    """Return a message with the arguments of the public functions in place of options of the command line."""
    arguments = _argument_by_flag()
    phrases = "|".join(map(re.escape, _PYTHON_WORDS))
    pattern = (
        rf"(?P<command>{_COMMAND})|(?<![\w-])(?P<phrase>{phrases})(?![\w-])|(?P<flag>--[a-z][a-z-]*){_OPTION_VALUE}"
    )

    def replace_words(match: re.Match[str]) -> str:
        argument = arguments.get(match["flag"] or "", "")
        if match["phrase"]:
            return _PYTHON_WORDS[match["phrase"]]
        value = match[4] or ""
        return f"{argument}{' ' if value and not argument.endswith('=') else ''}{value}" if argument else match[0]

    calls = re.sub(r"(?m)^(?P<indent> +)graphquant (?P<words>.+)$", _python_call, message)
    return re.sub(pattern, replace_words, calls)


def _python_call(match: re.Match[str]) -> str:
    """Return the call of the public function that does the same as a command, which is on a line of its own."""
    function, *words = shlex.split(match["words"])
    arguments, output = list[str](), ""
    remaining = iter(words)
    for word in remaining:
        argument = _argument_by_flag().get(word, "")
        if word == "-o":
            output = f".save({next(remaining)!r})"
        elif argument:
            arguments.append(f"{argument}{next(remaining)!r}" if argument.endswith("=") else argument)
        else:
            arguments.append(repr(word))
    return f"{match['indent']}gq.{function}({', '.join(arguments)}){output}"


def checks_types(function: AnyFunction) -> AnyFunction:
    """Reject arguments of other types than those of the annotations with a UsageError that names the argument.

    Unless a command calls it, the errors of the function name arguments instead of options of the command line.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: Any, **values: Any) -> Any:
        types = parameter_types(function)
        try:
            arguments = signature.bind(*args, **values).arguments
        except TypeError as error:
            unknown = next((name for name in values if name not in signature.parameters), "")
            message = f"{function.__name__}() {error}.{did_you_mean(unknown, signature.parameters)}"
            raise CallError(message.removesuffix(".")) from None
        for name, value in arguments.items():
            if name in types and not is_accepted(value, types[name]):
                raise UsageError(
                    f"The value of {name} is invalid: it is of the type {type(value).__name__},"
                    f" not {signature.parameters[name].annotation}."
                )
        try:
            return function(*args, **values)
        except GraphQuantError as error:
            error.args = error.args if _IN_COMMAND.get() else (python_words(str(error)),)
            raise

    return checked  # type: ignore[return-value]  # it has the signature of the function


def takes_options(options_class: type[Any]) -> Callable[[AnyFunction], AnyFunction]:
    """Add the options to the signature and the docstring of a function that takes them as keyword arguments."""

    def document(function: AnyFunction) -> AnyFunction:
        options = option_fields(options_class)
        signature = inspect.signature(function)
        named = [entry for entry in signature.parameters.values() if entry.kind is not entry.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(entry.name, inspect.Parameter.KEYWORD_ONLY, default=entry.default) for entry in options
        ]
        parameters = [
            *(entry for entry in named if entry.kind is not entry.KEYWORD_ONLY),
            *keywords,
            *(entry for entry in named if entry.kind is entry.KEYWORD_ONLY),
        ]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        lines = "\n".join(f"    {entry.name}: {entry.description}" for entry in options)
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions:\n{lines}\n"
        return function

    return document
