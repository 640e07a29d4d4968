"""Differences between models, and the outcome of `strip`, as text and JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from graphquant.errors import escape_unprintable
from graphquant.visualize.json_export import JSON_SCHEMA_VERSION
from graphquant.visualize.text import plain_line, pluralize

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.analysis import Differences, ModelChange
    from graphquant.api import Proof, StripResult


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


def diff_json(differences: Differences) -> dict[str, Any]:
    """Return differences as JSON data."""
    return {
        "schema": JSON_SCHEMA_VERSION,
        "counts": differences.counts,
        "rerouted": differences.rerouted,
        "changes": [
            {
                "kind": change.kind,
                "location": change.location,
                "message": change.message,
                "size": change.size if math.isfinite(change.size) else None,
            }
            for change in differences.changes
        ],
    }


def _change_line(change: ModelChange) -> Text:
    sign = CHANGE_SIGNS.get(change.kind, "~")
    line = Text(f"{sign} {change.kind} ", style=CHANGE_STYLES[sign])
    line.append(escape_unprintable(f"{change.location}: {change.message}"), style="default")
    return line


def strip_view(stripped: StripResult, written: Path | None) -> RenderableType:
    """Render removed ops, rounded weights, and tensors that stay quantized."""
    lines = [plain_line(note, "yellow") for note in stripped.notes]
    lines += [plain_line(f"left: {tensor}: {reason}", "yellow") for tensor, reason in stripped.remaining]
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
