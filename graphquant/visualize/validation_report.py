"""What the check at the end of `insert` found, as lines and as JSON data."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from graphquant.visualize.compare_report import comparison_json
from graphquant.visualize.text import join_names, plain_line, pluralize

if TYPE_CHECKING:
    from rich.console import RenderableType

    from graphquant.analysis import Comparison, OutputFigures
    from graphquant.api.latency import LatencyResult
    from graphquant.api.search import PlanSearchResult
    from graphquant.api.size_budget import SizeBudgetResult
    from graphquant.api.validation import Validation
    from graphquant.optimize import TimeRatio


WORST_SHOWN = 3
"""Outputs and tensors that are named where all is well."""

MISSED_SHOWN = 6
"""Tensors that are named where something is missed."""

NOT_VALIDATED = "Not checked against the float model. With --data, insert measures what it made."


def validation_view(validation: Validation | None) -> list[RenderableType]:
    """The outputs, the share of multiply-adds in low precision, the tensors that lose most, and what is missed."""
    if validation is None:
        return [plain_line(NOT_VALIDATED, "dim")]
    if validation.comparison is None:
        return [plain_line(f"The check failed: {missed_bound}.", "bold red") for missed_bound in validation.failures]
    lines: list[RenderableType] = [plain_line(f"{_validation_summary(validation, validation.comparison)}.")]
    missed, worst_sites = (
        validation.failures,
        validation.worst_sites[: MISSED_SHOWN if validation.failures else WORST_SHOWN],
    )
    if validation.quantized_share is not None:
        message = f"  {_floor_percent(validation.quantized_share)} of {validation.total_macs:,} multiply-adds have quantized inputs"
        lines.append(plain_line(message))
    if worst_sites:
        texts = [
            f"{site.tensor} {site.sensitivity if validation.has_sensitivity else site.local:.1f} dB"
            for site in worst_sites
        ]
        message = "costing the outputs most, each alone" if validation.has_sensitivity else "losing most by themselves"
        lines.append(plain_line(f"  {message}: {join_names(texts, MISSED_SHOWN)}"))
    lines += [plain_line(f"missed: {missed_bound}.", "bold red") for missed_bound in missed]
    if missed:
        message = "  compare lists every tensor; --exclude leaves some float, --method picks other ranges."
        lines.append(plain_line(message, "red"))
    return lines


def search_view(search: PlanSearchResult | None) -> list[RenderableType]:
    """What the search did, in a line or two."""
    if search is None or not search.trace.plans:
        return []
    caveats = [plain_line(f"not sure: {caveat}", "yellow") for caveat in search.search_validation.caveats]
    if not search.float_tensors and not search.changed_tensors and search.search_validation.confirmed:
        qualifier = " on these samples, which do not show it of others" if caveats else ""
        return [plain_line(f"Searched: what the rules make meets the bounds{qualifier}."), *caveats]
    message = f"Searched {pluralize(search.trace.plans, 'plan')}, {search.runs_per_site:.1f} runs for each site"
    message += f": {pluralize(len(search.float_tensors), 'site')} left float, and with them {_floor_percent(search.trace.cost)} of the cost"
    candidates = Counter(search.changed_tensors.values())
    message += "".join(
        f"; {pluralize(count, 'site')} with {candidate}" for candidate, count in sorted(candidates.items())
    )
    lines: list[RenderableType] = [plain_line(f"{message}."), *caveats]
    if search.trace.interrupted:
        lines.append(plain_line("The search was interrupted; this is the best plan that it had.", "yellow"))
    lines += [
        plain_line(f"in the way: {missed} on the samples of the search", "yellow")
        for missed in search.search_validation.failures
    ]
    return lines


def size_budget_view(fitted: SizeBudgetResult | None) -> list[RenderableType]:
    """What was made of weights so that they take few bytes, in a line."""
    if fitted is None:
        return []
    limit_text = (
        f" of {fitted.max_size:,} that they may"
        if fitted.max_size is not None
        else ", the fewest found that meet the bounds"
    )
    message = f"Constants take {fitted.size:,} bytes{limit_text}; in float they took {fitted.float_size:,}"
    for candidate, count in sorted(Counter(fitted.candidates.values()).items()):
        message += f"; {pluralize(count, 'weight')} in float" if candidate == "float" else f"; {count} with {candidate}"
    lines: list[RenderableType] = [plain_line(f"{message}.")]
    if fitted.estimated:
        tensors = join_names([str(tensor) for tensor in fitted.estimated], WORST_SHOWN)
        lines.append(
            plain_line(f"  judged by their bits alone, since nothing tells what they lose: {tensors}", "yellow")
        )
    return lines


def size_budget_json(fitted: SizeBudgetResult | None) -> dict[str, Any] | None:
    """The same as JSON data; null where there is no budget."""
    if fitted is None:
        return None
    return {
        "bytes": fitted.size,
        "budget": fitted.max_size,
        "float_bytes": fitted.float_size,
        "ways": [{"tensor": str(tensor), "way": candidate} for tensor, candidate in fitted.candidates.items()],
        "guessed": [str(tensor) for tensor in fitted.estimated],
    }


def search_json(search: PlanSearchResult | None) -> dict[str, Any] | None:
    """The same as JSON data; null where there was no search."""
    if search is None:
        return None
    return {
        "plans": search.trace.plans,
        "interrupted": search.trace.interrupted,
        "cost": search.trace.cost,
        "runs": search.runs_per_site,
        "met": search.bounds_met,
        "missed": list(search.search_validation.failures),
        "doubts": list(search.search_validation.caveats),
        "left": [{"tensor": str(tensor), "alone": sensitivity} for tensor, sensitivity in search.float_tensors.items()],
        "changed": [{"tensor": str(tensor), "way": candidate} for tensor, candidate in search.changed_tensors.items()],
    }


def timing_view(timing: LatencyResult) -> list[RenderableType]:
    """How long a run takes, in a line or two."""
    if timing.rules_ratio is None or timing.outcome_ratio is None:
        return [plain_line("Nothing was timed: there is nothing to quantize.", "dim")]
    message = (
        f"Timed {pluralize(timing.plans_timed, 'plan')} in {timing.runtime} on one thread: what the rules make takes"
    )
    message += f" {timing.rules_ratio.median:.2f} of float's {1000 * timing.rules_ratio.second_seconds / timing.samples:.3g} ms"
    if timing.outcome_ratio is not timing.rules_ratio:
        message += f", what was made of it {timing.outcome_ratio.median:.2f}"
    lines: list[RenderableType] = []
    if timing.all_float:
        lines.append(plain_line(f"{message}.", "dim"))
        lines.append(plain_line(f"Nothing is quantized: {timing.float_reason}.", "bold yellow"))
        if timing.runtime == "TensorFlow":
            lines.append(
                plain_line("TensorFlow quantizes beside its float ops; -o NAME.tflite runs on integers.", "yellow")
            )
    else:
        float_text = f", with {pluralize(len(timing.float_tensors), 'site')} left float" if timing.float_tensors else ""
        lines.append(plain_line(f"{message}{float_text}."))
    if timing.interrupted:
        lines.append(plain_line("Timing was interrupted; this is the fastest plan that there was.", "yellow"))
    return lines


def timing_json(timing: LatencyResult | None) -> dict[str, Any] | None:
    """The same as JSON data; null where time was not to be least."""
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
        "left": [str(tensor) for tensor in timing.float_tensors],
    }


def _latency_ratio_json(ratio: TimeRatio | None, samples: int) -> dict[str, float] | None:
    """Milliseconds for a sample of a model and of float, and how many times as long it takes: low to high, 19 in 20."""
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
    """The same as JSON data; null where nothing was measured."""
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
        "multiply_adds": {"low": validation.quantized_macs, "all": validation.total_macs},
        "comparison": None if validation.comparison is None else comparison_json(validation.comparison),
    }


def _validation_summary(validation: Validation, comparison: Comparison) -> str:
    """On how many samples, and the figures of the worst outputs."""
    data_text = (
        "used before too, for ranges, corrections or a search"
        if validation.reuses_samples
        else "that calibration did not use"
    )
    data_text = "of other data than the statistics are of" if validation.calibrated_on_other_data else data_text
    ranked = sorted(comparison.outputs, key=lambda output: math.inf if output.sqnr is None else output.sqnr)
    outputs = join_names([_output_metrics_text(output) for output in ranked if not output.empty], WORST_SHOWN)
    if empty_names := [output.name for output in ranked if output.empty]:
        verb = "it was" if len(empty_names) == 1 else "they were"
        message = f"{join_names(empty_names, WORST_SHOWN)} nothing to compare: {verb} empty for all {pluralize(comparison.samples, 'sample')}"
        outputs = f"{outputs}; {message}" if outputs else message
    return f"Checked on {pluralize(comparison.samples, 'sample')} {data_text}: {outputs}"


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
    """As a percentage that says 100 only where it is all."""
    return f"{math.floor(round(1000 * share, 6)) / 10:g}%"
