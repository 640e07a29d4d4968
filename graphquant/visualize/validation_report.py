"""Result sections of `insert`: validation, search, size budget and latency, as text and JSON."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from graphquant.visualize.compare_report import comparison_json
from graphquant.visualize.tables import join_names, plain_line, pluralize

if TYPE_CHECKING:
    from rich.console import RenderableType

    from graphquant.analysis import Comparison, OutputFigures
    from graphquant.analysis.validation import Validation
    from graphquant.api.latency import LatencyResult
    from graphquant.api.search import PlanSearchResult
    from graphquant.api.size_budget import SizeBudgetResult
    from graphquant.optimize import TimeRatio


WORST_SHOWN = 3
"""Number of outputs and tensors to list if all bounds are met."""

MISSED_SHOWN = 6
"""Number of tensors to list if a bound is missed."""

NOT_VALIDATED = "Not validated against the float model. Give --data to validate the result."


def validation_view(validation: Validation | None) -> list[RenderableType]:
    """Render output metrics, the quantized share of multiply-adds, the costliest tensors, and missed bounds."""
    if validation is None:
        return [plain_line(NOT_VALIDATED, "dim")]
    if validation.comparison is None:
        return [plain_line(f"Validation failed: {missed_bound}.", "bold red") for missed_bound in validation.failures]
    lines: list[RenderableType] = [plain_line(f"{_validation_summary(validation, validation.comparison)}.")]
    missed, worst_sites = (
        validation.failures,
        validation.worst_sites[: MISSED_SHOWN if validation.failures else WORST_SHOWN],
    )
    if validation.quantized_share is not None:
        message = (
            f"  {_floor_percent(validation.quantized_share)} of {validation.total_macs:,} multiply-adds"
            " have quantized inputs"
        )
        lines.append(plain_line(message))
    if worst_sites:
        texts = [
            f"{site.tensor} {site.sensitivity if validation.has_sensitivity else site.local:.1f} dB"
            for site in worst_sites
        ]
        message = "highest sensitivity" if validation.has_sensitivity else "largest errors of their own"
        lines.append(plain_line(f"  {message}: {join_names(texts, MISSED_SHOWN)}"))
    lines += [plain_line(f"missed: {missed_bound}.", "bold red") for missed_bound in missed]
    if missed:
        message = "  compare lists every tensor; --exclude keeps some float, --method selects another observer."
        lines.append(plain_line(message, "red"))
    return lines


def search_view(search: PlanSearchResult | None) -> list[RenderableType]:
    """Render the result of the search for a plan."""
    if search is None or not search.trace.plans:
        return []
    caveats = [plain_line(f"inconclusive: {caveat}", "yellow") for caveat in search.search_validation.caveats]
    if not search.float_tensors and not search.changed_tensors and search.search_validation.confirmed:
        qualifier = " on these samples, which do not show it of others" if caveats else ""
        return [plain_line(f"Searched: the plan of the rules meets the bounds{qualifier}."), *caveats]
    message = f"Searched {pluralize(search.trace.plans, 'plan')}, {search.runs_per_site:.1f} runs for each site"
    message += (
        f": {pluralize(len(search.float_tensors), 'site')} in float, and with them"
        f" {_floor_percent(search.trace.cost)} of the cost"
    )
    candidates = Counter(search.changed_tensors.values())
    message += "".join(
        f"; {pluralize(count, 'site')} with {candidate}" for candidate, count in sorted(candidates.items())
    )
    lines: list[RenderableType] = [plain_line(f"{message}."), *caveats]
    if search.trace.interrupted:
        lines.append(plain_line("The search was interrupted; this is its best plan.", "yellow"))
    lines += [
        plain_line(f"failed: {missed} on the samples of the search", "yellow")
        for missed in search.search_validation.failures
    ]
    return lines


def size_budget_view(fitted: SizeBudgetResult | None) -> list[RenderableType]:
    """Render the weight bit widths chosen for the size budget."""
    if fitted is None:
        return []
    limit_text = (
        f" of the limit {fitted.max_size:,}"
        if fitted.max_size is not None
        else ", the smallest size found within the bounds"
    )
    message = f"Constants take {fitted.size:,} bytes{limit_text}; in float they took {fitted.float_size:,}"
    for candidate, count in sorted(Counter(fitted.candidates.values()).items()):
        message += f"; {pluralize(count, 'weight')} in float" if candidate == "float" else f"; {count} with {candidate}"
    lines: list[RenderableType] = [plain_line(f"{message}.")]
    if fitted.estimated:
        tensors = join_names([str(tensor) for tensor in fitted.estimated], WORST_SHOWN)
        lines.append(plain_line(f"  error estimated from the bit width only: {tensors}", "yellow"))
    return lines


def size_budget_json(fitted: SizeBudgetResult | None) -> dict[str, Any] | None:
    """Return the size budget as JSON data; null without one."""
    if fitted is None:
        return None
    return {
        "bytes": fitted.size,
        "budget": fitted.max_size,
        "float_bytes": fitted.float_size,
        "candidates": [
            {"tensor": str(tensor), "candidate": candidate} for tensor, candidate in fitted.candidates.items()
        ],
        "estimated": [str(tensor) for tensor in fitted.estimated],
    }


def search_json(search: PlanSearchResult | None) -> dict[str, Any] | None:
    """Return the search as JSON data; null without one."""
    if search is None:
        return None
    return {
        "plans": search.trace.plans,
        "interrupted": search.trace.interrupted,
        "cost": search.trace.cost,
        "runs": search.runs_per_site,
        "met": search.bounds_met,
        "missed": list(search.search_validation.failures),
        "caveats": list(search.search_validation.caveats),
        "float_tensors": [
            {"tensor": str(tensor), "sensitivity_db": sensitivity}
            for tensor, sensitivity in search.float_tensors.items()
        ],
        "changed": [
            {"tensor": str(tensor), "candidate": candidate} for tensor, candidate in search.changed_tensors.items()
        ],
    }


def timing_view(timing: LatencyResult) -> list[RenderableType]:
    """Render the measured latency."""
    if timing.rules_ratio is None or timing.outcome_ratio is None:
        return [plain_line("Latency was not measured: there is nothing to quantize.", "dim")]
    message = (
        f"Timed {pluralize(timing.plans_timed, 'plan')} in {timing.runtime} on one thread: the plan of the rules takes"
    )
    message += (
        f" {timing.rules_ratio.median:.2f} of float's"
        f" {1000 * timing.rules_ratio.second_seconds / timing.samples:.3g} ms"
    )
    if timing.outcome_ratio is not timing.rules_ratio:
        message += f", the final plan {timing.outcome_ratio.median:.2f}"
    lines: list[RenderableType] = []
    if timing.all_float:
        lines.append(plain_line(f"{message}.", "dim"))
        lines.append(plain_line(f"Nothing is quantized: {timing.float_reason}.", "bold yellow"))
        if timing.runtime == "TensorFlow":
            lines.append(
                plain_line("TensorFlow emulates quantization in float ops; -o NAME.tflite runs on integers.", "yellow")
            )
    else:
        float_text = f", with {pluralize(len(timing.float_tensors), 'site')} in float" if timing.float_tensors else ""
        lines.append(plain_line(f"{message}{float_text}."))
    if timing.interrupted:
        lines.append(plain_line("The measurement was interrupted; this is the fastest plan so far.", "yellow"))
    return lines


def timing_json(timing: LatencyResult | None) -> dict[str, Any] | None:
    """Return the measured latency as JSON data; null if it was not the objective."""
    if timing is None:
        return None
    return {
        "runtime": timing.runtime,
        "plans": timing.plans_timed,
        "interrupted": timing.interrupted,
        "quantized": not timing.all_float,
        "samples": timing.samples,
        "rules": _latency_ratio_json(timing.rules_ratio, timing.samples),
        "outcome": _latency_ratio_json(timing.outcome_ratio, timing.samples),
        "float_tensors": [str(tensor) for tensor in timing.float_tensors],
    }


def _latency_ratio_json(ratio: TimeRatio | None, samples: int) -> dict[str, float] | None:
    """Return milliseconds per sample, and the ratio to float with its 95% interval."""
    if ratio is None:
        return None
    return {
        "ms": 1000 * ratio.first_seconds / samples,
        "float_ms": 1000 * ratio.second_seconds / samples,
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
    }


def validation_json(validation: Validation | None) -> dict[str, Any] | None:
    """Return the validation as JSON data; null if nothing was measured."""
    if validation is None:
        return None
    return {
        "met": not validation.failures,
        "missed": list(validation.failures),
        "reused": validation.reuses_samples,
        "other_data": validation.calibrated_on_other_data,
        "bounds": {
            "sqnr": validation.bounds.min_sqnr,
            "agreement": validation.bounds.min_agreement,
            "accuracy_drop": validation.bounds.max_accuracy_drop,
        },
        "multiply_adds": {"quantized": validation.quantized_macs, "total": validation.total_macs},
        "comparison": None if validation.comparison is None else comparison_json(validation.comparison),
    }


def _validation_summary(validation: Validation, comparison: Comparison) -> str:
    """Return the number of samples and the metrics of the worst outputs."""
    data_text = "also used for ranges, algorithms or a search" if validation.reuses_samples else "from the hold-out"
    data_text = "of other data than the statistics" if validation.calibrated_on_other_data else data_text
    ranked = sorted(comparison.outputs, key=lambda output: math.inf if output.sqnr is None else output.sqnr)
    outputs = join_names([_output_metrics_text(output) for output in ranked if not output.empty], WORST_SHOWN)
    if empty_names := [output.name for output in ranked if output.empty]:
        verb = "it was" if len(empty_names) == 1 else "they were"
        message = (
            f"{join_names(empty_names, WORST_SHOWN)} cannot be compared: {verb} empty for all"
            f" {pluralize(comparison.samples, 'sample')}"
        )
        outputs = f"{outputs}; {message}" if outputs else message
    return f"Validated on {pluralize(comparison.samples, 'sample')} {data_text}: {outputs}"


def _output_metrics_text(output: OutputFigures) -> str:
    figures = []
    if output.sqnr is not None:
        figures.append({math.inf: "equal", -math.inf: "no SQNR"}.get(output.sqnr, f"{output.sqnr:.1f} dB"))
    if output.agreement is not None:
        figures.append(f"{_floor_percent(output.agreement)} agree")
    if output.accuracy is not None:
        figures.append(f"accuracy {_floor_percent(output.accuracy[0])} to {_floor_percent(output.accuracy[1])}")
    return " ".join([output.name, " and ".join(figures)]) if figures else output.name


def _floor_percent(share: float) -> str:
    """Format a share as a percentage; 100% only if it is complete."""
    return f"{math.floor(round(1000 * share, 6)) / 10:g}%"
