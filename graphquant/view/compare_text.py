"""How far two models are apart, as tables and as JSON data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from graphquant.view.data import SCHEMA
from graphquant.view.listing import Listing
from graphquant.view.text import counted, plain

if TYPE_CHECKING:
    from graphquant.comparison import Comparison, OutputFigures, SiteFigures


def comparison_view(found: Comparison, *, top: int) -> RenderableType:
    """The outputs, the `top` quantized tensors with the largest errors of their own, and the worst output's figures."""
    parts: list[RenderableType] = [_outputs(found)]
    parts += [plain(f"{one.name}: {one.problem}", "bold red") for one in found.outputs if one.problem]
    why = f"nothing to compare: it was empty for all {counted(found.samples, 'sample')}"
    parts += [plain(f"{one.name}: {why}", "yellow") for one in found.outputs if one.empty]
    if found.sites:
        parts += ["", _sites(found.sites[:top])]
        left = len(found.sites) - top
        parts += [Text(f"{left} more with less; --top 0 shows all.", style="dim")] if left > 0 else []
    if found.random:
        parts.append(Text("The data is RANDOM: the figures say little of real data.", style="bold red"))
    worst = "the worst output has no SQNR" if found.sqnr == -math.inf else f"worst output {_db(found.sqnr)} dB"
    said = [worst if found.sqnr is not None else ""]
    said.append(f"{_share(found.agreement)} agree" if found.agreement is not None else "")
    figures = ", ".join(filter(None, said)) or ("Nothing compared" if found.nothing else "Compared")
    parts.append(plain(f"{figures}, over {counted(found.samples, 'sample')}.", "bold"))
    return Group(*parts)


def comparison_json(found: Comparison) -> dict[str, Any]:
    """The same as JSON data; decibels are null where there is no error at all, or no figure."""
    return {
        "schema": SCHEMA,
        "samples": found.samples,
        "random": found.random,
        "labels": found.labels or None,
        "sqnr": _finite(found.sqnr),
        "agreement": found.agreement,
        "outputs": [_output_json(one) for one in found.outputs],
        "sites": [_site_json(one) for one in found.sites],
    }


def _output_json(one: OutputFigures) -> dict[str, Any]:
    return {
        "name": one.name,
        "other": one.other,
        "equal": not one.problem and not one.empty and one.largest == 0,
        "sqnr": _finite(one.sqnr),
        "cosine": _finite(one.cosine),
        "largest_difference": _finite(one.largest),
        "agreement": one.agreement,
        "rows": one.rows,
        "values": one.values,
        "accuracy": None if one.accuracy is None else {"float": one.accuracy[0], "quantized": one.accuracy[1]},
        "problem": one.problem or None,
    }


def _site_json(one: SiteFigures) -> dict[str, Any]:
    return {
        "graph": one.graph,
        "op": one.op,
        "tensor": one.tensor,
        "rule": one.rule or None,
        "parameter": one.parameter,
        "local": _finite(one.local),
        "accumulated": _finite(one.accumulated),
        "blame": _finite(one.blame),
        "exact": one.local == math.inf,
        "note": one.note or None,
    }


def _outputs(found: Comparison) -> Listing:
    with_accuracy = any(one.accuracy for one in found.outputs)
    names = ["output", "SQNR dB", "cosine", "max diff", "agree", *(["accuracy"] if with_accuracy else [])]
    table = Listing(*names, right=names)
    for one in found.outputs:
        name = one.name if one.name == one.other else f"{one.name} = {one.other}"
        cells = [name, _db(one.sqnr), "" if one.cosine is None else f"{one.cosine:.6f}"]
        cells.append("" if one.empty else f"{one.largest:.4g}")
        cells.append("" if one.agreement is None else _share(one.agreement))
        if with_accuracy:
            cells.append("" if one.accuracy is None else " to ".join(map(_share, one.accuracy)))
        table.add_row(*cells)
    return table


def _sites(sites: tuple[SiteFigures, ...]) -> Listing:
    blamed = any(one.blame is not None for one in sites)
    figures = ["its own dB", "so far dB", *(["at outputs dB"] if blamed else [])]
    table = Listing("quantized tensor", "rule", *figures, right=figures)
    for one in sites:
        cells = [one.tensor, one.rule, _db(one.local), _db(one.accumulated), *([_db(one.blame)] if blamed else [])]
        table.add_row(*cells, note=one.note)
    return table


def _db(value: float | None) -> str:
    if value is None:
        return ""
    return {math.inf: "equal", -math.inf: "none"}.get(value, f"{value:.2f}")


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}%"


def _finite(value: float | None) -> float | None:
    """A figure to six digits: TensorFlow's runs differ from each other in the ninth."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
