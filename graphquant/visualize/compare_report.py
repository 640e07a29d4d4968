"""Comparisons of two models as tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from graphquant.errors import escape_unprintable
from graphquant.visualize.tables import NameTable, plain_line, pluralize

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.analysis import Comparison, Differences, ModelChange, SiteFigures
    from graphquant.api import Proof, StripResult


def comparison_view(comparison: Comparison, *, top: int) -> RenderableType:
    """Render the output metrics and the `top` quantized tensors with the largest errors of their own."""
    sections: list[RenderableType] = [_output_table(comparison)]
    sections += [
        plain_line(f"{output.name}: {output.problem}", "bold red") for output in comparison.outputs if output.problem
    ]
    reason = f"nothing to compare: it was empty for all {pluralize(comparison.samples, 'sample')}"
    sections += [plain_line(f"{output.name}: {reason}", "yellow") for output in comparison.outputs if output.empty]
    if comparison.sites:
        sections += ["", _site_table(comparison.sites[:top])]
        omitted_count = len(comparison.sites) - top
        sections += (
            [Text(f"{omitted_count} more with smaller errors; --top 0 shows all.", style="dim")]
            if omitted_count > 0
            else []
        )
    if comparison.random:
        sections.append(Text("The data is RANDOM: the metrics do not apply to real data.", style="bold red"))
    worst = (
        "the worst output has no SQNR"
        if comparison.sqnr == -math.inf
        else f"worst output {_decibel_text(comparison.sqnr)} dB"
    )
    summary = [worst if comparison.sqnr is not None else ""]
    summary.append(f"{_percent_text(comparison.agreement)} agree" if comparison.agreement is not None else "")
    figures = ", ".join(filter(None, summary)) or ("Nothing compared" if comparison.all_empty else "Compared")
    sections.append(plain_line(f"{figures}, over {pluralize(comparison.samples, 'sample')}.", "bold"))
    return Group(*sections)


def _output_table(comparison: Comparison) -> NameTable:
    with_accuracy = any(output.accuracy for output in comparison.outputs)
    columns = ["output", "SQNR dB", "cosine", "max diff", "agree", *(["accuracy"] if with_accuracy else [])]
    table = NameTable(*columns, right=columns)
    for output in comparison.outputs:
        name = output.name if output.name == output.quantized_name else f"{output.name} = {output.quantized_name}"
        cells = [name, _decibel_text(output.sqnr), "" if output.cosine is None else f"{output.cosine:.6f}"]
        cells.append("" if output.empty else f"{output.max_error:.4g}")
        cells.append("" if output.agreement is None else _percent_text(output.agreement))
        if with_accuracy:
            cells.append("" if output.accuracy is None else " to ".join(map(_percent_text, output.accuracy)))
        table.add_row(*cells)
    return table


def _site_table(sites: tuple[SiteFigures, ...]) -> NameTable:
    has_sensitivity = any(site.sensitivity is not None for site in sites)
    columns = ["its own dB", "so far dB", *(["at outputs dB"] if has_sensitivity else [])]
    table = NameTable("quantized tensor", "rule", *columns, right=columns)
    for site in sites:
        cells = [
            site.tensor,
            site.rule,
            _decibel_text(site.local),
            _decibel_text(site.accumulated),
            *([_decibel_text(site.sensitivity)] if has_sensitivity else []),
        ]
        table.add_row(*cells, note=site.note)
    return table


def _decibel_text(value: float | None) -> str:
    if value is None:
        return ""
    return {math.inf: "equal", -math.inf: "none"}.get(value, f"{value:.2f}")


def _percent_text(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}%"


CHANGE_SIGNS = {"op-added": "+", "site-added": "+", "op-removed": "-", "site-removed": "-"}
"""Sign before a line; `~` for changes."""

CHANGE_STYLES = {"+": "green", "-": "red", "~": "yellow"}

CHANGE_LABELS = {
    "model": ("change of the whole model", "changes of the whole model"),
    "op-added": ("op added", "ops added"),
    "op-removed": ("op removed", "ops removed"),
    "op-renamed": ("op renamed", "ops renamed"),
    "op-changed": ("op of another type", "ops of another type"),
    "attribute": ("attribute changed", "attributes changed"),
    "wiring": ("input rewired", "inputs rewired"),
    "weight": ("weight changed", "weights changed"),
    "site-added": ("site added", "sites added"),
    "site-removed": ("site removed", "sites removed"),
    "site-changed": ("site changed", "sites changed"),
    "plan": ("change of the whole plan", "changes of the whole plan"),
}
"""Singular and plural label of each kind of change."""

NOTABLE_SCALE_CHANGE = 0.01
"""Relative change above which a scale counts as changed."""


def diff_view(differences: Differences, *, summary_only: bool) -> RenderableType:
    """Render a line for each difference and a summary line, or only the summary."""
    lines = [] if summary_only else [_change_line(change) for change in differences.changes]
    return Group(*lines, plain_line(diff_summary(differences), "bold"))


def diff_summary(differences: Differences) -> str:
    """Summarize differences by count."""
    if not differences:
        return "No difference."
    phrases = [
        f"{count} {CHANGE_LABELS[kind][count != 1]}"
        for kind, count in differences.counts.items()
        if kind in CHANGE_LABELS
    ]
    scales = [change.size for change in differences.changes if change.kind == "scale"]
    large = sum(size > NOTABLE_SCALE_CHANGE for size in scales)
    if large:
        phrases.append(f"{pluralize(large, 'scale')} changed by more than 1%")
    if len(scales) > large:
        small = len(scales) - large
        phrases.append(f"{pluralize(small, 'scale')} changed by less")
    if differences.rerouted:
        phrases.append(f"{pluralize(differences.rerouted, 'use')} rerouted")
    return f"{', '.join(phrases)}."


def _change_line(change: ModelChange) -> Text:
    sign = CHANGE_SIGNS.get(change.kind, "~")
    line = Text(f"{sign} {change.kind} ", style=CHANGE_STYLES[sign])
    line.append(escape_unprintable(f"{change.location}: {change.message}"), style="default")
    return line


def strip_view(stripped: StripResult, written: Path | None) -> RenderableType:
    """Render removed ops, rounded weights, and tensors that stay quantized."""
    lines = [plain_line(note, "yellow") for note in stripped.notes]
    lines += [plain_line(f"skipped: {tensor}: {reason}", "yellow") for tensor, reason in stripped.remaining]
    message = f"{pluralize(len(stripped.ops), 'op')} removed"
    if stripped.exact:
        message = "The source model, bit for bit"
    elif stripped.weights:
        names = ", ".join(str(tensor.op) for tensor, _ in stripped.weights[:3])
        more_text = f" and {len(stripped.weights) - 3} more" if len(stripped.weights) > 3 else ""  # noqa: PLR2004  # a line
        message += f"; {pluralize(len(stripped.weights), 'weight')} dequantized, still rounded: {names}{more_text}"
    lines.append(plain_line(f"{message}." + (f" Written to {written}" if written else ""), "bold"))
    return Group(*lines)


def strip_proof_view(proof: Proof, original: str) -> RenderableType:
    """Render the proof that stripping restored the original."""
    if proof.equal:
        return plain_line(f"Verified: it is {original}, identical in every message.", "bold")
    sections: list[RenderableType] = (
        [diff_view(proof.other_differences, summary_only=False)] if proof.other_differences else []
    )
    if proof.holds:
        message = f"Verified: it is {original}"
        message += f" as prepared ({proof.steps})" if proof.steps else ""
        message += (
            f", except for the rounding of {pluralize(proof.rounded_weights, 'weight')}."
            if proof.rounded_weights
            else "."
        )
        sections.append(plain_line(message, "bold"))
    return Group(*sections)
