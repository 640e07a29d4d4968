"""Quantization of one entry of a batch, and its gates. Every error that users can cause becomes an outcome."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant.batch.cache_key import combined_digest, file_digest, package_versions
from graphquant.batch.remote import process_remote
from graphquant.batch.types import (
    ENTRY_OPTIONS,
    METRIC_GATES,
    BatchFinding,
    Digests,
    Entry,
    GateMiss,
    Gates,
    Outcome,
    OutcomeMetrics,
    Problem,
    Status,
)
from graphquant.errors import EmptyResultError, GraphQuantError, InternalError, UsageError
from graphquant.utils.options import command_line_words
from graphquant.utils.text import format_distinct, quantized_share_failure

if TYPE_CHECKING:
    from graphquant.api.result import Result
    from graphquant.ir import Model
    from graphquant.utils import Progress

SQNR_DECIMALS = 2  # Decimals of the stored SQNR. Rounding of TensorFlow's oneDNN kernels depends on memory alignment


def outcome_metrics(result: Result) -> OutcomeMetrics | None:
    """Return the validation of `insert` for a batch report; None if there was no data."""
    if not result.inserted:
        return OutcomeMetrics(exact=True)
    if result.validation is None:
        return None
    if (comparison := result.validation.comparison) is None:
        return OutcomeMetrics(problem=result.validation.problem)
    problem = next((f"output {output.name!r}: {output.problem}" for output in comparison.outputs if output.problem), "")
    problem = "every output is empty for all samples" if comparison.all_empty else problem
    accuracies = [output.accuracy for output in comparison.outputs if output.accuracy is not None]
    return OutcomeMetrics(
        sqnr=round(comparison.sqnr, SQNR_DECIMALS)
        if comparison.sqnr is not None and math.isfinite(comparison.sqnr)
        else None,
        exact=not problem and all(output.max_error == 0 for output in comparison.outputs),
        agreement=comparison.agreement,
        accuracy=max(accuracies, key=lambda accuracy: accuracy[0] - accuracy[1], default=None),
        metric=None if comparison.metric is None else comparison.metric.scores,
        samples=comparison.samples,
        random=comparison.random,
        problem=problem or ("values are not finite" if comparison.sqnr == -math.inf else ""),
    )


def gate_misses(gates: Gates, outcome: Outcome) -> tuple[GateMiss, ...]:
    """Return the gates that an outcome misses, or that cannot be checked."""
    metrics, size, findings = outcome.metrics, outcome.size_after or 0, outcome.findings
    messages: dict[str, str] = {}
    for gate in METRIC_GATES:
        bound = getattr(gates, gate)
        if bound == "none":
            continue
        if bound is not None and metrics is None:
            messages[gate] = "there is no data to measure it"
        elif bound is not None and metrics is not None:
            messages[gate] = metrics.problem or _metric_miss(gate, bound, metrics)
    if gates.strict:
        messages["strict"] = outcome.strict_failure or ("" if metrics else "there is no data to measure it")
    if gates.min_quantized is not None:
        messages["min_quantized"] = quantized_share_failure(outcome.quantized_share, gates.min_quantized)
    if gates.max_size is not None and size > gates.max_size:
        messages["max_size"] = f"the output has {size} bytes, and the limit is {gates.max_size}"
    if gates.check is not None and findings:
        codes = ", ".join(dict.fromkeys(finding.code for finding in findings))
        messages["check"] = f"the check reports {codes}"
    return tuple(GateMiss(gate=gate, message=message) for gate, message in messages.items() if message)


def _metric_miss(gate: str, bound: float, metrics: OutcomeMetrics) -> str:
    """Return the reason why a gate on metrics is missed, "" if it is met."""
    message = ""
    match gate, metrics:
        case _, OutcomeMetrics(exact=True):
            pass
        case "min_sqnr", OutcomeMetrics(sqnr=None):
            message = "no differing output has floats"
        case "min_sqnr", OutcomeMetrics(sqnr=sqnr) if sqnr is not None and sqnr < bound:
            message = "the worst output has {}; the bound is {}".format(*format_distinct(sqnr, bound, unit="dB"))
        case "min_agreement", OutcomeMetrics(agreement=None):
            message = "no output has class scores or integers"
        case "min_agreement", OutcomeMetrics(agreement=share) if share is not None and share < bound:
            message = "{} agree; the bound is {}".format(*format_distinct(share, bound))
        case "max_accuracy_drop", OutcomeMetrics(accuracy=None):
            message = "the data has no labels for an output"
        case "max_accuracy_drop", OutcomeMetrics(accuracy=(before, after)) if before - after > bound + 1e-11:
            message = (
                f"accuracy fell from {before:.2%} to {after:.2%}, by more than {bound:.2%}"  # 1e-11: rounded shares
            )
        case "max_metric_drop", OutcomeMetrics(metric=None):
            message = "the entry has no metric. Add 'metric'"
        case "max_metric_drop", OutcomeMetrics(metric=(before, after)) if before - after > bound:
            message = f"the metric fell from {before:.4g} to {after:.4g}, by more than {bound:g}"
    return message


def quantize_entry(entry: Entry, *, max_memory: int | None = None, progress: Progress | None = None) -> Outcome:
    """Quantize a model, write it, and check its gates.

    An existing output is replaced; the caller has checked that this is allowed. `max_memory` is in bytes, for
    calibration; by default half of the free memory.
    """
    start = time.monotonic()
    attempt = partial(_run_safely, partial(_quantize, max_memory=max_memory, progress=progress))
    with command_line_words():  # a worker is a process of its own
        outcome = _run_safely(partial(process_remote, process=attempt), entry)
    return replace(outcome, seconds=round(time.monotonic() - start, 3))


def _run_safely(process: Callable[[Entry], Outcome], entry: Entry) -> Outcome:
    """Return the outcome of `process`, or a failure outcome for its error."""
    try:
        return process(entry)
    except EmptyResultError as error:
        return failed_outcome(entry, type(error).__name__, str(error), error.exit_code, "empty")
    except GraphQuantError as error:
        return failed_outcome(entry, type(error).__name__, str(error), error.exit_code)
    except OSError as error:
        subject = f"{error.filename} cannot be used" if error.filename else "A file cannot be used"
        message = f"{subject}: {error.strerror or error}. Give another path, or free space."
        return failed_outcome(entry, type(error).__name__, message, UsageError.exit_code)
    except MemoryError:
        message = "There is not enough memory for this model. Allow more with --max-memory, or run fewer jobs with -j."
        return failed_outcome(entry, "Memory", message, InternalError.exit_code, "memory")


def failed_outcome(entry: Entry, kind: str, message: str, exit_code: int = 1, status: Status = "failed") -> Outcome:
    """Return the outcome of an entry without an output."""
    return Outcome(
        name=entry.name,
        model=entry.model,
        output=entry.output,
        status=status,
        problem=Problem(kind=kind, message=message, exit_code=exit_code),
        versions=package_versions(),
    )


def apply_gates(entry: Entry, outcome: Outcome, status: Status) -> Outcome:
    """Return an outcome with the entry's gates checked."""
    missed_gates = gate_misses(entry.gates, outcome)
    renamed = replace(outcome, name=entry.name, model=entry.model, output=entry.output)
    return replace(renamed, status="gate" if missed_gates else status, misses=missed_gates, problem=None)


def _quantize(entry: Entry, max_memory: int | None, progress: Progress | None) -> Outcome:
    from graphquant.api.insert import insert
    from graphquant.api.models import check_model_output, load, model_files
    from graphquant.formats import detect_format
    from graphquant.utils.atomic_files import flush_to_disk, lock_output

    model, output = Path(entry.model), Path(entry.output)
    format_name = detect_format(model)
    output.parent.mkdir(parents=True, exist_ok=True)
    check_model_output(output, model, format_name, force=True)
    with lock_output(output):
        result = insert(
            model,
            **{name: getattr(entry, name) for name in ENTRY_OPTIONS},
            **{name: getattr(entry.gates, name) for name in METRIC_GATES},
            max_memory=max_memory,
            progress=progress,
        )
        result.save(output, force=True)
    before = sum(file.stat().st_size for file in model_files(model, allow_links=entry.allow_links))
    files = model_files(output)
    flush_to_disk(files)  # the journal may list them only once they are on the disk
    digests = [(file.relative_to(output.parent).as_posix(), file_digest(file)) for file in files]
    written = load(output)
    findings, int8_ops = _lint_output(result, written, entry.gates.check)
    outcome = Outcome(
        name=entry.name,
        model=entry.model,
        output=entry.output,
        status="done",
        findings=findings,
        digests=Digests(rules=result.plan.digest, output=combined_digest(digests)),
        products=dict(digests),
        size_before=before,
        size_after=sum(file.stat().st_size for file in files),
        sites=len(result.inserted),
        skips=dict(sorted(Counter(skip.reason for skip in result.skips).items())),
        skip_codes=dict(sorted(Counter(str(skip.code) for skip in result.skips).items())),
        int8_ops=int8_ops,
        quantized_share=result.quantized_share,
        metrics=outcome_metrics(result),
        strict_failure="; ".join(result.strict_failures),
        data_warnings=tuple(f"warning: {finding.message}" for finding in result.data_findings),
        versions=package_versions(),
    )
    return apply_gates(entry, outcome, "done")


def _lint_output(
    result: Result, model: Model, backend: str | None
) -> tuple[tuple[BatchFinding, ...], tuple[int, int] | None]:
    """Return the findings of the check if one is required, and the number of int8 ops and of all ops."""
    from graphquant.backends import LINT_CODES, check_quantized_model

    report = None if backend is None else check_quantized_model(model, backend or None)
    verdicts = report.verdicts if report is not None and backend else result.verdicts
    findings = tuple(
        BatchFinding(level=LINT_CODES[finding.code].level, **asdict(finding))
        for finding in (() if report is None else report.findings)
    )
    int8_ops = sum(verdict.status == "int8" for verdict in verdicts), len(verdicts)
    return findings, int8_ops if verdicts else None
