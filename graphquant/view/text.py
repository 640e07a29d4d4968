"""Tables for the terminal. They read at 80 columns, without colour, and never cut a name without saying so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from graphquant.explain import Explanation
    from graphquant.numerics import Array, QParams
    from graphquant.pipeline import Result
    from graphquant.plans import Plan, Site, Skip
    from graphquant.survey import Survey

SHOWN = 3
"""Consumers named in a cell; the rest are counted."""


def plan_view(plan: Plan) -> RenderableType:
    """The plan as tables: preparations, sites, skips, unused rules."""
    table = _table("tensor", "read by", "rule", "scheme")
    for site in plan.sites:
        table.add_row(str(site.tensor), _uses([str(use) for use in site.uses]), site.rule, _scheme(site))
    parts: list[RenderableType] = [*_steps(plan), table, *_skips(plan.skips)]
    if plan.unused:
        parts.append(Text(f"Rules that matched nothing: {', '.join(plan.unused)}", style="dim"))
    uses = sum(len(site.uses) for site in plan.sites)
    parts.append(
        Text(f"{len(plan.sites)} sites, {uses} uses rerouted, {len(plan.skips)} left with a reason.", style="bold")
    )
    return Group(*parts)


def result_view(result: Result, output: Path | None) -> RenderableType:
    """What `insert` did: a line per site with scale, zero point and range."""
    table = _table("tensor", "rule", "dtype", "scale", "zero point", "range")
    for done in result.inserted:
        where = Text(str(done.site.tensor))
        if done.folded:
            where.append(" (stored as integers)", style="dim")
        table.add_row(where, done.site.rule, *_params(done.params))
    parts: list[RenderableType] = [*_steps(result.plan), table, *_skips(result.skips)]
    if result.random:
        parts.append(Text("The ranges come from RANDOM data: use the model for tests only.", style="bold red"))
    uses = sum(len(done.site.uses) for done in result.inserted)
    said = f"{len(result.inserted)} sites inserted, {uses} uses rerouted"
    said += f", calibrated on {result.samples} samples" if result.samples else ""
    parts.append(
        Text(f"{said}." + (f" Written to {output}" if output else " Nothing written (dry run)."), style="bold")
    )
    return Group(*parts)


def survey_view(found: Survey) -> RenderableType:
    """What is in a model, with each quantization op's scale."""
    model = found.model
    head = f"{model.path or 'model'}: {model.format}" + (f", opset {model.opset}" if model.opset else "")
    ops = sum(found.kinds.values())
    graphs = len(model.graphs) - len(found.idle)
    lines: list[RenderableType] = [
        Text(f"{head}, {ops} ops in {graphs} graph{'s' if graphs > 1 else ''}", style="bold")
    ]
    for title, names in (("inputs ", model.main.inputs), ("outputs", model.main.outputs)):
        shown = [_signature(model, name, title.strip() == "outputs") for name in names]
        lines.append(Text(f"  {title} {_uses(shown, 6)}"))
    top = list(found.kinds.items())
    lines.append(Text(f"  ops     {_uses([f'{count} {kind}' for kind, count in top], 12)}"))
    if found.idle:
        lines.append(
            Text(f"  {len(found.idle)} functions that nothing in the main graph reaches are not listed.", style="dim")
        )
    if found.readings:
        table = _table("tensor", "op", "dtype", "scale", "zero point", "range")
        for reading in found.readings:
            values = ("?", "at run time", "", "") if reading.params is None else _params(reading.params)
            table.add_row(str(reading.tensor), reading.type, *values)
        lines.append(table)
    lines += _coverage(found)
    return Group(*lines)


def explain_view(explanations: Sequence[Explanation]) -> RenderableType:
    """Each use with the rules that were tried."""
    parts: list[RenderableType] = []
    for one in explanations:
        parts.append(Text(f"{one.tensor} read by {one.use}", style="bold"))
        parts.append(Text(f"  {one.outcome}" + (f" (rule {one.winner})" if one.winner else "")))
        for miss in one.misses:
            reason = miss.reason or f"matches too, but {one.winner} came first"
            parts.append(Text(f"  {miss.rule.rule.name}: {reason}", style="dim"))
    return Group(*parts)


def console(*, stderr: bool = False) -> Console:
    """A console that is wide enough for its tables where it is no terminal."""
    made = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=160, color_system=None)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=False)
    return table


def _steps(plan: Plan) -> list[RenderableType]:
    counted: dict[str, list[str]] = {}
    for step in plan.steps:
        counted.setdefault(step.step, []).append(step.detail if step.target == "model" else step.target)
    return [Text(f"prepared: {name}: {_uses(targets)}") for name, targets in counted.items()]


def _skips(skips: Sequence[Skip]) -> list[RenderableType]:
    """Skips gathered by reason, so that many alike are one line."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for skip in skips:
        reasons.setdefault((skip.rule, skip.reason), []).append(str(skip.tensor))
    return [
        Text(f"left: {_uses(tensors)}: {reason} (rule {rule})", style="yellow" if rule else "")
        for (rule, reason), tensors in reasons.items()
    ]


def _coverage(found: Survey) -> list[RenderableType]:
    if not found.coverage:
        return []
    done = sum(one.quantized for one in found.coverage)
    lines: list[RenderableType] = [
        Text(f"{done} of {len(found.coverage)} ops that multiply read quantized tensors only.", style="bold")
    ]
    if done:
        lines += [
            Text(f"  float: {one.graph + '/' if one.graph else ''}{one.op} ({one.kind}): {one.reason}", style="yellow")
            for one in found.coverage
            if not one.quantized
        ]
    return lines


def _scheme(site: Site) -> str:
    scheme = site.scheme
    per = f"per channel, axis {site.axis}" if site.axis is not None else "per tensor"
    how = f"shares with {_uses([str(use) for use in site.tie], 1)}" if site.tie else scheme.observe.name
    return f"{scheme.type.name} {scheme.zero} {per}, {how}"


def _params(params: QParams) -> tuple[str, str, str, str]:
    dtype = params.type.name + (f"[{params.scale.size}]" if params.axis is not None else "")
    zero = _span(params.zero_point, "d")
    low, high = float(params.range.low.min()), float(params.range.high.max())
    return dtype, _span(params.scale, ".6g"), zero, f"[{low:.5g}, {high:.5g}]"


def _span(values: Array, form: str) -> str:
    low, high = np.min(values).item(), np.max(values).item()
    return format(low, form) if low == high else f"{low:{form}}..{high:{form}}"


def _uses(names: Sequence[str], shown: int = SHOWN) -> str:
    more = f", {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _signature(model: object, name: str, is_output: bool) -> str:
    graph = model.main  # type: ignore[attr-defined]  # a Model
    tensor = graph.slots(name)[0] if is_output else None
    known = graph.output(tensor) if tensor is not None else (graph.op(name).outputs or (None,))[0]
    label = name.removeprefix("@")
    if known is None or known.shape is None:
        return label
    return f"{label} {known.dtype}[{', '.join('?' if side is None else str(side) for side in known.shape)}]"
