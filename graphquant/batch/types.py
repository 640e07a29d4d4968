"""What a batch is made of: entries, their gates, the outcome of each, and the report of all; JSON both ways."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from graphquant.errors import UsageError
from graphquant.ir import qualified_op_name

if TYPE_CHECKING:
    from pathlib import Path


REPORT_SCHEMA_VERSION = 1
"""Of reports."""

MAX_REPORT_BYTES = 1 << 30
"""Of a report's file."""

Level = Literal["error", "warning", "note"]
"""How much a finding or a change matters. As in `graphquant.backends`, which takes long to import."""

Status = Literal["done", "unchanged", "failed", "gate", "timeout", "crashed", "memory", "skipped"]
"""Made now; was there already; refused with an error; made, and a gate does not hold; took too long; its process died;
took too much memory; not begun, for the batch was stopped or the model is another shard's."""

PASSED_STATUSES = ("done", "unchanged")
"""The statuses that are no failures."""

TIME_KEYS = ("seconds", "attempts", "started")
"""Keys of a report that differ from run to run."""

_FORBID_EXTRA = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """Bounds that an output must keep.

    Attributes:
        min_sqnr: Of the worst output, dB.
        min_agreement: Of the worst output, percent.
        max_accuracy_drop: Percent points below the float model's; the data must have labels.
        max_size: Bytes of the output.
        check: The backend whose check must find nothing, "" for the check that is of no backend, None for no check.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID_EXTRA

    min_sqnr: float | None = None
    min_agreement: float | None = None
    max_accuracy_drop: float | None = None
    max_size: int | None = None
    check: str | None = None

    @property
    def needs_data(self) -> bool:
        """Whether the float model and the output have to be run beside each other."""
        return not (self.min_sqnr is self.min_agreement is self.max_accuracy_drop is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model of the batch, with all that is to be done with it; nothing is left to a default of somebody else's.

    Attributes:
        name: What reports call it; no two of a batch are alike.
        model: Path, or address for fsspec.
        output: Likewise, of what is written.
        rules: Names or paths of rule files; none for the format's own.
        data: A calibration data spec, None for none.
        stats: Path of a statistics file that ranges come from, None for none; data is then for the check, and
            for corrections if they are of it.
        samples: How many samples to use, None for all.
        method: The observer of all activations, None for what the rules say.
        family: The QDQ family, None for the format's own.
        include: Globs or /regexes/.
        exclude: Likewise.
        float_weights: Keep weights float.
        gates: What must hold of the output.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID_EXTRA

    name: str
    model: str
    output: str
    rules: tuple[str, ...] = ()
    data: str | None = None
    stats: str | None = None
    samples: int | None = None
    method: str | None = None
    family: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    float_weights: bool = False
    gates: Gates = field(default_factory=Gates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why there is no output.

    Attributes:
        kind: Name of the error's class, "ModelError"; "Timeout", "Crash" or "Memory" where a worker ended.
        message: What the command line would say, without "Error: ".
        exit_code: What it would end with.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID_EXTRA

    kind: str
    message: str
    exit_code: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GateMiss:
    """A gate that does not hold.

    Attributes:
        gate: Name of the field of `Gates`.
        message: What was found, and what was wanted.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID_EXTRA

    gate: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFinding:
    """A finding of `check`: its code and level, graph and op, what is the matter and how to mend it."""

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID_EXTRA

    code: str
    level: Level
    graph: str
    op: str
    message: str
    fix: str

    @property
    def site(self) -> str:
        """Graph and name."""
        return qualified_op_name(self.graph, self.op)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeMetrics:
    """How far the output is from the float model.

    Attributes:
        sqnr: Of the worst output, dB; None where nothing differs, or no output holds floats.
        exact: Whether nothing differs.
        agreement: Of the worst output, a share; None where no output has one.
        accuracy: Shares of the float model and of the quantized one, of the output that loses most; None without
            labels.
        samples: How many were run.
        random: Whether they were made up.
        problem: Why an output could not be compared, "" if all could.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID_EXTRA

    sqnr: float | None = None
    exact: bool = False
    agreement: float | None = None
    accuracy: tuple[float, float] | None = None
    samples: int = 0
    random: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Hex SHA-256 of what the output was made of, and of the output; "" for what there is not.

    Attributes:
        model: The model's file; over its files, where it has several.
        rules: The rule files' text, as resolved.
        data: The data's files and how they are read, or the statistics file.
        output: The output, like `model`.
        key: All that the output depends on, options and versions included: the same key, the same output.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID_EXTRA

    model: str = ""
    rules: str = ""
    data: str = ""
    output: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of an entry.

    Attributes:
        name: The entry's.
        model: Its path, as the entry has it.
        output: The output's, as the entry has it; it is there if `status` is "done", "unchanged" or "gate".
        status: In a word.
        problem: Why there is no output, None if there is.
        misses: Gates that do not hold.
        findings: What `check` found, where a gate asks for it.
        digests: Of what went in and came out.
        products: Files of the output, relative to the output's folder, with their hex SHA-256.
        size_before: Bytes of the model, None if it could not be read.
        size_after: Bytes of the output, None if there is none.
        sites: How many places are quantized.
        skips: What was left, and why, with a count for each reason.
        int8_ops: How many of the ops that compute run in low precision, of how many, as `check` counts for the gate's
            backend, or onnxruntime; None where that is not foretold.
        metrics: How far the output is from the float model, None where that was not measured.
        versions: Of graphquant and what it ran on, by package.
        seconds: How long it took; 0 where it was there already, or in the cache.
        attempts: How many times it was tried.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID_EXTRA

    name: str
    model: str
    output: str
    status: Status
    problem: Problem | None = None
    misses: tuple[GateMiss, ...] = ()
    findings: tuple[BatchFinding, ...] = ()
    digests: Digests = field(default_factory=Digests)
    products: dict[str, str] = field(default_factory=dict)
    size_before: int | None = None
    size_after: int | None = None
    sites: int = 0
    skips: dict[str, int] = field(default_factory=dict)
    int8_ops: tuple[int, int] | None = None
    metrics: OutcomeMetrics | None = None
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    attempts: int = 1

    @property
    def passed(self) -> bool:
        """Whether the output is there and keeps its gates."""
        return self.status in PASSED_STATUSES

    @property
    def int8_share(self) -> float | None:
        """Share of the ops that run in low precision; None where that is not foretold, or nothing computes."""
        return self.int8_ops[0] / self.int8_ops[1] if self.int8_ops is not None and self.int8_ops[1] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeChange:
    """How an outcome differs from an earlier report's.

    Attributes:
        name: The entry's.
        kind: What differs; "digest" where an output that was built again is not what there is.
        level: "error" for a regression that fails the batch, "warning" for one that does not, "note" for what is only
            told.
        message: What it was, and what it is.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID_EXTRA

    name: str
    kind: Literal["status", "sqnr", "measured", "agreement", "accuracy", "size", "int8", "seconds", "gone", "digest"]
    level: Level
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What became of all entries.

    Attributes:
        schema: Version of this form.
        version: Of graphquant.
        outcomes: In the order of the manifest.
        shard: Which part of the manifest it is of, of how many, counted from 1.
        deal_digest: Of a part, a digest of what all models were dealt out by, which all parts of one batch have in common.
        started: When, seconds since 1970.
        seconds: How long it took.
        changes: Against an earlier report, where one was given.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _FORBID_EXTRA

    schema: Literal[1] = 1
    version: str
    outcomes: tuple[Outcome, ...]
    shard: tuple[int, int] = (1, 1)
    deal_digest: str = ""
    started: float = 0.0
    seconds: float = 0.0
    changes: tuple[OutcomeChange, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every output is there and keeps its gates."""
        return all(outcome.passed for outcome in self.outcomes)


@cache
def _batch_adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON data; `parse_outcome` gives it back."""
    data: dict[str, Any] = _batch_adapter(Outcome).dump_python(outcome, mode="json")
    return data


def parse_outcome(data: Any, source: str) -> Outcome:
    """The outcome that `outcome_json` made `data` of.

    Raises:
        UsageError: It is none.
    """
    outcome: Outcome = _validate_json(Outcome, data, source)
    return outcome


def batch_report_json(report: BatchReport, *, times: bool = True) -> dict[str, Any]:
    """A report as JSON data; without times it is the same for any number of workers and on any day."""
    data: dict[str, Any] = _batch_adapter(BatchReport).dump_python(report, mode="json")
    if not times:
        data = {key: value for key, value in data.items() if key not in TIME_KEYS}
        data["outcomes"] = [
            {key: outcome[key] for key in outcome if key not in TIME_KEYS} for outcome in data["outcomes"]
        ]
        data["changes"] = [change for change in data["changes"] if change["what"] not in TIME_KEYS]
    return data


def parse_report(data: Any, source: str) -> BatchReport:
    """The report that `batch_report_json` made `data` of.

    Raises:
        UsageError: It is none, or of another version.
    """
    report: BatchReport = _validate_json(BatchReport, data, source)
    return report


def read_report(path: Path) -> BatchReport:
    """The report in the JSON file at `path`.

    Raises:
        UsageError: It cannot be read, or is none.
    """
    import json

    try:
        with path.open("rb") as file:
            text = file.read(MAX_REPORT_BYTES + 1)
        if len(text) > MAX_REPORT_BYTES:
            raise UsageError(f"{path} is larger than any report. Give one that `graphquant batch` wrote.")
        data = json.loads(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Give a report of `graphquant batch`.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON text. Give a report that `graphquant batch` wrote.") from error
    return parse_report(data, str(path))


def _validate_json(kind: type, data: Any, source: str) -> Any:
    if isinstance(data, dict) and kind is BatchReport and data.get("schema") != REPORT_SCHEMA_VERSION:
        raise UsageError(
            f"{source} has schema {data.get('schema')!r}, and this graphquant reads {REPORT_SCHEMA_VERSION}. Make it again."
        )
    try:
        return _batch_adapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{source} is not as graphquant wrote it: {location}: {first['msg']}. Make it again."
        ) from error
