"""Comparisons of two models as text: `compare`, `diff` and `strip`, and the validation and search of `insert`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from graphquant.errors import escape_unprintable
from graphquant.utils.text import join_limited, percent
from graphquant.visualize.tables import Column, Table, join_names, plain_line, pluralize

if TYPE_CHECKING:
    from graphquant.analysis.comparison import Comparison, MetricFigures, OutputFigures, SiteFigures
    from graphquant.analysis.diff import Differences
    from graphquant.analysis.validation import Validation
    from graphquant.api.strip import Proof, StripResult
    from graphquant.calibration.data.check import DataFinding
    from graphquant.optimize.search import SearchTrace
    from graphquant.optimize.search_budget import StopReason


def comparison_view(comparison: Comparison, *, top: int) -> RenderableType:
    """Render the output metrics and the `top` quantized tensors with the largest errors of their own."""
    sections = data_warnings(comparison.data_findings)
    sections.append(Table(OUTPUT_COLUMNS, comparison.outputs))
    sections += [
        plain_line(f"{output.name}: {output.problem}", "bold red") for output in comparison.outputs if output.problem
    ]
    reason = f"nothing to compare: it was empty for all {pluralize(comparison.samples, 'sample')}"
    sections += [plain_line(f"{output.name}: {reason}", "yellow") for output in comparison.outputs if output.empty]
    if comparison.sites:
        sections += ["", Table(SITE_COLUMNS, comparison.sites[:top], note=lambda site: site.note)]
        omitted_count = len(comparison.sites) - top
        if omitted_count > 0:
            sections.append(Text(f"{omitted_count} more with smaller errors; --top 0 shows all.", style="dim"))
    if comparison.random:
        sections.append(Text("The data is RANDOM: the metrics do not apply to real data.", style="bold red"))
    summary = []
    if comparison.sqnr is not None:
        worst = f"worst output {_decibel_text(comparison.sqnr)} dB"
        summary = ["the worst output has no SQNR" if comparison.sqnr == -math.inf else worst]
    summary += [f"{_percent_text(comparison.agreement)} agree"] if comparison.agreement is not None else []
    summary += [f"{metric_text(comparison.metric)}"] if comparison.metric is not None else []
    figures = ", ".join(summary) or ("Nothing compared" if comparison.all_empty else "Compared")
    sections += uncertainty_lines(comparison)
    sections.append(plain_line(f"{figures}, over {pluralize(comparison.samples, 'sample')}.", "bold"))
    return Group(*sections)


def comparison_figures(comparison: Comparison) -> list[tuple[str, str]]:
    """Return labels and values of the worst output."""
    figures = []
    if comparison.sqnr is not None:
        figures.append(("SQNR of the worst output", f"{_decibel_text(comparison.sqnr)} dB"))
    if comparison.agreement is not None:
        figures.append(("agreement", _percent_text(comparison.agreement)))
    return figures


def metric_text(metric: MetricFigures) -> str:
    """Return the scores of both models by the user's metric."""
    return f"{metric.name} " + " -> ".join(f"{score:.4g}" for score in metric.scores)


def data_warnings(findings: Iterable[DataFinding]) -> list[RenderableType]:
    """Render likely mistakes in the data."""
    return [plain_line(f"warning: {finding.message}", "bold yellow") for finding in findings]


def _decibel_text(value: float) -> str:
    return {math.inf: "equal", -math.inf: "none"}.get(value, f"{value:.2f}")


_percent_text = "{:.2%}".format


def _both_texts(form: Callable[[float], str]) -> Callable[[tuple[float, float]], str]:
    """Return a function that formats the figures of the float and of the quantized model."""
    return lambda figures: " -> ".join(map(form, figures))


_accuracy_text, _perplexity_text = _both_texts(_percent_text), _both_texts("{:.4g}".format)

OUTPUT_COLUMNS: tuple[Column[OutputFigures], ...] = (
    Column("output", lambda output: " = ".join(dict.fromkeys((output.name, output.quantized_name)))),
    Column("SQNR", lambda output: output.sqnr, _decibel_text, unit="dB", number=True),
    Column("cosine", lambda output: output.cosine, "{:.6f}".format, number=True),
    Column("max diff", lambda output: None if output.empty else output.max_error, "{:.4g}".format, number=True),
    Column("agree", lambda output: output.agreement, _percent_text, number=True),
    Column(
        "accuracy",
        lambda output: output.accuracy,
        lambda pair: " -> ".join(map(_percent_text, pair)),
        number=True,
        optional=True,
    ),
    Column("perplexity", lambda output: output.perplexity, _perplexity_text, number=True, optional=True),
)
SITE_COLUMNS: tuple[Column[SiteFigures], ...] = (
    Column("quantized tensor", lambda site: site.tensor),
    Column("rule", lambda site: site.rule),
    Column("its own", lambda site: site.local, _decibel_text, unit="dB", number=True),
    Column("so far", lambda site: site.accumulated, _decibel_text, unit="dB", number=True),
    Column("at outputs", lambda site: site.sensitivity, _decibel_text, unit="dB", number=True, optional=True),
)

CHANGE_SIGNS = {"op-added": "+", "site-added": "+", "op-removed": "-", "site-removed": "-"}  # `~` for changes
CHANGE_STYLES = {"+": "green", "-": "red", "~": "yellow"}

CHANGE_LABELS = {
    "model": ("change of the whole model", "changes of the whole model"),
    "op-added": ("op added", "ops added"),
    "op-removed": ("op removed", "ops removed"),
    "op-renamed": ("op renamed", "ops renamed"),
    "op-changed": ("input of another type or shape", "inputs of another type or shape"),
    "attribute": ("attribute changed", "attributes changed"),
    "wiring": ("input rewired", "inputs rewired"),
    "weight": ("weight changed", "weights changed"),
    "site-added": ("site added", "sites added"),
    "site-removed": ("site removed", "sites removed"),
    "site-changed": ("site changed", "sites changed"),
    "plan": ("change of the whole plan", "changes of the whole plan"),
}
"""Singular and plural label of each kind of change."""

NOTABLE_SCALE_CHANGE = 0.01  # relative change above which a scale counts as changed


def diff_view(differences: Differences, *, summary_only: bool) -> RenderableType:
    """Render a line for each difference and a summary line, or only the summary."""
    lines = []
    for change in () if summary_only else differences.changes:
        sign = CHANGE_SIGNS.get(change.kind, "~")
        line = Text(f"{sign} {change.kind} ", style=CHANGE_STYLES[sign])
        lines.append(line.append(escape_unprintable(f"{change.location}: {change.message}"), style="default"))
    return Group(*lines, plain_line(diff_summary(differences), "bold"))


def diff_summary(differences: Differences) -> str:
    """Summarize differences by count."""
    if not differences:
        return "No difference."
    labels = ((kind, count) for kind, count in differences.counts.items() if kind in CHANGE_LABELS)
    phrases = [f"{count} {CHANGE_LABELS[kind][count != 1]}" for kind, count in labels]
    scales = [change.size for change in differences.changes if change.kind == "scale"]
    large = sum(size > NOTABLE_SCALE_CHANGE for size in scales)
    small = len(scales) - large
    phrases += [f"{pluralize(large, 'scale')} changed by more than 1%"] if large else []
    phrases += [f"{pluralize(small, 'scale')} changed by less"] if small else []
    if differences.rerouted:
        phrases.append(f"{pluralize(differences.rerouted, 'use')} rerouted")
    return f"{', '.join(phrases)}."


def strip_view(stripped: StripResult, written: Path | None) -> RenderableType:
    """Render removed ops, rounded weights, and tensors that stay quantized."""
    lines = [plain_line(note, "yellow") for note in stripped.notes]
    lines += [plain_line(f"skipped: {tensor}: {reason}", "yellow") for tensor, reason in stripped.remaining]
    message = f"{pluralize(len(stripped.ops), 'op')} removed"
    if stripped.exact:
        message = "The source model, bit for bit"
    elif stripped.weights:
        names = join_limited([tensor.op for tensor, _ in stripped.weights], 3)
        message += f"; {pluralize(len(stripped.weights), 'weight')} dequantized, still rounded: {names}"
    lines.append(plain_line(f"{message}." + (f" Written to {written}" if written else ""), "bold"))
    return Group(*lines)


def strip_proof_view(proof: Proof, original: str) -> RenderableType:
    """Render the proof that stripping restored the original."""
    if proof.equal:
        return plain_line(f"Verified: it is {original}, identical in every message.", "bold")
    sections: list[RenderableType] = []
    if proof.other_differences:
        sections.append(diff_view(proof.other_differences, summary_only=False))
    if proof.holds:
        rounded = f", except for the rounding of {pluralize(proof.rounded_weights, 'weight')}"
        message = f"Verified: it is {original}" + (f" as prepared ({proof.steps})" if proof.steps else "")
        sections.append(plain_line(f"{message}{rounded if proof.rounded_weights else ''}.", "bold"))
    return Group(*sections)


NOTABLE_UNCERTAINTY = 6  # decibels between a measured SQNR and its lower bound from which the bound is shown
LOWEST_USEFUL_BOUND = 10  # dB; a lower bound below this, and far below the SQNR, only says that samples are too few


def uncertainty_lines(comparison: Comparison) -> list[RenderableType]:
    """Render the lower bounds of the outputs whose SQNR may be much lower on other samples."""
    bounds, unbounded, messages = list[str](), list[str](), list[str]()
    for output in comparison.outputs if not comparison.random else ():
        sqnr, bound = output.sqnr, output.sqnr_lower_bound
        # The samples are equal or too few if one of the two is infinite.
        if sqnr is None or bound is None or bound >= sqnr - NOTABLE_UNCERTAINTY:
            continue
        if bound < min(LOWEST_USEFUL_BOUND, sqnr - 2 * NOTABLE_UNCERTAINTY):
            unbounded.append(output.name)
        else:
            bounds.append(f"{output.name} at least {bound:.1f} dB")
    if bounds:
        messages.append(f"on other samples, with 95% confidence: {join_names(bounds, WORST_SHOWN)}")
    if unbounded:
        names = join_names(unbounded, WORST_SHOWN)
        messages.append(f"too few samples ({comparison.samples}) to predict the SQNR of {names} on others")
    return [plain_line(f"  {message}", "yellow") for message in messages]


FLOAT_BLOCKS = "float"  # step of a repair, as in `optimize.repair`, whose import is slow
WIDER_WEIGHTS = "8-bit weights"  # likewise
WORST_SHOWN = 3  # number of outputs and tensors to list if all bounds are met
MISSED_SHOWN = 6  # number of tensors to list if a bound is missed


TARGET_MISSED = ("warning", "bold yellow")  # label and style of an output that misses what nobody requested


def validation_view(validation: Validation | None) -> list[RenderableType]:
    """Render output metrics, the quantized share of multiply-adds, the costliest tensors, and missed bounds."""
    if validation is None:
        return [plain_line("Not validated against the float model. Give --data to validate the result.", "dim")]
    if validation.comparison is None:
        return [plain_line(f"Validation failed: {missed_bound}.", "bold red") for missed_bound in validation.failures]
    lines: list[RenderableType] = [plain_line(f"{_validation_summary(validation, validation.comparison)}.")]
    if not validation.reuses_samples:  # the bounds would be wrong for samples that chose the plan
        lines += uncertainty_lines(validation.comparison)
    missed = validation.failures
    worst_sites = validation.worst_sites[: MISSED_SHOWN if missed else WORST_SHOWN]
    if validation.quantized_share is not None:
        share = f"  {percent(validation.quantized_share)} of {validation.total_macs:,} multiply-adds"
        lines.append(plain_line(f"{share} have quantized inputs"))
    if worst_sites:
        errors = [site.sensitivity if validation.has_sensitivity else site.local for site in worst_sites]
        texts = [f"{site.tensor} {error:.1f} dB" for site, error in zip(worst_sites, errors, strict=True)]
        message = "highest sensitivity" if validation.has_sensitivity else "lowest SQNR of single tensors"
        lines.append(plain_line(f"  {message}: {join_names(texts, MISSED_SHOWN)}"))
    label, style = ("failed", "bold red") if validation.bounds else TARGET_MISSED
    lines += [plain_line(f"{label}: {missed_bound}.", style) for missed_bound in missed]
    lines += [plain_line(f"warning: {warning}.", "bold yellow") for warning in validation.warnings]
    if missed:
        message = "  compare lists every tensor; --exclude keeps some float, --method selects another observer."
        lines.append(plain_line(message, "red"))
    return lines


def search_view(search: SearchTrace | None, validation: Validation | None = None) -> list[RenderableType]:
    """Render the result of the search for a plan: latency, size, and bounds, for which the validation decides."""
    if search is None or (search.repair is not None and not search.repair.requested):
        return []
    lines = _latency_lines(search) if search.runtime else []
    if search.all_float:
        return lines
    choices = f"; {pluralize(len(search.float_tensors), 'site')} in float" if search.float_tensors else ""
    for candidate, count in sorted(Counter(search.changed_tensors.values()).items()):
        choices += f"; {pluralize(count, 'site')} with {candidate}"
    has_validated_changes = search.plans > 0 and not (search.plans == 1 and not search.failures)
    if search.size is not None:
        limit = f"of the limit {search.max_size:,}" if search.max_size is not None else "within the bounds"
        message = f"Constants take {search.size:,} bytes {limit}; in float they took {search.float_size:,}"
        lines.append(plain_line(f"{message}{'' if has_validated_changes else choices}."))
        if search.estimated_weights:
            tensors = join_names([str(tensor) for tensor in search.estimated_weights], WORST_SHOWN)
            lines.append(plain_line(f"  error estimated from the bit width only: {tensors}", "yellow"))
    if not search.plans:
        return lines
    bounds = _bound_lines(search, validation)
    if not has_validated_changes:
        return [*lines, *bounds]
    message = f"Searched {pluralize(search.plans, 'plan')}, {search.runs_per_site:.1f} runs for each site"
    message += f", float ops with {percent(search.cost)} of the cost{choices}"
    lines += [plain_line(f"{message}."), *bounds]
    if search.interrupted:
        lines.append(plain_line("The search was interrupted; this is its best plan.", "yellow"))
    elif search.stop_reason is not None:
        lines.append(_limit_line(search.stop_reason))
    lines += [plain_line(f"failed: {missed} on the samples of the search", "yellow") for missed in search.failures]
    return lines


def repair_view(search: SearchTrace | None, validation: Validation | None) -> list[RenderableType]:
    """Render the changes of a repair with their gain and their cost in one line, and the limit that ended it."""
    repair = None if search is None else search.repair
    if repair is None:
        return []
    quantized_share = None if validation is None or repair.requested else validation.quantized_share
    kept = [step for step in repair.steps if step.kept and step.change != FLOAT_BLOCKS]
    changes = [
        f"{len(step.targets)} of the weights in 8 bits" if change == WIDER_WEIGHTS else change
        for change, step in {step.change: step for step in kept}.items()
    ]
    if repair.float_blocks:
        changes.append(f"{join_names(repair.float_blocks, WORST_SHOWN)} left in float")
    nothing = "no change helps" if repair.stop_reason is None else "no change"
    figures = [f"{join_names(changes, len(changes))}: {_sqnr_text(repair.sqnr)}" if changes else nothing]
    figures += [f"{percent(quantized_share)} of MACs in int8"] if changes and quantized_share else []
    lines: list[RenderableType] = [
        plain_line(f"default plan {_sqnr_text(repair.default_sqnr)}; {', '.join(figures)}", "bold")
    ]
    if repair.stop_reason == "interrupt":
        lines.append(plain_line("The search was interrupted; this is its best plan.", "yellow"))
    elif repair.problem:
        lines.append(plain_line(f"warning: the search ended early: {repair.problem}", "yellow"))
    elif repair.stop_reason is not None:
        lines.append(_limit_line(repair.stop_reason))
    return lines


def _limit_line(reason: StopReason) -> RenderableType:
    limit = "limit of work" if reason == "work" else "time limit"
    return plain_line(f"The search ended at its {limit}; --search-time allows more.", "yellow")


def _sqnr_text(sqnr: float) -> str:
    return f"{sqnr:.1f} dB" if math.isfinite(sqnr) else "no SQNR"


def _bound_lines(search: SearchTrace, validation: Validation | None) -> list[RenderableType]:
    """Render whether the plan meets the bounds, on which samples, and the reasons why they are not proven."""
    searched = search.search_validation
    lines: list[RenderableType] = []
    if search.status not in {None, "missed"} and searched is not None and searched.comparison is not None:
        message = f"The bounds are met on the {pluralize(searched.comparison.samples, 'sample')} of the search"
        figures = ", ".join(f"{label} {value}" for label, value in comparison_figures(searched.comparison))
        message += f" ({figures})" if figures else ""
        style = "yellow" if search.caveats else ""
        if validation is not None and validation.comparison is not None and validation.bounds and validation.failures:
            held_out = pluralize(validation.comparison.samples, "sample")
            message += f", but missed on the {held_out} of the validation, which decides: exit code 1"
            style = "bold red"
        else:
            message += ", not proven" if search.caveats else ""
        lines.append(plain_line(f"{message}.", style))
    return [*lines, *(plain_line(f"inconclusive: {caveat}", "yellow") for caveat in search.caveats)]


def _latency_lines(search: SearchTrace) -> list[RenderableType]:
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
            hint = "TensorFlow emulates quantization in float ops; -o NAME.tflite runs on integers."
            lines.append(plain_line(hint, "yellow"))
    else:
        float_text = f", with {pluralize(len(search.float_tensors), 'site')} in float" if search.float_tensors else ""
        lines.append(plain_line(f"{message}{float_text}."))
    if search.interrupted and not search.plans:
        lines.append(plain_line("The measurement was interrupted; this is the fastest plan so far.", "yellow"))
    return lines


def _validation_summary(validation: Validation, comparison: Comparison) -> str:
    """Return the number of samples and the metrics of the worst outputs."""
    data_text = " of other data than the statistics" if validation.calibrated_on_other_data else ""
    data_text += " that ranges, algorithms or a search also used" if validation.reuses_samples else ""
    data_text = f" in {validation.folds} parts, each with ranges of the others" if validation.folds > 1 else data_text
    ranked = sorted(comparison.outputs, key=lambda output: (output.sqnr is None, output.sqnr or 0.0))
    scores = validation.score_sqnr
    texts = [_output_metrics_text(output, scores.get(output.name)) for output in ranked if not output.empty]
    outputs = join_names(texts, WORST_SHOWN)
    samples = pluralize(comparison.samples, "sample")
    if empty_names := [output.name for output in ranked if output.empty]:
        verb = "it was" if len(empty_names) == 1 else "they were"
        message = f"{join_names(empty_names, WORST_SHOWN)} cannot be compared: {verb} empty for all {samples}"
        outputs = f"{outputs}; {message}" if outputs else message
    outputs = ", ".join(filter(None, (outputs, metric_text(comparison.metric) if comparison.metric else "")))
    samples = samples if data_text else pluralize(comparison.samples, "held-out sample")
    return f"Validated on {samples}{data_text}. SQNR: {outputs}"


def _output_metrics_text(output: OutputFigures, score_sqnr: float | None) -> str:
    figures = ["not compared"] if output.problem else []
    if output.sqnr is not None:
        figures.append({math.inf: "equal", -math.inf: "no SQNR"}.get(output.sqnr, f"{output.sqnr:.1f} dB"))
    if score_sqnr is not None:
        figures.append(f"{score_sqnr:.1f} dB before its softmax")
    if output.agreement is not None:
        figures.append(f"{percent(output.agreement)} top-1 agreement")
    if output.accuracy is not None:
        figures.append(f"accuracy {percent(output.accuracy[0], 2)} -> {percent(output.accuracy[1], 2)}")
    if output.perplexity is not None:
        figures.append(f"perplexity {_perplexity_text(output.perplexity)}")
    return (
        f"{output.name} {' with '.join(filter(None, (figures[0], ' and '.join(figures[1:]))))}"
        if figures
        else output.name
    )
