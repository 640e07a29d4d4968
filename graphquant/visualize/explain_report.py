"""Explanations of tensors and ops as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding

from graphquant.visualize.tables import plain_line, pluralize

if TYPE_CHECKING:
    from graphquant.analysis import Explanation, ExplanationReport
    from graphquant.backends import Verdict
    from graphquant.rules import RuleMiss


NEAR_MISS_THRESHOLD = 2
"""Closeness from which a rule is listed: all its conditions on the producer or on the consumer hold."""

NEAR_MISSES_SHOWN = 5
"""Maximum number of near misses for a use."""


def explain_view(explanations: ExplanationReport, *, all_rules: bool = False) -> RenderableType:
    """Render each requested op, then each use with its rule and near misses."""
    sections: list[RenderableType] = []
    for op_key in dict.fromkeys(explanation.requested_op for explanation in explanations.uses):
        sections += _op_section(explanations, op_key)
    for explanation in explanations.uses:
        sections += ["", plain_line(f"{explanation.tensor} read by {explanation.use}", style="bold")]
        sections.append(
            _indented(explanation.outcome + (f" (rule {explanation.winner})" if explanation.winner else ""), 2)
        )
        sections += [_indented(choice, 4) for choice in explanation.scale_reasons]
        sections += _all_misses(explanation) if all_rules else _closest_misses(explanation)
    if explanations.omitted_reason:
        sections += ["", plain_line(explanations.omitted_reason, "dim")]
    return Group(*sections)


def _op_section(explanations: ExplanationReport, op_key: tuple[str, str]) -> list[RenderableType]:
    """Render the outcome of one op."""
    name = "/".join(filter(None, op_key))
    input_uses = [
        explanation for explanation in explanations.uses if (explanation.use.graph, explanation.use.op) == op_key
    ]
    output_uses = [
        explanation for explanation in explanations.uses if (explanation.tensor.graph, explanation.tensor.op) == op_key
    ]
    verdict = next((verdict_ for verdict_ in explanations.verdicts if (verdict_.graph, verdict_.op) == op_key), None)
    phrases = [_inputs_phrase(input_uses, verdict)] if input_uses else []
    if output_uses:
        phrases.append(_outputs_phrase(output_uses, verdict))
    heading = plain_line(f"{name}: {', '.join(phrases)}.", style="bold")
    return [heading] if verdict is None else [heading, _indented(_backend_line(verdict, explanations), 2)]


def _inputs_phrase(uses: list[Explanation], verdict: Verdict | None) -> str:
    """Count the quantized inputs of an op, or name the op that it is fused with."""
    if verdict is not None and verdict.status == "fused":
        return next((f"fused with {use.tensor.op}" for use in uses if use.fused), "fused with its producer")
    return f"reads {sum(use.quantized for use in uses)} of {pluralize(len(uses), 'float input')} quantized"


def _outputs_phrase(uses: list[Explanation], verdict: Verdict | None) -> str:
    """Count the uses of an op's output that are quantized."""
    if verdict is not None and verdict.status == "int8" and all(use.fused for use in uses):
        return f"fused with {uses[0].use.op}"
    quantized_count = sum(use.quantized for use in uses)
    if quantized_count in {0, len(uses)}:
        return f"its output is {'quantized' if quantized_count else 'not quantized'}"
    return f"its output is quantized for {quantized_count} of {pluralize(len(uses), 'use')}"


def _backend_line(verdict: Verdict, explanations: ExplanationReport) -> str:
    """Describe how the backend runs an op."""
    subject = f"{explanations.backend} {'runs' if explanations.already_quantized else 'will run'}"
    if verdict.status == "removed":
        return f"{explanations.backend} removes it, because it has no effect."
    if verdict.broken_rule is not None and verdict.broken_rule.rule == "refused":
        remedy = f"Remedy: {verdict.broken_rule.fix}."
        return f"{explanations.backend} cannot run the model. {verdict.broken_rule.message} {remedy}"
    if verdict.status == "fused":
        return f"{subject} it as part of {verdict.runs_as}."
    if verdict.status == "int8":
        return f"{subject} it on integers, as {verdict.runs_as}."
    if verdict.broken_rule is None:
        return f"{subject} it in float{f': {verdict.note}' if verdict.note else ''}."
    return f"{subject} it in float: {verdict.broken_rule.message}. Remedy: {verdict.broken_rule.fix}."


def _all_misses(explanation: Explanation) -> list[RenderableType]:
    """Render every other rule."""
    return [_indented(f"{miss.rule.rule.name}: {miss.reason}", 4, "dim") for miss in explanation.other_rules]


def _closest_misses(explanation: Explanation) -> list[RenderableType]:
    """Render the nearest rules, and count the remaining ones."""
    near_misses = sorted(
        (miss for miss in explanation.misses if miss.closeness >= NEAR_MISS_THRESHOLD or not miss.reason),
        key=_miss_rank,
    )[:NEAR_MISSES_SHOWN]
    lines: list[RenderableType] = [plain_line("  near misses:", style="dim")] if near_misses else []
    lines += [_indented(f"{miss.rule.rule.name}: {explanation.miss_reason(miss)}", 4, "dim") for miss in near_misses]
    remaining = [miss for miss in explanation.misses if miss not in near_misses]
    if remaining:
        producer_count = sum(miss.reason.startswith("producer") for miss in remaining)
        phrases = [
            f"{producer_count} require another producer" if producer_count else "",
            f"{len(remaining) - producer_count} another consumer",
        ]
        reasons = " and ".join(filter(None, phrases[: 1 if producer_count == len(remaining) else 2]))
        lines.append(_indented(f"{pluralize(len(remaining), 'other rule')}: {reasons}. --all lists them.", 2, "dim"))
    return lines


def _miss_rank(miss: RuleMiss) -> tuple[bool, int]:
    """Sort key: matching rules first, then by closeness."""
    return bool(miss.reason), -miss.closeness


def _indented(text: str, indent: int, style: str = "") -> RenderableType:
    """Return a line whose continuation lines are indented too."""
    return Padding(plain_line(text, style), (0, 0, 0, indent), expand=False)
