"""Result sections of `insert`: validation, search, size budget and latency, as text."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from graphquant.visualize.tables import join_names, plain_line, pluralize

if TYPE_CHECKING:
    from rich.console import RenderableType

    from graphquant.analysis import Comparison, OutputFigures
    from graphquant.analysis.validation import Validation
    from graphquant.optimize import SearchTrace


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
    lines += [plain_line(f"failed: {missed_bound}.", "bold red") for missed_bound in missed]
    if missed:
        message = "  compare lists every tensor; --exclude keeps some float, --method selects another observer."
        lines.append(plain_line(message, "red"))
    return lines


def search_view(search: SearchTrace | None) -> list[RenderableType]:
    """Render the result of the search for a plan: latency, size, and bounds."""
    if search is None:
        return []
    lines = _latency_lines(search) if search.runtime else []
    if search.all_float:
        return lines
    choices = _choices_text(search)
    has_validated_changes = search.plans > 0 and not (search.plans == 1 and search.confirmed)
    if search.size is not None:
        limit = f"of the limit {search.max_size:,}" if search.max_size is not None else "within the bounds"
        message = f"Constants take {search.size:,} bytes {limit}; in float they took {search.float_size:,}"
        lines.append(plain_line(f"{message}{'' if has_validated_changes else choices}."))
        if search.estimated_weights:
            tensors = join_names([str(tensor) for tensor in search.estimated_weights], WORST_SHOWN)
            lines.append(plain_line(f"  error estimated from the bit width only: {tensors}", "yellow"))
    if not search.plans:
        return lines
    caveats = [plain_line(f"inconclusive: {caveat}", "yellow") for caveat in search.caveats]
    if not has_validated_changes:
        qualifier = " on these samples, but other samples may miss them" if caveats else ""
        return [*lines, plain_line(f"Searched: this plan meets the bounds{qualifier}."), *caveats]
    message = f"Searched {pluralize(search.plans, 'plan')}, {search.runs_per_site:.1f} runs for each site"
    message += f", float ops with {_floor_percent(search.cost)} of the cost{choices}"
    lines += [plain_line(f"{message}."), *caveats]
    if search.interrupted:
        lines.append(plain_line("The search was interrupted; this is its best plan.", "yellow"))
    lines += [plain_line(f"failed: {missed} on the samples of the search", "yellow") for missed in search.failures]
    return lines


def _choices_text(search: SearchTrace) -> str:
    """Return the number of sites that differ from the rules, by candidate."""
    counts = sorted(Counter(search.changed_tensors.values()).items())
    texts = [f"{pluralize(len(search.float_tensors), 'site')} in float"] if search.float_tensors else []
    texts += [f"{pluralize(count, 'site')} with {candidate}" for candidate, count in counts]
    return "".join(f"; {text}" for text in texts)


def _latency_lines(search: SearchTrace) -> list[RenderableType]:
    """Render the measured latency."""
    if search.rules_ratio is None or search.outcome_ratio is None:
        return [plain_line("Latency was not measured: there is nothing to quantize.", "dim")]
    milliseconds = 1000 * search.rules_ratio.second_seconds / search.timed_samples
    message = (
        f"Timed {pluralize(search.timed_plans, 'plan')} in {search.runtime} on one thread: the plan of the rules takes"
        f" {search.rules_ratio.median:.2f} of float's {milliseconds:.3g} ms"
    )
    if search.outcome_ratio is not search.rules_ratio:
        message += f", the final plan {search.outcome_ratio.median:.2f}"
    lines: list[RenderableType] = []
    if search.all_float:
        lines.append(plain_line(f"{message}.", "dim"))
        lines.append(plain_line(f"Nothing is quantized: {search.float_reason}.", "bold yellow"))
        if search.runtime == "TensorFlow":
            lines.append(
                plain_line("TensorFlow emulates quantization in float ops; -o NAME.tflite runs on integers.", "yellow")
            )
    else:
        float_text = f", with {pluralize(len(search.float_tensors), 'site')} in float" if search.float_tensors else ""
        lines.append(plain_line(f"{message}{float_text}."))
    if search.interrupted and not search.plans:
        lines.append(plain_line("The measurement was interrupted; this is the fastest plan so far.", "yellow"))
    return lines


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
