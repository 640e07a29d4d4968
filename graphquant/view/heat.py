"""Figures of quantized tensors, to be drawn as heat: columns of numbers by quantization op.

A page knows no more than this. Whoever has another figure of each site adds a column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphquant.view.text import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphquant.comparison import Comparison, OutputFigures
    from graphquant.pairs import Place
    from graphquant.view.badges import Badge


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One figure that each quantized tensor has.

    Attributes:
        name: What it is called, in a few words.
        says: What it is.
        hot: The figure from which on it is as bad as can be.
        cold: The one from which on it does not matter; above `hot` where more is better, else below.
        unit: Its unit.
    """

    name: str
    says: str
    hot: float
    cold: float
    unit: str = "dB"


OWN = Column(name="its own error", says="what this quantization makes against what it gets", hot=10, cold=50)
SO_FAR = Column(name="error so far", says="what it makes against the same tensor of the float model", hot=10, cold=50)
BLAME = Column(name="at the outputs", says="what this quantization alone makes of the worst output", hot=20, cold=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """Figures of the quantized tensors of a model.

    Attributes:
        columns: What the figures are; the first one is shown first.
        of: For quantization ops, by graph and name, a figure for each column: infinite where there is no error at all,
            None where it is not known.
        notes: Why a figure is not known.
        says: Lines on the whole of it, at the top of the page.
    """

    columns: tuple[Column, ...]
    of: Mapping[Place, Sequence[float | None]]
    notes: Mapping[Place, str] = field(default_factory=dict)
    says: tuple[str, ...] = ()


def of_comparison(found: Comparison) -> Heat:
    """What `compare` found of each quantized tensor."""
    blamed = any(one.blame is not None for one in found.sites)
    return Heat(
        columns=(BLAME, OWN, SO_FAR) if blamed else (OWN, SO_FAR),
        of={(one.graph, one.op): (*([one.blame] if blamed else []), one.local, one.accumulated) for one in found.sites},
        notes={(one.graph, one.op): one.note for one in found.sites if one.note},
        says=(f"Over {counted(found.samples, 'sample')}:", *map(_output, found.outputs)),
    )


def heat_data(heat: Heat, badges: Sequence[Badge]) -> dict[str, Any]:
    """The figures as data of the page: those that are not known as null, no error at all as "equal"."""
    found = {number: heat.of[badge.place] for number, badge in enumerate(badges) if badge.place in heat.of}
    return {
        "columns": [
            {"name": one.name, "says": one.says, "hot": one.hot, "cold": one.cold, "unit": one.unit}
            for one in heat.columns
        ],
        "of": {number: [_figure(one) for one in figures] for number, figures in found.items()},
        "notes": {number: heat.notes[badge.place] for number, badge in enumerate(badges) if badge.place in heat.notes},
        "says": list(heat.says),
    }


def _figure(value: float | None) -> float | str | None:
    if value is None or math.isnan(value):
        return None
    return {math.inf: "equal", -math.inf: "none"}.get(value, round(value, 3) if math.isfinite(value) else None)


def _output(one: OutputFigures) -> str:
    """An output's figures in a line."""
    if one.problem:
        return f"{one.name}: {one.problem}"
    said = [f"{one.sqnr:.2f} dB" if one.sqnr is not None and math.isfinite(one.sqnr) else ""]
    said.append("equal" if not one.largest else "")
    said.append(f"{100 * one.agreement:.2f}% agree" if one.agreement is not None else "")
    return f"{one.name}: {', '.join(filter(None, said)) or 'compared'}"


__all__ = ["Column", "Heat", "heat_data", "of_comparison"]
