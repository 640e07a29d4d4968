"""Types of a batch: entries, gates, outcomes and reports, with JSON in both directions."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, ValidationError

from graphquant.errors import UsageError
from graphquant.ir import qualified_op_name
from graphquant.utils.option_types import CacheType, InputOutputType, RangeSource, type_adapter

REPORT_SCHEMA_VERSION = 2  # schema version of reports
MAX_REPORT_BYTES = 1 << 30  # maximum size of a report file

Level = Literal["error", "warning", "note"]
"""Severity of a finding or change. It repeats `graphquant.backends`, whose import is slow."""

Status = Literal["done", "unchanged", "failed", "empty", "gate", "timeout", "crashed", "memory", "skipped"]
"""Status of an outcome.

done: created now. unchanged: present already. failed: ended with an error. empty: no tensor
would be quantized, so nothing was written. gate: created, and a gate is missed.
timeout, crashed, memory: ended by the time limit, by its death, by the memory limit. skipped: not started, because the
batch was stopped or the model belongs to another shard.
"""

ChangeKind = Literal[
    "status", "sqnr", "not-measured", "agreement", "accuracy", "size", "int8", "seconds", "missing", "digest"
]

TIME_KEYS = ("seconds", "attempts", "started")  # keys of a report that differ between runs


class _Record:
    """Base of all types of this module: their JSON has no other keys."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates(_Record):
    """Bounds for an output."""

    # Of the worst output, dB; None for the default target, which is no gate; "none" for no target.
    min_sqnr: float | Literal["none"] | None = None
    min_agreement: float | None = None  # of the worst output, a share
    max_accuracy_drop: float | None = None  # loss against the float model, a share; the data must have labels
    max_metric_drop: float | None = None  # loss of the entry's metric against the float model, in its unit
    strict: bool = False  # True if a bound must be proven, and without a bound each output must reach 20 dB
    min_quantized: float | None = None  # multiply-adds with quantized inputs, a share
    max_size: int | None = None  # bytes of the output
    # Backend whose check must have no findings, "" for the check without a backend, None for no check.
    check: str | None = None

    @property
    def needs_data(self) -> bool:
        """True if the float model and the output must be run for comparison."""
        return any(getattr(self, name) not in {None, "none"} for name in METRIC_GATES)


# Gates on metrics; they are options of `insert` too.
METRIC_GATES = ("min_sqnr", "min_agreement", "max_accuracy_drop", "max_metric_drop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(_Record):
    """A model of the batch with all settings, independent of later defaults.

    The other fields are options of `insert`; paths are relative to the current folder.
    """

    name: str  # unique name in reports
    model: str  # path, or address for fsspec
    output: str  # path or address of the output
    rules: tuple[str, ...] = ()
    data: str | None = None
    stats: str | None = None
    samples: int | None = None
    method: str | None = None
    family: str | None = None
    range_source: RangeSource = "observed"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    float_weights: bool = False
    allow_empty: bool = False
    requantize: bool = False
    keep_ranges: bool = False
    algorithms: tuple[str, ...] = ()
    ranges: str | None = None
    ranges_map: str | None = None
    optimize: Literal["macs", "size", "latency"] = "macs"
    search_time: str = "10x"
    metric: str | None = None
    size_budget: str | None = None
    io: InputOutputType | None = None
    kv_cache: CacheType | None = None
    allow_links: bool = False
    signature: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    gates: Gates = field(default_factory=Gates)  # bounds for the output


ENTRY_OPTIONS = tuple(field.name for field in fields(Entry) if field.name not in {"name", "model", "output", "gates"})
"""Options of `insert` in an entry."""

PLAIN_OPTIONS = tuple(name for name in ENTRY_OPTIONS if name not in {"rules", "data", "stats", "ranges", "ranges_map"})
"""Options that name no files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(_Record):
    """Reason for a missing output."""

    kind: str  # class name of the error, as "ModelError"; "Timeout", "Crash" or "Memory" if a worker ended
    message: str  # message of the command line, without "error: "
    exit_code: int = 1  # exit code of the command line


@dataclass(frozen=True, slots=True, kw_only=True)
class GateMiss(_Record):
    """A missed gate."""

    gate: str  # name of a field of `Gates`
    message: str  # measured and required value


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFinding(_Record):
    """A finding of `check`."""

    code: str  # code, such as "GQ101"
    level: Level  # severity
    graph: str  # graph of the op, "" for the main graph
    op: str  # name of the op
    message: str  # the problem
    fix: str  # the remedy

    @property
    def site(self) -> str:
        """Graph and name of the op."""
        return qualified_op_name(self.graph, self.op)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeMetrics(_Record):
    """Difference between the output and the float model."""

    sqnr: float | None = None  # SQNR of the worst output in dB; None if nothing differs or no output has floats
    exact: bool = False  # True if nothing differs
    agreement: float | None = None  # agreement of the worst output, a share; None if no output has one
    # Accuracy of the float and the quantized model, for the output with the largest loss; None without labels.
    accuracy: tuple[float, float] | None = None
    metric: tuple[float, float] | None = None  # scores of both models by the entry's metric; None without one
    samples: int = 0  # number of samples
    random: bool = False  # True if the samples are random
    problem: str = ""  # reason why an output cannot be compared, else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests(_Record):
    """Hex SHA-256 of the inputs and of the output; "" if missing."""

    model: str = ""  # digest of the model's file, or over its files
    rules: str = ""  # digest of the resolved text of the rule files
    data: str = ""  # digest of the data files and their options, or of the statistics file
    output: str = ""  # digest of the output, like `model`
    key: str = ""  # cache key over everything that the output depends on, options and versions included


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(_Record):
    """Result of an entry."""

    name: str  # name of the entry
    model: str  # path of the model, as in the entry
    output: str  # path of the output, as in the entry; it exists if `status` is "done", "unchanged" or "gate"
    status: Status  # status
    problem: Problem | None = None  # reason for a missing output, else None
    misses: tuple[GateMiss, ...] = ()  # missed gates
    findings: tuple[BatchFinding, ...] = ()  # findings of `check`, if a gate requires it
    digests: Digests = field(default_factory=Digests)  # digests of inputs and output
    # Files of the output relative to its folder, with their hex SHA-256.
    products: dict[str, str] = field(default_factory=dict)
    size_before: int | None = None  # bytes of the model, None if unreadable
    size_after: int | None = None  # bytes of the output, None without one
    sites: int = 0  # number of quantized sites
    skips: dict[str, int] = field(default_factory=dict)  # reasons for skips, with their counts
    skip_codes: dict[str, int] = field(default_factory=dict)  # kinds of these reasons, with their counts
    # Number of int8 ops, and of all ops that compute, predicted by `check` for the gate's backend or onnxruntime; None
    # without a prediction.
    int8_ops: tuple[int, int] | None = None
    quantized_share: float | None = None  # share of multiply-adds whose inputs are all quantized, None if unknown
    metrics: OutcomeMetrics | None = None  # difference from the float model, None if not measured
    strict_failure: str = ""  # reason why the gate `strict` rejects the output, "" if it does not
    data_warnings: tuple[str, ...] = ()  # likely mistakes in the calibration data
    versions: dict[str, str] = field(default_factory=dict)  # versions of graphquant and of the packages that it ran on
    seconds: float = 0.0  # duration; 0 if the output was present or cached
    attempts: int = 1  # number of attempts

    @property
    def passed(self) -> bool:
        """True if the output exists and meets its gates."""
        return self.status in {"done", "unchanged"}

    @property
    def int8_share(self) -> float | None:
        """Share of int8 ops; None without a prediction or without ops that compute."""
        return self.int8_ops[0] / self.int8_ops[1] if self.int8_ops is not None and self.int8_ops[1] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeChange(_Record):
    """Difference from an earlier report."""

    name: str  # name of the entry
    kind: ChangeKind  # kind of difference; "digest" if a rebuilt output differs
    # "error" for a regression that fails the batch, "warning" for one that does not, "note" for information.
    level: Level
    message: str  # earlier and current value


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport(_Record):
    """Outcomes of all entries."""

    schema: Literal[2] = 2  # version of this format
    version: str  # version of graphquant
    outcomes: tuple[Outcome, ...]  # outcomes in the order of the manifest
    shard: tuple[int, int] = (1, 1)  # number of the shard, from 1, and number of shards
    deal_digest: str = ""  # for a shard, digest by which the models were dealt; equal for all shards of a batch
    started: float = 0.0  # start time in seconds since 1970
    seconds: float = 0.0  # duration
    changes: tuple[OutcomeChange, ...] = ()  # changes since an earlier report, if one was given
    warnings: tuple[str, ...] = ()  # entries of the manifest that got no model

    @property
    def passed(self) -> bool:
        """True if every output exists and meets its gates."""
        return all(outcome.passed for outcome in self.outcomes)


def record_json(record: Outcome | BatchReport) -> dict[str, Any]:
    """Return an outcome or a report as JSON data."""
    kind: type = type(record)
    data: dict[str, Any] = type_adapter(kind).dump_python(record, mode="json")
    return data


def parse_json(kind: type, data: Any, source: str) -> Any:
    """Parse the JSON data of an outcome or a report."""
    if isinstance(data, dict) and kind is BatchReport and data.get("schema") != REPORT_SCHEMA_VERSION:
        raise UsageError(
            f"{source} has schema {data.get('schema')!r}, and this graphquant reads"
            f" {REPORT_SCHEMA_VERSION}. Create it again."
        )
    try:
        return type_adapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{source} is not a valid report of graphquant: {location}: {first['msg']}. Create it again."
        ) from error


def read_report(path: Path) -> BatchReport:
    """Read a report from a JSON file."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_REPORT_BYTES + 1)
        if len(text) > MAX_REPORT_BYTES:
            raise UsageError(f"{path} is too large for a report. Give a report of `graphquant batch`.")
        data = json.loads(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Give a report of `graphquant batch`.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON. Give a report of `graphquant batch`.") from error
    report: BatchReport = parse_json(BatchReport, data, str(path))
    return report
