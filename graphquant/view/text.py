"""Tables for the terminal. They read at 80 columns, without colour, and never cut a name without saying so."""

from __future__ import annotations

import os
import shlex
from functools import partial
from io import StringIO
from typing import IO, TYPE_CHECKING

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from graphquant.errors import printable
from graphquant.ir import named
from graphquant.losses import LOW
from graphquant.numerics import Dynamic
from graphquant.plans.already import PAIR
from graphquant.view.listing import Listing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from graphquant.calibration import Stats
    from graphquant.corrections import Corrected
    from graphquant.numerics import Array, QParams
    from graphquant.pipeline import Result
    from graphquant.plans import Plan, Site, Skip
    from graphquant.ranges import Ranges
    from graphquant.receipt import Receipt
    from graphquant.survey import Survey

SHOWN = 3
"""Consumers named in a cell; the rest are counted."""

TOLD = 20
"""How many changes and conflicts are told."""

PARAMS = ("dtype", "scale", "zero", "range")
"""The columns that `_params` fills."""

UNFOLDED = 10_000
"""Columns of an output that is no terminal: a line per site, for grep and diff."""


def plan_view(plan: Plan) -> RenderableType:
    """The plan: preparations, a table of sites for each rule, skips, unused rules."""
    rows = [(site, (listed([str(use) for use in site.uses]), scheme_text(site))) for site in plan.sites]
    parts: list[RenderableType] = [*_steps(plan), *_by_rule(rows, "read by", "scheme"), *_skips(plan.skips)]
    if plan.corrections:
        parts.append(plain(f"Corrected, where data shows a gain: {', '.join(plan.corrections)}"))
    from graphquant.view.unused import unused_view

    parts += unused_view(plan, shipped=True)
    uses = sum(len(site.uses) for site in plan.sites)
    parts.append(
        plain(
            f"{counted(len(plan.sites), 'site')}, {counted(uses, 'use')} rerouted,"
            f" {len(plan.skips)} left with a reason.",
            style="bold",
        )
    )
    return Group(*parts)


def result_view(result: Result, output: Path | None) -> RenderableType:
    """What `insert` did: for each rule a table, with scale, zero point and range of each site."""
    rows = [(done.site, _params(done.params)) for done in result.inserted]
    parts: list[RenderableType] = [*_steps(result.plan), *_by_rule(rows, *PARAMS), *_skips(result.skips)]
    parts += _corrected(result.corrected)
    parts += _told("changed", result.changes) + _told("conflict", result.conflicts)
    if result.ranges is not None:
        parts += _ranges(result.ranges)
    if result.random:
        parts.append(plain("The ranges come from RANDOM data: use the model for tests only.", style="bold red"))
    if result.stats is not None:
        parts += incomplete(result.stats)
    parts += _limiting(result)
    if not result.inserted and any(skip.reason == PAIR for skip in result.skips):
        said = "The model is quantized already and stays as it is. --requantize takes its pairs out and places others."
        parts.append(plain(said, style="yellow"))
    from graphquant.view.unused import unused_view

    parts += unused_view(result.plan, shipped=False)
    if result.timed is not None:
        from graphquant.view.measured import timed_view

        parts += timed_view(result.timed)
    if result.inserted or (result.searched is not None and not (result.timed is not None and result.timed.floats)):
        from graphquant.view.measured import check_view, fitted_view, search_view

        parts += fitted_view(result.fitted) + search_view(result.searched)
        parts += check_view(result.check) if result.inserted else []
    uses = sum(len(done.site.uses) for done in result.inserted)
    stored = sum(done.folded for done in result.inserted)
    said = f"{counted(len(result.inserted), 'site')} inserted" + (
        f", {stored} of them stored as integers" if stored else ""
    )
    said += f", {counted(uses, 'use')} rerouted"
    said += f", calibrated on {counted(result.samples, 'sample')}" if result.samples else ""
    said += f" (statistics of {result.statistics})" if result.statistics else ""
    parts.append(
        plain(f"{said}." + (f" Written to {output}" if output else " Nothing written (dry run)."), style="bold")
    )
    return Group(*parts)


def _limiting(result: Result) -> list[RenderableType]:
    """A line on the tensor that loses most, where that is much."""
    worst = next(iter(result.losses), None)
    if worst is None or worst.sqnr >= LOW:
        return []
    said = (
        f"limits: {worst.tensor} loses most of the quantized activations; by estimate its signal to noise is"
        f" {worst.sqnr:.1f} dB. To leave its op float: --exclude {shlex.quote(worst.tensor.op)}"
    )
    return [plain(said, style="yellow")]


def _told(what: str, found: Sequence[object]) -> list[RenderableType]:
    """What the solver did or could not do, a line each."""
    lines: list[RenderableType] = [plain(f"{what}: {one}", style="yellow") for one in found[:TOLD]]
    if len(found) > TOLD:
        lines.append(plain(f"{what}: {len(found) - TOLD} more, which --report has", style="yellow"))
    return lines


def stats_view(stats: Stats, output: Path) -> RenderableType:
    """What `calibrate` gathered."""
    parts: list[RenderableType] = []
    reasons: dict[str, list[str]] = {}
    for tensor in stats.targets:
        reasons.setdefault(stats.unseen(tensor), []).append(str(tensor))
    parts += [plain(f"left: {listed(names)}: {why}", style="yellow") for why, names in reasons.items() if why]
    if stats.random:
        parts.append(plain("The data is RANDOM: use the statistics for tests only.", style="bold red"))
    parts += incomplete(stats)
    of = f", of {counted(len(stats.runs), 'set')} of data" if len(stats.runs) > 1 else ""
    said = f"{counted(len(reasons.get('', ())), 'tensor')} observed on {counted(stats.samples, 'sample')}{of}"
    parts.append(plain(f"{said} in {counted(stats.blocks, 'block')}. Written to {output}", style="bold"))
    return Group(*parts)


def incomplete(stats: Stats) -> list[RenderableType]:
    """A line where not all samples were run."""
    left = [run for run in stats.runs if not run.complete]
    if len(left) == 1 and not stats.samples:
        blocks = f"{counted(left[0].blocks, 'block')} of {counted(left[0].block, 'sample')}"
        said = f"The data has {blocks}; this part has none of them. calibrate --merge adds other parts."
        return [plain(said, style="yellow")]
    done, all_ = sum(run.samples_done for run in left), sum(run.samples for run in left)
    said = f"The statistics are of {done} of {all_} samples of the data. calibrate --merge adds other parts."
    return [plain(said, style="yellow")] if left else []


def receipt_view(receipt: Receipt) -> RenderableType:
    """Each planned tensor beside what TFLite's runtime has, and the ops that stayed float."""
    table = Listing("tensor", "index", "scale", "zero", "runtime", "verdict")
    for line in receipt.lines:
        planned, found = ("" if pair is None else _span(pair[0], ".6g", ".4g") for pair in (line.planned, line.found))
        zeros = "" if line.planned is None else _span(line.planned[1], "d")
        zeros += "" if line.found is None else f" ({_span(line.found[1], 'd')})"
        index = "" if line.index is None else str(line.index)
        table.add_row(str(line.tensor), index, planned, zeros, found, line.problem or "equal")
    wrong = sum(bool(line.problem) for line in receipt.lines)
    parts: list[RenderableType] = [plain("Receipt: the plan beside TFLite's runtime", style="bold"), table]
    parts += [plain(f"float: {one.op} ({one.type}): {one.reason}", style="yellow") for one in receipt.floats]
    said = f"{len(receipt.lines) - wrong} of {counted(len(receipt.lines), 'planned tensor')} are as planned"
    parts.append(plain(f"{said}, {len(receipt.floats)} of {counted(receipt.ops, 'op')} stayed float.", style="bold"))
    return Group(*parts)


def _ranges(ranges: Ranges) -> list[RenderableType]:
    """What a TFLite file's scales were used for."""
    exact = sum(one.exact for one in ranges.given)
    head = f"{counted(len(ranges.given), 'tensor')} got their range from {ranges.path or 'the TFLite model'}"
    lines = [plain(f"{head}, {exact} of them its very scale and zero point.")]
    if ranges.unused:
        lines.append(plain(f"in that file alone: {listed(ranges.unused)}", style="yellow"))
    if ranges.missing:
        lines.append(plain(f"not in that file: {listed([str(one) for one in ranges.missing])}", style="yellow"))
    return [*lines]


def survey_view(found: Survey) -> RenderableType:
    """What is in a model, with each quantization op's scale."""
    model = found.model
    head = f"{model.path or 'model'}: {model.format}" + (f", opset {model.opset}" if model.opset else "")
    ops = sum(found.kinds.values())
    graphs = len(model.graphs) - len(found.idle) - len(model.saved)
    lines: list[RenderableType] = [plain(f"{head}, {counted(ops, 'op')} in {counted(graphs, 'graph')}", style="bold")]
    for title, names in (("inputs ", model.main.inputs), ("outputs", model.main.outputs)):
        shown = [_signature(model, name, title.strip() == "outputs") for name in names]
        lines.append(plain(f"  {title} {listed(shown, 6)}"))
    top = list(found.kinds.items())
    lines.append(plain(f"  ops     {listed([f'{count} {kind}' for kind, count in top], 12)}"))
    if found.idle:
        lines.append(
            plain(
                f"  {counted(len(found.idle), 'function')} not listed: nothing in the main graph reaches them.",
                style="dim",
            )
        )
    if found.copies:
        copies = list(dict.fromkeys(one.graph for one in found.copies))
        lines.append(plain(f"  {counted(len(copies), 'saved function')} left alone: {listed(copies)}", style="yellow"))
        lines.append(plain(f"    {found.copies[0].op}: {found.copies[0].reason}", style="dim"))
    tables: dict[str, Listing] = {}
    for reading in found.readings:
        table = tables.setdefault(reading.type, Listing("tensor", *PARAMS))
        values = ("?", "at run time", "", "") if reading.params is None else _params(reading.params)
        if reading.learned:
            values = (*values[:3], f"{values[3]} learned".strip())
        table.add_row(str(reading.tensor), *values)
    for kind, table in tables.items():
        lines += [plain(f"{table.row_count} {kind}", style="bold"), table]
    lines += _stored(found)
    lines += _coverage(found)
    return Group(*lines)


def _stored(found: Survey) -> list[RenderableType]:
    """A table for each graph's tensors, which keep their scales themselves."""
    tables: dict[str, Listing] = {}
    for one in found.tensors:
        table = tables.setdefault(one.tensor.graph, Listing("tensor", "index", *PARAMS, "shape"))
        stored, output = one.stored, one.output
        shape = stored.sizes if output.shape is None else output.shape
        table.add_row(
            output.name,
            str(stored.index),
            (output.dtype or "?") + (f"[{stored.scale.size}] axis {stored.axis}" if stored.scale.size > 1 else ""),
            _span(stored.scale, ".6g", ".4g") if stored.scale.size else stored.details,
            _span(stored.zero_point, "d") if stored.zero_point.size else "",
            f"[{stored.low.min():.4g}, {stored.high.max():.4g}]" if stored.low.size and stored.high.size else "",
            _sizes(shape),
        )
    lines: list[RenderableType] = []
    for graph, table in tables.items():
        where = f" in {graph}" if graph else ""
        lines += [plain(f"{counted(table.row_count, 'tensor')}{where}", style="bold"), table]
    return lines


def console(*, stderr: bool = False, file: IO[str] | None = None) -> Console:
    """A console that folds at a terminal's width, or at that in COLUMNS, and else nowhere.

    Names like [red] and :x: are shown as they are.
    """
    make = partial(Console, stderr=stderr, file=file, highlight=False, markup=False, emoji=False)
    made = make()
    if file is None and (made.is_terminal or os.environ.get("COLUMNS", "").isdecimal()):
        return made
    return make(width=UNFOLDED, color_system=None)


def text_of(view: RenderableType, *, folded: bool = False) -> str:
    """A view as plain text, without the spaces that fill a table's lines; `folded` as `console` says."""
    lines = StringIO()
    width = console().width if folded else UNFOLDED
    made = Console(file=lines, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    made.print(view, crop=False)
    return "".join(f"{line.rstrip()}\n" for line in lines.getvalue().splitlines())


def plain(what: str, style: str = "") -> Text:
    """A line; names out of a model or a rule file cannot act on the terminal."""
    return Text(printable(what), style=style)


def _by_rule(rows: Sequence[tuple[Site, Sequence[str]]], *columns: str) -> list[RenderableType]:
    """A table for each rule, under its name and reason, in the order in which the rules first appear."""
    tables: dict[str, Listing] = {}
    reasons: dict[str, str] = {}
    for site, cells in rows:
        tables.setdefault(site.rule, Listing("tensor", *columns)).add_row(str(site.tensor), *cells)
        reasons.setdefault(site.rule, " ".join(site.why.split()))
    parts: list[RenderableType] = []
    for rule, table in tables.items():
        head = plain(f"{table.row_count} by rule {rule}", style="bold")
        head.append(f": {printable(reasons[rule])}" if reasons[rule] else "", style="not bold")
        parts += [head, table, ""]
    return parts


def _steps(plan: Plan) -> list[RenderableType]:
    gathered: dict[tuple[str, str, bool], list[str]] = {}
    for step in plan.steps:
        whole = step.target == "model"
        gathered.setdefault((step.step, step.why, whole), []).append(step.detail if whole else step.target)
    lines: list[RenderableType] = []
    for (name, why, whole), targets in gathered.items():
        head = name if whole else f"{name}, {counted(len(targets), 'op')}"
        lines.append(plain(f"prepared: {head}: {listed(targets)}{f'; {why}' if why else ''}"))
    return lines


def _corrected(told: Sequence[Corrected]) -> list[RenderableType]:
    """A line for each correction that was made, and one for each reason why ops were left."""
    made: dict[str, list[str]] = {}
    left: dict[tuple[str, str], list[str]] = {}
    for one in told:
        if one.done:
            made.setdefault(one.correction, []).append(one.target)
        else:
            left.setdefault((one.correction, one.detail), []).append(one.target)
    lines: list[RenderableType] = [
        plain(f"corrected: {name}, {counted(len(ops), 'op')}: {listed(ops)}") for name, ops in made.items()
    ]
    lines += [
        plain(f"not corrected: {name}{'' if ops == ['model'] else ', ' + listed(ops)}: {reason}")
        for (name, reason), ops in left.items()
    ]
    return lines


def _skips(skips: Sequence[Skip]) -> list[RenderableType]:
    """Skips gathered by reason, so that many alike are one line."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for skip in skips:
        reasons.setdefault((skip.rule, skip.reason), []).append(str(skip.tensor))
    return [
        plain(f"left: {listed(tensors)}: {reason} (rule {rule})", style="yellow" if rule else "")
        for (rule, reason), tensors in reasons.items()
    ]


def _coverage(found: Survey) -> list[RenderableType]:
    if not found.coverage:
        return []
    done = sum(one.quantized for one in found.coverage)
    lines: list[RenderableType] = [
        plain(f"{done} of {len(found.coverage)} ops that multiply read quantized tensors only.", style="bold")
    ]
    if done:
        lines += [
            plain(f"  float: {named(one.graph, one.op)} ({one.kind}): {one.reason}", style="yellow")
            for one in found.coverage
            if not one.quantized
        ]
    return lines


def scheme_text(site: Site) -> str:
    """How a site is quantized: type, granularity and where its range comes from."""
    scheme = site.scheme
    per = f", axis {site.axis}" if site.axis is not None else ""
    per += f" in blocks of {scheme.block_size}" if scheme.block_size is not None else ""
    same = (site.twin,) if site.twin is not None else site.tie
    how = "dynamic" if scheme.range == "dynamic" else scheme.observe.name
    how += f", {scheme.range}" if scheme.range in {"given", "learned"} else ""
    if same:
        how = f"scale of {listed([str(use) for use in same], 1)}"
    return f"{scheme.type.name} {scheme.zero}{per}, {how}"


def _params(params: QParams | Dynamic) -> tuple[str, str, str, str]:
    if isinstance(params, Dynamic):
        return params.type.name, "dynamic", "", ""
    dtype = params.type.name + (f"[{params.scale.size}]" if params.axis is not None else "")
    dtype += f" by {params.block}" if params.block is not None else ""
    zero = _span(params.zero_point, "d")
    low, high = float(params.range.low.min()), float(params.range.high.max())
    around = low < 0 and not params.zero_point.any()  # no file says if the lowest integer, as -128, is left out
    told = f"±{high:.4g}" if around else f"[{low:.4g}, {high:.4g}]"
    return dtype, _span(params.scale, ".6g", ".4g"), zero, told


def _span(values: Array, one: str, two: str = "") -> str:
    """The value, in the form `one`, or the lowest and highest, in the form `two` where that is shorter."""
    low, high = np.min(values).item(), np.max(values).item()
    return format(low, one) if low == high else f"{low:{two or one}}..{high:{two or one}}"


def counted(number: int, what: str) -> str:
    """`2 ops`, `1 op`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], shown: int = SHOWN) -> str:
    """The first names; the rest are counted."""
    more = f", {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _signature(model: object, name: str, is_output: bool) -> str:
    graph = model.main  # type: ignore[attr-defined]  # a Model
    tensor = graph.slots(name)[0] if is_output else None
    known = graph.output(tensor) if tensor is not None else (graph.op(name).outputs or (None,))[0]
    label = name.removeprefix("@")
    if known is None or known.shape is None:
        return label
    return f"{label} {known.dtype}{_sizes(known.shape)}"


def _sizes(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('?' if side is None else str(side) for side in shape)}]"
