"""Why tensors and ops are quantized as they are, as text and as JSON data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding

from graphquant.visualize.json_export import JSON_SCHEMA_VERSION
from graphquant.visualize.text import plain_line, pluralize

if TYPE_CHECKING:
    from graphquant.analysis import Explanation, ExplanationReport
    from graphquant.backends import Verdict
    from graphquant.rules import RuleMiss


NEAR_MISS_THRESHOLD = 2
"""How near a rule must have come to be told: all that it asks of the producer or of the consumer holds."""

NEAR_MISSES_SHOWN = 5
"""How many of these are told of a use."""


def explain_view(explanations: ExplanationReport, *, all_rules: bool = False) -> RenderableType:
    """What becomes of each op that was asked for, then each use with the rules that came close, or with all."""
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
    """What becomes of one op."""
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
    """How many of the tensors that an op reads are quantized, unless it is within another."""
    if verdict is not None and verdict.status == "absorbed":
        return next((f"one op with {use.tensor.op}" for use in uses if use.fused), "one op with what it reads")
    return f"reads {sum(use.quantized for use in uses)} of {pluralize(len(uses), 'float input')} quantized"


def _outputs_phrase(uses: list[Explanation], verdict: Verdict | None) -> str:
    """Of how many uses what an op makes is quantized."""
    if verdict is not None and verdict.status == "low" and all(use.fused for use in uses):
        return f"one op with {uses[0].use.op} behind it"
    quantized_count = sum(use.quantized for use in uses)
    if quantized_count in {0, len(uses)}:
        return f"what it makes is {'quantized' if quantized_count else 'not quantized'}"
    return f"what it makes is quantized for {quantized_count} of {pluralize(len(uses), 'use')}"


def _backend_line(verdict: Verdict, explanations: ExplanationReport) -> str:
    """What the backend does with an op."""
    subject = f"{explanations.backend} {'runs' if explanations.already_quantized else 'will run'}"
    if verdict.status == "absorbed":
        return f"{subject} it as part of {verdict.runs_as}."
    if verdict.status == "low":
        return f"{subject} it on integers, as {verdict.runs_as}."
    if verdict.broken_rule is None:
        return f"{subject} it in float{f': {verdict.note}' if verdict.note else ''}."
    return f"{subject} it in float: {verdict.broken_rule.message}. To change that: {verdict.broken_rule.fix}."


def _all_misses(explanation: Explanation) -> list[RenderableType]:
    """Each other rule."""
    return [
        _indented(f"{miss.rule.rule.name}: {_miss_reason(explanation, miss)}", 4, "dim") for miss in explanation.misses
    ]


def _closest_misses(explanation: Explanation) -> list[RenderableType]:
    """The rules that came closest, and how many others there are."""
    near_misses = sorted(
        (miss for miss in explanation.misses if miss.closeness >= NEAR_MISS_THRESHOLD or not miss.reason),
        key=_miss_rank,
    )[:NEAR_MISSES_SHOWN]
    lines: list[RenderableType] = [plain_line("  came close:", style="dim")] if near_misses else []
    lines += [_indented(f"{miss.rule.rule.name}: {_miss_reason(explanation, miss)}", 4, "dim") for miss in near_misses]
    remaining = [miss for miss in explanation.misses if miss not in near_misses]
    if remaining:
        producer_count = sum(miss.reason.startswith("producer") for miss in remaining)
        phrases = [
            f"{producer_count} want another producer" if producer_count else "",
            f"{len(remaining) - producer_count} another consumer",
        ]
        reasons = " and ".join(filter(None, phrases[: 1 if producer_count == len(remaining) else 2]))
        lines.append(_indented(f"{pluralize(len(remaining), 'other rule')}: {reasons}. --all lists them.", 2, "dim"))
    return lines


def _miss_rank(miss: RuleMiss) -> tuple[bool, int]:
    """Those that match too come first, then the nearest."""
    return bool(miss.reason), -miss.closeness


def _miss_reason(explanation: Explanation, miss: RuleMiss) -> str:
    return miss.reason or (
        f"matches too, but {explanation.winner} came first" if explanation.winner else "matches, and inserts nothing"
    )


def _indented(text: str, indent: int, style: str = "") -> RenderableType:
    """A line that is indented where it is folded too."""
    return Padding(plain_line(text, style), (0, 0, 0, indent), expand=False)


def explain_json(explanations: ExplanationReport) -> dict[str, Any]:
    """The same as JSON data, with all rules."""
    return {
        "schema": JSON_SCHEMA_VERSION,
        "written": explanations.already_quantized,
        "backend": explanations.backend or None,
        "assumed_ranges": explanations.placeholder_ranges,
        "untold": explanations.omitted_reason or None,
        "ops": [
            {
                "graph": verdict.graph,
                "op": verdict.op,
                "type": verdict.type,
                "status": verdict.status,
                "runs_as": verdict.runs_as,
                "reason": None if verdict.broken_rule is None else verdict.broken_rule.message,
                "fix": None if verdict.broken_rule is None else verdict.broken_rule.fix,
            }
            for verdict in explanations.verdicts
        ],
        "uses": [
            {
                "tensor": str(explanation.tensor),
                "use": str(explanation.use),
                "quantized": explanation.quantized,
                "rule": explanation.winner or None,
                "outcome": explanation.outcome,
                "choices": list(explanation.scale_reasons),
                "others": [
                    {"rule": miss.rule.rule.name, "reason": _miss_reason(explanation, miss), "near": miss.closeness}
                    for miss in explanation.misses
                ],
            }
            for explanation in explanations.uses
        ],
    }
