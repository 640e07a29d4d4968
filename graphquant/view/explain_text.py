"""Why tensors and ops are quantized as they are, as text and as JSON data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding

from graphquant.view.data import SCHEMA
from graphquant.view.text import counted, plain

if TYPE_CHECKING:
    from graphquant.backends import Verdict
    from graphquant.explain import Explained, Explanation
    from graphquant.match import Miss

CLOSE = 2
"""How near a rule must have come to be told: all that it asks of the producer or of the consumer holds."""

TOLD = 5
"""How many of these are told of a use."""


def explain_view(found: Explained, *, everything: bool = False) -> RenderableType:
    """What becomes of each op that was asked for, then each use with the rules that came close, or with all."""
    parts: list[RenderableType] = []
    for place in dict.fromkeys(one.asked for one in found.uses):
        parts += _head(found, place)
    for one in found.uses:
        parts += ["", plain(f"{one.tensor} read by {one.use}", style="bold")]
        parts.append(_line(one.outcome + (f" (rule {one.winner})" if one.winner else ""), 2))
        parts += [_line(choice, 4) for choice in one.choices]
        parts += _all(one) if everything else _closest(one)
    if found.untold:
        parts += ["", plain(found.untold, "dim")]
    return Group(*parts)


def _head(found: Explained, place: tuple[str, str]) -> list[RenderableType]:
    """What becomes of one op."""
    name = "/".join(filter(None, place))
    read = [one for one in found.uses if (one.use.graph, one.use.op) == place]
    made = [one for one in found.uses if (one.tensor.graph, one.tensor.op) == place]
    verdict = next((one for one in found.verdicts if (one.graph, one.op) == place), None)
    said = [_read(read, verdict)] if read else []
    if made:
        said.append(_made(made, verdict))
    head = plain(f"{name}: {', '.join(said)}.", style="bold")
    return [head] if verdict is None else [head, _line(_ruling(verdict, found), 2)]


def _read(uses: list[Explanation], verdict: Verdict | None) -> str:
    """How many of the tensors that an op reads are quantized, unless it is within another."""
    if verdict is not None and verdict.status == "absorbed":
        return next((f"one op with {one.tensor.op}" for one in uses if one.absorbed), "one op with what it reads")
    return f"reads {sum(one.quantized for one in uses)} of {counted(len(uses), 'float input')} quantized"


def _made(uses: list[Explanation], verdict: Verdict | None) -> str:
    """Of how many uses what an op makes is quantized."""
    if verdict is not None and verdict.status == "low" and all(one.absorbed for one in uses):
        return f"one op with {uses[0].use.op} behind it"
    done = sum(one.quantized for one in uses)
    if done in {0, len(uses)}:
        return f"what it makes is {'quantized' if done else 'not quantized'}"
    return f"what it makes is quantized for {done} of {counted(len(uses), 'use')}"


def _ruling(verdict: Verdict, found: Explained) -> str:
    """What the backend does with an op."""
    where = f"{found.backend} {'runs' if found.written else 'will run'}"
    if verdict.status == "absorbed":
        return f"{where} it as part of {verdict.runs_as}."
    if verdict.status == "low":
        return f"{where} it on integers, as {verdict.runs_as}."
    if verdict.broken is None:
        return f"{where} it in float{f': {verdict.note}' if verdict.note else ''}."
    return f"{where} it in float: {verdict.broken.says}. To change that: {verdict.broken.fix}."


def _all(one: Explanation) -> list[RenderableType]:
    """Each other rule."""
    return [_line(f"{miss.rule.rule.name}: {_reason(one, miss)}", 4, "dim") for miss in one.misses]


def _closest(one: Explanation) -> list[RenderableType]:
    """The rules that came closest, and how many others there are."""
    close = sorted((miss for miss in one.misses if miss.near >= CLOSE or not miss.reason), key=_rank)[:TOLD]
    parts: list[RenderableType] = [plain("  came close:", style="dim")] if close else []
    parts += [_line(f"{miss.rule.rule.name}: {_reason(one, miss)}", 4, "dim") for miss in close]
    others = [miss for miss in one.misses if miss not in close]
    if others:
        about = sum(miss.reason.startswith("producer") for miss in others)
        said = [f"{about} want another producer" if about else "", f"{len(others) - about} another consumer"]
        told = " and ".join(filter(None, said[: 1 if about == len(others) else 2]))
        parts.append(_line(f"{counted(len(others), 'other rule')}: {told}. --all lists them.", 2, "dim"))
    return parts


def _rank(miss: Miss) -> tuple[bool, int]:
    """Those that match too come first, then the nearest."""
    return bool(miss.reason), -miss.near


def _reason(one: Explanation, miss: Miss) -> str:
    return miss.reason or (
        f"matches too, but {one.winner} came first" if one.winner else "matches, and inserts nothing"
    )


def _line(what: str, indent: int, style: str = "") -> RenderableType:
    """A line that is indented where it is folded too."""
    return Padding(plain(what, style), (0, 0, 0, indent), expand=False)


def explain_json(found: Explained) -> dict[str, Any]:
    """The same as JSON data, with all rules."""
    return {
        "schema": SCHEMA,
        "written": found.written,
        "backend": found.backend or None,
        "assumed_ranges": found.assumed,
        "untold": found.untold or None,
        "ops": [
            {
                "graph": one.graph,
                "op": one.op,
                "type": one.type,
                "status": one.status,
                "runs_as": one.runs_as,
                "reason": None if one.broken is None else one.broken.says,
                "fix": None if one.broken is None else one.broken.fix,
            }
            for one in found.verdicts
        ],
        "uses": [
            {
                "tensor": str(one.tensor),
                "use": str(one.use),
                "quantized": one.quantized,
                "rule": one.winner or None,
                "outcome": one.outcome,
                "choices": list(one.choices),
                "others": [
                    {"rule": miss.rule.rule.name, "reason": _reason(one, miss), "near": miss.near}
                    for miss in one.misses
                ],
            }
            for one in found.uses
        ],
    }
